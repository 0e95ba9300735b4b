"""The data files of an archive: Parquet with the columns of :data:`~jetspark.lake.rows.RAW_SCHEMA`.

The footer of a file names the incarnation of the stream, and the covered sequences that have no row, as pairs of
numbers, compressed: ``jetspark.deleted`` were not in the stream when it was read, ``jetspark.lost`` were removed by its
limits before they were archived. So a row that is missing for any other reason shows.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import secrets
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

from jetspark.errors import ArchiveDamaged, ConfigError, StoreRefused, UsageError
from jetspark.lake import arrow_functions as pc
from jetspark.lake.position import DataFile, StreamIdentity, data_path
from jetspark.lake.rows import RAW_SCHEMA
from jetspark.lake.store import FileStore

__all__ = ["FILE_BYTES", "DataFileWriter", "Footer", "read_footer", "read_rows"]

FILE_BYTES = 128 << 20
"""Size from which a writer begins the next file."""
# A reader that wants one sequence reads one group; smaller ones compress less and cost more for each row.
GROUP_ROWS = 64_000
GROUP_BYTES = 16 << 20

_DAY_NS = 86_400 * 1_000_000_000
_EPOCH = datetime.date(1970, 1, 1)
# Statistics of other columns prune nothing and would copy the messages' data into the footer.
_STATISTICS = ["sequence", "timestamp", "timestamp_ns", "subject"]
_DICTIONARIES = ["subject", "stream", "headers.key_value.key"]
_ENCODINGS = dict.fromkeys(["sequence", "timestamp", "timestamp_ns"], "DELTA_BINARY_PACKED")


@dataclass(frozen=True, slots=True)
class Footer:
    """The metadata of a data file that its rows cannot tell."""

    identity: StreamIdentity
    deleted: tuple[range, ...]
    """Covered sequences without a row that were not in the stream when it was read, in order."""
    lost: tuple[range, ...]
    """Covered sequences that the stream's limits removed before they were archived, in order."""


class DataFileWriter:
    """Writes the rows of the sequences from ``begin`` on as data files, one after the other.

    A new file begins when the day changes and when the present one is full. The files are in the store when
    :meth:`finish` returns them, and in the table only after a commit. Holds one row group in memory. Use it as a
    context manager: leaving it without :meth:`finish` discards the file that is being written.
    """

    def __init__(self, store: FileStore, identity: StreamIdentity, begin: int, *, file_bytes: int = FILE_BYTES) -> None:
        """``store`` is rooted at the table."""
        self._store, self._identity, self._file_bytes = store, identity, file_bytes
        self._begin = self._next = begin
        self._file: _OpenFile | None = None
        self._lost: list[range] = []
        self._finished: list[DataFile] = []

    def __enter__(self) -> DataFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()
            self._file = None

    @property
    def size_bytes(self) -> int:
        """The size of the files so far."""
        written = sum(each.size_bytes for each in self._finished)
        return written if self._file is None else written + self._file.size_bytes

    @property
    def rows(self) -> int:
        """The number of rows so far."""
        written = sum(each.rows for each in self._finished)
        return written if self._file is None else written + self._file.rows

    def write(self, rows: pa.RecordBatch, *, lost: Sequence[range] = ()) -> None:
        """Add rows, sorted by sequence, behind those written before.

        Args:
            lost: Sequences between these rows, or before them, that the stream's limits removed. Any other sequence
                without a row counts as deleted.

        Raises:
            UsageError: The rows are not in order.
        """
        self._lost += lost
        if not rows.num_rows:
            return
        sequences = rows.column("sequence")
        if sequences[0].as_py() < self._next or not _ascends(sequences):
            raise UsageError(
                f"rows from sequence {sequences[0].as_py()} on: expected ascending ones from {self._next} on"
            )
        for day, part in _by_day(rows):
            if self._file is not None and (self._file.day != day or self._file.size_bytes >= self._file_bytes):
                # Ends behind its last row: the next one covers the sequences in between.
                self._close(self._next)
            if self._file is None:
                self._file = _OpenFile(self._store, day, self._begin)
            self._file.add(part)
            self._next = part.column("sequence")[-1].as_py() + 1

    def finish(self, end: int, *, lost: Sequence[range] = ()) -> list[DataFile]:
        """Close the last file, which covers the sequences up to ``end``, exclusive.

        Returns:
            The files, in order; none if there was no row: the file after them covers this range, too.
        """
        self._lost += lost
        if end < self._next:
            raise UsageError(f"end={end}: expected {self._next} or more, behind the last row")
        if self._file is not None:
            self._close(end)
        return self._finished

    def _close(self, end: int) -> None:
        file, self._file = self._file, None
        assert file is not None
        lost = [range(max(each.start, self._begin), min(each.stop, end)) for each in self._lost]
        self._finished.append(file.close(self._identity, end, [each for each in lost if each]))
        self._begin = end


