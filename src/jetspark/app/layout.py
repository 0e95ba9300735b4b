"""The streams, buckets and consumers that an application needs, derived from its spec. Nothing here is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from jetspark.app.commands.reply_rule import INBOX_PREFIXES, check_no_stream_stores
from jetspark.app.entities.entity_spec import MANY, StateSubjects
from jetspark.app.handlers.consumers import advisory_consumer, advisory_subjects, consumers_of
from jetspark.app.handlers.partitions import partition_transforms
from jetspark.app.topology.declared import OWNER, C, Topology
from jetspark.app.topology.names import (
    MARKER_TTL_S,
    dead_letter_stream,
    handler_bucket,
    partition_stream,
    projection_bucket,
    retry_stream,
)
from jetspark.app.topology.retention import retention_config
from jetspark.jetstream.config import StreamConfig, StreamSource
from jetspark.jetstream.kv import KVConfig

if TYPE_CHECKING:
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.spec import AppSpec

__all__ = ["DUPLICATE_WINDOW_S", "as_safe", "topology_of"]

DUPLICATE_WINDOW_S = 120.0
"""The server's default duplicate window."""
ADVISORIES_AGE_S = 30 * 86400.0
"""An event that the server gave up is found for this long, even if no worker ran."""
ADVISORIES_BYTES = 32 << 20
"""About 80,000 advisories."""


def topology_of(app: AppSpec, only: Collection[str] = ()) -> Topology:
    """Everything it needs on the server.

    Args:
        only: Limit the result to these handlers, projections and commands; all by default.

    Raises:
        ConfigError: Something is declared twice, or a handler takes a class that is not an event.
    """
    for command in app.commands.values():
        command.check_snapshot(app.projections)
    streams = [_owned(app, app.stream_config, _main_defaults(app))] if app.owns_stream else []
    buckets = [_owned(app, bucket, {}) for bucket in _all_buckets(app)]
    if app.owns_stream:
        buckets.append(_bucket(app, app.schema_bucket, "Contracts of events, one for each type and version."))
    if app.projections:
        buckets += [_owned(app, spec.bucket_config, {}) for spec in app.projections.values()]
        description = "Which buckets projections are in, leases, and replays."
        buckets.append(_bucket(app, projection_bucket(app.name), description, limit_marker_ttl_s=MARKER_TTL_S))
    if app.handlers or app.projections:
        streams.append(_dead_letters(app))
    if app.handlers:
        streams.append(_retries(app))
        if app.owns_advisories:
            streams.append(_advisory_stream(app))
        buckets.append(
            _bucket(app, handler_bucket(app.name), "What handlers remember.", limit_marker_ttl_s=MARKER_TTL_S)
        )
    streams += [_copies(app, spec, spec.partitions) for spec in app.handlers.values() if spec.partitions]
    if app.commands:
        check_no_stream_stores(
            (*INBOX_PREFIXES, *app.inbox_prefixes), [(each.name, each.subjects or ()) for each in streams]
        )
    consumers = [place for spec in app.handlers.values() for place in consumers_of(app, spec)]
    consumers += [advisory_consumer(app, spec) for spec in app.handlers.values()]
    replaces = {partition_stream(app.name, spec.name): (app.stream, spec.durable) for spec in app.handlers.values()}
    whole = Topology(
        app=app.name,
        stream=app.stream,
        streams=[as_safe(app, each) for each in streams],
        buckets=[as_safe(app, each) for each in buckets],
        consumers=consumers,
        replaces=replaces,
    )
    return _part(app, whole, only) if only else whole


def _part(app: AppSpec, whole: Topology, only: Collection[str]) -> Topology:
    handlers = [spec for spec in app.handlers.values() if spec.name in only]
    projections = {spec.name for spec in app.projections.values() if spec.name in only}
    projections |= {spec.snapshot for spec in app.commands.values() if spec.name in only and spec.snapshot}
    streams, buckets = {app.stream}, {app.schema_bucket}
    if handlers or projections:
        streams.add(dead_letter_stream(app.name))
    if handlers:
        streams |= {retry_stream(app.name), app.advisories}
        streams |= {partition_stream(app.name, spec.name) for spec in handlers}
        buckets |= {handler_bucket(app.name), *(spec.bucket for spec in handlers if spec.bucket)}
    if projections:
        buckets |= {projection_bucket(app.name), *(app.projections[name].bucket.bucket for name in projections)}
    places = {(each.stream, each.name) for spec in handlers for each in consumers_of(app, spec)}
    places |= {(app.advisories, advisory_consumer(app, spec).name) for spec in handlers}
    return dataclasses.replace(
        whole,
        streams=[each for each in whole.streams if each.name in streams],
        buckets=[each for each in whole.buckets if each.bucket in buckets],
        consumers=[each for each in whole.consumers if (each.stream, each.name) in places],
        replaces={copies: place for copies, place in whole.replaces.items() if copies in streams},
    )


