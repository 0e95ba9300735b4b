"""Compares an application with a server, and makes the server as the application declares."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar, cast

from jetspark.aio.jetstream import JetStream
from jetspark.app.contracts.contract_records import check_records
from jetspark.app.contracts.registry import ContractRegistry, missing_records, read_registry
from jetspark.app.contracts.tokens import unescape
from jetspark.app.layout import topology_of
from jetspark.app.topology.declared import (
    DeclaredConsumer,
    Found,
    Step,
    Topology,
    TopologyPlan,
    inherit_advisories,
    inherit_replicas,
    plan_changes,
)
from jetspark.app.topology.key_record import KEYS, changed_keys
from jetspark.app.topology.names import handler_bucket, is_hash
from jetspark.errors import ConsumerNotFound, StreamNotFound, TopologyDrift, TopologyRefused
from jetspark.jetstream.config import ConsumerConfig, StreamConfig
from jetspark.jetstream.kv import KVConfig

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec, HasSpec

__all__ = ["apply_topology", "check_for_drift", "make_plan", "read_found"]

SHOWN_KEYS = 3
"""Parked keys that a plan names."""

_Config = TypeVar("_Config", StreamConfig, KVConfig, ConsumerConfig)


async def read_found(js: JetStream, declared: Topology) -> Found:
    """The server's present state of the declared parts: one request for each, and none for others."""
    streams: dict[str, StreamConfig] = {}
    consumers: dict[tuple[str, str], ConsumerConfig] = {}
    others: dict[str, list[str]] = {}
    names = {config.name for config in declared.streams} | {f"KV_{bucket.bucket}" for bucket in declared.buckets}
    names |= {place.stream for place in declared.consumers}
    names |= {source.name for config in declared.streams for source in config.sources or ()}
    names |= {declared.stream} - {""}
    for name in sorted(names):
        try:
            stream = await js.stream(name)
        except StreamNotFound:
            continue
        streams[name] = stream.cached_info.config
        for place in declared.consumers:
            if place.stream == name:
                try:
                    consumers[name, place.name] = (await stream.consumer(place.name)).cached_info.config
                except ConsumerNotFound:
                    continue
    for config in declared.streams:
        for subject in config.subjects or ():
            others[subject] = [name async for name in js.stream_names(subject) if name != config.name]
    former = await _read_former(js, declared, streams, consumers)
    parked = {
        (place.stream, place.name): await _read_parked(js, declared, place, consumers) for place in declared.consumers
    }
    return Found(streams=streams, consumers=consumers, others=others, former=former, parked=parked)


async def _read_parked(
    js: JetStream,
    declared: Topology,
    place: DeclaredConsumer,
    consumers: Mapping[tuple[str, str], ConsumerConfig],
) -> list[str]:
    """The first keys that a handler has parked, if its workers until now had other keys than it declares."""
    existing = consumers.get((place.stream, place.name))
    before, after = ((each.metadata or {}).get(KEYS, "") for each in (existing or place.config, place.config))
    if not changed_keys(before, after):
        return []
    found: list[str] = []
    try:
        records = await js.kv(handler_bucket(declared.app))
    except StreamNotFound:
        return []
    async with aclosing(cast("AsyncGenerator[str, None]", records.keys(f"parked.{place.name}.>"))) as keys:
        async for key in keys:
            token = key.rpartition(".")[2]
            found.append(token if is_hash(token) else unescape(token))
            if len(found) > SHOWN_KEYS:
                break
    return found


