"""Which revision of a key a state of the past is folded on from. Pure.

A value has every event of its key up to its own sequence. So a revision that the bucket has kept, and that shows
nothing beyond the wanted sequence, is a state to begin with: with the events since, up to the wanted one, it is what
all events from the first one on would make. It is not the answer by itself: a worker stores several events as one.
"""

from __future__ import annotations

from collections.abc import Iterable

from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.marks import mark_of, reach_of
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.state.changes import NOTHING, Current

__all__ = ["base_of", "past_of"]


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
