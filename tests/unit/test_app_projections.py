"""Projections, as far as they are pure: declarations, routes, and what events do to a key."""

from __future__ import annotations

import datetime
import random
from typing import Any

import msgspec
import pytest
from support.projections import Routing, route_one, sorted_into

from jetspark.app import DELETE, App, Event, encode
from jetspark.app.clock import utc_now
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.projection_spec import ProjectionArguments, ProjectionSpec
from jetspark.app.projections.router import KeyRows, Recorded, Router
from jetspark.app.projections.state_header import FOREIGN, Mark, Parked
from jetspark.app.projections.windows import Window
from jetspark.errors import ConfigError, UsageError
from jetspark.jetstream.kv import KVConfig
from jetspark.state.changes import Change, Current


class Opened(Event, type="account.opened", version=1, key="account", subject="accounts.{account}.opened"):
    account: str


class Moved(Event, type="account.moved", version=1, key="source", subject="accounts.{source}.moved"):
    source: str
    target: str
    cents: int


class Closed(Event, type="account.closed", version=1, key="account", subject="accounts.{account}.closed"):
    account: str


class Account(msgspec.Struct):
    cents: int = 0


class Balances:
    def key(self, event: Opened | Moved | Closed) -> Any:
        return [event.source, event.target] if isinstance(event, Moved) else event.account

    def apply(self, state: Account | None, event: Opened | Moved | Closed, key: str) -> Any:
        match event:
            case Opened():
                return Account()
            case Closed():
                return DELETE
            case Moved():
                if state is None:
                    return None
                state.cents += event.cents if key == event.target else -event.cents
                return state


def balances(**options: Any) -> ProjectionSpec:
    return ProjectionSpec(
        "balances", Balances, ProjectionArguments(events=[Opened, Moved, Closed], bucket="balances", **options)
    )


NOTHING = Current(None, 0, 0)


def fold(spec: ProjectionSpec, key: str, events: list[tuple[int, Event]], start: Current = NOTHING) -> KeyState:
    state = KeyState(spec, key, start)
    for sequence, event in events:
        if key in spec.keys_of(event):
            state.apply(spec, key, sequence, event)
    return state


def stored(change: Change, revision: int) -> Current:
    value = change.value if change.operation == "put" else None
    return Current(value, change.sequence or 0, revision, mark=change.mark)


HISTORY: list[tuple[int, Event]] = [
    (1, Opened(account="a")),
    (2, Opened(account="b")),
    (4, Moved(source="a", target="b", cents=5)),
    (7, Closed(account="a")),
    (8, Moved(source="b", target="a", cents=1)),
]


def test_an_event_goes_to_each_of_its_keys_and_says_so_to_apply() -> None:
    spec = balances()
    assert fold(spec, "a", HISTORY[:3]).value == b'{"cents":-5}'
    assert fold(spec, "b", HISTORY[1:3]).value == b'{"cents":5}'


class OtherWords:
    """The first parameter is the state, whatever it is called."""

    def key(self, opened: Opened) -> str:
        return opened.account

    def apply(self, before: Account | None, opened: Opened) -> Account:
        return Account(cents=1 if before is None else before.cents + 1)


def test_the_state_is_what_the_first_parameter_says_whatever_its_name() -> None:
    spec = ProjectionSpec("counts", OtherWords, ProjectionArguments(events=[Opened], bucket="counts"))
    assert fold(spec, "a", [(1, Opened(account="a")), (2, Opened(account="a"))]).value == b'{"cents":2}'


def test_a_type_of_state_that_cannot_be_looked_up_is_refused_and_one_of_events_need_not_be() -> None:
    class Hidden(msgspec.Struct):
        cents: int = 0

    class Unknown:
        def key(self, event: Opened) -> str:
            return event.account

        def apply(self, state: Hidden | None, event: Opened) -> Hidden:
            return state or Hidden()

    class Known(Unknown):
        def apply(self, state: dict[str, int] | None, event: Hidden) -> dict[str, int]:  # type: ignore[override]
            return {"cents": 1}

    with pytest.raises(
        ConfigError, match=r"^projection 'p': state: 'Hidden \| None': name 'Hidden' is not defined; .*module"
    ):
        ProjectionSpec("p", Unknown, ProjectionArguments(events=[Opened], bucket="b"))
    spec = ProjectionSpec("p", Known, ProjectionArguments(events=[Opened], bucket="b"))
    assert fold(spec, "a", [(1, Opened(account="a"))]).value == b'{"cents":1}'


