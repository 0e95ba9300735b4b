"""Spark as the engine of replays, rebuilds and verifications.

Keys that lack events are folded from states that the driver has loaded, not from the bucket, where a live engine may
have changed them by then. These states are rows among the events, one for each key, and Spark shuffles both to the same
task. Keys without such a row are not part of the replay.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from jetspark.app.application import App
from jetspark.app.extents import Extent
from jetspark.app.replay.comparison import ComparedKeys
from jetspark.app.replay.history import RangeFold, RangeSurvey
from jetspark.core.subjects import is_subset, overlaps
from jetspark.errors import ConfigError
from jetspark.spark.engine.comparison import compare_bucket
from jetspark.spark.engine.projection_options import FORMAT, ProjectionKeywords, ProjectionOptions
from jetspark.spark.engine.projections import (
    ProjectionPlan,
    backfill,
    bring_together,
    check_pandas,
)
from jetspark.spark.options import read_options
from jetspark.spark.queries import plain_failures
from jetspark.state.changes import Current

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from jetspark.lake.reading import ArchiveRoot

__all__ = ["ReplayEngine"]

T = TypeVar("T")

_FOLDED = "key string, value binary, sequence bigint, mark string"


class ReplayEngine:
    """Folds one projection on Spark, as ``engine`` of :func:`~jetspark.app.replay.rebuild`, ``run_replay``,
    ``plan_replay``, ``preview_rebuild`` and ``verify``.

    It reads and folds at full speed and does not support ``rate``. These functions make all decisions, and store what
    must be coordinated with live engines.
    """

    def __init__(
        self,
        app: App | str,
        spark: SparkSession,
        servers: str | Sequence[str] = "nats://127.0.0.1:4222",
        *,
        projection: str,
        partitions: int | None = None,
        **options: Unpack[ProjectionKeywords],
    ) -> None:
        """The arguments are those of :func:`~jetspark.spark.backfill`."""
        self._app, self._spark, self._servers, self._projection = app, spark, servers, projection
        self._partitions, self._options = partitions, options

    @property
    def archive(self) -> ArchiveRoot | str | None:
        """The archive that it reads from, too: an option, which the functions take over."""
        return self._options.get("archive")

    async def compare(self, bucket: str, boundary: int, version: int | None) -> ComparedKeys:
        """Compare a bucket with a fresh fold, key by key where it is folded; the driver gets counts and a few names."""
        return await _in_a_thread(lambda: self._compare(bucket, boundary, version))

    async def survey(self, part: Extent, subject: str | None) -> RangeSurvey:
        """Which keys the events of a range are of; nothing is stored.

        Raises:
            ConfigError: The source cannot tell which events are on the subject.
        """
        return await _in_a_thread(lambda: self._survey(part, subject))

    async def fold_on(self, part: Extent, bases: Mapping[str, Current]) -> Mapping[str, Current]:
        """Fold the events of a range onto given states; stores nothing."""
        return await _in_a_thread(lambda: self._fold_on(part, bases))

    async def fold_into(self, bucket: str, part: Extent) -> RangeFold:
        """Fold a range into a bucket that has everything before it."""
        return await _in_a_thread(lambda: self._fold_into(bucket, part))

    # ---- in a thread, since Spark blocks ------------------------------------------------------------------------

    def _compare(self, bucket: str, boundary: int, version: int | None) -> ComparedKeys:
        return compare_bucket(self._plan(), self._spark, bucket, boundary, version, self._partitions)

    def _survey(self, part: Extent, subject: str | None) -> RangeSurvey:
        from pyspark.sql import functions as F

        plan = self._plan()
        subjects = _narrowed(plan.filters, subject)
        if subjects is not None and not subjects:
            return RangeSurvey({}, {}, 0)
        frame = plan.read(self._spark, part.first, part.last, subjects)
        # The key of a message that cannot be read is its own sequence: those are counted together.
        is_event = F.col("target") >= 0
        grouped = frame.where("target > -2").groupBy(F.when(is_event, F.col("key")).alias("key"))
        found = grouped.agg(F.count("sequence").alias("events"), F.max("sequence").alias("last"))
        events: dict[str, int] = {}
        last_of: dict[str, int] = {}
        unreadable = 0
        for key, count, last in _tuples(found, "key", "events", "last"):
            if key is None:
                unreadable = count
            else:
                events[key], last_of[key] = count, last
        return RangeSurvey(events, last_of, unreadable)

    def _fold_on(self, part: Extent, bases: Mapping[str, Current]) -> Mapping[str, Current]:
        if part.is_empty or not bases:
            return bases
        from jetspark.spark.engine.rows import base_rows

        check_pandas("jetspark.spark.ReplayEngine")
        plan = self._plan()
        rows = plan.read(self._spark, part.first, part.last).where("target >= 0")
        frame = bring_together(rows.union(self._spark.createDataFrame(base_rows(bases))), self._partitions)
        folded = frame.mapInArrow(functools.partial(_fold_rows, plan.options), _FOLDED)
        columns = ("key", "value", "sequence", "mark")
        return {key: Current(value, at, 1, mark=mark) for key, value, at, mark in _tuples(folded, *columns)}

    def _fold_into(self, bucket: str, part: Extent) -> RangeFold:
        done = backfill(
            self._app,
            self._spark,
            self._servers,
            projections=[self._projection],
            buckets={self._projection: bucket},
            from_sequence=part.first,
            to_sequence=part.last,
            partitions=self._partitions,
            letters=False,
            **self._options,
        )
        events = done.applied + done.known + done.waiting + done.newly_parked
        return RangeFold(events, done.unreadable, done.written, done.newly_parked)

    def _plan(self) -> ProjectionPlan:
        return ProjectionPlan.of(
            self._app, self._spark, self._servers, [self._projection], None, self._options, is_stored=False
        )


async def _in_a_thread(work: Callable[[], T]) -> T:
    def run() -> T:
        with plain_failures():
            return work()

    return await asyncio.to_thread(run)


def _tuples(frame: DataFrame, *names: str) -> Iterable[tuple[Any, ...]]:
    """The rows of a frame. By Arrow: of a million rows `collect` makes objects for some seconds."""
    table = frame.select(*names).toArrow()
    return zip(*(table[name].to_pylist() for name in names), strict=True)


def _narrowed(filters: Sequence[str], subject: str | None) -> list[str] | None:
    """The filters that select events on ``subject``; None for all events.

    Raises:
        ConfigError: A subject of the events overlaps ``subject`` without being within it.
    """
    if subject is None or all(is_subset(each, subject) for each in filters):
        return None
    found = [each for each in filters if overlaps(each, subject)]
    narrowed = [each if is_subset(each, subject) else subject for each in found]
    is_partly = any(not is_subset(each, subject) and not is_subset(subject, each) for each in found)
    if is_partly or (narrowed and not source_filters(list(dict.fromkeys(narrowed)))):
        raise ConfigError(
            f"subject={subject!r}: Spark reads it only where it is within the subjects of the events, or around them "
            f"({', '.join(filters)}): give another one, or take the live engine"
        )
    return source_filters(list(dict.fromkeys(narrowed)))


def source_filters(filters: Sequence[str]) -> list[str]:
    """Filters that the server accepts: without overlaps; an empty list selects the whole stream."""
    widest = [each for each in filters if not any(each != other and is_subset(each, other) for other in filters)]
    pairs = ((one, other) for number, one in enumerate(widest) for other in widest[number + 1 :])
    return [] if any(overlaps(one, other) for one, other in pairs) else widest


def _fold_rows(given: Mapping[str, str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A task: folds the keys for which it has states."""
    from jetspark.spark.engine.projection_sink import folded_rows

    return folded_rows(read_options(ProjectionOptions, FORMAT, given), batches)
