"""``jetspark replay``, ``rebuild``, ``verify`` and ``replays``, as an operator uses them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.apps import publish, running, set_up, until
from typer.testing import CliRunner

import jetspark
from jetspark.app import App
from jetspark.app.replay import VerifyOptions, verify
from jetspark.cli import commands
from jetspark.errors import ConfigError, JetSparkError, UsageError
from jetspark.server import NatsServer

APP = """
from jetspark.app import App, Event

class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    cents: int

app = App("till", stream="TILL", subjects=["orders.>"])

@app.projection("totals", events=[Paid], bucket="totals")
class Totals:
    def key(self, event: Paid) -> str:
        return event.order_id

    def apply(self, state: int | None, event: Paid) -> int:
        if event.cents < 0:
            raise ValueError("nobody pays less than nothing")
        return (state or 0) + event.cents
"""

Run = Callable[..., str]


@pytest.fixture
def till(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str) -> Iterator[Any]:
    yield from _folded_till(tmp_path, monkeypatch, nats_url)


@pytest.fixture
def own_till(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """On a server without passwords, which Spark's options refuse."""
    with NatsServer() as server:
        yield from _folded_till(tmp_path, monkeypatch, server.url)


def _folded_till(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str) -> Iterator[Any]:
    """The application, with ten events folded by a live engine that has ended; one key is parked."""
    (tmp_path / "till.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JETSPARK_SERVERS", nats_url)
    module = importlib.import_module("till")

    async def fold() -> None:
        async with jetspark.connect(nats_url) as client:
            js = client.jetstream()
            await set_up(js, module.app)
            await publish(js, module.app, *(module.Paid(order_id=f"o-{n % 3}", cents=n) for n in range(9)))
            await publish(js, module.app, module.Paid(order_id="o-2", cents=-1))
            kv = await js.kv("totals")
            async with running(module.app, nats_url):
                await until(lambda: _has(kv, "_jetspark.position", b'"sequence": 10'))

    asyncio.run(fold())
    yield module
    del sys.modules["till"]


async def _has(kv: Any, key: str, text: bytes) -> bool:
    return any([text in entry.value async for entry in _entry(kv, key)])


async def _entry(kv: Any, key: str) -> Any:
    for entry in (await kv.snapshot([key])).values():
        yield entry


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(commands.app, list(arguments))
    error = done.exception if not isinstance(done.exception, SystemExit) else None
    if isinstance(error, JetSparkError):  # as the entry point prints it
        assert code == 1, error
        return str(error)
    assert done.exit_code == code, f"{done.output} {error!r}"
    return done.output


def test_a_projection_is_verified_replayed_repaired_and_rebuilt(till: Any) -> None:
    found = json.loads(run("verify", "till:app", "totals", "--json"))
    assert (found["equal"], found["keys"], found["parked"], found["boundary"]) == (True, 3, 1, 10)
    reason = "ValueError: nobody pays less than nothing"
    assert found["parked_keys"] == [{"key": "o-2", "sequence": 10, "reason": reason}]
    assert "equal to its history, sum-sha256:" in run("verify", "till:app", "totals")

    plan = run("replay", "till:app", "totals", "--from-seq", "3", "--to-seq", "5", "--dry-run")
    assert "reads sequences 3 to 5 of stream TILL: all of it is there" in plan
    assert "3 events of 3 keys (o-0, o-1, o-2)" in plan
    assert "would change nothing" in plan
    assert json.loads(run("replay", "till:app", "totals", "--dry-run", "--json"))["events"] == 10
    assert "nothing changed" in run("replay", "till:app", "totals", "--from-seq", "3", "--rate", "1000")
    done = json.loads(run("replay", "till:app", "totals", "--key", "o-1", "--json"))
    assert (done["changed"], done["status"]) == (0, "done")
    assert "is done already" in run("replay", "till:app", "totals", "--resume", done["id"], code=1)

    # Mended in place: the same version, so that the one key that is parked can be repaired.
    till.Totals.apply.__code__ = (lambda self, state, event: (state or 0) + max(event.cents, 0)).__code__
    differs = run("verify", "till:app", "totals", code=3)
    assert "1 keys differ" in differs
    assert "o-2: parked" in differs
    assert "1 keys written" in run("rebuild", "till:app", "totals", "--key", "o-2")
    assert json.loads(run("verify", "till:app", "totals", "--json"))["equal"]

    built = json.loads(run("rebuild", "till:app", "totals", "--verify", "--json"))
    assert (built["new"]["bucket"], built["swapped"], built["verification"]["equal"]) == ("totals_v1", False, True)
    swapped = run("rebuild", "till:app", "totals", "--resume", built["record"]["id"], "--swap", "--drop-old")
    assert "totals -> totals_v1; the old is dropped" in swapped
    assert json.loads(run("verify", "till:app", "totals", "--json"))["bucket"] == "totals_v1"
    kinds = [(each["kind"], each["status"]) for each in json.loads(run("replays", "till:app", "--json"))]
    assert kinds == [("replay", "done"), ("replay", "done"), ("repair", "done"), ("rebuild", "swapped")]
    assert "4 replays" in run("replays", "till:app", "totals")


