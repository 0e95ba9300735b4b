"""Rules for the fields of an event, checked when the class is defined.

Two mistakes in event contracts cannot be repaired later, because wrong values stay in the stream: money as a float,
which has no exact value (0.1 + 0.2), and a time without its zone, which is another instant for each reader.

A field counts as money if its name contains a word such as ``amount`` or ``unit_price``; :data:`Measure` marks a float
with such a name as a measurement.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import enum
import re
import types
import typing
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from jetspark.errors import ConfigError

__all__ = [
    "MONEY_WORDS",
    "Measure",
    "Private",
    "Timestamp",
    "check_fields",
    "check_in_subject",
    "check_sets",
    "has_sets",
    "private_fields",
]

_T = typing.TypeVar("_T")

Measure = Annotated[_T, msgspec.Meta(extra_json_schema={"x-measure": True})]
"""``total_weight_kg: Measure[float]``: a measured quantity, although its name has a word for money in it."""

Private = Annotated[_T, msgspec.Meta(extra_json_schema={"x-private": True})]
"""``email: Private[str]``: personal data. It is left out of ``repr``, and its schema says ``x-private``."""

Timestamp = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
"""A time with its zone: the only form of ``datetime`` an event may have. It is written in UTC if it is in UTC."""

# fmt: off
MONEY_WORDS = frozenset({
    "amount", "aud", "balance", "bill", "brl", "budget", "cad", "cash", "cents",
    "charge", "chf", "cny", "commission", "cost", "credit", "currency", "debit", "deposit",
    "discount", "dkk", "dollar", "due", "earnings", "eur", "euro", "expense", "fee",
    "fine", "gbp", "income", "inr", "invoice", "jpy", "money", "nok",
    "paid", "pay", "payment", "payout", "penalty", "pence", "pln", "price",
    "profit", "refund", "revenue", "salary", "sek", "subtotal", "sum", "tax", "tip",
    "total", "turnover", "usd", "vat", "wage",
})
# fmt: on
"""A float field is taken for money if one of these, or its plural, is a word of its name."""

_find_words = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+").findall
_SETS = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)
_SORTED = (
    str,
    int,
    float,
    bytes,
    uuid.UUID,
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
)
_IN_SUBJECT = (str, int, bool, uuid.UUID, datetime.date)


def check_fields(kind: type[object]) -> None:
    """Check the fields of an event class, nested ones included.

    Raises:
        ConfigError: A field is a float and by its name money, a time without a zone, or a set that cannot be sorted.
        NameError: A type is not defined yet; call again when the module is complete.
    """
    is_pydantic = not issubclass(kind, msgspec.Struct)  # which does not look at marks of msgspec
    if not is_pydantic:  # its sets are sorted as JSON
        check_sets(kind, kind.__name__)
    for path, annotation, marks in _leaves(kind, kind.__name__, frozenset()):
        name = path.rpartition(".")[2]
        if annotation is float and not _is_marked(marks, "x-measure"):
            word = next(filter(_means_money, map(str.lower, _find_words(name))), None)
            if word is not None:
                raise ConfigError(
                    f"{path}: float, and {word!r} means money, which a float cannot hold exactly (0.1 + 0.2 != 0.3); "
                    f"count the smallest unit instead, as in {name}_cents: int, and name the currency. "
                    f"If it is not money: {name}: Measure[float]"
                )
        has_zone = any(isinstance(mark, msgspec.Meta) and mark.tz for mark in marks) and not is_pydantic
        if annotation is datetime.datetime and not has_zone:
            remedy = "pydantic.AwareDatetime" if is_pydantic else "Timestamp"
            raise ConfigError(
                f"{path}: datetime without a time zone is another instant for each reader; use {name}: {remedy}"
            )


def check_sets(kind: object, where: str) -> None:
    """Check that every set in a type has elements with an order, which is the order in which they are written.

    A set has no order of its own: a set of texts is ordered differently in each process.

    Raises:
        ConfigError: A set has elements that cannot be sorted.
        NameError: A type is not defined yet.
    """
    for path, annotation, _ in _leaves(kind, where, frozenset()):
        if _is_set(annotation):
            wrong = next((each for each in get_args(annotation) if not _is_sortable(each)), None)
            if wrong is not None:
                raise ConfigError(
                    f"{path}: a set of {_shown(wrong)}: equal sets would be written in several orders, as these have "
                    "none; expected elements of one type that is sorted, such as str, int or a StrEnum, or a list"
                )


def has_sets(kind: object) -> bool:
    """True if a type contains a set at any depth.

    Raises:
        NameError: A type is not defined yet.
    """
    return any(_is_set(annotation) for _, annotation, _ in _leaves(kind, "", frozenset()))


def _is_set(annotation: object) -> bool:
    return annotation in _SETS or get_origin(annotation) in _SETS


def _is_sortable(element: object) -> bool:
    """True if all values of a type have one fixed order."""
    element, _ = _marks(element)
    arguments = get_args(element)
    if element in (Any, object):
        return True  # what is in it decides, when it is written
    if get_origin(element) is Literal:
        return len({type(value) for value in arguments}) == 1 and isinstance(arguments[0], str | int)
    if get_origin(element) is tuple:
        return all(each is Ellipsis or _is_sortable(each) for each in arguments)
    if get_origin(element) in (Union, types.UnionType):
        return all(each in (int, float, bool) for each in arguments)
    return isinstance(element, type) and issubclass(element, _SORTED)


def _means_money(word: str) -> bool:
    singulars = {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
    return not MONEY_WORDS.isdisjoint(singulars)


def check_in_subject(kind: type[object], name: str, where: str) -> None:
    """Check that a field can be part of a subject or key: it is there, has a value, and one spelling.

    Raises:
        ConfigError: The field does not exist, or its type is not allowed.
        NameError: Its type is not defined yet.
    """
    hints = typing.get_type_hints(kind)
    if name not in field_names(kind):
        raise ConfigError(
            f"{kind.__name__}: {where} names {name!r}, which is not a field; fields are: {', '.join(field_names(kind))}"
        )
    for annotation in _alternatives(hints[name]):
        if get_origin(annotation) is Literal and all(isinstance(value, str | int) for value in get_args(annotation)):
            continue
        is_known = isinstance(annotation, type) and issubclass(annotation, (*_IN_SUBJECT, enum.Enum))
        if not is_known or annotation is datetime.datetime:
            raise ConfigError(
                f"{kind.__name__}.{name}: {where} uses it, so it needs a value with one spelling: "
                f"str, int, bool, UUID, date, an enum or Literal, and not {_shown(annotation)}"
            )


def field_names(kind: type[object]) -> tuple[str, ...]:
    """The fields of a Struct or of a pydantic model, in order."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(getattr(kind, "model_fields", ()))


