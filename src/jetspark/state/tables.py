"""Buckets as tables: the last value of each key at one moment, or the revisions of such a table.

A bucket with one revision of each key drops the old value when a new one is written, so a slow reader cannot return to
a moment in the past. There are two ways to read a consistent table:

* :func:`snapshot` reads the last message of each key and then, in order, all later writes, until the server reports
that
  none is left; later messages replace earlier ones of their key. At that moment the result is exact: it has the last
  message of each key. It does not end within a transaction. This never fails, but one reader holds the whole table.
* :func:`plan` fixes a moment and the revision of each key at that moment, from the headers alone.
  :meth:`BucketView.scan` reads any part of these revisions, anywhere and later; removed revisions are missing. With a
  history of two or more a revision is removed only if its key was written that often in the meantime.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetspark.core.headers import readable
from jetspark.core.step_runner import ReadClock, Sleep
from jetspark.errors import ConfigError, ConsumerNotFound, JetSparkError, MessageNotFound, StreamRecreated
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.info import StreamInfo
from jetspark.jetstream.kv import KVOperation, check_bucket, check_filter, operation_of, subject_of
from jetspark.jetstream.operations import Api, message_query
from jetspark.publish.steps import Connect, Procedure
from jetspark.state.deliveries import delivery
from jetspark.state.patience import Persistence
from jetspark.state.scan import SILENCE_S, Head, Interrupted, Pulling, Range, RangeScan, head_of

__all__ = [
    "BucketView",
    "TablePlan",
    "first_from",
    "is_within_transaction",
    "open_bucket",
    "operation",
    "plan",
    "snapshot",
    "split",
]

# Default for the longest time without messages. A restart of the server takes seconds.
PATIENCE_S = 60.0
# How long a replica may be behind, or a transaction be half stored, before the table is taken as it is.
CATCH_UP_S = 2.0
CATCH_UP_PAUSE_S = 0.002

_logger = logging.getLogger("jetspark.state")


@dataclass(frozen=True, slots=True)
class BucketView:
    """A bucket as it was when it was opened, and the part of it that is asked for."""

    name: str
    info: StreamInfo
    prefix: str
    """In front of every key; a mirror has that of its origin."""
    subjects: tuple[str, ...]

    @property
    def stream(self) -> str:
        return self.info.config.name

    @property
    def is_filtered(self) -> bool:
        return self.subjects != (f"{self.prefix}>",)

    @property
    def history(self) -> int:
        return self.info.config.max_messages_per_subject or 1

    @property
    def head(self) -> Head:
        return head_of(self.info)

    @property
    def created(self) -> str:
        """Tells this bucket from a later one of the same name."""
        return self.head.created

    def check_is(self, created: str) -> None:
        """Check that the bucket was not re-created.

        Raises:
            StreamRecreated: The bucket was deleted and created again.
        """
        if self.created != created:
            raise StreamRecreated(self.stream, created, self.created)

    def scan(self, first: int, last: int, *, wants_data: bool = True, patience_s: float = PATIENCE_S) -> RangeScan:
        """Every message there is from one revision to another, both included, in order.

        A bucket drops old revisions all the time, so none of them is promised.
        """
        part = Range(self.stream, self.created, first, last + 1, self.subjects, is_earliest=True)
        return RangeScan(part, wants_data=wants_data, timeout_s=patience_s)


def open_bucket(bucket: str, keys: Sequence[str] = ()) -> Procedure[BucketView]:
    """Open a bucket for reading.

    Raises:
        ConfigError: A filter is invalid.
        StreamNotFound: The bucket does not exist.
    """
    api: Api = yield Connect()
    info = yield from api.stream_info(f"KV_{check_bucket(bucket)}")
    mirror = info.config.mirror
    origin = bucket if mirror is None else mirror.name.removeprefix("KV_")
    subjects = tuple(subject_of(origin, check_filter(each)) for each in keys) or (subject_of(origin, ">"),)
    return BucketView(bucket, info, subject_of(origin, ""), subjects)


def first_from(bucket: BucketView, sequence: int) -> Procedure[int | None]:
    """The first existing revision from a sequence on. Asks the leader: a lagging replica might skip revisions."""
    api: Api = yield Connect()
    found = []
    for subject in bucket.subjects:
        query = message_query(sequence=sequence, next_for=subject)
        try:
            found.append((yield from api.get_message(bucket.stream, query, direct=False)).sequence)
        except MessageNotFound:
            continue
    return min(found, default=None)


# ---- what a message says: pure ---------------------------------------------------------------------------------------


def operation(message: AckableMessage) -> KVOperation:
    raw = message.raw_headers
    # Most values have no headers, or only ours.
    if raw is None or (b"KV-Operation" not in raw and b"Nats-Marker-Reason" not in raw):
        return "put"
    # The server stores any block; one publisher's mistake must not keep everybody from the table.
    return operation_of(readable(raw))


def is_within_transaction(raw_headers: bytes | None) -> bool:
    """True if more messages of an atomic batch follow this one; the last message of a batch is marked."""
    raw = raw_headers or b""
    return b"\r\nNats-Batch-Sequence:" in raw and b"\r\nNats-Batch-Commit:" not in raw


def split(first: int, end: int, parts: int) -> list[tuple[int, int]]:
    """The numbers from ``first`` up to, not including, ``end``, in that many ranges of about one size, or fewer."""
    size = end - first
    # More parts than numbers would be empty ones, and may be more than memory holds.
    parts = max(1, min(parts, size))
    edges = [first + size * index // parts for index in range(parts + 1)]
    return [(low, high) for low, high in itertools.pairwise(edges) if low < high]


# ---- the present -----------------------------------------------------------------------------------------------------


def snapshot(
    bucket: BucketView, *, wants_data: bool = True, patience_s: float = PATIENCE_S
) -> Procedure[dict[str, Any]]:
    """The last message of each subject at one moment that is not before this call; markers of deleted keys included.

    Raises:
        JetSparkError: For ``patience_s`` seconds nothing could be read.
    """
    persistence = Persistence(patience_s)
    yield from persistence.progress()
    while True:
        reason: Exception
        try:
            return (yield from _Snapshot(bucket, wants_data, persistence).read())
        except Interrupted as error:
            reason = error
        except JetSparkError as error:
            if not (error.may_pass or isinstance(error, ConsumerNotFound)):
                raise
            reason = error
        # Not from where it was: half of one moment and half of another are no moment.
        _logger.debug("bucket %s is read again: %s", bucket.name, reason)
        yield from persistence.pause(reason)


class _Snapshot:
    """One attempt at a table."""

    def __init__(self, bucket: BucketView, wants_data: bool, persistence: Persistence) -> None:
        self._bucket, self._wants_data, self._persistence = bucket, wants_data, persistence
        self._api: Api
        self._found: dict[str, AckableMessage] = {}
        self._last: AckableMessage | None = None
        self._at_least = 0
        """Sequence of the last message at the start of the read."""
        self._seen_whole = 0

    def read(self) -> Procedure[dict[str, AckableMessage]]:
        bucket = self._bucket
        self._api = yield Connect()
        # By the leader: the replica that is read may be behind.
        for subject in bucket.subjects:
            last = yield from self._last_for(subject)
            self._at_least = max(self._at_least, 0 if last is None else last.sequence)
        # Without the data however small it is: all of the table is held.
        pulling = yield from Pulling.open(
            self._api, bucket.stream, bucket.subjects, start=None, headers_only=not self._wants_data
        )
        try:
            yield from self._read_all(pulling)
        finally:
            yield from pulling.close()
        return self._found

    def _read_all(self, pulling: Pulling) -> Procedure[None]:
        heard_at: float = yield ReadClock()
        give_up_at: float | None = None
        left = pulling.info.pending
        while True:
            if left:
                pulling.sweep.left = left
                messages = yield from pulling.next()
                now: float = yield ReadClock()
                if messages:
                    left = self._accept(messages)
                    heard_at = now
                    yield from self._persistence.progress()
                    continue
                if not pulling.is_unavailable and now - heard_at < SILENCE_S:
                    continue
            # The count in deliveries is maintained incrementally by the server; this request computes it.
            info = yield from self._api.consumer_info(self._bucket.stream, pulling.info.name)
            now = yield ReadClock()
            left = info.pending
            under_way = info.delivered.consumer_sequence - pulling.received
            if under_way:
                if now - heard_at >= SILENCE_S:
                    raise Interrupted(f"{under_way} messages were lost on the way")
                left += under_way
            elif not left:
                if (yield from self._may_end()):
                    return
                # The awaited messages may have been removed, so the wait is short.
                give_up_at = give_up_at or now + CATCH_UP_S
                if now >= give_up_at:
                    _logger.warning("stream %s: read ends early; expected messages did not arrive", self._bucket.stream)
                    return
                yield Sleep(CATCH_UP_PAUSE_S)

    def _accept(self, messages: list[AckableMessage]) -> int:
        """How many are left behind these, as the last of them says."""
        found = self._found
        for message in messages:
            found[message.subject] = message
        self._last = messages[-1]
        return delivery(self._last).pending

    def _may_end(self) -> Procedure[bool]:
        """True if the table may end here: after all messages that existed at the start, and not in a transaction."""
        last = self._last
        if last is None:
            return self._at_least == 0
        sequence = delivery(last).sequence
        if sequence < self._at_least or not is_within_transaction(last.raw_headers):
            return sequence >= self._at_least
        if not self._bucket.is_filtered:
            return False
        # The end of the transaction may be another key's. When it is there, everything is; so look once more.
        if self._seen_whole != sequence:
            newest = yield from self._last_for(f"{self._bucket.prefix}>")
            headers = {} if newest is None else newest.headers
            is_whole = "Nats-Batch-Sequence" not in headers or "Nats-Batch-Commit" in headers
            self._seen_whole = sequence if is_whole else 0
            return False
        return True

    def _last_for(self, subject: str) -> Procedure[Any]:
        query = message_query(last_for=subject)
        try:
            return (yield from self._api.get_message(self._bucket.stream, query, direct=False))
        except MessageNotFound:
            return None


# ---- plans: a moment, and the revisions of each reader ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Which revisions make up a table."""

    sequence: int
    """The moment: the bucket was at it."""
    wanted: array[int]
    """Revisions, in order."""
    doubtful: tuple[str, ...] = ()
    """Keys that may have had a value at that moment, which is gone."""

    def parts(self, number: int) -> list[array[int]]:
        """About equally many revisions for each of this number of readers."""
        return [self.wanted[low:high] for low, high in split(0, len(self.wanted), number)]


