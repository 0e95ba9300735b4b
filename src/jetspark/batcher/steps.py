"""What the wrappers around a sink decide, once for both drivers. Pure: no clock, no chance, no waiting.

Each wrapper is a generator. It yields what it wants done and is sent the outcome, or has the error thrown into it; the
driver (:mod:`jetspark.batcher.aio.sinks`, :mod:`jetspark.batcher.blocking.sinks`) does the waiting and the writing::

    yield Write(batch)        the wrapped sink has written it
    yield Bury(records)       the sink for dead letters has
    yield Sleep(seconds)      that much time has passed
    yield Now()               -> seconds of a clock that never goes back
    yield WallTime()          -> seconds since 1970
    yield Chance()            -> a random number in [0, 1)
    yield Tell(written)       the observer was told
    yield Call(call)          -> what the call returned, which asyncio awaits where it has to

Between two steps a generator runs alone: asyncio does not switch tasks there, and the blocking driver holds the
wrapper's lock there, and only there. So several writes may share one :class:`Circuit`, :class:`Bucket` or
:class:`Meter`. A cancelled write is an error like any other that is thrown in (``CancelledError``, no ``Exception``):
generators put their books in order and raise it again.

A batch belongs to the sink while it writes, so whoever needs the items afterwards hands out a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from jetspark.core.backoff import Backoff
from jetspark.errors import CircuitOpen, ConfigError, JetSparkError

__all__ = [
    "Bucket",
    "Bury",
    "Call",
    "Chance",
    "Circuit",
    "CircuitState",
    "DeadLetter",
    "DeadLetters",
    "Judge",
    "Meter",
    "Now",
    "Observer",
    "Retry",
    "SinkStats",
    "Sleep",
    "Step",
    "Steps",
    "Tell",
    "WallTime",
    "Write",
    "Written",
    "is_retryable",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Judge: TypeAlias = Callable[[Exception], bool]
"""Says of an error whether the same write may succeed later."""
CircuitState: TypeAlias = Literal["closed", "open", "half-open"]


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    batch: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Bury:
    records: list[DeadLetter[Any]]


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Now:
    pass


@dataclass(frozen=True, slots=True)
class WallTime:
    pass


@dataclass(frozen=True, slots=True)
class Chance:
    pass


@dataclass(frozen=True, slots=True)
class Tell:
    written: Written


@dataclass(frozen=True, slots=True)
class Call:
    call: Callable[[], Any]


Step: TypeAlias = Write | Bury | Sleep | Now | WallTime | Chance | Tell | Call
Steps: TypeAlias = Generator[Step, Any, None]


# ---- may it succeed later? -------------------------------------------------------------------------------------------

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


def is_retryable(error: Exception, own: Judge | None = None, sink: object = None) -> bool:
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


# ---- retry -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Tries again what may succeed later, after waits that double; bounded by attempts and by time."""

    attempts: int = 5
    first_wait_s: float = 0.1
    max_wait_s: float = 5.0
    max_total_s: float = 60.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        _check_count("attempts", self.attempts)
        _check_seconds("first_wait_s", self.first_wait_s)
        _check_seconds("max_total_s", self.max_total_s)
        if not self.first_wait_s <= self.max_wait_s < math.inf:
            raise ConfigError(f"max_wait_s={self.max_wait_s}: expected first_wait_s={self.first_wait_s} or more")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"jitter={self.jitter}: expected 0 (none) to 1 (anything down to no wait at all)")

    def wait_s(self, attempt: int, error: Exception, chance: float) -> float:
        """How long to wait after an attempt has failed; the first attempt is 1.

        An error that says when to come back (``retry_in_s``, as :class:`~jetspark.CircuitOpen` has) is taken at its
        word. The usual wait comes on top: those who were all sent away until the same moment must not come back at
        the same moment.
        """
        wait_s = Backoff(self.first_wait_s, self.max_wait_s).wait_s(attempt)
        asked_s = getattr(error, "retry_in_s", None)
        return wait_s * (1 - self.jitter * chance) + (max(0.0, asked_s) if isinstance(asked_s, int | float) else 0.0)

    def write(self, batch: Sequence[Any], judge: Judge) -> Steps:
        items = list(batch)
        began = yield Now()
        for attempt in range(1, self.attempts + 1):
            try:
                yield Write(list(items))
                return
            except Exception as error:
                if attempt == self.attempts or not judge(error):
                    raise
                wait_s = self.wait_s(attempt, error, (yield Chance()))
                if (yield Now()) - began + wait_s > self.max_total_s:
                    raise
            yield Sleep(wait_s)


