"""Entities from a program's side: read one, change it, and everything that goes with the change, at once."""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from jetspark.app.contracts.envelope import derived_id
from jetspark.app.entities.changes import PendingChange, recent_changes
from jetspark.app.entities.committing import Committer, asking_again
from jetspark.app.entities.declaring import EntitySpec
from jetspark.app.timers import Seconds, When, cancelling, timer_message
from jetspark.core.numbers import whole
from jetspark.errors import ConfigError, Conflict, MessageNotFound, UsageError

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.stream import Stream
    from jetspark.app.contracts.envelope import Encoded
    from jetspark.app.declarations import Declarations

__all__ = ["Entities", "EntityChange", "EntityWriter"]

TRIES = 20


class EntityWriter(NamedTuple):
    """Who changes entities: a client, or a handler."""

    app: Declarations
    js: JetStream
    encode: Callable[[Any, str, datetime.datetime | None], Encoded]
    """An event as a message, with this id unless the event has one of its own, and this time if it is given."""
    change_id: Callable[[str], str]
    """The id of the next change of the state with this subject. In a handler it is the same when the event is handled
    again: by that a change is known that was made before."""
    now: Callable[[], datetime.datetime]
    committer: Committer

    def entities(self, name: str) -> Entities:
        """
        Raises:
            ConfigError: The application has no such kind.
        """
        spec = self.app.entity_specs.get(name)
        if spec is None:
            known = ", ".join(sorted(self.app.entity_specs)) or "none"
            raise ConfigError(f"entities {name!r}: expected one of those of app {self.app.name!r}: {known}")
        return Entities(self, spec)


class EntityRead(NamedTuple):
    """An entity as it was read."""

    state: Any
    revision: int
    recent: tuple[str, ...]
    """The changes that have led to it, the last one first."""


class Entities:
    """The entities of one kind: ``client.entities("orders")``."""

    def __init__(self, writer: EntityWriter, spec: EntitySpec) -> None:
        self._writer, self._spec = writer, spec
        self._stream: Stream | None = None

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def bucket(self) -> str:
        """The bucket that has the states."""
        return self._spec.bucket

    def key_of(self, key: str) -> str:
        """Where the state of an entity is in the bucket."""
        return self._spec.key_of(key)

    async def get(self, key: str) -> Any:
        """The state of an entity, by the word of the leader; None if there is none."""
        return (await self.read(key)).state

    def change(self, key: str) -> EntityChange:
        """Change an entity: ``async with orders.change("o-1") as change``.

        Entering reads it; leaving stores its new state, if it is still as it was read, together with the events and
        timers, or nothing. Leaving by an exception stores nothing.
        """
        return EntityChange(self, self._writer, self._spec, key)

    async def modify(self, key: str, decide: Callable[[EntityChange], Any], *, tries: int = TRIES) -> EntityChange:
        """Change an entity by a function of the change, which is called again on the new state if others were faster.

        In a handler it is not called if an earlier attempt has made the change: see :attr:`EntityChange.was_made`.

        Args:
            decide: Gets the change, and says what it is; may be async. It runs once for each try, and only the last
                one counts.
            tries: How often, at most.

        Raises:
            Conflict: Others were faster each time; nothing was stored.
        """
        whole("tries", tries)
        first = change = self.change(key)
        for number in range(tries):
            await change.begin()
            if change.was_made:
                return change
            decided = decide(change)
            if isinstance(decided, Awaitable):
                await decided
            try:
                await change.end()
            except Conflict:
                if number == tries - 1:
                    raise
                change = EntityChange(self, self._writer, self._spec, key, id=first.id)
            else:
                return change
        raise AssertionError

    async def read(self, key: str) -> EntityRead:
        """An entity as the stream's leader has it."""
        return await asking_again(lambda: self._read_once(key))

    async def _read_once(self, key: str) -> EntityRead:
        if self._stream is None:
            self._stream = await self._writer.js.stream(self._writer.app.stream)
        try:
            found = await self._stream.get_message(last_for=self._spec.subject_of(key), direct=False)
        except MessageNotFound:
            return EntityRead(None, 0, ())
        is_gone = "KV-Operation" in found.headers or "Nats-Marker-Reason" in found.headers
        state = None if is_gone else self._spec.decode(found.data)
        return EntityRead(state, found.sequence, recent_changes(found.headers))


