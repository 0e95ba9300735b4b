"""An append-only file of JSON lines, for the file sinks of both drivers. Its calls block.

Invariants: between two writes, and after a crash once the file was opened again, the file ends with a complete line.
A failed batch leaves nothing behind when the next one begins.

* A crash during a write leaves an incomplete line. The next opening moves it to ``<path>.torn``, so no byte is lost and
  every line of the file is valid. (A newline at its end would make an invalid line, or worse, half a number.)
* A failed write is truncated. If the disk refuses that, the next write truncates first, or fails as well.
* Each write checks whether the file was renamed or deleted, and re-creates it: log rotation loses nothing.

This needs a single writer, so the file is locked where the system supports it (not on Windows).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jetspark.batcher.dead_letters import DeadLetter
from jetspark.core.arguments import flag, function, unfit
from jetspark.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LineFile", "json_line"]

# Bytes read at a time in the backward search for the end of the last complete line.
_LOOK_BACK_BYTES = 1 << 16
# In text mode, Windows would write two characters for each newline.
_BINARY: int = getattr(os, "O_BINARY", 0)


def json_line(item: Any) -> str:
    """An item as JSON. Bytes become text if they are UTF-8, else ``{"base64": ...}``; dead letters have a reason."""
    return json.dumps(item, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, DeadLetter):
        return {"item": value.item, "error": value.reason, "time": value.time}
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(data).decode()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is not JSON: give the sink to_json, a function from an item to its JSON")


class LineFile:
    """The single writer of one file; any thread may call it."""

    def __init__(self, path: str | os.PathLike[str], to_json: Callable[[Any], str | bytes], *, fsync: bool) -> None:
        if not isinstance(path, str | os.PathLike):
            raise unfit("path", path, "a path")
        self.path = Path(path)
        self._to_json = function("to_json", to_json, "a function from an item to its JSON")
        self._fsync = flag("fsync", fsync)
        self._lock = threading.Lock()
        self._file: int | None = None
        self._repair_to: int | None = None
        """The bytes after this offset belong to a failed write."""
        self._is_closed = False

    def open(self) -> None:
        """Open the file now rather than at the first write.

        Raises:
            UsageError: This sink was closed, or another sink writes the file.
            OSError: The file cannot be opened.
        """
        with self._lock:
            self._opened()

    def write(self, batch: Sequence[Any]) -> None:
        """Append a line for each item, in one write; with ``fsync`` they are on the disk when this returns.

        Raises:
            TypeError, ValueError: An item is not JSON, or its JSON has more than one line. Nothing is written.
            OSError: Nothing is written: a partial write is truncated, at the latest before the next write.
        """
        block = b"".join([self._line(item) for item in batch])
        if not block:
            return
        with self._lock:
            file = self._opened()
            if self._repair_to is not None:
                os.ftruncate(file, self._repair_to)
                self._repair_to = None
            before = os.fstat(file).st_size
            try:
                _write_all(file, block)
                if self._fsync:
                    os.fsync(file)
            except BaseException:
                self._repair_to = before
                with contextlib.suppress(OSError):  # the next write truncates instead
                    os.ftruncate(file, before)
                    self._repair_to = None
                raise

    def close(self) -> None:
        """Close the file. May be called again."""
        with self._lock:
            self._is_closed = True
            self._shut()

    def _line(self, item: Any) -> bytes:
        line = self._to_json(item)
        data = line.encode() if isinstance(line, str) else line
        if b"\n" in data or b"\r" in data:
            raise ValueError(f"to_json returned more than one line: {data[:80]!r}")
        return data + b"\n"

    def _opened(self) -> int:
        if self._is_closed:
            raise UsageError(f"the sink for {str(self.path)!r} is closed; make another one")
        if self._file is not None and not self._is_the_file(self._file):
            self._shut()
        if self._file is None:
            self._file = self._open()
        return self._file

    def _is_the_file(self, file: int) -> bool:
        try:
            there, ours = os.stat(self.path), os.fstat(file)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _BINARY, 0o666)
        try:
            self._claim(file)
            self._set_aside_torn_line(file)
            if self._fsync:
                os.fsync(file)
                _sync_folder(self.path.parent)  # otherwise a crash could lose the name of a new file
        except BaseException:
            os.close(file)
            raise
        return file

    def _claim(self, file: int) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{str(self.path)!r} is being written by another sink: one file, one writer") from None

    def _set_aside_torn_line(self, file: int) -> None:
        size = os.fstat(file).st_size
        whole = _end_of_last_line(file, size)
        if whole == size:
            return
        aside = os.open(f"{self.path}.torn", os.O_WRONLY | os.O_APPEND | os.O_CREAT | _BINARY, 0o666)
        try:
            _write_all(aside, _read(file, whole, size) + b"\n")
            os.fsync(aside)  # before the line is truncated here
        finally:
            os.close(aside)
        os.ftruncate(file, whole)

    def _shut(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            if self._repair_to is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, self._repair_to)
                self._repair_to = None
            os.close(file)


def _end_of_last_line(file: int, size: int) -> int:
    end = size
    while end > 0:
        begin = max(0, end - _LOOK_BACK_BYTES)
        found = _read(file, begin, end).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _read(file: int, begin: int, end: int) -> bytes:
    os.lseek(file, begin, os.SEEK_SET)  # writes append, whatever the offset
    data = b""
    while len(data) < end - begin and (more := os.read(file, end - begin - len(data))):
        data += more
    return data


def _write_all(file: int, data: bytes) -> None:
    """Write all bytes, in one call unless the system accepts only a part."""
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, memoryview(data)[written:])


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders, and does not need this
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
