"""The envelope of an event on the wire: CloudEvents 1.0 as structured JSON, plus other forms that are read only.

::

    {"specversion":"1.0","id":"...","source":"/shop/orders","type":"order.paid","time":"2026-03-31T10:15:30Z",
     "subject":"o-1","datacontenttype":"application/json","schemaversion":2,
     "correlationid":"...","causationid":"...","data":{...}}

``subject`` is the key of the event. The headers are ``Nats-Msg-Id``, a copy of the id by which the stream recognises a
duplicate, and ``traceparent``, if the event has a trace. Everything else is in the body, so that readers of bodies
alone (Spark, a file) have all of it.

Reading takes one decode of the envelope that leaves ``data`` alone, a look into the catalogue, and one decode of
``data`` into the class. Only a message in another form takes a second look: `foreign_envelopes` reads the binary mode
of CloudEvents and some spellings that are common elsewhere. Readers of millions of messages first try both decodes as
one (:func:`whole_reader`).

Every way in which a message can fail to be an event is an error of its own, below
:class:`~jetspark.errors.ContractViolation`, and is raised before the application's code sees the event.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeAlias, Union
from urllib.parse import unquote

import msgspec

from jetspark.app.contracts.catalogue import Catalogue, Contract, Decoding, contract_of
from jetspark.app.contracts.faults import fault_of, user_errors
from jetspark.app.contracts.field_rules import Timestamp
from jetspark.app.contracts.foreign_envelopes import header_of, read_other_form
from jetspark.app.contracts.tokens import key_fault
from jetspark.errors import (
    BrokenRule,
    ConfigError,
    ContractViolation,
    InvalidEvent,
    MissingField,
    NotJson,
    UnknownEventType,
    UnknownEventVersion,
    UpcastFailed,
    WrongFieldType,
)

__all__ = [
    "Decoded",
    "Encoded",
    "Envelope",
    "RawHeaders",
    "decode",
    "derived_id",
    "encode",
    "event_id",
    "read_any_envelope",
    "read_data",
    "read_envelope",
    "read_event",
    "read_key",
    "whole_reader",
    "write_data",
    "write_event",
]

RawHeaders: TypeAlias = bytes | Mapping[str, str] | None
"""The headers of a message: the raw block, which is only parsed when needed, or a mapping."""

JSON = "application/json"
_VARIANTS = {f"{digit:x}": f"{digit & 3 | 8:x}" for digit in range(16)}
_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_NO_DATA = msgspec.Raw()
_NEXT = "Nats-Schedule-Next"
_NEXT_BYTES = _NEXT.encode()


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """The attributes of an event. ``datacontenttype`` is written and not read: data that is not JSON is refused."""

    specversion: Literal["1.0"]
    id: _Text
    source: str
    type: _Text
    time: Timestamp | None = None
    subject: str | None = None
    schemaversion: int | None = None
    correlationid: str | None = None
    causationid: str | None = None
    data: msgspec.Raw = _NO_DATA


class _Written(msgspec.Struct, frozen=True, gc=False):
    """An envelope in the order in which it is written, without unset attributes."""

    specversion: str
    id: str
    source: str
    type: str
    time: datetime.datetime
    subject: str | msgspec.UnsetType
    datacontenttype: str
    schemaversion: int
    correlationid: str
    causationid: str | msgspec.UnsetType
    data: msgspec.Raw


class _Named(msgspec.Struct, gc=False):
    """A CloudEvent of which only the key is wanted, whatever is wrong with the rest."""

    specversion: msgspec.Raw
    subject: str | None = None


_encode = msgspec.json.Encoder().encode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode = msgspec.json.Decoder(Envelope).decode
_decode_dict = msgspec.json.Decoder(dict[str, Any]).decode


class Encoded(NamedTuple):
    """An event, ready to be published."""

    subject: str
    data: bytes
    headers: dict[str, str]


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """A decoded event with its envelope."""

    event: Any
    """An instance of the newest class of its type."""
    contract: Contract
    """The contract of the event's class."""
    envelope: Envelope
    subject: str
    """The NATS subject the message came on."""
    key: str | None
    """The key by the class; by the envelope if the class has none. Events of one key are handled in order."""
    headers: RawHeaders = None

    @property
    def id(self) -> str:
        """The producer's id of the event: the same for each delivery, redrive and replay of it."""
        return self.envelope.id

    @property
    def type(self) -> str:
        """The type's name on the wire."""
        return self.envelope.type

    @property
    def version(self) -> int:
        """The version that was published, before any upcast; an envelope without one means 1."""
        return self.envelope.schemaversion or 1

    @property
    def source(self) -> str:
        """The program that published the event."""
        return self.envelope.source

    @property
    def time(self) -> datetime.datetime | None:
        """The event's time according to its producer; not the time when the stream stored it."""
        return self.envelope.time

    @property
    def correlation_id(self) -> str:
        """Shared by all events that follow from one request; the event's own id if the envelope has none."""
        return self.envelope.correlationid or self.envelope.id

    @property
    def causation_id(self) -> str | None:
        """The id of the event or command that led to this one."""
        return self.envelope.causationid

    @property
    def traceparent(self) -> str | None:
        """The trace it belongs to, in W3C form."""
        return header_of(self.headers, "traceparent", "ce-traceparent")


