"""Which message of a decision carries which guard. Pure.

The server checks one guard with a message: that the last message under a filter still has a sequence. In an atomic
batch it compares all of them with the stream as it was before the batch. So a decision needs as many events as its
boundary has filters, and a filter has to be checked no later than with the first message that falls under it.

One thing more has to be true: at least one event lies inside the boundary. That event is what a second worker with the
same command finds, or fails on; without it a command would be stored once for each attempt.

Measured on nats-server 2.15.1: a stream with one replica compares while it stores, so a guard is exact. A replicated
one compares before it proposes, and of what is proposed and not stored yet it only knows subjects and filters *by
name*. A guard without wildcards is exact there too, and so is one with wildcards against others of the same text. Of a
plain publish under a wildcard, or of another filter that overlaps, it may miss one that came within the same
millisecond: in a race of eight writers 37 of 529. The sequence of the whole stream counts what is proposed, and is
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jetspark.core.subjects import matches

__all__ = ["Guard", "NotGuardable", "guards_stream", "plan_guards"]


class NotGuardable(Exception):
    """The server cannot check what this decision depends on."""


class Guard(NamedTuple):
    """The last message under a filter has this sequence."""

    filter: str
    last: int


def has_wildcards(filter: str) -> bool:
    return "*" in filter.split(".") or filter.endswith(">")


def guards_stream(guarding: str, filters: Sequence[str], replicas: int) -> bool:
    """Whether nothing at all may be stored between reading and storing, rather than nothing inside the boundary."""
    if guarding == "auto":
        return replicas > 1 and any(map(has_wildcards, filters))
    return guarding == "stream"


def plan_guards(subjects: Sequence[str], boundary: Sequence[Guard], *, whole_stream: bool) -> list[Guard | None]:
    """The guard of each message; None for those that carry none.

    Raises:
        NotGuardable: There is no such plan; the message says what to change.
    """
    if len(subjects) == len(boundary) == 1 and not whole_stream and matches(boundary[0].filter, subjects[0]):
        return [boundary[0]]  # most decisions are so
    filters = ", ".join(repr(guard.filter) for guard in boundary)
    if not any(matches(guard.filter, subject) for guard in boundary for subject in subjects):
        is_escaped = any("=" in subject for subject in subjects) and not any("=" in each.filter for each in boundary)
        hint = ". Values in subjects are escaped: fill those of reads with Template, too" if is_escaped else ""
        raise NotGuardable(
            f"none of its events ({', '.join(map(repr, subjects))}) is inside what it reads ({filters}): a retry would "
            f"not find that it was decided. Read a subject that it writes{hint}"
        )
    if whole_stream:
        return [None] * len(subjects)
    if len(boundary) > len(subjects):
        raise NotGuardable(
            f"it reads {len(boundary)} boundaries ({filters}) and stores {len(subjects)} events, and the server checks "
            "one boundary with each. Return an event for each, read fewer, or declare guard='stream'"
        )
    plan: list[Guard | None] = [None] * len(subjects)
    # Whichever has to be checked first gets the first place.
    for place, (latest, guard) in enumerate(sorted((_latest(guard, subjects), guard) for guard in boundary)):
        if place > latest:
            raise NotGuardable(
                f"{guard.filter!r} has to be checked with event {latest + 1} at the latest, which is the first one "
                f"inside it, and those before carry the checks of other boundaries ({filters}). Return the events in "
                "another order, or declare guard='stream'"
            )
        plan[place] = guard
    return plan


def _latest(guard: Guard, subjects: Sequence[str]) -> int:
    """The last message that can carry the guard: the first one under its filter; any can where none is."""
    return next((i for i, subject in enumerate(subjects) if matches(guard.filter, subject)), len(subjects))
