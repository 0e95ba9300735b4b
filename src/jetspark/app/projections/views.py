"""Reading projections: a state, a state at least as new as a write, changes, a copy in memory, a state of the past.

A view follows its projection: after a swap to another bucket, reads go there.

``at_least=``: a state has every event of its key up to its own sequence, so a state at or beyond the wanted sequence
contains the event. If the event did not concern the key, its state never reaches that sequence, and the position of the
projection decides. States and position are in one bucket, and a watch delivers its messages in order: a reader that has
seen a position has seen every state stored before it.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, Protocol, Self, TypeVar, cast, overload

import msgspec

from jetspark.aio import clock
from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.ordered import Reading, Watch
from jetspark.aio.stream import Stream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app.archive_reading import archives_of, first_at, hybrid_pieces, whole_head
from jetspark.app.projections.bucket_refs import BucketRef, open_records, watch_bucket
from jetspark.app.projections.key_state import KeyState, base_of, past_of
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import KeyRows, Router, recorded
from jetspark.app.projections.state_header import Parked, is_reserved, mark_of, parked_of, position_key
from jetspark.core.numbers import UINT64, timeout_of, whole
from jetspark.errors import (
    ConfigError,
    DataLoss,
    JetSparkError,
    MessageNotFound,
    RequestTimeout,
    StateParked,
    UsageError,
)
from jetspark.jetstream.kv import operation_of, subject_of, watch_options
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.state.changes import MARK_HEADER, NOTHING, SEQUENCE_HEADER, Current, current_of, stored_sequence
from jetspark.state.deliveries import sequence_of
from jetspark.state.lookup import stored_of
from jetspark.state.losses import first_ever, front_of
from jetspark.state.scan import Head, Range

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec
    from jetspark.lake.hybrid import Archives, HybridHead
    from jetspark.lake.reading import ArchiveRoot

__all__ = ["View", "ViewEntry", "ViewPosition", "ViewReplica", "Views"]

_logger = logging.getLogger("jetspark.app")

T = TypeVar("T")
D = TypeVar("D")
_Taken = TypeVar("_Taken", contravariant=True)
S = TypeVar("S")
"""A state of the projection in the form that ``apply`` gets; None for a key without a state."""

# Wait before a request is sent again that the server has not answered.
FOLLOW_PAUSE_S = 0.5


class FoldOf(Protocol[_Taken]):
    """The class of a projection; the annotation of ``apply`` has the type of the state."""

    @property
    def apply(self) -> Callable[Concatenate[_Taken, Any, ...], Any]: ...


class ViewEntry(NamedTuple, Generic[S]):
    """A state with its sequence, its revision, and why its key is stuck."""

    key: str
    state: S
    """The state in the form that ``apply`` gets; None if the key has no state."""
    sequence: int
    """Sequence of the last event in the state."""
    revision: int
    """Revision of the key in the bucket."""
    parked: Parked | None = None
    """Event and reason that the key is stuck at: later events are not in the state."""


class ViewPosition(NamedTuple):
    """Position of a projection in its stream."""

    sequence: int
    """Every event up to this one is in a state, or has made its key stuck, or has a dead letter."""
    missed: tuple[int, int] | None = None
    """First and last sequence of a range in which the stream dropped events before they were read: the projection is
    incomplete.
    """


class _Found(NamedTuple):
    """An entry of the bucket."""

    key: str
    current: Current


RESTARTED = _Found("", NOTHING)
"""Stands for a restart: the following entries are of another bucket, or of the same one from its beginning."""


class _Follower:
    """Holds the bucket that a projection uses, and follows swaps."""

    def __init__(self, js: JetStream, app: str, spec: ProjectionSpec) -> None:
        self._js, self._app, self.spec = js, app, spec
        self._held: asyncio.Future[tuple[BucketRef, Stream]] | None = None
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def bucket(self) -> tuple[BucketRef, Stream]:
        if self.task is None:
            self._held = asyncio.get_running_loop().create_future()
            self.task = asyncio.create_task(self._follow())
        assert self._held is not None
        return await asyncio.shield(self._held)

    async def _follow(self) -> None:
        assert self._held is not None
        try:
            while True:
                try:
                    await self._follow_swaps()
                    return
                except JetSparkError as error:
                    # The first bucket has a waiter, which gets the error. Later errors have no waiter, and a watch
                    # would never hear of the next swap, so following continues.
                    if not error.may_pass or not self._held.done():
                        raise
                    _logger.warning("projection %s: swaps cannot be followed: %s; trying again", self.spec.name, error)
                await clock.sleep(FOLLOW_PAUSE_S)
        except Exception as error:
            self.task = None  # the next call tries again
            if not self._held.done():
                self._held.set_exception(error)
            else:
                _logger.warning("projection %s: swaps are not followed any longer: %s", self.spec.name, error)

    async def _follow_swaps(self) -> None:
        """Hold the present bucket, then each bucket after a swap, until the connection is closed."""
        assert self._held is not None
        records = await open_records(self._js, self._app)
        async for alias in watch_bucket(records, self.spec):
            had_one = self._held.done()
            if had_one and self._held.result()[0] == alias.ref:
                continue
            stream = await self._js.stream(f"KV_{alias.ref.bucket}")
            if had_one:
                self._held = asyncio.get_running_loop().create_future()
            self._held.set_result((alias.ref, stream))
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()


class Views:
    """The views of one connection."""

    def __init__(self, app: AppSpec, js: JetStream) -> None:
        self._app, self._js = app, js
        self._followers: dict[str, _Follower] = {}

    def view(self, projection: str | type[object]) -> View[Any]:
        """
        Raises:
            ConfigError: The application has no such projection, or several of this class.
        """
        spec = self._spec_of(projection)
        name = spec.name
        follower = self._followers.get(name)
        if follower is None:
            follower = self._followers[name] = _Follower(self._js, self._app.name, spec)
        return View(self._app, self._js, spec, follower)

    def _spec_of(self, projection: str | type[object]) -> ProjectionSpec:
        projections = self._app.projections
        if isinstance(projection, str):
            found = [projections[projection]] if projection in projections else []
        else:
            found = [spec for spec in projections.values() if spec.kind is projection]
        if len(found) == 1:
            return found[0]
        shown = repr(projection) if isinstance(projection, str) else getattr(projection, "__name__", repr(projection))
        if found:
            names = ", ".join(repr(spec.name) for spec in found)
            raise ConfigError(f"view({shown}): projections {names} are of this class: expected one of these names")
        known = ", ".join(sorted(projections)) or "it has none"
        raise ConfigError(f"view({shown}): expected a projection of app {self._app.name!r}: {known}")

    async def close(self) -> None:
        tasks = [each.task for each in self._followers.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class View(Generic[S]):
    """Reads one projection; made by ``AppClient.view``."""

    def __init__(self, app: AppSpec, js: JetStream, spec: ProjectionSpec, follower: _Follower) -> None:
        self._app, self._js, self._spec, self._follower = app, js, spec, follower
        self._context = context_of(js)

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def spec(self) -> ProjectionSpec:
        """The declaration of the projection."""
        return self._spec

    @overload
    async def get(
        self,
        key: object,
        default: None = None,
        *,
        at_least: int | None = None,
        as_of: int | datetime.datetime | None = None,
        archive: ArchiveRoot | str | None = None,
        timeout: float | None = None,
    ) -> S: ...

    @overload
    async def get(
        self: View[T | None],
        key: object,
        default: D,
        *,
        at_least: int | None = None,
        as_of: int | datetime.datetime | None = None,
        archive: ArchiveRoot | str | None = None,
        timeout: float | None = None,
    ) -> T | D: ...

    async def get(
        self,
        key: object,
        default: Any = None,
        *,
        at_least: int | None = None,
        as_of: int | datetime.datetime | None = None,
        archive: ArchiveRoot | str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """The state of a key in the form that ``apply`` gets; ``default`` if the key has no state.

        Args:
            key: The value that ``key`` of the projection returns; with windows ``"<key>.<window>"``, or a tuple of the
                key and its window or a moment in it.
            at_least: A sequence, such as that of an acknowledgement: wait until the event is in the state, or the
                projection is beyond it.
            as_of: A sequence: the state after all events up to there; or a moment: after all events stored before it.
                If the key has changed since, the state is folded from the latest earlier revision that the bucket has
                kept (``history`` of its bucket), or from the first event.
            archive: With ``as_of``: the root of an archive with the stream, for events that the stream no longer has.
            timeout: Limit for ``at_least``, in seconds.

        Raises:
            StateParked: The key cannot reach ``at_least``: it is stuck at an earlier event.
            RequestTimeout: The sequence was not reached within ``timeout``. Does a worker run the projection?
            DataLoss: With ``as_of``: the stream no longer has the events since that revision, or its first ones.
            UsageError: This version of the code cannot decode the state.
        """
        if as_of is not None:
            entry = await self._as_of(key, _checked_moment(as_of), archives_of(archive))
        elif archive is not None:
            raise ConfigError(f"archive={archive!r} needs as_of, since the present state is in the bucket")
        else:
            entry = await self.entry(key, at_least=at_least, timeout=timeout)
        return default if entry.state is None else entry.state

    async def entry(self, key: object, *, at_least: int | None = None, timeout: float | None = None) -> ViewEntry[S]:
        """Like :meth:`get`, with sequence and revision of the state, and why its key is stuck."""
        name = self._spec.bucket_key(key)
        wanted = 0 if at_least is None else whole("at_least", at_least, low=0, high=UINT64)
        limit_s, began_at = self._limit_s(timeout), clock.now()
        try:
            current = await self._load(name)
            if current.sequence >= wanted:
                return self._entry(name, current)
        except JetSparkError as error:
            if at_least is None or not error.may_pass or clock.now() >= began_at + limit_s:
                raise
        what = f"projection {self.name!r} (key {key!r}) at sequence {wanted}"
        try:
            found = await self._until_found(lambda: self._reach(name, wanted), what, limit_s, began_at)
        except RequestTimeout as error:
            raise RequestTimeout(f"{what}: {await self._why_not_reached(wanted)}", error.timeout_s) from error
        return self._entry(name, found)

    async def _why_not_reached(self, wanted: int) -> str:
        try:
            last = (await self._context.run(self._context.api.stream_info(self._app.stream))).state.last_sequence
        except JetSparkError:  # no right to ask, or the server is away
            return "does a worker run it?"
        if wanted > last:
            return f"that sequence does not exist yet, stream {self._app.stream} ends at {last}"
        return "does a worker run it?"

    async def position(self) -> ViewPosition:
        """The position of the projection, and the events it may lack; a worker writes it ten times a second."""
        position = await self._position(direct=None)
        return ViewPosition(0) if position is None else ViewPosition(position.sequence, position.missed)

    async def wait_for(self, key: object, condition: Callable[[S], object], *, timeout: float | None = None) -> S:
        """The first state of a key for which ``condition`` is true; without a state ``condition`` gets None.

        Raises:
            RequestTimeout: ``condition`` was not true within ``timeout``.
        """
        name = self._spec.bucket_key(key)
        limit_s = self._limit_s(timeout)
        if not callable(condition) or inspect.iscoroutinefunction(condition):
            raise ConfigError(f"condition={condition!r}: expected a plain function of a state")

        async def found() -> S:
            async with aclosing(self._changes(name)) as changes:
                current = NOTHING
                async for change in changes:  # None after the present entries: a key without an entry has no state
                    if change is RESTARTED:
                        current = NOTHING
                        continue
                    if change is not None:
                        current = change.current
                    state = self._entry(name, current).state
                    if condition(state):
                        return state
            raise UsageError("the connection was closed")

        what = f"the state of key {key!r} of projection {self.name!r}"
        return await self._until_found(found, what, limit_s, clock.now())

    async def watch(self, *keys: object) -> AsyncGenerator[ViewEntry[S], None]:
        """Yields the present states of all or some keys, then every change, until the connection is closed.

        States that follow each other within milliseconds may be stored as one. After a swap the present states of the
        new bucket follow; a key without a state there is yielded with a state of None and sequence 0.
        """
        shown: set[str] = set()
        """Names of keys that were last yielded with a state."""
        fresh: set[str] = set()
        async with aclosing(self._changes(*dict.fromkeys(map(self._spec.bucket_key, keys)))) as changes:
            async for change in changes:
                if change is RESTARTED:
                    shown, fresh = shown | fresh, set()
                elif change is None:
                    for name in sorted(shown - fresh):
                        yield self._entry(name, NOTHING)
                    shown = set()
                elif not is_reserved(change.key):
                    if change.current.value is None:
                        fresh.discard(change.key)
                    else:
                        fresh.add(change.key)
                    yield self._entry(change.key, change.current)

    def replica(self) -> ViewReplica[S]:
        """A copy of all states in memory that follows the bucket: ``async with view.replica() as states``."""
        return ViewReplica(self)

    async def _load(self, name: str, *, direct: bool | None = None) -> Current:
        """The entry of a key from any replica, which may lag; with ``direct=False`` from the leader."""
        ref, stream = await self._follower.bucket()
        try:
            message = await stream.get_message(last_for=subject_of(ref.bucket, name), direct=direct)
        except MessageNotFound:
            return NOTHING
        return current_of(stored_of(message))

    async def _position(self, *, direct: bool | None = False) -> FoldPosition | None:
        current = await self._load(position_key(), direct=direct)
        return None if current.value is None else FoldPosition.decode(current.value)

    async def _reach(self, name: str, wanted: int) -> Current:
        current, position, is_initial = NOTHING, 0, True
        async with aclosing(self._changes(name, position_key())) as changes:
            async for change in changes:
                if change is RESTARTED:
                    current, position, is_initial = NOTHING, 0, True
                    continue
                if change is None:
                    is_initial = False
                elif change.key == name:
                    current = change.current
                elif change.current.value is not None:
                    position = FoldPosition.decode(change.current.value).sequence
                parked = parked_of(current)
                # A key that is stuck at a later event contains every event before it.
                if current.sequence >= wanted or (parked is not None and parked.sequence > wanted):
                    return current
                if not is_initial and position >= wanted:
                    if parked is not None:
                        raise StateParked(self.name, self._spec.key_text(name), *parked)
                    return current
        raise UsageError("the connection was closed")

    async def _changes(self, *names: str) -> AsyncGenerator[_Found | None, None]:
        """Yields ``RESTARTED``, the present entries, None, then every change; and the same after a swap.

        Raises:
            RequestTimeout: No answer at the start. Later errors of a server that is away are retried.
        """
        has_begun = False
        while not self._js_is_closed:
            ref, stream = await self._follower.bucket()
            changed = asyncio.create_task(self._follower.changed.wait())
            watch = Watch(self._context, stream.name, partial(_found, ref.bucket), lambda _: False)
            options = watch_options(ref.bucket, names)
            entries = cast(
                "AsyncGenerator[_Found | None, None]",
                watch.changes(options, initial_marker=True, ignore_deletes=False),
            )
            try:
                yield RESTARTED
                async with aclosing(_until(entries, changed)) as found:
                    async for each in found:
                        has_begun = True
                        yield each
            except JetSparkError as error:
                if not has_begun or not error.may_pass:
                    raise
                _logger.warning(
                    "projection %s: bucket %s cannot be watched: %s; trying again", self.name, ref.bucket, error
                )
                await clock.sleep(FOLLOW_PAUSE_S)
            finally:
                changed.cancel()

    @property
    def _js_is_closed(self) -> bool:
        return self._context.client.is_closed

    def _limit_s(self, timeout: float | None) -> float:
        return timeout_of(timeout, self._context.timeout_s)

    async def _within(self, limit_s: float, what: str, work: Coroutine[object, None, T], spent_s: float = 0.0) -> T:
        """Await ``work`` within ``limit_s``, of which ``spent_s`` have passed."""
        try:
            async with asyncio.timeout(max(0.0, limit_s - spent_s)):
                return await work
        except TimeoutError as error:
            if isinstance(error, RequestTimeout):
                raise
            raise RequestTimeout(what, limit_s) from None

    async def _until_found(
        self, look: Callable[[], Coroutine[object, None, T]], what: str, limit_s: float, began_at: float
    ) -> T:
        """Await ``look``; repeat it within the limit while the server does not answer."""

        async def retried() -> T:
            while True:
                try:
                    return await look()
                except JetSparkError as error:
                    if not error.may_pass:
                        raise
                await clock.sleep(FOLLOW_PAUSE_S)

        return await self._within(limit_s, what, retried(), clock.now() - began_at)

    def _entry(self, name: str, current: Current) -> ViewEntry[S]:
        mark = mark_of(current)
        state = None
        if current.value is not None:
            try:
                state = self._spec.decode_state(current.value)
            except msgspec.MsgspecError as error:
                made_by = f"version {mark.version}" if mark is not None else "another program"
                raise UsageError(
                    f"the state of key {name!r} of projection {self.name!r} was made by {made_by}, and version "
                    f"{self._spec.version} cannot read it: {error}"
                ) from error
        key, parked = self._spec.key_text(name), parked_of(current)
        return ViewEntry(key, cast("S", state), current.sequence, current.revision, parked)

    async def _as_of(self, key: object, when: int | datetime.datetime, archives: Archives | None) -> ViewEntry[S]:
        name = self._spec.bucket_key(key)
        # The position is read before the state, which comes from the leader: so the state has all events up to it.
        position = await self._position()
        present = await self._load(name, direct=False)
        if isinstance(when, int) and position is not None and present.sequence <= when <= position.sequence:
            return self._entry(name, present)
        head, first = await self._head(0 if position is None else position.first_event, archives)
        last = when if isinstance(when, int) else await first_at(self._js, head, when) - 1
        if last >= head.next:
            raise ConfigError(
                f"as_of={last}: expected a sequence that stream {head.stream} has; its last is {head.next - 1}"
            )
        spec = self._spec.within(self._context.client.max_payload_bytes)
        base = base_of(spec, await self._revisions(name, present, position), last)
        state = KeyState(spec, name, base)
        if base.sequence < last:
            await self._fold_on(spec, name, state, head, range(max(first, state.sequence + 1), last + 1))
        return self._entry(name, past_of(spec, state))

    async def _head(self, first_event: int, archives: Archives | None) -> tuple[Head, int]:
        """The history of the stream, and the sequence of the first message that it ever had."""
        first = 1

        async def look(anchor: int) -> Head:
            nonlocal first
            info = (await self._js.stream(self._app.stream)).cached_info
            first = first_ever(info.config)
            return await self._context.run(front_of(self._context.api, info, anchor))

        head = await whole_head(archives, self._app.stream, look, first_event)
        return head, first

    async def _revisions(self, name: str, present: Current, position: FoldPosition | None) -> list[Current]:
        """The revisions of a key that are valid bases; only the present one if a repair may have replaced others."""
        ref, stream = await self._follower.bucket()
        # A repair replaces a wrong state, and it is unknown since which revision the state was wrong.
        if (stream.cached_info.config.max_messages_per_subject or 0) == 1 or position is None or position.repairs:
            return [present]
        messages = stream.get_messages(subject=subject_of(ref.bucket, name))
        return [present, *[current_of(stored_of(message)) async for message in messages]]

    async def _fold_on(self, spec: ProjectionSpec, name: str, state: KeyState, head: Head, part: range) -> None:
        """Apply the events of a key that a state lacks.

        Raises:
            DataLoss: Some of them are gone.
        """
        gap = head.first_loss(part.start, part.stop)
        if gap is not None:
            raise DataLoss(head.stream, gap.start, gap.stop)
        router = Router([spec], self._app.catalogue, owns_stream=self._app.owns_stream)
        async with aclosing(self._past_events(head, part, router.reading, name)) as pieces:
            async for messages in pieces:
                rows = KeyRows()
                sequences = [sequence_of(each) for each in messages]
                router.add_rows(messages, sequences, recorded, {spec.name: rows})
                for found, each, event in rows:
                    if found == name and each < part.stop:
                        state.apply(spec, name, each, event)

    async def _past_events(
        self, head: Head, part: range, filters: Sequence[str], key: str
    ) -> AsyncGenerator[Sequence[Any], None]:
        if type(head) is not Head:
            whole = cast("HybridHead", head)
            wanted = Range(head.stream, head.created, part.start, part.stop, tuple(filters))
            async with aclosing(hybrid_pieces(self._js, whole.range_of(wanted))) as pieces:
                async for piece in pieces:
                    yield piece
            return
        options = OrderedOptions(filter_subjects=filters, start_sequence=part.start)
        reading = Reading(self._context, self._app.stream, options, listing=f"past of key {key!r}")
        try:
            await reading.start()
            while messages := await reading.some(until_idle=True):
                yield messages
                if messages[-1].metadata.stream_sequence >= part.stop - 1:
                    break
        finally:
            await reading.close()


def _checked_moment(as_of: int | datetime.datetime) -> int | datetime.datetime:
    """
    Raises:
        ConfigError: It is neither a sequence nor a moment with a time zone.
    """
    if not isinstance(as_of, datetime.datetime):
        return whole("as_of", as_of, low=0, high=UINT64)
    if as_of.tzinfo is None:
        raise ConfigError(f"as_of={as_of}: expected a time zone, such as {as_of.isoformat()}Z for UTC")
    return as_of


class ViewReplica(Generic[S]):
    """All states of a projection in memory: reads are dictionary look-ups, a moment behind the bucket.

    The states are shared: do not change them. If following the bucket fails, ``get`` and ``reached`` raise the error.
    """

    def __init__(self, view: View[S]) -> None:
        self._view = view
        self._states: dict[str, tuple[Current, object]] = {}
        self.position = 0
        """Position of the projection; every state up to it is in the copy."""
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_left = False

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise UsageError(f"a copy of projection {self._view.name!r} is opened once: make another with replica()")
        ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._follow(ready))
        try:
            await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
            self._check_is_followed()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._is_left = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # readers of the copy have got the error

    def _check_is_followed(self) -> None:
        """
        Raises:
            UsageError: The copy is not open, or the connection was closed.
            JetSparkError: Following the bucket failed.
        """
        if self._task is None or self._is_left:
            name = self._view.name
            raise UsageError(f"the copy of projection {name!r} is not open: read it within `async with view.replica()`")
        if self._task.done():
            self._task.result()

    @overload
    def get(self, key: object, default: None = None) -> S: ...

    @overload
    def get(self: ViewReplica[T | None], key: object, default: D) -> T | D: ...

    def get(self, key: object, default: Any = None) -> Any:
        """The state of a key; ``default`` if the key has no state."""
        self._check_is_followed()
        name = self._view.spec.bucket_key(key)
        found = self._states.get(name)
        if found is None or found[0].value is None:
            return default
        current, state = found
        if state is None:
            state = self._view._entry(name, current).state
            self._states[name] = (current, state)
        return default if state is None else state

    def __len__(self) -> int:
        return sum(1 for _ in self._names())

    def keys(self) -> list[str]:
        """The keys with a state, in the spelling of :meth:`get`."""
        return list(map(self._view.spec.key_text, self._names()))

    def _names(self) -> Iterator[str]:
        has_state = self._view.spec.has_state
        return (name for name, (current, _) in self._states.items() if has_state(current.value))

    async def reached(self, sequence: int, timeout: float | None = None) -> None:
        """Wait until the copy has every event up to a sequence of the stream.

        Raises:
            RequestTimeout: It has not within ``timeout``.
        """
        whole("sequence", sequence, low=0, high=UINT64)
        limit_s = self._view._limit_s(timeout)

        async def wait() -> None:
            self._check_is_followed()
            while self.position < sequence:
                self._moved.clear()
                await self._moved.wait()
                self._check_is_followed()

        await self._view._within(limit_s, f"the copy of projection {self._view.name!r} at sequence {sequence}", wait())

    async def _follow(self, ready: asyncio.Future[None]) -> None:
        # The copy is replaced when all present entries of a bucket were read; until then it stays as it was.
        states: dict[str, tuple[Current, object]] = {}
        position, is_whole = 0, False
        try:
            async with aclosing(self._view._changes()) as changes:
                async for change in changes:
                    if change is RESTARTED:
                        states, position, is_whole = {}, 0, False
                        continue
                    if change is None:
                        is_whole, self._states = True, states
                    elif change.key == position_key():
                        if change.current.value is not None:
                            position = FoldPosition.decode(change.current.value).sequence
                    elif not is_reserved(change.key):
                        states[change.key] = (change.current, None)
                        continue
                    if is_whole:
                        self.position = position
                        self._moved.set()
                        if not ready.done():
                            ready.set_result(None)
            raise UsageError("the connection was closed")
        finally:
            self._moved.set()


def _found(bucket: str, message: JetStreamMessage) -> _Found:
    headers = message.headers
    value = message.data if operation_of(headers) == "put" else None
    current = Current(
        value,
        stored_sequence(headers.get(SEQUENCE_HEADER)) or 0,
        message.metadata.stream_sequence,
        headers.get(MARK_HEADER),
    )
    return _Found(message.subject.removeprefix(subject_of(bucket, "")), current)


async def _until(entries: AsyncGenerator[T, None], changed: asyncio.Task[object]) -> AsyncGenerator[T, None]:
    """Yields entries until ``changed`` is done."""
    async with aclosing(entries):
        while True:
            following = asyncio.ensure_future(anext(entries, _END))
            try:
                await asyncio.wait([following, changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait([following])
            if following.cancelled():
                return
            entry = following.result()
            if entry is _END:
                return
            yield cast("T", entry)


_END: Any = object()
