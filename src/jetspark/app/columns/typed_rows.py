"""Messages as rows of typed events: a column for each field, and ``_event`` for the envelope.

Messages are decoded by the loop of all engines (:class:`~jetspark.app.projections.router.EventDecoder`), so a row has
the values that a live handler gets. A message of another type that the application declares is not a row. A message
that cannot be read is an error, is left out, or is a row with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa

from jetspark.app.columns.event_columns import ENVELOPE, UNREADABLE, EventColumns
from jetspark.app.contracts.catalogue import Catalogue, Contract
from jetspark.app.contracts.envelope import Envelope, event_id
from jetspark.app.projections.router import EventDecoder, Received, Recorded
from jetspark.errors import ConfigError, ContractViolation, UnreadableEvent, WrongFieldType
from jetspark.jetstream.info import StoredMessage
from jetspark.lake.header_columns import block_column, header_columns, utf8

__all__ = ["ARCHIVE_COLUMNS", "TYPE", "TypedRows", "columns_by_name", "typed_schema"]

_TIME = pa.timestamp("us", "UTC")
_HEADERS = pa.map_(pa.string(), pa.field("value", pa.list_(pa.field("element", pa.string()))))
_ENVELOPE = pa.struct(
    {
        # From the envelope; null if the message cannot be read.
        "id": pa.string(),
        "key": pa.string(),
        "time": _TIME,
        "type": pa.string(),
        "version": pa.int32(),
        "source": pa.string(),
        "correlation": pa.string(),
        "causation": pa.string(),
        # From the stream.
        "subject": pa.string(),
        "sequence": pa.int64(),
        "stored": _TIME,
        "stream": pa.string(),
        "headers": _HEADERS,
    }
)
_UNREADABLE = pa.struct(
    {
        "error": pa.string(),
        "reason": pa.string(),
        "data": pa.binary(),
        "headers": _HEADERS,
    }
)
TYPE = "type"
_RAW = ("subject", "stream", "sequence", "timestamp", "headers")
ARCHIVE_COLUMNS = (*_RAW, "data", "raw_headers")
"""Columns of an archive's rows that :meth:`TypedRows.of_archived` needs."""
_NEXT, _NEXT_BYTES = "Nats-Schedule-Next", b"Nats-Schedule-Next"


def typed_schema(contracts: Sequence[Contract], *, keeps: bool, is_flat: bool) -> pa.Schema:
    """The columns of some types.

    Args:
        keeps: Messages that cannot be read are rows, so every column of an event may be null.
        is_flat: A column for each field of a single type; else a struct for each type.

    Raises:
        ConfigError: A field has no column type, or two columns the same name.
    """
    if is_flat:
        [contract] = contracts
        fields = list(EventColumns(contract).schema)
    else:
        structs = [pa.field(name, EventColumns(each).type) for name, each in columns_by_name(contracts).items()]
        fields = [pa.field(TYPE, pa.string(), False), *structs]
    fields.append(pa.field(ENVELOPE, _ENVELOPE, False))
    if keeps:
        fields = [*(each.with_nullable(True) for each in fields[:-1]), fields[-1], pa.field(UNREADABLE, _UNREADABLE)]
    return pa.schema(fields)


def columns_by_name(contracts: Sequence[Contract]) -> dict[str, Contract]:
    """The columns of several types: ``order.paid`` is ``order_paid``, which SQL takes without quotes."""
    found = dict[str, Contract]()
    for each in contracts:
        is_only = sum(other.type == each.type for other in contracts) == 1
        name = re.sub(r"\W", "_", each.type) + ("" if is_only else f"_v{each.version}")
        if name.lower() in (TYPE, ENVELOPE, UNREADABLE, *map(str.lower, found)):
            raise ConfigError(f"type={each.type!r}: another column is called {name!r}; read this type by itself")
        found[name] = each
    return found


class _Archived(NamedTuple):
    """A row of an archive as a message. A :class:`StoredMessage` has its headers decoded, which takes longest."""

    subject: str
    data: bytes
    raw_headers: bytes | None


class _Selected(NamedTuple):
    """The messages of a piece that are rows, as columns; index ``i`` of each belongs to row ``i``."""

    events: list[Any]
    """None for a message that cannot be read."""
    envelopes: list[Any]
    messages: Sequence[Any]
    raw: pa.RecordBatch
    errors: Mapping[int, ContractViolation]

    def told(self, name: str) -> list[Any]:
        """An attribute of the envelopes."""
        if self.errors:
            return [getattr(each, name, None) for each in self.envelopes]
        return list(map(attrgetter(name), self.envelopes))


