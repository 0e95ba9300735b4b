"""One run of a server: from its launch, over the wait until clients can connect, to its end."""

from __future__ import annotations

import re
import time
from pathlib import Path

from jetspark.errors import EmbeddedServerError
from jetspark.server import probes
from jetspark.server.child import Child
from jetspark.server.config import ServerConfig
from jetspark.server.folder import Ports, ServerFolder, tail
from jetspark.server.watchdog import STORE_LOCKED

__all__ = ["POLL_S", "ServerRun", "reachable_host"]

POLL_S = 0.005


class ServerRun:
    """A server that was launched with the configuration in its folder. It is never launched again.

    Args:
        binary: Path of the nats-server.
        folder: Folder with the configuration; the log is written there.
        config: The content of the configuration.
        store_dir: The folder of streams to lock; None locks nothing.
    """

    def __init__(self, binary: str, folder: ServerFolder, config: ServerConfig, store_dir: Path | None) -> None:
        self.pid: int | None = None
        self.ports: Ports | None = None
        self._folder, self._config, self._store_dir = folder, config, store_dir
        folder.forget_ports()
        self._log_offset = folder.log_size()
        with folder.open_log() as log:
            self.child = Child(
                [binary, "-c", str(folder.config), "--ports_file_dir", str(folder.ports)],
                log=log,
                store_dir=store_dir,
                remove_dir=folder.path,
            )

    @property
    def is_running(self) -> bool:
        return self.child.exit_code is None

    def is_healthy(self) -> bool:
        return self.is_running and self.ports is not None and probes.is_healthy(self.ports.monitoring)

    def await_ready(self, deadline: float, timeout_s: float) -> Ports:
        """Wait until clients can connect and, outside a cluster, until every stream is recovered.

        Raises:
            EmbeddedServerError: The server has ended, or was not ready by the deadline, which ``timeout_s`` explains.
        """
        self.pid = self._read_pid(deadline)
        is_listening = False
        while True:
            self._check_alive()
            if self.ports is None:
                self.ports = self._folder.read_ports(self.pid)
            if self.ports is not None:
                is_listening = is_listening or self._greets(self.ports.client)
                # In a cluster a node is healthy only once the others are there: that is for the cluster to await.
                if is_listening and (self._config.cluster is not None or self.is_healthy()):
                    return self.ports
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"nats-server was not ready within {timeout_s:g} s", self._log_tail())
            time.sleep(POLL_S)

    def _read_pid(self, deadline: float) -> int:
        pid = self.child.read_pid(deadline)
        if pid is not None:
            return pid
        if self.child.exit_code == STORE_LOCKED:
            raise EmbeddedServerError(
                f"store_dir={str(self._store_dir)!r} is in use by another server: "
                "stop that one, or give this one a folder of its own"
            )
        raise EmbeddedServerError("nats-server could not be started", self._log_tail())

    def _check_alive(self) -> None:
        code = self.child.exit_code
        if code is None:
            return
        log = self._log_tail()
        taken = re.search(r":(\d+): bind: address already in use", log)
        if taken:
            reason = f"nats-server could not listen: port {taken[1]} is already in use"
        else:
            reason = f"nats-server ended while starting, with exit code {code}"
        raise EmbeddedServerError(reason, log)

    def _greets(self, port: int) -> bool:
        # With TLS first, the server waits for our handshake before it sends anything.
        speaks_first = self._config.tls is None or not self._config.tls.handshake_first
        return probes.is_greeted(reachable_host(self._config), port, speaks_first=speaks_first)

    def _log_tail(self) -> str:
        return tail(self._folder.read_log(self._log_offset))


def reachable_host(config: ServerConfig) -> str:
    """The host for clients: a server that listens on all addresses is reached through loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
