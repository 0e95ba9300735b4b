"""The table format ``iceberg``: an Iceberg table, by pyiceberg, in the catalogue of your choice.

The position is in the summary of the table's snapshots, and in its properties until it has one. A commit names the
snapshot that it was made from, and the catalogue refuses it if the table has another one. The library's own retries are
off, by a property of the table: they would put the files behind another writer's. Each commit has a random token in its
summary, by which it is found when its outcome is unknown.

Options whose names begin with ``iceberg.`` configure the catalogue: ``iceberg.catalog`` is the name of one in
pyiceberg's configuration, and any other is a property of a catalogue, such as ``iceberg.uri``. In a local folder the
default is a SQLite file at the root of the archive.
"""

from __future__ import annotations

import datetime
import errno
import functools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from jetspark.errors import (
    ArchiveDamaged,
    ArchiveMoved,
    ConfigError,
    JetSparkError,
    MissingExtra,
    StoreRefused,
    StoreUnavailable,
)
from jetspark.lake.cloud_store import store_error, without_secrets
from jetspark.lake.header_columns import HEADERS_TYPE
from jetspark.lake.position import (
    ArchivePosition,
    DataFile,
    Snapshot,
    StreamIdentity,
    checked_snapshot,
    files_after,
    new_snapshot,
)
from jetspark.lake.rows import TABLE_SCHEMA, TIMESTAMP_TYPE
from jetspark.lake.store import FileStore
from jetspark.lake.unknown_outcomes import done_once

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

__all__ = ["FOLDER", "OPTION_PREFIX", "IcebergLog"]

FOLDER = "metadata"
OPTION_PREFIX = "iceberg."
NAMESPACE = "jetspark"

_TOKEN, _STREAM, _CREATED = "jetspark.commit", "jetspark.stream", "jetspark.created"
_FIRST, _NEXT, _EPOCH = "jetspark.first", "jetspark.next", "jetspark.epoch"
_RETRIES = "commit.retry.num-retries"
_ID = {name: number for number, name in enumerate(TABLE_SCHEMA.names, start=1)}
"""Numbers of columns: statistics name columns by them."""
_REFUSALS = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
_EPOCH_DAY = datetime.date(1970, 1, 1)

# What pyiceberg calls our options.
_FILE_OPTIONS = {
    "aws_endpoint": "s3.endpoint",
    "aws_access_key_id": "s3.access-key-id",
    "aws_secret_access_key": "s3.secret-access-key",
    "aws_session_token": "s3.session-token",
    "aws_region": "s3.region",
    "azure_storage_account_name": "adls.account-name",
    "azure_storage_account_key": "adls.account-key",
    "azure_storage_sas_key": "adls.sas-token",
}


