"""What buckets need to know before they connect: options, columns, rows, and what one answer of the server says."""

from __future__ import annotations

import datetime
import json
import pickle
from array import array
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from jetspark.blocking.jsmessage import JetStreamMessage
from jetspark.core.message import CoreMessage
from jetspark.errors import ConfigError, JetStreamUnavailable, ServerError
from jetspark.spark import kv, kv_reading, kv_writing
from jetspark.spark.kv_writing import Lookup
from jetspark.spark.options import Connecting, describe, read_options
from jetspark.state.changes import Change, Stored

BUCKET = {"bucket": "orders"}

TYPES = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
}


def schema_of(columns: str) -> StructType:
    """Spark reads such a text, too, but only once it has started."""
    pairs = (column.split() for column in columns.split(", "))
    return StructType([StructField(name, TYPES[kind]) for name, kind in pairs])


# ---- options and columns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (kv.ReadOptions, {}, "bucket: expected the name of one"),
        (kv.ReadOptions, {"bucket": "a.b"}, "bucket='a.b'"),
        (kv.ReadOptions, {"keys": "order:1"}, "'order.1' would do"),
        (kv.ReadOptions, {"guard": "revision"}, "unknown option 'guard'"),
        (kv.ReadOptions, {"asOf": "0"}, "asOf='0': expected 1 or more"),
        (kv.ReadOptions, {"startingOffsets": "latest"}, "unknown option 'startingOffsets'"),
        (kv.StreamOptions, {"asOf": "4"}, "unknown option 'asOf'"),
        (kv.StreamOptions, {"startingOffsets": "0"}, "expected earliest, latest or a revision"),
        (kv.StreamOptions, {"startingOffsets": "soon"}, "expected earliest, latest or a revision"),
        (kv.WriteOptions, {"guard": "both"}, "guard='both': expected none, revision or sequence"),
        (kv.WriteOptions, {"onConflict": "skip"}, "onConflict=skip with guard=none: expected guard=revision"),
        (kv.WriteOptions, {"keys": "a"}, "unknown option 'keys'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(kind: Any, options: dict[str, str], message: str) -> None:
    given = options if "bucket" in options or not options else BUCKET | options
    with pytest.raises(ConfigError) as raised:
        read_options(kind, "jetstream_kv", given)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", [kv.ReadOptions, kv.StreamOptions, kv.WriteOptions])
def test_every_option_is_in_the_guide(kind: Any) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "spark-kv.md").read_text(encoding="utf-8")
    own = {entry.name for entry in describe(kind)} - {entry.name for entry in describe(Connecting)}
    assert [name for name in sorted(own) if f"`{name}`" not in guide] == []


def test_connections_are_kept_by_what_is_needed_to_connect() -> None:
    one, other = (read_options(kv.ReadOptions, "jetstream_kv", BUCKET | {"asOf": text}) for text in ("1", "2"))
    assert one.connecting() == other.connecting()
    assert hash(one.connecting()) == hash(other.connecting())


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("key string", {}, "no column 'value'"),
        ("value string", {}, "no column 'key'"),
        ("key bigint, value string", {}, "column 'key' of type bigint: expected string"),
        ("key string, value bigint", {}, "column 'value' of type bigint: expected binary or string"),
        ("key string, value string, price bigint", {}, "column 'price': expected some of key, value"),
        ("key string, value string", {"guard": "revision"}, "no column 'revision'"),
        ("key string, value string, revision int", {"guard": "sequence"}, "no column 'sequence'"),
        ("key string, value string, sequence int", {}, "'sequence' with guard=none: expected guard=sequence"),
    ],
)
def test_a_frame_without_what_is_needed_is_refused(schema: str, options: dict[str, str], message: str) -> None:
    for make in (kv.batch_writer, kv.stream_writer):
        with pytest.raises(ConfigError) as raised:
            make(BUCKET | options, schema_of(schema), False)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    "schema",
    [
        "key string, value string",
        "key string, operation string",
        "key string, value binary, revision bigint, created timestamp, operation string",
    ],
)
def test_a_frame_with_what_is_needed_is_taken(schema: str) -> None:
    kv.batch_writer(BUCKET, schema_of(schema), False)
    kv.stream_writer(BUCKET, schema_of(schema), True)
    with pytest.raises(ConfigError, match="overwrite"):
        kv.batch_writer(BUCKET, schema_of(schema), True)


def test_a_schema_with_other_columns_or_types_is_refused() -> None:
    for ddl, message in (("key string, price bigint", "column 'price'"), ("revision int", "expected bigint")):
        with pytest.raises(ConfigError, match=message):
            kv.batch_reader(BUCKET, schema_of(ddl))
        with pytest.raises(ConfigError, match=message):
            kv.stream_reader(BUCKET, schema_of(ddl))


