"""Each rule of compatibility, as a table: what changed, and who can still read whom."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.app import Event, Measure, Private, Timestamp, contract_of
from jetspark.app.contracts.compatibility import Incompatibility, check_mode, directions, older_to_check, unreadable
from jetspark.app.contracts.schemas import canonical, differences, document, resolve, write
from jetspark.errors import ConfigError

# Classes that are made, not written: their metaclass, whose keywords mypy does not know.
EVENT_META: Any = type(Event)


def obj(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


STRING, INTEGER, NUMBER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "null"}
ANY: dict[str, Any] = {}

# Old, new, the rule by which the new version cannot read old data, the rule by which the old cannot read new data.
# The first six rows are the table of Confluent's documentation.
ROWS: list[tuple[str, Any, Any, str | None, str | None]] = [
    ("optional field added", obj("a", a=STRING), obj("a", a=STRING, b=STRING), None, None),
    ("optional field removed", obj("a", a=STRING, b=STRING), obj("a", a=STRING), None, None),
    ("required field added", obj("a", a=STRING), obj("a b", a=STRING, b=STRING), "required_field", None),
    ("required field removed", obj("a b", a=STRING, b=STRING), obj("a", a=STRING), None, "required_field"),
    ("field made required", obj("", a=STRING), obj("a", a=STRING), "required_field", None),
    ("field made optional", obj("a", a=STRING), obj("", a=STRING), None, "required_field"),
    ("field renamed", obj("a", a=STRING), obj("b", b=STRING), "required_field", "required_field"),
    ("type changed", obj("a", a=STRING), obj("a", a=INTEGER), "type_changed", "type_changed"),
    ("integer to number", obj("a", a=INTEGER), obj("a", a=NUMBER), None, "type_changed"),
    ("null allowed", obj("a", a=STRING), obj("a", a={"anyOf": [STRING, NULL]}), None, "type_changed"),
    ("null allowed by a list", obj("a", a=STRING), obj("a", a={"type": ["string", "null"]}), None, "type_changed"),
    ("alternative added", {"anyOf": [STRING, NULL]}, {"anyOf": [STRING, NULL, INTEGER]}, None, "union_narrowed"),
    ("alternatives in another order", {"anyOf": [STRING, NULL]}, {"anyOf": [NULL, STRING]}, None, None),
    ("oneOf for anyOf", {"anyOf": [STRING, NULL]}, {"oneOf": [NULL, STRING]}, None, None),
    ("any value allowed", STRING, ANY, None, "type_changed"),
    ("true for any value", True, ANY, None, None),
    ("value added to an enum", {"enum": ["a"]}, {"enum": ["a", "b"]}, None, "enum_narrowed"),
    ("enum opened", {"enum": ["a"]}, STRING, None, "enum_narrowed"),
    ("enum of other type", {"enum": ["a"]}, INTEGER, "type_changed", "enum_narrowed"),
    ("const for an enum", {"const": "a"}, {"enum": ["a"]}, None, None),
    (
        "enum of null and numbers",
        {"enum": [None, 1.5, True]},
        {"type": ["null", "number", "boolean"]},
        None,
        "enum_narrowed",
    ),
    (
        "range widened",
        {**INTEGER, "minimum": 1, "maximum": 5},
        {**INTEGER, "minimum": 0, "maximum": 9},
        None,
        "bound_tightened",
    ),
    ("lower bound added", INTEGER, {**INTEGER, "minimum": 0}, "bound_tightened", None),
    ("upper bound added", INTEGER, {**INTEGER, "maximum": 9}, "bound_tightened", None),
    ("open bound", {**NUMBER, "exclusiveMinimum": 0}, {**NUMBER, "exclusiveMinimum": 1}, "bound_tightened", None),
    ("multiple widened", {**INTEGER, "multipleOf": 10}, {**INTEGER, "multipleOf": 5}, None, "bound_tightened"),
    ("multiple added", INTEGER, {**INTEGER, "multipleOf": 5}, "bound_tightened", None),
    ("longer text", {**STRING, "maxLength": 5}, {**STRING, "maxLength": 9}, None, "bound_tightened"),
    ("no empty text", STRING, {**STRING, "minLength": 1}, "bound_tightened", None),
    ("zero is no bound", STRING, {**STRING, "minLength": 0}, None, None),
    ("format added", STRING, {**STRING, "format": "uuid"}, "format_changed", None),
    ("format changed", {**STRING, "format": "date"}, {**STRING, "format": "uuid"}, "format_changed", "format_changed"),
    ("bytes", STRING, {**STRING, "contentEncoding": "base64"}, "format_changed", None),
    ("pattern added", STRING, {**STRING, "pattern": "^a"}, "pattern_changed", None),
    (
        "items changed",
        {"type": "array", "items": STRING},
        {"type": "array", "items": INTEGER},
        "type_changed",
        "type_changed",
    ),
    ("items opened", {"type": "array", "items": STRING}, {"type": "array"}, None, "type_changed"),
    ("no duplicates", {"type": "array"}, {"type": "array", "uniqueItems": True}, "bound_tightened", None),
    ("more items", {"type": "array", "maxItems": 2}, {"type": "array", "maxItems": 3}, None, "bound_tightened"),
    (
        "tuple made longer",
        {"type": "array", "prefixItems": [STRING], "items": False, "minItems": 1, "maxItems": 1},
        {"type": "array", "prefixItems": [STRING, STRING], "items": False, "minItems": 2, "maxItems": 2},
        "bound_tightened",
        "bound_tightened",
    ),
    (
        "tuple made a list",
        {"type": "array", "prefixItems": [STRING], "items": False},
        {"type": "array", "items": STRING},
        None,
        "type_changed",
    ),
    (
        "reader closed",
        obj("a", a=STRING, b=STRING),
        {**obj("a", a=STRING), "additionalProperties": False},
        "unknown_field_refused",
        None,
    ),
    ("nested", obj("a", a=obj("b", b=STRING)), obj("a", a=obj("b c", b=STRING, c=STRING)), "required_field", None),
    (
        "values of a map",
        {"type": "object", "additionalProperties": INTEGER},
        {"type": "object", "additionalProperties": STRING},
        "type_changed",
        "type_changed",
    ),
    ("map opened", {"type": "object", "additionalProperties": INTEGER}, {"type": "object"}, None, "type_changed"),
    (
        "map made larger",
        {"type": "object", "maxProperties": 2},
        {"type": "object", "maxProperties": 3},
        None,
        "bound_tightened",
    ),
    (
        "fields made a map",
        obj("a", a=STRING),
        {"type": "object", "additionalProperties": STRING},
        None,
        "required_field",
    ),
    ("parts of allOf", {"allOf": [obj("a", a=STRING)]}, obj("a", a=STRING), None, None),
    ("nothing", False, STRING, None, "type_changed"),
]


@pytest.mark.parametrize(("old", "new", "backward", "forward"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_who_can_read_whom(old: Any, new: Any, backward: str | None, forward: str | None) -> None:
    assert {found.rule for found in unreadable(new, old)} == ({backward} if backward else set())
    assert {found.rule for found in unreadable(old, new)} == ({forward} if forward else set())


@pytest.mark.parametrize(("old", "new"), [row[1:3] for row in ROWS], ids=[row[0] for row in ROWS])
def test_everybody_can_read_themselves(old: Any, new: Any) -> None:
    assert unreadable(old, old) == unreadable(new, new) == []


def test_an_incompatibility_names_its_place() -> None:
    old = obj("items", items={"type": "array", "items": obj("sku", sku=STRING)})
    new = obj("items", items={"type": "array", "items": obj("sku", sku=INTEGER)})
    [found] = unreadable(new, old)
    assert str(found) == "items[].sku: string is written, and the reader takes integer (type_changed)"
    assert str(Incompatibility("", "type_changed", "no")) == "data: no (type_changed)"


TREE: dict[str, Any] = {
    "$ref": "#/$defs/Node",
    "$defs": {"Node": obj("kids", kids={"type": "array", "items": {"$ref": "#/$defs/Node"}})},
}


def test_a_type_that_contains_itself_can_be_compared() -> None:
    other: dict[str, Any] = {
        "$ref": "#/$defs/N",
        "$defs": {"N": obj("kids name", kids=TREE["$defs"]["Node"]["properties"]["kids"], name=STRING)},
    }
    other["$defs"]["N"]["properties"]["kids"] = {"type": "array", "items": {"$ref": "#/$defs/N"}}
    assert unreadable(TREE, TREE) == []
    assert {found.path for found in unreadable(other, TREE)} == {"name", "kids[].name"}
    assert unreadable(TREE, other) == []


@pytest.mark.parametrize(
    ("mode", "expected", "compared"),
    [
        ("NONE", (False, False), []),
        ("BACKWARD", (True, False), [3]),
        ("BACKWARD_TRANSITIVE", (True, False), [1, 2, 3]),
        ("FORWARD", (False, True), [3]),
        ("FORWARD_TRANSITIVE", (False, True), [1, 2, 3]),
        ("FULL", (True, True), [3]),
        ("FULL_TRANSITIVE", (True, True), [1, 2, 3]),
    ],
)
def test_the_words_of_confluent(mode: Any, expected: tuple[bool, bool], compared: list[int]) -> None:
    assert check_mode(mode) == mode
    assert directions(mode) == expected
    assert older_to_check(mode, [2, 3, 1]) == compared


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="compatibility 'backward': expected one of NONE, BACKWARD,"):
        check_mode("backward")


VALUES = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
LEAVES = st.sampled_from(
    [
        STRING,
        INTEGER,
        NUMBER,
        NULL,
        ANY,
        {"type": "boolean"},
        {"enum": ["a", 1]},
        {**INTEGER, "minimum": 0},
        {**STRING, "maxLength": 1},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
        | st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda a, b, required: obj(required, a=a, b=b), inner, inner, st.sampled_from(["", "a", "a b"]))
    ),
    max_leaves=5,
)


def written_by(schema: Any) -> st.SearchStrategy[Any]:
    """Values that a writer by the schema writes: the fields it declares and no others."""
    if "anyOf" in schema:
        return st.one_of([written_by(each) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "string":
            return st.text("ab", max_size=schema.get("maxLength", 3))
        case "integer":
            return st.integers(schema.get("minimum", -3), 3)
        case "number":
            return st.integers(-3, 3) | st.just(0.5)
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "array":
            return st.lists(written_by(schema["items"]), max_size=2)
        case "object":
            fields = {name: written_by(each) for name, each in schema["properties"].items()}
            required = {name: fields[name] for name in schema["required"]}
            return st.fixed_dictionaries(
                required, optional={name: fields[name] for name in fields if name not in required}
            )
        case _:
            return VALUES


def is_readable(schema: Any, value: Any) -> bool:
    if "anyOf" in schema:
        return any(is_readable(each, value) for each in schema["anyOf"])
    if "enum" in schema:
        return any(type(each) is type(value) and each == value for each in schema["enum"])
    match schema.get("type"):
        case "string":
            return isinstance(value, str) and len(value) <= schema.get("maxLength", 9)
        case "integer":
            return type(value) is int and value >= schema.get("minimum", -9)
        case "number":
            return type(value) in (int, float)
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list) and all(is_readable(schema["items"], each) for each in value)
        case "object":
            return (
                isinstance(value, dict)
                and all(name in value for name in schema["required"])
                and all(
                    is_readable(schema["properties"][name], each)
                    for name, each in value.items()
                    if name in schema["properties"]
                )
            )
        case _:
            return True


@given(st.data(), SCHEMAS, SCHEMAS)
def test_what_is_called_compatible_is_readable(data: st.DataObject, reader: Any, writer: Any) -> None:
    if unreadable(reader, writer) == []:
        value = data.draw(written_by(writer))
        assert is_readable(reader, value)


# ---- documents -------------------------------------------------------------------------------------------------------


class Line(msgspec.Struct):
    """A line."""

    sku: str
    quantity: Annotated[int, msgspec.Meta(ge=1)] = 1


class OrderPlaced(Event, type="order.placed", version=2, key="order_id", subject="orders.{order_id}.placed"):
    """An order was placed."""

    order_id: str
    lines: list[Line]
    at: Timestamp | None = None
    size: Literal["s", "m"] = "s"
    note: Private[str] = ""
    total_weight: Measure[float] = 0.0


class Renamed(msgspec.Struct, kw_only=True):
    """Another name, and other words."""

    quantity: Annotated[int, msgspec.Meta(ge=1, description="How many.")] = 1
    sku: str


def test_the_document_of_a_contract() -> None:
    schema = document(contract_of(OrderPlaced))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "order.placed"
    assert schema["description"] == "An order was placed."
    assert schema["x-event"] == {
        "type": "order.placed",
        "version": 2,
        "subject": "orders.{order_id}.placed",
        "key": "{order_id}",
    }
    assert schema["required"] == ["order_id", "lines"]
    assert list(schema["$defs"]) == ["Line"]
    assert write(schema).startswith(b'{\n  "$defs"')


class Node(Event, type="tree.node"):
    name: str
    children: "list[Node]" = []


class Knot(Event, type="tree.node"):
    name: str
    children: "list[Knot]" = []


def test_a_document_may_refer_to_itself() -> None:
    schema = document(contract_of(Node))
    assert resolve(schema["properties"]["children"]["items"], schema)["type"] == "object"
    assert canonical(document(contract_of(Knot))) == canonical(schema)


def test_names_of_classes_and_words_are_not_part_of_the_contract() -> None:
    def placed(line: Any, doc: str) -> Any:
        namespace = {"__annotations__": {"lines": list[line]}, "__doc__": doc, "__module__": __name__}
        return EVENT_META("Placed", (Event,), namespace, type="order.placed")

    old, new = document(contract_of(placed(Line, "a"))), document(contract_of(placed(Renamed, "b")))
    assert old != new
    assert differences(old, new) == []


def test_what_a_message_may_hold_and_where_it_goes_is_part_of_the_contract() -> None:
    class Old(Event, type="a", key="name", subject="a.{name}"):
        name: str
        number: int = 0

    class New(Event, type="a", subject="b.{name}"):
        name: str
        number: int = 1
        more: str

    changes = differences(document(contract_of(Old)), document(contract_of(New)))
    assert [str(change) for change in changes] == [
        '+ properties.more: {"type": "string"}',
        "~ properties.number.default: 0 -> 1",
        '~ required: ["name"] -> ["more", "name"]',
        '- x-event.key: "{name}"',
        '~ x-event.subject: "a.{name}" -> "b.{name}"',
    ]
