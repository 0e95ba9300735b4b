"""Load, store, and the rounds of a fold as procedures, on a bucket in memory that loses what it likes: nothing lost,
nothing twice."""

from __future__ import annotations

import datetime
import json
import random
from typing import Any

import pytest
from support.folds import Rows, chained, fold_into
from support.procedures import MemoryBucket

from jetspark.core.message import CoreMessage
from jetspark.core.step_runner import Sleep
from jetspark.errors import (
    BatchInDoubt,
    ConfigError,
    Conflict,
    ConnectionLost,
    JetSparkError,
    PayloadTooLarge,
    RequestTimeout,
    ServerError,
    StreamNotFound,
    UsageError,
    WrongLastSequence,
)
from jetspark.jetstream.operations import Request
from jetspark.publish.fast_options import Refusal
from jetspark.publish.steps import AskMany, IngestAll, IngestReport, PublishEach
from jetspark.state.changes import Change, Current, Outcome
from jetspark.state.lookup import Lookup
from jetspark.state.rounds import MAX_ROUNDS
from jetspark.state.store import load, open_bucket, store, store_newest

SEEDS = range(200)


def faulty(seed: int) -> tuple[MemoryBucket, random.Random]:
    rng = random.Random(seed)
    return MemoryBucket(is_batched=seed % 2 == 0, faults=rng.choice([0.02, 0.1, 0.3]), rng=rng), rng


# ---- without faults --------------------------------------------------------------------------------------------------


def test_what_is_stored_is_loaded_with_its_sequence_revision_and_mark() -> None:
    bucket = MemoryBucket()
    changes = [Change("a", b"1", sequence=5, revision=0, mark="1"), Change("b", operation="delete", sequence=6)]
    assert bucket.run(store("b", changes)) == Outcome(written=2)
    found = bucket.run(load("b", ["a", "never", "b"]))
    assert found == {"a": Current(b"1", 5, 1, "1"), "b": Current(None, 6, 2)}


def test_the_revisions_of_a_whole_batch_are_known_unless_somebody_else_wrote_meanwhile() -> None:
    bucket = MemoryBucket()
    target = bucket.run(open_bucket("b"))
    first = bucket.run(target.store_all([Change(key, b"1", sequence=1, revision=0) for key in "abc"]))
    assert first.revisions == {"a": 1, "b": 2, "c": 3}
    bucket.put("x", b"of another")
    second = bucket.run(
        target.store_all([Change(key, b"2", sequence=2, revision=first.revisions[key]) for key in "ab"])
    )
    assert (second.written, second.revisions) == (2, {})
    third = bucket.run(target.store_all([Change("c", b"2", sequence=2, revision=3)]))
    assert third.revisions == {"c": 7}
    conflict = bucket.run(target.store_all([Change("c", b"3", sequence=3, revision=3)]))
    assert conflict.conflicts == ("c",)
    assert conflict.present["c"][:3] == (b"2", 2, 7)


def test_no_keys_and_no_changes_are_no_requests_but_for_the_bucket() -> None:
    bucket = MemoryBucket()
    assert bucket.run(load("b", [])) == {}
    assert bucket.run(store("b", [])) == Outcome()
    assert bucket.requests == ["$JS.API.STREAM.INFO.KV_b"] * 2


def test_a_key_that_cannot_be_one_is_not_asked_for() -> None:
    bucket = MemoryBucket()
    target = bucket.run(open_bucket("b"))
    with pytest.raises(ConfigError, match="key='a b'"):
        bucket.run(target.load_all(["a", "a b"]))


def test_a_key_that_somebody_else_has_written_is_a_conflict_and_its_own_change_is_not() -> None:
    bucket = MemoryBucket()
    changes = [Change("a", b"1", revision=0), Change("b", b"1", revision=0)]
    assert bucket.run(store("b", changes, writer="job")) == Outcome(written=2)
    assert bucket.run(store("b", changes, writer="job")) == Outcome(written=2)
    assert bucket.run(store("b", changes, writer="other")) == Outcome(conflicts=("a", "b"))
    assert len(bucket.log) == 2


