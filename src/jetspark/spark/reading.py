"""Reading one partition: a range of one stream's sequences, straight into Arrow record batches.

Two ways lead through a stream. A *pull consumer* without acknowledgements is the usual one: a message of 128 bytes took
1.8 microseconds of this process's CPU up to the record batch, and 1.7 of the server's (nats-server 2.15.1, file store,
one core busy with other work). *Batched direct get* has the place of each message in six headers of its own: 16.9 and
2.7, and 1.1 and 2.1 for a bare socket that does not even look at them. It is for streams with work-queue or interest
retention, which a consumer would change by reading.

The range is done when it is proven to be: its last sequence was read, or a message beyond its end arrived, or the
stream's leader says that nothing is left in it. What a consumer or a replica says of its own end is only a reason to
ask, because it may be behind the leader that the range's end came from.

Nothing is skipped: every message says its place among those the consumer has sent, so one that got lost on the way (a
reconnect) is noticed, and another consumer starts where the rows end. A gap in the stream's own sequences is deleted
messages, or what the filters leave out, unless the stream begins behind it *after* it was seen: then it may be what the
limits evicted in front of the reader, and is data loss. Not in a range that starts at ``earliest``, which is what is
there when it is read: a stream at its limit evicts between the plan and the task, and nobody was promised the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Protocol

import pyarrow as pa

from jetspark.blocking import JetStream
from jetspark.blocking.jetstream import Stream
from jetspark.blocking.pull import Source
from jetspark.blocking.stream_message import JetStreamMessage
from jetspark.core.subjects import matches
from jetspark.errors import (
    ConfigError,
    ConsumerNotFound,
    DataLoss,
    JetSparkError,
    MessageNotFound,
    RequestTimeout,
    StreamRecreated,
)
from jetspark.jetstream.config import ConsumerConfig
from jetspark.jetstream.info import ConsumerInfo, StoredMessage
from jetspark.jetstream.pull import Ask, Flow, Puller, PullLimits, Wait
from jetspark.spark.connections import jetstream_for
from jetspark.spark.lookups import head_of, patiently, will_pass
from jetspark.spark.offsets import Head, Range
from jetspark.spark.places import place
from jetspark.spark.source_options import SourceOptions

__all__ = ["RangeReader", "RowMaker", "Sweep"]

_logger = logging.getLogger("jetspark.spark")

# A record batch. From 500 to 50,000 rows Spark takes them equally fast; of large messages it has fewer, for memory.
BATCH_ROWS = 10_000
BATCH_BYTES = 8 << 20
# A request to the server, of which two are out: so a reader holds three times this at most, and what it is building.
# With 5,000 rows of 128 bytes reading took a fifth longer, with 50,000 as long.
REQUEST_ROWS = 20_000
REQUEST_BYTES = 4 << 20
REQUESTS = 2
REQUEST_EXPIRES_S = 30.0
# Asked for beyond what is expected: a guess that is a little low should not cost another round trip.
SLACK = 64
# Messages of this mean size and more are sent without their data where nobody wants it. Of 10 KiB it made reading six
# times faster; of 128 bytes it takes the reader more time, because each then has a header that says how large it was.
HEADERS_ONLY_BYTES = 1 << 10
# A consumer that nobody asks any more is gone after this: so long it outlives a task that was killed.
EPHEMERAL_S = 5.0
# Silence after which the stream's leader is asked what is left.
SILENCE_S = 1.0
PAUSE_S = 0.1
CLEAN_UP_TIMEOUT_S = 1.0

_data_of = attrgetter("data")


class Sweep(Flow[JetStreamMessage]):
    """Asks for the messages of a range, a few requests ahead and hardly for more than the range has. Pure.

    The server cannot be told where to stop. Of a range with filters, or deletes, only a share of the sequences is
    messages, and whatever is asked for beyond them is sent from behind the range's end; so the share is estimated.

    ``step`` returns how many messages there are to take. The reader moves ``next_sequence`` as it takes them.
    """

    def __init__(self, puller: Puller[JetStreamMessage], start: int, end: int, *, share: float = 1.0) -> None:
        super().__init__(puller, PullLimits(expires_s=REQUEST_EXPIRES_S))
        self.next_sequence = start
        self._end = end
        self._share = share

    def step(self, now: float, session: int | None) -> Ask | Wait | int:
        puller = self._puller
        buffered = len(puller.buffer)
        if buffered:
            return buffered
        error = self.error or puller.error
        if error is not None:
            raise error
        if session is not None:
            puller.on_session(session)
            left = self._end - self.next_sequence
            wanted = min(left, int(left * self._share) + SLACK) - puller.owed
            if wanted > 0 and puller.outstanding < REQUESTS and now >= puller.may_ask_at():
                # The next message alone is larger than a request's bytes. A request for one message has no such bound.
                is_large, self.must_empty = self.must_empty, False
                if not is_large or not puller.outstanding:
                    return puller.ask(
                        self,
                        1 if is_large else min(wanted, REQUEST_ROWS),
                        now=now,
                        expires_s=REQUEST_EXPIRES_S,
                        max_bytes=None if is_large else REQUEST_BYTES,
                        is_whole=False,
                    )
                self.must_empty = True
        return Wait(now + (PAUSE_S if puller.is_unavailable else SILENCE_S))


class RowMaker(Protocol):
    """What becomes of the messages: the columns of a stream, or of a bucket."""

    @property
    def needs_contents(self) -> bool:
        """Whether the messages' data is of use."""

    def of_messages(self, stream: str, messages: Sequence[JetStreamMessage]) -> pa.RecordBatch: ...

    def of_stored(self, stream: str, messages: Sequence[StoredMessage]) -> pa.RecordBatch: ...


