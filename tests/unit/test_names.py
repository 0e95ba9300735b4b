"""Names that no other connection uses."""

from __future__ import annotations

import random

import pytest

from jetspark.core.requests import Names, new_inbox
from jetspark.core.subjects import validate_subject
from jetspark.errors import InvalidSubject


def test_an_inbox_is_a_valid_subject_below_its_prefix() -> None:
    chance = random.Random(1)
    for _ in range(1000):
        inbox = new_inbox("_INBOX", chance.getrandbits(128))
        prefix, token = validate_subject(inbox).split(".")
        assert prefix == "_INBOX"
        assert token.isalnum()
        assert 5 < len(token) <= 11


def test_different_bits_give_different_inboxes() -> None:
    small = range(10_000)
    large = range((1 << 128) - 10_000, 1 << 128)
    assert len({new_inbox("i", bits) for numbers in (small, large) for bits in numbers}) == 20_000


def test_bits_beyond_64_are_left_out() -> None:
    assert new_inbox("i", (1 << 64) + 5) == new_inbox("i", 5)


def test_no_bits_are_a_token_all_the_same() -> None:
    assert new_inbox("i", 0) == "i.0"


def test_a_prefix_of_several_tokens_is_kept() -> None:
    assert new_inbox("_INBOX.billing", 1) == "_INBOX.billing.1"


@pytest.mark.parametrize("prefix", ["", "a b", "a.", "a.*", ">"])
def test_a_prefix_that_is_no_subject_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidSubject):
        new_inbox(prefix, 1)


def test_no_number_is_used_twice_whatever_it_is_for() -> None:
    names = Names("_INBOX.me")
    assert [names.new_inbox(), names.new_name(), names.new_batch()] == [
        "_INBOX.me.many.1",
        "me-2",
        ("_INBOX", "me-3"),
    ]
    assert names.next_token() == 4


def test_names_of_two_connections_differ() -> None:
    one, other = Names("_INBOX.a"), Names("_INBOX.b")
    assert one.new_name() != other.new_name()
    assert one.new_batch() != other.new_batch()
    assert one.new_inbox() != other.new_inbox()


def test_a_prefix_of_several_tokens_stays_in_front_of_a_batch() -> None:
    assert Names("acc.one.me").new_batch() == ("acc.one", "me-1")
