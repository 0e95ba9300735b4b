"""Object stores (Amazon S3 and what speaks its protocol, Azure, Google Cloud) through obstore."""

from __future__ import annotations

import contextlib
import copy
import datetime
import io
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetspark.errors import ConfigError, JetSparkError, MissingExtra, StoreRefused, StoreUnavailable
from jetspark.lake.folder_store import StoredFile
from jetspark.lake.unknown_outcomes import done_once

__all__ = ["SCHEMES", "CloudStore", "store_error", "without_secrets"]

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_BUCKET = r"(?:abfss?://[\w-]+@|[a-z0-9]+://)[A-Za-z0-9][A-Za-z0-9._-]*"
_ROOT = re.compile(rf"({_BUCKET})((?:/[A-Za-z0-9._~=@+,-]+)*)/?", re.ASCII)
_HIDDEN = re.compile(r"(?<=//)[^/]*@|\?.*")

# One call, with all attempts inside the library. A request that takes longer is cut, and counts as unknown.
RETRY_S = 60.0
MAX_RETRIES = 8
UPLOAD_PART_BYTES = 8 << 20
UPLOADS = 4

# fmt: off
_CLIENT_OPTIONS = frozenset({
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type", "http1_only",
    "http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "http2_max_frame_size",
    "http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url",
    "randomize_addresses", "timeout", "user_agent",
})
# fmt: on
"""Options of the HTTP client; obstore takes them apart from those of the store."""
_CLOUD_PREFIX = re.compile(r"^(aws|azure|google)_")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MARKUP = re.compile(r"\x1b\[\d+m|↳|\s+")
_QUERY = re.compile(r"\?[^\s)]*")
_REASON_CHARS = 500
_REFUSALS = ("PermissionDeniedError", "UnauthenticatedError", "InvalidPathError")
_TRY_AGAIN = {408, 409, 429}


