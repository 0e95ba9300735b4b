"""Converts typed rows into the messages of events: the same bytes that ``App.publish`` sends for the same event and id.

Each row is built as an event, encoded by its contract, which checks every field, and put into an envelope. With
``invalid=fail`` a task encodes all of its rows before the first is sent: :class:`RowSpool` keeps the messages, in
memory up to a bound and in a temporary file beyond it. One invalid row ends the task, and none of its rows is stored.

The id of an event is the first of these that there is:

1. the value of the column of ids;
2. what ``event_id()`` of its class returns;
3. a digest of its cause, its type and its data. Events are recognised whatever order and partition a shuffle puts them
   into. Rows of one cause with the same data are numbered where they follow one another, as ``explode`` makes them;
4. ``<query>:<batch>:<partition>:<row>:<checksum>``, as the ids of raw rows.
"""

from __future__ import annotations

import datetime
import pickle
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from time import time_ns
from typing import IO, Any, NamedTuple, TypeAlias
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from jetspark.app.application import App
from jetspark.app.causes import child_of, new_trace
from jetspark.app.clock import utc_now
from jetspark.app.columns import EventColumns
from jetspark.app.columns.typed_rows import TYPE
from jetspark.app.contracts.catalogue import Contract
from jetspark.app.contracts.envelope import derived_id, write_data
from jetspark.app.contracts.event_ids import NewIds
from jetspark.app.contracts.faults import error_text, user_errors
from jetspark.core.subjects import MAX_SUBJECT_BYTES
from jetspark.errors import ConfigError, InvalidEvent
from jetspark.spark.stream.writing import (
    HEAD,
    MAX_HEADER_BYTES,
    Destination,
    MessageLimits,
    Rows,
    added_up,
    digest_of,
    id_fault,
)
from jetspark.spark.tasks import TaskId
from jetspark.spark.typed.refused_rows import Reason, RefusedRows

__all__ = ["EventEncoder", "MetadataColumns", "RowSpool"]

ROW_BYTES = 300
"""Memory of a message besides its data: id, subject, header block and the objects of Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataColumns:
    """Columns with what an event's fields do not say, as names or as paths such as ``_event.id``."""

    id: str | None = None
    time: str | None = None
    correlation: str | None = None
    causation: str | None = None
    cause: str | None = None
    """A struct such as ``_event``, with the id of the event that led to this one; if it has ``correlation`` and
    ``headers``, correlation and trace continue."""

    def names(self) -> set[str]:
        """The columns of the frame that are used."""
        paths = (self.id, self.time, self.correlation, self.causation, self.cause)
        return {path.partition(".")[0] for path in paths if path}


class _Said(NamedTuple):
    """The metadata columns of the events of one Arrow batch: iterables of the same length."""

    ids: Iterable[str | None] = repeat(None)
    times: Iterable[datetime.datetime | None] = repeat(None)
    causes: Iterable[str | None] = repeat(None)
    """Ids of the events that led to them."""
    correlations: Iterable[str | None] = repeat(None)
    causations: Iterable[str | None] = repeat(None)
    """Ids that take precedence over ``causes``."""
    traces: Iterable[str | None] = repeat(None)


