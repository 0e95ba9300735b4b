"""Connections of a Python worker, kept between tasks, and retries on them.

Spark reuses worker processes for successive micro-batches. Opening a connection costs more than reading a small
partition, so a worker keeps one connection for each set of connection options. Each process opens its own: connections
inherited by a fork are not used.
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

# A worker serves few queries. Beyond this number the oldest connection is closed.
MAX_KEPT = 8
# A task waits for the close of a spare connection: long enough for a server that answers.
CLOSE_S = 1.0

_logger = logging.getLogger("jetspark.spark")
_lock = threading.Lock()
_kept: dict[tuple[int, Connecting], Client] = {}


def client_for(options: Connecting) -> Client:
    """An open connection, shared by all tasks of this process; do not close it.

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
    """Close a connection that no task uses. Errors are only logged: writers have waited for their acknowledgements."""
    try:
        spare.close(CLOSE_S)
    except JetSparkError as error:
        _logger.info("spare connection to %s closed: %s", spare.server, error)


def _ways(options: Connecting) -> Connecting:
    """The connection options alone, so that queries with other options share a connection."""
    return Connecting(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Connecting)})


def jetstream_for(options: Connecting) -> JetStream:
    """JetStream on an open connection."""
    return client_for(options).jetstream(
        domain=options.domain, prefix=options.prefix, timeout=options.request_timeout_s
    )


def runner_for(options: Connecting) -> ProcedureRunner:
    """Runs procedures on an open connection, and on a new one after it was closed."""
    return ProcedureRunner(renew=lambda: jetstream_for(options))


T = TypeVar("T")

# Elections and restarts end within seconds. A query that starts without a server should fail soon.
PATIENCE_S = 30.0
PAUSE = Backoff(first_s=0.05, max_s=1.0)
# If no server has ever answered, the address is probably wrong or the server is not started; it may also be starting.
FIRST_CONTACT_S = 2.0


def will_pass(error: BaseException) -> bool:
    """True if a retry may help. A closed connection counts, because the next attempt gets another one."""
    return isinstance(error, JetSparkError) and (error.may_pass or isinstance(error, ConnectionClosed))


def patiently(
    options: Connecting,
    ask: Callable[[JetStream], T],
    *,
    patience_s: float = PATIENCE_S,
    is_first_contact: bool = False,
    on_wait: Callable[[JetSparkError], None] | None = None,
) -> T:
    """Call ``ask``, which must be idempotent, and retry it while that may help.

    Args:
        ask: Gets an open connection for each attempt, and must not use another one.
        is_first_contact: No server was reached before; give up soon if none is found.
        on_wait: Called with each error that is retried; logs it by default.

    Raises:
        JetSparkError: The error of the last attempt.
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
                    # Spark shows the traceback as the error; frames of our connection code would only hide the reason.
                    raise error.with_traceback(None) from None
                raise
            if on_wait is None:
                _logger.info("request failed (%s); trying again", error)
            else:
                on_wait(error)
        time.sleep(wait_s)
