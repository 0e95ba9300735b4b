"""What a source asks the server about its streams: where they begin and end, and what was when."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import replace

from jetspark.blocking import JetStream
from jetspark.blocking.context import context_of
from jetspark.errors import StreamNotFound
from jetspark.spark.offsets import Offset, Where, position_of
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.state import scan
from jetspark.state.scan import Head, head_of

__all__ = ["ends_of", "heads_of", "matching", "starts_of"]


def heads_of(js: JetStream, names: Iterable[str]) -> list[Head]:
    return [head_of(js.stream(name).cached_info) for name in names]


def matching(js: JetStream, pattern: str) -> list[Head]:
    """The streams whose whole name the regular expression matches."""
    heads = []
    for name in sorted(name for name in js.stream_names() if re.fullmatch(pattern, name)):
        try:
            heads += heads_of(js, [name])
        except StreamNotFound:
            continue  # deleted since it was listed
    return heads


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
    """The sequence of the first message stored at or after ``moment``; the stream's end when there is none."""
    context = context_of(js)
    return context.run(scan.sequence_at(context.api, head, moment))
