"""Asking a server again while that may help, each time on a connection that is open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from jetspark.blocking import JetStream
from jetspark.errors import ConnectionClosed, JetSparkError, NoServersAvailable
from jetspark.spark.connections import jetstream_for
from jetspark.spark.options import Connecting

__all__ = ["PATIENCE_S", "patiently", "will_pass"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.spark")

# Elections and restarts are over within seconds. A query that starts while nothing answers should say so soon.
PATIENCE_S = 30.0
PAUSE_S = 0.25
# Where nothing listens, and nothing ever did, the address is wrong or nobody has started the server; but it may just be
# starting.
FIRST_CONTACT_S = 2.0


def will_pass(error: BaseException) -> bool:
    """Whether asking again may help. The next attempt gets another connection if this one was closed."""
    return isinstance(error, JetSparkError) and (error.may_pass or isinstance(error, ConnectionClosed))


def patiently(
    options: Connecting,
    ask: Callable[[JetStream], T],
    *,
    patience_s: float = PATIENCE_S,
    is_first_contact: bool = False,
) -> T:
    """Ask the server, and again while that may help; each time on a connection that is open.

    ``is_first_contact`` is for drivers that have not reached a server yet: one that is not there is given up soon.

    Raises:
        JetSparkError: What the last attempt raised.
    """
    started = time.monotonic()
    while True:
        try:
            return ask(jetstream_for(options))
        except JetSparkError as error:
            is_nobody_there = is_first_contact and isinstance(error, NoServersAvailable)
            patience = min(patience_s, FIRST_CONTACT_S) if is_nobody_there else patience_s
            if not will_pass(error) or time.monotonic() - started >= patience:
                if is_nobody_there:
                    # Spark shows the traceback as the error. How connecting works inside is not what is wrong.
                    raise error.with_traceback(None) from None
                raise
            _logger.info("asking again: %s", error)
            time.sleep(PAUSE_S)
