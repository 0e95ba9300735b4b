"""Data files: what they cover, their footers and statistics, and reading a part of them."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import parquet as pq
from support.archived import DAY_NS, IDENTITY, NOON_NS, contents, stored

from jetspark.errors import ArchiveDamaged, ConfigError, UsageError
from jetspark.jetstream.info import StoredMessage
from jetspark.lake import parquet_files
from jetspark.lake.folder_store import FolderStore
from jetspark.lake.parquet_files import DataFileWriter, read_footer, read_rows
from jetspark.lake.position import DataFile, coverage_of
from jetspark.lake.rows import RAW_SCHEMA, messages_of, rows_of


def write(
    store: FolderStore, messages: list[StoredMessage], begin: int, end: int, *, piece: int = 100
) -> list[DataFile]:
    with DataFileWriter(store, IDENTITY, begin) as writer:
        for at in range(0, len(messages), piece):
            writer.write(rows_of("ORDERS", messages[at : at + piece]))
        return writer.finish(end)


def read(store: FolderStore, file: DataFile, start: int | None = None, end: int | None = None) -> list[int]:
    batches = read_rows(store, file, start=start, end=end, columns=["sequence"])
    return [sequence for rows in batches for sequence in rows.column("sequence").to_pylist()]


@given(
    st.sets(st.integers(1, 60), min_size=1),
    st.sets(st.integers(1, 60), max_size=3),
    st.integers(1, 7),
    st.integers(0, 62),
    st.integers(0, 62),
)
def test_files_cover_the_range_once_and_say_what_is_missing(
    tmp_path_factory: pytest.TempPathFactory, there: set[int], days: set[int], piece: int, low: int, high: int
) -> None:
    store = FolderStore(tmp_path_factory.mktemp("table"))
    # The day changes before each of these sequences, and changes back: a server's clock may.
    time_ns = NOON_NS
    messages = []
    for sequence in range(1, 61):
        time_ns += (DAY_NS if sequence % 2 else -DAY_NS) * (sequence in days) + 1
        if sequence in there:
            messages.append(stored(sequence, data=b"%d" % sequence, time_ns=time_ns))
    files = write(store, messages, 1, 61, piece=piece)
    assert [each.begin for each in files] == [1, *(each.end for each in files[:-1])]
    assert files[-1].end == 61
    found = []
    for each in files:
        assert coverage_of(each.path) == (each.day, each.begin, each.end)
        rows = [message for batch in read_rows(store, each) for message in messages_of(batch)]
        assert {message.timestamp.date() for message in rows} == {each.day}
        sequences = [message.sequence for message in rows]
        assert (each.rows, each.min_sequence, each.max_sequence) == (len(rows), sequences[0], sequences[-1])
        assert each.size_bytes == Path(store.location(each.path)).stat().st_size
        times_us = [message.time_ns // 1000 for message in rows if message.time_ns]
        assert (each.min_time_us, each.max_time_us) == (min(times_us), max(times_us))
        footer = read_footer(store, each)
        missing = [sequence for part in footer.deleted for sequence in part]
        assert sorted(missing + sequences) == list(range(each.begin, each.end))
        assert footer.identity == IDENTITY
        assert footer.lost == ()
        assert read(store, each, low, high) == [sequence for sequence in sequences if low <= sequence < high]
        found += rows
    assert contents(found) == contents(messages)


def test_lost_sequences_are_not_deleted_ones(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with DataFileWriter(store, IDENTITY, 1) as writer:
        writer.write(rows_of("ORDERS", [stored(5), stored(9)]), lost=[range(1, 4), range(7, 8)])
        writer.write(rows_of("ORDERS", [stored(12, time_ns=NOON_NS + DAY_NS)]), lost=[range(9 + 1, 12)])
        first, second = writer.finish(20, lost=[range(15, 17)])
    assert (first.begin, first.end, second.end) == (1, 10, 20)
    footer = read_footer(store, first)
    assert (footer.lost, footer.deleted) == ((range(1, 4), range(7, 8)), (range(4, 5), range(6, 7), range(8, 9)))
    footer = read_footer(store, second)
    assert (footer.lost, footer.deleted) == ((range(10, 12), range(15, 17)), (range(13, 15), range(17, 20)))


def test_a_range_without_rows_makes_no_file(tmp_path: Path) -> None:
    assert write(FolderStore(tmp_path), [], 1, 100) == []
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_is_followed_by_another(tmp_path: Path) -> None:
    store, noise = FolderStore(tmp_path), random.Random(1)
    with DataFileWriter(store, IDENTITY, 1, file_bytes=200_000) as writer:
        for sequence in range(1, 1001):
            writer.write(rows_of("ORDERS", [stored(sequence, data=noise.randbytes(1000))]))
        assert writer.rows == 1000
        assert writer.size_bytes > 900_000
        files = writer.finish(2000)
    assert len(files) in range(4, 7)
    # Behind the last row of the last file nothing came: it covers the rest.
    assert [each.is_dense for each in files] == [True] * (len(files) - 1) + [False]
    assert (files[-1].max_sequence, files[-1].end) == (1000, 2000)


def test_a_file_is_written_in_groups_and_read_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_files, "GROUP_ROWS", 100)
    store = FolderStore(tmp_path)
    (file,) = write(store, [stored(sequence) for sequence in range(1, 1001)], 1, 1001, piece=30)
    parquet = pq.ParquetFile(store.location(file.path))
    assert parquet.num_row_groups == 9
    read_groups = []
    iter_batches = pq.ParquetFile.iter_batches

    def noted(self: pq.ParquetFile, *arguments: object, row_groups: list[int], **others: object) -> object:
        read_groups.append(row_groups)
        return iter_batches(self, *arguments, row_groups=row_groups, **others)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    assert read(store, file, 250, 370) == list(range(250, 370))
    assert read_groups == [[2], [3]]
    parquet.close()


def test_memory_is_that_of_a_row_group_not_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_files, "GROUP_BYTES", 1 << 20)
    store, noise = FolderStore(tmp_path), random.Random(1)
    pool = pa.default_memory_pool()
    before, highest = pool.bytes_allocated(), 0
    with DataFileWriter(store, IDENTITY, 1) as writer:
        for begin in range(1, 40_000, 100):
            writer.write(
                rows_of("ORDERS", [stored(each, data=noise.randbytes(1000)) for each in range(begin, begin + 100)])
            )
            highest = max(highest, pool.bytes_allocated() - before)
        (file,) = writer.finish(40_001)
    assert file.size_bytes > 30 << 20
    assert highest < 8 << 20
    for _ in read_rows(store, file, batch_rows=100):
        highest = max(highest, pool.bytes_allocated() - before)
    assert highest < 8 << 20


def test_a_writer_that_is_left_early_leaves_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with DataFileWriter(store, IDENTITY, 1) as writer:
        writer.write(rows_of("ORDERS", [stored(1)]))
        assert [each.name.startswith(".writing-") for each in tmp_path.iterdir()] == [True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sequences", [[2, 1], [1, 1], [5, 7, 6]])
def test_rows_out_of_order_are_refused(tmp_path: Path, sequences: list[int]) -> None:
    with DataFileWriter(FolderStore(tmp_path), IDENTITY, 1) as writer:
        with pytest.raises(UsageError, match="ascending"):
            writer.write(rows_of("ORDERS", [stored(each) for each in sequences]))
        writer.write(rows_of("ORDERS", [stored(9)]))
        with pytest.raises(UsageError, match="from 10 on"):
            writer.write(rows_of("ORDERS", [stored(9)]))
        with pytest.raises(UsageError, match="end=9: expected 10 or more"):
            writer.finish(9)


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (file,) = write(store, [stored(1, data=b"x")], 1, 2)
    (rows,) = read_rows(store, file, columns=["data", "subject"])
    assert rows.to_pylist() == [{"data": b"x", "subject": "orders.o-1.paid"}]
    assert next(iter(read_rows(store, file))).schema.equals(RAW_SCHEMA)
    with pytest.raises(ConfigError, match=r"column 'day': an archive has sequence, subject"):
        next(iter(read_rows(store, file, columns=["day"])))


def test_deleted_sequences_cost_little(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    dense = write(store, [stored(each) for each in range(2, 20_002)], 2, 20_002, piece=5000)
    sparse = write(store, [stored(each) for each in range(2, 40_001, 2)], 2, 40_002, piece=5000)
    footers = [pq.read_metadata(store.location(each.path)).metadata[b"jetspark.deleted"] for (each,) in (dense, sparse)]
    assert len(footers[1]) - len(footers[0]) < 2000
    assert len(read_footer(store, sparse[0]).deleted) == 20_000


def test_a_file_that_is_missing_cut_or_not_ours_is_an_error(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (file,) = write(store, [stored(1)], 1, 2)
    path = Path(store.location(file.path))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArchiveDamaged, match=r"day=2026-11-19/0.*cannot be read"):
        next(iter(read_rows(store, file)))
    # One bit in the last page of each column: pages have checksums.
    path.write_bytes(whole)
    group = pq.read_metadata(path).row_group(0)
    for chunk in map(group.column, range(group.num_columns)):
        at = chunk.data_page_offset + chunk.total_compressed_size - 2
        if chunk.dictionary_page_offset is not None:
            at -= chunk.data_page_offset - chunk.dictionary_page_offset
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ArchiveDamaged, match="cannot be read"):
            list(read_rows(store, file))
    path.write_bytes(whole)
    assert read(store, file) == [1]
    pq.write_table(pa.table({"sequence": [1]}), path)
    with pytest.raises(ArchiveDamaged, match="no footer of JetSpark"):
        read_footer(store, file)
    path.unlink()
    for reading in (lambda: list(read_rows(store, file)), lambda: read_footer(store, file)):
        with pytest.raises(ArchiveDamaged, match="is missing"):
            reading()


def test_a_file_has_statistics_that_other_engines_prune_by(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (file,) = write(store, [stored(each, data=b"x" * 100) for each in range(1, 101)], 1, 101)
    group = pq.read_metadata(store.location(file.path)).row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    assert (columns["sequence"].statistics.min, columns["sequence"].statistics.max) == (1, 100)
    assert columns["timestamp"].statistics.min == datetime.datetime(2026, 11, 19, 12, tzinfo=datetime.UTC)
    assert columns["data"].statistics is None
    assert columns["data"].compression == "ZSTD"
