"""What an event class may be. The classes are defined in functions where the definition itself is the test."""

import datetime
import enum
import gc
import pickle
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pytest
from pydantic import AwareDatetime, BaseModel, Field, PrivateAttr

from jetspark.app import Catalogue, Event, Measure, Private, Timestamp, contract_of, event, upcast
from jetspark.errors import ConfigError, InvalidEvent, InvalidSubject

# Classes that are made, not written: their metaclass, whose keywords mypy does not know.
EVENT_META: Any = type(Event)


class OrderPaid(Event, type="order.paid", version=2, key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    amount_cents: int
    currency: str = "EUR"


class Base(Event):
    tenant: str


class Placed(Base, type="order.placed", key="{tenant}.{order_id}"):
    order_id: str


def test_a_class_says_what_its_events_are() -> None:
    assert (OrderPaid.event_type, OrderPaid.event_version) == ("order.paid", 2)
    contract = contract_of(OrderPaid)
    paid = OrderPaid(order_id="o-1", amount_cents=500)
    assert contract_of(paid) is contract
    assert contract.key_of(paid) == "o-1"
    assert contract.subject.format(paid) == "orders.o-1.paid"
    assert paid == OrderPaid(order_id="o-1", amount_cents=500, currency="EUR")
    assert pickle.loads(pickle.dumps(paid)) == paid
    assert repr(contract) == "<Contract order.paid version 2: OrderPaid>"


def test_an_event_is_a_fact_and_does_not_change() -> None:
    paid = OrderPaid(order_id="o-1", amount_cents=500)
    with pytest.raises(AttributeError, match="immutable"):
        paid.amount_cents = 5  # type: ignore[misc]
    for option in ("frozen", "kw_only"):
        with pytest.raises(ConfigError, match="an event is a fact"):
            _define({option: False}, a=str)


def test_the_data_of_an_event_is_an_object() -> None:
    with pytest.raises(ConfigError, match="array_like=True: the data of an event is an object"):
        _define({"array_like": True}, a=str)


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        OrderPaid("o-1", 500)  # type: ignore[call-arg]


def test_a_base_class_has_fields_and_no_type() -> None:
    with pytest.raises(ConfigError, match="Base is not an event type"):
        contract_of(Base)
    placed = Placed(tenant="a.b", order_id="o-1")
    assert contract_of(placed).key_of(placed) == "a=2Eb.o-1"
    assert contract_of(placed).subject.text == "order.placed"


def test_a_subclass_does_not_inherit_the_contract() -> None:
    class Special(OrderPaid):
        note: str = ""

    with pytest.raises(ConfigError, match="Special is not an event type"):
        contract_of(Special)
    with pytest.raises(ConfigError, match="Special is not an event type"):
        Catalogue(OrderPaid, Special)
    with pytest.raises(ConfigError, match="int is not an event type"):
        contract_of(3)


class Counted(Event, type="item.counted", key="number", subject="items.{number}.counted"):
    number: int


class Moved(Event, type="item.moved", key="{tenant}.{number}", subject="items.{number}.moved.{tenant}"):
    tenant: str
    number: int


def test_a_key_is_text_whatever_type_its_field_has() -> None:
    assert contract_of(Counted).key_of(Counted(number=7)) == "7"


@pytest.mark.parametrize(
    "event", [OrderPaid(order_id="o.1", amount_cents=5), Counted(number=7), Moved(tenant="a.b", number=7)]
)
def test_a_subject_tells_the_key_of_its_event(event: Any) -> None:
    contract = contract_of(event)
    key = contract.key_of(event)
    assert key is not None
    assert contract.key_in(contract.subject.format(event)) == key
    assert contract.key_in("somewhere.else") is None


def test_a_subject_without_all_of_the_key_tells_none() -> None:
    class Shelved(Event, type="item.shelved", key="{tenant}.{number}", subject="items.{number}.shelved"):
        tenant: str
        number: int

    class Weighed(Event, type="item.weighed", key="number"):
        number: int

    class Lost(Event, type="item.lost", subject="items.{number}.lost"):
        number: int

    assert contract_of(Shelved).key_in("items.7.shelved") is None
    assert contract_of(Weighed).key_in("item.weighed") is None
    assert contract_of(Lost).key_in("items.7.lost") is None


def _define(keywords: dict[str, Any] | None = None, **fields: Any) -> type[Event]:
    namespace = {"__annotations__": fields, "__module__": __name__}
    defined: type[Event] = EVENT_META("Defined", (Event,), namespace, **{"type": "a.b", **(keywords or {})})
    return defined


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"type": ""}, "type='': expected names of letters"),
        ({"type": "a b"}, "expected names of letters"),
        ({"key": ""}, "key='': expected a field's name"),
        ({"key": 5}, "key=5: expected a field's name"),
        ({"subject": 5}, "subject=5: expected a text such as"),
        ({"type": "a..b"}, "expected names of letters"),
        ({"version": 0}, "version=0: expected a whole number, 1 or more"),
        ({"version": True}, "expected a whole number"),
        ({"version": "1"}, "expected a whole number"),
        ({"key": "nobody"}, "key='{nobody}' names 'nobody', which is not a field; fields are: name, number"),
        ({"subject": "a.{nobody}"}, "subject='a.{nobody}' names 'nobody', which is not a field"),
        ({"type": None, "version": 2}, "write type=... as well"),
        ({"type": None, "key": "name"}, "write type=... as well"),
    ],
)
def test_a_keyword_that_cannot_be_is_refused(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("{", r"\{").replace("}", r"\}")):
        _define(keywords, name=str, number=int)


