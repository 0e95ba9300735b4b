"""Writing the chunks of an object to its store, with asyncio."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

from jetspark.aio import clock
from jetspark.aio.ack_future import NOT_SENT, errors_of, wait_for
from jetspark.aio.context import DriverContext
from jetspark.aio.fast import FastPublisher
from jetspark.aio.publisher import AckFuture
from jetspark.errors import JetSparkError, JetStreamUnavailable, PermissionDenied, ServerError
from jetspark.jetstream.features import FAST_INGEST
from jetspark.jetstream.objects import FLUSH_EVERY_S, WINDOW_BYTES, Progress
from jetspark.jetstream.operations import Operation
from jetspark.publish.fast_options import FastPublisherOptions

__all__ = ["ChunkWriter", "FastChunkWriter"]

_logger = logging.getLogger("jetspark.aio")


class ChunkWriter:
    """Publishes the chunks of one put; at most ``WINDOW_BYTES`` await their acknowledgement."""

    def __init__(self, context: DriverContext, subject: str, progress: Progress) -> None:
        self._context, self._subject, self._progress = context, subject, progress
        self._waiting: deque[tuple[AckFuture, int]] = deque()
        self._waiting_bytes = 0
        self._is_anything_stored = False
        self._is_in_hand = False
        """Stays true when publishing is interrupted: a chunk may be in transit whose future is lost."""

    async def send(self, chunk: bytes) -> None:
        while self._waiting and self._waiting_bytes + len(chunk) > WINDOW_BYTES:
            await self._take_one()
        self._is_in_hand = True
        try:
            with self._progress.awaited():  # publishing waits while the network accepts nothing
                future = await self._context.publisher.publish(self._subject, chunk, None, self._progress.timeout_s)
            self._waiting.append((future, len(chunk)))
        except NOT_SENT:
            self._is_in_hand = False
            raise
        self._is_in_hand = False
        self._waiting_bytes += len(chunk)

    async def complete(self) -> None:
        while self._waiting:
            await self._take_one()

    async def wait_for_outcome(self, timeout: float) -> bool:
        """After a failure, wait until no chunk is in transit; True if a chunk may be stored."""
        deadline = clock.now() + timeout
        for error in await errors_of([future for future, _ in self._waiting], timeout):
            self._is_anything_stored |= not isinstance(error, ServerError | JetStreamUnavailable | PermissionDenied)
        if self._is_in_hand:
            self._is_anything_stored = True
            with suppress(JetSparkError):
                await self._context.publisher.complete(max(deadline - clock.now(), 0.0))
        return self._is_anything_stored

    async def _take_one(self) -> None:
        future, size_bytes = self._waiting[0]
        with self._progress.awaited():
            await wait_for(future, self._progress.timeout_s, f"chunk on {self._subject!r}")
        self._is_anything_stored = True
        self._waiting.popleft()
        self._waiting_bytes -= size_bytes


class FastChunkWriter:
    """Publishes the chunks of one put by fast ingest, through restarts and changes of leader.

    A single chunk is published normally: a fast batch would take one more round trip.
    """

    def __init__(
        self,
        context: DriverContext,
        subject: str,
        progress: Progress,
        options: FastPublisherOptions,
        check: Operation[None],
    ) -> None:
        self._context, self._subject, self._progress = context, subject, progress
        self._options, self._check = options, check
        self._first: bytes | None = None
        self._single: ChunkWriter | None = None
        self._publisher: FastPublisher | None = None
        self._flushed_at = 0.0

    async def send(self, chunk: bytes) -> None:
        if self._publisher is None:
            if self._first is None:
                self._first = chunk
                return
            FAST_INGEST.check(self._context.api.known())
            self._publisher = FastPublisher(self._context, self._options)._enter()
            self._flushed_at = clock.now()
            first, self._first = self._first, None
            with self._progress.awaited():
                await self._publisher.publish(self._subject, first)
        with self._progress.awaited():
            await self._publisher.publish(self._subject, chunk)
        if (now := clock.now()) >= self._flushed_at + FLUSH_EVERY_S:
            self._flushed_at = now
            with self._progress.awaited():
                await self._publisher.flush()

    async def complete(self) -> None:
        if self._publisher is not None:
            with self._progress.awaited():
                # First flush, which may take long: when cancelled, the publisher can still be closed and waited for.
                await self._publisher.flush()
                await self._publisher.close()
                if self._publisher.batches > 1:
                    await self._context.run(self._check, self._progress.timeout_s)
        elif self._first is not None:
            self._single = ChunkWriter(self._context, self._subject, self._progress)
            await self._single.send(self._first)
            await self._single.complete()

    async def wait_for_outcome(self, timeout: float) -> bool:
        """After a failure, wait until no chunk is in transit; True if a chunk may be stored."""
        if self._single is not None:
            return await self._single.wait_for_outcome(timeout)
        if self._publisher is None:
            return False
        try:
            # The server acknowledges the end of the batch after all its messages.
            await self._publisher.close(timeout)
        except (ServerError, JetStreamUnavailable, PermissionDenied):
            return self._publisher.published() > 0
        except JetSparkError as error:
            _logger.debug("chunks of a failed put may still arrive: %s", error)
        return True
