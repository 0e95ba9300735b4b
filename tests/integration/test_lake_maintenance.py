"""Verify, compact, trim and restore archives of real streams."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from support.archives import archive, archiving, only_table, proved
from support.header_blocks import BLOCKS, publish_block
from support.names import new_stream
from support.object_stores import s3_server

from jetspark import ConsumerConfig
from jetspark.blocking import JetStream, Stream, connect
from jetspark.errors import ArchiveDamaged, ConfigError, StreamRecreated
from jetspark.lake import (
    ArchiveTable,
    ArchiveVerifyOptions,
    CompactOptions,
    RestoreOptions,
    Snapshot,
    TrimOptions,
    compact_archive,
    restore_archive,
    trim_archive,
    verify_archive,
)
from jetspark.lake.compaction import MIN_AGE_S
from jetspark.lake.position import data_path
from jetspark.server import NatsServer

FORMATS = ["delta", "parquet", "iceberg"]
HOUR_S = 3600.0


@pytest.fixture
def js(server: NatsServer) -> Iterator[JetStream]:
    with connect(server.url) as client:
        yield client.jetstream()


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def fill(js: JetStream, stream: Stream, count: int) -> None:
    with js.fast_batch() as batch:
        batch.add_many((f"{stream.name}.{number % 3}", b"%d" % number) for number in range(count))


def at_last_commit(table: ArchiveTable) -> Snapshot:
    snapshot = table.snapshot()
    assert snapshot is not None
    return snapshot


# ---- verify ----------------------------------------------------------------------------------------------------------


def tamper(table: ArchiveTable, change: Callable[[pa.Table], pa.Table], rows: int | None = None) -> None:
    """Change the rows of the only file, as a bug or another program might; the log claims what it claimed before."""
    snapshot = at_last_commit(table)
    [file] = snapshot.files
    source = pq.ParquetFile(table.store.location(file.path))
    other = replace(file, path=data_path(file.day, file.begin, file.end, secrets.token_hex(4)), rows=rows or file.rows)
    path = Path(table.store.location(other.path))
    with pq.ParquetWriter(path, source.schema_arrow) as writer:
        writer.write_table(change(source.read()))
        known = {name: value for name, value in source.metadata.metadata.items() if name.startswith(b"jetspark.")}
        writer.add_key_value_metadata(known)
    table.log.commit(snapshot, snapshot.position, add=[replace(other, size_bytes=path.stat().st_size)], remove=[file])


def without(sequence: int) -> Callable[[pa.Table], pa.Table]:
    return lambda rows: rows.filter(pa.compute.not_equal(rows["sequence"], sequence))


@pytest.fixture
def damaged(js: JetStream, lake: Path) -> ArchiveTable:
    """A sound table of 20 sequences, the fourth of which is deleted; to be damaged."""
    stream = new_stream(js)
    fill(js, stream, 20)
    stream.delete_message(4)
    archive(js, stream.name, lake, format="parquet")
    table = only_table(lake)
    proved(table)
    return table


def test_a_missing_row_is_named(damaged: ArchiveTable) -> None:
    tamper(damaged, without(7), rows=18)
    found = verify_archive(damaged)  # the numbers do not add up: the rows are read
    assert (found.missing, found.is_complete) == ([range(7, 8)], False)
    assert "missing: 1 sequences: 7\nNOT complete" in str(found)


def test_a_missing_row_that_the_statistics_hide_is_named_by_a_full_verification(damaged: ArchiveTable) -> None:
    tamper(damaged, without(7))
    assert verify_archive(damaged).is_complete
    found = verify_archive(damaged, ArchiveVerifyOptions(full=True))
    assert found.missing == [range(7, 8)]
    assert [each.reason for each in found.faults] == ["has 18 rows, and the table says 19"]


def test_a_doubled_row_is_named_although_the_count_is_right(damaged: ArchiveTable) -> None:
    tamper(damaged, lambda rows: pa.concat_tables([without(7)(rows), rows.slice(8, 1)]).sort_by("sequence"))
    found = verify_archive(damaged, ArchiveVerifyOptions(full=True))
    assert (found.missing, found.doubled) == ([range(7, 8)], [range(10, 11)])


def test_a_row_of_a_deleted_sequence_or_of_another_file_is_named(damaged: ArchiveTable) -> None:
    def change(rows: pa.Table) -> pa.Table:
        sequences = pa.array([4, 99, *rows["sequence"].to_pylist()[2:]], pa.int64())
        return rows.set_column(0, rows.schema.field(0), sequences)

    tamper(damaged, change)
    found = verify_archive(damaged, ArchiveVerifyOptions(full=True))
    assert (found.missing, found.misplaced) == ([range(1, 3)], [range(4, 5), range(99, 100)])


def test_a_missing_or_cut_file_is_named(damaged: ArchiveTable) -> None:
    [file] = at_last_commit(damaged).files
    path = Path(damaged.store.location(file.path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    found = verify_archive(damaged)
    assert [each.reason for each in found.faults] == [f"has {len(whole) - 10} bytes, and the table says {len(whole)}"]
    assert found.missing == [range(1, 21)]
    for at in range(4, len(whole), max(1, len(whole) // 50)):  # whatever is damaged, the file is named
        path.write_bytes(whole[:at] + bytes(byte ^ 0xFF for byte in whole[at : at + 8]) + whole[at + 8 :])
        damage = verify_archive(damaged, ArchiveVerifyOptions(full=True))
        assert all(each.path == file.path for each in damage.faults)
    path.write_bytes(whole[:-10] + b"x" * 10)
    assert "cannot be read" in verify_archive(damaged, ArchiveVerifyOptions(full=True)).faults[0].reason
    path.unlink()
    assert [each.reason for each in verify_archive(damaged).faults] == ["is missing"]


def test_a_row_that_differs_from_the_stream_is_named(damaged: ArchiveTable, js: JetStream) -> None:
    def change(rows: pa.Table) -> pa.Table:
        data = [
            b"other" if sequence == 9 else value
            for sequence, value in zip(rows["sequence"].to_pylist(), rows["data"].to_pylist(), strict=True)
        ]
        return rows.set_column(3, rows.schema.field(3), pa.array(data, pa.binary()))

    js.stream(damaged.identity.stream).delete_message(8)
    tamper(damaged, change)
    assert verify_archive(damaged, ArchiveVerifyOptions(full=True)).is_complete
    found = verify_archive(damaged, against=js)
    assert (found.differing, found.compared) == ([range(9, 10)], 18)
    tamper(damaged, without(9))
    assert verify_archive(damaged, against=js).differing == [range(9, 10)]


def test_a_part_of_an_archive_is_verified_alone(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    for _ in range(4):
        fill(js, stream, 10)
        archive(js, stream.name, lake)
    found = verify_archive(only_table(lake), ArchiveVerifyOptions(start=11, end=31), against=js)
    assert (found.files, found.rows, found.compared, found.first, found.next) == (2, 20, 20, 11, 31)


def test_the_archive_of_an_earlier_stream_cannot_be_compared(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 5)
    archive(js, stream.name, lake)
    js.delete_stream(stream.name)
    js.create_stream(stream.name)
    with pytest.raises(StreamRecreated):
        verify_archive(only_table(lake), against=js)
    with pytest.raises(StreamRecreated):
        trim_archive(js, only_table(lake))


# ---- compact ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_small_files_are_merged_and_nothing_changes(js: JetStream, lake: Path, format: str) -> None:
    stream = new_stream(js, max_messages=200)
    for number in range(12):
        fill(js, stream, 50 if number != 6 else 300)
        if number == 3:
            stream.delete_message(170)
        archive(js, stream.name, lake, format=format, on_loss="record")
    table = only_table(lake)
    before = proved(table, js, lost=range(301, 401))
    assert before.files == 12
    plan = compact_archive(table, CompactOptions(dry_run=True))
    assert (plan.merged, plan.into) == (12, 1)
    assert len(at_last_commit(table).files) == 12
    done = compact_archive(table)
    assert (done.merged, done.into, done.removed) == (12, 1, [])
    after = proved(only_table(lake), js, lost=range(301, 401))
    assert (after.rows, after.deleted, after.files) == (before.rows, 1, 1)
    assert compact_archive(table).merged == 0
    # The replaced files stay for readers of the older version.
    assert sum(each.path.endswith(".parquet") for each in table.store.files()) == 13


@pytest.mark.parametrize("format", FORMATS)
def test_archiver_and_compaction_do_not_disturb_each_other(js: JetStream, lake: Path, format: str) -> None:
    stream = new_stream(js)
    with archiving(js, stream.name, lake, every_s=0.0, format=format):
        merged = 0
        deadline = time.monotonic() + 60
        while merged < 30 and time.monotonic() < deadline:
            fill(js, stream, 20)
            if (lake / stream.name).exists() and at_some_commit(lake):
                merged += compact_archive(only_table(lake)).merged
    archive(js, stream.name, lake)
    assert merged >= 30
    assert proved(only_table(lake), js).rows == stream.info().state.messages


def at_some_commit(lake: Path) -> bool:
    return only_table(lake).snapshot() is not None


def test_a_merged_file_that_would_differ_is_refused(damaged: ArchiveTable, js: JetStream, lake: Path) -> None:
    tamper(damaged, without(7), rows=18)
    fill(js, js.stream(damaged.identity.stream), 5)
    archive(js, damaged.identity.stream, lake)
    before = at_last_commit(damaged)
    with pytest.raises(ArchiveDamaged, match="verify --full"):
        compact_archive(damaged)
    assert at_last_commit(damaged) == before


def test_files_outside_of_the_table_are_removed_when_they_are_old(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    for _ in range(3):
        fill(js, stream, 10)
        archive(js, stream.name, lake)
    table = only_table(lake)
    folder = Path(table.uri)
    replaced = [each.path for each in at_last_commit(table).files]
    compact_archive(table)
    [merged] = at_last_commit(table).files
    orphan = data_path(merged.day, 5, 9, "0badf00d")
    leftover = ".writing-0123"
    foreign = "notes.txt"
    for path in (orphan, leftover, foreign):
        (folder / path).write_bytes(b"x")
    old_s = time.time() - 2 * HOUR_S
    for path in (*replaced, orphan, leftover, foreign):
        os.utime(folder / path, (old_s, old_s))
    options = CompactOptions(remove_after_s=MIN_AGE_S)
    # Replaced a moment ago, however old they are themselves.
    assert compact_archive(table, options).removed == [leftover]
    os.utime(folder / merged.path, (old_s, old_s))
    assert sorted(compact_archive(table, options).removed) == sorted([*replaced, orphan])
    assert (folder / foreign).exists()
    proved(table, js)
    with pytest.raises(ConfigError, match="3600 or more"):
        CompactOptions(remove_after_s=10.0)


def test_an_archive_in_an_object_store_is_compacted(js: JetStream) -> None:
    stream = new_stream(js)
    with s3_server() as s3:
        for _ in range(4):
            fill(js, stream, 30)
            archive(js, stream.name, "s3://lake", storage_options=s3.options)
        table = only_table("s3://lake", options=s3.options)
        assert compact_archive(table).merged == 4
        assert proved(table, js).rows == 120


# ---- trim ------------------------------------------------------------------------------------------------------------


def test_only_archived_messages_are_trimmed(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 50)
    stream.delete_message(20)
    archive(js, stream.name, lake)
    fill(js, stream, 10)
    plan = trim_archive(js, only_table(lake), TrimOptions(keep_s=0, dry_run=True))
    assert (plan.removed, plan.limit, plan.reason, plan.is_verified) == (49, 51, "not archived yet", True)
    assert stream.info().state.messages == 59
    done = trim_archive(js, only_table(lake), TrimOptions(keep_s=0))
    assert (done.removed, stream.info().state.messages, stream.info().state.first_sequence) == (49, 10, 51)
    assert "49 messages before sequence 51 removed" in str(done)
    archive(js, stream.name, lake)  # a trimmed stream has lost nothing
    assert proved(only_table(lake), js).rows == 59
    assert trim_archive(js, only_table(lake), TrimOptions(keep_s=0)).removed == 10


def test_young_messages_stay(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    fill(js, stream, 5)
    time.sleep(1.2)
    fill(js, stream, 5)
    archive(js, stream.name, lake)
    assert trim_archive(js, only_table(lake)).removed == 0
    done = trim_archive(js, only_table(lake), TrimOptions(keep_s=1.0))
    assert (done.removed, done.reason) == (5, "younger than 1 s")


def test_nothing_is_trimmed_that_differs_or_is_missing(damaged: ArchiveTable, js: JetStream) -> None:
    stream = js.stream(damaged.identity.stream)
    tamper(damaged, without(7))
    done = trim_archive(js, damaged, TrimOptions(keep_s=0))
    assert not done.is_verified
    assert done.verification is not None
    assert done.verification.missing == done.verification.differing == [range(7, 8)]
    assert stream.info().state.messages == 19


def test_messages_that_a_consumer_has_not_acknowledged_stay(js: JetStream, lake: Path) -> None:
    stream = new_stream(js)
    consumer = stream.create_consumer(ConsumerConfig(durable_name="billing"))
    fill(js, stream, 10)
    archive(js, stream.name, lake)
    for message in consumer.fetch(4, timeout=5.0):
        message.ack_sync()
    done = trim_archive(js, only_table(lake), TrimOptions(keep_s=0))
    assert (done.removed, done.reason) == (4, "consumer billing has not acknowledged it")
    assert trim_archive(js, only_table(lake), TrimOptions(keep_s=0, ignore_consumers=True)).removed == 6


def test_timers_and_states_stay(js: JetStream, lake: Path) -> None:
    stream = new_stream(js, allow_rollup=True, allow_message_schedules=True, allow_message_ttl=True)
    fill(js, stream, 3)
    for number in range(2):  # the second replaces the first
        js.publish(f"{stream.name}.state", b"%d" % number, headers={"Nats-Rollup": "sub"})
    fill(js, stream, 3)
    archive(js, stream.name, lake)
    done = trim_archive(js, only_table(lake), TrimOptions(keep_s=0))
    assert (done.removed, done.limit, done.reason) == (3, 5, f"the state of subject {stream.name}.state")
    assert stream.info().state.first_sequence == 5


def test_streams_of_work_or_state_are_not_trimmed(js: JetStream, lake: Path) -> None:
    for options, word in (({"retention": "workqueue"}, "work"), ({"max_messages_per_subject": 1}, "state")):
        stream = new_stream(js, **options)
        js.publish(f"{stream.name}.1", b"")
        archive(js, stream.name, lake / word)
        with pytest.raises(ConfigError, match=word):
            trim_archive(js, only_table(lake / word), TrimOptions(keep_s=0))


# ---- restore ---------------------------------------------------------------------------------------------------------


def restored(stream: Stream) -> list[tuple[str, bytes, int]]:
    found = list(stream.get_messages())
    assert [each.sequence for each in found] == list(range(1, len(found) + 1))
    return [(each.subject, each.data, int(each.headers["Jetspark-Restored-Sequence"])) for each in found]


def test_restored_messages_say_where_they_were(server: NatsServer, js: JetStream, lake: Path) -> None:
    stream, target = new_stream(js, allow_rollup=True), new_stream(js)
    fill(js, stream, 3)
    for name, block in BLOCKS.items():
        publish_block(server.port, f"{stream.name}.{name}", block, name.encode())
    js.publish(f"{stream.name}.r", b"r", msg_id="evt-1", headers={"Nats-Rollup": "sub", "A": ["1", "2"], "a": "3"})
    archive(js, stream.name, lake)
    options = RestoreOptions(into=target.name, subject=f"{target.name}.{{subject}}", start=2)
    plan = restore_archive(js, only_table(lake), replace(options, dry_run=True))
    assert (plan.restored, target.info().state.messages) == (len(BLOCKS) + 3, 0)
    done = restore_archive(js, only_table(lake), options)
    assert done.restored == plan.restored
    originals = [stream.get_message(sequence, direct=False) for sequence in range(2, done.restored + 2)]
    assert restored(target) == [(f"{target.name}.{each.subject}", each.data, each.sequence) for each in originals]
    last = target.get_message(done.restored)
    headers = {name: last.headers.get_all(name) for name in last.headers if not name.startswith("Nats-Batch-")}
    assert headers.pop("Jetspark-Restored-Time")[0].startswith(originals[-1].timestamp.isoformat()[:19])
    assert headers == {
        "Jetspark-Restored-Stream": [stream.name],
        "Jetspark-Restored-Created": [only_table(lake).identity.created],
        "Jetspark-Restored-Sequence": [str(originals[-1].sequence)],
        "Jetspark-Restored-Nats-Msg-Id": ["evt-1"],
        "Jetspark-Restored-Nats-Rollup": ["sub"],
        "A": ["1", "2"],
        "a": ["3"],
    }
    again = restore_archive(js, only_table(lake), options)
    assert (again.restored, str(again)) == (0, f"stream {target.name}: everything is there already")


def test_an_interrupted_restore_continues_without_doubling(js: JetStream, lake: Path) -> None:
    stream, target = new_stream(js), new_stream(js)
    fill(js, stream, 5000)
    archive(js, stream.name, lake)
    options = RestoreOptions(into=target.name, subject=f"{target.name}.{{subject}}")

    class Interrupted(Exception):
        pass

    def interrupt(at: int, last: int) -> None:
        raise Interrupted

    for _ in range(3):
        with pytest.raises(Interrupted):
            restore_archive(js, only_table(lake), options, on_progress=interrupt)
    assert 0 < target.info().state.messages < 5000
    restore_archive(js, only_table(lake), options)
    assert [sequence for _, _, sequence in restored(target)] == list(range(1, 5001))


def test_two_restores_at_once_store_each_message_once(js: JetStream, server: NatsServer, lake: Path) -> None:
    stream, target = new_stream(js), new_stream(js)
    fill(js, stream, 5000)
    archive(js, stream.name, lake)
    options = RestoreOptions(into=target.name, subject=f"{target.name}.{{subject}}")
    with connect(server.url) as client:
        other = threading.Thread(target=restore_archive, args=(client.jetstream(), only_table(lake), options))
        other.start()
        restore_archive(js, only_table(lake), options)
        other.join()
    assert [sequence for _, _, sequence in restored(target)] == list(range(1, 5001))


def test_a_target_that_cannot_be_used_is_refused(js: JetStream, lake: Path) -> None:
    stream, other = new_stream(js), new_stream(js)
    fill(js, stream, 5)
    archive(js, stream.name, lake)
    table = only_table(lake)
    cases: list[tuple[Stream, str, str]] = [
        (stream, "{subject}", "another stream"),
        (other, "{subject}", "does not store subject"),
        (new_stream(js, allow_atomic=False), "{subject}", "set allow_atomic"),
    ]
    js.publish(f"{other.name}.x", b"not restored")
    cases[1] = (new_stream(js), "{subject}", "does not store subject")
    cases.append((other, f"{other.name}.{{subject}}", "was not restored"))
    for target, subject, message in cases:
        with pytest.raises(ConfigError, match=message):
            restore_archive(js, table, RestoreOptions(into=target.name, subject=subject))
    with pytest.raises(ConfigError, match=re.escape("expected {subject}")):
        RestoreOptions(into="X", subject="restored.>")
