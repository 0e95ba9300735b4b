"""Replaying events to a handler, beside its live worker.

A durable consumer of the replay, ``<durable>--replay-<id>``, reads the range; the live worker's consumer is not
touched. The handler's effects are held back (:mod:`jetspark.app.replay.held_back_effects`) unless the caller wants
them. In both cases an effect that is recorded as done is not repeated. A replay writes no dead letter, parks no key,
and schedules no retry: failures are in its record.

A consumer numbers its deliveries. A missing number means that messages were lost with a connection: the server would
redeliver them only after ``ack_wait``, and acknowledging later messages would acknowledge them too. Then the replay
re-creates the consumer, and continues after the last portion that was saved.

Events of one key run one after the other. A portion of events is handled, then saved in the record, then acknowledged.
So a replay that was killed handles the last portion again, and counts every event once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetspark.aio.clock import rng as loop_rng
from jetspark.app.clock import utc_now
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.handlers.consumers import handler_filters
from jetspark.app.handlers.context import Dependencies, open_lifespans
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.reading import HandlerReading
from jetspark.app.handlers.retry import Skip, WaitHere, decide
from jetspark.app.jobs import Job, new_job_id
from jetspark.app.patience import patiently
from jetspark.app.replay.held_back_effects import EffectHeldBack, EffectReplayCalls, HeldBackCalls
from jetspark.app.replay.outlines import RangeOutline, outline_of
from jetspark.app.replay.replay_records import (
    HandlerReplayRecord,
    OnUnreadable,
    begin_replay,
    counted,
    handler_record_key,
    log_unreadable,
    read_all,
    run_job,
)
from jetspark.app.stream_history import ReadingRate, StreamHistory
from jetspark.app.topology.declared import OWNER
from jetspark.app.topology.names import handler_bucket
from jetspark.core.arguments import texts
from jetspark.core.subjects import matches, on_one_of
from jetspark.errors import (
    ConfigError,
    ConsumerNotFound,
    DataLoss,
    StreamRecreated,
)
from jetspark.jetstream.config import ConsumerConfig
from jetspark.state.changes import some_keys
from jetspark.state.deliveries import sequence_of
from jetspark.state.scan import head_of

if TYPE_CHECKING:
    from jetspark.aio.consumer import Consumer
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue
    from jetspark.aio.stream import Stream
    from jetspark.aio.stream_message import JetStreamMessage
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.spec import AppSpec, HasSpec
    from jetspark.jetstream.info import StoredMessage
    from jetspark.lake.reading import ArchiveRoot

__all__ = [
    "HandlerReplayOptions",
    "HandlerReplayPlan",
    "plan_handler_replay",
    "read_handler_records",
    "replay_handler",
]

# Events that are handled between two saves of the record.
PORTION = 200
# A record names this many failures, and counts the others.
MAX_NAMED = 100
# The server removes an unused consumer after this long; a resumed replay needs only the record.
CONSUMER_LIFE_S = 86400.0
# The consumer has no other reader, and a redelivery is recognised by its sequence.
ACK_WAIT_S = 3600.0
FETCH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerReplayOptions:
    """Options of :func:`replay_handler`."""

    effects: bool = False
    """Carry out the handler's effects, except effects that are recorded as done. By default effects are held back,
    and counted.
    """
    rate: float | None = None
    """Events handled each second, at most; by default the handler's own rate."""
    resume: str | None = None
    """The id of an interrupted replay: it continues with the range that it began with."""


