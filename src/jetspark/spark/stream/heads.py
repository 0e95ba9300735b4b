"""Requests of a source about its streams: their heads, and the sequence at a given time."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from jetspark.blocking import JetStream
from jetspark.blocking.context import context_of
from jetspark.errors import ConfigError, StreamNotFound
from jetspark.jetstream.info import StreamInfo
from jetspark.lake.hybrid import Archives, HybridHead
from jetspark.spark.offsets import Offset, Where, position_of
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.state import scan
from jetspark.state.scan import Head, head_of

__all__ = [
    "check_readable",
    "check_time_has_come",
    "ends_of",
    "heads_of",
    "is_deleted",
    "listed",
    "matching",
    "server_time",
    "starts_of",
]


# How many streams a page of the server's list has.
LIST_PAGE = 256
# Streams that a plan tries to read.
MAX_CHECKED = 4


def heads_of(js: JetStream, names: Iterable[str], archives: Archives | None = None) -> list[Head]:
    """The heads of streams; with ``archives`` a stream need not exist any more."""
    if archives is None:
        return [_head(js, name) for name in names]
    return [archives.whole(name, lambda _, name=name: _head(js, name)) for name in names]  # type: ignore[misc]


def _head(js: JetStream, name: str) -> Head:
    return head_of(js.stream(name).cached_info)


def is_deleted(head: Head) -> bool:
    """True if the stream does not exist any more, and is read from its archive."""
    return isinstance(head, HybridHead) and head.is_deleted


def matching(js: JetStream, pattern: str) -> list[Head]:
    """The streams whose whole name the regular expression matches."""
    heads = []
    for name in sorted(name for name in js.stream_names() if re.fullmatch(pattern, name)):
        try:
            heads += heads_of(js, [name])
        except StreamNotFound:
            continue  # deleted since it was listed
    return heads


def listed(js: JetStream, options: SourceOptions, known: Iterable[str]) -> tuple[list[Head], int, int]:
    """The streams of the options by few requests: how many pages the list had, and how many requests came on top.

    A cluster leaves out streams whose leaders do not answer in time. So ``known`` streams that are not in the list are
    asked about one by one, and others are found the next time.

    Raises:
        StreamNotFound: A stream that the options name was deleted.
        PermissionDenied: The connection may not list streams.
    """
    heads, count = {}, 0
    for info in js.streams():
        count += 1
        if options.has(info.config.name):
            heads[info.config.name] = head_of(info)
    missing = sorted(set(known) - heads.keys())
    for name in missing:
        try:
            heads[name] = head_of(js.stream(name).cached_info)
        except StreamNotFound:
            if options.stream_pattern is None:
                raise
    return [head for _, head in sorted(heads.items())], max(1, math.ceil(count / LIST_PAGE)), len(missing)


def starts_of(js: JetStream, options: SourceOptions, heads: Iterable[Head], default: Where) -> Offset:
    """Where reading starts.

    Raises:
        ConfigError: A sequence that is behind the stream's end.
    """
    positions = {}
    for head in heads:
        where = options.starting_offsets.of(head.stream) if options.starting_offsets is not None else None
        if options.starting_timestamp is not None:
            where = sequence_at(js, head, options.starting_timestamp)
        positions[head.stream] = position_of(head, default if where is None else where)
    return Offset(positions, subjects=tuple(sorted(options.subjects)))


def check_readable(js: JetStream, heads: Iterable[Head], subjects: tuple[str, ...]) -> None:
    """Check on some of the streams that tasks may read them, so that planning fails instead of every task.

    Raises:
        ConfigError: A stream that is consumed by reading does not allow direct gets.
        PermissionDenied: The connection may not make consumers.
    """
    context = context_of(js)
    for head in islice((each for each in heads if not is_deleted(each)), MAX_CHECKED):
        if not scan.is_consumed(js.stream(head.stream).cached_info.config):
            context.run(scan.messages_from(context.api, head.stream, head.next, subjects))


def check_time_has_come(js: JetStream, options: SourceOptions, heads: Iterable[Head]) -> None:
    """Check that a query does not start in the future: it would start at the stream's end and read earlier messages.

    The server's clock counts, because it sets the times of messages; without a stream, this machine's clock.

    Raises:
        ConfigError: ``startingTimestamp`` is in the future.
    """
    moment = options.starting_timestamp
    if moment is None:
        return
    head = next((each for each in heads if not is_deleted(each)), None)
    now = server_time(None if head is None else js.stream(head.stream).cached_info)
    if moment > now:
        raise ConfigError(
            f"startingTimestamp={moment.isoformat()} is in the future: it is {now.isoformat(timespec='seconds')}, "
            "and no message has such a time yet; start the query then, or with startingOffsets=latest"
        )


def server_time(info: StreamInfo | None) -> datetime.datetime:
    """The server's clock when it described the stream; this machine's clock without a description."""
    told = None if info is None else info.timestamp
    return datetime.datetime.now(datetime.UTC) if told is None else told


def ends_of(js: JetStream, options: SourceOptions, heads: Iterable[Head]) -> list[Head]:
    """The streams as if they ended where the options say; never later than they do."""
    ends = []
    for head in heads:
        where = options.ending_offsets.of(head.stream) if options.ending_offsets is not None else None
        if options.ending_timestamp is not None:
            where = sequence_at(js, head, options.ending_timestamp)
        end = min(where, head.next) if isinstance(where, int) else head.next
        ends.append(replace(head, next=end))
    return ends


def sequence_at(js: JetStream, head: Head, moment: datetime.datetime) -> int:
    """The sequence of the first message stored at or after ``moment``; the stream's end without such a message."""
    context = context_of(js)
    if not isinstance(head, HybridHead):
        return context.run(scan.sequence_at(context.api, head, moment))
    found = head.next if head.is_deleted else context.run(scan.sequence_at(context.api, head.tail, moment))
    return head.begin_at(moment, found)
