"""Applications that differ in a part from one under test, which itself stays as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from jetspark.app.application import App
from jetspark.app.handlers.handler_spec import HandlerSpec

__all__ = ["changed_app", "with_dependencies", "with_replicas", "with_specs", "without_partitions"]


def changed_app(app: App, **changes: Any) -> App:
    """A copy with other declarations; the rest is shared."""
    return App.of(dataclasses.replace(app.spec, **changes))


def with_specs(app: App, change: Callable[[HandlerSpec], HandlerSpec]) -> App:
    """A copy whose handlers are declared otherwise."""
    return changed_app(app, handlers={name: change(spec) for name, spec in app.handlers.items()})


def without_partitions(app: App) -> App:
    """A copy without partitions. One process has all of them anyway, and a pin that keeps others away has to be renewed
    all the time, which would make time expensive."""
    if all(spec.partitions is None for spec in app.handlers.values()):
        return app
    return with_specs(app, lambda spec: dataclasses.replace(spec, partitions=None))


def with_replicas(app: App) -> App:
    """A copy whose stream has three replicas."""
    return changed_app(app, stream_config=dataclasses.replace(app.spec.stream_config, replicas=3))


def with_dependencies(app: App, dependencies: Iterable[object]) -> App:
    """A copy whose handlers get these in place of what its lifespans yield."""
    given = tuple(dependencies)

    async def instead() -> AsyncIterator[object]:
        yield given

    return changed_app(app, lifespans=(instead,))
