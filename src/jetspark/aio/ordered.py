"""Ordered consumers with asyncio. :mod:`jetspark.jetstream.ordered` decides; this module adds waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Generic, TypeVar, cast

from jetspark.aio import clock
from jetspark.aio.context import DriverContext
from jetspark.aio.source import Source
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.core.arguments import flag
from jetspark.core.transport import new_name
from jetspark.errors import ConnectionClosed, JetSparkError
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.ordered import (
    CLEAN_UP_TIMEOUT_S,
    HEARTBEAT_S,
    OrderedFlow,
    OrderedOptions,
    OrderedPuller,
    OrderedReader,
    Patience,
    heartbeat_for,
    retry_pauses,
)
from jetspark.jetstream.pull import Wait

__all__ = ["OrderedConsumer", "Reading", "Watch"]

T = TypeVar("T")


class OrderedConsumer:
    """Reads a stream in order, without acknowledgements, through reconnects, restarts and leader changes.

    Messages that the stream still has are never skipped, repeated or reordered. A re-created stream of the same name is
    an error, not a continuation. Make one with :meth:`Stream.ordered_consumer`; each call of :meth:`messages` starts at
    the position given by the options.
    """

    def __init__(self, context: DriverContext, stream_name: str, options: OrderedOptions) -> None:
        self._context = context
        self.stream_name = stream_name
        self.options = options

    async def messages(self, *, stored_only: bool = False) -> AsyncIterator[JetStreamMessage]:
        """Yield the stored messages, then every new one as it arrives; ends only when the connection is closed.

        With ``stored_only`` the iteration ends after the messages that were stored at its start. It then also raises
        ``RequestTimeout`` when nothing arrived for as long as the context's ``timeout``.

        At most 16,384 messages and 16 MiB are received ahead of the reader, or ``max_pending_messages`` and
        ``max_pending_bytes`` of the connection if those are lower. A single larger message is still delivered.

        After the first consumer was created, an outage of the server is waited out without a time limit.

        Raises:
            StreamNotFound: The stream does not exist or was deleted; usually detected at once, and within 11 seconds.
            StreamRecreated: The stream was deleted and re-created.
            StreamWentBack: The stream lost messages that were read, as a restored or in-memory stream may.
            RequestTimeout: No answer within the context's ``timeout`` at the start.
        """
        listing = f"messages of stream {self.stream_name!r}" if flag("stored_only", stored_only) else ""
        reading = Reading(self._context, self.stream_name, self.options, listing=listing)
        try:
            while messages := await reading.some(until_idle=stored_only):
                messages.reverse()
                while messages:
                    yield messages.pop()  # keep no reference, so that messages are freed as soon as they are handled
        finally:
            await reading.close()


class Reading:
    """One pass over a stream, over as many consecutive consumers as needed.

    ``listing`` names a bounded read for error messages. A bounded read fails after the context's time-out without
    progress. An unbounded one waits without a limit, once its first consumer was created.
    """

    def __init__(self, context: DriverContext, stream_name: str, options: OrderedOptions, *, listing: str = "") -> None:
        self._context, self._client, self._stream_name = context, context.client, stream_name
        self._listing = listing
        self._reader = OrderedReader(options)
        self._source: Source | None = None
        self._flow: OrderedFlow[JetStreamMessage]
        self._consumer = ""
        self._ready: deque[JetStreamMessage] = deque()
        self._is_given_up = False
        self.initial_pending: int | None = None
        """Messages pending when the first consumer was created."""

    @property
    def is_caught_up(self) -> bool:
        """All messages that were stored at the start were read."""
        return self._reader.is_caught_up and not self._ready

    async def start(self) -> None:
        """Create the first consumer now, not at the first message."""
        if self._source is None:
            await self._restart(self._patience())

    async def next(self, *, until_idle: bool = False) -> JetStreamMessage | None:
        """The next message; None when the connection is closed, which is an error in a listing.

        With ``until_idle`` also None when the messages stored at the start were read, or the server has no more.
        """
        if not self._ready:
            self._ready.extend(await self.some(until_idle=until_idle))
        return self._ready.popleft() if self._ready else None

    async def some(self, *, until_idle: bool = False) -> list[JetStreamMessage]:
        """The next messages, at least one; empty where :meth:`next` returns None."""
        patience = self._patience()
        try:
            while not (until_idle and self._reader.is_caught_up):
                if self._source is None:
                    await self._restart(patience)
                    if not self._listing:
                        patience = self._patience()  # the first consumer exists: no time limit from now on
                    continue  # an empty stream has been read already
                if messages := await self._advance(patience):
                    return messages
        except ConnectionClosed:
            if self._listing:
                raise
        return []

    async def close(self) -> None:
        try:
            await self._drop()
        finally:  # repeated, because an interrupt can prevent the first call; otherwise the second does nothing
            await self._drop()

    def _patience(self) -> Patience:
        is_bounded = self._listing or not self._reader.has_begun
        what = self._listing or f"ordered consumer of stream {self._stream_name!r}"
        return Patience(what, self._context.timeout_s if is_bounded else None, clock.now())

    async def _advance(self, patience: Patience) -> list[JetStreamMessage]:
        """Perform the flow's next step; returns messages if the step hands some out."""
        source, flow = self._source, self._flow
        assert source is not None
        flow.deadline = patience.give_up_at
        step: Wait | int | None
        try:
            step = await source.perform(flow)
        except ConnectionClosed:
            if self._client.is_closed:
                raise
            step = None  # only the subscription has ended
        if isinstance(step, int):
            with self._context.transport.lock:
                return flow.take(step)
        if step is None:
            self._reader.lost()
            await self._drop()
        else:
            patience.renew(source.puller.heard_at)
            self._check(patience)
        return []

    async def _restart(self, patience: Patience) -> None:
        if pause_s := self._reader.pause_s():
            await clock.sleep(patience.left_s(clock.now(), pause_s))
        for pause_s in retry_pauses():
            try:
                info = await self._open(patience)
            except JetSparkError as error:
                if not self._reader.may_pass(error):
                    raise
                self._check(patience, error)
                await clock.sleep(patience.left_s(clock.now(), pause_s))
            else:
                self._begin(info)
                return

    async def _open(self, patience: Patience) -> ConsumerInfo:
        context = self._context
        operation = self._reader.open(context.api, self._stream_name, new_name(context.transport))
        return await context.run(operation, patience.left_s(clock.now(), context.timeout_s))

    def _begin(self, info: ConsumerInfo) -> None:
        if self.initial_pending is None:
            self.initial_pending = info.pending
        source = Source(self._context, info, partial(OrderedPuller, reader=self._reader))
        puller = cast("OrderedPuller[JetStreamMessage]", source.puller)
        heartbeat_s = heartbeat_for(self._context.timeout_s) if self._listing else HEARTBEAT_S
        max_payload_bytes = self._context.connection.info.max_payload_bytes
        self._flow = OrderedFlow(puller, self._reader, self._client.options, max_payload_bytes, heartbeat_s)
        self._source, self._consumer = source, info.name

    def _check(self, patience: Patience, error: JetSparkError | None = None) -> None:
        try:
            patience.check(clock.now(), error)
        except JetSparkError:
            self._is_given_up = True
            raise

    async def _drop(self) -> None:
        """Delete the present consumer; otherwise the server would keep it until it expires."""
        source = self._source
        if source is None or self._client.is_closed:
            return
        source.leave()
        self._source = None  # only now, so that an interrupted call is repeated
        if self._client.is_connected:
            try:
                operation = self._context.api.delete_consumer(self._stream_name, self._consumer)
                # A server that did not answer before is not waited for now.
                await self._context.run(operation, 0.0 if self._is_given_up else CLEAN_UP_TIMEOUT_S)
            except JetSparkError:
                pass  # gone already, or about to be


