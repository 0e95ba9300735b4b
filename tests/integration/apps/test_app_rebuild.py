"""Rebuilding projections beside live ones: races, swaps, and the death of the one who rebuilds."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from support.apps import publish, running, set_up, until
from support.projections import (
    Account,
    Balances,
    Closed,
    Moved,
    Opened,
    bank,
    folded,
    in_buckets,
    in_stream,
    parked,
    some_events,
)

from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.aio.steps import ProcedureRunner
from jetspark.app import App
from jetspark.app.projections.bucket_refs import find_bucket, open_records
from jetspark.app.projections.leases import Lease, LeaseLost
from jetspark.app.replay import (
    RebuildOptions,
    ReplayOptions,
    ReplayRecord,
    VerifyOptions,
    drop_rebuild,
    read_records,
    rebuild,
    repair_keys,
    run_replay,
    verify,
)
from jetspark.errors import ConfigError, StreamNotFound, UsageError
from jetspark.server import NatsServer
from jetspark.state.store import load

EVENTS = [Opened, Moved, Closed]
# It takes some tens of milliseconds where nothing else runs.
SWAP_S = 5.0
# Events each second while it is rebuilt: few, so that many tests fit one machine.
TRAFFIC = int(os.environ.get("JETSPARK_TRAFFIC", "500"))


class Mended(Balances):
    def apply(self, state: Account | None, event: Any, key: str) -> Any:
        if isinstance(event, Moved) and event.cents == 666:
            return state
        return super().apply(state, event, key)


def mended(version: int = 1) -> App:
    app = App("bank", stream="BANK", subjects=["bank.>"])
    app.projection("balances", events=EVENTS, bucket="bank_balances", version=version)(Mended)
    return app


async def is_folded(js: JetStream, app: App, bucket: str = "bank_balances") -> bool:
    expected, _ = folded(app, await in_stream(js, app))
    return (await in_buckets(js, app, {"balances": bucket}))["balances"] == expected["balances"]


@asynccontextmanager
async def traffic(js: JetStream, app: App, events: Callable[[], list[Any]]) -> AsyncIterator[None]:
    """Events that do not stop."""
    is_over = False

    async def flow() -> None:
        while not is_over:
            await publish(js, app, *events())

    task = asyncio.create_task(flow())
    try:
        yield
    finally:
        is_over = True
        await task


async def test_a_lease_that_is_seized_is_noticed_and_left(js: JetStream) -> None:
    await set_up(js, bank())
    records = await open_records(js, "bank")
    owner, other = (Lease(records, "lease.x", name, lease_s=60) for name in ("owner", "other"))
    await owner.acquire()
    keeping = asyncio.create_task(owner.keep())
    assert await other.seize() == "owner"
    with pytest.raises(LeaseLost, match="owned by other") as lost:
        await asyncio.wait_for(keeping, 15)  # the next renewal is due after 20
    leaving = asyncio.create_task(other.until_left("owner"))
    await owner.leave(lost.value.owner)
    assert await leaving
    waiting = asyncio.create_task(owner.acquire())
    await other.release()
    await waiting
    await owner.release()
    assert await other.seize() is None


@pytest.mark.parametrize("rounds_beside", [3, 0])
async def test_a_parked_key_is_repaired_while_its_events_come(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch, rounds_beside: int
) -> None:
    monkeypatch.setattr("jetspark.app.replay.key_repair.ROUNDS_BESIDE", rounds_beside)
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"), Opened(account="b"), Moved(source="a", target="b", cents=666))
    async with running(app, server.url):
        await until(lambda: is_folded(js, app))
    assert parked((await in_buckets(js, app))["balances"]) == ["a", "b"]
    app = mended()
    rng = random.Random(3)

    def events() -> list[Any]:
        return [Moved(source="a", target="b", cents=rng.randrange(1, 9)) for _ in range(5)]

    async with running(app, server.url), traffic(js, app, events):
        await asyncio.sleep(0.3)  # the engine has met the parked keys, and passes their events by
        done = await repair_keys(js, app, "balances", ["a", "b"])
        assert (done.changed, done.parked, done.status) == (2, 0, "done")
        last = (await (await js.stream("BANK")).info()).state.last_sequence
        assert last > 10
    async with running(app, server.url):
        await until(lambda: is_folded(js, app))
    assert (await verify(js, app, "balances")).is_equal


async def test_a_rebuild_goes_on_beside_live_traffic_and_is_swapped(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    rng = random.Random(4)
    await publish(js, app, *some_events(rng, 300))
    newer = mended(version=2)
    workers = asyncio.create_task(app.run(server.url, only=["balances"]))
    await until(lambda: is_folded(js, app))
    async with traffic(js, app, lambda: some_events(rng, 10)):
        built = await rebuild(js, newer, "balances", RebuildOptions(check=True))
        assert not built.is_swapped
        assert built.new.bucket == "bank_balances_v2"
        assert built.verification is not None
        assert built.verification.is_equal
        done = await rebuild(js, newer, "balances", RebuildOptions(swap=True, resume=built.record.id))
    assert done.is_swapped
    assert done.swap_s is not None
    assert done.swap_s < SWAP_S
    async with running(newer, server.url):  # the old worker lives, and keeps no lease from the new one
        await until(lambda: is_folded(js, newer, "bank_balances_v2"))
    assert not workers.done()
    workers.cancel()
    await asyncio.wait([workers])
    records = await open_records(js, "bank")
    place = (await find_bucket(records, newer.projections["balances"])).ref
    assert place == ("bank_balances_v2", 2)
    assert (await verify(js, newer, "balances")).is_equal
    with pytest.raises(UsageError, match="is at version 2"):
        await verify(js, app, "balances")
    # The next one is of the same version, and drops the old ones.
    again = await rebuild(js, newer, "balances", RebuildOptions(check=True, swap=True, drop_old=True, drop_after_s=0.1))
    assert again.new.bucket == "bank_balances_v2_r1"
    with pytest.raises(StreamNotFound):
        await js.kv("bank_balances_v2")
    assert [record.status for record in await read_records(records, "balances")] == ["swapped", "swapped"]
    with pytest.raises(ConfigError, match="it is swapped already"):
        await rebuild(js, newer, "balances", RebuildOptions(resume=built.record.id))


APP = """
import asyncio, sys
sys.path[:0] = {path!r}
import jetspark
from support.projections import bank
from jetspark.app.replay import RebuildOptions, ReplayOptions, rebuild, run_replay

