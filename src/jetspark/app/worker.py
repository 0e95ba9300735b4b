"""Workers with asyncio: they pull, run handlers, and do the steps that :mod:`jetspark.app.settling` decides on."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, cast

from jetspark.aio.client import Client
from jetspark.aio.consumer import Consumer
from jetspark.aio.context import context_of
from jetspark.aio.kv import KeyValue
from jetspark.aio.stream import Stream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.causes import current_cause
from jetspark.app.clock import idle_s, utc_now
from jetspark.app.context import Context, Dependencies, plan_arguments
from jetspark.app.contracts import Catalogue
from jetspark.app.dead_letters import HandlerStore, microseconds
from jetspark.app.envelope import Decoded, decode
from jetspark.app.handlers import Credit, HandlerLimits, HandlerMachine
from jetspark.app.inheritance import expect_inherited, follow_advisories, settle_inherited, tidy_retries
from jetspark.app.lanes import WorkItem
from jetspark.app.letters import DeadEvent, FailureCause, Origin
from jetspark.app.once import EffectTransaction, OnceRecords
from jetspark.app.retry import HandlerTimeout, Skip
from jetspark.app.settling import (
    Acknowledge,
    PauseHandler,
    SettlingSteps,
    bury_lost,
    conclude,
    is_plain,
    needs_preparing,
    prepare,
)
from jetspark.core.backoff import Backoff
from jetspark.errors import (
    ConfigError,
    ConnectionClosed,
    ContractViolation,
    JetSparkError,
    MessageNotFound,
    NetworkError,
    ProtocolError,
    ServerError,
)
from jetspark.jetstream.info import StoredMessage
from jetspark.publish.steps import ReadClock

if TYPE_CHECKING:
    from jetspark.app.application import App, HandlerSpec

__all__ = ["HandlerWorker"]

_logger = logging.getLogger("jetspark.app")

# An idle pull waits this long at the server before it is renewed.
IDLE_PULL_S = 30.0
# A step that the server refuses or does not answer is tried again after these waits, as long as the worker lives.
STEP_PAUSE = Backoff(first_s=0.1, max_s=5.0)
# A claim of once() outlives the handler's time-out by this much: clocks differ, and cancelling takes a moment.
LEASE_MARGIN_S = 1.0
# A worker without room looks again this often whether it has to make room.
ROOM_POLL_S = 1.0
# Retries and redrives may fill this part of what a handler holds; the rest is for its stream.
RETRY_SHARE = 8


class HandlerWorker:
    """One handler in one process."""

    def __init__(
        self,
        app: App,
        spec: HandlerSpec,
        client: Client,
        store: HandlerStore,
        dependencies: Dependencies,
        *,
        catalogue: Catalogue,
        clock: Callable[[], datetime.datetime] = utc_now,
        rng: random.Random | None = None,
    ) -> None:
        self.app, self.spec, self.store = app, spec, store
        self._client, self._js = client, store.js
        limits = HandlerLimits(
            concurrency=spec.concurrency,
            rate=spec.rate,
            burst=spec.burst,
            timeout_s=spec.timeout,
            ack_wait_s=spec.ack_wait_s,
            max_messages=spec.max_messages,
            max_bytes=spec.max_bytes,
        )
        self._loop = asyncio.get_running_loop()
        rng = rng or getattr(self._loop, "rng", None) or random.SystemRandom()
        self.machine = HandlerMachine(limits, spec.retry, rng.random, spec.breaker)
        self._catalogue = catalogue
        self._kinds = frozenset(spec.events)
        self._function = spec.function
        self._wants_context, self._arguments = plan_arguments(spec.function, spec.name, dependencies)
        if spec.batch is not None and self._wants_context:
            raise ConfigError(f"handler {spec.name!r}: a batch handler has no context")
        self._clock = clock
        self._once = OnceRecords(store.records, spec.name, lease_s=spec.timeout + LEASE_MARGIN_S)
        self._idle: deque[asyncio.Future[None]] = deque()
        self._room: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._for_retries = Credit(max(1, spec.max_messages // RETRY_SHARE), max(1, spec.max_bytes // RETRY_SHARE))
        self._of_retries = Credit(0, 0)
        """What is held of the retry stream."""
        self._background: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._connection = context_of(store.js).connection
        self._session = 0
        """The session in which it is known what has not arrived."""
        self._is_settling_inherited = False
        self._effects: KeyValue | None = None
        """The bucket of the handler's transactions, when it has been looked up."""
        self._stream: Stream
        self._consumer: Consumer
        self._retry_consumer: Consumer
        self._pullers: list[asyncio.Task[None]] = []
        self._log = logging.getLogger(f"jetspark.app.{app.name}.{spec.name}")

    # ---- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until :meth:`stop` is called or the task is cancelled."""
        self._stream = stream = await self._js.stream(self.app.stream)
        self._consumer = await stream.consumer(self.spec.durable)
        self._session = self._connection.sessions
        self._retry_consumer = await self.store.retries.consumer(self.spec.durable)
        changes = self._parked_changes()
        async with aclosing(changes), asyncio.TaskGroup() as tasks:
            await self._load_parked(changes)
            if self.spec.in_order:
                await expect_inherited(self.machine, self._consumer, stream, self._decode, self._kinds)
            watchers = [tasks.create_task(each) for each in self._watchers(changes)]
            self._pullers = [
                tasks.create_task(self._pull(self._consumer, self._receive, self._free_for_stream)),
                tasks.create_task(self._pull(self._retry_consumer, self._receive_retry, self._free_for_retries)),
            ]
            if self.spec.batch is not None:
                runners = [tasks.create_task(self._run_batches(self.spec.batch))]
            else:
                runners = [tasks.create_task(self._run_items()) for _ in range(self.spec.concurrency)]
            await asyncio.wait(runners)
            for task in watchers:
                task.cancel()

    def _watchers(self, changes: AsyncIterator[Any]) -> list[Coroutine[Any, Any, None]]:
        return [
            self._follow_parked(changes),
            follow_advisories(self._client, self._consumer, self._bury_lost),
            self._settle_inherited(),
            tidy_retries(self.store.retries, self._retry_consumer, f"retry.{self.app.name}.{self.spec.name}"),
        ]

    async def stop(self, runners: asyncio.Task[None], timeout: float) -> None:
        """Pull no more, let what runs finish for at most ``timeout`` seconds, and give the rest back in order.

        ``runners`` is the task of :meth:`run`.
        """
        self._is_stopping = self.machine.is_stopping = True
        for task in self._pullers:
            task.cancel()
        for task in self._pullers:
            with suppress(asyncio.CancelledError, JetSparkError):
                await task
        self._wake_idle(len(self._idle))
        done, _ = await asyncio.wait([runners], timeout=timeout)
        if not done:
            runners.cancel()
            await asyncio.wait([runners])
        if self._timer is not None:
            self._timer.cancel()
        await self._give_back()

    async def _give_back(self) -> None:
        """In the order of the stream, so that they come again in that order."""
        try:
            # A request that is still open at the server takes what is given back, or (2.15.1) moves the first of it
            # behind the others. Being asked, the server forgets the requests of those who have left.
            for consumer in (self._consumer, self._retry_consumer):
                await consumer.close()
                await consumer.info()
            for item in self.machine.items:
                if not item.message.is_answered:
                    await item.message.nak()
            await self._client.flush()
        except (JetSparkError, AttributeError) as error:  # not begun, or disconnected: they come after their ack_wait
            self._log.warning("giving back: %s", error)

    # ---- pulling -----------------------------------------------------------------------------------------------

    async def _pull(
        self,
        consumer: Consumer,
        receive: Callable[[JetStreamMessage, float], Any],
        free: Callable[[], Credit],
    ) -> None:
        failures = 0
        while not self._is_stopping:
            credit = free()
            if credit.messages <= 0 or credit.bytes <= 0:
                await self._make_room()
                continue
            try:
                found = await self._fetch(consumer, credit)
                failures = 0
            except (NetworkError, ServerError) as error:
                if not error.may_pass:
                    raise
                failures += 1
                self._log.warning("pulling from %s: %s", consumer, error)
                await asyncio.sleep(STEP_PAUSE.wait_s(failures))
                continue
            if consumer is self._consumer and self._session != self._connection.sessions:
                await self._expect_lost(found)
            now = self._loop.time()
            for message in found:
                outcome = receive(message, now)
                if outcome is not None:
                    await outcome
            self._wake_idle(len(found))
            self._arm()

    async def _expect_lost(self, found: list[JetStreamMessage]) -> None:
        """Another session has begun. What was on its way in the last one comes again after its ``ack_wait``, and later
        events of its key, some of which may have been found already, must not overtake it."""
        if not self.spec.in_order:
            self._session = self._connection.sessions
            return
        failures = 0
        while not self._is_stopping:
            session = self._connection.sessions
            here = {item.sequence for item in self.machine.items if item.source == "stream"}
            here |= {message.metadata.stream_sequence for message in found}
            try:
                await expect_inherited(self.machine, self._consumer, self._stream, self._decode, self._kinds, here)
            except (NetworkError, ServerError) as error:
                if not error.may_pass:
                    raise
                failures += 1
                self._log.warning("looking for events that were on their way: %s", error)
                await asyncio.sleep(STEP_PAUSE.wait_s(failures))
                continue
            self._session = session
            if not self._is_settling_inherited:
                task = asyncio.create_task(self._settle_inherited())
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            return

    async def _settle_inherited(self) -> None:
        self._is_settling_inherited = True
        try:
            await settle_inherited(
                self.machine,
                self._consumer,
                lambda: self.machine.held - self._of_retries.messages,
                lambda: self._wake_idle(self.spec.concurrency),
            )
        finally:
            self._is_settling_inherited = False

    async def _fetch(self, consumer: Consumer, credit: Credit) -> list[JetStreamMessage]:
        try:
            found = await consumer.fetch(credit.messages, no_wait=True, max_bytes=credit.bytes)
            return found or await consumer.fetch(1, timeout=idle_s(IDLE_PULL_S), max_bytes=credit.bytes)
        except ConfigError:  # the next message is larger than what is left
            if self.machine.held:
                await self._make_room()
                return []
            return await consumer.fetch(1, timeout=idle_s(IDLE_PULL_S))

    # The two pullers never ask for the same room, so together they keep to the machine's bounds.

    def _free_for_stream(self) -> Credit:
        if self._is_stopping:
            return Credit(0, 0)
        of_retries, spec = self._of_retries, self.spec
        return Credit(
            spec.max_messages - self._for_retries.messages - (self.machine.held - of_retries.messages),
            spec.max_bytes - self._for_retries.bytes - (self.machine.held_bytes - of_retries.bytes),
        )

    def _free_for_retries(self) -> Credit:
        if self._is_stopping:
            return Credit(0, 0)
        kept, used = self._for_retries, self._of_retries
        return Credit(kept.messages - used.messages, kept.bytes - used.bytes)

    async def _make_room(self) -> None:
        """Wait until something is settled; give back what only waits for events that there is no room for."""
        surplus = self.machine.surplus(self._loop.time())
        for item in surplus:
            if item.source != "stream":
                self._count_retry(item, -1)
            await item.message.nak(self.spec.ack_wait_s / 4)
        if surplus:
            return
        waiter = self._loop.create_future()
        self._room.append(waiter)
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOM_POLL_S):
                await waiter

    def _receive(self, message: JetStreamMessage, now: float) -> Any:
        tokens = (message.raw_reply or b"").split(b".")
        if len(tokens) == 9:
            delivered, sequence = int(tokens[4]), int(tokens[5])
        else:
            metadata = message.metadata
            delivered, sequence = metadata.delivered, metadata.stream_sequence
        event, key = self._decode(message.subject, message.data, message.raw_headers)
        item = WorkItem(key, sequence, message, event, size_bytes=message.size_bytes, delivered=delivered)
        return message.ack() if self.machine.receive(item, now) == "done" else None

    async def _receive_retry(self, message: JetStreamMessage, now: float) -> None:
        try:
            original = DeadEvent.of(message.headers, message.data)
        except ProtocolError as error:
            self._log.error("sequence %d of the retry stream: %s", message.metadata.stream_sequence, error)
            await message.ack()
            return
        if original.is_body_omitted:
            original = await self._with_body(original)
        event, key = self._decode(original.subject, original.data, original.headers)
        item = WorkItem(
            key if key is not None else original.key,
            original.origin.sequence,
            message,
            event,
            size_bytes=message.size_bytes,
            delivered=message.metadata.delivered,
            source="redrive" if message.subject.split(".")[3] == "redrive" else "retry",
            attempts=original.attempts,
            redrives=original.redrives,
        )
        item.original = original
        received = self.machine.receive(item, now)
        if received == "new":
            self._count_retry(item, 1)
        elif received == "done":
            await message.ack()

    async def _with_body(self, original: DeadEvent) -> DeadEvent:
        try:
            stream = await self._js.stream(original.origin.stream)
            stored = await stream.get_message(original.origin.sequence)
        except MessageNotFound:
            return original  # it will be found not to be an event, and stay in the dead letters
        return _dead_event(self.spec.name, stored, original.key, original)

    def _decode(self, subject: str, data: bytes, headers: Any) -> tuple[Any, str | None]:
        """The event, or why it is none; and its key."""
        try:
            decoded = decode(subject, data, headers, self._catalogue)
        except ContractViolation as error:
            return error, None
        spec = self.spec
        if not spec.in_order:
            return decoded, None
        if spec.key is None:
            return decoded, decoded.key
        return decoded, str(getattr(decoded.event, spec.key) if isinstance(spec.key, str) else spec.key(decoded.event))

    # ---- running -----------------------------------------------------------------------------------------------

    async def _run_items(self) -> None:
        machine, loop, timeout_s = self.machine, self._loop, self.spec.timeout
        while True:
            now = loop.time()
            item = machine.take(now)
            if item is None:
                if self._is_stopping:
                    return
                await self._wait_for_work()
                continue
            if now + timeout_s < self._timer_at:
                self._arm()
            if not needs_preparing(item) or await self._steps(
                prepare(machine, item, has_dead_letters=self.spec.dead_letter)
            ):
                error = await self._call(item)
                if error is None and is_plain(machine, item):
                    machine.finish(item, None, now)
                    await item.message.ack()
                    machine.settled(item)
                else:
                    await self._conclude(item, error)
            self._note_end(item)

    async def _wait_for_work(self) -> None:
        waiter = self._loop.create_future()
        self._idle.append(waiter)
        self._arm()
        await waiter

    def _note_end(self, item: WorkItem) -> None:
        """It is settled, or waits for a retry."""
        if item.source != "stream" and item.message.is_answered:
            self._count_retry(item, -1)
        if self._room and self.machine.held * 2 <= self.spec.max_messages:
            self._wake_room()

    # ---- batches -----------------------------------------------------------------------------------------------

    async def _run_batches(self, size: int) -> None:
        while items := await self._gather(size):
            batch = []
            for item in items:
                if not needs_preparing(item) or await self._steps(
                    prepare(self.machine, item, has_dead_letters=self.spec.dead_letter)
                ):
                    batch.append(item)
                else:
                    self._note_end(item)
            error = await self._call_batch(batch) if batch else None
            for item in batch:
                # None of a failed batch is settled by it: each is tried alone, so that only those at fault fail.
                alone = error if error is None or len(batch) == 1 else await self._call_batch([item])
                await self._conclude(item, alone)
                self._note_end(item)

    async def _gather(self, size: int) -> list[WorkItem]:
        """The next batch, in the order of the stream; empty when the worker is to end."""
        loop, found, full_at = self._loop, list[WorkItem](), float("inf")
        while len(found) < size and loop.time() < full_at:
            item = self.machine.take(loop.time())
            if item is not None:
                full_at = min(full_at, loop.time() + self.spec.batch_wait_s)
                found.append(item)
                continue
            if self._is_stopping:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if full_at == float("inf") else full_at):
                    await self._wait_for_work()
        return sorted(found, key=lambda item: item.sequence)

    async def _call_batch(self, items: list[WorkItem]) -> BaseException | None:
        """Run the handler's own code with several events; returns what it raised."""
        task = asyncio.current_task()
        assert task is not None
        wrong = next((item.event for item in items if isinstance(item.event, Exception)), None)
        if wrong is not None:
            return wrong
        events = [item.event.event for item in items if item.event.contract.kind in self._kinds]
        now = self._loop.time()
        for item in items:
            self.machine.restart_clock(item, now)
        items[0].runner = task
        self._arm()
        try:
            if events:
                await self._function(events, **self._arguments)
            return None
        except asyncio.CancelledError:
            if not items[0].is_timed_out:
                raise
            return HandlerTimeout(self.spec.name, self.spec.timeout)
        except Exception as error:
            return error
        finally:
            items[0].runner = None
            if items[0].is_timed_out:
                items[0].is_timed_out = False
                task.uncancel()

    async def _conclude(self, item: WorkItem, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Skip):
            self._log.warning(
                "sequence %d, attempt %d: %s: %s", item.sequence, item.attempts, type(error).__name__, error
            )
        await self._steps(conclude(self.machine, item, error, has_dead_letters=self.spec.dead_letter))
        self._arm()

    async def _call(self, item: WorkItem) -> BaseException | None:
        """Run the handler's own code; returns what it raised."""
        decoded = item.event
        if isinstance(decoded, Exception):
            return decoded
        if decoded.contract.kind not in self._kinds:
            return Skip(f"this handler does not take {decoded.type!r}")
        task = item.runner = asyncio.current_task()
        assert task is not None
        current_cause.set(decoded)  # of everything that is published from here on, by whatever client
        try:
            if self.spec.idempotent == "transaction":
                await self._call_in_transaction(item, decoded)
                return None
            context = self._context(item, decoded) if self._wants_context else None
            result = await self._function(decoded.event, **self._named(context))
            if result is not None:
                await self._publish(context or self._context(item, decoded), result)
            return None
        except asyncio.CancelledError:
            if not item.is_timed_out:
                raise
            return HandlerTimeout(self.spec.name, self.spec.timeout)
        except Exception as error:
            return error
        finally:
            item.runner = None
            if item.is_timed_out:
                task.uncancel()

    async def _call_in_transaction(self, item: WorkItem, decoded: Decoded) -> None:
        if self._effects is None:
            assert self.spec.bucket is not None
            self._effects = await self._js.kv(self.spec.bucket)
        transaction = EffectTransaction(self._effects, self.spec.name, decoded.id)
        if await transaction.is_done():
            return
        context = self._context(item, decoded)
        context._tx = transaction
        result = await self._function(decoded.event, **self._named(context))
        if result is not None:
            await self._publish(context, result)
        await transaction.commit()

    async def _publish(self, context: Context, result: Any) -> None:
        for event in result if isinstance(result, list | tuple) else [result]:
            await context.publish(event)

    def _named(self, context: Context | None) -> dict[str, Any]:
        if context is None:
            return self._arguments
        return {name: context if value is Context else value for name, value in self._arguments.items()}

    def _context(self, item: WorkItem, decoded: Decoded) -> Context:
        return Context(
            decoded,
            handler=self.spec.name,
            source=self.app.source,
            stream=self.app.stream,
            sequence=item.sequence,
            key=item.key,
            attempt=item.attempts,
            delivered=item.delivered,
            redrives=item.redrives,
            js=self._js,
            once=self._once,
            clock=self._clock,
            log=self._log,
        )

    # ---- steps -------------------------------------------------------------------------------------------------

    async def _steps(self, procedure: SettlingSteps[Any]) -> Any:
        answer = None
        try:
            while True:
                answer = await self._perform(procedure.send(answer))
        except StopIteration as finished:
            return finished.value

    async def _perform(self, step: Any) -> Any:
        """Do a step. Each may be repeated, so one that fails is tried again for as long as the worker lives."""
        if isinstance(step, ReadClock):
            return self._loop.time()
        if isinstance(step, Acknowledge):
            return await step.item.message.ack()
        failures = 0
        while True:
            try:
                if isinstance(step, PauseHandler):
                    return await self._pause()
                return await self.store.perform(step)
            except ConnectionClosed:
                raise
            except JetSparkError as error:
                failures += 1
                self._log.warning("%s, try %d: %s: %s", type(step).__name__, failures, type(error).__name__, error)
                await asyncio.sleep(STEP_PAUSE.wait_s(failures))

    async def _pause(self) -> None:
        breaker = self.spec.breaker
        assert breaker is not None
        until = utc_now() + datetime.timedelta(seconds=breaker.open_s)
        self._log.error("%d failures in a row: paused for every worker until %s", breaker.failures, until)
        await self._consumer.pause(until)

    # ---- time --------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
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
        for item in due.timed_out:
            if item.runner is not None:
                item.runner.cancel()
        if due.progress:
            task = self._loop.create_task(self._say_in_progress(due.progress))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        self._wake_idle(self.spec.concurrency)
        if not self._is_stopping:
            self._arm()

    async def _say_in_progress(self, items: list[WorkItem]) -> None:
        try:
            for item in items:
                if not item.message.is_answered:
                    await item.message.in_progress()
        except JetSparkError as error:
            self._log.warning("in_progress: %s", error)

    def _wake_idle(self, count: int) -> None:
        idle = self._idle
        while idle and count > 0:
            waiter = idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _wake_room(self) -> None:
        waiting, self._room = self._room, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _count_retry(self, item: WorkItem, sign: int) -> None:
        held = self._of_retries
        self._of_retries = Credit(held.messages + sign, held.bytes + sign * item.size_bytes)

    # ---- what others do ----------------------------------------------------------------------------------------

    def _parked_changes(self) -> AsyncGenerator[Any, None]:
        return cast(
            "AsyncGenerator[Any, None]",
            self.store.records.watch(f"parked.{self.spec.name}.>", initial_marker=True),
        )

    async def _load_parked(self, changes: AsyncIterator[Any]) -> None:
        async for entry in changes:
            if entry is None:
                return
            self._note_parked(entry)

    async def _follow_parked(self, changes: AsyncIterator[Any]) -> None:
        async for entry in changes:
            self._note_parked(entry)
            self._wake_idle(1)

    def _note_parked(self, entry: Any) -> None:
        """What is older than what this process wrote is its own echo."""
        if entry.operation == "put":
            fields = json.loads(entry.value)
            key = fields["key"]
            if entry.revision > self.store.parked_revisions.get(key, 0):
                self.store.parked_revisions[key] = entry.revision
                self.store.parked_names[entry.key] = key
                self.machine.park(key, fields["head"])
            return
        key = self.store.parked_names.get(entry.key)
        if key is not None and entry.revision > self.store.parked_revisions.get(key, 0):
            self.machine.unpark(key)

    async def _bury_lost(self, sequence: int, reason: str) -> None:
        """The advisory is a hint; what is stored decides."""
        if sequence in self.machine.held_sequences:
            return  # a worker has it, and will settle it
        try:
            stream = await self._js.stream(self.app.stream)
            stored = await stream.get_message(sequence, direct=False)
        except JetSparkError as error:
            self._log.error("sequence %d was given up by the server and cannot be read: %s", sequence, error)
            return
        _, key = self._decode(stored.subject, stored.data, stored.headers)
        item = WorkItem(key, sequence)
        item.original = _dead_event(self.spec.name, stored, key, None)
        cause = FailureCause("GivenUp", f"by the server or another client: {reason}", True, "givenup")
        await self._steps(bury_lost(self.machine, item, cause))


def _dead_event(handler: str, stored: StoredMessage, key: str | None, original: DeadEvent | None) -> DeadEvent:
    return DeadEvent(
        handler=handler,
        key=key,
        origin=Origin(stored.stream, stored.sequence, microseconds(stored.timestamp)),
        subject=stored.subject,
        data=stored.data,
        headers=stored.headers,
        attempts=original.attempts if original is not None else 0,
        status="open",
        redrives=original.redrives if original is not None else 0,
    )
