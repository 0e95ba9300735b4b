"""Attempts to open a fast batch. Time is stated."""

from __future__ import annotations

import itertools

import pytest

from jetspark.errors import JetStreamUnavailable, TooManyBatches
from jetspark.publish.fast_opening import FastOpening
from jetspark.publish.fast_options import FastBatchOptions

NOW = 100.0
NOBODY = JetStreamUnavailable("s.a")
TOO_MANY = TooManyBatches(429, 10211, "too many inflight")


def _opening(*, timeout: float = 30.0, wait_for_stream_s: float = 1.0) -> FastOpening:
    opening = FastOpening(FastBatchOptions(timeout=timeout, wait_for_stream_s=wait_for_stream_s))
    opening.begin(NOW)
    opening.on_sent()
    return opening


def _waits(opening: FastOpening) -> bool:
    """Whether another attempt is to be made, and why."""
    return opening.reopen_at is not None or opening.reopen_error is not None


def _refuse(opening: FastOpening, error: Exception, *, until: float = 1e9) -> list[float]:
    """When it was tried, as long as it is worth it."""
    now, times = NOW, [NOW]
    while now < until and opening.on_refused(error, now):
        assert opening.reopen_error is error
        assert opening.reopen_at is not None
        now = opening.reopen_at
        times.append(now)
        opening.begin(now)
        opening.on_sent()
        assert not _waits(opening)
    return times


def test_attempts_double_their_distance_and_the_last_is_made_when_time_is_over() -> None:
    times = _refuse(_opening(timeout=4.0), TOO_MANY)
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.45])
    assert times[-1] == NOW + 4.0


def test_nobody_listening_is_given_less_time_than_a_stream_that_refuses() -> None:
    assert _refuse(_opening(), NOBODY)[-1] == NOW + 1.0
    assert _refuse(_opening(), TOO_MANY)[-1] == NOW + 30.0
    assert not _opening(wait_for_stream_s=0.0).on_refused(NOBODY, NOW)


def test_a_stream_that_has_answered_is_there_and_has_the_longer_of_both_times() -> None:
    for wait_s, until in ((1.0, 30.0), (40.0, 40.0)):
        opening = _opening(wait_for_stream_s=wait_s)
        known = [opening.is_stream_known]
        assert opening.on_refused(TOO_MANY, NOW)
        assert [*known, opening.is_stream_known] == [False, True]
        assert _refuse(opening, NOBODY)[-1] == NOW + until


def test_the_wait_for_a_stream_begins_anew_after_another_answer() -> None:
    opening = _opening(timeout=1.5)
    assert opening.on_refused(NOBODY, NOW)
    assert opening.on_refused(TOO_MANY, NOW + 0.9)
    assert opening.on_refused(NOBODY, NOW + 1.6)
    assert opening.on_refused(NOBODY, NOW + 2.5)
    assert not opening.on_refused(NOBODY, NOW + 2.6)
