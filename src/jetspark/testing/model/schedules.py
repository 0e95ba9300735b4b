"""The times of a schedule: once, at an interval, or by cron. Pure, except for the machine's time zone files.

Measured on nats-server 2.15.1: an interval counts from the nearest whole second, and cron from the next one; the time
zone is checked first, and only cron may have one. Days are matched as by cron: with both a day of the month and a day
of the week, one of them is enough.

The server searches the next time unit by unit, in the clock of the time zone: near a change of that clock the result
follows from its steps, so the model makes the same steps. If midnight is skipped, it may miss that day.
"""

from __future__ import annotations

import calendar
import datetime
import functools
import math
import re
from typing import NamedTuple
from zoneinfo import ZoneInfo

from jetspark.errors import ProtocolError
from jetspark.jetstream import wire

__all__ = ["due_text", "is_repeated", "is_zone", "next_due"]

# A schedule for the past fires after the shortest step of the server's timer.
_SHORTEST_STEP_S = 0.25
_YEARS = 5
"""The server's search range for a cron schedule, in years; it refuses a schedule without a time in this range."""

_WORDS = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
}
_MONTHS = {
    name: number
    for number, name in enumerate(
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1
    )
}
_WEEKDAYS = {name: number for number, name in enumerate(["sun", "mon", "tue", "wed", "thu", "fri", "sat"])}
_RANGES: tuple[tuple[int, int, dict[str, int]], ...] = (
    (0, 59, {}),
    (0, 59, {}),
    (0, 23, {}),
    (1, 31, {}),
    (1, 12, _MONTHS),
    (0, 6, _WEEKDAYS),
)
# The units of the server's search, their first values, and the lengths of the units with a fixed length.
_UNITS = ("month", "day", "hour", "minute", "second")
_FIRST = {"month": 1, "day": 1, "hour": 0, "minute": 0, "second": 0}
_LENGTHS_S = {"hour": 3600, "minute": 60, "second": 1}

_GO_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = r"(\d+\.?\d*|\.\d+)(h|ms|m|s|us|µs|ns)"
_is_duration = re.compile(rf"\+?(?:{_PART})+", re.ASCII).fullmatch
_parts = re.compile(_PART, re.ASCII).findall
_is_number = re.compile(r"\+?\d{1,9}", re.ASCII).fullmatch


class _Values(NamedTuple):
    """The allowed values of one field of a cron schedule."""

    allowed: frozenset[int]
    is_any: bool
    """True if it is written with a star."""


class _Cron(NamedTuple):
    second: _Values
    minute: _Values
    hour: _Values
    day: _Values
    month: _Values
    weekday: _Values

    def allows(self, unit: str, at: datetime.datetime) -> bool:
        if unit != "day":
            return getattr(at, unit) in getattr(self, unit).allowed
        by_date, by_weekday = at.day in self.day.allowed, at.isoweekday() % 7 in self.weekday.allowed
        if self.day.is_any or self.weekday.is_any:
            return by_date and by_weekday
        return by_date or by_weekday


def is_zone(name: str) -> bool:
    """True if the machine has this time zone, by the server's rules for its name."""
    try:
        _zone(name)
    except (KeyError, ValueError, OSError):  # it is missing, not a path below the zones, or a folder of zones
        return False
    return bool(name)


def is_repeated(pattern: str) -> bool:
    return not pattern.startswith("@at ")


def next_due(pattern: str, zone: str | None, after: float) -> float | None:
    """The next time of a schedule; None for an invalid one. ``zone`` is None or a time zone."""
    kind, _, text = pattern.partition(" ")
    if kind == "@at":
        return None if zone is not None else _moment(text, after)
    if kind == "@every":
        every_s = None if zone is not None else _interval(text)
        return None if every_s is None else math.floor(after + 0.5) + every_s
    cron = _parsed(_WORDS.get(pattern.strip(), pattern))
    return None if cron is None else _next_match(cron, _zone(zone or "UTC"), math.floor(after) + 1)


def due_text(due: float, zone: str | None) -> str:
    """A time in the server's form, in the schedule's time zone."""
    moment = datetime.datetime.fromtimestamp(due, _zone(zone or "UTC"))
    text = moment.isoformat()
    if moment.microsecond:
        fraction = f".{moment.microsecond:06}"
        text = text.replace(fraction, fraction.rstrip("0"))
    return text.replace("+00:00", "Z")


