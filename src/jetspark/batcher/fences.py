"""Fences: what a manual flush waits for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["Fence", "Fences"]


class Fence:
    """Everything accepted before it, as a manual flush waits for it; ``wake`` is called when all of it is settled."""

    __slots__ = ("end", "failed", "first", "is_done", "ok", "wake")

    def __init__(self, first: int, end: int, wake: Callable[[], None]) -> None:
        self.first, self.end, self.wake = first, end, wake
        self.ok = self.failed = 0
        self.is_done = False


class Fences:
    """Those that somebody waits for. Every step may be done again after an interrupt: a fence goes last of all."""

    def __init__(self) -> None:
        self._fences: list[Fence] = []

    def __len__(self) -> int:
        return len(self._fences)

    def __iter__(self) -> Iterator[Fence]:
        return iter(self._fences)

    def add(self, fence: Fence) -> None:
        self._fences.append(fence)

    def forget(self, fence: Fence) -> None:
        """Nobody waits for it any more; right at any time."""
        if fence in self._fences:
            self._fences.remove(fence)

    def count(self, first: int, end: int, error: BaseException | None) -> None:
        """The items from position ``first`` to before ``end`` are settled, well if there is no error."""
        for fence in self._fences:
            count = max(min(end, fence.end) - max(first, fence.first), 0)
            if error is None:
                fence.ok += count
            else:
                fence.failed += count

    def complete(self, completed_to: int) -> None:
        """Everything before this position is settled: those that wait for no more are done."""
        for fence in [each for each in self._fences if each.end <= completed_to]:
            fence.is_done = True
            fence.wake()
            self._fences.remove(fence)

    def release(self) -> None:
        """Nothing more will be settled: wake all, none of which is done."""
        while self._fences:
            self._fences[0].wake()
            del self._fences[0]
