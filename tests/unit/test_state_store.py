"""Load, store and fold as procedures, on a bucket in memory that loses what it likes: nothing lost, nothing twice."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.folds import Chain
from support.procedures import MemoryBucket

from jetspark.errors import ConfigError, Conflict, ConnectionLost, RequestTimeout, ServerError, UsageError
from jetspark.publish.fast_options import Refusal
from jetspark.publish.steps import AskMany, IngestAll, IngestReport, PublishEach
from jetspark.state.apply import MAX_ROUNDS, Folding, fold_into, store_values
from jetspark.state.changes import Change, Current, Outcome
from jetspark.state.fold import Applied, Piece
from jetspark.state.store import load, store, store_newest

SEEDS = range(200)


def faulty(seed: int) -> tuple[MemoryBucket, random.Random]:
    rng = random.Random(seed)
    return MemoryBucket(is_batched=seed % 2 == 0, faults=rng.choice([0.02, 0.1, 0.3]), rng=rng), rng


def folded(numbers: list[int]) -> Any:
    state = None
    for number in numbers:
        state = Chain().apply(state, {"number": number}, number)
    return state


# ---- without faults --------------------------------------------------------------------------------------------------


def test_what_is_stored_is_loaded_with_its_sequence_revision_and_stamp() -> None:
    bucket = MemoryBucket()
    changes = [Change("a", b"1", sequence=5, revision=0, stamp="q:0:1:5"), Change("b", operation="delete", sequence=6)]
    assert bucket.run(store("b", changes)) == Outcome(written=2)
    found = bucket.run(load("b", ["a", "never", "b"]))
    assert found == {"a": Current(b"1", 5, 1, "q:0:1:5"), "b": Current(None, 6, 2)}


def test_no_keys_and_no_changes_are_no_requests_but_for_the_bucket() -> None:
    bucket = MemoryBucket()
    assert bucket.run(load("b", [])) == {}
    assert bucket.run(store("b", [])) == Outcome()
    assert bucket.requests == ["$JS.API.STREAM.INFO.KV_b"] * 2


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
                bucket.put(key, json.dumps(folded(done)).encode(), {"JetSpark-Sequence": str(done[-1])})

        bucket.before_step = meddle
        for start in range(0, 60, 20):
            given: dict[str, list[Applied]] = {}
            for key, sequence in events[: start + 20]:  # those before are known already
                given.setdefault(key, []).append(Applied(sequence, {"number": sequence}))
            bucket.run(fold_into("b", Chain(), given))
        found = {key: (json.loads(value), sequence) for key, (value, sequence) in bucket.table().items()}
        assert found == {key: (folded(numbers), numbers[-1]) for key, numbers in of_key.items()}, seed
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
        bucket.run(fold_into("b", Chain(), {"a": [Applied(1, {"number": 1})]}))
    assert rounds == MAX_ROUNDS


def test_keys_are_counted_before_they_are_loaded() -> None:
    bucket, counts = MemoryBucket(), []

    def check(count: int) -> None:
        counts.append(count)
        if count > 3:
            raise ConfigError("too many")

    folding = Folding("b", Chain(), check_keys=check)
    rows = [Piece(["a", "b"], [1, 2], ['{"number": 1}'] * 2), Piece(["b", "c", "d"], [3, 4, 5], ['{"number": 1}'] * 3)]
    with pytest.raises(ConfigError, match="too many"):
        bucket.run(folding.fold(rows))
    assert counts == [2, 4]


def test_values_without_their_events_are_stored_dropped_or_in_conflict() -> None:
    bucket = MemoryBucket()
    bucket.put("beyond", b"", {"JetSpark-Sequence": "9"})
    bucket.put("behind", b"", {"JetSpark-Sequence": "1"})
    new, beyond, behind = (Change(key, b"1", sequence=5, revision=0) for key in ("new", "beyond", "behind"))
    assert bucket.run(store_values("b", [new, beyond])) == Outcome(written=1, dropped=1)
    with pytest.raises(Conflict, match="'behind'"):
        bucket.run(store_values("b", [new, behind]))
    bucket.put("same", b"", {"JetSpark-Sequence": "9", "JetSpark-Batch": "q:1:2:7"})
    with pytest.raises(UsageError, match="another write of the same micro-batch has stored other events of key 'same'"):
        bucket.run(store_values("b", [Change("same", b"1", sequence=5, revision=0, stamp="q:1:1:5")]))
