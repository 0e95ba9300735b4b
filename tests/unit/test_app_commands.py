"""Commands without a server: every step is done on a log in memory, in any order, with answers that get lost."""

from __future__ import annotations

import datetime
import itertools
import random
import time
from typing import Any
from unittest import mock

import msgspec
import pytest
from support.accounts import (
    AccountOpened,
    Deposit,
    Deposited,
    Enter,
    EnterBlindly,
    Entered,
    EnterFive,
    OpenAccount,
    Transfer,
    bank,
    bank_with_balances,
    ledger_model,
)
from support.command_log import Log, Worker
from support.linear import REFUSED, Entry, NotLinearizable, Operation, check_linearizable
from support.seeds import fresh, given

from jetspark.app import App, Command, CommandReply, Decision, Event, Past, PastEvent, Refused
from jetspark.app.commands import wire
from jetspark.app.commands.boundaries import (
    KEPT_EVENTS,
    BoundaryCache,
    BoundaryPast,
    SnapshotState,
    encode_state,
    merged_past,
    outcome_of,
    recorded_reply,
)
from jetspark.app.commands.command_spec import CommandSpec
from jetspark.app.commands.decider import (
    TRUST_S,
    Append,
    Appended,
    AppendMoved,
    AppendUnknown,
    CommandSteps,
    ReadStreamEnd,
)
from jetspark.app.commands.decision_messages import Guard, NotGuardable, guards_stream, plan_guards
from jetspark.core.headers import encode as encode_headers
from jetspark.core.subjects import is_subset, matches
from jetspark.errors import BoundaryConflict, CommandFailed, CommandInDoubt, ConfigError, WrongVersion


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def worker(log: Log) -> Worker:
    return Worker(bank(), log)


def test_a_command_stores_its_events_with_itself_as_their_cause(worker: Worker, log: Log) -> None:
    reply = worker.call(OpenAccount(account="a", cents=5), "open-a")
    assert reply == CommandReply(command_id="open-a", sequence=1, events=1)
    [entry] = [worker.deciding.read(message) for message in log.messages]
    assert (entry.event, entry.cause, entry.command) == (AccountOpened(account="a", cents=5), "open-a", "accounts.open")


def test_a_retry_gets_the_recorded_reply_from_any_worker(worker: Worker, log: Log) -> None:
    for account in "ab":
        worker.call(OpenAccount(account=account, cents=10), f"open-{account}")
    first = worker.call(Transfer(source="a", target="b", cents=4), "t-1")
    assert (first.sequence, first.events, first.data) == (4, 2, {"left": 6})
    worker.call(Transfer(source="b", target="a", cents=1), "t-2")
    for other in (worker, Worker(worker.app, log)):
        again = other.call(Transfer(source="a", target="b", cents=4), "t-1")
        assert (again, again.is_repeated) == (first, True)
    assert len(log.messages) == 6


def test_what_is_remembered_is_not_read_again(worker: Worker, log: Log) -> None:
    for number in range(1, 5):
        assert worker.call(Enter(ledger="x", writer="w"), f"e-{number}").data == number
    assert log.reads == 1


def test_a_refusal_is_said_only_when_the_leader_has_nothing_newer(log: Log) -> None:
    app = bank()
    one, other = Worker(app, log), Worker(app, log)
    with pytest.raises(Refused, match="no such account"):
        one.call(Transfer(source="a", target="b", cents=1), "t-1")
    for account in "ab":
        other.call(OpenAccount(account=account, cents=10), f"open-{account}")
    # This worker remembers that there is no account, and nothing was refused meanwhile: a retry is decided anew.
    assert one.call(Transfer(source="a", target="b", cents=1), "t-1").data == {"left": 9}


def test_expected_version_is_the_newest_sequence_the_caller_knows(worker: Worker) -> None:
    opened = worker.call(OpenAccount(account="a", cents=5), "open-a", 0)
    worker.call(Enter(ledger="x", writer="w"), "e-1", opened.sequence)
    second = worker.call(Enter(ledger="x", writer="w"), "e-2", 2)
    with pytest.raises(WrongVersion) as caught:
        worker.call(Enter(ledger="x", writer="w"), "e-3", 2)
    assert (caught.value.boundary, caught.value.expected, caught.value.found) == (("ledgers.x.>",), 2, 3)
    assert worker.call(Enter(ledger="x", writer="w"), "e-2", 2) == second  # it was decided, and is told so


