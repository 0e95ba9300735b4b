"""Log lines and write metrics of a batcher, the same on both drivers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from jetspark.batcher.config import BatcherConfig

__all__ = ["Reporter", "WriteReport"]


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The end of a write: its items were counted, or the sink returned after they had been."""

    items: int
    seconds: float
    error: BaseException | None
    is_counted: bool
    """True if this report counts the items. False if they were counted before; then only an error is logged."""


class Reporter:
    """Reports to the log and the metrics. Exceptions of the metrics object are logged and not raised."""

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
        self.logger.error("batcher %r failed; its remaining items are not written: %r", self._name, error)
