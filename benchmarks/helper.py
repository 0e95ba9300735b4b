"""The other end of a workload, in a process of its own and the same for every contender: a bare feeder and responder.

* A message ``<subject> <count> <size>`` on ``bench.feed`` makes it publish ``count`` messages there, as fast as it can.
* A request on ``bench.echo`` is answered with its own payload.

``python -m benchmarks.helper URL`` prints a line when it is ready and ends when its standard input does.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from benchmarks.wire import READ_BYTES, Blast, await_pong, dial
from benchmarks.workload import payload_of

__all__ = ["ECHO_SUBJECT", "FEED_SUBJECT"]

FEED_SUBJECT = "bench.feed"
ECHO_SUBJECT = "bench.echo"


def serve(connection: socket.socket) -> None:
    connection.sendall(b"SUB %b 1\r\nSUB %b 2\r\nPING\r\n" % (FEED_SUBJECT.encode(), ECHO_SUBJECT.encode()))
    await_pong(connection)
    print("ready", flush=True)
    connection.settimeout(None)
    # Framed once: the warm-up before each measurement pays for it.
    blasts: dict[tuple[bytes, bytes], Blast] = {}
    data = b""
    while True:
        end_of_line = data.find(b"\r\n")
        if end_of_line < 0:
            received = connection.recv(READ_BYTES)
            if not received:
                return
            data += received
            continue
        line = data[:end_of_line].split(b" ")
        if line[0] != b"MSG":
            if line[0] == b"PING":
                connection.sendall(b"PONG\r\n")
            data = data[end_of_line + 2 :]
            continue
        end = end_of_line + 2 + int(line[-1])
        while len(data) < end + 2:
            data += connection.recv(READ_BYTES)
        payload, data = data[end_of_line + 2 : end], data[end + 2 :]
        if line[2] == b"2":
            connection.sendall(b"PUB %b %d\r\n%b\r\n" % (line[3], len(payload), payload))
        else:
            subject, count, size = payload.split(b" ")
            if (subject, size) not in blasts:
                blasts.clear()
                blasts[subject, size] = Blast(subject.decode(), payload_of(int(size)))
            blasts[subject, size].send(connection, int(count))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    opened, _ = dial(sys.argv[1])
    # A waiting thread takes no time from the answering one.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(opened)