class IcebergLog:
    """The log of an Iceberg table; a :class:`~jetspark.lake.log.TableLog`."""

    def __init__(self, store: FileStore, root: FileStore, identity: StreamIdentity, options: Mapping[str, str]) -> None:
        """
        Args:
            store: Rooted at the table.
            root: Rooted at the archive.
            options: Options of the catalogue, whose names begin with ``iceberg.``.
        """
        self._store, self._root, self._options = store, root, options
        self._name = (options.get(f"{OPTION_PREFIX}namespace", NAMESPACE), _table_name(identity))
        self._table: Table | None = None
        self._latest: Snapshot | None = None

    @functools.cached_property
    def _catalog(self) -> Catalog:
        return _opened(self._root, self._options)

    def snapshot(self) -> Snapshot | None:
        self._table = self._load()
        if self._table is None:
            return None
        if self._latest is None or self._latest.version != _version(self._table):
            self._latest = self._read(self._table)
        return self._latest

    def create(self, identity: StreamIdentity, first: int, *, epoch: int) -> Snapshot:
        after, token = new_snapshot(identity, first, epoch), secrets.token_hex(16)

        def attempt() -> Table:
            from pyiceberg.partitioning import PartitionField, PartitionSpec
            from pyiceberg.transforms import IdentityTransform

            schema = _schema()
            day = PartitionField(source_id=_ID["day"], field_id=1000, transform=IdentityTransform(), name="day")
            self._catalog.create_namespace_if_not_exists(self._name[0])
            return self._catalog.create_table(
                self._name,
                schema,
                location=_location(self._store, ""),
                partition_spec=PartitionSpec(day),
                properties={
                    **_summary(after.position, token),
                    _RETRIES: "0",
                    # The files have no field ids: they are the same in all formats.
                    "schema.name-mapping.default": schema.name_mapping.model_dump_json(),
                    "write.metadata.delete-after-commit.enabled": "true",
                },
            )

        return self._committed(after, token, attempt, expected=first, base=None)

    def commit(
        self,
        base: Snapshot,
        position: ArchivePosition,
        *,
        add: Sequence[DataFile] = (),
        remove: Sequence[DataFile] = (),
    ) -> Snapshot:
        files = files_after(self._store.uri, base, position, add, remove)
        if self._table is None or _version(self._table) != base.version:
            found = self.snapshot()
            if found is None or found.version != base.version:
                raise self._moved(base.position.next)
        table = self._table
        assert table is not None
        if table.properties.get(_RETRIES) != "0":
            raise ArchiveDamaged(
                self._store.uri, f"the table's property {_RETRIES} was changed, and must be 0: set it to 0"
            )
        token = secrets.token_hex(16)

        def attempt() -> Table:
            with table.transaction() as transaction:
                update = transaction.update_snapshot(snapshot_properties=_summary(position, token))
                with update.overwrite() if remove else update.merge_append() as producer:
                    for each in add:
                        producer.append_data_file(self._iceberg_file(table, each))
                    gone = {_location(self._store, each.path) for each in remove}
                    for found in self._entries(table) if remove else ():
                        if found.file_path in gone:
                            producer.delete_data_file(found)
            return table

        after = Snapshot(position=position, files=files, version=0)
        return self._committed(after, token, attempt, expected=base.position.next, base=base.version)

    # ---- one commit ----------------------------------------------------------------------------------------------

    def _committed(
        self, after: Snapshot, token: str, attempt: Callable[[], Table], *, expected: int, base: int | None
    ) -> Snapshot:
        def outcome() -> Table | None:
            table = self._load()
            if table is not None and _version_of(table, token) is not None:
                return table
            if (None if table is None else _version(table)) != base:
                raise self._moved(expected)
            return None

        self._table = done_once(attempt, outcome, self._problem)
        version = _version_of(self._table, token)
        if version is None:
            raise ArchiveDamaged(self._store.uri, "a commit was accepted, and is not in the catalogue")
        self._make_durable(self._table)
        # If another writer has committed since, the next snapshot shows it.
        self._latest = replace(after, version=version)
        return self._latest

    def _moved(self, expected: int) -> ArchiveMoved:
        found = self.snapshot()
        return ArchiveMoved(self._store.uri, expected, None if found is None else found.position.next)

    def _make_durable(self, table: Table) -> None:
        if "://" in self._store.uri:
            return
        root = _location(self._store, "")
        snapshot = table.current_snapshot()
        paths = [table.metadata_location]
        if snapshot is not None:
            new = [each for each in snapshot.manifests(table.io) if each.added_snapshot_id == snapshot.snapshot_id]
            paths += [snapshot.manifest_list, *(each.manifest_path for each in new)]
        for path in paths:
            self._store.make_durable(path.removeprefix(f"{root}/"))

    # ---- reading -------------------------------------------------------------------------------------------------

    def _load(self) -> Table | None:
        try:
            from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
        except ImportError as error:
            raise MissingExtra("an archive in the format 'iceberg'", "iceberg") from error

        folders = self._store.folders() if self._table is None else [FOLDER]
        if FOLDER not in folders:
            return None  # and no catalogue is made for it
        try:
            return self._catalog.load_table(self._name)
        except (NoSuchTableError, NoSuchNamespaceError):
            # Metadata alone are those of a creation that was cut short.
            if not any(each.startswith("day=") for each in folders):
                return None
            reason = f"the catalogue has no table {'.'.join(self._name)}, and its files are there; give its catalogue"
            raise ArchiveDamaged(self._store.uri, reason) from None
        except Exception as error:
            raise self._problem(error) from None

    def _problem(self, error: Exception) -> JetSparkError:
        from pyiceberg.exceptions import ForbiddenError, UnauthorizedError, ValidationError

        if isinstance(error, JetSparkError):
            return error
        known = {**self._store.storage_options, **self._options}
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            return store_error(self._store.uri, error, known)
        if isinstance(error, FileNotFoundError | ValidationError | ValueError | KeyError | TypeError):
            reason = without_secrets(str(error).partition("\n")[0], known)
            return ArchiveDamaged(self._store.uri, f"pyiceberg cannot use it: {reason}")
        kind = StoreRefused if isinstance(error, ForbiddenError | UnauthorizedError) else StoreUnavailable
        return kind(self._store.uri, f"catalogue: {type(error).__name__}: {without_secrets(str(error), known)}")

    def _read(self, table: Table) -> Snapshot:
        snapshot = table.current_snapshot()
        summary: Mapping[str, str] = table.properties
        if snapshot is not None:
            summary = {} if snapshot.summary is None else snapshot.summary.additional_properties
        try:
            position = ArchivePosition(
                identity=StreamIdentity(summary[_STREAM], summary[_CREATED]),
                first=int(summary[_FIRST]),
                next=int(summary[_NEXT]),
                epoch=int(summary[_EPOCH]),
            )
            files = [self._file(each) for each in self._entries(table)]
        except (KeyError, TypeError, ValueError) as error:
            reason = f"another program has changed the table ({error!r}); roll it back to an older snapshot"
            raise ArchiveDamaged(self._store.uri, reason) from error
        except Exception as error:
            raise self._problem(error) from None
        return checked_snapshot(self._store.uri, position, files, _version(table))

    def _entries(self, table: Table) -> Iterator[IcebergFile]:
        snapshot = table.current_snapshot()
        for manifest in [] if snapshot is None else snapshot.manifests(table.io):
            for entry in manifest.fetch_manifest_entry(table.io):
                yield entry.data_file

    def _file(self, found: IcebergFile) -> DataFile:
        from pyiceberg.conversions import from_bytes
        from pyiceberg.types import LongType

        def number(bounds: Mapping[int, bytes], name: str) -> int:
            return int(from_bytes(LongType(), bounds[_ID[name]]))

        low, high = found.lower_bounds, found.upper_bounds
        return DataFile.at_path(
            found.file_path.removeprefix(f"{_location(self._store, '')}/"),
            rows=found.record_count,
            size_bytes=found.file_size_in_bytes,
            sequences=(number(low, "sequence"), number(high, "sequence")),
            times_us=(number(low, "timestamp_ns") // 1000, number(high, "timestamp_ns") // 1000),
        )

    def _iceberg_file(self, table: Table, file: DataFile) -> IcebergFile:
        from pyiceberg.conversions import to_bytes
        from pyiceberg.manifest import DataFile as IcebergFile
        from pyiceberg.manifest import DataFileContent, FileFormat
        from pyiceberg.typedef import Record
        from pyiceberg.types import LongType

        def bounds(sequence: int, time_us: int, time_ns: int) -> dict[int, bytes]:
            numbers = {"sequence": sequence, "timestamp": time_us, "timestamp_ns": time_ns}
            return {_ID[name]: to_bytes(LongType(), value) for name, value in numbers.items()}

        return IcebergFile.from_args(
            content=DataFileContent.DATA,
            file_path=_location(self._store, file.path),
            file_format=FileFormat.PARQUET,
            partition=Record((file.day - _EPOCH_DAY).days),
            record_count=file.rows,
            file_size_in_bytes=file.size_bytes,
            lower_bounds=bounds(file.min_sequence, file.min_time_us, file.min_time_us * 1000),
            upper_bounds=bounds(file.max_sequence, file.max_time_us, file.max_time_us * 1000 + 999),
            spec_id=table.spec().spec_id,
        )


def _opened(root: FileStore, options: Mapping[str, str]) -> Catalog:
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError as error:
        raise MissingExtra("an archive in the format 'iceberg'", "iceberg") from error
    known = {name.removeprefix(OPTION_PREFIX): value for name, value in options.items()}
    name = known.pop("catalog", None)
    known.pop("namespace", None)
    if name is None and not known:
        if "://" in root.uri:
            raise ConfigError(
                f"archive {root.uri}: the format 'iceberg' needs a catalogue; give the option iceberg.catalog, the "
                "name of one in pyiceberg's configuration, or its properties, such as iceberg.uri"
            )
        Path(root.uri).mkdir(parents=True, exist_ok=True)
        known = {"uri": f"sqlite:///{root.location('iceberg.db')}"}
    files = {_FILE_OPTIONS[key]: value for key, value in root.storage_options.items() if key in _FILE_OPTIONS}
    try:
        catalog = load_catalog(name or NAMESPACE, **files, **known)
    except Exception as error:
        hidden = {**root.storage_options, **options}
        reason = without_secrets(f"catalogue {name or known.get('uri')!r}: {error}", hidden)
        raise ConfigError(f"archive {root.uri}: {reason}") from None
    return catalog


def _schema() -> Schema:
    from pyiceberg import types
    from pyiceberg.schema import Schema

    text = types.StringType()
    values = types.ListType(element_id=13, element_type=text, element_required=False)
    known = {
        pa.int64(): types.LongType(),
        pa.string(): text,
        pa.binary(): types.BinaryType(),
        pa.date32(): types.DateType(),
        TIMESTAMP_TYPE: types.TimestamptzType(),
        HEADERS_TYPE: types.MapType(key_id=11, key_type=text, value_id=12, value_type=values, value_required=False),
    }
    fields = [
        types.NestedField(_ID[each.name], each.name, known[each.type], required=not each.nullable)
        for each in TABLE_SCHEMA
    ]
    return Schema(*fields)


def _summary(position: ArchivePosition, token: str) -> dict[str, str]:
    return {
        _TOKEN: token,
        _STREAM: position.identity.stream,
        _CREATED: position.identity.created,
        _FIRST: str(position.first),
        _NEXT: str(position.next),
        _EPOCH: str(position.epoch),
    }


def _version(table: Table) -> int:
    snapshot = table.current_snapshot()
    return 0 if snapshot is None else snapshot.snapshot_id


def _version_of(table: Table, token: str) -> int | None:
    """The version that a commit has made; None if it is not in the table."""
    if table.properties.get(_TOKEN) == token:
        return 0
    for each in reversed(table.snapshots()):
        if each.summary is not None and each.summary.additional_properties.get(_TOKEN) == token:
            return each.snapshot_id
    return None


def _location(store: FileStore, path: str) -> str:
    location = store.location(path)
    return location if "://" in location else f"file://{location}"


def _table_name(identity: StreamIdentity) -> str:
    name = re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):02x}", identity.folder.partition("/")[0])
    return f"{name}_{re.sub('[^0-9TZ]', '', identity.created)}"
