"""Retries: which errors are retryable, how often a write is repeated, and after which waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias, TypedDict

from jetspark.batcher.effects import Random, SinkSteps, Write
from jetspark.core.backoff import Backoff
from jetspark.core.numbers import seconds_above_0, share, whole
from jetspark.core.step_runner import ReadClock, Sleep
from jetspark.errors import CircuitOpen, ConfigError, JetSparkError

__all__ = ["IsRetryable", "Retry", "RetryKeywords", "is_retryable"]

IsRetryable: TypeAlias = Callable[[Exception], bool]
"""Returns True if the same write may succeed later."""

# Errors that would occur again. All others are retried: one retry too many loses nothing, giving up too early may.
_FINAL: tuple[type[Exception], ...] = (
    # Invalid values and programming errors.
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    AssertionError,
    ImportError,
    NotImplementedError,
    # Files that we cannot use; other system errors, such as network errors, are often temporary.
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)


def is_retryable(error: Exception, own: IsRetryable | None = None, sink: object = None) -> bool:
    """Return True if the same write may succeed later.

    The first of these decides: the user's function ``own``; the error's ``is_retryable`` (a bool or a method); the
    sink's method ``is_retryable(error)``; ``may_pass`` of an error of JetSpark; the error's class.
    :class:`~jetspark.CircuitOpen` is always retryable, because nothing was written.
    """
    if isinstance(error, CircuitOpen):
        return True
    if own is not None:
        return own(error)
    word = getattr(error, "is_retryable", None)
    if word is not None:
        return bool(word() if callable(word) else word)
    judge = getattr(sink, "is_retryable", None)
    if callable(judge):
        return bool(judge(error))
    if isinstance(error, JetSparkError):
        return error.may_pass
    return not isinstance(error, _FINAL)


class RetryKeywords(TypedDict, total=False):
    """The fields of :class:`Retry`, as keywords of a sink."""

    attempts: int
    first_wait_s: float
    max_wait_s: float
    max_total_s: float
    jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Repeats a write after waits that double, bounded by attempts and by time."""

    attempts: int = 5
    first_wait_s: float = 0.1
    max_wait_s: float = 5.0
    max_total_s: float = 60.0
    jitter: float = 0.5
    """Largest share by which a wait is shortened at random: 0 keeps the full wait, 1 may skip it."""

    def __post_init__(self) -> None:
        whole("attempts", self.attempts)
        for name in ("first_wait_s", "max_wait_s", "max_total_s"):
            seconds_above_0(name, getattr(self, name))
        if self.max_wait_s < self.first_wait_s:
            raise ConfigError(f"max_wait_s={self.max_wait_s!r}: expected first_wait_s={self.first_wait_s} or more")
        share("jitter", self.jitter)

    def wait_s(self, attempt: int, error: Exception, random_fraction: float) -> float:
        """Seconds to wait after a failed attempt; the first attempt is 1.

        If the error has ``retry_in_s``, as :class:`~jetspark.CircuitOpen` has, that time is added to the usual wait.
        The sum keeps writers that were refused until the same moment from retrying at the same moment.
        """
        wait_s = Backoff(self.first_wait_s, self.max_wait_s).wait_s(attempt)
        asked_s = getattr(error, "retry_in_s", None)
        least_s = max(0.0, asked_s) if isinstance(asked_s, int | float) else 0.0
        return least_s + wait_s * (1 - self.jitter * random_fraction)

    def write(self, batch: Sequence[Any], judge: IsRetryable) -> SinkSteps:
        items = list(batch)
        began = yield ReadClock()
        for attempt in count(1):
            try:
                yield Write(list(items))
                return
            except Exception as error:
                if attempt == self.attempts or not judge(error):
                    raise
                wait_s = self.wait_s(attempt, error, (yield Random()))
                if (yield ReadClock()) - began + wait_s > self.max_total_s:
                    raise
            yield Sleep(wait_s)
