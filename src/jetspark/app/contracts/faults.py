"""Validation errors of msgspec and pydantic in one form: the field, the rule, and the kind of fault."""

from __future__ import annotations

import re
import sys
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

__all__ = ["Fault", "FaultKind", "fault_of", "user_errors"]


def user_errors() -> tuple[type[BaseException], ...]:
    """Return the classes that ``except user_errors():`` catches around a synchronous function of the application.

    Whatever such a function raises is a failure of its event and must not end the process, because the next process
    gets the same event. That includes direct subclasses of ``BaseException``, such as the panic of an extension written
    in Rust. Only ``KeyboardInterrupt`` rises: Ctrl-C may arrive at any line.
    """
    return () if isinstance(sys.exc_info()[1], KeyboardInterrupt) else (BaseException,)


FaultKind: TypeAlias = Literal["syntax", "missing", "type", "rule"]

# msgspec says: Expected `int`, got `str` - at `$.amount_cents`
_find_place = re.compile(r" - at `(?:key in )?\$?([^`]*)`$").search
_find_missing = re.compile(r"Object missing required field `([^`]*)`").match
# Of a constraint it repeats the type: Expected `int` >= 0, Expected `str` of length >= 1, ... matching regex '...'
_find_rule = re.compile(r"Expected `[^`]*` (?:>|<|that's|of length|matching|with)").match
_is_enum = re.compile(r"Invalid (?:enum )?value").match


class Fault(NamedTuple):
    """A reason why data breaks its contract."""

    kind: FaultKind
    field: str
    """The path to it, such as ``items[0].sku``; empty for the data as a whole."""
    rule: str
    """In words: the expectation, and the value found."""


def fault_of(error: Exception) -> Fault:
    """The first fault in an error of msgspec or pydantic."""
    if isinstance(error, msgspec.ValidationError):
        return _of_msgspec(str(error))
    if isinstance(error, msgspec.DecodeError | UnicodeDecodeError | RecursionError):
        return Fault("syntax", "", str(error))
    faults = getattr(error, "errors", None)
    if callable(faults):
        return _of_pydantic(faults()[0])
    return Fault("type", "", f"{type(error).__name__}: {error}")


def error_text(error: BaseException) -> str:
    """The text of an error about unreadable or unwritable data; for an error of the application's own code, with its
    class."""
    is_plain = isinstance(error, TypeError | ValueError | msgspec.MsgspecError)
    return str(error) if is_plain else f"{type(error).__name__}: {error}"


def _of_msgspec(text: str) -> Fault:
    place = _find_place(text)
    field, rule = ("", text) if place is None else (place[1].removeprefix("."), text[: place.start()])
    field = field.replace("[...]", "[]")
    missing = _find_missing(rule)
    if missing is not None:
        return Fault("missing", f"{field}.{missing[1]}" if field else missing[1], "required, and not there")
    is_rule = _find_rule(rule) or _is_enum(rule)
    return Fault("rule" if is_rule else "type", field, rule.replace("`", ""))


def _of_pydantic(fault: Any) -> Fault:
    """``fault`` is one entry of ``ValidationError.errors()``."""
    field = ".".join(map(str, fault["loc"]))
    word = fault["type"]
    if word == "missing":
        return Fault("missing", field, "required, and not there")
    if word == "json_invalid":
        return Fault("syntax", "", fault["msg"])
    is_type = word.endswith(("_type", "_parsing")) or word in ("timezone_aware", "datetime_from_date_parsing")
    return Fault("type" if is_type else "rule", field, fault["msg"])
