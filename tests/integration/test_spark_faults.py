"""What tasks of the sinks for buckets do when others write meanwhile, a message is lost, a connection is cut, or a
replica is behind: every row is counted for what became of it.

No JVM: a test does a task's work in its own process, through the formats as Spark finds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructType
from support.lossy import lossy_proxy
from support.names import new_name
from support.replicas import stale_replica

from jetspark import KVConfig
from jetspark.blocking import JetStream, KeyValue
from jetspark.server import NatsServer
from jetspark.spark import connections
from jetspark.spark.options import Connecting
from pyspark_jetstream_kv import DefaultSource as KVFormat

pytest_plugins = ["support.sparks"]
pytestmark = pytest.mark.timeout(600)

# A stale replica answers every second request, by chance: as many tries miss it once in a thousand runs.
TRIES = 10


def new_bucket(js: JetStream, *, batched: bool = True) -> KeyValue:
    return js.create_kv(KVConfig(bucket=new_name("faulty"), history=5, allow_batched=batched))


# ---- a replica that is behind ----------------------------------------------------------------------------------------


def kv_task(
    url: str, bucket: KeyValue, guard: str, keys: list[str], values: list[str], limits: list[int], **more: str
) -> Callable[[], Any]:
    """A task that writes rows; called again, it is another attempt at the same one."""
    schema = StructType().add("key", StringType()).add("value", StringType())
    columns: dict[str, list[Any]] = {"key": keys, "value": values}
    if guard != "none":
        schema = schema.add(guard, LongType())
        columns[guard] = limits
    options = {"servers": url, "bucket": bucket.bucket, "guard": guard, **more}
    writer = KVFormat(options).writer(schema, False)
    return lambda: writer.write(iter([pa.RecordBatch.from_pydict(columns)]))


@pytest.mark.parametrize("behind", ["a revision", "two revisions", "everything"])
def test_rows_of_an_earlier_attempt_are_recognised_where_a_replica_does_not_have_them_yet(
    server: NatsServer, js: JetStream, behind: str
) -> None:
    bucket = new_bucket(js)
    oldest = bucket.put("k", b"oldest")
    known = bucket.put("k", b"known")
    attempt = kv_task(server.url, bucket, "revision", ["k"], ["new"], [known])
    assert (attempt().written, bucket.get("k").value) == (1, b"new")
    last_seen = {"a revision": known, "two revisions": oldest, "everything": 0}[behind]
    stale_replica(js, js.stream(f"KV_{bucket.bucket}"), last_seen)
    for _ in range(TRIES):
        written = attempt()
        assert (written.written, written.conflicts) == (1, 0)
    assert bucket.stream_info().state.last_sequence == known + 1


def test_a_replica_that_is_behind_makes_no_row_newer(server: NatsServer, js: JetStream) -> None:
    bucket = new_bucket(js)
    kv_task(server.url, bucket, "sequence", ["k"], ["five"], [5])()
    kv_task(server.url, bucket, "sequence", ["k"], ["nine"], [9])()
    stale_replica(js, js.stream(f"KV_{bucket.bucket}"), 1)
    for _ in range(TRIES):
        written = kv_task(server.url, bucket, "sequence", ["k"], ["seven"], [7])()
        assert (written.written, written.dropped) == (0, 1)
    assert bucket.stream_info().state.last_sequence == 2


# ---- what is lost on the way -----------------------------------------------------------------------------------------

ROWS = 1_000
CASES = [("none", True), ("revision", True), ("sequence", True), ("revision", False)]


@pytest.mark.parametrize(("guard", "batched"), CASES, ids=["none", "revision", "sequence", "publish_async"])
@pytest.mark.parametrize("lost", ["to_server", "to_client"])
def test_a_connection_cut_while_a_task_writes_loses_no_row_and_counts_each_once(
    server: NatsServer, js: JetStream, guard: str, batched: bool, lost: Literal["to_server", "to_client"]
) -> None:
    bucket = new_bucket(js, batched=batched)
    stream = js.stream(f"KV_{bucket.bucket}")
    with lossy_proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.lose_from(f"$KV.{bucket.bucket}.k.{ROWS // 2} ".encode(), lost)
        writing = pool.submit(rows_task(proxy.url, bucket, guard))
        assert proxy.has_lost.wait(30)
        # With its answers lost, what the task doubts is stored.
        while lost == "to_client" and stream.info().state.messages <= ROWS // 2:
            time.sleep(0.01)
        assert not writing.done()
        proxy.cut()
        written: Any = writing.result()
        close_connections()
    assert (written.rows, written.written, written.dropped, written.conflicts) == (ROWS, ROWS, 0, 0)
    check_all_rows(bucket, may_be_twice=guard == "none")


@pytest.mark.parametrize("guard", ["none", "revision", "sequence"])
def test_a_row_that_is_lost_from_the_middle_of_a_batch_is_written_with_the_next(
    server: NatsServer, js: JetStream, guard: str
) -> None:
    bucket = new_bucket(js)
    with lossy_proxy(server.port) as proxy:
        proxy.lose_one(f"$KV.{bucket.bucket}.k.{ROWS // 2} ".encode())
        written = rows_task(proxy.url, bucket, guard)()
        assert proxy.has_lost.is_set()
        close_connections()
    assert (written.rows, written.written, written.conflicts) == (ROWS, ROWS, 0)
    check_all_rows(bucket)


def test_a_refusal_that_is_lost_with_the_connection_is_not_taken_for_a_written_row(
    server: NatsServer, js: JetStream
) -> None:
    bucket, count = new_bucket(js), 4 * ROWS  # more than may be under way, so that the batch goes on afterwards
    bucket.put("k.99", b"somebody else's")
    stream = js.stream(f"KV_{bucket.bucket}")
    with lossy_proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.lose_from(f"$KV.{bucket.bucket}.k.99 ".encode(), "to_client")
        writing = pool.submit(rows_task(proxy.url, bucket, "revision", count, onConflict="skip"))
        assert proxy.has_lost.wait(30)
        while stream.info().state.messages < 200:
            time.sleep(0.01)
        proxy.cut()
        written = writing.result()
        close_connections()
    assert (written.written, written.conflicting) == (count - 1, ("k.99",))
    assert bucket.get("k.99").value == b"somebody else's"
    assert stream.info().state.messages == count


def rows_task(url: str, bucket: KeyValue, guard: str, count: int = ROWS, **more: str) -> Callable[[], Any]:
    keys, values = ([f"{letter}.{number}" for number in range(count)] for letter in "kv")
    return kv_task(url, bucket, guard, keys, values, [0 if guard == "revision" else 1] * count, **more)


def check_all_rows(bucket: KeyValue, *, may_be_twice: bool = False) -> None:
    found = {key: entry.value for key, entry in bucket.snapshot([">"]).items()}
    assert found == {f"k.{number}": b"v.%d" % number for number in range(ROWS)}
    messages = bucket.stream_info().state.messages
    assert messages == ROWS or (may_be_twice and messages <= 2 * ROWS)


def close_connections() -> None:
    """Those that a task's process would keep, while there is somebody to say goodbye to."""
    while connections._kept:
        connections._kept.popitem()[1].close()


# ---- connections that are kept ---------------------------------------------------------------------------------------


def test_a_kept_connection_whose_server_does_not_answer_is_closed_by_the_next_ones_without_an_error(
    server: NatsServer, own: NatsServer
) -> None:
    gone = connections.client_for(Connecting(servers=(own.url,)))
    own.pause()
    gone.publish("nobody.hears", b"")
    ways = [Connecting(servers=(server.url,), request_timeout_s=1.0 + way) for way in range(connections.MAX_KEPT)]
    began = time.monotonic()
    kept = [connections.client_for(way) for way in ways]
    assert gone.is_closed
    assert time.monotonic() - began < gone.options.drain_timeout_s
    assert not any(client.is_closed for client in kept)
    assert connections.client_for(ways[0]) is kept[0]