def test_a_deleted_key_keeps_its_sequence_and_an_old_event_does_not_raise_it() -> None:
    spec = balances()
    state = fold(spec, "a", HISTORY[:4])
    change = state.change(spec, "a")
    assert change is not None
    assert (change.operation, change.sequence, change.mark) == ("delete", 7, "1")
    again = fold(spec, "a", HISTORY[:4], stored(change, 9))
    assert again.change(spec, "a") is None
    assert (again.known, again.applied) == (3, 0)


def test_an_ignored_event_of_a_key_that_is_not_there_stores_nothing() -> None:
    spec = balances()
    assert fold(spec, "c", [(3, Moved(source="c", target="d", cents=1))]).change(spec, "c") is None


@pytest.mark.parametrize("seed", range(50))
def test_any_cut_into_batches_and_any_repetition_gives_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    spec = balances()
    whole = fold(spec, "b", HISTORY[1:]).change(spec, "b")
    assert whole is not None
    current, at, revision = NOTHING, 0, 0
    events = HISTORY[1:]
    while at < len(events):
        begin, at = rng.randrange(at + 1), rng.randint(at + 1, len(events))
        change = fold(spec, "b", events[begin:at], current).change(spec, "b")
        if change is not None:
            assert change.revision == current.revision
            revision += 1
            current = stored(change, revision)
    assert (current.value, current.sequence, current.mark) == (whole.value, whole.sequence, whole.mark)


def test_an_event_that_cannot_be_applied_parks_its_key_and_later_ones_wait() -> None:
    spec = balances(invariants=[lambda state: state.cents >= 0])
    state = fold(spec, "a", HISTORY[:4])
    change = state.change(spec, "a")
    assert change is not None
    mark = Mark.read(change.mark)
    assert mark is not None
    assert mark.parked is not None
    assert (mark.parked.sequence, state.waiting) == (4, 1)
    assert "is not true" in mark.parked.reason
    assert (change.value, change.sequence) == (b'{"cents":0}', 1)
    later = fold(spec, "a", HISTORY, stored(change, 3))
    assert later.change(spec, "a") is None
    assert later.waiting == 3  # 4, 7 and 8


def test_a_key_whose_first_event_cannot_be_applied_is_parked_as_well() -> None:
    spec = balances(invariants=[lambda state: False])
    change = fold(spec, "a", HISTORY[:1]).change(spec, "a")
    assert change is not None
    assert (change.operation, change.sequence, change.revision) == ("delete", 0, 0)
    assert fold(spec, "a", HISTORY, stored(change, 1)).change(spec, "a") is None


@pytest.mark.parametrize("said", [False, 0, "", 0.0, [], (), {}])
def test_whatever_is_false_breaks_an_invariant(said: object) -> None:
    state = fold(balances(invariants=[lambda state: said]), "a", HISTORY[:1])
    assert state.parked is not None
    assert "is not true" in state.parked.reason


@pytest.mark.parametrize("said", [None, True, 1, "fine"])
def test_an_invariant_that_says_nothing_or_is_true_passes(said: object) -> None:
    assert fold(balances(invariants=[lambda state: said]), "a", HISTORY[:1]).parked is None


