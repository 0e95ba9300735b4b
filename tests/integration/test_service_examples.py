"""The examples of services are used as their READMEs say: their tests, their workers, the programs that publish."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jetspark.blocking import Client, connect
from jetspark.errors import NoResponders

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVICES = ("billing", "fulfilment")
COMMAND = [sys.executable, "-m", "jetspark"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples alone, away from this repository and its settings."""
    for name in SERVICES:
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SERVICES)
def test_the_tests_of_the_example_pass(folder: Path, name: str) -> None:
    options = ["-q", "-W", "error", "-p", "pytest_jetspark", "-p", "no:cacheprovider"]
    finished = _run([sys.executable, "-m", "pytest", *options, name], folder)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout


@pytest.mark.parametrize("app", ["billing.service:app", "fulfilment.shop:app"])
def test_there_is_nothing_to_say_against_the_example(folder: Path, app: str) -> None:
    checked = _run([*COMMAND, "check", "--strict", app], folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.timeout(600)
def test_the_example_is_run_and_published_to_from_the_shell(folder: Path, nats_url: str) -> None:
    with connect(nats_url) as client:
        workers = subprocess.Popen(
            [*COMMAND, "run", "billing.service:app", "--apply", "--servers", nats_url], cwd=folder
        )
        try:
            js = client.jetstream()
            while "KV_balances" not in js.stream_names():  # the workers make what the application declares
                assert workers.poll() is None
                time.sleep(0.05)
            publish = [sys.executable, "-m", "billing.bill", "acme", "1999"]
            said = [_run(publish, folder, JETSPARK_SERVERS=nats_url).stdout for _ in range(2)]
            assert said == ["stored as number 1\n", "is known already\n"]
            balances = js.kv("balances")
            assert next(entry.value for entry in balances.watch("acme")) == b"1999"
        finally:
            workers.send_signal(signal.SIGTERM)
            assert workers.wait(120) == 0


@pytest.mark.timeout(600)
def test_an_order_is_placed_paid_and_shipped_from_the_shell(folder: Path, nats_url: str) -> None:
    applied = _run([*COMMAND, "apply", "fulfilment.shop:app", "--servers", nats_url], folder)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    workers = subprocess.Popen([*COMMAND, "run", "fulfilment.shop:app", "--servers", nats_url], cwd=folder)
    try:
        with connect(nats_url) as client:
            while not _serves(client, "shop"):
                assert workers.poll() is None
                time.sleep(0.05)
        place = [sys.executable, "-m", "fulfilment.place", "o-1", "tea", "2"]
        placed = _run(place, folder, JETSPARK_SERVERS=nats_url)
        assert placed.stdout == "done shipped\n", placed.stderr
        show = [*COMMAND, "workflow", "show", "fulfilment.shop:app", "fulfilment", "o-1"]
        shown = _run(show, folder, JETSPARK_SERVERS=nats_url)
        assert "order.paid" in shown.stdout
    finally:
        workers.send_signal(signal.SIGTERM)
        assert workers.wait(120) == 0


def _serves(client: Client, service: str) -> bool:
    try:
        client.request(f"$SRV.PING.{service}", timeout=5.0)
    except NoResponders:
        return False
    return True


def _run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
