"""The messages that store a decision: its events and timers, and the guards that they carry. Pure.

A decision is one message or one atomic batch: events first, in consecutive sequences, then timers. Each event records
the command and its reply. A timer records neither: a retry is recognised by the events, so a decision without events
has no timers. A timer is ended by a header of an event, which the server obeys while it stores the event.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jetspark.app.causes import Cause, child_of
from jetspark.app.commands.boundaries import outcome_of
from jetspark.app.commands.command_spec import CommandDecision
from jetspark.app.contracts.catalogue import Catalogue, Contract, contract_of
from jetspark.app.contracts.envelope import Encoded, derived_id, write_event
from jetspark.app.timers import When, cancelling, timer_message
from jetspark.core.subjects import is_subset, matches
from jetspark.errors import CommandFailed, ConfigError, InvalidEvent

__all__ = [
    "COMMAND_HEADER",
    "OUTCOME_HEADER",
    "DecisionEncoder",
    "DecisionMessages",
    "Guard",
    "NotGuardable",
    "guards_stream",
    "plan_guards",
]


COMMAND_HEADER = "Jetspark-Command"
OUTCOME_HEADER = "Jetspark-Outcome"
MAX_MESSAGES = 1000
"""Most messages that the server takes in one atomic batch."""
MAX_REPLY_BYTES = 16 << 10


class DecisionMessages(NamedTuple):
    """The messages in the order in which they are stored."""

    events: Sequence[Encoded]
    timers: Sequence[Encoded] = ()


class DecisionEncoder:
    """Makes messages of decisions.

    Args:
        catalogue: The application's events.
        timers_of: The application whose timers decisions set; None if it has none.
        random_bits: Returns the given number of random bits, for traces.
        server_now: The server's time of day, by which timers are due.
    """

    def __init__(
        self,
        source: str,
        catalogue: Catalogue,
        timers_of: str | None,
        random_bits: Callable[[int], int],
        server_now: Callable[[], datetime.datetime],
    ) -> None:
        self._source, self._catalogue = source, catalogue
        self._timers_of, self._random_bits, self._server_now = timers_of, random_bits, server_now
        self._stored: tuple[str, ...] = ()
        self._checked: set[Contract] = set()

    def know(self, stored: tuple[str, ...]) -> None:
        """The stream stores these subjects; none if they are not known."""
        self._stored = stored
        self._checked.clear()

    def encode(
        self, command: str, cause: Cause, decision: CommandDecision, time: datetime.datetime
    ) -> DecisionMessages:
        """The messages of a decision that has events.

        Raises:
            CommandFailed: An event is not declared by the application or breaks its contract; the reply is too large;
                or a timer cannot be set or ended with the decision.
        """
        events, reply, timers, cancels = decision
        count = len(events) + len(timers)
        if count > MAX_MESSAGES:
            raise CommandFailed(
                command, f"it decided {count} events and timers; at most {MAX_MESSAGES} are stored together"
            )
        # One span for all of it: the deciding.
        traceparent = child_of(cause.traceparent, self._random_bits)
        try:
            found = []
            for index, event in enumerate(events):
                encoded = self._encode(event, cause, derived_id(cause.id, command, index), time, traceparent)
                outcome = outcome_of(index, len(events), reply)
                encoded.headers[COMMAND_HEADER] = command
                encoded.headers[OUTCOME_HEADER] = outcome
                found.append(encoded)
            messages = DecisionMessages(found)
            if timers or cancels:
                messages = self._with_timers(command, cause, decision, found, time, traceparent)
        except (ConfigError, InvalidEvent, TypeError, ValueError) as error:
            raise CommandFailed(command, f"{type(error).__name__}: {error}") from error
        if len(outcome) > MAX_REPLY_BYTES:
            reason = f"its reply has {len(outcome)} bytes; at most {MAX_REPLY_BYTES} are recorded with an event"
            raise CommandFailed(command, f"{reason}: return an id, and let the caller read a view")
        return messages

    def _encode(self, event: object, cause: Cause, id: str, time: datetime.datetime, traceparent: str) -> Encoded:
        contract = contract_of(event)
        if contract not in self._checked:
            self._check(contract)
        if contract.id_of is not None:
            id = contract.id_of(event) or id
        # Not ``encode``: what that checks besides is known to be good.
        subject, body = write_event(contract, event, id, self._source, time, cause.correlation_id, cause.id)
        return Encoded(subject, body, {"Nats-Msg-Id": id, "traceparent": traceparent})

    def _check(self, contract: Contract) -> None:
        subject, kind = contract.subject.filter, contract.kind
        self._catalogue.declared(kind)  # stored, it would be inside a boundary, and no worker could read that any more
        if self._stored and not any(is_subset(subject, each) for each in self._stored):
            raise ConfigError(f"{kind.__name__} goes to {subject!r}, which the stream does not store")
        self._checked.add(contract)

    def _with_timers(
        self,
        command: str,
        cause: Cause,
        decision: CommandDecision,
        events: list[Encoded],
        time: datetime.datetime,
        traceparent: str,
    ) -> DecisionMessages:
        app = self._timers_of
        if app is None:
            raise ConfigError("it sets or ends timers, and the app has none: declare it with App(..., timers=True)")
        timers, now = [], self._server_now()
        for index, (name, (event, when)) in enumerate(decision.timers.items()):
            moment = When.of_decision(now, when)
            id = derived_id(cause.id, f"{command}:timer", index)
            encoded = self._encode(event, cause, id, moment.due or time, traceparent)
            timers.append(timer_message(app, name, moment, encoded))
        ended = [name for name in dict.fromkeys(decision.cancels) if name not in decision.timers]
        if len(ended) > len(events):
            raise ConfigError(
                f"it ends {len(ended)} timers and stores {len(events)} events: expected an event for each, since a "
                "message ends one timer"
            )
        for message, name in zip(events, ended, strict=False):
            message.headers.update(cancelling(app, name))
        return DecisionMessages(events, timers)


class NotGuardable(Exception):
    """The server cannot check what this decision depends on."""


class Guard(NamedTuple):
    """The last message under a filter has this sequence."""

    filter: str
    last: int


def has_wildcards(filter: str) -> bool:
    return "*" in filter.split(".") or filter.endswith(">")


def guards_stream(guarding: str, filters: Sequence[str], replicas: int) -> bool:
    """True if the guard is the whole stream's last sequence, and False if it is the boundary's."""
    if guarding == "auto":
        return replicas > 1 and any(map(has_wildcards, filters))
    return guarding == "stream"


def plan_guards(subjects: Sequence[str], boundary: Sequence[Guard], *, whole_stream: bool) -> list[Guard | None]:
    """The guard of each message; None for a message without one.

    Raises:
        NotGuardable: No assignment is possible; the error says what to change.
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
