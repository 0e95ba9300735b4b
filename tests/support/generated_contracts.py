"""Contracts that hypothesis makes: types of fields, their values, and applications with events of such fields.

A worker of Spark makes the same application again from the seed in its name: ``support.generated_contracts:app_7``.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import itertools
import json
import random
import types
import uuid
from collections.abc import Callable
from datetime import UTC, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import hypothesis
import msgspec
from hypothesis import strategies as st

from jetspark.app import App, Event
from jetspark.app.contracts.field_rules import Timestamp


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Card(msgspec.Struct, frozen=True, tag="card"):
    number: str
    expiry: datetime.date | None = None


class Cash(msgspec.Struct, frozen=True, tag="cash"):
    pass


_numbers = itertools.count()
Made = tuple[Any, "st.SearchStrategy[Any]"]
"""A type, and its values."""

_text = st.text(max_size=8)
_int64 = st.integers(-(2**63), 2**63 - 1)
_zones = st.sampled_from([UTC, datetime.timezone(timedelta(hours=5, minutes=30))])
_times = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(9998, 1, 1), timezones=_zones)
_json = st.recursive(
    st.none() | st.booleans() | _int64 | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)
KEYS: list[Made] = [(str, _text), (int, _int64), (uuid.UUID, st.uuids()), (Colour, st.sampled_from(Colour))]
LEAVES: list[Made] = [
    *KEYS,
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans()),
    (bytes, st.binary(max_size=8)),
    (Timestamp, _times),
    (datetime.date, st.dates()),
    (datetime.time, st.times()),
    (timedelta, st.timedeltas(timedelta(days=-100_000), timedelta(days=100_000))),
    (Decimal, st.decimals(-(10**19), 10**19, places=18)),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9)),
    (Level, st.sampled_from(Level)),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
    (Any, _json),
    (int | str, _int64 | _text),
    (int | float | bool, _int64 | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)),
    (Card | Cash, st.builds(Card, _text, st.none() | st.dates()) | st.builds(Cash)),
]


@st.composite
def _structs(draw: Callable[[Any], Any], inner: st.SearchStrategy[Made]) -> Made:
    parts = draw(st.lists(inner, max_size=4))
    names = [f"f{number}" for number in range(len(parts))]
    values = {name: part[1] for name, part in zip(names, parts, strict=True)}
    types_ = [(name, part[0]) for name, part in zip(names, parts, strict=True)]
    name = f"Made{next(_numbers)}"
    match draw(st.sampled_from(["struct", "array", "dataclass", "tuple", "dict", "union"])):
        case "dataclass":
            kind: Any = dataclasses.make_dataclass(name, types_, frozen=True)
        case "tuple":
            kind = NamedTuple(name, types_)  # type: ignore[misc,no-redef]
        case "dict":
            optional = {each: NotRequired[of] for each, of in types_ if not _may_be_none(of)}
            return (
                TypedDict(name, dict(types_) | optional),  # type: ignore[operator]
                st.fixed_dictionaries(
                    {each: of for each, of in values.items() if each not in optional},
                    optional={each: values[each] for each in optional},
                ),
            )
        case "union":
            kind = msgspec.defstruct(name, types_, frozen=True, tag=name)
            other = msgspec.defstruct(f"{name}b", types_, frozen=True, tag=f"{name}b")
            return kind | other, st.builds(kind, **values) | st.builds(other, **values)
        case shape:
            kind = msgspec.defstruct(name, types_, frozen=True, array_like=shape == "array")
    return kind, st.builds(kind, **values)


def _may_be_none(annotation: Any) -> bool:
    return annotation is Any or type(None) in getattr(annotation, "__args__", ())


def _of(generic: Any, *arguments: Any) -> Any:
    return generic[arguments if len(arguments) > 1 else arguments[0]]


def _wrapped(inner: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    def with_inner(make: Callable[[Any, Any], Made]) -> st.SearchStrategy[Made]:
        return inner.map(lambda part: make(*part))

    keys = st.sampled_from(KEYS)
    return st.one_of(
        _structs(inner),
        with_inner(lambda kind, values: (_of(list, kind), st.lists(values, max_size=3))),
        with_inner(lambda kind, values: (_of(tuple, kind, ...), st.lists(values, max_size=3).map(tuple))),
        with_inner(lambda kind, values: (_of(tuple, kind, int), st.tuples(values, _int64))),
        with_inner(lambda kind, values: (kind, values) if kind is Any else (kind | None, st.none() | values)),
        st.tuples(keys, inner).map(
            lambda parts: (_of(dict, parts[0][0], parts[1][0]), st.dictionaries(parts[0][1], parts[1][1], max_size=3))
        ),
        keys.map(lambda part: (_of(set, part[0]), st.sets(part[1], max_size=4))),
        keys.map(lambda part: (_of(frozenset, part[0]), st.frozensets(part[1], max_size=4))),
    )


TYPES = st.recursive(st.sampled_from(LEAVES), _wrapped, max_leaves=6)
"""A type of a field, and its values."""


class Generated(NamedTuple):
    """An application with one type of events, and such events."""

    app: App
    kind: type[Event]
    events: list[Any]
    handled: list[Any]
    """What the application's handler got."""


DRAW_BYTES, MAX_DRAWS = 8192, 100


@functools.lru_cache
def generated(seed: int) -> Generated:
    """The same in every process."""
    global _numbers
    _numbers = itertools.count()
    found: list[Generated] = []

    @hypothesis.settings(database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.data())
    def draw(data: st.DataObject) -> None:
        fields = [data.draw(TYPES) for _ in range(data.draw(st.integers(3, 8)))]
        # With an example, because none follows from the schema of a map whose keys are numbers, or of a set of dates.
        annotations: dict[str, Any] = {
            f"f{number}": Annotated[kind, msgspec.Meta(examples=[json.loads(msgspec.json.encode(data.draw(of)))])]
            for number, (kind, of) in enumerate(fields)
        }
        annotations |= {"number": int}
        words = {"type": f"generated.{seed}", "version": 1, "key": "number", "subject": f"generated{seed}.{{number}}"}
        kind: Any = types.new_class("Made", (Event,), words, lambda body: body.update(__annotations__=annotations))
        values = st.builds(kind, **{f"f{number}": of for number, (_, of) in enumerate(fields)}, number=st.just(0))
        made = data.draw(st.lists(values, min_size=1, max_size=20))
        read = [kind.__contract__.decode(kind.__contract__.encode(each)) for each in made]
        events = [msgspec.structs.replace(each, number=number) for number, each in enumerate(read)]
        app = App(f"generated{seed}", stream=f"GENERATED{seed}", subjects=[f"generated{seed}.>"])
        handled: list[Any] = []

        async def handle(event: Any) -> None:
            handled.append(event)

        handle.__annotations__["event"] = kind
        app.handler(kind, durable="all")(handle)
        found.append(Generated(app, kind, events, handled))

    # From bytes, since what hypothesis makes of a seed depends on the modules that the process has imported.
    chance = random.Random(seed)
    for _ in range(MAX_DRAWS):
        draw.hypothesis.fuzz_one_input(chance.randbytes(DRAW_BYTES))  # type: ignore[attr-defined]
        if found:
            return found[-1]
    raise AssertionError(f"seed {seed}: {MAX_DRAWS} draws of {DRAW_BYTES} bytes were too short")


def __getattr__(name: str) -> App:
    if name.startswith("app_"):
        return generated(int(name.removeprefix("app_"))).app
    raise AttributeError(name)
