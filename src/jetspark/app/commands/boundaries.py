"""A worker's cache of boundaries: the events it has read, kept for the next command. Pure.

The cache may be stale. A decision made from it is stored only if the boundary has not moved since, and a decision that
stores nothing is returned only after the stream's leader has confirmed the boundary. The cache saves a request and
guarantees nothing.
"""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from jetspark.app.commands.command_spec import CommandReply, Past, PastEvent
from jetspark.app.contracts.faults import user_errors
from jetspark.app.finite_json import check_finite
from jetspark.app.projections.projection_spec import ProjectionSpec

__all__ = [
    "BoundaryCache",
    "BoundaryPast",
    "SnapshotState",
    "advance_snapshot",
    "counted",
    "encode_state",
    "merged_past",
    "outcome_of",
    "recorded_reply",
]


class SnapshotState(NamedTuple):
    """The state of a projection's key, as stored, and the sequence up to which events are in it."""

    value: bytes | None
    sequence: int


class _Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The header ``Jetspark-Outcome`` of each event of a decision, from which retries are answered."""

    events: int
    index: int
    reply: object = None


encode_state = msgspec.json.Encoder(order="sorted").encode
"""A state of a projection as it is stored."""
KEPT_EVENTS = 500
"""Events that a boundary with a snapshot keeps beside it, at least; up to twice as many."""
_decode_outcome = msgspec.json.Decoder(_Outcome).decode
_ONE_EVENT = msgspec.json.encode(_Outcome(1, 0)).decode()


def outcome_of(index: int, events: int, reply: object) -> str:
    """The outcome header of event ``index`` of a decision with ``events`` events.

    Raises:
        TypeError, ValueError: The reply is nothing that JSON has.
    """
    if reply is None and events == 1:
        return _ONE_EVENT
    # A header is one line of text; JSON has its line ends escaped.
    data = msgspec.json.encode(_Outcome(events, index, reply))
    check_finite("the reply", reply, data)
    return data.decode()


class BoundaryPast:
    """The events under one filter, up to the last known one."""

    def __init__(self, filter: str, snapshot: SnapshotState | None = None) -> None:
        self.filter, self.snapshot = filter, snapshot
        self.entries: list[PastEvent] = []
        self.last = 0
        """The sequence of the last known event under the filter; 0 before the first."""
        self.last_id: str | None = None
        """The ``Nats-Msg-Id`` of that event; None if it is not known, or has none."""
        self.through = 0
        """The stream's last sequence when this was the whole boundary; 0 while that is unknown."""
        self.decided: dict[str, PastEvent] = {}
        """The first event of each command, by its id."""
        self.has_firings = False
        """Timers have published some of these events."""

    def may_continue_to(self, sequence: int, id: str | None) -> bool:
        """True if the last message under the filter is our last known event, or a later one."""
        if sequence == self.last and id is not None and self.last_id is not None:
            return id == self.last_id
        return sequence >= self.last

    def add(self, entries: Sequence[PastEvent], last_id: str | None = None) -> None:
        """Take events that follow the last one; ``last_id`` is that of the last of these messages."""
        for entry in entries:
            if entry.sequence > self.last:
                self.last_id = last_id
                self.entries.append(entry)
                self.last = entry.sequence
                self.has_firings |= entry.timer is not None
                # Others may have the same cause: what a handler publishes that calls a command with its message's id.
                if entry.cause is not None and entry.command is not None:
                    self.decided.setdefault(entry.cause, entry)

    def trim(self, since: datetime.datetime) -> None:
        """Let go of old events that are in the snapshot, and of commands that were stored before a time."""
        if len(self.entries) <= 2 * KEPT_EVENTS:
            return
        del self.entries[:-KEPT_EVENTS]
        for id, entry in [*self.decided.items()]:  # the oldest first
            if entry.stored is not None and entry.stored >= since:
                break
            del self.decided[id]


def recorded_reply(pasts: Sequence[BoundaryPast], command_id: str) -> tuple[str | None, CommandReply] | None:
    """The name and reply of the command with this id that was decided inside a boundary, if there is one."""
    for past in pasts:
        entry = past.decided.get(command_id)
        if entry is not None:
            outcome = _decode_outcome(entry.outcome) if entry.outcome else _Outcome(1, 0)
            # The events of a decision have sequences without gaps: they are one message, or one batch.
            last = entry.sequence - outcome.index + outcome.events - 1
            reply = CommandReply(
                command_id=command_id, sequence=last, events=outcome.events, data=outcome.reply, is_repeated=True
            )
            return entry.command, reply
    return None


