"""Dead letters from the operator's side: choosing, redriving, discarding.

A redrive is a record in the handlers' bucket. It freezes the last letter that is part of it before it begins, notes
each letter when it is requested, and is removed at the end; so one that was interrupted can be resumed, and a second
one is refused meanwhile. A request is stored at most once for each failure of a letter, so repeating one is harmless.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspark.app.dead_letters.letters import letter_filter
from jetspark.app.dead_letters.store import HandlerStore, StoredLetter
from jetspark.app.topology.names import dead_letter_stream, handler_bucket
from jetspark.errors import ConfigError, Conflict, KeyExists, KeyNotFound, MessageNotFound, ProtocolError, UsageError

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue
    from jetspark.app.application import App

__all__ = ["LetterFilter", "RedriveProgress", "discard_letters", "read_letter", "read_letters", "run_redrive"]

RECORD = "redrive"
# The record is written this often, so an interrupted redrive repeats at most this many requests, without effect.
NOTE_EVERY = 50
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
            ConfigError: There is no such field.
        """
        pairs = []
        for condition in conditions:
            name, found, value = condition.partition("=")
            if not found or name not in _FIELDS:
                raise ConfigError(f"--where {condition!r}: expected FIELD=VALUE with one of {', '.join(_FIELDS)}")
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

    def to_dict(self) -> dict[str, Any]:
        return {"handler": self.handler, "where": [list(pair) for pair in self.where]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> LetterFilter:
        return cls(handler=fields["handler"], where=tuple((name, value) for name, value in fields["where"]))


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
    is_dry_run: bool = False
    is_done: bool = False

    def __str__(self) -> str:
        verb = "would be redriven" if self.is_dry_run else "requested"
        state = "done" if self.is_done else f"at letter {self.last}"
        return f"redrive {self.id}: {self.requested} {verb}, {self.behind} follow, up to letter {self.up_to}, {state}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "chosen": self.chosen.to_dict(),
            "up_to": self.up_to,
            "last": self.last,
            "requested": self.requested,
            "behind": self.behind,
            "dry_run": self.is_dry_run,
            "done": self.is_done,
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
        )


async def read_letters(js: JetStream, app: App, chosen: LetterFilter) -> list[StoredLetter]:
    """The letters that are not closed, oldest first."""
    stream = await js.stream(dead_letter_stream(app.name))
    found = []
    async for message in stream.get_messages(1, subject=letter_filter(app.name, chosen.handler)):
        try:
            stored = StoredLetter.of(message)
        except ProtocolError:
            continue  # somebody else's message
        if stored.letter.status != "closed" and chosen.accepts(stored):
            found.append(stored)
    return found


async def read_letter(js: JetStream, app: App, number: int) -> StoredLetter:
    """One letter, by its number.

    Raises:
        ConfigError: There is none.
    """
    stream = await js.stream(dead_letter_stream(app.name))
    try:
        return StoredLetter.of(await stream.get_message(number))
    except (MessageNotFound, ProtocolError):
        raise ConfigError(f"letter {number} of app {app.name!r}: there is none; `jetspark dlq ls` lists them") from None


async def run_redrive(
    js: JetStream,
    app: App,
    chosen: LetterFilter,
    *,
    rate: float | None = None,
    is_dry_run: bool = False,
    resume: str | None = None,
    on_progress: Callable[[RedriveProgress], None] = lambda progress: None,
) -> RedriveProgress:
    """Have the handlers handle letters again.

    Raises:
        UsageError: Another redrive is under way.
        ConfigError: There is none to resume.
    """
    records = await js.kv(handler_bucket(app.name))
    stream = await js.stream(dead_letter_stream(app.name))
    if is_dry_run:
        progress = RedriveProgress(id="-", chosen=chosen, up_to=stream.cached_info.state.last_sequence, is_dry_run=True)
        revision = 0
    elif resume is not None:
        progress, revision = await _resume(records, resume)
    else:
        progress, revision = await _begin(records, chosen, stream.cached_info.state.last_sequence)
    on_progress(progress)
    began = time.monotonic()
    for stored in await read_letters(js, app, progress.chosen):
        if not progress.last < stored.revision <= progress.up_to:
            continue
        if stored.letter.status == "behind":
            progress.behind += 1
        else:
            if not is_dry_run:
                store = HandlerStore(js, app.name, stored.letter.handler, stream, stream, records)
                await store.request(stored)
            progress.requested += 1
            if rate is not None and not is_dry_run:
                await asyncio.sleep(max(0.0, began + progress.requested / rate - time.monotonic()))
        progress.last = stored.revision
        if not is_dry_run and (progress.requested + progress.behind) % NOTE_EVERY == 0:
            revision = await _note(records, progress, revision)
            on_progress(progress)
    progress.is_done = True
    if not is_dry_run:
        await records.purge(RECORD, revision=revision)
    on_progress(progress)
    return progress


async def discard_letters(js: JetStream, app: App, chosen: LetterFilter) -> int:
    """Give up letters for good, and let their keys go on; returns how many.

    Those that wait behind another are not chosen: they follow it by themselves once it is gone.
    """
    stream, records = await js.stream(dead_letter_stream(app.name)), await js.kv(handler_bucket(app.name))
    count = 0
    for stored in await read_letters(js, app, chosen):
        if stored.letter.status == "open":
            store = HandlerStore(js, app.name, stored.letter.handler, stream, stream, records)
            count += await store.discard(stored)
    return count


async def _begin(records: KeyValue, chosen: LetterFilter, up_to: int) -> tuple[RedriveProgress, int]:
    progress = RedriveProgress(id=f"r{time.time_ns() // 1_000_000:x}", chosen=chosen, up_to=up_to)
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