def test_what_spark_carries_between_processes_survives_it() -> None:
    reader = kv.batch_reader(BUCKET | {"password": "x", "user": "u"}, kv.SCHEMA)
    assert "password='x'" not in repr(vars(pickle.loads(pickle.dumps(reader))))
    part = kv.Revisions("then", 7, array("Q", [1, 5]))
    assert pickle.loads(pickle.dumps(part)) == part


# ---- messages into rows ----------------------------------------------------------------------------------------------


def delivered(sequence: int, key: str = "a", data: bytes = b"", headers: bytes | None = None) -> JetStreamMessage:
    reply = b"$JS.ACK.KV_orders.c.1.%d.%d.1700000000123456789.4" % (sequence, sequence - 1)
    return JetStreamMessage(f"$KV.orders.{key}", data, reply, headers, None)


@pytest.mark.parametrize(
    ("headers", "operation"),
    [
        (None, "put"),
        (b"NATS/1.0\r\nJetSpark-Sequence: 4\r\n\r\n", "put"),
        (b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n", "delete"),
        (b"NATS/1.0\r\nNats-Rollup: sub\r\nKV-Operation: PURGE\r\n\r\n", "purge"),
        (b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\n\r\n", "purge"),
    ],
)
def test_headers_tell_what_was_done(headers: bytes | None, operation: str) -> None:
    assert kv_reading.operation(delivered(1, headers=headers)) == operation


def test_messages_become_the_columns_that_are_asked_for() -> None:
    mark = b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n"
    messages = [delivered(7, "order.1", b"\xff"), delivered(9, "order.2", headers=mark)]
    batch = kv_reading.columns(messages, len("$KV.orders."), kv._arrow(kv.SCHEMA))
    moment = datetime.datetime.fromtimestamp(1700000000, datetime.UTC).replace(microsecond=123456)
    assert batch.to_pylist() == [
        {"key": "order.1", "value": b"\xff", "revision": 7, "created": moment, "operation": "put"},
        {"key": "order.2", "value": b"", "revision": 9, "created": moment, "operation": "delete"},
    ]
    narrow = kv_reading.columns(messages, len("$KV.orders."), pa.schema([("revision", pa.int64())]))
    assert narrow.to_pydict() == {"revision": [7, 9]}


@pytest.mark.parametrize(
    ("headers", "is_within"),
    [
        (None, False),
        (b"NATS/1.0\r\nNats-Batch-Id: x\r\nNats-Batch-Sequence: 1\r\n\r\n", True),
        (b"NATS/1.0\r\nNats-Batch-Id: x\r\nNats-Batch-Sequence: 2\r\nNats-Batch-Commit: 1\r\n\r\n", False),
    ],
)
def test_a_transaction_is_over_with_the_message_that_says_so(headers: bytes | None, is_within: bool) -> None:
    assert kv_reading.is_within_transaction(headers) is is_within


def test_a_piece_is_cut_at_the_last_sequence() -> None:
    messages = [delivered(sequence) for sequence in (2, 4, 6)]
    assert [kv_reading.cut(messages, last) for last in range(1, 8)] == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("first", "end", "parts"), [(1, 101, 3), (5, 8, 10), (7, 7, 2), (1, 2, 1)])
def test_parts_cover_everything_once(first: int, end: int, parts: int) -> None:
    ranges = kv_reading.split(first, end, parts)
    assert [number for low, high in ranges for number in range(low, high)] == list(range(first, end))
    assert len(ranges) == min(parts, end - first)
    plan = kv_reading.Plan(9, array("Q", range(first, end)))
    assert [number for part in plan.parts(parts) for number in part] == list(range(first, end))


# ---- rows into changes -----------------------------------------------------------------------------------------------


def changes(guard: str = "none", **columns: list[Any]) -> list[Change]:
    return list(kv_writing.changes_of(pa.RecordBatch.from_pydict(columns), guard))


def test_rows_become_changes_with_what_their_guard_needs() -> None:
    columns = {"key": ["a", "b"], "value": ["ä", None], "operation": [None, "purge"], "revision": [3, 0]}
    assert changes(**columns) == [Change("a", "ä".encode()), Change("b", operation="purge")]
    assert changes("revision", **columns) == [
        Change("a", "ä".encode(), revision=3),
        Change("b", operation="purge", revision=0),
    ]
    assert changes("sequence", key=["a"], value=[b"1"], sequence=[7]) == [Change("a", b"1", sequence=7)]


@pytest.mark.parametrize(
    ("guard", "columns", "message"),
    [
        ("none", {"key": [None], "value": ["1"]}, "a row without a key"),
        ("none", {"key": ["a:b"], "value": ["1"]}, "'a.b' would do"),
        ("none", {"key": ["a"], "value": [None]}, "key 'a' has no value: to remove it, say so with operation='delete'"),
        ("none", {"key": ["a"], "value": ["1"], "operation": ["drop"]}, "operation 'drop': expected put, delete or"),
        ("revision", {"key": ["a"], "value": ["1"], "revision": pa.array([None], pa.int64())}, "revision None"),
        ("sequence", {"key": ["a"], "value": ["1"], "sequence": [-1]}, "sequence -1: expected 0 or more"),
    ],
)
def test_a_row_that_cannot_be_written_is_refused(guard: str, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changes(guard, **columns)
    assert message in str(raised.value)


def test_requests_have_each_subject_once_and_are_not_too_large() -> None:
    subjects = [f"$KV.b.{number}" for number in range(3000)]
    assert list(map(len, kv_writing._requests(subjects + subjects))) == [1024, 1024, 952]
    long = ["$KV.b." + "x" * 100_000 + str(number) for number in range(5)]
    assert list(map(len, kv_writing._requests(long))) == [2, 2, 1]
    assert list(kv_writing._requests([])) == []


# ---- the last messages of many keys ----------------------------------------------------------------------------------


def answer(subject: str, sequence: int, before: int, own: bytes = b"", data: bytes = b"v") -> CoreMessage:
    raw = (
        b"NATS/1.0\r\n%bNats-Stream: KV_b\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\n"
        b"Nats-Time-Stamp: 2026-03-20T10:14:30Z\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: %d\r\n\r\n"
    ) % (own, subject.encode(), sequence, before)
    return CoreMessage("_INBOX.x", data, None, raw, None)


def end(before: int, left: int = 0) -> CoreMessage:
    raw = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n\r\n" % (left, before)
    return CoreMessage("_INBOX.x", b"", None, raw, None)


def status(line: str) -> CoreMessage:
    return CoreMessage("_INBOX.x", b"", None, f"NATS/1.0 {line}\r\n\r\n".encode(), None)


def test_answers_are_read_from_the_few_headers_that_matter() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "b", "c"])
    request = lookup.request()
    assert request.subject == "$JS.API.DIRECT.GET.KV_b"
    assert json.loads(request.data) == {"multi_last": ["a", "b", "c"]}
    lookup.accept(answer("a", 3, 0, b"JetSpark-Sequence:  12\r\n"))
    lookup.accept(answer("b", 7, 3, b"KV-Operation: DEL\r\nJetSpark-Writer: job\r\n", b""))
    # A message that was republished has such headers of its own; and anybody may write anything into ours.
    lookup.accept(answer("c", 9, 7, b"Nats-Sequence: 99\r\nNats-Subject: x\r\nJetSpark-Sequence: soon\r\n"))
    assert not lookup.is_over
    lookup.accept(end(9))
    assert lookup.is_over
    assert lookup.left == []
    assert lookup.found == [
        Stored("a", 3, b"v", "put", 12, None),
        Stored("b", 7, b"", "delete", None, "job"),
        Stored("c", 9, b"v", "put", None, None),
    ]


