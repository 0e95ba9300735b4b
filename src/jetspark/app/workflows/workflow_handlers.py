"""The two handlers of a workflow: one takes the steps of its runs, the other sends the commands that a step decided.

A step is stored before its event is acknowledged. A command is sent with retries and dead letters, and its answer is
recorded once.
"""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from jetspark.app.commands.command_spec import Command
from jetspark.app.entities.changes import MAX_MESSAGES
from jetspark.app.entities.entities import EntityChange
from jetspark.app.handlers.context import Context
from jetspark.app.handlers.retry import Reject
from jetspark.app.timers import When, firing_subject, timer_subject
from jetspark.app.workflows.command_events import CommandAnswered, CommandKinds, CommandSent
from jetspark.app.workflows.workflow_spec import RunRecord, StepRecord, StepTaken, WorkflowSpec, timer_name
from jetspark.errors import CommandRefused, ConfigError

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.commands.command_spec import CommandReply
    from jetspark.app.spec import AppSpec

    Call: TypeAlias = Callable[[JetStream, Command, str, float], Awaitable[CommandReply]]

__all__ = ["SENDING_TIMEOUT_S", "carry_out", "handler_of", "sender_of"]

TRIES = 100
"""How often a step is repeated because another worker stored a step of the same run first."""


class _AnotherSetting(Exception):
    """An event of a timer that the run has set again since: it came late, or the server stored it late."""


def handler_of(declared: Callable[[], AppSpec], spec: WorkflowSpec) -> Callable[..., Coroutine[object, object, None]]:
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
                carry_out(app, spec, key, change, step, StepRecord(ctx.sequence, fired=timer))

        try:
            await ctx.entities(spec.name).modify(key, decide, tries=TRIES)
        except _AnotherSetting:
            is_current = await ctx.is_current_timer()
            await ctx.entities(spec.name).modify(key, decide, tries=TRIES)

    take_step.__name__ = take_step.__qualname__ = spec.name
    return take_step


def carry_out(
    app: AppSpec, spec: WorkflowSpec, key: str, change: EntityChange, step: StepTaken, note: StepRecord
) -> None:
    """Put everything that follows from a step into one change; ``note`` is the record of the step.

    Raises:
        ConfigError: The application does not declare a command.
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
    # The batch has no room for more. Timers that are not cancelled fire without effect: their ids no longer count.
    room = MAX_MESSAGES - len(step.timers)
    record = msgspec.structs.replace(step.record, timers=timers, commands=commands)
    record = record.without_old_timers(change.state, change.revision, step.cancels[room:])
    change.set(record.with_step(noted, change.revision))
    for name in step.cancels[:room]:
        change.cancel_timer(timer_name(spec.name, key, name))


def _fired(app: str, workflow: str, key: str, record: RunRecord | None, scheduler: str | None) -> str | None:
    """The run's timer that has published an event, if one has."""
    if scheduler is None or record is None:
        return None
    names = (name for name in record.timers if timer_subject(app, timer_name(workflow, key, name)) == scheduler)
    return next(names, None)


CALL_TIMEOUT_S = 5.0
"""How long an attempt waits for the answer."""
SENDING_TIMEOUT_S = 2 * CALL_TIMEOUT_S
"""The handler's time-out; the worker that takes over from a dead one waits for as long."""


class _Answer(msgspec.Struct, frozen=True):
    """The recorded answer."""

    refused: str | None = None
    reply: object = None
    sequence: int = 0


def sender_of(
    app: Callable[[], AppSpec], workflow: str, kinds: CommandKinds, call_command: Call
) -> Callable[..., Coroutine[object, object, CommandAnswered | None]]:
    """Return the handler that sends the commands of a workflow.

    Args:
        app: Returns the spec of the application, once everything is declared.
        call_command: Sends a command over a connection, with its id and a time-out.
    """

    async def send_command(event: CommandSent, ctx: Context) -> CommandAnswered | None:
        command = _restored(app(), event)

        async def call() -> _Answer:
            try:
                # The id of the event: sent again, the command is answered as it was decided.
                reply = await call_command(ctx.js, command, ctx.event_id, CALL_TIMEOUT_S)
            except CommandRefused as refusal:
                return _Answer(refused=refusal.reason)
            return _Answer(reply=reply.data, sequence=reply.sequence)

        # The log records decisions and not refusals. So the answer is recorded before the run gets it: after a crash
        # the same command may be decided differently, and the run must not get both answers.
        answer = await ctx.once("call", call)
        if event.is_awaited:
            fields = msgspec.structs.asdict(answer)
            return kinds.make_answered(event, command_id=ctx.event_id, **fields)
        if answer.refused is not None:
            raise Reject(f"command {event.command!r} was refused, and its run is over: {answer.refused}")
        return None

    send_command.__name__ = send_command.__qualname__ = f"{workflow}-commands"
    return send_command


def _restored(app: AppSpec, event: CommandSent) -> Command:
    spec = app.commands.get(event.command)
    if spec is None:
        raise ConfigError(f"command {event.command!r} is no longer declared: app {app.name!r} has to declare it")
    command: Command = spec.kind.__contract__.convert(event.fields)
    return command
