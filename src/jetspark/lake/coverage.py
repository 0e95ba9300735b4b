"""Sequences as ranges, and the proof that the files of a table account for each of them. Pure.

A sequence that a table covers has a row, or is listed in the footer of its file as deleted or lost. Everything is
computed on ranges, because a footer or a file has few of them, however many sequences there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jetspark.lake import arrow_functions as pc

__all__ = ["Account", "account", "common", "missing_in", "repeated", "runs", "text", "union"]


def union(ranges: Iterable[range]) -> list[range]:
    """The same sequences as ascending ranges that neither overlap nor touch."""
    found: list[range] = []
    for each in sorted((each for each in ranges if each), key=lambda each: each.start):
        if found and each.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, each.stop))
        else:
            found.append(each)
    return found


def missing_in(begin: int, end: int, present: Iterable[range]) -> list[range]:
    """The sequences of ``[begin, end)`` that are in none of the ranges."""
    found = []
    for each in union(present):
        if each.start > begin:
            found.append(range(begin, min(each.start, end)))
        begin = max(begin, each.stop)
    found.append(range(begin, end))
    return [each for each in found if each]


def common(some: Iterable[range], others: Iterable[range]) -> list[range]:
    """The sequences that both have."""
    return repeated([*union(some), *union(others)])


def repeated(ranges: Iterable[range]) -> list[range]:
    """The sequences that are in more than one of the ranges."""
    found, reached = [], 0
    for each in sorted((each for each in ranges if each), key=lambda each: each.start):
        if each.start < reached:
            found.append(range(each.start, min(each.stop, reached)))
        reached = max(reached, each.stop)
    return union(found)


def runs(sequences: Any) -> list[range]:
    """An Arrow array of sequences, in its order, as ranges of consecutive ones."""
    count = len(sequences)
    if not count:
        return []
    steps = pc.subtract(sequences.slice(1), sequences.slice(0, count - 1))
    breaks = pc.indices_nonzero(pc.not_equal(steps, 1)).to_pylist()
    edges = [0, *(at + 1 for at in breaks), count]
    return [range(sequences[a].as_py(), sequences[b - 1].as_py() + 1) for a, b in pairwise(edges)]


def text(ranges: Sequence[range], most: int = 10) -> str:
    """Ranges for a reader: ``5, 8-12 and 3 more ranges``."""
    shown = [str(each.start) if len(each) == 1 else f"{each.start}-{each.stop - 1}" for each in ranges[:most]]
    more = f" and {len(ranges) - most} more ranges" if len(ranges) > most else ""
    return ", ".join(shown) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The faults of a part. In a sound one, each sequence has one row, or a reason for having none."""

    missing: tuple[range, ...] = ()
    """No row, and no reason."""
    doubled: tuple[range, ...] = ()
    """More than one row."""
    contradictory: tuple[range, ...] = ()
    """A row, and listed as deleted or lost."""
    misplaced: tuple[range, ...] = ()
    """A row outside of the part."""

    @property
    def is_sound(self) -> bool:
        return not (self.missing or self.doubled or self.contradictory or self.misplaced)


def account(begin: int, end: int, rows: Sequence[range], gone: Sequence[range]) -> Account:
    """Account for each sequence of ``[begin, end)``.

    Args:
        rows: The sequences that have rows, in any order, repeated as often as they have.
        gone: The sequences that are listed as deleted or lost.
    """
    return Account(
        missing=tuple(missing_in(begin, end, [*rows, *gone])),
        doubled=tuple(repeated(rows)),
        contradictory=tuple(common(rows, gone)),
        misplaced=tuple(
            union(
                range(max(each.start, low), min(each.stop, high))
                for each in rows
                for low, high in ((0, begin), (end, each.stop))
            )
        ),
    )