class Watch(Generic[T]):
    """The entries of a bucket, made from the messages of its stream in order."""

    def __init__(
        self,
        context: DriverContext,
        stream_name: str,
        entry_of: Callable[[JetStreamMessage], T],
        is_deletion: Callable[[T], bool],
    ) -> None:
        self._context, self._stream_name = context, stream_name
        self._entry_of, self._is_deletion = entry_of, is_deletion

    async def changes(
        self, options: OrderedOptions, *, initial_marker: bool, ignore_deletes: bool
    ) -> AsyncIterator[T | None]:
        """Yield the present entries, then None if ``initial_marker``, then every change until the connection closes."""
        flag("initial_marker", initial_marker)
        flag("ignore_deletes", ignore_deletes)
        reading = Reading(self._context, self._stream_name, options)
        is_initial = True
        try:
            await reading.start()
            while True:
                message = await reading.next(until_idle=is_initial)
                if message is not None:
                    entry = self._entry_of(message)
                    if not (ignore_deletes and self._is_deletion(entry)):
                        yield entry
                elif is_initial and reading.is_caught_up:
                    is_initial = False
                    if initial_marker:
                        yield None
                else:
                    return
        finally:
            await reading.close()

    async def present(self, options: OrderedOptions, listing: str) -> AsyncGenerator[T, None]:
        """Yield the present entries and end; ``listing`` names the read in errors."""
        reading = Reading(self._context, self._stream_name, options, listing=listing)
        try:
            while (message := await reading.next(until_idle=True)) is not None:
                yield self._entry_of(message)
        finally:
            await reading.close()
