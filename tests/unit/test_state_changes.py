"""Changes of keys: which is newer, what they carry, and how one is recognised that was written before."""

from __future__ import annotations

import pickle

import pytest

from jetspark.core.headers import decode
from jetspark.errors import ConfigError, InvalidHeader
from jetspark.state.changes import (
    DELETE,
    Change,
    Current,
    Outcome,
    Stored,
    header_bytes,
    header_fields,
    is_unchanged,
    is_written,
    newer,
    newest,
    some_keys,
)


def test_of_two_changes_of_a_key_the_newer_stays_and_of_equals_the_later() -> None:
    given = [Change("a", b"2", sequence=2), Change("a", b"1", sequence=1), Change("b", b"1"), Change("b", b"2")]
    assert [change.value for change in newest(given).values()] == [b"2", b"2"]
    same = [Change("a", b"1", sequence=2), Change("a", b"2", sequence=2)]
    assert newest(same)["a"].value == b"2"
    without = [Change("a", b"1", sequence=1), Change("a", b"2")]
    assert newest(without)["a"].value == b"1"


def test_only_what_is_newer_is_wanted_and_it_expects_what_was_loaded() -> None:
    known = {"a": Current(b"5", 5, 17), "gone": Current(None, 9, 20), "foreign": Current(b"", 0, 30)}
    given = [
        Change("a", sequence=5),
        Change("gone", sequence=10),
        Change("foreign", sequence=1),
        Change("new", sequence=0),
    ]
    wanted = newer(given, known)
    assert [(change.key, change.revision) for change in wanted] == [("gone", 20), ("foreign", 30), ("new", 0)]
    with pytest.raises(ConfigError, match="without a sequence"):
        newer([Change("a")], known)


def test_headers_say_what_is_done_and_what_is_expected() -> None:
    assert header_fields(Change("a"), "w") is None
    assert header_fields(Change("a", operation="purge", sequence=3, revision=0), "w") == {
        "KV-Operation": "PURGE",
        "Nats-Rollup": "sub",
        "JetSpark-Sequence": "3",
        "Nats-Expected-Last-Subject-Sequence": "0",
    }
    assert header_fields(Change("a", revision=4), "job") == {
        "Nats-Expected-Last-Subject-Sequence": "4",
        "JetSpark-Writer": "job",
    }


@pytest.mark.parametrize(
    ("change", "stored", "is_ours"),
    [
        (Change("a", b"1", revision=3), Stored("s", 9, b"1", "put", None, "job"), True),
        (Change("a", b"1", revision=3), Stored("s", 9, b"1", "put", None, "other"), False),
        (Change("a", b"1", revision=3), Stored("s", 9, b"1", "put", None, None), False),
        (Change("a", b"1", revision=3), Stored("s", 9, b"2", "put", None, "job"), False),
        (Change("a", b"", "delete", revision=3), Stored("s", 9, b"", "put", None, "job"), False),
        (Change("a", b"1", sequence=5, revision=3), Stored("s", 9, b"1", "put", 5, None), True),
        (Change("a", b"1", sequence=5, revision=3), Stored("s", 9, b"1", "put", 6, None), False),
        (Change("a", b"1", revision=3), None, False),
    ],
)
def test_a_refused_change_is_known_again_if_it_had_been_written(
    change: Change, stored: Stored | None, is_ours: bool
) -> None:
    assert is_written(change, stored, "job") is is_ours


def test_a_key_that_looks_as_expected_is_unchanged() -> None:
    stored = Stored("s", 9, b"1", "put", None, None)
    assert is_unchanged(Change("a", revision=9), stored) is True
    assert is_unchanged(Change("a", revision=8), stored) is False
    assert is_unchanged(Change("a", revision=0), None) is True
    assert is_unchanged(Change("a", revision=1), None) is False


def test_outcomes_add_up() -> None:
    one = Outcome(1, ("a",), 2, {"a": Current(b"5", 5, 17)}, {"k": 9})
    other = Outcome(3, ("b",), 4, {"b": Current(None, 9, 20)}, {"l": 11, "m": 12})
    assert Outcome.of_all([]) == Outcome()
    assert Outcome.of_all([one]) is one
    total = Outcome.of_all([one, Outcome(), other])
    assert total == Outcome(4, ("a", "b"), 6)
    assert total.present == {"a": Current(b"5", 5, 17), "b": Current(None, 9, 20)}
    assert total.revisions == {"k": 9, "l": 11, "m": 12}


