"""Windows: states by key and time, for each hour, each day, or in overlapping windows. Pure.

An event belongs to the windows that contain its time. Windows begin at multiples of ``every_s`` seconds since 1970 and
last ``size_s``. With ``every_s`` below ``size_s`` they overlap, and an event is in several of them. The key in the
bucket is ``<key>.<begin>``, such as ``shop-7.20260331T100000Z``.

An event is late if the stream stored it more than ``grace_s`` after the end of its window. Both times are in the
message, so all readers agree: live, on Spark, or in a rebuild a year later. Readers may have taken the window for
complete, so a late event is folded into ``<key>.late`` instead, where it can be counted; with ``late="keep"`` it is
folded into its window.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jetspark.core.arguments import explained, function
from jetspark.core.numbers import seconds
from jetspark.errors import ConfigError

__all__ = ["LATE", "Window", "is_part"]

LATE = "late"
_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
MAX_WINDOWS = 100
_is_name = re.compile(r"\d{8}T\d{6}Z", re.ASCII).fullmatch


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Windows of time: ``Window(size_s=3600)`` is one for each hour; ``Window(size_s=3600, every_s=300)`` begins an
    hour every five minutes.
    """

    size_s: int
    every_s: int | None = None
    """Seconds between the begins of two windows; by default ``size_s``."""
    grace_s: float = 3600.0
    """Seconds after the end of a window in which stored events still count in it."""
    late: Literal["apart", "keep"] = "apart"
    time: Callable[[Any], datetime.datetime] | None = None
    """A pure function that returns the time of an event, with a zone; by default the time of its envelope."""

    def __post_init__(self) -> None:
        for name in ("size_s", "every_s"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}={value!r}: expected whole seconds, 1 or more")
        if self.size_s % self.step_s or self.size_s // self.step_s > MAX_WINDOWS:
            raise ConfigError(
                f"size_s={self.size_s}, every_s={self.step_s}: expected a size that is a multiple of every_s, at most "
                f"{MAX_WINDOWS} times as long"
            )
        seconds("grace_s", self.grace_s)
        if self.late not in ("apart", "keep"):
            raise ConfigError(f"late={self.late!r}: expected 'apart' or 'keep'")
        if self.time is not None:
            function("time", self.time, "a function of an event")

    @property
    def step_s(self) -> int:
        return self.every_s or self.size_s

    @property
    def is_by_event_alone(self) -> bool:
        """True if an event has exactly one window, which depends neither on its envelope nor on when it was stored."""
        return self.time is not None and self.late == "keep" and self.step_s == self.size_s

    def part_of(self, event: object) -> str:
        """The window of an event, if :attr:`is_by_event_alone`.

        Raises:
            ConfigError: The event has no time, or one without a zone.
        """
        return self.parts(event, None, 0)[0]

    def name(self, moment: datetime.datetime) -> str:
        """The name, as in keys, of the last window that contains a moment.

        Raises:
            ConfigError: ``moment`` is not a datetime, or has no time zone.
        """
        if not isinstance(moment, datetime.datetime):
            raise ConfigError(f"window {moment!r}: expected a datetime with a time zone")
        if moment.tzinfo is None:
            raise ConfigError(f"window {moment}: expected a time zone, such as {moment.isoformat()}Z for UTC")
        return _name(_whole_seconds(moment) // self.step_s * self.step_s)

    def part(self, window: str | datetime.datetime) -> str:
        """The window in a key, by its name, ``late``, or a moment in it; the last of overlapping windows.

        Raises:
            ConfigError: ``window`` is not the name of a window.
        """
        if isinstance(window, datetime.datetime):
            return self.name(window)
        if not isinstance(window, str) or not is_part(window):
            raise ConfigError(f"window {window!r}: expected its begin, such as {_name(0)}, or {LATE!r}")
        return window

    def parts(self, event: object, sent: datetime.datetime | None, stored_us: int) -> list[str]:
        """The windows of an event, oldest first; ``late`` if it was stored too late for all of them.

        Args:
            sent: The time in its envelope.
            stored_us: When the stream stored it, in microseconds since 1970.

        Raises:
            ConfigError: The event has no time, or one without a zone.
        """
        moment = sent if self.time is None else self.time(event)
        if not isinstance(moment, datetime.datetime) or moment.tzinfo is None:
            raise ConfigError(f"the time of an event for a window is {moment!r}: expected a datetime with a zone")
        step_s = self.every_s or self.size_s  # `step_s` inlined: this runs for every event
        last = _whole_seconds(moment) // step_s * step_s
        if self.late == "keep" and step_s == self.size_s:
            return [_name(last)]
        begins = range(last - self.size_s + step_s, last + 1, step_s)
        if self.late == "keep":
            return [_name(begin) for begin in begins]
        limit_us = stored_us - round(self.grace_s * 1e6)
        in_time = [_name(begin) for begin in begins if (begin + self.size_s) * 1_000_000 >= limit_us]
        return in_time or [LATE]


def is_part(text: str) -> bool:
    """True for the name of a window, as in keys."""
    return text == LATE or _is_name(text) is not None


def _whole_seconds(moment: datetime.datetime) -> int:
    """Seconds since 1970, rounded down: the microseconds of a timedelta are never negative."""
    since = moment - _EPOCH
    return since.days * 86_400 + since.seconds


# Formatting a time takes as long as decoding an event, and most events are in few windows.
@functools.lru_cache(maxsize=4096)
def _name(begin_s: int) -> str:
    # The year without strftime: before the year 1000 the digits of %Y depend on the platform.
    begin = _EPOCH + datetime.timedelta(seconds=begin_s)
    return f"{begin.year:04}{begin:%m%dT%H%M%SZ}"
