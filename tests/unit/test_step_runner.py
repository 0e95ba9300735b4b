"""Procedures, and the drivers that run them to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest

from jetspark.aio.step_runner import run_steps
from jetspark.blocking.step_runner import run_steps as run_steps_blocking
from jetspark.core.step_runner import Sleep, StepRun, Steps
from jetspark.errors import ConnectionLost


def _next(run: StepRun[str, Any]) -> str | None:
    run.advance()
    return run.step


def test_each_step_gets_its_own_answer() -> None:
    answers: list[Any] = []

    def steps() -> Steps[str, int]:
        answers.append((yield "dial"))
        answers.append((yield "ask"))
        answers.append((yield "wait"))
        return 4

    run = StepRun(steps())
    assert _next(run) == "dial"
    run.answer = 1
    assert _next(run) == "ask"
    assert _next(run) == "wait"  # "ask" had no answer, and did not get that of "dial"
    run.answer = 3
    assert _next(run) is None
    assert run.result == 4
    assert answers == [1, None, 3]


def test_an_error_is_thrown_into_the_procedure() -> None:
    def steps() -> Steps[str, None]:
        try:
            yield "dial"
        except ConnectionLost:
            yield "dial another one"

    run = StepRun(steps())
    run.advance()
    run.error = ConnectionLost("refused")
    assert _next(run) == "dial another one"
    run.error = ConnectionLost("refused again")
    with pytest.raises(ConnectionLost, match="refused again"):
        run.advance()


def test_closing_a_run_runs_the_finally_blocks() -> None:
    log: list[str] = []

    def steps() -> Steps[str, None]:
        try:
            yield "dial"
        finally:
            log.append("hung up")

    run = StepRun(steps())
    run.advance()
    run.close()
    assert (run.step, log) == (None, ["hung up"])


@pytest.mark.parametrize(
    ("random", "seconds"), [(0.0, 8.0), (0.5, 6.0), (0.75, 5.0)], ids=["all of it", "half-way", "least"]
)
def test_a_part_of_a_sleep_is_random(random: float, seconds: float) -> None:
    assert Sleep(8.0, random_fraction=0.5).draw_s(lambda: random) == seconds


def test_a_fixed_sleep_draws_no_number() -> None:
    def refuse() -> float:
        raise AssertionError

    assert Sleep(8.0).draw_s(refuse) == 8.0


class Lock:
    """Counts how often it is taken, and refuses to be taken twice."""

    def __init__(self) -> None:
        self.is_held, self.count = False, 0

    def __enter__(self) -> None:
        assert not self.is_held
        self.is_held = True
        self.count += 1

    def __exit__(self, *exc_info: object) -> None:
        self.is_held = False


def _run_aio(run: StepRun[str, Any], perform: Callable[[str], Any], lock: Any) -> Any:
    async def perform_later(step: str) -> Any:
        await asyncio.sleep(0)
        return perform(step)

    return asyncio.run(run_steps(run, perform_later, lock=lock))


Driver = Callable[[StepRun[str, Any], Callable[[str], Any], Any], Any]
DRIVERS: list[Driver] = [_run_aio, lambda run, perform, lock: run_steps_blocking(run, perform, lock=lock)]
drivers = pytest.mark.parametrize("drive", DRIVERS, ids=["aio", "blocking"])


@drivers
def test_the_lock_is_held_while_the_procedure_decides_and_not_while_it_waits(drive: Driver) -> None:
    lock = Lock()

    def steps() -> Steps[str, list[Any]]:
        found = []
        for step in ("a", "b"):
            assert lock.is_held
            try:
                found.append((yield step))
            except KeyError as error:
                found.append(error)
        assert lock.is_held
        return found

    def perform(step: str) -> str:
        assert not lock.is_held
        if step == "b":
            raise missing
        return step.upper()

    missing = KeyError("b")
    assert drive(StepRun(steps()), perform, lock) == ["A", missing]
    assert (lock.count, lock.is_held) == (3, False)


@drivers
@pytest.mark.parametrize("kind", [ConnectionLost, KeyboardInterrupt])
def test_an_error_that_the_procedure_does_not_catch_ends_it(drive: Driver, kind: type[BaseException]) -> None:
    log: list[str] = []

    def steps() -> Steps[str, None]:
        try:
            yield "a"
        except kind:
            log.append("seen")
            raise

    def perform(step: str) -> None:
        raise kind("x")

    with pytest.raises(kind):
        drive(StepRun(steps()), perform, nullcontext())
    assert log == ["seen"]


@drivers
def test_a_run_continues_from_its_present_step(drive: Driver) -> None:
    def steps() -> Steps[str, list[Any]]:
        return [(yield "a"), (yield "b"), (yield "c")]

    run = StepRun(steps())
    run.advance()
    run.answer = 1
    run.advance()
    performed: list[str] = []
    assert drive(run, performed.append, nullcontext()) == [1, None, None]
    assert performed == ["b", "c"]


def test_a_cancellation_is_thrown_into_the_procedure() -> None:
    log: list[BaseException] = []

    def steps() -> Steps[float, None]:
        try:
            yield 60.0
        except BaseException as error:
            log.append(error)
            raise

    async def main() -> None:
        perform: Callable[[float], Awaitable[None]] = asyncio.sleep
        task = asyncio.create_task(run_steps(StepRun(steps()), perform))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [type(error) for error in log] == [asyncio.CancelledError]