def test_a_boundary_that_always_moves_is_a_conflict_that_names_it(worker: Worker, log: Log) -> None:
    disturber, store = Worker(worker.app, log), log.append
    disturbed: list[Append] = []

    def append(step: Append) -> Appended | AppendMoved:
        log.append = store  # type: ignore[method-assign]
        disturber.call(Enter(ledger="x", writer="d"), f"d-{len(disturbed)}")
        disturbed.append(step)
        log.append = append  # type: ignore[method-assign]
        return store(step)

    log.append = append  # type: ignore[method-assign]
    with pytest.raises(BoundaryConflict) as caught:
        worker.call(Enter(ledger="x", writer="w"), "e-1")
    assert (caught.value.boundary, caught.value.tries, len(disturbed)) == (("ledgers.x.>",), 20, 20)


def test_events_that_a_limit_has_removed_are_not_decided_on(worker: Worker, log: Log) -> None:
    for number in (1, 2, 3):
        worker.call(Enter(ledger="x", writer="w"), f"e-{number}")
    del log.messages[1:]  # a purge: what is remembered is longer than what there is
    log.store("accounts.z", b"{}")
    assert worker.call(Enter(ledger="x", writer="w"), "e-4").data == 2


def test_an_id_that_was_used_for_another_command_is_refused_by_name(worker: Worker) -> None:
    worker.call(OpenAccount(account="a", cents=5), "same")
    worker.call(OpenAccount(account="b", cents=5), "open-b")
    with pytest.raises(CommandFailed, match=r"command_id='same' was used for command 'accounts.open'"):
        worker.call(Transfer(source="a", target="b", cents=1), "same")


def test_an_event_inside_the_boundary_that_nobody_knows_stops_the_command(worker: Worker, log: Log) -> None:
    log.store("ledgers.x.other", b'{"specversion":"1.0","id":"1","source":"/x","type":"other","data":{}}')
    with pytest.raises(CommandFailed, match=r"an event inside 'ledgers.x.>' cannot be read.*other"):
        worker.call(Enter(ledger="x", writer="w"), "e-1")


def test_an_expected_version_is_compared_with_what_there_is_and_not_with_what_was(worker: Worker, log: Log) -> None:
    worker.call(Enter(ledger="x", writer="w"), "e-1")
    log.messages.clear()  # a purge
    log.first = 2
    assert worker.call(Enter(ledger="x", writer="w"), "e-2", 0).data == 1


# ---- another stream of the same name ---------------------------------------------------------------------------------


def make_again(log: Log, worker: Worker, entries: int) -> None:
    """Delete the stream, make it again, and have another worker enter some in the ledger."""
    log.messages.clear()
    log.created += datetime.timedelta(hours=1)
    other = Worker(worker.app, log)
    for number in range(entries):
        other.call(Enter(ledger="x", writer="other"), f"other-{number}")


@pytest.mark.parametrize("how", ["told", "after a while"])
@pytest.mark.parametrize("entries", range(6))
def test_a_stream_that_was_made_again_is_another_one(worker: Worker, log: Log, how: str, entries: int) -> None:
    """Its boundary may end at any sequence, the one that is remembered too: no guard could tell."""
    for number in range(3):
        worker.call(Enter(ledger="x", writer="w"), f"e-{number}")
    make_again(log, worker, entries)
    if how == "told":
        worker.deciding.doubt()
    else:
        log.now += datetime.timedelta(seconds=TRUST_S + 1)
    again = worker.call(Enter(ledger="x", writer="w"), "e-1")
    assert (again.data, again.is_repeated, again.sequence) == (entries + 1, False, entries + 1)


