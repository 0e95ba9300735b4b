"""Ids of new events: UUID version 7, so that they sort by time."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["NewIds"]

_LOW_BITS = 62


class NewIds:
    """Makes ids that grow: by the millisecond, and within one by a counter that starts at a random number.

    ``random_bits(n)`` is where chance comes from. A forked process starts a counter of its own, so that it does not
    repeat its parent's ids.
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
        millisecond = now_ns // 1_000_000
        if millisecond > self._millisecond or self._pid != os.getpid():
            self._millisecond, self._pid = millisecond, os.getpid()
            # One bit less than there is room for, so that the counter has as much to grow.
            self._low = self._bits(_LOW_BITS - 1)
            millisecond &= (1 << 48) - 1
            self._head = f"{millisecond >> 16:08x}-{millisecond & 0xFFFF:04x}-7{self._bits(12):03x}-"
        # A clock that goes back does not matter: the last millisecond goes on.
        self._low += 1
        low = self._low | 1 << 63
        return f"{self._head}{low >> 48:04x}-{low & 0xFFFFFFFFFFFF:012x}"
