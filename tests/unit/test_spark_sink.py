"""Which frames and options the sink takes, and what messages it makes of rows."""

from __future__ import annotations

import datetime
import pickle
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.types import StructType

from jetspark.core.headers import decode
from jetspark.errors import ConfigError, UsageError
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.info import StreamInfo, StreamState
from jetspark.spark.options import Connecting, describe, read_options
from jetspark.spark.stream.ledger import Committed
from jetspark.spark.stream.sink import SinkOptions, Target, Unnamed, batch_writer, stream_writer
from jetspark.spark.stream.writing import Destination, Encoder, Layout, Rows, added_up
from jetspark.spark.tasks import TaskId

PAGE = Path(__file__).parents[2] / "docs" / "spark-sink.md"


def _parsed(text: str) -> StructType:
    """A schema of a few types, without the JVM that would parse it."""
    from pyspark.sql import types

    kinds: dict[str, Any] = {
        "string": types.StringType(),
        "binary": types.BinaryType(),
        "int": types.IntegerType(),
        "bigint": types.LongType(),
        "double": types.DoubleType(),
        "timestamp": types.TimestampType(),
        "map": types.MapType(types.StringType(), types.StringType()),
        "maps": types.MapType(types.StringType(), types.ArrayType(types.StringType())),
        "mapint": types.MapType(types.StringType(), types.IntegerType()),
    }
    result = StructType()
    for field in text.split(","):
        name, kind = field.split()
        result = result.add(name, kinds[kind])
    return result


def layout(text: str, subject: str | None = None, msg_id_column: str | None = None) -> Layout:
    return Layout.of(_parsed(text), subject=subject, msg_id_column=msg_id_column)


def encoder(given: Layout, *, stores: str = "a.", **options: Any) -> Encoder:
    settings: dict[str, Any] = {"partition": 3, "id_prefix": "q:7:3:", "stream": "S", "max_bytes": 1000} | options
    own = {name: settings.pop(name) for name in ("partition", "id_prefix", "with_digest") if name in settings}
    return Encoder(given, Destination(is_stored=lambda subject: subject.startswith(stores), **settings), **own)


def blocks_of(rows: Rows) -> list[bytes]:
    assert rows.blocks is not None
    return rows.blocks


# ---- columns -----------------------------------------------------------------------------------------------------


def test_data_and_a_subject_are_enough() -> None:
    assert layout("data binary", subject="a.b") == Layout(subject="a.b", msg_id=None)
    assert layout("data string,subject string") == Layout(subject=None, msg_id=None)


def test_every_column_has_its_place_and_an_id_column_may_have_any_name() -> None:
    full = layout("data string,subject string,headers maps,msg_id string,ttl double")
    assert full == Layout(subject=None, msg_id="msg_id", has_headers=True, has_ttl=True)
    assert layout("data string,key bigint", subject="a", msg_id_column="key").msg_id == "key"


