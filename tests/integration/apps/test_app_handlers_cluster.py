"""Handlers on three nodes, of which one dies for good: what waits for a retry, and the dead letters, survive it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from support.apps import is_settled, publish, running, until
from support.cluster import apply_on_new_cluster, leading_node

import jetspark
from jetspark import Consumer, Stream, StreamConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Event, Reject, Retry, RetryIn
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters, run_redrive
from jetspark.errors import JetSparkError
from jetspark.server import NatsCluster

EVENTS = 30


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    number: int


def orders(replicas: int | None, done: Counter[int], is_mended: asyncio.Event) -> App:
    app = App("orders", stream=StreamConfig(name="ORDERS", subjects=["orders.>"], replicas=replicas))

    @app.handler(Paid, durable="billing", ack_wait_s=5.0, retry=Retry(in_lane_s=0.5))
    async def bill(event: Paid) -> None:
        if event.number % 3 == 0 and not is_mended.is_set():
            raise Reject("a letter")
        if event.number % 3 == 1 and not is_mended.is_set():
            raise RetryIn(8.0)  # stored as a schedule
        done[event.number] += 1

    return app


async def has_stored(js: JetStream, app: App, name: str) -> bool:
    """Every event is acknowledged, and is done, a letter, or a schedule."""
    info = await (await (await js.stream(app.stream)).consumer(name)).info()
    return not info.pending and not info.ack_pending


async def are_replicated(js: JetStream, app: App) -> bool:
    """All copies of everything have caught up; the server makes them after it has said yes, consumers last."""
    topology = app.topology()
    places: list[Stream | Consumer] = [await js.stream(each.name) for each in topology.streams]
    places += [await js.stream(f"KV_{each.bucket}") for each in topology.buckets]
    places += [await (await js.stream(each.stream)).consumer(each.name) for each in topology.consumers]
    groups = [(await each.info()).cluster for each in places]
    return all(group is not None and [each["current"] for each in group.replicas] == [True, True] for group in groups)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["ORDERS_RETRY", "ORDERS_DLQ", "KV_orders_handlers"])
async def test_a_node_that_dies_takes_no_retry_and_no_dead_letter_with_it(lost: str) -> None:
    done: Counter[int] = Counter()
    is_mended = asyncio.Event()
    app = orders(3, done, is_mended)
    with NatsCluster(3) as cluster:
        urls = [node.url for node in cluster.nodes]
        async with jetspark.connect(urls, reconnect_wait_s=0.05) as client:
            js = client.jetstream(timeout=10.0)
            # Made with one replica, as by somebody who has only just got a cluster.
            await apply_on_new_cluster(orders(1, done, is_mended), urls)
            steps = (await app.plan(urls)).steps
            assert {(step.action, step.safety) for step in steps} == {("update", "safe")}
            assert {step.name for step in steps} >= {"ORDERS", "ORDERS_RETRY", "ORDERS_DLQ", "orders_handlers"}
            await apply_on_new_cluster(app, urls)
            assert (await app.plan(urls)).is_empty
            await until(lambda: are_replicated(js, app))
            await publish(js, app, *(Paid(order_id=f"o{number}", number=number) for number in range(EVENTS)))
            async with running(app, urls):
                await until(lambda: has_stored(js, app, "billing"))
            is_mended.set()
            node = await leading_node(cluster, await js.stream(lost))
            await asyncio.to_thread(node.kill)  # and it stays dead

            alive = [each.url for each in cluster.nodes if each is not node]

            async def has_dead_letters() -> bool:
                try:
                    dead_letters = await read_dead_letters(js, app, DeadLetterFilter())
                    assert (await app.plan(alive, request_timeout_s=10.0)).is_empty
                except JetSparkError as error:
                    if not error.may_pass:
                        raise
                    return False  # a new leader is being elected
                return len(dead_letters) == EVENTS // 3

            await until(has_dead_letters)
            async with running(app, alive, request_timeout_s=10.0):
                progress = await run_redrive(js, app, DeadLetterFilter(), wait_s=120.0)
                assert progress.results is not None
                assert (progress.results.handled, progress.results.failed) == (EVENTS // 3, 0)
                await until(lambda: is_settled(js, app, "billing"))
        assert done == Counter(dict.fromkeys(range(EVENTS), 1))
