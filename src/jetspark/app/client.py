"""A program's connection to an application: it publishes the application's events, and reads its projections."""

from __future__ import annotations

import datetime
import logging
import random
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from jetspark.aio.client import Client
from jetspark.aio.clock import rng as loop_rng
from jetspark.aio.connector import connect
from jetspark.aio.fast import FastPublisher
from jetspark.aio.jetstream import JetStream
from jetspark.app.causes import CauseLike, child_of, current_cause
from jetspark.app.clock import nanoseconds_now, utc_now
from jetspark.app.contracts.catalogue import Contract, contract_of
from jetspark.app.contracts.envelope import Encoded, encode, write_event
from jetspark.app.contracts.event_ids import NewIds
from jetspark.app.timers import Timers
from jetspark.core.headers import encode as encode_headers
from jetspark.core.options import ConnectKeywords
from jetspark.errors import ConfigError, UsageError
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.publishing import Expect
from jetspark.publish.fast_options import FastPublisherKeywords
from jetspark.publish.outgoing import Item

if TYPE_CHECKING:
    from jetspark.aio.transport import DriverAuth
    from jetspark.app.commands.command_runner import CommandOptions
    from jetspark.app.commands.command_spec import Command, CommandReply
    from jetspark.app.commands.local_decider import LocalDecider
    from jetspark.app.dead_letters.access import AppDeadLetters, ScheduledRetries
    from jetspark.app.entities.committer import Committer
    from jetspark.app.entities.entities import Entities, EntityWriter
    from jetspark.app.lag.report import LagReport
    from jetspark.app.projections.views import FoldOf, View, Views
    from jetspark.app.settings import Settings
    from jetspark.app.spec import AppSpec, HasSpec
    from jetspark.app.workflows.runs import WorkflowRuns
    from jetspark.core.events import OnEvent
    from jetspark.core.options import ConnectOptions, TLSConfig


__all__ = ["AppClient", "BulkPublisher", "ConnectArguments"]


_logger = logging.getLogger("jetspark.app")

SHARED = 100
"""Events of a bulk that share one time: they are made within a millisecond."""


_ID = "{id}"
"""Stands for the id in a header block that many events share."""

S = TypeVar("S")


class ConnectArguments(ConnectKeywords, total=False):
    """The keyword arguments of ``jetspark.connect``, which methods of an application pass on."""

    auth: DriverAuth
    tls: TLSConfig | None
    on_event: OnEvent | None
    options: ConnectOptions | None


