"""Both of our batchers through the suite that any batcher can be run through, on a fake clock and on the real one."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from jetspark import batcher
from jetspark.batcher import blocking
from jetspark.testing.batcher_conformance import BatcherConformance, BlockingBatcherConformance


class TestAsyncio(BatcherConformance):
    closed = batcher.Closed

    def make(self, sink: Any, **limits: Any) -> batcher.Batcher[Any]:
        return batcher.Batcher(batcher.BatcherConfig(sink=sink, clock=self.clock, **limits))


class TestUvloop(TestAsyncio):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class TestAsyncioOnAFakeClock(TestAsyncio):
    has_fake_clock = True


class TestThreads(BlockingBatcherConformance):
    closed = blocking.Closed

    def make(self, sink: Any, **limits: Any) -> blocking.Batcher[Any]:
        return blocking.Batcher(blocking.BatcherConfig(sink=sink, clock=self.clock, **limits))


class TestThreadsOnAFakeClock(TestThreads):
    has_fake_clock = True
