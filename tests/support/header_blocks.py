"""Blocks of headers that the server stores and that are none, or none that could be sent again; and who writes them."""

from __future__ import annotations

import socket

__all__ = ["BLOCKS", "publish_block"]

_BEGIN = b"NATS/1.0\r\n"
BLOCKS = {
    "plain": _BEGIN + b"A: b\r\n\r\n",
    "name-with-umlauts": _BEGIN + "Größe: 1\r\n\r\n".encode(),
    "name-with-a-blank": _BEGIN + b"Bad Name: 1\r\n\r\n",
    "no-colon": _BEGIN + b"garbage\r\nA: b\r\n\r\n",
    "no-name": _BEGIN + b": x\r\n\r\n",
    "latin-1": _BEGIN + b"X: \xff\xfe\r\n\r\n",
    "not-closed": _BEGIN + b"X: y\r\n",
    "carriage-return": _BEGIN + b"X: a\rb\r\n\r\n",
    "line-feed": _BEGIN + b"X: a\nb\r\n\r\n",
    "continued": _BEGIN + b"X: a\r\n b\r\n\r\n",
    "another-protocol": b"HTTP/1.1\r\nX: y\r\n\r\n",
    "status-204": b"NATS/1.0 204 EOB\r\n\r\n",
    "status-404": b"NATS/1.0 404 No Messages\r\n\r\n",
    "status-409": b"NATS/1.0 409 Consumer Deleted\r\n\r\n",
    "of-a-letter": _BEGIN + b"Jetspark-Dlq-Behind: x\r\nJetspark-Dlq-Partition: 3\r\nJetspark-Origin-A: b\r\n\r\n",
    "of-a-letter-in-lower-case": _BEGIN + b"jetspark-dlq-status: closed\r\njetspark-dlq-sequence: x\r\n\r\n",
}


def publish_block(port: int, subject: str, block: bytes, data: bytes) -> None:
    """Publish a message with such a block; returns when the server has it."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        read = connection.makefile("rb")
        read.readline()  # INFO
        connection.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
        to = subject.encode(errors="surrogateescape")
        connection.sendall(b"HPUB %b %d %d\r\n" % (to, len(block), len(block) + len(data)))
        connection.sendall(block + data + b"\r\nPING\r\n")
        assert read.readline() == b"PONG\r\n"
