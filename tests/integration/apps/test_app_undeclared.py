"""An event that the application does not declare is refused wherever it would be published: no other program of the
application could read it, and a command whose boundary has it could be decided by one process alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.apps import is_settled, publish, running, set_up, until
from support.commands import WAYS, deciding

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Command, Context, Decision, Event, Past, Retry
from jetspark.app.client import AppClient
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.testing import run_handler
from jetspark.errors import CommandFailed, ConfigError
from jetspark.server import NatsServer

SAID = (
    "Odd is not declared, so other programs of the application could not read it: write @app.register above its class"
)


class Paid(Event, type="order.paid", key="order_id", subject="orders.paid.{order_id}"):
    order_id: str


class Odd(Event, type="order.odd", key="order_id", subject="orders.odd.{order_id}"):
    order_id: str


class Order(msgspec.Struct):
    cents: int = 0


ODD = Odd(order_id="o-1")


def new_app(**options: Any) -> App:
    app = App("shop", stream="SHOP", subjects=["orders.>"], timers=True, **options)
    app.entities("orders", state=Order)
    app.register(Paid)
    return app


async def stored(js: JetStream) -> dict[str, int]:
    """How many messages there are on each subject of the events that are tried."""
    return dict((await (await js.stream("SHOP")).info(subjects_filter="orders.>")).state.subjects or {})


async def by_publishing(shop: AppClient) -> None:
    await shop.publish(ODD)


async def by_encoding(shop: AppClient) -> None:
    shop.encode(ODD)


async def by_bulk(shop: AppClient) -> None:
    async with shop.bulk() as bulk:
        await bulk.publish_many([Paid(order_id="o-1"), ODD])


async def by_a_timer(shop: AppClient) -> None:
    await shop.timers.set("late", ODD, after=60)


async def by_an_entity(shop: AppClient) -> None:
    async with shop.entities("orders").change("o-1") as change:
        change.set(Order(1))
        change.emit(ODD)


async def by_a_timer_of_an_entity(shop: AppClient) -> None:
    async with shop.entities("orders").change("o-1") as change:
        change.set(Order(1))
        change.set_timer("late", ODD, after=60)


@pytest.mark.parametrize(
    "way", [by_publishing, by_encoding, by_bulk, by_a_timer, by_an_entity, by_a_timer_of_an_entity]
)
async def test_a_client_publishes_no_undeclared_event(server: NatsServer, js: JetStream, way: Any) -> None:
    app = new_app()
    await set_up(js, app)
    async with app.connect(server.url) as shop:
        for _ in range(2):  # having been refused declares nothing
            with pytest.raises(ConfigError) as raised:
                await way(shop)
            assert SAID in str(raised.value)
        assert "orders.odd.o-1" not in await stored(js)
        assert await shop.entities("orders").get("o-1") is None
    app.register(Odd)
    async with app.connect(server.url) as shop:
        await way(shop)
    assert Odd in app.catalogue


async def returned(ctx: Context) -> Any:
    return [Paid(order_id="o-2"), ODD]


async def published(ctx: Context) -> None:
    await ctx.publish(ODD)


async def scheduled(ctx: Context) -> None:
    await ctx.schedule(ODD, after=60)


async def set_by_ctx_timers(ctx: Context) -> None:
    await ctx.timers.set("late", ODD, after=60)


async def emitted(ctx: Context) -> None:
    async with ctx.entities("orders").change("o-1") as change:
        change.set(Order(1))
        change.emit(ODD)


@pytest.mark.parametrize("way", [returned, published, scheduled, set_by_ctx_timers, emitted])
async def test_a_handler_publishes_no_undeclared_event(server: NatsServer, js: JetStream, way: Any) -> None:
    app = new_app()

    @app.handler(Paid, durable="billing", retry=Retry(attempts=1))
    async def bill(event: Paid, ctx: Context) -> Any:
        return await way(ctx)

    await set_up(js, app)
    await publish(js, app, Paid(order_id="o-1"))
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "billing"))
        store = await HandlerStore.open(js, app.name, "billing")
        [dead_letter] = [each.dead_letter async for each in store.all_dead_letters()]
    assert dead_letter.cause is not None
    assert SAID in dead_letter.cause.message
    assert await stored(js) == {"orders.paid.o-1": 1}
    if way is not emitted:  # there are no entities where a handler runs alone
        run = await run_handler("billing", Paid(order_id="o-1"), app=app)
        assert SAID in str(run.error)
        assert run.published == run.scheduled == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ["events", "timers"])
async def test_a_command_decides_no_undeclared_event(server: NatsServer, js: JetStream, part: str, way: str) -> None:
    app = new_app()

    @app.command("orders.odd")
    class MakeOdd(Command):
        order_id: str

        def reads(self) -> list[str]:
            return [f"orders.*.{self.order_id}"]

        def decide(self, past: Past) -> Decision:
            late = {"late": (ODD, 60)}
            return Decision(events=[ODD]) if part == "events" else Decision(events=[Paid(order_id="o-1")], timers=late)

    async with deciding(app, server.url, way) as shop:
        with pytest.raises(CommandFailed) as raised:
            await shop.call(MakeOdd(order_id="o-1"))
        assert SAID in str(raised.value)
    assert await stored(js) == {}


@pytest.mark.parametrize("part", ["events", "timers", "compensations"])
async def test_a_workflow_decides_no_undeclared_event(server: NatsServer, js: JetStream, part: str) -> None:
    app = new_app()

    @app.workflow("ordering", key="order_id", retry=Retry(attempts=1))
    class Ordering:
        def react(self, state: int | None, event: Paid) -> Decision | None:
            parts: dict[str, Any] = {"events": [ODD], "timers": {"late": (ODD, 60)}, "compensations": [ODD]}
            return Decision(state=1, **{part: parts[part]})

    await set_up(js, app)
    await publish(js, app, Paid(order_id="o-1"))
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "ordering"))
        store = await HandlerStore.open(js, app.name, "ordering")
        [dead_letter] = [each.dead_letter async for each in store.all_dead_letters()]
        async with app.connect(server.url) as shop:
            assert await shop.workflow("ordering").get("o-1") is None
    assert dead_letter.cause is not None
    assert SAID in dead_letter.cause.message


async def test_one_program_that_publishes_an_event_makes_no_other_program_fail(
    server: NatsServer, js: JetStream
) -> None:
    """The first program used to know the event from then on, and decided commands that the second one could not."""
    first, second = new_app(), new_app()

    class CountOrders(Command):
        order_id: str

        def reads(self) -> list[str]:
            return [f"orders.*.{self.order_id}"]

        def decide(self, past: Past) -> Decision:
            return Decision(reply=len(past.of(Paid)))

    first.command("orders.count")(CountOrders)
    second.command("orders.count")(CountOrders)
    await set_up(js, first)
    async with (
        first.connect(server.url, decide_here=True) as shop,
        second.connect(server.url, decide_here=True) as other,
    ):
        await shop.publish(Paid(order_id="o-1"))
        with pytest.raises(ConfigError, match="Odd is not declared"):
            await shop.publish(ODD)
        replies = [await each.call(CountOrders(order_id="o-1")) for each in (shop, other)]
    assert [reply.data for reply in replies] == [1, 1]
