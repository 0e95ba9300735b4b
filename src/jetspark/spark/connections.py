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

from jetspark.blocking import Client, JetStream, connect
from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import JetSparkError
from jetspark.spark.options import Connecting

__all__ = ["client_for", "jetstream_for", "runner_for"]

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
