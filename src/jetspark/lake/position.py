"""The position of an archive and the files below it, as plain data. Pure.

An archive is one table for each incarnation of a stream: a stream that was deleted and re-created has another creation
time, so it gets another table. The table covers the sequences ``[first, next)``. Each of its files covers a part
``[begin, end)`` of them; the parts touch and do not overlap, and the rows of a file are sorted by sequence. A covered
sequence without a row was not in the stream any more when the part was read: the file's footer lists these sequences
as *deleted*, or as *lost* if the stream's limits removed them before they were archived.

Position and files change together, in one commit of the table. A commit names the position it was made from, and is
refused if the table has moved since.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jetspark.errors import ArchiveDamaged, ArchiveMoved, ConfigError, UsageError

__all__ = [
    "ArchivePosition",
    "DataFile",
    "Snapshot",
    "StreamIdentity",
    "checked_snapshot",
    "coverage_of",
    "data_path",
    "files_after",
    "new_snapshot",
]

MAX_SEQUENCE = 2**63 - 1
"""The largest sequence that a column of 64-bit integers holds."""

_PATH = re.compile(r"day=(\d{4}-\d\d-\d\d)/(\d{20})-(\d{20})-([0-9a-f]{8})\.parquet")
_CREATED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d)(\d\d)(\d\d(?:\.\d+)?Z)")
_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """One incarnation of a stream."""

    stream: str
    created: str
    """The creation time, in the form of :class:`~jetspark.state.scan.Head`."""

    @property
    def folder(self) -> str:
        """The folder of this incarnation below the root of an archive. No two identities share one."""
        name = _UNSAFE.sub(lambda found: b"~%02X" % ord(found[0]), self.stream.encode(errors="surrogateescape"))
        return f"{name.decode()}/{self.created.replace(':', '')}"

    @classmethod
    def of_folder(cls, folder: str) -> StreamIdentity | None:
        """The identity whose :attr:`folder` this is; None for any other text."""
        name, _, created = folder.partition("/")
        match = _CREATED.fullmatch(created)
        if match is None:
            return None
        raw = re.sub(rb"~([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), name.encode())
        identity = cls(raw.decode(errors="surrogateescape"), ":".join(match.groups()))
        return identity if identity.folder == folder else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePosition:
    """How far a table covers its stream. Stored in the table's own commits."""

    identity: StreamIdentity
    first: int
    """The first sequence that the archive covers."""
    next: int
    """The first sequence that it does not cover yet; ``first`` while the table is empty."""
    epoch: int = 0
    """The epoch of the writer that committed last. A writer with a lower one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One Parquet file of a table."""

    path: str
    """Relative to the table. Its name has ``begin`` and ``end``, so a listing of the table shows what each covers."""
    day: datetime.date
    """The day, in UTC, on which all of its messages were stored."""
    begin: int
    end: int
    """Exclusive."""
    rows: int
    size_bytes: int
    min_sequence: int
    max_sequence: int
    min_time_us: int
    max_time_us: int

    @classmethod
    def at_path(
        cls, path: str, *, rows: int, size_bytes: int, sequences: tuple[int, int], times_us: tuple[int, int]
    ) -> DataFile:
        """A file by its path and its statistics; ``sequences`` and ``times_us`` are minimum and maximum.

        Raises:
            ValueError: The path is not that of a data file.
        """
        coverage = coverage_of(path)
        if coverage is None:
            raise ValueError(f"{path!r} is not the path of a data file")
        day, begin, end = coverage
        return cls(
            path=path,
            day=day,
            begin=begin,
            end=end,
            rows=rows,
            size_bytes=size_bytes,
            min_sequence=sequences[0],
            max_sequence=sequences[1],
            min_time_us=times_us[0],
            max_time_us=times_us[1],
        )

    @property
    def is_dense(self) -> bool:
        """Every covered sequence has a row."""
        return self.rows == self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A table at one commit."""

    position: ArchivePosition
    files: tuple[DataFile, ...]
    """In the order of their sequences."""
    version: int
    """The commit: a number that counts them, but for Iceberg the id of a snapshot. 0 for a new table."""


def data_path(day: datetime.date, begin: int, end: int, token: str) -> str:
    """The path of a data file; ``token`` is 8 random hexadecimal digits."""
    return f"day={day.isoformat()}/{begin:020}-{end:020}-{token}.parquet"


def coverage_of(path: str) -> tuple[datetime.date, int, int] | None:
    """Day, begin and end of a data file by its path; None for any other path."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    try:
        day = datetime.date.fromisoformat(match[1])
    except ValueError:
        return None
    return day, int(match[2]), int(match[3])


