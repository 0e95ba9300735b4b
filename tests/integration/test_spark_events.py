"""Typed events on Spark: a real server, a real Spark, and rows that have the values of live handlers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import typed
from support.archive_ranges import archive_stream
from support.names import new_name
from support.typed import Moved, Old, Paid, Placed, Refunded, Shaped, app, message, placed, unreadable

from jetspark import StreamConfig
from jetspark.app.columns import EventColumns
from jetspark.blocking import JetStream
from jetspark.errors import ConfigError, StreamNotFound
from jetspark.lake.reading import ArchiveRoot
from jetspark.server import NatsServer

pytest.importorskip("pyspark")

from jetspark.spark import events, stream_events

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.timeout(600)]

COUNT = 60


@pytest.fixture
def shop(server: NatsServer, js: JetStream) -> Iterator[JetStream]:
    """With the application's stream: ``COUNT`` orders, each placed and then paid, and a foreign message."""
    try:
        js.delete_stream(app.stream)
    except StreamNotFound:
        pass
    asyncio.run(app.apply(server.url))
    js.publish("typed.elsewhere", b"not an event")
    fill(js, 0, COUNT)
    yield js
    js.delete_stream(app.stream)


def fill(js: JetStream, first: int, last: int) -> None:
    for number in range(first, last):
        js.publish(*message(placed(number), f"placed-{number}"))
        js.publish(*message(Paid(order_id=f"o-{number % 7}", cents=number), f"paid-{number}"))


def break_some(js: JetStream) -> dict[int, str]:
    """The sequences of messages that cannot be read, and why."""
    return {js.publish(subject, data).sequence: error for error, subject, data in unreadable()}


def until_now(frame: DataFrame, folder: Path) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").option("path", str(folder / "rows"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def read_back(spark: SparkSession, folder: Path) -> list[Any]:
    return sorted(spark.read.parquet(str(folder / "rows")).collect(), key=lambda row: row["_event"]["sequence"])


def by_sequence(frame: DataFrame) -> list[Any]:
    return sorted(frame.collect(), key=lambda row: row["_event"]["sequence"])


# ---- batch -----------------------------------------------------------------------------------------------------------


def test_a_batch_has_the_events_that_were_published(spark: SparkSession, server: NatsServer, shop: JetStream) -> None:
    table = events(spark, app, Placed, servers=server.url, minPartitions=3).toArrow().sort_by("visits")
    columns = EventColumns(Placed.__contract__)
    assert table.select(columns.schema.names).schema.equals(columns.schema)
    [batch] = table.combine_chunks().to_batches()
    found = columns.from_arrow(batch)
    assert found == ([placed(number) for number in range(COUNT)], {})
    first = table.column("_event")[0].as_py()
    stored = shop.stream(app.stream).get_message(2)
    assert first == {
        "id": "placed-0",
        "key": "o-0",
        "time": typed.NOW,
        "type": "order.placed",
        "version": 2,
        "source": "/typed",
        "correlation": "placed-0",
        "causation": "cause-of-placed-0",
        "subject": "typed.o-0.placed",
        "sequence": 2,
        "stored": stored.timestamp,
        "stream": "TYPED",
        "headers": None,
    }


def test_several_types_have_a_column_each(spark: SparkSession, server: NatsServer, shop: JetStream) -> None:
    shop.publish(*message(Refunded(order_id="o-1", cents=7), "r"))
    frame = events(spark, app, Paid, Refunded, servers=server.url)
    assert frame.columns == ["type", "order_paid", "order_refunded", "_event"]
    totals = {
        row.type: row.cents
        for row in frame.groupBy("type").agg({"order_paid.cents": "sum"}).toDF("type", "cents").collect()
    }
    assert totals == {"order.paid": sum(range(COUNT)), "order.refunded": None}
    [refund] = frame.where("order_refunded.cents = 7").collect()
    assert (refund.order_paid, refund["_event"]["sequence"]) == (None, 2 * COUNT + 2)


