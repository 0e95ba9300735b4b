"""Reading buckets in bulk: a table at one moment, every revision, or a range of changes. Nothing of Spark is in here.

A bucket that keeps one revision of each key forgets the old value when a new one is written, so a reader that takes its
time cannot come back for a moment that is over. Two ways lead to a table of one moment all the same:

* :func:`snapshot` reads the last message of each key and then, in order, whatever was written since, until the server
  says that nothing is left; later messages replace earlier ones of their key. At that moment the result is exact: the
  last message of each key exists, and had been there when the reading came by. It does not end within a transaction.
  This never fails, but holds the whole table, and one reader does it all.
* :func:`plan` fixes the moment, and the revision of each key at it, from the headers alone; :func:`read_wanted` then
  reads a part of those revisions, anywhere, at any time, and says which of them are gone. With a history of two or more
  none is, unless its key was written as often while it was read.

Everything is read through short-lived pull consumers without acknowledgements, in pieces. A consumer's own count tells
when something was lost on the way; then the next consumer begins behind the last good message.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jetspark.blocking import JetStream
from jetspark.blocking.consumer import Consumer
from jetspark.blocking.jetstream import Stream
from jetspark.blocking.stream_message import JetStreamMessage
from jetspark.errors import (
    ConfigError,
    ConnectionLost,
    ConsumerNotFound,
    JetSparkError,
    JetStreamUnavailable,
    MessageNotFound,
    RequestTimeout,
    StreamRecreated,
)
from jetspark.jetstream.config import ConsumerConfig
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.jetstream.kv import Operation, check_bucket, check_filter, operation_of, subject_of
from jetspark.jetstream.wire import time_text
from jetspark.spark.offsets import Head
from jetspark.spark.places import place, places

__all__ = [
    "Bucket",
    "ChangeColumns",
    "Plan",
    "Rows",
    "columns",
    "cut",
    "first_from",
    "is_within_transaction",
    "open_bucket",
    "operation",
    "place",
    "plan",
    "read_wanted",
    "scan",
    "snapshot",
    "split",
]

# Larger pieces are not faster, and this is half of what goes into one Arrow batch.
PIECE_MESSAGES = 5000
# A reader that is kept waiting by what it feeds makes a new consumer afterwards.
INACTIVE_S = 60.0
FETCH_S = 5.0
# How long reading goes on while nothing comes, unless the caller says otherwise. A server's restart takes seconds.
PATIENCE_S = 60.0
PAUSE_S = 0.25
LONGEST_PAUSE_S = 1.0
# How long a replica may be behind, or a transaction be half stored, before the table is taken as it is.
CATCH_UP_S = 2.0
CATCH_UP_PAUSE_S = 0.002

_logger = logging.getLogger("jetspark.spark")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket that is there, and the part of it that is asked for."""

    name: str
    stream: Stream
    prefix: str
    """In front of every key; a mirror has that of its origin."""
    subjects: tuple[str, ...]

    @property
    def is_filtered(self) -> bool:
        return self.subjects != (f"{self.prefix}>",)

    @property
    def info(self) -> StreamInfo:
        return self.stream.cached_info

    @property
    def history(self) -> int:
        return self.info.config.max_messages_per_subject or 1

    @property
    def created(self) -> str:
        """Tells this bucket from a later one of the same name."""
        return "" if self.info.created is None else time_text(self.info.created)

    def head(self) -> Head:
        state = self.info.state
        return Head(self.stream.name, self.created, max(1, state.first_sequence), state.last_sequence + 1)

    def check_is(self, created: str) -> None:
        """Whether it still is the bucket it was.

        Raises:
            StreamRecreated: It was deleted, and made again.
        """
        if self.created != created:
            raise StreamRecreated(self.stream.name, created, self.created)


def open_bucket(js: JetStream, bucket: str, keys: Sequence[str] = ()) -> Bucket:
    """Ask for the bucket.

    Raises:
        ConfigError: A filter that cannot be one.
        StreamNotFound: There is no such bucket.
    """
    stream = js.stream(f"KV_{check_bucket(bucket)}")
    mirror = stream.cached_info.config.mirror
    origin = bucket if mirror is None else mirror.name.removeprefix("KV_")
    subjects = tuple(subject_of(origin, check_filter(each)) for each in keys) or (subject_of(origin, ">"),)
    return Bucket(bucket, stream, subject_of(origin, ""), subjects)


