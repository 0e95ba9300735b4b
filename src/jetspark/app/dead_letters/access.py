"""Dead letters and scheduled retries for programs: ``client.dead_letters`` and ``client.retries``."""

from __future__ import annotations

import datetime
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

from jetspark.app.dead_letters.listing import (
    DeadLetterFilter,
    check_handler,
    each_dead_letter,
    read_dead_letter,
    with_event,
)
from jetspark.app.dead_letters.outcomes import RedriveProgress
from jetspark.app.dead_letters.redriving import (
    DiscardResults,
    count_of,
    discard_dead_letters,
    explain,
    is_any,
    run_redrive,
)
from jetspark.app.dead_letters.retries import (
    RETRY_FIELDS,
    RetryChanges,
    StoredRetry,
    cancel_retries,
    each_retry,
    hurry_retries,
)
from jetspark.app.handlers.dead_letter_box import StoredDeadLetter
from jetspark.app.stored_events import FailureCause
from jetspark.core.headers import Headers
from jetspark.core.numbers import UINT64, whole
from jetspark.errors import ConfigError, InvalidSubject

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.spec import AppSpec

__all__ = ["AppDeadLetter", "AppDeadLetters", "ScheduledRetries", "ScheduledRetry"]


class RetryConditions(TypedDict, total=False):
    """Which scheduled retries: all that have every value given; None is any value."""

    handler: str | None
    error: str | None
    fingerprint: str | None
    key: str | None
    sequence: int | None
    subject: str | None