def _moment(text: str, now: float) -> float | None:
    try:
        moment = wire.parse_time(text)
    except ProtocolError:
        return None
    return None if moment is None else max(moment.timestamp(), now + _SHORTEST_STEP_S)


def _interval(text: str) -> float | None:
    """A Go duration of a second or more."""
    if not _is_duration(text):
        return None
    seconds = sum(float(count) * _GO_UNITS_S[unit] for count, unit in _parts(text))
    return seconds if seconds >= 1.0 else None


# Cron


@functools.lru_cache(maxsize=256)
def _parsed(pattern: str) -> _Cron | None:
    texts = pattern.split()
    if len(texts) != len(_RANGES):
        return None
    fields = [_field(text, *bounds) for text, bounds in zip(texts, _RANGES, strict=True)]
    return _Cron(*[each for each in fields if each is not None]) if None not in fields else None


def _field(text: str, low: int, high: int, names: dict[str, int]) -> _Values | None:
    ranges = [_range(each, low, high, names) for each in text.split(",") if each]
    # A field of commas allows no value. The server searches five years of seconds before it refuses it.
    if not ranges or None in ranges:
        return None
    found = [each for each in ranges if each is not None]
    return _Values(frozenset[int]().union(*(each.allowed for each in found)), any(each.is_any for each in found))


def _range(text: str, low: int, high: int, names: dict[str, int]) -> _Values | None:
    """``*``, ``5``, ``5-9``, or one of these with a step: ``5/10`` is every tenth from 5 to the end."""
    span, *steps = text.split("/")
    first, *lasts = span.split("-")
    step = _number(steps[0], {}) if steps else 1
    if first in ("*", "?"):
        return _Values(frozenset(range(low, high + 1, step)), step == 1) if step and len(steps) < 2 else None
    begin = _number(first, names)
    end = _number(lasts[0], names) if lasts else high if steps else begin
    if begin is None or end is None or not step or len(steps) > 1 or len(lasts) > 1:
        return None
    return _Values(frozenset(range(begin, end + 1, step)), False) if low <= begin <= end <= high else None


def _number(text: str, names: dict[str, int]) -> int | None:
    named = names.get(text.lower())
    return named if named is not None else int(text) if _is_number(text) else None


# The clock of a time zone


@functools.lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def _instant(zone: ZoneInfo, *local: int) -> int:
    """The instant of a clock time; for a skipped or repeated time the one that Go chooses."""
    as_utc = calendar.timegm(local)
    return as_utc - _offset_s(zone, as_utc - _offset_s(zone, as_utc))


def _offset_s(zone: ZoneInfo, instant: int) -> int:
    offset = datetime.datetime.fromtimestamp(instant, zone).utcoffset()
    assert offset is not None
    return round(offset.total_seconds())


def _next_match(cron: _Cron, zone: ZoneInfo, instant: int) -> float | None:
    """The first time from ``instant`` on that a schedule allows, within the server's search range."""
    at = datetime.datetime.fromtimestamp(instant, zone)
    last_year, is_cut, level = at.year + _YEARS, False, 0
    while level < len(_UNITS):
        unit = _UNITS[level]
        if cron.allows(unit, at):
            level += 1
            continue
        if not is_cut:  # once: after that the smaller units are at their first values
            instant, is_cut = _begin(zone, unit, instant), True
        instant = _following(zone, unit, instant)
        at = datetime.datetime.fromtimestamp(instant, zone)
        if at.year > last_year:
            return None
        if getattr(at, unit) == _FIRST[unit]:
            level = 0  # a larger unit has moved on
    return float(instant)


def _begin(zone: ZoneInfo, unit: str, instant: int) -> int:
    if unit in _LENGTHS_S and unit != "hour":
        return instant - instant % _LENGTHS_S[unit]
    year, month, day, hour, *_ = datetime.datetime.fromtimestamp(instant, zone).timetuple()
    cut = {"month": (1, 0), "day": (day, 0), "hour": (day, hour)}[unit]
    return _instant(zone, year, month, *cut, 0, 0)


def _following(zone: ZoneInfo, unit: str, instant: int) -> int:
    if unit in _LENGTHS_S:
        return instant + _LENGTHS_S[unit]
    year, month, day, *clock = datetime.datetime.fromtimestamp(instant, zone).timetuple()[:6]
    if unit == "day":
        return _instant(zone, year, month, day + 1, *clock)
    return _instant(zone, year + month // 12, month % 12 + 1, day, *clock)
