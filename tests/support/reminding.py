"""Timers whose events may be late: handled after the timer was set anew, or cancelled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from jetspark import Expect
from jetspark.aio.context import context_of
from jetspark.app import App, AppClient, Context, EntityChange, Event
from jetspark.app.topology.names import escape_token
from jetspark.jetstream.operations import message_query
from support.apps import until

TIMER = "reminder of o-1"


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}"):
    order_id: str


class Overdue(Event, type="order.overdue", key="order_id", subject="orders.{order_id}"):
    order_id: str
    number: int = 0


class Order(msgspec.Struct, frozen=True):
    status: str
    timer: str = ""
    """The id of the event of the timer that counts."""


def reminding(seen: list[tuple[int, bool]]) -> App:
    """Its handler notes the number of each event of a timer, and whether that counts."""
    app = App("shop", stream="ORDERS", subjects=["orders.>"], events=[Paid], timers=True)

    @app.handler(Overdue, durable="reminding")
    async def remind(event: Overdue, ctx: Context) -> None:
        assert ctx.timer is not None
        assert ctx.timer.name == TIMER
        seen.append((event.number, await ctx.is_current_timer()))

    return app


def reminding_by_entity(seen: list[int]) -> App:
    """Its handler notes the events of timers that the order has by then."""
    app = App("shop", stream="KV_shop", subjects=["orders.>"], events=[Paid], timers=True)
    app.entities("orders", state=Order)

    @app.handler(Overdue, durable="reminding")
    async def remind(event: Overdue, ctx: Context) -> None:
        def decide(change: EntityChange) -> None:
            if change.state is None or change.state.timer != ctx.event_id:
                return  # set anew, or cancelled
            seen.append(event.number)
            change.set(Order("reminded"))

        await ctx.entities("orders").modify(event.order_id, decide)

    return app


async def set_timer(orders: AppClient, number: int, after: float = 3600.0) -> None:
    await orders.timers.set(TIMER, Overdue(order_id="o-1", number=number), after=after)


async def set_by_entity(orders: AppClient, number: int, after: float = 3600.0) -> None:
    def decide(change: EntityChange) -> None:
        change.set(Order("waiting", change.set_timer(TIMER, Overdue(order_id="o-1", number=number), after=after)))

    await orders.entities("orders").modify("o-1", decide)


async def nothing(orders: AppClient) -> None:
    pass


async def set_anew(orders: AppClient) -> None:
    await set_timer(orders, 2)


async def fire_again(orders: AppClient) -> None:
    await set_timer(orders, 2, after=0.0)

    async def has_fired() -> bool:
        return await orders.timers.get(TIMER) is None

    await until(has_fired)


async def fire_again_and_pay(orders: AppClient) -> None:
    await fire_again(orders)
    await orders.publish(Paid(order_id="o-1"))  # is the last one on the subject


async def cancel(orders: AppClient) -> None:
    assert not await orders.timers.cancel(TIMER)
    assert not await orders.timers.cancel(TIMER)  # there is only the mark
    assert await orders.timers.get(TIMER) is None
    assert [timer async for timer in orders.timers.list()] == []


async def cancel_another(orders: AppClient) -> None:
    await orders.timers.cancel("reminder of o-2")
    await orders.publish(Paid(order_id="o-1"), cancels="reminder of o-2")


async def pay(orders: AppClient) -> None:
    await orders.publish(Paid(order_id="o-1"), cancels=TIMER)


async def pay_twice(orders: AppClient) -> None:
    for _ in range(2):
        await orders.publish(Paid(order_id="o-1"), id="p-1", cancels=TIMER)


async def pay_if_nothing_came_since(orders: AppClient) -> None:
    last = (await (await orders.js.stream("ORDERS")).info()).state.last_sequence
    await orders.publish(Paid(order_id="o-1"), cancels=TIMER, expect=Expect(last_sequence=last))


async def cancel_and_set_anew(orders: AppClient) -> None:
    await cancel(orders)
    await set_anew(orders)


async def do_at_that_moment(
    orders: AppClient, does: Callable[[AppClient], Awaitable[object]], name: str = TIMER
) -> None:
    """Do something when the server has taken a timer out, and is about to store its event: it does not look again."""
    subject = f"timers.shop.{escape_token(name)}"
    query = message_query(last_for=subject)
    context = context_of(orders.js)
    timer = await context.run(context.api.get_message(orders.app.stream, query, direct=False))
    await does(orders)
    kept = {name: value for name, value in timer.headers.items() if not name.startswith("Nats-")}
    target = timer.headers.get("Nats-Schedule-Target")
    assert target is not None
    headers = kept | {"Nats-Scheduler": subject, "Nats-Schedule-Next": "purge"}
    await orders.js.publish(target, timer.data, headers=headers)


ENDS: dict[str, Callable[[AppClient], Awaitable[object]]] = {
    "cancelled": lambda orders: orders.timers.cancel(TIMER),
    "ended by an event": pay,
    "ended twice by an event": pay_twice,
    "ended by a guarded event": pay_if_nothing_came_since,
}

LATE: dict[str, tuple[Callable[[AppClient], Awaitable[None]], list[tuple[int, bool]]]] = {
    "nothing": (nothing, [(1, True)]),
    "set anew": (set_anew, [(1, False)]),
    "fired again": (fire_again, [(1, False), (2, True)]),
    "fired again, and more": (fire_again_and_pay, [(1, False), (2, True)]),
    "cancelled": (cancel, [(1, False)]),
    "another one cancelled": (cancel_another, [(1, True)]),
    "ended by an event": (pay, [(1, False)]),
    "ended twice by an event": (pay_twice, [(1, False)]),
    "ended by a guarded event": (pay_if_nothing_came_since, [(1, False)]),
    "cancelled and set anew": (cancel_and_set_anew, [(1, False)]),
}
"""What happens between a timer's firing and the handling of its event, and which events count then."""