async def _read_former(
    js: JetStream,
    declared: Topology,
    streams: Mapping[str, StreamConfig],
    consumers: Mapping[tuple[str, str], ConsumerConfig],
) -> dict[str, str]:
    """The former streams of handlers that have gained or lost partitions; only missing parts are looked up."""
    found: dict[str, str] = {}
    names = {config.name for config in declared.streams}
    places = {(place.stream, place.name) for place in declared.consumers}
    for copies, (stream, name) in declared.replaces.items():
        try:
            if copies in names and copies not in streams and stream in streams:
                await (await js.stream(stream)).consumer(name)
                found[copies] = f"consumer {name} of {stream}, without partitions"
            elif (stream, name) in places and (stream, name) not in consumers and stream in streams:
                await js.stream(copies)
                found[f"{name} of {stream}"] = f"stream {copies}, with partitions"
        except (StreamNotFound, ConsumerNotFound):
            continue
    return found


async def make_plan(js: JetStream, app: HasSpec) -> TopologyPlan:
    """The steps that make the server match the application's declaration, its contracts included."""
    app = app.spec
    return (await _compare(js, app))[2]


async def _compare(js: JetStream, app: AppSpec, only: Collection[str] = ()) -> tuple[Topology, Found, TopologyPlan]:
    """The declaration, the server's state, and the steps that lead from one to the other."""
    declared = topology_of(app, only)
    found = await read_found(js, declared)
    declared = inherit_advisories(inherit_replicas(declared, found), found)
    plan = plan_changes(declared, found)
    return declared, found, TopologyPlan(plan.app, (*plan.steps, *await _contract_steps(js, app)))


async def apply_topology(js: JetStream, app: HasSpec, *, allow: bool = False) -> TopologyPlan:
    """Take the steps of :func:`make_plan`, and return them. A second call takes none.

    Raises:
        TopologyRefused: A change is destructive and not allowed, or impossible; nothing was done.
    """
    app = app.spec
    declared, found, plan = await _compare(js, app)
    refused = plan.refused(allow)
    if refused:
        raise TopologyRefused(app.name, tuple(map(str, refused)))
    wanted = {(step.kind, step.name) for step in plan.steps}
    for stream in declared.streams:
        if ("stream", stream.name) in wanted:
            await js.create_or_update_stream(_with_metadata_of(found.streams.get(stream.name), stream))
    for bucket in declared.buckets:
        if ("bucket", bucket.bucket) in wanted:
            await js.create_or_update_kv(_with_metadata_of(found.streams.get(f"KV_{bucket.bucket}"), bucket))
    for place in declared.consumers:
        if ("consumer", f"{place.name} of {place.stream}") in wanted:
            config = _with_metadata_of(found.consumers.get((place.stream, place.name)), place.config)
            await (await js.stream(place.stream)).create_or_update_consumer(config)
    if app.owns_stream:
        registry = ContractRegistry(await js.kv(app.schema_bucket))
        for record in missing_records(app.catalogue, await registry.load(), [], app.source):
            await registry.add(record)
    return plan


def _with_metadata_of(existing: StreamConfig | ConsumerConfig | None, wanted: _Config) -> _Config:
    """The wanted configuration with the existing metadata that it does not mention: an update replaces all of it."""
    there = {} if existing is None else dict(existing.metadata or {})
    return dataclasses.replace(wanted, metadata=there | dict(wanted.metadata or {}))


async def check_for_drift(js: JetStream, app: HasSpec, only: Collection[str] = ()) -> None:
    """Refuse to start where the server is not as the application declares; with ``only``, as far as these need it.

    Raises:
        TopologyDrift: The server differs; the message lists the differences.
    """
    app = app.spec
    plan = (await _compare(js, app, only))[2]
    if not plan.is_empty:
        raise TopologyDrift(app.name, tuple(map(str, plan.steps)))


async def _contract_steps(js: JetStream, app: AppSpec) -> list[Step]:
    if not app.owns_stream:
        return []
    records = await read_registry(js, app.schema_bucket)
    findings = check_records(app.catalogue, records, app.compatibility)
    steps = []
    for finding in findings:
        name = f"{finding.type} version {finding.version or finding.against}"
        if finding.is_breaking:
            steps.append(Step("contract", name, "conflict", (), str(finding)))
        else:
            steps.append(Step("contract", name, "create"))
    return steps
