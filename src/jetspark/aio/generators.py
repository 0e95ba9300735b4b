"""Asynchronous generators that begin before they are asked for their first element."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["begun"]

G = TypeVar("G", bound=AsyncGenerator[Any, None])


def begun(generator: G) -> G:
    """The generator, run up to its first yield, which must not wait for anything.

    One that has not begun is closed without its ``finally``, and the loop does not hear of its end.
    """
    with suppress(StopIteration):
        generator.asend(None).send(None)
    return generator