async def main():
    async with jetspark.connect({url!r}) as client:
        def tell(record):
            print(record.id, record.at, flush=True)
        await {work}(client.jetstream(), bank(), "balances", options={options}(rate=400), on_progress=tell)

asyncio.run(main())
"""


async def killed(url: str, work: str) -> tuple[str, int]:
    """The id of something that was killed in the middle, and how far it was."""
    options = "RebuildOptions" if work == "rebuild" else "ReplayOptions"
    script = APP.format(path=[str(Path(__file__).parents[2])], url=url, work=work, options=options)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert process.stdout is not None
    id, at = "", 0
    while at == 0:
        id, text = (await process.stdout.readline()).decode().split()
        at = int(text)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    return id, at


async def test_a_rebuild_that_is_killed_goes_on_where_it_was(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(7), 1200, 50))
    id, at = await killed(server.url, "rebuild")
    assert 0 < at < 1200
    [record] = await read_records(await open_records(js, "bank"), "balances")
    assert (record.status, record.id) == ("running", id)
    with pytest.raises(ConfigError, match="no job has this id; `jetspark replays` lists the ids"):
        await rebuild(js, app, "balances", RebuildOptions(resume="r0"))
    with pytest.raises(ConfigError, match=r"version 1 of the projection has begun it, and this is version 2"):
        await rebuild(js, mended(version=2), "balances", RebuildOptions(resume=id))
    with pytest.raises(ConfigError, match="is a rebuild, not a replay"):
        await run_replay(js, app, "balances", options=ReplayOptions(resume=id))
    seen: list[int] = []
    built = await rebuild(
        js, app, "balances", RebuildOptions(resume=id, check=True), on_progress=lambda record: seen.append(record.at)
    )
    assert min(seen) >= at  # not from the beginning
    assert await is_folded(js, app, "bank_balances_v1")
    assert json.loads(json.dumps(built.to_dict()))["swapped"] is False


class Death(BaseException):
    """The end of a process, as far as its server sees it."""


def dying_at(monkeypatch: pytest.MonkeyPatch, write: int, *, is_written: bool) -> None:
    """End with one of the writes to records, before or after the server has it, and write none behind it."""
    count = 0

    def mortal(name: str) -> Callable[..., Any]:
        real = getattr(KeyValue, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count > write or (count == write and not is_written):
                raise Death
            result = await real(*arguments, **named)
            if count == write:
                raise Death
            return result

        return call

    for name in ("create", "update", "put", "purge"):
        monkeypatch.setattr(KeyValue, name, mortal(name))


async def shadows(js: JetStream) -> list[str]:
    return sorted([name async for name in js.stream_names() if name.startswith("KV_bank_balances_")])


@pytest.mark.parametrize("is_written", [False, True])
async def test_a_rebuild_that_ends_at_any_of_its_notes_is_resumed_swapped_and_drops_what_it_replaced(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(7), 60, 20))
    async with running(app, server.url):
        await until(lambda: is_folded(js, app))
    records = await open_records(js, "bank")
    known: set[str] = set()
    for write in range(1, 50):
        with monkeypatch.context() as patch:
            dying_at(patch, write, is_written=is_written)
            try:
                await rebuild(js, app, "balances", RebuildOptions(swap=True, drop_old=True, drop_after_s=0))
                break
            except Death:
                pass
        new = [record for record in await read_records(records, "balances") if record.id not in known]
        for record in new:  # none if it ended before its first note
            known.add(record.id)
            if record.replaced or record.status != "swapped":
                done = await rebuild(
                    js, app, "balances", RebuildOptions(swap=True, drop_old=True, drop_after_s=0, resume=record.id)
                )
                assert (done.is_swapped, done.is_old_dropped) == (True, True)
            place = (await find_bucket(records, app.projections["balances"])).ref
            assert await shadows(js) == [f"KV_{place.bucket}"], f"ended at note {write}"
        assert (await verify(js, app, "balances")).is_equal, f"ended at note {write}"
    assert 8 < write < 49
    assert (await in_buckets(js, app))["balances"] == {}  # what the application declares is emptied


WRONG: list[tuple[Callable[[JetStream, App], Awaitable[Any]], str]] = [
    (lambda js, app: verify(js, app, "balances", VerifyOptions(to_seq=0)), "to_seq=0: expected 1 or more"),
    (lambda js, app: verify(js, app, "balances", VerifyOptions(to_seq=-5)), "to_seq=-5: expected 1 or more"),
    (lambda js, app: verify(js, app, "balances", VerifyOptions(cache_keys=0)), "cache_keys=0: expected 1 or more"),
    (lambda js, app: verify(js, app, "balances", VerifyOptions(cache_bytes=0)), "cache_bytes=0: expected 1 or more"),
    (lambda js, app: verify(js, app, "balances", VerifyOptions(wait_s=math.nan)), "wait_s=nan"),
    (lambda js, app: verify(js, app, "balances", VerifyOptions(rate=cast("float", "5"))), "rate='5'"),
    (
        lambda js, app: run_replay(js, app, "balances", options=ReplayOptions(rate=math.inf)),
        "rate=inf: expected a number above 0, and at most",
    ),
    (lambda js, app: repair_keys(js, app, "balances", "k1"), "keys='k1': expected several keys"),
    (lambda js, app: repair_keys(js, app, "balances", ["k1"], rate=-1), "rate=-1"),
    (
        lambda js, app: rebuild(js, app, "balances", RebuildOptions(rate=0)),
        "rate=0: expected a number above 0, or None for no limit",
    ),
    (
        lambda js, app: rebuild(js, app, "balances", RebuildOptions(swap=True, drop_old=True, drop_after_s=-1)),
        "drop_after_s=-1: expected seconds of 0 or more",
    ),
]


@pytest.mark.parametrize(("work", "message"), WRONG, ids=[message for _, message in WRONG])
async def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    js: JetStream, work: Callable[[JetStream, App], Awaitable[Any]], message: str
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="k1"))
    with pytest.raises(ConfigError, match=message):
        await work(js, app)
    assert await read_records(await open_records(js, "bank")) == []
    assert await shadows(js) == []


async def test_a_bucket_that_is_purged_while_it_is_built_is_not_swapped_in(js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    names = [f"k{number}" for number in range(300)]  # each has one event: no key is written again
    await publish(js, app, *(Opened(account=name) for name in names))
    is_noted = asyncio.Event()

    def tell(record: ReplayRecord) -> None:
        if record.at:
            is_noted.set()

    task = asyncio.create_task(rebuild(js, app, "balances", RebuildOptions(swap=True, rate=100), on_progress=tell))
    await is_noted.wait()
    await (await js.stream("KV_bank_balances_v1")).purge()
    with pytest.raises(UsageError, match="bank_balances_v1: its position, and other keys, was removed"):
        await task
    place = (await find_bucket(await open_records(js, "bank"), app.projections["balances"])).ref
    assert place.bucket == "bank_balances"
    built = await rebuild(js, app, "balances")
    await (await js.stream(f"KV_{built.new.bucket}")).purge()
    again = await rebuild(js, app, "balances", RebuildOptions(swap=True, resume=built.record.id))  # from the beginning
    assert again.is_swapped
    assert (await verify(js, app, "balances")).is_equal


async def test_a_position_that_is_written_in_the_midst_of_a_purge_does_not_hide_it(js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *(Opened(account=f"k{number}") for number in range(100)))
    is_noted = asyncio.Event()

    def tell(record: ReplayRecord) -> None:
        if record.at:
            is_noted.set()

    task = asyncio.create_task(rebuild(js, app, "balances", RebuildOptions(swap=True, rate=100), on_progress=tell))
    await is_noted.wait()
    shadow = await js.kv("bank_balances_v1")
    # As the server does it that has compared the revisions before the purge, and stores afterwards.
    position = (await shadow.get("_jetspark.position")).value
    await (await js.stream("KV_bank_balances_v1")).purge()
    await shadow.put("_jetspark.position", position)
    with pytest.raises(UsageError, match="bank_balances_v1: its position, and other keys, was removed"):
        await task
    place = (await find_bucket(await open_records(js, "bank"), app.projections["balances"])).ref
    assert place.bucket == "bank_balances"
    [record] = await read_records(await open_records(js, "bank"))
    with pytest.raises(UsageError, match="delete it, and begin another rebuild"):
        await rebuild(js, app, "balances", RebuildOptions(swap=True, resume=record.id))
    # States that were folded after a purge lack what was folded before it.
    await shadow.purge("_jetspark.position")
    with pytest.raises(UsageError, match=r"its position was removed .* delete it, and begin another rebuild"):
        await rebuild(js, app, "balances", RebuildOptions(swap=True, resume=record.id))


async def test_many_may_begin_at_the_same_moment(js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    names = [f"k{number}" for number in range(8)]
    await publish(js, app, *(Opened(account=name) for name in names))
    repaired = await asyncio.gather(*(repair_keys(js, app, "balances", [name]) for name in names))
    assert [record.changed for record in repaired] == [1] * len(names)
    assert await is_folded(js, app)
    built = await asyncio.gather(*(rebuild(js, app, "balances", RebuildOptions(check=True)) for _ in range(4)))
    assert len({each.new.bucket for each in built}) == 4
    ids = [record.id for record in await read_records(await open_records(js, "bank"))]
    assert len(set(ids)) == len(names) + 4


@pytest.mark.parametrize("is_made", [False, True])
async def test_a_rebuild_that_ended_before_it_noted_its_bucket_is_dropped_with_it(
    js: JetStream, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    app = bank()
    await set_up(js, app)
    with monkeypatch.context() as patch:
        dying_at(patch, 2 if is_made else 1, is_written=not is_made)
        with pytest.raises(Death):
            await rebuild(js, app, "balances")
    [record] = await read_records(await open_records(js, "bank"), "balances")
    assert record.bucket == ""
    assert len(await shadows(js)) == is_made
    assert (await drop_rebuild(js, app, "balances", record.id)).status == "dropped"
    assert await shadows(js) == []


async def test_a_swap_that_was_done_and_not_noted_is_not_done_again(
    js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = bank()
    await set_up(js, app)
    built = await rebuild(js, app, "balances")
    records = await open_records(js, "bank")
    with monkeypatch.context() as patch:
        dying_at(patch, 4, is_written=True)  # it notes that it runs, is built, and what it replaces; then it swaps
        with pytest.raises(Death):
            await rebuild(js, app, "balances", RebuildOptions(swap=True, resume=built.record.id))
    alias = await find_bucket(records, app.projections["balances"])
    assert alias.ref.bucket == built.new.bucket
    done = await rebuild(js, app, "balances", RebuildOptions(swap=True, resume=built.record.id))
    assert (done.is_swapped, done.old.bucket, done.record.status) == (True, "bank_balances", "swapped")
    assert await find_bucket(records, app.projections["balances"]) == alias
    assert "swapped before: bank_balances -> bank_balances_v1; the old is kept" in str(done)


async def test_a_bucket_that_a_later_rebuild_has_made_under_the_same_name_is_not_dropped(js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(7), 60, 20))
    first = await rebuild(js, app, "balances", RebuildOptions(swap=True))
    second = await rebuild(js, app, "balances", RebuildOptions(swap=True))
    other = await rebuild(js, app, "balances", RebuildOptions(swap=True, drop_old=True, drop_after_s=0))
    await drop_rebuild(js, app, "balances", first.record.id)
    again = [await rebuild(js, app, "balances") for _ in range(2)]
    assert [each.new.bucket for each in again] == [first.new.bucket, second.new.bucket]
    with pytest.raises(ConfigError, match=f"rebuild '{again[0].record.id}' has re-created it: drop that rebuild"):
        await rebuild(js, app, "balances", RebuildOptions(resume=second.record.id, swap=True, drop_old=True))
    await drop_rebuild(js, app, "balances", second.record.id)  # there is none of its own any more
    assert await shadows(js) == sorted(f"KV_{each.new.bucket}" for each in [*again, other])
    assert await is_folded(js, app, again[0].new.bucket)


async def test_a_replay_that_is_killed_goes_on_with_the_range_it_was_frozen_at(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(7), 800, 50))
    id, at = await killed(server.url, "run_replay")
    assert 0 < at <= 800
    assert (await in_buckets(js, app))["balances"] == {}
    await publish(js, app, *some_events(random.Random(8), 50, 50))
    done = await run_replay(js, app, "balances", options=ReplayOptions(resume=id))
    assert (done.id, done.last, done.status) == (id, 800, "done")
    expected, _ = folded(app, (await in_stream(js, app))[:800])
    assert (await in_buckets(js, app))["balances"] == expected["balances"]
    async with running(app, server.url):
        await until(lambda: is_folded(js, app))


PUBLISHER = """
import asyncio, random, sys
sys.path[:0] = {path!r}
from support.projections import Moved, bank

