"""What a gap in a stream proves: states of entities and timers go by themselves, and no event is lost by that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.apps import running, until
from support.mixed import Counted, Due, Paid, app, pay, timed, touch

from jetspark.aio.jetstream import JetStream
from jetspark.app import App
from jetspark.app.client import AppClient
from jetspark.app.projections.live_options import LiveOptions
from jetspark.app.replay import RebuildOptions, ReplayRequest, plan_replay, rebuild, replay_handler, run_replay, verify
from jetspark.app.replay.history import History
from jetspark.app.stream_history import StreamHistory
from jetspark.errors import DataLoss
from jetspark.server import NatsServer

QUICK = LiveOptions(position_every_s=0.01, lease_s=1.0)


@pytest.fixture
async def mixed(server: NatsServer, js: JetStream) -> AsyncIterator[AppClient]:
    await app.apply(server.url)
    async with app.connect(server.url) as client:
        yield client


def sums(*cents: int) -> Counted:
    state = Counted()
    for each in cents:
        state = Counted(state.events + 1, state.cents * 3 % 1_000_003 + each)
    return state


async def first_of(client: AppClient) -> int:
    return (await (await client.js.stream("KV_mixed")).info()).state.first_sequence


async def reached(client: AppClient, expected: Counted) -> tuple[int, int] | None:
    """Wait until the projection has a state; returns what its position says is missed."""
    view = client.view("sums")
    await view.wait_for("a", lambda state: state == expected, timeout=60)
    last = (await (await client.js.stream(client.app.stream)).get_message(last_for="accounts.*.paid")).sequence

    async def is_there() -> bool:
        return (await view.position()).sequence >= last

    await until(is_there)
    return (await view.position()).missed


async def test_states_that_replace_each_other_are_no_lost_events_for_a_live_worker(
    server: NatsServer, mixed: AppClient
) -> None:
    await touch(mixed, "a", 10)  # gone before a worker ever read
    async with running(app, server.url, live=QUICK):
        await pay(mixed, "a", 1, 2)
        assert await reached(mixed, sums(1, 2)) is None
        await touch(mixed, "a", 10)  # gone while it reads
        await pay(mixed, "a", 3)
        assert await reached(mixed, sums(1, 2, 3)) is None
    await touch(mixed, "a", 10)  # gone while none reads
    async with running(app, server.url, live=QUICK):
        await pay(mixed, "a", 4)
        assert await reached(mixed, sums(1, 2, 3, 4)) is None
        assert await first_of(mixed) > 10
        assert (await verify(mixed.js, app, "sums")).is_equal


async def test_a_server_that_is_killed_in_between_loses_nothing_either() -> None:
    with NatsServer() as own:
        await app.apply(own.url)
        async with app.connect(own.url) as client, running(app, own.url, live=QUICK):
            await touch(client, "a", 5)
            await pay(client, "a", 1)
            assert await reached(client, sums(1)) is None
            await asyncio.to_thread(own.kill)
            await asyncio.to_thread(own.restart)
            await touch(client, "a", 5)
            await pay(client, "a", 2)
            assert await reached(client, sums(1, 2)) is None
            assert (await verify(client.js, app, "sums")).is_equal


async def test_timers_that_have_fired_are_no_lost_events(server: NatsServer, js: JetStream) -> None:
    await timed.apply(server.url)
    async with timed.connect(server.url) as client:
        stream = await client.js.stream("TIMED")
        for number in range(3):
            await client.timers.set(f"t{number}", Due(account="a"), after=0)

        async def are_gone() -> bool:
            return (await stream.info()).state.first_sequence > 3

        await until(are_gone)
        for cents in (1, 2):
            await client.publish(Paid(account="a", cents=cents))
        async with running(timed, server.url, live=QUICK):
            assert await reached(client, sums(1, 2)) is None
            assert (await verify(client.js, timed, "sums")).is_equal
            assert await client.view("sums").get("a", as_of=4 + 3) is not None


async def test_a_whole_history_is_replayed_rebuilt_and_read_as_of_a_sequence(
    server: NatsServer, mixed: AppClient
) -> None:
    await touch(mixed, "a", 10)
    async with running(app, server.url, live=QUICK):
        await pay(mixed, "a", 1, 2)
        await reached(mixed, sums(1, 2))
        middle = (await (await mixed.js.stream("KV_mixed")).get_message(last_for="accounts.a.paid")).sequence
        await pay(mixed, "a", 3)
        await reached(mixed, sums(1, 2, 3))
    js = mixed.js
    assert await mixed.view("sums").get("a", as_of=middle) == sums(1, 2)
    assert (await plan_replay(js, app, "sums", ReplayRequest(from_seq=1))).events == 3
    assert (await run_replay(js, app, "sums")).events == 3
    assert (await replay_handler(js, app, "note")).done == 3
    outcome = await rebuild(js, app, "sums", RebuildOptions(check=True, swap=True))
    assert outcome.is_swapped
    await touch(mixed, "a", 10)
    async with running(app, server.url, live=QUICK):  # it goes on in the new bucket
        await pay(mixed, "a", 4)
        assert await reached(mixed, sums(1, 2, 3, 4)) is None
        assert (await verify(js, app, "sums")).is_equal


async def test_states_that_go_while_a_history_is_read_are_no_lost_events(
    mixed: AppClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await touch(mixed, "a")
    await pay(mixed, "b", 1, 2)
    head = StreamHistory.head

    async def head_and_touch(self: StreamHistory, anchor_sequence: int | None = None) -> Any:
        found = await head(self, anchor_sequence)
        await touch(mixed, "a")
        return found

    assert await first_of(mixed) == 1
    monkeypatch.setattr(StreamHistory, "head", head_and_touch)
    assert (await plan_replay(mixed.js, app, "sums", ReplayRequest())).events == 2
    assert await first_of(mixed) > 1

    monkeypatch.undo()
    history, stream = History(mixed.js, app.spec, app.projections["sums"]), await mixed.js.stream("KV_mixed")
    extent = await history.whole()

    async def read_and_purge() -> None:
        async for events in history.read(extent):
            assert events.rows
            await stream.purge(up_to_sequence=extent.last)  # nobody can tell that the last one was read before

    with pytest.raises(DataLoss):
        await read_and_purge()


async def test_events_that_are_purged_from_the_front_are_seen_all_the_same(
    server: NatsServer, mixed: AppClient
) -> None:
    await touch(mixed, "a", 5)
    async with running(app, server.url, live=QUICK):
        await pay(mixed, "a", 1, 2)
        await reached(mixed, sums(1, 2))
    stream = await mixed.js.stream("KV_mixed")
    position = (await mixed.view("sums").position()).sequence
    await pay(mixed, "a", 3)
    await touch(mixed, "a", 1)
    await pay(mixed, "b", 9)
    last = (await stream.get_message(last_for="accounts.b.paid")).sequence
    await stream.purge(up_to_sequence=last - 1)
    async with running(app, server.url, live=QUICK):
        await mixed.view("sums").wait_for("b", bool, timeout=60)

        async def is_noted() -> bool:
            return (await mixed.view("sums").position()).missed is not None

        await until(is_noted)
        missed = (await mixed.view("sums").position()).missed
        assert missed is not None
        assert missed[0] == position + 1
    for work in _of_the_whole(mixed, app):
        with pytest.raises(DataLoss):
            await work


async def test_a_history_without_its_first_event_is_not_whole(server: NatsServer, mixed: AppClient) -> None:
    async with running(app, server.url, live=QUICK):
        await pay(mixed, "a", 1, 2, 3)
        assert await reached(mixed, sums(1, 2, 3)) is None
        stream = await mixed.js.stream("KV_mixed")
        await stream.purge(up_to_sequence=3)  # what was read may go: the state has it
        await pay(mixed, "a", 4)
        assert await reached(mixed, sums(1, 2, 3, 4)) is None
    for work in _of_the_whole(mixed, app):
        with pytest.raises(DataLoss):
            await work


def _of_the_whole(client: AppClient, app: App) -> list[Any]:
    js = client.js
    return [
        verify(js, app, "sums"),
        run_replay(js, app, "sums"),
        rebuild(js, app, "sums"),
        client.view("sums").get("a", as_of=7),
    ]
