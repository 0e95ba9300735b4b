"""Connecting from threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from jetspark.blocking.client import Client
from jetspark.blocking.transport import DriverAuth
from jetspark.core.events import OnEvent
from jetspark.core.options import ConnectKeywords, ConnectOptions, TLSConfig, check_connect
from jetspark.core.reconnect import parse_servers

__all__ = ["connect"]


def connect(
    servers: str | Iterable[str] = "nats://127.0.0.1:4222",
    *,
    auth: DriverAuth = None,
    tls: TLSConfig | None = None,
    on_event: OnEvent | None = None,
    options: ConnectOptions | None = None,
    **overrides: Unpack[ConnectKeywords],
) -> Client:
    """Connect to NATS: ``with connect(...) as nc`` or ``nc = connect(...)``.

    Arguments and errors are those of :func:`jetspark.connect`. ``on_event`` and functions given as ``auth`` are
    called on the connection's thread.
    """
    check_connect(auth, tls, on_event)
    return Client(parse_servers(servers), auth, tls, on_event, ConnectOptions.of(options, overrides))._open()
