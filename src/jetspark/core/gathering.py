"""When one of many publishers writes, and when it leaves that to what follows. Pure; time is an argument.

A message that comes alone is written by its publisher at once. Those that follow sooner than ``GATHER_S`` gather, and
leave with the next write or when the connection's thread has seen them wait for ``LINGER_S``. Waking that thread for
each of them instead makes the two fight for the interpreter, and halved the rate.
"""

from __future__ import annotations

__all__ = ["GATHER_S", "LINGER_S", "MUCH_BYTES", "Gathering"]

GATHER_S = 100e-6
LINGER_S = 1e-3
# Where this much has gathered meanwhile, the next write is put off for twice as long, up to LINGER_S.
MUCH_BYTES = 2 << 10


class Gathering:
    """How long messages gather before one publisher writes them all."""

    def __init__(self) -> None:
        self._pause_s = GATHER_S
        self.until = 0.0
        """From then on a publisher writes, and calls :meth:`begin` before."""

    def begin(self, now: float, gathered_bytes: int) -> None:
        """What has gathered is written now; what follows gathers anew."""
        self._pause_s = min(2 * self._pause_s, LINGER_S) if gathered_bytes >= MUCH_BYTES else GATHER_S
        self.until = now + self._pause_s
