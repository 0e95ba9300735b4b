"""From the annotation of a field to its column type. docs/spark-events.md has the table.

Constraints of ``Annotated`` are rules for values and change no type. A type without a column is refused with the path
of its field: a column that holds something else than the field would lose it silently.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import enum
import types
import typing
import uuid
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

import msgspec
import pyarrow as pa

from jetspark.app.columns.column_types import (
    ColumnType,
    ConvertedColumn,
    Field,
    ListColumn,
    MapColumn,
    PlainColumn,
    StructColumn,
    TimeColumn,
    UnionColumn,
)
from jetspark.errors import ConfigError

__all__ = ["DECIMAL", "struct_of"]

DECIMAL = pa.decimal128(38, 18)
"""20 digits before the point and 18 after it. 38 is the most that Spark, Delta and Iceberg have."""

_EXACT = decimal.Context(prec=2 * 38)  # the default rounds to 28 digits
_PLAIN = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    datetime.date: pa.date32(),
    datetime.timedelta: pa.duration("us"),
}
_LISTS: dict[object, type] = {
    list: list,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
    tuple: tuple,
    set: set,
    collections.abc.Set: set,
    collections.abc.MutableSet: set,
    frozenset: frozenset,
}
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_JSON = (Any, object)

_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode


class _Place(NamedTuple):
    """Where an annotation is."""

    event: str
    path: str = ""
    above: tuple[object, ...] = ()

    def refuse(self, problem: str) -> NoReturn:
        raise ConfigError(f"{self.event}{'.' if self.path else ''}{self.path}: {problem}")

    def at(self, path: str) -> _Place:
        return self._replace(path=path)

    def field(self, name: str) -> _Place:
        return self._replace(path=f"{self.path}.{name}" if self.path else name)


class _Slot(NamedTuple):
    """An annotation without the alternatives that stand for no value."""

    column: ColumnType
    is_nullable: bool
    missing: object


def struct_of(kind: type[object]) -> StructColumn:
    """The column type of a class of events, whose fields are columns.

    Raises:
        ConfigError: A field has no column type; the message has its path.
        NameError: A type is not defined yet.
    """
    found = _struct(kind, _Place(kind.__name__))
    assert found is not None
    return found


def _slot(annotation: object, place: _Place) -> _Slot:
    alternatives = list(_alternatives(annotation))
    values = [each for each in alternatives if each not in (None, types.NoneType, msgspec.UnsetType)]
    is_unset, is_none = (
        msgspec.UnsetType in alternatives,
        len(values) + (msgspec.UnsetType in alternatives) < len(alternatives),
    )
    if is_unset and is_none:
        place.refuse("both None and UNSET would be null, and could not be told apart; keep one of them")
    if not values:
        place.refuse("it has no values but None, and no column type; remove the field or give it a type")
    has_null = is_unset or is_none or any(each in _JSON for each in values)
    return _Slot(_column(values, place), has_null, msgspec.UNSET if is_unset else None)


def _alternatives(annotation: Any) -> typing.Iterator[object]:
    """The alternatives of a union; also those in aliases, and of a Literal one for each type of its values."""
    annotation = _bare(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _alternatives(each)
    elif get_origin(annotation) is Literal:
        yield from dict.fromkeys(type(value) for value in get_args(annotation))
    else:
        yield types.NoneType if annotation is None else annotation


def _bare(annotation: Any) -> Any:
    """An annotation without ``Annotated`` and other wrappers."""
    while True:
        if get_origin(annotation) in (Annotated, typing.Required, typing.NotRequired):
            annotation = get_args(annotation)[0]
        elif (base := getattr(annotation, "__supertype__", None)) is not None:  # NewType
            annotation = base
        else:
            return annotation


def _column(values: Sequence[Any], place: _Place) -> ColumnType:
    if any(each in _JSON for each in values):
        return ConvertedColumn(place.path, pa.string(), (), lambda value: _encode(value).decode(), _decode)
    if len(values) == 1:
        return _single(values[0], place)
    members = dict[str, ColumnType]()
    owner_of = dict[type, str]()
    for each in values:
        member, name = _single(each, place), _member_name(each)
        if name.lower() in map(str.lower, members):
            place.refuse(f"two of its types are called {name!r}, and need fields of different names; rename one")
        for kind in member.classes:
            if kind in owner_of:
                place.refuse(f"both {owner_of[kind]!r} and {name!r} have values of {kind.__name__}; keep one of them")
            owner_of[kind] = name
        members[name] = member
    return UnionColumn(place.path, members)


def _member_name(annotation: Any) -> str:
    """The tag of a struct, which is its name on the wire, or the name of a class."""
    origin = datetime.datetime if _is_time(annotation) else get_origin(annotation) or annotation
    config = getattr(origin, "__struct_config__", None)
    tag = getattr(config, "tag", None)
    return tag if isinstance(tag, str) else str(origin.__name__)


def _single(annotation: Any, place: _Place) -> ColumnType:
    """The column of a single type."""
    path, origin = place.path, get_origin(annotation) or annotation
    if (value := getattr(annotation, "__value__", None)) is not None:  # an alias with a name: type X = ...
        slot = _slot(value, _entered(annotation, place))
        if slot.is_nullable:
            place.refuse(f"the alias {annotation} includes None; write | None outside of it")
        return slot.column
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _enum(annotation, place)
    if annotation in _PLAIN:
        return PlainColumn(path, _PLAIN[annotation], (annotation,))
    if (converted := _converted(annotation, path)) is not None:
        return converted
    if origin in _LISTS:
        return _list(origin, get_args(annotation), place)
    if origin in _DICTS:
        return _map(get_args(annotation), place)
    if (struct := _struct(annotation, place)) is not None:
        return struct
    name = getattr(annotation, "__name__", str(annotation))
    return place.refuse(f"{name} has no column type; docs/spark-events.md lists the types that have one")


def _converted(annotation: Any, path: str) -> ColumnType | None:
    def text(to_cell: Callable[[Any], object], of_cell: Callable[[Any], object]) -> ColumnType:
        return ConvertedColumn(path, pa.string(), (annotation,), to_cell, of_cell)

    if _is_time(annotation):
        return TimeColumn(path, pa.timestamp("us", "UTC"), (datetime.datetime,), None, _in_utc)
    if annotation is decimal.Decimal:
        return ConvertedColumn(path, DECIMAL, (annotation,), None, _without_zeros)
    if annotation is uuid.UUID:
        return text(str, uuid.UUID)
    if annotation is datetime.time:
        return text(datetime.time.isoformat, datetime.time.fromisoformat)
    if annotation in (bytearray, memoryview):
        return ConvertedColumn(path, pa.binary(), (annotation,), bytes, annotation)
    if annotation is msgspec.Raw:
        return text(lambda raw: bytes(raw).decode(), lambda cell: msgspec.Raw(cell.encode()))
    return None


def _is_time(annotation: object) -> bool:
    return annotation is datetime.datetime or getattr(annotation, "__qualname__", "") == "AwareDatetime"


def _in_utc(value: datetime.datetime) -> datetime.datetime:
    return value.replace(tzinfo=datetime.UTC)  # Arrow has a ZoneInfo there


def _without_zeros(value: decimal.Decimal) -> decimal.Decimal:
    """A decimal without the zeros that fill the column: 1.5 and no 1.500000000000000000."""
    value = value.normalize(_EXACT)
    return value if value.as_tuple().exponent <= 0 else value.quantize(decimal.Decimal(1), context=_EXACT)  # type: ignore[operator]


def _enum(kind: type[enum.Enum], place: _Place) -> ColumnType:
    values = {type(member.value) for member in kind}
    if values not in ({str}, {int}):
        place.refuse(f"the values of {kind.__name__} are not all str, and not all int")
    arrow = pa.string() if values == {str} else pa.int64()
    return ConvertedColumn(place.path, arrow, (kind,), attrgetter("value"), kind)


def _list(origin: Any, arguments: tuple[Any, ...], place: _Place) -> ColumnType:
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if arguments == ((),):
            arguments = ()
        slots = [_slot(each, place.field(f"_{number}")) for number, each in enumerate(arguments, 1)]
        fields = [
            Field(f"_{number}", slot.column, itemgetter(number - 1), is_nullable=slot.is_nullable)
            for number, slot in enumerate(slots, 1)
        ]
        return StructColumn(place.path, (tuple,), fields, lambda values: tuple(values.values()))
    make = _LISTS[origin]
    element = _slot(arguments[0] if arguments else Any, place.at(f"{place.path}[]"))
    is_set = make in (set, frozenset)
    # For an abstract type pydantic keeps the given value.
    classes = (make,) if origin is make else (list, tuple) if make is list else (set, frozenset)
    return ListColumn(place.path, classes, element.column, is_nullable=element.is_nullable, make=make, is_set=is_set)


def _map(arguments: tuple[Any, ...], place: _Place) -> ColumnType:
    of_key, of_value = arguments or (Any, Any)
    key = _slot(str if of_key in _JSON else of_key, place.at(f"{place.path}[key]"))
    if key.is_nullable or not isinstance(key.column, PlainColumn):
        place.refuse("expected keys of one type that JSON writes as a text, such as str, int, UUID or an enum")
    value = _slot(of_value, place.at(f"{place.path}[]"))
    return MapColumn(place.path, key.column, value.column, is_nullable=value.is_nullable)


# ---- classes with fields ---------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """A field of a class."""

    annotation: object
    has_default: bool = False
    is_optional_key: bool = False
    """The key of a TypedDict may be missing."""


def _entered(kind: object, place: _Place) -> _Place:
    if kind in place.above:
        name = getattr(kind, "__name__", str(kind))
        place.refuse(f"{name} contains itself, and columns have no recursive type; declare the field as Any, for JSON")
    return place._replace(above=(*place.above, kind))


def _struct(annotation: Any, place: _Place) -> StructColumn | None:
    """The column of a class with fields; None for anything else."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return None
    members = _members(kind, place)
    if members is None:
        return None
    variables = dict(zip(getattr(kind, "__parameters__", ()), get_args(annotation), strict=False))
    place, is_dict = _entered(kind, place), typing.is_typeddict(kind)
    fields = list[Field]()
    for name, member in members.items():
        here = place.field(name)
        slot = _slot(_substituted(member.annotation, variables), here)
        if member.is_optional_key and slot.is_nullable:
            here.refuse("both None and a missing key would be null, and could not be told apart; keep one of them")
        if name.lower() in (each.name.lower() for each in fields):
            here.refuse("another field differs from it in upper and lower case only, and Spark does not; rename one")
        value_of = _getter(name) if is_dict else attrgetter(name)
        is_nullable = slot.is_nullable or member.is_optional_key
        is_omissible = member.has_default or member.is_optional_key
        fields.append(
            Field(
                name,
                slot.column,
                value_of,
                is_nullable=is_nullable,
                missing=slot.missing,
                has_default=is_omissible,
            )
        )
    optional = {name for name, member in members.items() if member.is_optional_key}
    return StructColumn(place.path, (dict if is_dict else kind,), fields, _maker(kind, optional))