def test_a_revision_that_no_replica_knows_is_asked_of_the_leader() -> None:
    bucket = MemoryBucket()
    bucket.put("a", b"1")
    assert bucket.run(store("b", [Change("a", b"2", sequence=1, revision=9)])) == Outcome(conflicts=("a",))
    assert bucket.requests[-1].endswith("STREAM.MSG.GET.KV_b")
    assert bucket.run(store("b", [Change("n", b"2", sequence=1, revision=9)])) == Outcome(conflicts=("n",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([Change("a"), Change("a")], "key='a': changed twice in one call"),
        ([Change("a", revision=0)], "key='a': a revision without a sequence; name the writer"),
        ([Change("a b")], "'a.b' would do"),
    ],
)
def test_changes_that_cannot_be_stored_are_refused(changes: list[Change], message: str) -> None:
    bucket = MemoryBucket()
    with pytest.raises(ConfigError) as raised:
        bucket.run(store("b", changes))
    assert message in str(raised.value)
    assert bucket.log == []


def test_what_the_bucket_refuses_for_good_is_an_error_that_names_the_key() -> None:
    bucket = MemoryBucket()
    full = Refusal(2, ServerError(400, 10054, "message size exceeds maximum allowed"))
    bucket._ingest = lambda items: IngestReport(2, (), (full,))  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="key 'c': message size exceeds maximum allowed"):
        bucket.run(store("b", [Change("a", b"1"), Change("c", b"2")]))


# ---- patience --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience_s", [0.5, 30.0])
def test_a_server_that_stays_away_is_given_up_when_the_patience_is_over(patience_s: float) -> None:
    bucket = MemoryBucket(faults=1.0)
    with pytest.raises(ConnectionLost, match="nobody is there"):
        bucket.run(store("b", [Change("a", b"1")], patience_s=patience_s))
    assert patience_s <= bucket.now < patience_s + 3.0
    with pytest.raises(ConnectionLost):
        bucket.run(load("b", ["a"], patience_s=patience_s))


def test_answers_that_are_lost_again_and_again_are_asked_for_until_the_patience_is_over() -> None:
    bucket = MemoryBucket()
    bucket.put("a", b"1")

    def lose(step: Any) -> None:
        if isinstance(step, AskMany):
            raise RequestTimeout("answers", 1.0)

    bucket.before_step = lose
    with pytest.raises(RequestTimeout):
        bucket.run(load("b", ["a"], patience_s=1.0))
    bucket.before_step = lambda step: None
    bucket._give = lambda answers: (answers.request(), answers.lost())  # type: ignore[method-assign,assignment]
    with pytest.raises(ConnectionLost, match="the last revisions of bucket 'b' were lost"):
        bucket.run(load("b", ["a"], patience_s=1.0))


class Watched(MemoryBucket):
    """Notes the steps, and gives what a script says in place of the answers about many keys, as long as it lasts."""

    def __init__(self, *script: str, is_batched: bool = True) -> None:
        super().__init__(is_batched=is_batched)
        self.script = list(script)
        self.steps: list[str] = []
        self.takes_s = 0.0
        self.config: dict[str, Any] = {}

    def _perform(self, step: Any) -> Any:
        self.steps.append(type(step).__name__)
        if isinstance(step, IngestAll | PublishEach):
            self.now += self.takes_s
            assert self.now < 100, "it never gives up"
        return super()._perform(step)

    def _answer(self, request: Request) -> dict[str, Any]:
        answer = super()._answer(request)
        if "config" in answer:
            answer["config"] |= self.config
        return answer

    def _give(self, answers: Any) -> None:
        what = self.script.pop(0) if self.script else "all"
        if what == "all":
            super()._give(answers)
            return
        answers.request()
        if what == "lost":
            answers.lost()
        elif what == "nothing":
            answers.accept_all([CoreMessage("_INBOX", b"", None, b"NATS/1.0 404 No Results\r\n\r\n", None)])
        else:
            last, up_to = self.last(f"$KV.b.{what}"), len(self.log)
            [message, _] = self._messages([last], up_to)
            answers.accept_all([message])
            end = (
                f"NATS/1.0 204 EOB\r\nNats-Num-Pending: 1\r\nNats-Last-Sequence: {last}\r\nNats-UpTo-Sequence: {up_to}"
            )
            answers.accept_all([CoreMessage("_INBOX", b"", None, f"{end}\r\n\r\n".encode(), None)])


