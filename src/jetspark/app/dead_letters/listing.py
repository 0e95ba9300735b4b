"""Dead letters as a list: which of them are chosen, and reading them.

The server filters by the parts of a dead letter's subject: its handler, its key, its event's sequence. A list reads
headers only.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from jetspark.app.handlers.dead_letter_box import DeadLetterBox, StoredDeadLetter
from jetspark.app.projections.unreadable_events import HANDLER as PROJECTIONS
from jetspark.app.stored_events import StoredEvent, dead_letter_filter
from jetspark.app.topology.names import dead_letter_stream, handler_bucket
from jetspark.core.arguments import unfit
from jetspark.errors import ConfigError, InvalidSubject, MessageNotFound, ProtocolError, StreamNotFound

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue
    from jetspark.app.spec import AppSpec, HasSpec

__all__ = [
    "FIELDS",
    "DeadLetterFilter",
    "check_handler",
    "each_dead_letter",
    "number_list",
    "open_parked_records",
    "read_dead_letter",
    "read_dead_letters",
    "with_event",
]

_STATUSES = ("open", "behind")
FIELDS = ("error", "fingerprint", "key", "number", "sequence", "status", "subject")

_is_number_list = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?(,[0-9]{1,20}(-[0-9]{1,20})?)*").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """A choice of dead letters: of one handler or all, with these values."""

    handler: str | None = None
    where: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, handler: str | None, conditions: Sequence[str], fields: Sequence[str] = FIELDS) -> DeadLetterFilter:
        """From ``FIELD=VALUE``.

        Raises:
            ConfigError: The field does not exist, or no dead letter can have that value.
        """
        pairs = []
        for condition in conditions:
            name, found, value = condition.partition("=")
            if not found or name not in fields:
                raise ConfigError(f"--where {condition!r}: expected FIELD=VALUE with one of {', '.join(fields)}")
            _check_value(f"--where {condition!r}", name, value)
            pairs.append((name, value))
        return cls(handler=handler, where=tuple(pairs))

    @classmethod
    def of(cls, handler: str | None, values: Mapping[str, object], fields: Sequence[str] = FIELDS) -> DeadLetterFilter:
        """From keywords; None stands for any value.

        Raises:
            ConfigError: As :meth:`parse`.
        """
        if handler is not None and not isinstance(handler, str):
            raise unfit("handler", handler, "the name of a handler, or None for all")
        pairs = []
        for name, value in values.items():
            if name not in fields:
                raise ConfigError(f"{name}={value!r}: expected one of {', '.join(('handler', *fields))}")
            if value is None:
                continue
            if name in ("number", "sequence") and type(value) is int:
                value = str(value)
            if not isinstance(value, str):
                raise unfit(name, value, "a text, or None for any")
            _check_value(f"{name}={value!r}", name, value)
            pairs.append((name, value))
        return cls(handler=handler, where=tuple(pairs))

    @property
    def is_everything(self) -> bool:
        return self.handler is None and not self.where

    def dead_letters_of(self, app: str) -> str:
        """The subject filter of the dead letters that may match: a handler, a key and a sequence are in the subject."""
        values = dict(self.where)
        return dead_letter_filter(app, self.handler, values.get("key"), values.get("sequence"))

    def with_neighbours(self) -> DeadLetterFilter:
        """The same handler and key, and any other value: what may wait behind a chosen dead letter."""
        return DeadLetterFilter(handler=self.handler, where=tuple(pair for pair in self.where if pair[0] == "key"))

    def accepts(self, stored: StoredDeadLetter) -> bool:
        numbers = [value for name, value in self.where if name == "number"]
        return all(_has(value, stored.revision) for value in numbers) and self.accepts_event(stored.dead_letter)

    def accepts_event(self, dead_letter: StoredEvent) -> bool:
        if not self.where:
            return self.handler is None or dead_letter.handler == self.handler
        cause = dead_letter.cause
        values = {
            "error": (cause.error, cause.error.rsplit(".", 1)[-1]) if cause is not None else (),
            "fingerprint": (cause.fingerprint,) if cause is not None else (),
            "key": (dead_letter.key,),
            "sequence": (str(dead_letter.origin.sequence),),
            "status": (dead_letter.status,),
            "subject": (dead_letter.subject,),
        }
        return (self.handler is None or dead_letter.handler == self.handler) and all(
            value in values[name] for name, value in self.where if name in values
        )

    def accepts_key(self, key: str) -> bool:
        """True if a key without any dead letter is chosen: every key, unless a field other than the key is given."""
        return all(pair == ("key", key) for pair in self.where)


def _check_value(what: str, name: str, value: str) -> None:
    if name == "status" and value not in _STATUSES:
        raise ConfigError(f"{what}: expected {' or '.join(f'status={each}' for each in _STATUSES)}")
    if name == "sequence" and not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{what}: expected a whole number, the place of the event in its stream")
    if name == "number" and not _is_number_list(value):
        raise ConfigError(f"{what}: expected numbers of dead letters, such as number=7 or number=3,7-12")


def number_list(numbers: Iterable[int]) -> str:
    """Numbers of dead letters as a condition has them: sorted, and as ranges where they follow one another."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _has(numbers: str, number: int) -> bool:
    firsts, lasts = _ranges(numbers)
    place = bisect_right(firsts, number) - 1
    return place >= 0 and number <= lasts[place]