def test_older_versions_are_upcast(spark: SparkSession, server: NatsServer, shop: JetStream) -> None:
    shop.publish(*message(placed(1), "old", schemaversion=1, data=json.loads(typed.V1)))
    [row] = events(spark, app, Placed, servers=server.url).where("order_id = 'o-9'").collect()
    assert [tuple(line) for line in row.lines] == [("a", 1), ("b", 1)]
    assert row["_event"]["version"] == 1


def test_all_options_of_the_source_select_the_same_messages(
    spark: SparkSession, server: NatsServer, shop: JetStream
) -> None:
    def cents(**options: Any) -> list[int]:
        return sorted(row.cents for row in events(spark, app, Paid, servers=server.url, **options).collect())

    everything = list(range(COUNT))
    assert cents(filtered=True) == cents(maxRecordsPerPartition=7) == cents(stream="TYPED") == everything
    assert cents(subjects="typed.o-1.paid") == everything[1::7]
    assert cents(startingOffsets=4, endingOffsets=10) == [1, 2, 3]  # each number is at 2n + 2 and 2n + 3
    assert cents(startingOffsets={"TYPED": 2 * COUNT}) == everything[-1:]
    time.sleep(0.01)
    shop.publish(*message(Paid(order_id="o", cents=1000), "late"))
    late = shop.stream("TYPED").get_message(2 * COUNT + 2).timestamp
    assert cents(startingTimestamp=late.isoformat()) == [1000]
    assert cents(endingTimestamp=late.isoformat()) == everything


def test_another_stream_may_have_the_events(spark: SparkSession, server: NatsServer, js: JetStream) -> None:
    """Such as a work queue, which is read without a consumer."""
    name = new_name()
    config = StreamConfig(name=name, subjects=["typed.*.paid"], retention="workqueue", allow_direct=True)
    stream = js.create_stream(config)
    for number in range(5):
        js.publish(*message(Paid(order_id="o", cents=number), f"p{number}"))
    found = by_sequence(events(spark, app, Paid, servers=server.url, streamPattern=f"{name}.*"))
    assert [(row.cents, row["_event"]["id"], row["_event"]["stream"]) for row in found] == [
        (number, f"p{number}", name) for number in range(5)
    ]
    assert stream.info().state.messages == 5
    js.delete_stream(name)


def test_cloudevents_in_binary_mode_are_read_and_headers_come_with_the_option(
    spark: SparkSession, server: NatsServer, shop: JetStream
) -> None:
    headers = {"ce-specversion": "1.0", "ce-id": "b", "ce-source": "/x", "ce-type": "order.paid"}
    shop.publish("typed.o.paid", b'{"order_id": "o", "cents": 500}', headers=headers)
    frame = events(spark, app, Paid, servers=server.url, startingOffsets=2 * COUNT, includeHeaders=True)
    plain, binary = by_sequence(frame)
    assert plain["_event"]["headers"] == {}
    assert (binary["_event"]["id"], binary["_event"]["source"], binary["_event"]["version"]) == ("b", "/x", 1)
    assert binary["_event"]["headers"]["ce-id"] == ["b"]


def test_fewer_columns_are_honoured_in_a_schema_of_ones_own(
    spark: SparkSession, server: NatsServer, shop: JetStream
) -> None:
    options = {"servers": server.url, "app": "support.typed:app", "type": "order.paid"}
    reader = spark.read.format("jetstream_events").options(**options)
    narrow = reader.schema("cents bigint, _event struct<sequence: bigint>").load()
    assert [(row.cents, row["_event"].asDict()) for row in by_sequence(narrow)][:2] == [
        (0, {"sequence": 3}),
        (1, {"sequence": 5}),
    ]


def test_a_view_in_sql(spark: SparkSession, server: NatsServer, shop: JetStream) -> None:
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW paid USING jetstream_events "
        f"OPTIONS (app 'support.typed:app', type 'order.paid', servers '{server.url}')"
    )
    query = "SELECT _event.key AS key, sum(cents) AS cents FROM paid GROUP BY _event.key ORDER BY key LIMIT 2"
    assert list(map(tuple, spark.sql(query).collect())) == [
        ("o-0", sum(range(0, COUNT, 7))),
        ("o-1", sum(range(1, COUNT, 7))),
    ]


