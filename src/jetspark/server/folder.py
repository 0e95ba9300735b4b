"""The temporary folder of one server: its configuration, the ports it says it listens on, and its log."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from jetspark.errors import EmbeddedServerError

__all__ = ["Ports", "ServerFolder", "tail"]

LOG_TAIL_BYTES = 64 * 1024
LOG_TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a running server."""

    client: int
    monitoring: int
    cluster: int | None


class ServerFolder:
    """The files of one server: configuration, ports, log; and in ``store`` its streams, unless they have a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "nats.conf"
        self.ports = path / "ports"
        self.store = path / "store"
        self._log = path / "nats.log"

    @classmethod
    def make(cls) -> Self:
        folder = cls(Path(tempfile.mkdtemp(prefix="jetspark-nats-")))  # Mode 0700: the configuration has secrets.
        folder.ports.mkdir()
        return folder

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    # Ports

    def forget_ports(self) -> None:
        for old in self.ports.iterdir():
            old.unlink()

    def read_ports(self, pid: int) -> Ports | None:
        """Read the file that the server writes once it listens, the only source without races; None before that."""
        # Named after the executable, which JETSPARK_NATS_SERVER may call anything.
        found = list(self.ports.glob(f"*_{pid}.ports"))
        if not found:
            return None
        try:
            urls: dict[str, list[str]] = json.loads(found[0].read_text())
        except ValueError:
            return None  # Seen half written.
        if "monitoring" not in urls:
            raise EmbeddedServerError("extra_config turns monitoring off (http), which tells when the server is ready")
        cluster = _port_of(urls["cluster"]) if "cluster" in urls else None
        return Ports(_port_of(urls["nats"]), _port_of(urls["monitoring"]), cluster)

    # Log

    def open_log(self) -> IO[bytes]:
        return self._log.open("ab")

    def log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def read_log(self, offset: int = 0) -> str:
        """The log from ``offset`` on: the last 64 KiB of it."""
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(offset, size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def tail(log: str) -> str:
    """The last lines, for an error message."""
    return "\n".join(log.splitlines()[-LOG_TAIL_LINES:])


def _port_of(urls: list[str]) -> int:
    return int(urls[0].rpartition(":")[2])
