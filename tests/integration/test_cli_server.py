"""``jetspark server`` as a shell sees it: one line on standard output, exit codes, signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jetspark.server import NatsServer

COMMAND = [sys.executable, "-m", "jetspark.cli.main", "server"]


@contextmanager
def running(*options: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    url = process.stdout.readline().rstrip("\n")
    assert url, f"it ended without serving: {process.communicate(timeout=250.0)[1]}"
    return url


def greeting(url: str) -> bytes:
    host, port = url.removeprefix("nats://").split(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as client:
        return client.recv(5)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_url_serves_and_stops_cleanly(ending: signal.Signals) -> None:
    with running("--port", "0") as process:
        url = url_of(process)
        assert greeting(url) == b"INFO "
        process.send_signal(ending)
        rest, notes = process.communicate(timeout=250.0)
    assert process.returncode == 0
    assert rest == ""
    assert notes.splitlines()[-1] == "stopped"
    assert "temporary: removed when the server stops" in notes
    assert "every two minutes" in notes
    assert "Traceback" not in notes
    with pytest.raises(ConnectionRefusedError):
        greeting(url)


def test_a_store_is_kept_and_durability_announced(tmp_path: Path) -> None:
    with running("--port", "0", "--store", str(tmp_path / "data"), "--durable") as process:
        assert greeting(url_of(process)) == b"INFO "
        process.terminate()
        _, notes = process.communicate(timeout=250.0)
    assert process.returncode == 0, notes
    assert "before each acknowledgement" in notes
    assert (tmp_path / "data" / "jetstream").is_dir()


def test_without_jetstream_there_are_no_streams() -> None:
    with running("--port", "0", "--no-jetstream") as process:
        assert greeting(url_of(process)) == b"INFO "
        process.terminate()
        _, notes = process.communicate(timeout=250.0)
    assert process.returncode == 0
    assert ["streams", "off"] in [line.split() for line in notes.splitlines()]


def test_a_taken_port_is_one_line_and_exit_code_1() -> None:
    with NatsServer() as other, running("--port", str(other.port)) as process:
        out, notes = process.communicate(timeout=250.0)
    assert process.returncode == 1
    assert out == ""
    assert len(notes.splitlines()) == 1
    assert f"error: nats-server could not listen: port {other.port} is already in use" in notes
    assert "--port" in notes


def test_options_that_cannot_work_together_are_one_line_and_exit_code_1() -> None:
    with running("--port", "0", "--durable", "--no-jetstream") as process:
        out, notes = process.communicate(timeout=250.0)
    assert process.returncode == 1
    assert out == ""
    assert notes.splitlines() == [
        "error: durable=True with jetstream=False: there is no storage to set up",
    ]


def test_a_store_that_is_a_file_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    taken = tmp_path / "data"
    taken.write_text("precious")
    with running("--port", "0", "--store", str(taken)) as process:
        out, notes = process.communicate(timeout=250.0)
    assert process.returncode == 1
    assert out == ""
    assert notes.splitlines() == [
        f"error: store_dir={str(taken)!r}: File exists; expected a folder that can be written"
    ]
    assert taken.read_text() == "precious"


def test_a_file_of_further_settings_is_used(tmp_path: Path) -> None:
    settings = tmp_path / "more.conf"
    settings.write_text("max_payload: 1234\n")
    with running("--port", "0", "--config", str(settings)) as process:
        host, port = url_of(process).removeprefix("nats://").split(":")
        with socket.create_connection((host, int(port)), timeout=60.0) as client:
            assert b'"max_payload":1234' in client.recv(65536)
        process.terminate()
        process.communicate(timeout=250.0)
    assert process.returncode == 0


def test_a_server_that_dies_is_an_error_with_its_log() -> None:
    with running("--port", "0") as process:
        url_of(process)
        assert process.stderr is not None
        first = process.stderr.readline()
        pid = int(first.rstrip().rpartition("pid ")[2])
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
        _, notes = process.communicate(timeout=250.0)
    assert process.returncode == 1
    assert "error: nats-server ended by itself" in notes
