"""Projections of an application on Spark: as a streaming query, as a backfill, and as a frame of freshly folded states.

One pass over the stream serves all projections and dead letters. Tasks read, decode and validate each message once,
Spark shuffles the rows by projection and key, and other tasks fold them and store each key.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import importlib.util
import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from jetspark.app import App
from jetspark.app.projections.bucket_refs import alias_key, bucket_ref_of, check_version
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.router import Router
from jetspark.app.topology.names import projection_bucket
from jetspark.blocking import JetStream
from jetspark.blocking.context import context_of
from jetspark.core.numbers import seconds, whole
from jetspark.errors import ConfigError, KeyNotFound
from jetspark.spark.connections import patiently
from jetspark.spark.engine.app_files import load_app, locate_app, outline_of
from jetspark.spark.engine.projection_options import (
    FORMAT,
    ProjectionKeywords,
    ProjectionOptions,
    keyword_options,
    option_text,
    servers_text,
)
from jetspark.spark.engine.reached_positions import read_positions, whole_head
from jetspark.spark.formats import register
from jetspark.spark.options import read_options
from jetspark.spark.stream.heads import sequence_at

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = [
    "BackfillReport",
    "ProjectionPlan",
    "backfill",
    "bring_together",
    "check_pandas",
    "fold_states",
    "passing_folder",
    "run",
]

# Sequences a micro-batch takes: a second or two of work, so that a query that begins far behind shows progress.
MAX_OFFSETS = 200_000

_STATES = "projection string, key string, value binary, sequence bigint, parked bigint"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillReport:
    """Counts of a backfill."""

    from_sequence: int
    to_sequence: int
    """The last sequence that was read; below ``from_sequence`` if there was none."""
    buckets: Mapping[str, str]
    """By projection."""
    applied: int = 0
    """Events that changed, or could have changed, a state; an event counts for each of its keys."""
    known: int = 0
    """Events that were in their states already."""
    waiting: int = 0
    """Events of keys that are stuck at an earlier event."""
    parked: int = 0
    """Stuck keys among those with events in the range."""
    written: int = 0
    """Keys that were stored."""
    letters: int = 0
    """Messages that could not be read and had no dead letter yet."""
    newly_parked: int = 0
    """Keys that an event of the range has parked."""
    unreadable: int = 0
    """Messages of the range that could not be read."""


def run(
    app: App | str,
    spark: SparkSession,
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    *,
    checkpoint: str | None = None,
    projections: Sequence[str] = (),
    buckets: Mapping[str, str] | None = None,
    partitions: int | None = None,
    until_now: bool = False,
    interval_s: float | None = None,
    query_name: str | None = None,
    **options: Unpack[ProjectionKeywords],
) -> StreamingQuery:
    """Start a streaming query that folds an application's events into its projections, and return it.

    It stores the same bytes as the live engine; both may run at the same time.

    Args:
        app: The application, or its location ``package.module:name``. Spark's workers import it.
        checkpoint: A folder for Spark's own position. Without it a query continues from the positions of the buckets,
            which is as safe: events that are folded twice change nothing.
        projections: Names of the projections; by default all.
        buckets: Buckets to use instead of the projections' own, by projection.
        partitions: Number of tasks that fold; by default ``spark.sql.shuffle.partitions``. 1 needs no shuffle and has
            the lowest latency.
        until_now: End when all events that exist at the start are folded.
        interval_s: Seconds between the starts of two micro-batches; by default a batch starts as soon as there are
            events. Cannot be combined with ``until_now``.
        options: Options of the format ``jetstream``, such as ``credentialsFile`` and ``maxOffsetsPerTrigger``.

    Raises:
        ConfigError: An option is invalid, or workers cannot import the application.
        UsageError: A bucket is of another version of its projection.
    """
    interval_ms = 0 if interval_s is None else int(seconds("interval_s", interval_s) * 1000)
    if until_now and interval_s is not None:
        raise ConfigError(
            f"interval_s={interval_s!r}: expected None with until_now=True, which takes all there is at once"
        )
    if checkpoint == "":
        raise ConfigError("checkpoint='': expected a folder, or None for one that goes when the process ends")
    plan = ProjectionPlan.of(
        app, spark, servers, projections, buckets, {"maxOffsetsPerTrigger": MAX_OFFSETS, **options}
    )
    given = plan.options | {"startingOffsets": plan.start()}
    frame = bring_together(spark.readStream.format(FORMAT).options(**given).load(), partitions)
    given.pop("maxOffsetsPerTrigger")
    folder = checkpoint or passing_folder(f"jetspark-{plan.app.name}-")
    writer = frame.writeStream.format(FORMAT).options(**given).option("checkpointLocation", folder)
    if query_name is not None:
        writer = writer.queryName(query_name)
    if until_now:
        writer = writer.trigger(availableNow=True)
    elif interval_ms:
        writer = writer.trigger(processingTime=f"{interval_ms} milliseconds")
    return writer.start()


def backfill(
    app: App | str,
    spark: SparkSession,
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    *,
    projections: Sequence[str] = (),
    buckets: Mapping[str, str] | None = None,
    from_sequence: int | None = None,
    to_sequence: int | None = None,
    partitions: int | None = None,
    letters: bool = True,
    **options: Unpack[ProjectionKeywords],
) -> BackfillReport:
    """Fold a range of an application's stream into buckets, as one batch.

    Events that the buckets contain already change nothing. Other engines may fold into them at the same time.

    Args:
        buckets: Existing buckets to use instead of the projections' own, by projection.
        from_sequence: First sequence; by default the first of the stream. The buckets must contain all events before
            it.
        to_sequence: Last sequence; by default the present end of the stream.
        letters: Write dead letters for unreadable messages, unless they exist.

    Raises:
        ConfigError, UsageError: As :func:`run`.
    """
    plan = ProjectionPlan.of(app, spark, servers, projections, buckets, options)
    begin, first, last = plan.bounds(from_sequence, to_sequence)
    report = f"spark.{uuid.uuid4().hex}"
    given = plan.options | {
        "startingOffsets": begin,
        "endingOffsets": str(last + 1),
        "letters": option_text(letters),
        "report": f"{projection_bucket(plan.app.name)}/{report}",
    }
    counts: dict[str, int] = {}
    if first <= last:
        frame = bring_together(spark.read.format(FORMAT).options(**given).load(), partitions)
        frame.write.format(FORMAT).options(**given).mode("append").save()
        counts = plan.pop_report(report)
    return BackfillReport(from_sequence=first, to_sequence=last, buckets=plan.buckets, **counts)


def fold_states(
    app: App | str,
    spark: SparkSession,
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    *,
    projections: Sequence[str] = (),
    to_sequence: int | None = None,
    until: datetime.datetime | None = None,
    partitions: int | None = None,
    **options: Unpack[ProjectionKeywords],
) -> DataFrame:
    """Fold the states of projections from the first event up to a sequence or a time; stores nothing.

    Returns a frame with the columns ``projection``, ``key`` (in bucket spelling), ``value`` (null for a deleted key),
    ``sequence`` (of the last event in the state) and ``parked`` (the sequence of the event that the key is stuck at, or
    null).

    Args:
        to_sequence: Last sequence; by default the present end of the stream.
        until: Instead of ``to_sequence``: only events stored before this moment.
    """
    check_pandas("jetspark.spark.fold_states")
    if until is not None and (to_sequence is not None or until.tzinfo is None):
        raise ConfigError(f"until={until}: expected a time with a zone, and no to_sequence beside it")
    plan = ProjectionPlan.of(app, spark, servers, projections, None, options, is_stored=False)
    if until is not None:
        to_sequence = plan.last_before(until)
    begin, _, last = plan.bounds(None, to_sequence)
    given = plan.options | {"startingOffsets": begin, "endingOffsets": str(last + 1)}
    frame = bring_together(spark.read.format(FORMAT).options(**given).load(), partitions)
    return frame.mapInArrow(functools.partial(_states, given), _STATES)


def _states(given: Mapping[str, str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from jetspark.spark.engine.projection_sink import state_rows

    return state_rows(read_options(ProjectionOptions, FORMAT, given), batches)


# ---- small steps -----------------------------------------------------------------------------------------------------


def check_pandas(what: str) -> None:
    """
    Raises:
        ConfigError: It is not installed, as after an installation without the extra.
    """
    if importlib.util.find_spec("pandas") is None:
        raise ConfigError(f"{what}: Spark needs pandas for it: pip install 'jetspark[spark]', which has it")


def passing_folder(prefix: str) -> str:
    """Create a temporary checkpoint directory; it is removed at exit.

    With Connect the server creates a directory of this name, and keeps it.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder.as_uri()  # and no path, which Spark may take for one of a distributed file system


