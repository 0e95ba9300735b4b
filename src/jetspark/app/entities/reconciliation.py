"""Compares the states of entities with the fold of their events, and repairs differences, while changes continue.

First everything up to one boundary is read, in the order of the stream: events are folded, and the state of an entity
is the last that comes. A boundary is the end of a batch, so no change is cut in two. That finds suspects: a state that
was replaced while this was read does not come at all.

Each suspect is compared again at its newest: its state, then the end of the stream, then the events up to there, then a
check that the state has not changed. Only a difference that remains is reported. An entity that changes each time is
compared where it was read: with the events before its state, and those of the state's own batch.

A repair is an ordinary change: it is stored only if the entity is still as it was compared. So an interrupted run can
be started again, and two runs, even at the same time, repair nothing twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

from jetspark.app.contracts.envelope import derived_id
from jetspark.app.contracts.foreign_envelopes import header_of
from jetspark.app.entities.changes import CHANGES_HEADER, PendingChange, recent_changes
from jetspark.app.entities.committer import asking_again
from jetspark.app.entities.entity_spec import KEY_HEADER, EntitySpec
from jetspark.app.entities.event_comparison import (
    EntityDifference,
    EntityState,
    Folded,
    NotRepairable,
    Outcome,
    Reconciliation,
    Repair,
    difference,
    repair_of,
)
from jetspark.app.extents import Extent
from jetspark.app.projections.router import Recorded, Router
from jetspark.app.stream_history import ReadingRate, StreamHistory
from jetspark.errors import ConfigError, Conflict, DataLoss, MessageNotFound
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.state.losses import first_ever, removes_by_limits
from jetspark.state.scan import head_of

if TYPE_CHECKING:
    from jetspark.aio.stream import Stream
    from jetspark.app.entities.entities import EntityWriter

__all__ = ["reconcile"]

ROUNDS = 20
"""How often a suspect that keeps changing is compared."""
AT_A_TIME = 64
"""Suspects whose states are read at the same time."""
# How long the last message of the stream may be one inside of a batch: batches are stored in milliseconds. A timer that
# has fired looks like one, too.
STABLE_S = 2.0
STABLE_PAUSE_S = 0.005

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the sequence that is read, and the last one."""


async def reconcile(
    writer: EntityWriter,
    spec: EntitySpec,
    *,
    keys: Collection[str] = (),
    repair: bool = False,
    dry_run: bool = False,
    rate: float | None = None,
    on_progress: OnProgress | None = None,
) -> Reconciliation:
    """Compare the entities of a kind with their events; see :meth:`Entities.reconcile`."""
    if spec.fold is None:
        raise ConfigError(
            f"entities {spec.name!r}: nothing says what their events make: declare events= and fold= with app.entities"
        )
    work = _Reconciling(writer, spec, keys, ReadingRate(rate), on_progress or (lambda at, last: None))
    await work.compare()
    await work.judge_suspects(repair=repair, dry_run=dry_run)
    return work.result


