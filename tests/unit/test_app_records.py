"""What is recorded of contracts, and what later code does not keep of it."""

import datetime
import enum
import json
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

from jetspark.app import Catalogue, Event, Private, Timestamp, contract_of, decode, event, unchanged, upcast
from jetspark.app.contracts.contract_records import Finding, Record, check_records, read_record, record_of
from jetspark.app.contracts.samples import samples
from jetspark.app.contracts.schemas import differences, document, write
from jetspark.errors import ConfigError

# Classes that are made, not written: their metaclass, whose keywords mypy does not know.
EVENT_META: Any = type(Event)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(msgspec.Struct, tag="cat"):
    lives: Annotated[int, msgspec.Meta(ge=1, le=9)]


class Dog(msgspec.Struct, tag="dog"):
    name: str


class Tree(msgspec.Struct):
    name: str
    children: "list[Tree]" = []
    parent: "Tree | None" = None


class Everything(Event, type="every.thing", key="name"):
    name: str
    code: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]
    long: Annotated[str, msgspec.Meta(min_length=3, max_length=4)]
    odd: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$", examples=["0" * 40])]
    low: Annotated[int, msgspec.Meta(ge=5)]
    high: Annotated[int, msgspec.Meta(lt=5)]
    even: Annotated[int, msgspec.Meta(multiple_of=2, gt=2, lt=10)]
    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)]
    at: Timestamp
    day: datetime.date
    hour: Annotated[datetime.time, msgspec.Meta(examples=["10:15:30"])]
    span: datetime.timedelta
    id: uuid.UUID
    price: Decimal
    raw: bytes
    color: Color
    size: Literal["s", "m"]
    pair: tuple[int, str]
    numbers: set[int]
    some: Annotated[list[str], msgspec.Meta(min_length=2)]
    counts: dict[str, int]
    pet: Cat | Dog
    tree: Tree
    flag: bool
    maybe: str | None
    anything: Any
    note: Private[str] = ""
    more: list[Cat] = []


@event(type="py.dantic")
class Model(BaseModel, frozen=True):
    name: str
    parcels: int = Field(default=1, ge=1, le=3)
    note: str | None = None


@pytest.mark.parametrize("kind", [Everything, Model])
def test_the_smallest_and_the_largest_example_are_events(kind: type) -> None:
    record = record_of(contract_of(kind), "/test")
    assert list(record.examples) == ["smallest", "largest"]
    for example in record.examples.values():
        decode("a", json.dumps(example).encode(), None, Catalogue(kind))
    assert read_record(record.write(), "here") == record
    assert record_of(contract_of(kind), "/test").write() == record.write()


class Shipped(Event, type="order.shipped", version=2):
    town: Literal["Zürich"]


def test_a_record_has_the_same_bytes_every_time() -> None:
    record = record_of(contract_of(Shipped), "/test")
    assert record.name == "order.shipped.2"
    written = record.write().decode()
    assert written.startswith('{\n  "examples": {\n    "largest": {\n      "correlationid": "00000000-')
    assert '"data": {\n        "town": "Zürich"\n      },' in written
    assert written.endswith('  "type": "order.shipped",\n  "version": 2\n}\n')
    assert {each["time"] for each in record.examples.values()} == {"2026-03-15T10:15:30Z"}


class Marks(msgspec.Struct, frozen=True):
    numbers: frozenset[int] = frozenset()


def _with_sets(numbers: frozenset[int]) -> list[type]:
    """Events whose defaults have a set somewhere."""

    class Sets(Event, type="has.sets"):
        plain: frozenset[int] = numbers
        optional: frozenset[int] | None = numbers
        nested: Marks = Marks(numbers)
        pair: tuple[str, frozenset[int]] = ("a", numbers)
        many: tuple[frozenset[int], ...] = (numbers,)

    @event(type="has.sets")
    class Model(BaseModel, frozen=True):
        plain: frozenset[int] = numbers
        optional: frozenset[int] | None = numbers
        by_name: dict[str, frozenset[int]] = {"a": numbers}

    return [Sets, Model]


