"""Sinks alone and stacked, on both drivers. Time is stated or jumps; nothing sleeps."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import errno
import inspect
import itertools
import json
import logging
import math
import os
import re
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE_S

import jetspark.batcher.aio.jetstream as aio_jetstream
import jetspark.batcher.aio.sinks as aio
import jetspark.batcher.blocking.jetstream as blocking_jetstream
import jetspark.batcher.blocking.sinks as blocking
from jetspark.batcher.blocking.jetstream import FairLock
from jetspark.batcher.circuit import Circuit
from jetspark.batcher.config import BatcherConfig
from jetspark.batcher.dead_letters import DeadLetter
from jetspark.batcher.jetstream_sinks import ROUNDS, Atomic, ItemMessages, check_publisher
from jetspark.batcher.metered import SinkStats, Written
from jetspark.batcher.rate_limit import TokenBucket
from jetspark.batcher.retry import Retry, is_retryable
from jetspark.core.headers import Headers
from jetspark.errors import (
    AtomicPublishDisabled,
    BatchCutShort,
    BatchIncomplete,
    BatchInDoubt,
    BatchTooLarge,
    CircuitOpen,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    DuplicateMessageId,
    InvalidHeader,
    InvalidSubject,
    JetStreamNotEnabled,
    JetStreamUnavailable,
    ProtocolError,
    RequestTimeout,
    ServerError,
    TooManyBatches,
    UsageError,
    WrongLastSequence,
)
from jetspark.testing import FakeClock

Script = Callable[[list[Any]], object]
"""What a sink does with a batch: raises, or does not."""


class JumpingClock:
    """Whoever waits for a time has it at once. Remembers how long that would have been."""

    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def _jump(self, until: float) -> None:
        self.slept.append(round(until - self.time, 9))
        self.time = max(self.time, until)

    def call_at(self, when: float, call: Callable[[], None]) -> Any:
        self._jump(when)
        call()
        return asyncio.get_running_loop().call_soon(lambda: None)

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        assert until is not None
        self._jump(until)


class World:
    """A driver: its sinks, sinks made of plain functions, and a way to write."""

    def __init__(self, name: str) -> None:
        self.is_aio = name == "asyncio"
        self.sinks: Any = aio if self.is_aio else blocking
        self.runner = asyncio.Runner()

    def sink(self, script: Script, judge: Callable[[Exception], bool] | None = None) -> Any:
        class Blocking:
            def write(self, batch: Sequence[Any]) -> None:
                assert isinstance(batch, list)
                items = list(batch)
                batch.clear()  # it is the sink's: whoever needs the items again had better keep a copy
                script(items)

        class Aio(Blocking):
            async def write(self, batch: Sequence[Any]) -> None:  # type: ignore[override]
                Blocking.write(self, batch)

        sink = Aio() if self.is_aio else Blocking()
        if judge is not None:
            sink.is_retryable = judge  # type: ignore[attr-defined]
        return sink

    def write(self, sink: Any, items: Sequence[Any]) -> None:
        if self.is_aio:
            self.runner.run(sink.write(list(items)))
        else:
            sink.write(list(items))

    def run(self, call: Any) -> Any:
        """What a method returned, awaited where it has to be."""
        return self.runner.run(call) if asyncio.iscoroutine(call) else call


@pytest.fixture(params=["asyncio", "blocking"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    with world.runner:
        yield world


class Scripted:
    """Raises what it is given, one for each write; None, and whatever comes after the last, succeeds."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes = list(outcomes)
        self.written: list[list[Any]] = []
        self.calls = 0

    def __call__(self, batch: list[Any]) -> None:
        self.calls += 1
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        self.written.append(batch)


class Poisoned:
    """Takes nothing of a batch with certain items."""

    def __init__(self, *poison: Any) -> None:
        self.poison = set(poison)
        self.stored: list[Any] = []
        self.calls = 0

    def __call__(self, batch: list[Any]) -> None:
        self.calls += 1
        if found := self.poison & set(batch):
            raise ValueError(f"cannot take {sorted(found)}")
        self.stored += batch


OUTAGE = ConnectionLost("gone")


# ---- may it succeed later? -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("any"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (RuntimeError("who knows"), True),
        (Exception("who knows"), True),
        (OUTAGE, True),
        (RequestTimeout("x", 1), True),
        (JetStreamUnavailable("s"), True),
        (TooManyBatches(429, 10210, "x"), True),
        (BatchIncomplete(400, 10176, "x"), True),
        (BatchInDoubt("b", "x"), True),
        (BatchCutShort("b", 3, "x"), True),
        (ValueError("bad"), False),
        (ConfigError("bad"), False),
        (TypeError("bad"), False),
        (KeyError("bad"), False),
        (PermissionError(), False),
        (ConnectionClosed("closed"), False),
        (AtomicPublishDisabled(400, 10174, "x"), False),
        (ServerError(400, 10054, "message size exceeds maximum allowed"), False),
        (ServerError(409, 10158, "duplicate message id is in process"), True),
        (ServerError(503, 10077, "maximum messages exceeded"), True),
        (JetStreamNotEnabled(503, 10076, "x"), False),
    ],
)
def test_what_is_not_known_to_be_final_may_be_tried_again(error: Exception, expected: bool) -> None:
    assert is_retryable(error) is expected


def test_the_user_is_asked_first_then_the_error_then_the_sink() -> None:
    class Says(Exception):
        is_retryable = False

    class SaysWhenAsked(ValueError):
        def is_retryable(self) -> bool:
            return True

    class Sink:
        def is_retryable(self, error: Exception) -> bool:
            return isinstance(error, ValueError)

    assert is_retryable(Says(), own=lambda _: True, sink=Sink())
    assert not is_retryable(Says())
    assert is_retryable(SaysWhenAsked())
    assert is_retryable(ValueError(), sink=Sink())
    assert not is_retryable(OSError(), sink=Sink())


def test_an_open_circuit_is_always_a_reason_to_come_back() -> None:
    assert is_retryable(CircuitOpen(1), own=lambda _: False, sink=object())


def test_how_far_a_batch_came_does_not_decide_but_why_it_came_no_further() -> None:
    cut = BatchCutShort("b", 5, "x")
    cut.__cause__ = AtomicPublishDisabled(400, 10174, "x")
    assert not is_retryable(cut)
    cut.__cause__ = RequestTimeout("x", 1)
    assert is_retryable(cut)


def test_wrappers_pass_the_question_on_to_the_sink(world: World) -> None:
    script = Scripted(ValueError("passes, says the sink"))
    sink = world.sink(script, judge=lambda error: isinstance(error, ValueError))
    clock = JumpingClock()
    wrapped = world.sinks.RateLimitSink(world.sinks.MeteredSink(sink, clock=clock), items_per_s=1e9, clock=clock)
    world.write(world.sinks.RetrySink(wrapped, clock=clock), ["a"])
    assert script.written == [["a"]]


# ---- retry -----------------------------------------------------------------------------------------------------------


def test_retry_waits_twice_as_long_each_time_until_the_write_succeeds(world: World) -> None:
    script, clock = Scripted(OUTAGE, OUTAGE, OUTAGE), JumpingClock()
    world.write(world.sinks.RetrySink(world.sink(script), jitter=0, clock=clock), ["a", "b"])
    assert script.written == [["a", "b"]]
    assert clock.slept == [0.1, 0.2, 0.4]