def merged_past(pasts: Sequence[BoundaryPast], projection: ProjectionSpec | None, key: str) -> Past:
    """The ``past`` argument of ``decide``."""
    entries = _merged(pasts)
    those = counted(entries) if any(past.has_firings for past in pasts) else entries
    version = max(past.last for past in pasts)
    if projection is None:
        return Past(those, version=version)
    spec = projection

    def state() -> object:
        # Of all events, as the projection's own engines fold them.
        value = _folded(entries, pasts[0].snapshot, spec, key)
        return None if value is None else spec.decode_state(value)

    return Past(those, version=version, state=state)


def counted(entries: Sequence[PastEvent]) -> Sequence[PastEvent]:
    """Without events of timers that the server has stored behind the end of the timer (see :mod:`jetspark.app.timers`).

    The event of a timer names its timer, and has the command that set it as its cause. The event is left out if that
    command was decided before the timer ended. If no command of the boundary has set the timer, the order is unknown
    and the event counts.
    """
    found, decided, ended = list[PastEvent](), dict[str | None, int](), dict[str | None, int]()
    for entry in entries:
        if entry.timer in ended and decided.get(entry.cause, entry.sequence) < ended[entry.timer]:
            continue
        found.append(entry)
        if entry.command is not None:
            decided[entry.cause] = entry.sequence
        if entry.ended is not None:
            ended[entry.ended] = entry.sequence
    return found


def _merged(pasts: Sequence[BoundaryPast]) -> Sequence[PastEvent]:
    if len(pasts) == 1:
        return pasts[0].entries
    by_sequence = {entry.sequence: entry for past in pasts for entry in past.entries}
    return [by_sequence[sequence] for sequence in sorted(by_sequence)]


def _folded(
    entries: Sequence[PastEvent], snapshot: SnapshotState | None, spec: ProjectionSpec, key: str
) -> bytes | None:
    """The state of a snapshot with the events after it."""
    assert snapshot is not None
    value = snapshot.value
    after = bisect_right(entries, snapshot.sequence, key=lambda entry: entry.sequence)
    for entry in islice(entries, after, None):
        if type(entry.event) in spec.events and key in spec.keys_of(entry.event):
            value = spec.fold(key, value, entry.event)
    return value


def advance_snapshot(
    pasts: Sequence[BoundaryPast], spec: ProjectionSpec, key: str, last: int, since: datetime.datetime
) -> None:
    """Have the events up to ``last`` in the state, so that the next command need not fold them, nor keep them.

    Only for boundaries that are known to be whole up to there. Commands are known by their ids if they were stored
    ``since`` then.
    """
    try:
        snapshot = SnapshotState(_folded(_merged(pasts), pasts[0].snapshot, spec, key), last)
    except user_errors():
        return  # the next command that looks at the state raises this, and says so to its caller
    for past in pasts:
        past.snapshot = snapshot
        past.trim(since)


class BoundaryCache:
    """The boundaries that were used last, up to a number of events."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._pasts: OrderedDict[tuple[str, str], tuple[BoundaryPast, int]] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._pasts)

    def get(self, filter: str, snapshot: str = "") -> BoundaryPast | None:
        """The cached past of a filter, optionally with the key of a snapshot."""
        found = self._pasts.get((filter, snapshot))
        return None if found is None else found[0]

    def put(self, past: BoundaryPast, snapshot: str = "") -> None:
        """Keep a boundary as the newest, and let go of the oldest ones."""
        place = past.filter, snapshot
        known = self._pasts.get(place)
        weight = max(len(past.entries), len(past.decided)) + 1
        self._pasts[place] = past, weight
        if known is not None:
            self._pasts.move_to_end(place)
            self._weight -= known[1]
        self._weight += weight
        while self._weight > self._max_events and self._pasts:
            _, (_, weight) = self._pasts.popitem(last=False)
            self._weight -= weight

    def clear(self) -> None:
        self._pasts.clear()
        self._weight = 0

    def drop(self, filter: str, snapshot: str = "") -> None:
        found = self._pasts.pop((filter, snapshot), None)
        if found is not None:
            self._weight -= found[1]