def test_an_answer_that_is_lost_three_times_is_given_up_unless_some_of_it_came() -> None:
    bucket = Watched(*["lost"] * 9)
    with pytest.raises(ConnectionLost):
        bucket.run(load("b", ["a"], patience_s=0.0))
    assert bucket.steps.count("AskMany") == 3
    bucket = Watched("lost", "lost", "a", "lost", "lost")
    for key in ("a", "c"):
        bucket.put(key, b"1")
    assert set(bucket.run(load("b", ["a", "c"], patience_s=0.0))) == {"a", "c"}
    assert bucket.run(load("b", [], patience_s=0.0)) == {}
    bucket = Watched("lost", "lost", "nothing")
    assert bucket.run(load("b", ["a"], patience_s=0.0)) == {}


def test_every_attempt_asks_for_the_connection() -> None:
    bucket = Watched()
    bucket.run(load("b", ["a"]))
    assert bucket.steps.count("Connect") == 2
    bucket.steps.clear()
    bucket.run(store("b", [Change("a", b"1")]))
    assert (bucket.steps.count("Connect"), bucket.steps.count("Sleep")) == (2, 0)


def test_a_mirror_is_read_and_not_written() -> None:
    bucket = Watched()
    bucket.config = {"mirror": {"name": "KV_o"}}
    assert bucket.run(load("b", ["a"])) == {}
    for procedure in (store("b", [Change("a")]), store_newest("b", [Change("a", sequence=1)])):
        with pytest.raises(ConfigError, match="a mirror of 'o'; write to that one"):
            bucket.run(procedure)


def test_many_changes_are_sent_twenty_thousand_at_a_time() -> None:
    bucket = Watched()
    sizes: list[int] = []

    def ingest(items: list[Any]) -> IngestReport:
        sizes.append(len(items))
        return IngestReport(len(items), (), ())

    bucket._ingest = ingest  # type: ignore[method-assign]
    assert bucket.run(store("b", (Change(str(number)) for number in range(20_001)))) == Outcome(written=20_001)
    assert sizes == [20_000, 1]


@pytest.mark.parametrize("is_batched", [True, False])
def test_the_time_begins_anew_with_every_change_that_is_stored(is_batched: bool) -> None:
    """One of them goes through in each round, and a round takes half of the patience."""
    bucket = Watched(is_batched=is_batched)
    bucket.takes_s = 0.5

    def ingest(items: list[Any]) -> IngestReport:
        bucket._store(*items[0])
        return IngestReport(len(items), tuple(range(n, n + 1) for n in range(2, len(items) + 1)), ())

    def publish_one(subject: str, value: bytes, headers: Any) -> Exception | None:
        if bucket.steps[-1] == "done":
            return ConnectionLost("its answer is lost")
        bucket.steps.append("done")
        return bucket._store(subject, value, headers)

    bucket._ingest, bucket._publish_one = ingest, publish_one  # type: ignore[method-assign]
    changes = [Change(str(number), b"1") for number in range(12)]
    assert bucket.run(store("b", changes, patience_s=1.0)) == Outcome(written=12)
    assert bucket.steps.count("Sleep") == 11
    assert len(bucket.log) == 12


@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("stored", [0, 1])
def test_changes_that_get_nowhere_are_given_up_with_the_reason(is_batched: bool, stored: int) -> None:
    bucket = Watched(is_batched=is_batched)
    bucket.takes_s = 0.3
    sent = 0

    def is_through() -> bool:
        nonlocal sent
        sent += 1
        return sent <= stored

    def ingest(items: list[Any]) -> IngestReport:
        first = 2 if is_through() else 1
        return IngestReport(len(items), (range(first, len(items) + 1),), ())

    def publish_one(subject: str, value: bytes, headers: Any) -> Exception | None:
        return None if is_through() else ConnectionLost("its answer is lost")

    bucket._ingest, bucket._publish_one = ingest, publish_one  # type: ignore[method-assign]
    with pytest.raises(JetSparkError, match="messages were lost" if is_batched else "its answer is lost") as raised:
        bucket.run(store("b", [Change("a"), Change("c")], patience_s=2.0))
    assert 2.0 <= bucket.now < 5.0
    if is_batched:
        assert isinstance(raised.value, BatchInDoubt)
        assert raised.value.stored == 0


