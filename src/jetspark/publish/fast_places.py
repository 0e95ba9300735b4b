"""Where the messages of a fast publisher are, between being accepted and being published. Pure.

Every accepted message has a position, counted from 1, and is in one of four places, in this order: published, claimed,
sent, backlog. A message goes on to the place before its own, or back into the backlog, in front of those behind it.

Invariant: an interrupt may come between any two calls, and finds each message in one place, or in two when it has just
been published; never in none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter

from jetspark.publish.outgoing import Item, data_of

__all__ = ["KEPT_OVERHEAD_BYTES", "FastPlaces", "has_id"]

# What a kept message costs beside its payload: the tuple, the strings, its place in a deque.
KEPT_OVERHEAD_BYTES = 200


class FastPlaces:
    """The messages of one publisher."""

    def __init__(self) -> None:
        self.published = 0
        """All up to this position are stored, or were handed to ``on_refused``."""
        self.claimed: deque[Item] = deque()
        """Acknowledged, but perhaps as duplicates of what a leader proposed and lost."""
        self.sent: deque[Item] = deque()
        """In the present batch, and not acknowledged."""
        self.backlog: deque[Item] = deque()
        self.pending_bytes = 0

    @property
    def accepted(self) -> int:
        """Position of the last message accepted. Not a number of its own, which an interrupt could leave behind."""
        return self.published + self.pending

    @property
    def pending(self) -> int:
        """Accepted and not known to be stored."""
        return len(self.claimed) + len(self.sent) + len(self.backlog)

    @property
    def sent_to(self) -> int:
        """The position of the last message that is sent, or was."""
        return self.published + len(self.claimed) + len(self.sent)

    def unpublished(self) -> list[Item]:
        """What is accepted and not known to be stored, in order."""
        return [*self.claimed, *self.sent, *self.backlog]

    def accept(self, items: Sequence[Item]) -> None:
        size = _kept_bytes(items)
        self.backlog.extend(items)
        self.pending_bytes += size

    def send(self, count: int) -> None:
        """The first of the backlog are sent. One call into C, so an interrupt finds each of them in one place."""
        self.sent.extend(islice(iter(self.backlog.popleft, None), count))

    def claim(self, count: int) -> list[Item]:
        """The first of those sent are acknowledged; returns them."""
        part = list(islice(self.sent, count))
        self.claimed.extend(part)
        _drop(self.sent, count)
        return part

    def publish(self, source: deque[Item], count: int) -> None:
        """The first of ``source``, which are the first of those not published, are stored.

        They are counted before they are forgotten: an interrupt may leave some in both, never in neither.
        """
        self.pending_bytes -= _kept_bytes(list(islice(source, count)))
        self.published += count
        _drop(source, count)

    def send_again(self, source: deque[Item]) -> None:
        """All of ``source``, which are those before the backlog, go back into it."""
        self.backlog.extendleft(reversed(source))
        source.clear()


_block_of: Callable[[Item], bytes] = itemgetter(2)


def _kept_bytes(items: Sequence[Item]) -> int:
    """What kept messages count for in ``max_pending_bytes``."""
    size = KEPT_OVERHEAD_BYTES * len(items) + sum(map(len, map(data_of, items)))
    width = sum(map(len, items))
    if width == 3 * len(items):
        size += sum(map(len, map(_block_of, items)))
    elif width > 2 * len(items):  # some have headers
        size += sum(len(item[2]) for item in items if len(item) == 3 and isinstance(item[2], bytes))
    return size


def has_id(item: Item) -> bool:
    """Whether the stream can recognise the message."""
    return len(item) == 3 and isinstance(item[2], bytes) and b"\r\nNats-Msg-Id:" in item[2]


def _drop(items: deque[Item], count: int) -> None:
    """Remove the first ones, in one call into C, as an interrupt sees it."""
    deque(islice(iter(items.popleft, None), count), maxlen=0)
