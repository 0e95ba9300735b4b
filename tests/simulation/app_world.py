"""A stream, a worker and what a handler writes, in virtual time: everything but the pure machine is a few dicts here.

One seed is one run. The worker crashes at any step, before or after the step had its effect; acknowledgements and
in_progress are lost; events are delivered again after ``ack_wait``. The checkers are called as things happen.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from support.handler_driver import RunBatch, RunHandler, SteppedDriver

from jetspark.app.handlers.handler_steps import (
    Acknowledge,
    AttemptsRecord,
    CloseDeadLetter,
    DropAttempts,
    DropParked,
    FindDeadLetter,
    FindRetry,
    NextDeadLetter,
    ParkedRecord,
    PauseHandler,
    ReadAttempts,
    ReadParked,
    RequestRedrive,
    WriteAttempts,
    WriteDeadLetter,
    WriteParked,
    WriteSchedule,
)
from jetspark.app.handlers.lanes import Tries, WorkItem
from jetspark.app.handlers.machine import HandlerLimits, HandlerMachine
from jetspark.app.handlers.procedures import advance, give_up_undelivered, handle, handle_batch
from jetspark.app.handlers.retry import Breaker, HandlerTimeout, Reject, RetryIn, RetryPolicy, Skip
from jetspark.app.handlers.room import RETRY_SHARE, Side
from jetspark.app.stored_events import DeadLetterRef, FailureCause
from jetspark.core.step_runner import ReadClock

ACK_WAIT_S = 30.0
ITEM_BYTES = 10
SIDES: tuple[Side, ...] = ("retries", "stream")


@dataclass
class Faults:
    crash: float = 0.0
    """Chance at each step."""
    lost_answer: float = 0.0
    """Chance that an acknowledgement or in_progress does not reach the server."""
    given_up: float = 0.0
    """Chance that somebody else terminates an event that a worker had when it died; its advisory is stored."""
    stop: float = 0.0
    """Chance at each call of the handler that the process is stopped, as by SIGSTOP, for longer than ``ack_wait``."""


@dataclass
class Stored:
    """A message of a stream, as its consumer sees it."""

    sequence: int
    attempts: int = 0
    redrives: int = 0
    delivered: int = 0
    again_at: float | None = None
    is_acked: bool = False


@dataclass
class Letter:
    key: str | None
    status: str
    redrives: int
    revision: int


class Hanging:
    """A handler that ends when it is cancelled."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


def stored(item: WorkItem) -> Stored:
    return cast("Stored", item.message)