def test_a_subject_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidSubject):
        _define({"subject": "orders.*"}, name=str)


class Size(enum.Enum):
    SMALL = "small"


Name = Annotated[str, msgspec.Meta(min_length=1)]


@pytest.mark.parametrize(
    "kind", [str, int, bool, uuid.UUID, datetime.date, Size, Literal["a", 1], str | int, Name, Name | int]
)
def test_a_field_with_one_spelling_may_be_a_key(kind: Any) -> None:
    _define({"key": "name"}, name=kind)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (float, "float"),
        (bytes, "bytes"),
        (list[str], "list"),
        (str | None, "None"),
        (Timestamp, "datetime"),
        (Decimal, "Decimal"),
        (Literal[None], "Literal"),
    ],
)
def test_a_field_without_one_spelling_may_not_be_a_key(kind: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"Defined.name: key='\{{name\}}' uses it, so it needs .* and not {shown}$"):
        _define({"key": "name"}, name=kind)


@pytest.mark.parametrize("name", ["event_id", "event_type", "event_version"])
def test_a_field_may_not_have_a_name_of_event_itself(name: str) -> None:
    with pytest.raises(ConfigError, match="belongs to Event itself"):
        _define(None, **{name: str})


# ---- money and time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["amount", "unit_price", "totalCost", "price_eur", "AmountDue", "tax", "VAT", "fee", "paid", "sum_usd"]
)
def test_money_is_no_float(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Defined.{name}: float, and '\w+' means money.*{name}_cents: int"):
        _define(None, **{name: float})


@pytest.mark.parametrize(
    "name",
    [
        "amounts",
        "totals",
        "costs",
        "payments",
        "charges",
        "taxes",
        "wages",
        "fees",
        "prices",
        "expenses",
        "balances",
        "bills",
        "salaries",
        "penalties",
        "currencies",
        "invoices",
        "dues",
        "dollars",
        "dollar",
        "euros",
        "euro",
        "cents",
        "pence",
        "earnings",
        "lineTotals",
        "TotalTaxes",
        "unit_prices_eur",
    ],
)
def test_money_in_the_plural_is_no_float_either(name: str) -> None:
    for kind in (float, list[float], dict[str, float]):
        with pytest.raises(ConfigError, match="means money"):
            _define(None, **{name: kind})


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "weight_kg",
        "paths",
        "sumatra",
        "taxonomy",
        "coffee",
        "feet",
        "taxis",
        "finest",
        "series",
        "es",
        "s",
    ],
)
def test_a_float_that_is_not_money_is_fine(name: str) -> None:
    _define(None, **{name: float})


class Line(msgspec.Struct):
    price: float


@dataclass
class Row:
    price: float


class Entry(TypedDict):
    price: float


class Pair(NamedTuple):
    price: float


class Model(BaseModel):
    price: float


@pytest.mark.parametrize(
    "kind",
    [
        float | None,
        list[float],
        dict[str, float],
        tuple[float, ...],
        Annotated[float, msgspec.Meta(ge=0)],
        Private[float],
    ],
)
def test_money_is_no_float_inside_of_another_type_either(kind: Any) -> None:
    with pytest.raises(ConfigError, match="means money"):
        _define(None, price=kind)


@pytest.mark.parametrize("kind", [Line, list[Line], Row, Entry, Pair, dict[str, Row | None]])
def test_money_is_no_float_in_a_nested_class_either(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"Defined.items.price: float"):
        _define(None, items=kind)


def test_a_measure_may_have_any_name_and_money_may_be_exact() -> None:
    kind = _define(None, total_weight=Measure[float], price=Decimal, amount_cents=int)
    assert msgspec.json.schema(kind)["$defs"]["Defined"]["properties"]["total_weight"]["x-measure"] is True


@pytest.mark.parametrize(
    "kind",
    [
        datetime.datetime,
        datetime.datetime | None,
        list[datetime.datetime],
        Annotated[datetime.datetime, msgspec.Meta(description="when it was paid")],
        Annotated[datetime.datetime, "a note"],
    ],
)
def test_a_time_needs_its_zone(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"Defined.at: datetime without a time zone .* use at: Timestamp"):
        _define(None, at=kind)


