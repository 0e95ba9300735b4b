"""The message class of subscriptions, with its headers decoded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jetspark.core.headers import Headers, Status, decode, decode_status
from jetspark.errors import ProtocolError, UsageError

__all__ = ["AnswerRun", "CoreMessage", "is_no_responders"]


class _Slotted(type):
    """Makes classes without an instance dict, although their bodies do not declare ``__slots__``: msgspec forbids
    that."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> _Slotted:
        return super().__new__(cls, name, bases, {"__slots__": ()} | body)


class _PlainFields(metaclass=_Slotted):
    """The fields of a message, as plain Python attributes; used without msgspec."""

    __slots__ = ("_client", "_headers", "_metadata", "data", "raw_headers", "raw_reply", "subject")

    def __init__(
        self, subject: str, data: bytes, raw_reply: bytes | None, raw_headers: bytes | None, client: Any
    ) -> None:
        self.subject = subject
        self.data = data
        self.raw_reply = raw_reply
        self.raw_headers = raw_headers
        self._client = client
        self._headers: Headers | None = None
        self._metadata: Any = None  # for subclasses: a cache of decoded metadata


def _fields() -> type[_PlainFields]:
    """The same fields as a msgspec Struct, if msgspec is installed. Its objects are made in C and are invisible to
    Python's garbage collector, which otherwise visits all live messages at each run: a third of a reader's cost for a
    message. No reference cycle contains a message, so the collector would free nothing."""
    try:
        from msgspec import defstruct
    except ImportError:
        return _PlainFields
    given = [("subject", str), ("data", bytes), ("raw_reply", Any), ("raw_headers", Any), ("_client", Any)]
    made = [("_headers", Any, None), ("_metadata", Any, None)]
    return defstruct("MessageFields", [*given, *made], module=__name__, gc=False, eq=False)  # type: ignore[return-value]


if TYPE_CHECKING:
    MessageFields = _PlainFields
else:
    MessageFields = _fields()


class CoreMessage(MessageFields):
    """One message as it came over the wire.

    ``subject`` and ``data`` are ready; reply subject and headers are decoded on first use, because most subscribers
    never read them and eager decoding would cost every message. Drivers subclass it to add ``respond``.
    """

    @property
    def size_bytes(self) -> int:
        """The message's size as counted by its subscription's bounds: headers and data."""
        return len(self.data) if self.raw_headers is None else len(self.data) + len(self.raw_headers)

    @property
    def reply(self) -> str:
        """The subject for an answer; empty if the sender expects none."""
        return self.raw_reply.decode(errors="surrogateescape") if self.raw_reply else ""

    def reply_subject(self) -> str:
        """``reply``; raises :class:`UsageError` if the message has none, because an answer cannot reach its sender."""
        if not self.raw_reply:
            raise UsageError(f"the message on {self.subject!r} has no reply subject: its sender expects no answer")
        return self.reply

    @property
    def headers(self) -> Headers:
        """The headers, empty when the message has none."""
        if self._headers is None:
            self._headers = Headers() if self.raw_headers is None else decode(self.raw_headers)
        return self._headers

    @property
    def status(self) -> Status | None:
        """The inline status a server puts on messages of its own, such as ``503`` for "no responders"."""
        return None if self.raw_headers is None else decode_status(self.raw_headers)

    def __repr__(self) -> str:
        reply = f", reply={self.reply!r}" if self.raw_reply else ""
        return f"<Message subject={self.subject!r}{reply}, {len(self.data)} bytes>"


class AnswerRun(NamedTuple):
    """Consecutive answers without headers, as columns: a message object for each would cost more than reading all
    of them does."""

    prefix: str
    """The common beginning of their subjects, up to the last dot of one of them."""
    tokens: list[bytes]
    """The rest of each subject."""
    payloads: list[bytes]


def is_no_responders(message: CoreMessage) -> bool:
    """True for the server's own answer to a request without a subscriber (status 503)."""
    if message.data:
        return False
    try:
        status = message.status
    except ProtocolError:  # the sender's fault, not the connection's: reading the headers raises
        return False
    return status is not None and status.code == 503
