"""Positions of projections' buckets: read before rows are folded, and advanced when all rows are stored."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence

from jetspark.app.projections.bucket_refs import BucketRef, alias_key
from jetspark.app.projections.positions import FoldPosition, position_change, read_position, start_of
from jetspark.blocking import JetStream
from jetspark.blocking.context import context_of
from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import KeyNotFound, StreamNotFound, UsageError
from jetspark.jetstream.wire import parse_time
from jetspark.lake.hybrid import Archives
from jetspark.spark.connections import patiently, runner_for
from jetspark.spark.engine.coverage import Covered, advance, check_reach
from jetspark.spark.engine.projection_options import ProjectionOptions
from jetspark.state.losses import front_of
from jetspark.state.scan import Head, Range
from jetspark.state.store import open_bucket, store

__all__ = ["advance_positions", "check_ranges", "read_positions", "whole_head"]

_logger = logging.getLogger("jetspark.spark")

# Attempts to write a position. Other engines write the same record, each of them rarely.
MAX_ROUNDS = 20


def read_positions(js: JetStream, options: ProjectionOptions) -> list[tuple[FoldPosition, int]]:
    """Position and revision for each bucket; the beginning of the stream for a bucket without a position.

    Raises:
        UsageError: A bucket is of another stream, or of another version of its projection.
    """
    created = _created(js, options)
    beginning = FoldPosition.beginning(options.stream[0], created)
    found = []
    runner = ProcedureRunner(js)
    for number, (name, bucket) in enumerate(zip(options.projections, options.buckets, strict=True)):
        stored, revision = runner.run(read_position(runner.run(open_bucket(bucket, patience_s=options.patience_s))))
        version = options.version_of(number)
        found.append((start_of(stored, beginning, projection=name, bucket=bucket, version=version), revision))
    return found


def _created(js: JetStream, options: ProjectionOptions) -> datetime.datetime | None:
    """When the stream was created; if it was deleted since, by its archive."""
    [name] = options.stream
    try:
        return js.stream(name).cached_info.created
    except StreamNotFound:
        alone = options.archives().alone(name)
        if alone is None:
            raise
        return parse_time(alone.created)


def whole_head(js: JetStream, options: ProjectionOptions, archives: Archives | None = None) -> Head:
    """The head of the history; ``whole_from`` is based on the last events that the buckets have read."""
    anchor_sequence = 0
    if options.is_stored:
        anchor_sequence = min(position.last_event for position, _ in read_positions(js, options))
    context, [name] = context_of(js), options.stream

    def look(anchor: int) -> Head:
        return context.run(front_of(context.api, js.stream(name).cached_info, anchor))

    return (options.archives() if archives is None else archives).whole(name, look, anchor_sequence)


def check_ranges(js: JetStream, options: ProjectionOptions, ranges: Sequence[Range]) -> list[Covered]:
    """The :class:`Covered` record for each range, which its task returns after reading.

    Raises:
        UsageError: A bucket lacks events before the ranges, or its projection uses another bucket now.
    """
    if not ranges:
        return []
    _check_buckets(js, options)
    found = read_positions(js, options)
    positions, revisions = tuple(position for position, _ in found), tuple(revision for _, revision in found)
    first = min(ranges, key=lambda part: part.start)
    for bucket, position in zip(options.buckets, positions, strict=True):
        check_reach(bucket, position, first.start, is_earliest=first.is_earliest)
    return [Covered(part.start, part.end, part.is_earliest, positions, revisions) for part in ranges]


def _check_buckets(js: JetStream, options: ProjectionOptions) -> None:
    if options.records is None:
        return
    records = js.kv(options.records)
    for name, bucket in zip(options.projections, options.buckets, strict=True):
        if name in options.placed:
            continue
        try:
            ref = BucketRef.decode(records.get(alias_key(name), direct=False).value)
        except KeyNotFound:
            continue
        if ref.bucket != bucket:
            raise UsageError(
                f"projection {name!r} was swapped from bucket {bucket} to {ref.bucket}: restart with a new "
                "checkpoint to continue there"
            )


def advance_positions(options: ProjectionOptions, whole: Covered) -> None:
    """Advance the positions of buckets over a stored range, unless earlier events are missing or a key was repaired."""
    for number, bucket in enumerate(options.buckets):
        for _ in range(MAX_ROUNDS):
            found = patiently(options, lambda js: read_positions(js, options), patience_s=options.patience_s)
            stored, revision = found[number]
            position = advance(whole.positions[number], stored, whole)
            if position is None:
                break
            change = position_change(position, revision)
            outcome = runner_for(options).run(store(bucket, [change], patience_s=options.patience_s))
            if not outcome.conflicts:
                break
        else:
            # Harmless: a position only tells where to start, and events that are read again change nothing.
            _logger.warning("bucket %s: position changed by others in every attempt; it is not advanced", bucket)