def test_a_frame_that_was_read_may_be_written_as_it_is() -> None:
    read = "subject string,data binary,headers maps,stream string,sequence bigint,timestamp timestamp"
    assert layout(read) == Layout(subject=None, msg_id=None, has_headers=True)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("data string,price double", {"subject": "a"}, r"column 'price' has no place.*\.select\('data'\)"),
        ("data string,timestamp timestamp", {"subject": "a"}, "column 'timestamp' has no place"),
        ("subject string", {}, "no column data"),
        ("data string", {}, "no column subject: expected one, or the option subject"),
        ("data int,subject string", {}, "'data' is int: expected binary or string"),
        ("data string,subject int", {}, "'subject' is int: expected string"),
        ("data string,subject string,headers mapint", {}, "'headers' is map<string,int>: expected map<string,array"),
        ("data string,subject string,ttl string", {}, "'ttl' is string: expected a number of seconds"),
        ("data string,subject string,msg_id double", {}, "'msg_id' is double: expected string"),
        ("data string,subject string", {"msg_id_column": "key"}, "no such column"),
        ("data string,subject string,msg_id string,key string", {"msg_id_column": "key"}, "expected one of both"),
        ("data string,data string", {"subject": "a"}, "expected each name once"),
        ("data string", {"subject": "a.*"}, "option subject"),
    ],
)
def test_a_column_that_would_not_be_written_is_refused(columns: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(columns, **options)


# ---- messages ----------------------------------------------------------------------------------------------------


def test_a_row_is_known_by_its_place_and_by_what_is_in_it() -> None:
    made = encoder(layout("data string", subject="a.b"))
    first = made.encode(pa.record_batch({"data": ["x", "x", "y"]}))
    second = made.encode(pa.record_batch({"data": ["x"]}))
    ids = [decode(block)["Nats-Msg-Id"] for block in blocks_of(first) + blocks_of(second)]
    assert [each.rpartition(":")[0] for each in ids] == ["q:7:3:0", "q:7:3:1", "q:7:3:2", "q:7:3:3"]
    sums = [each.rpartition(":")[2] for each in ids]
    assert sums[0] == sums[1] == sums[3] != sums[2]
    assert (made.rows, second.first) == (4, 3)
    assert list(second.items()) == [("a.b", b"x", blocks_of(second)[0])]


def test_the_same_rows_have_the_same_ids_however_they_are_cut_into_batches() -> None:
    rows = {"data": ["x", "y", "z"], "subject": ["a.1", "a.2", "a.3"]}
    whole = encoder(layout("data string,subject string")).encode(pa.record_batch(rows)).ids
    made = encoder(layout("data string,subject string"))
    cut = [made.encode(pa.record_batch(rows).slice(start, length)).ids for start, length in ((0, 1), (1, 2))]
    assert whole == cut[0] + cut[1]


@pytest.mark.parametrize("changed", ["data", "subject", "headers", "ttl"])
def test_rows_that_differ_in_anything_never_share_an_id(changed: str) -> None:
    kinds = layout("data string,subject string,headers map,ttl int")
    row = {"data": ["x"], "subject": ["a.1"], "headers": pa.array([[("A", "1")]], _MAP), "ttl": [5]}
    other = row | {
        changed: {"data": ["y"], "subject": ["a.2"], "headers": pa.array([[("A", "2")]], _MAP), "ttl": [6]}[changed]
    }
    assert encoder(kinds).encode(pa.record_batch(row)).ids != encoder(kinds).encode(pa.record_batch(other)).ids


def digest(rows: dict[str, Any], *parts: tuple[int, int]) -> int:
    kinds = layout("data string,subject string,headers map,ttl int,key string", msg_id_column="key")
    batch = pa.record_batch(rows)
    encoders = [encoder(kinds, with_digest=True) for _ in parts]
    for each, (start, length) in zip(encoders, parts, strict=True):
        each.encode(batch.slice(start, length))
    return added_up(each.digest for each in encoders)


def rows_of(*order: int, **changed: Any) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        "data": ["x", "y", "z"],
        "subject": ["a.1", "a.2", "a.2"],
        "headers": [[("A", "1")], [], [("A", "2")]],
        "ttl": [5, None, 6],
        "key": ["k1", "k2", "k3"],
    }
    columns |= {name: [value, *columns[name][1:]] for name, value in changed.items()}
    found = {name: [values[number] for number in order or (0, 1, 2)] for name, values in columns.items()}
    return found | {"headers": pa.array(found["headers"], _MAP)}


def test_the_digest_of_rows_is_the_same_whatever_their_order_and_partitions() -> None:
    whole = digest(rows_of(), (0, 3))
    assert whole == digest(rows_of(2, 0, 1), (0, 3)) == digest(rows_of(1, 2, 0), (0, 1), (1, 2))
    assert 0 < whole < 1 << 128
    assert digest(rows_of(0), (0, 1)) not in (0, whole)


@pytest.mark.parametrize(
    "changed", [{"data": "y"}, {"subject": "a.2"}, {"headers": [("A", "2")]}, {"ttl": 6}, {"key": "k2"}], ids=str
)
def test_the_digest_of_rows_tells_others_by_every_column(changed: dict[str, Any]) -> None:
    assert digest(rows_of(**changed), (0, 3)) != digest(rows_of(), (0, 3))


