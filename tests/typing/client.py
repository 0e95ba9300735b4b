"""What a type checker tells users of the client. Checked by mypy, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import assert_type

import jetspark
import jetspark.blocking


async def with_asyncio() -> None:
    async with jetspark.connect("nats://127.0.0.1:4222", name="typed") as nc:
        assert_type(nc, jetspark.Client)
        assert_type(await nc.publish("a", b"", headers={"A": "1", "B": ["1", "2"]}), None)
        subscription = await nc.subscribe("a", queue="q")
        assert_type(subscription, jetspark.Subscription)
        async for message in subscription:
            assert_type(message, jetspark.Message)
            assert_type(message.data, bytes)
            assert_type(message.headers.get_all("A"), list[str])
            assert_type(await message.respond(b""), None)
        assert_type(await subscription.next(timeout=1), jetspark.Message)
        assert_type(await nc.request("a"), jetspark.Message)
        assert_type(nc.request_many("a"), AsyncIterator[jetspark.Message])
        await nc.publish("a", "text")  # type: ignore[arg-type]
    assert_type(await jetspark.connect(["a", "b"]), jetspark.Client)


def blocking() -> None:
    with jetspark.blocking.connect(auth=lambda: jetspark.Token("t")) as nc:
        assert_type(nc, jetspark.blocking.Client)
        for message in nc.subscribe("a"):
            assert_type(message, jetspark.blocking.Message)
            assert_type(message.respond(b""), None)
        assert_type(nc.request("a").reply, str)


def handle(event: jetspark.ConnectionEvent) -> int:
    match event:
        case jetspark.Disconnected():
            return event.unconfirmed_messages
        case jetspark.SlowConsumer():
            return event.dropped
        case _:
            return 0


def keywords(nc: jetspark.Client) -> None:
    jetspark.connect("a", name="billing", ping_interval_s=5)
    jetspark.connect("a", nmae="billing")  # type: ignore[call-arg]
    jetspark.connect("a", ping_interval_s="5")  # type: ignore[arg-type]
    jetspark.connect("a", auth=lambda: jetspark.Token("t"))
    jetspark.connect("a", auth=lambda: "t")  # type: ignore[arg-type,return-value]
    js = nc.jetstream()
    js.fast_batch("ok", flow=100, on_gap=lambda lost: print(lost.start))
    js.fast_batch(flow="100")  # type: ignore[arg-type]
    js.fast_publisher(message_ids=True, patience_s=5)
    js.fast_publisher(patience=5)  # type: ignore[call-arg]
