"""What is said of a replay of a handler: the plan before it starts, and the record while it runs and afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jetspark.app.extents import Extent
from jetspark.app.replay.outlines import RangeOutline
from jetspark.app.replay.replay_records import RequestRecord

__all__ = ["HandlerReplayPlan", "HandlerReplayRecord"]


@dataclass(slots=True, kw_only=True)
class HandlerReplayRecord(RequestRecord):
    """One replay of a handler: a key of the bucket ``<app>_handlers``, ``replay.<handler>.<id>``, which stays."""

    handler: str
    effects: bool
    """Whether effects are carried out."""
    stream: str
    created: str
    first: int
    last: int
    """The end that was frozen when it began."""
    kind: Literal["handler"] = "handler"
    outline: dict[str, Any] = field(default_factory=dict)
    """Subjects, times and gaps of what it reads, as :class:`~jetspark.app.replay.outlines.RangeOutline` has them."""
    at: int = 0
    """Events up to this sequence were handled."""
    events: int = 0
    done: int = 0
    skipped: int = 0
    stopped: int = 0
    """Calls that ended at an effect which was held back, and whose result nobody knows."""
    failed: int = 0
    published: dict[str, int] = field(default_factory=dict)
    """Without effects: events that would have been published, by type."""
    held_back: dict[str, int] = field(default_factory=dict)
    """Without effects: effects of ``ctx.once`` that were not carried out, by name."""
    recorded: dict[str, int] = field(default_factory=dict)
    """Without effects: effects of ``ctx.once`` whose recorded result was returned, by name."""
    writes: int = 0
    """Without effects: keys that transactions would have written."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The first hundred: sequence, key and error."""
    status: str = "running"
    noted: str = ""

    @property
    def key(self) -> str:
        return f"replay.{self.handler}.{self.id}"

    @property
    def consumer(self) -> str:
        return f"{self.handler}--replay-{self.id}"

    def __str__(self) -> str:
        how = "with effects" if self.effects else "without effects"
        lines = [
            f"replay {self.id} of handler {self.handler} {how}: {self.events} events, at {self.at} of {self.first} to "
            f"{self.last}: {self.done} done, {self.skipped} skipped, {self.failed} failed, {self.status}"
        ]
        if self.stopped:
            lines.append(f"{self.stopped} ended at an effect whose result is not recorded: {_counted(self.held_back)}")
        if self.recorded:
            lines.append(f"recorded effects that were not repeated: {_counted(self.recorded)}")
        if self.published:
            lines.append(f"would have published: {_counted(self.published)}")
        if self.writes:
            lines.append(f"would have written {self.writes} keys")
        lines += [f"failed: sequence {each['sequence']}, key {each['key']}: {each['error']}" for each in self.failures]
        return "\n".join(lines)


@dataclass(slots=True, kw_only=True)
class HandlerReplayPlan:
    """What a replay of a handler will read."""

    handler: str
    extent: Extent
    events: dict[str, int] = field(default_factory=dict)
    """By type."""
    keys: int = 0
    unreadable: int = 0
    outline: RangeOutline = field(default_factory=RangeOutline)
    """Subjects, times and gaps of the range."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "handler": self.handler,
            "stream": self.extent.stream,
            "first": self.extent.first,
            "last": self.extent.last,
            "events": sum(self.events.values()),
            "types": self.events,
            "keys": self.keys,
            "unreadable": self.unreadable,
            **self.outline.to_dict(),
        }

    def __str__(self) -> str:
        lines = [
            f"replay of handler {self.handler}",
            f"reads {self.extent}: all of it is there",
            *self.outline.lines(reader="replay"),
            f"{sum(self.events.values())} events of {self.keys} keys ({_counted(self.events) or 'none'})",
        ]
        if self.unreadable:
            lines.append(f"{self.unreadable} messages are no events, and would fail")
        return "\n".join(lines)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