class AppClient:
    """Publishes the events of an application, from any program: ``async with app.connect(url) as orders``.

    A published event is validated, and gets an id, the time, and its cause: inside a handler the event being handled,
    elsewhere it starts a new correlation.
    """

    def __init__(
        self,
        app: AppSpec,
        servers: str | Iterable[str],
        options: ConnectArguments,
        *,
        decide_here: CommandOptions | None = None,
    ) -> None:
        self.app = app
        self._servers, self._options, self._decide_here = servers, options, decide_here
        self._here: LocalDecider | None = None
        self._nc: Client | None = None
        self._js: JetStream | None = None
        self._views: Views | None = None
        self._committer: Committer | None = None
        self._random_bits: Callable[[int], int] = random.SystemRandom().getrandbits
        self._ids = NewIds(self._random_bits)
        self._now_ns: Callable[[], int] = time_ns

    @classmethod
    def on(cls, app: HasSpec, js: JetStream) -> Self:
        """Wraps a JetStream context that the caller owns and closes; no ``async with`` needed."""
        client = cls(app.spec, (), {})
        client._js = js
        client._ask_loop()
        return client

    def _ask_loop(self) -> None:
        """Use the clock and the random generator of the loop: in a test, a seed then repeats a run, ids included."""
        self._random_bits = loop_rng().getrandbits
        self._ids = NewIds(self._random_bits)
        self._now_ns = nanoseconds_now()

    async def __aenter__(self) -> Self:
        self.app.catalogue.check()
        self._nc = await connect(self._servers, **self._options)
        self._js = self._nc.jetstream()
        self._ask_loop()
        if self._decide_here is not None:
            from jetspark.app.commands.local_decider import LocalDecider

            self._here = LocalDecider(self.app, self._js, self._decide_here)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nc, self._nc, self._js = self._nc, None, None
        here, self._here = self._here, None
        committer, self._committer = self._committer, None
        views, self._views = self._views, None
        failures: list[Exception] = []
        try:
            for part in (here, committer, views):
                try:
                    if part is not None:
                        await part.close()
                except Exception as raised:
                    failures.append(raised)
        except BaseException as interrupt:
            if nc is not None:
                await nc.__aexit__(type(interrupt), interrupt, None)
            raise
        if nc is not None:
            try:
                await nc.__aexit__(kind, error or next(iter(failures), None), trace)
            except Exception as raised:
                failures.append(raised)
        kept = failures.pop(0) if failures and error is None else None
        for failure in failures:  # the error of the block, or else the first one, is the one to see
            _logger.warning(
                "app %s: client not closed cleanly (%s: %s)", self.app.name, type(failure).__name__, failure
            )
        if kept is not None:
            raise kept

    @property
    def js(self) -> JetStream:
        """The JetStream context below, for everything that is not about events.

        Raises:
            UsageError: Outside of the ``async with`` block.
        """
        if self._js is None:
            raise UsageError("the app is not connected: write `async with app.connect(...) as client:`")
        return self._js

    @overload
    def view(self, projection: str) -> View[Any]: ...

    @overload
    def view(self, projection: type[FoldOf[S]]) -> View[S]: ...

    def view(self, projection: str | type[FoldOf[S]]) -> View[Any]:
        """Read a projection: ``await orders.view("order_status").get("o-1", at_least=ack.sequence)``.

        Args:
            projection: Its name, or its class, from which type checkers infer the type of the states.

        Raises:
            ConfigError: The application has no such projection, or several of this class.
            UsageError: Outside of the ``async with`` block.
        """
        if self._views is None:
            from jetspark.app.projections.views import Views

            self._views = Views(self.app, self.js)
        return self._views.view(projection)

    def entities(self, name: str) -> Entities:
        """The entities of one kind: ``async with shop.entities("orders").change("o-1") as change``.

        Raises:
            ConfigError: The application has no such kind.
            UsageError: Outside of the ``async with`` block.
        """
        return self._writer().entities(name)

    def workflow(self, name: str) -> WorkflowRuns:
        """The runs of a workflow: ``await shop.workflow("fulfilment").get("o-1")``.

        Raises:
            ConfigError: The application has no such workflow.
            UsageError: Outside of the ``async with`` block.
        """
        from jetspark.app.workflows.runs import WorkflowRuns

        spec = self.app.workflows.get(name)
        if spec is None:
            known = ", ".join(sorted(self.app.workflows)) or "none"
            raise ConfigError(f"workflow {name!r}: expected one of those of app {self.app.name!r}: {known}")
        return WorkflowRuns(self._writer(), spec)

    def _writer(self) -> EntityWriter:
        from jetspark.app.entities.committer import Committer
        from jetspark.app.entities.entities import EntityWriter

        if self._committer is None:
            from_leader = self.app.stream_config.allow_direct is False
            self._committer = Committer(self.js, self.app.stream, from_leader=from_leader)
        return EntityWriter(
            self.app, self.js, self._encode_as, lambda subject: self.new_id(), self.now, self._committer
        )

    def _encode_as(self, event: object, id: str, time: datetime.datetime | None) -> Encoded:
        return self.encode(event, id=_own_id(event) or id, time=time)

    def now(self) -> datetime.datetime:
        """The time; in a test, the test's."""
        return utc_now()

    def settings(self, bucket: str, *, scope: str = "", max_stale_s: float | None = None) -> Settings:
        """The settings of a bucket in memory: ``async with orders.settings("shop") as settings``.

        Args:
            scope: The owner of the settings, such as a tenant or a service; the first tokens of their keys.
            max_stale_s: Raise when the copy was not compared with the server for this long.

        Raises:
            ConfigError: The application declares no settings in this bucket.
            UsageError: Outside of the ``async with`` block of the client.
        """
        from jetspark.app.settings import Settings

        spec = self.app.settings.get(bucket)
        if spec is None:
            known = ", ".join(sorted(self.app.settings)) or "none"
            raise ConfigError(f"settings({bucket!r}): expected a bucket of settings of app {self.app.name!r}: {known}")
        js = self.js
        return Settings(spec, lambda: js.kv(bucket), scope=scope, max_stale_s=max_stale_s)

    @property
    def dead_letters(self) -> AppDeadLetters:
        """The application's dead letters, such as ``async for each in orders.dead_letters.list(key="o-1")``.

        Raises:
            UsageError: Outside of the ``async with`` block.
        """
        from jetspark.app.dead_letters.access import AppDeadLetters

        return AppDeadLetters(self.app, self.js)

    @property
    def retries(self) -> ScheduledRetries:
        """The application's scheduled retries: ``await orders.retries.now(handler="billing")``.

        Raises:
            UsageError: Outside of the ``async with`` block.
        """
        from jetspark.app.dead_letters.access import ScheduledRetries

        return ScheduledRetries(self.app, self.js)

    async def lag(self) -> LagReport:
        """How far the application's handlers and projections are behind, now.

        To measure again and again, with slopes, use a :class:`~jetspark.app.lag.LagMonitor`.

        Raises:
            StreamNotFound: The application was not applied to this server.
            UsageError: Outside of the ``async with`` block.
        """
        from jetspark.app.lag.monitor import lag

        return await lag(self.js, self.app)

    @property
    def timers(self) -> Timers:
        """Events that are published later: ``await orders.timers.set("reminder", event, after=3600)``.

        Raises:
            UsageError: Outside of the ``async with`` block.
            ConfigError: The application was declared without timers.
        """
        if self.app.owns_stream and not self.app.has_timers:
            raise ConfigError(f"app {self.app.name!r} has no timers: declare it with App(..., timers=True)")
        from_leader = self.app.stream_config.allow_direct is False
        return Timers(self.app.name, self.app.stream, self.js, self.encode, from_leader=from_leader)

    async def publish(
        self,
        event: object,
        *,
        id: str | None = None,
        time: datetime.datetime | None = None,
        correlation_id: str | None = None,
        causation_id: str | None = None,
        traceparent: str | None = None,
        expect: Expect | None = None,
        cancels: str | None = None,
        timeout: float | None = None,
    ) -> PubAck:
        """Store an event in the application's stream, and return when the stream has it.

        Args:
            id: Identifies the event; within the stream's duplicate window a second event with the same id is not
                stored. By default the result of ``event.event_id()``, or a new id.
            time: The event's time; by default now.
            correlation_id, causation_id, traceparent: What led to it. Inside of a handler they are those of the event
                that is being handled.
            expect: Store it only if this is true of the stream.
            cancels: The name of a timer that ends with this event, in one step; if the timer has fired,
                ``ctx.is_current_timer()`` returns False to the handler of its event.

        Raises:
            InvalidEvent: A field has a value its contract does not allow; nothing was sent.
            WrongLastSequence: ``expect`` was not true; nothing was stored.
            JetStreamUnavailable: No stream stores the subject, or the stream had no leader for all of ``timeout``;
                nothing was stored.
            ServerError: The server refused it; nothing was stored.
            ConfigError: The object is not an event, or the application does not declare its class: write
                ``@app.register`` above the class.
        """
        encoded = self.encode(
            event,
            id=id,
            time=time,
            correlation_id=correlation_id,
            causation_id=causation_id,
            traceparent=traceparent,
        )
        if cancels is not None:
            return await self.timers.publish_ending(cancels, encoded, expect=expect, timeout=timeout)
        return await self.js.publish(
            encoded.subject, encoded.data, headers=encoded.headers, expect=expect, timeout=timeout
        )

    async def call(
        self,
        command: Command,
        *,
        command_id: str | None = None,
        expected_version: int | None = None,
        correlation_id: str | None = None,
        timeout: float | None = None,
    ) -> CommandReply:
        """Have a command decided, and return when its events are stored.

        A worker decides it; or this program does, if it was connected with ``decide_here``.

        Args:
            command_id: Identifies the command: asked again with the same id, and the same fields, it is answered with
                the reply that was recorded, and not decided again. A new one if not given.
            expected_version: A sequence, such as that of a reply or of a view's entry: decide only if no event inside
                the boundary is newer. 0 expects an empty boundary.
            correlation_id: Defaults to that of the event being handled.
            timeout: Seconds to wait for the reply, the connection's ``request_timeout_s`` if not given. A request to a
                worker is sent once more after half of them.

        Raises:
            Refused: The decision was to refuse; ``reason`` says why.
            WrongVersion: The boundary is newer than ``expected_version``; nothing was stored.
            BoundaryConflict: Others wrote inside the boundary each time it was decided; nothing was stored.
            WorkersBusy, NoWorkers: Nothing was decided; call again in a moment.
            CommandInDoubt: No reply in time. Call again with the same ``command_id`` to learn the outcome.
            CommandFailed: The worker could not decide: its code or the events it reads are wrong.
            PermissionDenied: This user may not call the command, or with ``decide_here`` not read or store what it
                needs.
            InvalidEvent: A field has a value its type does not allow; nothing was sent.
            ConfigError: The application does not declare this command.
        """
        from jetspark.app.commands.caller import call_command

        return await call_command(
            self,
            command,
            command_id=command_id,
            expected_version=expected_version,
            correlation_id=correlation_id,
            timeout=timeout,
            here=self._here,
        )

    def encode(
        self,
        event: object,
        *,
        id: str | None = None,
        time: datetime.datetime | None = None,
        correlation_id: str | None = None,
        causation_id: str | None = None,
        traceparent: str | None = None,
    ) -> Encoded:
        """The message that :meth:`publish` would send, for publishing it some other way, such as in an atomic batch."""
        self.app.declared(event)
        cause = current_cause.get()
        if cause is not None:
            correlation_id = correlation_id or cause.correlation_id
            causation_id = causation_id or cause.id
            traceparent = traceparent or cause.traceparent
        return encode(
            event,
            id=id or _own_id(event) or self.new_id(),
            source=self.app.source,
            time=time or utc_now(),
            correlation_id=correlation_id,
            causation_id=causation_id,
            traceparent=child_of(traceparent, self._random_bits),
        )

    def new_id(self) -> str:
        """A new id: unique, and later than those before it."""
        return self._ids.new(self._now_ns())

    def new_ids(self, count: int) -> list[str]:
        """Several new ids."""
        return self._ids.several(self._now_ns(), count)

    def child_trace(self, cause: CauseLike | None) -> str:
        """A new span in the trace of the cause, or in a new trace."""
        return child_of(None if cause is None else cause.traceparent, self._random_bits)

    def bulk(self, **options: Unpack[FastPublisherKeywords]) -> BulkPublisher:
        """Publish many events at the server's own speed: ``async with orders.bulk() as bulk``.

        The options are those of ``js.fast_publisher``, but for ``message_ids``: events have ids. All that is published
        in one block has one trace.
        """
        return BulkPublisher(self, self.js.fast_publisher(**options))


