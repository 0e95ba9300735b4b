"""Closing a client once, with threads, and at exit the clients that were never closed."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from jetspark.blocking.transport import Transport
from jetspark.blocking.waiter import LONGEST_SLEEP_S, Waiter
from jetspark.core.events import log_closed_at_exit
from jetspark.core.lifecycle import lost
from jetspark.errors import JetSparkError

if TYPE_CHECKING:
    from jetspark.blocking.client import Client

__all__ = ["ClientShutdown"]

_logger = logging.getLogger("jetspark.blocking")

# Longest time by which all clients together may delay the program's exit.
EXIT_S = 5.0


class ClientShutdown:
    """The shutdown of one client: the first caller closes it, later callers wait for that."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ended: Waiter | None = None
        """Resolved when the first ``close`` or ``drain`` is done."""
        self._ender = 0
        """The thread of the first ``close`` or ``drain``."""
        self._has_ended = False
        """The first ``close`` or ``drain`` is done and has raised its error, if any."""

    def watch(self, client: Client) -> None:
        """Close this client at the program's exit, if the program has not."""
        _clients.add(client)

    def give_up(self) -> None:
        """Close the transport after an attempt to open it that failed; else its thread keeps the client alive."""
        self._transport.close()

    def begin(self) -> bool:
        """True for the first caller, which has to close the client; again for its thread after an interrupt."""
        me = threading.get_ident()
        with self._transport.lock:
            if self._has_ended or (self._ended is not None and self._ender != me):
                return False
            self._ended = self._ended or Waiter()  # exists already if this thread's first attempt was interrupted
            self._ender = me
            return True

    def wait(self, deadline: float) -> None:
        """Wait until another thread has closed the client; after the deadline, drop the connection.

        Raises:
            ConnectionLost: The deadline passed, and messages are in doubt.
        """
        transport = self._transport
        assert self._ended is not None
        while not transport.is_over and transport.may_wait() and (left_s := deadline - time.monotonic()) > 0:
            if self._ended.look(min(left_s, LONGEST_SLEEP_S)):
                break
        if transport.is_over:
            transport.close()  # completes a close that was interrupted
            return
        is_late, failure = not self._ended.done(), lost(transport.connection)
        self._end()
        if is_late and failure.unconfirmed_messages:
            raise failure

    def end(self) -> None:
        try:
            self._end()
        finally:  # repeated, because an interrupt can prevent the first call; otherwise the second does nothing
            self._end()

    def _end(self) -> None:
        try:
            self._transport.close()
        finally:
            self._has_ended = True
            if self._ended is not None:
                self._ended.set_result(None)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _close_at_exit() -> None:
    """Close the remaining clients, which sends their messages. Their threads are daemons and still run at this time."""
    deadline = time.monotonic() + EXIT_S
    for client in list(_clients):
        left_s = min(client.options.drain_timeout_s, max(0.0, deadline - time.monotonic()))
        try:
            client.close(left_s)
        except JetSparkError as error:
            log_closed_at_exit(_logger, client.server, error)


atexit.register(_close_at_exit)