def test_what_a_broken_batch_has_acknowledged_is_not_sent_again() -> None:
    bucket = Watched()
    sizes: list[int] = []
    reports = [IngestReport(2, (), (), BatchInDoubt("", "the connection was lost", 2)), IngestReport(1, (), ())]

    def ingest(items: list[Any]) -> IngestReport:
        sizes.append(len(items))
        return reports.pop(0)

    bucket._ingest = ingest  # type: ignore[method-assign]
    assert bucket.run(store("b", [Change("a"), Change("c"), Change("d")])) == Outcome(written=3)
    assert sizes == [3, 1]


def test_a_driver_answers_for_every_change() -> None:
    bucket = Watched(is_batched=False)
    real = bucket._perform
    bucket._perform = lambda step: [None] if isinstance(step, PublishEach) else real(step)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="shorter"):
        bucket.run(store("b", [Change("a"), Change("c")]))


def test_a_value_too_large_for_the_server_is_named_by_its_key() -> None:
    bucket = Watched()

    def too_large(step: Any) -> None:
        if isinstance(step, IngestAll):
            raise PayloadTooLarge(2000, 1000)

    bucket.before_step = too_large
    with pytest.raises(ConfigError, match="key 'c': "):
        bucket.run(store("b", [Change("a", b"1"), Change("c", b"22"), Change("d", b"3")]))


def test_a_refusal_that_is_not_about_the_revision_is_an_error_of_a_change_with_one_too() -> None:
    bucket = Watched()
    full = Refusal(1, ServerError(400, 10054, "message size exceeds maximum allowed"))
    bucket._ingest = lambda items: IngestReport(1, (), (full,))  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="key 'a': message size"):
        bucket.run(store("b", [Change("a", b"1", sequence=1, revision=0)]))
    bucket._ingest = lambda items: IngestReport(1, (), (Refusal(1, WRONG),))  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="key 'a': wrong last sequence"):
        bucket.run(store("b", [Change("a", b"1", sequence=1)]))


# ---- replicas that are behind ----------------------------------------------------------------------------------------

WRONG = WrongLastSequence(400, 10071, "wrong last sequence: 9")


def refuse_once(bucket: MemoryBucket) -> None:
    """As a leader does that knows more than the replica that is read."""
    real = bucket._ingest
    answers = [lambda items: IngestReport(1, (), (Refusal(1, WRONG),))]
    bucket._ingest = lambda items: answers.pop()(items) if answers else real(items)  # type: ignore[method-assign]


def test_a_change_that_is_refused_though_the_key_looks_as_expected_is_sent_again() -> None:
    bucket = Watched()
    bucket.put("a", b"0")
    refuse_once(bucket)
    assert bucket.run(store("b", [Change("a", b"1", sequence=1, revision=1)])) == Outcome(written=1)
    assert (bucket.steps.count("IngestAll"), bucket.steps.count("Sleep")) == (2, 1)
    assert not any("MSG.GET" in request for request in bucket.requests)  # the replica will have it in a moment


def test_a_replica_that_says_nothing_is_asked_for_something_that_must_be_there() -> None:
    bucket = Watched("nothing", "nothing")
    bucket.put("a", b"1", {"JetSpark-Sequence": "5"})
    bucket.put("last", b"")
    assert bucket.run(load("b", ["a", "never"])) == {"a": Current(b"1", 5, 1)}
    # The leader has named a message; the replica has not even that, and then it has.
    assert [each.split(".", 2)[2] for each in bucket.requests] == [
        "STREAM.INFO.KV_b",
        "STREAM.MSG.GET.KV_b",
        "DIRECT.GET.KV_b",
    ]
    assert bucket.steps.count("Sleep") == 1


@pytest.mark.parametrize("is_mirror", [True, False])
def test_an_answer_of_the_past_is_asked_for_again_and_in_the_end_the_leader_is_asked(is_mirror: bool) -> None:
    bucket = Watched()
    for number in range(4):
        bucket.put(f"k{number % 2}", b"%d" % number, {"JetSpark-Sequence": str(number + 1)})
    behind = [1, 2, 4]
    if is_mirror:  # which has everything, as far as it says; nobody knows what it has dropped
        bucket.answers_as = "A_MIRROR"
    else:
        bucket.lag = lambda: behind.pop(0) if behind else 0
    right = {"k0": Current(b"2", 3, 3), "k1": Current(b"3", 4, 4)}
    assert bucket.run(load("b", ["k0", "k1", "never"])) == right
    asked = [each for each in bucket.requests if "MSG.GET" in each]
    assert len(asked) == (4 if is_mirror else 1)  # three keys and a witness; or the witness
    bucket.lag = lambda: 1
    assert bucket.run(load("b", ["k0", "k1", "never"])) == right
    assert bucket.steps.count("Sleep") < 20


