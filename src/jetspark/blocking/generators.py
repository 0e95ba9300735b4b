"""Generators that begin before they are asked for their first element."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

__all__ = ["begun"]

G = TypeVar("G", bound=Generator[Any, None, None])


def begun(generator: G) -> G:
    """The generator, run up to its first yield. One that has not begun is closed without its ``finally``."""
    next(generator)
    return generator
