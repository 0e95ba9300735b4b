"""Entities without a server: what a change is made of, and what is known of one that nobody answered."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark import StreamConfig
from jetspark.app import DELETE, App, Context, EntityChange, Event
from jetspark.app.contracts.envelope import Encoded
from jetspark.app.entities.changes import (
    CHANGES_HEADER,
    MAX_MESSAGES,
    JointChange,
    LastChanges,
    PendingChange,
    next_group,
    recent_changes,
)
from jetspark.app.entities.committer import ATTEMPTS, LAG_READS, Committer, KnownRevisions
from jetspark.app.entities.entity_spec import EntitySpec, StateSubjects
from jetspark.app.entities.event_comparison import EntityState, Folded, NotRepairable, Repair, difference, repair_of
from jetspark.app.testing import TestApp
from jetspark.core.backoff import Backoff
from jetspark.core.headers import Headers
from jetspark.errors import (
    ConfigError,
    Conflict,
    InvalidEvent,
    MessageNotFound,
    RequestTimeout,
    UsageError,
    WrongLastSequence,
)
from jetspark.jetstream.info import PubAck, StoredMessage


class Order(msgspec.Struct):
    status: str
    cents: int = 0


PLACE = StateSubjects.of("shop", "KV_shop")


def shop(**options: Any) -> App:
    return App("shop", stream=StreamConfig(name="KV_shop", **options), subjects=["orders.>"])


def pending(id: str = "c", key: str = "o", revision: int = 0, events: int = 0, **fields: Any) -> PendingChange:
    sent = [Encoded(f"orders.{number}", b"", {}) for number in range(events)]
    return PendingChange(id=id, subject=f"$KV.shop.{key}", revision=revision, state=b"{}", events=sent, **fields)


def test_states_are_in_the_stream_of_the_events() -> None:
    app = shop()
    app.entities("orders", state=Order)
    app.entities("customers", state=dict)
    [stream] = app.topology().streams
    assert stream.subjects == ["orders.>", "$KV.shop.>"]
    assert stream.allow_atomic
    assert stream.allow_rollup


def test_states_in_a_stream_that_is_no_buckets_have_a_subject_of_the_application() -> None:
    app = App("shop", stream="ORDERS", subjects=["orders.>"])
    spec = app.entities("orders", state=Order)
    [stream] = app.topology().streams
    assert stream.subjects == ["orders.>", "states.shop.>"]
    assert (stream.allow_rollup, stream.max_messages_per_subject) == (True, -1)
    assert (spec.subject_of("o.1"), spec.state_subjects.bucket) == ("states.shop.orders.o=2E1", None)


@pytest.mark.parametrize(
    ("app", "name", "state", "words"),
    [
        (App("shop", stream="KV_shop"), "orders", Order, "expected subjects="),
        (shop(max_messages_per_subject=5), "orders", Order, "max_messages_per_subject=5"),
        (shop(max_age_s=3600.0), "orders", Order, r"entities 'orders' with max_age_s=3600.0: .* drops their states"),
        (shop(max_messages=5), "orders", Order, "max_messages=5"),
        (shop(max_bytes=5), "orders", Order, "max_bytes=5"),
        (shop(retention="interest"), "orders", Order, "retention='interest'"),
        (shop(retention="workqueue"), "orders", Order, "retention='workqueue'"),
        (shop(), "or.ders", Order, "letters, digits"),
        (shop(), "orders", lambda: 1, "msgspec decodes"),
    ],
)
def test_what_cannot_be_declared_is_refused(app: App, name: str, state: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        app.entities(name, state=state)


def test_a_kind_of_entity_is_declared_once() -> None:
    app = shop()
    app.entities("orders", state=Order)
    with pytest.raises(ConfigError, match="others have it"):
        app.entities("orders", state=Order)


def test_a_state_is_canonical_and_can_be_read_back() -> None:
    spec = EntitySpec("orders", Order, PLACE)
    assert spec.encode(Order("paid", 5)) == b'{"cents":5,"status":"paid"}'
    assert spec.decode(b'{"status":"new"}') == Order("new")
    for wrong in (Order(5), {"cents": 1}, object(), float("nan")):  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent):
            spec.encode(wrong)
    with pytest.raises(ConfigError, match="Give new fields a default"):
        spec.decode(b'{"status":5}')


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_entities_have_two_keys(one: str, other: str) -> None:
    spec = EntitySpec("orders", Order, PLACE)
    assert (spec.key_of(one) == spec.key_of(other)) == (one == other)


def test_the_state_carries_the_guard_and_each_message_ends_one_timer() -> None:
    cancels = [{"Nats-Scheduler": "a"}, {"Nats-Scheduler": "b"}]
    state, event, timer = pending(
        events=1, revision=7, cancels=cancels, timers=[Encoded("timers.x", b"", {})]
    ).messages()
    assert (state.revision, event.revision, timer.revision) == (7, None, None)
    assert {state.headers["Nats-Scheduler"], event.headers["Nats-Scheduler"]} == {"a", "b"}
    assert "Nats-Scheduler" not in timer.headers


def test_timers_that_no_message_is_left_for_have_one_each() -> None:
    cancels = [{"Nats-Scheduler": f"timers.{name}"} for name in "abcd"]
    change = pending(events=1, cancels=cancels, timers=[Encoded("timers.x", b"", {})])
    messages = [*change.messages()]
    assert len(messages) == change.count == 5
    assert sorted(each.headers.get("Nats-Scheduler", "") for each in messages) == [
        "",
        *(f"timers.{name}" for name in "abcd"),
    ]
    assert [each.subject for each in messages[2:]] == ["timers.c.cancelled", "timers.d.cancelled", "timers.x"]
    with pytest.raises(UsageError, match="cancel a timer of the same name"):
        joint(change, pending("e", "other", cancels=cancels))


def test_more_than_a_batch_holds_is_refused() -> None:
    assert joint(pending(events=MAX_MESSAGES - 1)).count == MAX_MESSAGES
    with pytest.raises(UsageError, match="1000 or fewer"):
        joint(pending(events=MAX_MESSAGES))
    with pytest.raises(UsageError, match="1000 or fewer"):
        joint(pending(cancels=[{"Nats-Scheduler": f"timers.{number}"} for number in range(MAX_MESSAGES + 1)]))


def test_a_deleted_entity_is_a_key_that_was_purged() -> None:
    [gone] = dataclasses.replace(pending(), state=None).messages()
    assert (gone.data, gone.headers["KV-Operation"]) == (b"", "PURGE")
    [there] = pending().messages()
    assert (there.data, "KV-Operation" in there.headers) == (b"{}", False)


def joint(*parts: PendingChange) -> JointChange:
    return JointChange(parts)


def test_a_group_keeps_the_order_and_has_an_entity_once() -> None:
    a, b, again, c = (joint(pending(id, key)) for id, key in [("1", "a"), ("2", "b"), ("3", "a"), ("4", "c")])
    assert next_group([a, b, again, c]) == [a, b]
    assert next_group([again, c]) == [again, c]
    large = joint(pending("5", "d", events=900))
    full = joint(pending("6", "e", events=98))
    assert next_group([large, full, joint(pending("7", "f"))]) == [large, full]
    both = joint(pending("8", "a"), pending("9", "c"))
    assert next_group([both, c, a]) == [both]
    assert next_group([b, both, again]) == [b, both]


def test_changes_together_know_the_revisions_of_their_states() -> None:
    change = joint(pending("1", "a", events=2), pending("2", "b"), pending("3", "c", events=1))
    assert change.revisions(10) == [10, 13, 14]
    subjects = [message.subject for message in change.messages()]
    assert [subjects[revision - 10] for revision in change.revisions(10)] == ["$KV.shop.a", "$KV.shop.b", "$KV.shop.c"]
    assert [message.revision for message in change.messages()] == [0, None, None, 0, 0, None]


def test_changes_together_have_each_entity_and_each_timer_once() -> None:
    timer = Encoded("timers.x", b"", {})
    with pytest.raises(UsageError, match="an entity is there twice"):
        joint(pending("1", "a"), pending("2", "a"))
    with pytest.raises(UsageError, match="timer of the same name"):
        joint(pending("1", "a", timers=[timer]), pending("2", "b", timers=[timer]))


def test_one_entity_that_remembers_proves_that_all_were_stored() -> None:
    change = joint(pending("1", "a", revision=5, recent=("x",)), pending("2", "b", revision=7, recent=("y",)))
    remembers, unchanged, forgot = LastChanges(9, ("1", "x")), LastChanges(7, ("y",)), LastChanges(99, ("z",))
    assert change.was_stored([remembers, forgot]) is True
    assert change.was_stored([forgot, unchanged]) is False
    assert change.was_stored([forgot, forgot]) is None
    assert change.moved([remembers, unchanged]) == [change.parts[0]]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.data())
def test_a_state_tells_which_changes_led_to_it(keys: list[str], data: st.DataObject) -> None:
    """Changes are tried in some order, some of them on a state that is old by then; each knows what became of it."""
    recent: tuple[str, ...] = ()
    revision, stored = 0, list[str]()
    read: dict[tuple[int, tuple[str, ...]], None] = {(0, ()): None}
    tried: list[PendingChange] = []
    for number, _ in enumerate(keys):
        seen = data.draw(st.sampled_from(sorted(read)))
        change = pending(str(number), revision=seen[0], recent=seen[1])
        tried.append(change)
        if change.revision == revision:
            [message] = change.messages()
            revision, recent = number + 1, recent_changes(message.headers)
            stored.append(change.id)
            read[revision, recent] = None
    for change in tried:
        known = change.was_stored(revision, recent)
        assert known is None or known == (change.id in stored)
        if len(stored) < 16:
            assert known is not None


def test_a_foreign_state_says_nothing() -> None:
    assert pending("c", revision=0).was_stored(9, ()) is None
    assert pending("c", revision=5).was_stored(9, ("x",)) is None
    assert pending("c", revision=5, recent=("b",)).was_stored(9, ("x",)) is None
    assert pending("c", revision=5, recent=("b",)).was_stored(9, ("x", "b")) is False
    assert pending("c", revision=5, recent=("b",)).was_stored(9, ("x", "c", "b")) is True


class UnderWay:
    """A stream with replicas that has a batch under way: nobody is answered, and whoever sends it again is refused."""

    def __init__(self, stored_after: int | None) -> None:
        self._stored_after = stored_after
        self.sent = self.asked = 0

    @contextlib.asynccontextmanager
    async def atomic_batch(self, *, ack_first: bool) -> AsyncIterator[Any]:
        assert not ack_first
        yield self
        self.sent += 1
        raise RequestTimeout("commit", 1.0) if self.sent == 1 else WrongLastSequence(400, 10164, "wrong last sequence")

    async def add(self, *message: Any, **options: Any) -> None:
        pass

    @property
    def api(self) -> UnderWay:
        return self

    def get_message(self, stream: str, query: dict[str, Any], *, direct: bool) -> bool:
        return direct

    async def run(self, direct: bool) -> StoredMessage:
        assert not direct  # what is in doubt is known to the leader alone
        self.asked += 1
        if self._stored_after is None or self.asked <= self._stored_after:
            raise MessageNotFound(404, 10037, "no message found")
        headers = Headers({CHANGES_HEADER: "c"})
        now = datetime.datetime.now(datetime.UTC)
        return StoredMessage(
            stream="KV_shop", subject="$KV.shop.o", sequence=9, timestamp=now, data=b"{}", headers=headers
        )


@pytest.mark.parametrize("from_leader", [True, False])
async def test_a_change_that_is_under_way_is_not_taken_for_refused(
    from_leader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is lost, its repetition is refused because of it, and it is stored only then."""
    monkeypatch.setattr("jetspark.app.entities.committer.PAUSE", Backoff(first_s=0.0, max_s=0.0))
    monkeypatch.setattr("jetspark.app.entities.committer.context_of", lambda js: js)
    js: Any = UnderWay(stored_after=2)
    assert await Committer(js, "KV_shop", from_leader=from_leader).commit(pending("c", events=1)) == [9]
    assert js.sent == 4
    js = UnderWay(stored_after=None)
    with pytest.raises(RequestTimeout):  # nobody knows
        await Committer(js, "KV_shop", from_leader=from_leader).commit(pending("c", events=1))
    assert js.sent == 1 + ATTEMPTS


