from __future__ import annotations

import datetime
import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from jetspark.core.numbers import (
    INT64,
    MAX_SECONDS,
    UINT64,
    check_timeout,
    rate,
    seconds,
    seconds_above_0,
    share,
    timeout_of,
    whole,
)
from jetspark.errors import ConfigError


@pytest.mark.parametrize("value", [1, 5, 2**63 - 1, numpy.int64(7), numpy.uint8(1)])
def test_a_whole_number_comes_back_as_an_int(value: Any) -> None:
    assert whole("n", value) == value
    assert type(whole("n", value)) is int


@pytest.mark.parametrize("value", ["5", b"5", None, True, False, 1.0, math.nan, math.inf, [1], fractions.Fraction(1)])
def test_what_is_no_whole_number_is_refused_with_its_value(value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        whole("n", value)
    assert str(raised.value) == f"n={value!r}: expected a whole number, 1 or more"


def test_the_range_of_a_whole_number_is_told() -> None:
    assert (whole("n", 0, low=0), whole("n", 9, high=9)) == (0, 9)
    for value, limits, said in (
        (0, {}, "n=0: expected 1 or more"),
        (2**63, {}, f"n={2**63}: expected 1 or more, and at most {INT64}"),
        (2**64, {"high": UINT64}, f"n={2**64}: expected 1 or more, and at most {UINT64}"),
        (-1, {"low": 0}, "n=-1: expected 0 or more"),
        (10, {"low": 0, "high": 9}, "n=10: expected 0 to 9"),
        (numpy.int64(0), {}, f"n={numpy.int64(0)!r}: expected 1 or more"),
    ):
        with pytest.raises(ConfigError) as raised:
            whole("n", value, **limits)  # type: ignore[arg-type]
        assert str(raised.value) == said
    with pytest.raises(ConfigError, match=r"^n=0: expected 1 or more, or None for all$"):
        whole("n", 0, instead="or None for all")
    with pytest.raises(ConfigError, match=r"^n='a': expected a whole number, 1 or more, or None for all$"):
        whole("n", "a", instead="or None for all")


@pytest.mark.parametrize("check", [seconds, seconds_above_0])
def test_a_time_is_any_real_number(check: Callable[..., float]) -> None:
    for value in (1, 0.5, MAX_SECONDS, numpy.float32(0.5), numpy.int64(3), fractions.Fraction(1, 4)):
        assert check("timeout", value) == float(value)
        assert type(check("timeout", value)) in (int, float)


@pytest.mark.parametrize("check", [seconds, seconds_above_0])
@pytest.mark.parametrize("value", ["5", True, None, math.nan, -1, -0.001, [1], 1j])
def test_what_is_no_time_is_refused_with_its_value(check: Callable[..., float], value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        check("timeout", value)
    expected = "seconds of 0 or more" if check is seconds else "seconds above 0"
    assert str(raised.value) == f"timeout={value!r}: expected {expected}"


def test_0_seconds_are_a_time_where_they_make_sense() -> None:
    assert seconds("timeout", 0) == 0
    with pytest.raises(ConfigError, match=r"^timeout=0: expected seconds above 0$"):
        seconds_above_0("timeout", 0)


@pytest.mark.parametrize("value", [math.inf, MAX_SECONDS + 1, 1e300])
def test_a_time_has_an_end(value: float) -> None:
    for check in (seconds, seconds_above_0):
        with pytest.raises(ConfigError, match=rf"expected seconds .*, and at most {MAX_SECONDS}, or None$"):
            check("timeout", value, instead="or None")


def test_a_timedelta_is_told_how_to_become_seconds() -> None:
    with pytest.raises(ConfigError, match=r"total_seconds\(\)"):
        seconds("timeout", datetime.timedelta(seconds=1))


def test_the_longest_time_is_the_last_whole_second_that_64_bits_hold_in_nanoseconds() -> None:
    assert MAX_SECONDS * 10**9 <= INT64 < (MAX_SECONDS + 1) * 10**9
    assert (INT64, UINT64) == (0x7FFF_FFFF_FFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF)


def test_a_timeout_may_be_none_or_any_time() -> None:
    check_timeout(None)
    check_timeout(0)
    check_timeout(2.5)
    with pytest.raises(ConfigError, match=r"^timeout=-1: expected seconds of 0 or more, or None$"):
        check_timeout(-1)


def test_a_timeout_that_is_not_given_is_the_default() -> None:
    assert (timeout_of(None, 5.0), timeout_of(2, 5.0)) == (5.0, 2)
    with pytest.raises(ConfigError, match="timeout='2'"):
        timeout_of("2", 5.0)


@pytest.mark.parametrize("value", [0, 1, 0.5, numpy.float64(0.25), fractions.Fraction(1, 3)])
def test_a_share_is_a_number_from_0_to_1(value: Any) -> None:
    assert share("jitter", value) == float(value)


@pytest.mark.parametrize("value", ["0.5", True, None, math.nan, math.inf, -0.1, 1.1])
def test_what_is_no_share_is_refused_with_its_value(value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        share("jitter", value)
    assert str(raised.value) == f"jitter={value!r}: expected a number from 0 to 1"


def test_a_rate_is_a_number_above_0_that_can_be_counted() -> None:
    assert [rate("r", value) for value in (1, 0.001, numpy.int64(5), 2**63 - 1)] == [1, 0.001, 5, 2**63 - 1]
    for value in ("5", True, None, math.nan, 0, -1):
        with pytest.raises(ConfigError, match=r"^r=.*: expected a number above 0$"):
            rate("r", value)
    for value in (math.inf, 10**400):
        with pytest.raises(ConfigError, match=r"^r=.*: expected a number above 0, and at most 9223372036854775807$"):
            rate("r", value)
