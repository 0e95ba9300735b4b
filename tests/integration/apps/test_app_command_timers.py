"""Commands that set and end timers, on a real server: a payment and its time-out race, and exactly one of them wins."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random

import msgspec
import pytest
from support.apps import until
from support.commands import WAYS, deciding
from support.paying import Look, Pay, Place, Prolong, paying

from jetspark.app import AppClient, Command, Refused
from jetspark.errors import BoundaryConflict
from jetspark.server import NatsCluster

ORDERS = 40
WAIT_S = 0.6


async def call(orders: AppClient, command: Command, id: str) -> None:
    """As a caller does who means it: a conflict has stored nothing, and is asked again with the same id.

    On replicas a boundary with a wildcard is guarded by the end of the stream, which all orders move.
    """
    for _ in range(10):
        with contextlib.suppress(BoundaryConflict):
            await orders.call(command, command_id=id, timeout=60.0)
            return
    pytest.fail(f"{id}: nothing but conflicts")


async def order(orders: AppClient, number: int, rng: random.Random) -> str:
    """Placed, prolonged or not, and paid in time, at the very moment, or too late; returns what came of it."""
    id, has_time = f"o-{number}", number % 4 == 1
    wait_s = 3600.0 if has_time else WAIT_S
    await call(orders, Place(order_id=id, wait_s=wait_s), f"place-{number}")
    try:
        if number % 3 == 0:
            await asyncio.sleep(WAIT_S / 2)
            await call(orders, Prolong(order_id=id, wait_s=wait_s), f"prolong-{number}")
        if number % 4 == 0:
            return "order.overdue"
        await asyncio.sleep(rng.uniform(0.5, 1.6) * WAIT_S)
        await call(orders, Pay(order_id=id), f"pay-{number}")
    except Refused:
        return "order.overdue"
    return "order.paid"


async def events_of(orders: AppClient) -> dict[str, list[str]]:
    """The types of the events of each order, as they are stored. No timer was early."""
    found: dict[str, list[str]] = {}
    async for message in (await orders.js.stream("ORDERS")).get_messages(1, subject="orders.>"):
        body = msgspec.json.decode(message.data)
        found.setdefault(body["data"]["order_id"], []).append(body["type"])
        if body["type"] == "order.overdue":
            assert message.timestamp >= datetime.datetime.fromisoformat(body["time"])
    return found


async def race(url: str, replicas: int, way: str = WAYS[0]) -> None:
    app, rng = paying(replicas=replicas), random.Random(4)
    async with deciding(app, url, way, workers=2) as orders:
        ends = await asyncio.gather(*(order(orders, number, rng) for number in range(ORDERS)))

        async def is_quiet() -> bool:
            # A timer that is due leaves the list a moment before its event is stored.
            found = await events_of(orders)
            are_over = all({"order.paid", "order.overdue"} & set(found[f"o-{number}"]) for number in range(ORDERS))
            return are_over and [timer async for timer in orders.timers.list()] == []

        await until(is_quiet)
        found = await events_of(orders)
        for number, end in enumerate(ends):
            # The time-out is inside the boundary of the payment, and ends in the batch of it. The server may store it
            # behind that all the same, if it was about to: then it does not count.
            stored = found[f"o-{number}"]
            assert next(each for each in stored if each in ("order.paid", "order.overdue")) == end, (number, stored)
            seen = (await orders.call(Look(order_id=f"o-{number}"))).data
            counted = {"Paid": "order.paid", "Overdue": "order.overdue"}
            assert [counted[each] for each in seen if each in counted] == [end], (number, stored, seen)
        assert set(ends) == {"order.paid", "order.overdue"}


@pytest.mark.parametrize("way", WAYS)
async def test_a_payment_and_its_time_out_never_both_count(nats_url: str, way: str) -> None:
    await race(nats_url, 1, way)


@pytest.mark.slow
async def test_a_payment_and_its_time_out_never_both_count_on_three_replicas() -> None:
    async with NatsCluster(3) as cluster:
        await race(cluster.nodes[0].url, 3)
