"""Waking a thread that waits in ``select``."""

from __future__ import annotations

import socket

__all__ = ["WakeupPipe"]


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
