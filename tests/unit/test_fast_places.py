"""Where the messages of a fast publisher are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jetspark.publish.fast_places import KEPT_OVERHEAD_BYTES, FastPlaces, has_id
from jetspark.publish.outgoing import Item


def _item(number: int) -> Item:
    return "s", b"%d" % number


def _places(count: int) -> FastPlaces:
    places = FastPlaces()
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
    places = FastPlaces()
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
    places, accepted = FastPlaces(), 0
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
