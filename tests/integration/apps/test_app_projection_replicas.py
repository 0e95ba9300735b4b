"""Loads that are answered with the past, by replicas that are behind: live, in a rebuild, a repair and a replay."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.apps import publish, running, set_up, until
from support.projections import (
    Account,
    Balances,
    Closed,
    Moved,
    Moves,
    Opened,
    folded,
    in_buckets,
    in_stream,
    parked,
    some_events,
)
from support.replicas import stale_replica
from support.stale import stale_loads

import jetspark.blocking
from jetspark import KVConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, LiveOptions
from jetspark.app.projections.bucket_refs import open_records
from jetspark.app.projections.leases import Lease
from jetspark.app.replay import RebuildOptions, ReplayRequest, rebuild, repair_keys, run_replay, verify
from jetspark.app.replay.live_bucket import stored_position
from jetspark.server import NatsServer

# Few keys in the cache: most are loaded again and again.
SMALL = LiveOptions(batch=20, batch_wait_s=0.0, cache_keys=1, position_every_s=0.01, lease_s=1.0)
BALANCES = "balances"


class Mended(Balances):
    def apply(self, state: Account | None, event: Any, key: str) -> Any:
        if isinstance(event, Moved) and event.cents == 666:
            return state
        return super().apply(state, event, key)


def bank(kind: type[Balances] = Balances, version: int = 1) -> App:
    app = App("bank", stream="BANK", subjects=["bank.>"])
    bucket = KVConfig(bucket="bank_balances", history=10)  # so that there is a past
    app.projection(BALANCES, events=[Opened, Moved, Closed], bucket=bucket, version=version)(kind)
    app.projection("moves", events=[Moved], bucket="bank_moves")(Moves)
    return app


async def has_read_all(js: JetStream, app: App) -> bool:
    last = (await (await js.stream("BANK")).info()).state.last_sequence
    positions = [(await stored_position(js, spec.bucket.bucket)).sequence for spec in app.projections.values()]
    return min(position or 0 for position in positions) >= last


async def is_right(js: JetStream, app: App) -> bool:
    """By the last message of each key: a bucket with history has older ones, too."""
    expected, _ = folded(app, await in_stream(js, app))
    return await in_buckets(js, app) == expected


async def fold_all(server: NatsServer, js: JetStream, app: App) -> None:
    async with running(app, server.url, live=SMALL):
        await until(lambda: has_read_all(js, app))


async def fold_on_answers_of_the_past(server: NatsServer, js: JetStream, *, is_believed: bool) -> App:
    app, rng = bank(), random.Random(11)
    await set_up(js, app)
    await publish(js, app, *some_events(rng, 150, accounts=12))
    await fold_all(server, js, app)
    with stale_loads(is_believed=is_believed) as counts:
        for _ in range(3):  # each engine begins with nothing in its cache
            await publish(js, app, *some_events(rng, 80, accounts=12))
            await fold_all(server, js, app)
    assert counts.stale > 2
    return app


async def test_a_live_engine_is_not_misled_by_answers_of_the_past(server: NatsServer, js: JetStream) -> None:
    app = await fold_on_answers_of_the_past(server, js, is_believed=False)
    assert await is_right(js, app)
    assert (await verify(js, app, BALANCES)).is_equal


async def test_a_live_engine_that_believes_them_passes_events_by(server: NatsServer, js: JetStream) -> None:
    """What the test above is for: without the guard this very course of events loses some in silence."""
    app = await fold_on_answers_of_the_past(server, js, is_believed=True)
    assert not await is_right(js, app)
    assert not (await verify(js, app, BALANCES)).is_equal


async def repaired_with_answers_of_the_past(server: NatsServer, js: JetStream, *, is_believed: bool) -> App:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"), Opened(account="b"), Moved(source="a", target="b", cents=666))
    await fold_all(server, js, app)
    assert parked((await in_buckets(js, app))[BALANCES]) == ["a", "b"]
    when_parked = (await (await js.stream("KV_bank_balances")).info()).state.last_sequence
    app = bank(Mended)
    await publish(js, app, *[Moved(source="a", target="b", cents=cents) for cents in range(1, 9)])
    await repair_keys(js, app, BALANCES, ["a", "b"])
    await publish(js, app, *[Moved(source="a", target="b", cents=cents) for cents in range(1, 9)])
    with stale_loads(share=1.0 if is_believed else 0.5, is_believed=is_believed, up_to=(when_parked,)):
        await fold_all(server, js, app)  # a replica says that they are parked, as they once were
    return app


async def test_a_key_that_a_replica_still_takes_for_parked_goes_on(server: NatsServer, js: JetStream) -> None:
    app = await repaired_with_answers_of_the_past(server, js, is_believed=False)
    assert await is_right(js, app)


async def test_an_engine_that_believes_it_parked_loses_its_events(server: NatsServer, js: JetStream) -> None:
    app = await repaired_with_answers_of_the_past(server, js, is_believed=True)
    assert not await is_right(js, app)


@pytest.mark.parametrize("is_believed", [False, True])
async def test_a_repair_is_not_told_by_a_replica_that_nothing_is_wrong(
    server: NatsServer, js: JetStream, is_believed: bool
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"), Opened(account="b"), Moved(source="a", target="b", cents=5))
    await fold_all(server, js, app)
    await (await js.kv("bank_balances")).put("a", b"somebody else's")
    before = (await (await js.stream("KV_bank_balances")).info()).state.last_sequence - 1
    with stale_loads(share=1.0 if is_believed else 0.5, is_believed=is_believed, up_to=(before,)):
        done = await repair_keys(js, app, BALANCES, ["a"])
    assert await is_right(js, app) is not is_believed
    assert done.changed == (0 if is_believed else 1)


async def test_rebuilds_and_replays_are_right_whatever_replicas_answer(server: NatsServer, js: JetStream) -> None:
    app, rng = bank(), random.Random(12)
    await set_up(js, app)
    await publish(js, app, *some_events(rng, 300, accounts=12))
    await fold_all(server, js, app)
    newer = bank(version=2)
    with stale_loads() as counts:
        healthy = [
            key for key, (value, _, mark) in (await in_buckets(js, app))[BALANCES].items() if value and mark == "1"
        ]
        await (await js.stream("KV_bank_balances")).purge(subject=f"$KV.bank_balances.{healthy[0]}")
        done = await run_replay(js, app, BALANCES, ReplayRequest(keys=(healthy[0],)))
        assert done.changed == 1
        assert await is_right(js, app)
        outcome = await rebuild(js, newer, BALANCES, RebuildOptions(check=True, swap=True))
    assert outcome.is_swapped
    assert counts.stale > 1
    expected, _ = folded(newer, await in_stream(js, newer))
    assert (await in_buckets(js, newer, {BALANCES: outcome.new.bucket}))[BALANCES] == expected[BALANCES]


async def test_a_mirror_that_has_dropped_messages_answers_and_is_not_believed(
    server: NatsServer, js: JetStream
) -> None:
    """On one server: mirrors of a bucket answer for it, too, with whatever they have."""
    app, rng = bank(), random.Random(13)
    await set_up(js, app)
    await publish(js, app, *some_events(rng, 200, accounts=12))
    await fold_all(server, js, app)
    with jetspark.blocking.connect(server.url) as client:
        plain = client.jetstream()
        stale_replica(plain, plain.stream("KV_bank_balances"), 20)
        await publish(js, app, *some_events(rng, 200, accounts=12))
        await fold_all(server, js, app)
    assert await is_right(js, app)


async def test_a_lease_is_kept_and_seized_while_a_replica_is_behind(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    records = await open_records(js, app.name)
    before = Lease(records, "lease.x", "before", lease_s=60.0)
    assert await before.try_acquire()
    lease = Lease(records, "lease.x", "mine", lease_s=60.0)
    with jetspark.blocking.connect(server.url) as client:
        plain = client.jetstream()
        stale_replica(plain, plain.stream("KV_bank_projections"), 0)
        assert await lease.seize() == "before"
        for _ in range(20):
            # As if the answer to the last renewal had been lost: it is its own still.
            await lease._check_owner()
        stale_replica(plain, plain.stream("KV_bank_projections"), 0)
        for _ in range(20):
            await lease._check_owner()
