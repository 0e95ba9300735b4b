"""Helpers of an application in a module of their own: what `jetspark check` finds in them."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp() -> datetime:
    return datetime.now(UTC)


def stamped_twice() -> list[datetime]:
    return [stamp(), stamp()]


def plus(at: float, days: int) -> float:
    return at + 86_400.0 * days
