"""A Delta table of typed rows whose position is in its own commits.

A commit adds rows and moves the position, the transaction ``jetspark/<stream>/<created>`` of the table, from the
version that was read and without the library's retries. So of two writers at the same position one succeeds, and rows
are there once. A commit whose outcome is unknown is resolved by reading the position again: rows are a function of the
raw table, so a writer that moved the position has added the same rows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jetspark.errors import ArchiveMoved, ConfigError, JetSparkError, MissingExtra
from jetspark.lake.delta_log import FOLDER, delta_error
from jetspark.lake.position import StreamIdentity
from jetspark.lake.store import FileStore

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["EventTable", "stored_schema"]

COMMIT_ATTEMPTS = 5
PAUSE_S = 0.2


class EventTable:
    """Rows of one type of event, or of messages that cannot be read, of one incarnation of a stream."""

    def __init__(self, store: FileStore, schema: pa.Schema, identity: StreamIdentity, first: int) -> None:
        """
        Args:
            store: Rooted at the table, which is created if it does not exist.
            first: The first sequence of the raw table.

        Raises:
            ConfigError: A column of the table has another type than here, or the table was not made by an archiver.
        """
        try:
            import deltalake
        except ImportError as error:
            raise MissingExtra("typed tables", "lake") from error
        self._library, self._store = deltalake, store
        self._schema = stored_schema(schema)
        self._app_id = f"jetspark/{identity.stream}/{identity.created}"
        self._options = dict(store.storage_options)
        self._table = self._opened(first)
        self.committed = self._position()
        """The first sequence that the table does not cover, by its last commit."""
        self.reached = self.committed
        """The same, with sequences read since then that have no row here."""
        _check_additive(pa.schema(self._table.schema().to_arrow()), self._schema, store.uri)

    @property
    def uri(self) -> str:
        return self._store.uri

    def append(self, rows: pa.Table, end: int) -> None:
        """Add the rows of the sequences from :attr:`reached` to ``end``, exclusive, and move the position there.

        Raises:
            ArchiveMoved: Another writer has moved the position. Nothing was added; :attr:`reached` is the new one.
            StoreUnavailable, StoreRefused: The store fails.
        """
        begin = self.committed
        for number in range(COMMIT_ATTEMPTS):
            problem = self._attempt(rows, end)
            self._refresh()
            self.committed = self.reached = self._position()
            if self.committed == end:
                return
            if self.committed != begin:
                raise ArchiveMoved(self.uri, begin, self.committed)
            if problem is not None and not problem.may_pass:
                raise problem
            time.sleep(PAUSE_S * 2**number)  # or a compaction was first, which leaves the position where it is
        raise problem or ArchiveMoved(self.uri, begin, self.committed)

    def _attempt(self, rows: pa.Table, end: int) -> JetSparkError | None:
        library = self._library
        try:
            library.write_deltalake(
                self._table,
                rows.cast(self._schema),
                mode="append",
                schema_mode="merge",
                commit_properties=self._properties(end),
                # A writer that stopped for weeks could create an old file of the log again.
                post_commithook_properties=library.PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except library.exceptions.CommitFailedError:
            return None  # there is a newer version
        except Exception as error:  # the library's errors have no common root but this one
            return delta_error(self._store, error)
        return None

    def _refresh(self) -> None:
        try:
            self._table.update_incremental()
        except Exception as error:
            raise delta_error(self._store, error) from None

    def _properties(self, end: int) -> Any:
        transaction = self._library.Transaction(self._app_id, end - 1)
        return self._library.CommitProperties(app_transactions=[transaction], max_commit_retries=0)

    def _opened(self, first: int) -> DeltaTable:
        library, location = self._library, self._store.location("")
        try:
            if next(iter(self._store.files(FOLDER)), None) is None:
                try:
                    library.DeltaTable.create(
                        location,
                        self._schema,
                        storage_options=self._options,
                        commit_properties=self._properties(first),
                    )
                except library.exceptions.DeltaError:
                    pass  # another writer has created it at this moment
            table: DeltaTable = library.DeltaTable(location, storage_options=self._options)
            return table
        except Exception as error:
            raise delta_error(self._store, error) from None

    def _position(self) -> int:
        found = self._table.transaction_version(self._app_id)
        if found is None:
            raise ConfigError(f"{self.uri}: the table has no position of {self._app_id}; move it, or use another root")
        return found + 1


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of a table: all nullable, so that fields can come and go, and durations in microseconds, since Delta
    has none."""
    return pa.schema([pa.field(each.name, _stored(each.type)) for each in schema])


def _stored(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _stored(each.type)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _stored(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(pa.field("key", _stored(kind.key_type), False), pa.field("value", _stored(kind.item_type)))
    return pa.int64() if pa.types.is_duration(kind) else kind


def _check_additive(old: pa.Schema, new: pa.Schema, uri: str) -> None:
    """Delta would convert values of another type, if it can: '5' to 5."""
    for field in new:
        if field.name in old.names and (fault := _change(old.field(field.name).type, field.type, field.name)):
            raise ConfigError(
                f"{uri}: {fault}, and a table only takes new columns; remove the table, and it is written again from "
                "the raw table"
            )


def _change(old: pa.DataType, new: pa.DataType, path: str) -> str:
    """The first difference other than a new field, or an empty text."""
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        known = {each.name: each.type for each in old}
        parts = [(known[each.name], each.type, f"{path}.{each.name}") for each in new if each.name in known]
    elif pa.types.is_list(old) and pa.types.is_list(new):
        parts = [(old.value_type, new.value_type, f"{path}[]")]
    elif pa.types.is_map(old) and pa.types.is_map(new):
        parts = [(old.key_type, new.key_type, f"{path}[key]"), (old.item_type, new.item_type, f"{path}[]")]
    else:
        return "" if old == new else f"column {path} has the type {old}, and the contract says {new}"
    return next(filter(None, (_change(*part) for part in parts)), "")
