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

    As with :class:`JetStream`, calls to the server raise ``ServerError`` when it refuses, ``JetStreamUnavailable`` when
    JetStream is not available, and ``RequestTimeout`` when no answer came in time.
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
        """Configuration and state now; with ``subjects_filter`` also the message count of each matching subject."""
        operation = self._context.api.stream_info(self.name, subjects_filter, deleted_details)
        return self._heard(self._context.run(operation))

    def update(self, **changes: Any) -> StreamInfo:
        """Change some fields of :class:`StreamConfig`; all others keep their values."""
        operation = self._context.api.update_stream(StreamConfig(name=self.name, **changes))
        return self._heard(self._context.run(operation))

    def _heard(self, info: StreamInfo) -> StreamInfo:
        self._known, self._is_verified = info, True
        return info

    def seal(self) -> StreamInfo:
        """Make the stream read-only, permanently."""
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
        """Make the stream's leader hand over to another replica."""
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
        """Return one message: by sequence, the last on a subject, or the next on a filter from ``sequence`` on.

        ``direct`` reads from any replica instead of the leader: faster, but possibly stale. This is the default if the
        stream allows it or was opened with ``verify=False``. The last message on a subject is then requested on
        ``$JS.API.DIRECT.GET.<stream>.<subject>``, so that a user can be permitted to read single subjects.

        Raises:
            MessageNotFound: No message matches.
        """
        query = message_query(sequence=sequence, last_for=last_for, next_for=next_for)
        use_direct = bool(self._known.config.allow_direct) if direct is None else flag("direct", direct)
        return self._context.run(self._context.api.get_message(self.name, query, direct=use_direct))

    def get_messages(
        self, start_sequence: int = 1, *, subject: str | None = None, max_messages: int | None = None
    ) -> Iterator[StoredMessage]:
        """Yield the messages from ``start_sequence`` on, in order, and end when the stream has no more.

        Needs ``allow_direct``. This only reads: it creates no consumer and acknowledges nothing. Messages lost in
        transit, for instance by a reconnect, are requested again.

        Raises:
            JetStreamUnavailable: The stream does not allow direct gets, or was deleted.
            RequestTimeout: Nothing arrived for as long as the context's ``timeout``; the whole read may take longer.
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
                        patience.renew(clock.now())  # time spent by a slow reader does not count

    def get_last_messages(self, filters: Iterable[str], *, up_to_sequence: int | None = None) -> list[StoredMessage]:
        """The last message of each subject that matches one of ``filters``, all as of one moment, oldest first.

        With ``up_to_sequence``, as of that sequence, if the stream still has those messages. At most 1024 subjects at a
        time. Needs ``allow_direct``.

        Raises:
            ConfigError: More than 1024 subjects match, or more bytes than the server puts into one answer.
            JetStreamUnavailable: The stream does not allow direct gets, or was deleted.
            RequestTimeout: Nothing arrived for as long as the context's ``timeout``, or answers were lost repeatedly.
        """
        patience = last_messages_patience(self._context, self.name)
        return last_messages(self._context, self.name, filters, up_to_sequence, patience)

    def delete_message(self, sequence: int, *, erase: bool = False) -> None:
        """Remove one message; with ``erase`` its bytes are overwritten on disk."""
        self._context.run(self._context.api.delete_message(self.name, sequence, erase=erase))

    # ---- consumers ---------------------------------------------------------------------------------------------

    def create_consumer(self, config: ConsumerConfig) -> Consumer:
        """Create a consumer. An existing consumer with the same configuration is returned unchanged.

        Raises:
            ConsumerNameInUse: A consumer of that name exists with another configuration.
        """
        return self._consumer(self._context.api.create_consumer(self.name, config))

    def update_consumer(self, config: ConsumerConfig) -> Consumer:
        """Change the fields that ``config`` sets; all others keep their values."""
        return self._consumer(self._context.api.update_consumer(self.name, config))

    def create_or_update_consumer(self, config: ConsumerConfig) -> Consumer:
        """Create the consumer, or change the fields that ``config`` sets."""
        return self._consumer(self._context.api.create_or_update_consumer(self.name, config))

    def get_or_create_consumer(self, config: ConsumerConfig) -> Consumer:
        """Return the existing consumer of that name, whatever its configuration; create it if it does not exist."""
        return self._consumer(self._context.api.get_or_create_consumer(self.name, config))

    def consumer(self, name: str, *, verify: bool = True) -> Consumer:
        """Return an existing consumer. ``verify=False`` makes no request, so the user needs no right to consumer info.

        Raises:
            ConsumerNotFound: The consumer does not exist. Without ``verify``, its first use raises this.
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
        """Read this stream in order and without acknowledgements, with an :class:`OrderedConsumer`.

        Args:
            filter_subjects: Only messages on these subjects; by default all.
            start_sequence: Begin there; or at ``start_time``; or by ``deliver_policy``: ``all`` (the default),
                ``new``, ``last``, ``last_per_subject``.
            headers_only: Leave out the data.
        """
        return OrderedConsumer(self._context, self.name, OrderedOptions.of(filter_subjects, options))

    def consumers(self) -> Iterator[ConsumerInfo]:
        """List the consumers of this stream."""
        return self._context.pages(lambda offset: self._context.api.consumer_page(self.name, offset))

    def consumer_names(self) -> Iterator[str]:
        return self._context.pages(lambda offset: self._context.api.consumer_name_page(self.name, offset))

    def _consumer(self, operation: Operation[ConsumerInfo]) -> Consumer:
        return Consumer(self._context, self._context.run(operation))

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"


def known_config(stream: Stream) -> StreamConfig:
    """The stream's configuration from the server's last answer, or the assumed one without ``verify``."""
    return stream._known.config


def last_messages_patience(context: DriverContext, stream: str) -> Patience:
    return Patience(f"last messages of stream {stream!r}", context.timeout_s, clock.now())


def last_messages(
    context: DriverContext, stream: str, filters: Iterable[str], up_to_sequence: int | None, patience: Patience
) -> list[StoredMessage]:
    """Implements :meth:`Stream.get_last_messages`, with a caller's own patience."""
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
