"""The result of ``connect`` with asyncio, to be awaited or entered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from jetspark.aio.client import Client
from jetspark.errors import NotAwaited, UsageError

__all__ = ["ConnectResult", "begin"]

_NOT_AWAITED = (
    "the connection is not made yet; write `async with jetspark.connect(...) as nc:` or "
    "`nc = await jetspark.connect(...)`"
)


class ConnectResult:
    """The result of ``connect``: awaitable, and an asynchronous context manager."""

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

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept these mistakes

        def __getattr__(self, name: str) -> NoReturn:
            raise NotAwaited(f"{name}: {_NOT_AWAITED}")

        def __enter__(self) -> NoReturn:
            raise UsageError(f"with: {_NOT_AWAITED}; or use jetspark.blocking, which needs neither")

        def __exit__(self, *exc_info: object) -> None:
            """Required for a ``with`` statement to call ``__enter__``."""


begin = ConnectResult
