"""What the events of a key make of its state. Pure: every engine folds with this.

A :class:`KeyState` takes the rows of one key by ascending sequence. The first row may be one that the state has
already; no row may be left out. Then an engine may fold rows twice, or fold rows that another engine has stored, and
the bytes are the same:

* an event at or below the sequence of the state is in the state already, and changes nothing;
* an event whose id is among those that the state keeps (``unique_ids``) was folded before, and changes nothing;
* an event that ``apply`` or an invariant refuses makes its key stuck: the state stays as it was, and later events wait;
* a state is stored by compare-and-set on the revision that it was folded from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jetspark.app.contracts.faults import USER_ERRORS
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import RefusedEvent
from jetspark.app.projections.state_header import ID_BYTES, Parked, is_among, mark_of, parked_of, reach_of
from jetspark.errors import UsageError
from jetspark.state.changes import NOTHING, Change, Current

__all__ = ["KeyState", "base_of", "past_of"]


class KeyState:
    """One key in hand: as the bucket had it, and with the events since."""

    __slots__ = ("_loaded", "_was_parked", "applied", "ids", "known", "parked", "sequence", "value", "waiting")

    def __init__(self, spec: ProjectionSpec, key: str, loaded: Current) -> None:
        """
        Raises:
            UsageError: The bucket has a state that another version of the projection has made, or the same one with
                another ``unique_ids``.
        """
        parked: Parked | None = None
        ids = b""
        # Most keys are new to the bucket, or have the mark of a state that this version made: nothing to look at.
        if loaded.revision and loaded.mark != spec.plain_mark:
            mark, parked = mark_of(loaded), parked_of(loaded)
            if mark is not None and mark.version != spec.version:
                raise UsageError(
                    f"key {key!r} of projection {spec.name!r} was made by its version {mark.version}, and this is "
                    f"version {spec.version}: rebuild it (jetspark rebuild), or run the version that made it"
                )
            if mark is not None:
                if mark.unique_ids != spec.unique_ids:
                    raise UsageError(
                        f"key {key!r} of projection {spec.name!r} was made with unique_ids={mark.unique_ids or None}, "
                        f"and this code has unique_ids={spec.unique_ids or None}: give the projection another version "
                        "and rebuild it (jetspark rebuild)"
                    )
                ids = mark.ids
        self._loaded = loaded
        self.value = loaded.value
        self.sequence = loaded.sequence
        self.ids = ids
        """The ids of the last events that the key has taken, where the projection has ``unique_ids``."""
        self.parked = self._was_parked = parked
        self.applied = self.known = self.waiting = 0

    def apply(self, spec: ProjectionSpec, key: str, sequence: int, event: Any) -> None:
        """Take the next event of the key."""
        if sequence <= self.sequence:
            self.known += 1
        elif self.parked is not None:
            self.waiting += 1
        else:
            self.fold(spec, key, sequence, event)

    def fold(self, spec: ProjectionSpec, key: str, sequence: int, event: Any) -> None:
        """Take an event of a sequence that is new, of a key that is not parked."""
        had, id = self.value, b""
        if spec.unique_ids:
            id, event = event
            if is_among(id, self.ids):
                self.known += 1
                return
        try:
            if type(event) is RefusedEvent:
                raise event.error
            value = spec.fold(key, had, event)
        except USER_ERRORS as error:
            self.parked = Parked(sequence, f"{type(error).__name__}: {error}")
            return
        self.applied += 1
        if id:
            # Also of an event that was ignored: stored again, it is the same event.
            self.ids = (self.ids + id)[-spec.unique_ids * ID_BYTES :]
        elif value is None and had is None:
            return  # a key that is not there, and whose event was ignored
        self.value, self.sequence = value, sequence

    def stored(self, change: Change, revision: int) -> None:
        """The bucket has a change that was made of this; there may be events since."""
        value = change.value if change.operation == "put" else None
        self._loaded = Current(value, change.sequence or 0, revision, change.mark)
        if self.parked is None:
            return
        mark = mark_of(self._loaded)
        self._was_parked = mark.parked if mark is not None else None
        if self._was_parked is not None and self._was_parked.sequence == self.parked.sequence:
            self.parked = self._was_parked  # with as much of the reason as a header has room for

    @property
    def loaded(self) -> Current:
        """What the bucket has, as far as is known."""
        return self._loaded

    @property
    def is_parked_in_bucket(self) -> bool:
        return self._was_parked is not None

    def change(self, spec: ProjectionSpec, key: str) -> Change | None:
        """What has to be stored; None if the bucket has it all."""
        loaded = self._loaded
        if self.sequence == loaded.sequence and self.parked == self._was_parked:
            return None
        is_plain = self.parked is None and not spec.unique_ids
        mark = spec.plain_mark if is_plain else spec.mark(self.parked, self.ids)
        if self.value is None:
            return Change(key, b"", "delete", self.sequence, loaded.revision, mark=mark)
        return Change(key, self.value, "put", self.sequence, loaded.revision, mark=mark)


def base_of(spec: ProjectionSpec, revisions: Iterable[Current], sequence: int) -> Current:
    """The latest revision of a key that shows nothing beyond a sequence; nothing, if there is none.

    Revisions of other programs and of other versions of the projection are left out. A key that is parked shows the
    event that it is parked at.
    """
    base = NOTHING
    for each in revisions:
        mark = mark_of(each)
        if mark is None or mark.version != spec.version:
            continue
        if reach_of(each.sequence, mark.parked) <= sequence and each.revision > base.revision:
            base = each
    return base


def past_of(spec: ProjectionSpec, state: KeyState) -> Current:
    """A state that was folded, as a bucket would have it; it has no revision."""
    return Current(state.value, state.sequence, 0, spec.mark(state.parked, state.ids))
