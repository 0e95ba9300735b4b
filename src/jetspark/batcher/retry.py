"""Retrying: which errors may pass, and how often and how long after a write is made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from jetspark.batcher.effects import Random, SinkSteps, Write
from jetspark.core.backoff import Backoff
from jetspark.core.numbers import seconds_above_0, share, whole
from jetspark.core.step_runner import ReadClock, Sleep
from jetspark.errors import CircuitOpen, ConfigError, JetSparkError

__all__ = ["IsRetryable", "Retry", "is_retryable"]

IsRetryable: TypeAlias = Callable[[Exception], bool]
"""Says of an error whether the same write may succeed later."""

# The same write would meet the same answer. Everything else may pass, and trying once too often loses nothing, while
# giving up too early may: so what is not listed is tried again.
_FINAL: tuple[type[Exception], ...] = (
    # A value nobody can use, or a mistake in the program.
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    AssertionError,
    ImportError,
    NotImplementedError,
    # Files that are not there for us; other errors of the system, networks above all, come and go.
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)


def is_retryable(error: Exception, own: IsRetryable | None = None, sink: object = None) -> bool:
    """Whether the same write may succeed later.

    Asked in this order: ``own``, which the user gave; the error, if it has ``is_retryable`` (a bool or a method); the
    sink, if it has a method ``is_retryable(error)``; ``may_pass``, if it is an error of JetSpark; its class.
    :class:`~jetspark.CircuitOpen` always is: nothing was tried.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Tries again what may succeed later, after waits that double; bounded by attempts and by time."""

    attempts: int
    first_wait_s: float
    max_wait_s: float
    max_total_s: float
    jitter: float
    """Each wait is shortened at random by up to this share: 0 by nothing, 1 down to no wait at all."""

    def __post_init__(self) -> None:
        whole("attempts", self.attempts)
        for name in ("first_wait_s", "max_wait_s", "max_total_s"):
            seconds_above_0(name, getattr(self, name))
        if self.max_wait_s < self.first_wait_s:
            raise ConfigError(f"max_wait_s={self.max_wait_s!r}: expected first_wait_s={self.first_wait_s} or more")
        share("jitter", self.jitter)

    def wait_s(self, attempt: int, error: Exception, chance: float) -> float:
        """How long to wait after an attempt has failed; the first attempt is 1.

        An error that says when to come back (``retry_in_s``, as :class:`~jetspark.CircuitOpen` has) is taken at its
        word. The usual wait comes on top: those who were all sent away until the same moment must not come back at
        the same moment.
        """
        wait_s = Backoff(self.first_wait_s, self.max_wait_s).wait_s(attempt)
        asked_s = getattr(error, "retry_in_s", None)
        return wait_s * (1 - self.jitter * chance) + (max(0.0, asked_s) if isinstance(asked_s, int | float) else 0.0)

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
