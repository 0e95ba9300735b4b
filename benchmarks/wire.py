"""NATS by hand on a plain socket: what the bare contenders and the helper process are made of."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from jetspark.errors import ConfigError, ConnectionLost

__all__ = ["READ_BYTES", "Blast", "await_pong", "dial"]

READ_BYTES = 256 << 10

# Past some ten thousand bytes a larger write gained nothing measurable; this is what the clients write at once too.
CHUNK_BYTES = 64 << 10


def dial(url: str, *, timeout_s: float = 120.0) -> tuple[socket.socket, dict[str, Any]]:
    """A logged-in connection, and what the server said of itself. No TLS, no authentication."""
    parts = urlsplit(url)
    if parts.scheme != "nats" or parts.username is not None or not parts.hostname:
        raise ConfigError(f"url={url!r}: expected nats://host:port of a server without authentication and TLS")
    try:
        connection = socket.create_connection((parts.hostname, parts.port or 4222), timeout=timeout_s)
    except OSError as error:
        raise ConnectionLost(f"{url}: {error}") from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = b""
        while not greeting.endswith(b"\r\n"):
            greeting += _some(connection)
        info: dict[str, Any] = json.loads(greeting.removeprefix(b"INFO "))
        connection.sendall(
            b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"lang":"python-bare","version":"0"}\r\nPING\r\n'
        )
        await_pong(connection)
    except BaseException:
        connection.close()
        raise
    return connection, info


def await_pong(connection: socket.socket) -> None:
    """Read until the answer to our last PING, on a connection that receives no messages."""
    tail = b""
    while not tail.endswith(b"PONG\r\n"):
        # A PING of the server's own may come in between; it forgives two unanswered ones, four minutes.
        tail = tail[-16:] + _some(connection)
        if b"-ERR" in tail:
            raise ConnectionLost(tail.decode(errors="replace").strip())


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(READ_BYTES)
    if not data:
        raise ConnectionLost("the server closed the connection")
    return data


class Blast:
    """Many equal PUB frames, framed beforehand, so that sending them costs next to nothing but the system call."""

    def __init__(self, subject: str, payload: bytes) -> None:
        self._frame = b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload)
        self._per_chunk = max(1, CHUNK_BYTES // len(self._frame))
        self._chunk = self._frame * self._per_chunk

    def send(self, connection: socket.socket, count: int) -> None:
        chunks, rest = divmod(count, self._per_chunk)
        for _ in range(chunks):
            connection.sendall(self._chunk)
        connection.sendall(self._frame * rest)
