"""Writes a range of a stream's sequences as data files. The live archiver and the tasks of Spark run the same code.

Each sequence of the range becomes a row, or is explained: a message that the stream did not have when the range was
read was *deleted*, or *lost*, if the stream's limits may have removed it. The stream's present beginning tells the two
apart, as in :mod:`jetspark.state.scan`. Limits remove messages from the front: a missing message
before the beginning may be lost, and one after it was deleted by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pyarrow.compute as pc

from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import ConfigError, DataLoss, StreamRecreated
from jetspark.jetstream.config import StreamConfig
from jetspark.lake.coverage import common, missing_in, runs
from jetspark.lake.parquet_files import DataFileWriter
from jetspark.lake.position import DataFile, StreamIdentity
from jetspark.lake.rows import rows_of
from jetspark.lake.store import FileStore
from jetspark.publish.steps import Connect, Procedure
from jetspark.state.losses import front_of, removes_by_limits
from jetspark.state.patience import Persistence
from jetspark.state.scan import Head, Range, RangeScan

__all__ = ["ArchiveOptions", "StreamPart", "WrittenPart", "front", "write_range"]

LOSS_REMEDY = (
    "they can no longer be archived. To continue after them, archive with --on-loss record (on_loss='record'), which "
    "lists them as lost in the table; then commit more often, or give the stream wider limits"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOptions:
    """Options of :func:`~jetspark.lake.archive_streams`."""

    to: str
    """The root of the archive: a folder, or a URI such as ``s3://bucket/folder``."""
    format: Literal["delta", "parquet", "iceberg"] | None = None
    """The format of new tables, by default ``delta``; existing tables keep theirs."""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of the object store, such as ``aws_endpoint``. The environment supplies the others."""
    every_s: float = 60.0
    """Longest time that a message waits for its commit. Shorter for a stream that keeps messages for less than four
    times as long."""
    max_rows: int = 1_000_000
    """Rows of a file, about; a commit is made when a file is full."""
    max_bytes: int = 128 << 20
    """Bytes of a file's rows before compression, about."""
    on_loss: Literal["fail", "record"] = "fail"
    """``record`` continues after messages that the stream's limits removed before they were archived, and lists them
    in the table as lost. By default that is an error."""
    patience_s: float = 60.0
    """How long the server or the store may be away."""
    lease_s: float | None = 30.0
    """Seconds after which another writer takes over from a dead one. None for no lease: writers then compete, which is
    wasteful and never wrong."""

    def __post_init__(self) -> None:
        for name, low in (("every_s", 0.0), ("max_rows", 1), ("max_bytes", 1), ("patience_s", 0.0)):
            if (value := getattr(self, name)) < low:
                raise ConfigError(f"{name}={value}: expected {low:g} or more")
        if self.lease_s is not None and self.lease_s < 1:
            raise ConfigError(f"lease_s={self.lease_s}: expected 1 second or more, or None")
        if self.on_loss not in ("fail", "record"):
            raise ConfigError(f"on_loss={self.on_loss!r}: expected fail or record")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """Sequences to write: those from ``start`` to ``end``, exclusive."""

    identity: StreamIdentity
    begin: int
    """Where the first file begins. Sequences from here to ``start`` were read before, and had no message."""
    start: int
    end: int
    lost: tuple[range, ...] = ()
    """The lost ones of those before ``start``; the others were deleted."""
    anchor: int = 0
    """The sequence of the last row in the archive; 0 without one."""
    is_first: bool = False
    """The archive has no row yet: it begins with its first row, and messages removed before that are no loss."""


class WrittenPart(NamedTuple):
    """The result of a part: its files, or the sequences that it found lost."""

    begin: int
    """The beginning of the part, or of a first part the first row."""
    end: int
    """The part is written up to here."""
    files: tuple[DataFile, ...]
    """None if no message was there."""
    lost: tuple[range, ...]


def front(stream: str, anchor: int, patience_s: float) -> Procedure[tuple[Head, StreamConfig]]:
    """The stream as it is now, with the sequence before which messages may be lost."""
    persistence = Persistence(patience_s)
    yield from persistence.progress()

    def ask() -> Procedure[tuple[Head, StreamConfig]]:
        api = yield Connect()
        info = yield from api.stream_info(stream)
        # A stream of an application removes timers and replaced states without losing events. If nothing removes
        # events, nothing is lost; else an archived message that is still there proves it.
        known = anchor if removes_by_limits(info.config) else 0
        return (yield from front_of(api, info, known)), info.config

    return (yield from persistence.attempt(ask))


