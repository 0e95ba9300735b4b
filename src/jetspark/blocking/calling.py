"""Calling a program back with messages, on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jetspark.blocking.message import Message
from jetspark.blocking.transport import Link

__all__ = ["Callback", "Calling", "call"]

Callback = Callable[[Message], Any]


def call(callback: Callback, message: Message) -> None:
    callback(message)


class Calling:
    """Work that goes on beside the program's."""

    def __init__(self, link: Link, work: Callable[[], None], name: str) -> None:
        self._link = link
        self.thread = threading.Thread(target=work, name=name, daemon=True)
        self.thread.start()

    def join(self, deadline: float) -> bool:
        """Whether it has ended before the deadline. A callback does not wait for itself: it goes on when it is back."""
        if self.thread is threading.current_thread():
            return True
        self.thread.join(max(0.0, deadline - self._link.now()))
        return not self.thread.is_alive()
