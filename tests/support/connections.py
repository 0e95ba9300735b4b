"""A connection that is up, with no socket below it."""

from __future__ import annotations

import json
from typing import Any

from jetspark.core.connection import Connection
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import Server


def connected(**info: Any) -> Connection:
    """To a server that says this of itself."""
    server = Server("a", 4222)
    connection = Connection(ConnectOptions(), [server], inbox="_INBOX.me", jitter=lambda: 0.0)
    connection.begin(server)
    connection.receive_data(f"INFO {json.dumps({'max_payload': 1024, **info})}\r\n".encode())
    connection.login(None)
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    return connection
