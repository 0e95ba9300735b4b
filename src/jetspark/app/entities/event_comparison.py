"""Compares the state of an entity with the fold of its events, and plans the repair of a difference. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from jetspark.app.entities.entity_spec import EntitySpec, Truth
from jetspark.errors import ConfigError, InvalidEvent

__all__ = [
    "EntityDifference",
    "EntityState",
    "Folded",
    "NotRepairable",
    "Outcome",
    "Reconciliation",
    "Repair",
    "difference",
    "repair_of",
]

EntityDifferenceKind: TypeAlias = Literal["missing", "extra", "value", "unreadable", "fold"]
"""``missing``: no state, although the events yield one; ``extra``: a state that no events yield; ``value``: another
state; ``unreadable``: the state cannot be decoded; ``fold``: the events cannot be folded."""


Outcome: TypeAlias = Literal["found", "would repair", "repaired", "not repairable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntityDifference:
    """An entity whose state is not what its events make."""

    key: str
    """The entity's key; its key in the bucket where the former is unknown."""
    kind: EntityDifferenceKind
    state: str | None
    folded: str | None
    sequence: int
    """The sequence up to which both were compared."""
    outcome: Outcome
    note: str = ""
    """The repair that was stored, or would be; or why no repair is possible."""

    def __str__(self) -> str:
        what = f"{self.key}: {self.kind}: state {self.state}, and its events make {self.folded}"
        return f"{what}: {self.outcome}{f': {self.note}' if self.note else ''}"


@dataclass(slots=True, kw_only=True)
class Reconciliation:
    """The result of comparing one kind of entities with their events."""

    entities: str
    truth: Truth
    boundary: int = 0
    """Everything up to this sequence was read; suspects were compared again later."""
    keys: int = 0
    """Entities that have a state, or had one."""
    events: int = 0
    unreadable: int = 0
    """Events that cannot be read, and are in no fold."""
    differences: list[EntityDifference] = field(default_factory=list)
    moving: list[str] = field(default_factory=list)
    """Keys of entities that differed, and changed during each comparison."""

    @property
    def is_equal(self) -> bool:
        """True if no difference is left."""
        return not self.moving and all(each.outcome == "repaired" for each in self.differences)

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "equal": self.is_equal}

    def __str__(self) -> str:
        counts = [f"{len(self.differences)} differ" if self.differences else "equal to their events"]
        repaired = sum(each.outcome == "repaired" for each in self.differences)
        counts += [f"{repaired} repaired"] if repaired else []
        counts += [f"{len(self.moving)} changed all the time"] if self.moving else []
        counts += [f"{self.unreadable} events cannot be read"] if self.unreadable else []
        return (
            f"entities {self.entities} (the {self.truth} {'is' if self.truth == 'state' else 'are'} the truth): "
            f"{self.keys} keys, {self.events} events up to sequence {self.boundary}: {', '.join(counts)}"
        )


class EntityState(NamedTuple):
    """The stored state of an entity."""

    data: bytes | None
    """None: the entity was deleted, or never there."""
    revision: int = 0
    recent: tuple[str, ...] = ()
    batch: str = ""
    """The atomic batch it was stored by."""


class Folded(NamedTuple):
    """The fold of an entity's events up to a sequence."""

    data: bytes | None = None
    sequence: int = 0
    error: str = ""
    """The error of the first event that could not be applied; later events were not applied either."""

    def then(self, spec: EntitySpec, token: str, sequence: int, event: object) -> Folded:
        """The fold with one more event; an event that it already includes changes nothing."""
        if sequence <= self.sequence or self.error:
            return self
        assert spec.fold is not None
        try:
            data = spec.fold.spec.fold(token, self.data, event)
            return Folded(None if data is None else spec.encode(spec.decode(data)), sequence)
        except Exception as error:  # of the user's code
            return self._replace(error=f"event {sequence}: {type(error).__name__}: {error}")


class NotRepairable(Exception):
    """The declaration does not allow a repair."""


class Repair(NamedTuple):
    """A repair: the state to store, and the events to store with it."""

    state: bytes | None
    events: tuple[object, ...] = ()


def difference(spec: EntitySpec, state: EntityState, folded: Folded) -> EntityDifferenceKind | None:
    """The kind of difference between the state of an entity and its events; None if they agree."""
    if folded.error:
        return "fold"
    if state.data is None or folded.data is None:
        return None if state.data == folded.data else "missing" if state.data is None else "extra"
    try:
        # Other programs may have written it, with its fields in another order.
        canonical = spec.encode(spec.decode(state.data))
    except (ConfigError, InvalidEvent):
        return "unreadable"
    return None if canonical == folded.data else "value"


def repair_of(spec: EntitySpec, token: str, key: str | None, state: EntityState, folded: Folded) -> Repair:
    """The repair that follows from the declared truth.

    Args:
        token: The last part of the entity's key in the bucket.
        key: The entity's key; None if it is unknown because the token is a hash.

    Raises:
        NotRepairable: No repair is possible; the message is the reason.
    """
    assert spec.fold is not None
    if folded.error:
        raise NotRepairable(f"its events cannot be folded ({folded.error}): mend apply")
    if spec.truth == "events":
        return Repair(folded.data)
    if spec.fold.correct is None:
        raise NotRepairable("the state is the truth, and the fold has no correct(key, folded, state)")
    if key is None:
        raise NotRepairable("its key is not known: it is longer than a key of a bucket may be")
    try:
        wanted = None if state.data is None else spec.encode(spec.decode(state.data))
        before = None if folded.data is None else spec.decode(folded.data)
        after = None if wanted is None else spec.decode(wanted)
        events = tuple(spec.fold.correct(key, before, after))
    except Exception as error:  # of the user's code, or a state that cannot be read
        raise NotRepairable(f"{type(error).__name__}: {error}") from error
    _check_leads_there(spec, token, folded, wanted, events)
    return Repair(state.data, events)


def _check_leads_there(
    spec: EntitySpec, token: str, folded: Folded, wanted: bytes | None, events: Sequence[object]
) -> None:
    assert spec.fold is not None
    reached = folded
    for number, event in enumerate(events, 1):
        if type(event) not in spec.fold.events:
            raise NotRepairable(f"correct returned {event!r}, whose type the fold does not take")
        if {each for each, _ in spec.fold.tokens_of(event)} != {token}:
            raise NotRepairable(f"correct returned {event!r}, which is not of this entity alone")
        reached = reached.then(spec, token, folded.sequence + number, event)
    if reached.error or reached.data != wanted:
        made = reached.error or _shown(reached.data)
        raise NotRepairable(f"correct returned events that lead to {made}, and not to the state {_shown(wanted)}")


def _shown(data: bytes | None) -> str:
    return "nothing" if data is None else data[:120].decode(errors="replace")
