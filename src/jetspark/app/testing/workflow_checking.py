"""Checks a workflow under every order of events, duplicates, and races of time-outs with completions.

All moments that a run can come to are visited, nearest first, so the first problem has the shortest history. If there
are more than ``max_states``, random histories follow, each a function of the seed, and one with a problem is shortened.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jetspark.app.application import App
from jetspark.app.commands.command_spec import Command
from jetspark.app.testing.workflow_model import Answers, Arrival, Broken, ModelRun, Move, RunView, WorkflowModel
from jetspark.app.workflows.command_events import CommandAnswered

__all__ = ["WorkflowProblem", "WorkflowReport", "WorkflowSearch", "check_workflow"]

MAX_STEPS = 200
"""A random history that is longer has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSearch:
    """The histories that ``check_workflow`` checks."""

    in_order: bool = False
    """Events arrive in the given order. Timers and answers may still come at any time between them."""
    duplicates: int = 1
    """The largest number of events delivered twice in one history."""
    max_states: int = 10_000
    """Moments to visit exhaustively; beyond that, histories are sampled."""
    histories: int = 1_000
    """The number of random histories, if there are more moments."""
    seed: int = 0
    """The seed of the sample."""


@dataclass(slots=True, kw_only=True)
class WorkflowReport:
    """The result of ``check_workflow``; ``str()`` of it is a line."""

    workflow: str
    states: int = 0
    """Moments that a run can come to."""
    histories: int = 0
    """Random ones, if not every moment was visited."""
    ends: Counter[str] = field(default_factory=Counter)
    """How runs ended, and how often."""

    @property
    def is_exhaustive(self) -> bool:
        """True if every history was checked."""
        return self.histories == 0

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        how = "all of them" if self.is_exhaustive else f"and {self.histories} random histories"
        return f"workflow {self.workflow}: {self.states} states, {how}; ends: {ends or 'none'}"


class WorkflowProblem(AssertionError):
    """A history in which a workflow breaks a rule; the message lists it step by step."""

    def __init__(self, workflow: str, problem: str, history: Sequence[str]) -> None:
        super().__init__(workflow, problem, history)
        self.workflow, self.problem, self.history = workflow, problem, history

    def __str__(self) -> str:
        steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(self.history, 1))
        return f"workflow {self.workflow!r}: {self.problem}\n{steps}"


def check_workflow(
    app: App,
    name: str,
    events: Sequence[object],
    *,
    invariants: Sequence[Callable[[RunView], object]] = (),
    answers: Answers | None = None,
    must_end: bool = True,
    search: WorkflowSearch | None = None,
) -> WorkflowReport:
    """Have one run of a workflow go through everything that can happen, without a server.

    The events may come in any order, and some of them twice; the timers may fire before or after any of them, and
    commands be decided or refused. ``react`` is asked about each step twice, because it must be pure.

    Args:
        events: The events of one run that are published from outside.
        invariants: Functions of a :class:`RunView`; False, or an exception, after any step is a problem.
        answers: By type of published event or sent command, a function that returns the alternative results. For an
            event these are events, lists of them, or None; for a command replies, or ``Refused(reason)``. By default
            commands are decided without a reply, or refused.
        must_end: Report runs that can no longer reach their end.
        search: The histories to check; by default :class:`WorkflowSearch`'s own defaults.

    Raises:
        WorkflowProblem: Something is wrong; the message is the shortest history that was found.
        ConfigError: The workflow does not exist, or the events do not belong to one of its runs.
    """
    search = search or WorkflowSearch()
    checker = _Checker(WorkflowModel(app, name, answers or {}, in_order=search.in_order), invariants, must_end)
    begin = checker.model.begin(events, search.duplicates)
    if not checker.visit_all(begin, search.max_states):
        checker.try_at_random(begin, search.histories, random.Random(search.seed))
    return checker.report


class _FoundProblem(NamedTuple):
    problem: str
    moves: list[Move]


