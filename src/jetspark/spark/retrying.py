"""Asking a server again while that may help, each time on a connection that is open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from jetspark.blocking import JetStream
from jetspark.core.backoff import Backoff
from jetspark.errors import ConnectionClosed, JetSparkError, NoServersAvailable
from jetspark.spark.connections import jetstream_for
from jetspark.spark.options import Connecting
from jetspark.state.patience import Attempts

__all__ = ["PATIENCE_S", "patiently", "will_pass"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.spark")

# Elections and restarts are over within seconds. A query that starts while nothing answers should say so soon.
PATIENCE_S = 30.0
PAUSE = Backoff(first_s=0.05, max_s=1.0)
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
    on_wait: Callable[[JetSparkError], None] | None = None,
) -> T:
    """Ask the server something that may be asked twice, and again while that may help.

    ``ask`` gets a connection that is open each time, and must use no other: then a closed one is no reason to give up.
    ``is_first_contact`` is for drivers that have not reached a server yet: one that is not there is given up soon.
    ``on_wait`` is told of each error that is not the last; by default it is logged.

    Raises:
        JetSparkError: What the last attempt raised.
    """
    patience, first_contact = Attempts(patience_s, PAUSE), Attempts(min(patience_s, FIRST_CONTACT_S), PAUSE)
    for each in (patience, first_contact):
        each.progress(time.monotonic())
    while True:
        try:
            return ask(jetstream_for(options))
        except JetSparkError as error:
            if not will_pass(error):
                raise
            is_nobody_there = is_first_contact and isinstance(error, NoServersAvailable)
            wait_s = (first_contact if is_nobody_there else patience).wait_s(time.monotonic())
            if wait_s is None:
                if is_nobody_there:
                    # Spark shows the traceback as the error. How connecting works inside is not what is wrong.
                    raise error.with_traceback(None) from None
                raise
            if on_wait is None:
                _logger.info("asking again: %s", error)
            else:
                on_wait(error)
        time.sleep(wait_s)
