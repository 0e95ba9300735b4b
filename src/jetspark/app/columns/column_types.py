"""Column types: how values of one Python type become an Arrow array, and how an array becomes such values.

Each works on whole columns. A nested value has no Python object for its cells: the fields of all structs of a column,
or the elements of all its lists, are converted as one column of their own. None stands for null in both directions.
"""

from __future__ import annotations

import collections
import datetime
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from jetspark.app.contracts.faults import error_text, user_errors

__all__ = [
    "Cell",
    "ColumnFault",
    "ColumnType",
    "ConvertedColumn",
    "Field",
    "ListColumn",
    "MapColumn",
    "PlainColumn",
    "StructColumn",
    "TimeColumn",
    "UnionColumn",
]

Cell: TypeAlias = Any
"""A value of a field: of the type that the field's annotation says, or None."""

_ERRORS = (ValueError, TypeError, ArithmeticError, KeyError, pa.ArrowException)
_EXCERPT = 60
_EARLIEST, _LATEST = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999 in UTC, in microseconds since 1970: the times that Python has."""


class ColumnFault(ValueError):
    """A value does not fit its column, or a cell is not a value of its field."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(field, rule)
        self.field, self.rule = field, rule

    def __str__(self) -> str:
        return f"field {self.field!r}: {self.rule}" if self.field else self.rule


class ColumnType(ABC):
    """The Arrow type of a field, and the conversion of its values."""

    def __init__(self, path: str, type: pa.DataType, classes: Iterable[type]) -> None:
        self.path = path
        """Where the field is in its event, such as ``items[].sku``."""
        self.type = type
        self.classes = frozenset(classes)
        """Classes of its values."""

    @abstractmethod
    def write(self, values: Sequence[Cell]) -> pa.Array:
        """The values as an array.

        Raises:
            ColumnFault: A value does not fit the Arrow type.
        """

    @abstractmethod
    def read(self, array: pa.Array) -> list[Cell]:
        """The values of an array, which may have another type that can be cast without loss.

        Raises:
            ColumnFault: A cell is not a value of the field.
        """

    @abstractmethod
    def check(self, given: pa.DataType) -> None:
        """Check that arrays of a type can be read.

        Raises:
            ColumnFault: They cannot.
        """

    def _fault(self, given: object, error: object) -> ColumnFault:
        return ColumnFault(self.path, f"{_shortened(given)} does not fit {self.type}: {error}")

    def _check_kind(self, given: pa.DataType, is_same: Callable[[pa.DataType], bool]) -> None:
        if not is_same(given):
            raise ColumnFault(self.path, f"expected {self.type}, got {given}")


class PlainColumn(ColumnType):
    """Values that Arrow has a type for."""

    def write(self, values: Sequence[Cell]) -> pa.Array:
        try:
            return pa.array(values, self.type)
        except _ERRORS:
            for value in values:
                try:
                    pa.array([value], self.type)
                except _ERRORS as error:
                    raise self._fault(value, error) from error
            raise

    def read(self, array: pa.Array) -> list[Cell]:
        if array.type != self.type:
            try:
                array = array.cast(self.type)
            except _ERRORS as error:
                raise self._fault(array[0], error) from error
        return list(array.to_pylist())

    def check(self, given: pa.DataType) -> None:
        # Arrow also parses texts, and takes times without a zone as UTC.
        is_number = pa.types.is_integer(given) or pa.types.is_floating(given) or pa.types.is_decimal(given)
        wants_number = pa.types.is_primitive(self.type) and not pa.types.is_temporal(self.type)
        same = (pa.types.is_boolean, pa.types.is_temporal, pa.types.is_decimal, _is_text, _is_bytes)
        is_same = any(kind(given) and kind(self.type) for kind in same)
        if given != self.type and not pa.types.is_null(given):
            if not is_same and not (is_number and wants_number and not pa.types.is_boolean(self.type)):
                raise ColumnFault(self.path, f"expected {self.type}, got {given}")
            if pa.types.is_timestamp(self.type) and (not pa.types.is_timestamp(given) or given.tz is None):
                raise ColumnFault(self.path, f"expected a timestamp with a time zone, got {given}")
            try:
                pa.array([], given).cast(self.type)
            except _ERRORS as error:
                raise ColumnFault(self.path, f"expected {self.type}, got {given}: {error}") from error


