"""The life of a command: read its boundary, decide, store under guards, and repeat if the boundary has moved. Pure.

::

    read ──found its id──────────────────> the recorded reply
      │ ^
      │ └──────── pause ──────── moved, or unknown ──────────────┐
      v                                                          │
    decide ──events──> append, if the boundary has not moved ────┤
      │                                                          └──stored──> reply
      └──refused, failed, or nothing to store──> has the boundary moved at the leader? ──no──> reply or error

Every outcome is true at one moment. Events are stored only if every boundary still ends where it was read to; the
server compares both while it stores. A refusal, an error or an empty decision is returned only after the leader has
confirmed the end of each boundary: it was read before and is the same afterwards, so all of it held in between.

A command is decided once. Its events carry its id as their cause, and one of them lies inside the boundary
(:mod:`~jetspark.app.commands.decision_messages`). A worker that decides the same command again either has read that
event, and answers with the recorded reply, or has not, and fails at the guard. An append without an acknowledgement may
still be stored later: the command is then decided again, under a guard that only one of the two appends can pass.

Refusals and decisions without events are not recorded, so the same command may be decided differently later.

A stream that was deleted and re-created counts from 1 again, and no guard of the server tells the two apart. So the
cache belongs to one stream, identified by its creation time. The decider compares that time when the worker has a
reason to doubt it (:meth:`Decider.doubt`), when it has not been checked for some seconds, and when a boundary ends at
another sequence than before. The cache of another stream is dropped, and a command in progress reads it again.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from jetspark.app.causes import Cause
from jetspark.app.commands.boundaries import (
    BoundaryCache,
    BoundaryPast,
    SnapshotState,
    advance_snapshot,
    merged_past,
    recorded_reply,
)
from jetspark.app.commands.command_spec import Command, CommandDecision, CommandReply, CommandSpec, PastEvent
from jetspark.app.commands.decision_messages import (
    COMMAND_HEADER,
    OUTCOME_HEADER,
    DecisionEncoder,
    DecisionMessages,
    Guard,
    NotGuardable,
    guards_stream,
    plan_guards,
)
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.envelope import Encoded, decode
from jetspark.app.contracts.tokens import escape, text_of
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.timers import ended_by, firing_subject
from jetspark.core.backoff import Backoff
from jetspark.core.step_runner import Sleep, Steps
from jetspark.core.subjects import matches
from jetspark.errors import (
    BoundaryConflict,
    CommandFailed,
    CommandInDoubt,
    CommandRefused,
    ContractViolation,
    JetSparkError,
    WrongVersion,
)
from jetspark.jetstream.info import StoredMessage

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = [
    "Append",
    "AppendMoved",
    "AppendUnknown",
    "Appended",
    "CommandRequest",
    "CommandStep",
    "Decider",
    "GuardedMessage",
    "LastMessage",
    "ReadLasts",
    "ReadSnapshot",
    "ReadStreamEnd",
    "ReadTail",
    "StreamEnd",
]

T = TypeVar("T")

PAUSE = Backoff(first_s=0.001, max_s=0.25)
TRUST_S = 10.0
"""How long the stream is assumed not to have been re-created. Most deletions are reported at once, see ``doubt``."""
_TRUST = datetime.timedelta(seconds=TRUST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command with its caller's expectations."""

    command: Command
    cause: Cause
    """The command's id, correlation and trace: the cause of its events."""
    expected_version: int | None = None


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadTail:
    """Read the messages under a filter after a sequence; the answer is a list of :class:`StoredMessage`, in order.

    Any replica may answer, unless it ends before ``through``: then the leader is asked. At most ``limit`` messages.
    """

    filter: str
    after: int
    through: int
    limit: int
    since_s: float | None = None
    """Start earlier if necessary, so that the messages of this many seconds are included."""


@dataclass(frozen=True, slots=True)
class ReadLasts:
    """Ask the stream's leader for the last message under each filter; a :class:`LastMessage` for each."""

    filters: tuple[str, ...]


class LastMessage(NamedTuple):
    """The last message under a filter."""

    sequence: int
    """0 if the filter matches no message."""
    id: str | None = None
    """The message's ``Nats-Msg-Id``, if it has one."""


@dataclass(frozen=True, slots=True)
class ReadStreamEnd:
    """Ask the stream's leader what the stream is, and where it ends: a :class:`StreamEnd`."""


