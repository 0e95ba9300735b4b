"""The driver's side of a streaming query: its streams, their ends, and the end of the next batch.

One instance drives a query, in a process of its own, and keeps the last known state of the streams. Spark ends the
query when a call here raises, so errors that will pass are not raised:

- *First contact.* If no server was reached before, a missing server most likely means a wrong address: the query fails
  after a few seconds. A server that answers may be in an election and gets more time.
- *Later.* Without an answer the streams are taken as unchanged, and the query continues. Calls are short, because Spark
  cannot stop the query during a call.

Streams and buckets share this class. They implement how to read the heads of streams (:meth:`Follower._find_heads`),
where a new query starts (:meth:`Follower._starts_of`), and what else a batch depends on.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from jetspark.blocking import JetStream
from jetspark.blocking.context import context_of
from jetspark.errors import DataLoss, JetSparkError
from jetspark.spark.connections import PATIENCE_S as START_PATIENCE_S
from jetspark.spark.connections import patiently, will_pass
from jetspark.spark.offsets import (
    Limits,
    Offset,
    Sizes,
    StreamPosition,
    admit,
    check_filters,
    check_unchanged,
    position_of,
)
from jetspark.spark.options import LOSS_REMEDY, Connecting
from jetspark.state.scan import Head, messages_from

__all__ = ["Follower", "check_loss", "count_from"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.spark")

# Without a trigger Spark asks for the latest offset about eighty times a second. An idle query may send the server ten
# requests a second: ten looks, or fewer if a look takes several requests.
POLL_S = 0.1
# Longest wait of one call for the next look, because Spark cannot stop the query during a call.
MAX_WAIT_S = 1.0
# How long a running query waits for an answer before it takes the streams as unchanged.
PATIENCE_S = 10.0


class Follower(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver's part of a stream reader, shared by streams and buckets."""

    def __init__(
        self,
        options: Connecting,
        *,
        filters: tuple[str, ...],
        filters_option: str,
        limits: Limits,
        sizes: Sizes,
        accepts_other_filters: bool,
    ) -> None:
        self._connecting = options
        self._filters, self._filters_option = tuple(sorted(filters)), filters_option
        self._own_limits, self._sizes = limits, sizes
        self._accepts_other_filters = accepts_other_filters
        self._heads: list[Head] = []
        self._heads_at = float("-inf")
        self._poll_s = POLL_S
        self._initial: dict[str, Any] | None = None
        self._target: list[Head] | None = None
        self._is_reached = False
        self._ends: dict[str, int] = {}

    # ---- implemented by streams and buckets --------------------------------------------------------------------

    @abstractmethod
    def _find_heads(self, js: JetStream) -> list[Head]:
        """The present heads of the query's streams."""

    def _requests(self) -> int:
        """Number of requests of the next look."""
        return 1

    @abstractmethod
    def _starts_of(self, js: JetStream, heads: list[Head]) -> Offset:
        """The offset at which a new query starts."""

    def _start_of_added(self, head: Head) -> StreamPosition:
        """The start of a stream that the checkpoint lacks: its first message, so that none is skipped."""
        return position_of(head, "earliest")

    @abstractmethod
    def _without(self, missing: dict[str, StreamPosition]) -> None:
        """Handle streams of the checkpoint that the query no longer has.

        Raises:
            ConfigError: This query does not allow it.
        """

    def _handle_loss(self, begin: Offset, heads: list[Head]) -> None:
        """Handle messages that were removed since the offset was saved; by default there is nothing to do."""

    def _admit(self, begin: Offset, heads: list[Head], limits: Limits) -> Offset:
        return admit(begin, heads, limits, self._sizes, self._messages_from)

    def _messages_from(self, stream: str, sequence: int) -> int:
        return self._patiently(lambda js: count_from(js, stream, sequence), self._patience_s)

    @property
    def _patience_s(self) -> float:
        """How long to wait for an answer; longer with AvailableNow, where "unchanged" would end the query."""
        return PATIENCE_S if self._target is None else START_PATIENCE_S

    # ---- what Spark calls --------------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark knows one limit at a time; if both are set, latestOffset itself applies the limit of bytes.
        if self._own_limits.rows is not None:
            return ReadMaxRows(self._own_limits.rows)
        if self._own_limits.bytes is not None:
            return ReadMaxBytes(self._own_limits.bytes)
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        # Spark calls this twice before the first batch, and `latest` must be the same both times.
        if self._initial is None:
            heads = self._ask(START_PATIENCE_S)
            start = self._patiently(lambda js: self._starts_of(js, heads), START_PATIENCE_S)
            self._initial = replace(start, subjects=self._filters).to_json()
        return self._initial

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ask(START_PATIENCE_S)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        known = Offset.from_json(start)
        check_filters(known, self._filters, self._filters_option, is_accepted=self._accepts_other_filters)
        heads = self._target if self._target is not None else self._wait_for_news(known)
        begin = self._with_the_same_streams(known, heads)
        check_unchanged(begin, heads)
        self._handle_loss(begin, heads)
        try:
            end = self._admit(begin, heads, self._limits(limit))
        except JetSparkError as error:
            # With AvailableNow an unchanged offset would end the query before it has read everything.
            if not will_pass(error) or self._target is not None:
                raise
            names = ", ".join(head.stream for head in heads)
            _logger.warning("streams %s: no answer (%s); the next batch waits", names, error)
            return start
        self._ends = {name: position.next for name, position in end.streams.items()}
        # Spark compares offsets by their text, so an unchanged offset must be the same text.
        return start if end is known else replace(end, subjects=self._filters).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if not self._heads:
            return None
        streams = {head.stream: StreamPosition(head.created, head.next) for head in self._heads}
        behind = {head.stream: max(0, head.next - self._ends.get(head.stream, head.next)) for head in self._heads}
        size = sum(behind[head.stream] * head.bytes_per_sequence for head in self._heads)
        # Spark only shows this; a Python source has no other way to report metrics.
        waiting = {"messages": sum(behind.values()), "bytes": int(size)}
        return Offset(streams, subjects=self._filters).to_json() | {"behind": waiting}

    def commit(self, end: dict[str, Any]) -> None:
        pass  # the position of the query is only in its checkpoint

    def stop(self) -> None:
        pass  # the connection ends with the process

    def _check_repeated(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        """Check the batch of the checkpoint that a restarted query plans before it asks for an offset.

        Without this check tasks would fail for the same reasons, four times each.

        Raises:
            JetSparkError: The batch cannot be read again.
        """
        if self._ends:
            return
        begin, last = Offset.from_json(start), Offset.from_json(end)
        heads = [head for head in self._heads if head.stream in last.streams]
        if not heads or any(last.streams[head.stream].next > head.next for head in heads):
            heads = self._ask(START_PATIENCE_S)  # the last look may be older than the offset
        heads = [head for head in heads if head.stream in begin.streams]
        check_unchanged(last, heads)
        self._handle_loss(begin, heads)

    def _limits(self, limit: ReadLimit) -> Limits:
        own = self._own_limits
        if isinstance(limit, ReadAllAvailable):
            return Limits()
        if isinstance(limit, ReadMaxRows):
            return Limits(limit.max_rows, own.bytes)
        if isinstance(limit, ReadMaxBytes):
            return Limits(own.rows, limit.max_bytes)
        return own

    def _patiently(self, ask: Callable[[JetStream], T], patience_s: float) -> T:
        found = patiently(self._connecting, ask, patience_s=patience_s, is_first_contact=not self._is_reached)
        self._is_reached = True
        return found

    def _ask(self, patience_s: float) -> list[Head]:
        self._heads = self._patiently(self._find_heads, patience_s)
        self._heads_at = time.monotonic()
        self._poll_s = POLL_S * self._requests()
        return self._heads

    def _wait_for_news(self, begin: Offset) -> list[Head]:
        """The present heads, or those of the last look while the next one is not due."""
        wait_s = self._heads_at + self._poll_s - time.monotonic()
        if wait_s > 0 and self._is_behind(begin):
            return self._heads
        if wait_s > 0:
            time.sleep(min(wait_s, MAX_WAIT_S))
        if wait_s > MAX_WAIT_S:
            return self._heads
        try:
            # Bounded: Spark cannot stop the query during this call.
            return self._ask(PATIENCE_S)
        except JetSparkError as error:
            if not will_pass(error) or self._heads_at == float("-inf"):
                raise
            # Raising would end the query. The streams are taken as unchanged until the server answers.
            names = ", ".join(head.stream for head in self._heads)
            _logger.warning("streams %s: no answer (%s); asking again at the next trigger", names, error)
            return [
                replace(head, next=begin.streams[head.stream].next)
                for head in self._heads
                if head.stream in begin.streams
            ]

    def _is_behind(self, begin: Offset) -> bool:
        known = begin.streams
        return any(head.stream not in known or head.next > known[head.stream].next for head in self._heads)

    def _with_the_same_streams(self, known: Offset, heads: list[Head]) -> Offset:
        """The offset with exactly the existing streams; the same object if nothing changes."""
        found = {head.stream for head in heads}
        missing = {name: position for name, position in known.streams.items() if name not in found}
        added = [head for head in heads if head.stream not in known.streams]
        if missing:
            self._without(missing)
        if not missing and not added:
            return known
        # The batch that ended here is not read again.
        streams = {name: position.at_rest() for name, position in known.streams.items() if name in found}
        for head in added:
            streams[head.stream] = start = self._start_of_added(head)
            _logger.info("stream %s: added to the query; reading from sequence %d", head.stream, start.next)
        return Offset(streams, known.step, known.subjects)


def count_from(js: JetStream, stream: str, sequence: int) -> int:
    """Number of messages in a stream from a sequence on."""
    context = context_of(js)
    return context.run(messages_from(context.api, stream, sequence))


def check_loss(start: Offset, heads: Iterable[Head], *, is_allowed: bool) -> bool:
    """True if messages after the offset were removed before they were read.

    Raises:
        DataLoss: Messages were removed, and ``is_allowed`` is false.
    """
    is_lost = False
    for head in heads:
        position = start.streams[head.stream]
        gap = head.first_loss(position.next, head.next)
        # A message that the stream removes before its first read is not lost; a message in a gap behind the start is.
        if gap is not None and (position.is_promised or gap.start > position.next):
            is_lost = True
            loss = DataLoss(head.stream, gap.start, gap.stop, LOSS_REMEDY)
            if not is_allowed:
                raise loss
            _logger.warning("%s", loss)
    return is_lost
