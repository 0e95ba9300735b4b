"""Checks handlers for reliability: under every named failure the result must be the same as without it.

The oracle is a run in which nothing fails. A run with a failure must come to the same end: the same effects, each once;
the same events published, with the same bytes in every attempt; the same state in buckets; no dead letter but those of
an event that cannot be handled; the order of every key; and nothing left to do.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from jetspark.app.application import App
from jetspark.app.testing.app_copies import with_dependencies, with_replicas
from jetspark.app.testing.failures import FAILURES, NamedFailure, Scenario
from jetspark.app.testing.fault_injection import DependencySwitch, with_switch
from jetspark.app.testing.kit import TestApp
from jetspark.app.testing.observations import ObservedRun, RunObserver
from jetspark.errors import ConfigError, RequestTimeout

__all__ = ["COLUMNS", "ReliabilityReport", "ReliabilityRow", "UnreliableHandler", "check_reliability"]

COLUMNS = ("effects", "published", "state", "dead_letters", "order", "end")
"""The table's columns: effects outside the application, published events, buckets, dead letters, order of keys, and the
end of all work."""

NOT_APPLICABLE = None
EVENT_TIME = datetime.datetime(2026, 3, 31, 10, 15, 30, tzinfo=datetime.UTC)
# One event is published this often, so that there is an order to keep.
COPIES = 3


@dataclass(slots=True, kw_only=True)
class ReliabilityRow:
    """One failure and its outcome."""

    name: str
    cells: dict[str, str | None]
    """By column: empty if good, a description of the problem, or None if there was nothing to check."""
    attempts: int
    """How often handlers were started."""


@dataclass(slots=True, kw_only=True)
class ReliabilityReport:
    """The result of ``check_reliability``; ``str()`` of it is a table."""

    app: str
    rows: list[ReliabilityRow] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Every cell that is not as it should be, in words."""
        return [
            f"{row.name}: {column}: {problem}" for row in self.rows for column, problem in row.cells.items() if problem
        ]

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        widths = {column: max(len(column), 9) for column in COLUMNS}
        lines = [f"{'':{width}}  {'  '.join(f'{column:{widths[column]}}' for column in COLUMNS)}  attempts"]
        for row in self.rows:
            cells = [f"{_word(row.cells.get(column)):{widths[column]}}" for column in COLUMNS]
            lines.append(f"{row.name:{width}}  {'  '.join(cells)}  {row.attempts:8}")
        return "\n".join(line.rstrip() for line in lines)


def _word(cell: str | None) -> str:
    return "-" if cell is None else "WRONG" if cell else "ok"


