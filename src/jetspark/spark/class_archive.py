"""Java classes that Spark loads, parsed beforehand: ``python -m jetspark.spark.class_archive`` writes them to a file.

Half of what Java does until the first query has ended is finding and reading some twenty thousand classes in Spark's
JAR files. A Java that maps this file, a class data sharing archive, does without. It is made once for each Java and
Spark, some 160 MB in the user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``), and every session of
:func:`jetspark.spark.session` on this machine uses it from then on. Java compares it with its own version and with the
class path, and goes without where something has changed. The file decides what Java runs: one that others may write to
is not used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["archive_options", "archive_path", "note_classes", "write_archive"]

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
    """What to tell Java, if there is an archive that it may use; else nothing."""
    path = archive_path(java)
    if any(character.isspace() for character in str(path)) or not _is_ours(path):
        return ""
    return f"-XX:SharedArchiveFile={path} {_QUIET}"


def write_archive(java: str) -> Path:
    """Write the archive anew, in processes of its own: 40 seconds of processor time.

    Raises:
        subprocess.CalledProcessError: Spark did not run; what it said is on standard error.
    """
    path = archive_path(java)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / "archive"
        subprocess.run([sys.executable, "-m", __spec__.name, "--into", str(fresh)], check=True)
        os.chmod(fresh, 0o600)
        os.replace(fresh, path)
    return path


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


def note_classes(archive: Path, more: Callable[[SparkSession], object] = lambda spark: None) -> None:
    """Do a little of everything, and have Java write the classes it has loaded when it ends.

    Args:
        more: Does something else whose classes are to be there, too.
    """
    from pyspark import SparkContext

    from jetspark.spark.logs import logging_file
    from jetspark.spark.session import SHORT_JOB_FLAGS, session

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
    more(spark)
    spark.stop()
    gateway: Any = getattr(SparkContext, "_gateway", None)  # there is no public way to its process
    gateway.shutdown()
    gateway.proc.stdin.close()  # Java ends with it
    gateway.proc.wait()


def _main(arguments: Sequence[str]) -> None:
    from jetspark.spark.session import find_java

    if arguments:
        _, into = arguments
        note_classes(Path(into))
        return
    java = find_java()
    if archive_options(java):
        return
    print("Writing an archive of Spark's Java classes (once)...")
    print(write_archive(java))


if __name__ == "__main__":
    _main(sys.argv[1:])
