"""Events on their way from a connection to those they are for, where several threads may carry them. Pure: a thread is
a number that is given.

A thread takes events with the link's lock, and passes them on without it. If it is interrupted in between, they are
found noted here, and put back into the connection. The thread that passes them on then may tell something twice; nobody
waits for what was lost.
"""

from __future__ import annotations

import sys

from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.outcomes import Event

__all__ = ["Passing"]


class Passing:
    """The events that threads have in hand."""

    def __init__(self, connection: Connection, dispatcher: Dispatcher) -> None:
        self._connection, self._dispatcher = connection, dispatcher
        self._in_hand: dict[int, list[list[Event]]] = {}
        """By thread: a call of the program's may make it take more before the first are passed on."""

    def take(self, me: int) -> list[Event]:
        """With the lock: what happened, for this thread to pass on."""
        events = self._connection.events()
        if events:
            self._in_hand.setdefault(me, []).append(events)
        return events

    def pass_on(self, me: int, events: list[Event]) -> None:
        """Without the lock."""
        self._dispatcher.deliver(events)
        if me in self._in_hand:
            self._in_hand[me].pop()
            if not self._in_hand[me]:
                del self._in_hand[me]

    def has_any(self, me: int) -> bool:
        return me in self._in_hand

    def is_under_way(self, me: int) -> bool:
        """Whether the caller is called by what we have called; what is noted may be left from an interrupted call."""
        if me not in self._in_hand:
            return False
        frame = sys._getframe()
        while (caller := frame.f_back) is not None:
            frame = caller
            if frame.f_code is Passing.pass_on.__code__ and frame.f_locals["self"] is self:
                return True
        return False

    def put_back(self, me: int) -> None:
        """With the lock: have the connection tell the events again that this thread took and could not pass on."""
        for events in reversed(self._in_hand[me]):
            self._connection.put_back(events)

    def forget(self, me: int) -> None:
        """They were put back."""
        self._in_hand.pop(me, None)
