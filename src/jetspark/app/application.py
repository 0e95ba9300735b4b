"""What an application declares: its stream, its events and its handlers. Nothing here talks to a server."""

from __future__ import annotations

import asyncio
import inspect
import math
import typing
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack

from jetspark.app.commands.declaring import CommandSpec, Guarding
from jetspark.app.connecting import ConnectArguments
from jetspark.app.declarations import MARKER_TTL_S, Declarations, returned_types
from jetspark.app.handlers.partitions import MAX_PARTITIONS, partition_transforms
from jetspark.app.handlers.retry import Breaker, RetryPolicy
from jetspark.app.handlers.signatures import check_events, check_function, check_key
from jetspark.app.projections.declaring import Invariant, ProjectionSpec, make_spec
from jetspark.app.projections.windows import Window
from jetspark.app.signals import on_signals
from jetspark.app.topology.names import check_app_name, dead_letter_stream, handler_bucket, retry_stream
from jetspark.app.workflows.commands import CommandKinds, workflow_subjects
from jetspark.app.workflows.declaring import RunRecord, WorkflowSpec
from jetspark.core.arguments import flag, instance, suggestion, text, texts, unfit
from jetspark.core.numbers import rate, seconds, seconds_above_0, whole
from jetspark.errors import ConfigError
from jetspark.jetstream.kv import KVConfig

if TYPE_CHECKING:
    from jetspark.app.commands.running import CommandOptions
    from jetspark.app.projections.live import LiveOptions
    from jetspark.app.telemetry import HandlerObserver

STOP_TIMEOUT_S = 30.0
"""How long handlers may finish when the application is to end."""

MIN_ACK_WAIT_S = 0.001
"""Below, an event comes again before a worker has looked at it, for ever."""

STEPS_AT_A_TIME = 128
"""Of a workflow. A step waits for its commit, and steps that wait are stored together: on one replica and disk a batch
takes as long for one as for a hundred."""

REMEMBER_S = 7 * 86400.0
"""How long it is known which effects were done."""

__all__ = ["App", "BatchHandlerOptions", "HandlerOptions", "HandlerSpec", "Idempotence"]

