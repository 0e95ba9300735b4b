"""The stages of the demo without Spark: publish, fold with live workers, compare, replay, redrive.

The published events include some of an old version and some that are unreadable. A worker is killed while it folds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters, run_redrive
from jetspark.app.handlers.dead_letter_box import StoredDeadLetter
from jetspark.app.replay import ReplayRecord, ReplayRequest, Verification, VerifyOptions, run_replay, verify
from jetspark.app.replay.verification import read_states
from jetspark.demo.screen import DemoStage
from jetspark.demo.shop import RELEASE_1
from jetspark.demo.spark_fold import start_spark
from jetspark.demo.stages import Demo, Moment, buckets_of, rate, until_folded
from jetspark.errors import MessageNotFound, RequestTimeout
from jetspark.server.process import finish_in_thread
from jetspark.state.changes import Current

__all__ = ["compare", "fold_live", "list_and_redrive", "publish", "replay_range"]

# ---- publish ---------------------------------------------------------------------------------------------------------


OLD_ONE_IN = 50
SHOWN_EVERY = 1000

T = TypeVar("T")


async def publish(demo: Demo) -> None:
    """Store the events, and check that the stream has all of them."""
    app, traffic, js = demo.shop.release1, demo.shop.traffic, demo.environment.js
    old, unreadable = demo.count // OLD_ONE_IN, traffic.UNREADABLE
    await app.apply(demo.environment.url)
    demo.spark = start_spark(demo)
    with demo.screen.stage("publish", demo.count) as stage:
        stage.say("Spark starts at the same time")
        began = time.perf_counter()
        async with js.fast_publisher(message_ids=True) as publisher:
            await publisher.publish_many(_shown(stage, traffic.old_payments(old, demo.tally)))
            await publisher.publish_many(
                (f"demo.orders.paid.unknown-{number}", data) for number, data in enumerate(unreadable)
            )
        async with app.connect(demo.environment.url) as orders, orders.bulk() as bulk:
            rest = demo.count - old - len(unreadable)
            await bulk.publish_many(_shown(stage, traffic.history(rest, demo.tally), old))
        elapsed_s = time.perf_counter() - began
        state = (await (await js.stream(app.stream)).info()).state
        demo.last = state.last_sequence
        stage.say(f"{rate(demo.count, elapsed_s)}, beside the start of Spark")
    demo.screen.found(
        "publish",
        f"{state.messages:,} events of {demo.count:,} stored, {rate(demo.count, elapsed_s)} beside the start of Spark; "
        f"{old:,} of an older version, {len(unreadable)} unreadable",
        is_good=state.messages == demo.count,
    )


def _shown(stage: DemoStage, events: Iterable[T], done: int = 0) -> Iterator[T]:
    for number, event in enumerate(events, done + 1):
        yield event
        if number % SHOWN_EVERY == 0:
            stage.reached(number)


# ---- fold ------------------------------------------------------------------------------------------------------------


KILL_SERVER_AT, KILL_WORKER_AT = 0.1, 0.4
"""Shares of the events. With this backlog a worker stores its progress every two seconds, so both kills come later."""
ARRIVAL_S = 0.2
START_S = 120.0


async def fold_live(demo: Demo) -> None:
    with demo.screen.stage("fold live", demo.last) as stage:
        began = time.perf_counter()
        await demo.start_worker(RELEASE_1).started(START_S)
        started_at = time.perf_counter()
        reached = (await _until(demo, stage, int(demo.last * KILL_SERVER_AT)))[-1]
        speed = f"start-up {started_at - began:.1f} s, then {rate(reached.sequence, reached.at_s - started_at)}"
        server_crash = await _kill_server(demo, stage)
        await _until(demo, stage, int(demo.last * KILL_WORKER_AT))
        worker_crash = await _kill_worker(demo, stage)
        await _until(demo, stage, demo.last)
        stage.say(speed)
    demo.screen.found("fold live", speed)
    if server_crash is None:
        demo.screen.found("kill the server", "not tried: the server is yours", is_good=None)
    else:
        demo.screen.found("kill the server", server_crash)
    demo.screen.found("kill a worker", worker_crash)


async def _kill_server(demo: Demo, stage: DemoStage) -> str | None:
    """Kill the server and start it again; returns the row's text, None if the server is not the demo's."""
    server = demo.environment.server
    if server is None:
        return None
    stage.say("server killed; it starts again")
    killed_at = time.perf_counter()
    await finish_in_thread(server.kill)
    await finish_in_thread(server.start)
    ready_s = time.perf_counter() - killed_at
    at = (await _until(demo, stage, 1))[-1].sequence
    if at >= demo.last:
        return f"kill -9 after the last event, {at:,}: back after {ready_s:.1f} s, and nothing is lost"
    went_on_s = (await _until(demo, stage, at + 1))[-1].at_s - killed_at
    return (
        f"kill -9 at event {at:,}: back after {ready_s:.1f} s, and the fold continued by itself after {went_on_s:.1f} s"
    )


async def _kill_worker(demo: Demo, stage: DemoStage) -> str:
    """Kill the worker and start another one; returns the row's text."""
    assert demo.worker is not None
    stage.say("worker killed; another one starts")
    demo.worker.kill()
    killed_at = time.perf_counter()
    demo.start_worker(RELEASE_1)
    # Messages of the dead worker arrive within this time. The next worker waits for its lease, which takes longer.
    await asyncio.sleep(ARRIVAL_S)
    at = (await _until(demo, stage, 1))[-1].sequence
    if at >= demo.last:
        return f"kill -9 after the last event, {at:,}: the next worker had nothing to do"
    took_over_s = (await _until(demo, stage, at + 1))[-1].at_s - killed_at
    return f"kill -9 at event {at:,}: the next worker continued there {took_over_s:.1f} s later"