# ---- what a message says: pure -------------------------------------------------------------------------------------


def operation(message: JetStreamMessage) -> Operation:
    raw = message.raw_headers
    # Most values have no headers, or only ours.
    if raw is None or (b"KV-Operation" not in raw and b"Nats-Marker-Reason" not in raw):
        return "put"
    return operation_of(message.headers)


def is_within_transaction(raw_headers: bytes | None) -> bool:
    """Whether more of an atomic batch comes behind this message: the last one of a batch says that it is."""
    raw = raw_headers or b""
    return b"\r\nNats-Batch-Sequence:" in raw and b"\r\nNats-Batch-Commit:" not in raw


def cut(messages: Sequence[JetStreamMessage], last: int) -> int:
    """How many of these, which are in order, are not beyond ``last``."""
    low, high = 0, len(messages)
    while low < high:
        middle = (low + high) // 2
        if place(messages[middle]).sequence <= last:
            low = middle + 1
        else:
            high = middle
    return low


def split(first: int, end: int, parts: int) -> list[tuple[int, int]]:
    """The numbers from ``first`` up to, not including, ``end``, in that many ranges of about one size, or fewer."""
    size = end - first
    parts = max(1, min(parts, size))
    edges = [first + size * index // parts for index in range(parts + 1)]
    return [(low, high) for low, high in itertools.pairwise(edges) if low < high]


def columns(messages: Sequence[JetStreamMessage], prefix_length: int, schema: pa.Schema) -> pa.RecordBatch:
    """The messages as rows; ``schema`` has some of the table's columns, in any order."""
    found = places(messages)
    arrays = []
    for column in schema:
        match column.name:
            case "key":
                values: Any = [message.subject[prefix_length:] for message in messages]
            case "value":
                values = [message.data for message in messages]
            case "revision":
                values = found.sequences
            case "created":
                values = found.times_us
            case _:
                values = [operation(message) for message in messages]
        arrays.append(values.cast(column.type) if isinstance(values, pa.Array) else pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class Rows:
    """Messages into Arrow batches."""

    # Spark's own batches have as many.
    BATCH_ROWS = 10_000

    def __init__(self, bucket: Bucket, schema: pa.Schema, *, with_deletes: bool) -> None:
        self._prefix_length = len(bucket.prefix)
        self._schema = schema
        self._with_deletes = with_deletes
        self.read = 0
        """Messages, those that became no rows included."""

    def of(self, pieces: Iterable[list[JetStreamMessage]]) -> Iterator[pa.RecordBatch]:
        for messages in pieces:
            self.read += len(messages)
            kept = messages
            if not self._with_deletes:
                kept = [message for message in messages if operation(message) == "put"]
            for at in range(0, len(kept), self.BATCH_ROWS):
                yield columns(kept[at : at + self.BATCH_ROWS], self._prefix_length, self._schema)


class ChangeColumns:
    """Messages of a range into rows, as :class:`~jetspark.spark.reading.RangeReader` wants them made."""

    def __init__(self, prefix: str, schema: pa.Schema, *, with_deletes: bool) -> None:
        self._prefix_length, self._schema, self._with_deletes = len(prefix), schema, with_deletes

    @property
    def needs_contents(self) -> bool:
        return "value" in self._schema.names

    def of_messages(self, stream: str, messages: Sequence[JetStreamMessage]) -> pa.RecordBatch:
        if not self._with_deletes:
            messages = [message for message in messages if operation(message) == "put"]
        if not messages:
            return pa.RecordBatch.from_pylist([], self._schema)
        return columns(messages, self._prefix_length, self._schema)

    def of_stored(self, stream: str, messages: Sequence[StoredMessage]) -> pa.RecordBatch:
        raise ConfigError(f"stream {stream!r}: a bucket has limits retention, and this one does not")


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Interrupted(Exception):
    """The consumer is gone, or something it sent is."""


def scan(
    bucket: Bucket, first: int, last: int, *, headers_only: bool = False, patience_s: float = PATIENCE_S
) -> Iterator[list[JetStreamMessage]]:
    """Every message there is from one sequence to another, both included, in order and in pieces.

    Raises:
        JetSparkError: For ``patience_s`` seconds nothing could be read.
    """
    patience = _Patience(patience_s)
    while first <= last:
        try:
            with _consumer(bucket, first, headers_only) as consumer:
                for messages in _pieces(consumer):
                    patience.renew()
                    reached = place(messages[-1]).sequence
                    first = reached + 1
                    if reached >= last:
                        messages = messages[: cut(messages, last)]
                    if messages:
                        yield messages
                        patience.renew()  # Spark may have taken its time
                    if reached >= last:
                        return
            # The consumer has nothing more; but it reads from a replica, and may be behind the leader.
            following = first_from(bucket, first)
            if following is None or following > last:
                return
            raise _Interrupted(f"revision {following} is not there yet")
        except (_Interrupted, *_PASSING) as error:
            patience.pause(error)


def snapshot(
    bucket: Bucket, *, headers_only: bool = False, patience_s: float = PATIENCE_S
) -> dict[str, JetStreamMessage]:
    """The last message of each key at one moment that is not before this call; marks of deleted keys included.

    Raises:
        JetSparkError: For ``patience_s`` seconds nothing could be read.
    """
    patience = _Patience(patience_s)
    while True:
        found: dict[str, JetStreamMessage] = {}
        try:
            moment = _Moment(bucket)
            with _consumer(bucket, None, headers_only) as consumer:
                for messages in _pieces(consumer, moment):
                    patience.renew()
                    for message in messages:
                        found[message.subject] = message
            return found
        except (_Interrupted, *_PASSING) as error:
            # Not from where it was: half of one moment and half of another are no moment.
            patience.pause(error)


def first_from(bucket: Bucket, sequence: int) -> int | None:
    """The first revision there is, from a sequence on. Asks the leader: a replica might skip what it has not yet."""
    found = [_asked(bucket, sequence=sequence, next_for=subject) for subject in bucket.subjects]
    return min((each for each in found if each is not None), default=None)


class _Moment:
    """Whether a table may end with a message: not before what was there, nor in the middle of a transaction."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # By the leader: the replica that is read may be behind.
        self._at_least = max(_asked(bucket, last_for=subject) or 0 for subject in bucket.subjects)
        self._seen_whole = 0

    def __call__(self, last: JetStreamMessage | None) -> bool:
        if last is None:
            return self._at_least == 0
        sequence = place(last).sequence
        if sequence < self._at_least or not is_within_transaction(last.raw_headers):
            return sequence >= self._at_least
        if not self._bucket.is_filtered:
            return False
        # The end of the transaction may be another key's. When it is there, everything is; so look once more.
        if self._seen_whole != sequence:
            self._seen_whole = sequence if self._is_whole() else 0
            return False
        return True

    def _is_whole(self) -> bool:
        last = self._bucket.stream.get_message(last_for=f"{self._bucket.prefix}>", direct=False)
        return "Nats-Batch-Sequence" not in last.headers or "Nats-Batch-Commit" in last.headers


def _asked(
    bucket: Bucket, *, sequence: int | None = None, next_for: str | None = None, last_for: str | None = None
) -> int | None:
    try:
        return bucket.stream.get_message(sequence, next_for=next_for, last_for=last_for, direct=False).sequence
    except MessageNotFound:
        return None


_PASSING = (ConnectionLost, ConsumerNotFound, JetStreamUnavailable, RequestTimeout)


@contextmanager
def _consumer(bucket: Bucket, start_sequence: int | None, headers_only: bool) -> Iterator[Consumer]:
    """One from a sequence on; without it, one that begins with the last message of each key."""
    consumer = bucket.stream.create_consumer(
        ConsumerConfig(
            deliver_policy="last_per_subject" if start_sequence is None else "by_start_sequence",
            start_sequence=start_sequence,
            filter_subjects=list(bucket.subjects),
            headers_only=headers_only,
            ack_policy="none",
            memory_storage=True,
            replicas=1,
            inactive_threshold_s=INACTIVE_S,
        )
    )
    try:
        yield consumer
    finally:
        try:
            consumer.close()
            consumer.delete()
        except JetSparkError:
            pass  # the server forgets it by itself


def _pieces(
    consumer: Consumer, is_moment: Callable[[JetStreamMessage | None], bool] | None = None
) -> Iterator[list[JetStreamMessage]]:
    """What the consumer has, until it has nothing more; and ``is_moment`` says of the last message that it may end so.

    For that it waits some seconds, and no longer: what it waits for may have been removed.
    """
    received = 0
    last: JetStreamMessage | None = None
    left = consumer.cached_info.pending
    give_up_at: float | None = None
    while True:
        if left:
            messages = consumer.fetch(min(left, PIECE_MESSAGES), timeout=FETCH_S)
            if messages:
                last = messages[-1]
                _, counted, _, left = place(last)
                if counted != received + len(messages):
                    raise _Interrupted(f"{counted - received - len(messages)} messages were lost on the way")
                received = counted
                yield messages
                continue
        # What is said with the messages is a count the server keeps up to date; this it looks at anew. It also tells
        # whether the last ones were lost.
        info = consumer.info()
        if info.delivered.consumer_sequence != received:
            raise _Interrupted(f"{info.delivered.consumer_sequence - received} messages were lost on the way")
        left = info.pending
        if left:
            continue
        if is_moment is None or is_moment(last):
            return
        give_up_at = give_up_at or time.monotonic() + CATCH_UP_S
        if time.monotonic() >= give_up_at:
            _logger.warning("reading %s ends early: what it waited for did not come", consumer.stream_name)
            return
        time.sleep(CATCH_UP_PAUSE_S)


class _Patience:
    """Pauses between attempts, until for too long none of them has brought anything."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.renew()

    def renew(self) -> None:
        self._since, self._pause_s = time.monotonic(), PAUSE_S

    def pause(self, error: Exception) -> None:
        if time.monotonic() - self._since >= self._patience_s:
            if isinstance(error, JetSparkError):
                raise error
            raise ConnectionLost(f"nothing could be read for {self._patience_s:g} s: {error}") from error
        _logger.debug("reading again: %s", error)
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


# ---- a moment, and who reads what of it ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Which revisions make up a table."""

    sequence: int
    """The moment: the bucket was at it."""
    wanted: array[int]
    """Revisions, in order."""
    doubtful: tuple[str, ...] = ()
    """Keys that may have had a value at that moment, which is gone."""

    def parts(self, number: int) -> list[array[int]]:
        """About equally many revisions for each of so many readers."""
        return [self.wanted[low:high] for low, high in split(0, len(self.wanted), number)]


def plan(
    bucket: Bucket, *, as_of: int | None = None, include_deletes: bool = False, patience_s: float = PATIENCE_S
) -> Plan:
    """Fix a moment, now or in the past, and the revision of each key at it.

    Raises:
        ConfigError: ``as_of`` has not been reached yet.
    """
    if as_of is None:
        present = snapshot(bucket, headers_only=True, patience_s=patience_s)
        wanted = [place(each).sequence for each in present.values() if include_deletes or operation(each) == "put"]
        moment = max((place(each).sequence for each in present.values()), default=0)
        return Plan(moment, array("Q", sorted(wanted)))
    state = bucket.stream.info().state
    if as_of > state.last_sequence:
        raise ConfigError(f"asOf={as_of}: the bucket is at {state.last_sequence}")
    last: dict[str, tuple[int, Operation]] = {}
    first = max(1, state.first_sequence)
    for messages in scan(bucket, first, as_of, headers_only=True, patience_s=patience_s):
        for message in messages:
            last[message.subject] = place(message).sequence, operation(message)
    wanted = [revision for revision, what in last.values() if include_deletes or what == "put"]
    return Plan(as_of, array("Q", sorted(wanted)), _doubtful(bucket, last))


def _doubtful(bucket: Bucket, known: dict[str, tuple[int, Operation]]) -> tuple[str, ...]:
    """Keys written after the moment, and of which the bucket keeps as many revisions as it may.

    Were there fewer, none would have been dropped: then such a key is younger than the moment.
    """
    doubtful = []
    for subject in bucket.subjects:
        counts = bucket.stream.info(subjects_filter=subject).state.subjects
        full = [each for each, kept in counts.items() if kept >= bucket.history and each not in known]
        doubtful += [each[len(bucket.prefix) :] for each in full]
    return tuple(sorted(set(doubtful)))


def read_wanted(
    bucket: Bucket, wanted: Sequence[int], *, patience_s: float = PATIENCE_S
) -> Iterator[list[JetStreamMessage]]:
    """The messages with these sequences, which are in order; those that are gone are left out."""
    if not wanted:
        return
    left = set(wanted)
    for messages in scan(bucket, wanted[0], wanted[-1], patience_s=patience_s):
        found = [message for message in messages if place(message).sequence in left]
        if found:
            yield found