class RangeReader:
    """Reads a range, through reconnects, leader changes and lost consumers.

    ``lost_sequences`` counts what was gone, where that is allowed.
    """

    def __init__(self, options: SourceOptions, part: Range, columns: RowMaker) -> None:
        self._options, self._part, self._columns = options, part, columns
        self._next = part.start
        self._is_done = False
        self._counted_to = part.start
        self._head_at_end: Head | None = None
        self._heard_at = time.monotonic()
        self._silence_s = SILENCE_S
        self.lost_sequences = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in order.

        Raises:
            StreamRecreated: The stream is not the one the range is of.
            DataLoss: Some of the range is gone, and ``failOnDataLoss`` is true.
            RequestTimeout: Nothing has come for ``fetchTimeoutMs``, though the stream has it.
        """
        rows: list[Any] = []
        rows_bytes, rows_start = 0, self._next
        for chunk in self._chunks():
            rows += chunk
            rows_bytes += sum(map(len, map(_data_of, chunk)))
            if len(rows) >= BATCH_ROWS or rows_bytes >= BATCH_BYTES:
                yield self._batch(rows, rows_start)
                rows, rows_bytes, rows_start = [], 0, self._next
                self._heard_at = time.monotonic()  # Spark may have taken its time
        if rows:
            yield self._batch(rows, rows_start)

    def _batch(self, rows: list[Any], start: int) -> pa.RecordBatch:
        if len(rows) < self._next - start and not self._part.is_earliest:
            self._check_gaps(rows, start)
        if isinstance(rows[0], StoredMessage):
            return self._columns.of_stored(self._part.stream, rows)
        return self._columns.of_messages(self._part.stream, rows)

    # ---- until the range is proven to be done ------------------------------------------------------------------

    def _chunks(self) -> Iterator[list[Any]]:
        """Messages of the range, in order; ``_next`` is behind the last of them."""
        part = self._part
        while self._next < part.end and not self._is_done:
            try:
                js = jetstream_for(self._options)
                stream = js.stream(part.stream)
                self._skip_lost(self._check_identity(head_of(stream.cached_info)))
                if self._next >= part.end:
                    return
                yield from self._by_direct_get(stream) if _is_consumed(stream) else self._by_consumer(js, stream)
                if self._next < part.end and not self._is_done:
                    self._is_done = self._is_nothing_left(stream)
                    problem: JetSparkError | None = None
            except JetSparkError as error:
                if not (will_pass(error) or isinstance(error, ConsumerNotFound)):
                    raise
                problem = error
            if self._next < part.end and not self._is_done:
                self._pause(problem)
        if self._next < part.end and not part.is_earliest:
            # Nothing is there between the last row and the end; but was it, when the range was planned?
            self._head_at_end = self._head()
            self._skip_lost(self._head_at_end)

    def _pause(self, problem: JetSparkError | None) -> None:
        part = self._part
        waited_s = time.monotonic() - self._heard_at
        if waited_s >= self._options.fetch_timeout_s:
            what = f"sequence {self._next} or one after it in stream {part.stream!r}"
            raise RequestTimeout(what, self._options.fetch_timeout_s) from problem
        _logger.info("stream %s at sequence %d, beginning again: %s", part.stream, self._next, problem or "it is there")
        self._silence_s = min(2 * self._silence_s, self._options.fetch_timeout_s)
        time.sleep(PAUSE_S)

    def _is_nothing_left(self, stream: Stream) -> bool:
        """What the stream's leader says of the rest of the range."""
        for subject in self._part.subjects or (">",):
            try:
                found = stream.get_message(self._next, next_for=subject, direct=False)
            except MessageNotFound:
                continue
            if found.sequence < self._part.end:
                return False
        return True

    # ---- what is gone ------------------------------------------------------------------------------------------

    def _head(self) -> Head:
        """The stream as it is now."""
        info = patiently(self._options, lambda js: js.stream(self._part.stream).cached_info)
        return self._check_identity(head_of(info))

    def _check_identity(self, head: Head) -> Head:
        if head.created != self._part.created:
            raise StreamRecreated(head.stream, self._part.created, head.created)
        return head

    def _skip_lost(self, head: Head) -> None:
        if head.first > self._next:
            first = min(head.first, self._part.end)
            self._lose(self._next, head.first, first - self._next)
            self._next = first

    def _check_gaps(self, rows: list[Any], start: int) -> None:
        """Whether a gap in the rows is in front of the stream's beginning by now."""
        # Of the last rows it is known already: it was asked when the range was done.
        first = (self._head_at_end or self._head()).first
        start = max(start, self._counted_to)
        if first <= start:
            return
        there = {each.sequence if isinstance(each, StoredMessage) else place(each).sequence for each in rows}
        gone = [sequence for sequence in range(start, min(first, self._next)) if sequence not in there]
        if gone:
            self._lose(gone[0], first, len(gone))

    def _lose(self, wanted: int, first: int, count: int) -> None:
        if self._part.is_earliest:
            _logger.info("stream %s: evicted before it was read: %d from %d on", self._part.stream, count, wanted)
            self._counted_to = first
            return
        if self._options.fail_on_data_loss:
            raise DataLoss(self._part.stream, wanted, first)
        if not self.lost_sequences:
            _logger.warning(
                "stream %s: %d sequences from %d on are gone, the first there is is %d; failOnDataLoss is false",
                self._part.stream,
                count,
                wanted,
                first,
            )
        self.lost_sequences += count
        self._counted_to = first

    # ---- the two ways ------------------------------------------------------------------------------------------

    def _by_consumer(self, js: JetStream, stream: Stream) -> Iterator[list[JetStreamMessage]]:
        """Through a pull consumer. Ends at the range's end, at the consumer's, and when that falls silent."""
        part = self._part
        head = head_of(stream.cached_info)
        info = stream.create_consumer(
            ConsumerConfig(
                deliver_policy="by_start_sequence",
                start_sequence=self._next,
                filter_subjects=part.subjects or None,
                ack_policy="none",
                memory_storage=True,
                replicas=1,
                inactive_threshold_s=EPHEMERAL_S,
                headers_only=not self._columns.needs_contents and head.bytes_per_sequence >= HEADERS_ONLY_BYTES,
            )
        ).cached_info
        source = Source(js, info)
        try:
            if not info.pending:
                return
            sweep = Sweep(
                source.puller, self._next, part.end, share=min(1.0, info.pending / max(1, head.next - self._next))
            )
            take = source.puller.buffer.popleft
            consumer_sequence = info.delivered.consumer_sequence
            heard_at = time.monotonic()
            while not self._is_done:
                step = source.perform(sweep)
                if not isinstance(step, int):
                    if source.puller.is_unavailable or time.monotonic() - heard_at >= self._silence_s:
                        return
                    continue
                messages = [take() for _ in range(step)]
                begin, end = place(messages[0]), place(messages[-1])
                delivered = begin.consumer_sequence, end.consumer_sequence
                if delivered != (consumer_sequence + 1, consumer_sequence + step):
                    return  # some were lost on the way
                consumer_sequence, last = end.consumer_sequence, end.sequence
                heard_at = self._heard_at = time.monotonic()
                self._silence_s = SILENCE_S
                if last >= part.end:
                    messages = [each for each in messages if place(each).sequence < part.end]
                    last = place(messages[-1]).sequence if messages else self._next - 1
                    self._is_done = True
                self._next = sweep.next_sequence = last + 1
                if messages:
                    yield messages
                if not end.pending or self._next >= part.end:
                    return
        finally:
            self._leave(js, source, info)

    def _leave(self, js: JetStream, source: Source, info: ConsumerInfo) -> None:
        source.puller.release()  # nothing is owed an acknowledgement, so nothing has to be waited for
        source.close()
        if js._client.is_connected:
            try:
                js._run(js._api.delete_consumer(info.stream_name, info.name), CLEAN_UP_TIMEOUT_S)
            except JetSparkError:
                pass  # gone already, or about to be

    def _by_direct_get(self, stream: Stream) -> Iterator[list[StoredMessage]]:
        """Without a consumer. Ends where the replica that answers does."""
        part = self._part
        # The server takes one filter only. Several requests side by side would be answered by several replicas; one may
        # be behind the others, and what it does not have yet would be skipped.
        [subject] = part.subjects if len(part.subjects) == 1 else (None,)
        chunk: list[StoredMessage] = []
        chunk_bytes, end = 0, self._next
        for message in stream.get_messages(self._next, subject=subject):
            if message.sequence >= part.end:
                self._is_done = True
                break
            end = message.sequence + 1
            if subject is None and part.subjects and not any(matches(each, message.subject) for each in part.subjects):
                continue
            chunk.append(message)
            chunk_bytes += len(message.data)
            if len(chunk) >= REQUEST_ROWS or chunk_bytes >= REQUEST_BYTES:
                self._next = end
                self._heard_at = time.monotonic()
                yield chunk
                chunk, chunk_bytes = [], 0
        self._next = end
        self._heard_at = time.monotonic()
        if chunk:
            yield chunk


def _is_consumed(stream: Stream) -> bool:
    """Whether reading by a consumer would change what the stream keeps.

    Raises:
        ConfigError: It would, and there is no other way.
    """
    config = stream.cached_info.config
    if config.retention in (None, "limits"):
        return False
    if not config.allow_direct:
        raise ConfigError(
            f"stream {stream.name!r} has {config.retention} retention: a consumer would change what it keeps, and it "
            "does not allow direct gets; set allow_direct on the stream"
        )
    return True
