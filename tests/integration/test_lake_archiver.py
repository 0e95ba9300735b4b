"""Archives of real streams: whatever happens to the stream, the server, the store or the writer, each message is a row
once, or is explained; an independent engine counts the same."""

from __future__ import annotations

import logging
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.archives import archive, archiving, only_table, proved, writer_process
from support.header_blocks import BLOCKS, publish_block
from support.names import new_stream
from support.object_stores import Fault, s3_server

from jetspark import StreamConfig
from jetspark.blocking import JetStream, Stream, connect
from jetspark.errors import DataLoss, NetworkError, RequestTimeout, StoreUnavailable, StreamNotFound, StreamWentBack
from jetspark.lake import ArchiveCommit, ArchiveOptions, archive_streams, find_tables, verify_archive
from jetspark.lake.lease import BUCKET
from jetspark.lake.rows import messages_of
from jetspark.lake.verification import rows_between
from jetspark.server import NatsServer

FORMATS = ["delta", "parquet", "iceberg"]


@pytest.fixture
def js(server: NatsServer) -> Iterator[JetStream]:
    with connect(server.url) as client:
        yield client.jetstream()


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def fill(js: JetStream, stream: Stream, count: int, size: int = 20) -> None:
    with js.fast_batch() as batch:
        batch.add_many((f"{stream.name}.{number % 7}", b"%d" % number * (size // 4)) for number in range(count))


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def reached(to: Path) -> int:
    """The position of the only table; 0 without one."""
    tables = find_tables(str(to))
    snapshot = tables[0].snapshot() if tables else None
    return 0 if snapshot is None else snapshot.position.next


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_each_message_is_a_row_with_its_bytes(server: NatsServer, js: JetStream, lake: Path, format: str) -> None:
    stream = new_stream(js)
    for name, block in BLOCKS.items():
        publish_block(server.port, f"{stream.name}.{name}", block, name.encode())
    publish_block(server.port, f"{stream.name}.\udcff\udcfe", BLOCKS["plain"], b"\x00\xff")
    js.publish(f"{stream.name}.empty")
    js.publish(f"{stream.name}.id", b"{}", msg_id="evt-1", headers={"A": ["1", "2"], "a": "3"})
    js.publish(f"{stream.name}.large", b"x" * 900_000)
    archive(js, stream.name, lake, format=format)

    table = only_table(lake)
    assert table.format == format
    found = proved(table, js)
    assert (found.rows, found.deleted, found.compared) == (len(BLOCKS) + 4, 0, len(BLOCKS) + 4)
    snapshot = table.snapshot()
    assert snapshot is not None
    rows = [each for batch in rows_between(table, snapshot.files, 1, 1000) for each in messages_of(batch)]
    # The leader answers in JSON, without the bytes of subjects, and a replica without the end of some header blocks.
    subjects = [stream.get_message(number, direct=True).subject for number in range(1, found.rows + 1)]
    stored = [stream.get_message(number, direct=False) for number in range(1, found.rows + 1)]
    assert [each.subject for each in rows] == subjects
    assert [(each.data, each.raw_headers, each.time_ns) for each in rows] == [
        (each.data, each.raw_headers, each.time_ns) for each in stored
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_deleted_messages_are_explained(js: JetStream, lake: Path, format: str) -> None:
    stream = new_stream(js)
    fill(js, stream, 30)
    deleted = [1, 2, 9, 10, 11, 30]
    for sequence in deleted:
        stream.delete_message(sequence)
    archive(js, stream.name, lake, format=format)
    found = proved(only_table(lake), js)
    # Sequences without a message before the first row are no part of the archive, and those at the end not yet.
    assert (found.first, found.next) == (3, 30)
    assert (found.rows, found.deleted) == (24, 3)
    # A purged subject, and the end of the stream: nothing is committed for them until there is a row.
    fill(js, stream, 7)
    stream.purge(subject=f"{stream.name}.2")
    for sequence in range(34, 38):
        stream.delete_message(sequence)
    archive(js, stream.name, lake)
    assert proved(only_table(lake), js).rows == 24 + 2


def test_an_empty_stream_has_no_table_and_an_idle_one_no_commits(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    archive(js, stream.name, lake)
    assert find_tables(str(lake)) == []
    fill(js, stream, 5)
    stream.purge()
    archive(js, stream.name, lake)  # its sequences begin at 6
    assert find_tables(str(lake)) == []
    fill(js, stream, 5)
    archive(js, stream.name, lake)
    table = only_table(lake)
    version = proved(table, js).next, table.snapshot().version  # type: ignore[union-attr]
    assert version[0] == 11
    archive(js, stream.name, lake)
    with archiving(js, stream.name, lake, every_s=0.0):
        time.sleep(0.3)
    assert (11, table.snapshot().version) == version  # type: ignore[union-attr]


def test_sequences_that_were_read_as_deleted_stay_so(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 10)
    seen: list[int] = []
    with archiving(js, stream.name, lake, every_s=0.0, on_progress=lambda stream, at, last: seen.append(at)):
        until(lambda: reached(lake) == 11)
        fill(js, stream, 5)
        until(lambda: reached(lake) == 16)
    fill(js, stream, 5)
    for sequence in range(16, 21):
        stream.delete_message(sequence)
    with archiving(js, stream.name, lake, every_s=0.0, on_progress=lambda stream, at, last: seen.append(at)):
        until(lambda: 21 in seen)
        assert reached(lake) == 16  # there is no row to commit
        # Now the stream begins behind them: whoever reads only now would have to call them lost.
        stream.purge()
        fill(js, stream, 1)
        until(lambda: reached(lake) == 22)
    found = proved(only_table(lake), js)
    assert (found.rows, found.deleted) == (16, 5)


# ---- when it commits -------------------------------------------------------------------------------------------------


def test_full_files_are_committed_at_once_and_others_after_a_time(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 40_000)
    with archiving(js, stream.name, lake, every_s=3600.0, max_rows=1000):
        until(lambda: reached(lake) == 40_001)
        fill(js, stream, 999)
        time.sleep(1.5)  # the stream is looked at once a second
        assert reached(lake) == 40_001
    snapshot = only_table(lake).snapshot()
    assert snapshot is not None
    assert len(snapshot.files) > 1
    assert all(each.rows >= 1000 for each in snapshot.files)
    with archiving(js, stream.name, lake, every_s=0.2):
        until(lambda: reached(lake) == 41_000)
    proved(only_table(lake), js)


def test_several_streams_are_archived_side_by_side_and_each_commit_is_told(js: JetStream, lake: Path) -> None:
    streams = [new_stream(js), new_stream(js)]
    commits: list[ArchiveCommit] = []
    options = ArchiveOptions(to=str(lake))
    for number, stream in enumerate(streams):
        fill(js, stream, 10 + number)
    archive_streams(js, [each.name for each in streams], options, once=True, on_commit=commits.append)
    assert sorted((each.table.identity.stream, each.snapshot.position.next) for each in commits) == sorted(
        [(streams[0].name, 11), (streams[1].name, 12)]
    )
    for commit in commits:
        found = rows_between(commit.table, commit.files, 1, 100)
        assert sum(rows.num_rows for rows in found) == commit.snapshot.position.next - 1
        proved(commit.table, js)


def test_a_stream_with_limits_is_committed_long_before_them(js: JetStream, lake: Path) -> None:
    stream = new_stream(js, max_age_s=4.0, duplicate_window_s=1.0)
    total = 0
    with archiving(js, stream.name, lake, every_s=3600.0):
        for _ in range(60):
            fill(js, stream, 50)
            total += 50
            time.sleep(0.1)
        until(lambda: reached(lake) == total + 1)
    assert proved(only_table(lake)).rows == total
    assert stream.info().state.messages < total


def test_a_stop_commits_what_was_read(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 40_000)
    archive_streams(js, [stream.name], ArchiveOptions(to=str(lake), every_s=0.0), stop=lambda _: True)
    assert 0 < reached(lake) < 40_001
    archive(js, stream.name, lake)
    assert proved(only_table(lake), js).rows == 40_000


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_lost_messages_are_an_error_and_those_before_them_are_archived(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 10)
    archive(js, stream.name, lake)
    fill(js, stream, 20)
    stream.delete_message(12)
    stream.purge(up_to_sequence=17)
    with pytest.raises(DataLoss, match="on-loss record") as caught:
        archive(js, stream.name, lake)
    assert (caught.value.wanted, caught.value.first) == (11, 18)
    assert reached(lake) == 11
    archive(js, stream.name, lake, on_loss="record")
    found = proved(only_table(lake), js, lost=range(11, 18))
    assert (found.rows, found.deleted) == (23, 0)


def test_a_stream_at_its_limit_is_archived_from_what_it_has_when_it_is_read(js: JetStream, lake: Path) -> None:
    stream = new_stream(js, max_messages=1000)
    done = threading.Event()

    def publish() -> None:
        while not done.is_set():
            fill(js, stream, 200)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(5):  # fails with a loss where the archiver is too slow: the last look at the stream decides
            archive(js, stream.name, lake, on_loss="record", max_rows=300)
    finally:
        done.set()
        publisher.join()
    archive(js, stream.name, lake, on_loss="record")
    table = only_table(lake)
    lost = [sequence for each in verify_archive(table).lost for sequence in each]
    found = proved(table, js, lost=lost)
    assert found.next == stream.info().state.last_sequence + 1
    assert found.deleted == 0


def test_an_overtaken_archiver_archives_all_that_it_reads(js: JetStream, lake: Path) -> None:
    stream = new_stream(js, max_messages=500)
    fill(js, stream, 400)
    archive(js, stream.name, lake)
    fill(js, stream, 2000)
    with pytest.raises(DataLoss) as caught:
        archive(js, stream.name, lake)
    assert (caught.value.wanted, caught.value.first) == (401, 1901)
    archive(js, stream.name, lake, on_loss="record")
    assert proved(only_table(lake), js, lost=range(401, 1901)).rows == 900


def test_replaced_states_and_fired_timers_are_no_losses(js: JetStream, lake: Path) -> None:
    stream = new_stream(js, allow_rollup=True, allow_message_schedules=True)
    js.publish(f"{stream.name}.state", b"1")
    archive(js, stream.name, lake)
    for number in range(5):  # each replaces the one before it: the first sequence moves
        js.publish(f"{stream.name}.state", b"%d" % number, headers={"Nats-Rollup": "sub"})
    archive(js, stream.name, lake)
    found = proved(only_table(lake), js)
    assert (found.rows, found.deleted, found.next) == (2, 4, 7)


def test_a_work_queue_is_read_without_consuming_it(js: JetStream, lake: Path) -> None:
    stream = new_stream(js, retention="workqueue")
    fill(js, stream, 1500)
    archive(js, stream.name, lake)
    assert proved(only_table(lake), js).rows == 1500
    assert stream.info().state.messages == 1500


# ---- streams that come and go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_re_created_stream_gets_a_table_of_its_own(
    js: JetStream, lake: Path, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = new_stream(js)
    fill(js, stream, 100)
    with caplog.at_level(logging.WARNING), archiving(js, stream.name, lake, every_s=0.1, format=format):
        until(lambda: reached(lake) == 101)
        js.delete_stream(stream.name)
        js.create_stream(StreamConfig(name=stream.name, subjects=[f"{stream.name}.>"], allow_batched=True))
        fill(js, stream, 50)
        until(lambda: len(find_tables(str(lake))) == 2)
        until(lambda: find_tables(str(lake))[1].snapshot() is not None)
    assert "re-created" in caplog.text
    old, new = find_tables(str(lake))
    assert proved(old).rows == 100
    archive(js, stream.name, lake)
    assert proved(new, js).rows == 50


def test_a_stream_that_is_not_there_is_an_error(js: JetStream, lake: Path) -> None:
    with pytest.raises(StreamNotFound):
        archive(js, "NOWHERE", lake)


# ---- writers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_two_writers_at_once_write_each_message_once(
    js: JetStream, server: NatsServer, lake: Path, format: str
) -> None:
    stream = new_stream(js)
    options = {"every_s": 0.0, "max_rows": 700, "format": format}
    with connect(server.url) as client:
        other = client.jetstream()
        with archiving(js, stream.name, lake, **options), archiving(other, stream.name, lake, **options):
            for _ in range(30):
                fill(js, stream, 500)
            until(lambda: reached(lake) == 15_001)
    assert proved(only_table(lake), js).rows == 15_000


def test_a_second_writer_waits_for_the_lease(js: JetStream, server: NatsServer, lake: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 10)
    with connect(server.url) as client:
        other = client.jetstream()
        with archiving(js, stream.name, lake, every_s=0.1, lease_s=30.0):
            until(lambda: reached(lake) == 11)
            assert js.kv(BUCKET).stream_info().state.messages >= 1
            with pytest.raises(RequestTimeout, match="lease"):
                archive(other, stream.name, lake, patience_s=0.5)
            with archiving(other, stream.name, lake, every_s=0.1, lease_s=30.0) as second:
                time.sleep(0.3)
                assert not second.done()
        fill(js, stream, 10)
        archive(other, stream.name, lake)  # the first one has freed the lease
    snapshot = only_table(lake).snapshot()
    assert snapshot is not None
    assert snapshot.position.epoch > 0
    assert proved(only_table(lake), js).rows == 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("format", FORMATS)
def test_killed_writers_lose_and_double_nothing(
    js: JetStream, server: NatsServer, lake: Path, tmp_path: Path, format: str
) -> None:
    stream = new_stream(js)
    total, log, random_ = 0, tmp_path / "writer.log", random.Random()
    kills = 0
    while kills < 12:
        writers = [
            writer_process(server.url, stream.name, lake, log, every_s=0.0, max_rows=2000, format=format)
            for _ in range(1 + (kills % 3 == 2))
        ]
        before, deadline = reached(lake), time.monotonic() + random_.uniform(0.0, 0.5)
        while reached(lake) == before or time.monotonic() < deadline:
            fill(js, stream, 1000)
            total += 1000
            assert all(each.poll() is None for each in writers), log.read_text()
        for each in writers:
            each.kill()
            each.wait()
            kills += 1
    archive(js, stream.name, lake)
    assert proved(only_table(lake), js).rows == total


# ---- the server and the store ----------------------------------------------------------------------------------------


def test_a_restarted_server_interrupts_nothing(own: NatsServer, lake: Path) -> None:
    with connect(own.url) as client:
        js = client.jetstream()
        stream = new_stream(js, storage="file")
        fill(js, stream, 3000)
        with archiving(js, stream.name, lake, every_s=0.0, max_rows=1000):
            until(lambda: reached(lake) > 1)
            own.kill()
            own.start()
            until(lambda: client.is_connected)
            fill(js, stream, 3000)
            until(lambda: reached(lake) == stream.info().state.last_sequence + 1)
        assert proved(only_table(lake), js).rows == 6000


def test_a_stream_that_was_restored_from_an_older_state_is_an_error(
    own: NatsServer, lake: Path, tmp_path: Path
) -> None:
    with connect(own.url) as client:
        stream = new_stream(client.jetstream(), storage="file")
        fill(client.jetstream(), stream, 100)
    own.stop()
    shutil.copytree(own.store_dir, tmp_path / "older")
    own.start()
    with connect(own.url) as client:
        fill(client.jetstream(), stream := client.jetstream().stream(stream.name), 100)
        archive(client.jetstream(), stream.name, lake, lease_s=None)
    own.stop()
    shutil.rmtree(own.store_dir)
    shutil.copytree(tmp_path / "older", own.store_dir)
    own.start()
    with connect(own.url) as client:
        with pytest.raises(StreamWentBack, match="sequence 201 is needed and the stream's next one is 101"):
            archive(client.jetstream(), stream.name, lake, lease_s=None)
        fill(client.jetstream(), client.jetstream().stream(stream.name), 300)
        with pytest.raises(StreamWentBack, match="message at sequence 200 is not the one that was read there"):
            archive(client.jetstream(), stream.name, lake, lease_s=None)
    assert reached(lake) == 201


def test_a_server_that_stays_away_is_an_error_after_a_while(own: NatsServer, lake: Path) -> None:
    with connect(own.url) as client:
        js = client.jetstream(timeout=0.2)
        stream = new_stream(js)
        fill(js, stream, 10)
        options = ArchiveOptions(to=str(lake), every_s=0.0, patience_s=1.0, lease_s=None)
        with ThreadPoolExecutor(1) as beside:
            archiver = beside.submit(archive_streams, js, [stream.name], options)
            until(lambda: reached(lake) == 11)
            own.kill()
            with pytest.raises(NetworkError):
                archiver.result(60)
            own.start()


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_an_object_store_that_fails_now_and_then_interrupts_nothing(js: JetStream, format: str) -> None:
    stream = new_stream(js)
    random_ = random.Random(7)
    with s3_server() as s3:
        to, options = "s3://lake/root", s3.options
        faults: list[Fault] = ["503 before", "503 after", "cut before", "cut after"]
        s3.fault = lambda method, path: random_.choice(faults) if random_.random() < 0.1 else ""
        for _ in range(6):
            fill(js, stream, 500)
            archive(js, stream.name, to, format=format, storage_options=options, max_rows=300)
        s3.fault = lambda method, path: ""
        assert proved(only_table(to, options=options), js).rows == 3000


@pytest.mark.slow
def test_a_store_that_stays_away_is_an_error_after_a_while(js: JetStream) -> None:
    stream = new_stream(js)
    fill(js, stream, 10)
    with s3_server() as s3:
        s3.fault = lambda method, path: "503 before"
        with pytest.raises(StoreUnavailable):
            archive(js, stream.name, "s3://lake/root", storage_options=s3.options, patience_s=1.0)
