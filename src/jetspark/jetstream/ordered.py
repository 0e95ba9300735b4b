"""Reading a stream in order, without acknowledgements, for as long as one likes.

An ordered consumer is a throw-away: an unreplicated push consumer in the server's memory. When anything is amiss (a
message is missing, the heartbeat stops, the server or its leader changed), it is replaced by a new one that starts
right after the last message we have. So what comes out never skips, repeats or changes order, whatever happens to the
consumers underneath.

One kind of beginning is not described by a sequence: ``last_per_subject`` sends the last message of each subject, in
the order of their sequences, then everything new. Until the first part, the *listing*, is over, a consumer that starts
"after the last message we have" would send the older messages between. So its successor is made with
``last_per_subject`` again, and what it sends at or below the last sequence we have is passed over: whatever is still
the last of its subject there was the last before, and was delivered. A subject that changed meanwhile comes with its
later message. The listing is over when a message says that nothing is pending, or when as many came as were counted
when the consumer was made: those counted have lower sequences than anything new, so they come first.

A sequence means something in one stream only. A stream that was deleted and made again has the name and none of the
positions: a consumer that starts after our last sequence would wait there for a message that is not meant. Hence every
successor is made first, and then the stream is asked when it was created: if that is still the same, the consumer is
of the stream we were reading.

The driver subscribes to an inbox, runs :meth:`OrderedReader.open`, and gives every message to
:meth:`OrderedReader.accept`, which says what it is.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jetspark.core.message import CoreMessage
from jetspark.core.numbers import UINT64, whole
from jetspark.core.subjects import validate_filter
from jetspark.errors import (
    ConfigError,
    ConnectionLost,
    JetSparkError,
    JetStreamUnavailable,
    NoServersAvailable,
    RequestTimeout,
    ServerError,
    StreamRecreated,
    StreamWentBack,
)
from jetspark.jetstream.acks import Metadata, parse_metadata
from jetspark.jetstream.config import ConsumerConfig, DeliverPolicy
from jetspark.jetstream.info import ConsumerInfo, SequencePair, StreamInfo
from jetspark.jetstream.operations import Api, Operation, Request
from jetspark.jetstream.push import answer_to

__all__ = [
    "CLEAN_UP_TIMEOUT_S",
    "SILENCE_S",
    "OrderedOptions",
    "OrderedReader",
    "Patience",
    "Verdict",
    "heartbeat_for",
    "retry_pauses",
    "will_pass",
]

# The server says every so often that there is nothing to say; silence for longer means that nobody is there.
HEARTBEAT_S = 5.0
SILENCE_S = 2.5 * HEARTBEAT_S

# Should we die without a word, the server forgets the consumer after this.
INACTIVE_THRESHOLD_S = 60.0

# Deleting a consumer that is given up is a courtesy; nobody should have to wait for it.
CLEAN_UP_TIMEOUT_S = 1.0

# The server takes heartbeats of 100 ms and more; below this they are a burden to a busy one.
MIN_HEARTBEAT_S = 0.25

# A replica that has just become leader may not have everything yet. With the pauses of `retry_pauses` this is 3.5 s.
MAX_ATTEMPTS_BEHIND = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedOptions:
    """Where an ordered consumer begins and what it reads."""

    filter_subjects: Sequence[str] = ()
    start_sequence: int | None = None
    start_time: datetime.datetime | None = None
    deliver_policy: DeliverPolicy | None = None
    """``all`` when nothing is said; ``new``, ``last``, ``last_per_subject`` are the others that need no value."""
    headers_only: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.filter_subjects, str):
            raise ConfigError(f"filter_subjects={self.filter_subjects!r}: expected a list of subjects")
        for subject in self.filter_subjects:
            validate_filter(subject)
        given = [name for name in ("start_sequence", "start_time", "deliver_policy") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' with '.join(given)}: expected one of them")
        if self.start_sequence is not None:
            whole("start_sequence", self.start_sequence, high=UINT64)


class Verdict(enum.Enum):
    DELIVER = "the next message; its metadata is in `metadata`"
    IGNORE = "a message that was delivered before"
    IDLE = "the server has nothing to send"
    RESPOND = "the server asks whether we keep up: publish an empty answer to `respond_to`"
    RESTART = "something was lost: make a new consumer"


class OrderedReader:
    """The position in the stream, over all the consumers it takes."""

    def __init__(self, options: OrderedOptions, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._options = options
        self._heartbeat_s = heartbeat_s
        self._last_stream_sequence: int | None = None
        """None until it is known where we are; 0 is a place: before the first message of an empty stream."""
        self._last_consumer_sequence = 0
        self._is_listing = options.deliver_policy == "last_per_subject"
        self._listing_left = 0
        """How many messages the present consumer has still to send before its listing is over for sure."""
        self._created: datetime.datetime | None = None
        """When the stream was created: which of all streams of its name it is."""
        self._attempts_behind = 0
        self.is_caught_up = options.deliver_policy == "new"
        """Everything that was there when the reading began was delivered."""
        self.metadata: Metadata | None = None
        self.respond_to = ""

    @property
    def has_begun(self) -> bool:
        """Whether the stream was found, at least."""
        return self._created is not None

    def open(self, api: Api, stream: str, deliver_subject: str) -> Operation[ConsumerInfo]:
        """Make the next consumer.

        Raises:
            StreamNotFound: There is no such stream, or no more.
            StreamRecreated: It is another stream than the one that was read.
            StreamWentBack: It ends before the last message that was read, and does so repeatedly.
        """
        is_first = self._created is None
        if is_first:
            self.check_stream((yield from api.stream_info(stream)))
        info = yield from api.create_consumer(stream, self.config(deliver_subject))
        if not is_first:
            try:
                self.check_stream((yield from api.stream_info(stream)))
            except JetSparkError:
                yield Request(f"{api.prefix}.CONSUMER.DELETE.{stream}.{info.name}", is_silent=True)
                raise
        self._attempts_behind = 0
        self.created(info.delivered, info.pending)
        return info

    def config(self, deliver_subject: str) -> ConsumerConfig:
        """For the next consumer. Its messages count from 1 again."""
        self._last_consumer_sequence = 0
        options = self._options
        filters = list(options.filter_subjects)
        if not filters and options.deliver_policy == "last_per_subject":
            filters = [">"]  # the server insists on one
        config = ConsumerConfig(
            deliver_subject=deliver_subject,
            ack_policy="none",
            max_deliver=1,
            flow_control=True,
            idle_heartbeat_s=self._heartbeat_s,
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
        """Compare the stream with the one that was read."""
        name, last = info.config.name, self._last_stream_sequence or 0
        if self._created is None:
            self._created = info.created
        elif info.created is not None and info.created != self._created:
            remedy = f"the last sequence read is {last}: read the new one from its beginning, or where you want to"
            raise StreamRecreated(name, self._created.isoformat(), info.created.isoformat(), remedy)
        elif info.state.last_sequence < last:
            raise StreamWentBack(name, last + 1, info.state.last_sequence + 1)

    def created(self, delivered: SequencePair, pending: int) -> None:
        """A consumer exists; for some beginnings the server has decided where that is.

        Remembering it keeps what is published before the first delivery, should this consumer be lost: another ``new``
        one would begin after it.
        """
        waiting = pending + delivered.consumer_sequence
        has_a_place = self._options.deliver_policy in ("new", "last")
        if self._is_listing:
            self._listing_left = waiting
            self._is_listing = bool(waiting)
            has_a_place = not waiting
        if self._last_stream_sequence is None and has_a_place and not delivered.consumer_sequence:
            self._last_stream_sequence = delivered.stream_sequence
        if not waiting:
            self.is_caught_up = True

    def accept(self, message: CoreMessage) -> Verdict:
        status = message.status if message.raw_headers is not None else None
        if status is not None:
            return self._on_status(message, status.code)
        metadata = parse_metadata(message.raw_reply or b"")
        if metadata.consumer_sequence != self._last_consumer_sequence + 1:
            return Verdict.RESTART
        self._last_consumer_sequence = metadata.consumer_sequence
        last = self._last_stream_sequence
        is_known = self._is_listing and last is not None and metadata.stream_sequence <= last
        if self._is_listing:
            self._listing_left -= 1
            self._is_listing = self._listing_left > 0 and metadata.pending > 0
        if not metadata.pending:
            self.is_caught_up = True
        if is_known:
            return Verdict.IGNORE
        self._last_stream_sequence = metadata.stream_sequence
        self.metadata = metadata
        return Verdict.DELIVER

    def _on_status(self, message: CoreMessage, code: int) -> Verdict:
        if code == 100:
            last = message.headers.get("Nats-Last-Consumer")
            if last is not None and last != str(self._last_consumer_sequence):
                return Verdict.RESTART
            subject = answer_to(message)
            if subject is not None:
                self.respond_to = subject
                return Verdict.RESPOND
            # What was counted as waiting may be gone: then no message says that nothing is pending.
            self.is_caught_up = True
            return Verdict.IDLE
        return Verdict.RESTART  # 409: the consumer was deleted, or its leader changed

    def may_pass(self, error: Exception) -> bool:
        """Whether it is worth while to try again after a consumer could not be made."""
        if isinstance(error, StreamWentBack):
            self._attempts_behind += 1
            return self._attempts_behind < MAX_ATTEMPTS_BEHIND
        if isinstance(error, ConnectionLost):
            return not isinstance(error, NoServersAvailable)
        return will_pass(error)

    def bounds(self) -> dict[str, Any]:
        """Of the next subscription, where they are not the client's own.

        A listing that is made again begins with what was delivered before: if that did not fit, the reader would never
        get beyond it. The server's flow control is the bound then: it sends at most 32 MiB ahead of our answers.
        """
        return {"max_pending_messages": 1 << 30, "max_pending_bytes": 1 << 40} if self._is_listing else {}


class Patience:
    """How long something may take without any progress; ``seconds`` None is for ever."""

    def __init__(self, what: str, seconds: float | None, now: float) -> None:
        self._what, self._seconds = what, seconds
        self.renew(now)

    def renew(self, now: float) -> None:
        """Something came."""
        self._give_up_at = math.inf if self._seconds is None else now + self._seconds

    def left_s(self, now: float, longest_s: float) -> float:
        """How long to wait for the next event."""
        return max(min(longest_s, self._give_up_at - now), 0.0)

    def check(self, now: float, error: Exception | None = None) -> None:
        """Nothing came; ``error`` is why, where that is known.

        Raises:
            RequestTimeout: It is time to give up.
        """
        if now < self._give_up_at:
            return
        if error is None or isinstance(error, RequestTimeout | ConnectionLost):
            raise RequestTimeout(self._what, self._seconds or 0.0) from error
        raise error


def will_pass(error: Exception) -> bool:
    """Whether a consumer that could not be made may be made later: nobody is there, or nobody leads, right now."""
    return isinstance(error, RequestTimeout | JetStreamUnavailable) or (
        isinstance(error, ServerError) and error.code == 503
    )


def heartbeat_for(timeout_s: float) -> float:
    """For a listing: the server's word that there is no more has to come before we give it up."""
    return min(HEARTBEAT_S, max(timeout_s / 3, MIN_HEARTBEAT_S))


def retry_pauses() -> Iterator[float]:
    """Seconds to wait before each further attempt to make a consumer, without end: a stream comes back."""
    pause_s = 0.05
    while True:
        yield pause_s
        pause_s = min(pause_s * 2, 1.0)