class Lagging:
    """A replica that shows an older state for some reads, and its leader."""

    def __init__(self, shown: list[int]) -> None:
        self._shown = shown
        self.published: list[int | None] = []
        self.leader_reads = 0

    @property
    def api(self) -> Lagging:
        return self

    def get_message(self, stream: str, query: dict[str, Any], *, direct: bool) -> bool:
        return direct

    async def run(self, direct: bool) -> StoredMessage:
        self.leader_reads += not direct
        sequence = self._shown.pop(0) if len(self._shown) > 1 else self._shown[0]
        if not sequence:
            raise MessageNotFound(404, 10037, "no message found")
        now = datetime.datetime.now(datetime.UTC)
        return StoredMessage(
            stream="KV_shop", subject="$KV.shop.o", sequence=sequence, timestamp=now, data=b"{}", headers=Headers()
        )

    async def publish(self, subject: str, data: bytes, *, headers: Any, expect: Any) -> PubAck:
        self.published.append(expect.last_subject_sequence)
        if expect.last_subject_sequence != 0:
            raise WrongLastSequence(400, 10071, "wrong last sequence: 9")
        return PubAck(stream="KV_shop", sequence=7)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspark.app.entities.committer.LAG", Backoff(first_s=0.0, max_s=0.0))
    monkeypatch.setattr("jetspark.app.entities.committer.context_of", lambda js: js)


