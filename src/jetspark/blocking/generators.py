"""Generators that run up to their first yield when they are created."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

__all__ = ["begun"]

G = TypeVar("G", bound=Generator[Any, None, None])


def begun(generator: G) -> G:
    """Run the generator up to its first yield and return it.

    Python closes a generator that was never started without running its ``finally``.
    """
    next(generator)
    return generator