def private_fields(kind: type[object]) -> frozenset[str]:
    """The fields marked ``Private``."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return frozenset(name for name in field_names(kind) if _is_marked(_marks(hints[name])[1], "x-private"))


def _leaves(
    kind: object, path: str, seen: frozenset[object], marks: tuple[object, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Every part of an annotation, with the path to it and its ``Annotated`` metadata."""
    kind, more = _marks(kind)
    marks += more
    fields = _fields_of(kind)
    if fields is not None:
        if kind not in seen:
            for name, annotation in fields.items():
                yield from _leaves(annotation, f"{path}.{name}", seen | {kind})
        return
    arguments = () if get_origin(kind) is Literal else get_args(kind)
    if not arguments or _is_set(kind):
        yield path, kind, marks
    for argument in arguments:
        if argument is not Ellipsis:
            yield from _leaves(argument, path, seen, marks)


def _fields_of(kind: object) -> dict[str, object] | None:
    """The annotations of a class with fields; None for anything else."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type):
        return None
    has_fields = (
        issubclass(origin, msgspec.Struct) or dataclasses.is_dataclass(origin) or hasattr(origin, "model_fields")
    )
    if not has_fields and not typing.is_typeddict(origin) and not hasattr(origin, "_field_defaults"):
        return None
    hints = typing.get_type_hints(origin, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not typing.ClassVar}


def _marks(annotation: object) -> tuple[Any, tuple[object, ...]]:
    """An annotation without ``Annotated``, and the metadata of that."""
    marks: tuple[object, ...] = ()
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        marks += tuple(more)
    return annotation, marks


def _is_marked(marks: tuple[object, ...], word: str) -> bool:
    return any(isinstance(mark, msgspec.Meta) and word in (mark.extra_json_schema or {}) for mark in marks)


def _alternatives(annotation: object) -> Iterator[object]:
    if get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _alternatives(each)
    else:
        yield annotation


def _shown(annotation: object) -> str:
    return "None" if annotation is types.NoneType else getattr(annotation, "__name__", str(annotation))
