"""The sink's recovery by its ledger, on a real server and without a JVM: a test does a task's work itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from support.header_blocks import BLOCKS, publish_block
from support.names import new_name, new_stream
from support.replicas import stale_replica

from jetspark.blocking import ConsumerConfig, JetStream, Stream, StreamConfig, SubjectTransform, connect
from jetspark.errors import ConfigError, JetSparkError, ProtocolError, UsageError
from jetspark.server import NatsServer
from jetspark.spark import connections
from jetspark.spark.stream import sink
from jetspark.spark.stream.ledger import Committed, Ledger, stored_ids, time_of
from jetspark.spark.stream.publishing import AsyncPublishing, FastPublishing, Publisher
from jetspark.spark.stream.sink import BatchWriter, SinkOptions, Task
from jetspark.spark.stream.writing import Layout, Rows
from jetspark.spark.tasks import TaskId

pytest_plugins = ["support.sparks"]
pytestmark = pytest.mark.timeout(600)

MODES = ["fast", "atomic", "async"]
# A stale replica answers every second request, by chance.
TRIES = 8

# ---- which rows are stored -------------------------------------------------------------------------------------------


def ids_of(js: JetStream, stream: Stream, after: int, **options: Any) -> set[bytes]:
    given: dict[str, Any] = {"prefix": "q:", "max_ids": 100} | options
    return stored_ids(js, stream.info(), after, **given).ids


def test_the_ids_after_a_sequence_are_found_without_those_of_others(js: JetStream) -> None:
    stream = new_stream(js)
    assert ids_of(js, stream, 0) == set()
    for number, msg_id in enumerate(["q:1", "q:2", "other:3", "q:4"], start=1):
        assert js.publish(f"{stream.name}.{number % 2}", b"", msg_id=msg_id).sequence == number
    js.publish(f"{stream.name}.0", b"no id")
    assert ids_of(js, stream, 0) == {b"1", b"2", b"4"}
    assert ids_of(js, stream, 1) == {b"2", b"4"}
    assert ids_of(js, stream, 3) == {b"4"}
    assert ids_of(js, stream, 4) == ids_of(js, stream, 5) == ids_of(js, stream, 9) == set()
    assert ids_of(js, stream, 0, prefix="") == {b"q:1", b"q:2", b"other:3", b"q:4"}
    js.publish(f"{stream.name}.x", b"", msg_id="q:6")
    assert ids_of(js, stream, 5) == {b"6"}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_message_of_somebody_whose_headers_cannot_be_read_hides_no_ids(
    server: NatsServer, js: JetStream, block: bytes
) -> None:
    stream = new_stream(js)
    js.publish(f"{stream.name}.x", b"", msg_id="q:1")
    publish_block(server.port, f"{stream.name}.x", block, b"of somebody")
    js.publish(f"{stream.name}.x", b"", msg_id="q:2")
    assert ids_of(js, stream, 0) == {b"1", b"2"}


def test_ids_of_messages_that_come_later_are_not_waited_for_and_those_that_are_gone_are_left_out(
    js: JetStream,
) -> None:
    stream = new_stream(js)
    for number in range(1, 6):
        js.publish(f"{stream.name}.x", b"", msg_id=f"q:{number}")
    seen = stream.info()
    js.publish(f"{stream.name}.x", b"", msg_id="q:6")
    stream.delete_message(2)
    stream.delete_message(5)
    found = stored_ids(js, seen, 0, prefix="q:", max_ids=100)
    assert found.ids - {b"6"} == {b"1", b"3", b"4"}
    assert not found.is_all


def test_as_many_ids_as_allowed_are_found_and_one_more_is_an_error(js: JetStream) -> None:
    stream = new_stream(js)
    for number in range(5):
        js.publish(f"{stream.name}.x", b"", msg_id=f"q:{number}")
    assert len(ids_of(js, stream, 0, max_ids=5)) == 5
    with pytest.raises(JetSparkError, match=rf"{stream.name!r} has more than 4 messages after sequence 0.*maxOffsets"):
        ids_of(js, stream, 0, max_ids=4)


# ---- the bucket ------------------------------------------------------------------------------------------------------


def test_the_bucket_is_made_once_and_found_afterwards(js: JetStream) -> None:
    bucket = new_name("ledger")
    stream = new_stream(js)
    first = Ledger.of(js, bucket, "q1", replicas=1)
    config = js.stream(f"KV_{bucket}").cached_info.config
    assert (config.max_messages_per_subject, config.replicas) == (1, 1)
    assert first.open(4, 0, stream.info()).after == 0
    first.commit(Committed(4, 60, {}))
    js.publish(f"{stream.name}.x", b"")
    again = Ledger.of(js, bucket, "q1")
    opening, committed = again.open(4, 0, stream.info()), again.committed()
    assert (opening.is_repeated, opening.after) == (True, 0)
    assert committed is not None
    assert (committed.batch, committed.rows) == (4, 60)
    other = Ledger.of(js, bucket, "q2")
    assert other.committed() is None
    assert not other.open(4, 0, stream.info()).is_repeated
    again.forget()
    assert not again.open(4, 0, stream.info()).is_repeated
    assert other.open(4, 0, stream.info()).is_repeated
    assert again.committed() == committed


def test_a_bucket_that_another_task_makes_at_the_same_moment_is_used(js: JetStream) -> None:
    bucket = new_name("ledger")

    class Late(JetStream):
        """Finds that there is no bucket, and is overtaken."""

        def kv(self, bucket: str, *, verify: bool = True) -> Any:
            try:
                return js.kv(bucket, verify=verify)
            except JetSparkError:
                js.create_stream(
                    StreamConfig(name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_messages_per_subject=1)
                )
                raise

    late = Late.__new__(Late)
    late.__dict__.update(js.__dict__)
    ledger = Ledger.of(late, bucket, "q1", replicas=1)
    ledger.commit(Committed(1, 2, {}))
    assert Ledger.of(js, bucket, "q1").committed() == ledger.committed()


def test_a_replica_that_is_behind_hides_no_attempt_and_makes_none_younger(js: JetStream) -> None:
    bucket = new_name("ledger")
    stream = new_stream(js)
    ledger = Ledger.of(js, bucket, "q1", replicas=1)
    ledger.open(3, 0, stream.info())
    stored = js.stream(f"KV_{bucket}")
    js.publish(f"{stream.name}.x", b"")
    ledger.open(4, 0, stream.info())
    stale_replica(js, stored, 0)  # it has nothing, and gets what is written from now on
    for _ in range(TRIES):
        opening = ledger.open(4, 0, stream.info())
        assert (opening.is_repeated, opening.after) == (True, 1)


# ---- tasks -----------------------------------------------------------------------------------------------------------

ROWS = [b"%d" % number for number in range(600)]


class Died(Exception):
    pass


def attempt(
    server: NatsServer,
    stream: Stream,
    mode: str,
    bucket: str,
    *,
    dies_after: int | None = None,
    waits_s: float = 0.0,
    subject: str | None = None,
    **more: Any,
) -> Any:
    """One at the only partition of batch 0, which waits before its last rows."""

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(ROWS), 100):
            if start == dies_after:
                raise Died
            if start == len(ROWS) - 100:
                time.sleep(waits_s)
            yield pa.record_batch({"data": ROWS[start : start + 100]})

    subject = subject or f"{stream.name}.x"
    options = SinkOptions(servers=(server.url,), subject=subject, publish_mode=mode, ledger_bucket=bucket, **more)
    return Task(options, Layout(subject=subject, msg_id=None), TaskId(stream.name, 0, 0)).run(batches())


def test_an_attempt_after_the_duplicate_window_stores_what_the_first_has_not(server: NatsServer, js: JetStream) -> None:
    window_s = 1.0
    bucket = new_name("ledger")
    streams = {mode: new_stream(js, duplicate_window_s=window_s) for mode in MODES}
    for mode, stream in streams.items():
        js.publish(f"{stream.name}.x", b"before")
        if mode == "atomic":  # all or nothing: it dies before its batch is noted as committed
            attempt(server, stream, mode, bucket)
        else:
            with pytest.raises(Died):
                attempt(server, stream, mode, bucket, dies_after=300)
    time.sleep(window_s + 0.2)
    stored = {mode: stream.info().state.messages - 1 for mode, stream in streams.items()}
    assert stored == {"fast": 300, "atomic": 600, "async": 300}
    for mode, stream in streams.items():
        js.publish(f"{stream.name}.x", b"between", msg_id="of somebody else")
        written = attempt(server, stream, mode, bucket)
        assert (written.rows, written.sent) == (len(ROWS), len(ROWS) - stored[mode])
        found = [message.data for message in stream.get_messages() if message.data.isdigit()]
        assert sorted(found, key=int) == ROWS


def check_rows_are_found_after_the_window(server: NatsServer, js: JetStream, config: StreamConfig, sent: str) -> None:
    stream, bucket = js.create_stream(config), new_name("ledger")
    with pytest.raises(Died):
        attempt(server, stream, "fast", bucket, dies_after=300, subject=sent)
    assert stream.get_message(1).subject != sent
    time.sleep((config.duplicate_window_s or 0) + 0.2)
    written = attempt(server, stream, "fast", bucket, subject=sent)
    assert (written.rows, written.sent) == (len(ROWS), 300)
    assert stream.info().state.messages == len(ROWS)


@pytest.mark.parametrize("destination", ["{}.stored.>", "elsewhere.{}.>"])
def test_rows_that_the_stream_stores_under_another_subject_are_found_after_the_duplicate_window(
    server: NatsServer, js: JetStream, destination: str
) -> None:
    name = new_name()
    transform = SubjectTransform(source=f"{name}.sent.>", destination=destination.format(name))
    subjects = [f"{name}.sent.>"]
    config = StreamConfig(
        name=name, subjects=subjects, subject_transform=transform, allow_batched=True, duplicate_window_s=1.0
    )
    check_rows_are_found_after_the_window(server, js, config, f"{name}.sent.x")


def test_rows_that_the_account_maps_to_another_subject_are_found_after_the_duplicate_window() -> None:
    mapping = 'mappings = {"mapped.*": "mapped.{{partition(3,1)}}.$1"}'
    with NatsServer(extra_config=mapping) as server, connect(server.url) as client:
        config = StreamConfig(name="MAPPED", subjects=["mapped.>"], allow_batched=True, duplicate_window_s=1.0)
        check_rows_are_found_after_the_window(server, client.jetstream(), config, "mapped.x")
        # The tasks' own connection ends before its server does: what is unconfirmed then would be an error.
        connections._kept.popitem()[1].close()


@pytest.mark.parametrize("allow_direct", [True, False])
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
@pytest.mark.parametrize("mode", MODES)
def test_an_attempt_is_repeated_on_a_stream_that_is_consumed_by_reading(
    server: NatsServer, js: JetStream, mode: str, retention: Any, allow_direct: bool
) -> None:
    stream, bucket = new_stream(js, retention=retention, allow_direct=allow_direct), new_name("ledger")
    consumer = stream.create_consumer(ConsumerConfig(durable_name="theirs", ack_policy="explicit"))
    with pytest.raises(Died) if mode != "atomic" else nullcontext():
        attempt(server, stream, mode, bucket, dies_after=None if mode == "atomic" else 300)
    before = stream.info().state.messages
    is_readable = allow_direct or retention == "interest"
    written = attempt(server, stream, mode, bucket)
    assert written.sent == len(ROWS) - (before if is_readable else 0)
    assert stream.info().state.messages == len(ROWS)
    assert [message.data for message in consumer.fetch(len(ROWS))] == ROWS


@pytest.mark.parametrize("taken", [250, len(ROWS)])
@pytest.mark.parametrize("mode", MODES)
def test_rows_that_were_consumed_before_the_attempt_is_repeated_are_not_stored_again(
    server: NatsServer, js: JetStream, mode: str, taken: int
) -> None:
    stream, bucket = new_stream(js, retention="workqueue"), new_name("ledger")
    consumer = stream.create_consumer(ConsumerConfig(durable_name="theirs", ack_policy="explicit"))
    attempt(server, stream, mode, bucket)
    seen = []
    for message in consumer.fetch(taken):
        seen.append(message.data)
        message.ack_sync()
    attempt(server, stream, mode, bucket)
    assert [*seen, *(message.data for message in stream.get_messages())] == ROWS
    assert stream.info().state.last_sequence == len(ROWS)


@pytest.mark.parametrize("few", [sink.FEW_MESSAGES, len(ROWS), len(ROWS) - 1])
@pytest.mark.parametrize("mode", MODES)
def test_an_attempt_within_the_duplicate_window_stores_nothing_twice(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch, mode: str, few: int
) -> None:
    """What is stored is not sent; or, where finding it out is much work, the stream is left to know its rows."""
    monkeypatch.setattr(sink, "FEW_MESSAGES", few)
    stream, bucket = new_stream(js), new_name("ledger")
    written = [attempt(server, stream, mode, bucket) for _ in range(2)]
    assert [each.sent for each in written] == [len(ROWS), 0 if few >= len(ROWS) else len(ROWS)]
    assert [message.data for message in stream.get_messages()] == ROWS


@pytest.mark.parametrize(("mode", "kind"), [("fast", FastPublishing), ("async", AsyncPublishing)])
def test_an_attempt_that_begins_within_the_duplicate_window_and_sends_after_it_stores_nothing_twice(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch, mode: str, kind: type[Publisher]
) -> None:
    window_s = 1.0
    stream, bucket = new_stream(js, duplicate_window_s=window_s), new_name("ledger")
    with pytest.raises(Died):
        attempt(server, stream, mode, bucket, dies_after=300)
    send = kind.send

    def send_late(publisher: Publisher, rows: Rows) -> None:
        time.sleep(1.5 * window_s)
        monkeypatch.undo()
        send(publisher, rows)

    monkeypatch.setattr(kind, "send", send_late)
    attempt(server, stream, mode, bucket)
    assert sorted((message.data for message in stream.get_messages()), key=int) == ROWS


@pytest.mark.parametrize(("waits_s", "is_told"), [(0.0, False), (1.2, True)])
def test_who_cannot_find_all_that_is_stored_says_so_when_the_window_is_over(
    server: NatsServer, js: JetStream, waits_s: float, is_told: bool
) -> None:
    """A stream that drops messages: until half the window is over it knows the ids of those that it has dropped."""
    stream, bucket = new_stream(js, duplicate_window_s=2.0, max_messages=100), new_name("ledger")
    with pytest.raises(Died):
        attempt(server, stream, "async", bucket, dies_after=300, recovery_horizon_s=1.0)
    told = pytest.raises(UsageError, match="no longer has all messages after sequence 0") if is_told else nullcontext()
    with told:
        attempt(server, stream, "async", bucket, waits_s=waits_s, recovery_horizon_s=1.0, when_not_exactly_once="fail")


@pytest.mark.parametrize("how", ["nothing", "before", "subject", "message", "front"])
def test_messages_removed_from_the_middle_are_told_of_as_those_at_the_front_are(
    server: NatsServer, js: JetStream, how: str
) -> None:
    window_s = 0.4
    stream, bucket = new_stream(js, duplicate_window_s=window_s), new_name("ledger")
    for _ in range(3):
        js.publish(f"{stream.name}.other", b"")
    if how == "before":  # what was there before the batch tells nothing of its rows
        stream.delete_message(2)
    with pytest.raises(Died):
        attempt(server, stream, "async", bucket, dies_after=300)
    if how == "subject":
        stream.purge(subject=f"{stream.name}.x")
    elif how == "message":
        stream.delete_message(100)
    elif how == "front":
        stream.purge(up_to_sequence=100)
    time.sleep(window_s + 0.2)
    is_told = how in ("subject", "message", "front")
    told = pytest.raises(UsageError, match="no longer has all messages after sequence 3") if is_told else nullcontext()
    with told:
        attempt(server, stream, "async", bucket, when_not_exactly_once="fail")


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_is_committed_is_read_and_not_sent(server: NatsServer, js: JetStream, mode: str) -> None:
    stream, bucket = new_stream(js), new_name("ledger")
    written_to = {stream.name: time_of(stream.info().created)}
    Ledger.of(js, bucket, stream.name).commit(Committed(0, len(ROWS), written_to))
    written = attempt(server, stream, mode, bucket)
    assert (written.rows, written.sent, written.is_committed_already) == (len(ROWS), 0, True)
    assert stream.info().state.messages == 0


def named(server: NatsServer, stream: Stream, bucket: str, *partitions: list[bytes], at: str = "x", **more: Any) -> Any:
    """A whole ``df.write`` with a name; by default of one partition."""
    subject = f"{stream.name}.{at}"
    options = SinkOptions(servers=(server.url,), subject=subject, ledger_bucket=bucket, write_id="daily", **more)
    layout = Layout(subject=subject, msg_id=None)
    written = [
        Task(options, layout, TaskId("daily", 0, number)).run(iter([pa.record_batch({"data": rows})]))
        for number, rows in enumerate(partitions or (ROWS,))
    ]
    BatchWriter(options, layout).commit([*written])
    return written[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_named_write_is_stored_again_when_its_stream_was_made_again(
    server: NatsServer, js: JetStream, mode: str
) -> None:
    stream, bucket = new_stream(js), new_name("ledger")
    assert [named(server, stream, bucket, publish_mode=mode).sent for _ in range(2)] == [len(ROWS), 0]
    for _ in range(2):
        config = stream.info().config
        js.delete_stream(stream.name)
        stream = js.create_stream(config)
        assert [named(server, stream, bucket, publish_mode=mode).sent for _ in range(3)] == [len(ROWS), 0, 0]
        assert [message.data for message in stream.get_messages()] == ROWS


OTHER_ROWS = {
    "one row": [*ROWS[:-1], b"another"],
    "fewer": ROWS[:-1],
    "one twice": [*ROWS[:-1], ROWS[0]],
    "all": [each[::-1] + b"!" for each in ROWS],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_a_name_that_has_written_other_rows_is_refused_and_the_same_rows_are_recognised_however_they_are_cut(
    server: NatsServer, js: JetStream, mode: str, other: list[bytes]
) -> None:
    stream, bucket = new_stream(js), new_name("ledger")
    named(server, stream, bucket, publish_mode=mode)
    why = rf"writeId='daily' has written {len(ROWS)} other rows to stream '{stream.name}'.*of its own.*daily\.committed"
    for _ in range(2):
        with pytest.raises(UsageError, match=why):
            named(server, stream, bucket, other, publish_mode=mode)
        assert named(server, stream, bucket, ROWS[9:][::-1], ROWS[:9], publish_mode=mode).sent == 0
    assert [message.data for message in stream.get_messages()] == ROWS


def test_a_name_that_has_written_the_same_data_to_another_subject_is_refused(server: NatsServer, js: JetStream) -> None:
    stream, bucket = new_stream(js), new_name("ledger")
    named(server, stream, bucket)
    with pytest.raises(UsageError, match=r"writeId='daily' has written \d+ other rows"):
        named(server, stream, bucket, at="y")


def test_a_name_whose_entry_has_no_digest_is_refused_before_a_row_is_sent(server: NatsServer, js: JetStream) -> None:
    stream, bucket = new_stream(js), new_name("ledger")
    named(server, stream, bucket)
    ledger = js.kv(bucket)
    entry = json.loads(ledger.get("daily.committed").value)
    del entry["digest"]
    ledger.put("daily.committed", json.dumps(entry).encode())
    with pytest.raises(ProtocolError, match=rf"key daily\.committed of bucket '{bucket}' .*Delete the key"):
        named(server, stream, bucket)
    ledger.delete("daily.committed")
    named(server, stream, bucket)
    assert [message.data for message in stream.get_messages()] == ROWS


def test_a_task_that_begins_after_another_write_of_the_name_was_committed_does_not_pass_its_rows_off_as_written(
    server: NatsServer, js: JetStream
) -> None:
    """Two writes at the same time: one is half-way when the other is committed, and skips the rest."""
    stream, bucket = new_stream(js), new_name("ledger")
    subject = f"{stream.name}.x"
    options = SinkOptions(servers=(server.url,), subject=subject, ledger_bucket=bucket, write_id="daily")
    layout = Layout(subject=subject, msg_id=None)

    def part(number: int) -> Any:
        rows = [b"slow %d" % number]
        return Task(options, layout, TaskId("daily", 0, number)).run(iter([pa.record_batch({"data": rows})]))

    first = part(0)
    named(server, stream, bucket)
    second = part(1)
    assert (first.sent, second.sent) == (1, 0)
    with pytest.raises(UsageError, match=r"writeId='daily' has written \d+ other rows"):
        BatchWriter(options, layout).commit([first, second])


def test_a_name_that_has_written_to_another_stream_is_refused(server: NatsServer, js: JetStream) -> None:
    first, second, bucket = new_stream(js), new_stream(js), new_name("ledger")
    named(server, first, bucket)
    why = rf"writeId='daily' has written to stream '{first.name}', and now would write to '{second.name}'.*own"
    with pytest.raises(UsageError, match=why):
        named(server, second, bucket)
    assert second.info().state.messages == 0


def test_a_batch_of_a_query_that_is_written_is_stored_again_when_its_stream_was_made_again(
    server: NatsServer, js: JetStream
) -> None:
    stream, bucket = new_stream(js), new_name("ledger")
    options = SinkOptions(servers=(server.url,), ledger_bucket=bucket)
    sink._commit(options, [attempt(server, stream, "fast", bucket)])
    config = stream.info().config
    js.delete_stream(stream.name)
    stream = js.create_stream(config)
    for sent in (len(ROWS), 0):
        written = attempt(server, stream, "fast", bucket)
        sink._commit(options, [written])
        assert written.sent == sent
    assert [message.data for message in stream.get_messages()] == ROWS


# ---- rows that the server would refuse -------------------------------------------------------------------------------


def write_rows(server: NatsServer, stream: Stream, mode: str, row: dict[str, Any]) -> Any:
    """A good row, and this one."""
    good = {"data": b"good", "subject": f"{stream.name}.x", "headers": [("A", "b")], "ttl": 60.0}
    kinds = {
        "data": pa.binary(),
        "subject": pa.string(),
        "headers": pa.map_(pa.string(), pa.string()),
        "ttl": pa.float64(),
    }
    batch = pa.record_batch({name: pa.array([good[name], (good | row)[name]], kinds[name]) for name in good})
    options = SinkOptions(
        servers=(server.url,), stream=stream.name, publish_mode=mode, ledger_bucket=new_name("ledger"), patience_s=5.0
    )
    layout = Layout(subject=None, msg_id=None, has_headers=True, has_ttl=True)
    return Task(options, layout, TaskId("query", 0, 0)).run(iter([batch]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"subject": "{stream}." + "x" * 4000}, "a subject of .* bytes, '{stream}.xxx.*: expected at most 3944"),
        ({"ttl": 1e10}, "ttl is 10000000000.0: expected 1 second or more, at most 9223372036"),
        ({"ttl": float("inf")}, "ttl is inf: expected 1 second or more, at most 9223372036"),
        ({"headers": [("A", "x" * 65_600)]}, "headers of 65... bytes: the server takes 65535"),
        ({"data": b"x" * 200_000}, "data of 200000 bytes .* 200000 bytes stream '{stream}' takes .max_message_bytes"),
        (
            {"data": b"x" * 2_000_000},
            "data of 2000000 bytes .* 200000 bytes stream '{stream}' takes .max_message_bytes",
        ),
    ],
)
def test_a_row_that_the_server_would_refuse_is_named_and_nothing_of_its_batch_is_sent(
    server: NatsServer, js: JetStream, mode: str, row: dict[str, Any], message: str
) -> None:
    stream = new_stream(js, max_message_bytes=200_000)
    if "subject" in row:
        row = {"subject": row["subject"].format(stream=stream.name)}
    with pytest.raises(ConfigError, match="row 1 of partition 0: " + message.format(stream=stream.name)):
        write_rows(server, stream, mode, row)
    assert stream.info().state.last_sequence == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [3944, 3800])
def test_the_longest_subject_is_written(server: NatsServer, js: JetStream, mode: str, size: int) -> None:
    stream = new_stream(js)
    write_rows(server, stream, mode, {"subject": f"{stream.name}.".ljust(size, "x"), "ttl": 9_223_372_036.0})
    assert stream.info().state.messages == 2
