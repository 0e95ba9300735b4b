"""A fold: the state of a key, and what its events make of it. Pure.

A fold is a function of the present state of a key and an event. A value carries the sequence of the last event applied
to it (header ``JetSpark-Sequence``), and an event at or below it is a no-op: a retry, a replay, or another engine at
the same time changes nothing.

**Theory.** That rule drops an event for good when a value goes beyond it without it. So a value may be stored only when
it has *all* events of its key that the same write has, and one invariant has to hold:

    of one write, a key's events are stored together, by one compare-and-set, or not at all.

Whatever fails then, doing the write again is right: a key that is stored has all its events, and they are no-ops; a key
that is not is as it was. :class:`States` keeps to it as long as it is given a key's events by ascending sequence, and
all of them before :meth:`States.changes` is asked for.

Two writes of one batch may have different events of the same key (two writes of Spark's ``foreachBatch``). Each value
says which batch it comes from, how many events of it, and a checksum of their sequences (header ``JetSpark-Batch``, a
:class:`Stamp`). A write of the same batch has the very same events up to the value's sequence, or it is another write,
and an error. Other batches and other programs are not compared: what they have that is older is a replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jetspark.errors import UsageError
from jetspark.state.changes import NOTHING, Change, Current, Outcome

__all__ = ["DELETE", "Applied", "Fold", "Piece", "Stamp", "States", "other_write", "some_keys"]

# An error names this many keys; it has to fit a log.
MAX_NAMED = 5


class _Delete:
    """What ``apply`` returns to have the key deleted."""

    def __repr__(self) -> str:
        return "DELETE"

    def __reduce__(self) -> str:
        return "DELETE"  # the same object in another process: it is compared by identity


DELETE = _Delete()


class Fold(Protocol):
    """Pure: the old state and an event in, the new state out."""

    def apply(self, state: Any, event: Any, sequence: int) -> Any:
        """The new state: anything JSON can say, or ``DELETE``. ``state`` is None for a key without a value."""


class Applied(NamedTuple):
    """An event on its way into a state."""

    sequence: int
    event: Any


class Piece(NamedTuple):
    """Some rows. No row of a later piece has a lower sequence."""

    keys: list[str]
    sequences: list[int]
    events: list[Any]
    """JSON, or what is parsed already."""


# A checksum of ascending sequences: the polynomial with them as coefficients, at a point, modulo a prime. The sum alone
# would take 1 and 4 for 2 and 3. Its value is stored: it must never change.
POINT, PRIME = 0x1F0A_93C5_7B2D_46E1, (1 << 61) - 1


class Stamp(NamedTuple):
    """What the last batch has added to a value: which batch, how many events, and a checksum of their sequences."""

    batch: str
    events: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.batch}:{self.events}:{self.checksum}"

    def plus(self, events: int, checksum: int) -> Stamp:
        """With as many later events."""
        return Stamp(self.batch, self.events + events, (self.checksum * pow(POINT, events, PRIME) + checksum) % PRIME)

    @classmethod
    def read(cls, text: str | None) -> Stamp | None:
        """None as well for what somebody else put there."""
        rest, _, checksum = (text or "").rpartition(":")
        batch, _, events = rest.rpartition(":")
        is_one = batch and all(each.isascii() and each.isdecimal() for each in (events, checksum))
        return cls(batch, int(events), int(checksum)) if is_one else None


class _Key:
    """A key's state: as it was loaded, and with the events since."""

    __slots__ = ("known", "known_events", "known_sum", "new_events", "new_sum", "sequence", "state", "stored")

    def __init__(self, known: Current) -> None:
        self.known = known
        self.stored = self.sequence = known.sequence
        self.state: Any = None if known.value is None else json.loads(known.value)
        self.known_events = self.known_sum = self.new_events = self.new_sum = 0


class States:
    """The states of the keys a write has events of. Rows are applied by ascending sequence."""

    def __init__(self, fold: Fold, batch: str | None = None) -> None:
        """``batch`` names the micro-batch the events belong to, wherever and however often it is run."""
        self._fold, self._batch = fold, batch
        self._keys: dict[str, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def dropped(self) -> int:
        """Events that the values had already."""
        return sum(each.known_events for each in self._keys.values())

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def names(self) -> list[str]:
        return list(self._keys)

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those that have to be loaded before events of them are applied."""
        return [key for key in dict.fromkeys(keys) if key not in self._keys]

    def add(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        for key in keys:
            self._keys[key] = _Key(loaded.get(key, NOTHING))

    def apply(self, rows: Iterable[tuple[str, int, Any]], parse: Callable[[Any], Any]) -> None:
        apply, keys = self._fold.apply, self._keys
        for name, sequence, event in rows:
            key = keys[name]
            # Not what was applied last: a message may have several events for a key.
            if sequence <= key.stored:
                key.known_events += 1
                key.known_sum = (key.known_sum * POINT + sequence) % PRIME
                continue
            key.state = apply(None if key.state is DELETE else key.state, parse(event), sequence)
            key.sequence = sequence
            key.new_events += 1
            key.new_sum = (key.new_sum * POINT + sequence) % PRIME

    def changes(self) -> list[Change]:
        """One for each key with new events.

        Raises:
            UsageError: Another write of the same micro-batch has stored other events of a key.
        """
        clashing = [name for name, key in self._keys.items() if self._earlier(key) not in (None, self._known(key))]
        if clashing:
            raise other_write(clashing)
        return [self._change(name, key) for name, key in self._keys.items() if key.new_events]

    # ---- storing, round by round (:mod:`jetspark.state.rounds`) ------------------------------------------------

    def unsure(self) -> list[str]:
        return []  # a key is stored once, and then forgotten

    def look_again(self, keys: Iterable[str], loaded: Mapping[str, Current]) -> None:
        self.add(keys, loaded)

    def take(self) -> list[Change]:
        return self.changes()

    def settle(self, changes: Sequence[Change], outcome: Outcome) -> None:
        self._keys = {}
        self.add(outcome.conflicts, outcome.present)

    def _earlier(self, key: _Key) -> Stamp | None:
        """What this very batch has added to the value already, in an attempt before or by another write."""
        stamp = Stamp.read(key.known.stamp) if self._batch is not None else None
        return stamp if stamp is not None and stamp.batch == self._batch else None

    def _known(self, key: _Key) -> Stamp:
        return Stamp(self._batch or "", key.known_events, key.known_sum)

    def _change(self, name: str, key: _Key) -> Change:
        stamp = None
        if self._batch is not None:
            earlier = self._earlier(key) or Stamp(self._batch, 0, 0)
            stamp = str(earlier.plus(key.new_events, key.new_sum))
        if key.state is DELETE:
            return Change(name, b"", "delete", key.sequence, key.known.revision, stamp)
        value = json.dumps(key.state, separators=(",", ":"), sort_keys=True).encode()
        return Change(name, value, "put", key.sequence, key.known.revision, stamp)


def other_write(keys: Collection[str]) -> UsageError:
    return UsageError(
        f"another write of the same micro-batch has stored other events of {some_keys(keys)}: events that "
        "are older than those would be lost. Fold all events of a key by one write (unionByName), or into a bucket for "
        "each write; values that two writes have met in have to be deleted and folded from their first event"
    )


def some_keys(keys: Collection[str]) -> str:
    """Some of the keys, for an error."""
    named = [repr(key) for key, _ in zip(keys, range(MAX_NAMED), strict=False)]
    more = len(keys) - len(named)
    return f"key{'s' if len(keys) > 1 else ''} {', '.join(named)}{f' and {more} more' if more else ''}"
