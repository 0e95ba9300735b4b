"""What a rebuild would change: the bucket in use against a fresh fold by this code, and nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspark.app.extents import Extent
from jetspark.app.projections.bucket_refs import find_bucket, open_records
from jetspark.app.replay.engines import FoldEngine, check_no_rate
from jetspark.app.replay.history import History, spec_of
from jetspark.app.replay.places import noted_position
from jetspark.app.replay.verifying import Verification, verify_bucket
from jetspark.app.stream_history import ReadingRate

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.spec import HasSpec

__all__ = ["RebuildPreview", "preview_rebuild"]

MAX_SHOWN = 20
"""Differences in ``str()`` of a preview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildPreview:
    """How the states of a rebuild would differ from those in use."""

    old_version: int
    """Of the fold that made the bucket; 0 where nobody has said."""
    extent: Extent
    """What a rebuild reads."""
    comparison: Verification
    """The bucket in use is what was found, and the states of a rebuild are what was expected."""

    def to_dict(self) -> dict[str, Any]:
        reads = {"stream": self.extent.stream, "first": self.extent.first, "last": self.extent.last}
        return {"old_version": self.old_version, "reads": reads, **self.comparison.to_dict()}

    def __str__(self) -> str:
        found = self.comparison
        lines = [
            f"rebuild of projection {found.projection} version {found.version}; bucket {found.bucket} in use is of "
            f"version {self.old_version or '?'}, at sequence {found.boundary}",
            f"reads {self.extent}: all of it is there",
            f"would change {found.difference_count} keys; the bucket has {found.keys}"
            if found.difference_count
            else f"would change none of {found.keys} keys",
        ]
        lines += [f"  {each.key}: {each.found} -> {each.expected}" for each in found.differences[:MAX_SHOWN]]
        if found.difference_count > MAX_SHOWN:
            lines.append(f"  and {found.difference_count - MAX_SHOWN} more")
        return "\n".join(lines)


async def preview_rebuild(
    js: JetStream, app: HasSpec, projection: str, *, rate: float | None = None, engine: FoldEngine | None = None
) -> RebuildPreview:
    """Fold the history in memory, and compare with the bucket in use, which another version may have made.

    Args:
        rate: Events read each second, at most.
        engine: Reads, folds and compares in place of this process; it has no ``rate``.

    Raises:
        DataLoss: The beginning of the stream is gone.
    """
    app = app.spec
    check_no_rate(rate, engine)
    spec = spec_of(app, projection, js)
    place = (await find_bucket(await open_records(js, app.name), spec)).ref
    history = await History.open(js, app, spec, place.bucket, is_anew=True)
    extent = await history.whole()
    position = (await noted_position(js, place.bucket)).position
    found = await verify_bucket(
        js,
        history,
        spec,
        place.bucket,
        0 if position is None else min(position.sequence, extent.last),
        pace=ReadingRate(rate),
        engine=engine,
        is_any_version=True,
    )
    version = 0 if position is None else position.version
    return RebuildPreview(old_version=version, extent=extent, comparison=found)
