"""The server of a measurement, by the replicas of its streams: the one of the run, or a cluster on this machine.

A cluster runs only while a workload needs it: three servers that have nothing to do still talk to each other, which
would slow down the measurements beside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.workload import Workload
from jetspark.server import NatsCluster, NatsServer

__all__ = ["one_server", "server_for"]

# The server must never drop a reader for being slow: the reader's speed is measured.
MAX_PENDING_BYTES = 1 << 30


@contextlib.contextmanager
def one_server(url: str | None) -> Iterator[str]:
    """The server at ``url``; without one a new server."""
    if url is not None:
        yield url
        return
    with NatsServer(max_pending_bytes=MAX_PENDING_BYTES) as server:
        yield server.url


@contextlib.contextmanager
def server_for(workload: Workload, url: str, *, is_given: bool) -> Iterator[str]:
    """Where a workload is measured: at ``url``, or at one node of a new cluster if its streams have replicas.

    Args:
        is_given: The user has named the server, so it is used whatever the workload needs. If it is not part of a
            cluster that is large enough, the measurement is an error that says so.
    """
    if is_given or (workload.replicas or 1) == 1:
        yield url
        return
    assert workload.replicas is not None
    with NatsCluster(workload.replicas, max_pending_bytes=MAX_PENDING_BYTES) as cluster:
        yield cluster.urls[0]
