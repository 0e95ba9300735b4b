"""Asynchronous generators that run up to their first yield when they are created."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["begun"]

G = TypeVar("G", bound=AsyncGenerator[Any, None])


def begun(generator: G) -> G:
    """Run the generator up to its first yield, which must not await, and return it.

    Python closes a generator that was never started without running its ``finally``, and without the loop's hooks.
    """
    with suppress(StopIteration):
        generator.asend(None).send(None)
    return generator
