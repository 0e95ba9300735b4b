"""Projections that look up the state of their key in others, as of the event before."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from support.projections import Balances, Closed, Large, Moved, Opened, some_events

from jetspark.app import App, Event
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.projection_spec import ProjectionSpec, make_spec
from jetspark.app.projections.windows import Window
from jetspark.app.testing import check_replay
from jetspark.errors import ConfigError
from jetspark.state.changes import Current


def bank(version: int = 1, **options: Any) -> App:
    app = App("bank", stream="BANK", subjects=["bank.>"])
    app.projection("balances", events=[Opened, Moved, Closed], bucket="balances", version=version)(Balances)
    app.projection("large", events=[Moved], bucket="large", lookups=["balances"], **options)(Large)
    return app


def fold_all(spec: ProjectionSpec, events: list[Event]) -> dict[str, KeyState]:
    states: dict[str, KeyState] = {}
    for sequence, event in enumerate(events, 1):
        for key in spec.keys_of(event) if type(event) in spec.events else ():
            states.setdefault(key, KeyState(spec, key, Current(None, 0, 0))).apply(spec, key, sequence, event)
    return states


@pytest.mark.parametrize("seed", range(2))
def test_apply_sees_the_other_state_as_all_events_before_made_it(seed: int) -> None:
    events = some_events(random.Random(seed), 150, is_bad=False)
    app = bank()
    expected: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        if isinstance(event, Moved):
            before = fold_all(app.projections["balances"], events[:index]).get(event.source)
            if (
                before is not None
                and before.value is not None
                and event.cents > msgspec.json.decode(before.value)["cents"]
            ):
                expected.setdefault(event.source, []).append(event.cents)
    spec = app.projections["large"]
    states = fold_all(spec, events)
    found = {key: spec.decode_state(state.value) for key, state in states.items() if state.value is not None}
    assert {key: state for key, state in found.items() if state is not None} == expected
    assert len(expected) > 3
    assert found == check_replay(app, "large", events)  # in batches, with repetitions, in another process
    balances = fold_all(app.projections["balances"], events)
    for key, state in states.items():  # the copy is what the other projection has, byte for byte
        copy = msgspec.json.decode(state.value, type=dict[str, msgspec.Raw])["lookups"] if state.value else b"{}"
        copies = msgspec.json.decode(copy, type=dict[str, tuple[int, msgspec.Raw]])
        assert balances[key].value == (bytes(copies["balances"][1]) if copies else None)


def test_an_event_that_the_other_cannot_apply_parks_the_key() -> None:
    spec = bank().projections["large"]
    events = [Opened(account="a"), Moved(source="a", target="b", cents=666), Moved(source="a", target="b", cents=5)]
    parked = fold_all(spec, events)["a"].parked
    assert parked is not None
    assert (parked.sequence, parked.reason) == (2, "ValueError: cannot be applied")


def test_a_copy_of_another_version_of_the_fold_parks_the_key_and_says_what_to_do() -> None:
    value = fold_all(bank().projections["large"], [Opened(account="a")])["a"].value
    spec = bank(version=2).projections["large"]
    with pytest.raises(Exception, match="'balances' is version 2: give projection 'large' another version"):
        spec.fold("a", value, Moved(source="a", target="b", cents=5))


def test_a_key_that_ends_in_both_has_nothing() -> None:
    spec = bank().projections["large"]
    states = fold_all(spec, [Opened(account="a"), Closed(account="a"), Opened(account="b")])
    assert states["a"].value is None
    assert spec.decode_state(states["b"].value or b"") is None


def test_what_cannot_be_looked_up_is_refused() -> None:
    app = bank()
    with pytest.raises(ConfigError, match=r"lookups=\['nobody'\]: expected some that are declared above: balances, l"):
        app.projection("x", events=[Moved], bucket="x", lookups=["nobody"])(Large)
    with pytest.raises(ConfigError, match="lookups= is not supported with window="):
        app.projection("x", events=[Moved], bucket="x", lookups=["balances"], window=Window(size_s=60))(Large)
    with pytest.raises(ConfigError, match=r"def apply\(self, state, event, lookup\)"):

        @app.projection("x", events=[Moved], bucket="x", lookups=["balances"])
        class _Short:
            def key(self, event: Moved) -> str:
                return event.source

            def apply(self, state: Any, event: Moved) -> Any: ...


def test_one_with_lookups_can_be_looked_up() -> None:
    app = bank()

    class Doubled:
        def key(self, event: Moved) -> str:
            return event.source

        def apply(self, state: int | None, event: Moved, lookup: Any) -> int:
            return len(lookup["large"] or [])

    app.projection("doubled", events=[Moved], bucket="doubled", lookups=["large"])(Doubled)
    spec = app.projections["doubled"]
    moves = [Opened(account="a"), *(Moved(source="a", target="b", cents=5) for _ in range(4))]
    assert spec.decode_state(fold_all(spec, moves)["a"].value or b"") == 3
    assert make_spec(spec.name, spec.kind, spec.options).events == spec.events
