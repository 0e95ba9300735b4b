"""Sinks on threads: the protocol, wrappers that compose in any order, and a file.

Decisions are made in :mod:`jetspark.batcher.steps`; this adds waiting and writing. A lock guards what the writes of a
wrapper share; nobody holds it while writing, sleeping or calling back.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from jetspark.batcher.files import LineFile, json_line
from jetspark.batcher.steps import (
    Bucket,
    Bury,
    Call,
    Chance,
    Circuit,
    CircuitState,
    DeadLetter,
    DeadLetters,
    Judge,
    Meter,
    Now,
    Observer,
    Retry,
    SinkStats,
    Sleep,
    Step,
    Steps,
    Tell,
    WallTime,
    Write,
    is_retryable,
)

__all__ = [
    "CircuitBreakerSink",
    "DeadLetterSink",
    "FileSink",
    "MeteredSink",
    "RateLimitSink",
    "RetrySink",
    "Sink",
    "SinkClock",
]

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_logger = logging.getLogger("jetspark.batcher")


class Sink(Protocol[T_contra]):
    """Where batches go. Returning means: all of it is safe. Raising means: count it as failed.

    The batch is the sink's for the duration of the call, and a list of its own: nobody else reads or writes it.
    """

    def write(self, batch: Sequence[T_contra], /) -> None: ...


class SinkClock(Protocol):
    """What a wrapper reads time from and waits with, for tests: :class:`jetspark.testing.FakeClock` is one."""

    def now(self) -> float: ...

    def wait(self, condition: threading.Condition, until: float | None, /) -> None:
        """Until the condition is notified or it is that time; the caller holds its lock."""


class Runner:
    """Carries out steps, and holds the lock between them."""

    def __init__(self, sink: Sink[Any] | None, clock: SinkClock | None = None) -> None:
        self.sink, self.clock = sink, clock
        self.dead_letters: Sink[Any] | None = None
        self.observe: Observer | None = None
        self.lock = threading.Lock()

    def run(self, steps: Steps) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            while True:
                try:
                    with self.lock:
                        step = steps.send(result) if error is None else steps.throw(error)
                except StopIteration:
                    return
                result = error = None
                try:
                    result = self._do(step)
                except BaseException as failure:
                    error = failure
        finally:
            error = None  # or its traceback and this frame would keep each other

    def _do(self, step: Step) -> Any:
        match step:
            case Write(batch):
                assert self.sink is not None
                self.sink.write(batch)
            case Now():
                return self._now()
            case Sleep(seconds):
                self._sleep(seconds)
            case Chance():
                return random.random()
            case Bury(records):
                assert self.dead_letters is not None
                self.dead_letters.write(records)
            case WallTime():
                return time.time()
            case Tell(written):
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


class _Wrapper(Generic[T]):
    """A sink around another."""

    def __init__(self, sink: Sink[T], own: Judge | None, clock: SinkClock | None) -> None:
        self._sink, self._own = sink, own
        self._runner = Runner(sink, clock)

    def is_retryable(self, error: Exception) -> bool:
        """Whether the same write may succeed later; what is not known here the wrapped sink is asked."""
        return is_retryable(error, self._own, self._sink)


class RetrySink(_Wrapper[T]):
    """Writes again what may succeed later, after waits that double, with jitter.

    It gives up, with the last error, after ``attempts`` writes, or when the next would begin more than ``max_total_s``
    after the first: give it less than the batcher's ``flush_timeout``. Each wait is between ``1 - jitter`` and 1 times
    ``first_wait_s``, twice that, and so on up to ``max_wait_s``. An error with ``retry_in_s``, such as
    :class:`~jetspark.CircuitOpen`, adds that.

    An error is final, and raised at once, if ``is_retryable`` says so; without it if the error says so (an attribute or
    method ``is_retryable``), or the sink (a method ``is_retryable(error)``); else if it is of a kind that does not
    pass: ``ValueError`` (``ConfigError`` too), ``TypeError`` and other mistakes, ``PermissionError``, a feature that is
    off. Everything else is tried again.

    The sink sees a batch more than once, and may have stored some of it when it failed: it must recognise items it has.
    """

    def __init__(
        self,
        sink: Sink[T],
        *,
        attempts: int = 5,
        first_wait_s: float = 0.1,
        max_wait_s: float = 5.0,
        max_total_s: float = 60.0,
        jitter: float = 0.5,
        is_retryable: Judge | None = None,
        clock: SinkClock | None = None,
    ) -> None:
        super().__init__(sink, is_retryable, clock)
        self._retry = Retry(
            attempts=attempts,
            first_wait_s=first_wait_s,
            max_wait_s=max_wait_s,
            max_total_s=max_total_s,
            jitter=jitter,
        )

    def write(self, batch: Sequence[T], /) -> None:
        self._runner.run(self._retry.write(batch, self.is_retryable))


class CircuitBreakerSink(_Wrapper[T]):
    """Leaves a sink alone that failed ``failures`` times in a row.

    For ``open_s`` seconds each write raises :class:`~jetspark.CircuitOpen` at once, which says when to come back. Then
    exactly one write is let through: if it succeeds all is as before, if not the time begins anew.

    Only errors that may pass count (see ``is_retryable`` of :class:`RetrySink`), and cancelled writes, which took too
    long for somebody: an item the sink will never take says nothing about the sink.
    """

    def __init__(
        self,
        sink: Sink[T],
        *,
        failures: int = 5,
        open_s: float = 10.0,
        is_retryable: Judge | None = None,
        clock: SinkClock | None = None,
    ) -> None:
        super().__init__(sink, is_retryable, clock)
        self._circuit = Circuit(failures=failures, open_s=open_s)

    @property
    def state(self) -> CircuitState:
        """``"closed"``, ``"open"`` or ``"half-open"``; an open one is closed by a write, not by time alone."""
        return self._circuit.state

    def write(self, batch: Sequence[T], /) -> None:
        self._runner.run(self._circuit.write(batch, self.is_retryable))


class RateLimitSink(_Wrapper[T]):
    """Passes on at most ``items_per_s`` items each second, and ``burst`` at once (by default those of one second).

    Writes wait for their turn. A batch larger than the burst goes through when the bucket is full, and those after it
    wait the longer. What failed has been passed on, so its tokens are spent; a write that is cancelled while it waits
    gives them back.
    """

    def __init__(
        self, sink: Sink[T], *, items_per_s: float, burst: int | None = None, clock: SinkClock | None = None
    ) -> None:
        super().__init__(sink, None, clock)
        self._bucket = Bucket(items_per_s=items_per_s, burst=burst)

    def write(self, batch: Sequence[T], /) -> None:
        self._runner.run(self._bucket.write(batch))


class DeadLetterSink(_Wrapper[T]):
    """Has what failed written to another sink, as :class:`DeadLetter` records: item, error, time.

    The write succeeds when ``dead_letters`` took them. If that fails too, the first error is raised, with the second as
    its context. ``when`` says which errors this is for (by default all); others are raised.

    With ``split`` a batch that failed for good, by an error no retry would mend, is halved until the items at fault are
    found, and only they become dead letters; the others are written, in order. That takes up to ``2 n - 1`` writes for
    ``n`` items, and some items may be written more than once unless the sink stores all of a batch or nothing.
    """

    def __init__(
        self,
        sink: Sink[T],
        dead_letters: Sink[DeadLetter[T]],
        *,
        when: Judge | None = None,
        split: bool = False,
        is_retryable: Judge | None = None,
    ) -> None:
        super().__init__(sink, is_retryable, None)
        self._runner.dead_letters = dead_letters
        self._dead_letters = DeadLetters(when=when, split=split)

    def write(self, batch: Sequence[T], /) -> None:
        self._runner.run(self._dead_letters.write(batch, self.is_retryable))


class MeteredSink(_Wrapper[T]):
    """Counts and times the writes of a sink: :meth:`stats`, and ``observe`` is told of each."""

    def __init__(self, sink: Sink[T], observe: Observer | None = None, *, clock: SinkClock | None = None) -> None:
        super().__init__(sink, None, clock)
        self._runner.observe = observe
        self._meter = Meter()

    def stats(self) -> SinkStats:
        """What the sink was given, and what came of it, at one moment."""
        with self._runner.lock:
            return self._meter.stats()

    def write(self, batch: Sequence[T], /) -> None:
        self._runner.run(self._meter.write(batch))


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
