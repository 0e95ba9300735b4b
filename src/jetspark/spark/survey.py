"""Counts messages between sequences of sparse streams, to cut batches and partitions by messages. Pure.

In a compacted stream, or after many deletes, few sequences have messages. Cut by sequences, a thousand messages could
become as many tasks and micro-batches as three million. So where gaps matter the server counts the messages from some
sequences on (a :data:`Count`), and batches and partitions are cut by these counts.

The number of counts is bounded (:data:`MAX_LOOKS`). Limits hold without them: a range of sequences has at most as many
messages, so a batch that ends early enough is never too large. Messages that arrive between two counts make a range
look fuller than it is, because its end is counted before its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["MAX_LOOKS", "Count", "Segments", "Survey"]

Count: TypeAlias = Callable[[str, int], int]
"""Returns the number of messages that a stream has from a sequence on."""

Segments: TypeAlias = tuple[tuple[int, int], ...]
"""A range of sequences in parts: the end of each part, and its number of partitions of equal length."""

# Counts for one stream in one plan. A bisection of a billion sequences takes thirty.
MAX_LOOKS = 40


class Survey:
    """Counts of the messages in ``[begin, end)``."""

    def __init__(self, count: Callable[[int], int], begin: int, end: int) -> None:
        self._count, self.begin, self.end = count, begin, end
        self._known: dict[int, int] = {}
        self._looks = 0
        self.messages = self._between(begin, end)

    def end_after(self, allowed: int) -> int:
        """The end of a range from ``begin`` with at most ``allowed`` messages, and at least half as many.

        When the counts are used up the range may have fewer messages, but it has ``allowed`` sequences.
        """
        if allowed >= self.messages:
            return self.end
        low, found = self.begin, 0
        high, above = self.end, self.messages
        while found < allowed / 2 and high - low > allowed - found and self._looks < MAX_LOOKS:
            # Alternately the expected position for evenly spread messages, and the middle.
            share = (0.75 * allowed - found) / max(1, above - found) if self._looks % 2 == 0 else 0.5
            probe = min(high - 1, max(low + 1, low + int((high - low) * min(1.0, share))))
            messages = self._between(self.begin, probe)
            if messages <= allowed:
                low, found = probe, messages
            else:
                high, above = probe, messages
        if low > self.begin:
            # Count the beginning again after the end, so that messages that arrive in between cannot hide others.
            del self._known[self.begin]
            found = self._between(self.begin, low)
            if found > allowed:
                low, found = self.begin, 0
        return min(self.end, low + allowed - found)

    def segments(self, end: int, target: int) -> Segments:
        """The range up to ``end`` in partitions of at most ``target`` messages; sparse parts are joined."""
        segments: list[tuple[int, int]] = []
        room = -1  # messages that fit into the last partition; -1 if it is full or does not exist
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
        """Parts of the range: end, number of messages, and whether at least half of the sequences have one."""
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
