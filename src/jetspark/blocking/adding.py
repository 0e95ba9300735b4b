"""Adding the items of an iterable to a fast batch, from threads."""

from __future__ import annotations

from collections.abc import Iterator

from jetspark.blocking.feeding import BatchFeed
from jetspark.publish.outgoing import CHUNK_BYTES, CHUNK_MESSAGES, Item, take

__all__ = ["add_all"]


def add_all(feed: BatchFeed, iterator: Iterator[Item]) -> None:
    """Take items from the iterator, then have the batch take those.

    The lock is not held while the caller's iterator works: it may want to use the connection, too.
    """
    while True:
        chunk: list[Item] = []
        try:
            take(iterator, chunk, min(max(feed.batch.sender.room, 1), CHUNK_MESSAGES), CHUNK_BYTES)
        finally:
            feed.add_chunk(chunk)  # it has what the iterator gave before it failed
        if not chunk:
            return
