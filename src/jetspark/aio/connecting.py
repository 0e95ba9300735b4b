"""Connecting with asyncio: what ``connect`` returns is awaited, or entered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from jetspark.aio.client import Client
from jetspark.aio.transport import DriverAuth
from jetspark.core.events import OnEvent
from jetspark.core.options import ConnectKeywords, ConnectOptions, TLSConfig, check_connect
from jetspark.core.reconnect import parse_servers
from jetspark.errors import NotAwaited, UsageError

__all__ = ["connect"]


def connect(
    servers: str | Iterable[str] = "nats://127.0.0.1:4222",
    *,
    auth: DriverAuth = None,
    tls: TLSConfig | None = None,
    on_event: OnEvent | None = None,
    options: ConnectOptions | None = None,
    **overrides: Unpack[ConnectKeywords],
) -> _Connecting:
    """Connect to NATS: ``async with jetspark.connect(...) as nc`` or ``nc = await jetspark.connect(...)``.

    Args:
        servers: One URL or several; the first that answers is used, the others when it goes away.
        auth: :class:`UserPassword`, :class:`Token`, :class:`NKey`, :class:`Credentials`, or a function (plain or
            async) that returns one; a function is called for each connection attempt, so secrets can rotate.
        tls: How to speak TLS; the default does so when the server or the URL (``tls://``) wants it.
        on_event: Called with each :class:`ConnectionEvent`, on the event loop; keep it quick.
        options: A :class:`ConnectOptions`; its fields are also accepted as keywords, such as ``name="billing"``.

    Raises:
        NoServersAvailable: No server answered; each is tried once.
        AuthenticationFailed: The servers refused the credentials.
        ConfigError: A URL, an option or the credentials make no sense.
    """
    chosen = ConnectOptions.of(options, overrides)
    check_connect(auth, tls, on_event)
    parsed = parse_servers(servers)
    return _Connecting(lambda: Client(parsed, auth, tls, on_event, chosen)._open())


_NOT_AWAITED = (
    "the connection is not made yet; write `async with jetspark.connect(...) as nc:` or "
    "`nc = await jetspark.connect(...)`"
)


class _Connecting:
    """What ``connect`` returns: awaitable, and an asynchronous context manager."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Client]]) -> None:
        self._start = start
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._start().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._start()
        return await self._client.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # a type checker finds the mistake by itself, as long as it does not see these

        def __getattr__(self, name: str) -> NoReturn:
            raise NotAwaited(f"{name}: {_NOT_AWAITED}")

        def __enter__(self) -> NoReturn:
            raise UsageError(f"with: {_NOT_AWAITED}; or use jetspark.blocking, which needs neither")

        def __exit__(self, *exc_info: object) -> None:
            """So that the statement gets as far as the line above."""
