"""What comparing keys of a bucket with a fresh fold has found, in parts that add up. Pure.

A part is of some keys, and no other part is of the same ones. Its size does not grow with their number: it counts, adds
digests, and names the first keys in the order of the bucket. So each process that has keys in hand compares them there,
and only parts travel.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, TypeVar

from jetspark.app.replay.contents import Difference, Digest, KeyContent, compare
from jetspark.state.changes import Current

__all__ = ["MAX_NAMED", "ComparedKeys", "ParkedKey"]

MAX_NAMED = 1000
"""Keys that a report names; it counts the others."""


class ParkedKey(NamedTuple):
    """A key that does not go on."""

    key: str
    sequence: int
    """The event that was refused."""
    reason: str


@dataclass(slots=True, kw_only=True)
class ComparedKeys:
    """Some keys of a bucket, and what their events make of them."""

    found: Digest = field(default_factory=Digest)
    """Of the bucket."""
    expected: Digest = field(default_factory=Digest)
    """Of the fresh fold."""
    parked: int = 0
    parked_keys: list[ParkedKey] = field(default_factory=list)
    """The first of them."""
    difference_count: int = 0
    differences: list[Difference] = field(default_factory=list)
    """The first of them."""
    events: int = 0
    unreadable: int = 0

    def take(self, key: str, expected: KeyContent, current: Current, version: int | None) -> None:
        """Compare one more key. Keys come in ascending order; the first ones are named."""
        content = KeyContent.of_current(current)
        self.found.add(key, content)
        self.expected.add(key, expected)
        if content.parked is not None:
            self.parked += 1
            if len(self.parked_keys) < MAX_NAMED:
                self.parked_keys.append(ParkedKey(key, *content.parked))
        difference = compare(key, expected, current, version)
        if difference is not None:
            self.difference_count += 1
            if len(self.differences) < MAX_NAMED:
                self.differences.append(difference)

    def take_equal(self, keys: Iterable[tuple[str, KeyContent]]) -> None:
        """Add keys, in any order, that are what their events make of them, and are not parked."""
        same = Digest()
        for key, content in keys:
            same.add(key, content)
        self.found.include(same)
        self.expected.include(same)

    def include(self, other: ComparedKeys) -> None:
        """Add what was found of other keys."""
        self.found.include(other.found)
        self.expected.include(other.expected)
        self.parked += other.parked
        self.parked_keys = _first(self.parked_keys, other.parked_keys)
        self.difference_count += other.difference_count
        self.differences = _first(self.differences, other.differences)
        self.events += other.events
        self.unreadable += other.unreadable


Named = TypeVar("Named", ParkedKey, Difference)


def _first(one: Iterable[Named], other: Iterable[Named]) -> list[Named]:
    return list(islice(heapq.merge(one, other, key=attrgetter("key")), MAX_NAMED))
