"""Publishes that the server has denied: which subjects, and which caller is told.

The server names the subject of a denied publish, not the message. It says so on the connection, behind everything that
it had processed before, and in front of whatever it says because of the message that is missing (a gap, a batch that is
incomplete). So who publishes many messages looks here when one of them is missing (:meth:`DeniedPublishes.since`).

A denial that no call raises is told by the next flush, or by ``close``. Requests raise theirs, and so does every
:class:`Claimant` until it is over. The server denies each of many messages to one subject by itself, so a subject
counts as told until the server has confirmed all that was published when it was last told. The connection sends a PING
then: its PONG separates those denials from the denials of messages that are published later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from jetspark.errors import PermissionDenied

__all__ = ["MAX_SUBJECTS", "Claimant", "DeniedPublishes"]

T = TypeVar("T")

# How many subjects are remembered. A batch needs one of its own, and looks for it soon.
MAX_SUBJECTS = 100


class Claimant(Protocol):
    """Tells its callers of denials by itself."""

    def publishes_to(self, subject: str) -> bool:
        """Whether it has published to the subject, and raises a denial of it: it does so until it is over."""


class DeniedPublishes:
    """The denied publishes of one connection."""

    def __init__(self) -> None:
        self.count = 0
        """How many there have been."""
        # Not a WeakSet: in threads a batch begins without the lock, and iterating over that one would fail.
        self._claimants: set[weakref.ref[Claimant]] = set()
        self._last: dict[str, tuple[int, PermissionDenied]] = {}
        """The latest of each subject, the oldest first."""
        self._told: dict[str, int] = {}
        """Up to which message of the connection the denials of a subject are told."""

    def watch(self, claimant: Claimant) -> None:
        """The claimant tells its callers, for as long as it exists and is not over."""
        self._claimants.add(weakref.ref(claimant, self._claimants.discard))

    def leave(self, claimant: Claimant, count: int, published: int) -> bool:
        """The claimant is over; whether messages to its subjects were denied after the first ``count`` denials.

        Then it has told its callers of all that is published so far to these subjects.
        """
        self._claimants.discard(weakref.ref(claimant))
        denied = [
            subject for subject, (number, _) in self._last.items() if number > count and claimant.publishes_to(subject)
        ]
        for subject in denied:
            _put(self._told, subject, published)
        return bool(denied)

    def add(self, error: PermissionDenied, *, is_told: bool, published: int, confirmed: int) -> bool:
        """Note a denial; whether it is told by something else than a flush.

        Args:
            is_told: Some request raises it.
            published: The number of the last message published.
            confirmed: The number of the last message that the server has confirmed.
        """
        subject = error.subject
        self.count += 1
        _put(self._last, subject, (self.count, error))
        claimants = [claimant for each in tuple(self._claimants) if (claimant := each()) is not None]
        if is_told or any(claimant.publishes_to(subject) for claimant in claimants):
            _put(self._told, subject, published)
            return True
        return confirmed < self._told.get(subject, 0)

    def since(self, count: int, publishes_to: Callable[[str], bool]) -> PermissionDenied | None:
        """The first denial of one's own subjects after the first ``count`` denials; a new error for each caller."""
        if count == self.count:  # nearly always
            return None
        for number, error in self._last.values():
            if number > count and publishes_to(error.subject):
                return PermissionDenied(error.operation, error.subject)
        return None


def _put(known: dict[str, T], subject: str, value: T) -> None:
    known.pop(subject, None)
    known[subject] = value
    if len(known) > MAX_SUBJECTS:
        del known[next(iter(known))]