def test_the_digest_of_rows_tells_one_that_is_there_twice_and_values_that_changed_their_rows() -> None:
    assert digest(rows_of(0, 0, 1), (0, 3)) != digest(rows_of(0, 1, 1), (0, 3))
    swapped = rows_of() | {"data": ["y", "x", "z"]}
    assert digest(swapped, (0, 3)) != digest(rows_of(), (0, 3))
    # What one column ends with is not what the next begins with.
    assert digest(rows_of(subject="a.1x", data=""), (0, 3)) != digest(rows_of(subject="a.1", data="x"), (0, 3))


def test_rows_without_a_name_have_no_digest() -> None:
    made = encoder(layout("data string", subject="a.b"))
    made.encode(pa.record_batch({"data": ["x"]}))
    assert made.digest == 0


_MAP = pa.map_(pa.string(), pa.string())
_MAPS = pa.map_(pa.string(), pa.list_(pa.string()))


def test_large_types_are_written_like_the_others() -> None:
    rows = encoder(layout("data string,subject string")).encode(
        pa.record_batch({"data": pa.array(["ü"], pa.large_string()), "subject": pa.array(["a.1"], pa.large_string())})
    )
    assert [item[:2] for item in rows.items()] == [("a.1", "ü".encode())]


def test_an_id_column_is_taken_as_it_is() -> None:
    rows = encoder(layout("data string,key bigint", subject="a.b", msg_id_column="key")).encode(
        pa.record_batch({"data": ["x", "y"], "key": [12, 7]})
    )
    assert [decode(block)["Nats-Msg-Id"] for block in blocks_of(rows)] == ["12", "7"]


def test_headers_of_both_kinds_and_a_ttl_are_in_the_block() -> None:
    for kind, values in (
        (_MAP, [[("A", "1"), ("B", "2")], [], None]),
        (_MAPS, [[("A", ["1"]), ("B", ["2"])], [], None]),
    ):
        named = "map" if kind is _MAP else "maps"
        rows = encoder(layout(f"data binary,headers {named},ttl double", subject="a.b")).encode(
            pa.record_batch(
                {
                    "data": pa.array([b"1", b"2", b"3"]),
                    "headers": pa.array(values, kind),
                    "ttl": pa.array([1.5, None, 3.0]),
                }
            )
        )
        blocks = [decode(block) for block in blocks_of(rows)]
        assert (blocks[0]["A"], blocks[0]["B"], blocks[0]["Nats-TTL"]) == ("1", "2", "2s")
        assert list(blocks[1]) == ["Nats-Msg-Id"]
        assert list(blocks[2]) == ["Nats-Msg-Id", "Nats-TTL"]


def test_headers_of_a_slice_are_those_of_its_rows() -> None:
    batch = pa.record_batch(
        {"data": ["1", "2", "3"], "headers": pa.array([[("A", ["1"])], [("A", ["2", "3"])], [("B", None)]], _MAPS)}
    ).slice(1)
    rows = encoder(layout("data string,headers maps", subject="a.b")).encode(batch)
    assert decode(blocks_of(rows)[0]).get_all("A") == ["2", "3"]
    assert list(decode(blocks_of(rows)[1])) == ["Nats-Msg-Id"]


def test_instructions_to_the_server_among_the_headers_are_left_out() -> None:
    pairs = [("Nats-Rollup", "all"), ("Nats-Msg-Id", "old"), ("Nats-Expected-Last-Msg-Id", "x"), ("Own", "1")]
    rows = encoder(layout("data string,headers map", subject="a.b")).encode(
        pa.record_batch({"data": ["1"], "headers": pa.array([pairs], _MAP)})
    )
    block = decode(blocks_of(rows)[0])
    assert list(block) == ["Nats-Msg-Id", "Own"]
    assert block["Nats-Msg-Id"].startswith("q:7:3:0:")


def test_a_named_stream_is_expected_of_the_server() -> None:
    rows = encoder(layout("data string", subject="a.b"), is_expected=True).encode(pa.record_batch({"data": ["1"]}))
    assert decode(blocks_of(rows)[0])["Nats-Expected-Stream"] == "S"


