"""Who waits for which PONG."""

from __future__ import annotations

from jetspark.core.pings import Pings, SentPing
from jetspark.errors import ConnectionLost


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
