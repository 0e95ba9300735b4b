"""``--engine spark`` of the commands that replay: the fold is done by Spark on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jetspark.app.projections.marks import Mark, Parked
from jetspark.cli.apps import connection_options
from jetspark.cli.run_spark import spark_options
from jetspark.state.changes import Current

if TYPE_CHECKING:
    from jetspark.app.projections.declaring import ProjectionSpec

__all__ = ["SparkFold", "on_spark"]


@contextmanager
def on_spark(app: str, servers: str | None, spec: ProjectionSpec) -> Iterator[SparkFold]:
    """A Spark that folds one projection, for as long as the block lasts."""
    from jetspark.spark import session  # says which extra is missing, if it is

    given = spark_options(connection_options(servers))
    spark = session(f"jetspark-{spec.name}", is_short=True)
    try:
        yield SparkFold(app, spark, spec, given)
    finally:
        spark.stop()


class SparkFold:
    """What a verification wants of another engine."""

    def __init__(self, app: str, spark: Any, spec: ProjectionSpec, given: Mapping[str, Any]) -> None:
        self._app, self._spark, self._spec, self._given = app, spark, spec, given

    @property
    def states(self) -> Callable[[int], Awaitable[Mapping[str, Current]]]:
        """Folds from nothing, up to a sequence, and stores nothing."""

        def work(last: int) -> Mapping[str, Current]:
            from jetspark.spark import fold_states

            frame = fold_states(self._app, self._spark, projections=[self._spec.name], to_sequence=last, **self._given)
            return {row.key: self._current(row) for row in frame.collect()}

        return lambda last: asyncio.to_thread(work, last)

    def _current(self, row: Any) -> Current:
        parked = None if row.parked is None else Parked(row.parked, "on Spark")
        value = None if row.value is None else bytes(row.value)
        return Current(value, row.sequence, 1, mark=str(Mark(self._spec.version, parked)))
