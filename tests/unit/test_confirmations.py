"""PONGs and the calls that wait for them; publishes that the server has denied."""

from __future__ import annotations

import gc

import pytest
from support.connections import connected

from jetspark.core.confirmations import MAX_SUBJECTS, DeniedPublishes, Pings, SentPing
from jetspark.core.connection import Connection
from jetspark.core.subscription import Done, Failed
from jetspark.errors import ConnectionLost, PermissionDenied


def test_a_message_that_was_not_sent_fails_the_flushes_after_it_and_no_other() -> None:
    pings = Pings(10.0, 2)
    before, first, later, own = SentPing("a", 4), SentPing("b", 5), SentPing("c", 6), SentPing(None, 7)
    for ping in (before, first, later, own):
        pings.add(ping)
    error = ConnectionLost("not sent")
    assert pings.fail_from(5, error) is True
    assert [ping.error for ping in pings] == [None, error, error, None]
    assert pings.fail_from(6, ConnectionLost("another")) is True
    assert later.error is error
    assert pings.fail_from(7, error) is False


# ---- denied ----------------------------------------------------------------------------------------------------------


class Claims:
    def __init__(self, *subjects: str) -> None:
        self.subjects = subjects

    def publishes_to(self, subject: str) -> bool:
        return subject in self.subjects


def _add(
    denials: DeniedPublishes, subject: str, *, is_raised: bool = False, published: int = 0, confirmed: int = 0
) -> bool:
    error = PermissionDenied("publish", subject)
    return denials.add(error, is_raised=is_raised, published=published, confirmed=confirmed)


def test_a_batch_finds_the_first_denial_of_its_own_subjects_since_it_began() -> None:
    denials = DeniedPublishes()
    _add(denials, "s.a")
    began = denials.count
    own = Claims("s.a", "s.b", "s.c")
    assert denials.since(began, own.publishes_to) is None
    for subject in ("other", "s.b", "s.c"):
        _add(denials, subject)
    found = denials.since(began, own.publishes_to)
    assert found is not None
    assert (found.operation, found.subject) == ("publish", "s.b")
    assert denials.since(began, own.publishes_to) is not found  # each caller raises an error of its own
    assert denials.since(denials.count, own.publishes_to) is None
    _add(denials, "s.a")
    assert denials.since(denials.count - 1, own.publishes_to) is not None


def test_only_so_many_subjects_are_remembered() -> None:
    denials = DeniedPublishes()
    for number in range(MAX_SUBJECTS + 1):
        _add(denials, f"s.{number}", is_raised=True, published=10)
    assert denials.since(0, Claims("s.0").publishes_to) is None
    assert denials.since(0, Claims("s.1").publishes_to) is not None
    assert not _add(denials, "s.0", confirmed=5)
    assert _add(denials, f"s.{MAX_SUBJECTS}", confirmed=5)


def test_a_denial_is_told_by_whoever_published_to_its_subject_while_it_exists() -> None:
    denials, claims = DeniedPublishes(), Claims("s.a")
    denials.watch(claims)
    assert (_add(denials, "s.a"), _add(denials, "s.b")) == (True, False)
    del claims
    gc.collect()
    assert not _add(denials, "s.a")


def test_a_claimant_that_is_over_has_told_of_what_is_published_by_then() -> None:
    denials, claims = DeniedPublishes(), Claims("s.a", "s.b")
    _add(denials, "s.b")
    denials.watch(claims)
    before = denials.count
    assert _add(denials, "s.a", published=10, confirmed=2)
    assert denials.leave(claims, before, 20)
    assert [_add(denials, "s.a", published=30, confirmed=confirmed) for confirmed in (19, 20)] == [True, False]
    assert not _add(denials, "s.b", published=30, confirmed=2)  # it was denied before
    assert not denials.leave(claims, denials.count, 40)
    assert not _add(denials, "s.a", published=50, confirmed=30)


@pytest.mark.parametrize(("confirmed", "is_raised"), [(9, True), (10, False)])
def test_what_was_published_before_the_first_denial_was_told_needs_no_telling(confirmed: int, is_raised: bool) -> None:
    denials = DeniedPublishes()
    assert _add(denials, "s.a", is_raised=True, published=10, confirmed=2)
    assert _add(denials, "s.a", published=12, confirmed=confirmed) is is_raised


def test_the_latest_denial_of_a_subject_decides_which_one_is_forgotten_first() -> None:
    denials = DeniedPublishes()
    assert denials.count == 0
    for subject in ("s.a", *map(str, range(MAX_SUBJECTS - 1)), "s.a", "one more"):
        _add(denials, subject)
    assert denials.count == MAX_SUBJECTS + 2
    assert denials.since(0, "s.a".__eq__) is not None
    assert denials.since(0, "0".__eq__) is None


def _deny(connection: Connection, subject: bytes) -> None:
    connection.receive_data(b"-ERR 'Permissions Violation for Publish to \"%b\"'\r\n" % subject)


def test_a_flush_tells_of_a_denial_that_no_call_has_raised() -> None:
    connection = connected()
    connection.request("first", "s.a", b"", None)
    connection.request("second", "s.a", b"", None)
    connection.flush("flush")
    _deny(connection, b"s.a")
    _deny(connection, b"s.a")  # of the second one, which the first denial has ended
    assert connection.data_to_send().count(b"PING\r\n") == 1  # the flush sent it
    connection.receive_data(b"PONG\r\n")
    told = [event for event in connection.events() if isinstance(event, Done | Failed)]
    assert [(type(each), each.handle) for each in told] == [(Failed, "first"), (Failed, "second"), (Done, "flush")]
    connection.publish("s.a", b"")
    connection.flush("flush")
    _deny(connection, b"s.a")
    connection.receive_data(b"PONG\r\n")
    [failed] = [event for event in connection.events() if isinstance(event, Failed)]
    assert (failed.handle, isinstance(failed.error, PermissionDenied)) == ("flush", True)


def test_what_is_published_behind_a_denial_is_told_although_nothing_was_confirmed_between() -> None:
    connection = connected()
    connection.request("first", "s.a", b"", None)
    connection.data_to_send()
    _deny(connection, b"s.a")
    _deny(connection, b"s.a")
    connection.publish("s.a", b"")
    connection.flush("flush")
    assert connection.data_to_send() == b"PING\r\nPUB s.a 0\r\n\r\nPING\r\n"
    connection.receive_data(b"PONG\r\n")
    _deny(connection, b"s.a")
    connection.receive_data(b"PONG\r\n")
    told = [event for event in connection.events() if isinstance(event, Done | Failed)]
    assert [(type(each), each.handle) for each in told] == [(Failed, "first"), (Failed, "flush")]
