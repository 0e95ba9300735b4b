"""Stores changes with asyncio; simultaneous changes share one atomic batch.

On one replica, a batch of one change takes as long as one of a hundred. So changes that arrive during a batch wait and
form the next one. If the server refuses a group, because another writer was faster for instance, it stores nothing of
the group: the committer halves it again and again until the failing change is alone, in at most ``2 n - 1`` batches.
Changes that would certainly be refused are not sent: their entity has been changed here since they read it, or their
caller has gone.

On a replicated stream any replica may answer a read, and may be behind. The guard of a change detects that. To read its
own writes, the committer remembers the revisions it knows (:class:`KnownRevisions`) and repeats a read for a moment
where a replica returns an older one. Workers read from the leader, which needs the permission to read the whole stream;
so does every client for a change in doubt, which a replica cannot decide.

A change without an acknowledgement is sent again. Its guard allows only one of the two to be stored, and its id
identifies it afterwards (:meth:`PendingChange.was_stored`). Where later changes have pushed that id out of the state,
the events decide: the stream keeps all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeAlias, TypeVar

from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.app.entities.changes import (
    EntityMessage,
    JointChange,
    LastChanges,
    PendingChange,
    next_group,
    recent_changes,
)
from jetspark.app.turns import Turns
from jetspark.core.backoff import Backoff
from jetspark.errors import (
    Conflict,
    ConnectionClosed,
    DuplicateMessageId,
    JetSparkError,
    MessageNotFound,
    WrongLastSequence,
)
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.operations import message_query
from jetspark.jetstream.publishing import Expect, may_be_stored

__all__ = ["Committer", "KnownRevisions", "asking_again"]

T = TypeVar("T")

PAUSE = Backoff(first_s=0.05, max_s=1.0)
ATTEMPTS = 10
"""How often a change is sent that gets no answer, or that the server cannot take at the moment."""
MAX_LOOKS = 1000
"""At most this many events are read, one by one, to find that of a change in doubt; that takes about half a second."""

# A task with the turn, and the tasks that it starts.
_HAS_TURN: ContextVar[bool] = ContextVar("jetspark_entity_turn", default=False)

LAG = Backoff(first_s=0.005, max_s=0.25)
LAG_READS = 12
"""How often a lagging replica is asked again, about two seconds in all. Its answer then counts: the entity may have
been purged, or the stream re-created."""
MAX_KNOWN = 4096

_Waiting: TypeAlias = tuple[JointChange, "asyncio.Future[list[int]]"]


class _Refusal(Exception):
    """The server does not store this; ``doubt`` is why an attempt before may have been stored."""

    def __init__(self, error: JetSparkError, doubt: JetSparkError | None) -> None:
        super().__init__(error)
        self.error, self.doubt = error, doubt


class KnownRevisions:
    """Lower bounds of the revisions of recently used states."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._known: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, subject: str, revision: int) -> None:
        """The state with this subject has this revision, or a later one."""
        known = max(revision, self._known.pop(subject, 0))
        self._known[subject] = known
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def of(self, subject: str) -> int:
        """The least revision that the state has; 0 if nothing is known."""
        return self._known.get(subject, 0)

    def forget(self, subject: str) -> None:
        self._known.pop(subject, None)


