"""JSON on the wire, dataclasses in the program: one table-driven translation each way.

The only place that knows the server's nanoseconds and time stamps.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import fractions
import json
import re
import types
import typing
from typing import Any, TypeVar

from jetspark.errors import ProtocolError, ServerError
from jetspark.jetstream.checks import check_types
from jetspark.jetstream.errors import server_error

__all__ = [
    "decode",
    "encode",
    "error_of",
    "nanoseconds",
    "number_in",
    "parse_time",
    "read_object",
    "read_reply",
    "required_level",
    "seconds_to_ns",
    "time_text",
]

T = TypeVar("T")

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_ZERO_TIME = "0001-01-01T00:00:00Z"
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")


def seconds_to_ns(seconds: float) -> int:
    # Exact arithmetic: the product of two floats is a nanosecond off for some durations from 48 days on.
    return round(fractions.Fraction(seconds) * 1_000_000_000)


def ns_to_seconds(value_ns: int) -> float:
    # Whole values first: 0.1 s must come back as 0.1, not as 0.1 plus the error of a division.
    return value_ns / 1_000_000_000


def parse_time(text: str) -> datetime.datetime | None:
    """A moment in UTC; None for Go's zero time. Python keeps microseconds, so the last three digits are dropped."""
    if text == _ZERO_TIME:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ProtocolError(f"not a time stamp: {text!r}")
    whole, fraction, zone = match.groups()
    try:
        moment = datetime.datetime.fromisoformat(whole + (zone if zone != "Z" else "+00:00")).astimezone(datetime.UTC)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"not a time stamp: {text!r}") from error
    return moment.replace(microsecond=int((fraction or "0").ljust(6, "0")[:6]))


def nanoseconds(moment: datetime.datetime, text: str) -> int:
    """Nanoseconds since 1970 of a moment that :func:`parse_time` made of ``text``, without losing the last digits."""
    fraction = text.partition(".")[2][:9]
    digits = fraction.rstrip("Z") if fraction.endswith("Z") else re.split(r"[^0-9]", fraction)[0]
    microseconds = (moment - _EPOCH) // _MICROSECOND
    return microseconds * 1000 + int(digits.ljust(9, "0")[6:])


def number_in(text: str) -> int:
    """A count or a sequence in a header.

    Raises:
        ProtocolError: The text is not a number.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ProtocolError(f"not a number: {text[:40]!r}")
    return int(text)


def time_text(moment: datetime.datetime) -> str:
    """A moment in the server's format. A moment without a zone is taken as UTC, never as the machine's local time."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.astimezone(datetime.UTC).isoformat().replace("+00:00", "Z")


def time_from_ns(value_ns: int) -> datetime.datetime:
    seconds, rest_ns = divmod(value_ns, 1_000_000_000)
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).replace(microsecond=rest_ns // 1000)


def encode(value: Any) -> dict[str, Any]:
    """A dataclass as the server's JSON object; fields that are None are left out."""
    result: dict[str, Any] = dict(getattr(value, "extra", {}))
    for entry in _fields(type(value)):
        content = getattr(value, entry.name)
        if content is not None:
            result[entry.wire] = _encode_value(content, entry.unit)
    return result


def _encode_value(value: Any, unit: str) -> Any:
    if unit == "ns":
        return seconds_to_ns(value)
    if unit == "ns_list":
        return [seconds_to_ns(each) for each in value]
    if unit == "time":
        return time_text(value)
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    if isinstance(value, collections.abc.Sequence) and not isinstance(value, str):
        return [encode(each) if dataclasses.is_dataclass(each) else each for each in value]
    return value


def decode(kind: type[T], fields: collections.abc.Mapping[str, Any]) -> T:
    """The dataclass for a JSON object; unknown keys go to its ``extra``, if it has one."""
    try:
        known: dict[str, Any] = {}
        rest = dict(fields)
        for entry in _fields(kind):
            content = rest.pop(entry.wire, None)
            if content is not None:
                known[entry.name] = _decode_value(content, entry)
        if any(entry.name == "extra" for entry in dataclasses.fields(typing.cast(Any, kind))):
            known["extra"] = rest
        if hasattr(kind, "__post_init__"):
            return _unjudged(kind, known)
        result = kind(**known)
        check_types(result)
        return result
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"{kind.__name__} we cannot read: {error}") from error


