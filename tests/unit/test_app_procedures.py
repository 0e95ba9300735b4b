"""What becomes of an event, step by step: every branch of every procedure, with each answer a server may give."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, TypeAlias

import pytest
from support.handler_driver import RunBatch, RunHandler, SteppedDriver

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
from jetspark.app.handlers.lanes import Tries, WorkItem
from jetspark.app.handlers.machine import HandlerLimits, HandlerMachine
from jetspark.app.handlers.procedures import (
    advance,
    conclude,
    give_up_undelivered,
    handle,
    handle_batch,
    is_plain,
    needs_preparing,
    prepare,
    restore,
)
from jetspark.app.handlers.retry import (
    Breaker,
    Finish,
    GiveUp,
    Reject,
    RetryIn,
    RetryPolicy,
    Skip,
    WaitHere,
    WaitLong,
)
from jetspark.app.stored_events import DeadLetterRef, DeadLetterStatus, FailureCause, Origin, StoredEvent
from jetspark.core.headers import Headers
from jetspark.core.step_runner import ReadClock

KEY = "k"
SEQUENCE = 5
CAUSE = FailureCause("OSError", "gone", True, "abc")
Script = list[tuple[Any, Any]]
Procedure: TypeAlias = Generator[Any, Any, Any] | Coroutine[Any, Any, Any]


def machine_of(breaker: Breaker | None = None, *, attempts: int = 5, **limited: Any) -> HandlerMachine:
    policy = RetryPolicy(attempts=attempts, jitter=0)
    limits = HandlerLimits(**{"timeout_s": 30.0, "ack_wait_s": 1000.0, **limited})
    return HandlerMachine(limits, policy, lambda: 0.0, breaker)


def taken(machine: HandlerMachine, key: str | None = KEY, sequence: int = SEQUENCE, **how: Any) -> WorkItem:
    """An item that is received and taken, as a driver has it when it begins."""
    item = WorkItem(key, sequence, **how)
    assert machine.receive(item, 0.0) == "new"
    assert machine.take(0.0) is item
    return item


def run(procedure: Procedure, script: Script) -> Any:
    """What a procedure returns. It must ask for exactly these steps, and gets the answer beside each."""
    answer: Any = None
    for expected, following in script:
        assert procedure.send(answer) == expected
        answer = following
    with pytest.raises(StopIteration) as ended:
        procedure.send(answer)
    return ended.value.value


def dead_letter(
    status: DeadLetterStatus = "open", *, sequence: int = SEQUENCE, revision: int = 7, redrives: int = 0
) -> DeadLetterRef:
    return DeadLetterRef(sequence, revision, status, redrives)


def parked(head: int, *waiting: int, revision: int = 4) -> ParkedRecord:
    return ParkedRecord(head, revision, waiting)


def cause_of(error: BaseException, *, is_transient: bool) -> FailureCause:
    return FailureCause.of(error, is_transient=is_transient)


def succeeded(item: WorkItem) -> Script:
    """The whole of a plain success."""
    return [(RunHandler(item), None), (Acknowledge(item), None)]


def ran(item: WorkItem, error: BaseException | None = None, at: float = 1.0) -> Script:
    return [(RunHandler(item), error), (ReadClock(), at)]


def not_known(item: WorkItem) -> Script:
    """An event that was delivered before, and that nobody has written anything about."""
    found: Script = [(FindDeadLetter(item), None), (FindRetry(item), False)]
    return [*found, (ReadParked(item.key), None)] if item.key is not None else found


def newly_parked(item: WorkItem) -> Script:
    return [(ReadParked(KEY), None), (WriteParked(KEY, item.sequence, 0, (item.sequence,)), True)]


def confirmed(record: ParkedRecord) -> Script:
    """The key still waits for an earlier event, and whoever lets it go on from now on sees the letter."""
    return [(ReadParked(KEY), record), (WriteParked(KEY, record.head, record.revision, record.waiting), True)]


def stored_apart() -> StoredEvent:
    """An event whose body was too large to be stored with it."""
    return StoredEvent(
        handler="h",
        key=None,
        origin=Origin("S", SEQUENCE, 0),
        subject="s",
        data=b"",
        headers=Headers(),
        attempts=1,
        status="open",
        apart=30,
    )


def is_done(machine: HandlerMachine, item: WorkItem) -> bool:
    return (machine.held, machine.running, machine.was_acknowledged(item)) == (0, 0, True)


# ---- an event that comes for the first time --------------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("error", [None, Skip("nothing to do")])
def test_success_is_acknowledged_and_nothing_else(key: str | None, error: Exception | None) -> None:
    machine = machine_of()
    driver, item = SteppedDriver(machine), taken(machine, key)
    run(handle(driver, item), succeeded(item) if error is None else [*ran(item, error), (Acknowledge(item), None)])
    assert is_done(machine, item)
    assert (driver.ended, driver.left) == ([(item, error, Finish())], [item])


def test_success_is_a_success_for_the_breaker_and_ends_the_time_of_the_handler() -> None:
    machine = machine_of(Breaker(failures=1, open_s=10.0))
    first = taken(machine, None, 1)
    machine.finish(first, OSError(), 0.0)
    machine.acknowledged(first)
    trial, other = WorkItem(None, 2), WorkItem(None, 3)
    for item in (trial, other):
        machine.receive(item, 10.0)
    assert (machine.take(10.0), machine.take(10.0)) == (trial, None)
    run(handle(SteppedDriver(machine), trial), succeeded(trial))
    assert machine.take(10.0) is other
    assert machine.on_time(40.0).timed_out == [other]


def test_a_failure_after_the_ack_wait_decides_nothing() -> None:
    machine = machine_of(ack_wait_s=20.0)
    driver, item = SteppedDriver(machine, lambda: 20.0), taken(machine)
    error = Reject("no")
    run(handle(driver, item), [(RunHandler(item), error)])
    assert (machine.held, machine.running, machine.was_acknowledged(item)) == (0, 0, False)
    assert (machine.lapsed, machine.lanes.expected) == ([item], [SEQUENCE])
    assert (driver.ended, driver.left) == ([(item, error, None)], [item])


def test_a_failure_within_the_ack_wait_and_a_late_success_are_decided() -> None:
    machine = machine_of(ack_wait_s=20.0)
    item, error = taken(machine), Skip()
    run(handle(SteppedDriver(machine, lambda: 19.9), item), [*ran(item, error), (Acknowledge(item), None)])
    item = taken(machine, sequence=SEQUENCE + 1)
    run(handle(SteppedDriver(machine, lambda: 20.0), item), succeeded(item))
    assert machine.lapsed == []


def test_a_breaker_learns_nothing_from_a_failure_after_the_ack_wait() -> None:
    machine = machine_of(Breaker(failures=1, open_s=10.0), ack_wait_s=20.0)
    item = taken(machine)
    run(handle(SteppedDriver(machine, lambda: 20.0), item), [(RunHandler(item), OSError())])
    assert not machine.is_open
    first = taken(machine, None, 1)
    machine.finish(first, OSError(), 0.0)
    machine.acknowledged(first)
    trial, other = WorkItem(None, 2), WorkItem(None, 3)
    machine.receive(trial, 10.0)
    machine.receive(other, 20.0)
    assert (machine.take(10.0), machine.take(10.0)) == (trial, None)
    run(handle(SteppedDriver(machine, lambda: 30.0), trial), [(RunHandler(trial), OSError())])
    assert machine.take(30.0) is other  # the next trial


@pytest.mark.parametrize(
    ("how", "parked_key", "expected"),
    [
        ({}, None, True),
        ({}, "other", True),
        ({}, KEY, False),
        ({"delivered": 2}, None, False),
        ({"tries": Tries("retry", attempts=1)}, None, False),
        ({"tries": Tries("redrive", redrives=1)}, None, False),
    ],
)
def test_success_is_plain_where_it_concerns_nobody_else(
    how: dict[str, Any], parked_key: str | None, expected: bool
) -> None:
    machine = machine_of()
    if parked_key is not None:
        machine.park(parked_key, SEQUENCE)
    item = taken(machine, **how)
    assert is_plain(machine, item) is expected
    item.is_behind = True
    assert not is_plain(machine, item)


def test_a_short_wait_is_in_the_lane_with_the_attempt_written_down_and_then_forgotten() -> None:
    machine = machine_of()
    item = taken(machine)
    error = OSError("gone")
    attempt = (WriteAttempts(item, cause_of(error, is_transient=True)), None)
    run(handle(SteppedDriver(machine), item), [*ran(item, error), attempt])
    assert (machine.held, machine.running, machine.take(1.1)) == (1, 0, None)
    assert machine.take(1.2) is item
    run(handle(SteppedDriver(machine), item), [*ran(item), (DropAttempts(item), None), (Acknowledge(item), None)])
    assert is_done(machine, item)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_kept_apart_of_a_retry_goes_when_the_server_knows_that_it_is_done(is_known: bool) -> None:
    machine = machine_of()
    item = taken(machine, None, tries=Tries(source="retry", attempts=1))
    item.original = stored_apart()
    end: Script = [(DropAttempts(item), None), (Acknowledge(item, surely=True), is_known)]
    run(
        handle(SteppedDriver(machine), item),
        [*ran(item), *end, *([(DropSeparateBody(item), None)] if is_known else [])],
    )
    assert is_done(machine, item)


def test_what_is_kept_apart_of_a_dead_letter_goes_with_it() -> None:
    machine = machine_of()
    item = taken(machine, None, tries=Tries(source="redrive", redrives=1))
    item.original = stored_apart()
    found: Script = [(FindDeadLetter(item), dead_letter()), (FindRetry(item), False), (ReadClock(), 0.0)]
    run(
        handle(SteppedDriver(machine), item),
        [*found, *ran(item), (CloseDeadLetter(item, 7), True), (Acknowledge(item), None)],
    )


def test_a_long_wait_is_stored_after_its_key_is_parked_and_before_the_acknowledgement() -> None:
    machine = machine_of()
    item = taken(machine)
    stored = (WriteSchedule(item, 100.0), None)
    run(
        handle(SteppedDriver(machine), item),
        [*ran(item, RetryIn(100.0)), *newly_parked(item), stored, (Acknowledge(item), None)],
    )
    assert is_done(machine, item)
    assert machine.parked == {KEY: SEQUENCE}
    alone = taken(machine, None, 6)
    stored = (WriteSchedule(alone, 100.0), None)
    run(handle(SteppedDriver(machine), alone), [*ran(alone, RetryIn(100.0)), stored, (Acknowledge(alone), None)])
    assert machine.parked == {KEY: SEQUENCE}


@pytest.mark.parametrize(("error", "attempts", "is_transient"), [(Reject("no"), 5, False), (OSError("gone"), 1, True)])
def test_an_event_that_is_given_up_has_a_dead_letter_before_it_is_acknowledged(
    error: Exception, attempts: int, is_transient: bool
) -> None:
    machine = machine_of(attempts=attempts)
    item = taken(machine)
    written = (WriteDeadLetter(item, cause_of(error, is_transient=is_transient), None, 0), True)
    run(
        handle(SteppedDriver(machine), item),
        [*ran(item, error), *newly_parked(item), written, (Acknowledge(item), None)],
    )
    assert is_done(machine, item)
    assert machine.parked == {KEY: SEQUENCE}


@pytest.mark.parametrize("has_dead_letters", [True, False])
def test_an_event_whose_transaction_has_committed_after_all_is_done_and_not_given_up(has_dead_letters: bool) -> None:
    machine = machine_of(attempts=1, has_transactions=True, has_dead_letters=has_dead_letters)
    item = taken(machine)
    error = OSError("no answer to the commit")
    script = [*ran(item, error), (EndTransaction(item), True), (Acknowledge(item), None)]
    run(handle(SteppedDriver(machine), item), script)
    assert is_done(machine, item)
    assert machine.parked == {}
    item = taken(machine, sequence=SEQUENCE + 1, delivered=2)
    begun = [*not_known(item), (ReadAttempts(item), AttemptsRecord(9, None)), (EndTransaction(item), True)]
    ended: Script = [(DropAttempts(item), None), (Acknowledge(item), None)]
    assert run(prepare(machine, item), [*begun, *ended]) is False
    item = WorkItem(KEY, SEQUENCE + 2)
    lost = give_up_undelivered(machine, item, CAUSE)
    run(lost, [*not_known(item), (EndTransaction(item), True)])


def test_an_event_without_effects_can_have_none_once_it_is_given_up() -> None:
    machine = machine_of(has_transactions=True)
    item, error = taken(machine), Reject("no")
    written = (WriteDeadLetter(item, cause_of(error, is_transient=False), None, 0), True)
    ended: Script = [(EndTransaction(item), False), *newly_parked(item), written, (Acknowledge(item), None)]
    run(handle(SteppedDriver(machine), item), [*ran(item, error), *ended])


def test_a_handler_without_dead_letters_lets_go_of_what_it_gives_up() -> None:
    machine = machine_of(has_dead_letters=False)
    item = taken(machine)
    script = [*ran(item, Reject("no")), (Acknowledge(item), None)]
    run(handle(SteppedDriver(machine), item), script)
    assert is_done(machine, item)
    assert machine.parked == {}


@pytest.mark.parametrize(
    ("error", "decided", "script"),
    [
        (None, Finish(), [Acknowledge]),
        (OSError(), WaitHere(0.2), [WriteAttempts]),
        (RetryIn(60.0), WaitLong(60.0), [WriteSchedule, Acknowledge]),
        (Reject("no"), GiveUp(is_transient=False), [WriteDeadLetter, Acknowledge]),
    ],
)
def test_what_was_decided_is_told(error: Exception | None, decided: object, script: list[type]) -> None:
    machine = machine_of()
    procedure = conclude(machine, taken(machine, None), error)
    assert next(procedure) == ReadClock()
    assert [type(procedure.send(1.0 if step == 0 else True)) for step in range(len(script))] == script
    with pytest.raises(StopIteration) as ended:
        procedure.send(None)
    assert ended.value.value == decided


def test_the_breaker_pauses_the_handler_once_when_it_opens() -> None:
    machine = machine_of(Breaker(failures=2, open_s=10.0))
    items = [taken(machine, None, sequence) for sequence in (1, 2, 3)]
    error = OSError("gone")
    written = [(WriteAttempts(item, cause_of(error, is_transient=True)), None) for item in items]
    run(handle(SteppedDriver(machine), items[0]), [*ran(items[0], error), written[0]])
    run(handle(SteppedDriver(machine), items[1]), [*ran(items[1], error), (PauseHandler(), None), written[1]])
    run(handle(SteppedDriver(machine), items[2]), [*ran(items[2], error), written[2]])


# ---- an event that was delivered before ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delivered", "redrives", "is_checked", "is_behind", "expected"),
    [
        (1, 0, False, False, False),
        (1, 0, False, True, True),
        (2, 0, False, False, True),
        (1, 1, False, False, True),
        (2, 1, True, False, False),
        (2, 1, True, True, True),
    ],
)
def test_what_may_have_an_owner_is_looked_up_once(
    delivered: int, redrives: int, is_checked: bool, is_behind: bool, expected: bool
) -> None:
    item = WorkItem(KEY, SEQUENCE, delivered=delivered, tries=Tries(redrives=redrives))
    item.is_checked, item.is_behind = is_checked, is_behind
    assert needs_preparing(item) is expected


@pytest.mark.parametrize("key", [KEY, None])
def test_a_redelivery_that_nobody_owns_is_run_and_counted_as_begun_before(key: str | None) -> None:
    machine = machine_of()
    item = taken(machine, key, delivered=2)
    counted: Script = [(ReadAttempts(item), None), (WriteAttempts(item, None), None), (ReadClock(), 50.0)]
    ended: Script = [(DropAttempts(item), None), (Acknowledge(item), None)]
    procedure = handle(SteppedDriver(machine), item)
    run(procedure, [*not_known(item), *counted, *ran(item, at=60.0), *ended])
    assert (item.attempts, item.is_checked) == (2, True)
    assert is_done(machine, item)


def test_the_time_of_looking_up_is_not_the_handlers() -> None:
    machine = machine_of()
    item = taken(machine, delivered=2)
    counted: Script = [(ReadAttempts(item), None), (WriteAttempts(item, None), None), (ReadClock(), 50.0)]
    assert run(prepare(machine, item), [*not_known(item), *counted]) is True
    assert machine.on_time(79.9).timed_out == []
    assert machine.on_time(80.0).timed_out == [item]


@pytest.mark.parametrize(("before", "attempts"), [(0, 1), (1, 2), (4, 5)])
def test_attempts_of_workers_before_are_added(before: int, attempts: int) -> None:
    machine = machine_of(attempts=5)
    item = taken(machine, delivered=2)
    record = (ReadAttempts(item), AttemptsRecord(before, CAUSE))
    script = [*not_known(item), record, (WriteAttempts(item, CAUSE), None), (ReadClock(), 1.0)]
    assert run(prepare(machine, item), script) is True
    assert item.attempts == attempts


@pytest.mark.parametrize(
    ("record", "cause"),
    [(AttemptsRecord(5, CAUSE), CAUSE), (AttemptsRecord(9, None), FailureCause.of_crash())],
)
def test_an_event_that_was_begun_as_often_as_allowed_is_given_up_unrun(
    record: AttemptsRecord, cause: FailureCause
) -> None:
    machine = machine_of(attempts=5)
    item = taken(machine, delivered=2)
    ended: Script = [(DropAttempts(item), None), (Acknowledge(item), None)]
    looked_up = [*not_known(item), (ReadAttempts(item), record)]
    written = (WriteDeadLetter(item, cause, None, 0), True)
    assert run(prepare(machine, item), [*looked_up, *newly_parked(item), written, *ended]) is False
    assert is_done(machine, item)
    machine = machine_of(attempts=5, has_dead_letters=False)
    item = taken(machine, delivered=2)
    looked_up = [*not_known(item), (ReadAttempts(item), record)]
    ended = [(ReportDropped(item, cause), None), (DropAttempts(item), None), (Acknowledge(item), None)]
    assert run(prepare(machine, item), [*looked_up, *ended]) is False
    assert is_done(machine, item)


def test_an_event_that_ended_the_processes_that_read_it_is_given_up_unrun_with_their_number() -> None:
    machine = machine_of(attempts=5)
    died = ReaderDied(3)
    item = taken(machine, event=died, delivered=2)
    looked_up = [*not_known(item), (ReadAttempts(item), AttemptsRecord(1, CAUSE)), *newly_parked(item)]
    written = (WriteDeadLetter(item, FailureCause.of_crash(str(died)), None, 0), True)
    ended: Script = [(DropAttempts(item), None), (Acknowledge(item), None)]
    assert run(prepare(machine, item), [*looked_up, written, *ended]) is False
    assert item.attempts == 3
    assert is_done(machine, item)


def test_a_scheduled_retry_is_listed_with_a_failure_that_may_pass() -> None:
    machine = machine_of()
    procedure = conclude(machine, taken(machine, None), RetryIn(100.0))
    assert procedure.send(None) == ReadClock()
    schedule = procedure.send(1.0)
    assert isinstance(schedule, WriteSchedule)
    assert schedule.cause == cause_of(RetryIn(100.0), is_transient=True)


def test_an_event_without_a_record_has_been_begun_once_more_than_it_says() -> None:
    machine = machine_of(attempts=2)
    item = taken(machine, delivered=2, tries=Tries(source="retry", attempts=1))
    script = [*not_known(item), (ReadAttempts(item), None), *newly_parked(item)]
    written = (WriteDeadLetter(item, FailureCause.of_crash(), None, 0), True)
    ended: Script = [(DropAttempts(item), None), (Acknowledge(item), None)]
    assert run(prepare(machine, item), [*script, written, *ended]) is False
    assert item.attempts == 3


@pytest.mark.parametrize("where", ["letter", "retry"])
def test_a_redelivery_that_is_owned_elsewhere_is_acknowledged_unrun(where: str) -> None:
    machine = machine_of()
    item = taken(machine, delivered=2)
    found: Script = [(FindDeadLetter(item), dead_letter("closed") if where == "letter" else None)]
    if where == "retry":
        found.append((FindRetry(item), True))
    ended: Script = [(ReadParked("k"), None), (DropAttempts(item), None), (Acknowledge(item), None)]
    run(handle(SteppedDriver(machine), item), [*found, *ended])
    assert is_done(machine, item)
    assert item.is_checked


def test_the_key_of_an_event_that_another_worker_retries_later_is_known_to_be_parked_before_it_continues() -> None:
    machine = machine_of()
    item = taken(machine, delivered=2)
    found: Script = [(FindDeadLetter(item), None), (FindRetry(item), True)]
    parked: Script = [(ReadParked("k"), ParkedRecord(item.sequence, 7, (item.sequence,)))]
    run(handle(SteppedDriver(machine), item), [*found, *parked, (DropAttempts(item), None), (Acknowledge(item), None)])
    assert machine.parked == {"k": item.sequence}


def is_put_behind(item: WorkItem, confirming: Script) -> Script:
    """An event that has a letter behind another comes again."""
    ended: Script = [(DropAttempts(item), None), (Acknowledge(item), None)]
    return [(FindDeadLetter(item), dead_letter("behind")), *confirming, *ended]


def test_a_dead_letter_that_was_put_behind_stays_there_while_its_key_waits() -> None:
    machine = machine_of()
    item = taken(machine, delivered=2)
    # The record is written again as it is: who looked for letters before this one was there has to look again.
    run(handle(SteppedDriver(machine), item), is_put_behind(item, confirmed(parked(3, 3))))
    assert machine.parked == {KEY: 3}


def test_a_dead_letter_that_was_put_behind_is_handled_if_its_key_has_gone_on_meanwhile() -> None:
    asked: Script = [(RequestRedrive(dead_letter("behind")), None)]
    # Nobody has the key: it waits for this one, which is asked for.
    machine = machine_of()
    item = taken(machine, delivered=2)
    found = (FindDeadLetter(item), dead_letter("behind"))
    taken_over: Script = [*newly_parked(item), found]
    run(handle(SteppedDriver(machine), item), is_put_behind(item, [*taken_over, *asked]))
    assert machine.parked == {KEY: SEQUENCE}
    # Somebody else changes the record at the same moment: what to do is decided anew.
    machine = machine_of()
    item = taken(machine, delivered=2)
    refused: Script = [(ReadParked(KEY), None), (WriteParked(KEY, SEQUENCE, 0, (SEQUENCE,)), False)]
    run(handle(SteppedDriver(machine), item), is_put_behind(item, [*refused, *confirmed(parked(3, 3))]))
    assert machine.parked == {KEY: 3}
    # The key waits for a later event by now: this one comes first.
    machine = machine_of()
    item = taken(machine, delivered=2)
    earlier: Script = [
        (ReadParked(KEY), parked(9, 3, 9, 12)),
        (WriteParked(KEY, SEQUENCE, 4, (SEQUENCE, 9, 12)), True),
        (FindDeadLetter(item), dead_letter("behind")),
    ]
    run(handle(SteppedDriver(machine), item), is_put_behind(item, [*earlier, *asked]))
    assert machine.parked == {KEY: SEQUENCE}
    # The key waits for this very one, and the request may not have been stored.
    machine = machine_of()
    item = taken(machine, delivered=2)
    itself: Script = [*confirmed(parked(SEQUENCE, SEQUENCE)), (FindDeadLetter(item), dead_letter("behind"))]
    run(handle(SteppedDriver(machine), item), is_put_behind(item, [*itself, *asked]))
    assert machine.parked == {KEY: SEQUENCE}


def test_a_key_waits_for_a_dead_letter_that_is_open_and_asks_for_nothing() -> None:
    machine = machine_of()
    item = taken(machine, delivered=2)
    run(
        handle(SteppedDriver(machine), item),
        is_put_behind(item, [*newly_parked(item), (FindDeadLetter(item), dead_letter())]),
    )
    assert machine.parked == {KEY: SEQUENCE}


@pytest.mark.parametrize("now", [None, dead_letter("closed")])
def test_a_key_does_not_wait_for_a_dead_letter_that_is_gone(now: DeadLetterRef | None) -> None:
    machine = machine_of()
    item = taken(machine, delivered=2)
    script: Script = [*newly_parked(item), (FindDeadLetter(item), now), (ReadParked(KEY), parked(5, 5))]
    script += [(NextDeadLetter(KEY), None), (DropParked(KEY, 4), True)]
    run(handle(SteppedDriver(machine), item), is_put_behind(item, script))
    assert machine.parked == {}


def test_a_dead_letter_without_a_key_is_behind_nothing() -> None:
    machine = machine_of()
    item = taken(machine, None, delivered=2)
    script: Script = [
        (FindDeadLetter(item), dead_letter("behind")),
        (DropAttempts(item), None),
        (Acknowledge(item), None),
    ]
    run(handle(SteppedDriver(machine), item), script)


@pytest.mark.parametrize(
    ("record", "is_finished"),
    [
        (parked(9, 5, 9), True),
        (parked(9, 9), False),  # it was parked for others
        (parked(5, 5), False),  # it is its turn
        (parked(4, 4, 5), False),  # its turn is to come
    ],
)
def test_a_redelivery_whose_key_has_gone_on_after_it_is_done(record: ParkedRecord, is_finished: bool) -> None:
    machine = machine_of()
    item = taken(machine, delivered=2)
    script: Script = [(FindDeadLetter(item), None), (FindRetry(item), False), (ReadParked(KEY), record)]
    if is_finished:
        script += [(ReadParked(KEY), record), (NextDeadLetter(KEY), None)]
        script += [(DropAttempts(item), None), (Acknowledge(item), None)]
    else:
        script += [(ReadAttempts(item), None), (WriteAttempts(item, None), None), (ReadClock(), 1.0)]
    assert run(prepare(machine, item), script) is not is_finished
    assert machine.parked == ({KEY: 9} if is_finished else {})


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_trial_of_the_breaker_that_was_not_run_lets_another_begin(is_given_up: bool) -> None:
    machine = machine_of(Breaker(failures=1, open_s=10.0))
    first = taken(machine, None, 1)
    machine.finish(first, OSError(), 0.0)
    machine.acknowledged(first)
    trial, other = WorkItem(None, 2, delivered=2), WorkItem(None, 3)
    for item in (trial, other):
        machine.receive(item, 10.0)
    assert (machine.take(10.0), machine.take(10.0)) == (trial, None)
    ended: Script = [(DropAttempts(trial), None), (Acknowledge(trial), None)]
    if is_given_up:
        record = (ReadAttempts(trial), AttemptsRecord(5, CAUSE))
        script = [*not_known(trial), record, (WriteDeadLetter(trial, CAUSE, None, 0), True), *ended]
    else:
        script = [(FindDeadLetter(trial), dead_letter()), *ended]
    assert run(prepare(machine, trial), script) is False
    assert machine.take(10.0) is other


# ---- an event that is handled again on request -----------------------------------------------------------------------


@pytest.mark.parametrize("redrives", [1, 2])
def test_a_redrive_that_succeeds_closes_its_dead_letter_and_lets_its_key_go_on(redrives: int) -> None:
    machine = machine_of()
    item = taken(machine, tries=Tries(source="redrive", redrives=redrives))
    own = dead_letter(redrives=redrives - 1)
    found: Script = [(FindDeadLetter(item), own), (FindRetry(item), False), (ReadClock(), 1.0)]
    closed: Script = [(CloseDeadLetter(item, 7), True), (ReadParked(KEY), None), (Acknowledge(item), None)]
    machine.park(KEY, SEQUENCE)
    run(handle(SteppedDriver(machine), item), [*found, *ran(item), *closed])
    assert is_done(machine, item)
    assert machine.parked == {}


@pytest.mark.parametrize(
    "now", [dead_letter("open", revision=8), dead_letter("behind", revision=8), dead_letter("closed"), None]
)
@pytest.mark.parametrize("was_found", [True, False])
def test_a_dead_letter_that_changed_meanwhile_is_closed_as_it_is_now(
    now: DeadLetterRef | None, was_found: bool
) -> None:
    machine = machine_of()
    item = taken(machine, None, tries=Tries(source="redrive", redrives=1))
    script: Script = [(ReadClock(), 1.0)]
    if was_found:
        item.dead_letter = dead_letter()
        script.append((CloseDeadLetter(item, 7), False))
    script.append((FindDeadLetter(item), now))
    if now is not None and now.status != "closed":
        script.append((CloseDeadLetter(item, 8), True))
    run(conclude(machine, item, None), [*script, (Acknowledge(item), None)])


@pytest.mark.parametrize("found", [None, dead_letter("closed")])
def test_a_redrive_whose_dead_letter_is_done_lets_its_key_go_on_all_the_same(found: DeadLetterRef | None) -> None:
    machine = machine_of()
    item = taken(machine, tries=Tries(source="redrive", redrives=1))
    machine.park(KEY, SEQUENCE)
    script: Script = [(FindDeadLetter(item), found), (ReadParked(KEY), parked(5, 5)), (NextDeadLetter(KEY), None)]
    run(handle(SteppedDriver(machine), item), [*script, (DropParked(KEY, 4), True), (Acknowledge(item), None)])
    assert machine.parked == {}


@pytest.mark.parametrize("counted", [0, 2, 3])
def test_a_redrive_that_is_not_the_dead_letters_next_is_acknowledged_unrun(counted: int) -> None:
    machine = machine_of()
    item = taken(machine, tries=Tries(source="redrive", redrives=2))
    run(
        handle(SteppedDriver(machine), item),
        [(FindDeadLetter(item), dead_letter(redrives=counted)), (Acknowledge(item), None)],
    )


def test_a_redrive_that_waits_for_a_retry_is_acknowledged_unrun() -> None:
    machine = machine_of()
    item = taken(machine, tries=Tries(source="redrive", redrives=1))
    run(
        handle(SteppedDriver(machine), item),
        [(FindDeadLetter(item), dead_letter()), (FindRetry(item), True), (Acknowledge(item), None)],
    )


@pytest.mark.parametrize(("now", "revision"), [(dead_letter(), 7), (None, 0)])
def test_a_redrive_that_fails_replaces_its_dead_letter(now: DeadLetterRef | None, revision: int) -> None:
    machine = machine_of()
    item = taken(machine, tries=Tries(source="redrive", redrives=1))
    error = Reject("again")
    kept: Script = [(ReadParked(KEY), parked(5, 5)), (FindDeadLetter(item), now)]
    written = (WriteDeadLetter(item, cause_of(error, is_transient=False), None, revision), True)
    script: Script = [(ReadClock(), 1.0), *kept, written, (Acknowledge(item), None)]
    assert run(conclude(machine, item, error), script) == GiveUp(is_transient=False)


def test_the_key_of_a_retry_is_advanced_although_this_worker_may_not_know_that_it_is_parked() -> None:
    machine = machine_of()
    item = taken(machine, tries=Tries(source="retry", attempts=1))
    advanced: Script = [*ran(item), (ReadParked(KEY), None), (DropAttempts(item), None), (Acknowledge(item), None)]
    run(handle(SteppedDriver(machine), item), advanced)
    item = taken(machine, delivered=2)
    looked_up: Script = [*not_known(item), (ReadAttempts(item), None), (WriteAttempts(item, None), None)]
    ended: Script = [(DropAttempts(item), None), (Acknowledge(item), None)]
    run(handle(SteppedDriver(machine), item), [*looked_up, (ReadClock(), 1.0), *ran(item), *ended])


def test_a_parked_key_goes_on_when_the_event_it_waits_for_succeeds() -> None:
    machine = machine_of()
    machine.park(KEY, SEQUENCE)
    item = taken(machine)
    following = dead_letter("behind", sequence=8)
    script: Script = [(ReadParked(KEY), parked(5, 5)), (NextDeadLetter(KEY), following)]
    script += [(WriteParked(KEY, 8, 4, (5,)), True), (RequestRedrive(following), None)]
    run(handle(SteppedDriver(machine), item), [*ran(item), *script, (Acknowledge(item), None)])
    assert machine.parked == {KEY: 8}


# ---- an event of a parked key ----------------------------------------------------------------------------------------


def test_an_event_behind_its_key_is_a_dead_letter_and_not_run() -> None:
    machine = machine_of()
    machine.park(KEY, 3)
    item = taken(machine)
    written = (WriteDeadLetter(item, None, 3, 0), True)
    run(handle(SteppedDriver(machine), item), [written, *confirmed(parked(3, 3)), (Acknowledge(item), None)])
    assert is_done(machine, item)


def test_an_event_behind_its_key_that_was_delivered_before_is_looked_up_first() -> None:
    machine = machine_of()
    machine.park(KEY, 3)
    item = taken(machine, delivered=2)
    found: Script = [(FindDeadLetter(item), None), (FindRetry(item), False), (ReadParked(KEY), parked(3, 3))]
    written: Script = [(WriteDeadLetter(item, None, 3, 0), True), *confirmed(parked(3, 3))]
    run(handle(SteppedDriver(machine), item), [*found, *written, (Acknowledge(item), None)])
    item = taken(machine, sequence=6, delivered=2)
    run(
        handle(SteppedDriver(machine), item), [(FindDeadLetter(item), dead_letter("closed")), (Acknowledge(item), None)]
    )
    for sequence, status in ((7, "behind"), (8, "open")):
        item = taken(machine, sequence=sequence, delivered=2)
        found = [(FindDeadLetter(item), DeadLetterRef(sequence, 7, status, 0)), *confirmed(parked(3))]  # type: ignore[arg-type]
        run(handle(SteppedDriver(machine), item), [*found, (Acknowledge(item), None)])


@pytest.mark.parametrize("head", [None, SEQUENCE, 9])
def test_an_event_whose_key_has_gone_on_meanwhile_begins_again(head: int | None) -> None:
    machine = machine_of()
    machine.park(KEY, 3)
    item = taken(machine)
    machine.unpark(KEY)
    if head is not None:
        machine.park(KEY, head)
    run(handle(SteppedDriver(machine), item), [(ReadClock(), 4.0)])
    assert (machine.held, machine.running) == (1, 0)
    assert machine.take(4.0) is item
    assert not item.is_behind


def test_a_redrive_behind_its_key_counts_the_request_in_its_dead_letter() -> None:
    machine = machine_of()
    machine.park(KEY, 2)
    item = taken(machine, tries=Tries(source="redrive", redrives=2))
    assert item.is_behind
    script: Script = [(ReadParked(KEY), parked(3, 3)), (FindDeadLetter(item), dead_letter(redrives=1))]
    script += [(WriteDeadLetter(item, None, 3, 7), True), *confirmed(parked(3, 3)), (Acknowledge(item), None)]
    run(handle(SteppedDriver(machine), item), script)
    assert machine.parked == {KEY: 3}


@pytest.mark.parametrize(
    "found", [None, dead_letter("closed", redrives=1), dead_letter(), dead_letter(redrives=2), dead_letter(redrives=3)]
)
def test_a_redrive_behind_its_key_whose_dead_letter_has_changed_is_acknowledged(found: DeadLetterRef | None) -> None:
    machine = machine_of()
    machine.park(KEY, 2)
    item = taken(machine, tries=Tries(source="redrive", redrives=2))
    script: Script = [(ReadParked(KEY), parked(3, 3)), (FindDeadLetter(item), found), (Acknowledge(item), None)]
    run(handle(SteppedDriver(machine), item), script)


@pytest.mark.parametrize(("record", "known"), [(None, {}), (parked(5, 5), {KEY: 5})])
def test_a_redrive_whose_turn_it_is_begins_although_this_worker_had_not_heard_of_it(
    record: ParkedRecord | None, known: dict[str, int]
) -> None:
    machine = machine_of()
    machine.park(KEY, 2)
    item = taken(machine, tries=Tries(source="redrive", redrives=1))
    run(handle(SteppedDriver(machine), item), [(ReadParked(KEY), record), (ReadClock(), 4.0)])
    assert machine.parked == known
    assert machine.take(4.0) is item


# ---- parking ---------------------------------------------------------------------------------------------------------


def bury(item: WorkItem, asked: Script, error: Exception, confirming: Script | None = None) -> Script:
    written = (WriteDeadLetter(item, cause_of(error, is_transient=False), None, 0), True)
    return [(ReadClock(), 1.0), *asked, written, *(confirming or []), (Acknowledge(item), None)]


def test_a_key_that_is_parked_for_this_event_stays_so() -> None:
    machine = machine_of()
    item = taken(machine)
    error = Reject("no")
    run(conclude(machine, item, error), bury(item, [(ReadParked(KEY), parked(SEQUENCE, SEQUENCE))], error))
    assert machine.parked == {KEY: SEQUENCE}


def test_a_key_that_is_parked_for_an_earlier_event_stays_so_or_waits_for_this_one() -> None:
    machine = machine_of()
    item = taken(machine)
    error, earlier = Reject("no"), parked(3, 3)
    run(conclude(machine, item, error), bury(item, [(ReadParked(KEY), earlier)], error, confirmed(earlier)))
    assert machine.parked == {KEY: 3}
    # Somebody lets the key go on before the letter is there, and so without it.
    machine = machine_of()
    item = taken(machine)
    gone_on: Script = [*newly_parked(item), (FindDeadLetter(item), dead_letter())]
    run(conclude(machine, item, error), bury(item, [(ReadParked(KEY), earlier)], error, gone_on))
    assert machine.parked == {KEY: SEQUENCE}


def test_a_key_that_is_parked_for_a_later_event_waits_for_the_earlier_first_and_keeps_what_is_to_come() -> None:
    machine = machine_of()
    item = taken(machine)
    error = Reject("no")
    asked: Script = [
        (ReadParked(KEY), parked(9, 7, 9, 12)),
        (WriteParked(KEY, SEQUENCE, 4, (SEQUENCE, 9, 12)), False),  # somebody else has changed it
        (ReadParked(KEY), None),
        (WriteParked(KEY, SEQUENCE, 0, (SEQUENCE,)), True),
    ]
    run(conclude(machine, item, error), bury(item, asked, error))
    assert machine.parked == {KEY: SEQUENCE}


# ---- a key goes on ---------------------------------------------------------------------------------------------------

BEHIND = dead_letter("behind", sequence=9)


@pytest.mark.parametrize(
    ("script", "head"),
    [
        ([(ReadParked(KEY), None)], None),
        ([(ReadParked(KEY), parked(5, 5)), (NextDeadLetter(KEY), None), (DropParked(KEY, 4), True)], None),
        (
            [
                *[(ReadParked(KEY), parked(5, 5)), (NextDeadLetter(KEY), BEHIND)],
                *[(WriteParked(KEY, 9, 4, (5,)), True), (RequestRedrive(BEHIND), None)],
            ],
            9,
        ),
        # A retry that was overtaken is next, and comes by itself.
        (
            [
                *[(ReadParked(KEY), parked(5, 5, 8, 7)), (NextDeadLetter(KEY), BEHIND)],
                (WriteParked(KEY, 7, 4, (5, 8, 7)), True),
            ],
            7,
        ),
        (
            [
                *[(ReadParked(KEY), parked(5, 3, 5, 7)), (NextDeadLetter(KEY), None)],
                (WriteParked(KEY, 7, 4, (3, 5, 7)), True),
            ],
            7,
        ),
        # Unless a letter comes before it, or is what became of it.
        *(
            (
                [
                    *[(ReadParked(KEY), parked(5, 5, scheduled)), (NextDeadLetter(KEY), BEHIND)],
                    *[(WriteParked(KEY, 9, 4, (5, scheduled)), True), (RequestRedrive(BEHIND), None)],
                ],
                9,
            )
            for scheduled in (9, 10)
        ),
    ],
)
def test_a_key_goes_on_with_the_next_event_that_waits(script: Script, head: int | None) -> None:
    assert run(advance(KEY, SEQUENCE), script) == head


@pytest.mark.parametrize(
    "refused",
    [
        [(ReadParked(KEY), parked(5, 5)), (NextDeadLetter(KEY), None), (DropParked(KEY, 4), False)],
        [(ReadParked(KEY), parked(5, 5)), (NextDeadLetter(KEY), BEHIND), (WriteParked(KEY, 9, 4, (5,)), False)],
        [(ReadParked(KEY), parked(5, 5, 7)), (NextDeadLetter(KEY), None), (WriteParked(KEY, 7, 4, (5, 7)), False)],
        [(ReadParked(KEY), parked(4, 4, 5)), (NextDeadLetter(KEY), None), (WriteParked(KEY, 4, 4, (4,)), False)],
    ],
)
def test_a_record_that_somebody_has_changed_is_read_again(refused: Script) -> None:
    assert run(advance(KEY, SEQUENCE), [*refused, (ReadParked(KEY), None)]) is None


@pytest.mark.parametrize(
    ("following", "is_requested"),
    [
        (BEHIND, True),
        (dead_letter("open", sequence=9), False),
        (dead_letter("behind", sequence=10), False),
        (None, False),
    ],
)
@pytest.mark.parametrize("waiting", [(9,), (5, 9)])
def test_a_key_that_has_gone_on_before_a_crash_has_its_request_stored(
    following: DeadLetterRef | None, is_requested: bool, waiting: tuple[int, ...]
) -> None:
    script: Script = [(ReadParked(KEY), parked(9, *waiting)), (NextDeadLetter(KEY), following)]
    if is_requested:
        script.append((RequestRedrive(BEHIND), None))
    assert run(advance(KEY, SEQUENCE), script) == 9


def test_a_key_that_goes_back_to_a_dead_letter_waits_for_nothing_that_is_done() -> None:
    earlier = dead_letter("behind", sequence=2)
    script: Script = [(ReadParked(KEY), parked(5, 3, 5, 8)), (NextDeadLetter(KEY), earlier)]
    back: Script = [(WriteParked(KEY, 2, 4, (8,)), True), (RequestRedrive(earlier), None)]
    assert run(advance(KEY, SEQUENCE), [*script, *back]) == 2


def test_an_event_that_is_done_before_its_turn_is_not_waited_for() -> None:
    script: Script = [(ReadParked(KEY), parked(3, 3, 5, 8)), (NextDeadLetter(KEY), dead_letter(sequence=3))]
    assert run(advance(KEY, SEQUENCE), [*script, (WriteParked(KEY, 3, 4, (3, 8)), True)]) == 3
    script = [(ReadParked(KEY), parked(3, 3, 8)), (NextDeadLetter(KEY), dead_letter(sequence=3))]
    assert run(advance(KEY, SEQUENCE), script) == 3


# ---- an event that nobody delivers again -----------------------------------------------------------------------------


def test_an_event_that_nobody_delivers_again_gets_a_dead_letter() -> None:
    machine = machine_of()
    item = WorkItem(KEY, SEQUENCE, delivered=5)
    written = (WriteDeadLetter(item, CAUSE, None, 0), True)
    run(give_up_undelivered(machine, item, CAUSE), [*not_known(item), *newly_parked(item), written])
    assert machine.parked == {KEY: SEQUENCE}


def test_a_redrive_that_nobody_delivers_again_replaces_its_dead_letter() -> None:
    machine = machine_of()
    item = WorkItem(KEY, SEQUENCE, tries=Tries(source="redrive", redrives=1))
    found: Script = [(FindDeadLetter(item), dead_letter()), (FindRetry(item), False), (ReadParked(KEY), parked(5, 5))]
    run(give_up_undelivered(machine, item, CAUSE), [*found, (WriteDeadLetter(item, CAUSE, None, 7), True)])


def test_an_event_that_nobody_delivers_again_and_that_is_owned_elsewhere_gets_none() -> None:
    machine = machine_of()
    item = WorkItem(KEY, SEQUENCE, delivered=5)
    run(
        give_up_undelivered(machine, item, CAUSE),
        [(FindDeadLetter(item), dead_letter("closed")), (ReadParked(KEY), None)],
    )
    run(give_up_undelivered(machine, item, CAUSE), [(FindDeadLetter(item), dead_letter()), *confirmed(parked(3, 3))])
    item = WorkItem(KEY, SEQUENCE, tries=Tries(source="redrive", redrives=1))
    run(give_up_undelivered(machine, item, CAUSE), [(FindDeadLetter(item), None), (ReadParked(KEY), None)])


def test_an_event_that_nobody_delivers_again_is_told_of_where_there_are_no_dead_letters() -> None:
    machine = machine_of(has_dead_letters=False)
    item = WorkItem(KEY, SEQUENCE, delivered=5)
    told = (ReportDropped(item, CAUSE), None)
    run(give_up_undelivered(machine, item, CAUSE), [*not_known(item), told])
    machine.park(KEY, SEQUENCE)
    goes_on = (ReadParked(KEY), None)
    run(give_up_undelivered(machine, item, CAUSE), [*not_known(item), told, goes_on])
    assert machine.parked == {}


# ---- events in one call ----------------------------------------------------------------------------------------------


def received(machine: HandlerMachine, *items: WorkItem) -> list[WorkItem]:
    for item in items:
        assert machine.receive(item, 0.0) == "new"
        assert machine.take(0.0) is item
    return list(items)


def batch_of(machine: HandlerMachine) -> list[WorkItem]:
    return received(machine, *(WorkItem(None, sequence) for sequence in (1, 2, 3)))


def acknowledged(*items: WorkItem) -> Script:
    return [(Acknowledge(item), None) for item in items]


def test_a_batch_that_succeeds_is_one_call() -> None:
    machine = machine_of()
    driver, items = SteppedDriver(machine), batch_of(machine)
    run(handle_batch(driver, items), [(RunBatch(tuple(items)), None), *acknowledged(*items)])
    assert (machine.held, machine.running) == (0, 0)
    assert driver.ended == [(item, None, Finish()) for item in items]
    assert driver.left == items


def test_each_event_of_a_batch_that_fails_is_tried_alone_and_decides_alone() -> None:
    machine = machine_of()
    driver, items = SteppedDriver(machine), batch_of(machine)
    first, second, third = items
    error = Reject("the second")
    written = (WriteDeadLetter(second, cause_of(error, is_transient=False), None, 0), True)
    script: Script = [(RunBatch((first, second, third)), error)]
    script += [(RunBatch((first,)), None), (Acknowledge(first), None)]
    script += [(RunBatch((second,)), error), (ReadClock(), 1.0), written, (Acknowledge(second), None)]
    script += [(RunBatch((third,)), None), (Acknowledge(third), None)]
    run(handle_batch(driver, items), script)
    assert [decided for _, _, decided in driver.ended] == [Finish(), GiveUp(is_transient=False), Finish()]
    assert driver.left == items


def test_an_event_that_is_a_batch_by_itself_is_not_tried_twice() -> None:
    machine = machine_of()
    [item] = received(machine, WorkItem(None, 1))
    waits: Script = [(ReadClock(), 1.0), (WriteAttempts(item, cause_of(OSError("gone"), is_transient=True)), None)]
    run(handle_batch(SteppedDriver(machine), [item]), [(RunBatch((item,)), OSError("gone")), *waits])
    assert (machine.held, machine.running) == (1, 0)
    assert machine.take(2.0) is item
    ended: Script = [(ReadClock(), 3.0), (DropAttempts(item), None), (Acknowledge(item), None)]
    run(handle_batch(SteppedDriver(machine), [item]), [(RunBatch((item,)), None), *ended])


def test_an_event_that_had_begun_when_a_worker_died_is_a_batch_by_itself() -> None:
    machine = machine_of()
    begun, owned, unbegun = (WorkItem(None, sequence, delivered=2) for sequence in (1, 2, 3))
    new = WorkItem(None, 4)
    driver, items = SteppedDriver(machine), received(machine, begun, owned, unbegun, new)
    script: Script = [*not_known(begun), (ReadAttempts(begun), AttemptsRecord(1, None))]
    script += [(WriteAttempts(begun, None), None), (ReadClock(), 1.0), (RunBatch((begun,)), None), (ReadClock(), 2.0)]
    script += [(DropAttempts(begun), None), (Acknowledge(begun), None)]
    script += [(FindDeadLetter(owned), dead_letter("closed")), (DropAttempts(owned), None), (Acknowledge(owned), None)]
    script += [*not_known(unbegun), (ReadAttempts(unbegun), AttemptsRecord(0, None))]
    script += [(WriteAttempts(unbegun, None), None), (ReadClock(), 3.0)]
    script += [(RunBatch((unbegun, new)), None), (ReadClock(), 4.0), (DropAttempts(unbegun), None)]
    run(handle_batch(driver, items), [*script, *acknowledged(unbegun, new)])
    assert driver.left == [begun, owned, unbegun, new]


def test_a_batch_whose_events_are_all_owned_elsewhere_is_not_run() -> None:
    machine = machine_of()
    [item] = received(machine, WorkItem(None, 1, delivered=2))
    found: Script = [
        (FindDeadLetter(item), dead_letter("closed")),
        (DropAttempts(item), None),
        (Acknowledge(item), None),
    ]
    run(handle_batch(SteppedDriver(machine), [item]), found)


def test_an_event_that_lapses_while_it_is_looked_up_does_not_begin() -> None:
    machine = machine_of()
    item = taken(machine, delivered=2)
    machine.heard(item, 10.0, 10.0)
    late = 10.0 + machine.limits.ack_wait_s
    looked_up: Script = [*not_known(item), (ReadAttempts(item), None), (WriteAttempts(item, None), None)]
    driver = SteppedDriver(machine)
    run(handle(driver, item), [*looked_up, (ReadClock(), late)])
    assert driver.left == machine.lapsed == [item]
    assert (machine.held, machine.running) == (0, 0)
    assert machine.lanes.expected == [item.sequence]


def test_an_event_that_lapses_while_others_of_its_batch_are_looked_up_does_not_begin() -> None:
    machine = machine_of()
    redelivered, new = received(machine, WorkItem(None, 1, delivered=2), WorkItem(None, 2))
    machine.heard(new, 10.0, 10.0)
    late = 10.0 + machine.limits.ack_wait_s
    machine.heard(redelivered, late, 10.0)
    looked_up: Script = [*not_known(redelivered), (ReadAttempts(redelivered), AttemptsRecord(0, None))]
    looked_up += [(WriteAttempts(redelivered, None), None), (ReadClock(), late)]
    ended: Script = [(ReadClock(), late), (DropAttempts(redelivered), None), (Acknowledge(redelivered), None)]
    driver = SteppedDriver(machine, lambda: late)
    run(handle_batch(driver, [redelivered, new]), [*looked_up, (RunBatch((redelivered,)), None), *ended])
    assert driver.left == [new, redelivered]
    assert machine.lapsed == [new]


def test_the_time_of_a_handler_begins_with_each_call_of_a_batch() -> None:
    machine = machine_of()
    items = batch_of(machine)
    time = 10.0
    procedure = handle_batch(SteppedDriver(machine, lambda: time), items)
    assert procedure.send(None) == RunBatch(tuple(items))
    assert machine.on_time(39.9).timed_out == []
    time = 20.0
    assert procedure.send(OSError()) == RunBatch((items[0],))
    assert machine.on_time(49.9).timed_out == items[1:]
    assert machine.on_time(50.0).timed_out == items[:1]
    procedure.close()


# ---- a key without its record ----------------------------------------------------------------------------------------

FIRST = dead_letter("open", sequence=3)


def test_a_key_with_a_record_or_without_dead_letters_is_left_alone() -> None:
    assert run(restore(KEY), [(ReadParked(KEY), parked(3, 3))]) is False
    assert run(restore(KEY), [(ReadParked(KEY), None), (NextDeadLetter(KEY), None)]) is False
    written = (WriteParked(KEY, 3, 0, (3,)), False)  # by another at the same moment
    assert run(restore(KEY), [(ReadParked(KEY), None), (NextDeadLetter(KEY), FIRST), written]) is False


@pytest.mark.parametrize("status", ["open", "behind"])
def test_a_key_without_its_record_is_parked_for_its_first_dead_letter(status: DeadLetterStatus) -> None:
    first = dead_letter(status, sequence=3)
    script: Script = [(ReadParked(KEY), None), (NextDeadLetter(KEY), first), (WriteParked(KEY, 3, 0, (3,)), True)]
    script += [(NextDeadLetter(KEY), first), *([(RequestRedrive(first), None)] if status == "behind" else [])]
    assert run(restore(KEY), script) is True


@pytest.mark.parametrize("following", [None, dead_letter("behind", sequence=9)])
def test_a_key_whose_first_dead_letter_is_closed_in_the_meantime_is_advanced(following: DeadLetterRef | None) -> None:
    script: Script = [(ReadParked(KEY), None), (NextDeadLetter(KEY), FIRST), (WriteParked(KEY, 3, 0, (3,)), True)]
    script += [(NextDeadLetter(KEY), following), (ReadParked(KEY), None)]
    assert run(restore(KEY), script) is True
