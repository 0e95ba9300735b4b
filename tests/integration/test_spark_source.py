"""Streams as Spark sources: a real server, a real Spark."""

from __future__ import annotations

import datetime
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from support.certificates import Certificates
from support.names import new_name

from jetspark import KVConfig, NKey, StreamConfig, TLSConfig, UserPassword
from jetspark.blocking import JetStream, Stream, connect
from jetspark.core.auth import Auth, create_seed, public_key
from jetspark.errors import JetSparkError
from jetspark.server import NatsCluster, NatsServer, ServerTLS, User

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader

pytest_plugins = ["support.sparks"]

FINISH_S = 200


@pytest.fixture
def stream(js: JetStream) -> Stream:
    """With messages 1 to 100: the number as data, on three subjects in turn."""
    name = new_name()
    made = js.create_stream(StreamConfig(name=name, subjects=[f"{name.lower()}.>"], allow_batched=True))
    fill(js, made, 100)
    return made


T = TypeVar("T")


def fill(js: JetStream, stream: Stream, count: int) -> None:
    prefix = stream.name.lower()
    with js.fast_batch() as batch:
        for number in range(1, count + 1):
            batch.add(f"{prefix}.{number % 3}", b"%d" % number)


def batch(spark: SparkSession, server: NatsServer, stream: str, **options: Any) -> DataFrameReader:
    return spark.read.format("jetstream").option("servers", server.url).option("stream", stream).options(**options)


def streaming(spark: SparkSession, server: NatsServer, stream: str, **options: Any) -> DataStreamReader:
    reader = spark.readStream.format("jetstream").option("servers", server.url).option("stream", stream)
    return reader.options(**options)


def sequences(frame: DataFrame) -> list[int]:
    return sorted(row.sequence for row in frame.select("sequence").collect())


# ---- batch ---------------------------------------------------------------------------------------------------------


def test_a_batch_has_every_message_with_all_about_it(spark: SparkSession, server: NatsServer, stream: Stream) -> None:
    rows = batch(spark, server, stream.name).load().orderBy("sequence").collect()
    assert [row.sequence for row in rows] == list(range(1, 101))
    stored = stream.get_message(42)
    # collect() shows times in the zone of this machine, without saying so.
    moments = {name: rows[41][name].astimezone(datetime.UTC) for name in ("timestamp", "stream_created")}
    assert rows[41].asDict() | moments == {
        "subject": stored.subject,
        "data": bytearray(b"42"),
        "headers": None,
        "stream": stream.name,
        "sequence": 42,
        "timestamp": stored.timestamp,
        "stream_created": stream.info().created,
    }


def test_the_recommended_ids_and_newest_rows_of_a_stream_that_was_re_created_are_stored(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream
) -> None:
    """Its sequences begin again: without the time it was created they would be those of the stream before."""
    from pyspark.sql import functions as F

    copy = js.create_stream(StreamConfig(name=new_name("COPY"), subjects=[f"{new_name('copy')}.>"], allow_batched=True))
    subject = copy.info().config.subjects[0].replace(">", "x")  # type: ignore[index]
    bucket = js.create_kv(KVConfig(bucket=new_name("newest")))
    config = stream.info().config
    for count in (100, 30):
        rows = batch(spark, server, stream.name).load()
        ids = F.concat_ws(":", "stream", F.unix_micros("stream_created"), "sequence")
        copied = rows.select("data", ids.alias("msg_id"))
        copied.write.format("jetstream").options(servers=server.url, subject=subject).mode("append").save()
        newest = rows.selectExpr("'k' || sequence % 10 AS key", "data AS value", "sequence", "stream_created")
        options = {"servers": server.url, "bucket": bucket.bucket, "guard": "sequence"}
        for _ in range(2):
            newest.write.format("jetstream_kv").options(**options).mode("append").save()
        found = {key: entry.value for key, entry in bucket.snapshot([">"]).items()}
        assert found == {f"k{number % 10}": b"%d" % number for number in range(count - 9, count + 1)}
        js.delete_stream(stream.name)
        js.create_stream(config)
        for number in range(1, 31):
            js.publish(f"{stream.name.lower()}.{number}", b"%d" % number)
    assert copy.info().state.messages == 130


def test_headers_come_with_the_option(spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream) -> None:
    js.publish(f"{stream.name.lower()}.h", b"", headers=[("A", "1"), ("A", "2"), ("B", "x")])
    frame = batch(spark, server, stream.name, startingOffsets="100", includeHeaders="true").load().orderBy("sequence")
    assert [row.headers for row in frame.collect()] == [{}, {"A": ["1", "2"], "B": ["x"]}]


