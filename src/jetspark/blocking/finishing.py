"""Work that must not stop half-way, from threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["is_interrupt", "see_through"]

T = TypeVar("T")


def see_through(work: Callable[[], T]) -> T:
    """Do it. An interrupt cannot be kept away: what it has stopped half-way, the caller has to do again."""
    return work()


def is_interrupt(error: BaseException) -> bool:
    """Whether the error has stopped something half-way, such as ``KeyboardInterrupt``, which may come at any line."""
    return not isinstance(error, Exception)
