"""Timers: events that the server publishes later, once or again and again.

A timer is a message of its own in the application's stream, on the subject ``timers.<app>.<name>``: it holds the event,
and says when and where the server is to store it. So a timer survives every restart, needs no process that waits, and
its event comes to handlers and projections like any other. A timer of the same name replaces the one before it.

It is never dropped by age (``Nats-TTL: never``). What a stream drops by a limit of messages or bytes it would drop with
the timers among it, so an application with timers cannot have such a limit: :func:`check_stream`.

A timer that has fired is gone, and its event is in the stream, however late it is handled. The handler can check
whether the event still counts: a timer that was set again is on its subject, and a cancel has left a mark on
``timers.<app>.<name>.cancelled`` for a week. The mark has a subject of its own because the server refuses to end a
timer on a subject whose last message is not a timer (10212).

Timers are not purged: the permission to purge one subject is the permission to purge the stream. The mark of a cancel
is itself the message that ends the timer, guarded by the sequence that was read, so any replica may serve that read.

Measured on nats-server 2.15.1, with one replica and with three: the server takes a due timer out of its list, and
stores the event a moment later. It does not check again whether the timer is still set, and storing the event removes
whatever timer is on that subject by then. Of 500 to 800 timers that were ended or set again between 20 ms before and
300 ms after they were due, up to four had their event stored behind that.

* Behind an end the event must not count. So a mark names the setting that it ended, and the event knows from which
  setting it comes (``Jetspark-Timer-Setting``). A timer that is not due for long needs no mark: nothing of it can be
  under way. The end that a command has decided is in the past of the commands after it, which do not see the event.
* Behind a new setting the event counts, because it has removed that: the timer has fired once, at the earlier time.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from jetspark.aio.context import context_of
from jetspark.aio.ordered import Watch
from jetspark.app.clock import HUNDRED_YEARS_S, utc_now
from jetspark.app.contracts.envelope import Encoded, derived_id, read_envelope
from jetspark.app.contracts.foreign_envelopes import header_of
from jetspark.app.contracts.tokens import escape, unescape
from jetspark.app.server_clock import server_clock
from jetspark.app.topology.names import escape_token, is_hash
from jetspark.app.topology.retention import check_retention
from jetspark.codes import Code
from jetspark.core.backoff import Backoff
from jetspark.core.subjects import matches
from jetspark.errors import ConfigError, JetStreamUnavailable, MessageNotFound, ServerError, WrongLastSequence
from jetspark.jetstream.operations import message_query
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.jetstream.publishing import Expect

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.stream import Stream
    from jetspark.aio.stream_message import JetStreamMessage
    from jetspark.app.contracts.envelope import Decoded, RawHeaders
    from jetspark.core.headers import Headers
    from jetspark.jetstream.config import StreamConfig
    from jetspark.jetstream.info import PubAck, StoredMessage

__all__ = [
    "FiredTimer",
    "Seconds",
    "Timer",
    "TimerDue",
    "Timers",
    "When",
    "cancelling",
    "check_stream",
    "ended_by",
    "ending_message",
    "firing_subject",
    "timer_message",
    "timer_subject",
    "timer_subjects",
]

Seconds: TypeAlias = float | datetime.timedelta
TimerDue: TypeAlias = datetime.datetime | Seconds
"""When a decision has a timer fire: at a moment, or after a time."""

_WORDS = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")
# The server counts nanoseconds since 1970 in 64 bits. Measured on 2.15.1: a timer that is due later fires at once, and
# a timer due before 1678 never.
_EARLIEST = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_LATEST = datetime.datetime(2262, 4, 11, 23, 47, 16, tzinfo=datetime.UTC)
_SCHEDULER, _NEXT = "Nats-Scheduler", "Nats-Schedule-Next"
_NAME = "Jetspark-Timer"
"""The timer's name, where its subject has only a hash of it."""
_SETTING = "Jetspark-Timer-Setting"
"""The call of ``set`` that a timer, its event or the mark of a cancel belongs to."""
CLOCKS_DIFFER_S = 60.0
"""Largest difference between the clocks of successive leaders of the stream."""
_CANCELLED = ".cancelled"
REMEMBERED_S = 7 * 86_400
"""How long a cancel after the firing is remembered; the effects of ``ctx.once`` are kept as long."""
_MARK = {"Nats-Rollup": "sub", "Nats-TTL": f"{REMEMBERED_S}s"}
_SHORT_MARK = {"Nats-TTL": "1s"}
"""The mark of a cancelled timer that was not due soon. It replaces no other mark, and expires as soon as the server
allows."""
TRIES = 20
"""How often a timer is read again because it fired or was set at that very moment, or a replica was behind."""
PAUSE = Backoff(first_s=0.005, max_s=0.25)
"""Between these tries, but for the second."""
LATER_EVENTS = 256
"""Events behind one of a timer, on its subject, among which a later one of the same timer is looked for."""
_is_zone = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*").fullmatch


