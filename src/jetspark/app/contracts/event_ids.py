"""Ids of new events: UUID version 7, so that they sort by time."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["NewIds"]

# Of the 48 that the last group of digits has, so that a million more never overflows it.
_LOW_BITS = 47


class NewIds:
    """Makes ids that grow: by the millisecond, and within one by a counter that starts at a random number.

    ``random_bits(n)`` returns n random bits. A forked process starts a counter of its own, so that it does not repeat
    its parent's ids.
    """

    __slots__ = ("_bits", "_head", "_low", "_millisecond", "_pid")

    def __init__(self, random_bits: Callable[[int], int]) -> None:
        self._bits = random_bits
        self._millisecond = -1
        self._pid = -1
        self._low = 0
        self._head = ""

    def new(self, now_ns: int) -> str:
        """The next id; ``now_ns`` is the time since 1970, in nanoseconds."""
        return self.several(now_ns, 1)[0]

    def several(self, now_ns: int, count: int) -> list[str]:
        """The next ids, at most a million of them, all of the same millisecond."""
        millisecond = now_ns // 1_000_000
        if millisecond > self._millisecond or self._low >> _LOW_BITS or self._pid != os.getpid():
            # A full counter, or a clock that went back, advances to the millisecond after the last one used.
            self._millisecond, self._pid = max(millisecond, self._millisecond + 1), os.getpid()
            # One bit less than there is room for, so that the counter has as much to grow.
            self._low = self._bits(_LOW_BITS - 1)
            time = self._millisecond & (1 << 48) - 1
            random = self._bits(26)
            self._head = f"{time >> 16:08x}-{time & 0xFFFF:04x}-7{random >> 14:03x}-{random & 0x3FFF | 0x8000:04x}-"
        first, self._low = self._low, self._low + count
        head = self._head
        return [f"{head}{low:012x}" for low in range(first, self._low)]
