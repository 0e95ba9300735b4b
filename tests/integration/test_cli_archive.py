"""``jetspark archive``, as an operator uses it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.archives import only_table, proved
from support.names import new_stream
from typer.testing import CliRunner

from jetspark import StreamConfig
from jetspark.blocking import JetStream, connect
from jetspark.cli import commands
from jetspark.errors import ConfigError, JetSparkError
from jetspark.lake import find_tables
from jetspark.server import NatsServer

Run = Callable[..., Any]


@pytest.fixture
def js(server: NatsServer) -> Iterator[JetStream]:
    with connect(server.url) as client:
        yield client.jetstream()


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


@pytest.fixture
def run(server: NatsServer, lake: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a subcommand on the archive; returns its output, as JSON where that was asked for."""
    monkeypatch.setenv("JETSPARK_SERVERS", server.url)

    def run(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(commands.app, ["archive", *arguments, "--to", lake])
        if isinstance(result.exception, JetSparkError):
            raise result.exception
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.stdout

    return run


def test_a_stream_from_the_archive_and_back(js: JetStream, run: Run) -> None:
    stream, target = new_stream(js), new_stream(js)
    for number in range(30):
        js.publish(f"{stream.name}.{number}", b"x")
        if number % 10 == 9:
            run("run", stream.name, "--once", "--every", "0s")
    [listed] = run("ls", "--json")
    assert {name: listed[name] for name in ("stream", "first", "next", "rows", "files", "behind")} == {
        "stream": stream.name,
        "first": 1,
        "next": 31,
        "rows": 30,
        "files": 3,
        "behind": 0,
    }
    js.publish(f"{stream.name}.new")
    assert run("ls").splitlines()[1].split()[-2:] == ["3", "1"]
    assert "30 rows in 3 files, 0 deleted\ncomplete" in run("verify", stream.name)
    [verified] = run("verify", stream.name, "--full", "--against-stream", "--json")
    assert (verified["complete"], verified["compared"]) == (True, 30)
    assert "3 files would be merged into 1" in run("compact", stream.name, "--dry-run")
    [compacted] = run("compact", stream.name, "--json")
    assert (compacted["merged"], compacted["into"]) == (3, 1)
    assert "30 messages before sequence 31 would be removed" in run("trim", stream.name, "--keep", "0s")
    assert "nothing to remove" in run("trim", stream.name)
    [trimmed] = run("trim", stream.name, "--keep", "0s", "--yes", "--json")
    assert (trimmed["removed"], trimmed["verified"], stream.info().state.messages) == (30, True, 1)
    subject = f"{target.name}.{{subject}}"
    to = ("restore", stream.name, "--into", target.name, "--subject", subject, "--from-seq", "11")
    assert "20 messages" in run(*to, "--dry-run")
    [restored] = run(*to, "--json")
    assert (restored["restored"], target.info().state.messages) == (20, 20)


def test_a_difference_has_its_own_exit_code(js: JetStream, run: Run, lake: str) -> None:
    stream = new_stream(js)
    js.publish(f"{stream.name}.1")
    run("run", stream.name, "--once")
    table = only_table(lake)
    [file] = table.snapshot().files  # type: ignore[union-attr]
    Path(table.store.location(file.path)).unlink()
    assert "is missing\nNOT complete" in run("verify", stream.name, code=3)
    assert "nothing removed" in run("trim", stream.name, "--keep", "0s", "--yes", code=3)
    assert stream.info().state.messages == 1


def test_streams_that_are_gone_or_re_created_are_listed_so(js: JetStream, run: Run, lake: str) -> None:
    streams = [new_stream(js), new_stream(js)]
    for stream in streams:
        js.publish(f"{stream.name}.1")
        run("run", stream.name, "--once")
        js.delete_stream(stream.name)
    js.create_stream(StreamConfig(name=streams[1].name, subjects=[f"{streams[1].name}.>"]))
    assert {each["stream"]: each["behind"] for each in run("ls", "--json")} == {
        streams[0].name: "deleted",
        streams[1].name: "re-created",
    }
    assert len(run("ls", "--json", "--stream", streams[0].name)) == 1
    js.publish(f"{streams[1].name}.1")
    run("run", streams[1].name, "--once")
    into = new_stream(js).name
    with pytest.raises(ConfigError, match=r"streams named 'S\d+' were created at 20.*, 20.*; give one"):
        run("restore", streams[1].name, "--into", into)
    created = [each.identity.created for each in find_tables(lake, stream=streams[1].name)]
    restore = ("restore", streams[1].name, "--into", into, "--subject", f"{into}.{{subject}}")
    assert "1 messages" in run(*restore, "--created", created[0])
    assert len(run("verify", streams[1].name, "--json")) == 2
    assert len(run("verify", streams[1].name, "--against-stream", "--json")) == 1


def test_wrong_arguments_say_what_is_right(js: JetStream, run: Run) -> None:
    stream = new_stream(js)
    js.publish(f"{stream.name}.1")
    run("run", stream.name, "--once")
    for message, arguments in {
        "--every 60: expected a time such as 60s": ("run", stream.name, "--once", "--every", "60"),
        "no archive of stream 'NOWHERE'; it has": ("verify", "NOWHERE"),
        "--storage-option secret: expected KEY=VALUE": ("ls", "--storage-option", "secret"),
        "option 'aws_region': the folder": ("ls", "--storage-option", "aws_region=x"),
        "expected 3600 or more": ("compact", stream.name, "--remove-after", "1m"),
        "--master needs --engine spark": ("run", stream.name, "--master", "local[2]"),
    }.items():
        with pytest.raises(ConfigError) as caught:
            run(*arguments)
        assert message in str(caught.value)


APP = """
from jetspark.app import App, Event

class Paid(Event, type="order.paid", key="order_id", subject="{stream}.{{order_id}}"):
    order_id: str

app = App("{name}", stream="{stream}", subjects=["{stream}.>"])

@app.handler(Paid, durable="billing")
async def bill(event: Paid) -> None: ...
"""


def test_an_application_is_its_events_and_its_dead_letters(
    js: JetStream, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_to_archive.py").write_text(APP.format(name="toarchive", stream="TOARCHIVE"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    js.create_stream(StreamConfig(name="TOARCHIVE", subjects=["TOARCHIVE.>"]))
    js.create_stream(StreamConfig(name="TOARCHIVE_DLQ", subjects=["dlq.toarchive.>"]))
    js.publish("TOARCHIVE.1", b"")
    js.publish("dlq.toarchive.1", b"")
    run("run", "shop_to_archive:app", "--once")
    assert [each["stream"] for each in run("verify", "shop_to_archive:app", "--json")] == ["TOARCHIVE", "TOARCHIVE_DLQ"]


def test_sigterm_ends_it_with_0_and_commits_what_was_read(server: NatsServer, js: JetStream, lake: str) -> None:
    stream = new_stream(js)
    command = [sys.executable, "-m", "jetspark", "archive", "run", stream.name, "--to", lake, "--every", "0s"]
    process = subprocess.Popen([*command, "--servers", server.url], stderr=subprocess.DEVNULL)
    js.publish(f"{stream.name}.1")
    deadline = time.monotonic() + 120
    while not any(each.snapshot() for each in find_tables(lake)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert proved(only_table(lake), js).rows == 1
