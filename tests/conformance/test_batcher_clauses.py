"""The specification of the batcher clause by clause, on both drivers; ``docs/evidence/batcher-rules.md`` is the list.

Tests are coroutines; on threads each call runs in a thread of its own. Time is a fake clock's. Around every call into
the machine, in every test, the accounting law is checked against an independent count of what the machine holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.patience import PATIENCE_S

from jetspark import batcher
from jetspark.batcher import (
    BatcherBroken,
    BatcherConfig,
    BatcherTimeout,
    Closed,
    ConfigError,
    DroppedOnShutdown,
    Flushed,
    FlushTimeout,
    PrometheusMetrics,
    Stats,
    blocking,
)
from jetspark.batcher.machine import BatchMachine
from jetspark.errors import JetSparkError
from jetspark.testing import FakeClock
from jetspark.testing.batcher_conformance import BlockingRecordingSink, Conformance, RecordingSink, SinkFailure

REPOSITORY = Path(__file__).parents[2]
LONG = 10_000.0

TRANSITIONS = ["add", "add_many", "ask", "redeem", "give_back", "reject", "poll", "finish", "overdue"]
TRANSITIONS += ["fence", "forget", "close", "write_off", "fail"]


@pytest.fixture(autouse=True)
def lawless(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every call into any machine is followed by an audit; what it finds fails the test."""
    found: list[str] = []
    audited = threading.local()  # one step is what its caller sees as one

    def audit(machine: BatchMachine[Any], after: str) -> None:
        stats = machine.stats()
        parts = (stats.flushed_ok, stats.flushed_fail, stats.dropped_on_shutdown, stats.in_flight)
        if stats.enqueued != sum(parts) or min(parts) < 0 or stats.in_flight != machine.held:
            found.append(f"after {after}: {stats}, and {machine.held} are held")
        if machine.enqueued != machine._taken + len(machine._waiting):
            found.append(f"after {after}: {machine.enqueued} != {machine._taken} + {len(machine._waiting)}")
        if machine._reserved < 0 or len(machine._running) > machine.slots:
            found.append(f"after {after}: {machine._reserved} places reserved, {len(machine._running)} writes")

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(audited, "busy", False):
                return method(self, *args, **kwargs)
            audited.busy, result = True, None
            try:
                result = method(self, *args, **kwargs)
                return result
            finally:
                audit(self, name)
                audited.busy = False
                # B1, whenever all that had to go is gone
                if (
                    name == "poll"
                    and result is None
                    and len(self._waiting) > max(self.queue_depth, self.max_batch_size)
                ):
                    found.append(f"{len(self._waiting)} wait, with a queue of {self.queue_depth}")

        return call

    for name in TRANSITIONS:
        monkeypatch.setattr(BatchMachine, name, wrap(name, getattr(BatchMachine, name)))
    yield found
    assert found == []


