"""The cause of current work, in a context variable, so that every task that is started inherits it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, Protocol

__all__ = ["Cause", "CauseLike", "child_of", "current_cause", "new_trace"]

_read_traceparent = re.compile(r"([0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-)(?!0{16})[0-9a-f]{16}(-[0-9a-f]{2})").fullmatch


class CauseLike(Protocol):
    """A possible cause. A ``Decoded`` event is one; its headers are only read for the trace."""

    @property
    def id(self) -> str: ...
    @property
    def correlation_id(self) -> str: ...
    @property
    def traceparent(self) -> str | None: ...


class Cause(NamedTuple):
    """The event or command that is being handled, by its ids."""

    id: str
    correlation_id: str
    traceparent: str | None = None


current_cause: ContextVar[CauseLike | None] = ContextVar("jetspark_cause", default=None)
"""None outside of handlers, where a new correlation starts."""


def new_trace(random_bits: Callable[[int], int]) -> str:
    """A trace that begins here, in W3C form. It is not sampled: the collector of the traces decides that."""
    digits = f"{random_bits(192) | 1 << 64 | 1:048x}"  # at once: asking the system is most of it
    return f"00-{digits[:32]}-{digits[32:]}-00"


def child_of(traceparent: str | None, random_bits: Callable[[int], int]) -> str:
    """A new span in the given trace, or in a new trace if the value is missing or invalid."""
    found = None if traceparent is None else _read_traceparent(traceparent)
    return new_trace(random_bits) if found is None else f"{found[1]}{random_bits(64) | 1:016x}{found[2]}"
