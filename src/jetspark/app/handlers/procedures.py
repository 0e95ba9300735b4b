"""How an event is handled, from the moment it is taken until it is acknowledged or waits for its next attempt. Pure.

:func:`handle` and :func:`handle_batch` are the whole procedure. A worker runs them against the server, and so does the
simulator, which ends the worker before and after each step. Both reach the outside through a :class:`HandlerDriver`.
Requests to the server are generators of steps (:mod:`jetspark.app.handlers.handler_steps`). The two procedures
themselves are coroutines: most events succeed at once, and awaiting two calls of the driver costs a tenth of yielding
two steps (0.05 instead of 0.4 us, where an event costs about 10).

Every step can be repeated without harm. A crash between any two of them leaves the event with exactly one owner, which
brings it back:

===========================  ===========================================================================================
failed, retried much later   key parked -> schedule stored -> **acknowledged**. Before the schedule the stream owns the
                             event, after it the retry stream; a redelivery finds the schedule and is acknowledged.
failed, given up             key parked -> dead letter stored -> **acknowledged**. Before the dead letter the stream (or
                             the retry stream) owns the event, after it the dead letter; a redelivery finds the dead
                             letter and is acknowledged.
its key is parked            dead letter stored -> parked record written again, so that a concurrent advance of the key
                             conflicts and sees the dead letter; if the key has been advanced already: redrive
                             requested -> **acknowledged**.
succeeded, its key waited    dead letter closed -> next dead letter of the key made its head -> redrive of that one
for it                       requested -> **acknowledged**. A redelivery finds the dead letter closed and does the rest.
===========================  ===========================================================================================

A key is parked *before* anything else, so that no later event of it can begin while the failed one has no owner but the
server's redelivery. It is unparked when it has no dead letter left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

from jetspark.app.handlers.crash_records import ReaderDied
from jetspark.app.handlers.handler_steps import (
    Acknowledge,
    AttemptsRecord,
    CloseDeadLetter,
    DropAttempts,
    DropParked,
    DropSeparateBody,
    EndTransaction,
    FindDeadLetter,
    FindRetry,
    HandlerSteps,
    KeyStep,
    NextDeadLetter,
    ParkedRecord,
    PauseHandler,
    ReadAttempts,
    ReadParked,
    ReportDropped,
    RequestRedrive,
    WriteAttempts,
    WriteDeadLetter,
    WriteParked,
    WriteSchedule,
)
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.machine import FINISH, HandlerMachine
from jetspark.app.handlers.retry import Decided, GiveUp, WaitHere, WaitLong
from jetspark.app.stored_events import DeadLetterRef, FailureCause
from jetspark.core.step_runner import ReadClock, Steps

__all__ = [
    "HandlerDriver",
    "advance",
    "conclude",
    "give_up_undelivered",
    "handle",
    "handle_batch",
    "is_plain",
    "needs_preparing",
    "prepare",
    "restore",
]

R = TypeVar("R")

_Found: TypeAlias = Literal["run", "elsewhere", "dead letter", "finished"]
"""The owner of an event that was delivered before: this delivery; a retry or a later dead letter; its dead letter; or
none, as the event is done."""


class HandlerDriver(Protocol):
    """The surroundings of a handler: a worker with a server, or a simulator."""

    @property
    def machine(self) -> HandlerMachine: ...

    def now(self) -> float:
        """The time on the driver's monotonic clock."""

    def run_handler(self, item: WorkItem, /) -> Awaitable[BaseException | None]:
        """Run the handler's own code; returns the error it raised."""

    def run_batch(self, items: Sequence[WorkItem], /) -> Awaitable[BaseException | None]:
        """Run the handler's own code once for all these events; returns the error it raised."""

    def run_steps(self, steps: HandlerSteps[R], /) -> Awaitable[R]:
        """Perform steps until the procedure returns."""

    def acknowledge(self, item: WorkItem, /) -> Awaitable[None]:
        """Acknowledge the item's message, without waiting for a confirmation."""

    def attempt_failed(self, item: WorkItem, error: BaseException, /) -> None:
        """The handler's own code raised ``error`` for this event; its outcome is stored next."""

    def attempt_ended(self, item: WorkItem, error: BaseException | None, decided: Decided | None, /) -> None:
        """An attempt was concluded, for observers and logs. ``decided`` is None if the item was let go of."""

    def item_left(self, item: WorkItem, /) -> None:
        """The item is acknowledged, waits in its lane, or was let go of: the runner is free for another."""


