"""The steps that sink wrappers yield to their driver. Pure: no clock, no randomness, no waiting.

Each wrapper is a generator. It yields a step and is resumed with the result, or the error is thrown into it. The driver
(:mod:`jetspark.batcher.aio.sinks`, :mod:`jetspark.batcher.blocking.sinks`) waits and writes::

    yield Write(batch)                 writes to the wrapped sink
    yield WriteDeadLetters(records)    writes to the sink for dead letters
    yield Sleep(seconds)               waits
    yield ReadClock()                  -> seconds of a monotonic clock
    yield WallTime()                   -> seconds since 1970
    yield Random()                     -> a random number in [0, 1)
    yield Notify(written)              calls the observer
    yield Call(call)                   -> the result of the call, awaited on asyncio if it is awaitable

Between two steps a generator runs alone: asyncio does not switch tasks there, and the blocking driver holds the
wrapper's lock there, and only there. So several writes may share one circuit, token bucket or meter. A cancellation is
thrown in like an error (``CancelledError``, which is not an ``Exception``): generators update their state and raise it
again.

A batch belongs to the sink during the write, so a wrapper that needs the items afterwards passes a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from jetspark.core.step_runner import ReadClock, Sleep, Steps

if TYPE_CHECKING:
    from jetspark.batcher.dead_letters import DeadLetter
    from jetspark.batcher.metered import Written

__all__ = ["Call", "Notify", "Random", "SinkSteps", "Step", "WallTime", "Write", "WriteDeadLetters"]


@dataclass(frozen=True, slots=True)
class Write:
    batch: Sequence[Any]


@dataclass(frozen=True, slots=True)
class WriteDeadLetters:
    records: list[DeadLetter[Any]]


@dataclass(frozen=True, slots=True)
class WallTime:
    pass


@dataclass(frozen=True, slots=True)
class Random:
    pass


@dataclass(frozen=True, slots=True)
class Notify:
    written: Written


@dataclass(frozen=True, slots=True)
class Call:
    call: Callable[[], Any]


Step: TypeAlias = Write | WriteDeadLetters | Sleep | ReadClock | WallTime | Random | Notify | Call
SinkSteps: TypeAlias = Steps[Step, None]
