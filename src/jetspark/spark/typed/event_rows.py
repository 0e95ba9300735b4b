"""Converts messages into rows of typed events.

Messages are decoded by the loop of all engines (:class:`~jetspark.app.projections.router.EventDecoder`), so a row has
the values that a live handler gets. A message of another type that the application declares is not a row. A message
that cannot be read is an error, is left out, or is a row with its reason.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.types import StructType

from jetspark.app.application import App
from jetspark.app.columns import ENVELOPE, UNREADABLE, EventColumns
from jetspark.app.contracts.catalogue import Contract
from jetspark.app.contracts.envelope import Envelope, event_id
from jetspark.app.projections.router import EventDecoder, Received, Recorded
from jetspark.core.message import CoreMessage
from jetspark.core.subjects import on_one_of
from jetspark.errors import ConfigError, ContractViolation, UnreadableEvent, WrongFieldType
from jetspark.jetstream.info import StoredMessage
from jetspark.spark.schema import SCHEMA, Columns
from jetspark.spark.typed.event_options import EventOptions
from jetspark.state.scan import Range

__all__ = ["TYPE", "EventRowMaker", "arrow_schema", "columns_by_name"]

_logger = logging.getLogger("jetspark.spark")

_HEADERS = Columns(StructType([SCHEMA["headers"]]), has_headers=True, created="")
_TIME = pa.timestamp("us", "UTC")
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
        "headers": _HEADERS.arrow_schema.field("headers").type,
    }
)
_UNREADABLE = pa.struct(
    {
        "error": pa.string(),
        "reason": pa.string(),
        "data": pa.binary(),
        "headers": _HEADERS.arrow_schema.field("headers").type,
    }
)
TYPE = "type"
_NEXT, _NEXT_BYTES = "Nats-Schedule-Next", b"Nats-Schedule-Next"


def arrow_schema(contracts: Sequence[Contract], *, keeps: bool) -> pa.Schema:
    """The columns of some types: a column for each field of a single type, else a struct for each type.

    Args:
        keeps: Messages that cannot be read are rows, so every column of an event may be null.

    Raises:
        ConfigError: A field has no column type, or two columns the same name.
    """
    if len(contracts) == 1:
        fields = list(EventColumns(contracts[0]).schema)
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


class EventRowMaker:
    """Makes record batches of typed events; a :class:`~jetspark.spark.stream.reading.RowMaker`."""

    needs_contents = True

    def __init__(
        self, app: App, contracts: Sequence[Contract], options: EventOptions, schema: pa.Schema, part: Range
    ) -> None:
        """
        Raises:
            ConfigError: The columns are not those of the types here: the driver's code declares other fields.
        """
        self._options, self._schema, self._part = options, schema, part
        _check_columns(schema, arrow_schema(contracts, keeps=options.keeps), options)
        self._contract_of = {each.kind: each for each in contracts}
        self._types = {each.type for each in contracts}
        self._others = {each.type for each in app.catalogue} - self._types
        self._columns = (
            {"": EventColumns(contracts[0])}
            if len(contracts) == 1
            else {name: EventColumns(each) for name, each in columns_by_name(contracts).items()}
        )
        wanted = options.event_subjects
        is_wanted = None if set(part.subjects) == set(wanted) else on_one_of(wanted)
        self._decoder = EventDecoder(app.catalogue, is_wanted=is_wanted, with_envelopes=True)
        names = ["subject", "stream", "sequence", "timestamp", "headers"]
        raw = StructType([SCHEMA[name] for name in names])
        self._raw = Columns(raw, has_headers=options.include_headers, created="")
        self.unreadable = 0
        """Messages that could not be read so far."""
        self._first: ContractViolation | None = None

    def of_messages(self, stream: str, messages: Sequence[CoreMessage]) -> pa.RecordBatch:
        return self._batch(stream, messages, self._raw.of_messages(stream, messages))

    def of_stored(self, stream: str, messages: Sequence[StoredMessage]) -> pa.RecordBatch:
        return self._batch(stream, messages, self._raw.of_stored(stream, messages))

    def warn(self) -> None:
        """Log how many messages could not be read."""
        if self.unreadable:
            part = self._part
            _logger.warning(
                "stream %s, sequences %d to %d: %d messages cannot be read as %s; the first: %s",
                *(part.stream, part.start, part.end - 1, self.unreadable, ", ".join(sorted(self._types)), self._first),
            )

    def _batch(self, stream: str, messages: Sequence[Received], raw: pa.RecordBatch) -> pa.RecordBatch:
        decoded = self._decoder.decode(messages, (), lambda index: _recorded(messages[index], raw, index))
        # Of a broken message the type decides whose it is, as far as that can be read.
        errors = {row: error for row, error in decoded.errors.items() if error.event_type not in self._others}
        while True:
            if errors and self._options.unreadable == "fail":
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
            self._first = self._first or errors[min(errors)]
        arrays |= {ENVELOPE: self._envelopes(selected), UNREADABLE: self._unreadable(stream, selected)}
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)

    def _failure(self, raw: pa.RecordBatch, errors: Mapping[int, ContractViolation]) -> UnreadableEvent:
        first = min(errors)
        error = errors[first]
        sequence = raw.column("sequence")[first].as_py()
        return UnreadableEvent(self._part.stream, sequence, error.subject, f"{type(error).__name__}: {error}")

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
        kept = errors if self._options.keeps else {}
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
        if len(self._columns) > 1:
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

    def _unreadable(self, stream: str, selected: _Selected) -> pa.Array | None:
        if not self._options.keeps:
            return None
        if not selected.errors:
            return pa.nulls(len(selected.events), _UNREADABLE)
        messages = [selected.messages[row] for row in selected.errors]
        is_stored = isinstance(messages[0], StoredMessage)
        made = (_HEADERS.of_stored if is_stored else _HEADERS.of_messages)(stream, messages)
        headers = dict(zip(selected.errors, made.column("headers").to_pylist(), strict=True))
        cells: list[dict[str, Any] | None] = [None] * len(selected.events)
        for row, error in selected.errors.items():
            cells[row] = {
                "error": type(error).__name__,
                "reason": str(error),
                "data": bytes(selected.messages[row].data),
                "headers": headers[row],
            }
        return pa.array(cells, _UNREADABLE)


def _check_columns(asked: pa.Schema, own: pa.Schema, options: EventOptions) -> None:
    """Check a schema, which may have some of the columns, and of ``_event`` some of the fields."""
    for field in asked:
        known = own.field(field.name) if field.name in own.names else None
        is_same = known is not None and known.type == field.type
        if known is not None and field.name == ENVELOPE and pa.types.is_struct(field.type):
            is_same = set(field.type) <= set(known.type)
        if not is_same:
            expected = f"expected {known.type}" if known is not None else f"the columns are {', '.join(own.names)}"
            raise ConfigError(
                f"column {field.name!r} as {field.type}: {expected}. If it is not a schema of your own, the driver has "
                f"another app {options.app!r} than this worker: ship the same code to all, and start a new session, "
                "since workers keep what they have imported"
            )


def _recorded(message: Any, raw: pa.RecordBatch, index: int) -> Recorded:
    sequence = raw.column("sequence")[index].as_py()
    time_us = raw.column("timestamp")[index].value
    return Recorded(sequence, message.subject, message.data, _headers_of(message), time_us)


def _array(cells: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(cells, kind)
    except UnicodeEncodeError:
        # Headers of CloudEvents are UTF-8 by convention only; other bytes become U+FFFD, as in subjects.
        utf8 = [each and each.encode(errors="surrogateescape").decode(errors="replace") for each in cells]
        return pa.array(utf8, kind)


def _headers_of(message: Any) -> Any:
    return message.headers if isinstance(message, StoredMessage) else message.raw_headers


def _fired_again(messages: Sequence[Any]) -> list[int]:
    """Messages of timers that fire again and again, whose ids are not in the envelope."""
    if messages and isinstance(messages[0], StoredMessage):
        return [row for row, each in enumerate(messages) if _NEXT in each.headers]
    return [row for row, each in enumerate(messages) if each.raw_headers and _NEXT_BYTES in each.raw_headers]
