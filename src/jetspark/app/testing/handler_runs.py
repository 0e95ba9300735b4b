"""Runs one handler alone: without a server or an event loop of its own, and with the time standing still."""

from __future__ import annotations

import asyncio
import datetime
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import msgspec

from jetspark.aio.jetstream import JetStream
from jetspark.app.application import App
from jetspark.app.causes import current_cause
from jetspark.app.contracts.catalogue import Catalogue, contract_of
from jetspark.app.contracts.envelope import Decoded, Encoded, decode, encode
from jetspark.app.handlers.context import Context, Dependencies, HandlerSurroundings, plan_arguments
from jetspark.app.handlers.handler_spec import HandlerFunction, HandlerSpec
from jetspark.app.handlers.invocation import returned_events
from jetspark.app.handlers.lanes import Tries, WorkItem
from jetspark.app.handlers.once import EffectTransaction, OnceRecords, call_effect
from jetspark.app.handlers.retry import GiveUp, RetryPolicy, Skip, WaitHere, WaitLong, decide, deciding_error
from jetspark.app.testing.memory_bucket import MemoryBucket
from jetspark.app.timers import cancelling
from jetspark.app.topology.names import escape_token
from jetspark.errors import ConfigError
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.publishing import Expect

__all__ = ["EffectCall", "HandlerRun", "RunOutcome", "run_handler"]

RunOutcome: TypeAlias = Literal["done", "skipped", "retry", "dead_letter", "dropped"]
"""``dropped`` is given up by a handler with ``dead_letter=False``."""

NOW = datetime.datetime(2026, 3, 31, 10, 15, 30, tzinfo=datetime.UTC)
EVENT_ID = "00000000-0000-8000-8000-000000000001"
# Longer than any handler runs: no other worker claims effects here.
LEASE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectCall:
    """A function that ``ctx.once`` called. A recorded effect is not called, and has no entry."""

    name: str
    arguments: tuple[object, ...]
    named: dict[str, object]
    """The keyword arguments, including ``idempotency_key`` if the function takes it."""
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True, kw_only=True)
class HandlerRun:
    """The effects of one attempt of a handler, and the outcome for its event."""

    outcome: RunOutcome = "done"
    retry_in_s: float | None = None
    """The wait before the next attempt, for ``retry``; without jitter."""
    error: BaseException | None = None
    """The error that the handler raised."""
    published: list[Any] = field(default_factory=list)
    """Events that it published or returned, in order. An attempt that fails later has published them all the same."""
    scheduled: list[Any] = field(default_factory=list)
    """Events that it has set timers for with ``ctx.schedule``."""
    messages: list[Encoded] = field(default_factory=list)
    """Both as messages, with their ids."""
    effects: list[EffectCall] = field(default_factory=list)
    state: dict[str, bytes] = field(default_factory=dict)
    """The bucket after the run, with ``idempotent="transaction"``."""
    logged: list[logging.LogRecord] = field(default_factory=list)


async def run_handler(
    handler: HandlerFunction | str,
    event: object,
    *dependencies: object,
    app: App | None = None,
    id: str = EVENT_ID,
    now: datetime.datetime = NOW,
    attempt: int = 1,
    recorded: Mapping[str, object] | None = None,
    state: Mapping[str, bytes] | None = None,
    is_done: bool = False,
) -> HandlerRun:
    """Run a handler once with an event; returns its effects and the outcome for the event.

    Nothing is stored, the time stands still, and all ids follow from ``id``: the same call has the same result. An
    error of the handler is not raised here; it decides the outcome, as in a worker. There is no time-out.

    Args:
        handler: The function, or with ``app`` the handler's name.
        event: The event to handle; a list of events for a batch handler. It is encoded and decoded as on its way
            through a stream.
        dependencies: Instead of what lifespans yield; found by type.
        app: The application that declares the handler. Without it the name is the function's, and the policy the
            default.
        id: The event's id.
        now: What ``ctx.now()`` is, and when the event happened.
        attempt: 1 for the first.
        recorded: Effects of ``ctx.once`` that were done and recorded by an attempt before, with their results.
        state: The content of the bucket, with ``idempotent="transaction"``.
        is_done: With ``idempotent="transaction"``: an earlier attempt has handled the event, and its mark is in the
            bucket.

    Raises:
        InvalidEvent: The event breaks its contract.
        ConfigError: The handler wants something that is not among ``dependencies``, or is not one of the app's.
    """
    spec = _spec_of(handler, event, app)
    source = app.source if app is not None else "/test"
    events = event if isinstance(event, list) else [event]
    decoded = [_decode(each, id if index == 0 else f"{id}-{index}", source, now) for index, each in enumerate(events)]
    run = _SingleRun(spec, source, app, now, attempt, recorded or {}, state or {})
    if is_done:
        await run.mark_done(decoded[0])
    _, arguments = plan_arguments(spec.function, spec.name, Dependencies(dependencies))
    if spec.batch is not None:
        await run.conclude(spec.function([each.event for each in decoded], **arguments))
    else:
        await run.handle(decoded[0], arguments)
    return run.result


