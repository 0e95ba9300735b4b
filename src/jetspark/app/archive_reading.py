"""Archives in asyncio code: their files are read in threads. The lake is imported only where an archive is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from jetspark.lake.hybrid import Archives
    from jetspark.lake.reading import ArchiveRoot

__all__ = ["archives_of", "taken_ahead"]

T = TypeVar("T")

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
