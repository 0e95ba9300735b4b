"""Names that no other connection uses."""

from __future__ import annotations

from jetspark.core.names import Names


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