def test_what_was_seen_or_written_once_is_never_unseen() -> None:
    bucket = Watched()
    target = bucket.run(open_bucket("b"))
    assert bucket.run(target.load_all(["a"])) == {}
    bucket.put("a", b"1", {"JetSpark-Sequence": "1"})
    lags = [0, 1, 0]
    bucket.lag = lambda: lags.pop(0) if lags else 0
    assert bucket.run(target.load_all(["a"])) == {"a": Current(b"1", 1, 1)}
    assert bucket.run(target.load_all(["a"])) == {"a": Current(b"1", 1, 1)}
    assert lags == []
    outcome = bucket.run(target.store_all([Change("a", b"2", sequence=2, revision=1), Change("c", b"1", sequence=1)]))
    assert outcome.written == 2
    for lag in (1, 2, 3):
        lags[:] = [lag, lag]
        assert bucket.run(target.load_all(["a", "c"])) == {"a": Current(b"2", 2, 2), "c": Current(b"1", 1, 3)}
        assert lags == []


@pytest.mark.parametrize("is_batched", [True, False])
def test_a_write_of_unknown_place_is_not_unseen_either(is_batched: bool) -> None:
    """The answer to the batch is lost, and with it the sequence: the leader says how far the bucket is."""
    bucket = Watched(is_batched=is_batched)
    target = bucket.run(open_bucket("b"))
    bucket.put("others", b"")
    real = bucket._ingest
    losses = [BatchInDoubt("", "the connection was lost", 1)]

    def ingest(items: list[Any]) -> IngestReport:
        found = real(items)
        return IngestReport(1, (), (), losses.pop(), 0) if losses else found

    bucket._ingest = ingest  # type: ignore[method-assign]
    assert bucket.run(target.store_all([Change("a", b"2", sequence=2, revision=0)])).written == 1
    lags = [1, 2]
    bucket.lag = lambda: lags.pop(0) if lags else 0
    assert bucket.run(target.load_all(["a"])) == {"a": Current(b"2", 2, 2)}
    assert lags == []


def test_a_write_by_other_means_is_not_unseen_once_it_is_told_of() -> None:
    bucket = Watched()
    target = bucket.run(open_bucket("b"))
    target.advance_seen("a", bucket.put("a", b"1"))
    lags = [1, 1]
    bucket.lag = lambda: lags.pop(0) if lags else 0
    assert bucket.run(target.load_all(["a"])) == {"a": Current(b"1", 0, 1)}
    assert lags == []


def test_a_write_that_ends_with_an_error_is_not_unseen_either() -> None:
    bucket = Watched()
    target = bucket.run(open_bucket("b"))

    def store_and_fail(items: list[Any]) -> IngestReport:
        bucket.put("a", b"1")
        raise UsageError("closed meanwhile")

    bucket._ingest = store_and_fail  # type: ignore[method-assign]
    with pytest.raises(UsageError):
        bucket.run(target.store_all([Change("a", b"1", sequence=1)]))
    lags = [1, 1]
    bucket.lag = lambda: lags.pop(0) if lags else 0
    assert bucket.run(target.load_all(["a"])) == {"a": Current(b"1", 0, 1)}


@pytest.mark.parametrize("problem", [RequestTimeout("the leader", 1.0), StreamNotFound(404, 10059, "stream not found")])
def test_after_a_write_of_unknown_place_the_leader_is_asked_how_far_the_bucket_is_until_it_has_answered_once(
    problem: JetSparkError,
) -> None:
    """A bucket that was deleted may be re-created: its reader waits, as it does where a direct get gets no answer."""
    bucket = Watched(is_batched=False)
    target = bucket.run(open_bucket("b"))
    bucket.run(target.store_all([Change("a", b"1", sequence=1)]))
    bucket.requests.clear()
    problems = [problem]

    def fail(step: Any) -> None:
        if isinstance(step, Request) and "STREAM.INFO" in step.subject and problems:
            raise problems.pop()

    bucket.before_step = fail
    lags = [1, 1]
    bucket.lag = lambda: lags.pop(0) if lags else 0
    for _ in range(2):
        assert bucket.run(target.load_all(["a"])) == {"a": Current(b"1", 1, 1)}
    assert problems == []
    assert sum("STREAM.INFO" in each for each in bucket.requests) == 1


