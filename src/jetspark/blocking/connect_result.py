"""The result of ``connect`` with threads: a connected client."""

from __future__ import annotations

from collections.abc import Callable

from jetspark.blocking.client import Client as ConnectResult

__all__ = ["ConnectResult", "begin"]


def begin(start: Callable[[], ConnectResult]) -> ConnectResult:
    return start()
