"""The fold of one key: its state, and the events applied to it. Pure; all engines use it.

A :class:`KeyState` takes the rows of one key by ascending sequence, starting at or before the first event that the
state lacks, without omission. Then the stored bytes are the same, whether an engine folds a row twice or another
engine has stored it already:

* an event at or below the sequence of the state is in the state already, and changes nothing;
* an event whose id is among the recent ids of the state (``unique_ids``) was folded before, and changes nothing;
* an event that ``apply`` or an invariant refuses makes its key stuck: the state stays as it was, and later events wait;
* a state is stored by compare-and-set on the revision that it was folded from.

A state of the past (:func:`base_of`) is folded from a revision that the bucket has kept. A revision contains every
event of its key up to its own sequence, so a revision without an event beyond the wanted sequence is a valid base. The
events between the two are folded onto it, because a worker stores several events as one revision.
"""

from __future__ import annotations

from collections.abc import Iterable

from jetspark.app.contracts.faults import user_errors
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import RefusedEvent
from jetspark.app.projections.state_header import ID_BYTES, Identified, Parked, is_among, mark_of, parked_of, reach_of
from jetspark.errors import UsageError
from jetspark.state.changes import NOTHING, Change, Current

__all__ = ["KeyState", "base_of", "past_of"]


class KeyState:
    """The state of one key: as it was loaded, with the events applied since."""

    __slots__ = ("_loaded", "_was_parked", "applied", "ids", "known", "parked", "sequence", "value", "waiting")

    def __init__(self, spec: ProjectionSpec, key: str, loaded: Current) -> None:
        """
        Raises:
            UsageError: The state is of another version of the projection, or of the same one with another
                ``unique_ids``.
        """
        parked: Parked | None = None
        ids = b""
        # Most keys are new, or have the plain mark of this version, which needs no parsing.
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
        """The ids of the last events of the key; empty without ``unique_ids``."""
        self.parked = self._was_parked = parked
        self.applied = self.known = self.waiting = 0

    def apply(self, spec: ProjectionSpec, key: str, sequence: int, event: object) -> None:
        """Apply the next event of the key; events that the state has, and events of a stuck key, are only counted."""
        if sequence <= self.sequence:
            self.known += 1
        elif self.parked is not None:
            self.waiting += 1
        else:
            self.fold(spec, key, sequence, event)

    def fold(self, spec: ProjectionSpec, key: str, sequence: int, event: object) -> None:
        """Fold an event with a sequence above that of the state; the key must not be stuck."""
        had, id = self.value, b""
        if spec.unique_ids:
            assert isinstance(event, Identified)
            id, event = event
            if is_among(id, self.ids):
                self.known += 1
                return
        try:
            if type(event) is RefusedEvent:
                raise event.error
            value = spec.fold(key, had, event)
        except user_errors() as error:
            self.parked = Parked(sequence, f"{type(error).__name__}: {error}")
            return
        self.applied += 1
        if id:
            # Also for an event that `apply` ignored: if it is stored again, it is still the same event.
            self.ids = (self.ids + id)[-spec.unique_ids * ID_BYTES :]
        elif value is None and had is None:
            return  # a key without a state, and `apply` ignored the event
        self.value, self.sequence = value, sequence

    def stored(self, change: Change, revision: int) -> None:
        """``change`` was stored under ``revision``; events may have been applied since it was made."""
        value = change.value if change.operation == "put" else None
        self._loaded = Current(value, change.sequence or 0, revision, change.mark)
        if self.parked is None:
            return
        mark = mark_of(self._loaded)
        self._was_parked = mark.parked if mark is not None else None
        if self._was_parked is not None and self._was_parked.sequence == self.parked.sequence:
            self.parked = self._was_parked  # the reason is cut to the length of a header

    @property
    def loaded(self) -> Current:
        """The entry of the bucket that the state is based on."""
        return self._loaded

    @property
    def is_parked_in_bucket(self) -> bool:
        return self._was_parked is not None

    def change(self, spec: ProjectionSpec, key: str) -> Change | None:
        """The write that stores the state; None if the bucket is up to date."""
        loaded = self._loaded
        if self.sequence == loaded.sequence and self.parked == self._was_parked:
            return None
        is_plain = self.parked is None and not spec.unique_ids
        mark = spec.plain_mark if is_plain else spec.mark(self.parked, self.ids)
        if self.value is None:
            return Change(key, b"", "delete", self.sequence, loaded.revision, mark=mark)
        return Change(key, self.value, "put", self.sequence, loaded.revision, mark=mark)


def base_of(spec: ProjectionSpec, revisions: Iterable[Current], sequence: int) -> Current:
    """The latest revision of a key without an event beyond ``sequence``; an empty entry if every revision has one.

    Revisions of other programs and of other versions of the projection are ignored. The entry of a stuck key shows the
    event that it is stuck at.
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
    """A folded state in the form of a bucket entry, without a revision."""
    return Current(state.value, state.sequence, 0, spec.mark(state.parked, state.ids))
