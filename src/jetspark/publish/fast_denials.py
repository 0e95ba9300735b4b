"""What the connection says of denied messages, as one fast batch sees it. Pure."""

from __future__ import annotations

from collections.abc import Callable

from jetspark.core.connection import Connection
from jetspark.errors import PermissionDenied

__all__ = ["FastDenials"]


class FastDenials:
    """The denials of a batch's own subjects since it began."""

    def __init__(self, connection: Connection, publishes_to: Callable[[str], bool]) -> None:
        """``publishes_to`` tells whether the batch has sent messages to a subject."""
        self.publishes_to = publishes_to
        self.has_asked = False
        """A message may be missing, and the server was asked which ones it has."""
        self._connection, self._denials = connection, connection.denials
        self._before = self._seen = 0
        """How many denials there were on the connection before the batch, and when they were last looked at."""
        self._denials.watch(self)

    def begin(self) -> None:
        """The first message is about to be sent."""
        self._before = self._seen = self._denials.count
        self.has_asked = False

    def end(self) -> None:
        """The batch is over, and raises no denial of a message that is published later."""
        self._connection.leave_denials(self, self._before)

    def first(self) -> PermissionDenied | None:
        """The first one; the message may have been published before the batch."""
        return self._denials.since(self._before, self.publishes_to)

    def news(self) -> PermissionDenied | None:
        """The first one since the last look."""
        seen, self._seen = self._seen, self._denials.count
        return self._denials.since(seen, self.publishes_to)
