"""The table format ``parquet``: numbered manifests beside the data files, in JSON. Needs no library but pyarrow.

Each commit creates the next manifest, ``_jetspark/manifest-<20 digits>.json``: of two writers, the store lets one
create it. A manifest has the position, and the files that the commit added and removed; every 32nd has the list of all
files, so that a reader needs at most 32. ``_jetspark/full.json`` has the number of a recent full one and only shortens
the listing: it may be old or missing.

Other engines read the files that the log lists; the folder may have files of commits that were refused.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from jetspark.errors import ArchiveDamaged, ArchiveMoved, JetSparkError
from jetspark.lake.position import (
    ArchivePosition,
    DataFile,
    Snapshot,
    StreamIdentity,
    checked_snapshot,
    files_after,
    new_snapshot,
)
from jetspark.lake.store import FileStore

__all__ = ["FOLDER", "ManifestLog"]

_logger = logging.getLogger("jetspark.lake")

FOLDER = "_jetspark"
FULL_EVERY = 32
FORMAT = 1
_FULL = f"{FOLDER}/full.json"


class ManifestLog:
    """The log of a table in the format ``parquet``; a :class:`~jetspark.lake.log.TableLog`."""

    def __init__(self, store: FileStore) -> None:
        """``store`` is rooted at the table."""
        self._store = store
        self._latest: Snapshot | None = None

    def snapshot(self) -> Snapshot | None:
        if self._latest is None:
            self._latest = self._load()
        latest = self._latest
        while latest is not None and (manifest := self._manifest(latest.version + 1)) is not None:
            self._latest = latest = self._applied(latest, manifest)
        return latest

    def create(self, identity: StreamIdentity, first: int, *, epoch: int) -> Snapshot:
        return self._committed(new_snapshot(identity, first, epoch), first, (), ())

    def commit(
        self,
        base: Snapshot,
        position: ArchivePosition,
        *,
        add: Sequence[DataFile] = (),
        remove: Sequence[DataFile] = (),
    ) -> Snapshot:
        files = files_after(self._store.uri, base, position, add, remove)
        after = Snapshot(position=position, files=files, version=base.version + 1)
        return self._committed(after, base.position.next, add, remove)

    def _committed(
        self, after: Snapshot, expected: int, add: Sequence[DataFile], remove: Sequence[DataFile]
    ) -> Snapshot:
        version, position = after.version, after.position
        manifest = {
            "jetspark": FORMAT,
            "commit": secrets.token_hex(16),  # makes the data unique: the store compares them
            "stream": position.identity.stream,
            "created": position.identity.created,
            "first": position.first,
            "next": position.next,
            "epoch": position.epoch,
            "add": [_record(each) for each in add],
            "remove": [each.path for each in remove],
        }
        if version % FULL_EVERY == 0:
            manifest["files"] = [_record(each) for each in after.files]
        if not self._store.create(_path(version), json.dumps(manifest).encode()):
            found = self.snapshot()
            raise ArchiveMoved(self._store.uri, expected, None if found is None else found.position.next)
        self._latest = after
        if version % FULL_EVERY == 0:
            self._note_full(version)
        return after

    def _note_full(self, version: int) -> None:
        try:
            self._store.put(_FULL, json.dumps({"version": version}).encode())
        except JetSparkError as error:
            _logger.warning("archive %s: the next reader will list all manifests: %s", self._store.uri, error)

    # ---- reading -----------------------------------------------------------------------------------------------

    def _load(self) -> Snapshot | None:
        """The table at the last manifest of a listing."""
        note = self._store.get(_FULL)
        try:
            first = int(json.loads(note)["version"]) if note is not None else 0
        except (KeyError, TypeError, ValueError):
            first = 0
        listed = [each.path for each in self._store.files(FOLDER, after=_path(first - 1) if first else "")]
        paths = [path for path in listed if path.startswith(f"{FOLDER}/manifest-")]
        if not paths and note is None:
            return None
        expected = [_path(version) for version in range(first, first + max(1, len(paths)))]
        if missing := next((path for path in expected if path not in set(paths)), None):
            raise self._damaged(f"{missing} is missing; restore it from a backup")
        last = first + len(paths) - 1
        latest: Snapshot | None = None
        for version in range(last - last % FULL_EVERY, last + 1):
            manifest = self._manifest(version)
            if manifest is None:
                raise self._damaged(f"{_path(version)} is missing; restore it from a backup")
            latest = self._applied(latest, manifest)
        return latest

    def _manifest(self, version: int) -> dict[str, Any] | None:
        path = _path(version)
        data = self._store.get(path)
        if data is None:
            return None
        manifest = self._parsed(path, data)
        if manifest.get("jetspark") != FORMAT:
            raise self._damaged(
                f"{path} has the format {manifest.get('jetspark')!r}, and this version of JetSpark reads {FORMAT}; "
                "update it"
            )
        return manifest | {"version": version}

    def _applied(self, before: Snapshot | None, manifest: dict[str, Any]) -> Snapshot:
        version = manifest["version"]
        try:
            identity = StreamIdentity(manifest["stream"], manifest["created"])
            position = ArchivePosition(
                identity=identity, first=manifest["first"], next=manifest["next"], epoch=manifest["epoch"]
            )
            if before is None:
                files = [_file(record) for record in manifest["files"]]
            else:
                removed = set(manifest["remove"])
                files = [each for each in before.files if each.path not in removed]
                files += [_file(record) for record in manifest["add"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"{_path(version)} is not a manifest of JetSpark: {error!r}") from error
        return checked_snapshot(self._store.uri, position, files, version)

    def _parsed(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError as error:
            raise self._damaged(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise self._damaged(f"{path} is not a manifest of JetSpark")
        return found

    def _damaged(self, reason: str) -> ArchiveDamaged:
        return ArchiveDamaged(self._store.uri, reason)


def _path(version: int) -> str:
    return f"{FOLDER}/manifest-{version:020}.json"


def _record(file: DataFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "rows": file.rows,
        "size_bytes": file.size_bytes,
        "sequences": [file.min_sequence, file.max_sequence],
        "times_us": [file.min_time_us, file.max_time_us],
    }


def _file(record: dict[str, Any]) -> DataFile:
    (low, high), (first_us, last_us) = record["sequences"], record["times_us"]
    return DataFile.at_path(
        record["path"],
        rows=int(record["rows"]),
        size_bytes=int(record["size_bytes"]),
        sequences=(int(low), int(high)),
        times_us=(int(first_us), int(last_us)),
    )