# ---- circuit breaker -------------------------------------------------------------------------------------------------


class Circuit:
    """Leaves a sink alone that fails again and again.

    ::

        closed ──so many failures in a row──> open ──open_s later──> half-open: one write is let through
          ^                                     ^                        │ success │ failure
          └─────────────────────────────────────┼────────────────────────┘         │
                                                └──────────────────────────────────┘

    Each move begins a new generation, and only writes of the present one move it on: those that began before an outage
    was noticed tell nothing new about it.
    """

    def __init__(self, *, failures: int, open_s: float) -> None:
        _check_count("failures", failures)
        _check_seconds("open_s", open_s)
        self.failures, self.open_s = failures, open_s
        self.state: CircuitState = "closed"
        self._generation = 0
        self._failed = 0
        """In a row."""
        self._opened_at = 0.0
        self._is_trying = False

    def enter(self, now: float) -> int:
        """Begin a write; returns the generation it belongs to.

        Raises:
            CircuitOpen: Not now.
        """
        if self.state == "open":
            left_s = self._opened_at + self.open_s - now
            if left_s > 0:
                raise CircuitOpen(left_s)
            self._move("half-open")
        if self.state == "half-open":
            if self._is_trying:
                raise CircuitOpen(self.open_s)  # as long as it will be if the trial fails
            self._is_trying = True
        return self._generation

    def on_success(self, generation: int) -> None:
        if generation == self._generation:
            self._failed = 0
            if self.state == "half-open":
                self._move("closed")

    def on_failure(self, generation: int, now: float) -> None:
        if generation != self._generation:
            return
        self._failed += 1
        if self.state == "half-open" or self._failed >= self.failures:
            self._opened_at = now
            self._move("open")

    def on_nothing(self, generation: int) -> None:
        """The write failed, and not because of the sink: it was no trial."""
        if generation == self._generation:
            self._is_trying = False

    def _move(self, state: CircuitState) -> None:
        self.state = state
        self._generation += 1
        self._failed = 0
        self._is_trying = False

    def write(self, batch: Sequence[Any], judge: Judge) -> Steps:
        generation = self.enter((yield Now()))
        try:
            yield Write(batch)
        except BaseException as error:
            # An error that no retry would mend is the batch's, not the sink's: an item at fault, looked for by halving
            # its batch, must not look like an outage. A write that was cancelled took too long for somebody.
            if isinstance(error, Exception) and not judge(error):
                self.on_nothing(generation)
            else:
                self.on_failure(generation, (yield Now()))
            raise
        self.on_success(generation)


# ---- rate limit ------------------------------------------------------------------------------------------------------


class Bucket:
    """A bucket of tokens, one for each item: ``items_per_s`` drip in, ``burst`` fit in.

    A write takes its tokens when it comes, in order, and waits until they would have been there; so the bucket may owe.
    One larger than the bucket waits until it is full, and those after it pay. In any ``t`` seconds at most ``burst +
    items_per_s * t`` items begin, and the excess of one such batch.
    """

    def __init__(self, *, items_per_s: float, burst: int | None) -> None:
        if not 0 < items_per_s < math.inf:
            raise ConfigError(f"items_per_s={items_per_s}: expected more than 0")
        if burst is not None:
            _check_count("burst", burst)
        self.items_per_s = items_per_s
        self.burst = max(1, math.ceil(items_per_s)) if burst is None else burst
        self._tokens = float(self.burst)
        self._filled_at: float | None = None

    def take(self, count: int, now: float) -> float:
        """Take so many tokens; returns the seconds to wait before using them."""
        if self._filled_at is not None and now > self._filled_at:
            self._tokens = min(float(self.burst), self._tokens + (now - self._filled_at) * self.items_per_s)
        self._filled_at = now if self._filled_at is None else max(now, self._filled_at)
        missing = min(count, self.burst) - self._tokens
        self._tokens -= count
        return max(0.0, missing / self.items_per_s)

    def give_back(self, count: int) -> None:
        """They were not used."""
        self._tokens = min(float(self.burst), self._tokens + count)

    def write(self, batch: Sequence[Any]) -> Steps:
        count = len(batch)
        wait_s = self.take(count, (yield Now()))
        if wait_s > 0:
            try:
                yield Sleep(wait_s)
            except BaseException:
                self.give_back(count)
                raise
        yield Write(batch)