def test_a_narrower_schema_reads_only_that(spark: SparkSession, server: NatsServer, stream: Stream) -> None:
    frame = batch(spark, server, stream.name, endingOffsets="3").schema("sequence bigint, subject string").load()
    assert sorted(map(tuple, frame.collect())) == [(1, f"{stream.name.lower()}.1"), (2, f"{stream.name.lower()}.2")]


@pytest.mark.parametrize(
    ("schema", "message"),
    [("payload binary", "a stream has subject, data, headers"), ("sequence int", "as int: expected bigint")],
)
def test_another_schema_is_refused_with_the_right_one(
    spark: SparkSession, server: NatsServer, stream: Stream, schema: str, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        batch(spark, server, stream.name).schema(schema).load().collect()


def test_offsets_and_filters_bound_a_batch(spark: SparkSession, server: NatsServer, stream: Stream) -> None:
    for sequence in (15, 16):
        stream.delete_message(sequence)
    subject = f"{stream.name.lower()}.1"
    frame = batch(spark, server, stream.name, startingOffsets="10", endingOffsets="31", subjects=subject).load()
    assert sequences(frame) == [10, 13, 19, 22, 25, 28]
    nothing = batch(spark, server, stream.name, subjects=f"{stream.name.lower()}.none").load()
    assert nothing.count() == 0


def test_several_streams_are_read_together_each_from_its_own_place(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream
) -> None:
    other = js.create_stream(StreamConfig(name=f"{stream.name}b", subjects=[f"other-{stream.name}.>"]))
    js.publish(f"other-{stream.name}.x", b"")
    both = f"{stream.name}, {other.name}"
    frame = batch(spark, server, both, startingOffsets=json.dumps({stream.name: 99})).load()
    found = sorted((row.stream, row.sequence) for row in frame.collect())
    assert found == [(stream.name, 99), (stream.name, 100), (other.name, 1)]


def test_times_bound_a_batch(spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream) -> None:
    time.sleep(0.01)
    middle = datetime.datetime.now(datetime.UTC)
    time.sleep(0.01)
    fill(js, stream, 20)
    later = batch(spark, server, stream.name, startingTimestamp=middle.isoformat()).load()
    assert sequences(later) == list(range(101, 121))
    earlier = batch(spark, server, stream.name, endingTimestamp=str(int(middle.timestamp() * 1000))).load()
    assert sequences(earlier) == list(range(1, 101))


def test_a_range_has_the_same_rows_however_often_and_however_cut(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream
) -> None:
    for sequence in (21, 33, 34, 77):
        stream.delete_message(sequence)
    is_over = threading.Event()

    def publish() -> None:
        while not is_over.is_set():
            fill(js, stream, 100)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        found = set()
        for partitions in (1, 2, 3, 4, 5, 7, 10, 30, 2, 1):
            reader = batch(spark, server, stream.name, startingOffsets="11", endingOffsets="91")
            frame = reader.option("minPartitions", str(partitions)).load()
            found.add(tuple(sorted((row.sequence, bytes(row.data), row.timestamp) for row in frame.collect())))
    finally:
        is_over.set()
        publisher.join()
    [rows] = found
    assert [row[0] for row in rows] == [n for n in range(11, 91) if n not in (21, 33, 34, 77)]


def test_partitions_are_as_many_as_asked_for(spark: SparkSession, server: NatsServer, stream: Stream) -> None:
    assert batch(spark, server, stream.name, minPartitions="7").load().rdd.getNumPartitions() == 7
    assert batch(spark, server, stream.name, maxRecordsPerPartition="30").load().rdd.getNumPartitions() == 4


def test_data_loss_fails_a_batch_unless_it_is_allowed(spark: SparkSession, server: NatsServer, stream: Stream) -> None:
    stream.purge(up_to_sequence=30)
    assert sequences(batch(spark, server, stream.name).load()) == list(range(31, 101))
    with pytest.raises(
        Exception, match=rf"{stream.name}.*sequence 5 is needed and the first stored one is 31.*failOnData"
    ):
        batch(spark, server, stream.name, startingOffsets="5").load().collect()
    allowed = batch(spark, server, stream.name, startingOffsets="5", failOnDataLoss="false").load()
    assert sequences(allowed) == list(range(31, 101))


def test_an_unknown_option_is_refused_with_the_nearest(spark: SparkSession, server: NatsServer, stream: Stream) -> None:
    with pytest.raises(Exception, match="did you mean 'startingOffsets'"):
        batch(spark, server, stream.name, startingOffset="5").load().collect()


def test_a_frame_may_be_filtered_differently_in_one_query_and_the_next(
    spark: SparkSession, server: NatsServer, stream: Stream
) -> None:
    # With push-down it could not: Spark keeps the filters with the frame.
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = batch(spark, server, stream.name).load()
        ends = frame.where("sequence < 5").union(frame.where("sequence > 95"))
        assert sequences(ends) == [1, 2, 3, 4, 96, 97, 98, 99, 100]
        assert frame.count() == 100
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_spark_keeps_what_is_pushed_down_with_the_frame_and_then_loses_rows(spark: SparkSession) -> None:
    """Why there is no push-down. When this fails Spark has learnt to keep filters with the query, and there can be."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, LessThan

    class Reader(DataSourceReader):
        end = 100

        def pushFilters(self, filters: list[Any]) -> list[Any]:
            self.end = min((each.value for each in filters if isinstance(each, LessThan)), default=self.end)
            return filters  # Spark is to apply them, too: so this may only leave out what nobody wants

        def read(self, partition: Any) -> Iterator[tuple[int]]:
            return ((number,) for number in range(self.end))

    class Numbers(DataSource):
        @classmethod
        def name(cls) -> str:
            return "numbers"

        def schema(self) -> str:
            return "number int"

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

    own = spark.newSession()
    own.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    own.dataSource.register(Numbers)
    frame = own.read.format("numbers").load()
    assert frame.where("number < 5").count() == 5
    assert frame.count() == 5  # of 100


def test_a_temporary_view_is_read_with_sql(spark: SparkSession, server: NatsServer, stream: Stream) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW numbers USING jetstream "
        f"OPTIONS (servers '{server.url}', stream '{stream.name}', endingOffsets '11')"
    )
    [row] = spark.sql("SELECT count(*) AS rows, sum(int(string(data))) AS sum FROM numbers").collect()
    assert (row["rows"], row["sum"]) == (10, 55)


# ---- streaming -----------------------------------------------------------------------------------------------------


class Sink:
    """Collects what a query brings, batch by batch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[int]] = {}

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        self.batches[batch_id] = sequences(frame)

    @property
    def rows(self) -> list[int]:
        return [sequence for _, batch in sorted(self.batches.items()) for sequence in batch]


