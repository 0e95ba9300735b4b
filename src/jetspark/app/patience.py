"""Asking again while the server does not answer, with asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jetspark.aio import clock
from jetspark.core.backoff import Backoff
from jetspark.errors import JetSparkError
from jetspark.state.patience import PAUSE, Attempts

__all__ = ["PATIENCE_S", "UNLIMITED_S", "patiently"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.app")

# Elections and restarts are over within seconds; a server that has no answer for a minute has none.
PATIENCE_S = 60.0
# Of a worker, which has nothing better to do than to wait: being started again would only add to the load.
UNLIMITED_S = math.inf


def _log(error: JetSparkError) -> None:
    _logger.warning("request to the server failed (%s); retrying", error)


async def patiently(
    ask: Callable[[], Awaitable[T]],
    *,
    patience_s: float = PATIENCE_S,
    pause: Backoff = PAUSE,
    on_wait: Callable[[JetSparkError], None] = _log,
) -> T:
    """Do something that may be done twice, again and again while its error may pass.

    ``on_wait`` is called with each error that is not the last; by default it is logged.

    Raises:
        JetSparkError: What the last attempt raised.
    """
    attempts = Attempts(patience_s, pause)
    attempts.progress(clock.now())
    while True:
        try:
            return await ask()
        except JetSparkError as error:
            wait_s = attempts.wait_s(clock.now()) if error.may_pass else None
            if wait_s is None:
                raise
            on_wait(error)
        await asyncio.sleep(wait_s)