@pytest.mark.parametrize(
    "change",
    [
        Change("a"),
        Change("a", b"1", sequence=5, revision=0),
        Change("a", b"1", sequence=5, mark="1"),
        Change("a", b"1", sequence=5, revision=7, mark="1 parked 4 why\\n not"),
        Change("a", b"1", sequence=5, mark="1 parked 4 caf\u00e9"),
        Change("a", b"1", sequence=5, mark="1 parked 4 not UTF-8: \udcff"),
        Change("a", b"", "delete", 5, 7, mark="1"),
        Change("a", b"", "purge"),
        Change("a", b"1", sequence=5, revision=7, mark="1"),
        Change("a", b"1", revision=7),
        Change("a", b"1", sequence=5, revision=7, stream_created=1_774_001_670_000_001),
        Change("a", b"", "delete", sequence=5, stream_created=1),
    ],
)
def test_headers_as_bytes_are_the_same_as_those_in_fields(change: Change) -> None:
    fields, block = header_fields(change, "w"), header_bytes(change, "w")
    assert (None if block is None else dict(decode(block).items())) == fields


@pytest.mark.parametrize("mark", ["1\r\nNats-Rollup: all", "1\nNats-Rollup: all", "1\r", "\n1"])
def test_a_mark_cannot_smuggle_in_a_header(mark: str) -> None:
    with pytest.raises(InvalidHeader, match="line break"):
        header_bytes(Change("a", b"1", sequence=5, mark=mark), "w")


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "key '0'"), (2, "keys '0', '1'"), (5, "keys '0', '1', '2', '3', '4'"), (7, "'3', '4' and 2 more")],
)
def test_an_error_names_some_keys_and_counts_the_rest(count: int, text: str) -> None:
    named = some_keys([str(number) for number in range(count)])
    assert named.endswith(text)
    assert ("more" in named) == (count > 5)


def test_delete_is_the_same_object_after_a_journey_between_processes() -> None:
    assert pickle.loads(pickle.dumps({"state": DELETE}))["state"] is DELETE
    assert repr(DELETE) == "DELETE"


# ---- streams that were re-created ----------------------------------------------------------------------------------


def test_of_a_stream_that_was_created_later_every_sequence_is_newer() -> None:
    old, new = Change("a", sequence=9, stream_created=100), Change("a", sequence=1, stream_created=200)
    assert newest([old, new]) == newest([new, old]) == {"a": new}
    assert newer([new], {"a": Current(b"", 9, 17, None, 100)}) == [new._replace(revision=17)]
    assert newer([old], {"a": Current(b"", 1, 17, None, 200)}) == []
    assert newer([old], {"a": Current(b"", 9, 17, None, 100)}) == []
    # What another client has written has no sequence, and is older than every event.
    assert newer([new], {"a": Current(b"", 0, 17)}) == [new._replace(revision=17)]


@pytest.mark.parametrize("sequences", [(9, 10), (10, 9), (9, 9)])
@pytest.mark.parametrize("created", [(0, 100), (100, 0)])
def test_a_sequence_that_says_of_which_stream_it_is_is_not_compared_with_one_that_does_not(
    sequences: tuple[int, int], created: tuple[int, int]
) -> None:
    stored, change = (
        Change("a", sequence=sequence, stream_created=moment)
        for sequence, moment in zip(sequences, created, strict=True)
    )
    why = r"key='a': sequence \d+ says .* sequence \d+ does not, so nothing tells which is newer.*stream_created"
    with pytest.raises(ConfigError, match=why):
        newer([change], {"a": Current(b"", stored.sequence or 0, 17, None, stored.stream_created)})
    with pytest.raises(ConfigError, match=why):
        newest([stored, change])


def test_the_stream_of_a_sequence_is_part_of_what_a_change_is_recognised_by() -> None:
    change = Change("a", b"1", sequence=5, stream_created=100)
    assert is_written(change, Stored("s", 9, b"1", "put", 5, None, None, 100), "")
    assert not is_written(change, Stored("s", 9, b"1", "put", 5, None, None, 200), "")
    assert not is_written(change, Stored("s", 9, b"1", "put", 5, None), "")
