"""Operations data on Spark: dead letters as frames, redrives that a query chooses, and metrics of streaming queries."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import typed
from support.apps import running, until
from support.names import new_name, new_stream
from support.patience import PATIENCE_S

from jetspark.app import App, Event, Reject
from jetspark.blocking import JetStream, connect
from jetspark.errors import ConfigError, StreamNotFound
from jetspark.server import NatsServer

pytest.importorskip("pyspark")
import prometheus_client
from pyspark.sql import functions as F

from jetspark.spark import QueryMetrics, dead_letters, redrive, unreadable_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Noted(Event, type="noted", version=2, key="name", subject="noted.{name}"):
    name: str
    number: int


class Failing:
    """An application whose handler rejects even numbers until it is repaired."""

    def __init__(self) -> None:
        self.name = new_name("notes")
        self.app = App(self.name, stream=self.name.upper(), subjects=["noted.>"], source="/notes")
        self.app.handler(Noted, durable="n")(self.note)
        self.done: list[int] = []
        self.is_repaired = False

    async def note(self, event: Noted) -> None:
        if event.number % 2 == 0 and not self.is_repaired:
            raise Reject(f"number {event.number} is even")
        self.done.append(event.number)

    async def count(self, url: str) -> int:
        async with self.app.connect(url) as client:
            return len([each async for each in client.dead_letters.list()])


@pytest.fixture
def failing(own: NatsServer) -> Failing:
    """With 3 dead letters of 2 keys, one of which waits behind another, and one that is no event."""
    made = Failing()

    async def fail() -> None:
        await made.app.apply(own.url)
        async with running(made.app, own.url), made.app.connect(own.url) as client:
            await client.publish(Noted(name="a", number=2), id="first", correlation_id="order")
            await client.publish(Noted(name="a", number=3))
            await client.publish(Noted(name="b", number=4))
            await client.js.publish("noted.c", b"{}", headers={"X-Shop": "7"})

            async def there_are_four() -> bool:
                return await made.count(own.url) == 4

            await until(there_are_four)

    asyncio.run(fail())
    return made


def test_dead_letters_are_rows_and_a_query_chooses_those_to_redrive(
    failing: Failing, own: NatsServer, spark: SparkSession
) -> None:
    app, url = failing.app, own.url
    letters = dead_letters(spark, app, url).orderBy("sequence")
    rows = [row.asDict(recursive=True) for row in letters.collect()]
    assert [(row["status"], row["handler"], row["key"], row["sequence"]) for row in rows] == [
        ("open", "n", "a", 1),
        ("behind", "n", "a", 2),
        ("open", "n", "b", 3),
        ("open", "n", "c", 4),
    ]
    first, behind, _, foreign = rows
    assert (first["error"], first["message"], first["transient"]) == (
        "jetspark.app.handlers.retry.Reject",
        "number 2 is even",
        False,
    )
    assert (first["stream"], first["subject"], first["attempts"]) == (failing.name.upper(), "noted.a", 1)
    assert first["stored"] <= first["failed"]
    assert first["payload"] == '{"name":"a","number":2}'
    assert {name: first["event"][name] for name in ("id", "type", "version", "source", "correlation", "causation")} == {
        "id": "first",
        "type": "noted",
        "version": 2,
        "source": "/notes",
        "correlation": "order",
        "causation": None,
    }
    assert (behind["behind"], behind["error"], behind["payload"]) == (1, None, '{"name":"a","number":3}')
    assert (foreign["event"], foreign["payload"], bytes(foreign["raw"])) == (None, None, b"{}")
    assert foreign["headers"] == {"X-Shop": ["7"]}

    chosen = letters.where(F.col("message").like("%is even") & (F.col("key") == "a"))
    would = redrive(chosen, app, url, dry_run=True)
    assert (would.requested, would.is_dry_run) == (1, True)
    assert dead_letters(spark, app, url).count() == 4  # nothing was done

    failing.is_repaired = True

    async def repair() -> None:
        async with running(app, url):
            # As a driver does: another thread, while the workers go on.
            done = await asyncio.to_thread(redrive, chosen, app, url, wait_s=PATIENCE_S)
            assert done.results is not None
            assert (done.requested, done.results.handled) == (1, 2)  # the one behind it followed

    asyncio.run(repair())
    assert sorted(failing.done) == [2, 3]
    assert {row.key for row in dead_letters(spark, app, url).select("key").collect()} == {"b", "c"}
    again = redrive(chosen, app, url)  # the frame is read again, and finds them gone
    assert (again.requested, again.reason) == (0, "the frame has no rows")


def test_numbers_of_dead_letters_that_are_gone_are_passed_over(
    failing: Failing, own: NatsServer, spark: SparkSession
) -> None:
    stale = spark.createDataFrame([(900,), (901,), (905,)], "number long")
    done = redrive(stale, failing.app, own.url)
    assert (done.requested, done.reason) == (0, "no dead letter matches; `jetspark dlq ls` lists all")
    with pytest.raises(ConfigError, match="columns n: expected 'number', which dead_letters"):
        redrive(spark.range(1).toDF("n"), failing.app, own.url)
    with pytest.raises(ConfigError, match="one redrive takes 524288: choose fewer"):
        redrive(spark.range(0, 300_000, 2).toDF("number"), failing.app, own.url)


def test_dead_letters_of_an_application_that_was_not_applied_are_an_error(own: NatsServer, spark: SparkSession) -> None:
    with pytest.raises(StreamNotFound):
        dead_letters(spark, Failing().app, own.url)
    with pytest.raises(ConfigError, match="unknown option 'serverz'"):
        dead_letters(spark, Failing().app, own.url, serverz="x")  # type: ignore[call-arg]


def test_messages_that_are_not_events_are_rows_by_type_producer_and_reason(
    own: NatsServer, spark: SparkSession
) -> None:
    """Every error that reading has; good events, also of types without columns, and foreign messages are no rows."""
    asyncio.run(typed.app.apply(own.url))
    with connect(own.url) as client:
        js = client.jetstream()
        js.publish("typed.elsewhere", b"not an event")
        js.publish(*typed.message(typed.placed(1), "good"))
        js.publish(*typed.message(typed.Shaped(parts={}), "shaped"))
        expected = []
        for error, subject, data in typed.unreadable():
            expected.append((js.publish(subject, data).sequence, error, subject, data))
        headers = {"ce-specversion": "1.0", "ce-id": "b", "ce-source": "/x", "ce-type": "order.paid"}
        js.publish("typed.o.paid", b'{"order_id": "o", "cents": 500}', headers=headers)
        last = js.publish("typed.o.paid", b'{"order_id": "o"}', headers=headers).sequence
    frame = unreadable_events(spark, typed.app, own.url)
    rows = sorted(frame.collect(), key=lambda row: row.sequence)
    found = [(row.sequence, row.error, row.subject, bytes(row.raw)) for row in rows]
    whole = [each for each in expected if b"9223372036854775808" not in each[3]]  # Python has room for that number
    assert found == [*whole, (last, "MissingField", "typed.o.paid", b'{"order_id": "o"}')]
    counts = frame.groupBy("type", "source", "error", "field").count().collect()
    assert {tuple(row) for row in counts if row.error == "MissingField"} == {
        ("order.paid", "/typed", "MissingField", "cents", 1),
        ("order.paid", "/x", "MissingField", "cents", 1),
    }
    ranged = unreadable_events(spark, typed.app, own.url, startingOffsets=last)
    assert [(row.key, row.version, row.reason) for row in ranged.collect()] == [(None, 1, "required, and not there")]


# ---- metrics ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def scraped(server: NatsServer, spark: SparkSession) -> Iterator[Any]:
    """Reads a metric as Prometheus does, over HTTP."""
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    metrics = QueryMetrics(server.url, registry=registry)
    spark.streams.addListener(metrics)
    httpd, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)

    def read(name: str) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{httpd.server_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        found = [(key, value) for key, _, value in lines if key.partition("{")[0] == name]
        return {key.partition("{")[2].rstrip("}"): float(value) for key, value in found}

    try:
        yield read
    finally:
        spark.streams.removeListener(metrics)
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def test_a_query_has_its_rows_bytes_and_lag_until_it_ends(
    scraped: Any, js: JetStream, server: NatsServer, spark: SparkSession, tmp_path: Path
) -> None:
    stream = new_stream(js)
    name, query_name = stream.name, new_name("lagging")
    for number in range(10):
        js.publish(f"{name}.x", b"%0100d" % number)
    frame = spark.readStream.format("jetstream").options(servers=server.url, stream=name, startingOffsets="earliest")
    query = (
        frame.load()
        .writeStream.format("noop")
        .queryName(query_name)
        .option("checkpointLocation", str(tmp_path))
        .trigger(processingTime="1 hour")
        .start()
    )
    label, both = f'query="{query_name}"', f'query="{query_name}",stream="{name}"'
    wait_for(lambda: scraped("jetspark_spark_query_batches_total").get(label, 0) >= 1)
    assert scraped("jetspark_spark_query_rows_total")[label] == 10
    mean = stream.info().state.bytes / 10
    assert scraped("jetspark_spark_query_bytes_total")[label] == pytest.approx(10 * mean)
    assert scraped("jetspark_spark_query_batch_seconds")[label] > 0
    assert scraped("jetspark_spark_query_lag_messages") == {both: 0}
    assert scraped("jetspark_spark_query_lag_seconds") == {both: 0}

    for number in range(4):  # the query does not run again within the hour, and is seen to fall behind
        js.publish(f"{name}.x", b"%0100d" % number)
    assert scraped("jetspark_spark_query_lag_messages") == {both: 4}
    age_s = scraped("jetspark_spark_query_lag_seconds")[both]
    time.sleep(0.05)
    assert 0 < age_s < scraped("jetspark_spark_query_lag_seconds")[both]
    assert scraped("jetspark_spark_query_lag_bytes")[both] > 400

    query.stop()
    wait_for(lambda: scraped("jetspark_spark_query_rows_total") == {})
    assert scraped("jetspark_spark_query_lag_messages") == {}
    assert scraped("jetspark_spark_queries_failed_total") == {"": 0}


def test_a_query_that_fails_is_counted_and_a_stream_that_is_gone_leaves_the_others(
    scraped: Any, js: JetStream, server: NatsServer, spark: SparkSession, tmp_path: Path
) -> None:
    kept, gone = new_stream(js), new_stream(js)
    queries = []
    for stream in (kept, gone):
        js.publish(f"{stream.name}.x", b"1")
        frame = spark.readStream.format("jetstream").options(
            servers=server.url, stream=stream.name, startingOffsets="earliest"
        )
        writer = frame.load().writeStream.format("noop").queryName(f"of_{stream.name}")
        writer = writer.option("checkpointLocation", str(tmp_path / stream.name)).trigger(processingTime="1 hour")
        queries.append(writer.start())
    wait_for(lambda: len(scraped("jetspark_spark_query_lag_messages")) == 2)
    js.delete_stream(gone.name)
    assert list(scraped("jetspark_spark_query_lag_messages")) == [f'query="of_{kept.name}",stream="{kept.name}"']
    assert scraped("jetspark_spark_query_lags_unread_total")[""] >= 1
    for query in queries:
        query.stop()
    broken = frame.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / gone.name)).start()
    wait_for(lambda: scraped("jetspark_spark_queries_failed_total") == {"": 1})
    assert broken.exception() is not None


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
