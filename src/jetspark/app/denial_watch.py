"""Denials that end a worker: it may not use a subject that it cannot do without.

Most denials are raised by the call that was denied. Some reach no caller: those of an acknowledgement, of a
subscription that serves commands, or of a background task's repeated request. Ignored, they would leave a worker that
runs and does nothing, or does everything twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jetspark.core.events import ConnectionEvent, ErrorReported
from jetspark.errors import PermissionDenied

if TYPE_CHECKING:
    from jetspark.core.dispatcher import Dispatcher

__all__ = ["DenialWatch", "denial_in"]


def denial_in(error: BaseException) -> PermissionDenied | None:
    """The first denial among the errors that several tasks ended with, or None.

    When one subject is denied, several tasks fail at once with the same error.
    """
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := denial_in(each)) is not None), None)
    return error if isinstance(error, PermissionDenied) else None


class DenialWatch:
    """Tells of the denials of one connection, from :meth:`attach` to :meth:`detach`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        needs: Callable[[PermissionDenied], bool],
        on_denied: Callable[[PermissionDenied], None],
    ) -> None:
        """``on_denied`` is called with each denial for which ``needs`` returns true."""
        self._dispatcher, self._needs, self._on_denied = dispatcher, needs, on_denied

    def attach(self) -> None:
        self._dispatcher.attach(self)

    def detach(self) -> None:
        self._dispatcher.detach(self)

    # ---- attached to the connection ----------------------------------------------------------------------------

    def on_event(self, event: ConnectionEvent) -> None:
        if isinstance(event, ErrorReported) and isinstance(event.error, PermissionDenied) and self._needs(event.error):
            self._on_denied(event.error)

    def next_deadline(self) -> float | None:
        return None

    def on_time(self, now: float) -> None:
        pass