async def handle(driver: HandlerDriver, item: WorkItem) -> None:
    """Handle an item that was taken, until it is acknowledged or waits in its lane."""
    machine = driver.machine
    if not needs_preparing(item) or await driver.run_steps(prepare(machine, item)):
        error = await driver.run_handler(item)
        if error is None and is_plain(machine, item):  # as in _end_attempt(), another coroutine less for most events
            machine.succeed(item)
            await driver.acknowledge(item)
            machine.acknowledged(item)
            driver.attempt_ended(item, None, FINISH)
        else:
            await _end_attempt(driver, item, error)
    driver.item_left(item)


async def handle_batch(driver: HandlerDriver, items: Sequence[WorkItem]) -> None:
    """Handle items that were taken in one call of the handler, until each is acknowledged or waits in its lane."""
    batch = []
    for item in items:
        is_new = not needs_preparing(item)
        if not is_new and not await driver.run_steps(prepare(driver.machine, item)):
            driver.item_left(item)
        elif is_new or item.attempts == 1:
            batch.append(item)
        else:
            # It had begun when a process died. By itself, since if it kills this one as well, no other event counts an
            # attempt for it.
            await _attempt_batch(driver, [item])
    now, kept = driver.now(), []
    for item in batch:
        if _release_lapsed(driver.machine, item, now):  # while the others were looked up
            driver.item_left(item)
        else:
            kept.append(item)
    if kept:
        await _attempt_batch(driver, kept)


async def _attempt_batch(driver: HandlerDriver, batch: Sequence[WorkItem]) -> None:
    error = await _run_batch(driver, batch)
    for item in batch:
        # A failed batch decides nothing: each event is tried alone, so that only those at fault fail.
        own_error = error if error is None or len(batch) == 1 else await _run_batch(driver, [item])
        await _end_attempt(driver, item, own_error)
        driver.item_left(item)


async def _run_batch(driver: HandlerDriver, items: Sequence[WorkItem]) -> BaseException | None:
    now = driver.now()
    for item in items:
        driver.machine.restart_clock(item, now)
    return await driver.run_batch(items)


async def _end_attempt(driver: HandlerDriver, item: WorkItem, error: BaseException | None) -> None:
    """Store the outcome of an attempt, and end it."""
    machine = driver.machine
    decided: Decided | None
    if error is not None:
        driver.attempt_failed(item, error)
    if error is None and is_plain(machine, item):
        machine.succeed(item)
        await driver.acknowledge(item)
        machine.acknowledged(item)
        decided = FINISH
    elif error is not None and _release_lapsed(machine, item, driver.now()):
        decided = None
    else:
        decided = await driver.run_steps(conclude(machine, item, error))
    driver.attempt_ended(item, error, decided)


def _release_lapsed(machine: HandlerMachine, item: WorkItem, now: float) -> bool:
    """Let go of an item whose ``ack_wait`` has passed: the server may have redelivered it to another worker, which
    decides. Returns whether it had."""
    if not machine.has_lapsed(item, now):
        return False
    machine.dismiss(item)
    machine.lapse(item)
    return True


def is_plain(machine: HandlerMachine, item: WorkItem) -> bool:
    """True if success needs only the acknowledgement, as for most items."""
    return (
        not item.is_behind
        and item.delivered == 1
        and item.attempts == 1
        and not item.redrives
        and (not machine.parked or item.key not in machine.parked)
    )


def needs_preparing(item: WorkItem) -> bool:
    """True if :func:`prepare` has to run first. Most items need no look-up."""
    return item.is_behind or (not item.is_checked and (item.delivered > 1 or item.redrives > 0))