def encode(
    event: object,
    *,
    id: str,
    source: str,
    time: datetime.datetime,
    correlation_id: str | None = None,
    causation_id: str | None = None,
    traceparent: str | None = None,
) -> Encoded:
    """Write an event: subject, body and headers of the message to publish.

    Args:
        event: An instance of an ``Event`` class, or of a registered pydantic model.
        id: Identifies the event permanently; see ``Event.event_id`` and :func:`derived_id`.
        time: The event's time, with a time zone.
        correlation_id: The correlation of its cause; by default the event's own id.

    Raises:
        InvalidEvent: A field has a value its contract does not allow.
        ConfigError: The event has no contract, or an argument is empty or has no time zone.
    """
    contract = contract_of(event)
    if not id or not source:
        raise ConfigError(f"id={id!r}, source={source!r}: an envelope needs both, and neither may be empty")
    if time.tzinfo is None:
        raise ConfigError(f"time={time!r}: expected a time with a zone, such as datetime.now(UTC)")
    subject, body = write_event(contract, event, id, source, time, correlation_id, causation_id)
    headers = {"Nats-Msg-Id": id}
    if traceparent is not None:
        headers["traceparent"] = traceparent
    return Encoded(subject, body, headers)


def write_event(
    contract: Contract,
    event: object,
    id: str,
    source: str,
    time: datetime.datetime,
    correlation_id: str | None,
    causation_id: str | None,
) -> tuple[str, bytes]:
    """Subject and body of an event, from arguments that are known to be good: the inner part of :func:`encode`.

    Raises:
        InvalidEvent: A field has a value its contract does not allow.
    """
    return write_data(contract, event, contract.encode(event), id, source, time, correlation_id, causation_id)


def write_data(
    contract: Contract,
    event: object,
    data: bytes,
    id: str,
    source: str,
    time: datetime.datetime,
    correlation_id: str | None,
    causation_id: str | None,
) -> tuple[str, bytes]:
    """As :func:`write_event`, with data that the contract has encoded: for those whose ids depend on the data.

    Raises:
        InvalidEvent: The key or the subject cannot be one.
    """
    try:
        key = contract.key_of(event) or msgspec.UNSET  # CloudEvents has no empty ones
        if key is not msgspec.UNSET and (fault := key_fault(key)) is not None:
            raise ConfigError(fault)
        subject = contract.subject.format(event)
        raw, cause = msgspec.Raw(data), causation_id or msgspec.UNSET
        return subject, _encode(
            _Written(
                "1.0", id, source, contract.type, time, key, JSON, contract.version, correlation_id or id, cause, raw
            )
        )
    except (ConfigError, ValueError) as error:
        raise InvalidEvent(contract.type, contract.version, "", str(error)) from error


