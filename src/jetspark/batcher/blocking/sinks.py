"""Sinks on threads: the protocol, wrappers that compose in any order, and a file.

Decisions are made in :mod:`jetspark.batcher.effects`; this adds waiting and writing. A lock guards what the writes of a
wrapper share; nobody holds it while writing, sleeping or calling back.
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
    """Where batches go. Returning means: all of it is safe. Raising means: count it as failed.

    The batch is the sink's for the duration of the call, and a list of its own: nobody else reads or writes it.
    """

    def write(self, batch: Sequence[T_contra], /) -> None: ...


class Runner:
    """Carries out steps, and holds the lock between them."""

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
                        _logger.exception("an observer raised for %r", written)
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
    """Runs the steps of a face."""

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

    A batch is one write, and all of it or nothing: what a failed write left is cut off, so a retry doubles nothing.
    With ``fsync`` the lines are on the disk when ``write`` returns; without, a crash of the machine may lose the last
    ones (a crash of the program does not). A line that a crash left unfinished is moved to ``<path>.torn`` when the
    file is opened, so every line can be read. Only one sink writes a file at a time.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, to_json: Callable[[T], str | bytes] = json_line, fsync: bool = False
    ) -> None:
        self._file = LineFile(path, to_json, fsync=fsync)

    def write(self, batch: Sequence[T], /) -> None:
        """Raises ``TypeError`` or ``ValueError`` for an item that is no JSON, ``OSError`` for the disk's troubles."""
        self._file.write(batch)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def __enter__(self) -> FileSink[T]:
        self._file.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
