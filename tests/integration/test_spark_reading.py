"""Reading ranges from a real server, as a task does it, and planning as a query does; without Spark around it."""

from __future__ import annotations

import datetime
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType
from support.names import new_name
from support.patience import PATIENCE_S

from jetspark import (
    ConfigError,
    ConnectionLost,
    ConsumerConfig,
    ConsumerNotFound,
    JetSparkError,
    KVConfig,
    NoServersAvailable,
    RequestTimeout,
    StreamConfig,
    StreamNotFound,
    UserPassword,
)
from jetspark.blocking import JetStream, Stream, connect
from jetspark.blocking.context import context_of
from jetspark.errors import DataLoss, PermissionDenied, StreamRecreated
from jetspark.server import NatsCluster, NatsServer, Permissions, User
from jetspark.spark import connections, queries, stream_follower
from jetspark.spark.kv import options as kv_options
from jetspark.spark.kv import reading as kv_reading
from jetspark.spark.kv.reading import ChangeReader
from jetspark.spark.offsets import Offset, StreamPosition
from jetspark.spark.options import read_options
from jetspark.spark.queries import Lag, lag
from jetspark.spark.schema import SCHEMA, Columns
from jetspark.spark.stream import heads, source
from jetspark.spark.stream.reading import RangeReader
from jetspark.spark.stream.source import BatchReader, StreamReader
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.state import scan
from jetspark.state.scan import Range, head_of

pytest_plugins = ["support.sparks"]


_count = 0


@pytest.fixture
def stream(js: JetStream) -> Stream:
    """With messages 1 to 100: the number as data, on three subjects in turn."""
    global _count
    _count += 1
    made = js.create_stream(StreamConfig(name=f"R{_count}", subjects=[f"r{_count}.>"], allow_batched=True))
    fill(js, made, 100)
    return made


def fill(js: JetStream, stream: Stream, count: int, data: bytes | None = None) -> None:
    prefix = stream.name.lower()
    with js.fast_batch() as batch:
        for number in range(1, count + 1):
            batch.add(f"{prefix}.{number % 3}", b"%d" % number if data is None else data)


def options(server: NatsServer, stream: str, **given: str) -> SourceOptions:
    return read_options(SourceOptions, "jetstream", {"servers": server.url, "stream": stream, **given})


def reader_of(server: NatsServer, stream: Stream, start: int, end: int, **given: str) -> RangeReader:
    read = options(server, stream.name, **given)
    created = head_of(stream.cached_info).created
    columns = Columns(SCHEMA, has_headers=True, created=created)
    return RangeReader(read, Range(stream.name, created, start, end, read.subjects), columns)


def sequences(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [sequence for batch in batches for sequence in batch.column("sequence").to_pylist()]


# ---- which rows ----------------------------------------------------------------------------------------------------


def test_a_range_has_its_start_and_not_its_end(server: NatsServer, stream: Stream) -> None:
    assert sequences(reader_of(server, stream, 10, 20).batches()) == list(range(10, 20))


def test_a_row_is_what_the_stream_has(server: NatsServer, js: JetStream, stream: Stream) -> None:
    js.publish(f"{stream.name.lower()}.x", b"payload", headers=[("A", "1"), ("A", "2"), ("Ü", "ä")][:2])
    [batch] = reader_of(server, stream, 101, 102, includeHeaders="true").batches()
    stored = stream.get_message(101)
    assert batch.to_pylist() == [
        {
            "subject": stored.subject,
            "data": b"payload",
            "headers": [("A", ["1", "2"])],
            "stream": stream.name,
            "sequence": 101,
            "timestamp": stored.timestamp,
            "stream_created": stream.info().created,
        }
    ]


def test_interior_deletes_are_no_loss(server: NatsServer, stream: Stream) -> None:
    for sequence in (2, 50, 99, 100):
        stream.delete_message(sequence)
    assert sequences(reader_of(server, stream, 1, 101).batches()) == [n for n in range(1, 99) if n not in (2, 50)]


def test_a_range_that_was_deleted_whole_has_no_rows(server: NatsServer, stream: Stream) -> None:
    for sequence in range(40, 50):
        stream.delete_message(sequence)
    assert sequences(reader_of(server, stream, 40, 50).batches()) == []


@pytest.mark.parametrize("filters", [["1"], ["1", "2"]])
def test_the_server_filters(server: NatsServer, stream: Stream, filters: list[str]) -> None:
    subjects = ",".join(f"{stream.name.lower()}.{each}" for each in filters)
    found = sequences(reader_of(server, stream, 1, 101, subjects=subjects).batches())
    assert found == [n for n in range(1, 101) if str(n % 3) in filters]


def test_a_filter_that_matches_nothing_has_no_rows_and_takes_no_time(
    server: NatsServer, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "SILENCE_S", 60.0)
    started = time.monotonic()
    assert sequences(reader_of(server, stream, 1, 101, subjects=f"{stream.name.lower()}.none").batches()) == []
    assert time.monotonic() - started < scan.SILENCE_S


def test_a_filter_the_stream_does_not_store_has_no_rows(server: NatsServer, stream: Stream) -> None:
    assert sequences(reader_of(server, stream, 1, 101, subjects="elsewhere.>").batches()) == []


@pytest.mark.parametrize(
    ("moment", "rows_from", "rows_up_to"),
    [
        ("0001-01-01", 100, 0),
        ("1500-01-01", 100, 0),
        ("1677-09-21", 100, 0),
        ("1969-12-31T23:59:59.999Z", 100, 0),
        ("-62135596800000", 100, 0),
        ("1970-01-01", 100, 0),
        ("2262-04-11", 0, 100),
        ("2262-04-12", 0, 100),
        ("2500-01-01", 0, 100),
        ("9999-12-31T23:59:59.999999", 0, 100),
        ("253402300799999", 0, 100),
    ],
)
def test_a_time_that_the_servers_clock_does_not_have_is_before_or_after_every_message(
    server: NatsServer, stream: Stream, moment: str, rows_from: int, rows_up_to: int
) -> None:
    def count(**given: str) -> int:
        reader = BatchReader(options(server, stream.name, **given), SCHEMA)
        return sum(len(sequences(reader.read(part))) for part in reader.partitions())

    assert (count(startingTimestamp=moment), count(endingTimestamp=moment)) == (rows_from, rows_up_to)


def test_messages_published_meanwhile_are_not_in_the_range(server: NatsServer, js: JetStream, stream: Stream) -> None:
    is_over = threading.Event()

    def publish() -> None:
        while not is_over.is_set():
            fill(js, stream, 50)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(5):
            assert sequences(reader_of(server, stream, 1, 101).batches()) == list(range(1, 101))
    finally:
        is_over.set()
        publisher.join()


def test_batches_are_bounded_by_rows_and_by_bytes(
    server: NatsServer, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 7)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 20)
    sizes = [batch.num_rows for batch in reader_of(server, stream, 1, 101).batches()]
    assert sum(sizes) == 100
    assert max(sizes) < 20 + 2 * 7
    monkeypatch.setattr(scan, "PIECE_BYTES", 1)
    assert all(batch.num_rows <= 2 * 7 for batch in reader_of(server, stream, 1, 101).batches())