def decode(subject: str, data: bytes, headers: RawHeaders, catalogue: Catalogue) -> Decoded:
    """Read a message as an event of the catalogue.

    Args:
        headers: ``message.raw_headers``, or a mapping.

    Raises:
        NotJson: The body is not JSON.
        NotAnEnvelope: The envelope has no type or no id.
        UnknownEventType: The catalogue has no such type.
        UnknownEventVersion: The catalogue has the type, but not this version.
        MissingField, WrongFieldType, BrokenRule: The data breaks its contract; see ``field`` and ``rule``.
        UpcastFailed: The data is of an older version, and its upcast raised.
    """
    envelope, contract, event = read_event(subject, data, headers, catalogue)
    if (id := event_id(envelope, headers)) != envelope.id:
        envelope = msgspec.structs.replace(envelope, id=id, time=None)
    key = contract.key_of(event)
    return Decoded(event, contract, envelope, subject, envelope.subject if key is None else key, headers)


def event_id(envelope: Any, headers: RawHeaders) -> str:
    """The id of an event: that of its envelope, unless a timer that fires again and again has published it.

    Such a timer publishes the same bytes each time, but each firing is an event of its own. So its id is derived from
    the message.
    """
    id: str = envelope.id
    if not headers or not (_NEXT_BYTES in headers if isinstance(headers, bytes) else _NEXT in headers):
        return id
    following = header_of(headers, _NEXT)
    return id if following is None or following == "purge" else derived_id(id, following, 0)


