"""Fast ingest with asyncio. ``fast`` and ``fast_publisher`` of :mod:`jetspark.publish` decide; this adds waiting."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from functools import partial
from typing import Self

from jetspark.aio.batch_input import BatchInput
from jetspark.aio.context import DriverContext
from jetspark.aio.iterable_input import add_all
from jetspark.aio.runner import PacedRunner
from jetspark.aio.transport import Transport
from jetspark.core.arguments import flag
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import check_timeout
from jetspark.core.transport import WRITE_AT_BYTES
from jetspark.errors import BufferFull, JetSparkError, RequestTimeout, UsageError
from jetspark.jetstream.features import FAST_INGEST
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.publishing import Expect, publish_headers
from jetspark.publish.block import Block
from jetspark.publish.fast_base import FastBatchBase, FastPublisherBase
from jetspark.publish.fast_batch import FastMachine
from jetspark.publish.fast_options import FastBatchOptions, FastPublisherOptions, FastReceipt
from jetspark.publish.fast_publisher import FastPublisherMachine
from jetspark.publish.outgoing import (
    CHUNK_BYTES,
    CHUNK_MESSAGES,
    Item,
    all_but_last,
    each_of,
    last_message,
    some_of,
    take,
)

__all__ = ["FastBatch", "FastPublisher"]


# Builds a named tuple in half the time of its constructor: every message gets a receipt.
_new = tuple.__new__


class _FastBlock(Block):
    """Common base of a batch and a publisher: a ``with`` block around a machine that a runner drives."""

    _logger = logging.getLogger("jetspark.aio")

    def __init__(self, context: DriverContext) -> None:
        self._context, self._transport = context, context.transport
        self._connection, self._now = self._transport.connection, self._transport.now

    async def __aenter__(self) -> Self:
        # Asked once per server: one without fast ingest would store the first message as a plain one.
        await self._context.run(self._context.api.require(FAST_INGEST))
        return self._enter()


class FastBatch(_FastBlock, FastBatchBase):
    """One batch of any length, paced by the server. Make one with ``js.fast_batch()``.

    With ``gap="fail"``, the stored messages are the first ones of the batch, in order and without a hole. A lost or
    refused message ends the batch, and :class:`~jetspark.BatchCutShort` has the number of stored messages. With
    ``gap="ok"``, the batch continues. After the commit each message is either in ``gaps`` (lost), in ``errors``
    (refused), in ``doubts`` (unknown) or stored. ``doubts`` is empty unless the connection was lost during the batch.
    :class:`~jetspark.BatchInDoubt` means that the server stopped answering or forgot the batch; it has the number of
    messages known to be stored.

    Leaving the block normally commits. Leaving it by an exception ends the batch, and the added messages stay stored;
    use ``js.atomic_batch()`` for all or nothing. Several tasks may add; a message gets its position in the batch when
    it is accepted. The data are copied at once.
    """

    _transport: Transport
    _line = "async with js.fast_batch() as fast:"

    def __init__(self, context: DriverContext, options: FastBatchOptions) -> None:
        super().__init__(context)
        self._runner: PacedRunner[FastMachine] = PacedRunner(self._transport, self._on_step, self._report_news)
        self._batch = self._runner.run(FastMachine(self._connection, self._runner, options))
        self._sender = self._batch.sender  # an attribute of its own, because :meth:`add` reads it for every message
        self._input = BatchInput(self._transport, self._runner, self._batch, self._check_inside)

    async def add(
        self,
        subject: str,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
    ) -> FastReceipt:
        """Send a message at the server's pace; waits while too many earlier ones are still to be sent.

        Raises:
            BatchCutShort, BatchInDoubt: The batch has ended.
            PermissionDenied: The batch has ended, because the server denied a message with this subject.
            ServerError: The server refused the batch: nothing is stored.
            JetStreamUnavailable: No stream stores the subject of the first message: nothing is stored.
            UsageError: Outside of its block; nothing is sent.
            InvalidSubject, InvalidHeader, PayloadTooLarge, ConfigError: The message cannot be sent; the batch
                continues.
        """
        batch, sender, transport = self._batch, self._sender, self._transport
        item: Item = (subject, data)
        if headers is not None or msg_id is not None or expect is not None or ttl is not None:
            item = (subject, data, publish_headers(headers, msg_id, expect, ttl))
        # In threads: with transport.lock:
        if sender.sequence >= sender.limit and await self._input.open_or_wait(item):
            return FastReceipt(1, batch.acknowledged)
        try:
            sender.add(item, self._now())
        except BufferFull:
            await self._runner.send(partial(sender.add, item))
        except BaseException as error:
            self._runner.on_interrupt(error)
            raise
        sequence = sender.sequence
        if self._connection.out_bytes >= WRITE_AT_BYTES or sequence == sender.wanted:
            await self._runner.write_and_wait()
        elif not transport.flush_is_scheduled:
            transport.flush_soon()
        return _new(FastReceipt, (sequence, batch.acknowledged))

    async def add_many(self, items: Iterable[Item] | AsyncIterable[Item], *, commit: bool = False) -> FastReceipt:
        """Send many messages, each ``(subject, data)`` or ``(subject, data, headers)``; the fastest way to publish.

        Memory does not grow with their number. With ``commit`` the last message ends the batch, the form that survives
        a change of leader best. When this raises, ``sequence`` tells how many were added.
        """
        flag("commit", commit)
        if isinstance(items, AsyncIterable):  # asyncio only
            held: list[Item] = []
            async for item in items:
                chunk, held = (held, [item]) if commit else ([item], [])
                await self._input.add_chunk(chunk)
            return await self._commit_held(held)
        iterator = each_of(items)
        if commit:
            return await self._add_and_commit(iterator)
        await add_all(self._input, iterator)
        return FastReceipt(self.sequence, self.acknowledged)

    async def _add_and_commit(self, iterator: Iterator[Item]) -> FastReceipt:
        held: list[Item] = []
        for chunk in all_but_last(iterator, held, lambda: self._sender.room):
            await self._input.add_chunk(chunk)
        if not held and self.sequence:
            await self.commit()
        return await self._commit_held(held)

    async def _commit_held(self, held: list[Item]) -> FastReceipt:
        if held:
            await self._commit(held[0])
        return FastReceipt(self.sequence, self.acknowledged)

    async def ping(self) -> None:
        """Request an acknowledgement now. The batch requests them by itself where it needs them."""
        # In threads: with self._transport.lock:
        self._batch.check()
        self._batch.ping(self._now())
        self._transport.flush_soon()

    async def commit(
        self,
        subject: str | None = None,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
    ) -> PubAck:
        """End the batch, with a last message or without, and return the final acknowledgement.

        Raises:
            BatchCutShort, BatchInDoubt: Some messages are not stored, or it is unknown whether they are.
            PermissionDenied: The server denied a message with this subject; ``stored`` has the count of the others.
        """
        item = last_message(subject, data, publish_headers(headers, msg_id, expect, ttl))
        return await self._commit(item)

    async def _commit(self, item: Item | None) -> PubAck:
        batch = self._batch
        with self._transport.lock:
            batch.check()
            if item is not None:
                if not (batch.is_new and await self._input.begin(item, is_only=True)):
                    await self._input.until_open()
                    await self._runner.send(partial(batch.commit, item))
            elif self._sender.sequence:
                await self._input.until_open()
                await self._runner.send(batch.end)
            else:
                raise UsageError("nothing was added: there is nothing to commit")
            while not batch.is_ended:
                await self._runner.wait()
        self._report_news()
        if batch.failure is not None:
            batch.check()
        assert batch.ack is not None
        return batch.ack

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        batch = self._batch
        try:
            if kind is not None:
                self._abandon()
            elif batch.failure is not None:
                batch.check()
            elif self._sender.sequence and not batch.is_ended:
                await self.commit()
        except BaseException:
            if not batch.is_ended:  # cancelled: no later call will end it
                self._abandon()
            raise
        finally:
            self._leave_block()


class FastPublisher(_FastBlock, FastPublisherBase):
    """Stores an endless stream of messages, in order, over as many fast batches as needed.

    Make one with ``js.fast_publisher()``. An accepted message is kept until it is known to be stored, and sent again
    after a lost message, a change of leader, a reconnect or a restart of the server. With ``message_ids=True`` it is
    stored exactly once (within the stream's duplicate window). Without, the last messages before a restart or a long
    outage may be stored twice; ``possibly_doubled`` counts them, and a warning is logged.

    Leaving the block normally or by an ``Exception`` waits until all accepted messages are stored. Leaving it
    by a cancellation or another ``BaseException`` does not wait: no more messages are sent, and ``unpublished()``
    returns the messages not known to be stored.
    """

    _transport: Transport
    _line = "async with js.fast_publisher() as publisher:"

    def __init__(self, context: DriverContext, options: FastPublisherOptions) -> None:
        super().__init__(context)
        self._runner: PacedRunner[FastPublisherMachine] = PacedRunner(self._transport, self._pump, self._report_news)
        self._publisher = self._runner.run(
            FastPublisherMachine(self._connection, self._runner, options, now=self._now())
        )

    async def publish(
        self,
        subject: str,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
    ) -> int:
        """Accept a message and return its position; waits while too many messages are pending.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: The message was not accepted.
            UsageError: Outside of its block, or after ``close``; the message was not accepted.
            JetStreamUnavailable: No stream stores the subject of the first message: nothing is stored.
            PermissionDenied: The publisher gave up, because the server denied a message with this subject.
            JetSparkError: The publisher gave up, and did not accept the message; ``unpublished()`` returns the accepted
                messages that are not known to be stored.
        """
        checked = publish_headers(headers, msg_id, expect, ttl)
        item: Item = (subject, data) if checked is None else (subject, data, checked)
        # In threads: with self._transport.lock:
        await self._until_there_is_room()
        return await self._accept([item])

    async def _accept(self, items: list[Item], *, are_checked: bool = False) -> int:
        """Accept items for which there is room."""
        try:
            self._publisher.accept(items, self._now(), are_checked=are_checked)
        finally:
            self._pump()
        position = self._publisher.stages.accepted
        if self._connection.out_bytes >= WRITE_AT_BYTES:
            await self._runner.write_and_wait()
        return position

    async def publish_many(self, items: Iterable[Item] | AsyncIterable[Item]) -> int:
        """Accept many messages, each ``(subject, data)`` or ``(subject, data, headers)``; returns the last position.

        When this raises because a message cannot be sent, the messages before it are accepted, and ``accepted`` counts
        them; the iterable may have been read up to 500 messages further.

        Raises:
            BatchInDoubt: The publisher gave up after ``patience_s`` without an answer; see ``unpublished()``.
            InvalidSubject, InvalidHeader, PayloadTooLarge, UsageError, JetSparkError: As :meth:`publish`.
        """
        if isinstance(items, AsyncIterable):  # asyncio only
            async for item in items:
                await self._until_there_is_room()
                await self._accept([item])
            return self.accepted
        iterator = each_of(items)
        while True:
            with self._transport.lock:
                await self._until_there_is_room()
                count = min(self._publisher.room, CHUNK_MESSAGES)
            chunk: list[Item] = []
            try:
                # With threads, outside of the lock: the caller's iterator may use the connection.
                take(iterator, chunk, count, min(CHUNK_BYTES, self._publisher.room_bytes))
            finally:
                with self._transport.lock:
                    self._publisher.accept(chunk, self._now())
                    self._pump()
            if not chunk:
                return self.accepted
            with self._transport.lock:
                if self._connection.out_bytes >= WRITE_AT_BYTES:
                    await self._runner.write_and_wait()

    async def _publish_checked(self, items: list[Item]) -> int:
        """:meth:`publish_many` without the checks, for messages that were checked before."""
        machine, at = self._publisher, 0
        while at < len(items):
            # In threads: with self._transport.lock:
            await self._until_there_is_room()
            chunk = some_of(items, at, min(machine.room, CHUNK_MESSAGES), min(CHUNK_BYTES, machine.room_bytes))
            at += len(chunk)
            await self._accept(chunk, are_checked=True)
        return self.accepted

    async def _until_there_is_room(self) -> None:
        machine = self._publisher
        machine.check()
        if self._phase != "inside":
            self._check_inside()
        while machine.room == 0:
            await self._runner.wait()
            machine.check()

    async def flush(self, timeout: float | None = None) -> None:
        """Return when all messages accepted so far are stored.

        This ends the present batch, because only the final acknowledgement proves that. So flush now and then, not
        after each message.

        Raises:
            RequestTimeout: It took longer than ``timeout`` seconds; no message is lost, and publishing continues.
            JetSparkError: The publisher gave up.
        """
        check_timeout(timeout)
        # In threads: with self._transport.lock:
        position = self._publisher.flush_requests.flush()
        await self._until(lambda: self._publisher.stages.published >= position, timeout)

    async def wait_published(self, position: int, timeout: float | None = None, *, linger_s: float = 0.0) -> None:
        """Return when all messages up to a position are stored; :meth:`publish` and :meth:`publish_many` return one.

        While :meth:`flush` ends the present batch at once, this ends it only after ``linger_s`` seconds without a
        publish. Until then the batch stays open, and the acknowledgements of later messages prove the position.

        Raises:
            RequestTimeout: It took longer than ``timeout`` seconds; no message is lost, and publishing continues.
            JetSparkError: The publisher gave up.
        """
        check_timeout(timeout)
        machine = self._publisher
        # In threads: with self._transport.lock:
        machine.flush_requests.request(position, self._now(), linger_s)
        await self._until(lambda: machine.stages.published >= position, timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Wait until all messages are stored, end the batch, and refuse further ones. After an error, only refuse.

        Raises:
            RequestTimeout: Some messages are not known to be stored within ``timeout`` seconds; ``unpublished()``
                returns them.
            JetSparkError: The publisher gave up; ``unpublished()`` returns the remaining messages.
        """
        check_timeout(timeout)
        machine = self._publisher
        with self._transport.lock:
            machine.close()
            try:
                await self._until(lambda: machine.is_idle, timeout)
            finally:
                self._leave()
        self._report_news()

    async def _until(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else self._now() + timeout
        self._pump()
        while not is_done():
            if self._publisher.failure is not None:
                raise self._publisher.failure.with_traceback(None)
            if deadline is not None and self._now() >= deadline:
                raise RequestTimeout(f"{self._publisher.stages.pending} messages to be stored", timeout or 0)
            await self._runner.wait(deadline)

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                if not self._publisher.is_left:  # otherwise an earlier close reported the outcome
                    await self.close()
            elif issubclass(kind, Exception):
                await self.close()  # accepted messages are stored even if the block failed later
        except JetSparkError as failure:
            if kind is None:
                raise
            self._logger.warning("%s; %d messages are not stored", failure, self._publisher.stages.pending)
        finally:
            try:
                self._leave()
            finally:  # An interrupt can be in the way of one of them; after the first, the second has nothing to do.
                self._leave()
