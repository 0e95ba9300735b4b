"""Proves that an archive is complete: each covered sequence has one row, or is known to be deleted or lost.

The log of a table has the coverage of each file, and the number of its rows. Where a file has as many rows as it
covers sequences, that is the proof. Where it has fewer, its footer lists the others, and the numbers must add up. Rows
are read where they do not, to name the sequences; and with ``full`` from every file, which also proves that each can be
read. The sizes of the files are compared with a listing of the store in any case.

Against the stream, every message that it still has is compared with its row, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jetspark.blocking import JetStream
from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import ArchiveDamaged, ConfigError, StreamRecreated
from jetspark.lake.archive import ArchiveTable
from jetspark.lake.coverage import Account, account, runs, text, union
from jetspark.lake.parquet_files import read_footer, read_rows
from jetspark.lake.position import MAX_SEQUENCE, DataFile, Snapshot
from jetspark.lake.range_writing import front
from jetspark.lake.rows import RAW_SCHEMA, rows_of
from jetspark.state.scan import Range, RangeScan

__all__ = [
    "ArchiveVerification",
    "ArchiveVerifyOptions",
    "FileFault",
    "OnProgress",
    "RowCursor",
    "differing",
    "last_commit",
    "rows_between",
    "verify_archive",
]

OTHER_REMEDY = "compare the archive of the present stream"
PATIENCE_S = 60.0
MAX_LISTED = 1_000
"""Ranges of each kind in a result; further ones are counted."""

MAX_SHOWN = 20

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveVerifyOptions:
    """Options of :func:`verify_archive`."""

    full: bool = False
    """Read the sequences of all rows, instead of trusting the statistics of files whose numbers add up."""
    start: int | None = None
    """Verify from this sequence on; by default all of the archive."""
    end: int | None = None
    """Verify up to this sequence, exclusive."""


@dataclass(frozen=True, slots=True)
class FileFault:
    """A file that is missing, has another size, or cannot be read."""

    path: str
    reason: str


@dataclass(slots=True, kw_only=True)
class ArchiveVerification:
    """The result of a verification. The ranges are sequences."""

    stream: str
    created: str
    uri: str
    first: int
    next: int
    """The sequences verified are those from ``first`` up to here, exclusive."""
    files: int = 0
    rows: int = 0
    deleted: int = 0
    """Sequences that were deleted before they were archived."""
    lost: list[range] = field(default_factory=list)
    """Sequences that the stream's limits removed before they were archived."""
    missing: list[range] = field(default_factory=list)
    """Sequences without a row, and without a reason for it."""
    doubled: list[range] = field(default_factory=list)
    """Sequences with more than one row."""
    misplaced: list[range] = field(default_factory=list)
    """Sequences with a row that should have none: listed as deleted or lost, or of another file."""
    faults: list[FileFault] = field(default_factory=list)
    compared: int | None = None
    """Messages of the stream that were compared with their rows; None if none was."""
    differing: list[range] = field(default_factory=list)
    """Sequences whose row differs from the message in the stream, or that have none."""

    @property
    def is_complete(self) -> bool:
        """True if each sequence is present once, or known to be deleted or lost, and equal to the stream's."""
        return not (self.missing or self.doubled or self.misplaced or self.faults or self.differing)

    def add_fault(self, file: DataFile, reason: str) -> None:
        """A file that cannot be used: none of its rows counts."""
        self.faults.append(FileFault(file.path, reason))
        self.missing = union([*self.missing, range(file.begin, file.end)])

    def include(self, found: Account) -> None:
        self.missing = union([*self.missing, *found.missing])
        self.doubled = union([*self.doubled, *found.doubled])
        self.misplaced = union([*self.misplaced, *found.contradictory, *found.misplaced])

    def to_dict(self) -> dict[str, Any]:
        lists = ("lost", "missing", "doubled", "misplaced", "differing")
        return {
            "stream": self.stream,
            "created": self.created,
            "uri": self.uri,
            "first": self.first,
            "next": self.next,
            "files": self.files,
            "rows": self.rows,
            "deleted": self.deleted,
            "compared": self.compared,
            "complete": self.is_complete,
            **{name: [[each.start, each.stop - 1] for each in getattr(self, name)[:MAX_LISTED]] for name in lists},
            "faults": [{"file": each.path, "reason": each.reason} for each in self.faults[:MAX_LISTED]],
        }

    def __str__(self) -> str:
        if self.first == self.next:
            return f"stream {self.stream}, created {self.created}: the archive is empty"
        lines = [
            f"stream {self.stream}, created {self.created}: sequences {self.first}-{self.next - 1}, "
            f"{self.rows} rows in {self.files} files, {self.deleted} deleted",
        ]
        lists = {what: getattr(self, what) for what in ("lost", "missing", "doubled", "misplaced", "differing")}
        lines += [f"{what}: {sum(map(len, each))} sequences: {text(each)}" for what, each in lists.items() if each]
        lines += [f"file {each.path}: {each.reason}" for each in self.faults[:MAX_SHOWN]]
        if len(self.faults) > MAX_SHOWN:
            lines.append(f"and {len(self.faults) - MAX_SHOWN} more files")
        if self.compared is not None:
            lines.append(f"{self.compared} messages compared with the stream")
        lines.append("complete" if self.is_complete else "NOT complete")
        return "\n".join(lines)


