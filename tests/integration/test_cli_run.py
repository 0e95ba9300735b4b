"""``jetspark run`` with several processes, and with sources that change."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetspark.cli import commands
from jetspark.cli.run_spark import spark_options
from jetspark.cli.supervising import MAX_REFUSALS, STEADY_S, Slot, Supervisor, source_files
from jetspark.core.backoff import Backoff
from jetspark.errors import ConfigError
from jetspark.server import NatsServer, Permissions, User

APP = """
import os
from collections.abc import AsyncIterator
from jetspark.app import App, Event

class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str

app = App("shop", stream="SHOP", subjects=["orders.>"])

class Noted: pass

@app.lifespan
async def noted() -> AsyncIterator[Noted]:
    with open("pids", "a") as file:
        file.write(f"VERSION {os.getpid()}\\n")
    yield Noted()
    with open("ends", "a") as file:
        file.write(f"{os.getpid()}\\n")

@app.handler(Paid, durable="billing", partitions=2, takeover_s=1.0)
async def bill(event: Paid) -> None: ...
"""


def started(folder: Path) -> list[list[str]]:
    path = folder / "pids"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


@pytest.fixture
def start(folder: Path, server: NatsServer) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    processes = []

    def run(*options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "jetspark", "run", "shop:app", "--apply", "--stop-timeout", "5", *options]
        environment = {**os.environ, "JETSPARK_SERVERS": server.url}
        processes.append(subprocess.Popen(command, cwd=folder, env=environment))
        return processes[-1]

    yield run
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.wait(120)


def test_a_worker_that_dies_is_replaced_and_sigterm_ends_all(
    folder: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    parent = start("--workers", "2")
    wait_for(lambda: len(started(folder)) == 2, parent)
    os.kill(int(started(folder)[0][1]), signal.SIGKILL)
    wait_for(lambda: len(started(folder)) == 3, parent)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(120) == 0
    ended = (folder / "ends").read_text().split()
    assert sorted(ended) == sorted(pid for _, pid in started(folder)[1:])


def test_sigterm_ends_one_whose_lifespan_still_waits_and_closes_what_is_open(
    folder: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    waiting = """
@app.lifespan
async def database() -> AsyncIterator[int]:
    open("waits", "w").close()
    await asyncio.Event().wait()
    yield 1
"""
    (folder / "shop.py").write_text(f"import asyncio\n{APP}{waiting}")
    process = start()
    wait_for((folder / "waits").exists, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert (folder / "ends").read_text().split() == [str(process.pid)]


@pytest.mark.slow
def test_one_whose_handler_swallows_every_cancellation_ends_with_an_error(tmp_path: Path, server: NatsServer) -> None:
    (tmp_path / "stuck.py").write_text("""
import asyncio
import os
from jetspark.app import App, Event, Retry

class Happened(Event, type="happened", key="name", subject="stuck.{name}"):
    name: str

app = App("stuck", stream="STUCK", subjects=["stuck.>"])

@app.lifespan
async def one_event():
    async with app.connect(os.environ["JETSPARK_SERVERS"]) as client:
        await client.publish(Happened(name="a"))
    yield

