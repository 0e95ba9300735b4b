"""The formats as Spark sees them: names, schemas, and who reads and writes.

Spark makes these objects anew for each plan and in several processes, and pickles what they return. So they only read
options; connections are opened where the work is done. What reads and writes is imported where it is needed: most of
those processes do one of the two, for one format.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from jetspark.spark import schema as columns

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["JetStreamFormat", "KVFormat", "ProjectionFormat", "register"]


class JetStreamFormat(DataSource):
    """Streams: ``spark.read``, ``readStream``, ``write`` and ``writeStream`` with ``format("jetstream")``."""

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> StructType:
        return columns.SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        from jetspark.spark.stream import source

        return source.batch_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from jetspark.spark.stream import source

        return source.stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from jetspark.spark.stream import sink

        return sink.batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from jetspark.spark.stream import sink

        return sink.stream_writer(self.options, schema, overwrite)


class KVFormat(DataSource):
    """Key-value buckets: the same with ``format("jetstream_kv")``."""

    @classmethod
    def name(cls) -> str:
        return "jetstream_kv"

    def schema(self) -> StructType:
        return columns.KV_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        from jetspark.spark.kv import reading

        return reading.batch_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from jetspark.spark.kv import reading

        return reading.stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from jetspark.spark.kv import writing

        return writing.batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from jetspark.spark.kv import writing

        return writing.stream_writer(self.options, schema, overwrite)


class ProjectionFormat(DataSource):
    """The stream of an application as rows for its projections, and those rows into their buckets.

    :func:`jetspark.spark.run` and :func:`jetspark.spark.backfill` make the plans: rows have to be brought together by
    projection and key between the two.
    """

    @classmethod
    def name(cls) -> str:
        return "jetstream_projection"

    def schema(self) -> StructType:
        return columns.PROJECTION_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        from jetspark.spark.engine import projection_source

        return projection_source.batch_reader(self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from jetspark.spark.engine import projection_source

        return projection_source.stream_reader(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from jetspark.spark.engine import projection_sink

        return projection_sink.batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from jetspark.spark.engine import projection_sink

        return projection_sink.stream_writer(self.options, schema, overwrite)


# Warns of every format that takes the place of one Spark has found by itself, or that was registered before.
_LOGGER = "org.apache.spark.sql.execution.datasources.DataSourceManager"


def register(spark: SparkSession) -> None:
    """Make the formats ``jetstream``, ``jetstream_kv`` and ``jetstream_projection`` known to a session, Connect's
    included.

    Doing it twice is fine. Where the package is installed for Spark's Python, Spark also finds them by itself; but only
    registered formats see what the session gives its workers, such as files of ``addPyFile`` and
    ``spark.executorEnv.PYTHONPATH``, where an application may be.
    """
    _activate(spark)
    with _without_warnings(spark):
        for kind in (JetStreamFormat, KVFormat, ProjectionFormat):
            spark.dataSource.register(kind)


def _activate(spark: SparkSession) -> None:
    """Have Java look for formats in this session.

    It looks in the session that is active in its thread, one for each thread of Python. In a thread that has used
    another session, which was stopped, that is the other one, and it has formats of its own.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(getattr(spark, "_jsparkSession", None))


@contextmanager
def _without_warnings(spark: SparkSession) -> Iterator[None]:
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # a session of Connect, whose JVM is out of reach
        yield
        return
    log4j = jvm.org.apache.logging.log4j
    before = log4j.LogManager.getLogger(_LOGGER).getLevel()
    log4j.core.config.Configurator.setLevel(_LOGGER, log4j.Level.ERROR)
    try:
        yield
    finally:
        log4j.core.config.Configurator.setLevel(_LOGGER, before)
