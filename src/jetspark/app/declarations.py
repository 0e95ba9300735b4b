"""What an application declares besides its handlers: stream, events, buckets; and its doors to a server.

:class:`~jetspark.app.App` is one of these. What it needs on the server follows from it: :meth:`Declarations.topology`.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from jetspark.aio.connecting import connect
from jetspark.app.client import AppClient
from jetspark.app.commands.answering import INBOX_PREFIXES, check_inbox_prefixes, check_no_stream_stores
from jetspark.app.commands.wire import command_subject
from jetspark.app.connecting import ConnectArguments
from jetspark.app.contracts.catalogue import Catalogue, Contract, contract_of
from jetspark.app.contracts.compatibility import DEFAULT_MODE, Mode, check_mode
from jetspark.app.entities.declaring import MANY, EntitySpec, StatePlace, Truth
from jetspark.app.handlers.key_record import KEYS, key_record
from jetspark.app.handlers.partitions import PIN_GROUP, partition_consumer, partition_filter, partition_transforms
from jetspark.app.timers import check_stream, timer_subjects
from jetspark.app.topology.declared import OWNER, ConsumerPlace, Topology, TopologyPlan
from jetspark.app.topology.keeping import check_keeps, keeping
from jetspark.app.topology.names import (
    ADVISORY_KINDS,
    advisory_stream,
    advisory_subject,
    check_app_name,
    dead_letter_stream,
    handler_bucket,
    partition_stream,
    projection_bucket,
    retry_stream,
)
from jetspark.app.topology.provisioning import apply_topology, make_plan
from jetspark.core.arguments import flag, instance, iterate, text, texts, unfit
from jetspark.core.subjects import is_subset, overlaps, reading_filters
from jetspark.errors import ConfigError
from jetspark.jetstream.config import ConsumerConfig, StreamConfig, StreamSource
from jetspark.jetstream.kv import KVConfig

if TYPE_CHECKING:
    from jetspark.app.application import HandlerSpec, Lifespan
    from jetspark.app.commands.declaring import CommandSpec
    from jetspark.app.commands.running import CommandOptions
    from jetspark.app.projections.declaring import ProjectionSpec
    from jetspark.app.settings import Setting, SettingsSpec
    from jetspark.app.telemetry import HandlerObserver
    from jetspark.app.workflows.declaring import WorkflowSpec

__all__ = ["Declarations", "returned_types"]

_Kind = TypeVar("_Kind", bound=type[Any])

WORKERS = 8
"""Processes that may hold as much as they can of one handler's messages at a time; more of them get less each."""
DUPLICATE_WINDOW_S = 120.0
"""How long a stream remembers ids, by default."""
_is_version = re.compile(r"\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.+-]+)?").fullmatch
ADVISORIES_AGE_S = 30 * 86400.0
"""How long it is known that an event was given up while no worker ran."""
ADVISORIES_BYTES = 32 << 20
"""About 80,000 of them."""
MARKER_TTL_S = 60.0
"""How long watchers of the handlers' bucket can see that a key went away by its TTL."""


def _check_texts(**values: Any) -> None:
    for name, value in values.items():
        if value is not None or name == "version":
            text(name, value)


def _several(what: str, values: Any, kind: str) -> list[Any]:
    """Several values. A text is none: it has characters, and nobody means those."""
    expected = f"a list of {kind}"
    if isinstance(values, str):
        raise unfit(what, values, expected)
    return list(iterate(what, values, expected))


