"""Validates configurations by the types and metadata of their fields, so that no field remains unchecked.

A wrong value is refused in the constructor, by a :class:`~jetspark.ConfigError` that names the field, the value and the
expectation. The server would answer later and in its own terms (``invalid JSON: can not unmarshal``), or silently
read the value as another one: a negative limit, for instance, as no limit.

Configurations *from* the server are checked by :func:`check_types` alone: a newer server may have more words, and an
older one may have accepted values that are refused here.

A field's metadata may have ``low`` and ``high`` (of numbers; of durations in seconds, where 0 is always allowed
besides), ``check``, which is called with the name of the field and each text in it, and ``each``, the word for what a
list of texts holds.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from jetspark.core.numbers import INT64, MAX_SECONDS, UINT64
from jetspark.core.subjects import validate_filter, validate_queue, validate_subject
from jetspark.errors import ConfigError, InvalidSubject

__all__ = [
    "INT32",
    "INT64",
    "UINT64",
    "check_config",
    "check_description",
    "check_fields",
    "check_filter",
    "check_group",
    "check_name",
    "check_not_empty",
    "check_queue",
    "check_sample",
    "check_subject",
    "check_types",
]

C = TypeVar("C")

Check: TypeAlias = Callable[[str, str], object]

# The largest number of the server's smaller types.
INT32 = 2**31 - 1

# The server's own bounds, in bytes.
MAX_NAME_BYTES = 255
MAX_DESCRIPTION_BYTES = 4096

_is_group = re.compile(r"[-A-Za-z0-9_/=]{1,16}").fullmatch
_is_sample = re.compile(r"(?:100|[0-9]{1,2})%?").fullmatch


# ---- texts that mean something -------------------------------------------------------------------------------------


def check_name(what: str, name: str) -> str:
    """Names of streams, consumers and buckets travel as one token of a subject, and as a folder on the server."""
    if not name or not isinstance(name, str):
        raise ConfigError(f"{what}={name!r}: expected a name")
    # Exactly what the server refuses: streams with other blanks in their names exist, and we must be able to read them.
    if bad := sorted({character for character in name if character in ".*>/\\ \t\r\n\f"}):
        raise ConfigError(f"{what}={name!r}: {', '.join(map(repr, bad))} not allowed; use letters, digits, '-' and '_'")
    if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise ConfigError(f"{what}={name!r}: expected at most {MAX_NAME_BYTES} bytes")
    return name


def check_description(what: str, text: str) -> None:
    if (size := len(text.encode())) > MAX_DESCRIPTION_BYTES:
        raise ConfigError(f"{what} of {size} bytes, {text[:20]!r}...: expected at most {MAX_DESCRIPTION_BYTES}")


def check_subject(what: str, text: str) -> None:
    """A subject for publishing: no wildcards."""
    _named(what, validate_subject, text)


def check_filter(what: str, text: str) -> None:
    """A subject with or without wildcards."""
    _named(what, validate_filter, text)


def check_queue(what: str, text: str) -> None:
    _named(what, validate_queue, text)


def check_not_empty(what: str, text: str) -> None:
    if not text:
        raise ConfigError(f"{what}={text!r}: expected some text, or leave it out")


def check_group(what: str, text: str) -> None:
    if not _is_group(text):
        raise ConfigError(f"{what}: {text!r}: expected 1 to 16 of the characters A-Z a-z 0-9 - _ / =")


def check_sample(what: str, text: str) -> None:
    if text and not _is_sample(text):
        raise ConfigError(f"{what}={text!r}: expected a percentage from '0%' to '100%'")


def _named(what: str, validate: Callable[[str], str], text: str) -> None:
    try:
        validate(text)
    except InvalidSubject as error:
        raise InvalidSubject(error.subject, f"{error.reason} (in {what})") from None


# ---- configurations ------------------------------------------------------------------------------------------------


def check_config(kind: type[C], config: object, *, name: str | None = None) -> C:
    """The configuration, which must be of this kind; with ``name``, the field for a name that is all there is of it.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(config, kind):
        return config
    if name is not None and isinstance(config, str):
        return kind(**{name: config})
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    expected = f"{article} {kind.__name__}" + (", or a name" if name is not None else "")
    hint = f"; {kind.__name__}(**config) makes one of a dict" if isinstance(config, dict) else ""
    raise ConfigError(f"config={config!r}: expected {expected}{hint}")


# ---- fields --------------------------------------------------------------------------------------------------------


def check_fields(config: Any) -> None:
    """Check every field that is set.

    Raises:
        ConfigError: A field has a value of a wrong type, or out of its range.
    """
    for rule in _rules(type(config)):
        value = getattr(config, rule.name)
        if value is not None or not rule.may_be_none:
            rule.check_type(value)
            rule.check_value(value)