def test_what_a_large_answer_leaves_is_asked_for_next() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "b", "never"])
    lookup.request()
    lookup.accept(answer("b", 3, 0))
    lookup.accept(end(3, left=1))
    assert (lookup.is_over, lookup.left) == (True, ["a", "never"])
    assert json.loads(lookup.request().data) == {"multi_last": ["a", "never"]}
    lookup.accept(answer("a", 5, 0))
    lookup.accept(end(5))
    assert lookup.left == []
    assert [each.subject for each in lookup.found] == ["b", "a"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_answer_with_a_hole_counts_for_nothing(lost: int) -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "b", "c"])
    lookup.request()
    answers = [answer("a", 3, 0), answer("b", 5, 3), answer("c", 6, 5)]
    for message in answers[:lost] + answers[lost + 1 :]:
        lookup.accept(message)
    lookup.accept(end(6))
    assert lookup.is_over
    assert (lookup.left, lookup.found) == (["a", "b", "c"], [])


def test_an_answer_may_be_that_there_is_nothing_or_nobody() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a"])
    lookup.request()
    lookup.accept(status("404 No Results"))
    assert (lookup.is_over, lookup.left, lookup.found) == (True, [], [])
    with pytest.raises(JetStreamUnavailable):
        Lookup("$JS.API", "KV_b", ["a"]).accept(status("503"))
    with pytest.raises(ServerError, match="Bad Request"):
        Lookup("$JS.API", "KV_b", ["a"]).accept(status("408 Bad Request"))
