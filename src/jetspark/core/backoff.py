"""How long to wait before the next attempt. Pure: the caller counts its failures, and waits."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Backoff"]

# A wait has long reached its maximum by then, and 2.0 ** 1100 is not a number.
_MAX_DOUBLINGS = 60


class Backoff(NamedTuple):
    """Waits that double with each failure, from ``first_s`` up to ``max_s``."""

    first_s: float
    max_s: float

    def wait_s(self, failures: int) -> float:
        """The wait after this many failures in a row, the first one counted as 1."""
        return min(self.first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS), self.max_s)
