"""The records of replays: read while replicas are behind, and beside what nobody can read."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

import pytest
from support.apps import publish, set_up
from support.projections import Opened, bank
from support.replicas import stale_replica

import jetspark.blocking
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Event
from jetspark.app.projections.bucket_refs import open_records
from jetspark.app.replay import (
    HandlerReplayOptions,
    ReplayRequest,
    read_handler_records,
    read_records,
    rebuild,
    repair_keys,
    replay_handler,
    run_replay,
)
from jetspark.app.replay.replay_records import find_replay
from jetspark.errors import ConfigError
from jetspark.server import NatsServer

# A replica answers every second request, or so.
ASKED = 20


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


def shop() -> App:
    app = App("shop", stream="SHOP", subjects=["orders.>"])

    @app.handler(Paid, durable="billing")
    async def bill(event: Paid) -> None: ...

    return app


async def test_a_rebuild_is_found_and_noted_while_a_replica_is_behind(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"))
    built = (await rebuild(js, app, "balances")).record
    records, spec = await open_records(js, "bank"), app.projections["balances"]
    with jetspark.blocking.connect(server.url) as client:
        plain = client.jetstream()
        stale_replica(plain, plain.stream("KV_bank_projections"), 0)
        for _ in range(ASKED):
            job = await find_replay(records, spec, built.id, "rebuild")
            assert job.record == built
        for _ in range(ASKED):
            # The answer to a write was lost: it is refused now, and is there.
            assert await job._store(built.encode())
            assert [each.id for each in await read_records(records)] == [built.id]


async def test_the_replay_of_a_handler_is_found_while_a_replica_is_behind(server: NatsServer, js: JetStream) -> None:
    app = shop()
    await set_up(js, app)
    await publish(js, app, Paid(order_id="o-1"))
    done = await replay_handler(js, app, "billing")
    records = await js.kv("shop_handlers")
    with jetspark.blocking.connect(server.url) as client:
        plain = client.jetstream()
        stale_replica(plain, plain.stream("KV_shop_handlers"), 0)
        for _ in range(ASKED):
            with pytest.raises(ConfigError, match="it is done already"):
                await replay_handler(js, app, "billing", options=HandlerReplayOptions(resume=done.id))
            assert [each.id for each in await read_handler_records(records)] == [done.id]


FOREIGN = {
    "text": b"what is this",
    "number": b"5",
    "list": b"[]",
    "empty": b"",
    "bytes": b"\xff\xfe",
    "other": b"{}",
    "wanting": b'{"request": {}}',
}


async def test_records_that_nobody_can_read_do_not_hide_the_others(js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"))
    done = await run_replay(js, app, "balances")
    records, told = await open_records(js, "bank"), dict[str, str]()
    for name, value in FOREIGN.items():
        await records.put(f"balances.replay.{name}", value)
    for name, wrong in {"began": 5, "id": None, "events": "many", "outline": 3}.items():
        await records.put(f"balances.replay.{name}", json.dumps({**done.to_dict(), name: wrong}).encode())
    found = await read_records(records, on_unreadable=lambda key, error: told.update({key: str(error)}))
    assert [each.id for each in found] == [done.id]
    assert sorted(told) == sorted(f"balances.replay.{name}" for name in [*FOREIGN, "began", "id", "events", "outline"])
    assert "'what is this'" in told["balances.replay.text"]


async def test_a_handlers_records_that_nobody_can_read_do_not_hide_the_others(
    js: JetStream, caplog: pytest.LogCaptureFixture
) -> None:
    app = shop()
    await set_up(js, app)
    await publish(js, app, Paid(order_id="o-1"))
    done = await replay_handler(js, app, "billing")
    records = await js.kv("shop_handlers")
    for name, value in FOREIGN.items():
        await records.put(f"replay.billing.{name}", value)
    assert [each.id for each in await read_handler_records(records)] == [done.id]
    assert caplog.text.count("is left out") == len(FOREIGN)


@pytest.mark.parametrize("what", ["replay", "repair", "handler"])
async def test_more_keys_than_a_record_takes_are_refused_before_anything_is_done(js: JetStream, what: str) -> None:
    app = shop() if what == "handler" else bank()
    await set_up(js, app)
    keys = tuple(f"{number:05}{'k' * 30}" for number in range(30_000))
    if what == "replay":
        work: Coroutine[Any, Any, Any] = run_replay(js, app, "balances", ReplayRequest(keys=keys))
    elif what == "repair":
        work = repair_keys(js, app, "balances", keys)
    else:
        work = replay_handler(js, app, "billing", ReplayRequest(keys=keys))
    with pytest.raises(ConfigError, match=r"keys: 30000 of them make a record of \d+ bytes, and 786432 are allowed: "):
        await work
    assert what == "handler" or await read_records(await open_records(js, "bank")) == []
