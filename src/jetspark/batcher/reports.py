"""What a batcher says of itself, in the same words on both drivers: log lines, and metrics of its writes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from jetspark.batcher.config import BatcherConfig

__all__ = ["Reporter", "WriteReport"]


@dataclass(frozen=True, slots=True)
class WriteReport:
    """A write is over: its items are settled, or the sink has returned after they were."""

    items: int
    seconds: float
    error: BaseException | None
    is_counted: bool
    """Whether the items count by this; else they were counted before, and only an error is worth telling."""


class Reporter:
    """Tells the log and the metrics. What metrics raise goes no further."""

    def __init__(self, config: BatcherConfig[Any]) -> None:
        self._name, self._metrics = config.name, config.metrics
        self.logger = config.logger or logging.getLogger("jetspark.batcher")

    def write_is_over(self, report: WriteReport) -> None:
        error = report.error
        if error is not None:
            what = "batcher %r: a write of %d items failed: %s: %s"
            self.logger.warning(what, self._name, report.items, type(error).__name__, error)
        if self._metrics is not None and report.is_counted:
            try:
                self._metrics.flushed(
                    self._name, items=report.items, seconds=report.seconds, result="ok" if error is None else "fail"
                )
            except Exception:
                self.logger.exception("batcher %r: its metrics failed", self._name)

    def dropped(self, items: int) -> None:
        self.logger.warning("batcher %r: %d items dropped on shutdown", self._name, items)

    def is_broken(self, error: BaseException) -> None:
        self.logger.error("batcher %r cannot go on: %r", self._name, error)
