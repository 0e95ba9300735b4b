"""Calling a handler's own code: its context, its arguments, its transaction, and the events it returns."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jetspark.aio.context import context_of
from jetspark.app.causes import current_cause
from jetspark.app.entities.committer import Committer
from jetspark.app.entities.entities import Entities, EntityWriter
from jetspark.app.handlers.context import Context, Dependencies, HandlerSurroundings, plan_arguments
from jetspark.app.handlers.once import EffectTransaction, OnceRecords
from jetspark.app.handlers.retry import HandlerTimeout, Skip, deciding_error
from jetspark.app.server_clock import server_clock
from jetspark.core.headers import encode as encode_headers
from jetspark.errors import ConfigError, Conflict, PayloadTooLarge

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue
    from jetspark.app.contracts.envelope import Decoded, Encoded
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.handlers.handler_store import HandlerStore
    from jetspark.app.handlers.lanes import WorkItem
    from jetspark.app.spec import AppSpec

__all__ = ["HandlerCalls", "returned_events"]

# A claim of once() outlives the handler's time-out by this time: clocks differ, and cancelling takes a moment.
LEASE_MARGIN_S = 1.0
# A transaction whose keys were changed by another one is run again at once, since nothing has failed. This many times
# in a row count as one failed attempt.
MAX_LOST_RACES = 20


class HandlerCalls:
    """The handler's function with the arguments that it takes besides its events."""

    is_replay = False

    def __init__(
        self,
        app: AppSpec,
        spec: HandlerSpec,
        store: HandlerStore,
        dependencies: Dependencies,
        clock: Callable[[], datetime.datetime],
        log: logging.Logger,
    ) -> None:
        self._app, self._spec, self._js, self._clock, self._log = app, spec, store.js, clock, log
        self._kinds = frozenset(spec.events)
        self._function = spec.function
        self.is_ending: Callable[[], bool] = lambda: True
        """True if a cancelled task is to end; if not, the code that it runs has cancelled it."""
        self._wants_context, self._arguments = plan_arguments(spec.function, spec.name, dependencies)
        self._surroundings: HandlerSurroundings | None = None
        self._committer: Committer | None = None
        self._effects: KeyValue | None = None
        """The bucket of the handler's transactions, once it was looked up."""
        self._once = OnceRecords(
            store.records,
            spec.name,
            store.server_now,
            lease_s=spec.timeout + LEASE_MARGIN_S,
            remember_s=spec.remember_s,
        )

    async def call(self, item: WorkItem) -> BaseException | None:
        """Run the handler's own code; returns the error that it raised, or None."""
        decoded = item.event
        if isinstance(decoded, Exception):
            return decoded
        assert decoded is not None, "items of a lane are read"
        if decoded.contract.kind not in self._kinds:
            return Skip(f"this handler does not take {decoded.type!r}")
        task = item.runner = asyncio.current_task()
        assert task is not None
        current_cause.set(decoded)  # of all events published from here on, by any client
        before = task.cancelling()
        raised: BaseException | None = None
        try:
            if self._spec.idempotent == "transaction":
                await self._call_in_transaction(item, decoded)
            else:
                context = self._context(item, decoded) if self._wants_context else None
                result = await self._function(decoded.event, **self._named(context))
                if result is not None:
                    context = context or self._context(item, decoded)
                    for encoded in self._encoded(context, result):
                        await context.send(encoded)
        except BaseException as error:
            raised = self._raised(task, item, error, before)
        finally:
            item.runner = None
        if task.cancelling() > before:
            await self._forget_cancels(task, before)
        return raised

    async def call_batch(self, items: Sequence[WorkItem]) -> BaseException | None:
        """Run the handler's own code with several events; returns the error that it raised, or None.

        The time-out and the cancellation are those of the first item.
        """
        task = asyncio.current_task()
        assert task is not None
        events = []
        for item in items:
            decoded = item.event
            if isinstance(decoded, Exception):
                return decoded
            assert decoded is not None, "items of a lane are read"
            if decoded.contract.kind in self._kinds:
                events.append(decoded.event)
        items[0].runner = task
        before = task.cancelling()
        raised: BaseException | None = None
        try:
            result = await self._function(events, **self._arguments) if events else None
            if result is not None:
                kind = type(result).__name__
                raised = ConfigError(f"batch handler {self._spec.name!r}: expected it to return nothing, got {kind}")
        except BaseException as error:
            raised = self._raised(task, items[0], error, before)
        finally:
            items[0].runner = None
        items[0].is_timed_out = False
        if task.cancelling() > before:
            await self._forget_cancels(task, before)
        return raised

    async def _forget_cancels(self, task: asyncio.Task[object], before: int) -> None:
        """Let the runner continue, after the time-out or the handler's own code has cancelled it."""
        while task.cancelling() > before:
            task.uncancel()
        try:
            await asyncio.sleep(0)  # raises a cancellation that was requested and not raised yet
        except asyncio.CancelledError:
            if self.is_ending():
                raise

    def _raised(self, task: asyncio.Task[object], item: WorkItem, error: BaseException, before: int) -> BaseException:
        """The error to decide on; raises ``error`` if the worker is to end.

        ``SystemExit`` and ``GeneratorExit`` of a handler are errors like others: they would end one worker after the
        other with the same event.

        Args:
            before: The number of cancellations of the task before the handler began.
        """
        match error:
            case KeyboardInterrupt():  # ends the program
                raise error
            case GeneratorExit() if not _is_current(task):  # this coroutine is closed, with its event loop
                raise error
            case asyncio.CancelledError() if task.cancelling() - before > item.is_timed_out and self.is_ending():
                raise error  # also if the time-out comes at the same moment
            case asyncio.CancelledError() if item.is_timed_out:
                return HandlerTimeout(self._spec.name, self._spec.timeout)
        # This includes a cancellation of a task that the handler awaited, or of this task by the handler's own code.
        deciding = deciding_error(self._spec.retry, error)
        if deciding is not error:
            self._log.info("event %d: failed with %r; %r decides", item.sequence, error, deciding)
        return deciding

    async def end_transaction(self, item: WorkItem) -> bool:
        """Keep earlier attempts from committing their transaction; if one has, publish its events and return True."""
        decoded = item.event
        if isinstance(decoded, Exception):
            return False  # it cannot be read, so the handler was not called
        assert decoded is not None, "items are read before they are given up"
        events = await (await self._transaction(decoded)).give_up()
        if events is None:
            return False
        context = self._context(item, decoded)
        for encoded in events:
            await context.send(encoded)
        return True

    async def _transaction(self, decoded: Decoded) -> EffectTransaction:
        if self._effects is None:
            assert self._spec.bucket is not None
            self._effects = await self._js.kv(self._spec.bucket)
        return EffectTransaction(self._effects, self._spec.name, decoded.id, remember_s=self._spec.remember_s)

    async def _call_in_transaction(self, item: WorkItem, decoded: Decoded) -> None:
        for lost in range(MAX_LOST_RACES):
            transaction = await self._transaction(decoded)
            context = self._context(item, decoded)
            events = await transaction.committed()
            if events is None:
                context._tx = transaction
                try:
                    result = await self._function(decoded.event, **self._named(context))
                finally:
                    transaction.end()
                try:
                    events = await transaction.commit(self._encoded(context, result))
                except Conflict:
                    if lost == MAX_LOST_RACES - 1:
                        raise
                    continue
            # After the commit, because the events of a try that lost its race must not be published. If this worker
            # dies here, the next attempt reads them from the completion record.
            for encoded in events:
                await context.send(encoded)
            return

    def _encoded(self, context: Context, result: object) -> list[Encoded]:
        """Encode the events that a handler has returned; if one cannot be published, none is.

        Raises:
            InvalidEvent, ConfigError: An event breaks its contract, or is not declared.
            PayloadTooLarge: A message is larger than the server takes.
        """
        messages = [context.encode(event) for event in returned_events(result)]
        limit = context_of(self._js).client.max_payload_bytes
        for message in messages:
            if len(message.data) > limit // 2:  # smaller ones fit, since headers are smaller than that
                size = len(message.data) + len(encode_headers(message.headers))
                if size > limit:
                    raise PayloadTooLarge(size, limit)
        return messages

    def _entities(self, context: Context, name: str) -> Entities:
        if self._committer is None:
            self._committer = Committer(self._js, self._app.stream, from_leader=True)
        return EntityWriter(
            self._app, self._js, context.encode_as, context.change_id, context.now, self._committer
        ).entities(name)

    async def close(self) -> None:
        """Release the resources; call it after the last call has ended."""
        if self._committer is not None:
            await self._committer.close()

    def _named(self, context: Context | None) -> dict[str, object]:
        if context is None:
            return self._arguments
        return {name: context if value is Context else value for name, value in self._arguments.items()}

    def _context(self, item: WorkItem, decoded: Decoded) -> Context:
        if self._surroundings is None:
            self._surroundings = HandlerSurroundings(
                app=self._app.name,
                handler=self._spec.name,
                source=self._app.source,
                stream=self._app.stream,
                js=self._js,
                once=self._once,
                clock=self._clock,
                server_now=server_clock(self._js, self._app.stream).now,
                log=self._log,
                is_replay=self.is_replay,
                entities=self._entities,
                declared=self._app.declared,
            )
        return Context(decoded, item, self._surroundings)


def _is_current(task: asyncio.Task[object]) -> bool:
    """True if the task runs. A coroutine that is being closed does not run in its task."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop is left
        return False


def returned_events(result: object) -> list[object]:
    """The events that a handler has returned, as a list."""
    if result is None:
        return []
    return list(result) if isinstance(result, list | tuple) else [result]