def test_a_state_that_no_server_takes_parks_its_key() -> None:
    class Grows:
        def key(self, event: Opened) -> str:
            return "all"

        def apply(self, state: list[str] | None, event: Opened) -> list[str]:
            return [*(state or []), event.account]

    events: list[tuple[int, Event]] = [(1, Opened(account="a")), (2, Opened(account="b" * (1 << 20)))]
    spec = ProjectionSpec("grows", Grows, ProjectionArguments(events=[Opened], bucket="grows"))
    state = fold(spec, "all", events)
    assert state.value == b'["a"]'
    assert state.parked is not None
    assert state.parked.reason.startswith("StateTooLarge: the state has 1048")
    small = ProjectionSpec(
        "grows", Grows, ProjectionArguments(events=[Opened], bucket=KVConfig(bucket="grows", max_value_bytes=20))
    )
    assert fold(small, "all", [(1, Opened(account="a" * 20))]).parked is not None


def test_a_value_of_another_program_is_left_alone() -> None:
    spec = balances()
    state = fold(spec, "a", HISTORY, Current(b"{}", 0, 5))
    assert state.parked is FOREIGN
    assert state.change(spec, "a") is None


def test_a_state_of_another_version_is_not_folded_further() -> None:
    change = fold(balances(), "a", HISTORY[:1]).change(balances(), "a")
    assert change is not None
    with pytest.raises(UsageError, match="version 1, and this is version 2: rebuild"):
        KeyState(balances(version=2), "a", stored(change, 1))


def test_apply_that_forgets_to_return_parks_the_key() -> None:
    class Forgets:
        def key(self, event: Opened) -> str:
            return event.account

        def apply(self, state: dict[str, int] | None, event: Opened) -> Any:
            if state is None:
                return {"n": 1}
            state["n"] += 1

    spec = ProjectionSpec("forgets", Forgets, ProjectionArguments(events=[Opened], bucket="forgets"))
    state = fold(spec, "a", [(1, Opened(account="a")), (2, Opened(account="a"))])
    assert state.value == b'{"n":1}'
    assert state.parked is not None
    assert "return the new state, or DELETE" in state.parked.reason


@pytest.mark.parametrize("mark", [Mark(1), Mark(12, Parked(34, "a\nb  c ä")), Mark(2, Parked(0, ""))])
def test_a_mark_is_read_back_as_it_was_written(mark: Mark) -> None:
    assert Mark.read(str(mark)) == mark


@pytest.mark.parametrize("text", [None, "", "x", "1 other", "1 parked", "1 parked x why", "²"])
def test_what_is_no_mark_is_foreign(text: str | None) -> None:
    assert Mark.read(text) is None


def test_a_router_tells_rows_from_what_cannot_be_read() -> None:
    spec = balances()
    app = App("bank", stream="BANK", subjects=["accounts.>"], events=[Opened, Moved, Closed])
    router = Router([spec], app.catalogue)
    assert router.filters == ["accounts.*.opened", "accounts.*.moved", "accounts.*.closed"]
    encoded = encode(Moved(source="a.b", target="b", cents=1), id="1", source="/bank", time=utc_now())
    routing = route_one(router, Recorded(5, encoded.subject, encoded.data, encoded.headers, 0))
    assert [(row.key, row.sequence) for row in routing.rows] == [("a=2Eb", 5), ("b", 5)]
    bad = route_one(router, Recorded(6, "accounts.a.opened", b"{", None, 0))
    assert not bad.rows
    assert [(failure.projections, failure.sequence) for failure in bad.failures] == [(("balances",), 6)]


