"""``check_replay``: whether a projection makes the same state of the same events, however and whenever they come.

An engine may fold events one by one or many at a time, begin again in the middle, see some of them twice, and run in
another process on another day. What makes all that harmless is that ``key`` and ``apply`` are pure. This runs them in
such ways on events that a test gives, and names the first event after which two runs differ.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from jetspark.app.clock import utc_now
from jetspark.app.contracts.envelope import decode, encode
from jetspark.app.dead_letters.store import microseconds
from jetspark.app.projections.declaring import ProjectionSpec
from jetspark.app.projections.folding import KeyState
from jetspark.app.replay.contents import KeyContent
from jetspark.app.replay.history import spec_of
from jetspark.errors import ConfigError, JetSparkError
from jetspark.state.changes import NOTHING, Current

if TYPE_CHECKING:
    from jetspark.app.application import App

__all__ = ["NotReplayable", "check_replay"]

# A clock that is read shows another time after this long.
TICK_S = 0.002
CHILD = "import sys; from jetspark.app.replay.checking import run_child; run_child(sys.stdin.buffer, sys.stdout.buffer)"


class NotReplayable(AssertionError):
    """A projection does not make the same state of the same events.

    ``index`` is that of the first event after which two runs differ.
    """

    def __init__(self, projection: str, index: int, event: Any, reason: str) -> None:
        super().__init__(f"projection {projection!r}, events[{index}] = {event!r}: {reason}")
        self.projection, self.index, self.event, self.reason = projection, index, event, reason


class _Step(NamedTuple):
    """What one event has made of one key."""

    event: int
    key: str
    content: KeyContent


def check_replay(
    app: App,
    projection: str,
    events: Iterable[Any],
    *,
    rounds: int = 25,
    seed: int = 0,
    may_park: bool = False,
    other_process: bool = True,
    times: Iterable[datetime.datetime] | None = None,
) -> dict[str, Any]:
    """Fold events in many ways, and return the state of each key; with windows by ``"<key>.<window>"``.

    Args:
        events: In the order of the stream.
        times: When each of them was sent and stored, for windows; all at one moment, if not given.
        rounds: Random ways to cut the events into batches, and to repeat some of them.
        seed: Of those.
        may_park: Events that ``apply`` or an invariant refuses are part of the test; their keys stay parked.
        other_process: Fold once more in another process, where sets may have another order. Needs a projection and
            events that can be imported, and is left out for others, such as classes inside a test function.

    Raises:
        NotReplayable: Two runs differ, an event does not survive its encoding, or cannot be applied.
    """
    spec = spec_of(app, projection)
    listed = _Timed(events, times)
    _check_encoding(app, spec, listed)
    whole = _fold(spec, listed)
    for step in whole:
        if step.content.parked is not None and not may_park:
            reason = f"it cannot be applied to key {step.key!r}: {step.content.parked.reason}"
            raise NotReplayable(spec.name, step.event, listed[step.event], reason)
    time.sleep(TICK_S)
    _compare(spec, listed, whole, _fold(spec, listed), "a second run, a moment later,")
    _compare(spec, listed, whole, _fold(spec.renewed(), listed), "a new object of the class")
    _compare(spec, listed, whole, _fold(spec, listed, is_renewed=True), "a new object of the class for each event")
    last = {step.key: step.content for step in whole}
    rng = random.Random(seed)
    for number in range(rounds):
        _compare_cuts(spec, listed, whole, last, rng, number)
    if other_process:
        _compare_child(spec, listed, whole)
    states = {spec.key_text(key): spec.decode_state(each.value) for key, each in last.items() if each.value is not None}
    return {key: state for key, state in states.items() if state is not None}


class _Timed(list[Any]):
    """Events, and when each was sent and stored."""

    def __init__(self, events: Iterable[Any], times: Iterable[datetime.datetime] | None) -> None:
        super().__init__(events)
        now = utc_now()
        self.times = [now] * len(self) if times is None else list(times)
        if len(self.times) != len(self):
            raise ConfigError(f"times: expected one for each of {len(self)} events, got {len(self.times)}")


def _check_encoding(app: App, spec: ProjectionSpec, events: _Timed) -> None:
    catalogue = app.catalogue
    for index, event in enumerate(events):
        if type(event) not in spec.events:
            names = ", ".join(kind.__name__ for kind in spec.events)
            raise NotReplayable(spec.name, index, event, f"the projection is not made of its type; it takes {names}")
        try:
            sent = encode(event, id=f"check-{index}", source=app.source, time=events.times[index])
            read = decode(sent.subject, sent.data, sent.headers, catalogue).event
        except JetSparkError as error:
            raise NotReplayable(spec.name, index, event, f"it cannot be stored and read: {error}") from error
        if read != event:
            raise NotReplayable(spec.name, index, event, f"what a stream gives back is another event: {read!r}")


def _fold(spec: ProjectionSpec, events: _Timed, *, is_renewed: bool = False) -> list[_Step]:
    """One event after the other; with ``is_renewed`` the class is made anew for each."""
    states: dict[str, KeyState] = {}
    steps = []
    for index, event in enumerate(events):
        if is_renewed:
            spec = spec.renewed()
        before = repr(event)
        for key in _keys(spec, index, events):
            state = states.setdefault(key, KeyState(spec, key, NOTHING))
            state.apply(spec, key, index + 1, event)
            steps.append(_Step(index, key, KeyContent.of_state(state)))
        if repr(event) != before:
            raise NotReplayable(spec.name, index, event, "apply or key has changed the event, which others read, too")
    return steps


def _keys(spec: ProjectionSpec, index: int, events: _Timed) -> tuple[str, ...]:
    event, moment = events[index], events.times[index]
    try:
        return spec.windowed_keys_of(event, moment, microseconds(moment))
    except Exception as error:
        raise NotReplayable(
            spec.name, index, event, f"its key cannot be told: {type(error).__name__}: {error}"
        ) from error


def _compare(spec: ProjectionSpec, events: _Timed, one: list[_Step], other: list[_Step], what: str) -> None:
    for first, second in zip(one, other, strict=False):
        if first != second:
            reason = (
                f"{what} makes something else of it: {first.key}: {first.content}, and {second.key}: {second.content}. "
                "apply and key must go by the state and the event alone: no clock, no randomness, no memory in the "
                "object, no order of sets"
            )
            raise NotReplayable(spec.name, first.event, events[first.event], reason)
    if len(one) != len(other):
        index = (one if len(one) > len(other) else other)[min(len(one), len(other))].event
        raise NotReplayable(spec.name, index, events[index], f"{what} has other keys for it")


def _compare_cuts(
    spec: ProjectionSpec,
    events: _Timed,
    whole: list[_Step],
    last: dict[str, KeyContent],
    rng: random.Random,
    number: int,
) -> None:
    """In batches, with events before each batch once more, as after a crash; each batch from what was stored."""
    stored: dict[str, Current] = {}
    at = revision = 0
    while at < len(events):
        begin, at = rng.randrange(at + 1), rng.randint(at + 1, len(events))
        states: dict[str, KeyState] = {}
        for index in range(begin, at):
            for key in _keys(spec, index, events):
                state = states.setdefault(key, KeyState(spec, key, stored.get(key, NOTHING)))
                state.apply(spec, key, index + 1, events[index])
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


# ---- another process -------------------------------------------------------------------------------------------------


def _compare_child(spec: ProjectionSpec, events: _Timed, whole: list[_Step]) -> None:
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
