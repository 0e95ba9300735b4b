"""The batcher as a state machine: items in, batches out, each item accounted for once. Pure; time is an argument.

An accepted item has a position, counted from 0, and moves one way::

    add() ──> waiting ──poll()──> running: a Flush the driver writes ──counted as──> ok │ failed │ dropped
                 └────────────────── shutdown's timeout has passed ───────────────────────────────────┘

``waiting`` is the specification's input channel and buffer in one: its first ``max_batch_size`` items are the next
batch. At most ``slots`` flushes run. While a slot is free, a batch is written as soon as it is due. While all slots are
busy, up to ``queue_depth`` items wait. Beyond that a producer calls ``ask()`` for a ticket. Tickets are granted in
order, and a granted ticket reserves its places until it is redeemed or given back. So a producer that stops waiting
knows that its items were not accepted, and no producer starves.

The outcome of a flush is *counted* once, which updates the counters and calls the items' acks. The flush is *finished*
when the sink has returned, which frees its slot. Usually both happen at the same moment. A write that takes longer than
``flush_timeout`` is counted as failed before it is finished. When the timeout of a shutdown has passed, all remaining
items are counted as dropped, while running writes continue until the process ends.

Invariants: ``enqueued == taken + len(waiting)``; every position below ``taken`` is in exactly one flush;
``ok + failed + dropped`` never decreases and never exceeds the number of accepted items. ``room`` is the number of
items that may be added without a ticket: 0 when closed, and while a ticket waits.

This module has the states and the decisions. ``waiting_items`` has the sizes and acks of waiting items, ``fences`` the
items that manual flushes wait for.

Interrupts. A KeyboardInterrupt can be raised after any call that a thread makes, also in this module. So fields that
belong together are changed without a call in between, which no interrupt can split. All other state is derived from
them, and ``repair()`` recomputes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Generic, TypeVar

from jetspark.batcher.config import REASONS, BatcherConfig, Reason, Stats
from jetspark.batcher.fences import Fence, Fences
from jetspark.batcher.reports import WriteReport
from jetspark.batcher.waiting_items import Ack, WaitingAcks, WaitingSizes
from jetspark.errors import (
    BatcherBroken,
    BatcherClosed,
    BatcherTimeout,
    ConfigError,
    DroppedOnShutdown,
    FlushTimeout,
)

__all__ = ["BatchMachine", "Flush", "Ticket", "no_room", "not_drained", "not_flushed"]

T = TypeVar("T")


@dataclass(slots=True)
class Flush(Generic[T]):
    """One batch on its way to the sink."""

    items: list[T]
    """Owned by the sink, which may change the list; the machine does not read it again."""
    reason: Reason
    first: int = field(default=0, compare=False)
    """Position of the first item."""
    count: int = field(init=False, compare=False)
    began_at: float = field(default=0.0, compare=False)
    acks: Sequence[Ack] = field(default=(), compare=False)
    has_outcome: bool = field(default=False, compare=False)
    is_overdue: bool = field(default=False, compare=False)
    """The write exceeded ``flush_timeout``, and ``overdue()`` has returned it."""
    is_begun: bool = field(default=False, compare=False)
    """Set by the blocking driver when a writer thread has taken the flush."""

    def __post_init__(self) -> None:
        self.count = len(self.items)

    @property
    def end(self) -> int:
        return self.first + self.count


class Ticket:
    """A request for ``count`` places; ``wake`` is called when it is granted or refused for good."""

    __slots__ = ("count", "is_granted", "is_over", "wake")

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        self.count, self.wake = count, wake
        self.is_granted = False
        self.is_over = False
        """The ticket was redeemed, given back, or refused because the batcher closed."""


@dataclass(kw_only=True, eq=False, repr=False)
class BatchMachine(Generic[T]):
    """Decides which items are accepted and when they are flushed. The driver writes the flushes it returns.

    It has fewer than 30 attributes: from 30 on CPython 3.11 keeps an object's attributes in a dict of its own, and
    adding an item takes an eighth longer.
    """

    max_batch_size: int
    max_batch_delay: float
    queue_depth: int = 1024
    flush_timeout: float = 5.0
    max_batch_bytes: InitVar[int | None] = None
    size_of: InitVar[Callable[[T], int]] = len  # for items that have a length
    slots: int = 1
    name: str = "batcher"

    def __post_init__(self, max_batch_bytes: int | None, size_of: Callable[[T], int]) -> None:
        self._waiting: list[T] = []
        self._sizes: WaitingSizes[T] | None = (
            None if max_batch_bytes is None else WaitingSizes(max_batch_bytes, size_of)
        )
        self._acks = WaitingAcks()
        self._since = 0.0
        """The time when the present batch got its first item."""
        self._running: dict[int, Flush[T]] = {}
        """Keyed by the position of the first item, because two flushes may compare equal."""
        self._tickets: deque[Ticket] = deque()
        self._reserved = 0
        self._fences = Fences()
        self._manual_to = 0
        """Items before this position are due, because of a manual flush."""
        self.enqueued = 0
        """Number of accepted items, which is the position of the next one."""
        self._taken = self._ok = self._failed = self._dropped = self._rejected = self._late_ok = 0
        self._flushes: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.is_closed = False
        self.is_written_off = False
        """The timeout of a shutdown has passed, and the remaining items were counted as dropped."""
        self.failure: BaseException | None = None
        self.reports: list[WriteReport] = []
        """Reports of writes that the driver has to log and measure."""
        self.room = self.max_batch_size
        self.has_new_deadline = False
        """``add`` has begun a batch since the last call of ``next_deadline``."""

    @classmethod
    def of(cls, config: BatcherConfig[object]) -> BatchMachine[T]:
        return cls(
            max_batch_size=config.max_batch_size,
            max_batch_delay=config.max_batch_delay,
            queue_depth=config.queue_depth,
            flush_timeout=config.flush_timeout,
            max_batch_bytes=config.max_batch_bytes,
            size_of=config.size_of,
            slots=config.max_concurrent_flushes,
            name=config.name,
        )

    # ---- coming in -----------------------------------------------------------------------------------------------

    def add(self, item: T, now: float, ack: Ack | None = None) -> Flush[T] | None:
        """Accept an item, for which there must be room; returns a batch if one is due now.

        Raises:
            ConfigError: The item is larger than ``max_batch_bytes``. It was not accepted.
        """
        waiting = self._waiting
        if self._sizes is not None:
            self._weigh(self._sizes, (item,))
        if not waiting:
            self._since = now
            self.has_new_deadline = True
        if ack is not None:
            self._acks.append((self.enqueued, ack))
        waiting.append(item)
        self.enqueued += 1
        self.room -= 1
        if self.room > 0 and self._sizes is None:
            return None
        return self.poll(now)

    def append(self, item: T) -> bool:
        """The fast path of :meth:`add`; False if the item was not accepted and needs :meth:`add`.

        It covers an item that neither begins nor completes a batch, and so needs no time.
        """
        if self.room > 1 and self._waiting and self._sizes is None:
            self._waiting.append(item)
            self.enqueued += 1
            self.room -= 1
            return True
        return False

    def add_many(self, items: Sequence[T], now: float) -> Flush[T] | None:
        """Accept all items, for which there must be places: see :meth:`ask`. Poll again after a returned batch."""
        if self._sizes is not None:
            self._weigh(self._sizes, items)
        if not self._waiting:
            self._since = now
        self._waiting.extend(items)
        self.enqueued += len(items)
        return self.poll(now)

    def _weigh(self, sizes: WaitingSizes[T], items: Iterable[T]) -> None:
        """Record the sizes of all items, or raise before anything has changed."""
        try:
            sizes.add(items)
        except BaseException:
            self._serve_tickets()  # the places of the refused items are free again
            raise

    def check_open(self) -> None:
        """Raise if the batcher accepts no more items.

        Raises:
            BatcherClosed: ``close()`` was called.
        """
        self.check_running()
        if self.is_closed:
            raise BatcherClosed(self.name)

    def check_running(self) -> None:
        """Raise if the batcher has failed.

        Raises:
            BatcherBroken: The driver failed, and no more items are written.
        """
        if self.failure is not None:
            raise BatcherBroken(self.name) from self.failure

    def reject(self) -> None:
        """Count an item that ``try_add`` refused."""
        self._rejected += 1

    # ---- waiting for a place -------------------------------------------------------------------------------------

    def ask(self, count: int, wake: Callable[[], None]) -> Ticket:
        """Request places. The ticket may be granted at once; ``wake`` is called only for a later decision.

        Raises:
            BatcherClosed: The batcher accepts no more items.
            ConfigError: ``count`` exceeds ``queue_depth``.
        """
        ticket = Ticket(count, wake)
        self.ask_with(ticket)
        return ticket

    def ask_with(self, ticket: Ticket) -> None:
        """:meth:`ask` with the caller's own ticket, which an interrupted caller can still give back."""
        count = ticket.count
        self.check_open()
        # There is always one place, with or without a free slot.
        if count > max(self.queue_depth, 1):
            raise ConfigError(
                f"{count} items at once: expected at most queue_depth={self.queue_depth}; add them in parts, or make "
                "the queue deeper"
            )
        if not self._tickets and self._has_places(count):
            ticket.is_granted = True
            self._reserved += count
        else:
            self._tickets.append(ticket)
        self._count_room()

    def redeem(self, ticket: Ticket) -> None:
        """Turn a granted ticket into room; the caller must add its items before any other call.

        Raises:
            BatcherClosed: The batcher accepts no more items.
        """
        if ticket.is_granted:
            ticket.is_over = True
            self._reserved -= ticket.count
        self.check_open()
        assert ticket.is_granted
        self.room += ticket.count

    def give_back(self, ticket: Ticket) -> None:
        """Release a ticket that is not needed any more. May be called at any time, and repeatedly."""
        if ticket.is_over:
            return
        ticket.is_over = True
        if ticket.is_granted:
            self._reserved -= ticket.count
        elif ticket in self._tickets:
            self._tickets.remove(ticket)
        self._serve_tickets()

    def _has_places(self, count: int) -> bool:
        if len(self._running) < self.slots:
            # A full batch is flushed at once; the remaining items wait.
            return self._reserved + count <= max(self.queue_depth, self.max_batch_size - len(self._waiting))
        return len(self._waiting) + self._reserved + count <= self.queue_depth

    def _serve_tickets(self) -> None:
        while self._tickets and self._has_places(self._tickets[0].count):
            ticket = self._tickets[0]
            ticket.is_granted = True
            self._reserved += ticket.count
            ticket.wake()
            self._tickets.popleft()
        self._count_room()

    def _count_room(self) -> None:
        if self.is_closed or self._tickets:
            self.room = 0
        elif len(self._running) < self.slots:
            self.room = self.max_batch_size - len(self._waiting) - self._reserved
        else:
            self.room = self.queue_depth - len(self._waiting) - self._reserved

    # ---- going out -----------------------------------------------------------------------------------------------

    def poll(self, now: float) -> Flush[T] | None:
        """The next batch that is due. Call it until it returns None; then it grants waiting tickets."""
        reason = self._due(now)
        if reason is None:
            self._serve_tickets()
            return None
        return self._take(reason, now)

    def _due(self, now: float) -> Reason | None:
        waiting = self._waiting
        if not waiting or len(self._running) >= self.slots or self.failure is not None:
            return None
        if len(waiting) >= self.max_batch_size:
            return "size"
        if self._sizes is not None and self._sizes.is_full:
            return "bytes"
        if self.is_closed:
            return "shutdown"
        if self._taken < self._manual_to:
            return "manual"
        if now >= self._since + self.max_batch_delay:
            return "time"
        return None

    def _take(self, reason: Reason, now: float) -> Flush[T]:
        count = min(len(self._waiting), self.max_batch_size)
        size, sizes = 0, self._sizes
        if sizes is not None:
            fitting, size = sizes.fitting(count)
            if fitting < count:
                count, reason = fitting, "bytes"
        # The list itself becomes the batch and a new list is started, so the batch shares its list with no other code.
        items, rest = self._waiting, self._waiting[count:]
        if rest:
            items = items[:count]
        first = self._taken
        acks = self._acks.before(first + count) if self._acks else ()
        flush = Flush(items, reason, first, began_at=now, acks=acks, has_outcome=self.is_written_off)
        # No call from here to the end of the assignments: an interrupt finds all of them done, or none.
        self._waiting = rest
        self._taken = first + count
        self._running[first] = flush
        self._flushes[reason] += 1
        self._since = now
        if sizes is not None:
            del sizes.each[:count]
            sizes.total -= size
        self._acks.drop(len(acks))
        self._count_room()
        return flush

    def finish(self, flush: Flush[T], error: BaseException | None, now: float) -> None:
        """Record that the sink has returned or raised, which frees a slot. Poll afterwards."""
        del self._running[flush.first]
        if not flush.has_outcome:
            self._count_outcome(flush, error, now)
        elif error is None:
            self._late_ok += flush.count
        elif not flush.is_overdue:  # an overdue flush was reported already
            self.reports.append(WriteReport(flush.count, now - flush.began_at, error, is_counted=False))
        self._pass_fences()

    def _count_outcome(self, flush: Flush[T], error: BaseException | None, now: float) -> None:
        flush.has_outcome = True
        self.reports.append(WriteReport(flush.count, now - flush.began_at, error, is_counted=True))
        if error is None:
            self._ok += flush.count
        else:
            self._failed += flush.count
        self._announce(flush.first, flush.end, flush.acks, error)

    def _announce(self, first: int, end: int, acks: Iterable[Ack], error: BaseException | None) -> None:
        """Report the outcome of these items to fences and acks."""
        self._fences.count(first, end, error)
        for ack in acks:
            ack(error)

    # ---- time ----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """The next time at which to call ``poll`` and ``overdue``; None when neither is needed."""
        self.has_new_deadline = False
        times = [flush.began_at + self.flush_timeout for flush in self._running.values() if not flush.is_overdue]
        if self._waiting and len(self._running) < self.slots:
            times.append(self._since + self.max_batch_delay)
        return min(times, default=None)

    def overdue(self, now: float) -> list[Flush[T]]:
        """Running writes that exceeded ``flush_timeout``, each once; counts them as failed if not counted before."""
        late = [f for f in self._running.values() if not f.is_overdue and now >= f.began_at + self.flush_timeout]
        for flush in late:
            flush.is_overdue = True
            error = FlushTimeout(self.name, flush.count, self.flush_timeout)
            if not flush.has_outcome:
                self._count_outcome(flush, error, now)
            else:
                self.reports.append(WriteReport(flush.count, now - flush.began_at, error, is_counted=False))
        if late:
            self._pass_fences()
        return late

    # ---- fences --------------------------------------------------------------------------------------------------

    def fence(self, wake: Callable[[], None]) -> Fence:
        """Make all items accepted so far due. Poll afterwards, and wait for the fence unless it is done."""
        fence = Fence(self._completed_to(), self.enqueued, wake)
        self._manual_to = fence.end
        self._fences.add(fence)
        self._pass_fences()
        return fence

    def forget(self, fence: Fence) -> None:
        """Remove a fence whose caller no longer waits."""
        self._fences.forget(fence)

    def _completed_to(self) -> int:
        """The position before which the outcome of all items is counted."""
        if self.is_written_off:
            return self.enqueued
        return min((flush.first for flush in self._running.values() if not flush.has_outcome), default=self._taken)

    def _pass_fences(self) -> None:
        if self._fences:
            self._fences.complete(self._completed_to())

    # ---- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Accept no more items, make the waiting ones due, and refuse waiting tickets. Poll afterwards."""
        self.is_closed = True
        self.room = 0
        while self._tickets:
            ticket = self._tickets[0]
            ticket.is_over = True
            ticket.wake()
            self._tickets.popleft()

    @property
    def is_over(self) -> bool:
        """No further write will begin."""
        return self.is_drained or self.failure is not None

    @property
    def is_drained(self) -> bool:
        """The batcher is closed, and the sink has returned for all items."""
        return self.is_closed and not self._waiting and not self._running

    def write_off(self) -> int:
        """Count all remaining items as dropped, because the shutdown's timeout has passed; returns their number.

        Running writes may continue; their late successes count in ``late_ok`` only.
        """
        assert self.is_closed
        if self.is_written_off:
            return 0
        dropped = self._dropped + self.held
        self._dropped = dropped
        self.is_written_off = True
        self._fail_dropped()
        return dropped

    def _fail_dropped(self) -> None:
        for flush in self._running.values():
            if not flush.has_outcome:
                flush.has_outcome = True
                self._announce(flush.first, flush.end, flush.acks, DroppedOnShutdown(self.name, "being written"))
        acks = self._acks.before(self.enqueued)
        self._announce(self._taken, self.enqueued, acks, DroppedOnShutdown(self.name, "waiting"))
        self._acks.drop(len(acks))
        self._pass_fences()

    def fail(self, error: BaseException) -> None:
        """Stop after an error of the driver. Waiting items stay unwritten, and all waiting callers get the error."""
        if self.failure is not None:
            return
        self.failure = error
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        self.close()
        broken = BatcherBroken(self.name)
        broken.__cause__ = self.failure
        self._acks.fail_all(broken)
        self._fences.release()

    # ---- interrupts ------------------------------------------------------------------------------------------------

    def repair(self) -> list[Flush[T]]:
        """Recompute all derived state after a call was interrupted or raised.

        Returns the flushes that no writer has begun, in order. Poll afterwards.
        """
        self.enqueued = self._taken + len(self._waiting)
        if self._sizes is not None:
            self._sizes.trim(len(self._waiting))
        self._acks.trim(self._taken, self.enqueued)
        for ticket in [each for each in self._tickets if each.is_granted or each.is_over]:
            ticket.wake()
            self._tickets.remove(ticket)
        if self.is_written_off:
            self._fail_dropped()
        if self.failure is not None:
            self._fail_waiting()
        elif self.is_closed:
            self.close()
        self._pass_fences()
        self._serve_tickets()
        self.has_new_deadline = True
        return [flush for flush in self._running.values() if not flush.is_begun]

    # ---- counters ------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Accepted items without an outcome, counted from the flushes; must equal ``in_flight``."""
        running = sum(flush.count for flush in self._running.values() if not flush.has_outcome)
        return running + (0 if self.is_written_off else len(self._waiting))

    def stats(self) -> Stats:
        # Outcomes are read before enqueued: another thread may add items in between, but in_flight never gets negative.
        ok, failed, dropped, late_ok = self._ok, self._failed, self._dropped, self._late_ok
        enqueued = self.enqueued
        return Stats(
            enqueued=enqueued,
            flushed_ok=ok,
            flushed_fail=failed,
            dropped_on_shutdown=dropped,
            in_flight=enqueued - ok - failed - dropped,
            rejected=self._rejected,
            late_ok=late_ok,
            queue_depth=len(self._waiting),
            flushes=dict(self._flushes),
            is_closed=self.is_closed,
        )


# ---- errors of exceeded timeouts -------------------------------------------------------------------------------------


def no_room(name: str, count: int, timeout: float) -> BatcherTimeout:
    return BatcherTimeout(name, f"no room for {count} more in its queue", timeout)


def not_flushed(name: str, timeout: float) -> BatcherTimeout:
    return BatcherTimeout(name, "the sink has not written the flushed items", timeout)


def not_drained(name: str, timeout: float) -> BatcherTimeout:
    return BatcherTimeout(name, "its sink is not done", timeout)
