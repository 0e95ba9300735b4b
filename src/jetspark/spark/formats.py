"""The formats as Spark sees them: names, schemas, and who reads and writes.

Spark makes these objects anew for each plan and in several processes, and pickles what they return. So they only read
options; connections are opened where the work is done. What reads and writes is imported where it is needed: most of
those processes do one of the two, for one format.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from jetspark.spark import schema as columns

__all__ = ["JetStreamFormat", "KVFormat", "ProjectionFormat"]


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
