"""Streams and their archives as one source: a real server, real tables, a real Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.archive_ranges import archive_stream, compact_archive
from support.names import new_name
from support.object_stores import s3_server

from jetspark import StreamConfig
from jetspark.blocking import JetStream, Stream
from jetspark.errors import ArchiveDamaged, ConfigError, DataLoss, StreamRecreated, StreamWentBack
from jetspark.lake.hybrid import HybridRange
from jetspark.server import NatsServer
from jetspark.spark.schema import SCHEMA
from jetspark.spark.stream import source
from jetspark.state.scan import head_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest_plugins = ["support.sparks"]

FINISH_S = 120


@pytest.fixture
def stream(js: JetStream) -> Stream:
    """With messages 1 to 100: the number as data, on three subjects in turn, with headers."""
    name = new_name()
    made = js.create_stream(StreamConfig(name=name, subjects=[f"{name.lower()}.>"], allow_batched=True))
    fill(js, made, 1, 100)
    return made


def fill(js: JetStream, stream: Stream, first: int, last: int) -> None:
    prefix = stream.name.lower()
    for number in range(first, last + 1):
        js.publish(f"{prefix}.{number % 3}", b"%d" % number, headers={"N": str(number)} if number % 2 else None)


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def options(server: NatsServer, stream: str, lake: str | None, **more: Any) -> dict[str, str]:
    given = {"servers": server.url, "stream": stream, "includeHeaders": "true"}
    given |= {"archive": lake} if lake is not None else {}
    return given | {name: str(value) for name, value in more.items()}


def rows(reader: Any, partitions: Any = None) -> list[dict[str, Any]]:
    """In the order of the partitions, as tasks would read them."""
    planned = reader.partitions() if partitions is None else partitions
    batches: Iterator[pa.RecordBatch] = (batch for each in planned for batch in reader.read(each))
    return [row for batch in batches for row in batch.to_pylist()]


def read(server: NatsServer, stream: str, lake: str | None, **more: Any) -> list[dict[str, Any]]:
    return rows(source.batch_reader(options(server, stream, lake, **more), SCHEMA))


def numbers(found: list[dict[str, Any]]) -> list[int]:
    assert all(row["data"] == b"%d" % row["sequence"] for row in found)
    return [row["sequence"] for row in found]


# ---- a batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trimmed", [1, 40, 59, 60])
def test_a_batch_has_the_same_rows_wherever_the_archive_ends_and_the_stream_begins(
    server: NatsServer, js: JetStream, stream: Stream, lake: str, trimmed: int
) -> None:
    before = read(server, stream.name, None)
    archive_stream(js, lake, stream.name, until=61, files=3)
    stream.purge(up_to_sequence=trimmed)
    assert read(server, stream.name, lake) == before
    assert read(server, stream.name, lake, minPartitions=7) == before
    assert read(server, stream.name, lake, maxRecordsPerPartition=9) == before
    part = read(server, stream.name, lake, startingOffsets=30, endingOffsets=81)
    assert part == before[29:80]


def test_subject_filters_and_times_work_across_the_border(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    before = read(server, stream.name, None)
    archive_stream(js, lake, stream.name, until=61, files=4)
    stream.purge(up_to_sequence=50)
    prefix = stream.name.lower()
    only = read(server, stream.name, lake, subjects=f"{prefix}.1,{prefix}.2")
    assert only == [row for row in before if row["subject"] in (f"{prefix}.1", f"{prefix}.2")]
    moments = [row["timestamp"] for row in before]
    for first, last in ((20, 40), (20, 80), (55, 65), (70, 90), (1, 101)):
        times = {"startingTimestamp": moments[first - 1].isoformat()}
        times |= {"endingTimestamp": moments[last - 1].isoformat()} if last <= 100 else {}
        assert read(server, stream.name, lake, **times) == before[first - 1 : last - 1]
    assert read(server, stream.name, lake, startingTimestamp="2020-01-01T00:00:00Z") == before


def test_deleted_messages_are_no_loss_and_partitions_are_cut_by_messages(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    for sequence in [*range(3, 50), *range(62, 98)]:
        stream.delete_message(sequence)
    before = read(server, stream.name, None)
    archive_stream(js, lake, stream.name, until=61)
    stream.purge(up_to_sequence=55)
    reader = source.batch_reader(options(server, stream.name, lake, maxRecordsPerPartition=5), SCHEMA)
    planned = reader.partitions()
    assert rows(reader, planned) == before
    assert len(planned) <= 2 + len(before) // 2  # a hundred sequences would be twenty


def test_an_archive_that_begins_behind_the_stream_is_read_where_it_is(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    stream.purge(up_to_sequence=30)
    archive_stream(js, lake, stream.name, until=61)
    stream.purge(up_to_sequence=45)
    assert numbers(read(server, stream.name, lake)) == list(range(31, 101))
    with pytest.raises(DataLoss) as caught:
        read(server, stream.name, lake, startingOffsets=10)
    assert (caught.value.wanted, caught.value.first) == (10, 31)


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_an_archive_in_an_object_store_is_read_with_its_options(
    server: NatsServer, js: JetStream, stream: Stream, format: str
) -> None:
    before = read(server, stream.name, None)
    with s3_server() as s3:
        lake = "s3://lake/archive"
        archive_stream(js, lake, stream.name, until=61, files=2, format=format, options=s3.options)
        stream.purge(up_to_sequence=60)
        given = {"archive": lake, "archiveOptions": json.dumps(s3.options)}
        reader = source.batch_reader(options(server, stream.name, None, **given, minPartitions=3), SCHEMA)
        planned = reader.partitions()
        failed = s3.failing_once("GET", ".parquet", "503 before")
        assert rows(reader, planned) == before
        assert failed
        for shown in (repr(reader._options), repr(planned[0].value)):  # type: ignore[attr-defined]
            assert s3.options["aws_secret_access_key"] not in shown


def test_options_of_a_store_need_an_archive_and_are_not_shown(server: NatsServer, stream: Stream) -> None:
    with pytest.raises(ConfigError, match="archiveOptions: expected together with archive"):
        read(server, stream.name, None, archiveOptions='{"aws_secret_access_key": "s3cr3t"}')
    with pytest.raises(ConfigError, match=r"archiveOptions=\.\.\.: expected JSON such as") as caught:
        read(server, stream.name, None, archiveOptions="aws_secret_access_key=s3cr3t")
    assert "s3cr3t" not in str(caught.value)


# ---- what is missing -------------------------------------------------------------------------------------------------


def test_a_gap_between_archive_and_stream_is_data_loss_that_names_it(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    archive_stream(js, lake, stream.name, until=41)
    stream.purge(up_to_sequence=60)
    with pytest.raises(DataLoss, match="sequence 41 is needed and the first stored one is 61") as caught:
        read(server, stream.name, lake)
    assert (caught.value.wanted, caught.value.first) == (41, 61)
    assert numbers(read(server, stream.name, lake, endingOffsets=41)) == list(range(1, 41))
    assert numbers(read(server, stream.name, lake, startingOffsets=61)) == list(range(61, 101))
    with pytest.raises(DataLoss):
        read(server, stream.name, lake, startingOffsets=50)
    allowed = numbers(read(server, stream.name, lake, failOnDataLoss="false"))
    assert allowed == [*range(1, 41), *range(61, 101)]


def test_messages_that_were_lost_before_they_were_archived_are_data_loss(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    for sequence in range(20, 25):
        stream.delete_message(sequence)
    archive_stream(js, lake, stream.name, until=61, lost=[range(20, 25)])
    with pytest.raises(DataLoss) as caught:
        read(server, stream.name, lake)
    assert (caught.value.wanted, caught.value.first) == (20, 25)
    assert numbers(read(server, stream.name, lake, startingOffsets=25)) == list(range(25, 101))
    assert numbers(read(server, stream.name, lake, failOnDataLoss="false")) == [*range(1, 20), *range(25, 101)]


def test_a_root_without_an_archive_of_the_stream_is_refused_by_name(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    with pytest.raises(ConfigError, match=rf"stream '{stream.name}' has no archive there; it has those of no stream"):
        read(server, stream.name, lake)
    other = new_name()
    js.create_stream(StreamConfig(name=other, subjects=[f"{other}.>"]))
    js.publish(f"{other}.x", b"1")
    archive_stream(js, lake, other)
    with pytest.raises(ConfigError, match=f"it has those of {other}: make one"):
        read(server, stream.name, lake)


def test_an_archive_of_the_stream_before_is_refused_by_name(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    archive_stream(js, lake, stream.name)
    js.delete_stream(stream.name)
    js.create_stream(StreamConfig(name=stream.name, subjects=[f"{stream.name.lower()}.>"]))
    js.publish(f"{stream.name.lower()}.1", b"1")
    with pytest.raises(StreamRecreated, match="is of the former one: archive the present stream, too"):
        read(server, stream.name, lake)
    archive_stream(js, lake, stream.name)
    assert numbers(read(server, stream.name, lake)) == [1]


def test_a_stream_that_is_shorter_than_its_archive_went_back(
    server: NatsServer, js: JetStream, stream: Stream, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_stream(js, lake, stream.name)
    real = head_of
    # As after a restore of an older backup, which keeps the time of creation.
    monkeypatch.setattr("jetspark.spark.stream.heads.head_of", lambda info: replace(real(info), next=90))
    with pytest.raises(StreamWentBack):
        read(server, stream.name, lake)


def test_a_stream_that_was_deleted_is_read_from_its_archive(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    before = read(server, stream.name, None)
    archive_stream(js, lake, stream.name, until=91, files=2)
    js.delete_stream(stream.name)
    assert read(server, stream.name, lake) == before[:90]
    assert read(server, stream.name, lake, startingTimestamp=before[29]["timestamp"].isoformat()) == before[29:90]
    assert read(server, stream.name, lake, endingOffsets=50) == before[:49]


# ---- between planning and reading ------------------------------------------------------------------------------------


def test_a_task_continues_in_the_archive_when_the_stream_was_trimmed_since(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    before = read(server, stream.name, None)
    archive_stream(js, lake, stream.name, until=41)
    reader = source.batch_reader(options(server, stream.name, lake, minPartitions=4), SCHEMA)
    planned = reader.partitions()
    archive_stream(js, lake, stream.name, until=91, files=2)
    stream.purge(up_to_sequence=90)
    assert rows(reader, planned) == before
    assert rows(reader, planned) == before  # as another attempt


def test_a_task_opens_a_table_again_that_was_compacted_since(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    before = read(server, stream.name, None)
    archive_stream(js, lake, stream.name, files=5)
    stream.purge(up_to_sequence=100)
    reader = source.batch_reader(options(server, stream.name, lake, minPartitions=2), SCHEMA)
    planned = reader.partitions()
    first = next(iter(reader.read(planned[0]))).to_pylist()
    compact_archive(js, lake, stream.name)
    assert first == before[: len(first)]
    assert rows(reader, planned) == before


def test_a_file_that_is_missing_from_the_table_is_an_error_that_names_it(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    archive_stream(js, lake, stream.name, files=2)
    reader = source.batch_reader(options(server, stream.name, lake), SCHEMA)
    planned = reader.partitions()
    [part] = [each.value for each in planned]
    assert isinstance(part, HybridRange)
    gone = next(iter(Path(lake).rglob("day=*/*.parquet")))
    gone.unlink()
    with pytest.raises(ArchiveDamaged, match=gone.name):
        rows(reader, planned)


def test_a_partition_has_only_the_files_of_its_range(
    server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    archive_stream(js, lake, stream.name, files=10)
    reader = source.batch_reader(options(server, stream.name, lake, minPartitions=5), SCHEMA)
    for each in reader.partitions():
        part = each.value
        assert [(file.begin, file.end) for file in part.archive.files] == [
            (begin, begin + 10) for begin in range(1, 101, 10) if begin < part.end and part.start < begin + 10
        ]
    assert "reader" not in json.dumps(sorted(vars(reader)))


# ---- on Spark --------------------------------------------------------------------------------------------------------


def spark_rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((row.sequence, row.subject, bytes(row.data), row.headers, row.timestamp) for row in frame.collect())


def test_spark_reads_both_as_one_table(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, lake: str
) -> None:
    before = spark_rows(spark.read.format("jetstream").options(**options(server, stream.name, None)).load())
    archive_stream(js, lake, stream.name, until=61, files=2)
    stream.purge(up_to_sequence=60)
    given = options(server, stream.name, lake, minPartitions=4)
    frame = spark.read.format("jetstream").options(**given).load()
    assert spark_rows(frame) == before
    assert frame.where("stream_created IS NULL").count() == 0
    assert frame.select("sequence").where("sequence < 61").count() == 60


def run_until_now(spark: SparkSession, given: dict[str, str], folder: Path) -> None:
    frame = spark.readStream.format("jetstream").options(**given).load()
    writer = frame.select("sequence", "data").writeStream.format("parquet").option("path", str(folder / "rows"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(FINISH_S)


def written(spark: SparkSession, folder: Path) -> list[int]:
    return sorted(row.sequence for row in spark.read.parquet(str(folder / "rows")).collect())


def batches_of(folder: Path) -> list[tuple[int, int]]:
    files = sorted((folder / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda each: int(each.name))
    found = []
    for each in files:
        [position] = json.loads(each.read_text().splitlines()[-1])["streams"].values()
        found.append((position["from"], position["next"]))
    return found


def test_a_streaming_query_begins_in_the_archive_and_continues_in_the_stream(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, lake: str, tmp_path: Path
) -> None:
    archive_stream(js, lake, stream.name, until=61, files=3)
    stream.purge(up_to_sequence=55)
    given = options(server, stream.name, lake, startingOffsets="earliest", maxOffsetsPerTrigger=40)
    run_until_now(spark, given, tmp_path)
    assert written(spark, tmp_path) == list(range(1, 101))
    assert batches_of(tmp_path) == [(1, 41), (41, 81), (81, 101)]
    fill(js, stream, 101, 120)
    run_until_now(spark, given, tmp_path)
    assert written(spark, tmp_path) == list(range(1, 121))


def test_a_checkpoint_behind_the_retention_continues_from_the_archive(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, lake: str, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    given = options(server, stream.name, None, startingOffsets="earliest")
    run_until_now(spark, given, tmp_path)
    fill(js, stream, 101, 150)
    archive_stream(js, lake, stream.name, until=141)
    stream.purge(up_to_sequence=130)
    with pytest.raises(StreamingQueryException, match="sequence 101 is needed and the first stored one is 131"):
        run_until_now(spark, given, tmp_path)
    run_until_now(spark, given | {"archive": lake}, tmp_path)
    assert written(spark, tmp_path) == list(range(1, 151))


def test_a_batch_that_is_repeated_has_the_same_rows_after_the_border_has_moved(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, lake: str, tmp_path: Path
) -> None:
    archive_stream(js, lake, stream.name, until=31)
    given = options(server, stream.name, lake, startingOffsets="earliest", maxOffsetsPerTrigger=50)
    run_until_now(spark, given, tmp_path)
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda each: int(each.name))
    commits[-1].unlink()  # as if the query had died before
    archive_stream(js, lake, stream.name)
    stream.purge()
    fill(js, stream, 101, 110)
    run_until_now(spark, given, tmp_path)
    assert written(spark, tmp_path) == list(range(1, 111))


def test_a_query_at_the_end_of_the_stream_is_told_of_a_gap_that_it_comes_to(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, lake: str, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    archive_stream(js, lake, stream.name, until=41)
    stream.purge(up_to_sequence=60)
    given = options(server, stream.name, lake, startingOffsets="earliest")
    with pytest.raises(StreamingQueryException, match="sequence 41 is needed and the first stored one is 61"):
        run_until_now(spark, given, tmp_path)
    run_until_now(spark, given | {"failOnDataLoss": "false"}, tmp_path / "other")
    assert written(spark, tmp_path / "other") == [*range(1, 41), *range(61, 101)]


def test_a_running_query_takes_up_what_is_archived_and_trimmed_behind_its_back(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, lake: str, tmp_path: Path
) -> None:
    archive_stream(js, lake, stream.name, until=11)
    given = options(server, stream.name, lake, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    frame = spark.readStream.format("jetstream").options(**given).load()
    writer = frame.select("sequence", "data").writeStream.format("parquet").option("path", str(tmp_path / "rows"))
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        until = time.monotonic() + FINISH_S
        for end in range(31, 102, 10):
            archive_stream(js, lake, stream.name, until=end)
            stream.purge(up_to_sequence=end - 1)
        while time.monotonic() < until and (not batches_of(tmp_path) or batches_of(tmp_path)[-1][1] < 101):
            assert query.isActive, query.exception()
            time.sleep(0.1)
        query.processAllAvailable()
    finally:
        query.stop()
    assert written(spark, tmp_path) == list(range(1, 101))
