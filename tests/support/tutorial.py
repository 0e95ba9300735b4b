"""Follows a page of the documentation as a reader would: writes its files, types its commands, and compares.

A page has blocks with a second word:

=====================  ==========================================================================================
``python NAME``        a file to write
``console``            commands after ``$``, each with what it prints. ``...`` stands for anything, also for lines.
                       Those that only look are repeated until they print it: a worker may not be that far yet.
``console worker``     one command that goes on running, in place of the one before, which is interrupted
``text worker``        what that command prints, sooner or later
=====================  ==========================================================================================
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.patience import PATIENCE_S

__all__ = ["Reader"]

PROGRAMS = {
    "python": [sys.executable],
    "jetspark": [sys.executable, "-m", "jetspark"],
    "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
}
# Commands with one of these words do something, and are run once.
ACTING = {"publish.py", "redrive"}


class Reader:
    """Works in a folder, with a server; ends what it started."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        # A file may be written twice within the second by which Python tells whether its bytecode is old.
        self._environment = os.environ | {"JETSPARK_SERVERS": url, "PYTHONDONTWRITEBYTECODE": "1"}
        self._worker: subprocess.Popen[bytes] | None = None
        self._printed = folder / "printed"
        self.commands = 0

    def follow(self, page: str) -> None:
        for kind, name, text in re.findall(r"^```(\w+) ?([\w.]*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
            if kind == "python" and name:
                code = text.replace("nats://127.0.0.1:4222", self._url)
                (self._folder / name).write_text(code, encoding="utf-8")
            elif kind == "console":
                self._type(text, is_worker=name == "worker")
            elif (kind, name) == ("text", "worker"):
                self._wait_for_worker(text)

    def end(self) -> None:
        if self._worker is None:
            return
        self._worker.send_signal(signal.SIGINT)
        try:
            code = self._worker.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            code = self._worker.wait()
        self._worker = None
        assert code == 0, self._printed.read_text(encoding="utf-8")

    def _type(self, text: str, *, is_worker: bool) -> None:
        for part in text.split("$ ")[1:]:
            line, _, expected = part.partition("\n")
            name, *arguments = shlex.split(line)
            command = [*PROGRAMS[name], *arguments]
            self.commands += 1
            if is_worker:
                self._start(command)
                self._wait_for_worker(expected)
            else:
                self._run(command, expected, patience_s=0 if ACTING & {*arguments} else PATIENCE_S)

    def _start(self, command: list[str]) -> None:
        self.end()
        with self._printed.open("wb") as output:
            self._worker = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )

    def _run(self, command: list[str], expected: str, patience_s: float) -> None:
        give_up_at = time.monotonic() + patience_s
        while True:
            done = subprocess.run(
                command,
                cwd=self._folder,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=250,
                check=False,
            )
            shown = done.stdout + done.stderr
            if _pattern(expected).fullmatch(shown):
                return
            assert time.monotonic() < give_up_at, f"{command}: expected\n{expected}\nand it printed\n{shown}"
            time.sleep(0.1)

    def _wait_for_worker(self, expected: str) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not all(_pattern(line).search(self._shown()) for line in expected.splitlines()):
            assert self._worker is not None
            assert self._worker.poll() is None, self._shown()
            assert time.monotonic() < give_up_at, f"expected\n{expected}\nand it printed\n{self._shown()}"
            time.sleep(0.05)

    def _shown(self) -> str:
        return self._printed.read_text(encoding="utf-8")


def _pattern(expected: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, expected.split("..."))), re.DOTALL)
