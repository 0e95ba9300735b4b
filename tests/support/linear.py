"""Whether what callers saw of commands on one boundary could have happened one command after the other.

The stream is the order in which things happened, so nothing has to be searched for. Each command that stored something
is one entry of the stream. Going through them with a model of the decisions, every reply must be what the model says at
its entry; a command that was refused must be refused by the model at some place that was the end of the stream while
the command was under way, and if its caller left it at that, it must not be stored: neither before nor later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

REFUSED = "refused"


@dataclass(slots=True)
class Operation:
    """One command, as its callers saw it, retries with the same id included."""

    id: str
    command: Any
    invoked: float
    replies: list[Any] = field(default_factory=list)
    """What each attempt was answered with: the data of the reply, or ``REFUSED``."""
    returned: float = float("inf")
    """When the first answer came; later it is never."""


class Entry(NamedTuple):
    """What one command stored: its id, and what its events say."""

    id: str
    content: Any


class NotLinearizable(AssertionError):
    """What the callers saw cannot have happened."""


Model = Callable[[Any, Any], tuple[Any, Any, Any] | None]
"""(state, command) -> (new state, content of the entry, reply), or None for a refusal."""


def check_linearizable(operations: Sequence[Operation], entries: Sequence[Entry], model: Model, state: Any) -> None:
    """
    Raises:
        NotLinearizable: With the first contradiction.
    """
    known = {operation.id: operation for operation in operations}
    places: dict[str, int] = {}
    states = [state]
    replies: dict[str, Any] = {}
    for place, entry in enumerate(entries):
        if entry.id in places:
            raise NotLinearizable(f"{entry.id} was decided twice: entries {places[entry.id]} and {place}")
        if entry.id not in known:
            raise NotLinearizable(f"entry {place} is of {entry.id}, which nobody called")
        places[entry.id] = place
        decided = model(state, known[entry.id].command)
        if decided is None:
            raise NotLinearizable(f"entry {place}: {entry.id} had to be refused: {known[entry.id].command}")
        state, content, replies[entry.id] = decided
        if content != entry.content:
            raise NotLinearizable(f"entry {place}: {entry.id} stored {entry.content!r}, not {content!r}")
        states.append(state)
    _check_order(known, entries)
    for operation in operations:
        _check_replies(operation, places, replies, entries, known, states, model)


def _check_order(known: dict[str, Operation], entries: Sequence[Entry]) -> None:
    """What had returned before another was called is before it."""
    latest_call, by = float("-inf"), ""
    for entry in entries:
        operation = known[entry.id]
        if operation.returned < latest_call:
            raise NotLinearizable(f"{entry.id} had returned before {by} was called, and is stored after it")
        if operation.invoked > latest_call:
            latest_call, by = operation.invoked, entry.id


def _check_replies(
    operation: Operation,
    places: dict[str, int],
    replies: dict[str, Any],
    entries: Sequence[Entry],
    known: dict[str, Operation],
    states: list[Any],
    model: Model,
) -> None:
    answers = [answer for answer in operation.replies if answer != REFUSED]
    if operation.id in places:
        wrong = [answer for answer in answers if answer != replies[operation.id]]
        if wrong:
            raise NotLinearizable(f"{operation.id} was answered {wrong[0]!r}, and had to be {replies[operation.id]!r}")
        if operation.replies[-1:] == [REFUSED]:
            raise NotLinearizable(f"{operation.id} was refused, and is entry {places[operation.id]}")
        return
    if answers:
        raise NotLinearizable(f"{operation.id} was answered {answers[0]!r}, and is not in the stream")
    if operation.replies:
        low = max((i + 1 for i, e in enumerate(entries) if known[e.id].returned < operation.invoked), default=0)
        high = next((i for i, e in enumerate(entries) if known[e.id].invoked > operation.returned), len(entries))
        if all(model(states[place], operation.command) is not None for place in range(low, high + 1)):
            raise NotLinearizable(f"{operation.id} was refused, and nowhere from {low} to {high} had to be")
