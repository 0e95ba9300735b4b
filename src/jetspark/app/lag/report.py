"""The result of a measurement: a row for each reader, the furthest behind first. Pure."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from jetspark.app.lag.measures import LagSource, MeasuredLag, Part
from jetspark.app.lag.outlook import LagOutlook, LagSample
from jetspark.jetstream.info import StreamInfo
from jetspark.jetstream.wire import time_text

__all__ = ["DeadLetterLag", "LagPart", "LagReport", "LagRow", "age_s", "row_of", "sample_of"]

SCHEMA = 1
"""Version of the JSON form. Fields may be added; a change of a field's meaning is another version."""
# Parts whose messages are needed from the reader's stream: the others are copies in streams without limits.
_NEEDED = ("waiting", "in_flight")


class LagPart(NamedTuple):
    """Messages in one of the places where they wait."""

    messages: int
    seconds: float | None
    """Age of the oldest; None if it is unknown, 0.0 without messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRow:
    """How far one reader is behind."""

    kind: str
    """``handler``, ``workflow``, ``projection``, ``consumer``, or the kind of a :class:`PositionReader`."""
    name: str
    stream: str
    messages: int | None = None
    """Messages that are not processed yet; None if that is unknown."""
    seconds: float | None = None
    """Age of the oldest of them, by the server's clock; 0.0 without one, None if it is unknown."""
    parts: Mapping[str, LagPart] = field(default_factory=dict)
    is_paused: bool = False
    notes: tuple[str, ...] = ()
    unknown: str | None = None
    """Why the lag is unknown."""
    outlook: LagOutlook = field(default_factory=LagOutlook)

    def to_dict(self) -> dict[str, Any]:
        parts = {
            name: {"messages": part.messages, "seconds": _rounded(part.seconds)} for name, part in self.parts.items()
        }
        return {
            "kind": self.kind,
            "name": self.name,
            "stream": self.stream,
            "messages": self.messages,
            "seconds": _rounded(self.seconds),
            "parts": parts,
            "paused": self.is_paused,
            "notes": list(self.notes),
            "unknown": self.unknown,
            **{name: _rounded(value) for name, value in asdict(self.outlook).items()},
        }

    @property
    def _rank(self) -> tuple[object, ...]:
        group = 2 if self.unknown is not None else 3 if not self.messages else 1 if self.seconds is None else 0
        return group, -(self.seconds or 0.0), -(self.messages or 0), self.stream, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterLag:
    """Events of one handler, or of the projections, that wait until an operator redrives or discards them."""

    name: str
    messages: int
    """Open dead letters, and those behind one. Dead letters behind a retry are part of the handler's lag."""
    seconds: float | None
    """Time since the oldest of these events was stored."""
    parked_keys: int | None
    """Keys that wait for a retry or a dead letter; None if that is unknown."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": _rounded(self.seconds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReport:
    """The lag of every reader at one moment."""

    at: datetime.datetime
    """By the server's clock."""
    app: str | None
    rows: tuple[LagRow, ...]
    """The furthest behind first. Rows with an unknown lag stand before the rows that are not behind."""
    dead_letters: tuple[DeadLetterLag, ...] = ()

    @classmethod
    def of(
        cls, at: datetime.datetime, app: str | None, rows: Iterable[LagRow], letters: Iterable[DeadLetterLag]
    ) -> LagReport:
        ranked = tuple(sorted(rows, key=lambda row: row._rank))
        return cls(at=at, app=app, rows=ranked, dead_letters=tuple(sorted(letters, key=lambda each: each.name)))

    def row(self, name: str, kind: str | None = None) -> LagRow:
        """The row of one reader.

        Raises:
            KeyError: The report has no row of this name and kind.
        """
        for each in self.rows:
            if each.name == name and kind in (None, each.kind):
                return each
        raise KeyError(name)

    @property
    def is_complete(self) -> bool:
        """True if the lag of every reader is known."""
        return all(row.unknown is None for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "at": time_text(self.at),
            "app": self.app,
            "complete": self.is_complete,
            "rows": [row.to_dict() for row in self.rows],
            "dead_letters": [each.to_dict() for each in self.dead_letters],
        }


def row_of(source: LagSource, measured: MeasuredLag, at: datetime.datetime, outlook: LagOutlook) -> LagRow:
    """The row of a reader that was measured at a moment."""
    parts = {name: LagPart(part.messages, age_s(part, at)) for name, part in measured.parts.items()}
    behind = [part.seconds for part in parts.values() if part.messages]
    ages = [seconds for seconds in behind if seconds is not None]
    return LagRow(
        kind=source.kind,
        name=source.name,
        stream=source.stream,
        messages=measured.messages,
        seconds=None if len(ages) < len(behind) else max(ages, default=0.0),
        parts=parts,
        is_paused=measured.is_paused,
        notes=tuple(measured.notes),
        outlook=outlook,
    )


def sample_of(measured: MeasuredLag, at: datetime.datetime, info: StreamInfo) -> LagSample:
    """The sample of a reader for its series; ``info`` is of the stream that it reads."""
    needed = Part()
    for name in _NEEDED:
        needed = needed.joined(measured.parts.get(name, Part()))
    distance = info.state.last_sequence + 1 - needed.first if needed.messages and needed.first else 0
    return LagSample(
        at=at,
        messages=measured.messages,
        position=measured.position,
        progress=measured.progress,
        underway=measured.underway,
        oldest_s=age_s(needed, at),
        distance=max(0, distance),
        identity=measured.identity,
    )


def age_s(part: Part, at: datetime.datetime) -> float | None:
    """Age of the oldest message of a part: 0.0 without messages, None if it is unknown."""
    if not part.messages:
        return 0.0
    return None if part.oldest is None else max(0.0, (at - part.oldest).total_seconds())


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) and math.isfinite(value) else value
