"""Offsets of streaming queries, the end of the next batch, and its partitions. Pure.

The offset of a stream is the sequence of the *next* message, as in Kafka: ends are exclusive, and a batch has read
``[from, next)``. A checkpoint has this text, always in this order, because Spark compares the text::

    {"version": 2, "step": 50000, "subjects": ["orders.>"],
     "streams": {"ORDERS": {"created": "2026-03-20T10:14:30.000001Z", "from": 1, "next": 1201, "earliest": true}}}

``created`` is the stream's identity: a re-created stream has the same name and other messages, so the old sequences are
not valid there. ``from`` is the start of the batch that ends here, and ``step`` the number of sequences in each of its
partitions. So the end alone determines a batch, whatever the options are when it is run again. The end of the batch
before would do as the start, except for the first batch: Spark asks for the initial offset twice before it and again
when it is repeated, and by then ``latest`` has changed.

Where a stream has far fewer messages than sequences, a batch is cut by messages (:mod:`jetspark.spark.survey`), and
``cuts`` has the parts: ends, each with its number of partitions of equal length.

``earliest`` means that the batch starts at the stream's first message, whichever that is: messages that the stream's
limits remove before the first read are not counted as lost. Later batches start at a fixed sequence. ``subjects`` are
the filters of the batch. Messages outside of the filters are skipped permanently, so other filters make another query.
Version 1 had neither: its starts are fixed, and its filters unknown.

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
"""A start in a stream: a sequence, its first message, or its end."""

VERSION = 2
# Streams in one plan whose messages are counted; further streams are cut by sequences.
MAX_SURVEYS = 32
_READABLE = (1, 2)


@dataclass(frozen=True, slots=True)
class StreamPosition:
    created: str
    next: int
    begin: int = 0
    """Start of the batch that ends at ``next``; ``from`` in JSON. By default ``next``: the batch is empty."""
    is_earliest: bool = False
    """The batch starts at the first message that the stream has when it is read; ``earliest`` in JSON."""
    cuts: Segments = ()
    """Parts of the batch; if empty, the offset's step applies."""

    def __post_init__(self) -> None:
        if not self.begin:
            object.__setattr__(self, "begin", self.next)

    @property
    def is_promised(self) -> bool:
        """True if messages removed after ``next`` are a data loss for the next batch."""
        return not (self.is_earliest and self.begin == self.next)

    def at_rest(self) -> StreamPosition:
        """The same position as the end of an empty batch."""
        return StreamPosition(self.created, self.next, self.next, not self.is_promised)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"created": self.created, "from": self.begin, "next": self.next}
        found |= {"earliest": True} if self.is_earliest else {}
        return found | ({"cuts": [list(each) for each in self.cuts]} if self.cuts else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamPosition:
        # Version 1 wrote the zone of a bucket's time as +00:00.
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
    """The positions of a query in its streams."""

    streams: Mapping[str, StreamPosition]
    step: int = 0
    subjects: tuple[str, ...] | None = ()
    """The sorted filters; empty for the whole stream, None for version 1, which did not store them."""

    def to_json(self) -> dict[str, Any]:
        streams = {name: position.to_json() for name, position in sorted(self.streams.items())}
        return {"version": VERSION, "step": self.step, "subjects": list(self.subjects or ()), "streams": streams}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Offset:
        """Decode the offset of a checkpoint.

        Raises:
            ConfigError: The offset is of another source, or of a later version.
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
    """Limits of one batch."""

    rows: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits of partitions."""

    min_partitions: int = 1
    max_records: int = 100_000
    max_bytes: int = 64 << 20

    def step(self, sequences: int, bytes_per_sequence: float) -> int:
        """Number of sequences in each partition of a batch."""
        step = min(self.max_records, math.ceil(sequences / self.min_partitions))
        if bytes_per_sequence > 0:
            step = min(step, int(self.max_bytes / bytes_per_sequence))
        return max(1, step)


def check_unchanged(offset: Offset, heads: Iterable[Head]) -> None:
    """Check that the streams are those of the offset.

    Raises:
        StreamRecreated: A stream was deleted and created again.
        StreamWentBack: A stream ends before the offset.
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
    """Check that the batches before the offset did not skip messages that the filters select.

    Filters that select less than those of the offset are accepted.

    Raises:
        ConfigError: The filters select messages that were skipped, and ``is_accepted`` is false.
    """
    if is_accepted or offset.subjects is None:
        return
    known = offset.subjects or (">",)
    if all(any(is_subset(each, wider) for wider in known) for each in filters or (">",)):
        return
    raise ConfigError(
        f"{option}={','.join(filters)!r}: the checkpoint is of {option}={','.join(offset.subjects)!r}, so earlier "
        "messages outside of it would never be read; start with a new checkpoint, or set acceptFilterChange=true to "
        "read the new filters from the checkpoint's offsets on"
    )


def admit(start: Offset, heads: Iterable[Head], limits: Limits, sizes: Sizes, count: Count | None = None) -> Offset:
    """The end of the next batch: the ends of all streams, or each stream's share within the limits.

    Shares are proportional to the backlog of each stream, so that all reach their ends together; a stream with a
    backlog gets at least one. Returns ``start`` itself if all backlogs are empty. Backlogs are in messages where gaps
    matter and messages can be counted, otherwise in sequences.
    """
    known = {head.stream: head for head in heads}
    # Removed messages must not use up the limits of a batch.
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
    # Removed sequences are part of the ranges, so that their loss is noticed; they must not make millions of
    # partitions.
    spanned = sum(streams[name].next - streams[name].begin for name in admitted)
    partitions = math.ceil(sum(admitted.values()) / step) + len(admitted)
    return Offset(streams, max(step, math.ceil(spanned / max(1, partitions))), start.subjects)


def _surveys(
    known: Mapping[str, Head], begins: Mapping[str, int], enough: int, count: Count | None
) -> dict[str, Survey]:
    """Surveys of the streams with the largest gaps, where a gap could make a batch or a partition empty."""
    if count is None:
        return {}
    found = [name for name, begin in begins.items() if min(known[name].missing, known[name].next - begin) > enough]
    largest = sorted(found, key=lambda name: -known[name].missing)[:MAX_SURVEYS]
    return {name: Survey(partial(count, name), begins[name], known[name].next) for name in largest}


def plan(start: Offset, end: Offset, subjects: tuple[str, ...] = ()) -> list[Range]:
    """The partitions of the batch that ends at ``end``.

    Args:
        start: Equal to ``end`` for an empty batch, which a query with several sources runs when another one has rows.
        subjects: Filters for offsets of version 1, which have none.

    Raises:
        StreamRecreated: The offsets are of different streams.
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
    """The position at which reading starts in one stream.

    Raises:
        ConfigError: The sequence is beyond the stream's end.
    """
    begin = head.first if where == "earliest" else head.next if where == "latest" else where
    if begin > head.next:
        raise ConfigError(
            f"startingOffsets={begin}: the next sequence of stream {head.stream!r} is {head.next}; "
            "expected that or one before"
        )
    return StreamPosition(head.created, begin, is_earliest=where == "earliest")
