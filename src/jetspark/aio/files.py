"""Reading what is put into an object store, and writing what is got, with asyncio: files are blocking, and so threads
read and write them."""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from contextlib import aclosing
from typing import TypeAlias

from jetspark.aio.finishing import see_through
from jetspark.jetstream.objects import (
    AHEAD_BYTES,
    BLOCK_BYTES,
    BinaryReader,
    BinaryWriter,
    BytesLike,
    Upload,
    steps,
    write_chunks,
)
from jetspark.jetstream.part_file import PartFile

__all__ = ["READ_BYTES", "Source", "chunks_of", "keep", "write_to"]

Source: TypeAlias = BytesLike | os.PathLike[str] | BinaryReader | AsyncIterable[BytesLike] | Iterable[BytesLike]

# What one step reads and hashes.
READ_BYTES = AHEAD_BYTES


async def chunks_of(upload: Upload, source: Source) -> AsyncGenerator[bytes, None]:
    """The chunks that a source is cut into."""
    if isinstance(source, AsyncIterable):
        async for piece in source:
            for chunk in upload.feed(piece):
                yield chunk
        for chunk in upload.finish():
            yield chunk
    elif isinstance(source, os.PathLike) or hasattr(source, "read") or _is_large(upload, source):
        async with aclosing(_chunks_ahead(steps(upload, source))) as chunks:
            async for chunk in chunks:
                yield chunk
    else:
        # A block is hashed in about a millisecond, and who knows which thread an iterator wants to be asked in.
        for some in steps(upload, source):
            for chunk in some:
                yield chunk


async def _chunks_ahead(reading: Iterator[list[bytes]]) -> AsyncGenerator[bytes, None]:
    """Read and hash in a thread, one step ahead of what is sent."""
    loop = asyncio.get_running_loop()
    step = functools.partial(next, reading, None)
    coming = loop.run_in_executor(None, step)
    try:
        while (some := await coming) is not None:
            coming = loop.run_in_executor(None, step)
            for chunk in some:
                yield chunk
    finally:
        # A read that is under way cannot be stopped; what it brings, or raises, is of no interest any more.
        if not coming.cancel() and not coming.cancelled():
            coming.exception()


def _is_large(upload: Upload, source: Source) -> bool:
    return isinstance(source, bytes | bytearray | memoryview) and memoryview(source).nbytes > upload.block_bytes


async def write_to(file: BinaryWriter, chunks: AsyncGenerator[bytes, None]) -> None:
    """Write a block in a thread while the next one comes."""
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] | None = None
    block: deque[bytes] = deque()
    block_bytes = 0
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                block.append(chunk)
                block_bytes += len(chunk)
                if block_bytes >= BLOCK_BYTES:
                    if writing is not None:
                        await asyncio.shield(writing)
                    writing = loop.run_in_executor(None, write_chunks, file, block)
                    block, block_bytes = deque(), 0
        if writing is not None:
            await asyncio.shield(writing)
        writing = loop.run_in_executor(None, write_chunks, file, block)
        await asyncio.shield(writing)
    finally:
        # The file is the caller's again when this returns: nobody must be writing to it. Hence the shields: a
        # cancelled future says that it is done, and its thread writes on.
        if writing is not None and not writing.done():
            await asyncio.wait({writing})


async def keep(part: PartFile) -> None:
    """Have a complete file take its place."""
    await see_through(functools.partial(asyncio.to_thread, part.keep))
