"""The tables of an archive: opening one, and finding them below the root of an archive.

::

    ROOT/<stream>/<created>/raw/        the raw table of one incarnation of a stream
    ROOT/<stream>/<created>/events/     optional tables of events
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jetspark.errors import ArchiveDamaged, ConfigError
from jetspark.lake.delta_log import FOLDER as DELTA_FOLDER
from jetspark.lake.delta_log import DeltaLog
from jetspark.lake.iceberg_log import FOLDER as ICEBERG_FOLDER
from jetspark.lake.iceberg_log import OPTION_PREFIX, IcebergLog
from jetspark.lake.log import TableLog
from jetspark.lake.manifest_log import FOLDER as MANIFEST_FOLDER
from jetspark.lake.manifest_log import ManifestLog
from jetspark.lake.position import Snapshot, StreamIdentity
from jetspark.lake.store import FileStore, open_store, require_conditional_writes

__all__ = ["DEFAULT_FORMAT", "FORMATS", "ArchiveTable", "find_tables", "open_table", "raw_folder"]

DEFAULT_FORMAT = "delta"

FORMATS = ("delta", "parquet", "iceberg")
_MARKS = {DELTA_FOLDER: "delta", MANIFEST_FOLDER: "parquet", ICEBERG_FOLDER: "iceberg"}
"""Folder in a table -> its format."""
_DATA = "day="


@dataclass(frozen=True)
class ArchiveTable:
    """The raw table of one incarnation of a stream; it may not exist yet.

    ``log`` has the commits, ``store`` the files: paths in both are relative to the table.
    """

    identity: StreamIdentity
    format: str
    store: FileStore
    log: TableLog

    @property
    def uri(self) -> str:
        """The folder of the table."""
        return self.store.uri

    def snapshot(self) -> Snapshot | None:
        """The table at its last commit; None if it does not exist.

        Raises:
            ArchiveDamaged: It cannot be read, or it is of another stream.
        """
        found = self.log.snapshot()
        if found is not None and found.position.identity != self.identity:
            raise ArchiveDamaged(
                self.uri,
                f"the table is of {found.position.identity}, and {self.identity} was expected; it was moved or copied: "
                "put it back where it was",
            )
        return found

    def open_for_writing(self, first: int, *, epoch: int) -> Snapshot:
        """The table at its last commit; it is created if it does not exist, for sequences from ``first`` on.

        Raises:
            ConfigError: The store does not honour conditional writes.
            ArchiveDamaged: There are data files, and their log is missing.
            ArchiveMoved: Another writer has created the table at this moment.
        """
        require_conditional_writes(self.store)
        has_files = any(each.startswith(_DATA) for each in self.store.folders())
        snapshot = self.snapshot()
        if snapshot is not None:
            return snapshot
        if has_files:
            raise ArchiveDamaged(self.uri, "it has data files and no log; restore its log, or move the files away")
        return self.log.create(self.identity, first, epoch=epoch)

    def locations(self, snapshot: Snapshot) -> list[str]:
        """The files of a snapshot as other engines name them, in the order of their sequences."""
        return [self.store.location(each.path) for each in snapshot.files]


def raw_folder(identity: StreamIdentity) -> str:
    """The folder of a raw table below the root of its archive."""
    return f"{identity.folder}/raw"


def open_table(
    root: str, identity: StreamIdentity, *, format: str | None = None, options: Mapping[str, str] | None = None
) -> ArchiveTable:
    """Open the raw table of one incarnation of a stream. It need not exist.

    Args:
        root: The URI of the archive; see :func:`~jetspark.lake.store.open_store`.
        format: One of ``FORMATS``. By default the format of the existing table, or ``delta``.

    Raises:
        ConfigError: The root, the format or an option cannot be used, or the table has another format.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format {format!r}: expected {', '.join(FORMATS)}")
    base, catalogue = _split(root, options)
    store = base.below(raw_folder(identity))
    found = _format_of(store)
    if found is not None and format not in (None, found):
        raise ConfigError(
            f"format {format!r}: the table {store.uri} has the format {found!r}; leave the format out, or give another "
            "root"
        )
    chosen = found or format or DEFAULT_FORMAT
    if catalogue and chosen != "iceberg" and found is None:
        raise ConfigError(f"option {next(iter(catalogue))!r}: the format {chosen!r} has no catalogue; give 'iceberg'")
    log: TableLog
    match chosen:
        case "delta":
            log = DeltaLog(store)
        case "parquet":
            log = ManifestLog(store)
        case _:
            log = IcebergLog(store, base, identity, catalogue)
    return ArchiveTable(identity, chosen, store, log)


def find_tables(
    root: str, *, stream: str | None = None, options: Mapping[str, str] | None = None
) -> list[ArchiveTable]:
    """The raw tables below the root of an archive, by stream and then by creation time; only those of ``stream``."""
    return [
        open_table(root, identity, options=options)
        for identity in _identities(_split(root, options)[0])
        if stream is None or identity.stream == stream
    ]


def _split(root: str, options: Mapping[str, str] | None) -> tuple[FileStore, dict[str, str]]:
    """The store at the root, and the options of the catalogue."""
    store: dict[str, str] = {}
    catalogue: dict[str, str] = {}
    for name, value in (options or {}).items():
        (catalogue if name.startswith(OPTION_PREFIX) else store)[name] = value
    return open_store(root, store), catalogue


def _identities(store: FileStore) -> Iterator[StreamIdentity]:
    for name in store.folders():
        for created in store.folders(name):
            identity = StreamIdentity.of_folder(f"{name}/{created}")
            if identity is not None and "raw" in store.folders(identity.folder):
                yield identity


def _format_of(store: FileStore) -> str | None:
    """The format of a table by its folders; None before it exists.

    Raises:
        ConfigError: The folder has files of another program.
    """
    folders = store.folders()
    found = next((format for folder, format in _MARKS.items() if folder in folders), None)
    if found is None and (strange := [each for each in folders if not each.startswith(_DATA)]):
        raise ConfigError(f"{store.uri} has the folder {strange[0]!r}, which no archive has; give another root")
    return found
