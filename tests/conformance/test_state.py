"""State in buckets on both drivers: load, fold, store with compare-and-set, and read, while others write the keys."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.drivers import Awaited, Driver, on_both_drivers
from support.folds import Rows, chain, chained, fold_into
from support.patience import PATIENCE_S
from support.peers import Proxy
from support.servers import domain_config

import jetspark
import jetspark.aio.steps
import jetspark.blocking.steps
from jetspark import KVConfig, StreamConfig
from jetspark.errors import (
    ConfigError,
    Conflict,
    ConnectionClosed,
    DataLoss,
    JetStreamUnavailable,
    StreamNotFound,
    StreamRecreated,
    UsageError,
)
from jetspark.publish.steps import AskMany, Pieces, Procedure
from jetspark.server import NatsServer
from jetspark.state.changes import DELETE, Change, Current, Outcome
from jetspark.state.deliveries import delivery
from jetspark.state.scan import Range, RangeScan, head_of
from jetspark.state.store import load, store, store_newest
from jetspark.state.store import open_bucket as state_bucket
from jetspark.state.tables import open_bucket, plan, snapshot

_numbers = itertools.count(1)


class Steps:
    """A runner of either driver."""

    def __init__(self, js: jetspark.JetStream) -> None:
        self._runner: Any
        if isinstance(js, Awaited):
            self._runner = Awaited(jetspark.blocking.steps.ProcedureRunner(js._target))
        else:
            self._runner = jetspark.aio.steps.ProcedureRunner(js)

    async def run(self, procedure: Procedure[Any]) -> Any:
        return await self._runner.run(procedure)

    async def messages(self, reading: Pieces) -> list[Any]:
        return [message async for piece in self._runner.pieces(reading) for message in piece]


async def new_bucket(js: jetspark.JetStream, *, batched: bool = True, history: int = 1) -> Any:
    return await js.create_kv(KVConfig(bucket=f"state{next(_numbers)}", history=history, allow_batched=batched))


async def values_of(kv: jetspark.KeyValue, steps: Steps) -> dict[str, Any]:
    view = await steps.run(open_bucket(kv.bucket))
    found = await steps.run(snapshot(view))
    return {subject.removeprefix(view.prefix): json.loads(each.data) for subject, each in found.items()}


# ---- load and store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False], ids=["fast ingest", "one by one"])
@on_both_drivers
async def test_what_is_stored_is_loaded_and_a_wrong_revision_is_a_conflict(
    driver: Driver, server: NatsServer, batched: bool
) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        kv, steps = await new_bucket(js, batched=batched), Steps(js)
        keys = [f"order.{number}" for number in range(1500)]  # two requests
        changes = [Change(key, key.encode(), sequence=7, revision=0) for key in keys]
        assert await steps.run(store(kv.bucket, changes)) == Outcome(written=1500)
        assert await steps.run(store(kv.bucket, changes)) == Outcome(written=1500)  # recognised, not written again
        assert (await kv.stream_info()).state.last_sequence == 1500
        loaded = await steps.run(load(kv.bucket, [*keys, "never.there"]))
        assert list(loaded) == keys
        assert loaded["order.3"] == Current(b"order.3", 7, 4)
        mixed = [Change(keys[0], b"new", sequence=8, revision=1), Change(keys[1], b"", sequence=8, revision=1)]
        assert await steps.run(store(kv.bucket, mixed)) == Outcome(written=1, conflicts=(keys[1],))
        never = [Change("a", b"1", revision=99), Change(keys[2], b"1", revision=99)]
        assert await steps.run(store(kv.bucket, never, writer="job")) == Outcome(conflicts=("a", keys[2]))


def with_another_between(procedure: Procedure[Any], other: Procedure[Any]) -> Procedure[Any]:
    """Does the other one when the first has decided what to look up, and before it is answered."""
    step = next(procedure)
    while not isinstance(step, AskMany):
        step = procedure.send((yield step))
    yield from other
    try:
        while True:
            step = procedure.send((yield step))
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("how", ["purged", "made again"])
@on_both_drivers
async def test_two_who_load_from_a_bucket_that_was_emptied_find_nothing(
    driver: Driver, server: NatsServer, how: str
) -> None:
    async with driver.connect(server.url) as client:
        js = client.jetstream()
        kv, steps = await new_bucket(js), Steps(js)
        await kv.put("a", b"1")
        bucket = await steps.run(state_bucket(kv.bucket))
        if how == "purged":
            await (await js.stream(f"KV_{kv.bucket}")).purge()
        else:
            await js.delete_kv(kv.bucket)
            await js.create_kv(KVConfig(bucket=kv.bucket, allow_batched=True))
        assert await steps.run(with_another_between(bucket.load_all(["a"]), bucket.load_all(["b"]))) == {}


@on_both_drivers
async def test_a_change_that_could_not_be_recognised_is_refused(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        kv, steps = await new_bucket(js), Steps(js)
        with pytest.raises(ConfigError, match="key='a': a revision without a sequence; name the writer"):
            await steps.run(store(kv.bucket, [Change("a", revision=0)]))
        with pytest.raises(ConfigError, match="key='a': changed twice in one call"):
            await steps.run(store(kv.bucket, [Change("a"), Change("a")]))
        with pytest.raises(StreamNotFound):
            await steps.run(load("no_such_bucket", ["a"]))
        assert (await kv.stream_info()).state.last_sequence == 0


@on_both_drivers
@pytest.mark.parametrize("created", [(0, 100), (100, 0)])
async def test_a_sequence_that_only_one_side_says_the_stream_of_overwrites_nothing(
    driver: Driver, server: NatsServer, created: tuple[int, int]
) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        kv, steps = await new_bucket(js), Steps(js)
        first = [
            Change("a", b"1", sequence=100, stream_created=created[0]),
            Change("b", b"", "delete", 100, stream_created=created[0]),
        ]
        assert (await steps.run(store_newest(kv.bucket, first))).written == 2
        for key in ("a", "b"):
            with pytest.raises(ConfigError, match=f"key='{key}': .*nothing tells which is newer"):
                await steps.run(store_newest(kv.bucket, [Change(key, b"2", sequence=50, stream_created=created[1])]))
        await kv.put("a", b"of another client")
        second = [Change("a", b"3", sequence=50, stream_created=created[1])]
        assert (await steps.run(store_newest(kv.bucket, second))).written == 1


@on_both_drivers
async def test_many_who_store_the_newest_at_once_leave_the_newest(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        kv = await new_bucket(js)

        async def work(worker: int) -> Outcome:
            total = Outcome()
            async with driver.connect(server.url) as own:
                steps = Steps(own.jetstream())
                for round_ in range(5):
                    changes = [Change(f"k.{key}", b"%d" % worker, sequence=round_ * 3 + worker) for key in range(40)]
                    total = Outcome.of_all([total, await steps.run(store_newest(kv.bucket, changes))])
            return total

        outcomes = await asyncio.gather(*map(work, range(3)))
        found = await Steps(js).run(load(kv.bucket, [f"k.{key}" for key in range(40)]))
        assert {current[:2] for current in found.values()} == {(b"2", 14)}
        # Each change was written or was not newer; what was written is in the bucket, once.
        assert sum(each.written + each.dropped for each in outcomes) == 3 * 5 * 40
        assert sum(each.written for each in outcomes) == (await kv.stream_info()).state.last_sequence


@on_both_drivers
async def test_a_cut_connection_in_the_middle_loses_and_repeats_nothing(driver: Driver, server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, driver.connect(server.url) as other:
        watched = await new_bucket(other.jetstream(), history=5)
        async with driver.connect(proxy.url) as nc:
            steps = Steps(nc.jetstream())
            changes = [Change(f"k.{number}", b"x" * 200, sequence=1, revision=0) for number in range(15_000)]
            storing = asyncio.ensure_future(steps.run(store(watched.bucket, changes)))
            while (await watched.stream_info()).state.last_sequence < 1000 and not storing.done():
                pass
            proxy.cut()
            assert await storing == Outcome(written=15_000)
            assert (await watched.stream_info()).state.last_sequence == 15_000
            loading = asyncio.ensure_future(steps.run(load(watched.bucket, [change.key for change in changes])))
            await asyncio.sleep(0.02)
            proxy.cut()
            assert len(await loading) == 15_000


# ---- folds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False], ids=["fast ingest", "one by one"])
@on_both_drivers
async def test_workers_that_fold_the_same_events_at_once_apply_each_of_them_once(
    driver: Driver, server: NatsServer, batched: bool
) -> None:
    """Three workers fold overlapping shares of the events into the same keys, each share in several writes."""
    keys, count = 20, 1200
    events = [(f"k.{number % keys}", number + 1) for number in range(count)]
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        kv = await new_bucket(js, batched=batched, history=64)
        await kv.put("k.0", b"[0,0]")  # by somebody who knows nothing of sequences

        async def work(size: int) -> Outcome:
            total = Outcome()
            async with driver.connect(server.url) as own:
                steps = Steps(own.jetstream())
                for start in range(0, count, size):
                    given = [events[start : start + size]]
                    total = Outcome.of_all([total, await steps.run(fold_into(kv.bucket, lambda given=given: given))])  # type: ignore[misc]
            return total

        outcomes = await asyncio.gather(*map(work, (100, 300, 400)))
        expected: dict[str, Any] = {}
        for key, sequence in events:
            expected[key] = chain(expected.get(key), sequence)
        assert await values_of(kv, Steps(js)) == expected
        # Every revision of a key is further than the one before: no event was applied twice, no value stored twice.
        revisions: dict[str, list[int]] = {}
        last = (await kv.stream_info()).state.last_sequence
        for message in await Steps(js).messages((await Steps(js).run(open_bucket(kv.bucket))).scan(2, last)):
            revisions.setdefault(message.subject, []).append(int(message.headers["JetSpark-Sequence"]))
        assert sum(map(len, revisions.values())) == last - 1
        assert all(sequences == sorted(set(sequences)) for sequences in revisions.values())
        # One that comes to the very value that another has just stored counts as its writer, too.
        assert sum(each.written for each in outcomes) >= last - 1
        assert all(each.conflicts == () for each in outcomes)
        again = await Steps(js).run(fold_into(kv.bucket, lambda: [[("k.1", 2)]]))
        assert again == Outcome(dropped=1)


@on_both_drivers
async def test_a_key_that_others_write_between_load_and_store_is_folded_again(
    driver: Driver, server: NatsServer
) -> None:
    async with driver.connect(server.url) as nc, driver.connect(server.url) as other:
        js = nc.jetstream()
        kv, steps = await new_bucket(js), Steps(js)
        theirs = jetspark.blocking.connect(server.url)
        rounds = 0

        def pieces() -> list[Rows]:
            nonlocal rounds
            rounds += 1
            return [[("a", 3), ("b", 4), ("a", 5), ("c", 6)]]

        def ending(state: Any, event: int) -> Any:
            """The first event of ``a`` is folded while others write the key; the last event of all ends its own."""
            if event == 3 and rounds == 1:
                with theirs:
                    jetspark.blocking.steps.ProcedureRunner(theirs.jetstream()).run(
                        fold_into(kv.bucket, lambda: [[("a", 1), ("a", 2)]])
                    )
            return DELETE if event == 6 else chain(state, event)

        assert await steps.run(fold_into(kv.bucket, pieces, ending)) == Outcome(written=3)
        found = await Steps(other.jetstream()).run(load(kv.bucket, ["a", "b", "c"]))
        assert (json.loads(found["a"].value), found["a"].sequence) == (chained([1, 2, 3, 5]), 5)
        assert (found["c"].value, found["c"].sequence) == (None, 6)
        assert rounds == 2


@on_both_drivers
async def test_others_who_win_every_race_end_in_a_conflict(driver: Driver, server: NatsServer) -> None:
    """The other writer is in the way of each of the rounds; after the last of them the fold gives up."""
    async with driver.connect(server.url) as nc, driver.connect(server.url) as other:
        js, theirs = nc.jetstream(), await new_bucket(other.jetstream())
        rounds = 0

        def slow(state: Any, event: int) -> Any:
            nonlocal rounds
            rounds += 1
            with jetspark.blocking.connect(server.url) as third:
                third.jetstream().kv(theirs.bucket).put("a", b"[0,0]")
            return chain(state, event)

        with pytest.raises(Conflict, match="'a'"):
            await Steps(js).run(fold_into(theirs.bucket, lambda: [[("a", 1)]], slow))
        assert rounds == 20


# ---- ranges and tables -----------------------------------------------------------------------------------------------


async def filled(js: jetspark.JetStream, count: int, **config: Any) -> Any:
    name = f"SCAN{next(_numbers)}"
    stream = await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_batched=True, **config))
    async with js.fast_batch() as batch:
        await batch.add_many((f"{name}.{number % 3}", b"%d" % number) for number in range(1, count + 1))
    return stream


def range_of(stream: Any, start: int, end: int, **more: Any) -> Range:
    return Range(stream.name, head_of(stream.cached_info).created, start, end, **more)


@on_both_drivers
async def test_a_range_is_read_whole_and_nothing_beyond_it(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        stream, steps = await filled(js, 25_000), Steps(js)
        found = await steps.messages(RangeScan(range_of(stream, 10, 24_001)))
        assert [delivery(each).sequence for each in found] == list(range(10, 24_001))
        part = range_of(stream, 1, 25_001, subjects=(f"{stream.name}.1", f"{stream.name}.2"))
        assert [int(each.data) for each in await steps.messages(RangeScan(part))] == [
            number for number in range(1, 25_001) if number % 3
        ]
        assert [name async for name in stream.consumer_names()] == []


@on_both_drivers
async def test_what_is_consumed_by_reading_is_read_without_a_consumer(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        stream = await filled(js, 2_500, retention="workqueue", allow_direct=True)
        steps = Steps(js)
        found = await steps.messages(RangeScan(range_of(stream, 5, 2_400)))
        assert [each.sequence for each in found] == list(range(5, 2_400))
        part = range_of(stream, 1, 2_501, subjects=(f"{stream.name}.1", f"{stream.name}.2"))
        assert len(await steps.messages(RangeScan(part))) == sum(1 for number in range(1, 2_501) if number % 3)
        assert (await stream.info()).state.messages == 2_500


@on_both_drivers
async def test_what_is_gone_is_an_error_unless_it_is_allowed_or_was_not_promised(
    driver: Driver, server: NatsServer
) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        stream, steps = await filled(js, 100), Steps(js)
        await stream.purge(up_to_sequence=30)
        failing = RangeScan(range_of(stream, 10, 50))
        with pytest.raises(DataLoss):
            await steps.messages(failing)
        with pytest.raises(UsageError, match="a scan that has failed"):
            await steps.messages(failing)
        allowed = RangeScan(range_of(stream, 10, 50), fail_on_loss=False)
        assert len(await steps.messages(allowed)) == 19
        assert allowed.lost_sequences == 21
        assert len(await steps.messages(RangeScan(range_of(stream, 10, 50, is_earliest=True)))) == 19
        other = Range(stream.name, "2001-01-01T00:00:00Z", 40, 50)
        with pytest.raises(StreamRecreated):
            await steps.messages(RangeScan(other))


@on_both_drivers
async def test_a_scan_goes_on_behind_what_it_has_when_the_connection_is_cut(
    driver: Driver, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetspark.state.scan.REQUEST_MESSAGES", 500)
    monkeypatch.setattr("jetspark.state.scan.PIECE_MESSAGES", 500)
    async with Proxy(server.port) as proxy, driver.connect(proxy.url) as nc:
        js = nc.jetstream()
        stream, steps = await filled(js, 6_000), Steps(js)
        scan = RangeScan(range_of(stream, 1, 6_001))
        found: list[int] = []
        async for piece in steps._runner.pieces(scan):
            found += [delivery(each).sequence for each in piece]
            if len(found) in range(1_000, 1_600) or len(found) in range(3_000, 3_600):
                proxy.cut()
        assert found == list(range(1, 6_001))


@on_both_drivers
async def test_a_scan_that_is_left_early_leaves_no_consumer_behind(
    driver: Driver, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetspark.state.scan.PIECE_MESSAGES", 50)
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        stream, steps = await filled(js, 500), Steps(js)
        async with contextlib.aclosing(steps._runner.pieces(RangeScan(range_of(stream, 1, 501)))) as pieces:
            assert len(await anext(pieces)) >= 50
        assert [name async for name in stream.consumer_names()] == []


@on_both_drivers
async def test_a_runner_that_can_connect_again_outlives_a_connection_that_is_closed_for_good(
    driver: Driver, server: NatsServer
) -> None:
    opened: list[Any] = []

    def renew() -> Any:
        if not opened or opened[-1].is_closed:
            opened.append(jetspark.blocking.connect(server.url))
        return opened[-1].jetstream()

    async def renew_aio() -> Any:
        if not opened or opened[-1].is_closed:
            opened.append(await jetspark.connect(server.url))
        return opened[-1].jetstream()

    runner: Any = jetspark.aio.steps.ProcedureRunner(renew=renew_aio)
    if driver.name == "blocking":
        runner = Awaited(jetspark.blocking.steps.ProcedureRunner(renew=renew))
    async with driver.connect(server.url) as nc:
        watched = await new_bucket(nc.jetstream(), history=5)
        changes = [Change(f"k.{number}", b"x" * 200, sequence=1, revision=0) for number in range(15_000)]
        storing = asyncio.ensure_future(runner.run(store(watched.bucket, changes)))
        while (await watched.stream_info()).state.last_sequence < 1000 and not storing.done():
            pass
        await _closed(opened[-1])
        assert await storing == Outcome(written=15_000)
        assert (await watched.stream_info()).state.last_sequence == 15_000
        await _closed(opened[-1])
        assert len(await runner.run(load(watched.bucket, [change.key for change in changes]))) == 15_000
        assert len(opened) == 3
        await _closed(opened[-1])


async def _closed(client: jetspark.Client | jetspark.blocking.Client) -> None:
    if isinstance(client, jetspark.blocking.Client):
        await asyncio.to_thread(client.close)
    else:
        await client.close()


@on_both_drivers
async def test_a_closed_connection_ends_a_procedure(driver: Driver, server: NatsServer) -> None:
    nc = await driver.connect(server.url)
    js = nc.jetstream()
    kv, steps = await new_bucket(js), Steps(js)
    await nc.close()
    for procedure in (store(kv.bucket, [Change("a", b"1")]), load(kv.bucket, ["a"])):
        with pytest.raises(ConnectionClosed):
            await steps.run(procedure)


@on_both_drivers
async def test_a_table_is_one_moment_of_a_bucket_that_keeps_changing(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc, driver.connect(server.url) as other:
        js, kv = nc.jetstream(), await new_bucket(other.jetstream(), history=5)
        steps = Steps(js)
        await steps.run(store(kv.bucket, [Change(f"k.{number}", b"0") for number in range(2000)]))
        log: list[tuple[int, str, bytes]] = [(number + 1, f"k.{number}", b"0") for number in range(2000)]
        is_over = False

        async def write() -> None:
            for number in itertools.count(1):
                if is_over:
                    return
                key = f"k.{number * 37 % 2000}"
                log.append((await kv.put(key, b"%d" % number), key, b"%d" % number))
                if number % 20 == 0:
                    await asyncio.sleep(0.01)  # a table ends where nothing is behind it

        def at(moment: int) -> dict[str, bytes]:
            return {key: value for revision, key, value in sorted(log) if revision <= moment}

        writing = asyncio.ensure_future(write())
        view = await steps.run(open_bucket(kv.bucket))
        tables: list[tuple[int, dict[str, bytes]]] = []
        for _ in range(3):
            found = await steps.run(snapshot(view))
            moment = max(delivery(each).sequence for each in found.values())
            tables.append((moment, {subject.removeprefix(view.prefix): each.data for subject, each in found.items()}))
        is_over = True
        await writing
        for moment, table in tables:
            assert table == at(moment)
        moment, table = tables[0]
        past = await steps.run(plan(view, as_of=moment))
        wanted = set(past.wanted)
        assert {key: value for revision, key, value in log if revision in wanted} == table


# ---- another domain --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A leaf node with JetStream of its own, connected to one whose JetStream is the domain ``hub``."""
    folder = tmp_path_factory.mktemp("domains")
    with (
        NatsServer(jetstream=False, extra_config=domain_config("hub", folder / "hub")) as hub,
        NatsServer(jetstream=False, extra_config=domain_config("edge", folder / "edge", hub)) as leaf,
    ):
        yield leaf


@pytest.mark.parametrize("batched", [True, False], ids=["fast ingest", "one by one"])
@on_both_drivers
async def test_a_bucket_of_another_domain_is_written_and_read(driver: Driver, edge: NatsServer, batched: bool) -> None:
    async with driver.connect(edge.url) as nc:
        js = nc.jetstream(domain="hub")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await js.account_info()
                    break
                except JetStreamUnavailable:  # the leaf node is not connected yet
                    await asyncio.sleep(0.05)
        kv, steps = await new_bucket(js, batched=batched), Steps(js)
        changes = [Change(f"k.{number}", b"[1,1]", sequence=3, revision=0) for number in range(50)]
        assert await steps.run(store(kv.bucket, changes, patience_s=5)) == Outcome(written=50)
        assert len(await steps.run(load(kv.bucket, [change.key for change in changes]))) == 50
        assert await steps.run(fold_into(kv.bucket, lambda: [[("k.7", 3), ("k.7", 4)]])) == Outcome(1, (), 1)
        assert len(await values_of(kv, steps)) == 50
        assert (await kv.stream_info()).state.last_sequence == 51
