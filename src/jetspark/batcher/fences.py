"""Fences: the items that a manual flush waits for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["Fence", "Fences"]


class Fence:
    """The items a manual flush waits for; ``wake`` is called when the outcome of all of them is counted."""

    __slots__ = ("end", "failed", "first", "is_done", "ok", "wake")

    def __init__(self, first: int, end: int, wake: Callable[[], None]) -> None:
        self.first, self.end, self.wake = first, end, wake
        self.ok = self.failed = 0
        self.is_done = False


class Fences:
    """The open fences. Every step can be repeated after an interrupt, because a fence is removed last."""

    def __init__(self) -> None:
        self._fences: list[Fence] = []

    def __len__(self) -> int:
        return len(self._fences)

    def __iter__(self) -> Iterator[Fence]:
        return iter(self._fences)

    def add(self, fence: Fence) -> None:
        self._fences.append(fence)

    def forget(self, fence: Fence) -> None:
        """Remove a fence whose caller no longer waits; does nothing if it is gone already."""
        if fence in self._fences:
            self._fences.remove(fence)

    def count(self, first: int, end: int, error: BaseException | None) -> None:
        """Count the items from position ``first`` up to, not including, ``end``: as failed if there is an ``error``."""
        for fence in self._fences:
            count = max(min(end, fence.end) - max(first, fence.first), 0)
            if error is None:
                fence.ok += count
            else:
                fence.failed += count

    def complete(self, completed_to: int) -> None:
        """Complete the fences that lie before this position, now that all earlier items are counted."""
        for fence in [each for each in self._fences if each.end <= completed_to]:
            fence.is_done = True
            fence.wake()
            self._fences.remove(fence)

    def release(self) -> None:
        """Wake all callers without completing their fences, because no further item will be written."""
        while self._fences:
            self._fences[0].wake()
            del self._fences[0]
