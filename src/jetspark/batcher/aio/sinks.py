"""Sinks with asyncio: the protocol, wrappers that compose in any order, and a file.

Decisions are made in :mod:`jetspark.batcher.effects`; this adds waiting and writing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, Protocol, TypeVar, cast

from jetspark.aio.step_runner import run_steps
from jetspark.batcher.aio.clock import TimerClock
from jetspark.batcher.config import Clock
from jetspark.batcher.dead_letters import DeadLetter
from jetspark.batcher.effects import Call, Notify, Random, SinkSteps, Step, WallTime, Write, WriteDeadLetters
from jetspark.batcher.files import LineFile, json_line
from jetspark.batcher.metered import Observer
from jetspark.batcher.sink_base import (
    CircuitBreakerSinkBase,
    DeadLetterSinkBase,
    MeteredSinkBase,
    RateLimitSinkBase,
    RetrySinkBase,
)
from jetspark.core.step_runner import ReadClock, Sleep, StepRun

__all__ = [
    "CircuitBreakerSink",
    "DeadLetterSink",
    "FileSink",
    "MeteredSink",
    "RateLimitSink",
    "RetrySink",
    "Sink",
]

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_logger = logging.getLogger("jetspark.batcher")


class Sink(Protocol[T_contra]):
    """Receives batches. Returning means that the whole batch is safe; raising counts it as failed.

    During the call the batch belongs to the sink: no other code reads or writes the list.
    """

    async def write(self, batch: Sequence[T_contra], /) -> None: ...


class Runner:
    """Performs the steps of a write."""

    def __init__(self, sink: Sink[Any] | None, clock: Clock | None = None) -> None:
        self.sink, self.clock = sink, cast(TimerClock | None, clock)
        self.dead_letters: Sink[Any] | None = None
        self.observe: Observer | None = None
        self.lock = nullcontext()
        """A no-op: no other task runs between two steps."""

    async def run(self, steps: SinkSteps) -> None:
        await run_steps(StepRun(steps), self._do, lock=self.lock)

    async def _do(self, step: Step) -> Any:
        match step:
            case Write(batch):
                assert self.sink is not None
                await self.sink.write(batch)
            case ReadClock():
                return self._now()
            case Sleep(seconds):
                await self._sleep(seconds)
            case Random():
                return random.SystemRandom().random()
            case WriteDeadLetters(records):
                assert self.dead_letters is not None
                await self.dead_letters.write(records)
            case WallTime():
                return time.time()
            case Notify(written):
                if self.observe is not None:
                    try:
                        self.observe(written)
                    except Exception:
                        _logger.exception("observer raised for %r; the write is not affected", written)
            case Call(call):
                result = call()
                return await result if inspect.isawaitable(result) else result
        return None

    def _now(self) -> float:
        return time.monotonic() if self.clock is None else self.clock.now()

    async def _sleep(self, seconds: float) -> None:
        if self.clock is None:
            await asyncio.sleep(seconds)
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.clock.call_at(self.clock.now() + seconds, lambda: None if over.done() else over.set_result(None))
        try:
            await over
        finally:
            timer.cancel()


class _Writing(Generic[T]):
    """Adds ``write``, which performs the steps of the base class."""

    _make_runner = Runner
    _runner: Runner
    _steps: Callable[[Sequence[Any]], SinkSteps]

    async def write(self, batch: Sequence[T], /) -> None:
        await self._runner.run(self._steps(batch))


class RetrySink(_Writing[T], RetrySinkBase[Sink[T]]):
    __doc__ = RetrySinkBase.__doc__


class CircuitBreakerSink(_Writing[T], CircuitBreakerSinkBase[Sink[T]]):
    __doc__ = CircuitBreakerSinkBase.__doc__


class RateLimitSink(_Writing[T], RateLimitSinkBase[Sink[T]]):
    __doc__ = RateLimitSinkBase.__doc__


class DeadLetterSink(_Writing[T], DeadLetterSinkBase[Sink[T], Sink[DeadLetter[T]]]):
    __doc__ = DeadLetterSinkBase.__doc__


class MeteredSink(_Writing[T], MeteredSinkBase[Sink[T]]):
    __doc__ = MeteredSinkBase.__doc__


class FileSink(Generic[T]):
    """Appends a line of JSON for each item to a file.

    A batch is written completely or not at all: a failed write is truncated, so a retry duplicates nothing. With
    ``fsync`` the lines are on the disk when ``write`` returns; without, a crash of the machine may lose the last ones
    (a crash of the program does not). An incomplete line after a crash is moved to ``<path>.torn`` when the file is
    opened, so every line is valid. Only one sink may write a file at a time.

    The file is written in a thread. A cancelled write continues there, and may be stored.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, to_json: Callable[[T], str | bytes] = json_line, fsync: bool = False
    ) -> None:
        self._file = LineFile(path, to_json, fsync=fsync)
        self._turn = asyncio.Lock()

    async def write(self, batch: Sequence[T], /) -> None:
        """Append the items.

        Raises:
            TypeError, ValueError: An item cannot be converted to a line of JSON.
            OSError: The disk failed.
        """
        async with self._turn:  # in order
            # A copy, because the thread may still read it after a cancellation, when the batch is not ours any more.
            await asyncio.to_thread(self._file.write, list(batch))

    async def close(self) -> None:
        """Close the file. May be called again."""
        await asyncio.to_thread(self._file.close)

    async def __aenter__(self) -> FileSink[T]:
        await asyncio.to_thread(self._file.open)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
