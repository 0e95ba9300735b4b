"""Events as Arrow columns: the type of each field, refusals by name, and values that come back equal."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import itertools
import uuid
from datetime import UTC, timedelta
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import pyarrow as pa
from support import generated_contracts
from support.generated_contracts import Card, Cash, Colour, Level

from jetspark.app import Event
from jetspark.app.columns import EventColumns
from jetspark.app.contracts.catalogue import Contract
from jetspark.app.contracts.events import event
from jetspark.app.contracts.field_rules import Private, Timestamp
from jetspark.errors import ConfigError

NOW = datetime.datetime(2026, 3, 15, 10, 15, 30, 123456, tzinfo=UTC)
SOME_ID = uuid.UUID("00000000-0000-4000-8000-000000000001")
T = TypeVar("T")
OrderId = NewType("OrderId", str)


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"


class Page(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    next: T | None = None


@dataclasses.dataclass(frozen=True)
class Item:
    sku: str
    quantity: int = 1


class Size(NamedTuple):
    width: float
    height: float | None = None


class Address(TypedDict):
    street: str
    floor: NotRequired[int]


class Vague(TypedDict):
    floor: NotRequired[int | None]


class Tree(msgspec.Struct, frozen=True):
    children: list[Tree]


class Loud(msgspec.Struct, frozen=True):
    name: str
    NAME: str


@dataclasses.dataclass
class Computed:
    total: int = dataclasses.field(init=False, default=0)


class First(msgspec.Struct, frozen=True, tag="same"):
    pass


class Second(msgspec.Struct, frozen=True, tag="SAME"):
    pass


def columns_of(**fields: Any) -> EventColumns:
    """Of an event with these fields: types, or pairs of a type and a default."""
    listed = [(name, *given) if isinstance(given, tuple) else (name, given) for name, given in fields.items()]
    kind = msgspec.defstruct("Made", listed, frozen=True, kw_only=True)
    return EventColumns(Contract(kind, type="made", version=1, key=None, subject="made"))


def batch_of(columns: EventColumns, events: list[Any]) -> Any:
    rows = columns.to_arrow(events)
    assert rows.faults == {}
    batch = pa.RecordBatch.from_arrays(rows.arrays, schema=columns.schema)
    batch.validate(full=True)
    return batch


def element(kind: Any, nullable: bool = False) -> Any:
    return pa.list_(pa.field("element", kind, nullable))


def record(**fields: Any) -> Any:
    return pa.struct(list(fields.items()))


TYPES: list[tuple[Any, Any, bool, list[Any]]] = [
    (str, pa.string(), False, ["", "ä\0"]),
    (OrderId, pa.string(), False, ["o-1"]),
    (Private[str], pa.string(), False, ["x"]),
    (Annotated[int, msgspec.Meta(ge=0)], pa.int64(), False, [0, 2**63 - 1]),
    (int, pa.int64(), False, [-(2**63)]),
    (float, pa.float64(), False, [0.1, -0.0, 5e-324, 1.7976931348623157e308]),
    (bool, pa.bool_(), False, [True, False]),
    (bytes, pa.binary(), False, [b"", b"\xff\0"]),
    (bytearray, pa.binary(), False, [bytearray(b"x")]),
    (Timestamp, pa.timestamp("us", "UTC"), False, [NOW, NOW.astimezone(datetime.timezone(timedelta(hours=-5)))]),
    (datetime.date, pa.date32(), False, [datetime.date.min, datetime.date.max]),
    (datetime.time, pa.string(), False, [datetime.time(1, 2, 3, 4), datetime.time(23, tzinfo=UTC)]),
    (timedelta, pa.duration("us"), False, [timedelta(days=-1, microseconds=1)]),
    (Decimal, pa.decimal128(38, 18), False, [Decimal("12345678901234567890.123456789012345678"), Decimal("1E+3")]),
    (uuid.UUID, pa.string(), False, [SOME_ID]),
    (Colour, pa.string(), False, [Colour.RED]),
    (Level, pa.int64(), False, [Level.HIGH]),
    (Literal["a", "b"], pa.string(), False, ["a"]),
    (Literal[1, 2], pa.int64(), False, [2]),
    (Literal["a", None], pa.string(), True, ["a", None]),
    (str | None, pa.string(), True, ["a", None]),
    (int | msgspec.UnsetType, pa.int64(), True, [1, msgspec.UNSET]),
    (Any, pa.string(), True, [None, 1, {"a": [None, 2.5, "x"]}]),
    (msgspec.Raw, pa.string(), False, [msgspec.Raw(b'{"a": 1}')]),
    (list[int], element(pa.int64()), False, [[], [1, 2]]),
    (list, element(pa.string(), True), False, [[1, None, "x"]]),
    (list[int | None], element(pa.int64(), True), False, [[1, None]]),
    (list[list[str]], element(element(pa.string())), False, [[], [[]], [["a"], [], ["b", "c"]]]),
    (collections.abc.Sequence[int], element(pa.int64()), False, [[1]]),
    (tuple[int, ...], element(pa.int64()), False, [(), (1, 2)]),
    (set[str], element(pa.string()), False, [set(), {"b", "a"}]),
    (frozenset[int], element(pa.int64()), False, [frozenset({3, 1})]),
    (tuple[int, str | None], record(_1=pa.int64(), _2=pa.string()), False, [(1, None), (2, "x")]),
    (dict[str, int], pa.map_(pa.string(), pa.field("value", pa.int64(), False)), False, [{}, {"b": 1, "a": 2}]),
    (dict, pa.map_(pa.string(), pa.field("value", pa.string(), True)), False, [{"a": [1], "b": None}]),
    (dict[uuid.UUID, bool | None], pa.map_(pa.string(), pa.bool_()), False, [{SOME_ID: None}]),
    (Item, record(sku=pa.string(), quantity=pa.int64()), False, [Item("a", 2)]),
    (list[Item] | None, element(record(sku=pa.string(), quantity=pa.int64())), True, [None, [], [Item("a")]]),
    (Size, record(width=pa.float64(), height=pa.float64()), False, [Size(1.5), Size(1.0, 2.0)]),
    (Address, record(street=pa.string(), floor=pa.int64()), False, [{"street": "x"}, {"street": "y", "floor": 0}]),
    (Card | None, record(number=pa.string(), expiry=pa.date32()), True, [None, Card("1"), Card("2", NOW.date())]),
    (Cash, record(_present=pa.bool_()), False, [Cash()]),
    (
        Card | Cash,
        record(card=record(number=pa.string(), expiry=pa.date32()), cash=record(_present=pa.bool_())),
        False,
        [Card("1"), Cash()],
    ),
    (int | str | None, record(int=pa.int64(), str=pa.string()), True, [1, "1", None]),
    (int | float, record(int=pa.int64(), float=pa.float64()), False, [2**53 + 1, 1.0]),
    (Literal["a", 1], record(str=pa.string(), int=pa.int64()), False, ["a", 1]),
    (Page[int], record(items=element(pa.int64()), next=pa.int64()), False, [Page([1], 2), Page([])]),
]


@pytest.mark.parametrize(("annotation", "arrow", "nullable", "values"), TYPES, ids=[str(each[0]) for each in TYPES])
def test_each_type_has_its_column_and_values_come_back_equal(
    annotation: Any, arrow: Any, nullable: bool, values: list[Any]
) -> None:
    has_default = msgspec.UNSET in values
    columns = columns_of(field=(annotation, msgspec.UNSET) if has_default else annotation)
    assert columns.schema == pa.schema([pa.field("field", arrow, nullable)])
    events = [columns.contract.kind(field=value) for value in values]
    read = [columns.contract.decode(columns.contract.encode(each)) for each in events]
    batch = batch_of(columns, read)
    columns.check(batch.schema)
    assert columns.from_arrow(batch) == (read, {})
    # A part of a batch has offsets of its own.
    assert columns.from_arrow(batch.slice(1)) == (read[1:], {})


def test_spark_has_the_same_schema() -> None:
    types = pytest.importorskip("pyspark.sql.pandas.types")
    given = {f"f{number}": (each[0], None) for number, each in enumerate(TYPES)}
    columns = columns_of(**given)
    assert types.to_arrow_schema(types.from_arrow_schema(columns.schema), timezone="UTC") == columns.schema


def test_a_time_comes_back_in_utc_and_a_decimal_without_the_zeros_of_its_column() -> None:
    columns = columns_of(at=Timestamp, price=Decimal)
    at = NOW.astimezone(datetime.timezone(timedelta(hours=5)))
    events = [columns.contract.kind(at=at, price=Decimal(text)) for text in ("1.50", "100", "0E-30", "-7E+18")]
    found = columns.from_arrow(batch_of(columns, events)).events
    assert [each.at.tzinfo for each in found] == [UTC] * 4
    assert [str(each.price) for each in found] == ["1.5", "100", "0", "-7000000000000000000"]


def test_sets_are_written_in_one_order() -> None:
    columns = columns_of(tags=set[str])
    found = {
        tuple(batch_of(columns, [columns.contract.kind(tags=set(each))]).to_pylist()[0]["tags"])
        for each in itertools.permutations(["x", "Y", "z1", "a"])
    }
    assert found == {("Y", "a", "x", "z1")}


REFUSED: list[tuple[Any, str]] = [
    (None, "Made.field: it has no values but None"),
    (Tree, r"Made.field.children\[\]: Tree contains itself.*declare the field as Any"),
    (Mixed, "the values of Mixed are not all str, and not all int"),
    (complex, "complex has no column type; docs/spark-events.md"),
    (int | None | msgspec.UnsetType, "both None and UNSET would be null"),
    (list[Vague], r"Made.field\[\].floor: both None and a missing key would be null"),
    (dict[str | None, int], r"Made.field: expected keys of one type"),
    (dict[tuple[int, int], int], "expected keys of one type"),
    (First | Second, "two of its types are called 'SAME'"),
    (list[int] | list[str], "two of its types are called 'list'"),
    (list[int] | collections.abc.Sequence[str], "both 'list' and 'Sequence' have values of list"),
    (Loud, "Made.field.NAME: another field differs from it in upper and lower case only"),
    (Computed, "Made.field.total: a field with init=False"),
    (dict[str, list[T]], r"Made.field\[\]\[\]: T has no column type"),  # type: ignore[valid-type]
]


@pytest.mark.parametrize(("annotation", "message"), REFUSED, ids=[str(each[0]) for each in REFUSED])
def test_a_type_without_a_column_is_refused_with_its_path(annotation: Any, message: str) -> None:
    # Not through Contract, which refuses some of them by itself.
    with pytest.raises(ConfigError, match=message):
        columns_of(good=int, field=annotation)


def test_a_field_with_the_name_of_another_column_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Made\._event: this column says of an event what is not in its fields"):
        columns_of(_event=int)


FAULTS: list[tuple[Any, Any, Any, str]] = [
    (int, 1, 2**63, r"field 'field': 9223372036854775808 does not fit int64"),
    (list[Item], [Item("a")], [Item("a"), Item("b", 2**64)], r"field 'field\[\].quantity': 1844674407370955"),
    (Decimal, Decimal(1), Decimal("1E-19"), "does not fit decimal128.*data loss"),
    (Decimal, Decimal(1), Decimal("1E+20"), "does not fit decimal128"),
    (Decimal, Decimal(1), Decimal("Infinity"), "does not fit decimal128"),
    (timedelta, timedelta(), timedelta.max, "does not fit duration"),
    (Timestamp, NOW, datetime.datetime.min.replace(tzinfo=datetime.timezone(timedelta(hours=1))), "date value out"),
    (Any, 1, object(), "is not JSON"),
    (int | str, 1, 1.5, "1.5 does not fit struct<.*expected one of int, str"),
]


@pytest.mark.parametrize(("annotation", "good", "bad", "message"), FAULTS, ids=[each[3] for each in FAULTS])
def test_a_value_that_does_not_fit_is_a_fault_of_its_row(annotation: Any, good: Any, bad: Any, message: str) -> None:
    columns = columns_of(field=annotation, other=str)
    events = [columns.contract.kind(field=bad if row in (1, 5) else good, other="x") for row in range(7)]
    found = columns.to_arrow(events)
    assert sorted(found.faults) == [1, 5]
    for fault in found.faults.values():
        with pytest.raises(ValueError, match=message):
            raise fault
    assert [array.is_null().to_pylist() for array in found.arrays] == [[row in (1, 5) for row in range(7)]] * 2
    structs = columns.to_struct(events)
    assert sorted(structs.faults) == [1, 5]
    assert structs.arrays[0].is_null().to_pylist() == [row in (1, 5) for row in range(7)]


READ_FAULTS: list[tuple[Any, list[Any], str]] = [
    (str, ["a", None], "field 'field': null, and a value is required"),
    (uuid.UUID, [str(SOME_ID), "x"], "field 'field': 'x' is not UUID"),
    (Colour, ["red", "green"], "'green' is not Colour"),
    (list[Item], [[], [{"sku": None, "quantity": 1}]], r"field 'field\[\].sku': null"),
    (list[int], [[1], [None]], r"field 'field\[\]': null"),
    (dict[str, int], [[("a", 1)], [("a", None)]], r"field 'field\[\]': null"),
    (dict[str, int], [[("a", 1)], [("a", 1), ("a", 2)]], "key 'a' is there twice"),
    (Any, ["1", "{"], "'{' is not JSON"),
    (int | str, [{"int": 1, "str": None}, {"int": 1, "str": "x"}], "2 of int, str are there: expected one"),
    (int | str, [{"int": 1, "str": None}, {"int": None, "str": None}], "0 of int, str are there: expected one"),
]


@pytest.mark.parametrize(("annotation", "cells", "message"), READ_FAULTS, ids=[each[2] for each in READ_FAULTS])
def test_a_cell_that_is_no_value_is_a_fault_of_its_row(annotation: Any, cells: list[Any], message: str) -> None:
    columns = columns_of(field=annotation)
    loose = pa.schema([_all_nullable(field) for field in columns.schema])
    found = columns.from_arrow(pa.RecordBatch.from_pylist([{"field": each} for each in cells], schema=loose))
    assert list(found.faults) == [1]
    assert found.events[0] is not None
    assert found.events[1] is None
    with pytest.raises(ValueError, match=message):
        raise found.faults[1]


def _all_nullable(field: Any) -> Any:
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_all_nullable(each) for each in kind])
    elif pa.types.is_list(kind):
        kind = pa.list_(_all_nullable(kind.value_field))
    elif pa.types.is_map(kind):
        kind = pa.map_(kind.key_field, _all_nullable(kind.item_field))
    return pa.field(field.name, kind, True)


class Positive(Event, type="positive", subject="positive"):
    number: int
    unit: str = "EUR"
    note: str | None = None

    def __post_init__(self) -> None:
        if self.number < 0:
            raise RuntimeError("below zero")


def test_code_of_the_class_that_raises_is_a_fault_of_its_row() -> None:
    columns = EventColumns(Positive.__contract__)
    found = columns.from_arrow(pa.RecordBatch.from_pylist([{"number": 1}, {"number": -1}]))
    assert found.events == [Positive(number=1), None]
    assert str(found.faults[1]) == "RuntimeError: below zero"


def test_columns_are_found_by_name_and_converted_without_loss() -> None:
    columns = EventColumns(Positive.__contract__)
    given = pa.RecordBatch.from_pydict(
        {
            "note": pa.nulls(2),
            "_event": pa.array([1, 2]),
            "number": pa.array([7, 8], pa.int16()),
            "unit": pa.array(["USD", "CHF"], pa.large_string()),
        }
    )
    columns.check(given.schema)
    expected = [Positive(number=7, unit="USD"), Positive(number=8, unit="CHF")]
    assert columns.from_arrow(given) == (expected, {})
    decimals = pa.RecordBatch.from_pydict({"number": pa.array([Decimal("1.0"), Decimal("1.5")])})
    columns.check(decimals.schema)
    assert list(columns.from_arrow(decimals).faults) == [1]  # and not 1


CHECKS: list[tuple[dict[str, Any], str]] = [
    ({"unit": pa.string()}, "Positive.number: required, and not there; expected int64"),
    ({"number": pa.string()}, "Positive.number: expected int64, got string"),
    ({"number": pa.bool_()}, "Positive.number: expected int64, got bool"),
    ({"number": pa.timestamp("us")}, "expected int64, got timestamp"),
    ({"number": pa.int64(), "units": pa.string()}, "Positive.units: not a field; fields are note, number, unit"),
    ({"number": pa.int64(), "unit": pa.binary()}, "Positive.unit: expected string, got binary"),
]


@pytest.mark.parametrize(("given", "message"), CHECKS, ids=[each[1] for each in CHECKS])
def test_columns_that_are_not_those_of_the_event_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EventColumns(Positive.__contract__).check(pa.schema(given))
    EventColumns(Positive.__contract__).check(pa.schema({"number": pa.int64(), "id": pa.string()}), beside=["id"])


def test_a_time_without_a_zone_is_refused() -> None:
    columns = columns_of(at=Timestamp, items=list[Item])
    items = columns.schema.field("items").type
    for naive in (pa.timestamp("us"), pa.date32()):
        with pytest.raises(ConfigError, match=r"Made\.at: expected a timestamp with a time zone"):
            columns.check(pa.schema({"at": naive, "items": items}))
    columns.check(pa.schema({"at": pa.timestamp("ns", "Europe/Berlin"), "items": items}))
    wrong = element(record(sku=pa.string(), colour=pa.string()))
    with pytest.raises(ConfigError, match=r"Made.items\[\].colour: not a field"):
        columns.check(pa.schema({"at": pa.timestamp("us", "UTC"), "items": wrong}))


# ---- pydantic --------------------------------------------------------------------------------------------------------


def test_pydantic_models_are_events_too() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Left(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        kind: Literal["left"] = "left"
        x: int

    class Right(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        kind: Literal["right"] = "right"
        inner: list[Left]

    # The annotations are objects here, in spite of the __future__ import: pydantic could not find local classes.
    kind = pydantic.create_model(
        "Turned",
        __config__={"frozen": True},
        order_id=(str, pydantic.Field(alias="orderId", min_length=1)),
        at=(pydantic.AwareDatetime, ...),
        to=(Annotated[Left | Right, pydantic.Field(discriminator="kind")], ...),
        tags=(set[str], ...),
        price=(Decimal | None, None),
    )
    made = event(type="turned", subject="turned")(kind)
    columns = EventColumns(made.__contract__)
    left = record(kind=pa.string(), x=pa.int64())
    assert columns.schema.field("to").type == record(Left=left, Right=record(kind=pa.string(), inner=element(left)))
    data = {"orderId": "o", "at": NOW, "tags": ["b", "a"], "price": "1.50"}
    events = [
        made.model_validate(data | {"to": {"kind": "left", "x": 1}}),
        made.model_validate(data | {"to": {"kind": "right", "inner": [{"x": 2}]}, "price": None}),
    ]
    assert columns.from_arrow(batch_of(columns, events)) == (events, {})

    class Open(pydantic.BaseModel, extra="allow"):  # type: ignore[name-defined,misc,call-arg]
        x: int

    with pytest.raises(ConfigError, match="Open: Open allows extra fields"):
        EventColumns(event(type="open", subject="open")(Open).__contract__)


# ---- generated contracts ---------------------------------------------------------------------------------------------


@given(st.data())
def test_events_of_any_contract_come_back_equal(data: st.DataObject) -> None:
    parts = data.draw(st.lists(generated_contracts.TYPES, min_size=1, max_size=5))
    columns = columns_of(**{f"f{number}": part[0] for number, part in enumerate(parts)})
    values = st.builds(columns.contract.kind, **{f"f{number}": part[1] for number, part in enumerate(parts)})
    events = data.draw(st.lists(values, max_size=5))
    read = [columns.contract.decode(columns.contract.encode(each)) for each in events]
    found = columns.from_arrow(batch_of(columns, read))
    assert found.faults == {}
    assert found.events == read == events
