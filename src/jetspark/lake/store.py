"""Where the files of archives live: a local folder, or an object store through obstore.

A store is rooted at a URI, and paths below it are relative, with ``/`` between their parts. The commits of a table rest
on one operation, :meth:`FileStore.create`: of all that create the same path, exactly one succeeds. A store that does
not keep this promise is refused by :func:`require_conditional_writes`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from jetspark.errors import ConfigError
from jetspark.lake.cloud_store import SCHEMES, CloudStore
from jetspark.lake.folder_store import FolderStore, StoredFile

__all__ = ["FileStore", "StoredFile", "open_store", "require_conditional_writes"]


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

    def make_durable(self, path: str) -> None:
        """Make a file that another library has written survive a loss of power."""

    def scratch_file(self) -> contextlib.AbstractContextManager[Path]:
        """A path for a new local file to be given to :meth:`put_file`; whatever is there is removed at exit."""

    def put_file(self, path: str, file: Path) -> int:
        """Store a finished :meth:`scratch_file`, and return its size. The local file is used up."""

    def open(self, path: str, *, size_bytes: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """A file for pyarrow to read. With its size, a request is saved.

        Raises:
            FileNotFoundError: It does not exist.
        """

    def files(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        """The files in the folder ``prefix`` and the folders below it, sorted by path; those after a path only."""

    def leftovers(self) -> Iterator[StoredFile]:
        """Scratch files, which belong to running writers or were left by killed ones."""

    def folders(self, path: str = "") -> list[str]:
        """The names of the folders in a folder, sorted."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files. Missing ones are ignored."""


def open_store(uri: str, options: Mapping[str, str] | None = None) -> FileStore:
    """Open a folder or an object store. Nothing is read or written yet.

    Args:
        uri: A folder, ``file://…``, ``s3://bucket/…``, ``abfss://container@account.dfs.core.windows.net/…``,
            ``gs://bucket/…``.
        options: Keys of object_store, such as ``aws_endpoint``. The environment supplies the others.

    Raises:
        ConfigError: The URI or an option cannot be used.
        MissingExtra: Object stores need the extra ``lake``.
    """
    scheme, mark, rest = uri.partition("://")
    if mark and scheme in SCHEMES:
        return CloudStore(uri, options)
    if (mark and (scheme != "file" or not rest.startswith("/"))) or not uri.strip() or "\0" in uri:
        raise ConfigError(
            f"archive URI {uri!r}: expected a folder, file:///folder, or {', '.join(SCHEMES)} as in s3://bucket/folder"
        )
    if options:
        raise ConfigError(f"option {next(iter(options))!r}: the folder {uri!r} has no options")
    return FolderStore(rest if mark else uri)


def require_conditional_writes(store: FileStore) -> None:
    """Refuse a store that lets two writers create the same file: each would think that it has committed.

    Raises:
        ConfigError: The store is such a one.
    """
    path = f".probe-{secrets.token_hex(8)}"
    try:
        if not store.create(path, b"1") or store.create(path, b"2") or store.get(path) != b"1":
            raise ConfigError(
                f"store {store.uri} does not honour conditional writes (If-None-Match), so two writers could commit at "
                "once, and messages would be lost; use one that does, such as Amazon S3, Azure, Google Cloud Storage, "
                "MinIO 2024 or newer, or a local folder"
            )
    finally:
        store.delete([path])
