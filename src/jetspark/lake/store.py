"""Where the files of archives live: a local folder, or an object store through obstore.

A store is rooted at a URI, and paths below it are relative, with ``/`` between their parts. The commits of a table rest
on one operation, :meth:`FileStore.create`: of all that create the same path, exactly one succeeds. A store that does
not keep this promise is refused by :func:`require_conditional_writes`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from jetspark.errors import ConfigError, StoreRefused

__all__ = ["SCRATCH", "FileStore", "FolderStore", "StoredFile", "open_store", "require_conditional_writes"]

SCRATCH = ".writing-"
"""Prefix of the names of files that are being written, or that a killed writer left; engines ignore them."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: str
    size_bytes: int
    modified_s: float
    """Seconds since 1970."""


class FileStore(Protocol):
    """Files below a URI. Every method raises :class:`StoreUnavailable` or :class:`StoreRefused` if the store fails."""

    @property
    def uri(self) -> str:
        """The root, without secrets; of a local folder its absolute path."""

    @property
    def storage_options(self) -> Mapping[str, str]:
        """The options that this store was opened with, for other libraries. May have secrets."""

    def below(self, path: str) -> FileStore:
        """The same store, rooted at a folder below this one."""

    def location(self, path: str) -> str:
        """Where a file is, as other engines name it."""

    def get(self, path: str) -> bytes | None:
        """The contents of a file; None if it does not exist."""

    def put(self, path: str, data: bytes) -> None:
        """Write a file, in place of any that exists. Durable on return; no reader sees a part of it."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a file, unless it exists. Durable on return; no reader sees a part of it.

        Returns:
            True if the file has these data by this call. Make the data unique: a call whose outcome was unknown is
            resolved by comparing them.
        """

    def scratch_file(self) -> contextlib.AbstractContextManager[Path]:
        """A path for a new local file to be given to :meth:`put_file`; whatever is there is removed at exit."""

    def put_file(self, path: str, file: Path) -> int:
        """Store a finished :meth:`scratch_file`, and return its size. The local file is used up."""

    def open(self, path: str) -> contextlib.AbstractContextManager[Any]:
        """A file for pyarrow to read.

        Raises:
            FileNotFoundError: It does not exist.
        """

    def files(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        """The files in the folder ``prefix`` and the folders below it, sorted by path; those after a path only."""

    def folders(self, path: str = "") -> list[str]:
        """The names of the folders in a folder, sorted."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; those that do not exist are ignored."""


def open_store(uri: str, options: Mapping[str, str] | None = None) -> FileStore:
    """Open a folder or an object store. Nothing is read or written yet.

    Args:
        uri: A folder, ``file://…``, ``s3://bucket/…``, ``abfss://container@account.dfs.core.windows.net/…``,
            ``gs://bucket/…``.
        options: Keys of object_store, such as ``aws_endpoint``; what is missing comes from the environment.

    Raises:
        ConfigError: The URI or an option cannot be used.
        MissingExtra: Object stores need the extra ``lake``.
    """
    scheme, mark, rest = uri.partition("://")
    if not uri.strip():
        raise ConfigError(f"archive URI {uri!r}: expected a folder, or a URI such as s3://bucket/folder")
    if not mark or scheme == "file":
        if options:
            raise ConfigError(f"option {next(iter(options))!r}: a local folder has none; {uri!r} is one")
        return FolderStore(rest if mark else uri)
    raise ConfigError(f"archive URI {uri!r}: expected a folder")


class FolderStore:
    """A folder of a local or mounted file system with hard links."""

    def __init__(self, folder: str | Path) -> None:
        self._root = Path(folder).expanduser().absolute()
        self.uri = str(self._root)
        self.storage_options: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"<FolderStore {self.uri}>"

    def below(self, path: str) -> FolderStore:
        return FolderStore(self._root / path)

    def location(self, path: str) -> str:
        return str(self._root / path)

    def get(self, path: str) -> bytes | None:
        with self._translated(path):
            try:
                return (self._root / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def put(self, path: str, data: bytes) -> None:
        with self._translated(path), self.scratch_file() as scratch:
            scratch.write_bytes(data)
            self.put_file(path, scratch)

    def create(self, path: str, data: bytes) -> bool:
        target = self._root / path
        with self._translated(path), self.scratch_file() as scratch:
            scratch.write_bytes(data)
            _sync(scratch)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                # A link appears whole or not at all, and never replaces a file; `open(mode="x")` shows an empty file.
                os.link(scratch, target)
            except FileExistsError:
                return False
            _sync(target.parent)
            return True

    @contextlib.contextmanager
    def scratch_file(self) -> Iterator[Path]:
        with self._translated(""):
            self._root.mkdir(parents=True, exist_ok=True)
        scratch = self._root / f"{SCRATCH}{secrets.token_hex(8)}"
        try:
            yield scratch
        finally:
            scratch.unlink(missing_ok=True)

    def put_file(self, path: str, file: Path) -> int:
        target = self._root / path
        with self._translated(path):
            size = file.stat().st_size
            _sync(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
            _sync(target.parent)
        return size

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[Any]:
        with self._translated(path):
            file = pa.OSFile(str(self._root / path), "rb")
        with file:
            yield file

    def files(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        found = []
        with self._translated(prefix):
            for folder, _, names in os.walk(self._root / prefix):
                for name in names:
                    path = Path(folder, name)
                    relative = path.relative_to(self._root).as_posix()
                    if relative > after:
                        with contextlib.suppress(FileNotFoundError):
                            status = path.stat()
                            found.append(StoredFile(relative, status.st_size, status.st_mtime))
        yield from sorted(found, key=lambda each: each.path)

    def folders(self, path: str = "") -> list[str]:
        with self._translated(path):
            try:
                return sorted(each.name for each in os.scandir(self._root / path) if each.is_dir())
            except FileNotFoundError:
                return []

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with self._translated(path):
                (self._root / path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            what = f"{self._root / path}: {error.strerror or error}"
            raise StoreRefused(self.uri, f"{what}; give a folder that this user may write and that has room") from error


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a loss of power: what is trimmed from the stream is only here."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_conditional_writes(store: FileStore) -> None:
    """Refuse a store that lets two writers create the same file: each would think that it has committed.

    Raises:
        ConfigError: The store is such a one.
    """
    path = f"_jetspark/probe-{secrets.token_hex(8)}"
    try:
        if not store.create(path, b"1") or store.create(path, b"2") or store.get(path) != b"1":
            raise ConfigError(
                f"store {store.uri} does not honour conditional writes (If-None-Match), so two writers could commit at "
                "once, and messages would be lost; use one that does, such as Amazon S3, Azure, Google Cloud Storage, "
                "MinIO 2024 or newer, or a local folder"
            )
    finally:
        store.delete([path])