async def _until(demo: Demo, stage: DemoStage, sequence: int) -> list[Moment]:
    assert demo.worker is not None
    return await until_folded(demo, stage, buckets_of(demo.shop.release1), sequence, demo.worker.check)


# ---- compare: the states of Spark and of the live workers, key by key ------------------------------------------------


async def compare(demo: Demo) -> None:
    names = list(demo.spark_buckets)
    with demo.screen.stage("compare", len(names)) as stage:
        results = []
        states: dict[str, Mapping[str, Current]] = {}
        for number, name in enumerate(names, 1):
            results.append(await _compared(demo, name, states))
            stage.reached(number)
        keys = sum(found.keys for found in results)
        digests = ", ".join(found.digest.partition(":")[2][:8] for found in results)
        is_equal = all(found.is_equal and found.digest == found.expected_digest for found in results)
        stage.say(f"{keys:,} keys: {'equal' if is_equal else 'NOT EQUAL'}")
    differing = "; ".join(f"{found.projection}: {found.difference_count} keys differ" for found in results)
    result = f"{keys:,} keys of {len(names)} projections, the same bytes on both: digests {digests}"
    demo.screen.found("Spark = live", result if is_equal else differing, is_good=is_equal)
    _check_sums(demo, states)
    for bucket in demo.spark_buckets.values():
        await demo.environment.js.delete_kv(bucket)


async def _compared(demo: Demo, name: str, states: dict[str, Mapping[str, Current]]) -> Verification:
    """Compare the live bucket with Spark's at the last common event; adds Spark's states to ``states``."""

    async def fresh(boundary: int) -> Mapping[str, Current]:
        states[name] = await read_states(demo.environment.js, demo.spark_buckets[name])
        return states[name]

    return await verify(demo.environment.js, demo.shop.release1, name, VerifyOptions(to_seq=demo.last), fresh=fresh)


def _check_sums(demo: Demo, states: Mapping[str, Mapping[str, Current]]) -> None:
    """Compare the sums of the states with the publisher's counts, which do not depend on any fold.

    Spark's states suffice, because the live ones were compared with them before.
    """
    status, revenue, parcels = [
        [json.loads(each.value) for each in states[name].values() if each.value]
        for name in ("order_status", "daily_revenue", "parcels")
    ]
    tally = demo.tally
    found = (len(status), sum(day["orders"] for day in revenue), sum(day["cents"] for day in revenue), sum(parcels))
    wanted = (tally.orders, tally.paid, tally.paid_cents, tally.scans)
    text = "{:,} orders, {:,} paid, {:,} cents, {:,} parcels scanned"
    result = f"{text.format(*found)}: as counted by the publisher"
    if found != wanted:
        result = f"{text.format(*found)}; the publisher counted {text.format(*wanted)}"
    demo.screen.found("state = events", result, is_good=found == wanted)


