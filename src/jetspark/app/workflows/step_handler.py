"""Runs a workflow as a handler: an event is a step of its run, stored before the event is acknowledged."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from jetspark.app.entities.changes import MAX_MESSAGES
from jetspark.app.entities.entities import EntityChange
from jetspark.app.handlers.context import Context
from jetspark.app.timers import When, firing_subject, timer_subject
from jetspark.app.workflows.commands import CommandSent
from jetspark.app.workflows.workflow_spec import RunRecord, StepNote, StepTaken, WorkflowSpec, timer_name
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = ["carry_out", "handler_of"]

TRIES = 100
"""How often a step is taken anew because another event of the run was faster, on another worker."""


class _AnotherSetting(Exception):
    """An event of a timer that the run has set anew: it may have come late, or the server has stored it late."""


def handler_of(declared: Callable[[], AppSpec], spec: WorkflowSpec) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return the handler that takes the steps of a workflow; ``declared`` returns the spec of its application."""

    async def take_step(event: Any, ctx: Context) -> None:
        app = declared()
        key = spec.key_of(event)
        scheduler = firing_subject(ctx.decoded.headers)
        is_current: bool | None = None

        def decide(change: EntityChange) -> None:
            record: RunRecord | None = change.state
            id, timer = ctx.event_id, _fired(app.name, spec.name, key, record, scheduler)
            if record is not None and timer is not None and record.timers[timer] not in ("", id):
                if is_current is None:
                    raise _AnotherSetting
                if is_current:
                    id = record.timers[timer]  # the server has removed that setting when it stored the event of this
            step = spec.step(
                record,
                event,
                id=id,
                sequence=ctx.sequence,
                time=ctx.now(),
                catalogue=app.catalogue,
                timer=timer,
            )
            if step is not None:
                carry_out(app, spec, key, change, step, StepNote(ctx.sequence, fired=timer))

        try:
            await ctx.entities(spec.name).modify(key, decide, tries=TRIES)
        except _AnotherSetting:
            is_current = await ctx.is_current_timer()
            await ctx.entities(spec.name).modify(key, decide, tries=TRIES)

    take_step.__name__ = take_step.__qualname__ = spec.name
    return take_step


def carry_out(
    app: AppSpec, spec: WorkflowSpec, key: str, change: EntityChange, step: StepTaken, note: StepNote
) -> None:
    """Put everything that follows from a step into one change; ``note`` says why the step was taken.

    Raises:
        ConfigError: A command is none of the application.
    """
    now = step.record.updated
    assert now is not None
    timers, dues = dict(step.record.timers), dict[str, datetime.datetime]()
    for name, (event, when) in step.timers.items():
        dues[name] = When.of_decision(now, when).due or now
        place = timer_name(spec.name, key, name)
        if isinstance(when, datetime.datetime):
            timers[name] = change.set_timer(place, event, at=when)
        else:
            timers[name] = change.set_timer(place, event, after=when)
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
    noted = msgspec.structs.replace(
        note,
        time=now,
        events=len(step.events),
        timers=dues,
        cancels=tuple(step.cancels),
        status=step.record.status,
        reason=step.record.reason,
    )
    # More do not fit into a batch. Those that are left fire, and change nothing in the run: their ids no longer count.
    room = MAX_MESSAGES - len(step.timers)
    record = msgspec.structs.replace(step.record, timers=timers, commands=commands)
    record = record.without_old_timers(change.state, change.revision, step.cancels[room:])
    change.set(record.with_note(noted, change.revision))
    for name in step.cancels[:room]:
        change.cancel_timer(timer_name(spec.name, key, name))


def _fired(app: str, workflow: str, key: str, record: RunRecord | None, scheduler: str | None) -> str | None:
    """The run's timer that has published an event, if one has."""
    if scheduler is None or record is None:
        return None
    names = (name for name in record.timers if timer_subject(app, timer_name(workflow, key, name)) == scheduler)
    return next(names, None)
