"""What a live engine has folded and not stored yet, and when that is to be stored. Pure.

Storing a key takes longer than folding an event into it. So who is far behind waits until a batch is nearly full: a key
that changes often is stored once for many events. Nobody has to wait for it, because what readers ask for is still in
the stream. Who is not stores at once, and as much at a time as came while the batch before was stored.
"""

from __future__ import annotations

from typing import NamedTuple

from jetspark.app.projections.live import LiveOptions

__all__ = ["FAR_BEHIND_WAIT_S", "Backlog", "FoldedAmount"]

# A batch is full before it has to be, so that reading goes on while it is stored.
FULL = 3 / 4
# As many events of a batch that wait in the stream are far behind: at most half a second of folding.
FAR_BEHIND = 1 / 10
# Who is far behind stores this often at least, and so does not begin too far back if it ends.
FAR_BEHIND_WAIT_S = 2.0


class FoldedAmount(NamedTuple):
    """How much was folded since the engine began."""

    events: int = 0
    bytes: int = 0


class Backlog:
    """See the module."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self.folded = self.stored = FoldedAmount()
        self._pending = 0
        """Events that wait in the stream, as the last one has said."""

    def fold(self, events: int, size: int, pending: int) -> None:
        """Events were folded, which have this size in the stream; ``pending`` are waiting there behind them."""
        self.folded = FoldedAmount(self.folded.events + events, self.folded.bytes + size)
        self._pending = pending

    def store(self, folded: FoldedAmount) -> None:
        """What was folded by then is stored."""
        self.stored = folded

    @property
    def has_room(self) -> bool:
        """Whether more may be folded before something is stored."""
        return not self._has(1.0)

    @property
    def is_full(self) -> bool:
        """Whether it is to be stored without waiting for more."""
        return self._has(FULL)

    @property
    def is_far_behind(self) -> bool:
        return self._pending >= FAR_BEHIND * self._options.batch

    def _has(self, part: float) -> bool:
        events, size = self.folded.events - self.stored.events, self.folded.bytes - self.stored.bytes
        return events >= part * self._options.batch or size >= part * self._options.batch_bytes