def test_what_the_leader_has_said_of_a_key_is_not_unseen() -> None:
    bucket = Watched()
    target = bucket.run(open_bucket("b"))
    bucket.put("a", b"1")
    problems = [RequestTimeout("the leader", 1.0)]

    def fail(step: Any) -> None:
        if isinstance(step, Request) and problems:
            raise problems.pop()

    bucket.before_step = fail
    bucket.lag = lambda: 1
    assert bucket.run(target.load_from_leader(["a", "never"])) == {"a": Current(b"1", 0, 1)}
    assert problems == []
    lags = [1, 1]
    bucket.lag = lambda: lags.pop(0) if lags else 0
    assert bucket.run(target.load_all(["a"])) == {"a": Current(b"1", 0, 1)}


def test_the_last_key_of_a_whole_batch_is_one_that_must_be_there() -> None:
    bucket = Watched()
    target = bucket.run(open_bucket("b"))
    bucket.run(target.store_all([Change("a", b"1", sequence=1)]))
    bucket.requests.clear()
    assert bucket.run(target.load_all(["never"])) == {}
    assert len(bucket.requests) == 1


def test_a_key_that_must_be_there_and_was_removed_is_replaced_by_another(caplog: pytest.LogCaptureFixture) -> None:
    bucket = Watched()
    bucket.put("a", b"1")
    target = bucket.run(open_bucket("b"))
    assert bucket.run(target.load_all(["never"])) == {}
    bucket.remove(1)
    bucket.put("z", b"2")
    with caplog.at_level("INFO", "jetspark.state"):
        assert bucket.run(target.load_all(["never"])) == {}
    assert "bucket b: replicas lag sequence 1; asking the leader" in caplog.text
    pauses = bucket.steps.count("Sleep")
    assert bucket.run(target.load_all(["never"])) == {}
    assert bucket.steps.count("Sleep") == pauses


def test_the_revisions_of_a_batch_with_a_refusal_are_not_guessed() -> None:
    """Somebody else's message is where the refused one would have been: the last sequence is as if all were stored."""
    bucket = Watched()
    target = bucket.run(open_bucket("b"))
    others = iter(["a"])

    def write(step: Any) -> None:
        if isinstance(step, IngestAll) and (key := next(others, None)):
            bucket.put(key, b"of another")

    bucket.before_step = write
    outcome = bucket.run(target.store_all([Change(key, b"1", sequence=1, revision=0) for key in "ab"]))
    assert (outcome.written, outcome.conflicts, outcome.revisions) == (1, ("a",), {})


@pytest.mark.parametrize(
    ("had", "expected", "outcome"), [(0, 1, Outcome(1)), (1, 9, Outcome(conflicts=("a",)))], ids=["none", "less"]
)
def test_a_key_with_less_than_was_expected_is_what_the_leader_says(had: int, expected: int, outcome: Outcome) -> None:
    """It is written just before the leader is asked, and no replica has said so."""
    bucket = Watched()
    for _ in range(had):
        bucket.put("a", b"before")
    target = bucket.run(open_bucket("b"))
    others = iter(["a"])

    def write(step: Any) -> None:
        if isinstance(step, Request) and "MSG.GET" in step.subject and (key := next(others, None)):
            bucket.put(key, b"of another")

    bucket.before_step = write
    found = bucket.run(target.store_all([Change("a", b"1", sequence=1, revision=expected)]))
    assert (found.written, found.conflicts) == (outcome.written, outcome.conflicts)
    assert [each.revision for each in found.present.values()] == [2] * had