class _OpenFile:
    """A file that is being written."""

    def __init__(self, store: FileStore, day: datetime.date, begin: int) -> None:
        self.day, self._begin, self._store = day, begin, store
        self._resources = contextlib.ExitStack()
        self._path: Path = self._resources.enter_context(store.scratch_file())
        self._sink = self._resources.enter_context(pa.OSFile(str(self._path), "wb"))
        self._writer = pq.ParquetWriter(
            self._sink,
            RAW_SCHEMA,
            compression="zstd",
            write_page_checksum=True,
            use_dictionary=_DICTIONARIES,
            column_encoding=_ENCODINGS,
            write_statistics=_STATISTICS,
            sorting_columns=[pq.SortingColumn(0)],
        )
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._next = begin
        self._gaps: list[tuple[Any, Any]] = []
        self.rows = 0
        self._sequences = self._times_us = (0, 0)

    @property
    def size_bytes(self) -> int:
        return int(self._sink.tell()) + self._waiting_bytes

    def add(self, rows: pa.RecordBatch) -> None:
        sequences = rows.column("sequence")
        first, last = sequences[0].as_py(), sequences[-1].as_py()
        if last - self._next != rows.num_rows - 1:
            self._gaps.append(_gaps(self._next, sequences))
        self._next = last + 1
        times = pc.min_max(rows.column("timestamp_ns")).as_py()
        low, high = times["min"] // 1000, times["max"] // 1000
        if self.rows:
            first, low, high = self._sequences[0], min(low, self._times_us[0]), max(high, self._times_us[1])
        self._sequences, self._times_us = (first, last), (low, high)
        self.rows += rows.num_rows
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if self._waiting_rows >= GROUP_ROWS or self._waiting_bytes >= GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if self._waiting:
            group, self._waiting = pa.Table.from_batches(self._waiting, RAW_SCHEMA), []
            self._waiting_rows = self._waiting_bytes = 0
            try:
                self._writer.write_table(group, row_group_size=group.num_rows)
            except OSError as error:
                raise StoreRefused(self._store.uri, f"{self._path}: {error}; make room there") from error

    def close(self, identity: StreamIdentity, end: int, lost: list[range]) -> DataFile:
        with self._resources:
            self._write_group()
            gaps = [range(*each) for starts, stops in self._gaps for each in zip(starts, stops, strict=True)]
            if end > self._next:
                gaps.append(range(self._next, end))
            self._writer.add_key_value_metadata(
                {
                    "jetspark.stream": identity.stream,
                    "jetspark.created": identity.created,
                    "jetspark.deleted": _packed(_without(gaps, lost), self._begin),
                    "jetspark.lost": _packed(lost, self._begin),
                }
            )
            self._writer.close()
            self._sink.close()
            path = data_path(self.day, self._begin, end, secrets.token_hex(4))
            size = self._store.put_file(path, self._path)
        return DataFile(
            path=path,
            day=self.day,
            begin=self._begin,
            end=end,
            rows=self.rows,
            size_bytes=size,
            min_sequence=self._sequences[0],
            max_sequence=self._sequences[1],
            min_time_us=self._times_us[0],
            max_time_us=self._times_us[1],
        )

    def discard(self) -> None:
        with self._resources, contextlib.suppress(OSError):  # a full disk may be why it is discarded
            self._writer.close()