class World:
    def __init__(
        self,
        seed: int,
        *,
        events: int,
        keys: int,
        limits: HandlerLimits,
        policy: RetryPolicy,
        faults: Faults,
        failing: float = 0.3,
        poison: float = 0.05,
        breaker: Breaker | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.limits, self.policy, self.faults, self.breaker = limits, policy, faults, breaker
        self.stream = {sequence: Stored(sequence) for sequence in range(1, events + 1)}
        self.key_of: dict[int, str | None] = {
            sequence: f"k{self.rng.randrange(keys)}" if keys else None for sequence in self.stream
        }
        self.trouble: dict[int, list[str]] = {}
        for sequence in self.stream:
            if self.rng.random() < poison:
                self.trouble[sequence] = ["reject"] * 1000
            elif self.rng.random() < failing:
                kinds = ["error", "later", "much later", "hang", "skip"]
                self.trouble[sequence] = self.rng.choices(kinds, k=self.rng.randint(1, 4))
        self.retries: list[Stored] = []
        self.requested: set[tuple[int, int]] = set()
        self.schedules: dict[int, tuple[float, int, int]] = {}
        self.dead_letters: dict[int, Letter] = {}
        self.parked: dict[str, ParkedRecord] = {}
        self.parked_known: dict[str, int] = {}
        """What the worker knows of a key is at least as new."""
        self.attempts: dict[int, AttemptsRecord] = {}
        self.advisories: list[Stored] = []
        self.operators = 0
        """Who are in the middle of something."""
        self.paused_until = 0.0
        self._revisions = itertools.count(1)
        # What the checkers saw.
        self.done: dict[int, int] = dict.fromkeys(self.stream, 0)
        self.runs: dict[int, int] = dict.fromkeys(self.stream, 0)
        self.starts: list[float] = []
        self.open_dead_letters: dict[tuple[int, int], int] = {}
        self.log: list[str] = []
        """What happened, to be read when a seed fails."""
        self.crashes = self.given_up = self.stops = self.lapses = 0
        self.most_running = 0
        self.was_full = False
        """Whether all places for events of the stream were taken at a time."""
        self.most_in_call = 0
        """Events of the largest batch that was handled in one call."""
        self._running: set[int] = set()
        self._stopped_until = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._life = 0
        self._start_worker()

    # ---- time --------------------------------------------------------------------------------------------------

    def at(self, delay: float, what: Callable[[], None], *, of_worker: bool = True) -> None:
        life = self._life if of_worker else -1
        heapq.heappush(self._heap, (self.now + delay, next(self._count), life, what))

    def run_until_quiet(self, limit_s: float = 1e6) -> None:
        """Until everything is acknowledged, nothing is scheduled, and the worker holds nothing."""
        while not self.is_quiet():
            assert self._heap, "nothing will happen any more, and something is left to do"
            self.now, _, life, what = heapq.heappop(self._heap)
            assert self.now < limit_s, f"not quiet after {limit_s} s: {self.machine.items[:5]} {self.parked}"
            if life == self._life and self.now < self._stopped_until:
                heapq.heappush(self._heap, (self._stopped_until, next(self._count), life, what))
            elif life in (-1, self._life):
                what()

    def is_quiet(self) -> bool:
        return (
            all(message.is_acked for message in self.stream.values())
            and all(message.is_acked for message in self.retries)
            and not self.schedules
            and not self.advisories
            and not self.operators
            and not self.machine.held
        )

    # ---- the worker --------------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        self._life += 1
        self._stopped_until = 0.0
        self._next_tick = float("-inf")  # nothing is pulled before the advisories are read
        self._running.clear()
        self.machine = HandlerMachine(self.limits, self.policy, self.rng.random, self.breaker)
        self.driver = SteppedDriver(self.machine, lambda: self.now)
        for key, record in self.parked.items():
            self.machine.park(key, record.head)
        self._bury_given_up()

    def _bury_given_up(self) -> None:
        """Before anything is pulled, one after the other; an advisory is acknowledged when its letter is there."""
        if not self.advisories:
            self._begin_pulling()
            return
        message = self.advisories[0]
        item = self._item(message)
        cause = FailureCause("GivenUp", "by hand", True, "givenup")

        def done() -> None:
            self.advisories.remove(message)
            self._bury_given_up()

        self._step(give_up_undelivered(self.machine, item, cause), None, done)

    def _begin_pulling(self) -> None:
        # As a worker does that begins: whatever somebody had before may come again, and holds back its key.
        for message in self.stream.values():
            its_key = self.key_of[message.sequence]
            if message.delivered and not message.is_acked and its_key is not None:
                self.machine.expect(its_key, message.sequence, self.now)
        self.at(ACK_WAIT_S * 1.5, self._give_up_waiting)
        self._next_tick = float("inf")
        self._tick()

    def _give_up_waiting(self) -> None:
        for sequence in self.machine.lanes.expected:
            if self.stream[sequence].is_acked:
                self.machine.lanes.gone(sequence)
        self._tick_at(self.now)
        if self.machine.lanes.expected:
            self.at(ACK_WAIT_S / 2, self._give_up_waiting)

    def crash(self) -> None:
        self.crashes += 1
        self.log.append(f"{self.now:9.3f} life {self._life}: crash")
        self._life += 1
        for message in [*self.stream.values(), *self.retries]:
            if message.delivered and not message.is_acked and self.rng.random() < self.faults.given_up:
                message.is_acked = True
                self.advisories.append(message)
                self.given_up += 1
        self.at(self.rng.uniform(0, 40), self._start_worker, of_worker=False)

    def may_crash(self) -> bool:
        if self.rng.random() < self.faults.crash:
            self.crash()
            return True
        return False

    def _tick(self) -> None:
        """Pull, do what is due, begin what may begin; the real worker does this whenever something happens."""
        life = self._life
        self._next_tick = float("inf")
        due = self.machine.on_time(self.now)
        for item in due.progress:
            if self.rng.random() >= self.faults.lost_answer and not stored(item).is_acked:
                stored(item).again_at = self.now + ACK_WAIT_S
                item.heard_at = self.now
        for item in due.timed_out:
            if item.runner is not None:
                item.runner.cancel()
        self._fire_schedules()
        if not self._has_room("stream"):
            for item in self.machine.surplus(self.now):
                stored(item).again_at = self.now + ACK_WAIT_S / 4
        self._pull()
        if self.limits.batch > 1:
            self._begin_batch()
        while self.limits.batch == 1 and self._life == life and (taken := self.machine.take(self.now)) is not None:
            self._begin(taken)
        self.lapses += len(self.machine.lapsed)
        self.machine.lapsed.clear()
        assert self.machine.held <= self.limits.max_messages, "too many are held"
        assert self.machine.held_bytes <= self.limits.max_bytes, "too many bytes are held"
        if self._life == life:
            self._tick_again()

    def _tick_again(self) -> None:
        """When the machine has something to do by itself, or the server something to deliver."""
        moments = [moment for moment in (self.machine.next_deadline(), self._next_delivery()) if moment is not None]
        if self.machine.lanes.expected:
            moments.append(self.now + 1.0)  # a worker without room looks again
        if moments:
            self._tick_at(max(min(moments), self.now) + self.rng.uniform(0.001, 0.1))

    def _tick_at(self, moment: float) -> None:
        if moment < self._next_tick:
            self._next_tick = moment
            self.at(moment - self.now, self._tick)

    def _next_delivery(self) -> float | None:
        moments = [due_at for due_at, _, _ in self.schedules.values()]
        for side in SIDES:
            if self._has_room(side):
                messages = [each for each in self._waiting(side) if not each.is_acked]
                moments += [0.0 if each.again_at is None else each.again_at for each in messages]
        return max(min(moments), self.paused_until) if moments else None

    def _waiting(self, side: Side) -> Iterable[Stored]:
        return self.retries if side == "retries" else self.stream.values()

    def _has_room(self, side: Side) -> bool:
        """As :class:`~jetspark.app.handlers.room.Room` divides it: neither side can fill the places of the other."""
        most_held, most_bytes = self.limits.max_messages, self.limits.max_bytes
        kept, kept_bytes = max(1, most_held // RETRY_SHARE), max(ITEM_BYTES, most_bytes // RETRY_SHARE)
        held = sum((item.source == "stream") == (side == "stream") for item in self.machine.items)
        if side == "stream":
            kept, kept_bytes = most_held - kept, most_bytes - kept_bytes
            self.was_full = self.was_full or held == kept
        return held < kept and (held + 1) * ITEM_BYTES <= kept_bytes

    def _pull(self) -> None:
        if self.now < self.paused_until:
            return
        for side in SIDES:
            for message in self._waiting(side):
                if message.is_acked or (message.again_at is not None and message.again_at > self.now):
                    continue
                if not self._has_room(side):
                    break
                message.delivered += 1
                message.again_at = self.now + ACK_WAIT_S
                if self.machine.receive(self._item(message), self.now) == "done":
                    message.is_acked = True

    def _item(self, message: Stored) -> WorkItem:
        is_retry = message.attempts > 0 or message.redrives > 0
        return WorkItem(
            self.key_of[message.sequence],
            message.sequence,
            cast("Any", message),
            size_bytes=ITEM_BYTES,
            delivered=message.delivered,
            tries=Tries(
                ("retry" if message.attempts else "redrive") if is_retry else "stream",
                message.attempts,
                message.redrives,
            ),
        )

    def _begin(self, item: WorkItem) -> None:
        assert self.machine.running <= self.limits.concurrency, "too many run"
        if not item.is_behind:
            self.starts.append(self.now)
        self._step(handle(self.driver, item), None)

    def _begin_batch(self) -> None:
        """As the worker does: one batch at a time, in the order of the stream."""
        if self.machine.running:
            return
        items = list[WorkItem]()
        while len(items) < self.limits.batch and (item := self.machine.take(self.now)) is not None:
            items.append(item)
            self.starts.append(self.now)
        if items:
            items.sort(key=lambda item: item.sequence)
            self._step(handle_batch(self.driver, items), None)

    def _step(self, procedure: Any, answer: Any, done: Callable[[], None] | None = None) -> None:
        try:
            step = procedure.send(answer)
        except StopIteration:
            if done is None:
                self._tick_at(self.now + self.rng.uniform(0.001, 0.1))
            else:
                done()
            return
        if isinstance(step, RunHandler | RunBatch):
            items = [step.item] if isinstance(step, RunHandler) else list(step.items)
            self._run_handler(items, lambda error: self._step(procedure, error, done))
            return
        if self.may_crash():
            return

        def perform() -> None:
            result = self._perform(step)
            self.log.append(f"{self.now:9.3f} life {self._life}: {step} -> {result}")
            if not self.may_crash():
                self.at(self.rng.uniform(0, 0.05), lambda: self._step(procedure, result, done))

        self.at(self.rng.uniform(0, 0.05), perform)

    # ---- the handler's own code, and the checkers --------------------------------------------------------------

    def _run_handler(self, items: list[WorkItem], then: Callable[[BaseException | None], None]) -> None:
        for item in items:
            self._check_start(item)
        self.most_running = max(self.most_running, len(self._running))
        self.most_in_call = max(self.most_in_call, len(items))
        assert len(self._running) <= self.limits.concurrency, "too many run"
        if self.faults.stop and self.rng.random() < self.faults.stop:
            self.stops += 1
            self._stopped_until = self.now + self.rng.uniform(0.5, 2.0) * ACK_WAIT_S
        kinds = [trouble.pop(0) for each in items if (trouble := self.trouble.get(each.sequence))]
        kind = next((each for each in kinds if each != "skip"), "fine") if len(items) > 1 else "".join(kinds)

        def end(error: BaseException | None) -> None:
            for item in items:
                item.runner = None
                self._running.discard(item.sequence)
                self.log.append(f"{self.now:9.3f} life {self._life}: {item} ended with {error!r}")
                if error is None or isinstance(error, Skip):
                    self.done[item.sequence] += 1
            if not self.may_crash():
                then(error)

        if kind == "hang":
            items[0].runner = Hanging(lambda: end(HandlerTimeout("test", self.limits.timeout_s)))
            return
        errors = {
            "error": OSError("away"),
            "later": RetryIn(1),
            "much later": RetryIn(self.policy.in_lane_s + self.rng.uniform(1, 500)),
            "skip": Skip("not ours"),
            "reject": Reject("poison"),
        }
        self.at(self.rng.choice([0.0, 0.1, 2.0]), lambda: end(errors.get(kind)))

    def _check_start(self, item: WorkItem) -> None:
        sequence = item.sequence
        key = self.key_of[sequence]  # not the worker's word for it, which is what is checked
        assert sequence not in self._running, f"{sequence} runs twice at a time"
        if key is not None:
            for other, other_key in self.key_of.items():
                if other_key == key and other < sequence:
                    assert self.done[other], f"{sequence} of {key} began before {other} was done"
                assert other_key != key or other not in self._running, f"{sequence} and {other} of {key} both run"
        self._running.add(sequence)
        self.runs[sequence] += 1

    # ---- what is stored ----------------------------------------------------------------------------------------

    def _perform(self, step: Any, *, is_operator: bool = False) -> Any:
        match step:
            case ReadClock():
                return self.now
            case Acknowledge(item):
                if self.rng.random() >= self.faults.lost_answer:
                    stored(item).is_acked = True
            case FindDeadLetter(item):
                return self._ref(item.sequence)
            case WriteDeadLetter(item, _, behind, revision):
                present = self.dead_letters.get(item.sequence)
                if (present.revision if present else 0) != revision:
                    return False
                status = "open" if behind is None else "behind"
                if status == "open":
                    which = (item.sequence, item.redrives)
                    self.open_dead_letters[which] = self.open_dead_letters.get(which, 0) + 1
                self.dead_letters[item.sequence] = Letter(item.key, status, item.redrives, next(self._revisions))
                return True
            case CloseDeadLetter(item, revision):
                return self.close_dead_letter(item.sequence, revision)
            case FindRetry(item):
                waits = self.schedules.get(item.sequence, (0.0, 0, -1))
                known = [(waits[1], waits[2])]
                known += [(each.attempts, each.redrives) for each in self.retries if each.sequence == item.sequence]
                return any(attempts > item.carried and redrives == item.redrives for attempts, redrives in known)
            case WriteSchedule(item, seconds):
                self.schedules[item.sequence] = (self.now + seconds, item.attempts, item.redrives)
            case NextDeadLetter(key):
                waiting = [each for each, dead_letter in self.dead_letters.items() if dead_letter.key == key]
                return self._ref(
                    min((each for each in waiting if self.dead_letters[each].status != "closed"), default=0)
                )
            case RequestRedrive(dead_letter):
                self.request(dead_letter)
            case ReadParked(key):
                return self.parked.get(key)
            case WriteParked(key, head, revision, waiting):
                if (self.parked[key].revision if key in self.parked else 0) != revision:
                    return False
                self.parked[key] = ParkedRecord(head, next(self._revisions), waiting)
                if not is_operator:
                    self.parked_known[key] = self.parked[key].revision
                return True
            case DropParked(key, revision):
                if key not in self.parked or self.parked[key].revision != revision:
                    return False
                del self.parked[key]
                return True
            case ReadAttempts(item):
                return self.attempts.get(item.sequence)
            case WriteAttempts(item, cause):
                self.attempts[item.sequence] = AttemptsRecord(item.attempts, cause)
            case DropAttempts(item):
                self.attempts.pop(item.sequence, None)
            case PauseHandler():
                assert self.breaker is not None
                self.paused_until = self.now + self.breaker.open_s
            case _:
                raise AssertionError(step)
        return None

    def _ref(self, sequence: int) -> DeadLetterRef | None:
        dead_letter = self.dead_letters.get(sequence)
        if dead_letter is None:
            return None
        return DeadLetterRef(sequence, dead_letter.revision, dead_letter.status, dead_letter.redrives)  # type: ignore[arg-type]

    def _fire_schedules(self) -> None:
        for sequence, (due_at, attempts, redrives) in list(self.schedules.items()):
            if due_at <= self.now:
                del self.schedules[sequence]
                self.retries.append(Stored(sequence, attempts, redrives))

    # ---- the operator ------------------------------------------------------------------------------------------

    def request(self, dead_letter: DeadLetterRef) -> None:
        which = (dead_letter.sequence, dead_letter.redrives + 1)
        if which not in self.requested:
            self.requested.add(which)
            self.retries.append(Stored(dead_letter.sequence, 0, dead_letter.redrives + 1))
            self._tick_at(self.now)

    def close_dead_letter(self, sequence: int, revision: int) -> bool:
        dead_letter = self.dead_letters[sequence]
        if dead_letter.revision != revision:
            return False
        self.dead_letters[sequence] = Letter(dead_letter.key, "closed", dead_letter.redrives, next(self._revisions))
        return True

    def discard(self, sequence: int) -> None:
        """As ``jetspark dlq discard`` does: close it, and let its key go on."""
        dead_letter = self.dead_letters[sequence]
        self.close_dead_letter(sequence, dead_letter.revision)
        self.done[sequence] += 1
        if dead_letter.key is not None:
            procedure, answer = advance(dead_letter.key, sequence), None
            try:
                while True:
                    answer = self._perform(procedure.send(answer))
            except StopIteration as finished:
                if finished.value is None:
                    self.machine.unpark(dead_letter.key)
                else:
                    self.machine.park(dead_letter.key, finished.value)

    def discard_meanwhile(self, sequence: int) -> None:
        """As :meth:`discard` in a process of its own, while the worker works; who hears late that a key goes on."""
        dead_letter = self.dead_letters[sequence]
        self.close_dead_letter(sequence, dead_letter.revision)
        self.done[sequence] += 1
        if dead_letter.key is None:
            return
        key, procedure = dead_letter.key, advance(dead_letter.key, sequence)
        self.operators += 1

        def step(answer: Any) -> None:
            try:
                wanted = procedure.send(answer)
            except StopIteration:
                self.operators -= 1
                return

            def perform() -> None:
                result = self._perform(wanted, is_operator=True)
                self.log.append(f"{self.now:9.3f} operator: {wanted} -> {result}")
                if isinstance(wanted, WriteParked | DropParked) and result:
                    self._tell_worker(key)
                step(result)

            self.at(self.rng.uniform(0, 0.2), perform, of_worker=False)

        step(None)

    def _tell_worker(self, key: str) -> None:
        """The worker follows the records of parked keys, and is told of a change a moment after it was written."""
        record, life = self.parked.get(key), self._life
        revision = next(self._revisions) if record is None else record.revision

        def tell() -> None:
            if life != self._life or self.parked_known.get(key, 0) > revision:
                return
            if record is None:
                self.machine.unpark(key)
            else:
                self.machine.park(key, record.head)
            self._tick_at(self.now)

        self.at(self.rng.uniform(0, 1.0), tell, of_worker=False)

    def open(self) -> list[int]:
        return [sequence for sequence, dead_letter in self.dead_letters.items() if dead_letter.status == "open"]
