"""The batcher as a state machine: items in, batches out, each item accounted for once. Pure; time is an argument.

An accepted item has a position, counted from 0, and moves one way::

    add() ──> waiting ──poll()──> running: a Flush the driver writes ──settled as──> ok │ failed │ dropped
                 └────────────────── shutdown's time is over ─────────────────────────────────────────┘

``waiting`` is the specification's input channel and buffer in one: its first ``max_batch_size`` items are the batch
that is being gathered. At most ``slots`` flushes run. While one is free a batch goes as soon as it is due; while none
is, up to ``queue_depth`` items wait, and more have to be asked for: ``ask()`` gives a ticket, tickets are granted in
order, and a granted one is a place kept free until it is redeemed or given back. So a producer that stops waiting, for
whatever reason, knows that its items were not accepted, and nobody is overtaken for ever.

A flush is *settled* once, which counts its items and tells their acks, and *finished* when the sink has returned,
which frees its slot. Mostly that is one moment. A write that takes longer than ``flush_timeout`` is settled as failed
before it is finished, and when the time of a shutdown is over everything is settled as dropped, while the writing goes
on as long as the process does.

Invariants: ``enqueued == taken + len(waiting)``; every position below ``taken`` is in exactly one flush;
``ok + failed + dropped`` never goes back and never exceeds what was accepted. ``room`` is how many items may be added
without asking: it is 0 when closed, and while somebody waits for a place.

Here are the states and the decisions. ``waiting`` has what is known of waiting items beside the items themselves (their
sizes, who is to be told), ``fences`` what manual flushes wait for.

Interrupts. A thread may meet a KeyboardInterrupt after any call that it makes, also in here. So what belongs together
is changed without a call between, where nothing can come between; the rest follows from that, and ``repair()`` brings
it up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
    """The sink's own, which it may change; so nothing is read from it again."""
    reason: Reason
    first: int = field(default=0, compare=False)
    """Position of the first item."""
    count: int = field(init=False, compare=False)
    began_at: float = field(default=0.0, compare=False)
    acks: Sequence[Ack] = field(default=(), compare=False)
    has_outcome: bool = field(default=False, compare=False)
    is_overdue: bool = field(default=False, compare=False)
    """It took too long, and its driver was told."""
    is_begun: bool = field(default=False, compare=False)
    """A driver that hands flushes to others sets this when one has it."""

    def __post_init__(self) -> None:
        self.count = len(self.items)

    @property
    def end(self) -> int:
        return self.first + self.count


class Ticket:
    """A request for ``count`` places; ``wake`` is called when it is granted, or never will be."""

    __slots__ = ("count", "is_granted", "is_over", "wake")

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        self.count, self.wake = count, wake
        self.is_granted = False
        self.is_over = False
        """Redeemed or given back."""


