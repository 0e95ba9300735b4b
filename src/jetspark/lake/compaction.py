"""Merges small files of a day, and removes files that are in no commit.

A merged file is read back and compared with the rows of the files that it replaces, in their order and byte for byte,
and its coverage and footer with theirs. Then one commit puts it in their place; an archiver may run. Readers of an
older version of the table still need the replaced files. A later compaction removes those, and the files that killed
writers left.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import pyarrow as pa

from jetspark.errors import ArchiveDamaged, ArchiveMoved, ConfigError
from jetspark.lake.archive import ArchiveTable
from jetspark.lake.coverage import union
from jetspark.lake.parquet_files import FILE_BYTES, DataFileWriter, read_footer, read_rows
from jetspark.lake.position import DataFile, coverage_of
from jetspark.lake.verification import OnProgress, RowCursor, differing, last_commit, rows_between

__all__ = ["CompactOptions", "Compaction", "compact_archive", "plan"]

DAY_S = 86_400.0
MIN_AGE_S = 3_600.0
"""A writer commits its files long before."""
MAX_REPEATS = 20
"""Commits that other commits were faster than, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactOptions:
    """Options of :func:`compact_archive`."""

    file_bytes: int = FILE_BYTES
    """Files are merged up to this size, and larger ones are left alone."""
    remove_after_s: float = 7 * DAY_S
    """Age from which files that are not in the table are removed. Readers of older versions need them before."""
    dry_run: bool = False
    """Only plan."""

    def __post_init__(self) -> None:
        if self.file_bytes < 1:
            raise ConfigError(f"file_bytes={self.file_bytes}: expected 1 or more")
        if self.remove_after_s < MIN_AGE_S:
            raise ConfigError(
                f"remove_after_s={self.remove_after_s:g}: expected {MIN_AGE_S:g} or more, because a writer may still "
                "commit younger files"
            )


@dataclass(slots=True, kw_only=True)
class Compaction:
    """The result of a compaction, or with ``dry_run`` its plan."""

    uri: str
    dry_run: bool
    merged: int = 0
    """Files that were replaced."""
    into: int = 0
    """Files in their place."""
    bytes_before: int = 0
    bytes_after: int = 0
    removed: list[str] = field(default_factory=list)
    """Files that were in no commit, or in an old one only."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        would = "would be " if self.dry_run else ""
        if not self.merged:
            merged = "nothing to merge"
        else:
            sizes = f"{self.bytes_before} bytes" + ("" if self.dry_run else f", now {self.bytes_after}")
            merged = f"{self.merged} files {would}merged into {self.into} ({sizes})"
        return f"{self.uri}: {merged}; {len(self.removed)} files that are not in the table {would}removed"


def compact_archive(
    table: ArchiveTable, options: CompactOptions | None = None, *, on_progress: OnProgress | None = None
) -> Compaction:
    """Merge the small files of each day of a table, and remove old files that are not in it. An archiver may run.

    A process that ends at any moment leaves a sound table.

    Args:
        on_progress: Called with the number of files that are merged, and of those to merge.

    Raises:
        ConfigError: The table does not exist.
        ArchiveDamaged: A merged file is not equal to the files that it was to replace; those stay.
        ArchiveMoved: Other commits were faster, twenty times.
    """
    options = options or CompactOptions()
    snapshot = last_commit(table)
    done = Compaction(uri=table.uri, dry_run=options.dry_run)
    groups = plan(snapshot.files, options.file_bytes)
    for group in groups:
        if not options.dry_run:
            done.bytes_after += _replace(table, group)
        done.merged += len(group)
        done.into += 1
        done.bytes_before += sum(each.size_bytes for each in group)
        if on_progress is not None:
            on_progress(done.merged, sum(map(len, groups)))
    done.removed = _unused(table, options.remove_after_s)
    if not options.dry_run:
        table.store.delete(done.removed)
    return done


def plan(files: Iterable[DataFile], file_bytes: int) -> list[list[DataFile]]:
    """Files to merge: neighbours of one day that are together no larger than this."""
    groups: list[list[DataFile]] = []
    for _, of_day in groupby(files, key=lambda file: file.day):
        group: list[DataFile] = []
        for each in of_day:
            if sum(file.size_bytes for file in group) + each.size_bytes > file_bytes:
                groups.append(group)
                group = []
            group.append(each)
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def _replace(table: ArchiveTable, group: Sequence[DataFile]) -> int:
    """Replace files by one; returns its size."""
    merged = _merge(table, group)
    for _ in range(MAX_REPEATS):
        base = last_commit(table)
        if merged in base.files:
            break  # by a commit whose outcome was unknown
        if not set(group) <= set(base.files):
            table.store.delete([merged.path])
            raise ArchiveMoved(table.uri, base.position.next, None)
        try:
            table.log.commit(base, base.position, add=[merged], remove=group)
            break
        except ArchiveMoved as error:
            moved = error
    else:
        raise moved
    return merged.size_bytes


def _merge(table: ArchiveTable, group: Sequence[DataFile]) -> DataFile:
    """Write a file with the rows of all, and compare.

    Raises:
        ArchiveDamaged: It differs from them.
    """
    store, begin, end = table.store, group[0].begin, group[-1].end
    footers = [read_footer(store, file) for file in group if not file.is_dense]
    lost = union(each for footer in footers for each in footer.lost)
    # Larger than any file: it must not be parted again.
    with DataFileWriter(store, table.identity, begin, file_bytes=1 << 62) as writer:
        for rows in rows_between(table, group, begin, end):
            writer.write(rows)
        [merged] = writer.finish(end, lost=lost)
    if wrong := _difference(table, group, merged, union(each for footer in footers for each in footer.deleted), lost):
        store.delete([merged.path])
        raise ArchiveDamaged(table.uri, f"merging {group[0].path} to {group[-1].path}: {wrong}; nothing was changed")
    return merged


def _difference(
    table: ArchiveTable, group: Sequence[DataFile], merged: DataFile, deleted: list[range], lost: list[range]
) -> str:
    """The first difference between a merged file and the files it is to replace; empty if they are equal."""
    count = sum(each.rows for each in group)
    if merged.rows != count:
        return f"{count} rows became {merged.rows}"
    footer = read_footer(table.store, merged)
    if union(footer.deleted) != deleted or union(footer.lost) != lost:
        return "sequences without a row are not explained; see `jetspark archive verify --full`"
    cursor = RowCursor(rows_between(table, group, merged.begin, merged.end))
    for rows in read_rows(table.store, merged):
        last = rows.column("sequence")[-1].as_py()
        if wrong := differing(pa.Table.from_batches([rows]), cursor.take_until(last + 1)):
            return f"sequence {wrong[0].start} differs"
    return ""


def _unused(table: ArchiveTable, age_s: float) -> list[str]:
    """Files that no commit has, or only commits that are older than this."""
    snapshot = last_commit(table)
    listed = {each.path: each for each in table.store.files()}
    newest = time.time() - age_s
    in_table, begins = {each.path for each in snapshot.files}, [each.begin for each in snapshot.files]
    unused = [each.path for each in table.store.leftovers() if each.modified_s <= newest]
    for path, file in listed.items():
        part = coverage_of(path)
        if path in in_table or part is None or file.modified_s > newest:
            continue
        # The files that replaced it say when.
        _, begin, end = part
        heirs = snapshot.files[max(0, bisect_right(begins, begin) - 1) : bisect_left(begins, end)]
        if all(each.path in listed and listed[each.path].modified_s <= newest for each in heirs):
            unused.append(path)
    return unused
