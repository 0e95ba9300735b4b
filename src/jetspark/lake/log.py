"""The part of a table that depends on its format: the log of commits. Files are the same Parquet in all formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jetspark.lake.position import ArchivePosition, DataFile, Snapshot, StreamIdentity

__all__ = ["TableLog"]


class TableLog(Protocol):
    """The commits of one table: Delta's log, an Iceberg catalogue, or our own manifests beside plain Parquet.

    A log caches its last snapshot, so that the next one reads only newer commits. One thread uses it at a time.
    """

    def snapshot(self) -> Snapshot | None:
        """The table at its last commit; None if it does not exist.

        Raises:
            ArchiveDamaged: The log cannot be read, or its files do not cover what its position says.
            StoreUnavailable: The store does not answer.
            StoreRefused: The store refuses.
        """

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

        ``add`` begins where ``base`` ends and ends at ``position.next``, or replaces the files in ``remove``. An
        unknown outcome (a time-out, a 503) is resolved here: the log is read again, and shows whether the commit is in
        it.

        Raises:
            ArchiveMoved: The table has moved from ``base``, or a writer with a higher epoch has committed. Nothing
                was changed.
            UsageError: The files would not cover the sequences up to ``position.next`` exactly once.
            StoreUnavailable: The store does not answer, so the outcome stays unknown; read the snapshot later.
        """