def _unjudged(kind: type[T], known: dict[str, Any]) -> T:
    """A configuration from the server, without a check of its values.

    It may have values that we would refuse to send: a word of a newer server, or a value that an older one accepted.
    Such a stream can be read, listed, and updated in all other fields.
    """
    config = object.__new__(kind)
    for entry in dataclasses.fields(typing.cast(Any, kind)):
        if entry.name in known:
            value = known[entry.name]
        elif entry.default is not dataclasses.MISSING:
            value = entry.default
        elif entry.default_factory is not dataclasses.MISSING:
            value = entry.default_factory()
        else:
            raise TypeError(f"{entry.metadata.get('wire', entry.name)} is missing")
        object.__setattr__(config, entry.name, value)
    check_types(config)
    return config


def _decode_value(value: Any, entry: _Field) -> Any:
    if entry.unit == "ns":
        return ns_to_seconds(value)
    if entry.unit == "ns_list":
        return [ns_to_seconds(each) for each in value]
    if entry.unit == "time":
        return parse_time(value)
    if entry.kind is not None:
        return [decode(entry.kind, each) for each in value] if entry.is_list else decode(entry.kind, value)
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    wire: str
    unit: str
    level: int
    release: str
    kind: type | None
    """The dataclass of the value, or of each element."""
    is_list: bool


_FIELDS: dict[Any, tuple[_Field, ...]] = {}


def _fields(kind: Any) -> tuple[_Field, ...]:
    known = _FIELDS.get(kind)
    if known is None:
        known = _FIELDS[kind] = _read_fields(kind)
    return known


def _read_fields(kind: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind)
    result = []
    for entry in dataclasses.fields(kind):
        wire = entry.metadata.get("wire", entry.name)
        if wire:
            nested, is_list = _nested(hints[entry.name])
            unit, level = entry.metadata.get("unit", ""), entry.metadata.get("level", 0)
            release = entry.metadata.get("release", "")
            result.append(_Field(entry.name, wire, unit, level, release, nested, is_list))
    return tuple(result)


def _nested(hint: Any) -> tuple[type | None, bool]:
    """The dataclass inside ``X | None`` or ``Sequence[X] | None``."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        for option in typing.get_args(hint):
            found, is_list = _nested(option)
            if found is not None:
                return found, is_list
        return None, False
    if typing.get_origin(hint) in (collections.abc.Sequence, list, tuple):
        found, _ = _nested(typing.get_args(hint)[0])
        return found, True
    return (hint, False) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else (None, False)


# Words that are newer than their field.
_WORD_LEVELS = {("ack_policy", "flow_control"): 4, ("priority_policy", "prioritized"): 2}


def required(value: Any) -> list[tuple[str, int, str]]:
    """The mentioned fields that need a certain server: name, API level, and the release for those older than levels."""
    needed = []
    for entry in _fields(type(value)):
        content = getattr(value, entry.name)
        if content:
            word_level = _WORD_LEVELS.get((entry.name, content), 0) if isinstance(content, str) else 0
            level = max(entry.level, word_level)
            if level or entry.release:
                needed.append((entry.name, level, entry.release))
    return needed


def required_level(value: Any) -> tuple[int, str]:
    """The highest API level any mentioned field needs, and the name of that field."""
    needed = [(level, name) for name, level, _ in required(value) if level]
    return max(needed, default=(0, ""))


def read_reply(data: bytes, stream: str = "", consumer: str = "") -> dict[str, Any]:
    """The JSON object of a reply; ``stream`` and ``consumer`` name the objects of the request.

    Raises:
        ServerError: The reply is an error; the class says which.
        ProtocolError: The reply is not one of a JetStream server.
    """
    reply = read_object(data)
    error = error_of(reply, stream, consumer)
    if error is not None:
        raise error
    return reply


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a reply, error or not.

    Raises:
        ProtocolError: The data are not a JSON object.
    """
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise ProtocolError(f"a JetStream reply that is not a JSON object: {data[:80]!r}")
    return reply


def error_of(reply: collections.abc.Mapping[str, Any], stream: str = "", consumer: str = "") -> ServerError | None:
    """The error in a reply, if any; a refused publish names its stream itself.

    Raises:
        ProtocolError: The error is malformed.
    """
    error = reply.get("error")
    if error is None:
        return None
    if not isinstance(error, dict):
        raise ProtocolError(f"a JetStream error that is not a JSON object: {str(error)[:80]!r}")
    code, err_code = error.get("code", 0), error.get("err_code", 0)
    if not isinstance(code, int) or not isinstance(err_code, int):
        raise ProtocolError(f"a JetStream error without numbers: {str(error)[:80]!r}")
    if not stream and isinstance(reply.get("stream"), str):
        stream = reply["stream"]
    return server_error(code, err_code, str(error.get("description", "no description")), stream, consumer)
