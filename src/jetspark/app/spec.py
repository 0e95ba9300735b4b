"""The declarations of an application, as plain immutable data.

:class:`~jetspark.app.App` builds an :class:`AppSpec`, one declaration after the other. Workers, clients and tools take
the spec, or the part of it that they need. A spec never changes: a later declaration makes another spec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from jetspark.app.contracts.catalogue import Catalogue, Contract, contract_of, returned_types
from jetspark.app.topology.names import dead_letter_stream, handler_bucket, retry_stream
from jetspark.core.subjects import is_subset
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from jetspark.app.commands.command_spec import CommandSpec
    from jetspark.app.contracts.compatibility import Mode
    from jetspark.app.entities.entity_spec import EntitySpec
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.projections.projection_spec import ProjectionSpec
    from jetspark.app.settings import SettingsSpec
    from jetspark.app.telemetry import HandlerObserver
    from jetspark.app.workflows.workflow_spec import WorkflowSpec
    from jetspark.jetstream.config import StreamConfig
    from jetspark.jetstream.kv import KVConfig

__all__ = ["AppSpec", "HasSpec"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AppSpec:
    """The stream, events, handlers, projections, commands, entities, workflows and settings of an application."""

    name: str
    version: str
    source: str
    """The CloudEvents source of its events."""
    stream_config: StreamConfig
    """The configuration of its stream; without subjects, the stream belongs to another application."""
    compatibility: Mode
    has_timers: bool
    advisories: str
    """The stream that stores the server's advisories about the application's consumers."""
    owns_advisories: bool
    inbox_prefixes: tuple[str, ...]
    events: tuple[type[object], ...] = ()
    """Types of events that were declared by themselves, besides those of handlers and projections."""
    buckets: tuple[KVConfig, ...] = ()
    handlers: Mapping[str, HandlerSpec] = field(default_factory=dict)
    """By durable name."""
    projections: Mapping[str, ProjectionSpec] = field(default_factory=dict)
    commands: Mapping[str, CommandSpec] = field(default_factory=dict)
    entities: Mapping[str, EntitySpec] = field(default_factory=dict)
    workflows: Mapping[str, WorkflowSpec] = field(default_factory=dict)
    settings: Mapping[str, SettingsSpec] = field(default_factory=dict)
    """By bucket."""
    lifespans: tuple[Callable[[], AsyncIterator[object]], ...] = ()
    observers: tuple[HandlerObserver, ...] = ()
    """Notified of every attempt, in every process that runs handlers."""

    @property
    def spec(self) -> AppSpec:
        """The spec itself: functions that take an application take its spec as well."""
        return self

    @property
    def stream(self) -> str:
        return self.stream_config.name or ""

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(self.stream_config.subjects or ())

    @property
    def owns_stream(self) -> bool:
        """True if the application declares its stream; False if it only reads one."""
        return bool(self.subjects)

    @property
    def keeps_what_is_acknowledged(self) -> bool:
        """True if the declaration makes messages stay in the stream after their acknowledgement."""
        return self.stream_config.retention in (None, "limits")

    @property
    def dead_letter_stream(self) -> str:
        return dead_letter_stream(self.name)

    @property
    def retry_stream(self) -> str:
        return retry_stream(self.name)

    @property
    def handler_bucket(self) -> str:
        return handler_bucket(self.name)

    @property
    def schema_bucket(self) -> str:
        """The bucket that keeps the contracts of its events."""
        return f"{self.name}_schemas"

    @cached_property
    def catalogue(self) -> Catalogue:
        """Every declared event type, including the ones that handlers and projections take and handlers return.

        Raises:
            ConfigError: A handler takes a class that is not an event, two classes have one type and version, or the
                stream does not store the subject of an event.
        """
        found = Catalogue()
        kinds = list(self.events)
        for handler in self.handlers.values():
            kinds += [*handler.events, *returned_types(handler.function)]
        for projection in self.projections.values():
            kinds += projection.events
        for kind in kinds:
            if kind not in found:
                self._check_stored(kind)
                found.add(kind)
        return found

    def declared(self, event: object) -> Contract:
        """The contract of an event that is to be published, or of its class.

        Raises:
            ConfigError: The application does not declare it; the message names the remedy.
        """
        return self.catalogue.declared(event)

    def with_events(self, *kinds: type[object]) -> AppSpec:
        """Declare types of events.

        Raises:
            ConfigError: A class is not an event, another class has its type and version, or the stream does not store
                its subject.
        """
        for kind in kinds:
            self._check_stored(kind)
        Catalogue(*self.events, *kinds)
        return dataclasses.replace(self, events=tuple(dict.fromkeys((*self.events, *kinds))))

    def with_subject(self, subject: str) -> AppSpec:
        """Have the application's stream store a subject of JetSpark's own."""
        if subject in self.subjects:
            return self
        config = dataclasses.replace(self.stream_config, subjects=[*self.subjects, subject])
        return dataclasses.replace(self, stream_config=config)

    def _check_stored(self, kind: type[object]) -> None:
        subject = contract_of(kind).subject.filter
        if self.owns_stream and not any(is_subset(subject, stored) for stored in self.subjects):
            raise ConfigError(
                f"{kind.__name__} is published to {subject!r}, which stream {self.stream} does not store: its "
                f"subjects are {', '.join(self.subjects)}"
            )


class HasSpec(Protocol):
    """An :class:`~jetspark.app.App`, or the spec of one."""

    @property
    def spec(self) -> AppSpec: ...
