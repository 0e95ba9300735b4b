"""Runs a workflow as a handler: an event is a step of its run, stored before the event is acknowledged."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.entities.entities import EntityChange
from jetspark.app.handlers.context import Context
from jetspark.app.timers import firing_subject, timer_subject
from jetspark.app.workflows.commands import CommandSent
from jetspark.app.workflows.declaring import RunRecord, StepTaken, WorkflowSpec, timer_name
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app.declarations import Declarations

__all__ = ["carry_out", "handler_of"]

TRIES = 100
"""How often a step is taken anew because another event of the run was faster, on another worker."""


def handler_of(app: Declarations, spec: WorkflowSpec) -> Callable[..., Coroutine[Any, Any, None]]:
    """The handler that takes the steps of a workflow."""

    catalogue: Catalogue | None = None

    async def take_step(event: Any, ctx: Context) -> None:
        nonlocal catalogue
        # All is declared by now. Asking the application takes longer than the rest of a step.
        known = catalogue = app.catalogue if catalogue is None else catalogue
        key = spec.key_of(event)
        scheduler = firing_subject(ctx.decoded.headers)

        def decide(change: EntityChange) -> None:
            record: RunRecord | None = change.state
            timer = _fired(app.name, spec.name, key, record, scheduler)
            step = spec.step(
                record,
                event,
                id=ctx.event_id,
                sequence=ctx.sequence,
                time=ctx.now(),
                catalogue=known,
                timer=timer,
            )
            if step is not None:
                carry_out(app, spec, key, change, step)

        await ctx.entities(spec.name).modify(key, decide, tries=TRIES)

    take_step.__name__ = take_step.__qualname__ = spec.name
    return take_step


def carry_out(app: Declarations, spec: WorkflowSpec, key: str, change: EntityChange, step: StepTaken) -> None:
    """Put everything that follows from a step into one change.

    Raises:
        ConfigError: A command is none of the application.
    """
    timers = dict(step.record.timers)
    for name, (event, when) in step.timers.items():
        full = timer_name(spec.name, key, name)
        if isinstance(when, datetime.datetime):
            timers[name] = change.set_timer(full, event, at=when)
        else:
            timers[name] = change.set_timer(full, event, after=when)
    commands = dict(step.record.commands)
    for event in step.events:
        if isinstance(event, CommandSent) and event.command not in app.commands:
            known = ", ".join(sorted(app.commands)) or "it has none"
            raise ConfigError(
                f"workflow {spec.name!r} sends command {event.command!r}: expected one of app {app.name!r}: {known}"
            )
        id = change.emit(event)
        if isinstance(event, CommandSent) and event.is_awaited:
            commands[event.name] = id
    change.set(msgspec.structs.replace(step.record, timers=timers, commands=commands))
    # A message ends one timer. Those that are left fire, and change nothing: their ids no longer count.
    for name in step.cancels[: 1 + len(step.events)]:
        change.cancel_timer(timer_name(spec.name, key, name))


def _fired(app: str, workflow: str, key: str, record: RunRecord | None, scheduler: str | None) -> str | None:
    """The run's timer that has published an event, if one has."""
    if scheduler is None or record is None:
        return None
    names = (name for name in record.timers if timer_subject(app, timer_name(workflow, key, name)) == scheduler)
    return next(names, None)
