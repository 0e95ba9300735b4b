"""What the connection's thread waits for: its alarm, and a session's socket."""

from __future__ import annotations

import selectors
import socket

__all__ = ["SocketWatch"]


class SocketWatch:
    """A selector, and what it looks for at the socket. All calls but :meth:`select` are made with the link's lock.

    Another thread may change what is looked for while ours is in :meth:`select`, which then looks for that.

    Invariant: ``_interest`` is what the selector looks for, or None while that is being changed. Found as None with the
    lock in hand it is the mark of a thread that was interrupted: the selector has to be made anew.
    """

    def __init__(self, alarm: socket.socket) -> None:
        self._alarm = alarm
        self._selector: selectors.BaseSelector | None = None
        self._interest: int | None = None

    @property
    def is_on(self) -> bool:
        """There is a session, and a thread that looks at its socket."""
        return self._selector is not None

    def mend(self) -> None:
        """Begin, or begin anew after an interrupt."""
        if self._interest is None:
            self.end()
            selector = selectors.DefaultSelector()
            selector.register(self._alarm, selectors.EVENT_READ)
            self._selector, self._interest = selector, 0

    def end(self) -> None:
        selector, self._selector = self._selector, None
        self._interest = None
        if selector is not None:
            selector.close()

    def look_for(self, watched: socket.socket, interest: int) -> bool:
        """What to look for at the socket; False when a thread was interrupted here, and :meth:`mend` has to be called.

        Nothing happens while there is no selector.
        """
        selector, before = self._selector, self._interest
        if selector is None or interest == before:
            return True
        self._interest = None
        if before is None:
            return False
        if not interest:
            selector.unregister(watched)
        elif not before:
            selector.register(watched, interest)
        else:
            selector.modify(watched, interest)
        self._interest = interest
        return True

    def select(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Without the lock, by the connection's thread: what is there, or nothing when the time is up."""
        assert self._selector is not None
        return self._selector.select(timeout_s)
