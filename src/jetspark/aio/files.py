"""Reading and writing the files of an object store, with asyncio: in threads, because file I/O blocks."""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from contextlib import aclosing
from typing import TypeAlias

from jetspark.aio.completion import run_to_completion
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

# Bytes read and hashed in one step.
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
        # Hashing a block takes about a millisecond, and the iterator may not be safe to use in another thread.
        for some in steps(upload, source):
            for chunk in some:
                yield chunk


async def _chunks_ahead(reading: Iterator[list[bytes]]) -> AsyncGenerator[bytes, None]:
    """Read and hash in a thread, one step ahead of the sender."""
    loop = asyncio.get_running_loop()
    step = functools.partial(next, reading, None)
    coming = loop.run_in_executor(None, step)
    try:
        while (some := await coming) is not None:
            coming = loop.run_in_executor(None, step)
            for chunk in some:
                yield chunk
    finally:
        # A running read cannot be stopped; its result or error is dropped.
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
        # When this returns, the file belongs to the caller again and no thread may write to it. Hence the shields: a
        # cancelled future is done at once, while its thread still writes.
        if writing is not None and not writing.done():
            await asyncio.wait({writing})


async def keep(part: PartFile) -> None:
    """Move the complete file to its final path."""
    await run_to_completion(functools.partial(asyncio.to_thread, part.keep))
