"""A workflow as a class, and one step of a run: from the stored record and an event to the decision. Pure.

A run is an entity: its record is a state in the application's stream. A step reads the record, calls ``react``, and
stores the new record together with the events and timers of the decision in one atomic batch. So they never disagree.

The record has the sequences of the events that the run has taken, so an event that is delivered again changes nothing.
It keeps the last ones only; an event older than all of these cannot be checked, and is refused.

It also has the id of the event of each timer, until that is older than all of these. A timer that fired although it was
cancelled or set again has another id than the recorded one, and changes nothing. The same holds for commands: an answer
counts while the run waits for the command with this id.
"""

from __future__ import annotations

import datetime
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from jetspark.app.commands.command_spec import UNCHANGED, Command, Decision
from jetspark.app.contracts.catalogue import Catalogue, contract_of
from jetspark.app.contracts.envelope import read_data
from jetspark.app.contracts.faults import error_text, user_errors
from jetspark.app.contracts.field_rules import check_sets
from jetspark.app.contracts.tokens import escape, text_of
from jetspark.app.finite_json import check_finite
from jetspark.app.handlers.signatures import check_key
from jetspark.app.timers import TimerDue
from jetspark.app.topology.names import check_app_name
from jetspark.app.workflows.command_events import CommandAnswered, CommandKinds, CommandSent
from jetspark.core.numbers import INT64
from jetspark.errors import ConfigError

__all__ = [
    "RunRecord",
    "RunStatus",
    "StepRecord",
    "StepTaken",
    "StoredCompensation",
    "WorkflowSpec",
    "timer_name",
]

RunStatus: TypeAlias = Literal["running", "done", "failed"]

REMEMBERED = 256
"""The number of taken events that a record lists."""
KEPT_STEPS = 64
"""The number of steps that a record describes."""
LATE = 256
"""How many sequences after the end of a timer the server may still store its event."""


class StoredCompensation(msgspec.Struct, frozen=True, array_like=True):
    """An event or a command that undoes a step, as it was when the step was taken."""

    type: str
    version: int
    data: msgspec.Raw
    is_command: bool = False


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step in the record of a run: for programs that display runs, not for the run itself."""

    sequence: int
    """The sequence of the event that the step took."""
    time: datetime.datetime | None = None
    revision: int = 0
    """The revision of the record that the step stored. The next step fills it in; until then it is the record's own."""
    events: int = 0
    """How many events the step stored, commands among them, directly behind that record."""
    fired: str | None = None
    """The timer of the run that has published the event."""
    timers: dict[str, datetime.datetime] = {}
    """The timers that the step set, and when they are due."""
    cancels: tuple[str, ...] = ()
    status: RunStatus = "running"
    """The status of the run after the step."""
    reason: str | None = None
    by_hand: str | None = None
    """``cancelled`` or ``begun anew``: a person caused the step, not the event."""

    @property
    def stored(self) -> range:
        """Sequences of what the step stored."""
        return range(self.revision + 1, self.revision + 1 + self.events) if self.revision else range(0)


class RunRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stored record of one run."""

    version: int
    """The version of the workflow that wrote the state."""
    key: str = ""
    """The run's key; the record's subject has a hash of a long one."""
    status: RunStatus = "running"
    reason: str | None = None
    """Why a run has failed."""
    state: msgspec.Raw = msgspec.Raw(b"null")
    first: int = 0
    """The sequence of the run's first event."""
    events: tuple[int, ...] = ()
    """Sequences of the events that it has taken, the last ones."""
    timers: dict[str, str] = {}
    """Name of each timer it has set -> id of the event that counts; empty: none is set, and it is not forgotten yet."""
    ended: dict[str, int] = {}
    """Name of a timer that is not set any more -> a sequence below which its last event is, if there is one."""
    commands: dict[str, str] = {}
    """Name of each command whose answer it waits for -> id of the command."""
    compensations: tuple[StoredCompensation, ...] = ()
    """The compensations of all steps so far, in their order."""
    retries: int = 0
    """How often the run was restarted after a failure."""
    started: datetime.datetime | None = None
    updated: datetime.datetime | None = None
    steps: tuple[StepRecord, ...] = ()
    """The last ones."""

    def with_step(self, note: StepRecord, revision: int) -> RunRecord:
        """The record with one more step, where ``revision`` is that of the record before it."""
        before = self.steps
        if before:
            before = (*before[:-1], msgspec.structs.replace(before[-1], revision=revision))
        return msgspec.structs.replace(self, steps=(*before, note)[-KEPT_STEPS:])

    def without_old_timers(self, before: RunRecord | None, revision: int, still_there: Iterable[str] = ()) -> RunRecord:
        """The record without the names of timers whose events would be refused anyway: they are too old to be known.

        A timer's last event is stored before the record with which it ended, or a moment later if the server was just
        storing it. The sequence of that record is known by the step that follows: ``revision``, of ``before``.

        Args:
            still_there: Timers that end with this record, and which the server keeps: they may fire at any time.
        """
        had = {} if before is None else before.timers
        ended = {
            name: self.ended.get(name, revision + LATE)
            for name, id in self.timers.items()
            if not id and had.get(name) == ""
        }
        ended |= dict.fromkeys(still_there, INT64)
        oldest = min(self.events) if len(self.events) >= REMEMBERED else 0
        old = {name for name, sequence in ended.items() if sequence < oldest}
        return msgspec.structs.replace(
            self,
            timers={name: id for name, id in self.timers.items() if name not in old},
            ended={name: sequence for name, sequence in ended.items() if name not in old},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """The result of a step: the next record, and the messages stored with it."""

    record: RunRecord
    events: Sequence[Any] = ()
    """To publish, commands among them as :class:`CommandSent`."""
    timers: Mapping[str, tuple[object, TimerDue]] = field(default_factory=dict)
    """Name -> event, and when."""
    cancels: Sequence[str] = ()


def timer_name(workflow: str, key: str, timer: str) -> str:
    """The name of a run's timer among those of the application.

    A key may have slashes, and the last part has none: so no two timers of two runs have one name.
    """
    return f"{workflow}/{key}/{escape(timer) if '/' in timer or '=' in timer else timer}"


class WorkflowSpec:
    """The declaration of a workflow: ``@app.workflow(name, key=..., ...)``."""

    def __init__(
        self,
        name: str,
        kind: type[object],
        *,
        app: str,
        key: str | Callable[[Any], object],
        events: Iterable[type[object]] | None,
        version: int,
    ) -> None:
        self.name, self.version = check_app_name(name), version
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ConfigError(f"workflow {name!r}: version={version!r}: expected 1 or more")
        react = getattr(kind, "react", None)
        if not inspect.isclass(kind) or not callable(react) or inspect.iscoroutinefunction(react):
            raise ConfigError(f"workflow {name!r}: expected a class with `def react(self, state, event)`, not async")
        hints = _hints(react, name)
        parameters = list(inspect.signature(react).parameters)
        if len(parameters) != 3:
            raise ConfigError(f"workflow {name!r}: react takes {parameters}: expected (self, state, event)")
        named = tuple(events) if events is not None else _kinds(hints.get(parameters[2]))
        self.command_kinds: CommandKinds | None = None
        """Set for a workflow that sends commands; it must take their answers."""
        if CommandAnswered in named:
            self.command_kinds = CommandKinds.of(app, name, key if isinstance(key, str) else None)
            named = tuple(self.command_kinds.answered if each is CommandAnswered else each for each in named)
        self.events = named
        if not self.events:
            raise ConfigError(
                f"workflow {name!r}: react does not say which events it takes: expected their types, as in `def "
                "react(self, state: Flow | None, event: OrderPlaced | OrderPaid) -> Decision | None`, or events=[...]"
            )
        for each in self.events:
            contract_of(each)
        self.key = key
        """A field of the events, or a function of an event."""
        # An answer has the run that it is for, whatever the key is called.
        check_key(f"workflow {name!r}", key, [each for each in self.events if not issubclass(each, CommandAnswered)])
        self.kind: type[object] = kind
        self._workflow: Any = kind()
        state = hints.get(parameters[1], Any)
        self._decode = msgspec.json.Decoder(state).decode
        check_sets(state, f"workflow {name!r}: state")
        self._convert: Callable[[Any], Any] = lambda value: msgspec.convert(value, state, str_keys=True)
        self._upcast = getattr(self._workflow, "upcast", None)
        self._encode = msgspec.json.Encoder(order="sorted").encode

    @property
    def lane_key(self) -> str | Callable[[Any], str]:
        """The key by which its handler keeps events in order: the run."""
        return self.key if isinstance(self.key, str) else self.key_of

    def key_of(self, event: object) -> str:
        """The run that an event belongs to."""
        if isinstance(event, CommandAnswered):
            return event.run
        return text_of(getattr(event, self.key) if isinstance(self.key, str) else self.key(event))

    def state_of(self, record: RunRecord) -> Any:
        """A run's state as ``react`` gets it.

        Raises:
            ConfigError: The state is of a newer version, or cannot be decoded as the type that ``react`` names.
        """
        if record.version > self.version:
            raise ConfigError(
                f"workflow {self.name!r}: run {record.key!r} is of version {record.version}, and this program knows "
                f"{self.version}: run the newer one"
            )
        try:
            if record.version == self.version or self._upcast is None:
                return self._decode(record.state)
            value = msgspec.json.decode(record.state)
            if value is not None:  # None is the state of a run that has none yet, in every version
                for version in range(record.version, self.version):
                    value = self._upcast(value, version)
                    if value is None:
                        # Taken for the state of a run that has none, the next step would overwrite what there is.
                        raise ValueError(f"upcast of version {version} returned None, and not the state")
            return self._convert(value)
        except user_errors() as error:  # upcast is the user's code, and so may be the state's class
            raise ConfigError(
                f"workflow {self.name!r}: the state of run {record.key!r}, version {record.version}, cannot be read: "
                f"{error_text(error)}. Give new fields a default, or write `def upcast(self, state, version)`"
            ) from error

    def react(self, state: Any, event: Any) -> Decision | None:
        """Ask the user's code.

        Raises:
            ConfigError: ``react`` returned neither a decision nor None.
        """
        decided = self._workflow.react(state, event)
        if decided is not None and not isinstance(decided, Decision):
            raise ConfigError(f"workflow {self.name!r}: react returned {decided!r}: expected a Decision, or None")
        return decided

    def step(
        self,
        record: RunRecord | None,
        event: object,
        *,
        id: str,
        sequence: int,
        time: datetime.datetime,
        catalogue: Catalogue,
        timer: str | None = None,
    ) -> StepTaken | None:
        """The step that an event leads to; None if the event changes nothing: taken before, too late, or irrelevant.

        Args:
            id, sequence: The event's id and sequence.
            time: Now.
            catalogue: What compensations are read by.
            timer: The run's timer that has published the event, if one has.

        Raises:
            ConfigError: Whether the event was taken before cannot be decided, or the run cannot be read.
        """
        known = record or RunRecord(self.version, key=self.key_of(event), first=sequence, started=time)
        if sequence in known.events or known.status != "running":
            return None
        if len(known.events) >= REMEMBERED and sequence < min(known.events):
            raise ConfigError(
                f"workflow {self.name!r}: event {sequence} is older than the last {REMEMBERED} that the run has taken: "
                "whether it was one of them is unknown"
            )
        timers, commands = dict(known.timers), dict(known.commands)
        if timer is not None:
            if timers.get(timer) != id:
                return None  # it fired while it was cancelled, or set anew
            timers[timer] = ""
        if isinstance(event, CommandAnswered) and commands.pop(event.name, None) != event.command_id:
            return None  # answered before
        decided = self.react(self.state_of(known) if record is not None else None, event)
        if decided is None and record is None:
            return None  # it begins no run
        events = (*known.events, sequence)[-REMEMBERED:]
        taken = msgspec.structs.replace(known, events=events, timers=timers, commands=commands)
        return self._follow(taken, decided or Decision(), time, catalogue)

    def fail(self, record: RunRecord, reason: str, time: datetime.datetime, catalogue: Catalogue) -> StepTaken:
        """The step that ends a run from outside."""
        return self._follow(record, Decision(failed=reason), time, catalogue)

    def restart(self, record: RunRecord, event: object, time: datetime.datetime, catalogue: Catalogue) -> StepTaken:
        """The step that restarts a failed run with its first event.

        Events that it has taken are not taken again, and its earlier timers and commands no longer count.

        Raises:
            ConfigError: The event begins no run any more.
        """
        decided = self.react(None, event)
        if decided is None:
            raise ConfigError(f"workflow {self.name!r}: react begins no run with {event!r}, which has begun it before")
        known = msgspec.structs.replace(
            record,
            version=self.version,
            status="running",
            state=msgspec.Raw(b"null"),
            timers=dict.fromkeys(record.timers, ""),
            commands={},
            compensations=(),
            retries=record.retries + 1,
            started=time,
        )
        return self._follow(known, decided, time, catalogue)

    def _follow(self, known: RunRecord, decided: Decision, time: datetime.datetime, catalogue: Catalogue) -> StepTaken:
        has_ended = decided.is_done or decided.failed is not None
        if decided.reply is not None:
            raise ConfigError(f"workflow {self.name!r}: react returned a reply, but no caller waits for one")
        if decided.is_done and decided.failed is not None:
            raise ConfigError(
                f"workflow {self.name!r}: react says is_done=True and failed={decided.failed!r}: one of them"
            )
        if has_ended and decided.timers:
            raise ConfigError(f"workflow {self.name!r}: react ends the run and sets timers: expected one of the two")
        wrong = next((each for each in decided.events if isinstance(each, Command)), None)
        if wrong is not None:
            raise ConfigError(f"workflow {self.name!r}: events have {wrong!r}: expected it in commands={{name: ...}}")
        ending = set(known.timers if has_ended else decided.cancels) - set(decided.timers)
        cancels = [name for name, id in known.timers.items() if id and name in ending]
        for each in decided.compensations:
            if not isinstance(each, Command):
                catalogue.declared_version(
                    each
                )  # it is published when the run fails, and then it is too late to say so
        compensations = known.compensations + tuple(map(_portable, decided.compensations))
        events = [*decided.events, *self._commands(known, decided, is_awaited=not has_ended)]
        if decided.failed is not None:
            events += [self._undoing(known.key, each, catalogue) for each in reversed(compensations)]
            compensations = ()
        record = msgspec.structs.replace(
            known,
            version=self.version,
            status="failed" if decided.failed is not None else "done" if decided.is_done else "running",
            reason=decided.failed,
            state=self._new_state(known, decided),
            timers=known.timers | dict.fromkeys(cancels, ""),
            commands={} if has_ended else known.commands,
            compensations=compensations,
            updated=time,
        )
        return StepTaken(record=record, events=events, timers=decided.timers, cancels=cancels)

    def _new_state(self, known: RunRecord, decided: Decision) -> msgspec.Raw:
        if decided.state is UNCHANGED:
            if known.version == self.version:
                return known.state
            return msgspec.Raw(self._encode(self.state_of(known)))
        try:
            data = self._encode(decided.state)
            check_finite("the state", decided.state, data)
            self._decode(data)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"workflow {self.name!r}: react returned a state that cannot be stored: {error}"
            ) from error
        return msgspec.Raw(data)

    def _commands(self, known: RunRecord, decided: Decision, *, is_awaited: bool) -> list[CommandSent]:
        for name in decided.commands:
            if name in known.commands:
                raise ConfigError(
                    f"workflow {self.name!r}: react sends command {name!r}, and the one before it of this name is not "
                    "answered yet: expected another name, or to wait"
                )
        return [
            self._sent(known.key, name, _portable(command), is_awaited=is_awaited)
            for name, command in decided.commands.items()
        ]

    def _sent(self, run: str, name: str, command: StoredCompensation, *, is_awaited: bool) -> CommandSent:
        if not command.is_command:
            raise ConfigError(f"workflow {self.name!r}: commands have {command.type!r}: expected commands, not events")
        if self.command_kinds is None:
            raise ConfigError(
                f"workflow {self.name!r}: react sends command {command.type!r} and does not take what becomes of it: "
                "add CommandAnswered to the types at `event`, or to events=[...]"
            )
        fields = msgspec.json.decode(command.data)
        return self.command_kinds.make_sent(run, name=name, command=command.type, fields=fields, is_awaited=is_awaited)

    def _undoing(self, run: str, compensation: StoredCompensation, catalogue: Catalogue) -> object:
        """The event or command of a compensation for the present code: it may have been recorded long ago, as an older
        version."""
        type_name, version = compensation.type, compensation.version
        if compensation.is_command:
            return self._sent(run, "compensation", compensation, is_awaited=False)
        reading = catalogue.readings.get((type_name, version))
        if reading is None:
            raise ConfigError(
                f"workflow {self.name!r}: a compensation of type {type_name!r} version {version} is not known any "
                "more: register its class with the app, or write its upcast"
            )
        try:
            return read_data(reading, compensation.data)
        except user_errors() as error:  # an upcast is the user's code
            raise ConfigError(
                f"workflow {self.name!r}: a compensation of type {type_name!r} version {version} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error


def _portable(event: object) -> StoredCompensation:
    if isinstance(event, Command) and "__contract__" not in vars(type(event)):
        kind = type(event).__name__
        raise ConfigError(f"{kind} is not a command of an application: write @app.command(...) above its class")
    contract = contract_of(event)
    data = msgspec.Raw(contract.encode(event))
    return StoredCompensation(contract.type, contract.version, data, isinstance(event, Command))


def _hints(react: object, name: str) -> dict[str, object]:
    try:
        return typing.get_type_hints(react)
    except NameError as error:
        raise ConfigError(f"workflow {name!r}: react names a type that is not known here: {error}") from error


def _kinds(hint: object) -> tuple[type[object], ...]:
    alternatives = typing.get_args(hint) or (hint,)
    return tuple(each for each in alternatives if isinstance(each, type) and _is_event(each))


def _is_event(kind: type[object]) -> bool:
    return "__contract__" in vars(kind) or kind is CommandAnswered
