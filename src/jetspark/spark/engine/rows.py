"""Messages of an application's stream as rows for its projections.

A task reads a range of the stream, decodes and validates each message, and asks the projections for their keys. A row
is an event on its way to one key: which projection, the key, the sequence, and the *data* of the event as the message
has it, with the number of the contract that reads it. Nothing is printed again; the task that folds decodes the data
once more, which takes half a microsecond, and gets the same event to the last bit, whatever types its fields have. For
the same reason upcasts, which are pure, run there again. Of a projection with ``unique_ids`` the data stands behind the
id of the event, in as many bytes as the key keeps of it.

Two kinds of rows are none for a projection. ``LETTER`` is a message that cannot be read. ``COVERED`` says, after the
last row of a range, that all of it was read: when the rows of all ranges are stored, the buckets are that far.
"""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from jetspark.app.application import App
from jetspark.app.contracts.catalogue import Decoding
from jetspark.app.contracts.envelope import read_data, read_envelope
from jetspark.app.contracts.faults import user_errors
from jetspark.app.projections.folding import Failure, Recorded, Router, identity_of
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.stored_events import FailureCause
from jetspark.core.message import CoreMessage
from jetspark.core.subjects import on_one_of
from jetspark.spark.engine.covering import Covered
from jetspark.spark.reply_subjects import places
from jetspark.spark.schema import PROJECTION_SCHEMA
from jetspark.state.changes import Current

__all__ = ["BASE", "COVERED", "LETTER", "Readings", "RouteRows", "Unreadable", "base_rows", "specs_of", "unpack"]

LETTER, COVERED = -1, -2
BASE = -1
"""In place of the number of a contract: the row is a state that its key has, and no event."""

_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_subject_of, _data_of, _headers_of = attrgetter("subject"), attrgetter("data"), attrgetter("raw_headers")


class Unreadable(NamedTuple):
    """A message that no projection can take."""

    sequence: int
    time_us: int
    subject: str
    data: bytes
    headers: Any
    """The raw block, or name and value of each."""
    cause: FailureCause


def unpack(data: bytes) -> Any:
    """What a row without an event has instead: :class:`Unreadable` or :class:`Covered`."""
    return pickle.loads(data)


