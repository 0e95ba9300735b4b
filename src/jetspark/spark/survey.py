"""How many messages are between two sequences, where a stream has fewer messages than sequences. Pure.

A compacted stream, or one of which much was deleted, has messages here and there. Cut by sequences, a thousand of them
make as many tasks and micro-batches as three million would. So where gaps could make a difference the stream is asked
how many messages it has from some sequences on (a :data:`Count`), and batches and partitions are cut by that.

What is asked is bounded (:data:`MAX_LOOKS`), and no limit depends on where the messages are: a stretch of sequences
has at most as many messages, so a batch that ends early enough is never too large. Messages that come between two looks
make stretches look fuller than they are, because the end is counted before the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["MAX_LOOKS", "Count", "Segments", "Survey"]

Count: TypeAlias = Callable[[str, int], int]
"""How many messages a stream has, from a sequence on."""

Segments: TypeAlias = tuple[tuple[int, int], ...]
"""A stretch of sequences, as ends of parts of it, and into how many partitions of the same length each is cut."""

# Questions about one stream for one plan. A bisection of a billion sequences takes thirty.
MAX_LOOKS = 40


class Survey:
    """What is known of the messages from ``begin`` up to ``end``, without it."""

    def __init__(self, count: Callable[[int], int], begin: int, end: int) -> None:
        self._count, self.begin, self.end = count, begin, end
        self._known: dict[int, int] = {}
        self._looks = 0
        self.messages = self._between(begin, end)

    def end_after(self, allowed: int) -> int:
        """The end of a stretch from the beginning on that has at most so many messages, and at least half of them.

        Where the looks are used up it may have fewer, but it has as many sequences.
        """
        if allowed >= self.messages:
            return self.end
        low, found = self.begin, 0
        high, above = self.end, self.messages
        while found < allowed / 2 and high - low > allowed - found and self._looks < MAX_LOOKS:
            # First where as many messages would be if they were spread evenly, then in the middle, in turns.
            share = (0.75 * allowed - found) / max(1, above - found) if self._looks % 2 == 0 else 0.5
            probe = min(high - 1, max(low + 1, low + int((high - low) * min(1.0, share))))
            messages = self._between(self.begin, probe)
            if messages <= allowed:
                low, found = probe, messages
            else:
                high, above = probe, messages
        if low > self.begin:
            # The end was counted before the beginning: what has come in the meantime makes it no smaller.
            del self._known[self.begin]
            found = self._between(self.begin, low)
            if found > allowed:
                low, found = self.begin, 0
        return min(self.end, low + allowed - found)

    def segments(self, end: int, target: int) -> Segments:
        """The stretch up to ``end`` cut into partitions of at most so many messages, and of few messages as few."""
        segments: list[tuple[int, int]] = []
        room = -1  # messages that the last partition may still take; below 0 it is full, or none is there
        for until, messages, is_dense in self._stretches(self.begin, end, target):
            if messages <= room:
                segments[-1] = (until, 1)
                room -= messages
                continue
            begin = segments[-1][0] if segments else self.begin
            parts = max(1, math.ceil((until - begin if is_dense else messages) / target))
            segments.append((until, parts))
            room = target - messages if parts == 1 else -1
        return tuple(segments)

    def _stretches(self, begin: int, end: int, target: int) -> list[tuple[int, int, bool]]:
        """Ends of stretches, their messages, and whether they have no large gaps."""
        found: list[tuple[int, int, bool]] = []
        left = [(begin, end)]
        while left:
            first, last = left.pop()
            sequences = last - first
            messages = sequences if sequences <= target else self._between(first, last)
            is_dense = 2 * messages >= sequences
            if messages <= target or is_dense or self._looks >= MAX_LOOKS:
                found.append((last, messages, is_dense))
            else:
                middle = (first + last) // 2
                left += [(middle, last), (first, middle)]
        return found

    def _between(self, begin: int, end: int) -> int:
        behind = self._from(end)
        return max(0, min(end - begin, self._from(begin) - behind))

    def _from(self, sequence: int) -> int:
        if sequence not in self._known:
            self._looks += 1
            self._known[sequence] = self._count(sequence)
        return self._known[sequence]