def test_an_open_bucket_says_what_it_is() -> None:
    target = MemoryBucket().run(open_bucket("b"))
    assert (target.name, target.write_subject("a")) == ("b", "$KV.b.a")
    assert target.created == datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def test_a_bucket_that_was_emptied_has_nothing_and_that_is_no_replica_behind() -> None:
    bucket = Watched()
    bucket.put("a", b"1")
    target = bucket.run(open_bucket("b"))
    assert set(bucket.run(target.load_all(["a"]))) == {"a"}
    bucket.log.clear()
    for _ in range(3):
        assert bucket.run(target.load_all(["a"])) == {}
    assert bucket.steps.count("Sleep") < 10
    bucket.put("a", b"2")
    assert set(bucket.run(target.load_all(["a"]))) == {"a"}


def test_what_a_replica_still_has_and_the_leader_has_not_is_gone() -> None:
    bucket = Watched()
    bucket.put("a", b"1", {"JetSpark-Sequence": "5"})
    refuse_once(bucket)
    real = bucket._answer

    def answer(request: Request) -> dict[str, Any]:
        gone = {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
        found = real(request)
        return gone if "message" in found else found

    bucket._answer = answer  # type: ignore[method-assign]
    assert bucket.run(store("b", [Change("a", b"1", sequence=5, revision=7)])) == Outcome(conflicts=("a",))


# ---- the newest ------------------------------------------------------------------------------------------------------


def test_the_newest_are_written_and_the_others_counted_over_all_rounds() -> None:
    bucket = Watched()
    for key, sequence in (("old", 1), ("same", 5), ("raced", 1), ("beyond", 1)):
        bucket.put(key, b"0", {"JetSpark-Sequence": str(sequence)})
    current = bucket.run(load("b", ["old", "same", "raced", "beyond"]))
    bucket.steps.clear()

    def meddle(step: Any) -> None:
        if isinstance(step, IngestAll) and bucket.steps.count("IngestAll") == 1:
            bucket.put("raced", b"0", {"JetSpark-Sequence": "2"})
            bucket.put("beyond", b"0", {"JetSpark-Sequence": "9"})

    bucket.before_step = meddle
    changes = [Change(key, b"1", sequence=5) for key in ("old", "same", "raced", "beyond", "new")]
    assert bucket.run(store_newest("b", changes, current=current)) == Outcome(written=3, dropped=2)
    assert bucket.table() == {
        "old": (b"1", 5),
        "same": (b"0", 5),
        "raced": (b"1", 5),
        "beyond": (b"0", 9),
        "new": (b"1", 5),
    }
    sending = [step for step in bucket.steps if step in ("IngestAll", "Sleep")]
    assert sending == ["IngestAll", "Sleep", "IngestAll"]
    # What was known is not asked for; after the lost race it is: once for the conflict, once for the next round.
    assert bucket.steps.count("AskMany") == 2


@pytest.mark.parametrize("created", [(0, 100), (100, 0)])
def test_a_sequence_that_only_one_side_says_the_stream_of_overwrites_nothing(created: tuple[int, int]) -> None:
    bucket = Watched()
    bucket.run(store_newest("b", [Change("a", b"newer", sequence=100, stream_created=created[0])]))
    bucket.put("b", b"of another client")
    with pytest.raises(ConfigError, match=r"key='a': .*nothing tells which is newer"):
        bucket.run(store_newest("b", [Change("a", b"old", sequence=50, stream_created=created[1])]))
    written = bucket.run(store_newest("b", [Change("b", b"1", sequence=1, stream_created=created[1])]))
    assert (written.written, bucket.table()["a"]) == (1, (b"newer", 100))


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_every_change_is_stored_once_or_known_to_be_in_conflict_whatever_is_lost(block: int) -> None:
    for seed in SEEDS[block::4]:
        bucket, rng = faulty(seed)
        taken = {f"k{number}" for number in range(30) if rng.random() < 0.2}
        for key in taken:
            bucket.put(key, b"somebody else's")
        changes = [Change(f"k{number}", b"%d" % number, revision=0) for number in range(30)]
        outcome = bucket.run(store("b", changes, writer=f"job{seed}"))
        assert (outcome.written, set(outcome.conflicts)) == (30 - len(taken), taken), seed
        assert len(bucket.log) == 30, seed  # nothing is there twice
        for change in changes:
            expected = b"somebody else's" if change.key in taken else change.value
            assert bucket.table()[change.key][0] == expected, seed


@pytest.mark.parametrize("block", range(4))
def test_the_newest_stays_whoever_stores_it_in_whatever_order(block: int) -> None:
    for seed in SEEDS[block::4]:
        bucket, rng = faulty(seed)
        highest: dict[str, int] = {}
        for _ in range(6):
            changes = [
                Change(f"k{rng.randrange(8)}", b"%d" % number, sequence=number) for number in rng.sample(range(99), 10)
            ]
            for change in changes:
                highest[change.key] = max(highest.get(change.key, -1), change.sequence or 0)
            bucket.run(store_newest("b", changes))
        assert bucket.table() == {key: (b"%d" % number, number) for key, number in highest.items()}, seed


@pytest.mark.parametrize("block", range(4))
def test_events_are_folded_once_and_in_order_while_another_folds_the_same(block: int) -> None:
    for seed in SEEDS[block::4]:
        bucket, rng = faulty(seed)
        events = [(f"k{rng.randrange(5)}", sequence) for sequence in range(1, 61)]
        of_key: dict[str, list[int]] = {}
        for key, sequence in events:
            of_key.setdefault(key, []).append(sequence)

        def meddle(step: Any, bucket: MemoryBucket = bucket, of_key: Any = of_key, rng: Any = rng) -> None:
            """Just before a batch is sent, the other worker gets some keys further, if it is behind."""
            if not isinstance(step, IngestAll | PublishEach) or rng.random() < 0.5:
                return
            key = rng.choice(list(of_key))
            present = bucket.table().get(key, (b"", 0))[1]
            end = rng.randrange(1, 61)
            done = [number for number in of_key[key] if number <= end]
            if done and done[-1] > present:
                bucket.put(key, json.dumps(chained(done)).encode(), {"JetSpark-Sequence": str(done[-1])})

        bucket.before_step = meddle
        bucket.lag = lambda rng=rng: rng.choice([0] * 8 + [1, 5])  # type: ignore[misc]
        for start in range(0, 60, 20):
            pieces = [events[: start + 20]]  # those before are known already
            bucket.run(fold_into("b", lambda pieces=pieces: pieces))  # type: ignore[misc]
        found = {key: (json.loads(value), sequence) for key, (value, sequence) in bucket.table().items()}
        assert found == {key: (chained(numbers), numbers[-1]) for key, numbers in of_key.items()}, seed
        for key in of_key:
            sequences = [int(head["JetSpark-Sequence"]) for subject, _, head in bucket.log if subject.endswith(key)]
            assert sequences == sorted(set(sequences)), seed


# ---- folds -----------------------------------------------------------------------------------------------------------


def test_a_fold_that_loses_every_race_gives_up() -> None:
    bucket = MemoryBucket()
    rounds = 0

    def win(step: Any) -> None:
        nonlocal rounds
        if isinstance(step, IngestAll):
            rounds += 1
            bucket.put("a", b"[0, 0]")

    bucket.before_step = win
    with pytest.raises(Conflict, match="'a'"):
        bucket.run(fold_into("b", lambda: [[("a", 1)]]))
    assert rounds == MAX_ROUNDS == 20


def test_a_fold_that_loses_one_race_folds_that_key_again_and_counts_everything_once() -> None:
    bucket = MemoryBucket()
    for key in ("a", "b"):
        bucket.put(key, json.dumps(chained([1])).encode(), {"JetSpark-Sequence": "1"})
    asked: list[list[str]] = []
    pauses: list[float] = []
    wins = 3

    def meddle(step: Any) -> None:
        nonlocal wins
        if isinstance(step, AskMany):
            assert isinstance(step.answers, Lookup)
            asked.append(list(step.answers.left))
        if isinstance(step, Sleep):
            pauses.append(step.seconds)
        if isinstance(step, IngestAll) and wins:
            wins -= 1
            bucket.put("b", json.dumps(chained([1])).encode(), {"JetSpark-Sequence": "1"})

    bucket.before_step = meddle
    rows: Rows = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert bucket.run(fold_into("b", lambda: [rows])) == Outcome(written=2, dropped=2)
    # After a lost race that key alone is looked up, once.
    assert asked == [["$KV.b.a", "$KV.b.b"], *[["$KV.b.b"]] * 3]
    assert pauses == pytest.approx([0.01, 0.02, 0.03])
    assert {key: json.loads(value) for key, (value, _) in bucket.table().items()} == dict.fromkeys(
        "ab", chained([1, 2])
    )
