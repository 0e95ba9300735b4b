"""Requests to a running server, over HTTP (its monitoring pages) and over TCP (its greeting)."""

from __future__ import annotations

import contextlib
import http.client
import socket

__all__ = ["fetch_page", "is_greeted", "is_healthy"]

MONITOR_TIMEOUT_S = 3.0
GREETING_TIMEOUT_S = 2.0


def fetch_page(port: int, page: str) -> tuple[int, bytes]:
    """HTTP status and body of a monitoring page."""
    # Not urllib: that would send a question to 127.0.0.1 through the proxy named in HTTP_PROXY.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MONITOR_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", page)
        answer = connection.getresponse()
        return answer.status, answer.read()


def is_healthy(port: int) -> bool:
    """True if the server reports so on its monitoring port."""
    try:
        return fetch_page(port, "/healthz")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def is_greeted(host: str, port: int, *, speaks_first: bool) -> bool:
    """True if the server accepts a client now; a server that speaks first must send its INFO."""
    try:
        with socket.create_connection((host, port), timeout=GREETING_TIMEOUT_S) as client:
            return not speaks_first or client.recv(5) == b"INFO "
    except OSError:
        return False