# ---- replay ----------------------------------------------------------------------------------------------------------


MAX_EVENTS = 20_000


async def replay_range(demo: Demo) -> None:
    first = demo.last // 4 + 1
    last = min(first + MAX_EVENTS - 1, demo.last // 2)
    with demo.screen.stage("replay a range", last - first + 1) as stage:

        def show(record: ReplayRecord) -> None:
            stage.reached(max(0, record.at - first + 1))

        request = ReplayRequest(from_seq=first, to_seq=last)
        done = await run_replay(demo.environment.js, demo.shop.release1, "order_status", request, on_progress=show)
        stage.say(f"{done.changed} keys changed")
    demo.screen.found(
        "replay a range",
        f"events {first:,} to {last:,}, of {done.keys:,} orders: "
        + ("nothing changed, the state includes them all" if not done.changed else f"{done.changed} keys CHANGED"),
        is_good=done.is_done and not done.changed,
    )


# ---- redrive ---------------------------------------------------------------------------------------------------------


HANDLER, PROJECTIONS = "refunds", "projections"
WAIT_S = 45.0
"""Events of a killed worker are redelivered after five seconds; a busy machine takes longer."""
POLL_S = 0.1


async def list_and_redrive(demo: Demo) -> None:
    shop = demo.shop
    refused = sum(event.amount_cents > shop.max_refund_cents for event in demo.tally.cancelled)
    wanted = {HANDLER: refused, PROJECTIONS: len(shop.traffic.UNREADABLE)}
    with demo.screen.stage("dead letters") as stage:
        dead_letters = await _await_dead_letters(demo, wanted)
        found = Counter(each.dead_letter.handler for each in dead_letters)
        stage.say(f"{len(dead_letters)} dead letters")
    result = f"found {dict(found)}, expected {wanted}"
    if found == wanted:
        result = (
            f"{found[HANDLER]} refunds refused, {found[PROJECTIONS]} events unreadable: one dead letter each, though "
            "two engines read them"
        )
    demo.screen.found("dead letters", result, is_good=found == wanted)
    chosen = next((each for each in dead_letters if each.dead_letter.handler == HANDLER), None)
    if chosen is None:
        demo.screen.found("redrive one", "not tried: no refund has a dead letter", is_good=None)
        return
    with demo.screen.stage("redrive one") as stage:
        await _redrive(demo, stage, chosen)


async def _await_dead_letters(demo: Demo, wanted: dict[str, int]) -> list[StoredDeadLetter]:
    """Wait for the expected number of dead letters; returns the present ones after ``WAIT_S`` seconds."""
    give_up_at = time.perf_counter() + WAIT_S
    while True:
        dead_letters = await read_dead_letters(demo.environment.js, demo.shop.release2, DeadLetterFilter())
        if Counter(each.dead_letter.handler for each in dead_letters) == wanted or time.perf_counter() > give_up_at:
            return dead_letters
        await asyncio.sleep(POLL_S)


async def _redrive(demo: Demo, stage: DemoStage, chosen: StoredDeadLetter) -> None:
    """Redrive one dead letter with the handler of release 2, and wait for the event it publishes."""
    app, js, dead_letter = demo.shop.release2, demo.environment.js, chosen.dead_letter
    began = time.perf_counter()
    sequence = str(dead_letter.origin.sequence)
    await run_redrive(js, app, DeadLetterFilter.parse(HANDLER, [f"sequence={sequence}"]))
    stream = await js.stream(app.stream)
    while True:
        left = await read_dead_letters(js, app, DeadLetterFilter.parse(HANDLER, [f"sequence={sequence}"]))
        try:
            await stream.get_message(last_for=f"demo.orders.refunded.{dead_letter.key}")
            if not left:
                break
        except MessageNotFound:
            pass
        if time.perf_counter() - began > WAIT_S:
            raise RequestTimeout(f"redrive of the dead letter of event {sequence}", WAIT_S)
        await asyncio.sleep(POLL_S)
    took_s = time.perf_counter() - began
    stage.say(f"{dead_letter.key} refunded")
    demo.screen.found(
        "redrive one",
        f"order {dead_letter.key}, refused by release 1, was refunded by release 2 after {took_s:.1f} s",
    )
