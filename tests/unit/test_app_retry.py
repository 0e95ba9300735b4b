"""The retry policy: who is tried again, when, and where the wait is spent."""

from __future__ import annotations

import pickle

import pytest

from jetspark.app import HandlerTimeout, Reject, Retry, RetryIn, Skip
from jetspark.app.clock import HUNDRED_YEARS_S
from jetspark.app.handlers.retry import (
    Breaker,
    Finish,
    GiveUp,
    WaitHere,
    WaitLong,
    decide,
    deciding_error,
    is_transient,
)
from jetspark.errors import ConfigError, JetSparkError, PermissionDenied


class Away(ConnectionError):
    pass


POLICY = Retry(attempts=5, first_s=0.5, max_s=100, jitter=0.5, in_lane_s=2)


@pytest.mark.parametrize(
    ("attempts", "chance", "expected"),
    [
        (1, 0.0, WaitHere(0.5)),
        (1, 1.0, WaitHere(0.25)),
        (2, 0.0, WaitHere(1.0)),
        (3, 0.0, WaitHere(2.0)),
        (4, 0.0, WaitLong(4.0)),
        (4, 1.0, WaitHere(2.0)),
        (5, 0.0, GiveUp(is_transient=True)),
        (6, 0.0, GiveUp(is_transient=True)),
    ],
)
def test_waits_double_and_move_to_the_server_when_they_are_long(attempts: int, chance: float, expected: object) -> None:
    assert decide(POLICY, attempts, OSError("away"), chance) == expected


def test_a_handler_can_say_what_it_means() -> None:
    assert decide(POLICY, 1, Reject("no such card"), 0.0) == GiveUp(is_transient=False)
    assert decide(POLICY, 1, Skip("not ours"), 0.0) == Finish()
    assert decide(POLICY, 1, RetryIn(2), 0.7) == WaitHere(2)
    assert decide(POLICY, 1, RetryIn(30), 0.7) == WaitLong(30)
    assert decide(POLICY, 5, RetryIn(30), 0.0) == GiveUp(is_transient=True)


REJECT, AWAY, BROKEN, SKIP = Reject("no such card"), Away(), FileNotFoundError(), Skip("not ours")
SOON, LATE = RetryIn(1), RetryIn(30)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([SKIP, AWAY, LATE, REJECT], REJECT),
        ([LATE, BROKEN, REJECT], BROKEN),
        ([AWAY, SOON, LATE, SKIP], LATE),
        ([SKIP, AWAY, KeyError()], AWAY),
        ([SKIP, Skip()], SKIP),
        ([ExceptionGroup("inner", [SKIP, ExceptionGroup("in it", [AWAY, REJECT])]), SOON], REJECT),
    ],
    ids=["reject", "final by the policy", "longest wait", "error before skip", "all skip", "nested"],
)
def test_one_error_of_a_group_decides(errors: list[Exception], expected: Exception) -> None:
    policy = Retry(final=(FileNotFoundError,))
    assert deciding_error(policy, ExceptionGroup("unhandled errors in a TaskGroup", errors)) is expected
    assert deciding_error(policy, expected) is expected


def test_the_nearest_class_that_is_named_decides() -> None:
    policy = Retry(final=(OSError, ValueError), transient=(ConnectionError,))
    assert is_transient(policy, Away())
    assert not is_transient(policy, FileNotFoundError())
    assert not is_transient(policy, UnicodeDecodeError("utf-8", b"", 0, 1, ""))
    assert is_transient(policy, KeyError())
    assert not is_transient(Retry(unknown="dead_letter"), KeyError())
    assert is_transient(Retry(unknown="dead_letter"), HandlerTimeout("bill", 20))
    assert is_transient(Retry(unknown="dead_letter"), RetryIn(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"first_s": 2, "max_s": 1},
        {"first_s": -1},
        {"max_s": float("inf")},
        {"max_s": 1e10},
        {"jitter": 1.5},
        {"in_lane_s": -1},
        {"in_lane_s": 1e10},
        {"transient": ConnectionError},
        {"transient": (ConnectionError, "OSError")},
        {"final": [OSError]},
        {"final": (OSError, int)},
        {"unknown": "drop"},
    ],
)
def test_a_policy_names_the_value_it_cannot_use(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Retry(**wrong)  # type: ignore[arg-type]


def test_a_breaker_names_the_value_it_cannot_use() -> None:
    with pytest.raises(ConfigError, match="failures=0"):
        Breaker(failures=0)
    with pytest.raises(ConfigError, match="open_s=0"):
        Breaker(open_s=0)
    with pytest.raises(ConfigError, match="open_s=10000000000"):
        Breaker(open_s=10_000_000_000)  # a date that no calendar has
    for seconds in (-1, 1e10, float("nan")):
        with pytest.raises(ConfigError, match="RetryIn"):
            RetryIn(seconds)


@pytest.mark.parametrize("error", [Reject("a"), Skip("b"), RetryIn(3, "c"), HandlerTimeout("bill", 2.5)])
def test_errors_survive_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_limits_may_be_as_low_as_they_say() -> None:
    assert Retry(attempts=1, first_s=0, max_s=0, in_lane_s=0).attempts == 1
    assert Retry(in_lane_s=0.5).in_lane_s == 0.5
    assert Breaker(failures=1, open_s=0.001).failures == 1
    assert RetryIn(0).seconds == 0
    assert RetryIn(0.5).seconds == 0.5
    assert (Retry().attempts, Breaker().failures) == (5, 20)


def test_limits_may_be_as_high_as_they_say() -> None:
    long = HUNDRED_YEARS_S
    policy = Retry(first_s=long, max_s=long, in_lane_s=long)
    assert (policy.first_s, policy.max_s, policy.in_lane_s) == (long, long, long)
    assert (Breaker(open_s=long).open_s, RetryIn(long).seconds) == (long, long)


def test_what_a_handler_says_is_there_to_be_read() -> None:
    for error in (Reject("why"), Skip("why"), RetryIn(5.0, "why")):
        assert error.reason == "why"
        assert "why" in str(error)
    assert RetryIn(5.0, "why").args == (5.0, "why")
    assert HandlerTimeout("mail", 3.0).may_pass is True


@pytest.mark.parametrize(
    ("policy", "is_retried"),
    [
        (Retry(), False),
        (Retry(transient=(OSError,)), False),  # of the network and of files, as whoever writes it means
        (Retry(transient=(JetSparkError,)), False),
        (Retry(transient=(PermissionDenied,)), True),
    ],
)
def test_what_this_user_may_not_do_is_retried_only_where_that_is_said(policy: Retry, is_retried: bool) -> None:
    assert is_transient(policy, PermissionDenied("publish", "billed.o-1")) == is_retried


def test_a_time_that_the_handler_names_decides_although_it_is_now() -> None:
    at_once = RetryIn(0)
    assert deciding_error(Retry(), ExceptionGroup("two", [OSError(), at_once])) is at_once
