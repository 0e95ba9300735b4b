"""A model of one workflow run: its state, the possible next moves, and their results. Pure.

Steps are those of the real machinery (:class:`WorkflowSpec`); only the stream, the clock and the answers of others are
modelled. What may happen next is a :class:`Move`: an event arrives, the timer that is due first fires, or the oldest
command is answered. Timers fire in the order in which they are due, and everything else may happen before or after.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from jetspark.app.application import App
from jetspark.app.commands.command_spec import Command
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.timers import When
from jetspark.app.workflows.command_events import CommandSent
from jetspark.app.workflows.workflow_spec import RunRecord, RunStatus, StepTaken
from jetspark.errors import CommandRefused, ConfigError

__all__ = ["Answers", "Arrival", "Broken", "ModelRun", "Move", "RunView", "WorkflowModel"]

Answers = Mapping[Any, Callable[[Any], Iterable[Any]]]
BEGIN = datetime.datetime(2026, 3, 31, 10, 15, 30, tzinfo=datetime.UTC)


class Broken(Exception):
    """A step that cannot be taken, or that breaks a rule; the text says why."""


@dataclass(frozen=True, slots=True)
class Move:
    """Something that happens to a run; equal ones are the same in every history."""

    kind: str
    """``event``, ``again`` (an event that was published twice), ``timer`` or ``answer``."""
    what: str
    choice: int = 0
    """The index of the chosen answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run after a step, as invariants see it."""

    key: str
    status: RunStatus
    reason: str | None
    """Why the run has failed."""
    state: Any
    """The state as ``react`` gets it."""
    taken: tuple[object, ...]
    """The events that have arrived, in order, including those without effect."""
    events: tuple[object, ...]
    """The published events, in order."""
    commands: tuple[Command, ...]
    """The sent commands, in order."""
    timers: tuple[str, ...]
    """The names of the timers that are set."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Something that comes at some time: one of these, each of which is some events, one after the other."""

    what: str
    choices: tuple[tuple[object, ...], ...]
    is_given: bool = False


@dataclass(frozen=True, slots=True)
class ModelRun:
    """A run at one moment, with everything in transit."""

    record: RunRecord | None = None
    now_s: float = 0.0
    sequence: int = 0
    arriving: tuple[_Arriving, ...] = ()
    timers: tuple[tuple[float, str, Any], ...] = ()
    """Due time, name and event of each timer that is set."""
    asked: tuple[tuple[CommandSent, str], ...] = ()
    """Commands without an answer, oldest first, and their ids."""
    arrived: tuple[object, ...] = ()
    """Events that others have published, each of which may come again."""
    taken: tuple[object, ...] = ()
    published: tuple[object, ...] = ()
    duplicates: int = 0
    """How many events may still be delivered twice."""

    @property
    def is_over(self) -> bool:
        return self.record is not None and self.record.status != "running"


class Arrival(NamedTuple):
    """An event on its way to a run; None is nothing after all."""

    run: ModelRun
    event: object
    id: str = ""
    timer: str | None = None


