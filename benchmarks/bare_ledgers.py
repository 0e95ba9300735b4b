"""A command by hand on plain sockets: three ways through the server, the guard, and nothing else.

The worker trusts its requests, knows where each ledger ends, decides nothing and checks nothing. So this is the cost of
the network, the server and two processes for a command, in any language, and no worker can answer faster.

``python -m benchmarks.bare_ledgers URL`` is the worker, which prints a line when it serves and ends when its
standard input does.
"""

from __future__ import annotations

import re
import select
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.wire import READ_BYTES, dial
from jetspark.errors import ConnectionLost

__all__ = ["bare_caller"]

_SUBJECT = "bare-ledgers"
_read_frame = re.compile(rb"MSG (\S+) \d+ (?:(\S+) )?(\d+)\r\n").match
_read_sequence = re.compile(rb'"seq": ?(\d+)').search


class _Frame(NamedTuple):
    subject: str
    reply: str
    data: bytes


class _Socket:
    """Reads one message after the other."""

    def __init__(self, url: str, *filters: str) -> None:
        self.connection, _ = dial(url)
        self._received = b""
        for number, filter in enumerate(filters):
            self.connection.sendall(f"SUB {filter} {number}\r\n".encode())

    def fileno(self) -> int:
        return self.connection.fileno()

    def receive(self) -> _Frame:
        """
        Raises:
            ConnectionLost: The connection has ended.
        """
        while True:
            head = _read_frame(self._received)
            if head is not None and len(self._received) >= head.end() + int(head[3]) + 2:
                end = head.end() + int(head[3])
                data, self._received = self._received[head.end() : end], self._received[end + 2 :]
                return _Frame(head[1].decode(), (head[2] or b"").decode(), data)
            if self._received.startswith(b"PING\r\n"):
                self._received = self._received[6:]
                self.connection.sendall(b"PONG\r\n")
                continue
            data = self.connection.recv(READ_BYTES)
            if not data:
                raise ConnectionLost("the server closed the connection")
            self._received += data


def bare_caller(url: str, payload: bytes) -> tuple[socket.socket, Callable[[int], None]]:
    """A connection, and a function that has one entry made in the ledger of a number."""
    replies = f"_INBOX.{_SUBJECT}.caller"
    caller = _Socket(url, replies)

    def call(ledger: int) -> None:
        request = f"PUB {_SUBJECT}.l{ledger} {replies} {len(payload)}\r\n".encode()
        caller.connection.sendall(request + payload + b"\r\n")
        answer = caller.receive().data
        assert _read_sequence(answer), answer

    return caller.connection, call


def _serve(url: str) -> None:
    acks = f"_INBOX.{_SUBJECT}.worker"
    worker, lasts = _Socket(url, f"{_SUBJECT}.*", acks), dict[str, int]()
    with worker.connection as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(READ_BYTES) == b"PONG\r\n"
        print("ready", flush=True)
        while sys.stdin not in select.select([worker, sys.stdin], [], [])[0]:
            request = worker.receive()
            ledger = request.subject.removeprefix(f"{_SUBJECT}.")
            guard = f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {lasts.get(ledger, 0)}\r\n\r\n".encode()
            size = len(guard) + len(request.data)
            head = f"HPUB bench-ledgers.{ledger} {acks} {len(guard)} {size}\r\n".encode()
            connection.sendall(head + guard + request.data + b"\r\n")
            ack = worker.receive().data
            found = _read_sequence(ack)
            assert found, ack
            lasts[ledger] = int(found[1])
            connection.sendall(f"PUB {request.reply} {len(ack)}\r\n".encode() + ack + b"\r\n")


if __name__ == "__main__":
    _serve(sys.argv[1])
