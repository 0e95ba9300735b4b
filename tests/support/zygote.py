"""Short Python programs without the start of a Python each: one process imports what they need, and forks.

A program that connects, publishes and ends spends most of its time on imports. A fork has them, and is a process of its
own in everything else: what the program leaves open, says or breaks ends with it. Programs with Spark cannot be forked,
since it has threads; with ``forks=False`` they run one after the other in the process itself, and share its JVM.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Self

TESTS = Path(__file__).resolve().parents[1]

# The folder of the tests is in the path for this one import: programs are to find what users find.
START = "import sys; sys.path.insert(0, {tests!r}); from support.zygote import serve; del sys.path[0]; serve({forks})"


class Zygote:
    """Runs programs; warnings are errors in them."""

    def __init__(self, *modules: str, forks: bool = True) -> None:
        code = START.format(tests=str(TESTS), forks=forks)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def run(self, code: str, *, folder: Path | str | None = None, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, in a folder.

        Raises:
            subprocess.TimeoutExpired: It took too long, and was killed; so was this object.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as notes:
            out, err = Path(notes) / "out", Path(notes) / "err"
            task = {"code": code, "folder": str(folder or notes), "out": str(out), "err": str(err)}
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
            answer, deadline = b"", time.monotonic() + timeout
            while not answer.endswith(b"\n"):
                if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    self.kill()
                    raise subprocess.TimeoutExpired(code, timeout)
                piece = os.read(self._process.stdout.fileno(), 100)
                assert piece, "the process that runs programs has ended"
                answer += piece
            return subprocess.CompletedProcess(code, int(answer), out.read_text(), err.read_text())


def serve(forks: bool) -> None:
    """The other side: a task to a line, answered with its exit code."""
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in ("support", "support.zygote"):
        del sys.modules[name]
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # A fork copies every page that the garbage collector, or the end of Python, looks at.
    gc.collect()
    gc.freeze()
    sys.argv = ["-c"]
    for line in tasks:
        task = json.loads(line)
        if not forks:
            answers.write(b"%d\n" % _run_here(task))
            continue
        if (child := os.fork()) == 0:
            tasks.close()
            answers.close()
            _redirect(task)
            return _run(task)  # what raises in it is told, and the process ends, as any program does
        _, status = os.waitpid(child, 0)
        answers.write(b"%d\n" % os.waitstatus_to_exitcode(status))
    return None


def _run(task: dict[str, str]) -> None:
    os.chdir(task["folder"])
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(task["code"], "<string>", "exec"), module.__dict__)


def _run_here(task: dict[str, str]) -> int:
    with _redirected(task):
        try:
            _run(task)
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def _redirect(task: dict[str, str]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        with open(task[name], "wb") as file:
            os.dup2(file.fileno(), number)


@contextlib.contextmanager
def _redirected(task: dict[str, str]) -> Iterator[None]:
    before = [os.dup(1), os.dup(2)]
    _redirect(task)
    try:
        yield
    finally:
        for number, (stream, old) in enumerate(zip((sys.stdout, sys.stderr), before, strict=True), start=1):
            stream.flush()
            os.dup2(old, number)
            os.close(old)
