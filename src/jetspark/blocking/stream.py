# Generated from aio/stream.py by tools/unasync.py; edit that file.
"""Streams from threads. Requests are written in :mod:`jetspark.jetstream.operations`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Unpack

from jetspark.blocking import clock
from jetspark.blocking.consumer import Consumer
from jetspark.blocking.context import DriverContext
from jetspark.blocking.ordered import OrderedConsumer
from jetspark.core.arguments import flag
from jetspark.errors import RequestTimeout, UsageError
from jetspark.jetstream.checks import check_name
from jetspark.jetstream.config import ConsumerConfig, Placement, StreamConfig
from jetspark.jetstream.direct_get import MAX_LAST_REQUESTS, BatchGet, LastGet
from jetspark.jetstream.features import BATCH_GET, LAST_GET
from jetspark.jetstream.info import ConsumerInfo, StoredMessage, StreamInfo
from jetspark.jetstream.operations import Operation, message_query
from jetspark.jetstream.ordered import OrderedKeywords, OrderedOptions, Patience

__all__ = ["Stream"]


class Stream:
    """One stream. ``cached_info`` is the server's last answer about it; :meth:`info` asks again.

    A stream that was opened with ``verify=False`` has no ``cached_info`` before the first :meth:`info`, and
    ``UsageError`` says so.

    Like :class:`JetStream`, what asks the server raises ``ServerError`` when it says no, ``JetStreamUnavailable`` when
    nobody answers for it, and ``RequestTimeout`` when no answer came in time.
    """

    def __init__(self, context: DriverContext, info: StreamInfo, *, is_verified: bool = True) -> None:
        """Without ``is_verified``, ``info`` has what a stream of this kind usually is."""
        self._context = context
        self._known, self._is_verified = info, is_verified

    @property
    def name(self) -> str:
        return self._known.config.name

    @property
    def cached_info(self) -> StreamInfo:
        """The server's last answer about the stream."""
        if not self._is_verified:
            raise UsageError(f"stream {self.name!r} was opened with verify=False: call info() first")
        return self._known

    def info(self, *, subjects_filter: str | None = None, deleted_details: bool = False) -> StreamInfo:
        """Configuration and state now; with ``subjects_filter`` also the messages per subject that matches."""
        operation = self._context.api.stream_info(self.name, subjects_filter, deleted_details)
        return self._heard(self._context.run(operation))

    def update(self, **changes: Any) -> StreamInfo:
        """Change some fields of :class:`StreamConfig`; everything else stays as it is."""
        operation = self._context.api.update_stream(StreamConfig(name=self.name, **changes))
        return self._heard(self._context.run(operation))

    def _heard(self, info: StreamInfo) -> StreamInfo:
        self._known, self._is_verified = info, True
        return info

    def seal(self) -> StreamInfo:
        """Make the stream read-only, for ever."""
        return self.update(sealed=True)

    def delete(self) -> None:
        """Delete the stream with all its messages and consumers."""
        self._context.run(self._context.api.delete_stream(self.name))

    def purge(self, *, subject: str | None = None, up_to_sequence: int | None = None, keep: int | None = None) -> int:
        """Remove messages: all, those on ``subject``, up to and including a sequence, or all but the last ``keep``.

        Returns how many were removed.
        """
        return self._context.run(self._context.api.purge_stream(self.name, subject, up_to_sequence, keep))

    def step_down(self, placement: Placement | None = None) -> None:
        """Have the stream's leader hand over to another replica."""
        self._context.run(self._context.api.step_down_stream(self.name, placement))

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
        done where the stream allows it, and in a stream that was opened with ``verify=False``. The last message on a
        subject is then asked for on ``$JS.API.DIRECT.GET.<stream>.<subject>``, so that a user can be given single
        subjects to read.

        Raises:
            MessageNotFound: There is none.
        """
        query = message_query(sequence=sequence, last_for=last_for, next_for=next_for)
        use_direct = bool(self._known.config.allow_direct) if direct is None else flag("direct", direct)
        return self._context.run(self._context.api.get_message(self.name, query, direct=use_direct))

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
        context = self._context
        patience = Patience(f"messages of stream {self.name!r}", context.timeout_s, clock.now())
        context.run(context.api.require(BATCH_GET))
        reading = BatchGet(
            self._context.api.prefix,
            self.name,
            start_sequence=start_sequence,
            subject=subject,
            max_messages=max_messages,
        )
        while not reading.is_done:
            with context.asked(reading.request(), patience.left_s(clock.now(), context.timeout_s)) as answers:
                while not reading.is_over:
                    answer = context.next_answer(answers, patience)
                    if answer is None:
                        reading.lost()
                    elif (stored := reading.accept(answer)) is not None:
                        yield stored
                        patience.renew(clock.now())  # who reads slowly is not kept waiting by us

    def get_last_messages(self, filters: Iterable[str], *, up_to_sequence: int | None = None) -> list[StoredMessage]:
        """The last message of each subject that matches one of ``filters``, all as of one moment, oldest first.

        With ``up_to_sequence`` as of then, as far as the stream still has it. At most 1024 subjects at a time. Needs
        ``allow_direct``.

        Raises:
            ConfigError: More subjects match, or more bytes than the server answers with at a time.
            JetStreamUnavailable: The stream does not allow direct gets, or is gone.
            RequestTimeout: Nothing came for as long as the context's ``timeout``, or some of it was lost repeatedly.
        """
        patience = last_messages_patience(self._context, self.name)
        return last_messages(self._context, self.name, filters, up_to_sequence, patience)

    def delete_message(self, sequence: int, *, erase: bool = False) -> None:
        """Remove one message; with ``erase`` its bytes are overwritten on disk."""
        self._context.run(self._context.api.delete_message(self.name, sequence, erase=erase))

    # ---- consumers ---------------------------------------------------------------------------------------------

    def create_consumer(self, config: ConsumerConfig) -> Consumer:
        """Create a consumer; one that exists with the very same configuration is returned as it is.

        Raises:
            ConsumerNameInUse: One of that name exists with another configuration.
        """
        return self._consumer(self._context.api.create_consumer(self.name, config))

    def update_consumer(self, config: ConsumerConfig) -> Consumer:
        """Change what ``config`` mentions; everything else stays as it is."""
        return self._consumer(self._context.api.update_consumer(self.name, config))

    def create_or_update_consumer(self, config: ConsumerConfig) -> Consumer:
        """Make sure that the consumer exists and is what ``config`` says."""
        return self._consumer(self._context.api.create_or_update_consumer(self.name, config))

    def get_or_create_consumer(self, config: ConsumerConfig) -> Consumer:
        """Return the consumer of that name as it is, whatever its configuration; create it if it does not exist."""
        return self._consumer(self._context.api.get_or_create_consumer(self.name, config))

    def consumer(self, name: str, *, verify: bool = True) -> Consumer:
        """A consumer that exists. With ``verify=False`` the server is not asked, and needs no right to its info.

        Raises:
            ConsumerNotFound: There is no such consumer. Without ``verify``, its first use raises this.
        """
        if not flag("verify", verify):
            info = ConsumerInfo(
                stream_name=self.name, name=check_name("consumer", name), config=ConsumerConfig(durable_name=name)
            )
            return Consumer(self._context, info, is_verified=False)
        return self._consumer(self._context.api.consumer_info(self.name, name))

    def delete_consumer(self, name: str) -> None:
        self._context.run(self._context.api.delete_consumer(self.name, name))

    def ordered_consumer(self, *filter_subjects: str, **options: Unpack[OrderedKeywords]) -> OrderedConsumer:
        """Read this stream in order, without acknowledgements, for as long as you like.

        Args:
            filter_subjects: Only messages on these; none means all.
            start_sequence: Begin there; or at ``start_time``; or as ``deliver_policy`` says: ``all`` (the default),
                ``new``, ``last``, ``last_per_subject``.
            headers_only: Without the data.
        """
        return OrderedConsumer(self._context, self.name, OrderedOptions.of(filter_subjects, options))

    def consumers(self) -> Iterator[ConsumerInfo]:
        """Every consumer of this stream."""
        return self._context.pages(lambda offset: self._context.api.consumer_page(self.name, offset))

    def consumer_names(self) -> Iterator[str]:
        return self._context.pages(lambda offset: self._context.api.consumer_name_page(self.name, offset))

    def _consumer(self, operation: Operation[ConsumerInfo]) -> Consumer:
        return Consumer(self._context, self._context.run(operation))

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"


def known_config(stream: Stream) -> StreamConfig:
    """The stream's configuration as last heard from the server, or what it is taken to be without ``verify``."""
    return stream._known.config


def last_messages_patience(context: DriverContext, stream: str) -> Patience:
    return Patience(f"last messages of stream {stream!r}", context.timeout_s, clock.now())


def last_messages(
    context: DriverContext, stream: str, filters: Iterable[str], up_to_sequence: int | None, patience: Patience
) -> list[StoredMessage]:
    """What :meth:`Stream.get_last_messages` returns, for as long as the patience lasts."""
    context.run(context.api.require(LAST_GET))
    reading = LastGet(context.api.prefix, stream, filters, up_to_sequence)
    if reading.is_empty:
        return []
    for _ in range(MAX_LAST_REQUESTS):
        with context.asked(reading.request(), patience.left_s(clock.now(), context.timeout_s)) as answers:
            while not reading.is_over:
                answer = context.next_answer(answers, patience)
                if answer is None:
                    reading.lost()
                else:
                    reading.accept(answer)
                    patience.renew(clock.now())
        if not reading.is_broken:
            return reading.messages
    raise RequestTimeout(f"last messages of stream {stream!r}", context.timeout_s)