class BulkPublisher:
    """Stores events in order, by fast ingest. Leaving the block waits until all of them are stored, each once.

    Each event has its id as ``Nats-Msg-Id``, so an event that is sent again is not stored twice within the stream's
    duplicate window.
    """

    def __init__(self, client: AppClient, publisher: FastPublisher) -> None:
        self._client, self._publisher = client, publisher
        self._trace: str | None = None

    async def __aenter__(self) -> Self:
        await self._publisher.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await self._publisher.__aexit__(kind, error, trace)

    async def publish(self, event: object, *, id: str | None = None) -> int:
        """Accept an event and return its position; waits while too much is pending.

        Raises:
            InvalidEvent: A field has a value its contract does not allow; it was not accepted.
            JetSparkError: The publisher gave up; it was not accepted.
        """
        [item] = self._items([event], id)
        return await self._publisher.publish_many([item])

    async def publish_many(self, events: Iterable[object] | AsyncIterable[object]) -> int:
        """Accept many events; returns the last position. The fastest way.

        Raises:
            InvalidEvent: An event breaks its contract; those before it are accepted.
            JetSparkError: The publisher gave up.
        """
        if isinstance(events, AsyncIterable):
            position = 0
            async for event in events:
                position = await self.publish(event)
            return position
        return await self._publisher.publish_many(self._items(events))

    def _items(self, events: Iterable[object], id: str | None = None) -> Iterator[Item]:
        """The messages of some events, one after the other.

        This is the inner loop of bulk publishing.
        """
        cause = current_cause.get()
        client, source = self._client, self._client.app.source
        correlation = None if cause is None else cause.correlation_id
        causation = None if cause is None else cause.id
        block = encode_headers({"Nats-Msg-Id": _ID, "traceparent": client.child_trace(cause)})
        head, _, tail = block.decode().partition(_ID)
        new_ids: Iterator[str] = iter(())
        contracts: dict[type, Contract] = {}
        for count, event in enumerate(events):
            if count % SHARED == 0:
                time = utc_now()
                new_ids = iter(client.new_ids(SHARED))
            kind = type(event)
            contract = contracts.get(kind)
            if contract is None:
                contract = contracts[kind] = client.app.declared(kind)
            own = id or (None if contract.id_of is None else contract.id_of(event))
            chosen = next(new_ids) if own is None else own
            subject, data = write_event(contract, event, chosen, source, time, correlation, causation)
            if own is not None:  # somebody else made it, and it may hold anything
                encode_headers({"Nats-Msg-Id": own})
            yield subject, data, f"{head}{chosen}{tail}".encode()


def _own_id(event: object) -> str | None:
    found = contract_of(event).id_of
    return None if found is None else found(event)
