"""Adding the items of an iterable to a fast batch, from threads."""

from __future__ import annotations

from collections.abc import Iterator

from jetspark.blocking.batch_input import BatchInput
from jetspark.publish.outgoing import CHUNK_BYTES, CHUNK_MESSAGES, Item, take

__all__ = ["add_all"]


def add_all(batch_input: BatchInput, iterator: Iterator[Item]) -> None:
    """Take items from the iterator in chunks and add each chunk to the batch.

    The lock is not held while the caller's iterator runs, because the iterator may use the connection.
    """
    while True:
        chunk: list[Item] = []
        try:
            take(iterator, chunk, min(max(batch_input.batch.sender.room, 1), CHUNK_MESSAGES), CHUNK_BYTES)
        finally:
            batch_input.add_chunk(chunk)  # also the items that came before the iterator failed
        if not chunk:
            return