def test_a_router_sorts_many_messages_by_projection_and_tells_which_cannot_be_read() -> None:
    class ByFirst:
        def key(self, event: Moved) -> str:
            if event.cents < 0:
                raise ValueError("no such key")
            return event.source

        def apply(self, state: int | None, event: Moved) -> int:
            return (state or 0) + 1

    counts = ProjectionSpec("counts", ByFirst, ProjectionArguments(events=[Moved], bucket="counts"))
    app = App("bank", stream="BANK", subjects=["accounts.>"], events=[Opened, Moved, Closed])
    router = Router([balances(), counts], app.catalogue)
    messages = []
    for sequence, event in ((5, Moved(source="a", target="b", cents=1)), (6, Moved(source="c", target="d", cents=-1))):
        encoded = encode(event, id=str(sequence), source="/bank", time=utc_now())
        messages.append(Recorded(sequence, encoded.subject, encoded.data, encoded.headers, 0))
    messages += [Recorded(7, "accounts.a.opened", b"{", None, 0), Recorded(8, "accounts.a.other", b"{", None, 0)]
    rows = {"balances": KeyRows(), "counts": KeyRows()}
    failed = sorted_into(rows, router, messages)
    assert [(key, sequence) for key, sequence, _ in rows["balances"]] == [("a", 5), ("b", 5), ("c", 6), ("d", 6)]
    assert [(key, sequence) for key, sequence, _ in rows["counts"]] == [("a", 5)]
    assert [(message.sequence, [failure.projections for failure in failures]) for message, failures in failed] == [
        (6, [("counts",)]),
        (7, [("balances", "counts")]),
    ]
    assert route_one(router, messages[-1]) == Routing([], [])  # nobody has asked for it
    rows_of_one, failures_of_one = route_one(router, messages[1])
    assert [(row.projection, row.key) for row in rows_of_one] == [("balances", "c"), ("balances", "d")]
    assert [(each.projections, each.sequence) for each in failures_of_one] == [(("counts",), 6)]
    looked_at: list[int] = []

    def recorded_of(message: Recorded) -> Recorded:
        looked_at.append(message.sequence)
        return message

    again = {"balances": KeyRows(), "counts": KeyRows()}
    assert len(router.add_rows(messages, [5, 6, 7, 8], recorded_of, again)) == 2
    assert {*looked_at} == {6, 7}  # those that fail; the first is read without


class Named(str):
    """A text of a class of its own, such as a member of an enumeration."""


class ByName:
    """Its keys are of every kind; most are plain."""

    def key(self, event: Opened | Closed) -> Any:
        name = event.account
        if name == "raises":
            raise ValueError("no such key")
        special = {"none": None, "number": 7, "two": ["t1", "t2"], "twice": ["t", "t"], "text": Named("text")}
        return special.get(name, name)

    def apply(self, state: int | None, event: Opened | Closed) -> int:
        return (state or 0) + 1


PLAIN = ["a", "b-1", "C_2"]


def day_of(event: Opened | Closed) -> datetime.datetime:
    zone = None if event.account == "no zone" else datetime.UTC
    return datetime.datetime(2026, 3, 1 + len(event.account), tzinfo=zone)


@pytest.mark.parametrize(
    "special", ["", "a.b", "é", "none", "number", "two", "twice", "text", "raises", "unreadable", "no zone", "a"]
)
@pytest.mark.parametrize("place", [0, 2, 5])
def test_many_messages_have_the_rows_that_each_has_alone(special: str, place: int) -> None:
    """Keys are looked at together where all of them are plain: one that is not must not be taken for one."""
    names = ProjectionSpec("names", ByName, ProjectionArguments(events=[Opened], bucket="names"))
    all_names = ProjectionSpec("all_names", ByName, ProjectionArguments(events=[Opened, Closed], bucket="all_names"))
    day = Window(size_s=86_400, late="keep", time=day_of)
    days = ProjectionSpec("days", ByName, ProjectionArguments(events=[Opened, Closed], bucket="days", window=day))
    app = App("bank", stream="BANK", subjects=["accounts.>"], events=[Opened, Moved, Closed])
    router = Router([names, all_names, days, balances()], app.catalogue)
    given: list[str] = [*PLAIN, *PLAIN]
    given[place] = special
    messages = []
    for sequence, name in enumerate(given, 10):
        event = Closed(account=name) if sequence % 3 == 0 else Opened(account=name)
        data = encode(event, id=str(sequence), source="/bank", time=utc_now()).data
        messages.append(Recorded(sequence, "accounts.a.opened", b"{" if name == "unreadable" else data, None, 0))
    for some in (messages, messages[:1]):
        rows = {name: KeyRows() for name in router.specs}
        failed = [
            (message, [(each.projections, each.sequence, str(each.error)) for each in failures])
            for message, failures in sorted_into(rows, router, some)
        ]
        alone = [(message, route_one(router, message)) for message in some]
        for name, found in rows.items():
            wanted = [row for _, routing in alone for row in routing.rows if row.projection == name]
            assert list(found) == [(row.key, row.sequence, row.event) for row in wanted]
            assert {type(key) for key in found.keys} <= {str}
        assert failed == [
            (message, [(each.projections, each.sequence, str(each.error)) for each in routing.failures])
            for message, routing in alone
            if routing.failures
        ]


