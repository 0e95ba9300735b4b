"""Three publishers for the rows of a partition. Ids make it harmless to send rows again."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jetspark.blocking import JetStream
from jetspark.blocking.ack_future import AckFuture
from jetspark.core.headers import HeadersLike, decode
from jetspark.errors import (
    BatchTooLarge,
    ConfigError,
    DuplicateMessageId,
    JetSparkError,
    UsageError,
)
from jetspark.publish.outgoing import Item
from jetspark.spark.connections import PAUSE
from jetspark.spark.stream.writing import Rows
from jetspark.state.patience import Attempts

__all__ = ["AsyncPublishing", "AtomicPublishing", "FastPublishing", "Pace", "Publisher"]

_logger = logging.getLogger("jetspark.spark")

GIVING_UP_S = 5.0
"""Longest wait of a failed task for its outstanding acknowledgements; a healthy server answers within milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much may be under way, and for how long."""

    max_messages: int
    max_bytes: int
    patience_s: float
    """Longest time without progress; at most half the duplicate window, so that the stream recognises repeated ids."""


class Publisher(ABC):
    """How rows reach the stream. Leaving the block without an error means that all are stored."""

    def __init__(self, js: JetStream, pace: Pace) -> None:
        self._js, self._pace = js, pace

    @abstractmethod
    def send(self, rows: Rows) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...

    def give_up(self) -> None:
        """After a failure: wait for outstanding acknowledgements, because the next attempt reads the stored rows."""
        return

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.give_up()


class FastPublishing(Publisher):
    """Fast batches, one after the other; in order."""

    def __init__(self, js: JetStream, pace: Pace, *, has_ids: bool) -> None:
        super().__init__(js, pace)
        self._publisher = js.fast_publisher(
            # Without, it would make ids for messages that have none.
            message_ids=has_ids,
            max_pending_messages=pace.max_messages,
            max_pending_bytes=pace.max_bytes,
            patience_s=pace.patience_s,
            batch_timeout_s=min(15.0, pace.patience_s / 2),
            wait_for_stream_s=pace.patience_s,  # the sink has seen the stream
        )._enter()

    def send(self, rows: Rows) -> None:
        self._publisher.publish_many(rows.items())

    def finish(self) -> None:
        self._publisher.close()

    def give_up(self) -> None:
        try:
            self._publisher.close(timeout=GIVING_UP_S)  # what it was given may as well be stored
        except JetSparkError as error:
            _logger.info("%s", error)


class AsyncPublishing(Publisher):
    """An acknowledgement for each message. After an outage unacknowledged messages are sent again, after the others."""

    def __init__(self, js: JetStream, pace: Pace) -> None:
        super().__init__(js, pace)
        self._waiting: deque[tuple[Item, int, AckFuture]] = deque()
        """Message, how often it was sent before, acknowledgement; in the order of sending."""
        self._rounds = 0
        """How often the same message was sent again since one was acknowledged."""
        self._moved_at = time.monotonic()

    def send(self, rows: Rows) -> None:
        bound = self._pace.max_messages
        for item in rows.items():
            if len(self._waiting) >= bound:
                self._confirm_one()
            self._publish(item, 0)

    def finish(self) -> None:
        while self._waiting:
            self._confirm_one()

    def give_up(self) -> None:
        until = time.monotonic() + GIVING_UP_S
        for index, (_, _, future) in enumerate(self._waiting):
            left_s = until - time.monotonic()
            if left_s <= 0:
                _logger.info("%d messages of a task that has failed may still be stored", len(self._waiting) - index)
                return
            with contextlib.suppress(JetSparkError):
                future.result(left_s)

    def _publish(self, item: Item, repeats: int) -> None:
        if not self._waiting:
            self._moved_at = time.monotonic()
        self._waiting.append((item, repeats, self._js.publish_async(*item[:2], headers=_headers(item))))

    def _confirm_one(self) -> None:
        item, repeats, future = self._waiting.popleft()
        try:
            future.result(self._pace.patience_s)
        except JetSparkError as error:
            is_late = time.monotonic() - self._moved_at >= self._pace.patience_s
            if is_late or not error.may_pass:
                raise
            if repeats > self._rounds:  # a pause for all that failed together, not one for each
                self._rounds = repeats
                time.sleep(PAUSE.wait_s(repeats + 1))
            self._publish(item, repeats + 1)
        else:
            self._rounds = 0
            self._moved_at = time.monotonic()


class AtomicPublishing(Publisher):
    """All rows of the partition in one batch. They are counted before the first is sent."""

    def __init__(
        self,
        js: JetStream,
        pace: Pace,
        *,
        partition: int,
        limit: int,
        find_stored: Callable[[], set[bytes]],
        are_ids_ours: bool = False,
    ) -> None:
        """
        Args:
            find_stored: Reads the ids of the partition that the stream has.
            are_ids_ours: Only attempts at this partition send messages with these ids.
        """
        super().__init__(js, pace)
        self._partition, self._limit, self._find_stored = partition, limit, find_stored
        self._are_ids_ours = are_ids_ours
        self._kept: list[Rows] = []
        self._count = 0

    def send(self, rows: Rows) -> None:
        self._count += len(rows)
        if self._count > self._limit:
            raise self._too_large(self._limit, "maxAtomicMessages")
        self._kept.append(rows)

    def _too_large(self, limit: int, whose: str) -> ConfigError:
        return ConfigError(
            f"partition {self._partition} has more than {limit} rows ({whose}), and publishMode=atomic "
            "stores it whole or not at all: nothing of it is stored. Make more partitions with repartition(n), raise "
            "the limit (of the server too: jetstream{limits{batch{max_msgs}}}), or use publishMode=fast"
        )

    def finish(self) -> None:
        items = [item for rows in self._kept for item in rows.items()]
        patience = Attempts(self._pace.patience_s, PAUSE)
        patience.progress(time.monotonic())
        while items:
            try:
                self._store(items)
                return
            except BatchTooLarge as error:
                raise self._too_large(error.limit or self._limit, "the server's limit") from None
            except DuplicateMessageId as error:
                items = self._missing(error)
                continue
            except JetSparkError as error:
                # One whose commit was not answered is sent again: if it is stored after all, this one is refused.
                # A closed connection is final: all is sent over one, and Spark's next attempt has another.
                wait_s = patience.wait_s(time.monotonic()) if error.may_pass else None
                if wait_s is None:
                    raise
            time.sleep(wait_s)

    def _store(self, items: list[Item]) -> None:
        *others, last = items
        with self._js.atomic_batch() as batch:
            for item in others:
                batch.add(*item[:2], headers=_headers(item))
            batch.commit(*last[:2], headers=_headers(last))

    def _missing(self, error: DuplicateMessageId) -> list[Item]:
        """An unconfirmed attempt was committed, or another publisher stored a message with one of our ids."""
        known = self._find_stored()
        kept = [rows.but_for(known) for rows in self._kept]
        if sum(map(len, kept)) == sum(map(len, self._kept)):
            if self._are_ids_ours:
                self._confirm_each()
                return []
            raise UsageError(
                f"partition {self._partition}: the stream has a message with one of its ids from somebody "
                "else, and publishMode=atomic stores all rows or none; publishMode=fast would leave that row out"
            ) from error
        self._kept = kept
        return [item for rows in kept for item in rows.items()]

    def _confirm_each(self) -> None:
        """An earlier attempt was stored whole, and its rows cannot be found: they were consumed since, or the stream
        cannot be read. It knows their ids, one by one, and stores a row only if that attempt did not have it.
        """
        with AsyncPublishing(self._js, self._pace) as publisher:
            for rows in self._kept:
                publisher.send(rows)


def _headers(item: Item) -> HeadersLike | None:
    block = item[2] if len(item) == 3 else None
    return decode(block) if isinstance(block, bytes) else block
