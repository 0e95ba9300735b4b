"""Rows from Spark into streams of a real server: each once, whatever is killed in between."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.names import new_name, new_stream

from jetspark.blocking import JetStream, Stream, connect
from jetspark.errors import RequestTimeout
from jetspark.server import NatsServer

pytest.importorskip("pyspark")
import pyarrow as pa
from pyspark import InheritableThread
from pyspark.sql import functions as F

from jetspark.spark import register
from jetspark.spark.stream import publishing
from jetspark.spark.stream.publishing import AsyncPublishing, FastPublishing, Pace, Publisher
from jetspark.spark.stream.sink import SinkOptions, Task
from jetspark.spark.stream.writing import Layout, Rows
from jetspark.spark.tasks import TaskId

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODES = ["fast", "atomic", "async"]


def stored(stream: Stream) -> list[bytes]:
    return [message.data for message in stream.get_messages()]


def lines(folder: Path, file: int, count: int) -> list[bytes]:
    """A file of the input, with so many lines that no other has; returns them.

    Spark hands rows on in pieces of 64 KB: the lines are long, so that a task sends some before it sees the others.
    """
    made = [f"{file}-{number}".rjust(400, ".") for number in range(count)]
    path = folder / f"{file:04}.txt"
    hidden = folder / f".{file:04}.txt"
    hidden.write_text("\n".join(made) + "\n")
    # Spark lists files by their age, and must not see half of one.
    os.utime(hidden, (1_700_000_000 + file, 1_700_000_000 + file))
    hidden.rename(path)
    return [line.encode() for line in made]


def copy_lines(spark: SparkSession, server: NatsServer, tmp_path: Path, **options: str) -> None:
    """Lines of files into a stream, a file a batch, until there are no more."""
    frame = (
        spark.readStream.option("maxFilesPerTrigger", "1").text(str(tmp_path / "in")).withColumnRenamed("value", "data")
    )
    query = (
        frame.writeStream.format("jetstream")
        .options(servers=server.url, checkpointLocation=str(tmp_path / "checkpoint"), **options)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


# ---- what is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_column_reaches_the_message(spark: SparkSession, server: NatsServer, js: JetStream, mode: str) -> None:
    stream = new_stream(js)
    rows = [
        (f"{stream.name}.a", "1", {"Color": ["red", "blue"]}, "one", 60),
        (f"{stream.name}.b", "2", {}, "two", None),
        (f"{stream.name}.c", "ü", None, "three", None),
    ]
    frame = spark.createDataFrame(
        rows, "subject string, data string, headers map<string,array<string>>, msg_id string, ttl int"
    ).coalesce(1)
    write(frame, server, publishMode=mode, stream=stream.name)
    messages = list(stream.get_messages())
    assert [(each.subject, each.data.decode()) for each in messages] == [row[:2] for row in rows]
    assert [each.headers["Nats-Msg-Id"] for each in messages] == ["one", "two", "three"]
    assert messages[0].headers.get_all("Color") == ["red", "blue"]
    assert messages[0].headers["Nats-TTL"] == "60s"


def write(frame: DataFrame, server: NatsServer, **options: str) -> None:
    frame.write.format("jetstream").mode("append").options(servers=server.url, **options).save()


@pytest.mark.parametrize("mode", MODES)
def test_a_streaming_query_writes_every_row(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path, mode: str
) -> None:
    stream = new_stream(js)
    expected = [line for file in range(3) for line in lines(inputs, file, 500)]
    copy_lines(spark, server, tmp_path, subject=f"{stream.name}.x", publishMode=mode)
    assert stored(stream) == expected


def test_a_frame_that_was_read_from_a_stream_is_written_as_it_is(
    spark: SparkSession, server: NatsServer, js: JetStream
) -> None:
    stream = new_stream(js)
    frame = spark.sql(
        f"select '{stream.name}.a' subject, cast('x' as binary) data, "
        "map('Nats-Expected-Last-Sequence', array('99'), 'Own', array('1')) headers, "
        "'OTHER' stream, 7L sequence, current_timestamp() timestamp"
    )
    write(frame, server)
    (message,) = stream.get_messages()
    assert message.headers["Own"] == "1"
    assert "Nats-Expected-Last-Sequence" not in message.headers


def test_many_rows_go_in_order_within_their_partition(spark: SparkSession, server: NatsServer, js: JetStream) -> None:
    stream = new_stream(js)
    frame = spark.range(0, 60_000, 1, 2).select(
        F.concat(F.lit(f"{stream.name}.p"), F.spark_partition_id()).alias("subject"),
        F.col("id").cast("string").alias("data"),
    )
    write(frame, server)
    for partition in range(2):
        numbers = [int(message.data) for message in stream.get_messages(subject=f"{stream.name}.p{partition}")]
        assert numbers == list(range(partition * 30_000, (partition + 1) * 30_000))


@pytest.mark.parametrize("mode", ["fast", "async"])
def test_rows_may_go_without_ids(spark: SparkSession, server: NatsServer, js: JetStream, mode: str) -> None:
    stream = new_stream(js)
    frame = spark.range(0, 1000, 1, 1).selectExpr("cast(id as string) data")
    write(frame, server, subject=f"{stream.name}.x", publishMode=mode, exactlyOnce="false")
    assert stored(stream) == [b"%d" % number for number in range(1000)]
    assert not stream.get_message(1).headers


# ---- again -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_named_write_that_runs_again_stores_nothing_twice_even_after_the_duplicate_window(
    spark: SparkSession, server: NatsServer, js: JetStream, mode: str
) -> None:
    stream = new_stream(js, duplicate_window_s=1.0)
    frame = spark.range(0, 1000, 1, 2).select(F.col("id").cast("string").alias("data"))
    for _ in range(2):
        write(frame, server, subject=f"{stream.name}.x", writeId=f"job-{stream.name}", publishMode=mode)
        time.sleep(1.2)
    assert stream.info().state.messages == 1000
    write(frame, server, subject=f"{stream.name}.x", publishMode=mode)
    assert stream.info().state.messages == 2000


def test_a_name_that_is_used_again_for_other_rows_is_refused(
    spark: SparkSession, server: NatsServer, js: JetStream
) -> None:
    stream = new_stream(js)
    options = {"subject": f"{stream.name}.x", "writeId": f"job-{stream.name}"}
    rows = spark.range(0, 1000, 1, 2).selectExpr("string(id) AS data")
    write(rows, server, **options)
    with pytest.raises(Exception, match=rf"writeId='job-{stream.name}' has written 1000 other rows to stream"):
        write(spark.range(1, 1001, 1, 2).selectExpr("string(id) AS data"), server, **options)
    write(rows.repartition(3), server, **options)  # the same rows, in other tasks and another order
    assert stream.info().state.messages == 1000


@pytest.mark.parametrize("mode", ["fast", "async"])
def test_a_named_write_that_failed_half_way_goes_on_after_the_duplicate_window_from_what_is_stored(
    spark: SparkSession, server: NatsServer, js: JetStream, mode: str
) -> None:
    stream = new_stream(js, duplicate_window_s=1.0)
    options = {"subject": f"{stream.name}.x", "writeId": f"job-{stream.name}", "publishMode": mode}
    rows = spark.range(0, 15_000, 1, 1)
    with pytest.raises(Exception, match="row 12000 of partition 0: data is null"):
        write(rows.selectExpr("if(id = 12000, null, cast(id as string)) data"), server, **options)
    # Spark hands over 10,000 rows at a time, and those of the first time were sent.
    assert stream.info().state.messages == 10_000
    time.sleep(1.2)
    write(rows.selectExpr("cast(id as string) data"), server, **options)
    assert stored(stream) == [b"%d" % number for number in range(15_000)]


PUBLISHERS = [partial(FastPublishing, has_ids=False), AsyncPublishing]


def fail(publisher: Publisher, stream: Stream, count: int) -> None:
    """As a task that has sent some rows, and cannot read the next."""
    with pytest.raises(ZeroDivisionError), publisher:  # noqa: PT012
        publisher.send(Rows(0, None, [b"x"] * count, [], None, f"{stream.name}.x"))
        raise ZeroDivisionError


@pytest.mark.parametrize("make", PUBLISHERS, ids=["fast", "async"])
def test_a_task_that_fails_leaves_nothing_under_way(
    js: JetStream, make: Callable[[JetStream, Pace], Publisher]
) -> None:
    """Else the next attempt would ask what is stored before all of it is, and send the rest twice."""
    stream = new_stream(js)
    fail(make(js, Pace(max_messages=20_000, max_bytes=1 << 30, patience_s=30.0)), stream, 10_000)
    assert stream.info().state.messages == 10_000


@pytest.mark.parametrize("make", PUBLISHERS, ids=["fast", "async"])
def test_a_task_that_fails_waits_for_a_server_that_hangs_no_longer_than_its_bound(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[JetStream, Pace], Publisher]
) -> None:
    monkeypatch.setattr(publishing, "GIVING_UP_S", 0.5)
    with NatsServer() as server, connect(server.url) as client:
        js = client.jetstream()
        stream, publisher = new_stream(js), make(js, Pace(max_messages=100, max_bytes=1 << 30, patience_s=300.0))
        server.pause()
        fail(publisher, stream, 50)
        server.resume()


def test_a_committed_batch_that_spark_did_not_note_is_not_written_again_and_the_state_goes_on(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path
) -> None:
    stream = new_stream(js, duplicate_window_s=1.0)

    def run() -> None:
        frame = spark.readStream.text(str(inputs)).withColumnRenamed("value", "data").dropDuplicates(["data"])
        query = (
            frame.writeStream.format("jetstream")
            .options(servers=server.url, subject=f"{stream.name}.x", checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    expected = lines(inputs, 0, 50)
    run()
    # As if the driver had died after the sink's commit and before its own.
    for file in (tmp_path / "checkpoint" / "commits").glob("*0*"):
        file.unlink()
    time.sleep(1.2)
    expected += lines(inputs, 1, 50)
    run()
    assert Counter(stored(stream)) == Counter(expected)


def copy_each(
    spark: SparkSession, tmp_path: Path, write_batch: Callable[[DataFrame], object], *, then: Exception | None = None
) -> None:
    """Lines of files by ``foreachBatch``, a file a batch, until there are no more; or a failure at the end of one."""
    frame = spark.readStream.option("maxFilesPerTrigger", "1").text(str(tmp_path / "in"))

    def each(batch: DataFrame, _: int) -> None:
        write_batch(batch.withColumnRenamed("value", "data"))
        if then is not None:
            raise then

    query = (
        frame.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


@pytest.mark.parametrize("options", [{}, {"writeId": "copy"}, {"writeId": "copy", "ledger": "false"}], ids=str)
def test_a_batch_of_foreach_batch_that_spark_repeats_is_stored_once(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path, options: dict[str, str]
) -> None:
    # Only the ledger knows the rows after the window.
    stream = new_stream(js, duplicate_window_s=1.0 if "ledger" not in options else 120.0)
    expected = [line for file in range(2) for line in lines(inputs, file, 500)]

    def write_batch(batch: DataFrame) -> None:
        write(batch, server, subject=f"{stream.name}.x", **options)

    with pytest.raises(Exception, match="stopped before the commit"):
        copy_each(spark, tmp_path, write_batch, then=RuntimeError("stopped before the commit"))
    assert stream.info().state.messages == 500
    if "ledger" not in options:
        time.sleep(1.2)
    copy_each(spark, tmp_path, write_batch)
    assert stored(stream) == expected


def test_two_writes_of_a_batch_to_the_same_subject_need_names(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path
) -> None:
    stream = new_stream(js)
    expected = lines(inputs, 0, 200)

    def write_twice(second: dict[str, str]) -> Callable[[DataFrame], None]:
        def write_batch(batch: DataFrame) -> None:
            write(batch, server, subject=f"{stream.name}.x")
            write(batch, server, subject=f"{stream.name}.x", **second)
            write(batch, server, subject=f"{stream.name}.y")

        return write_batch

    for _ in range(2):  # also when the first of them is known from before
        with pytest.raises(Exception, match=r"has written to .* already.*writeId"):
            copy_each(spark, tmp_path, write_twice({}))
        assert stored(stream) == expected
    for then in (RuntimeError("stopped before the commit"), None):
        with contextlib.suppress(Exception):
            copy_each(spark, tmp_path, write_twice({"writeId": "second"}), then=then)
        assert Counter(stored(stream)) == Counter(3 * expected)


def test_writes_of_a_batch_in_threads_of_the_program_know_their_batch(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path
) -> None:
    stream = new_stream(js, duplicate_window_s=1.0)
    expected = [line for file in range(2) for line in lines(inputs, file, 50)]

    def write_batch(batch: DataFrame) -> None:
        def write_to(subject: str) -> None:
            register(batch.sparkSession)  # a new thread has no active session, in which Spark looks for formats
            write(batch, server, subject=f"{stream.name}.{subject}", writeId=subject)

        threads = [InheritableThread(target=write_to, args=(subject,)) for subject in "xy"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.raises(Exception, match="stopped before the commit"):
        copy_each(spark, tmp_path, write_batch, then=RuntimeError("stopped before the commit"))
    time.sleep(1.2)  # only the ledger knows the rows now
    copy_each(spark, tmp_path, write_batch)
    assert Counter(stored(stream)) == Counter(2 * expected)


@pytest.mark.parametrize("where", ["x", "y"], ids=["the same subject", "another subject"])
def test_two_writes_of_a_batch_under_one_name_are_refused_if_their_rows_differ(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path, where: str
) -> None:
    stream = new_stream(js)
    expected = lines(inputs, 0, 50)

    def write_twice(batch: DataFrame) -> None:
        write(batch, server, subject=f"{stream.name}.x", writeId="copy")
        second = batch if where == "y" else batch.selectExpr("concat(data, '!') AS data")
        write(second, server, subject=f"{stream.name}.{where}", writeId="copy")

    for _ in range(2):  # also when the first of them is known from before
        with pytest.raises(Exception, match="writeId='copy' has written 50 other rows to stream"):
            copy_each(spark, tmp_path, write_twice)
        assert stored(stream) == expected


def test_a_batch_that_is_repeated_by_another_run_with_other_rows_keeps_what_was_written(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path
) -> None:
    stream = new_stream(js)
    expected = lines(inputs, 0, 50)

    def write_batch(rows: str) -> Callable[[DataFrame], None]:
        return lambda batch: write(batch.selectExpr(rows), server, subject=f"{stream.name}.x", writeId="copy")

    with pytest.raises(Exception, match="stopped before the commit"):
        copy_each(spark, tmp_path, write_batch("data"), then=RuntimeError("stopped before the commit"))
    copy_each(spark, tmp_path, write_batch("concat(data, '!') AS data"))
    assert stored(stream) == expected


def test_a_write_of_foreach_batch_that_could_not_be_recognised_says_so(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path
) -> None:
    stream = new_stream(js)
    expected = lines(inputs, 0, 10)
    options = {"subject": f"{stream.name}.x", "whenNotExactlyOnce": "fail"}

    def grouped(batch: DataFrame) -> None:
        spark.sparkContext.setJobGroup("mine", "a group of its own")
        write(batch, server, **options)

    with pytest.raises(Exception, match=r"the job group is 'mine', not Spark's own.*writeId"):
        copy_each(spark, tmp_path, grouped)
    with pytest.raises(Exception, match=r"without writeId \(ledger=false\)"):
        copy_each(spark, tmp_path, lambda batch: write(batch, server, **options, ledger="false"))
    assert stored(stream) == []
    options["writeId"] = "copy"
    copy_each(spark, tmp_path, grouped)
    assert stored(stream) == expected


def test_a_checkpoint_that_was_put_back_is_refused(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path
) -> None:
    stream = new_stream(js)
    for file in range(2):
        lines(inputs, file, 5)
    copy_lines(spark, server, tmp_path, subject=f"{stream.name}.x")
    for folder in ("commits", "offsets"):
        for path in (tmp_path / "checkpoint" / folder).iterdir():
            if path.name not in ("0", ".0.crc") or folder == "commits":
                path.unlink()
    with pytest.raises(Exception, match="its checkpoint was put back"):
        copy_lines(spark, server, tmp_path, subject=f"{stream.name}.x")
    assert stream.info().state.messages == 10


@pytest.mark.parametrize("mode", MODES)
def test_two_attempts_at_one_task_at_the_same_time_store_every_row_once(
    server: NatsServer, js: JetStream, mode: str
) -> None:
    stream = new_stream(js)
    options = SinkOptions(servers=(server.url,), subject=f"{stream.name}.x", publish_mode=mode)
    expected = [b"%d" % number for number in range(1000)]

    def attempt() -> None:
        batches = (pa.record_batch({"data": expected[start : start + 100]}) for start in range(0, 1000, 100))
        Task(options, Layout(subject=options.subject, msg_id=None), TaskId("query", 0, 0)).run(batches)

    with ThreadPoolExecutor() as threads:
        for attempted in [threads.submit(attempt) for _ in range(3)]:
            attempted.result()
    assert Counter(stored(stream)) == Counter(expected)


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"allow_batched": False}, {}, "allow_batched=True"),
        ({"allow_atomic": False}, {"publishMode": "atomic"}, "allow_atomic=True"),
        ({}, {"subject": "nobody.stores.this"}, "no stream stores subject 'nobody.stores.this'"),
        ({}, {"stream": "NOWHERE"}, "there is no such stream"),
        ({}, {"subject": "x y"}, "option subject"),
        ({}, {"publishMode": "atomic", "maxAtomicMessages": "99"}, "more than 99 rows"),
        ({}, {"ledger": "false", "whenNotExactlyOnce": "fail"}, "duplicate_window_s=600"),
        ({}, {"publishMod": "fast"}, "did you mean 'publishMode'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_row(
    spark: SparkSession,
    server: NatsServer,
    js: JetStream,
    config: dict[str, Any],
    options: dict[str, str],
    message: str,
) -> None:
    stream = new_stream(js, **config)
    frame = spark.range(0, 100, 1, 1).select(F.col("id").cast("string").alias("data"))
    with pytest.raises(Exception, match=message):
        write(frame, server, **({"subject": f"{stream.name}.x"} | options))
    assert stored(stream) == []


@contextlib.contextmanager
def heard(server: NatsServer, subject: str) -> Iterator[list[str]]:
    """What is asked on a subject of the API."""
    found: list[str] = []
    with connect(server.url) as client:
        asked = client.subscribe(subject)
        client.flush()
        yield found
        client.flush()
        with contextlib.suppress(RequestTimeout):
            while True:
                found.append(asked.next(timeout=0.2).subject)


@pytest.mark.parametrize("how", ["a batch", "a query", "foreachBatch"])
def test_a_write_that_can_never_succeed_is_tried_once_and_not_four_times(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path, how: str
) -> None:
    lines(inputs, 0, 10)
    missing = new_name("MISSING")
    options = {"stream": missing, "subject": "x"}

    def run() -> None:
        if how == "a batch":
            write(spark.range(0, 10, 1, 1).selectExpr("string(id) AS data"), server, **options)
        elif how == "a query":
            copy_lines(spark, server, tmp_path, **options)
        else:
            copy_each(spark, tmp_path, lambda batch: write(batch, server, **options))

    why = f"stream='{missing}': there is no such stream; create it with"
    with heard(server, f"$JS.API.STREAM.INFO.{missing}") as asked, pytest.raises(Exception, match=why):
        run()
    assert len(asked) == 1


def test_a_bucket_that_is_missing_fails_a_write_at_once(spark: SparkSession, server: NatsServer, js: JetStream) -> None:
    missing = new_name("missing")
    rows = spark.range(0, 10, 1, 1).selectExpr("string(id) AS key", "string(id) AS value")
    writer = rows.write.format("jetstream_kv").mode("append").options(servers=server.url, bucket=missing)
    with heard(server, f"$JS.API.STREAM.INFO.KV_{missing}") as asked, pytest.raises(Exception, match="not found"):
        writer.save()
    assert len(asked) == 1


def test_a_row_that_cannot_be_a_message_ends_a_write_before_the_other_rows_are_all_stored(
    spark: SparkSession, server: NatsServer, js: JetStream
) -> None:
    """Other tasks do not fail for it: they would go on to their ends if this one did not raise."""
    stream = new_stream(js)
    rows = spark.range(0, 200_000, 1, 40).selectExpr("if(id = 7, null, repeat(string(id), 40)) AS data")
    with pytest.raises(Exception, match="row 7 of partition 0: data is null"):
        write(rows, server, subject=f"{stream.name}.x")
    assert stream.info().state.messages < 195_000


def test_a_row_without_data_is_named(spark: SparkSession, server: NatsServer, js: JetStream) -> None:
    stream = new_stream(js)
    frame = spark.range(0, 100, 1, 1).selectExpr("if(id = 42, null, cast(id as string)) data")
    with pytest.raises(Exception, match="row 42 of partition 0: data is null"):
        write(frame, server, subject=f"{stream.name}.x")


def test_modes_that_make_no_sense_for_a_stream_are_refused(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path, inputs: Path
) -> None:
    stream = new_stream(js)
    frame = spark.range(1).selectExpr("cast(id as string) data")
    with pytest.raises(Exception, match="a stream is added to, not replaced"):
        frame.write.format("jetstream").mode("overwrite").options(servers=server.url, subject=f"{stream.name}.x").save()
    lines(inputs, 0, 5)
    counted = spark.readStream.text(str(inputs)).groupBy("value").count().selectExpr("value data")
    query = (
        counted.writeStream.format("jetstream")
        .options(servers=server.url, subject=f"{stream.name}.x", checkpointLocation=str(tmp_path / "checkpoint"))
        .outputMode("complete")
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(Exception, match="would store the whole result again"):
        query.awaitTermination()
