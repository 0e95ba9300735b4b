"""When a schedule of the model fires. A real server agrees: tests/conformance/test_model_ageing.py."""

from __future__ import annotations

import datetime

import pytest

from jetspark.testing.model.schedules import due_text, is_zone, next_due

BERLIN, SANTIAGO, CAIRO = "Europe/Berlin", "America/Santiago", "Africa/Cairo"


def following(pattern: str, zone: str | None, after: str) -> str | None:
    due = next_due(pattern, zone, datetime.datetime.fromisoformat(after).timestamp())
    return None if due is None else due_text(due, zone)


@pytest.mark.parametrize(
    ("pattern", "after", "expected"),
    [
        # Intervals count from the nearest whole second, cron from the next one: as measured on 2.15.1.
        ("@every 2s", "2026-11-17T06:18:43.300Z", "2026-11-17T06:18:45Z"),
        ("@every 2s", "2026-11-17T06:18:48.600Z", "2026-11-17T06:18:51Z"),
        ("@every 1.5s", "2026-11-17T06:18:50.500Z", "2026-11-17T06:18:52.5Z"),
        ("@every 1m0.25s", "2026-11-17T06:18:50Z", "2026-11-17T06:19:50.25Z"),
        ("* * * * * *", "2026-11-17T06:18:48.600Z", "2026-11-17T06:18:49Z"),
        ("* * * * * *", "2026-11-17T06:18:49Z", "2026-11-17T06:18:50Z"),
        ("@hourly", "2026-12-31T23:00:00Z", "2027-01-01T00:00:00Z"),
        ("@daily", "2026-11-30T00:00:00Z", "2026-12-01T00:00:00Z"),
        ("@weekly", "2026-11-17T06:18:49Z", "2026-11-22T00:00:00Z"),
        ("@monthly", "2026-11-17T06:18:49Z", "2026-12-01T00:00:00Z"),
        ("@yearly", "2026-11-17T06:18:49Z", "2027-01-01T00:00:00Z"),
        ("0 0 0 29 2 *", "2026-11-17T06:18:49Z", "2028-02-29T00:00:00Z"),
        ("0 30 9 * * MON-FRI", "2026-11-20T09:30:00Z", "2026-11-23T09:30:00Z"),
        # With both a day of the month and a weekday one is enough, unless one of them is a star.
        ("0 0 0 13 * FRI", "2026-11-17T00:00:00Z", "2026-11-20T00:00:00Z"),
        ("0 0 0 */2 * FRI", "2026-11-20T00:00:00Z", "2026-11-21T00:00:00Z"),
        ("0 0 0 * * FRI", "2026-11-20T00:00:00Z", "2026-11-27T00:00:00Z"),
        ("5/25 * * * * *", "2026-11-17T06:18:30Z", "2026-11-17T06:18:55Z"),
    ],
)
def test_the_next_time_is_that_of_the_server(pattern: str, after: str, expected: str) -> None:
    assert following(pattern, None, after) == expected


@pytest.mark.parametrize(
    ("zone", "pattern", "after", "expected"),
    [
        (BERLIN, "0 30 9 * * *", "2026-10-24T12:00:00Z", "2026-10-25T09:30:00+01:00"),
        # 2:30 is skipped on March 28, and comes twice on October 31.
        (BERLIN, "0 30 2 * * *", "2027-03-27T12:00:00Z", "2027-03-29T02:30:00+02:00"),
        (BERLIN, "0 30 2 * * *", "2027-10-30T12:00:00Z", "2027-10-31T02:30:00+02:00"),
        (BERLIN, "0 30 2 * * *", "2027-10-31T00:30:00Z", "2027-10-31T02:30:00+01:00"),
        # Midnight is skipped: in Africa the day begins at one, in America the server misses it.
        (CAIRO, "0 0 5 30 4 *", "2026-11-17T00:00:00Z", "2027-04-30T05:00:00+03:00"),
        (SANTIAGO, "0 0 5 * 9 SUN", "2026-11-17T00:00:00Z", "2027-09-12T05:00:00-03:00"),
        ("Europe/London", "@yearly", "2026-11-17T00:00:00Z", "2027-01-01T00:00:00Z"),
    ],
)
def test_cron_follows_the_clock_of_its_time_zone(zone: str, pattern: str, after: str, expected: str) -> None:
    assert following(pattern, zone, after) == expected


@pytest.mark.parametrize("pattern", [", * * * * *", "0 0 0 30 2 *", "* * * * *", "", "@at", "@every", "@often"])
def test_what_never_fires_is_no_schedule(pattern: str) -> None:
    assert next_due(pattern, None, 0.0) is None


@pytest.mark.parametrize("name", ["", "Mars/Crater", "Europe", "../x", "/etc"])
def test_what_is_no_time_zone_is_told_from_one(name: str) -> None:
    assert (is_zone(name), is_zone(BERLIN)) == (False, True)