class EventEncoder:
    """The rows of one partition as messages of events; a :class:`~jetspark.spark.stream.writing.RowEncoder`."""

    def __init__(
        self,
        app: App,
        contracts: Mapping[str, Contract],
        metadata: MetadataColumns,
        destination: Destination,
        task_id: TaskId,
        refused: RefusedRows,
        *,
        has_ids: bool,
        has_own_ids: bool,
        with_digest: bool,
        max_held_bytes: int,
    ) -> None:
        """
        Args:
            contracts: By the name of the struct with their fields; of a single type, whose fields are columns, by "".
            has_ids: Ids are the same in each attempt; otherwise each attempt has new ones.
            has_own_ids: Some ids are not made of the position, so :class:`Rows` has all of them whole.
        """
        self.rows = 0
        self.digest = 0
        self._source = app.spec.source
        self._columns = {name: EventColumns(contract) for name, contract in contracts.items()}
        self._metadata, self._refused, self._with_digest = metadata, refused, with_digest
        self._limits, self._max_held_bytes = MessageLimits(destination), max_held_bytes
        expected = f"Nats-Expected-Stream: {destination.stream}\r\n" if destination.is_expected else ""
        self._head = HEAD + expected.encode() + b"Nats-Msg-Id: "
        self._prefix, self._hides_prefix = task_id.id_prefix(), has_ids and not has_own_ids
        self._bits: Callable[[int], int] = random.SystemRandom().getrandbits
        self._new_ids = None if has_ids else NewIds(self._bits)
        self._trace = new_trace(self._bits)
        self._read = 0
        self._cause: str | None = None
        self._of_cause: dict[bytes, int] = {}
        """Data of the events of that cause, and how many have them."""

    @property
    def refused(self) -> int:
        return self._refused.count

    @property
    def reasons(self) -> list[Reason]:
        """Why rows were refused that did not become dead letters."""
        return list(self._refused.reasons.values())

    def encode_all(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Rows]:
        """The messages of all rows. With ``invalid=fail`` all rows are read before this returns.

        Raises:
            InvalidRows: Rows are not valid events.
        """
        if self._refused.are_stored:
            return map(self.encode, batches)
        spool = RowSpool(self._max_held_bytes)
        for batch in batches:
            spool.add(self.encode(batch))
        self._refused.check(self._read)
        return spool.read()

    def encode(self, batch: pa.RecordBatch) -> Rows:
        """The messages of the next rows that are not refused."""
        first, self._read = self._read, self._read + len(batch)
        refuse = partial(self._refused.add, first, batch)
        subjects, bodies, ids, blocks = list[str](), list[bytes](), list[bytes](), list[bytes]()
        digests, now, has_id_column = [self.digest], utc_now(), self._metadata.id is not None
        max_bytes = self._limits.max_bytes
        rows = zip(self._events(batch, refuse), *self._said(batch), strict=False)
        for row, ((contract, event), own, time, cause, correlation, causation, trace) in enumerate(rows):
            if event is None:
                continue
            try:
                data = contract.encode(event)
                if not has_id_column and contract.id_of is not None:
                    own = contract.id_of(event)
                if (has_id_column or own is not None) and (why := id_fault(own or "")) is not None:
                    name = self._metadata.id or "event_id()"
                    raise InvalidEvent(contract.type, contract.version, name, f"the id is {own!r}: {why}")
                said = (time, correlation, causation or cause)
                suffix = own or self._made_id(first + row, contract, data, cause, said)
                id = self._prefix + suffix if self._hides_prefix else suffix
                subject, body = write_data(contract, event, data, id, self._source, time or now, *said[1:])
                line = self._trace if trace is None else child_of(trace, self._bits)
                block = b"%b%b\r\ntraceparent: %b\r\n\r\n" % (self._head, id.encode(), line.encode())
                size = len(block)
                if size + len(body) > max_bytes or size > MAX_HEADER_BYTES or len(subject) > MAX_SUBJECT_BYTES:
                    why = self._limits.size_fault(body, block) or f"its subject has {len(subject)} bytes"
                    raise InvalidEvent(contract.type, contract.version, "", why)
            except InvalidEvent as error:
                refuse(row, contract, event, error.field, error.rule)
                continue
            except user_errors() as error:  # of the class's own code, such as its ``event_id``
                refuse(row, contract, event, "", error_text(error))
                continue
            if self._with_digest:
                digests.append(digest_of([contract.type.encode(), data, repr((own, *said)).encode()]))
            subjects.append(subject)
            bodies.append(body)
            ids.append(suffix.encode())
            blocks.append(block)
        for _, why in self._limits.subject_faults(subjects):
            raise ConfigError(why)
        self.digest = added_up(digests)
        self.rows += len(bodies)
        self._refused.store()
        return Rows(first, subjects, bodies, ids, blocks)

    def _made_id(self, position: int, contract: Contract, data: bytes, cause: str | None, said: _Explicit) -> str:
        if self._new_ids is not None:
            return self._new_ids.new(time_ns())
        if cause is not None:
            if cause != self._cause:
                self._cause, self._of_cause = cause, {}
            number = self._of_cause[data] = self._of_cause.get(data, -1) + 1
            return derived_id(cause, f"{contract.type}\n{data.decode()}", number)
        checksum = crc32(data, crc32(contract.type.encode()))
        if said != _NOTHING:
            checksum = crc32(repr(said).encode(), checksum)
        return f"{'' if self._hides_prefix else self._prefix}{position}:{checksum:08x}"

    # ---- columns -----------------------------------------------------------------------------------------------------

    def _events(self, batch: pa.RecordBatch, refuse: Callable[..., None]) -> Iterable[tuple[Contract, Any]]:
        """Contract and event of each row; no event for rows that cannot be one."""
        if "" in self._columns:
            columns = self._columns[""]
            events = self._read_events(columns, batch, range(len(batch)), refuse)
            return zip(repeat(columns.contract), events, strict=False)
        known = {columns.contract.type: name for name, columns in self._columns.items()}
        is_there = {name: batch.column(name).is_valid().to_pylist() for name in self._columns}
        rows_of: dict[str, list[int]] = {name: [] for name in self._columns}
        found: list[Any] = [(None, None)] * len(batch)
        for row, (type, *there) in enumerate(zip(batch.column(TYPE).to_pylist(), *is_there.values(), strict=True)):
            if type not in known:
                refuse(row, None, None, TYPE, f"{type!r}: expected one of {', '.join(known)}")
            elif sum(there) != 1 or not is_there[known[type]][row]:
                refuse(row, None, None, known[type], f"type is {type!r}: expected a value there and nowhere else")
            else:
                rows_of[known[type]].append(row)
        for name, rows in rows_of.items():
            if rows:
                part = pa.RecordBatch.from_struct_array(batch.column(name).take(pa.array(rows, pa.int64())))
                columns = self._columns[name]
                for row, event in zip(rows, self._read_events(columns, part, rows, refuse), strict=True):
                    found[row] = (columns.contract, event)
        return found

    def _read_events(
        self, columns: EventColumns, batch: pa.RecordBatch, rows: Sequence[int], refuse: Callable[..., None]
    ) -> list[Any]:
        events, faults = columns.from_arrow(batch)
        for index in sorted(faults):
            refuse(rows[index], columns.contract, None, faults[index].field, faults[index].rule)
        return events

    def _said(self, batch: pa.RecordBatch) -> _Said:
        names, said = self._metadata, dict[str, Any]()
        if names.cause is not None:
            cause = _column(batch, names.cause)
            fields = {field.name for field in cause.type}
            said["causes"] = said["correlations"] = ids = pc.struct_field(cause, "id").to_pylist()
            if "correlation" in fields:
                shared = pc.struct_field(cause, "correlation").to_pylist()
                said["correlations"] = [one or id for one, id in zip(shared, ids, strict=True)]
            if "headers" in fields:
                said["traces"] = _traces(pc.struct_field(cause, "headers"))
        if names.id is not None:
            said["ids"] = _column(batch, names.id).cast(pa.string()).to_pylist()
        if names.time is not None:
            times = _column(batch, names.time).cast(pa.timestamp("us", "UTC")).to_pylist()
            said["times"] = [None if each is None else each.replace(tzinfo=datetime.UTC) for each in times]
        if names.correlation is not None:
            own = _column(batch, names.correlation).to_pylist()
            others = said.get("correlations", repeat(None))
            said["correlations"] = [one or other for one, other in zip(own, others, strict=False)]
        if names.causation is not None:
            said["causations"] = _column(batch, names.causation).to_pylist()
        return _Said(**said)


