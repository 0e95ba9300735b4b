"""The writers of ``jetstream_events``: the raw sink (:mod:`jetspark.spark.stream.sink`) with rows that are events."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from jetspark.app import App
from jetspark.app.columns import ENVELOPE, UNREADABLE, EventColumns
from jetspark.app.columns.typed_rows import TYPE, columns_by_name
from jetspark.app.contracts.catalogue import Contract
from jetspark.app.stored_events import StoredEvent
from jetspark.errors import ConfigError, PayloadTooLarge, StreamNotFound
from jetspark.spark.connections import patiently, runner_for
from jetspark.spark.engine.app_files import load_app, locate_app
from jetspark.spark.engine.dead_letters import store_letters
from jetspark.spark.options import choice, names, option, read_options, text
from jetspark.spark.stream.sink import BatchWriter, StreamWriter, WritingOptions
from jetspark.spark.stream.writing import Destination
from jetspark.spark.tasks import TaskId
from jetspark.spark.typed.event_encoding import EventEncoder, MetadataColumns
from jetspark.spark.typed.event_options import FORMAT, contracts_of
from jetspark.spark.typed.refused_rows import RefusedRows

__all__ = ["EventLayout", "EventSinkOptions", "batch_writer", "stream_writer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSinkOptions(WritingOptions):
    """The options of ``write`` and ``writeStream``."""

    app: str = option(text, "the application, `package.module:name`", default="")
    app_folder: str = option(
        text, "where its module is, if workers cannot import it otherwise; by default the driver's folder", default=""
    )
    type: tuple[str, ...] = option(names, "type of the events, or several with commas between them", default=())
    invalid: str = option(
        choice("fail", "dead_letter"),
        "a row that its contract does not allow: `fail` the write before any row of the partition is sent, or write a "
        "`dead_letter` with the row and the reason, and send the others",
        default="fail",
    )
    id_column: str | None = option(text, "column with the ids of the events")
    time_column: str | None = option(text, "column with their times; by default, and where it is null, now")
    cause_column: str | None = option(
        text, f"struct column with the event that led to each one; by default `{ENVELOPE}`, if there is one"
    )
    correlation_column: str | None = option(text, "column with their correlation ids; by default that of the cause")
    causation_column: str | None = option(text, "column with the ids of their causes; by default that of the cause")

    @property
    def target(self) -> str:
        return f"{self.app}\n{self.stream}\n{','.join(self.type)}"

    def metadata(self, columns: Sequence[str]) -> MetadataColumns:
        return MetadataColumns(
            id=self.id_column,
            time=self.time_column,
            correlation=self.correlation_column,
            causation=self.causation_column,
            cause=self.cause_column or (ENVELOPE if ENVELOPE in columns else None),
        )


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """For ``df.write``.

    Raises:
        ConfigError: An option or a column cannot be used, or the mode is not ``append``.
    """
    if overwrite:
        raise ConfigError(f'{FORMAT}: mode("overwrite"): events are added to a stream; use mode("append")')
    layout = EventLayout.of(options, schema)
    return BatchWriter(layout.options, layout)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """For ``df.writeStream``.

    Raises:
        ConfigError: As :func:`batch_writer`; here the output mode has to be ``append``.
    """
    layout = EventLayout.of(options, schema)
    if overwrite:
        raise ConfigError(
            f'{FORMAT}: outputMode("complete") would publish the whole result again with every batch: use "append"'
        )
    if layout.options.write_id is not None:
        raise ConfigError(f"{FORMAT}: writeId is for df.write: a streaming query is known by its checkpoint")
    return StreamWriter(layout.options, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLayout:
    """How rows become events: a :class:`~jetspark.spark.stream.writing.RowLayout`, plain data."""

    options: EventSinkOptions
    metadata: MetadataColumns
    stream: str
    has_own_ids: bool
    outline: str
    """A digest of the types' columns, by which a worker with other code is noticed."""
    has_ttl: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str], schema: StructType, app: App | None = None) -> EventLayout:
        """The layout of a frame by its columns.

        Args:
            app: The application; without it, it is imported.

        Raises:
            ConfigError: An option is invalid, or a column is missing, is not a field, or has another type.
        """
        options = _options_of(given)
        app = app or load_app(options.app, options.app_folder)
        contracts = written_contracts(app, options.type)
        arrow = to_arrow_schema(schema, timezone="UTC")
        if len(set(map(str.lower, arrow.names))) < len(arrow.names):
            raise ConfigError(f"{FORMAT}: columns {', '.join(arrow.names)}: expected each name once")
        metadata = options.metadata(arrow.names)
        _check_metadata(metadata, arrow)
        _check_fields(contracts, metadata, arrow)
        derives = any(each.id_of is not None for each in contracts.values())
        has_own_ids = derives or metadata.id is not None or metadata.cause is not None
        return cls(
            options=options,
            metadata=metadata,
            stream=app.stream,
            has_own_ids=has_own_ids,
            outline=_outline(contracts),
        )

    def some_subject(self, batch: pa.RecordBatch, partition: int) -> str:
        return ""  # the stream is known without it

    def encoder(
        self, destination: Destination, task_id: TaskId, *, has_ids: bool = True, with_digest: bool = False
    ) -> EventEncoder:
        options = self.options
        app = load_app(options.app, options.app_folder)
        contracts = written_contracts(app, options.type)
        if _outline(contracts) != self.outline:
            raise ConfigError(
                f"app={options.app!r}: the driver's code declares other fields than that of this worker: ship the same "
                "code to all, and start a new session, since workers keep what they have imported"
            )
        store = partial(_store, options, app) if options.invalid == "dead_letter" else None
        return EventEncoder(
            app,
            contracts,
            self.metadata,
            destination,
            task_id,
            RefusedRows(task_id, store),
            has_ids=has_ids,
            has_own_ids=self.has_own_ids,
            with_digest=with_digest,
            max_held_bytes=options.max_pending_bytes,
        )


