"""The failures of :func:`check_reliability`: each is a small script that publishes events and injects a fault."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from jetspark.app.application import App
from jetspark.app.causes import current_cause
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.handlers.handler_spec import HandlerSpec
from jetspark.app.handlers.retry import Reject, RetryIn
from jetspark.app.testing.fault_injection import DependencySwitch, InjectedFault
from jetspark.app.testing.kit import TestApp
from jetspark.app.testing.observations import EVENT_ID, RunObserver
from jetspark.app.testing.steps import StepMoment
from jetspark.errors import RequestTimeout

__all__ = ["FAILURES", "NamedFailure", "Scenario"]

FIRST = EVENT_ID.format(1)
# A retry later than this is not waited for.
LONGEST_S = 30 * 86400.0
# After this a stream has forgotten the ids it knew; the default window is two minutes.
BEYOND_DUPLICATES_S = 120.0
RETRY_LATER_S = 3600.0
# A quick election: the default retry policy outlasts it with any jitter.
ELECTION_S = 1.0
# Handlers that take longer than this, or are started more often than this for each event, are reported as endless.
LONGEST_RUN_S = 3600.0
MOST_STARTS = 100
# How often the application is checked.
LOOK_S = 5.0


@dataclass(slots=True, kw_only=True)
class Scenario:
    """One run: the application under test, its events, and the outcome."""

    test: TestApp
    app: App
    handler: str | None
    events: Sequence[object]
    time: datetime.datetime
    switch: DependencySwitch
    observer: RunObserver
    has_happened: bool = True
    """False if the failure could not be caused; it then proves nothing."""
    dead_letter_problems: list[str] = field(default_factory=list)
    """Problems with dead letters found during the run."""
    run_problem: str = ""
    """The first event was not run as often as it had to be."""

    async def publish(self, *numbers: int) -> None:
        """Publish the events, or some of them, by their numbers from 1 on."""
        for number in numbers or range(1, len(self.events) + 1):
            id = EVENT_ID.format(number)
            await self.test.publish(self.events[number - 1], id=id, time=self.time, timeout=60.0)

    async def finish(self) -> None:
        """Let everything happen that is to happen, however late.

        Raises:
            RequestTimeout: The application does not become idle.
        """
        waited_s, step_s = 0.0, 60.0
        await self.wait_until_idle()
        while self._waits():
            if waited_s > LONGEST_S:
                raise RequestTimeout(f"app {self.app.name!r} still has events to retry", waited_s)
            self.test.advance(step_s)
            waited_s, step_s = waited_s + step_s, step_s * 1.5
            await self.wait_until_idle()

    async def wait_until_idle(self) -> None:
        """Let happen what happens soon.

        Raises:
            RequestTimeout: The application does not become idle.
        """
        most = MOST_STARTS * len(self.events) * max(1, len(self.app.handlers))
        began = self.test.now
        while True:
            try:
                return await self.test.settled(timeout=LOOK_S)
            except RequestTimeout as error:
                if self.observer.starts > most or self.test.now > began + LONGEST_RUN_S:
                    words = f"{error.what}, and handlers were started {self.observer.starts} times"
                    raise RequestTimeout(words, self.test.now - began) from None

    def _waits(self) -> bool:
        messages = self.test.network.front.model.messages(self.app.spec.retry_stream)
        return any(".wait." in each.subject for each in messages)

    def happened(self, *faults: InjectedFault) -> None:
        self.has_happened = all(each.happened for each in faults)

    def hook(self, hook: Callable[[StepMoment, int], Awaitable[None]]) -> Callable[[], int]:
        """Call ``hook`` before and after each run of the first event, with the number of the run; returns a function
        that returns the number of runs."""
        runs = 0

        async def on_run(when: StepMoment, handler: str, event: object) -> None:
            nonlocal runs
            cause = current_cause.get()
            if (self.handler in (None, handler)) and (cause is None or cause.id == FIRST):
                runs += when == "before"
                await hook(when, runs)

        self.test.injector.run_hooks.append(on_run)
        return lambda: runs


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFailure:
    """Something that can go wrong."""

    name: str
    run: Callable[[Scenario], Awaitable[None]]
    may_repeat: bool = False
    """An effect of ``ctx.once`` may be done and not recorded. It is repeated, with the same idempotency key."""
    needs_replicas: bool = False
    """The stream is made with three, whatever it is declared with."""


async def _nothing(scenario: Scenario) -> None:
    await scenario.publish()
    await scenario.finish()


async def _published_again(scenario: Scenario) -> None:
    await scenario.publish()
    await scenario.finish()
    window_s = scenario.app.spec.stream_config.duplicate_window_s or 0.0
    scenario.test.advance(max(window_s, BEYOND_DUPLICATES_S) + 60.0)
    await scenario.publish(1)
    await scenario.finish()


async def _ack_lost(scenario: Scenario) -> None:
    fault = scenario.test.drop_ack(handler=scenario.handler)
    await scenario.publish()
    await scenario.finish()
    scenario.happened(fault)


def _crash(at: str) -> Callable[[Scenario], Awaitable[None]]:
    async def run(scenario: Scenario) -> None:
        fault = scenario.test.crash(at, handler=scenario.handler)
        await scenario.publish()
        await scenario.finish()
        scenario.happened(fault)

    return run


def _restart(at: str) -> Callable[[Scenario], Awaitable[None]]:
    async def run(scenario: Scenario) -> None:
        await scenario.publish()
        fault = scenario.test.restart_server(5.0, at=at)
        await scenario.finish()
        scenario.happened(fault)

    return run


async def _cut(scenario: Scenario) -> None:
    await scenario.publish()
    fault = scenario.test.cut_connection(at="after RunHandler")
    await scenario.finish()
    scenario.happened(fault)


async def _leader_lost(scenario: Scenario) -> None:
    if not scenario.app.spec.owns_stream:
        scenario.has_happened = False
        return
    await scenario.publish()
    fault = scenario.test.lose_leader(ELECTION_S, at="before RunHandler")
    await scenario.finish()
    scenario.happened(fault)


def _fails(when_it_fails: StepMoment, times: int | None) -> Callable[[Scenario], Awaitable[None]]:
    """The handler's code raises an error that may pass, once or as often as it may without being given up."""

    async def run(scenario: Scenario) -> None:
        budget = min(spec.retry.attempts for spec in _hit(scenario))
        failures = budget - 1 if times is None else times
        if failures >= budget:  # its policy gives up before
            scenario.has_happened = False
            return

        async def fail(when: StepMoment, number: int) -> None:
            if when == when_it_fails and number <= failures:
                raise RetryIn(RETRY_LATER_S if times is None else 1.0, "a failure by order of the test")

        runs = scenario.hook(fail)
        await scenario.publish()
        await scenario.finish()
        scenario.has_happened = runs() > 0 and failures > 0
        if runs() != failures + 1 and len(_hit(scenario)) == 1:
            scenario.run_problem = f"the first event failed {failures} times and was run {runs()} times"

    return run


