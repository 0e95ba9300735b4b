"""Typed rows from Spark as events of an application: a real server, a real Spark, each event once."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.derived import Flagged, Moved, Old, Part, Settled, Why, app, silent
from support.names import new_name

from jetspark.app import Event, encode
from jetspark.app.contracts.envelope import Decoded, decode
from jetspark.app.dead_letters.listing import DeadLetterFilter, read_dead_letters
from jetspark.blocking import JetStream
from jetspark.errors import ConfigError, InvalidRows, StreamNotFound, UsageError
from jetspark.jetstream.info import StoredMessage
from jetspark.server import NatsServer

pytest.importorskip("pyspark")
from pyspark.sql import functions as F

from jetspark.spark import dead_letters, events, redrive, stream_events, write_events

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOW = datetime.datetime(2026, 3, 15, 10, 15, 30, 123456, tzinfo=datetime.UTC)
FLAGGED = "order_id string, cents bigint, note string"


@pytest.fixture
def shop(server: NatsServer, js: JetStream) -> JetStream:
    """With the empty stream of the application, and its dead letters."""
    for name in (app.stream, app.spec.dead_letter_stream, "KV_jetspark_ledger"):
        try:
            js.delete_stream(name)
        except StreamNotFound:
            pass
    asyncio.run(app.apply(server.url))
    return js


@pytest.fixture
def write(server: NatsServer) -> Callable[..., Any]:
    def run(frame: DataFrame, *kinds: type[Any], **options: Any) -> Any:
        return write_events(frame, options.pop("app", app), *kinds, servers=server.url, **options)

    return run


def stored(js: JetStream) -> list[StoredMessage]:
    return list(js.stream(app.stream).get_messages(subject="derived.>"))


def read(message: StoredMessage) -> Decoded:
    return decode(message.subject, message.data, dict(message.headers.items()), app.catalogue)


def flagged(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr("concat('o-', id % 7) AS order_id", "id AS cents")


def letters_of(server: NatsServer) -> list[Any]:
    async def found() -> list[Any]:
        async with app.connect(server.url) as client:
            return [each.dead_letter for each in await read_dead_letters(client.js, app, DeadLetterFilter())]

    return asyncio.run(found())


# ---- events ----------------------------------------------------------------------------------------------------------


def test_an_event_has_the_bytes_that_publish_sends(spark: SparkSession, shop: JetStream, write: Any) -> None:
    event = Flagged(
        order_id="ö 1", cents=5, why=Why.LARGE, at=NOW, price=Decimal("1.5"), parts=(Part(sku="s", count=2),), note="é"
    )
    row = ("ö 1", 5, "large", NOW, Decimal("1.5"), [("s", 2)], "é", "id-1", NOW)
    schema = (
        "order_id string, cents int, why string, at timestamp, price decimal(10,2), "
        "parts array<struct<sku: string, count: int>>, note string, event_id string, event_time timestamp"
    )
    write(spark.createDataFrame([row], schema), Flagged, idColumn="event_id", timeColumn="event_time")
    [message] = stored(shop)
    expected = encode(event, id="id-1", source="/derived", time=NOW)
    assert (message.subject, message.data) == (expected.subject, expected.data)
    assert list(message.headers) == ["Nats-Msg-Id", "traceparent"]
    assert message.headers["Nats-Msg-Id"] == "id-1"
    assert len(message.headers["traceparent"]) == 55


def test_fields_with_defaults_may_have_no_column_and_times_default_to_now(
    spark: SparkSession, shop: JetStream, write: Any
) -> None:
    before = datetime.datetime.now(datetime.UTC)
    write(flagged(spark, 100), Flagged)
    found = [read(message) for message in stored(shop)]
    assert Counter(each.event for each in found) == Counter(Flagged(order_id=f"o-{n % 7}", cents=n) for n in range(100))
    assert all(before <= (each.time or before) <= datetime.datetime.now(datetime.UTC) for each in found)
    assert len({each.id for each in found}) == 100
    assert {each.correlation_id == each.id for each in found} == {True}


def test_an_event_that_was_read_is_the_cause_of_the_one_written(
    spark: SparkSession, shop: JetStream, server: NatsServer, write: Any
) -> None:
    async def publish() -> None:
        async with app.connect(server.url) as client:
            await client.publish(Flagged(order_id="a", cents=1), id="first", correlation_id="order")
            await client.publish(Flagged(order_id="b", cents=2), id="second")

    asyncio.run(publish())
    causes = events(spark, app, Flagged, servers=server.url, includeHeaders=True)
    traces = {read(each).id: each.headers["traceparent"] for each in stored(shop)}
    settled = causes.selectExpr("order_id", "date '2026-03-15' AS day", "_event")
    write(settled, Settled)
    found = {str(each.causation_id): each for each in map(read, stored(shop)[2:])}
    assert {cause: (each.id, each.correlation_id) for cause, each in found.items()} == {
        "first": ("settled-a-2026-03-15", "order"),
        "second": ("settled-b-2026-03-15", "second"),
    }
    for cause, each in found.items():
        parent, child = traces[cause], each.traceparent
        assert child is not None
        assert (child[:36], child[36:52] == parent[36:52]) == (parent[:36], False)  # the same trace, another span

    copies = causes.where("order_id = 'a'").selectExpr("order_id", "_event", "_event.id AS cause", "'c' AS shared")
    options = {"idColumn": "_event.key", "timeColumn": "_event.time"}
    write(copies, Settled, correlationColumn="shared", causationColumn="cause", **options)
    last = read(stored(shop)[-1])
    assert (last.id, last.correlation_id, last.causation_id) == ("a", "c", "first")
    assert last.time == read(stored(shop)[0]).time


def test_events_of_a_cause_are_stored_once_whatever_becomes_of_their_order(
    spark: SparkSession, shop: JetStream, server: NatsServer, write: Any, tmp_path: Path
) -> None:
    write(flagged(spark, 200), Flagged)
    causes = events(spark, app, Flagged, servers=server.url, endingOffsets=201)
    # Of each cause two equal events, and another one.
    made = causes.selectExpr("order_id", "explode(array(cents, cents, 1000)) AS cents", "_event")
    write(made, Flagged)
    assert len(stored(shop)) == 200 + 600
    write(made.coalesce(1), Flagged)
    write(made.repartition(5, "order_id").sortWithinPartitions(F.desc("_event.sequence"), "cents"), Flagged)
    narrow = made.selectExpr("order_id", "cents", "struct(_event.id, _event.correlation) AS _event")
    write(narrow.distinct(), Flagged)
    stream = stream_events(spark, app, Flagged, servers=server.url, startingOffsets="earliest", maxOffsetsPerTrigger=70)
    derive = stream.where("_event.sequence <= 200").select("order_id", "cents", "_event")
    write(derive, Flagged, checkpoint=str(tmp_path / "c"), until_now=True).awaitTermination()
    assert len(stored(shop)) == 800


def test_an_id_of_the_class_is_used_where_it_has_one(spark: SparkSession, shop: JetStream, write: Any) -> None:
    frame = spark.createDataFrame([("a", NOW.date()), ("b", None), ("c", None)], "order_id string, day date").coalesce(
        1
    )
    write(frame, Settled)
    write(frame, Settled)  # rows without an id of their own are new rows of another write
    ids = [read(message).id for message in stored(shop)]
    assert ids[0] == "settled-a-2026-03-15"
    assert (len(ids), len(set(ids))) == (5, 5)


def test_several_types_of_events_are_written_from_one_frame(
    spark: SparkSession, shop: JetStream, server: NatsServer, write: Any
) -> None:
    rows = [
        ("order.flagged", ("a", 1), None),
        ("order.settled", None, ("b", NOW.date())),
        ("order.flagged", ("c", 2), None),
    ]
    schema = (
        "type string, order_flagged struct<order_id: string, cents: long>, "
        "order_settled struct<order_id: string, day: date>"
    )
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    write(frame, Flagged, Settled)
    expected = [Flagged(order_id="a", cents=1), Settled(order_id="b", day=NOW.date()), Flagged(order_id="c", cents=2)]
    assert [read(message).event for message in stored(shop)] == expected
    again = events(spark, app, Flagged, Settled, servers=server.url)
    write(again, Flagged, Settled)  # a frame as it was read
    assert Counter(read(message).event for message in stored(shop)) == Counter(expected * 2) - Counter([expected[1]])
    wrong = [
        ("order.lost", None, None),
        ("order.flagged", None, ("b", None)),
        (None, None, None),
        ("order.settled", ("a", 1), ("a", None)),
    ]
    with pytest.raises(InvalidRows, match="4 of 4 rows") as caught:
        write(spark.createDataFrame(wrong, schema), Flagged, Settled)
    assert "field 'order_flagged': type is 'order.flagged': expected a value there and nowhere" in str(caught.value)
    assert "field 'type': 'order.lost': expected one of order.flagged, order.settled" in str(caught.value)


def test_sql_inserts_events(spark: SparkSession, shop: JetStream, server: NatsServer) -> None:
    flagged(spark, 5).createOrReplaceTempView("derived_input")
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW derived_output (order_id string, cents bigint) USING jetstream_events "
        f"OPTIONS (app 'support.derived:app', type 'order.flagged', servers '{server.url}')"
    )
    spark.sql("INSERT INTO derived_output SELECT * FROM derived_input")
    assert sorted(read(message).event.cents for message in stored(shop)) == [0, 1, 2, 3, 4]


# ---- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "kind", "options", "message"),
    [
        ("'a' AS order_id", Flagged, {}, r"Flagged\.cents: required, and not there; expected int64"),
        ("'a' AS order_id, id AS cents, 1 AS extra", Flagged, {}, r"Flagged\.extra: not a field; fields are at, cents"),
        ("'a' AS order_id, 'b' AS cents", Flagged, {}, r"Flagged\.cents: expected int64, got string"),
        ("'a' AS order_id, id AS cents, array(1) AS parts", Flagged, {}, r"Flagged\.parts\[\]: expected struct"),
        (
            "'a' AS order_id, id AS cents, timestamp_ntz '2026-03-15' AS at",
            Flagged,
            {},
            r"Flagged\.at: expected a timestamp",
        ),
        ("'a' AS order_id, id AS cents", Flagged, {"idColumn": "nr"}, "column 'nr': the frame has no such column"),
        (
            "'a' AS order_id, id AS cents",
            Flagged,
            {"timeColumn": "cents"},
            "timeColumn='cents' is int64: expected a time",
        ),
        ("'a' AS order_id, id AS cents, id AS _event", Flagged, {}, "causeColumn='_event' is int64: expected a struct"),
        (
            "'a' AS order_id, id AS cents, id AS _unreadable",
            Flagged,
            {},
            "column '_unreadable': messages that could not",
        ),
        (
            "'a' AS place",
            Old,
            {},
            "Old is version 1 of 'order.moved': expected the newest one, Moved, whose version is 2",
        ),
        ("'a' AS place", Moved, {"invalid": "drop"}, "invalid='drop': expected fail or dead_letter"),
        ("'a' AS place", Moved, {"checkpoint": "/tmp/x"}, "checkpoint='/tmp/x': expected a streaming frame"),
        ("'a' AS place", Moved, {"msgIdColumn": "place"}, "unknown option 'msgIdColumn'"),
    ],
)
def test_a_frame_that_is_not_of_the_contract_is_refused_before_anything_runs(
    spark: SparkSession, write: Any, columns: str, kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):  # no server is asked
        write(spark.range(1).selectExpr(*columns.split(", ")), kind, **options)


def test_calls_that_cannot_be_are_refused(spark: SparkSession, server: NatsServer, tmp_path: Path) -> None:
    frame = flagged(spark, 1)
    with pytest.raises(ConfigError, match="expected one or more classes of events; app 'derived' declares"):
        write_events(frame, app, servers=server.url)

    class Foreign(Event, type="foreign", subject="derived.foreign"):
        x: int

    with pytest.raises(ConfigError, match="Foreign is not declared"):
        write_events(frame, app, Foreign, servers=server.url)
    stream = spark.readStream.format("rate").load().selectExpr("'a' AS order_id", "value AS cents")
    with pytest.raises(ConfigError, match="a streaming frame needs checkpoint="):
        write_events(stream, app, Flagged, servers=server.url)
    with pytest.raises(ConfigError, match=r"interval_s=1\.0: expected None with until_now=True"):
        write_events(stream, app, Flagged, servers=server.url, checkpoint="x", until_now=True, interval_s=1.0)
    options = {"app": "support.derived:app", "type": "order.flagged", "servers": server.url}
    with pytest.raises(Exception, match=r'mode\("overwrite"\): events are added to a stream'):
        frame.write.format("jetstream_events").options(**options).mode("overwrite").save()
    with pytest.raises(Exception, match="the option 'app' is missing"):
        frame.write.format("jetstream_events").mode("append").save()


# ---- invalid rows ----------------------------------------------------------------------------------------------------

BAD = [
    "if(cents % 4 = 1, '', order_id) AS order_id",
    "if(cents % 4 = 2, -1, cents) AS cents",
    "if(cents % 4 = 3, 'odd', 'late') AS why",
]


def test_rows_that_break_rules_are_counted_over_the_whole_frame(
    spark: SparkSession, shop: JetStream, write: Any
) -> None:
    """Each rule by itself is in `test_spark_event_encoding`."""
    frame = flagged(spark, 40, partitions=3).selectExpr(*BAD)
    with pytest.raises(InvalidRows, match="30 of 40 rows of the frame are not valid events") as caught:
        write(frame, Flagged)
    assert sorted(reason.partition(" (first: row ")[0] for reason in caught.value.reasons) == [
        "10 x order.flagged field 'cents': Expected int >= 0",
        "10 x order.flagged field 'order_id': Expected str of length >= 1",
        "10 x order.flagged field 'why': 'odd' is not Why: 'odd' is not a valid Why",
    ]
    assert stored(shop) == []


def test_one_bad_row_in_the_last_partition_keeps_all_others_back(
    spark: SparkSession, shop: JetStream, write: Any
) -> None:
    bad = flagged(spark, 5000, partitions=6).withColumn("cents", F.expr("if(cents = 4999, -1, cents)"))
    with pytest.raises(InvalidRows) as caught:
        write(bad, Flagged)
    assert str(caught.value) == (
        "1 of 5000 rows of the frame are not valid events, and none was published: 1 x order.flagged field 'cents': "
        "Expected int >= 0 (first: row 833 of partition 5, key 'o-1'). Correct or filter such rows, or set "
        "invalid=dead_letter to publish the others"
    )
    assert stored(shop) == []


def test_a_bad_row_of_the_format_keeps_its_partition_back(
    spark: SparkSession, shop: JetStream, server: NatsServer
) -> None:
    """Also more rows than are kept in memory, which come in many Arrow batches."""
    options = {"app": "support.derived:app", "type": "order.flagged", "servers": server.url, "maxPendingBytes": "10k"}
    frame = flagged(spark, 30_000, partitions=1)
    bad = frame.withColumn("cents", F.expr("if(cents = 29999, -1, cents)"))
    with pytest.raises(Exception, match="InvalidRows: 1 of 30000 rows of partition 0 are not valid events"):
        bad.write.format("jetstream_events").options(**options).mode("append").save()
    assert stored(shop) == []
    frame.write.format("jetstream_events").options(**options).mode("append").save()
    assert [json.loads(message.data)["data"]["cents"] for message in stored(shop)] == list(range(30_000))


def test_dead_letters_of_rows_are_seen_and_a_redrive_leaves_them_alone(
    spark: SparkSession, shop: JetStream, server: NatsServer, write: Any
) -> None:
    frame = flagged(spark, 1000, partitions=3).withColumn("cents", F.expr("if(cents % 100 = 99, -cents, cents)"))
    write(frame, Flagged, invalid="dead_letter", writeId="once")
    write(frame, Flagged, invalid="dead_letter", writeId="once")  # neither events nor dead letters are stored twice
    assert len(stored(shop)) == 990
    found = dead_letters(spark, app, server.url).where("handler = 'spark'")
    rows = found.selectExpr("key", "get_json_object(string(raw), '$.cents') AS cents", "subject", "stream", "sequence")
    by_cents = sorted(rows.collect(), key=lambda row: -int(row.cents))
    assert [int(row.cents) for row in by_cents] == [-number for number in range(99, 1000, 100)]
    assert (by_cents[0].key, by_cents[0].subject) == ("o-1", "derived.*.flagged")
    assert (by_cents[0].stream, by_cents[0].sequence) == ("spark:once:0:0", 99)
    done = redrive(found, app, server.url)
    assert (done.requested, done.unhandled) == (0, 10)


def test_a_row_that_is_too_large_for_a_dead_letter_fails_the_write(
    spark: SparkSession, shop: JetStream, server: NatsServer, write: Any
) -> None:
    frame = spark.range(2).selectExpr("concat('o', id) AS order_id", "id AS cents", "repeat('x', 2000000 * id) AS note")
    with pytest.raises(UsageError, match="invalid=dead_letter: a row is too large for a dead letter"):
        write(frame.coalesce(1), Flagged, invalid="dead_letter")
    assert letters_of(server) == []


def test_an_application_without_dead_letters_cannot_write_some(
    spark: SparkSession, shop: JetStream, write: Any
) -> None:
    bad = flagged(spark, 3).withColumn("cents", F.lit(-1))
    with pytest.raises(UsageError, match="invalid=dead_letter: app 'silent' has no stream SILENT_DLQ"):
        write(bad, Flagged, app=silent, invalid="dead_letter")
    write(flagged(spark, 3), Flagged, app=silent, invalid="dead_letter")
    assert len(stored(shop)) == 3


# ---- batches that are written again ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "atomic", "async"])
def test_a_named_write_stores_its_rows_once(spark: SparkSession, shop: JetStream, write: Any, mode: str) -> None:
    for _ in range(2):
        write(flagged(spark, 300), Flagged, writeId="daily", publishMode=mode)
    assert len(stored(shop)) == 300
    with pytest.raises(UsageError, match="writeId='daily' has written 300 other rows"):
        write(flagged(spark, 301), Flagged, writeId="daily", publishMode=mode)
    assert len(stored(shop)) == 300


def test_without_exactly_once_each_write_has_new_events(spark: SparkSession, shop: JetStream, write: Any) -> None:
    for _ in range(2):
        write(flagged(spark, 300), Flagged, exactlyOnce=False)
    assert len({read(message).id for message in stored(shop)}) == 600


def test_writes_of_a_batch_are_told_apart_by_their_types(
    spark: SparkSession, shop: JetStream, server: NatsServer, write: Any, tmp_path: Path
) -> None:
    write(flagged(spark, 10), Flagged)
    source = stream_events(spark, app, Flagged, servers=server.url, startingOffsets="earliest")

    def each(batch: DataFrame, _: int) -> None:
        plain = batch.where("_event.sequence <= 10").drop("_event")
        write(plain.selectExpr("order_id"), Settled)
        write(plain.selectExpr("order_id AS place"), Moved)

    for folder in ("one", "one"):
        query = source.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / folder))
        query.trigger(availableNow=True).start().awaitTermination()
    assert Counter(message.subject.rpartition(".")[2] for message in stored(shop)) == {
        "flagged": 10,
        "settled": 10,
        "moved": 10,
    }


def files(folder: Path, number: int, count: int, bad: int | None = None) -> None:
    lines = [
        json.dumps({"order_id": f"o-{each % 7}", "cents": -1 if each == bad else number * count + each})
        for each in range(count)
    ]
    hidden = folder / f".{number:04}.json"
    hidden.write_text("\n".join(lines))
    os.utime(hidden, (time.time(), time.time() - 60 + number))  # the source takes the oldest file first
    hidden.rename(folder / f"{number:04}.json")


def test_a_query_that_a_bad_row_has_failed_continues_with_dead_letters(
    spark: SparkSession, shop: JetStream, server: NatsServer, write: Any, tmp_path: Path
) -> None:
    folder, checkpoint = tmp_path / "in", str(tmp_path / "checkpoint")
    folder.mkdir()
    source = spark.readStream.schema("order_id string, cents long").option("maxFilesPerTrigger", 1).json(str(folder))
    files(folder, 0, 100)
    files(folder, 1, 100, bad=50)
    query = write(source, Flagged, checkpoint=checkpoint, until_now=True, query_name=new_name("typed"))
    with pytest.raises(Exception, match="InvalidRows: 1 of 100 rows of partition 0 are not valid events"):
        query.awaitTermination()
    assert len(stored(shop)) == 100  # of the first batch all, and of the second none
    for _ in range(2):
        query = write(source, Flagged, checkpoint=checkpoint, until_now=True, invalid="dead_letter")
        query.awaitTermination()
        assert len(stored(shop)) == 199
        assert len(letters_of(server)) == 1
        files(folder, 2, 0)


# ---- processes that are killed ---------------------------------------------------------------------------------------


def kill_job(server: NatsServer, tmp_path: Path, **more: Any) -> dict[str, Any]:
    options = {"app": "support.derived:app", "type": "order.flagged", "servers": server.url, "invalid": "dead_letter"}
    return {
        "input": str(tmp_path / "in"),
        "checkpoint": str(tmp_path / "checkpoint"),
        "options": options,
        "typed": True,
        **more,
    }


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
def test_every_event_is_stored_once_whatever_is_killed(
    moment: str, shop: JetStream, server: NatsServer, tmp_path: Path, drivers: Any
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        rows = [f"{number * 1000 + each},o-{each % 7}".rjust(300) for each in range(1000)]
        rows[7] = f"-{number + 1},bad".rjust(300)
        (tmp_path / "in" / f"{number}.txt").write_text("\n".join(rows))
    killed = drivers(kill_job(server, tmp_path, hangs=moment), failures=True)
    second = drivers(kill_job(server, tmp_path), failures=True)
    killed.go()
    killed.wait_for(f"hangs {moment}")
    killed.kill()
    second.go()
    second.finish()
    found = sorted(read(message).event.cents for message in stored(shop))
    assert found == [number for number in range(3000) if number % 1000 != 7]
    assert sorted(json.loads(each.data)["cents"] for each in letters_of(server)) == [-3, -2, -1]