def prepare(machine: HandlerMachine, item: WorkItem) -> HandlerSteps[bool]:
    """Find out who owns an item; returns whether to run the handler's code.

    If not, the item is acknowledged, waits in its lane to be taken again, or was let go of.
    """
    if item.is_behind:
        found = (yield from _look_up(item)) if item.delivered > 1 and not item.redrives else "run"
        if found == "run":
            head = yield from _head_before(machine, item)
            if head is None:
                machine.wait_here(item, 0.0, (yield ReadClock()))
                return False
            yield from _put_behind(machine, item, head)
        else:
            yield from _continue_key(machine, item, found)
        yield from _end(machine, item)
        return False
    item.is_checked = True
    found = yield from _look_up(item)
    if found != "run":
        machine.dismiss(item)
        yield from _continue_key(machine, item, found)
        yield from _end(machine, item)
        return False
    if item.delivered > 1:
        cause = yield from _count_attempts(item)
        died = item.event if isinstance(item.event, ReaderDied) else None
        if died is not None:
            item.attempts, cause = died.deaths, FailureCause.of_crash(str(died))
        if died is not None or item.attempts > machine.policy.attempts:
            machine.dismiss(item)
            cause = cause or FailureCause.of_crash()
            if (yield from _has_committed(machine, item)):
                yield from _succeed(machine, item)
            elif machine.limits.has_dead_letters:
                yield from _give_up(machine, item, cause)
            else:
                yield ReportDropped(item, cause)
                yield from _succeed(machine, item)
            return False
        yield WriteAttempts(item, cause)
    now = yield ReadClock()
    if _release_lapsed(machine, item, now):  # these steps waited for a connection
        return False
    machine.restart_clock(item, now)
    return True


def conclude(machine: HandlerMachine, item: WorkItem, error: BaseException | None) -> HandlerSteps[Decided]:
    """Store the outcome of the handler's own code, which ended with ``error`` or without; returns the decision."""
    now = yield ReadClock()
    was_open = machine.is_open
    decided = machine.finish(item, error, now)
    if machine.is_open and not was_open:
        yield PauseHandler()
    if isinstance(decided, GiveUp) and (yield from _has_committed(machine, item)):
        decided = FINISH
    if isinstance(decided, WaitHere):
        yield WriteAttempts(item, FailureCause.of(error, is_transient=True))
        machine.wait_here(item, decided.seconds, now)
    elif isinstance(decided, WaitLong):
        yield from _park(machine, item)
        yield WriteSchedule(item, decided.seconds, FailureCause.of(error, is_transient=True))
        yield from _end(machine, item)
    elif isinstance(decided, GiveUp) and machine.limits.has_dead_letters:
        yield from _give_up(machine, item, FailureCause.of(error, is_transient=decided.is_transient))
    else:
        yield from _succeed(machine, item)
    return decided


def _head_before(machine: HandlerMachine, item: WorkItem) -> HandlerSteps[int | None]:
    """The event before the item that its key waits for; None if the key was advanced after the item was taken."""
    assert item.key is not None
    if item.redrives:
        # The key's record names this event since before the redrive was requested, and this worker may not have
        # received that record yet.
        parked: ParkedRecord | None = yield ReadParked(item.key)
        if parked is None:
            machine.unpark(item.key)
        else:
            machine.park(item.key, parked.head)
    head = machine.parked.get(item.key)
    return head if head is not None and head < item.sequence else None


def _put_behind(machine: HandlerMachine, item: WorkItem, head: int) -> HandlerSteps[None]:
    assert item.key is not None
    revision = 0
    if item.redrives:
        dead_letter: DeadLetterRef | None = yield FindDeadLetter(item)
        if dead_letter is None or dead_letter.status == "closed" or dead_letter.redrives != item.redrives - 1:
            return
        # The dead letter counts this request as used, so that the next one has another number.
        revision = dead_letter.revision
    yield WriteDeadLetter(item, None, head, revision)
    yield from _confirm(machine, item, item.key)


def _confirm(machine: HandlerMachine, item: WorkItem, key: str) -> HandlerSteps[None]:
    """Make sure that the key of a stored dead letter waits, for an event before the item or for the item itself.

    A worker or an operator may advance the key at the same moment, and may have looked for its dead letters before this
    one was stored. So the record is written again even if nothing in it changes: the other change then names an older
    revision, is refused, and looks for dead letters again.
    """
    while True:
        parked: ParkedRecord | None = yield ReadParked(key)
        if parked is not None and parked.head <= item.sequence:
            head, revision, waiting = parked.head, parked.revision, parked.waiting
        else:
            head, (revision, waiting) = item.sequence, _waiting_for(item.sequence, parked)
        if (yield WriteParked(key, head, revision, waiting)):
            break
    machine.park(key, head)
    if head != item.sequence:
        return
    dead_letter: DeadLetterRef | None = yield FindDeadLetter(item)
    if dead_letter is None or dead_letter.status == "closed":
        yield from _advance(machine, item, key)
    elif dead_letter.status == "behind":
        yield RequestRedrive(dead_letter)