def timer_subjects(app: str) -> str:
    """The subjects of an application's timers."""
    return f"timers.{app}.>"


def timer_subject(app: str, name: str) -> str:
    """The subject of a timer. Different names have different subjects."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"timer name={name!r}: expected a text that is not empty, such as 'payment of o-1'")
    return f"timers.{app}.{escape_token(name)}"


def cancelling(app: str, name: str) -> dict[str, str]:
    """Headers of a message with which a timer ends: the server does both, or neither."""
    return {_SCHEDULER: timer_subject(app, name), _NEXT: "purge"}


def ending_message(ending: dict[str, str]) -> Encoded:
    """A message that only ends a timer, for headers of :func:`cancelling` that no other message can carry."""
    return Encoded(ending[_SCHEDULER] + _CANCELLED, b"", ending | _MARK)


def ended_by(headers: RawHeaders) -> str | None:
    """The subject of the timer that a message has ended; None if it has ended none."""
    is_end = header_of(headers, "Nats-Msg-Id") is not None and header_of(headers, _NEXT) == "purge"
    return header_of(headers, _SCHEDULER) if is_end else None


def is_cancel(headers: RawHeaders) -> bool:
    """True if storing the message ends a timer."""
    return header_of(headers, _NEXT) == "purge"


def firing_subject(headers: RawHeaders) -> str | None:
    """The subject of the timer that has published a message; None if it was no timer.

    A message that ends a timer names it in the same way. But a program publishes that one with an id, which the server
    removes from messages that it publishes itself.
    """
    return None if header_of(headers, "Nats-Msg-Id") is not None else header_of(headers, _SCHEDULER)


def check_stream(config: StreamConfig) -> None:
    """
    Raises:
        ConfigError: The stream would drop timers, or the server allows none in it.
    """
    check_retention(config, "timers=True", "timers", survives_age=True)
    for field, why in {"mirror": "a mirror", "sources": "a stream with sources"}.items():
        if getattr(config, field):
            raise ConfigError(f"timers=True with {field}: the server allows no schedules in {why}")
    if config.discard == "new":
        raise ConfigError("timers=True with discard='new': the server allows no schedules in such a stream")


@dataclass(frozen=True, slots=True)
class When:
    """The schedule of a timer."""

    schedule: str
    due: datetime.datetime | None = None
    """Due time of a timer that fires once."""
    time_zone: str | None = None

    @classmethod
    def of(
        cls,
        now: datetime.datetime,
        *,
        at: datetime.datetime | None = None,
        after: Seconds | None = None,
        every: Seconds | None = None,
        cron: str | None = None,
        time_zone: str | None = None,
    ) -> When:
        """
        Raises:
            ConfigError: Not exactly one of ``at``, ``after``, ``every`` and ``cron`` is given, or its value is invalid.
        """
        given = {"at": at, "after": after, "every": every, "cron": cron}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise ConfigError(f"timer with {' and '.join(named) or 'no time'}: expected one of at, after, every, cron")
        if time_zone is not None and cron is None:
            raise ConfigError(f"time_zone={time_zone!r}: expected cron= with it; other times do not depend on a zone")
        if cron is not None:
            return cls(_cron(cron), None, None if time_zone is None else _zone(time_zone))
        if every is not None:
            return cls(f"@every {_whole_seconds(every)}s")
        due = _moment(at) if after is None else now + datetime.timedelta(seconds=_seconds("after", after))
        if due > _LATEST:
            raise ConfigError(f"at={due}: expected a time up to {_LATEST}, which is the last that the server knows")
        moment = max(due, _EARLIEST).astimezone(datetime.UTC)
        return cls(f"@at {moment.isoformat().replace('+00:00', 'Z')}", due)

    @classmethod
    def of_decision(cls, now: datetime.datetime, when: datetime.datetime | Seconds) -> When:
        """The schedule in a :class:`Decision`: a time with a zone, or a time from now.

        Raises:
            ConfigError: The value is neither.
        """
        return cls.of(now, at=when) if isinstance(when, datetime.datetime) else cls.of(now, after=when)

    def headers(self, target: str) -> dict[str, str]:
        """The headers that make a message a timer that publishes to ``target``."""
        fields = {"Nats-Schedule": self.schedule, "Nats-Schedule-Target": target, "Nats-TTL": "never"}
        return fields if self.time_zone is None else {**fields, "Nats-Schedule-Time-Zone": self.time_zone}


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that is set."""

    name: str
    schedule: str
    """The server's notation: ``@at <time>``, ``@every <duration>``, or cron."""
    target: str
    """The subject its event is published to."""
    data: bytes
    """The event, with its envelope."""
    set_at: datetime.datetime

    @property
    def due(self) -> datetime.datetime | None:
        """The due time; None for a repeating timer."""
        kind, _, time = self.schedule.partition(" ")
        return datetime.datetime.fromisoformat(time) if kind == "@at" else None