def _getter(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda owner: owner.get(name)


def _maker(kind: Any, optional: set[str]) -> Callable[[dict[str, Any]], object]:
    if typing.is_typeddict(kind):
        if not optional:
            return lambda values: values
        return lambda values: {name: each for name, each in values.items() if each is not None or name not in optional}
    if hasattr(kind, "model_fields"):
        return lambda values: kind.model_construct(**values)
    return lambda values: kind(**values)


def _substituted(annotation: Any, variables: dict[Any, Any]) -> Any:
    """The annotation of a generic class's field, with types in place of its variables."""
    if isinstance(annotation, typing.TypeVar):
        return variables.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if not variables or not parameters or isinstance(annotation, type):
        return annotation
    return annotation[tuple(variables.get(each, each) for each in parameters)]


def _members(kind: Any, place: _Place) -> dict[str, _Member] | None:
    """The fields of a class by name; None if it has none."""
    if hasattr(kind, "model_fields"):
        if kind.model_config.get("extra") == "allow":
            place.refuse(f"{kind.__name__} allows extra fields, which have no column; write extra='ignore'")
        return {name: _Member(info.annotation, not info.is_required()) for name, info in kind.model_fields.items()}
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        defaults = {each.name for each in msgspec.structs.fields(kind) if not each.required}
        return {name: _Member(hints[name], name in defaults) for name in kind.__struct_fields__}
    if dataclasses.is_dataclass(kind):
        hints, fields = typing.get_type_hints(kind, include_extras=True), dataclasses.fields(kind)
        no_argument = [each.name for each in fields if not each.init]
        if no_argument:
            place.field(no_argument[0]).refuse("a field with init=False cannot be given a value; leave init out")
        unset = dataclasses.MISSING
        return {
            each.name: _Member(hints[each.name], each.default is not unset or each.default_factory is not unset)
            for each in fields
        }
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {name: _Member(hint, is_optional_key=_is_optional(kind, name, hint)) for name, hint in hints.items()}
    if issubclass(kind, tuple) and hasattr(kind, "_field_defaults"):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {name: _Member(hints.get(name, Any), name in kind._field_defaults) for name in kind._fields}
    return None


def _is_optional(kind: Any, name: str, hint: object) -> bool:
    """True if the key of a TypedDict may be missing. The class itself cannot tell if its annotations are texts."""
    wrapper = get_origin(hint)
    if wrapper in (typing.Required, typing.NotRequired):
        return wrapper is typing.NotRequired
    return name in kind.__optional_keys__
