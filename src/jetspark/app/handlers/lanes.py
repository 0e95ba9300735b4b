"""Lanes: the order in which a handler's events may begin. Pure.

::

    add ──> lane of its key, ordered by sequence ───────────> ready ──start_first()──> busy ──leave()──> next of it
                                                                                       │  ^
                                                                                       └──┘ a retry: it stays busy

A lane is *busy* from the moment its first item is handed out until that item leaves, however often it is retried; so
later items of the key cannot pass it. An item without a key has a lane of its own. Invariants:

* one item of a lane is handed out at a time, the one with the lowest sequence that has arrived;
* an item that is *expected* (delivered to another worker before, and not acknowledged) holds back later ones of its
  lane until it arrives or is known to be gone;
* a lane with nothing in it and nothing expected is forgotten, so memory is bounded by the items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from jetspark.aio.stream_message import JetStreamMessage
    from jetspark.app.contracts.envelope import Decoded
    from jetspark.app.stored_events import DeadLetterRef, StoredEvent

__all__ = ["ItemReader", "Lane", "Lanes", "RunningCode", "Tries", "WorkItem", "WorkSource"]

WorkSource: TypeAlias = Literal["stream", "retry", "redrive"]


class RunningCode(Protocol):
    """The task that runs a handler's own code."""

    def cancel(self) -> object: ...


class ItemReader(Protocol):
    """The reader of a consumer, which received an item."""

    def expect_lapsed(self, item: WorkItem) -> None:
        """The machine let go of the item, which another reader may have: wait until it is acknowledged or returns."""

    def expect_again(self, item: WorkItem) -> None:
        """The worker returned the item to the server: hold back later events of its key until it is redelivered."""


class Tries(NamedTuple):
    """The attempts and redrives of an event so far, according to the message that contains it."""

    source: WorkSource = "stream"
    attempts: int = 0
    redrives: int = 0


class WorkItem:
    """One event on its way through a handler."""

    __slots__ = (
        "attempts",
        "came_at",
        "carried",
        "dead_letter",
        "delivered",
        "event",
        "generation",
        "heard_at",
        "identity",
        "intake",
        "is_behind",
        "is_checked",
        "is_taken",
        "is_timed_out",
        "key",
        "lane",
        "message",
        "original",
        "partition",
        "redrives",
        "runner",
        "sequence",
        "size_bytes",
        "source",
        "touched_at",
    )

    message: JetStreamMessage

    def __init__(
        self,
        key: str | None,
        sequence: int,
        message: JetStreamMessage | None = None,
        event: Decoded | Exception | None = None,
        *,
        size_bytes: int = 0,
        delivered: int = 1,
        tries: Tries | None = None,
    ) -> None:
        self.key = key
        self.sequence = sequence
        """In the stream the event was published to, also when it comes from the retry stream."""
        # Only an item that no lane receives has no message: its event was read from the stream, not delivered.
        self.message = message  # type: ignore[assignment]
        self.event = event
        """The error if the message cannot be decoded; None if it was not read."""
        self.size_bytes = size_bytes
        self.delivered = delivered
        self.source: WorkSource = "stream"
        self.attempts = self.carried = self.redrives = 0
        """Starts, the present one included; attempts made before, according to the message; and redrives."""
        self.identity: Hashable = sequence
        if tries is not None:
            self.source, self.attempts, self.redrives = tries
            self.carried = self.attempts
            if self.source != "stream":
                # The retry stream may have several messages of one event, one after the other.
                self.identity = (self.source, sequence, self.attempts, self.redrives)
        self.original: StoredEvent | None = None
        """The event as it was first published, if this is a message of the retry stream."""
        self.lane: Lane | None = None
        self.dead_letter: DeadLetterRef | None = None
        """The dead letter that a redrive was found to handle again, before it ran."""
        self.came_at = self.touched_at = self.heard_at = 0.0
        """When it was received, when the last ``in_progress`` was sent, and when the last confirmed one was sent."""
        self.partition: int | None = None
        self.intake: ItemReader | None = None
        self.generation = 0
        self.is_behind = False
        """Its key is parked: it gets a dead letter behind the event that the key waits for, and does not run."""
        self.is_checked = False
        self.is_taken = False
        """It runs, or its outcome is being stored."""
        self.is_timed_out = False
        self.runner: RunningCode | None = None

    def __repr__(self) -> str:
        return f"<WorkItem {self.source} {self.sequence} key={self.key!r} attempts={self.attempts}>"