@pytest.mark.parametrize(
    ("command", "again"),
    [
        ("replay", "jetspark replay till:app totals --resume {id}"),
        ("rebuild --verify --swap", "jetspark rebuild till:app totals --verify --swap --resume {id}"),
        ("rebuild --key o-1", "it is safe to begin again"),
    ],
)
def test_a_command_that_is_interrupted_says_how_to_go_on(till: Any, command: str, again: str) -> None:
    name, *options = command.split()
    arguments = [name, "till:app", "totals", *options, "--rate", "1"]  # ten seconds
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-m", "jetspark", *arguments], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        asyncio.run(until(_is_begun, timeout=30))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    [record] = json.loads(run("replays", "till:app", "--json"))
    id = record["id"]
    assert said.startswith(f"jetspark: interrupted: {record['kind']} {id} is at ")
    assert again.format(id=id) in said
    if "--resume" in again:
        run(*again.format(id=id).split()[1:])
        assert json.loads(run("replays", "till:app", "--json"))[0]["status"] in ("done", "swapped")


async def _is_begun() -> bool:
    """Whether a command has written its record."""
    async with jetspark.connect(os.environ["JETSPARK_SERVERS"]) as client:
        records = await client.jetstream().kv("till_projections")
        return [key async for key in records.keys("totals.replay.*")] != []


@pytest.mark.parametrize(
    "command", ["verify", "replay", "replay --dry-run", "rebuild", "rebuild --dry-run", "rebuild --key a", "replays"]
)
def test_an_application_that_was_not_applied_is_told_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str, command: str
) -> None:
    (tmp_path / "till.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JETSPARK_SERVERS", nats_url)
    name, *options = command.split()
    said = run(name, "till:app", "totals", *options, code=1)
    assert "see `jetspark plan`, then `jetspark apply`" in said
    assert "there is no bucket 'till_projections'" in said
    del sys.modules["till"]


def test_a_record_that_nobody_can_read_is_named_beside_the_others(till: Any) -> None:
    async def put() -> None:
        async with jetspark.connect(os.environ["JETSPARK_SERVERS"]) as client:
            await (await client.jetstream().kv("till_projections")).put("totals.replay.x", b"what is this")

    run("replay", "till:app", "totals")
    asyncio.run(put())
    done = CliRunner().invoke(commands.app, ["replays", "till:app"])
    assert done.exit_code == 0
    assert "1 replays" in done.stdout
    assert "record totals.replay.x is left out: the record of a job is not readable: b'what is this'" in done.stderr
    listed = CliRunner().invoke(commands.app, ["replays", "till:app", "--json"])
    assert len(json.loads(listed.stdout)) == 1
    assert "totals.replay.x is left out" in listed.stderr


def test_buckets_that_are_not_in_use_are_listed_and_dropped(till: Any) -> None:
    def buckets() -> list[str]:
        return asyncio.run(_buckets())

    first = json.loads(run("rebuild", "till:app", "totals", "--json"))["record"]["id"]
    second = json.loads(run("rebuild", "till:app", "totals", "--swap", "--json"))["record"]["id"]
    assert buckets() == ["totals", "totals_v1", "totals_v1_r1"]
    listed = run("replays", "till:app")
    assert "bucket totals_v1, built" in listed
    assert "bucket totals_v1_r1, swapped" in listed
    assert "totals_v1_r1 is in use" in run("rebuild", "till:app", "totals", "--drop", second, code=1)
    refused = run("rebuild", "till:app", "totals", "--drop", first, "--swap", code=1)
    assert "--drop cannot be combined with --swap" in refused
    assert "no job has this id" in run("rebuild", "till:app", "totals", "--drop", "r0", code=1)
    assert "bucket totals_v1, dropped" in run("rebuild", "till:app", "totals", "--drop", first)
    assert "was dropped already" in run("rebuild", "till:app", "totals", "--drop", first, code=1)
    assert "it is dropped already" in run("rebuild", "till:app", "totals", "--resume", first, code=1)
    assert buckets() == ["totals", "totals_v1_r1"]
    # What a swap has left behind can be dropped later.
    third = json.loads(run("rebuild", "till:app", "totals", "--swap", "--json"))
    assert (third["old_dropped"], buckets()) == (False, ["totals", "totals_v1", "totals_v1_r1"])
    resume = ["rebuild", "till:app", "totals", "--resume", third["record"]["id"], "--swap", "--drop-old"]
    assert "totals_v1_r1 -> totals_v1; the old is dropped" in run(*resume)
    assert buckets() == ["totals", "totals_v1"]
    assert "was dropped already" in run(*resume, code=1)
    assert json.loads(run("verify", "till:app", "totals", "--json"))["equal"]


