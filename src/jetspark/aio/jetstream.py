"""JetStream with asyncio: streams, buckets and publishing. :mod:`jetspark.jetstream.operations` has the requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Unpack, cast

from jetspark.aio import clock
from jetspark.aio.atomic import AtomicBatch
from jetspark.aio.completion import begun
from jetspark.aio.context import DriverContext
from jetspark.aio.fast import FastBatch, FastPublisher
from jetspark.aio.kv import KeyValue
from jetspark.aio.message import Message
from jetspark.aio.objects import ObjectStore
from jetspark.aio.publisher import AckFuture
from jetspark.aio.stream import Stream
from jetspark.aio.subscription import Subscription
from jetspark.core.arguments import flag
from jetspark.core.headers import HeadersLike
from jetspark.jetstream.advisories import BatchAbandoned, abandoned_subject
from jetspark.jetstream.checks import check_name
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.features import FAST_INGEST, MESSAGE_TTL
from jetspark.jetstream.info import AccountInfo, PubAck, StreamInfo, StreamState
from jetspark.jetstream.kv import KVConfig, check_bucket, create_bucket, create_or_update_bucket
from jetspark.jetstream.objects import ObjectStoreConfig, stream_of
from jetspark.jetstream.objects import create_bucket as create_object_bucket
from jetspark.jetstream.publishing import Expect, publish, publish_headers, publish_with_ttl
from jetspark.publish.fast_options import (
    FastBatchKeywords,
    FastBatchOptions,
    FastPublisherKeywords,
    FastPublisherOptions,
    GapMode,
)

__all__ = ["JetStream"]


class JetStream:
    """A client's access to JetStream. Make one with ``nc.jetstream()``; it is cheap to create.

    Calls to the server raise :class:`~jetspark.ServerError` when it refuses, :class:`~jetspark.JetStreamUnavailable`
    when JetStream is not available, and :class:`~jetspark.RequestTimeout` when no answer came in time.
    """

    def __init__(self, context: DriverContext) -> None:
        self._context = context

    async def account_info(self) -> AccountInfo:
        """Usage and limits of this account."""
        return await self._context.run(self._context.api.account_info())

    # ---- streams -----------------------------------------------------------------------------------------------

    async def create_stream(self, config: StreamConfig | str) -> Stream:
        """Create a stream. An existing stream with the same configuration is returned unchanged.

        A plain name creates a stream that stores the subject of that name.

        Raises:
            StreamNameInUse: A stream of that name exists with another configuration.
            FeatureUnavailable: The server is too old for a field of ``config``.
        """
        return Stream(self._context, await self._context.run(self._context.api.create_stream(config)))

    async def update_stream(self, config: StreamConfig) -> Stream:
        """Change the fields that ``config`` sets; all others keep their values.

        Raises:
            StreamNotFound: The stream does not exist.
        """
        return Stream(self._context, await self._context.run(self._context.api.update_stream(config)))

    async def create_or_update_stream(self, config: StreamConfig | str) -> Stream:
        """Create the stream, or change the fields that ``config`` sets."""
        return Stream(self._context, await self._context.run(self._context.api.create_or_update_stream(config)))

    async def get_or_create_stream(self, config: StreamConfig | str) -> Stream:
        """Return the existing stream of that name, whatever its configuration; create it if it does not exist."""
        return Stream(self._context, await self._context.run(self._context.api.get_or_create_stream(config)))

    async def stream(self, name: str, *, verify: bool = True) -> Stream:
        """Return an existing stream. ``verify=False`` makes no request, so the user needs no right to stream info.

        Raises:
            StreamNotFound: The stream does not exist. Without ``verify``, its first use raises an error.
        """
        if not flag("verify", verify):
            return self._taken_to_be(StreamConfig(name=check_name("name", name), allow_direct=True))
        return Stream(self._context, await self._context.run(self._context.api.stream_info(name)))

    def _taken_to_be(self, config: StreamConfig) -> Stream:
        return Stream(self._context, StreamInfo(config=config, state=StreamState()), is_verified=False)

    async def delete_stream(self, name: str) -> None:
        """Delete a stream with all its messages and consumers."""
        await self._context.run(self._context.api.delete_stream(name))

    def streams(self, subject: str | None = None) -> AsyncIterator[StreamInfo]:
        """List all streams, or only the ones that store messages on ``subject``.

        Raises:
            RequestTimeout: A page did not come within the context's ``timeout``; the whole listing may take longer.
        """
        return self._context.pages(lambda offset: self._context.api.stream_page(offset, subject))

    def stream_names(self, subject: str | None = None) -> AsyncIterator[str]:
        """Like :meth:`streams`, but only the names."""
        return self._context.pages(lambda offset: self._context.api.stream_name_page(offset, subject))

    # ---- key-value buckets -------------------------------------------------------------------------------------

    async def create_kv(self, config: KVConfig | str) -> KeyValue:
        """Create a bucket. An existing bucket with the same configuration is returned unchanged.

        A plain name creates a bucket with the default configuration.

        Raises:
            StreamNameInUse: A bucket of that name exists with another configuration.
        """
        creating = create_bucket(self._context.api, KVConfig.of(config))
        return KeyValue(self._context, Stream(self._context, await self._context.run(creating)))

    async def create_or_update_kv(self, config: KVConfig | str) -> KeyValue:
        """Create the bucket, or change the fields that ``config`` sets."""
        making = create_or_update_bucket(self._context.api, KVConfig.of(config))
        return KeyValue(self._context, Stream(self._context, await self._context.run(making)))

    async def kv(self, bucket: str, *, verify: bool = True) -> KeyValue:
        """Return an existing bucket.

        ``verify=False`` makes no request, so the user needs no right to stream info. The bucket is then assumed to
        allow direct gets and not to be a mirror, as :meth:`create_kv` makes it.

        Raises:
            StreamNotFound: The bucket does not exist. Without ``verify``, its first use raises an error.
        """
        if not flag("verify", verify):
            usual = StreamConfig(name=f"KV_{check_bucket(bucket)}", allow_direct=True, allow_atomic=True)
            return KeyValue(self._context, self._taken_to_be(usual))
        return KeyValue(self._context, await self.stream(f"KV_{check_bucket(bucket)}"))

    async def delete_kv(self, bucket: str) -> None:
        """Delete a bucket with all its keys."""
        await self.delete_stream(f"KV_{check_bucket(bucket)}")

    async def kv_names(self) -> AsyncIterator[str]:
        """List the names of all key-value buckets."""
        async for name in self.stream_names("$KV.*.>"):
            if name.startswith("KV_"):
                yield name.removeprefix("KV_")

    # ---- object stores -----------------------------------------------------------------------------------------

    async def create_object_store(self, config: ObjectStoreConfig | str) -> ObjectStore:
        """Create a bucket for objects. An existing bucket with the same configuration is returned unchanged.

        Raises:
            StreamNameInUse: A bucket of that name exists with another configuration.
        """
        creating = create_object_bucket(self._context.api, ObjectStoreConfig.of(config))
        return ObjectStore(self._context, Stream(self._context, await self._context.run(creating)))

    async def object_store(self, bucket: str, *, verify: bool = True) -> ObjectStore:
        """Return an existing bucket for objects.

        ``verify=False`` makes no request, so the user needs no right to stream info. The bucket is then assumed to
        allow direct gets, and chunks are sent without fast ingest.

        Raises:
            StreamNotFound: The bucket does not exist. Without ``verify``, its first use raises an error.
        """
        if not flag("verify", verify):
            # The bucket may be replicated: a read from a replica that lags is repeated after a pause.
            usual = StreamConfig(name=stream_of(bucket), allow_direct=True, replicas=3)
            return ObjectStore(self._context, self._taken_to_be(usual))
        return ObjectStore(self._context, await self.stream(stream_of(bucket)))

    async def delete_object_store(self, bucket: str) -> None:
        """Delete a bucket with every object in it."""
        await self.delete_stream(stream_of(bucket))

    async def object_store_names(self) -> AsyncIterator[str]:
        """List the names of all buckets for objects."""
        async for name in self.stream_names("$O.*.C.>"):
            if name.startswith("OBJ_"):
                yield name.removeprefix("OBJ_")

    # ---- publishing --------------------------------------------------------------------------------------------

    async def publish(
        self,
        subject: str,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
        timeout: float | None = None,
    ) -> PubAck:
        """Store a message, and return when the stream has acknowledged it.

        While a cluster elects the stream's leader, the message is published again within ``timeout``; without a leader
        nothing is stored, so this cannot store it twice.

        Args:
            msg_id: Within the stream's duplicate window a second message with the same id is not stored, and
                ``PubAck.duplicate`` is True.
            expect: Store the message only if this condition holds for the stream.
            ttl: Seconds after which the stream removes the message (needs ``allow_message_ttl``).

        Raises:
            WrongLastSequence: The condition ``expect`` did not hold; nothing was stored.
            JetStreamUnavailable: No stream stores this subject, or it had no leader for all of ``timeout``; nothing was
                stored.
            FeatureUnavailable: ``ttl`` is set and the server is older than 2.11; nothing was sent.
            RequestTimeout: No acknowledgement in time. The message may or may not be stored: publish it again with the
                same ``msg_id``, or read the stream.
        """
        fields = publish_headers(headers, msg_id, expect, ttl)
        if ttl is not None:
            return await self._context.run(publish_with_ttl(self._context.api, subject, data, fields), timeout)
        return await self._context.run(publish(subject, data, fields), timeout)

    async def publish_async(
        self,
        subject: str,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
        timeout: float | None = None,
    ) -> AckFuture:
        """Send a message and return a future for its acknowledgement, without waiting for it.

        Waits only while the window of unacknowledged messages or the connection's send buffer is full, at most
        ``timeout`` seconds; None waits as long as the connection lasts. Order is kept. Every future is resolved exactly
        once: with the :class:`PubAck`, with the server's error, or with the reason why the outcome is unknown.

        Raises:
            RequestTimeout: There was no room within ``timeout``; nothing was sent.
        """
        if ttl is not None:
            began = clock.now()
            await self._context.run(self._context.api.require(MESSAGE_TTL), timeout)
            timeout = None if timeout is None else max(0.0, timeout - (clock.now() - began))
        fields = publish_headers(headers, msg_id, expect, ttl)
        return await self._context.publisher.publish(subject, data, fields, timeout)

    async def publish_async_complete(self, timeout: float | None = None) -> None:
        """Return when no acknowledgement is outstanding.

        Raises:
            RequestTimeout: Some still are.
        """
        await self._context.publisher.complete(timeout)

    def fast_batch(self, gap: GapMode = "fail", **options: Unpack[FastBatchKeywords]) -> FastBatch:
        """Send a batch of any length at the server's own speed: ``async with js.fast_batch() as fast``.

        The batch is not atomic: see :class:`FastBatch` for its guarantee and :class:`~jetspark.FastBatchOptions` for
        the options. The stream needs ``allow_batched``.

        Raises:
            FeatureUnavailable: The server has no fast ingest (nats-server 2.14); nothing was sent.
        """
        FAST_INGEST.check(self._context.api.known())
        return FastBatch(self._context, FastBatchOptions.of(gap, options))

    def fast_publisher(self, *, message_ids: bool = False, **options: Unpack[FastPublisherKeywords]) -> FastPublisher:
        """Store an endless stream of messages over as many fast batches as needed.

        See :class:`FastPublisher` for the guarantee and :class:`~jetspark.FastPublisherOptions` for the options.

        Raises:
            FeatureUnavailable: The server has no fast ingest (nats-server 2.14); nothing was sent.
        """
        FAST_INGEST.check(self._context.api.known())
        return FastPublisher(self._context, FastPublisherOptions.of(message_ids, options))

    def atomic_batch(
        self,
        batch_id: str | None = None,
        *,
        ack_first: bool = True,
        ack_every: int | None = None,
        timeout: float | None = None,
    ) -> AtomicBatch:
        """Store several messages together or not at all: ``async with js.atomic_batch() as batch``.

        See :class:`AtomicBatch` for its guarantee. All messages go to one stream, which needs ``allow_atomic``
        (nats-server 2.12). A server setting bounds the number of messages, 1000 by default. The server stages the batch
        in memory or on disk and abandons it when idle for some seconds (10 by default): have the messages ready.

        Args:
            batch_id: Identifies the batch in the headers of its messages: at most 64 characters of
                ``A-Z a-z 0-9 _ -``, unique for each batch. By default a random one.
            ack_first: Wait until the server has confirmed that the batch is open, which takes a round trip. Without
                it a refusal shows at the commit only, as :class:`~jetspark.BatchIncomplete`, and
                :meth:`AtomicBatch.resolve` may not be able to determine the outcome.
            ack_every: Also wait for an acknowledgement after each such number of messages, to detect a refusal early.
            timeout: Seconds for each answer, and for the wait while too many batches are open.
        """
        return AtomicBatch(self._context, batch_id, ack_first=ack_first, ack_every=ack_every, timeout=timeout)

    def batch_advisories(self, stream: str | None = None) -> AsyncIterator[BatchAbandoned]:
        """Every batch the server abandons from now on, of one stream or of all; ends with the connection.

        An abandoned batch has stored nothing beyond its commits. Advisories are plain messages: those sent before
        this call, or while disconnected, are missed. The server does not announce a batch that it refused or lost in a
        restart or a change of leaders. To end the iteration sooner, close it (``contextlib.aclosing``) or drop the
        reference.
        """
        return begun(_advisories(self._context.subscribe(abandoned_subject(stream))))


async def _advisories(subscription: Subscription) -> AsyncGenerator[BatchAbandoned, None]:
    # Closed explicitly: Python discards an interrupt raised while it finalizes a dropped generator.
    async with subscription, aclosing(cast("AsyncGenerator[Message, None]", aiter(subscription))) as messages:
        yield cast(BatchAbandoned, None)  # consumed by begun(); the subscription is active now
        async for message in messages:
            yield BatchAbandoned.of(message)
