"""Reads a range of a stream's sequences in pieces, and proves that no message was skipped.

There are two ways to read a stream. A *pull consumer* without acknowledgements is the usual one: a message of 128 bytes
takes 1.8 microseconds of CPU in this process up to an Arrow record batch, and 1.7 in the server (nats-server 2.15.1,
file store, one core busy with other work). *Batched direct get* sends the sequence of each message in six headers: 16.9
and 2.7 microseconds (1.1 and 2.1 for a bare socket that ignores the headers). It is for streams with work-queue or
interest retention, which a consumer would change by reading.

A range is complete when that is proven: its last sequence was read, a message beyond its end arrived, or the stream's
leader replied that nothing is left in it. If a consumer or a replica reports its own end, the leader is asked, because
the consumer or replica may lag the leader from which the end of the range came.

No message is skipped. Each message has a consumer sequence, so a message lost on the way (in a reconnect) is noticed,
and a new consumer starts after the last message read. A gap in the stream sequences means deleted messages or other
subjects, unless the stream begins after the gap *when the gap is found*: then its limits may have evicted messages
before they were read, which is data loss. A range that starts at ``earliest`` has no such loss at its beginning: it is
defined by what the stream has when it is read, because a stream at its limit evicts messages between planning and
reading.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from jetspark.core.message import CoreMessage
from jetspark.core.step_runner import ReadClock, Sleep
from jetspark.core.subjects import matches
from jetspark.errors import (
    ConfigError,
    ConsumerNotFound,
    DataLoss,
    JetSparkError,
    MessageNotFound,
    RequestTimeout,
    StreamRecreated,
    UsageError,
)
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.config import ConsumerConfig, StreamConfig
from jetspark.jetstream.direct_get import BATCH_MESSAGES, BatchGet
from jetspark.jetstream.features import BATCH_GET
from jetspark.jetstream.info import ConsumerInfo, StoredMessage, StreamInfo
from jetspark.jetstream.operations import Api, Operation, Request, message_query
from jetspark.jetstream.pull import Ask, Flow, Puller, PullLimits, Wait
from jetspark.jetstream.wire import time_text
from jetspark.publish.steps import AskMany, ClosePull, Connect, OpenPull, Procedure, Pull, PullSource
from jetspark.state.deliveries import StreamOffset, count_up_to, delivery

__all__ = [
    "Head",
    "Interrupted",
    "Pulling",
    "Range",
    "RangeScan",
    "Sweep",
    "head_of",
    "is_consumed",
    "messages_from",
    "sequence_at",
]

_logger = logging.getLogger("jetspark.state")

# No message is stored before the one or after the other. The server counts nanoseconds since 1970 in 64 bits, which
# wrap: a time after April 2262, or before 1678, is another one to it.
FIRST_TIME = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
LAST_TIME = datetime.datetime(2262, 1, 1, tzinfo=datetime.UTC)
# A piece. From 500 to 50,000 rows Spark takes them equally fast; of large messages it has fewer, for memory.
PIECE_MESSAGES = 10_000
PIECE_BYTES = 8 << 20
# Messages for each request. Two requests are outstanding, so a reader holds at most three times this number. With 5,000
# messages of 128 bytes reading took a fifth longer, with 50,000 as long.
REQUEST_MESSAGES = 20_000
REQUEST_BYTES = 4 << 20
REQUESTS = 2
REQUEST_EXPIRES_S = 30.0
# Messages requested beyond the estimate, so that a slightly low estimate costs no additional round trip.
SLACK = 64
# If data is not needed, messages from this mean size on are sent without it. At 10 KiB reading is six times faster; at
# 128 bytes it is slower, because each message then has an additional header with its size.
HEADERS_ONLY_BYTES = 1 << 10
# The server removes a consumer after this time without a request, also that of a killed reader.
EPHEMERAL_S = 5.0
# Time without messages after which the stream's leader is asked whether any are left.
SILENCE_S = 1.0
PAUSE_S = 0.1

_data_of = attrgetter("data")


@dataclass(frozen=True, slots=True)
class Head:
    """A stream as the server describes it at one moment."""

    stream: str
    created: str
    first: int
    """The first sequence there is; of an empty stream, the one its next message will have."""
    next: int
    bytes_per_sequence: float = 0.0
    """Mean size; deleted messages count as 0 bytes."""
    missing: int = 0
    """Sequences in between that have no message any more, where messages can be counted."""
    bytes_per_message: float = 0.0
    kept_from: int | None = None
    """Known of some streams: nothing that counts was removed from here on, though the stream begins later."""

    @property
    def whole_from(self) -> int:
        """Events before this sequence may be lost."""
        return self.first if self.kept_from is None else self.kept_from

    def first_loss(self, start: int, end: int) -> range | None:
        """The first gap in which events of ``[start, end)`` may be lost; None if the range is complete.

        The gap ends before a sequence that is there, also if that is beyond the range.
        """
        return range(start, max(self.first, start + 1)) if start < min(end, self.whole_from) else None


@dataclass(frozen=True, slots=True)
class Range:
    """Some of one stream's sequences, the end exclusive."""

    stream: str
    created: str
    start: int
    end: int
    subjects: tuple[str, ...] = field(default=())
    is_earliest: bool = False
    """Messages that are removed from the beginning before it is read are not lost."""