class Declarations:
    """The stream, the events and the buckets of an application, and what follows from them; see :class:`App`."""

    def __init__(
        self,
        name: str,
        *,
        stream: str | StreamConfig,
        subjects: Sequence[str] = (),
        source: str | None = None,
        events: Sequence[type[Any]] = (),
        buckets: Sequence[KVConfig | str] = (),
        compatibility: Mode = DEFAULT_MODE,
        timers: bool = False,
        version: str = "0.0.0",
        advisories: str | None = None,
        inbox_prefixes: Sequence[str] = (),
    ) -> None:
        self.name = check_app_name(name)
        _check_texts(version=version, source=source, advisories=advisories)
        flag("timers", timers)
        subjects = texts("subjects", subjects, 'a list of subjects, such as ["orders.>"]')
        self.advisories = advisory_stream(self.name) if advisories is None else advisories
        """The stream in which the server's advisories about its consumers are."""
        self._owns_advisories = advisories is None
        config = StreamConfig(name=stream) if isinstance(stream, str) else instance("stream", stream, StreamConfig)
        if config.subjects is not None and subjects:
            raise ConfigError(f"subjects={list(subjects)} with those of the StreamConfig: expected one of the two")
        if config.duplicate_window_s == 0:
            raise ConfigError(
                f"duplicate_window_s=0: the server takes it for its default, {DUPLICATE_WINDOW_S:g} s, and cannot do "
                "without; expected 0.1 or more, or leave it out"
            )
        self.stream = config.name
        self.subjects = tuple(subjects or config.subjects or ())
        self.has_timers = timers
        if timers:
            if not self.subjects:
                raise ConfigError("timers=True: expected subjects=; timers are kept in a stream of the app's own")
            check_stream(config)
            self.subjects = (*self.subjects, timer_subjects(self.name))
        self.stream_config = dataclasses.replace(config, subjects=list(self.subjects))
        self.source = source if source is not None else f"/{name}"
        if not self.source:
            raise ConfigError("source='': expected a URI reference such as '/shop/orders', or nothing for the default")
        self.buckets = tuple(KVConfig.of(bucket) for bucket in _several("buckets", buckets, "KVConfig or names"))
        self.compatibility = check_mode(compatibility)
        self.handlers: dict[str, HandlerSpec] = {}
        """By durable name."""
        self.lifespans: list[Lifespan] = []
        self.observers: list[HandlerObserver] = []
        """Told what handlers do, in every process that runs them."""
        self.projections: dict[str, ProjectionSpec] = {}
        self.entity_specs: dict[str, EntitySpec] = {}
        self.workflows: dict[str, WorkflowSpec] = {}
        self.settings_specs: dict[str, SettingsSpec] = {}
        """By bucket."""
        self.commands: dict[str, CommandSpec] = {}
        if not _is_version(version):
            raise ConfigError(f"version={version!r}: expected three numbers, such as '1.4.0'")
        self.version = version
        self.inbox_prefixes = check_inbox_prefixes(inbox_prefixes)
        self._catalogue = Catalogue()
        self._add(*_several("events", events, "types of events"))

    def register(self, kind: _Kind) -> _Kind:
        """Make a type of event known that the application publishes: ``@app.register`` above its class, or a call.

        Raises:
            ConfigError: It is no type of event, another class has the same type and version, or the application's
                stream does not store its subject.
        """
        self._add(kind)
        return kind

    def settings(self, bucket: KVConfig | str, **settings: Setting[Any]) -> SettingsSpec:
        """Declare settings and flags, kept in a bucket, with their types and defaults.

        ``app.settings("shop", currency=Setting(str, "USD"), new=Flag())``; programs read them with
        ``client.settings("shop")``.

        Raises:
            ConfigError: The bucket has settings already, or one of them has no name or type that can be stored.
        """
        from jetspark.app.settings import SettingsSpec

        spec = SettingsSpec(bucket, settings)
        if spec.bucket.bucket in self.settings_specs:
            raise ConfigError(f"settings of bucket {spec.bucket.bucket}: expected one declaration, with all of them")
        self.settings_specs[spec.bucket.bucket] = spec
        return spec

    @property
    def catalogue(self) -> Catalogue:
        """Every type of event it knows: those it was given, those that its handlers and
        projections take, and those that handlers return.

        Raises:
            ConfigError: A handler takes something that is no event, or two classes have one type and version.
        """
        for spec in self.handlers.values():
            self._add(*spec.events, *returned_types(spec.function))
        for projection in self.projections.values():
            self._add(*projection.events)
        return self._catalogue

    def declared(self, event: Any) -> Contract:
        """The contract of an event that is to be published, or of its class.

        Raises:
            ConfigError: The application does not declare it; the message says how.
        """
        try:
            return self._catalogue.declared(event)
        except ConfigError:
            return self.catalogue.declared(event)  # with what was declared since it was last asked

    def _declare_command(self, spec: CommandSpec) -> None:
        if spec.name in {*self.commands, *self.handlers, *self.projections}:
            raise ConfigError(f"command {spec.name!r}: expected a name of its own; another declaration has it")
        subject = command_subject(self.name, spec.name)
        stored = next((each for each in self.subjects if overlaps(subject, each)), None)
        if stored is not None:
            raise ConfigError(
                f"command {spec.name!r} is sent to {subject!r}, which stream {self.stream} stores ({stored!r}): the "
                "stream would answer in place of a worker. Give the stream narrower subjects"
            )
        self.commands[spec.name] = spec

    def _add(self, *kinds: type[Any]) -> None:
        for kind in kinds:
            if kind in self._catalogue:
                continue
            subject = contract_of(kind).subject.filter
            if self.owns_stream and not any(is_subset(subject, stored) for stored in self.subjects):
                raise ConfigError(
                    f"{kind.__name__} is published to {subject!r}, which stream {self.stream} does not store: its "
                    f"subjects are {', '.join(self.subjects)}"
                )
            self._catalogue.add(kind)

    def entities(
        self,
        name: str,
        *,
        state: Any,
        truth: Truth = "state",
        events: Sequence[type[Any]] = (),
        fold: type[Any] | None = None,
    ) -> EntitySpec:
        """Declare a kind of entity: a state that is changed together with its events.

        A client changes them: ``async with client.entities("orders").change("o-1") as change``. States and events are
        in one stream, the application's. If it is called as that of a bucket, ``App(stream="KV_shop", ...)``, every
        NATS client can read the states as bucket ``shop``; else they are on ``states.<app>.<name>.<key>``.

        Args:
            name: Of the kind, the first part of its keys.
            state: The type of a state, which msgspec encodes: a Struct, a dataclass, a dict.
            truth: Which counts where state and events differ, because somebody wrote only one of them: the ``"state"``
                or the ``"events"``. ``jetspark reconcile`` compares both, and repairs by this.
            events: The types of events that tell the history of an entity.
            fold: A class that makes a state of them, with ``key(event)`` and ``apply(state, event)`` as that of a
                projection. With the state as the truth it may have ``correct(key, folded, state)``: it returns the
                events that lead from what the events make to the state.

        Raises:
            ConfigError: The stream is not the app's own, it would drop states (a limit of age, messages or bytes, or
                retention by acknowledgement), or the type or the name cannot be used.
        """
        if not self.owns_stream:
            raise ConfigError(f"entities {name!r}: expected subjects=; they are kept in a stream of the app's own")
        place = StatePlace.of(self.name, self.stream)
        spec = EntitySpec(name, state, place, truth=truth, events=events, fold=fold)
        if name in self.entity_specs:
            raise ConfigError(f"entities {name!r}: expected a name of its own; others have it")
        limit = self.stream_config.max_messages_per_subject
        if limit is not None and limit > 0:
            raise ConfigError(
                f"entities with max_messages_per_subject={limit}: it would drop events of the same stream"
            )
        check_keeps(self.stream_config, f"entities {name!r}", "their states")
        self._store_also(f"{place.prefix}>")
        self._add(*events)
        self.entity_specs[name] = spec
        return spec

    def _store_also(self, subject: str) -> None:
        """Have the application's stream store something of our own."""
        if subject not in self.subjects:
            self.subjects = (*self.subjects, subject)
            self.stream_config = dataclasses.replace(self.stream_config, subjects=list(self.subjects))

    @property
    def owns_stream(self) -> bool:
        """Whether the stream is its own, and not only read."""
        return bool(self.subjects)

    @property
    def schema_bucket(self) -> str:
        """The bucket that keeps the contracts of its events."""
        return f"{self.name}_schemas"

    def topology(self, only: Collection[str] = ()) -> Topology:
        """Everything it needs on the server.

        Args:
            only: As far as these handlers, projections and commands need it; all of them if there are none.

        Raises:
            ConfigError: It declares something twice, or a handler takes something that is no event.
        """
        for command in self.commands.values():
            command.check_snapshot(self.projections)
        streams = [self._owned(self.stream_config, self._main_defaults())] if self.owns_stream else []
        buckets = [self._owned(bucket, {}) for bucket in self._all_buckets()]
        if self.owns_stream:
            buckets.append(self._bucket(self.schema_bucket, "Contracts of events, one for each type and version."))
        if self.projections:
            buckets += [self._owned(spec.bucket_config, {}) for spec in self.projections.values()]
            description = "Which buckets projections are in, leases, and replays."
            buckets.append(self._bucket(projection_bucket(self.name), description, limit_marker_ttl_s=MARKER_TTL_S))
        if self.handlers or self.projections:
            streams.append(self._dead_letters())
        if self.handlers:
            streams.append(self._retries())
            if self._owns_advisories:
                streams.append(self._advisory_stream())
            buckets.append(
                self._bucket(handler_bucket(self.name), "What handlers remember.", limit_marker_ttl_s=MARKER_TTL_S)
            )
        streams += [self._copies(spec, spec.partitions) for spec in self.handlers.values() if spec.partitions]
        if self.commands:
            check_no_stream_stores(
                (*INBOX_PREFIXES, *self.inbox_prefixes), [(each.name, each.subjects or ()) for each in streams]
            )
        consumers = [place for spec in self.handlers.values() for place in self.consumers_of(spec)]
        consumers += [self.advisory_consumer(spec) for spec in self.handlers.values()]
        replaces = {
            partition_stream(self.name, spec.name): (self.stream, spec.durable) for spec in self.handlers.values()
        }
        whole = Topology(
            app=self.name,
            stream=self.stream,
            streams=[self.as_safe(each) for each in streams],
            buckets=[self.as_safe(each) for each in buckets],
            consumers=consumers,
            replaces=replaces,
        )
        return self._part(whole, only) if only else whole

    def _part(self, whole: Topology, only: Collection[str]) -> Topology:
        handlers = [spec for spec in self.handlers.values() if spec.name in only]
        projections = {spec.name for spec in self.projections.values() if spec.name in only}
        projections |= {spec.snapshot for spec in self.commands.values() if spec.name in only and spec.snapshot}
        streams, buckets = {self.stream}, {self.schema_bucket}
        if handlers or projections:
            streams.add(dead_letter_stream(self.name))
        if handlers:
            streams |= {retry_stream(self.name), self.advisories}
            streams |= {partition_stream(self.name, spec.name) for spec in handlers}
            buckets |= {handler_bucket(self.name), *(spec.bucket for spec in handlers if spec.bucket)}
        if projections:
            buckets |= {projection_bucket(self.name), *(self.projections[name].bucket.bucket for name in projections)}
        places = {(each.stream, each.name) for spec in handlers for each in self.consumers_of(spec)}
        places |= {(self.advisories, self.advisory_consumer(spec).name) for spec in handlers}
        return dataclasses.replace(
            whole,
            streams=[each for each in whole.streams if each.name in streams],
            buckets=[each for each in whole.buckets if each.bucket in buckets],
            consumers=[each for each in whole.consumers if (each.stream, each.name) in places],
            replaces={copies: place for copies, place in whole.replaces.items() if copies in streams},
        )

    def as_safe(self, config: Any) -> Any:
        """A configuration with as many replicas as the application's stream has, unless it says how many.

        An event that waits for its retry, or is a dead letter, is acknowledged in the stream: it must not be lost with
        one machine where the stream would not be. Storage needs no such rule: what is not mentioned is on disk.
        """
        if config.replicas is not None or self.stream_config.replicas is None:
            return config
        return dataclasses.replace(config, replicas=self.stream_config.replicas)

    async def plan(self, servers: str | Iterable[str], **options: Unpack[ConnectArguments]) -> TopologyPlan:
        """What differs between what the application declares and what the server has; nothing is changed.

        The options are those of :func:`jetspark.connect`. ``str()`` of the plan is the difference, in lines.
        """
        async with connect(servers, **options) as nc:
            return await make_plan(nc.jetstream(), self)

    async def apply(
        self, servers: str | Iterable[str], *, allow: bool = False, **options: Unpack[ConnectArguments]
    ) -> TopologyPlan:
        """Make what the application declares, or change it, and return what was done. Done again, it does nothing.

        Args:
            allow: Make changes that can lose something, too. What the server cannot change is refused all the same.

        Raises:
            TopologyRefused: A change is destructive and not allowed, or impossible; nothing was done.
        """
        async with connect(servers, **options) as nc:
            return await apply_topology(nc.jetstream(), self, allow=allow)

    def connect(
        self,
        servers: str | Iterable[str] = "nats://127.0.0.1:4222",
        *,
        decide_here: bool | CommandOptions = False,
        **options: Unpack[ConnectArguments],
    ) -> AppClient:
        """A client that publishes its events: ``async with app.connect(url) as orders``.

        Args:
            decide_here: Have ``call`` decide commands in this program, and ask no worker: True, or options. It needs
                the permissions of a worker on the stream.
            options: Those of :func:`jetspark.connect`.

        Raises:
            ConfigError: ``decide_here`` is neither True, nor False, nor :class:`CommandOptions`.
        """
        from jetspark.app.commands.running import CommandOptions

        if isinstance(decide_here, bool):
            return AppClient(self, servers, options, decide_here=CommandOptions() if decide_here else None)
        instance("decide_here", decide_here, CommandOptions, "True, False, or CommandOptions(...)")
        return AppClient(self, servers, options, decide_here=decide_here)

    def _all_buckets(self) -> list[KVConfig]:
        """Those it declares, and those in which handlers make transactions.

        These need atomic batches, and keys with a TTL: the marks of events go away.
        """
        found = {bucket.bucket: bucket for bucket in self.buckets}
        found |= {name: spec.bucket for name, spec in self.settings_specs.items()}
        needed = {"allow_atomic": True, "limit_marker_ttl_s": MARKER_TTL_S}
        for spec in self.handlers.values():
            if spec.idempotent == "transaction" and spec.bucket is not None:
                bucket = found.get(spec.bucket, KVConfig(bucket=spec.bucket))
                missing = {name: value for name, value in needed.items() if getattr(bucket, name) is None}
                found[spec.bucket] = dataclasses.replace(bucket, **missing)  # type: ignore[arg-type]
        return list(found.values())

    def _main_defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
        if self.has_timers:
            defaults |= {"allow_message_schedules": True, "allow_message_ttl": True, "allow_rollup": True}
            defaults |= keeping(survives_age=True)
        if self.entity_specs:
            defaults |= {"allow_rollup": True, "max_messages_per_subject": -1, **keeping(survives_age=False)}
            if StatePlace.of(self.name, self.stream).bucket is not None:
                defaults["max_messages_per_subject"] = MANY
        age_s = self.stream_config.max_age_s
        if age_s and age_s < DUPLICATE_WINDOW_S:
            # As the server does for a new stream; for one that exists it refuses the age instead.
            defaults["duplicate_window_s"] = age_s
        return defaults

    def _owned(self, config: Any, defaults: Mapping[str, Any]) -> Any:
        """A configuration with the owner in its metadata, and with what it leaves open filled in."""
        metadata = {**(config.metadata or {}), OWNER: self.name}
        missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
        return dataclasses.replace(config, metadata=metadata, **missing)

    def _bucket(self, name: str, description: str, **fields: Any) -> KVConfig:
        return KVConfig(bucket=name, description=description, metadata={OWNER: self.name}, **fields)

    def _dead_letters(self) -> StreamConfig:
        return StreamConfig(
            name=dead_letter_stream(self.name),
            description="Events that a handler could not handle.",
            subjects=[f"dlq.{self.name}.>"],
            retention="limits",
            allow_direct=True,
            allow_rollup=True,
            allow_message_ttl=True,
            metadata={OWNER: self.name},
        )

    def _retries(self) -> StreamConfig:
        return StreamConfig(
            name=retry_stream(self.name),
            description="Events that wait for their next attempt.",
            subjects=[f"retry.{self.name}.>"],
            retention="limits",
            allow_direct=True,
            allow_message_schedules=True,
            allow_message_ttl=True,
            allow_rollup=True,
            metadata={OWNER: self.name},
        )

    def _advisory_stream(self) -> StreamConfig:
        filters = [each for spec in self.handlers.values() for each in self._advisory_subjects(spec)]
        return StreamConfig(
            name=self.advisories,
            description="What the server says of events that it, or another client, gave up.",
            subjects=list(dict.fromkeys(filters)),
            retention="limits",
            max_age_s=ADVISORIES_AGE_S,
            max_bytes=ADVISORIES_BYTES,
            discard="old",
            allow_direct=True,
            metadata={OWNER: self.name},
        )

    def _advisory_subjects(self, spec: HandlerSpec) -> list[str]:
        """Of a handler's consumers. Of a stream that others read as well its own alone: a subject has one stream."""
        retries = retry_stream(self.name)
        places = [(self.stream, spec.durable), (retries, "*")]
        if spec.partitions is not None:
            places[0] = (partition_stream(self.name, spec.name), "*")
        return [advisory_subject(kind, stream, name) for kind in ADVISORY_KINDS for stream, name in places]

    def advisory_consumer(self, spec: HandlerSpec) -> ConsumerPlace:
        """The consumer by which the workers of a handler share what was said of its events."""
        config = ConsumerConfig(
            durable_name=f"{self.name}-{spec.name}",
            ack_policy="explicit",
            # Of what was before this handler there is nothing to mend.
            deliver_policy="new",
            ack_wait_s=10.0,
            max_deliver=-1,
            filter_subjects=self._advisory_subjects(spec),
            metadata={OWNER: self.name, "jetspark-handler": spec.name},
        )
        return ConsumerPlace(self.advisories, config)

    def _copies(self, spec: HandlerSpec, partitions: int) -> StreamConfig:
        """What a handler with partitions reads: the server copies its events, with their partition in the subject.

        It keeps them for at least as long as the stream they come from: a restarted server goes on after the last one.
        """
        transforms = partition_transforms(self.name, spec.name, partitions, spec.events, spec.key)
        config = self.stream_config
        return StreamConfig(
            name=partition_stream(self.name, spec.name),
            description=f"Copies of the events of handler {spec.name}, in {partitions} partitions.",
            sources=[StreamSource(name=self.stream, subject_transforms=transforms)],
            retention="limits",
            storage=config.storage,
            max_age_s=config.max_age_s,
            allow_direct=True,
            metadata={OWNER: self.name, "jetspark-handler": spec.name},
        )

    def consumers_of(self, spec: HandlerSpec) -> list[ConsumerPlace]:
        """The consumers of a handler: one of what it reads and one of its retries, or two for each partition."""
        if spec.partitions is None:
            filters = self.handler_filters(spec)
            one = {"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": filters}
            events = self._consumer(spec, spec.durable, **one)
            keys = {KEYS: key_record(spec.events, self._key_of(spec), in_order=spec.in_order)}
            return [
                ConsumerPlace(self.stream, dataclasses.replace(events, metadata={**(events.metadata or {}), **keys})),
                ConsumerPlace(retry_stream(self.name), self._retry_consumer(spec, spec.durable, "")),
            ]
        copies, places = partition_stream(self.name, spec.name), []
        pinned = {
            "priority_policy": "pinned_client",
            "priority_groups": [PIN_GROUP],
            "priority_timeout_s": spec.takeover_s,
        }
        for partition in range(spec.partitions):
            name = partition_consumer(spec.durable, partition)
            one = {"filter_subject": partition_filter(self.name, spec.name, partition)}
            places.append(ConsumerPlace(copies, self._consumer(spec, name, **one, **pinned)))
            retries = self._retry_consumer(spec, name, f"-{partition}")
            places.append(ConsumerPlace(retry_stream(self.name), retries))
        return places

    def _key_of(self, spec: HandlerSpec) -> str | Callable[[Any], Any] | None:
        """A handler's key as its author wrote it."""
        workflow = self.workflows.get(spec.name)
        return spec.key if workflow is None else workflow.key

    @property
    def keeps_what_is_acknowledged(self) -> bool:
        """Whether messages stay in the stream when a consumer has acknowledged them, as far as it is declared here."""
        return self.stream_config.retention in (None, "limits")

    def handler_filters(self, spec: HandlerSpec) -> list[str]:
        """What the consumer of a handler asks for: the subjects of its events, or ``>`` for everything.

        Several filters with wildcards cost the server milliseconds a message: see ``reading_filters``.
        """
        filters = list(dict.fromkeys(contract_of(kind).subject.filter for kind in spec.events))
        reads_all = spec.filtered is False
        if spec.filtered is None and spec.partitions is None and self.owns_stream and self.keeps_what_is_acknowledged:
            reads_all = len(filters) > 1 and not reading_filters(filters, may_read_all=True)
        return [">"] if reads_all else filters

    def _consumer(self, spec: HandlerSpec, name: str, **fields: Any) -> ConsumerConfig:
        return ConsumerConfig(
            durable_name=name,
            ack_policy="explicit",
            ack_wait_s=spec.ack_wait_s,
            # Attempts are counted by handlers; the server must not give up before them.
            max_deliver=-1,
            max_ack_pending=WORKERS * spec.max_messages,
            metadata={OWNER: self.name, "jetspark-handler": spec.name},
            **fields,
        )

    def _retry_consumer(self, spec: HandlerSpec, name: str, partition: str) -> ConsumerConfig:
        waits = f"retry.{self.name}.{spec.name}"
        # Two filters with wildcards are cheap here. If every tenth of 100,000 messages is for the consumer, each costs
        # the server 16 us of CPU, and 10 with one filter; if every thousandth is, all together 90 ms, and 30 (2.15.1).
        return self._consumer(
            spec, name, filter_subjects=[f"{waits}.due{partition}.>", f"{waits}.redrive{partition}.>"]
        )


def returned_types(function: Callable[..., Any]) -> list[type[Any]]:
    """The types of events that a handler says it returns."""
    try:
        hint = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return []  # a type that only exists for type checkers: it can be registered
    alternatives = typing.get_args(hint) or (hint,)
    flat = [inner for each in alternatives for inner in (typing.get_args(each) or (each,))]
    return [each for each in flat if isinstance(each, type) and "__contract__" in vars(each)]
