"""JetStream from threads: the context and streams. Requests are written in :mod:`jetspark.jetstream.operations`."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from jetspark.blocking.atomic import AtomicBatch
from jetspark.blocking.consumer import Consumer
from jetspark.blocking.fast import FastBatch, FastPublisher
from jetspark.blocking.kv import KeyValue
from jetspark.blocking.message import Message
from jetspark.blocking.objects import ObjectStores
from jetspark.blocking.ordered import OrderedConsumer
from jetspark.blocking.publisher import AckFuture
from jetspark.blocking.subscription import Subscription, subscribe
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import timeout_of
from jetspark.errors import ConnectionClosed, NoResponders, RequestTimeout
from jetspark.jetstream.advisories import BatchAbandoned, abandoned_subject
from jetspark.jetstream.config import ConsumerConfig, DeliverPolicy, Placement, StreamConfig
from jetspark.jetstream.direct_get import MAX_LAST_REQUESTS, BatchGet, LastGet
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.features import BATCH_GET, FAST_INGEST, LAST_GET, MESSAGE_TTL
from jetspark.jetstream.info import AccountInfo, ConsumerInfo, PubAck, StoredMessage, StreamInfo
from jetspark.jetstream.kv import KVConfig, check_bucket, create_bucket
from jetspark.jetstream.operations import (
    Api,
    Deadline,
    Operation,
    Pause,
    Request,
    api_prefix,
    message_query,
)
from jetspark.jetstream.ordered import OrderedOptions, Patience
from jetspark.jetstream.publishing import Expect, publish, publish_headers, publish_with_ttl
from jetspark.publish.fast_options import FastBatchKeywords, FastBatchOptions, GapMode
from jetspark.publish.fast_publisher import FastPublisherKeywords, FastPublisherOptions
from jetspark.publish.window import WindowOptions

if TYPE_CHECKING:
    from jetspark.blocking.client import Client

__all__ = ["JetStream", "Stream"]

T = TypeVar("T")

NOTHING = Message("", b"", None, None, None)


class JetStream(ObjectStores):
    """A client's view of JetStream. Make one with ``nc.jetstream()``; it costs nothing to make another.

    Everything raises :class:`~jetspark.ServerError` when the server says no, :class:`~jetspark.JetStreamUnavailable`
    when nobody answers for JetStream, and :class:`~jetspark.RequestTimeout` when no answer came in time.
    """

    _now = staticmethod(time.monotonic)

    def __init__(
        self, client: Client, *, domain: str | None, prefix: str | None, timeout: float | None, window: WindowOptions
    ) -> None:
        self._client = client
        self._publisher = client._windowed_publisher(window)
        self._api = Api(api_prefix(domain, prefix), client._machine)
        self._timeout_s = timeout_of(timeout, client.options.request_timeout_s)

    def account_info(self) -> AccountInfo:
        """What this account uses and may use."""
        return self._run(self._api.account_info())

    # ---- streams -----------------------------------------------------------------------------------------------

    def create_stream(self, config: StreamConfig | str) -> Stream:
        """Create a stream; one that exists with the very same configuration is returned as it is.

        A name is a configuration, too: of a stream that stores the subject of that name.

        Raises:
            StreamNameInUse: One of that name exists with another configuration.
            FeatureUnavailable: The server is too old for a field that is mentioned.
        """
        return Stream(self, self._run(self._api.create_stream(config)))

    def update_stream(self, config: StreamConfig) -> Stream:
        """Change what ``config`` mentions; everything else stays as it is.

        Raises:
            StreamNotFound: There is no such stream.
        """
        return Stream(self, self._run(self._api.update_stream(config)))

    def create_or_update_stream(self, config: StreamConfig | str) -> Stream:
        """Make sure that the stream exists and has everything ``config`` mentions."""
        return Stream(self, self._run(self._api.create_or_update_stream(config)))

    def stream(self, name: str) -> Stream:
        """A stream that exists.

        Raises:
            StreamNotFound: There is no such stream.
        """
        return Stream(self, self._run(self._api.stream_info(name)))

    def delete_stream(self, name: str) -> None:
        """Delete a stream with all its messages and consumers."""
        self._run(self._api.delete_stream(name))

    def streams(self, subject: str | None = None) -> Iterator[StreamInfo]:
        """Every stream, or every one that stores messages on ``subject``.

        Raises:
            RequestTimeout: A page of them did not come within the context's ``timeout``; all of them may take longer.
        """
        return self._pages(lambda offset: self._api.stream_page(offset, subject))

    def stream_names(self, subject: str | None = None) -> Iterator[str]:
        """Like :meth:`streams`, names only."""
        return self._pages(lambda offset: self._api.stream_name_page(offset, subject))

    # ---- key-value buckets -------------------------------------------------------------------------------------

    def create_kv(self, config: KVConfig | str) -> KeyValue:
        """Create a bucket; one that exists with the very same configuration is returned as it is.

        A name is a configuration, too.

        Raises:
            StreamNameInUse: One of that name exists with another configuration.
        """
        return KeyValue(self, Stream(self, self._run(create_bucket(self._api, KVConfig.of(config)))))

    def create_or_update_kv(self, config: KVConfig | str) -> KeyValue:
        """Make sure that the bucket exists and has everything ``config`` mentions."""
        return KeyValue(self, self.create_or_update_stream(KVConfig.of(config).to_stream()))

    def kv(self, bucket: str) -> KeyValue:
        """A bucket that exists.

        Raises:
            StreamNotFound: There is no such bucket.
        """
        return KeyValue(self, self.stream(f"KV_{check_bucket(bucket)}"))

    def delete_kv(self, bucket: str) -> None:
        """Delete a bucket with everything in it."""
        self.delete_stream(f"KV_{check_bucket(bucket)}")

    def kv_names(self) -> Iterator[str]:
        """Every bucket."""
        for name in self.stream_names("$KV.*.>"):
            if name.startswith("KV_"):
                yield name.removeprefix("KV_")

    # ---- publishing --------------------------------------------------------------------------------------------

    def publish(
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
        """Store a message, and return when the stream has it.

        Args:
            msg_id: Within the stream's duplicate window a second message with the same id is not stored;
                ``PubAck.duplicate`` tells.
            expect: Store it only if this is true of the stream.
            ttl: Seconds after which the stream drops it (needs ``allow_message_ttl``).

        Raises:
            WrongLastSequence: ``expect`` was not true; nothing was stored.
            JetStreamUnavailable: No stream stores this subject, or it has no leader; nothing was stored.
            FeatureUnavailable: ``ttl``, and the server is older than 2.11; nothing was sent.
            RequestTimeout: No acknowledgement in time. The message may or may not be stored: publish it again with the
                same ``msg_id``, or look.
        """
        fields = publish_headers(headers, msg_id, expect, ttl)
        if ttl is not None:
            return self._run(publish_with_ttl(self._api, subject, data, fields), timeout)
        return self._run(publish(subject, data, fields), timeout)

    def publish_async(
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
        once: with the :class:`PubAck`, with the server's error, or with the reason why it is unknown.

        Raises:
            RequestTimeout: There was no room within ``timeout``; nothing was sent.
        """
        if ttl is not None:
            began = self._now()
            self._run(self._api.require(MESSAGE_TTL), timeout)
            timeout = None if timeout is None else max(0.0, timeout - (self._now() - began))
        return self._publisher.publish(subject, data, publish_headers(headers, msg_id, expect, ttl), timeout)

    def publish_async_complete(self, timeout: float | None = None) -> None:
        """Return when no acknowledgement is outstanding.

        Raises:
            RequestTimeout: Some still are.
        """
        self._publisher.complete(timeout)

    def fast_batch(self, gap: GapMode = "fail", **options: Unpack[FastBatchKeywords]) -> FastBatch:
        """Send a batch of any length at the server's own speed: ``with js.fast_batch() as fast``.

        Not atomic: see :class:`FastBatch` for what is stored when, and :class:`~jetspark.FastBatchOptions` for the
        options. The stream needs ``allow_batched``.

        Raises:
            FeatureUnavailable: The server has no fast ingest (nats-server 2.14); nothing was sent.
        """
        FAST_INGEST.check(self._api.known())
        return FastBatch(self, FastBatchOptions.of(gap, options))

    def fast_publisher(self, *, message_ids: bool = False, **options: Unpack[FastPublisherKeywords]) -> FastPublisher:
        """Store an endless stream of messages over as many fast batches as it takes.

        See :class:`FastPublisher` for the guarantee and :class:`~jetspark.FastPublisherOptions` for the options.

        Raises:
            FeatureUnavailable: The server has no fast ingest (nats-server 2.14); nothing was sent.
        """
        FAST_INGEST.check(self._api.known())
        return FastPublisher(self, FastPublisherOptions.of(message_ids, options))

    def atomic_batch(
        self,
        batch_id: str | None = None,
        *,
        ack_first: bool = True,
        ack_every: int | None = None,
        timeout: float | None = None,
    ) -> AtomicBatch:
        """Store several messages together or not at all: ``with js.atomic_batch() as batch``.

        See :class:`AtomicBatch` for what is stored when. The stream needs ``allow_atomic`` (nats-server 2.12), and all
        messages go to one stream. How many there may be is the server's setting, 1000 by default. It forgets a batch
        that is idle for some seconds (10 by default), and stages all of it in memory or on disk: have the messages
        ready.

        Args:
            batch_id: What the batch is called in the headers of its messages, at most 64 characters of
                ``A-Z a-z 0-9 _ -``; new for each batch. One that nobody can guess is made up by default.
            ack_first: Wait for the server's word that it has opened the batch, a round trip. Without it a refusal
                shows at the commit only, as :class:`~jetspark.BatchIncomplete`, and :meth:`AtomicBatch.resolve` may
                not be able to tell.
            ack_every: Wait for an acknowledgement after this many messages too, to hear of a refusal earlier.
            timeout: Seconds for each answer, and for waiting for a place among the open batches.
        """
        return AtomicBatch(self, batch_id, ack_first, ack_every, timeout)

    def batch_advisories(self, stream: str | None = None) -> Iterator[BatchAbandoned]:
        """Every batch the server abandons from now on, of one stream or of all; ends with the connection.

        An abandoned batch has stored nothing of what was not committed. Advisories are plain messages: what was
        announced before this call, or while disconnected, is missed. A batch that was refused, or that was lost in a
        restart or a change of leaders, is not announced. To end it sooner, close it (``contextlib.closing``) or let go
        of it.
        """
        advisories = self._advisories(subscribe(self._client._link, abandoned_subject(stream)))
        next(advisories)  # a generator that has not begun is closed without its ``finally``
        return advisories

    # ---- for the driver's other modules ------------------------------------------------------------------------

    def _run(self, operation: Operation[T], timeout: float | None = None, *, for_each: bool = False) -> T:
        """Run an operation; all its requests together have ``timeout`` seconds, or with ``for_each`` every one."""
        deadline = Deadline(timeout_of(timeout, self._timeout_s), self._now(), for_each=for_each)
        try:
            step = next(operation)
            while True:
                try:
                    answer = self._perform(step, deadline)
                except BaseException as error:
                    # The operation knows what this means for what it asked; most just let it rise.
                    step = operation.throw(error)
                else:
                    step = operation.send(answer)
        except StopIteration as finished:
            result: T = finished.value
            return result

    def _advisories(self, subscription: Subscription) -> Iterator[BatchAbandoned]:
        # Closed, not dropped: an interrupt while something dropped is closed is lost.
        with subscription, closing(cast("Generator[Message, None, None]", iter(subscription))) as messages:
            yield cast(BatchAbandoned, None)  # nobody gets this: now it has begun
            for message in messages:
                yield BatchAbandoned.of(message)

    def _perform(self, step: Request | Pause, deadline: Deadline) -> Message:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return NOTHING
        timeout = deadline.begin(step, self._now())
        try:
            if not step.is_silent:
                return self._ask(step, timeout, deadline)
            # The time is for room in the send buffer; nobody waits for an answer.
            self._client.publish(step.subject, step.data, headers=step.headers, timeout=timeout)
            return NOTHING
        except RequestTimeout as error:
            raise deadline.of_all(error) from None

    def _ask(self, request: Request, timeout: float, deadline: Deadline) -> Message:
        while True:
            try:
                return self._client.request(request.subject, request.data, timeout=timeout, headers=request.headers)
            except NoResponders as error:
                pause_s = deadline.retry_after_s(self._now())
                if pause_s is None:
                    raise unavailable(request.subject, self._client.server_info) from error
                time.sleep(pause_s)
                timeout = deadline.left_s(self._now())

    @contextmanager
    def _asked(self, request: Request, timeout: float | None = None) -> Iterator[Subscription]:
        """The answers to a request that has many. They end when the connection is lost: the rest will not come.

        ``timeout`` is for room in the send buffer.
        """
        inbox = self._client._link.new_inbox()

        with subscribe(self._client._link, inbox, answers_to=request.subject, ends_with_session=True) as answers:
            self._client.publish(request.subject, request.data, reply=inbox, timeout=timeout)
            yield answers

    def _next_answer(self, answers: Subscription, patience: Patience) -> Message | None:
        """None when the rest will not come, and may be asked for again.

        Raises:
            RequestTimeout: Nothing came for too long.
        """
        try:
            return answers.next(patience.left_s(self._now(), self._timeout_s))
        except RequestTimeout:
            patience.check(self._now())
        except ConnectionClosed:
            if self._client.is_closed:
                raise
            patience.check(self._now())
        return None

    def _pages(self, ask: Callable[[int], Operation[tuple[list[T], int]]]) -> Iterator[T]:
        seen = 0
        while True:
            page, total = self._run(ask(seen))
            yield from page
            seen += len(page)
            if not page or seen >= total:
                return


