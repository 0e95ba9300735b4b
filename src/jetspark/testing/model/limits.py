"""Limits on the number and duration of the model's open batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jetspark.errors import ConfigError

__all__ = ["BatchLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The defaults of nats-server 2.15, whose configuration calls them ``jetstream{limits{batch{...}}}``.

    Its ``max_inflight_per_stream`` and ``max_inflight_total`` set the limits of both kinds at once, and each kind is
    counted separately; the defaults of the two kinds differ, hence four fields.
    """

    max_inflight_per_stream: int = 50
    """Open atomic batches of one stream."""
    max_inflight_total: int = 1000
    """Open atomic batches of the server."""
    max_fast_inflight_per_stream: int = 1000
    max_fast_inflight_total: int = 50_000
    max_messages: int = 1000
    """Messages of one atomic batch. An end-of-batch marker is not counted; fast batches have no such limit."""
    timeout_s: float = 10.0
    """Without a message for this long, a batch of either kind is given up."""

    def __post_init__(self) -> None:
        for name in (
            "max_inflight_per_stream",
            "max_inflight_total",
            "max_fast_inflight_per_stream",
            "max_fast_inflight_total",
            "max_messages",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected 1 or more")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s={self.timeout_s!r}: expected more than 0 seconds")