async def _buckets() -> list[str]:
    async with jetspark.connect(os.environ["JETSPARK_SERVERS"]) as client:
        found = [info.config.name async for info in client.jetstream().streams()]
    return sorted(name.removeprefix("KV_") for name in found if name.startswith("KV_totals"))


def test_a_boundary_that_the_bucket_has_not_reached_is_refused(till: Any) -> None:
    async def publish_more() -> None:
        async with jetspark.connect(os.environ["JETSPARK_SERVERS"]) as client:
            await publish(client.jetstream(), till.app, till.Paid(order_id="o-0", cents=1))

    asyncio.run(publish_more())
    refused = asyncio.run(_refusal(till, to_seq=11))
    assert "to_seq=11: bucket totals has reached only sequence 10: does a worker run? Expected 10 or less" in refused
    assert json.loads(run("verify", "till:app", "totals", "--to-seq", "10", "--json"))["equal"]


async def _refusal(till: Any, to_seq: int) -> str:
    async with jetspark.connect(os.environ["JETSPARK_SERVERS"]) as client:
        with pytest.raises(UsageError) as refused:
            await verify(client.jetstream(), till.app, "totals", VerifyOptions(to_seq=to_seq, wait_s=0.2))
    return str(refused.value)


def test_code_of_another_version_is_told_and_no_key_is_listed(till: Any) -> None:
    newer = App("till", stream="TILL", subjects=["orders.>"])
    newer.projection("totals", events=[till.Paid], bucket="totals", version=2)(till.Totals)
    till.app = newer
    message = "'totals' is at version 1 (bucket totals), and this code is version 2: rebuild it and swap"
    assert message in run("verify", "till:app", "totals", code=1)


def test_a_rebuild_says_beforehand_which_values_it_would_change(till: Any) -> None:
    assert "would change none of 3 keys" in run("rebuild", "till:app", "totals", "--dry-run")
    newer = App("till", stream="TILL", subjects=["orders.>"])
    newer.projection("totals", events=[till.Paid], bucket="totals", version=2)(Larger)
    till.app = newer
    said = run("rebuild", "till:app", "totals", "--dry-run")
    assert "bucket totals in use is of version 1, at sequence 10" in said
    assert "reads sequences 1 to 10 of stream TILL: all of it is there" in said
    assert "would change 2 keys; the bucket has 3" in said
    assert "o-1: 12 at 8 -> 112 at 8\n" in said
    assert "o-2: 15 at 9, parked at 10 -> 15 at 10\n" in said
    found = json.loads(run("rebuild", "till:app", "totals", "--dry-run", "--json"))
    assert (found["old_version"], found["version"], found["difference_count"], found["reads"]["last"]) == (1, 2, 2, 10)
    assert {each["key"] for each in found["differences"]} == {"o-1", "o-2"}
    assert asyncio.run(_buckets()) == ["totals"]
    refused = run("rebuild", "till:app", "totals", "--dry-run", "--swap", code=1)
    assert "--dry-run cannot be combined with --swap" in refused


class Larger:
    """Refuses nothing, and counts the fifth event for more."""

    def key(self, event: Any) -> str:
        return str(event.order_id)

    def apply(self, state: int | None, event: Any) -> int:
        cents: int = event.cents
        return (state or 0) + max(cents, 0) + 100 * (cents == 4)


def test_a_replay_of_late_events_gives_a_key_its_earlier_events_too(till: Any) -> None:
    right = json.loads(run("verify", "till:app", "totals", "--json"))["digest"]
    asyncio.run(_forget("o-0"))
    assert "1 keys written" in run("replay", "till:app", "totals", "--from-seq", "5")
    assert json.loads(run("verify", "till:app", "totals", "--json"))["digest"] == right


