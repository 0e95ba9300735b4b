# Generated from aio/pull.py by tools/unasync.py; edit that file.
"""Pulling from threads. What to ask for and when is decided in :mod:`jetspark.jetstream.pull`; this adds waiting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from jetspark.blocking.context import DriverContext
from jetspark.blocking.source import Source
from jetspark.blocking.stream_message import JetStreamMessage
from jetspark.core.arguments import instance
from jetspark.core.numbers import seconds_above_0
from jetspark.jetstream.acks import check_is_unanswered_of
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.pull import Fetch, FetchKeywords, Flow, Priority, PullLimits, unacknowledged_at_most

__all__ = ["Messages", "PullConsumer"]


class PullConsumer:
    """The part of a consumer that receives: :meth:`fetch`, :meth:`next`, :meth:`messages`.

    At least once: a message that is not acked within the consumer's ``ack_wait_s`` is delivered again, here or to
    another client of the same consumer; ``metadata.delivered`` tells.
    """

    _context: DriverContext
    _known: ConsumerInfo
    _source: Source | None = None

    def fetch(
        self,
        n: int = 1,
        *,
        timeout: float = 5.0,
        max_bytes: int | None = None,
        no_wait: bool = False,
        fill: bool = False,
        group: str | None = None,
        min_pending: int | None = None,
        min_ack_pending: int | None = None,
        priority: int | None = None,
    ) -> list[JetStreamMessage]:
        """Return up to ``n`` messages, waiting up to ``timeout`` seconds for the first one.

        The list is empty when no message came. With at least one message the call does not wait for more, except with
        ``fill``. One fetch returns at most ``max_ack_pending`` messages, less the unacknowledged earlier ones.

        Several fetches may run at once. A message that arrives too late, or whose fetch was interrupted, is kept for
        the next fetch; :meth:`close` returns it to the server.

        Args:
            max_bytes: Bound of the total size, as the server counts it (with subject, reply subject and headers).
            no_wait: Return at once with the messages that the stream has now.
            fill: Wait until all ``n`` messages have arrived, or ``timeout`` has passed.
            group: For a consumer with priority groups, as are ``min_pending``, ``min_ack_pending`` and ``priority``.

        Raises:
            ConsumerNotFound: The consumer was deleted.
            JetStreamUnavailable: The consumer had no leader for the whole time.
            ConfigError: The request exceeds the consumer's limits, ``max_bytes`` is too small for any message, or
                ``no_wait`` and ``fill`` are both set.
        """
        return self._fetch(
            n,
            timeout_s=timeout,
            max_bytes=max_bytes,
            no_wait=no_wait,
            fill=fill,
            priority=Priority.of(group, min_pending, min_ack_pending, priority),
        )

    def _fetch(self, n: int, **options: Unpack[FetchKeywords]) -> list[JetStreamMessage]:
        transport = self._context.transport
        transport.check_may_wait("fetch")
        with transport.lock:
            if self._source is None or self._source.state.is_finished:
                self._source = Source(self._context, self._known)
            source = self._source
            limit = unacknowledged_at_most(self._known.config)
            fetch = Fetch(source.puller, n, now=transport.now(), max_ack_pending=limit, **options)
        is_complete = False
        try:
            while source.perform(fetch) is not None:
                pass
            is_complete = True
        finally:
            with transport.lock:
                fetch.leave(is_cancelled=not is_complete)
        return fetch.messages

    def next(self, timeout: float = 5.0, *, ack: JetStreamMessage | None = None) -> JetStreamMessage | None:
        """Return the next message, or None when none came within ``timeout``. Errors are those of :meth:`fetch`.

        Args:
            ack: A message of this consumer to acknowledge in the same request (``+NXT``), which saves one message to
                the server per processed message. Like :meth:`JetStreamMessage.ack`, it is not confirmed; when this
                call raises, it may not have been sent.
        """
        if ack is not None:
            check_is_unanswered_of(instance("ack", ack, JetStreamMessage), self._known)
        messages = self._fetch(1, timeout_s=timeout, acknowledges=ack)
        if ack is not None and not ack.is_answered:  # the next message was buffered already, or we are disconnected
            ack.ack()
        return messages[0] if messages else None

    def batches(
        self,
        n: int = 100,
        *,
        expires: float = 30.0,
        max_bytes: int | None = None,
        group: str | None = None,
        min_pending: int | None = None,
        min_ack_pending: int | None = None,
        priority: int | None = None,
    ) -> Iterator[list[JetStreamMessage]]:
        """Yield lists of up to ``n`` messages without end: ``for messages in consumer.batches(100)``.

        Each list is the result of a :meth:`fetch` that found messages. Nothing is requested while the loop's body runs.
        The errors are those of :meth:`fetch`.

        Args:
            expires: Seconds that a request waits at the server before it is renewed.
        """
        expires = seconds_above_0("expires", expires)
        preferences = Priority.of(group, min_pending, min_ack_pending, priority)
        while True:
            found = self._fetch(n, timeout_s=expires, max_bytes=max_bytes, priority=preferences)
            if found:
                yield found

    def messages(
        self,
        *,
        max_messages: int = 8192,
        max_bytes: int | None = None,
        expires: float = 30.0,
        heartbeat: float | None = None,
        group: str | None = None,
        min_pending: int | None = None,
        min_ack_pending: int | None = None,
        priority: int | None = None,
    ) -> Messages:
        """Every message, without end: ``for message in consumer.messages()``.

        Requests messages ahead of the reader and continues through reconnects, restarts and leader changes. Leaving the
        loop returns unread messages to the server. To wait for that, use ``with consumer.messages() as
        messages``.

        Args:
            max_messages: How many may be received ahead of the reader, at most. It begins with 500. A reader that keeps
                up is given more at a time, a slow one as many as it takes in a second.
            max_bytes: How many bytes of them. Without it, some 16 MiB, by the size of the messages that came last.
            expires: How long a request waits at the server before it is renewed.
            heartbeat: How often an idle server says that it is there; at most half of ``expires``.

        Raises:
            ConsumerNotFound: While iterating: the consumer was deleted.
            JetStreamUnavailable: While iterating: the consumer has not answered for 20 seconds.
            ConnectionClosed: While iterating: the connection was closed.
        """
        limits = PullLimits(max_messages=max_messages, max_bytes=max_bytes, expires_s=expires, heartbeat_s=heartbeat)
        preferences = Priority.of(group, min_pending, min_ack_pending, priority)
        return Messages(self._context, self._known, limits, preferences)

    def close(self) -> None:
        """Return messages that fetches left behind to the server. The consumer stays, and this object is reusable.

        Waits at most the context's ``timeout``. Messages that could not be returned are redelivered after the
        consumer's ``ack_wait``.
        """
        source, self._source = self._source, None
        if source is not None:
            source.close()


class Messages:
    """A consumer's messages without end: an iterator, and a context manager that ends it cleanly."""

    def __init__(
        self, context: DriverContext, info: ConsumerInfo, limits: PullLimits, priority: Priority | None
    ) -> None:
        self._context, self._info = context, info
        self._limits, self._priority = limits, priority
        self._source: Source | None = None
        self._flow: Flow[JetStreamMessage]
        self._is_managed = False
        self._is_closed = False

    def __iter__(self) -> Iterator[JetStreamMessage]:
        return self._iterate()

    def __enter__(self) -> Messages:
        self._is_managed = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and return the messages that were received and not yielded to the server."""
        self._is_closed = True
        if self._source is not None:
            self._source.close()

    def _iterate(self) -> Iterator[JetStreamMessage]:
        if self._is_closed:
            return
        transport = self._context.transport
        transport.check_may_wait("messages")
        with transport.lock:
            if self._source is None:
                self._source = Source(self._context, self._info)
                self._flow = Flow(self._source.puller, self._limits, self._priority)
        source, flow = self._source, self._flow
        take = source.puller.buffer.popleft
        try:
            while not self._is_closed:
                step = source.perform(flow)
                if isinstance(step, int):
                    for _ in range(step):
                        try:
                            message = take()
                        except IndexError:  # closed in the meantime, or another reader was faster
                            break
                        yield message
        finally:
            if not self._is_managed:  # inside `with`, the program may iterate again
                self.close()