@pytest.mark.parametrize(
    ("names", "size", "is_left_out"),
    [
        (["sequence", "subject"], 4096, True),
        (["sequence", "data"], 4096, False),
        (["sequence", "headers"], 4096, False),
        (["sequence", "subject"], 64, False),
    ],
)
def test_data_that_nobody_wants_is_not_sent(
    server: NatsServer,
    js: JetStream,
    stream: Stream,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    size: int,
    is_left_out: bool,
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 5)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 5)
    fill(js, stream, 100, data=b"x" * size)
    read = options(server, stream.name)
    part = Range(stream.name, head_of(stream.cached_info).created, 1, 201)
    columns = Columns(StructType([SCHEMA[name] for name in names]), has_headers=True, created="")
    batches = RangeReader(read, part, columns).batches()
    first = next(batches)
    [consumer] = stream.consumers()
    assert bool(consumer.config.headers_only) == is_left_out
    whole = reader_of(server, stream, 1, 201, includeHeaders="true").batches()
    expected = [row for batch in whole for row in batch.select(names).to_pylist()]
    assert [row for batch in (first, *batches) for row in batch.to_pylist()] == expected


# ---- what is gone --------------------------------------------------------------------------------------------------


def test_a_start_below_the_first_sequence_is_data_loss(server: NatsServer, stream: Stream) -> None:
    stream.purge(up_to_sequence=30)
    with pytest.raises(DataLoss, match=r"sequence 10 is needed and the first stored one is 31.*failOnDataLoss=false"):
        sequences(reader_of(server, stream, 10, 50).batches())


def test_data_loss_that_is_allowed_is_counted_and_logged_once(
    server: NatsServer, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    stream.purge(up_to_sequence=30)
    reader = reader_of(server, stream, 10, 50, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "jetspark.state"):
        assert sequences(reader.batches()) == list(range(31, 50))
    assert reader.lost_sequences == 21
    assert [record.getMessage() for record in caplog.records if record.name == "jetspark.state"] == [
        f"stream {stream.name}: 21 sequences from 10 on are gone, the first there is is 31; data loss is allowed"
    ]


def test_a_range_that_is_gone_whole_is_data_loss(server: NatsServer, stream: Stream) -> None:
    stream.purge()
    with pytest.raises(DataLoss):
        sequences(reader_of(server, stream, 10, 50).batches())
    assert sequences(reader_of(server, stream, 10, 50, failOnDataLoss="false").batches()) == []


@pytest.mark.parametrize("subjects", ["", "filtered"])
def test_a_purge_while_reading_is_data_loss(
    server: NatsServer, stream: Stream, monkeypatch: pytest.MonkeyPatch, subjects: str
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 5)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 5)
    given = {"subjects": f"{stream.name.lower()}.>"} if subjects else {}
    batches = reader_of(server, stream, 1, 101, **given).batches()
    rows = sequences(iter([next(batches)]))
    stream.purge(up_to_sequence=90)
    with pytest.raises(DataLoss) as caught:
        rows.extend(sequence for batch in batches for sequence in batch.column("sequence").to_pylist())
    assert caught.value.wanted == rows[-1] + 1
    assert caught.value.first == 91


def test_eviction_behind_the_reader_is_no_loss(
    server: NatsServer, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 5)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 20)
    batches = reader_of(server, stream, 1, 101).batches()
    rows = sequences(iter([next(batches)]))
    stream.purge(up_to_sequence=len(rows))
    assert rows + sequences(batches) == list(range(1, 101))


# ---- `earliest` is what is there when it is read -------------------------------------------------------------------


@pytest.fixture
def full(js: JetStream) -> Stream:
    """A stream at its limit: it has 100 messages, and each new one evicts the oldest."""
    global _count
    _count += 1
    made = js.create_stream(
        StreamConfig(name=f"R{_count}", subjects=[f"r{_count}.>"], allow_batched=True, max_messages=100)
    )
    fill(js, made, 150)
    return made


def read_all(reader: BatchReader | StreamReader, partitions: Sequence[InputPartition]) -> list[int]:
    return [sequence for part in partitions for sequence in sequences(reader.read(part))]


@pytest.mark.parametrize("given", [{}, {"startingOffsets": "earliest"}, {"minPartitions": "4"}])
@pytest.mark.parametrize("evicted", [1, 30, 70])
def test_a_batch_from_earliest_has_what_a_full_stream_still_has(
    server: NatsServer, js: JetStream, full: Stream, given: dict[str, str], evicted: int
) -> None:
    reader = BatchReader(options(server, full.name, **given), SCHEMA)
    partitions = reader.partitions()
    fill(js, full, evicted)
    assert read_all(reader, partitions) == list(range(51 + evicted, 151))


def test_a_batch_from_earliest_of_which_nothing_is_left_has_no_rows(
    server: NatsServer, js: JetStream, full: Stream
) -> None:
    reader = BatchReader(options(server, full.name), SCHEMA)
    partitions = reader.partitions()
    fill(js, full, 500)
    assert read_all(reader, partitions) == []


def test_a_filtered_batch_from_earliest_of_a_stream_that_evicts_while_it_is_read_has_no_loss(
    server: NatsServer, js: JetStream, full: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 5)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 5)
    reader = BatchReader(options(server, full.name, subjects=f"{full.name.lower()}.1"), SCHEMA)
    [part] = reader.partitions()
    found: list[int] = []
    for batch in reader.read(part):
        fill(js, full, 0 if found else 40)
        found += batch.column("sequence").to_pylist()
    assert found[-1] == 148
    assert all(n % 3 == 1 for n in found)


@pytest.mark.parametrize("start", ["startingOffsets", "startingTimestamp"])
def test_a_start_that_was_asked_for_by_its_place_or_time_can_be_lost(
    server: NatsServer, js: JetStream, full: Stream, start: str
) -> None:
    value = "51" if start == "startingOffsets" else full.get_message(52).timestamp.isoformat()
    reader = BatchReader(options(server, full.name, **{start: value}), SCHEMA)
    partitions = reader.partitions()
    fill(js, full, 30)
    with pytest.raises(DataLoss, match="the first stored one is 81"):
        read_all(reader, partitions)


def test_a_query_from_earliest_begins_with_what_a_full_stream_still_has_and_keeps_its_place_from_then_on(
    server: NatsServer, js: JetStream, full: Stream
) -> None:
    def reader() -> StreamReader:
        return StreamReader(options(server, full.name, startingOffsets="earliest"), SCHEMA)

    start = reader().initialOffset()
    fill(js, full, 10)
    end = reader().latestOffset(start, ReadMaxRows(50))
    fill(js, full, 10)
    assert read_all(reader(), reader().partitions(start, end)) == list(range(71, 111))
    # The batch that failed, run again, in another process; by then its options may be others.
    again = StreamReader(options(server, full.name), SCHEMA)
    assert read_all(again, again.partitions(start, json.loads(json.dumps(end)))) == list(range(71, 111))
    following = reader().latestOffset(end, ReadAllAvailable())
    fill(js, full, 60)
    with pytest.raises(DataLoss, match="sequence 111 is needed and the first stored one is 131"):
        read_all(reader(), reader().partitions(end, following))
    with pytest.raises(DataLoss):
        reader().latestOffset(end, ReadAllAvailable())


def test_an_empty_stream_read_from_earliest_stays_at_its_beginning_until_something_was_read(
    server: NatsServer, js: JetStream, full: Stream
) -> None:
    full.purge()
    reader = StreamReader(options(server, full.name, startingOffsets="earliest"), SCHEMA)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) is start
    fill(js, full, 300)
    end = StreamReader(options(server, full.name), SCHEMA).latestOffset(start, ReadAllAvailable())
    assert read_all(reader, reader.partitions(start, end)) == list(range(351, 451))


def test_a_recreated_stream_is_not_read(server: NatsServer, js: JetStream, stream: Stream) -> None:
    reader = reader_of(server, stream, 1, 50)
    js.delete_stream(stream.name)
    fill(js, js.create_stream(stream.cached_info.config), 100)
    with pytest.raises(StreamRecreated, match="new checkpoint"):
        sequences(reader.batches())


