"""The data source formats that Spark sees: names, schemas, readers and writers.

Spark creates these objects for each plan, in several processes, and pickles the readers and writers. So they only read
options; tasks open the connections. Readers and writers are imported on demand: most processes use one of them, for one
format.
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

__all__ = ["EventFormat", "JetStreamFormat", "KVFormat", "ProjectionFormat", "register"]


class JetStreamFormat(DataSource):
    """Streams: ``spark.read``, ``readStream``, ``write`` and ``writeStream`` with ``format("jetstream")``."""

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> StructType:
        found: StructType = columns.declared(columns.SCHEMA)
        return found

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
    """Key-value buckets: batch and streaming reads and writes with ``format("jetstream_kv")``."""

    @classmethod
    def name(cls) -> str:
        return "jetstream_kv"

    def schema(self) -> StructType:
        found: StructType = columns.declared(columns.KV_SCHEMA)
        return found

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


class EventFormat(DataSource):
    """Events of an application as typed rows: reads and writes with ``format("jetstream_events")``."""

    @classmethod
    def name(cls) -> str:
        return "jetstream_events"

    def schema(self) -> StructType:
        from jetspark.spark.typed import event_source

        return event_source.schema_of(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from jetspark.spark.typed import event_source

        return event_source.batch_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from jetspark.spark.typed import event_source

        return event_source.stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from jetspark.spark.typed import event_sink

        return event_sink.batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from jetspark.spark.typed import event_sink

        return event_sink.stream_writer(self.options, schema, overwrite)


class ProjectionFormat(DataSource):
    """Reads an application's stream as rows for its projections, and writes those rows into their buckets.

    Only :func:`jetspark.spark.run` and :func:`jetspark.spark.backfill` use it: between read and write the rows must be
    partitioned by projection and key.
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


# Logger that warns when a registered format replaces a discovered or registered one.
_LOGGER = "org.apache.spark.sql.execution.datasources.DataSourceManager"


def register(spark: SparkSession) -> None:
    """Register the formats of this package in a session, also of Connect: ``jetstream``, ``jetstream_events``,
    ``jetstream_kv`` and ``jetstream_projection``.

    May be called again, and must be in each thread that a program starts: Spark looks up formats in the session that is
    active in the thread. If the package is installed for Spark's Python, Spark also discovers the formats; but only
    registered formats see what the session gives its workers, such as files of ``addPyFile`` and
    ``spark.executorEnv.PYTHONPATH``, where an application may be.
    """
    _activate(spark)
    with _without_warnings(spark):
        for kind in (JetStreamFormat, EventFormat, KVFormat, ProjectionFormat):
            spark.dataSource.register(kind)


def _activate(spark: SparkSession) -> None:
    """Make this session the active one in Java, where Spark looks up formats.

    Java has an active session for each Python thread. In a thread that used another session before, which was stopped,
    the other one is still active, and its formats are not those of this session.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(getattr(spark, "_jsparkSession", None))


@contextmanager
def _without_warnings(spark: SparkSession) -> Iterator[None]:
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # a session of Connect: its JVM cannot be reached
        yield
        return
    log4j = jvm.org.apache.logging.log4j
    before = log4j.LogManager.getLogger(_LOGGER).getLevel()
    log4j.core.config.Configurator.setLevel(_LOGGER, log4j.Level.ERROR)
    try:
        yield
    finally:
        log4j.core.config.Configurator.setLevel(_LOGGER, before)