class _Reconciling:
    def __init__(
        self,
        writer: EntityWriter,
        spec: EntitySpec,
        keys: Collection[str],
        pace: ReadingRate,
        on_progress: OnProgress,
    ) -> None:
        assert spec.fold is not None
        self._writer, self._spec, self._fold, self._pace, self._on_progress = writer, spec, spec.fold, pace, on_progress
        self._prefix = spec.filter.removesuffix("*")
        self._router = Router([spec.fold.spec], writer.app.catalogue)
        self._history = StreamHistory(writer.js, writer.app.stream, [*self._router.filters, f"{self._prefix}*"])
        self._wanted = {spec.subject_of(key)[len(self._prefix) :] for key in keys}
        self._stream: Stream | None = None
        self._read = 0
        """Everything up to this sequence was read."""
        self._states: dict[str, EntityState] = {}
        self._folded: dict[str, Folded] = {}
        self._names: dict[str, str] = {}
        """The keys of tokens that are hashes."""
        self._tail: dict[str, list[tuple[int, str, Any]]] = {}
        """Events behind the first boundary, of suspects: sequence, batch, event."""
        self._is_tail = False
        self.result = Reconciliation(entities=spec.name, truth=spec.truth)

    async def compare(self) -> None:
        """Read everything up to one boundary."""
        await self._advance()
        self.result.boundary = self._read
        self.result.keys = len(self._states.keys() | self._folded.keys())
        self._tail = {token: [] for token in self._states.keys() | self._folded.keys() if self._differs(token)}
        self._is_tail = True

    async def judge_suspects(self, *, repair: bool, dry_run: bool) -> None:
        """Compare the suspects again, until each was compared without a change in between."""
        suspects = sorted(self._tail)
        for _ in range(ROUNDS):
            if not suspects:
                return
            states = await self._current(suspects)
            await self._advance()
            still = await self._current(suspects)
            left = []
            for token in suspects:
                if states[token].revision != still[token].revision:
                    is_decided = self._was_equal(token, states[token])
                else:
                    is_decided = await self._judge(token, states[token], repair=repair, dry_run=dry_run)
                if not is_decided:
                    left.append(token)
            suspects = left
        self.result.moving = [self._key(token) for token in suspects]

    async def _judge(self, token: str, state: EntityState, *, repair: bool, dry_run: bool) -> bool:
        folded = self._at(token, (self._read, ""))
        kind = difference(self._spec, state, folded)
        if kind is None:
            return True
        outcome: Outcome = "found"
        note = ""
        if repair or dry_run:
            try:
                plan = repair_of(self._spec, token, self._names.get(token), state, folded)
                note = _describe(plan)
                outcome = "would repair" if dry_run else "repaired"
                if not dry_run:
                    await self._repair(token, state, plan)
            except NotRepairable as reason:
                outcome, note = "not repairable", str(reason)
            except Conflict:
                return False
        self.result.differences.append(
            EntityDifference(
                key=self._key(token),
                kind=kind,
                state=_text(state.data),
                folded=folded.error or _text(folded.data),
                sequence=self._read,
                outcome=outcome,
                note=note,
            )
        )
        return True

    async def _repair(self, token: str, state: EntityState, plan: Repair) -> None:
        id = self._writer.change_id(f"{self._prefix}{token}")
        key = self._names.get(token)
        change = PendingChange(
            id=id,
            subject=f"{self._prefix}{token}",
            revision=state.revision,
            state=plan.state,
            recent=state.recent,
            events=[
                self._writer.encode(event, derived_id(id, "event", number), None)
                for number, event in enumerate(plan.events)
            ],
            headers={} if key is None else self._spec.key_headers(key),
        )
        await self._writer.committer.commit(change)

    # ---- reading -----------------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        """Read on to the end that the stream has now."""
        info, last = await self._end()
        head = head_of(info)
        first = max(self._read + 1, head.first)
        extent = Extent(stream=head.stream, created=head.created, first=first, last=last)
        async with aclosing(self._history.messages(extent, self._pace, may_lack=True)) as portions:
            async for portion in portions:
                self._take(portion.messages)
                self._on_progress(portion.last, last)
        _check_is_whole((await self._end())[0])
        self._read = max(self._read, last)

    async def _end(self) -> tuple[StreamInfo, int]:
        """The end of the stream, which is not inside of a batch."""
        if self._stream is None:
            self._stream = await self._writer.js.stream(self._writer.app.stream)
        stream, loop = self._stream, asyncio.get_running_loop()
        give_up_at, seen = loop.time() + STABLE_S, -1
        while True:
            info = await asking_again(stream.info)
            last = info.state.last_sequence
            if last != seen:
                give_up_at, seen = loop.time() + STABLE_S, last
            message = await _at_sequence(stream, last)
            if message is not None and not _is_within_batch(message):
                return info, last
            if last == 0 or loop.time() > give_up_at:
                return info, last
            await asyncio.sleep(STABLE_PAUSE_S)

    def _take(self, messages: Sequence[Recorded]) -> None:
        spec, prefix, events = self._spec, self._prefix, []
        for message in messages:
            if message.subject.startswith(prefix):
                token = message.subject[len(prefix) :]
                if not self._is_tail and self._is_wanted(token):
                    self._states[token] = _state(message.data, message.sequence, message.headers)
                    self._learn(token, spec.key_in(token, _said(message.headers)))
            else:
                events.append(message)
        batch = self._router.decode(events, [each.sequence for each in events], events.__getitem__)
        failures = self._router.route(batch).failures
        for index, (message, event) in enumerate(zip(events, batch.events, strict=True)):
            self.result.unreadable += index in failures
            if event is None or type(event) not in self._fold.events or index in failures:
                continue
            if not self._is_tail:
                self.result.events += 1
            for token, key in self._fold.tokens_of(event):
                if self._is_wanted(token):
                    self._learn(token, key)
                    self._add(token, message, event)

    def _add(self, token: str, message: Recorded, event: object) -> None:
        if not self._is_tail:
            folded = self._folded.get(token, Folded())
            self._folded[token] = folded.then(self._spec, token, message.sequence, event)
        elif token in self._tail:
            batch = header_of(message.headers, "Nats-Batch-Id") or ""
            self._tail[token].append((message.sequence, batch, event))

    def _is_wanted(self, token: str) -> bool:
        return not self._wanted or token in self._wanted

    def _learn(self, token: str, key: str | None) -> None:
        if key is not None:
            self._names[token] = key

    def _key(self, token: str) -> str:
        return self._names.get(token, f"{self._spec.name}.{token}")

    async def _current(self, tokens: Iterable[str]) -> dict[str, EntityState]:
        """The states by the word of the leader."""
        assert self._stream is not None
        stream, names = self._stream, list(tokens)
        found: dict[str, EntityState] = {}
        for begin in range(0, len(names), AT_A_TIME):
            some = names[begin : begin + AT_A_TIME]
            states = await asyncio.gather(*(_last_state(stream, f"{self._prefix}{token}") for token in some))
            found |= zip(some, states, strict=True)
        return found

    # ---- comparing ---------------------------------------------------------------------------------------------

    def _differs(self, token: str) -> bool:
        state, folded = self._states.get(token, EntityState(None)), self._folded.get(token, Folded())
        return difference(self._spec, state, folded) is not None

    def _at(self, token: str, place: tuple[int, str]) -> Folded:
        """The fold of a suspect's events up to a sequence, including later ones of the same batch."""
        last, own = place
        folded = self._folded.get(token, Folded())
        for sequence, batch, event in self._tail[token]:
            if sequence <= last or (own and batch == own):
                folded = folded.then(self._spec, token, sequence, event)
        return folded

    def _was_equal(self, token: str, state: EntityState) -> bool:
        """True if a suspect that has changed since was equal to its events at the sequence where its state was read."""
        if state.revision <= self.result.boundary:
            return False  # what was folded may be beyond it
        return difference(self._spec, state, self._at(token, (state.revision, state.batch))) is None


