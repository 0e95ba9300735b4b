"""What becomes of an event, step by step: procedures that a driver runs against the server, and a simulator in memory.

Each is a generator of steps. Every step can be repeated without harm, and a crash between any two of them leaves the
event with exactly one owner, which brings it back:

===========================  ===========================================================================================
a failed event that waits    key parked -> schedule stored -> **acknowledged**. Before the schedule the stream owns the
for long                     event, after it the retry stream; a redelivery finds the schedule and is acknowledged.
a failed event that is       key parked -> letter stored -> **acknowledged**. Before the letter the stream (or the retry
given up                     stream) owns it, after it the letter; a redelivery finds the letter and is acknowledged.
an event of a parked key     letter stored -> the key's record written again, so that who lets it go on sees the letter;
                             or the key went on before: the letter is requested -> **acknowledged**.
a parked key whose event     letter closed -> the next letter of the key is made its head -> a request to handle it is
has succeeded                stored -> **acknowledged**. A redelivery finds the letter closed, and does the rest.
===========================  ===========================================================================================

A key is parked *before* anything else, so that no later event of it can begin while the failed one has no owner but the
server's redelivery. It is un-parked when no letter of it is left.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from jetspark.app.handlers.crash_records import ReaderDied
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.machine import FINISH, HandlerMachine
from jetspark.app.handlers.retry import Bury, Decided, WaitHere, WaitLong
from jetspark.app.stored_events import FailureCause, LetterRef
from jetspark.core.step_runner import ReadClock

__all__ = [
    "Acknowledge",
    "AttemptsRecord",
    "CloseLetter",
    "DropApart",
    "DropAttempts",
    "DropParked",
    "EndTransaction",
    "FindLetter",
    "FindRetry",
    "NextLetter",
    "ParkedRecord",
    "PauseHandler",
    "ReadAttempts",
    "ReadParked",
    "RequestRedrive",
    "RunHandler",
    "SettlingSteps",
    "WriteAttempts",
    "WriteLetter",
    "WriteParked",
    "WriteSchedule",
    "advance",
    "bury_lost",
    "conclude",
    "handle",
    "is_plain",
    "needs_preparing",
    "prepare",
    "restore",
]

R = TypeVar("R")
SettlingSteps: TypeAlias = Generator[Any, Any, R]


@dataclass(frozen=True, slots=True)
class ParkedRecord:
    """A key that cannot go on: the event it waits for, and the record's revision."""

    head: int
    revision: int
    waiting: tuple[int, ...]
    """Events it was parked for, which wait for a retry and may have no letter: those before the head are done, those
    behind it were overtaken by the redelivery of an earlier event that failed as well."""


@dataclass(frozen=True, slots=True)
class AttemptsRecord:
    """How often an event was started before, and how the last attempt ended, if that is known."""

    attempts: int
    cause: FailureCause | None


