"""What a user of the batcher sees."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import assert_type

from jetspark.batcher import Batcher, BatcherConfig, DeadLetter, DeadLetterSink, Flushed, RetrySink, Stats, blocking


class Numbers:
    async def write(self, batch: Sequence[int]) -> None: ...


class Letters:
    async def write(self, batch: Sequence[DeadLetter[int]]) -> None: ...


class BlockingNumbers:
    def write(self, batch: Sequence[int]) -> None: ...


async def with_asyncio() -> None:
    batcher = Batcher(BatcherConfig(sink=Numbers(), max_batch_size=1, max_batch_delay=1))
    assert_type(batcher, Batcher[int])
    assert_type(await batcher.add(1, timeout=1), None)
    assert_type(batcher.try_add(1), bool)
    assert_type(await batcher.add_with_ack(1), asyncio.Future[None])
    assert_type(await batcher.flush(), Flushed)
    assert_type(batcher.stats(), Stats)
    await batcher.add("text")  # type: ignore[arg-type]
    await batcher.add_batch(["text"])  # type: ignore[list-item]
    stacked = DeadLetterSink(RetrySink(Numbers()), Letters())
    assert_type(Batcher(BatcherConfig(sink=stacked, max_batch_size=1, max_batch_delay=1)), Batcher[int])
    # A sink of the other world:
    Batcher(BatcherConfig(sink=BlockingNumbers(), max_batch_size=1, max_batch_delay=1))  # type: ignore[arg-type]


def with_threads() -> None:
    batcher = blocking.Batcher(BatcherConfig(sink=BlockingNumbers(), max_batch_size=1, max_batch_delay=1))
    assert_type(batcher, blocking.Batcher[int])
    assert_type(batcher.add(1), None)
    assert_type(batcher.add_with_ack(1), Future[None])
    blocking.Batcher(BatcherConfig(sink=Numbers(), max_batch_size=1, max_batch_delay=1))  # type: ignore[arg-type]
