"""The conformance suite of the batching specification, for any batcher.

It covers Appendix G of the specification with its vectors T1 to T10, the worked violations V1 to V8, and the accounting
law of M2, sampled while items are on their way. It does not depend on JetSpark's batcher. In a test
file of your own::

    from jetspark.testing.batcher_conformance import BatcherConformance

    class TestMyBatcher(BatcherConformance):
        closed = MyClosedError

        def make(self, sink, **limits):
            return MyBatcher(sink, **limits)

pytest then finds one test for each check; :class:`BlockingBatcherConformance` is the same for a batcher on threads.
``make`` is called with the keywords ``max_batch_size``, ``max_batch_delay``, ``queue_depth`` and ``flush_timeout``, on
asyncio inside the running loop. The sink has a method ``write(batch)``, a coroutine function on asyncio.

A batcher of another shape is adapted by overriding :meth:`~Conformance.add`, :meth:`~Conformance.shutdown`,
:meth:`~Conformance.stats` and :meth:`~Conformance.flushes`. By default they call ``batcher.add(item, timeout=...)`` and
``batcher.shutdown(timeout=...)``, and read ``enqueued``, ``flushed_ok``, ``flushed_fail``, ``dropped_on_shutdown``,
``in_flight`` and ``flushes``, a mapping from reasons to counts, from ``batcher.stats()``.

Time is real unless ``has_fake_clock = True``; then ``self.clock`` is a :class:`~jetspark.testing.FakeClock` which
``make`` has to give to the batcher. On real time a check never depends on durations, only on events within ``patience``
seconds.

Outside of pytest a check is a method to call, by itself or ``for check in TestMyBatcher.checks()``, each on an instance
of its own. A failed check raises AssertionError.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, ClassVar

from jetspark.testing.clock import FakeClock

__all__ = ["BatcherConformance", "BlockingBatcherConformance", "BlockingRecordingSink", "RecordingSink"]

# A time that never comes, and less than the longest wait of a loop or a lock.
NEVER = 100_000.0
PRODUCERS, EACH = 8, 60


class SinkFailure(Exception):
    """The error of this suite's failing sinks."""


class _Recorder:
    """Records the batches of a sink. While closed it holds all writes; ``open`` ends that permanently."""

    def __init__(self, *, is_open: bool = True, fails: Callable[[int], bool] = lambda number: False) -> None:
        self.batches: list[tuple[Any, ...]] = []
        """The content of each batch when its write began."""
        self.given: list[Any] = []
        """The batch objects themselves."""
        self.begun_at: list[float] = []
        """The start of each write, on the machine's own clock."""
        self.ended_ok = self.ended_fail = 0
        """Number of items in writes that have returned, and that have raised."""
        self.running = self.max_running = 0
        self.before_end: Callable[[Any], None] = lambda batch: None
        """Called with each batch when its write is about to end."""
        self._fails = fails
        self._lock = threading.Lock()
        self._is_open = is_open

    @property
    def items(self) -> list[Any]:
        return [item for batch in self.batches for item in batch]

    def _begin(self, batch: Any) -> int:
        with self._lock:
            self.batches.append(tuple(batch))
            self.given.append(batch)
            self.begun_at.append(time.monotonic())
            self.running += 1
            self.max_running = max(self.max_running, self.running)
            return len(self.batches) - 1

    def _end(self, number: int, batch: Any) -> None:
        self.before_end(batch)
        with self._lock:
            self.running -= 1
            if self._fails(number):
                self.ended_fail += len(self.batches[number])
                raise SinkFailure(f"batch {number}")
            self.ended_ok += len(self.batches[number])


