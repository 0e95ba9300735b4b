"""Connections of a Python worker, kept between tasks.

Spark reuses worker processes for the tasks of one micro-batch after the other. A connection that is kept costs nothing
to use again, and opening one costs more than reading a small partition. One for each way to connect, made in the
process that uses it: what a fork inherits is not used.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from jetspark.blocking import Client, JetStream, connect
from jetspark.blocking.steps import ProcedureRunner
from jetspark.core.backoff import Backoff
from jetspark.errors import ConnectionClosed, JetSparkError, NoServersAvailable
from jetspark.spark.options import Connecting
from jetspark.state.patience import Attempts

__all__ = ["PATIENCE_S", "client_for", "jetstream_for", "patiently", "runner_for", "will_pass"]

# Few: a worker serves few queries. What is beyond it is closed, the oldest first.
MAX_KEPT = 8
# A task waits for it: long enough for a server that answers.
CLOSE_S = 1.0

_logger = logging.getLogger("jetspark.spark")
_lock = threading.Lock()
_kept: dict[tuple[int, Connecting], Client] = {}


def client_for(options: Connecting) -> Client:
    """A connection that is open; do not close it.

    Raises:
        NoServersAvailable, AuthenticationFailed, ConfigError: As :func:`jetspark.blocking.connect`.
    """
    key = (os.getpid(), _ways(options))
    with _lock:
        client = _kept.pop(key, None)
        if client is None or client.is_closed:
            client = connect(
                list(options.servers), auth=options.auth(), tls=options.tls(), name=f"jetspark-spark-{os.getpid()}"
            )
        _kept[key] = client
        while len(_kept) > MAX_KEPT:
            pid, oldest = next(iter(_kept))
            spare = _kept.pop((pid, oldest))
            if pid == os.getpid():
                _close(spare)
        return client


def _close(spare: Client) -> None:
    """Close a connection that no task uses. Its error is no task's: writers have waited for their acknowledgements."""
    try:
        spare.close(CLOSE_S)
    except JetSparkError as error:
        _logger.info("spare connection to %s closed: %s", spare.server, error)


def _ways(options: Connecting) -> Connecting:
    """How to connect, without what else a format's options say: queries of one server share a connection."""
    return Connecting(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Connecting)})


def jetstream_for(options: Connecting) -> JetStream:
    """JetStream over such a connection."""
    return client_for(options).jetstream(
        domain=options.domain, prefix=options.prefix, timeout=options.request_timeout_s
    )


def runner_for(options: Connecting) -> ProcedureRunner:
    """Runs procedures over such a connection, and over the next one when it is closed for good."""
    return ProcedureRunner(renew=lambda: jetstream_for(options))


T = TypeVar("T")

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