class WorkflowModel:
    """A workflow of an application, with what may happen to one run of it."""

    def __init__(self, app: App, name: str, answers: Answers, *, in_order: bool) -> None:
        if name not in app.workflows:
            known = ", ".join(sorted(app.workflows)) or "none"
            raise ConfigError(f"workflow {name!r}: expected one of those of app {app.name!r}: {known}")
        self.app, self.spec, self._answers, self._in_order = app, app.workflows[name], answers, in_order

    def begin(self, events: Sequence[object], duplicates: int) -> ModelRun:
        """A run that nothing has happened to yet.

        Raises:
            ConfigError: There are no events, the workflow does not take one of them, or they belong to several runs.
        """
        kinds = tuple(self.spec.events)
        for event in events:
            if not isinstance(event, kinds):
                raise ConfigError(f"{event!r} is not an event of workflow {self.spec.name!r}")
        keys = {self.spec.key_of(event) for event in events}
        if len(keys) != 1:
            raise ConfigError(f"events of runs {sorted(keys)}: expected events of one run")
        arriving = tuple(_Arriving(text_of_event(event), ((event,),), True) for event in events)
        return ModelRun(arriving=arriving, duplicates=duplicates)

    # ---- what may happen -----------------------------------------------------------------------------------------

    def moves(self, run: ModelRun) -> Iterator[Move]:
        """Every possible next move, each once; empty if the run is over."""
        if run.is_over:
            return
        seen = set()
        has_given = False
        for item in run.arriving:
            if item.is_given and self._in_order:
                if has_given:
                    continue
                has_given = True
            if item.what not in seen:
                seen.add(item.what)
                yield from (Move("event", item.what, choice) for choice in range(len(item.choices)))
        if run.timers:
            first = min(due for due, _, _ in run.timers)
            yield from (Move("timer", name) for due, name, _ in run.timers if due == first)
        if run.asked:
            sent, id = run.asked[0]
            yield from (Move("answer", f"{sent.name} {id}", choice) for choice in range(len(self._replies(sent))))
        if run.duplicates:
            yield from (Move("again", text) for text in dict.fromkeys(map(text_of_event, run.arrived)))

    def make(self, run: ModelRun, move: Move) -> ModelRun:
        """Let something happen.

        Raises:
            Broken: The step cannot be taken.
        """
        arrival = self.arrive(run, move)
        return arrival.run if arrival.event is None else self._take(arrival)

    def arrive(self, run: ModelRun, move: Move) -> Arrival:
        """The arrival that a move causes, before the workflow reacts."""
        if move.kind == "timer":
            due, name, event = next(each for each in run.timers if each[1] == move.what)
            left = tuple(each for each in run.timers if each[1] != name)
            assert run.record is not None
            later = dataclasses.replace(run, now_s=max(due, run.now_s), timers=left)
            return Arrival(later, event, run.record.timers[name], name)
        if move.kind == "answer":
            sent, id = run.asked[0]
            reply = self._replies(sent)[move.choice]
            assert self.spec.command_kinds is not None
            fields = {"refused": reply.reason} if isinstance(reply, CommandRefused) else {"reply": reply}
            answered = self.spec.command_kinds.make_answered(sent, command_id=id, **fields)
            return Arrival(dataclasses.replace(run, asked=run.asked[1:]), answered)
        if move.kind == "again":
            event = next(each for each in run.arrived if text_of_event(each) == move.what)
            return Arrival(dataclasses.replace(run, duplicates=run.duplicates - 1), event)
        place = next(place for place, item in enumerate(run.arriving) if item.what == move.what)
        event, *more = run.arriving[place].choices[move.choice] or (None,)
        rest = tuple(_Arriving(text_of_event(each), ((each,),)) for each in more)
        arriving = run.arriving[:place] + rest + run.arriving[place + 1 :]
        arrived = run.arrived if event is None else (*run.arrived, event)
        return Arrival(dataclasses.replace(run, arriving=arriving, arrived=arrived), event)

    def view(self, run: ModelRun) -> RunView:
        """The view that invariants get; only for a run that has started."""
        record = run.record
        assert record is not None
        return RunView(
            key=record.key,
            status=record.status,
            reason=record.reason,
            state=self.spec.state_of(record),
            taken=run.taken,
            events=tuple(each for each in run.published if not isinstance(each, Command)),
            commands=tuple(each for each in run.published if isinstance(each, Command)),
            timers=tuple(name for name, id in record.timers.items() if id),
        )

    def identity(self, run: ModelRun, *, with_past: bool) -> object:
        """Equal for two moments with the same possible future; with ``with_past`` also with the same past."""
        record = run.record
        known = None
        if record is not None:
            # Without times, and without the numbers that the model gives to messages.
            plain = msgspec.structs.replace(
                record, events=(), first=0, timers={}, commands={}, started=None, updated=None
            )
            known = msgspec.json.encode(plain)
        return (
            known,
            tuple(sorted((item.what, len(item.choices), item.is_given) for item in run.arriving)),
            tuple(sorted((due - run.now_s, name, text_of_event(event)) for due, name, event in run.timers)),
            tuple((sent.name, text_of_event(sent)) for sent, _ in run.asked),
            tuple(map(text_of_event, run.taken + run.published)) if with_past else None,
            run.duplicates,
            frozenset(map(text_of_event, run.arrived)) if run.duplicates else None,
        )

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _take(self, arrival: Arrival) -> ModelRun:
        run, event, id, timer = arrival
        run = dataclasses.replace(run, sequence=run.sequence + 1, taken=(*run.taken, event))
        step, again = self._step(run, event, id, timer), self._step(run, event, id, timer)
        if step != again:
            raise Broken(
                f"react is not pure: called twice with the same arguments, it returns {_said(step)} and {_said(again)}"
            )
        return run if step is None else self._carry_out(run, step)

    def _step(self, run: ModelRun, event: object, id: str, timer: str | None) -> StepTaken | None:
        try:
            return self.spec.step(
                run.record,
                event,
                id=id,
                sequence=run.sequence,
                time=self._time(run),
                catalogue=self.app.catalogue,
                timer=timer,
            )
        except Exception as error:  # it is the user's code
            text = (str(error).splitlines() or [""])[0]
            raise Broken(f"react raised {type(error).__name__}: {text}") from error

    def _carry_out(self, run: ModelRun, step: StepTaken) -> ModelRun:
        """Apply a step as the stream would."""
        ids, set_timers = dict(step.record.timers), []
        timers = {name: (due, name, event) for due, name, event in run.timers if ids.get(name)}
        if step.timers and not self.app.spec.has_timers:
            raise Broken(f"it sets timers, and app {self.app.name!r} has none: declare it with App(..., timers=True)")
        for name, (event, when) in step.timers.items():
            ids[name] = f"t{run.sequence} {name}"
            timers[name] = (self._due(run, when), name, event)
            set_timers.append(event)
        asked, commands = list(run.asked), dict(step.record.commands)
        published, arriving = list(run.published), list(run.arriving)
        for place, event in enumerate(step.events):
            if not isinstance(event, CommandSent):
                published.append(event)
                arriving += self._following(event)
                continue
            published.append(self._command(event))
            if event.is_awaited:
                commands[event.name] = f"c{run.sequence} {place}"
                asked.append((event, commands[event.name]))
        self._check_events([*published[len(run.published) :], *set_timers])
        return dataclasses.replace(
            run,
            record=msgspec.structs.replace(step.record, timers=ids, commands=commands),
            timers=tuple(sorted(timers.values(), key=lambda each: each[:2])),
            asked=tuple(asked),
            published=tuple(published),
            arriving=tuple(arriving),
        )

    def _check_events(self, events: Iterable[object]) -> None:
        try:
            for event in events:
                text_of_event(event)
                if not isinstance(event, Command):
                    self.app.spec.declared(event)
        except Exception as error:
            raise Broken(f"what it publishes cannot be stored: {error}") from error

    def _command(self, sent: CommandSent) -> Command:
        spec = self.app.commands.get(sent.command)
        if spec is None:
            raise Broken(f"it sends command {sent.command!r}, which app {self.app.name!r} does not declare")
        command: Command = spec.kind.__contract__.convert(sent.fields)
        return command

    def _replies(self, sent: CommandSent) -> list[object]:
        """The possible answers to a command: the given ones, otherwise an acceptance and a refusal."""
        command = self._command(sent)
        found = self._answers.get(type(command))
        return [None, CommandRefused("refused")] if found is None else list(found(command))

    def _following(self, event: object) -> list[_Arriving]:
        found = self._answers.get(type(event))
        if found is None:
            return []
        choices = tuple(
            () if each is None else tuple(each) if isinstance(each, list | tuple) else (each,) for each in found(event)
        )
        return [_Arriving(f"what follows {event!r}", choices)] if choices else []

    def _time(self, run: ModelRun) -> datetime.datetime:
        return BEGIN + datetime.timedelta(seconds=run.now_s)

    def _due(self, run: ModelRun, when: Any) -> float:
        try:
            due = When.of_decision(self._time(run), when).due
        except ConfigError as error:
            raise Broken(str(error)) from error
        assert due is not None
        return (due - BEGIN).total_seconds()


def text_of_event(event: object) -> str:
    """An event as text: equal for equal ones."""
    contract = contract_of(event)
    return f"{contract.type} {contract.encode(event).decode()}"


def _said(step: StepTaken | None) -> str:
    if step is None:
        return "nothing"
    return f"{step.record.status}, state {bytes(step.record.state).decode()}, events {list(step.events)!r}"
