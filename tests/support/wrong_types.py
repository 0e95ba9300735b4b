"""Values of wrong types, and what may come of them."""

from __future__ import annotations

import datetime
import re
from typing import Any

from jetspark import ConfigError


class Odd:
    """Something that nobody expects."""

    def __repr__(self) -> str:
        return "<odd>"


# A value of every type that one may mistake for another; of each argument those are tried that its type does not allow.
VALUES: list[Any] = [
    None,
    True,
    5,
    1.5,
    "x",
    b"x",
    [5],
    ["x"],
    ("s.a",),
    [("s.a",)],
    [("s.a", b"", 5)],
    {5: 5},
    {"x": "y"},
    Odd(),
    Odd,
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
]

# What an argument may be called, where a part of it is at fault.
NAMES_OF = {
    "headers": "headers?",
    "items": "items|headers",
    "*filters": "filters|key",
    "*filter_subjects": "filter_subjects|subject",
    "filters": "filters|subject|key",
}


def complaint(what: str, name: str, value: object, outcome: object) -> str | None:
    """What is wrong with the outcome of a wrong value; None when nothing is."""
    if not isinstance(outcome, ConfigError):
        return f"{what}({name}={value!r}): {outcome!r}"
    called = NAMES_OF.get(name, re.escape(name))
    if not (re.search(rf"\b({called})\b", str(outcome)) and re.search(r"\b(expected|must be)\b", str(outcome))):
        return f"{what}({name}={value!r}): says {outcome}"
    return None
