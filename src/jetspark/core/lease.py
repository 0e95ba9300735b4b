"""Who may do what only one may do at a time, for as long as it shows signs of life. Pure; time is an argument."""

from __future__ import annotations

__all__ = ["LEASE_S", "ReadingLease"]

# For how long a holder may be silent.
LEASE_S = 1.0


class ReadingLease:
    """One right, and the thread that has it.

    Invariant: one that has a time to run out has a holder; so the time is set first and the holder removed last, and
    what an interrupt leaves undone, time or the next call does.
    """

    def __init__(self) -> None:
        self.holder = 0
        """Its thread, by identifier; 0 for none."""
        self._until = 0.0

    def take(self, me: int, now: float) -> bool:
        """Whether the caller has it from here on. False while another one has it, and has not been silent."""
        if self.holder not in (0, me) and now < self._until:
            return False
        self._until = now + LEASE_S
        self.holder = me
        return True

    def renew(self, now: float) -> None:
        """Its holder is alive."""
        self._until = now + LEASE_S

    def lapse(self, now: float) -> None:
        """Take it from a holder that was silent for too long."""
        if self.holder and now >= self._until:
            self.holder = 0

    def end(self) -> None:
        """Its holder has no use for it any more."""
        self.holder = 0