async def _slow(scenario: Scenario) -> None:
    """Nearly as slow as it may be, and ``in_progress`` does not get through."""
    spec = min(_hit(scenario), key=lambda each: each.timeout)

    async def sleep(when: StepMoment, number: int) -> None:
        if when == "before" and number == 1:
            await asyncio.sleep(0.9 * spec.timeout)

    test = scenario.test
    test.injector.set("before InProgress", lambda: True, name="drop", handler=scenario.handler, times=1000)
    runs = scenario.hook(sleep)
    await scenario.publish()
    await scenario.finish()
    scenario.has_happened = runs() > 0


async def _too_slow(scenario: Scenario) -> None:
    if min(spec.retry.attempts for spec in _hit(scenario)) < 2:
        scenario.has_happened = False
        return

    async def sleep(when: StepMoment, number: int) -> None:
        if when == "before" and number == 1:
            await asyncio.sleep(2 * max(spec.timeout for spec in _hit(scenario)))

    runs = scenario.hook(sleep)
    await scenario.publish()
    await scenario.finish()
    scenario.has_happened = runs() > 1


async def _dependencies_down(scenario: Scenario) -> None:
    switch = scenario.switch
    if min(spec.retry.attempts for spec in _hit(scenario)) < 2:
        scenario.has_happened = False
        return

    async def turn(when: StepMoment, number: int) -> None:
        switch.is_down = when == "before" and number == 1

    scenario.hook(turn)
    await scenario.publish(1)
    await scenario.wait_until_idle()
    switch.is_down = False
    await scenario.publish(*range(2, len(scenario.events) + 1))
    await scenario.finish()
    scenario.has_happened = switch.refused > 0


