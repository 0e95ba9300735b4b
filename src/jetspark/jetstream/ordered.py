"""Reading a stream in order, without acknowledgements, without end.

An ordered consumer is a throw-away: an unreplicated pull consumer in the server's memory. After any fault (a message
is missing, the heartbeat stops, the consumer is gone, the session or a leader changed), a new consumer replaces it,
starting right after the last message received. So the result never skips, repeats or reorders messages, whatever
happens to the consumers. It pulls, so that the reader decides the pace: the server sends only messages that fit into
the buffer. And a request is always waiting at the server, so that a single message arrives at once.

One :class:`OrderedReader` keeps the position in the stream. Each consumer has an :class:`OrderedPuller`, which detects
its loss, and an :class:`OrderedFlow`, which requests messages and hands them out.

One kind of start is not described by a sequence: ``last_per_subject`` sends the last message of each subject, in the
order of their sequences, and then all new messages. During the first part, the *listing*, a consumer that starts "after
the last message received" would also send older messages of the subjects still to come. So its successor is created
with ``last_per_subject`` again, and messages at or below the last received sequence are skipped: a message there that
is still the last of its subject was the last before, and was delivered. A subject changed since then arrives with its
later message. The listing is over when a message says that nothing is pending, or when as many messages arrived as were
counted when the consumer was created: the counted messages have lower sequences than new ones, so they arrive first.

A pull consumer loses a message of its listing if the message is too large for the rest of a request's ``max_bytes``, or
if the request expires just then, and no other request waits (nats-server 2.15.1, where subjects have several messages).
The next message has the next consumer sequence, so only the status shows the loss. Hence a request of a listing is for
so few messages that all of them fit into its bytes. Should such a status arrive all the same, the listing is created
again, with requests so small that they need no bound of bytes.

A sequence has a meaning in one stream only. A stream that was deleted and re-created has the same name and none of the
positions: a consumer that starts after our last sequence would wait for an unrelated message. Hence every successor is
created first, and then the stream's creation time is read: if it is still the same, the consumer belongs to the stream
that we were reading.

The driver runs :meth:`OrderedReader.open`, makes a flow for the consumer, and follows :meth:`OrderedFlow.step`: None
means that the consumer is lost, a number that :meth:`OrderedFlow.take` has messages.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypedDict

from jetspark.core.arguments import flag, instance, texts, unfit
from jetspark.core.backoff import Backoff
from jetspark.core.headers import Status
from jetspark.core.numbers import UINT64, whole
from jetspark.core.options import ConnectOptions, check_keywords
from jetspark.core.subjects import validate_filter
from jetspark.errors import (
    ConfigError,
    ConnectionLost,
    JetSparkError,
    NoServersAvailable,
    RequestTimeout,
    StreamRecreated,
    StreamWentBack,
)
from jetspark.jetstream.acks import parse_metadata
from jetspark.jetstream.config import ConsumerConfig, DeliverPolicy
from jetspark.jetstream.info import ConsumerInfo, SequencePair, StreamInfo
from jetspark.jetstream.operations import Api, Operation, Request
from jetspark.jetstream.pull import Ask, Flow, M, Puller, PullLimits, Wait, is_count, size_bytes

__all__ = [
    "CLEAN_UP_TIMEOUT_S",
    "OrderedFlow",
    "OrderedOptions",
    "OrderedPuller",
    "OrderedReader",
    "Patience",
    "heartbeat_for",
    "retry_pauses",
]

# Interval of the server's heartbeats while it has nothing to send; twice this silence means that the consumer is lost.
HEARTBEAT_S = 5.0

# Bound on unread messages, unless the connection's own bounds are lower. Requests have a bound of bytes, so each ends
# with a status, and few large ones cost less: a reader had 0.89 of the rate of `messages()` with 4096, and has 0.94
# with this.
MAX_MESSAGES = 16_384
MAX_BYTES = 16 << 20
# The window has room for a sixth of the bytes, if all messages are as large as the largest of the last count, and for
# 64 messages at least.
BYTES_PARTS = 6
MIN_WINDOW = 64

# In a cluster the answer to a consumer's creation can overtake its registration for requests.
MAX_REFUSALS_AT_FIRST = 5

# If the program dies without a word, the server removes the consumer after this time.
INACTIVE_THRESHOLD_S = 60.0

# Deleting a lost consumer is optional clean-up; it must not delay the reader.
CLEAN_UP_TIMEOUT_S = 1.0

# The server takes heartbeats of 100 ms and more; below this they are a burden to a busy one.
MIN_HEARTBEAT_S = 0.25

# A new leader may not have all messages yet. With the pauses of `retry_pauses` this waits 3.5 s.
MAX_ATTEMPTS_BEHIND = 7
# The policies without a further value.
DELIVER_POLICIES: tuple[DeliverPolicy, ...] = ("all", "last", "new", "last_per_subject")
RETRY = Backoff(first_s=0.05, max_s=1.0)


class OrderedKeywords(TypedDict, total=False):
    """The fields of :class:`OrderedOptions` as keywords of ``ordered_consumer``, for type checkers."""

    start_sequence: int | None
    start_time: datetime.datetime | None
    deliver_policy: DeliverPolicy | None
    headers_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedOptions:
    """Start and filters of an ordered consumer."""

    filter_subjects: Sequence[str] = ()
    start_sequence: int | None = None
    start_time: datetime.datetime | None = None
    deliver_policy: DeliverPolicy | None = None
    """``all`` by default; ``new``, ``last``, ``last_per_subject`` are the other policies without a value."""
    headers_only: bool = False

    def __post_init__(self) -> None:
        for subject in texts("filter_subjects", self.filter_subjects, "a list of subjects"):
            validate_filter(subject)
        flag("headers_only", self.headers_only)
        if self.start_time is not None:
            instance("start_time", self.start_time, datetime.datetime)
        if self.deliver_policy is not None and self.deliver_policy not in DELIVER_POLICIES:
            raise unfit("deliver_policy", self.deliver_policy, f"one of {', '.join(map(repr, DELIVER_POLICIES))}")
        given = [name for name in ("start_sequence", "start_time", "deliver_policy") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' with '.join(given)}: expected one of them")
        if self.start_sequence is not None:
            whole("start_sequence", self.start_sequence, high=UINT64)

    @classmethod
    def of(cls, filter_subjects: Sequence[str], given: OrderedKeywords) -> OrderedOptions:
        """The options in keywords; an unknown keyword is an error that lists the known ones."""
        check_keywords(cls, "ordered consumer", given)
        return cls(filter_subjects=filter_subjects, **given)


_reply_of = attrgetter("raw_reply")

# The digits of 0, 1, 2, ...: all the last ones as one text, all the last but one, and so on; each twice over.
_COUNTED = 10_000
assert MAX_MESSAGES // 2 <= _COUNTED  # the most messages handed out at a time
_DIGITS = [
    b"".join(b"%d" % digit * 10**place for digit in range(10)) * (2 * _COUNTED // 10 ** (place + 1))
    for place in range(4)
]


def are_consecutive(replies: list[bytes], first: int, tokens_after: int) -> bool:
    """True if the consumer sequences of the replies are ``first`` and its successors; False if this test cannot tell.

    Checking the order is the main cost of reading a million messages, so the replies are not parsed one by one. Replies
    of equal length and equal beginning stand below one another like rows, and a slice with their length as its step is
    a column. At the position of the first reply's sequence, all others must have theirs, with dots around it: with a
    shorter stream sequence the time would stand there, which has more digits than any consumer sequence.
    """
    head, stream_sequence, sequence, _ = replies[0].rsplit(b".", tokens_after + 1)[:4]
    count, width = len(replies), len(replies[0]) + 1
    rows = b" ".join(replies)  # no reply has a space in it
    start = len(head) + 1 + len(stream_sequence)
    end = start + 1 + len(sequence)
    dots = b"." * count
    if (
        int(sequence) != first
        or count > _COUNTED
        or len(rows) != count * width - 1
        or rows[width - 1 :: width] != b" " * (count - 1)
        or rows.count(b" %b." % head) != count - 1
        or rows[start::width] != dots
        or rows[end::width] != dots
    ):
        return False
    upper, lower = divmod(first, _COUNTED)
    for place in range(min(len(sequence), len(_DIGITS))):
        if rows[end - 1 - place :: width] != _DIGITS[place][lower : lower + count]:
            return False
    # The other digits are the same in all rows, or from some row on those of the next number.
    before = min(_COUNTED - lower, count)
    for place in range(len(sequence) - len(_DIGITS)):
        digits = (b"%d" % upper)[place : place + 1], (b"%d" % (upper + 1))[place : place + 1]
        if rows[start + 1 + place :: width] != digits[0] * before + digits[1] * (count - before):
            return False
    return True


class OrderedReader:
    """The position in the stream, kept across consumers."""

    def __init__(self, options: OrderedOptions) -> None:
        self._options = options
        self._last_stream_sequence: int | None = None
        """None before the position is known; 0 is a position: before the first message of an empty stream."""
        self._last_consumer_sequence = 0
        self._tokens_after = 3
        """Number of tokens of a reply subject behind the consumer sequence."""
        self._is_listing = options.deliver_policy == "last_per_subject"
        self._waiting = 0
        """Number of messages that the present consumer had to send when it was created."""
        self._listing_left = 0
        """Number of messages that the present consumer has still to send before its listing is certainly over."""
        self._largest_bytes = 0
        """Size of the largest message of the listing so far."""
        self._is_careful = False
        """A request of the listing had too few bytes for a message."""
        self._created: datetime.datetime | None = None
        """The stream's creation time, which tells it from other streams of its name."""
        self._attempts_behind = 0
        self.is_caught_up = options.deliver_policy == "new"
        """All messages that existed at the start were delivered."""
        self._barren = 0
        """Number of consecutive consumers that were lost before they sent anything."""

    @property
    def has_begun(self) -> bool:
        """True once the stream was found."""
        return self._created is not None

    @property
    def is_listing(self) -> bool:
        """True while the last messages of the subjects are still arriving."""
        return self._is_listing

    def open(self, api: Api, stream: str, name: str) -> Operation[ConsumerInfo]:
        """Create the next consumer.

        Raises:
            StreamNotFound: The stream does not exist, or was deleted.
            StreamRecreated: The stream was deleted and re-created.
            StreamWentBack: The stream ends before the last message read, repeatedly.
        """
        is_first = self._created is None
        if is_first:
            self.check_stream((yield from api.stream_info(stream)))
        info = yield from api.create_consumer(stream, self.config(name))
        if not is_first:
            try:
                self.check_stream((yield from api.stream_info(stream)))
            except JetSparkError:
                yield Request(f"{api.prefix}.CONSUMER.DELETE.{stream}.{info.name}", is_silent=True)
                raise
        self._attempts_behind = 0
        self.created(info.delivered, info.pending)
        return info

    def config(self, name: str) -> ConsumerConfig:
        """The next consumer's configuration. Its messages count from 1 again."""
        self._last_consumer_sequence = 0
        options = self._options
        filters = list(options.filter_subjects)
        if not filters and options.deliver_policy == "last_per_subject":
            filters = [">"]  # the server requires a filter
        config = ConsumerConfig(
            name=name,
            ack_policy="none",
            max_deliver=1,
            inactive_threshold_s=INACTIVE_THRESHOLD_S,
            memory_storage=True,
            replicas=1,
            headers_only=options.headers_only or None,
            filter_subject=filters[0] if len(filters) == 1 else None,
            filter_subjects=filters if len(filters) > 1 else None,
            deliver_policy=options.deliver_policy,
            start_sequence=options.start_sequence,
            start_time=options.start_time,
        )
        if self._last_stream_sequence is not None and not self._is_listing:
            config = dataclasses.replace(
                config,
                deliver_policy="by_start_sequence",
                start_sequence=self._last_stream_sequence + 1,
                start_time=None,
            )
        return config

    def check_stream(self, info: StreamInfo) -> None:
        """Compare the stream with the one read so far; raises as :meth:`open`."""
        name, last = info.config.name, self._last_stream_sequence or 0
        if self._created is None:
            self._created = info.created
        elif info.created is not None and info.created != self._created:
            remedy = f"the last sequence read is {last}: read the new one from its beginning, or where you want to"
            raise StreamRecreated(name, self._created.isoformat(), info.created.isoformat(), remedy)
        elif info.state.last_sequence < last:
            raise StreamWentBack(name, last + 1, info.state.last_sequence + 1)

    def created(self, delivered: SequencePair, pending: int) -> None:
        """Record a created consumer, and the start that the server has chosen for some policies.

        The recorded start keeps messages published before the first delivery, should this consumer be lost: another
        ``new`` consumer would start after them.
        """
        self._waiting = pending
        has_a_place = self._options.deliver_policy in ("new", "last")
        if self._is_listing:
            self._listing_left = pending
            self._is_listing = bool(pending)
            has_a_place = not pending
        if self._last_stream_sequence is None and has_a_place:
            self._last_stream_sequence = delivered.stream_sequence
        if not pending:
            self.is_caught_up = True

    def accept(self, messages: list[M]) -> tuple[list[M], int]:
        """Check the next messages; returns those to hand out, and the number of messages checked.

        It checks no further than to the message that completes the messages that existed at the start, and not beyond
        a gap.
        """
        replies: list[bytes] = list(map(_reply_of, messages))
        try:
            count = self._count_in_order(replies)
            if not count:
                return [], 0
            accepted = messages if count == len(messages) else messages[:count]
            last = parse_metadata(replies[count - 1])
            if self._is_listing and self._last_stream_sequence is not None:
                after = self._tokens_after + 1
                sequences = [int(reply.rsplit(b".", after)[1]) for reply in replies[:count]]
                before = self._last_stream_sequence
                accepted = [each for each, sequence in zip(accepted, sequences, strict=True) if sequence > before]
        except (ValueError, IndexError, TypeError, AttributeError):
            for reply in replies:
                parse_metadata(reply or b"")  # says which one is not JetStream's, or has none
            raise
        self._last_consumer_sequence = last.consumer_sequence
        self._last_stream_sequence = max(last.stream_sequence, self._last_stream_sequence or 0)
        self._listing_left -= count
        if not last.pending:
            self.is_caught_up = True
        if not (last.pending and self._listing_left > 0):
            self._is_listing = False
        self.heard()
        return accepted, count

    def _count_in_order(self, replies: list[bytes]) -> int:
        """Number of consecutive messages, up to the end of the listing, or of the messages that existed at the
        start."""
        first = self._last_consumer_sequence + 1
        if first == 1:
            self._tokens_after = 3 + max(replies[0].count(b".") - 10, 0)  # the longer form may have more in its end
        after, count = self._tokens_after, len(replies)
        if self._is_listing:
            count = min(count, self._listing_left)
        # A part within the counted messages needs no check of its pending counts, which stay above 0 until the last of
        # them. If messages were deleted in the meantime, the last message of a later part has the 0.
        may_end = not self.is_caught_up and first + count > self._waiting
        if self._is_listing or may_end:
            pending = [reply.rsplit(b".", after)[3] for reply in replies[:count]]
            count = pending.index(b"0") + 1 if b"0" in pending else count
        if are_consecutive(replies, first, after):
            return count
        sequences = [int(reply.rsplit(b".", after)[1]) for reply in replies]
        if sequences == list(range(first, first + len(replies))):
            return count
        return min(count, next(place for place, number in enumerate(sequences) if number != first + place))

    def came(self, sizes: list[int]) -> None:
        """Record the sizes in bytes of a listing's messages."""
        self._largest_bytes = max([self._largest_bytes, *sizes])

    def skipped(self) -> None:
        """Have the listing repeated with smaller requests: one of its messages may be lost for lack of bytes."""
        self._is_careful = True

    def listing_window(self, limits: PullLimits, max_payload_bytes: int) -> tuple[int, int]:
        """Number of messages of a listing to request ahead, and the expected size of each; 0 needs no bound of
        bytes."""
        assert limits.max_bytes is not None
        least = min(max(limits.max_bytes // max_payload_bytes, 1), limits.max_messages)
        if self._is_careful or not self._largest_bytes:
            return least, 0
        most = min(limits.max_bytes // (4 * self._largest_bytes), limits.max_messages)
        return (most, self._largest_bytes) if most > least else (least, 0)

    def idle(self) -> None:
        """End the listing: the server has nothing to send, so counted messages that did not arrive were deleted."""
        self.is_caught_up = True
        if self._last_stream_sequence is not None:
            self._is_listing = False

    def heard(self) -> None:
        """Record that the present consumer works."""
        self._barren = 0

    def lost(self) -> None:
        """Record that the present consumer has to be replaced."""
        self._barren += 1

    def pause_s(self) -> float:
        """Seconds to wait before the next consumer: 0, unless several in a row sent nothing."""
        return 0.0 if self._barren < 2 else RETRY.wait_s(self._barren - 1)

    def may_pass(self, error: JetSparkError) -> bool:
        """True if creating a consumer may succeed after this error."""
        if isinstance(error, StreamWentBack):
            self._attempts_behind += 1
            return self._attempts_behind < MAX_ATTEMPTS_BEHIND
        # Without any server left the client itself has given up, so that waiting is useless.
        return error.may_pass and not isinstance(error, NoServersAvailable)


class OrderedPuller(Puller[M]):
    """The requests of a throw-away consumer. Faults that another puller would wait out end this consumer."""

    def __init__(self, inbox: str, subject: str, reader: OrderedReader) -> None:
        super().__init__(inbox, subject)
        self._reader = reader
        self._has_heard = False
        self._last_reply = b""
        self.is_lost = False
        """The consumer is gone, or a message is missing: the buffer has its last messages."""
        self.is_idle = False
        """The server reported that it has nothing to send, and no message has arrived since."""

    def absorb(self, arrived: list[M], now: float, counted: tuple[int, int] = (0, 0)) -> None:
        if self.is_lost:
            return
        self.is_idle = False
        if self._reader.is_listing:
            arrived = self._up_to_a_skip(arrived)
            self._reader.came([size_bytes(each) for each in arrived if each.raw_reply is not None])
        self._last_reply = next((each.raw_reply for each in reversed(arrived) if each.raw_reply), self._last_reply)
        self._has_heard = self._has_heard or bool(self._last_reply)
        super().absorb(arrived, now, counted)

    def _up_to_a_skip(self, arrived: list[M]) -> list[M]:
        """The messages up to a status after which a message of the listing may be missing."""
        for place, each in enumerate(arrived, 1):
            status = each.status if each.raw_reply is None else None
            if status is None:
                continue
            is_too_large = status.description.startswith("Message Size Exceeds MaxBytes")
            if is_too_large:
                self._reader.skipped()
            if is_too_large or (status.code == 408 and status.description != "Requests Pending"):
                self.lose()
                return arrived[:place]
        return arrived

    def on_session(self, session: int) -> None:
        # Messages sent between the sessions are lost, and the consumer may be: replace it without waiting.
        if self._session not in (0, session):
            self.lose()
        super().on_session(session)

    def on_time(self, now: float) -> None:
        before = self.outstanding
        super().on_time(now)
        if self.outstanding < before:
            self.lose()

    def lose(self) -> None:
        self.is_lost = self.has_news = True

    def _on_heartbeat(self, message: M) -> None:
        self._has_heard = self.has_news = True
        self._reader.heard()
        self.is_idle = not self.buffer
        last = message.headers.get("Nats-Last-Consumer", "")
        received = parse_metadata(self._last_reply).consumer_sequence if self._last_reply else 0
        if is_count(last) and int(last) > received:
            self.lose()

    def _on_status(self, token: str, status: Status, message: M, now: float) -> None:
        text = status.description
        if status.code in (404, 408) or text.startswith(("Batch Completed", "Message Size Exceeds MaxBytes")):
            self._has_heard = True
        elif status.code == 503 and not self._has_heard and self._refusals < MAX_REFUSALS_AT_FIRST:
            pass
        elif status.code in (409, 503) and not text.startswith("Exceeded MaxRequest"):
            self.lose()  # it was deleted or lost its leader, or the server shuts down
            return
        super()._on_status(token, status, message, now)


class OrderedFlow(Flow[M]):
    """The messages of one throw-away consumer, while they are in order."""

    _puller: OrderedPuller[M]

    def __init__(
        self,
        puller: OrderedPuller[M],
        reader: OrderedReader,
        options: ConnectOptions,
        max_payload_bytes: int,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        limits = PullLimits(
            max_messages=min(MAX_MESSAGES, options.max_pending_messages),
            max_bytes=min(MAX_BYTES, options.max_pending_bytes),
            heartbeat_s=heartbeat_s,
        )
        super().__init__(puller, limits)
        self._reader = reader
        self._max_payload_bytes = max_payload_bytes
        self._is_alone = False
        self._is_bounded = True
        """Requests have a bound of bytes."""

    def step(self, now: float, session: int | None) -> Ask | Wait | int | None:
        """The next step of the reader; None when the consumer is lost and all its messages were handed out."""
        puller = self._puller
        if session is not None:
            puller.on_session(session)
        if puller.error is None:
            if session is None:
                return len(puller.buffer) or Wait(self.deadline)  # the next session wakes us
            if puller.is_lost:
                return len(puller.buffer) or None
            if self.deadline is not None and now >= self.deadline:
                return len(puller.buffer) or Wait(self.deadline)
            if puller.is_idle:
                self._reader.idle()
        step = super().step(now, session)
        if isinstance(step, Wait) and self.deadline is not None:
            return Wait(self.deadline if step.until is None else min(step.until, self.deadline))
        return step

    def take(self, count: int) -> list[M]:
        """Remove and return the next ``count`` buffered messages; fewer before a gap, none if the first is missing.

        The buffer must not grow during the call.
        """
        puller = self._puller
        buffer = puller.buffer
        messages = list(buffer)
        buffer.clear()
        if count < len(messages):
            buffer.extend(messages[count:])
            del messages[count:]
        accepted, looked_at = self._reader.accept(messages)
        if looked_at < count:
            buffer.extendleft(reversed(messages[looked_at:]))
        if not looked_at:  # the first one is not the next
            puller.lose()  # first, so that nothing is added any more
            buffer.clear()
        return accepted

    def on_too_large(self, max_bytes: int | None) -> None:
        self._is_alone = True  # the bound limits buffered messages; it must not refuse a single large one

    def _adapt(self, now: float) -> None:
        """Use the largest window: no other reader waits for these messages, and they are not acknowledged.

        It stays below the size at which every request reaches its bound of bytes: counting bytes takes time.
        """
        limits = self._limits
        assert limits.max_bytes is not None
        self._window, self._is_bounded = limits.max_messages, True
        if self._largest_bytes:
            most = limits.max_bytes // (BYTES_PARTS * self._largest_bytes)
            self._window = min(max(most, MIN_WINDOW), limits.max_messages)
        if self._reader.is_listing:
            self._window, expected_bytes = self._reader.listing_window(self._limits, self._max_payload_bytes)
            self._largest_bytes = max(self._largest_bytes, expected_bytes)
            self._is_bounded = expected_bytes > 0

    def _has_bytes(self) -> bool:
        return not self._is_bounded or super()._has_bytes()

    def _ask(self, batch: int, now: float) -> Ask:
        if self._is_bounded and not self._is_alone:
            return super()._ask(batch, now)
        batch = 1 if self._is_alone else batch
        self._is_alone = False
        expires_s, heartbeat_s = self._times()
        return self._puller.ask(self, batch, now=now, expires_s=expires_s, heartbeat_s=heartbeat_s)

    def _times(self) -> tuple[float, float | None]:
        if self._reader.is_listing or not self._reader.is_caught_up:
            return self._limits.expires_s, self._heartbeat_s  # a heartbeat shows that no more messages follow
        return super()._times()


class Patience:
    """The longest time without any progress; without limit if ``seconds`` is None."""

    def __init__(self, what: str, seconds: float | None, now: float) -> None:
        self._what, self._seconds = what, seconds
        self._give_up_at = -math.inf
        self.renew(now)

    def renew(self, now: float) -> None:
        """Start the time again after progress at this moment."""
        self._give_up_at = max(self._give_up_at, math.inf if self._seconds is None else now + self._seconds)

    @property
    def give_up_at(self) -> float | None:
        """When the time is over; None without a limit."""
        return None if self._seconds is None else self._give_up_at

    def left_s(self, now: float, longest_s: float) -> float:
        """Seconds to wait for the next event."""
        return max(min(longest_s, self._give_up_at - now), 0.0)

    def check(self, now: float, error: Exception | None = None) -> None:
        """Check the time after a failed attempt; ``error`` is the cause if known.

        Raises:
            RequestTimeout: The time is over.
        """
        if now < self._give_up_at:
            return
        if error is None or isinstance(error, RequestTimeout | ConnectionLost):
            raise RequestTimeout(self._what, self._seconds or 0.0) from error
        raise error


def heartbeat_for(timeout_s: float) -> float:
    """The heartbeat of a listing, short enough that an idle server reports before the timeout."""
    return min(HEARTBEAT_S, max(timeout_s / 3, MIN_HEARTBEAT_S))


def retry_pauses() -> Iterator[float]:
    """Endless seconds to wait before further attempts to create a consumer: a stream may come back."""
    return map(RETRY.wait_s, itertools.count(1))