def read_rows(
    store: FileStore,
    file: DataFile,
    *,
    start: int | None = None,
    end: int | None = None,
    columns: Sequence[str] | None = None,
    batch_rows: int = 10_000,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file with sequences from ``start`` to ``end``, exclusive, in order.

    Only the row groups that have such rows are read, one at a time.

    Args:
        store: Rooted at the table.
        columns: Some columns of :data:`~jetspark.lake.rows.RAW_SCHEMA`, in the order of the batches; None for all.

    Raises:
        ArchiveDamaged: The file is missing or cannot be read.
    """
    names = list(columns) if columns is not None else RAW_SCHEMA.names
    if unknown := [name for name in names if name not in RAW_SCHEMA.names]:
        raise ConfigError(f"column {unknown[0]!r}: an archive has {', '.join(RAW_SCHEMA.names)}")
    low = file.begin if start is None else start
    high = file.end if end is None else end
    if low > file.max_sequence or high <= file.min_sequence:
        return
    with _opened(store, file) as parquet:
        wanted = list(dict.fromkeys([*names, "sequence"]))
        for group in range(parquet.num_row_groups):
            statistics = parquet.metadata.row_group(group).column(0).statistics
            if statistics.max < low or statistics.min >= high:
                continue
            # One group at a time: the whole list would be buffered.
            for rows in parquet.iter_batches(batch_rows, row_groups=[group], columns=wanted):
                sequences = rows.column("sequence")
                begin, stop = _count_below(sequences, low), _count_below(sequences, high)
                if begin < stop:
                    yield rows.slice(begin, stop - begin).select(names)


def read_footer(store: FileStore, file: DataFile) -> Footer:
    """
    Raises:
        ArchiveDamaged: The file is missing or cannot be read.
    """
    with _opened(store, file) as parquet:
        found = parquet.metadata.metadata or {}
        try:
            return Footer(
                StreamIdentity(found[b"jetspark.stream"].decode(), found[b"jetspark.created"].decode()),
                _unpacked(found[b"jetspark.deleted"], file.begin),
                _unpacked(found[b"jetspark.lost"], file.begin),
            )
        except (KeyError, ValueError, zlib.error) as error:
            raise ArchiveDamaged(store.uri, f"file {file.path} has no footer of JetSpark: {error!r}") from error


@contextlib.contextmanager
def _opened(store: FileStore, file: DataFile) -> Iterator[Any]:
    try:
        with (
            store.open(file.path, size_bytes=file.size_bytes) as source,
            pq.ParquetFile(source, page_checksum_verification=True) as parquet,
        ):
            yield parquet
    except FileNotFoundError as error:
        raise ArchiveDamaged(store.uri, f"file {file.path} is missing; restore it from a backup") from error
    except (pa.ArrowException, OSError, ValueError) as error:  # all three, by what is damaged
        raise ArchiveDamaged(store.uri, f"file {file.path} cannot be read: {error}") from error


# ---- sequences ------------------------------------------------------------------------------------------------------


def _ascends(sequences: Any) -> bool:
    if len(sequences) == 1:
        return True
    return bool(pc.all(pc.greater(sequences[1:], sequences[:-1])).as_py())


def _count_below(sequences: Any, bound: int) -> int:
    """How many of the sequences, which ascend, are below the bound."""
    return int(pc.sum(pc.less(sequences, bound)).as_py() or 0)


def _by_day(rows: pa.RecordBatch) -> Iterator[tuple[datetime.date, pa.RecordBatch]]:
    """Parts of one day each, in order; a day may come twice if the server's clock went back."""
    days = pc.divide(rows.column("timestamp_ns"), _DAY_NS)
    begin = 0
    changes = pc.indices_nonzero(pc.not_equal(days[1:], days[:-1])).to_pylist() if len(days) > 1 else []
    for end in [*(each + 1 for each in changes), len(days)]:
        yield _EPOCH + datetime.timedelta(days=days[begin].as_py()), rows.slice(begin, end - begin)
        begin = end


def _gaps(expected: int, sequences: Any) -> tuple[list[int], list[int]]:
    """The sequences without a row before each row: where each run begins and where it ends, exclusive."""
    starts = pa.concat_arrays([pa.array([expected], pa.int64()), pc.add(sequences[:-1], 1)])
    is_gap = pc.greater(sequences, starts)
    return starts.filter(is_gap).to_pylist(), sequences.filter(is_gap).to_pylist()


def _without(gaps: list[range], lost: list[range]) -> list[range]:
    """The sequences of the first ranges that are in none of the second; both are in order."""
    for each in lost:
        gaps = [
            part
            for gap in gaps
            for part in (range(gap.start, min(gap.stop, each.start)), range(max(gap.start, each.stop), gap.stop))
            if part
        ]
    return gaps


def _packed(ranges: Sequence[range], begin: int) -> str:
    """Ranges as text: the distance of each from the one before, and its length. One deletion in two takes 0.1 bytes."""
    numbers = []
    for each in ranges:
        numbers += [each.start - begin, len(each)]
        begin = each.stop
    return base64.b64encode(zlib.compress(pa.array(numbers, pa.int64()).buffers()[1].to_pybytes())).decode()


def _unpacked(text: bytes, begin: int) -> tuple[range, ...]:
    raw = zlib.decompress(base64.b64decode(text, validate=True))
    numbers = memoryview(raw).cast("q")
    found = []
    for at in range(0, len(numbers), 2):
        start = begin + numbers[at]
        begin = start + numbers[at + 1]
        found.append(range(start, begin))
    return tuple(found)
