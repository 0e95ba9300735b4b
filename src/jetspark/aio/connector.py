"""Connecting with asyncio."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from jetspark.aio.client import Client
from jetspark.aio.connect_result import ConnectResult, begin
from jetspark.aio.transport import DriverAuth
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
) -> ConnectResult:
    """Connect to NATS: ``async with jetspark.connect(...) as nc`` or ``nc = await jetspark.connect(...)``.

    Args:
        servers: One URL or several. The first that answers is used; the others are for reconnects.
        auth: :class:`UserPassword`, :class:`Token`, :class:`NKey`, :class:`Credentials`, or a function (plain or
            async) that returns one; a function is called for each connection attempt, so secrets can rotate.
        tls: TLS settings; by default TLS is used when the server or the URL (``tls://``) requires it.
        on_event: Called with each :class:`ConnectionEvent`, on the event loop; keep it quick.
        options: A :class:`ConnectOptions`; its fields are also accepted as keywords, such as ``name="billing"``.

    Raises:
        NoServersAvailable: No server answered; each is tried once.
        AuthenticationFailed: The servers refused the credentials.
        ConfigError: A URL, an option or the credentials are invalid.
    """
    chosen = ConnectOptions.of(options, overrides)
    check_connect(auth, tls, on_event)
    parsed = parse_servers(servers)
    return begin(lambda: Client(parsed, auth, tls, on_event, chosen)._open())