def test_a_default_that_is_a_set_is_the_same_in_every_order() -> None:
    """As two processes have it: the order of a set of texts is another one in each."""
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert (one == other, list(one) == list(other)) == (True, False)
    for kind, same in zip(_with_sets(one), _with_sets(other), strict=True):
        documents = [document(contract_of(each)) for each in (kind, same)]
        assert write(documents[0]) == write(documents[1])
        as_recorded_before = json.loads(json.dumps(documents[1]).replace("[0, 8]", "[8, 0]"))
        assert as_recorded_before != documents[0]
        assert differences(as_recorded_before, documents[0]) == []
    [more, _] = _with_sets(frozenset([0, 8, 9]))
    assert len(differences(document(contract_of(more)), document(contract_of(_with_sets(one)[0])))) == 5


def test_the_smallest_has_no_optional_field_and_the_largest_has_all() -> None:
    made = samples(document(contract_of(Everything)), "Everything")
    assert sorted(set(made["largest"]) - set(made["smallest"])) == ["more", "note"]
    assert (made["smallest"]["low"], made["smallest"]["even"], made["smallest"]["maybe"]) == (5, 4, None)
    assert (made["largest"]["high"], made["largest"]["even"], made["largest"]["maybe"]) == (4, 8, "xxxxx")
    assert made["largest"]["tree"] == {"name": "xxxxx", "children": [], "parent": None}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")], "no example can be made of pattern"),
        (Annotated[str, msgspec.Meta(extra_json_schema={"format": "moon"})], "no example can be made of format 'moon'"),
        (Annotated[str, msgspec.Meta(min_length=2, examples=["a"])], "the smallest example of its schema is refused"),
    ],
)
def test_a_field_that_needs_an_example_says_so(kind: Any, what: str) -> None:
    defined = EVENT_META("Hard", (Event,), {"__annotations__": {"digest": kind}, "__module__": __name__}, type="hard")
    with pytest.raises(ConfigError, match=rf"{what}.*Meta\(examples=\[...\]\)"):
        record_of(contract_of(defined), "/test")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"type":1}', b"\xff"])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="here: expected a contract as jetspark writes it"):
        read_record(data, "here")


# ---- the code of today -----------------------------------------------------------------------------------------------


def define(version: int = 1, type_: str = "order.paid", **fields: Any) -> Any:
    annotations = {name: value[0] if isinstance(value, tuple) else value for name, value in fields.items()}
    defaults = {name: value[1] for name, value in fields.items() if isinstance(value, tuple)}
    namespace = {"__annotations__": annotations, "__module__": __name__, **defaults}
    return EVENT_META(f"Paid{version}", (Event,), namespace, type=type_, version=version)


def records(*kinds: Any) -> dict[tuple[str, int], Record]:
    found = [record_of(contract_of(kind), "/test") for kind in kinds]
    return {(record.type, record.version): record for record in found}


def rules(findings: list[Finding]) -> list[tuple[int, str, str, str]]:
    return [(found.against, found.direction, found.rule, found.field) for found in findings]


FIRST = define(1, id=str, total_cents=int)


def test_what_is_recorded_and_unchanged_is_fine() -> None:
    assert check_records(Catalogue(FIRST), records(FIRST)) == []


def test_a_version_that_is_not_recorded_is_new_and_breaks_nobody() -> None:
    [found] = check_records(Catalogue(FIRST), {})
    assert not found.is_breaking
    assert str(found) == "order.paid version 1: this version is new (not_recorded)"


def test_a_recorded_version_never_changes() -> None:
    [found, *_] = check_records(Catalogue(define(1, id=str, total_cents=(int, 0))), records(FIRST))
    assert found.is_breaking
    assert (found.rule, found.field) == ("changed", "properties.total_cents.default")
    assert "make it version 2" in str(found)


def test_an_older_version_without_an_upcast_is_not_readable() -> None:
    new = define(2, id=str, total_cents=int)
    found = check_records(Catalogue(new), records(FIRST, new))
    assert rules(found) == [(1, "backward", "not_readable", "")]
    assert "this version is not known; known are 2" in str(found[0])