def drain(frame: DataFrame, checkpoint: Path, sink: Any) -> StreamingQuery:
    """Everything that is there now."""
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(FINISH_S)
    return query


def test_a_stream_is_read_in_limited_batches_and_goes_on_from_its_checkpoint(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, tmp_path: Path
) -> None:
    first, second = Sink(), Sink()
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "40"}
    query = drain(streaming(spark, server, stream.name, **options).load(), tmp_path, first)
    assert [len(rows) for rows in first.batches.values()] == [40, 40, 20]
    assert first.rows == list(range(1, 101))
    latest = json.loads(query.recentProgress[0]["sources"][0]["latestOffset"].replace("'", '"'))
    assert latest["streams"][stream.name]["next"] == 101  # what the first batch, which ends at 41, lags behind
    fill(js, stream, 50)
    stream.delete_message(120)
    drain(streaming(spark, server, stream.name, **options).load(), tmp_path, second)
    assert second.rows == [n for n in range(101, 151) if n != 120]


def test_a_stream_at_its_limit_is_read_from_earliest_while_it_evicts(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    name = new_name("S")
    subjects = [f"{name.lower()}.>"]
    full = js.create_stream(StreamConfig(name=name, subjects=subjects, allow_batched=True, max_messages=5_000))
    fill(js, full, 6_000)
    is_over = threading.Event()

    def publish() -> None:
        while not is_over.wait(0.005):
            js.publish(f"{name.lower()}.x", b"")

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        found = [sequences(batch(spark, server, name, minPartitions="3").load()) for _ in range(3)]
        sink = Sink()
        drain(streaming(spark, server, name, startingOffsets="earliest").load(), tmp_path, sink)
        found.append(sink.rows)
    finally:
        is_over.set()
        publisher.join()
    assert all(rows == list(range(rows[0], rows[-1] + 1)) for rows in found)
    assert min(map(len, found)) > 1_000


def test_a_limit_of_bytes_is_kept(spark: SparkSession, server: NatsServer, stream: Stream, tmp_path: Path) -> None:
    sink = Sink()
    limit = str(stream.info().state.bytes // 2)
    reader = streaming(spark, server, stream.name, startingOffsets="earliest", maxBytesPerTrigger=limit)
    drain(reader.load(), tmp_path, sink)
    assert [len(rows) for rows in sink.batches.values()] == [50, 50]


def test_a_batch_that_failed_is_run_again_with_the_same_rows_whatever_the_options(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, tmp_path: Path
) -> None:
    seen: list[tuple[int, list[int], int]] = []

    def fail(frame: DataFrame, batch_id: int) -> None:
        seen.append((batch_id, sequences(frame), frame.rdd.getNumPartitions()))
        raise RuntimeError("not this time")

    def succeed(frame: DataFrame, batch_id: int) -> None:
        seen.append((batch_id, sequences(frame), frame.rdd.getNumPartitions()))

    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "60"}
    with pytest.raises(Exception, match="not this time"):
        drain(streaming(spark, server, stream.name, minPartitions="3", **options).load(), tmp_path, fail)
    fill(js, stream, 10)
    # Spark asks for the initial offset again, because it is the first batch; and gets another one.
    again = streaming(spark, server, stream.name, minPartitions="5", startingOffsets="latest")
    drain(again.load(), tmp_path, succeed)
    assert seen[0] == seen[1] == (0, list(range(1, 61)), 3)
    assert [row for _, rows, _ in seen[2:] for row in rows] == list(range(61, 111))


def test_a_stream_that_was_recreated_is_noticed_at_restart(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, tmp_path: Path
) -> None:
    drain(streaming(spark, server, stream.name, startingOffsets="earliest").load(), tmp_path, Sink())
    js.delete_stream(stream.name)
    fill(js, js.create_stream(stream.cached_info.config), 500)
    with pytest.raises(Exception, match=f"{stream.name}.*was deleted and re-created.*start with a new checkpoint"):
        drain(streaming(spark, server, stream.name, startingOffsets="earliest").load(), tmp_path, Sink())


def test_a_python_worker_that_dies_does_not_end_the_query(
    spark: SparkSession, server: NatsServer, stream: Stream, tmp_path: Path
) -> None:
    from pyspark import TaskContext
    from pyspark.sql import functions as F

    mark = tmp_path / "died"

    def fatal_at_first(sequence: Any) -> Any:
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sequence

    sink = Sink()
    frame = streaming(spark, server, stream.name, startingOffsets="earliest").load()
    drain(
        frame.select(F.udf(lambda each: fatal_at_first(each), "bigint")("sequence").alias("sequence")),
        tmp_path / "checkpoint",
        sink,
    )
    assert mark.exists()
    assert sink.rows == list(range(1, 101))


def test_by_default_a_query_starts_with_what_comes(
    spark: SparkSession, server: NatsServer, js: JetStream, stream: Stream, tmp_path: Path
) -> None:
    sink = Sink()
    frame = streaming(spark, server, stream.name).load()
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path)).start()
    try:
        deadline = time.monotonic() + FINISH_S
        while not query.recentProgress and time.monotonic() < deadline:
            time.sleep(0.05)
        fill(js, stream, 5)
        while len(sink.rows) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sink.rows == [101, 102, 103, 104, 105]
    finally:
        query.stop()


