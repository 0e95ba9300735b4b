"""The facade of an application: declarations above classes and functions, and doors to a server."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, Unpack

from jetspark.aio.connector import connect
from jetspark.app.client import AppClient, ConnectArguments
from jetspark.app.commands.command_spec import CommandSpec, Guarding
from jetspark.app.commands.reply_rule import check_inbox_prefixes
from jetspark.app.commands.wire import command_subject
from jetspark.app.contracts.catalogue import Catalogue, returned_types
from jetspark.app.contracts.compatibility import DEFAULT_MODE, Mode, check_mode
from jetspark.app.entities.entity_spec import EntitySpec, StateSubjects, Truth
from jetspark.app.handlers.handler_spec import (
    BatchHandlerOptions,
    HandlerFunction,
    HandlerOptions,
    HandlerSpec,
    WorkflowOptions,
    check_options,
)
from jetspark.app.layout import DUPLICATE_WINDOW_S, topology_of
from jetspark.app.projections.projection_spec import Invariant, ProjectionArguments, ProjectionSpec, make_spec
from jetspark.app.projections.windows import Window
from jetspark.app.provisioning import apply_topology, make_plan
from jetspark.app.signals import on_signals
from jetspark.app.spec import AppSpec
from jetspark.app.stored_events import SPARK_ROWS
from jetspark.app.timers import check_stream, timer_subjects
from jetspark.app.topology.declared import Topology, TopologyPlan
from jetspark.app.topology.names import advisory_stream, check_app_name
from jetspark.app.topology.retention import check_retention
from jetspark.app.workflows.command_events import CommandKinds, workflow_subjects
from jetspark.app.workflows.workflow_spec import RunRecord, WorkflowSpec
from jetspark.core.arguments import flag, instance, iterate, text, texts, unfit
from jetspark.core.subjects import overlaps
from jetspark.errors import ConfigError
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.kv import KVConfig

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.commands.command_runner import CommandOptions
    from jetspark.app.commands.command_spec import Command, CommandReply
    from jetspark.app.projections.live_options import LiveOptions
    from jetspark.app.settings import Setting, SettingsSpec
    from jetspark.app.telemetry import HandlerObserver

__all__ = ["App"]

STOP_TIMEOUT_S = 30.0
"""How long running handlers may take to finish when the application ends."""

STEPS_AT_A_TIME = 128
"""Steps of a workflow that run at a time. A step waits for its commit, and steps that wait are stored together: on one
replica and disk a batch takes as long for one as for a hundred."""

_Handler = TypeVar("_Handler", bound=HandlerFunction)
_Kind = TypeVar("_Kind", bound=type[Any])
Lifespan: TypeAlias = Callable[[], AsyncIterator[object]]
_Lifespan = TypeVar("_Lifespan", bound=Lifespan)
_Observer = TypeVar("_Observer", bound="HandlerObserver")
_is_version = re.compile(r"\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.+-]+)?").fullmatch


def _check_texts(**values: object) -> None:
    for name, value in values.items():
        if value is not None or name == "version":
            text(name, value)


def _several(what: str, values: Any, kind: str) -> list[Any]:
    """A list of several values. A single text is refused: it would be read as a list of its characters."""
    expected = f"a list of {kind}"
    if isinstance(values, str):
        raise unfit(what, values, expected)
    return list(iterate(what, values, expected))


class App:
    """An event application: one stream, its events, and the handlers, projections, commands, entities and workflows on
    it.

    Declaring does nothing yet: ``await app.run(url)`` starts its workers, ``app.connect(url)`` a client.

    Args:
        name: The application's name; part of the names of its dead-letter and retry streams and of its buckets.
        stream: The stream that stores its events; a :class:`StreamConfig` to give it limits, replicas and the like.
        subjects: What the stream stores. Without any (and without those of a ``StreamConfig``) the stream belongs to
            another application, and is only read.
        source: The ``source`` of its events, a URI reference; ``/<name>`` if not given.
        events: Types that it publishes without handling them; those of its handlers are known anyway. Events that are
            not declared are refused wherever they would be published.
        buckets: Further buckets it needs.
        compatibility: What a new version of an event is checked for, in the words of Confluent's registry.
        timers: Let the stream hold timers (:class:`Timers`).
        version: The application's version in service discovery; three numbers.
        advisories: A stream that stores the server's advisories already, such as one on ``$JS.EVENT.ADVISORY.>``: they
            are read there. Without, the application has a stream of its own for those about its consumers.
        inbox_prefixes: Inbox prefixes of command callers besides ``_INBOX``: the ``inbox_prefix`` that they connect
            with. Workers answer there, and on no other subject.
    """

    def __init__(
        self,
        name: str,
        *,
        stream: str | StreamConfig,
        subjects: Sequence[str] = (),
        source: str | None = None,
        events: Sequence[type[object]] = (),
        buckets: Sequence[KVConfig | str] = (),
        compatibility: Mode = DEFAULT_MODE,
        timers: bool = False,
        version: str = "0.0.0",
        advisories: str | None = None,
        inbox_prefixes: Sequence[str] = (),
    ) -> None:
        check_app_name(name)
        _check_texts(version=version, source=source, advisories=advisories)
        flag("timers", timers)
        subjects = texts("subjects", subjects, 'a list of subjects, such as ["orders.>"]')
        config = StreamConfig(name=stream) if isinstance(stream, str) else instance("stream", stream, StreamConfig)
        if config.subjects is not None and subjects:
            raise ConfigError(f"subjects={list(subjects)} with those of the StreamConfig: expected one of the two")
        if config.duplicate_window_s == 0:
            raise ConfigError(
                f"duplicate_window_s=0: the server takes it for its default, {DUPLICATE_WINDOW_S:g} s, and cannot do "
                "without; expected 0.1 or more, or leave it out"
            )
        stored = list(subjects or config.subjects or ())
        if timers:
            if not stored:
                raise ConfigError("timers=True: expected subjects=; timers are kept in a stream of the app's own")
            check_stream(config)
            stored.append(timer_subjects(name))
        if source == "":
            raise ConfigError("source='': expected a URI reference such as '/shop/orders', or nothing for the default")
        if not _is_version(version):
            raise ConfigError(f"version={version!r}: expected three numbers, such as '1.4.0'")
        self._spec = AppSpec(
            name=name,
            version=version,
            source=f"/{name}" if source is None else source,
            stream_config=dataclasses.replace(config, subjects=stored),
            compatibility=check_mode(compatibility),
            has_timers=timers,
            advisories=advisory_stream(name) if advisories is None else advisories,
            owns_advisories=advisories is None,
            inbox_prefixes=check_inbox_prefixes(inbox_prefixes),
            buckets=tuple(KVConfig.of(bucket) for bucket in _several("buckets", buckets, "KVConfig or names")),
        ).with_events(*_several("events", events, "types of events"))

    @classmethod
    def of(cls, spec: AppSpec) -> Self:
        """Return an application with the declarations of a spec."""
        app = object.__new__(cls)
        app._spec = spec
        return app

    @property
    def spec(self) -> AppSpec:
        """The declarations so far, as plain immutable data."""
        return self._spec

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def stream(self) -> str:
        """The name of the stream of its events."""
        return self._spec.stream

    @property
    def source(self) -> str:
        return self._spec.source

    @property
    def handlers(self) -> Mapping[str, HandlerSpec]:
        """The handlers by durable name."""
        return self._spec.handlers

    @property
    def projections(self) -> Mapping[str, ProjectionSpec]:
        return self._spec.projections

    @property
    def commands(self) -> Mapping[str, CommandSpec]:
        return self._spec.commands

    @property
    def workflows(self) -> Mapping[str, WorkflowSpec]:
        return self._spec.workflows

    @property
    def catalogue(self) -> Catalogue:
        """Every declared event type, including the ones that handlers and projections take and handlers return.

        Raises:
            ConfigError: A handler takes a class that is not an event, or two classes have one type and version.
        """
        return self._spec.catalogue

    def topology(self, only: Collection[str] = ()) -> Topology:
        """Everything it needs on the server.

        Args:
            only: Limit the result to these handlers, projections and commands; all by default.

        Raises:
            ConfigError: Something is declared twice, or a handler takes a class that is not an event.
        """
        return topology_of(self._spec, only)

    def _change(self, **fields: Any) -> None:
        self._spec = dataclasses.replace(self._spec, **fields)

    def _store_also(self, subject: str) -> None:
        self._spec = self._spec.with_subject(subject)

    def register(self, kind: _Kind) -> _Kind:
        """Make a type of event known that the application publishes: ``@app.register`` above its class, or a call.

        Raises:
            ConfigError: The class is not an event type, another class has the same type and version, or the
                application's stream does not store its subject.
        """
        self._spec = self._spec.with_events(kind)
        return kind

    def entities(
        self,
        name: str,
        *,
        state: object,
        truth: Truth = "state",
        events: Sequence[type[object]] = (),
        fold: type[object] | None = None,
    ) -> EntitySpec:
        """Declare a kind of entity: a state that is changed together with its events.

        A client changes them: ``async with client.entities("orders").change("o-1") as change``. States and events are
        in one stream, the application's. If it is called as that of a bucket, ``App(stream="KV_shop", ...)``, every
        NATS client can read the states as bucket ``shop``; else they are on ``states.<app>.<name>.<key>``.

        Args:
            name: The name of the kind, which is the first part of its keys.
            state: The type of a state, which msgspec encodes: a Struct, a dataclass, a dict.
            truth: Which one counts where state and events differ, because a program wrote only one of them: the
                ``"state"`` or the ``"events"``. ``jetspark reconcile`` compares both, and repairs by this.
            events: The event types that form the history of an entity.
            fold: A class that makes a state of them, with ``key(event)`` and ``apply(state, event)`` as that of a
                projection. With the state as the truth it may have ``correct(key, folded, state)``: it returns the
                events that lead from what the events make to the state.

        Raises:
            ConfigError: The stream is not the app's own, it would drop states (a limit of age, messages or bytes, or
                retention by acknowledgement), or the type or the name cannot be used.
        """
        if not self._spec.owns_stream:
            raise ConfigError(f"entities {name!r}: expected subjects=; they are kept in a stream of the app's own")
        subjects = StateSubjects.of(self.name, self.stream)
        spec = EntitySpec(name, state, subjects, truth=truth, events=events, fold=fold)
        if name in self._spec.entities:
            raise ConfigError(f"entities {name!r}: expected a name of its own; others have it")
        limit = self._spec.stream_config.max_messages_per_subject
        if limit is not None and limit > 0:
            raise ConfigError(
                f"entities with max_messages_per_subject={limit}: it would drop events of the same stream"
            )
        check_retention(self._spec.stream_config, f"entities {name!r}", "their states")
        self._store_also(f"{subjects.prefix}>")
        self._spec = self._spec.with_events(*events)
        self._change(entities={**self._spec.entities, name: spec})
        return spec

    def settings(self, bucket: KVConfig | str, **settings: Setting[Any]) -> SettingsSpec:
        """Declare settings and flags, kept in a bucket, with their types and defaults.

        ``app.settings("shop", currency=Setting(str, "USD"), new=Flag())``; programs read them with
        ``client.settings("shop")``.

        Raises:
            ConfigError: The bucket has settings already, or one of them has no name or type that can be stored.
        """
        from jetspark.app.settings import SettingsSpec

        spec = SettingsSpec(bucket, settings)
        if spec.bucket.bucket in self._spec.settings:
            raise ConfigError(f"settings of bucket {spec.bucket.bucket}: expected one declaration, with all of them")
        self._change(settings={**self._spec.settings, spec.bucket.bucket: spec})
        return spec

    def handler(
        self, *events: type[object], durable: str, **options: Unpack[HandlerOptions]
    ) -> Callable[[_Handler], _Handler]:
        """Declare a handler of one or more event types; the options are the fields of :class:`HandlerSpec`.

        Raises:
            ConfigError: An option is unknown or has an invalid value, or another handler has the name.
        """
        check_options(durable, options, HandlerOptions)

        def declare(function: _Handler) -> _Handler:
            self._declare(HandlerSpec(function=function, events=events, durable=durable, **options))
            return function

        return declare

    def batch_handler(
        self,
        *events: type[object],
        durable: str,
        batch: int = 500,
        batch_wait_s: float = 0.2,
        **options: Unpack[BatchHandlerOptions],
    ) -> Callable[[_Handler], _Handler]:
        """Declare a handler that is called with a list of events: one commit for many, then all are acknowledged.

        One batch runs at a time, with its events in stream order. A failed batch acknowledges nothing: its events are
        tried again one by one, so that only an event that cannot succeed ends in the dead letters. Order does not hold
        through retries. The function takes the objects that lifespans yield, but no context, and returns nothing.

        Raises:
            ConfigError: An option is unknown or has an invalid value, or another handler has the name.
        """
        check_options(durable, options, BatchHandlerOptions)

        def declare(function: _Handler) -> _Handler:
            if returned := returned_types(function):
                names = ", ".join(kind.__name__ for kind in returned)
                raise ConfigError(
                    f"batch handler {durable!r}: its events cannot be published: it returns {names}; use app.handler"
                )
            spec = HandlerSpec(
                function=function,
                events=events,
                durable=durable,
                batch=batch,
                batch_wait_s=batch_wait_s,
                in_order=False,
                concurrency=batch,
                **options,
            )
            self._declare(spec)
            return function

        return declare

    def projection(
        self,
        name: str,
        *,
        events: Sequence[type[object]],
        bucket: KVConfig | str,
        version: int = 1,
        invariants: Sequence[Invariant] = (),
        window: Window | None = None,
        lookups: Sequence[str] = (),
        filtered: bool = False,
        unique_ids: int | None = None,
    ) -> Callable[[_Kind], _Kind]:
        """Declare state that events are folded into: ``@app.projection(...)`` above a class with ``key`` and ``apply``.

        ``key(self, event)`` returns the key that an event concerns: a text, several, or None for none; a class without
        it uses the key of the event's type (``key=`` of the event). ``apply(self, state, event)`` is pure, and returns
        the new state or ``DELETE``; the state is None for a new key. A third parameter receives the key. The type of
        ``state`` is the type that it is decoded into.

        Args:
            events: The types it is made of.
            bucket: The bucket with its states, one key for each of its own.
            version: The fold's version. A changed fold needs a new version and a rebuild.
            invariants: Functions of a state that return a false value (``False``, ``0``, ``""``) or raise for an
                invalid state. None passes.
            window: Have a state for each key and hour, or the like.
            lookups: Projections declared above, whose state of the same key ``apply(self, state, event, lookup)`` gets
                as ``lookup["<name>"]``: as it was before the event, whichever engine folds.
            filtered: Have the server pick out the events. By default all of an app's own stream is read, and the rest
                is left out here, which is faster unless the events are few among many.
            unique_ids: Fold an event that is stored more than once only the first time: each key keeps the ids of this
                many of its last events, 16 bytes each in the headers of its value. Choose more than a key has events
                in the longest time after which a producer may store an event again. By default only the stream's
                duplicate window protects.

        Raises:
            ConfigError: The class is not a fold, or the bucket or the name has another use already.
        """

        def declare(kind: _Kind) -> _Kind:
            options = ProjectionArguments(
                events=events,
                bucket=bucket,
                version=version,
                invariants=invariants,
                window=window,
                lookups=self._looked_up(name, lookups),
                filtered=filtered,
                unique_ids=unique_ids,
            )
            self._add_projection(make_spec(name, kind, options))
            return kind

        return declare

    def _looked_up(self, name: str, lookups: Sequence[str]) -> list[ProjectionSpec]:
        texts(f"projection {name!r}: lookups", lookups, "a list of names of projections")
        unknown = sorted(set(lookups) - self.projections.keys())
        if unknown:
            known = ", ".join(sorted(self.projections)) or "none"
            raise ConfigError(f"projection {name!r}: lookups={unknown}: expected some that are declared above: {known}")
        return [self.projections[each] for each in lookups]

    def _add_projection(self, spec: ProjectionSpec) -> None:
        if spec.name in self.projections:
            raise ConfigError(f"projection {spec.name!r}: expected a name of its own; another projection has it")
        if spec.name in self.handlers:
            raise ConfigError(f"projection {spec.name!r}: expected a name of its own; a handler has it")
        taken = {other.bucket.bucket: other.name for other in self.projections.values()}
        if spec.bucket.bucket in taken:
            raise ConfigError(
                f"projection {spec.name!r}: bucket {spec.bucket.bucket} is that of {taken[spec.bucket.bucket]!r}: "
                "expected one of its own"
            )
        self._change(projections={**self.projections, spec.name: spec})

    def command(
        self,
        name: str,
        *,
        snapshot: str | None = None,
        remember_s: float = 3600.0,
        guard: Guarding = "auto",
        tries: int = 20,
        max_past: int = 100_000,
    ) -> Callable[[_Kind], _Kind]:
        """Declare a command: ``@app.command("orders.place")`` above a class below :class:`Command`.

        The options are the fields of :class:`CommandSpec`. Any number of workers serve it; callers use
        ``AppClient.call``.

        Raises:
            ConfigError: The class is not a command, the name is taken, or the stream would store the requests.
        """

        def declare(kind: _Kind) -> _Kind:
            spec = CommandSpec(
                name=name,
                kind=kind,
                snapshot=snapshot,
                remember_s=remember_s,
                guard=guard,
                tries=tries,
                max_past=max_past,
            )
            self._declare_command(spec)
            return kind

        return declare

    def workflow(
        self,
        name: str,
        *,
        key: str | Callable[[Any], object],
        events: Sequence[type[object]] | None = None,
        version: int = 1,
        **options: Unpack[WorkflowOptions],
    ) -> Callable[[_Kind], _Kind]:
        """Declare a workflow: ``@app.workflow(...)`` above a class with ``def react(self, state, event)``.

        ``react`` is pure, and returns a :class:`Decision`: the run's new state, events, commands to send, timers to set
        or cancel, and whether the run is over; or None if the event does not matter. The state is None for the first
        event of a run. The answer to a command comes back as :class:`CommandAnswered`. Each step is stored whole or not
        at all. The type of ``state`` is the type that it is decoded into.

        Args:
            name: The workflow's name, which is also its handler's durable; its runs are entities of this name.
            key: The field of the events that contains their run's key, or a function of an event.
            events: The event types that the workflow takes; the types at ``event`` of ``react``, if not given.
            version: The version of the state. An older state is passed to ``def upcast(self, state, version)``, if the
                class has it.
            options: Options of a handler: concurrency (128 by default), retry, partitions and so on.

        Raises:
            ConfigError: The class is not a workflow, or the stream would drop the states of runs; see ``app.entities``.
        """
        check_options(name, options, WorkflowOptions)

        def declare(kind: _Kind) -> _Kind:
            from jetspark.app.workflows.workflow_handlers import handler_of

            spec = WorkflowSpec(name, kind, app=self.name, key=key, events=events, version=version)
            self.entities(name, state=RunRecord)
            if spec.command_kinds is not None:
                self._declare_sender(name, spec.command_kinds, options)
            mine: WorkflowOptions = {"concurrency": STEPS_AT_A_TIME, **options}
            function = handler_of(lambda: self._spec, spec)
            self._declare(HandlerSpec(function=function, events=spec.events, durable=name, key=spec.lane_key, **mine))
            self._change(workflows={**self.workflows, name: spec})
            return kind

        return declare

    def _declare_sender(self, workflow: str, kinds: CommandKinds, options: WorkflowOptions) -> None:
        """Have a workflow's commands stored and sent, in the order of their runs."""
        from jetspark.app.workflows.workflow_handlers import SENDING_TIMEOUT_S, sender_of

        self._store_also(workflow_subjects(self.name))

        def call(js: JetStream, command: Command, command_id: str, timeout: float) -> Awaitable[CommandReply]:
            return AppClient.on(self._spec, js).call(command, command_id=command_id, timeout=timeout)

        function = sender_of(lambda: self._spec, workflow, kinds, call)
        mine: WorkflowOptions = {**options, "timeout": SENDING_TIMEOUT_S}
        self._declare(HandlerSpec(function=function, events=(kinds.sent,), durable=f"{workflow}-commands", **mine))

    def lifespan(self, function: _Lifespan) -> _Lifespan:
        """Declare what handlers need: an async generator that yields one object, or several as a tuple.

        A handler gets one by naming its type: ``async def bill(event: OrderPaid, bank: Bank)``. The part after the
        ``yield`` runs when the workers have ended.
        """
        if not inspect.isasyncgenfunction(function):
            raise ConfigError("lifespan: expected an async function that yields once")
        self._change(lifespans=(*self._spec.lifespans, function))
        return function  # type: ignore[return-value]  # the check has narrowed it

    def observe(self, observer: _Observer) -> _Observer:
        """Add an observer of handlers, in every process that runs them: ``app.observe(Metrics())``.

        Declare it before the application runs; see :class:`HandlerObserver`.
        """
        self._change(observers=(*self._spec.observers, observer))
        return observer

    async def plan(self, servers: str | Iterable[str], **options: Unpack[ConnectArguments]) -> TopologyPlan:
        """The difference between the declaration and the server; nothing is changed.

        The options are those of :func:`jetspark.connect`. ``str()`` of the plan is the difference, in lines.
        """
        async with connect(servers, **options) as nc:
            return await make_plan(nc.jetstream(), self._spec)

    async def apply(
        self, servers: str | Iterable[str], *, allow: bool = False, **options: Unpack[ConnectArguments]
    ) -> TopologyPlan:
        """Create or update everything that the application declares, and return the steps taken. A second call takes
        none.

        Args:
            allow: Also make changes that can lose something. Changes that the server does not support are refused all
                the same.

        Raises:
            TopologyRefused: A change is destructive and not allowed, or impossible; nothing was done.
        """
        async with connect(servers, **options) as nc:
            return await apply_topology(nc.jetstream(), self._spec, allow=allow)

    def connect(
        self,
        servers: str | Iterable[str] = "nats://127.0.0.1:4222",
        *,
        decide_here: bool | CommandOptions = False,
        **options: Unpack[ConnectArguments],
    ) -> AppClient:
        """A client that publishes its events: ``async with app.connect(url) as orders``.

        Args:
            decide_here: Decide commands in this program instead of asking a worker: True, or options. It needs the
                permissions of a worker on the stream.
            options: Options of :func:`jetspark.connect`.

        Raises:
            ConfigError: ``decide_here`` is neither True, nor False, nor :class:`CommandOptions`.
        """
        from jetspark.app.commands.command_runner import CommandOptions

        if isinstance(decide_here, bool):
            return AppClient(self._spec, servers, options, decide_here=CommandOptions() if decide_here else None)
        instance("decide_here", decide_here, CommandOptions, "True, False, or CommandOptions(...)")
        return AppClient(self._spec, servers, options, decide_here=decide_here)

    async def run(
        self,
        servers: str | Sequence[str] = "nats://127.0.0.1:4222",
        *,
        only: Collection[str] = (),
        stop_timeout: float = STOP_TIMEOUT_S,
        apply: bool = False,
        live: LiveOptions | None = None,
        serving: CommandOptions | None = None,
        signals: bool = True,
        **options: Unpack[ConnectArguments],
    ) -> None:
        """Run handlers, projections and commands until cancelled, or until SIGTERM or Ctrl-C; then end in order.

        To end, the workers stop pulling, finish running handlers where possible, and return the other messages to the
        server in order. Projections store the events they have read. Commands that have arrived are decided and
        answered. None of this waits longer than a few seconds for a server that does not answer.

        Args:
            only: Run these handlers, projections and commands; all by default. Only their streams, buckets and
                consumers are compared with the server.
            stop_timeout: Seconds that running handlers have to finish; after that they are cancelled.
            apply: Make what the application declares, as :meth:`apply` does, before it starts.
            live: Options of live projections.
            serving: Options of serving commands.
            signals: End at SIGTERM and Ctrl-C. The program's own handlers of these signals are called as well, and are
                in place again afterwards; several applications in one process all end. False leaves signals to the
                program, which ends this by cancelling it. Outside of the main thread it is always so.
            options: Options of ``jetspark.connect``.

        Raises:
            TopologyDrift: The server is not as the application declares; the message is the difference.
            TopologyRefused: With ``apply``: the server cannot be made to match without a loss.
            PermissionDenied: This user has no permission for a subject that a worker needs.
            ConfigError: A handler wants something that no lifespan yields.
        """
        flag("signals", signals)
        ended = asyncio.Event()
        with on_signals(ended) if signals else nullcontext():
            # Imported here: declaring an application needs no workers, and this takes long enough to be interrupted.
            from jetspark.app.workers import run_app

            await run_app(
                self._spec,
                servers,
                only=only,
                stop_timeout=stop_timeout,
                apply=apply,
                live=live,
                serving=serving,
                ended=ended,
                **options,
            )

    def _declare(self, spec: HandlerSpec) -> None:
        if spec.durable in ("projections", SPARK_ROWS):
            raise ConfigError(
                f"durable={spec.durable!r}: expected another name; the dead letters of projections, or of rows that "
                "Spark writes, have this one"
            )
        if spec.durable in self.handlers:
            raise ConfigError(f"durable={spec.durable!r}: expected a name of its own; another handler has it")
        if spec.durable in self.projections:
            raise ConfigError(f"durable={spec.durable!r}: expected a name of its own; a projection has it")
        if spec.filtered is False and not self._spec.keeps_what_is_acknowledged:
            raise ConfigError(
                f"handler {spec.durable!r}: filtered=False with retention={self._spec.stream_config.retention!r}: "
                "passing by messages of others would remove them. Expected retention='limits', or filtered=True"
            )
        self._change(handlers={**self.handlers, spec.durable: spec})

    def _declare_command(self, spec: CommandSpec) -> None:
        if spec.name in {*self.commands, *self.handlers, *self.projections}:
            raise ConfigError(f"command {spec.name!r}: expected a name of its own; another declaration has it")
        subject = command_subject(self.name, spec.name)
        stored = next((each for each in self._spec.subjects if overlaps(subject, each)), None)
        if stored is not None:
            raise ConfigError(
                f"command {spec.name!r} is sent to {subject!r}, which stream {self.stream} stores ({stored!r}): the "
                "stream would answer in place of a worker. Give the stream narrower subjects"
            )
        self._change(commands={**self.commands, spec.name: spec})

    def __repr__(self) -> str:
        return f"<App {self.name}: {len(self.handlers)} handlers on stream {self.stream}>"
