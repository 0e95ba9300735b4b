"""One object of every public class of a driver, for tests that call all their methods."""

from __future__ import annotations

from typing import Any

import jetspark
from jetspark import ConsumerConfig, StreamConfig
from support.drivers import Driver, entered


class OneOfEach:
    """``objects`` has them by the name of their class, on a server with JetStream."""

    def __init__(self, nc: jetspark.Client, driver: Driver) -> None:
        self.nc, self._name = nc, f"EACH_{driver.name}"
        self.objects: dict[str, Any] = {"Client": nc}

    async def __aenter__(self) -> OneOfEach:
        js = self.nc.jetstream()
        stream = await js.create_stream(
            StreamConfig(name=self._name, subjects=["s.>"], allow_atomic=True, allow_batched=True, allow_direct=True)
        )
        await js.publish("s.a", b"1")
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c"))
        bucket = await js.create_kv(self._name)
        subscription = await self.nc.subscribe("a")
        await self.nc.publish("a", reply="b")
        self.objects |= {
            "Subscription": subscription,
            "Message": await subscription.next(timeout=30),
            "JetStream": js,
            "AtomicBatch": await entered(js.atomic_batch()),
            "FastBatch": await entered(js.fast_batch()),
            "FastPublisher": await entered(js.fast_publisher()),
            "Stream": stream,
            "Consumer": consumer,
            "OrderedConsumer": stream.ordered_consumer(),
            "JetStreamMessage": (await consumer.fetch(1))[0],
            "KeyValue": bucket,
            "Transaction": await entered(bucket.transaction()),
            "ObjectStore": await js.create_object_store(self._name),
        }
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        js = self.objects["JetStream"]
        await self.objects["AtomicBatch"].discard()
        await self.objects["FastPublisher"].close()
        await js.delete_stream(self._name)
        await js.delete_kv(self._name)
        await js.delete_object_store(self._name)
