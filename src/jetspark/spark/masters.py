"""Where Spark runs: whether an address names a master, and whether anybody is there."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from jetspark.errors import ConfigError

__all__ = ["CONNECT", "SparkServer", "check_somebody_listens", "server_of"]

CONNECT_TIMEOUT_S = 10.0


class SparkServer(NamedTuple):
    """A kind of server that runs Spark's work."""

    scheme: str
    port: int
    """Where it listens unless an address says otherwise."""
    name: str


CONNECT = SparkServer("sc://", 15002, "Spark Connect server")
STANDALONE = SparkServer("spark://", 7077, "Spark master")
# These have no address, or one that is not for us to try.
_OTHERS = re.compile(r"local(-cluster)?(\[.*\])?|yarn|k8s://.+")


def server_of(master: str) -> SparkServer | None:
    """The kind of server that a master is; None for this machine, YARN and Kubernetes.

    Raises:
        ConfigError: It is no master.
    """
    if _OTHERS.fullmatch(master):
        return None
    for server in (STANDALONE, CONNECT):
        if master.startswith(server.scheme):
            return server
    raise ConfigError(
        f"master={master!r}: expected {STANDALONE.scheme}HOST:{STANDALONE.port}, {CONNECT.scheme}HOST, yarn, k8s://URL "
        "or local[CORES]"
    )


def check_somebody_listens(master: str) -> None:
    """What Spark would say where nobody does is two pages long, and comes after minutes.

    Raises:
        ConfigError: It is no master, or nobody is there. Of several, joined by commas, one is enough.
    """
    server = server_of(master)
    if server is None:
        return
    refused = []
    for address in master.removeprefix(server.scheme).split(","):
        try:
            place = urlsplit(f"//{address}")
            host, port = place.hostname or "localhost", place.port or server.port
        except ValueError as error:
            raise ConfigError(
                f"master={master!r}: expected an address such as {server.scheme}host:{server.port}: {error}"
            ) from None
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
            return
        except OSError as error:
            refused.append(f"{host}:{port}: {error}")
    raise ConfigError(f"master={master!r}: no {server.name} at {', '.join(refused)}")