def test_retry_gives_up_after_so_many_attempts_with_the_last_error(world: World) -> None:
    last = ConnectionLost("the last")
    script, clock = Scripted(OUTAGE, OUTAGE, last, None), JumpingClock()
    with pytest.raises(ConnectionLost, match="the last") as raised:
        world.write(world.sinks.RetrySink(world.sink(script), attempts=3, clock=clock), ["a"])
    assert raised.value is last
    assert script.calls == 3
    assert len(clock.slept) == 2


def test_retry_makes_five_attempts_unless_somebody_says_otherwise(world: World) -> None:
    script, clock = Scripted(*[OUTAGE] * 9), JumpingClock()
    with pytest.raises(ConnectionLost):
        world.write(world.sinks.RetrySink(world.sink(script), clock=clock), ["a"])
    assert script.calls == 5


def test_retry_never_waits_longer_than_its_maximum(world: World) -> None:
    script, clock = Scripted(*[OUTAGE] * 6), JumpingClock()
    world.write(
        world.sinks.RetrySink(
            world.sink(script), attempts=7, first_wait_s=1, max_wait_s=4, max_total_s=99, jitter=0, clock=clock
        ),
        ["a"],
    )
    assert clock.slept == [1, 2, 4, 4, 4, 4]
    retry = Retry(attempts=7, first_wait_s=1, max_wait_s=4, max_total_s=99, jitter=0)
    assert retry.wait_s(100_000, OUTAGE, 0.5) == 4


def test_retry_begins_no_attempt_after_its_total_time(world: World) -> None:
    script, clock = Scripted(*[OUTAGE] * 9), JumpingClock()
    sink = world.sinks.RetrySink(
        world.sink(script), attempts=9, first_wait_s=1, max_wait_s=60, max_total_s=7, jitter=0, clock=clock
    )
    with pytest.raises(ConnectionLost):
        world.write(sink, ["a"])
    assert clock.slept == [1, 2, 4]  # which is 7; the next would be at 15
    assert script.calls == 4


def test_the_time_that_writes_take_counts_too(world: World) -> None:
    clock = JumpingClock()

    def slow(_: list[Any]) -> None:
        clock.time += 4
        raise OUTAGE

    with pytest.raises(ConnectionLost):
        world.write(world.sinks.RetrySink(world.sink(slow), max_total_s=8.15, jitter=0, clock=clock), ["a"])
    assert clock.slept == [0.1]  # 4 + 0.1 + 4, and 0.2 more would be too much


def test_a_final_error_is_raised_at_once(world: World) -> None:
    script, clock = Scripted(ValueError("never")), JumpingClock()
    with pytest.raises(ValueError, match="never"):
        world.write(world.sinks.RetrySink(world.sink(script), clock=clock), ["a"])
    assert (script.calls, clock.slept) == (1, [])


def test_the_user_decides_what_is_final(world: World) -> None:
    script, clock = Scripted(ValueError("again"), OUTAGE), JumpingClock()
    sink = world.sinks.RetrySink(
        world.sink(script), is_retryable=lambda error: isinstance(error, ValueError), clock=clock
    )
    with pytest.raises(ConnectionLost):
        world.write(sink, ["a"])
    assert script.calls == 2


def test_an_error_that_says_when_to_come_back_is_taken_at_its_word(world: World) -> None:
    class TooMany(Exception):
        retry_in_s = 3

    script, clock = Scripted(TooMany(), CircuitOpen(2.5)), JumpingClock()
    world.write(world.sinks.RetrySink(world.sink(script), jitter=0, clock=clock), ["a"])
    assert clock.slept == [3.1, 2.7]


def test_an_error_that_says_to_come_back_too_late_ends_it(world: World) -> None:
    script, clock = Scripted(CircuitOpen(61)), JumpingClock()
    with pytest.raises(CircuitOpen):
        world.write(world.sinks.RetrySink(world.sink(script), clock=clock), ["a"])
    assert clock.slept == []


def test_jitter_shortens_a_wait_by_at_most_its_share() -> None:
    retry = Retry(attempts=9, first_wait_s=1, max_wait_s=8, max_total_s=99, jitter=0.25)
    assert [retry.wait_s(attempt, OUTAGE, 0.0) for attempt in (1, 2, 9)] == [1, 2, 8]
    assert [retry.wait_s(attempt, OUTAGE, 1.0) for attempt in (1, 2, 9)] == [0.75, 1.5, 6]


