"""Every public operation of both drivers, as something that can be interrupted, and what must be true afterwards.

A row is a coroutine: it prepares, has :meth:`World.interrupt` run the operation, and checks that what was reported is
true. It is written for asyncio; with the blocking driver it runs in one thread, without a loop.
"""

from __future__ import annotations

from typing import Any

import jetspark
import jetspark.batcher

# Each adds its rows to the table.
from support.operations import batchers, buckets, connections, consumers, objects, publishers, streams  # noqa: F401
from support.operations.table import ROWS, Row, World, interruption

__all__ = ["CLASSES", "ROWS", "WAITS_FOR_NOTHING", "Row", "World", "interruption"]

# What the table is compared with.
CLASSES: list[Any] = [
    jetspark.Client,
    jetspark.Subscription,
    jetspark.Message,
    jetspark.JetStream,
    jetspark.Stream,
    jetspark.Consumer,
    jetspark.OrderedConsumer,
    jetspark.JetStreamMessage,
    jetspark.AtomicBatch,
    jetspark.FastBatch,
    jetspark.FastPublisher,
    jetspark.KeyValue,
    jetspark.ObjectStore,
    jetspark.batcher.Batcher,
]

WAITS_FOR_NOTHING = {
    "Client.jetstream",
    "JetStream.atomic_batch",
    "JetStream.fast_batch",
    "JetStream.fast_publisher",
    "Stream.ordered_consumer",
    "Message.reply_subject",
    "JetStreamMessage.reply_subject",
}
