"""Decisions about failed attempts. Pure: the attempt, the error and a random number are arguments.

A handler decides itself by raising :class:`Reject` (never again), :class:`RetryIn` (after a time that it gives) or
:class:`Skip` (done without effect). For every other exception the policy decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jetspark.app.clock import HUNDRED_YEARS_S
from jetspark.core.arguments import explained, unfit
from jetspark.core.backoff import Backoff
from jetspark.core.numbers import seconds as check_seconds
from jetspark.core.numbers import seconds_above_0, share, whole
from jetspark.errors import ConfigError, ContractViolation, JetSparkError, PermissionDenied

__all__ = [
    "Breaker",
    "Decided",
    "Finish",
    "GiveUp",
    "HandlerTimeout",
    "Reject",
    "Retry",
    "RetryIn",
    "RetryPolicy",
    "Skip",
    "WaitHere",
    "WaitLong",
    "decide",
    "deciding_error",
    "is_transient",
]


class Reject(JetSparkError):
    """Raised by a handler: this event will never succeed. It goes to the dead letters now."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Skip(JetSparkError):
    """Raised by a handler that has nothing to do for this event. The event counts as handled."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class RetryIn(JetSparkError):
    """Raised by a handler: try again after ``seconds``. It counts as one of the policy's attempts."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(seconds, reason)
        check_seconds("RetryIn seconds", seconds)
        if seconds > HUNDRED_YEARS_S:
            raise ConfigError(f"RetryIn({seconds!r}): expected seconds, 0 or more and up to a hundred years")
        self.seconds, self.reason = seconds, reason

    def __str__(self) -> str:
        return self.reason or f"asked to be retried in {self.seconds} s"


class HandlerTimeout(JetSparkError, TimeoutError):
    """The handler ran for longer than its ``timeout`` and was cancelled; its effects until then are not undone."""

    def __init__(self, handler: str, timeout_s: float) -> None:
        super().__init__(handler, timeout_s)
        self.handler, self.timeout_s = handler, timeout_s

    @property
    def may_pass(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"handler {self.handler!r} ran for longer than {self.timeout_s} s"


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long after a failed event is handled again.

    Waits double from ``first_s`` to ``max_s``. Up to ``in_lane_s`` the event waits in the worker, with its place in
    its key's order; a longer wait is stored in the server as a schedule, and frees the worker.
    """

    attempts: int = 5
    """Starts in all, the first one included."""
    first_s: float = 0.2
    max_s: float = 3600.0
    jitter: float = 0.5
    """The part of a wait, from 0 to 1, that is random: with 0.5 a wait of 10 s takes 5 to 10 s."""
    in_lane_s: float = 10.0
    transient: tuple[type[BaseException], ...] = ()
    """Errors that are retried, subclasses included. ``PermissionDenied`` is retried only if it is named itself."""
    final: tuple[type[BaseException], ...] = ()
    """Errors that go to the dead letters at once. Where both name a base class, the nearest one counts."""
    unknown: Literal["retry", "dead_letter"] = "retry"
    """Every other error."""

    def __post_init__(self) -> None:
        whole("attempts", self.attempts)
        for name in ("first_s", "max_s", "in_lane_s"):
            check_seconds(name, getattr(self, name))
        share("jitter", self.jitter)
        for name in ("transient", "final"):
            kinds = getattr(self, name)
            if not isinstance(kinds, tuple) or not all(
                isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds
            ):
                raise unfit(name, kinds, "a tuple of types of exceptions, such as (ConnectionError,)")
        if not 0 <= self.first_s <= self.max_s <= HUNDRED_YEARS_S:
            raise ConfigError(
                f"first_s={self.first_s!r}, max_s={self.max_s!r}: expected 0 <= first_s <= max_s, and up to 100 years"
            )
        if not self.in_lane_s <= HUNDRED_YEARS_S:
            raise ConfigError(f"in_lane_s={self.in_lane_s!r}: expected seconds, 0 or more and up to a hundred years")
        if self.unknown not in ("retry", "dead_letter"):
            raise ConfigError(f"unknown={self.unknown!r}: expected 'retry' or 'dead_letter'")

    def wait_s(self, attempts: int, random_fraction: float) -> float:
        """The wait after this many failed attempts; ``random_fraction`` is a random number from 0 to 1."""
        return Backoff(self.first_s, self.max_s).wait_s(attempts) * (1 - self.jitter * random_fraction)


Retry = RetryPolicy


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """Pauses a handler that keeps failing, in every process.

    After ``failures`` failed attempts in a row, the handler's consumer is paused in the server for ``open_s`` seconds,
    so no worker gets anything. Then one event is tried. Errors that are final do not count: they are the event's.
    """

    failures: int = 20
    open_s: float = 10.0

    def __post_init__(self) -> None:
        whole("failures", self.failures)
        seconds_above_0("open_s", self.open_s)
        if self.open_s > HUNDRED_YEARS_S:
            raise ConfigError(f"open_s={self.open_s!r}: expected seconds above 0, and up to a hundred years")


@dataclass(frozen=True, slots=True)
class Finish:
    """Acknowledge it."""


@dataclass(frozen=True, slots=True)
class WaitHere:
    """Keep it in its lane, and start it again after this time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WaitLong:
    """Store it as a schedule, and acknowledge it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Write a dead letter, and acknowledge it."""

    is_transient: bool
    """All attempts of the policy are used up; otherwise a retry is pointless."""


Decided: TypeAlias = Finish | WaitHere | WaitLong | GiveUp


def is_transient(policy: RetryPolicy, error: BaseException) -> bool:
    """True if the same event may succeed later."""
    if isinstance(error, Reject | ContractViolation):
        return False
    if isinstance(error, RetryIn | HandlerTimeout):
        return True
    if isinstance(error, PermissionDenied):
        # It is a subclass of OSError, and a policy that retries OSError does not mean this one.
        return PermissionDenied in policy.transient
    for kind in type(error).__mro__:
        if kind in policy.transient:
            return True
        if kind in policy.final:
            return False
    return policy.unknown == "retry"


def decide(policy: RetryPolicy, attempts: int, error: BaseException, random_fraction: float) -> Decided:
    """Decide on an event whose attempt number ``attempts``, counted from 1, ended with ``error``."""
    if isinstance(error, Skip):
        return Finish()
    if not is_transient(policy, error):
        return GiveUp(is_transient=False)
    if attempts >= policy.attempts:
        return GiveUp(is_transient=True)
    wait_s = error.seconds if isinstance(error, RetryIn) else policy.wait_s(attempts, random_fraction)
    return WaitHere(wait_s) if wait_s <= policy.in_lane_s else WaitLong(wait_s)


def deciding_error(policy: RetryPolicy, error: BaseException) -> BaseException:
    """The error that the decision is based on: for a group, such as a ``TaskGroup`` raises, one of its members.

    Chosen is the first member that makes a retry pointless (:class:`Reject`, or final by the policy); else the
    :class:`RetryIn` with the longest wait; else the first transient error; :class:`Skip` only if all members are.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    return min(_members(error), key=lambda each: _rank(policy, each))


def _members(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _members(each)
        else:
            yield each


def _rank(policy: RetryPolicy, error: BaseException) -> tuple[int, float]:
    if isinstance(error, Skip):
        return 3, 0.0
    if not is_transient(policy, error):
        return 0, 0.0
    return (1, -error.seconds) if isinstance(error, RetryIn) else (2, 0.0)