class ConvertedColumn(PlainColumn):
    """Values that are written as values of another type, such as a UUID as text."""

    def __init__(
        self,
        path: str,
        type: pa.DataType,
        classes: Iterable[type],
        to_cell: Callable[[Any], object] | None,
        of_cell: Callable[[Any], object],
    ) -> None:
        super().__init__(path, type, classes)
        self._to_cell, self._of_cell = to_cell, of_cell

    def write(self, values: Sequence[Cell]) -> pa.Array:
        if self._to_cell is None:
            return super().write(values)
        return super().write(self._each(self._to_cell, values))

    def read(self, array: pa.Array) -> list[Cell]:
        return self._each(self._of_cell, super().read(array))

    def _each(self, convert: Callable[[Any], object], values: Sequence[Cell]) -> list[Cell]:
        try:
            return [None if value is None else convert(value) for value in values]
        except (*_ERRORS, msgspec.MsgspecError):
            for value in values:
                try:
                    None if value is None else convert(value)
                except (*_ERRORS, msgspec.MsgspecError) as error:
                    names = "/".join(sorted(each.__name__ for each in self.classes)) or "JSON"
                    raise ColumnFault(self.path, f"{_shortened(value)} is not {names}: {error}") from error
            raise


class TimeColumn(ConvertedColumn):
    """Times with a zone, as instants."""

    def write(self, values: Sequence[Cell]) -> pa.Array:
        array = super().write(values)
        range_us = pc.min_max(array.cast(pa.int64()))
        low, high = range_us["min"].as_py(), range_us["max"].as_py()
        if low is not None and (low < _EARLIEST or high > _LATEST):
            self._each(lambda value: value.astimezone(datetime.UTC), values)  # raises
        return array


class Field:
    """A field of a struct: its name, its column, and what a null stands for."""

    __slots__ = ("column", "has_default", "is_nullable", "missing", "name", "value_of")

    def __init__(
        self,
        name: str,
        column: ColumnType,
        value_of: Callable[[Any], Cell],
        *,
        is_nullable: bool,
        missing: object = None,
        has_default: bool = False,
    ) -> None:
        self.name, self.column, self.value_of = name, column, value_of
        self.is_nullable, self.missing, self.has_default = is_nullable, missing, has_default

    def write(self, owners: Sequence[Any], has_nulls: bool) -> pa.Array:
        """The values of this field of many structs."""
        of = self.value_of
        values = [None if owner is None else of(owner) for owner in owners] if has_nulls else list(map(of, owners))
        if self.missing is not None:
            values = [None if value is self.missing else value for value in values]
        return self.column.write(values)

    def read(self, array: pa.Array, owner_nulls: int) -> list[Cell]:
        """The values of this field; its array has a null wherever the struct is null."""
        check_nulls(self.column, self.is_nullable, array, owner_nulls)
        values = self.column.read(array)
        return values if self.missing is None else [self.missing if value is None else value for value in values]


