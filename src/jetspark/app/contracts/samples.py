"""Examples of data, made of its schema alone: the smallest and the largest that a contract allows.

They are the same in every run, so that they can be kept in files (golden files) and read again by later code. A value
that a schema does not determine, such as a text that matches a pattern, comes from ``msgspec.Meta(examples=[...])``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from jetspark.app.contracts.schemas import Json, Schema, resolve
from jetspark.errors import ConfigError

__all__ = ["samples"]

# Fixed, so that files made of them never change.
_FORMATS = {
    "date-time": "2026-03-15T10:15:30Z",
    "date": "2026-03-15",
    "time": "10:15:30",
    "duration": "PT1H",
    "uuid": "00000000-0000-4000-8000-000000000001",
    "decimal": "1.5",
    "email": "somebody@example.org",
    "uri": "https://example.org/",
}
_CANDIDATES = ("a", "A", "1", "aa", "AA", "11", "AAA", "111", "a-1", "a_1", "A-1", "a.a", "EUR", "x1", "1a")
_LARGEST = 2**53 - 1
"""The largest integer that every reader of JSON takes exactly."""


def samples(schema: Schema, title: str) -> dict[str, Json]:
    """The smallest data by a schema (no optional field, lowest values) and the largest (every field, highest values).

    Raises:
        ConfigError: A field has no possible value; the message says what to add to it.
    """
    return {name: _Maker(schema, title, name == "largest").value(schema, (), ()) for name in ("smallest", "largest")}


class _Maker:
    def __init__(self, root: Schema, title: str, is_largest: bool) -> None:
        self._root, self._title, self._is_largest = root, title, is_largest

    def value(self, schema: Json, path: tuple[str, ...], above: tuple[str, ...]) -> Json:
        """A value, or ``_ENDLESS`` if it would contain itself."""
        if not isinstance(schema, dict):
            return None
        reference = schema.get("$ref")
        if reference in above:
            return _ENDLESS
        if reference is not None:
            above = (*above, reference)
        schema = resolve(schema, self._root)
        for words in ("examples", "enum"):
            if schema.get(words):
                return schema[words][-1 if self._is_largest else 0]
        if "const" in schema:
            return schema["const"]
        branches = schema.get("anyOf") or schema.get("oneOf") or [{"type": kind} for kind in _types(schema)[1:]]
        if branches:
            return self._one_of([*branches], path, above)
        match schema.get("type", _types(schema)[0]):
            case "object":
                return self._object(schema, path, above)
            case "array":
                return self._array(schema, path, above)
            case "string":
                return self._text(schema, path)
            case "integer" | "number":
                return self._number(schema)
            case "boolean":
                return self._is_largest
            case _:
                return None

    def _one_of(self, branches: Sequence[object], path: tuple[str, ...], above: tuple[str, ...]) -> Json:
        found = [self.value(branch, path, above) for branch in branches]
        usable = [value for value in found if value is not _ENDLESS]
        if not usable:
            return _ENDLESS
        # The largest has a value where null would do as well, the smallest has null.
        return next((value for value in usable if (value is None) is not self._is_largest), usable[0])

    def _object(self, schema: Schema, path: tuple[str, ...], above: tuple[str, ...]) -> Json:
        result = {}
        for name, field in schema.get("properties", {}).items():
            is_required = name in schema.get("required", ())
            if not is_required and not self._is_largest:
                continue
            value = self.value(field, (*path, name), above)
            if value is not _ENDLESS:
                result[name] = value
            elif is_required:
                return _ENDLESS
        values = schema.get("additionalProperties")
        wanted = schema.get("minProperties", 0)
        if isinstance(values, dict) and (self._is_largest or wanted):
            value = self.value(values, (*path, "*"), above)
            if value is not _ENDLESS:
                result.update({f"key-{index}": value for index in range(max(1, wanted))})
        return result

    def _array(self, schema: Schema, path: tuple[str, ...], above: tuple[str, ...]) -> Json:
        prefix = schema.get("prefixItems", [])
        items = schema.get("items", True)
        count = schema.get("minItems", 0)
        if self._is_largest and items is not False:
            count = max(count, min(len(prefix) + 1, schema.get("maxItems", len(prefix) + 1)))
        schemas = [prefix[index] if index < len(prefix) else items for index in range(max(count, len(prefix)))]
        found = [self.value(each, (*path, str(index)), above) for index, each in enumerate(schemas)]
        if any(value is _ENDLESS for value in found):
            return _ENDLESS if schema.get("minItems") else []
        if schema.get("uniqueItems"):
            found = [f"{value}{index}" if isinstance(value, str) else value for index, value in enumerate(found)]
        return found

    def _text(self, schema: Schema, path: tuple[str, ...]) -> str:
        if schema.get("contentEncoding") == "base64":
            return "aGVsbG8=" if self._is_largest else ""
        if "format" in schema:
            text: str | None = _FORMATS.get(schema["format"])
            return text or self._refuse(path, f"format {schema['format']!r}")
        length: int = schema.get("minLength", 0)
        if self._is_largest:
            length = max(length, min(5, schema.get("maxLength", 5)))
        pattern = schema.get("pattern")
        if pattern is None:
            return "x" * length if self._is_largest else "a" * length
        for candidate in _CANDIDATES:
            is_long_enough: bool = schema.get("minLength", 0) <= len(candidate) <= schema.get("maxLength", 99)
            if is_long_enough and re.search(pattern, candidate):
                return candidate
        return self._refuse(path, f"pattern {pattern!r}")

    def _number(self, schema: Schema) -> int | float:
        is_whole = schema.get("type") == "integer"
        step = schema.get("multipleOf", 1)
        low = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf) + step)
        high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf) - step)
        if self._is_largest:
            value = high if high != math.inf else max(low, _LARGEST if is_whole else 1.5)
        else:
            value = low if low != -math.inf else min(high, 0)
        if "multipleOf" in schema:
            value = math.floor(value / step) * step if self._is_largest else math.ceil(value / step) * step
        return int(value) if is_whole else value

    def _refuse(self, path: tuple[str, ...], what: str) -> str:
        raise ConfigError(
            f"{self._title}, field {'.'.join(path)!r}: no example can be made of {what}; add one with "
            "Annotated[..., msgspec.Meta(examples=[...])]"
        )


class _Endless:
    pass


_ENDLESS = _Endless()


def _types(schema: Schema) -> list[str]:
    """The types of a schema, the one to make an example of first."""
    found = schema.get("type")
    if isinstance(found, list):
        return [found[0], *found]
    if found is None and "properties" in schema:
        return ["object"]
    return [found or "null"]