def test_upcasts_with_a_hole_are_an_error_before_anything_is_compared() -> None:
    third = define(3, id=str)
    upcast(third, from_version=1)(unchanged)
    with pytest.raises(ConfigError, match="no upcast leads from version 2 to 3"):
        check_records(Catalogue(third), {})


def test_an_upcast_is_tried_on_the_examples() -> None:
    new = define(2, order_id=str, amount_cents=int)
    upcast(new, from_version=1)(lambda old: {"order_id": old["id"], "amount_cents": old["total_cents"]})
    assert check_records(Catalogue(new), records(FIRST, new)) == []
    wrong = define(2, order_id=str, amount_cents=int)
    upcast(wrong, from_version=1)(lambda old: {"order_id": old["id"], "amount_cents": str(old["total_cents"])})
    found = check_records(Catalogue(wrong), records(FIRST, wrong))
    assert rules(found) == [(1, "backward", "not_readable", "amount_cents")]


def test_the_rules_for_schemas_decide_where_the_upcast_changes_nothing() -> None:
    new = define(2, id=str, total_cents=int, currency=(str, "EUR"))
    upcast(new, from_version=1)(unchanged)
    assert check_records(Catalogue(new), records(FIRST, new)) == []
    # Both examples of version 1 have no more than 9 characters, so only the rule finds it.
    narrow = define(2, id=Annotated[str, msgspec.Meta(max_length=9)], total_cents=int)
    upcast(narrow, from_version=1)(unchanged)
    found = check_records(Catalogue(narrow), records(FIRST, narrow))
    assert rules(found) == [(1, "backward", "bound_tightened", "id")]
    assert "order.paid version 2 backward with version 1, id: maxLength is 9 for the reader" in str(found[0])


def test_all_of_history_is_checked_unless_the_mode_says_the_last_version() -> None:
    second, third = define(2, id=str), define(3, id=str)
    upcast(third, from_version=2)(unchanged)
    known = records(FIRST, second, third)
    catalogue = Catalogue(third)
    assert rules(check_records(catalogue, known)) == [(1, "backward", "not_readable", "")]
    assert check_records(catalogue, known, "BACKWARD") == []
    assert check_records(catalogue, known, "NONE") == []


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_last_version_is_the_one_before_that_of_the_code(is_recorded: bool) -> None:
    second, third = define(2, id=str), define(3, id=str)
    known = records(FIRST, second, third) if is_recorded else records(FIRST, second)
    found = [each for each in check_records(Catalogue(third), known, "BACKWARD") if each.is_breaking]
    assert rules(found) == [(2, "backward", "not_readable", "")]


@pytest.mark.parametrize("mode", ["BACKWARD", "BACKWARD_TRANSITIVE"])
def test_a_version_that_is_newer_than_the_code_is_not_readable(mode: Any) -> None:
    known = records(FIRST, define(2, id=str))
    assert rules(check_records(Catalogue(FIRST), known, mode)) == [(2, "backward", "not_readable", "")]


def test_forward_asks_whether_old_readers_can_read_new_data() -> None:
    second = define(2, id=str)
    upcast(second, from_version=1)(unchanged)
    found = check_records(Catalogue(second), records(FIRST, second), "FULL")
    assert rules(found) == [(1, "forward", "required_field", "total_cents")]
    assert check_records(Catalogue(second), records(FIRST, second), "FORWARD_TRANSITIVE") == found
    assert check_records(Catalogue(second), records(FIRST, second), "BACKWARD") == []


def test_a_type_that_the_code_no_longer_knows_is_not_readable() -> None:
    found = check_records(Catalogue(), records(FIRST))
    assert rules(found) == [(1, "backward", "not_readable", "")]
    assert found[0].version == 0
    assert str(found[0]).startswith("order.paid version 1 backward")
    gone = records(FIRST, define(2, id=str))
    assert rules(check_records(Catalogue(), gone, "BACKWARD")) == [(2, "backward", "not_readable", "")]
