"""Programs that start a Spark of their own, are told to end meanwhile, and must leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import spark_python

START_S = 120.0
END_S = 15.0
"""Java may take a moment longer than the program that started it."""


class SparkStart:
    """A Python program whose temporary files are in a folder of its own, by which its processes are known."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self._folder = process, folder

    def wait_for_java(self) -> None:
        """Until the Java of Spark runs, which takes seconds from here on to answer."""
        deadline = time.monotonic() + START_S
        while not any("org.apache.spark.deploy.SparkSubmit" in each for each in self._commands()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def left_behind(self) -> list[str]:
        """Processes and temporary files, after some seconds if there are some."""
        deadline = time.monotonic() + END_S
        while (found := self._commands() + [path.name for path in self._folder.iterdir()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        return found

    def _commands(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"TMPDIR={self._folder}\0".encode() in path.read_bytes():
                    found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it has ended meanwhile
        return found


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[SparkStart]:
    """``python`` with these arguments."""
    environment = {**os.environ, "TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder)}
    environment.pop(spark_python.VARIABLE, None)  # a fork would not show the folder
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            yield SparkStart(process, folder)
        finally:
            process.kill()
