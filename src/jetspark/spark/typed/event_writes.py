"""Writing typed rows as events of an application: ``write_events``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import pyarrow as pa
from pyspark import TaskContext

from jetspark.app import App
from jetspark.core.numbers import seconds
from jetspark.errors import ConfigError
from jetspark.spark.connections import client_for, patiently
from jetspark.spark.engine.app_files import load_app, locate_app
from jetspark.spark.engine.projection_options import ConnectingKeywords, option_text, servers_text
from jetspark.spark.engine.projections import check_pandas
from jetspark.spark.formats import register
from jetspark.spark.queries import plain_failures
from jetspark.spark.stream.sink import Target
from jetspark.spark.tasks import TaskId
from jetspark.spark.typed.event_options import FORMAT
from jetspark.spark.typed.event_sink import EventLayout
from jetspark.spark.typed.refused_rows import Reason, invalid_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["EventSinkKeywords", "write_events"]


class EventSinkKeywords(ConnectingKeywords, total=False):
    """Options of writes of the format ``jetstream_events`` as keywords, for type checkers."""

    invalid: str
    idColumn: str
    timeColumn: str
    causeColumn: str
    correlationColumn: str
    causationColumn: str
    stream: str
    publishMode: str
    writeId: str
    exactlyOnce: bool | str
    maxPendingMessages: int | str
    maxPendingBytes: int | str
    maxAtomicMessages: int | str
    patienceMs: int | str
    ledger: bool | str
    ledgerBucket: str
    recoveryHorizonMs: int | str
    whenNotExactlyOnce: str


@overload
def write_events(
    frame: DataFrame,
    app: App | str,
    *kinds: type[object],
    servers: str | Sequence[str] = ...,
    **options: Unpack[EventSinkKeywords],
) -> None: ...


@overload
def write_events(
    frame: DataFrame,
    app: App | str,
    *kinds: type[object],
    checkpoint: str,
    servers: str | Sequence[str] = ...,
    until_now: bool = ...,
    interval_s: float | None = ...,
    query_name: str | None = ...,
    **options: Unpack[EventSinkKeywords],
) -> StreamingQuery: ...


def write_events(
    frame: DataFrame,
    app: App | str,
    *kinds: type[object],
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    checkpoint: str | None = None,
    until_now: bool = False,
    interval_s: float | None = None,
    query_name: str | None = None,
    **options: Unpack[EventSinkKeywords],
) -> StreamingQuery | None:
    """Publish each row of a frame as an event of an application.

    The columns are those of :func:`jetspark.spark.events`: one type has a column for each of its fields, several types
    a struct column each and ``type``. A streaming frame needs ``checkpoint``, and starts a query, which is returned; a
    batch frame is written before this returns.

    Each row is checked by its contract before it is sent: of a batch frame all rows before the first is sent, which
    computes the frame twice, so cache an expensive one; of a streaming frame all rows of a partition of a micro-batch.
    With ``invalid="dead_letter"`` rows that are not valid events become dead letters, and the others are sent at once.

    An event's id is the value of ``idColumn``, else that of the class's ``event_id()``, else it is derived: from the
    event in the column ``_event``, which becomes the cause of the new one, or from the query and the place of the row.
    docs/spark-events.md says what that means for batches that are written again.

    Args:
        app: The application, or its location ``package.module:name``. Spark's workers import it.
        kinds: Classes of events that the application declares.
        checkpoint: The folder that keeps the query's position and its progress in writing.
        until_now: End the query when all rows that exist at the start are written.
        interval_s: Seconds between the starts of two micro-batches; by default a batch starts as soon as there are
            rows. Cannot be combined with ``until_now``.
        options: Options of the format, such as ``invalid="dead_letter"``, ``idColumn`` and ``credentialsFile``.

    Raises:
        InvalidRows: Rows of a batch frame are not valid events; nothing was sent. The error of a query names it, too.
        ConfigError: An option is invalid, a column is missing, is not a field or has another type, or workers cannot
            import the application.
        UsageError: A batch frame could not be written; the message is that of the error in the task.
    """
    location = locate_app(app)
    declared = load_app(location.name, location.folder) if isinstance(app, str) else app
    given = {name: option_text(value) for name, value in options.items()}
    given |= {"servers": servers_text(servers), "app": location.name, "type": ",".join(_types(declared, kinds))}
    given["appFolder"] = location.folder
    layout = EventLayout.of(given, frame.schema, declared)  # here an error is not one of Spark's
    register(frame.sparkSession)
    if not frame.isStreaming:
        _check_batch(checkpoint=checkpoint, until_now=until_now, interval_s=interval_s, query_name=query_name)
        with plain_failures():
            if layout.options.invalid == "fail":
                _check_rows(frame, layout)
            frame.write.format(FORMAT).options(**given).mode("append").save()
        return None
    if not checkpoint:
        raise ConfigError("write_events: a streaming frame needs checkpoint=, a folder that the query keeps")
    writer = frame.writeStream.format(FORMAT).options(**given).option("checkpointLocation", checkpoint)
    if query_name is not None:
        writer = writer.queryName(query_name)
    return _triggered(writer, until_now=until_now, interval_s=interval_s).start()


def _triggered(writer: DataStreamWriter, *, until_now: bool, interval_s: float | None) -> DataStreamWriter:
    if until_now and interval_s is not None:
        raise ConfigError(
            f"interval_s={interval_s!r}: expected None with until_now=True, which takes all there is at once"
        )
    if until_now:
        return writer.trigger(availableNow=True)
    if interval_s is not None:
        return writer.trigger(processingTime=f"{int(seconds('interval_s', interval_s) * 1000)} milliseconds")
    return writer


def _types(app: App, kinds: Sequence[type[object]]) -> list[str]:
    """
    Raises:
        ConfigError: No class was given, a class is not declared, or a newer version of it is declared.
    """
    if not kinds:
        known = ", ".join(each.kind.__name__ for each in app.catalogue)
        raise ConfigError(f"expected one or more classes of events; app {app.name!r} declares {known}")
    newest = {each.type: each for each in app.catalogue}
    for kind in kinds:
        contract = app.catalogue.declared(kind)
        if newest[contract.type] is not contract:
            raise ConfigError(
                f"{kind.__name__} is version {contract.version} of {contract.type!r}: expected the newest one, "
                f"{newest[contract.type].kind.__name__}, whose version is {newest[contract.type].version}"
            )
    return list(dict.fromkeys(app.catalogue.declared(kind).type for kind in kinds))


def _check_rows(frame: DataFrame, layout: EventLayout) -> None:
    """Encode all rows of a frame, and send none.

    Raises:
        InvalidRows: Some are not valid events.
    """
    check_pandas("jetspark.spark.write_events")
    options = layout.options
    connecting = options.connecting()
    target = patiently(connecting, lambda js: Target.find(js, options, layout, ""), is_first_contact=True)
    max_bytes = client_for(connecting).server_info.max_payload_bytes
    found = frame.mapInArrow(functools.partial(_reasons, layout, target, max_bytes), _REASONS).collect()
    rows, invalid = sum(each.rows for each in found), sum(each.invalid for each in found)
    if not invalid:
        return
    reasons: dict[str, Reason] = {}
    for each in found:
        if each.text is not None:
            reasons.setdefault(each.text, Reason(each.text, each.first)).count += each.broken_by
    raise invalid_rows("the frame", rows, invalid, reasons.values())


_REASONS = "rows long, invalid long, text string, first string, broken_by long"
_ARROW_REASONS = pa.schema(
    [
        ("rows", pa.int64()),
        ("invalid", pa.int64()),
        ("text", pa.string()),
        ("first", pa.string()),
        ("broken_by", pa.int64()),
    ]
)


def _reasons(
    layout: EventLayout, target: Target, max_bytes: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """A row with the counts of a task, and one for each reason."""
    context = TaskContext.get()
    task_id = TaskId("check", 0, 0 if context is None else context.partitionId())
    encoder = layout.encoder(target.destination(max_bytes, is_expected=True), task_id)
    rows = 0
    for batch in batches:
        rows += len(batch)
        encoder.encode(batch)
    reasons = encoder.reasons
    columns = {
        "rows": [rows, *(0 for _ in reasons)],
        "invalid": [encoder.refused, *(0 for _ in reasons)],
        "text": [None, *(each.text for each in reasons)],
        "first": [None, *(each.first for each in reasons)],
        "broken_by": [0, *(each.count for each in reasons)],
    }
    yield pa.RecordBatch.from_pydict(columns, schema=_ARROW_REASONS)


def _check_batch(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name}={value!r}: expected a streaming frame; this one is written at once")
