"""What a batcher knows of waiting items beside the items themselves: their sizes, and who is to be told. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Generic, TypeAlias, TypeVar

from jetspark.errors import ConfigError

__all__ = ["Ack", "WaitingAcks", "WaitingSizes"]

T = TypeVar("T")

Ack: TypeAlias = Callable[[BaseException | None], None]
"""Called once, when an item is settled: with None when it is written, else with why it is not known to be."""


class WaitingSizes(Generic[T]):
    """The sizes of waiting items, where bytes count."""

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self.each: list[int] = []
        """In the order of the items. A batch that goes takes the first ones away, and may not call for that."""
        self.total = 0
        self._max_bytes, self._size_of = max_bytes, size_of

    @property
    def is_full(self) -> bool:
        """They are enough for a batch."""
        return self.total >= self._max_bytes

    def add(self, items: Iterable[T]) -> None:
        """All or none.

        Raises:
            ConfigError: One alone is larger than a batch may be.
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
        """After an interrupt: only this many items wait."""
        del self.each[count:]
        self.total = sum(self.each)


class WaitingAcks(deque[tuple[int, Ack]]):
    """Who is to be told of waiting items, by position, in order."""

    def before(self, end: int) -> list[Ack]:
        """Of items before a position."""
        return [ack for _, ack in takewhile(lambda each: each[0] < end, self)]

    def drop(self, count: int) -> None:
        """Forget the first ``count``: a flush has them now, or they were told."""
        for _ in range(count):
            self.popleft()

    def fail_all(self, error: BaseException) -> None:
        """Each is forgotten after it was told: one that was interrupted before is told again, none is left out."""
        while self:
            self[0][1](error)
            self.popleft()

    def trim(self, first: int, end: int) -> None:
        """After an interrupt: only items from ``first`` to before ``end`` wait."""
        while self and self[0][0] < first:
            self.popleft()
        while self and self[-1][0] >= end:
            self.pop()