def test_without_ids_a_message_has_headers_only_if_there_is_something_to_say() -> None:
    batch = pa.record_batch({"data": ["1"], "headers": pa.array([[("A", "1")]], _MAP), "key": ["k"]})
    plain = encoder(layout("data string", subject="a.b"), id_prefix=None).encode(batch)
    assert list(plain.items()) == [("a.b", b"1")]
    named = encoder(layout("data string,headers map", subject="a.b"), id_prefix=None).encode(batch)
    assert [list(decode(block)) for block in named.blocks or ()] == [["A"]]
    expected = encoder(layout("data string", subject="a.b"), id_prefix=None, is_expected=True).encode(batch)
    assert [list(decode(block)) for block in expected.blocks or ()] == [["Nats-Expected-Stream"]]
    own = encoder(layout("data string,key string", subject="a.b", msg_id_column="key"), id_prefix=None).encode(batch)
    assert [decode(block)["Nats-Msg-Id"] for block in own.blocks or ()] == ["k"]


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        ("data string,subject string", {"data": None}, "data is null"),
        ("data string,subject string", {"subject": None}, "subject is null"),
        ("data string,subject string", {"subject": "a b"}, "a b"),
        ("data string,subject string", {"subject": "b.1"}, "stream 'S' does not store subject 'b.1'"),
        ("data string,subject string", {"data": "x" * 1000}, "more than the 1000 bytes the server takes"),
        ("data string,subject string,ttl int", {"ttl": 0}, "ttl is 0: expected 1 second or more"),
        ("data string,subject string,msg_id string", {"msg_id": None}, "msg_id is null"),
        ("data string,subject string,msg_id string", {"msg_id": "a\nb"}, "expected a text of one line"),
        ("data string,subject string,msg_id string", {"msg_id": ""}, "expected a text of one line"),
        ("data string,subject string,headers map", {"headers": [("A:B", "1")]}, "A:B"),
        ("data string,subject string,headers map", {"headers": [("A", "1\r\nB: 2")]}, "line break"),
    ],
)
def test_a_row_that_cannot_be_a_message_is_named_and_nothing_of_it_is_made(
    columns: str, row: dict[str, Any], message: str
) -> None:
    good = {"data": "x", "subject": "a.1", "ttl": 5, "msg_id": "id", "headers": [("A", "1")]}
    kinds = {"data": pa.string(), "subject": pa.string(), "ttl": pa.int32(), "msg_id": pa.string(), "headers": _MAP}
    names = [field.split()[0] for field in columns.split(",")]
    made = encoder(layout(columns))
    made.encode(pa.record_batch({name: pa.array([good[name]], kinds[name]) for name in names}))
    bad = good | row
    batch = pa.record_batch({name: pa.array([good[name], bad[name]], kinds[name]) for name in names})
    with pytest.raises(ConfigError, match=f"row 2 of partition 3: .*{re.escape(message)}"):
        made.encode(batch)
    assert made.rows == 1


def test_decimal_seconds_are_rounded_up() -> None:
    rows = encoder(Layout(subject="a.b", msg_id=None, has_ttl=True)).encode(
        pa.record_batch({"data": ["x"], "ttl": pa.array([Decimal("1.25")])})
    )
    assert decode(blocks_of(rows)[0])["Nats-TTL"] == "2s"


def test_rows_that_are_stored_are_left_out_and_the_others_stay_what_they_were() -> None:
    rows = encoder(layout("data string,subject string")).encode(
        pa.record_batch({"data": ["x", "y", "z"], "subject": ["a.1", "a.2", "a.3"]})
    )
    left = rows.but_for({rows.ids[1], b"another"})
    assert list(left.items()) == [("a.1", b"x", blocks_of(rows)[0]), ("a.3", b"z", blocks_of(rows)[2])]
    assert rows.but_for(set()) is rows
    assert len(rows.but_for(set(rows.ids))) == 0


# ---- options -----------------------------------------------------------------------------------------------------


