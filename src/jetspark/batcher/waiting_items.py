"""The sizes and the acknowledgement callbacks of items that wait in a batcher. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Generic, TypeAlias, TypeVar

from jetspark.errors import ConfigError

__all__ = ["Ack", "WaitingAcks", "WaitingSizes"]

T = TypeVar("T")

Ack: TypeAlias = Callable[[BaseException | None], None]
"""Called once per item: with None when the item is written, else with the error that explains why it may not be."""


class WaitingSizes(Generic[T]):
    """The sizes of waiting items, used only with ``max_batch_bytes``."""

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self.each: list[int] = []
        """In the order of the items. Taking a batch deletes the first ones directly, without a call (interrupts)."""
        self.total = 0
        self._max_bytes, self._size_of = max_bytes, size_of

    @property
    def is_full(self) -> bool:
        """True when the waiting items reach the size of a batch."""
        return self.total >= self._max_bytes

    def add(self, items: Iterable[T]) -> None:
        """Add the sizes of all items, or of none.

        Raises:
            ConfigError: An item is larger than ``max_bytes``.
        """
        sizes = [self._size_of(item) for item in items]
        for size in sizes:
            if not 0 <= size <= self._max_bytes:
                raise ConfigError(
                    f"an item of {size} bytes: expected at most max_batch_bytes={self._max_bytes}; "
                    "make it smaller, or batches larger"
                )
        self.each += sizes
        self.total += sum(sizes)

    def fitting(self, count: int) -> tuple[int, int]:
        """How many of the first ``count`` items fit into a batch (at least one), and their size."""
        total = fitting = 0
        for size in self.each[:count]:
            if total + size > self._max_bytes:
                break
            total += size
            fitting += 1
        return fitting, total

    def trim(self, count: int) -> None:
        """After an interrupt, drop all sizes beyond the first ``count`` items."""
        del self.each[count:]
        self.total = sum(self.each)


class WaitingAcks(deque[tuple[int, Ack]]):
    """The acknowledgement callbacks of waiting items, ordered by position."""

    def before(self, end: int) -> list[Ack]:
        """The callbacks of the items before a position."""
        return [ack for _, ack in takewhile(lambda each: each[0] < end, self)]

    def drop(self, count: int) -> None:
        """Remove the first ``count`` callbacks, which a flush has taken over or which were called."""
        for _ in range(count):
            self.popleft()

    def fail_all(self, error: BaseException) -> None:
        """Call all callbacks with ``error``. After an interrupt one may be called twice, but none is left out."""
        while self:
            self[0][1](error)
            self.popleft()

    def trim(self, first: int, end: int) -> None:
        """After an interrupt, keep only the callbacks of items from ``first`` up to, not including, ``end``."""
        while self and self[0][0] < first:
            self.popleft()
        while self and self[-1][0] >= end:
            self.pop()