def test_a_deleted_stream_is_an_error(server: NatsServer, js: JetStream, stream: Stream) -> None:
    js.delete_stream(stream.name)
    with pytest.raises(StreamNotFound):
        sequences(reader_of(server, stream, 1, 50).batches())


# ---- consumers -----------------------------------------------------------------------------------------------------


def test_no_consumer_is_left_behind(server: NatsServer, stream: Stream) -> None:
    sequences(reader_of(server, stream, 1, 101).batches())
    assert list(stream.consumer_names()) == []


def test_a_reader_that_is_left_early_leaves_no_consumer(
    server: NatsServer, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 5)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 5)
    batches = reader_of(server, stream, 1, 101).batches()
    next(batches)
    [consumer] = stream.consumers()
    assert consumer.config.inactive_threshold_s == scan.EPHEMERAL_S  # all that is left to a task that is killed
    batches.close()  # type: ignore[attr-defined]
    assert list(stream.consumer_names()) == []


def test_a_consumer_that_is_deleted_meanwhile_is_replaced(
    server: NatsServer, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 5)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 5)
    found: list[int] = []
    for batch in reader_of(server, stream, 1, 101).batches():
        found += batch.column("sequence").to_pylist()
        if len(found) < 50:
            for name in stream.consumer_names():
                try:
                    stream.delete_consumer(name)
                except ConsumerNotFound:
                    pass
    assert found == list(range(1, 101))


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_a_stream_that_is_consumed_is_read_without_changing_it(
    server: NatsServer, js: JetStream, retention: Literal["interest", "workqueue"]
) -> None:
    name = retention.upper()
    stream = js.create_stream(
        StreamConfig(name=name, subjects=[f"{retention}.>"], retention=retention, allow_direct=True, allow_batched=True)
    )
    if retention == "interest":
        stream.create_consumer(ConsumerConfig(durable_name="keeper"))
    fill(js, stream, 100)
    assert sequences(reader_of(server, stream, 5, 95).batches()) == list(range(5, 95))
    subjects = f"{retention}.1,{retention}.2"
    found = sequences(reader_of(server, stream, 1, 101, subjects=subjects, includeHeaders="true").batches())
    assert found == [n for n in range(1, 101) if n % 3]
    assert stream.info().state.messages == 100
    stream.update(allow_direct=False)
    with pytest.raises(ConfigError, match="set allow_direct"):
        sequences(reader_of(server, stream, 1, 10).batches())


# ---- the network ---------------------------------------------------------------------------------------------------


def test_a_restart_of_the_server_while_reading_loses_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 500)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 500)
    with NatsServer(store_dir=tmp_path) as own:
        with connect(own.url) as client:
            js = client.jetstream()
            stream = js.create_stream(StreamConfig(name="S", subjects=["s.>"], allow_batched=True))
            fill(js, stream, 20_000)
        found: list[int] = []
        for batch in reader_of(own, stream, 1, 20_001).batches():
            found += batch.column("sequence").to_pylist()
            if len(found) in range(3_000, 4_000) or len(found) in range(12_000, 13_000):
                own.kill()
                own.start()
        assert found == list(range(1, 20_001))


def test_a_server_that_stays_away_ends_the_task_in_time(tmp_path: Path) -> None:
    with NatsServer(store_dir=tmp_path) as own:
        with connect(own.url) as client:
            js = client.jetstream()
            stream = js.create_stream(StreamConfig(name="S", subjects=["s.>"], allow_batched=True))
            fill(js, stream, 10)
        reader = reader_of(own, stream, 1, 11, fetchTimeoutMs="500", requestTimeoutMs="300")
        connections.client_for(options(own, "S"))
        own.kill()
        started = time.monotonic()
        with pytest.raises(RequestTimeout, match="sequence 1 or one after it in stream 'S'"):
            sequences(reader.batches())
        assert time.monotonic() - started < 30


@pytest.mark.slow
def test_a_change_of_leaders_while_reading_loses_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 200)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 1_000)
    with NatsCluster(3) as cluster, connect(cluster.urls) as client:
        js = client.jetstream(timeout=5)
        stream = js.create_stream(StreamConfig(name="S", subjects=["s.>"], replicas=3, allow_batched=True))
        fill(js, stream, 20_000)
        read = read_options(SourceOptions, "jetstream", {"servers": ",".join(cluster.urls), "stream": "S"})
        part = Range("S", head_of(stream.cached_info).created, 1, 20_001)
        found: list[int] = []
        leaders = set()
        for count, batch in enumerate(
            RangeReader(read, part, Columns(SCHEMA, has_headers=False, created="")).batches()
        ):
            found += batch.column("sequence").to_pylist()
            leaders.add(_leader(stream))
            if count % 5 == 2:
                stream.step_down()
            if count == 10:
                # The consumer has one replica, and dies with its node.
                [consumer] = stream.consumers()
                assert consumer.cluster is not None
                [node] = [each for each in cluster.nodes if each.config.server_name == consumer.cluster.leader]
                node.kill()
                node.start()
        assert found == list(range(1, 20_001))
        assert len(leaders) > 1


def _leader(stream: Stream) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            cluster = stream.info().cluster
        except JetSparkError:
            cluster = None
        if cluster is not None and cluster.leader:
            return cluster.leader
        time.sleep(0.05)
    raise AssertionError("no leader")


# ---- memory --------------------------------------------------------------------------------------------------------

_MEMORY = """
import resource, sys
from jetspark.spark.options import read_options
from jetspark.spark.stream.reading import RangeReader
from jetspark.spark.schema import SCHEMA, Columns
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.state.scan import Range

url, created, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
read = read_options(SourceOptions, "jetstream", {"servers": url, "stream": "BIG"})
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
rows = 0
columns = Columns(SCHEMA, has_headers=False, created=created)
for batch in RangeReader(read, Range("BIG", created, 1, count + 1), columns).batches():
    rows += batch.num_rows
    size = batch.nbytes
assert rows == count, rows
print(peak() - before)
"""