@dataclass(frozen=True, slots=True)
class FiredTimer:
    """The timer that has published an event: ``ctx.timer`` of a handler."""

    name: str
    due: datetime.datetime | None
    """The due time; None for a repeating timer."""
    subject: str
    """The subject of the timer."""

    @classmethod
    def of(cls, decoded: Decoded) -> FiredTimer | None:
        """The timer that has published an event; None if it was published by a program."""
        subject = firing_subject(decoded.headers)
        return None if subject is None else cls(_name_of(subject, decoded.headers), decoded.time, subject)


class Timers:
    """The timers of an application: ``orders.timers`` of a client, ``ctx.timers`` of a handler."""

    def __init__(
        self,
        app: str,
        stream: str,
        js: JetStream,
        encode: Callable[..., Encoded],
        clock: Callable[[], datetime.datetime] = utc_now,
        *,
        from_leader: bool = False,
        server_now: Callable[[], Awaitable[datetime.datetime]] | None = None,
    ) -> None:
        """
        Args:
            clock: The program's.
            from_leader: Read only from the stream's leader, as workers do. It takes the right to read all of it.
            server_now: The server's time. By default it is requested only where a call needs it.
        """
        self._app, self._stream_name, self._js, self._encode, self._clock = app, stream, js, encode, clock
        self._server_now = server_now
        self._from_leader = from_leader
        self._stream: Stream | None = None

    async def set(
        self,
        name: str,
        event: object,
        *,
        at: datetime.datetime | None = None,
        after: Seconds | None = None,
        every: Seconds | None = None,
        cron: str | None = None,
        time_zone: str | None = None,
        set_id: str | None = None,
    ) -> datetime.datetime | None:
        """Have an event published later; returns when, if that is once. A timer of the same name is replaced.

        If ``set_id`` was used before, returns the due time of the present timer; None if it has fired.

        The server's clock decides, and a timer fires at most a moment late and never early. A timer that was due while
        the server was down fires when it is back: ``every`` and ``cron`` once, however many firings they missed. A
        timer that is set again in the very moment in which it fires may have fired instead (see the page on timers).

        Args:
            name: The timer's name, unique in the application.
            event: The event to publish, with the due time as its time. A repeating timer's events have ids of their
                own, and no time but the stream's.
            at: The due time, with a time zone. A past time fires at once.
            after: Seconds from now by the server's clock, or a ``timedelta``. The server is asked for its time once a
                minute, which needs ``$JS.API.STREAM.INFO.<stream>``.
            every: Whole seconds between two events, 1 or more.
            cron: Six fields, seconds first (``"0 30 9 * * MON-FRI"``), or ``@hourly``, ``@daily`` and so on.
            time_zone: The zone of ``cron``, such as ``"Europe/Berlin"``; UTC by default.
            set_id: Within the stream's duplicate window, setting this timer a second time with the same id does
                nothing, even if it has fired in between.

        Raises:
            ConfigError: A time is invalid, or the stream of the application has no timers (``App(timers=True)``).
            InvalidEvent: A field of the event breaks its contract.
        """
        when = When.of(self._clock(), at=at, after=after, every=every, cron=cron, time_zone=time_zone)
        if set_id is not None and (not isinstance(set_id, str) or not set_id):
            raise ConfigError(f"set_id={set_id!r}: expected a text that is not empty, or None")
        if after is not None:
            # The server decides when it is due, and the clock here may be wrong.
            when = When.of(await (self._server_now or server_clock(self._js, self._stream_name).now)(), after=after)
        encoded = self._encode(event, time=when.due)
        ack = await self._store(name, when, encoded, set_id)
        if not ack.duplicate:
            return when.due
        known = await self.get(name)
        return None if known is None else known.due

    async def _store(self, name: str, when: When, encoded: Encoded, set_id: str | None) -> PubAck:
        message = timer_message(self._app, name, when, encoded)
        message.headers[_SETTING] = secrets.token_hex(8)
        # With the timer: ids are those of the whole stream, and events and other timers may have the same.
        id = None if set_id is None else f"{message.subject} {set_id}"
        try:
            return await self._publish(name, message, id)
        except ServerError as error:
            raise self._explained(error, name, when) or error from error

    async def _publish(
        self, name: str, message: Encoded, id: str | None = None, expect: Expect | None = None
    ) -> PubAck:
        try:
            return await self._js.publish(
                message.subject, message.data, headers=message.headers, msg_id=id, expect=expect
            )
        except JetStreamUnavailable as error:
            subjects = (await (await self._opened()).info()).config.subjects or ()
            if any(matches(each, message.subject) for each in subjects):
                raise
            raise self._no_timers(name) from error
        except ServerError as error:
            if error.err_code in (Code.SCHEDULES_DISABLED, Code.TTL_DISABLED):
                raise self._no_timers(name) from error
            raise

    def _explained(self, error: ServerError, name: str, when: When) -> ConfigError | None:
        if error.err_code == Code.SCHEDULE_PATTERN_INVALID:
            return ConfigError(f"timer {name!r}: the server does not understand the schedule {when.schedule!r}")
        if error.err_code == Code.SCHEDULE_TIME_ZONE_INVALID:
            return ConfigError(f"timer {name!r}: the server does not know the time zone {when.time_zone!r}")
        return None

    def _no_timers(self, name: str) -> ConfigError:
        return ConfigError(
            f"timer {name!r}: stream {self._stream_name} has no timers: declare them with App(..., timers=True), "
            "and apply the app"
        )

    async def cancel(self, name: str) -> bool:
        """End a timer; False if it does not exist: it was never set, or has fired.

        An event that it has published stays in the stream, and ``ctx.is_current_timer()`` tells the handler that it no
        longer counts. To end the timer together with the event that makes it needless, publish that event with
        ``cancels=name``.

        Raises:
            ConfigError: The stream of the application has no timers.
        """
        for number in range(TRIES):
            last = await self._last_on(timer_subject(self._app, name))
            message = await self._mark(name, last)
            headers = message.headers | cancelling(self._app, name)  # the mark ends the timer
            # An id, as every message of a program has: by that it is known from what a timer has published.
            id = f"{message.subject} {secrets.token_hex(8)}"
            try:
                await self._publish(
                    name, message._replace(headers=headers), id, expect=self._unchanged(name, last, number)
                )
            except WrongLastSequence:
                await self._before_try(number + 1)
            else:
                return last is not None
        raise AssertionError

    async def publish_ending(
        self, name: str, event: Encoded, *, expect: Expect | None = None, timeout: float | None = None
    ) -> PubAck:
        """Publish an event with which a timer ends, in one step. After that nothing that it has published counts.

        Raises:
            ConfigError: The stream of the application has no timers.
        """
        headers = event.headers | cancelling(self._app, name)
        for number in range(TRIES):
            # With the caller's own guard a replica that is behind would go unnoticed.
            last = await self._last_on(timer_subject(self._app, name), direct=expect is None)
            # A message has one guard: the caller's own comes first.
            guard = expect or self._unchanged(name, last, number)
            try:
                ack = await self._js.publish(event.subject, event.data, headers=headers, expect=guard, timeout=timeout)
            except WrongLastSequence:
                if expect is not None:
                    raise
                await self._before_try(number + 1)
                continue
            except ServerError as error:
                raise (self._no_timers(name) if error.err_code == Code.SCHEDULES_DISABLED else error) from error
            if last is None or guard is expect or await self._may_be_firing(last):
                await self._publish(name, await self._mark(name, last))
            return ack
        raise AssertionError

    def _unchanged(self, name: str, last: StoredMessage | None, number: int) -> Expect | None:
        """The guard of a message that ends a timer: refused if the timer fires or is set in between, or if the replica
        that was read is behind. None for the last try, which ends any timer.
        """
        if number == TRIES - 1:
            return None
        sequence = 0 if last is None else last.sequence
        return Expect(last_subject_sequence=sequence, last_subject_sequence_subject=timer_subject(self._app, name))

    async def _before_try(self, number: int) -> None:
        if number > 1:
            await asyncio.sleep(PAUSE.wait_s(number - 1))

    async def _may_be_firing(self, timer: StoredMessage | None) -> bool:
        """True if the server may have taken a timer out already, and be about to store its event.

        True also while the server's time is unknown: the program's own clock may be wrong by any time.
        """
        due = None if timer is None else _timer(timer).due
        if due is None:
            return False
        if self._server_now is not None:
            now: datetime.datetime | None = await self._server_now()
        else:
            # The client may have no permission to ask, so the last known answer is used.
            now = server_clock(self._js, self._stream_name).at_most()
        return now is None or due <= now + datetime.timedelta(seconds=CLOCKS_DIFFER_S)

    async def _mark(self, name: str, ended: StoredMessage | None) -> Encoded:
        """A message by which what a timer has published up to now does not count, nor what the ended one publishes
        later. It has no use for long where the timer was not to fire soon.
        """
        subject = timer_subject(self._app, name) + _CANCELLED
        if ended is not None and not await self._may_be_firing(ended):
            return Encoded(subject, b"", dict(_SHORT_MARK))
        if ended is None:
            ended = await self._last_on(subject)  # a mark: what it has named stays ended
        setting = None if ended is None else ended.headers.get(_SETTING)
        return Encoded(subject, b"", _MARK if setting is None else {**_MARK, _SETTING: setting})

    async def is_current(self, fired: FiredTimer, decoded: Decoded, sequence: int) -> bool:
        """True if an event that a timer has published counts; see :meth:`Context.is_current_timer`."""
        # From the leader: a cancel that has returned must be seen.
        timer = await self._last_on(fired.subject, direct=False)
        following = header_of(decoded.headers, _NEXT)
        if following is not None and following != "purge":  # it goes on
            return timer is not None and derived_id(read_envelope(timer.data).id, following, 0) == decoded.id
        if timer is not None:
            return False  # set anew
        mark = await self._last_on(fired.subject + _CANCELLED, direct=False)
        if mark is not None and (mark.sequence > sequence or _is_of_setting(mark, decoded)):
            return False
        return not await self._has_fired_again(fired, decoded.subject, sequence)

    async def _has_fired_again(self, fired: FiredTimer, target: str, sequence: int) -> bool:
        for _ in range(LATER_EVENTS):
            later = await self._read(message_query(sequence=sequence + 1, next_for=target), direct=False)
            if later is None:
                return False
            if firing_subject(later.headers) == fired.subject:
                return True
            sequence = later.sequence
        return False

    async def get(self, name: str) -> Timer | None:
        """The timer of a name, or None. On a replicated stream a timer that was set just now may be missing."""
        found = await self._last_on(timer_subject(self._app, name))
        return None if found is None else _timer(found)

    async def _last_on(self, subject: str, *, direct: bool = True) -> StoredMessage | None:
        """The last message on a subject. Any replica may answer, which may be behind, or with ``direct=False`` the
        leader: for that a user needs the right to read all of the stream.
        """
        return await self._read(message_query(last_for=subject), direct=direct and not self._from_leader)

    async def _read(self, query: Mapping[str, object], *, direct: bool) -> StoredMessage | None:
        # Not by ``Stream``: to have one costs a request, and each event of a handler has another object of this class.
        context = context_of(self._js)
        try:
            return await context.run(context.api.get_message(self._stream_name, query, direct=direct))
        except MessageNotFound:
            return None

    async def list(self) -> AsyncIterator[Timer]:
        """Every timer, in order of setting; a timer that is set again during the iteration comes twice."""
        options = OrderedOptions(filter_subjects=(f"timers.{self._app}.*",), deliver_policy="last_per_subject")
        reading = Watch(context_of(self._js), self._stream_name, _timer_of, lambda timer: not timer.schedule)
        async with contextlib.aclosing(reading.present(options, f"timers of app {self._app!r}")) as timers:
            async for timer in timers:
                yield timer

    async def _opened(self) -> Stream:
        if self._stream is None:
            self._stream = await self._js.stream(self._stream_name)
        return self._stream


