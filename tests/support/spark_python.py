"""The Python processes that Spark starts, forked from one that has imported what they need.

Every Spark starts some ten: one for each thing that a format can be asked, and one or two for each task. Each imports
pyspark, pyarrow, pandas and this package, half a second of processor time, for work of some milliseconds. The suite
starts a thousand. So `worker_python.sh`, which Spark takes for its Python, asks the process of this module for a fork
with its arguments, variables, folder and files. The fork does what a Python started for it would do, and ends when the
script is killed. What a fork cannot show is the environment and the command line it was given, where the system lists
processes: a test that looks for them there sets ``JETSPARK_TESTS_WORKERS`` to nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import marshal
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "JETSPARK_TESTS_WORKERS"
"""Names the socket where forks can be had."""

# What any of them imports, before its first fork: Spark's own parts by the names that it runs them with.
MODULES = (
    "encodings.idna",
    "pandas",
    "pyarrow",
    "pyarrow.csv",
    "pyspark.daemon",
    "pyspark.worker",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "jetspark.app",
    "jetspark.blocking",
)
# With every module in it: they are imported when a format is used.
PACKAGES = ("jetspark.spark", "jetspark.state")


@contextlib.contextmanager
def forks(folder: Path) -> Iterator[None]:
    """While the block lasts, Sparks that are started get forks; ``folder`` is where the socket is made."""
    path = str(folder / "workers")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Spark gives this seed to workers. A library that starts threads for its sums would be forked with them.
        env=os.environ | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline():  # else there is no socket, and workers are processes of their own
            os.environ[VARIABLE] = path
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        process.stdin.close()
        process.stdout.close()
        process.wait()


class Server:
    """Forks until its standard input ends."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(100)
        self._has_imported = False
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        # Descriptors of forked processes, by the numbers of those who still wait for them; and who has asked for each.
        self._waiting: dict[int, int] = {}
        self._forked: dict[int, socket.socket] = {}

    def run(self) -> dict[str, Any] | None:
        """Returns in a fork, with what it is to do, and when there is nothing more to do."""
        while True:
            for number, _ in self._poll.poll():
                if number == 0:
                    return None
                if number == self._listener.fileno():
                    if task := self._fork():
                        return task
                elif number in self._forked:
                    self._note_end(number)
                elif number in self._waiting:
                    self._note_killed(number)

    def _fork(self) -> dict[str, Any] | None:
        asking, _ = self._listener.accept()
        text, files, _, _ = socket.recv_fds(asking, 4, 3)
        size = int.from_bytes(text, "little")
        text = b""
        while len(text) < size and (more := asking.recv(size - len(text))):
            text += more
        if not text or len(text) < size:  # killed while it asked: to wait for the rest would keep all others waiting
            asking.close()
            for file in files:
                os.close(file)
            return None
        if not self._has_imported:
            for name in [*MODULES, *PACKAGES, *modules_in(*PACKAGES)]:
                importlib.import_module(name)
            # A fork copies every page that a garbage collector, or the end of Python, looks at: a quarter of a second.
            gc.collect()
            gc.freeze()
            self._has_imported = True
        child = os.fork()
        if child == 0:
            asking.close()
            self._close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            task: dict[str, Any] = marshal.loads(text)
            return task
        for file in files:
            os.close(file)
        descriptor = os.pidfd_open(child)
        self._waiting[asking.fileno()] = descriptor
        self._forked[descriptor] = asking
        self._poll.register(asking, select.POLLIN)
        self._poll.register(descriptor, select.POLLIN)
        return None

    def _close(self) -> None:
        self._listener.close()
        for descriptor, asking in self._forked.items():
            os.close(descriptor)
            asking.close()

    def _note_end(self, descriptor: int) -> None:
        ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with self._forked.pop(descriptor) as asking:
            if self._waiting.pop(asking.fileno(), None) is None:
                return
            self._poll.unregister(asking)
            with contextlib.suppress(OSError):  # it was killed a moment ago
                asking.sendall(bytes([code]))

    def _note_killed(self, number: int) -> None:
        """Spark ends its processes by a signal to those that it has started."""
        descriptor = self._waiting.pop(number)
        self._poll.unregister(number)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)


def modules_in(*packages: str) -> Iterator[str]:
    for package in packages:
        path = importlib.import_module(package).__path__
        yield from (found.name for found in pkgutil.walk_packages(path, f"{package}."))


def work(task: dict[str, Any], path: list[str]) -> None:
    """What ``python -m <module> <arguments>`` would do; ``path`` is where Python finds its own modules."""
    os.chdir(task["folder"])
    os.environ.clear()
    os.environ.update(task["variables"])
    tempfile.tempdir = None
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [os.getcwd(), *added, *path]
    importlib.invalidate_caches()
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(write_through=True)  # Spark has its Pythons write without a buffer
    _, module, *arguments = task["arguments"]
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # it runs as `__main__`, and what it imports is there
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    own = [entry for entry in sys.path[1:] if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # The package of this tree: another one may be installed.
    own.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    sys.path[:] = own
    server = Server(sys.argv[1])
    print("ready", flush=True)
    if task := server.run():
        work(task, own)


if __name__ == "__main__":
    main()
