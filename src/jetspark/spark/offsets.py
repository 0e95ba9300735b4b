"""Offsets: where a query is in its streams, how far the next batch may go, and how it is cut into partitions. Pure.

The offset of a stream is the sequence of the *next* message, as Kafka has it: an end is exclusive, and what a batch has
read is ``[from, next)``. In a checkpoint it looks like this, always in this order, because Spark compares the text::

    {"version": 2, "step": 50000, "subjects": ["orders.>"],
     "streams": {"ORDERS": {"created": "2026-03-20T10:14:30.000001Z", "from": 1, "next": 1201, "earliest": true}}}

``created`` is the stream's identity: one that was deleted and made again has the same name and other messages, and its
sequences mean nothing to the old offset. ``from`` is where the batch that ends here starts, and ``step`` how many
sequences each of its partitions has. So a batch is told by its end alone, whatever the options say by the time it is
run again. The end of the batch before would be as good a start, but the first batch has none: Spark asks for the
initial offset twice before it, and once more when it is run again, and by then ``latest`` is somewhere else.

Where a stream has far fewer messages than sequences, a batch is cut by messages (:mod:`jetspark.spark.survey`), and
``cuts`` says how: ends, each with the number of partitions of one length up to there.

``earliest`` says that the batch starts where its stream did, whatever that was: what the stream's limits remove before
it is read was promised to nobody. The batch after it starts at a promised place. ``subjects`` are the filters of the
batch: what they leave out is passed over for ever, so other filters are another query. Version 1 had neither: its
starts are promised, and its filters unknown.

Invariants: an offset never goes back; the ranges of a plan cover ``[from, next)`` of every stream, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal, TypeAlias

from jetspark.core.subjects import is_subset
from jetspark.errors import ConfigError, StreamRecreated, StreamWentBack
from jetspark.spark.survey import Count, Segments, Survey
from jetspark.state.scan import Head, Range

__all__ = [
    "Limits",
    "Offset",
    "Sizes",
    "StreamPosition",
    "Where",
    "admit",
    "check_filters",
    "check_unchanged",
    "plan",
    "position_of",
]

Where: TypeAlias = int | Literal["earliest", "latest"]
"""A place in a stream: a sequence, its first message, or behind its last one."""

VERSION = 2
# Streams of one plan whose messages are counted; of more, the others go by sequences.
MAX_SURVEYS = 32
_READABLE = (1, 2)


@dataclass(frozen=True, slots=True)
class StreamPosition:
    created: str
    next: int
    begin: int = 0
    """Where the batch that ends at ``next`` starts, ``from`` in JSON; left out, nothing was read up to here."""
    is_earliest: bool = False
    """``begin`` is wherever the stream begins when it is read; ``earliest`` in JSON."""
    cuts: Segments = ()
    """How the batch is cut; by the offset's step where nothing is said."""

    def __post_init__(self) -> None:
        if not self.begin:
            object.__setattr__(self, "begin", self.next)

    @property
    def is_promised(self) -> bool:
        """Whether the next batch has to start at ``next``, or data is lost."""
        return not (self.is_earliest and self.begin == self.next)

    def at_rest(self) -> StreamPosition:
        """The same place, as the end of a batch that reads nothing."""
        return StreamPosition(self.created, self.next, self.next, not self.is_promised)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"created": self.created, "from": self.begin, "next": self.next}
        found |= {"earliest": True} if self.is_earliest else {}
        return found | ({"cuts": [list(each) for each in self.cuts]} if self.cuts else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamPosition:
        # Version 1 spelled the zone of a bucket's time another way.
        created = str(value["created"]).replace("+00:00", "Z")
        cuts = tuple((int(until), int(parts)) for until, parts in value.get("cuts", ()))
        return cls(created, int(value["next"]), int(value["from"]), bool(value.get("earliest", False)), cuts)

    def ranges(self, step: int) -> Iterator[tuple[int, int]]:
        """The partitions of the batch that ends here."""
        begin = self.begin
        for until, parts in self.cuts or ((self.next, 0),):
            size = math.ceil((until - begin) / parts) if parts else step
            yield from ((at, min(at + size, until)) for at in range(begin, until, max(1, size)))
            begin = until


@dataclass(frozen=True, slots=True)
class Offset:
    """The positions in all the streams of a query."""

    streams: Mapping[str, StreamPosition]
    step: int = 0
    subjects: tuple[str, ...] | None = ()
    """The filters, sorted; none for everything. None: version 1, which did not note them."""

    def to_json(self) -> dict[str, Any]:
        streams = {name: position.to_json() for name, position in sorted(self.streams.items())}
        return {"version": VERSION, "step": self.step, "subjects": list(self.subjects or ()), "streams": streams}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Offset:
        """Read what a checkpoint has.

        Raises:
            ConfigError: It is not one of ours, or one of a later version.
        """
        if value.get("version") not in _READABLE:
            raise ConfigError(
                f"an offset of version {value.get('version')!r}: this release reads versions 1 and {VERSION}; "
                "the checkpoint is another source's or a newer release's"
            )
        try:
            streams = {str(name): StreamPosition.from_json(entry) for name, entry in value["streams"].items()}
            subjects = None if value["version"] == 1 else tuple(sorted(map(str, value["subjects"])))
            return cls(streams, int(value["step"]), subjects)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"an offset that cannot be read: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one batch may take."""

    rows: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large partitions are."""

    min_partitions: int = 1
    max_records: int = 100_000
    max_bytes: int = 64 << 20

    def step(self, sequences: int, bytes_per_sequence: float) -> int:
        """How many sequences each partition of a batch has."""
        step = min(self.max_records, math.ceil(sequences / self.min_partitions))
        if bytes_per_sequence > 0:
            step = min(step, int(self.max_bytes / bytes_per_sequence))
        return max(1, step)


def check_unchanged(offset: Offset, heads: Iterable[Head]) -> None:
    """That these are still the streams the offset is of.

    Raises:
        StreamRecreated: One has the name only.
        StreamWentBack: One ends before the offset.
    """
    for head in heads:
        known = offset.streams.get(head.stream)
        if known is None:
            continue
        if known.created != head.created:
            raise StreamRecreated(head.stream, known.created, head.created)
        if known.next > head.next:
            raise StreamWentBack(head.stream, known.next, head.next)


def check_filters(offset: Offset, filters: tuple[str, ...], option: str, *, is_accepted: bool = False) -> None:
    """That the offset has not passed over what the filters want.

    Filters that leave out more than those of the offset are fine: all they want has been read.

    Raises:
        ConfigError: They want something else, and that is not accepted.
    """
    if is_accepted or offset.subjects is None:
        return
    known = offset.subjects or (">",)
    if all(any(is_subset(each, wider) for wider in known) for each in filters or (">",)):
        return
    raise ConfigError(
        f"{option}={','.join(filters)!r}: the checkpoint is of {option}={','.join(offset.subjects)!r}, and what those "
        "left out so far would never be read; start with a new checkpoint, or set acceptFilterChange=true to read it "
        "from the checkpoint's offsets on"
    )


def admit(start: Offset, heads: Iterable[Head], limits: Limits, sizes: Sizes, count: Count | None = None) -> Offset:
    """The end of the next batch: everything there is, or each stream's share of what the limits allow.

    A share is in proportion to what waits in each stream, so that all of them arrive at their ends together; none with
    anything waiting gets less than one. Without anything new this is ``start`` itself. What waits are messages where
    that makes a difference and can be counted, else sequences.
    """
    known = {head.stream: head for head in heads}
    # What is gone must not use up what a batch may have.
    begins = {name: max(known[name].first, position.next) for name, position in start.streams.items()}
    moved = {name: max(known[name].next, position.next) for name, position in start.streams.items()}
    if all(moved[name] == position.next for name, position in start.streams.items()):
        return start
    surveys = _surveys(known, begins, min(limits.rows or sizes.max_records, sizes.max_records), count)
    waiting = {
        name: surveys[name].messages if name in surveys else max(0, known[name].next - begin)
        for name, begin in begins.items()
    }
    total = sum(waiting.values())
    total_bytes = sum(
        rows * (known[name].bytes_per_message if name in surveys else known[name].bytes_per_sequence)
        for name, rows in waiting.items()
    )
    # Not floats: 22 * (15 / 22) is below 15, and a limit of 15 rows would be one of 14.
    share = Fraction(1)
    if limits.rows is not None and total > limits.rows:
        share = Fraction(limits.rows, total)
    if limits.bytes is not None and total_bytes > limits.bytes:
        share = min(share, Fraction(limits.bytes) / Fraction(total_bytes))
    allowed = {} if share == 1 else {name: max(1, int(rows * share)) for name, rows in waiting.items() if rows}
    ends = moved | {
        name: surveys[name].end_after(rows) if name in surveys else begins[name] + min(waiting[name], rows)
        for name, rows in allowed.items()
    }
    streams = {
        name: replace(
            position,
            begin=position.next if position.is_promised else min(begins[name], moved[name]),
            next=ends[name],
            is_earliest=not position.is_promised,
            cuts=(),
        )
        for name, position in start.streams.items()
    }
    admitted = {name: max(0, streams[name].next - begin) for name, begin in begins.items() if name not in surveys}
    rows = sum(admitted.values()) + sum(allowed.get(name, waiting[name]) for name in surveys)
    step = sizes.step(rows, total_bytes / total if total else 0.0)
    for name, survey in surveys.items():
        streams[name] = replace(streams[name], cuts=survey.segments(streams[name].next, step))
    # Sequences that are gone are in the ranges, too, to be noticed; they must not make millions of partitions.
    spanned = sum(streams[name].next - streams[name].begin for name in admitted)
    partitions = math.ceil(sum(admitted.values()) / step) + len(admitted)
    return Offset(streams, max(step, math.ceil(spanned / max(1, partitions))), start.subjects)


def _surveys(
    known: Mapping[str, Head], begins: Mapping[str, int], enough: int, count: Count | None
) -> dict[str, Survey]:
    """Of the streams whose gaps could make a batch or a partition that has nothing in it; those with the largest."""
    if count is None:
        return {}
    found = [name for name, begin in begins.items() if min(known[name].missing, known[name].next - begin) > enough]
    largest = sorted(found, key=lambda name: -known[name].missing)[:MAX_SURVEYS]
    return {name: Survey(partial(count, name), begins[name], known[name].next) for name in largest}


def plan(start: Offset, end: Offset, subjects: tuple[str, ...] = ()) -> list[Range]:
    """The partitions of the batch that ends at ``end``.

    ``start`` only says whether there is one: a query with another source that has news is run with two equal offsets
    here. ``subjects`` are for offsets that do not have their own.

    Raises:
        StreamRecreated: The two are not of the same stream.
    """
    if start == end:
        return []
    ranges = []
    subjects = subjects if end.subjects is None else end.subjects
    for name, last in sorted(end.streams.items()):
        first = start.streams.get(name)
        if first is not None and first.created != last.created:
            raise StreamRecreated(name, first.created, last.created)
        ranges += [
            Range(name, last.created, begin, until, subjects, last.is_earliest)
            for begin, until in last.ranges(end.step or max(1, last.next - last.begin))
        ]
    return ranges


def position_of(head: Head, where: Where) -> StreamPosition:
    """Where reading starts in one stream.

    Raises:
        ConfigError: A sequence that is behind the stream's end.
    """
    begin = head.first if where == "earliest" else head.next if where == "latest" else where
    if begin > head.next:
        raise ConfigError(
            f"startingOffsets={begin}: the next sequence of stream {head.stream!r} is {head.next}; "
            "expected that or one before"
        )
    return StreamPosition(head.created, begin, is_earliest=where == "earliest")
