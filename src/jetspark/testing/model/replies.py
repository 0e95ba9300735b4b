"""All answers of the server to a publisher, byte for byte.

Four kinds of JSON and two of status lines: the pub ack (with ``batch`` and ``count`` where it ends a batch), the error
in the shape of a pub ack, fast ingest's ``ack``, ``gap`` and ``err``, the advisory about an abandoned batch, and the
headers-only 503 of a subject without subscribers. The server writes most of them by hand rather than with a JSON
library, which is why there is a blank in ``"duplicate": true`` and why batch ids are quoted the way Go quotes.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass

from jetspark.core.headers import Headers, Status

__all__ = [
    "ADVISORIES",
    "ApiError",
    "Delivery",
    "abandoned",
    "error_ack",
    "flow_ack",
    "flow_error",
    "flow_gap",
    "go_duration",
    "is_about_storing",
    "no_responders",
    "pub_ack",
    "time_text",
]

ADVISORIES = "$JS.EVENT.ADVISORY."

_NO_RESPONDERS = Status(503)
_GO_ESCAPES = {
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
    '"': '\\"',
    "\\": "\\\\",
}


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message the server sends to the subscribers of ``subject``."""

    subject: str
    data: bytes
    headers: Headers | None = None
    status: Status | None = None
    """The status in the first line of the header block, as in ``CoreMessage.status``."""
    shown_subject: str = ""
    """The stored subject of a consumer's message, which is routed by ``subject``. Empty if both are the same."""
    reply: str = ""
    """The subject for the receiver's answer."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """A refusal, with its numbers and text."""

    code: int
    err_code: int
    description: str

    @property
    def json(self) -> str:
        return f'{{"code":{self.code},"err_code":{self.err_code},"description":{json.dumps(self.description)}}}'


def pub_ack(stream: str, sequence: int, *, is_duplicate: bool = False, batch: str = "", count: int = 0) -> bytes:
    duplicate = ',"duplicate": true' if is_duplicate else ""
    end = f',"batch":{_go_quoted(batch)},"count":{count}' if batch else ""
    return f'{{"stream":"{stream}","seq":{sequence}{duplicate}{end}}}'.encode()


def error_ack(stream: str, error: ApiError) -> bytes:
    # The server does not name the batch here.
    return f'{{"error":{error.json},"stream":"{stream}","seq":0}}'.encode()


def flow_ack(sequence: int, messages: int) -> bytes:
    return f'{{"type":"ack","seq":{sequence},"msgs":{messages}}}'.encode()


def flow_gap(first_missing: int, received: int) -> bytes:
    return f'{{"type":"gap","last_seq":{first_missing},"seq":{received}}}'.encode()


def flow_error(sequence: int, error: ApiError) -> bytes:
    return f'{{"type":"err","seq":{sequence},"error":{error.json}}}'.encode()


def is_about_storing(said: Delivery) -> bool:
    """True if the answer confirms a stored message, which needs a majority of the replicas."""
    is_flow = said.data.startswith(b'{"type":"ack"') and not said.data.startswith(b'{"type":"ack","seq":0,')
    return is_flow or said.data.startswith(b'{"stream"')


def no_responders(subject: str, reply: str) -> Delivery:
    return Delivery(reply, b"", Headers({"Nats-Subject": subject}), _NO_RESPONDERS)


def abandoned(stream: str, batch: str, reason: str, *, number: int, now: float) -> Delivery:
    """The advisory about an abandoned atomic batch. The server's ids are random; these are counted."""
    fields = {
        "type": "io.nats.jetstream.advisory.v1.stream_batch_abandoned",
        "id": f"{number:022d}",
        "timestamp": time_text(now),
        "stream": stream,
        "batch": batch,
        "reason": reason,
    }
    data = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    return Delivery(f"{ADVISORIES}STREAM.BATCH_ABANDONED.{stream}", data)


def time_text(now: float) -> str:
    return datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat().replace("+00:00", "Z")


def go_duration(seconds: float) -> str:
    """A duration in Go's form, ``1h0m5s``; whole seconds only."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _go_quoted(text: str) -> str:
    # Not JSON: an unprintable character becomes \x7f or \U0010fffd, which no JSON parser reads.
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return f'"{"".join(map(_go_escaped, text))}"'


def _go_escaped(character: str) -> str:
    if (escape := _GO_ESCAPES.get(character)) is not None:
        return escape
    if character.isprintable():
        return character
    number = ord(character)
    if number < 0x80:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
