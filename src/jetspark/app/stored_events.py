"""Dead letters as messages: what is kept of an event that could not be handled, and why. Pure.

A dead letter has the event's bytes as its body, and the event's headers. Headers of the server are renamed, because it
would act on them again, and so are those of dead letters, because an event may be one of another handler. Headers that
cannot be sent, since the server stores whatever a publisher writes, are together in one header. A dead letter has one
subject, ``dlq.<app>.<handler>.<key>.<stream>.<sequence>.<microseconds>``, and is stored only if that has no message.
Its status:

* ``open``: the handler gave up on it;
* ``behind``: it was not tried, because an earlier event of its key waits or was given up;
* ``closed``: handled or discarded since; a marker without a body that expires after a day.

An event that is too large to be stored with these headers is kept *apart*, on the subject of its dead letter with one
more token. Its stream may drop it as soon as it is acknowledged, so it is stored before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jetspark.app.topology.names import escape_token
from jetspark.codes import Code
from jetspark.core.headers import Headers, readable, restored
from jetspark.errors import InvalidHeader, PayloadTooLarge, ProtocolError, ServerError

__all__ = [
    "CLOSED_TTL_S",
    "SPARK_ROWS",
    "DeadLetterRef",
    "DeadLetterStatus",
    "FailureCause",
    "Origin",
    "StoredEvent",
    "dead_letter_filter",
    "dead_letter_subject",
    "error_text",
    "is_too_large",
    "separate_body_subject",
]

DeadLetterStatus: TypeAlias = Literal["open", "behind", "closed"]

# A redelivery that finds its dead letter closed is acknowledged without being run; nothing is redelivered after a day.
CLOSED_TTL_S = 86400.0

SPARK_ROWS = "spark"
"""The handler name in dead letters of rows that Spark was to write as events, and that their contract does not allow.
No handler receives a redrive of them."""
PREFIX = "Jetspark-Dlq-"
ORIGIN = "Jetspark-Origin-"
"""Before the name of an event's header that means something to the server, or to readers of dead letters."""
_RENAMED = ("nats-", PREFIX.lower(), ORIGIN.lower())
# A header's value is a line, and readers want the end of a traceback rather than all of it.
_MAX_TEXT = 2000
_FEW_WORDS = 100


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an event was published: enough to tell it from one of the same sequence in a stream made anew."""

    stream: str
    sequence: int
    time_us: int

    @property
    def tokens(self) -> str:
        return f"{self.stream}.{self.sequence}.{self.time_us}"


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why an event was given up."""

    error: str
    """The type of the exception."""
    message: str
    is_transient: bool
    fingerprint: str
    """The same for failures of the same type at the same place of the code."""
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException | None, *, is_transient: bool) -> FailureCause:
        if error is None:
            return cls.of_crash()
        frames = traceback.extract_tb(error.__traceback__)
        # Not line numbers: they change with every edit above them.
        place = "\n".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.name}" for frame in frames[-3:])
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return cls(
            error=kind,
            message=error_text(error)[:_MAX_TEXT],
            is_transient=is_transient,
            fingerprint=hashlib.sha256(f"{kind}\n{place}".encode()).hexdigest()[:12],
            trace="".join(traceback.format_tb(error.__traceback__))[-_MAX_TEXT:],
        )

    @classmethod
    def of_crash(cls, message: str = "the worker ended while it handled this event") -> FailureCause:
        """The process ended before it could store how the attempt did."""
        return cls("WorkerDied", message[:_MAX_TEXT], True, "workerdied")

    def to_dict(self) -> dict[str, str | bool]:
        return {
            "error": self.error,
            "message": self.message,
            "transient": self.is_transient,
            "fingerprint": self.fingerprint,
            "trace": self.trace,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> FailureCause:
        return cls(
            error=str(fields.get("error", "")),
            message=str(fields.get("message", "")),
            is_transient=bool(fields.get("transient", False)),
            fingerprint=str(fields.get("fingerprint", "")),
            trace=str(fields.get("trace", "")),
        )


@dataclass(frozen=True, slots=True)
class DeadLetterRef:
    """A dead letter as the next step needs it."""

    sequence: int
    """Of the event in its stream."""
    revision: int
    """Of the dead letter in the dead-letter stream."""
    status: DeadLetterStatus
    redrives: int = 0
    """How often it was handled again and failed again."""
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """A dead letter as it is stored."""

    handler: str
    key: str | None
    origin: Origin
    subject: str
    """Where the event was published."""
    data: bytes
    headers: Headers
    """Of the event."""
    attempts: int
    status: DeadLetterStatus
    cause: FailureCause | None = None
    behind: int | None = None
    """The sequence of the event it waits for."""
    redrives: int = 0
    failed: str = ""
    """When, in UTC."""
    partition: int | None = None
    """Of a handler with partitions: whose retries it belongs to."""
    is_body_omitted: bool = False
    """The event was too large to be stored with its facts: its headers and its body are stored separately, or in its
    stream."""
    apart: int | None = None
    """The size in bytes of the event's headers at the beginning of the message on :func:`separate_body_subject`, which
    has its headers and its body; None if there is no such message."""
    is_cancelled: bool = False
    """A retry that an operator has cancelled: the worker that gets it writes a dead letter in place of trying again."""

    def to_headers(self) -> Headers:
        """The dead letter's own headers and those of the event."""
        fields, unsendable = Headers(), ""
        try:
            for name, value in self.headers.multi_items():
                fields.add(f"{ORIGIN}{name}" if name.lower().startswith(_RENAMED) else name, value)
        except InvalidHeader:  # the server stores whatever block a publisher writes
            fields, unsendable = Headers(), _as_line(self.headers)
        facts: dict[str, object] = {
            "Headers": unsendable,
            "Status": self.status,
            "Handler": self.handler,
            "Key": None if self.key is None else escape_line(self.key),
            "Stream": self.origin.stream,
            "Sequence": self.origin.sequence,
            "Stored-Us": self.origin.time_us,
            "Subject": self.subject,
            "Attempts": self.attempts,
            "Redrives": self.redrives,
            "Behind": self.behind,
            "Failed": self.failed,
            "Partition": self.partition,
            "Body-Omitted": "true" if self.is_body_omitted else None,
            "Apart": self.apart,
            "Cancelled": "true" if self.is_cancelled else None,
        }
        if self.cause is not None:
            facts |= {
                "Error": self.cause.error,
                "Reason": escape_line(self.cause.message),
                "Retryable": "true" if self.cause.is_transient else "false",
                "Fingerprint": self.cause.fingerprint,
                "Trace": escape_line(self.cause.trace),
            }
        for name, fact in facts.items():
            if fact is not None and (fact != "" or name == "Key"):
                fields[f"{PREFIX}{name}"] = str(fact)
        return fields

    @classmethod
    def of(cls, headers: Headers, data: bytes) -> StoredEvent:
        """Read a dead letter.

        Raises:
            ProtocolError: It is not a dead letter.
        """

        facts: dict[str, str] = {}
        for name, value in headers.multi_items():
            if name.startswith(PREFIX):
                facts.setdefault(name[len(PREFIX) :], value)
        return cls._of(facts, _of_line(facts["Headers"]) if facts.get("Headers") else _of_the_event(headers), data)

    @classmethod
    def described(cls, block: bytes | None) -> StoredEvent:
        """Read what is said of an event from a dead letter's header block, without the event's own headers and body.

        A list of many dead letters spends most of its time here, so only the lines of dead letters are taken apart.

        Raises:
            ProtocolError: It is not the header block of a dead letter.
        """
        facts: dict[str, str] = {}
        for line in (block or b"").decode("utf-8", "surrogateescape").split("\r\n"):
            if line.startswith(PREFIX):
                name, _, value = line.partition(":")
                facts.setdefault(name[len(PREFIX) :], value.lstrip(" \t"))
        return cls._of(facts, Headers(), b"")

    @classmethod
    def _of(cls, facts: Mapping[str, str], headers: Headers, data: bytes) -> StoredEvent:
        try:
            return cls._read(facts, headers, data)
        except ValueError:  # also of texts that cannot be read
            raise ProtocolError(f"not a dead letter: no {PREFIX}Stream, -Sequence and so on that can be read") from None

    @classmethod
    def _read(cls, facts: Mapping[str, str], headers: Headers, data: bytes) -> StoredEvent:
        def fact(name: str) -> str:
            return facts.get(name, "")

        origin = Origin(fact("Stream"), int(fact("Sequence")), int(fact("Stored-Us")))
        status = fact("Status")
        if status not in ("open", "behind", "closed"):
            raise ProtocolError(f"{PREFIX}Status={status!r}: expected open, behind or closed")
        cause = None
        if fact("Error"):
            cause = FailureCause(
                error=fact("Error"),
                message=unescape_line(fact("Reason")),
                is_transient=fact("Retryable") == "true",
                fingerprint=fact("Fingerprint"),
                trace=unescape_line(fact("Trace")),
            )
        key = facts.get("Key")
        return cls(
            handler=fact("Handler"),
            key=None if key is None else unescape_line(key),
            origin=origin,
            subject=fact("Subject"),
            data=data,
            headers=headers,
            attempts=int(fact("Attempts") or 0),
            status=status,  # type: ignore[arg-type]  # one of the three
            cause=cause,
            behind=int(fact("Behind")) if fact("Behind") else None,
            redrives=int(fact("Redrives") or 0),
            failed=fact("Failed"),
            partition=int(fact("Partition")) if fact("Partition") else None,
            is_body_omitted=fact("Body-Omitted") == "true",
            apart=int(fact("Apart")) if fact("Apart") else None,
            is_cancelled=fact("Cancelled") == "true",
        )

    def shortened(self) -> StoredEvent:
        """The same without the headers and the body of the event, which are somewhere else."""
        return dataclasses.replace(self, data=b"", headers=Headers(), is_body_omitted=True)

    def stripped(self) -> StoredEvent:
        """The same with the first words of its cause, for a server that takes very little at a time."""
        if self.cause is None:
            return self
        return dataclasses.replace(
            self, cause=dataclasses.replace(self.cause, message=self.cause.message[:_FEW_WORDS], trace="")
        )

    def as_block(self) -> bytes:
        """The headers of the event, as they are kept apart."""
        return _as_text(self.headers).encode("utf-8", "surrogateescape")

    def whole(self, kept: bytes) -> StoredEvent:
        """The same with what was kept apart."""
        size = self.apart or 0
        return dataclasses.replace(self, headers=readable(kept[:size]), data=kept[size:], is_body_omitted=False)


def _of_the_event(headers: Headers) -> Headers:
    """Take the event's own headers out of a dead letter's."""
    found = []
    for name, value in headers.multi_items():
        if name.startswith(ORIGIN):
            found.append((name.removeprefix(ORIGIN), value))
        elif not name.startswith(PREFIX) and not name.lower().startswith("nats-"):
            found.append((name, value))
    return restored(found)


def _as_text(headers: Headers) -> str:
    return "\r\n".join(f"{name}: {value}" for name, value in headers.multi_items())


def _as_line(headers: Headers) -> str:
    """Headers of any kind as one value."""
    return escape_line(_as_text(headers))


def _of_line(line: str) -> Headers:
    return readable(unescape_line(line).encode("utf-8", "surrogateescape"))


def error_text(error: BaseException) -> str:
    """What an error says; one of a user's own class may raise when it is asked."""
    try:
        return str(error)
    except Exception as another:
        return f"its text is not known: str() raised {type(another).__name__}"


def is_too_large(error: BaseException) -> bool:
    """Whether the server refuses a dead letter for its size: all of it, or its headers, of which it takes 64 KB."""
    return isinstance(error, PayloadTooLarge) or (
        isinstance(error, ServerError) and error.err_code == Code.HEADERS_TOO_LARGE
    )


def dead_letter_subject(app: str, handler: str, key: str | None, origin: Origin) -> str:
    """The subject of the one dead letter an event can have."""
    return f"dlq.{app}.{handler}.{_key_token(key)}.{origin.tokens}"


def dead_letter_filter(
    app: str, handler: str | None = None, key: str | None = None, sequence: int | str | None = None
) -> str:
    """Every dead letter of an application, of a handler, a key or a sequence; not what is kept apart."""
    key_token = "*" if key is None else _key_token(key)
    return f"dlq.{app}.{handler or '*'}.{key_token}.*.{'*' if sequence is None else sequence}.*"


def separate_body_subject(subject: str) -> str:
    """Where an event is stored that is too large for its dead letter: its headers and its body."""
    return f"{subject}.event"


def _key_token(key: str | None) -> str:
    # "=" alone is an empty key; no key at all must not share its lane.
    return "=none" if key is None else escape_token(key)


def escape_line(text: str) -> str:
    """Text as one line of ASCII, which a header can carry; reversible."""
    line = text.encode("unicode_escape").decode("ascii")
    return "\\x20" + line[1:] if line[:1] == " " else line  # a header drops blanks in front


def unescape_line(text: str) -> str:
    if "\\" not in text and text.isascii():
        return text
    return text.encode("ascii", "backslashreplace").decode("unicode_escape")