# ---- dead letters ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadLetter(Generic[T_co]):
    """An item that could not be written, why, and when (seconds since 1970)."""

    item: T_co
    error: Exception
    time: float

    @property
    def reason(self) -> str:
        """The error in one line."""
        return f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """Has what failed for good written elsewhere."""

    when: Judge | None = None
    split: bool = False

    def write(self, batch: Sequence[Any], judge: Judge) -> Steps:
        pieces = [list(batch)]
        dead: list[DeadLetter[Any]] = []
        first: Exception | None = None
        while pieces:
            piece = pieces.pop()
            failure: Exception | None = None
            try:
                yield Write(list(piece))
            except Exception as error:
                if self.when is not None and not self.when(error):
                    raise
                failure = error
            if failure is None:
                continue
            first = first or failure
            # An outage is no item's fault, and halving would only meet it again and again.
            if self.split and len(piece) > 1 and not judge(failure):
                middle = len(piece) // 2
                pieces += [piece[middle:], piece[:middle]]  # the first half comes first, so order is kept
            else:
                now = yield WallTime()
                dead += [DeadLetter(item, failure, now) for item in piece]
        if first is not None:
            try:
                yield Bury(dead)
            except Exception:
                raise first  # noqa: B904 - what happened to the dead letters is its context


# ---- metrics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """One write that is over."""

    items: int
    seconds: float
    error: BaseException | None = None
    """None when it succeeded; also what cancelled it."""


class Observer(Protocol):
    """Is told of each write when it is over, from whichever thread or task wrote. What it raises is logged."""

    def __call__(self, written: Written, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStats:
    """What a sink was given, and what came of it, at one moment."""

    writes: int = 0
    """That are over, failed ones included."""
    items: int = 0
    """In writes that succeeded."""
    failed_writes: int = 0
    failed_items: int = 0
    in_progress: int = 0
    """Writes that are not over."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Failed writes by the class of their error."""
    seconds_sum: float = 0.0
    """Of all writes that are over."""
    seconds_max: float = 0.0


class Meter:
    """Counts and times writes."""

    def __init__(self) -> None:
        self._writes = self._items = self._failed_writes = self._failed_items = self._in_progress = 0
        self._errors: dict[str, int] = {}
        self._seconds_sum = self._seconds_max = 0.0

    def stats(self) -> SinkStats:
        return SinkStats(
            writes=self._writes,
            items=self._items,
            failed_writes=self._failed_writes,
            failed_items=self._failed_items,
            in_progress=self._in_progress,
            errors=dict(self._errors),
            seconds_sum=self._seconds_sum,
            seconds_max=self._seconds_max,
        )

    def write(self, batch: Sequence[Any]) -> Steps:
        items = len(batch)
        began = yield Now()
        self._in_progress += 1
        try:
            yield Write(batch)
        except BaseException as error:
            written = self._finish(items, (yield Now()) - began, error)
            yield Tell(written)
            raise
        yield Tell(self._finish(items, (yield Now()) - began, None))

    def _finish(self, items: int, seconds: float, error: BaseException | None) -> Written:
        self._in_progress -= 1
        self._writes += 1
        self._seconds_sum += seconds
        self._seconds_max = max(self._seconds_max, seconds)
        if error is None:
            self._items += items
        else:
            self._failed_writes += 1
            self._failed_items += items
            name = type(error).__name__
            self._errors[name] = self._errors.get(name, 0) + 1
        return Written(items, seconds, error)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected 1 or more")


def _check_seconds(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={value}: expected more than 0 seconds")
