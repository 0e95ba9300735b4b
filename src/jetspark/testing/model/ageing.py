"""The effects of time on stored messages: ages and TTLs end them, and schedules publish them again. Pure.

A stream with ``max_age_s`` or ``allow_message_ttl`` drops messages whose time is over. If the stream has
``subject_delete_marker_ttl_s`` and the subject has no message left, a marker replaces it, which has a TTL of its own. A
message with ``Nats-Schedule`` is a timer: when it is due, its data is stored on the target subject.

Measured on nats-server 2.15.1: a TTL below that of the markers is raised to it, and stored so; a schedule is stored
with ``Nats-Rollup: sub``, so that a subject has one schedule; a fired message has the user's headers and two that name
its schedule; a schedule for the past fires after 250 ms, the shortest step of the server's timer. Events due while the
server was away, or a stream had no leader, happen when it is back: a repeated schedule then fires once, and continues
from there.
"""

from __future__ import annotations

import heapq
import math
import re

from jetspark.codes import Code
from jetspark.core.headers import Headers
from jetspark.core.subjects import matches, validate_subject
from jetspark.errors import InvalidSubject
from jetspark.jetstream.config import StreamConfig
from jetspark.testing.model.replies import ApiError, go_duration
from jetspark.testing.model.schedules import due_text, is_repeated, is_zone, next_due
from jetspark.testing.model.store import Incoming, ModelMessage, Store, first_values

__all__ = ["Ageing", "cancels", "prepared", "refuse_schedule", "seconds_of"]

TTL, SCHEDULE, TARGET = "Nats-TTL", "Nats-Schedule", "Nats-Schedule-Target"
SCHEDULE_TTL, SCHEDULER, NEXT = "Nats-Schedule-TTL", "Nats-Scheduler", "Nats-Schedule-Next"
TIME_ZONE = "Nats-Schedule-Time-Zone"
_ROLLUP = "Nats-Rollup"
# Headers of a schedule that a fired message does not get.
_OWN = ("Nats-Schedule", "Nats-Expected-", "Nats-Msg-Id", "Nats-TTL", "Nats-Rollup")

_DISABLED = ApiError(400, Code.SCHEDULES_DISABLED, "message schedules is disabled")
_PATTERN = ApiError(400, Code.SCHEDULE_PATTERN_INVALID, "message schedules pattern is invalid")
_ZONE_INVALID = ApiError(400, Code.SCHEDULE_TIME_ZONE_INVALID, "message schedules time zone is invalid")
_LOCAL = ApiError(501, 0, "not in the model: schedules in the time zone of the server's machine; use a real server")
_TARGET_INVALID = ApiError(400, Code.SCHEDULE_TARGET_INVALID, "message schedules target is invalid")
_SCHEDULER_INVALID = ApiError(400, Code.SCHEDULER_INVALID, "message schedules invalid scheduler")

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def seconds_of(text: str) -> float | None:
    """A TTL: whole seconds or a Go duration of hours, minutes and seconds; None for all else."""
    if text.isdigit() and text.isascii():
        return float(text)
    found = _DURATION.fullmatch(text)
    if found is None or not any(found.groups()):
        return None
    hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return float(3600 * hours + 60 * minutes + seconds)


def refuse_schedule(config: StreamConfig, store: Store, message: Incoming, now: float) -> ApiError | None:
    """The reason to refuse a message that sets a schedule, or ends one; None to accept it."""
    schedule, zone = message.fields.get(SCHEDULE), message.fields.get(TIME_ZONE)
    if zone == "Local":
        return _LOCAL
    if zone is not None and not is_zone(zone):
        return _ZONE_INVALID
    if schedule is None:
        return _refuse_end(config, store, message)
    if not config.allow_message_schedules:
        return _DISABLED
    if next_due(schedule, zone, now) is None:
        return _PATTERN
    target = message.fields.get(TARGET, "")
    try:
        validate_subject(target)
    except InvalidSubject:
        return _TARGET_INVALID
    is_ours = any(matches(each, target) for each in config.subjects or ())
    return None if is_ours and target != message.subject else _TARGET_INVALID


def _refuse_end(config: StreamConfig, store: Store, message: Incoming) -> ApiError | None:
    if SCHEDULER not in message.fields and NEXT not in message.fields:
        return None
    scheduler = message.fields.get(SCHEDULER, "")
    if not config.allow_message_schedules:
        return _DISABLED
    try:
        validate_subject(scheduler)
    except InvalidSubject:
        return _SCHEDULER_INVALID
    last = store.get(store.last_of(scheduler))
    is_other = last is not None and SCHEDULE not in (last.headers or {})
    is_wrong = is_other or scheduler == message.subject or message.fields.get(NEXT) != "purge"
    return _SCHEDULER_INVALID if is_wrong else None


