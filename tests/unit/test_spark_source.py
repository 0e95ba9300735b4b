"""The options of the source, and its schema."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from jetspark.core.message import CoreMessage
from jetspark.errors import ConfigError
from jetspark.spark.kv import reading as kv
from jetspark.spark.offsets import Limits, Offset, Sizes, StreamPosition
from jetspark.spark.options import describe, read_options
from jetspark.spark.schema import SCHEMA, Columns, check_schema
from jetspark.spark.stream.source import RangePartition, batch_reader, stream_reader
from jetspark.spark.stream.source_options import Bound, SourceOptions, bound, moment
from jetspark.spark.stream_follower import Follower
from jetspark.state.scan import Head, Range

UTC = datetime.UTC


def options(**given: str) -> SourceOptions:
    return read_options(SourceOptions, "jetstream", {"stream": "S", **given})


# ---- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("earliest", Bound("earliest")),
        ("Latest", Bound("latest")),
        (" 1201 ", Bound(1201)),
        ('{"B": 7, "A": "earliest"}', Bound(None, (("A", "earliest"), ("B", 7)))),
        ('{"A": -2, "B": -1}', Bound(None, (("A", "earliest"), ("B", "latest")))),
    ],
)
def test_offsets_are_words_sequences_or_json(text: str, found: Bound) -> None:
    assert bound(text) == found


@pytest.mark.parametrize("text", ["", "soon", "0", "-7", "1.5", "{", '{"A": true}', '{"A": 0}', '{"A": [1]}'])
def test_other_offsets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="startingOffsets"):
        options(startingOffsets=text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1774001670000", datetime.datetime(2026, 3, 20, 10, 14, 30, tzinfo=UTC)),
        ("2026-03-20T10:14:30Z", datetime.datetime(2026, 3, 20, 10, 14, 30, tzinfo=UTC)),
        ("2026-03-20T11:14:30.5+01:00", datetime.datetime(2026, 3, 20, 10, 14, 30, 500_000, tzinfo=UTC)),
        ("2026-03-20T10:14:30", datetime.datetime(2026, 3, 20, 10, 14, 30, tzinfo=UTC)),
        ("2026-03-20", datetime.datetime(2026, 3, 20, tzinfo=UTC)),
    ],
)
def test_times_are_epoch_milliseconds_or_iso_8601_in_utc(text: str, found: datetime.datetime) -> None:
    assert moment(text) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stream": ""}, "stream"),
        ({"stream": "A,A"}, "each of them once"),
        ({"stream": "a.b"}, "not allowed"),
        ({"strem": "A"}, "did you mean 'stream'"),
        ({"streamPattern": "A.*"}, "or streamPattern instead"),
        ({"streamPattern": "A("}, "a regular expression such as"),
        ({"subjects": "a..b"}, "subject"),
        ({"subjects": "a.>,a.b"}, "'a.>' alone may do"),
        ({"startingOffsets": "5", "startingTimestamp": "0"}, "startingOffsets with startingTimestamp"),
        ({"endingOffsets": "5", "endingTimestamp": "0"}, "endingOffsets with endingTimestamp"),
        ({"startingOffsets": "9", "endingOffsets": "5"}, "startingOffsets=9 is behind endingOffsets=5"),
        ({"startingTimestamp": "9", "endingTimestamp": "5"}, "behind endingTimestamp"),
        ({"startingOffsets": '{"OTHER": 5}'}, "'OTHER' is not one of"),
        ({"endingOffsets": "earliest"}, "nothing is before that"),
        ({"startingTimestamp": "yesterday"}, "ISO 8601"),
        ({"startingTimestamp": "0001-01-01T00:00:00+05:00"}, "startingTimestamp='0001-.*ISO 8601"),
        ({"endingTimestamp": "9999-12-31T23:59:59-05:00"}, "endingTimestamp='9999-.*ISO 8601"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger='0'"),
        ({"failOnDataLoss": "perhaps"}, "true or false"),
    ],
)
def test_options_that_cannot_be_used_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**given)


def test_bounds_may_name_streams_that_a_pattern_matches() -> None:
    def read(**given: str) -> SourceOptions:
        return read_options(SourceOptions, "jetstream", {"streamPattern": "A_.+", **given})

    assert read(startingOffsets='{"A_1": 5}').has("A_1")
    with pytest.raises(ConfigError, match=r"'A_' is not one of streamPattern='A_\.\+'"):
        read(startingOffsets='{"A_": 5}')
    with pytest.raises(ConfigError, match="startingOffsets=9 is behind endingOffsets=5"):
        read(startingOffsets="9", endingOffsets="5")
    with pytest.raises(ConfigError, match="no rows"):
        read(startingOffsets="latest").for_batch()
    with pytest.raises(ConfigError, match="no rows"):
        read(startingOffsets='{"A_1": "latest"}').for_batch()


def test_a_stream_is_required() -> None:
    with pytest.raises(ConfigError, match="stream: expected the name of a stream"):
        read_options(SourceOptions, "jetstream", {})


@pytest.mark.parametrize("name", ["maxOffsetsPerTrigger", "maxBytesPerTrigger"])
def test_limits_of_a_trigger_are_refused_in_a_batch(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: for streaming only"):
        batch_reader({"stream": "S", name: "5"}, SCHEMA)


def test_a_batch_from_the_latest_offset_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        batch_reader({"stream": "S", "startingOffsets": "latest"}, SCHEMA)


@pytest.mark.parametrize(("name", "value"), [("endingOffsets", "5"), ("endingTimestamp", "5")])
def test_what_is_for_a_batch_is_refused_in_streaming(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: for a batch only"):
        stream_reader({"stream": "S", name: value}, SCHEMA)


def test_a_bound_by_stream_says_nothing_of_the_others() -> None:
    given = bound('{"A": 5}')
    assert (given.of("A"), given.of("B")) == (5, None)


def test_every_option_is_in_the_documentation_with_its_own_words() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark-source.md").read_text(encoding="utf-8")
    missing = [each.name for each in describe(SourceOptions) if f"| `{each.name}` | {each.doc} |" not in page]
    assert missing == []


CREATED = "2026-03-20T10:14:30.000001Z"

# ---- schema --------------------------------------------------------------------------------------------------------


def test_the_schema_is_what_the_documentation_says() -> None:
    assert SCHEMA.simpleString() == (
        "struct<subject:string,data:binary,headers:map<string,array<string>>,"
        "stream:string,sequence:bigint,timestamp:timestamp,stream_created:timestamp>"
    )


def test_a_narrower_schema_is_honoured() -> None:
    narrower = StructType([StructField("sequence", LongType()), StructField("subject", StringType())])
    assert Columns(check_schema(narrower), has_headers=False, created=CREATED).of_messages(
        "S", [message()]
    ).to_pylist() == [{"sequence": 7, "subject": "s.a"}]


def test_an_unknown_column_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'payload': a stream has subject, data, headers, stream, sequence"):
        check_schema(StructType([StructField("payload", StringType())]))


def test_a_wrong_type_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match="'sequence' as int: expected bigint"):
        check_schema(StructType([StructField("sequence", IntegerType())]))


def message(
    sequence: int = 7, *, reply: str = "$JS.ACK.S.c.1.{0}.3.1774001670123456789.4", headers: bytes | None = None
) -> CoreMessage:
    return CoreMessage("s.a", b"data", reply.format(sequence).encode(), headers, None)


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.S.c.1.{0}.3.1774001670123456789.4",
        "$JS.ACK._.ACCT.S.c.1.{0}.3.1774001670123456789.4",
        "$JS.ACK.hub.ACCT.S.c.1.{0}.3.1774001670123456789.4.random",
    ],
)
def test_rows_are_made_of_either_form_of_the_reply_subject(reply: str) -> None:
    rows = Columns(SCHEMA, has_headers=False, created=CREATED).of_messages(
        "S", [message(7, reply=reply), message(8, reply=reply)]
    )
    time = datetime.datetime(2026, 3, 20, 10, 14, 30, 123456, tzinfo=UTC)
    assert rows.to_pylist() == [
        {
            "subject": "s.a",
            "data": b"data",
            "headers": None,
            "stream": "S",
            "sequence": sequence,
            "timestamp": time,
            "stream_created": datetime.datetime(2026, 3, 20, 10, 14, 30, 1, tzinfo=UTC),
        }
        for sequence in (7, 8)
    ]


def test_headers_keep_every_value_and_are_empty_when_there_are_none() -> None:
    block = b"NATS/1.0\r\nA: 1\r\nB: x\r\nA: 2\r\n\r\n"
    rows = Columns(SCHEMA, has_headers=True, created=CREATED).of_messages("S", [message(headers=block), message()])
    assert rows.column("headers").to_pylist() == [[("A", ["1", "2"]), ("B", ["x"])], []]


def test_headers_that_cannot_be_read_are_null() -> None:
    rows = Columns(SCHEMA, has_headers=True, created=CREATED).of_messages(
        "S", [message(headers=b"NATS/1.0\r\nnonsense\r\n\r\n")]
    )
    assert rows.column("headers").to_pylist() == [None]


def test_headers_are_not_looked_at_unless_asked_for() -> None:
    rows = Columns(SCHEMA, has_headers=False, created=CREATED).of_messages("S", [message(headers=b"not even headers")])
    assert rows.column("headers").to_pylist() == [None]


def test_a_subject_that_is_not_utf8_is_shown_with_replacement_characters() -> None:
    odd = CoreMessage("s.\udcff", b"", message().raw_reply, None, None)
    assert Columns(SCHEMA, has_headers=False, created=CREATED).of_messages("S", [odd]).column(
        "subject"
    ).to_pylist() == ["s.\ufffd"]


def test_record_batches_have_exactly_the_types_spark_wants() -> None:
    found = Columns(SCHEMA, has_headers=True, created=CREATED).of_messages("S", [message()]).schema
    assert found.field("timestamp").type == pa.timestamp("us", "UTC")
    assert found.field("sequence").type == pa.int64()


# ---- readers travel ------------------------------------------------------------------------------------------------


def test_readers_and_partitions_can_be_sent_to_tasks() -> None:
    for reader in (batch_reader({"stream": "S"}, SCHEMA), stream_reader({"stream": "S"}, SCHEMA)):
        assert pickle.loads(pickle.dumps(reader))._options.stream == ("S",)
    part = Range("S", "2026-03-20T10:14:30Z", 1, 5, ("s.>",))
    assert pickle.loads(pickle.dumps(RangePartition(part))).value == part


def test_a_secret_is_in_no_text_of_the_options() -> None:
    given = options(user="me", password="hunter2")
    assert "hunter2" not in repr(given)
    with pytest.raises(ConfigError) as caught:
        options(user="me", password="hunter2", token="hunter3")
    assert "hunter" not in str(caught.value)


# ---- what every source has to say of itself ------------------------------------------------------------------------


def test_a_source_that_does_not_say_where_it_reads_cannot_be_made() -> None:
    class Incomplete(Follower):
        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
            return []

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            return iter(())

    with pytest.raises(TypeError, match=r"_find_heads.*_starts_of.*_without"):
        Incomplete(  # type: ignore[abstract]
            options(),
            filters=(),
            filters_option="subjects",
            limits=Limits(),
            sizes=Sizes(),
            accepts_other_filters=False,
        )


def test_a_bucket_that_a_checkpoint_does_not_have_is_read_from_its_first_revision() -> None:
    reader = kv.stream_reader({"servers": "nats://127.0.0.1:1", "bucket": "b"}, kv.SCHEMA)
    head = Head("KV_b", "2026-03-20T10:14:30Z", first=3, next=9)
    assert isinstance(reader, Follower)
    assert reader._with_the_same_streams(Offset({}), [head]).streams["KV_b"] == StreamPosition(
        head.created, 3, is_earliest=True
    )
