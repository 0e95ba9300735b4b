"""Closing a client once, with asyncio, and the warning for clients that were never closed."""

from __future__ import annotations

import asyncio
import atexit
import logging
import weakref
from typing import TYPE_CHECKING

from jetspark.aio.transport import Transport
from jetspark.core.events import log_never_closed
from jetspark.core.lifecycle import lost

if TYPE_CHECKING:
    from jetspark.aio.client import Client

__all__ = ["ClientShutdown"]

_logger = logging.getLogger("jetspark.aio")


class ClientShutdown:
    """The shutdown of one client: the first caller closes it, later callers wait for that."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._is_watched = False
        """The client has connected, and its unsent messages have not been reported."""
        self._ended: asyncio.Future[None] | None = None
        """Resolved when the first ``close`` or ``drain`` is done."""

    def watch(self, client: Client) -> None:
        """Warn about unsent messages if the program never closes this client."""
        self._is_watched = True
        _watched.add(self)

    def give_up(self) -> None:
        """Close the connection after a failed attempt to open it."""
        self._transport.connection.close()

    def begin(self) -> bool:
        """True for the first caller, which has to close the client."""
        if self._ended is not None:
            return False
        self._ended = asyncio.get_running_loop().create_future()
        return True

    async def wait(self, deadline: float) -> None:
        """Wait until another task has closed the client; after the deadline, drop the connection.

        Raises:
            ConnectionLost: The deadline passed, and messages are in doubt.
        """
        assert self._ended is not None
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self._ended)
        except TimeoutError:
            failure = lost(self._transport.connection)
            self.end()
            if failure.unconfirmed_messages:
                raise failure from None

    def end(self) -> None:
        self._transport.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def log_unsent(self) -> None:
        """Warn if the client was never closed and messages are unsent; its loop may have ended."""
        connection, is_watched = self._transport.connection, self._is_watched
        self._is_watched = False
        if is_watched and not connection.is_closed and (unsent := self._transport.unsent()) != (0, 0):
            log_never_closed(_logger, connection.server, *unsent)

    def __del__(self) -> None:
        self.log_unsent()  # not through _watched: garbage collection clears weak references first


_watched: weakref.WeakSet[ClientShutdown] = weakref.WeakSet()


def _log_at_exit() -> None:
    for closing in list(_watched):
        closing.log_unsent()


atexit.register(_log_at_exit)
