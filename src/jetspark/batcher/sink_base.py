"""Bases of the sinks: arguments and guarantees, the same on both drivers.

Each returns the steps of a write (:mod:`jetspark.batcher.effects`); the driver's subclass performs them.
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
from jetspark.batcher.retry import IsRetryable, Retry, RetryKeywords, is_retryable
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
    """A sink around another one; a driver adds ``write``, which performs the steps."""

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
        """True if the same write may succeed later; by ``is_retryable``, the error, or the wrapped sink."""
        return is_retryable(error, self._own, self._sink)


class RetrySinkBase(WrapperBase[S]):
    """Repeats failed writes that may succeed later, after waits that double, with jitter.

    It gives up, with the last error, after ``attempts`` (5) writes, or when the next write would begin more than
    ``max_total_s`` (60) after the first: choose less than the batcher's ``flush_timeout``. The waits are
    ``first_wait_s`` (0.1), twice that, and so on up to ``max_wait_s`` (5), each multiplied by a random factor between
    ``1 - jitter`` and 1; ``jitter`` is 0.5 by default. An error with ``retry_in_s``, such as
    :class:`~jetspark.CircuitOpen`, adds that.

    A final error is raised at once. The first of these decides: the function ``is_retryable``, the error's own
    ``is_retryable`` (attribute or method), the sink's ``is_retryable(error)``. Otherwise an error of JetSpark is final
    unless it ``may_pass``. An error of another library is final if it is a ``ValueError``, a ``TypeError`` or another
    programming error, or a ``PermissionError``; all others are retried.

    The sink receives a batch more than once, and may have stored a part of it when it failed: it must recognise the
    items it has.
    """

    def __init__(
        self,
        sink: S,
        *,
        is_retryable: IsRetryable | None = None,
        clock: Clock | None = None,
        **options: Unpack[RetryKeywords],
    ) -> None:
        super().__init__(sink, is_retryable, clock)
        self._retry = Retry(**options)

    def _steps(self, batch: Sequence[Any]) -> SinkSteps:
        return self._retry.write(batch, self.is_retryable)


class CircuitBreakerSinkBase(WrapperBase[S]):
    """Stops writing to a sink that failed ``failures`` times in a row.

    For ``open_s`` seconds each write raises :class:`~jetspark.CircuitOpen` at once, which has the time until the next
    trial. Then exactly one write is let through: its success closes the circuit, its failure opens it again.

    Only retryable errors count (see ``is_retryable`` of ``RetrySink``), and cancelled writes, because they took too
    long. A final error does not count: an item that the sink can never accept says nothing about the sink.
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
    """Writes at most ``items_per_s`` items each second, and ``burst`` at once (by default those of one second).

    Writes wait for their turn, in order. A batch larger than the burst is written when the bucket is full, and later
    batches wait accordingly longer. A failed write has used its tokens; a write cancelled during its wait returns them.
    """

    def __init__(self, sink: S, *, items_per_s: float, burst: int | None = None, clock: Clock | None = None) -> None:
        super().__init__(sink, None, clock)
        self._bucket = TokenBucket(items_per_s=items_per_s, burst=burst)

    def _steps(self, batch: Sequence[Any]) -> SinkSteps:
        return self._bucket.write(batch)


class DeadLetterSinkBase(WrapperBase[S], Generic[S, D]):
    """Writes failed items to another sink, as :class:`DeadLetter` records: item, error, time.

    The write succeeds when ``dead_letters`` has accepted them. If that fails too, the first error is raised, with the
    second as its context. ``when`` selects the errors (by default all); others are raised.

    With ``split``, a batch that failed with a final error is halved until the items at fault are found. Only these
    become dead letters; the others are written, in order. That takes up to ``2 n - 1`` writes for ``n`` items, and
    some items may be written more than once unless the sink stores all of a batch or nothing.
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
    """Counts and times the writes of a sink: see :meth:`stats`. Calls ``observe`` after each write."""

    def __init__(self, sink: S, observe: Observer | None = None, *, clock: Clock | None = None) -> None:
        super().__init__(sink, None, clock)
        if observe is not None:
            function("observe", observe, "a function that takes a Written")
        self._runner.observe = observe
        self._meter = Meter()

    def stats(self) -> SinkStats:
        """The counters of all writes, at one moment."""
        with self._runner.lock:
            return self._meter.stats()

    def _steps(self, batch: Sequence[Any]) -> SinkSteps:
        return self._meter.write(batch)


# ---- JetStream -------------------------------------------------------------------------------------------------------


def check_jetstream(js: object, method: str) -> None:
    """Check the argument ``js`` of a sink.

    Raises:
        ConfigError: ``js`` has no such method.
    """
    if isinstance(js, type) or not callable(getattr(js, method, None)):
        raise unfit("js", js, "what nc.jetstream() returns")


class FastIngestSinkBase(Generic[J, P, T]):
    """Stores batches by fast ingest, over one publisher that is kept open; the stream needs ``allow_batched``.

    A write returns when all its items are known to be stored. Writes are stored in the order in which they begin, also
    when several run at a time. With several at a time the server's batch stays open between writes, which is several
    times faster: give the batcher ``max_concurrent_flushes=4``, for example. ``linger_s`` is the time the last running
    write waits for another one before it ends the server's batch to get the acknowledgement: about a round trip.

    The publisher survives lost messages, reconnects, changes of leaders and restarts of the server, and sends messages
    again that are not known to be stored. With ``message_ids`` these repetitions store nothing twice. A *retry* after a
    write that was cancelled or failed midway is recognised only by the items' own ids: ``id_of(item)``. Both rely on
    the stream's duplicate window.

    After ``patience_s`` without progress the running writes fail, and the next write starts with a new publisher. If
    the stream refuses a message, its write raises the server's error, and later writes raise
    :class:`~jetspark.BatchCutShort`: nothing of them is stored, and they may be repeated.

    Items are bytes for ``subject``, or any objects from which ``to_message`` makes ``(subject, data)`` or
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
        """The present publisher, for its counters; None before the first write."""
        publisher: P | None = self._ingest.publisher
        return publisher


class AtomicSinkBase(Generic[J, T]):
    """Stores each batch all or none, as an atomic batch; the stream needs ``allow_atomic``.

    A batch larger than ``max_messages``, or than the server's limit, is split into several, each stored all or none, in
    order. When one fails after others were stored, :class:`~jetspark.BatchCutShort` has the number of ``stored`` items.
    The outcome of an unanswered commit is resolved, for up to ``doubt_s`` seconds while the stream does not answer;
    after that :class:`~jetspark.BatchInDoubt` is raised.

    With ``id_of(item)``, or a header ``Nats-Msg-Id`` from ``to_message``, a retry stores nothing twice within the
    stream's duplicate window: items that the stream has stay, and the rest is stored all or none. To find the items
    that it has, the sink sends an empty message for each item, which plain subscribers see and the stream does not
    store.

    Items are bytes for ``subject``, or any objects from which ``to_message`` makes ``(subject, data)`` or
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
        """Most items of one atomic batch: the argument, lowered to the server's limit once that is known."""
        return self._atomic.max_messages