class Lane:
    """The items of one key."""

    __slots__ = ("expected", "is_busy", "is_ready", "items", "key")

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.items: deque[WorkItem] = deque()
        self.is_busy = False
        self.is_ready = False
        """It is in the queue of lanes whose first item may begin."""
        self.expected: set[int] | None = None

    def may_begin(self) -> bool:
        if self.is_busy or not self.items:
            return False
        return not self.expected or min(self.expected) >= self.items[0].sequence


class Lanes:
    """The lanes of a handler, and the queue of the lanes whose first item may begin."""

    def __init__(self) -> None:
        self._by_key: dict[str, Lane] = {}
        self._ready: deque[Lane] = deque()
        self._expected: dict[int, str] = {}

    def __len__(self) -> int:
        """Number of keys with an item that waits, runs or is expected."""
        return len(self._by_key)

    @property
    def expected(self) -> list[int]:
        """Sequences that have not arrived, and hold back later ones of their keys."""
        return list(self._expected)

    def add(self, item: WorkItem) -> None:
        key = item.key
        if key is None:
            lane = Lane(None)
            lane.items.append(item)
            item.lane = lane
            self._ready.append(lane)
            return
        lane = self._by_key.get(key) or self._new(key)
        item.lane = lane
        items = lane.items
        if lane.expected is not None:
            lane.expected.discard(item.sequence)
            self._expected.pop(item.sequence, None)
        if not items or items[-1].sequence < item.sequence:
            items.append(item)
        else:
            # A redelivery goes before later events that have not begun. It is rare, so a scan is fast enough.
            index = 1 if lane.is_busy else 0
            while index < len(items) and items[index].sequence < item.sequence:
                index += 1
            items.insert(index, item)
        self._offer(lane)

    def expect(self, key: str, sequence: int) -> None:
        """Hold back items of the key above ``sequence`` until that one arrives, or is :meth:`gone`."""
        lane = self._by_key.get(key) or self._new(key)
        if lane.expected is None:
            lane.expected = set()
        lane.expected.add(sequence)
        self._expected[sequence] = key

    def gone(self, sequence: int) -> None:
        """The event will not arrive: another worker has acknowledged it."""
        key = self._expected.pop(sequence, None)
        if key is None:
            return
        lane = self._by_key[key]
        assert lane.expected is not None
        lane.expected.discard(sequence)
        self._offer(lane)
        self._forget_if_empty(lane)

    def peek(self) -> WorkItem | None:
        """The item that would be handed out next."""
        while self._ready:
            lane = self._ready[0]
            if lane.may_begin():
                return lane.items[0]
            self._ready.popleft()
            lane.is_ready = False
        return None

    def start_first(self) -> None:
        """Hand out the item that :meth:`peek` has just returned; its lane is busy until it leaves."""
        lane = self._ready.popleft()
        lane.is_ready = False
        lane.is_busy = True

    def leave(self, item: WorkItem) -> None:
        """The item is acknowledged or returned; the next one of its lane may begin."""
        lane = item.lane
        assert lane is not None
        if lane.items[0] is item:
            lane.items.popleft()
            lane.is_busy = False
        else:
            lane.items.remove(item)
        if lane.key is not None:
            self._offer(lane)
            self._forget_if_empty(lane)

    def _new(self, key: str) -> Lane:
        lane = self._by_key[key] = Lane(key)
        return lane

    def _offer(self, lane: Lane) -> None:
        if not lane.is_ready and lane.may_begin():
            lane.is_ready = True
            self._ready.append(lane)

    def _forget_if_empty(self, lane: Lane) -> None:
        if not lane.items and not lane.expected and lane.key is not None:
            self._by_key.pop(lane.key, None)
