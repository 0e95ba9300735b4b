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
import functools
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from jetspark.lake.position import (
    ArchivePosition,
    DataFile,
    Snapshot,
    StreamIdentity,
    checked_identity,
    checked_snapshot,
    coverage_of,
    files_after,
)
from jetspark.lake.store import FileStore

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

__all__ = ["FOLDER", "OPTION_PREFIX", "IcebergLog"]

FOLDER = "metadata"
OPTION_PREFIX = "iceberg."
NAMESPACE = "jetspark"

# Attempts of a commit whose outcome was unknown, and showed to be that nothing was committed.
COMMIT_ATTEMPTS = 5
PAUSE_S = 0.2

_TOKEN, _STREAM, _CREATED = "jetspark.commit", "jetspark.stream", "jetspark.created"
_FIRST, _NEXT, _EPOCH = "jetspark.first", "jetspark.next", "jetspark.epoch"
_RETRIES = "commit.retry.num-retries"
_SEQUENCE_ID, _TIMESTAMP_ID, _TIME_NS_ID, _DAY_ID = 1, 5, 6, 10
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
            options: Those that begin with ``iceberg.``.
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
        checked_identity(identity, first)
        position = ArchivePosition(identity=identity, first=first, next=first, epoch=epoch)
        token = secrets.token_hex(16)

        def attempt() -> None:
            from pyiceberg.partitioning import PartitionField, PartitionSpec
            from pyiceberg.transforms import IdentityTransform

            schema = _schema()
            day = PartitionField(source_id=_DAY_ID, field_id=1000, transform=IdentityTransform(), name="day")
            self._catalog.create_namespace_if_not_exists(self._name[0])
            self._catalog.create_table(
                self._name,
                schema,
                location=_location(self._store, ""),
                partition_spec=PartitionSpec(day),
                properties={
                    **_summary(position, token),
                    _RETRIES: "0",
                    # The files have no field ids: they are the same in all formats.
                    "schema.name-mapping.default": schema.name_mapping.model_dump_json(),
                    "write.metadata.delete-after-commit.enabled": "true",
                },
            )

        return self._committed(Snapshot(position=position, files=(), version=0), token, position.next, attempt)

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
                raise self._moved(base.position.next, found)
        table = self._table
        assert table is not None
        if table.properties.get(_RETRIES) != "0":
            raise ArchiveDamaged(
                self._store.uri, f"the table's property {_RETRIES} was changed, and must be 0: set it to 0"
            )
        token = secrets.token_hex(16)

        def attempt() -> None:
            with table.transaction() as transaction:
                update = transaction.update_snapshot(snapshot_properties=_summary(position, token))
                with update.overwrite() if remove else update.merge_append() as producer:
                    for each in add:
                        producer.append_data_file(self._iceberg_file(table, each))
                    gone = {_location(self._store, each.path) for each in remove}
                    for found in self._entries(table) if remove else ():
                        if found.file_path in gone:
                            producer.delete_data_file(found)

        after = Snapshot(position=position, files=files, version=0)
        return self._committed(after, token, base.position.next, attempt)

    # ---- one commit ----------------------------------------------------------------------------------------------

    def _committed(self, after: Snapshot, token: str, expected: int, attempt: Callable[[], None]) -> Snapshot:
        """Commit, until the catalogue says whether this commit is in the table."""
        base = None if self._table is None else _version(self._table)
        problem: JetSparkError | None = None
        for number in range(COMMIT_ATTEMPTS):
            problem = None
            try:
                attempt()
            except Exception as error:  # the libraries' errors have no common root but this one
                problem = self._problem(error)
            table = self._load()
            if table is not None and (version := _version_of(table, token)) is not None:
                self._make_durable(table)
                # If another writer has committed since, the next snapshot shows it.
                self._table, self._latest = table, replace(after, version=version)
                return self._latest
            if (None if table is None else _version(table)) != base:
                raise self._moved(expected, self.snapshot())
            if problem is None:
                raise ArchiveDamaged(self._store.uri, "a commit was accepted, and is not in the catalogue")
            if not problem.may_pass:
                raise problem
            time.sleep(PAUSE_S * 2**number)
        assert problem is not None
        raise problem

    def _moved(self, expected: int, found: Snapshot | None) -> ArchiveMoved:
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
        if isinstance(error, OSError):
            return store_error(self._store.uri, error, known)
        if isinstance(error, ValidationError | ValueError | KeyError | TypeError):
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

        path = found.file_path.removeprefix(f"{_location(self._store, '')}/")
        coverage = coverage_of(path)
        if coverage is None:
            raise ValueError(path)
        day, begin, end = coverage
        least, most = (
            {key: int(from_bytes(LongType(), bounds[key])) for key in (_SEQUENCE_ID, _TIME_NS_ID)}
            for bounds in (found.lower_bounds, found.upper_bounds)
        )
        return DataFile(
            path=path,
            day=day,
            begin=begin,
            end=end,
            rows=found.record_count,
            size_bytes=found.file_size_in_bytes,
            min_sequence=least[_SEQUENCE_ID],
            max_sequence=most[_SEQUENCE_ID],
            min_time_us=least[_TIME_NS_ID] // 1000,
            max_time_us=most[_TIME_NS_ID] // 1000,
        )

    def _iceberg_file(self, table: Table, file: DataFile) -> IcebergFile:
        from pyiceberg.conversions import to_bytes
        from pyiceberg.manifest import DataFile as IcebergFile
        from pyiceberg.manifest import DataFileContent, FileFormat
        from pyiceberg.typedef import Record
        from pyiceberg.types import LongType

        def bounds(sequence: int, time_us: int, time_ns: int) -> dict[int, bytes]:
            numbers = {_SEQUENCE_ID: sequence, _TIMESTAMP_ID: time_us, _TIME_NS_ID: time_ns}
            return {key: to_bytes(LongType(), value) for key, value in numbers.items()}

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
    """The columns of the files, and the day; numbered, because statistics name columns by their numbers."""
    from pyiceberg.schema import Schema
    from pyiceberg.types import (
        BinaryType,
        DateType,
        ListType,
        LongType,
        MapType,
        NestedField,
        StringType,
        TimestamptzType,
    )

    values = ListType(element_id=13, element_type=StringType(), element_required=False)
    headers = MapType(key_id=11, key_type=StringType(), value_id=12, value_type=values, value_required=False)
    return Schema(
        NestedField(_SEQUENCE_ID, "sequence", LongType(), required=True),
        NestedField(2, "subject", StringType(), required=True),
        NestedField(3, "headers", headers, required=False),
        NestedField(4, "data", BinaryType(), required=True),
        NestedField(_TIMESTAMP_ID, "timestamp", TimestamptzType(), required=True),
        NestedField(_TIME_NS_ID, "timestamp_ns", LongType(), required=True),
        NestedField(7, "stream", StringType(), required=True),
        NestedField(8, "raw_subject", BinaryType(), required=False),
        NestedField(9, "raw_headers", BinaryType(), required=False),
        NestedField(_DAY_ID, "day", DateType(), required=True),
    )


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
