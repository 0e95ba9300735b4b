"""A local folder as a store."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetspark.errors import ConfigError, StoreRefused

__all__ = ["SCRATCH", "FolderStore", "StoredFile"]

SCRATCH = ".writing-"
"""Prefix of the names of files that are being written, or that a killed writer left; engines ignore them."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: str
    size_bytes: int
    modified_s: float
    """Seconds since 1970."""


class FolderStore:
    """A folder of a local or mounted file system that has hard links; a :class:`~jetspark.lake.store.FileStore`."""

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
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                raise ConfigError(
                    f"archive {self.uri}: its file system has no hard links, which commits need ({error.strerror}); "
                    "use a folder on another one, or an object store"
                ) from error
            _sync(target.parent)
            return True

    def make_durable(self, path: str) -> None:
        with self._translated(path):
            _sync(self._root / path)
            _sync((self._root / path).parent)

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
    def open(self, path: str, *, size_bytes: int | None = None) -> Iterator[Any]:
        with self._translated(path):
            file = pa.OSFile(str(self._root / path), "rb")
        with file:
            yield file

    def files(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        yield from (each for each in self._listed(prefix, after) if SCRATCH not in each.path)

    def leftovers(self) -> Iterator[StoredFile]:
        yield from (each for each in self._listed("", "") if SCRATCH in each.path)

    def _listed(self, prefix: str, after: str) -> list[StoredFile]:
        found = []
        with self._translated(prefix):
            for folder, _, names in os.walk(self._root / prefix, onerror=_unless_missing):
                for name in names:
                    path = Path(folder, name)
                    relative = path.relative_to(self._root).as_posix()
                    if relative > after:
                        with contextlib.suppress(FileNotFoundError):
                            status = path.stat()
                            found.append(StoredFile(relative, status.st_size, status.st_mtime))
        return sorted(found, key=lambda each: each.path)

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


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a loss of power: a trimmed stream has no other copy."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
