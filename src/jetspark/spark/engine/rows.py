"""Messages of an application's stream as rows for its projections.

A task reads a range of the stream, decodes and validates each message, and asks the projections for their keys. A row
is an event on its way to one key: which projection, the key, the sequence, and the *data* of the event as the message
has it, with the number of the contract that reads it. Nothing is printed again; whoever folds the row decodes its data
once more, which takes half a microsecond, and gets the same event to the last bit, whatever types its fields have. For
the same reason upcasts, which are pure, run there again.

Two kinds of rows are none for a projection. ``LETTER`` is a message that cannot be read. ``COVERED`` says, after the
last row of a range, that all of it was read: when the rows of all ranges are stored, the buckets are that far.
"""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from jetspark.app.application import App
from jetspark.app.contracts.envelope import read_data
from jetspark.app.dead_letters.letters import FailureCause
from jetspark.app.projections.declaring import ProjectionSpec
from jetspark.app.projections.folding import Failure, Recorded, Router
from jetspark.core.message import CoreMessage
from jetspark.core.subjects import matches
from jetspark.spark.engine.covering import Covered
from jetspark.spark.reply_subjects import places
from jetspark.spark.schema import PROJECTION_SCHEMA

__all__ = ["COVERED", "LETTER", "Readings", "RouteRows", "Unreadable", "specs_of", "unpack"]

LETTER, COVERED = -1, -2

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


def specs_of(app: App, names: Sequence[str]) -> list[ProjectionSpec]:
    """The projections that rows speak of by their numbers."""
    return [app.projections[name] for name in names]


class Readings:
    """The contracts of an application by number, the same in every process."""

    def __init__(self, app: App) -> None:
        found = app.catalogue.readings
        self.numbers = {name: number for number, name in enumerate(sorted(found))}
        self.readers = [partial(read_data, found[name]) for name in self.numbers]
        """Each makes an event of its data."""


class RouteRows:
    """Makes record batches of rows for some projections; a :class:`~jetspark.spark.stream.reading.RowMaker`."""

    needs_contents = True

    def __init__(self, app: App, projections: Sequence[str], *, subjects: Sequence[str]) -> None:
        """``subjects`` is what is read, which may be more than the events' own."""
        self._router = Router(specs_of(app, projections), app.catalogue)
        self._targets = {name: number for number, name in enumerate(projections)}
        self._readings = Readings(app).numbers
        filters = self._router.filters
        # The router itself leaves out what is on none of several filters.
        self._filters = [] if len(filters) > 1 or set(filters) == set(subjects) else filters
        self._arrow_schema = to_arrow_schema(PROJECTION_SCHEMA, timezone="UTC")

    def of_messages(self, stream: str, messages: Sequence[CoreMessage]) -> pa.RecordBatch:
        found = places(messages)
        sequences, times_us = found.sequences.to_pylist(), found.times_us.to_pylist()
        parts = (map(part, messages) for part in (_subject_of, _data_of, _headers_of))
        return self._batch(map(Recorded, sequences, *parts, times_us))

    def of_stored(self, stream: str, messages: Sequence[Any]) -> pa.RecordBatch:
        return self._batch(
            Recorded(each.sequence, each.subject, each.data, each.headers, (each.timestamp - _EPOCH) // _MICROSECOND)
            for each in messages
        )

    def covered(self, part: Covered) -> pa.RecordBatch:
        """The row that says that a range was read."""
        return self._made([COVERED], [str(part.start)], [part.end - 1], [0], [pickle.dumps(part)])

    def _batch(self, messages: Iterable[Recorded]) -> pa.RecordBatch:
        targets: list[int] = []
        keys: list[str] = []
        sequences: list[int] = []
        readings: list[int] = []
        contents: list[bytes] = []
        numbers, target_of = self._readings, self._targets
        if self._filters:
            messages = (each for each in messages if any(matches(one, each.subject) for one in self._filters))
        for message, envelope, _, found, failures in self._router.spread(messages):
            if failures:
                targets.append(LETTER)
                keys.append(str(message.sequence))
                sequences.append(message.sequence)
                readings.append(0)
                contents.append(_unreadable(message, failures))
            if not found or envelope is None:
                continue
            number, data = numbers[envelope.type, envelope.schemaversion or 1], bytes(envelope.data)
            for projection, its_keys in found:
                for key in its_keys:
                    targets.append(target_of[projection])
                    keys.append(key)
                    sequences.append(message.sequence)
                    readings.append(number)
                    contents.append(data)
        return self._made(targets, keys, sequences, readings, contents)

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
