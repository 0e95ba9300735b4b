"""The batcher with asyncio. :mod:`jetspark.batcher.machine` decides; this module waits and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar, cast

from jetspark.batcher.aio.clock import LoopTimer, TimerClock
from jetspark.batcher.aio.sinks import Sink
from jetspark.batcher.config import BatcherConfig, Flushed, Stats
from jetspark.batcher.machine import BatchMachine, Flush, no_room, not_drained, not_flushed
from jetspark.batcher.reports import Reporter
from jetspark.batcher.waiting_items import Ack
from jetspark.core.arguments import instance, iterate
from jetspark.errors import ConfigError, JetSparkError

__all__ = ["Batcher"]

T = TypeVar("T")


class _LoopClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now, self.call_at = loop.time, loop.call_at


class Batcher(Generic[T]):
    """Collects single items into batches for a sink, within bounds of items, bytes, time and memory.

    It belongs to the event loop of its first use. Accepted items are in memory until the sink has written them: a crash
    loses them. Leaving ``async with`` shuts the batcher down, without a time limit.
    """

    def __init__(self, config: BatcherConfig[Sink[T]]) -> None:
        self.config = instance("config", config, BatcherConfig)
        self._machine: BatchMachine[T] = BatchMachine.of(config)
        self._sink = config.sink
        self._reporter = Reporter(config)
        self._clock: TimerClock | None = None
        self._now: Callable[[], float] | None = None
        self._timer: LoopTimer | None = None
        self._timer_at = 0.0
        self._writes: dict[int, asyncio.Task[None]] = {}
        """Keyed by the position of the first item."""
        self._drained: list[asyncio.Future[bool]] = []
        if config.metrics is not None:
            config.metrics.watch(config.name, self.stats)

    # ---- adding --------------------------------------------------------------------------------------------------

    async def add(self, item: T, *, timeout: float | None = None) -> None:
        """Accept an item; waits while the queue is full.

        When this returns, the item is accepted. When it raises or is cancelled, the item is not accepted.

        Raises:
            Closed: Shutdown has begun.
            BatcherTimeout: There was no room within ``timeout`` seconds.
            ConfigError: The item is larger than ``max_batch_bytes``.
        """
        machine = self._machine
        if machine.append(item):
            return
        if machine.room <= 0 or self._now is None:
            await self._ask(1, timeout)
        assert self._now is not None
        flush = machine.add(item, self._now())
        if flush is not None or machine.has_new_deadline:
            self._advance(flush)

    def try_add(self, item: T) -> bool:
        """Accept an item if there is room now; otherwise, or when closed, count it as ``rejected`` and return False."""
        machine = self._machine
        self._bind()
        if machine.room <= 0:
            machine.reject()
            return False
        self._advance(machine.add(item, self._time()))
        return True

    async def add_batch(self, items: Sequence[T], *, timeout: float | None = None) -> None:
        """Accept all of the items or none; waits until there is room for all. No other item gets between them.

        Raises:
            Closed, BatcherTimeout: As for :meth:`add`; no item was accepted.
            ConfigError: More than ``queue_depth`` items, or an item that is too large; no item was accepted.
        """
        items = list(iterate("items", items, "a list of items"))
        if not items:
            return self._machine.check_open()
        await self._ask(len(items), timeout)
        self._advance(self._machine.add_many(items, self._time()))

    async def add_with_ack(self, item: T, *, timeout: float | None = None) -> asyncio.Future[None]:
        """Like :meth:`add`, and returns a future for the outcome of the item's write.

        Awaiting it returns None when the item is written, or raises the sink's error, ``FlushTimeout`` or
        ``DroppedOnShutdown``. Awaiting is optional; cancelling the future does not affect the item.
        """
        if self._machine.room <= 0 or self._now is None:
            await self._ask(1, timeout)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._advance(self._machine.add(item, self._time(), _ack_of(done)))
        return done

    async def flush(self, *, timeout: float | None = None) -> Flushed:
        """Write all items accepted so far; returns their outcome when the sink is done.

        Raises:
            BatcherTimeout: The sink was not done within ``timeout`` seconds. It continues.
            BatcherBroken: The batcher has failed and writes no more items.
        """
        self._bind()
        machine = self._machine
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        fence = machine.fence(partial(_end, done, True))
        try:
            self._advance()
            if not fence.is_done and machine.failure is None and not await self._wait(done, timeout):
                raise not_flushed(machine.name, timeout or 0)
            if not fence.is_done:
                machine.check_running()
            return Flushed(fence.ok, fence.failed)
        finally:
            machine.forget(fence)

    async def shutdown(self, *, timeout: float | None = None) -> None:
        """Accept no more items, write the remaining ones, and return when that is done. May be called repeatedly.

        Raises:
            BatcherTimeout: It took longer than ``timeout`` seconds; items not known to be written are counted in
                ``stats().dropped_on_shutdown``. Writing continues while the loop runs.
            BatcherBroken: The batcher has failed and cannot write the remaining items.
        """
        self._bind()
        machine = self._machine
        machine.close()
        self._advance()
        if not machine.is_over:
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._drained.append(done)
            try:
                if not await self._wait(done, timeout):
                    self._reporter.dropped(machine.write_off())
                    raise not_drained(machine.name, timeout or 0)
            finally:
                self._drained.remove(done)
        if not machine.is_drained:
            machine.check_running()

    def stats(self) -> Stats:
        """The batcher's counters, all at one moment."""
        return self._machine.stats()

    async def __aenter__(self) -> Batcher[T]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    # ---- waiting -------------------------------------------------------------------------------------------------

    def _bind(self) -> TimerClock:
        """Bind the batcher to the running loop, at its first call."""
        if self._clock is None:
            clock = self.config.clock
            if clock is not None and not hasattr(clock, "call_at"):
                raise ConfigError(f"clock={clock!r}: expected one with now() and call_at(when, call)")
            loop = asyncio.get_running_loop()
            self._clock = _LoopClock(loop) if clock is None else cast(TimerClock, clock)
            self._now = self._clock.now
        return self._clock

    def _time(self) -> float:
        return self._bind().now()

    async def _ask(self, count: int, timeout: float | None) -> None:
        """Wait for places and turn them into room, which the caller uses before its next ``await``."""
        self._bind()
        machine = self._machine
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ticket = machine.ask(count, partial(_end, granted, True))
        try:
            if not ticket.is_granted and not await self._wait(granted, timeout):
                raise no_room(machine.name, count, timeout or 0)
        except BaseException:
            machine.give_back(ticket)
            raise
        machine.redeem(ticket)

    async def _wait(self, done: asyncio.Future[bool], timeout: float | None) -> bool:
        """Wait; False if not done within ``timeout`` seconds of the batcher's clock."""
        if timeout is None:
            return await done
        if timeout <= 0:
            return done.done()
        clock = self._bind()
        timer = clock.call_at(clock.now() + timeout, partial(_end, done, False))
        try:
            return await done
        finally:
            timer.cancel()

    # ---- writing -------------------------------------------------------------------------------------------------

    def _advance(self, flush: Flush[T] | None = None) -> None:
        """After every call into the machine: begin the due writes, and set the timer.

        Never raises, because its callers have already accepted items.
        """
        try:
            machine, now = self._machine, self._time()
            flush = flush or machine.poll(now)
            while flush is not None:
                # Not create_task(): a loop with eager tasks would write inside of add().
                loop, name = asyncio.get_running_loop(), f"batcher {self.config.name}"
                task = self._writes[flush.first] = asyncio.Task(self._write(flush), loop=loop, name=name)
                task.add_done_callback(partial(self._on_task_over, flush))
                flush = machine.poll(now)
            self._watch_clock()
        except Exception as error:
            self._break(error)
        if self._machine.is_over:
            self._end()
        self._report()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for done in self._drained:
            _end(done, True)

    def _watch_clock(self) -> None:
        deadline = self._machine.next_deadline()
        if self._timer is not None:
            if deadline is None or self._timer_at <= deadline:
                return  # the timer fires earlier, and is then set again
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer_at = deadline
            self._timer = self._bind().call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            overdue = self._machine.overdue(self._time())
        except Exception as error:
            return self._break(error)
        for flush in overdue:
            self._writes[flush.first].cancel()
        self._advance()

    async def _write(self, flush: Flush[T]) -> None:
        failure: BaseException | None = None
        try:
            await self._sink.write(flush.items)
        except GeneratorExit:
            raise  # the loop has ended, so the outcome cannot be reported
        except BaseException as error:  # any error of the sink counts for its items
            failure = error
        self._finish(flush, failure)
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise failure

    def _on_task_over(self, flush: Flush[T], task: asyncio.Task[None]) -> None:
        if flush.first in self._writes:  # the task was cancelled before its first step
            self._finish(flush, asyncio.CancelledError() if task.cancelled() else task.exception())

    def _finish(self, flush: Flush[T], failure: BaseException | None) -> None:
        task = self._writes.pop(flush.first)
        if isinstance(failure, asyncio.CancelledError | StopIteration):
            # An ack must not raise these two: its caller would seem to be cancelled, or an exhausted generator.
            what = "was cancelled" if isinstance(failure, asyncio.CancelledError) else "raised StopIteration"
            cause, failure = failure, JetSparkError(f"batcher {self.config.name!r}: the write {what}")
            failure.__cause__ = cause
        now = flush.began_at
        with suppress(Exception):  # _advance() handles a failing clock
            now = self._time()
        self._machine.finish(flush, failure, now)
        if task.cancelling() > flush.is_overdue:
            # Cancelled by other code: the loop is about to end, and new tasks would never run.
            self._break(asyncio.CancelledError("the event loop ended before the batcher was shut down"))
        else:
            self._advance()

    def _report(self) -> None:
        """Log and measure finished writes; the last action of a step, because a log handler may raise."""
        reports, self._machine.reports = self._machine.reports, []
        for report in reports:
            self._reporter.write_is_over(report)

    def _break(self, error: BaseException) -> None:
        self._machine.fail(error)
        self._end()
        self._reporter.is_broken(error)


def _end(done: asyncio.Future[bool], value: bool) -> None:
    if not done.done():
        done.set_result(value)


def _ack_of(done: asyncio.Future[None]) -> Ack:
    def ack(error: BaseException | None) -> None:
        if done.done():  # the caller has cancelled the future
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
            done.exception()  # marks the error as retrieved: awaiting the future is optional

    return ack