def _look_up(item: WorkItem) -> HandlerSteps[_Found]:
    dead_letter: DeadLetterRef | None = yield FindDeadLetter(item)
    if item.redrives:
        if dead_letter is None or dead_letter.status == "closed":
            return "finished"
        if dead_letter.redrives != item.redrives - 1 or (yield FindRetry(item)):
            return "elsewhere"
        item.dead_letter = dead_letter
        return "run"
    if dead_letter is not None:
        return "elsewhere" if dead_letter.status == "closed" else "dead letter"
    if (yield FindRetry(item)):
        return "elsewhere"
    parked: ParkedRecord | None = (yield ReadParked(item.key)) if item.key is not None else None
    if parked is not None and item.sequence in parked.waiting and item.sequence < parked.head:
        return "finished"
    return "run"


def _continue_key(machine: HandlerMachine, item: WorkItem, found: _Found) -> HandlerSteps[None]:
    """Do the rest for the key of an event that another worker ended, since that worker may have died in between."""
    if item.key is not None and found == "finished":
        yield from _advance(machine, item, item.key)
    elif item.key is not None and found == "dead letter":
        yield from _confirm(machine, item, item.key)
    elif item.key is not None and found == "elsewhere" and not (item.redrives or item.is_behind):
        # The worker that scheduled its retry parked its key first, and this one may not have received that record yet.
        parked: ParkedRecord | None = yield ReadParked(item.key)
        if parked is not None:
            machine.park(item.key, parked.head)


def _count_attempts(item: WorkItem) -> HandlerSteps[FailureCause | None]:
    """Add the attempts that workers made before; returns the failure of the last one, if it is known."""
    record: AttemptsRecord | None = yield ReadAttempts(item)
    if record is not None:
        item.attempts = max(item.attempts, record.attempts + 1)
        return record.cause
    item.attempts += 1  # the worker of the delivery before may have started it, and died
    return None


def _has_committed(machine: HandlerMachine, item: WorkItem) -> HandlerSteps[bool]:
    """True if a transaction of an event that is about to be given up has committed; if not, none can from here on."""
    return machine.limits.has_transactions and bool((yield EndTransaction(item)))


def _succeed(machine: HandlerMachine, item: WorkItem) -> HandlerSteps[None]:
    yield from _close(machine, item)
    # A redelivered retry would need the body that is stored apart. Closing a dead letter removes that one.
    is_apart = not item.redrives and item.original is not None and item.original.apart is not None
    if (yield from _end(machine, item, surely=is_apart)) and is_apart:
        yield DropSeparateBody(item)


def _close(machine: HandlerMachine, item: WorkItem) -> HandlerSteps[None]:
    """Close the dead letter of an event that is done, and advance its key."""
    if item.redrives and (item.dead_letter is None or not (yield CloseDeadLetter(item, item.dead_letter.revision))):
        dead_letter: DeadLetterRef | None = yield FindDeadLetter(item)
        if dead_letter is not None and dead_letter.status != "closed":
            yield CloseDeadLetter(item, dead_letter.revision)
    # A key with an event in the retry stream is parked, and this worker may not have received its record yet.
    if item.key is not None and (item.key in machine.parked or item.source != "stream"):
        yield from _advance(machine, item, item.key)


def _give_up(machine: HandlerMachine, item: WorkItem, cause: FailureCause) -> HandlerSteps[None]:
    yield from _park(machine, item)
    revision = 0
    if item.redrives:
        dead_letter: DeadLetterRef | None = yield FindDeadLetter(item)
        revision = dead_letter.revision if dead_letter is not None else 0
    yield from _store_dead_letter(machine, item, cause, revision)
    yield from _end(machine, item)


def _store_dead_letter(
    machine: HandlerMachine, item: WorkItem, cause: FailureCause, revision: int
) -> HandlerSteps[None]:
    # If it is refused, the dead letter was stored before a crash.
    yield WriteDeadLetter(item, cause, None, revision)
    if item.key is not None and machine.parked.get(item.key) != item.sequence:
        yield from _confirm(machine, item, item.key)


def _end(machine: HandlerMachine, item: WorkItem, *, surely: bool = False) -> HandlerSteps[bool]:
    """Acknowledge the item; returns whether the server has confirmed it, which is asked for only if ``surely``."""
    if item.attempts > 1 or (item.delivered > 1 and not item.is_behind):
        yield DropAttempts(item)
    is_confirmed: bool = yield Acknowledge(item, surely)
    machine.acknowledged(item)
    return is_confirmed


