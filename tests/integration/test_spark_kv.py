"""Buckets as tables, with a real server: most of it in this process, and what only Spark can show with Spark."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType
from support.folds import Rows, fold_into
from support.header_blocks import publish_block
from support.names import new_name
from support.patience import PATIENCE_S

import jetspark.blocking
from jetspark import KVConfig, StreamConfig
from jetspark.blocking import JetStream, KeyValue
from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import ConfigError, Conflict, KeyNotFound, ServerError, StreamNotFound, StreamRecreated
from jetspark.server import NatsServer
from jetspark.spark import connections
from jetspark.spark.kv import options as kv_options
from jetspark.spark.kv import reading as kv_reading
from jetspark.spark.kv import writing as kv_writing
from jetspark.spark.offsets import Offset
from jetspark.spark.options import read_options
from jetspark.state import scan, store, tables
from jetspark.state.changes import Change, Current, Outcome
from jetspark.state.deliveries import delivery
from jetspark.state.tables import BucketView

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def bucket(js: JetStream) -> KeyValue:
    return new_bucket(js)


def new_bucket(js: JetStream, *, batched: bool = True, history: int = 1) -> KeyValue:
    made = js.create_kv(KVConfig(bucket=new_name("table"), history=history))
    if batched:
        js.update_stream(StreamConfig(name=f"KV_{made.bucket}", allow_batched=True))
    return made


def written_changes(js: JetStream, bucket: str, changes: Iterable[Change], writer: str = "test") -> Outcome:
    return ProcedureRunner(js).run(store.store(bucket, changes, writer=writer))


def stored_newest(js: JetStream, bucket: str, changes: Iterable[Change], **more: Any) -> Outcome:
    return ProcedureRunner(js).run(store.store_newest(bucket, changes, **more))


def loaded_of(js: JetStream, bucket: str, keys: Iterable[str]) -> dict[str, Current]:
    return ProcedureRunner(js).run(store.load(bucket, keys))


def folded_into(js: JetStream, bucket: str, rows: Rows) -> Outcome:
    return ProcedureRunner(js).run(fold_into(bucket, lambda: [rows]))


def opened(js: JetStream, bucket: str, keys: Sequence[str] = ()) -> BucketView:
    return ProcedureRunner(js).run(tables.open_bucket(bucket, keys))


def snapshot(js: JetStream, view: BucketView) -> dict[str, Any]:
    return ProcedureRunner(js).run(tables.snapshot(view))


@pytest.fixture
def options(server: NatsServer, bucket: KeyValue) -> dict[str, str]:
    return {"servers": server.url, "bucket": bucket.bucket}


def rows(options: dict[str, str], schema: StructType = kv_reading.SCHEMA, **more: str) -> list[dict[str, Any]]:
    """The table as a reader in this process has it: what Spark does, without Spark."""
    reader = kv_reading.batch_reader(options | more, schema)
    found = []
    for partition in reader.partitions():
        for batch in reader.read(partition):
            found += pylist(batch)
    return found


def pylist(batch: Any) -> list[dict[str, Any]]:
    assert isinstance(batch, pa.RecordBatch)
    return list(batch.to_pylist())


def values(options: dict[str, str], **more: Any) -> dict[str, bytes]:
    return {row["key"]: row["value"] for row in rows(options, **more)}


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_a_row_is_what_the_bucket_has(bucket: KeyValue, options: dict[str, str]) -> None:
    revision = bucket.put("order.1", b"\x00paid")
    [row] = rows(options)
    entry = bucket.get("order.1")
    created = entry.created.replace(microsecond=entry.created.microsecond)
    assert row == {
        "key": "order.1",
        "value": b"\x00paid",
        "revision": revision,
        "created": created,
        "operation": "put",
    }


UNREADABLE = {
    "bytes": ("\udcff\udcfe", b"NATS/1.0\r\n\r\n", "\ufffd\ufffd", "put"),
    "deleted": ("deleted", b"NATS/1.0\r\nKV-Operation: DEL\r\ngarbage\r\n\r\n", "deleted", "delete"),
    "no-headers": ("odd", b"garbage, KV-Operation\r\n\r\n", "odd", "put"),
}


@pytest.mark.parametrize("more", [{}, {"history": "true"}, {"numPartitions": "2"}, {"asOf": "3"}, None])
@pytest.mark.parametrize(("key", "block", "shown", "operation"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_key_or_headers_that_cannot_be_read_keep_nobody_from_the_others(
    server: NatsServer,
    bucket: KeyValue,
    options: dict[str, str],
    key: str,
    block: bytes,
    shown: str,
    operation: str,
    more: dict[str, Any] | None,
) -> None:
    bucket.put("before", b"1")
    publish_block(server.port, f"$KV.{bucket.bucket}.{key}", block, b"x")
    bucket.put("behind", b"3")
    if more is None:
        reader = kv_reading.stream_reader(options, kv_reading.SCHEMA)
        start = reader.initialOffset()
        found = [each[::2] for each in changes(reader, start, reader.latestOffset(start, ReadAllAvailable()))]
    else:
        found = [(row["key"], row["operation"]) for row in rows(options, includeDeletes="true", **more)]
    assert sorted(found) == sorted([("before", "put"), (shown, operation), ("behind", "put")])


@pytest.mark.parametrize("partitions", ["1", "3"])
def test_the_present_leaves_deleted_keys_out_unless_asked(
    bucket: KeyValue, options: dict[str, str], partitions: str
) -> None:
    for key in ("a", "b", "c"):
        bucket.put(key, b"1")
    bucket.put("a", b"2")
    bucket.delete("b")
    bucket.purge("c")
    assert values(options, numPartitions=partitions) == {"a": b"2"}
    found = {row["key"]: row["operation"] for row in rows(options, includeDeletes="true", numPartitions=partitions)}
    assert found == {"a": "put", "b": "delete", "c": "purge"}


def test_keys_are_chosen_by_the_server(bucket: KeyValue, options: dict[str, str]) -> None:
    for key in ("order.1", "order.2.lines", "stock.7"):
        bucket.put(key, b"")
    assert set(values(options, keys="order.*, stock.>")) == {"order.1", "stock.7"}
    assert set(values(options, keys="order.>")) == {"order.1", "order.2.lines"}
    assert values(options, keys="nothing.>") == {}


def test_history_has_every_revision_the_bucket_still_has(js: JetStream, options: dict[str, str]) -> None:
    made = new_bucket(js, history=3)
    for number in range(5):
        made.put("a", b"%d" % number)
    made.delete("a")
    options["bucket"] = made.bucket
    for partitions in ("1", "4"):
        found = rows(options, history="true", numPartitions=partitions)
        assert [(row["value"], row["operation"]) for row in found] == [(b"3", "put"), (b"4", "put"), (b"", "delete")]
    assert [row["value"] for row in rows(options, history="true", asOf="4")] == [b"3"]
    assert len(rows(options, history="true", includeDeletes="false")) == 2


def test_the_past_is_read_as_far_as_history_goes(js: JetStream, options: dict[str, str]) -> None:
    made = new_bucket(js, history=3)
    made.put("a", b"1")
    made.put("b", b"1")
    made.put("c", b"1")
    moment = made.put("a", b"2")
    made.delete("b")
    made.put("a", b"3")
    made.put("late", b"1")
    options["bucket"] = made.bucket
    assert values(options, asOf=str(moment)) == {"a": b"2", "b": b"1", "c": b"1"}
    assert values(options, asOf=str(moment), numPartitions="3") == {"a": b"2", "b": b"1", "c": b"1"}
    for number in range(3):
        made.put("c", b"%d" % number)
    with pytest.raises(ConfigError, match=r"1 keys have been written so often since that .* may be gone: 'c'"):
        rows(options, asOf=str(moment))
    assert values(options, asOf=str(moment), failOnDataLoss="false") == {"a": b"2", "b": b"1"}
    with pytest.raises(ConfigError, match="asOf=999: the bucket is at 10"):
        rows(options, asOf="999")


def test_a_narrower_schema_is_honoured(bucket: KeyValue, options: dict[str, str]) -> None:
    bucket.put("a", b"1")
    assert rows(options, StructType([kv_reading.SCHEMA["revision"], kv_reading.SCHEMA["key"]])) == [
        {"revision": 1, "key": "a"}
    ]


def test_an_empty_bucket_is_an_empty_table(options: dict[str, str]) -> None:
    assert rows(options) == []
    assert rows(options, history="true") == []
    assert rows(options, numPartitions="2") == []


def test_a_mirror_is_read_with_its_origins_keys(js: JetStream, bucket: KeyValue, options: dict[str, str]) -> None:
    bucket.put("a", b"1")
    source = jetspark.StreamSource(name=bucket.bucket)
    mirror = js.create_kv(KVConfig(bucket=new_name("mirror"), mirror=source))
    for change in mirror.watch():
        if change.key == "a":
            break
    assert values(options | {"bucket": mirror.bucket}) == {"a": b"1"}
    with pytest.raises(ConfigError, match=f"a mirror of '{bucket.bucket}'; write to that one"):
        written_changes(js, mirror.bucket, [Change("a", b"2")])


class Writers:
    """Writes some keys over and over, and remembers which revision had which value."""

    def __init__(self, server: NatsServer, bucket: str, keys: int) -> None:
        self._server, self._bucket, self._keys = server, bucket, keys
        self.log: list[tuple[int, str, bytes]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with jetspark.blocking.connect(self._server.url) as client:
            js = client.jetstream()
            for number in itertools.count(1):
                if self._stop.is_set():
                    return
                # Many at once, so that the reader has something to catch up with.
                sent = [(f"k.{number * 37 % self._keys + at}", b"%d" % number) for at in range(20)]
                futures = [js.publish_async(f"$KV.{self._bucket}.{key}", value) for key, value in sent]
                for (key, value), future in zip(sent, futures, strict=True):
                    self.log.append((future.result(PATIENCE_S).sequence, key, value))

    def __enter__(self) -> Writers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def state(self, moment: int) -> dict[str, bytes]:
        return {key: value for revision, key, value in sorted(self.log) if revision <= moment}


def test_the_present_is_one_moment_of_a_bucket_that_keeps_changing(
    js: JetStream, bucket: KeyValue, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 100)  # so that it takes a while
    written_changes(js, bucket.bucket, [Change(f"k.{number}", b"0") for number in range(4000)])
    view = opened(js, bucket.bucket)
    taken = []
    with Writers(server, bucket.bucket, 3900) as writers:
        for _ in range(5):
            before = bucket.stream_info().state.last_sequence
            found = snapshot(js, view)
            moment = max(delivery(message).sequence for message in found.values())
            assert moment >= before
            taken.append((moment, {subject.split(".", 2)[2]: message.data for subject, message in found.items()}))
    assert taken[-1][0] > taken[0][0]
    initial = {f"k.{number}": b"0" for number in range(4000)}
    for moment, table in taken:
        assert table == initial | writers.state(moment)


def test_a_table_has_all_of_a_transaction_or_nothing(
    js: JetStream, bucket: KeyValue, server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()

    def work() -> None:
        with jetspark.blocking.connect(server.url) as client:
            theirs = client.jetstream().kv(bucket.bucket)
            for number in itertools.count(1):
                if stop.is_set():
                    return
                with theirs.transaction() as tx:
                    for key in range(30):
                        tx.put(f"k.{key}", b"%d" % number)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        whole = opened(js, bucket.bucket)
        some = opened(js, bucket.bucket, ["k.3", "k.4", "k.9"])  # without the last one
        tables = [{each.data for each in snapshot(js, view).values()} for _ in range(60) for view in (whole, some)]
    finally:
        stop.set()
        thread.join()
    assert max(map(len, tables)) == 1
    assert len(set(map(frozenset, tables))) > 2
    assert "ends early" not in caplog.text


def test_a_value_overwritten_before_its_task_reads_it_is_noticed(
    bucket: KeyValue, options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(10):
        bucket.put(f"k.{number}", b"0")
    for setting in ("true", "false"):
        reader = kv_reading.batch_reader(options | {"numPartitions": "2", "failOnDataLoss": setting}, kv_reading.SCHEMA)
        planned = reader.partitions()
        bucket.put("k.3", b"1")
        if setting == "true":
            with pytest.raises(ConfigError, match=r"1 of \d values .* were overwritten while they were read"):
                [list(reader.read(each)) for each in planned]
        else:
            found = [row["key"] for each in planned for batch in reader.read(each) for row in pylist(batch)]
            assert len(found) == 9
            assert "they are left out" in caplog.text


def test_history_keeps_what_is_overwritten_before_its_task_reads_it(js: JetStream, options: dict[str, str]) -> None:
    made = new_bucket(js, history=2)
    for number in range(10):
        made.put(f"k.{number}", b"0")
    reader = kv_reading.batch_reader(options | {"bucket": made.bucket, "numPartitions": "3"}, kv_reading.SCHEMA)
    planned = reader.partitions()
    made.put("k.3", b"1")
    made.put("k.new", b"1")
    found = [row for each in planned for batch in reader.read(each) for row in pylist(batch)]
    assert {row["key"]: row["value"] for row in found} == {f"k.{number}": b"0" for number in range(10)}


def test_a_bucket_made_anew_is_not_taken_for_the_old_one(
    js: JetStream, bucket: KeyValue, options: dict[str, str]
) -> None:
    bucket.put("a", b"1")
    reader = kv_reading.batch_reader(options, kv_reading.SCHEMA)
    planned = reader.partitions()
    js.delete_kv(bucket.bucket)
    js.create_kv(KVConfig(bucket=bucket.bucket))
    with pytest.raises(StreamRecreated):
        list(reader.read(planned[0]))


# ---- load and store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False], ids=["fast ingest", "publish_async"])
def test_what_is_stored_is_loaded_with_its_sequence_and_revision(js: JetStream, batched: bool) -> None:
    made = new_bucket(js, batched=batched)
    name = made.bucket
    keys = [f"order.{number}" for number in range(2500)]  # three requests
    outcome = written_changes(js, name, [Change(key, b"v" + key.encode(), sequence=7, revision=0) for key in keys])
    assert outcome == Outcome(written=2500)
    loaded = loaded_of(js, name, [*keys, "never.there"])
    assert list(loaded) == keys
    assert loaded["order.3"] == Current(b"vorder.3", 7, made.get("order.3").revision)
    changes = [Change(keys[0], b"new", sequence=8, revision=loaded[keys[0]].revision), Change(keys[1], b"", revision=1)]
    assert written_changes(js, name, changes) == Outcome(written=1, conflicts=(keys[1],))
    written_changes(js, name, [Change(keys[2], operation="delete", sequence=9), Change(keys[3], operation="purge")])
    assert loaded_of(js, name, keys[:4])[keys[2]] == Current(None, 9, 2502)
    assert [entry.operation for entry in made.history(keys[3])] == ["purge"]
    with pytest.raises(KeyNotFound):
        made.get(keys[2])


def test_large_values_are_loaded_all_though_the_server_ends_its_answers(js: JetStream, bucket: KeyValue) -> None:
    changes = [Change(f"k.{number}", b"x" * 500_000) for number in range(180)]  # 90 MB
    written_changes(js, bucket.bucket, changes)
    assert len(loaded_of(js, bucket.bucket, [change.key for change in changes])) == 180
    js.delete_kv(bucket.bucket)


def test_only_what_is_newer_is_stored_and_doing_it_again_changes_nothing(js: JetStream, bucket: KeyValue) -> None:
    bucket.put("foreign", b"without a sequence")
    first = [Change("a", b"5", sequence=5), Change("a", b"4", sequence=4), Change("foreign", b"1", sequence=1)]
    assert stored_newest(js, bucket.bucket, first) == Outcome(written=2)
    assert stored_newest(js, bucket.bucket, first) == Outcome(dropped=2)
    last = bucket.stream_info().state.last_sequence
    older = [Change("a", b"3", sequence=3), Change("b", operation="delete", sequence=9)]
    assert stored_newest(js, bucket.bucket, older) == Outcome(written=1, dropped=1)
    assert stored_newest(js, bucket.bucket, [Change("b", b"8", sequence=8)]) == Outcome(dropped=1)
    assert bucket.get("a").value == b"5"
    assert bucket.stream_info().state.last_sequence == last + 1
    stale = loaded_of(js, bucket.bucket, ["a"])
    bucket.put("a", b"somebody else")
    outcome = stored_newest(js, bucket.bucket, [Change("a", b"6", sequence=6)], current=stale)
    assert outcome == Outcome(written=1)


def test_many_who_store_the_newest_at_once_leave_the_newest(
    js: JetStream, server: NatsServer, bucket: KeyValue
) -> None:
    def work(worker: int) -> None:
        with jetspark.blocking.connect(server.url) as client:
            for round_ in range(6):
                changes = [Change(f"k.{key}", b"%d" % worker, sequence=round_ * 4 + worker) for key in range(50)]
                stored_newest(client.jetstream(), bucket.bucket, changes)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = loaded_of(js, bucket.bucket, [f"k.{key}" for key in range(50)])
    assert {current[:2] for current in found.values()} == {(b"3", 23)}


def test_a_second_attempt_recognises_what_the_first_has_written(js: JetStream, bucket: KeyValue) -> None:
    changes = [Change("a", b"1", revision=0), Change("b", operation="delete", revision=0)]
    assert written_changes(js, bucket.bucket, changes, writer="job-1") == Outcome(written=2)
    assert written_changes(js, bucket.bucket, changes, writer="job-1") == Outcome(written=2)
    assert bucket.stream_info().state.last_sequence == 2
    assert written_changes(js, bucket.bucket, changes, writer="job-2") == Outcome(conflicts=("a", "b"))
    never = [Change("a", b"1", revision=99), Change("none", b"1", revision=99)]
    assert written_changes(js, bucket.bucket, never) == Outcome(conflicts=("a", "none"))


@pytest.mark.parametrize("batched", [True, False], ids=["fast ingest", "publish_async"])
def test_a_restart_of_the_server_in_the_middle_loses_nothing(batched: bool) -> None:
    with NatsServer() as server, jetspark.blocking.connect(server.url) as client:
        js = client.jetstream()
        name = new_bucket(js, batched=batched, history=5).bucket
        changes = [Change(f"k.{number}", b"x" * 100, revision=0) for number in range(40_000)]
        stored = js.stream(f"KV_{name}")
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(written_changes(js, name, changes)))
        thread.start()
        while stored.info().state.last_sequence < 3000:
            pass
        server.kill()
        assert thread.is_alive()
        server.start()
        thread.join()
        assert outcomes == [Outcome(written=40_000)]
        # Each once: what was in doubt was recognised, not written again.
        state = stored.info().state
        assert (state.messages, state.subject_count) == (40_000, 40_000)


@pytest.mark.parametrize("guard", ["none", "revision", "sequence"])
def test_the_sink_loses_nothing_when_the_server_dies_while_a_task_writes(guard: str) -> None:
    schema = StructType().add("key", "string").add("value", "string")
    names = ["key", "value"] if guard == "none" else ["key", "value", guard]
    schema = schema if guard == "none" else schema.add(guard, "long")
    count, size = 40_000, 2_000

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, count, size):
            numbers = range(start, start + size)
            columns: list[list[Any]] = [[f"k.{number}" for number in numbers], [f"v{number}" for number in numbers]]
            columns += [] if guard == "none" else [[0 if guard == "revision" else number + 1 for number in numbers]]
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in columns], names=names)

    with NatsServer() as server, jetspark.blocking.connect(server.url) as client:
        js = client.jetstream()
        name = new_bucket(js, history=5).bucket
        writer = kv_writing.batch_writer(
            {"servers": server.url, "bucket": name, "guard": guard, "batchSize": "2000"}, schema, False
        )
        stored = js.stream(f"KV_{name}")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(writer.write, batches())
            while stored.info().state.last_sequence < 3000:
                assert not writing.done(), writing.exception()
            server.kill()
            assert not writing.done()
            server.start()
            written: Any = writing.result()
        # The task's own connection ends before its server does: what is unconfirmed then would be an error.
        connections._kept.popitem()[1].close()
        assert (written.rows, written.written, written.conflicts) == (count, count, 0)
        state = stored.info().state
        assert state.subject_count == count
        # Only what is written whatever is there may be there twice, with the same value.
        assert (state.messages == count) or guard == "none"
        found = {message.subject.partition(f"{name}.")[2]: message.data for message in stored.get_messages()}
        assert found == {f"k.{number}": b"v%d" % number for number in range(count)}


@pytest.mark.parametrize("how", [written_changes, stored_newest])
def test_storing_waits_for_a_server_that_is_away_from_the_start(how: Callable[..., Outcome]) -> None:
    with NatsServer() as server, jetspark.blocking.connect(server.url) as client:
        js = client.jetstream(timeout=0.3)
        bucket = new_bucket(js)
        changes = [Change(f"k.{key}", b"1", sequence=1, revision=0) for key in range(10)]
        server.kill()
        with ThreadPoolExecutor(1) as pool:
            storing = pool.submit(how, js, bucket.bucket, changes)
            assert not wait([storing], timeout=1.0).done, storing.exception()  # longer than a request takes to fail
            server.start()
            assert storing.result() == Outcome(written=10)
        with pytest.raises(StreamNotFound):
            how(js, "no_such_bucket", changes)


def test_a_fold_waits_for_a_server_that_is_away() -> None:
    with NatsServer() as server, jetspark.blocking.connect(server.url) as client:
        js = client.jetstream(timeout=0.3)
        bucket = new_bucket(js)
        events = [(f"k.{key}", sequence) for sequence in (1, 2) for key in range(10)]
        outcomes: list[Outcome] = []
        server.kill()
        fold = threading.Thread(target=lambda: outcomes.append(folded_into(js, bucket.bucket, events)))
        fold.start()
        time.sleep(1.0)  # longer than a request takes to fail
        server.start()
        fold.join()
        assert outcomes == [Outcome(written=10)]
        assert folded_into(js, bucket.bucket, events) == Outcome(dropped=20)


def test_what_a_bucket_refuses_for_good_is_an_error_that_names_the_key(js: JetStream) -> None:
    made = js.create_kv(KVConfig(bucket=new_name("small"), max_value_bytes=10))
    js.update_stream(StreamConfig(name=f"KV_{made.bucket}", allow_batched=True))
    with pytest.raises(ServerError, match="key 'b': message size exceeds maximum allowed"):
        written_changes(js, made.bucket, [Change("a", b"x"), Change("b", b"x" * 100)])
    with pytest.raises(ConfigError, match="key 'b': message of 2000000 bytes"):
        written_changes(js, made.bucket, [Change("a", b"x"), Change("b", b"x" * 2_000_000)])
    with pytest.raises(ConfigError, match="key='a': changed twice in one call"):
        written_changes(js, made.bucket, [Change("a", b"x"), Change("a", b"y")])


# ---- streams of changes ----------------------------------------------------------------------------------------------


def changes(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[str, bytes, str]]:
    found = [row for part in reader.partitions(start, end) for batch in reader.read(part) for row in pylist(batch)]
    return [(row["key"], row["value"], row["operation"]) for row in found]


def next_of(offset: dict[str, Any] | None) -> int:
    assert offset is not None
    [position] = Offset.from_json(offset).streams.values()
    return position.next


def test_changes_come_in_order_with_deletions(js: JetStream, options: dict[str, str]) -> None:
    made = new_bucket(js, history=10)
    options["bucket"] = made.bucket
    reader = kv_reading.stream_reader(options | {"numPartitions": "2"}, kv_reading.SCHEMA)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) is start
    assert reader.partitions(start, start) == []
    made.put("a", b"1")
    made.put("b", b"1")
    made.delete("a")
    end = reader.latestOffset(start, ReadAllAvailable())
    assert next_of(end) == next_of(reader.reportLatestOffset()) == 4
    assert changes(reader, start, end) == [("a", b"1", "put"), ("b", b"1", "put"), ("a", b"", "delete")]
    made.put("c", b"1")
    assert len(changes(reader, start, end)) == 3  # a batch stays what it was
    latest = kv_reading.stream_reader(options | {"startingOffsets": "latest"}, kv_reading.SCHEMA)
    assert next_of(latest.initialOffset()) == 5
    from_3 = kv_reading.stream_reader(options | {"startingOffsets": "3", "includeDeletes": "false"}, kv_reading.SCHEMA)
    begin = from_3.initialOffset()
    assert changes(from_3, begin, from_3.latestOffset(begin, ReadAllAvailable())) == [("c", b"1", "put")]
    with pytest.raises(ConfigError, match="startingOffsets=99: the bucket is at 4"):
        kv_reading.stream_reader(options | {"startingOffsets": "99"}, kv_reading.SCHEMA).initialOffset()


def test_a_limit_bounds_batches_and_skips_revisions_that_are_gone(bucket: KeyValue, options: dict[str, str]) -> None:
    reader = kv_reading.stream_reader(options | {"maxOffsetsPerTrigger": "10"}, kv_reading.SCHEMA)
    start = reader.initialOffset()
    for number in range(300):
        bucket.put(f"k.{number % 20}", b"%d" % number)  # the last twenty are left
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(10)
    first = reader.latestOffset(start, limit)
    assert next_of(first) == 291
    assert len(reader.partitions(start, first)) == 1
    assert len(changes(reader, start, first)) == 10
    second = reader.latestOffset(first, limit)
    assert next_of(second) == 301
    assert isinstance(reader, SupportsTriggerAvailableNow)
    reader.prepareForTriggerAvailableNow()
    bucket.put("later", b"")
    assert reader.latestOffset(second, limit) is second


def test_a_query_does_not_go_on_with_another_bucket_of_the_same_name(
    js: JetStream, bucket: KeyValue, options: dict[str, str]
) -> None:
    bucket.put("a", b"1")
    reader = kv_reading.stream_reader(options, kv_reading.SCHEMA)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    js.delete_kv(bucket.bucket)
    js.create_kv(KVConfig(bucket=bucket.bucket)).put("b", b"1")
    with pytest.raises(StreamRecreated, match="start with a new checkpoint"):
        changes(reader, start, end)
    with pytest.raises(StreamRecreated, match="start with a new checkpoint"):
        kv_reading.stream_reader(options, kv_reading.SCHEMA).latestOffset(start, ReadAllAvailable())


def test_changes_that_are_all_deletions_are_no_rows_where_those_are_left_out(
    bucket: KeyValue, options: dict[str, str]
) -> None:
    bucket.put("a", b"1")
    reader = kv_reading.stream_reader(
        options | {"includeDeletes": "false", "startingOffsets": "latest"}, kv_reading.SCHEMA
    )
    start = reader.initialOffset()
    bucket.delete("a")
    bucket.delete("b")
    end = kv_reading.stream_reader(options, kv_reading.SCHEMA).latestOffset(start, ReadAllAvailable())
    assert next_of(end) == 4
    assert changes(reader, start, end) == []


def test_a_query_of_other_keys_is_refused_and_one_of_another_bucket_too(
    js: JetStream, bucket: KeyValue, options: dict[str, str]
) -> None:
    bucket.put("a.1", b"1")
    bucket.put("b.1", b"1")
    some = kv_reading.stream_reader(options | {"keys": "a.*"}, kv_reading.SCHEMA)
    start = some.initialOffset()
    end = some.latestOffset(start, ReadAllAvailable())
    assert changes(some, start, end) == [("a.1", b"1", "put")]
    with pytest.raises(ConfigError, match=r"keys='b\.\*': the checkpoint is of keys='a\.\*'.*acceptFilterChange"):
        kv_reading.stream_reader(options | {"keys": "b.*"}, kv_reading.SCHEMA).latestOffset(end, ReadAllAvailable())
    # A batch that is run again is what it was.
    other = kv_reading.stream_reader(options | {"keys": "b.*", "acceptFilterChange": "true"}, kv_reading.SCHEMA)
    assert changes(other, start, end) == [("a.1", b"1", "put")]
    bucket.put("b.2", b"1")
    following = other.latestOffset(end, ReadAllAvailable())
    assert changes(other, end, following) == [("b.2", b"1", "put")]
    elsewhere = kv_reading.stream_reader(options | {"bucket": new_bucket(js).bucket, "keys": "a.*"}, kv_reading.SCHEMA)
    with pytest.raises(ConfigError, match=f"the checkpoint is of '{bucket.bucket}'; start with a new checkpoint"):
        elsewhere.latestOffset(start, ReadAllAvailable())


def test_changes_from_earliest_are_those_a_busy_bucket_still_has(bucket: KeyValue, options: dict[str, str]) -> None:
    for _ in range(3):
        bucket.put("a", b"1")
    reader = kv_reading.stream_reader(options, kv_reading.SCHEMA)
    start = reader.initialOffset()
    for _ in range(3):
        bucket.put("a", b"2")
    end = kv_reading.stream_reader(options, kv_reading.SCHEMA).latestOffset(start, ReadAllAvailable())
    for _ in range(3):
        bucket.put("a", b"3")
    assert changes(reader, start, end) == []
    following = kv_reading.stream_reader(options, kv_reading.SCHEMA).latestOffset(end, ReadAllAvailable())
    assert changes(reader, end, following) == [("a", b"3", "put")]


# ---- writing, task by task -------------------------------------------------------------------------------------------


def written(options: dict[str, str], columns: dict[str, Any], **more: str) -> kv_writing.BucketWritten:
    """A batch write of one task."""
    batch = pa.RecordBatch.from_pydict(columns)
    writer = kv_writing.BucketBatchWriter(read_options(kv_options.WriteOptions, "jetstream_kv", options | more))
    message = writer.write(iter([batch]))
    writer.commit([message])
    assert isinstance(message, kv_writing.BucketWritten)
    return message


def test_the_last_row_of_a_key_wins(bucket: KeyValue, options: dict[str, str]) -> None:
    columns = {"key": ["a", "b", "a"], "value": ["1", "2", "3"], "operation": [None, "put", "put"]}
    assert written(options, columns) == kv_writing.BucketWritten(3, 2, 0, 0, ())
    assert bucket.get("a").value == b"3"
    for size in ("1", "100"):
        columns = {"key": ["c", "c", "c"], "value": [b"1", b"3", b"2"], "sequence": [1, 3, 2]}
        written(options, columns, guard="sequence", batchSize=size)
        assert bucket.get("c").value == b"3"


def test_a_conflict_fails_the_write_or_is_counted(bucket: KeyValue, options: dict[str, str]) -> None:
    revision = bucket.put("a", b"1")
    bucket.put("b", b"1")
    columns = {"key": ["a", "b", "c"], "value": [b"2", b"2", b"2"], "revision": [revision, revision, 0]}
    with pytest.raises(Conflict) as raised:
        written(options, columns, guard="revision")
    assert raised.value.keys == ("b",)
    assert bucket.get("a").value == bucket.get("c").value == b"2"
    assert written(options, columns, guard="revision", onConflict="skip").conflicts == 3


# ---- with Spark ------------------------------------------------------------------------------------------------------


def table(spark: SparkSession, options: dict[str, str], **more: str) -> DataFrame:
    return spark.read.format("jetstream_kv").options(**options, **more).load()


@pytest.mark.slow
def test_a_frame_becomes_keys_that_every_client_reads_and_the_other_way_round(
    spark: SparkSession, server: NatsServer, bucket: KeyValue, options: dict[str, str]
) -> None:
    bucket.put("gone", b"1")
    frame = spark.createDataFrame(
        [("order.1", b"\x00\xff", "put"), ("order.2", b"two", None), ("gone", None, "delete")],
        "key string, value binary, operation string",
    )
    frame.write.format("jetstream_kv").options(**options).mode("append").save()
    assert bucket.get("order.1").value == b"\x00\xff"

    async def with_nats_py() -> tuple[bytes | None, int | None]:
        client = await nats.connect(server.url)
        theirs = await client.jetstream().key_value(bucket.bucket)
        entry = await theirs.get("order.2")
        with pytest.raises(nats.js.errors.KeyNotFoundError):
            await theirs.get("gone")
        await theirs.put("theirs", b"by nats-py")
        await theirs.delete("order.1")
        await client.close()
        return entry.value, entry.revision

    value, revision = asyncio.run(with_nats_py())
    assert value == b"two"
    found = {row["key"]: row for row in table(spark, options, includeDeletes="true").collect()}
    assert {key: row["operation"] for key, row in found.items()} == {
        "order.1": "delete",
        "order.2": "put",
        "gone": "delete",
        "theirs": "put",
    }
    assert found["order.2"]["revision"] == revision
    assert bytes(found["theirs"]["value"]) == b"by nats-py"
    age = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) - found["theirs"]["created"]
    assert age < datetime.timedelta(minutes=2)

    # What was read can be written elsewhere as it is, and compared with.
    back = table(spark, options).filter("key = 'order.2'")
    back.selectExpr("key", "'three' as value", "revision").write.format("jetstream_kv").options(
        **options, guard="revision"
    ).mode("append").save()
    assert bucket.get("order.2").value == b"three"
    assert table(spark, options, numPartitions="2").rdd.getNumPartitions() == 2
    assert spark.read.format("jetstream_kv").schema("key string").options(**options).load().count() == 2
    with pytest.raises(PySparkException, match=r"'order.2' in bucket .* changed since it was read"):
        spark.createDataFrame([("order.2", "four", revision)], "key string, value string, revision long").write.format(
            "jetstream_kv"
        ).options(**options, guard="revision").mode("append").save()
    with pytest.raises(PySparkException, match="did you mean 'includeDeletes'"):
        table(spark, options, includeDelete="true").collect()
    with pytest.raises(PySparkException, match="operation='delete' for the others"):
        frame.write.format("jetstream_kv").options(**options).mode("overwrite").save()


@pytest.mark.slow
def test_a_query_copies_changes_and_repeats_a_batch_without_a_trace(
    spark: SparkSession, js: JetStream, server: NatsServer, tmp_path: Path
) -> None:
    origin, copy = new_bucket(js, history=5), new_bucket(js, history=5)
    for number in range(30):
        origin.put(f"k.{number % 10}", b"%d" % number)
    origin.delete("k.0")
    checkpoint = tmp_path / "checkpoint"

    def run() -> list[dict[str, Any]]:
        changes = spark.readStream.format("jetstream_kv").options(
            servers=server.url, bucket=origin.bucket, maxOffsetsPerTrigger="12"
        )
        query = (
            changes.load()
            .selectExpr("key", "value", "operation", "revision as sequence")
            .writeStream.format("jetstream_kv")
            .options(servers=server.url, bucket=copy.bucket, guard="sequence", checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [dict(each) for each in query.recentProgress]

    def table_of(bucket: KeyValue) -> dict[str, bytes]:
        return {entry.key: entry.value for entry in bucket.snapshot([">"]).values()}

    progress = run()
    assert [each["numInputRows"] for each in progress if each["numInputRows"]] == [12, 12, 7]
    assert table_of(copy) == table_of(origin)
    state = js.stream(f"KV_{copy.bucket}").cached_info.state

    # As after a crash before the end of the last batch was noted: Spark runs it again.
    last = max(int(file.name) for file in (checkpoint / "commits").iterdir() if file.name.isdecimal())
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
    origin.put("k.1", b"after")
    run()
    assert table_of(copy) == table_of(origin)
    assert js.stream(f"KV_{copy.bucket}").cached_info.state.last_sequence == state.last_sequence + 1
    shutil.rmtree(checkpoint)
    run()  # everything anew, from the beginning: nothing of it is newer
    assert table_of(copy) == table_of(origin)
    assert js.stream(f"KV_{copy.bucket}").cached_info.state.last_sequence == state.last_sequence + 1


@pytest.mark.slow
def test_the_column_stream_created_is_not_introduced_into_a_bucket_without_it(
    spark: SparkSession, js: JetStream, server: NatsServer
) -> None:
    def write(bucket: KeyValue, *columns: str) -> None:
        spark.range(1).selectExpr("'a' as key", *columns).write.format("jetstream_kv").options(
            servers=server.url, bucket=bucket.bucket, guard="sequence"
        ).mode("append").save()

    old, new, created = new_bucket(js), new_bucket(js), "timestamp'2026-03-20 10:00:00' as stream_created"
    why = r"key='a': sequence \d+ says .*nothing tells which is newer.*fill a new bucket"
    write(old, "'newer' as value", "100L as sequence")
    with pytest.raises(Exception, match=why):
        write(old, "'old' as value", "50L as sequence", created)
    write(new, "'newer' as value", "100L as sequence", created)
    with pytest.raises(Exception, match=why):
        write(new, "'old' as value", "150L as sequence")
    write(new, "'old' as value", "50L as sequence", created)
    assert [bucket.get("a").value for bucket in (old, new)] == [b"newer", b"newer"]


@pytest.mark.slow
def test_results_of_a_query_replace_each_other(
    spark: SparkSession, js: JetStream, server: NatsServer, tmp_path: Path
) -> None:
    origin, counts, guarded = new_bucket(js, history=20), new_bucket(js), new_bucket(js)
    for number in range(12):
        origin.put(f"k.{number % 3}", b"")
    changes = spark.readStream.format("jetstream_kv").options(servers=server.url, bucket=origin.bucket).load()
    counted = changes.groupBy("key").count().selectExpr("key", "cast(count as string) as value")
    target = {"servers": server.url, "bucket": counts.bucket}
    query = (
        counted.writeStream.format("jetstream_kv")
        .options(**target, checkpointLocation=str(tmp_path / "complete"))
        .outputMode("complete")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert {key: value.value for key, value in counts.snapshot([">"]).items()} == dict.fromkeys(
        ("k.0", "k.1", "k.2"), b"4"
    )

    # Two writes of one batch are taken for one that was tried again: the batch is the same, and so are the rows.
    def twice(frame: DataFrame, _: int) -> None:
        for _ in range(2):
            frame.selectExpr("key", "'done' as value", "0L as revision").distinct().write.format(
                "jetstream_kv"
            ).options(servers=server.url, bucket=guarded.bucket, guard="revision").mode("append").save()

    query = (
        changes.writeStream.foreachBatch(twice)
        .option("checkpointLocation", str(tmp_path / "each"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert guarded.stream_info().state.last_sequence == 3
