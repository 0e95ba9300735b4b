"""Messages as publishers get them: what is one, and how many are taken at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.connections import connected

from jetspark.errors import ConfigError, InvalidSubject
from jetspark.publish.outgoing import (
    CHUNK_BYTES,
    CHUNK_MESSAGES,
    Item,
    all_but_last,
    are_plain,
    each_of,
    last_message,
    plain,
    some_of,
    take,
    unsendable,
)

MAX_PAYLOAD = 100
CONNECTION = connected(max_payload=MAX_PAYLOAD)


# ---- what is a message -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", [("a b", b""), ("a.*", b"x", None), ("", b""), ["a..b", b""], (["a"], b""), (7, b"")])
def test_a_message_with_a_wrong_subject_is_refused_for_its_subject(item: Any) -> None:
    error = unsendable(item)
    assert isinstance(error, InvalidSubject)
    assert repr(item[0]) in str(error)


@pytest.mark.parametrize("item", [None, 7, (), ("a",), ("a", b"", None, 1), "text"])
def test_what_is_no_message_is_shown_with_what_is_expected(item: Any) -> None:
    error = unsendable(item)
    assert str(error) == f"items={item!r}: expected each to be (subject, data), or (subject, data, headers)"
    assert str(unsendable(item, "messages", "pairs")) == f"messages={item!r}: expected pairs"


def test_a_plain_message_has_two_parts() -> None:
    assert plain(["a", b"x"]) == ("a", b"x")
    for wrong in (("a", b"x", None), ("a",), None, 7):
        with pytest.raises(ConfigError, match=r"messages=.*: expected each to be \(subject, data\)$"):
            plain(wrong)


def test_the_last_message_of_a_commit_needs_a_subject_for_its_data_or_headers() -> None:
    assert last_message("a", b"", None) == ("a", b"", None)
    assert last_message("", b"x", {"A": "1"}) == ("", b"x", {"A": "1"})
    assert last_message(None, b"", None) is None
    for data, headers in ((b"x", None), (b"", {"A": "1"})):
        with pytest.raises(ConfigError, match="no subject"):
            last_message(None, data, headers)


def test_items_come_from_anything_that_can_be_iterated_over() -> None:
    assert list(each_of([("a", b"")])) == [("a", b"")]
    with pytest.raises(ConfigError, match=r"items=7: expected messages, each \(subject, data\)"):
        each_of(cast(Any, 7))


@pytest.mark.parametrize("beside", [0, 30])
def test_messages_are_plain_when_they_fit_with_the_headers_they_will_get(beside: int) -> None:
    fitting = ("a", b"x" * (MAX_PAYLOAD - beside))
    assert are_plain(CONNECTION, [("a", b""), fitting], beside=beside)
    assert not are_plain(CONNECTION, [("a", b""), ("a", fitting[1] + b"x")], beside=beside)
    assert are_plain(CONNECTION, [("a", b"x" * MAX_PAYLOAD)])


@pytest.mark.parametrize(
    "item", [("a", b"", None), ("a",), ["a", b""], ("a", bytearray()), ("a", "x"), ("a b", b""), (7, b""), 7, None]
)
def test_one_message_that_is_not_plain_is_enough(item: Any) -> None:
    assert are_plain(CONNECTION, [("a", b"")])
    assert not are_plain(CONNECTION, [("a", b""), item])
    assert not are_plain(CONNECTION, [item])


# ---- how many at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_messages", "max_bytes", "taken"),
    [
        (9, 99, 4),
        (2, 99, 2),
        (9, 6, 4),
        (9, 5, 3),  # to the last byte
        (9, 4, 3),  # the last one may be larger than what is left
        (9, 3, 2),
        (9, 2, 2),
        (9, 1, 1),
    ],
)
def test_taking_ends_with_the_message_that_reaches_the_bound(max_messages: int, max_bytes: int, taken: int) -> None:
    items: list[Item] = [("a", b"1"), ("b", b"22"), ("c", b"33"), ("d", b"4")]
    chunk: list[Item] = []
    take(iter(items), chunk, max_messages, max_bytes)
    assert chunk == items[:taken]


@pytest.mark.parametrize("wrong", [7, ("a",), ("a", 7)])
def test_what_is_no_message_is_taken_last(wrong: Any) -> None:
    rest = iter([("a", b"1"), wrong, ("b", b"2")])
    chunk: list[Item] = []
    take(cast("Iterator[Item]", rest), chunk, 9, 99)
    assert chunk == [("a", b"1"), wrong]
    assert list(rest) == [("b", b"2")]


@given(
    sizes=st.lists(st.integers(0, 5), max_size=12),
    at=st.integers(0, 12),
    max_messages=st.integers(1, 13),
    max_bytes=st.integers(1, 30),
)
def test_some_of_a_list_are_those_that_would_be_taken_from_an_iterator(
    sizes: list[int], at: int, max_messages: int, max_bytes: int
) -> None:
    items: list[Item] = [(f"s.{number}", b"x" * size) for number, size in enumerate(sizes)]
    taken: list[Item] = []
    take(iter(items[at:]), taken, max_messages, max_bytes)
    assert some_of(items, at, max_messages, max_bytes) == taken


def test_a_message_that_uses_the_last_byte_is_the_last_also_before_empty_ones() -> None:
    items: list[Item] = [("a", b"1"), ("b", b"22"), ("c", b""), ("d", b"")]
    assert some_of(items, 0, 9, 3) == items[:2]
    assert some_of(items, 1, 9, 3) == items[1:]


def test_each_of_many_messages_is_handed_on_once_but_for_the_last() -> None:
    items: list[Item] = [(f"s.{number}", b"x" * (number % 700)) for number in range(3 * CHUNK_MESSAGES)]
    held: list[Item] = []
    chunks = list(all_but_last(iter(items), held, lambda: 10_000))
    assert [item for chunk in chunks for item in chunk] == items[:-1]
    assert held == items[-1:]
    # The one that was held back is the first of the next chunk.
    assert [len(chunk) for chunk in chunks] == [CHUNK_MESSAGES - 1, CHUNK_MESSAGES, CHUNK_MESSAGES, 0]


@pytest.mark.parametrize(("room", "largest"), [(-1, 1), (0, 1), (1, 1), (7, 7)])
def test_a_chunk_is_no_larger_than_the_room_and_never_empty_for_want_of_it(room: int, largest: int) -> None:
    items: list[Item] = [(f"s.{number}", b"") for number in range(20)]
    held: list[Item] = []
    chunks = list(all_but_last(iter(items), held, lambda: room))
    assert [item for chunk in chunks for item in chunk] + held == items
    assert max(map(len, chunks)) == largest


def test_a_chunk_is_bounded_in_bytes() -> None:
    items: list[Item] = [("a", b"x" * (CHUNK_BYTES // 4))] * 9
    held: list[Item] = []
    assert [len(chunk) for chunk in all_but_last(iter(items), held, lambda: 100)] == [3, 4, 1, 0]


def test_what_came_before_an_iterator_raised_is_handed_on() -> None:
    def failing() -> Iterator[Item]:
        yield "a", b"1"
        yield "a", b"2"
        raise ZeroDivisionError

    held: list[Item] = [("a", b"0")]
    chunks = all_but_last(failing(), held, lambda: 10)
    assert next(chunks) == [("a", b"0"), ("a", b"1"), ("a", b"2")]
    with pytest.raises(ZeroDivisionError):
        next(chunks)
