"""The driver's side of a streaming query: which streams there are, what is new, and how far the next batch goes.

One instance drives a query. It lives as long as the query does, in a process of its own, and remembers what it last
heard of the streams. Spark ends the query when a call here raises, so what will pass does not raise:

- *First contact.* While no server was ever reached, a server that is not there is most likely a wrong address: a few
  seconds, and the query fails. A server that is there may be in an election: more patience.
- *After that.* Nothing heard is taken for nothing new, and the query goes on. No call waits long, because Spark cannot
  stop the query meanwhile.

Streams and buckets share all this. They say how to look (:meth:`Follower._look`), where a new query starts
(:meth:`Follower._starts_of`), and what else a batch depends on.
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

# Without a trigger Spark asks for the latest offset some eighty times a second. Ten requests a second are what an idle
# query may cost the server: it looks ten times, or less often where a look takes more requests.
POLL_S = 0.1
# Spark cannot stop the query during a call, so one call waits no longer for the next look.
MAX_WAIT_S = 1.0
# How long a query waits for a server that does not answer before it goes on with what it knows.
PATIENCE_S = 10.0


class Follower(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Everything of a stream reader that runs on the driver, save what is peculiar to streams or buckets."""

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

    # ---- what streams and buckets say of themselves ------------------------------------------------------------

    @abstractmethod
    def _look(self, js: JetStream) -> list[Head]:
        """The streams of the query, as they are now."""

    def _requests(self) -> int:
        """How many requests the next look takes."""
        return 1

    @abstractmethod
    def _starts_of(self, js: JetStream, heads: list[Head]) -> Offset:
        """Where a new query starts."""

    def _start_of_added(self, head: Head) -> StreamPosition:
        """Where a stream starts that the checkpoint does not have: at its first message, so that none is skipped."""
        return position_of(head, "earliest")

    @abstractmethod
    def _without(self, missing: dict[str, StreamPosition]) -> None:
        """The checkpoint has streams that the query no longer has.

        Raises:
            ConfigError: That is not allowed.
        """

    def _note_loss(self, begin: Offset, heads: list[Head]) -> None:
        """What is gone since the offset was noted. Nothing, unless a source says otherwise."""

    def _admit(self, begin: Offset, heads: list[Head], limits: Limits) -> Offset:
        return admit(begin, heads, limits, self._sizes, self._messages_from)

    def _messages_from(self, stream: str, sequence: int) -> int:
        return self._patiently(lambda js: count_from(js, stream, sequence), self._patience_s)

    @property
    def _patience_s(self) -> float:
        """For what a batch needs to know: nothing new is no answer where the query then ends."""
        return PATIENCE_S if self._target is None else START_PATIENCE_S

    # ---- what Spark calls --------------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        # The limit of bytes, if there are both, is kept by latestOffset itself: Spark knows one at a time.
        if self._own_limits.rows is not None:
            return ReadMaxRows(self._own_limits.rows)
        if self._own_limits.bytes is not None:
            return ReadMaxBytes(self._own_limits.bytes)
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks twice before the first batch, and `latest` must be the same both times.
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
        self._note_loss(begin, heads)
        try:
            end = self._admit(begin, heads, self._limits(limit))
        except JetSparkError as error:
            # What ends where it began would end a query that is to read what is there now.
            if not will_pass(error) or self._target is not None:
                raise
            _logger.warning("streams %s: nothing heard: %s", ", ".join(head.stream for head in heads), error)
            return start
        self._ends = {name: position.next for name, position in end.streams.items()}
        # Spark compares offsets by their text: what has not moved must be the very same.
        return start if end is known else replace(end, subjects=self._filters).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if not self._heads:
            return None
        streams = {head.stream: StreamPosition(head.created, head.next) for head in self._heads}
        behind = {head.stream: max(0, head.next - self._ends.get(head.stream, head.next)) for head in self._heads}
        size = sum(behind[head.stream] * head.bytes_per_sequence for head in self._heads)
        # Spark only shows this. It has no other place for what a source written in Python has to say of itself.
        waiting = {"messages": sum(behind.values()), "bytes": int(size)}
        return Offset(streams, subjects=self._filters).to_json() | {"behind": waiting}

    def commit(self, end: dict[str, Any]) -> None:
        pass  # the checkpoint is the one place where the query's position is kept

    def stop(self) -> None:
        pass  # the connection ends with the process

    def _check_repeated(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        """Check a batch of the checkpoint, which a restarted query plans before it asks for an offset.

        Tasks would fail for the same reasons, each of them four times.

        Raises:
            JetSparkError: The batch can never be read again.
        """
        if self._ends:
            return
        begin, last = Offset.from_json(start), Offset.from_json(end)
        heads = [head for head in self._heads if head.stream in last.streams]
        if not heads or any(last.streams[head.stream].next > head.next for head in heads):
            heads = self._ask(START_PATIENCE_S)  # the last look may be older than the offset
        heads = [head for head in heads if head.stream in begin.streams]
        check_unchanged(last, heads)
        self._note_loss(begin, heads)

    # ---- small steps -------------------------------------------------------------------------------------------

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
        self._heads = self._patiently(self._look, patience_s)
        self._heads_at = time.monotonic()
        self._poll_s = POLL_S * self._requests()
        return self._heads

    def _wait_for_news(self, begin: Offset) -> list[Head]:
        """The streams as they are now, or as of the last look while the next one is not due."""
        wait_s = self._heads_at + self._poll_s - time.monotonic()
        if wait_s > 0 and self._is_behind(begin):
            return self._heads
        if wait_s > 0:
            time.sleep(min(wait_s, MAX_WAIT_S))
        if wait_s > MAX_WAIT_S:
            return self._heads
        try:
            # Blocking for long keeps Spark from stopping the query.
            return self._ask(PATIENCE_S)
        except JetSparkError as error:
            if not will_pass(error) or self._heads_at == float("-inf"):
                raise
            # An error here would end the query. There is nothing new, and when the server is back there will be.
            names = ", ".join(head.stream for head in self._heads)
            _logger.warning("streams %s: nothing heard: %s", names, error)
            return [
                replace(head, next=begin.streams[head.stream].next)
                for head in self._heads
                if head.stream in begin.streams
            ]

    def _is_behind(self, begin: Offset) -> bool:
        places = begin.streams
        return any(head.stream not in places or head.next > places[head.stream].next for head in self._heads)

    def _with_the_same_streams(self, known: Offset, heads: list[Head]) -> Offset:
        """The offset with the streams that there are; itself, if it has them."""
        found = {head.stream for head in heads}
        missing = {name: position for name, position in known.streams.items() if name not in found}
        added = [head for head in heads if head.stream not in known.streams]
        if missing:
            self._without(missing)
        if not missing and not added:
            return known
        # Nothing of the batch that ended here is read again.
        streams = {name: position.at_rest() for name, position in known.streams.items() if name in found}
        for head in added:
            streams[head.stream] = start = self._start_of_added(head)
            _logger.info("stream %s: added, from sequence %d on", head.stream, start.next)
        return Offset(streams, known.step, known.subjects)


def count_from(js: JetStream, stream: str, sequence: int) -> int:
    """How many messages a stream has from a sequence on."""
    context = context_of(js)
    return context.run(messages_from(context.api, stream, sequence))


def check_loss(start: Offset, heads: Iterable[Head], *, is_allowed: bool) -> bool:
    """Whether something is gone already that was promised.

    Raises:
        DataLoss: It is, and that is not allowed.
    """
    is_lost = False
    for head in heads:
        position = start.streams[head.stream]
        if position.is_promised and position.next < min(head.whole_from, head.next):
            is_lost = True
            loss = DataLoss(head.stream, position.next, head.first, LOSS_REMEDY)
            if not is_allowed:
                raise loss
            _logger.warning("%s", loss)
    return is_lost
