"""Configuration, counters and metrics protocol of a batcher, the same for both drivers."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from jetspark.core.arguments import function, instance, text, unfit
from jetspark.core.numbers import seconds_above_0, whole

__all__ = ["BatcherConfig", "Clock", "Flushed", "Metrics", "Reason", "Result", "Stats"]

DEFAULT_QUEUE_DEPTH = 1024
DEFAULT_FLUSH_TIMEOUT_S = 5.0
_OR_DEFAULT = "or 0 for the default"

Reason: TypeAlias = Literal["size", "bytes", "time", "manual", "shutdown"]
"""Why a batch was flushed; each flush has exactly one."""
REASONS: tuple[Reason, ...] = ("size", "bytes", "time", "manual", "shutdown")
Result: TypeAlias = Literal["ok", "fail"]

SinkT_co = TypeVar("SinkT_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of a batcher at one moment; every accepted item is in exactly one of four.

    ``enqueued == flushed_ok + flushed_fail + dropped_on_shutdown + in_flight``, at any moment.
    """

    enqueued: int = 0
    """Accepted items."""
    flushed_ok: int = 0
    """Items in writes that succeeded."""
    flushed_fail: int = 0
    """Items in writes that failed, or were not done within ``flush_timeout``."""
    dropped_on_shutdown: int = 0
    """Items not known to be written when the timeout of ``shutdown`` had passed."""
    in_flight: int = 0
    """Items that wait or are being written."""
    rejected: int = 0
    """Items refused by ``try_add``; never accepted, so not part of the sum."""
    late_ok: int = 0
    """Items counted as failed or dropped because of a timeout, whose write succeeded later."""
    queue_depth: int = 0
    """Items that wait, not yet passed to the sink."""
    flushes: Mapping[Reason, int] = field(default_factory=dict)
    """Number of writes begun, by reason."""
    is_closed: bool = False
    """True when the batcher accepts no more items."""


class Flushed(NamedTuple):
    """Outcome of the items a manual flush waited for."""

    ok: int
    failed: int


class Metrics(Protocol):
    """Receives a batcher's metrics. It is not called for single items, so it does not slow ``add`` down.

    Both methods may be called from any thread. An exception of ``flushed`` is logged and not raised.
    """

    def watch(self, name: str, stats: Callable[[], Stats]) -> None:
        """Called once for a new batcher; call ``stats`` whenever its counters are needed."""

    def flushed(self, name: str, *, items: int, seconds: float, result: Result) -> None:
        """Called after each write."""


class Clock(Protocol):
    """A clock. Each driver also needs a way to wait for a time; :class:`jetspark.testing.FakeClock` has both."""

    def now(self) -> float: ...


@dataclass(frozen=True, kw_only=True)  # with slots, Python 3.11 refuses `BatcherConfig[Sink](...)`
class BatcherConfig(Generic[SinkT_co]):
    """Configuration of a batcher. Times are in seconds."""

    sink: SinkT_co
    """Receives the batches: an object with ``write(batch)``."""
    max_batch_size: int
    """Flush when the batch holds this many items."""
    max_batch_delay: float
    """Flush when the first item of the batch has waited this many seconds."""
    name: str = "batcher"
    """Names the batcher in errors, logs and metric labels."""
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    """Items accepted while the sink is busy; then ``add`` waits. Zero or less means 1024."""
    flush_timeout: float = DEFAULT_FLUSH_TIMEOUT_S
    """Longest time for one write. Zero or less means 5."""
    max_batch_bytes: int | None = None
    """Most bytes of a batch, as ``size_of`` counts them; a larger item is refused."""
    size_of: Callable[[Any], int] = len
    """Returns the bytes of an item; called only with ``max_batch_bytes``."""
    max_concurrent_flushes: int = 1
    """Writes at a time. With more than one, batches begin in order but may finish in any order."""
    metrics: Metrics | None = None
    logger: logging.Logger | None = None
    """By default ``jetspark.batcher``."""
    clock: Clock | None = None
    """For tests; by default real time."""

    def __post_init__(self) -> None:
        whole("max_batch_size", self.max_batch_size)
        whole("max_concurrent_flushes", self.max_concurrent_flushes)
        if self.max_batch_bytes is not None:
            whole("max_batch_bytes", self.max_batch_bytes, instead="or None")
        seconds_above_0("max_batch_delay", self.max_batch_delay)
        if _is_default(self.queue_depth):
            object.__setattr__(self, "queue_depth", DEFAULT_QUEUE_DEPTH)
        if _is_default(self.flush_timeout):
            object.__setattr__(self, "flush_timeout", DEFAULT_FLUSH_TIMEOUT_S)
        whole("queue_depth", self.queue_depth, instead=_OR_DEFAULT)
        seconds_above_0("flush_timeout", self.flush_timeout, instead=_OR_DEFAULT)
        check_sink("sink", self.sink)
        function("size_of", self.size_of, "a function from an item to its bytes")
        text("name", self.name)
        if self.metrics is not None and not callable(getattr(self.metrics, "flushed", None)):
            raise unfit("metrics", self.metrics, "an object with the methods watch() and flushed()")
        if self.logger is not None:
            instance("logger", self.logger, logging.Logger)
        if self.clock is not None and not callable(getattr(self.clock, "now", None)):
            raise unfit("clock", self.clock, "an object with a method now()")


def check_sink(what: str, sink: object) -> None:
    """Check an argument that must be a sink.

    Raises:
        ConfigError: The object has no ``write`` method, or is a class instead of an instance.
    """
    if isinstance(sink, type) or not callable(getattr(sink, "write", None)):
        raise unfit(what, sink, "an object with a method write(batch)")


def _is_default(value: Any) -> bool:
    """True for a number of zero or less; other types are left to the checks."""
    return type(value) is not bool and isinstance(value, numbers.Real) and value <= 0
