"""Dead letters from the operator's side: choosing, redriving, discarding.

A redrive is a record in the handlers' bucket. It freezes the last letter that is part of it before it begins, notes
each letter when it is requested, and is removed at the end; so one that was interrupted can be resumed, and a second
one is refused meanwhile. A request is stored at most once for each failure of a letter, so repeating one is harmless.

What became of the letters is read from the dead-letter stream: each change of a letter is a new message of its subject.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspark.aio import clock
from jetspark.app.clock import seconds_now
from jetspark.app.dead_letters.letters import DeadEvent, letter_filter
from jetspark.app.dead_letters.store import HandlerStore, StoredLetter
from jetspark.app.dead_letters.stranded import StrandedKeys
from jetspark.app.handlers.settling import ReadParked, restore
from jetspark.app.projections.unreadable import HANDLER as PROJECTIONS
from jetspark.app.topology.names import dead_letter_stream, handler_bucket, projection_bucket
from jetspark.core import numbers
from jetspark.errors import (
    ConfigError,
    Conflict,
    ConsumerNotFound,
    InvalidSubject,
    KeyExists,
    KeyNotFound,
    MessageNotFound,
    ProtocolError,
    StreamNotFound,
    UsageError,
)

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue
    from jetspark.aio.stream import Stream
    from jetspark.app.declarations import Declarations

__all__ = [
    "LetterFilter",
    "LetterOutcomes",
    "RedriveProgress",
    "RedriveResults",
    "check_handler",
    "discard_letters",
    "each_letter",
    "read_letter",
    "read_letters",
    "run_redrive",
    "with_event",
]

RECORD = "redrive"
# The record is written this often, so an interrupted redrive repeats at most this many requests, without effect.
NOTE_EVERY = 50
# And this often at least, so that who looks at a slow one (--rate 0.1) sees that it goes on.
NOTE_EVERY_S = 5.0
# Letters that are read at a time: as large as the largest event each.
PORTION = 16
# How often a redrive that waits looks what became of its letters.
LOOK_EVERY_S = 0.25
_STATUSES = ("open", "behind")
_FIELDS = ("error", "fingerprint", "key", "sequence", "status", "subject")


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which letters: of one handler or all, with these values."""

    handler: str | None = None
    where: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, handler: str | None, conditions: Sequence[str]) -> LetterFilter:
        """From ``FIELD=VALUE``.

        Raises:
            ConfigError: There is no such field, or no letter can have that value.
        """
        pairs = []
        for condition in conditions:
            name, found, value = condition.partition("=")
            if not found or name not in _FIELDS:
                raise ConfigError(f"--where {condition!r}: expected FIELD=VALUE with one of {', '.join(_FIELDS)}")
            if name == "status" and value not in _STATUSES:
                raise ConfigError(f"--where {condition!r}: expected status={' or status='.join(_STATUSES)}")
            if name == "sequence" and not (value.isascii() and value.isdigit()):
                raise ConfigError(
                    f"--where {condition!r}: expected a whole number, the place of the event in its stream"
                )
            pairs.append((name, value))
        return cls(handler=handler, where=tuple(pairs))

    def accepts(self, stored: StoredLetter) -> bool:
        letter, cause = stored.letter, stored.letter.cause
        values = {
            "error": (cause.error, cause.error.rsplit(".", 1)[-1]) if cause is not None else (),
            "fingerprint": (cause.fingerprint,) if cause is not None else (),
            "key": (letter.key,),
            "sequence": (str(letter.origin.sequence),),
            "status": (letter.status,),
            "subject": (letter.subject,),
        }
        return (self.handler is None or letter.handler == self.handler) and all(
            value in values[name] for name, value in self.where
        )

    def accepts_key(self, key: str) -> bool:
        """Whether a key is meant of which there is no letter: all are, unless letters of another kind are."""
        return all(pair == ("key", key) for pair in self.where)

    def to_dict(self) -> dict[str, Any]:
        return {"handler": self.handler, "where": [list(pair) for pair in self.where]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> LetterFilter:
        return cls(handler=fields["handler"], where=tuple((name, value) for name, value in fields["where"]))


@dataclass(slots=True, kw_only=True)
class RedriveResults:
    """What became of letters that were requested, and of those that follow them."""

    handled: int = 0
    failed: int = 0
    """Handled again, and failed again."""
    waiting: int = 0
    """Not handled yet, or behind one that failed again."""

    def __str__(self) -> str:
        return f"{self.handled} handled, {self.failed} failed again, {self.waiting} waiting"


@dataclass(slots=True, kw_only=True)
class RedriveProgress:
    """How far a redrive has come."""

    id: str
    chosen: LetterFilter
    up_to: int
    """The last letter that is part of it; later ones are not."""
    last: int = 0
    """Letters up to this one are requested, or need not be."""
    requested: int = 0
    behind: int = 0
    """Letters that follow another of their key by themselves."""
    freed: int = 0
    """Keys that go on though the letter they waited for is gone."""
    restored: int = 0
    """Keys with letters behind another of which the records were gone: they follow again."""
    nobodys: int = 0
    """Letters of what is no handler of the application (any more), or of projections: nobody would handle them."""
    is_dry_run: bool = False
    is_done: bool = False
    """Everything is requested."""
    results: RedriveResults | None = None
    """What became of the letters; None if nobody waited for it."""

    @property
    def looked_at(self) -> int:
        """Letters that were chosen, and are dealt with."""
        return self.requested + self.behind + self.nobodys

    def __str__(self) -> str:
        verb = "would be redriven" if self.is_dry_run else "requested"
        state = "done" if self.is_done else f"at letter {self.last}"
        text = f"redrive {self.id}: {self.requested} {verb}, {self.behind} follow, up to letter {self.up_to}, {state}"
        if self.freed:
            go_on = "would go on" if self.is_dry_run else "go on"
            text += f", {self.freed} keys whose letters are gone {go_on}"
        if self.restored:
            follow = "would follow" if self.is_dry_run else "follow"
            text += f", {self.restored} keys whose records are gone {follow} again"
        if self.nobodys:
            text += f", {self.nobodys} left alone that are of no handler of the application"
        return text if self.results is None else f"{text}: {self.results}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "chosen": self.chosen.to_dict(),
            "up_to": self.up_to,
            "last": self.last,
            "requested": self.requested,
            "behind": self.behind,
            "freed": self.freed,
            "restored": self.restored,
            "nobodys": self.nobodys,
            "dry_run": self.is_dry_run,
            "done": self.is_done,
            **({} if self.results is None else {"results": dataclasses.asdict(self.results)}),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RedriveProgress:
        return cls(
            id=fields["id"],
            chosen=LetterFilter.from_dict(fields["chosen"]),
            up_to=fields["up_to"],
            last=fields["last"],
            requested=fields["requested"],
            behind=fields["behind"],
            freed=fields.get("freed", 0),
            restored=fields.get("restored", 0),
            nobodys=fields.get("nobodys", 0),
        )


async def each_letter(js: JetStream, app: Declarations, chosen: LetterFilter) -> AsyncIterator[StoredLetter]:
    """The letters that are not closed, oldest first, a few at a time in memory; none that are written from now on."""
    stream = await js.stream(dead_letter_stream(app.name))
    begin, up_to = 1, stream.cached_info.state.last_sequence
    subject = letter_filter(app.name, chosen.handler)
    while begin <= up_to:
        messages = [each async for each in stream.get_messages(begin, subject=subject, max_messages=PORTION)]
        for message in messages:
            with suppress(ProtocolError):  # somebody else's message
                stored = StoredLetter.of(message)
                if message.sequence <= up_to and stored.letter.status != "closed" and chosen.accepts(stored):
                    yield stored
        if len(messages) < PORTION:
            return
        begin = messages[-1].sequence + 1


async def read_letters(js: JetStream, app: Declarations, chosen: LetterFilter) -> list[StoredLetter]:
    """The letters that are not closed, oldest first, all at once; see :func:`each_letter`."""
    return [stored async for stored in each_letter(js, app, chosen)]


async def check_handler(js: JetStream, app: Declarations, name: str | None) -> None:
    """That letters may be of a handler: of one that the application has, or had, or of its projections.

    Raises:
        ConfigError: It has none of this name, and there are no letters of one.
    """
    if name is None or name in (*app.handlers, PROJECTIONS) or not (app.handlers or app.projections):
        return
    with suppress(InvalidSubject):  # no handler can have such a name
        async for _ in each_letter(js, app, LetterFilter(handler=name)):
            return
    known = ", ".join(sorted(app.handlers)) or "none"
    raise ConfigError(
        f"handler {name!r}: app {app.name!r} has no such handler, and there are no letters of one; it has {known}, "
        f"and {PROJECTIONS} for letters of projections"
    )


async def read_letter(js: JetStream, app: Declarations, number: int) -> StoredLetter:
    """One letter, by its number.

    Raises:
        ConfigError: There is none.
    """
    stream = await js.stream(dead_letter_stream(app.name))
    if 1 <= number <= stream.cached_info.state.last_sequence:
        with suppress(MessageNotFound, ProtocolError):
            return StoredLetter.of(await stream.get_message(number))
    raise ConfigError(f"letter {number} of app {app.name!r}: there is none; `jetspark dlq ls` lists them")


async def with_event(js: JetStream, app: Declarations, stored: StoredLetter) -> StoredLetter:
    """A letter with the headers and the body of its event, also if they are kept apart from it."""
    stream, records = await js.stream(dead_letter_stream(app.name)), await _records(js, app)
    store = HandlerStore(js, app.name, stored.letter.handler, stream, stream, records)
    return StoredLetter(await store.whole(stored.letter), stored.subject, stored.revision)


async def _records(js: JetStream, app: Declarations) -> KeyValue:
    """The bucket with what handlers remember of keys that wait.

    An application that has never had a handler has none. Letters of projections hold up no key, so nothing is looked
    for in the one that stands in for it.
    """
    try:
        return await js.kv(handler_bucket(app.name))
    except StreamNotFound:
        if app.handlers or not app.projections:
            raise
        return await js.kv(projection_bucket(app.name))


async def run_redrive(
    js: JetStream,
    app: Declarations,
    chosen: LetterFilter,
    *,
    rate: float | None = None,
    is_dry_run: bool = False,
    resume: str | None = None,
    wait_s: float = 0.0,
    on_progress: Callable[[RedriveProgress], None] = lambda progress: None,
) -> RedriveProgress:
    """Have the handlers handle letters again.

    Args:
        rate: Requests each second, at most.
        resume: The id of a redrive that was interrupted.
        wait_s: How long to wait, at most, for what becomes of the letters that this call requests and of those behind
            them; ``results`` says it then. 0 waits for nothing.

    Raises:
        UsageError: Another redrive is under way.
        ConfigError: There is none to resume, no such handler, or a rate that is none.
    """
    _check(app, chosen, rate, wait_s)
    records, stream = await js.kv(handler_bucket(app.name)), await js.stream(dead_letter_stream(app.name))
    up_to = stream.cached_info.state.last_sequence
    progress, revision = await _start(records, chosen, up_to, is_dry_run=is_dry_run, resume=resume)
    on_progress(progress)
    began = noted_at = clock.now()
    outcomes = LetterOutcomes()
    # All as they were before the first is requested, so that those that follow it are known; without their events.
    everything = each_letter(js, app, LetterFilter(handler=progress.chosen.handler))
    letters = [(progress.chosen.accepts(stored), stored.without_body()) async for stored in everything]
    await _mend_keys(js, app, progress, outcomes, (stored.letter for _, stored in letters))
    for is_chosen, stored in letters:
        if not is_chosen or not progress.last < stored.revision <= progress.up_to:
            continue
        if not _is_handler(app, stored.letter.handler):
            progress.nobodys += 1
        elif stored.letter.status == "behind":
            progress.behind += 1
        elif is_dry_run:
            progress.requested += 1
        elif await _request(js, app, stream, records, stored.revision):
            outcomes.request(stored)
            progress.requested += 1
            if rate is not None:
                await asyncio.sleep(max(0.0, began + progress.requested / rate - clock.now()))
        progress.last = stored.revision
        if not is_dry_run and (progress.looked_at % NOTE_EVERY == 0 or clock.now() - noted_at >= NOTE_EVERY_S):
            revision, noted_at = await _note(records, progress, revision), clock.now()
            on_progress(progress)
    progress.is_done = True
    if not is_dry_run:
        await records.purge(RECORD, revision=revision)
        if wait_s > 0:
            outcomes.follow_all((stored for _, stored in letters), progress.up_to)
            progress.results = outcomes.results
            await _wait(stream, letter_filter(app.name, progress.chosen.handler), outcomes, progress, wait_s)
    on_progress(progress)
    return progress


def _check(app: Declarations, chosen: LetterFilter, rate: float | None, wait_s: float) -> None:
    """Before anything is noted: a redrive that fails is one that was interrupted, and has to be resumed."""
    if rate is not None:
        numbers.rate("rate", rate, instead="or None for no limit")
    numbers.seconds("wait_s", wait_s)
    if app.projections and not app.handlers:
        raise ConfigError(
            f"redrive: app {app.name!r} has no handlers, so nobody would handle its letters; `jetspark dlq discard` "
            "gives them up"
        )
    if chosen.handler is not None and not _is_handler(app, chosen.handler):
        known = ", ".join(sorted(app.handlers))
        raise ConfigError(f"handler {chosen.handler!r}: app {app.name!r} has no such handler; it has {known}")


def _is_handler(app: Declarations, name: str) -> bool:
    """Whether somebody would handle its letters. An application without handlers is but a name, for an operator."""
    return name in app.handlers or not app.handlers


async def _start(
    records: KeyValue, chosen: LetterFilter, up_to: int, *, is_dry_run: bool, resume: str | None
) -> tuple[RedriveProgress, int]:
    """The record of a redrive, old or new, and its revision; one that only tells what it would do has none."""
    if is_dry_run:
        return RedriveProgress(id="-", chosen=chosen, up_to=up_to, is_dry_run=True), 0
    if resume is not None:
        return await _resume(records, resume)
    return await _begin(records, chosen, up_to)


async def _mend_keys(
    js: JetStream, app: Declarations, progress: RedriveProgress, outcomes: LetterOutcomes, letters: Iterable[DeadEvent]
) -> None:
    """See to keys of which somebody has removed the letters, or the records."""
    await _free_stranded(js, app, progress, outcomes)
    await _restore(js, app, progress, outcomes, letters)


async def _free_stranded(js: JetStream, app: Declarations, progress: RedriveProgress, outcomes: LetterOutcomes) -> None:
    """Let keys go on whose letters are gone, or count them."""
    chosen = progress.chosen
    for spec in app.handlers.values():
        if chosen.handler not in (None, spec.name) or not spec.in_order:
            continue
        try:
            stranded = await StrandedKeys.look(js, app, spec)
        except (StreamNotFound, ConsumerNotFound):
            continue  # it has never run, or will begin anew: nobody can tell what it has done
        async for key, head in stranded.keys():
            if not chosen.accepts_key(key):
                continue
            progress.freed += 1
            if not progress.is_dry_run:
                await stranded.free(key, head)
                outcomes.free(spec.name, key)


async def _restore(
    js: JetStream, app: Declarations, progress: RedriveProgress, outcomes: LetterOutcomes, letters: Iterable[DeadEvent]
) -> None:
    """Have keys wait for their first letter again whose letters are there and whose records are gone, or count them."""
    chosen = progress.chosen
    behind = {(each.handler, each.key) for each in letters if each.status == "behind" and each.key is not None}
    for spec in app.handlers.values():
        keys = sorted(key for handler, key in behind if handler == spec.name and chosen.accepts_key(key))
        if not keys or not spec.in_order or chosen.handler not in (None, spec.name):
            continue
        store = await HandlerStore.open(js, app.name, spec.name)
        for key in keys:
            if progress.is_dry_run:
                progress.restored += await store.perform(ReadParked(key)) is None
            elif await store.run(restore(key)):
                progress.restored += 1
                outcomes.free(spec.name, key)


async def _request(js: JetStream, app: Declarations, stream: Stream, records: KeyValue, revision: int) -> bool:
    """Request one letter; False if somebody has handled, redriven or discarded it meanwhile."""
    try:
        whole = StoredLetter.of(await stream.get_message(revision))
    except MessageNotFound:
        return False
    await HandlerStore(js, app.name, whole.letter.handler, stream, stream, records).request(whole)
    return True


class LetterOutcomes:
    """Which letters of a redrive have ended, and how. Pure."""

    def __init__(self) -> None:
        self.results = RedriveResults()
        self._left: dict[str, tuple[str, str | None]] = {}
        """Subjects of the letters that have not ended, and whose they are: handler and key."""
        self._redrives: dict[str, int] = {}
        self._lanes: set[tuple[str, str | None]] = set()
        self._stuck: set[tuple[str, str | None]] = set()
        """Keys that wait for a letter that failed again."""

    def request(self, stored: StoredLetter) -> None:
        """It was requested."""
        self._watch(stored)
        if stored.letter.key is not None:
            self._lanes.add((stored.letter.handler, stored.letter.key))

    def free(self, handler: str, key: str) -> None:
        """The letter that a key waited for is gone, and those behind it are handled now."""
        self._lanes.add((handler, key))

    def follow(self, stored: StoredLetter, up_to: int) -> None:
        """It is there, and is watched if it follows one that was requested, whether it was chosen or not."""
        is_behind = stored.letter.status == "behind" and stored.revision <= up_to
        if is_behind and (stored.letter.handler, stored.letter.key) in self._lanes:
            self._watch(stored)

    def follow_all(self, letters: Iterable[StoredLetter], up_to: int) -> None:
        for stored in letters:
            self.follow(stored, up_to)

    def note(self, stored: StoredLetter) -> None:
        """A letter was written anew."""
        letter, subject = stored.letter, stored.subject
        if subject not in self._left:
            return
        if letter.status == "closed":
            self.results.handled += 1
        elif letter.status == "open" and letter.redrives > self._redrives[subject]:
            self.results.failed += 1
            self._stuck.add(self._left[subject])
        else:
            return
        del self._left[subject]
        self.results.waiting = len(self._left)

    @property
    def are_known(self) -> bool:
        """Nothing is left but what waits for somebody to redrive another letter first."""
        return all(lane[1] is not None and lane in self._stuck for lane in self._left.values())

    def _watch(self, stored: StoredLetter) -> None:
        self._left[stored.subject] = (stored.letter.handler, stored.letter.key)
        self._redrives[stored.subject] = stored.letter.redrives
        self.results.waiting = len(self._left)


async def _wait(
    stream: Stream, subject: str, outcomes: LetterOutcomes, progress: RedriveProgress, wait_s: float
) -> None:
    """Follow what is written to letters, until all have ended or the time is over."""
    loop, seen = asyncio.get_running_loop(), progress.up_to
    give_up_at = loop.time() + wait_s
    while True:
        async for message in stream.get_messages(seen + 1, subject=subject):
            seen = message.sequence
            with suppress(ProtocolError):  # somebody else's message
                outcomes.note(StoredLetter.of(message))
        if outcomes.are_known or loop.time() >= give_up_at:
            return
        await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, give_up_at - loop.time())))