def prepared(config: StreamConfig, message: Incoming) -> Incoming:
    """The message as stored: a TTL that is too short is raised, and a schedule replaces the earlier one."""
    fields = message.fields
    marker_s = config.subject_delete_marker_ttl_s or 0.0
    ttl_s = seconds_of(fields.get(TTL, ""))
    is_short = ttl_s is not None and ttl_s < marker_s and config.max_messages_per_subject != 1
    if not is_short and SCHEDULE not in fields:
        return message
    headers = Headers(message.headers)
    if is_short:
        headers = Headers([(name, value) for name, value in headers.multi_items() if name != TTL])
        headers.add(TTL, str(round(marker_s)))
    if SCHEDULE in fields and _ROLLUP not in fields:
        headers.add(_ROLLUP, "sub")
    return Incoming(message.subject, message.data, headers, first_values(headers))


class Ageing:
    """The timers of one stream."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends: list[tuple[float, int]] = []
        self._schedules: list[tuple[float, int]] = []
        self._config = store.config
        self._since = -math.inf

    def resume(self, at: float) -> None:
        """Delay all effects until ``at``, when the server is back, or the stream has a leader again."""
        self._since = at

    def configure(self, config: StreamConfig) -> None:
        self._config = config
        if config.max_age_s:
            for message in self._store.messages():
                self._watch_age(message)

    def on_stored(self, message: ModelMessage) -> None:
        fields = first_values(message.headers) if message.headers is not None else {}
        text = fields.get(TTL, "") if self._config.allow_message_ttl else ""
        if (ttl_s := seconds_of(text)) is not None:
            heapq.heappush(self._ends, (message.time + ttl_s, message.sequence))
        if self._config.max_age_s and text != "never":
            self._watch_age(message)
        if (schedule := fields.get(SCHEDULE)) is not None and self._config.allow_message_schedules:
            due = next_due(schedule, fields.get(TIME_ZONE), message.time)
            if due is not None:
                heapq.heappush(self._schedules, (due, message.sequence))

    def on_removed(self, message: ModelMessage) -> None:
        pass  # its timers will find no message

    def _watch_age(self, message: ModelMessage) -> None:
        assert self._config.max_age_s is not None
        heapq.heappush(self._ends, (message.time + self._config.max_age_s, message.sequence))

    def next_deadline(self) -> float | None:
        due = [queue[0][0] for queue in (self._ends, self._schedules) if queue]
        return max(min(due), self._since) if due else None

    def on_time(self, now: float) -> bool:
        """Apply all due effects, in order; True if a message was stored."""
        before = self._store.last_sequence
        while (at := self.next_deadline()) is not None and at <= now:
            queue = min((each for each in (self._ends, self._schedules) if each), key=lambda each: each[0][0])
            due, sequence = heapq.heappop(queue)
            if queue is self._ends:
                self._end(sequence, at)
            else:
                self._fire(sequence, due, at)
        return self._store.last_sequence > before

    def _end(self, sequence: int, now: float) -> None:
        message = self._store.get(sequence)
        if message is None:
            return
        self._store.delete(sequence)
        is_last = not self._store.last_of(message.subject)
        marker_s = self._config.subject_delete_marker_ttl_s
        is_marker = message.headers is not None and "Nats-Marker-Reason" in message.headers
        if is_last and marker_s and not is_marker:
            headers = Headers()
            headers.add("Nats-Marker-Reason", "MaxAge")
            headers.add(TTL, go_duration(marker_s))
            headers.add(_ROLLUP, "sub")
            stored = self._store.append(message.subject, b"", headers, now)
            self._store.roll_up("sub", message.subject, stored)

    def _fire(self, sequence: int, due: float, now: float) -> None:
        message = self._store.get(sequence)
        if message is None or message.headers is None:
            return
        fields = first_values(message.headers)
        schedule, zone = fields[SCHEDULE], fields.get(TIME_ZONE)
        headers = Headers([each for each in message.headers.multi_items() if not each[0].startswith(_OWN)])
        headers.add(SCHEDULER, message.subject)
        following = next_due(schedule, zone, due) if is_repeated(schedule) else None
        if following is not None and following < now:
            following = next_due(schedule, zone, now)
        headers.add(NEXT, "purge" if following is None else due_text(following, zone))
        if (ttl := fields.get(SCHEDULE_TTL)) is not None:
            headers.add(TTL, ttl)
        if following is None:
            self._store.delete(sequence)
        else:
            heapq.heappush(self._schedules, (following, sequence))
        self._store.append(fields[TARGET], message.data, headers, now)


def cancels(message: Incoming) -> str | None:
    """The subject whose schedule a message ends; both changes are stored in one step."""
    subject = message.fields.get(SCHEDULER)
    return subject if subject and message.fields.get(NEXT) == "purge" else None