@pytest.mark.parametrize(
    ("owns_stream", "filtered", "reading"),
    [
        (None, False, ["accounts.*.*"]),
        (False, False, ["accounts.*.*"]),
        (True, True, ["accounts.*.*"]),
        (True, False, []),
    ],
)
def test_a_router_that_reads_more_than_it_wants_leaves_the_rest_out(
    owns_stream: bool | None, filtered: bool, reading: list[str]
) -> None:
    app = App("bank", stream="BANK", subjects=["accounts.>"], events=[Opened, Moved, Closed])
    options: dict[str, Any] = {} if owns_stream is None else {"owns_stream": owns_stream}
    router = Router([balances(filtered=filtered)], app.catalogue, **options)
    assert router.reading == reading
    assert router.is_wanted is not None
    assert router.is_wanted("accounts.a.opened")
    assert not router.is_wanted("accounts.a.other")
    alone = ProjectionSpec("alone", Balances, ProjectionArguments(events=[Opened], bucket="alone"))
    assert Router([alone], app.catalogue).is_wanted is None  # the server leaves it out


def test_events_that_were_applied_are_counted() -> None:
    state = fold(balances(), "a", HISTORY)
    assert (state.applied, state.known, state.waiting) == (4, 0, 0)


def test_a_key_that_was_parked_while_it_was_stored_has_that_to_store() -> None:
    class Fussy:
        def key(self, event: Opened) -> str:
            return event.account

        def apply(self, state: int | None, event: Opened) -> int:
            if state is not None:
                raise ValueError("x" * 1000)
            return 1

    spec = ProjectionSpec("fussy", Fussy, ProjectionArguments(events=[Opened], bucket="fussy"))
    state = fold(spec, "a", [(1, Opened(account="a"))])
    change = state.change(spec, "a")
    assert change is not None
    state.apply(spec, "a", 2, Opened(account="a"))
    state.stored(change, 7)
    assert (state.is_parked_in_bucket, state.loaded) == (False, stored(change, 7))
    parking = state.change(spec, "a")
    assert parking is not None
    state.stored(parking, 8)
    assert state.is_parked_in_bucket
    assert state.change(spec, "a") is None
    assert state.parked is not None
    assert len(state.parked.reason) == 300  # as much as a header has room for


def test_a_router_reads_no_subject_twice() -> None:
    class Any_(Event, type="account.any", version=1, key="account", subject="accounts.{account}.{kind}"):
        account: str
        kind: str

    spec = ProjectionSpec("all", Balances, ProjectionArguments(events=[Opened, Any_], bucket="all"))
    app = App("bank", stream="BANK", subjects=["accounts.>"], events=[Opened, Any_])
    assert Router([spec], app.catalogue).filters == ["accounts.*.*"]  # the server takes none within another


def test_an_application_declares_the_buckets_of_its_projections() -> None:
    app = App("bank", stream="BANK", subjects=["accounts.>"])
    app.projection("balances", events=[Opened, Moved, Closed], bucket="balances")(Balances)
    topology = app.topology()
    assert {bucket.bucket for bucket in topology.buckets} == {"balances", "bank_projections", "bank_schemas"}
    assert {stream.name for stream in topology.streams} == {"BANK", "BANK_DLQ"}
    with pytest.raises(ConfigError, match="a name of its own"):
        app.projection("balances", events=[Opened], bucket="other")(Balances)
    with pytest.raises(ConfigError, match="one of its own"):
        app.projection("other", events=[Opened], bucket="balances")(Balances)