class StreamEnd(NamedTuple):
    """A stream at one moment."""

    sequence: int
    """The sequence of the stream's last message."""
    created: datetime.datetime | None
    """The stream's creation time: another time means a re-created stream with other sequences."""
    replicas: int
    """A replicated stream checks some guards less exactly."""
    subjects: tuple[str, ...]
    """The stream's subjects; empty while they are unknown."""


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """The state of a projection's key; the answer is a :class:`SnapshotState`.

    State that the projection folded from another stream of the same name is ignored: its sequences mean something else.
    """

    projection: str
    key: str
    created: datetime.datetime | None
    """The stream's creation time."""


class GuardedMessage(NamedTuple):
    """A message of an append, with its guard."""

    encoded: Encoded
    guard: Guard | None = None


class Append(NamedTuple):
    """Store all of these messages, or none; one of the three answers below."""

    messages: tuple[GuardedMessage, ...]
    last_sequence: int | None = None
    """Only if this is the last sequence of the whole stream."""


class Appended(NamedTuple):
    """The messages are stored in consecutive sequences; this is the last one."""

    sequence: int


@dataclass(frozen=True, slots=True)
class AppendMoved:
    """Nothing was stored: a guard did not hold, or the server could not take it now."""

    is_conflict: bool = True
    is_duplicate: bool = False
    """An event with the id of one of these is stored already."""


@dataclass(frozen=True, slots=True)
class AppendUnknown:
    """No acknowledgement came; the messages may be stored, now or later."""


CommandStep: TypeAlias = ReadTail | ReadLasts | ReadStreamEnd | ReadSnapshot | Append | Sleep
CommandSteps: TypeAlias = Steps[CommandStep, T]


# ---- the procedure ---------------------------------------------------------------------------------------------------