def test_older_events_come_from_an_archive_of_the_stream(
    spark: SparkSession, server: NatsServer, shop: JetStream, tmp_path: Path
) -> None:
    broken = break_some(shop)
    given: Any = {"servers": server.url, "archive": str(tmp_path / "lake"), "unreadable": "keep"}
    before = by_sequence(events(spark, app, Paid, servers=server.url, unreadable="keep"))
    archive_stream(shop, tmp_path / "lake", app.stream, until=COUNT)
    shop.stream(app.stream).purge(up_to_sequence=COUNT - 10)
    fill(shop, COUNT, COUNT + 5)
    after = by_sequence(events(spark, app, Paid, **given))
    assert after[: len(before)] == before
    assert [row.cents for row in after if row.cents is not None] == list(range(COUNT + 5))
    assert len(after) == COUNT + 5 + len(broken)
    root = ArchiveRoot(str(tmp_path / "lake"))
    frame = stream_events(spark, app, Paid, **given | {"archive": root}, startingOffsets="earliest")
    until_now(frame, tmp_path)
    assert read_back(spark, tmp_path) == after


# ---- messages that cannot be read ------------------------------------------------------------------------------------


def test_the_first_unreadable_message_fails_a_read(spark: SparkSession, server: NatsServer, shop: JetStream) -> None:
    first = min(break_some(shop))
    text = rf"stream 'TYPED', sequence {first}, subject 'typed.o-1.paid': NotJson: .* set unreadable='keep'"
    with pytest.raises(Exception, match=text):
        events(spark, app, Paid, servers=server.url).collect()
    assert events(spark, app, Placed, servers=server.url).count() == COUNT


def test_unreadable_messages_are_dropped_and_counted(spark: SparkSession, server: NatsServer, shop: JetStream) -> None:
    from pyspark.sql import Observation

    broken = break_some(shop)
    observation = Observation()
    frame = events(spark, app, Paid, servers=server.url, unreadable="drop", observation=observation)
    assert "_unreadable" not in frame.columns
    assert sorted(row.cents for row in frame.collect()) == list(range(COUNT))
    assert observation.get == {"rows": COUNT, "unreadable": len(broken), "first_unreadable": min(broken)}
    options = {"servers": server.url, "app": "support.typed:app", "type": "order.paid", "unreadable": "drop"}
    assert spark.read.format("jetstream_events").options(**options).load().count() == COUNT


def test_unreadable_messages_are_kept_with_reason_and_bytes(
    spark: SparkSession, server: NatsServer, shop: JetStream
) -> None:
    broken = break_some(shop)
    frame = events(spark, app, Paid, Placed, servers=server.url, unreadable="keep")
    kept = by_sequence(frame.where("_unreadable IS NOT NULL"))
    assert {row["_event"]["sequence"]: row["_unreadable"]["error"] for row in kept} == broken
    stored = [shop.stream(app.stream).get_message(sequence) for sequence in broken]
    assert [bytes(row["_unreadable"]["data"]) for row in kept] == [each.data for each in stored]
    assert all(row.order_paid is None and row.order_placed is None for row in kept)
    assert frame.where("_unreadable IS NULL").toArrow().num_rows == 2 * COUNT


# ---- streaming -------------------------------------------------------------------------------------------------------


def test_a_stream_continues_from_its_checkpoint(
    spark: SparkSession, server: NatsServer, shop: JetStream, tmp_path: Path
) -> None:
    def frame() -> DataFrame:
        return stream_events(spark, app, Paid, servers=server.url, startingOffsets="earliest", maxOffsetsPerTrigger=50)

    until_now(frame(), tmp_path)
    fill(shop, COUNT, COUNT + 20)
    query = until_now(frame(), tmp_path)
    assert [row.cents for row in read_back(spark, tmp_path)] == list(range(COUNT + 20))
    assert [each["numInputRows"] for each in query.recentProgress] == [20]


