"""Reading an archive: its rows by sequence, and the questions about it that planning has.

Statistics of the files prune by sequence and by time, so a question reads at most a column of one file, and a range
reads only its row groups. A reader is plain data: Spark pickles it for its tasks, with the files of their ranges.
"""

from __future__ import annotations

import datetime
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from jetspark.core.subjects import on_one_of
from jetspark.errors import ConfigError, DataLoss
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.wire import parse_time
from jetspark.lake import arrow_functions as pc
from jetspark.lake.archive import find_tables, open_table, raw_folder
from jetspark.lake.parquet_files import read_footer, read_rows
from jetspark.lake.position import ArchivePosition, DataFile, Snapshot, StreamIdentity
from jetspark.lake.rows import RAW_SCHEMA, messages_of
from jetspark.lake.store import FileStore, open_store

__all__ = ["ArchiveReader", "ArchiveRoot"]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_LOST = "the stream's limits removed it before it was archived"


@dataclass(frozen=True, slots=True)
class ArchiveRoot:
    """The root of an archive: a folder or a URI, as ``jetspark archive run --to`` has it."""

    uri: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of the object store, such as ``aws_endpoint``; others come from the environment."""

    @classmethod
    def of(cls, given: ArchiveRoot | str) -> ArchiveRoot:
        """
        Raises:
            ConfigError: It is neither a root nor a URI.
        """
        if isinstance(given, ArchiveRoot):
            return given
        if not isinstance(given, str) or not given.strip():
            raise ConfigError(f"archive={given!r}: expected a folder or a URI such as s3://bucket/lake")
        return cls(given)

    def open(self, stream: str) -> ArchiveReader:
        """The table of the newest archived incarnation of a stream.

        Raises:
            ConfigError: The stream has no archive here.
        """
        found = [(table, snapshot) for table in self._tables(stream) if (snapshot := table.snapshot()) is not None]
        if not found:
            known = sorted({table.identity.stream for table in self._tables(None)})
            raise ConfigError(
                f"archive={self.uri!r}: stream {stream!r} has no archive there; it has those of "
                f"{', '.join(known) or 'no stream'}: make one (jetspark archive run {stream} --to {self.uri}), or give "
                "another URI"
            )
        _, snapshot = max(found, key=lambda each: parse_time(each[0].identity.created) or _EPOCH)
        return ArchiveReader(self, snapshot)

    def _tables(self, stream: str | None) -> Iterable[Any]:
        return find_tables(self.uri, stream=stream, options=self.options)


@dataclass(frozen=True, slots=True)
class ArchiveReader:
    """One table at one commit."""

    root: ArchiveRoot
    snapshot: Snapshot

    @property
    def uri(self) -> str:
        return f"{self.root.uri.rstrip('/')}/{self.identity.folder}"

    @property
    def identity(self) -> StreamIdentity:
        return self.position.identity

    @property
    def position(self) -> ArchivePosition:
        return self.snapshot.position

    @property
    def files(self) -> tuple[DataFile, ...]:
        return self.snapshot.files

    @property
    def version(self) -> object:
        """Another one after each commit."""
        return self.snapshot.version

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.files)

    @property
    def bytes_per_message(self) -> float:
        """An estimate."""
        # Messages compress to a fourth, more or less; limits in bytes are rough in a stream, too.
        return 4 * sum(each.size_bytes for each in self.files) / max(1, self.rows)

    def within(self, start: int, end: int) -> ArchiveReader:
        """The same table with only the files of a range, to be sent to a task."""
        files = self.files
        files = files[bisect_right(files, start, key=lambda each: each.end) :]
        files = files[: bisect_left(files, end, key=lambda each: each.begin)]
        return replace(self, snapshot=replace(self.snapshot, files=files))

    def reopened(self) -> ArchiveReader:
        """The table as it is now, with all files."""
        found = open_table(self.root.uri, self.identity, options=self.root.options).snapshot()
        if found is None:
            raise ConfigError(f"archive {self.uri} was removed while it was read")
        return replace(self, snapshot=found)

    # ---- questions ---------------------------------------------------------------------------------------------

    def count_from(self, sequence: int) -> int:
        """The number of messages from a sequence on."""
        count = sum(each.rows for each in self.files if each.begin >= sequence)
        for file in self.files:
            if file.begin < sequence < file.end:
                rows = read_rows(self._store(), file, start=sequence, columns=["sequence"])
                count += file.end - sequence if file.is_dense else sum(each.num_rows for each in rows)
        return count

    def sequence_at(self, moment: datetime.datetime) -> int | None:
        """The first message stored at or after a moment; None without such a message."""
        time_us = (moment - _EPOCH) // _MICROSECOND
        for file in self.files:
            if file.max_time_us >= time_us:
                for rows in read_rows(self._store(), file, columns=["sequence", "timestamp_ns"]):
                    found = rows.filter(pc.greater_equal(rows.column("timestamp_ns"), time_us * 1000))
                    if found.num_rows:
                        return int(found.column("sequence")[0].as_py())
        return None

    def last_on(self, filters: Sequence[str]) -> int:
        """The last sequence of a message on one of the filters; 0 without one."""
        is_wanted = _chooser(filters)
        for file in reversed(self.files):
            found = 0
            for rows in read_rows(self._store(), file, columns=["sequence", "subject", "raw_subject"]):
                chosen = is_wanted(rows)
                found = int(chosen.column("sequence")[-1].as_py()) if chosen.num_rows else found
            if found:
                return found
        return 0

    def times(self, start: int, end: int) -> tuple[datetime.datetime, ...]:
        """When the first and the last message of a range were stored; empty without a message."""
        found: list[int] = []
        files = self.within(start, end).files
        for file in (*files[:1], *files[1:][-1:]):
            for rows in read_rows(self._store(), file, start=start, end=end, columns=["timestamp_ns"]):
                times = rows.column("timestamp_ns")
                found = [found[0] if found else times[0].as_py(), times[-1].as_py()]
        return tuple(_EPOCH + each // 1000 * _MICROSECOND for each in found)

    def deleted(self, start: int, end: int) -> list[range]:
        """The sequences of a range that were not in the stream when it was archived."""
        store = self._store()
        footers = [read_footer(store, each) for each in self.within(start, end).files if not each.is_dense]
        found = (range(max(each.start, start), min(each.stop, end)) for footer in footers for each in footer.deleted)
        return [each for each in found if each]

    # ---- rows --------------------------------------------------------------------------------------------------

    def batches(
        self,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        filters: Sequence[str] = (),
        on_loss: Callable[[range], object] | None = None,
    ) -> Generator[pa.RecordBatch, None, None]:
        """The rows of a range in order, a part of a row group at a time.

        Args:
            columns: Columns of :data:`~jetspark.lake.rows.RAW_SCHEMA`; None for all.
            filters: Only messages on these subjects; empty for all.
            on_loss: Called with sequences that the archive lost; without it they are an error.

        Raises:
            DataLoss: The archive lost messages of the range.
            ArchiveDamaged: A file is missing, or cannot be read.
        """
        store, names = self._store(), list(columns or RAW_SCHEMA.names)
        is_wanted = _chooser(filters)
        needed = list(dict.fromkeys([*names, *(("subject", "raw_subject") if filters else ())]))
        for file in self.within(start, end).files:
            self._check_losses(store, file, range(start, end), on_loss)
            for rows in read_rows(store, file, start=start, end=end, columns=needed):
                found = is_wanted(rows).select(names)
                if found.num_rows:
                    yield found

    def messages(
        self,
        start: int,
        end: int,
        *,
        filters: Sequence[str] = (),
        on_loss: Callable[[range], object] | None = None,
    ) -> Generator[list[StoredMessage], None, None]:
        """The messages of a range in order; as :meth:`batches`."""
        yield from map(messages_of, self.batches(start, end, filters=filters, on_loss=on_loss))

    def _check_losses(
        self, store: FileStore, file: DataFile, part: range, on_loss: Callable[[range], object] | None
    ) -> None:
        if file.is_dense:
            return
        for each in read_footer(store, file).lost:
            lost = range(max(each.start, part.start), min(each.stop, part.stop))
            if lost and on_loss is None:
                raise DataLoss(self.identity.stream, lost.start, lost.stop, _LOST)
            if lost and on_loss is not None:
                on_loss(lost)

    def _store(self) -> FileStore:
        return open_store(self.root.uri, self.root.options).below(raw_folder(self.identity))


def _chooser(filters: Sequence[str]) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Selects the rows on one of the filters; without filters all rows."""
    if not filters or ">" in filters:
        return lambda rows: rows
    is_wanted = on_one_of(filters)

    def choose(rows: pa.RecordBatch) -> pa.RecordBatch:
        # Each subject once: a stream has far fewer of them than messages, or each is asked about once all the same.
        subjects = rows.column("subject").dictionary_encode()
        wanted = [bool(is_wanted(each)) for each in subjects.dictionary.to_pylist()]
        mask = pa.array(wanted, pa.bool_()).take(subjects.indices)
        raw = rows.column("raw_subject")
        if raw.null_count < len(raw):  # of subjects that are not UTF-8 the column `subject` has a replacement
            own = [None if each is None else bool(is_wanted(_text(each))) for each in raw.to_pylist()]
            mask = pc.coalesce(pa.array(own, pa.bool_()), mask)
        return rows.filter(mask)

    return choose


def _text(raw: bytes) -> str:
    return raw.decode(errors="surrogateescape")
