"""Compatibility of two schemas: can a reader with one read data written with the other? Terms as in Confluent's
registry.

============================  =====================================================================================
``BACKWARD``                  the new version reads what the last one wrote
``BACKWARD_TRANSITIVE``       ... and what every earlier one wrote: the default, because consumers replay all of history
``FORWARD``                   the last version reads what the new one writes
``FORWARD_TRANSITIVE``        ... and so does every earlier one
``FULL``, ``FULL_TRANSITIVE`` both
``NONE``                      nothing is checked
============================  =====================================================================================

A writer here writes exactly the fields it declares, and a reader ignores fields it does not know. So backward a field
may be removed and an optional one added; forward a field may be added and an optional one removed; for both only
optional fields may come and go. (The registry itself treats JSON Schema more strictly where ``additionalProperties`` is
open, since there a writer might write anything.)

The check is conservative: schemas that it calls compatible are. It refuses some compatible unions and patterns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from jetspark.app.contracts.schemas import Json, Schema, resolve
from jetspark.errors import ConfigError

__all__ = ["Incompatibility", "Mode", "Rule", "check_mode", "directions", "older_to_check", "unreadable"]

Mode: TypeAlias = Literal[
    "NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE"
]
Rule: TypeAlias = Literal[
    "required_field",
    "type_changed",
    "enum_narrowed",
    "bound_tightened",
    "format_changed",
    "pattern_changed",
    "unknown_field_refused",
    "union_narrowed",
    "not_readable",
]
DEFAULT_MODE: Mode = "BACKWARD_TRANSITIVE"

_ALL_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_UNIONS = ("anyOf", "oneOf")
# Keyword, whether a larger value of it is tighter, and the types that it applies to.
_BOUNDS: tuple[tuple[str, bool, frozenset[str]], ...] = (
    ("minimum", True, frozenset({"integer", "number"})),
    ("maximum", False, frozenset({"integer", "number"})),
    ("exclusiveMinimum", True, frozenset({"integer", "number"})),
    ("exclusiveMaximum", False, frozenset({"integer", "number"})),
    ("minLength", True, frozenset({"string"})),
    ("maxLength", False, frozenset({"string"})),
    ("minItems", True, frozenset({"array"})),
    ("maxItems", False, frozenset({"array"})),
    ("minProperties", True, frozenset({"object"})),
    ("maxProperties", False, frozenset({"object"})),
)
_NOTHING = {"minLength": 0, "minItems": 0, "minProperties": 0}


class Incompatibility(NamedTuple):
    """A value that the writer may write and the reader cannot read."""

    path: str
    rule: Rule
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'data'}: {self.reason} ({self.rule})"


def check_mode(mode: str) -> Mode:
    """Return ``mode`` if it is one.

    Raises:
        ConfigError: They are not compatible; the message lists the reasons.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"compatibility {mode!r}: expected one of {', '.join(get_args(Mode))}")
    return mode  # type: ignore[return-value]


def directions(mode: Mode) -> tuple[bool, bool]:
    """The checks that a mode asks for: backward (the new version reads old data), and forward (old versions read new
    data)."""
    return mode.startswith(("BACKWARD", "FULL")), mode.startswith(("FORWARD", "FULL"))


def older_to_check(mode: Mode, versions: Sequence[int]) -> list[int]:
    """The older versions that a mode compares with: all of them, the last, or none."""
    if mode == "NONE":
        return []
    return sorted(versions) if mode.endswith("_TRANSITIVE") else sorted(versions)[-1:]


def unreadable(reader: Schema, writer: Schema) -> list[Incompatibility]:
    """The reasons why a reader with one schema cannot read all data written with the other; empty if it can."""
    return list(_Comparison(reader, writer).compare(reader, writer, ""))


