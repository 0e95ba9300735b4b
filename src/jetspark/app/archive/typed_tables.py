"""The typed tables of an application: they follow the raw table of its stream.

::

    ROOT/<stream>/<created>/raw/             every message, verbatim
    ROOT/<stream>/<created>/events/<type>/   the events of a type: a column for each field, and ``_event``
    ROOT/<stream>/<created>/unreadable/      messages on the subjects of events that cannot be read, with the reason

The raw table is the source: each typed table has a position of its own, reads on from there, and commits rows and
position together. So after a crash, or with a new type, it catches up; and a table that was removed is written again.
An error of a typed table never stops the raw archive.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jetspark.app.archive.event_table import EventTable
from jetspark.app.columns import ENVELOPE, UNREADABLE
from jetspark.app.columns.event_columns import EventColumns
from jetspark.app.columns.typed_rows import ARCHIVE_COLUMNS, TypedRows, columns_by_name, typed_schema
from jetspark.app.contracts.catalogue import Catalogue, Contract
from jetspark.app.projections.router import filters_of
from jetspark.core.subjects import on_one_of
from jetspark.errors import ArchiveMoved, ConfigError, JetSparkError
from jetspark.lake.archive import ArchiveTable, find_tables
from jetspark.lake.iceberg_log import OPTION_PREFIX
from jetspark.lake.parquet_files import read_rows
from jetspark.lake.position import Snapshot, StreamIdentity
from jetspark.lake.store import open_store

if TYPE_CHECKING:
    from jetspark.lake.archiver import ArchiveCommit

__all__ = ["TypedTables"]

_logger = logging.getLogger("jetspark.lake")

PIECE_ROWS = 10_000
# Rows and bytes of the messages that are in memory as typed rows before a commit.
CHUNK_ROWS = 200_000
CHUNK_BYTES = 64 << 20
# A table without rows commits its position after that many sequences, so that a restart reads no more of them again.
LAZY_SEQUENCES = 1_000_000


class _Chunk(NamedTuple):
    rows: pa.Table
    end: int
    """The first sequence that it does not cover."""


class TypedTables:
    """Writes the events of one stream into tables, one for each type."""

    def __init__(
        self, catalogue: Catalogue, stream: str, root: str, *, storage_options: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            root: The root of the archive.
            storage_options: Options of the object store, as of the archiver.

        Raises:
            ConfigError: No type of event has columns; types without are left out with a warning.
        """
        self._catalogue, self._stream, self._root, self._options = catalogue, stream, root, dict(storage_options or {})
        self._store = open_store(root, {k: v for k, v in self._options.items() if not k.startswith(OPTION_PREFIX)})
        self._contracts = [each for each in _contracts(catalogue) if _has_columns(each)]
        if not self._contracts:
            raise ConfigError("typed tables: the application has no event whose fields have column types")
        self._columns = columns_by_name(self._contracts)
        self._schema = typed_schema(self._contracts, keeps=True, is_flat=False)
        self._tables: dict[StreamIdentity, dict[str, EventTable]] = {}
        self.errors: dict[str, JetSparkError] = {}
        """By URI: tables that are not written any more, and why."""

    def on_commit(self, commit: ArchiveCommit) -> None:
        """Follow a commit of the raw table; for :func:`jetspark.lake.archive_streams`. Errors are logged and kept."""
        try:
            self.follow(commit.table, commit.snapshot)
        except JetSparkError as error:
            _logger.warning("typed tables of stream %s: %s; they catch up at the next commit", self._stream, error)

    def catch_up(self) -> None:
        """Bring the tables of all incarnations of the stream to the positions of their raw tables; the errors are those
        of :meth:`follow`."""
        for each in find_tables(self._root, stream=self._stream, options=self._options):
            self.follow(each)

    def finish(self) -> None:
        """As :meth:`catch_up`, and raise the first error of a table that is not written any more."""
        self.catch_up()
        for error in self.errors.values():
            raise error

    def follow(self, table: ArchiveTable, snapshot: Snapshot | None = None) -> None:
        """Bring all tables to the position of the raw table.

        Raises:
            ArchiveDamaged: The raw table cannot be read.
            StoreUnavailable: The store does not answer.
        """
        found = table.snapshot() if snapshot is None else snapshot
        if table.identity.stream != self._stream or found is None:
            return
        tables = self._opened(table.identity, found.position.first)
        end = found.position.next
        while behind := [each for each in tables.items() if each[1].reached < end and each[1].uri not in self.errors]:
            for chunk in self._chunks(table, found, min(each.reached for _, each in behind)):
                for name, each in behind:
                    if each.uri not in self.errors:
                        self._add(name, each, chunk)

    # ---- one table -----------------------------------------------------------------------------------------------

    def _opened(self, identity: StreamIdentity, first: int) -> dict[str, EventTable]:
        """The tables by column, and the side table; those with an error are left out."""
        tables = self._tables.setdefault(identity, {})
        schemas = {
            name: pa.schema([*self._schema.field(name).type, self._schema.field(ENVELOPE)]) for name in self._columns
        }
        schemas[UNREADABLE] = pa.schema([*self._schema.field(UNREADABLE).type, self._schema.field(ENVELOPE)])
        for name, schema in schemas.items():
            store = self._store.below(f"{identity.folder}/{self._folder(name)}")
            if name in tables or store.uri in self.errors:
                continue
            try:
                tables[name] = EventTable(store, schema, identity, first)
            except JetSparkError as error:
                if error.may_pass:
                    raise
                self._give_up(store.uri, error)
        return tables

    def _folder(self, name: str) -> str:
        if name == UNREADABLE:
            return "unreadable"
        contract = self._columns[name]
        versions = [each for each in self._contracts if each.type == contract.type]
        return f"events/{contract.type}" + (f"@{contract.version}" if len(versions) > 1 else "")

    def _add(self, name: str, table: EventTable, chunk: _Chunk) -> None:
        """Append the new rows of one table."""
        sequences = pc.struct_field(chunk.rows.column(ENVELOPE), "sequence")
        is_own = pc.is_valid(chunk.rows.column(name))
        while table.reached < chunk.end:
            own = chunk.rows.filter(pc.and_(is_own, pc.greater_equal(sequences, table.reached)))
            if not own.num_rows and chunk.end - table.committed < LAZY_SEQUENCES:
                table.reached = chunk.end
                return
            fields = pa.Table.from_struct_array(own.column(name)).append_column(ENVELOPE, own.column(ENVELOPE))
            try:
                table.append(fields, chunk.end)
            except ArchiveMoved as error:  # by another writer, which has added the first rows of this chunk, or all
                _logger.warning("%s; reading continues there", error)
            except JetSparkError as error:
                if error.may_pass:
                    raise
                self._give_up(table.uri, error)
                return

    def _give_up(self, uri: str, error: JetSparkError) -> None:
        self.errors[uri] = error
        _logger.error("typed table %s is not written any more, the raw table is: %s", uri, error)

    # ---- the raw table -------------------------------------------------------------------------------------------

    def _chunks(self, table: ArchiveTable, snapshot: Snapshot, start: int) -> Iterator[_Chunk]:
        """Typed rows of the raw table from a sequence on, to its end."""
        typed = TypedRows(
            self._catalogue,
            self._contracts,
            self._schema,
            is_flat=False,
            unreadable="keep",
            is_wanted=on_one_of(filters_of([each.kind for each in self._contracts])),
        )
        batches, rows, size, last = list[pa.RecordBatch](), 0, 0, start
        for file in snapshot.files:
            if file.end <= start:
                continue
            for raw in read_rows(
                table.store, file, start=start, columns=ARCHIVE_COLUMNS, batch_rows=min(PIECE_ROWS, CHUNK_ROWS)
            ):
                made = typed.of_archived(raw)
                last = raw.column("sequence")[-1].as_py() + 1
                batches.append(made)
                rows, size = rows + len(made), size + made.nbytes
                if rows >= CHUNK_ROWS or size >= CHUNK_BYTES:
                    yield _Chunk(pa.Table.from_batches(batches, self._schema), last)
                    batches, rows, size = [], 0, 0
        if last < snapshot.position.next or batches:
            yield _Chunk(pa.Table.from_batches(batches, self._schema), snapshot.position.next)


def _contracts(catalogue: Catalogue) -> list[Contract]:
    """The contracts that events are read as."""
    return list(dict.fromkeys(reading.contract for _, reading in sorted(catalogue.readings.items())))


def _has_columns(contract: Contract) -> bool:
    try:
        EventColumns(contract)
    except ConfigError as error:
        _logger.warning("events of type %r are in the raw table only: %s", contract.type, error)
        return False
    return True
