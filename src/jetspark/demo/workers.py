"""Worker processes of the application, started with ``jetspark run`` as by an operator."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from jetspark.errors import UsageError

__all__ = ["WorkerProcess"]

LEASE_S = 1
"""Seconds for which a killed worker delays the next one; the default of ten seconds is too long for a demo."""
STOP_S = 15.0
LAST_LINES = 5
POLL_S = 0.05


class WorkerProcess:
    """One ``jetspark run`` process. It has its own session, so that Ctrl-C in a terminal reaches only the demo."""

    def __init__(self, app: str, url: str, folder: Path, log: Path) -> None:
        self.app, self._log = app, log
        command = [sys.executable, "-m", "jetspark", "run", app, "--servers", url, "--lease", str(LEASE_S)]
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "JETSPARK_PARENT": str(os.getpid()),  # the worker ends when this process has ended, even by kill -9
        }
        with log.open("ab") as file:
            self._begin = file.tell()
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End the worker like a crash."""
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """Raise if the worker has ended.

        Raises:
            UsageError: The worker has ended by itself; the message has its last lines of output.
        """
        if self.process.poll() is not None:
            raise UsageError(
                f"the worker of {self.app} ended with code {self.process.returncode}:\n{self.last_words()}"
            )

    def last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    async def started(self, timeout: float) -> None:
        """Wait until the worker reports that it runs.

        Raises:
            TimeoutError: It did not within ``timeout`` seconds.
            UsageError: It has ended.
        """
        async with asyncio.timeout(timeout):
            while b": running " not in self._log.read_bytes()[self._begin :]:
                self.check()
                await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        """Stop the worker with SIGTERM, and kill it after ``STOP_S`` seconds; a second call does nothing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
