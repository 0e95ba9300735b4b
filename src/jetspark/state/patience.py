"""When to retry, and when to give up for lack of progress. Pure: the clock is the driver's.

:class:`Attempts` is the only rule. Procedures use it through :class:`Persistence`, blocking calls on Spark through
``connections.patiently``. An error is worth a retry if its ``may_pass`` is true. A closed connection stays closed, so
it is worth a retry only where the next attempt gets another connection: in runners of procedures that renew theirs
(``steps.py``), and in ``connections.patiently``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jetspark.core.backoff import Backoff
from jetspark.core.step_runner import ReadClock, Sleep
from jetspark.errors import JetSparkError
from jetspark.publish.steps import Procedure

__all__ = ["PAUSE", "Attempts", "Persistence"]

T = TypeVar("T")

PAUSE = Backoff(first_s=0.02, max_s=2.0)
REPORT_AFTER_S, REPORT_EVERY_S = 2.0, 30.0


class Attempts:
    """Waits that grow, until there was no progress for ``patience_s`` seconds."""

    def __init__(self, patience_s: float, pause: Backoff = PAUSE) -> None:
        self._patience_s, self._pause = patience_s, pause
        self._until: float | None = None
        self._failures = 0

    def progress(self, now: float) -> None:
        """Restart the time without progress."""
        self._until = now + self._patience_s
        self._failures = 0

    def wait_s(self, now: float) -> float | None:
        """An attempt has failed: seconds until the next one, or None when the time is over."""
        if self._until is None:
            self._until = now + self._patience_s
        left_s = self._until - now
        if left_s <= 0:
            return None
        self._failures += 1
        # The last attempt is made when the time is over, so that all of it is used. It is not used up by ever shorter
        # waits either, which a random part of them would make of a short rest.
        return max(min(self._pause.wait_s(self._failures), left_s), self._pause.first_s)


class Persistence:
    """The same for a procedure. ``report`` is called with the error after two seconds, and then every 30 seconds."""

    def __init__(self, patience_s: float, report: Callable[[Exception], None] | None = None) -> None:
        self._attempts, self._report = Attempts(patience_s), report
        self._report_at = 0.0

    def progress(self) -> Procedure[None]:
        """Restart the time without progress; also call it at the start."""
        now = yield ReadClock()
        self._attempts.progress(now)
        self._report_at = now + REPORT_AFTER_S

    def pause(self, reason: Exception) -> Procedure[None]:
        """Wait a moment before the next attempt; or raise ``reason``, if the time is over."""
        now = yield ReadClock()
        wait_s = self._attempts.wait_s(now)
        if wait_s is None:
            raise reason
        if self._report is not None and now >= self._report_at:
            self._report(reason)
            self._report_at = now + REPORT_EVERY_S
        yield Sleep(wait_s, random_fraction=0.5)

    def attempt(self, act: Callable[[], Procedure[T]]) -> Procedure[T]:
        """Do something that may be done twice, again and again while its error may pass."""
        while True:
            try:
                return (yield from act())
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                reason = error
            yield from self.pause(reason)
