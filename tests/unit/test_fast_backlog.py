"""Messages that a fast publisher keeps: their bytes, their places, the positions callers wait for. Time is stated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.core.connection import Connection
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.errors import ConfigError, InvalidSubject, PayloadTooLarge
from jetspark.publish.fast_backlog import KEPT_OVERHEAD_BYTES, FastEncoder, FastStages, FlushRequests, has_id
from jetspark.publish.outgoing import Item


def _encoder(id_prefix: str | None = None) -> FastEncoder:
    connection = Connection(ConnectOptions(), parse_servers("a"), inbox="_INBOX.me", jitter=lambda: 0.0)
    return FastEncoder(connection, id_prefix)


def _kept(keeping: FastEncoder, *items: Any, position: int = 7) -> list[Item]:
    kept: list[Item] = []
    keeping.keep(items, position, kept)
    return kept


def test_without_ids_messages_stay_as_they_are() -> None:
    keeping = _encoder()
    assert not keeping.has_ids
    assert _kept(keeping, ("s", b"1"), ("s", b"2")) == [("s", b"1"), ("s", b"2")]


def test_data_and_headers_are_made_bytes() -> None:
    kept = _kept(_encoder(), ("s", bytearray(b"1")), ("s", bytearray(b"2"), {"A": "b"}))
    assert kept == [("s", b"1"), ("s", b"2", b"NATS/1.0\r\nA: b\r\n\r\n")]
    assert [type(item[1]) for item in kept] == [bytes, bytes]


def test_an_id_is_the_prefix_and_the_position_with_headers_and_without() -> None:
    keeping = _encoder("me")
    assert keeping.has_ids
    assert _kept(keeping, ("s", b"1"), ("s", b"2")) == [
        ("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: me-7\r\n\r\n"),
        ("s", b"2", b"NATS/1.0\r\nNats-Msg-Id: me-8\r\n\r\n"),
    ]
    first, second = _kept(keeping, ("s", b"1"), ("t", b"2", {"A": "b"}))
    assert first == ("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: me-7\r\n\r\n")
    assert second == ("t", b"2", b"NATS/1.0\r\nA: b\r\nNats-Msg-Id: me-8\r\n\r\n")


def test_an_id_of_the_caller_stays() -> None:
    kept = _kept(_encoder("me"), ("s", b"1", {"Nats-Msg-Id": "mine"}))
    assert kept == [("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: mine\r\n\r\n")]


def test_checked_messages_get_their_ids_all_the_same() -> None:
    kept: list[Item] = []
    _encoder("me").keep([("s", b"1")], 7, kept, are_checked=True)
    assert kept == [("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: me-7\r\n\r\n")]


def test_checked_messages_without_ids_stay_as_they_are_and_their_headers_are_made_bytes() -> None:
    keeping = _encoder()
    kept: list[Item] = []
    keeping.keep([("s", b"1"), ("s", b"2")], 7, kept, are_checked=True)
    keeping.keep([("s", b"3", {"A": "b"})], 9, kept, are_checked=True)
    assert kept == [("s", b"1"), ("s", b"2"), ("s", b"3", b"NATS/1.0\r\nA: b\r\n\r\n")]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (("a b", b""), InvalidSubject),
        (("s", b"x" * (1 << 20) + b"x"), PayloadTooLarge),
        (("s", b"x" * (1 << 20), {"A": "b"}), PayloadTooLarge),
        (("s", "text"), ConfigError),
        (("s", "text", {"A": "b"}), ConfigError),
        ("ab", ConfigError),
        (("s",), ConfigError),
        (7, ConfigError),
    ],
    ids=["subject", "data", "data and headers", "no bytes", "no bytes with headers", "text", "short", "number"],
)
@pytest.mark.parametrize("id_prefix", [None, "me"])
def test_those_before_one_that_can_never_be_sent_are_kept(
    bad: Any, error: type[Exception], id_prefix: str | None
) -> None:
    kept: list[Item] = []
    with pytest.raises(error):
        _encoder(id_prefix).keep([("s", b"1"), bad, ("s", b"3")], 1, kept)
    assert [item[1] for item in kept] == [b"1"]


# ---- places ----------------------------------------------------------------------------------------------------------


def _item(number: int) -> Item:
    return "s", b"%d" % number


def _places(count: int) -> FastStages:
    places = FastStages()
    places.accept([_item(number) for number in range(1, count + 1)])
    return places


def test_messages_move_on_in_order() -> None:
    places = _places(5)
    places.send(4)
    assert places.claim(3) == [_item(1), _item(2), _item(3)]
    places.publish(places.claimed, 2)
    assert (places.published, places.sent_to, places.accepted, places.pending) == (2, 4, 5, 3)
    assert [list(each) for each in (places.claimed, places.sent, places.backlog)] == [
        [_item(3)],
        [_item(4)],
        [_item(5)],
    ]


def test_what_is_sent_again_is_in_front_in_order() -> None:
    places = _places(5)
    places.send(4)
    places.claim(2)
    places.send_again(places.sent)
    assert list(places.backlog) == [_item(3), _item(4), _item(5)]
    places.send_again(places.claimed)
    assert list(places.backlog) == [_item(number) for number in range(1, 6)]
    assert (len(places.sent), len(places.claimed), places.sent_to) == (0, 0, 0)


def test_what_is_kept_costs_data_headers_and_a_place() -> None:
    places = FastStages()
    places.accept([("s", b"123")])
    assert places.pending_bytes == KEPT_OVERHEAD_BYTES + 3
    places.accept([("s", b"123", b"block"), ("s", b"")])
    assert places.pending_bytes == 3 * KEPT_OVERHEAD_BYTES + 11
    places.send(3)
    places.publish(places.sent, 2)
    assert places.pending_bytes == KEPT_OVERHEAD_BYTES
    places.accept([("s", b"12", b"block"), ("s", b"", b"other")])
    assert places.pending_bytes == 3 * KEPT_OVERHEAD_BYTES + 12


def test_a_message_with_an_id_can_be_recognised() -> None:
    assert has_id(("s", b"", b"NATS/1.0\r\nNats-Msg-Id: a\r\n\r\n"))
    assert not has_id(("s", b"", b"NATS/1.0\r\nOther: Nats-Msg-Id:\r\n\r\n"))
    assert not has_id(("s", b""))


@given(
    st.lists(
        st.tuples(st.sampled_from(["accept", "send", "claim", "publish", "publish sent", "again"]), st.integers(0, 4))
    )
)
def test_nothing_is_lost_doubled_or_overtaken_whatever_is_done(steps: list[tuple[str, int]]) -> None:
    places, accepted = FastStages(), 0
    for step, number in steps:
        if step == "accept":
            places.accept([_item(accepted + place) for place in range(1, number + 1)])
            accepted += number
        elif step == "send":
            places.send(min(number, len(places.backlog)))
        elif step == "claim":
            places.claim(min(number, len(places.sent)))
        elif step == "publish":
            places.publish(places.claimed, min(number, len(places.claimed)))
        elif step == "publish sent" and not places.claimed:
            places.publish(places.sent, min(number, len(places.sent)))
        elif step == "again":
            places.send_again(places.sent)
            places.send_again(places.claimed)
        assert places.accepted == accepted
        assert places.unpublished() == [_item(each) for each in range(places.published + 1, accepted + 1)]
        assert places.pending_bytes == sum(KEPT_OVERHEAD_BYTES + len(item[1]) for item in places.unpublished())


# ---- flush requests --------------------------------------------------------------------------------------------------


def _requests(accepted: int, sent: int) -> tuple[FastStages, FlushRequests]:
    places = FastStages()
    places.accept([("s", b"x")] * accepted)
    places.send(sent)
    return places, FlushRequests(places)


def test_an_end_is_needed_when_all_that_is_wanted_is_sent_and_not_stored() -> None:
    places, requests = _requests(accepted=5, sent=4)
    seen = [requests.need_an_end]
    assert requests.flush() == 5
    seen.append(requests.need_an_end)
    places.send(1)
    seen.append(requests.need_an_end)
    places.publish(places.sent, 5)
    seen.append(requests.need_an_end)
    assert seen == [False, False, True, False]


def test_the_highest_position_counts_and_none_above_what_is_accepted() -> None:
    _, requests = _requests(accepted=5, sent=5)
    requests.flush_to(3)
    requests.flush_to(1)
    assert requests._flush_to == 3
    requests.request(100, 1.0, 0.0)
    assert requests._flush_to == 5


def test_lingering_ends_when_nothing_was_accepted_for_that_long() -> None:
    _, requests = _requests(accepted=5, sent=5)
    requests.request(5, 10.0, 0.5)
    assert (requests.next_deadline(), requests.need_an_end) == (10.5, False)
    requests.on_accepted(10.25)
    assert requests.next_deadline() == 10.75
    requests.on_time(10.5, is_ack_on_its_way=False)
    assert not requests.need_an_end
    requests.on_time(10.75, is_ack_on_its_way=False)
    assert (requests.next_deadline(), requests.need_an_end) == (None, True)


def test_lingering_goes_on_while_an_acknowledgement_will_tell() -> None:
    _, requests = _requests(accepted=5, sent=5)
    requests.request(5, 10.0, 0.5)
    requests.on_time(10.5, is_ack_on_its_way=True)
    assert (requests.next_deadline(), requests.need_an_end) == (11.0, False)


def test_an_acknowledgement_makes_the_wish_needless() -> None:
    places, requests = _requests(accepted=5, sent=5)
    requests.request(3, 10.0, 0.5)
    places.publish(places.sent, 2)
    requests.on_published()
    assert requests.next_deadline() == 10.5
    places.publish(places.sent, 1)
    requests.on_published()
    assert requests.next_deadline() is None


def test_a_wish_for_nothing_ends_no_batch() -> None:
    _, requests = _requests(accepted=5, sent=5)
    requests.request(0, 10.0, 0.5)
    requests.on_time(10.5, is_ack_on_its_way=False)
    requests.request(0, 11.0, 0.0)
    assert not requests.need_an_end


def test_who_does_not_linger_does_not_begin_when_something_is_accepted() -> None:
    _, requests = _requests(accepted=1, sent=1)
    requests.on_accepted(1.0)
    assert requests.next_deadline() is None


@pytest.mark.parametrize(("position", "linger_s"), [(-1, 0.0), (1, -1.0)])
def test_what_cannot_be_wanted_is_refused(position: int, linger_s: float) -> None:
    _, requests = _requests(accepted=1, sent=1)
    with pytest.raises(ConfigError):
        requests.request(position, 1.0, linger_s)