def read_event(subject: str, data: bytes, headers: RawHeaders, catalogue: Catalogue) -> tuple[Envelope, Contract, Any]:
    """The parts of a message, for those who read many and need no more; raises as :func:`decode`."""
    try:
        envelope = _decode(data)
        if not envelope.data:
            envelope = read_other_form(subject, data, headers, Envelope)
    except (msgspec.DecodeError, ValueError, RecursionError):
        envelope = read_other_form(subject, data, headers, Envelope)
    version = envelope.schemaversion or 1
    reading = catalogue.readings.get((envelope.type, version))
    if reading is None:
        raise _unknown(subject, envelope.type, version, catalogue)
    contract, upcasts = reading
    try:
        event = _upcast(subject, envelope, reading) if upcasts else contract.decode(envelope.data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _violation(subject, envelope.type, version, error) from error
    except ContractViolation:
        raise
    except user_errors() as error:  # of the class's own code, such as its ``__post_init__``: it must not end a worker
        rule = f"{type(error).__name__}: {error}"
        raise BrokenRule(subject, envelope.type, version, "", rule) from error
    return envelope, contract, event


def whole_reader(catalogue: Catalogue) -> Callable[[bytes], Any]:
    """A function that decodes envelope and data of a message at once; its result has the ``time``, and the event as
    ``data``.

    It takes half as long as :func:`read_event`, and reads less: the form that :func:`encode` writes, and the newest
    version of each type, if its class is a Struct. For everything else it raises an exception, including messages that
    :func:`read_event` refuses; the caller then tries that function.
    """
    # Sorted by type and version, so the newest version of a type comes last: the only one that is not upcast.
    newest = {name: contract for (name, _), (contract, _) in sorted(catalogue.readings.items())}
    kinds = tuple(_whole_kind(contract) for contract in newest.values() if not contract.is_pydantic)
    # With a second class, because msgspec checks the type only where it has a choice.
    return msgspec.json.Decoder(Union[(_NoEvent, *kinds)]).decode if kinds else _read_nothing


def _whole_kind(contract: Contract) -> type[msgspec.Struct]:
    """An :class:`Envelope` with the event in it: by its type msgspec finds it among others."""
    contract.check()
    version: Any = Literal[contract.version]
    versions = ("schemaversion", version | None, None) if contract.version == 1 else ("schemaversion", version)
    return msgspec.defstruct(
        "WholeEvent",
        [
            ("specversion", Literal["1.0"]),
            ("id", _Text),
            ("source", str),
            ("time", Timestamp | None, None),
            ("subject", str | None, None),
            versions,
            ("correlationid", str | None, None),
            ("causationid", str | None, None),
            ("data", contract.kind),
        ],
        tag_field="type",
        tag=contract.type,
        frozen=True,
        kw_only=True,
        gc=False,
    )


class _NoEvent(msgspec.Struct, tag_field="type", tag="", gc=False):
    """An envelope with an empty type, which never occurs."""

    def __post_init__(self) -> None:
        raise ValueError("the type is empty")


def _read_nothing(data: bytes) -> NoReturn:
    raise ValueError("no type of event that could be read at once")


def read_envelope(data: bytes) -> Envelope:
    """The envelope of a message in the form that ``encode`` writes; :func:`read_event` reads others.

    Raises:
        msgspec.DecodeError, ValueError, RecursionError: The message has another form.
    """
    return _decode(data)


def read_any_envelope(subject: str, data: bytes, headers: RawHeaders) -> Envelope:
    """The envelope of a message in any form that :func:`read_event` reads, whatever is wrong with its data.

    Raises:
        NotJson, NotAnEnvelope: The message is not an event.
    """
    try:
        envelope = _decode(data)
        if envelope.data:
            return envelope
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    return read_other_form(subject, data, headers, Envelope)


def read_key(data: bytes, headers: RawHeaders) -> str | None:
    """The key in the envelope of a message, even if the data breaks its contract; None without a key."""
    named = header_of(headers, "ce-subject")
    if named is not None:
        return unquote(named)
    try:
        return _decode_named(data).subject
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def read_data(reading: Decoding, data: bytes) -> object:
    """The event that ``decode`` has made of such data before: its upcasts are pure, and run again."""
    contract, upcasts = reading
    if not upcasts:
        return contract.decode(data)
    fields = _decode_dict(data)
    for step in upcasts:
        fields = step(fields)
    return contract.convert(fields)


def derived_id(cause_id: str, name: str, index: int) -> str:
    """The id of the ``index``-th event that the handler called ``name`` makes of the event ``cause_id``.

    It is a function of the three, so a handler that runs again publishes nothing new. Two handlers, and two events of
    one handler, have different ids. The form is that of a UUID (version 8).
    """
    # With the lengths, so that no two different triples are written the same.
    text = f"{len(cause_id)}:{cause_id}{len(name)}:{name}{index}"
    digits = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    # In digits and not in bits, which takes twice as long: version 8, and one of the four variants.
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-{_VARIANTS[digits[16]]}{digits[17:20]}-{digits[20:32]}"


def _upcast(subject: str, envelope: Envelope, reading: Decoding) -> object:
    version = envelope.schemaversion or 1
    data = _decode_dict(envelope.data)
    for step in reading.upcasts:
        try:
            data = step(data)
            if not isinstance(data, dict):
                raise TypeError(f"it returned {type(data).__name__}, and not the data as a dict")
        except user_errors() as error:
            rule = f"{step.__module__}.{step.__qualname__} from version {version}: {type(error).__name__}: {error}"
            raise UpcastFailed(subject, envelope.type, envelope.schemaversion or 1, "", rule) from error
        version += 1
    return reading.contract.convert(data)


def _unknown(subject: str, type: str, version: int, catalogue: Catalogue) -> ContractViolation:
    versions = catalogue.versions(type)
    if versions:
        known = ", ".join(map(str, versions))
        rule = f"this version is not known; known are {known}. A newer one needs newer code, an older one an upcast"
        return UnknownEventVersion(subject, type, version, "", rule)
    types = sorted({contract.type for contract in catalogue})
    rule = f"this type is not known; known are {', '.join(types) or 'none'}"
    return UnknownEventType(subject, type, version, "", rule)


def _violation(subject: str, type: str, version: int, error: Exception) -> ContractViolation:
    fault = fault_of(error)
    kind = {"syntax": NotJson, "missing": MissingField, "type": WrongFieldType, "rule": BrokenRule}[fault.kind]
    return kind(subject, type, version, fault.field, fault.rule)
