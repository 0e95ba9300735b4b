"""The JSON Schema of each type and version: the contract for readers without Python.

Two documents are the same contract when their canonical forms are equal: without titles, descriptions and examples,
whatever nested classes are called, in one order. So a class can be renamed and a docstring improved, and nothing that
a message may or must hold can change unnoticed.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple, TypeAlias

import msgspec

from jetspark.app.contracts.catalogue import Contract

__all__ = ["Schema", "SchemaChange", "canonical", "differences", "document", "resolve", "sets_in_order", "write"]

Json: TypeAlias = Any
"""A value as ``json.loads`` returns it."""
Schema: TypeAlias = dict[str, Json]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ANNOTATIONS = frozenset(
    {"$comment", "$defs", "$id", "$schema", "deprecated", "description", "discriminator", "examples"}
)
"""Keywords that say nothing about which values are allowed; ``title`` and ``x-...`` besides."""

_BRANCHES = ("anyOf", "oneOf", "allOf")


class SchemaChange(NamedTuple):
    """A difference between two documents; None stands for a missing value."""

    path: str
    old: object
    new: object

    def __str__(self) -> str:
        if self.old is None:
            return f"+ {self.path}: {_short(self.new)}"
        if self.new is None:
            return f"- {self.path}: {_short(self.old)}"
        return f"~ {self.path}: {_short(self.old)} -> {_short(self.new)}"


def document(contract: Contract) -> Schema:
    """The schema of a contract's data, with the rest of the contract as ``x-event``."""
    contract.check()
    made = contract.kind.model_json_schema() if contract.is_pydantic else msgspec.json.schema(contract.kind)
    # In the form that a record has after decoding: msgspec keeps a default that is a tuple, which is unequal to a
    # list.
    found: Schema = json.loads(json.dumps(made))
    found = _with_sets_in_order(found, found)
    schema = dict(resolve(found, found))
    definitions = found.get("$defs", {})
    own = found.get("$ref", "").rpartition("/")[2]
    if own and not _refers_to(own, definitions):
        definitions = {name: value for name, value in definitions.items() if name != own}
    schema.pop("$defs", None)
    event: dict[str, object] = {"type": contract.type, "version": contract.version, "subject": contract.subject.text}
    if contract.key_template is not None:
        event["key"] = contract.key_template.text
    result = {"$schema": DIALECT, **schema, "title": contract.type, "x-event": event}
    return {**result, "$defs": definitions} if definitions else result


def write(schema: Schema) -> bytes:
    """The bytes of a document: indented and sorted, so that files of it can be compared by eye."""
    return (json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def resolve(schema: object, root: Schema) -> Json:
    """A schema with its reference followed; what stands beside the reference wins."""
    seen: set[str] = set()
    while isinstance(schema, dict) and "$ref" in schema and schema["$ref"] not in seen:
        seen.add(schema["$ref"])
        target = root.get("$defs", {}).get(schema["$ref"].rpartition("/")[2], {})
        schema = {**target, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


def canonical(schema: Schema) -> Json:
    """The form in which equal contracts are equal: key, subject and data, without names and words."""
    event = schema.get("x-event", {})
    routing = {name: event[name] for name in ("key", "subject") if name in event}
    return {**_plain(schema, schema, ()), **({"x-event": routing} if routing else {})}


def differences(old: Schema, new: Schema) -> list[SchemaChange]:
    """The differences between two documents that change their meaning."""
    return list(_changes("", canonical(old), canonical(new)))


def _plain(schema: Json, root: Schema, above: tuple[str, ...]) -> Json:
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if reference in above:
        # A recursive type: the number of levels up to it, which does not depend on its name.
        return {"$up": len(above) - above.index(reference)}
    if reference is not None:
        above = (*above, reference)
    schema = resolve(schema, root)
    result: Schema = {}
    for word, value in schema.items():
        if word in ANNOTATIONS or word.startswith("x-") or (word == "title" and isinstance(value, str)):
            continue
        if word == "properties":
            result[word] = {name: _plain(each, root, above) for name, each in value.items()}
        elif word in _BRANCHES:
            result[word] = sorted((_plain(each, root, above) for each in value), key=_sort_key)
        elif word == "prefixItems":
            result[word] = [_plain(each, root, above) for each in value]
        elif word in ("items", "additionalProperties"):
            result[word] = _plain(value, root, above)
        elif word in ("required", "enum") or (word == "type" and isinstance(value, list)):
            result[word] = sorted(value, key=_sort_key)
        elif word == "default":
            result[word] = sets_in_order(value, schema, root)
        else:
            result[word] = value
    if result.get("required") == []:
        del result["required"]
    if "const" in result:
        result["enum"] = [result.pop("const")]
    return result


def _with_sets_in_order(schema: object, root: Schema) -> Json:
    """A schema whose defaults, and so its files, are the same in every process."""
    if isinstance(schema, list):
        return [_with_sets_in_order(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for word, value in schema.items():
        if word == "default":
            result[word] = sets_in_order(value, schema, root)
        elif word in ("$defs", "properties"):
            result[word] = {name: _with_sets_in_order(each, root) for name, each in value.items()}
        elif word in (*_BRANCHES, "additionalProperties", "items", "prefixItems"):
            result[word] = _with_sets_in_order(value, root)
    return result


def sets_in_order(value: Json, schema: Json, root: Schema) -> Json:
    """A JSON value with the items of its sets sorted: Python has those of texts in another order in each process."""
    schema = resolve(schema, root)
    if not isinstance(value, dict | list) or not isinstance(schema, dict):
        return value
    for branch in (each for word in _BRANCHES for each in schema.get(word, ())):
        value = sets_in_order(value, branch, root)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        return {name: sets_in_order(each, known.get(name, others), root) for name, each in value.items()}
    first, rest = schema.get("prefixItems", []), schema.get("items")
    kinds = itertools.chain(first, itertools.repeat(rest))
    items = [sets_in_order(each, kind, root) for each, kind in zip(value, kinds, strict=False)]
    return sorted(items, key=_sort_key) if schema.get("uniqueItems") else items


def _changes(path: str, old: object, new: object) -> Json:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from _changes(f"{path}.{name}" if path else name, old.get(name), new.get(name))
    elif old != new:
        yield SchemaChange(path, old, new)


def _refers_to(name: str, definitions: Schema) -> bool:
    return f'"#/$defs/{name}"' in json.dumps(definitions)


def _sort_key(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