def test_a_stream_has_its_unreadable_messages_in_its_metrics(
    spark: SparkSession, server: NatsServer, shop: JetStream, tmp_path: Path
) -> None:
    broken = break_some(shop)
    frame = stream_events(spark, app, Paid, servers=server.url, startingOffsets="earliest", unreadable="drop")
    query = until_now(frame, tmp_path)
    assert [row.cents for row in read_back(spark, tmp_path)] == list(range(COUNT))
    [found] = [each["observedMetrics"]["jetstream_events:order.paid"] for each in query.recentProgress]
    assert found.asDict() == {"rows": COUNT, "unreadable": len(broken), "first_unreadable": min(broken)}
    kept = stream_events(spark, app, Paid, servers=server.url, startingOffsets="earliest", unreadable="keep")
    until_now(kept, tmp_path / "kept")
    rows = read_back(spark, tmp_path / "kept")
    assert {row["_event"]["sequence"] for row in rows if row["_unreadable"] is not None} == set(broken)
    assert len(rows) == COUNT + len(broken)


def test_a_stream_fails_at_an_unreadable_message_and_continues_when_it_may_be_dropped(
    spark: SparkSession, server: NatsServer, shop: JetStream, tmp_path: Path
) -> None:
    def frame(unreadable: str) -> DataFrame:
        given: Any = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 40, "unreadable": unreadable}
        return stream_events(spark, app, Paid, servers=server.url, **given)

    first = min(break_some(shop))
    fill(shop, COUNT, COUNT + 5)
    with pytest.raises(Exception, match=rf"sequence {first}, subject 'typed.o-1.paid': NotJson"):
        until_now(frame("fail"), tmp_path)
    until_now(frame("drop"), tmp_path)
    assert [row.cents for row in read_back(spark, tmp_path)] == list(range(COUNT + 5))


def test_streams_of_two_types_are_joined_within_a_watermark(
    spark: SparkSession, server: NatsServer, shop: JetStream, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    given: Any = {"servers": server.url, "startingOffsets": "earliest"}
    sides = [stream_events(spark, app, kind, **given) for kind in (Placed, Paid)]
    left, right = (
        side.withColumn("stored", F.col("_event.stored")).withWatermark("stored", "10 minutes") for side in sides
    )
    joined = left.alias("l").join(
        right.alias("r"), F.expr("l.visits = r.cents AND r.stored BETWEEN l.stored AND l.stored + interval 1 minute")
    )
    until_now(joined.select("l.order_id", "r.cents", "r._event"), tmp_path)
    assert [(row.order_id, row.cents) for row in read_back(spark, tmp_path)] == [
        (f"o-{number % 7}", number) for number in range(COUNT)
    ]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_refused(spark: SparkSession, server: NatsServer, shop: JetStream) -> None:
    from pyspark.sql import Observation

    with pytest.raises(
        ConfigError, match="expected one or more classes of events; app 'typed' declares Old, Moved, Paid"
    ):
        events(spark, app, servers=server.url)
    with pytest.raises(ConfigError, match="int is not an event type"):
        events(spark, app, int, servers=server.url)
    with pytest.raises(ConfigError, match=r"'order\.moved' also has events of version 1, which are read as Old"):
        events(spark, app, Moved, servers=server.url)
    assert events(spark, app, Moved, Old, servers=server.url).columns[1:3] == ["order_moved_v1", "order_moved_v2"]
    with pytest.raises(ConfigError, match="observation: expected with unreadable='drop'"):
        events(spark, app, Paid, servers=server.url, observation=Observation())
    with pytest.raises(Exception, match=r"Shaped.parts\[\].inside\[\]: Shape contains itself"):
        events(spark, app, Shaped, servers=server.url)
    with pytest.raises(Exception, match="unreadable='skip': expected fail, drop or keep"):
        events(spark, app, Paid, servers=server.url, unreadable="skip")
    with pytest.raises(Exception, match="unknown option 'streams'; did you mean 'stream'"):
        events(spark, app, Paid, servers=server.url, streams="X")  # type: ignore[call-arg]
