"""A Spark driver in a process of its own, to be killed: ``python -m support.spark_driver <plan as JSON> <folder>``.

It leaves notes in the folder, as files: ``ready`` when Spark has started, ``hangs`` and the moment when it has come to
where it was to hang. It begins when there is a file ``go``. :class:`support.sparks.Driver` is the other side.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StringType, StructType
from typer.testing import CliRunner

from jetspark.cli.commands import app as cli
from jetspark.spark import backfill, register, run, session
from jetspark.spark.kv import writing
from jetspark.spark.stream import sink
from jetspark.spark.typed import event_sink
from support.sparks import CONF

# Spark's workers get what is here by value, so the plan has to be known when this module is run.
PLAN, FOLDER = json.loads(sys.argv[1]), Path(sys.argv[2])
HAS_FAILURES = PLAN.get("failures", False)


def hang(moment: str) -> None:
    (FOLDER / f"hangs {moment}").touch()
    time.sleep(300)


def attempt() -> int:
    context = TaskContext.get()
    assert context is not None
    return context.attemptNumber()


def dying(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for number, batch in enumerate(batches):
        if number == 6:
            time.sleep(0.2)  # what came before is sent meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def troubled_format(hangs: str) -> type[DataSource]:
    """One that hangs at such a moment, if any."""

    class TroubledWriter(sink.StreamWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
            if HAS_FAILURES and attempt() == 1:
                iterator = dying(iterator)
            return super().write(iterator)

        def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
            if hangs == "before the commit":
                hang(hangs)
            super().commit(messages, batchId)
            if hangs == "after the commit":
                hang(hangs)

    class TroubledFormat(DataSource):
        @classmethod
        def name(cls) -> str:
            return "troubled"

        def streamWriter(self, schema: StructType, overwrite: bool) -> TroubledWriter:
            make = event_sink.stream_writer if "app" in self.options else sink.stream_writer
            writer = make(self.options, schema, overwrite)
            assert isinstance(writer, sink.StreamWriter)
            return TroubledWriter(writer._options, writer._layout)

    return TroubledFormat


class TroubledTable(writing.BucketStreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Fails, and then dies, when everything is stored: Spark does not know, and does it again."""
        message = super().write(iterator)
        if HAS_FAILURES and attempt() == 0:
            raise RuntimeError("this attempt fails")
        if HAS_FAILURES and attempt() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return message


class TroubledTableFormat(DataSource):
    @classmethod
    def name(cls) -> str:
        return "troubled_table"

    def streamWriter(self, schema: StructType, overwrite: bool) -> TroubledTable:
        writer = writing.stream_writer(self.options, schema, overwrite)
        assert isinstance(writer, writing.BucketStreamWriter)
        return TroubledTable(writer._options)


def checking(hangs: str) -> Callable[[str], Column]:
    """What a line of the input goes through."""

    def checked(value: str) -> str:
        if value.endswith("-700"):
            if HAS_FAILURES and attempt() == 0:
                raise RuntimeError("this attempt fails")
            if hangs == "while writing":
                hang(hangs)  # what came before is sent meanwhile
        return value

    return F.udf(checked, StringType())


class Commands:
    """Commands of ``jetspark`` in this process, whose session they find; with the face of a query."""

    def __init__(self, commands: list[list[str]]) -> None:
        self._commands = commands

    def awaitTermination(self) -> None:
        for command in self._commands:
            done = CliRunner().invoke(cli, command)
            print(done.output)
            assert done.exit_code == 0, repr(done.exception)


class Backfills(threading.Thread):
    """Folds all that is there into all projections, some sequences at a time, again and again; with the face of a
    query."""

    def __init__(self, spark: SparkSession, options: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._spark, self._options = spark, options
        self.start()

    def run(self) -> None:
        try:
            while True:
                self._fold_all()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # else nobody would notice

    def _fold_all(self) -> None:
        step, begin = self._options["step"], 1
        servers = self._options["servers"]
        while True:
            last = begin + step - 1
            done = backfill("support.projected:app", self._spark, servers, from_sequence=begin, to_sequence=last)
            if done.to_sequence < last:
                return
            begin += step

    def awaitTermination(self) -> None:
        self.join()


def start(any_session: SparkSession, job: dict[str, Any]) -> StreamingQuery | Backfills | Commands:
    # Each query has formats of its own, and so a session: Spark serialises what is registered for one query while it
    # changes it for another if they share it. Formats are looked up in the session that is active.
    spark, hangs = any_session.newSession(), job.get("hangs", "")
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)  # type: ignore[union-attr]
    for kind in (troubled_format(hangs), TroubledTableFormat):
        spark.dataSource.register(kind)
    register(spark)
    if "projects" in job:
        return run("support.projected:app", spark, **{"until_now": True, **job["projects"]})
    if "commands" in job:
        return Commands(job["commands"])
    if "backfills" in job:
        return Backfills(spark, job["backfills"])
    if "reads" in job:
        frame = spark.readStream.format("jetstream").options(**job["reads"]).load()
    else:
        frame = spark.readStream.option("maxFilesPerTrigger", "1").text(job["input"])
        frame = frame.select(checking(hangs)("value").alias("data"))
    if "typed" in job:
        parts = F.split(F.trim("data"), ",")
        frame = frame.select(parts[1].alias("order_id"), parts[0].cast("long").alias("cents"))
    if "table" in job:
        text = F.col("data").cast("string")
        frame = frame.select(
            F.get_json_object(text, "$.key").alias("key"), text.alias("value"), "sequence"
        ).repartition(2)
    writer = frame.writeStream.option("checkpointLocation", job["checkpoint"]).trigger(availableNow=True)
    if "each" in job:
        return writer.foreachBatch(lambda batch, _: write_each(batch, job["each"], hangs)).start()
    if "table" in job:
        return writer.format("troubled_table").options(**job["table"]).start()
    return writer.format("troubled").options(**job["options"]).start()


def write_each(batch: DataFrame, options: dict[str, str], hangs: str) -> None:
    batch.write.format("jetstream").options(**options).mode("append").save()
    if hangs == "after the write":
        hang(hangs)


def main() -> None:
    few_rows = {
        "spark.master": "local[2,4]" if PLAN.get("retries", True) else "local[2]",
        # Few rows at a time, so that those before one that fails are sent.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    }
    spark = session("driver", conf=CONF | few_rows | PLAN.get("conf", {}))
    spark.range(1).collect()
    (FOLDER / "ready").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.02)
    if PLAN.get("at_once"):
        for query in [start(spark, job) for job in PLAN["jobs"]]:
            query.awaitTermination()
    else:
        for job in PLAN["jobs"]:
            start(spark, job).awaitTermination()


if __name__ == "__main__":
    main()
