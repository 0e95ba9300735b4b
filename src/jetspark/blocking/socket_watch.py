"""The selector of the connection's thread, which watches the session's socket and the pipe that wakes the thread."""

from __future__ import annotations

import selectors
import socket

__all__ = ["SocketWatch", "WakeupPipe"]


class WakeupPipe:
    """A socket pair whose ``reader`` becomes readable by :meth:`wake`, which any thread may call, with or without a
    lock."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        try:
            self._writer.send(b"!")
        except OSError:
            pass  # full: a wake-up is pending already; closed: no thread waits any more

    def clear(self) -> None:
        """Consume all pending wake-ups."""
        self.reader.recv(4096)

    @property
    def is_writer_closed(self) -> bool:
        """No further wake-up is possible."""
        return self._writer.fileno() < 0

    def close_writer(self) -> None:
        self._writer.close()

    def close(self) -> None:
        """Close the reader, after its thread has stopped waiting."""
        self.reader.close()


class SocketWatch:
    """A selector and the events it watches at the socket. All calls but :meth:`select` need the transport's lock.

    Another thread may change the watched events during :meth:`select`, which then uses the new ones.

    Invariant: ``_interest`` holds the watched events, or None during a change. A thread that holds the lock and finds
    None knows that the changing thread was interrupted: the selector must be re-created.
    """

    def __init__(self, alarm: socket.socket) -> None:
        self._alarm = alarm
        self._selector: selectors.BaseSelector | None = None
        self._interest: int | None = None

    @property
    def is_on(self) -> bool:
        """A session is open, and a thread watches its socket."""
        return self._selector is not None

    def restore(self) -> None:
        """Create the selector, or re-create it after an interrupt."""
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

    def set_interest(self, watched: socket.socket, interest: int) -> bool:
        """Watch the socket for these selector events; does nothing without a selector.

        Returns False when an interrupt left the selector half changed: then call :meth:`restore`.
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
        """Wait for events; empty after ``timeout_s``. Called by the connection's thread, without the lock."""
        assert self._selector is not None
        return self._selector.select(timeout_s)
