"""Each rule of compatibility, as a table: what changed, and who can still read whom."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.app import Event, Measure, Private, Timestamp, contract_of
from jetspark.app.contracts.compatibility import Incompatibility, check_mode, directions, older_to_check, unreadable
from jetspark.app.contracts.schemas import SchemaChange, canonical, differences, document, resolve, write
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
    ("value of each alternative", {"enum": ["a", 1]}, {"anyOf": [STRING, INTEGER]}, None, "enum_narrowed"),
    ("value of no alternative", {"enum": ["a", 1]}, {"anyOf": [STRING, NULL]}, "union_narrowed", "enum_narrowed"),
    ("only value of no alternative", {"const": "a"}, {"anyOf": [INTEGER, NULL]}, "union_narrowed", "enum_narrowed"),
    ("alternative of any value", STRING, {"anyOf": [True, NULL]}, None, "type_changed"),
    ("type beside alternatives", {**STRING, "anyOf": [{"maxLength": 5}]}, STRING, None, "union_narrowed"),
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
    ("open bound above", {**NUMBER, "exclusiveMaximum": 5}, {**NUMBER, "exclusiveMaximum": 9}, None, "bound_tightened"),
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
    ("no empty list", {"type": "array"}, {"type": "array", "minItems": 1}, "bound_tightened", None),
    ("shorter list", {"type": "array", "minItems": 2}, {"type": "array", "minItems": 1}, None, "bound_tightened"),
    (
        "items of a short list changed",
        {"type": "array", "items": STRING, "maxItems": 2},
        {"type": "array", "items": INTEGER, "maxItems": 2},
        "type_changed",
        "type_changed",
    ),
    (
        "list of one made a tuple",
        {"type": "array", "items": STRING, "maxItems": 1},
        {"type": "array", "prefixItems": [STRING], "items": False, "maxItems": 1},
        None,
        None,
    ),
    (
        "list of two made a tuple of one",
        {"type": "array", "items": STRING, "maxItems": 2},
        {"type": "array", "prefixItems": [STRING], "items": False, "maxItems": 2},
        "type_changed",
        None,
    ),
    (
        "tuple made a short list",
        {"type": "array", "prefixItems": [STRING], "items": False},
        {"type": "array", "items": STRING, "maxItems": 2},
        None,
        "type_changed",
    ),
    (
        "tuple that may not be shorter",
        {"type": "array", "prefixItems": [STRING], "items": False},
        {"type": "array", "prefixItems": [STRING], "items": False, "minItems": 1},
        "bound_tightened",
        None,
    ),
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
    ("no empty map", {"type": "object"}, {"type": "object", "minProperties": 1}, "bound_tightened", None),
    (
        "map made smaller",
        {"type": "object", "minProperties": 2},
        {"type": "object", "minProperties": 1},
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
    ("bound beside allOf", {"allOf": [STRING], "maxLength": 5}, {**STRING, "maxLength": 9}, None, "bound_tightened"),
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


@pytest.mark.parametrize(
    ("reader", "writer", "reason"),
    [
        ({"enum": ["a"]}, {"enum": ["a", "b", 1]}, 'the reader does not know "b", 1'),
        ({"enum": ["a"]}, STRING, "the reader does not know any value"),
        ({**INTEGER, "maximum": 5}, INTEGER, "maximum is 5 for the reader, no such bound for the writer"),
        ({**INTEGER, "maximum": 5}, {**INTEGER, "maximum": 9}, "maximum is 5 for the reader, 9 for the writer"),
        (obj("a", a=STRING), obj("", a=STRING), "the reader requires it, and it is optional for the writer"),
        (obj("a", a=STRING), obj(""), "the reader requires it, and it is not written"),
        (
            {"anyOf": [NULL]},
            STRING,
            "no alternative of the reader takes it: string is written, and the reader takes null",
        ),
    ],
)
def test_an_incompatibility_says_what_is_wrong(reader: Any, writer: Any, reason: str) -> None:
    [found] = unreadable(reader, writer)
    assert found.reason == reason


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


def test_the_document_of_a_contract_without_nested_classes_defines_none() -> None:
    class Paid(Event, type="order.paid"):
        note: str = "bezahlt für Zoë"

    assert (
        write(document(contract_of(Paid))).decode()
        == """\
{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "properties": {
    "note": {
      "default": "bezahlt für Zoë",
      "type": "string"
    }
  },
  "required": [],
  "title": "order.paid",
  "type": "object",
  "x-event": {
    "subject": "order.paid",
    "type": "order.paid",
    "version": 1
  }
}
"""
    )


class Early(Event, type="early"):
    later: "Later"


class Later(msgspec.Struct):
    price: float


def test_there_is_no_document_of_a_contract_that_breaks_a_rule() -> None:
    with pytest.raises(ConfigError, match=r"Early.later.price: float"):
        document(contract_of(Early))


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


def test_a_reference_is_followed_through_other_references() -> None:
    root = {"$defs": {"A": {"$ref": "#/$defs/B", "maxLength": 5}, "B": {"$ref": "#/$defs/C"}, "C": STRING}}
    assert resolve({"$ref": "#/$defs/A"}, root) == {**STRING, "maxLength": 5}


def test_references_that_lead_nowhere_end() -> None:
    root = {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}
    assert resolve({"$ref": "#/$defs/A"}, root) == {"$ref": "#/$defs/A"}


A, B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}


def test_which_type_is_contained_again_is_part_of_the_contract() -> None:
    def of(inner: Any) -> Any:
        return {"properties": {"a": A}, "$defs": {"A": obj("b", b=B), "B": obj("", inner=inner)}}

    [change] = differences(of(A), of(B))
    assert change.path == "properties.a.properties.b.properties.inner.$up"


def test_whether_a_nested_type_has_a_name_is_not_part_of_the_contract() -> None:
    definitions = {"A": obj("b", b=B), "B": obj("", inner=B)}
    assert canonical({"properties": {"a": A}, "$defs": definitions}) == canonical(
        {"properties": {"a": definitions["A"]}, "$defs": definitions}
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"const": "a"}, {"enum": ["a"]}),
        ({"enum": ["a", "b"]}, {"enum": ["b", "a"]}),
        ({"type": ["string", "null"]}, {"type": ["null", "string"]}),
        ({"anyOf": [STRING, NULL]}, {"anyOf": [NULL, STRING]}),
        (
            {"anyOf": [{"type": "integer", "minimum": 0}, {"maximum": 9, "type": "integer"}]},
            {"anyOf": [{"minimum": 0, "type": "integer"}, {"type": "integer", "maximum": 9}]},
        ),
        (obj(""), {"type": "object", "properties": {}}),
    ],
)
def test_the_same_values_in_other_words_are_the_same_contract(one: Any, other: Any) -> None:
    assert differences(one, other) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"anyOf": [STRING, NULL]}, {"anyOf": [STRING, INTEGER]}),
        ({"type": "array", "items": STRING}, {"type": "array", "items": INTEGER}),
        ({"type": "array", "items": False}, {"type": "array"}),
        ({"type": "array", "prefixItems": [STRING, NULL]}, {"type": "array", "prefixItems": [NULL, STRING]}),
        ({"type": "object", "additionalProperties": False}, {"type": "object"}),
        ({"type": "object", "additionalProperties": STRING}, {"type": "object", "additionalProperties": INTEGER}),
        ({"type": "array", "default": ["a", "b"]}, {"type": "array", "default": ["b", "a"]}),
    ],
)
def test_other_values_are_another_contract(one: Any, other: Any) -> None:
    assert len(differences(one, other)) == 1


def test_a_change_is_shown_in_one_line() -> None:
    assert (
        str(SchemaChange("a", None, {"type": "string", "default": "Zoë"}))
        == '+ a: {"default": "Zoë", "type": "string"}'
    )
    assert str(SchemaChange("a", "x" * 98, None)) == f'- a: "{"x" * 98}"'
    assert str(SchemaChange("a", "x" * 99, None)) == f'- a: "{"x" * 96}...'


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