class Stream:
    """One stream. ``cached_info`` is what was last heard of it; :meth:`info` asks.

    Like :class:`JetStream`, what asks the server raises ``ServerError`` when it says no, ``JetStreamUnavailable`` when
    nobody answers for it, and ``RequestTimeout`` when no answer came in time.
    """

    def __init__(self, js: JetStream, info: StreamInfo) -> None:
        self._js = js
        self.cached_info = info

    @property
    def name(self) -> str:
        return self.cached_info.config.name

    def info(self, *, subjects_filter: str | None = None, deleted_details: bool = False) -> StreamInfo:
        """Configuration and state now; with ``subjects_filter`` also the messages per subject that matches."""
        operation = self._js._api.stream_info(self.name, subjects_filter, deleted_details)
        self.cached_info = self._js._run(operation)
        return self.cached_info

    def update(self, **changes: Any) -> StreamInfo:
        """Change some fields of :class:`StreamConfig`; everything else stays as it is."""
        changed = self._js.update_stream(StreamConfig(name=self.name, **changes))
        self.cached_info = changed.cached_info
        return self.cached_info

    def seal(self) -> StreamInfo:
        """Make the stream read-only, for ever."""
        return self.update(sealed=True)

    def delete(self) -> None:
        """Delete the stream with all its messages and consumers."""
        self._js.delete_stream(self.name)

    def purge(self, *, subject: str | None = None, up_to_sequence: int | None = None, keep: int | None = None) -> int:
        """Remove messages: all, those on ``subject``, up to and including a sequence, or all but the last ``keep``.

        Returns how many were removed.
        """
        return self._js._run(self._js._api.purge_stream(self.name, subject, up_to_sequence, keep))

    def step_down(self, placement: Placement | None = None) -> None:
        """Have the stream's leader hand over to another replica."""
        self._js._run(self._js._api.step_down_stream(self.name, placement))

    # ---- messages ----------------------------------------------------------------------------------------------

    def get_message(
        self,
        sequence: int | None = None,
        *,
        last_for: str | None = None,
        next_for: str | None = None,
        direct: bool | None = None,
    ) -> StoredMessage:
        """One message: by sequence, the last on a subject, or the next on a filter from ``sequence`` on.

        ``direct`` asks any replica instead of the leader: faster, and possibly a moment behind. By default that is
        done where the stream allows it.

        Raises:
            MessageNotFound: There is none.
        """
        query = message_query(sequence=sequence, last_for=last_for, next_for=next_for)
        use_direct = bool(self.cached_info.config.allow_direct) if direct is None else direct
        return self._js._run(self._js._api.get_message(self.name, query, direct=use_direct))

    def get_messages(
        self, start_sequence: int = 1, *, subject: str | None = None, max_messages: int | None = None
    ) -> Iterator[StoredMessage]:
        """The messages from ``start_sequence`` on, in order, up to the last one there is when we get to it.

        Needs ``allow_direct``. No consumer is made and nothing is acknowledged: this only reads. What is lost on the
        way, by a reconnect for instance, is asked for again.

        Raises:
            JetStreamUnavailable: The stream does not allow direct gets, or is gone.
            RequestTimeout: Nothing came for as long as the context's ``timeout``; reading all of it may take longer.
        """
        js, now = self._js, self._js._now
        patience = Patience(f"messages of stream {self.name!r}", js._timeout_s, now())
        js._run(js._api.require(BATCH_GET))
        reading = BatchGet(
            self._js._api.prefix,
            self.name,
            start_sequence=start_sequence,
            subject=subject,
            max_messages=max_messages,
        )
        while not reading.is_done:
            with js._asked(reading.request(), patience.left_s(now(), js._timeout_s)) as answers:
                while not reading.is_over:
                    answer = js._next_answer(answers, patience)
                    if answer is None:
                        reading.lost()
                    elif (stored := reading.accept(answer)) is not None:
                        yield stored
                        patience.renew(now())  # who reads slowly is not kept waiting by us

    def get_last_messages(self, filters: Sequence[str], *, up_to_sequence: int | None = None) -> list[StoredMessage]:
        """The last message of each subject that matches one of ``filters``, all as of one moment, oldest first.

        With ``up_to_sequence`` as of then, as far as the stream still has it. At most 1024 subjects at a time. Needs
        ``allow_direct``.

        Raises:
            ConfigError: More subjects match, or more bytes than the server answers with at a time.
            JetStreamUnavailable: The stream does not allow direct gets, or is gone.
            RequestTimeout: Nothing came for as long as the context's ``timeout``, or some of it was lost repeatedly.
        """
        return self._last_messages(filters, up_to_sequence, self._patience())

    def _patience(self) -> Patience:
        return Patience(f"last messages of stream {self.name!r}", self._js._timeout_s, self._js._now())

    def _last_messages(
        self, filters: Sequence[str], up_to_sequence: int | None, patience: Patience
    ) -> list[StoredMessage]:
        js, now = self._js, self._js._now
        js._run(js._api.require(LAST_GET))
        reading = LastGet(js._api.prefix, self.name, filters, up_to_sequence)
        for _ in range(MAX_LAST_REQUESTS):
            with js._asked(reading.request(), patience.left_s(now(), js._timeout_s)) as answers:
                while not reading.is_over:
                    answer = js._next_answer(answers, patience)
                    if answer is None:
                        reading.lost()
                    else:
                        reading.accept(answer)
                        patience.renew(now())
            if not reading.is_broken:
                return reading.messages
        raise RequestTimeout(f"last messages of stream {self.name!r}", js._timeout_s)

    def delete_message(self, sequence: int, *, erase: bool = False) -> None:
        """Remove one message; with ``erase`` its bytes are overwritten on disk."""
        self._js._run(self._js._api.delete_message(self.name, sequence, erase=erase))

    # ---- consumers ---------------------------------------------------------------------------------------------

    def create_consumer(self, config: ConsumerConfig) -> Consumer:
        """Create a consumer; one that exists with the very same configuration is returned as it is.

        Raises:
            ConsumerNameInUse: One of that name exists with another configuration.
        """
        return self._consumer(self._js._api.create_consumer(self.name, config))

    def update_consumer(self, config: ConsumerConfig) -> Consumer:
        """Change what ``config`` mentions; everything else stays as it is."""
        return self._consumer(self._js._api.update_consumer(self.name, config))

    def create_or_update_consumer(self, config: ConsumerConfig) -> Consumer:
        """Make sure that the consumer exists and is what ``config`` says."""
        return self._consumer(self._js._api.create_or_update_consumer(self.name, config))

    def consumer(self, name: str) -> Consumer:
        """A consumer that exists.

        Raises:
            ConsumerNotFound: There is no such consumer.
        """
        return self._consumer(self._js._api.consumer_info(self.name, name))

    def delete_consumer(self, name: str) -> None:
        self._js._run(self._js._api.delete_consumer(self.name, name))

    def ordered_consumer(
        self,
        *filter_subjects: str,
        start_sequence: int | None = None,
        start_time: datetime.datetime | None = None,
        deliver_policy: DeliverPolicy | None = None,
        headers_only: bool = False,
    ) -> OrderedConsumer:
        """Read this stream in order, without acknowledgements, for as long as you like.

        Args:
            filter_subjects: Only messages on these; none means all.
            start_sequence: Begin there; or at ``start_time``; or as ``deliver_policy`` says: ``all`` (the default),
                ``new``, ``last``, ``last_per_subject``.
            headers_only: Without the data.
        """
        options = OrderedOptions(
            filter_subjects=filter_subjects,
            start_sequence=start_sequence,
            start_time=start_time,
            deliver_policy=deliver_policy,
            headers_only=headers_only,
        )
        return OrderedConsumer(self._js, self.name, options)

    def consumers(self) -> Iterator[ConsumerInfo]:
        """Every consumer of this stream."""
        return self._js._pages(lambda offset: self._js._api.consumer_page(self.name, offset))

    def consumer_names(self) -> Iterator[str]:
        return self._js._pages(lambda offset: self._js._api.consumer_name_page(self.name, offset))

    def _consumer(self, operation: Operation[ConsumerInfo]) -> Consumer:
        return Consumer(self._js, self._js._run(operation))

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"
