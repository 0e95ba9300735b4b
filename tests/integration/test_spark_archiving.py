"""Archives that Spark's tasks write: the same tables, by the same rules as those of the live archiver."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.archives import archive, archiving, only_table, proved
from support.names import new_stream

from jetspark.blocking import JetStream, Stream, connect
from jetspark.errors import ConfigError, DataLoss
from jetspark.lake import ArchiveOptions, archive_streams
from jetspark.server import NatsServer

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from jetspark.spark import SparkArchiver
from jetspark.spark.lake import archiving as spark_archiving

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_archiving, "TASK_SEQUENCES", 500)


@pytest.fixture
def engine(spark: SparkSession, server: NatsServer) -> SparkArchiver:
    return SparkArchiver(spark, tasks=4, servers=server.url)


def fill(js: JetStream, stream: Stream, count: int) -> None:
    with js.fast_batch() as batch:
        batch.add_many((f"{stream.name}.{number % 3}", b"%d" % number) for number in range(count))


def on_spark(js: JetStream, engine: SparkArchiver, stream: Stream, to: Path, **options: object) -> None:
    archive_streams(js, [stream.name], ArchiveOptions(to=str(to), **options), once=True, engine=engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_both_engines_continue_each_others_tables(
    js: JetStream, engine: SparkArchiver, tmp_path: Path, format: str
) -> None:
    stream = new_stream(js)
    fill(js, stream, 3000)
    on_spark(js, engine, stream, tmp_path, format=format)
    fill(js, stream, 3000)
    archive(js, stream.name, tmp_path)
    fill(js, stream, 6000)
    js.publish(f"{stream.name}.headers", b"\x00", headers={"A": ["1", "2"]})
    on_spark(js, engine, stream, tmp_path)
    found = proved(only_table(tmp_path), js)
    assert (found.rows, found.files) == (12_001, 1 + 1 + 4)


def test_tasks_without_rows_leave_no_gap(js: JetStream, engine: SparkArchiver, tmp_path: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 10)
    archive(js, stream.name, tmp_path)
    fill(js, stream, 1000)
    with js.fast_batch() as batch:
        batch.add_many((f"{stream.name}.gone", b"") for _ in range(4000))
    fill(js, stream, 1000)
    stream.purge(subject=f"{stream.name}.gone")
    on_spark(js, engine, stream, tmp_path)
    found = proved(only_table(tmp_path), js)
    assert (found.rows, found.deleted) == (2010, 4000)


def test_lost_messages_are_an_error_or_recorded(js: JetStream, engine: SparkArchiver, tmp_path: Path) -> None:
    stream = new_stream(js, max_messages=3000)
    fill(js, stream, 1000)
    on_spark(js, engine, stream, tmp_path)
    fill(js, stream, 5000)
    with pytest.raises(DataLoss, match="1001 is needed and the first stored one is 3001"):
        on_spark(js, engine, stream, tmp_path)
    on_spark(js, engine, stream, tmp_path, on_loss="record")
    assert proved(only_table(tmp_path), js, lost=range(1001, 3001)).rows == 4000


def test_both_engines_at_once_write_each_message_once(
    js: JetStream, server: NatsServer, engine: SparkArchiver, tmp_path: Path
) -> None:
    stream = new_stream(js)
    stop = threading.Event()
    options = ArchiveOptions(to=str(tmp_path), every_s=0.0, lease_s=None)
    with connect(server.url) as client:
        spark = threading.Thread(
            target=archive_streams,
            args=(client.jetstream(), [stream.name], options),
            kwargs={"stop": stop.wait, "engine": engine},
        )
        spark.start()
        try:
            with archiving(js, stream.name, tmp_path, every_s=0.0, max_rows=2000):
                for _ in range(20):
                    fill(js, stream, 2000)
                    time.sleep(0.1)
        finally:
            stop.set()
            spark.join()
    archive(js, stream.name, tmp_path)
    assert proved(only_table(tmp_path), js).rows == 40_000


def test_the_command_archives_on_spark(js: JetStream, server: NatsServer, tmp_path: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 100)
    command = [sys.executable, "-m", "jetspark", "archive", "run", stream.name, "--to", str(tmp_path), "--once"]
    options = ["--engine", "spark", "--servers", server.url, "--lease", "0"]
    archive(js, stream.name, tmp_path)
    fill(js, stream, 100)
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert proved(only_table(tmp_path), js).rows == 200


def test_options_are_checked_on_the_driver(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="unknown option 'server'; did you mean 'servers'"):
        SparkArchiver(spark, server="nats://127.0.0.1:4222")
