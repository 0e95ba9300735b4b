"""Workers of the application as processes: ``jetspark run``, as an operator starts it."""

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
"""How long a worker that was killed holds up the next one; by default ten seconds, which is long to watch."""
STOP_S = 15.0
LAST_LINES = 5
POLL_S = 0.05


class WorkerProcess:
    """One ``jetspark run``. It has a session of its own, so that Ctrl-C in a terminal does not reach it before us."""

    def __init__(self, app: str, url: str, folder: Path, log: Path) -> None:
        self.app, self._log = app, log
        command = [sys.executable, "-m", "jetspark", "run", app, "--servers", url, "--lease", str(LEASE_S)]
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "JETSPARK_PARENT": str(os.getpid()),  # it ends when this process is gone, however that went
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
        """As a crash would."""
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """
        Raises:
            UsageError: It has ended by itself; the message has what it said last.
        """
        if self.process.poll() is not None:
            raise UsageError(
                f"the worker of {self.app} ended with code {self.process.returncode}:\n{self.last_words()}"
            )

    def last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    async def started(self, timeout: float) -> None:
        """Wait until it says that it runs.

        Raises:
            TimeoutError: It does not.
            UsageError: It has ended.
        """
        async with asyncio.timeout(timeout):
            while b": running " not in self._log.read_bytes()[self._begin :]:
                self.check()
                await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        """Ask it to end, and see to it that it does; a second call does nothing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
