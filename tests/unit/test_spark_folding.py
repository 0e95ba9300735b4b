"""What a fold does to the states of keys: pure, and in the order of sequences."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pyarrow as pa
import pytest

from jetspark.errors import ConfigError, UsageError
from jetspark.spark import sorting
from jetspark.spark.folding import DELETE, POINT, PRIME, FoldOptions, Stamp, States, check_apart
from jetspark.spark.kv_writing import Change, Current
from jetspark.spark.options import read_options
from jetspark.spark.sorting import SequenceSort


class Sum:
    def apply(self, state: Any, event: Any, sequence: int) -> Any:
        return DELETE if event is None else (state or 0) + event


def changes(
    present: Current | None, *events: Any, start: int = 1, batch: str | None = None, fold: Any = None
) -> tuple[list[Change], int]:
    """What becomes of a key's events, one a sequence; and how many of them its value had."""
    states = States(fold or Sum(), batch)
    assert states.unknown(["k"]) == ["k"]
    states.add(["k"], {} if present is None else {"k": present})
    assert states.unknown(["k"]) == []
    states.apply([("k", start + index, event) for index, event in enumerate(events)], lambda event: event)
    return states.changes(), states.dropped


def test_a_key_without_a_value_begins_with_none() -> None:
    assert changes(None, 1, 2, 3) == ([Change("k", b"6", "put", 3, 0)], 0)


def test_events_the_value_has_already_are_left_alone() -> None:
    present = Current(b"3", sequence=2, revision=17)
    assert changes(present, 1, 2, 3) == ([Change("k", b"6", "put", 3, 17)], 2)
    assert changes(present, 1, 2) == ([], 2)


def test_a_deleted_key_begins_anew_after_its_deletion() -> None:
    gone = Current(None, sequence=5, revision=9)
    assert changes(gone, 1, 2, start=5) == ([Change("k", b"2", "put", 6, 9)], 1)
    assert changes(None, 1, None, 4) == ([Change("k", b"4", "put", 3, 0)], 0)
    assert changes(None, 1, None) == ([Change("k", b"", "delete", 2, 0)], 0)


def test_several_events_of_one_message_are_all_applied() -> None:
    states = States(Sum())
    states.add(["k"], {"k": Current(b"1", sequence=4, revision=1)})
    states.apply([("k", 4, 100), ("k", 5, 1), ("k", 5, 2)], lambda event: event)
    assert states.changes() == [Change("k", b"4", "put", 5, 1)]


def test_the_same_state_is_the_same_bytes() -> None:
    class Unordered:
        def apply(self, state: Any, event: Any, sequence: int) -> Any:
            return dict(reversed((state or {"b": 1, "a": 2}).items()))

    [once], _ = changes(None, 0, fold=Unordered())
    [twice], _ = changes(None, 0, 0, fold=Unordered())
    assert once.value == twice.value == json.dumps({"a": 2, "b": 1}, separators=(",", ":")).encode()


# ---- writes of the same batch --------------------------------------------------------------------------------------


def after(change: Change) -> Current:
    return Current(change.value, change.sequence or 0, 5, change.stamp)


def test_a_batch_that_comes_again_changes_nothing_and_another_one_goes_on() -> None:
    [first], _ = changes(None, 1, 2, 3, batch="q:0")
    assert Stamp.read(first.stamp) == ("q:0", 3, ((1 * POINT + 2) * POINT + 3) % PRIME)
    assert changes(after(first), 1, 2, 3, batch="q:0") == ([], 3)
    [second], _ = changes(after(first), 4, start=4, batch="q:1")
    assert (second.value, second.stamp) == (b"10", "q:1:1:4")


@pytest.mark.parametrize(
    ("start", "events"), [(1, (1, 2)), (2, (2, 3)), (4, (4, 5)), (3, (3,))], ids=["part", "tail", "newer", "last"]
)
def test_another_write_of_the_same_batch_with_other_events_is_an_error(start: int, events: tuple[int, ...]) -> None:
    [first], _ = changes(None, 1, 2, 3, batch="q:0")
    with pytest.raises(UsageError, match="another write of the same micro-batch has stored other events of key 'k'"):
        changes(after(first), *events, start=start, batch="q:0")
    # What is not of the same batch is a replay.
    assert changes(after(first), *events, start=start, batch="other:0")[1] == sum(
        start + i <= 3 for i in range(len(events))
    )