def head_of(info: StreamInfo) -> Head:
    state = info.state
    first = max(1, state.first_sequence)
    end = state.last_sequence + 1
    sequences = max(1, end - first)
    return Head(
        info.config.name,
        time_text(info.created) if info.created is not None else "",
        min(first, end),
        end,
        state.bytes / sequences,
        # A consumer that counts would change what other streams keep.
        max(0, end - first - state.messages) if info.config.retention in (None, "limits") else 0,
        state.bytes / max(1, state.messages),
    )


def messages_from(api: Api, stream: str, sequence: int, subjects: Sequence[str] = ()) -> Operation[int]:
    """How many messages a stream has from a sequence on, by a consumer that takes none of them."""
    config = ConsumerConfig(
        deliver_policy="by_start_sequence",
        start_sequence=sequence,
        filter_subjects=list(subjects) or None,
        ack_policy="none",
        memory_storage=True,
        replicas=1,
        inactive_threshold_s=EPHEMERAL_S,
        headers_only=True,
    )
    info = yield from api.create_consumer(stream, config)
    try:
        yield from api.delete_consumer(stream, info.name)
    except ConsumerNotFound:
        pass  # the server has forgotten it by itself
    return info.pending


def sequence_at(api: Api, head: Head, moment: datetime.datetime) -> Operation[int]:
    """The sequence of the first message stored at or after ``moment``; the stream's end without such a message.

    Asks the stream's leader: direct get is not allowed on every stream and may reach a lagging replica, and a work
    queue allows no additional consumer.
    """
    query = {"start_time": time_text(min(max(moment, FIRST_TIME), LAST_TIME)), "next_by_subj": ">"}
    try:
        found = yield from api.get_message(head.stream, query, direct=False)
    except MessageNotFound:
        return head.next
    return min(head.next, found.sequence)


# ---- one consumer ----------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """Something that the consumer has sent is lost, or the consumer is."""


class Sweep(Flow[AckableMessage]):
    """Asks for a number of messages, a few requests ahead.

    ``left`` is how many are expected; the reader lowers it as it takes them. The server cannot be told where to stop,
    so whatever is asked for beyond the expected ones is sent all the same.

    ``step`` returns how many messages there are to take.
    """

    def __init__(self, puller: Puller[AckableMessage], left: int) -> None:
        super().__init__(puller, PullLimits(expires_s=REQUEST_EXPIRES_S))
        self.left = left

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
            wanted = self.left - puller.owed
            if wanted > 0 and puller.outstanding < REQUESTS and now >= puller.may_ask_at():
                # The next message alone is larger than a request's bytes. A request for one message has no such bound.
                is_large, self.must_empty = self.must_empty, False
                if not is_large or not puller.outstanding:
                    return puller.ask(
                        self,
                        1 if is_large else min(wanted, REQUEST_MESSAGES),
                        now=now,
                        expires_s=REQUEST_EXPIRES_S,
                        max_bytes=None if is_large else REQUEST_BYTES,
                        is_whole=False,
                    )
                self.must_empty = True
        return Wait(now + (PAUSE_S if puller.is_unavailable else SILENCE_S))


