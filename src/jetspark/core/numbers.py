"""Range checks of numeric arguments. Each check returns the number, as Python's own type.

``True`` is an ``int``, ``"5"`` compares with no number, and ``nan`` is neither above nor below a bound: unchecked, they
fail far from the call that passed them. Numbers of other libraries (numpy's) are accepted.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

from jetspark.errors import ConfigError

__all__ = [
    "INT64",
    "MAX_SECONDS",
    "UINT64",
    "check_timeout",
    "rate",
    "seconds",
    "seconds_above_0",
    "share",
    "timeout_of",
    "whole",
]

INT64, UINT64 = 2**63 - 1, 2**64 - 1
# As nanoseconds these fit the server's durations, and as seconds what threads may wait for.
MAX_SECONDS = INT64 // 1_000_000_000


def whole(what: str, value: Any, *, low: int = 1, high: int = INT64, instead: str = "") -> int:
    """A count, a size or a sequence. ``instead`` says what else may be given, as in ``or None for all``.

    Raises:
        ConfigError: The value is not a whole number, or out of range.
    """
    if type(value) is int and low <= value <= high:
        return value
    limits = f"{low} or more" if high >= INT64 else f"{low} to {high}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _unfit(what, value, f"a whole number, {limits}", instead)
    number = operator.index(value)
    if not low <= number <= high:
        is_above_all = number > high >= INT64
        raise _unfit(what, value, f"{limits}, and at most {high}" if is_above_all else limits, instead)
    return number


def seconds(what: str, value: Any, *, low: int = 0, instead: str = "") -> float:
    """A time of ``low`` seconds or more.

    Raises:
        ConfigError: The value is not a number, or out of range.
    """
    expected = f"seconds of {low} or more"
    number = value if type(value) in (float, int) else _real(what, value, expected, instead)
    if low <= number <= MAX_SECONDS:
        return number
    raise _unfit(what, value, _finite(expected, number), instead)


def seconds_above_0(what: str, value: Any, *, instead: str = "") -> float:
    """A time of more than 0 seconds.

    Raises:
        ConfigError: The value is not a number, or out of range.
    """
    number = value if type(value) in (float, int) else _real(what, value, "seconds above 0", instead)
    if 0 < number <= MAX_SECONDS:
        return number
    raise _unfit(what, value, _finite("seconds above 0", number), instead)


def share(what: str, value: Any, *, instead: str = "") -> float:
    """A part of a whole, from 0 to 1.

    Raises:
        ConfigError: The value is not a number, or out of range.
    """
    number = value if type(value) in (float, int) else _real(what, value, "a number from 0 to 1", instead)
    if 0 <= number <= 1:
        return number
    raise _unfit(what, value, "a number from 0 to 1", instead)


def rate(what: str, value: Any, *, instead: str = "") -> float:
    """A rate per second: more than 0, and at most 2**63 - 1.

    Raises:
        ConfigError: The value is not a number, or out of range.
    """
    number = value if type(value) in (float, int) else _real(what, value, "a number above 0", instead)
    if 0 < number <= INT64:
        return number
    raise _unfit(what, value, "a number above 0" + (f", and at most {INT64}" if number > INT64 else ""), instead)


def check_timeout(timeout: Any) -> Any:
    """Check a ``timeout`` for which None means no limit, and return it.

    Raises:
        ConfigError: The value is not a time of 0 seconds or more.
    """
    return None if timeout is None else seconds("timeout", timeout, instead="or None")


def timeout_of(timeout: Any, default: float) -> float:
    """The ``timeout`` of a call in seconds, or ``default`` if it is None.

    Raises:
        ConfigError: The value is not a time of 0 seconds or more.
    """
    return default if timeout is None else seconds("timeout", timeout)


def _real(what: str, value: Any, expected: str, instead: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = ", as timedelta.total_seconds() gives them" if hasattr(value, "total_seconds") else ""
        raise _unfit(what, value, expected + hint, instead)
    return float(value)


def _finite(expected: str, number: float) -> str:
    return f"{expected}, and at most {MAX_SECONDS}" if number > MAX_SECONDS else expected


def _unfit(what: str, value: object, expected: str, instead: str) -> ConfigError:
    return ConfigError(f"{what}={value!r}: expected {expected}{f', {instead}' if instead else ''}")
