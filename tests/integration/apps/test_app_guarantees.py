"""What handlers promise when workers die, other clients interfere, or the process is asked to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from integration.apps.app_worker import APP, Placed
from support.apps import is_settled, publish, running, set_up, until
from support.distance import at_a_distance

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Breaker, Context, Event, Retry
from jetspark.app.dead_letters.access import AppDeadLetters
from jetspark.app.handlers.consumers import consumers_of
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.server import NatsServer

WORKER = Path(__file__).parent / "app_worker.py"


class Counted(Event, type="counted", key="name", subject="counts.{name}"):
    name: str
    number: int = 0


async def start_worker(server: NatsServer, log: Path, crash: str = "") -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKER),
        server.url,
        str(log),
        crash,
        env={**os.environ, "PYTHONPATH": str(WORKER.parents[2])},
    )


async def state_of(js: JetStream, store: HandlerStore, log: Path) -> str:
    """What is left to do, for a test that has waited for too long."""
    parts = [f"{each.dead_letter.origin.sequence} {each.dead_letter.status}" async for each in store.all_dead_letters()]
    parts += [f"{key} = {(await store.records.get(key)).value!r}" async for key in store.records.keys(">")]
    for name in (APP.stream, APP.spec.retry_stream):
        stream = await js.stream(name)
        info = await (await stream.consumer("shipping")).info()
        parts += [f"{name}: pending {info.pending}, ack pending {info.ack_pending}, floor {info.ack_floor}"]
        parts += [str((await stream.info(subjects_filter="retry.>")).state.subjects)]
    return "\n".join([*parts, _text_of(log)])


def _text_of(log: Path) -> str:
    return log.read_text()


# Each names a step and whether the worker dies just before or just after it has had its effect.
CRASHES = [
    "after RunHandler",
    "before WriteParked",
    "after WriteParked",
    "after WriteAttempts",
    "after DropAttempts",
    "after WriteSchedule",
    "after WriteDeadLetter",
    "before Acknowledge",
    "after Acknowledge",
    "before CloseDeadLetter",
    "after CloseDeadLetter",
    "after RequestRedrive",
    "before DropParked",
    "after DropParked",
]


@pytest.mark.slow
@pytest.mark.parametrize("crash", CRASHES)
async def test_a_worker_killed_at_any_step_loses_and_doubles_nothing(
    server: NatsServer, js: JetStream, tmp_path: Path, crash: str
) -> None:
    await set_up(js, APP)
    keys, numbers = "abcd", range(5)
    await publish(js, APP, *(Placed(order_id=key, number=number) for number in numbers for key in keys))
    log = tmp_path / "log"
    log.touch()
    store = await HandlerStore.open(js, APP.name, "shipping")
    process = await start_worker(server, log, crash)
    try:
        redriven = False

        async def is_over() -> bool:
            nonlocal process, redriven
            if process.returncode is not None:
                assert process.returncode == -signal.SIGKILL
                process = await start_worker(server, log)
            if not await is_settled(js, APP, "shipping"):
                return False
            dead_letters = [each async for each in store.all_dead_letters()]
            if not redriven and dead_letters:
                redriven = True
                (tmp_path / "log.mended").touch()
                for dead_letter in dead_letters:
                    if dead_letter.dead_letter.status == "open":
                        await store.request(dead_letter)
                return False
            return not dead_letters and redriven

        try:
            await until(is_over)
        except TimeoutError:
            raise AssertionError(await state_of(js, store, log)) from None
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    done = [(line["key"], line["number"]) for line in lines if line["what"] == "done"]
    died = any(line["what"] == "died" for line in lines)
    assert died, f"the worker never came to {crash!r}"
    counts = Counter(done)
    assert set(counts) == {(key, number) for key in keys for number in numbers}
    # What was not acknowledged when the worker died is done again, once: of each key, the last one that was done then.
    before = lines[: next(place for place, line in enumerate(lines) if line["what"] == "died")]
    last = {line["key"]: line["number"] for line in before if line["what"] == "done"}
    assert set(counts.values()) <= {1, 2}, counts
    assert {event for event, count in counts.items() if count == 2} <= set(last.items())
    for key in keys:
        first = list(dict.fromkeys(number for found, number in done if found == key))
        assert first == sorted(first), f"{key} out of order: {first}"
    # An effect that was recorded is never repeated; of each key, the last one's record may have been on its way.
    once = Counter(line["effect"] for line in lines if line["what"] == "effect")
    recorded = {f"{line['key']}{line['number']}" for line in before if line["what"] == "done"}
    last_effects = {line["effect"][0]: line["effect"] for line in before if line["what"] == "effect"}
    assert set(once.values()) <= {1, 2}, once
    assert {effect for effect, count in once.items() if count == 2} <= set(last_effects.values()) - recorded
    assert [key async for key in store.records.keys("parked.>")] == []


async def test_sigterm_finishes_what_runs_gives_back_the_rest_and_exits_with_0(
    server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    await set_up(js, APP)
    await publish(js, APP, *(Placed(order_id="slow", number=number) for number in range(100, 104)))
    log = tmp_path / "log"
    log.touch()
    process = await start_worker(server, log)
    try:
        await until(lambda: "begun" in log.read_text())
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["number"] for line in lines if line["what"] == "done"] == [100]
    consumer = await (await js.stream(APP.stream)).consumer("shipping")
    back = await consumer.fetch(3, timeout=30, fill=True)
    assert [message.metadata.stream_sequence for message in back] == [2, 3, 4]


async def test_a_transaction_happens_exactly_once(server: NatsServer, js: JetStream) -> None:
    app = App("ledger", stream="LEDGER", subjects=["counts.>"])
    runs = []

    @app.handler(Counted, durable="totals", idempotent="transaction", bucket="totals", concurrency=8)
    async def add(event: Counted, ctx: Context) -> None:
        runs.append(event.number)
        total = int(await ctx.tx.get("total") or 0)
        await ctx.tx.put("total", str(total + event.number).encode())

    await set_up(js, app)
    await publish(js, app, *(Counted(name=f"n{number}", number=number) for number in range(1, 21)))
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "totals"))
    kv = await js.kv("totals")
    assert (await kv.get("total")).value == b"210"
    assert len(runs) > 20  # some met, and were run again
    await (await (await js.stream("LEDGER")).consumer("totals")).reset(1)
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "totals"))
    assert (await kv.get("total")).value == b"210"


async def test_an_event_whose_time_ends_while_it_commits_is_done_or_a_dead_letter_and_never_both(
    server: NatsServer, js: JetStream
) -> None:
    app = App("late", stream="LATE", subjects=["counts.>"])
    has_failed: set[str] = set()

    @app.handler(
        Counted,
        durable="totals",
        idempotent="transaction",
        bucket="totals",
        concurrency=60,
        timeout=2.0,
        retry=Retry(attempts=1),
    )
    async def add(event: Counted, ctx: Context) -> None:
        # Each a little later than the one before: of some, the answer to the commit is on its way when time is over.
        if event.name not in has_failed:
            has_failed.add(event.name)
            await asyncio.sleep(1.0 + event.number * 0.02)
        await ctx.tx.put(event.name, b"1")

    names = {f"n{number}" for number in range(50)}
    await set_up(js, app)
    await publish(js, app, *(Counted(name=f"n{number}", number=number) for number in range(50)))
    async with at_a_distance(server, 0.05) as url, running(app, url):
        await until(lambda: is_settled(js, app, "totals"))
    kv = await js.kv("totals")

    async def counted() -> set[str]:
        return {key async for key in kv.keys() if not key.startswith("_done.")}  # noqa: SIM118

    done = await counted()
    dead = {dead_letter.key async for dead_letter in AppDeadLetters(app.spec, js).list()}
    assert done | dead == names
    assert done & dead == set()
    # What was given up has no effect when it is tried again by a redrive but its own.
    async with running(app, server.url):
        await AppDeadLetters(app.spec, js).redrive(handler="totals")
        await until(lambda: is_settled(js, app, "totals"))
    assert await counted() == names


async def test_a_breaker_pauses_the_consumer_for_every_worker(server: NatsServer, js: JetStream) -> None:
    app = App("breaking", stream="BREAKING", subjects=["counts.>"])
    is_away, done = True, []

    retry = Retry(attempts=50, first_s=0.01, max_s=0.05)

    @app.handler(Counted, durable="b", breaker=Breaker(failures=3, open_s=1.0), retry=retry)
    async def add(event: Counted) -> None:
        if is_away:
            raise OSError("away")
        done.append(event.number)

    await set_up(js, app)
    await publish(js, app, *(Counted(name=f"n{number}", number=number) for number in range(6)))
    consumer = await (await js.stream("BREAKING")).consumer("b")
    async with running(app, server.url):

        async def is_paused() -> bool:
            return bool((await consumer.info()).is_paused)

        await until(is_paused)
        is_away = False
        await until(lambda: len(done) == 6)
        await until(lambda: is_settled(js, app, "b"))


@pytest.mark.parametrize("partitions", [None, 2])
async def test_a_breaker_holds_back_retries_and_new_events_from_other_workers(
    server: NatsServer, js: JetStream, partitions: int | None
) -> None:
    begun, is_away = list[tuple[str, int]](), True

    def one_app(worker: str) -> App:
        app = App(f"halting{partitions}", stream="HALTING", subjects=["counts.>"])
        retry = Retry(attempts=50, first_s=0.2, in_lane_s=0.0)

        @app.handler(
            Counted, durable="h", breaker=Breaker(failures=3, open_s=300.0), retry=retry, partitions=partitions
        )
        async def add(event: Counted) -> None:
            begun.append((worker, event.number))
            if is_away:
                raise OSError("away")

        return app

    app = one_app("first")
    await set_up(js, app)
    places = [(await js.stream(place.stream), place.name) for place in consumers_of(app.spec, app.handlers["h"])]
    consumers = [await stream.consumer(name) for stream, name in places]

    async def are_paused() -> bool:
        return all([(await each.info()).is_paused for each in consumers])

    async def wait_for_a_worker() -> bool:
        return sum([(await each.info()).pending for each in consumers]) == 4

    async with running(app, server.url):
        await publish(js, app, *(Counted(name=f"n{number}", number=number) for number in range(3)))
        await until(are_paused)
        async with running(one_app("second"), server.url):
            await publish(js, app, Counted(name="n3", number=3))
            await until(wait_for_a_worker)  # three retries are due, and one event is new
            assert await are_paused()
            assert sorted(begun) == [("first", number) for number in range(3)]
    is_away = False
    for each in consumers:
        await each.resume()
    async with running(one_app("third"), server.url):
        await until(lambda: sorted(begun[3:]) == [("third", number) for number in range(4)])
