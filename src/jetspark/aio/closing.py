"""The end of a client, with asyncio: who brings it about, who waits for it, and what is said of one nobody ended."""

from __future__ import annotations

import asyncio
import atexit
import logging
import weakref
from typing import TYPE_CHECKING

from jetspark.aio.transport import Link
from jetspark.core.closing import lost
from jetspark.core.events import log_never_closed

if TYPE_CHECKING:
    from jetspark.aio.client import Client

__all__ = ["Closing"]

_logger = logging.getLogger("jetspark.aio")


class Closing:
    """The end of one client."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._is_watched = False
        """Connected once, and nobody was told what is lost with it."""
        self._ended: asyncio.Future[None] | None = None
        """Done when the ``close`` or ``drain`` that came first is."""

    def watch(self, client: Client) -> None:
        """It is open: somebody has to close it."""
        self._is_watched = True
        _watched.add(self)

    def give_up(self) -> None:
        """It could not be opened."""
        self._link.connection.close()

    def begin(self) -> bool:
        """Whether the caller is the first to end the client, and so the one to do it."""
        if self._ended is not None:
            return False
        self._ended = asyncio.get_running_loop().create_future()
        return True

    async def wait(self, deadline: float) -> None:
        """Another task ends the client: wait for it, but not for longer than this one may take.

        Raises:
            ConnectionLost: It took longer, and messages are in doubt.
        """
        assert self._ended is not None
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self._ended)
        except TimeoutError:
            failure = lost(self._link.connection)
            self.end()
            if failure.unconfirmed_messages:
                raise failure from None

    def end(self) -> None:
        self._link.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def tell_unsent(self) -> None:
        """The client is gone, or its loop: if nobody closed it, say what that has cost."""
        connection, is_watched = self._link.connection, self._is_watched
        self._is_watched = False
        if is_watched and not connection.is_closed and (unsent := self._link.unsent()) != (0, 0):
            log_never_closed(_logger, connection.server, *unsent)

    def __del__(self) -> None:
        self.tell_unsent()  # not by the set: a collector forgets weak references first


_watched: weakref.WeakSet[Closing] = weakref.WeakSet()


def _tell_at_exit() -> None:
    for closing in list(_watched):
        closing.tell_unsent()


atexit.register(_tell_at_exit)
