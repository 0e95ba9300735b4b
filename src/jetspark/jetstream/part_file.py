"""A file that replaces its target when it is complete."""

from __future__ import annotations

import io
import os

__all__ = ["PartFile"]


class PartFile:
    """A file written beside its target under a temporary name, and renamed at the end. Used by one thread at a time."""

    def __init__(self, target: str | os.PathLike[str], token: str) -> None:
        """``token`` is different for each file: several may write the same target at the same time."""
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
        """Remove the temporary file, unless it was kept."""
        self._close()
        try:
            os.remove(self._path)
        except FileNotFoundError:
            pass  # it was kept, or never made

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
