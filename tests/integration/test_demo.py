"""The demo as a shell sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jetspark import StreamConfig
from jetspark.blocking import connect
from jetspark.server import NatsServer

COMMAND = [sys.executable, "-c", "import typer; from jetspark.cli.demo import demo; typer.run(demo)"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_order_pipeline_runs_beside_other_streams_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with NatsServer() as server, connect(server.url) as nc:
        js = nc.jetstream()
        own = js.create_stream(StreamConfig(name="ORDERS", subjects=["orders.>"]))
        js.publish("orders.created", b"not the demo's")
        finished = subprocess.run(
            [*COMMAND, "--events", "20000", "--servers", server.url],
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        lines = finished.stdout.splitlines()
        assert "the same as computed in plain Python" in lines
        assert any(line.startswith("a second run, and a replay") and line.endswith("changed nothing") for line in lines)
        assert "5 dead letters" in finished.stdout
        assert own.info().state.messages == 1
        assert [name for name in js.stream_names() if "demo" in name.lower()] == []
    assert [path.name for path in tmp_path.iterdir() if "demo" in path.name] == []


def test_a_count_below_one_is_refused() -> None:
    finished = subprocess.run([*COMMAND, "--events", "0"], capture_output=True, text=True, timeout=250, check=False)
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr


def test_without_java_it_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    environment = {**os.environ, "JAVA_HOME": "", "PATH": str(tmp_path)}
    finished = subprocess.run(COMMAND, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert finished.returncode == 1
    [line] = finished.stderr.splitlines()
    assert "Java 17" in line
    assert "install" in line