class EntityChange:
    """What is to become of one entity; see :meth:`Entities.change`."""

    def __init__(
        self, entities: Entities, writer: EntityWriter, spec: EntitySpec, key: str, *, id: str | None = None
    ) -> None:
        self._entities, self._writer, self._spec = entities, writer, spec
        self._subject, self.key = spec.subject_of(key), key
        self.id = writer.change_id(self._subject) if id is None else id
        """Of the change; the states that follow remember it."""
        self.state: Any = None
        """As it was read; None if there is none. Changing the object itself changes nothing: see :meth:`set`."""
        self.revision = 0
        """The one that was read; after the block, the one that was stored, or a later one if its answer got lost."""
        self.was_made = False
        """In a handler: an earlier attempt has made this change, and leaving stores nothing. The state remembers that
        while no more than 15 other changes follow."""
        self._recent: tuple[str, ...] = ()
        self._new: bytes | None = None
        self._is_set = False
        self._events: list[Encoded] = []
        self._timers: list[Encoded] = []
        self._cancels: list[str] = []
        self._place = "before"

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self.end()
        self._place = "after"

    async def begin(self) -> None:
        """What entering the block does."""
        if self._place != "before":
            raise UsageError("a change is used once: call entities.change(key) again")
        self.state, self.revision, self._recent = await self._entities.read(self.key)
        self.was_made = self.id in self._recent
        self._place = "inside"

    async def end(self) -> None:
        """What leaving the block does."""
        self._place = "after"
        if not self.was_made and (self._is_set or self._events or self._timers or self._cancels):
            self.revision = await self._writer.committer.commit(self._pending())

    def set(self, state: Any) -> None:
        """Give the entity a new state.

        Raises:
            InvalidEvent: It is no state of this kind of entity.
        """
        self._check()
        self._new, self._is_set = self._spec.encode(state), True

    def delete(self) -> None:
        """End the entity. Its key may be used anew."""
        self._check()
        self._new, self._is_set = None, True

    def emit(self, event: Any) -> str:
        """Have an event published with the change; returns the id that it will have.

        Raises:
            InvalidEvent: A field breaks its contract.
        """
        self._check()
        self._writer.app.register(type(event))
        encoded = self._writer.encode(event, self._next_id(), None)
        self._events.append(encoded)
        return encoded.headers["Nats-Msg-Id"]

    def set_timer(
        self, name: str, event: Any, *, at: datetime.datetime | None = None, after: Seconds | None = None
    ) -> str:
        """Set a timer with the change; see :meth:`Timers.set`. It needs ``App(timers=True)``.

        Returns the id that its event will have.
        """
        self._check()
        self._check_timers()
        when = When.of(self._writer.now(), at=at, after=after)
        encoded = self._writer.encode(event, self._next_id(), when.due)
        self._timers.append(timer_message(self._writer.app.name, name, when, encoded))
        return encoded.headers["Nats-Msg-Id"]

    def cancel_timer(self, name: str) -> None:
        """End a timer with the change, if it is set."""
        self._check()
        self._check_timers()
        self._cancels.append(name)

    def _next_id(self) -> str:
        """Of its next event: the same when the change is tried again."""
        return derived_id(self.id, "event", len(self._events) + len(self._timers))

    def _check(self) -> None:
        if self._place != "inside":
            raise UsageError("a change is made inside of its block: async with entities.change(key) as change:")

    def _check_timers(self) -> None:
        if not self._writer.app.has_timers:
            raise ConfigError(f"app {self._writer.app.name!r} has no timers: declare it with App(..., timers=True)")

    def _pending(self) -> PendingChange:
        if not self._is_set:
            # Written as it was: the guard is on this message.
            self._new = None if self.state is None else self._spec.encode(self.state)
        return PendingChange(
            id=self.id,
            subject=self._subject,
            revision=self.revision,
            state=self._new,
            recent=self._recent,
            events=self._events,
            timers=self._timers,
            cancels=[cancelling(self._writer.app.name, name) for name in self._cancels],
        )
