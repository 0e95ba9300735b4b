"""Compares the decisions of two versions of a workflow about recorded history. Pure.

``react`` is a pure function, so recorded events can be given to it again. Two versions take the events of a run in the
order of the stream, side by side, and what each decides is compared step by step. Up to a sequence, ``since``, only the
old version takes them: that is the state a run was in when the new version took over.

Recorded history contains the input from outside. It does not contain events of timers that were never set. So a timer
counts as recorded while both versions have set it, in the same step, with the same event and due time. A timer that
only the new version sets leaves history at its due time: if the run has a later event, their order is unknown, and the
comparison of the run ends there, as *diverged*. The same holds for commands, whose answers are events: a command that
only the new version sends leaves history at once.

A timer is known by its name and the event in whose step it was set, which the event that it publishes names as its
cause. These two stand for the id of the timer's event in the records here. A command is known by its name: a run waits
for one of a name at a time.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from jetspark.app.contracts.catalogue import Catalogue, contract_of
from jetspark.app.contracts.envelope import Decoded, decode
from jetspark.app.projections.router import Recorded
from jetspark.app.timers import firing_subject, timer_subject
from jetspark.app.workflows.command_events import CommandAnswered, CommandSent
from jetspark.app.workflows.workflow_spec import (
    RunRecord,
    StepTaken,
    StoredCompensation,
    WorkflowSpec,
    timer_name,
)
from jetspark.core.subjects import is_subset
from jetspark.errors import ConfigError, ContractViolation

__all__ = [
    "ComparedRun",
    "Divergence",
    "HistoryComparison",
    "StepDifference",
    "WorkflowCode",
]

MAX_DIFFERENCES = 1000
"""Steps of one run that are described; more are counted."""
MAX_RUNS = 1_000_000
"""Runs that one comparison holds."""

_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
_encode = msgspec.json.Encoder(order="sorted").encode
_OWN = "~"
"""Before an id that no recorded event has."""


class WorkflowCode:
    """One version of a workflow, and the events that it can read."""

    def __init__(self, spec: WorkflowSpec, catalogue: Catalogue) -> None:
        self.spec, self.catalogue = spec, catalogue

    def read(self, message: Recorded) -> Decoded | None:
        """The event, if the workflow takes it.

        Raises:
            ContractViolation: The message cannot be read.
        """
        decoded = decode(message.subject, message.data, message.headers, self.catalogue)
        return decoded if type(decoded.event) in self.spec.events else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """An event about which the two versions decide differently."""

    sequence: int
    time: datetime.datetime
    type: str
    """The type of the event."""
    kinds: tuple[str, ...]
    """The parts that differ: ``cancels``, ``commands``, ``compensations``, ``end``, ``error``, ``events``, ``state`` or
    ``timers``, sorted."""
    old: dict[str, Any]
    """The differing parts of the old version's decision."""
    new: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The point at which recorded history has no answer for the new version of a run."""

    kind: str
    """``timer`` or ``command``, which only the new version has set or sent."""
    name: str
    due: datetime.datetime
    """The due time of the timer, or the time at which the command would have been sent."""
    sequence: int | None
    """The first event after that that the run has; None if it has none."""


@dataclass(slots=True, kw_only=True)
class ComparedRun:
    """The comparison of one run."""

    key: str
    events: int = 0
    """The number of compared events."""
    old_status: str = "none"
    """``none``: no event started a run."""
    new_status: str = "none"
    differences: list[StepDifference] = field(default_factory=list)
    """The first of them; :attr:`difference_count` has all."""
    difference_count: int = 0
    diverged: Divergence | None = None

    @property
    def is_equal(self) -> bool:
        return not self.difference_count

    @property
    def kinds(self) -> list[str]:
        """Everything that differs in one of its steps."""
        found = {kind for each in self.differences for kind in each.kinds}
        return sorted(found | ({"diverged"} if self.diverged is not None else set()))

    def to_dict(self) -> dict[str, object]:
        fields: dict[str, object] = msgspec.to_builtins(self)
        return fields | {"kinds": self.kinds}


class _SetTimer(NamedTuple):
    cause: str
    """The id of the event in whose step it was set."""
    due: datetime.datetime


class _Side:
    """A run in the hands of one version."""

    __slots__ = ("asked", "record", "timers")

    def __init__(self, record: RunRecord | None = None, timers: Mapping[str, _SetTimer] | None = None) -> None:
        self.record = record
        self.timers = dict(timers or {})
        self.asked: dict[str, datetime.datetime] = {}
        """Commands that this version alone has sent, and when."""

    @property
    def status(self) -> str:
        return "none" if self.record is None else self.record.status


class _ComparedRun:
    __slots__ = ("answers", "causes", "compared", "is_stopped", "new", "old")

    def __init__(self, key: str) -> None:
        self.compared = ComparedRun(key=key)
        self.old = _Side()
        self.new: _Side | None = None
        """None until the first compared event."""
        self.causes: dict[str, set[str]] = {}
        """For each timer's name, the events in whose steps one of the versions set it."""
        self.answers: set[str] = set()
        """Ids of commands whose answers were taken."""
        self.is_stopped = False


