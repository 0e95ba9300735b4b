"""A handler as a state machine: how much to pull, which event begins next, and deadlines. Time is an argument.

::

    credit() ──pull──> receive() ──> lane of its key ──take()──> running ──finish()──> ending ──acknowledged()──> gone
                                        ^    ^                      │          │
                                        │    └── its wait is over ──┤          └─ wait_here(): the lane stays busy
                                        │                           │
                                        └── on_time(): in_progress is due, or it has run for too long

The driver pulls no more than :meth:`HandlerMachine.credit` allows, passes every message to
:meth:`HandlerMachine.receive`, and calls :meth:`HandlerMachine.take` whenever something has happened. An item is *held*
from its receipt until it is acknowledged or returned. Invariants, each with a test that reaches its bound:

* at most ``concurrency`` items are running, those whose outcome is being stored included;
* at most ``burst + rate * t`` items begin in any ``t`` seconds, retries included;
* at most ``max_messages`` items are held, and pulls ask for no more bytes than ``max_bytes`` leaves;
* items of one key begin in the order of their sequences, each when the one before is acknowledged;
* every item held longer than a third of ``ack_wait_s`` is in the next list of items that need ``in_progress``;
* a message that is redelivered while it is held is not held twice. A message of the stream and a message of the retry
  stream for the same event are two items: the look-up before the run finds which of them owns the event.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from jetspark.app.handlers.lanes import Lanes, WorkItem
from jetspark.app.handlers.retry import Breaker, Decided, Finish, RetryPolicy, decide, is_transient
from jetspark.batcher.circuit import Circuit
from jetspark.batcher.rate_limit import TokenBucket
from jetspark.errors import CircuitOpen

__all__ = ["FINISH", "Credit", "HandlerLimits", "HandlerMachine", "OnTime", "Received", "Stalled"]

# Recently acknowledged messages: if the acknowledgement is lost, the event is redelivered, and not run again.
REMEMBERED = 8192
# Two of three in_progress may be lost before the server redelivers an event to another worker.
PROGRESS_PART = 3
# Stalled events that one log line names.
NAMED_STALLS = 5
# The token bucket counts in floats: a token that is late by less than this is available.
TOKEN_SLACK_S = 1e-6

FINISH = Finish()

Received: TypeAlias = Literal["new", "held", "done"]
"""A new item; an event that is held already; or a message that was acknowledged recently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerLimits:
    """The bounds of one handler in one process."""

    concurrency: int = 16
    rate: float | None = None
    burst: int | None = None
    timeout_s: float = 30.0
    ack_wait_s: float = 30.0
    max_messages: int = 1024
    max_bytes: int = 64 << 20
    batch: int = 1
    """Events of one call. If it fails, each is tried alone, one after the other."""
    has_transactions: bool = False
    """An attempt's effects are committed together, so a commit may succeed although its attempt has failed."""
    has_dead_letters: bool = True
    """An event that is given up becomes a dead letter; if not, it is logged and dropped."""


class Credit(NamedTuple):
    """How much may be pulled now."""

    messages: int
    bytes: int


@dataclass(slots=True)
class OnTime:
    """Items with something due."""

    progress: list[WorkItem] = field(default_factory=list)
    """Send ``in_progress`` for these."""
    timed_out: list[WorkItem] = field(default_factory=list)
    """Cancel these."""


class Stalled(NamedTuple):
    """A held event that makes no progress, with the reason and the duration."""

    item: WorkItem
    reason: Literal["expected", "ready", "running"]
    """Its key waits for an earlier event that has not arrived; no runner has taken it; or its attempt does not end."""
    waits_for: int
    """The sequence of the earlier event for ``expected``; else 0."""
    seconds: float

    def __str__(self) -> str:
        item = self.item
        key = "" if item.key is None else f" of key {item.key!r}"
        match self.reason:
            case "expected":
                why = f"waits for event {self.waits_for}, which was delivered before and is not acknowledged"
            case "ready":
                why = "may begin, and no runner has taken it"
            case _:
                why = f"is in attempt {item.attempts}, which has not ended"
        return f"event {item.sequence}{key} {why} (for {self.seconds:.0f} s)"

    @staticmethod
    def text(stalled: Sequence[Stalled], held: int) -> str:
        """One line that counts all of them and names a few."""
        named = "; ".join(map(str, stalled[:NAMED_STALLS]))
        more = f"; and {len(stalled) - NAMED_STALLS} more" if len(stalled) > NAMED_STALLS else ""
        return f"{len(stalled)} keys of {held} held events make no progress: {named}{more}"


