"""Redriving dead letters: their handlers handle them again. Discarding them: their keys continue without them.

A redrive is a record in the handlers' bucket. It freezes the last dead letter that is part of it before it begins,
records how far it is after each chunk of requests, and is removed at the end; so one that was interrupted can be
resumed, and a second one is refused in the meantime. A request is stored at most once for each failure of a dead
letter, so repeating one is harmless.

One pass over the headers says what there is. Then the chosen dead letters are requested in chunks: their events are
read side by side, the requests are published in the order of the stream without waiting for each other, and the next
chunk begins when the server has stored all of them. What becomes of them is read from the dead-letter stream: each
change of a dead letter is a new message of its subject.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jetspark.aio import clock
from jetspark.app.dead_letters.listing import (
    DeadLetterFilter,
    check_handler,
    each_dead_letter,
    open_parked_records,
    read_dead_letter,
    read_dead_letters,
    with_event,
)
from jetspark.app.dead_letters.outcomes import (
    REDRIVE_KEY,
    RedriveOutcomes,
    RedriveProgress,
    RedriveResults,
    SeenDeadLetter,
)
from jetspark.app.dead_letters.retries import each_retry
from jetspark.app.dead_letters.stranded import KeyRepairs
from jetspark.app.handlers.dead_letter_box import DeadLetterBox, StoredDeadLetter
from jetspark.app.jobs import Job, new_job_id
from jetspark.app.stored_events import StoredEvent
from jetspark.app.topology.names import dead_letter_stream, handler_bucket
from jetspark.core import numbers
from jetspark.errors import (
    ConfigError,
    JetSparkError,
    MessageNotFound,
    PayloadTooLarge,
    ProtocolError,
    StreamNotFound,
    WrongLastSequence,
)
from jetspark.jetstream.publishing import Expect

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue
    from jetspark.aio.stream import Stream
    from jetspark.app.spec import AppSpec, HasSpec

__all__ = [
    "DeadLetterFilter",
    "DiscardResults",
    "RedriveOutcomes",
    "RedriveProgress",
    "RedriveResults",
    "check_handler",
    "count_of",
    "discard_dead_letters",
    "each_dead_letter",
    "explain",
    "is_any",
    "read_dead_letter",
    "read_dead_letters",
    "run_redrive",
    "with_event",
]

# A chunk of requests: the redrive's record is written after each, so an interrupted one repeats at most this many,
# without effect. Their events are in memory: this many bytes, or a single larger one.
SAVE_EVERY = 256
CHUNK_BYTES = 4 << 20
# And this often at least, so that who looks at a slow one (--rate 0.1) sees that it progresses.
SAVE_EVERY_S = 5.0
# Dead letters of different keys that are discarded side by side.
DISCARDS_AT_ONCE = 32


async def run_redrive(
    js: JetStream,
    app: HasSpec,
    chosen: DeadLetterFilter,
    *,
    rate: float | None = None,
    is_dry_run: bool = False,
    resume: str | None = None,
    wait_s: float = 0.0,
    on_progress: Callable[[RedriveProgress], None] = lambda progress: None,
) -> RedriveProgress:
    """Have the handlers handle dead letters again.

    Args:
        rate: Requests each second, at most.
        resume: The id of a redrive that was interrupted.
        wait_s: How long to wait, at most, for what becomes of the dead letters that this call requests and of those
            behind them; ``results`` says it then. 0 waits for nothing.

    Raises:
        UsageError: Another redrive is under way.
        ConfigError: There is none to resume, no such handler, or the rate is not a number above 0.
    """
    app = app.spec
    _check(app, chosen, rate, wait_s)
    records, stream = await js.kv(handler_bucket(app.name)), await js.stream(dead_letter_stream(app.name))
    up_to = stream.cached_info.state.last_sequence
    job = await _start(records, chosen, up_to, is_dry_run=is_dry_run, resume=resume)
    progress = job.record
    on_progress(progress)
    redrive = _Redrive(js, app, stream, job, on_progress)
    dead_letters = await redrive.look()
    await redrive.request_all(dead_letters, rate)
    progress.is_done = True
    if not is_dry_run:
        await job.end()
        if wait_s > 0 and progress.has_effect:
            on_progress(progress)
            await redrive.wait(dead_letters, wait_s)
    if not progress.has_effect:
        progress.reason = await explain(
            js, app, progress.chosen, behind=progress.behind, unhandled=progress.unhandled, gone=redrive.gone
        )
    on_progress(progress)
    return progress


def _check(app: AppSpec, chosen: DeadLetterFilter, rate: float | None, wait_s: float) -> None:
    """Before anything is recorded: a redrive that fails is one that was interrupted, and has to be resumed."""
    if rate is not None:
        numbers.rate("rate", rate, instead="or None for no limit")
    numbers.seconds("wait_s", wait_s)
    if app.projections and not app.handlers:
        raise ConfigError(
            f"redrive: app {app.name!r} has no handlers, so nothing would handle its dead letters; `jetspark dlq "
            "discard` gives them up"
        )
    if chosen.handler is not None and not _is_handler(app, chosen.handler):
        known = ", ".join(sorted(app.handlers))
        raise ConfigError(f"handler {chosen.handler!r}: app {app.name!r} has no such handler; it has {known}")


def _is_handler(app: AppSpec, name: str) -> bool:
    """True if its dead letters would be handled. An operator may name an application without declaring handlers."""
    return name in app.handlers or not app.handlers


async def _start(
    records: KeyValue, chosen: DeadLetterFilter, up_to: int, *, is_dry_run: bool, resume: str | None
) -> Job[RedriveProgress]:
    """A redrive, resumed or new. The record of a dry run is never stored."""
    if is_dry_run:
        return Job(records, RedriveProgress(id="-", chosen=chosen, up_to=up_to, is_dry_run=True), 0)
    if resume is None:
        return await Job.begin(records, RedriveProgress(id=new_job_id(), chosen=chosen, up_to=up_to))
    job = await Job.find(records, RedriveProgress, REDRIVE_KEY, resume)
    await job.resume()
    return job


class _Redrive:
    """One redrive while it runs."""

    def __init__(
        self,
        js: JetStream,
        app: AppSpec,
        stream: Stream,
        job: Job[RedriveProgress],
        on_progress: Callable[[RedriveProgress], None],
    ) -> None:
        self._js, self._app, self._stream, self._job = js, app, stream, job
        self._progress, self._on_progress = job.record, on_progress
        self.gone = 0
        """Chosen dead letters that were handled, redriven or discarded before this requested them."""
        self._outcomes = RedriveOutcomes()
        self._saved_at, self._saved = clock.now(), job.record.looked_at

    async def look(self) -> list[SeenDeadLetter]:
        """List the dead letters of the chosen handlers and keys, and repair keys whose records do not match them.

        They are listed before the first request, so that the dead letters that follow it are known.
        """
        chosen, dead_letters = self._progress.chosen, list[SeenDeadLetter]()
        repairs = {
            name: await KeyRepairs.look(self._js, self._app, spec, chosen)
            for name, spec in self._app.handlers.items()
            if chosen.handler in (None, name) and spec.in_order
        }
        async for stored in each_dead_letter(self._js, self._app, chosen.with_neighbours(), with_events=False):
            dead_letter = stored.dead_letter
            if dead_letter.handler in repairs:
                repairs[dead_letter.handler].add(dead_letter)
            dead_letters.append(
                SeenDeadLetter(
                    stored.revision,
                    stored.subject,
                    dead_letter.handler,
                    dead_letter.key,
                    dead_letter.status,
                    dead_letter.redrives,
                    stored.size_bytes,
                    chosen.accepts(stored),
                )
            )
        await self._repair(repairs)
        return dead_letters

    async def _repair(self, repairs: dict[str, KeyRepairs]) -> None:
        progress = self._progress
        for name, keys in repairs.items():
            freed = await keys.free_stranded(progress.chosen, is_dry_run=progress.is_dry_run)
            restored = await keys.restore_unrecorded(progress.chosen, is_dry_run=progress.is_dry_run)
            progress.freed += len(freed)
            progress.restored += len(restored)
            for key in (*freed, *restored):
                self._outcomes.free(name, key)

    async def request_all(self, dead_letters: Sequence[SeenDeadLetter], rate: float | None) -> None:
        """Request the chosen dead letters after the last one that was requested before."""
        progress, began = self._progress, clock.now()
        chunk, size = list[SeenDeadLetter](), 0
        before = progress.requested
        for seen in self._chosen(dead_letters):
            if progress.is_dry_run:
                progress.requested += 1
                continue
            if chunk and size + seen.size_bytes > CHUNK_BYTES:
                await self._request_chunk(chunk, seen.revision - 1)
                chunk, size = [], 0
            chunk.append(seen)
            size += seen.size_bytes
            # At a low rate a chunk is what may be requested by now: one at first.
            allowed = SAVE_EVERY if rate is None else int((clock.now() - began) * rate) - progress.requested + before
            if len(chunk) >= min(SAVE_EVERY, max(1, allowed)):
                await self._request_chunk(chunk, seen.revision)
                chunk, size = [], 0
                if rate is not None:
                    await asyncio.sleep(max(0.0, began + (progress.requested - before) / rate - clock.now()))
                if clock.now() - self._saved_at >= SAVE_EVERY_S:
                    await self._save()
        if chunk:
            await self._request_chunk(chunk, progress.up_to)
        progress.last = max(progress.last, progress.up_to)

    def _chosen(self, dead_letters: Sequence[SeenDeadLetter]) -> Iterator[SeenDeadLetter]:
        """The dead letters to request; others are counted."""
        progress = self._progress
        for seen in dead_letters:
            if not seen.is_chosen or not progress.last < seen.revision <= progress.up_to:
                continue
            if not _is_handler(self._app, seen.handler):
                progress.unhandled += 1
            elif seen.status == "behind":
                progress.behind += 1
            else:
                yield seen

    async def _request_chunk(self, chunk: list[SeenDeadLetter], up_to: int) -> None:
        """Request dead letters; with them all up to a revision are dealt with."""
        requested = await _request(self._js, self._app, self._stream, chunk)
        for seen, is_requested in zip(chunk, requested, strict=True):
            if is_requested:
                self._outcomes.request(seen)
                self._progress.requested += 1
            else:
                self.gone += 1
        self._progress.last = up_to
        if self._progress.looked_at - self._saved >= SAVE_EVERY:
            await self._save()

    async def _save(self) -> None:
        await self._job.save()
        self._saved_at, self._saved = clock.now(), self._progress.looked_at
        self._on_progress(self._progress)

    async def wait(self, dead_letters: Sequence[SeenDeadLetter], wait_s: float) -> None:
        """Follow changes of dead letters, until all have ended or the time is over."""
        progress, outcomes = self._progress, self._outcomes
        outcomes.follow_all(dead_letters, progress.up_to)
        progress.results = outcomes.results
        if outcomes.have_ended():
            return
        subject = progress.chosen.with_neighbours().dead_letters_of(self._app.name)
        changes = self._stream.ordered_consumer(subject, start_sequence=progress.up_to + 1, headers_only=True)
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(wait_s),
                aclosing(cast("AsyncGenerator[Any, None]", changes.messages())) as messages,
            ):
                async for message in messages:
                    with suppress(ProtocolError):  # another program's message
                        dead_letter = StoredEvent.described(message.raw_headers)
                        outcomes.set_status(message.subject, dead_letter.status, dead_letter.redrives)
                    if outcomes.have_ended():
                        return


async def _request(js: JetStream, app: AppSpec, stream: Stream, chunk: Sequence[SeenDeadLetter]) -> list[bool]:
    """Request dead letters, in this order; False for each that was handled, redriven or discarded in the meantime."""
    whole = await asyncio.gather(*(_read_whole(stream, seen) for seen in chunk))
    boxes = {seen.handler: DeadLetterBox(js, app.name, seen.handler, stream, None) for seen in chunk}
    sent = []
    for stored in whole:
        if stored is None:
            continue
        subject, again = boxes[stored.dead_letter.handler].request_for(stored)
        try:
            future = await js.publish_async(
                subject, again.data, headers=again.to_headers(), expect=Expect(last_subject_sequence=0)
            )
        except PayloadTooLarge:
            await boxes[stored.dead_letter.handler].request(stored)
        else:
            sent.append((stored, future))
    # All of them have ended before the first failure is raised or dealt with.
    answers = await asyncio.gather(*(future for _, future in sent), return_exceptions=True)
    for (stored, _), answer in zip(sent, answers, strict=True):
        if isinstance(answer, JetSparkError) and not isinstance(answer, WrongLastSequence):
            # Too large for the server, or not known to be stored: by itself, with what remedies there are.
            await boxes[stored.dead_letter.handler].request(stored)
        elif isinstance(answer, BaseException) and not isinstance(answer, WrongLastSequence):
            raise answer
    return [stored is not None for stored in whole]


async def _read_whole(stream: Stream, seen: SeenDeadLetter) -> StoredDeadLetter | None:
    try:
        message = await stream.get_message(seen.revision)
    except MessageNotFound:
        return None
    # In a re-created stream this is another message.
    return StoredDeadLetter.of(message) if message.subject == seen.subject else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardResults:
    """The result of a discard."""

    discarded: int = 0
    behind: int = 0
    """Chosen dead letters that wait behind another of their key: they follow it by themselves once it is gone."""
    reason: str = ""
    """Why nothing was discarded; empty where something was."""


async def discard_dead_letters(
    js: JetStream, app: HasSpec, chosen: DeadLetterFilter, *, is_dry_run: bool = False
) -> DiscardResults:
    """Give dead letters up permanently, and let their keys continue.

    A dead letter that waits behind another is not discarded: it follows by itself once the other is gone.

    Raises:
        ConfigError: The handler does not exist.
    """
    app = app.spec
    await check_handler(js, app, chosen.handler)
    stream, records = await js.stream(dead_letter_stream(app.name)), await open_parked_records(js, app)
    discarded = behind = gone = 0
    chunk: list[StoredDeadLetter] = []

    async def discard() -> None:
        nonlocal discarded, gone
        lanes: dict[tuple[str, str | None, int], list[StoredDeadLetter]] = {}
        for stored in chunk:
            dead_letter = stored.dead_letter
            # Of one key in order; those without a key have no order.
            number = stored.revision if dead_letter.key is None else 0
            lanes.setdefault((dead_letter.handler, dead_letter.key, number), []).append(stored)
        count = sum(await asyncio.gather(*(discard_lane(lane) for lane in lanes.values())))
        discarded += count
        gone += len(chunk) - count
        chunk.clear()

    async def discard_lane(lane: list[StoredDeadLetter]) -> int:
        box = DeadLetterBox(js, app.name, lane[0].dead_letter.handler, stream, records)
        return sum([await box.discard(stored) for stored in lane])

    async for stored in each_dead_letter(js, app, chosen, with_events=False):
        if stored.dead_letter.status == "behind":
            behind += 1
        elif is_dry_run:
            discarded += 1
        else:
            chunk.append(stored)
            if len(chunk) == DISCARDS_AT_ONCE:
                await discard()
    await discard()
    reason = "" if discarded else await explain(js, app, chosen, behind=behind, gone=gone)
    return DiscardResults(discarded=discarded, behind=behind, reason=reason)


async def explain(
    js: JetStream, app: AppSpec, chosen: DeadLetterFilter, *, behind: int = 0, unhandled: int = 0, gone: int = 0
) -> str:
    """Why none of the dead letters was chosen, and what waits: others, those in front of them, scheduled retries."""
    parts = []
    if behind:
        parts.append(f"{count_of(behind, 'dead letter')} wait behind an earlier event of their key and follow it")
    if unhandled:
        parts.append(
            f"{count_of(unhandled, 'dead letter')} left alone because the application has no handler of their name"
        )
    if gone:
        verb = "was" if gone == 1 else "were"
        parts.append(f"{count_of(gone, 'dead letter')} {verb} handled, redriven or discarded in the meantime")
    if not behind and not unhandled and not gone:
        parts.append(await _explain_none(js, app, chosen))
    where = tuple(pair for pair in chosen.where if pair[0] in ("key", "sequence", "subject"))
    retries, first = 0, None
    with suppress(StreamNotFound):  # an application without handlers has no retries
        async for retry in each_retry(js, app.name, DeadLetterFilter(handler=chosen.handler, where=where)):
            retries += 1
            if retry.due is not None and (first is None or retry.due < first):
                first = retry.due
    if retries:
        due = "" if first is None else f", the first for {first.isoformat(timespec='seconds').replace('+00:00', 'Z')}"
        what = "retry is scheduled" if retries == 1 else "retries are scheduled"
        parts.append(f"{retries} {what}{due} (`jetspark retry ls`; `jetspark retry now` has them tried at once)")
    elif behind:
        parts.append("redrive or discard the open dead letter of the key (`jetspark dlq ls --where key=...`)")
    return "; ".join(parts)


async def _explain_none(js: JetStream, app: AppSpec, chosen: DeadLetterFilter) -> str:
    if await is_any(each_dead_letter(js, app, chosen, with_events=False)):
        return "the dead letters that match were written in the meantime"
    if not chosen.is_everything and await is_any(each_dead_letter(js, app, DeadLetterFilter(), with_events=False)):
        return "no dead letter matches; `jetspark dlq ls` lists all"
    return "there are no dead letters"


async def is_any(items: AsyncIterator[object]) -> bool:
    """True if there is at least one. Only the first is read."""
    async with aclosing(cast("AsyncGenerator[Any, None]", items)) as found:
        async for _ in found:
            return True
    return False


def count_of(number: int, what: str) -> str:
    """A count with its noun: ``1 dead letter``, ``2 dead letters``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