class Decider:
    """Decides commands of one application, from this worker's cache of its stream.

    Args:
        end: The stream's current end.
        catalogue: The application's events.
        clock: The time of day.
        random_bits: Returns the given number of random bits, for traces.
        server_now: The server's time of day, by which timers are due and commands are old; the clock's, if not given.
    """

    def __init__(
        self,
        app: AppSpec,
        end: StreamEnd,
        *,
        catalogue: Catalogue,
        cache: BoundaryCache,
        clock: Callable[[], datetime.datetime],
        random_bits: Callable[[int], int],
        server_now: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        self.stream = app.stream
        self.catalogue, self.projections, self.cache = catalogue, app.projections, cache
        self.clock, self.server_now = clock, server_now or clock
        timers_of = app.name if app.has_timers else None
        self.encoder = DecisionEncoder(app.source, catalogue, timers_of, random_bits, self.server_now)
        self.encoder.know(end.subjects)
        self.known_end = 0
        """The highest sequence of the stream that was seen."""
        self.epoch = 0
        """Another one means another stream, or other guards: nothing that was read before counts."""
        self._end = end
        self._seen_at: datetime.datetime | None = clock()

    @property
    def replicas(self) -> int:
        return self._end.replicas

    @property
    def created(self) -> datetime.datetime | None:
        """The stream's creation time."""
        return self._end.created

    @property
    def stored(self) -> tuple[str, ...]:
        """The subjects of the stream; none if they are not known."""
        return self._end.subjects

    def is_in_doubt(self, now: datetime.datetime) -> bool:
        """True if the stream may have been re-created since the last check."""
        return self._seen_at is None or not self._seen_at <= now < self._seen_at + _TRUST

    def doubt(self) -> None:
        """The stream may have been re-created or changed: check it before the next command."""
        self._seen_at = None

    def see(self, end: StreamEnd) -> None:
        """Take notice of what the stream is now."""
        if end[1:] != self._end[1:]:
            self.epoch += 1
            self.cache.clear()
            self.encoder.know(end.subjects)
            self.known_end = 0
        self._end, self._seen_at = end, self.clock()

    def boundary(self, spec: CommandSpec, command: Command) -> tuple[str, ...]:
        """The filters that a command reads.

        Raises:
            CommandFailed: ``reads`` raised an error, or returned no subjects of the stream.
        """
        try:
            return spec.boundary(command, self.stored)
        except BaseException as error:
            raise failed_by(spec, "reads", error) from error

    def run(self, spec: CommandSpec, request: CommandRequest, boundary: tuple[str, ...]) -> CommandSteps[CommandReply]:
        """Decide a command, and store what follows.

        Raises:
            CommandRefused, WrongVersion, BoundaryConflict, CommandFailed: Nothing was stored.
            CommandInDoubt: The outcome is unknown.
        """
        return _DecidingRun(self, spec, request, boundary).run()

    def read(self, message: StoredMessage) -> PastEvent:
        """A stored message as an event of the past.

        Raises:
            ContractViolation: The message is not an event that the application declares.
        """
        decoded = decode(message.subject, message.data, message.headers, self.catalogue)
        outcome = message.headers.get(OUTCOME_HEADER)
        return PastEvent(
            message.sequence,
            decoded.event,
            message.subject,
            decoded.id,
            decoded.time,
            decoded.causation_id,
            message.headers.get(COMMAND_HEADER),
            None if outcome is None else outcome.encode(),
            firing_subject(message.headers),
            ended_by(message.headers),
            message.timestamp,
        )


def failed_by(spec: CommandSpec, method: str, error: BaseException) -> CommandFailed:
    """The caller's error when a method of the command raised.

    The method may also raise ``SystemExit`` or ``CancelledError``. A pure function has no reason to, and either would
    end the worker or leave the request unanswered, and the retry would do the same to the next worker.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    failed = CommandFailed(spec.name, f"{method}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class _DecidingRun:
    """The decision of one command."""

    def __init__(self, decider: Decider, spec: CommandSpec, request: CommandRequest, boundary: tuple[str, ...]) -> None:
        self._decider, self._spec, self._request, self._filters = decider, spec, request, boundary
        self._pasts: list[BoundaryPast] = []
        self._messages = DecisionMessages(())
        self._time: datetime.datetime
        """The time of the events: never earlier than the events that were read."""
        self._is_unknown = self._guards_stream = False
        self._key = self._key_text = ""
        self._epoch = -1
        self._projection = None if spec.snapshot is None else decider.projections[spec.snapshot]

    def run(self) -> CommandSteps[CommandReply]:
        self._time = self._decider.clock()
        if self._projection is not None:
            try:
                self._key_text = text_of(self._request.command.snapshot_key())
            except BaseException as error:
                raise failed_by(self._spec, "snapshot_key", error) from error
            self._key = escape(self._key_text)
        conflicts = failures = 0
        is_version_asked = False
        while conflicts < self._spec.tries:
            if self._is_outdated:
                yield from self._open()
            # A recorded outcome is final, and most retries find it in the cache without reading.
            reply = self._find()
            end = None
            if reply is None and self._guards_stream:
                end = yield from self._read_end(is_first=not failures)
                if self._is_outdated:
                    continue
                reply = self._find()
            if reply is not None:
                return reply
            if self._is_newer:
                # Only the leader's answer counts here: cached events may have been purged.
                if is_version_asked:
                    raise self._wrong_version()
                yield from self._catch_up()
                is_version_asked = True
                continue
            outcome, append = self._decide_for(end)
            if isinstance(outcome, CommandDecision) and append is not None:
                answer = yield append
                if isinstance(answer, Appended):
                    return self._remember(outcome, answer.sequence)
                self._is_unknown |= isinstance(answer, AppendUnknown)
                conflicts += isinstance(answer, AppendMoved) and answer.is_conflict
                failures += 1
                # Up to all of the wait is random: writers that collided once would collide again after equal waits.
                yield Sleep(PAUSE.wait_s(failures), random_fraction=1.0)
                self._time = self._decider.clock()
                is_duplicate = isinstance(answer, AppendMoved) and answer.is_duplicate
                if is_duplicate or not self._guards_stream:
                    yield from self._catch_up()
                if is_duplicate and not self._is_outdated and self._find() is None:
                    raise CommandFailed(self._spec.name, self._taken_ids())
            elif (yield from self._catch_up()):
                conflicts += 1
            elif isinstance(outcome, CommandDecision):
                return CommandReply(command_id=self._id, sequence=0, events=0, data=outcome.reply)
            else:
                raise outcome
        yield from self._catch_up()
        reply = None if self._is_outdated else self._find()
        if reply is not None:
            return reply
        if self._is_unknown:
            # An earlier append without an acknowledgement may still be stored.
            raise CommandInDoubt(self._spec.name, self._id, 0.0)
        raise BoundaryConflict(self._decider.stream, self._filters, conflicts)

    @property
    def _id(self) -> str:
        return self._request.cause.id

    # ---- reading -----------------------------------------------------------------------------------------------

    @property
    def _is_outdated(self) -> bool:
        """True if the cached events belong to an earlier stream of this name."""
        return self._epoch != self._decider.epoch

    def _keep(self, past: BoundaryPast) -> None:
        if not self._is_outdated:
            self._decider.cache.put(past, self._key)

    def _open(self) -> CommandSteps[None]:
        """Load the past of every boundary, from the cache where possible."""
        if self._decider.is_in_doubt(self._time):
            self._decider.see((yield ReadStreamEnd()))
        self._epoch = self._decider.epoch
        self._guards_stream = guards_stream(self._spec.guard, self._filters, self._decider.replicas)
        self._pasts = []
        for filter in self._filters:
            past = self._decider.cache.get(filter, self._key)
            if past is None:
                past = yield from self._reread(filter)
            self._pasts.append(past)
        if self._projection is not None and len({past.snapshot for past in self._pasts}) > 1:
            # One state for all: read those again that were read with another one.
            self._pasts = []
            for filter in self._filters:
                self._decider.cache.drop(filter, self._key)
            snapshot = yield self._read_snapshot(self._projection)
            for filter in self._filters:
                self._pasts.append((yield from self._reread(filter, snapshot)))

    def _reread(self, filter: str, snapshot: SnapshotState | None = None) -> CommandSteps[BoundaryPast]:
        if self._projection is None:
            past = BoundaryPast(filter)
            yield from self._extend(past, 0)
        else:
            if snapshot is None:
                snapshot = yield self._read_snapshot(self._projection)
            past = BoundaryPast(filter, snapshot)
            # A snapshot does not contain the boundary's end, and the end must not be later than the events read next.
            [last] = yield ReadLasts((filter,))
            yield from self._extend(past, last.sequence, after=snapshot.sequence, since_s=self._spec.remember_s)
            past.last = max(past.last, last.sequence)
        self._keep(past)
        return past

    def _read_snapshot(self, projection: ProjectionSpec) -> ReadSnapshot:
        return ReadSnapshot(projection.name, self._key_text, self._decider.created)

    def _extend(
        self, past: BoundaryPast, through: int, *, after: int | None = None, since_s: float | None = None
    ) -> CommandSteps[None]:
        limit = self._spec.max_past
        tail: list[StoredMessage] = yield ReadTail(
            past.filter, past.last if after is None else after, through, limit + 1, since_s
        )
        self._time = self._decider.clock()
        try:
            entries = [self._decider.read(message) for message in tail]
            past.add(entries, tail[-1].headers.get("Nats-Msg-Id") if tail else None)
        except ContractViolation as error:
            raise CommandFailed(
                self._spec.name,
                f"an event inside {past.filter!r} cannot be read: {error}. Declare its type, or read less",
            ) from error
        if past.snapshot is None and len(past.entries) > limit:
            reason = f"{past.filter!r} has more than max_past={limit} events: read less, or declare snapshot="
            raise CommandFailed(self._spec.name, reason)
        if len(tail) > limit:
            raise CommandFailed(
                self._spec.name,
                f"{past.filter!r} has more than max_past={limit} events that are not in the state of projection "
                f"{self._spec.snapshot!r}, or not older than remember_s={self._spec.remember_s:g}: does a worker run "
                "the projection? Else remember less",
            )

    def _catch_up(self) -> CommandSteps[bool]:
        """Read new events of the boundaries up to the end that the leader reports; True if there were any."""
        lasts: list[LastMessage] = yield ReadLasts(self._filters)
        if not all(past.may_continue_to(*last) for past, last in zip(self._pasts, lasts, strict=True)):
            # Events that were read are gone, by a limit or a purge; or this is another stream.
            self._decider.see((yield ReadStreamEnd()))
            if self._is_outdated:
                return True
        has_moved = False
        for index, (past, last) in enumerate(zip(self._pasts, lasts, strict=True)):
            is_whole = past.may_continue_to(*last)
            if is_whole and last.sequence == past.last:
                continue
            has_moved = True
            if is_whole:
                yield from self._extend(past, last.sequence)
                self._keep(past)
                is_whole = past.last >= last.sequence
            if not is_whole:
                # Events that were read, or were about to be, have been removed: read the boundary from its start.
                self._decider.cache.drop(past.filter, self._key)
                self._pasts[index] = yield from self._reread(past.filter, past.snapshot)
        return has_moved

    def _read_end(self, *, is_first: bool) -> CommandSteps[int]:
        """The stream's last sequence, with the boundaries complete up to there.

        The first attempt trusts the cache if this worker has stored the last message that it has seen.
        """
        known = min(past.through for past in self._pasts)
        if is_first and known and known == self._decider.known_end:
            return known
        # The order matters: an event stored after this end was read fails the guard, whatever the boundaries contain.
        end: StreamEnd = yield ReadStreamEnd()
        self._decider.see(end)
        if self._is_outdated:
            return 0
        yield from self._catch_up()
        self._decider.known_end = max(self._decider.known_end, end.sequence)
        for past in self._pasts:
            past.through = end.sequence
        return end.sequence

    # ---- deciding ----------------------------------------------------------------------------------------------

    def _find(self) -> CommandReply | None:
        found = recorded_reply(self._pasts, self._id)
        if found is None:
            return None
        name, reply = found
        if name != self._spec.name:
            raise CommandFailed(self._spec.name, f"command_id={self._id!r} was used for command {name!r} already")
        return reply

    @property
    def _version(self) -> int:
        return max(past.last for past in self._pasts)

    @property
    def _is_newer(self) -> bool:
        """True if the boundary has events later than the version that the caller expects."""
        return self._request.expected_version is not None and self._version > self._request.expected_version

    def _wrong_version(self) -> WrongVersion:
        expected = self._request.expected_version
        assert expected is not None
        return WrongVersion(self._decider.stream, self._filters, expected, self._version)

    def _decide(self) -> CommandDecision | JetSparkError:
        try:
            past = merged_past(self._pasts, self._projection, self._key)
            return CommandDecision.of(self._request.command.decide(past))
        except CommandRefused as refusal:
            return refusal
        except BaseException as error:
            # Boundaries that were read one after the other may not fit together; only an error on matching ones is
            # final.
            return failed_by(self._spec, "decide", error)

    def _decide_for(self, end: int | None) -> tuple[CommandDecision | JetSparkError, Append | None]:
        """The outcome and the append it needs. Events that cannot be stored are an error like one raised by ``decide``:
        it is final only on a boundary that the leader has confirmed."""
        outcome = self._decide()
        if not isinstance(outcome, CommandDecision) or not outcome.events:
            return outcome, None
        try:
            return outcome, self._append(outcome, end)
        except CommandFailed as error:
            return error, None

    # ---- storing -----------------------------------------------------------------------------------------------

    def _append(self, decision: CommandDecision, end: int | None) -> Append:
        self._messages = self._decider.encoder.encode(self._spec.name, self._request.cause, decision, self._time)
        events, timers = self._messages
        boundary = [Guard(past.filter, past.last) for past in self._pasts]
        try:
            guards = plan_guards([each.subject for each in events], boundary, whole_stream=end is not None)
        except NotGuardable as error:
            raise CommandFailed(self._spec.name, str(error)) from error
        messages = (*map(GuardedMessage, events, guards), *map(GuardedMessage, timers))
        return Append(messages, end)

    def _taken_ids(self) -> str:
        ids = ", ".join(repr(each.headers["Nats-Msg-Id"]) for each in self._messages.events)
        return (
            f"an event with one of the ids {ids} is stored already, and not by this command inside its boundary. The "
            "command_id was used before with other fields, or event_id returns the same for two events"
        )

    def _remember(self, decision: CommandDecision, end: int) -> CommandReply:
        """Add the stored events to the cache. The guards have proven that no other event lies between them and the
        events read.

        Args:
            end: The sequence of the last message, which may be a timer.
        """
        events, timers = self._messages
        last = end - len(timers)
        first = last - len(events) + 1
        now = self._decider.server_now()
        stored = [
            PastEvent(
                first + index,
                event,
                message.subject,
                message.headers["Nats-Msg-Id"],
                self._time,
                self._id,
                self._spec.name,
                message.headers[OUTCOME_HEADER].encode(),
                ended=ended_by(message.headers),
                stored=now,
            )
            for index, (event, message) in enumerate(zip(decision.events, events, strict=True))
        ]
        for past in self._pasts:
            own = [entry for entry in stored if matches(past.filter, entry.subject)]
            past.add(own, own[-1].id if own else None)
            past.through = end if self._guards_stream else 0
        if self._projection is not None:
            since = now - datetime.timedelta(seconds=self._spec.remember_s)
            advance_snapshot(self._pasts, self._projection, self._key, last, since)
        for past in self._pasts:
            self._keep(past)
        if not self._is_outdated:
            self._decider.known_end = max(self._decider.known_end, end)
        return CommandReply(command_id=self._id, sequence=last, events=len(events), data=decision.reply)
