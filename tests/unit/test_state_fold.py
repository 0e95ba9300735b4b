"""What a fold does to the states of keys: pure, and in the order of sequences."""

from __future__ import annotations

import itertools
import json
import pickle
from typing import Any

import pytest

from jetspark.errors import UsageError
from jetspark.state.changes import Change, Current, Outcome
from jetspark.state.fold import DELETE, POINT, PRIME, Stamp, States, some_keys


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


def test_keys_are_counted_and_named_in_order() -> None:
    states = States(Sum())
    states.add(["b", "a"], {})
    assert (len(states), states.names()) == (2, ["b", "a"])
    assert "a" in states
    assert "c" not in states


def test_after_a_round_only_keys_in_conflict_are_in_hand_as_the_bucket_has_them() -> None:
    states = States(Sum())
    states.add(["a", "b"], {})
    rows = [("a", 1, 5), ("b", 1, 7)]
    states.apply(rows, lambda event: event)
    taken = states.take()
    assert taken == [Change("a", b"5", "put", 1, 0), Change("b", b"7", "put", 1, 0)]
    states.settle(taken, Outcome(1, ("b",), present={"b": Current(b"100", 0, 9)}))
    assert states.names() == ["b"]
    states.apply(rows[1:], lambda event: event)
    assert states.take() == [Change("b", b"107", "put", 1, 9)]


def test_no_key_is_in_doubt_and_one_that_is_looked_at_again_begins_from_that() -> None:
    states = States(Sum())
    states.add(["a"], {})
    assert states.unsure() == []
    states.look_again(["a"], {"a": Current(b"3", 2, 8)})
    states.apply([("a", 3, 1)], lambda event: event)
    assert states.take() == [Change("a", b"4", "put", 3, 8)]


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "key '0'"), (2, "keys '0', '1'"), (5, "keys '0', '1', '2', '3', '4'"), (7, "'3', '4' and 2 more")],
)
def test_an_error_names_some_keys_and_counts_the_rest(count: int, text: str) -> None:
    named = some_keys([str(number) for number in range(count)])
    assert named.endswith(text)
    assert ("more" in named) == (count > 5)


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


def test_a_checksum_is_the_same_for_ever() -> None:
    """It is stored in buckets: a value of today is compared with one of any later version."""
    [change], _ = changes(None, 1, 2, 3, start=1 << 40, batch="q:0")
    assert change.stamp == "q:0:3:2159264219911758214"


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


def test_delete_is_the_same_object_after_a_journey_between_processes() -> None:
    assert pickle.loads(pickle.dumps({"state": DELETE}))["state"] is DELETE