def last_commit(table: ArchiveTable) -> Snapshot:
    """The table at its last commit.

    Raises:
        ConfigError: It does not exist.
    """
    snapshot = table.snapshot()
    if snapshot is None:
        raise ConfigError(f"archive {table.uri} does not exist: `jetspark archive run` creates it")
    return snapshot


def verify_archive(
    table: ArchiveTable,
    options: ArchiveVerifyOptions | None = None,
    *,
    against: JetStream | None = None,
    on_progress: OnProgress | None = None,
    on_compared: Callable[[pa.Table], None] | None = None,
) -> ArchiveVerification:
    """Verify the table of one incarnation of a stream.

    Args:
        against: Also compare the rows with the messages that the stream still has.
        on_compared: Called with the rows of those messages.
        on_progress: Called with the sequence that is verified, and the last one.

    Raises:
        ConfigError: The table does not exist.
        ArchiveDamaged: The log of the table cannot be read, or does not cover its sequences.
        StreamRecreated, StreamNotFound: ``against``: the stream is not the one of the table.
    """
    options = options or ArchiveVerifyOptions()
    snapshot = last_commit(table)
    position = snapshot.position
    first, end = max(position.first, options.start or 0), min(position.next, options.end or position.next)
    found = ArchiveVerification(
        stream=position.identity.stream,
        created=position.identity.created,
        uri=table.uri,
        first=first,
        next=max(first, end),
    )
    progress = on_progress or (lambda at, last: None)
    sizes = {each.path: each.size_bytes for each in table.store.files() if each.path.endswith(".parquet")}
    readable = []
    for file in snapshot.files:
        if file.begin < end and file.end > first:
            if _verify_file(table, file, sizes.get(file.path), found, is_full=options.full):
                readable.append(file)
            progress(file.end, end)
    if against is not None and first < end:
        found.compared = 0
        try:
            for wanted, stored in _beside_stream(table, readable, against, first, end):
                found.differing = union([*found.differing, *differing(wanted, stored)])
                found.compared += len(wanted)
                if on_compared is not None:
                    on_compared(wanted)
                progress(wanted.column("sequence")[-1].as_py(), end)
        except ArchiveDamaged as error:  # in columns that nothing has read before
            found.faults.append(FileFault(table.uri, error.reason))
    return found