@pytest.mark.parametrize("entries", range(8))
def test_a_refusal_is_of_the_stream_that_there_is(worker: Worker, log: Log, entries: int) -> None:
    """Nobody has told the worker, and it looks at the last event of the boundary only."""
    worker.app.command("ledgers.limited")(EnterFive)
    for number in range(5):
        worker.call(EnterFive(ledger="x", writer="w"), f"e-{number}")
    make_again(log, worker, min(entries, 5))
    if entries >= 5:
        with pytest.raises(Refused):
            worker.call(EnterFive(ledger="x", writer="w"), "e-9")
    else:
        assert worker.call(EnterFive(ledger="x", writer="w"), "e-9").data == entries + 1


def test_a_command_that_is_being_decided_begins_anew_when_the_stream_is_another_one(worker: Worker, log: Log) -> None:
    worker.call(Enter(ledger="x", writer="w"), "e-1")
    steps = worker.steps(Enter(ledger="x", writer="w"), "e-2")
    append = steps.send(None)
    assert isinstance(append, Append)
    make_again(log, worker, 1)
    worker.deciding.see(log.perform(ReadStreamEnd()))
    assert worker.finish(steps, AppendMoved(is_conflict=False)).data == 2  # the old one had no leader
    assert worker.call(Enter(ledger="x", writer="w"), "e-3").data == 3


def test_a_stream_that_has_replicas_by_now_is_guarded_as_one(worker: Worker, log: Log) -> None:
    worker.call(Enter(ledger="x", writer="w"), "e-1")
    log.replicas = 3
    worker.deciding.doubt()
    steps, answer = worker.steps(Enter(ledger="x", writer="w"), "e-2"), None
    while not isinstance(step := steps.send(answer), Append):
        answer = log.perform(step)
    assert (step.last_sequence, step.messages[0].guard) == (1, None)


def test_the_stream_is_not_looked_at_for_every_command(worker: Worker, log: Log) -> None:
    log.looks = 0
    for number in range(20):
        worker.call(Enter(ledger="x", writer="w"), f"e-{number}")
        log.now += datetime.timedelta(seconds=1)
    assert log.looks == 1


# ---- in any order ----------------------------------------------------------------------------------------------------


