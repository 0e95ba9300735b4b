"""Generators that must run up to their first yield, and work that an interrupt may stop half-way."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

__all__ = ["begun", "is_interrupt", "run_to_completion"]

G = TypeVar("G", bound=Generator[Any, None, None])


def begun(generator: G) -> G:
    """Run the generator up to its first yield and return it.

    Python closes a generator that was never started without running its ``finally``.
    """
    next(generator)
    return generator


T = TypeVar("T")


def run_to_completion(work: Callable[[], T]) -> T:
    """Run ``work``. A thread cannot defer an interrupt: the caller has to repeat interrupted work."""
    return work()


def is_interrupt(error: BaseException) -> bool:
    """True for errors such as ``KeyboardInterrupt``, which can stop a thread at any line."""
    return not isinstance(error, Exception)
