"""Compares the decisions of two versions of a workflow on recorded history, on Spark; stores nothing.

Tasks read the stream and find the run of each message. Spark shuffles the messages by run, and other tasks sort them by
sequence and run both versions (:mod:`jetspark.app.workflows.version_comparison`). Workers import the application by its
name, as for projections; they get the new version as the text of its module.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from jetspark.app import App
from jetspark.app.clock import utc_now
from jetspark.app.extents import Extent, ReplayRequest, extent_of
from jetspark.app.projections.router import Recorded
from jetspark.app.replay.what_if import NewCode, WhatIf, check_request, comparison_of
from jetspark.app.workflows.version_comparison import ComparedRun, Divergence, StepDifference
from jetspark.blocking import JetStream
from jetspark.blocking.context import context_of
from jetspark.core.numbers import whole
from jetspark.core.subjects import on_one_of, reading_filters
from jetspark.errors import MessageNotFound
from jetspark.lake.hybrid import HybridHead
from jetspark.spark.connections import patiently
from jetspark.spark.engine.app_files import AppLocation, load_app, locate_app
from jetspark.spark.engine.projection_options import ReadingKeywords, keyword_options, option_text, servers_text
from jetspark.spark.engine.projections import check_pandas
from jetspark.spark.formats import register
from jetspark.spark.options import read_options
from jetspark.spark.queries import plain_failures
from jetspark.spark.stream.heads import is_deleted, sequence_at
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.state.losses import first_ever, front_of
from jetspark.state.scan import Head

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["summarise_what_if", "what_if"]

_TEXTS = ArrayType(StringType())
_MESSAGES = StructType(
    [
        StructField("key", StringType()),
        StructField("sequence", LongType()),
        StructField("subject", StringType()),
        StructField("data", BinaryType()),
        StructField("headers", StringType()),
        StructField("time_us", LongType()),
    ]
)
_STEP = StructType(
    [
        StructField("sequence", LongType()),
        StructField("time", TimestampType()),
        StructField("type", StringType()),
        StructField("kinds", _TEXTS),
        StructField("old", StringType()),
        StructField("new", StringType()),
    ]
)
_DIVERGED = StructType(
    [
        StructField("kind", StringType()),
        StructField("name", StringType()),
        StructField("due", TimestampType()),
        StructField("sequence", LongType()),
    ]
)
_RUNS = StructType(
    [
        StructField("key", StringType()),
        StructField("events", LongType()),
        StructField("old_status", StringType()),
        StructField("new_status", StringType()),
        StructField("difference_count", LongType()),
        StructField("kinds", _TEXTS),
        StructField("differences", ArrayType(_STEP)),
        StructField("diverged", _DIVERGED),
    ]
)
MAX_HELD_ROWS = 1_000_000
MAX_HELD_BYTES = 128 << 20
RUNS_AT_A_TIME = 5_000


class _Task(NamedTuple):
    """Arguments of a task."""

    location: AppLocation
    workflow: str
    code: NewCode
    since: int
    keys: tuple[str, ...]
    ended: datetime.datetime

    def comparison(self) -> Any:
        app = load_app(self.location.name, self.location.folder)
        return comparison_of(app, self.workflow, self.code, since=self.since, keys=self.keys)


class _Question(NamedTuple):
    extent: Extent
    frame: DataFrame


def what_if(
    app: App | str,
    spark: SparkSession,
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    *,
    workflow: str,
    code: NewCode | str | Path,
    request: ReplayRequest | None = None,
    partitions: int | None = None,
    **options: Unpack[ReadingKeywords],
) -> DataFrame:
    """Compare the decisions of another version of a workflow with recorded history; stores nothing.

    Returns a frame with a row for each run that has events in the range: ``key``, ``events``, ``old_status``,
    ``new_status``, ``difference_count``, ``kinds`` (what differs), ``differences`` (each step that differs, with what
    both versions decide, as JSON) and ``diverged`` (the timer or command to which recorded history has no answer, or
    null). A row without a key counts the messages that neither version can read.

    Args:
        app: The application, or its location ``package.module:name``. Spark's workers import it.
        code: The file with the new version: an App with a workflow of this name, or one class with ``react``. Workers
            get its text; its imports must be available to them.
        request: The keys, and the range; the new version takes over at its beginning.
        options: Options of the format ``jetstream``, such as ``credentialsFile``.

    Raises:
        ConfigError: The workflow does not exist, or workers cannot import the application.
        DataLoss: The beginning of the stream was removed, so the states of its runs are unknown.
    """
    return _ask(app, spark, servers, workflow, code, request, partitions, options).frame


def summarise_what_if(
    app: App | str,
    spark: SparkSession,
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    *,
    workflow: str,
    code: NewCode | str | Path,
    request: ReplayRequest | None = None,
    partitions: int | None = None,
    **options: Unpack[ReadingKeywords],
) -> WhatIf:
    """The same as :func:`what_if`, as the live engine returns it: counts, and the runs that differ."""
    from pyspark.sql import functions as F

    with plain_failures():
        extent, frame = _ask(app, spark, servers, workflow, code, request, partitions, options)
        found = WhatIf(workflow=workflow, extent=extent)
        frame = frame.persist()  # read once, and asked twice
        try:
            counts = frame.select(
                F.sum(F.col("key").isNotNull().cast("bigint")),
                F.sum((F.col("key").isNotNull() & (F.col("difference_count") == 0)).cast("bigint")),
                F.sum(F.when(F.col("key").isNull(), F.col("events"))),
            ).collect()[0]
            for row in frame.where("difference_count > 0").orderBy("key").toLocalIterator():
                found.add(_run_of(row.asDict(recursive=True)))
        finally:
            frame.unpersist()
    found.runs, found.equal, found.unreadable = (count or 0 for count in counts)
    return found


def _ask(
    app: App | str,
    spark: SparkSession,
    servers: str | Sequence[str],
    workflow: str,
    code: NewCode | str | Path,
    request: ReplayRequest | None,
    partitions: int | None,
    options: ReadingKeywords,
) -> _Question:
    check_pandas("jetspark.spark.what_if")
    if partitions is not None:
        partitions = whole("partitions", partitions, instead="or None for spark.sql.shuffle.partitions")
    request = request or ReplayRequest()
    check_request(request)
    location = locate_app(app)
    declared = load_app(location.name, location.folder) if isinstance(app, str) else app
    module = location.name.partition(":")[0]
    new = code if isinstance(code, NewCode) else NewCode.read(code, module.rpartition(".")[0])
    filters = comparison_of(declared, workflow, new).filters
    given = keyword_options(ReadingKeywords, options) | {
        "servers": servers_text(servers),
        "stream": declared.stream,
        "subjects": option_text(reading_filters(filters)),
        "includeHeaders": "true",
    }
    connecting = read_options(SourceOptions, "jetstream", given)
    extent, ended = patiently(connecting, lambda js: _bounds(js, connecting, request), is_first_contact=True)
    task = _Task(location, workflow, new, extent.first, request.keys, ended)
    register(spark)
    given |= {"startingOffsets": "earliest", "endingOffsets": str(extent.last + 1)}
    rows = spark.read.format("jetstream").options(**given).load().mapInArrow(functools.partial(_keyed, task), _MESSAGES)
    together = rows.repartition("key") if partitions is None else rows.repartition(partitions, "key")
    return _Question(extent, together.mapInArrow(functools.partial(_compared, task), _RUNS))


def _bounds(js: JetStream, options: SourceOptions, request: ReplayRequest) -> tuple[Extent, datetime.datetime]:
    """The range, and when it ends."""
    [name] = options.stream
    context = context_of(js)
    head = options.archives().whole(name, lambda _: context.run(front_of(context.api, js.stream(name).info())))
    first = 1 if is_deleted(head) else first_ever(js.stream(name).cached_info.config)
    since, until = (
        None if moment is None else sequence_at(js, head, moment) for moment in (request.since, request.until)
    )
    extent = extent_of(request, head, first, since_seq=since, until_seq=until)
    extent_of(ReplayRequest(to_seq=extent.last or None), head, first)  # the states that it begins with, too
    return extent, request.until or _end_of(js, head, extent)


def _end_of(js: JetStream, head: Head, extent: Extent) -> datetime.datetime:
    """When the first message after a range was stored; the present time without such a message."""
    if isinstance(head, HybridHead):
        if times := head.archive.times(extent.last + 1, head.next):
            return times[0]
        if head.is_deleted:
            return utc_now()
    stream = js.stream(extent.stream)
    try:
        return stream.get_message(extent.last + 1, next_for=">", direct=False).timestamp
    except MessageNotFound:
        return stream.cached_info.timestamp or utc_now()


# ---- in tasks --------------------------------------------------------------------------------------------------------

_NEEDED = ("nats-scheduler", "nats-schedule-next")


def _keyed(task: _Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The messages of runs with their keys; messages that cannot be read have a null key."""
    import pyarrow as pa

    schema = to_arrow_schema(_MESSAGES, timezone="UTC")
    comparison = task.comparison()
    is_wanted = on_one_of(comparison.filters)
    for batch in batches:
        rows: list[tuple[Any, ...]] = []
        for message, headers in _messages(batch):
            if not is_wanted(message.subject):
                continue
            before = comparison.unreadable
            key = comparison.key_of(message)
            if key is not None or comparison.unreadable > before:
                rows.append((key, message.sequence, message.subject, message.data, headers, message.time_us))
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrays = [pa.array(each, kind.type) for each, kind in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _messages(batch: pa.RecordBatch) -> Iterator[tuple[Recorded, str | None]]:
    names = ("sequence", "subject", "data", "headers", "timestamp")
    epoch = datetime.datetime.fromtimestamp(0, datetime.UTC)
    for sequence, subject, data, pairs, moment in zip(*(batch[name].to_pylist() for name in names), strict=True):
        # What says how to read the message, and which timer has published it; the others are not of interest.
        headers = {
            name: values[0]
            for name, values in pairs or ()
            if values and (name.lower() in _NEEDED or name.lower().startswith(("ce-", "content-type")))
        }
        time_us = (moment - epoch) // datetime.timedelta(microseconds=1)
        yield Recorded(sequence, subject, data, headers, time_us), json.dumps(headers) if headers else None


def _compared(task: _Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The runs that a task has all messages of."""
    from jetspark.spark.engine.sequence_sort import SequenceSort

    columns = ("key", "sequence", "subject", "data", "headers", "time_us")
    comparison = task.comparison()
    unreadable = 0
    with SequenceSort(max_rows=MAX_HELD_ROWS, max_bytes=MAX_HELD_BYTES, columns=columns) as rows:
        for each in batches:
            rows.add(each)
        for piece in rows.pieces():
            for key, sequence, subject, data, headers, time_us in zip(*piece, strict=True):
                if key is None:
                    unreadable += 1
                else:
                    known = None if headers is None else json.loads(headers)
                    comparison.take(Recorded(sequence, subject, data, known, time_us))
    found: list[dict[str, Any]] = []
    if unreadable:
        found.append({"key": None, "events": unreadable, "difference_count": 0})
    for run in comparison.results(task.ended):
        found.append(_row_of(run))
        if len(found) >= RUNS_AT_A_TIME:
            yield _batch_of(found)
            found = []
    yield _batch_of(found)


def _batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pylist(rows, schema=to_arrow_schema(_RUNS, timezone="UTC"))


def _row_of(run: ComparedRun) -> dict[str, Any]:
    return {
        "key": run.key,
        "events": run.events,
        "old_status": run.old_status,
        "new_status": run.new_status,
        "difference_count": run.difference_count,
        "kinds": run.kinds,
        "differences": [
            {
                "sequence": step.sequence,
                "time": step.time,
                "type": step.type,
                "kinds": list(step.kinds),
                "old": json.dumps(step.old, sort_keys=True),
                "new": json.dumps(step.new, sort_keys=True),
            }
            for step in run.differences
        ],
        "diverged": None if run.diverged is None else asdict(run.diverged),
    }


def _run_of(row: dict[str, Any]) -> ComparedRun:
    """The run that a row was made of."""
    steps = [
        StepDifference(
            **each
            | {
                "time": _utc(each["time"]),
                "kinds": tuple(each["kinds"]),
                "old": json.loads(each["old"]),
                "new": json.loads(each["new"]),
            }
        )
        for each in row["differences"]
    ]
    away = row["diverged"]
    return ComparedRun(
        key=row["key"],
        events=row["events"],
        old_status=row["old_status"],
        new_status=row["new_status"],
        difference_count=row["difference_count"],
        differences=steps,
        diverged=None if away is None else Divergence(**away | {"due": _utc(away["due"])}),
    )


def _utc(moment: datetime.datetime) -> datetime.datetime:
    """A row has the local time of the driver, without a zone."""
    return moment.astimezone(datetime.UTC)
