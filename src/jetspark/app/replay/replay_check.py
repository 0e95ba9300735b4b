"""``check_replay``: a test that a projection makes the same states of the same events, however they are folded.

Engines fold events one by one or in batches, restart in the middle, fold some events twice, and run in several
processes on different days. This is harmless because ``key`` and ``apply`` are pure. The check folds a test's events in
such ways, and names the first event after which two folds differ.

A producer may also store an event twice, with one id and two sequences. If the projection is declared with
``unique_ids``, that must not change a state either.
"""

from __future__ import annotations

import datetime
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jetspark.app.clock import microseconds, utc_now
from jetspark.app.contracts.envelope import decode, encode
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.state_header import MAX_UNIQUE_IDS, Identified, digest_of
from jetspark.app.projections.windows import LATE
from jetspark.app.replay.comparison import KeyContent
from jetspark.app.replay.history import spec_of
from jetspark.core.arguments import text
from jetspark.core.numbers import whole as whole_number
from jetspark.errors import ConfigError, JetSparkError
from jetspark.state.changes import NOTHING, Current

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec, HasSpec

__all__ = ["NotReplayable", "ReplayCheckOptions", "check_replay"]

# Long enough that a fold that reads the clock gets another time.
TICK_S = 0.002
CHILD = (
    "import sys; from jetspark.app.replay.replay_check import run_child; run_child(sys.stdin.buffer, sys.stdout.buffer)"
)


class NotReplayable(AssertionError):
    """Two folds of the same events have different states. ``index`` is the first event after which they differ."""

    def __init__(self, projection: str, index: int, event: object, reason: str) -> None:
        super().__init__(f"projection {projection!r}, events[{index}] = {event!r}: {reason}")
        self.projection, self.index, self.event, self.reason = projection, index, event, reason


class _Step(NamedTuple):
    """The content of a key after an event."""

    event: int
    key: str
    content: KeyContent


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCheckOptions:
    """Options of :func:`check_replay`."""

    rounds: int = 25
    """Random ways to cut the events into batches, and to repeat some of them."""
    seed: int = 0
    """The seed of the random rounds."""
    may_park: bool = False
    """Accept events that ``apply`` or an invariant refuses; their keys stay parked."""
    other_process: bool = True
    """Fold once more in another process, where sets may have another order. Needs a projection and events that can be
    imported; others, such as classes inside a test function, are not folded there.
    """
    duplicates: int | None = None
    """In each round, store some events once more with their ids, up to this many events later; no state may change. By
    default the projection's ``unique_ids``; 0 turns it off.
    """

    def __post_init__(self) -> None:
        if self.duplicates is not None:
            whole_number("duplicates", self.duplicates, low=0, instead="or None for as many as unique_ids")