def test_any_other_choice_of_events_is_recognised_as_another_write() -> None:
    """All pairs of choices from six events: every other one is an error, unless it only goes on from the first."""
    choices = [each for size in range(1, 7) for each in itertools.combinations(range(1, 7), size)]

    def folded(present: Current | None, chosen: tuple[int, ...]) -> list[Change]:
        states = States(Sum(), "q:0")
        states.add(["k"], {} if present is None else {"k": present})
        states.apply([("k", sequence, 1) for sequence in chosen], lambda event: event)
        return states.changes()

    for one, other in itertools.product(choices, choices):
        [first] = folded(None, one)
        if other[: len(one)] != one:
            with pytest.raises(UsageError):
                folded(after(first), other)
        elif one == other:
            assert folded(after(first), other) == []
        else:
            [second] = folded(after(first), other)
            assert (second.value, second.stamp) == (b"%d" % len(other), folded(None, other)[0].stamp)


@pytest.mark.parametrize("text", ["q:0:3:6", "a:b:c:1:2"])
def test_a_stamp_is_read_as_it_was_written(text: str) -> None:
    assert str(Stamp.read(text)) == text


@pytest.mark.parametrize("text", [None, "", "x", "1:2", ":1:2", "q:-1:2", "q:1:²"])
def test_what_is_no_stamp_is_none(text: str | None) -> None:
    assert Stamp.read(text) is None


# ---- tasks with the same key ---------------------------------------------------------------------------------------


def test_keys_of_different_tasks_are_fine_and_a_shared_one_is_named() -> None:
    check_apart([(0, ["a", "b"]), (1, []), (2, ["c"])])
    with pytest.raises(UsageError, match=r"events of key 'b' are in two tasks \(partitions 0 and 2\)"):
        check_apart([(0, ["a", "b"]), (1, ["d"]), (2, ["c", "b"])])
    with pytest.raises(UsageError, match=r"events of keys '0', '1', '2', '3', '4' and 5 more are in two tasks"):
        check_apart([(part, [str(number) for number in range(10)]) for part in (0, 1)])


# ---- the order of rows ---------------------------------------------------------------------------------------------


def batches(sequences: list[int], size: int) -> list[pa.RecordBatch]:
    parts = [sequences[start : start + size] for start in range(0, len(sequences), size)]
    return [
        pa.record_batch(
            {
                "key": pa.array([f"k{each % 3}" for each in part], pa.string()),
                "sequence": pa.array(part, pa.int64()),
                "event": pa.array([f"e{each}" for each in part], pa.string()),
            }
        )
        for part in parts
    ]


@pytest.mark.parametrize("held", [1, 100, 1_000, 100_000])
@pytest.mark.parametrize("size", [1, 50, 5_000])
def test_rows_come_sorted_however_many_are_held(held: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "PIECE_ROWS", 50)
    chance = random.Random(held * size)
    count = 200 if size == 1 else 2_000
    sequences = [chance.randrange(count) for _ in range(count)]  # some more than once
    with SequenceSort(max_rows=held, max_bytes=1 << 30) as rows:
        for batch in batches(sequences, size):
            rows.add(batch)
        for _ in range(2):  # a key that others have written meanwhile is folded again
            found = [row for piece in rows.pieces() for row in zip(*piece, strict=True)]
            assert [row[1] for row in found] == sorted(sequences)
            assert all(row == (f"k{row[1] % 3}", row[1], f"e{row[1]}") for row in found)
        assert (rows.spilled_rows > 0) == (held < count)


def test_as_few_rows_are_in_memory_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are, and however many files: what a sort has at hand stays within twice its bound."""
    monkeypatch.setattr(sorting, "PIECE_ROWS", 1_000)
    before, most = pa.total_allocated_bytes(), 0
    with SequenceSort(max_rows=1 << 40, max_bytes=1 << 20) as rows:
        for start in range(0, 400_000, 2_000):
            [batch] = batches([(each * 7919) % 400_000 for each in range(start, start + 2_000)], 2_000)
            rows.add(batch)
            most = max(most, pa.total_allocated_bytes() - before)
        for _ in rows.pieces():
            most = max(most, pa.total_allocated_bytes() - before)
        assert rows.spilled_rows == 400_000
    assert most < 3 << 20


def test_no_rows_are_no_pieces() -> None:
    with SequenceSort(max_rows=10, max_bytes=10) as rows:
        rows.add(batches([1], 1)[0].slice(0, 0))
        assert list(rows.pieces()) == []


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"fold": "a:B"}, "'bucket' is missing"),
        ({"bucket": "b"}, "'fold' is missing"),
        ({"bucket": "b", "fold": "a.b"}, "package.module:name"),
        ({"bucket": "b", "fold": "a:B", "buket": "c"}, "did you mean 'bucket'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_options(FoldOptions, "jetstream_fold", options)


def test_a_fold_is_found_by_its_name() -> None:
    options = read_options(FoldOptions, "jetstream_fold", {"bucket": "b", "fold": "collections:Counter"})
    assert type(options.load()).__name__ == "Counter"
    missing = read_options(FoldOptions, "jetstream_fold", {"bucket": "b", "fold": "collections:Missing"})
    with pytest.raises(ConfigError, match="installed where Spark's workers run"):
        missing.load()