@dataclass(slots=True, kw_only=True)
class HandlerReplayPlan:
    """The range that a replay of a handler reads."""

    handler: str
    extent: Extent
    events: dict[str, int] = field(default_factory=dict)
    """The number of events, by type."""
    keys: int = 0
    unreadable: int = 0
    outline: RangeOutline = field(default_factory=RangeOutline)
    """Subjects, times and gaps of the range."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "handler": self.handler,
            "stream": self.extent.stream,
            "first": self.extent.first,
            "last": self.extent.last,
            "events": sum(self.events.values()),
            "types": self.events,
            "keys": self.keys,
            "unreadable": self.unreadable,
            **self.outline.to_dict(),
        }

    def __str__(self) -> str:
        lines = [
            f"replay of handler {self.handler}",
            f"reads {self.extent}: all of it is there",
            *self.outline.lines(reader="replay"),
            f"{sum(self.events.values())} events of {self.keys} keys ({counted(self.events) or 'none'})",
        ]
        if self.unreadable:
            lines.append(f"{self.unreadable} messages cannot be decoded, and would fail")
        return "\n".join(lines)


async def plan_handler_replay(
    js: JetStream,
    app: HasSpec,
    handler: str,
    request: ReplayRequest,
    *,
    rate: float | None = None,
    archive: ArchiveRoot | str | None = None,
) -> HandlerReplayPlan:
    """Count the events and keys that a replay of a handler would read; the handler is not called.

    Args:
        archive: The root of an archive with the stream: older events come from there.

    Raises:
        DataLoss: Some of the range is gone.
    """
    app = app.spec
    _check_keys(request)
    spec = handler_of(app, handler)
    history = _history(js, app, spec, archive)
    extent = await history.extent(request)
    plan = HandlerReplayPlan(handler=spec.name, extent=extent)
    plan.outline = await outline_of(history, extent, request.subject)
    unknown = await _survey(app, spec, history, request, plan, ReadingRate(rate))
    _check_known(spec, unknown, extent)
    return plan


async def replay_handler(
    js: JetStream,
    app: HasSpec,
    handler: str,
    request: ReplayRequest | None = None,
    options: HandlerReplayOptions | None = None,
    *,
    on_plan: Callable[[HandlerReplayPlan], Any] | None = None,
    on_progress: Callable[[HandlerReplayRecord], Any] = lambda record: None,
    archive: ArchiveRoot | str | None = None,
) -> HandlerReplayRecord:
    """Call a handler with past events. The live worker may run; its consumer is not touched.

    Args:
        on_plan: Called with the range that is left to read, before the first call of the handler. Its counts take one
            more pass over the range, which ``rate`` does not limit. Without this and without keys, the pass is
            left out.
        on_progress: Called with the record at the beginning, after each portion, and at the end.
        archive: The root of an archive with the stream: older events come from there.

    Raises:
        DataLoss: Events of the range are gone, or were removed before they were read.
        StreamRecreated: The stream was re-created since the resumed replay began.
        ConfigError: The handler or the id to resume is unknown; a key has no event in the range; or the handler takes
            batches, with or without effects.
        UsageError: Another process has resumed this replay.
    """
    app, options = app.spec, options or HandlerReplayOptions()
    spec = handler_of(app, handler)
    if spec.batch is not None:
        raise ConfigError(
            f"handler {spec.name!r}: a batch handler has no context, so its effects cannot be held back, and it cannot "
            "see that this is a replay: call its function with the events"
        )
    pace = ReadingRate(options.rate if options.rate is not None else spec.rate)
    records = await js.kv(handler_bucket(app.name))
    history = _history(js, app, spec, archive)
    if options.resume is None:
        request = request or ReplayRequest()
        _check_keys(request)
        job = await _begin(records, spec, request, options.effects, await history.extent(request))
    else:
        job = await _resume(records, spec, options.resume, options.effects, history)
    on_progress(job.record)
    await run_job(job, _report_plan(app, spec, history, job, on_plan, is_new=options.resume is None))
    async with open_lifespans(app.lifespans) as dependencies:
        store = await HandlerStore.open(js, app.name, spec.name)
        replay = _HandlerReplay(app, spec, store, dependencies, job, history, on_progress)
        return await run_job(job, replay.run(pace))


async def read_handler_records(
    records: KeyValue, handler: str = "*", *, on_unreadable: OnUnreadable = log_unreadable
) -> list[HandlerReplayRecord]:
    """The readable records of handler replays, oldest first.

    Args:
        records: The bucket ``<app>_handlers``.
    """
    return await read_all(records, handler_record_key(handler, "*"), HandlerReplayRecord, on_unreadable)


def handler_of(app: AppSpec, handler: str) -> HandlerSpec:
    """
    Raises:
        ConfigError: The application has no handler of this name.
    """
    found = app.handlers.get(handler)
    if found is None:
        known = ", ".join(sorted(app.handlers)) or "none"
        raise ConfigError(f"handler {handler!r}: app {app.name!r} has no handler of this name; it has {known}")
    return found


def _check_keys(request: ReplayRequest) -> None:
    """
    Raises:
        ConfigError: A key is not a text, so no event can have it.
    """
    texts("keys", request.keys, "texts, as ctx.key has them")


async def _begin(
    records: KeyValue, spec: HandlerSpec, request: ReplayRequest, effects: bool, extent: Extent
) -> Job[HandlerReplayRecord]:
    record = HandlerReplayRecord(
        id=new_job_id(),
        handler=spec.name,
        request=request,
        effects=effects,
        stream=extent.stream,
        created=extent.created,
        first=extent.first,
        last=extent.last,
        at=extent.first - 1,
        began=utc_now().isoformat(),
    )
    return await begin_replay(records, record)


async def _resume(
    records: KeyValue, spec: HandlerSpec, id: str, effects: bool, history: StreamHistory
) -> Job[HandlerReplayRecord]:
    job = await Job.find(records, HandlerReplayRecord, handler_record_key(spec.name, id), id)
    record = job.record
    if record.is_done:
        raise ConfigError(f"resume {id!r}: it is done already")
    if record.effects != effects:
        wanted = "with effects: give --effects again" if record.effects else "without effects: leave --effects out"
        raise ConfigError(f"resume {id!r}: it was begun {wanted}")
    _check_created(record, (await history.head()).created)
    await history.between(record.extent, record.at + 1, record.last)
    await job.resume()
    return job


def _check_created(record: HandlerReplayRecord, created: str) -> None:
    if created != record.created:
        raise StreamRecreated(record.stream, record.created, created)


async def _report_plan(
    app: AppSpec,
    spec: HandlerSpec,
    history: StreamHistory,
    job: Job[HandlerReplayRecord],
    on_plan: Callable[[HandlerReplayPlan], Any] | None,
    *,
    is_new: bool,
) -> None:
    """Save the outline of the range, check its keys, and call ``on_plan``."""
    record = job.record
    extent = dataclasses.replace(record.extent, first=record.at + 1)
    plan = HandlerReplayPlan(handler=spec.name, extent=extent)
    plan.outline = await outline_of(history, extent, record.request.subject)
    if not record.outline:  # a resumed replay keeps the outline of its whole range
        await job.save(outline=plan.outline.to_dict())
    if on_plan is not None or (is_new and record.request.keys):
        unknown = await _survey(app, spec, history, record.request, plan, ReadingRate(None))
        if is_new:  # a resumed replay may be past the events of a key
            _check_known(spec, unknown, extent)
    if on_plan is not None:
        on_plan(plan)


async def _survey(
    app: AppSpec,
    spec: HandlerSpec,
    history: StreamHistory,
    request: ReplayRequest,
    plan: HandlerReplayPlan,
    pace: ReadingRate,
) -> set[str]:
    """Count the events and keys of a range; returns the requested keys without an event there."""
    types: Counter[str] = Counter()
    keys, unknown = set(), set(request.keys)
    reading = _Reading(app, spec, request)
    async with aclosing(history.messages(plan.extent, pace, subject=request.subject)) as portions:
        async for portion in portions:
            for message in portion.messages:
                event, key = reading.read(message.subject, message.data, message.headers)
                if not reading.wants(key):
                    continue
                if isinstance(event, Exception):
                    plan.unreadable += 1
                elif event.contract.kind in spec.events:
                    types[event.type] += 1
                    keys.add(key)
                else:
                    continue
                unknown.discard(key or "")
    plan.events, plan.keys = dict(sorted(types.items())), len(keys)
    return unknown


def _check_known(spec: HandlerSpec, unknown: Collection[str], extent: Extent) -> None:
    """
    Raises:
        ConfigError: Requested keys have no event in the range, so the handler would not be called for them.
    """
    if unknown:
        raise ConfigError(f"{some_keys(sorted(unknown))} of handler {spec.name!r}: no event in {extent}")


class _Reading:
    """Decodes messages as the handler's worker does, and selects the requested keys."""

    def __init__(self, app: AppSpec, spec: HandlerSpec, request: ReplayRequest) -> None:
        self.read = HandlerReading(spec, app.catalogue, keyed=True).read
        self._keys = frozenset(request.keys)

    def wants(self, key: str | None) -> bool:
        return not self._keys or key in self._keys


