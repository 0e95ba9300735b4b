"""Operations data as frames: dead letters, unreadable messages, and a redrive of the rows of a query."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from jetspark.aio.connector import connect
from jetspark.app import App
from jetspark.app.clock import microseconds
from jetspark.app.contracts.envelope import Envelope, read_any_envelope, read_event, whole_reader
from jetspark.app.dead_letters.listing import DeadLetterFilter, number_list
from jetspark.app.dead_letters.outcomes import RedriveProgress
from jetspark.app.dead_letters.redriving import run_redrive
from jetspark.app.projections.router import filters_of
from jetspark.app.stored_events import StoredEvent, dead_letter_filter, separate_body_subject
from jetspark.app.topology.names import dead_letter_stream
from jetspark.core.headers import restored
from jetspark.errors import ConfigError, ContractViolation, MessageNotFound, ProtocolError, StreamNotFound
from jetspark.spark.connections import patiently
from jetspark.spark.engine.app_files import AppLocation, load_app, locate_app
from jetspark.spark.engine.projection_options import ConnectingKeywords, option_text, servers_text
from jetspark.spark.engine.projections import check_pandas
from jetspark.spark.formats import register
from jetspark.spark.options import Connecting, read_options
from jetspark.spark.typed.event_frames import EventKeywords

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jetspark.blocking import JetStream

__all__ = ["dead_letters", "redrive", "unreadable_events"]

MAX_CHOICE_BYTES = 1 << 19
"""Numbers of dead letters in one redrive, as text: they are part of its record in a bucket, whose values have up to a
megabyte. It has room for some 60,000 dead letters, and for more where their numbers follow one another."""

_HEADERS = MapType(StringType(), ArrayType(StringType()))


def dead_letters(
    spark: SparkSession,
    app: App | str,
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    **options: Unpack[ConnectingKeywords],
) -> DataFrame:
    """The dead letters of an application as they are now, one row for each; closed ones are left out.

    ``number`` identifies a dead letter for :func:`redrive`. ``error``, ``message``, ``trace`` and ``fingerprint`` are
    those of the last failure, which was at ``failed``; they are null for a dead letter that waits behind another.
    ``stream``, ``sequence``, ``subject`` and ``stored`` say where and when the event was published. ``event`` has the
    attributes of its envelope, ``payload`` its data as JSON; both are null if it is not an event. ``raw`` and
    ``headers`` are the message, unchanged; ``raw`` is null if the event was too large to be kept and has left its
    stream.

    Args:
        app: The application, or its location ``package.module:name``.
        options: Connection options of the formats, such as ``credentialsFile``.

    Raises:
        ConfigError: An option is invalid.
        StreamNotFound: The application was not applied to this server.
    """
    check_pandas("jetspark.spark.dead_letters")
    given = _options(servers, options)
    connecting = read_options(Connecting, "dead_letters", given)
    name = _app(app).name
    stream = dead_letter_stream(name)
    patiently(connecting, lambda js: js.stream(stream), is_first_contact=True)
    register(spark)
    messages = (
        spark.read.format("jetstream")
        .options(**given, stream=stream, subjects=dead_letter_filter(name), includeHeaders="true")
        .load()
        .select("sequence", "subject", "headers", "data")
    )
    return messages.mapInArrow(functools.partial(_rows, given, stream), _SCHEMA)


def redrive(
    letters: DataFrame,
    app: App | str,
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    *,
    dry_run: bool = False,
    rate: float | None = None,
    wait_s: float = 0.0,
    **options: Unpack[ConnectingKeywords],
) -> RedriveProgress:
    """Have the handlers that failed handle the dead letters of a frame again: a choice of rows of :func:`dead_letters`.

    Only the column ``number`` is used. Dead letters that were handled or discarded since are passed over, and a request
    is stored once for each failure, so calling it twice changes nothing. A dead letter behind another follows it
    without a request. The result counts the requests; see :meth:`jetspark.app.AppDeadLetters.redrive`.

    Args:
        dry_run: Count what would be done.
        rate: Requests each second, at most.
        wait_s: How long to wait, at most, for what becomes of them; ``results`` says it then. 0 waits for nothing.

    Raises:
        UsageError: Another redrive is under way.
        ConfigError: The frame has no column ``number``, or too many rows for one redrive.
    """
    if "number" not in letters.columns:
        raise ConfigError(
            f"redrive: columns {', '.join(letters.columns)}: expected 'number', which dead_letters() has; keep it in "
            "the query"
        )
    numbers = number_list(row.number for row in letters.select("number").distinct().collect() if row.number is not None)
    if len(numbers) > MAX_CHOICE_BYTES:
        raise ConfigError(
            f"redrive: the numbers of these dead letters are {len(numbers)} bytes long, and one redrive takes "
            f"{MAX_CHOICE_BYTES}: choose fewer at a time, or take client.dead_letters.redrive(handler=...)"
        )
    if not numbers:
        nothing = DeadLetterFilter.of(None, {"number": 0})
        reason = "the frame has no rows"
        return RedriveProgress(id="-", chosen=nothing, up_to=0, is_dry_run=dry_run, is_done=True, reason=reason)
    connecting = read_options(Connecting, "redrive", _options(servers, options))

    async def run() -> RedriveProgress:
        async with connect(list(connecting.servers), auth=connecting.auth(), tls=connecting.tls()) as client:
            js = client.jetstream(
                domain=connecting.domain, prefix=connecting.prefix, timeout=connecting.request_timeout_s
            )
            chosen = DeadLetterFilter.of(None, {"number": numbers})
            return await run_redrive(js, _app(app), chosen, rate=rate, is_dry_run=dry_run, wait_s=wait_s)

    # In a thread: a notebook's own thread has an event loop that is running.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result()


def unreadable_events(
    spark: SparkSession,
    app: App | str,
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    **options: Unpack[EventKeywords],
) -> DataFrame:
    """The stored messages on the subjects of an application's events that its code cannot read, one row for each.

    ``type``, ``version``, ``source`` (the producer) and ``key`` are those of the envelope as far as it can be read;
    ``error``, ``field`` and ``reason`` say why the message is not an event; ``stream``, ``sequence``, ``subject``,
    ``stored`` and ``raw`` are the message. All messages on these subjects are read, so choose a range in a large
    stream. Workers import the application.

    Args:
        app: The application, or its location ``package.module:name``.
        options: Options of the format ``jetstream``, such as ``startingTimestamp`` and ``credentialsFile``.

    Raises:
        ConfigError: An option is invalid, or workers cannot import the application.
    """
    check_pandas("jetspark.spark.unreadable_events")
    location = locate_app(app)
    declared = _app(app)
    given = {"stream": declared.stream, "subjects": filters_of([each.kind for each in declared.catalogue])} | options
    texts = {
        name: json.dumps(value) if isinstance(value, dict) else option_text(value) for name, value in given.items()
    }
    texts |= {"servers": servers_text(servers), "includeHeaders": "true"}
    register(spark)
    messages = spark.read.format("jetstream").options(**texts).load().drop("stream_created")
    return messages.mapInArrow(functools.partial(_unreadable_rows, location), _UNREADABLE_SCHEMA)


def _options(servers: str | Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    return {name: option_text(value) for name, value in options.items()} | {"servers": servers_text(servers)}


def _app(app: App | str) -> App:
    return load_app(app, os.getcwd()) if isinstance(app, str) else app


# ---- rows ------------------------------------------------------------------------------------------------------------


class _Row:
    """One dead letter, and the envelope of its event if that can be read."""

    def __init__(self, number: int, letter: StoredEvent) -> None:
        self.number, self.letter, self.cause = number, letter, letter.cause
        self.envelope: Envelope | None = None
        if not letter.is_body_omitted:
            self.envelope = _envelope(letter)

    @property
    def event(self) -> dict[str, object] | None:
        found = self.envelope
        if found is None:
            return None
        return {
            "id": found.id,
            "type": found.type,
            "version": found.schemaversion or 1,
            "source": found.source,
            "time": found.time,
            "correlation": found.correlationid or found.id,
            "causation": found.causationid,
        }


_Read: TypeAlias = Callable[[_Row], Any]
_EVENT = StructType(
    [
        StructField("id", StringType()),
        StructField("type", StringType()),
        StructField("version", IntegerType()),
        StructField("source", StringType()),
        StructField("time", TimestampType()),
        StructField("correlation", StringType()),
        StructField("causation", StringType()),
    ]
)
_COLUMNS: tuple[tuple[str, DataType, _Read], ...] = (
    ("number", LongType(), lambda row: row.number),
    ("status", StringType(), lambda row: row.letter.status),
    ("handler", StringType(), lambda row: row.letter.handler),
    ("key", StringType(), lambda row: row.letter.key),
    ("stream", StringType(), lambda row: row.letter.origin.stream),
    ("sequence", LongType(), lambda row: row.letter.origin.sequence),
    ("stored", TimestampType(), lambda row: row.letter.origin.time_us),
    ("subject", StringType(), lambda row: row.letter.subject),
    ("attempts", IntegerType(), lambda row: row.letter.attempts),
    ("redrives", IntegerType(), lambda row: row.letter.redrives),
    ("behind", LongType(), lambda row: row.letter.behind),
    ("failed", TimestampType(), lambda row: _time(row.letter.failed)),
    ("error", StringType(), lambda row: row.cause and row.cause.error),
    ("message", StringType(), lambda row: row.cause and row.cause.message),
    ("transient", BooleanType(), lambda row: row.cause and row.cause.is_transient),
    ("fingerprint", StringType(), lambda row: row.cause and row.cause.fingerprint),
    ("trace", StringType(), lambda row: row.cause and row.cause.trace),
    ("event", _EVENT, lambda row: row.event),
    ("payload", StringType(), lambda row: row.envelope and bytes(row.envelope.data).decode("utf-8", "replace")),
    ("headers", _HEADERS, lambda row: [(name, row.letter.headers.get_all(name)) for name in row.letter.headers]),
    ("raw", BinaryType(), lambda row: None if row.letter.is_body_omitted else row.letter.data),
)
_SCHEMA = StructType([StructField(name, kind) for name, kind, _ in _COLUMNS])


def _rows(given: Mapping[str, str], stream: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    connecting = read_options(Connecting, "dead_letters", given)
    schema = to_arrow_schema(_SCHEMA, timezone="UTC")
    for batch in batches:
        found = []
        for row in batch.to_pylist():
            pairs = [(name, value) for name, values in row["headers"] or () for value in values]
            try:
                letter = StoredEvent.of(restored(pairs), row["data"])
            except ProtocolError:  # another program's message
                continue
            if letter.status == "closed":
                continue
            if letter.is_body_omitted:
                letter = patiently(connecting, functools.partial(_whole, letter, stream, row["subject"]))
            found.append(_Row(row["sequence"], letter))
        arrays = [
            pa.array([read(each) for each in found], field.type)
            for (_, _, read), field in zip(_COLUMNS, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _whole(letter: StoredEvent, stream: str, subject: str, js: JetStream) -> StoredEvent:
    """A dead letter with its event, which was too large to be stored with it: kept apart, or still in its stream."""
    try:
        if letter.apart is not None:
            kept = js.stream(stream).get_message(last_for=separate_body_subject(subject))
            return letter.whole(kept.data)
        stored = js.stream(letter.origin.stream).get_message(letter.origin.sequence)
    except (MessageNotFound, StreamNotFound):
        return letter
    if letter.partition is None and microseconds(stored.timestamp) != letter.origin.time_us:
        return letter  # the stream was re-created, and this is another event
    return dataclasses.replace(letter, data=stored.data, headers=stored.headers, is_body_omitted=False)


def _envelope(letter: StoredEvent) -> Envelope | None:
    try:
        return read_any_envelope(letter.subject, letter.data, dict(letter.headers.items()))
    except ContractViolation:
        return None


def _time(text: str) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text) if text else None


# ---- messages that are not events ------------------------------------------------------------------------------------

_UNREADABLE_SCHEMA = StructType(
    [
        StructField("type", StringType()),
        StructField("version", IntegerType()),
        StructField("source", StringType()),
        StructField("key", StringType()),
        StructField("error", StringType()),
        StructField("field", StringType()),
        StructField("reason", StringType()),
        StructField("stream", StringType()),
        StructField("sequence", LongType()),
        StructField("subject", StringType()),
        StructField("stored", TimestampType()),
        StructField("raw", BinaryType()),
    ]
)


def _unreadable_rows(location: AppLocation, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    catalogue = load_app(*location).catalogue
    read_whole = whole_reader(catalogue)
    schema = to_arrow_schema(_UNREADABLE_SCHEMA, timezone="UTC")
    for batch in batches:
        found = []
        subjects, data = batch.column("subject").to_pylist(), batch.column("data").to_pylist()
        for index, (subject, body) in enumerate(zip(subjects, data, strict=True)):
            try:
                read_whole(body)
            except Exception:  # whatever it is: the next reader says what is wrong, if anything is
                headers = {name: values[-1] for name, values in batch.column("headers")[index].as_py() or ()}
                try:
                    read_event(subject, body, headers, catalogue)
                except ContractViolation as error:
                    found.append(_unreadable_row(error, headers, batch.slice(index, 1).drop_columns(["headers"])))
        yield pa.RecordBatch.from_pylist(found, schema=schema)


def _unreadable_row(error: ContractViolation, headers: Mapping[str, str], message: pa.RecordBatch) -> dict[str, object]:
    [row] = message.to_pylist()
    envelope: Envelope | None = None
    with suppress(ContractViolation):
        envelope = read_any_envelope(row["subject"], row["data"], headers)
    return {
        "type": error.event_type or None,
        "version": error.version,
        "source": None if envelope is None else envelope.source,
        "key": None if envelope is None else envelope.subject,
        "error": type(error).__name__,
        "field": error.field or None,
        "reason": error.rule,
        "stream": row["stream"],
        "sequence": row["sequence"],
        "subject": row["subject"],
        "stored": row["timestamp"],
        "raw": row["data"],
    }
