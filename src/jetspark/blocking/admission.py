"""Handing messages to the connection from threads, when it has room for them."""

from __future__ import annotations

from collections.abc import Callable

from jetspark.blocking.context import DriverContext
from jetspark.blocking.transport import WRITE_AT_BYTES
from jetspark.errors import BufferFull

__all__ = ["admit"]


def admit(context: DriverContext, send: Callable[[], None], timeout_s: float, *, at_once: bool = False) -> None:
    """Call ``send``, which fills the connection's buffer, when there is room; written soon, or ``at_once``.

    Raises:
        TimeoutError: There was no room within ``timeout_s``: nothing was sent.
    """
    link = context.link
    with link.lock:
        if context.connection.out_bytes >= WRITE_AT_BYTES:
            link.write_and_wait(link.deadline(timeout_s))
        try:
            send()
        except BufferFull:
            link.when_there_is_room(send, link.deadline(timeout_s))
        if at_once:
            link.flush()
        else:
            link.flush_soon()