class TypedRows:
    """Makes record batches of typed events."""

    def __init__(
        self,
        catalogue: Catalogue,
        contracts: Sequence[Contract],
        schema: pa.Schema,
        *,
        is_flat: bool,
        unreadable: str,
        is_wanted: Callable[[str], object] | None = None,
    ) -> None:
        """
        Args:
            schema: Some columns of :func:`typed_schema`, and of ``_event`` some of its fields.
            is_flat: As it was for the schema.
            unreadable: ``"fail"``, ``"drop"`` or ``"keep"``.
            is_wanted: Tells the subjects of events from foreign ones; None if every message is on a wanted subject.
        """
        self._schema, self._mode = schema, unreadable
        self._contract_of = {each.kind: each for each in contracts}
        self._others = {each.type for each in catalogue} - {each.type for each in contracts}
        by_name = {"": contracts[0]} if is_flat else columns_by_name(contracts)
        self._columns = {name: EventColumns(each) for name, each in by_name.items()}
        self._decoder = EventDecoder(catalogue, is_wanted=is_wanted, with_envelopes=True)
        self.unreadable = 0
        """Messages that could not be read so far."""
        self.first_error: ContractViolation | None = None

    def make(self, messages: Sequence[Received], raw: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of messages; there may be fewer.

        Args:
            messages: A consumer's messages, or stored ones.
            raw: Their ``subject``, ``stream``, ``sequence``, ``timestamp`` and ``headers``, which may be null.

        Raises:
            UnreadableEvent: A message cannot be read, and the mode is ``"fail"``.
        """
        decoded = self._decoder.decode(messages, (), lambda index: _recorded(messages[index], raw, index))
        # Of a broken message the type decides whose it is, as far as that can be read.
        errors = {row: error for row, error in decoded.errors.items() if error.event_type not in self._others}
        while True:
            if errors and self._mode == "fail":
                raise self._failure(raw, errors)
            rows, selected = self._select(decoded.events, decoded.envelopes, messages, raw, errors)
            arrays, faults = self._fields(selected)
            if not faults:
                break
            for row, violation in faults.items():
                index = row if rows is None else rows[row]
                decoded.events[index] = None
                errors[index] = violation
        if errors:
            self.unreadable += len(errors)
            self.first_error = self.first_error or errors[min(errors)]
        arrays |= {ENVELOPE: self._envelopes(selected), UNREADABLE: self._unreadable(selected)}
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)

    def of_archived(self, rows: pa.RecordBatch, *, has_headers: bool = True) -> pa.RecordBatch:
        """As :meth:`make`, of rows with :data:`ARCHIVE_COLUMNS`; without ``has_headers`` the headers are null."""
        blocks = block_column(rows.column("headers"), rows.column("raw_headers"))
        columns = (rows.column("subject"), rows.column("data"), blocks)
        raw = rows.select(list(_RAW))
        if not has_headers:
            raw = raw.set_column(_RAW.index("headers"), "headers", pa.nulls(len(rows), _HEADERS))
        return self.make(list(map(_Archived, *(each.to_pylist() for each in columns))), raw)

    def _failure(self, raw: pa.RecordBatch, errors: Mapping[int, ContractViolation]) -> UnreadableEvent:
        first = min(errors)
        error = errors[first]
        stream, sequence = (raw.column(name)[first].as_py() for name in ("stream", "sequence"))
        return UnreadableEvent(stream, sequence, error.subject, f"{type(error).__name__}: {error}")

    def _select(
        self,
        events: list[Any],
        envelopes: list[Any],
        messages: Sequence[Any],
        raw: pa.RecordBatch,
        errors: Mapping[int, ContractViolation],
    ) -> tuple[list[int] | None, _Selected]:
        """The messages that are rows, and their indexes; None if all are."""
        wanted = self._contract_of.keys()
        if not errors and set(map(type, events)) <= wanted:
            return None, _Selected(events, envelopes, messages, raw, {})
        kept = errors if self._mode == "keep" else {}
        rows = [index for index, event in enumerate(events) if event.__class__ in wanted or index in kept]
        return rows, _Selected(
            [events[index] for index in rows],
            [envelopes[index] if events[index] is not None else None for index in rows],
            [messages[index] for index in rows],
            raw.take(pa.array(rows, pa.int64())),
            {row: kept[index] for row, index in enumerate(rows) if index in kept},
        )

    # ---- columns -----------------------------------------------------------------------------------------------------

    def _fields(self, selected: _Selected) -> tuple[dict[str, pa.Array], dict[int, ContractViolation]]:
        """The columns of the fields; and by row why a value does not fit its column."""
        events, arrays, faults = selected.events, dict[str, pa.Array](), dict[int, Any]()
        for name, columns in self._columns.items():
            if not name:
                wanted = set(self._schema.names)
                found = columns.to_arrow(events, wanted)
                arrays |= zip(filter(wanted.__contains__, columns.schema.names), found.arrays, strict=True)
            elif name in self._schema.names:
                kind = columns.contract.kind
                found = columns.to_struct([each if each.__class__ is kind else None for each in events])
                arrays[name] = found.arrays[0]
            else:
                continue
            faults |= found.faults
        if TYPE in self._schema.names and "" not in self._columns:
            arrays[TYPE] = self._type_names(selected)
        subjects = selected.raw.column("subject")
        return arrays, {
            row: self._violation(subjects[row].as_py(), events[row], fault.field, fault.rule)
            for row, fault in faults.items()
        }

    def _violation(self, subject: str, event: object, field: str, rule: str) -> WrongFieldType:
        contract = self._contract_of[type(event)]
        return WrongFieldType(subject, contract.type, contract.version, field, rule)

    def _type_names(self, selected: _Selected) -> pa.Array:
        events, errors = selected.events, selected.errors
        names = {kind: contract.type for kind, contract in self._contract_of.items()}
        if len(names) == 1 and not errors:
            return pa.repeat(next(iter(names.values())), len(events))
        cells = [
            names[each.__class__] if each is not None else errors[row].event_type or None
            for row, each in enumerate(events)
        ]
        return pa.array(cells, pa.string())

    def _versions(self, selected: _Selected) -> pa.Array:
        """The published versions: an event read with its envelope at once is of the newest."""
        current = {kind: contract.version for kind, contract in self._contract_of.items()}
        events, envelopes, errors = selected.events, selected.envelopes, selected.errors
        if len(current) == 1 and not errors and Envelope not in set(map(type, envelopes)):
            return pa.repeat(pa.scalar(next(iter(current.values())), pa.int32()), len(events))
        cells: list[int | None] = []
        for row, (event, envelope) in enumerate(zip(events, envelopes, strict=True)):
            if event is None:
                cells.append(errors[row].version)
            else:
                is_newest = envelope.__class__ is not Envelope
                cells.append(current[event.__class__] if is_newest else envelope.schemaversion or 1)
        return pa.array(cells, pa.int32())

    def _keys(self, selected: _Selected) -> list[str | None]:
        if len(self._contract_of) == 1 and not selected.errors:
            [contract] = self._contract_of.values()
            if contract.key_template is None:
                return selected.told("subject")
            if contract.key in contract.key_template.fields:
                keys = list(map(attrgetter(str(contract.key)), selected.events))
                return keys if set(map(type, keys)) <= {str} else list(map(contract.key_of, selected.events))
        found: list[str | None] = []
        for event, envelope in zip(selected.events, selected.envelopes, strict=True):
            key = None if event is None else self._contract_of[event.__class__].key_of(event)
            found.append(getattr(envelope, "subject", None) if key is None else key)
        return found

    def _envelopes(self, selected: _Selected) -> pa.Array | None:
        if ENVELOPE not in self._schema.names:
            return None
        wanted = self._schema.field(ENVELOPE).type
        ids, times = selected.told("id"), selected.told("time")
        for row in _fired_again(selected.messages):
            if (envelope := selected.envelopes[row]) is not None:
                message = selected.messages[row]
                own = event_id(envelope, _headers_of(message))
                if own != ids[row]:  # as `decode` does
                    ids[row], times[row] = own, None
        raw = selected.raw

        def correlations() -> list[str | None]:
            return [found or id for found, id in zip(selected.told("correlationid"), ids, strict=True)]

        makers: dict[str, Callable[[], Any]] = {
            "id": lambda: ids,
            "key": lambda: self._keys(selected),
            "time": lambda: times,
            "type": lambda: self._type_names(selected),
            "version": lambda: self._versions(selected),
            "source": lambda: selected.told("source"),
            "correlation": correlations,
            "causation": lambda: selected.told("causationid"),
            "stored": lambda: raw.column("timestamp"),
        }
        arrays = []
        for field in wanted:
            found = makers[field.name]() if field.name in makers else raw.column(field.name)
            arrays.append(found if isinstance(found, pa.Array) else _array(found, field.type))
        return pa.StructArray.from_arrays(arrays, fields=list(wanted))

    def _unreadable(self, selected: _Selected) -> pa.Array | None:
        if UNREADABLE not in self._schema.names:
            return None
        if not selected.errors:
            return pa.nulls(len(selected.events), _UNREADABLE)
        messages = [selected.messages[row] for row in selected.errors]
        headers = header_columns([each.raw_headers for each in messages])[0].to_pylist()
        cells: list[dict[str, Any] | None] = [None] * len(selected.events)
        for (row, error), message, found in zip(selected.errors.items(), messages, headers, strict=True):
            cells[row] = {
                "error": type(error).__name__,
                "reason": str(error),
                "data": bytes(message.data),
                "headers": found,
            }
        return pa.array(cells, _UNREADABLE)


def _recorded(message: Any, raw: pa.RecordBatch, index: int) -> Recorded:
    sequence = raw.column("sequence")[index].as_py()
    time_us = raw.column("timestamp")[index].value
    return Recorded(sequence, message.subject, message.data, _headers_of(message), time_us)


def _array(cells: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(cells, kind)
    except UnicodeEncodeError:
        # Headers of CloudEvents are UTF-8 by convention only; other bytes become U+FFFD, as in subjects.
        return pa.array([each and utf8(each) for each in cells], kind)


def _headers_of(message: Any) -> Any:
    return message.headers if isinstance(message, StoredMessage) else message.raw_headers


def _fired_again(messages: Sequence[Any]) -> list[int]:
    """Messages of timers that fire again and again, whose ids are not in the envelope."""
    if messages and isinstance(messages[0], StoredMessage):
        return [row for row, each in enumerate(messages) if _NEXT in each.headers]
    return [row for row, each in enumerate(messages) if each.raw_headers and _NEXT_BYTES in each.raw_headers]