class StructColumn(ColumnType):
    """Instances of one class with fields, or tuples of a fixed length."""

    def __init__(
        self, path: str, classes: Iterable[type], fields: Sequence[Field], make: Callable[[dict[str, Cell]], object]
    ) -> None:
        self.fields, self._make = fields, make
        # All of them nullable: where the struct is null its fields have nulls, which Arrow's casts would refuse.
        # Parquet cannot store a struct without fields.
        self._arrow = [pa.field(each.name, each.column.type) for each in fields] or [pa.field("_present", pa.bool_())]
        super().__init__(path, pa.struct(self._arrow), classes)

    def write(self, values: Sequence[Cell]) -> pa.Array:
        has_nulls = None in values
        mask = pa.array([value is None for value in values], pa.bool_()) if has_nulls else None
        arrays = [each.write(values, has_nulls) for each in self.fields] or [pa.repeat(True, len(values))]
        return pa.StructArray.from_arrays(arrays, fields=self._arrow, mask=mask)

    def read(self, array: pa.Array) -> list[Cell]:
        if pa.types.is_null(array.type):
            return [None] * len(array)
        return self.read_fields(array.type.names, array.flatten(), array.is_valid())

    def read_fields(self, names: Sequence[str], arrays: Sequence[pa.Array], valid: pa.Array) -> list[Cell]:
        """The instances whose fields are these arrays; fields without an array have their default."""
        arrays_by_name = dict(zip(names, arrays, strict=True))
        nulls = valid.false_count
        found = [each for each in self.fields if each.name in arrays_by_name]
        columns = [each.read(arrays_by_name[each.name], nulls) for each in found]
        present = [each.name for each in found]
        rows: Iterable[tuple[Cell, ...]] = zip(*columns, strict=True) if columns else [()] * len(valid)
        try:
            if not nulls:
                return [self._make(dict(zip(present, row, strict=True))) for row in rows]
            return [
                self._make(dict(zip(present, row, strict=True))) if is_valid else None
                for row, is_valid in zip(rows, valid.to_pylist(), strict=True)
            ]
        except user_errors() as error:  # of the class's own code, such as its ``__post_init__``
            raise ColumnFault(self.path, error_text(error)) from error

    def check(self, given: pa.DataType) -> None:
        if not pa.types.is_null(given):
            self._check_kind(given, pa.types.is_struct)
            self.check_fields({field.name: field.type for field in given})

    def check_fields(self, given: Mapping[str, pa.DataType]) -> None:
        """Check the types of the fields by name; those with a default may be missing."""
        prefix = f"{self.path}." if self.path else ""
        for each in self.fields:
            if each.name in given:
                each.column.check(given[each.name])
            elif not each.has_default:
                raise ColumnFault(f"{prefix}{each.name}", f"required, and not there; expected {each.column.type}")
        known = {each.name for each in self.fields} | {field.name for field in self._arrow}
        unknown = [name for name in given if name not in known]
        if unknown:
            listed = ", ".join(sorted(known))
            raise ColumnFault(f"{prefix}{unknown[0]}", f"not a field; fields are {listed}")


class UnionColumn(ColumnType):
    """Values of several types: a struct with a field for each type, of which one is not null."""

    def __init__(self, path: str, members: Mapping[str, ColumnType]) -> None:
        self._members = members
        self._arrow = [pa.field(name, each.type) for name, each in members.items()]
        self._number_of = {kind: number for number, each in enumerate(members.values()) for kind in each.classes}
        super().__init__(path, pa.struct(self._arrow), self._number_of)

    def write(self, values: Sequence[Cell]) -> pa.Array:
        number_of = self._number_of
        numbers = [None if value is None else number_of.get(value.__class__, -1) for value in values]
        if -1 in numbers:
            raise self._fault(values[numbers.index(-1)], f"expected one of {', '.join(self._members)}")
        arrays = []
        for number, member in enumerate(self._members.values()):
            own = zip(values, numbers, strict=True)
            arrays.append(member.write([value if its == number else None for value, its in own]))
        mask = pa.array([number is None for number in numbers], pa.bool_()) if None in numbers else None
        return pa.StructArray.from_arrays(arrays, fields=self._arrow, mask=mask)

    def read(self, array: pa.Array) -> list[Cell]:
        if pa.types.is_null(array.type):
            return [None] * len(array)
        arrays = dict(zip(array.type.names, array.flatten(), strict=True))
        columns = [each.read(arrays[name]) for name, each in self._members.items() if name in arrays]
        values: list[Cell] = []
        for row, is_valid in zip(zip(*columns, strict=True), array.is_valid().to_pylist(), strict=True):
            found = [cell for cell in row if cell is not None]
            if len(found) != is_valid:
                raise ColumnFault(self.path, f"{len(found)} of {', '.join(arrays)} are there: expected one")
            values.append(found[0] if found else None)
        return values

    def check(self, given: pa.DataType) -> None:
        if pa.types.is_null(given):
            return
        self._check_kind(given, pa.types.is_struct)
        for field in given:
            if field.name not in self._members:
                raise ColumnFault(self.path, f"{field.name!r} is not one of {', '.join(self._members)}")
            self._members[field.name].check(field.type)


