"""Who may read in place of the connection's thread, and for how long; time is stated."""

from __future__ import annotations

from jetspark.core.lease import LEASE_S, ReadingLease


def test_one_holder_at_a_time() -> None:
    lease = ReadingLease()
    assert lease.take(1, now=100.0)
    assert lease.take(1, now=100.1)  # its holder may ask again
    assert not lease.take(2, now=100.2)
    assert lease.holder == 1
    lease.end()
    assert lease.holder == 0
    assert lease.take(2, now=100.2)


def test_a_holder_that_is_silent_for_too_long_loses_it() -> None:
    lease = ReadingLease()
    lease.take(1, now=100.0)
    lease.lapse(now=100.0 + LEASE_S * 0.99)
    assert lease.holder == 1
    lease.lapse(now=100.0 + LEASE_S)
    assert lease.holder == 0


def test_another_one_takes_it_from_a_silent_holder() -> None:
    lease = ReadingLease()
    lease.take(1, now=100.0)
    assert lease.take(2, now=100.0 + LEASE_S)
    assert lease.holder == 2


def test_a_holder_that_renews_it_keeps_it() -> None:
    lease = ReadingLease()
    lease.take(1, now=100.0)
    lease.renew(now=100.0 + LEASE_S)
    lease.lapse(now=100.0 + LEASE_S * 1.99)
    assert lease.holder == 1
    assert not lease.take(2, now=100.0 + LEASE_S * 1.99)
