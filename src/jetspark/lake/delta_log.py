"""The table format ``delta``: a Delta table, by delta-rs.

The position is in the table's own commits, as transactions of applications: ``jetspark/<stream>/<created>`` has the
last archived sequence, ``jetspark/epoch`` the epoch of the writer. The stream's identity and the first sequence are in
the table's configuration.

A commit is made from the version that was read, without the library's retries: it creates the next file of the log, or
fails if there is one. Each commit has a random token, by which it is found in the log when its outcome is unknown. Old
files of the log are kept: a writer that stopped for weeks could create one of them again, and think it has committed.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from jetspark.errors import ArchiveDamaged, ArchiveMoved, JetSparkError, MissingExtra, StoreUnavailable
from jetspark.lake.cloud_store import MAX_RETRIES, RETRY_S, store_error
from jetspark.lake.position import (
    ArchivePosition,
    DataFile,
    Snapshot,
    StreamIdentity,
    checked_snapshot,
    files_after,
    new_snapshot,
)
from jetspark.lake.rows import TABLE_SCHEMA
from jetspark.lake.store import FileStore
from jetspark.lake.unknown_outcomes import done_once

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable
    from deltalake.transaction import AddAction, RemoveAction

__all__ = ["FOLDER", "DeltaLog"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.lake")

FOLDER = "_delta_log"
_EPOCH = "jetspark/epoch"
_TOKEN = "jetspark.commit"
_FIRST, _STREAM, _CREATED = "jetspark.first", "jetspark.stream", "jetspark.created"
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class DeltaLog:
    """The log of a Delta table; a :class:`~jetspark.lake.log.TableLog`. Do not use one in a forked process."""

    def __init__(self, store: FileStore) -> None:
        """``store`` is rooted at the table."""
        try:
            import deltalake
        except ImportError as error:
            raise MissingExtra("an archive in the format 'delta'", "lake") from error
        self._library = deltalake
        self._store = store
        # As often and as long as other requests to the store are tried.
        retries = {"max_retries": str(MAX_RETRIES), "retry_timeout": f"{RETRY_S:g}s"} if "://" in store.uri else {}
        self._options = {**retries, **store.storage_options}
        self._table: DeltaTable | None = None
        self._latest: Snapshot | None = None

    def snapshot(self) -> Snapshot | None:
        if self._table is None:
            if next(iter(self._store.files(FOLDER)), None) is None:
                return None
            self._table = self._reading(self._open)
        else:
            self._reading(self._table.update_incremental)
        if self._latest is None or self._latest.version != self._table.version():
            self._latest = self._read(self._table)
        return self._latest

    def create(self, identity: StreamIdentity, first: int, *, epoch: int) -> Snapshot:
        def attempt(properties: CommitProperties) -> None:
            self._library.DeltaTable.create(
                self._store.location(""),
                TABLE_SCHEMA,
                partition_by=["day"],
                # Nothing but archivers should change the table; they replace files without changing data.
                configuration={
                    "delta.appendOnly": "true",
                    _FIRST: str(first),
                    _STREAM: identity.stream,
                    _CREATED: identity.created,
                },
                storage_options=self._options,
                commit_properties=properties,
                raise_if_key_not_exists=False,
            )

        return self._committed(new_snapshot(identity, first, epoch), first, attempt)

    def commit(
        self,
        base: Snapshot,
        position: ArchivePosition,
        *,
        add: Sequence[DataFile] = (),
        remove: Sequence[DataFile] = (),
    ) -> Snapshot:
        files = files_after(self._store.uri, base, position, add, remove)
        if self._table is None or self._table.version() != base.version:
            found = self.snapshot()
            if found is None or found.version != base.version:
                raise self._moved(base.position.next)
        table = self._table
        assert table is not None
        now_ms = time.time_ns() // 1_000_000
        is_new = position.next > base.position.next
        actions: list[AddAction | RemoveAction] = [_removed(each, now_ms) for each in remove]
        actions += [_added(each, now_ms, is_new) for each in add]

        def attempt(properties: CommitProperties) -> None:
            table.create_write_transaction(
                actions,
                "append",
                TABLE_SCHEMA,
                partition_by=["day"],
                commit_properties=properties,
                post_commithook_properties=self._library.PostCommitHookProperties(cleanup_expired_logs=False),
            )

        after = Snapshot(position=position, files=files, version=base.version + 1)
        return self._committed(after, base.position.next, attempt)

    # ---- one commit ----------------------------------------------------------------------------------------------

    def _committed(self, after: Snapshot, expected: int, write: Callable[[CommitProperties], None]) -> Snapshot:
        position, path = after.position, f"{FOLDER}/{after.version:020}.json"
        token = secrets.token_hex(16)
        transaction = self._library.Transaction
        last, epoch = transaction(_app_id(position.identity), position.next - 1), transaction(_EPOCH, position.epoch)
        properties = self._library.CommitProperties(
            app_transactions=[last, epoch], max_commit_retries=0, custom_metadata={_TOKEN: token}
        )

        def attempt() -> bool:
            write(properties)
            return True

        def outcome() -> bool | None:
            committed = self._store.get(path)
            if committed is not None and token.encode() not in committed:
                raise self._moved(expected)
            return None if committed is None else True

        done_once(attempt, outcome, self._problem)
        self._store.make_durable(path)
        self._latest = after
        if self._table is not None:
            try:
                self._reading(self._table.update_incremental)
            except JetSparkError as error:  # the commit stands; the next call opens the table again
                _logger.info("archive %s: %s", self._store.uri, error)
                self._table = None
        return after

    def _moved(self, expected: int) -> ArchiveMoved:
        found = self.snapshot()
        return ArchiveMoved(self._store.uri, expected, None if found is None else found.position.next)

    # ---- reading -------------------------------------------------------------------------------------------------

    def _open(self) -> DeltaTable:
        return self._library.DeltaTable(self._store.location(""), storage_options=self._options)

    def _reading(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except Exception as error:
            # The library's own error may show a signed address.
            if _is_of_store(error):
                raise self._problem(error) from None
            raise ArchiveDamaged(self._store.uri, f"delta-rs cannot read it: {_first_line(error)}") from None

    def _problem(self, error: Exception) -> JetSparkError:
        """The error of a commit that is not in the log."""
        if _is_of_store(error):
            return store_error(self._store.uri, error, self._store.storage_options)
        # Also where S3 saw two writes of a version at the same moment, and did neither of them (409).
        return StoreUnavailable(self._store.uri, f"delta-rs: {_first_line(error)}")

    def _read(self, table: DeltaTable) -> Snapshot:
        configuration = table.metadata().configuration
        try:
            identity = StreamIdentity(configuration[_STREAM], configuration[_CREATED])
            last, epoch = table.transaction_version(_app_id(identity)), table.transaction_version(_EPOCH)
            if last is None or epoch is None:
                raise KeyError(_app_id(identity))
            first = int(configuration[_FIRST])
        except (KeyError, ValueError) as error:
            reason = f"the Delta table is not one that JetSpark has made ({error!r}); give another root"
            raise ArchiveDamaged(self._store.uri, reason) from error
        actions = pa.table(table.get_add_actions(flatten=True))
        try:
            files = [_file(row) for row in actions.to_pylist()] if actions.num_rows else []
        except (KeyError, TypeError, ValueError) as error:
            reason = f"another program has added files to the table ({error!r}); restore an older version"
            raise ArchiveDamaged(self._store.uri, reason) from error
        position = ArchivePosition(identity=identity, first=first, next=last + 1, epoch=epoch)
        return checked_snapshot(self._store.uri, position, files, table.version())


def _is_of_store(error: Exception) -> bool:
    return isinstance(error, OSError) or "Error performing" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _app_id(identity: StreamIdentity) -> str:
    return f"jetspark/{identity.stream}/{identity.created}"


def _added(file: DataFile, now_ms: int, is_new: bool) -> AddAction:
    from deltalake.transaction import AddAction

    low_us, high_us = file.min_time_us, file.max_time_us
    least = {"sequence": file.min_sequence, "timestamp": _time(low_us), "timestamp_ns": low_us * 1000}
    most = {"sequence": file.max_sequence, "timestamp": _time(high_us), "timestamp_ns": high_us * 1000 + 999}
    statistics = {"numRecords": file.rows, "minValues": least, "maxValues": most, "nullCount": dict.fromkeys(least, 0)}
    return AddAction(
        path=file.path,
        size=file.size_bytes,
        partition_values={"day": file.day.isoformat()},
        modification_time=now_ms,
        data_change=is_new,
        stats=json.dumps(statistics),
    )


def _removed(file: DataFile, now_ms: int) -> RemoveAction:
    from deltalake.transaction import RemoveAction

    return RemoveAction(
        path=file.path,
        data_change=False,
        deletion_timestamp=now_ms,
        size=file.size_bytes,
        partition_values={"day": file.day.isoformat()},
    )


def _file(row: dict[str, Any]) -> DataFile:
    return DataFile.at_path(
        row["path"],
        rows=row["num_records"],
        size_bytes=row["size_bytes"],
        sequences=(row["min.sequence"], row["max.sequence"]),
        times_us=(row["min.timestamp_ns"] // 1000, row["max.timestamp_ns"] // 1000),
    )


def _time(time_us: int) -> str:
    return (_UNIX_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds").replace("+00:00", "Z")