def files_after(
    archive: str, base: Snapshot, position: ArchivePosition, add: Sequence[DataFile], remove: Sequence[DataFile]
) -> tuple[DataFile, ...]:
    """The files of a table after a commit, in order: the rules that every commit keeps, in any format.

    Raises:
        ArchiveMoved: ``base`` was committed by a writer with a higher epoch.
        UsageError: The table would belong to another stream, would go back, or its files would not cover it.
    """
    before = base.position
    if before.epoch > position.epoch:
        raise ArchiveMoved(archive, before.next, before.next)
    if position.identity != before.identity or position.first != before.first or position.next < before.next:
        raise UsageError(f"archive {archive}: {position} cannot follow {before}")
    kept = {each.path: each for each in base.files}
    for each in remove:
        if kept.pop(each.path, None) is None:
            raise UsageError(f"archive {archive}: file {each.path} is not in the table, and so cannot be removed")
    if twice := [each.path for each in add if each.path in kept]:
        raise UsageError(f"archive {archive}: file {twice[0]} is in the table already")
    files = _in_order([*kept.values(), *add])
    if wrong := _coverage_fault(position, files):
        raise UsageError(f"archive {archive}: {wrong}")
    return files


def checked_snapshot(archive: str, position: ArchivePosition, files: Iterable[DataFile], version: int) -> Snapshot:
    """A table as it was read.

    Raises:
        ArchiveDamaged: The files do not cover what the position says.
    """
    ordered = _in_order(files)
    if wrong := _coverage_fault(position, ordered):
        raise ArchiveDamaged(
            archive, f"{wrong}, at version {version}; another program has changed the table: restore an older version"
        )
    return Snapshot(position=position, files=ordered, version=version)


def new_snapshot(identity: StreamIdentity, first: int, epoch: int) -> Snapshot:
    """A new table, which is empty.

    Raises:
        ConfigError: No table can be created for this.
    """
    if StreamIdentity.of_folder(identity.folder) != identity or not identity.stream:
        raise ConfigError(f"{identity}: expected the name of a stream and its creation time, 2026-11-19T10:14:30Z")
    if not 0 < first <= MAX_SEQUENCE:
        raise ConfigError(f"first={first}: expected a sequence, 1 or more")
    return Snapshot(
        position=ArchivePosition(identity=identity, first=first, next=first, epoch=epoch), files=(), version=0
    )


def _in_order(files: Iterable[DataFile]) -> tuple[DataFile, ...]:
    return tuple(sorted(files, key=lambda each: each.begin))


def _coverage_fault(position: ArchivePosition, files: Sequence[DataFile]) -> str:
    """The first reason why these files are not those of a table at this position; empty if they are."""
    reached = position.first
    for each in files:
        if each.begin != reached:
            what = "overlap" if each.begin < reached else "leave a gap"
            return f"its files {what} at sequence {min(each.begin, reached)}: {each.path} begins at {each.begin}"
        if not each.begin <= each.min_sequence <= each.max_sequence < each.end or not each.rows:
            return f"file {each.path} has {each.rows} rows of sequences {each.min_sequence} to {each.max_sequence}"
        reached = each.end
    if reached != position.next:
        return f"its files cover the sequences up to {reached - 1}, and its position says {position.next - 1}"
    return ""