def base_rows(bases: Mapping[str, Current]) -> pa.Table:
    """The states that keys have, as rows; the projection is the only one, so its number is 0."""
    schema = to_arrow_schema(PROJECTION_SCHEMA, timezone="UTC")
    count = len(bases)
    columns = [[0] * count, list(bases), [0] * count, [BASE] * count, [pickle.dumps(each) for each in bases.values()]]
    arrays = [pa.array(each, field.type) for each, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def specs_of(app: App, names: Sequence[str]) -> list[ProjectionSpec]:
    """The projections that rows speak of by their numbers."""
    return [app.projections[name] for name in names]


class Readings:
    """The contracts of an application by number, the same in every process."""

    def __init__(self, app: App) -> None:
        found = app.catalogue.readings
        self.numbers = {name: number for number, name in enumerate(sorted(found))}
        self.readers = [_reader(found[name]) for name in self.numbers]
        """Each makes an event of its data."""


def _reader(reading: Decoding) -> Callable[[bytes], Any]:
    return partial(read_data, reading) if reading.upcasts else reading.contract.decoder()


class _PlainReading(NamedTuple):
    """How data of one version is read that needs no upcast, and which projections want the event."""

    number: int
    decode: Callable[[Any], Any]
    targets: tuple[tuple[int, ProjectionSpec], ...]


class _Columns:
    """The columns of a record batch, while it grows."""

    def __init__(self) -> None:
        self.targets: list[int] = []
        self.keys: list[str] = []
        self.sequences: list[int] = []
        self.readings: list[int] = []
        self.contents: list[bytes] = []

    def add(self, target: int, key: str, sequence: int, reading: int, content: bytes) -> None:
        self.targets.append(target)
        self.keys.append(key)
        self.sequences.append(sequence)
        self.readings.append(reading)
        self.contents.append(content)

    def cut(self, length: int) -> None:
        """Forget all rows but the first ``length``."""
        for column in self.all:
            del column[length:]

    @property
    def all(self) -> tuple[list[Any], ...]:
        return self.targets, self.keys, self.sequences, self.readings, self.contents


class RouteRows:
    """Makes record batches of rows for some projections; a :class:`~jetspark.spark.stream.reading.RowMaker`.

    Most messages are in the form in which events are written, of a version that needs no upcast. Those are read here,
    in one loop: it takes two thirds of the time. Whatever is not so, or raises, is left to the router, which decides
    for all engines what becomes of a message.
    """

    needs_contents = True

    def __init__(self, app: App, projections: Sequence[str], *, subjects: Sequence[str]) -> None:
        """``subjects`` is what is read, which may be more than the events' own."""
        specs = specs_of(app, projections)
        self._router = Router(specs, app.catalogue)
        self._targets = {name: number for number, name in enumerate(projections)}
        self._readings = Readings(app).numbers
        self._plain = {
            name: _PlainReading(
                self._readings[name],
                reading.contract.decoder(),
                tuple((number, spec) for number, spec in enumerate(specs) if reading.contract.kind in spec.events),
            )
            for name, reading in app.catalogue.readings.items()
            if not reading.upcasts
        }
        filters = self._router.filters
        self._is_wanted = None if set(filters) == set(subjects) else on_one_of(filters)
        self._arrow_schema = to_arrow_schema(PROJECTION_SCHEMA, timezone="UTC")

    def of_messages(self, stream: str, messages: Sequence[CoreMessage]) -> pa.RecordBatch:
        found = places(messages)
        sequences, times_us = found.sequences.to_pylist(), found.times_us.to_pylist()
        parts = (map(part, messages) for part in (_subject_of, _data_of, _headers_of))
        return self._batch(zip(sequences, *parts, times_us, strict=True))

    def of_stored(self, stream: str, messages: Sequence[Any]) -> pa.RecordBatch:
        return self._batch(
            (each.sequence, each.subject, each.data, each.headers, (each.timestamp - _EPOCH) // _MICROSECOND)
            for each in messages
        )

    def covered(self, part: Covered) -> pa.RecordBatch:
        """The row that says that a range was read."""
        return self._made([COVERED], [str(part.start)], [part.end - 1], [0], [pickle.dumps(part)])

    def _batch(self, messages: Iterable[tuple[Any, ...]]) -> pa.RecordBatch:
        """Of messages with the fields of :class:`Recorded`."""
        if (is_wanted := self._is_wanted) is not None:
            messages = (each for each in messages if is_wanted(each[1]))
        columns, plain = _Columns(), self._plain
        add_target, add_key, add_sequence, add_reading, add_content = (column.append for column in columns.all)
        for message in messages:
            length = len(columns.targets)
            try:
                envelope = read_envelope(message[2])
                number, decode, targets = plain[envelope.type, envelope.schemaversion or 1]
                data = bytes(envelope.data)
                event = decode(data)
                for target, spec in targets:
                    if spec.window is None:
                        keys = spec.keys_of(event)
                    else:
                        keys = spec.windowed_keys_of(event, envelope.time, message[4])
                    content = identity_of(envelope, message[3]) + data if spec.unique_ids and keys else data
                    for key in keys:
                        add_target(target)
                        add_key(key)
                        add_sequence(message[0])
                        add_reading(number)
                        add_content(content)
            except user_errors():
                columns.cut(length)
                self._route(Recorded(*message), columns)
        return self._made(*columns.all)

    def _route(self, message: Recorded, columns: _Columns) -> None:
        """Rows of a message of any form."""
        [(_, envelope, _, found, failures)] = self._router.spread([message])
        if failures:
            columns.add(LETTER, str(message.sequence), message.sequence, 0, _unreadable(message, failures))
        if not found or envelope is None:
            return
        number, data = self._readings[envelope.type, envelope.schemaversion or 1], bytes(envelope.data)
        for projection, keys in found:
            is_identified = keys and self._router.specs[projection].unique_ids
            content = identity_of(envelope, message.headers) + data if is_identified else data
            for key in keys:
                columns.add(self._targets[projection], key, message.sequence, number, content)

    def _made(self, *columns: list[Any]) -> pa.RecordBatch:
        arrays = [pa.array(each, field.type) for each, field in zip(columns, self._arrow_schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow_schema)


def _unreadable(message: Recorded, failures: Sequence[Failure]) -> bytes:
    headers = message.headers
    if headers is not None and not isinstance(headers, bytes):
        headers = list(headers.multi_items()) if hasattr(headers, "multi_items") else list(headers.items())  # type: ignore[assignment]
    cause = FailureCause.of(failures[0].error, is_transient=False)
    names = ", ".join(sorted({name for failure in failures for name in failure.projections}))
    cause = dataclasses.replace(cause, message=f"{names}: {cause.message}")
    return pickle.dumps(Unreadable(message.sequence, message.time_us, message.subject, message.data, headers, cause))
