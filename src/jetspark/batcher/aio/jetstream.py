"""Sinks that store batches in JetStream, with asyncio. Decisions are made in :mod:`jetspark.batcher.stores`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jetspark.aio.fast import FastPublisher
from jetspark.aio.jetstream import JetStream
from jetspark.batcher.aio.sinks import Runner
from jetspark.batcher.stores import DEFAULT_MAX_MESSAGES, Atomic, Ingest, Messages, ToMessage, publisher_options

__all__ = ["AtomicSink", "FastIngestSink"]

T = TypeVar("T")


class FastIngestSink(Generic[T]):
    """Stores batches by fast ingest, over one publisher that is kept open; the stream needs ``allow_batched``.

    A write returns when every item of it is known to be stored. Writes that begin in order are stored in order, also
    several at a time; then the server's batch stays open from write to write, which is several times faster than one
    at a time: give the batcher ``max_concurrent_flushes=4`` or so. ``linger_s`` is how long the last write under way
    waits for another before it ends the server's batch to learn its fate: about a round trip.

    The publisher survives lost messages, reconnects, changes of leaders and restarts of the server, and sends again
    what is not known to be stored. With ``message_ids`` that stores nothing twice. What a *retry* writes again, after a
    write that was cancelled or failed midway, is recognised only by ids of the items' own: ``id_of(item)``. Both rely
    on the stream's duplicate window.

    After ``patience_s`` without progress the writes under way fail, and the next one begins with a new publisher. A
    message the stream refuses fails the write it is in with the server's error, and those after it with
    :class:`~jetspark.BatchCutShort`: nothing of them is stored, and they may be written again.

    Items are bytes that go to ``subject``, or whatever ``to_message`` makes a message of: ``(subject, data)`` or
    ``(subject, data, headers)``. ``options`` are those of :class:`~jetspark.FastPublisherOptions`.
    """

    def __init__(
        self,
        js: JetStream,
        subject: str | None = None,
        *,
        to_message: ToMessage | None = None,
        message_ids: bool = False,
        id_of: Callable[[T], str] | None = None,
        linger_s: float = 0.002,
        **options: Any,
    ) -> None:
        options = publisher_options(options, message_ids=message_ids or id_of is not None)
        messages: Messages[T] = Messages(subject, to_message, id_of)
        self._ingest = Ingest(messages, lambda: js.fast_publisher(**options), asyncio.Lock(), linger_s=linger_s)
        self._runner = Runner(None)

    @property
    def publisher(self) -> FastPublisher | None:
        """The present one, for its counters; None before the first write."""
        publisher: FastPublisher | None = self._ingest.publisher
        return publisher

    async def write(self, batch: Sequence[T], /) -> None:
        """Store a batch.

        Raises:
            TypeError, ConfigError: An item that can never be sent: nothing was.
            BatchPublishDisabled: The stream does not allow fast ingest: nothing is stored.
            BatchCutShort: See above.
            ServerError: The stream refused a message; those before it are stored.
            BatchInDoubt: Out of patience. What was handed over may be stored.
        """
        await self._runner.run(self._ingest.write(batch))

    async def close(self, timeout: float | None = None) -> None:
        """Wait until everything handed over is stored, and end the batch.

        Raises:
            RequestTimeout: It took longer than ``timeout`` seconds.
            JetSparkError: The publisher gave up; so did the writes under way.
        """
        await self._runner.run(self._ingest.close(timeout))

    async def __aenter__(self) -> FastIngestSink[T]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class AtomicSink(Generic[T]):
    """Stores each batch all or none, as an atomic batch; the stream needs ``allow_atomic``.

    A batch of more than ``max_messages`` items, or of more than the server says that it allows, becomes several, each
    all or none, in order. When one fails after others were stored, :class:`~jetspark.BatchCutShort` says with
    ``stored`` how many items are. A commit that was not answered is resolved; while the stream does not answer, for up
    to ``doubt_s`` seconds. :class:`~jetspark.BatchInDoubt` says that this did not help.

    With ``id_of(item)``, or a header ``Nats-Msg-Id`` from ``to_message``, a retry stores nothing twice within the
    stream's duplicate window: what the stream knows stays, and the rest is stored all or none. To find out which that
    is costs an empty message for each item, which plain subscribers see and the stream does not store.

    Items are bytes that go to ``subject``, or whatever ``to_message`` makes a message of: ``(subject, data)`` or
    ``(subject, data, headers)``. ``timeout`` is that of :meth:`JetStream.atomic_batch`.
    """

    def __init__(
        self,
        js: JetStream,
        subject: str | None = None,
        *,
        to_message: ToMessage | None = None,
        id_of: Callable[[T], str] | None = None,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        doubt_s: float = 30.0,
        timeout: float | None = None,
    ) -> None:
        messages: Messages[T] = Messages(subject, to_message, id_of)
        self._atomic = Atomic(
            js, messages, lambda future: future, max_messages=max_messages, timeout_s=timeout, doubt_s=doubt_s
        )
        self._runner = Runner(None)

    @property
    def max_messages(self) -> int:
        """Of an atomic batch, as far as known: what the server said, once it did."""
        return self._atomic.max_messages

    async def write(self, batch: Sequence[T], /) -> None:
        """Store a batch.

        Raises:
            TypeError, ConfigError: An item that can never be sent: nothing was.
            BatchCutShort: Exactly the first ``stored`` items are stored; its cause says why.
            BatchInDoubt: The first ``stored`` are; the next ``max_messages`` are or are not, and the rest is not.
            ServerError, JetStreamUnavailable, RequestTimeout: Nothing is stored.
        """
        await self._runner.run(self._atomic.write(batch))