def as_safe(app: AppSpec, config: C) -> C:
    """A configuration with as many replicas as the application's stream, unless it declares a number.

    A dead letter, or an event that waits for its retry, is acknowledged in the stream: losing one machine must not lose
    it where the stream would survive. Storage needs no such rule: the default is on disk.
    """
    if config.replicas is not None or app.stream_config.replicas is None:
        return config
    return dataclasses.replace(config, replicas=app.stream_config.replicas)


def _all_buckets(app: AppSpec) -> list[KVConfig]:
    """The declared buckets, and those in which handlers make transactions.

    These need atomic batches, and keys with a TTL: the marks of events go away.
    """
    found = {bucket.bucket: bucket for bucket in app.buckets}
    found |= {name: spec.bucket for name, spec in app.settings.items()}
    needed = {"allow_atomic": True, "limit_marker_ttl_s": MARKER_TTL_S}
    for spec in app.handlers.values():
        if spec.idempotent == "transaction" and spec.bucket is not None:
            bucket = found.get(spec.bucket, KVConfig(bucket=spec.bucket))
            missing = {name: value for name, value in needed.items() if getattr(bucket, name) is None}
            found[spec.bucket] = dataclasses.replace(bucket, **missing)  # type: ignore[arg-type]
    return list(found.values())


def _main_defaults(app: AppSpec) -> dict[str, object]:
    defaults: dict[str, object] = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
    if app.has_timers:
        defaults |= {"allow_message_schedules": True, "allow_message_ttl": True, "allow_rollup": True}
        defaults |= retention_config(survives_age=True)
    if app.entities:
        defaults |= {"allow_rollup": True, "max_messages_per_subject": -1, **retention_config(survives_age=False)}
        if StateSubjects.of(app.name, app.stream).bucket is not None:
            defaults["max_messages_per_subject"] = MANY
    age_s = app.stream_config.max_age_s
    if age_s and age_s < DUPLICATE_WINDOW_S:
        # The server does the same for a new stream; for an existing one it refuses the age instead.
        defaults["duplicate_window_s"] = age_s
    return defaults


def _owned(app: AppSpec, config: C, defaults: Mapping[str, Any]) -> C:
    """A configuration with the owner in its metadata, and with defaults for its open fields."""
    metadata = {**(config.metadata or {}), OWNER: app.name}
    missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    return dataclasses.replace(config, metadata=metadata, **missing)


def _bucket(app: AppSpec, name: str, description: str, **fields: Any) -> KVConfig:
    return KVConfig(bucket=name, description=description, metadata={OWNER: app.name}, **fields)


def _dead_letters(app: AppSpec) -> StreamConfig:
    return StreamConfig(
        name=dead_letter_stream(app.name),
        description="Events that a handler could not handle.",
        subjects=[f"dlq.{app.name}.>"],
        retention="limits",
        allow_direct=True,
        allow_rollup=True,
        allow_message_ttl=True,
        metadata={OWNER: app.name},
    )


def _retries(app: AppSpec) -> StreamConfig:
    return StreamConfig(
        name=retry_stream(app.name),
        description="Events that wait for their next attempt.",
        subjects=[f"retry.{app.name}.>"],
        retention="limits",
        allow_direct=True,
        allow_message_schedules=True,
        allow_message_ttl=True,
        allow_rollup=True,
        metadata={OWNER: app.name},
    )


def _advisory_stream(app: AppSpec) -> StreamConfig:
    filters = [each for spec in app.handlers.values() for each in advisory_subjects(app, spec)]
    return StreamConfig(
        name=app.advisories,
        description="What the server says of events that it, or another client, gave up.",
        subjects=list(dict.fromkeys(filters)),
        retention="limits",
        max_age_s=ADVISORIES_AGE_S,
        max_bytes=ADVISORIES_BYTES,
        discard="old",
        allow_direct=True,
        metadata={OWNER: app.name},
    )


def _copies(app: AppSpec, spec: HandlerSpec, partitions: int) -> StreamConfig:
    """The stream that a handler with partitions reads: the server copies its events there, with the partition in the
    subject.

    It keeps them for at least as long as its source: a restarted server continues after the last copy.
    """
    transforms = partition_transforms(app.name, spec.name, partitions, spec.events, spec.key)
    config = app.stream_config
    return StreamConfig(
        name=partition_stream(app.name, spec.name),
        description=f"Copies of the events of handler {spec.name}, in {partitions} partitions.",
        sources=[StreamSource(name=app.stream, subject_transforms=transforms)],
        retention="limits",
        storage=config.storage,
        max_age_s=config.max_age_s,
        allow_direct=True,
        metadata={OWNER: app.name, "jetspark-handler": spec.name},
    )
