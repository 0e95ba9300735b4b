"""The position of an archive and the files below it, as plain data. Pure.

An archive is one table for each incarnation of a stream: a stream that was deleted and created again has another
creation time, so it gets another table. The table covers the sequences ``[first, next)``. Each of its files covers a
part ``[begin, end)`` of them; the parts touch and do not overlap, and the rows of a file are sorted by sequence. A
sequence of a part that has no row was not in the stream any more when the part was read: the file's footer lists these
sequences as *deleted*, or as *lost* if the stream's limits removed them before they were archived.

Position and files change together, in one commit of the table. A commit names the position it was made from, and is
refused if the table has moved since.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

__all__ = ["ArchivePosition", "DataFile", "Snapshot", "StreamIdentity"]


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """One incarnation of a stream."""

    stream: str
    created: str
    """The creation time, in the form of :class:`~jetspark.state.scan.Head`."""


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
    version: object
    """The commit, in the terms of the table's format."""