def _verify_file(
    table: ArchiveTable, file: DataFile, size: int | None, found: ArchiveVerification, *, is_full: bool
) -> bool:
    """Account for the sequences of a file; False if it cannot be read."""
    found.files += 1
    found.rows += file.rows
    if size != file.size_bytes:
        reason = "is missing" if size is None else f"has {size} bytes, and the table says {file.size_bytes}"
        found.add_fault(file, reason)
        return False
    is_plausible = file.begin <= file.min_sequence and file.max_sequence < file.end
    if file.is_dense and is_plausible and not is_full:
        return True
    try:
        footer = read_footer(table.store, file)
        if footer.identity != table.identity:
            found.add_fault(file, f"is of {footer.identity}")
            return False
        gone = [*footer.deleted, *footer.lost]
        found.deleted += sum(map(len, footer.deleted))
        found.lost = union([*found.lost, *footer.lost])
        if is_plausible and not is_full and file.rows + sum(map(len, gone)) == file.end - file.begin:
            return True
        present: list[range] = []
        for rows in read_rows(table.store, file, start=0, end=MAX_SEQUENCE, columns=["sequence"]):
            present += runs(rows.column("sequence"))
    except ArchiveDamaged as error:
        found.add_fault(file, error.reason)
        return False
    found.include(account(file.begin, file.end, present, gone))
    if (count := sum(map(len, present))) != file.rows:
        found.faults.append(FileFault(file.path, f"has {count} rows, and the table says {file.rows}"))
    return True


# ---- rows beside rows ------------------------------------------------------------------------------------------------


class RowCursor:
    """Goes through rows that are sorted by sequence."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take_until(self, end: int) -> pa.Table:
        """The next rows, up to the sequence ``end``, exclusive."""
        taken = []
        while (batch := self._rest or next(self._batches, None)) is not None:
            count = pc.sum(pc.less(batch.column("sequence"), end)).as_py() or 0
            taken.append(batch.slice(0, count))
            self._rest = batch.slice(count) if count < batch.num_rows else None
            if self._rest is not None:
                break
        return pa.Table.from_batches(taken, RAW_SCHEMA)


def rows_between(table: ArchiveTable, files: Iterable[DataFile], start: int, end: int) -> Iterator[pa.RecordBatch]:
    """The rows of files, which are in order, with sequences from ``start`` to ``end``, exclusive."""
    for file in files:
        if file.begin < end and file.end > start:
            yield from read_rows(table.store, file, start=start, end=end)


def differing(wanted: pa.Table, stored: pa.Table) -> list[range]:
    """The sequences of the first rows that are not among the second, byte for byte."""
    if wanted.equals(stored):
        return []
    there = {row["sequence"]: row for row in stored.to_pylist()}
    wrong = [row["sequence"] for row in wanted.to_pylist() if there.get(row["sequence"]) != row]
    return runs(pa.array(wrong, pa.int64()))


def _beside_stream(
    table: ArchiveTable, files: Sequence[DataFile], js: JetStream, start: int, end: int
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """The messages that the stream still has, as rows, and the rows of the archive for them."""
    runner, identity = ProcedureRunner(js), table.identity
    head, _ = runner.run(front(identity.stream, 0, PATIENCE_S))
    if head.created != identity.created:
        raise StreamRecreated(identity.stream, identity.created, head.created, OTHER_REMEDY)
    start = max(start, head.first)
    cursor = RowCursor(rows_between(table, files, start, end))
    # What the stream's limits remove in the meantime cannot be compared.
    scan = RangeScan(Range(identity.stream, identity.created, start, end, is_earliest=True), timeout_s=PATIENCE_S)
    with closing(runner.pieces(scan)) as pieces:
        for messages in pieces:
            wanted = pa.Table.from_batches([rows_of(identity.stream, messages)])
            sequences = wanted.column("sequence")
            stored = cursor.take_until(sequences[-1].as_py() + 1)
            if len(stored) != len(wanted):  # some are no longer in the stream
                stored = stored.filter(pc.is_in(stored.column("sequence"), value_set=sequences))
            yield wanted, stored
