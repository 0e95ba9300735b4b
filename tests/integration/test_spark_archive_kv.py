"""Tables of buckets in the past, from the archive of their stream."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.archive_ranges import archive_stream
from support.names import new_name

from jetspark import KVConfig
from jetspark.blocking import JetStream, KeyValue
from jetspark.errors import ConfigError
from jetspark.server import NatsServer
from jetspark.spark.kv import reading as kv_reading

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def new_bucket(js: JetStream, history: int = 1) -> KeyValue:
    return js.create_kv(KVConfig(bucket=new_name("b"), history=history))


def options(server: NatsServer, bucket: KeyValue, lake: str | None, **more: Any) -> dict[str, str]:
    given = {"servers": server.url, "bucket": bucket.bucket} | ({} if lake is None else {"archive": lake})
    return given | {name: str(value) for name, value in more.items()}


def rows(given: dict[str, str]) -> list[dict[str, Any]]:
    reader: Any = kv_reading.batch_reader(given, kv_reading.SCHEMA)
    batches = (batch for each in reader.partitions() for batch in reader.read(each))
    return [row for batch in batches for row in batch.to_pylist()]


def table(given: dict[str, str]) -> dict[str, bytes]:
    found = rows(given)
    assert len({row["key"] for row in found}) == len(found)
    return {row["key"]: row["value"] for row in found}


@pytest.mark.parametrize("partitions", [1, 3])
def test_every_moment_is_there_when_each_revision_was_archived(
    server: NatsServer, js: JetStream, lake: str, partitions: int
) -> None:
    """Also of keys that were deleted or purged since, and in a bucket that keeps one revision of each."""
    bucket, rng = new_bucket(js), random.Random(7)
    past: dict[int, dict[str, bytes]] = {0: {}}
    times = {}
    for number in range(60):
        state, key = dict(past[number]), f"k{rng.randrange(5)}"
        if number % 17 == 11:
            (bucket.delete if number % 2 else bucket.purge)(key)
            state.pop(key, None)
        else:
            assert bucket.put(key, b"%d" % number) == number + 1
            state[key] = b"%d" % number
        past[number + 1] = state
        times[number + 1] = js.stream(f"KV_{bucket.bucket}").get_message(number + 1).timestamp
        if number < 45:
            archive_stream(js, lake, f"KV_{bucket.bucket}")
    given = options(server, bucket, lake, numPartitions=partitions)
    for moment in range(1, 46):
        assert table(given | {"asOf": str(moment)}) == past[moment], moment
    for moment in range(2, 40):
        assert table(given | {"asOf": times[moment].isoformat()}) == past[moment - 1]
    assert table(given | {"asOf": "60"}) == past[60]
    only = table(given | {"asOf": "30", "keys": "k1,k3"})
    assert only == {key: value for key, value in past[30].items() if key in ("k1", "k3")}
    with pytest.raises(ConfigError, match="asOf=61: the bucket is at 60"):
        rows(given | {"asOf": "61"})
    history = [row["revision"] for row in rows(given | {"history": "true", "asOf": "45"})]
    assert sorted(history) == list(range(1, 46))


def test_a_key_that_may_have_had_a_value_that_was_never_archived_fails_the_query(
    server: NatsServer, js: JetStream, lake: str
) -> None:
    bucket = new_bucket(js, history=2)
    for key in ("busy", "calm", "gone"):
        bucket.put(key, b"1")  # 1 to 3
    archive_stream(js, lake, f"KV_{bucket.bucket}")
    for number in range(2, 6):
        bucket.put("busy", b"%d" % number)  # 4 to 7, of which it keeps 6 and 7
    bucket.purge("gone")  # 8
    archive_stream(js, lake, f"KV_{bucket.bucket}")
    given = options(server, bucket, lake)
    assert table(given | {"asOf": "3"}) == {"busy": b"1", "calm": b"1", "gone": b"1"}
    with pytest.raises(ConfigError, match=r"asOf=5: .* 2 keys have been written so often since that .*'busy', 'gone'"):
        table(given | {"asOf": "5"})
    assert table(given | {"asOf": "5", "failOnDataLoss": "false"}) == {"calm": b"1"}
    # The missing revisions may be of the purged key, but no longer of one that was written after them.
    assert table(given | {"asOf": "7", "failOnDataLoss": "false"}) == {"busy": b"5", "calm": b"1"}
    assert table(given | {"asOf": "8"}) == {"busy": b"5", "calm": b"1"}


def test_a_time_is_taken_without_an_archive_too(server: NatsServer, js: JetStream) -> None:
    bucket = new_bucket(js, history=5)
    for number in range(1, 4):
        bucket.put("a", b"%d" % number)
    moment = js.stream(f"KV_{bucket.bucket}").get_message(3).timestamp
    assert table(options(server, bucket, None, asOf=moment.isoformat())) == {"a": b"2"}
    assert table(options(server, bucket, None, asOf="2020-01-01")) == {}


def test_an_archive_needs_a_past(server: NatsServer, js: JetStream, lake: str) -> None:
    bucket = new_bucket(js)
    with pytest.raises(ConfigError, match="expected together with asOf or history"):
        rows(options(server, bucket, lake))
    with pytest.raises(ConfigError, match="asOf='soon': expected a revision, or a time"):
        rows(options(server, bucket, None, asOf="soon"))
    with pytest.raises(ConfigError, match=f"stream 'KV_{bucket.bucket}' has no archive there"):
        rows(options(server, bucket, lake, asOf=1))


def test_spark_reads_the_past_of_a_bucket(spark: SparkSession, server: NatsServer, js: JetStream, lake: str) -> None:
    bucket = new_bucket(js)
    bucket.put("a", b"1")
    archive_stream(js, lake, f"KV_{bucket.bucket}")
    bucket.put("a", b"2")
    given = options(server, bucket, lake, asOf=1)
    [row] = spark.read.format("jetstream_kv").options(**given).load().collect()
    assert (row.key, bytes(row.value), row.revision, row.operation) == ("a", b"1", 1, "put")
