"""The processes of one server: the watchdog, which is our child, and nats-server, which is the watchdog's.

A :class:`Child` is one run. It begins with the watchdog and ends when :meth:`Child.end` has reaped it; nothing in it is
used again. ``watchdog.py`` says what the two ends of the pipes mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from jetspark.errors import EmbeddedServerError

__all__ = ["Child"]

# How long the watchdog may take to pass a signal on: it does nothing else, but the machine may be busy.
SIGNAL_TIMEOUT_S = 10.0


class Child:
    """A watchdog that was started with ``command`` to run.

    Args:
        command: nats-server and its arguments.
        log: The file for the output of both processes.
        store_dir: The folder to lock, so that no two servers share it; None locks nothing.
        remove_dir: The folder to remove should this program die.
    """

    def __init__(self, command: list[str], *, log: IO[bytes], store_dir: Path | None, remove_dir: Path) -> None:
        if not sys.executable or os.name != "posix":
            raise EmbeddedServerError(
                "the embedded server needs a POSIX system and a Python interpreter (sys.executable); "
                "start nats-server by other means here"
            )
        task = {
            "command": command,
            "parent_pid": os.getpid(),
            "store_dir": None if store_dir is None else str(store_dir),
            "remove_dir": str(remove_dir),
        }
        # A session of its own: Ctrl-C in a terminal reaches every process of the program's group, and the
        # server must still be there while the program drains its connections. -I -S keeps the start at
        # some 20 ms.
        self.watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("watchdog.py")), json.dumps(task)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        assert self.watchdog.stdin is not None
        assert self.watchdog.stdout is not None
        self._stdin, self._stdout = self.watchdog.stdin, self.watchdog.stdout

    @property
    def exit_code(self) -> int | None:
        """The watchdog's exit code, which is nats-server's; None while it runs."""
        return self.watchdog.poll()

    def read_pid(self, deadline: float) -> int | None:
        """Process id of nats-server; None when the watchdog ends, or the deadline passes, without naming one."""
        line = b""
        while not line.endswith(b"\n"):
            wait_s = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._stdout], [], [], wait_s)
            piece = self._stdout.read(1) if readable else b""
            if not piece:
                if readable:
                    self.wait(SIGNAL_TIMEOUT_S)
                return None
            line += piece
        return int(line)

    def signal(self, number: signal.Signals) -> None:
        """Have the watchdog pass a signal on, and return when it has (or when the server is gone)."""
        try:
            self._stdin.write(bytes([number]))
        except BrokenPipeError:
            return
        if select.select([self._stdout], [], [], SIGNAL_TIMEOUT_S)[0]:
            self._stdout.read(1)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of both processes; False if the time is over before."""
        try:
            self.watchdog.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """End both processes and close the pipes, in any state of a start or stop; a second call has no effect."""
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
            if not self.wait(SIGNAL_TIMEOUT_S):
                self.watchdog.kill()  # The kernel then ends the server, which has PR_SET_PDEATHSIG.
        self.watchdog.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
