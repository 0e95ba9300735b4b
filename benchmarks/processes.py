"""Processes of a measurement: the environment they start in, and the memory and processor time they use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jetspark.errors import ConnectionLost

__all__ = ["REPOSITORY", "cpu_s", "descendants", "environment", "peak_mib", "running"]

REPOSITORY = Path(__file__).resolve().parents[1]


def environment(*folders: str) -> dict[str, str]:
    """The variables of a process that imports ``benchmarks``, as Spark's workers do: it is not installed.

    Args:
        folders: Searched for modules before all others.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [*folders, str(REPOSITORY), *(each for each in inherited if each)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


@contextlib.contextmanager
def running(module: str, url: str, *arguments: str) -> Iterator[None]:
    """Run a module in a process of its own while the block lasts.

    It prints a line when it is connected to the server, and ends when its standard input does.
    """
    command = [sys.executable, "-m", module, url, *arguments]
    # In a session of its own: Ctrl-C is for the bench, which ends this process by closing its standard input.
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            raise ConnectionLost(f"{module} could not use {url}; it ended with code {process.wait()}")
        yield  # leaving the with block closes its standard input, which ends it


def peak_mib(pids: Iterator[int]) -> float:
    """The most memory that a Python process among these has had; known only where there is a /proc.

    Java and nats-server are among what a bench has started, and keep as much as they are allowed to.
    """
    peaks = [0.0]
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        except OSError:
            continue  # it has ended meanwhile
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if fields["Name"].strip() not in ("java", "nats-server"):
            peaks.append(int(fields.get("VmHWM", "0 kB").split()[0]) / 1024)
    return max(peaks)


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those have started."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text(encoding="utf-8").split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def cpu_s(*, server: bool = True) -> float:
    """Processor time of this process and its descendants, a server among them or not; only where there is a /proc."""
    total = 0
    for pid in [os.getpid(), *descendants(os.getpid())]:
        with contextlib.suppress(OSError):
            if not server and "nats-server" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"):
                continue
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))  # those of children that have ended are in their parent's
    return total / os.sysconf("SC_CLK_TCK")
