"""The consumers of a handler: for its events, for its retries, and for the server's advisories about its events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.handlers.partitions import PIN_GROUP, partition_consumer, partition_filter
from jetspark.app.topology.declared import OWNER, DeclaredConsumer
from jetspark.app.topology.key_record import KEYS, key_record
from jetspark.app.topology.names import (
    ADVISORY_KINDS,
    advisory_consumer_name,
    advisory_subject,
    partition_stream,
    retry_stream,
)
from jetspark.core.subjects import reading_filters
from jetspark.jetstream.config import ConsumerConfig

if TYPE_CHECKING:
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.spec import AppSpec

__all__ = ["advisory_consumer", "advisory_subjects", "consumers_of", "handler_filters"]

WORKERS = 8
"""Processes of one handler that can each hold ``max_messages`` at a time; with more of them each holds less."""


def consumers_of(app: AppSpec, spec: HandlerSpec) -> list[DeclaredConsumer]:
    """The consumers of a handler: one for its events and one for its retries, or two for each partition."""
    if spec.partitions is None:
        filters = handler_filters(app, spec)
        one = {"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": filters}
        events = _consumer(app, spec, spec.durable, **one)
        keys = {KEYS: key_record(spec.events, _key_of(app, spec), in_order=spec.in_order)}
        return [
            DeclaredConsumer(app.stream, dataclasses.replace(events, metadata={**(events.metadata or {}), **keys})),
            DeclaredConsumer(retry_stream(app.name), _retry_consumer(app, spec, spec.durable, "")),
        ]
    copies, places = partition_stream(app.name, spec.name), []
    pinned = {
        "priority_policy": "pinned_client",
        "priority_groups": [PIN_GROUP],
        "priority_timeout_s": spec.takeover_s,
    }
    for partition in range(spec.partitions):
        name = partition_consumer(spec.durable, partition)
        one = {"filter_subject": partition_filter(app.name, spec.name, partition)}
        places.append(DeclaredConsumer(copies, _consumer(app, spec, name, **one, **pinned)))
        retries = _retry_consumer(app, spec, name, f"-{partition}")
        places.append(DeclaredConsumer(retry_stream(app.name), retries))
    return places


def handler_filters(app: AppSpec, spec: HandlerSpec) -> list[str]:
    """The filters of a handler's consumer: the subjects of its events, or ``>`` for the whole stream.

    Several filters with wildcards cost the server milliseconds a message: see ``reading_filters``.
    """
    filters = list(dict.fromkeys(contract_of(kind).subject.filter for kind in spec.events))
    reads_all = spec.filtered is False
    if spec.filtered is None and spec.partitions is None and app.owns_stream and app.keeps_what_is_acknowledged:
        reads_all = len(filters) > 1 and not reading_filters(filters, may_read_all=True)
    return [">"] if reads_all else filters


def advisory_consumer(app: AppSpec, spec: HandlerSpec) -> DeclaredConsumer:
    """The consumer of the advisories about a handler's events, which its workers share."""
    config = ConsumerConfig(
        durable_name=advisory_consumer_name(app.name, spec.name),
        ack_policy="explicit",
        # Events that were given up before this handler existed are not its own.
        deliver_policy="new",
        ack_wait_s=10.0,
        max_deliver=-1,
        filter_subjects=advisory_subjects(app, spec),
        metadata={OWNER: app.name, "jetspark-handler": spec.name},
    )
    return DeclaredConsumer(app.advisories, config)


def advisory_subjects(app: AppSpec, spec: HandlerSpec) -> list[str]:
    """The subjects of advisories about a handler's consumers.

    On a stream that other handlers read as well, only its own consumer is named: a subject can be in one stream only.
    """
    retries = retry_stream(app.name)
    places = [(app.stream, spec.durable), (retries, "*")]
    if spec.partitions is not None:
        places[0] = (partition_stream(app.name, spec.name), "*")
    return [advisory_subject(kind, stream, name) for kind in ADVISORY_KINDS for stream, name in places]


def _key_of(app: AppSpec, spec: HandlerSpec) -> str | Callable[[Any], Any] | None:
    """A handler's key as its author wrote it."""
    workflow = app.workflows.get(spec.name)
    return spec.key if workflow is None else workflow.key


def _consumer(app: AppSpec, spec: HandlerSpec, name: str, **fields: Any) -> ConsumerConfig:
    return ConsumerConfig(
        durable_name=name,
        ack_policy="explicit",
        ack_wait_s=spec.ack_wait_s,
        # Attempts are counted by handlers; the server must not give up before them.
        max_deliver=-1,
        max_ack_pending=WORKERS * spec.max_messages,
        metadata={OWNER: app.name, "jetspark-handler": spec.name},
        **fields,
    )


def _retry_consumer(app: AppSpec, spec: HandlerSpec, name: str, partition: str) -> ConsumerConfig:
    waits = f"retry.{app.name}.{spec.name}"
    # Two filters with wildcards are cheap here. If every tenth of 100,000 messages is for the consumer, each costs
    # the server 16 us of CPU, and 10 with one filter; if every thousandth is, all together 90 ms, and 30 (2.15.1).
    return _consumer(app, spec, name, filter_subjects=[f"{waits}.due{partition}.>", f"{waits}.redrive{partition}.>"])