def write_range(
    runner: ProcedureRunner,
    store: FileStore,
    part: StreamPart,
    options: ArchiveOptions,
    *,
    is_cut: bool = False,
    on_piece: Callable[[int], bool] | None = None,
    on_begin: Callable[[int], None] | None = None,
) -> WrittenPart:
    """Write the messages of a part as files, which are in no table yet.

    Args:
        store: The store of the table.
        is_cut: True to end the part where a file is full.
        on_piece: Called with the next sequence after each piece; it returns True to end the part there.
        on_begin: Called with the beginning before anything is written.

    Raises:
        DataLoss: Messages at the beginning of the part are lost. A loss further on ends the part before it.
        StreamRecreated: The stream is not the one of the part.
        RequestTimeout: The server did not answer for the patience of the options.
        StoreUnavailable, StoreRefused: A file could not be written.
    """
    identity = part.identity
    # Losses are told from deletions here, because the files list them.
    scope = Range(identity.stream, identity.created, part.start, part.end, is_earliest=True)
    scan = RangeScan(scope, timeout_s=options.patience_s)
    with _PartWriter(runner, store, part, options, on_begin) as writing, closing(runner.pieces(scan)) as pieces:
        for messages in pieces:
            is_over = writing.add(messages)
            is_over |= on_piece is not None and on_piece(writing.next)
            if is_over or (is_cut and writing.is_full):
                return writing.end(writing.next)
        return writing.end(part.end)


class _PartWriter:
    """A part while it is written."""

    def __init__(
        self,
        runner: ProcedureRunner,
        store: FileStore,
        part: StreamPart,
        options: ArchiveOptions,
        on_begin: Callable[[int], None] | None,
    ) -> None:
        self._runner, self._store, self._part, self._options = runner, store, part, options
        self._on_begin = on_begin
        self.next = part.start
        """The first sequence that was not read yet."""
        self._begin, self._anchor = part.begin, part.anchor
        self._writer: DataFileWriter | None = None

    def __enter__(self) -> _PartWriter:
        return self

    def __exit__(self, *error: object) -> None:
        # Files that are complete stay, in no table; a compaction removes them later.
        if self._writer is not None:
            self._writer.__exit__(*error)

    @property
    def is_full(self) -> bool:
        writer, options = self._writer, self._options
        return writer is not None and (writer.rows >= options.max_rows or writer.size_bytes >= options.max_bytes)

    def add(self, messages: list[Any]) -> bool:
        """Add rows. True if the part has to end here, because messages behind them are lost."""
        identity = self._part.identity
        rows = rows_of(identity.stream, messages)
        sequences = rows.column("sequence")
        present = runs(sequences)
        if self._part.is_first and self._writer is None:
            self.next = self._begin = present[0].start
        stop, lost = self._lost_until(present[-1].stop, present)
        if stop < present[-1].stop:
            rows = rows.filter(pc.less(sequences, stop))
        if rows.num_rows:
            if self._writer is None:
                if self._on_begin is not None:
                    self._on_begin(self._begin)
                self._writer = DataFileWriter(self._store, identity, self._begin, file_bytes=self._options.max_bytes)
                lost = [*self._part.lost, *lost]
            self._writer.write(rows, lost=lost)
            self._anchor = rows.column("sequence")[-1].as_py()
        self.next = stop
        return stop < present[-1].stop

    def end(self, end: int) -> WrittenPart:
        """Explain the sequences behind the last row, and finish the last file."""
        lost: list[range] = []
        if self._writer is None and self._part.is_first:
            return WrittenPart(self._begin, end, (), ())
        end, lost = self._lost_until(end, [])
        if self._writer is None:
            return WrittenPart(self._begin, end, (), (*self._part.lost, *lost))
        return WrittenPart(self._begin, end, tuple(self._writer.finish(end, lost=lost)), ())

    def _lost_until(self, end: int, present: list[range]) -> tuple[int, list[range]]:
        """The lost sequences from ``next`` to ``end``; or, if that is an error, a lower end, before the first of them.

        Raises:
            DataLoss: It is an error, and no row is before it.
        """
        absent = missing_in(self.next, end, present)
        if not absent:
            return end, []
        identity, options = self._part.identity, self._options
        head, _ = self._runner.run(front(identity.stream, self._anchor, options.patience_s))
        if head.created != identity.created:
            raise StreamRecreated(identity.stream, identity.created, head.created)
        lost = common(absent, [range(self.next, head.whole_from)])
        if not lost or options.on_loss == "record":
            return end, lost
        if self._writer is None and not (present and present[0].start < lost[0].start):
            first = lost[0].stop if lost[0].stop < end else head.whole_from
            raise DataLoss(identity.stream, lost[0].start, first, LOSS_REMEDY)
        # The messages before the loss are archived first: the limits may remove them next.
        return lost[0].start, []
