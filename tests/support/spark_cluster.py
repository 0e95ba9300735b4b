"""A standalone Spark cluster on this machine: a master and workers, each a process of its own, to be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

HOST = "127.0.0.1"
SPARK_HOME = Path(pyspark.__file__).parent
# For processes that do little, and live for half a minute.
FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"


class Cluster:
    """A master, and workers with one core each. An executor is in the process group of its worker."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = _free_port()
        self._start("master.Master", "--port", str(self.port))
        for number in range(workers):
            work = folder / f"work-{number}"
            memory = ("--cores", "1", "--memory", "700m", "--work-dir", str(work))
            self._start("worker.Worker", "--port", "0", *memory, self.url)

    @property
    def url(self) -> str:
        return f"spark://{HOST}:{self.port}"

    def _start(self, name: str, *arguments: str) -> None:
        # A page for people cannot be turned off, but gets whatever port is free.
        command = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", "--host", HOST]
        environment = os.environ | {
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "200m",
            "SPARK_DAEMON_JAVA_OPTS": FLAGS,
        }
        with (self._folder / f"{name}-{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*map(str, command), "--webui-port", "0", *arguments],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes.append(process)

    def kill_worker(self, number: int) -> None:
        """With its executor, as if the machine had lost its power."""
        _kill(self._processes[1 + number])

    def close(self) -> None:
        for process in self._processes:
            _kill(process)

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.rglob("*.log")))


@contextmanager
def cluster(folder: Path, *, workers: int = 2) -> Iterator[Cluster]:
    """For as long as the block lasts."""
    folder.mkdir()
    running = Cluster(folder, workers)
    try:
        yield running
    finally:
        running.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
