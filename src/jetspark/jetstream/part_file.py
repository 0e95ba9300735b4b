"""A file that takes its place when it is complete."""

from __future__ import annotations

import io
import os

__all__ = ["PartFile"]


class PartFile:
    """Written beside its target under a name of its own, and renamed in the end. Used from one thread at a time."""

    def __init__(self, target: str | os.PathLike[str], token: str) -> None:
        """``token`` is new for each: several may write the same target at once."""
        self._target = target
        self._path = f"{os.fspath(target)}.{token}.part"
        self._file: io.BufferedWriter | None = None

    def write(self, data: bytes) -> int:
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115
        return self._file.write(data)

    def keep(self) -> None:
        self.write(b"")  # so that there is a file, even an empty one
        self._close()
        os.replace(self._path, self._target)

    def discard(self) -> None:
        """Remove what is there, unless it was kept."""
        self._close()
        try:
            os.remove(self._path)
        except FileNotFoundError:
            pass  # it was kept, or never made

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