class RecordingSink(_Recorder):
    """A sink on asyncio that records its batches, can hold writes back, and fails on request."""

    def __init__(self, *, is_open: bool = True, fails: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__(is_open=is_open, fails=fails)
        self._gate = asyncio.Event()
        if is_open:
            self._gate.set()

    def open(self) -> None:
        self._gate.set()

    async def write(self, batch: Any, /) -> None:
        number = self._begin(batch)
        await self._gate.wait()
        self._end(number, batch)


class BlockingRecordingSink(_Recorder):
    """The same on threads."""

    def __init__(self, *, is_open: bool = True, fails: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__(is_open=is_open, fails=fails)
        self._gate = threading.Event()
        if is_open:
            self._gate.set()

    def open(self) -> None:
        self._gate.set()

    def write(self, batch: Any, /) -> None:
        number = self._begin(batch)
        self._gate.wait()
        self._end(number, batch)


class _Asyncio:
    """Calls a batcher on asyncio."""

    sink: Any = RecordingSink
    is_threaded = False

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await function(*args)

    async def produce(self, trial: Trial, items: Iterable[Any]) -> None:
        for item in items:
            await trial.add(item)
            trial.check_law()
            if item[1] % 7 == 0:
                await asyncio.sleep(0)


class _Threads:
    """Calls a batcher on threads: each call in a thread of its own, which may hang without being waited for."""

    sink: Any = BlockingRecordingSink
    is_threaded = True

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def end(result: Any, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, failure = None, None
            try:
                result = function(*args)
            except BaseException as error:
                failure = error
            try:
                loop.call_soon_threadsafe(end, result, failure)
            except RuntimeError:
                pass  # the check is over, and its loop is closed

        threading.Thread(target=run, daemon=True).start()
        return await done

    async def produce(self, trial: Trial, items: Iterable[Any]) -> None:
        def run() -> None:
            for item in items:
                trial.count_begun()
                trial.suite.add(trial.batcher, item, None)
                trial.count_accepted()

        await self.call(run)


class Trial:
    """A batcher with its sink, and the suite's own count of the items."""

    def __init__(self, suite: Conformance, world: Any, batcher: Any, sink: Any) -> None:
        self.suite, self.batcher, self.sink = suite, batcher, sink
        self._world = world
        self._begun = self._accepted = 0
        self._lock = threading.Lock()

    def count_begun(self) -> None:
        with self._lock:
            self._begun += 1

    def count_accepted(self) -> None:
        with self._lock:
            self._accepted += 1

    async def add(self, item: Any, timeout: float | None = None) -> None:
        self.count_begun()
        await self._world.call(self.suite.add, self.batcher, item, timeout)
        self.count_accepted()

    async def add_all(self, items: Iterable[Any]) -> None:
        for item in items:
            await self.add(item)

    async def produce(self, items: Iterable[Any]) -> None:
        """As one producer among several."""
        await self._world.produce(self, items)

    async def shutdown(self, timeout: float | None = None) -> None:
        await self._world.call(self.suite.shutdown, self.batcher, timeout)

    @property
    def stats(self) -> Any:
        return self.suite.stats(self.batcher)

    @property
    def reasons(self) -> dict[str, int]:
        return {reason: count for reason, count in self.suite.flushes(self.batcher).items() if count}

    def check_law(self) -> None:
        """Check M2 within the statistics, and against the suite's count: between the accepted and the begun items."""
        at_least = self._accepted
        stats = self.stats
        at_most, written, failed = self._begun, self.sink.ended_ok, self.sink.ended_fail
        parts = (stats.flushed_ok, stats.flushed_fail, stats.dropped_on_shutdown, stats.in_flight)
        assert stats.enqueued == sum(parts), f"M2: {stats.enqueued} enqueued, and accounted for are {parts}"
        assert min(parts) >= 0, f"M2: less than none in {parts}"
        assert at_least <= stats.enqueued <= at_most, (
            f"M2: {stats.enqueued} enqueued, when at least {at_least} and at most {at_most} were"
        )
        assert stats.flushed_ok <= written, f"M2: {stats.flushed_ok} flushed, when the sink had done {written}"
        assert stats.flushed_fail <= failed, f"M2: {stats.flushed_fail} failed, when the sink had failed {failed}"

    def check_final_counts(self, *, ok: int, fail: int = 0) -> None:
        """Check that nothing is on its way any more, and the final counts."""
        self.check_law()
        stats = self.stats
        found = (stats.enqueued, stats.flushed_ok, stats.flushed_fail, stats.dropped_on_shutdown, stats.in_flight)
        assert found == (ok + fail, ok, fail, 0, 0), f"enqueued, ok, fail, dropped, in flight: {found}"

    async def until_idle(self) -> None:
        await self.suite.until(lambda: self.stats.in_flight == 0, "everything to be settled")

    async def until_batches(self, count: int) -> None:
        await self.suite.until(lambda: len(self.sink.batches) >= count, f"{count} batches at the sink")


def _check(body: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """Make a plain method of a check, which is a coroutine function."""

    @functools.wraps(body)
    def run(self: Any) -> None:
        self.run(body(self))

    return run


class Conformance:
    """The parts of both suites: the adapter, to be overridden for other batchers, and the checks."""

    closed: type[BaseException]
    """The error of ``add`` once shutdown has begun."""
    timed_out: type[BaseException] = TimeoutError
    """The error of ``add`` and ``shutdown`` when their timeout is over."""
    has_fake_clock = False
    clock: FakeClock | None = None
    """The clock of the present check, if it is a fake one."""
    delay: float = 0.02
    """The ``max_batch_delay``, in seconds, of checks that involve time."""
    patience: float = 20.0
    """Real seconds after which a missing event fails the check."""
    _world: ClassVar[Any]

    # ---- the adapter -----------------------------------------------------------------------------------------------

    def make(
        self, sink: Any, *, max_batch_size: int, max_batch_delay: float, queue_depth: int, flush_timeout: float
    ) -> Any:
        """A new batcher, with one flusher. Every suite has to override this."""
        raise TypeError(f"{type(self).__name__} has no make(): expected one that returns the batcher to be checked")

    def add(self, batcher: Any, item: Any, timeout: float | None) -> Any:
        return batcher.add(item, timeout=timeout)

    def shutdown(self, batcher: Any, timeout: float | None) -> Any:
        return batcher.shutdown(timeout=timeout)

    def stats(self, batcher: Any) -> Any:
        """An object with the counters as attributes, all of one moment."""
        return batcher.stats()

    def flushes(self, batcher: Any) -> Mapping[str, int]:
        """Flushes so far by reason: ``size``, ``time``, ``shutdown``."""
        flushes: Mapping[str, int] = self.stats(batcher).flushes
        return flushes

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    # ---- running ---------------------------------------------------------------------------------------------------

    @classmethod
    def checks(cls) -> list[str]:
        """The names of the checks, which are methods."""
        return [name for name in dir(cls) if name.startswith("test_")]

    def run(self, check: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
            runner.run(self._run(check))

    async def _run(self, check: Coroutine[Any, Any, None]) -> None:
        self.clock = FakeClock() if self.has_fake_clock else None
        self._trials: list[Trial] = []
        self._way = self._world()
        try:
            await self._within(check, "the check to end")
            for trial in self._trials:
                trial.check_law()
        finally:
            for trial in self._trials:
                trial.sink.open()
                try:
                    async with asyncio.timeout(1):
                        await trial.shutdown()
                except Exception:  # the check has ended; the result of this shutdown does not matter
                    pass

    def start(
        self,
        *,
        size: int = 4,
        delay: float = NEVER,
        depth: int = 64,
        is_open: bool = True,
        fails: Callable[[int], bool] = lambda number: False,
    ) -> Trial:
        """A batcher, and a sink that holds writes back unless it is open."""
        sink = self._way.sink(is_open=is_open, fails=fails)
        batcher = self.make(sink, max_batch_size=size, max_batch_delay=delay, queue_depth=depth, flush_timeout=NEVER)
        trial = Trial(self, self._way, batcher, sink)
        self._trials.append(trial)
        return trial

    async def _within(self, what: Awaitable[Any], expected: str) -> Any:
        timeout = asyncio.timeout(self.patience * 2)
        try:
            async with timeout:
                return await what
        except TimeoutError:
            assert not timeout.expired(), f"waited in vain for {expected}"
            raise

    async def until(self, condition: Callable[[], bool], expected: str) -> None:
        """Wait for a condition by polling. A fake clock does not move during the wait."""
        end = time.monotonic() + self.patience
        for _ in range(100):
            if condition():
                return
            await asyncio.sleep(0)
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {expected}"
            await asyncio.sleep(0.001)

    async def pause(self) -> None:
        """Run everything that is ready. Only to show that something does not happen: its length must not matter."""
        for _ in range(50):
            await asyncio.sleep(0)
        if self._way.is_threaded or self.clock is None:
            await asyncio.sleep(0.005)

    async def pass_time(self, seconds: float) -> None:
        if self.clock is None:
            await asyncio.sleep(seconds)
        else:
            self.clock.advance(seconds)

    async def expire(self, waiting: asyncio.Task[Any], seconds: float) -> BaseException | None:
        """Let the timeout of a call expire; returns the error of the call."""
        await self.pause()
        if self.clock is not None:
            end = time.monotonic() + self.patience
            while not waiting.done():
                # More than once, because a thread may look at the clock for the first time after it was moved.
                self.clock.advance(seconds)
                await self.pause()
                assert time.monotonic() < end, "waited in vain for a call to time out"
        await self._within(asyncio.wait([waiting]), "a call to time out")
        assert not waiting.cancelled()
        return waiting.exception()

    def begin(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.ensure_future(call)

    async def fill(self, trial: Trial, most: int) -> tuple[list[int], int]:
        """Add 0, 1, 2... until an item is refused for lack of room; returns the accepted items, and the refused one."""
        for item in range(most + 1):
            error = await self._add_in_time(trial, item)
            if error is not None:
                assert isinstance(error, self.timed_out), f"B3, E2: expected {self.timed_out}, and not {error!r}"
                return list(range(item)), item
        raise AssertionError(f"B1: {most + 1} items were accepted while the sink took none of them")

    async def _add_in_time(self, trial: Trial, item: Any) -> BaseException | None:
        adding = self.begin(trial.add(item, self.delay))
        await asyncio.wait([adding], timeout=0 if self.clock is None else 0.01)
        return await self.expire(adding, self.delay) if not adding.done() else adding.exception()

    # ---- the vectors of the specification ----------------------------------------------------------------------------

    @_check
    async def test_T1_size_trigger(self) -> None:
        trial = self.start(size=5)
        await trial.add_all(range(10))
        await trial.until_batches(2)
        assert trial.sink.batches == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]
        await trial.until_idle()
        assert trial.reasons == {"size": 2}
        trial.check_final_counts(ok=10)

    @_check
    async def test_T2_time_trigger(self) -> None:
        trial = self.start(size=5, delay=self.delay)
        await trial.add("lonely")
        await self.pass_time(2 * self.delay)
        await trial.until_batches(1)
        await trial.until_idle()
        await self.pause()
        assert trial.sink.batches == [("lonely",)]
        assert trial.reasons == {"time": 1}

    @_check
    async def test_T3_shutdown_drain(self) -> None:
        trial = self.start(size=5)
        await trial.add_all(range(4))
        await self.pause()
        assert trial.sink.batches == [], "neither size nor time had it flushed"
        await trial.shutdown()
        assert trial.sink.batches == [(0, 1, 2, 3)], "I6: what was accepted is not at the sink"
        assert trial.reasons == {"shutdown": 1}
        trial.check_final_counts(ok=4)

    @_check
    async def test_T4_shutdown_timeout(self) -> None:
        trial = self.start(size=2, is_open=False)
        await trial.add_all(range(3))
        error = await self.expire(self.begin(trial.shutdown(self.delay)), self.delay)
        assert isinstance(error, self.timed_out), f"S6: expected {self.timed_out}, and not {error!r}"
        stats = trial.stats
        assert 0 < stats.dropped_on_shutdown <= 3, f"I7, S7: {stats.dropped_on_shutdown} of 3 items count as dropped"
        trial.check_law()

    @_check
    async def test_T5_idempotent_shutdown(self) -> None:
        trial = self.start(size=2, is_open=False)
        await trial.add_all(range(3))
        first = self.begin(trial.shutdown())
        await self.pause()
        second = self.begin(trial.shutdown())
        await self.pause()
        assert not first.done(), "S4: shutdown returned before the sink did"
        assert not second.done(), "S2: a second shutdown did not wait for the first one's drain"
        trial.sink.open()
        await self._within(asyncio.gather(first, second), "both shutdowns to end")
        await self._within(trial.shutdown(), "a third shutdown to end")
        assert trial.sink.items == [0, 1, 2]
        trial.check_final_counts(ok=3)

    @_check
    async def test_T6_add_after_shutdown(self) -> None:
        trial = self.start(size=1)
        await trial.add("before")
        await trial.shutdown()
        await self._check_closed(trial, "after")
        await self.pause()
        assert trial.sink.items == ["before"]
        trial.check_final_counts(ok=1)

    @_check
    async def test_T7_no_loss(self) -> None:
        trial = await self._produce()
        counts = Counter(trial.sink.items)
        assert set(counts) == _all_items(), f"I2: {len(_all_items() - set(counts))} items never reached the sink"
        assert max(counts.values()) == 1, "D4: items reached the sink more than once"

    @_check
    async def test_T8_context_cancellation(self) -> None:
        trial = self.start(size=2, depth=4, is_open=False)
        accepted, refused = await self.fill(trial, most=200)
        trial.check_law()
        assert trial.stats.enqueued == len(accepted), "B3: a refused item counts as enqueued"
        trial.sink.open()
        await trial.shutdown()
        assert trial.sink.items == accepted, f"B3: of {accepted}, and {refused} that was refused"

    @_check
    async def test_T9_concurrent_add(self) -> None:
        trial = await self._produce()
        assert len(trial.sink.items) == PRODUCERS * EACH
        for producer in range(PRODUCERS):
            own = [number for who, number in trial.sink.items if who == producer]
            assert own == sorted(own), "O1, O2: the items of one producer are out of order"
        assert trial.sink.max_running == 1, "O2: more than one write at a time"

    @_check
    async def test_T10_stats_conservation(self) -> None:
        trial = await self._produce(fails=lambda number: number % 3 == 1)
        failed = sum(len(batch) for number, batch in enumerate(trial.sink.batches) if number % 3 == 1)
        assert failed
        trial.check_final_counts(ok=PRODUCERS * EACH - failed, fail=failed)

    # ---- beyond ----------------------------------------------------------------------------------------------------

    @_check
    async def test_time_runs_from_the_first_item(self) -> None:
        """Section 3: not from whenever a ticker happened to start."""
        trial = self.start(size=5, delay=self.delay)
        if self.clock is None:
            # Real time may always be late. It cannot be early, at whichever moment of a ticker's round an item comes.
            for number in range(5):
                await asyncio.sleep(0.3 * self.delay)
                added_at = time.monotonic()
                await trial.add(number)
                await trial.until_batches(number + 1)
                waited = trial.sink.begun_at[number] - added_at
                assert waited > 0.9 * self.delay, "flushed before the first item had waited for max_batch_delay"
            return
        await trial.add("a")
        self.clock.advance(self.delay)
        await trial.until_batches(1)
        await trial.until_idle()
        self.clock.advance(self.delay * 0.75)
        await self.pause()
        await trial.add("b")
        self.clock.advance(self.delay * 0.75)
        await self.pause()
        await trial.add("c")
        await self.pause()
        assert trial.sink.batches == [("a",)], "flushed before the first item had waited for max_batch_delay"
        self.clock.advance(self.delay * 0.25)
        await trial.until_batches(2)
        assert trial.sink.batches == [("a",), ("b", "c")]

    @_check
    async def test_time_is_watched_again_after_a_slow_write(self) -> None:
        trial = self.start(size=2, delay=self.delay, is_open=False)
        await trial.add_all("ab")
        await trial.until_batches(1)
        await self.pass_time(3 * self.delay)
        await self.pause()
        trial.sink.open()
        await trial.until_idle()
        await trial.add("c")
        await self.pass_time(self.delay)
        await self.until(lambda: trial.sink.items == ["a", "b", "c"], "the last item to be flushed for its age")

    @_check
    async def test_I3_I4_a_batch_is_never_changed_or_used_again(self) -> None:
        trial = self.start(size=3)
        await trial.add_all(range(10))
        await trial.until_batches(3)
        await trial.shutdown()
        assert [tuple(batch) for batch in trial.sink.given] == trial.sink.batches, "I3: a batch was changed afterwards"
        assert len({id(batch) for batch in trial.sink.given}) == len(trial.sink.given), "I4: a batch was used again"
        assert trial.sink.items == list(range(10))

    @_check
    async def test_I3_a_sink_may_do_what_it_likes_with_its_batch(self) -> None:
        trial = self.start(size=3)
        trial.sink.before_end = lambda batch: batch.clear() if hasattr(batch, "clear") else None
        await trial.add_all(range(8))
        await trial.shutdown()
        assert trial.sink.items == list(range(8))
        trial.check_final_counts(ok=8)

    @_check
    async def test_I6_shutdown_writes_everything_that_was_accepted(self) -> None:
        """Includes items that still wait behind a write in progress."""
        trial = self.start(size=3, depth=8, is_open=False)
        accepted, _ = await self.fill(trial, most=200)
        ending = self.begin(trial.shutdown())
        await self.pause()
        trial.sink.open()
        await self._within(ending, "shutdown to end")
        assert trial.sink.items == accepted, "I6: not everything accepted was written"
        assert max(map(len, trial.sink.batches)) <= 3, "a batch is larger than max_batch_size"
        trial.check_final_counts(ok=len(accepted))

    @_check
    async def test_V3_each_flush_has_one_reason(self) -> None:
        trial = self.start(size=3, delay=self.delay)
        await trial.add_all(range(6))
        await trial.until_batches(2)
        await trial.add(6)
        await self.pass_time(2 * self.delay)
        await trial.until_idle()
        await trial.add_all([7, 8])
        await trial.shutdown()
        assert trial.sink.items == list(range(9))
        counted = sum(trial.reasons.values())
        assert counted == len(trial.sink.batches), f"{len(trial.sink.batches)} flushes had {counted} reasons"
        assert set(trial.reasons) <= {"size", "time", "shutdown"}

    @_check
    async def test_I8_an_add_after_shutdown_raises_that_the_batcher_is_closed(self) -> None:
        trial = self.start(size=2, depth=1)
        await trial.shutdown()
        for item in range(5):  # more than there would be room for
            await self._check_closed(trial, item)
        trial.check_final_counts(ok=0)

    @_check
    async def test_B1_the_queue_is_bounded(self) -> None:
        size, depth = 2, 4
        trial = self.start(size=size, depth=depth, is_open=False)
        # Items at the sink, gathered ones, and one batch in between: the specification leaves their number open.
        accepted, _ = await self.fill(trial, most=depth + 3 * size)
        assert len(accepted) >= depth, "add waits although the queue is not full"

    @_check
    async def test_B2_an_add_that_waits_goes_on_when_there_is_room(self) -> None:
        trial = self.start(size=2, depth=4, is_open=False)
        accepted, _ = await self.fill(trial, most=200)
        waiting = self.begin(trial.add("late"))
        await self.pause()
        assert not waiting.done(), "B2: the queue is full, and add does not wait"
        trial.sink.open()
        await self._within(waiting, "an add that waited for room")
        await trial.shutdown()
        assert trial.sink.items == [*accepted, "late"]

    @_check
    async def test_B4_what_was_accepted_is_never_dropped(self) -> None:
        trial = self.start(size=2, depth=2, is_open=False)
        items = list(range(40))
        adding = self.begin(trial.add_all(items))
        await self.pause()
        trial.sink.open()
        await self._within(adding, "everything to be accepted")
        await trial.shutdown()
        assert trial.sink.items == items, f"B4: {len(items)} accepted, and {len(trial.sink.items)} written"
        trial.check_final_counts(ok=len(items))

    @_check
    async def test_S3_shutdown_refuses_an_add_that_waits(self) -> None:
        trial = self.start(size=2, depth=4, is_open=False)
        accepted, _ = await self.fill(trial, most=200)
        waiting = self.begin(trial.add("late"))
        await self.pause()
        ending = self.begin(trial.shutdown())
        await self._within(asyncio.wait([waiting]), "an add that waits to be refused")
        assert isinstance(waiting.exception(), self.closed), f"S3: {waiting.exception()!r}"
        trial.sink.open()
        await self._within(ending, "shutdown to end")
        assert trial.sink.items == accepted

    @_check
    async def test_S5_writing_goes_on_after_the_deadline(self) -> None:
        trial = self.start(size=2, is_open=False)
        await trial.add_all(range(3))
        await self.expire(self.begin(trial.shutdown(self.delay)), self.delay)
        trial.sink.open()
        await trial.until_batches(2)
        await self.until(lambda: trial.sink.running == 0, "the sink to be done")
        await self.pause()
        assert trial.sink.items == [0, 1, 2]
        trial.check_law()

    @_check
    async def test_F1_F3_a_sink_that_fails_is_counted_and_the_next_batch_goes_on(self) -> None:
        trial = self.start(size=2, fails=lambda number: number == 0)
        await trial.add_all(range(4))
        await trial.until_batches(2)
        await trial.shutdown()
        assert trial.sink.batches == [(0, 1), (2, 3)], "D3: the batcher does not retry, and does not stop"
        trial.check_final_counts(ok=2, fail=2)

    @_check
    async def test_V7_no_batch_is_empty(self) -> None:
        """A recommendation: override it with a test that skips if your empty batches are intended."""
        trial = self.start(size=2, delay=self.delay)
        for _ in range(3):
            await self.pass_time(self.delay)
            await self.pause()
        await trial.add_all("ab")
        await trial.until_idle()
        for _ in range(3):
            await self.pass_time(self.delay)
            await self.pause()
        await trial.shutdown()
        assert () not in trial.sink.batches, "V7: the sink was given a batch of nothing"

    @_check
    async def test_M2_everything_is_accounted_for_at_any_moment(self) -> None:
        """Sampled by the producers, by the sink, and on threads also by a separate thread."""
        trial = self.start(size=5, depth=7, fails=lambda number: number % 4 == 3)
        if not self._way.is_threaded:
            trial.sink.before_end = lambda batch: trial.check_law()
        sampler = _Sampler(trial)
        if self._way.is_threaded:
            sampler.start()
        await self._within(self._add_from_everywhere(trial), "everything to be accepted")
        ending = self.begin(trial.shutdown())
        while not ending.done():
            trial.check_law()
            await asyncio.sleep(0)
        await ending
        sampler.end()
        assert trial.stats.in_flight == 0
        trial.check_law()

    # ---- parts of checks -------------------------------------------------------------------------------------------

    async def _check_closed(self, trial: Trial, item: Any) -> None:
        adding = self.begin(trial.add(item))
        await self._within(asyncio.wait([adding]), "an add after shutdown to be refused")
        error = adding.exception()
        assert isinstance(error, self.closed), f"I8, E1: expected {self.closed}, and not {error!r}"

    async def _add_from_everywhere(self, trial: Trial) -> None:
        producers = ([(who, number) for number in range(EACH)] for who in range(PRODUCERS))
        await asyncio.gather(*(trial.produce(items) for items in producers))

    async def _produce(self, fails: Callable[[int], bool] = lambda number: False) -> Trial:
        """A complete run with several concurrent producers."""
        trial = self.start(size=7, depth=10, fails=fails)
        await self._within(self._add_from_everywhere(trial), "everything to be accepted")
        await self._within(trial.shutdown(), "shutdown to end")
        return trial


class BatcherConformance(Conformance):
    """The suite for a batcher on asyncio; the module's docstring shows its use."""

    _world = _Asyncio

    @_check
    async def test_E2_an_add_that_is_cancelled_while_it_waits_is_not_enqueued(self) -> None:
        trial = self.start(size=2, depth=4, is_open=False)
        accepted, _ = await self.fill(trial, most=200)
        waiting = self.begin(trial.add("cancelled"))
        await self.pause()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        trial.sink.open()
        await trial.shutdown()
        assert trial.sink.items == accepted


class BlockingBatcherConformance(Conformance):
    """The suite for a batcher on threads; the module's docstring shows its use."""

    _world = _Threads


class _Sampler:
    """Checks the law again and again, from a thread of its own."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._is_over = False
        self._error: AssertionError | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._trial.check_law()
        except AssertionError as error:
            self._error = error

    def end(self) -> None:
        self._is_over = True
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def _all_items() -> set[tuple[int, int]]:
    return {(who, number) for who in range(PRODUCERS) for number in range(EACH)}
