"""Opening a fast batch, more than once if need be: which refusals of its first message pass, and for how long. Pure.

Two answers say that nothing was stored and that no batch is open. "Too many" (10211, 10167) comes from a stream and
passes; the first message is sent again for ``timeout``. "Nobody listens" (503) means that no stream stores the subject,
that JetStream is off, or that a leader is being elected. Only the last one passes, and it looks like the others, so the
message is sent again for ``wait_for_stream_s``. Once a stream has answered, whatever it said, it can only be an
election, and ``timeout`` holds for a 503, too.
"""

from __future__ import annotations

from jetspark.core.backoff import Backoff
from jetspark.errors import JetStreamUnavailable
from jetspark.publish.fast_options import FastBatchOptions

__all__ = ["REOPEN", "FastOpening"]

REOPEN = Backoff(first_s=0.05, max_s=1.0)


class FastOpening:
    """The attempts to open one batch."""

    def __init__(self, options: FastBatchOptions) -> None:
        self._options = options
        self.reopen_at: float | None = None
        """The server could not open the batch for the moment: when to try again."""
        self.reopen_error: Exception | None = None
        """Why it could not; None as soon as it is tried again, which may succeed."""
        self.is_stream_known = False
        """A stream answered, if only to refuse: "nobody listens" means from now on that it has no leader."""
        self._since: float | None = None
        self._unavailable_since: float | None = None
        self._times = 0

    def begin(self, now: float) -> None:
        """The first message is about to be sent, for the first time or again."""
        if self._since is None:
            self._since = now

    def on_sent(self) -> None:
        """It was sent."""
        self.reopen_at = self.reopen_error = None

    def on_refused(self, error: Exception, now: float) -> bool:
        """Whether there is time for another attempt, and then when: ``reopen_at``."""
        give_up_at = self._give_up_at(error, now)
        if now >= give_up_at:
            return False
        self.reopen_error = error
        self._times += 1
        # The last attempt is made when the time is over, so that all of it is used.
        self.reopen_at = min(now + REOPEN.wait_s(self._times), give_up_at)
        return True

    def _give_up_at(self, error: Exception, now: float) -> float:
        assert self._since is not None
        give_up_at = self._since + self._options.timeout
        if not isinstance(error, JetStreamUnavailable):
            self.is_stream_known = True
            self._unavailable_since = None
            return give_up_at
        if self._unavailable_since is None:
            self._unavailable_since = now
        found_none_at = self._unavailable_since + self._options.wait_for_stream_s
        return max(give_up_at, found_none_at) if self.is_stream_known else found_none_at