def bring_together(frame: DataFrame, partitions: int | None) -> DataFrame:
    """All rows of a key in one task."""
    names = ("target", "key")
    if partitions is None:
        return frame.repartition(*names)
    number = whole("partitions", partitions, instead="or None for spark.sql.shuffle.partitions")
    return frame.coalesce(1) if number == 1 else frame.repartition(number, *names)


@dataclass(frozen=True, slots=True)
class ProjectionPlan:
    """The options of the format for one query: application, projections, buckets and range."""

    app: App
    buckets: Mapping[str, str]
    options: dict[str, str]
    connecting: ProjectionOptions
    filters: Sequence[str]
    """The subjects of the events."""

    @classmethod
    def of(
        cls,
        app: App | str,
        spark: SparkSession,
        servers: str | Sequence[str],
        projections: Sequence[str],
        buckets: Mapping[str, str] | None,
        more: Mapping[str, Any],
        *,
        is_stored: bool = True,
    ) -> ProjectionPlan:
        location = locate_app(app)
        declared = load_app(location.name, location.folder) if isinstance(app, str) else app
        names = _names(declared, projections, buckets or {})
        options = keyword_options(ProjectionKeywords, more) | {
            "servers": servers_text(servers),
            "app": location.name,
            "outline": outline_of(declared, names),
            "stream": declared.stream,
            "projections": option_text(names),
            "buckets": option_text([declared.projections[name].bucket.bucket for name in names]),
            "versions": option_text([declared.projections[name].version for name in names]),
        }
        if location.folder:
            options["appFolder"] = location.folder
        specs = [declared.projections[name] for name in names]
        router = Router(specs, declared.catalogue, owns_stream=declared.spec.owns_stream)
        filters = router.filters
        options["events"] = option_text(filters)
        if router.reading:  # else all of the stream
            options["subjects"] = option_text(router.reading)
        connecting = read_options(ProjectionOptions, FORMAT, options)
        takes_bytes = patiently(connecting, lambda js: context_of(js).client.max_payload_bytes, is_first_contact=True)
        options["maxPayloadBytes"] = option_text(takes_bytes)
        register(spark)
        if not is_stored:
            return cls(declared, {}, options | {"stored": "false"}, connecting, filters)
        found = {name: bucket for name, bucket in (buckets or {}).items() if name in names}
        others = [name for name in names if name not in found]
        if others:
            options["records"] = projection_bucket(declared.name)
        if found:
            options["placed"] = option_text(list(found))
        found |= patiently(connecting, lambda js: _places(js, declared, others), is_first_contact=True)
        _check_apart(declared, found)
        _check_chosen(names, buckets or {})
        options["buckets"] = option_text([found[name] for name in names])
        plan = cls(declared, found, options, read_options(ProjectionOptions, FORMAT, options), filters)
        plan.positions()  # here, where an error is not one of Spark's
        return plan

    def positions(self) -> list[FoldPosition]:
        """How far the buckets are.

        Raises:
            UsageError: One was made of another stream, or by another version of its projection.
        """
        found = patiently(self.connecting, lambda js: read_positions(js, self.connecting))
        return [position for position, _ in found]

    def read(self, spark: SparkSession, first: int, last: int, subjects: Sequence[str] | None = None) -> DataFrame:
        """The rows of a range, of all events or of those on some subjects."""
        given = self.options | {"startingOffsets": str(first), "endingOffsets": str(last + 1)}
        if subjects is not None:
            given["subjects"] = option_text(subjects)
        return spark.read.format(FORMAT).options(**given).load()

    def start(self) -> str:
        """Where a query begins that has no checkpoint: where the buckets are."""
        lowest = min(position.sequence for position in self.positions())
        return "earliest" if lowest == 0 else str(lowest + 1)

    def bounds(self, first: int | None, last: int | None) -> tuple[str, int, int]:
        """Where a range begins, in the words of the source; and its first and last sequence, as far as there are."""
        first = None if first is None else whole("from_sequence", first, instead="or None for the first of the stream")
        last = None if last is None else whole("to_sequence", last, low=0, instead="or None for the last of the stream")
        if first is not None and last is not None and last < first:
            raise ConfigError(f"from_sequence={first}, to_sequence={last}: expected sequences in this order")
        head = patiently(self.connecting, lambda js: whole_head(js, self.connecting), is_first_contact=True)
        high = head.next - 1 if last is None else min(last, head.next - 1)
        if first is None or first <= head.whole_from:
            return "earliest", head.first, high
        return str(first), first, high

    def last_before(self, moment: datetime.datetime) -> int:
        """The last sequence stored before a moment."""
        options = self.connecting
        return patiently(options, lambda js: sequence_at(js, whole_head(js, options), moment)) - 1

    def pop_report(self, key: str) -> dict[str, int]:
        """Read and remove the report of the last commit."""

        bucket = projection_bucket(self.app.name)
        # From the leader: a replica may lag. Each request is retried by itself: if the answer to a purge is lost, the
        # purge is repeated, and by then the report can no longer be read.
        report = patiently(self.connecting, lambda js: js.kv(bucket).get(key, direct=False).value)
        patiently(self.connecting, lambda js: js.kv(bucket).purge(key))
        counts: dict[str, int] = json.loads(report)
        return counts