class ListColumn(ColumnType):
    """Lists, tuples of any length, and sets. Sets are written in one order, the same in every process."""

    def __init__(
        self,
        path: str,
        classes: Iterable[type],
        element: ColumnType,
        *,
        is_nullable: bool,
        make: Callable[[list[Cell]], object],
        is_set: bool = False,
    ) -> None:
        self._element, self._is_nullable, self._make, self._is_set = element, is_nullable, make, is_set
        super().__init__(path, pa.list_(pa.field("element", element.type, is_nullable)), classes)

    def write(self, values: Sequence[Cell]) -> pa.Array:
        rows = [None if each is None else _in_order(each) for each in values] if self._is_set else values
        flat = list(itertools.chain.from_iterable(filter(None, rows)))
        return pa.ListArray.from_arrays(_offsets(rows), self._element.write(flat), type=self.type, mask=_mask(rows))

    def read(self, array: pa.Array) -> list[Cell]:
        if pa.types.is_null(array.type):
            return [None] * len(array)
        begin, spans = _spans(array)
        inner = array.values.slice(begin, spans[-1][1] - begin if spans else 0)
        check_nulls(self._element, self._is_nullable, inner, 0)
        flat, make = self._element.read(inner), self._make
        return [
            None if span is None else make(flat[span[0] - begin : span[1] - begin]) for span in _valid(array, spans)
        ]

    def check(self, given: pa.DataType) -> None:
        if not pa.types.is_null(given):
            self._check_kind(given, lambda kind: bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)))
            self._element.check(given.value_type)


class MapColumn(ColumnType):
    """Dicts, in their order."""

    def __init__(self, path: str, key: ColumnType, value: ColumnType, *, is_nullable: bool) -> None:
        self._key, self._value, self._is_nullable = key, value, is_nullable
        arrow = pa.map_(pa.field("key", key.type, False), pa.field("value", value.type, is_nullable))
        super().__init__(path, arrow, (dict,))

    def write(self, values: Sequence[Cell]) -> pa.Array:
        rows = [each for each in values if each]
        keys = self._key.write(list(itertools.chain.from_iterable(rows)))
        items = self._value.write(list(itertools.chain.from_iterable(map(dict.values, rows))))
        return pa.MapArray.from_arrays(_offsets(values), keys, items, type=self.type, mask=_mask(values))

    def read(self, array: pa.Array) -> list[Cell]:
        if pa.types.is_null(array.type):
            return [None] * len(array)
        begin, spans = _spans(array)
        length = spans[-1][1] - begin if spans else 0
        items = array.items.slice(begin, length)
        check_nulls(self._value, self._is_nullable, items, 0)
        keys, values = self._key.read(array.keys.slice(begin, length)), self._value.read(items)
        found = list[Cell]()
        for span in _valid(array, spans):
            part = None if span is None else slice(span[0] - begin, span[1] - begin)
            row = None if part is None else dict(zip(keys[part], values[part], strict=True))
            if row is not None and part is not None and len(row) < part.stop - part.start:
                twice = collections.Counter(keys[part]).most_common(1)[0][0]
                raise ColumnFault(self.path, f"key {twice!r} is there twice")
            found.append(row)
        return found

    def check(self, given: pa.DataType) -> None:
        if not pa.types.is_null(given):
            self._check_kind(given, pa.types.is_map)
            self._key.check(given.key_type)
            self._value.check(given.item_type)


def check_nulls(column: ColumnType, is_nullable: bool, array: pa.Array, owner_nulls: int) -> None:
    """
    Raises:
        ColumnFault: The array has more nulls than the struct around it, and may not.
    """
    if not is_nullable and array.null_count > owner_nulls:
        raise ColumnFault(column.path, f"null, and a value is required; expected {column.type}")


def _offsets(rows: Iterable[Cell]) -> pa.Array:
    lengths = (0 if row is None else len(row) for row in rows)
    return pa.array(list(itertools.accumulate(lengths, initial=0)), pa.int32())


def _mask(rows: Sequence[Cell]) -> pa.Array | None:
    is_null = [row is None for row in rows]
    return pa.array(is_null, pa.bool_()) if True in is_null else None


def _spans(array: pa.Array) -> tuple[int, list[tuple[int, int]]]:
    """Begin and end of each row in the values of a list or map; first the begin of them all."""
    offsets = array.offsets.to_pylist()
    return (offsets[0] if offsets else 0), list(itertools.pairwise(offsets))


def _valid(array: pa.Array, spans: list[tuple[int, int]]) -> Sequence[tuple[int, int] | None]:
    if not array.null_count:
        return spans
    return [span if is_valid else None for span, is_valid in zip(spans, array.is_valid().to_pylist(), strict=True)]


def _in_order(elements: Iterable[Any]) -> list[Any]:
    try:
        return sorted(elements)
    except TypeError:
        return sorted(elements, key=repr)


def _is_text(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type))


def _is_bytes(type: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type) or pa.types.is_large_binary(type) or pa.types.is_fixed_size_binary(type))


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 3]}..."
