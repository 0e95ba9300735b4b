"""One change of an entity: its new state, with events and timers. Pure.

A change is stored whole or not at all: the state is stored only if the entity has not changed since it was read, and
all other messages are in its batch. The state carries the id of the change and the ids of those before it. So a program
without an acknowledgement can check whether its change was stored, even after later changes.

Changes of several entities are a :class:`JointChange`: each has its own guard, and all are in one batch. One entity
that has changed since it was read makes the server refuse them all; so one state that records its change proves that
all were stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jetspark.app.contracts.envelope import Encoded
from jetspark.app.timers import ending_message
from jetspark.errors import UsageError

__all__ = [
    "MAX_MESSAGES",
    "EntityMessage",
    "JointChange",
    "LastChanges",
    "PendingChange",
    "next_group",
    "recent_changes",
]

CHANGES_HEADER = "JetSpark-Changes"
RECENT = 16
"""Changes that a state remembers, itself included."""
MAX_MESSAGES = 1000
"""Most messages of one atomic batch that the server allows by default."""
_ROLLUP = {"Nats-Rollup": "sub"}


@dataclass(frozen=True, slots=True)
class EntityMessage:
    """A message of a change; ``revision`` is that of the entity as it was read, on the message with its state."""

    subject: str
    data: bytes
    headers: dict[str, str]
    revision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingChange:
    """A change on its way into the stream."""

    id: str
    subject: str
    """The subject of the state."""
    revision: int
    state: bytes | None
    """None: the entity is deleted."""
    recent: tuple[str, ...] = ()
    """Ids of the changes that led to the state that was read, the last one first; empty if another program wrote it."""
    events: Sequence[Encoded] = ()
    timers: Sequence[Encoded] = ()
    cancels: Sequence[dict[str, str]] = ()
    """Headers that end a timer; each goes onto another message, and the last ones onto messages of their own."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """More headers of the state."""

    def messages(self) -> Iterator[EntityMessage]:
        """The messages in the order in which they are stored."""
        cancels = list(self.cancels[: 1 + len(self.events)])
        recent = ",".join([self.id, *self.recent][:RECENT])
        headers = {**self.headers, CHANGES_HEADER: recent, **_ROLLUP, **(cancels.pop() if cancels else {})}
        if self.state is None:
            headers["KV-Operation"] = "PURGE"
        yield EntityMessage(self.subject, self.state or b"", headers, self.revision)
        for event in self.events:
            ending = cancels.pop() if cancels else {}
            yield EntityMessage(event.subject, event.data, event.headers | ending)
        for message in (*self.endings, *self.timers):
            yield EntityMessage(message.subject, message.data, message.headers)

    @property
    def endings(self) -> list[Encoded]:
        """Messages that do nothing but end a timer: a message ends one, and the others have one each already."""
        return [ending_message(each) for each in self.cancels[1 + len(self.events) :]]

    @property
    def count(self) -> int:
        return max(1 + len(self.events), len(self.cancels)) + len(self.timers)

    @property
    def subjects(self) -> list[str]:
        """Subjects that a batch takes one message each for; the subjects of events have no such limit."""
        return [self.subject, *(each.subject for each in (*self.endings, *self.timers))]

    def was_stored(self, revision: int, recent: Sequence[str]) -> bool | None:
        """True if this change led to a later revision, whose state records ``recent``; None if that cannot be decided.

        Valid only once the change can no longer be stored: the revision has moved on since it was read.
        """
        if self.id in recent:
            return True
        if revision == self.revision:
            return False
        # The list has every change since the state was read if it has that state's own change.
        is_whole = self.recent[0] in recent if self.recent else self.revision == 0 and 0 < len(recent) < RECENT
        return False if is_whole else None


class LastChanges(NamedTuple):
    """The stored revision of an entity, and the changes that led to it."""

    revision: int
    recent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JointChange:
    """Changes of one entity or several that are stored together or not at all."""

    parts: tuple[PendingChange, ...]

    def __post_init__(self) -> None:
        if self.count > MAX_MESSAGES:
            raise UsageError(
                f"a change of {self.count} messages: expected {MAX_MESSAGES} or fewer, which are stored at once"
            )
        if sum(len(part.subjects) for part in self.parts) > len(self.subjects) or not self._is_clear_on_timers:
            raise UsageError(
                "changes of several entities that are stored together: an entity is there twice, or two of them set or "
                "cancel a timer of the same name; expected each once"
            )

    @property
    def _is_clear_on_timers(self) -> bool:
        """True if no timer is both set and cancelled. In one part the last call counts; for two parts it would depend
        on order."""
        if len(self.parts) == 1:
            return True
        ended = {ending["Nats-Scheduler"] for part in self.parts for ending in part.cancels}
        return ended.isdisjoint(timer.subject for part in self.parts for timer in part.timers)

    @property
    def count(self) -> int:
        """The number of messages."""
        return sum(part.count for part in self.parts)

    @property
    def subjects(self) -> set[str]:
        """Subjects that a batch takes one message each for; the subjects of events have no such limit."""
        return {subject for part in self.parts for subject in part.subjects}

    def messages(self) -> list[EntityMessage]:
        """The messages in the order in which they are stored."""
        return [message for part in self.parts for message in part.messages()]

    def revisions(self, first: int) -> list[int]:
        """The revisions of the states if the batch's first message has this sequence."""
        counts = itertools.accumulate((part.count for part in self.parts[:-1]), initial=first)
        return list(counts)

    def was_stored(self, found: Sequence[LastChanges]) -> bool | None:
        """True if every part led to the stored state of its entity; see :meth:`PendingChange.was_stored`."""
        known = [part.was_stored(*each) for part, each in zip(self.parts, found, strict=True)]
        return True if True in known else False if False in known else None

    def moved(self, found: Sequence[LastChanges]) -> list[PendingChange]:
        """The parts whose entity has changed since it was read."""
        return [part for part, each in zip(self.parts, found, strict=True) if each.revision != part.revision]


def recent_changes(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The ids of the last changes that a state records; empty if another program wrote it."""
    text = headers.get(CHANGES_HEADER)
    return tuple(text.split(",")) if text else ()


def next_group(waiting: Sequence[JointChange], most: int = MAX_MESSAGES) -> list[JointChange]:
    """The changes that are stored together next: in their order, one for each entity, as many as fit."""
    group: list[JointChange] = []
    subjects: set[str] = set()
    count = 0
    for change in waiting:
        mine = change.subjects
        if mine & subjects or count + change.count > most:
            # Later changes may concern the same entity, so they wait: order is kept.
            break
        group.append(change)
        subjects |= mine
        count += change.count
    return group