class HistoryComparison:
    """Takes recorded messages by ascending sequence, of all runs or of some, from the beginning of the stream."""

    def __init__(
        self,
        app: str,
        old: WorkflowCode,
        new: WorkflowCode,
        *,
        since: int = 0,
        keys: Collection[str] = (),
        max_differences: int = MAX_DIFFERENCES,
        max_runs: int = MAX_RUNS,
    ) -> None:
        """
        Args:
            since: The first sequence that the new version takes.
            keys: Only these runs.
        """
        self._app, self._old, self._new, self._since = app, old, new, since
        self._keys, self._max_differences, self._max_runs = frozenset(keys), max_differences, max_runs
        self._runs: dict[str, _ComparedRun] = {}
        self.unreadable = 0
        """Messages that neither version can read."""

    @property
    def filters(self) -> list[str]:
        """The subjects of the events that one version or the other takes; none within another."""
        kinds = [*self._old.spec.events, *self._new.spec.events]
        found = list(dict.fromkeys(contract_of(kind).subject.filter for kind in kinds))
        return [each for each in found if not any(each != other and is_subset(each, other) for other in found)]

    def key_of(self, message: Recorded) -> str | None:
        """The run that a message belongs to; None if neither version takes it, or the run is not compared.

        Raises:
            ConfigError: The versions do not agree on the run.
        """
        found = self._read(message)
        return None if found is None else found[0]

    def take(self, message: Recorded) -> None:
        """Let both versions decide about the next message.

        Raises:
            ConfigError: The versions do not agree on the run it belongs to, or there are too many runs.
        """
        found = self._read(message)
        if found is None:
            return
        key, old, new = found
        run = self._runs.get(key)
        if run is None:
            if len(self._runs) >= self._max_runs:
                raise ConfigError(f"more than {self._max_runs} runs: expected fewer in one comparison; name some keys")
            run = self._runs[key] = _ComparedRun(key)
        decoded: Decoded = old if isinstance(old, Decoded) else new
        firing = self._firing(run, message, decoded)
        if message.sequence < self._since:
            self._step(run, run.old, self._old, message, old, firing)
        elif not run.is_stopped:
            self._compare(run, message, old, new, firing)
        if isinstance(decoded.event, CommandAnswered):
            run.answers.add(decoded.event.command_id)

    def results(self, ended: datetime.datetime) -> Iterator[ComparedRun]:
        """The runs with events that were compared.

        Args:
            ended: The time at which the history ends.
        """
        for run in self._runs.values():
            if run.new is None:
                continue
            if not run.is_stopped:
                self._check_reach(run, ended, None)
            run.compared.old_status, run.compared.new_status = run.old.status, run.new.status
            yield run.compared

    # ---- one message ------------------------------------------------------------------------------------------------

    def _read(self, message: Recorded) -> tuple[str, Any, Any] | None:
        """The run, and what each version makes of the message: an event, nothing, or the reason why it cannot."""
        old, new = (_try(code.read, message) for code in (self._old, self._new))
        if isinstance(old, Exception) and isinstance(new, Exception):
            self.unreadable += 1
            return None
        keys = {
            code.spec.key_of(each.event)
            for code, each in ((self._old, old), (self._new, new))
            if isinstance(each, Decoded)
        }
        if len(keys) > 1:
            one, other = sorted(keys)
            raise ConfigError(
                f"event {message.sequence}: one version takes it for the run {one!r}, the other for {other!r}: runs "
                "can be compared only where both have the same key"
            )
        if not keys or (self._keys and not keys & self._keys):
            return None
        return keys.pop(), old, new

    def _compare(
        self, run: _ComparedRun, message: Recorded, old: Any, new: Any, firing: tuple[str, str] | None
    ) -> None:
        if run.new is None:
            run.new = _Side(run.old.record, run.old.timers)
        if not self._check_reach(run, _time_of(message), message.sequence):
            return
        was_old, was_new = run.old.record, run.new.record
        old_step = self._step(run, run.old, self._old, message, old, firing)
        new_step = self._step(run, run.new, self._new, message, new, firing)
        run.compared.events += 1
        run.is_stopped = isinstance(old_step, Exception) or isinstance(new_step, Exception)
        before, after = _described(was_old, old_step), _described(was_new, new_step)
        self._describe_states(was_old, old_step, was_new, new_step, before, after)
        _withhold_own(run.new, before, after, _time_of(message))
        kinds = sorted(kind for kind in {**before, **after} if before.get(kind) != after.get(kind))
        if kinds:
            self._record(run.compared, message, old if isinstance(old, Decoded) else new, kinds, before, after)

    def _record(
        self,
        compared: ComparedRun,
        message: Recorded,
        decoded: Decoded,
        kinds: list[str],
        before: Mapping[str, object],
        after: Mapping[str, object],
    ) -> None:
        compared.difference_count += 1
        if len(compared.differences) < self._max_differences:
            compared.differences.append(
                StepDifference(
                    sequence=message.sequence,
                    time=_time_of(message),
                    type=decoded.type,
                    kinds=tuple(kinds),
                    old={kind: before.get(kind) for kind in kinds},
                    new={kind: after.get(kind) for kind in kinds},
                )
            )

    def _step(
        self,
        run: _ComparedRun,
        side: _Side,
        code: WorkflowCode,
        message: Recorded,
        read: object,
        firing: tuple[str, str] | None,
    ) -> StepTaken | Exception | None:
        """The decision of one version, whose side of the run advances."""
        if not isinstance(read, Decoded):
            return read if isinstance(read, Exception) else None
        timer, id = (None, read.id) if firing is None else firing
        if timer is not None and side.record is None:
            return None  # only the other version has set it
        now = _time_of(message)
        known = _awaiting(side.record, read.event, run.answers)
        try:
            step = code.spec.step(
                known, read.event, id=id, sequence=message.sequence, time=now, catalogue=code.catalogue, timer=timer
            )
        except Exception as error:
            return error
        if step is None:
            return None
        for name, (_, when) in step.timers.items():
            side.timers[name] = _SetTimer(read.id, _due(when, now))
            run.causes.setdefault(name, set()).add(read.id)
        ids = step.record.timers | dict.fromkeys(step.timers, read.id)
        sent = {each.name: read.id for each in step.events if isinstance(each, CommandSent) and each.is_awaited}
        side.record = msgspec.structs.replace(step.record, timers=ids, commands=step.record.commands | sent)
        side.timers = {name: each for name, each in side.timers.items() if ids.get(name)}
        return step

    def _firing(self, run: _ComparedRun, message: Recorded, decoded: Decoded) -> tuple[str, str] | None:
        """Name and cause of the run's timer that has published a message, if one has."""
        if not run.causes or (scheduler := firing_subject(message.headers)) is None:
            return None
        cause, workflow, key = decoded.causation_id, self._old.spec.name, run.compared.key
        for name, causes in run.causes.items():
            if cause in causes and timer_subject(self._app, timer_name(workflow, key, name)) == scheduler:
                return name, cause or ""
        return None

    def _check_reach(self, run: _ComparedRun, now: datetime.datetime, sequence: int | None) -> bool:
        """True if history is complete up to a moment: nothing was due by then that only the new version waits for."""
        assert run.new is not None
        old, new = run.old.timers, run.new
        own = [("timer", name, timer.due) for name, timer in new.timers.items() if old.get(name) != timer]
        own += [("command", name, sent) for name, sent in new.asked.items()]
        for kind, name, due in own:
            if due <= now:
                run.compared.diverged = Divergence(kind=kind, name=name, due=due, sequence=sequence)
                run.is_stopped = True
                return False
        return True

    def _describe_states(
        self,
        was_old: RunRecord | None,
        old: StepTaken | Exception | None,
        was_new: RunRecord | None,
        new: StepTaken | Exception | None,
        before: dict[str, object],
        after: dict[str, object],
    ) -> None:
        """Describe the states where one of them was written in this step, as the new version reads them."""
        texts = []
        for was, step in ((was_old, old), (was_new, new)):
            record = step.record if isinstance(step, StepTaken) else was
            is_written = isinstance(step, StepTaken) and (was is None or bytes(step.record.state) != bytes(was.state))
            texts.append((is_written, None if record is None else self._state(record)))
        if any(is_written for is_written, _ in texts) and texts[0][1] != texts[1][1]:
            before["state"], after["state"] = texts[0][1], texts[1][1]

    def _state(self, record: RunRecord) -> object:
        try:
            data = _encode(self._new.spec.state_of(record))
        except Exception:
            data = bytes(record.state)
        return msgspec.json.decode(data)


