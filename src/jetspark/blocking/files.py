"""Reading and writing the files of an object store, from threads."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import TypeAlias

from jetspark.jetstream.objects import BLOCK_BYTES, BinaryReader, BinaryWriter, BytesLike, Upload, steps, write_chunks
from jetspark.jetstream.part_file import PartFile

__all__ = ["READ_BYTES", "Source", "chunks_of", "keep", "write_to"]

Source: TypeAlias = BytesLike | os.PathLike[str] | BinaryReader | Iterable[BytesLike]

# Bytes read and hashed in one step.
READ_BYTES = BLOCK_BYTES


def chunks_of(upload: Upload, source: Source) -> Generator[bytes, None, None]:
    """The chunks that a source is cut into."""
    for some in steps(upload, source):
        yield from some


def write_to(file: BinaryWriter, chunks: Generator[bytes, None, None]) -> None:
    """Write the chunks as they come."""
    with closing(chunks):
        write_chunks(file, chunks)


def keep(part: PartFile) -> None:
    """Move the complete file to its final path."""
    part.keep()