def test_jitter_is_by_chance(world: World) -> None:
    script, clock = Scripted(*[OUTAGE] * 20), JumpingClock()
    world.write(
        world.sinks.RetrySink(world.sink(script), attempts=30, first_wait_s=1, max_wait_s=1, jitter=0.5, clock=clock),
        ["a"],
    )
    assert all(0.5 <= wait <= 1 for wait in clock.slept)
    assert len(set(clock.slept)) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 0}, "attempts=0"),
        ({"attempts": True}, "attempts=True"),
        ({"first_wait_s": 0}, "first_wait_s=0"),
        ({"first_wait_s": math.nan}, "first_wait_s=nan"),
        ({"max_wait_s": 0.01}, "max_wait_s=0.01"),
        ({"max_total_s": 0}, "max_total_s=0"),
        ({"jitter": 1.5}, "jitter=1.5"),
    ],
)
def test_retry_refuses_values_that_make_no_sense(world: World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world.sinks.RetrySink(world.sink(Scripted()), **options)


async def test_a_cancelled_write_waits_no_longer_and_tries_no_more() -> None:
    clock, script = FakeClock(), Scripted(OUTAGE)
    task = asyncio.create_task(aio.RetrySink(World("asyncio").sink(script), clock=clock).write(["a"]))
    await _until(lambda: script.calls == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    clock.advance(100)
    await asyncio.sleep(0)
    assert script.calls == 1


# ---- circuit breaker -------------------------------------------------------------------------------------------------


def test_a_circuit_opens_after_so_many_failures_in_a_row(world: World) -> None:
    script, clock = Scripted(OUTAGE, None, OUTAGE, OUTAGE), JumpingClock()
    sink = world.sinks.CircuitBreakerSink(world.sink(script), failures=2, open_s=10, clock=clock)
    for outcome in ("fails", "succeeds", "fails", "fails"):  # the success in between begins the count anew
        assert sink.state == "closed"
        if outcome == "succeeds":
            world.write(sink, ["a"])
        else:
            with pytest.raises(ConnectionLost):
                world.write(sink, ["a"])
    assert sink.state == "open"


def test_a_circuit_opens_after_five_failures_unless_somebody_says_otherwise(world: World) -> None:
    script = Scripted(*[OUTAGE] * 9)
    sink = world.sinks.CircuitBreakerSink(world.sink(script), clock=JumpingClock())
    for _ in range(9):
        with pytest.raises((ConnectionLost, CircuitOpen)):
            world.write(sink, ["a"])
    assert script.calls == 5


def test_an_open_circuit_refuses_at_once_and_says_for_how_long(world: World) -> None:
    script, clock = Scripted(OUTAGE), JumpingClock()
    sink = world.sinks.CircuitBreakerSink(world.sink(script), failures=1, open_s=10, clock=clock)
    with pytest.raises(ConnectionLost):
        world.write(sink, ["a"])
    for time_passed, left in ((0, 10), (4, 6), (5.9, 0.1)):
        clock.time += time_passed
        with pytest.raises(CircuitOpen) as refused:
            world.write(sink, ["a"])
        assert refused.value.retry_in_s == pytest.approx(left)
    assert script.calls == 1


@pytest.mark.parametrize(("outcome", "state"), [(None, "closed"), (OUTAGE, "open")])
def test_the_first_write_after_that_decides(world: World, outcome: Exception | None, state: str) -> None:
    script, clock = Scripted(OUTAGE, OUTAGE, OUTAGE, outcome), JumpingClock()
    sink = world.sinks.CircuitBreakerSink(world.sink(script), failures=3, open_s=10, clock=clock)
    for _ in range(3):
        with pytest.raises(ConnectionLost):
            world.write(sink, ["a"])
    clock.time += 10
    if outcome is None:
        world.write(sink, ["a"])
    else:
        with pytest.raises(ConnectionLost):
            world.write(sink, ["a"])
        with pytest.raises(CircuitOpen, match="next attempt is in 10 s"):
            world.write(sink, ["a"])
    assert sink.state == state


def test_an_item_the_sink_never_takes_says_nothing_about_the_sink(world: World) -> None:
    script, clock = Scripted(OUTAGE, *[ValueError("bad")] * 9, OUTAGE), JumpingClock()
    sink = world.sinks.CircuitBreakerSink(world.sink(script), failures=2, open_s=10, clock=clock)
    for _ in range(10):
        with pytest.raises((ValueError, ConnectionLost)):
            world.write(sink, ["a"])
    assert sink.state == "closed"
    with pytest.raises(ConnectionLost):
        world.write(sink, ["a"])  # neither counted nor forgot
    assert sink.state == "open"


def test_a_trial_that_told_nothing_is_followed_by_another(world: World) -> None:
    script, clock = Scripted(OUTAGE, ValueError("bad")), JumpingClock()
    sink = world.sinks.CircuitBreakerSink(world.sink(script), failures=1, open_s=10, clock=clock)
    with pytest.raises(ConnectionLost):
        world.write(sink, ["a"])
    clock.time += 10
    with pytest.raises(ValueError, match="bad"):
        world.write(sink, ["a"])
    assert sink.state == "half-open"
    world.write(sink, ["a"])
    assert sink.state == "closed"


def test_writes_that_began_before_the_circuit_moved_do_not_move_it() -> None:
    circuit = Circuit(failures=2, open_s=10)
    early = [circuit.enter(0) for _ in range(4)]
    circuit.on_failure(early[0], 1)
    circuit.on_failure(early[1], 2)
    circuit.on_failure(early[2], 9)
    circuit.on_success(early[3])
    states = [circuit.state]
    trial = circuit.enter(12)  # ten after the second failure, whatever came later
    circuit.on_success(early[3])
    assert [*states, circuit.state] == ["open", "half-open"]
    with pytest.raises(CircuitOpen):
        circuit.enter(12)
    circuit.on_success(trial)
    assert circuit.state == "closed"
    late = Circuit(failures=1, open_s=10)
    first, second = late.enter(0), late.enter(0)
    late.on_failure(first, 1)
    late.on_failure(second, 9)
    late.enter(11)  # ten after the first failure; the second began before it and is no news
    assert late.state == "half-open"
    late.on_failure(second, 12)
    assert late.state == "half-open"


def test_a_circuit_lets_another_write_through_after_each_trial_that_failed() -> None:
    circuit = Circuit(failures=1, open_s=10)
    circuit.on_failure(circuit.enter(0), 0)
    for now in (10, 20, 30):
        circuit.on_failure(circuit.enter(now), now)
        with pytest.raises(CircuitOpen):
            circuit.enter(now + 9)
    circuit.on_success(circuit.enter(40))
    assert circuit.state == "closed"


def test_a_circuit_that_has_closed_opens_after_as_many_failures_as_before() -> None:
    circuit = Circuit(failures=2, open_s=10)
    states: list[str] = []
    for start in (0, 100):
        for _ in range(2):
            circuit.on_failure(circuit.enter(start), start)
            states.append(circuit.state)
        circuit.on_success(circuit.enter(start + 10))
        states.append(circuit.state)
    assert states == ["closed", "open", "closed"] * 2


async def test_exactly_one_task_tries_a_half_open_circuit() -> None:
    clock, calls, gate = JumpingClock(), 0, asyncio.Event()

    class Sink:
        async def write(self, batch: Sequence[str]) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise OUTAGE
            await gate.wait()

    sink = aio.CircuitBreakerSink(Sink(), failures=1, open_s=10, clock=clock)
    with pytest.raises(ConnectionLost):
        await sink.write(["a"])
    clock.time += 10
    tasks = [asyncio.create_task(sink.write(["a"])) for _ in range(8)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert calls == 2
    assert [type(outcome) for outcome in outcomes].count(CircuitOpen) == 7


def test_exactly_one_thread_tries_a_half_open_circuit() -> None:
    clock, gate, calls = JumpingClock(), threading.Event(), itertools.count(1)

    class Sink:
        def write(self, batch: Sequence[str]) -> None:
            if next(calls) == 1:
                raise OUTAGE
            assert gate.wait(PATIENCE_S)

    sink = blocking.CircuitBreakerSink(Sink(), failures=1, open_s=10, clock=clock)
    with pytest.raises(ConnectionLost):
        sink.write(["a"])
    clock.time += 10
    with ThreadPoolExecutor(8) as threads:
        writes: list[Future[None]] = [threads.submit(sink.write, ["a"]) for _ in range(8)]
        refused = [write for write in _first(writes, 7) if isinstance(write.exception(), CircuitOpen)]
        gate.set()
    assert len(refused) == 7
    assert next(calls) == 3


async def test_a_cancelled_write_took_too_long_for_somebody_and_counts_as_a_failure() -> None:
    class Hanging:
        async def write(self, batch: Sequence[str]) -> None:
            await asyncio.Event().wait()

    sink = aio.CircuitBreakerSink(Hanging(), failures=1, open_s=10, clock=JumpingClock())
    task = asyncio.create_task(sink.write(["a"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sink.state == "open"


@pytest.mark.parametrize(("options", "message"), [({"failures": 0}, "failures=0"), ({"open_s": 0}, "open_s=0")])
def test_a_circuit_refuses_values_that_make_no_sense(world: World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world.sinks.CircuitBreakerSink(world.sink(Scripted()), **options)


# ---- rate limit ------------------------------------------------------------------------------------------------------


def test_a_burst_goes_at_once_and_the_rest_at_the_rate(world: World) -> None:
    script, clock = Scripted(), JumpingClock()
    sink = world.sinks.RateLimitSink(world.sink(script), items_per_s=10, burst=20, clock=clock)
    for _ in range(5):
        world.write(sink, list(range(10)))
    assert clock.slept == [1, 1, 1]
    assert len(script.written) == 5


def test_the_bucket_holds_no_more_than_the_burst(world: World) -> None:
    clock = JumpingClock()
    sink = world.sinks.RateLimitSink(world.sink(Scripted()), items_per_s=10, burst=20, clock=clock)
    world.write(sink, ["a"])
    clock.time += 1_000
    for _ in range(3):
        world.write(sink, list(range(10)))
    assert clock.slept == [1]


def test_a_batch_larger_than_the_burst_goes_when_the_bucket_is_full_and_the_next_one_pays(world: World) -> None:
    script, clock = Scripted(), JumpingClock()
    sink = world.sinks.RateLimitSink(world.sink(script), items_per_s=10, burst=20, clock=clock)
    world.write(sink, list(range(100)))
    assert clock.slept == []
    world.write(sink, ["a"])
    assert clock.slept == [8.1]  # 80 owed, and one of its own
    world.write(sink, list(range(100)))
    assert clock.slept == [8.1, 2]
    assert [len(batch) for batch in script.written] == [100, 1, 100]


def test_over_time_the_rate_is_kept_whatever_the_batches() -> None:
    bucket, now, begun = TokenBucket(items_per_s=100, burst=50), 0.0, 0
    for number in range(1_000):
        size = number * 7919 % 120 + 1
        now += bucket.take(size, now)
        begun += size
        assert begun <= 50 + 100 * now + 120
    assert begun >= 0.95 * 100 * now


def test_the_burst_is_one_second_by_default_and_at_least_one_item() -> None:
    assert TokenBucket(items_per_s=250, burst=None).burst == 250
    assert TokenBucket(items_per_s=0.1, burst=None).burst == 1


def test_a_clock_that_stands_still_or_goes_back_gives_no_tokens() -> None:
    bucket = TokenBucket(items_per_s=10, burst=10)
    assert bucket.take(10, 100.0) == 0
    assert bucket.take(10, 50.0) == 1
    assert bucket.take(10, 100.0) == 2


async def test_a_write_that_is_cancelled_while_it_waits_gives_its_tokens_back() -> None:
    clock, script = FakeClock(), Scripted()
    sink = aio.RateLimitSink(World("asyncio").sink(script), items_per_s=10, burst=10, clock=clock)
    await sink.write(list(range(10)))
    waiting = asyncio.create_task(sink.write(list(range(10))))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    clock.advance(1)
    await asyncio.wait_for(sink.write(list(range(10))), PATIENCE_S)
    assert script.calls == 2


def test_threads_share_one_rate() -> None:
    script, clock = Scripted(), FakeClock()
    sink = blocking.RateLimitSink(World("blocking").sink(script), items_per_s=10, burst=10, clock=clock)
    with ThreadPoolExecutor(4) as threads:
        writes = [threads.submit(sink.write, list(range(10))) for _ in range(4)]
        for count in (1, 2, 3, 4):
            _first(writes, count)
            assert script.calls == count
            # Those who wait must be waiting before time moves, or they would see it jump.
            _await(lambda: count == 4 or len(clock._waiting) == 4 - count)  # noqa: B023
            clock.advance(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"items_per_s": 0}, "items_per_s=0"), ({"items_per_s": 1, "burst": 0}, "burst=0")],
)
def test_a_rate_limit_refuses_values_that_make_no_sense(world: World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world.sinks.RateLimitSink(world.sink(Scripted()), **options)


# ---- dead letters ----------------------------------------------------------------------------------------------------


def test_a_batch_that_fails_becomes_dead_letters_and_the_write_succeeds(world: World) -> None:
    dead = Scripted()
    began = time.time()
    world.write(world.sinks.DeadLetterSink(world.sink(Scripted(OUTAGE)), world.sink(dead)), ["a", "b"])
    [[one, two]] = dead.written
    assert (one.item, one.error, one.reason) == ("a", OUTAGE, "ConnectionLost: gone")
    assert (two.item, two.error) == ("b", OUTAGE)
    assert began <= one.time <= time.time()


def test_a_batch_that_succeeds_leaves_no_dead_letters(world: World) -> None:
    good, dead = Scripted(), Scripted()
    world.write(world.sinks.DeadLetterSink(world.sink(good), world.sink(dead)), ["a"])
    assert (good.written, dead.calls) == ([["a"]], 0)


def test_when_the_dead_letters_fail_too_both_errors_are_told(world: World) -> None:
    # Not OUTAGE: an exception keeps the context of every test that has raised it.
    first, second = ConnectionLost("gone"), OSError("full")
    with pytest.raises(ConnectionLost) as raised:
        world.write(world.sinks.DeadLetterSink(world.sink(Scripted(first)), world.sink(Scripted(second))), ["a"])
    assert raised.value is first
    assert raised.value.__context__ is second


def test_only_the_errors_it_is_meant_for_make_dead_letters(world: World) -> None:
    dead = Scripted()
    sink = world.sinks.DeadLetterSink(
        world.sink(Scripted(OUTAGE, ValueError("bad"))),
        world.sink(dead),
        when=lambda error: isinstance(error, ValueError),
    )
    with pytest.raises(ConnectionLost):
        world.write(sink, ["a"])
    world.write(sink, ["b"])
    assert [record.item for [record] in dead.written] == ["b"]


def test_a_batch_is_not_split_unless_somebody_says_so(world: World) -> None:
    store, dead = Poisoned(1), Scripted()
    world.write(world.sinks.DeadLetterSink(world.sink(store), world.sink(dead)), range(4))
    assert store.stored == []
    assert [record.item for record in dead.written[0]] == [0, 1, 2, 3]


def test_splitting_finds_the_items_at_fault_and_keeps_the_order_of_the_others(world: World) -> None:
    store, dead = Poisoned(0, 17, 18, 63), Scripted()
    world.write(world.sinks.DeadLetterSink(world.sink(store), world.sink(dead), split=True), range(64))
    assert store.stored == [number for number in range(64) if number not in store.poison]
    [records] = dead.written
    assert [(record.item, str(record.error)) for record in records] == [
        (0, "cannot take [0]"),
        (17, "cannot take [17]"),
        (18, "cannot take [18]"),
        (63, "cannot take [63]"),
    ]


def test_splitting_takes_at_most_two_writes_for_each_item_but_one(world: World) -> None:
    store, dead = Poisoned(*range(33)), Scripted()
    world.write(world.sinks.DeadLetterSink(world.sink(store), world.sink(dead), split=True), range(33))
    assert store.calls == 2 * 33 - 1
    assert [record.item for record in dead.written[0]] == list(range(33))


def test_an_outage_is_no_items_fault_and_is_not_split(world: World) -> None:
    script, dead = Scripted(OUTAGE), Scripted()
    world.write(world.sinks.DeadLetterSink(world.sink(script), world.sink(dead), split=True), range(8))
    assert script.calls == 1
    assert len(dead.written[0]) == 8


def test_an_outage_while_splitting_takes_only_its_piece(world: World) -> None:
    outcomes: list[Exception | None] = [ValueError("all"), OUTAGE, None]
    script, dead = Scripted(*outcomes), Scripted()
    world.write(world.sinks.DeadLetterSink(world.sink(script), world.sink(dead), split=True), [1, 2, 3, 4])
    assert script.written == [[3, 4]]
    assert [(record.item, record.error) for record in dead.written[0]] == [(1, OUTAGE), (2, OUTAGE)]


async def test_a_cancelled_write_is_no_dead_letter() -> None:
    class Hanging:
        async def write(self, batch: Sequence[str]) -> None:
            await asyncio.Event().wait()

    dead = Scripted()
    task = asyncio.create_task(aio.DeadLetterSink(Hanging(), World("asyncio").sink(dead)).write(["a"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert dead.calls == 0


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_writes_are_counted_and_timed(world: World) -> None:
    clock = JumpingClock()
    script = Scripted(None, OUTAGE, OSError("x"), ConnectionLost("y"))
    seen: list[Written] = []

    def takes_a_while(batch: list[Any]) -> None:
        clock.time += len(batch)
        script(batch)

    sink = world.sinks.MeteredSink(world.sink(takes_a_while), seen.append, clock=clock)
    for size in (1, 2, 3, 4):
        try:
            world.write(sink, range(size))
        except OSError:
            pass
    stats = sink.stats()
    assert (stats.writes, stats.items, stats.failed_writes, stats.failed_items) == (4, 1, 3, 9)
    assert stats.errors == {"ConnectionLost": 2, "OSError": 1}
    assert (stats.seconds_sum, stats.seconds_max, stats.in_progress) == (10, 4, 0)
    assert [(each.items, each.seconds) for each in seen] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert (seen[0].error, seen[1].error) == (None, OUTAGE)


def test_a_sink_that_was_given_nothing_has_counted_nothing(world: World) -> None:
    assert world.sinks.MeteredSink(world.sink(Scripted())).stats() == SinkStats()


def test_an_observer_that_raises_is_logged_and_fails_no_write(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def broken(written: Written) -> None:
        raise RuntimeError("broken observer")

    script = Scripted(None, OUTAGE)
    sink = world.sinks.MeteredSink(world.sink(script), broken)
    with caplog.at_level(logging.ERROR, "jetspark.batcher"):
        world.write(sink, ["a"])
        with pytest.raises(ConnectionLost):
            world.write(sink, ["a"])
    assert caplog.text.count("observer raised") == 2


async def test_a_write_in_progress_shows_and_a_cancelled_one_is_counted() -> None:
    class Hanging:
        async def write(self, batch: Sequence[str]) -> None:
            await asyncio.Event().wait()

    seen: list[Written] = []
    sink = aio.MeteredSink(Hanging(), seen.append)
    task = asyncio.create_task(sink.write(["a", "b"]))
    await asyncio.sleep(0)
    assert (sink.stats().in_progress, sink.stats().writes) == (1, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (sink.stats().in_progress, sink.stats().errors) == (0, {"CancelledError": 1})
    assert isinstance(seen[0].error, asyncio.CancelledError)


def test_threads_lose_no_count() -> None:
    sink = blocking.MeteredSink(World("blocking").sink(Scripted()))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: sink.write(["a", "b"]), range(2_000)))
    assert (sink.stats().writes, sink.stats().items) == (2_000, 4_000)


def test_the_lock_is_held_while_deciding_and_at_no_other_time() -> None:
    held: list[tuple[str, bool]] = []

    class Sink:
        def write(self, batch: Sequence[str]) -> None:
            held.append(("write", sink._runner.lock.locked()))
            raise OUTAGE

        def is_retryable(self, error: Exception) -> bool:
            held.append(("decide", sink._runner.lock.locked()))
            return True

    class Clock(JumpingClock):
        def wait(self, condition: threading.Condition, until: float | None) -> None:
            held.append(("sleep", sink._runner.lock.locked()))
            super().wait(condition, until)

    sink = blocking.RetrySink(Sink(), attempts=2, clock=Clock())
    with pytest.raises(ConnectionLost):
        sink.write(["a"])
    assert held == [("write", False), ("decide", True), ("sleep", False), ("write", False)]


# ---- stacks ----------------------------------------------------------------------------------------------------------


def test_retry_outside_a_breaker_waits_for_the_trial(world: World) -> None:
    script, clock = Scripted(OUTAGE, OUTAGE), JumpingClock()
    breaker = world.sinks.CircuitBreakerSink(world.sink(script), failures=2, open_s=10, clock=clock)
    world.write(world.sinks.RetrySink(breaker, jitter=0, clock=clock), ["a"])
    # Twice the outage, once sent away by the breaker, then its trial, which is the one that succeeds.
    assert clock.slept == [0.1, 0.2, 10.2]  # 9.8 that are left of the ten, and its own 0.4
    assert (script.calls, script.written, breaker.state) == (3, [["a"]], "closed")


def test_retry_inside_a_breaker_makes_one_failure_of_all_its_attempts(world: World) -> None:
    script, clock = Scripted(*[OUTAGE] * 6), JumpingClock()
    retry = world.sinks.RetrySink(world.sink(script), attempts=3, jitter=0, clock=clock)
    sink = world.sinks.CircuitBreakerSink(retry, failures=2, open_s=10, clock=clock)
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            world.write(sink, ["a"])
    assert (script.calls, sink.state) == (6, "open")


def test_dead_letters_outside_retry_take_what_no_retry_helped(world: World) -> None:
    script, dead, clock = Scripted(*[OUTAGE] * 3, *[OUTAGE] * 2), Scripted(), JumpingClock()
    retry = world.sinks.RetrySink(world.sink(script), attempts=3, clock=clock)
    sink = world.sinks.DeadLetterSink(retry, world.sink(dead))
    world.write(sink, ["a"])
    world.write(sink, ["b"])
    assert [record.item for [record] in dead.written] == ["a"]
    assert script.written == [["b"]]


def test_dead_letters_inside_retry_leave_it_nothing_to_do_until_they_fail_themselves(world: World) -> None:
    script, dead, clock = Scripted(OUTAGE, OUTAGE), Scripted(OSError("full")), JumpingClock()
    inner = world.sinks.DeadLetterSink(world.sink(script), world.sink(dead))
    world.write(world.sinks.RetrySink(inner, clock=clock), ["a"])
    assert (script.calls, dead.calls) == (2, 2)
    assert [record.item for [record] in dead.written] == ["a"]


def test_an_item_at_fault_found_by_splitting_does_not_open_the_breaker_below(world: World) -> None:
    store, dead, clock = Poisoned(0), Scripted(), JumpingClock()
    breaker = world.sinks.CircuitBreakerSink(world.sink(store), failures=3, open_s=10, clock=clock)
    retry = world.sinks.RetrySink(breaker, clock=clock)
    world.write(world.sinks.DeadLetterSink(retry, world.sink(dead), split=True), range(1_024))
    assert store.stored == list(range(1, 1_024))  # found by eleven failures in a row
    assert ([record.item for record in dead.written[0]], breaker.state, clock.slept) == ([0], "closed", [])


def test_a_rate_limit_inside_retry_counts_every_attempt_and_outside_only_the_first(world: World) -> None:
    for is_inside, waits in ((True, [0.1, 0.9, 0.2, 0.8]), (False, [0.1, 0.2])):
        script, clock = Scripted(OUTAGE, OUTAGE), JumpingClock()

        def limited(sink: Any, clock: JumpingClock = clock) -> Any:
            return world.sinks.RateLimitSink(sink, items_per_s=10, burst=10, clock=clock)

        def retried(sink: Any, clock: JumpingClock = clock) -> Any:
            return world.sinks.RetrySink(sink, jitter=0, clock=clock)

        sink = world.sink(script)
        world.write(retried(limited(sink)) if is_inside else limited(retried(sink)), range(10))
        assert clock.slept == waits


def test_a_meter_counts_attempts_below_retry_and_writes_above_it(world: World) -> None:
    script, clock = Scripted(OUTAGE, OUTAGE), JumpingClock()
    below = world.sinks.MeteredSink(world.sink(script), clock=clock)
    above = world.sinks.MeteredSink(world.sinks.RetrySink(below, jitter=0, clock=clock), clock=clock)
    world.write(above, ["a"])
    assert (below.stats().writes, below.stats().failed_writes) == (3, 2)
    assert (above.stats().writes, above.stats().failed_writes) == (1, 0)
    assert above.stats().seconds_sum == pytest.approx(0.3)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))), ids=lambda order: "".join(map(str, order)))
def test_in_any_order_every_item_is_stored_or_a_dead_letter_or_the_write_raised(
    world: World, order: tuple[int, ...]
) -> None:
    clock, dead = JumpingClock(), Scripted()
    stored: list[int] = []
    outcomes = itertools.cycle([OUTAGE, OUTAGE, None, None, OUTAGE, None, None])

    def flaky(batch: list[int]) -> None:
        if any(number % 50 == 7 for number in batch):
            raise ValueError("poison")
        if (outcome := next(outcomes)) is not None:
            raise outcome
        stored.extend(batch)

    wrap: list[Callable[[Any], Any]] = [
        lambda sink: world.sinks.RetrySink(sink, attempts=4, clock=clock),
        lambda sink: world.sinks.CircuitBreakerSink(sink, failures=3, open_s=1, clock=clock),
        lambda sink: world.sinks.RateLimitSink(sink, items_per_s=1000, clock=clock),
        lambda sink: world.sinks.DeadLetterSink(sink, world.sink(dead), split=True),
        lambda sink: world.sinks.MeteredSink(sink, clock=clock),
    ]
    sink = world.sink(flaky)
    for index in order:
        sink = wrap[index](sink)
    raised: list[int] = []
    for first in range(0, 200, 10):
        batch = list(range(first, first + 10))
        try:
            world.write(sink, batch)
        except (OSError, ValueError, CircuitOpen):
            raised += batch
    buried = [record.item for records in dead.written for record in records]
    assert set(stored) | set(buried) | set(raised) == set(range(200))
    assert sorted(buried + stored) == sorted(set(buried) | set(stored))  # this sink takes all or nothing


# ---- a file ----------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_batch_is_a_line_of_json_for_each_item(world: World, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = world.sinks.FileSink(path)
    world.write(sink, [{"a": 1}, ["ü"], "x\ny", None])
    world.write(sink, [])
    world.write(sink, [2])
    world.run(sink.close())
    assert path.read_bytes() == '{"a":1}\n["ü"]\n"x\\ny"\nnull\n2\n'.encode()


def test_bytes_and_dead_letters_can_be_written_as_they_are(world: World, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = world.sinks.FileSink(path)
    world.write(sink, [b"text", b"\xff", DeadLetter(b"x", ValueError("bad"), 1.5)])
    world.run(sink.close())
    assert lines(path) == ["text", {"base64": "/w=="}, {"item": "x", "error": "ValueError: bad", "time": 1.5}]


def test_a_batch_is_one_call_to_the_system(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = os.write

    def write(file: int, data: bytes) -> int:
        written.append(bytes(data))
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    sink = world.sinks.FileSink(tmp_path / "out.jsonl")
    world.write(sink, range(3))
    world.run(sink.close())
    assert b"0\n1\n2\n" in written


def test_an_item_that_is_no_json_fails_the_batch_before_anything_is_written(world: World, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = world.sinks.FileSink(path)
    with pytest.raises(TypeError, match="to_json"):
        world.write(sink, [1, object()])
    two_lines = world.sinks.FileSink(path, to_json=lambda item: "1\n2")
    with pytest.raises(ValueError, match="more than one line"):
        world.write(two_lines, [1])
    assert not path.exists()


def test_to_json_may_give_text_or_bytes(world: World, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = world.sinks.FileSink(path, to_json=lambda item: item)
    world.write(sink, ['"text"', b'"bytes"'])
    world.run(sink.close())
    assert lines(path) == ["text", "bytes"]


@pytest.mark.parametrize("torn", [b'{"half', b"12", b"x" * 200_000])
def test_a_line_that_a_crash_left_unfinished_is_set_aside(world: World, tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"1\n2\n" + torn)
    sink = world.sinks.FileSink(path)
    world.write(sink, [3])
    world.run(sink.close())
    assert lines(path) == [1, 2, 3]
    assert (tmp_path / "out.jsonl.torn").read_bytes() == torn + b"\n"


def test_a_file_with_nothing_but_an_unfinished_line_is_begun_anew(world: World, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"half')
    sink = world.sinks.FileSink(path)
    world.write(sink, [1])
    world.run(sink.close())
    assert lines(path) == [1]
    assert (tmp_path / "out.jsonl.torn").read_bytes() == b'{"half\n'


def test_a_whole_file_is_appended_to_and_nothing_is_set_aside(world: World, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"1\n")
    sink = world.sinks.FileSink(path)
    world.write(sink, [2])
    world.run(sink.close())
    assert lines(path) == [1, 2]
    assert not (tmp_path / "out.jsonl.torn").exists()


class Disk:
    """Takes a part of what it is given and then fails, when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = self.is_stuck = False
        self.synced = 0
        self._write, self._truncate, self._sync = os.write, os.ftruncate, os.fsync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "ftruncate", self.truncate)
        monkeypatch.setattr(os, "fsync", self.sync)

    def write(self, file: int, data: bytes) -> int:
        if self.is_full and len(data) < 4:
            raise OSError(errno.ENOSPC, "full")
        return self._write(file, bytes(data)[: len(data) // 2] if self.is_full else data)

    def truncate(self, file: int, size: int) -> None:
        if self.is_stuck:
            raise OSError(errno.EIO, "stuck")
        self._truncate(file, size)

    def sync(self, file: int) -> None:
        self.synced += 1
        if self.is_stuck:
            raise OSError(errno.EIO, "stuck")
        self._sync(file)


def test_a_write_that_fails_midway_is_taken_back_so_that_a_retry_doubles_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "out.jsonl"
    sink = world.sinks.FileSink(path)
    world.write(sink, [1, 2])
    disk.is_full = True
    with pytest.raises(OSError, match="full"):
        world.write(sink, range(100))
    assert lines(path) == [1, 2]
    disk.is_full = False
    world.write(sink, range(100))
    world.run(sink.close())
    assert lines(path) == [1, 2, *range(100)]


def test_what_could_not_be_taken_back_is_before_the_next_write(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "out.jsonl"
    sink = world.sinks.FileSink(path)
    world.write(sink, [1, 2])
    disk.is_full = disk.is_stuck = True
    with pytest.raises(OSError, match="full"):
        world.write(sink, range(100))
    disk.is_full = False
    with pytest.raises(OSError, match="stuck"):
        world.write(sink, range(100))
    disk.is_stuck = False
    world.write(sink, range(100))
    world.run(sink.close())
    assert lines(path) == [1, 2, *range(100)]


def test_with_fsync_a_write_that_is_not_on_the_disk_has_failed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "out.jsonl"
    sink = world.sinks.FileSink(path, fsync=True)
    world.write(sink, [1])
    before = disk.synced
    world.write(sink, [2])
    assert disk.synced == before + 1
    disk.is_stuck = True
    with pytest.raises(OSError, match="stuck"):
        world.write(sink, [3])
    disk.is_stuck = False
    world.write(sink, [3])
    world.run(sink.close())
    assert lines(path) == [1, 2, 3]


def test_without_fsync_nothing_is_synced(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    sink = world.sinks.FileSink(tmp_path / "out.jsonl")
    world.write(sink, [1])
    world.run(sink.close())
    assert disk.synced == 0


@pytest.mark.parametrize("how", ["renamed", "deleted"])
def test_a_file_that_was_rotated_away_is_made_anew(world: World, tmp_path: Path, how: str) -> None:
    path = tmp_path / "out.jsonl"
    sink = world.sinks.FileSink(path)
    world.write(sink, [1])
    if how == "renamed":
        path.rename(tmp_path / "old.jsonl")
    else:
        path.unlink()
    world.write(sink, [2])
    world.run(sink.close())
    assert lines(path) == [2]
    if how == "renamed":
        assert lines(tmp_path / "old.jsonl") == [1]


def test_a_file_has_one_writer(world: World, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = world.sinks.FileSink(path), world.sinks.FileSink(path)
    world.write(first, [1])
    with pytest.raises(UsageError, match="one writer"):
        world.write(second, [2])
    world.run(first.close())
    world.write(second, [2])
    world.run(second.close())
    assert lines(path) == [1, 2]


def test_a_closed_file_sink_writes_no_more(world: World, tmp_path: Path) -> None:
    sink = world.sinks.FileSink(tmp_path / "out.jsonl")
    world.run(sink.close())
    world.run(sink.close())
    with pytest.raises(UsageError, match="closed"):
        world.write(sink, [1])


async def test_tasks_write_in_the_order_they_began(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    async with aio.FileSink[int](path) as sink:
        assert path.exists()
        await asyncio.gather(*(sink.write([number, number]) for number in range(50)))
    assert lines(path) == [number for number in range(50) for _ in range(2)]


def test_threads_write_one_batch_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with blocking.FileSink[int](path) as sink, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: sink.write([number] * 20), range(50)))
    found = lines(path)
    assert sorted(found[::20]) == list(range(50))
    assert all(found[at : at + 20] == [found[at]] * 20 for at in range(0, 1_000, 20))


# ---- messages for JetStream ------------------------------------------------------------------------------------------


def test_bytes_go_to_the_subject_and_anything_else_needs_to_message() -> None:
    messages: ItemMessages[Any] = ItemMessages("s.a", None)
    assert messages.plain([b"1", bytearray(b"2"), memoryview(b"3")]) == [("s.a", b"1"), ("s.a", b"2"), ("s.a", b"3")]
    with pytest.raises(TypeError, match="int: expected bytes, or give the sink to_message"):
        messages.plain([b"1", 2])


def test_to_message_gives_subject_data_and_perhaps_headers() -> None:
    messages: ItemMessages[Any] = ItemMessages(None, lambda item: item)
    assert messages.plain([("s", b"1"), ("t", b"2", {"X": "y"}), ("u", b"3", None)]) == [
        ("s", b"1"),
        ("t", b"2", {"X": "y"}),
        ("u", b"3"),
    ]
    with pytest.raises(TypeError, match="expected \\(subject, data\\)"):
        messages.plain(["s"])


def test_an_items_id_is_a_header_of_its_message() -> None:
    messages: ItemMessages[Any] = ItemMessages(None, lambda item: ("s", b"", {"X": "y"}), lambda item: f"id-{item}")
    assert messages.plain([7]) == [("s", b"", Headers({"X": "y", "Nats-Msg-Id": "id-7"}))]
    assert messages.blocks([7]) == [("s", b"", b"NATS/1.0\r\nX: y\r\nNats-Msg-Id: id-7\r\n\r\n")]


@pytest.mark.parametrize(
    ("bad", "error"), [("", ConfigError), (7, ConfigError), (" x", ConfigError), ("a\r\nb", InvalidHeader)]
)
def test_an_id_is_a_text_that_fits_a_header(bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ItemMessages[bytes]("s", None, lambda item: bad).blocks([b"1"])


def test_a_sink_has_a_subject_or_to_message() -> None:
    for subject, to_message in ((None, None), ("s", lambda item: item)):
        with pytest.raises(ConfigError, match="either subject="):
            ItemMessages(subject, to_message)
    with pytest.raises(InvalidSubject):
        ItemMessages("a b", None)
    with pytest.raises(ConfigError, match="id_of=7"):
        ItemMessages("s", None, 7)  # type: ignore[arg-type]


def test_ids_that_would_begin_anew_with_each_publisher_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected id_of instead"):
        check_publisher(True, {"id_prefix": "x"})
    with pytest.raises(ConfigError, match="unknown fast publisher option speed"):
        check_publisher(False, {"speed": 1})  # type: ignore[typeddict-unknown-key]
    check_publisher(True, {"flow": 7})


class FakeBatches:
    """As much of a JetStream context as the atomic sink uses; what commits and probes are answered with is scripted."""

    def __init__(self, *commits: Exception | None, probes: Sequence[Exception] = (), resolve: Any = "stored") -> None:
        self.commits, self.probes, self.resolve = list(commits), itertools.cycle(probes), resolve
        self.stored: list[list[bytes]] = []
        self.opened = self.probed = self.resolved = self.discarded = 0
        self.info = self
        self.fields, self.version, self.max_payload_bytes = {"api_lvl": 4}, "2.14.0", 1 << 20

    def address(self, subject: str) -> bytes:
        return subject.encode()

    def payload(self, data: bytes, header_bytes: int) -> bytes:
        return data

    def publish_async(self, *args: Any, **options: Any) -> Exception:
        self.probed += 1
        return next(self.probes)

    def atomic_batch(self, timeout: float | None = None) -> Any:
        world = self
        data: list[bytes] = []

        class Batch:
            id, outcome = "me", "open"

            def _enter(self) -> Any:
                return self

            def add(self, subject: str, each: bytes, headers: Any = None) -> None:
                data.append(each)

            def add_many(self, messages: Sequence[tuple[str, bytes]]) -> None:
                data.extend(each for _, each in messages)

            def commit(self, subject: str | None = None, each: bytes = b"", headers: Any = None) -> None:
                if subject is not None:
                    data.append(each)
                world.opened += 1
                answer = world.commits.pop(0) if world.commits else None
                self.outcome = (
                    "stored" if answer is None else "unknown" if isinstance(answer, BatchInDoubt) else "not stored"
                )
                if answer is not None:
                    raise answer
                world.stored.append(data)

            def resolve(self) -> str:
                world.resolved += 1
                if isinstance(world.resolve, Exception):
                    raise world.resolve
                return str(world.resolve)

            def discard(self) -> None:
                world.discarded += 1

        return Batch()


def _connection(js: FakeBatches) -> Any:
    return js


def _outcome(future: Exception) -> None:
    raise future


def _write_atomic(js: FakeBatches, items: list[bytes], clock: JumpingClock, **options: Any) -> None:
    options = {"max_messages": 1_000, "timeout_s": None, "doubt_s": 30.0} | options
    messages: ItemMessages[bytes] = ItemMessages("s", None, bytes.decode)
    blocking.Runner(None, clock).run(Atomic(js, _connection, messages, _outcome, **options).write(items))


DUPLICATE, WRONG = DuplicateMessageId(400, 10201, "x"), WrongLastSequence(400, 10071, "x")
BUSY = TooManyBatches(429, 10210, "x")


def test_ids_that_are_known_and_then_not_are_asked_for_only_so_often() -> None:
    js = FakeBatches(*[DUPLICATE] * 9, probes=[WRONG])
    with pytest.raises(DuplicateMessageId):
        _write_atomic(js, [b"1", b"2"], JumpingClock())
    assert (js.opened, js.probed, js.stored) == (ROUNDS, 2 * (ROUNDS - 1), [])


def test_only_what_is_not_known_is_stored_and_in_order() -> None:
    js = FakeBatches(DUPLICATE, probes=[WRONG, DUPLICATE, WRONG, DUPLICATE])
    _write_atomic(js, [b"1", b"2", b"3", b"4"], JumpingClock())
    assert js.stored == [[b"1", b"3"]]
    # The first is turned away and asked again, after the others.
    js, clock = FakeBatches(DUPLICATE, probes=[BUSY, DUPLICATE, WRONG, WRONG, WRONG]), JumpingClock()
    _write_atomic(js, [b"1", b"2", b"3", b"4"], clock)
    assert (js.stored, js.probed, clock.slept) == ([[b"1", b"3", b"4"]], 5, [0.02])


def test_a_server_without_a_free_place_is_asked_for_ids_only_so_long() -> None:
    js, clock = FakeBatches(DUPLICATE, probes=[BUSY]), JumpingClock()
    with pytest.raises(TooManyBatches):
        _write_atomic(js, [b"1"], clock, doubt_s=1.0)
    assert sum(clock.slept) == pytest.approx(1.0, abs=0.05)
    assert js.stored == []


def test_an_answer_that_cannot_be_is_no_reason_to_believe_anything() -> None:
    js = FakeBatches(DUPLICATE, probes=[OUTAGE])
    with pytest.raises(ConnectionLost):
        _write_atomic(js, [b"1"], JumpingClock())
    messages: ItemMessages[bytes] = ItemMessages("s", None, bytes.decode)
    js = FakeBatches(DUPLICATE, probes=[WRONG])
    atomic = Atomic(js, _connection, messages, lambda _: None, max_messages=9, timeout_s=1, doubt_s=1)
    with pytest.raises(ProtocolError, match="was stored against its expectation"):
        blocking.Runner(None).run(atomic.write([b"1"]))
    assert js.stored == []


def test_a_stream_that_does_not_answer_is_asked_what_it_stored_only_so_long() -> None:
    silence = BatchInDoubt("me", "the stream does not answer")
    silence.__cause__ = RequestTimeout("x", 1)
    js, clock = FakeBatches(BatchInDoubt("me", "no answer"), resolve=silence), JumpingClock()
    with pytest.raises(BatchInDoubt, match="does not answer"):
        _write_atomic(js, [b"1"], clock, doubt_s=2.0)
    assert sum(clock.slept) == pytest.approx(2.0, abs=0.3)
    # What cannot be known any more is not asked again.
    js, clock = FakeBatches(BatchInDoubt("me", "x"), resolve=BatchInDoubt("me", "gone")), JumpingClock()
    with pytest.raises(BatchInDoubt, match="gone"):
        _write_atomic(js, [b"1"], clock)
    assert (js.resolved, clock.slept) == (1, [])


def test_a_limit_that_makes_no_sense_is_not_believed() -> None:
    for description in ("too large", "too large: 0", "too large: 5", "too large: 9"):
        js = FakeBatches(BatchTooLarge(400, 10199, description))
        with pytest.raises(BatchTooLarge):
            _write_atomic(js, [b"%d" % number for number in range(5)], JumpingClock())
    js = FakeBatches(BatchTooLarge(400, 10199, "too large: 2"))
    _write_atomic(js, [b"%d" % number for number in range(5)], JumpingClock())
    assert js.stored == [[b"0", b"1"], [b"2", b"3"], [b"4"]]


def test_a_doubt_between_the_batches_of_a_flush_says_how_many_items_are_stored() -> None:
    js = FakeBatches(None, BatchInDoubt("me", "x"), resolve=BatchInDoubt("me", "gone"))
    with pytest.raises(BatchInDoubt, match="gone") as doubt:
        _write_atomic(js, [b"%d" % number for number in range(6)], JumpingClock(), max_messages=2)
    assert (doubt.value.stored, js.stored) == (2, [[b"0", b"1"]])


def test_threads_get_a_fair_lock_in_the_order_of_asking() -> None:
    lock, order = FairLock(), list[int]()

    def take(number: int) -> None:
        lock.acquire()
        order.append(number)
        lock.release()

    lock.acquire()
    threads = []
    for number in range(10):
        thread = threading.Thread(target=take, args=(number,))
        thread.start()
        threads.append(thread)
        _await(lambda: len(lock._waiting) == number + 1)  # noqa: B023
    lock.release()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == list(range(10))
    lock.acquire()  # and it is free again


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_whoever_is_interrupted_while_waiting_for_a_fair_lock_is_in_nobodys_way(is_handed_over: bool) -> None:
    def interrupt(*_: object) -> None:
        if is_handed_over:
            lock.release()
        raise KeyboardInterrupt

    lock, main = FairLock(), threading.get_ident()
    lock.acquire()
    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGUSR1])
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    if not is_handed_over:
        lock.release()
    lock.acquire()  # which would wait for ever
    assert not lock._waiting


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        ("RetrySink", {}),
        ("RetrySink", {"is_retryable": 5}),
        ("DeadLetterSink", {"dead_letters": object()}),
        ("DeadLetterSink", {"when": 5}),
        ("DeadLetterSink", {"split": "yes"}),
        ("MeteredSink", {"observe": 5}),
    ],
)
def test_a_wrapper_refuses_what_it_could_not_use_later(world: World, wrapper: str, options: dict[str, Any]) -> None:
    others = {"dead_letters": world.sink(Scripted())} if wrapper == "DeadLetterSink" else {}
    good = {"sink": world.sink(Scripted()), **others}
    getattr(world.sinks, wrapper)(**good)
    wrong = options or {"sink": object()}
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: expected ")):
        getattr(world.sinks, wrapper)(**good | wrong)


def test_both_drivers_have_the_same_sinks() -> None:
    assert aio.__all__ == blocking.__all__


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _first(writes: list[Future[None]], count: int) -> list[Future[None]]:
    """Wait until so many are done; returns those."""
    _await(lambda: sum(write.done() for write in writes) >= count)
    return [write for write in writes if write.done()]


def _await(condition: Callable[[], bool]) -> None:
    """For what other threads do and give no signal of."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


# ---- numbers ---------------------------------------------------------------------------------------------------------

NUMERIC = {"int", "float", "int | None", "float | None"}
NO_NUMBERS: list[Any] = ["5", b"5", True, False, math.nan, [5], object(), 5j, datetime.timedelta(seconds=5)]
OUT_OF_RANGE: list[Any] = [-1, math.inf, -math.inf, 10**30, 10**400]


def _numbers_of(make: Any) -> list[tuple[str, str]]:
    """Parameters that are numbers, with their annotation."""
    found = inspect.signature(make).parameters.values()
    return [(each.name, each.annotation) for each in found if each.annotation in NUMERIC]


SINKS = ["CircuitBreakerSink", "RateLimitSink", "FastIngestSink", "AtomicSink"]
SINK_NUMBERS = [("RetrySink", each.name, str(each.type)) for each in dataclasses.fields(Retry)]
SINK_NUMBERS += [
    (sink, name, kind)
    for sink in SINKS
    for name, kind in _numbers_of(getattr(aio, sink, None) or getattr(aio_jetstream, sink))
]


def _make_sink(world: World, sink: str, options: dict[str, Any]) -> Any:
    if sink in ("FastIngestSink", "AtomicSink"):
        js = types.SimpleNamespace(
            _context=types.SimpleNamespace(connection=None), fast_publisher=print, atomic_batch=print
        )
        return getattr(aio_jetstream if world.is_aio else blocking_jetstream, sink)(js, "s", **options)
    return getattr(world.sinks, sink)(
        world.sink(Scripted()), **({"items_per_s": 5.0} if sink == "RateLimitSink" else {}) | options
    )


def test_the_sinks_have_numbers() -> None:
    assert len(SINK_NUMBERS) == 13


@pytest.mark.parametrize(("sink", "name", "kind"), SINK_NUMBERS, ids=lambda value: str(value))
def test_every_number_of_a_sink_is_checked(world: World, sink: str, name: str, kind: str) -> None:
    _make_sink(world, sink, {name: 1})
    for value in [*NO_NUMBERS, *OUT_OF_RANGE, *([] if "None" in kind else [None]), *([1.5] if "int" in kind else [])]:
        with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: expected ")):
            _make_sink(world, sink, {name: value})


# Of these, zero or less stands for the default.
MAY_BE_ANY = {"queue_depth", "flush_timeout"}


@pytest.mark.parametrize(("name", "kind"), _numbers_of(BatcherConfig))
def test_every_number_of_a_batcher_is_checked(name: str, kind: str) -> None:
    settings = {"sink": World("blocking").sink(Scripted()), "max_batch_size": 1, "max_batch_delay": 1.0}
    BatcherConfig(**settings | {name: 1})
    out_of_range = [each for each in OUT_OF_RANGE if name not in MAY_BE_ANY or each > 0]
    for value in [*NO_NUMBERS, *out_of_range, *([] if "None" in kind else [None]), *([1.5] if "int" in kind else [])]:
        with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: expected ")):
            BatcherConfig(**settings | {name: value})