def timer_message(app: str, name: str, when: When, event: Encoded) -> Encoded:
    """The timer's message, made from the event that it is to publish."""
    # The event's id is in its envelope. The stream would take the header for an id of the timer.
    own = {key: value for key, value in event.headers.items() if key != "Nats-Msg-Id"}
    subject = timer_subject(app, name)
    if is_hash(_token(subject)):
        own[_NAME] = escape(name)  # which the event has as well, when it is published
    return event._replace(subject=subject, headers=own | when.headers(event.subject))


def _timer(message: StoredMessage) -> Timer:
    return _timer_in(message.subject, message.headers, message.data, message.timestamp)


def _timer_of(message: JetStreamMessage) -> Timer:
    return _timer_in(message.subject, message.headers, message.data, message.metadata.timestamp)


def _timer_in(subject: str, fields: Headers, data: bytes, set_at: datetime.datetime) -> Timer:
    schedule, target = fields.get("Nats-Schedule") or "", fields.get("Nats-Schedule-Target") or ""
    return Timer(_name_of(subject, fields), schedule, target, data, set_at)


def _name_of(subject: str, headers: RawHeaders) -> str:
    """The name of the timer with this subject; a name that is too long for a subject is in the headers."""
    token = _token(subject)
    if not is_hash(token):
        return unescape(token)
    said = header_of(headers, _NAME)
    return token if said is None else unescape(said)


