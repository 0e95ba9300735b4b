"""Entities from a program's side: read one, change it, and everything that goes with the change, at once."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from jetspark.aio.context import context_of
from jetspark.aio.ordered import Watch
from jetspark.app.contracts.envelope import derived_id
from jetspark.app.entities.changes import PendingChange, recent_changes
from jetspark.app.entities.committer import Committer
from jetspark.app.entities.entity_spec import EntitySpec
from jetspark.app.server_clock import server_clock
from jetspark.app.timers import Seconds, When, cancelling, timer_message
from jetspark.core.arguments import function
from jetspark.core.numbers import whole
from jetspark.errors import ConfigError, Conflict, UsageError
from jetspark.jetstream.ordered import OrderedOptions

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.stream_message import JetStreamMessage
    from jetspark.app.contracts.envelope import Encoded
    from jetspark.app.entities.event_comparison import Reconciliation
    from jetspark.app.spec import AppSpec
    from jetspark.jetstream.info import StoredMessage

__all__ = ["Entities", "EntityChange", "EntityChanges", "EntityWriter", "StoredEntity", "UnreadableEntity"]

TRIES = 20


class EntityWriter(NamedTuple):
    """The source of changes: a client or a handler."""

    app: AppSpec
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
        spec = self.app.entities.get(name)
        if spec is None:
            known = ", ".join(sorted(self.app.entities)) or "none"
            raise ConfigError(f"entities {name!r}: expected one of those of app {self.app.name!r}: {known}")
        return Entities(self, spec)


class EntityRead(NamedTuple):
    """An entity as it was read."""

    state: Any
    revision: int
    recent: tuple[str, ...]
    """The changes that have led to it, the last one first."""


class StoredEntity(NamedTuple):
    """An entity as a listing shows it."""

    key: str
    state: Any
    revision: int


class UnreadableEntity(NamedTuple):
    """An entity whose stored state does not match its kind."""

    key: str
    reason: str
    revision: int


class Entities:
    """The entities of one kind: ``client.entities("orders")``."""

    def __init__(self, writer: EntityWriter, spec: EntitySpec) -> None:
        self._writer, self._spec = writer, spec

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def bucket(self) -> str | None:
        """The bucket that has the states, by :meth:`key_of`; None if the application's stream is not that of one."""
        return self._spec.state_subjects.bucket

    def key_of(self, key: str) -> str:
        """The key of an entity's state in the bucket."""
        return self._spec.key_of(key)

    def subject_of(self, key: str) -> str:
        """The subject of an entity's state in the stream."""
        return self._spec.subject_of(key)

    async def get(self, key: str) -> Any:
        """The state of an entity; None if it does not exist.

        Includes every change that this client has made. On a replicated stream, changes that other clients made a
        moment ago may be missing; a change based on that state is then refused. A handler reads from the leader.
        """
        return (await self.read(key)).state

    def change(self, key: str) -> EntityChange:
        """Change an entity: ``async with orders.change("o-1") as change``.

        Entering reads it; leaving stores its new state, if it is still as it was read, together with the events and
        timers, or nothing. Leaving by an exception stores nothing.
        """
        return EntityChange(self, self._writer, self._spec, key)

    def changes(self, *entities: str | EntityChange) -> EntityChanges:
        """Change several entities together: ``async with accounts.changes("a", "b") as (source, target)``.

        Leaving the block stores the new states of all of them with their events and timers, or nothing: only if every
        entity is unchanged since it was read. The entities may have been read at different moments; then leaving raises
        ``Conflict``.

        Args:
            entities: Keys of this kind, or changes of another: ``orders.changes("o-1", stock.change("tea"))``.
        """
        parts = [each if isinstance(each, EntityChange) else self.change(each) for each in entities]
        return EntityChanges(self._writer.committer, parts)

    async def modify(self, key: str, decide: Callable[[EntityChange], object], *, tries: int = TRIES) -> EntityChange:
        """Change an entity by a function of the change, which is called again on the new state if others were faster.

        In a handler it is not called if an earlier attempt has stored the change: see :attr:`EntityChange.was_made`.

        Args:
            decide: Called with the change, and fills it; may be async. It runs once for each try, and only the last run
                counts.
            tries: The number of tries.

        Raises:
            Conflict: Others were faster each time; nothing was stored.
        """
        [change] = await self.modify_many([key], decide, tries=tries)
        return change

    async def modify_many(
        self, entities: Sequence[str | EntityChange], decide: Callable[..., object], *, tries: int = TRIES
    ) -> tuple[EntityChange, ...]:
        """Change several entities together by a function, which gets their changes in the same order.

        It is called again with the new states if another writer was faster for one of them; see :meth:`modify`.

        Raises:
            Conflict: Others were faster each time; nothing was stored.
        """
        whole("tries", tries)
        function("decide", decide, "a function that takes a change")
        joint = self.changes(*entities)
        async with self._writer.committer.turn(joint.subjects):
            return await self._modify(joint, decide, tries)

    async def _modify(
        self, joint: EntityChanges, decide: Callable[..., object], tries: int
    ) -> tuple[EntityChange, ...]:
        for number in range(tries):
            parts = await joint.begin()
            if joint.was_made:
                return parts
            decided = decide(*parts)
            if isinstance(decided, Awaitable):
                await decided
            try:
                await joint.end()
            except Conflict:
                if number == tries - 1:
                    raise
                joint = joint.again()
            else:
                return parts
        raise AssertionError

    async def keys(self) -> AsyncIterator[str]:
        """The keys of existing entities, each once, in no order. Changes during the iteration may or may not be
        included."""
        async for key, _ in self._present(headers_only=True):
            yield key

    async def list(self) -> AsyncIterator[StoredEntity]:
        """The existing entities, each once, in no order. Changes during the iteration may or may not be included.

        Raises:
            ConfigError: Some states cannot be read. All others came before this is raised.
        """
        unreadable: list[UnreadableEntity] = []
        async for found in self.list_all():
            if isinstance(found, StoredEntity):
                yield found
            else:
                unreadable.append(found)
        if unreadable:
            more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
            raise ConfigError(f"{unreadable[0].reason}{more}")

    async def list_all(self) -> AsyncIterator[StoredEntity | UnreadableEntity]:
        """Like :meth:`list`, including entities whose states cannot be read."""
        async for key, message in self._present():
            revision = message.metadata.stream_sequence
            found: StoredEntity | UnreadableEntity
            try:
                found = StoredEntity(key, self._spec.decode(message.data, key), revision)
            except ConfigError as error:
                found = UnreadableEntity(key, str(error), revision)
            yield found

    async def watch(self, key: str) -> AsyncIterator[Any]:
        """The current state of an entity, then each new one, without end; None while the entity does not exist."""
        options = OrderedOptions(filter_subjects=(self._spec.subject_of(key),), deliver_policy="last_per_subject")
        was_seen = False
        changes = self._watching().changes(options, initial_marker=True, ignore_deletes=False)
        async with contextlib.aclosing(changes) as messages:  # type: ignore[type-var]
            async for message in messages:
                if message is not None:
                    was_seen = True
                    yield None if _is_gone(message) else self._spec.decode(message.data, key)
                elif not was_seen:
                    yield None

    async def _present(self, *, headers_only: bool = False) -> AsyncIterator[tuple[str, JetStreamMessage]]:
        """Key and state of the entities there are."""
        options = OrderedOptions(
            filter_subjects=(self._spec.filter,), deliver_policy="last_per_subject", headers_only=headers_only
        )
        seen = set[str]()  # one that changes meanwhile may come twice
        async with contextlib.aclosing(self._watching().present(options, f"entities {self.name!r}")) as messages:
            async for message in messages:
                key = self._spec.key_in(message.subject, message.headers)
                if key is not None and message.subject not in seen and not _is_gone(message):
                    seen.add(message.subject)
                    yield key, message

    def _watching(self) -> Watch[JetStreamMessage]:
        return Watch(context_of(self._writer.js), self._writer.app.stream, lambda message: message, _is_gone)

    async def reconcile(
        self,
        *,
        keys: Collection[str] = (),
        repair: bool = False,
        dry_run: bool = False,
        rate: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Reconciliation:
        """Compare the state of each entity with what its events make, and repair what differs by the declared truth.

        Changes may continue during the comparison: a changed entity is compared again, and a repair is stored only if
        the entity is still as it was compared. The folded states of all entities are held in memory.

        Args:
            keys: Compare only these entities; all by default.
            repair: With the events as the truth, store the state that they fold to. With the state as the truth,
                publish the events that ``correct`` of the fold returns, in one batch with the state.
            dry_run: Only report what a repair would store.
            rate: Messages read each second, at most.
            on_progress: Called with the sequence being read, and the last one.

        Raises:
            ConfigError: The kind was declared without a fold.
            DataLoss: The stream drops old events by its limits.
        """
        from jetspark.app.entities.reconciliation import reconcile

        return await reconcile(
            self._writer, self._spec, keys=keys, repair=repair, dry_run=dry_run, rate=rate, on_progress=on_progress
        )

    async def read(self, key: str) -> EntityRead:
        """An entity as it is stored; see :meth:`get`."""
        found = await self._writer.committer.newest(self._spec.subject_of(key))
        if found is None:
            return EntityRead(None, 0, ())
        state = None if _is_gone(found) else self._spec.decode(found.data, key)
        return EntityRead(state, found.sequence, recent_changes(found.headers))


def _is_gone(message: StoredMessage | JetStreamMessage) -> bool:
    """True for a delete marker."""
    return "KV-Operation" in message.headers or "Nats-Marker-Reason" in message.headers


class EntityChange:
    """The change of one entity; see :meth:`Entities.change`."""

    def __init__(
        self, entities: Entities, writer: EntityWriter, spec: EntitySpec, key: str, *, id: str | None = None
    ) -> None:
        self._entities, self._writer, self._spec = entities, writer, spec
        self._subject, self.key = spec.subject_of(key), key
        self.id = writer.change_id(self._subject) if id is None else id
        """The id of the change; later states record it."""
        self.state: Any = None
        """The state that was read; None if the entity does not exist. Mutating the object stores nothing: see
        :meth:`set`."""
        self.revision = 0
        """The revision that was read; after the block the stored one, or a later one if the acknowledgement was lost.
        """
        self.was_made = False
        """In a handler: an earlier attempt has stored this change, and leaving the block stores nothing. The state
        records the last 15 other changes."""
        self._recent: tuple[str, ...] = ()
        self._new: bytes | None = None
        self._is_set = False
        self._events: list[Encoded] = []
        self._timers: dict[str, Encoded] = {}
        self._due_after: dict[str, tuple[Seconds, Any, str]] = {}
        """Timers that are due some time after the change by the server's clock, with their events and ids."""
        self._cancels: dict[str, None] = {}
        """By name, like timers; the last call for one timer counts."""
        self._made = 0
        self._phase = "before"

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self.end()
        self._phase = "after"

    async def begin(self) -> None:
        """Enter the block."""
        if self._phase != "before":
            raise UsageError("a change is used once: call entities.change(key) again")
        self.state, self.revision, self._recent = await self._entities.read(self.key)
        self.was_made = self.id in self._recent
        self._phase = "inside"

    async def end(self) -> None:
        """Leave the block: store the change."""
        self._phase = "after"
        if not self.was_made and self.is_something:
            await self._find_dues()
            [self.revision] = await self._writer.committer.commit(self._pending())

    async def _find_dues(self) -> None:
        if not self._due_after:
            return
        now = await server_clock(self._writer.js, self._writer.app.stream).now()
        for name, (after, event, id) in self._due_after.items():
            self._set_timer(name, event, id, When.of(now, after=after))

    def again(self) -> EntityChange:
        """The same change, to be made on the state that the entity has by now."""
        return EntityChange(self._entities, self._writer, self._spec, self.key, id=self.id)

    @property
    def is_something(self) -> bool:
        """True if the change would store anything."""
        return self._is_set or bool(self._events or self._timers or self._cancels)

    def set(self, state: object) -> None:
        """Give the entity a new state.

        Raises:
            InvalidEvent: The state does not match this kind of entity.
        """
        self._check()
        self._new, self._is_set = self._spec.encode(state), True

    def delete(self) -> None:
        """Delete the entity. Its key may be used again."""
        self._check()
        self._new, self._is_set = None, True

    def emit(self, event: object) -> str:
        """Have an event published with the change; returns the id that it will have.

        Raises:
            InvalidEvent: A field breaks its contract.
            ConfigError: The application does not declare it: write ``@app.register`` above its class.
        """
        self._check()
        encoded = self._writer.encode(event, self._next_id(), None)
        self._events.append(encoded)
        return encoded.headers["Nats-Msg-Id"]

    def set_timer(
        self, name: str, event: object, *, at: datetime.datetime | None = None, after: Seconds | None = None
    ) -> str:
        """Set a timer with the change; see :meth:`Timers.set`. It needs ``App(timers=True)``.

        Returns the id that its event will have.
        """
        self._check()
        self._check_timers()
        id = self._set_timer(name, event, self._next_id(), When.of(self._writer.now(), at=at, after=after))
        self._due_after.pop(name, None)
        if after is not None:
            self._due_after[name] = after, event, id
        self._cancels.pop(name, None)  # it replaces what is set
        return id

    def _set_timer(self, name: str, event: object, id: str, when: When) -> str:
        encoded = self._writer.encode(event, id, when.due)
        self._timers[name] = timer_message(self._writer.app.name, name, when, encoded)
        return encoded.headers["Nats-Msg-Id"]

    def cancel_timer(self, name: str) -> None:
        """End a timer with the change, if it is set."""
        self._check()
        self._check_timers()
        self._timers.pop(name, None)
        self._due_after.pop(name, None)
        self._cancels[name] = None

    def _next_id(self) -> str:
        """The id of the next event, the same each time the change is tried."""
        id = derived_id(self.id, "event", self._made)
        self._made += 1
        return id

    def _check(self) -> None:
        if self._phase != "inside":
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
            timers=[*self._timers.values()],
            cancels=[cancelling(self._writer.app.name, name) for name in self._cancels],
            headers=self._spec.key_headers(self.key),
        )


