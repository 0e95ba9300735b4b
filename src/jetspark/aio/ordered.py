"""Ordered consumers with asyncio. What to do about each message is decided in :mod:`jetspark.jetstream.ordered`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

from jetspark.aio.jsmessage import JetStreamMessage
from jetspark.aio.subscription import Subscription
from jetspark.core.events import ConnectionEvent, Reconnected
from jetspark.errors import ConnectionClosed, JetSparkError, RequestTimeout
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.ordered import (
    CLEAN_UP_TIMEOUT_S,
    SILENCE_S,
    OrderedOptions,
    OrderedReader,
    Verdict,
    retry_pauses,
    will_pass,
)

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream

__all__ = ["OrderedConsumer"]


class OrderedConsumer:
    """Reads a stream in order, without acknowledgements, through reconnects, restarts and leader changes.

    Never skips, repeats or reorders what the stream still has. Make one with :meth:`Stream.ordered_consumer`; each call
    of :meth:`messages` begins where the options say.
    """

    def __init__(self, js: JetStream, stream_name: str, options: OrderedOptions) -> None:
        self._js = js
        self.stream_name = stream_name
        self.options = options

    async def messages(self) -> AsyncIterator[JetStreamMessage]:
        """Every message, then every new one as it comes; ends only when the connection is closed.

        Raises:
            StreamNotFound: There is no such stream, or no more.
        """
        reading = Reading(self._js, self.stream_name, self.options)
        try:
            while (message := await reading.next()) is not None:
                yield message
        finally:
            await reading.close()


class Reading:
    """One pass over a stream: the present consumer, and the next one when that is lost."""

    def __init__(self, js: JetStream, stream_name: str, options: OrderedOptions) -> None:
        self._js, self._client, self._stream_name = js, js._client, stream_name
        self._reader = OrderedReader(options)
        self._subscription: Subscription | None = None
        self._consumer = ""
        self.initial_pending: int | None = None
        """How many messages were waiting when the first consumer was made."""
        self._client._listeners.append(self._on_event)

    async def start(self) -> None:
        """Make the first consumer now, not at the first message."""
        if self._subscription is None:
            await self._restart()

    async def next(self, *, until_idle: bool = False) -> JetStreamMessage | None:
        """The next message; None when the connection is closed.

        With ``until_idle`` also None when the server says that it has nothing: what was counted as waiting may be gone.
        """
        try:
            while True:
                if self._subscription is None:
                    await self._restart()
                assert self._subscription is not None
                if self._subscription.dropped and not self._subscription.pending_messages:
                    await self._drop()  # we were too slow; the next heartbeat would tell, but we know already
                    continue
                try:
                    message = cast(JetStreamMessage, await self._subscription.next(SILENCE_S))
                except (RequestTimeout, ConnectionClosed):
                    if self._client.is_closed:
                        return None
                    await self._drop()
                    continue
                match self._reader.accept(message):
                    case Verdict.DELIVER:
                        return message
                    case Verdict.RESPOND:
                        await self._client.publish(self._reader.respond_to)
                    case Verdict.RESTART:
                        await self._drop()
                    case Verdict.IGNORE:
                        if until_idle:
                            return None
        except ConnectionClosed:
            return None

    async def close(self) -> None:
        if self._on_event in self._client._listeners:
            self._client._listeners.remove(self._on_event)
        await self._drop()

    async def _restart(self) -> None:
        for pause_s in retry_pauses():
            inbox = self._client._new_inbox()
            subscription = self._client._subscribe(inbox)
            subscription._state.message_class = JetStreamMessage
            try:
                info = await self._create(inbox)
            except BaseException as error:
                await subscription.unsubscribe()
                if not (isinstance(error, JetSparkError) and will_pass(error)):
                    raise
                await asyncio.sleep(pause_s)
            else:
                self._subscription, self._consumer = subscription, info.name
                self._reader.created(info.delivered)
                if self.initial_pending is None:
                    self.initial_pending = info.pending + info.delivered.consumer_sequence
                return

    async def _create(self, inbox: str) -> ConsumerInfo:
        js = self._js
        config = self._reader.config(inbox)
        return await js._run(js._api.create_consumer(self._stream_name, config, *js._server()))

    async def _drop(self) -> None:
        """Give the present consumer up; the server would forget it by itself, only later."""
        subscription, self._subscription = self._subscription, None
        if subscription is None or self._client.is_closed:
            return
        await subscription.unsubscribe()
        if self._client.is_connected:
            try:
                operation = self._js._api.delete_consumer(self._stream_name, self._consumer)
                await self._js._run(operation, CLEAN_UP_TIMEOUT_S)
            except JetSparkError:
                pass  # gone already, or about to be

    def _on_event(self, event: ConnectionEvent) -> None:
        # What was sent meanwhile is lost, and the consumer may be: do not wait for its silence.
        if isinstance(event, Reconnected) and self._subscription is not None:
            self._client._unsubscribe(self._subscription._state, 0)
