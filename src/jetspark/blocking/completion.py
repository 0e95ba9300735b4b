"""Work that an interrupt may stop half-way, from threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["is_interrupt", "run_to_completion"]

T = TypeVar("T")


def run_to_completion(work: Callable[[], T]) -> T:
    """Run ``work``. A thread cannot defer an interrupt: the caller has to repeat interrupted work."""
    return work()


def is_interrupt(error: BaseException) -> bool:
    """True for errors such as ``KeyboardInterrupt``, which can stop a thread at any line."""
    return not isinstance(error, Exception)