async def _forget(key: str) -> None:
    """As if it had never been folded."""
    async with jetspark.connect(os.environ["JETSPARK_SERVERS"]) as client:
        await (await client.jetstream().stream("KV_totals")).purge(subject=f"$KV.totals.{key}")


def test_a_stream_without_its_first_events_is_rebuilt_from_a_bucket(till: Any, nats_url: str) -> None:
    async def cut() -> None:
        async with jetspark.connect(nats_url) as client:
            await (await client.jetstream().stream("TILL")).purge(up_to_sequence=8)

    asyncio.run(cut())
    assert "jetspark rebuild --from-bucket" in run("rebuild", "till:app", "totals", code=1)
    built = json.loads(run("rebuild", "till:app", "totals", "--from-bucket", "totals", "--swap", "--json"))
    # The event at which o-2 is parked is there, so it is folded once more.
    assert (built["record"]["base"], built["record"]["first"], built["swapped"]) == ("totals", 10, True)
    assert "with the states of totals before 10" in run("replays", "till:app")
    for options in (["--verify"], ["--dry-run"], ["--key", "o-1"], ["--resume", "x"]):
        refused = run("rebuild", "till:app", "totals", "--from-bucket", "totals", *options, code=1)
        assert "cannot be combined with" in refused


def test_what_cannot_be_meant_is_refused(till: Any) -> None:
    assert "expected a time such as" in run("replay", "till:app", "totals", "--since", "yesterday", code=1)
    assert "expected a time zone" in run("replay", "till:app", "totals", "--since", "2026-03-20T10:00:00", code=1)
    refused = run("replay", "till:app", "totals", "--resume", "r1", "--to-seq", "2", code=1)
    assert "--resume cannot be combined with a range" in refused
    refused = run("replay", "till:app", "totals", "--resume", "no", "--dry-run", code=1)
    assert "--resume cannot be combined with --dry-run" in refused
    refused = run("rebuild", "till:app", "totals", "--key", "o-1", "--swap", code=1)
    assert "--key cannot be combined with --swap" in refused
    assert "--drop-old needs --swap" in run("rebuild", "till:app", "totals", "--drop-old", code=1)
    assert "it has totals" in run("verify", "till:app", "sums", code=1)
    assert "--engine spark" in run("rebuild", "till:app", "totals", "--key", "o-1", "--engine", "spark", code=1)
    for command in ("verify", "replay", "rebuild", "run"):
        name = ["totals"] if command != "run" else []
        assert "--master needs --engine spark" in run(command, "till:app", *name, "--remote", "sc://x", code=1)
    assert "--py-files needs --engine spark" in run("verify", "till:app", "totals", "--py-files", "till.py", code=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spark_folds_for_verify_replay_and_rebuild(own_till: Any) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("pandas")
    from pyspark.sql import SparkSession

    from jetspark.spark.session import session, short_session

    # This process may have the session that other tests share, and has only one.
    shared = SparkSession.getActiveSession()
    master = "local[1]" if shared is None else str(shared.sparkContext.master)
    with short_session(master=master) as spark:
        assert spark.sparkContext.master == master
        place = ("--engine", "spark", "--master", master, "--py-files", "till.py")
        found = json.loads(run("verify", "till:app", "totals", *place, "--json"))
        assert any(file.endswith("/till.py") for file in spark.sparkContext.listFiles)
        with pytest.raises(ConfigError, match=rf"has a session with master {re.escape(master)} already"):
            session(master="spark://127.0.0.1:1")
    assert (found["equal"], found["keys"], found["parked"], found["boundary"]) == (True, 3, 1, 10)
    right = json.loads(run("verify", "till:app", "totals", "--json"))["digest"]
    assert found["digest"] == right
    asyncio.run(_forget("o-0"))
    assert "1 keys written" in run("replay", "till:app", "totals", "--from-seq", "5", "--engine", "spark")
    assert json.loads(run("verify", "till:app", "totals", "--json"))["digest"] == right
    rebuilt = run("rebuild", "till:app", "totals", "--engine", "spark", "--verify", "--swap", "--json")
    built = json.loads(rebuilt)
    assert (built["swapped"], built["verification"]["digest"], built["record"]["parked"]) == (True, right, 1)
    assert json.loads(run("verify", "till:app", "totals", "--json"))["digest"] == right