def test_a_time_with_its_zone_is_fine() -> None:
    _define(None, at=Timestamp, until=Timestamp | None, day=datetime.date, hour=datetime.time)


class Node(Event, type="tree.node"):
    name: str
    children: "list[Node]" = []


def test_a_class_may_contain_itself() -> None:
    contract = contract_of(Node)
    node = Node(name="a", children=[Node(name="b")])
    assert contract.decode(contract.encode(node)) == node


class Early(Event, type="early"):
    later: "Later"


class Later(msgspec.Struct):
    price: float


def test_a_class_that_is_defined_later_is_checked_at_the_first_use() -> None:
    with pytest.raises(ConfigError, match=r"Early.later.price: float"):
        contract_of(Early).decode(b"{}")
    with pytest.raises(ConfigError, match=r"Early.later.price: float"):
        contract_of(Early).convert({"later": {"price": 0.1}})
    with pytest.raises(ConfigError, match=r"Early.later.price: float"):
        Catalogue(Early).check()


# ---- private data ----------------------------------------------------------------------------------------------------


class Signed(Event, type="user.signed"):
    user_id: str
    email: Private[str]


def test_private_data_is_not_in_repr_and_is_named_in_the_schema() -> None:
    signed = Signed(user_id="u-1", email="a@example.org")
    assert repr(signed) == "Signed(user_id='u-1', email=...)"
    assert contract_of(Signed).decode(contract_of(Signed).encode(signed)) == signed
    assert msgspec.json.schema(Signed)["$defs"]["Signed"]["properties"]["email"]["x-private"] is True


class Vague(Event, type="vague"):
    email: "Private[Unknown]"  # type: ignore[name-defined]  # noqa: F821


def test_what_cannot_be_known_to_be_public_is_not_in_repr() -> None:
    assert repr(Vague(email="a@example.org")) == "Vague(email=...)"


# ---- strict on writing -----------------------------------------------------------------------------------------------


class Reading(Event, type="sensor.reading"):
    level: Annotated[int, msgspec.Meta(ge=0)] = 0
    value: float | None = None
    words: list[str] = []
    at: Timestamp | None = None


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        ({"level": "1"}, "level", "Expected int, got str"),
        ({"level": True}, "level", "Expected int, got bool"),
        ({"level": -1}, "level", "Expected int >= 0"),
        ({"value": float("nan")}, "value", "nan would be read back as None"),
        ({"value": float("inf")}, "value", "inf would be read back as None"),
        ({"words": ("a",)}, "words", "would be read back as"),
        ({"words": [1]}, "words[0]", "Expected str, got int"),
        ({"words": ["\ud800"]}, "", "surrogates not allowed"),
        ({"at": datetime.datetime(2026, 3, 31)}, "at", "timezone"),
        ({"level": object()}, "", "object"),
    ],
)
def test_what_is_not_read_back_equal_is_not_written(fields: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidEvent) as caught:
        contract_of(Reading).encode(Reading(**fields))
    assert caught.value.field == field
    assert rule in caught.value.rule
    assert (caught.value.event_type, caught.value.version) == ("sensor.reading", 1)


def test_what_is_read_back_equal_is_written() -> None:
    at = datetime.datetime(2026, 3, 31, 10, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    reading = Reading(level=2**60, value=1, words=["é"], at=at)
    contract = contract_of(Reading)
    assert contract.decode(contract.encode(reading)) == reading


# ---- tolerant on reading ---------------------------------------------------------------------------------------------


def test_unknown_fields_are_ignored_and_missing_ones_defaulted() -> None:
    read = contract_of(OrderPaid).decode(b'{"order_id":"o-1","amount_cents":5,"new":{"deep":[1]}}')
    assert read == OrderPaid(order_id="o-1", amount_cents=5, currency="EUR")


# ---- upcasts ---------------------------------------------------------------------------------------------------------


def _third() -> type[Event]:
    return _define({"version": 3}, name=str)


def test_upcasts_are_checked_for_duplicates_and_versions() -> None:
    kind = _third()
    upcast(kind, from_version=1)(lambda old: old)
    with pytest.raises(ConfigError, match=r"from_version=1: both .*<lambda> and .*<lambda>; keep one"):
        upcast(kind, from_version=1)(lambda old: old)
    for version in (0, 3, "1"):
        with pytest.raises(ConfigError, match="its version is 3, so expected 1 to 2"):
            upcast(kind, from_version=version)(lambda old: old)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="version 1 has no older version"):
        upcast(_define(None, name=str), from_version=1)(lambda old: old)


