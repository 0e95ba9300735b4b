"""Workers with asyncio: they pull events, and run the procedures of :mod:`jetspark.app.handlers.procedures`."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from jetspark.aio.client import Client
from jetspark.aio.clock import rng as loop_rng
from jetspark.aio.context import context_of
from jetspark.aio.step_runner import run_steps
from jetspark.app.clock import utc_now
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.denial_watch import DenialWatch, denial_in
from jetspark.app.handlers.context import Dependencies
from jetspark.app.handlers.given_up import AdvisoryReader, ConsumerSource
from jetspark.app.handlers.handler_steps import (
    Acknowledge,
    DropParked,
    EndTransaction,
    HandlerStep,
    HandlerSteps,
    NextDeadLetter,
    PauseHandler,
    ReadParked,
    ReportDropped,
    RequestRedrive,
    StepAnswer,
    WriteParked,
)
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.handlers.intake import Intake
from jetspark.app.handlers.invocation import HandlerCalls
from jetspark.app.handlers.lanes import ItemReader, WorkItem
from jetspark.app.handlers.machine import HandlerLimits, HandlerMachine
from jetspark.app.handlers.procedures import handle, handle_batch
from jetspark.app.handlers.readers import PartitionReaders
from jetspark.app.handlers.record_watch import Members, RecordWatch
from jetspark.app.handlers.reporting import HandlerReports
from jetspark.app.handlers.retry import Decided, GiveUp, Skip
from jetspark.app.handlers.room import Room
from jetspark.app.handlers.stall_watch import CANCEL_AGAIN_S, StallWatch
from jetspark.app.patience import patiently
from jetspark.app.stored_events import error_text
from jetspark.app.topology.names import is_bookkeeping, partition_stream
from jetspark.core.backoff import Backoff
from jetspark.core.step_runner import ReadClock, StepRun
from jetspark.core.subjects import on_one_of
from jetspark.errors import (
    ConnectionClosed,
    JetSparkError,
    JetStreamUnavailable,
    PermissionDenied,
    StreamNotFound,
)
from jetspark.jetstream.acks import IN_PROGRESS

if TYPE_CHECKING:
    from jetspark.aio.stream_message import JetStreamMessage
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.spec import AppSpec

__all__ = ["HandlerWorker"]

R = TypeVar("R")

# A step that the server refuses or does not answer is retried after these waits, as long as the worker lives.
STEP_PAUSE = Backoff(first_s=0.1, max_s=5.0)
# Time that an orderly end waits for the server, besides the time that handlers have to finish.
GIVE_BACK_S = 5.0
# A worker without room checks at this interval whether it has to return events.
ROOM_POLL_S = 1.0


class HandlerWorker:
    """One handler in one process."""

    def __init__(
        self,
        app: AppSpec,
        spec: HandlerSpec,
        client: Client,
        store: HandlerStore,
        dependencies: Dependencies,
    ) -> None:
        self.app, self.spec, self.client, self.store = app, spec, client, store
        limits = HandlerLimits(
            concurrency=spec.concurrency,
            rate=spec.rate,
            burst=spec.burst,
            timeout_s=spec.timeout,
            ack_wait_s=spec.ack_wait_s,
            max_messages=spec.max_messages,
            max_bytes=spec.max_bytes,
            batch=spec.batch or 1,
            has_transactions=spec.idempotent == "transaction",
            has_dead_letters=spec.dead_letter,
        )
        self._loop = asyncio.get_running_loop()
        self.machine = HandlerMachine(limits, spec.retry, loop_rng().random, spec.breaker)
        self.room = Room(self.machine)
        self.catalogue = app.catalogue
        self.kinds = frozenset(spec.events)
        self.is_wanted = on_one_of([contract_of(kind).subject.filter for kind in spec.events])
        """True for the subjects of its events. Its consumer may have a wider filter."""
        self.is_stopping = False
        self.log = logging.getLogger(f"jetspark.app.{app.name}.{spec.name}")
        self._calls = HandlerCalls(app, spec, store, dependencies, utc_now, self.log)
        self._calls.is_ending = self._is_ending
        self._main: asyncio.Task[object] | None = None
        self._has_failed = False
        self.reports = HandlerReports(app, spec, app.observers, self.log) if app.observers else None
        members = Members(store.records, spec.name, spec.takeover_s) if spec.partitions is not None else None
        self.records = RecordWatch(store, self.machine, members)
        self._readers = PartitionReaders(self, members, spec.partitions or 0) if members is not None else None
        self._intake: Intake | None = None
        self.runners: list[asyncio.Task[None]] = []
        self._idle: deque[asyncio.Future[None]] = deque()
        self._waiting_for_room: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._background: set[asyncio.Task[None]] = set()
        self._connection = context_of(store.js).connection
        self.stalls = StallWatch(self)
        self._denied: asyncio.Future[None] = self._loop.create_future()
        self._denials = DenialWatch(context_of(store.js).transport.dispatcher, self._needs, self._on_denied)

    # ---- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until :meth:`stop` is called or the task is cancelled.

        Raises:
            PermissionDenied: This user may not use a subject that the worker needs.
        """
        self._main = asyncio.current_task()
        self._denials.attach()
        try:
            async with aclosing(self.records.changes), asyncio.TaskGroup() as tasks:
                try:
                    await self._run(tasks)
                except BaseException:
                    self._has_failed = True
                    raise
        except BaseExceptionGroup as group:
            raise denial_in(group) or group from None
        finally:
            self._denials.detach()
            self._denied.cancel()
            self.stalls.close()

    def _needs(self, denied: PermissionDenied) -> bool:
        """True if the worker itself publishes there. A denial of the handler's own code is the handler's error."""
        app = self.app
        streams = (app.stream, app.retry_stream, app.advisories, partition_stream(app.name, self.spec.name))
        return is_bookkeeping(app.name, streams, denied.subject)

    def _on_denied(self, error: PermissionDenied) -> None:
        if not self._denied.done():
            self._denied.set_exception(error)

    async def _until_denied(self) -> None:
        await self._denied

    def _is_ending(self) -> bool:
        """True after :meth:`stop`, when the worker is cancelled, and when one of its tasks has failed.

        The group cancels its tasks first, and then the worker's own.
        """
        return self.is_stopping or self._has_failed or (self._main is not None and self._main.cancelling() > 0)

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        watchers = [tasks.create_task(self._until_denied())]
        await self.records.load()
        watchers.append(tasks.create_task(self.records.follow(lambda: self.wake_idle(1))))
        if self._readers is not None:
            await self._readers.open()
            await patiently(self.records.catch_up)  # this worker is one of the members from here on
        else:
            stream = await patiently(partial(self.store.js.stream, self.app.stream))
            consumer = await patiently(partial(stream.consumer, self.spec.durable))
            retries = await patiently(partial(self.store.retries.consumer, self.spec.durable))
            self._intake = Intake(self, stream, consumer, retries, None)
        advisories = await AdvisoryReader.open(self, self._sources)
        await advisories.catch_up()  # before any event of their keys is handled
        watchers.append(tasks.create_task(advisories.run()))
        watchers.append(tasks.create_task(self.stalls.run()))
        if self._readers is not None:
            watchers.append(tasks.create_task(self._readers.run(tasks)))
        elif self._intake is not None:
            await self._intake.start(tasks)
        if self.spec.batch is not None:
            self.runners = [tasks.create_task(self._run_batches(self.spec.batch))]
        else:
            # No more runners than messages that can be held.
            count = min(self.spec.concurrency, self.spec.max_messages)
            self.runners = [tasks.create_task(self._run_items()) for _ in range(count)]
        await asyncio.wait(self.runners)
        for task in watchers:
            task.cancel()
        if self._readers is not None:
            self._readers.end()
        for intake in self.intakes:
            await intake.end()

    async def stop(self, runners: asyncio.Task[None], timeout: float) -> None:
        """Stop pulling, let running events finish for up to ``timeout`` seconds, and return the others in order.

        ``runners`` is the task of :meth:`run`.
        """
        self.is_stopping = self.machine.is_stopping = True
        if not self.runners:  # still starting, so no event runs
            runners.cancel()
        intakes = self.intakes
        for intake in intakes:
            await intake.stop_pulling()
        if self._readers is not None:
            await self._within_bound(self._readers.leave())
        self.wake_idle(len(self._idle))
        done, _ = await asyncio.wait([runners], timeout=timeout)
        while not done and not self.stalls.abandoned.done():
            # Repeatedly: a handler may treat a cancellation as its own error, whose outcome then has to be stored.
            for task in (runners, *self.runners):
                task.cancel()
            done, _ = await asyncio.wait([runners], timeout=CANCEL_AGAIN_S)
        if self._timer is not None:
            self._timer.cancel()
        await self._calls.close()
        await self._within_bound(*(intake.give_back(running=True) for intake in intakes))

    async def _within_bound(self, *work: Coroutine[object, None, None]) -> None:
        """Await requests of an orderly end for a bounded time. Without them, events are redelivered after ack_wait."""
        tasks = [asyncio.ensure_future(each) for each in work]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=GIVE_BACK_S if self._connection.is_connected else 0.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if late:
                self.log.warning("held events: the server did not answer in time; redelivered after their ack_wait")

    @property
    def intakes(self) -> list[Intake]:
        """The readers that pull for this handler now."""
        if self._readers is not None:
            return self._readers.intakes
        return [self._intake] if self._intake is not None else []

    @property
    def _sources(self) -> list[ConsumerSource]:
        """All consumers of this handler, including the partitions of other workers."""
        if self._readers is not None:
            return self._readers.sources
        intake = self._intake
        assert intake is not None
        return [
            ConsumerSource(intake.stream, intake.consumer, None, is_retry=False),
            ConsumerSource(self.store.retries, intake.retry_consumer, None, is_retry=True),
        ]

    @property
    def shares(self) -> int:
        """Number of pulls that share the room for messages."""
        return max(1, len(self.intakes))

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    @property
    def sessions(self) -> int:
        """Number of connections so far."""
        return self._connection.sessions

    async def return_message(self, message: JetStreamMessage, heard_at: float, delay_s: float | None = None) -> None:
        """Return a message to the server, if it must be with this worker: :class:`_Pulled` explains ``heard_at``.

        Another worker may have it after its ``ack_wait``, and would get it twice. Without a connection the return would
        arrive after that.
        """
        if self.is_connected and self._loop.time() - heard_at < self.spec.ack_wait_s:
            await message.nak(delay_s)

    async def make_room(self) -> None:
        """Wait until an event is acknowledged, or return events that wait for others which do not fit."""
        surplus = self.machine.surplus(self._loop.time())
        with suppress(JetSparkError):
            await self.store.record_not_begun(surplus)
        for item in surplus:
            if item.source != "stream":
                self.room.drop_retry(item)
            elif item.intake is not None:
                item.intake.expect_again(item)
            await self.return_message(item.message, item.heard_at, self.spec.ack_wait_s / 4)
        if surplus:
            return
        waiter = self._loop.create_future()
        self._waiting_for_room.append(waiter)
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOM_POLL_S):
                await waiter

    # ---- running -----------------------------------------------------------------------------------------------

    async def _run_items(self) -> None:
        machine, loop, timeout_s = self.machine, self._loop, self.spec.timeout
        while True:
            now = loop.time()
            item = machine.take(now)
            if machine.lapsed:
                self._expect_lapsed()
            try:
                if item is None:
                    if self.is_stopping:
                        return
                    await self._wait_for_work()
                    continue
                if now + timeout_s < self._timer_at:
                    self.arm()
                await handle(self, item)
            except BaseException as error:
                self._interrupted(error, [] if item is None else [item])

    def _interrupted(self, error: BaseException, items: Sequence[WorkItem]) -> None:
        """Continue after a cancellation by code of a handler that had ended; raises if the worker is to end.

        An item whose outcome was being stored is redelivered after its ``ack_wait``, and later events of its key wait.
        """
        if self.reports is not None:
            for item in items:
                self.reports.finished(item, "given_back")
        if not isinstance(error, asyncio.CancelledError) or self._is_ending():
            raise error
        task = asyncio.current_task()
        assert task is not None
        while task.cancelling():
            task.uncancel()
        self.log.error("a task of the worker was cancelled by a handler, or by code that a handler left running")
        for item in items:
            if item.is_taken:
                self.machine.dismiss(item)
                self.machine.lapse(item)
            else:
                self.item_left(item)
        self._expect_lapsed()

    async def _wait_for_work(self) -> None:
        waiter = self._loop.create_future()
        self._idle.append(waiter)
        self.arm()
        await waiter

    # ---- batches -----------------------------------------------------------------------------------------------

    async def _run_batches(self, size: int) -> None:
        while True:
            items = list[WorkItem]()
            try:
                await self._gather(items, size)
                if not items:
                    return
                await handle_batch(self, items)
            except BaseException as error:
                self._interrupted(error, items)

    async def _gather(self, items: list[WorkItem], size: int) -> None:
        """Fill the next batch, in the order of the stream; it stays empty when the worker is to end."""
        loop, full_at = self._loop, float("inf")
        while len(items) < size and loop.time() < full_at:
            item = self.machine.take(loop.time())
            if item is not None:
                full_at = min(full_at, loop.time() + self.spec.batch_wait_s)
                items.append(item)
                continue
            if self.is_stopping:
                break
            try:
                async with asyncio.timeout_at(None if full_at == float("inf") else full_at):
                    await self._wait_for_work()
            except TimeoutError:
                break  # a timer may fire early by less than the clock's resolution, which the loop's condition misses
        items.sort(key=lambda item: item.sequence)

    def _expect_lapsed(self) -> None:
        lapsed, self.machine.lapsed = self.machine.lapsed, []
        for item in lapsed:
            self.log.warning(
                "event %d: ack_wait expired; the server may have redelivered it to another worker, which decides what "
                "becomes of it",
                item.sequence,
            )
            if item.intake is not None:
                item.intake.expect_lapsed(item)

    # ---- the driver of the procedures --------------------------------------------------------------------------

    def now(self) -> float:
        return self._loop.time()

    def run_handler(self, item: WorkItem) -> Awaitable[BaseException | None]:
        call = self._calls.call(item)
        return call if self.reports is None else self.reports.observe(item, call)

    async def run_batch(self, items: Sequence[WorkItem]) -> BaseException | None:
        self.arm()
        if self.reports is not None:
            self.reports.batch_started(items)
        error = await self._calls.call_batch(items)
        if self.reports is not None:
            self.reports.batch_ended(items, error)
        return error

    def attempt_failed(self, item: WorkItem, error: BaseException) -> None:
        if isinstance(error, Skip):
            return
        kind, text = type(error).__name__, error_text(error)
        self.log.warning("event %d: attempt %d failed: %s: %s", item.sequence, item.attempts, kind, text)

    def acknowledge(self, item: WorkItem) -> Awaitable[None]:
        return item.message.ack()

    def attempt_ended(self, item: WorkItem, error: BaseException | None, decided: Decided | None) -> None:
        if self.reports is not None:
            self.reports.concluded(item, error, decided)
        if error is None:
            return
        if isinstance(decided, GiveUp):
            end = "dead letter written" if self.spec.dead_letter else "dropped, since the handler has no dead letters"
            self.log.error("event %d: given up after %d attempts; %s", item.sequence, item.attempts, end)
        self.arm()

    def item_left(self, item: WorkItem) -> None:
        if self.machine.lapsed:
            self._expect_lapsed()
        if item.source != "stream" and item.message.is_answered:
            self.room.drop_retry(item)
        if self._waiting_for_room and self.machine.held * 2 <= self.spec.max_messages:
            self._wake_room()

    async def run_steps(self, steps: HandlerSteps[R]) -> R:
        return await run_steps(StepRun(steps), self._perform)

    async def _perform(self, step: HandlerStep) -> StepAnswer:
        """Perform a step. It is repeated until it succeeds, as long as the worker lives, since each may be repeated.

        Raises:
            PermissionDenied: Repeating cannot help, and without the step the event has no owner: the worker ends.
        """
        match step:
            case ReadClock():
                return self._loop.time()
            case Acknowledge():
                return await self._acknowledge(step)
            case ReportDropped(item, cause):
                self.log.error(
                    "event %d: given up (%s: %s); dropped, since the handler has no dead letters",
                    *(item.sequence, cause.error, cause.message),
                )
                if self.reports is not None:
                    self.reports.step(step)
                return None
        failures = 0
        while True:
            try:
                match step:
                    case PauseHandler():
                        await self._pause()
                        return None
                    case EndTransaction(item):
                        return await self._calls.end_transaction(item)
                answer = await self.store.perform(step)
                if self.reports is not None and answer is True:
                    self.reports.step(step)
                return answer
            except (ConnectionClosed, PermissionDenied):
                raise
            except JetSparkError as error:
                failures += 1
                name, kind = type(step).__name__, type(error).__name__
                self.log.warning("%s: %s failed (%s: %s); retried (%d)", _object_of(step), name, kind, error, failures)
                if isinstance(error, JetStreamUnavailable | StreamNotFound) and failures == 1:
                    self.log.error("a stream of the application is missing; `jetspark apply` creates it again")
                await asyncio.sleep(STEP_PAUSE.wait_s(failures))

    async def _acknowledge(self, step: Acknowledge) -> bool:
        if not step.surely:
            await step.item.message.ack()
            return False
        try:
            await step.item.message.ack_sync()
        except JetSparkError as error:
            self.log.warning("event %d: acknowledgement not confirmed (%s); continuing", step.item.sequence, error)
            return False
        return True

    async def _pause(self) -> None:
        breaker = self.spec.breaker
        assert breaker is not None
        until = await self.store.server_now() + datetime.timedelta(seconds=breaker.open_s)
        if self.reports is not None:
            self.reports.paused(breaker.open_s)
        self.log.error("handler paused for every worker until %s, after %d failures in a row", until, breaker.failures)
        for source in self._sources:  # retries too: they need the missing service as well
            await source.consumer.pause(until)

    # ---- time --------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is None or deadline >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        due = self.machine.on_time(self._loop.time())
        if self.machine.lapsed:
            self._expect_lapsed()
        for item in due.timed_out:
            if item.runner is not None:
                item.runner.cancel()
        if due.progress and not self.stalls.has_stalled:  # a stalled worker leaves its events to others
            task = self._loop.create_task(self._send_in_progress(due.progress))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        self.wake_idle(self.spec.concurrency)
        self.arm()

    async def _send_in_progress(self, items: list[WorkItem]) -> None:
        of_consumers: dict[tuple[ItemReader | None, bool], list[WorkItem]] = {}
        for item in items:
            of_consumers.setdefault((item.intake, item.source == "stream"), []).append(item)
        await asyncio.gather(*(self._keep_items(each) for each in of_consumers.values()))

    async def _keep_items(self, items: list[WorkItem]) -> None:
        sent_at = await self.keep([item.message for item in items])
        if sent_at is not None:
            now = self._loop.time()
            for item in items:
                self.machine.heard(item, sent_at, now)

    async def keep(self, messages: Sequence[JetStreamMessage]) -> float | None:
        """Send ``in_progress`` for messages of one consumer; returns the time, or None if the server does not confirm.

        Data written to a socket may be lost without an error. The consumer reads messages in order, so its answer to
        the last one confirms all of them.
        """
        sent_at = self._loop.time()
        unanswered = [message for message in messages if not message.is_answered]
        # Without a connection they would be buffered, and arrive when another worker may have these events.
        if not unanswered or not self._connection.is_connected:
            return None
        try:
            for message in unanswered[:-1]:
                if not message.is_answered:
                    await message.in_progress()
            await self.client.request(unanswered[-1].reply, IN_PROGRESS)
        except JetSparkError as error:
            self.log.warning("%d held events: in_progress failed (%s); sent again", len(unanswered), error)
            return None
        return sent_at

    def wake_idle(self, count: int) -> None:
        idle = self._idle
        while idle and count > 0:
            waiter = idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _wake_room(self) -> None:
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


def _object_of(step: HandlerStep) -> str:
    """The event or the key of a step, for the log."""
    match step:
        case ReadParked(key) | WriteParked(key) | DropParked(key) | NextDeadLetter(key):
            return f"key {key!r}"
        case RequestRedrive(dead_letter):
            return f"dead letter of event {dead_letter.sequence}"
        case PauseHandler() | ReadClock():
            return "handler"
        case _:
            return f"event {step.item.sequence}"