class CloudStore:
    """A folder of an object store; a :class:`~jetspark.lake.store.FileStore`. Do not use one in a forked process."""

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        match = _ROOT.fullmatch(uri)
        if match is None or uri.partition("://")[0] not in SCHEMES:
            raise ConfigError(
                f"archive URI {_HIDDEN.sub('…', uri)!r}: expected one such as s3://bucket/folder, with letters, digits "
                "and ._~=@+,- in the names of folders"
            )
        self.uri = uri.rstrip("/")
        self.storage_options: Mapping[str, str] = _checked(options or {})
        self._prefix = match[2].strip("/")
        self._store = _opened(match[1], self.storage_options)

    def __repr__(self) -> str:
        return f"<CloudStore {self.uri}>"

    def below(self, path: str) -> CloudStore:
        store = copy.copy(self)  # with the same connections
        store.uri, store._prefix = f"{self.uri}/{path}", self._path(path)
        return store

    def location(self, path: str) -> str:
        return f"{self.uri}/{path}" if path else self.uri

    def get(self, path: str) -> bytes | None:
        import obstore

        try:
            with self._translated():
                return bytes(obstore.get(self._store, self._path(path)).bytes())
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes) -> None:
        self._put(path, data)

    def create(self, path: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        def attempt() -> bool:
            try:
                with self._translated():
                    obstore.put(self._store, self._path(path), data, mode="create", use_multipart=False)
                return True
            except AlreadyExistsError:
                # By another writer, or by an earlier attempt, perhaps inside the library, whose answer was lost. Or S3
                # saw two writes at the same moment, and did neither of them (409).
                raise StoreUnavailable(self.uri, f"{path}: two conditional writes at once") from None
            except FileNotFoundError:
                raise self._no_bucket() from None

        def outcome() -> bool | None:
            found = self.get(path)
            return None if found is None else found == data

        return done_once(attempt, outcome, _as_ours)

    def make_durable(self, path: str) -> None:
        """Object stores answer when a write is durable."""

    @contextlib.contextmanager
    def scratch_file(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="jetspark-") as folder:
            yield Path(folder, "file")

    def put_file(self, path: str, file: Path) -> int:
        size = file.stat().st_size
        self._put(path, file)
        return size

    def _put(self, path: str, data: bytes | Path) -> None:
        import obstore

        try:
            with self._translated():
                obstore.put(self._store, self._path(path), data, chunk_size=UPLOAD_PART_BYTES, max_concurrency=UPLOADS)
        except FileNotFoundError:
            raise self._no_bucket() from None

    @contextlib.contextmanager
    def open(self, path: str, *, size_bytes: int | None = None) -> Iterator[Any]:
        import obstore

        with self._translated():
            if size_bytes is None:
                size_bytes = obstore.head(self._store, self._path(path))["size"]
            yield pa.PythonFile(_RemoteFile(self._store, self._path(path), size_bytes), mode="r")

    def files(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        import obstore

        skipped = len(self._prefix) + 1 if self._prefix else 0
        with self._translated():
            chunks = obstore.list(
                self._store, self._path(prefix) or None, offset=self._path(after) if after else None, chunk_size=1000
            )
            for chunk in chunks:
                for each in chunk:
                    yield StoredFile(each["path"][skipped:], each["size"], each["last_modified"].timestamp())

    def leftovers(self) -> Iterator[StoredFile]:
        return iter(())  # scratch files are elsewhere, and the system removes them

    def folders(self, path: str = "") -> list[str]:
        import obstore

        with self._translated():
            found = obstore.list_with_delimiter(self._store, self._path(path) or None)
        return sorted(each.rsplit("/", 1)[-1] for each in found["common_prefixes"])

    def delete(self, paths: Iterable[str]) -> None:
        import obstore

        for path in paths:
            # One by one: in a bulk deletion, some stores fail at a file that does not exist.
            with self._translated(), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, self._path(path))

    def _no_bucket(self) -> StoreRefused:
        return StoreRefused(self.uri, "the bucket does not exist; create it")

    def _path(self, path: str) -> str:
        return "/".join(filter(None, (self._prefix, path)))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            yield
        except AlreadyExistsError:
            raise
        except BaseError as error:
            # The library's own error may show a signed address.
            raise store_error(self.uri, error, self.storage_options) from None


def _as_ours(error: Exception) -> JetSparkError:
    if isinstance(error, JetSparkError):
        return error
    raise error


def store_error(uri: str, error: Exception, options: Mapping[str, str]) -> JetSparkError:
    """The error of a library for object stores as ours, without secrets."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    reason = _MARKUP.sub(" ", re.split("\n\n|: <", text, maxsplit=1)[0])
    reason = _QUERY.sub("?…", reason[:_REASON_CHARS])
    if code is not None:
        reason = f"{reason} ({code[1]})"
    reason = without_secrets(reason, options)
    is_refusal = "://" not in uri or type(error).__name__ in _REFUSALS
    if is_refusal or (status is not None and status[1][0] == "4" and int(status[1]) not in _TRY_AGAIN):
        return StoreRefused(uri, f"{reason}; check bucket, permissions and options")
    return StoreUnavailable(uri, reason)


def without_secrets(text: str, options: Mapping[str, str]) -> str:
    """Replace the values of options in a text by ``***``, except well-known ones such as a region."""
    for name, value in options.items():
        if len(value) > 3 and not re.search(r"(endpoint|region|bucket|http|timeout|catalog|namespace)$", name):
            text = text.replace(value, "***")
    return text


class _RemoteFile(io.RawIOBase):
    """Reads ranges of an object; pyarrow asks for a row group at once."""

    def __init__(self, store: Any, path: str, size: int) -> None:
        self._store, self._path, self._size = store, path, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        import obstore

        end = self._size if size < 0 else min(self._at + size, self._size)
        if end <= self._at:
            return b""
        data = bytes(obstore.get_range(self._store, self._path, start=self._at, end=end))
        self._at = end
        return data


def _checked(options: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"option {name!r}: expected text, as in aws_region='eu-west-1'")
        key = name.lower()
        plain = _CLOUD_PREFIX.sub("", key)
        found[plain if plain in _CLIENT_OPTIONS else key] = value
    is_plain = any(name.endswith("endpoint") and value.startswith("http://") for name, value in found.items())
    return {"allow_http": "true"} | found if is_plain else found


def _opened(bucket: str, options: Mapping[str, str]) -> Any:
    try:
        from obstore import store
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise MissingExtra(f"an archive in {bucket}", "lake") from error
    from_url: Any = store.from_url  # typed for one kind of store at a time
    try:
        return from_url(
            bucket,
            config={name: value for name, value in options.items() if name not in _CLIENT_OPTIONS},
            client_options={name: value for name, value in options.items() if name in _CLIENT_OPTIONS},
            retry_config={"max_retries": MAX_RETRIES, "retry_timeout": datetime.timedelta(seconds=RETRY_S)},
        )
    except (BaseError, ValueError) as error:
        reason = str(store_error(bucket, error, options).args[1]).partition(";")[0]
    raise ConfigError(f"archive {bucket}: {reason}; options are the keys of object_store, such as aws_endpoint")
