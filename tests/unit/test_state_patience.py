"""The one rule of loops that outlast an outage. Time is stated."""

from __future__ import annotations

import pytest

from jetspark.core.backoff import Backoff
from jetspark.state.patience import Attempts


def _times(patience: Attempts, since: float, takes_s: float = 0.0) -> list[float]:
    """When something is tried that fails each time, as long as the patience goes."""
    now, times = since, [since]
    while (wait_s := patience.wait_s(now + takes_s)) is not None:
        now = round(now + takes_s + wait_s, 6)
        times.append(now)
    return times


def test_waits_double_and_the_last_attempt_is_made_when_the_time_is_over() -> None:
    patience = Attempts(4.0, Backoff(first_s=0.5, max_s=1.0))
    patience.progress(100.0)
    assert _times(patience, 100.0) == [100.0, 100.5, 101.5, 102.5, 103.5, 104.0]


def test_progress_begins_the_time_and_the_waits_anew() -> None:
    patience = Attempts(1.0, Backoff(first_s=0.5, max_s=8.0))
    patience.progress(0.0)
    assert _times(patience, 0.0) == [0.0, 0.5, 1.0]
    patience.progress(50.0)
    assert _times(patience, 50.0) == [50.0, 50.5, 51.0]


def test_the_time_begins_with_the_first_failure_where_nobody_said_otherwise() -> None:
    assert _times(Attempts(1.0, Backoff(first_s=0.5, max_s=8.0)), 70.0) == [70.0, 70.5, 71.0]


def test_no_wait_is_shorter_than_the_first_so_that_an_end_is_no_storm_of_attempts() -> None:
    patience = Attempts(1.01, Backoff(first_s=0.5, max_s=8.0))
    patience.progress(0.0)
    assert _times(patience, 0.0) == [0.0, 0.5, 1.01]
    patience = Attempts(0.6, Backoff(first_s=0.5, max_s=8.0))
    patience.progress(0.0)
    assert _times(patience, 0.0) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("takes_s", [0.2, 3.0])
def test_time_that_attempts_take_counts(takes_s: float) -> None:
    patience = Attempts(2.0, Backoff(first_s=0.5, max_s=0.5))
    patience.progress(0.0)
    assert _times(patience, 0.0, takes_s) == ([0.0, 0.7, 1.4, 2.1] if takes_s < 1 else [0.0])
