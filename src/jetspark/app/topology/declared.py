"""An application's streams, buckets and consumers as data, and the plan that makes the server match. Sends no request.

A :class:`Topology` lists streams, buckets and consumers. Only declared fields are compared: a field that is left open
(None) may have any value. A :class:`TopologyPlan` has one :class:`Step` for each missing or different part.

There are three kinds of change. A *safe* one is applied. A *destructive* one can lose something that is stored or would
have been, such as a shorter age or a removed subject: it is applied only where that was allowed. An *impossible* one
the server does not make to an existing part, such as another storage: it needs a new name, or an operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from jetspark.app.topology.key_record import KEYS, changed_keys
from jetspark.core.subjects import is_subset
from jetspark.errors import ConfigError
from jetspark.jetstream.config import ConsumerConfig, StreamConfig
from jetspark.jetstream.kv import KVConfig
from jetspark.jetstream.wire import seconds_to_ns

__all__ = [
    "OWNER",
    "DeclaredConsumer",
    "FieldChange",
    "Found",
    "Safety",
    "Step",
    "Topology",
    "TopologyPlan",
    "inherit_advisories",
    "inherit_replicas",
    "plan_changes",
]

OWNER = "jetspark-app"
"""The metadata that names the application to which a stream, bucket or consumer belongs."""

Kind: TypeAlias = Literal["stream", "bucket", "consumer", "contract"]
Safety: TypeAlias = Literal["safe", "destructive", "impossible"]
SafetyOf: TypeAlias = Callable[[str, Any, Any], tuple[Safety, str]]
"""Judges the change of a field, by its name and both values."""

# Lower is a loss: messages beyond the new limit are deleted, or ids forgotten. -1, 0 and None are no limit.
_STREAM_LIMITS = {"max_messages", "max_messages_per_subject", "max_bytes", "max_age_s", "max_message_bytes"}
_STREAM_AMOUNTS = {"duplicate_window_s": "ids are forgotten earlier", "replicas": "fewer copies are kept"}
_STREAM_LOSSES = {
    "retention": "another retention deletes what the new one does not keep",
    "discard": "what is new may be refused, or what is old deleted",
    "discard_new_per_subject": "what is new may be refused",
    "sealed": "a sealed stream never takes a message again",
}
_STREAM_FIXED = {"storage", "mirror", "first_sequence", "persist_mode", "allow_message_counter"}
# Once these are on, the server does not switch them off.
_STREAM_ONE_WAY = {"deny_delete", "deny_purge", "allow_message_ttl", "allow_message_schedules"}
_SWITCHES = {"allow_direct", "allow_rollup", "allow_message_ttl", "allow_atomic", "allow_batched", "mirror_direct"}
_CONSUMER_FIXED = {
    "deliver_policy",
    "start_sequence",
    "start_time",
    "ack_policy",
    "replay_policy",
    "durable_name",
    "name",
}
_OF_EVERY_BUCKET = (
    "discard",
    "allow_rollup",
    "deny_delete",
    "allow_direct",
    "mirror_direct",
    "duplicate_window_s",
    "sources",
    "mirror",
)
_EVENTS = "$JS.EVENT."
# An update leaves undeclared parts of these fields alone; all other fields with parts are replaced.
_KEPT_IN_PART = {"consumer_limits", "placement"}
_CONSUMER_FILTERS = {"filter_subject", "filter_subjects"}


Config: TypeAlias = StreamConfig | KVConfig | ConsumerConfig
C = TypeVar("C", StreamConfig, KVConfig)


@dataclass(frozen=True, slots=True)
class DeclaredConsumer:
    """A consumer, and the stream it belongs to."""

    stream: str
    config: ConsumerConfig

    @property
    def name(self) -> str:
        return self.config.durable_name or self.config.name or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Everything that an application needs on the server."""

    app: str
    stream: str = ""
    """The stream of the application's events, its own or another's; everything else has at least as many replicas."""
    streams: Sequence[StreamConfig] = ()
    buckets: Sequence[KVConfig] = ()
    consumers: Sequence[DeclaredConsumer] = ()
    replaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Streams of copies, and the consumer (stream, name) that the handler has without them: it has one of the two."""

    def __post_init__(self) -> None:
        names = [f"stream {each.name}" for each in self.streams] + [f"bucket {each.bucket}" for each in self.buckets]
        names += [f"consumer {each.name} of {each.stream}" for each in self.consumers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"app {self.app!r} declares {twice} twice; keep one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The server's state of everything that a topology names. A missing name does not exist on the server."""

    streams: Mapping[str, StreamConfig] = field(default_factory=dict)
    """Streams by name, including those of buckets."""
    consumers: Mapping[tuple[str, str], ConsumerConfig] = field(default_factory=dict)
    """Consumers by stream and name."""
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Declared subject -> streams of other names that store it."""
    parked: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    """Keys that are parked of a handler whose keys are other ones than declared, by its consumer; the first of them."""
    former: Mapping[str, str] = field(default_factory=dict)
    """A declared part that is missing -> the part from which a handler has read until now, in words."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that differs from its declaration."""

    name: str
    found: object
    declared: object
    safety: Safety = "safe"
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {_shown(self.found)} -> {_shown(self.declared)}"
        return text if self.safety == "safe" else f"{text}  [{self.safety}: {self.reason}]"


