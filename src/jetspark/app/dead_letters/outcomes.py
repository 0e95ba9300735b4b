"""The progress of a redrive, and the outcomes of the dead letters it requested. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jetspark.app.dead_letters.listing import DeadLetterFilter
from jetspark.app.jobs import JobRecord
from jetspark.app.stored_events import DeadLetterStatus

__all__ = ["REDRIVE_KEY", "RedriveOutcomes", "RedriveProgress", "RedriveResults", "SeenDeadLetter"]


REDRIVE_KEY = "redrive"
"""The key of its record: one redrive runs at a time."""


@dataclass(slots=True, kw_only=True)
class RedriveResults:
    """Outcomes of the dead letters that were requested, and of those that follow them."""

    handled: int = 0
    failed: int = 0
    """Handled again, and failed again."""
    waiting: int = 0
    """Not handled yet, or behind a dead letter that failed again."""

    def __str__(self) -> str:
        return f"{self.handled} handled, {self.failed} failed again, {self.waiting} waiting"


class RedriveProgress(JobRecord, kw_only=True, rename={"is_dry_run": "dry_run", "is_done": "done"}):
    """The progress of a redrive: the key ``redrive`` of the bucket ``<app>_handlers`` while it runs."""

    hint: ClassVar[str] = "no redrive is under way: it is done, or was never started"
    chosen: DeadLetterFilter
    up_to: int
    """The last dead letter that is part of it; later ones are not."""
    last: int = 0
    """Dead letters up to this one are requested, or need not be."""
    requested: int = 0
    behind: int = 0
    """Dead letters that follow another of their key without a request."""
    freed: int = 0
    """Keys that continue though the dead letter they waited for is gone."""
    restored: int = 0
    """Keys with dead letters behind another and no parked record: they are parked again, and follow."""
    unhandled: int = 0
    """Dead letters that are left alone, because the application has no handler of their name."""
    is_dry_run: bool = False
    is_done: bool = False
    """Everything is requested."""
    reason: str = ""
    """Why nothing was requested, and what waits instead; empty where something was."""
    results: RedriveResults | None = None
    """Results of the requested dead letters; None if the redrive did not wait for them."""

    @property
    def key(self) -> str:
        return REDRIVE_KEY

    @property
    def title(self) -> str:
        return f"redrive {self.id}"

    @property
    def reached(self) -> str:
        return f"at dead letter {self.last} of {self.up_to}"

    @property
    def looked_at(self) -> int:
        """Dead letters that were chosen, and are dealt with."""
        return self.requested + self.behind + self.unhandled

    @property
    def has_effect(self) -> bool:
        """Whether anything was requested or repaired, or would be."""
        return bool(self.requested or self.freed or self.restored)

    def __str__(self) -> str:
        if self.is_done and not self.has_effect:
            return f"nothing to redrive: {self.reason}" if self.reason else "nothing to redrive"
        verb = "would be redriven" if self.is_dry_run else "requested"
        state = "" if self.is_done else f", now at dead letter {self.last}"
        name = "dry run" if self.is_dry_run else self.title
        text = f"{name}: {self.requested} {verb}, {self.behind} follow, up to dead letter {self.up_to}{state}"
        if self.freed:
            verb = "would continue" if self.is_dry_run else "continue"
            text += f", {self.freed} keys whose dead letters are gone {verb}"
        if self.restored:
            verb = "would follow" if self.is_dry_run else "follow"
            text += f", {self.restored} keys whose records are gone {verb} again"
        if self.unhandled:
            text += f", {self.unhandled} left alone because the application has no handler of their name"
        return text if self.results is None else f"{text}: {self.results}"

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        return {name: value for name, value in fields.items() if name not in ("reason", "results") or value}


class SeenDeadLetter(NamedTuple):
    """The facts that a redrive keeps of each dead letter it has seen."""

    revision: int
    subject: str
    """The subject of the dead letter, not of its event."""
    handler: str
    key: str | None
    status: DeadLetterStatus
    redrives: int
    size_bytes: int
    """The size of the event."""
    is_chosen: bool

    @property
    def lane(self) -> tuple[str, str | None]:
        return self.handler, self.key


class RedriveOutcomes:
    """Which dead letters of a redrive have ended, and how. Pure."""

    def __init__(self) -> None:
        self.results = RedriveResults()
        self._left: dict[str, SeenDeadLetter] = {}
        """Dead letters that have not ended, by subject."""
        self._left_in = Counter[tuple[str, str | None]]()
        """How many of a handler's key have not ended."""
        self._lanes: set[tuple[str, str | None]] = set()
        self._stuck: set[tuple[str, str | None]] = set()
        """Keys that wait for a dead letter that failed again."""
        self._stuck_behind = 0
        """How many have not ended because their key is stuck."""

    def request(self, seen: SeenDeadLetter) -> None:
        """It was requested."""
        self._watch(seen)
        if seen.key is not None:
            self._lanes.add(seen.lane)

    def free(self, handler: str, key: str) -> None:
        """The dead letter that a key waited for is gone, and those behind it are handled now."""
        self._lanes.add((handler, key))

    def follow_all(self, dead_letters: Iterable[SeenDeadLetter], up_to: int) -> None:
        """Watch the dead letters behind a requested one, chosen or not."""
        for seen in dead_letters:
            if seen.status == "behind" and seen.revision <= up_to and seen.lane in self._lanes:
                self._watch(seen)

    def set_status(self, subject: str, status: DeadLetterStatus, redrives: int) -> None:
        """A dead letter has a new status."""
        seen = self._left.get(subject)
        if seen is None:
            return
        if status == "closed":
            self.results.handled += 1
        elif status == "open" and redrives > seen.redrives:
            self.results.failed += 1
        else:
            return
        del self._left[subject]
        self.results.waiting = len(self._left)
        self._left_in[seen.lane] -= 1
        if seen.lane in self._stuck:
            self._stuck_behind -= 1
        elif status == "open" and seen.key is not None:
            self._stuck.add(seen.lane)
            self._stuck_behind += self._left_in[seen.lane]

    def have_ended(self) -> bool:
        """True if all dead letters left wait until another one is redriven or discarded."""
        return len(self._left) == self._stuck_behind

    def _watch(self, seen: SeenDeadLetter) -> None:
        if seen.subject not in self._left:
            self._left[seen.subject] = seen
            self._left_in[seen.lane] += 1
            self._stuck_behind += seen.lane in self._stuck
        self.results.waiting = len(self._left)
