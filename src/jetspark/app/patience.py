"""Asking again while the server does not answer, with asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jetspark.aio import clock
from jetspark.errors import JetSparkError
from jetspark.state.patience import Attempts

__all__ = ["PATIENCE_S", "patiently"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.app")

# Elections and restarts are over within seconds; a server that has no answer for a minute has none.
PATIENCE_S = 60.0


async def patiently(ask: Callable[[], Awaitable[T]], *, patience_s: float = PATIENCE_S) -> T:
    """Do something that may be done twice, again and again while its error may pass.

    Raises:
        JetSparkError: What the last attempt raised.
    """
    attempts = Attempts(patience_s)
    attempts.progress(clock.now())
    while True:
        try:
            return await ask()
        except JetSparkError as error:
            wait_s = attempts.wait_s(clock.now()) if error.may_pass else None
            if wait_s is None:
                raise
            _logger.warning("asking again: %s", error)
        await asyncio.sleep(wait_s)
