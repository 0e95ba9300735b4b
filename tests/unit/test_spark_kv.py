"""What buckets need to know before they connect: options, columns and rows."""

from __future__ import annotations

import datetime
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

from jetspark.blocking.stream_message import JetStreamMessage
from jetspark.errors import ConfigError
from jetspark.spark.kv import options as kv_options
from jetspark.spark.kv import reading as kv_reading
from jetspark.spark.kv import rows as kv_rows
from jetspark.spark.kv import writing as kv_writing
from jetspark.spark.options import Connecting, describe, read_options
from jetspark.spark.schema import arrow_of
from jetspark.state.changes import Change

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
        (kv_options.ReadOptions, {}, "bucket: expected the name of one"),
        (kv_options.ReadOptions, {"bucket": "a.b"}, "bucket='a.b'"),
        (kv_options.ReadOptions, {"keys": "order:1"}, "'order.1' would do"),
        (kv_options.ReadOptions, {"guard": "revision"}, "unknown option 'guard'"),
        (kv_options.ReadOptions, {"asOf": "0"}, "asOf='0': expected 1 or more"),
        (kv_options.ReadOptions, {"startingOffsets": "latest"}, "unknown option 'startingOffsets'"),
        (kv_options.StreamOptions, {"asOf": "4"}, "unknown option 'asOf'"),
        (kv_options.StreamOptions, {"startingOffsets": "0"}, "expected earliest, latest or a revision"),
        (kv_options.StreamOptions, {"startingOffsets": "9" * 5000}, "expected earliest, latest or a revision"),
        (kv_options.ReadOptions, {"keys": "a,b,a"}, "keys: 'a' and 'a' overlap, which the server refuses; 'a' alone"),
        (kv_options.ReadOptions, {"keys": "a.*,a.b"}, "keys: 'a.*' and 'a.b' overlap, which the server refuses; 'a.*'"),
        (kv_options.StreamOptions, {"keys": "a.b, >"}, "keys: 'a.b' and '>' overlap, which the server refuses; '>'"),
        (kv_options.StreamOptions, {"startingOffsets": "soon"}, "expected earliest, latest or a revision"),
        (kv_options.WriteOptions, {"guard": "both"}, "guard='both': expected none, revision or sequence"),
        (kv_options.WriteOptions, {"onConflict": "skip"}, "onConflict=skip with guard=none: expected guard=revision"),
        (kv_options.WriteOptions, {"keys": "a"}, "unknown option 'keys'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(kind: Any, options: dict[str, str], message: str) -> None:
    given = options if "bucket" in options or not options else BUCKET | options
    with pytest.raises(ConfigError) as raised:
        read_options(kind, "jetstream_kv", given)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", [kv_options.ReadOptions, kv_options.StreamOptions, kv_options.WriteOptions])
def test_every_option_is_in_the_guide(kind: Any) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "spark-kv.md").read_text(encoding="utf-8")
    own = {entry.name for entry in describe(kind)} - {entry.name for entry in describe(Connecting)}
    assert [name for name in sorted(own) if f"`{name}`" not in guide] == []


def test_connections_are_kept_by_what_is_needed_to_connect() -> None:
    one, other = (read_options(kv_options.ReadOptions, "jetstream_kv", BUCKET | {"asOf": text}) for text in ("1", "2"))
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
        ("key string, value string, stream_created timestamp", {}, "'stream_created' with guard=none: expected guard="),
    ],
)
def test_a_frame_without_what_is_needed_is_refused(schema: str, options: dict[str, str], message: str) -> None:
    for make in (kv_writing.batch_writer, kv_writing.stream_writer):
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
    kv_writing.batch_writer(BUCKET, schema_of(schema), False)
    kv_writing.stream_writer(BUCKET, schema_of(schema), True)
    with pytest.raises(ConfigError, match="overwrite"):
        kv_writing.batch_writer(BUCKET, schema_of(schema), True)


def test_a_schema_with_other_columns_or_types_is_refused() -> None:
    for ddl, message in (("key string, price bigint", "column 'price'"), ("revision int", "expected bigint")):
        with pytest.raises(ConfigError, match=message):
            kv_reading.batch_reader(BUCKET, schema_of(ddl))
        with pytest.raises(ConfigError, match=message):
            kv_reading.stream_reader(BUCKET, schema_of(ddl))


def test_what_spark_carries_between_processes_survives_it() -> None:
    reader = kv_reading.batch_reader(BUCKET | {"password": "x", "user": "u"}, kv_reading.SCHEMA)
    assert "password='x'" not in repr(vars(pickle.loads(pickle.dumps(reader))))
    part = kv_reading.Revisions("then", 7, array("Q", [1, 5]))
    assert pickle.loads(pickle.dumps(part)) == part


# ---- messages into rows ----------------------------------------------------------------------------------------------


def delivered(sequence: int, key: str = "a", data: bytes = b"", headers: bytes | None = None) -> JetStreamMessage:
    reply = b"$JS.ACK.KV_orders.c.1.%d.%d.1700000000123456789.4" % (sequence, sequence - 1)
    return JetStreamMessage(f"$KV.orders.{key}", data, reply, headers, None)


def test_messages_become_the_columns_that_are_asked_for() -> None:
    mark = b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n"
    messages = [delivered(7, "order.1", b"\xff"), delivered(9, "order.2", headers=mark)]
    batch = kv_rows.columns(messages, len("$KV.orders."), arrow_of(kv_reading.SCHEMA))
    moment = datetime.datetime.fromtimestamp(1700000000, datetime.UTC).replace(microsecond=123456)
    assert batch.to_pylist() == [
        {"key": "order.1", "value": b"\xff", "revision": 7, "created": moment, "operation": "put"},
        {"key": "order.2", "value": b"", "revision": 9, "created": moment, "operation": "delete"},
    ]
    narrow = kv_rows.columns(messages, len("$KV.orders."), pa.schema([("revision", pa.int64())]))
    assert narrow.to_pydict() == {"revision": [7, 9]}


# ---- rows into changes -----------------------------------------------------------------------------------------------


def changes(guard: str = "none", **columns: list[Any]) -> list[Change]:
    return list(kv_rows.changes_of(pa.RecordBatch.from_pydict(columns), guard))


def test_rows_become_changes_with_what_their_guard_needs() -> None:
    columns: dict[str, Any] = {"key": ["a", "b"], "value": ["ä", None]}
    columns |= {"operation": [None, "purge"], "revision": [3, 0]}
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
        ("none", {"key": ["a" * 3501], "value": ["1"]}, "aaa'... of 3501 bytes: expected at most 3500"),
        ("none", {"key": ["a"], "value": [None]}, "key 'a' has no value: to remove it, say so with operation='delete'"),
        ("none", {"key": ["a"], "value": ["1"], "operation": ["drop"]}, "operation 'drop': expected put, delete or"),
        ("revision", {"key": ["a"], "value": ["1"], "revision": pa.array([None], pa.int64())}, "revision None"),
        ("sequence", {"key": ["a"], "value": ["1"], "sequence": [-1]}, "sequence -1: expected 0 or more"),
        (
            "sequence",
            {
                "key": ["a"],
                "value": ["1"],
                "sequence": [1],
                "stream_created": pa.array([None], pa.timestamp("us", "UTC")),
            },
            "key 'a' has no stream_created",
        ),
    ],
)
def test_a_row_that_cannot_be_written_is_refused(guard: str, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changes(guard, **columns)
    assert message in str(raised.value)
