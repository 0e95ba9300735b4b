"""Adding the items of an iterable to a fast batch, with asyncio: the hot path of fast ingest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from jetspark.aio.feeding import BatchFeed
from jetspark.publish.outgoing import Item

__all__ = ["add_all"]


async def add_all(feed: BatchFeed, iterator: Iterator[Item]) -> None:
    """Have the batch itself take items from the iterator while it has room, and wait in between."""
    sender, link, runner = feed.batch.sender, feed.link, feed.runner
    held: list[Item] = []  # one at most, for which there was no room
    deadline: float | None = None
    while True:
        if sender.room == 0:
            held = held or list(islice(iterator, 1))
            if not held:
                return
            if await feed.open_or_wait(held[0]):
                held = []
        elif not sender.may_add_some:
            link.flush()
            if not sender.may_add_some:
                if deadline is None:
                    deadline = link.deadline(feed.batch.room_timeout_s)
                await runner.wait_for_room(deadline)
        elif sender.add_some(chain(held, iterator), link.now()):
            held, deadline = [], None
            await runner.write()
        else:
            return
