"""The NATS client protocol, outgoing: one function a frame. Arguments are already validated.

``PUB`` and ``HPUB`` are written by :meth:`jetspark.core.connection.Connection.publish`, where the subject's prefix is
cached; the formats live here so that the wire is described in one place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

__all__ = [
    "HPUB",
    "PING",
    "PONG",
    "PUB",
    "connect",
    "hpub",
    "pub",
    "sub",
    "unsub",
]

PING = b"PING\r\n"
PONG = b"PONG\r\n"

# %-formatting of bytes measured fastest for small payloads (0.20 us against 0.27 us for b"".join of the parts).
PUB = b"PUB %b %d\r\n%b\r\n"
HPUB = b"HPUB %b %d %d\r\n%b%b\r\n"


def connect(fields: Mapping[str, object]) -> bytes:
    return b"CONNECT %b\r\n" % json.dumps(fields, separators=(",", ":")).encode()


def pub(address: bytes, data: bytes | bytearray | memoryview) -> bytes:
    """``address`` is the subject, or the subject, a space and the reply subject."""
    return PUB % (address, len(data), data)


def hpub(address: bytes, headers: bytes, data: bytes | bytearray | memoryview) -> bytes:
    return HPUB % (address, len(headers), len(headers) + len(data), headers, data)


def sub(subject: str, queue: str, sid: int) -> bytes:
    if queue:
        return f"SUB {subject} {queue} {sid}\r\n".encode()
    return f"SUB {subject} {sid}\r\n".encode()


def unsub(sid: int, max_messages: int = 0) -> bytes:
    """Without ``max_messages`` at once; with it, after that many have been delivered since SUB."""
    return b"UNSUB %d %d\r\n" % (sid, max_messages) if max_messages else b"UNSUB %d\r\n" % sid
