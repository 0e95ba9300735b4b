"""What ``connect`` returns with threads: a client that is connected."""

from __future__ import annotations

from collections.abc import Callable

from jetspark.blocking.client import Client as Starting

__all__ = ["Starting", "begin"]


def begin(start: Callable[[], Starting]) -> Starting:
    return start()