async def main(rate):
    rng, names, loop = random.Random(6), [f"k{{number}}" for number in range(10)], asyncio.get_running_loop()
    async with bank().connect({url!r}) as client, client.bulk() as publisher:
        began = until = loop.time()
        ending = loop.run_in_executor(None, sys.stdin.read)
        sent = 0
        while not ending.done():
            until += 0.02
            some = [Moved(source=rng.choice(names), target=rng.choice(names), cents=1) for _ in range(rate // 50)]
            await publisher.publish_many(some)
            sent += len(some)
            await asyncio.sleep(until - loop.time())
        print(sent, loop.time() - began)

asyncio.run(main({rate}))
"""


@asynccontextmanager
async def bulk_traffic(url: str, rate: int, rates: list[float]) -> AsyncIterator[None]:
    """Events that do not stop, from a process of its own; adds how many there were each second, in the end."""
    source = PUBLISHER.format(path=sys.path, url=url, rate=rate)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", source, stdin=pipe, stdout=pipe)
    try:
        yield
    finally:
        said, _ = await process.communicate(b"")
    sent, took_s = said.split()
    rates.append(int(sent) / float(took_s))


async def test_readers_see_no_gap_and_no_older_value_when_it_is_swapped(server: NatsServer, js: JetStream) -> None:
    app = mended()
    await set_up(js, app)
    rates: list[float] = []
    spec = app.projections["balances"]
    names = [f"k{number}" for number in range(10)]
    await publish(js, app, *(Opened(account=name) for name in names))
    records = await open_records(js, "bank")
    seen: dict[str, int] = {}
    buckets: list[str] = []
    problems: list[str] = []

    async def read(runner: ProcedureRunner) -> None:
        place = (await find_bucket(records, spec)).ref
        found = await runner.run(load(place.bucket, names))
        buckets.append(place.bucket)
        for name in names:
            if name not in found or found[name].value is None:
                problems.append(f"a gap: {name} in {place.bucket}")
            elif found[name].sequence < seen.get(name, 0):
                problems.append(f"older: {name} at {found[name].sequence}, and was at {seen[name]} ({place.bucket})")
            else:
                seen[name] = found[name].sequence

    async def read_on() -> None:
        runner = ProcedureRunner(js)
        while True:
            await read(runner)

    def has_read(count: int) -> bool:
        return len(buckets) >= count

    def has_events(count: int) -> bool:
        return max(seen.values(), default=0) >= count

    async with running(app, server.url):
        await until(lambda: is_folded(js, app))
        readers = asyncio.create_task(read_on())
        async with bulk_traffic(server.url, TRAFFIC, rates):
            await until(partial(has_read, 20))
            await until(partial(has_events, TRAFFIC))
            for number in (1, 2):
                done = await rebuild(
                    js,
                    app,
                    "balances",
                    RebuildOptions(check=number == 1, swap=True, drop_old=number == 2, drop_after_s=0.5),
                )
                assert done.swap_s is not None
                assert done.swap_s < SWAP_S
                print(f"swapped in {done.swap_s:.3f} s, after {done.record.events} events, {len(buckets)} reads")
                await until(partial(has_read, len(buckets) + 50))
        print(f"{rates[0]:.0f} events/s")
        readers.cancel()
        assert problems == []
        assert set(buckets) == {"bank_balances", "bank_balances_v1", "bank_balances_v1_r1"}
        await until(lambda: is_folded(js, app, "bank_balances_v1_r1"))
    assert (await verify(js, app, "balances")).is_equal