class Caller:
    """Calls a command until it is answered, each time at some worker."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.steps: CommandSteps[CommandReply] | None = None
        self.answer: Any = None
        self.attempts = 0
        self.wants = 1
        """How many answers it wants: one that has one may ask again."""


def explore(seed: int, kind: type[EnterFive], *, forgets_guards: bool = False, replicas: int = 1) -> None:
    """Some callers and workers, one step of somebody after the other, answers lost and late, workers killed."""
    rng = random.Random(seed)
    app = bank()
    app.command("ledgers.limited")(kind)
    log = Log(forgets_guards=forgets_guards)
    workers = [Worker(app, log, replicas=replicas, cache=rng.choice((0, 3, 100)), rng=rng) for _ in range(3)]
    operations = [Operation(f"c-{n}", kind(ledger="x", writer=f"c-{n}"), n / 10) for n in range(8)]
    callers = [Caller(operation) for operation in operations]
    for caller in callers:
        caller.wants = rng.choice((1, 1, 2))
    for now in range(4000):
        if log.late and rng.random() < 0.1:
            log.append(log.late.pop(rng.randrange(len(log.late))))
        waiting = [each for each in callers if len(each.operation.replies) < each.wants and each.attempts < 30]
        if not waiting:
            break
        caller = rng.choice(waiting[: rng.randint(1, 8)])
        advance(caller, workers, log, rng, float(now))
        if rng.random() < 0.02:  # a worker is killed: what it was deciding is never answered
            place = rng.randrange(len(workers))
            workers[place] = Worker(app, log, replicas=replicas, rng=rng)
            for each in callers:
                if rng.random() < 0.4:
                    each.steps = None
    entries = [
        Entry(entry.cause or "", entry.event.number)
        for entry in map(workers[0].deciding.read, log.messages)
        if matches("ledgers.x.>", entry.subject)
    ]
    check_linearizable(operations, entries, ledger_model(5), 0)


def advance(caller: Caller, workers: list[Worker], log: Log, rng: random.Random, now: float) -> None:
    """One step of one command."""
    operation = caller.operation
    if caller.steps is None:
        caller.attempts += 1
        caller.steps, caller.answer = rng.choice(workers).steps(operation.command, operation.id), None
        if caller.attempts == 1:
            operation.invoked = now
    try:
        step = caller.steps.send(caller.answer)
        if isinstance(step, Append) and rng.random() < 0.2:
            if rng.random() < 0.5:
                log.append(step)
            else:
                log.late.append(step)
            caller.answer = AppendUnknown()
        else:
            caller.answer = log.perform(step)
        return
    except StopIteration as finished:
        answer = finished.value.data
    except Refused:
        answer = REFUSED
    except (BoundaryConflict, CommandInDoubt):
        caller.steps = None
        return
    caller.steps = None
    if rng.random() < 0.8:  # else the reply is lost
        operation.replies.append(answer)
        operation.returned = min(operation.returned, now)
        if answer == REFUSED:  # the end of it: called again, it would be another decision
            caller.wants = len(operation.replies)


@pytest.mark.parametrize("replicas", [1, 3], ids=["guarded boundary", "guarded stream"])
@pytest.mark.parametrize("seed", [*(range(40) if given() is None else given() or ()), *fresh(10)])
def test_commands_on_one_boundary_are_linearizable_whatever_is_lost(seed: int, replicas: int) -> None:
    explore(seed, EnterFive, replicas=replicas)


@pytest.mark.parametrize(
    ("kind", "forgets_guards"), [(EnterBlindly, False), (EnterFive, True)], ids=["broken decide", "no guards"]
)
def test_the_checker_finds_what_is_broken(kind: type[EnterFive], forgets_guards: bool) -> None:
    def explore_many() -> None:
        for seed in range(100):
            explore(seed, kind, forgets_guards=forgets_guards)

    with pytest.raises(NotLinearizable):
        explore_many()


# ---- guards ----------------------------------------------------------------------------------------------------------


def test_each_boundary_is_checked_with_one_event_no_later_than_the_first_inside_it() -> None:
    assert plan_guards(["a"], [Guard("a", 3)], whole_stream=False) == [Guard("a", 3)]
    guards = [Guard("a.>", 1), Guard("b", 2), Guard("elsewhere", 9)]
    assert plan_guards(["x", "b", "a.1", "b"], guards, whole_stream=False) == [
        Guard("b", 2),
        Guard("a.>", 1),
        Guard("elsewhere", 9),
        None,
    ]
    # Nothing falls under it, so that any event can carry it.
    assert plan_guards(["a", "a"], [Guard("b", 2), Guard("a", 3)], whole_stream=False) == [Guard("a", 3), Guard("b", 2)]


@pytest.mark.parametrize(
    ("subjects", "filters", "reason"),
    [
        (["c"], ["a", "b"], "none of its events .'c'. is inside what it reads .'a', 'b'."),
        (["a"], ["a", "b"], "reads 2 boundaries .'a', 'b'. and stores 1 events"),
        (["a.x.1", "a.x.1"], ["a.*.1", "a.x.*"], "'a.x..' has to be checked with event 1 at the latest"),
    ],
)
def test_what_the_server_cannot_check_is_refused_with_a_remedy(
    subjects: list[str], filters: list[str], reason: str
) -> None:
    guards = [Guard(filter, 0) for filter in filters]
    with pytest.raises(NotGuardable, match=reason):
        plan_guards(subjects, guards, whole_stream=False)


def test_the_whole_stream_guards_any_number_of_boundaries() -> None:
    guards = [Guard("a", 0), Guard("b", 0)]
    assert plan_guards(["a"], guards, whole_stream=True) == [None]
    with pytest.raises(NotGuardable, match="none of its events"):
        plan_guards(["c"], guards, whole_stream=True)


def test_a_replicated_stream_is_guarded_as_a_whole_where_wildcards_would_be_compared_by_name() -> None:
    assert not guards_stream("auto", ["orders.o-1.>"], 1)
    assert not guards_stream("auto", ["orders.o-1"], 3)
    assert guards_stream("auto", ["orders.o-1", "orders.*.paid"], 3)
    assert guards_stream("auto", ["orders.>"], 2)
    assert not guards_stream("boundary", ["orders.*"], 3)
    assert guards_stream("stream", ["orders"], 1)


# ---- snapshots -------------------------------------------------------------------------------------------------------


def test_a_long_past_is_a_state_of_a_projection_and_what_came_after_it(log: Log) -> None:
    app = bank_with_balances()
    assert Worker(app, log).call(Deposit(account="a", cents=1), "d-1").data == 1
    # Says something else than the events before it: they are not looked at.
    log.snapshots["a"] = SnapshotState(encode_state(100), 1)
    assert Worker(app, log).call(Deposit(account="a", cents=1), "d-2").data == 101
    worker = Worker(app, log)
    for number in (3, 4):
        assert worker.call(Deposit(account="a", cents=1), f"d-{number}").data == 99 + number
    # Where the snapshot is as new as the boundary nothing follows, and the guard still knows where it ends.
    log.snapshots["a"] = SnapshotState(encode_state(200), 4)
    assert Worker(app, log).call(Deposit(account="a", cents=1), "d-5").data == 201


# ---- declaring -------------------------------------------------------------------------------------------------------


def test_a_hot_boundary_with_a_snapshot_costs_the_same_from_its_first_command_to_its_last(log: Log) -> None:
    """Neither does the state get folded from the start again, nor is all of it kept; and retries are known."""
    app, folded = bank_with_balances(remember_s=600.0), 0
    worker, spec = Worker(app, log, cache=100_000), app.projections["balances"]
    fold = spec.fold

    def counted(*arguments: Any) -> bytes | None:
        nonlocal folded
        folded += 1
        return fold(*arguments)

    with mock.patch.object(type(spec), "fold", lambda self, *arguments: counted(*arguments)):
        for number in range(1, 3001):
            log.now += datetime.timedelta(seconds=1)
            log.messages = log.messages[-5:]  # what this worker reads again would be wrong
            assert worker.call(Deposit(account="a", cents=1), f"d-{number}").data == number
    past = worker.deciding.cache.get("accounts.a", "a")
    assert past is not None
    assert (folded <= 2 * 3000, len(past.entries) <= 1000, len(past.decided) < 1700) == (True, True, True)
    assert worker.call(Deposit(account="a", cents=1), "d-2500").data == 2500
    assert (log.reads, log.end) == (1, 3000)


def test_too_much_since_the_snapshot_says_what_to_do(log: Log) -> None:
    app = bank_with_balances(max_past=3)
    for number in range(5):
        Worker(bank_with_balances(), log).call(Deposit(account="a", cents=1), f"d-{number}")
    with pytest.raises(CommandFailed, match="does a worker run the projection"):
        Worker(app, log).call(Deposit(account="a", cents=1), "d-6")


def test_what_cannot_be_a_command_is_said_when_it_is_declared() -> None:
    app = bank()

    class Half(Command):
        def reads(self) -> list[str]:
            return ["ledgers.x"]

    class Waits(Command):
        def reads(self) -> list[str]:
            return ["ledgers.x"]

        async def decide(self, past: Past) -> list[Event]:
            return []

    with pytest.raises(ConfigError, match="Half has no `def decide"):
        app.command("half")(Half)
    with pytest.raises(ConfigError, match=r"Waits\.decide is async"):
        app.command("waits")(Waits)
    with pytest.raises(ConfigError, match="expected a class below Command"):
        app.command("event")(Entered)
    with pytest.raises(ConfigError, match="expected a name of its own"):
        app.command("ledgers.enter")(Enter)
    with pytest.raises(ConfigError, match=r"is command 'ledgers\.enter' already"):
        app.command("other")(Enter)
    app.command("accounts.deposit", snapshot="none")(Deposit)
    with pytest.raises(ConfigError, match=r"snapshot='none': expected a projection"):
        app.topology()
    with pytest.raises(ConfigError, match=r"stores \('>'\): the stream would answer in place of a worker"):
        App("all", stream="ALL", subjects=[">"]).command("ledgers.enter")(Enter)


class Odd(Command):
    answer: str

    def reads(self) -> Any:
        return {"text": "ledgers.x", "none": [], "foreign": ["other.x"], "wrong": ["a..b"]}.get(
            self.answer, ["ledgers.x.>"]
        )

    def decide(self, past: Past) -> Any:
        match self.answer:
            case "number":
                return 5
            case "outside":
                return [AccountOpened(account="a", cents=1)]
            case "error":
                raise ZeroDivisionError("one")
            case "nothing":
                return None
            case "large":
                return Decision(events=[Entered(ledger="x", number=1, writer="")], reply="x" * 20_000)
            case "set":
                return Decision(events=[Entered(ledger="x", number=1, writer="")], reply=object())
        return Entered(ledger="x", number=1, writer="one event without a list")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("text", "reads: ConfigError: reads returned 'ledgers.x': expected a list"),
        ("none", "reads returned nothing"),
        ("foreign", "reads returned 'other.x', which the stream does not store"),
        ("wrong", "two dots in a row"),
        ("number", "decide returned 5"),
        ("outside", "none of its events .'accounts.a'. is inside"),
        ("error", "decide: ZeroDivisionError: one"),
        ("large", "at most 16384 are recorded"),
        ("set", "TypeError"),
    ],
)
def test_a_command_that_cannot_be_decided_says_why(log: Log, answer: str, reason: str) -> None:
    app = bank()
    app.command("odd")(Odd)
    with pytest.raises(CommandFailed, match=reason):
        Worker(app, log).call(Odd(answer=answer), "odd-1")
    assert log.messages == []


def test_a_decision_without_events_is_a_reply_that_is_not_recorded(log: Log) -> None:
    app = bank()
    app.command("odd")(Odd)
    assert Worker(app, log).call(Odd(answer="nothing"), "o-1") == CommandReply(command_id="o-1", sequence=0, events=0)
    assert Worker(app, log).call(Odd(answer="one"), "o-2").events == 1


# ---- what is remembered ----------------------------------------------------------------------------------------------


def stored(sequence: int, cause: str | None = None, **fields: Any) -> PastEvent:
    return PastEvent(sequence, fields.pop("event", None), "a", "", fields.pop("time", None), cause, **fields)


def past_of(filter: str, *entries: PastEvent, last_id: str | None = None) -> BoundaryPast:
    past = BoundaryPast(filter)
    past.add(entries, last_id)
    return past


def test_what_is_remembered_is_bounded() -> None:
    cache = BoundaryCache(8)
    names = [f"a.{number}" for number in range(4)]

    def put(name: str) -> None:
        cache.put(past_of(name, *(stored(n) for n in range(1, 4))))  # three events, and one for the boundary itself

    def known() -> list[str]:
        assert len(cache) == sum(cache.get(name) is not None for name in names)
        return [name for name in names if cache.get(name) is not None]

    for name in names:
        put(name)
    assert known() == ["a.2", "a.3"]
    put("a.2")  # and is the newest now
    put("a.0")
    assert known() == ["a.0", "a.2"]
    cache.drop("a.2")
    cache.drop("a.2")
    assert known() == ["a.0"]
    put("a.1")
    assert known() == ["a.0", "a.1"]
    cache.clear()
    put("a.1")
    put("a.2")
    assert known() == ["a.1", "a.2"]


@pytest.mark.parametrize(
    ("known_id", "sequence", "id", "expected"),
    [
        ("x", 5, "x", True),
        ("x", 5, "y", False),  # another stream, or another message in its place
        ("x", 5, None, True),
        (None, 5, "y", True),
        ("x", 6, "y", True),
        ("x", 4, "x", False),
        (None, 4, None, False),
    ],
)
def test_a_boundary_goes_on_after_the_message_that_is_known(
    known_id: str | None, sequence: int, id: str | None, expected: bool
) -> None:
    past = past_of("a", stored(4), stored(5), last_id=known_id)
    assert past.may_continue_to(sequence, id) is expected


def test_old_events_of_a_boundary_with_a_snapshot_and_commands_that_nobody_repeats_are_let_go() -> None:
    noon = datetime.datetime(2026, 3, 31, 12, tzinfo=datetime.UTC)
    behind = noon - datetime.timedelta(days=1)  # by the clock of the worker that has decided them
    entries = [
        stored(n, f"c-{n}", command="pay", time=behind, stored=noon + datetime.timedelta(seconds=n))
        for n in range(1, 2 * KEPT_EVENTS + 2)
    ]
    past = past_of("a", *entries[:-1])
    since = noon + datetime.timedelta(seconds=7)
    past.trim(since)
    assert (past.entries, len(past.decided)) == (entries[:-1], 2 * KEPT_EVENTS)
    past.add(entries[-1:])
    past.trim(since)
    assert past.entries == entries[-KEPT_EVENTS:]
    assert list(past.decided) == [f"c-{n}" for n in range(7, 2 * KEPT_EVENTS + 2)]


def test_what_a_decision_records_is_one_short_line() -> None:
    assert outcome_of(0, 1, None) == '{"events":1,"index":0}'
    assert outcome_of(1, 2, None) == '{"events":2,"index":1}'
    assert outcome_of(0, 1, "a\nb") == '{"events":1,"index":0,"reply":"a\\nb"}'


@pytest.mark.parametrize(
    ("outcome", "sequence", "events", "data"),
    [(None, 11, 1, None), (b'{"events":3,"index":1,"reply":7}', 12, 3, 7), (b'{"events":3,"index":0}', 13, 3, None)],
)
def test_the_reply_of_a_command_is_known_from_the_first_of_its_events_that_was_read(
    outcome: bytes | None, sequence: int, events: int, data: Any
) -> None:
    pasts = [past_of("a", stored(3, "c-2")), past_of("b", stored(11, "c-1", command="pay", outcome=outcome))]
    reply = CommandReply(command_id="c-1", sequence=sequence, events=events, data=data, is_repeated=True)
    assert recorded_reply(pasts, "c-1") == ("pay", reply)
    assert recorded_reply(pasts, "c-3") is None
    assert recorded_reply(pasts, "c-2") is None  # that event has the same cause, and no command has decided it


def test_a_state_is_folded_of_the_events_of_its_own_key() -> None:
    spec = bank_with_balances().projections["balances"]
    past = past_of("a", *(stored(n, event=Deposited(account=name, cents=n)) for n, name in enumerate("aaba", start=1)))
    past.snapshot = SnapshotState(encode_state(100), 1)
    assert merged_past([past], spec, "a").state == 100 + 2 + 4


# ---- on the wire -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["nan", "-inf", "-5", "-0.001", "soon", "", "0", "-0.0"])
def test_a_time_that_is_none_leaves_the_worker_with_its_own(text: str) -> None:
    """A very short one instead would often leave the caller without an answer."""
    assert wire.time_to_decide({wire.TIMEOUT: text}, 30.0) == 30.0


@pytest.mark.parametrize("text", ["inf", "1e999"])
def test_a_time_without_end_has_one(text: str) -> None:
    assert wire.time_to_decide({wire.TIMEOUT: text}, 30.0) == 3600.0


def test_a_worker_stops_before_its_caller_does() -> None:
    assert wire.time_to_decide(wire.timeout_header(10.0), 30.0) == 8.0
    assert wire.time_to_decide({}, 30.0) == 30.0
    assert wire.time_to_decide(wire.timeout_header(100_000.0), 30.0) == 3600.0
    assert wire.time_to_decide(wire.timeout_header(0.0001), 30.0) == 0.001


@pytest.mark.parametrize("text", ["", "-1", "1.0", "\u00b2", "\u0663", "1_0", " 7", "new", "18446744073709551616"])
def test_an_expected_version_that_cannot_be_read_is_not_ignored(text: str) -> None:
    with pytest.raises(CommandFailed, match="Jetspark-Expected-Version"):
        wire.read_expected_version("ledgers.enter", {wire.EXPECTED_VERSION: text})
    assert wire.read_expected_version("ledgers.enter", {wire.EXPECTED_VERSION: "12"}) == 12
    assert wire.read_expected_version("ledgers.enter", {}) is None


class OutOfStock(Refused):
    """A refusal of the application's own, with facts that are no JSON."""

    def __init__(self, reason: str, *facts: object) -> None:
        super().__init__(reason)
        self.args = (reason, *facts)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Refused("no"), "no"),
        (OutOfStock("none left", object()), "none left"),
        (Refused(ValueError("no")), "no"),  # type: ignore[arg-type]
        (Refused("a\ud800b"), "a?b"),
        (Refused(""), ""),
        (Refused("\r\nStatus: 1"), "\r\nStatus: 1"),
        (Refused("x" * 3_000_000), "x" * wire.MAX_TEXT + "..."),
    ],
    ids=["plain", "of a class of its own", "an error", "no text", "empty", "lines", "long"],
)
def test_a_refusal_reaches_the_caller_whatever_its_reason_is(refusal: Refused, reason: str) -> None:
    body, headers = wire.write_error(refusal)
    encode_headers(headers)
    with pytest.raises(Refused) as caught:
        wire.read_reply(body, headers)
    assert (caught.value.reason, len(body) < 100_000) == (reason, True)