async def test_a_program_sees_what_it_has_stored_and_what_it_was_refused_by(no_pauses: None) -> None:
    js: Any = Lagging([0, 0, 7, 7, 7, 8])
    committer = Committer(js, "KV_shop", from_leader=False)
    assert await committer.newest("$KV.shop.o") is None  # nothing is known of it: any replica's word counts
    assert await committer.commit(pending("c")) == [7]
    seen = await committer.newest("$KV.shop.o")
    assert seen is not None
    assert seen.sequence == 7
    with pytest.raises(Conflict):
        await committer.commit(pending("d", revision=7))
    seen = await committer.newest("$KV.shop.o")
    assert seen is not None
    assert (seen.sequence, js.leader_reads) == (8, 0)


async def test_a_replica_is_waited_for_only_so_long(no_pauses: None) -> None:
    """What is known may be gone: purged, or with the stream, which counts from 1 again then."""
    js: Any = Lagging([0])
    committer = Committer(js, "KV_shop", from_leader=False)
    await committer.commit(pending("c"))
    js._shown = [3] * (LAG_READS + 1) + [2]
    found = await committer.newest("$KV.shop.o")
    assert found is not None
    assert (found.sequence, js._shown) == (3, [2])
    found = await committer.newest("$KV.shop.o")  # at once: what was known is forgotten
    assert found is not None
    assert found.sequence == 2


