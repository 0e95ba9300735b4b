"""Waiting for acknowledgements of single messages with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jetspark.aio.publisher import AckFuture
from jetspark.errors import RequestTimeout

__all__ = ["NOT_SENT", "error_of", "errors_of", "wait_for"]

# A publish that raises one of these has sent nothing. Here that includes cancellation.
NOT_SENT = BaseException


async def wait_for(future: AckFuture, timeout_s: float, what: str) -> None:
    """Wait until the message is stored.

    Raises:
        RequestTimeout: No acknowledgement within ``timeout_s``.
    """
    # Unlike `await future`, asyncio.wait() does not cancel the future when the caller is cancelled.
    if not (await asyncio.wait({future}, timeout=timeout_s))[0]:
        raise RequestTimeout(what, timeout_s)
    future.result()


async def error_of(future: AckFuture) -> Exception | None:
    """Wait for the acknowledgement; return its error, or None when the message is stored."""
    try:
        await future
    except Exception as error:
        return error
    return None


async def errors_of(futures: Sequence[AckFuture], timeout_s: float) -> list[BaseException | None]:
    """Return the error of each future without raising it; None if it succeeded or is still pending at the timeout."""
    if futures:
        await asyncio.wait(futures, timeout=timeout_s)
    return [future.exception() if future.done() else None for future in futures]
