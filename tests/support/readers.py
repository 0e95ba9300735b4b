"""Readers of subscriptions for tests that pass events on by themselves."""

from __future__ import annotations

from typing import Any

__all__ = ["SilentReader"]


class SilentReader:
    """Is woken and does nothing: the test reads."""

    def __init__(self, pending_messages: int = 0) -> None:
        self.pending_messages = pending_messages

    def wake(self) -> None:
        pass

    def read_up(self, deadline: float) -> Any:
        raise AssertionError("only a driver that drains asks for this")