class Pulling:
    """One pull consumer without acknowledgements, and the proof that everything it has sent is here."""

    def __init__(self, info: ConsumerInfo, source: PullSource) -> None:
        self.info, self._source = info, source
        self.sweep = Sweep(source.puller, info.pending)
        self.received = info.delivered.consumer_sequence
        """How many messages of the consumer's are here."""
        self.last: StreamOffset | None = None

    @classmethod
    def open(
        cls, api: Api, stream: str, subjects: Sequence[str], *, start: int | None, headers_only: bool
    ) -> Procedure[Pulling]:
        """Create a consumer from a sequence on; without one for the last message of each subject, and new messages."""
        config = ConsumerConfig(
            deliver_policy="last_per_subject" if start is None else "by_start_sequence",
            start_sequence=start,
            filter_subjects=list(subjects) or None,
            ack_policy="none",
            memory_storage=True,
            replicas=1,
            inactive_threshold_s=EPHEMERAL_S,
            headers_only=headers_only,
        )
        info = yield from api.create_consumer(stream, config)
        source: PullSource = yield OpenPull(info)
        return cls(info, source)

    @property
    def is_unavailable(self) -> bool:
        """True if the last answer was that no server responds for the consumer."""
        return self._source.puller.is_unavailable

    def next(self) -> Procedure[list[Any]]:
        """The next messages; an empty list after a time without messages.

        Raises:
            Interrupted: Messages were lost on the way.
            ConsumerNotFound: The server has removed the consumer.
        """
        messages: list[Any] = yield Pull(self._source, self.sweep)
        if messages:
            begin, end = delivery(messages[0]), delivery(messages[-1])
            received = self.received
            if (begin.consumer_sequence, end.consumer_sequence) != (received + 1, received + len(messages)):
                lost = end.consumer_sequence - received - len(messages)
                raise Interrupted(f"{lost} messages of consumer {self.info.name!r} were lost on the way")
            self.received, self.last = end.consumer_sequence, end
        return messages

    def close(self) -> Procedure[None]:
        yield ClosePull(self._source, self.info)


class DirectReading:
    """The messages from a sequence on, by direct get. Ends where the replica that answers does."""

    def __init__(self, prefix: str, part: Range, start: int, bytes_per_sequence: float) -> None:
        self._prefix, self._stream = prefix, part.stream
        # The server accepts only one filter. Parallel requests would be answered by several replicas, and messages that
        # one of them does not have yet would be skipped.
        self._subject = part.subjects[0] if len(part.subjects) == 1 else None
        self._filters = part.subjects if self._subject is None else ()
        self._batch = max(1, min(BATCH_MESSAGES, int(REQUEST_BYTES / max(1.0, bytes_per_sequence))))
        self.next_sequence = start
        self._is_at_end = False
        self._get = self._following()
        self._found: list[StoredMessage] = []

    def next(self) -> Procedure[list[StoredMessage] | None]:
        """The messages of one request, perhaps none that the filters let pass; None at the end.

        Raises:
            Interrupted: The answers were lost.
        """
        if self._is_at_end:
            return None
        yield AskMany(self)
        found = self._found
        self._is_at_end = self._get.is_done and len(found) < self._batch
        if not found:
            if self._is_at_end:
                return None
            raise Interrupted(f"the answers from sequence {self.next_sequence} on were lost on the way")
        self.next_sequence = found[-1].sequence + 1
        if not self._filters:
            return found
        return [each for each in found if any(matches(filter_, each.subject) for filter_ in self._filters)]

    # ---- as answers --------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._get.is_over

    def request(self) -> Request:
        self._get, self._found = self._following(), []
        return self._get.request()

    def accept_all(self, messages: Sequence[CoreMessage]) -> None:
        get, found = self._get, self._found
        for message in messages:
            stored = get.accept(message)
            if stored is not None:
                found.append(stored)
            if get.is_over:
                return

    def lost(self) -> None:
        self._get.lost()

    def _following(self) -> BatchGet:
        return BatchGet(
            self._prefix,
            self._stream,
            start_sequence=self.next_sequence,
            subject=self._subject,
            max_messages=self._batch,
        )


# ---- a range ---------------------------------------------------------------------------------------------------------