def _options_of(given: Mapping[str, str]) -> EventSinkOptions:
    lowered = {name.lower(): value for name, value in given.items()}
    if not lowered.get("app"):
        raise ConfigError(f"{FORMAT}: the option 'app' is missing: expected 'package.module:name'")
    values = {name: value for name, value in given.items() if name.lower() != "appfolder"}
    folder = lowered["appfolder"] if "appfolder" in lowered else locate_app(lowered["app"]).folder
    return read_options(EventSinkOptions, FORMAT, values | ({"appFolder": folder} if folder else {}))


def written_contracts(app: App, types: tuple[str, ...]) -> dict[str, Contract]:
    """The newest contract of each type, by the name of the column with its fields; "" if there is one type.

    Raises:
        ConfigError: A type is missing or unknown, or two types would have the same column.
    """
    newest = {each.type: each for each in contracts_of(app, types)}  # in order of their versions
    found = list(newest.values())
    return {"": found[0]} if len(found) == 1 else columns_by_name(found)


def _check_fields(contracts: Mapping[str, Contract], metadata: MetadataColumns, columns: pa.Schema) -> None:
    """
    Raises:
        ConfigError: A column is missing, is not a field, or has another type.
    """
    if UNREADABLE in columns.names:
        raise ConfigError(
            f"column {UNREADABLE!r}: messages that could not be read are no events; leave them out, as "
            f'.where("{UNREADABLE} IS NULL").drop("{UNREADABLE}") does'
        )
    if "" in contracts:
        fields = EventColumns(contracts[""])
        fields.check(columns, beside=metadata.names() - set(fields.schema.names))
        return
    for name in (TYPE, *contracts):
        if name not in columns.names:
            expected = ", ".join([TYPE, *contracts])
            raise ConfigError(f"column {name!r} is missing: several types of events have the columns {expected}")
    for name in columns.names:
        if name not in (TYPE, ENVELOPE, *contracts, *metadata.names()):
            raise ConfigError(f"column {name!r}: not one of {', '.join([TYPE, *contracts])}; leave it out")
    for name, contract in contracts.items():
        if not pa.types.is_struct(columns.field(name).type):
            raise ConfigError(f"column {name!r}: expected a struct with the fields, got {columns.field(name).type}")
        EventColumns(contract).check(pa.schema(list(columns.field(name).type)))


def _check_metadata(metadata: MetadataColumns, columns: pa.Schema) -> None:
    """
    Raises:
        ConfigError: A column that an option names does not exist, or has another type.
    """
    for what in ("id", "time", "correlation", "causation", "cause"):
        path = getattr(metadata, what)
        if path is None:
            continue
        kind = _type_at(path, columns)
        is_right = {
            "id": pa.types.is_string(kind) or pa.types.is_integer(kind),
            "time": pa.types.is_timestamp(kind) and kind.tz is not None,
            "cause": pa.types.is_struct(kind) and "id" in kind.names and pa.types.is_string(kind.field("id").type),
        }.get(what, pa.types.is_string(kind))
        if not is_right:
            expected = {"id": "a text or a whole number", "time": "a timestamp", "cause": f"a struct as {ENVELOPE}"}
            raise ConfigError(f"{what}Column={path!r} is {kind}: expected {expected.get(what, 'a text')}")


def _type_at(path: str, columns: pa.Schema) -> pa.DataType:
    kind: pa.DataType = pa.struct(list(columns))
    for name in path.split("."):
        if not pa.types.is_struct(kind) or name not in kind.names:
            raise ConfigError(f"column {path!r}: the frame has no such column; it has {', '.join(columns.names)}")
        kind = kind.field(name).type
    return kind


def _outline(contracts: Mapping[str, Contract]) -> str:
    shape = [
        (each.type, each.version, each.subject.text, str(EventColumns(each).schema)) for each in contracts.values()
    ]
    return hashlib.sha256(repr(shape).encode()).hexdigest()[:16]


def _store(options: EventSinkOptions, app: App, letters: list[StoredEvent]) -> None:
    """Store dead letters of rows, unless they are stored."""
    connecting, patience_s, stream = options.connecting(), options.patience_s, app.spec.dead_letter_stream
    stored = store_letters(app.name, letters, patience_s=patience_s, has_bodies_elsewhere=False)
    try:
        patiently(connecting, lambda js: js.stream(stream), patience_s=patience_s)
        runner_for(connecting).run(stored)
    except StreamNotFound as error:
        raise ConfigError(
            f"invalid=dead_letter: app {app.name!r} has no stream {stream}: apply the application to this server; one "
            "without handlers and projections has no dead letters, so use invalid=fail"
        ) from error
    except PayloadTooLarge as error:
        raise ConfigError(f"invalid=dead_letter: a row is too large for a dead letter: {error}") from error