async def discard_letters(js: JetStream, app: Declarations, chosen: LetterFilter) -> int:
    """Give up letters for good, and let their keys go on; returns how many.

    Those that wait behind another are not chosen: they follow it by themselves once it is gone.

    Raises:
        ConfigError: There is no such handler.
    """
    await check_handler(js, app, chosen.handler)
    stream, records = await js.stream(dead_letter_stream(app.name)), await _records(js, app)
    count = 0
    async for stored in each_letter(js, app, chosen):
        if stored.letter.status == "open":
            store = HandlerStore(js, app.name, stored.letter.handler, stream, stream, records)
            count += await store.discard(stored)
    return count


async def _begin(records: KeyValue, chosen: LetterFilter, up_to: int) -> tuple[RedriveProgress, int]:
    progress = RedriveProgress(id=f"r{int(seconds_now() * 1000):x}", chosen=chosen, up_to=up_to)
    try:
        return progress, await records.create(RECORD, json.dumps(progress.to_dict()).encode())
    except KeyExists:
        other = json.loads((await records.get(RECORD)).value)
        raise UsageError(
            f"redrive {other['id']} is under way (at letter {other['last']} of {other['up_to']}): wait for it, or if "
            f"it was interrupted go on with --resume {other['id']}"
        ) from None


async def _resume(records: KeyValue, id: str) -> tuple[RedriveProgress, int]:
    try:
        entry = await records.get(RECORD)
    except KeyNotFound:
        raise ConfigError(f"--resume {id}: no redrive is under way; it is done, or never began") from None
    progress = RedriveProgress.from_dict(json.loads(entry.value))
    if progress.id != id:
        raise ConfigError(f"--resume {id}: the redrive that is under way is {progress.id}")
    return progress, await _note(records, progress, entry.revision)


async def _note(records: KeyValue, progress: RedriveProgress, revision: int) -> int:
    try:
        return await records.update(RECORD, json.dumps(progress.to_dict()).encode(), revision=revision)
    except Conflict:
        raise UsageError(f"redrive {progress.id} was taken over by another process") from None
