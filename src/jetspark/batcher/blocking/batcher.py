"""The batcher on threads. :mod:`jetspark.batcher.machine` decides; this module waits and writes.

One lock guards the machine; it is not held while the sink writes. A *keeper* thread watches the clock. One *writer*
thread per concurrent flush passes batches to the sink. All are daemons and start with the first item.

Interrupts. A KeyboardInterrupt can hit a caller between any two steps, and never the batcher's own threads. Before the
interrupt propagates, ``_repair`` completes the interrupted step: the machine recomputes its derived state, flushes that
no writer has are queued again, missing threads are started, and waiting threads are woken to check their condition.
The lock is reentrant because such a lock knows its owner: an interrupted wait may have lost the lock to another thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast

from jetspark.batcher.blocking.clock import WaitingClock
from jetspark.batcher.blocking.sinks import Sink
from jetspark.batcher.blocking.turns import TurnLock
from jetspark.batcher.config import BatcherConfig, Flushed, Stats
from jetspark.batcher.machine import BatchMachine, Flush, Ticket, no_room, not_drained, not_flushed
from jetspark.batcher.reports import Reporter
from jetspark.core.arguments import instance, iterate
from jetspark.errors import ConfigError

__all__ = ["Batcher"]

T = TypeVar("T")


class _RealClock:
    now = staticmethod(time.monotonic)

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        if until is None:
            condition.wait()
        elif (left := until - time.monotonic()) > 0:
            condition.wait(left)


class _Repairing:
    """``with batcher._lock, repairing``: when the block raises, calls ``_repair``, with the lock held."""

    def __init__(self, batcher: Batcher[Any]) -> None:
        self._repair = batcher._repair

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self._repair()


class Batcher(Generic[T]):
    """Collects single items into batches for a sink, within bounds of items, bytes, time and memory.

    Any thread may call any method; signal handlers may not. Accepted items are in memory until the sink has written
    them: a crash, or a program that ends without ``shutdown``, loses them. Leaving ``with`` shuts the batcher down,
    without a time limit.

    An interrupt (Ctrl-C) may come after an item was accepted and before ``add`` has returned: then the item is written,
    and counted, although ``add`` raised.

    A thread cannot be stopped from outside: a write that takes longer than ``flush_timeout`` counts as failed, and the
    next one waits until it returns. A sink whose calls may hang needs timeouts of its own.
    """

    def __init__(self, config: BatcherConfig[Sink[T]]) -> None:
        clock = instance("config", config, BatcherConfig).clock
        if clock is not None and not hasattr(clock, "wait"):
            raise ConfigError(f"clock={clock!r}: expected one with now() and wait(condition, until)")
        self.config = config
        self._machine: BatchMachine[T] = BatchMachine.of(config)
        self._sink = config.sink
        self._reporter = Reporter(config)
        self._clock: WaitingClock = _RealClock() if clock is None else cast(WaitingClock, clock)
        self._now = self._clock.now
        self._lock = TurnLock()
        self._keeper_wakes = threading.Condition(self._lock)
        self._writer_wakes = threading.Condition(self._lock)
        self._has_drained = threading.Condition(self._lock)
        self._watched: float | None = None
        """The time at which the keeper wakes up, at the latest; None when it waits for a notification."""
        self._due: deque[Flush[T]] = deque()
        self._threads = 0
        """Number of threads started so far."""
        self._repairing = _Repairing(self)
        self._callbacks: deque[Callable[[], None]] = deque()
        """Pending calls of acks, metrics and the log. They run without the lock, because they may call the batcher."""
        if config.metrics is not None:
            config.metrics.watch(config.name, self.stats)

    # ---- adding --------------------------------------------------------------------------------------------------

    def add(self, item: T, *, timeout: float | None = None) -> None:
        """Accept an item; waits while the queue is full.

        When this returns, the item is accepted. When it raises anything but an interrupt, the item is not accepted.

        Raises:
            Closed: Shutdown has begun.
            BatcherTimeout: There was no room within ``timeout`` seconds.
            ConfigError: The item is larger than ``max_batch_bytes``.
        """
        lock = self._lock
        try:  # `with lock` without a Python-level call, which would take 0.2 us of 0.6
            if not lock.acquire(False):
                lock.wait()
            machine = self._machine
            if not machine.append(item):
                if machine.room <= 0:
                    self._ask(1, timeout)
                flush = machine.add(item, self._now())
                if flush is not None or machine.has_new_deadline:
                    self._advance(flush)
            lock.release()
        except BaseException:
            self._repair()  # takes the lock if this thread does not have it
            lock.release()
            raise
        self._run_callbacks_if_broken()

    def try_add(self, item: T) -> bool:
        """Accept an item if there is room now; otherwise, or when closed, count it as ``rejected`` and return False."""
        with self._lock, self._repairing:
            machine = self._machine
            if machine.room <= 0:
                machine.reject()
                return False
            self._advance(machine.add(item, self._now()))
        self._run_callbacks_if_broken()
        return True

    def add_batch(self, items: Sequence[T], *, timeout: float | None = None) -> None:
        """Accept all of the items or none; waits until there is room for all. No other item gets between them.

        Raises:
            Closed, BatcherTimeout: As for :meth:`add`; no item was accepted.
            ConfigError: More than ``queue_depth`` items, or an item that is too large; no item was accepted.
        """
        items = list(iterate("items", items, "a list of items"))
        with self._lock, self._repairing:
            if not items:
                return self._machine.check_open()
            self._ask(len(items), timeout)
            self._advance(self._machine.add_many(items, self._now()))
        self._run_callbacks_if_broken()

    def add_with_ack(self, item: T, *, timeout: float | None = None) -> Future[None]:
        """Like :meth:`add`, and returns a future for the outcome of the item's write.

        Its ``result()`` is None when the item is written, or raises the sink's error, ``FlushTimeout`` or
        ``DroppedOnShutdown``. Using it is optional; cancelling the future does not affect the item. Its callbacks run
        on the batcher's own thread: a callback that adds to the batcher needs a timeout.
        """
        done: Future[None] = Future()
        with self._lock, self._repairing:
            if self._machine.room <= 0:
                self._ask(1, timeout)
            self._advance(self._machine.add(item, self._now(), partial(self._acknowledge, done)))
        self._run_callbacks_if_broken()
        return done

    def flush(self, *, timeout: float | None = None) -> Flushed:
        """Write all items accepted so far; returns their outcome when the sink is done.

        Raises:
            BatcherTimeout: The sink was not done within ``timeout`` seconds. It continues.
            BatcherBroken: The batcher has failed and writes no more items.
        """
        with self._lock, self._repairing:
            machine = self._machine
            done = threading.Condition(self._lock)
            fence = machine.fence(done.notify)
            try:
                self._advance()
                until = self._until(timeout)
                while not fence.is_done:
                    machine.check_running()
                    if not self._wait(done, until):
                        raise not_flushed(machine.name, timeout or 0)
                return Flushed(fence.ok, fence.failed)
            finally:
                self._hold_lock()
                machine.forget(fence)

    def shutdown(self, *, timeout: float | None = None) -> None:
        """Accept no more items, write the remaining ones, and return when that is done. May be called repeatedly.

        Raises:
            BatcherTimeout: It took longer than ``timeout`` seconds; items not known to be written are counted in
                ``stats().dropped_on_shutdown``. Writing continues until the process ends.
            BatcherBroken: The batcher has failed and cannot write the remaining items.
        """
        machine = self._machine
        with self._lock, self._repairing:
            machine.close()
            self._advance()
            until = self._until(timeout)
            while not machine.is_drained:
                machine.check_running()
                if not self._wait(self._has_drained, until):
                    break
            is_late = not machine.is_drained
            dropped = machine.write_off() if is_late else 0
        self._run_callbacks()  # report all outcomes before the program may end
        if is_late:
            self._reporter.dropped(dropped)
            raise not_drained(machine.name, timeout or 0)

    def stats(self) -> Stats:
        """The batcher's counters, all at one moment."""
        with self._lock:
            return self._machine.stats()

    def __enter__(self) -> Batcher[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # ---- waiting; the caller holds the lock ------------------------------------------------------------------------

    def _ask(self, count: int, timeout: float | None) -> None:
        """Wait for places and turn them into room."""
        machine = self._machine
        granted = threading.Condition(self._lock)
        ticket = Ticket(count, granted.notify)
        try:
            machine.ask_with(ticket)
            until = self._until(timeout)
            while not ticket.is_granted and not ticket.is_over:
                if not self._wait(granted, until):
                    raise no_room(machine.name, count, timeout or 0)
            machine.redeem(ticket)
        except BaseException:
            self._hold_lock()
            machine.give_back(ticket)
            raise

    def _until(self, timeout: float | None) -> float | None:
        return None if timeout is None else self._now() + timeout

    def _wait(self, condition: threading.Condition, until: float | None) -> bool:
        """Wait for a notification; False when the time ``until`` has already come."""
        if until is not None and self._now() >= until:
            return False
        self._clock.wait(condition, until)
        return True

    # ---- writing ---------------------------------------------------------------------------------------------------

    def _advance(self, flush: Flush[T] | None = None) -> None:
        """After every call into the machine, with the lock held: queue the due flushes, and wake the keeper if needed.

        Never raises, because its callers have already accepted items.
        """
        machine = self._machine
        try:
            now = self._now()
            flush = flush or machine.poll(now)
            while flush is not None:
                self._due.append(flush)
                self._writer_wakes.notify()
                flush = machine.poll(now)
            deadline = machine.next_deadline()
            if deadline is not None:
                self._start_threads()
                if self._watched is None or deadline < self._watched:
                    self._watched = deadline
                    self._keeper_wakes.notify()
        except Exception as error:
            self._break(error)
        reports, machine.reports = machine.reports, []
        self._callbacks.extend([partial(self._reporter.write_is_over, report) for report in reports])
        if machine.is_drained:
            for condition in (self._has_drained, self._keeper_wakes, self._writer_wakes):
                condition.notify_all()

    def _start_threads(self) -> None:
        name = f"batcher {self.config.name}"
        while self._threads <= self.config.max_concurrent_flushes:
            # Counted after the start: an interrupt in between starts one thread too many, which is harmless.
            number = self._threads
            target, what = (self._write, f"writer {number - 1}") if number else (self._keep, "keeper")
            threading.Thread(target=target, name=f"{name} {what}", daemon=True).start()
            self._threads = number + 1

    def _hold_lock(self) -> None:
        """Take the lock if this thread lost it: an interrupt may have hit a wait that had released it."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.acquire()

    def _repair(self) -> None:
        """Restore a consistent state after a call has raised or was interrupted; takes the lock if it was lost."""
        self._hold_lock()
        self._due = deque(self._machine.repair())
        self._advance()
        for condition in (self._has_drained, self._keeper_wakes, self._writer_wakes):
            condition.notify_all()

    def _keep(self) -> None:
        while self._look_at_clock():
            self._run_callbacks()

    def _look_at_clock(self) -> bool:
        """Handle overdue writes, then wait for the next deadline; False when the keeper may end."""
        machine = self._machine
        with self._lock:
            try:
                machine.overdue(self._now())
                self._watched = None
                self._advance()
                if not self._callbacks and not machine.is_over:
                    self._clock.wait(self._keeper_wakes, self._watched)
            except Exception as error:
                self._break(error)
            return bool(self._callbacks) or not machine.is_over

    def _write(self) -> None:
        while (flush := self._next_write()) is not None:
            failure: BaseException | None = None
            try:
                self._sink.write(flush.items)
            except BaseException as error:  # any error of the sink counts for its items
                failure = error
            with self._lock:
                now = flush.began_at
                with suppress(Exception):  # _advance() handles a failing clock
                    now = self._now()
                self._machine.finish(flush, failure, now)
                self._advance()
            self._run_callbacks()
            del flush, failure  # an idle batcher keeps neither items nor tracebacks alive

    def _next_write(self) -> Flush[T] | None:
        """Wait for a flush; None when there will be no more."""
        with self._lock:
            while not self._due:
                if self._machine.is_over:
                    return None
                self._writer_wakes.wait()
            flush = self._due.popleft()
            flush.is_begun = True
            return flush

    def _acknowledge(self, done: Future[None], error: BaseException | None) -> None:
        self._callbacks.append(partial(_end, done, error))

    def _run_callbacks_if_broken(self) -> None:
        """Run the callbacks on the caller's thread after a failure, because no own thread may exist."""
        if self._machine.failure is not None:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Run pending callbacks, without the lock and not on producers' threads, which may hold a lock they need."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # another thread was quicker
            try:
                callback()
            except KeyboardInterrupt:
                self._callbacks.appendleft(callback)  # a caller may wait for it
                raise
            except BaseException:  # errors of user code must not end the batcher's threads
                with suppress(Exception):
                    self._reporter.logger.exception("batcher %r: a callback failed", self.config.name)

    def _break(self, error: BaseException) -> None:
        self._callbacks.append(partial(self._reporter.is_broken, error))
        self._machine.fail(error)
        for condition in (self._has_drained, self._keeper_wakes, self._writer_wakes):
            condition.notify_all()


def _end(done: Future[None], error: BaseException | None) -> None:
    try:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
    except InvalidStateError:
        pass  # the caller has cancelled the future
