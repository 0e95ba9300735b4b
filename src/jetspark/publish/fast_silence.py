"""What a fast batch makes of a server that says nothing: when to ask it, and when to give up. Pure.

Three reasons to send a ping, which brings the last ack again and reports a lost tail as a gap: a message was not taken
(``HOLE_PING_S``), the server owes an answer (``ping_after_s``), or the batch is idle and would be forgotten
(``keep_alive_s``). After ``timeout`` without progress or a message of ours, the batch is given up.
"""

from __future__ import annotations

import math

from jetspark.publish.fast_options import FastBatchOptions

__all__ = ["HOLE_PING_S", "FastSilence"]

# A message the server has not taken for the moment (no leader, too many requests) is looked into after this long.
HOLE_PING_S = 0.1


class FastSilence:
    """The clock of one batch. ``sent_at`` arguments are when its last message was sent."""

    def __init__(self, options: FastBatchOptions) -> None:
        self._options = options
        self._moved_at = self._pinged_at = 0.0
        self._look_at: float | None = None
        """When to look into a message that the server has not taken."""

    def on_progress(self, now: float) -> None:
        """The server is done with more than before, or has opened the batch."""
        self._moved_at = now

    def on_hole(self, now: float) -> None:
        """A message did not reach the batch. The server notices with the next one; if there is none, with a ping."""
        if self._look_at is None:
            self._look_at = now + HOLE_PING_S

    def on_ping(self, now: float) -> None:
        """The server is asked."""
        self._look_at = None
        self._pinged_at = now

    def begin_again(self) -> None:
        """There is no batch to ask about."""
        self._look_at = None

    def gives_up_at(self, sent_at: float) -> float:
        """When to give up, if the server is to act."""
        return max(self._moved_at, sent_at) + self._options.timeout

    def next_deadline(self, sent_at: float, *, is_waiting: bool, is_connected: bool) -> float | None:
        """When to ask, or to give up; ``is_waiting`` if the server is to act next, and not the caller."""
        look_at = self._look_at or math.inf
        last_sent_at = max(sent_at, self._pinged_at)
        if not is_waiting:  # the caller is to act; the server only must not forget the batch
            return min(last_sent_at + self._options.keep_alive_s, look_at) if is_connected else None
        if not is_connected:  # nobody could be asked, but time goes by
            return self.gives_up_at(sent_at)
        ask_at = max(self._moved_at, last_sent_at) + self._options.ping_after_s
        return min(self.gives_up_at(sent_at), ask_at, look_at)
