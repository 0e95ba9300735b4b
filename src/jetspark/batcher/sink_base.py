"""Sinks, but for what waits: how they are made and what they guarantee, the same on both drivers.

Each gives the steps of a write (:mod:`jetspark.batcher.effects`); a driver's class of that name runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, Unpack

from jetspark.batcher.circuit import Circuit, CircuitState
from jetspark.batcher.config import Clock, check_sink
from jetspark.batcher.dead_letters import DeadLetters
from jetspark.batcher.effects import SinkSteps
from jetspark.batcher.jetstream_sinks import (
    DEFAULT_MAX_MESSAGES,
    Atomic,
    Ingest,
    ItemMessages,
    ToMessage,
    Turn,
    check_publisher,
)
from jetspark.batcher.metered import Meter, Observer, SinkStats
from jetspark.batcher.rate_limit import TokenBucket
from jetspark.batcher.retry import IsRetryable, Retry, is_retryable
from jetspark.core.arguments import flag, function, unfit
from jetspark.core.connection import Connection
from jetspark.publish.fast_options import FastPublisherKeywords

__all__ = [
    "AtomicSinkBase",
    "CircuitBreakerSinkBase",
    "DeadLetterSinkBase",
    "FastIngestSinkBase",
    "MeteredSinkBase",
    "RateLimitSinkBase",
    "RetrySinkBase",
    "WrapperBase",
]

S = TypeVar("S")
D = TypeVar("D")
T = TypeVar("T")
J = TypeVar("J", bound=Any)
P = TypeVar("P")


class WrapperBase(Generic[S]):
    """A sink around another; a driver adds ``write``, which runs the steps."""

    _make_runner: Callable[[Any, Any], Any]

    def __init__(self, sink: S, own: IsRetryable | None, clock: Clock | None) -> None:
        check_sink("sink", sink)
        if own is not None:
            function("is_retryable", own, "a function of an error")
        if clock is not None and not callable(getattr(clock, "now", None)):
            raise unfit("clock", clock, "an object with a method now()")
        self._sink, self._own = sink, own
        self._runner = self._make_runner(sink, clock)

    def is_retryable(self, error: Exception) -> bool:
        """Whether the same write may succeed later; what is not known here the wrapped sink is asked."""
        return is_retryable(error, self._own, self._sink)


class RetrySinkBase(WrapperBase[S]):
    """Writes again what may succeed later, after waits that double, with jitter.

    It gives up, with the last error, after ``attempts`` writes, or when the next would begin more than ``max_total_s``
    after the first: give it less than the batcher's ``flush_timeout``. Each wait is between ``1 - jitter`` and 1 times
    ``first_wait_s``, twice that, and so on up to ``max_wait_s``. An error with ``retry_in_s``, such as
    :class:`~jetspark.CircuitOpen`, adds that.

    An error is final, and raised at once, if ``is_retryable`` says so; without it if the error says so (an attribute or
    method ``is_retryable``), or the sink (a method ``is_retryable(error)``). Else an error of JetSpark is final unless
    it ``may_pass``, and one of another library if it is a ``ValueError``, a ``TypeError`` or another mistake of a
    program, or a ``PermissionError``. All other errors of other libraries are tried again.

    The sink sees a batch more than once, and may have stored some of it when it failed: it must recognise items it has.
    """

    def __init__(
        self,
        sink: S,
        *,
        attempts: int = 5,
        first_wait_s: float = 0.1,
        max_wait_s: float = 5.0,
        max_total_s: float = 60.0,
        jitter: float = 0.5,
        is_retryable: IsRetryable | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(sink, is_retryable, clock)
        self._retry = Retry(
            attempts=attempts,
            first_wait_s=first_wait_s,
            max_wait_s=max_wait_s,
            max_total_s=max_total_s,
            jitter=jitter,
        )

    def _steps(self, batch: Sequence[Any]) -> SinkSteps:
        return self._retry.write(batch, self.is_retryable)


class CircuitBreakerSinkBase(WrapperBase[S]):
    """Leaves a sink alone that failed ``failures`` times in a row.

    For ``open_s`` seconds each write raises :class:`~jetspark.CircuitOpen` at once, which says when to come back. Then
    exactly one write is let through: if it succeeds all is as before, if not the time begins anew.

    Only errors that may pass count (see ``is_retryable`` of ``RetrySink``), and cancelled writes, which took too
    long for somebody: an item the sink will never take says nothing about the sink.
    """

    def __init__(
        self,
        sink: S,
        *,
        failures: int = 5,
        open_s: float = 10.0,
        is_retryable: IsRetryable | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(sink, is_retryable, clock)
        self._circuit = Circuit(failures=failures, open_s=open_s)

    @property
    def state(self) -> CircuitState:
        """``"closed"``, ``"open"`` or ``"half-open"``; an open one is closed by a write, not by time alone."""
        return self._circuit.state

    def _steps(self, batch: Sequence[Any]) -> SinkSteps:
        return self._circuit.write(batch, self.is_retryable)


class RateLimitSinkBase(WrapperBase[S]):
    """Passes on at most ``items_per_s`` items each second, and ``burst`` at once (by default those of one second).

    Writes wait for their turn. A batch larger than the burst goes through when the bucket is full, and those after it
    wait the longer. What failed has been passed on, so its tokens are spent; a write that is cancelled while it waits
    gives them back.
    """

    def __init__(self, sink: S, *, items_per_s: float, burst: int | None = None, clock: Clock | None = None) -> None:
        super().__init__(sink, None, clock)
        self._bucket = TokenBucket(items_per_s=items_per_s, burst=burst)

    def _steps(self, batch: Sequence[Any]) -> SinkSteps:
        return self._bucket.write(batch)


class DeadLetterSinkBase(WrapperBase[S], Generic[S, D]):
    """Has what failed written to another sink, as :class:`DeadLetter` records: item, error, time.

    The write succeeds when ``dead_letters`` took them. If that fails too, the first error is raised, with the second as
    its context. ``when`` says which errors this is for (by default all); others are raised.

    With ``split`` a batch that failed for good, by an error no retry would mend, is halved until the items at fault are
    found, and only they become dead letters; the others are written, in order. That takes up to ``2 n - 1`` writes for
    ``n`` items, and some items may be written more than once unless the sink stores all of a batch or nothing.
    """

    def __init__(
        self,
        sink: S,
        dead_letters: D,
        *,
        when: IsRetryable | None = None,
        split: bool = False,
        is_retryable: IsRetryable | None = None,
    ) -> None:
        super().__init__(sink, is_retryable, None)
        check_sink("dead_letters", dead_letters)
        if when is not None:
            function("when", when, "a function of an error")
        flag("split", split)
        self._runner.dead_letters = dead_letters
        self._dead_letters = DeadLetters(when=when, split=split)

    def _steps(self, batch: Sequence[Any]) -> SinkSteps:
        return self._dead_letters.write(batch, self.is_retryable)


class MeteredSinkBase(WrapperBase[S]):
    """Counts and times the writes of a sink: :meth:`stats`, and ``observe`` is told of each."""

    def __init__(self, sink: S, observe: Observer | None = None, *, clock: Clock | None = None) -> None:
        super().__init__(sink, None, clock)
        if observe is not None:
            function("observe", observe, "a function that takes a Written")
        self._runner.observe = observe
        self._meter = Meter()

    def stats(self) -> SinkStats:
        """What the sink was given, and what came of it, at one moment."""
        with self._runner.lock:
            return self._meter.stats()

    def _steps(self, batch: Sequence[Any]) -> SinkSteps:
        return self._meter.write(batch)


# ---- JetStream -------------------------------------------------------------------------------------------------------


def check_jetstream(js: object, method: str) -> None:
    """
    Raises:
        ConfigError: It has no such method.
    """
    if isinstance(js, type) or not callable(getattr(js, method, None)):
        raise unfit("js", js, "what nc.jetstream() returns")


class FastIngestSinkBase(Generic[J, P, T]):
    """Stores batches by fast ingest, over one publisher that is kept open; the stream needs ``allow_batched``.

    A write returns when every item of it is known to be stored. Writes that begin in order are stored in order, also
    several at a time; then the server's batch stays open from write to write, which is several times faster than one
    at a time: give the batcher ``max_concurrent_flushes=4`` or so. ``linger_s`` is how long the last write under way
    waits for another before it ends the server's batch to learn its fate: about a round trip.

    The publisher survives lost messages, reconnects, changes of leaders and restarts of the server, and sends again
    what is not known to be stored. With ``message_ids`` that stores nothing twice. What a *retry* writes again, after a
    write that was cancelled or failed midway, is recognised only by ids of the items' own: ``id_of(item)``. Both rely
    on the stream's duplicate window.

    After ``patience_s`` without progress the writes under way fail, and the next one begins with a new publisher. A
    message the stream refuses fails the write it is in with the server's error, and those after it with
    :class:`~jetspark.BatchCutShort`: nothing of them is stored, and they may be written again.

    Items are bytes that go to ``subject``, or whatever ``to_message`` makes a message of: ``(subject, data)`` or
    ``(subject, data, headers)``. ``options`` are those of :class:`~jetspark.FastPublisherOptions`.
    """

    _make_runner: Callable[[Any], Any]
    _make_turn: Callable[[], Turn]

    def __init__(
        self,
        js: J,
        subject: str | None = None,
        *,
        to_message: ToMessage | None = None,
        message_ids: bool = False,
        id_of: Callable[[T], str] | None = None,
        linger_s: float = 0.002,
        **options: Unpack[FastPublisherKeywords],
    ) -> None:
        check_jetstream(js, "fast_publisher")
        has_ids = flag("message_ids", message_ids) or id_of is not None
        check_publisher(has_ids, options)
        messages: ItemMessages[T] = ItemMessages(subject, to_message, id_of)

        def make() -> P:
            publisher: P = js.fast_publisher(message_ids=has_ids, **options)._enter()
            return publisher

        self._ingest = Ingest(messages, make, self._make_turn(), linger_s=linger_s)
        self._runner = self._make_runner(None)

    @property
    def publisher(self) -> P | None:
        """The present one, for its counters; None before the first write."""
        publisher: P | None = self._ingest.publisher
        return publisher


class AtomicSinkBase(Generic[J, T]):
    """Stores each batch all or none, as an atomic batch; the stream needs ``allow_atomic``.

    A batch of more than ``max_messages`` items, or of more than the server says that it allows, becomes several, each
    all or none, in order. When one fails after others were stored, :class:`~jetspark.BatchCutShort` says with
    ``stored`` how many items are. A commit that was not answered is resolved; while the stream does not answer, for up
    to ``doubt_s`` seconds. :class:`~jetspark.BatchInDoubt` says that this did not help.

    With ``id_of(item)``, or a header ``Nats-Msg-Id`` from ``to_message``, a retry stores nothing twice within the
    stream's duplicate window: what the stream knows stays, and the rest is stored all or none. To find out which that
    is costs an empty message for each item, which plain subscribers see and the stream does not store.

    Items are bytes that go to ``subject``, or whatever ``to_message`` makes a message of: ``(subject, data)`` or
    ``(subject, data, headers)``. ``timeout`` is that of :meth:`JetStream.atomic_batch`.
    """

    _make_runner: Callable[[Any], Any]
    _connection_of: Callable[[Any], Connection]
    _outcome_of: Callable[[Any], Any]

    def __init__(
        self,
        js: J,
        subject: str | None = None,
        *,
        to_message: ToMessage | None = None,
        id_of: Callable[[T], str] | None = None,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        doubt_s: float = 30.0,
        timeout: float | None = None,
    ) -> None:
        check_jetstream(js, "atomic_batch")
        messages: ItemMessages[T] = ItemMessages(subject, to_message, id_of)
        self._atomic = Atomic(
            js,
            self._connection_of,
            messages,
            self._outcome_of,
            max_messages=max_messages,
            timeout_s=timeout,
            doubt_s=doubt_s,
        )
        self._runner = self._make_runner(None)

    @property
    def max_messages(self) -> int:
        """Of an atomic batch, as far as known: what the server said, once it did."""
        return self._atomic.max_messages