def plan(
    bucket: BucketView, *, as_of: int | None = None, include_deletes: bool = False, patience_s: float = PATIENCE_S
) -> Procedure[TablePlan]:
    """Fix a moment, now or in the past, and the revision of each key at it.

    Raises:
        ConfigError: ``as_of`` has not been reached yet.
    """
    if as_of is None:
        present = yield from snapshot(bucket, wants_data=False, patience_s=patience_s)
        wanted = [delivery(each).sequence for each in present.values() if include_deletes or operation(each) == "put"]
        moment = max((delivery(each).sequence for each in present.values()), default=0)
        return TablePlan(moment, array("Q", sorted(wanted)))
    api: Api = yield Connect()
    state = (yield from api.stream_info(bucket.stream)).state
    if as_of > state.last_sequence:
        raise ConfigError(f"asOf={as_of}: the bucket is at {state.last_sequence}")
    last: dict[str, tuple[int, KVOperation]] = {}
    scan = bucket.scan(max(1, state.first_sequence), as_of, wants_data=False, patience_s=patience_s)
    try:
        while (messages := (yield from scan.next())) is not None:
            for message in messages:
                last[message.subject] = delivery(message).sequence, operation(message)
    finally:
        yield from scan.close()
    wanted = [revision for revision, what in last.values() if include_deletes or what == "put"]
    return TablePlan(as_of, array("Q", sorted(wanted)), (yield from _doubtful(bucket, last)))


def _doubtful(bucket: BucketView, known: dict[str, tuple[int, KVOperation]]) -> Procedure[tuple[str, ...]]:
    """Keys written after the moment, and of which the bucket keeps as many revisions as it may.

    Were there fewer, none would have been dropped: then such a key is younger than the moment.
    """
    api: Api = yield Connect()
    doubtful = []
    # As JSON has them, where bytes that are not UTF-8 are U+FFFD.
    seen = {
        each if each.isascii() else each.encode(errors="surrogateescape").decode(errors="replace") for each in known
    }
    for subject in bucket.subjects:
        counts = (yield from api.stream_info(bucket.stream, subject)).state.subjects
        full = [each for each, kept in counts.items() if kept >= bucket.history and each not in seen]
        doubtful += [each[len(bucket.prefix) :] for each in full]
    return tuple(sorted(set(doubtful)))
