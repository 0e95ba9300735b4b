"""Java classes that Spark loads, parsed beforehand: ``python tools/class_archive.py`` writes them to a file, once.

Half of what Java does until the first query has ended is finding and reading some twenty thousand classes in Spark's
JAR files. A Java that maps this file, a class data sharing archive, does without. It is written once for each Java and
Spark, some 170 MB in the user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``). The options that make Java use it
are printed, for ``SPARK_SUBMIT_OPTS``::

    SPARK_SUBMIT_OPTS="$(python tools/class_archive.py)" jetspark demo

Java compares the file with its own version and with the class path, and does without it where something has changed.
The file decides what Java runs: one that others may write to is not used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Java says on standard output what does not fit, unless it is told not to.
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def archive_path(java: str) -> Path:
    """Where the archive of this Java and this Spark is, or would be."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    parts = (str(Path(java).resolve()), found.origin, os.stat(found.origin).st_mtime_ns)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetspark"
    return cache / f"spark-classes-{key}.jsa"


def archive_options(java: str) -> str:
    """Java's options for an archive that it may use; empty without one."""
    path = archive_path(java)
    if any(character.isspace() for character in str(path)) or not _is_ours(path):
        return ""
    return f"-XX:SharedArchiveFile={path} {_QUIET}"


def write_archive(path: Path) -> None:
    """Write an archive, in processes of its own: 40 seconds of processor time.

    Raises:
        subprocess.CalledProcessError: Spark did not run; its messages are on standard error.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / "archive"
        subprocess.run([sys.executable, __file__, "--note", str(fresh)], check=True, stdout=sys.stderr)
        os.chmod(fresh, 0o600)
        os.replace(fresh, path)


def _is_ours(path: Path) -> bool:
    try:
        file, folder = path.stat(), path.parent.stat()
    except OSError:
        return False
    return all(each.st_uid == os.geteuid() and not each.st_mode & 0o022 for each in (file, folder))


# ---- what Java does while it notes its classes: a shuffle between Python formats, in a batch and in a stream ---------


class _TwoRows:
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"key": pa.array(["a", "b"]), "number": pa.array([1, 2], pa.int64())})


class _TwoRowsReader(_TwoRows, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(2)]


class _TwoRowsStreamReader(_TwoRows, DataSourceStreamReader):
    def initialOffset(self) -> dict[str, Any]:
        return {"at": 0}

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # it may be called without arguments
        return {"at": 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(2)]


def _read_up(batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    for _ in batches:
        pass
    return WriterCommitMessage()


class _NothingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _read_up(iterator)


class _NothingStreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _read_up(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass


class _ArchiveFormat(DataSource):
    """Reads two rows in each of two tasks, and writes nothing."""

    @classmethod
    def name(cls) -> str:
        return "jetspark_class_archive"

    def schema(self) -> str:
        return "key string, number bigint"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _TwoRowsReader()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _TwoRowsStreamReader()

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _NothingWriter()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _NothingStreamWriter()


def _collect(batch: DataFrame, _: int) -> None:
    batch.collect()


def _use_functions(spark: SparkSession) -> None:
    """Run Python functions of a frame and of a micro-batch, as verifications and tests do."""
    spark.range(1).mapInArrow(lambda batches: batches, "id long").collect()
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    rate.writeStream.foreachBatch(_collect).trigger(availableNow=True).start().awaitTermination()


def note_classes(archive: Path) -> None:
    """Do a little of everything, and have Java write the classes it has loaded when it ends."""
    from pyspark import SparkContext

    from jetspark.spark.session import SHORT_JOB_FLAGS, session
    from jetspark.spark.startup_files import logging_file

    flags = f"-XX:ArchiveClassesAtExit={archive} {_QUIET} {SHORT_JOB_FLAGS}"
    options = f"{flags} -Dlog4j2.configurationFile=file:{logging_file()}"
    spark = session("classes", cores=2, is_short=True, conf={"spark.driver.extraJavaOptions": options})
    spark.dataSource.register(_ArchiveFormat)
    name = _ArchiveFormat.name()
    spark.read.format(name).load().repartition(2, "key").write.format(name).mode("append").save()
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        frame = spark.readStream.format(name).load().repartition(2, "key")
        writer = frame.writeStream.format(name).option("checkpointLocation", Path(folder).as_uri())
        query = writer.start()
        query.processAllAvailable()
        query.stop()
    _use_functions(spark)
    spark.stop()
    gateway: Any = getattr(SparkContext, "_gateway", None)  # there is no public way to its process
    gateway.shutdown()
    gateway.proc.stdin.close()  # Java ends with it
    gateway.proc.wait()


def main(arguments: Sequence[str]) -> None:
    """Arguments: none, the file to write instead of that of the cache, or ``--note`` and a file, in the process whose
    classes are noted."""
    from jetspark.spark.session import find_java

    if arguments[:1] == ["--note"]:
        note_classes(Path(arguments[1]))
        return
    if arguments:
        write_archive(Path(arguments[0]))
        return
    java = find_java()
    if not archive_options(java):
        print("Writing an archive of Spark's Java classes (once)...", file=sys.stderr)
        write_archive(archive_path(java))
    print(archive_options(java))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:  # there is no Java
        sys.exit(f"no archive of Spark's Java classes: {error}")
