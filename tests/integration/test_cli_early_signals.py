"""SIGTERM while ``jetspark run`` starts: exit code 0 from the first line of its own code on, whatever runs then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [str(Path(sys.executable).with_name("jetspark")), "run"]

APP = """
import os, signal
from jetspark.app import App, Event

class Happened(Event, type="happened", key="name", subject="shop.{name}"):
    name: str

app = App("shop", stream="SHOP", subjects=["shop.>"])

@app.handler(Happened, durable="h")
async def handle(event: Happened) -> None: ...
"""

# Python imports it before any script. It says what is there when SIGTERM is handled first.
RECORDING = """
import os, signal, sys

set_handler = signal.signal

def recording(number, handler):
    before = set_handler(number, handler)
    if number == signal.SIGTERM:
        signal.signal = set_handler
        os.write(int(os.environ["SAY_TO"]), ",".join(each for each in sys.modules if "jetspark" in each).encode())
    return before

signal.signal = recording
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(RECORDING)
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


def start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A worker whose server is away, and the modules of ours that it has when it handles SIGTERM first."""
    reading, writing = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(folder), "SAY_TO": str(writing)}
    command = [*COMMAND, "shop:app", "--servers", "nats://127.0.0.1:9"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, pass_fds=[writing], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return process, pipe.read1().decode()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.parametrize("command", ["script", "module"])
def test_sigterm_is_handled_before_the_package_is_imported(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "module":
        monkeypatch.setattr(f"{__name__}.COMMAND", [sys.executable, "-m", "jetspark", "run"])
    process, modules = start(folder)
    try:
        if command == "script":
            assert modules == "jetspark_command"
        else:
            assert "jetspark_command" in modules  # behind the package, which Python imports to find the module in it
            assert "jetspark.cli.main" not in modules
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=120)[1]
        assert (process.returncode, error) == (0, b"")
    finally:
        end(process)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.45, 0.7])
def test_a_worker_that_is_ended_at_any_moment_of_its_start_exits_with_0(folder: Path, delay_s: float) -> None:
    process, _ = start(folder)
    try:
        try:
            process.wait(delay_s)
        except subprocess.TimeoutExpired:
            pass
        else:
            return  # it has no server, and this machine is fast enough to find that out first
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=120)[1].decode()
        assert (process.returncode, "Traceback" in error) == (0, False), error
    finally:
        end(process)


@pytest.mark.parametrize(
    "place",
    [
        "{end}",
        "class Named:\n  def __set_name__(self, owner, name):\n    {end}\nclass Owner:\n  named = Named()",
        "class Deleted:\n  def __del__(self):\n    {end}\nDeleted()",
        "try:\n  {end}\nexcept BaseException as error:\n  raise ImportError('no') from error",
    ],
    ids=["plain", "error_is_replaced", "error_is_dropped", "error_is_caught"],
)
def test_sigterm_ends_the_import_of_an_application_whatever_becomes_of_its_exception(folder: Path, place: str) -> None:
    call = "os.kill(os.getpid(), signal.SIGTERM)"
    (folder / "shop.py").write_text(f"{APP}\n{place.format(end=call)}\n")
    process, _ = start(folder)
    try:
        error = process.communicate(timeout=120)[1].decode()
        assert process.returncode == 0, error
    finally:
        end(process)
