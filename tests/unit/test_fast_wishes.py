"""When a fast publisher ends its batch because somebody waits. Time is stated."""

from __future__ import annotations

import pytest

from jetspark.errors import ConfigError
from jetspark.publish.fast_places import FastPlaces
from jetspark.publish.fast_wishes import FastWishes


def _wishes(accepted: int, sent: int) -> tuple[FastPlaces, FastWishes]:
    places = FastPlaces()
    places.accept([("s", b"x")] * accepted)
    places.send(sent)
    return places, FastWishes(places)


def test_an_end_is_needed_when_all_that_is_wanted_is_sent_and_not_stored() -> None:
    places, wishes = _wishes(accepted=5, sent=4)
    seen = [wishes.need_an_end]
    assert wishes.flush() == 5
    seen.append(wishes.need_an_end)
    places.send(1)
    seen.append(wishes.need_an_end)
    places.publish(places.sent, 5)
    seen.append(wishes.need_an_end)
    assert seen == [False, False, True, False]


def test_the_highest_position_counts_and_none_above_what_is_accepted() -> None:
    _, wishes = _wishes(accepted=5, sent=5)
    wishes.flush_to(3)
    wishes.flush_to(1)
    assert wishes._flush_to == 3
    wishes.want(100, 1.0, 0.0)
    assert wishes._flush_to == 5


def test_lingering_ends_when_nothing_was_accepted_for_that_long() -> None:
    _, wishes = _wishes(accepted=5, sent=5)
    wishes.want(5, 10.0, 0.5)
    assert (wishes.next_deadline(), wishes.need_an_end) == (10.5, False)
    wishes.on_accepted(10.25)
    assert wishes.next_deadline() == 10.75
    wishes.on_time(10.5, is_ack_on_its_way=False)
    assert not wishes.need_an_end
    wishes.on_time(10.75, is_ack_on_its_way=False)
    assert (wishes.next_deadline(), wishes.need_an_end) == (None, True)


def test_lingering_goes_on_while_an_acknowledgement_will_tell() -> None:
    _, wishes = _wishes(accepted=5, sent=5)
    wishes.want(5, 10.0, 0.5)
    wishes.on_time(10.5, is_ack_on_its_way=True)
    assert (wishes.next_deadline(), wishes.need_an_end) == (11.0, False)


def test_an_acknowledgement_makes_the_wish_needless() -> None:
    places, wishes = _wishes(accepted=5, sent=5)
    wishes.want(3, 10.0, 0.5)
    places.publish(places.sent, 2)
    wishes.on_published()
    assert wishes.next_deadline() == 10.5
    places.publish(places.sent, 1)
    wishes.on_published()
    assert wishes.next_deadline() is None


def test_a_wish_for_nothing_ends_no_batch() -> None:
    _, wishes = _wishes(accepted=5, sent=5)
    wishes.want(0, 10.0, 0.5)
    wishes.on_time(10.5, is_ack_on_its_way=False)
    wishes.want(0, 11.0, 0.0)
    assert not wishes.need_an_end


def test_who_does_not_linger_does_not_begin_when_something_is_accepted() -> None:
    _, wishes = _wishes(accepted=1, sent=1)
    wishes.on_accepted(1.0)
    assert wishes.next_deadline() is None


@pytest.mark.parametrize(("position", "linger_s"), [(-1, 0.0), (1, -1.0)])
def test_what_cannot_be_wanted_is_refused(position: int, linger_s: float) -> None:
    _, wishes = _wishes(accepted=1, sent=1)
    with pytest.raises(ConfigError):
        wishes.want(position, 1.0, linger_s)
