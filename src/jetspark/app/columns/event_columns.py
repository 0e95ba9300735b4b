"""The fields of an event type as Arrow columns, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from jetspark.app.columns.column_types import ColumnFault
from jetspark.app.columns.field_types import struct_of
from jetspark.app.contracts.catalogue import Contract
from jetspark.errors import ConfigError

__all__ = ["ENVELOPE", "UNREADABLE", "ArrowRows", "EventColumns", "EventRows"]

ENVELOPE, UNREADABLE = "_event", "_unreadable"
"""Columns beside those of the fields."""


class ArrowRows(NamedTuple):
    """Events as columns."""

    arrays: list[pa.Array]
    """One for each field, in the order of the schema. Rows with a fault are null in all of them."""
    faults: dict[int, ColumnFault]
    """By row: a value that does not fit its column."""


class EventRows(NamedTuple):
    """Columns as events."""

    events: list[Any]
    """None for a row with a fault."""
    faults: dict[int, ColumnFault]
    """By row: a cell that is not a value of its field."""


class EventColumns:
    """The columns of one version of an event type.

    Values come back equal: ``from_arrow`` of ``to_arrow`` returns the same events. What does not fit its column, such
    as an ``int`` of more than 64 bits, is a fault of its row and never changed.
    """

    def __init__(self, contract: Contract) -> None:
        """
        Raises:
            ConfigError: A field has no column type, or the name of a column that every event has.
            NameError: A type of a field is not defined yet.
        """
        self.contract = contract
        self._struct = struct_of(contract.kind)
        for each in self._struct.fields:
            if each.name.lower() in (ENVELOPE, UNREADABLE):
                raise ConfigError(
                    f"{contract.kind.__name__}.{each.name}: this column says of an event what is not in its fields; "
                    "rename the field"
                )
        self.schema = pa.schema(
            [pa.field(each.name, each.column.type, each.is_nullable) for each in self._struct.fields]
        )
        """A column for each field, in order; empty for an event without fields. Fields inside structs are nullable."""

    def check(self, given: pa.Schema, *, beside: Iterable[str] = ()) -> None:
        """Check that columns can be read as events: every field is there, save those with a default, with a type that
        can be converted without loss.

        Args:
            beside: Columns that are not fields.

        Raises:
            ConfigError: A column is missing, is not a field, or has another type; the message names it.
        """
        others = {ENVELOPE, UNREADABLE, *beside}
        try:
            self._struct.check_fields({field.name: field.type for field in given if field.name not in others})
        except ColumnFault as fault:
            raise ConfigError(f"{self.contract.kind.__name__}.{fault.field}: {fault.rule}") from fault

    @property
    def type(self) -> pa.DataType:
        """All fields as one struct."""
        return self._struct.type

    def to_arrow(self, events: Sequence[object], names: Collection[str] | None = None) -> ArrowRows:
        """The fields of events as arrays; None becomes a row of nulls.

        Args:
            names: The fields to convert; by default all.
        """
        fields = [each for each in self._struct.fields if names is None or each.name in names]
        return _written(lambda part: [each.write(part, None in part) for each in fields], events)

    def to_struct(self, events: Sequence[object]) -> ArrowRows:
        """Events as a single array of structs; None becomes null."""
        return _written(lambda part: [self._struct.write(part)], events)

    def from_arrow(self, batch: pa.RecordBatch) -> EventRows:
        """The events whose fields are the columns of a batch, as far as :meth:`check` accepts its schema.

        An event is built and not validated; ``contract.encode`` does that.
        """
        wanted = [each.name for each in self._struct.fields if each.name in batch.schema.names]

        def read(part: pa.RecordBatch) -> list[Any]:
            arrays = [part.column(name) for name in wanted]
            return self._struct.read_fields(wanted, arrays, pa.repeat(True, len(part)))

        try:
            return EventRows(read(batch), {})
        except ColumnFault:
            faults = _faults(lambda first, last: read(batch.slice(first, last - first)), len(batch))
            is_good = pa.array([row not in faults for row in range(len(batch))], pa.bool_())
            good = iter(read(batch.filter(is_good)))
            return EventRows([None if row in faults else next(good) for row in range(len(batch))], faults)


def _written(write: Callable[[Sequence[object]], list[pa.Array]], events: Sequence[object]) -> ArrowRows:
    try:
        return ArrowRows(write(events), {})
    except ColumnFault:
        faults = _faults(lambda first, last: write(events[first:last]), len(events))
        return ArrowRows(write([None if row in faults else each for row, each in enumerate(events)]), faults)


def _faults(convert: Callable[[int, int], object], length: int) -> dict[int, ColumnFault]:
    """The rows that cannot be converted, by halves: few tries if few rows are at fault."""
    found = dict[int, ColumnFault]()
    left = [(0, length)]
    while left:
        first, last = left.pop()
        try:
            convert(first, last)
        except ColumnFault as fault:
            if last - first == 1:
                found[first] = fault
            else:
                middle = (first + last) // 2
                left += [(first, middle), (middle, last)]
    return found
