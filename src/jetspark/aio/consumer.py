"""Consumers with asyncio."""

from __future__ import annotations

import datetime

from jetspark.aio.context import DriverContext
from jetspark.aio.pull import PullConsumer
from jetspark.aio.push import PushMessages
from jetspark.core.arguments import instance
from jetspark.errors import UsageError
from jetspark.jetstream.info import ConsumerInfo

__all__ = ["Consumer"]


class Consumer(PullConsumer):
    """One consumer. ``cached_info`` is the server's last answer about it; :meth:`info` asks again.

    A consumer that was opened with ``verify=False`` has no ``cached_info`` before the first :meth:`info`, and
    ``UsageError`` says so.

    As with :class:`JetStream`, calls to the server raise ``ServerError`` when it refuses, ``JetStreamUnavailable`` when
    JetStream is not available, and ``RequestTimeout`` when no answer came in time.
    """

    def __init__(self, context: DriverContext, info: ConsumerInfo, *, is_verified: bool = True) -> None:
        """Without ``is_verified``, ``info`` holds the defaults of a pull consumer."""
        self._context = context
        self._known, self._is_verified = info, is_verified

    @property
    def name(self) -> str:
        return self._known.name

    @property
    def stream_name(self) -> str:
        return self._known.stream_name

    @property
    def cached_info(self) -> ConsumerInfo:
        """The server's last answer about the consumer."""
        if not self._is_verified:
            raise UsageError(f"consumer {self.name!r} was opened with verify=False: call info() first")
        return self._known

    async def info(self) -> ConsumerInfo:
        """Configuration and position now."""
        return self._heard(await self._context.run(self._context.api.consumer_info(self.stream_name, self.name)))

    async def delete(self) -> None:
        await self._context.run(self._context.api.delete_consumer(self.stream_name, self.name))

    async def pause(self, until: datetime.datetime) -> None:
        """Stop deliveries until then. Returns when the consumer reports that it is paused."""
        await self._pause(instance("until", until, datetime.datetime))

    async def resume(self) -> None:
        """Resume deliveries. Returns when the consumer reports that it has resumed.

        The server serves waiting pulls with the next message or the next pull (nats-server 2.15.1). When the pause
        expires by itself, it serves them at once.
        """
        await self._pause(None)

    async def _pause(self, until: datetime.datetime | None) -> None:
        operation = self._context.api.pause_consumer(self.stream_name, self.name, until, self._context.timeout_s)
        await self._context.run(operation)

    async def reset(self, sequence: int | None = None) -> ConsumerInfo:
        """Start again from ``sequence``, or after the last message acknowledged in order (needs nats-server 2.14)."""
        operation = self._context.api.reset_consumer(self.stream_name, self.name, sequence)
        return self._heard(await self._context.run(operation))

    def _heard(self, info: ConsumerInfo) -> ConsumerInfo:
        self._known, self._is_verified = info, True
        return info

    async def unpin(self, group: str) -> None:
        """Let another client of a ``pinned_client`` group take over."""
        await self._context.run(self._context.api.unpin_consumer(self.stream_name, self.name, group))

    async def step_down(self) -> None:
        """Have the consumer's leader hand over to another replica."""
        await self._context.run(self._context.api.step_down_consumer(self.stream_name, self.name))

    def pushed_messages(self) -> PushMessages:
        """The messages of a push consumer (with a ``deliver_subject``); :meth:`messages` is for pull consumers."""
        if not self.cached_info.config.deliver_subject:
            raise UsageError(f"consumer {self.name!r} has no deliver_subject: use messages() or fetch()")
        return PushMessages(self._context, self.cached_info)

    def __repr__(self) -> str:
        return f"<Consumer {self.stream_name}/{self.name}>"