def _time_of(message: Recorded) -> datetime.datetime:
    return _EPOCH + datetime.timedelta(microseconds=message.time_us)


def _try(read: Any, message: Recorded) -> object:
    try:
        return read(message)
    except ContractViolation as error:
        return error


def _awaiting(record: RunRecord | None, event: object, answers: Collection[str]) -> RunRecord | None:
    """The record with the recorded id of the command that an event answers, if the run waits for the command."""
    if record is None or not isinstance(event, CommandAnswered) or event.command_id in answers:
        return record
    known = record.commands.get(event.name)
    if not known or known.startswith(_OWN):
        return record
    return msgspec.structs.replace(record, commands=record.commands | {event.name: event.command_id})


def _withhold_own(side: _Side, old: Mapping[str, Any], new: Mapping[str, Any], now: datetime.datetime) -> None:
    """Leave out the timers and commands that only the new version has: history has no answer to them."""
    if side.record is None:
        return
    timers, commands = (
        {name for name, value in new.get(kind, {}).items() if old.get(kind, {}).get(name) != value}
        for kind in ("timers", "commands")
    )
    if timers or commands:
        marked = {
            kind: {name: f"{_OWN}{id}" if name in own and id else id for name, id in ids.items()}
            for kind, own, ids in (
                ("timers", timers, side.record.timers),
                ("commands", commands, side.record.commands),
            )
        }
        side.record = msgspec.structs.replace(side.record, **marked)
        for name in timers & set(side.timers):
            side.timers[name] = side.timers[name]._replace(cause=f"{_OWN}{side.timers[name].cause}")
    side.asked |= dict.fromkeys(commands, now)
    side.asked = {name: sent for name, sent in side.asked.items() if name in side.record.commands}


