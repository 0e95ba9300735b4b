"""Waiting for acknowledgements of single messages with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jetspark.aio.publisher import AckFuture
from jetspark.errors import RequestTimeout

__all__ = ["NOT_SENT", "error_of", "errors_of", "wait_for"]

# A publish that ends with one of these has sent nothing, also when it was cancelled.
NOT_SENT = BaseException


async def wait_for(future: AckFuture, timeout_s: float, what: str) -> None:
    """Until the message is stored.

    Raises:
        RequestTimeout: There was no acknowledgement in time.
    """
    # Unlike `await future`, this does not cancel it when we are cancelled, and so does not forget it.
    if not (await asyncio.wait({future}, timeout=timeout_s))[0]:
        raise RequestTimeout(what, timeout_s)
    future.result()


async def error_of(future: AckFuture) -> Exception | None:
    """Wait, and return what went wrong, if anything did."""
    try:
        await future
    except Exception as error:
        return error
    return None


async def errors_of(futures: Sequence[AckFuture], timeout_s: float) -> list[BaseException | None]:
    """What went wrong with each, as far as it is known after ``timeout_s``; nobody is made to raise it."""
    if futures:
        await asyncio.wait(futures, timeout=timeout_s)
    return [future.exception() if future.done() else None for future in futures]
