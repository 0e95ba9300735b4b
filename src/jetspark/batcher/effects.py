"""What the wrappers of a sink ask their driver to do, and how they work. Pure: no clock, no chance, no waiting.

Each wrapper is a generator. It yields what it wants done and is sent the outcome, or has the error thrown into it; the
driver (:mod:`jetspark.batcher.aio.sinks`, :mod:`jetspark.batcher.blocking.sinks`) does the waiting and the writing::

    yield Write(batch)                 the wrapped sink has written it
    yield WriteDeadLetters(records)    the sink for dead letters has written them
    yield Sleep(seconds)               that much time has passed
    yield ReadClock()                  -> seconds of a clock that never goes back
    yield WallTime()                   -> seconds since 1970
    yield Random()                     -> a random number in [0, 1)
    yield Notify(written)              the observer was told
    yield Call(call)                   -> what the call returned, which asyncio awaits where it has to

Between two steps a generator runs alone: asyncio does not switch tasks there, and the blocking driver holds the
wrapper's lock there, and only there. So several writes may share one circuit, token bucket or meter. A cancelled write
is an error like any other that is thrown in (``CancelledError``, no ``Exception``): generators put their books in order
and raise it again.

A batch belongs to the sink while it writes, so a wrapper that needs the items afterwards hands out a copy.
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