class RangeScan:
    """Reads a range in pieces, through reconnects, leader changes and lost consumers.

    A runner's ``pieces`` reads it. ``lost_sequences`` counts removed sequences, if removal is allowed.
    """

    def __init__(
        self,
        part: Range,
        *,
        wants_data: bool = True,
        fail_on_loss: bool = True,
        loss_remedy: str = "",
        timeout_s: float = 120.0,
    ) -> None:
        """
        Args:
            wants_data: True if the messages' data is needed; otherwise large messages are read without it.
            fail_on_loss: True if removed messages are an error.
            loss_remedy: The remedy in that error.
            timeout_s: Longest time without messages.
        """
        self._part, self._wants_data = part, wants_data
        self._fail_on_loss, self._loss_remedy, self._timeout_s = fail_on_loss, loss_remedy, timeout_s
        self._next = part.start
        self._is_done = self._is_failed = False
        self._api: Api
        self._pulling: Pulling | None = None
        self._direct: DirectReading | None = None
        self._share = 1.0
        self._skipped: list[range] = []
        """Sequences of the present piece that were gone before they were asked for; they are counted."""
        self._head_at_end: Head | None = None
        self._heard_at = 0.0
        self._silence_s = SILENCE_S
        self.lost_sequences = 0

    def next(self) -> Procedure[list[Any] | None]:
        """The next messages, in order; None at the end. A scan that has failed is over.

        They are a consumer's messages; of a stream that is consumed by reading, ``StoredMessage``.

        Raises:
            StreamRecreated: The stream is not the one the range is of.
            DataLoss: Some of the range is gone, and that is an error.
            RequestTimeout: Nothing has come for ``timeout_s``, though the stream has it.
        """
        if self._is_failed:
            raise UsageError("a scan that has failed cannot go on: begin a new one")
        self._is_failed = True
        self._heard_at = yield ReadClock()  # the reader may have taken its time
        messages: list[Any] = []
        self._skipped = []
        size, start = 0, self._next
        while (found := (yield from self._some())) is not None:
            messages += found
            size += sum(map(len, map(_data_of, found)))
            if len(messages) >= PIECE_MESSAGES or size >= PIECE_BYTES:
                break
        if messages and len(messages) < self._next - start and not self._part.is_earliest:
            yield from self._check_gaps(messages, start)
        self._is_failed = False
        return messages or None

    def close(self) -> Procedure[None]:
        """Call it in the end, however the reading has ended."""
        pulling, self._pulling, self._direct = self._pulling, None, None
        if pulling is not None:
            yield from pulling.close()

    # ---- until the range is proven to be done ------------------------------------------------------------------

    def _some(self) -> Procedure[list[Any] | None]:
        """Messages of the range; ``_next`` is behind the last of them. None when the range is done."""
        end = self._part.end
        while self._next < end and not self._is_done:
            problem: Exception | None = None
            try:
                if self._pulling is None and self._direct is None:
                    yield from self._begin()
                    continue
                found = yield from self._read()
                if found is not None:
                    return found
                yield from self.close()
                self._is_done = yield from self._is_nothing_left()
            except (JetSparkError, Interrupted) as error:
                yield from self.close()
                if not (isinstance(error, Interrupted | ConsumerNotFound) or error.may_pass):
                    raise
                problem = error
            if not self._is_done:
                yield from self._pause(problem)
        yield from self.close()
        if self._next < end and not self._part.is_earliest and self._head_at_end is None:
            # Nothing is there between the last message and the end; but was it, when the range was planned?
            self._head_at_end = yield from self._head()
            self._skip_lost(self._head_at_end)
        return None

    def _begin(self) -> Procedure[None]:
        part = self._part
        self._api = yield Connect()
        info = yield from self._api.stream_info(part.stream)
        head = self._checked(head_of(info))
        self._skip_lost(head)
        if self._next >= part.end:
            return
        if is_consumed(info.config):
            yield from self._api.require(BATCH_GET)
            self._direct = DirectReading(self._api.prefix, part, self._next, head.bytes_per_sequence)
            return
        headers_only = not self._wants_data and head.bytes_per_sequence >= HEADERS_ONLY_BYTES
        self._pulling = pulling = yield from Pulling.open(
            self._api, part.stream, part.subjects, start=self._next, headers_only=headers_only
        )
        # Of a range with filters, or deletes, only a share of the sequences is messages.
        self._share = min(1.0, pulling.info.pending / max(1, head.next - self._next))
        pulling.sweep.left = self._expected()

    def _expected(self) -> int:
        left = self._part.end - self._next
        return min(left, int(left * self._share) + SLACK)

    def _read(self) -> Procedure[list[Any] | None]:
        """The next messages; None if this consumer or replica has no more, or is silent."""
        if self._direct is not None:
            return (yield from self._read_direct(self._direct))
        pulling = self._pulling
        assert pulling is not None
        if not (pulling.info.pending if pulling.last is None else pulling.last.pending):
            return None
        while not (messages := (yield from pulling.next())):
            if pulling.is_unavailable or (yield ReadClock()) - self._heard_at >= self._silence_s:
                return None
        self._heard_at = yield ReadClock()
        self._silence_s = SILENCE_S
        assert pulling.last is not None
        last, end = pulling.last.sequence, self._part.end
        if last >= end:
            messages = messages[: count_up_to(messages, end - 1)]
            last = delivery(messages[-1]).sequence if messages else self._next - 1
            self._is_done = True
        self._next = last + 1
        pulling.sweep.left = self._expected()
        return messages

    def _read_direct(self, direct: DirectReading) -> Procedure[list[Any] | None]:
        messages = yield from direct.next()
        if messages is None:
            return None
        self._heard_at = yield ReadClock()
        end = self._part.end
        if direct.next_sequence > end:
            # After the last message of the range, not at its end: messages in between may be removed.
            messages = [each for each in messages if each.sequence < end]
            self._next = messages[-1].sequence + 1 if messages else self._next
            self._is_done = True
        else:
            self._next = direct.next_sequence
        return messages

    def _pause(self, problem: Exception | None) -> Procedure[None]:
        stream = self._part.stream
        if (yield ReadClock()) - self._heard_at >= self._timeout_s:
            what = f"sequence {self._next} or one after it in stream {stream!r}"
            raise RequestTimeout(what, self._timeout_s) from problem
        _logger.info(
            "stream %s: reading continues at sequence %d with a new consumer: %s",
            stream,
            self._next,
            problem or "it is back",
        )
        self._silence_s = min(2 * self._silence_s, self._timeout_s)
        yield Sleep(PAUSE_S)

    def _is_nothing_left(self) -> Procedure[bool]:
        """Ask the stream's leader whether the rest of the range is empty."""
        for subject in self._part.subjects or (">",):
            query = message_query(sequence=self._next, next_for=subject)
            try:
                found = yield from self._api.get_message(self._part.stream, query, direct=False)
            except MessageNotFound:
                continue
            if found.sequence < self._part.end:
                return False
        return True

    # ---- removed messages --------------------------------------------------------------------------------------

    def _head(self) -> Procedure[Head]:
        """The stream as it is now."""
        while True:
            try:
                api: Api = yield Connect()
                return self._checked(head_of((yield from api.stream_info(self._part.stream))))
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                problem = error
            yield from self._pause(problem)

    def _checked(self, head: Head) -> Head:
        if head.created != self._part.created:
            raise StreamRecreated(head.stream, self._part.created, head.created)
        return head

    def _skip_lost(self, head: Head) -> None:
        if head.first > self._next:
            first = min(head.first, self._part.end)
            self._lose(self._next, head.first, first - self._next)
            self._skipped.append(range(self._next, first))
            self._next = first

    def _check_gaps(self, messages: list[Any], start: int) -> Procedure[None]:
        """Check whether a gap in the messages is before the stream's present beginning."""
        # Of the last messages it is known already: it was asked when the range was done.
        first = (self._head_at_end or (yield from self._head())).first
        end = min(first, self._next)
        if end <= start:
            return
        there = {each.sequence if isinstance(each, StoredMessage) else delivery(each).sequence for each in messages}
        count = end - start - sum(sequence < end for sequence in there)
        count -= sum(len(range(each.start, min(each.stop, end))) for each in self._skipped)
        if count:
            self._lose(_first_missing(start, there, self._skipped), first, count)

    def _lose(self, wanted: int, first: int, count: int) -> None:
        stream = self._part.stream
        if self._part.is_earliest:
            _logger.info(
                "stream %s: %d messages from sequence %d on were evicted before they were read", stream, count, wanted
            )
            return
        if self._fail_on_loss:
            raise DataLoss(stream, wanted, first, self._loss_remedy)
        if not self.lost_sequences:
            _logger.warning(
                "stream %s: %d sequences from %d on are gone, the first there is is %d; data loss is allowed",
                stream,
                count,
                wanted,
                first,
            )
        self.lost_sequences += count


def is_consumed(config: StreamConfig) -> bool:
    """True if reading by a consumer would remove messages.

    Raises:
        ConfigError: It would, and the stream does not allow direct gets.
    """
    if config.retention in (None, "limits"):
        return False
    if not config.allow_direct:
        raise ConfigError(
            f"stream {config.name!r} has {config.retention} retention: a consumer would change what it keeps, and it "
            "does not allow direct gets; set allow_direct on the stream"
        )
    return True


def _first_missing(start: int, there: set[int], skipped: list[range]) -> int:
    sequence = start
    while True:
        beyond = next((each.stop for each in skipped if sequence in each), None)
        if beyond is not None:
            sequence = beyond
        elif sequence in there:
            sequence += 1
        else:
            return sequence
