"""Converts messages of an application's stream into rows for its projections.

A task reads a range of the stream, decodes and validates each message, and finds its keys. A row is an event for one
key: the number of the projection, the key, the sequence, and the *data* of the event as the message has it, with the
number of the contract that decodes it. The task that folds decodes the same bytes again, which takes half a microsecond
and yields exactly the same event, whatever the types of its fields. Upcasts are pure and also run there again. With
``unique_ids`` the stored form of the event's id precedes the data.

Two kinds of rows are not for a projection. ``LETTER`` is an unreadable message. ``COVERED`` follows the last
row of a range and tells that the range was read completely: when the rows of all ranges are stored, the positions of
the buckets advance.
"""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from jetspark.app.application import App
from jetspark.app.contracts.catalogue import Decoding
from jetspark.app.contracts.envelope import Envelope, read_data
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import EventBatch, Failure, Received, Recorded, Router, raw_data
from jetspark.app.stored_events import FailureCause
from jetspark.core.message import CoreMessage
from jetspark.jetstream.info import StoredMessage
from jetspark.lake.reply_subjects import stream_offsets
from jetspark.spark.engine.coverage import Covered
from jetspark.spark.schema import PROJECTION_SCHEMA
from jetspark.state.changes import Current

__all__ = ["BASE", "COVERED", "LETTER", "Readings", "RouteRows", "Unreadable", "base_rows", "specs_of", "unpack"]

LETTER, COVERED = -1, -2
BASE = -1
"""Replaces the number of a contract: the row has the state of its key instead of an event."""

_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)


class Unreadable(NamedTuple):
    """A message that no projection can read."""

    sequence: int
    time_us: int
    subject: str
    data: bytes
    headers: Any
    """The raw header block, or a list of names and values."""
    cause: FailureCause


def unpack(data: bytes) -> Any:
    """Decode the data of a row without an event: :class:`Unreadable` or :class:`Covered`."""
    return pickle.loads(data)


def base_rows(bases: Mapping[str, Current]) -> pa.Table:
    """States of keys as rows of a single projection, whose number is 0."""
    schema = to_arrow_schema(PROJECTION_SCHEMA, timezone="UTC")
    count = len(bases)
    columns = [[0] * count, list(bases), [0] * count, [BASE] * count, [pickle.dumps(each) for each in bases.values()]]
    arrays = [pa.array(each, field.type) for each, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def specs_of(app: App, names: Sequence[str]) -> list[ProjectionSpec]:
    """The projections in the order of their numbers in rows."""
    return [app.projections[name] for name in names]


class Readings:
    """The contracts of an application by number, the same in every process."""

    def __init__(self, app: App) -> None:
        found = app.catalogue.readings
        self.numbers = {name: number for number, name in enumerate(sorted(found))}
        self.readers = [_reader(found[name]) for name in self.numbers]
        """By number: decodes the data of an event."""


def _reader(reading: Decoding) -> Callable[[bytes], Any]:
    return partial(read_data, reading) if reading.upcasts else reading.contract.decoder()


class RouteRows:
    """Makes record batches of rows for some projections; a :class:`~jetspark.spark.stream.reading.RowMaker`.

    Messages are decoded and routed by the loop of all engines, :mod:`jetspark.app.projections.router`.
    """

    needs_contents = True

    def __init__(self, app: App, projections: Sequence[str], *, subjects: Sequence[str]) -> None:
        """``subjects``: the filters that the messages were read with; they may select more than events."""
        self._targets = {name: number for number, name in enumerate(projections)}
        self._router = Router(specs_of(app, projections), app.catalogue, subjects=subjects, with_envelopes=True)
        self._numbers = Readings(app).numbers
        self._number_of = {
            reading.contract.kind: self._numbers[name]
            for name, reading in app.catalogue.readings.items()
            if not reading.upcasts
        }
        """By the class of an event: the contract that reads data of its version."""
        self._arrow_schema = to_arrow_schema(PROJECTION_SCHEMA, timezone="UTC")

    def of_messages(self, stream: str, messages: Sequence[CoreMessage]) -> pa.RecordBatch:
        found = stream_offsets(messages)
        sequences, times_us = found.sequences.to_pylist(), found.times_us.to_pylist()

        def recorded(index: int) -> Recorded:
            message = messages[index]
            return Recorded(sequences[index], message.subject, message.data, message.raw_headers, times_us[index])

        return self._batch(messages, sequences, recorded, times_us)

    def of_stored(self, stream: str, messages: Sequence[StoredMessage]) -> pa.RecordBatch:
        def recorded(index: int) -> Recorded:
            each = messages[index]
            return Recorded(
                each.sequence, each.subject, each.data, each.headers, (each.timestamp - _EPOCH) // _MICROSECOND
            )

        return self._batch(messages, [each.sequence for each in messages], recorded)

    def covered(self, part: Covered) -> pa.RecordBatch:
        """The row that marks a range as read completely."""
        return self._made([[COVERED], [str(part.start)], [part.end - 1], [0], [pickle.dumps(part)]])

    def _batch(
        self,
        messages: Sequence[Received],
        sequences: Sequence[int],
        recorded: Callable[[int], Recorded],
        times_us: Sequence[int] | None = None,
    ) -> pa.RecordBatch:
        batch = self._router.decode(messages, sequences, recorded, times_us)
        routes = self._router.route(batch)
        numbers, contents = self._contents(messages, batch)
        columns: list[list[Any]] = [[] for _ in PROJECTION_SCHEMA]
        for found in routes.columns:
            data = found.pick(contents)
            if found.spec.unique_ids:
                data = list(map(bytes.__add__, found.identities(batch), data))
            target = [self._targets[found.spec.name]] * len(found.keys)
            parts: tuple[Sequence[Any], ...] = (target, found.keys, found.pick(sequences), found.pick(numbers), data)
            for column, part in zip(columns, parts, strict=True):
                column.extend(part)
        for index, failures in sorted(routes.failures.items()):
            message = recorded(index)
            row = (LETTER, str(message.sequence), message.sequence, 0, _unreadable(message, failures))
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        return self._made(columns)

    def _contents(self, messages: Sequence[Received], batch: EventBatch) -> tuple[list[int], list[bytes]]:
        """For each event the number of its contract, and its data; 0 and nothing for a message without an event."""
        numbers, contents = list[int](), list[bytes]()
        add_number, add_content, number_of = numbers.append, contents.append, self._number_of
        for message, event, envelope in zip(messages, batch.events, batch.envelopes, strict=True):
            if event is None:
                add_number(0)
                add_content(b"")
            elif envelope.__class__ is Envelope:  # of another form or version: the envelope has the data
                assert isinstance(envelope, Envelope)
                add_number(self._numbers[envelope.type, envelope.schemaversion or 1])
                add_content(bytes(envelope.data))
            else:
                add_number(number_of[event.__class__])
                add_content(raw_data(message.data))
        return numbers, contents

    def _made(self, columns: Sequence[list[Any]]) -> pa.RecordBatch:
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
