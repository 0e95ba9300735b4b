"""How one thread wakes another that waits for sockets."""

from __future__ import annotations

import socket

__all__ = ["Bell"]


class Bell:
    """A pair of sockets: ``ear`` is readable when the bell was rung. Any thread may ring, with a lock or without."""

    def __init__(self) -> None:
        self.ear, self._button = socket.socketpair()
        self.ear.setblocking(False)
        self._button.setblocking(False)

    def ring(self) -> None:
        try:
            self._button.send(b"!")
        except OSError:
            pass  # full means that it will be heard anyway; closed means that nobody listens

    def hear(self) -> None:
        """It was rung, perhaps often."""
        self.ear.recv(4096)

    @property
    def is_cut_off(self) -> bool:
        """Nobody can ring any more."""
        return self._button.fileno() < 0

    def cut_off(self) -> None:
        self._button.close()

    def close(self) -> None:
        """Nobody listens any more."""
        self.ear.close()
