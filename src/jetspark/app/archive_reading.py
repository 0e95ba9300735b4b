"""Reading a stream and its archive in asyncio code: files are read in threads.

The lake is imported only where an archive is given, because applications need not have its libraries.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.steps import ProcedureRunner
from jetspark.errors import ArchiveDamaged, DataLoss, StreamNotFound
from jetspark.state.deliveries import sequence_of
from jetspark.state.scan import Head, Range, RangeScan, sequence_at

if TYPE_CHECKING:
    from jetspark.lake.hybrid import Archives, HybridRange
    from jetspark.lake.reading import ArchiveRoot

__all__ = ["archives_of", "first_at", "hybrid_pieces", "scanned", "taken_ahead", "whole_head"]

T = TypeVar("T")

# How long a read waits for the next message: it covers a restart and the election of a leader.
PATIENCE_S = 60.0
_END: Any = object()


def archives_of(archive: ArchiveRoot | str | None) -> Archives | None:
    """The archives below a root.

    Raises:
        MissingExtra: The extra ``lake`` is not installed.
        ConfigError: It is neither a root nor a URI.
    """
    if archive is None:
        return None
    from jetspark.lake.hybrid import Archives
    from jetspark.lake.reading import ArchiveRoot

    return Archives(ArchiveRoot.of(archive))


async def whole_head(
    archives: Archives | None, stream: str, look: Callable[[int], Awaitable[Head]], anchor: int = 0
) -> Head:
    """The history of a stream, as :meth:`jetspark.lake.hybrid.Archives.whole`; without archives the stream alone."""
    if archives is None:
        return await look(anchor)
    await asyncio.to_thread(archives.open, [stream])
    try:
        head = await look(archives.anchor_in_stream(stream, anchor))
    except StreamNotFound:
        alone = await asyncio.to_thread(archives.alone, stream)
        if alone is None:
            raise
        return alone
    return await asyncio.to_thread(archives.extend, head, anchor)


async def first_at(js: JetStream, head: Head, moment: datetime.datetime) -> int:
    """The sequence of the first message stored at or after a moment; without one, the next sequence."""
    context = context_of(js)
    if type(head) is Head:
        return await context.run(sequence_at(context.api, head, moment))
    from jetspark.lake.hybrid import HybridHead

    assert isinstance(head, HybridHead)
    found = head.next if head.is_deleted else await context.run(sequence_at(context.api, head.tail, moment))
    return await asyncio.to_thread(head.begin_at, moment, found)


def scanned(js: JetStream, part: Range) -> AsyncGenerator[list[Any], None]:
    """The messages of a range of a stream."""
    scan = RangeScan(part, timeout_s=PATIENCE_S, loss_remedy="it was removed while it was read")
    return ProcedureRunner(js).pieces(scan)


async def hybrid_pieces(js: JetStream, part: HybridRange) -> AsyncGenerator[list[Any], None]:
    """The messages of a range, from the archive and from the stream.

    Raises:
        DataLoss: Messages of the range were removed, and the archive does not have them.
        ArchiveDamaged: A file of the archive is missing, or cannot be read.
    """
    from jetspark.lake.hybrid import HybridCursor

    cursor, on_loss = HybridCursor(part), _ignore if part.is_kept else None
    while (found := cursor.slice()) is not None:
        if found.is_archived:
            rows = cursor.archive.messages(found.start, found.end, filters=part.subjects, on_loss=on_loss)
            source = taken_ahead(rows)
        else:
            source = scanned(js, cursor.in_stream(found))
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    yield piece
                    cursor.reached(sequence_of(piece[-1]) + 1)
            cursor.reached(found.end)
        except (ArchiveDamaged, DataLoss) as error:
            if not await asyncio.to_thread(cursor.can_continue, error):
                raise


async def taken_ahead(pieces: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """The items of a generator that blocks, taken in a thread; at most one is there ahead of the caller."""
    following = asyncio.ensure_future(asyncio.to_thread(next, pieces, _END))
    try:
        # Shielded, because a thread cannot be cancelled, and a generator that runs cannot be closed.
        while (found := await asyncio.shield(following)) is not _END:
            following = asyncio.ensure_future(asyncio.to_thread(next, pieces, _END))
            yield found
    finally:
        await asyncio.wait([following])
        following.exception()
        await asyncio.to_thread(pieces.close)


def _ignore(lost: range) -> None:
    pass