def check_replay(
    app: HasSpec,
    projection: str,
    events: Iterable[object],
    options: ReplayCheckOptions | None = None,
    *,
    times: Iterable[datetime.datetime] | None = None,
    ids: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Fold events in many ways, and return the state of each key; with windows the keys are ``"<key>.<window>"``.

    Args:
        events: In the order of the stream.
        times: When each event was sent and stored, for windows; by default all at one moment.
        ids: The id of each event, for events that are stored more than once; by default all differ.

    Raises:
        NotReplayable: Two folds differ; or an event does not survive its encoding, cannot be applied, or changes a
            state when it is stored again.
    """
    app, options = app.spec, options or ReplayCheckOptions()
    spec = spec_of(app, projection)
    listed = _StoredEvents(app.source, events, times, ids)
    span = spec.unique_ids if options.duplicates is None else options.duplicates
    _check_encoding(app, spec, listed)
    whole = _fold(spec, listed)
    for step in whole:
        if step.content.parked is not None and not options.may_park:
            reason = f"it cannot be applied to key {step.key!r}: {step.content.parked.reason}"
            raise NotReplayable(spec.name, step.event, listed[step.event], reason)
    time.sleep(TICK_S)
    _compare(spec, listed, whole, _fold(spec, listed), "a second run, a moment later,")
    _compare(spec, listed, whole, _fold(spec.renewed(), listed), "a new object of the class")
    _compare(spec, listed, whole, _fold(spec, listed, is_renewed=True), "a new object of the class for each event")
    last = {step.key: step.content for step in whole}
    rng = random.Random(options.seed)
    for number in range(options.rounds):
        _compare_cuts(spec, listed, whole, last, rng, number)
        if span:
            _check_duplicates(spec, listed, rng, span)
    if options.other_process:
        _compare_child(spec, listed, whole)
    states = {spec.key_text(key): spec.decode_state(each.value) for key, each in last.items() if each.value is not None}
    return {key: state for key, state in states.items() if state is not None}


class _StoredEvents(list[Any]):
    """Events, with the id and the time of each."""

    def __init__(
        self,
        source: str,
        events: Iterable[object],
        times: Iterable[datetime.datetime] | None,
        ids: Iterable[str] | None,
    ) -> None:
        super().__init__(events)
        now = utc_now()
        self.times = [now] * len(self) if times is None else list(times)
        self.ids = [f"check-{index}" for index in range(len(self))] if ids is None else list(ids)
        for name, given in (("times", self.times), ("ids", self.ids)):
            if len(given) != len(self):
                raise ConfigError(f"{name}: expected one for each of {len(self)} events, got {len(given)}")
        for id in self.ids:
            text("ids", id)
        self._digests = [digest_of(source, id) for id in self.ids]

    def given(self, spec: ProjectionSpec, index: int) -> Any:
        """The event as ``KeyState.apply`` takes it."""
        return Identified(self._digests[index], self[index]) if spec.unique_ids else self[index]


def _check_encoding(app: AppSpec, spec: ProjectionSpec, events: _StoredEvents) -> None:
    catalogue = app.catalogue
    for index, event in enumerate(events):
        if type(event) not in spec.events:
            names = ", ".join(kind.__name__ for kind in spec.events)
            raise NotReplayable(
                spec.name, index, event, f"the projection does not take this type of event; it takes {names}"
            )
        try:
            sent = encode(event, id=events.ids[index], source=app.source, time=events.times[index])
            read = decode(sent.subject, sent.data, sent.headers, catalogue).event
        except JetSparkError as error:
            raise NotReplayable(spec.name, index, event, f"it cannot be stored and read: {error}") from error
        if read != event:
            raise NotReplayable(spec.name, index, event, f"decoding it gives a different event: {read!r}")


def _fold(spec: ProjectionSpec, events: _StoredEvents, *, is_renewed: bool = False) -> list[_Step]:
    """Fold the events one by one; with ``is_renewed`` by a new object of the class for each event."""
    states: dict[str, KeyState] = {}
    steps = []
    for index, event in enumerate(events):
        if is_renewed:
            spec = spec.renewed()
        before = repr(event)
        for key in _keys(spec, index, events):
            state = states.setdefault(key, KeyState(spec, key, NOTHING))
            state.apply(spec, key, index + 1, events.given(spec, index))
            steps.append(_Step(index, key, KeyContent.of_state(state)))
        if repr(event) != before:
            raise NotReplayable(
                spec.name, index, event, "apply or key has changed the event object, which other code reads"
            )
    return steps


def _keys(
    spec: ProjectionSpec, index: int, events: _StoredEvents, stored: datetime.datetime | None = None
) -> tuple[str, ...]:
    event, moment = events[index], events.times[index]
    try:
        return spec.windowed_keys_of(event, moment, microseconds(stored or moment))
    except Exception as error:
        raise NotReplayable(spec.name, index, event, f"key() raised {type(error).__name__}: {error}") from error


def _compare(spec: ProjectionSpec, events: _StoredEvents, one: list[_Step], other: list[_Step], what: str) -> None:
    for first, second in zip(one, other, strict=False):
        if first != second:
            reason = (
                f"{what} gives another state: {first.key}: {first.content}, and {second.key}: {second.content}. apply "
                "and key may use the state and the event alone: no clock, no randomness, no attributes of the object, "
                "no order of sets"
            )
            raise NotReplayable(spec.name, first.event, events[first.event], reason)
    if len(one) != len(other):
        index = (one if len(one) > len(other) else other)[min(len(one), len(other))].event
        raise NotReplayable(spec.name, index, events[index], f"{what} gives other keys")


def _compare_cuts(
    spec: ProjectionSpec,
    events: _StoredEvents,
    whole: list[_Step],
    last: dict[str, KeyContent],
    rng: random.Random,
    number: int,
) -> None:
    """Fold in batches from stored states, each batch with some earlier events again, as after a crash."""
    stored: dict[str, Current] = {}
    at = revision = 0
    while at < len(events):
        begin, at = rng.randrange(at + 1), rng.randint(at + 1, len(events))
        states: dict[str, KeyState] = {}
        for index in range(begin, at):
            for key in _keys(spec, index, events):
                state = states.setdefault(key, KeyState(spec, key, stored.get(key, NOTHING)))
                state.apply(spec, key, index + 1, events.given(spec, index))
        for key, state in states.items():
            change = state.change(spec, key)
            if change is not None:
                revision += 1
                value = change.value if change.operation == "put" else None
                stored[key] = Current(value, change.sequence or 0, revision, mark=change.mark)
        done = {step.key: step.content for step in whole if step.event < at}
        for key, expected in done.items():
            found = KeyContent.of_current(stored.get(key, NOTHING))
            if found != expected:
                reason = (
                    f"in batches with repetitions (round {number}) key {key!r} is {found}, and {expected} in one go"
                )
                raise NotReplayable(spec.name, at - 1, events[at - 1], reason)
    assert last.keys() >= stored.keys()


def _check_duplicates(spec: ProjectionSpec, events: _StoredEvents, rng: random.Random, span: int) -> None:
    """Fold the events with some of them stored again, up to ``span - 1`` other events later."""
    states: dict[str, KeyState] = {}
    again: dict[int, list[int]] = {}
    seen: set[str] = set()
    for index, id in enumerate(events.ids):
        is_first = id not in seen
        seen.add(id)
        if is_first and rng.random() < 0.5:
            again.setdefault(min(index + rng.randrange(span), len(events) - 1), []).append(index)
    sequence = 0
    for at in range(len(events)):
        for index, is_again in ((at, False), *((each, True) for each in again.get(at, ()))):
            sequence += 1
            for key in _keys(spec, index, events, events.times[at]):
                state = states.setdefault(key, KeyState(spec, key, NOTHING))
                before = KeyContent.of_state(state)
                state.apply(spec, key, sequence, events.given(spec, index))
                after = KeyContent.of_state(state)
                if is_again and (before.value, before.parked) != (after.value, after.parked):
                    reason = (
                        f"stored again with its id, {at - index} events later, it changes key {key!r} from {before} to "
                        f"{after}; {_remedy(spec, key, span)}"
                    )
                    raise NotReplayable(spec.name, index, events[index], reason)


def _remedy(spec: ProjectionSpec, key: str, span: int) -> str:
    if not spec.unique_ids:
        return f"declare the projection with unique_ids={min(span, MAX_UNIQUE_IDS)} or more"
    if key.endswith(f".{LATE}"):
        return "by then it is late for its window: give the window a longer grace_s, or late='keep'"
    return f"declare more than unique_ids={spec.unique_ids}"


# ---- another process -------------------------------------------------------------------------------------------------


def _compare_child(spec: ProjectionSpec, events: _StoredEvents, whole: list[_Step]) -> None:
    if spec.kind.__module__ == "__main__":
        return
    try:
        work = pickle.dumps((sys.path, spec, events))
    except (pickle.PicklingError, AttributeError, TypeError):
        return
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", CHILD], input=work, capture_output=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the other process failed: {done.stderr.decode(errors='replace')[-2000:]}")
    _compare(spec, events, whole, pickle.loads(done.stdout), "another process")


def run_child(source: Any, target: Any) -> None:
    """In the other process."""
    _, spec, events = pickle.load(source)
    target.write(pickle.dumps(_fold(spec, events)))