@lru_cache(maxsize=4)
def _ranges(numbers: str) -> tuple[list[int], list[int]]:
    """First and last numbers of the ranges in a condition, in order; where ranges overlap, the last number so far."""
    pairs = sorted((int(part.partition("-")[0]), int(part.rpartition("-")[2])) for part in numbers.split(","))
    lasts: list[int] = []
    for _, last in pairs:
        lasts.append(max(last, lasts[-1]) if lasts else last)
    return [first for first, _ in pairs], lasts


async def each_dead_letter(
    js: JetStream, app: HasSpec, chosen: DeadLetterFilter, *, with_events: bool = True
) -> AsyncIterator[StoredDeadLetter]:
    """The dead letters that are not closed, oldest first; none that are written from now on.

    Without events the server sends the headers alone, and reads only the subjects of the handler, key or sequence that
    is chosen. An ordered consumer reads at most 16 MiB ahead.
    """
    app = app.spec
    stream = await js.stream(dead_letter_stream(app.name))
    up_to = stream.cached_info.state.last_sequence
    consumer = stream.ordered_consumer(chosen.dead_letters_of(app.name), headers_only=not with_events)
    if not up_to:
        return
    async with aclosing(cast("AsyncGenerator[Any, None]", consumer.messages(stored_only=True))) as messages:
        async for message in messages:
            if message.metadata.stream_sequence > up_to:
                return
            with suppress(ProtocolError):  # another program's message
                stored = StoredDeadLetter.listed(message, with_event=with_events)
                if stored.dead_letter.status != "closed" and chosen.accepts(stored):
                    yield stored


async def read_dead_letters(js: JetStream, app: HasSpec, chosen: DeadLetterFilter) -> list[StoredDeadLetter]:
    """The dead letters that are not closed, oldest first, all at once; see :func:`each_dead_letter`."""
    app = app.spec
    return [stored async for stored in each_dead_letter(js, app, chosen)]


async def check_handler(js: JetStream, app: AppSpec, name: str | None) -> None:
    """Check that there can be dead letters of a handler: the application has it, or had it, or it is its projections.

    Raises:
        ConfigError: It has no handler of this name, and there are no dead letters of one.
    """
    if name is None or name in (*app.handlers, PROJECTIONS) or not (app.handlers or app.projections):
        return
    with suppress(InvalidSubject):  # no handler can have such a name
        async for _ in each_dead_letter(js, app, DeadLetterFilter(handler=name), with_events=False):
            return
    known = ", ".join(sorted(app.handlers)) or "none"
    raise ConfigError(
        f"handler {name!r}: app {app.name!r} has no such handler, and no dead letters of one; it has {known}, "
        f"and {PROJECTIONS} for dead letters of projections"
    )


async def read_dead_letter(js: JetStream, app: HasSpec, number: int) -> StoredDeadLetter:
    """One dead letter, by its number.

    Raises:
        ConfigError: No dead letter has this number.
    """
    app = app.spec
    stream = await js.stream(dead_letter_stream(app.name))
    if 1 <= number <= stream.cached_info.state.last_sequence:
        with suppress(MessageNotFound, ProtocolError):
            return StoredDeadLetter.of(await stream.get_message(number))
    raise ConfigError(f"app {app.name!r} has no dead letter {number}; `jetspark dlq ls` lists them")


async def with_event(js: JetStream, app: HasSpec, stored: StoredDeadLetter) -> StoredDeadLetter:
    """A dead letter with the headers and the body of its event, also if they are kept apart from it."""
    app = app.spec
    stream = await js.stream(dead_letter_stream(app.name))
    box = DeadLetterBox(js, app.name, stored.dead_letter.handler, stream, None)
    return StoredDeadLetter(await box.whole(stored.dead_letter), stored.subject, stored.revision)


async def open_parked_records(js: JetStream, app: AppSpec) -> KeyValue | None:
    """Open the bucket with the records of parked keys; None if the application has projections and never had a handler.

    Raises:
        StreamNotFound: The application was not applied to this server.
    """
    try:
        return await js.kv(handler_bucket(app.name))
    except StreamNotFound:
        if app.handlers or not app.projections:
            raise
        return None
