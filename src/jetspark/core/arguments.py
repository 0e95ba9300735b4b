"""Type checks of arguments other than numbers. Each check returns the value, or raises a ``ConfigError`` naming it.

Unchecked, an argument of a wrong type fails far from the call, as an ``AttributeError`` in code the caller never saw,
or stays unnoticed: a callback that is not callable would fail at the first message, and the text ``"False"`` is true.
Numbers have their own checks in :mod:`jetspark.core.numbers`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jetspark.errors import ConfigError

__all__ = [
    "explained",
    "flag",
    "function",
    "instance",
    "iterate",
    "octets",
    "path",
    "suggestion",
    "text",
    "texts",
    "unfit",
]

T = TypeVar("T")

# An argument may have any length; an error message has to stay readable.
MAX_SHOWN = 100


def unfit(what: str, value: object, expected: str) -> ConfigError:
    """The error for an argument of a wrong type: it has the argument's name, its value (shortened) and the expected
    type."""
    shown = repr(value)
    if len(shown) > MAX_SHOWN:
        shown = f"{shown[:MAX_SHOWN]}..."
    return ConfigError(f"{what}={shown}: expected {expected}")


def explained(kind: type[T]) -> type[T]:
    """Make a dataclass name the intended field when it is given an unknown one.

    Python's own ``TypeError`` names only the unknown field. This one also proposes ``max_age_s`` for ``max_age``, and
    ``max_messages`` for the server's name ``max_msgs``.
    """
    plain = kind.__init__
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # a dataclass
    names = [field.name for field in fields if field.init]
    on_the_wire = {field.metadata.get("wire"): field.name for field in fields}

    @functools.wraps(plain)
    def init(self: T, *args: Any, **given: Any) -> None:
        for name in given.keys() - set(names):
            other = on_the_wire.get(name)
            meant = f"; did you mean {other}?" if other else suggestion(name, names)
            raise TypeError(f"{kind.__name__}({name}=...): no such field{meant or '; it has ' + ', '.join(names)}")
        plain(self, *args, **given)

    kind.__init__ = init  # type: ignore[assignment]
    return kind


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean max_age_s?``, where a known name is like this one; else nothing."""
    known = sorted(known)
    longer = [each for each in known if each.startswith(f"{name}_")]
    found = longer or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def text(what: str, value: Any, expected: str = "a str") -> str:
    """
    Raises:
        ConfigError: The value is not a ``str``.
    """
    if isinstance(value, str):
        return value
    raise unfit(what, value, expected)


def texts(what: str, values: Any, expected: str = "a list of str") -> list[str]:
    """A list of texts. A single ``str`` is refused, because its characters would be taken for the texts.

    Raises:
        ConfigError: The value is not iterable, or an item is not a ``str``.
    """
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise unfit(what, values, expected)
    given = list(values)
    if not all(isinstance(each, str) for each in given):
        raise unfit(what, values, expected)
    return given


def flag(what: str, value: Any) -> bool:
    """
    Raises:
        ConfigError: The value is neither True nor False.
    """
    if value is True or value is False:
        return value
    raise unfit(what, value, "True or False")


def function(what: str, value: T, expected: str = "a function") -> T:
    """
    Raises:
        ConfigError: The value is not callable.
    """
    if callable(value):
        return value
    raise unfit(what, value, expected)


def instance(what: str, value: Any, kind: type[T], expected: str = "") -> T:
    """
    Raises:
        ConfigError: The value is not an instance of ``kind``.
    """
    if isinstance(value, kind):
        return value
    name = kind.__name__
    raise unfit(what, value, expected or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def octets(what: str, value: Any) -> bytes:
    """
    Raises:
        ConfigError: The value is not ``bytes``, ``bytearray`` or ``memoryview``. The message does not show it: it may
        be long.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ConfigError(f"{what} of type {type(value).__name__}: expected bytes; encode text with .encode()")


def path(what: str, value: Any) -> str | Path:
    """
    Raises:
        ConfigError: The value is neither a ``str`` nor a ``Path``.
    """
    if isinstance(value, str | Path):
        return value
    raise unfit(what, value, "a path")


def iterate(what: str, values: Any, expected: str) -> Iterator[Any]:
    """
    Raises:
        ConfigError: The value is not iterable.
    """
    try:
        return iter(values)
    except TypeError:
        raise unfit(what, values, expected) from None