def test_known_revisions_are_bounded_and_never_go_back() -> None:
    known = KnownRevisions(most=3)
    for number in range(1, 6):
        known.learn(f"s{number}", number)
    known.learn("s4", 2)
    known.learn("s6", 6)
    assert (len(known), known.of("s4"), known.of("s6"), known.of("s3"), known.of("x")) == (3, 4, 6, 0, 0)


# ---- in handlers, in virtual time ------------------------------------------------------------------------------------


class Reserve(Event, type="stock.reserve", key="article", subject="orders.{article}.reserve"):
    article: str


class Missing(Event, type="stock.missing", key="article", subject="orders.{article}.missing"):
    article: str


@pytest.mark.parametrize("moment", ["after Publish", "before Acknowledge"])
async def test_a_handler_that_runs_again_makes_its_change_once(moment: str) -> None:
    """Also a change that leaves the state as it is, and only says something."""
    app, runs = App("shop", stream="KV_shop", subjects=["orders.>"], events=[Missing]), list[bool]()
    app.entities("stock", state=Order)

    @app.handler(Reserve, durable="reserve")
    async def reserve(event: Reserve, ctx: Context) -> None:
        async with ctx.entities("stock").change(event.article) as change:
            runs.append(change.was_made)
            change.emit(Missing(article=event.article))

        def count(change: EntityChange) -> None:
            change.set(Order("counted", change.state.cents + 1 if change.state else 1))

        await ctx.entities("stock").modify("all", count)

    async with TestApp(app) as test:
        fault = test.crash(moment)
        await test.publish(Reserve(article="tea"))
        await test.settled()
        assert fault.happened == 1
        assert test.published(Missing) == [Missing(article="tea")]
        assert await test.do(lambda shop: shop.entities("stock").get("all")) == Order("counted", 1)
        assert runs[0] is False
        assert test.dead_letters == []
        if moment == "before Acknowledge":
            assert runs == [False, True]


