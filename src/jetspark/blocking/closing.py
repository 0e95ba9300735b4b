"""The end of a client, with threads: who brings it about, who waits for it, and what becomes of one nobody ended."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from jetspark.blocking.transport import Link
from jetspark.blocking.waiter import LONGEST_SLEEP_S, Waiter
from jetspark.core.closing import lost
from jetspark.core.events import log_closed_at_exit
from jetspark.errors import JetSparkError

if TYPE_CHECKING:
    from jetspark.blocking.client import Client

__all__ = ["Closing"]

_logger = logging.getLogger("jetspark.blocking")

# Longest time that all clients together may keep a program from ending.
EXIT_S = 5.0


class Closing:
    """The end of one client."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._ended: Waiter | None = None
        """Done when the ``close`` or ``drain`` that came first is."""
        self._ender = 0
        """The thread of that one."""
        self._has_ended = False
        """That one has done its part; what there was to tell, it told."""

    def watch(self, client: Client) -> None:
        """It is open: at the program's end it is closed, if nobody has done so."""
        _clients.add(client)

    def give_up(self) -> None:
        """It could not be opened, or somebody was interrupted in it: its thread would keep it alive."""
        self._link.close()

    def begin(self) -> bool:
        """Whether the caller is the first to end the client, and so the one to do it."""
        me = threading.get_ident()
        with self._link.lock:
            if self._has_ended or (self._ended is not None and self._ender != me):
                return False
            self._ended = self._ended or Waiter()  # when it is ours, it was interrupted
            self._ender = me
            return True

    def wait(self, deadline: float) -> None:
        """Another thread ends the client, or has: wait for it, but not for longer than this one may take.

        Raises:
            ConnectionLost: It took longer, and messages are in doubt.
        """
        link = self._link
        assert self._ended is not None
        while not link.is_over and link.may_wait() and (left_s := deadline - time.monotonic()) > 0:
            if self._ended.look(min(left_s, LONGEST_SLEEP_S)):
                break
        if link.is_over:
            link.close()  # the first one may have been interrupted
            return
        is_late, failure = not self._ended.done(), lost(link.connection)
        self._end()
        if is_late and failure.unconfirmed_messages:
            raise failure

    def end(self) -> None:
        try:
            self._end()
        finally:  # An interrupt can be in the way of one of them; when the first is done, the second has nothing to do.
            self._end()

    def _end(self) -> None:
        try:
            self._link.close()
        finally:
            self._has_ended = True
            if self._ended is not None:
                self._ended.set_result(None)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _close_at_exit() -> None:
    """Send what clients that nobody closed have accepted. Their threads are daemons, which still run at this time."""
    deadline = time.monotonic() + EXIT_S
    for client in list(_clients):
        left_s = min(client.options.drain_timeout_s, max(0.0, deadline - time.monotonic()))
        try:
            client.close(left_s)
        except JetSparkError as error:
            log_closed_at_exit(_logger, client.server, error)


atexit.register(_close_at_exit)