class HandlerMachine:
    """The events that one handler holds in one process, and their next transitions."""

    def __init__(
        self,
        limits: HandlerLimits,
        policy: RetryPolicy,
        random_fraction: Callable[[], float],
        breaker: Breaker | None = None,
    ) -> None:
        self.limits, self.policy = limits, policy
        self.lanes = Lanes()
        self.parked: dict[str, int] = {}
        """Parked keys, with the sequence of the event that each waits for."""
        self.running = 0
        self.held_bytes = 0
        self.lapsed: list[WorkItem] = []
        """Items that were let go of because another worker may have them; the driver empties the list."""
        self.is_stopping = False
        self._random_fraction = random_fraction
        self._held: dict[Hashable, WorkItem] = {}
        self._acknowledged: set[Hashable] = set()
        self._acknowledged_order: deque[Hashable] = deque()
        self._deadlines: dict[WorkItem, float] = {}
        self._waiting: list[tuple[float, int, WorkItem]] = []
        self._due: deque[WorkItem] = deque()
        self._count = itertools.count()
        self._bucket = TokenBucket(items_per_s=limits.rate, burst=limits.burst) if limits.rate is not None else None
        self._circuit = Circuit(failures=breaker.failures, open_s=breaker.open_s) if breaker else None
        self._has_brakes = limits.rate is not None or breaker is not None
        self._begun = 0
        """Number of items that :meth:`take` has returned."""
        self._begin_at = 0.0
        """The earliest time for the next event: no token is available before, or the breaker is open until then."""
        self._sweep_at = float("inf")
        self._surplus_at = 0.0
        self._standing: dict[tuple[WorkItem, str, int], float] = {}
        """Items that made no progress at the last call of :meth:`stalled`, and since when."""

    # ---- receiving ---------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Number of items that are received and neither acknowledged nor returned."""
        return len(self._held)

    @property
    def items(self) -> list[WorkItem]:
        """All held items, by sequence."""
        return sorted(self._held.values(), key=lambda item: item.sequence)

    def credit(self) -> Credit:
        """How much may be pulled now."""
        limits = self.limits
        if self.is_stopping or self.held_bytes >= limits.max_bytes:
            return Credit(0, 0)
        return Credit(max(0, limits.max_messages - len(self._held)), limits.max_bytes - self.held_bytes)

    def receive(self, item: WorkItem, now: float) -> Received:
        """Add the item of a message that the server cannot have delivered before ``now``."""
        identity = item.identity
        present = self._held.get(identity)
        if present is not None:
            present.message, present.delivered = item.message, item.delivered
            present.intake, present.partition = item.intake, item.partition
            present.touched_at, present.heard_at = max(present.touched_at, now), max(present.heard_at, now)
            return "held"
        if item.delivered > 1 and identity in self._acknowledged:
            return "done"
        item.came_at = item.touched_at = item.heard_at = now
        if not self._held:
            self._sweep_at = now + self.limits.ack_wait_s / PROGRESS_PART / 2
        self._held[identity] = item
        self.held_bytes += item.size_bytes
        self.lanes.add(item)
        return "new"

    def expect(self, key: str, sequence: int, now: float) -> None:
        """Hold back later events of the key until this event arrives: another worker may have it, not acknowledged."""
        self.lanes.expect(key, sequence)
        self._surplus_at = now + self.limits.ack_wait_s

    def surplus(self, now: float) -> list[WorkItem]:
        """Items to return when there is no room to pull, and all held items wait for events that must be pulled.

        They are no longer held, and their keys expect them again. By now the server redelivers, before anything new; so
        the room goes to the events that the keys wait for.
        """
        is_stuck = not self.running and not self._waiting and not self._due and self.lanes.peek() is None
        if not is_stuck or now < self._surplus_at or self.is_stopping:
            return []
        found = self.items[-len(self.lanes.expected) :] if self.lanes.expected else []
        for item in found:
            self._let_go(item)
            if item.key is not None and item.source == "stream":  # any reader of the handler may get a retry
                self.lanes.expect(item.key, item.sequence)
        # If new events arrive instead, the next round waits for those still missing.
        self._surplus_at = now + self.limits.ack_wait_s / 2
        return found

    # ---- running -----------------------------------------------------------------------------------------------

    def take(self, now: float) -> WorkItem | None:
        """The next item to run, or to put behind its parked key (``is_behind``); None if no item may begin now."""
        if self.running >= self.limits.concurrency or self.is_stopping:
            return None
        if self._waiting:
            self._wake(now)
        item = self._next(now)
        if item is None:
            return None
        is_retry = bool(self._due)
        # An event before the head is not behind it: the worker that parked the key may have died before its ack.
        item.is_behind = bool(self.parked) and item.key in self.parked and self.parked[item.key] < item.sequence
        if not item.is_behind and self._has_brakes and not self._may_begin(item, now):
            return None
        if is_retry:
            self._due.popleft()
        else:
            self.lanes.start_first()
        if not item.is_behind:
            item.attempts += 1
            self._deadlines[item] = now + self.limits.timeout_s
        item.is_taken = True
        self.running += 1
        self._begun += 1
        return item

    def restart_clock(self, item: WorkItem, now: float) -> None:
        """The handler's own code begins now, so its time-out counts from now."""
        item.is_timed_out = False  # set if the deadline passed before there was a task to cancel
        self._deadlines.pop(item, None)  # to the end of the order, which is that of the deadlines
        self._deadlines[item] = now + self.limits.timeout_s

    def succeed(self, item: WorkItem) -> None:
        """The handler's code ended without an error."""
        self._deadlines.pop(item, None)
        item.is_timed_out = False
        if self._circuit is not None:
            self._circuit.on_success(item.generation)
            self._begin_at = 0.0

    def finish(self, item: WorkItem, error: BaseException | None, now: float) -> Decided:
        """The handler's code ended, with ``error`` or without; returns what to do with the event."""
        if error is None:
            self.succeed(item)
            return FINISH
        self._deadlines.pop(item, None)
        item.is_timed_out = False
        decided = decide(self.policy, item.attempts, error, self._random_fraction())
        if self._circuit is not None and not item.is_behind:
            if isinstance(decided, Finish):
                self._circuit.on_success(item.generation)
            elif is_transient(self.policy, error):
                self._circuit.on_failure(item.generation, now)
            else:
                self._circuit.on_nothing(item.generation)
            self._begin_at = 0.0
        return decided

    def dismiss(self, item: WorkItem) -> None:
        """The item was taken, and its result is not to be counted."""
        self._deadlines.pop(item, None)
        if self._circuit is not None and not item.is_behind:
            self._circuit.on_nothing(item.generation)
            self._begin_at = 0.0

    @property
    def is_open(self) -> bool:
        """The breaker is open, so no event begins."""
        return self._circuit is not None and self._circuit.state == "open"

    def wait_here(self, item: WorkItem, seconds: float, now: float) -> None:
        """Run the item again after this time, before later events of its key."""
        item.is_taken = False
        self.running -= 1
        heapq.heappush(self._waiting, (now + seconds, next(self._count), item))

    def acknowledged(self, item: WorkItem) -> None:
        """The item is acknowledged; the next one of its lane may begin."""
        self._let_go(item)
        identity = item.identity
        self._acknowledged.add(identity)
        self._acknowledged_order.append(identity)
        if len(self._acknowledged_order) > REMEMBERED:
            self._acknowledged.discard(self._acknowledged_order.popleft())

    @property
    def acknowledged_before(self) -> set[Hashable]:
        """Identities of recently acknowledged items; that of an event from the stream is its sequence."""
        return self._acknowledged

    def was_acknowledged(self, item: WorkItem) -> bool:
        """True if it was acknowledged here recently."""
        return item.identity in self._acknowledged

    def heard(self, item: WorkItem, sent_at: float, now: float) -> None:
        """The server has confirmed an ``in_progress`` that was sent at ``sent_at``.

        A confirmation after the ``ack_wait`` changes nothing.
        """
        if not self.has_lapsed(item, now):
            item.heard_at = max(item.heard_at, sent_at)

    def has_lapsed(self, item: WorkItem, now: float) -> bool:
        """True if no ``in_progress`` was confirmed for one ``ack_wait``: the server may have redelivered the item.

        This happens to a process that was stopped or disconnected; otherwise it sends ``in_progress`` in time.
        """
        return now - item.heard_at >= self.limits.ack_wait_s

    def lapse(self, item: WorkItem) -> None:
        """Let go of an item that another worker may have; later events of its key wait until it is acknowledged."""
        self.release(item)
        if item.key is not None and item.source == "stream":
            self.lanes.expect(item.key, item.sequence)
        self.lapsed.append(item)

    def release(self, item: WorkItem) -> None:
        """Let go of an item that does not run; the server redelivers it."""
        if item in self._due:
            self._due.remove(item)
        if any(each is item for _, _, each in self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[2] is not item]
            heapq.heapify(self._waiting)
        self._let_go(item)

    # ---- parked keys -------------------------------------------------------------------------------------------

    def park(self, key: str, sequence: int) -> None:
        """Put events of the key after ``sequence`` behind it from now on."""
        self.parked[key] = sequence

    def unpark(self, key: str) -> None:
        self.parked.pop(key, None)

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """The next time at which :meth:`on_time` or :meth:`take` has something to do."""
        moments = []
        if self._deadlines:
            moments.append(next(iter(self._deadlines.values())))
        if self._held:
            moments.append(self._sweep_at)
        if self.running < self.limits.concurrency and not self.is_stopping:
            if self._waiting:
                moments.append(self._waiting[0][0])
            if self._begin_at and (self._due or self.lanes.peek() is not None):
                moments.append(self._begin_at)
        return min(moments) if moments else None

    def on_time(self, now: float) -> OnTime:
        """Collect the items that are due; each once, until ``in_progress`` is sent or it is started again."""
        due = OnTime()
        for item, deadline in self._deadlines.items():
            if deadline > now:
                break
            due.timed_out.append(item)
        for item in due.timed_out:
            item.is_timed_out = True
            del self._deadlines[item]
        if self._held and now >= self._sweep_at:
            # An in_progress for an item that another worker may have would delay its next redelivery.
            for item in [each for each in self._held.values() if not each.is_taken and self.has_lapsed(each, now)]:
                self.lapse(item)
            since = now - self.limits.ack_wait_s / PROGRESS_PART
            due.progress = [item for item in self._held.values() if item.touched_at <= since]
            for item in due.progress:
                item.touched_at = now
            self._sweep_at = now + self.limits.ack_wait_s / PROGRESS_PART / 2
        return due

    @property
    def patience_s(self) -> float:
        """The time without progress after which an event is stalled.

        An earlier event of its key may be with another worker, which gets its ``ack_wait``, an attempt that times out,
        the waits in its lane, and as much again. The events of a batch are attempted together, and then alone.
        """
        limits = self.limits
        attempts = 1 if limits.batch == 1 else 1 + limits.batch
        return 2 * (limits.ack_wait_s + limits.timeout_s * attempts) + self.policy.in_lane_s

    def stalled(self, now: float) -> list[Stalled]:
        """The first events of keys without progress for :attr:`patience_s`, the longest first.

        It compares with the result of its last call, so call it several times within that time.
        """
        before, self._standing = self._standing, {}
        found = []
        for item, reason, waits_for in self._standing_still(now):
            # An event that is ready is not stalled while others begin before it.
            which = item, f"{reason} {self._begun if reason == 'ready' else item.attempts}", waits_for
            since = self._standing[which] = before.get(which, now)
            if now - since >= self.patience_s:
                found.append(Stalled(item, reason, waits_for, now - since))
        return sorted(found, key=lambda each: -each.seconds)

    def forget_stalls(self) -> None:
        """Count from now: there was no connection, without which no event can make progress."""
        self._standing.clear()

    def oldest_s(self, now: float) -> float:
        """The time for which the oldest held event has been held."""
        return max((now - item.came_at for item in self._held.values()), default=0.0)

    def _standing_still(self, now: float) -> Iterator[tuple[WorkItem, Literal["expected", "ready", "running"], int]]:
        if self.is_stopping:
            return
        waiting = {id(item) for _, _, item in self._waiting}
        places = self.limits.concurrency if self.limits.batch == 1 else 1  # one batch runs at a time
        for item in self._held.values():
            lane = item.lane
            if item.is_taken:
                yield item, "running", 0
            elif lane is None or lane.items[0] is not item or id(item) in waiting:
                continue  # behind another event of its key, or between two attempts
            elif not lane.is_busy and not lane.may_begin():
                yield item, "expected", min(lane.expected or (0,))
            elif self.running < places and self._begin_at <= now:
                yield item, "ready", 0

    # ---- small steps -------------------------------------------------------------------------------------------

    def _may_begin(self, item: WorkItem, now: float) -> bool:
        if now < self._begin_at:
            return False
        self._begin_at = 0.0
        if self._bucket is not None:
            wait_s = self._bucket.take(1, now)
            if wait_s > TOKEN_SLACK_S:
                self._bucket.give_back(1)
                self._begin_at = now + wait_s
                return False
        if self._circuit is not None:
            try:
                item.generation = self._circuit.enter(now)
            except CircuitOpen as error:
                if self._bucket is not None:
                    self._bucket.give_back(1)
                self._begin_at = now + error.retry_in_s
                return False
        return True

    def _next(self, now: float) -> WorkItem | None:
        """The item that would begin next. Items that have lapsed are let go of before."""
        while True:
            item = self._due[0] if self._due else self.lanes.peek()
            if item is None or not self.has_lapsed(item, now):
                return item
            self.lapse(item)

    def _wake(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            self._due.append(heapq.heappop(self._waiting)[2])

    def _let_go(self, item: WorkItem) -> None:
        if item.is_taken:
            item.is_taken = False
            self.running -= 1
        self._deadlines.pop(item, None)
        del self._held[item.identity]
        self.held_bytes -= item.size_bytes
        self.lanes.leave(item)