def test_options_have_defaults_and_are_read_in_any_case() -> None:
    read = read_options(
        SinkOptions, "jetstream", {"PUBLISHMODE": "Async", "maxpendingbytes": "1m", "patienceMs": "500"}
    )
    assert (read.publish_mode, read.max_pending_bytes, read.patience_s) == ("async", 1 << 20, 0.5)
    assert (read.ledger, read.ledger_bucket, read.when_not_exactly_once) == (True, "jetspark_ledger", "warn")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"publishMode": "slow"}, "publishMode='slow': expected fast, atomic or async"),
        ({"ledgerBucket": "a b"}, "a b"),
        ({"writeId": "a.b"}, "writeId='a.b'"),
        ({"publishMode": "atomic", "ledger": "false"}, "without the ledger: expected it, or another mode"),
        ({"publishMode": "atomic", "exactlyOnce": "false"}, "without the ledger"),
        ({"writeId": "a", "exactlyOnce": "false"}, "writeId='a' with exactlyOnce=false"),
        ({"user": "me"}, "expected together with password"),
        ({"subjects": "a"}, "did you mean 'subject'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        batch_writer({"subject": "a"} | options, _parsed("data string"), False)


def test_a_stream_is_added_to_and_not_replaced() -> None:
    with pytest.raises(ConfigError, match=r'use mode\("append"\)'):
        batch_writer({"subject": "a"}, _parsed("data string"), True)
    with pytest.raises(ConfigError, match="jetstream_kv"):
        stream_writer({"subject": "a"}, _parsed("data string"), True)
    with pytest.raises(ConfigError, match="writeId is for"):
        stream_writer({"subject": "a", "writeId": "x"}, _parsed("data string"), False)


def test_writers_are_pickled_and_each_batch_write_has_a_name_of_its_own() -> None:
    first, second = (batch_writer({"subject": "a"}, _parsed("data string"), False) for _ in range(2))
    assert pickle.loads(pickle.dumps(first))._job == first._job != second._job  # type: ignore[attr-defined]
    named = batch_writer({"subject": "a", "writeId": "mine"}, _parsed("data string"), False)
    assert named._job == "mine"  # type: ignore[attr-defined]


def test_a_write_within_foreach_batch_is_repeated_by_another_run_and_not_by_its_own() -> None:
    mine, place = Unnamed("run 2", "write 5"), TaskId("q", 7, 0)
    for committed in (None, Committed(6, 9, {}, "run 2", "write 4"), Committed(7, 9, {}, "run 1", "write 1")):
        mine.check_is_alone(committed, place)
    mine.check_is_alone(Committed(7, 9, {}, *mine), place)  # another attempt at a task
    with pytest.raises(UsageError, match="batch 7 of query q has written to the same subject or stream already"):
        mine.check_is_alone(Committed(7, 9, {}, "run 2", "write 4"), place)


def test_writes_are_told_apart_by_where_they_go() -> None:
    names = [
        SinkOptions(stream=stream, subject=subject).target_name
        for stream, subject in ((None, None), (None, "a"), (None, "b"), ("A", None), ("A", "a"))
    ]
    assert len(set(names)) == 5
    assert names[1] == SinkOptions(subject="a", publish_mode="async").target_name


def test_connections_are_kept_by_how_to_connect_and_by_nothing_else() -> None:
    one = read_options(SinkOptions, "jetstream", {"subject": "a", "servers": "nats://x:1"})
    two = read_options(SinkOptions, "jetstream", {"subject": "b", "servers": "nats://x:1"})
    assert one.connecting() == two.connecting()
    assert hash(one.connecting()) == hash(two.connecting())


def test_every_option_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    own = {entry.name for entry in describe(SinkOptions)} - {entry.name for entry in describe(Connecting)}
    assert [name for name in sorted(own) if f"| `{name}` |" not in page] == []


# ---- the stream --------------------------------------------------------------------------------------------------


def target(first_sequence: int = 1, **config: Any) -> Target:
    return Target(
        StreamInfo(
            config=StreamConfig(name="S", subjects=["a.>"], **config),
            state=StreamState(first_sequence=first_sequence),
            created=datetime.datetime.now(datetime.UTC),
        )
    )


def test_only_a_stream_that_keeps_what_it_stores_can_tell_later_what_it_has() -> None:
    assert target(retention="limits", max_messages_per_subject=-1).has_all_after(0)
    assert target(first_sequence=11).has_all_after(10)
    assert not target(first_sequence=12).has_all_after(10)
    assert not target(retention="workqueue").has_all_after(10)
    assert not target(max_messages_per_subject=1).has_all_after(10)


def test_a_target_stores_what_its_subjects_match() -> None:
    assert target().stores("a.b")
    assert not target().stores("b.a")
