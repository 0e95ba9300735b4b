"""Projections with ``unique_ids`` on a real server: an event that is stored again is folded once, by every engine."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from support.apps import running, set_up, until
from support.projections import in_stream
from support.repeated import WINDOW, Held, Moved, app, oracle, some_messages

from jetspark import StreamConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import App
from jetspark.app.projections.state_header import ID_BYTES, Mark
from jetspark.app.replay import RebuildOptions, ReplayRequest, plan_replay, rebuild, repair_keys, run_replay, verify
from jetspark.app.testing import TestApp
from jetspark.errors import UsageError
from jetspark.jetstream.kv import operation_of
from jetspark.server import NatsServer


async def publish(js: JetStream, count: int, seed: int = 1) -> None:
    """Without the header by which the server knows a duplicate, as if its duplicate window had passed."""
    async with js.fast_batch() as batch:
        await batch.add_many((each.subject, each.data, None) for each in some_messages(count, seed))


async def held(js: JetStream, bucket: str) -> dict[str, Held]:
    found = {}
    async for message in (await js.stream(f"KV_{bucket}")).get_messages(1):
        key = message.subject.removeprefix(f"$KV.{bucket}.")
        if key.startswith("_jetspark."):
            continue
        mark = Mark.read(message.headers["JetSpark-Projection"])
        assert mark is not None
        ids = tuple(mark.ids[at : at + ID_BYTES] for at in range(0, len(mark.ids), ID_BYTES))
        value = message.data if operation_of(message.headers) == "put" else None
        parked = mark.parked and mark.parked.sequence
        found[key] = Held(value, int(message.headers["JetSpark-Sequence"]), ids, parked)
    return found


async def is_folded(js: JetStream) -> bool:
    return await held(js, "ledger_sums") == oracle(await in_stream(js, app))


async def test_an_event_stored_after_the_duplicate_window_is_folded_once(server: NatsServer, js: JetStream) -> None:
    await set_up(js, app)
    await publish(js, 500)
    async with running(app, server.url):
        await until(lambda: is_folded(js))
        await publish(js, 300)  # all of them again, and more of them again
        await until(lambda: is_folded(js))
    async with running(app, server.url):  # from the states that are stored
        await publish(js, 200, seed=2)
        await until(lambda: is_folded(js))
    assert (await verify(js, app, "sums")).is_equal
    messages = await in_stream(js, app)
    async with app.connect(server.url) as ledger:
        for as_of in (100, 700):
            past = oracle(messages[:as_of])
            for key in ("a1", "b2"):
                expected = past[key].value
                found = await ledger.view("sums").get(key, as_of=as_of)
                assert found == (None if expected is None else int(expected))


async def test_a_rebuild_a_repair_and_a_replay_store_the_ids_that_a_worker_stores(
    server: NatsServer, js: JetStream
) -> None:
    await set_up(js, app)
    await publish(js, 600)
    async with running(app, server.url):
        await until(lambda: is_folded(js))
    right = await held(js, "ledger_sums")
    built = await rebuild(js, app, "sums", RebuildOptions(check=True))
    assert await held(js, built.new.bucket) == right
    healthy = [key for key, each in right.items() if each.value is not None and each.parked is None]
    bucket = await js.stream("KV_ledger_sums")
    await bucket.purge(subject=f"$KV.ledger_sums.{healthy[0]}")
    assert set((await plan_replay(js, app, "sums", ReplayRequest())).behind) == {healthy[0]}
    await run_replay(js, app, "sums")
    assert await held(js, "ledger_sums") == right
    kv = await js.kv("ledger_sums")
    await kv.delete(healthy[1])
    found = await verify(js, app, "sums")
    assert [each.key for each in found.differences] == [healthy[1]]
    await repair_keys(js, app, "sums", [healthy[1]])
    assert await held(js, "ledger_sums") == right


async def test_a_state_with_other_ids_is_told_and_repaired(server: NatsServer, js: JetStream) -> None:
    await set_up(js, app)
    await publish(js, 200)
    async with running(app, server.url):
        await until(lambda: is_folded(js))
    right = await held(js, "ledger_sums")
    key, has = next((key, each) for key, each in right.items() if each.value is not None and each.parked is None)
    headers = {"JetSpark-Sequence": str(has.sequence), "JetSpark-Projection": f"1 unique {WINDOW}:"}
    await js.publish(f"$KV.ledger_sums.{key}", has.value or b"", headers=headers)
    found = await verify(js, app, "sums")
    assert [(each.key, each.kind) for each in found.differences] == [(key, "ids")]
    await repair_keys(js, app, "sums", [key])
    assert (await verify(js, app, "sums")).is_equal


def counting(unique_ids: int | None, name: str = "window") -> App:
    found = App(name, stream=StreamConfig(name="WINDOW", subjects=["ledger.>"], duplicate_window_s=0.2))

    class Counts:
        def key(self, event: Moved) -> str:
            return event.target

        def apply(self, state: int | None, event: Moved) -> int:
            return (state or 0) + event.cents

    found.projection("counts", events=[Moved], bucket="window_counts", unique_ids=unique_ids)(Counts)
    return found


@pytest.mark.parametrize(("unique_ids", "expected"), [(None, 20), (1, 10)])
@pytest.mark.parametrize("is_virtual", [True, False])
async def test_a_client_that_publishes_an_event_again_after_the_window_counts_once_with_unique_ids(
    server: NatsServer, js: JetStream, unique_ids: int | None, expected: int, is_virtual: bool
) -> None:
    event = Moved(source="a", target="b", cents=10)
    async with TestApp(counting(unique_ids), server=None if is_virtual else server) as test:
        first = await test.publish(event, id="e-1")
        repeated: Any = first
        while repeated.sequence == first.sequence:  # the server knows it, until its window has passed
            if is_virtual:
                test.advance(1.0)
            repeated = await test.publish(event, id="e-1")
        await test.settled()
        assert test.state("counts") == {"b": expected}


async def test_another_number_of_ids_under_the_same_version_ends_a_worker(server: NatsServer, js: JetStream) -> None:
    one, other = counting(2), counting(3)
    async with TestApp(one, server=server) as test:
        await test.publish(Moved(source="a", target="b", cents=10))
        await test.settled()
    await js.publish(
        "ledger.a.moved",
        (await (await js.stream("WINDOW")).get_message(1)).data,
        headers={"Nats-Msg-Id": f"{datetime.datetime.now(datetime.UTC)}"},
    )
    with pytest.raises(UsageError, match="unique_ids=2, and this code has unique_ids=3: give the projection another"):
        await other.run(server.url)
    with pytest.raises(UsageError, match="unique_ids=2, and this code has unique_ids=None"):
        await counting(None).run(server.url)
