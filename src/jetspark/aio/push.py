"""Push consumers with asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from jetspark.aio.context import DriverContext
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.aio.subscription import Subscription
from jetspark.errors import ConnectionClosed, JetSparkError, RequestTimeout
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.push import answer_to, check_alive, check_s, check_status, silence_s

__all__ = ["PushMessages"]


class PushMessages:
    """The messages of a push consumer, without end: an asynchronous iterator and a context manager.

    The server decides the pace. With ``flow_control`` it waits for slow readers. Without it, messages beyond the
    subscription's bounds are dropped, and redelivered after ``ack_wait_s``. Members of a ``deliver_group`` share the
    messages. Leaving the context manager unsubscribes and returns unread messages to the server.
    """

    def __init__(self, context: DriverContext, info: ConsumerInfo) -> None:
        self._context, self._info = context, info
        self._subscription: Subscription | None = None

    def __aiter__(self) -> AsyncIterator[JetStreamMessage]:
        return self._iterate()

    async def __aenter__(self) -> PushMessages:
        self._subscribe()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and return the messages that were received and not yielded to the server."""
        subscription, self._subscription = self._subscription, None
        if subscription is None or self._context.client.is_closed:
            return
        await subscription.unsubscribe()
        if self._info.config.ack_policy == "none":
            return
        try:
            while subscription.pending_messages:
                message = cast(JetStreamMessage, await subscription.next(0))
                if message.status is None:
                    await message.nak()
        except JetSparkError:
            pass  # the connection is gone: the messages are redelivered after their ack_wait

    def _subscribe(self) -> Subscription:
        if self._subscription is None:
            config = self._info.config
            assert config.deliver_subject is not None
            group = config.deliver_group or ""
            self._subscription = self._context.subscribe(config.deliver_subject, group, message_class=JetStreamMessage)
        return self._subscription

    async def _iterate(self) -> AsyncIterator[JetStreamMessage]:
        silence = silence_s(self._info)
        try:
            subscription = self._subscribe()
            while True:
                try:
                    message = cast(JetStreamMessage, await subscription.next(silence))
                except RequestTimeout:
                    context = self._context
                    await context.run(check_alive(context.api, self._info), check_s(silence, context.timeout_s))
                    continue
                except ConnectionClosed:
                    return
                status = message.status if message.raw_headers is not None else None
                if status is None:
                    yield message
                elif status.code != 100:
                    check_status(self._info, status.code, status.description)
                elif (subject := answer_to(message)) is not None:
                    await self._context.client.publish(subject)
        finally:
            await self.close()