def _is_of_setting(mark: StoredMessage, fired: Decoded) -> bool:
    ended = mark.headers.get(_SETTING)
    return ended is not None and ended == header_of(fired.headers, _SETTING)


def _token(subject: str) -> str:
    return subject.rpartition(".")[2]


def _seconds(name: str, value: Seconds) -> float:
    found = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= HUNDRED_YEARS_S:
        raise ConfigError(f"{name}={value!r}: expected seconds, 0 or more and up to a hundred years, or a timedelta")
    return found


def _whole_seconds(every: Seconds) -> int:
    found = _seconds("every", every)
    if found < 1 or not math.isclose(found, round(found)):
        raise ConfigError(f"every={every!r}: expected whole seconds, 1 or more; the server repeats nothing faster")
    return round(found)


def _moment(at: object) -> datetime.datetime:
    if not isinstance(at, datetime.datetime) or at.tzinfo is None:
        raise ConfigError(f"at={at!r}: expected a time with a zone, such as datetime.now(UTC) + timedelta(hours=1)")
    return at


def _cron(cron: str) -> str:
    fields = cron.split() if isinstance(cron, str) else []
    # A field with only commas allows no time: the server would search five years of seconds, and answer nothing else.
    if any(not each.strip(",") for each in fields):
        raise ConfigError(f"cron={cron!r}: expected at least one value in each field, or *")
    if cron in _WORDS or (len(fields) == 6 and not fields[0].startswith("@")):
        return " ".join(fields)
    raise ConfigError(
        f"cron={cron!r}: expected six fields, seconds first, such as '0 30 9 * * MON-FRI', or {', '.join(_WORDS)}"
    )


def _zone(time_zone: str) -> str:
    if not isinstance(time_zone, str) or not _is_zone(time_zone):
        raise ConfigError(f"time_zone={time_zone!r}: expected a name such as 'Europe/Berlin'")
    return time_zone
