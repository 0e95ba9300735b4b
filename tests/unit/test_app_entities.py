"""Entities without a server: what a change is made of, and what is known of one that nobody answered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark import StreamConfig
from jetspark.app import App, Context, EntityChange, Event
from jetspark.app.contracts.envelope import Encoded
from jetspark.app.entities.changes import MAX_MESSAGES, PendingChange, next_group, recent_changes
from jetspark.app.entities.declaring import EntitySpec
from jetspark.app.testing import TestApp
from jetspark.errors import ConfigError, Conflict, InvalidEvent, UsageError


class Order(msgspec.Struct):
    status: str
    cents: int = 0


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


@pytest.mark.parametrize(
    ("app", "name", "state", "words"),
    [
        (App("shop", stream="ORDERS", subjects=["orders.>"]), "orders", Order, "KV_orders"),
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
    spec = EntitySpec("orders", Order, "KV_shop")
    assert spec.encode(Order("paid", 5)) == b'{"cents":5,"status":"paid"}'
    assert spec.decode(b'{"status":"new"}') == Order("new")
    for wrong in (Order(5), {"cents": 1}, object(), float("nan")):  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent):
            spec.encode(wrong)
    with pytest.raises(ConfigError, match="Give fields that are new a default"):
        spec.decode(b'{"status":5}')


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_entities_have_two_keys(one: str, other: str) -> None:
    spec = EntitySpec("orders", Order, "KV_shop")
    assert (spec.key_of(one) == spec.key_of(other)) == (one == other)


def test_the_state_carries_the_guard_and_each_message_ends_one_timer() -> None:
    cancels = [{"Nats-Scheduler": "a"}, {"Nats-Scheduler": "b"}]
    state, event, timer = pending(
        events=1, revision=7, cancels=cancels, timers=[Encoded("timers.x", b"", {})]
    ).messages()
    assert (state.revision, event.revision, timer.revision) == (7, None, None)
    assert {state.headers["Nats-Scheduler"], event.headers["Nats-Scheduler"]} == {"a", "b"}
    assert "Nats-Scheduler" not in timer.headers


def test_more_than_a_batch_holds_is_refused() -> None:
    with pytest.raises(UsageError, match="1000 or fewer"):
        pending(events=MAX_MESSAGES)
    with pytest.raises(UsageError, match="a message ends one timer"):
        pending(cancels=[{}, {}])


def test_a_group_keeps_the_order_and_has_an_entity_once() -> None:
    a, b, again, c = pending("1", "a"), pending("2", "b"), pending("3", "a"), pending("4", "c")
    assert next_group([a, b, again, c]) == [a, b]
    assert next_group([again, c]) == [again, c]
    large = pending("5", "d", events=900)
    full = pending("6", "e", events=98)
    assert next_group([large, full, pending("7", "f")]) == [large, full]


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