class Committer:
    """The changes of one program on their way into one stream."""

    def __init__(self, js: JetStream, stream: str, *, from_leader: bool) -> None:
        """``from_leader``: read states only from the stream's leader."""
        self._js, self._stream, self._from_leader = js, stream, from_leader
        self._context = context_of(js)
        self._known = KnownRevisions()
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._turns = Turns()
        self.batches = self.changes = 0
        """How many batches or single messages were stored, and how many changes they contained."""
        self.sent = 0
        """Changes sent, including refused and repeated ones."""

    async def newest(self, subject: str) -> StoredMessage | None:
        """The state with a subject, at least as new as this program knows it to be; None if it does not exist.

        Raises:
            PermissionDenied: This user may not read the state.
            JetSparkError: The server did not answer any of the attempts.
        """
        for number in range(LAG_READS + 1):
            if number:
                await asyncio.sleep(LAG.wait_s(number))
            found = await asking_again(partial(self._last, subject, from_leader=self._from_leader))
            if self._from_leader or self._known.of(subject) <= (0 if found is None else found.sequence):
                return found
        self._known.forget(subject)
        return found

    @asynccontextmanager
    async def turn(self, subjects: Collection[str]) -> AsyncGenerator[None, None]:
        """Wait for the turn: no other task of this program changes one of these entities until the block ends.

        A function that changes entities may change others on the way. It does not wait then: those it would wait for
        may wait for it.
        """
        if _HAS_TURN.get():
            yield
            return
        names = sorted(subjects)
        if not self._turns.try_begin(names):
            await self._turns.begin(names)
        token = _HAS_TURN.set(True)
        try:
            yield
        finally:
            _HAS_TURN.reset(token)
            self._turns.end(names)

    async def commit(self, *parts: PendingChange) -> list[int]:
        """Store a change of an entity, or of several together; returns their new revisions.

        Cancelled, the change may be stored or not.

        Raises:
            Conflict: Another writer changed an entity; nothing was stored.
            ServerError: The server refused it; nothing was stored.
            NetworkError: The outcome is unknown.
            UsageError: There are too many messages, or two changes of one entity; nothing was stored.
        """
        change = JointChange(parts)
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        if change.count == 1:
            # A single message needs no batch and costs the server little.
            await self._store([(change, done)])
            return await done
        self._waiting.append((change, done))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await done

    async def close(self) -> None:
        """Store nothing more, and fail the waiting changes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        while self._waiting:
            _fail(self._waiting.popleft()[1], ConnectionClosed("the client was closed before the change was stored"))

    async def _work(self) -> None:
        try:
            # Changes that are refused already, and those of callers that have gone, are left out.
            while waiting := deque(each for each in self._waiting if not each[1].done()):
                self._waiting = waiting
                group = next_group([change for change, _ in self._waiting])
                taken = [self._waiting.popleft() for _ in group]
                try:
                    await self._store(taken)
                finally:
                    # Cancelled in the middle: finished changes keep their result.
                    for _, done in taken:
                        _fail(done, ConnectionClosed("the change was given up: it may be stored or not"))
        finally:
            self._task = None

    async def _store(self, group: list[_Waiting], doubt: JetSparkError | None = None, attempt: int = 1) -> None:
        """Settle every change of a group, one way or the other."""
        try:
            revisions = await self._send([change for change, _ in group], doubt)
        except _Refusal as refusal:
            if len(group) > 1:
                middle = len(group) // 2
                await self._store(group[:middle], refusal.doubt)
                await self._store(group[middle:], refusal.doubt)
            else:
                await self._resolve_refusal(*group[0], refusal, attempt)
        except JetSparkError as error:
            for _, done in group:
                _fail(done, error)
        else:
            self.batches += 1
            self.changes += len(group)
            for (change, done), mine in zip(group, revisions, strict=True):
                for part, revision in zip(change.parts, mine, strict=True):
                    self._known.learn(part.subject, revision)
                if not done.done():
                    done.set_result(mine)
                self._refuse_overtaken(change, mine)

    def _refuse_overtaken(self, stored: JointChange, revisions: list[int]) -> None:
        """Tell those who wait, and have read an entity before it was changed here."""
        now = {part.subject: revision for part, revision in zip(stored.parts, revisions, strict=True)}
        for change, done in self._waiting:
            # Revisions only grow: a part with a later one was read after another program had changed the entity again.
            moved = [part for part in change.parts if part.revision < now.get(part.subject, 0)]
            if moved:
                _fail(done, _conflict(moved))

    async def _resolve_refusal(
        self, change: JointChange, done: asyncio.Future[list[int]], refusal: _Refusal, attempt: int = 1
    ) -> None:
        error, doubt = refusal.error, refusal.doubt
        if not isinstance(error, WrongLastSequence | DuplicateMessageId):
            _fail(done, doubt or error)
            return
        if doubt is None and len(change.parts) == 1 and isinstance(error, WrongLastSequence):
            [part] = change.parts
            self._known.learn(part.subject, part.revision + 1)
            _fail(done, _conflict(change.parts))
            return
        try:
            found = await self._after_refusal(change, is_in_doubt=doubt is not None)
        except JetSparkError as failed:
            _fail(done, doubt or failed)
            return
        moved = change.moved(found)
        if doubt is not None and not moved and attempt < ATTEMPTS:
            # Refused, and nothing was stored since: replicas refuse what an attempt before has under way.
            await asyncio.sleep(PAUSE.wait_s(attempt))
            await self._store([(change, done)], doubt, attempt + 1)
            return
        stored = change.was_stored(found) if doubt is not None else False
        if stored is None:
            try:
                stored = await self._has_event(change)
            except JetSparkError:
                _fail(done, doubt or error)
                return
        if stored and not done.done():
            # A later revision is all that is known about the changes behind it.
            done.set_result([each.revision for each in found])
        elif stored is None or (doubt is not None and not moved):
            assert doubt is not None
            _fail(done, doubt)
        elif not moved and isinstance(error, DuplicateMessageId):
            _fail(done, error)  # nobody was faster: an event has the id of one that is stored
        else:
            _fail(done, _conflict(moved or change.parts))

    async def _after_refusal(self, change: JointChange, *, is_in_doubt: bool) -> list[LastChanges]:
        """Revisions and last changes of the entities of a change that was refused."""
        from_leader = is_in_doubt or self._from_leader
        for number in range(1 if from_leader else LAG_READS + 1):
            if number:
                await asyncio.sleep(LAG.wait_s(number))
            found = []
            for part in change.parts:
                message = await asking_again(partial(self._last, part.subject, from_leader=from_leader))
                found.append(_changes_of(message))
                self._known.learn(part.subject, found[-1].revision)
            if change.moved(found):
                break
        return found

    async def _last(self, subject: str, *, from_leader: bool) -> StoredMessage | None:
        try:
            return await self._get(message_query(last_for=subject), from_leader=from_leader)
        except MessageNotFound:
            return None

    async def _get(self, query: Mapping[str, object], *, from_leader: bool) -> StoredMessage:
        # Not by `Stream`, which would need the permission to read its info, and that lists the keys of all entities.
        read = self._context.api.get_message(self._stream, query, direct=not from_leader)
        return await self._context.run(read)

    async def _has_event(self, change: JointChange) -> bool | None:
        """True if the stream has an event of a change that can no longer be stored; None if that cannot be decided."""
        part = next((part for part in change.parts if part.events), None)
        if part is None:
            return None
        event, sequence = part.events[0], part.revision + 1
        for _ in range(MAX_LOOKS):
            query = message_query(sequence=sequence, next_for=event.subject)
            try:
                found = await asking_again(partial(self._get, query, from_leader=True))
            except MessageNotFound:
                return False
            # The id of an event would not do: an application may give ids of its own, even one that an event of
            # another change has.
            if found.data == event.data:
                return True
            sequence = found.sequence + 1
        return None

    async def _send(self, changes: list[JointChange], doubt: JetSparkError | None) -> list[list[int]]:
        """Store all of them and return their revisions; a batch without an acknowledgement is sent again.

        Raises:
            _Refusal: The server refuses these permanently.
            JetSparkError: The server cannot take them at the moment; a NetworkError if an attempt may be stored.
        """
        failures = 0
        messages = [message for change in changes for message in change.messages()]
        while True:  # not patiently: an error that does not pass means something else after one in doubt
            try:
                sequence = await self._send_once(messages)
                break
            except ConnectionClosed as closed:
                raise doubt or closed from None
            except JetSparkError as error:
                if may_be_stored(error):
                    doubt = error
                elif not error.may_pass:
                    raise _Refusal(error, doubt) from error
                failures += 1
                if failures == ATTEMPTS:
                    raise doubt or error from None
            await asyncio.sleep(PAUSE.wait_s(failures))
        revisions = []
        for change in changes:
            revisions.append(change.revisions(sequence))
            sequence += change.count
        return revisions

    async def _send_once(self, messages: list[EntityMessage]) -> int:
        """Store them; returns the sequence of the first."""
        self.sent += 1
        if len(messages) == 1:
            [one] = messages
            return (await self._js.publish(one.subject, one.data, headers=one.headers, expect=_guard(one))).sequence
        async with self._js.atomic_batch(ack_first=False) as batch:
            for message in messages:
                await batch.add(message.subject, message.data, headers=message.headers, expect=_guard(message))
        return batch.ack.sequence - len(messages) + 1


async def asking_again(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask the server, again if that may help, as often as a change is sent."""
    failures = 0  # not patiently: attempts are counted here, as those of the change, which a caller waits for
    while True:
        try:
            return await ask()
        except JetSparkError as error:
            failures += 1
            if failures == ATTEMPTS or not error.may_pass:
                raise
        await asyncio.sleep(PAUSE.wait_s(failures))


def _changes_of(message: StoredMessage | None) -> LastChanges:
    return LastChanges(0, ()) if message is None else LastChanges(message.sequence, recent_changes(message.headers))


def _conflict(parts: Sequence[PendingChange]) -> Conflict:
    names = [part.subject.split(".", 2) for part in parts]
    return Conflict(names[0][1], tuple(key for _, _, key in names))


def _guard(message: EntityMessage) -> Expect | None:
    return None if message.revision is None else Expect(last_subject_sequence=message.revision)


def _fail(done: asyncio.Future[list[int]], error: JetSparkError) -> None:
    if not done.done():
        done.set_exception(error)
