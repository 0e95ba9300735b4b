"""Counting and timing the writes of a sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jetspark.batcher.effects import Notify, SinkSteps, Write
from jetspark.core.step_runner import ReadClock

__all__ = ["Meter", "Observer", "SinkStats", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """One finished write."""

    items: int
    seconds: float
    error: BaseException | None = None
    """None when the write succeeded; the cancellation if it was cancelled."""


class Observer(Protocol):
    """Called after each write, from the thread or task that wrote. Its exceptions are logged and not raised."""

    def __call__(self, written: Written, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStats:
    """Counters of the writes to a sink, at one moment."""

    writes: int = 0
    """Finished writes, failed ones included."""
    items: int = 0
    """Items in writes that succeeded."""
    failed_writes: int = 0
    failed_items: int = 0
    in_progress: int = 0
    """Writes that have not finished."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Number of failed writes by error class."""
    seconds_sum: float = 0.0
    """Total duration of the finished writes."""
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

    def write(self, batch: Sequence[Any]) -> SinkSteps:
        items = len(batch)
        began = yield ReadClock()
        self._in_progress += 1
        try:
            yield Write(batch)
        except BaseException as error:
            written = self._finish(items, (yield ReadClock()) - began, error)
            yield Notify(written)
            raise
        yield Notify(self._finish(items, (yield ReadClock()) - began, None))

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