class ReadMany(Command):
    filters: list[str]

    def reads(self) -> list[str]:
        return self.filters

    def decide(self, past: Past) -> None:
        return None


class ReadForEver(ReadMany):
    def reads(self) -> Any:
        return (f"ledgers.{number}" for number in itertools.count())


class StrangeEntered(Event, type="ledger.strange", key="ledger", subject="ledgers.{ledger}.strange"):
    ledger: str


class EnterStrange(Command):
    ledger: str

    def reads(self) -> list[str]:
        return [f"ledgers.{self.ledger}.>"]

    def decide(self, past: Past) -> list[Event]:
        return [StrangeEntered(ledger=self.ledger)]


def test_a_boundary_of_many_subjects_is_bounded_and_compared_at_once(worker: Worker) -> None:
    spec = CommandSpec(name="many.read", kind=ReadMany)
    few = [f"ledgers.x{number}.>" for number in range(250)]
    began = time.process_time()
    assert sum(is_subset(one, other) for one in few for other in few) == 250
    each_with_each_s = time.process_time() - began  # a sixteenth of what it takes with a thousand
    for text in ("ledgers.x{}", "ledgers.x{}.>"):
        filters = [text.format(number) for number in range(1000)]
        began = time.process_time()
        assert spec.boundary(ReadMany(filters=filters), ("ledgers.>",)) == tuple(sorted(filters))
        assert time.process_time() - began < 8 * each_with_each_s  # the worker serves nobody meanwhile
        assert spec.boundary(ReadMany(filters=[*filters[1:], "ledgers.>"]), ("ledgers.>",)) == ("ledgers.>",)
        with pytest.raises(ConfigError, match="more than 1000 subjects"):
            spec.boundary(ReadMany(filters=[*filters, "ledgers.more"]), ("ledgers.>",))
    with pytest.raises(ConfigError, match="more than 1000 subjects"):
        spec.boundary(ReadForEver(filters=[]), ("ledgers.>",))


def test_an_event_that_the_app_does_not_know_is_not_stored(log: Log) -> None:
    app = bank()
    worker = Worker(app, log)
    app.command("ledgers.strange")(EnterStrange)
    with pytest.raises(CommandFailed, match=r"StrangeEntered is not declared.*: write @app.register above its"):
        worker.call(EnterStrange(ledger="x"), "strange")
    assert log.messages == []
    assert worker.call(Enter(ledger="x", writer="w"), "e-1").sequence == 1  # nobody is in its way
    app.register(StrangeEntered)
    worker = Worker(app, log)  # a worker has the declarations of its start
    assert worker.call(EnterStrange(ledger="x"), "strange").sequence == 2


class Receipt(msgspec.Struct):
    cents: int


def test_the_data_of_a_reply_is_converted_or_said_not_to_be_of_a_type() -> None:
    reply = CommandReply(command_id="c-1", sequence=1, events=1, data={"cents": 5})
    assert reply.data_as(Receipt) == Receipt(5)
    with pytest.raises(ConfigError, match=r"command 'c-1': its reply .* is not a <class 'int'>: Expected `int`"):
        reply.data_as(int)
