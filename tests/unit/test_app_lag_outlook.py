"""Slopes, the time until a reader has caught up, and the time until its stream overtakes it."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.app.lag.outlook import MAX_SAMPLES, LagOutlook, LagSample, LagSeries, StreamLimits
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.info import StreamInfo, StreamState

START = datetime.datetime(2026, 3, 20, tzinfo=datetime.UTC)
NONE = StreamLimits()


def sample(second: float, messages: int, position: int | None = None, **fields: Any) -> LagSample:
    """By default of a reader that reads as fast as its lag falls, and has what it is behind by as its distance."""
    defaults: dict[str, Any] = {
        "underway": 0,
        "oldest_s": float(messages),
        "distance": messages,
        "identity": ("S", "c"),
        "position": 1_000_000 + int(second) * 1_000 if position is None else position,
    }
    at = START + datetime.timedelta(seconds=second)
    values = defaults | fields
    return LagSample(at=at, messages=messages, **({"progress": values["position"]} | values))


def series(*samples: LagSample) -> LagSeries:
    found = LagSeries()
    for each in samples:
        found.add(each)
    return found


def rounded(outlook: LagOutlook) -> tuple[Any, ...]:
    values = (outlook.messages_per_s, outlook.caught_up_in_s, outlook.overtaken_in_s, outlook.kept_for_s)
    return (*(None if value is None else round(value, 6) for value in values), outlook.overtaken_by)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        # It takes three samples.
        ([100], (None, None, None, None, None)),
        ([100, 90], (None, None, None, None, None)),
        ([100, 90, 80], (-10.0, 8.0, None, None, None)),
        # A lag that grows or stays has no end.
        ([100, 110, 120], (10.0, None, None, None, None)),
        ([100, 100, 100], (0.0, None, None, None, None)),
        # A reader that is not behind has caught up.
        ([20, 10, 0], (-10.0, 0.0, None, None, None)),
        ([0, 0, 0], (0.0, 0.0, None, None, None)),
        # One sample that is off changes nothing.
        ([100, 90, 80, 900, 60, 50, 40], (-10.0, 4.0, None, None, None)),
    ],
)
def test_the_slope_says_when_a_reader_has_caught_up(messages: list[int], expected: tuple[Any, ...]) -> None:
    found = series(*(sample(second, each) for second, each in enumerate(messages)))
    assert rounded(found.outlook(NONE)) == expected


@pytest.mark.parametrize(
    ("limits", "samples", "expected"),
    [
        # Its oldest message is 60 s old and gets older by a second each second: an hour of retention less a minute.
        (
            StreamLimits(age_s=3600),
            [sample(second, 50, oldest_s=58.0 + second) for second in range(3)],
            (0.0, None, 3540.0, 3540.0, "max_age"),
        ),
        # It gets younger.
        (
            StreamLimits(age_s=3600),
            [sample(second, 50, oldest_s=60.0 - second) for second in range(3)],
            (0.0, None, None, 3542.0, None),
        ),
        # 100 messages of room are taken at 20 a second.
        (
            StreamLimits(messages=1_000),
            [sample(second, 860 + 20 * second) for second in range(3)],
            (20.0, None, 5.0, None, "max_messages"),
        ),
        # The same room in bytes: 10 for a message.
        (
            StreamLimits(bytes=10_000, bytes_per_message=10),
            [sample(second, 860 + 20 * second) for second in range(3)],
            (20.0, None, 5.0, None, "max_bytes"),
        ),
        # The first limit counts.
        (
            StreamLimits(age_s=1_000, messages=1_000),
            [sample(second, 860 + 20 * second, oldest_s=996.0 + second) for second in range(3)],
            (20.0, None, 2.0, 2.0, "max_age"),
        ),
        # It has caught up before that.
        (
            StreamLimits(age_s=3600),
            [sample(second, 100 - 20 * second, oldest_s=60.0 + second) for second in range(3)],
            (-20.0, 3.0, None, 3538.0, None),
        ),
        # Or it has not.
        (
            StreamLimits(age_s=63),
            [sample(second, 100 - 20 * second, oldest_s=60.0 + second) for second in range(3)],
            (-20.0, 3.0, 1.0, 1.0, "max_age"),
        ),
        # The stream is at its limit: the next message drops the one that the reader needs.
        (
            StreamLimits(messages=900),
            [sample(second, 860 + 20 * second) for second in range(3)],
            (20.0, None, 0.0, None, "max_messages"),
        ),
        # Nothing waits, so nothing can be dropped.
        (
            StreamLimits(age_s=60, messages=10),
            [sample(second, 0, oldest_s=0.0, distance=0) for second in range(3)],
            (0.0, 0.0, None, None, None),
        ),
        # The age is unknown.
        (
            StreamLimits(age_s=60, messages=1_000),
            [sample(second, 960 + 10 * second, oldest_s=None) for second in range(3)],
            (10.0, None, 2.0, None, "max_messages"),
        ),
    ],
)
def test_retention_overtakes_a_reader(
    limits: StreamLimits, samples: list[LagSample], expected: tuple[Any, ...]
) -> None:
    assert rounded(series(*samples).outlook(limits)) == expected


BEFORE = [sample(0, 100, 500), sample(1, 90, 510), sample(2, 80, 520)]


@pytest.mark.parametrize(
    "after",
    [
        # The stream, the consumer or the bucket is another one.
        sample(3, 70, 530, identity=("S", "again")),
        # The consumer was reset, or a projection repaired.
        sample(3, 70, 100),
        # A purge: more is gone than was read. The server moves the position of a consumer past what it removes.
        sample(3, 40, 530),
        sample(3, 40, 560, progress=530),
        # The server's clock was set back.
        sample(1.5, 70, 530),
    ],
)
def test_a_sample_that_does_not_continue_the_others_starts_again(after: LagSample) -> None:
    found = series(*BEFORE)
    assert found.outlook(NONE).messages_per_s == -10.0
    found.add(after)
    assert len(found) == 1
    assert found.outlook(NONE) == LagOutlook()


def test_messages_that_are_acknowledged_do_not_look_like_a_purge() -> None:
    """They were delivered before, so the position stands still."""
    found = series(sample(0, 100, 500, underway=60), sample(1, 50, 500, underway=10), sample(2, 40, 500))
    assert len(found) == 3
    assert found.outlook(NONE).messages_per_s == -30.0


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=80))
def test_a_series_is_bounded_and_its_estimates_are_finite(steps: list[tuple[int, int, int]]) -> None:
    found, second, position = LagSeries(), 0, 0
    for pause, messages, moved in steps:
        second, position = second + pause, position + moved
        found.add(sample(second, messages, position))
        outlook = found.outlook(StreamLimits(3600.0, 10_000.0, 1e9, 120.0))
        for value in (outlook.caught_up_in_s, outlook.overtaken_in_s, outlook.kept_for_s):
            assert value is None or (math.isfinite(value) and value >= 0)
        assert (outlook.overtaken_in_s is None) == (outlook.overtaken_by is None)
        if outlook.caught_up_in_s is not None and outlook.overtaken_in_s is not None:
            assert outlook.overtaken_in_s < outlook.caught_up_in_s
    assert len(found) <= MAX_SAMPLES


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, StreamLimits(bytes_per_message=100.0)),
        ({"max_age_s": 0, "max_messages": -1, "max_bytes": -1}, StreamLimits(bytes_per_message=100.0)),
        ({"max_age_s": 60.0, "max_messages": 5, "max_bytes": 700}, StreamLimits(60.0, 5, 700, 100.0)),
        # At these limits it refuses new messages. It still drops old ones by their age.
        (
            {"max_age_s": 60.0, "max_messages": 5, "max_bytes": 700, "discard": "new"},
            StreamLimits(60.0, bytes_per_message=100.0),
        ),
    ],
)
def test_the_limits_of_a_stream(config: dict[str, Any], expected: StreamLimits) -> None:
    info = StreamInfo(config=StreamConfig(name="S", **config), state=StreamState(messages=10, bytes=1000))
    assert StreamLimits.of(info) == expected