def _described(was: RunRecord | None, step: StepTaken | Exception | None) -> dict[str, object]:
    """A step in plain values, without its state and without unchanged parts."""
    if step is None:
        return {}
    if isinstance(step, Exception):
        return {"error": f"{type(step).__name__}: {step}"}
    found: dict[str, object] = {}
    record = step.record
    if record.status != "running":
        found["end"] = record.status if record.reason is None else f"{record.status}: {record.reason}"
    sent: dict[str, CommandSent] = {}
    for each in step.events:
        if isinstance(each, CommandSent):  # compensations have one name for all of them
            sent[each.name if each.name not in sent else f"{each.name} {len(sent) + 1}"] = each
    parts = {
        "events": [each for each in step.events if not isinstance(each, CommandSent)],
        "commands": {
            name: {"command": each.command, "fields": each.fields, "is_awaited": each.is_awaited}
            for name, each in sent.items()
        },
        "timers": step.timers,
        "cancels": sorted(step.cancels),
        "compensations": record.compensations[len(was.compensations) if was is not None else 0 :],
    }
    found |= {name: _plain(value) for name, value in parts.items() if value}
    return found


def _plain(value: object) -> object:
    """A part of a decision as a JSON value; an event is its type, version and data."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, StoredCompensation):
        return msgspec.json.decode(_encode(value))
    contract = getattr(type(value), "__contract__", None)
    if contract is not None and contract.kind is type(value):
        return {"type": contract.type, "version": contract.version, "data": msgspec.json.decode(contract.encode(value))}
    return msgspec.to_builtins(value)


def _due(when: Any, now: datetime.datetime) -> datetime.datetime:
    if isinstance(when, datetime.datetime):
        return when
    return now + (when if isinstance(when, datetime.timedelta) else datetime.timedelta(seconds=when))
