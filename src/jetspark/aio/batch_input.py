"""Adding messages to a fast batch with asyncio: the first one opens the batch, the others wait for room."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jetspark.aio.runner import PacedRunner
from jetspark.aio.transport import Transport
from jetspark.publish.fast_batch import FastMachine
from jetspark.publish.outgoing import Item

__all__ = ["BatchInput"]


class BatchInput:
    """Adds messages to one batch. With threads, callers hold the transport's lock, except for :meth:`add_chunk`."""

    def __init__(
        self,
        transport: Transport,
        runner: PacedRunner[FastMachine],
        batch: FastMachine,
        check_inside: Callable[[], None],
    ) -> None:
        """``check_inside`` raises outside of the batch's ``with`` block."""
        self.transport, self.runner, self.batch = transport, runner, batch
        self._check_inside = check_inside
        self._has_opener = False
        """True while one caller's message opens the batch; other callers wait for the outcome."""

    async def add_chunk(self, chunk: list[Item]) -> None:
        """Add the items, waiting for room in between."""
        sender = self.batch.sender
        # In threads: with self.transport.lock:
        while chunk:
            room = sender.room
            if room == 0:
                if await self.open_or_wait(chunk[0]):
                    chunk = chunk[1:]
                continue
            part, chunk = chunk[:room], chunk[room:]
            await self.runner.send(partial(sender.add_many, part))

    async def open_or_wait(self, item: Item) -> bool:
        """Wait for room. Returns True when this message opened the batch, and so is added already."""
        batch = self.batch
        while batch.sender.room == 0:
            batch.check()
            if not batch.is_new:
                await self.runner.wait()
            elif await self.begin(item):
                return True
        return False

    async def begin(self, item: Item, *, is_only: bool = False) -> bool:
        """Open the batch with this message; False when another message has opened it first."""
        self._check_inside()
        batch, runner = self.batch, self.runner
        while self._has_opener:
            await runner.wait()
        has_begun = False
        self._has_opener = True
        try:
            while batch.is_new:  # repeated while the stream has no leader, because then nothing was stored
                if (reopen_at := batch.opening.reopen_at) is not None and reopen_at > self.transport.now():
                    await runner.wait(reopen_at)
                    continue
                runner.attach()
                await runner.send(partial(batch.start, item, is_only=is_only))
                has_begun = True
                while batch.is_opening:
                    await runner.wait()
        finally:
            self._has_opener = False
            runner.changed.notify_all()
        if has_begun and batch.failure is not None:
            batch.check()
        return has_begun

    async def until_open(self) -> None:
        """Wait until the server has opened or refused the batch.

        Raises:
            JetSparkError: The server refused it, or the batch has ended.
        """
        while self.batch.is_opening:
            await self.runner.wait()
        self.batch.check()