def _spec_of(handler: HandlerFunction | str, event: object, app: App | None) -> HandlerSpec:
    if app is not None:
        for spec in app.handlers.values():
            if handler in (spec.name, spec.function):
                return spec
        known = ", ".join(sorted(app.handlers)) or "none"
        raise ConfigError(f"handler={handler!r}: expected a handler of app {app.name!r}; it has {known}")
    if isinstance(handler, str):
        raise ConfigError(f"handler={handler!r}: a name needs app=, where it is declared")
    if isinstance(event, list):
        events = tuple({type(each) for each in event})
        return HandlerSpec(function=handler, events=events, durable=handler.__name__, batch=1000, in_order=False)
    return HandlerSpec(function=handler, events=(type(event),), durable=handler.__name__)


def _decode(event: object, id: str, source: str, now: datetime.datetime) -> Decoded:
    catalogue = Catalogue()
    catalogue.add(type(event))
    encoded = encode(event, id=id, source=source, time=now)
    return decode(encoded.subject, encoded.data, encoded.headers, catalogue)


class _SingleRun:
    def __init__(
        self,
        spec: HandlerSpec,
        source: str,
        app: App | None,
        now: datetime.datetime,
        attempt: int,
        recorded: Mapping[str, object],
        state: Mapping[str, bytes],
    ) -> None:
        self.result = HandlerRun()
        self._spec, self._source, self._now, self._attempt = spec, source, now, attempt
        self._app = app
        self._app_name, self._stream = (app.name, app.stream) if app is not None else ("test", "TEST")
        self._recorded = recorded
        self._bucket = MemoryBucket(state)
        self._log = logging.Logger(f"jetspark.app.{self._app_name}.{spec.name}", logging.DEBUG)
        self._log.parent = logging.getLogger(self._log.name)
        self._log.addHandler(_Collect(self.result.logged))

    async def mark_done(self, decoded: Decoded) -> None:
        """Store the mark that an earlier attempt would have left."""
        await self._transaction(decoded).commit([])

    def _transaction(self, decoded: Decoded) -> EffectTransaction:
        spec = self._spec
        return EffectTransaction(self._bucket.as_kv(), spec.name, decoded.id, remember_s=spec.remember_s)

    async def handle(self, decoded: Decoded, arguments: Mapping[str, object]) -> None:
        spec = self._spec
        context = self._context(decoded)
        named = {name: context if value is Context else value for name, value in arguments.items()}
        token = current_cause.set(decoded)
        try:
            await self.conclude(self._call(spec, context, decoded, named))
        finally:
            current_cause.reset(token)

    async def _call(
        self, spec: HandlerSpec, context: _WatchedContext, decoded: Decoded, named: Mapping[str, object]
    ) -> None:
        transaction = None
        if spec.idempotent == "transaction":
            transaction = self._transaction(decoded)
            if await transaction.committed() is not None:
                return
            context.begin(transaction)
        try:
            returned = returned_events(await spec.function(decoded.event, **named))
        finally:
            if transaction is not None:
                transaction.end()
        messages = [context.encode(event) for event in returned]
        if transaction is not None:
            await transaction.commit([])
        for event, message in zip(returned, messages, strict=True):
            await context.send(message)
            self.result.published.append(event)

    async def conclude(self, work: Awaitable[object]) -> None:
        spec, result = self._spec, self.result
        try:
            await work
        except (Exception, BaseExceptionGroup, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # somebody ends the test; else it is of something that the handler waited for
            result.error = deciding_error(spec.retry, error)
            result.outcome, result.retry_in_s = _outcome(spec.retry, self._attempt, result.error, spec.dead_letter)
        result.state = {key: value for key, value in self._bucket.values.items() if not key.startswith("_done.")}

    async def _server_now(self) -> datetime.datetime:
        return self._now

    def _context(self, decoded: Decoded) -> _WatchedContext:
        records = MemoryBucket(
            {
                f"once.{self._spec.name}.{escape_token(decoded.id)}.{escape_token(name)}": b'{"state":"done","result":'
                + msgspec.json.encode(value)
                + b"}"
                for name, value in self._recorded.items()
            }
        )
        once = _WatchedOnce(
            records.as_kv(), self._spec.name, self._server_now, lease_s=LEASE_S, remember_s=self._spec.remember_s
        )
        once.calls = self.result.effects
        item = WorkItem(decoded.key, 1, delivered=self._attempt, tries=Tries(attempts=self._attempt))
        surroundings = HandlerSurroundings(
            app=self._app_name,
            handler=self._spec.name,
            source=self._source,
            stream=self._stream,
            js=cast(JetStream, _Publisher(self._stream, self.result)),
            once=once,
            clock=lambda: self._now,
            server_now=self._server_now,
            log=self._log,
            declared=contract_of if self._app is None else self._app.spec.declared,
        )
        return _WatchedContext(self.result, decoded, item, surroundings)


def _outcome(
    policy: RetryPolicy, attempt: int, error: BaseException, has_dead_letters: bool
) -> tuple[RunOutcome, float | None]:
    if isinstance(error, Skip):
        return "skipped", None
    decided = decide(policy, attempt, error, 0.0)
    if isinstance(decided, WaitHere | WaitLong):
        return "retry", decided.seconds
    assert isinstance(decided, GiveUp)
    return "dead_letter" if has_dead_letters else "dropped", None


class _WatchedContext(Context):
    def __init__(self, result: HandlerRun, decoded: Decoded, item: WorkItem, surroundings: HandlerSurroundings) -> None:
        super().__init__(decoded, item, surroundings)
        self._result = result

    def begin(self, transaction: EffectTransaction) -> None:
        self._tx = transaction

    async def publish(self, event: object, *, cancels: str | None = None) -> PubAck:
        ack = await super().publish(event, cancels=cancels)
        self._result.published.append(event)
        return ack

    async def _send_ending(self, timer: str, encoded: Encoded) -> PubAck:
        encoded.headers.update(cancelling(self._app, timer))  # nothing to read here: no timer is set
        return await self.send(encoded)

    async def schedule(self, event: Any, **options: Any) -> str:
        name = await super().schedule(event, **options)
        self._result.scheduled.append(event)
        return name


class _Publisher:
    """The part of a ``JetStream`` that a context publishes with."""

    def __init__(self, stream: str, run: HandlerRun) -> None:
        self._stream, self._run = stream, run

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: dict[str, str],
        msg_id: str | None = None,
        expect: Expect | None = None,
    ) -> PubAck:
        own = {} if msg_id is None else {"Nats-Msg-Id": msg_id}
        self._run.messages.append(Encoded(subject, data, headers | own))
        return PubAck(stream=self._stream, sequence=1 + len(self._run.messages))


class _WatchedOnce(OnceRecords):
    calls: list[EffectCall]

    async def run(
        self,
        context: Context,
        name: str,
        function: Callable[..., Awaitable[object]],
        arguments: tuple[object, ...],
        named: dict[str, object],
        result_type: object = None,
    ) -> object:
        @functools.wraps(function)  # by its signature it is known whether it takes an idempotency key
        async def watched(*given: object, **also: object) -> object:
            try:
                result = await call_effect(function, given, also)
            except BaseException as error:
                self.calls.append(EffectCall(name=name, arguments=given, named=also, error=error))
                raise
            self.calls.append(EffectCall(name=name, arguments=given, named=also, result=result))
            return result

        return await super().run(context, name, watched, arguments, named, result_type)


class _Collect(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)
