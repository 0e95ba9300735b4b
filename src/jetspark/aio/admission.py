"""Handing messages to the connection with asyncio, when it has room for them."""

from __future__ import annotations

from collections.abc import Callable

from jetspark.aio.context import DriverContext
from jetspark.aio.transport import WRITE_AT_BYTES
from jetspark.errors import BufferFull

__all__ = ["admit"]


async def admit(context: DriverContext, send: Callable[[], None], timeout_s: float, *, at_once: bool = False) -> None:
    """Call ``send``, which fills the connection's buffer, when there is room; written soon, or ``at_once``.

    Raises:
        TimeoutError: There was no room within ``timeout_s``: nothing was sent.
    """
    link = context.link
    if context.connection.out_bytes >= WRITE_AT_BYTES:
        await link.write_and_wait(link.deadline(timeout_s))
    try:
        send()
    except BufferFull:
        await link.when_there_is_room(send, link.deadline(timeout_s))
    if at_once:
        link.flush()
    elif not link.flush_is_scheduled:
        link.flush_soon()
