"""The NATS client protocol, outgoing: a function or a template a frame. Arguments are already validated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = [
    "HPUB",
    "LINE_ENDS",
    "PING",
    "PONG",
    "PUB",
    "Published",
    "connect",
    "published",
    "sub",
    "unsub",
]

PING = b"PING\r\n"
PONG = b"PONG\r\n"

# The address is the subject, or the subject, a space and the reply subject.
PUB = b"PUB %b %d\r\n%b\r\n"
HPUB = b"HPUB %b %d %d\r\n%b%b\r\n"

# Sizes of messages up to this one are remembered as text.
MAX_KNOWN_SIZE = 4096


class _LineEnds(dict[int, bytes]):
    def __missing__(self, size: int) -> bytes:
        end = b"%d\r\n" % size
        if size <= MAX_KNOWN_SIZE:
            self[size] = end
        return end


# By payload size: how a control line ends. Making the number's text is half of what a frame costs: joining its parts
# takes 0.08 us with a size that is known, 0.13 us by the template PUB.
LINE_ENDS = _LineEnds()


def connect(fields: Mapping[str, object]) -> bytes:
    return b"CONNECT %b\r\n" % json.dumps(fields, separators=(",", ":")).encode()


def sub(subject: str, queue: str, sid: int) -> bytes:
    if queue:
        return f"SUB {subject} {queue} {sid}\r\n".encode()
    return f"SUB {subject} {sid}\r\n".encode()


def unsub(sid: int, max_messages: int = 0) -> bytes:
    """Without ``max_messages`` at once; with it, after that many have been delivered since SUB."""
    return b"UNSUB %d %d\r\n" % (sid, max_messages) if max_messages else b"UNSUB %d\r\n" % sid


class Published(NamedTuple):
    """One message of ours, as it stands among others."""

    frame: bytes
    subject: bytes
    reply: bytes
    size: int
    """Headers and payload: what counts for the server's ``max_payload``."""


def published(data: bytes) -> Iterator[Published]:
    """The messages of PUB and HPUB frames that we have built ourselves."""
    begin = 0
    while begin < len(data):
        end_of_line = data.index(b"\r\n", begin)
        operation, subject, *arguments = data[begin:end_of_line].split(b" ")
        size = int(arguments[-1])
        has_reply = len(arguments) > (2 if operation == b"HPUB" else 1)
        end = end_of_line + 2 + size + 2
        yield Published(data[begin:end], subject, arguments[0] if has_reply else b"", size)
        begin = end