async def _at_sequence(stream: Stream, sequence: int) -> StoredMessage | None:
    try:
        return await asking_again(lambda: stream.get_message(sequence, direct=False)) if sequence else None
    except MessageNotFound:
        return None


async def _last_state(stream: Stream, subject: str) -> EntityState:
    try:
        message = await asking_again(lambda: stream.get_message(last_for=subject, direct=False))
    except MessageNotFound:
        return EntityState(None)
    return _state(message.data, message.sequence, message.headers)


def _state(data: bytes, revision: int, headers: Any) -> EntityState:
    is_gone = header_of(headers, "KV-Operation", "Nats-Marker-Reason") is not None
    recent = recent_changes({CHANGES_HEADER: header_of(headers, CHANGES_HEADER) or ""})
    return EntityState(None if is_gone else data, revision, recent, header_of(headers, "Nats-Batch-Id") or "")


def _said(headers: Any) -> dict[str, str]:
    said = header_of(headers, KEY_HEADER)
    return {} if said is None else {KEY_HEADER: said}


def _is_within_batch(message: StoredMessage) -> bool:
    return "Nats-Batch-Sequence" in message.headers and "Nats-Batch-Commit" not in message.headers


def _check_is_whole(info: StreamInfo) -> None:
    """A stream of entities loses its first messages when their states are replaced. Only limits drop events.

    Raises:
        DataLoss: The stream has limits, and its beginning is gone.
    """
    config, first = info.config, first_ever(info.config)
    if removes_by_limits(config) and info.state.first_sequence > first:
        remedy = (
            "the stream drops old messages by its limits, so the fold of an entity's events is incomplete; keep "
            "the events for good to reconcile"
        )
        raise DataLoss(config.name, first, info.state.first_sequence, remedy)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="replace")


def _describe(plan: Repair) -> str:
    if plan.events:
        return f"events {', '.join(map(repr, plan.events))}"
    return f"state {_text(plan.state)}"