@pytest.mark.skipif(not hasattr(resource, "getrusage"), reason="no getrusage")
@pytest.mark.parametrize(
    ("count", "size", "bound_mib"),
    [(192, 1 << 20, 100), (6, 20 << 20, 200)],
    ids=["192 of 1 MiB", "6 of 20 MiB, each larger than a request"],
)
def test_large_messages_are_read_in_bounded_memory(count: int, size: int, bound_mib: int, tmp_path: Path) -> None:
    with NatsServer(max_payload_bytes=32 << 20, max_pending_bytes=128 << 20) as own:
        with connect(own.url) as client:
            js = client.jetstream()
            stream = js.create_stream(StreamConfig(name="BIG", subjects=["big"]))
            data = os.urandom(size)
            for _ in range(count):
                js.publish("big", data)
        script = tmp_path / "memory.py"
        script.write_text(_MEMORY)
        done = subprocess.run(
            [sys.executable, str(script), own.url, head_of(stream.cached_info).created, str(count)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < bound_mib


# ---- streams with few messages and many sequences ------------------------------------------------------------------


def sparse(js: JetStream, sequences: int, messages: int, *, clustered: bool = False) -> Stream:
    """A compacted stream: messages that stay, and between them one that was replaced again and again."""
    global _count
    _count += 1
    name = f"r{_count}"
    config = StreamConfig(name=name.upper(), subjects=[f"{name}.>"], allow_batched=True, max_messages_per_subject=1)
    made = js.create_stream(config)
    every = 1 if clustered else sequences // messages
    kept = range(0, messages * every, every)
    with js.fast_batch() as batch:
        batch.add_many(
            (f"{name}.{number}" if number in kept else f"{name}.replaced", b"%d" % number)
            for number in range(sequences)
        )
    state = made.info().state
    assert (state.messages, state.last_sequence) == (messages + 1, sequences)
    return made


@pytest.mark.parametrize("clustered", [False, True], ids=["all over", "at the front"])
def test_tasks_grow_with_messages_and_not_with_sequences(server: NatsServer, js: JetStream, clustered: bool) -> None:
    for sequences in (1_000, 10_000, 100_000):
        stream = sparse(js, sequences, 300, clustered=clustered)
        for limit, most in (("100", 8), ("1000", 1)):
            reader = BatchReader(options(server, stream.name, maxRecordsPerPartition=limit), SCHEMA)
            before = js.account_info().api["total"]
            parts = reader.partitions()
            asked = js.account_info().api["total"] - before
            found = [read_all(reader, [part]) for part in parts]
            assert sum(map(len, found)) == 301
            assert len(parts) <= most, [len(each) for each in found]
            assert max(map(len, found)) <= int(limit)
            assert asked <= 80


@pytest.mark.parametrize("clustered", [False, True], ids=["all over", "at the front"])
def test_micro_batches_grow_with_messages_and_not_with_sequences(
    server: NatsServer, js: JetStream, clustered: bool
) -> None:
    for sequences in (1_000, 10_000, 100_000):
        stream = sparse(js, sequences, 300, clustered=clustered)
        reader = StreamReader(options(server, stream.name, startingOffsets="earliest"), SCHEMA)
        offset, found, batches = reader.initialOffset(), [], 0
        before = js.account_info().api["total"]
        while (end := reader.latestOffset(offset, ReadMaxRows(100))) is not offset:
            rows = read_all(reader, reader.partitions(offset, end))
            assert len(rows) <= 100
            found += rows
            offset, batches = end, batches + 1
        asked = js.account_info().api["total"] - before
        assert len(set(found)) == len(found) == 301
        assert batches <= 8
        assert asked <= batches * 60


@pytest.mark.parametrize("kind", ["stream", "bucket"])
def test_a_server_that_is_away_while_messages_are_counted_ends_no_query_and_no_query_early(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends where it began is taken for nothing new; a query that reads what is there now would be over."""
    monkeypatch.setattr(stream_follower, "PATIENCE_S", 0.2)
    monkeypatch.setattr(stream_follower, "START_PATIENCE_S", 0.4)

    def reader(own: NatsServer, name: str) -> StreamReader | ChangeReader:
        if kind == "stream":
            return StreamReader(options(own, name, startingOffsets="earliest", requestTimeoutMs="500"), SCHEMA)
        given = {"servers": own.url, "bucket": name.removeprefix("KV_"), "requestTimeoutMs": "500"}
        return ChangeReader(read_options(kv_options.StreamOptions, "jetstream_kv", given), kv_reading.SCHEMA)

    with NatsServer(store_dir=tmp_path) as own:
        with connect(own.url) as client:
            js = client.jetstream()
            if kind == "stream":
                name = sparse(js, 10_000, 100).name
            else:
                name = f"KV_{js.create_kv(KVConfig(bucket='away', history=1)).bucket}"
                with js.fast_batch() as batch:
                    batch.add_many((f"$KV.away.{n if n % 100 == 0 else 'x'}", b"") for n in range(10_000))
        following_one, ending_one = reader(own, name), reader(own, name)
        start = following_one.initialOffset()
        following_one.latestOffset(start, ReadMaxRows(20))
        ending_one.prepareForTriggerAvailableNow()
        own.kill()
        # Both know how far the stream is, and ask how many messages are where.
        assert following_one.latestOffset(start, ReadMaxRows(20)) is start
        with pytest.raises((RequestTimeout, NoServersAvailable, ConnectionLost)):
            ending_one.latestOffset(start, ReadMaxRows(20))
        own.start()
        monkeypatch.undo()
        end = ending_one.latestOffset(start, ReadMaxRows(20))
        assert end["streams"][name]["next"] > 1_000
        connections._kept.popitem()[1].close()


def test_micro_batches_of_a_bucket_grow_with_its_values_and_not_with_its_revisions(
    server: NatsServer, js: JetStream
) -> None:
    for revisions in (300, 3_000, 30_000):
        bucket = js.create_kv(KVConfig(bucket=f"sparse{revisions}", history=1))
        every = revisions // 100
        subject = f"$KV.{bucket.bucket}"
        with js.fast_batch() as batch:
            batch.add_many(
                (f"{subject}.{number if number % every == 0 else 'replaced'}", b"") for number in range(revisions)
            )
        given = {"servers": server.url, "bucket": bucket.bucket, "startingOffsets": "earliest"}
        reader = ChangeReader(read_options(kv_options.StreamOptions, "jetstream_kv", given), kv_reading.SCHEMA)
        offset, rows, batches = reader.initialOffset(), 0, 0
        while (end := reader.latestOffset(offset, ReadMaxRows(20))) is not offset:
            found = [each for part in reader.partitions(offset, end) for each in reader.read(part)]
            rows, batches = rows + sum(each.num_rows for each in found), batches + 1
            assert sum(each.num_rows for each in found) <= 20
            offset = end
        assert rows == 101
        assert batches <= 14


# ---- errors that never pass ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("subjects", ["", "r.a", "r.a,r.b"])
def test_who_may_not_make_consumers_is_told_when_the_read_is_planned(subjects: str) -> None:
    allowed = Permissions(publish_allow=["$JS.API.STREAM.INFO.>"], subscribe_allow=["_INBOX.>"])
    with (
        NatsServer(
            users=[User(user="admin", password="a"), User(user="reader", password="r", permissions=allowed)]
        ) as own,
        connect(own.url, auth=UserPassword("admin", "a")) as admin,
    ):
        admin.jetstream().create_stream(StreamConfig(name="R", subjects=["r.>"]))
        admin.jetstream().publish("r.a", b"x")
        given = {"user": "reader", "password": "r", "startingOffsets": "earliest"}
        if subjects:
            given["subjects"] = subjects
        for make in (
            lambda read: BatchReader(read, SCHEMA).partitions(),
            lambda read: StreamReader(read, SCHEMA).initialOffset(),
        ):
            with pytest.raises(PermissionDenied, match=r"CONSUMER\.CREATE"):
                make(options(own, "R", **given))
        connections._kept.popitem()[1].close()


def test_a_stream_that_tasks_could_not_read_is_refused_when_the_read_is_planned(
    server: NatsServer, js: JetStream
) -> None:
    made = js.create_stream(StreamConfig(name=new_name("QUEUE"), subjects=[new_name("q")], retention="workqueue"))
    for make in (
        lambda read: BatchReader(read, SCHEMA).partitions(),
        lambda read: StreamReader(read, SCHEMA).initialOffset(),
    ):
        with pytest.raises(ConfigError, match="set allow_direct on the stream"):
            make(options(server, made.name))


@pytest.mark.parametrize("trigger", ["processingTime", "availableNow"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("stream", StreamNotFound),
        ("stream", StreamRecreated),
        ("stream", DataLoss),
        ("bucket", StreamNotFound),
        ("bucket", StreamRecreated),
    ],
)
def test_a_batch_that_is_repeated_fails_before_its_tasks_where_they_could_not_succeed(
    kind: str, reason: type[JetSparkError], trigger: str, alone: tuple[NatsServer, JetStream]
) -> None:
    """After a restart of the query, Spark plans the last batch of its checkpoint before it asks for an offset."""
    own_server, js = alone
    what = followed(kind, own_server, js)
    what.feed(20)
    reader = what.new_reader()
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(10))
    end = reader.latestOffset(start, ReadAllAvailable())
    [stream] = [js.stream(name) for name in js.stream_names()]
    assert what.read(start, end) == 10
    if reason is DataLoss:
        stream.purge(up_to_sequence=15)
    else:
        stream.delete()
    if reason is StreamRecreated:
        what = followed(kind, own_server, js)
        what.feed(20)

    def repeat(reader: StreamReader | ChangeReader) -> None:
        if trigger == "availableNow":
            reader.prepareForTriggerAvailableNow()
        reader.partitions(start, end)

    with pytest.raises(reason):
        repeat(what.new_reader())


def test_an_error_of_a_task_that_never_passes_has_a_short_trace(
    server: NatsServer, js: JetStream, stream: Stream
) -> None:
    reader = BatchReader(options(server, stream.name), SCHEMA)
    [part] = reader.partitions()
    js.delete_stream(stream.name)
    with pytest.raises(JetSparkError) as caught:
        list(reader.read(part))
    shown = "".join(traceback.format_exception(caught.value))
    assert len(shown.splitlines()) <= 12
    assert "During handling" not in shown


# ---- planning ------------------------------------------------------------------------------------------------------


def test_a_time_is_found_as_a_sequence(server: NatsServer, stream: Stream) -> None:
    moment = stream.get_message(42).timestamp

    def start_of(**given: str) -> int:
        offset = StreamReader(options(server, stream.name, **given), SCHEMA).initialOffset()
        found: int = offset["streams"][stream.name]["next"]
        return found

    assert start_of(startingTimestamp=moment.isoformat()) <= 42
    assert start_of(startingTimestamp=(moment + datetime.timedelta(microseconds=1)).isoformat()) >= 43
    assert start_of(startingTimestamp="0") == 1
    assert start_of() == 101
    assert start_of(startingOffsets="earliest") == 1


def test_a_query_that_would_start_in_the_future_is_refused_and_one_that_starts_now_reads_what_comes(
    server: NatsServer, js: JetStream, stream: Stream
) -> None:
    """From the end of the stream it would read what is stored before the time that was asked for."""
    now = datetime.datetime.now(datetime.UTC)
    for moment in (now + datetime.timedelta(seconds=30), datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)):
        reader = StreamReader(options(server, stream.name, startingTimestamp=moment.isoformat()), SCHEMA)
        with pytest.raises(ConfigError, match=r"startingTimestamp=\S+ is in the future: .*latest"):
            reader.initialOffset()
    reader = StreamReader(options(server, stream.name, startingTimestamp=now.isoformat()), SCHEMA)
    start = reader.initialOffset()
    fill(js, stream, 2)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert read_all(reader, reader.partitions(start, end)) == [101, 102]


def shift_clock(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """Let the driver's side of a query believe in another time."""

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(hours=hours)

    for module in (heads, queries):
        monkeypatch.setattr(module, "datetime", SimpleNamespace(datetime=Shifted, UTC=datetime.UTC))


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_servers_clock_decides_whether_a_start_is_in_the_future(
    server: NatsServer, stream: Stream, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    shift_clock(monkeypatch, hours)
    future = (now + datetime.timedelta(minutes=30)).isoformat()
    with pytest.raises(ConfigError, match="is in the future"):
        StreamReader(options(server, stream.name, startingTimestamp=future), SCHEMA).initialOffset()
    start = StreamReader(options(server, stream.name, startingTimestamp=now.isoformat()), SCHEMA).initialOffset()
    assert next_of(start, stream) == 101


def test_an_idle_query_leaves_the_server_in_peace(server: NatsServer, js: JetStream, stream: Stream) -> None:
    reader = StreamReader(options(server, stream.name), SCHEMA)
    start = reader.initialOffset()
    reader.latestOffset(start, ReadAllAvailable())
    before = js.account_info().api["total"]
    started = time.monotonic()
    for _ in range(10):
        assert reader.latestOffset(start, ReadAllAvailable()) is start
    elapsed = time.monotonic() - started
    assert js.account_info().api["total"] - before <= elapsed / 0.1 + 3


@dataclass
class Idle:
    """The reader of a query without news, and the requests that the server had since :meth:`begin`."""

    js: JetStream
    reader: StreamReader
    start: dict[str, Any]
    looks: int = 0

    @classmethod
    def begin(cls, js: JetStream, given: SourceOptions) -> Idle:
        reader = StreamReader(given, SCHEMA)
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadAllAvailable()) is start
        return cls(js, reader, start)

    def check_requests(self, calls: int) -> None:
        """Call the reader as Spark does, and compare the requests with ten a second and one look."""
        before, started = self.js.account_info().api["total"], time.monotonic()
        for _ in range(calls):
            assert self.reader.latestOffset(self.start, ReadAllAvailable()) is self.start
        asked = self.js.account_info().api["total"] - before
        look_s = self.reader._poll_s
        assert asked <= 10 * (time.monotonic() - started + look_s) + 3

    def news(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while (end := self.reader.latestOffset(self.start, ReadAllAvailable())) is self.start:
            assert time.monotonic() < deadline
        found: dict[str, Any] = end["streams"]
        return found


@pytest.fixture
def alone() -> Iterator[tuple[NatsServer, JetStream]]:
    """A server without other streams: all of the account's are listed."""
    with NatsServer() as own_server, connect(own_server.url) as client:
        yield own_server, client.jetstream()
        while connections._kept:
            connections._kept.popitem()[1].close()


def idle_streams(js: JetStream, count: int) -> list[str]:
    for number in range(count):
        js.create_stream(StreamConfig(name=f"IDLE_{number}", subjects=[f"idle.{number}"], storage="memory"))
    return [f"IDLE_{number}" for number in range(count)]


@pytest.mark.parametrize("count", [3, 30, 300])
def test_an_idle_query_over_a_pattern_asks_as_seldom_however_many_streams_there_are(
    alone: tuple[NatsServer, JetStream], count: int
) -> None:
    """Requests a second do not grow with the streams: a page of the list has 256 of them."""
    own_server, js = alone
    idle_streams(js, count)
    idle = Idle.begin(js, pattern(own_server, "IDLE_.*"))
    idle.check_requests(5)
    # A new message and a new stream are found all the same.
    js.publish("idle.1", b"x")
    js.create_stream(StreamConfig(name="IDLE_NEW", subjects=["idle.new"], storage="memory"))
    js.publish("idle.new", b"x")
    end = idle.news()
    assert (end["IDLE_1"]["next"], end["IDLE_NEW"]["next"]) == (2, 2)


@pytest.mark.parametrize("count", [3, 30, 300])
def test_an_idle_query_of_named_streams_asks_as_seldom_however_many_there_are(
    alone: tuple[NatsServer, JetStream], count: int
) -> None:
    own_server, js = alone
    names = idle_streams(js, count)
    js.create_stream(StreamConfig(name="OTHER", subjects=["other"], storage="memory"))
    idle = Idle.begin(js, options(own_server, ",".join(names)))
    idle.check_requests(5)
    js.publish("idle.1", b"x")
    end = idle.news()
    assert end["IDLE_1"]["next"] == 2
    assert end.keys() == set(names)
    js.delete_stream(names[0])
    with pytest.raises(StreamNotFound, match=names[0]):
        Idle(js, idle.reader, {**idle.start, "streams": end}).news()


@pytest.mark.parametrize("reason", ["no right to list", "a large account"])
def test_named_streams_that_a_list_does_not_serve_are_asked_about_less_often(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = ["$JS.API.STREAM.INFO.>", "$JS.API.CONSUMER.>"]
    if reason == "a large account":
        allowed.append("$JS.API.STREAM.LIST")
        monkeypatch.setattr(heads, "LIST_PAGE", 1)  # as if each stream took a page
    reading = Permissions(publish_allow=allowed, subscribe_allow=["_INBOX.>"])
    users = [User(user="admin", password="a"), User(user="reader", password="r", permissions=reading)]
    with NatsServer(users=users) as own, connect(own.url, auth=UserPassword("admin", "a")) as admin:
        names = idle_streams(admin.jetstream(), 20)
        js = admin.jetstream()
        js.create_stream(StreamConfig(name="OTHER", subjects=["other"], storage="memory"))
        given = options(own, ",".join(names), user="reader", password="r")
        idle = Idle.begin(js, given)
        idle.check_requests(3)
        js.publish("idle.19", b"x")
        assert idle.news()["IDLE_19"]["next"] == 2
        connections._kept.popitem()[1].close()


def test_a_call_of_sparks_is_short_however_seldom_the_server_is_asked(
    server: NatsServer, js: JetStream, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark cannot stop a query during a call."""
    idle = Idle.begin(js, options(server, stream.name))
    monkeypatch.setattr(idle.reader, "_poll_s", 3600.0)
    assert idle.reader.latestOffset(idle.start, ReadAllAvailable()) is idle.start


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "left out of the list"])
def test_a_stream_that_a_list_leaves_out_is_asked_about_before_it_counts_as_gone(
    server: NatsServer, js: JetStream, stream: Stream, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster the list lacks the streams whose leaders did not answer in time."""
    first, second = (other_stream(js, 5, f"{stream.name}_{letter}") for letter in "AB")
    reader = StreamReader(pattern(server, f"{stream.name}_."), SCHEMA)
    start = reader.initialOffset()
    pages = JetStream.streams
    if not listed:
        monkeypatch.setattr(
            JetStream, "streams", lambda self: (each for each in pages(self) if each.config.name != second.name)
        )
    fill(js, second, 5)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert {name: each["next"] for name, each in end["streams"].items()} == {first.name: 6, second.name: 11}
    js.delete_stream(second.name)
    time.sleep(stream_follower.POLL_S)
    with pytest.raises(ConfigError, match=rf"the checkpoint also has '{second.name}', which is deleted"):
        reader.latestOffset(end, ReadAllAvailable())


@pytest.mark.parametrize(
    ("kind", "most"),
    # The driver asks once. A task asks about the stream, makes a consumer, pulls, deletes the consumer. Where sequences
    # are missing it asks whether they were evicted, and the leader whether the end is one.
    [("whole", 1 + 4 + 4), ("filtered", 1 + 5 + 6), ("bucket", 1 + 4 + 4)],
)
def test_a_micro_batch_of_two_tasks_has_few_requests(server: NatsServer, js: JetStream, kind: str, most: int) -> None:
    if kind == "bucket":
        js.create_kv(KVConfig(bucket="requests", history=5))
        given = {"servers": server.url, "bucket": "requests", "numPartitions": "2"}
        reader: StreamReader | ChangeReader = ChangeReader(
            read_options(kv_options.StreamOptions, "jetstream_kv", given), kv_reading.SCHEMA
        )
        prefix = "$KV.requests"
    else:
        stream = other_stream(js, 10)
        prefix = stream.name.lower()
        given = {"minPartitions": "2", "subjects": f"{prefix}.1"} if kind == "filtered" else {"minPartitions": "2"}
        reader = StreamReader(options(server, stream.name, startingOffsets="earliest", **given), SCHEMA)
    start = reader.initialOffset()
    if kind != "bucket":
        start = reader.latestOffset(start, ReadAllAvailable())  # from here on it is promised
    for number in range(1_000):
        js.publish_async(f"{prefix}.{number if kind == 'bucket' else number % 3}", b"x")
    js.publish_async_complete()
    time.sleep(stream_follower.POLL_S)
    before = js.account_info().api["total"]
    pulls = context_of(js).client.subscribe("$JS.API.CONSUMER.MSG.NEXT.>")  # which the server does not count
    context_of(js).client.flush()
    end = reader.latestOffset(start, ReadAllAvailable())
    reader.reportLatestOffset()
    parts = reader.partitions(start, end)
    assert len(parts) == 2
    rows = sum(batch.num_rows for part in parts for batch in reader.read(part))
    assert rows == (333 if kind == "filtered" else 1_000)
    context_of(js).client.flush()
    asked = js.account_info().api["total"] - before - 1 + pulls.pending_messages
    assert asked <= most


def test_news_behind_a_limit_are_not_waited_for(
    server: NatsServer, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_follower, "POLL_S", 60.0)
    reader = StreamReader(options(server, stream.name, startingOffsets="earliest"), SCHEMA)
    offset = reader.initialOffset()
    started = time.monotonic()
    for _ in range(10):
        offset = reader.latestOffset(offset, ReadMaxRows(10))
    assert offset["streams"][stream.name]["next"] == 101
    assert time.monotonic() - started < 60
    latest = reader.reportLatestOffset()
    assert latest is not None
    assert latest["streams"][stream.name]["next"] == 101


@dataclass
class Followed:
    """A query's reader, as the driver has it, and what feeds it."""

    new_reader: Callable[[], StreamReader | ChangeReader]
    feed: Callable[[int], None]

    def read(self, start: dict[str, Any], end: dict[str, Any]) -> int:
        reader = self.new_reader()
        return sum(batch.num_rows for part in reader.partitions(start, end) for batch in reader.read(part))


def followed(kind: str, own: NatsServer, js: JetStream) -> Followed:
    ways = {"servers": own.url, "requestTimeoutMs": "300", "startingOffsets": "earliest"}
    if kind == "stream":
        stream = js.create_stream(StreamConfig(name="S", subjects=["s.>"], allow_batched=True))
        given = {**ways, "stream": "S"}
        return Followed(
            lambda: StreamReader(read_options(SourceOptions, "jetstream", given), SCHEMA),
            lambda count: fill(js, stream, count),
        )
    js.create_kv(KVConfig(bucket="b", history=64, allow_batched=True))
    given = {**ways, "bucket": "b"}

    def feed(count: int) -> None:
        with js.fast_batch() as batch:
            for number in range(count):
                batch.add(f"$KV.b.k{number % 5_000}", b"x")

    return Followed(
        lambda: ChangeReader(read_options(kv_options.StreamOptions, "jetstream_kv", given), kv_reading.SCHEMA), feed
    )


KINDS = pytest.mark.parametrize("kind", ["stream", "bucket"])


@KINDS
def test_an_outage_does_not_end_the_query(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_follower, "PATIENCE_S", 0.5)
    with NatsServer(store_dir=tmp_path) as own, connect(own.url) as client:
        what = followed(kind, own, client.jetstream())
        reader = what.new_reader()
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadAllAvailable()) is start
        own.kill()
        for limit in (ReadAllAvailable(), ReadMaxRows(5)):
            began = time.monotonic()
            assert reader.latestOffset(start, limit) is start
            assert time.monotonic() - began < 30  # Spark cannot stop the query meanwhile
        assert reader.reportLatestOffset() is not None
        own.start()
        what.feed(10)
        deadline = time.monotonic() + PATIENCE_S
        while (end := reader.latestOffset(start, ReadAllAvailable())) is start:
            assert time.monotonic() < deadline
        [position] = end["streams"].values()
        assert position["next"] == 11
        assert what.read(start, end) == 10


@KINDS
def test_a_task_survives_a_restart_of_the_server(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "REQUEST_MESSAGES", 500)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 500)
    with NatsServer(store_dir=tmp_path) as own:
        with connect(own.url) as client:
            what = followed(kind, own, client.jetstream())
            what.feed(20_000)
        reader = what.new_reader()
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        [part] = reader.partitions(start, end)
        rows = 0
        for number, batch in enumerate(reader.read(part)):
            rows += batch.num_rows
            if number == 5:
                own.kill()
                timer = threading.Timer(6.0, own.start)  # longer than a handful of attempts take
                timer.start()
        timer.join()
        assert rows == 20_000


def test_an_idle_reader_of_a_bucket_leaves_the_server_in_peace(server: NatsServer, js: JetStream) -> None:
    js.create_kv(KVConfig(bucket="idle"))
    given = read_options(kv_options.StreamOptions, "jetstream_kv", {"servers": server.url, "bucket": "idle"})
    reader = ChangeReader(given, kv_reading.SCHEMA)
    start = reader.initialOffset()
    reader.latestOffset(start, ReadAllAvailable())
    before = js.account_info().api["total"]
    started = time.monotonic()
    for _ in range(10):
        assert reader.latestOffset(start, ReadAllAvailable()) is start
        reader.reportLatestOffset()
    assert js.account_info().api["total"] - before <= (time.monotonic() - started) / 0.1 + 3


@pytest.mark.parametrize(
    "plan",
    [
        lambda url: source.batch_reader({"servers": url, "stream": "S"}, SCHEMA).partitions(),
        lambda url: source.stream_reader({"servers": url, "stream": "S"}, SCHEMA).initialOffset(),
        lambda url: source.stream_reader({"servers": url, "stream": "S"}, SCHEMA).latestOffset(
            Offset({"S": StreamPosition("", 1)}).to_json(), ReadAllAvailable()
        ),
        lambda url: kv_reading.batch_reader({"servers": url, "bucket": "b"}, kv_reading.SCHEMA).partitions(),
        lambda url: kv_reading.stream_reader({"servers": url, "bucket": "b"}, kv_reading.SCHEMA).initialOffset(),
    ],
    ids=["batch", "query", "query with a checkpoint", "table", "changes"],
)
def test_where_nothing_listens_a_plan_fails_soon_and_says_so_once(
    plan: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen: nobody else can, meanwhile
        port = bound.getsockname()[1]
        with caplog.at_level(logging.WARNING), pytest.raises(NoServersAvailable) as caught:
            plan(f"nats://127.0.0.1:{port}")
    assert caplog.messages == []
    assert time.monotonic() - started < 30
    assert f"127.0.0.1:{port}: connection refused" in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_recreated_stream_ends_the_query(server: NatsServer, js: JetStream, stream: Stream) -> None:
    reader = StreamReader(options(server, stream.name), SCHEMA)
    start = reader.initialOffset()
    js.delete_stream(stream.name)
    fill(js, js.create_stream(stream.cached_info.config), 500)
    with pytest.raises(StreamRecreated):
        reader.latestOffset(start, ReadAllAvailable())


def test_loss_is_noticed_when_a_batch_is_planned(server: NatsServer, stream: Stream) -> None:
    start = StreamReader(options(server, stream.name, startingOffsets="5"), SCHEMA).initialOffset()
    stream.purge(up_to_sequence=30)
    with pytest.raises(DataLoss):
        StreamReader(options(server, stream.name), SCHEMA).latestOffset(start, ReadAllAvailable())
    lenient = StreamReader(options(server, stream.name, failOnDataLoss="false"), SCHEMA)
    assert lenient.latestOffset(start, ReadMaxRows(10))["streams"][stream.name]["next"] == 41


# ---- how far behind ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelled", [json.dumps, str, dict], ids=["as JSON", "as Spark shows it", "as a listener's"])
def test_a_query_says_how_far_it_is_behind(
    server: NatsServer, js: JetStream, stream: Stream, spelled: Callable[[Any], Any]
) -> None:
    reader = StreamReader(options(server, stream.name, startingOffsets="earliest"), SCHEMA)
    end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(40))
    latest = reader.reportLatestOffset()
    assert latest is not None
    size = stream.info().state.bytes * 60 // 100
    assert latest["behind"] == {"messages": 60, "bytes": size}
    progress = {"sources": [{"endOffset": "{'files': 1}"}, {"endOffset": spelled(end)}]}
    since = stream.get_message(41).timestamp
    found = lag(progress, js)[stream.name]
    waited_s = (datetime.datetime.now(datetime.UTC) - since).total_seconds()
    assert (found.messages, found.bytes) == (60, size)
    assert 0 <= found.seconds <= waited_s
    rest = reader.latestOffset(end, ReadAllAvailable())
    assert lag({"sources": [{"endOffset": spelled(rest)}]}, js) == {stream.name: Lag(0, 0, 0.0)}


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_servers_clock_says_how_long_messages_have_waited(
    server: NatsServer, js: JetStream, stream: Stream, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    start = StreamReader(options(server, stream.name, startingOffsets="earliest"), SCHEMA).initialOffset()
    shift_clock(monkeypatch, hours)
    found = lag({"sources": [{"endOffset": json.dumps(start)}]}, js)[stream.name]
    assert 0 < found.seconds < 1800


def test_of_messages_that_a_query_leaves_out_none_waits(server: NatsServer, js: JetStream, stream: Stream) -> None:
    given = options(server, stream.name, startingOffsets="earliest", subjects=f"{stream.name.lower()}.none")
    start = StreamReader(given, SCHEMA).initialOffset()
    found = lag({"sources": [{"endOffset": json.dumps(start)}]}, js)[stream.name]
    assert (found.messages, found.seconds) == (100, 0.0)


def test_a_query_of_a_bucket_says_how_far_it_is_behind(server: NatsServer, js: JetStream) -> None:
    bucket = js.create_kv(KVConfig(bucket="behind"))
    given = {"servers": server.url, "bucket": "behind", "keys": "a.*"}
    start = ChangeReader(
        read_options(kv_options.StreamOptions, "jetstream_kv", given), kv_reading.SCHEMA
    ).initialOffset()
    bucket.put("a.1", b"")
    bucket.put("b.1", b"")
    found = lag({"sources": [{"endOffset": json.dumps(start)}]}, js)["KV_behind"]
    assert found.messages == 2
    assert found.seconds > 0


def test_without_an_offset_of_ours_there_is_no_lag(js: JetStream) -> None:
    progress: dict[str, Any]
    for progress in ({}, {"sources": []}, {"sources": [{"endOffset": None}]}, {"sources": [{"endOffset": "7"}]}):
        with pytest.raises(ConfigError, match="no JetStream source of the query has finished"):
            lag(progress, js)


# ---- other filters, other streams ----------------------------------------------------------------------------------


def next_of(offset: dict[str, Any], stream: Stream) -> int:
    found: int = offset["streams"][stream.name]["next"]
    return found


def other_stream(js: JetStream, count: int, name: str = "") -> Stream:
    global _count
    _count += 1
    name = name or f"R{_count}"
    made = js.create_stream(StreamConfig(name=name, subjects=[f"{name.lower()}.>"], allow_batched=True))
    if count:
        fill(js, made, count)
    return made


def test_other_subjects_than_the_checkpoints_are_refused_unless_that_is_accepted(
    server: NatsServer, js: JetStream, stream: Stream
) -> None:
    prefix = stream.name.lower()

    def reader(subjects: str, **given: str) -> StreamReader:
        return StreamReader(options(server, stream.name, subjects=subjects, **given), SCHEMA)

    old = reader(f"{prefix}.1", startingOffsets="earliest")
    start = old.initialOffset()
    end = old.latestOffset(start, ReadMaxRows(50))
    words = (
        rf"subjects='{prefix}.2': the checkpoint is of subjects='{prefix}.1'.*new checkpoint.*acceptFilterChange=true"
    )
    with pytest.raises(ConfigError, match=words):
        reader(f"{prefix}.2").latestOffset(end, ReadAllAvailable())
    with pytest.raises(ConfigError, match=r"subjects='': the checkpoint is of"):
        StreamReader(options(server, stream.name), SCHEMA).latestOffset(end, ReadAllAvailable())
    accepting = reader(f"{prefix}.2", acceptFilterChange="true")
    # The batch that failed is run again as it was; what comes after it has the new filter.
    assert read_all(accepting, accepting.partitions(start, end)) == [n for n in range(1, 51) if n % 3 == 1]
    following = accepting.latestOffset(end, ReadAllAvailable())
    assert read_all(accepting, accepting.partitions(end, following)) == [n for n in range(51, 101) if n % 3 == 2]
    with pytest.raises(ConfigError, match="the checkpoint is of"):
        old.latestOffset(following, ReadAllAvailable())


def test_subjects_that_leave_out_more_than_the_checkpoints_are_taken(
    server: NatsServer, js: JetStream, stream: Stream
) -> None:
    prefix = stream.name.lower()
    start = StreamReader(options(server, stream.name, startingOffsets="earliest"), SCHEMA).initialOffset()
    narrower = StreamReader(options(server, stream.name, subjects=f"{prefix}.1,{prefix}.2"), SCHEMA)
    end = narrower.latestOffset(start, ReadAllAvailable())
    assert end["subjects"] == [f"{prefix}.1", f"{prefix}.2"]
    assert read_all(narrower, narrower.partitions(start, end)) == [n for n in range(1, 101) if n % 3]


@pytest.mark.parametrize(
    ("given", "first"),
    [({}, 1), ({"startingOffsets": "latest"}, 1), ({"startingOffsets": '{"%s": 5}'}, 5)],
    ids=["by default", "as if that were for it", "where it is named"],
)
def test_a_stream_that_is_added_to_a_query_starts_at_its_earliest(
    server: NatsServer, js: JetStream, stream: Stream, given: dict[str, str], first: int
) -> None:
    start = StreamReader(options(server, stream.name), SCHEMA).initialOffset()
    new = other_stream(js, 20)
    more = {name: value.replace("%s", new.name) for name, value in given.items()}
    both = StreamReader(options(server, f"{stream.name},{new.name}", **more), SCHEMA)
    end = both.latestOffset(start, ReadAllAvailable())
    assert (next_of(end, stream), next_of(end, new)) == (101, 21)
    assert read_all(both, both.partitions(start, end)) == list(range(first, 21))
    assert both.latestOffset(end, ReadAllAvailable()) is end


def test_a_stream_that_is_added_where_it_ends_is_noted_and_nothing_is_read_twice(
    server: NatsServer, js: JetStream, stream: Stream
) -> None:
    old = StreamReader(options(server, stream.name, startingOffsets="earliest"), SCHEMA)
    first = old.latestOffset(old.initialOffset(), ReadAllAvailable())
    new = other_stream(js, 20)
    given = {"startingOffsets": json.dumps({new.name: "latest"})}
    both = StreamReader(options(server, f"{stream.name},{new.name}", **given), SCHEMA)
    second = both.latestOffset(first, ReadAllAvailable())
    assert next_of(second, new) == 21
    assert both.partitions(first, second) == []
    fill(js, new, 5)
    again = StreamReader(options(server, f"{stream.name},{new.name}", **given), SCHEMA)
    third = again.latestOffset(second, ReadAllAvailable())
    assert read_all(again, again.partitions(second, third)) == [21, 22, 23, 24, 25]


def test_a_stream_that_is_left_out_is_refused(server: NatsServer, js: JetStream, stream: Stream) -> None:
    other = other_stream(js, 1)
    start = StreamReader(options(server, f"{stream.name},{other.name}"), SCHEMA).initialOffset()
    with pytest.raises(ConfigError, match=rf"stream='{stream.name}': the checkpoint also has '{other.name}'.*name it"):
        StreamReader(options(server, stream.name), SCHEMA).latestOffset(start, ReadAllAvailable())


def pattern(server: NatsServer, text: str, **given: str) -> SourceOptions:
    return read_options(SourceOptions, "jetstream", {"servers": server.url, "streamPattern": text, **given})


def test_streams_named_by_a_pattern_are_found_also_those_created_later(
    server: NatsServer, js: JetStream, stream: Stream
) -> None:
    name = f"{stream.name}_EU"
    first = other_stream(js, 10, f"{name}_1")
    reader = StreamReader(pattern(server, f"{name}_[0-9]+"), SCHEMA)
    start = reader.initialOffset()
    assert set(start["streams"]) == {first.name}
    assert next_of(start, first) == 11
    second = other_stream(js, 7, f"{name}_22")
    other_stream(js, 7, f"{name}_X")
    end = start
    deadline = time.monotonic() + PATIENCE_S
    while end is start and time.monotonic() < deadline:
        end = reader.latestOffset(start, ReadAllAvailable())
    assert set(end["streams"]) == {first.name, second.name}
    assert read_all(reader, reader.partitions(start, end)) == list(range(1, 8))
    batch = BatchReader(pattern(server, f"{name}.*"), SCHEMA)
    assert sorted(read_all(batch, batch.partitions())) == sorted([*range(1, 11), *range(1, 8), *range(1, 8)])


def test_a_stream_of_a_pattern_that_is_deleted_ends_the_query_unless_loss_is_allowed(
    server: NatsServer, js: JetStream, stream: Stream
) -> None:
    names = [f"{stream.name}_{letter}" for letter in "AB"]
    gone, kept = (other_stream(js, 5, name) for name in names)
    start = StreamReader(pattern(server, f"{stream.name}_."), SCHEMA).initialOffset()
    js.delete_stream(gone.name)
    fill(js, kept, 5)
    with pytest.raises(ConfigError, match=rf"the checkpoint also has '{gone.name}', which is deleted or no longer"):
        StreamReader(pattern(server, f"{stream.name}_."), SCHEMA).latestOffset(start, ReadAllAvailable())
    lenient = StreamReader(pattern(server, f"{stream.name}_.", failOnDataLoss="false"), SCHEMA)
    end = lenient.latestOffset(start, ReadAllAvailable())
    assert read_all(lenient, lenient.partitions(start, end)) == [6, 7, 8, 9, 10]


def test_a_pattern_without_a_stream_is_refused_in_a_batch_and_waits_in_a_query(
    server: NatsServer, js: JetStream, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"streamPattern='NONE_\.\*': no stream has such a name"):
        BatchReader(pattern(server, "NONE_.*"), SCHEMA).partitions()
    name = f"{stream.name}_LATE"
    reader = StreamReader(pattern(server, name), SCHEMA)
    start = reader.initialOffset()
    for _ in range(3):
        assert reader.latestOffset(start, ReadAllAvailable()) is start
    assert caplog.messages == [f"streamPattern='{name}': no stream has such a name yet; waiting for one"]
    other_stream(js, 3, name)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert read_all(reader, reader.partitions(start, end)) == [1, 2, 3]


def test_the_initial_offset_stays_though_the_stream_goes_on(server: NatsServer, js: JetStream, stream: Stream) -> None:
    reader = StreamReader(options(server, stream.name), SCHEMA)
    first = reader.initialOffset()
    fill(js, stream, 10)
    assert reader.initialOffset() == first


def test_a_start_behind_the_end_is_refused(server: NatsServer, stream: Stream) -> None:
    with pytest.raises(ConfigError, match=r"startingOffsets=200: the next sequence of stream '.*' is 101"):
        StreamReader(options(server, stream.name, startingOffsets="200"), SCHEMA).initialOffset()