class EntityChanges:
    """Changes of several entities that are stored together; see :meth:`Entities.changes`."""

    def __init__(self, committer: Committer, parts: Sequence[EntityChange]) -> None:
        if len({part._subject for part in parts}) < len(parts) or not parts:
            names = ", ".join(repr(part.key) for part in parts) or "none"
            raise UsageError(f"changes of several entities, with keys {names}: expected one or more, each once")
        self._committer, self._parts = committer, tuple(parts)

    @property
    def subjects(self) -> list[str]:
        """The subjects of the states in the stream."""
        return [part._subject for part in self._parts]

    @property
    def was_made(self) -> bool:
        """In a handler: an earlier attempt has stored these changes, and leaving the block stores nothing."""
        # All were stored together, so one state that records its change proves it for all.
        return any(part.was_made for part in self._parts)

    async def __aenter__(self) -> tuple[EntityChange, ...]:
        return await self.begin()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self.end()
        for part in self._parts:
            part._phase = "after"

    async def begin(self) -> tuple[EntityChange, ...]:
        """Enter the block."""
        await asyncio.gather(*(part.begin() for part in self._parts))
        return self._parts

    async def end(self) -> None:
        """Leave the block: store the changes."""
        for part in self._parts:
            part._phase = "after"
        if self.was_made or not any(part.is_something for part in self._parts):
            return
        for part in self._parts:
            await part._find_dues()
        revisions = await self._committer.commit(*(part._pending() for part in self._parts))
        for part, revision in zip(self._parts, revisions, strict=True):
            part.revision = revision

    def again(self) -> EntityChanges:
        """The same changes, to be made on the states that the entities have by now."""
        return EntityChanges(self._committer, [part.again() for part in self._parts])