Idempotence: TypeAlias = Literal["none", "transaction"]
HandlerFunction: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
_Handler = TypeVar("_Handler", bound=HandlerFunction)
_Kind = TypeVar("_Kind", bound=type[Any])
Lifespan: TypeAlias = Callable[[], AsyncIterator[Any]]
_Lifespan = TypeVar("_Lifespan", bound=Lifespan)
_Observer = TypeVar("_Observer", bound="HandlerObserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """One handler as it was declared: what it reads, how it runs, and what happens when it fails."""

    function: HandlerFunction
    events: tuple[type, ...]
    """The event types it handles, versions below theirs included."""
    durable: str
    """The name of its consumer, and its own."""
    key: str | Callable[[Any], str] | None = None
    """Field or function that says which events must stay in order; None takes the event's own key."""
    in_order: bool = True
    """Events of one key run one after the other."""
    concurrency: int = 16
    rate: float | None = None
    """Starts each second; None is no limit."""
    burst: int | None = None
    timeout: float = 30.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    dead_letter: bool = True
    """Failures end in the dead letters; without, they are logged and dropped."""
    idempotent: Idempotence = "none"
    bucket: str | None = None
    """Of ``idempotent="transaction"``: the bucket of its effects."""
    remember_s: float = REMEMBER_S
    """How long results of ``ctx.once`` and marks of transactions are kept: an event that comes again later, such as a
    letter that is redriven after that time, has its effects repeated."""
    breaker: Breaker | None = None
    ack_wait_s: float = 30.0
    max_messages: int = 1024
    """Messages held at a time: running, waiting for their turn, or for a retry."""
    max_bytes: int = 64 << 20
    """Bytes of those messages; one message is always let in."""
    partitions: int | None = None
    """Parts that its keys are divided into, each with one worker at a time, so that order holds across processes."""
    takeover_s: float = 5.0
    """With partitions: how long after a worker fell silent another one takes its partitions; 1 or more."""
    filtered: bool | None = None
    """Whether the server picks out its events. If not, it reads all of the stream, and passes by the rest; by default
    where it takes events of several subjects with wildcards from the app's own stream."""
    batch: int | None = None
    """Events in one call, at most; None is a handler of single events."""
    batch_wait_s: float = 0.2
    """How long a batch that is not full waits for more."""

    def __post_init__(self) -> None:
        check_app_name(self.durable)
        where = f"handler {self.durable!r}"
        check_events(where, self.events)
        check_function(where, self.function, self.events, is_batch=self.batch is not None)
        if self.key is not None:
            check_key(where, self.key, self.events)
        for name in ("concurrency", "max_messages", "max_bytes"):
            whole(name, getattr(self, name))
        for name in ("max_messages", "max_bytes"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 2 or more, since one is kept for retries")
        for name in ("timeout", "ack_wait_s"):
            seconds_above_0(name, getattr(self, name))
        if self.ack_wait_s < MIN_ACK_WAIT_S:
            raise ConfigError(f"ack_wait_s={self.ack_wait_s!r}: expected seconds, {MIN_ACK_WAIT_S:g} or more")
        for name in ("remember_s", "takeover_s", "batch_wait_s"):
            seconds(name, getattr(self, name))
        for name in ("in_order", "dead_letter"):
            flag(name, getattr(self, name))
        if self.filtered is not None:
            flag("filtered", self.filtered)
        instance("retry", self.retry, RetryPolicy, "a Retry")
        if self.breaker is not None:
            instance("breaker", self.breaker, Breaker, "a Breaker, or None for none")
        if self.rate is not None:
            rate("rate", self.rate, instead="or None for no limit")
        if self.burst is not None:
            whole("burst", self.burst, instead="or None for those of one second")
        # A word that is none would mean effects that happen twice.
        if self.idempotent not in typing.get_args(Idempotence):
            raise unfit("idempotent", self.idempotent, "'none' or 'transaction'")
        if self.bucket is not None:
            text("bucket", self.bucket, "the name of a bucket")
        if not MARKER_TTL_S <= self.remember_s < math.inf:
            raise ConfigError(f"remember_s={self.remember_s!r}: expected seconds, {MARKER_TTL_S:g} or more")
        if self.partitions is not None:
            self._check_partitions(self.partitions)
        if self.batch is not None:
            if (
                isinstance(self.batch, bool)
                or not isinstance(self.batch, int)
                or not 1 <= self.batch <= self.max_messages
            ):
                raise ConfigError(f"batch={self.batch!r}: expected 1 to max_messages={self.max_messages}")
            if self.in_order or self.idempotent != "none":
                raise ConfigError("a batch handler takes in_order=False and idempotent='none'")
        if self.idempotent == "transaction" and self.bucket is None:
            raise ConfigError("idempotent='transaction': expected bucket=, the bucket of its effects")

    def _check_partitions(self, partitions: int) -> None:
        if self.filtered is False:
            raise ConfigError(
                "filtered=False with partitions=: expected one of the two; copies are of its events alone"
            )
        whole("partitions", partitions, high=MAX_PARTITIONS, instead="or None for none")
        if not self.in_order or self.batch is not None:
            raise ConfigError("partitions= keeps the order of keys: expected in_order=True, and no batch handler")
        if not 1 <= self.takeover_s < math.inf:
            raise ConfigError(f"takeover_s={self.takeover_s!r}: expected seconds, 1 or more")
        if self.max_messages < 16 * partitions:
            raise ConfigError(
                f"max_messages={self.max_messages} with partitions={partitions}: expected {16 * partitions} or more, "
                "since one worker may read all of them"
            )
        # Raises where the key is not in the subject: while the program starts, and not in the server.
        partition_transforms("app", self.durable, partitions, self.events, self.key)

    @property
    def name(self) -> str:
        return self.durable


class BatchHandlerOptions(TypedDict, total=False):
    """What ``app.batch_handler`` takes besides its events, its name and its size: fields of :class:`HandlerSpec`."""

    rate: float | None
    burst: int | None
    timeout: float
    retry: RetryPolicy
    dead_letter: bool
    breaker: Breaker | None
    ack_wait_s: float
    max_messages: int
    max_bytes: int
    filtered: bool | None


class HandlerOptions(BatchHandlerOptions, total=False):
    """What ``app.handler`` takes besides its events and its name: fields of :class:`HandlerSpec`."""

    key: str | Callable[[Any], str] | None
    in_order: bool
    concurrency: int
    idempotent: Idempotence
    bucket: str | None
    remember_s: float
    partitions: int | None
    takeover_s: float


class WorkflowOptions(TypedDict, total=False):
    """What ``app.workflow`` takes besides: fields of :class:`HandlerSpec`."""

    concurrency: int
    timeout: float
    retry: RetryPolicy
    rate: float | None
    burst: int | None
    ack_wait_s: float
    max_messages: int
    max_bytes: int
    partitions: int | None
    takeover_s: float
    breaker: Breaker | None
    filtered: bool | None


def _check_options(durable: str, options: Mapping[str, Any], known: type) -> None:
    names = known.__required_keys__ | known.__optional_keys__  # type: ignore[attr-defined]  # a TypedDict
    unknown = sorted(set(options) - names)
    if unknown:
        meant = suggestion(unknown[0], names)
        raise ConfigError(
            f"handler {durable!r}: {', '.join(unknown)}: expected some of {', '.join(sorted(names))}{meant}"
        )


class App(Declarations):
    """An event application: one stream, its events, and what is done with them.

    Declaring does nothing yet: ``await app.run(url)`` starts its workers, ``app.connect(url)`` a client.

    Args:
        name: Of the application; part of the names of its dead-letter and retry streams and of its buckets.
        stream: The stream that stores its events; a :class:`StreamConfig` to give it limits, replicas and the like.
        subjects: What the stream stores. Without any (and without those of a ``StreamConfig``) the stream belongs to
            another application, and is only read.
        source: The ``source`` of its events, a URI reference; ``/<name>`` if not given.
        events: Types that it publishes without handling them; those of its handlers are known anyway. Events that are
            not declared are refused wherever they would be published.
        buckets: Further buckets it needs.
        compatibility: What a new version of an event is checked for, in the words of Confluent's registry.
        timers: Let the stream hold timers (:class:`Timers`), too.
        version: Of the application, as its workers tell those who look for services; three numbers.
        advisories: A stream that stores the server's advisories already, such as one on ``$JS.EVENT.ADVISORY.>``: they
            are read there. Without, the application has a stream of its own for those about its consumers.
        inbox_prefixes: Where callers of commands have their inboxes, besides ``_INBOX``: the ``inbox_prefix`` that they
            connect with. Workers answer there, and on no other subject.
    """

    @property
    def dead_letter_stream(self) -> str:
        return dead_letter_stream(self.name)

    @property
    def retry_stream(self) -> str:
        return retry_stream(self.name)

    @property
    def handler_bucket(self) -> str:
        return handler_bucket(self.name)

    def handler(self, *events: type, durable: str, **options: Unpack[HandlerOptions]) -> Callable[[_Handler], _Handler]:
        """Declare a handler of one or more event types; the options are the fields of :class:`HandlerSpec`.

        Raises:
            ConfigError: There is no such option, or its value is wrong, or another handler has the name.
        """
        _check_options(durable, options, HandlerOptions)

        def declare(function: _Handler) -> _Handler:
            self._declare(HandlerSpec(function=function, events=events, durable=durable, **options))
            return function

        return declare

    def batch_handler(
        self,
        *events: type,
        durable: str,
        batch: int = 500,
        batch_wait_s: float = 0.2,
        **options: Unpack[BatchHandlerOptions],
    ) -> Callable[[_Handler], _Handler]:
        """Declare a handler that is called with a list of events: one commit for many, then all are acknowledged.

        One batch runs at a time, with its events in the order of the stream. A batch that fails acknowledges nothing:
        its events are tried again one by one, so that one that cannot succeed ends in the dead letters alone. So order
        does not hold through retries. It gets what lifespans made, and no context, and returns nothing.

        Raises:
            ConfigError: There is no such option, or its value is wrong, or another handler has the name.
        """
        _check_options(durable, options, BatchHandlerOptions)

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
        events: Sequence[type],
        bucket: KVConfig | str,
        version: int = 1,
        invariants: Sequence[Invariant] = (),
        window: Window | None = None,
        lookups: Sequence[str] = (),
        filtered: bool = False,
        unique_ids: int | None = None,
    ) -> Callable[[_Kind], _Kind]:
        """Declare state that events are folded into: ``@app.projection(...)`` above a class with ``key`` and ``apply``.

        ``key(self, event)`` says which key an event concerns: a text, several, or None for none; in a class without it,
        the key of an event is that of its type (``key=`` of the event). ``apply(self, state,
        event)`` is pure, and returns the new state or ``DELETE``; the state is None for a key that has none. With
        a third parameter it is told the key. A type for ``state`` is what it is decoded into.

        Args:
            events: The types it is made of.
            bucket: Where its state is kept, one key for each of its own.
            version: Of the fold. Another fold is another version, and has to be rebuilt.
            invariants: Functions of a state that return what is false (``False``, ``0``, ``""``), or raise, if it must
                not be. None passes.
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
            ConfigError: The class is no fold, or the bucket or the name has another use already.
        """

        def declare(kind: _Kind) -> _Kind:
            options = {
                "events": events,
                "bucket": bucket,
                "version": version,
                "invariants": invariants,
                "window": window,
                "lookups": self._looked_up(name, lookups),
                "filtered": filtered,
                "unique_ids": unique_ids,
            }
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
        self.projections[spec.name] = spec

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
            ConfigError: The class is no command, the name is taken, or the stream would store the requests.
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
        key: str | Callable[[Any], Any],
        events: Sequence[type] | None = None,
        version: int = 1,
        **options: Unpack[WorkflowOptions],
    ) -> Callable[[_Kind], _Kind]:
        """Declare a workflow: ``@app.workflow(...)`` above a class with ``def react(self, state, event)``.

        ``react`` is pure, and returns a :class:`Decision`: the run's new state, events, commands to send, timers to set
        or cancel, and whether the run is over; or None if the event does not matter. The state is None for the first
        event of a run. What becomes of a command comes back as :class:`CommandAnswered`. Each step is stored whole or
        not at all. The type of ``state`` is what it is decoded into.

        Args:
            name: Of the workflow; its handler has it as its durable, and its runs are entities of this name.
            key: The field of the events that says which run they belong to, or a function of an event.
            events: What it reacts to; the types at ``event`` of ``react``, if not given.
            version: Of the state. An older one is given to ``def upcast(self, state, version)``, if there is one.
            options: Those of a handler: concurrency (128 by default), retry, partitions and so on.

        Raises:
            ConfigError: The class is no workflow, or the stream would drop the states of runs; see ``app.entities``.
        """
        _check_options(name, options, WorkflowOptions)

        def declare(kind: _Kind) -> _Kind:
            from jetspark.app.workflows.running import handler_of

            spec = WorkflowSpec(name, kind, app=self.name, key=key, events=events, version=version)
            self.entities(name, state=RunRecord)
            if spec.command_kinds is not None:
                self._declare_sender(name, spec.command_kinds, options)
            mine: WorkflowOptions = {"concurrency": STEPS_AT_A_TIME, **options}
            function = handler_of(self, spec)
            self._declare(HandlerSpec(function=function, events=spec.events, durable=name, key=spec.lane_key, **mine))
            self.workflows[name] = spec
            return kind

        return declare

    def _declare_sender(self, workflow: str, kinds: CommandKinds, options: WorkflowOptions) -> None:
        """Have a workflow's commands stored and sent, in the order of their runs."""
        from jetspark.app.workflows.sending import SENDING_TIMEOUT_S, sender_of

        self._store_also(workflow_subjects(self.name))
        function = sender_of(self, workflow, kinds)
        mine: WorkflowOptions = {**options, "timeout": SENDING_TIMEOUT_S}
        self._declare(HandlerSpec(function=function, events=(kinds.sent,), durable=f"{workflow}-commands", **mine))

    def lifespan(self, function: _Lifespan) -> _Lifespan:
        """Declare what handlers need: an async generator that yields one object, or several as a tuple.

        A handler gets one by naming its type: ``async def bill(event: OrderPaid, bank: Bank)``. The part after the
        ``yield`` runs when the workers have ended.
        """
        if not inspect.isasyncgenfunction(function):
            raise ConfigError("lifespan: expected an async function that yields once")
        self.lifespans.append(function)
        return function  # type: ignore[return-value]  # the check has narrowed it

    def observe(self, observer: _Observer) -> _Observer:
        """Have an observer told what handlers do, in every process that runs them: ``app.observe(Metrics())``.

        It has to be declared before the application runs; see :class:`HandlerObserver`.
        """
        self.observers.append(observer)
        return observer

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

        Ending: nothing more is pulled, what runs may finish, the rest is given back to the server in its order.
        Projections store what they have read. Commands that have arrived are decided and answered. A server that is
        away is waited for in none of this for longer than a few seconds.

        Args:
            only: Names of the handlers, projections and commands to run; all if there are none. Only what these need is
                compared with the server.
            stop_timeout: Seconds that running handlers have to finish; after that they are cancelled.
            apply: Make what the application declares, as :meth:`apply` does, before it starts.
            live: How projections are run.
            serving: How commands are served.
            signals: End at SIGTERM and Ctrl-C. The program's own handlers of these signals are called as well, and are
                in place again afterwards; several applications in one process all end. False leaves signals to the
                program, which ends this by cancelling it. Outside of the main thread it is always so.
            options: Those of ``jetspark.connect``.

        Raises:
            TopologyDrift: The server is not as the application declares; the message is the difference.
            TopologyRefused: With ``apply``: the server cannot be made so without a loss.
            PermissionDenied: This user may not use a subject that a worker cannot do without.
            ConfigError: A handler wants something that no lifespan yields.
        """
        flag("signals", signals)
        ended = asyncio.Event()
        with on_signals(ended) if signals else nullcontext():
            # Imported here: declaring an application needs no workers, and this takes long enough to be interrupted.
            from jetspark.app.running import run_app

            await run_app(
                self,
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
        if spec.durable == "projections":
            raise ConfigError("durable='projections': expected another name; the letters of projections have this one")
        if spec.durable in self.handlers:
            raise ConfigError(f"durable={spec.durable!r}: expected a name of its own; another handler has it")
        if spec.durable in self.projections:
            raise ConfigError(f"durable={spec.durable!r}: expected a name of its own; a projection has it")
        if spec.filtered is False and not self.keeps_what_is_acknowledged:
            raise ConfigError(
                f"handler {spec.durable!r}: filtered=False with retention={self.stream_config.retention!r}: passing by "
                "messages of others would remove them. Expected retention='limits', or filtered=True"
            )
        self.handlers[spec.durable] = spec

    def __repr__(self) -> str:
        return f"<App {self.name}: {len(self.handlers)} handlers on stream {self.stream}>"
