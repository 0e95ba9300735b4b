"""Reading a stream in order, without acknowledgements, for as long as one likes.

An ordered consumer is a throw-away: an unreplicated push consumer in the server's memory. When anything is amiss (a
message is missing, the heartbeat stops, the server or its leader changed), it is replaced by a new one that starts
right after the last message we have. So what comes out never skips, repeats or changes order, whatever happens to the
consumers underneath.

The driver subscribes to an inbox, creates a consumer with :meth:`OrderedReader.config`, and gives every message to
:meth:`OrderedReader.accept`, which says what it is.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jetspark.core.message import CoreMessage
from jetspark.core.subjects import validate_filter
from jetspark.errors import ConfigError, JetStreamUnavailable, RequestTimeout, ServerError
from jetspark.jetstream.acks import Metadata, parse_metadata
from jetspark.jetstream.config import ConsumerConfig, DeliverPolicy
from jetspark.jetstream.info import SequencePair
from jetspark.jetstream.push import answer_to

__all__ = ["CLEAN_UP_TIMEOUT_S", "SILENCE_S", "OrderedOptions", "OrderedReader", "Verdict", "retry_pauses", "will_pass"]

# The server says every so often that there is nothing to say; silence for longer means that nobody is there.
HEARTBEAT_S = 5.0
SILENCE_S = 2.5 * HEARTBEAT_S

# Should we die without a word, the server forgets the consumer after this.
INACTIVE_THRESHOLD_S = 60.0

# Deleting a consumer that is given up is a courtesy; nobody should have to wait for it.
CLEAN_UP_TIMEOUT_S = 1.0


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
        if self.start_sequence is not None and self.start_sequence < 1:
            raise ConfigError(f"start_sequence={self.start_sequence}: expected 1 or more")


class Verdict(enum.Enum):
    DELIVER = "the next message; its metadata is in `metadata`"
    IGNORE = "the server's own business, or a consumer's that was replaced"
    RESPOND = "the server asks whether we keep up: publish an empty answer to `respond_to`"
    RESTART = "something was lost: make a new consumer"


class OrderedReader:
    """The position in the stream, over all the consumers it takes."""

    def __init__(self, options: OrderedOptions) -> None:
        self._options = options
        self._last_stream_sequence: int | None = None
        """None until it is known where we are; 0 is a place: before the first message of an empty stream."""
        self._last_consumer_sequence = 0
        self.metadata: Metadata | None = None
        self.respond_to = ""

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
            idle_heartbeat_s=HEARTBEAT_S,
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
        if self._last_stream_sequence is not None:
            config = dataclasses.replace(
                config,
                deliver_policy="by_start_sequence",
                start_sequence=self._last_stream_sequence + 1,
                start_time=None,
            )
        return config

    def created(self, delivered: SequencePair) -> None:
        """A consumer exists; for ``new`` and ``last`` the server has decided where it begins.

        Remembering that keeps what is published before the first delivery, should this consumer be lost: another
        ``new`` one would begin after it.
        """
        has_a_place = self._options.deliver_policy in ("new", "last") and not delivered.consumer_sequence
        if self._last_stream_sequence is None and has_a_place:
            self._last_stream_sequence = delivered.stream_sequence

    def accept(self, message: CoreMessage) -> Verdict:
        status = message.status if message.raw_headers is not None else None
        if status is not None:
            return self._on_status(message, status.code)
        metadata = parse_metadata(message.raw_reply or b"")
        if metadata.consumer_sequence != self._last_consumer_sequence + 1:
            return Verdict.RESTART
        self._last_consumer_sequence = metadata.consumer_sequence
        self._last_stream_sequence = metadata.stream_sequence
        self.metadata = metadata
        return Verdict.DELIVER

    def _on_status(self, message: CoreMessage, code: int) -> Verdict:
        if code == 100:
            last = message.headers.get("Nats-Last-Consumer")
            if last is not None and int(last) != self._last_consumer_sequence:
                return Verdict.RESTART
            subject = answer_to(message)
            if subject is not None:
                self.respond_to = subject
                return Verdict.RESPOND
            return Verdict.IGNORE
        return Verdict.RESTART  # 409: the consumer was deleted, or its leader changed


def will_pass(error: Exception) -> bool:
    """Whether a consumer that could not be made may be made later: nobody is there, or nobody leads, right now."""
    return isinstance(error, RequestTimeout | JetStreamUnavailable) or (
        isinstance(error, ServerError) and error.code == 503
    )


def retry_pauses() -> Iterator[float]:
    """Seconds to wait before each further attempt to make a consumer, without end: a stream comes back."""
    pause_s = 0.05
    while True:
        yield pause_s
        pause_s = min(pause_s * 2, 1.0)