def _park(machine: HandlerMachine, item: WorkItem) -> HandlerSteps[None]:
    key = item.key
    if key is None:
        return
    while True:
        parked: ParkedRecord | None = yield ReadParked(key)
        if parked is not None and parked.head <= item.sequence:
            machine.park(key, parked.head)
            return
        revision, waiting = _waiting_for(item.sequence, parked)
        if (yield WriteParked(key, item.sequence, revision, waiting)):
            machine.park(key, item.sequence)
            return


def _waiting_for(sequence: int, parked: ParkedRecord | None) -> tuple[int, tuple[int, ...]]:
    """The revision to replace, and the events that wait, when a key waits for ``sequence`` first."""
    if parked is None:
        return 0, (sequence,)
    # An earlier event has failed as well: the head so far follows it.
    return parked.revision, (sequence, *(each for each in parked.waiting if each >= parked.head))


def _advance(machine: HandlerMachine, item: WorkItem, key: str) -> HandlerSteps[None]:
    head = yield from advance(key, item.sequence)
    if head is None:
        machine.unpark(key)
    else:
        machine.park(key, head)


def give_up_undelivered(machine: HandlerMachine, item: WorkItem, cause: FailureCause) -> HandlerSteps[None]:
    """Write a dead letter for an event that the server delivers no more, unless it is done or owned elsewhere."""
    found = yield from _look_up(item)
    yield from _continue_key(machine, item, found)
    if found != "run":
        return
    if (yield from _has_committed(machine, item)):
        yield from _close(machine, item)
    elif machine.limits.has_dead_letters:
        yield from _park(machine, item)
        yield from _store_dead_letter(
            machine, item, cause, item.dead_letter.revision if item.dead_letter is not None else 0
        )
    else:
        yield ReportDropped(item, cause)
        yield from _close(machine, item)


def advance(key: str, sequence: int) -> Steps[KeyStep, int | None]:
    """Advance a parked key whose event ``sequence`` is done; returns the event that it waits for now.

    It returns None if the key is no longer parked. A redrive is requested of the event that the key waits for now,
    unless a retry of that event is scheduled.
    """
    while True:
        parked: ParkedRecord | None = yield ReadParked(key)
        if parked is None:
            return None
        dead_letter: DeadLetterRef | None = yield NextDeadLetter(key)
        if parked.head != sequence:
            if sequence in parked.waiting and sequence > parked.head:
                # It is done before its turn: an operator has discarded its dead letter.
                rest = tuple(each for each in parked.waiting if each != sequence)
                if not (yield WriteParked(key, parked.head, parked.revision, rest)):
                    continue
            # The key was advanced before a crash, which may have prevented the request.
            if dead_letter is not None and dead_letter.sequence == parked.head and dead_letter.status == "behind":
                yield RequestRedrive(dead_letter)
            return parked.head
        scheduled = min((each for each in parked.waiting if each > sequence), default=None)
        if scheduled is not None and (dead_letter is None or scheduled < dead_letter.sequence):
            # The server delivers its retry when it is due.
            if (yield WriteParked(key, scheduled, parked.revision, parked.waiting)):
                return scheduled
        elif dead_letter is None:
            if (yield DropParked(key, parked.revision)):
                return None
        else:
            waiting = parked.waiting
            if dead_letter.sequence < sequence:
                # A worker died before it wrote the record for this dead letter. Events up to ``sequence`` are done; a
                # record that named them after its new head would wait for them.
                waiting = tuple(each for each in waiting if each > sequence)
            if (yield WriteParked(key, dead_letter.sequence, parked.revision, waiting)):
                yield RequestRedrive(dead_letter)
                return dead_letter.sequence


def restore(key: str) -> Steps[KeyStep, bool]:
    """Park a key again that has dead letters but no record; returns whether it did.

    Records are lost if an operator purges or deletes them. Without its record, no redrive is requested of the dead
    letters behind the first.
    """
    if (yield ReadParked(key)) is not None:
        return False
    first: DeadLetterRef | None = yield NextDeadLetter(key)
    if first is None or not (yield WriteParked(key, first.sequence, 0, (first.sequence,))):
        return False
    # A worker may have closed it in the meantime, or written an earlier one.
    dead_letter: DeadLetterRef | None = yield NextDeadLetter(key)
    if dead_letter is None or dead_letter.sequence != first.sequence:
        yield from advance(key, first.sequence)
    elif dead_letter.status == "behind":
        yield RequestRedrive(dead_letter)
    return True
