"""Sinks on threads: the protocol, wrappers that compose in any order, and a file.

Decisions are made in :mod:`jetspark.batcher.effects`; this adds waiting and writing. A lock guards the state that the
writes of a wrapper share; it is not held during writes, sleeps and callbacks.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from jetspark.batcher.blocking.clock import WaitingClock
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
from jetspark.blocking.step_runner import run_steps
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

    def write(self, batch: Sequence[T_contra], /) -> None: ...


class Runner:
    """Performs the steps of a write, and holds the lock between them."""

    def __init__(self, sink: Sink[Any] | None, clock: Clock | None = None) -> None:
        self.sink, self.clock = sink, cast(WaitingClock | None, clock)
        self.dead_letters: Sink[Any] | None = None
        self.observe: Observer | None = None
        self.lock = threading.Lock()

    def run(self, steps: SinkSteps) -> None:
        run_steps(StepRun(steps), self._do, lock=self.lock)

    def _do(self, step: Step) -> Any:
        match step:
            case Write(batch):
                assert self.sink is not None
                self.sink.write(batch)
            case ReadClock():
                return self._now()
            case Sleep(seconds):
                self._sleep(seconds)
            case Random():
                return random.SystemRandom().random()
            case WriteDeadLetters(records):
                assert self.dead_letters is not None
                self.dead_letters.write(records)
            case WallTime():
                return time.time()
            case Notify(written):
                if self.observe is not None:
                    try:
                        self.observe(written)
                    except Exception:
                        _logger.exception("observer raised for %r; the write is not affected", written)
            case Call(call):
                return call()
        return None

    def _now(self) -> float:
        return time.monotonic() if self.clock is None else self.clock.now()

    def _sleep(self, seconds: float) -> None:
        if self.clock is None:
            time.sleep(seconds)
            return
        until, moved = self.clock.now() + seconds, threading.Condition()
        with moved:
            while self.clock.now() < until:
                self.clock.wait(moved, until)


class _Writing(Generic[T]):
    """Adds ``write``, which performs the steps of the base class."""

    _make_runner = Runner
    _runner: Runner
    _steps: Callable[[Sequence[Any]], SinkSteps]

    def write(self, batch: Sequence[T], /) -> None:
        self._runner.run(self._steps(batch))


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
    """

    def __init__(
        self, path: str | os.PathLike[str], *, to_json: Callable[[T], str | bytes] = json_line, fsync: bool = False
    ) -> None:
        self._file = LineFile(path, to_json, fsync=fsync)

    def write(self, batch: Sequence[T], /) -> None:
        """Append the items.

        Raises:
            TypeError, ValueError: An item cannot be converted to a line of JSON.
            OSError: The disk failed.
        """
        self._file.write(batch)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def __enter__(self) -> FileSink[T]:
        self._file.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
