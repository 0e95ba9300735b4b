"""Messages that are events in another form than ours: read, never written.

- CloudEvents in binary mode: the attributes are headers (``ce-id``, ``ce-type``, ...), the body is the data.
- Structured CloudEvents whose data is ``data_base64``.
- Envelopes under other names that are common in the wild, such as ``eventId``, ``eventType``, ``schemaVersion``,
  ``occurredAt``, ``payload``; and flat ones, whose fields stand beside ``type`` and ``id``.

Nothing here is fast: it runs for a message that the envelope's own decoder refused, or that has no data.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

from jetspark.app.contracts.faults import fault_of
from jetspark.core import headers as header_block
from jetspark.errors import NotAnEnvelope, NotJson

__all__ = ["header_of", "read_other_form"]

_Envelope = TypeVar("_Envelope", bound=msgspec.Struct)

ALIASES: dict[str, tuple[str, ...]] = {
    "id": ("id", "eventId", "event_id"),
    "type": ("type", "eventType", "event_type"),
    "source": ("source", "producerId", "producer_id"),
    "time": ("time", "timestamp", "eventTime", "event_time", "occurredAt", "occurred_at", "producerTime"),
    "schemaversion": ("schemaversion", "schemaVersion", "schema_version"),
    "correlationid": ("correlationid", "correlationId", "correlation_id"),
    "causationid": ("causationid", "causationId", "causation_id"),
    "data": ("data", "payload"),
}
"""Attribute of the envelope, and the names it is read from, the first that is there."""

HEADERS: dict[str, tuple[str, ...]] = {
    "id": ("Nats-Msg-Id", "message-id"),
    "correlationid": ("correlation_id", "correlation-id"),
    "causationid": ("causation_id", "causation-id"),
}
"""Headers that replace attributes missing in such an envelope."""

BINARY = ("id", "source", "type", "time", "subject", "schemaversion", "correlationid", "causationid")
_STRUCTURED = {"specversion", "datacontenttype", "dataschema", "subject"}
_is_number = re.compile(r"[0-9]{1,9}").fullmatch
_EXCERPT_BYTES = 60


def header_of(headers: bytes | Mapping[str, str] | None, *names: str) -> str | None:
    """The first of these headers that is there."""
    if not headers:
        return None
    if isinstance(headers, bytes):
        headers = header_block.readable(headers)  # a publisher's mistake there must not end those who read
    elif not isinstance(headers, header_block.Headers):
        headers = header_block.Headers(headers)  # whose lookup ignores case
    for name in names:
        if (value := headers.get(name)) is not None:
            return value
    return None


def read_other_form(
    subject: str, data: bytes, headers: bytes | Mapping[str, str] | None, envelope: type[_Envelope]
) -> _Envelope:
    """The envelope of a message that is not in our form.

    Raises:
        NotJson: The body is not JSON.
        NotAnEnvelope: The message has none of these forms; ``field`` and ``rule`` name the missing or wrong part.
    """
    if header_of(headers, "ce-specversion", "ce-type") is not None:
        attributes = _binary(subject, data, headers)
    else:
        attributes = _structured(subject, data, headers)
    try:
        return msgspec.convert(attributes, envelope)
    except msgspec.ValidationError as error:
        _, field, rule = fault_of(error)
        raise NotAnEnvelope(subject, _text(attributes.get("type")), None, field, rule) from error


def _binary(subject: str, data: bytes, headers: bytes | Mapping[str, str] | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {"specversion": "1.0", "source": "", "data": _checked(subject, data)}
    for name in BINARY:
        value = header_of(headers, f"ce-{name}")
        if value is not None:
            # The binding writes what a header cannot hold in percent form.
            attributes[name] = unquote(value)
    version = attributes.get("schemaversion", "")
    if _is_number(version):
        attributes["schemaversion"] = int(version)
    return attributes


def _structured(subject: str, data: bytes, headers: bytes | Mapping[str, str] | None) -> dict[str, Any]:
    try:
        msgspec.json.decode(data)  # all of it once, so that nothing below meets half a character
        body = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise NotAnEnvelope(subject, "", None, "", f"expected a JSON object: {fault_of(error).rule}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _not_json(subject, data, error) from error
    attributes: dict[str, Any] = {"specversion": "1.0", "source": ""}
    used = set(_STRUCTURED)
    for name, aliases in ALIASES.items():
        alias = next((alias for alias in aliases if alias in body), None)
        if alias is not None:
            used.add(alias)
            attributes[name] = body[alias] if name == "data" else msgspec.json.decode(body[alias])
    for name, names in HEADERS.items():
        value = header_of(headers, *names)
        if name not in attributes and value is not None:
            attributes[name] = value
    is_cloud_event = "specversion" in body
    if is_cloud_event:
        attributes["specversion"] = msgspec.json.decode(body["specversion"])
        if "subject" in body:  # elsewhere the word stands for the NATS subject
            attributes["subject"] = msgspec.json.decode(body["subject"])
    if "data" not in attributes:
        attributes["data"] = _other_data(subject, body, used, is_cloud_event)
    return attributes


def _other_data(subject: str, body: dict[str, msgspec.Raw], used: set[str], is_cloud_event: bool) -> msgspec.Raw:
    """The data of an envelope that has none under its name."""
    if "data_base64" in body:
        try:
            return _checked(
                subject, base64.b64decode(msgspec.json.decode(body["data_base64"], type=str), validate=True)
            )
        except (binascii.Error, msgspec.ValidationError) as error:
            raise NotAnEnvelope(subject, "", None, "data_base64", f"expected Base64: {error}") from error
    if is_cloud_event:
        raise NotAnEnvelope(subject, "", None, "data", "required, and not there")
    # A flat envelope: the remaining fields are the data.
    return msgspec.Raw(msgspec.json.encode({name: value for name, value in body.items() if name not in used}))


def _checked(subject: str, data: bytes) -> msgspec.Raw:
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _not_json(subject, data, error) from error
    return msgspec.Raw(data)


def _not_json(subject: str, data: bytes, error: Exception) -> NotJson:
    return NotJson(subject, "", None, "", f"{error}; it begins with {bytes(data[:_EXCERPT_BYTES])!r}")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