# ---- a cluster -----------------------------------------------------------------------------------------------------


def patiently(ask: Callable[[], T]) -> T:
    """While a stream has no leader, nobody answers for it, and nobody remembers who asked.

    A request to step down whose answer did not come in time may be obeyed late, too.
    """
    deadline = time.monotonic() + 60
    while True:
        try:
            return ask()
        except JetSparkError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicated_streams_are_read_and_written_while_their_leaders_change(spark: SparkSession) -> None:
    count = 12_000
    with NatsCluster(3) as cluster, connect(cluster.urls) as client:
        js = client.jetstream(timeout=20)
        origin, _ = (
            js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], replicas=3, allow_batched=True))
            for name in ("r3", "copy")
        )
        fill(js, origin, count)
        is_over = threading.Event()
        leaders: dict[str, set[str]] = {"r3": set(), "copy": set()}

        def disturb() -> None:
            impatient = client.jetstream(timeout=0.5)
            disturbed = [patiently(partial(impatient.stream, name)) for name in leaders]
            while not is_over.wait(0.3):
                for stream in disturbed:
                    try:
                        led_by = stream.info().cluster
                        assert led_by is not None
                        leaders[stream.name].add(led_by.leader or "")
                        stream.step_down()
                    except JetSparkError:
                        continue  # nobody leads just now, which is what this is about

        troublemaker = threading.Thread(target=disturb)
        troublemaker.start()
        try:
            servers = ",".join(cluster.urls)
            reader = spark.read.format("jetstream").options(servers=servers, stream="r3", minPartitions="6")
            for _ in range(2):
                assert sequences(reader.load()) == list(range(1, count + 1))
            for _ in range(2):
                frame = reader.load().selectExpr("'copy.x' AS subject", "cast(sequence AS string) AS data")
                frame.write.format("jetstream").options(servers=servers).mode("append").save()
        finally:
            is_over.set()
            troublemaker.join()
        copy = patiently(lambda: client.jetstream(timeout=2).stream("copy"))
        total = patiently(lambda: copy.info().state.messages)
        # Through a consumer, which the leader serves: a replica may be behind.
        values = patiently(lambda: [int(each.data) for each in islice(copy.ordered_consumer().messages(), total)])
        written = Counter(values)
        assert (total, written) == (2 * count, dict.fromkeys(range(1, count + 1), 2))
        assert all(len(each - {""}) > 1 for each in leaders.values()), leaders


