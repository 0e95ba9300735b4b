"""States by key and time: one for each hour, each day, or windows that overlap. Pure.

An event belongs to the windows that its own time falls into. Windows begin at multiples of ``every_s`` seconds since
1970 and last ``size_s``; with ``every_s`` below ``size_s`` they overlap, and an event is in several (sliding by panes).
The key in the bucket is ``<key>.<begin>``, such as ``shop-7.20260331T100000Z``.

Late is what was stored more than ``grace_s`` after the end of its window. Both times are in the message, so it is the
same for everyone who ever reads it: live, on Spark, in a rebuild a year later. A late event is not folded into its
window, which readers may have taken for complete: it goes to ``<key>.late``, where it can be seen and counted; or with
``late="keep"`` into its window all the same.
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
    """How events are parted by time: ``Window(size_s=3600)`` is an hour, ``Window(size_s=3600, every_s=300)`` one that
    begins every five minutes."""

    size_s: int
    every_s: int | None = None
    """Windows begin this many seconds after each other; as long as they last, if not given."""
    grace_s: float = 3600.0
    """How long after the end of a window an event may be stored and still counts in it."""
    late: Literal["apart", "keep"] = "apart"
    time: Callable[[Any], datetime.datetime] | None = None
    """The time of an event, with a zone; that of its envelope, if not given. Pure."""

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
    def is_told_by_event(self) -> bool:
        """Whether each event has one window and tells it by itself: neither its envelope matters, nor when it was
        stored."""
        return self.time is not None and self.late == "keep" and self.step_s == self.size_s

    def part_of(self, event: Any) -> str:
        """The one window of an event that tells it by itself.

        Raises:
            ConfigError: It has no time, or one without a zone.
        """
        return self.parts(event, None, 0)[0]

    def name(self, moment: datetime.datetime) -> str:
        """The last window that a moment falls into, as keys have it.

        Raises:
            ConfigError: It is no moment, or has no time zone.
        """
        if not isinstance(moment, datetime.datetime):
            raise ConfigError(f"window {moment!r}: expected a datetime with a time zone")
        if moment.tzinfo is None:
            raise ConfigError(f"window {moment}: expected a time zone, such as {moment.isoformat()}Z for UTC")
        return _name(_whole_seconds(moment) // self.step_s * self.step_s)

    def part(self, window: str | datetime.datetime) -> str:
        """The window in a key: of its name, ``late``, or a moment in it; of overlapping windows the last one.

        Raises:
            ConfigError: It names none.
        """
        if isinstance(window, datetime.datetime):
            return self.name(window)
        if not isinstance(window, str) or not is_part(window):
            raise ConfigError(f"window {window!r}: expected its begin, such as {_name(0)}, or {LATE!r}")
        return window

    def parts(self, event: Any, sent: datetime.datetime | None, stored_us: int) -> list[str]:
        """The windows of an event, oldest first; ``late`` if it came too late for the last of them.

        Args:
            sent: The time in its envelope.
            stored_us: When the stream has stored it, in microseconds since 1970.

        Raises:
            ConfigError: It has no time, or one without a zone.
        """
        moment = sent if self.time is None else self.time(event)
        if not isinstance(moment, datetime.datetime) or moment.tzinfo is None:
            raise ConfigError(f"the time of an event for a window is {moment!r}: expected a datetime with a zone")
        step_s = self.every_s or self.size_s  # as `step_s` says, without the call: this is done for every event
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
    """Whether it is a window as keys have it."""
    return text == LATE or _is_name(text) is not None


def _whole_seconds(moment: datetime.datetime) -> int:
    """Since 1970, rounded down: Python keeps the microseconds of a difference positive."""
    since = moment - _EPOCH
    return since.days * 86_400 + since.seconds


# Printing a time takes as long as decoding an event, and most events fall into a few windows.
@functools.lru_cache(maxsize=4096)
def _name(begin_s: int) -> str:
    # Not all of it by strftime: before the year 1000 its %Y has four digits or fewer, as the platform has it.
    begin = _EPOCH + datetime.timedelta(seconds=begin_s)
    return f"{begin.year:04}{begin:%m%dT%H%M%SZ}"
