"""Replays, rebuilds, verifications and views from an archive and a stream: a real server, real tables."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import mixed
from support.apps import publish, running, set_up, until
from support.archive_ranges import archive_stream, compact_archive
from support.projections import Moved, Opened, bank, folded, in_buckets, in_stream, some_events
from typer.testing import CliRunner

from jetspark import StreamConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Context, Event
from jetspark.app.replay import (
    HandlerReplayOptions,
    RebuildOptions,
    ReplayRequest,
    plan_handler_replay,
    plan_replay,
    preview_rebuild,
    rebuild,
    repair_keys,
    replay_handler,
    run_replay,
    verify,
)
from jetspark.blocking import connect
from jetspark.cli import commands
from jetspark.errors import ConfigError, DataLoss, StreamNotFound, StreamRecreated
from jetspark.lake import hybrid
from jetspark.server import NatsServer


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


async def archived(server: NatsServer, lake: str, stream: str, **options: Any) -> int:
    def run() -> int:
        with connect(server.url) as client:
            return archive_stream(client.jetstream(), lake, stream, **options)

    return await asyncio.to_thread(run)


async def purge(js: JetStream, stream: str, up_to: int) -> None:
    await (await js.stream(stream)).purge(up_to_sequence=up_to)


async def in_bucket(js: JetStream, app: App, name: str, bucket: str) -> Any:
    return (await in_buckets(js, app, {name: bucket}))[name]


async def fold_live(server: NatsServer, js: JetStream, app: App, count: int) -> Any:
    """Events, and an engine that has seen all of them; returns what its buckets have."""
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(5), count))
    expected, _ = folded(app, await in_stream(js, app))
    async with running(app, server.url):
        await until(lambda: _has(js, app, expected))
    return expected


async def _has(js: JetStream, app: App, expected: Any) -> bool:
    return bool(await in_buckets(js, app) == expected)


# ---- projections -----------------------------------------------------------------------------------------------------


async def test_a_rebuild_equals_the_live_projection_although_the_stream_keeps_messages_for_seconds_only(
    server: NatsServer, js: JetStream, lake: str
) -> None:
    app = App("bank", stream=StreamConfig(name="BANK", subjects=["bank.>"], max_age_s=3.0))
    for name, spec in bank().projections.items():
        app.projection(name, events=list(spec.events), bucket=f"bank_{name}")(spec.kind)
    await set_up(js, app)
    stream, events = await js.stream("BANK"), some_events(random.Random(3), 400)
    seen: list[Any] = []
    async with running(app, server.url):
        for begin in range(0, 400, 100):
            await publish(js, app, *events[begin : begin + 100])
            seen += [each for each in await in_stream(js, app) if not seen or each.sequence > seen[-1].sequence]
            await archived(server, lake, "BANK", files=2)
            if begin < 200:  # the stream forgets these
                last = seen[-1].sequence
                await until(partial(_begins_behind, stream, last))
        expected, _ = folded(app, seen)
        await until(lambda: _has(js, app, expected))
    assert (await stream.info()).state.first_sequence > 200
    with pytest.raises(DataLoss):
        await rebuild(js, app, "balances")
    for name in app.projections:
        done = await rebuild(js, app, name, RebuildOptions(check=True), archive=lake)
        assert done.verification is not None
        assert await in_bucket(js, app, name, done.new.bucket) == expected[name]
        found = await verify(js, app, name, archive=lake)
        assert found.is_equal, found.differences
        assert found.events == done.verification.events == done.record.events


async def _begins_behind(stream: Any, last: int) -> bool:
    return bool((await stream.info()).state.first_sequence > last)


@pytest.mark.parametrize("trimmed", [59, 120])
async def test_a_replay_plans_and_stores_the_same_wherever_the_stream_begins(
    server: NatsServer, js: JetStream, lake: str, trimmed: int
) -> None:
    app = bank()
    expected = await fold_live(server, js, app, 200)
    requests = [ReplayRequest(), ReplayRequest(from_seq=20, to_seq=150), ReplayRequest(subject="bank.*.moved")]
    plans = [await plan_replay(js, app, "balances", each) for each in requests]
    middle = (await (await js.stream("BANK")).get_message(90)).timestamp
    since, until_then = ReplayRequest(since=middle), ReplayRequest(until=middle)
    timed = [await plan_replay(js, app, "balances", each) for each in (since, until_then)]
    assert (timed[0].extent.first, timed[1].extent.last) == (90, 89)
    await archived(server, lake, "BANK", until=121, files=3)
    await purge(js, "BANK", trimmed)
    for request, plan in zip([*requests, since, until_then], [*plans, *timed], strict=True):
        again = await plan_replay(js, app, "balances", request, archive=lake)
        assert again.to_dict() == plan.to_dict()
    bucket = await js.kv("bank_balances")
    lost = sorted(plans[0].last_of)[0]
    await (await js.stream("KV_bank_balances")).purge(subject=f"$KV.bank_balances.{lost}")
    with pytest.raises(DataLoss, match="read them from an archive"):
        await run_replay(js, app, "balances")
    done = await run_replay(js, app, "balances", archive=lake)
    assert (done.changed, done.status) == (1, "done")
    assert await in_buckets(js, app) == expected
    await bucket.delete(lost)
    repaired = await repair_keys(js, app, "balances", [lost], archive=lake)
    assert repaired.changed == 1
    assert await in_buckets(js, app) == expected
    preview = await preview_rebuild(js, app, "balances", archive=lake)
    assert preview.comparison.is_equal
    assert preview.extent.first == 1


async def test_a_projection_outlives_its_stream(server: NatsServer, js: JetStream, lake: str) -> None:
    app = bank()
    expected = await fold_live(server, js, app, 120)
    await archived(server, lake, "BANK", files=3)
    await js.delete_stream("BANK")
    with pytest.raises(StreamNotFound):
        await rebuild(js, app, "balances")
    done = await rebuild(js, app, "balances", RebuildOptions(check=True, swap=True), archive=lake)
    assert done.is_swapped
    assert await in_bucket(js, app, "balances", done.new.bucket) == expected["balances"]
    found = await verify(js, app, "moves", archive=lake)
    assert (found.is_equal, found.boundary > 0, found.keys) == (True, True, 2)
    plan = await plan_replay(js, app, "moves", ReplayRequest(), archive=lake)
    assert (plan.extent.last, plan.behind, plan.outline.first_time is not None) == (120, {}, True)
    assert (await preview_rebuild(js, app, "balances", archive=lake)).comparison.is_equal


async def test_replaced_states_are_no_lost_events_in_an_archive_either(
    server: NatsServer, js: JetStream, lake: str
) -> None:
    """Neither before the archive begins, nor behind its end after a trim."""
    app, stream = mixed.app, "KV_mixed"
    await app.apply(server.url)
    async with app.connect(server.url) as client, running(app, server.url):
        await mixed.touch(client, "a", 10)
        await mixed.pay(client, "a", 1, 2)
        await mixed.pay(client, "b", 3)
        end = await archived(server, lake, stream, files=3)
        assert await client.view("sums").get("b", at_least=end - 1) is not None
        await purge(js, stream, end - 1)
        await mixed.touch(client, "a", 10)
        await mixed.pay(client, "a", 4)
        last = (await (await js.stream(stream)).info()).state.last_sequence
        await client.view("sums").get("a", at_least=last)
        assert (await (await js.stream(stream)).info()).state.first_sequence > end
        right = await in_bucket(js, app, "sums", "mixed_sums")
        for options in (RebuildOptions(check=True), RebuildOptions(check=True, swap=True)):
            done = await rebuild(js, app, "sums", options, archive=lake)
            assert await in_bucket(js, app, "sums", done.new.bucket) == right
        assert (await verify(js, app, "sums", archive=lake)).is_equal
        assert (await replay_handler(js, app, "note", archive=lake)).done == 4
        assert (await client.view("sums").get("a", as_of=end - 1, archive=lake)).events == 2


async def test_a_gap_between_archive_and_stream_is_named(server: NatsServer, js: JetStream, lake: str) -> None:
    app = bank()
    await fold_live(server, js, app, 100)
    await archived(server, lake, "BANK", until=41)
    await purge(js, "BANK", 60)
    for work in (rebuild, verify):
        with pytest.raises(DataLoss) as caught:
            await work(js, app, "balances", archive=lake)
        assert (caught.value.wanted, caught.value.first) == (41, 61)
    assert (await plan_replay(js, app, "balances", ReplayRequest(from_seq=61), archive=lake)).extent.first == 61
    assert (await plan_replay(js, app, "balances", ReplayRequest(to_seq=40), archive=lake)).extent.last == 40


async def test_messages_that_the_archive_lost_are_data_loss(server: NatsServer, js: JetStream, lake: str) -> None:
    app = bank()
    await fold_live(server, js, app, 100)
    stream = await js.stream("BANK")
    for sequence in (20, 21):
        await stream.delete_message(sequence)
    await archived(server, lake, "BANK", until=61, lost=[range(20, 22)])
    with pytest.raises(DataLoss) as caught:
        await verify(js, app, "moves", archive=lake)
    assert (caught.value.wanted, caught.value.first) == (20, 22)


async def test_an_archive_of_the_stream_before_is_refused(server: NatsServer, js: JetStream, lake: str) -> None:
    app = bank()
    await fold_live(server, js, app, 30)
    with pytest.raises(ConfigError, match="stream 'BANK' has no archive there"):
        await rebuild(js, app, "balances", archive=lake)
    await archived(server, lake, "BANK")
    await js.delete_stream("BANK")
    await set_up(js, app)
    with pytest.raises(StreamRecreated, match="is of the former one"):
        await rebuild(js, app, "balances", archive=lake)
    with pytest.raises(ConfigError, match="expected a folder or a URI"):
        await rebuild(js, app, "balances", archive="")


async def test_a_table_that_is_compacted_while_it_is_read_is_opened_again(
    server: NatsServer, js: JetStream, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = bank()
    expected = await fold_live(server, js, app, 100)
    await archived(server, lake, "BANK", files=10)
    await purge(js, "BANK", 100)
    real, calls = hybrid.HybridCursor.reached, 0

    def reached(self: hybrid.HybridCursor, sequence: int) -> None:
        nonlocal calls
        calls += 1
        real(self, sequence)
        if calls == 3:
            with connect(server.url) as client:
                compact_archive(client.jetstream(), lake, "BANK")

    monkeypatch.setattr(hybrid.HybridCursor, "reached", reached)
    done = await rebuild(js, app, "balances", archive=lake)
    assert calls > 3
    assert await in_bucket(js, app, "balances", done.new.bucket) == expected["balances"]


async def test_the_commands_take_an_archive(
    server: NatsServer, js: JetStream, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = bank()
    await fold_live(server, js, app, 100)
    await archived(server, lake, "BANK", until=81)
    await purge(js, "BANK", 70)
    for module in ("rebuild", "replay", "engine_options", "apps"):
        monkeypatch.setattr(f"jetspark.cli.{module}.load_app", lambda name: app, raising=False)

    async def run(*words: str) -> Any:
        given = [words[0], "bank:app", *words[1:], "--servers", server.url, "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, commands.app, given)
        return result if result.exit_code else json.loads(result.stdout)

    refused = await run("verify", "balances")
    assert "is needed and the first stored one is 71" in str(refused.exception or refused.output)
    assert (await run("verify", "balances", "--archive", lake))["equal"]
    assert (await run("rebuild", "balances", "--archive", lake, "--verify"))["verification"]["equal"]
    assert (await run("rebuild", "balances", "--archive", lake, "--dry-run"))["difference_count"] == 0
    plan = await run("replay", "balances", "--from-seq", "5", "--archive", lake, "--dry-run")
    assert (plan["first"], plan["last"], plan["behind"]) == (5, 100, 0)


# ---- handlers --------------------------------------------------------------------------------------------------------


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    cents: int


@pytest.mark.parametrize("trimmed", [4, 12, 30])
async def test_a_handler_gets_the_events_of_the_archive_and_then_those_of_the_stream(
    server: NatsServer, js: JetStream, lake: str, monkeypatch: pytest.MonkeyPatch, trimmed: int
) -> None:
    monkeypatch.setattr("jetspark.app.replay.handler_replay.PORTION", 5)
    app, seen = App("shop", stream="SHOP", subjects=["orders.>"]), list[tuple[str, int, bool]]()

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid, ctx: Context) -> None:
        seen.append((event.order_id, event.cents, ctx.is_replay))

    await set_up(js, app)
    await publish(js, app, *(Paid(order_id=f"o-{n % 3}", cents=n) for n in range(30)))
    await archived(server, lake, "SHOP", until=min(trimmed + 5, 31), files=2)
    await purge(js, "SHOP", trimmed)
    request = ReplayRequest(from_seq=2, to_seq=29)
    with pytest.raises(DataLoss):
        await plan_handler_replay(js, app, "billing", request)
    plan = await plan_handler_replay(js, app, "billing", request, archive=lake)
    assert (plan.events, plan.keys, plan.outline.first_time is not None) == ({"order.paid": 28}, 3, True)
    done = await replay_handler(js, app, "billing", request, archive=lake)
    assert (done.events, done.status, {each for *_, each in seen}) == (28, "done", {True})
    for number in range(3):
        mine = [cents for order, cents, _ in seen if order == f"o-{number}"]
        assert mine == [cents for cents in range(1, 29) if cents % 3 == number]
    if trimmed < 30:
        assert [each async for each in (await js.stream("SHOP")).consumers() if "replay" in each.name] == []


async def test_a_handler_is_called_with_the_past_of_a_deleted_stream(
    server: NatsServer, js: JetStream, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, seen = App("shop", stream="SHOP", subjects=["orders.>"]), list[int]()

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid) -> None:
        seen.append(event.cents)

    await set_up(js, app)
    await publish(js, app, *(Paid(order_id="o", cents=n) for n in range(10)))
    await archived(server, lake, "SHOP")
    await js.delete_stream("SHOP")
    options = HandlerReplayOptions(effects=True)
    done = await replay_handler(js, app, "billing", ReplayRequest(from_seq=3), options, archive=lake)
    assert (done.status, done.events, seen) == ("done", 8, list(range(2, 10)))


# ---- views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_state_of_the_past_is_read_beyond_the_retention(
    server: NatsServer, js: JetStream, lake: str, is_deleted: bool
) -> None:
    app = bank()
    await set_up(js, app)
    moves = [Moved(source="a", target="b", cents=number) for number in range(1, 11)]
    await publish(js, app, Opened(account="a"), Opened(account="b"), *moves)
    expected, _ = folded(app, await in_stream(js, app))
    async with running(app, server.url):
        await until(lambda: _has(js, app, expected))
    stream = await js.stream("BANK")
    moments = {sequence: (await stream.get_message(sequence)).timestamp for sequence in range(1, 13)}
    await archived(server, lake, "BANK", until=None if is_deleted else 11, files=2)
    if is_deleted:
        await js.delete_stream("BANK")
    else:
        await purge(js, "BANK", 8)
    async with app.connect(server.url) as client:
        view = client.view("balances")
        with pytest.raises(StreamNotFound if is_deleted else DataLoss):
            await view.get("b", as_of=5)
        for sequence in range(2, 12):
            cents = sum(range(1, sequence - 1))
            assert (await view.get("b", as_of=sequence, archive=lake)).cents == cents
            assert (await view.get("b", as_of=moments[sequence + 1], archive=lake)).cents == cents
        assert await view.get("b", as_of=1, archive=lake) is None
        assert (await view.get("b", as_of=moments[12] + datetime.timedelta(hours=1), archive=lake)).cents == 55
        assert (await view.get("b", as_of=12)).cents == 55
        with pytest.raises(ConfigError, match="its last is 12"):
            await view.get("b", as_of=13, archive=lake)
        with pytest.raises(ConfigError, match="a time zone"):
            await view.get("b", as_of=moments[3].replace(tzinfo=None), archive=lake)
        with pytest.raises(ConfigError, match="needs as_of"):
            await view.get("b", archive=lake)


async def test_a_view_takes_a_moment_without_an_archive(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    moves = [Moved(source="a", target="b", cents=number) for number in range(1, 6)]
    await publish(js, app, Opened(account="a"), Opened(account="b"), *moves)
    stream = await js.stream("BANK")
    async with running(app, server.url), app.connect(server.url) as client:
        view = client.view("balances")
        await view.get("b", at_least=7)
        moment = (await stream.get_message(5)).timestamp
        assert (await view.get("b", as_of=moment)).cents == 3
