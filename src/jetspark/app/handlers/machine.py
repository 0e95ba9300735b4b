"""A handler as a state machine: what may be pulled, what may begin, what has to be done by when. Time is an argument.

::

    credit() ──pull──> receive() ──> lane of its key ──take()──> running ──finish()──> settling ──settled()──> gone
                                        ^    ^                      │          │
                                        │    └── its wait is over ──┤          └─ wait_here(): the lane stays busy
                                        │                           │
                                        └── on_time(): told to say in_progress, or that it runs for too long

Who moves what: the driver pulls no more than :meth:`HandlerMachine.credit` says, hands in every message, and asks for
something to do with :meth:`HandlerMachine.take` whenever something happened. What is received is *held* until
it is settled or given back. Invariants, each with a test that reaches its bound:

* at most ``concurrency`` items are running, those that are being settled included;
* at most ``burst + rate * t`` items begin in any ``t`` seconds, retries included;
* at most ``max_messages`` items are held, and pulls ask for no more bytes than ``max_bytes`` leaves;
* items of one key begin in the order of their sequences, the next one when the one before is settled;
* every item held longer than a third of ``ack_wait_s`` is in the next list of those to say ``in_progress`` for;
* a message that is delivered again while it is held is not held twice. A message of the stream and one of the retry
  stream for the same event are two: the look-up before the run tells which of them owns it.
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

# Messages that were settled a moment ago: when the acknowledgement is lost, the event comes again, and is not run.
REMEMBERED = 8192
# Two of three in_progress may be lost before the server delivers an event to somebody else.
PROGRESS_PART = 3
# How many stalled events one line of the log names.
NAMED_STALLS = 5
# The bucket counts in floats: a token that is late by less than this is there.
TOKEN_SLACK_S = 1e-6

FINISH = Finish()

Received: TypeAlias = Literal["new", "held", "done"]
"""What became of a message: it is a new item; the event is held already; or it was settled a moment ago."""


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
    """What may be pulled now."""

    messages: int
    bytes: int


@dataclass(slots=True)
class OnTime:
    """What is due."""

    progress: list[WorkItem] = field(default_factory=list)
    """Tell the server that these are still worked on."""
    timed_out: list[WorkItem] = field(default_factory=list)
    """Cancel these."""


class Stalled(NamedTuple):
    """A held event that makes no progress, why, and for how long."""

    item: WorkItem
    reason: Literal["expected", "ready", "running"]
    """Its key waits for an earlier event that has not arrived; or it may begin and does not; or it does not end."""
    waits_for: int
    """Of ``expected``: the sequence of the earlier event; else 0."""
    seconds: float

    def __str__(self) -> str:
        item = self.item
        key = "" if item.key is None else f" of key {item.key!r}"
        match self.reason:
            case "expected":
                why = f"waits for sequence {self.waits_for}, which was delivered before and is not settled"
            case "ready":
                why = "may begin, and no runner has taken it"
            case _:
                why = f"is in attempt {item.attempts}, which has not ended"
        return f"sequence {item.sequence}{key} {why} (for {self.seconds:.0f} s)"

    @staticmethod
    def text(stalled: Sequence[Stalled], held: int) -> str:
        """One line about all of them, which names a few."""
        named = "; ".join(map(str, stalled[:NAMED_STALLS]))
        more = f"; and {len(stalled) - NAMED_STALLS} more" if len(stalled) > NAMED_STALLS else ""
        return f"{len(stalled)} keys of {held} held events make no progress: {named}{more}"


class HandlerMachine:
    """Everything one handler holds in one process, and what may happen to it next."""

    def __init__(
        self,
        limits: HandlerLimits,
        policy: RetryPolicy,
        chance: Callable[[], float],
        breaker: Breaker | None = None,
    ) -> None:
        self.limits, self.policy = limits, policy
        self.lanes = Lanes()
        self.parked: dict[str, int] = {}
        """Keys that cannot go on, and the sequence of the event they wait for."""
        self.running = 0
        self.held_bytes = 0
        self.lapsed: list[WorkItem] = []
        """Items that were let go because another worker may have them; the driver empties it."""
        self.is_stopping = False
        self._chance = chance
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
        """How many items were handed out."""
        self._begin_at = 0.0
        """Not before: no token, or the breaker is open."""
        self._sweep_at = float("inf")
        self._surplus_at = 0.0
        self._standing: dict[tuple[WorkItem, str, int], float] = {}
        """What made no progress when that was last asked, and since when."""

    # ---- receiving ---------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Items that are received and not settled."""
        return len(self._held)

    @property
    def items(self) -> list[WorkItem]:
        """Everything held, by sequence."""
        return sorted(self._held.values(), key=lambda item: item.sequence)

    def credit(self) -> Credit:
        """How much may be pulled now."""
        limits = self.limits
        if self.is_stopping or self.held_bytes >= limits.max_bytes:
            return Credit(0, 0)
        return Credit(max(0, limits.max_messages - len(self._held)), limits.max_bytes - self.held_bytes)

    def receive(self, item: WorkItem, now: float) -> Received:
        """Take over a message that the server cannot have delivered before ``now``."""
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
        """Somebody had this event before and may not have settled it: later ones of its key wait until it comes."""
        self.lanes.expect(key, sequence)
        self._surplus_at = now + self.limits.ack_wait_s

    def surplus(self, now: float) -> list[WorkItem]:
        """What to give back when there is no room to pull, and everything held waits for events that must be pulled.

        They are no longer held, and expected in turn. By now the server delivers what it has to deliver again, and does
        so before anything new; so the room goes to the events that are waited for.
        """
        is_stuck = not self.running and not self._waiting and not self._due and self.lanes.peek() is None
        if not is_stuck or now < self._surplus_at or self.is_stopping:
            return []
        found = self.items[-len(self.lanes.expected) :] if self.lanes.expected else []
        for item in found:
            self._let_go(item)
            if item.key is not None and item.source == "stream":  # any reader of the handler may get a retry
                self.lanes.expect(item.key, item.sequence)
        # What came instead was new: then the next round waits for those that are still out.
        self._surplus_at = now + self.limits.ack_wait_s / 2
        return found

    # ---- running -----------------------------------------------------------------------------------------------

    def take(self, now: float) -> WorkItem | None:
        """The next item to run, or to put behind its parked key (``is_behind``); None when nothing may begin now."""
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
        """The handler's own code begins now: what came before took time that is not its own."""
        item.is_timed_out = False  # by a deadline that passed while there was nothing to cancel
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
        decided = decide(self.policy, item.attempts, error, self._chance())
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
        """It was taken, and there was no need to run it."""
        self._deadlines.pop(item, None)
        if self._circuit is not None and not item.is_behind:
            self._circuit.on_nothing(item.generation)
            self._begin_at = 0.0

    @property
    def is_open(self) -> bool:
        """The breaker leaves the handler alone."""
        return self._circuit is not None and self._circuit.state == "open"

    def wait_here(self, item: WorkItem, seconds: float, now: float) -> None:
        """Run it again after this time, before anything else of its key."""
        item.is_taken = False
        self.running -= 1
        heapq.heappush(self._waiting, (now + seconds, next(self._count), item))

    def acknowledged(self, item: WorkItem) -> None:
        """The event is acknowledged; its lane goes on."""
        self._let_go(item)
        identity = item.identity
        self._acknowledged.add(identity)
        self._acknowledged_order.append(identity)
        if len(self._acknowledged_order) > REMEMBERED:
            self._acknowledged.discard(self._acknowledged_order.popleft())

    @property
    def acknowledged_before(self) -> set[Hashable]:
        """Events of the stream, by sequence, and other identities that were settled here a moment ago."""
        return self._acknowledged

    def was_acknowledged(self, item: WorkItem) -> bool:
        """Whether it was settled here, a moment ago."""
        return item.identity in self._acknowledged

    def given_back(self, item: WorkItem) -> None:
        """It is not settled, and somebody will get it again."""
        self._let_go(item)

    def heard(self, item: WorkItem, sent_at: float, now: float) -> None:
        """The server has confirmed an ``in_progress`` that was sent at ``sent_at``. A confirmation that comes too late
        does not bring the item back."""
        if not self.has_lapsed(item, now):
            item.heard_at = max(item.heard_at, sent_at)

    def has_lapsed(self, item: WorkItem, now: float) -> bool:
        """Whether the server has not heard of the item for its ``ack_wait``, and may have given it to another worker.

        That happens to a process that was stopped or disconnected: one that lives says ``in_progress`` in time.
        """
        return now - item.heard_at >= self.limits.ack_wait_s

    def lapse(self, item: WorkItem) -> None:
        """Let go of an item that may be with another worker; later ones of its key wait for what becomes of it."""
        self.release(item)
        if item.key is not None and item.source == "stream":
            self.lanes.expect(item.key, item.sequence)
        self.lapsed.append(item)

    def release(self, item: WorkItem) -> None:
        """Let go of an item that does not run: somebody will get it again."""
        if item in self._due:
            self._due.remove(item)
        if any(each is item for _, _, each in self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[2] is not item]
            heapq.heapify(self._waiting)
        self._let_go(item)

    # ---- parked keys -------------------------------------------------------------------------------------------

    def park(self, key: str, sequence: int) -> None:
        """Events of the key after ``sequence`` are put behind it from now on."""
        self.parked[key] = sequence

    def unpark(self, key: str) -> None:
        self.parked.pop(key, None)

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` or :meth:`take` has something to do although nothing happened."""
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
        """What is due; each item once, until it is touched or started again."""
        due = OnTime()
        for item, deadline in self._deadlines.items():
            if deadline > now:
                break
            due.timed_out.append(item)
        for item in due.timed_out:
            item.is_timed_out = True
            del self._deadlines[item]
        if self._held and now >= self._sweep_at:
            # To say in_progress of one that may be with another worker would take it from that one's next attempt.
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
        """An event that makes no progress for longer than this is stalled.

        An earlier one of its key may be with another worker, which is given its ``ack_wait``, an attempt that times
        out, the waits in its lane, and as much again. The events of a batch are attempted together, and then alone.
        """
        limits = self.limits
        attempts = 1 if limits.batch == 1 else 1 + limits.batch
        return 2 * (limits.ack_wait_s + limits.timeout_s * attempts) + self.policy.in_lane_s

    def stalled(self, now: float) -> list[Stalled]:
        """Keys that made no progress for :attr:`patience_s`, by their first events, the longest first.

        It compares with what it found when it was last called: call it several times within that time.
        """
        before, self._standing = self._standing, {}
        found = []
        for item, reason, waits_for in self._standing_still(now):
            # It is not stalled while others begin before it.
            which = item, f"{reason} {self._begun if reason == 'ready' else item.attempts}", waits_for
            since = self._standing[which] = before.get(which, now)
            if now - since >= self.patience_s:
                found.append(Stalled(item, reason, waits_for, now - since))
        return sorted(found, key=lambda each: -each.seconds)

    def forget_stalls(self) -> None:
        """There was no connection, without which nothing can make progress: count from here."""
        self._standing.clear()

    def oldest_s(self, now: float) -> float:
        """For how long the oldest of the held events is held."""
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
        """What would begin next; what is no longer ours is let go on the way."""
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
