"""The demo as a shell sees it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import spark_python

from jetspark import StreamConfig
from jetspark.blocking import JetStream, connect
from jetspark.demo.shop import load_shop
from jetspark.server import NatsServer

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "jetspark", "demo"]
MARK = "JETSPARK_TEST_RUN"
SHOWN = [
    "publish",
    "fold on Spark",
    "fold live",
    "kill the server",
    "kill a worker",
    "Spark = live",
    "state = events",
    "replay a range",
    "both releases",
    "rebuild, new fold",
    "reads meanwhile",
    "verify",
    "dead letters",
    "redrive one",
]


class Run:
    """A demo that runs in a folder of its own, and whose processes can be told from others."""

    def __init__(self, process: subprocess.Popen[str], mark: str, folder: Path) -> None:
        self.process, self._mark, self._folder = process, mark, folder
        self.output = ""

    def read_until(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                return
        pytest.fail(f"it ended before {pattern!r}: {self.output}")

    def end(self, text: str | None = None) -> int:
        """Give it an input, and wait for its end."""
        rest, _ = self.process.communicate(text, timeout=250)
        self.output += rest
        return self.process.returncode

    def left_behind(self) -> list[str]:
        """Processes that it has started, however indirectly, and temporary files."""
        found = [path.name for path in self._folder.iterdir()]
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in path.read_bytes():
                    found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it has ended meanwhile
        return found


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[Run]:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder), "COLUMNS": "200", MARK: mark}
    environment.pop(spark_python.VARIABLE, None)  # a fork would not show the mark
    with subprocess.Popen(
        [*COMMAND, *options],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            yield Run(process, mark, folder)
        finally:
            process.kill()


@pytest.fixture
def others() -> Iterator[tuple[str, JetStream]]:
    """A server that somebody else uses, and for something that sounds like ours."""
    with NatsServer() as server, connect(server.url) as nc:
        js = nc.jetstream()
        js.create_stream(StreamConfig(name="ORDERS", subjects=["orders.>"]))
        js.publish("orders.created", b"not the demo's")
        yield server.url, js
        assert [*js.stream_names()] == ["ORDERS"]
        assert js.stream("ORDERS").info().state.messages == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_is_shown_and_kept_for_three_commands_and_gone_after_enter(tmp_path: Path) -> None:
    with demo(tmp_path, "--events", "4000", "--keep") as run:
        run.read_until("Press Enter")
        rows = dict(re.findall(r"^(\S.*?) +│ (\S+) +│ ", run.output, re.MULTILINE))
        assert rows == dict.fromkeys(SHOWN, "ok"), run.output
        setting, *commands = re.findall(r"^  ([^ #].*)$", run.output, re.MULTILINE)
        assert max(map(len, commands)) < 80, "so that a terminal does not break them"
        verified, listed, redriven = [
            subprocess.run(
                f"{setting}\n{each}",
                shell=True,
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            for each in commands
        ]
        assert "equal to its history" in verified.stdout
        assert "Reject" in listed.stdout
        assert "handled, 0 failed again" in redriven.stdout
        assert run.end("\n") == 0, run.output
        assert "WARN" not in run.output
        assert run.left_behind() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "stage"),
    [(signal.SIGTERM, "events through"), (signal.SIGINT, "^start Spark"), (signal.SIGHUP, "^start Spark")],
    ids=["SIGTERM while it publishes", "Ctrl-C while Spark folds", "the terminal is closed while Spark folds"],
)
def test_an_interrupted_demo_says_so_and_leaves_nothing_on_the_server_of_others(
    tmp_path: Path, others: tuple[str, JetStream], number: signal.Signals, stage: str
) -> None:
    with demo(tmp_path, "--events", "30000", "--servers", others[0]) as run:
        run.read_until(stage)
        os.killpg(run.process.pid, number)  # as a terminal does it
        assert run.end() == 128 + number, run.output
        assert run.output.rstrip().endswith("interrupted")
        assert "Traceback" not in run.output
        assert run.left_behind() == []


def test_a_server_that_has_what_the_demo_would_make_is_refused_until_it_is_removed(
    tmp_path: Path, others: tuple[str, JetStream]
) -> None:
    """As after a demo that was killed."""
    url, js = others
    app = load_shop().release1
    [stream, *_] = app.topology().streams
    js.create_stream(stream)
    with demo(tmp_path, "--events", "1000", "--servers", url) as run:
        assert run.end() == 1
        assert app.stream in run.output
        [remedy] = re.findall(r"`jetspark (.*--remove)`", run.output.replace("\n", " "))
        assert js.stream(app.stream).info().state.messages == 0
    with demo(tmp_path, *remedy.split()[1:]) as run:
        assert run.end() == 0
        assert run.output == f"removed {app.stream}\n"


def test_a_stream_that_no_demo_has_made_is_not_called_one(tmp_path: Path, others: tuple[str, JetStream]) -> None:
    url, js = others
    [stream, *_] = load_shop().release1.topology().streams
    js.create_stream(StreamConfig(name="OLD_SHOP", subjects=(stream.subjects or ())[:1]))
    try:
        with demo(tmp_path, "--events", "1000", "--servers", url) as run:
            assert run.end() == 1
            told = " ".join(run.output.split())
            assert "OLD_SHOP" in told
            assert "which the demo did not create" in told
            assert "--remove" not in told
    finally:
        js.delete_stream("OLD_SHOP")


@pytest.mark.parametrize("removal", [[], ["--remove"]])
def test_a_server_that_is_not_there_is_one_line(tmp_path: Path, removal: list[str]) -> None:
    with demo(tmp_path, "--servers", "nats://127.0.0.1:1", *removal) as run:
        assert run.end() == 1
        told = " ".join(run.output.split())
        assert "127.0.0.1:1" in told
        assert "stage" not in told
        assert "busy" not in told
        assert "Traceback" not in told


@pytest.mark.parametrize("options", [["--events", "0"], ["--remove"]])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: list[str]) -> None:
    with demo(tmp_path, *options) as run:
        assert run.end() != 0
        assert "Traceback" not in run.output
        assert "--remove needs --servers" in run.output or "1000" in run.output


def test_without_java_it_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    environment = {**os.environ, "JAVA_HOME": "", "PATH": str(tmp_path)}
    finished = subprocess.run(COMMAND, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert finished.returncode == 1
    [line] = finished.stderr.splitlines()
    assert "Java 17" in line
    assert "install" in line