@app.handler(Happened, durable="stuck", ack_wait_s=1.0, timeout=0.2, retry=Retry(in_lane_s=0.0))
async def handle(event: Happened) -> None:
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
""")
    environment = {**os.environ, "JETSPARK_SERVERS": server.url}
    command = [sys.executable, "-m", "jetspark"]
    subprocess.run([*command, "apply", "stuck:app"], cwd=tmp_path, env=environment, check=True, timeout=120)
    ended = subprocess.run(
        [*command, "run", "stuck:app"], cwd=tmp_path, env=environment, timeout=120, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("it was cancelled and still runs, until the process ends\n")


def test_sigterm_ends_one_whose_server_does_not_greet(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {**os.environ, "JETSPARK_SERVERS": f"nats://127.0.0.1:{silent.getsockname()[1]}"}
        process = subprocess.Popen([sys.executable, "-m", "jetspark", "run", "shop:app"], cwd=folder, env=environment)
        try:
            with silent.accept()[0]:
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()


def test_workers_end_when_their_parent_is_killed(folder: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    parent = start("--workers", "2")
    wait_for(lambda: len(started(folder)) == 2, parent)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while any(is_running(pid) for _, pid in started(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_changed_sources_restart_the_workers(folder: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    parent = start("--reload")
    wait_for(lambda: len(started(folder)) == 1, parent)
    (folder / "shop.py").write_text(APP.replace("VERSION", "SECOND"))
    wait_for(lambda: len(started(folder)) == 2, parent)
    assert started(folder)[1][0] == "SECOND"
    assert (folder / "ends").read_text().split() == [started(folder)[0][1]]
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(120) == 0


def waits_of(code: int) -> list[float]:
    slot, waits = Slot(), []
    for _ in range(4):
        slot.end(code, slot.started_at + 1.0)
        waits.append(slot.start_at - slot.started_at - 1.0)
    assert slot.refusals == (4 if code > 0 else 0)  # what is killed is not given up
    slot.end(code, slot.started_at + STEADY_S)
    assert slot.failures == slot.refusals == 0
    return waits


def test_the_wait_for_a_replacement_doubles_until_one_has_lived() -> None:
    assert waits_of(1) == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert waits_of(-9) == pytest.approx([0.2, 0.4, 0.8, 1.0])


def test_a_program_that_cannot_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor([sys.executable, "-c", "raise SystemExit(3)"], 1, 1.0)
    monkeypatch.setattr("jetspark.cli.supervising.RESTART_PAUSE", Backoff(first_s=0.0, max_s=0.0))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert supervisor.run() == 3
    assert supervisor._slots[0].refusals == MAX_REFUSALS


def test_sources_are_those_below_the_folder(tmp_path: Path) -> None:
    for name in ("a.py", "inner/b.py", ".venv/c.py", "inner/__pycache__/d.py", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert sorted(path.name for path in source_files(tmp_path)) == ["a.py", "b.py"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--engine", "spark", "--workers", "2", "--lease", "5"],
            "--engine spark cannot be combined with --workers, --lease",
        ),
        (["--engine", "spark", "--reload"], "--engine spark cannot be combined with --reload"),
        (["--engine", "spark", "--partitions", "2"], "cannot be combined with --partitions"),
        (["--engine", "spark", "--stop-timeout", "1"], "cannot be combined with --stop-timeout"),
        (["--checkpoint", "here"], "--checkpoint needs --engine spark"),
    ],
)
def test_options_of_the_other_engine_are_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(commands.app, ["run", "shop:app", *options])
    assert message in str(done.exception)


def test_a_user_in_the_url_reaches_spark_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETSPARK_SPARK_SECRET", "")
    assert spark_options({"servers": "nats://host:4222"}) == {"servers": "nats://host:4222"}
    given = spark_options({"servers": ["nats://ann:a%40b@one:4222", "tls://ann:a%40b@two"]})
    assert given == {
        "servers": ["nats://one:4222", "tls://two"],
        "user": "ann",
        "passwordEnv": "JETSPARK_SPARK_SECRET",
    }
    assert os.environ["JETSPARK_SPARK_SECRET"] == "a@b"
    assert spark_options({"servers": ["token@one"]}) == {"servers": ["one"], "tokenEnv": "JETSPARK_SPARK_SECRET"}
    assert os.environ["JETSPARK_SPARK_SECRET"] == "token"
    with pytest.raises(ConfigError, match="one user for all of them"):
        spark_options({"servers": ["nats://ann:1@one", "nats://two"]})


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_user_without_rights_is_told_once_what_is_denied(tmp_path: Path, command: str) -> None:
    (tmp_path / "shop.py").write_text(APP)
    rights = Permissions(publish_allow=["nothing"], subscribe_allow=["_INBOX.>"])
    with NatsServer(users=[User(user="a", password="b", permissions=rights)]) as server:
        ended = subprocess.run(
            [sys.executable, "-m", "jetspark", command, "shop:app", "--servers", server.url.replace("://", "://a:b@")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 1
    assert (ended.stdout + ended.stderr).count("permission denied") == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("jetspark: permission denied: this user may not publish to '$JS.API.STREAM.INFO.")