class _Comparison:
    def __init__(self, reader: Schema, writer: Schema) -> None:
        self._reader, self._writer = reader, writer
        self._open: set[str] = set()
        """Pairs that are being compared: a type that contains itself is compatible if the rest of it is."""

    def compare(self, reader: object, writer: object, path: str) -> Iterator[Incompatibility]:
        pair = json.dumps([reader, writer])
        if pair in self._open or writer is False or reader is True or reader == {}:
            return
        self._open.add(pair)
        try:
            yield from self._resolved(resolve(reader, self._reader), resolve(writer, self._writer), path)
        finally:
            self._open.discard(pair)

    def _resolved(self, reader: Json, writer: Json, path: str) -> Iterator[Incompatibility]:
        reader, writer = _merged(reader, self._reader), _merged(writer, self._writer)
        if reader is False:
            yield Incompatibility(path, "type_changed", "the reader takes no value here")
            return
        branches = _branches(writer)
        if branches is None and _branches(reader) is not None and len(_enum(writer) or ()) > 1:
            # Each value may be taken by another alternative.
            branches = [{"const": value} for value in _enum(writer) or ()]
        if branches is not None:
            for branch in branches:
                yield from self.compare(reader, branch, path)
            return
        branches = _branches(reader)
        if branches is not None:
            yield from self._one_of(branches, writer, path)
            return
        yield from self._values(reader, writer, path)

    def _one_of(self, branches: Sequence[object], writer: object, path: str) -> Iterator[Incompatibility]:
        """Some branch of the reader has to take all that the writer writes."""
        tried = [list(self.compare(branch, writer, path)) for branch in branches]
        if all(tried):
            [first, *_] = min(tried, key=len)
            yield Incompatibility(path, "union_narrowed", f"no alternative of the reader takes it: {first.reason}")

    def _values(self, reader: Schema, writer: Schema, path: str) -> Iterator[Incompatibility]:
        wanted = _enum(reader)
        written = _enum(writer)
        if wanted is not None:
            lost = "any value" if written is None else [value for value in written if value not in wanted]
            if lost:
                yield Incompatibility(path, "enum_narrowed", f"the reader does not know {_shown(lost)}")
            return
        taken, types = _types(reader), _types(writer)
        refused = sorted(kind for kind in types if kind not in taken and not (kind == "integer" and "number" in taken))
        if refused:
            yield Incompatibility(
                path,
                "type_changed",
                f"{' or '.join(refused)} is written, and the reader takes {' or '.join(sorted(taken))}",
            )
            return
        yield from _bounds(reader, writer, types, path)
        if "string" in types:
            yield from _text(reader, writer, path)
        if "array" in types:
            yield from self._arrays(reader, writer, path)
        if "object" in types:
            yield from self._objects(reader, writer, path)

    def _arrays(self, reader: Schema, writer: Schema, path: str) -> Iterator[Incompatibility]:
        if reader.get("uniqueItems") and not writer.get("uniqueItems"):
            yield Incompatibility(path, "bound_tightened", "the reader takes no duplicates")
        length = max(len(reader.get("prefixItems", ())), len(writer.get("prefixItems", ())))
        # More items than the writer's bound do not occur; items beyond the reader's bound are reported as a bound.
        most = min((each["maxItems"] for each in (reader, writer) if "maxItems" in each), default=math.inf)
        for index in range(length):
            if index < most:
                yield from self.compare(_item(reader, index), _item(writer, index), f"{path}[{index}]")
        if length < most:
            yield from self.compare(reader.get("items", {}), writer.get("items", {}), f"{path}[]")

    def _objects(self, reader: Schema, writer: Schema, path: str) -> Iterator[Incompatibility]:
        wanted, written = reader.get("properties", {}), writer.get("properties", {})
        for name in reader.get("required", ()):
            if name not in writer.get("required", ()):
                what = "is optional for the writer" if name in written else "is not written"
                yield Incompatibility(_join(path, name), "required_field", f"the reader requires it, and it {what}")
        others = reader.get("additionalProperties", True)
        for name, schema in written.items():
            if name in wanted:
                yield from self.compare(wanted[name], schema, _join(path, name))
            elif others is False:
                yield Incompatibility(
                    _join(path, name), "unknown_field_refused", "the reader refuses fields that it does not know"
                )
            else:
                yield from self.compare(others, schema, _join(path, name))
        values = writer.get("additionalProperties", not written or None)
        if isinstance(values, dict) or (values is True and isinstance(others, dict)):
            # A map: its names are data.
            for name, schema in [*wanted.items(), ("*", others)]:
                if name not in written:
                    yield from self.compare(schema, values, _join(path, name))


def _merged(schema: Json, root: Schema) -> Json:
    """A schema with its ``allOf`` merged in, and ``true`` replaced by the schema that it stands for."""
    if not isinstance(schema, dict) or "allOf" not in schema:
        return {} if schema is True else schema
    result: Schema = {}
    for part in [*schema["allOf"], {name: value for name, value in schema.items() if name != "allOf"}]:
        result.update(resolve(part, root))
    return result


def _branches(schema: Schema) -> list[object] | None:
    """The alternatives of a schema, each with what stands beside them; None if it has none."""
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [{**schema, "type": kind} for kind in kinds]
    for word in _UNIONS:
        if word in schema:
            beside = {name: value for name, value in schema.items() if name not in (*_UNIONS, "default")}
            return [branch if not isinstance(branch, dict) else {**beside, **branch} for branch in schema[word]]
    return None


def _enum(schema: Schema) -> list[object] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(schema: Schema) -> frozenset[str]:
    if "type" in schema:
        return frozenset({schema["type"]})
    values = _enum(schema)
    return _ALL_TYPES if values is None else frozenset(map(_type_of, values))


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds[type(value)]


def _bounds(reader: Schema, writer: Schema, types: frozenset[str], path: str) -> Iterator[Incompatibility]:
    for word, is_lower, about in _BOUNDS:
        limit = reader.get(word)
        if limit is None or not types & about:
            continue
        actual = writer.get(word, _NOTHING.get(word))
        if word == "maxItems" and writer.get("items") is False:
            actual = len(writer.get("prefixItems", ()))
        if actual is None or (limit > actual if is_lower else limit < actual):
            bound = "no such bound" if actual is None else f"{actual}"
            yield Incompatibility(path, "bound_tightened", f"{word} is {limit} for the reader, {bound} for the writer")
    step = reader.get("multipleOf")
    if step is not None and types & {"integer", "number"} and not _divides(step, writer.get("multipleOf")):
        yield Incompatibility(path, "bound_tightened", f"the reader takes multiples of {step} only")


def _divides(step: Json, of: Json) -> bool:
    return of is not None and of % step == 0


def _text(reader: Schema, writer: Schema, path: str) -> Iterator[Incompatibility]:
    for word in ("format", "contentEncoding"):
        if reader.get(word) not in (None, writer.get(word)):
            reason = f"{word} is {reader[word]!r} for the reader, {writer.get(word)!r} for the writer"
            yield Incompatibility(path, "format_changed", reason)
    pattern = reader.get("pattern")
    if pattern not in (None, writer.get("pattern")):
        yield Incompatibility(
            path, "pattern_changed", f"the reader takes {pattern!r}, which the writer does not promise"
        )


def _item(schema: Schema, index: int) -> object:
    prefix = schema.get("prefixItems", ())
    return prefix[index] if index < len(prefix) else schema.get("items", {})


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(values: Json) -> str:
    return values if isinstance(values, str) else ", ".join(map(json.dumps, values))