class BatchMachine(Generic[T]):
    """Decides what is accepted, and which items go when. The driver writes the flushes it returns."""

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_batch_delay: float,
        queue_depth: int = 1024,
        flush_timeout: float = 5.0,
        max_batch_bytes: int | None = None,
        size_of: Callable[[T], int] = len,  # type: ignore[assignment]  # of whatever has a length
        slots: int = 1,
        name: str = "batcher",
    ) -> None:
        self.name = name
        self.queue_depth = queue_depth
        self.flush_timeout = flush_timeout
        self._max_items, self._delay = max_batch_size, max_batch_delay
        self._slots = slots
        self._waiting: list[T] = []
        self._sizes: WaitingSizes[T] | None = (
            None if max_batch_bytes is None else WaitingSizes(max_batch_bytes, size_of)
        )
        self._acks = WaitingAcks()
        self._since = 0.0
        """When the first waiting item came to be the first of the present batch."""
        self._running: dict[int, Flush[T]] = {}
        """By the position of their first item: two flushes may well be equal."""
        self._tickets: deque[Ticket] = deque()
        self._reserved = 0
        self._fences = Fences()
        self._manual_to = 0
        """Items before this position are due, because somebody asked."""
        self.enqueued = 0
        """Accepted so far: the position of the next item."""
        self._taken = self._ok = self._failed = self._dropped = self._rejected = self._late_ok = 0
        self._flushes: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.is_closed = False
        self.is_written_off = False
        """The time of a shutdown is over: whatever is left was settled as dropped."""
        self.failure: BaseException | None = None
        self.reports: list[WriteReport] = []
        """Of writes, for the driver to take and tell."""
        self.room = max_batch_size
        self.has_new_deadline = False
        """A batch was begun by ``add`` since ``next_deadline`` was asked for the last time."""

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
        """Accept an item, for which there must be room; returns a batch if one has to go now.

        Raises:
            ConfigError: The item alone is larger than a batch may be. It was not accepted.
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
        """:meth:`add` for most items: whether it was accepted without a look at the clock.

        The batch has begun, and does not end with this item.
        """
        if self.room > 1 and self._waiting and self._sizes is None:
            self._waiting.append(item)
            self.enqueued += 1
            self.room -= 1
            return True
        return False

    def add_many(self, items: Sequence[T], now: float) -> Flush[T] | None:
        """Accept all of them, for which there must be places: see :meth:`ask`. Poll again after a batch."""
        if self._sizes is not None:
            self._weigh(self._sizes, items)
        if not self._waiting:
            self._since = now
        self._waiting.extend(items)
        self.enqueued += len(items)
        return self.poll(now)

    def _weigh(self, sizes: WaitingSizes[T], items: Iterable[T]) -> None:
        """All or none: raises before anything has changed."""
        try:
            sizes.add(items)
        except BaseException:
            self._serve_tickets()  # the places that were asked for are free again
            raise

    def check_open(self) -> None:
        """
        Raises:
            BatcherClosed: Nothing more is accepted.
        """
        self.check_running()
        if self.is_closed:
            raise BatcherClosed(self.name)

    def check_running(self) -> None:
        """
        Raises:
            BatcherBroken: Nothing is written any more.
        """
        if self.failure is not None:
            raise BatcherBroken(self.name) from self.failure

    def reject(self) -> None:
        """An item was not accepted, and nobody will wait for it to be."""
        self._rejected += 1

    # ---- waiting for a place -------------------------------------------------------------------------------------

    def ask(self, count: int, wake: Callable[[], None]) -> Ticket:
        """Ask for places. The ticket may be granted at once; ``wake`` is called only if that happens later.

        Raises:
            BatcherClosed: Nothing more is accepted.
            ConfigError: The queue will never have that many places.
        """
        ticket = Ticket(count, wake)
        self.ask_with(ticket)
        return ticket

    def ask_with(self, ticket: Ticket) -> None:
        """:meth:`ask` for those who may be interrupted before they have what it returns."""
        count = ticket.count
        self.check_open()
        # One place there always is, with a free slot or without.
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
        """Turn a granted ticket into room; the items have to be added in the same breath.

        Raises:
            BatcherClosed: Nothing more is accepted.
        """
        if ticket.is_granted:
            ticket.is_over = True
            self._reserved -= ticket.count
        self.check_open()
        assert ticket.is_granted
        self.room += ticket.count

    def give_back(self, ticket: Ticket) -> None:
        """Not wanted any more; right at any time, and as often as one likes."""
        if ticket.is_over:
            return
        ticket.is_over = True
        if ticket.is_granted:
            self._reserved -= ticket.count
        elif ticket in self._tickets:
            self._tickets.remove(ticket)
        self._serve_tickets()

    def _has_places(self, count: int) -> bool:
        if len(self._running) < self._slots:
            # One batch goes as soon as it is full, and the rest of them waits.
            return self._reserved + count <= max(self.queue_depth, self._max_items - len(self._waiting))
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
        elif len(self._running) < self._slots:
            self.room = self._max_items - len(self._waiting) - self._reserved
        else:
            self.room = self.queue_depth - len(self._waiting) - self._reserved

    # ---- going out -----------------------------------------------------------------------------------------------

    def poll(self, now: float) -> Flush[T] | None:
        """The next batch that has to go now. To be called until there is none: then places are given out."""
        reason = self._due(now)
        if reason is None:
            self._serve_tickets()
            return None
        return self._take(reason, now)

    def _due(self, now: float) -> Reason | None:
        waiting = self._waiting
        if not waiting or len(self._running) >= self._slots or self.failure is not None:
            return None
        if len(waiting) >= self._max_items:
            return "size"
        if self._sizes is not None and self._sizes.is_full:
            return "bytes"
        if self.is_closed:
            return "shutdown"
        if self._taken < self._manual_to:
            return "manual"
        if now >= self._since + self._delay:
            return "time"
        return None

    def _take(self, reason: Reason, now: float) -> Flush[T]:
        count = min(len(self._waiting), self._max_items)
        size, sizes = 0, self._sizes
        if sizes is not None:
            fitting, size = sizes.fitting(count)
            if fitting < count:
                count, reason = fitting, "bytes"
        # The list itself goes, and a new one is begun: a batch is never anybody else's list.
        items, rest = self._waiting, self._waiting[count:]
        if rest:
            items = items[:count]
        first = self._taken
        acks = self._acks.before(first + count) if self._acks else ()
        flush = Flush(items, reason, first, began_at=now, acks=acks, has_outcome=self.is_written_off)
        # From here to the next call the items change hands: an interrupt finds all of this done, or nothing.
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
        """The sink has returned, or raised. Poll afterwards: its slot is free."""
        del self._running[flush.first]
        if not flush.has_outcome:
            self._count_outcome(flush, error, now)
        elif error is None:
            self._late_ok += flush.count
        elif not flush.is_overdue:  # then it was told already, as one that takes too long
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
        """Those who wait for these items learn how it went."""
        self._fences.count(first, end, error)
        for ack in acks:
            ack(error)

    # ---- time ----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When to poll and to look for overdue writes, if nothing happens before."""
        self.has_new_deadline = False
        times = [flush.began_at + self.flush_timeout for flush in self._running.values() if not flush.is_overdue]
        if self._waiting and len(self._running) < self._slots:
            times.append(self._since + self._delay)
        return min(times, default=None)

    def overdue(self, now: float) -> list[Flush[T]]:
        """Writes that took too long, each once; they are settled as failed if they were not yet, and still running."""
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
        """Have everything accepted so far go now. Poll afterwards, and wait for the fence if it is not done."""
        fence = Fence(self._completed_to(), self.enqueued, wake)
        self._manual_to = fence.end
        self._fences.add(fence)
        self._pass_fences()
        return fence

    def forget(self, fence: Fence) -> None:
        """Nobody waits for it any more."""
        self._fences.forget(fence)

    def _completed_to(self) -> int:
        """Everything before this position is settled."""
        if self.is_written_off:
            return self.enqueued
        return min((flush.first for flush in self._running.values() if not flush.has_outcome), default=self._taken)

    def _pass_fences(self) -> None:
        if self._fences:
            self._fences.complete(self._completed_to())

    # ---- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Accept nothing more; what waits is due. Callers that wait for a place are told. Poll afterwards."""
        self.is_closed = True
        self.room = 0
        while self._tickets:
            ticket = self._tickets[0]
            ticket.is_over = True
            ticket.wake()
            self._tickets.popleft()

    @property
    def is_over(self) -> bool:
        """There will be no more writes."""
        return self.is_drained or self.failure is not None

    @property
    def is_drained(self) -> bool:
        """Everything has been passed to the sink, and it has returned."""
        return self.is_closed and not self._waiting and not self._running

    def write_off(self) -> int:
        """The time of the shutdown is over: settle what is left as dropped. The writing may go on, unaccounted."""
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
        """The driver cannot go on. What the machine holds stays unwritten, and its callers are told."""
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
        """After a call into here was interrupted, or raised: everything that follows from what is true is true again.

        Returns the flushes that nobody has begun to write, in order. Poll afterwards.
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

    # ---- what it tells -------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Accepted and not settled, counted one by one: what ``in_flight`` has to be."""
        running = sum(flush.count for flush in self._running.values() if not flush.has_outcome)
        return running + (0 if self.is_written_off else len(self._waiting))

    def stats(self) -> Stats:
        # Settled first: another thread that reads this may see items come in meanwhile, never too many settled.
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


# ---- what is raised when somebody's time is over ---------------------------------------------------------------------


def no_room(name: str, count: int, timeout: float) -> BatcherTimeout:
    return BatcherTimeout(name, f"no room for {count} more in its queue", timeout)


def not_flushed(name: str, timeout: float) -> BatcherTimeout:
    return BatcherTimeout(name, "the sink is not done with what was to be flushed", timeout)


def not_drained(name: str, timeout: float) -> BatcherTimeout:
    return BatcherTimeout(name, "its sink is not done", timeout)
