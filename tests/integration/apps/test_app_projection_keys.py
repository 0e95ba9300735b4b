"""One spelling of a key wherever users write or read it: views, copies, watches, replays, repairs, tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from support.apps import publish, running, set_up, until

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Event, LiveOptions, Window
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters
from jetspark.app.replay import RebuildOptions, ReplayRequest, plan_replay, rebuild, repair_keys, run_replay, verify
from jetspark.app.testing import TestApp
from jetspark.errors import ConfigError, StateParked
from jetspark.server import NatsServer


class Sold(Event, type="shops.sold", version=1, key="shop", subject="sales.{shop}"):
    shop: str
    cents: int


class Takings:
    def key(self, event: Sold) -> str:
        return event.shop

    def apply(self, state: int | None, event: Sold) -> int:
        if event.cents < 0:
            raise ValueError("nobody pays less than nothing")
        return (state or 0) + event.cents


class Bought(Event, type="shops.bought", version=1, key="shop", subject="bought.{shop}"):
    shop: str


class Customers:
    """With a lookup: a key may have a value and no state."""

    def key(self, event: Bought) -> str:
        return event.shop

    def apply(self, state: int | None, event: Bought, lookup: Any) -> int:
        return (state or 0) + 1


class Titled(Event, type="books.titled", version=1, key="shelf", subject="titles.{shelf}"):
    shelf: str
    title: str


class Titles:
    """Whose keys are as long as somebody has written them."""

    def key(self, event: Titled) -> str:
        return event.title

    def apply(self, state: int | None, event: Titled) -> int:
        return (state or 0) + 1


def plain(version: int = 1) -> App:
    app = App("shops", stream="SHOPS", subjects=["sales.>"])
    app.projection("takings", events=[Sold], bucket="takings", version=version)(Takings)
    return app


def hourly(version: int = 1) -> App:
    app = App("shops", stream="SHOPS", subjects=["sales.>"])
    window = Window(size_s=3600, every_s=1800)
    app.projection("takings", events=[Sold], bucket="takings", version=version, window=window)(Takings)
    return app


def joined() -> App:
    app = App("shops", stream="SHOPS", subjects=["sales.>", "bought.>"])
    app.projection("sums", events=[Sold], bucket="sums")(Takings)
    app.projection("takings", events=[Bought], bucket="takings", lookups=["sums"])(Customers)
    return app


SHOPS = ["s1", "ann@example.com", "a.b", "=", "7"]


@pytest.mark.parametrize("make", [plain, hourly, joined])
async def test_every_key_that_is_shown_is_a_key_that_can_be_read(
    server: NatsServer, js: JetStream, make: Callable[[], App]
) -> None:
    app = make()
    await set_up(js, app)
    for shop in SHOPS:
        await publish(js, app, Sold(shop=shop, cents=5))
    if make is joined:
        await publish(js, app, *[Bought(shop=shop) for shop in SHOPS[:3]])
    last = (await (await js.stream("SHOPS")).info()).state.last_sequence
    async with running(app, server.url), app.connect(server.url) as client:
        view = client.view("takings")
        async with view.replica() as copy:
            await copy.reached(last)
            keys = copy.keys()
            assert len(keys) == len(copy) == {plain: 5, hourly: 10, joined: 3}[make]
            assert {key.rpartition(".")[0] if make is hourly else key for key in keys} == set(
                SHOPS[:3] if make is joined else SHOPS
            )
            for key in keys:
                assert copy.get(key) is not None
                assert await view.get(key) == copy.get(key)
                assert (await view.entry(key)).key == key
                assert await view.get(key, as_of=last) == copy.get(key)
                assert await view.wait_for(key, lambda state: state is not None) == copy.get(key)
        shown = []
        async with aclosing(view.watch()) as entries:
            async for entry in entries:
                if entry.state is not None:
                    shown.append(entry.key)
                if len(shown) == len(keys):
                    break
        assert sorted(shown) == sorted(keys)
        async with aclosing(view.watch(keys[0])) as entries:
            assert (await anext(entries)).key == keys[0]
        plan = await plan_replay(js, app, "takings", ReplayRequest(keys=(keys[0], keys[1])))
        assert plan.to_dict()["some_keys"] == sorted(keys[:2])
        assert all(key in str(plan) for key in keys[:2])
    done = await repair_keys(js, app, "takings", [keys[0]])
    assert (done.changed, done.keys, done.status) == (0, 1, "done")
    # And a key that is shown as wrong can be given to a repair.
    name = app.projections["takings"].bucket_key(keys[1])
    await (await js.stream("KV_takings")).purge(subject=f"$KV.takings.{name}")
    found = await verify(js, app, "takings")
    assert [(each.key, each.kind) for each in found.differences] == [(keys[1], "missing")]
    assert (await repair_keys(js, app, "takings", [found.differences[0].key])).changed == 1
    assert (await verify(js, app, "takings")).is_equal


@pytest.mark.parametrize(("make", "key"), [(plain, "nobody"), (hourly, "nobody.late"), (hourly, ("s1", "late"))])
async def test_a_key_with_neither_a_state_nor_an_event_is_an_error(
    server: NatsServer, js: JetStream, make: Callable[[], App], key: Any
) -> None:
    app = make()
    await set_up(js, app)
    await publish(js, app, Sold(shop="s1", cents=5))
    async with running(app, server.url), app.connect(server.url) as client:
        await until(lambda: is_at(client.view("takings"), 1))
    message = r"projection 'takings': neither a state nor an event in sequences 1 to 1 of stream SHOPS"
    for work in (
        repair_keys(js, app, "takings", [key]),
        plan_replay(js, app, "takings", ReplayRequest(keys=(key,))),
        run_replay(js, app, "takings", ReplayRequest(keys=(key,))),
    ):
        with pytest.raises(ConfigError, match=message):
            await work
    before = (await (await js.stream("KV_takings")).info()).state.messages
    assert before == (2 if make is plain else 3)


async def test_a_window_that_is_left_out_is_said(server: NatsServer, js: JetStream) -> None:
    app = hourly()
    await set_up(js, app)
    async with app.connect(server.url) as client:
        with pytest.raises(ConfigError, match="expected its window, too"):
            await client.view("takings").get("s1")
    with pytest.raises(ConfigError, match="expected its window, too"):
        await repair_keys(js, app, "takings", ["s1"])


async def is_at(view: Any, sequence: int) -> bool:
    return bool((await view.position()).sequence >= sequence)


async def test_a_parked_key_is_named_as_it_is_written(server: NatsServer, js: JetStream) -> None:
    app = hourly()
    await set_up(js, app)
    await publish(js, app, Sold(shop="a.b", cents=-1))
    async with running(app, server.url), app.connect(server.url) as client:
        view = client.view("takings")
        await until(lambda: is_at(view, 1))
        key = (await anext(view.watch())).key
        assert key.startswith("a.b.20")
        with pytest.raises(StateParked, match=key):
            await view.get(key, at_least=1)


async def test_a_test_sees_the_states_of_windows() -> None:
    async with TestApp(hourly()) as test:
        await test.publish(Sold(shop="a.b", cents=5))
        await test.settled()
        states = test.state("takings")
        assert set(states.values()) == {5}
        assert [key.rpartition(".")[0] for key in states] == ["a.b"] * 2


# ---- after a swap ----------------------------------------------------------------------------------------------------


class Whole(Takings):
    """Sums of whole shops: what was before a point."""

    def key(self, event: Sold) -> str:
        return event.shop.split(".")[0]


async def test_copies_and_watches_notice_keys_that_a_swap_has_left_out(server: NatsServer, js: JetStream) -> None:
    old = plain()
    new = App("shops", stream="SHOPS", subjects=["sales.>"])
    new.projection("takings", events=[Sold], bucket="takings", version=2)(Whole)
    await set_up(js, old)
    await publish(js, old, *[Sold(shop=shop, cents=5) for shop in ("s.1", "s.2", "t")])
    async with running(old, server.url), old.connect(server.url) as client:
        await until(lambda: is_at(client.view("takings"), 3))
    async with old.connect(server.url) as client:
        view = client.view("takings")
        told: dict[str, Any] = {}

        async def watch() -> None:
            async for entry in view.watch():
                told[entry.key] = entry.state

        watching = asyncio.create_task(watch())
        async with view.replica() as copy:
            assert sorted(copy.keys()) == ["s.1", "s.2", "t"]
            await until(lambda: told == {"s.1": 5, "s.2": 5, "t": 5})
            assert (await rebuild(js, new, "takings", RebuildOptions(swap=True))).is_swapped
            await until(lambda: sorted(copy.keys()) == ["s", "t"])
            assert copy.position >= 3
            assert (copy.get("s"), copy.get("s.1")) == (10, None)
            await until(lambda: told == {"s": 10, "s.1": None, "s.2": None, "t": 5})
        watching.cancel()
        await asyncio.wait([watching])


@pytest.mark.parametrize("make", [plain, hourly])
async def test_a_key_may_have_the_name_under_which_a_bucket_has_its_notes(
    server: NatsServer, js: JetStream, make: Callable[[], App]
) -> None:
    app = make()
    await set_up(js, app)
    shops = ["_jetspark", "_jetspark.position", "position"]
    await publish(js, app, *[Sold(shop=shop, cents=5) for shop in shops])
    live = LiveOptions(partitions=2, lease_s=1.0)  # each has a note, too
    async with running(app, server.url, live=live), app.connect(server.url) as client:
        view = client.view("takings")
        async with view.replica() as copy:
            await copy.reached(3)
            keys = sorted(copy.keys())
            assert {key.rpartition(".")[0] if make is hourly else key for key in keys} == set(shops)
            assert sorted([key async for key in _first(view.watch(), len(keys))]) == keys
    assert (await verify(js, app, "takings")).is_equal


@pytest.mark.parametrize("make", [plain, hourly])
async def test_a_key_that_is_too_long_for_the_server_has_a_dead_letter_and_holds_up_no_other(
    server: NatsServer, js: JetStream, make: Callable[[], App]
) -> None:
    app = App("long", stream="LONG", subjects=["titles.>"])
    window = make().projections["takings"].window
    app.projection("titles", events=[Titled], bucket="t" * 100, window=window)(Titles)
    await set_up(js, app)
    long = ["x" * 3001, "ü" * 501, "." * 20_000]
    fitting = ["x" * 3000, "ü" * 500, "short"]
    async with running(app, server.url), app.connect(server.url) as client:
        view = client.view("titles")
        for title in [*long, *fitting]:
            ack = await client.publish(Titled(shelf="s", title=title))
        async with view.replica() as copy:
            await copy.reached(ack.sequence)
            keys = sorted(copy.keys())
            assert {key.partition(".")[0] for key in keys} == set(fitting)
            assert [await view.get(key) for key in keys] == [1] * len(keys)
            assert sorted([key async for key in _first(view.watch(*keys), len(keys))]) == keys
        for title in long:
            with pytest.raises(ConfigError, match="expected up to 3000"):
                await view.get(title if window is None else (title, "late"))
    dead_letters = await read_dead_letters(js, app, DeadLetterFilter())
    assert [each.dead_letter.origin.sequence for each in dead_letters] == [1, 2, 3]
    assert (await verify(js, app, "titles")).is_equal


async def _first(entries: AsyncIterator[Any], count: int) -> AsyncIterator[str]:
    async with aclosing(entries):  # type: ignore[type-var]
        for _ in range(count):
            yield (await anext(entries)).key
