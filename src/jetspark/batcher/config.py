"""What a batcher is given, and what it tells about itself. The same for both drivers."""

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
    """Where every accepted item is, at one moment.

    ``enqueued == flushed_ok + flushed_fail + dropped_on_shutdown + in_flight``, at any moment.
    """

    enqueued: int = 0
    """Accepted."""
    flushed_ok: int = 0
    """In writes that succeeded."""
    flushed_fail: int = 0
    """In writes that failed, or were not done within ``flush_timeout``."""
    dropped_on_shutdown: int = 0
    """Not known to be written when the time given to ``shutdown`` was over."""
    in_flight: int = 0
    """Waiting, or being written."""
    rejected: int = 0
    """Refused by ``try_add``; never accepted, so no part of the sum."""
    late_ok: int = 0
    """Of those counted as failed or dropped because time was over: those that were reported as written afterwards."""
    queue_depth: int = 0
    """Waiting, not yet given to the sink."""
    flushes: Mapping[Reason, int] = field(default_factory=dict)
    """Writes begun, by reason."""
    is_closed: bool = False
    """Nothing more is accepted."""


class Flushed(NamedTuple):
    """How it went with the items a manual flush waited for."""

    ok: int
    failed: int


class Metrics(Protocol):
    """Where a batcher's numbers go. Nothing is called for single items, so measuring costs a batcher nothing.

    Both methods may be called from any thread. What ``flushed`` raises is logged and goes no further.
    """

    def watch(self, name: str, stats: Callable[[], Stats]) -> None:
        """A batcher begins: its counters are read from ``stats`` whenever somebody wants to know them."""

    def flushed(self, name: str, *, items: int, seconds: float, result: Result) -> None:
        """A write is over."""


class Clock(Protocol):
    """What time it is. Each driver adds a way to wait for a time; :class:`jetspark.testing.FakeClock` has both."""

    def now(self) -> float: ...


@dataclass(frozen=True, kw_only=True)  # with slots, Python 3.11 refuses `BatcherConfig[Sink](...)`
class BatcherConfig(Generic[SinkT_co]):
    """How a batcher behaves. Times are in seconds."""

    sink: SinkT_co
    """Where batches go: an object with ``write(batch)``."""
    max_batch_size: int
    """Flush when the batch holds this many items."""
    max_batch_delay: float
    """Flush when the first item of the batch has waited this many seconds."""
    name: str = "batcher"
    """For errors, logs and the label of metrics."""
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    """Items accepted while the sink is busy; then ``add`` waits. Zero or less means 1024."""
    flush_timeout: float = DEFAULT_FLUSH_TIMEOUT_S
    """Longest time for one write. Zero or less means 5."""
    max_batch_bytes: int | None = None
    """A batch has at most this many bytes, as ``size_of`` counts them; a larger item is refused."""
    size_of: Callable[[Any], int] = len
    """Bytes of an item; asked only with ``max_batch_bytes``."""
    max_concurrent_flushes: int = 1
    """More than one gives up the order across batches: they begin in order, and may finish in any."""
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
    """
    Raises:
        ConfigError: It is no sink. A class of sinks is none, though it has the method.
    """
    if isinstance(sink, type) or not callable(getattr(sink, "write", None)):
        raise unfit(what, sink, "an object with a method write(batch)")


def _is_default(value: Any) -> bool:
    """A number of zero or less; what is no number is for the checks."""
    return type(value) is not bool and isinstance(value, numbers.Real) and value <= 0
