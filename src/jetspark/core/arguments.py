"""What callers give that is no number: whether it is what the signature says. Each check returns what it was given.

Unchecked, an argument of a wrong type shows far from the call, as an ``AttributeError`` of code the caller never saw,
or not at all: a callback that is no function would fail for the first message, and ``"False"`` is as true as ``True``.
Numbers have checks of their own, in :mod:`jetspark.core.numbers`.
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

# An argument may be as long as its caller likes, and a message is for reading.
MAX_SHOWN = 100


def unfit(what: str, value: object, expected: str) -> ConfigError:
    """The error that names an argument, what it was given as, and what it takes."""
    shown = repr(value)
    if len(shown) > MAX_SHOWN:
        shown = f"{shown[:MAX_SHOWN]}..."
    return ConfigError(f"{what}={shown}: expected {expected}")


def explained(kind: type[T]) -> type[T]:
    """Have a dataclass say which field was meant, where it is given one that it does not have.

    Its own ``TypeError`` names what was wrong, and not ``max_age_s`` for ``max_age``, or for the server's ``max_msgs``
    the ``max_messages`` that it is here.
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
        ConfigError: It is no ``str``.
    """
    if isinstance(value, str):
        return value
    raise unfit(what, value, expected)


def texts(what: str, values: Any, expected: str = "a list of str") -> list[str]:
    """Several texts. One alone is a mistake: its characters are texts, too.

    Raises:
        ConfigError: They cannot be iterated over, or not all of them are ``str``.
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
        ConfigError: It is neither True nor False.
    """
    if value is True or value is False:
        return value
    raise unfit(what, value, "True or False")


def function(what: str, value: T, expected: str = "a function") -> T:
    """
    Raises:
        ConfigError: It cannot be called.
    """
    if callable(value):
        return value
    raise unfit(what, value, expected)


def instance(what: str, value: Any, kind: type[T], expected: str = "") -> T:
    """
    Raises:
        ConfigError: It is not of the class ``kind``.
    """
    if isinstance(value, kind):
        return value
    name = kind.__name__
    raise unfit(what, value, expected or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def octets(what: str, value: Any) -> bytes:
    """
    Raises:
        ConfigError: It is neither ``bytes`` nor of a type that is as good. The value is not shown: it may be long.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ConfigError(f"{what} of type {type(value).__name__}: expected bytes; encode text with .encode()")


def path(what: str, value: Any) -> str | Path:
    """
    Raises:
        ConfigError: It is neither a ``str`` nor a ``Path``.
    """
    if isinstance(value, str | Path):
        return value
    raise unfit(what, value, "a path")


def iterate(what: str, values: Any, expected: str) -> Iterator[Any]:
    """
    Raises:
        ConfigError: They cannot be iterated over.
    """
    try:
        return iter(values)
    except TypeError:
        raise unfit(what, values, expected) from None
