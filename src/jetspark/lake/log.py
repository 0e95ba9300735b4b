"""The part of a table that depends on its format: the log of commits. Files are the same Parquet in all formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jetspark.lake.position import ArchivePosition, DataFile, Snapshot, StreamIdentity

__all__ = ["TableLog"]


class TableLog(Protocol):
    """The commits of one table: Delta's log, an Iceberg catalogue, or our own manifests beside plain Parquet."""

    def snapshot(self) -> Snapshot | None:
        """The table at its last commit; None if it does not exist."""

    def create(self, identity: StreamIdentity, first: int, *, epoch: int) -> Snapshot:
        """Create the table, empty, for sequences from ``first`` on.

        Raises:
            ArchiveMoved: Another writer has created it.
        """

    def commit(
        self,
        base: Snapshot,
        position: ArchivePosition,
        *,
        add: Sequence[DataFile] = (),
        remove: Sequence[DataFile] = (),
    ) -> Snapshot:
        """Add and remove files, and move the position, in one commit.

        An unknown outcome (a time-out, a 503) is resolved here: the log is read again, and shows whether the commit is
        in it.

        Raises:
            ArchiveMoved: The table is no longer at ``base``; nothing was changed.
        """
