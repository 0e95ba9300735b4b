"""A projection is swapped to another version of its fold while code of the old version runs."""

from __future__ import annotations

import logging

import pytest
from support.apps import publish, running, set_up, until
from support.projections import Moved, Moves, Opened, bank

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, LiveOptions
from jetspark.app.projections.bucket_refs import BucketRef, find_bucket, open_records, swap
from jetspark.app.replay import RebuildOptions, rebuild, verify
from jetspark.server import NatsServer


class Doubled(Moves):
    def apply(self, state: dict[str, int] | None, event: Moved) -> dict[str, int]:
        return super().apply(state, Moved(source=event.source, target=event.target, cents=2 * event.cents))


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_swap_to_another_version_ends_neither_handlers_nor_the_other_projections(
    server: NatsServer, js: JetStream, caplog: pytest.LogCaptureFixture, partitions: int
) -> None:
    options = LiveOptions(position_every_s=0.01, lease_s=1.0, partitions=partitions)
    old, handled = bank(), list[str]()

    @old.handler(Opened, durable="greeting")
    async def greet(event: Opened) -> None:
        handled.append(event.account)

    newer = App("bank", stream="BANK", subjects=["bank.>"])
    for spec in old.projections.values():
        is_moves = spec.name == "moves"
        kind = Doubled if is_moves else spec.kind
        newer.projection(spec.name, events=spec.events, bucket=spec.bucket, version=1 + is_moves)(kind)
    await set_up(js, old)
    await publish(js, old, Opened(account="a"), Moved(source="a", target="b", cents=3))
    async with running(old, server.url, live=options) as task, old.connect(server.url) as client:
        await client.view("moves").wait_for("all.1", lambda state: state is not None)
        with caplog.at_level(logging.ERROR, logger="jetspark.app"):
            assert (await rebuild(js, newer, "moves", RebuildOptions(swap=True))).is_swapped
            await until(lambda: any("leaves it to workers with that code" in each for each in caplog.messages))
        await publish(js, old, Opened(account="c"), Moved(source="a", target="c", cents=3))
        assert await client.view("balances").get("c", at_least=4) is not None
        await until(lambda: handled == ["a", "c"])
        assert not task.done()
        # Those who have the code get the lease, though the old ones live and hold theirs.
        async with running(newer, server.url, live=options), newer.connect(server.url) as new:
            assert (await new.view("moves").get("all.1", at_least=4))["last"] == 6
            await publish(js, old, Opened(account="d"), Moved(source="a", target="d", cents=4))
            assert (await new.view("balances").get("d", at_least=6)).cents == 4
            assert (await new.view("moves").get("all.0", at_least=6))["last"] == 8
        for name in newer.projections:
            assert (await verify(js, newer, name)).is_equal
        # And back.
        records = await open_records(js, "bank")
        revision = (await find_bucket(records, newer.projections["moves"])).revision
        await swap(records, old.projections["moves"], BucketRef("bank_moves", 1), revision=revision)
        await client.view("moves").wait_for("all.0", lambda state: state is not None and state["last"] == 4)
        assert not task.done()