class UnreliableHandler(AssertionError):
    """A handler does not survive a failure; the message names every cell of the table that is wrong."""

    def __init__(self, report: ReliabilityReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        problems = "\n".join(f"  {each}" for each in self.report.problems)
        return f"app {self.report.app!r} is not reliable:\n{problems}\n\n{self.report}"


async def check_reliability(
    app: App,
    *events: object,
    effects: Callable[[], Iterable[object]] | None = None,
    reset: Callable[[], object] | None = None,
    dependencies: Iterable[object] | None = None,
    handler: str | None = None,
    skip: Collection[str] = (),
    seed: int = 0,
) -> ReliabilityReport:
    """Run an application with events once for each failure, in virtual time, and compare with a run without any.

    Args:
        app: The application, with fakes of its dependencies.
        events: The events to publish. A single one is published three times, with three ids. Without failures, all must
            be handled without dead letters.
        effects: Returns everything that handlers have done outside so far, such as ``lambda: bank.charges``; it may
            grow from run to run. Without it, only events, buckets and dead letters are compared.
        reset: Called before each run. Ids and idempotency keys are the same in every run, so a fake that remembers them
            has to forget them here.
        dependencies: What handlers get instead of what the lifespans yield, as in ``TestApp``.
        handler: Faults hit this one; any, if not given.
        skip: Names of failures to leave out; ``jetspark.app.testing.FAILURES`` has them all.

    Returns:
        The table. A failure that cannot happen to this application, because it calls nothing or publishes nothing, is a
        row of dashes.

    Raises:
        UnreliableHandler: Some cell is wrong.
        ConfigError: No event is taken by a handler, or a name is not that of a failure or a handler.
    """
    known = [each.name for each in FAILURES]
    if unknown := sorted(set(skip) - set(known)):
        raise ConfigError(f"skip={unknown}: expected some of {', '.join(map(repr, known))}")
    _check_events(app, events, handler)
    if dependencies is not None:
        app = with_dependencies(app, dependencies)
    several = list(events) if len(events) > 1 else [events[0]] * COPIES
    report = ReliabilityReport(app=app.name)
    calm: ObservedRun | None = None
    for failure in FAILURES:
        if failure.name in skip:
            continue
        if reset is not None:
            reset()
        observed = await _observe(app, failure, several, effects, handler, seed)
        row = _judge(failure, observed, calm or observed)
        report.rows.append(row)
        if calm is None:
            calm = observed
            if report.problems:
                break  # with nothing to compare with there is nothing to find
    if report.problems:
        raise UnreliableHandler(report)
    return report


def _check_events(app: App, events: Sequence[object], handler: str | None) -> None:
    if handler is not None and handler not in app.handlers:
        raise ConfigError(f"handler={handler!r}: expected one of {', '.join(sorted(app.handlers)) or 'no handlers'}")
    specs = [app.handlers[handler]] if handler is not None else app.handlers.values()
    if not events or not any(type(events[0]) in spec.events for spec in specs):
        given = type(events[0]).__name__ if events else "no event"
        known = ", ".join(sorted({kind.__name__ for spec in specs for kind in spec.events})) or "nothing"
        raise ConfigError(f"check_reliability of {given}: expected an event that a handler takes; they take {known}")


async def _observe(
    app: App,
    failure: NamedFailure,
    events: Sequence[object],
    effects: Callable[[], Iterable[object]] | None,
    handler: str | None,
    seed: int,
) -> ObservedRun:
    switch = DependencySwitch()
    if failure.needs_replicas:
        app = with_replicas(app)
    before = list(effects()) if effects is not None else []
    async with TestApp(with_switch(app, switch), seed=seed) as test:
        observer = RunObserver(app, test.injector)
        scenario = Scenario(
            test=test, app=app, handler=handler, events=events, time=EVENT_TIME, switch=switch, observer=observer
        )
        try:
            await failure.run(scenario)
            end = ""
        except RequestTimeout as error:
            end = str(error)
        observed = observer.conclude(test, end)
        observed.scenario = scenario
    if effects is not None:
        observed.effects = [repr(each) for each in list(effects())[len(before) :]]
    return observed


def _judge(failure: NamedFailure, observed: ObservedRun, calm: ObservedRun) -> ReliabilityRow:
    scenario = observed.scenario
    assert scenario is not None
    row = ReliabilityRow(name=failure.name, cells=dict.fromkeys(COLUMNS, NOT_APPLICABLE), attempts=observed.starts)
    if not scenario.has_happened:
        return row
    row.cells = {
        "effects": _effects(observed, calm, may_repeat=failure.may_repeat),
        "published": _published(observed, calm),
        "state": _state(observed, calm),
        "dead_letters": "; ".join(scenario.dead_letter_problems + _dead_letters(observed)),
        "order": observed.order_problem,
        "end": "; ".join(each for each in (observed.end, scenario.run_problem) if each),
    }
    return row


def _effects(observed: ObservedRun, calm: ObservedRun, *, may_repeat: bool) -> str | None:
    if observed.effects is None or calm.effects is None:
        return NOT_APPLICABLE
    found, wanted = Counter(observed.effects), Counter(calm.effects)
    if may_repeat:
        # External systems recognise repeated calls by their idempotency key.
        found, wanted = Counter(set(found)), Counter(set(wanted))
    return _difference(found, wanted, "done")


def _difference(found: Counter[str], wanted: Counter[str], verb: str) -> str:
    parts = [
        f"{each} is {verb} {found[each]} times instead of {wanted[each]}"
        for each in sorted({*found, *wanted})
        if found[each] != wanted[each]
    ]
    return "; ".join(parts)


def _published(observed: ObservedRun, calm: ObservedRun) -> str | None:
    if not calm.published and not observed.published:
        return NOT_APPLICABLE
    problems = [
        f"attempts differ, so that timing decides which one counts: {' and '.join(sorted(bodies))}"
        for bodies in observed.written.values()
        if len(bodies) > 1
    ]
    for id, body in calm.published.items():
        if id not in observed.published:
            problems.append(f"missing: {body}")
        elif observed.published[id] != body:
            problems.append(f"not as without a failure: {observed.published[id]} instead of {body}")
    problems += [f"too much: {body}" for id, body in observed.published.items() if id not in calm.published]
    return "; ".join(problems)


def _state(observed: ObservedRun, calm: ObservedRun) -> str | None:
    if not calm.state and not observed.state:
        return NOT_APPLICABLE
    return "; ".join(
        f"{key} is {observed.state.get(key)!r} instead of {calm.state.get(key)!r}"
        for key in sorted({*observed.state, *calm.state})
        if observed.state.get(key) != calm.state.get(key)
    )


def _dead_letters(observed: ObservedRun) -> list[str]:
    return (
        [f"{len(observed.dead_letters)} instead of none: {'; '.join(observed.dead_letters)}"]
        if observed.dead_letters
        else []
    )