def _names(app: App, projections: Sequence[str], buckets: Mapping[str, str]) -> list[str]:
    if isinstance(projections, str):
        raise ConfigError(f"projections={projections!r}: expected a list of names, such as [{projections!r}]")
    names = list(dict.fromkeys(projections)) or list(app.projections)
    known = ", ".join(app.projections) or "none"
    for name in [*names, *buckets]:
        if name not in app.projections:
            raise ConfigError(f"projection {name!r}: {app.name} has none of this name; it has {known}")
    if not names:
        raise ConfigError(f"{app!r} has no projections")
    return names


def _check_apart(app: App, buckets: Mapping[str, str]) -> None:
    """Check that no two projections use the same bucket, where their states would be confused.

    Raises:
        ConfigError: Two projections share a bucket, or one would use the bucket of another projection.
    """
    owners = {spec.bucket.bucket: name for name, spec in app.projections.items()}
    for name, bucket in buckets.items():
        if (other := owners.setdefault(bucket, name)) != name:
            raise ConfigError(
                f"buckets: {bucket!r} for projection {name!r} is the one of {other!r}: expected a bucket for each"
            )


def _check_chosen(names: Sequence[str], buckets: Mapping[str, str]) -> None:
    """
    Raises:
        ConfigError: A bucket is given for a projection that would not be folded.
    """
    for name, bucket in buckets.items():
        if name not in names:
            raise ConfigError(
                f"buckets: {bucket!r} for projection {name!r}, which is not one of projections={list(names)}: expected "
                "it there, too"
            )


def _places(js: JetStream, app: App, names: Sequence[str]) -> dict[str, str]:
    """The bucket that each projection is in."""
    records = js.kv(projection_bucket(app.name))
    found = {}
    for name in names:
        spec = app.projections[name]
        try:
            record = records.get(alias_key(name), direct=False).value
        except KeyNotFound:
            record = None
        found[name] = check_version(spec, bucket_ref_of(spec, record)).bucket
    return found