async def test_a_conflict_of_the_users_own_is_not_taken_for_one_of_the_change() -> None:
    app = App("shop", stream="KV_shop", subjects=["orders.>"])
    app.entities("orders", state=Order)
    calls = list[int]()

    def decide(change: EntityChange) -> None:
        calls.append(1)
        raise Conflict("elsewhere", ("x",))

    async with TestApp(app) as test:
        with pytest.raises(Conflict, match="elsewhere"):
            await test.do(lambda shop: shop.entities("orders").modify("o", decide))
    assert calls == [1]


class Move(Event, type="stock.move", key="source", subject="orders.{source}.move"):
    source: str
    target: str


@pytest.mark.parametrize("moment", ["after Publish", "before Acknowledge"])
async def test_a_handler_that_runs_again_makes_its_changes_of_several_entities_once(moment: str) -> None:
    app = App("shop", stream="KV_shop", subjects=["orders.>"], events=[Missing])
    app.entities("stock", state=Order)
    app.entities("moves", state=Order)

    @app.handler(Move, durable="move")
    async def move(event: Move, ctx: Context) -> None:
        def decide(source: EntityChange, target: EntityChange, log: EntityChange) -> None:
            source.set(Order("moved", (source.state.cents if source.state else 0) - 1))
            target.set(Order("moved", (target.state.cents if target.state else 0) + 1))
            log.emit(Missing(article=event.source))

        log = ctx.entities("moves").change("log")
        await ctx.entities("stock").modify_many([event.source, event.target, log], decide)

    async with TestApp(app) as test:
        fault = test.crash(moment)
        await test.publish(Move(source="a", target="b"))
        await test.settled()
        assert fault.happened == 1
        states = [await test.do(lambda shop, key=key: shop.entities("stock").get(key)) for key in "ab"]  # type: ignore[misc]
        assert states == [Order("moved", -1), Order("moved", 1)]
        assert test.published(Missing) == [Missing(article="a")]
        assert test.dead_letters == []


async def test_changes_together_need_different_entities() -> None:
    app = App("shop", stream="KV_shop", subjects=["orders.>"])
    app.entities("orders", state=Order)

    async def twice(client: Any) -> None:
        client.entities("orders").changes("a", "a")

    async with TestApp(app) as test:
        with pytest.raises(UsageError, match="each once"):
            await test.do(twice)


# ---- state and events compared ---------------------------------------------------------------------------------------