class Rig:
    """One driver, with the means to use it from a coroutine."""

    def __init__(self, kind: str, threads: ThreadPoolExecutor) -> None:
        self.is_threaded = kind == "threads"
        self.clock = FakeClock()
        self.made: list[tuple[Any, Any]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._threads = threads

    def sink(self, **options: Any) -> Any:
        return (BlockingRecordingSink if self.is_threaded else RecordingSink)(**options)

    def make(self, sink: Any = None, *, is_open: bool = True, **settings: Any) -> tuple[Any, Any]:
        """A batcher whose batches go by size (3) unless a test says something else, and its sink."""
        sink = self.sink(is_open=is_open) if sink is None else sink
        usual: dict[str, Any] = {"max_batch_size": 3, "max_batch_delay": LONG, "flush_timeout": LONG}
        module: Any = blocking if self.is_threaded else batcher
        made = module.Batcher(BatcherConfig(sink=sink, **(usual | {"clock": self.clock} | settings)))
        self.made.append((made, sink))
        return made, sink

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_threaded:
            call = functools.partial(method, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        return await method(*args, **kwargs)

    async def add_all(self, made: Any, items: Any) -> None:
        for item in items:
            await self.call(made.add, item)

    async def begin(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """A call that is on its way: a shutdown or a flush has begun."""
        machine = method.__self__._machine  # type: ignore[attr-defined]
        fences = len(machine._fences)
        task = asyncio.create_task(self.call(method, *args, **kwargs))
        self.tasks.append(task)
        await self.until(lambda: task.done() or machine.is_closed or len(machine._fences) > fences)
        await self.pause()
        return task

    async def begin_waiting(self, made: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An add that has to wait for its place, and has come to that."""
        before = len(made._machine._tickets)
        task = asyncio.create_task(self.call(method, *args, **kwargs))
        self.tasks.append(task)
        await self.until(lambda: len(made._machine._tickets) > before)
        if kwargs:  # its deadline is set when it waits on the clock
            await self.pause()
        return task

    async def expire(self, task: asyncio.Task[Any], seconds: float) -> BaseException:
        """Let the time of a call run out, and return what it raised."""
        for _ in range(int(PATIENCE_S)):
            self.clock.advance(seconds)
            await asyncio.wait([task], timeout=1)  # a thread may have looked at the clock after that, and waits again
            if task.done():
                break
        error = task.exception()
        assert error is not None
        return error

    async def result(self, ack: Any) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await (asyncio.wrap_future(ack) if self.is_threaded else ack)

    async def failure(self, ack: Any) -> BaseException:
        await self.until(ack.done)  # not awaited: some of what is raised means something to a coroutine
        error: BaseException = ack.exception()
        assert error is not None
        return error

    async def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        turn = 0
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            turn += 1
            await asyncio.sleep(0 if turn < 50 else 0.001)

    async def until_batches(self, sink: Any, *batches: tuple[Any, ...]) -> None:
        await self.until(lambda: len(sink.batches) >= len(batches))
        assert sink.batches == list(batches)

    async def pause(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        if self.is_threaded:
            await asyncio.sleep(0.003)

    async def settled(self, made: Any) -> Stats:
        await self.until(lambda: made.stats().in_flight == 0)
        stats: Stats = made.stats()
        return stats

    @contextlib.contextmanager
    def holding(self, made: Any) -> Iterator[BatchMachine[Any]]:
        """The machine, while nobody else is at it."""
        with made._lock if self.is_threaded else contextlib.nullcontext():
            yield made._machine


@pytest.fixture(params=["asyncio", "threads"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    with ThreadPoolExecutor(max_workers=32) as threads:
        rig = Rig(request.param, threads)
        yield rig
        for made, sink in rig.made:
            if isinstance(sink, RecordingSink | BlockingRecordingSink):
                sink.open()
            if made._machine.failure is None:
                async with asyncio.timeout(PATIENCE_S):
                    await rig.call(made.shutdown)
        await asyncio.gather(*rig.tasks, return_exceptions=True)


def reasons(made: Any) -> dict[str, int]:
    return {reason: count for reason, count in made.stats().flushes.items() if count}


# ---- section 3: triggers ---------------------------------------------------------------------------------------------


async def test_size_a_batch_goes_when_it_is_full_and_not_before(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=3)
    await rig.add_all(made, "ab")
    await rig.pause()
    assert sink.batches == []
    await rig.call(made.add, "c")
    await rig.until_batches(sink, ("a", "b", "c"))
    assert reasons(made) == {"size": 1}


async def test_bytes_a_batch_goes_when_the_next_item_does_not_fit(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=100, max_batch_bytes=10)
    await rig.add_all(made, ["aaaa", "bbbb"])
    await rig.pause()
    assert sink.batches == []
    await rig.call(made.add, "ccc")
    await rig.until_batches(sink, ("aaaa", "bbbb"))
    await rig.until(lambda: made.stats().queue_depth == 1)
    await rig.until(lambda: made.stats().flushed_ok == 2)
    await rig.call(made.add, "ddddddd")  # exactly full
    await rig.until_batches(sink, ("aaaa", "bbbb"), ("ccc", "ddddddd"))
    assert reasons(made) == {"bytes": 2}


async def test_bytes_an_item_larger_than_a_batch_is_refused_with_all_that_came_with_it(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=100, max_batch_bytes=10)
    for method, argument in [(made.add, "x" * 11), (made.add_with_ack, "x" * 11), (made.add_batch, ["a", "x" * 11])]:
        with pytest.raises(ConfigError, match="an item of 11 bytes: expected at most max_batch_bytes=10"):
            await rig.call(method, argument)
    with pytest.raises(ConfigError):
        made.try_add("x" * 11)
    await rig.call(made.add, "fits")
    await rig.call(made.shutdown)
    assert sink.batches == [("fits",)]
    assert made.stats().enqueued == 1


async def test_bytes_the_place_of_a_refused_item_goes_to_the_next_who_waits(rig: Rig) -> None:
    made, sink = rig.make(_OneByOne(rig), max_batch_size=1, queue_depth=1, max_batch_bytes=10)
    await rig.add_all(made, "ab")
    too_large = await rig.begin_waiting(made, made.add, "x" * 11)
    fitting = await rig.begin_waiting(made, made.add, "c")
    sink.let("a")
    with pytest.raises(ConfigError):
        await too_large
    async with asyncio.timeout(PATIENCE_S):
        await fitting  # while b is still being written
    assert sink.begun == ["a", "b"]
    sink.let("b")
    sink.let("c")


async def test_time_runs_from_the_first_item_of_the_batch_and_not_from_a_ticker(rig: Rig) -> None:
    made, sink = rig.make(max_batch_delay=10.0)
    await rig.call(made.add, "a")
    rig.clock.advance(10)
    await rig.until_batches(sink, ("a",))
    await rig.settled(made)
    rig.clock.advance(7)  # a ticker would be due in 3
    await rig.call(made.add, "b")
    rig.clock.advance(7)
    await rig.call(made.add, "c")
    await rig.pause()
    assert sink.batches == [("a",)]
    rig.clock.advance(3)
    await rig.until_batches(sink, ("a",), ("b", "c"))
    assert reasons(made) == {"time": 2}


async def test_time_is_watched_although_a_later_deadline_was(rig: Rig) -> None:
    """After a slow write the clock was still set to that write's timeout."""
    made, sink = rig.make(is_open=False, max_batch_size=2, max_batch_delay=1.0, flush_timeout=500.0)
    await rig.add_all(made, "ab")
    await rig.until_batches(sink, ("a", "b"))
    rig.clock.advance(50)
    await rig.pause()
    sink.open()
    await rig.settled(made)
    await rig.call(made.add, "c")
    rig.clock.advance(1)
    await rig.until_batches(sink, ("a", "b"), ("c",))


async def test_time_is_watched_while_another_write_runs(rig: Rig) -> None:
    settings = {"max_batch_size": 2, "max_batch_delay": 1.0, "flush_timeout": 500.0, "max_concurrent_flushes": 2}
    made, sink = rig.make(is_open=False, **settings)
    await rig.add_all(made, "ab")
    await rig.until_batches(sink, ("a", "b"))
    rig.clock.advance(50)
    await rig.pause()
    await rig.call(made.add, "c")
    rig.clock.advance(1)
    await rig.until_batches(sink, ("a", "b"), ("c",))


async def test_time_that_passed_during_a_write_counts(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, max_batch_delay=1.0)
    await rig.add_all(made, "abc")
    rig.clock.advance(5)
    await rig.pause()
    assert len(sink.batches) == 1
    sink.open()
    await rig.until_batches(sink, ("a", "b"), ("c",))
    assert reasons(made) == {"size": 1, "time": 1}


async def test_time_of_what_waited_behind_a_full_batch_begins_when_it_comes_first(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, max_batch_delay=10.0)
    await rig.add_all(made, "abcde")
    rig.clock.advance(8)
    sink.open()
    await rig.until(lambda: made.stats().in_flight == 1)
    rig.clock.advance(9)
    await rig.pause()
    assert sink.batches == [("a", "b"), ("c", "d")]
    rig.clock.advance(1)
    await rig.until_batches(sink, ("a", "b"), ("c", "d"), ("e",))


async def test_shutdown_has_what_is_left_go(rig: Rig) -> None:
    made, sink = rig.make()
    await rig.add_all(made, "ab")
    await rig.call(made.shutdown)
    assert sink.batches == [("a", "b")]
    assert reasons(made) == {"shutdown": 1}


async def test_manual_a_flush_has_what_there_is_go(rig: Rig) -> None:
    made, sink = rig.make()
    await rig.add_all(made, "ab")
    assert await rig.call(made.flush) == Flushed(2, 0)
    assert sink.batches == [("a", "b")]
    assert reasons(made) == {"manual": 1}


async def test_reason_there_is_exactly_one_when_several_would_do(rig: Rig) -> None:
    """Full, old, asked for and closed, all at the same time."""
    made, sink = rig.make(is_open=False, max_batch_size=2, max_batch_delay=1.0)
    await rig.add_all(made, "abcde")
    rig.clock.advance(5)
    flushing = await rig.begin(made.flush)
    ending = await rig.begin(made.shutdown)
    sink.open()
    await asyncio.gather(flushing, ending)
    assert sink.batches == [("a", "b"), ("c", "d"), ("e",)]
    assert reasons(made) == {"size": 2, "shutdown": 1}


# ---- section 4: invariants -------------------------------------------------------------------------------------------


async def test_I1_nobody_touches_the_buffer_but_its_owner(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On asyncio the thread of the loop; on threads whoever holds the one lock."""
    made, _sink = rig.make(max_batch_size=2)
    loop_thread, strangers = threading.get_ident(), []
    for name in TRANSITIONS:
        method = getattr(BatchMachine, name)

        def call(self: Any, *args: Any, _name: str = name, _method: Any = method, **kwargs: Any) -> Any:
            is_owner = made._lock._is_owned() if rig.is_threaded else threading.get_ident() == loop_thread
            if self is made._machine and not is_owner:  # a batcher of another test may still be ending
                strangers.append(_name)
            return _method(self, *args, **kwargs)

        monkeypatch.setattr(BatchMachine, name, call)
    await asyncio.gather(*(rig.add_all(made, range(10)) for _ in range(4)))
    await rig.call(made.add_batch, [1, 2, 3])
    await rig.call(made.flush)
    made.try_add(1)
    made.stats()
    await rig.call(made.shutdown)
    assert strangers == []


async def test_I2_an_accepted_item_is_in_exactly_one_place(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, queue_depth=4)
    for item in range(6):
        await rig.call(made.add, item)
        with rig.holding(made) as machine:
            places = [*machine._waiting, *(each for flush in machine._running.values() for each in flush.items)]
        assert sorted(places) == list(range(item + 1))
    sink.open()
    await rig.call(made.shutdown)
    assert sink.items == list(range(6))


async def test_I3_the_batcher_does_not_change_a_batch_and_the_sink_may(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=2)
    acks = [await rig.call(made.add_with_ack, item) for item in "abcd"]
    await rig.settled(made)
    assert [list(batch) for batch in sink.given] == [["a", "b"], ["c", "d"]]
    sink.before_end = lambda batch: batch.clear()
    acks += [await rig.call(made.add_with_ack, item) for item in "efg"]
    assert await rig.call(made.flush) == Flushed(3, 0) or made.stats().flushed_ok == 7
    sink.before_end = lambda batch: batch.extend("more" * 100)
    await rig.call(made.add, "h")
    await rig.call(made.shutdown)
    assert sink.items == list("abcdefgh")
    assert made.stats().flushed_ok == made.stats().enqueued == 8
    for ack in acks:
        assert await rig.result(ack) is None


async def test_I4_each_batch_is_a_list_of_its_own(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=2)
    await rig.add_all(made, range(9))
    with rig.holding(made) as machine:
        assert all(batch is not machine._waiting for batch in sink.given)
    await rig.call(made.shutdown)
    assert len({id(batch) for batch in sink.given}) == len(sink.batches) == 5
    given = [1, 2]
    other, sink = rig.make(max_batch_size=2)
    await rig.call(other.add_batch, given)
    await rig.call(other.shutdown)
    assert sink.given[0] is not given


async def test_I5_after_a_size_or_time_trigger_the_buffer_is_empty(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, max_batch_delay=1.0)
    await rig.add_all(made, "ab")
    assert made.stats().queue_depth == 0
    sink.open()
    await rig.settled(made)
    await rig.call(made.add, "c")
    assert made.stats().queue_depth == 1
    rig.clock.advance(1)
    await rig.until(lambda: made.stats().queue_depth == 0)
    await rig.until_batches(sink, ("a", "b"), ("c",))


async def test_I6_a_shutdown_that_returns_has_passed_everything_to_the_sink(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, queue_depth=5)
    await rig.add_all(made, range(7))
    ending = await rig.begin(made.shutdown)
    assert not ending.done()
    sink.open()
    await ending
    assert sink.batches == [(0, 1), (2, 3), (4, 5), (6,)]
    assert made.stats().flushed_ok == 7


async def test_I7_a_shutdown_that_times_out_counts_what_is_left(rig: Rig) -> None:
    """What runs and what waits: of neither is it known that it is written."""
    made, _sink = rig.make(is_open=False, max_batch_size=2)
    await rig.add_all(made, range(5))
    error = await rig.expire(await rig.begin(made.shutdown, timeout=1.0), 1.0)
    assert isinstance(error, BatcherTimeout)
    stats = made.stats()
    assert (stats.dropped_on_shutdown, stats.in_flight, stats.flushed_fail) == (5, 0, 0)


async def test_I8_add_after_shutdown_is_refused_and_enqueues_nothing(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=1)
    await rig.call(made.shutdown)
    for method, argument in [(made.add, 1), (made.add_batch, [1]), (made.add_batch, []), (made.add_with_ack, 1)]:
        with pytest.raises(Closed):
            await rig.call(method, argument)
    assert made.try_add(1) is False
    assert made.stats().enqueued == 0
    assert sink.batches == []


# ---- section 5: ordering ---------------------------------------------------------------------------------------------


async def test_O1_items_of_a_batch_are_in_the_order_of_their_adds(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=100)
    await rig.call(made.add, 0)
    await rig.call(made.add_batch, [1, 2])
    await rig.call(made.add_with_ack, 3)
    made.try_add(4)
    await rig.call(made.shutdown)
    assert sink.batches == [(0, 1, 2, 3, 4)]


async def test_O2_with_one_flusher_batches_are_in_order_too(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=3, queue_depth=4)
    await rig.add_all(made, range(100))
    await rig.call(made.shutdown)
    assert sink.items == list(range(100))
    assert sink.max_running == 1


async def test_O3_with_several_flushers_batches_begin_in_order_and_may_finish_in_any(rig: Rig) -> None:
    made, sink = rig.make(_OneByOne(rig), max_batch_size=1, max_concurrent_flushes=2)
    acks = [await rig.call(made.add_with_ack, item) for item in "ab"]
    await rig.until(lambda: sink.begun == ["a", "b"])
    sink.let("b")
    await rig.result(acks[1])
    assert not acks[0].done()
    assert made.stats().flushed_ok == made.stats().in_flight == 1
    sink.let("a")
    await rig.result(acks[0])


async def test_O3_equal_batches_at_the_same_time_are_told_apart(rig: Rig) -> None:
    """Compared by what is in them the wrong one was taken to be over, if its items could be compared at all."""
    made, sink = rig.make(_OneByOne(rig), max_batch_size=1, max_concurrent_flushes=2, flush_timeout=10.0)
    same = [_Touchy("x"), _Touchy("y")]
    acks = [await rig.call(made.add_with_ack, item) for item in same]
    await rig.until(lambda: len(sink.begun) == 2)
    flushing = await rig.begin(made.flush)
    sink.let(same[1])
    await rig.result(acks[1])
    assert not flushing.done()
    rig.clock.advance(10)
    assert isinstance(await rig.failure(acks[0]), FlushTimeout)
    assert await flushing == Flushed(1, 1)
    sink.let(same[0])


class _Touchy:
    def __init__(self, name: str) -> None:
        self.name = name

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        raise ValueError("the truth value is ambiguous")


class _OneByOne:
    """A sink whose writes of one item each end when they are told to."""

    def __init__(self, rig: Rig) -> None:
        self.begun: list[Any] = []
        self._gates: dict[Any, Any] = {}
        self._make = threading.Event if rig.is_threaded else asyncio.Event
        self.write = self._blocking if rig.is_threaded else self._asyncio

    def _gate(self, item: Any) -> Any:
        return self._gates.setdefault(item, self._make())

    def let(self, item: Any) -> None:
        self._gate(item).set()

    async def _asyncio(self, batch: Any) -> None:
        self.begun += batch
        await self._gate(batch[0]).wait()

    def _blocking(self, batch: Any) -> None:
        self.begun += batch
        self._gate(batch[0]).wait()


async def test_O4_producers_interleave_and_each_keeps_its_own_order(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=7, queue_depth=5)

    def produce(who: int) -> None:
        for number in range(50):
            made.add((who, number))

    async def produce_here(who: int) -> None:
        for number in range(50):
            await made.add((who, number))
            await asyncio.sleep(0)

    if rig.is_threaded:
        await asyncio.gather(*(asyncio.to_thread(produce, who) for who in range(4)))
    else:
        await asyncio.gather(*map(produce_here, range(4)))
    await rig.call(made.shutdown)
    assert len(sink.items) == len(set(sink.items)) == 200
    for who in range(4):
        assert [number for owner, number in sink.items if owner == who] == list(range(50))


# ---- section 6: durability -------------------------------------------------------------------------------------------

_CRASHING = {
    "asyncio": """
import asyncio, sys
from jetspark.batcher import Batcher, BatcherConfig
class Sink:
    async def write(self, batch):
        print(*batch, flush=True)
async def main():
    batcher = Batcher(BatcherConfig(sink=Sink(), max_batch_size=4, max_batch_delay=1000))
    for item in range(10):
        await batcher.add(item)
        await asyncio.sleep(0)
    while batcher.stats().flushed_ok < 8:
        await asyncio.sleep(0)
    print("accepted", batcher.stats().enqueued, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
""",
    "threads": """
import time
from jetspark.batcher.blocking import Batcher, BatcherConfig
class Sink:
    def write(self, batch):
        print(*batch, flush=True)
batcher = Batcher(BatcherConfig(sink=Sink(), max_batch_size=4, max_batch_delay=1000))
for item in range(10):
    batcher.add(item)
while batcher.stats().flushed_ok < 8:
    time.sleep(0.001)
print("accepted", batcher.stats().enqueued, flush=True)
time.sleep(1000)
""",
}


@pytest.mark.parametrize("kind", _CRASHING)
def test_D1_a_crash_loses_the_buffer_and_nothing_else(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _CRASHING[kind]], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(3)]
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    assert lines == ["0 1 2 3", "4 5 6 7", "accepted 10"]
    assert rest == ""


async def test_D2_what_the_sink_took_is_not_given_to_it_again(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=2, max_batch_delay=1.0, flush_timeout=5.0)
    await rig.add_all(made, "ab")
    await rig.settled(made)
    for _ in range(10):
        rig.clock.advance(5)
    await rig.pause()
    await rig.call(made.flush)
    await rig.call(made.shutdown)
    assert sink.batches == [("a", "b")]


async def test_D3_what_the_sink_refused_is_surfaced_and_not_tried_again(rig: Rig) -> None:
    made, sink = rig.make(rig.sink(fails=lambda number: number == 0), max_batch_size=2)
    acks = [await rig.call(made.add_with_ack, item) for item in "abcd"]
    assert isinstance(await rig.failure(acks[0]), SinkFailure)
    assert isinstance(await rig.failure(acks[1]), SinkFailure)
    assert await rig.result(acks[3]) is None
    assert sink.batches == [("a", "b"), ("c", "d")]
    assert (made.stats().flushed_ok, made.stats().flushed_fail) == (2, 2)


async def test_D4_each_add_enqueues_one_item(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=2)
    same = object()
    await rig.add_all(made, [same] * 5)
    await rig.call(made.shutdown)
    assert sink.items == [same] * 5
    assert made.stats().enqueued == 5


async def test_D5_a_sink_that_tries_again_sees_items_twice_and_they_count_once(rig: Rig) -> None:
    inner = rig.sink(fails=lambda number: number == 0)

    class Again:
        def write(self, batch: Any) -> Any:
            return self._blocking(batch) if rig.is_threaded else self._asyncio(batch)

        async def _asyncio(self, batch: Any) -> None:
            try:
                await inner.write(batch)
            except SinkFailure:
                await inner.write(batch)

        def _blocking(self, batch: Any) -> None:
            try:
                inner.write(batch)
            except SinkFailure:
                inner.write(batch)

    made, _ = rig.make(Again(), max_batch_size=2)
    await rig.add_all(made, "ab")
    await rig.call(made.shutdown)
    assert inner.batches == [("a", "b"), ("a", "b")]
    assert (made.stats().enqueued, made.stats().flushed_ok) == (2, 2)


# ---- section 7: backpressure -----------------------------------------------------------------------------------------


async def test_B1_while_a_flush_runs_at_most_queue_depth_items_wait(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=3, queue_depth=5)
    await rig.add_all(made, range(3 + 5))
    assert made.stats().queue_depth == 5
    with pytest.raises(BatcherTimeout, match="no room for"):
        await rig.call(made.add, "more", timeout=0)
    waiting = [await rig.begin_waiting(made, made.add, item) for item in range(8, 30)]
    assert made.stats().queue_depth == 5
    sink.open()
    await asyncio.gather(*waiting)
    await rig.call(made.shutdown)
    assert sorted(sink.items) == list(range(30))  # O4: of those who waited at the same time any may be first


async def test_B1_a_queue_smaller_than_a_batch_never_holds_more_than_a_batch(rig: Rig) -> None:
    """Places that were promised when there was a free slot are kept when it is taken by somebody else."""
    made, sink = rig.make(is_open=False, max_batch_size=10, queue_depth=2, max_batch_delay=1.0)
    await rig.add_all(made, range(10))
    await rig.until(lambda: len(sink.batches) == 1)
    await rig.add_all(made, range(10, 12))
    waiting = [await rig.begin_waiting(made, made.add, item) for item in range(12, 40)]
    most = 0
    sink.open()
    end = time.monotonic() + PATIENCE_S
    while not all(task.done() for task in waiting):
        assert time.monotonic() < end
        most = max(most, made.stats().queue_depth)
        rig.clock.advance(1)
        await asyncio.sleep(0)
    assert most <= 10
    await rig.call(made.shutdown)
    assert sorted(sink.items) == list(range(40))


async def test_B2_add_waits_until_there_is_room(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    await rig.add_all(made, "ab")
    adding = await rig.begin_waiting(made, made.add, "c")
    assert not adding.done()
    sink.open()
    await adding
    await rig.call(made.shutdown)
    assert sink.items == list("abc")


async def test_B2_add_waits_until_shutdown_is_called(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    await rig.add_all(made, "ab")
    waiting = [await rig.begin_waiting(made, made.add, "c"), await rig.begin_waiting(made, made.add_batch, ["d"])]
    ending = await rig.begin(made.shutdown)
    for task in waiting:
        with pytest.raises(Closed):
            await task
    sink.open()
    await ending
    assert sink.items == list("ab")


async def test_B3_an_add_whose_time_is_over_enqueues_nothing(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    await rig.add_all(made, "ab")
    late = await rig.begin_waiting(made, made.add, "late", timeout=2.0)
    patient = await rig.begin_waiting(made, made.add, "patient")
    error = await rig.expire(late, 2.0)
    assert isinstance(error, BatcherTimeout)
    assert isinstance(error, TimeoutError)
    assert made.stats().enqueued == 2
    sink.open()
    await patient
    await rig.call(made.shutdown)
    assert sink.items == ["a", "b", "patient"]


async def test_B4_add_drops_nothing_and_try_add_says_so(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, queue_depth=2)
    adding = await rig.begin_waiting(made, rig_add_all(rig, made), range(50))
    assert made.try_add("dropped") is False
    sink.open()
    await adding
    await rig.call(made.shutdown)
    assert sink.items == list(range(50))
    assert made.stats().rejected == 1


def rig_add_all(rig: Rig, made: Any) -> Callable[..., Any]:
    """A call that adds many, one after the other."""

    def add_all(items: Any) -> None:
        for item in items:
            made.add(item)

    async def add_all_here(items: Any) -> None:
        for item in items:
            await made.add(item)

    return add_all if rig.is_threaded else add_all_here


# ---- section 8: shutdown ---------------------------------------------------------------------------------------------


async def test_S1_shutdown_begins_the_drain(rig: Rig) -> None:
    made, sink = rig.make(is_open=False)
    await rig.add_all(made, "ab")
    ending = await rig.begin(made.shutdown)
    await rig.until_batches(sink, ("a", "b"))
    assert made.stats().is_closed
    sink.open()
    await ending


async def test_S2_shutdown_may_be_called_again_and_waits_again(rig: Rig) -> None:
    made, sink = rig.make(is_open=False)
    await rig.add_all(made, "ab")
    endings = [await rig.begin(made.shutdown) for _ in range(3)]
    assert not any(ending.done() for ending in endings)
    sink.open()
    await asyncio.gather(*endings)
    await rig.call(made.shutdown)
    assert sink.batches == [("a", "b")]
    assert reasons(made) == {"shutdown": 1}


async def test_S2_one_deadline_does_not_end_the_wait_of_another(rig: Rig) -> None:
    made, sink = rig.make(is_open=False)
    await rig.add_all(made, "ab")
    patient = await rig.begin(made.shutdown)
    error = await rig.expire(await rig.begin(made.shutdown, timeout=1.0), 1.0)
    assert isinstance(error, BatcherTimeout)
    assert not patient.done()
    sink.open()
    await patient


async def test_S2_nothing_to_drain_is_a_clean_shutdown_in_no_time(rig: Rig) -> None:
    made, sink = rig.make()
    await rig.call(made.shutdown, timeout=0)
    assert sink.batches == []


async def test_S3_after_shutdown_has_begun_add_is_refused(rig: Rig) -> None:
    made, sink = rig.make(is_open=False)
    await rig.add_all(made, "ab")
    ending = await rig.begin(made.shutdown)
    with pytest.raises(Closed):
        await rig.call(made.add, "c")
    sink.open()
    await ending
    assert sink.items == ["a", "b"]


async def test_S4_the_queue_then_one_final_flush_then_the_end(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2)
    await rig.add_all(made, range(5))
    ending = await rig.begin(made.shutdown)
    assert not ending.done()
    sink.open()
    await ending
    assert sink.batches == [(0, 1), (2, 3), (4,)]
    assert reasons(made) == {"size": 2, "shutdown": 1}
    assert sink.running == 0


async def test_S4_nothing_of_a_batcher_is_left_when_it_has_ended() -> None:
    """No task, no thread, no timer."""
    threads, clock = set(threading.enumerate()), FakeClock()
    made = batcher.Batcher(BatcherConfig(sink=RecordingSink(), max_batch_size=2, max_batch_delay=1.0, clock=clock))
    await Rig("asyncio", None).add_all(made, range(5))  # type: ignore[arg-type]
    await made.shutdown()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [timer for _, _, timer in clock._timers if not timer.is_cancelled] == []
    sink = BlockingRecordingSink()
    other = blocking.Batcher(BatcherConfig(sink=sink, max_batch_size=2, max_batch_delay=1.0, clock=clock))
    for item in range(5):
        other.add(item)
    other.shutdown()
    for thread in set(threading.enumerate()) - threads:
        await asyncio.to_thread(thread.join, PATIENCE_S) if thread.name.startswith("batcher") else None
    assert not [each for each in threading.enumerate() if each.name.startswith("batcher batcher")]
    assert clock._waiting == {}


async def test_S5_the_loop_goes_on_after_the_deadline(rig: Rig) -> None:
    """The items were counted as dropped and stay so: nothing counts twice. That they were written is ``late_ok``."""
    made, sink = rig.make(is_open=False, max_batch_size=2)
    acks = [await rig.call(made.add_with_ack, item) for item in range(5)]
    await rig.expire(await rig.begin(made.shutdown, timeout=1.0), 1.0)
    errors = [await rig.failure(ack) for ack in acks]
    assert all(isinstance(error, DroppedOnShutdown) for error in errors)
    sink.open()
    await rig.until_batches(sink, (0, 1), (2, 3), (4,))
    await rig.until(lambda: made.stats().late_ok == 5)
    await rig.call(made.shutdown)  # clean by now
    stats = made.stats()
    assert (stats.enqueued, stats.flushed_ok, stats.flushed_fail, stats.dropped_on_shutdown) == (5, 0, 0, 5)


async def test_S5_a_failure_after_the_deadline_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    made, sink = rig.make(rig.sink(is_open=False, fails=lambda number: True))
    await rig.add_all(made, "ab")
    await rig.expire(await rig.begin(made.shutdown, timeout=1.0), 1.0)
    caplog.clear()
    sink.open()
    await rig.call(made.shutdown)
    await rig.until(lambda: bool(caplog.records))
    assert "a write of 2 items failed: SinkFailure: batch 0" in caplog.text
    stats = made.stats()
    assert (stats.dropped_on_shutdown, stats.flushed_fail, stats.late_ok) == (2, 0, 0)


async def test_S6_shutdown_returns_nothing_or_raises_a_timeout(rig: Rig) -> None:
    made, sink = rig.make(is_open=False)
    await rig.call(made.add, "a")
    with pytest.raises(TimeoutError, match="its sink is not done"):
        await rig.call(made.shutdown, timeout=0)
    sink.open()
    assert await rig.call(made.shutdown) is None


async def test_S7_dropped_are_those_not_known_to_be_written_at_the_deadline(rig: Rig) -> None:
    made, _sink = rig.make(rig.sink(is_open=False), max_batch_size=2, queue_depth=10)
    await rig.add_all(made, range(7))
    ending = await rig.begin(made.shutdown, timeout=1.0)
    assert made.stats().dropped_on_shutdown == 0
    await rig.expire(ending, 1.0)
    assert made.stats().dropped_on_shutdown == 7
    assert made.stats().in_flight == 0


# ---- section 9: failures ---------------------------------------------------------------------------------------------


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, Panic, asyncio.CancelledError, StopIteration, GeneratorExit])
async def test_F1_whatever_a_sink_raises_its_batch_failed_and_the_next_one_goes_on(
    rig: Rig, error: type[BaseException]
) -> None:
    class Sink:
        calls = 0

        def write(self, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                raise error
            return None if rig.is_threaded else asyncio.sleep(0)

    made, sink = rig.make(Sink(), max_batch_size=1)
    acks = [await rig.call(made.add_with_ack, item) for item in "ab"]
    raised = await rig.failure(acks[0])
    is_wrapped = not rig.is_threaded and issubclass(error, asyncio.CancelledError | StopIteration)
    assert isinstance(raised, JetSparkError if is_wrapped else error)
    assert isinstance(raised.__cause__, error) or not is_wrapped
    assert await rig.result(acks[1]) is None
    await rig.call(made.shutdown)
    assert sink.calls == 2
    assert (made.stats().flushed_ok, made.stats().flushed_fail) == (1, 1)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_F1_a_sink_that_ends_the_program_ends_the_loop_after_it_was_counted(error: type[BaseException]) -> None:
    """Task and loop treat these two as their own end, and so it stays; on threads they are failures like others."""

    class Sink:
        async def write(self, batch: Any) -> None:
            raise error

    made = []

    async def main() -> None:
        made.append(batcher.Batcher(BatcherConfig(sink=Sink(), max_batch_size=1, max_batch_delay=LONG)))
        await made[0].add(1)
        await asyncio.sleep(LONG)

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    with pytest.raises(error):
        loop.run_until_complete(task)
    assert made[0].stats().flushed_fail == 1
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_F1_on_threads_a_sink_that_raises_system_exit_has_failed() -> None:
    class Sink:
        def write(self, batch: Any) -> None:
            raise SystemExit

    made = blocking.Batcher(BatcherConfig(sink=Sink(), max_batch_size=1, max_batch_delay=LONG))
    made.add(1)
    made.add(2)
    made.shutdown()
    assert made.stats().flushed_fail == 2


async def test_F2_a_broken_batcher_says_so_and_accepts_nothing_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _sink = rig.make()
    ack = await rig.call(made.add_with_ack, "a")

    def poll(now: float) -> None:
        raise ZeroDivisionError("a bug")

    with rig.holding(made) as machine:
        monkeypatch.setattr(machine, "poll", poll)
    flushing = await rig.begin(made.flush)
    with pytest.raises(BatcherBroken):
        await flushing
    assert isinstance(await rig.failure(ack), BatcherBroken)
    for method, arguments in [(made.add, "b"), (made.add_batch, ["b"]), (made.add_with_ack, "b")]:
        with pytest.raises(BatcherBroken) as caught:
            await rig.call(method, arguments)
        assert isinstance(caught.value, Closed)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert made.try_add("b") is False
    with pytest.raises(BatcherBroken):
        await rig.call(made.shutdown)
    await rig.until(lambda: "are not written: ZeroDivisionError('a bug')" in caplog.text)
    assert made.stats().in_flight == 1  # and never written


async def test_F2_whoever_waits_learns_that_the_batcher_broke(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    await rig.add_all(made, "ab")
    adding = await rig.begin_waiting(made, made.add, "c")
    flushing = await rig.begin(made.flush)

    def poll(now: float) -> None:
        raise ZeroDivisionError

    with rig.holding(made) as machine:
        monkeypatch.setattr(machine, "poll", poll)
    sink.open()
    for task in (adding, flushing):
        with pytest.raises(BatcherBroken):
            await task


async def test_F2_a_broken_batcher_that_holds_nothing_shuts_down_cleanly(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _sink = rig.make(max_batch_size=1)
    await rig.call(made.add, "a")
    await rig.settled(made)
    with rig.holding(made) as machine:
        machine.fail(ZeroDivisionError())
    await rig.call(made.shutdown)
    with pytest.raises(BatcherBroken):
        await rig.call(made.add, "b")


async def test_F3_a_failure_is_logged_and_counted_and_success_is_quiet(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "jetspark")
    made, _sink = rig.make(rig.sink(fails=lambda number: number == 1), max_batch_size=2, name="orders")
    await rig.add_all(made, "ab")
    await rig.settled(made)
    assert caplog.records == []
    await rig.add_all(made, "cd")
    await rig.call(made.shutdown)
    await rig.until(lambda: bool(caplog.records))
    [record] = caplog.records
    assert (record.name, record.levelname) == ("jetspark.batcher", "WARNING")
    assert record.getMessage() == "batcher 'orders': a write of 2 items failed: SinkFailure: batch 1"


async def test_F3_whoever_listens_to_the_log_may_use_the_batcher(rig: Rig) -> None:
    """A log that is shipped through the very batcher whose failure it tells of."""
    made: Any = None

    class Shipping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            made.try_add(record.getMessage())

    logger = logging.Logger("shipping")
    logger.addHandler(Shipping())
    made, sink = rig.make(rig.sink(fails=lambda number: number == 0), max_batch_size=1, logger=logger)
    await rig.call(made.add, "a")
    await rig.until(lambda: len(sink.batches) == 2)
    assert "failed" in sink.batches[1][0]
    await rig.settled(made)


async def test_F3_a_log_that_fails_does_not_stop_the_batcher(rig: Rig) -> None:
    class Failing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise ZeroDivisionError

    logger = logging.Logger("failing")
    logger.addFilter(Failing())
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # which is where it goes on asyncio
    sink = rig.sink(fails=lambda number: number == 0)
    made, _ = rig.make(sink, max_batch_size=1, queue_depth=1, logger=logger)
    async with asyncio.timeout(PATIENCE_S):
        await rig.add_all(made, range(5))
        await rig.call(made.shutdown)
    assert sink.items == list(range(5))
    assert (made.stats().flushed_ok, made.stats().flushed_fail) == (4, 1)


async def test_a_write_that_takes_too_long_has_failed_and_keeps_its_slot_until_it_returns(rig: Rig) -> None:
    class Stubborn:
        """Takes no notice of being cancelled."""

        def __init__(self) -> None:
            self.begun: list[Any] = []
            self.gate = threading.Event()

        def write(self, batch: Any) -> Any:
            self.begun.append(tuple(batch))
            return self.gate.wait() if rig.is_threaded else self._asyncio()

        async def _asyncio(self) -> None:
            while not self.gate.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)

    made, sink = rig.make(Stubborn(), max_batch_size=2, flush_timeout=5.0)
    acks = [await rig.call(made.add_with_ack, item) for item in "abcd"]
    await rig.until(lambda: len(sink.begun) == 1)
    rig.clock.advance(4.9)
    await rig.pause()
    assert made.stats().flushed_fail == 0
    rig.clock.advance(0.1)
    error = await rig.failure(acks[0])
    assert isinstance(error, FlushTimeout)
    assert (error.items, error.timeout_s) == (2, 5.0)
    stats = made.stats()
    assert (stats.flushed_fail, stats.in_flight, stats.queue_depth, stats.late_ok) == (2, 2, 2, 0)
    rig.clock.advance(100)
    await rig.pause()
    assert sink.begun == [("a", "b")]
    sink.gate.set()
    assert await rig.result(acks[3]) is None
    stats = made.stats()
    assert (stats.flushed_ok, stats.flushed_fail, stats.late_ok) == (2, 2, 2)
    await rig.call(made.shutdown)


async def test_a_write_that_takes_too_long_is_cancelled_on_asyncio() -> None:
    clock, sink = FakeClock(), RecordingSink(is_open=False)
    config = BatcherConfig(sink=sink, max_batch_size=2, max_batch_delay=1.0, flush_timeout=5.0, clock=clock)
    made = batcher.Batcher(config)
    acks = [await made.add_with_ack(item) for item in "abcd"]
    await asyncio.sleep(0)
    clock.advance(5)
    sink.open()
    with pytest.raises(FlushTimeout):
        await acks[0]
    await acks[3]
    await made.shutdown()
    assert (made.stats().flushed_ok, made.stats().flushed_fail, made.stats().late_ok) == (2, 2, 0)


async def test_a_write_that_is_over_time_before_it_began_gives_its_slot_back() -> None:
    """Cancelled before its first step a task runs nothing of its own: the slot was gone, and shutdown never ended."""
    clock, sink = FakeClock(), RecordingSink()
    config = BatcherConfig(sink=sink, max_batch_size=2, max_batch_delay=1.0, flush_timeout=5.0, clock=clock)
    made = batcher.Batcher(config)
    acks = [await made.add_with_ack(item) for item in "ab"]
    clock.advance(5)
    with pytest.raises(FlushTimeout):
        await acks[0]
    await made.add("c")
    async with asyncio.timeout(PATIENCE_S):
        await made.shutdown()
    assert sink.batches == [("c",)]
    assert (made.stats().flushed_ok, made.stats().flushed_fail) == (1, 2)


async def test_a_write_that_is_over_time_is_still_timed_out_after_the_deadline_of_shutdown(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, flush_timeout=5.0)
    await rig.add_all(made, "abcd")
    await rig.until(lambda: len(sink.batches) == 1)
    await rig.expire(await rig.begin(made.shutdown, timeout=1.0), 1.0)
    rig.clock.advance(5)
    sink.open()
    await rig.call(made.shutdown)
    stats = made.stats()
    assert (stats.dropped_on_shutdown, stats.flushed_fail) == (4, 0)


def test_a_loop_that_ends_leaves_nobody_waiting_and_nothing_uncounted() -> None:
    """Without shutdown: asyncio.run() cancels what is left, written or not yet begun."""
    made: list[Any] = []

    async def main() -> Any:
        sink = RecordingSink(is_open=False)
        config = BatcherConfig(sink=sink, max_batch_size=1, max_batch_delay=LONG, max_concurrent_flushes=2)
        made.append(batcher.Batcher(config))
        acks = [await made[0].add_with_ack("a")]
        await asyncio.sleep(0)
        acks += [await made[0].add_with_ack("b"), await made[0].add_with_ack("c")]
        return acks

    acks = asyncio.run(main())
    assert all(ack.done() for ack in acks)
    assert isinstance(acks[0].exception(), JetSparkError)
    assert isinstance(acks[1].exception(), JetSparkError)
    assert isinstance(acks[2].exception(), BatcherBroken)
    assert (made[0].stats().flushed_fail, made[0].stats().in_flight) == (2, 1)


# ---- section 10: metrics ---------------------------------------------------------------------------------------------

M1 = {
    "batcher_enqueued_total": ("counter", {"name"}),
    "batcher_flushed_ok_total": ("counter", {"name"}),
    "batcher_flushed_fail_total": ("counter", {"name"}),
    "batcher_dropped_on_shutdown_total": ("counter", {"name"}),
    "batcher_batch_size_items": ("histogram", {"name"}),
    "batcher_flush_duration_seconds": ("histogram", {"name", "result"}),
    "batcher_flush_total": ("counter", {"name", "reason"}),
    "batcher_queue_depth": ("gauge", {"name"}),
}


def scrape(registry: Any) -> tuple[dict[str, tuple[str, set[str]]], dict[tuple[Any, ...], float]]:
    """Kinds and label sets by name, and every sample."""
    kinds: dict[str, tuple[str, set[str]]] = {}
    samples = {}
    for family in text_string_to_metric_families(prometheus_client.generate_latest(registry).decode()):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue  # the library's own
            name = sample.name if family.type == "counter" else family.name
            kinds[name] = (family.type, set(sample.labels) - {"le"})
            samples[(sample.name, *sorted(sample.labels.items()))] = sample.value
    return kinds, samples


async def test_M1_names_and_labels_of_several_batchers_in_one_registry(rig: Rig) -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    orders, sink = rig.make(
        rig.sink(fails=lambda number: number == 1), max_batch_size=2, name="orders", metrics=metrics
    )
    clicks, _ = rig.make(max_batch_size=2, name="clicks", metrics=metrics)
    await rig.add_all(orders, "abcdx")
    await rig.until(lambda: len(sink.batches) == 2)
    await rig.until(lambda: orders.stats().in_flight == 1)
    await rig.call(clicks.add, "e")
    await rig.call(clicks.shutdown)
    with pytest.raises(ConfigError, match="name='orders': another batcher of that name"):
        rig.make(name="orders", metrics=metrics)

    def value(metric: str, **labels: str) -> float:
        return scrape(registry)[1][(metric, *sorted(labels.items()))]

    await rig.until(lambda: ("batcher_batch_size_items_count", ("name", "clicks")) in scrape(registry)[1])
    await rig.until(lambda: value("batcher_batch_size_items_count", name="orders") == 2)
    assert scrape(registry)[0] == M1
    assert value("batcher_enqueued_total", name="orders") == 5
    assert value("batcher_flushed_ok_total", name="orders") == 2
    assert value("batcher_flushed_fail_total", name="orders") == 2
    assert value("batcher_dropped_on_shutdown_total", name="orders") == 0
    assert value("batcher_queue_depth", name="orders") == 1
    assert value("batcher_flush_total", name="orders", reason="size") == 2
    assert value("batcher_flush_total", name="clicks", reason="shutdown") == 1
    assert value("batcher_batch_size_items_sum", name="orders") == 4
    assert value("batcher_flush_duration_seconds_count", name="orders", result="ok") == 1
    assert value("batcher_flush_duration_seconds_count", name="orders", result="fail") == 1
    assert value("batcher_enqueued_total", name="clicks") == 1


async def test_M1_dropped_and_timed_out_items_are_in_the_metrics(rig: Rig) -> None:
    registry = prometheus_client.CollectorRegistry()
    made, sink = rig.make(is_open=False, metrics=PrometheusMetrics(registry), max_batch_size=2, flush_timeout=5.0)
    await rig.add_all(made, range(5))
    await rig.until(lambda: len(sink.batches) == 1)
    rig.clock.advance(5)
    await rig.until(lambda: made.stats().flushed_fail == 2)
    name = ("name", "batcher")
    await rig.until(lambda: ("batcher_flush_duration_seconds_count", name, ("result", "fail")) in scrape(registry)[1])
    await rig.expire(await rig.begin(made.shutdown, timeout=0.5), 0.5)
    samples = scrape(registry)[1]
    assert samples[("batcher_flushed_fail_total", name)] == 2
    assert samples[("batcher_dropped_on_shutdown_total", name)] == 3


@pytest.mark.parametrize("error", [RuntimeError, IndexError, StopIteration])
async def test_M1_metrics_that_fail_harm_nobody(
    rig: Rig, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def watch(self, name: str, stats: Callable[[], Stats]) -> None:
            pass

        def flushed(self, name: str, **facts: Any) -> None:
            raise error

    made, sink = rig.make(max_batch_size=1, metrics=Broken())
    acks = [await rig.call(made.add_with_ack, item) for item in "abc"]
    for ack in acks:
        assert await rig.result(ack) is None
    await rig.call(made.shutdown)
    assert sink.items == list("abc")
    await rig.until(lambda: caplog.text.count("its metrics failed") == 3)


async def test_M1_metrics_may_use_the_batcher(rig: Rig) -> None:
    seen = []

    class Curious:
        def watch(self, name: str, stats: Callable[[], Stats]) -> None:
            self.stats = stats

        def flushed(self, name: str, *, items: int, seconds: float, result: str) -> None:
            seen.append((items, seconds, result, self.stats().flushed_ok))

    made, _sink = rig.make(is_open=False, max_batch_size=2, metrics=Curious())
    await rig.add_all(made, "ab")
    await rig.until(lambda: len(_sink.batches) == 1)
    rig.clock.advance(3)
    _sink.open()
    await rig.until(lambda: bool(seen))
    assert seen == [(2, 3.0, "ok", 2)]


async def test_M2_holds_in_every_scrape(rig: Rig) -> None:
    """Also when Prometheus asks from a thread of its own, in the middle of everything."""
    registry = prometheus_client.CollectorRegistry()
    made, sink = rig.make(
        rig.sink(fails=lambda number: number % 3 == 2),
        max_batch_size=3,
        queue_depth=4,
        metrics=PrometheusMetrics(registry),
    )
    wrong, is_over = [], threading.Event()

    def watch() -> None:
        name = ("name", "batcher")
        while not is_over.is_set():
            samples = scrape(registry)[1]
            enqueued = samples[("batcher_enqueued_total", name)]
            settled = sum(
                samples[(f"batcher_{part}_total", name)]
                for part in ("flushed_ok", "flushed_fail", "dropped_on_shutdown")
            )
            if not 0 <= enqueued - settled <= 3 + 4 + 3:
                wrong.append((enqueued, settled))

    watching = asyncio.create_task(asyncio.to_thread(watch))
    await asyncio.gather(*(rig.call(rig_add_all(rig, made), range(150)) for _ in range(4)))
    await rig.call(made.shutdown)
    is_over.set()
    await watching
    assert wrong == []
    samples = scrape(registry)[1]
    name = ("name", "batcher")
    assert samples[("batcher_flushed_ok_total", name)] + samples[("batcher_flushed_fail_total", name)] == 600
    assert len(sink.items) == 600


async def test_M2_holds_at_any_moment_while_everything_happens_at_once(rig: Rig, lawless: list[str]) -> None:
    """Every step is audited by the fixture; here another thread looks on, too, and sees no counter go back."""
    made, sink = rig.make(
        rig.sink(fails=lambda number: number % 5 == 4), max_batch_size=4, queue_depth=6, max_batch_delay=1.0
    )
    wrong, is_over = [], threading.Event()

    def watch() -> None:
        before = made.stats()
        while not is_over.is_set():
            stats = made.stats()
            parts = (stats.flushed_ok, stats.flushed_fail, stats.dropped_on_shutdown)
            former = (before.flushed_ok, before.flushed_fail, before.dropped_on_shutdown)
            if stats.enqueued != sum(parts) + stats.in_flight or stats.in_flight < 0:
                wrong.append(stats)
            if stats.enqueued < before.enqueued or any(a < b for a, b in zip(parts, former, strict=True)):
                wrong.append((before, stats))
            before = stats

    watching = asyncio.create_task(asyncio.to_thread(watch))
    accepted: Counter[Any] = Counter()

    async def produce(who: int) -> None:
        for number in range(60):
            item = (who, number)
            match number % 6:
                case 0:
                    await rig.call(made.add_batch, [item, item])
                    accepted[item] += 2
                case 1:
                    accepted[item] += made.try_add(item)
                case 2:
                    await rig.call(made.add_with_ack, item)
                    accepted[item] += 1
                case 3 if not rig.is_threaded:
                    task = asyncio.create_task(made.add(item))
                    for _ in range(who):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                    accepted[item] += not task.cancelled()
                case 4:
                    rig.clock.advance(0.3)
                    await rig.call(made.flush)
                case _:
                    await rig.call(made.add, item)
                    accepted[item] += 1

    async with asyncio.timeout(PATIENCE_S * 2):
        await asyncio.gather(*map(produce, range(6)))
        await rig.call(made.shutdown)
    is_over.set()
    await watching
    assert wrong == []
    assert Counter(sink.items) == +accepted
    assert made.stats().enqueued == accepted.total()
    assert lawless == []


# ---- sections 11 and 12: configuration and errors --------------------------------------------------------------------


def _configured(**settings: Any) -> BatcherConfig[Any]:
    usual: dict[str, Any] = {"sink": _Nothing(), "max_batch_size": 1, "max_batch_delay": 1.0}
    return BatcherConfig(**(usual | settings))


class _Nothing:
    def write(self, batch: Any) -> None:
        pass


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_C1_max_batch_size_is_positive(size: Any) -> None:
    with pytest.raises(ConfigError, match=rf"max_batch_size={size!r}: expected (a whole number, )?1 or more"):
        _configured(max_batch_size=size)


@pytest.mark.parametrize("delay", [0, -0.1, float("nan"), float("inf"), "1", None])
def test_C2_max_batch_delay_is_positive(delay: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_batch_delay=.*expected seconds above 0"):
        _configured(max_batch_delay=delay)


@pytest.mark.parametrize("depth", [0, -1])
def test_C3_queue_depth_is_1024_by_default(depth: int) -> None:
    assert _configured().queue_depth == _configured(queue_depth=depth).queue_depth == 1024
    assert _configured(queue_depth=1).queue_depth == 1


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_C4_flush_timeout_is_5_seconds_by_default(timeout: float) -> None:
    assert _configured().flush_timeout == _configured(flush_timeout=timeout).flush_timeout == 5.0
    assert _configured(flush_timeout=0.5).flush_timeout == 0.5


@pytest.mark.parametrize("sink", [None, object(), print])
def test_C5_a_sink_is_required(sink: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected an object with a method write\(batch\)"):
        _configured(sink=sink)


async def test_E1_add_after_shutdown_has_begun_raises_closed(rig: Rig) -> None:
    made, sink = rig.make(is_open=False)
    await rig.call(made.add, "a")
    ending = await rig.begin(made.shutdown)
    with pytest.raises(Closed, match="batcher 'batcher' is shut down: the item was not accepted"):
        await rig.call(made.add, "b")
    sink.open()
    await ending


async def test_E2_add_raises_a_timeout_or_the_cancellation_when_it_comes_before_the_place(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    await rig.add_all(made, "ab")
    waiting = await rig.begin_waiting(made, made.add, "c", timeout=1.0)
    assert isinstance(await rig.expire(waiting, 1.0), TimeoutError)
    if not rig.is_threaded:
        waiting = await rig.begin_waiting(made, made.add, "d")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    sink.open()
    await rig.call(made.shutdown)
    assert sink.items == ["a", "b"]


async def test_E2_cancelled_in_the_step_in_which_its_place_was_granted_nothing_is_enqueued() -> None:
    """The worst moment: the place goes to the next one that waits, and is not lost."""
    rig = Rig("asyncio", None)  # type: ignore[arg-type]
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    await rig.add_all(made, "ab")
    first = await rig.begin_waiting(made, made.add, "first")
    second = await rig.begin_waiting(made, made.add, "second")
    sink.open()
    while not made._machine._reserved:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not first.done()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    await made.shutdown()
    assert sink.items == ["a", "b", "second"]
    assert made.stats().enqueued == 3


async def test_E2_cancelled_with_a_place_for_many_the_place_goes_to_all_who_fit_into_it() -> None:
    rig = Rig("asyncio", None)  # type: ignore[arg-type]
    made, sink = rig.make(is_open=False, max_batch_size=3, queue_depth=3)
    await rig.add_all(made, range(6))
    many = await rig.begin_waiting(made, made.add_batch, ["x", "y", "z"])
    others = [await rig.begin_waiting(made, made.add, item) for item in (6, 7, 8)]
    sink.open()
    while not made._machine._reserved:  # noqa: ASYNC110
        await asyncio.sleep(0)
    many.cancel()
    await asyncio.gather(*others)
    await made.shutdown()
    assert many.cancelled()
    assert sink.items == list(range(9))


async def test_E2_a_place_that_comes_in_the_step_in_which_time_is_over_is_not_lost() -> None:
    rig = Rig("asyncio", None)  # type: ignore[arg-type]
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    await rig.add_all(made, "ab")
    first = await rig.begin_waiting(made, made.add, "first", timeout=1.0)
    second = await rig.begin_waiting(made, made.add, "second")
    rig.clock.advance(1)  # its time is over, and it does not know yet
    made._machine._serve_tickets()
    sink.open()
    with pytest.raises(BatcherTimeout):
        await first
    await second
    await made.shutdown()
    assert sink.items == ["a", "b", "second"]


def test_E3_an_invalid_configuration_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as caught:
        _configured(max_batch_size=0)
    assert isinstance(caught.value, ValueError)
    for settings in ({"max_batch_bytes": 0}, {"max_concurrent_flushes": 0}, {"size_of": 1}, {"flush_timeout": "1"}):
        with pytest.raises(ConfigError):
            _configured(**settings)
    with pytest.raises(ConfigError, match="clock="):
        blocking.Batcher(_configured(clock=object()))


# ---- appendix D: flush -----------------------------------------------------------------------------------------------


async def test_DF1_flush_waits_for_what_is_in_flight_and_what_is_waiting(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2)
    await rig.add_all(made, range(5))
    flushing = await rig.begin(made.flush)
    await rig.call(made.add, "later")
    assert not flushing.done()
    sink.open()
    assert await flushing == Flushed(5, 0)
    assert sink.items[:5] == list(range(5))


async def test_DF1_flush_says_what_failed_and_raises_when_its_time_is_over(rig: Rig) -> None:
    made, sink = rig.make(rig.sink(is_open=False, fails=lambda number: number == 0), max_batch_size=2)
    await rig.add_all(made, range(3))
    error = await rig.expire(await rig.begin(made.flush, timeout=1.0), 1.0)
    assert isinstance(error, BatcherTimeout)
    assert list(made._machine._fences) == []
    sink.open()
    assert await rig.call(made.flush) in (Flushed(1, 2), Flushed(1, 0), Flushed(0, 0))
    assert (made.stats().flushed_ok, made.stats().flushed_fail) == (1, 2)


async def test_DF1_flush_does_not_wait_for_a_write_that_was_given_up(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, flush_timeout=5.0)
    await rig.add_all(made, "abc")
    await rig.until(lambda: len(sink.batches) == 1)
    flushing = await rig.begin(made.flush)
    rig.clock.advance(5)
    assert await flushing == Flushed(0, 3)


async def test_DF2_flush_does_not_stop_the_batcher(rig: Rig) -> None:
    made, sink = rig.make()
    await rig.call(made.add, "a")
    await rig.call(made.flush)
    await rig.call(made.add, "b")
    await rig.call(made.flush)
    assert await rig.call(made.flush) == Flushed(0, 0)
    assert sink.batches == [("a",), ("b",)]


async def test_DF3_each_of_several_flushes_returns_when_its_own_items_are_done(rig: Rig) -> None:
    made, sink = rig.make(_OneByOne(rig), max_batch_size=1)
    await rig.call(made.add, "a")
    first = await rig.begin(made.flush)
    await rig.call(made.add, "b")
    second = await rig.begin(made.flush)
    sink.let("a")
    assert await first == Flushed(1, 0)
    await rig.until(lambda: sink.begun == ["a", "b"])
    assert not second.done()
    sink.let("b")
    assert await second in (Flushed(2, 0), Flushed(1, 0))


# ---- appendix D: try_add ---------------------------------------------------------------------------------------------


async def test_TA1_try_add_never_waits(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    assert [made.try_add(item) for item in range(4)] == [True, True, False, False]
    sink.open()
    await rig.call(made.shutdown)
    assert sink.items == [0, 1]


async def test_TA2_try_add_is_false_when_full_when_others_wait_and_when_closed(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=2)
    await rig.add_all(made, "ab")
    waiting = await rig.begin_waiting(made, made.add_batch, ["c", "d"])
    assert made.try_add("x") is False  # one place is free, and somebody was here before
    sink.open()
    await waiting
    await rig.settled(made)
    assert made.try_add("e") is True
    await rig.call(made.shutdown)
    assert made.try_add("x") is False
    assert sink.items == list("abcde")


async def test_TA3_what_try_add_drops_is_counted(rig: Rig) -> None:
    made, _sink = rig.make(is_open=False, max_batch_size=1, queue_depth=1)
    for item in range(5):
        made.try_add(item)
    stats = made.stats()
    assert (stats.rejected, stats.enqueued, stats.in_flight) == (3, 2, 2)


# ---- appendix D: add_batch -------------------------------------------------------------------------------------------


async def test_AB1_with_enough_room_all_are_enqueued_at_once(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, queue_depth=4)
    await rig.call(made.add_batch, [0, 1, 2])
    await rig.call(made.add_batch, [3, 4], timeout=0)
    assert made.stats().enqueued == 5
    sink.open()
    await rig.call(made.shutdown)
    assert sink.batches == [(0, 1), (2, 3), (4,)]


async def test_AB1_more_than_the_queue_can_ever_hold_is_refused_at_once(rig: Rig) -> None:
    made, _sink = rig.make(max_batch_size=2, queue_depth=4)
    with pytest.raises(ConfigError, match="5 items at once: expected at most queue_depth=4"):
        await rig.call(made.add_batch, range(5))
    await rig.call(made.add_batch, range(4))
    assert made.stats().enqueued == 4


async def test_AB2_without_enough_room_it_waits_for_all_of_it_and_nothing_comes_between(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, queue_depth=4)
    await rig.add_all(made, range(5))
    adding = await rig.begin_waiting(made, made.add_batch, ["a", "b", "c"])
    single = await rig.begin_waiting(made, made.add, 5)
    assert made.stats().enqueued == 5
    sink.open()
    await asyncio.gather(adding, single)
    await rig.call(made.shutdown)
    first = sink.items.index("a")
    assert sink.items[first : first + 3] == ["a", "b", "c"]
    assert sorted(map(str, sink.items)) == [*"012345abc"]


async def test_AB2_a_large_one_is_not_starved_by_single_adds(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, queue_depth=8)
    await rig.add_all(made, range(9))
    large = await rig.begin_waiting(made, made.add_batch, ["large"] * 8)
    singles = [await rig.begin_waiting(made, made.add, f"single {number}") for number in range(12)]
    sink.open()
    await asyncio.gather(large, *singles)
    await rig.call(made.shutdown)
    assert sink.items[9:17] == ["large"] * 8
    assert sorted(sink.items[17:]) == sorted(f"single {number}" for number in range(12))


async def test_AB3_when_its_time_is_over_none_is_enqueued(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, queue_depth=4)
    await rig.add_all(made, range(5))
    late = await rig.begin_waiting(made, made.add_batch, ["a", "b"] * 2, timeout=1.0)
    single = await rig.begin_waiting(made, made.add, 5)
    assert isinstance(await rig.expire(late, 1.0), BatcherTimeout)
    await single  # the place was only kept from it
    assert made.stats().enqueued == 6
    sink.open()
    await rig.call(made.shutdown)
    assert sink.items == list(range(6))


async def test_AB3_atomic_against_shutdown(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=2, queue_depth=4)
    await rig.add_all(made, range(5))
    waiting = await rig.begin_waiting(made, made.add_batch, ["a", "b"] * 2)
    ending = await rig.begin(made.shutdown)
    with pytest.raises(Closed):
        await waiting
    sink.open()
    await ending
    assert sink.items == list(range(5))


# ---- appendix D: add_with_ack ----------------------------------------------------------------------------------------


async def test_AA1_nobody_has_to_take_an_ack(rig: Rig) -> None:
    """Dropped, cancelled or never looked at, failed or not: the batcher does not wait for it, and nothing warns."""
    made, sink = rig.make(rig.sink(fails=lambda number: number == 0), max_batch_size=2)
    acks = [await rig.call(made.add_with_ack, item) for item in range(4)]
    acks[2].cancel()
    del acks
    await rig.call(made.shutdown)
    assert sink.items == [0, 1, 2, 3]


async def test_AA1_what_others_do_with_their_acks_is_not_done_by_those_who_add() -> None:
    """A producer that adds under a lock of its own must not run a callback that wants the same lock."""
    made = blocking.Batcher(BatcherConfig(sink=BlockingRecordingSink(), max_batch_size=1, max_batch_delay=LONG))
    tellers: list[str] = []
    adding: list[Callable[[], object]] = [
        lambda: made.add(1),
        lambda: made.try_add(2),
        lambda: made.add_batch([3]),
        lambda: made.add_with_ack(4),
    ]
    for add in adding:
        made._callbacks.append(lambda: tellers.append(threading.current_thread().name))
        add()
    await asyncio.to_thread(made.flush)
    await Rig("threads", None).until(lambda: len(tellers) == 4)  # type: ignore[arg-type]
    assert all(name.startswith("batcher batcher") for name in tellers)
    await asyncio.to_thread(made.shutdown)


async def test_AA2_an_ack_is_none_or_the_failure_of_its_batch(rig: Rig) -> None:
    made, _sink = rig.make(rig.sink(fails=lambda number: number == 0), max_batch_size=1)
    bad, good = [await rig.call(made.add_with_ack, item) for item in "ab"]
    assert isinstance(await rig.failure(bad), SinkFailure)
    assert await rig.result(good) is None


async def test_AA3_an_ack_ends_once_and_for_all(rig: Rig) -> None:
    made, sink = rig.make(is_open=False, max_batch_size=1, flush_timeout=5.0)
    ack = await rig.call(made.add_with_ack, "a")
    assert not ack.done()
    await rig.until(lambda: len(sink.batches) == 1)
    rig.clock.advance(5)
    assert isinstance(await rig.failure(ack), FlushTimeout)
    sink.open()
    await rig.call(made.shutdown)
    assert isinstance(ack.exception(), FlushTimeout)


async def test_AA4_an_ack_of_an_item_that_is_dropped_is_an_error(rig: Rig) -> None:
    made, _sink = rig.make(is_open=False, max_batch_size=1)
    written, waiting = [await rig.call(made.add_with_ack, item) for item in "ab"]
    await rig.expire(await rig.begin(made.shutdown, timeout=1.0), 1.0)
    first, second = await rig.failure(written), await rig.failure(waiting)
    assert isinstance(first, DroppedOnShutdown)
    assert isinstance(second, DroppedOnShutdown)
    assert "writ" in str(first)
    assert "waiting" in str(second)


async def test_AA4_what_is_done_with_an_ack_cannot_end_the_batcher() -> None:
    def leave(ack: Any) -> None:
        raise SystemExit

    sink = BlockingRecordingSink(is_open=False)
    made = blocking.Batcher(BatcherConfig(sink=sink, max_batch_size=1, max_batch_delay=LONG))
    for item in range(3):
        made.add_with_ack(item).add_done_callback(leave)
    sink.open()
    await asyncio.to_thread(made.shutdown, timeout=PATIENCE_S)
    assert made.stats().flushed_ok == 3


async def test_AA4_an_ack_may_call_the_batcher(rig: Rig) -> None:
    made, sink = rig.make(max_batch_size=1)
    seen = []
    ack = await rig.call(made.add_with_ack, "a")
    ack.add_done_callback(lambda _: seen.append((made.stats().flushed_ok, made.try_add("b"))))
    await rig.until(lambda: len(sink.batches) == 2)
    assert seen == [(1, True)]


# ---- the page --------------------------------------------------------------------------------------------------------

CLAUSES = [
    *("size", "bytes", "time", "shutdown", "manual", "reason"),
    *(
        f"{letters}{number}"
        for letters, last in [
            *(("I", 8), ("O", 4), ("D", 5), ("B", 4), ("S", 7), ("F", 3), ("M", 2), ("C", 5), ("E", 3)),
            *(("DF", 3), ("TA", 3), ("AB", 3), ("AA", 4)),
        ]
        for number in range(1, last + 1)
    ),
]
VECTORS = [f"T{number}" for number in range(1, 11)]
VIOLATIONS = [f"V{number}" for number in range(1, 9)]


def test_the_page_of_rules_has_every_clause_with_tests_that_exist() -> None:
    page = (REPOSITORY / "docs" / "evidence" / "batcher-rules.md").read_text(encoding="utf-8")
    rows = {row.split("|")[1].strip(): row for row in page.splitlines() if row.startswith("| ")}
    tests = set(re.findall(r"def (test_\w+)\(", Path(__file__).read_text(encoding="utf-8")))
    suite = set(Conformance.checks()) | {"test_E2_an_add_that_is_cancelled_while_it_waits_is_not_enqueued"}
    others = set(
        re.findall(r"def (test_\w+)\(", "".join(map(Path.read_text, Path(__file__).parent.glob("test_b*.py"))))
    )
    for clause in [*CLAUSES, *VECTORS, *VIOLATIONS]:
        assert clause in rows, f"{clause} is not on the page"
        assert re.search(r"`test_\w+`", rows[clause]), f"{clause}: no test is named"
    for clause in CLAUSES:
        of_clause = {name for name in tests if name.startswith(f"test_{clause}_")}
        assert of_clause, f"{clause} has no test of its own"
        missing = [name for name in of_clause if f"`{name}`" not in rows[clause]]
        assert not missing, f"{clause}: {missing} are not in its row"
    for vector in VECTORS:
        assert [name for name in suite if name.startswith(f"test_{vector}_")]
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named <= tests | suite | others, f"no such tests: {named - tests - suite - others}"