class _HandlerReplay:
    """A replay that runs in this process."""

    def __init__(
        self,
        app: AppSpec,
        spec: HandlerSpec,
        store: HandlerStore,
        dependencies: Dependencies,
        job: Job[HandlerReplayRecord],
        history: StreamHistory,
        on_progress: Callable[[HandlerReplayRecord], Any],
    ) -> None:
        self._js, self._app, self._spec, self._job, self._history = history.js, app, spec, job, history
        self._on_progress = on_progress
        self._record = job.record
        self._reading = _Reading(app, spec, self._record.request)
        log = logging.getLogger(f"jetspark.app.{app.name}.{spec.name}.replay")
        self._calls: HeldBackCalls | EffectReplayCalls
        if self._record.effects:
            self._calls = EffectReplayCalls(app, spec, store, dependencies, utc_now, log)
        else:
            self._calls = HeldBackCalls(app, spec, store, dependencies, utc_now, log, records=store.records)
        self._calls.is_ending = self._is_ending
        self._main: asyncio.Task[Any] | None = None
        self._slots = asyncio.Semaphore(spec.concurrency)
        self._is_wanted = on_one_of(_filters(spec))
        self._last_event = 0
        self._consumer: Consumer
        self._delivered = 0
        """Messages of the consumer that arrived here."""
        self._rng = loop_rng()

    async def run(self, pace: ReadingRate) -> None:
        record, self._main = self._record, asyncio.current_task()
        await self._read_archive(pace)
        if record.at < record.last:
            stream = await self._js.stream(self._app.stream)
            await self._begin_reading(stream)
            size = min(PORTION, pace.portion or PORTION)
            while record.at < record.last:
                messages = await patiently(lambda: self._fetch(size))
                if await self._is_all(messages):
                    await self._portion(messages, pace)
                else:
                    await self._consumer.close()
                    await self._begin_reading(stream)
            await self._consumer.close()
            with suppress(ConsumerNotFound):
                await stream.delete_consumer(record.consumer)
        await self._job.save(status="done", at=record.last)
        self._on_progress(record)

    async def _read_archive(self, pace: ReadingRate) -> None:
        """Handle the events that the archive has. The consumer reads the others."""
        record, size = self._record, min(PORTION, pace.portion or PORTION)
        left = dataclasses.replace(record.extent, first=record.at + 1)
        archived = await self._history.archived(left)
        if archived is None or archived.following == left.first:
            return
        last = min(archived.following - 1, record.last)
        part = await self._history.between(left, left.first, last)
        async with aclosing(self._history.messages(part)) as portions:
            async for portion in portions:
                for begin in range(0, len(portion.received), size):
                    found = portion.received[begin : begin + size]
                    await self._handle_all([self._item(sequence_of(each), each) for each in found], pace)
                    await self._job.save(at=sequence_of(found[-1]))
                    self._on_progress(record)
        await self._job.save(at=last)

    async def _begin_reading(self, stream: Stream) -> None:
        """Create a consumer after the last saved portion; later messages are delivered again."""

        async def create() -> Consumer:
            _check_created(self._record, head_of(await stream.info()).created)
            with suppress(ConsumerNotFound):
                await stream.delete_consumer(self._record.consumer)
            return await stream.create_consumer(self._config())

        self._consumer, self._delivered = await patiently(create), 0

    async def _is_all(self, messages: Sequence[JetStreamMessage]) -> bool:
        """False when a message that the consumer has delivered did not arrive here."""
        if messages:
            numbers = [message.metadata.consumer_sequence for message in messages]
            begin, self._delivered = self._delivered + 1, self._delivered + len(messages)
            return numbers == list(range(begin, self._delivered + 1))
        info = await patiently(self._consumer.info)
        if not info.pending and info.delivered.consumer_sequence == self._delivered:
            self._record.at = self._record.last
            return True
        return not info.ack_pending  # pending: lost messages, or messages with a lost ack

    def _config(self) -> ConsumerConfig:
        filters = handler_filters(self._app, self._spec)
        one = {"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": filters}
        return ConsumerConfig(
            durable_name=self._record.consumer,
            description=f"A replay of handler {self._spec.name}.",
            start_sequence=self._record.at + 1,
            ack_policy="all",
            ack_wait_s=ACK_WAIT_S,
            max_ack_pending=2 * PORTION,
            inactive_threshold_s=CONSUMER_LIFE_S,
            metadata={OWNER: self._app.name, "jetspark-replay": self._record.id},
            **one,
        )

    async def _fetch(self, size: int) -> list[JetStreamMessage]:
        try:
            return await self._consumer.fetch(size, timeout=FETCH_S, max_bytes=self._spec.max_bytes)
        except ConfigError:  # the next message is larger than that
            return await self._consumer.fetch(1, timeout=FETCH_S)

    async def _portion(self, messages: Sequence[JetStreamMessage], pace: ReadingRate) -> None:
        record = self._record
        if not messages:
            return
        first, last = messages[0].metadata.stream_sequence, messages[-1].metadata.stream_sequence
        head = await patiently(lambda: self._history.head(self._last_event))
        gap = head.first_loss(record.at + 1, first)
        if gap is not None and gap.stop <= first:
            # The removed messages may have had events for this handler.
            raise DataLoss(record.stream, gap.start, gap.stop, "it was removed before it was read")
        await self._handle_all([self._item(each.metadata.stream_sequence, each) for each in messages], pace)
        await self._job.save(at=min(max(last, record.at), record.last))
        await messages[-1].ack()
        self._on_progress(record)

    async def _handle_all(self, items: Sequence[WorkItem | None], pace: ReadingRate) -> None:
        """Call the handler with the events of a portion: those of one key one after the other."""
        lanes: dict[Any, list[WorkItem]] = {}
        for item in items:
            if item is not None:
                self._last_event = item.sequence
                lanes.setdefault(item.sequence if item.key is None or not self._spec.in_order else item.key, []).append(
                    item
                )
        async with asyncio.TaskGroup() as tasks:
            for lane in lanes.values():
                tasks.create_task(self._run_lane(lane, pace))

    def _item(self, sequence: int, message: JetStreamMessage | StoredMessage) -> WorkItem | None:
        record = self._record
        if not record.at < sequence <= record.last:
            return None  # handled before, or after the range
        if not self._is_wanted(message.subject):
            return None
        if record.request.subject is not None and not matches(record.request.subject, message.subject):
            return None
        event, key = self._reading.read(message.subject, message.data, message.raw_headers)
        return WorkItem(key, sequence, event=event) if self._reading.wants(key) else None

    async def _run_lane(self, items: Sequence[WorkItem], pace: ReadingRate) -> None:
        async with self._slots:
            for item in items:
                await pace.let(1)
                await self._handle(item)

    async def _handle(self, item: WorkItem) -> None:
        record = self._record
        while True:
            item.attempts += 1
            error = await self._call(item)
            # Without effects an event is tried once: the report has each failure that a live worker would have seen.
            decided = None if error is None else decide(self._spec.retry, item.attempts, error, self._rng.random())
            if not record.effects or not isinstance(decided, WaitHere):
                break
            await asyncio.sleep(decided.seconds)
        record.events += 1
        if error is None:
            record.done += 1
        elif isinstance(error, Skip):
            record.skipped += 1
        elif isinstance(error, EffectHeldBack):
            record.stopped += 1
        else:
            record.failed += 1
            if len(record.failures) < MAX_NAMED:
                what = f"{type(error).__name__}: {error}"
                record.failures.append({"sequence": item.sequence, "key": item.key, "error": what[:300]})
        self._count(item)

    async def _call(self, item: WorkItem) -> BaseException | None:
        item.is_timed_out = False
        timer = asyncio.get_running_loop().call_later(self._spec.timeout, _time_out, item)
        try:
            error = await self._calls.call(item)
        finally:
            timer.cancel()
        if isinstance(error, BaseExceptionGroup):  # from a handler with a task group
            held_back, others = error.split(EffectHeldBack)
            if held_back is not None and others is None:
                return _first_of(held_back)
        return error

    def _is_ending(self) -> bool:
        """True when the replay is being cancelled. A handler that cancels its own task has failed instead."""
        return self._main is not None and self._main.cancelling() > 0

    def _count(self, item: WorkItem) -> None:
        if not isinstance(self._calls, HeldBackCalls):
            return
        found = self._calls.held_back.pop(item.sequence, None)
        if found is None:
            return
        record = self._record
        for total, some in (
            (record.published, found.published),
            (record.held_back, found.effects),
            (record.recorded, found.recorded),
        ):
            for name, count in some.items():
                total[name] = total.get(name, 0) + count
        record.writes += found.writes


def _filters(spec: HandlerSpec) -> list[str]:
    return list(dict.fromkeys(contract_of(kind).subject.filter for kind in spec.events))


def _history(js: JetStream, app: AppSpec, spec: HandlerSpec, archive: ArchiveRoot | str | None = None) -> StreamHistory:
    reading: list[str] | None = [] if handler_filters(app, spec) == [">"] else None
    return StreamHistory(js, app.stream, _filters(spec), reading, archive=archive)


def _time_out(item: WorkItem) -> None:
    item.is_timed_out = True
    if item.runner is not None:
        item.runner.cancel()


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
