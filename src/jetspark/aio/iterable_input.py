"""Adding the items of an iterable to a fast batch, with asyncio: the hot path of fast ingest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from jetspark.aio.batch_input import BatchInput
from jetspark.publish.outgoing import Item

__all__ = ["add_all"]


async def add_all(batch_input: BatchInput, iterator: Iterator[Item]) -> None:
    """Let the batch take items straight from the iterator while it has room; wait for room in between."""
    sender, transport, runner = batch_input.batch.sender, batch_input.transport, batch_input.runner
    held: list[Item] = []  # at most one item, taken when there was no room
    deadline: float | None = None
    while True:
        if sender.room == 0:
            held = held or list(islice(iterator, 1))
            if not held:
                return
            if await batch_input.open_or_wait(held[0]):
                held = []
        elif not sender.may_add_some:
            transport.flush()
            if not sender.may_add_some:
                if deadline is None:
                    deadline = transport.deadline(batch_input.batch.room_timeout_s)
                await runner.wait_for_room(deadline)
        elif sender.add_some(chain(held, iterator), transport.now()):
            held, deadline = [], None
            await runner.write()
        else:
            return