class Conditions(RetryConditions, total=False):
    """Which dead letters: all that have every value given; None is any value."""

    number: int | str | None
    """One number, or several as ``"3,7-12"``."""
    status: Literal["open", "behind"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppDeadLetter:
    """An event that a handler or a projection could not process."""

    number: int
    """The dead letter's sequence in the dead-letter stream; a dead letter that fails again gets a new one."""
    status: Literal["open", "behind", "closed"]
    handler: str
    key: str | None
    stream: str
    """Where the event was published, with ``sequence`` and ``subject``."""
    sequence: int
    subject: str
    attempts: int
    """How often the handler was started before the event was given up."""
    redrives: int
    """How often it was redriven and failed again."""
    behind: int | None
    """The sequence of the event it waits for; None if it waits for none."""
    failed: str
    """When it was given up: ISO 8601, UTC."""
    cause: FailureCause | None
    """None of a dead letter that only waits behind another."""
    headers: Headers | None = None
    """The event's; None in a list, which reads no events."""
    data: bytes | None = None
    """The event's; None in a list, and where the event is gone."""

    @classmethod
    def of(cls, stored: StoredDeadLetter, *, with_event: bool) -> AppDeadLetter:
        dead_letter = stored.dead_letter
        return cls(
            number=stored.revision,
            status=dead_letter.status,
            handler=dead_letter.handler,
            key=dead_letter.key,
            stream=dead_letter.origin.stream,
            sequence=dead_letter.origin.sequence,
            subject=dead_letter.subject,
            attempts=dead_letter.attempts,
            redrives=dead_letter.redrives,
            behind=dead_letter.behind,
            failed=dead_letter.failed,
            cause=dead_letter.cause,
            headers=dead_letter.headers if with_event else None,
            data=dead_letter.data if with_event and not dead_letter.is_body_omitted else None,
        )


class AppDeadLetters:
    """The dead letters of an application: ``client.dead_letters``.

    Methods take the same conditions as keywords: ``handler``, ``error``, ``fingerprint``, ``key``, ``number``,
    ``sequence``, ``status`` and ``subject``. The server filters by handler, key and sequence, so these read nothing
    else.
    """

    def __init__(self, app: AppSpec, js: JetStream) -> None:
        self._app, self._js = app, js

    async def list(self, **conditions: Unpack[Conditions]) -> AsyncIterator[AppDeadLetter]:
        """The dead letters there are now, oldest first, without their events.

        Raises:
            ConfigError: The handler or the field does not exist, or no dead letter can have that value.
            StreamNotFound: The application was not applied to this server.
        """
        async with aclosing(self._each(_chosen(conditions), with_events=False)) as dead_letters:
            async for stored in dead_letters:
                yield AppDeadLetter.of(stored, with_event=False)

    async def export(self, **conditions: Unpack[Conditions]) -> AsyncIterator[AppDeadLetter]:
        """As :meth:`list`, with the headers and the body of each event; at most 16 MiB of them are read ahead."""
        async with aclosing(self._each(_chosen(conditions), with_events=True)) as dead_letters:
            async for stored in dead_letters:
                yield AppDeadLetter.of(await self._whole(stored), with_event=True)

    async def get(self, number: int) -> AppDeadLetter:
        """One dead letter with its event, by its number.

        Raises:
            ConfigError: No dead letter has that number; a dead letter that failed again has a new one.
        """
        number = whole("number", number, high=UINT64)
        return AppDeadLetter.of(await self._whole(await read_dead_letter(self._js, self._app, number)), with_event=True)

    async def redrive(
        self,
        *,
        rate: float | None = None,
        dry_run: bool = False,
        resume: str | None = None,
        wait_s: float = 0.0,
        on_progress: Callable[[RedriveProgress], None] | None = None,
        **conditions: Unpack[Conditions],
    ) -> RedriveProgress:
        """Have the handlers that failed handle dead letters again, and no other handler.

        The dead letters that exist at the beginning are requested. Those of one key are handled in order: a dead letter
        behind another follows it without a request. One redrive runs at a time; ``resume`` continues one that was
        interrupted.

        Args:
            rate: Requests each second, at most.
            dry_run: Count what would be done.
            resume: The id of a redrive that was interrupted; its own conditions apply.
            wait_s: How long to wait, at most, for what becomes of them; ``results`` says it then. 0 waits for nothing.
            on_progress: Called after each chunk of requests.

        Raises:
            UsageError: Another redrive is under way.
            ConfigError: The handler or the redrive to resume does not exist, or the rate or a condition is not valid.
        """
        return await run_redrive(
            self._js,
            self._app,
            _chosen(conditions),
            rate=rate,
            is_dry_run=dry_run,
            resume=resume,
            wait_s=wait_s,
            on_progress=on_progress or (lambda progress: None),
        )

    async def discard(self, *, dry_run: bool = False, **conditions: Unpack[Conditions]) -> DiscardResults:
        """Give open dead letters up permanently; their keys continue with what waits behind them.

        Raises:
            ConfigError: The handler or the field does not exist, or no dead letter can have that value.
        """
        return await discard_dead_letters(self._js, self._app, _chosen(conditions), is_dry_run=dry_run)

    async def explain(self, **conditions: Unpack[Conditions]) -> str:
        """Say why no dead letter matches, and what waits instead: others, or retries that are scheduled."""
        return await explain(self._js, self._app, _chosen(conditions))

    async def _each(self, chosen: DeadLetterFilter, *, with_events: bool) -> AsyncGenerator[StoredDeadLetter, None]:
        await check_handler(self._js, self._app, chosen.handler)
        found = each_dead_letter(self._js, self._app, chosen, with_events=with_events)
        async with aclosing(cast("AsyncGenerator[StoredDeadLetter, None]", found)) as dead_letters:
            async for stored in dead_letters:
                yield stored

    async def _whole(self, stored: StoredDeadLetter) -> StoredDeadLetter:
        return await with_event(self._js, self._app, stored) if stored.dead_letter.is_body_omitted else stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRetry:
    """An event that waits for its next attempt; the server delivers it when that is due."""

    handler: str
    key: str | None
    stream: str
    """Where the event was published, with ``sequence`` and ``subject``."""
    sequence: int
    subject: str
    attempts: int
    """How often the handler was started for it."""
    redrives: int
    """How often its dead letter was redriven."""
    due: datetime.datetime | None
    """When the next attempt is due; None where the schedule cannot be read."""
    cause: FailureCause | None
    """Why the last attempt failed, without the traceback."""
    is_cancelled: bool = False
    """A dead letter takes the place of the next attempt."""

    @classmethod
    def of(cls, stored: StoredRetry) -> ScheduledRetry:
        event = stored.event
        return cls(
            handler=event.handler,
            key=event.key,
            stream=event.origin.stream,
            sequence=event.origin.sequence,
            subject=event.subject,
            attempts=event.attempts,
            redrives=event.redrives,
            due=stored.due,
            cause=event.cause,
            is_cancelled=event.is_cancelled,
        )


class ScheduledRetries:
    """The scheduled retries of an application: ``client.retries``.

    Short waits are not here: they pass in the worker. Methods take the same conditions as keywords: ``handler``,
    ``error``, ``fingerprint``, ``key``, ``sequence`` and ``subject``. The server filters by handler and sequence.
    """

    def __init__(self, app: AppSpec, js: JetStream) -> None:
        self._app, self._js = app, js

    async def list(self, **conditions: Unpack[RetryConditions]) -> AsyncIterator[ScheduledRetry]:
        """The retries that are scheduled now, in the order in which they were scheduled.

        Raises:
            ConfigError: The handler or the field does not exist, or no retry can have that value.
            StreamNotFound: The application was not applied to this server.
        """
        chosen = await self._check(conditions)
        found = cast("AsyncGenerator[StoredRetry, None]", each_retry(self._js, self._app.name, chosen))
        async with aclosing(found) as retries:
            async for stored in retries:
                yield ScheduledRetry.of(stored)

    async def now(self, **conditions: Unpack[RetryConditions]) -> RetryChanges:
        """Make retries due now, with the attempts they have left. A retry that fires in the meantime is tried once.

        Raises:
            ConfigError: The handler or the field does not exist, or no retry can have that value.
        """
        return await hurry_retries(self._js, self._app.name, await self._check(conditions))

    async def cancel(self, **conditions: Unpack[RetryConditions]) -> RetryChanges:
        """Give retries up: a worker of the handler writes their dead letters, and their keys stay parked.

        Of a handler with ``dead_letter=False`` the event is dropped, as after its last attempt.

        Raises:
            ConfigError: The handler or the field does not exist, or no retry can have that value.
        """
        return await cancel_retries(self._js, self._app.name, await self._check(conditions))

    async def explain(self, **conditions: Unpack[RetryConditions]) -> str:
        """Say why no retry matches, and what waits instead: other retries, or dead letters."""
        chosen, dead_letters = await self._check(conditions), 0
        has_others = not chosen.is_everything and await is_any(each_retry(self._js, self._app.name, DeadLetterFilter()))
        text = "no scheduled retry matches; `jetspark retry ls` lists all" if has_others else "no retries are scheduled"
        where = tuple(pair for pair in chosen.where if pair[0] in ("key", "sequence", "subject"))
        found = DeadLetterFilter(handler=chosen.handler, where=where)
        async for _ in each_dead_letter(self._js, self._app, found, with_events=False):
            dead_letters += 1
        if dead_letters:
            text += f"; {count_of(dead_letters, 'dead letter')} (`jetspark dlq ls`)"
        return text

    async def _check(self, conditions: RetryConditions) -> DeadLetterFilter:
        chosen = _chosen(conditions, RETRY_FIELDS)
        if chosen.handler is not None and self._app.handlers and chosen.handler not in self._app.handlers:
            with suppress(InvalidSubject):  # no handler can have such a name
                async for _ in each_retry(self._js, self._app.name, DeadLetterFilter(handler=chosen.handler)):
                    return chosen
            known = ", ".join(sorted(self._app.handlers))
            raise ConfigError(
                f"handler {chosen.handler!r}: app {self._app.name!r} has no such handler, and no scheduled retries of "
                f"one; it has {known}"
            )
        return chosen


def _chosen(conditions: Any, fields: tuple[str, ...] | None = None) -> DeadLetterFilter:
    values = dict(conditions)
    handler = values.pop("handler", None)
    return DeadLetterFilter.of(handler, values) if fields is None else DeadLetterFilter.of(handler, values, fields)
