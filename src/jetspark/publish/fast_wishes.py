"""Up to which position the callers of a fast publisher want to know that messages are stored, and how soon. Pure.

Only the end of a batch tells that its last messages are stored: acknowledgements come after ``flow`` messages. So a
wish ends the batch, at once or, with ``linger_s``, when nothing was accepted for that many seconds: while more comes,
acknowledgements may make it needless.
"""

from __future__ import annotations

from jetspark.core.numbers import seconds, whole
from jetspark.publish.fast_places import FastPlaces

__all__ = ["FastWishes"]


class FastWishes:
    """What is wanted of one publisher; the highest position counts."""

    def __init__(self, places: FastPlaces) -> None:
        self._places = places
        self._flush_to = 0
        self._linger_to = 0
        """To be flushed as well, once nothing was accepted for a while."""
        self._linger_s = 0.0
        self._linger_until: float | None = None

    def flush(self) -> int:
        """Have everything accepted so far stored soon; returns the position to wait for."""
        self._flush_to = self._places.accepted
        return self._flush_to

    def flush_to(self, position: int) -> None:
        """Have everything up to a position stored soon."""
        self._flush_to = max(self._flush_to, min(position, self._places.accepted))

    def want(self, position: int, now: float, linger_s: float) -> None:
        """Have everything up to a position stored soon.

        With ``linger_s`` the batch is ended for that only when nothing was accepted for that many seconds: as long as
        more comes, its acknowledgements tell.
        """
        position, linger_s = whole("position", position, low=0), seconds("linger_s", linger_s)
        if linger_s <= 0:
            self.flush_to(position)
            return
        self._linger_to = max(self._linger_to, min(position, self._places.accepted))
        self._linger_s = linger_s
        self._linger_until = now + linger_s

    @property
    def need_an_end(self) -> bool:
        """All that is wanted is sent, and not all of it is stored."""
        return self._places.published < self._flush_to <= self._places.sent_to

    def on_accepted(self, now: float) -> None:
        """More has come: lingering begins anew."""
        if self._linger_until is not None:
            self._linger_until = now + self._linger_s

    def on_published(self) -> None:
        if self._places.published >= self._linger_to:
            self._linger_until = None

    def next_deadline(self) -> float | None:
        return self._linger_until

    def on_time(self, now: float, *, is_ack_on_its_way: bool) -> None:
        """Time has passed: lingering goes on while an acknowledgement will tell, or is over."""
        if self._linger_until is None or now < self._linger_until:
            return
        if is_ack_on_its_way:
            self._linger_until = now + self._linger_s
        else:
            self._linger_until = None
            self._flush_to = max(self._flush_to, self._linger_to)
