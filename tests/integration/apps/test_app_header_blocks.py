"""Messages whose headers are none: the server stores any block, and one publisher's mistake stops nobody."""

from __future__ import annotations

from typing import Any

import pytest
from support.apps import publish, running, set_up, until
from support.header_blocks import BLOCKS, publish_block

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Event, Reject, Retry
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters, run_redrive
from jetspark.core.headers import readable
from jetspark.server import NatsServer


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str


def event(name: str) -> bytes:
    return b'{"specversion":"1.0","id":"%b","source":"/","type":"order.paid","data":{"order_id":"%b"}}' % (
        (name.encode(),) * 2
    )


@pytest.mark.parametrize("partitions", [None, 2], ids=["plain", "partitions"])
async def test_a_message_with_any_block_of_headers_is_handled_or_a_dead_letter(
    server: NatsServer, js: JetStream, partitions: int | None
) -> None:
    app, done, is_mended = App("orders", stream="ORDERS", subjects=["orders.>"]), list[str](), False

    @app.handler(Paid, durable="billing", partitions=partitions, retry=Retry(attempts=1))
    async def bill(event: Paid) -> None:
        if not is_mended:
            raise Reject("not yet")
        done.append(event.order_id)

    await set_up(js, app)
    for name, block in BLOCKS.items():
        publish_block(server.port, f"orders.{name}.paid", block, event(name))
        publish_block(server.port, f"orders.junk-{name}.paid", block, b"junk")

    async def dead_letters() -> list[Any]:
        return [each.dead_letter for each in await read_dead_letters(js, app, DeadLetterFilter())]

    async def are_all_dead_letters() -> bool:
        return len(await dead_letters()) == 2 * len(BLOCKS)

    async with running(app, server.url):
        await until(are_all_dead_letters)
        for dead_letter in await dead_letters():
            name = dead_letter.subject.split(".")[1].removeprefix("junk-")
            if name != "not-closed" or partitions is None:  # a copy of that has the server's own header behind its "y"
                assert dead_letter.headers == readable(BLOCKS[name])
            assert (dead_letter.status, dead_letter.behind) == ("open", None)
        is_mended = True
        await run_redrive(js, app, DeadLetterFilter.parse(None, ["error=Reject"]))
        await until(lambda: sorted(done) == sorted(BLOCKS))
        await publish(js, app, Paid(order_id="next"))
        await until(lambda: "next" in done)


async def test_a_worker_starts_behind_messages_with_any_block_of_headers(server: NatsServer, js: JetStream) -> None:
    app, done = App("orders", stream="ORDERS", subjects=["orders.>"]), list[str]()

    @app.handler(Paid, durable="billing", ack_wait_s=1.0)
    async def bill(event: Paid) -> None:
        done.append(event.order_id)

    await set_up(js, app)
    for name, block in BLOCKS.items():
        publish_block(server.port, f"orders.{name}.paid", block, event(name))
    stream = await js.stream("ORDERS")
    taken = await (await stream.consumer("billing")).fetch(len(BLOCKS))  # by somebody who never says what became of it
    assert len(taken) == len(BLOCKS)
    async with running(app, server.url):
        await until(lambda: sorted(done) == sorted(BLOCKS))


async def test_a_projection_goes_on_behind_a_message_with_any_block_of_headers(
    server: NatsServer, js: JetStream
) -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])

    @app.projection("seen", events=[Paid], bucket="seen")
    class Seen:
        def key(self, event: Paid) -> str:
            return event.order_id

        def apply(self, state: dict[str, int] | None, event: Paid) -> dict[str, int]:
            return {"count": 1}

    await set_up(js, app)
    for name, block in BLOCKS.items():
        publish_block(server.port, f"orders.{name}.paid", block, event(name))
        publish_block(server.port, f"orders.junk-{name}.paid", block, b"junk")
    await publish(js, app, Paid(order_id="last"))
    async with running(app, server.url), app.connect(server.url) as client:
        assert await client.view("seen").get("last", at_least=2 * len(BLOCKS) + 1, timeout=60.0) is not None
        for name in BLOCKS:
            assert await client.view("seen").get(name) is not None
    assert len(await read_dead_letters(js, app, DeadLetterFilter())) == len(BLOCKS)
