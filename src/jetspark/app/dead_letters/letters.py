"""Dead letters as messages: what is kept of an event that could not be handled, and why. Pure.

A letter has the original bytes as its body and the original headers. Those of the server are renamed, because it would
act on them again, and those of letters, because an event may be one of another handler. Headers that nobody can send,
since a publisher wrote what is no name or no value, are together in one of the letter's. One letter has one subject,
``dlq.<app>.<handler>.<key>.<stream>.<sequence>.<microseconds>``, and is stored only if nothing is there. Its status:

* ``open``: the handler gave up on it;
* ``behind``: it was not tried, because an earlier event of its key waits or was given up;
* ``closed``: handled or discarded since; a mark without a body that goes away after a day.

An event that is too large to be stored together with what is said of it is kept *apart*, on the subject of its letter
with one more token. Its stream may forget it as soon as it is acknowledged, so it is kept before.
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
    "DeadEvent",
    "FailureCause",
    "LetterRef",
    "LetterStatus",
    "Origin",
    "apart_subject",
    "error_text",
    "is_too_large",
    "letter_filter",
    "letter_subject",
]

LetterStatus: TypeAlias = Literal["open", "behind", "closed"]

# A redelivery that finds its letter closed is acknowledged without being run; nobody redelivers after a day.
CLOSED_TTL_S = 86400.0

PREFIX = "Jetspark-Dlq-"
ORIGIN = "Jetspark-Origin-"
"""Before the name of an event's header that means something to the server, or to who reads the letter."""
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
    def of_crash(cls) -> FailureCause:
        """Nobody lived to tell."""
        return cls("WorkerDied", "the worker ended while it handled this event", True, "workerdied")

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
class LetterRef:
    """What has to be known of a letter to go on with it."""

    sequence: int
    """Of the event in its stream."""
    revision: int
    """Of the letter in the dead-letter stream."""
    status: LetterStatus
    redrives: int = 0
    """How often it was handled again and failed again."""
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadEvent:
    """A letter as it is stored."""

    handler: str
    key: str | None
    origin: Origin
    subject: str
    """Where the event was published."""
    data: bytes
    headers: Headers
    """Of the event."""
    attempts: int
    status: LetterStatus
    cause: FailureCause | None = None
    behind: int | None = None
    """The sequence of the event it waits for."""
    redrives: int = 0
    failed: str = ""
    """When, in UTC."""
    partition: int | None = None
    """Of a handler with partitions: whose retries it belongs to."""
    is_body_omitted: bool = False
    """The event is too large to be stored with what has to be said of it: its headers and its body are apart, or in its
    stream."""
    apart: int | None = None
    """Its headers and its body are a message of their own, on :func:`apart_subject`: headers first, of this many bytes.
    """

    def to_headers(self) -> Headers:
        """The letter's own headers and those of the event."""
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
    def of(cls, headers: Headers, data: bytes) -> DeadEvent:
        """Read a letter.

        Raises:
            ProtocolError: It is none of ours.
        """

        try:
            return cls._of(headers, data)
        except ValueError:  # also of texts that cannot be read
            raise ProtocolError(f"not a dead letter: no {PREFIX}Stream, -Sequence and so on that can be read") from None

    @classmethod
    def _of(cls, headers: Headers, data: bytes) -> DeadEvent:
        def fact(name: str) -> str:
            return headers.get(f"{PREFIX}{name}") or ""

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
        has_key = f"{PREFIX}Key" in headers
        return cls(
            handler=fact("Handler"),
            key=unescape_line(fact("Key")) if has_key else None,
            origin=origin,
            subject=fact("Subject"),
            data=data,
            headers=_of_line(fact("Headers")) if fact("Headers") else _of_the_event(headers),
            attempts=int(fact("Attempts") or 0),
            status=status,  # type: ignore[arg-type]  # one of the three
            cause=cause,
            behind=int(fact("Behind")) if fact("Behind") else None,
            redrives=int(fact("Redrives") or 0),
            failed=fact("Failed"),
            partition=int(fact("Partition")) if fact("Partition") else None,
            is_body_omitted=fact("Body-Omitted") == "true",
            apart=int(fact("Apart")) if fact("Apart") else None,
        )

    def shortened(self) -> DeadEvent:
        """The same without the headers and the body of the event, which are somewhere else."""
        return dataclasses.replace(self, data=b"", headers=Headers(), is_body_omitted=True)

    def stripped(self) -> DeadEvent:
        """The same with the first words of its cause, for a server that takes very little at a time."""
        if self.cause is None:
            return self
        return dataclasses.replace(
            self, cause=dataclasses.replace(self.cause, message=self.cause.message[:_FEW_WORDS], trace="")
        )

    def as_block(self) -> bytes:
        """The headers of the event, as they are kept apart."""
        return _as_text(self.headers).encode("utf-8", "surrogateescape")

    def whole(self, kept: bytes) -> DeadEvent:
        """The same with what was kept apart."""
        size = self.apart or 0
        return dataclasses.replace(self, headers=readable(kept[:size]), data=kept[size:], is_body_omitted=False)


def _of_the_event(headers: Headers) -> Headers:
    """Those of a letter that are its event's."""
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
        return f"its text cannot be told: {type(another).__name__}"


def is_too_large(error: BaseException) -> bool:
    """Whether the server refuses a letter for its size: all of it, or its headers, of which it takes 64 KB."""
    return isinstance(error, PayloadTooLarge) or (
        isinstance(error, ServerError) and error.err_code == Code.HEADERS_TOO_LARGE
    )


def letter_subject(app: str, handler: str, key: str | None, origin: Origin) -> str:
    """The subject of the one letter an event can have."""
    return f"dlq.{app}.{handler}.{_key_token(key)}.{origin.tokens}"


def letter_filter(app: str, handler: str | None = None, key: str | None = None) -> str:
    """Every letter of an application, of a handler, or of a key; not what is kept apart."""
    return f"dlq.{app}.{handler or '*'}.{'*' if key is None else _key_token(key)}.*.*.*"


def apart_subject(subject: str) -> str:
    """Where the headers and the body of an event are that is too large for its letter, by the letter's subject."""
    return f"{subject}.event"


def _key_token(key: str | None) -> str:
    # "=" alone is an empty key; no key at all must not share its lane.
    return "=none" if key is None else escape_token(key)


def escape_line(text: str) -> str:
    """Text as one line of ASCII, which a header can carry; reversible."""
    line = text.encode("unicode_escape").decode("ascii")
    return "\\x20" + line[1:] if line[:1] == " " else line  # a header drops blanks in front


def unescape_line(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("unicode_escape")