async def _poison(scenario: Scenario) -> None:
    """The first event cannot be handled until the handler is repaired and its dead letters are redriven."""
    hit = _hit(scenario)
    if not all(spec.dead_letter and spec.batch is None for spec in hit):
        scenario.has_happened = False
        return
    is_mended = False

    async def reject(when: StepMoment, number: int) -> None:
        if when == "before" and not is_mended:
            raise Reject("poison by order of the test")

    runs = scenario.hook(reject)
    await scenario.publish()
    await scenario.finish()
    dead_letters = scenario.test.dead_letters
    opened = [each for each in dead_letters if each.status == "open"]
    if len(opened) != len(hit) or any(each.origin.sequence != 1 for each in opened):
        found = ", ".join(f"{each.handler} {each.origin.sequence}" for each in opened) or "none"
        scenario.dead_letter_problems.append(f"expected one of event 1 for each handler, found {found}")
    for each in dead_letters:
        if each.status == "behind" and each.key != dead_letters[0].key:
            scenario.dead_letter_problems.append(
                f"event {each.origin.sequence} of key {each.key!r} waits behind another key"
            )
    is_mended = True
    await scenario.test.redrive()
    await scenario.finish()
    scenario.has_happened = runs() > 0


async def _no_event(scenario: Scenario) -> None:
    """A message in the stream is not an event. It holds up its key, if its subject names one, until it is discarded."""
    hit = _hit(scenario)
    if not all(spec.dead_letter for spec in hit) or not scenario.app.spec.owns_stream:
        scenario.has_happened = False
        return
    event = scenario.events[0]
    subject = contract_of(event).subject.format(event)
    await scenario.test.publish_raw(subject, b"no event")
    await scenario.publish()
    await scenario.finish()
    discarded = await scenario.test.discard()
    if discarded != len(hit):
        scenario.dead_letter_problems.append(f"expected one for each of {len(hit)} handlers, found {discarded}")
    await scenario.finish()


def _hit(scenario: Scenario) -> list[HandlerSpec]:
    """The handlers that the first event goes to."""
    kind = type(scenario.events[0])
    return [
        spec for spec in scenario.app.handlers.values() if kind in spec.events and scenario.handler in (None, spec.name)
    ]


FAILURES: tuple[NamedFailure, ...] = (
    NamedFailure(name="nothing fails", run=_nothing),
    NamedFailure(name="the event is published again", run=_published_again),
    NamedFailure(name="its acknowledgement is lost", run=_ack_lost),
    NamedFailure(name="the worker dies before the handler", run=_crash("before RunHandler")),
    NamedFailure(name="the worker dies after the handler", run=_crash("after RunHandler")),
    NamedFailure(
        name="the worker dies before an effect is recorded", run=_crash("before RecordEffect"), may_repeat=True
    ),
    NamedFailure(name="the worker dies after an effect is recorded", run=_crash("after RecordEffect")),
    NamedFailure(name="the worker dies before a commit", run=_crash("before Commit")),
    NamedFailure(name="the worker dies after a commit", run=_crash("after Commit")),
    NamedFailure(name="the worker dies before it publishes", run=_crash("before Publish")),
    NamedFailure(name="the worker dies after it published", run=_crash("after Publish")),
    NamedFailure(name="the worker dies before it acknowledges", run=_crash("before Acknowledge")),
    NamedFailure(name="the worker dies after it acknowledged", run=_crash("after Acknowledge")),
    NamedFailure(name="the handler fails before its effects", run=_fails("before", 1)),
    NamedFailure(name="the handler fails after its effects", run=_fails("after", 1)),
    NamedFailure(name="the handler fails for hours", run=_fails("before", None)),
    NamedFailure(name="the handler is slow", run=_slow),
    NamedFailure(name="the handler is too slow", run=_too_slow),
    NamedFailure(name="its dependencies are down", run=_dependencies_down),
    NamedFailure(name="the server restarts before the handler", run=_restart("before RunHandler")),
    NamedFailure(name="the server restarts after the handler", run=_restart("after RunHandler")),
    NamedFailure(name="the connection is lost", run=_cut),
    NamedFailure(name="the stream loses its leader", run=_leader_lost, needs_replicas=True),
    NamedFailure(name="the event cannot be handled", run=_poison),
    NamedFailure(name="the message is no event", run=_no_event),
)
"""The first one is what all others are compared with."""