def test_upcasts_are_checked_for_holes() -> None:
    kind = _third()
    upcast(kind, from_version=1)(lambda old: old)
    catalogue = Catalogue(kind)
    with pytest.raises(ConfigError, match=r"version 1 cannot be read, .* from version 2 to 3; write @upcast\(Defined"):
        catalogue.check()
    upcast(kind, from_version=2)(lambda old: old)
    catalogue.check()
    assert catalogue.versions("a.b") == [1, 2, 3]
    assert catalogue.versions("c") == []


# ---- the catalogue ---------------------------------------------------------------------------------------------------


def test_a_catalogue_knows_each_type_and_version_once() -> None:
    catalogue = Catalogue(OrderPaid)
    catalogue.add(OrderPaid, Placed)
    assert len(catalogue) == 2
    assert OrderPaid in catalogue
    assert Reading not in catalogue
    assert int not in catalogue
    assert [contract.type for contract in catalogue] == ["order.paid", "order.placed"]
    other = _define({"type": "order.paid", "version": 2}, name=str)
    with pytest.raises(ConfigError, match=r"'order.paid' version 2 is both .*OrderPaid and .*Defined; give one"):
        catalogue.add(other)
    assert other not in catalogue


def test_a_type_that_is_added_later_can_be_read() -> None:
    catalogue = Catalogue(OrderPaid)
    assert catalogue.versions("order.placed") == []
    catalogue.add(Placed)
    assert catalogue.versions("order.placed") == [1]


def test_the_newest_class_that_upcasts_lead_to_is_read() -> None:
    old, new = _define({"version": 1}, name=str), _define({"version": 2}, name=str)
    catalogue = Catalogue(new, old)
    assert catalogue.readings["a.b", 1].contract.kind is old
    upcast(new, from_version=1)(lambda data: data)
    catalogue.check()
    assert catalogue.readings["a.b", 1].contract.kind is new


# ---- pydantic --------------------------------------------------------------------------------------------------------


@event(type="order.shipped", version=2, key="order_id", subject="orders.{order_id}.shipped")
class OrderShipped(BaseModel, frozen=True):
    order_id: str
    parcels: int = 1
    at: AwareDatetime | None = None


def test_a_pydantic_model_can_be_an_event() -> None:
    contract = contract_of(OrderShipped)
    shipped = OrderShipped(order_id="o 1")
    assert contract.is_pydantic
    assert contract.subject.format(shipped) == "orders.o=201.shipped"
    assert contract.decode(contract.encode(shipped)) == shipped
    assert contract.decode(b'{"order_id":"o-1","new":1}') == OrderShipped(order_id="o-1")
    assert contract.convert({"order_id": "o-1"}) == OrderShipped(order_id="o-1")


def test_a_pydantic_model_with_a_value_that_is_not_allowed_is_not_written() -> None:
    with pytest.raises(InvalidEvent) as caught:
        contract_of(OrderShipped).encode(OrderShipped.model_construct(order_id="o-1", parcels="many"))
    assert caught.value.field == "parcels"


@event(type="order.returned")
class OrderReturned(BaseModel):
    order_id: str = Field(alias="orderId")
    _seen_by: str = PrivateAttr("nobody")


def test_a_pydantic_model_is_written_under_the_names_it_is_read_by() -> None:
    contract = contract_of(OrderReturned)
    assert contract.encode(OrderReturned(orderId="o-1")) == b'{"orderId":"o-1"}'


def test_a_pydantic_model_with_a_value_outside_of_its_fields_is_not_written() -> None:
    returned = OrderReturned(orderId="o-1")
    returned._seen_by = "me"
    with pytest.raises(InvalidEvent) as caught:
        contract_of(OrderReturned).encode(returned)
    assert (caught.value.field, caught.value.rule) == ("", f"{returned!r} would be read back as {returned!r}")


def test_a_pydantic_model_keeps_the_same_rules() -> None:
    class Bad(BaseModel):
        price: float

    with pytest.raises(ConfigError, match=r"Bad.price: float"):
        event(type="bad")(Bad)

    class Naive(BaseModel):
        at: Timestamp

    with pytest.raises(ConfigError, match=r"Naive.at: .*use at: pydantic.AwareDatetime"):
        event(type="bad")(Naive)
    with pytest.raises(ConfigError, match="OrderPaid is not a pydantic model"):
        event(type="bad")(OrderPaid)
    with pytest.raises(ConfigError, match="names 'nobody', which is not a field"):
        event(type="bad", key="nobody")(type("Model", (BaseModel,), {"__module__": __name__}))


def test_the_garbage_collector_has_nothing_to_do_with_events() -> None:
    class Plain(Event, type="gc.plain"):
        tags: list[str]

    class Watched(Event, type="gc.watched", gc=True):
        tags: list[str]

    assert not gc.is_tracked(Plain(tags=["a"]))
    assert gc.is_tracked(Watched(tags=["a"]))