def check_types(config: Any) -> None:
    """Check the types of a configuration from the server, without judging its values.

    Raises:
        ConfigError: A field has a value of a wrong type.
    """
    for rule in _rules(type(config)):
        value = getattr(config, rule.name)
        if value is not None or rule.is_required:
            rule.check_type(value)
        if rule.check is check_name and rule.is_required and not value:
            raise ConfigError(f"{rule.name}={value!r}: expected a name")


@dataclass(frozen=True, slots=True)
class _Rule:
    """The type of one field, and its rules: one value, a list of values, or a map from texts to values."""

    name: str
    shape: Literal["one", "list", "map"]
    kind: type
    """The type of each value."""
    words: tuple[str, ...]
    low: float
    high: float
    may_be_none: bool
    is_required: bool
    check: Check | None
    each: str

    def check_type(self, value: object) -> None:
        if self.shape == "list":
            # A str is a sequence of its characters: "orders.>" would become eight subjects of one character each.
            is_list = isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes | bytearray)
        elif self.shape == "map":
            is_list = isinstance(value, collections.abc.Mapping) and all(isinstance(key, str) for key in value)
        else:
            is_list = True
        if not is_list or not all(map(self._is_kind, self._values(value))):
            raise self._wrong(value, self._expected())

    def check_value(self, value: Any) -> None:
        """Check the value; its type is right."""
        for each in self._each(value):
            if self.words and each not in self.words:
                raise self._wrong(value, f"one of {', '.join(map(repr, self.words))}")
            if self.kind in (int, float) and not (self.low <= each <= self.high or (self.kind is float and each == 0)):
                raise self._wrong(value, self._range(each))
            if isinstance(each, str):
                self._check_text(value, each)

    def _values(self, value: Any) -> Any:
        """The values to compare with ``kind``; the keys of a map are always texts."""
        return value.values() if self.shape == "map" else self._each(value)

    def _each(self, value: Any) -> tuple[Any, ...]:
        if self.shape == "one":
            return (value,)
        return (*value.keys(), *value.values()) if self.shape == "map" else tuple(value)

    def _is_kind(self, value: object) -> bool:
        if self.kind is object:
            return True
        if self.kind is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        # True is an int, and replicas=True a mistake.
        return isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))

    def _check_text(self, value: object, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._wrong(value, f"text that can be written as UTF-8, unlike {text[error.start]!r}") from None
        if self.check is not None:
            self.check(self.name, text)

    def _expected(self) -> str:
        if self.words:
            return f"one of {', '.join(map(repr, self.words))}"
        if self.shape == "list":
            return f"a list of {self.each}"
        if self.shape == "map":
            return "a dict with str keys" if self.kind is object else "a dict of str to str"
        if self.kind is float:
            return self._range()
        if self.kind is int:
            return f"a whole number, {self._range()}"
        if self.name in ("name", "durable_name", "bucket"):
            return "a name"
        names: dict[type, str] = {bool: "True or False", str: "a str", datetime.datetime: "a datetime.datetime"}
        return names.get(self.kind, f"a {self.kind.__name__}")

    def _range(self, value: float = -1) -> str:
        if self.kind is float:
            if 0 < value < self.low:
                return f"0, or {self.low:g} seconds or more"
            return f"at most {self.high} seconds" if self.high < value < math.inf else "seconds of 0 or more"
        if self.high in (INT32, INT64, UINT64):
            return f"{self.low} or more"
        return f"{self.low} to {self.high}"

    def _wrong(self, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.name}={value!r}: expected {expected}")


_RULES: dict[type, tuple[_Rule, ...]] = {}


def _rules(kind: type) -> tuple[_Rule, ...]:
    known = _RULES.get(kind)
    if known is None:
        hints = typing.get_type_hints(kind)
        known = _RULES[kind] = tuple(_rule(entry, hints[entry.name]) for entry in dataclasses.fields(kind))
    return known


def _rule(entry: dataclasses.Field[Any], hint: Any) -> _Rule:
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    [plain] = [option for option in options if option is not type(None)]
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    shape: Literal["one", "list", "map"] = "one"
    words: tuple[str, ...] = ()
    if origin is Literal:
        plain, words = str, inner
    elif origin is collections.abc.Sequence:
        shape, plain = "list", inner[0]
    elif origin is collections.abc.Mapping:
        shape, plain = "map", inner[1] if inner[1] in (str, int) else object
    plain = typing.get_origin(plain) or plain  # a list of dicts, whatever is in those
    is_whole = plain is int
    return _Rule(
        name=entry.name,
        shape=shape,
        kind=plain,
        words=words,
        low=entry.metadata.get("low", 0),
        high=entry.metadata.get("high", INT64 if is_whole else MAX_SECONDS),
        may_be_none=type(None) in options,
        is_required=entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING,
        check=entry.metadata.get("check"),
        each=entry.metadata.get("each", {str: "subjects", float: "seconds"}.get(plain, getattr(plain, "__name__", ""))),
    )
