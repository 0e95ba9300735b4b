"""Calling a handler's own code: its context, its arguments, its transaction, and what it returns."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jetspark.aio.context import context_of
from jetspark.app.causes import current_cause
from jetspark.app.entities.committer import Committer
from jetspark.app.entities.entities import Entities, EntityWriter
from jetspark.app.handlers.context import Context, Dependencies, plan_arguments
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

# A claim of once() outlives the handler's time-out by this much: clocks differ, and cancelling takes a moment.
LEASE_MARGIN_S = 1.0
# A transaction that finds its keys changed is run again at once: others were faster, and nothing has failed. This many
# times in a row is no chance any more, and counts as one failed attempt.
MAX_LOST_RACES = 20


class HandlerCalls:
    """The handler's function with everything it is given besides its events."""

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
        """Whether a task that is cancelled is to end; if not, the code that it runs has cancelled it."""
        self._wants_context, self._arguments = plan_arguments(spec.function, spec.name, dependencies)
        self._committer: Committer | None = None
        self._effects: KeyValue | None = None
        """The bucket of the handler's transactions, when it has been looked up."""
        self._once = OnceRecords(
            store.records,
            spec.name,
            store.server_now,
            lease_s=spec.timeout + LEASE_MARGIN_S,
            remember_s=spec.remember_s,
        )

    async def call(self, item: WorkItem) -> BaseException | None:
        """Run the handler's own code; returns what it raised."""
        decoded = item.event
        if isinstance(decoded, Exception):
            return decoded
        if decoded.contract.kind not in self._kinds:
            return Skip(f"this handler does not take {decoded.type!r}")
        task = item.runner = asyncio.current_task()
        assert task is not None
        current_cause.set(decoded)  # of everything that is published from here on, by whatever client
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

    async def call_batch(self, items: list[WorkItem]) -> BaseException | None:
        """Run the handler's own code with several events; returns what it raised. The first item stands for all."""
        task = asyncio.current_task()
        assert task is not None
        wrong = next((item.event for item in items if isinstance(item.event, Exception)), None)
        if wrong is not None:
            return wrong
        events = [item.event.event for item in items if item.event.contract.kind in self._kinds]
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

    async def _forget_cancels(self, task: asyncio.Task[Any], before: int) -> None:
        """Let the runner go on, after the time-out or the handler's own code has cancelled it."""
        while task.cancelling() > before:
            task.uncancel()
        try:
            await asyncio.sleep(0)  # where one is raised that was asked for and has not been raised yet
        except asyncio.CancelledError:
            if self.is_ending():
                raise

    def _raised(self, task: asyncio.Task[Any], item: WorkItem, error: BaseException, before: int) -> BaseException:
        """What a handler's error means; raises it if somebody ends the worker. ``before`` is what the task has been
        cancelled before it.

        ``SystemExit`` and ``GeneratorExit`` of a handler are errors like others: they would end worker after worker,
        with the same event.
        """
        match error:
            case KeyboardInterrupt():  # ends the program
                raise error
            case GeneratorExit() if not _is_current(task):  # this coroutine is closed, with its event loop
                raise error
            case asyncio.CancelledError() if task.cancelling() - before > item.is_timed_out and self.is_ending():
                raise error  # also at the moment of the time-out
            case asyncio.CancelledError() if item.is_timed_out:
                return HandlerTimeout(self._spec.name, self._spec.timeout)
        # A cancellation, too: of something that the handler waited for, or of this task by the handler's own code.
        deciding = deciding_error(self._spec.retry, error)
        if deciding is not error:
            self._log.info("sequence %d: %r decides, of %r", item.sequence, deciding, error)
        return deciding

    async def end_transaction(self, item: WorkItem) -> bool:
        """Keep the transactions of earlier attempts from committing; True if one has, and its events are published."""
        if isinstance(item.event, Exception):
            return False  # it cannot be read, so the handler was not called
        events = await (await self._transaction(item.event)).give_up()
        if events is None:
            return False
        context = self._context(item, item.event)
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
            # After the commit: what a try returned that lost its race never happened. If this worker dies here, the
            # next attempt finds them with the mark.
            for encoded in events:
                await context.send(encoded)
            return

    def _encoded(self, context: Context, result: Any) -> list[Encoded]:
        """The messages of what a handler has returned: one that cannot be published has none of them published.

        Raises:
            InvalidEvent, ConfigError: An event breaks its contract, or is not declared.
            PayloadTooLarge: A message is larger than the server takes.
        """
        messages = [context.encode(event) for event in returned_events(result)]
        limit = context_of(self._js).client.max_payload_bytes
        for message in messages:
            if len(message.data) > limit // 2:  # others are small enough, whatever their headers are
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
        """Nobody calls any more."""
        if self._committer is not None:
            await self._committer.close()

    def _named(self, context: Context | None) -> dict[str, Any]:
        if context is None:
            return self._arguments
        return {name: context if value is Context else value for name, value in self._arguments.items()}

    def _context(self, item: WorkItem, decoded: Decoded) -> Context:
        return Context(
            decoded,
            app=self._app.name,
            handler=self._spec.name,
            source=self._app.source,
            stream=self._app.stream,
            sequence=item.sequence,
            key=item.key,
            attempt=item.attempts,
            delivered=item.delivered,
            redrives=item.redrives,
            js=self._js,
            once=self._once,
            clock=self._clock,
            server_now=server_clock(self._js, self._app.stream).now,
            log=self._log,
            is_replay=self.is_replay,
            entities=self._entities,
            declared=self._app.declared,
        )


def _is_current(task: asyncio.Task[Any]) -> bool:
    """Whether the task runs: a coroutine that is closed does not run in its task."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop is left
        return False


def returned_events(result: Any) -> list[Any]:
    """What a handler has returned: nothing, an event, or several."""
    if result is None:
        return []
    return list(result) if isinstance(result, list | tuple) else [result]