# ---- secrets -------------------------------------------------------------------------------------------------------


SEED = create_seed("user", b"s" * 32)
SECRETS = {"password": "hunter2-and-more", "nkey": SEED}


@pytest.mark.parametrize("way", SECRETS)
def test_with_tls_and_a_secret_streams_are_read_and_written_and_the_secret_is_in_no_plan_and_no_error(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], certificates: Certificates, way: str
) -> None:
    secret = SECRETS[way]
    (tmp_path / "secret").write_text(secret)
    # A password in the open, as it should not be: what is shown of options is Spark's decision, not ours.
    accepted: dict[str, Any]
    auth: Auth
    match way:
        case "password":
            accepted, auth = {"users": [User(user="me", password=secret)]}, UserPassword("me", secret)
            given = {"user": "me", "password": secret}
        case _:
            accepted, auth = {"nkeys": [User(nkey=public_key(secret))]}, NKey(secret)
            given = {"nkeySeedFile": str(tmp_path / "secret")}
    given["tlsCaFile"] = str(certificates.ca_file)
    tls = ServerTLS(cert_file=certificates.server_cert, key_file=certificates.server_key)
    with NatsServer(**accepted, tls=tls) as own:
        with connect(own.url, auth=auth, tls=TLSConfig(ca_file=certificates.ca_file)) as client:
            js = client.jetstream()
            fill(js, js.create_stream(StreamConfig(name="P", subjects=["p.>"], allow_batched=True)), 10)
            copy = js.create_stream(StreamConfig(name="COPY", subjects=["copy.>"], allow_batched=True))
            frame = batch(spark, own, "P", **given).load()
            rows = frame.selectExpr("'copy.x' AS subject", "data")
            rows.write.format("jetstream").options(servers=own.url, **given).mode("append").save()
            assert copy.info().state.messages == 10
        frame.explain(True)
        plan = capsys.readouterr().out
        assert "jetstream" in plan.lower()
        shown = [plan, frame._jdf.queryExecution().toString(), rows._jdf.queryExecution().toString()]

        def write(**options: str) -> None:
            rows.write.format("jetstream").options(**{"servers": own.url, **given, **options}).mode("append").save()

        def stream(**options: str) -> None:
            drain(streaming(spark, own, "P", **{**given, **options}).load(), tmp_path / "checkpoint", Sink())

        wrong = {"user": "you", "password": secret} if way != "nkey" else {"user": "you", "passwordFile": "nowhere"}
        for act in (
            lambda: batch(spark, own, "P", **given, startingOffsets="500").load().collect(),
            lambda: batch(spark, own, "NONE", **given).load().collect(),
            lambda: batch(spark, own, "P", **(given | wrong)).load().collect(),
            lambda: batch(spark, own, "P", **wrong, tlsCaFile=given["tlsCaFile"]).load().collect(),
            lambda: write(stream="NONE"),
            lambda: write(publishMode="atomic"),
            lambda: write(publishMod="atomic"),
            lambda: stream(startingOffsets="500"),
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                act()
            shown.append(str(caught.value))
        assert all(shown)
        assert not [text for text in shown if secret in text]
