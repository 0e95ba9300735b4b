"""One pass over the stream for all projections of a worker: with one engine, or with two where some are far behind.

An engine reads from the lowest position of its projections, so one that begins at the first event would keep all the
others waiting until it has caught up. Such projections have an engine of their own, beside that of the others. It asks
the server for the same subjects, passes by what it does not need, and so gets to every sequence that the other has got
to. When it is near, both store what they have, and the pass begins anew, with one engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jetspark.aio.jetstream import JetStream
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.projections.engine import LiveEngine, end_tasks, open_places
from jetspark.app.projections.fold_crashes import FoldCrashes
from jetspark.app.projections.live import BeginAnew, LiveCounts, LiveOptions
from jetspark.app.projections.place import LivePlace
from jetspark.app.projections.positions import FoldPosition

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = ["LivePass", "far_behind"]

# What is left to read when engines become one keeps the others waiting for a moment: a tenth of what made them two.
NEAR = 10


def far_behind(starts: Sequence[int], apart_after: int) -> list[bool]:
    """Which positions are too far behind the furthest one to be read for together with it."""
    return [max(starts) - start > apart_after for start in starts]


class LivePass:
    """From the last positions, until something changes or it is to end."""

    def __init__(
        self,
        app: AppSpec,
        places: Sequence[LivePlace],
        js: JetStream,
        catalogue: Catalogue,
        options: LiveOptions,
        counts: LiveCounts,
        crashes: FoldCrashes | None,
    ) -> None:
        self._app, self._places, self._js, self._catalogue = app, list(places), js, catalogue
        self._options, self._counts, self._crashes = options, counts, crashes
        self._engines: list[LiveEngine] = []
        self._is_ending = False

    def end(self) -> None:
        """Read no more, and store what was read."""
        self._is_ending = True
        for engine in self._engines:
            engine.end()

    async def run(self) -> None:
        """
        Raises:
            BeginAnew: Begin anew.
            JetSparkError: It cannot go on.
        """
        beginning = await open_places(self._js, self._app.stream, self._places)
        if not self._is_ending:
            await self._run(beginning)

    async def _run(self, beginning: FoldPosition) -> None:
        are_far = far_behind([place.start for place in self._places], self._options.apart_after)
        behind = [place for place, is_far in zip(self._places, are_far, strict=True) if is_far]
        front = [place for place in self._places if place not in behind]
        groups = [group for group in (front, behind) if group]
        self._engines = [self._engine(group, groups) for group in groups]
        self._counts.apart = [place.spec.name for place in behind]
        tasks = [asyncio.create_task(engine.run(beginning)) for engine in self._engines]
        meeting = asyncio.create_task(self._meet() if behind else asyncio.Event().wait())
        try:
            await asyncio.wait([*tasks, meeting], return_when=asyncio.FIRST_COMPLETED)
            if meeting.done():
                self.end()
            if self._is_ending:
                await asyncio.wait(tasks)
        finally:
            await end_tasks(*tasks, meeting)
        for task in tasks:
            if not task.cancelled():
                task.result()
        if behind and not meeting.cancelled():
            self._counts.joins += 1
            names = ", ".join(self._counts.apart)
            raise BeginAnew(f"projections {names} have caught up: they are read for together with the others")

    def _engine(self, group: list[LivePlace], groups: list[list[LivePlace]]) -> LiveEngine:
        beside = [place for other in groups if other is not group for place in other]
        return LiveEngine(
            self._app,
            group,
            self._js,
            self._catalogue,
            self._options,
            self._counts,
            beside=beside,
            tells_position=group is groups[-1],
            crashes=self._crashes,
        )

    async def _meet(self) -> bool:
        """Return when the two engines are near each other."""
        front, behind = self._engines
        while True:
            if front.through - behind.through <= self._options.apart_after // NEAR:
                return True
            await asyncio.sleep(self._options.position_every_s)
