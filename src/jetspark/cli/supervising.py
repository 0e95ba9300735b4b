"""Worker processes of ``jetspark run``: started, restarted after a death or a source change, and ended.

The parent does not import the application. So a new child always runs the sources on disk, and an error in them ends a
child and not the parent. Each child is a ``jetspark run`` of its own; children share the work through the server.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jetspark.core.backoff import Backoff
from jetspark.errors import ConfigError

__all__ = ["Slot", "Supervisor", "end_with_parent", "source_files", "watched_folder"]

_logger = logging.getLogger("jetspark.cli")

PARENT = "JETSPARK_PARENT"
"""The environment variable with the process id of the parent."""

POLL_S = 0.1
RELOAD_POLL_S = 0.5
# A child that lived for this long did not die of an error at its start.
STEADY_S = 5.0
RESTART_PAUSE = Backoff(first_s=0.2, max_s=30.0)
# A child that was killed had no error of its own, so its successor may live.
KILLED_PAUSE = Backoff(first_s=0.2, max_s=1.0)
# A program that fails at each start is given up after this many starts.
MAX_REFUSALS = 5
# How long after their stop timeout children are killed.
GRACE_S = 10.0
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


@dataclass(slots=True)
class Slot:
    """One of the worker processes, or the time of its next start."""

    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    """Consecutive children that ended soon after their start."""
    refusals: int = 0
    """Consecutive children that exited soon with an error; killed children do not count."""
    start_at: float = 0.0

    def end(self, code: int, now: float) -> None:
        """The child has ended; the next one starts after a wait that doubles with each early end."""
        is_early = now - self.started_at < STEADY_S
        self.failures = self.failures + 1 if is_early else 0
        self.refusals = self.refusals + 1 if is_early and code > 0 else 0
        self.process = None
        pause = RESTART_PAUSE if code > 0 else KILLED_PAUSE
        self.start_at = now + pause.wait_s(max(1, self.failures))


@dataclass(slots=True)
class Supervisor:
    """Keeps a number of children running until SIGTERM or Ctrl-C.

    Args:
        command: The command line of a child.
        workers: The number of children.
        stop_timeout: Seconds that children give their handlers to finish; children are killed ``GRACE_S`` after that.
        folder: The folder whose sources are watched; None to watch none.
    """

    command: Sequence[str]
    workers: int
    stop_timeout: float
    folder: Path | None = None
    _slots: list[Slot] = field(default_factory=list)
    _is_asked_to_end: bool = False

    def run(self) -> int:
        """Run until SIGTERM or Ctrl-C, and return the exit code: 0, or the code of a child that cannot start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._slots = [Slot() for _ in range(self.workers)]
        seen, look_at = source_files(self.folder), time.monotonic() + RELOAD_POLL_S
        try:
            while not self._is_asked_to_end:
                code = self._tend(time.monotonic())
                if code is not None:
                    return code
                if self.folder is not None and time.monotonic() >= look_at:
                    found, look_at = source_files(self.folder), time.monotonic() + RELOAD_POLL_S
                    if found != seen:
                        self._reload(_first_difference(seen, found))
                        seen = found
                time.sleep(POLL_S)
        finally:
            self._end_all()
        return 0

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_asked_to_end = True

    def _tend(self, now: float) -> int | None:
        """Check each child once; returns the exit code when one is given up."""
        for number, slot in enumerate(self._slots, 1):
            if slot.process is not None and (code := slot.process.poll()) is not None:
                slot.end(code, now)
                if slot.refusals >= MAX_REFUSALS and self.folder is None:
                    _logger.error(
                        "worker %d exited with code %d, %d times in a row; giving up", number, code, slot.refusals
                    )
                    return code
                wait_s = slot.start_at - now
                _logger.warning("worker %d exited with code %d; restart in %.1f s", number, code, wait_s)
            if slot.process is None and now >= slot.start_at:
                slot.process, slot.started_at = self._start(), now
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        # Ctrl-C reaches all processes of a terminal's group. In sessions of their own, children get one signal, from
        # here.
        environment = {**os.environ, PARENT: str(os.getpid())}
        return subprocess.Popen(self.command, env=environment, start_new_session=True)

    def _reload(self, path: Path) -> None:
        _logger.info("%s has changed: restarting the workers", path)
        self._end_all()
        for slot in self._slots:
            slot.process, slot.failures, slot.refusals, slot.start_at = None, 0, 0, 0.0

    def _end_all(self) -> None:
        """Send SIGTERM to each child, wait for its end, and kill it if that takes too long."""
        children = [slot.process for slot in self._slots if slot.process is not None]
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_timeout + GRACE_S
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _logger.error(
                    "worker with process id %d did not stop in time; killed, its events are redelivered", child.pid
                )
                child.kill()
                child.wait()


def end_with_parent(end: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)) -> None:
    """In a child: call ``end`` when the parent has ended, also if it was killed. No-op without a parent."""
    parent = os.environ.get(PARENT)
    if parent is None or not parent.isdigit():
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        end()

    threading.Thread(target=watch, daemon=True, name="jetspark-parent").start()


def watched_folder(app: str) -> Path:
    """The folder of an application's module, or of its package.

    Raises:
        ConfigError: The module was not found.
    """
    name = app.partition(":")[0]
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise ConfigError(f"{app!r}: module {name!r} was not found in {folder} or on Python's path")
    return Path(found.origin).parent


def source_files(folder: Path | None) -> dict[Path, int]:
    """Each Python file below a folder with its modification time, without hidden folders and installed packages."""
    found: dict[Path, int] = {}
    if folder is None:
        return found
    for here, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".") and each not in _SKIPPED]
        for name in files:
            if name.endswith(".py"):
                path = Path(here, name)
                try:
                    found[path] = path.stat().st_mtime_ns
                except OSError:
                    continue  # removed during the walk
    return found


def _first_difference(before: dict[Path, int], after: dict[Path, int]) -> Path:
    return min(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