def test_a_handler_and_a_projection_do_not_share_a_name() -> None:
    app = App("bank", stream="BANK", subjects=["accounts.>"])
    app.projection("balances", events=[Opened], bucket="balances")(Balances)

    async def handle(event: Opened) -> None: ...

    app.handler(Opened, durable="greeting")(handle)
    with pytest.raises(ConfigError, match="durable='balances': expected a name of its own; a projection has it"):
        app.handler(Opened, durable="balances")(handle)
    with pytest.raises(ConfigError, match="projection 'greeting': expected a name of its own; a handler has it"):
        app.projection("greeting", events=[Opened], bucket="other")(Balances)
    assert (list(app.handlers), list(app.projections)) == (["greeting"], ["balances"])


def test_a_handler_does_not_take_the_name_under_which_projections_have_their_dead_letters() -> None:
    app = App("bank", stream="BANK", subjects=["accounts.>"])

    async def handle(event: Opened) -> None: ...

    with pytest.raises(ConfigError, match="durable='projections'"):
        app.handler(Opened, durable="projections")(handle)


class WithArguments(Balances):
    def __init__(self, rate: int) -> None:
        self.rate = rate


class WithOddState(Balances):
    def apply(self, state: complex | set[object], event: Any) -> Any:  # type: ignore[override]
        return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"events": []}, "at least one type"),
        ({"events": [dict]}, "not an event type"),
        ({"version": 0}, "version=0"),
        ({"bucket": KVConfig(bucket="b", ttl_s=5)}, "ttl_s=5"),
        ({"kind": dict}, "def apply"),
        ({"name": "a b"}, "name='a b'"),
        ({"events": Opened}, "events=<class .*Opened'>: expected a list of types of events"),
        ({"events": None}, "events=None: expected a list"),
        ({"invariants": None}, "invariants=None: expected a list of functions"),
        ({"invariants": len}, "invariants=<built-in function len>: expected a list of functions"),
        ({"invariants": [None]}, r"invariants=\[None\]: expected a list of functions"),
        ({"invariants": "abc"}, "invariants='abc': expected a list of functions"),
        ({"filtered": "yes"}, "filtered='yes': expected True or False"),
        ({"kind": 5}, "5: expected a class that is made without arguments"),
        ({"kind": Balances()}, "expected a class that is made without arguments"),
        ({"kind": WithArguments}, "expected a class that is made without arguments: .*'rate'"),
        ({"kind": WithOddState}, "state: .*complex.*: expected a type that JSON can be decoded into"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"name": "x", "kind": Balances, "events": [Opened], "bucket": "x", **change}
    with pytest.raises(ConfigError, match=message):
        ProjectionSpec(arguments.pop("name"), arguments.pop("kind"), ProjectionArguments(**arguments))


@pytest.mark.parametrize("lookups", ["balances", None, [None], 5])
def test_lookups_that_are_no_names_are_refused(lookups: Any) -> None:
    app = App("bank", stream="BANK", subjects=["accounts.>"])
    app.projection("balances", events=[Opened], bucket="balances")(Balances)
    with pytest.raises(ConfigError, match=r"^projection 'x': lookups=.*: expected a list of names of projections"):
        app.projection("x", events=[Opened], bucket="x", lookups=lookups)(Balances)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "balances"}, "only='balances': expected a list of names"),
        ({"only": None}, "only=None: expected a list of names"),
        ({"live": {"batch": 1}}, "live=.*: expected a LiveOptions"),
        ({"stop_timeout": "x"}, "stop_timeout='x': expected seconds"),
        ({"stop_timeout": -1}, "stop_timeout=-1: expected seconds"),
    ],
)
async def test_what_an_application_cannot_be_run_with_is_refused_at_once(options: Any, message: str) -> None:
    app = App("bank", stream="BANK", subjects=["accounts.>"])
    app.projection("balances", events=[Opened], bucket="balances")(Balances)
    with pytest.raises(ConfigError, match=message):
        await app.run("nats://127.0.0.1:1", **options)
