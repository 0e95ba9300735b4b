"""Run the callbacks of subscriptions on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jetspark.blocking.message import Message
from jetspark.blocking.transport import Transport

__all__ = ["Callback", "CallbackRunner", "call"]

Callback = Callable[[Message], Any]


def call(callback: Callback, message: Message) -> None:
    callback(message)


class CallbackRunner:
    """Runs the callbacks of one subscription on a thread of its own."""

    def __init__(self, transport: Transport, work: Callable[[], None], name: str) -> None:
        self._transport = transport
        self.thread = threading.Thread(target=work, name=name, daemon=True)
        self.thread.start()

    def join(self, deadline: float) -> bool:
        """Wait for the end; True when it came before the deadline. Called by its own callback, it returns at once."""
        if self.thread is threading.current_thread():
            return True
        self.thread.join(max(0.0, deadline - self._transport.now()))
        return not self.thread.is_alive()