_Explicit: TypeAlias = tuple[datetime.datetime | None, str | None, str | None]
_NOTHING: _Explicit = (None, None, None)


def _column(batch: pa.RecordBatch, path: str) -> pa.Array:
    head, *rest = path.split(".")
    array = batch.column(head)
    for name in rest:
        array = pc.struct_field(array, name)
    return array


def _traces(headers: pa.Array) -> Iterable[str | None]:
    """The traces in a column of headers, which is null unless the source read them (``includeHeaders``)."""
    if headers.null_count == len(headers):
        return repeat(None)
    rows = headers.to_pylist()
    return [next((each[0] for name, each in row or () if name == "traceparent" and each), None) for row in rows]


class RowSpool:
    """Messages that wait until the last row of a task is checked: in memory, and in a temporary file beyond a bound."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._held: list[Rows] = []
        self._file: IO[bytes] | None = None

    def add(self, rows: Rows) -> None:
        self._bytes += sum(map(len, rows.data)) + ROW_BYTES * len(rows)
        if self._bytes <= self._max_bytes:
            self._held.append(rows)
            return
        if self._file is None:
            # It has no name, so it goes with the process.
            self._file = tempfile.TemporaryFile(prefix="jetspark-rows-")  # noqa: SIM115 - `read` closes it
        pickle.dump(rows, self._file, pickle.HIGHEST_PROTOCOL)

    def read(self) -> Iterator[Rows]:
        """All messages in order, once."""
        while self._held:
            yield self._held.pop(0)
        if self._file is None:
            return
        with self._file as file:
            end = file.tell()
            file.seek(0)
            while file.tell() < end:
                yield pickle.load(file)
