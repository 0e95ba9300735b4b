"""JSON lines in a file that only grows: what the file sinks of both drivers write with. It blocks.

Invariants: the file ends with a whole line whenever nobody writes, and after a crash again with the next opening. A
batch that failed has left nothing behind, before the next one begins.

* A crash in the middle of a write leaves a line without an end. At the next opening it is appended to ``<path>.torn``
  and cut off: nothing is lost, and every line of the file can be read. (To end it with a newline would leave a line
  that cannot be read, or, worse, half a number that can.)
* A write that fails is cut off again. If that fails too, because the disk does not answer, the next write begins with
  it, or fails as well.
* A file that was renamed or deleted is noticed before each write, and made anew: rotating it loses nothing.

All of this needs one writer at a time, so the file is locked where the system can (not on Windows).
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

# How far back the end of the last whole line is looked for at a time.
_LOOK_BACK_BYTES = 1 << 16
# Windows would make two characters of each newline.
_BINARY: int = getattr(os, "O_BINARY", 0)


def json_line(item: Any) -> str:
    """An item as JSON. Bytes are text if they are UTF-8, else ``{"base64": ...}``; dead letters tell their reason."""
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
    """One file, one writer; any thread may call."""

    def __init__(self, path: str | os.PathLike[str], to_json: Callable[[Any], str | bytes], *, fsync: bool) -> None:
        if not isinstance(path, str | os.PathLike):
            raise unfit("path", path, "a path")
        self.path = Path(path)
        self._to_json = function("to_json", to_json, "a function from an item to its JSON")
        self._fsync = flag("fsync", fsync)
        self._lock = threading.Lock()
        self._file: int | None = None
        self._repair_to: int | None = None
        """What comes after is of a write that failed."""
        self._is_closed = False

    def open(self) -> None:
        """Open the file now rather than at the first write.

        Raises:
            UsageError: It was closed, or somebody else writes it.
            OSError: It cannot be opened.
        """
        with self._lock:
            self._opened()

    def write(self, batch: Sequence[Any]) -> None:
        """Append a line for each item, in one write; with ``fsync`` they are on the disk when this returns.

        Raises:
            TypeError, ValueError: An item is no JSON, or its JSON has more than one line. Nothing is written.
            OSError: Nothing is written: what was is cut off, at the latest before the next write.
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
                with contextlib.suppress(OSError):  # then the next write tries
                    os.ftruncate(file, before)
                    self._repair_to = None
                raise

    def close(self) -> None:
        """Write no more. May be called again."""
        with self._lock:
            self._is_closed = True
            self._shut()

    def _line(self, item: Any) -> bytes:
        line = self._to_json(item)
        data = line.encode() if isinstance(line, str) else line
        if b"\n" in data or b"\r" in data:
            raise ValueError(f"to_json gave more than one line: {data[:80]!r}")
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
                _sync_folder(self.path.parent)  # or a new file might be without a name after a crash
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
            os.fsync(aside)  # before it is cut off
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
    os.lseek(file, begin, os.SEEK_SET)  # writing appends, wherever this points
    data = b""
    while len(data) < end - begin and (more := os.read(file, end - begin - len(data))):
        data += more
    return data


def _write_all(file: int, data: bytes) -> None:
    """One call, unless the system takes only a part of it."""
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, memoryview(data)[written:])


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # which cannot open a folder, and needs no such thing
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
