"""The future of ``publish_async`` with asyncio, and waiting for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from jetspark.aio.runner import MachineRunner
from jetspark.aio.transport import Transport
from jetspark.errors import RequestTimeout
from jetspark.jetstream.info import PubAck
from jetspark.publish.window import HandleFacts, PublishWindow

__all__ = ["NOT_SENT", "AckFuture", "AckFutures", "error_of", "errors_of", "wait_for"]

_logger = logging.getLogger("jetspark.aio")


class AckFuture(asyncio.Future[PubAck], HandleFacts):
    """A pending acknowledgement: await it for the :class:`~jetspark.PubAck`.

    Awaiting raises the server's error, or the reason why the outcome is unknown: see :class:`WindowedPublisher`. An
    error that was never retrieved is logged at ERROR to ``jetspark.aio`` when the future is garbage-collected.
    Cancelling the future does not recall the message.
    """

    # It has no __init__ and no __del__: with both, making and dropping one took 2.0 µs in place of 0.5.
    __slots__ = HandleFacts.SLOTS

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        self.__class__ = _FailedAckFuture


class _FailedAckFuture(AckFuture):
    # asyncio also logs exceptions that were never retrieved, each with a stack trace; a lost session can cause
    # thousands of them.
    __slots__ = ()

    def __del__(self) -> None:
        if self._log_traceback:
            self._log_traceback = False
            self.window.log_overlooked(_logger, self.exception())


class AckFutures:
    """The futures of one window."""

    def __init__(self, transport: Transport, runner: MachineRunner[PublishWindow]) -> None:
        self.new: Callable[[], AckFuture] = partial(AckFuture, loop=transport.loop)

    def call_back(self) -> None:
        """Nothing to do: the event loop runs the callbacks of asyncio futures."""


# ---- waiting ---------------------------------------------------------------------------------------------------------


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