# ---- steps: what they answer is in brackets -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunHandler:
    """Run the handler's own code. [the exception it ended with, or None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class FindLetter:
    """Look for the letter of an event. [LetterRef or None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class WriteLetter:
    """Store a letter if ``revision`` is the last of its subject, 0 for none. [whether it was]"""

    item: WorkItem
    cause: FailureCause | None
    behind: int | None
    revision: int


@dataclass(frozen=True, slots=True)
class CloseLetter:
    """Replace the letter by a mark that it is done, if ``revision`` is its last. [whether it was]"""

    item: WorkItem
    revision: int


@dataclass(frozen=True, slots=True)
class FindRetry:
    """Whether the retry stream has the event, of the same redrive and with more attempts than it came with. [bool]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class WriteSchedule:
    """Store the event with its attempts, due after this time; replaces a schedule that is there. [None]"""

    item: WorkItem
    seconds: float
    cause: FailureCause | None = field(default=None, compare=False)
    """Why it failed, for those who list what is scheduled."""


@dataclass(frozen=True, slots=True)
class NextLetter:
    """The letter of a key with the lowest sequence that is not closed. [LetterRef or None]"""

    key: str


@dataclass(frozen=True, slots=True)
class RequestRedrive:
    """Store the request to handle a letter again, unless that very request was stored before. [None]"""

    letter: LetterRef


@dataclass(frozen=True, slots=True)
class ReadParked:
    """[ParkedRecord or None]"""

    key: str


@dataclass(frozen=True, slots=True)
class WriteParked:
    """Note that the key waits for ``head``, if ``revision`` is the record's last, 0 for none. [whether it was]"""

    key: str
    head: int
    revision: int
    waiting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropParked:
    """Remove the record, if ``revision`` is its last. [whether it was]"""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ReadAttempts:
    """[AttemptsRecord or None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class WriteAttempts:
    """Note the item's attempts, and how the last one ended. [None]"""

    item: WorkItem
    cause: FailureCause | None


@dataclass(frozen=True, slots=True)
class DropAttempts:
    """[None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the server that the message is settled. [whether the server has said that it knows, if ``surely``]"""

    item: WorkItem
    surely: bool = False


@dataclass(frozen=True, slots=True)
class DropApart:
    """Remove what was kept apart of an event that is done. [None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class TellDropped:
    """Log, and tell observers, that an event is given up and has no letter, because its handler has none. [None]"""

    item: WorkItem
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """Keep the transactions of earlier attempts from committing. [whether one has, and all that follows is published]

    An attempt may have failed because the answer to its commit did not come in time.
    """

    item: WorkItem


@dataclass(frozen=True, slots=True)
class PauseHandler:
    """The breaker has opened: pause the handler's consumers, of events and of retries, for every worker. [None]"""


# ---- procedures -----------------------------------------------------------------------------------------------------


def handle(machine: HandlerMachine, item: WorkItem, *, has_dead_letters: bool = True) -> SettlingSteps[None]:
    """Everything that becomes of an item that was taken, up to its acknowledgement or its wait in the lane."""
    if needs_preparing(item) and not (yield from prepare(machine, item, has_dead_letters=has_dead_letters)):
        return
    error = yield RunHandler(item)
    yield from conclude(machine, item, error, has_dead_letters=has_dead_letters)


def needs_preparing(item: WorkItem) -> bool:
    """Whether something has to be looked up before the item may run; false for most, which drivers run at once."""
    return item.is_behind or (not item.is_checked and (item.delivered > 1 or item.redrives > 0))


def prepare(machine: HandlerMachine, item: WorkItem, *, has_dead_letters: bool = True) -> SettlingSteps[bool]:
    """What comes before the handler's own code; returns whether that is to be run.

    If not, the item is settled, waits in its lane to be taken again, or has lapsed.
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
            yield from _go_on(machine, item, found)
        yield from _end(machine, item)
        return False
    item.is_checked = True
    found = yield from _look_up(item)
    if found != "run":
        machine.dismiss(item)
        yield from _go_on(machine, item, found)
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
            if (yield from _is_done_after_all(machine, item)):
                yield from _succeed(machine, item)
            elif has_dead_letters:
                yield from _bury(machine, item, cause)
            else:
                yield TellDropped(item, cause)
                yield from _succeed(machine, item)
            return False
        yield WriteAttempts(item, cause)
    now = yield ReadClock()
    if machine.has_lapsed(item, now):  # these steps waited for a connection; another worker may run the event by now
        machine.dismiss(item)
        machine.lapse(item)
        return False
    machine.restart_clock(item, now)
    return True


def conclude(
    machine: HandlerMachine, item: WorkItem, error: BaseException | None, *, has_dead_letters: bool = True
) -> SettlingSteps[Decided]:
    """What comes after the handler's own code has ended, with ``error`` or well; returns what was decided."""
    now = yield ReadClock()
    was_open = machine.is_open
    decided = machine.finish(item, error, now)
    if machine.is_open and not was_open:
        yield PauseHandler()
    if isinstance(decided, Bury) and (yield from _is_done_after_all(machine, item)):
        decided = FINISH
    if isinstance(decided, WaitHere):
        yield WriteAttempts(item, FailureCause.of(error, is_transient=True))
        machine.wait_here(item, decided.seconds, now)
    elif isinstance(decided, WaitLong):
        yield from _park(machine, item)
        yield WriteSchedule(item, decided.seconds, FailureCause.of(error, is_transient=True))
        yield from _end(machine, item)
    elif isinstance(decided, Bury) and has_dead_letters:
        yield from _bury(machine, item, FailureCause.of(error, is_transient=decided.is_transient))
    else:
        yield from _succeed(machine, item)
    return decided


def _head_before(machine: HandlerMachine, item: WorkItem) -> SettlingSteps[int | None]:
    """The event before the item that its key waits for; None if somebody has let the key go on since it was taken."""
    assert item.key is not None
    if item.redrives:
        # Who has asked for it has written before that the key waits for it, and this worker may not have heard of it.
        parked = yield ReadParked(item.key)
        if parked is None:
            machine.unpark(item.key)
        else:
            machine.park(item.key, parked.head)
    head = machine.parked.get(item.key)
    return head if head is not None and head < item.sequence else None


def _put_behind(machine: HandlerMachine, item: WorkItem, head: int) -> SettlingSteps[None]:
    assert item.key is not None
    revision = 0
    if item.redrives:
        letter = yield FindLetter(item)
        if letter is None or letter.status == "closed" or letter.redrives != item.redrives - 1:
            return
        # The request for it is used up: the letter must count it, so that the next one is another.
        revision = letter.revision
    yield WriteLetter(item, None, head, revision)
    yield from _confirm(machine, item, item.key)


def _confirm(machine: HandlerMachine, item: WorkItem, key: str) -> SettlingSteps[None]:
    """The item's letter is stored: see to it that its key waits, for an event before it or for the item itself.

    A worker or an operator may let the key go on at the same moment, and may have looked for its letters before this
    one was there. So the record is written again, even if nothing in it changes: that other change then names an older
    revision, is refused, and looks for letters again.
    """
    while True:
        parked = yield ReadParked(key)
        if parked is not None and parked.head <= item.sequence:
            head, revision, waiting = parked.head, parked.revision, parked.waiting
        else:
            head, (revision, waiting) = item.sequence, _waiting_for(item.sequence, parked)
        if (yield WriteParked(key, head, revision, waiting)):
            break
    machine.park(key, head)
    if head != item.sequence:
        return
    letter = yield FindLetter(item)
    if letter is None or letter.status == "closed":
        yield from _advance(machine, item, key)
    elif letter.status == "behind":
        yield RequestRedrive(letter)


def _look_up(item: WorkItem) -> SettlingSteps[Literal["run", "elsewhere", "buried", "finished"]]:
    """Who owns an event that was delivered before."""
    letter = yield FindLetter(item)
    if item.redrives:
        if letter is None or letter.status == "closed":
            return "finished"
        if letter.redrives != item.redrives - 1 or (yield FindRetry(item)):
            return "elsewhere"
        item.letter = letter
        return "run"
    if letter is not None:
        return "elsewhere" if letter.status == "closed" else "buried"
    if (yield FindRetry(item)):
        return "elsewhere"
    parked = (yield ReadParked(item.key)) if item.key is not None else None
    if parked is not None and item.sequence in parked.waiting and item.sequence < parked.head:
        return "finished"
    return "run"


def _go_on(machine: HandlerMachine, item: WorkItem, found: str) -> SettlingSteps[None]:
    """Who has settled an event before may not have lived to do the rest for its key."""
    if item.key is not None and found == "finished":
        yield from _advance(machine, item, item.key)
    elif item.key is not None and found == "buried":
        yield from _confirm(machine, item, item.key)
    elif item.key is not None and found == "elsewhere" and not (item.redrives or item.is_behind):
        # The worker that scheduled its retry parked its key first, and this one may not have received that record yet.
        parked = yield ReadParked(item.key)
        if parked is not None:
            machine.park(item.key, parked.head)


def _count_attempts(item: WorkItem) -> SettlingSteps[FailureCause | None]:
    """Add the attempts of those who had the event before; returns how the last one ended, if that is known."""
    record = yield ReadAttempts(item)
    if isinstance(record, AttemptsRecord):
        item.attempts = max(item.attempts, record.attempts + 1)
        return record.cause
    item.attempts += 1  # it may have begun when it was delivered before, and nobody lived to tell
    return None


def _is_done_after_all(machine: HandlerMachine, item: WorkItem) -> SettlingSteps[bool]:
    """Whether an event that is about to be given up has its effects; if not, it gets none from here on."""
    return machine.limits.has_transactions and bool((yield EndTransaction(item)))


def _succeed(machine: HandlerMachine, item: WorkItem) -> SettlingSteps[None]:
    yield from _let_go_on(machine, item)
    # A retry that came again would need what is apart. Where there is a letter, closing it has removed that.
    is_apart = not item.redrives and item.original is not None and item.original.apart is not None
    if (yield from _end(machine, item, surely=is_apart)) and is_apart:
        yield DropApart(item)


def _let_go_on(machine: HandlerMachine, item: WorkItem) -> SettlingSteps[None]:
    """Close the letter of an event that is done, and have its key go on."""
    if item.redrives and (item.letter is None or not (yield CloseLetter(item, item.letter.revision))):
        letter = yield FindLetter(item)
        if letter is not None and letter.status != "closed":
            yield CloseLetter(item, letter.revision)
    # What comes from the retry stream was parked by somebody, of whom this worker may not have heard yet.
    if item.key is not None and (item.key in machine.parked or item.source != "stream"):
        yield from _advance(machine, item, item.key)


def _bury(machine: HandlerMachine, item: WorkItem, cause: FailureCause) -> SettlingSteps[None]:
    yield from _park(machine, item)
    revision = 0
    if item.redrives:
        letter = yield FindLetter(item)
        revision = letter.revision if letter is not None else 0
    yield from _store_letter(machine, item, cause, revision)
    yield from _end(machine, item)


def _store_letter(machine: HandlerMachine, item: WorkItem, cause: FailureCause, revision: int) -> SettlingSteps[None]:
    # Refused: it is there already, written before a crash.
    yield WriteLetter(item, cause, None, revision)
    if item.key is not None and machine.parked.get(item.key) != item.sequence:
        yield from _confirm(machine, item, item.key)


def _end(machine: HandlerMachine, item: WorkItem, *, surely: bool = False) -> SettlingSteps[bool]:
    """Acknowledge it; returns whether the server has said that it knows, if it was to be asked."""
    if item.attempts > 1 or (item.delivered > 1 and not item.is_behind):
        yield DropAttempts(item)
    is_known = yield Acknowledge(item, surely)
    machine.settled(item)
    return bool(is_known)


def _park(machine: HandlerMachine, item: WorkItem) -> SettlingSteps[None]:
    key = item.key
    if key is None:
        return
    while True:
        parked = yield ReadParked(key)
        if parked is not None and parked.head <= item.sequence:
            machine.park(key, parked.head)
            return
        revision, waiting = _waiting_for(item.sequence, parked)
        if (yield WriteParked(key, item.sequence, revision, waiting)):
            machine.park(key, item.sequence)
            return


def _waiting_for(sequence: int, parked: ParkedRecord | None) -> tuple[int, tuple[int, ...]]:
    """The revision to replace, and the events that wait, once a key waits for ``sequence`` first."""
    if parked is None:
        return 0, (sequence,)
    # An earlier event has failed as well, or has a letter: the one that the key waits for is next, after this one.
    return parked.revision, (sequence, *(each for each in parked.waiting if each >= parked.head))


def _advance(machine: HandlerMachine, item: WorkItem, key: str) -> SettlingSteps[None]:
    head: int | None = yield from advance(key, item.sequence)
    if head is None:
        machine.unpark(key)
    else:
        machine.park(key, head)


def bury_lost(
    machine: HandlerMachine, item: WorkItem, cause: FailureCause, *, has_dead_letters: bool = True
) -> SettlingSteps[None]:
    """Write a letter for an event that nobody will deliver again, unless it is done, or somewhere else."""
    found = yield from _look_up(item)
    yield from _go_on(machine, item, found)
    if found != "run":
        return
    if (yield from _is_done_after_all(machine, item)):
        yield from _let_go_on(machine, item)
    elif has_dead_letters:
        yield from _park(machine, item)
        yield from _store_letter(machine, item, cause, item.letter.revision if item.letter is not None else 0)
    else:
        yield TellDropped(item, cause)
        yield from _let_go_on(machine, item)


def advance(key: str, sequence: int) -> SettlingSteps[int | None]:
    """Let a parked key go on whose event ``sequence`` is done; returns the event it waits for now, None for none."""
    while True:
        parked = yield ReadParked(key)
        if parked is None:
            return None
        letter = yield NextLetter(key)
        if parked.head != sequence:
            if sequence in parked.waiting and sequence > parked.head:
                # It is done before its turn: somebody has discarded its letter.
                rest = tuple(each for each in parked.waiting if each != sequence)
                if not (yield WriteParked(key, parked.head, parked.revision, rest)):
                    continue
            # Moved on before a crash. The request may not have been stored.
            if letter is not None and letter.sequence == parked.head and letter.status == "behind":
                yield RequestRedrive(letter)
            return int(parked.head)
        scheduled = min((each for each in parked.waiting if each > sequence), default=None)
        if scheduled is not None and (letter is None or scheduled < letter.sequence):
            # Its retry comes by itself.
            if (yield WriteParked(key, scheduled, parked.revision, parked.waiting)):
                return int(scheduled)
        elif letter is None:
            if (yield DropParked(key, parked.revision)):
                return None
        else:
            waiting = parked.waiting
            if letter.sequence < sequence:
                # A worker that died has left it behind. What is named behind a head is waited for, and these are done.
                waiting = tuple(each for each in waiting if each > sequence)
            if (yield WriteParked(key, letter.sequence, parked.revision, waiting)):
                yield RequestRedrive(letter)
                return int(letter.sequence)


def restore(key: str) -> SettlingSteps[bool]:
    """Have a key wait for the first of its letters if no record says that it waits; returns whether there was none.

    Somebody has purged or deleted the records. Without one, nobody asks for the letters behind the first.
    """
    if (yield ReadParked(key)) is not None:
        return False
    first = yield NextLetter(key)
    if first is None or not (yield WriteParked(key, first.sequence, 0, (first.sequence,))):
        return False
    # A worker may have closed it meanwhile, or written one before it.
    letter = yield NextLetter(key)
    if letter is None or letter.sequence != first.sequence:
        yield from advance(key, first.sequence)
    elif letter.status == "behind":
        yield RequestRedrive(letter)
    return True


def is_plain(machine: HandlerMachine, item: WorkItem) -> bool:
    """Whether success has no consequence but the acknowledgement: the common case, which drivers do without steps."""
    return (
        not item.is_behind
        and item.delivered == 1
        and item.attempts == 1
        and not item.redrives
        and (not machine.parked or item.key not in machine.parked)
    )