class Placed(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str
    cents: int


class Corrected(Event, type="order.corrected", key="order_id", subject="orders.{order_id}.corrected"):
    order_id: str
    cents: int | None


class OrderFold:
    def key(self, event: Placed | Corrected) -> str:
        return event.order_id

    def apply(self, state: Order | None, event: Placed | Corrected) -> Any:
        if event.cents is None:
            return DELETE
        if event.cents == 13:
            raise ValueError("no such price")
        return Order("placed", (state.cents if state and isinstance(event, Placed) else 0) + event.cents)


class CorrectingFold(OrderFold):
    def correct(self, key: str, folded: Order | None, state: Order | None) -> list[Event]:
        return [Corrected(order_id=key, cents=None if state is None else state.cents)]


def spec_of(truth: Any = "events", fold: type[Any] = OrderFold) -> EntitySpec:
    return EntitySpec(
        "orders", Order, StateSubjects.of("shop", "KV_shop"), truth=truth, events=[Placed, Corrected], fold=fold
    )


def folded(spec: EntitySpec, *cents: int | None) -> Folded:
    found = Folded()
    for number, each in enumerate(cents, 1):
        found = found.then(spec, "o", number, Corrected(order_id="o", cents=each))
    return found


@pytest.mark.parametrize(
    ("cents", "state", "kind"),
    [
        ((5,), b'{"cents":5,"status":"placed"}', None),
        ((5,), b'{"status": "placed", "cents": 5}', None),  # written by somebody else
        ((), None, None),
        ((5, None), None, None),
        ((5,), None, "missing"),
        ((5, None), b'{"cents":5,"status":"placed"}', "extra"),
        ((5, 6), b'{"cents":5,"status":"placed"}', "value"),
        ((5,), b"text", "unreadable"),
        ((5, 13, 6), b'{"cents":6,"status":"placed"}', "fold"),
    ],
)
def test_a_state_is_compared_with_what_events_make(cents: Any, state: bytes | None, kind: str | None) -> None:
    spec = spec_of()
    assert difference(spec, EntityState(state), folded(spec, *cents)) == kind


def test_an_event_that_was_applied_is_not_applied_again() -> None:
    spec, event = spec_of(), Placed(order_id="o", cents=5)
    once = Folded().then(spec, "o", 3, event)
    assert once.then(spec, "o", 3, event) == once.then(spec, "o", 2, event) == once
    assert once.then(spec, "o", 4, event).data == b'{"cents":10,"status":"placed"}'


def test_where_events_are_the_truth_the_state_they_make_is_the_repair() -> None:
    spec = spec_of()
    assert repair_of(spec, "o", "o", EntityState(b"text"), folded(spec, 5)) == Repair(b'{"cents":5,"status":"placed"}')
    assert repair_of(spec, "o", "o", EntityState(b"text"), folded(spec, 5, None)) == Repair(None)
    with pytest.raises(NotRepairable, match="cannot be folded"):
        repair_of(spec, "o", "o", EntityState(None), folded(spec, 13))


def test_where_the_state_is_the_truth_events_lead_to_it() -> None:
    spec = spec_of("state", CorrectingFold)
    state = EntityState(b'{"cents":7,"status":"placed"}')
    assert repair_of(spec, "o", "o", state, folded(spec, 5)) == Repair(state.data, (Corrected(order_id="o", cents=7),))
    assert repair_of(spec, "o", "o", EntityState(None), folded(spec, 5)).events == (
        Corrected(order_id="o", cents=None),
    )
    with pytest.raises(NotRepairable, match="key is not known"):
        repair_of(spec, "=sha256=1", None, state, folded(spec, 5))
    with pytest.raises(NotRepairable, match="no correct"):
        repair_of(spec_of("state"), "o", "o", state, folded(spec, 5))
    with pytest.raises(NotRepairable, match="is no"):
        repair_of(spec, "o", "o", EntityState(b"text"), folded(spec, 5))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], 'lead to {"cents":5,"status":"placed"}, and not to the state'),
        ([Placed(order_id="o", cents=5)], 'lead to {"cents":10'),
        ([Corrected(order_id="other", cents=7)], "not of this entity alone"),
        ([Reserve(article="o")], "whose type the fold does not take"),
        ([Corrected(order_id="o", cents=13)], "no such price"),
    ],
)
def test_events_that_do_not_lead_to_the_state_are_not_published(wrong: list[Event], words: str) -> None:
    class Wrong(OrderFold):
        def correct(self, key: str, folded: Order | None, state: Order | None) -> list[Event]:
            return wrong

    spec = spec_of("state", Wrong)
    with pytest.raises(NotRepairable, match=words):
        repair_of(spec, "o", "o", EntityState(b'{"cents":7,"status":"placed"}'), folded(spec, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"truth": "events"}, "expected events= together with fold="),
        ({"events": [Placed]}, "expected events= together with fold="),
        ({"fold": OrderFold}, "expected events= together with fold="),
        ({"truth": "both"}, "expected 'state' or 'events'"),
        ({"events": [Placed], "fold": type("F", (), {})}, "fold of .orders.: expected .def apply"),
        ({"events": [Placed], "fold": type("F", (OrderFold,), {"correct": 5})}, "def correct"),
    ],
)
def test_a_truth_needs_what_tells_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shop().entities("orders", state=Order, **options)


def test_a_key_that_is_too_long_for_a_bucket_is_in_a_header() -> None:
    spec, long = EntitySpec("orders", Order, PLACE), "ä.b" * 100
    assert spec.key_in(spec.subject_of("a.b"), {}) == "a.b"
    assert spec.key_headers("a.b") == {}
    assert spec.key_in(spec.subject_of(long), {}) is None
    assert spec.key_in(spec.subject_of(long), spec.key_headers(long)) == long
