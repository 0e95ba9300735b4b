"""``jetspark lag``, as whoever is on call uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import jetspark.blocking
from jetspark import ConsumerConfig, StreamConfig
from jetspark.blocking import JetStream
from jetspark.cli import commands
from jetspark.errors import JetSparkError
from jetspark.server import NatsServer

APP = """
from jetspark.app import App, Event

class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str

app = App("shop", stream="SHOP", subjects=["orders.>"])

@app.handler(Paid, durable="billing")
async def bill(event: Paid) -> None:
    pass

@app.projection("status", events=[Paid], bucket="status")
class Status:
    def key(self, event): return event.order_id
    def apply(self, state, event): return {}
"""
GOLDEN = Path(__file__).parents[1] / "unit" / "golden_lag_report.json"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JetStream]:
    """An application that was applied and has three events, which nobody has handled."""
    (tmp_path / "shop.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with NatsServer() as server, jetspark.blocking.connect(server.url) as client:
        monkeypatch.setenv("JETSPARK_SERVERS", server.url)
        run("apply", "shop:app")
        js = client.jetstream()
        for number in range(3):
            js.publish(f"orders.{number}.paid", b"")
        js.publish("orders.1.other", b"")
        yield js
    sys.modules.pop("shop", None)


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(commands.app, list(arguments))
    error = done.exception if not isinstance(done.exception, SystemExit) else None
    if isinstance(error, JetSparkError):  # as the entry point prints it
        assert code == 1, error
        return str(error)
    assert done.exit_code == code, f"{done.output} {error!r}"
    return done.output


def lines(text: str) -> list[list[str]]:
    """The rows of the table, each as its words."""
    return [line.split() for line in text.splitlines() if line.strip()]


def test_a_table_for_people(shop: JetStream) -> None:
    title, header, *rows = lines(run("lag", "shop:app"))
    assert (title[0], header) == ("shop", ["READER", "KIND", "STREAM", "BEHIND", "OLDEST", "WHERE"])
    assert [(row[0], row[1], row[3], row[5:]) for row in rows] == [
        ("billing", "handler", "3", ["3", "waiting"]),
        ("status", "projection", "3", ["3", "waiting;", "it", "was", "not", "started", "yet"]),
    ]
    # The handler's consumer delivers the subjects of its events only: the last message is not counted.
    title, _, *rows = lines(run("lag"))
    assert title[:2] == ["all", "consumers"]
    assert rows[0][:5] == ["billing", "consumer", "SHOP", "3", rows[0][4]]


def test_json_for_programs(shop: JetStream) -> None:
    found, golden = json.loads(run("lag", "shop:app", "--json")), json.loads(GOLDEN.read_text())
    assert found.keys() == golden.keys()
    assert [row.keys() for row in found["rows"]] == [golden["rows"][0].keys()] * 2
    assert (found["schema"], found["app"], found["complete"]) == (golden["schema"], "shop", True)
    assert [(row["name"], row["messages"]) for row in found["rows"]] == [("billing", 3), ("status", 3)]


def test_consumers_of_a_stream_beside_those_of_the_application(shop: JetStream) -> None:
    shop.stream("SHOP").create_consumer(ConsumerConfig(durable_name="foreign"))
    shop.create_stream(StreamConfig(name="OTHER", subjects=["other"])).create_consumer(
        ConsumerConfig(durable_name="elsewhere")
    )

    def names(*arguments: str) -> list[str]:
        return sorted(row["name"] for row in json.loads(run("lag", *arguments, "--json"))["rows"])

    assert names("shop:app", "--stream", "SHOP") == ["billing", "foreign", "status"]
    assert names("--stream", "SHOP") == ["billing", "foreign"]
    assert names("--stream", "SHOP", "--stream", "OTHER") == ["billing", "elsewhere", "foreign"]


def test_what_cannot_be_measured_is_named_and_shows_in_the_exit_code(shop: JetStream) -> None:
    shop.stream("SHOP").delete_consumer("billing")
    out = run("lag", "shop:app", code=4)
    assert "unknown: consumer billing of SHOP does not exist; see `jetspark plan`" in out
    assert " 3 waiting" in out
    assert json.loads(run("lag", "shop:app", "--json", code=4))["complete"] is False


def test_a_spark_query_is_measured_by_its_checkpoint(shop: JetStream, tmp_path: Path) -> None:
    for name in ("offsets", "commits"):
        (tmp_path / "query" / name).mkdir(parents=True)
    created = shop.stream("SHOP").cached_info.created
    assert created is not None
    offset = {"version": 2, "step": 1, "subjects": [], "streams": {"SHOP": {"created": created.isoformat(), "next": 3}}}
    (tmp_path / "query" / "offsets" / "0").write_text(f"v1\n{{}}\n{json.dumps(offset)}")
    (tmp_path / "query" / "commits" / "0").write_text("v1\n{}")
    [row] = json.loads(run("lag", "--checkpoint", "query", "--json"))["rows"]
    assert (row["kind"], row["name"], row["stream"], row["messages"]) == ("spark", "query", "SHOP", 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere:app"], "module 'nowhere' was not found"),
        (["shop:none"], "'none' was not found; apps in shop: app"),
        (["shop"], "expected MODULE:APP"),
        (["--stream", "NOPE"], "there is no stream 'NOPE'"),
        (["--stream", "a b"], "' ' not allowed"),
        (["--checkpoint", "nowhere"], "expected a folder with offsets and commits"),
        (["--every", "3"], "--every 3 needs --watch"),
    ],
)
def test_a_mistake_is_one_line(shop: JetStream, arguments: list[str], expected: str) -> None:
    message = run("lag", *arguments, code=1)
    assert expected in message
    assert "\n" not in message


def test_a_pause_that_is_too_short_is_refused(shop: JetStream) -> None:
    assert "0" in run("lag", "--watch", "--every", "0", code=2)


def test_an_application_that_was_not_applied(shop: JetStream) -> None:
    shop.delete_stream("SHOP")
    assert "`jetspark apply`" in run("lag", "shop:app", code=1)


def test_a_stopped_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer() as server:
        monkeypatch.setenv("JETSPARK_SERVERS", server.url)
    assert "connection refused" in run("lag", code=1).lower()


def test_an_account_without_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer() as server:
        monkeypatch.setenv("JETSPARK_SERVERS", server.url)
        assert "no consumers" in run("lag")
        assert json.loads(run("lag", "--json"))["rows"] == []


def _start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "jetspark", "lag", "--watch", "--every", "0.2", *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_watch_measures_again_until_it_is_interrupted(shop: JetStream, tmp_path: Path) -> None:
    process = _start("shop:app", "--json", folder=tmp_path)
    assert process.stdout is not None
    reports: list[Any] = []
    for number in range(4):
        reports.append(json.loads(process.stdout.readline()))
        shop.publish(f"orders.{number}.paid", b"")
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=60)
    assert [json.loads(line)["schema"] for line in rest.splitlines()] == [1] * rest.count("\n")
    assert (process.returncode, error) == (130, "")
    rows = [next(row for row in report["rows"] if row["name"] == "billing") for report in reports]
    assert [row["messages_per_s"] is None for row in rows] == [True, True, False, False]
    assert rows[-1]["messages_per_s"] > 0
    assert rows[-1]["caught_up_in_s"] is None


def test_watch_prints_a_table_each_time_in_a_pipe(shop: JetStream, tmp_path: Path) -> None:
    process = _start("shop:app", folder=tmp_path)
    assert process.stdout is not None
    text = ""
    while text.count("READER") < 3 or not text.endswith("\n"):
        text += process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert "OUTLOOK" in text