@dataclass(frozen=True, slots=True)
class Step:
    """One stream, bucket or consumer to create or update."""

    kind: Kind
    name: str
    action: Literal["create", "update", "conflict"]
    changes: tuple[FieldChange, ...] = ()
    reason: str = ""

    @property
    def safety(self) -> Safety:
        """The worst of its changes."""
        if self.action == "conflict":
            return "impossible"
        found = {change.safety for change in self.changes}
        return next((each for each in ("impossible", "destructive") if each in found), "safe")

    def __str__(self) -> str:
        sign = {"create": "+", "update": "~", "conflict": "!"}[self.action]
        head = f"{sign} {self.kind} {self.name}" + (f": {self.reason}" if self.reason else "")
        if self.action == "create":
            return "\n".join([head, *(f"    {each.name}: {_shown(each.declared)}" for each in self.changes)])
        return "\n".join([head, *(f"    {change}" for change in self.changes)])


@dataclass(frozen=True, slots=True)
class TopologyPlan:
    """The steps that make the server match an application's declaration."""

    app: str
    steps: tuple[Step, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if the server matches already."""
        return not self.steps

    def refused(self, allow: bool) -> list[Step]:
        """The steps that will not be done: impossible ones, and without ``allow`` destructive ones."""
        return [step for step in self.steps if step.safety == "impossible" or (step.safety != "safe" and not allow)]

    def __str__(self) -> str:
        return (
            "\n".join(map(str, self.steps))
            if self.steps
            else f"nothing to do: the server has what {self.app!r} declares"
        )


def plan_changes(declared: Topology, found: Found) -> TopologyPlan:
    """The steps to take, in a possible order: streams, buckets, consumers."""
    steps = [*_streams(declared, found), *_buckets(declared, found), *_consumers(declared, found)]
    return TopologyPlan(declared.app, tuple(steps))


def inherit_replicas(declared: Topology, found: Found) -> Topology:
    """The topology with as many replicas as the server's stream of events has, for parts that declare no number.

    The stream may belong to another application, or an operator may have given it more replicas. Parts with as many or
    more replicas are left alone.
    """
    events = found.streams.get(declared.stream)
    if events is None or events.replicas is None:
        return declared
    wanted = events.replicas

    def inherit(config: C, name: str) -> C:
        existing = found.streams.get(name)
        has = existing.replicas if existing is not None and existing.replicas is not None else 1
        if config.replicas is not None or has >= wanted or name == declared.stream:
            return config
        return dataclasses.replace(config, replicas=wanted)

    return dataclasses.replace(
        declared,
        streams=[inherit(each, each.name) for each in declared.streams],
        buckets=[inherit(each, f"KV_{each.bucket}") for each in declared.buckets],
    )


def inherit_advisories(declared: Topology, found: Found) -> Topology:
    """The topology with the advisories that the server's stream of them stores already.

    Another version of the application, which may run beside this one, has other handlers: neither version may keep the
    other from starting, or delete its consumers.
    """

    def inherit(config: StreamConfig) -> StreamConfig:
        existing = found.streams.get(config.name)
        own = config.subjects or []
        if existing is None or not own or not all(each.startswith(_EVENTS) for each in own):
            return config
        others = [each for each in existing.subjects or () if each.startswith(_EVENTS) and each not in own]
        return dataclasses.replace(config, subjects=[*own, *others])

    return dataclasses.replace(declared, streams=[inherit(each) for each in declared.streams])


def _streams(declared: Topology, found: Found) -> Iterator[Step]:
    for config in declared.streams:
        existing = found.streams.get(config.name)
        taken = {
            name: subject
            for subject in config.subjects or ()
            for name in found.others.get(subject, ())
            if name != config.name
        }
        known = {*found.streams, *(each.name for each in declared.streams)}
        missing = [each.name for each in config.sources or () if each.name not in known and each.external is None]
        if taken:
            reason = "; ".join(f"stream {name} stores {subject!r} already" for name, subject in sorted(taken.items()))
            if any(subject.startswith(_EVENTS) for subject in taken.values()):
                reason += f" (App(advisories={min(taken)!r}) reads them there)"
            yield Step("stream", config.name, "conflict", (), f"{reason}: a subject belongs to one stream")
        elif missing:
            reason = f"stream {missing[0]} to copy from does not exist; apply the app that declares it first"
            yield Step("stream", config.name, "conflict", (), reason)
        elif existing is None and config.name in found.former:
            yield Step("stream", config.name, "conflict", (), _begin_again(found.former[config.name]))
        elif existing is None:
            yield Step("stream", config.name, "create", tuple(_declared(config)))
        else:
            yield from _update("stream", config.name, existing, config, declared.app, _stream_safety)


def _buckets(declared: Topology, found: Found) -> Iterator[Step]:
    for bucket in declared.buckets:
        existing = found.streams.get(f"KV_{bucket.bucket}")
        if existing is None:
            yield Step("bucket", bucket.bucket, "create", tuple(_declared(bucket)))
        else:
            wanted = bucket.to_stream()
            # What only follows from being a bucket is not compared: an older client made it a little otherwise.
            open_fields: dict[str, Any] = dict.fromkeys(_OF_EVERY_BUCKET)
            wanted = dataclasses.replace(wanted, **open_fields)
            if bucket.history is None:
                wanted = dataclasses.replace(wanted, max_messages_per_subject=None)
            yield from _update("bucket", bucket.bucket, existing, wanted, declared.app, _stream_safety)


def _consumers(declared: Topology, found: Found) -> Iterator[Step]:
    streams = {*found.streams, *(config.name for config in declared.streams)}
    for place in declared.consumers:
        name = f"{place.name} of {place.stream}"
        existing = found.consumers.get((place.stream, place.name))
        if place.stream not in streams:
            reason = f"stream {place.stream} does not exist and is not this app's: apply the one that declares it first"
            yield Step("consumer", name, "conflict", (), reason)
        elif unstored := _unstored_advisories(place, found.streams.get(place.stream)):
            yield Step("consumer", name, "conflict", (), f"stream {place.stream} does not store {unstored!r}")
        elif existing is None and name in found.former:
            yield Step("consumer", name, "conflict", (), _begin_again(found.former[name]))
        elif existing is None:
            yield Step("consumer", name, "create", tuple(_declared(place.config)))
        else:
            safety = partial(_consumer_safety, parked=found.parked.get((place.stream, place.name), ()))
            yield from _update("consumer", name, existing, place.config, declared.app, safety)


def _unstored_advisories(place: DeclaredConsumer, stream: StreamConfig | None) -> str | None:
    """The first advisory that a consumer waits for in vain, because its stream is another's and does not store it."""
    if stream is None or (stream.metadata or {}).get(OWNER) == (place.config.metadata or {}).get(OWNER):
        return None
    for each in place.config.filter_subjects or ():
        if each.startswith(_EVENTS) and not any(is_subset(each, stored) for stored in stream.subjects or ()):
            return each
    return None


def _begin_again(former: str) -> str:
    return (
        f"until now the handler read {former}: it would handle every event of the stream again. Give it another "
        "durable, or delete what it read once that is wanted"
    )


def _update(kind: Kind, name: str, existing: Config, wanted: Config, app: str, safety: SafetyOf) -> Iterator[Step]:
    owner = (existing.metadata or {}).get(OWNER)
    if owner is not None and owner != app:
        yield Step(kind, name, "conflict", (), f"it belongs to app {owner!r}; let one of the two declare it")
        return
    changes = tuple(
        FieldChange(each.name, each.found, each.declared, *safety(each.name, each.found, each.declared))
        for each in _differences(existing, wanted)
    )
    if changes:
        yield Step(kind, name, "update", changes)


def _declared(config: Config) -> Iterator[FieldChange]:
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if value is not None and value != {} and each.name not in ("name", "bucket", "durable_name"):
            yield FieldChange(each.name, None, value)


def _differences(existing: Config, wanted: Config) -> Iterator[FieldChange]:
    for each in dataclasses.fields(wanted):
        declared, actual = getattr(wanted, each.name), getattr(existing, each.name)
        if declared is None or each.name == "extra":
            continue
        if each.name == "metadata":
            # The server adds metadata of its own, and other programs may too.
            actual = {name: value for name, value in (actual or {}).items() if name in declared}
        if not _is_same(each.name, actual, declared):
            yield FieldChange(each.name, actual, declared)


def _is_same(name: str, actual: Any, declared: Any) -> bool:
    """True if the server has the declared value: it leaves out values that are empty, off, or without a limit."""
    if actual == declared:
        return True
    known = actual if declared is None else declared
    other = declared if declared is None else actual
    if isinstance(known, list | tuple) and isinstance(other, list | tuple | None):
        return _is_same_list(name, actual or (), declared or ())
    if isinstance(known, int | float) and isinstance(other, int | float | None):
        return _amount(name, actual) == _amount(name, declared)
    if isinstance(known, str) and isinstance(other, str | None):
        everything = ">" if name == "source" else ""
        return (actual or everything) == (declared or everything) or _is_consumer_default(name, actual, declared)
    if dataclasses.is_dataclass(known) and declared is not None:
        return all(
            _is_same(each.name, getattr(actual, each.name, None), getattr(declared, each.name))
            for each in dataclasses.fields(declared)
            if each.name != "extra" and not (name in _KEPT_IN_PART and getattr(declared, each.name) is None)
        )
    return False


def _is_same_list(name: str, actual: Sequence[object], declared: Sequence[object]) -> bool:
    if name == "backoff_s":
        return len(actual) == len(declared) and all(map(_is_same, [name] * len(actual), actual, declared))
    return all(any(_is_same("", each, other) for each in actual) for other in declared) and all(
        any(_is_same("", each, other) for other in declared) for each in actual
    )


def _is_consumer_default(name: str, actual: object, declared: object) -> bool:
    """True if the server leaves out the declared value because it is the default."""
    defaults = {"replay_policy": "instant", "deliver_policy": "all", "compression": "none", "persist_mode": "default"}
    return actual is None and defaults.get(name) == declared


def _amount(name: str, value: float | None) -> float:
    """A number as the server keeps it: durations are whole nanoseconds there."""
    return _limit(seconds_to_ns(value) if name.endswith("_s") and value is not None else value)


def _limit(value: float | None) -> float:
    return float("inf") if value is None or value <= 0 else value


def _stream_safety(name: str, found: Any, declared: Any) -> tuple[Safety, str]:
    is_of_a_queue = name == "retention" and "workqueue" in (found, declared)
    if name in _STREAM_FIXED or is_of_a_queue or (name in _STREAM_ONE_WAY and found):
        return "impossible", "the server does not change it for a stream that exists; give the stream another name"
    if name == "sources" and "{{partition(" in f"{found}{declared}":
        return "impossible", (
            "with other partitions or events the server copies, and the handler handles, every event of the stream "
            "again; give the handler another durable"
        )
    if name in _STREAM_LIMITS and _limit(declared) < _limit(found):
        return "destructive", "what is beyond the new limit is deleted"
    if name in _STREAM_AMOUNTS and found is not None and declared < found:
        return "destructive", _STREAM_AMOUNTS[name]
    if name == "subjects":
        lost = sorted(set(found or ()) - set(declared))
        return ("destructive", f"{', '.join(lost)} is no longer stored") if lost else ("safe", "")
    if name in _SWITCHES:
        return ("destructive", "another program may be using it") if found else ("safe", "")
    if name in _STREAM_LOSSES and (found or declared):
        return "destructive", _STREAM_LOSSES[name]
    return "safe", ""


def _consumer_safety(name: str, found: Any, declared: Any, *, parked: Sequence[str] = ()) -> tuple[Safety, str]:
    if name == "metadata" and parked:
        keys = f"{', '.join(map(repr, parked[:3]))}{', ...' if len(parked) > 3 else ''}"
        return "destructive", (
            f"another key ({'; '.join(changed_keys(found.get(KEYS, ''), declared.get(KEYS, '')))}) while {keys} are "
            "parked: later events of theirs would overtake those that wait. Redrive or discard their dead letters "
            "first, or give the handler another durable"
        )
    if name in _CONSUMER_FIXED:
        return (
            "impossible",
            "the server does not change it for a consumer that exists; give the handler another durable",
        )
    if name in _CONSUMER_FILTERS:
        before = set(found) if isinstance(found, list | tuple) else {found} - {None, ""}
        after = set(declared) if isinstance(declared, list | tuple) else {declared}
        lost = sorted(each for each in before if not any(is_subset(each, other) for other in after))
        return ("destructive", f"{', '.join(lost)} is no longer delivered") if lost else ("safe", "")
    if name == "max_deliver" and _limit(declared) < _limit(found):
        return "destructive", "messages that were delivered that often are given up"
    return "safe", ""


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}={each}" for name, each in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return "not set" if value is None else str(value)