class _Checker:
    def __init__(self, model: WorkflowModel, invariants: Sequence[Callable[[RunView], object]], must_end: bool) -> None:
        self.model, self._invariants, self._must_end = model, invariants, must_end
        self.report = WorkflowReport(workflow=model.spec.name)

    # ---- all of it -----------------------------------------------------------------------------------------------

    def visit_all(self, begin: ModelRun, max_states: int) -> bool:
        """Visit every moment, nearest first; False if there are too many."""
        ways: dict[object, list[Move]] = {self._identity(begin): []}
        sources: dict[object, set[object]] = {}
        waiting, ended = deque([begin]), set()
        while waiting:
            run = waiting.popleft()
            here = self._identity(run)
            if run.is_over:
                ended.add(here)
                self._count_end(run)
            moves = list(self.model.moves(run))
            if self._is_stuck(run, moves):
                self._raise(begin, _FoundProblem(self._stuck(run), ways[here]))
            for move in moves:
                after, problem = self._make(run, move)
                if problem is not None:
                    self._raise(begin, _FoundProblem(problem, [*ways[here], move]))
                there = self._identity(after)
                sources.setdefault(there, set()).add(here)
                if there not in ways:
                    if len(ways) >= max_states:
                        self.report.states = len(ways)
                        return False
                    ways[there] = [*ways[here], move]
                    waiting.append(after)
        self.report.states = len(ways)
        if self._must_end:
            self._check_ends(begin, ways, sources, ended)
        return True

    def _check_ends(
        self, begin: ModelRun, ways: dict[object, list[Move]], sources: dict[object, set[object]], ended: set[object]
    ) -> None:
        """Every moment has to lead to an end: a timer that is set again and again does not."""
        reached, waiting = set(ended), list(ended)
        while waiting:
            for before in sources.get(waiting.pop(), ()):
                if before not in reached:
                    reached.add(before)
                    waiting.append(before)
        lost = next((way for moment, way in ways.items() if moment not in reached), None)
        if lost is not None:
            self._raise(
                begin, _FoundProblem("from here on the same happens again and again, and the run never ends", lost)
            )

    def _identity(self, run: ModelRun) -> object:
        return self.model.identity(run, with_past=bool(self._invariants))

    def _count_end(self, run: ModelRun) -> None:
        assert run.record is not None
        reason = run.record.reason
        self.report.ends["done" if reason is None else f"failed: {reason}"] += 1

    def _make(self, run: ModelRun, move: Move) -> tuple[ModelRun, str | None]:
        """The run after a move, and the broken rule, if any."""
        try:
            after = self.model.make(run, move)
        except Broken as broken:
            return run, str(broken)
        return after, None if after.record is None else self._broken_invariant(self.model.view(after))

    def _broken_invariant(self, view: RunView) -> str | None:
        for invariant in self._invariants:
            name = getattr(invariant, "__name__", repr(invariant))
            try:
                if invariant(view) is False:
                    return f"invariant {name} does not hold"
            except Exception as error:  # whatever it raises is its way to say no
                return f"invariant {name} does not hold: {_first_line(error)}"
        return None

    def _is_stuck(self, run: ModelRun, moves: Sequence[Move]) -> bool:
        # An event may come twice, and need not.
        return self._must_end and not run.is_over and all(move.kind == "again" for move in moves)

    def _stuck(self, run: ModelRun) -> str:
        if run.record is None:
            return "no event has begun a run"
        return "the run never ends: no event, no timer and no answer is left to come"

    # ---- at random -----------------------------------------------------------------------------------------------

    def try_at_random(self, begin: ModelRun, histories: int, rng: random.Random) -> None:
        for _ in range(histories):
            run, moves = begin, list[Move]()
            while choices := list(self.model.moves(run)):
                moves.append(rng.choice(choices))
                run, problem = self._make(run, moves[-1])
                if problem is None and len(moves) == MAX_STEPS and self._must_end:
                    problem = f"the run has no end after {MAX_STEPS} steps"
                if problem is not None:
                    self._raise(begin, self._shortened(begin, _FoundProblem(problem, moves)))
                if len(moves) == MAX_STEPS:
                    break
            self.report.histories += 1
            if run.is_over:
                self._count_end(run)
            elif self._is_stuck(run, choices):
                self._raise(begin, self._shortened(begin, _FoundProblem(self._stuck(run), moves)))

    def _shortened(self, begin: ModelRun, found: _FoundProblem) -> _FoundProblem:
        """The same problem with fewer moves, as long as leaving one out keeps it."""
        place = 0
        while place < len(found.moves) < MAX_STEPS:
            shorter = self._replay(begin, found.moves[:place] + found.moves[place + 1 :])
            if shorter is not None and shorter.problem == found.problem and len(shorter.moves) < len(found.moves):
                found = shorter
            else:
                place += 1
        return found

    def _replay(self, begin: ModelRun, moves: Sequence[Move]) -> _FoundProblem | None:
        """The problem that some moves lead to; impossible moves are left out."""
        run, made = begin, list[Move]()
        for move in moves:
            possible = set(self.model.moves(run))
            # Without the first delivery, a duplicate is the first one.
            chosen = next((each for each in (move, Move("event", move.what, move.choice)) if each in possible), None)
            if chosen is not None:
                made.append(chosen)
                run, problem = self._make(run, chosen)
                if problem is not None:
                    return _FoundProblem(problem, made)
        return _FoundProblem(self._stuck(run), made) if self._is_stuck(run, list(self.model.moves(run))) else None

    # ---- words ---------------------------------------------------------------------------------------------------

    def _raise(self, begin: ModelRun, found: _FoundProblem) -> None:
        run, lines = begin, list[str]()
        for move in found.moves:
            arrived = _arrived(move, self.model.arrive(run, move).event)
            try:
                after = self.model.make(run, move)
            except Broken:
                lines.append(arrived)
                break
            lines.append(f"{arrived}: {_followed(self.model.arrive(run, move), after, self.model)}")
            run = after
        raise WorkflowProblem(self.model.spec.name, found.problem, lines) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _arrived(move: Move, event: object) -> str:
    """A move in words."""
    if move.kind == "timer":
        return f"timer {move.what} fires with {event!r}"
    if isinstance(event, CommandAnswered):
        outcome = f"refused with {event.refused!r}" if event.refused is not None else f"decided with {event.reply!r}"
        return f"command {event.name} is {outcome}"
    if event is None:
        return f"{move.what} has no effect"
    return f"{event!r} comes again" if move.kind == "again" else f"{event!r} comes"


def _followed(arrival: Arrival, after: ModelRun, model: WorkflowModel) -> str:
    """The result of a step in words."""
    before = arrival.run
    old, new = before.record, after.record
    if new is None or new == old:
        return "changes nothing"
    parts = []
    if old is None or old.state != new.state:
        parts.append(f"state {model.spec.state_of(new)!r}")
    new_ones = after.published[len(before.published) :]
    parts += [f"sends {each!r}" if isinstance(each, Command) else f"publishes {each!r}" for each in new_ones]
    ids = {} if old is None else old.timers
    parts += [f"sets timer {name}" for name, id in new.timers.items() if id and ids.get(name) != id]
    ended = [name for name, id in ids.items() if id and not new.timers.get(name) and name != arrival.timer]
    parts += [f"ends timer {name}" for name in ended]
    if new.status != "running":
        parts.append("done" if new.reason is None else f"failed: {new.reason}")
    return "; ".join(parts) or "changes nothing"
