"""Every public operation is interrupted anywhere, and leaves a connection that works, nothing behind, and the truth.

Each operation (``support/operations.py``) runs twice to its end, to be measured, and then several times interrupted: a
task is cancelled after a number of loop steps or by a timeout, a thread gets a ``KeyboardInterrupt`` at a bytecode, by
a signal, or from another thread. A seed is a run::

    JETSPARK_FUZZ_RUNS=200 pytest tests/conformance/test_interrupts.py      # more of them
    JETSPARK_SEED=17 pytest "tests/conformance/test_interrupts.py" -k "fetch and uvloop"     # that one again
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support import seeds
from support.drivers import Driver
from support.in_place import InPlace, run_in_place
from support.operations import CLASSES, ROWS, WAITS_FOR_NOTHING, Row, World, interruption

import jetspark
import jetspark.blocking
from jetspark import StreamConfig
from jetspark.server import NatsServer

RUNS = int(os.environ.get("JETSPARK_FUZZ_RUNS", "2"))
SEEDS = seeds.given() or list(range(RUNS))
SETTLES_WITHIN_S = 30.0
# A run that is stopped at a bytecode is traced, and takes a second where it reads hundreds of answers.
pytestmark = pytest.mark.timeout(300 + 5 * len(SEEDS))

# What a connection's thread holds until it has something else to hold, which is what it handed out last; and what a
# session has, which is another one when an interruption had to end the first.
HELD = {
    "jetspark.core.parser.Parser": 1,
    "jetspark.core.parser._Sizes": 1,  # the parser's
    "jetspark.core.handshake.Handshake": 1,
    "jetspark.core.parser.HandshakeReader": 1,  # the handshake's
    "jetspark.core.parser._Kind": 2,  # of the messages that came last, and of the run they may be
    "jetspark.core.parser._Run": 1,
    "jetspark.core.handshake.ServerInfo": 2,
    "jetspark.errors.ConnectionLost": 1,
    "jetspark.core.subscription.Done": 2,
    "jetspark.core.subscription.Failed": 2,
    "jetspark.core.subscription.Ready": 2,
    "jetspark.blocking.waiter.Waiter": 2,
    "jetspark.blocking.message.Message": 2,
}
# A thread that is interrupted when it has made a subscription and has not handed it to anybody leaves that one behind:
# between a call and the assignment of its result there is no place for a ``try``.
MAKES_SUBSCRIPTIONS = {"_subscribe", "subscribe", "asked", "_restart", "__init__", "__enter__"}
MAY_STAY_WITH = {
    "jetspark.core.subscription.SubscriptionState",
    "jetspark.blocking.subscription.Subscription",
    "jetspark.blocking.waiter.Changed",
    "jetspark.blocking.source.SourceReader",
    "jetspark.blocking.subscription.SubscriptionReader",
    "jetspark.blocking.callbacks.CallbackRunner",  # has the thread, of which rows say by themselves whether it may stay
}


def test_the_table_has_every_public_operation() -> None:
    """A new method has to be interrupted too: give it a row."""
    public = {
        f"{cls.__name__}.{name}"
        for cls in CLASSES
        for name, value in inspect.getmembers(cls, inspect.isroutine)
        if not name.startswith("_") and value.__module__.startswith("jetspark")
    }
    covered = {name for row in ROWS.values() for name in row.covers}
    assert public - covered - WAITS_FOR_NOTHING == set()


def test_the_table_has_every_public_class_that_waits() -> None:
    waiting = {
        value
        for module in (jetspark, jetspark.batcher)
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__.startswith(("jetspark.aio", "jetspark.batcher.aio"))
        and any(map(inspect.iscoroutinefunction, vars(value).values()))
        and not value.__name__.endswith("Sink")
    }
    assert waiting - set(CLASSES) == set()


@pytest.fixture(scope="module")
def witness(server: NatsServer) -> Iterator[jetspark.blocking.Client]:
    with jetspark.blocking.connect(server.url) as nc:
        yield nc


@pytest.mark.parametrize("operation", ROWS)
def test_interrupted(operation: str, driver: Driver, server: NatsServer, witness: jetspark.blocking.Client) -> None:
    row = ROWS[operation]
    name = f"{operation.replace('.', '_')}_{driver.name}"
    if driver.name == "blocking":
        with jetspark.blocking.connect(server.url) as nc:
            js = nc.jetstream()
            run_in_place(fuzz(row, World("blocking", server.url, name, InPlace(nc), InPlace(js), witness)))
    else:
        driver.run(_on_loop(row, driver.name, name, server.url, witness))


async def _on_loop(row: Row, driver: str, name: str, url: str, witness: jetspark.blocking.Client) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with jetspark.connect(url) as nc:
        await fuzz(row, World(driver, url, name, nc, nc.jetstream(), witness))
    gc.collect()
    assert complaints == []


async def fuzz(row: Row, world: World) -> None:
    config = StreamConfig(
        name=world.name,
        subjects=[f"{world.name}.>"],
        storage="memory",
        allow_atomic=True,
        allow_batched=True,
        allow_direct=True,
    )
    world.stream = await world.js.create_stream(config)
    gc.collect()
    # What there is now is of no interest; looking through it would take most of the time. It stays frozen, with all the
    # tests that were collected: to thaw it would be to thaw these, too.
    gc.freeze()
    with contextlib.ExitStack() as stack:
        if world.is_blocking and row.name == "connect":
            # A thread that is interrupted when it has made a socket and has not named it leaves it to the collector.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", ResourceWarning)
        for world.number in (0, 1):  # the first run makes what is made once
            await row.run(world)
            await _check_connection(world)
        baseline = _left(world)
        for seed in SEEDS:
            world.number = 10 + seed
            world.sessions = world.nc._machine.sessions
            world.interruption = interruption(row, world.driver, random.Random(f"{row.name} {world.driver} {seed}"))
            try:
                await row.run(world)
                await _check_connection(world)
                await _check_nothing_is_left(world, row, baseline)
            except BaseException as error:
                error.add_note(f"{seeds.again(seed)}: {row.name} on {world.driver}, {world.interruption}")
                raise
        await world.js.publish(f"{world.name}.fence")
        for subject, content in world.seen.items():
            assert world.look(subject) == content, f"{subject} changed after its run was over"


async def _check_connection(world: World) -> None:
    """A request is answered, and a message is delivered."""
    await world.stream.info()
    async with await world.nc.subscribe(f"probe.{world.name}") as probe:
        await world.nc.publish(f"probe.{world.name}", b"%d" % world.number)
        await world.nc.flush()
        assert (await probe.next(30)).data == b"%d" % world.number


async def _check_nothing_is_left(world: World, row: Row, baseline: Counter[str]) -> None:
    deadline = time.monotonic() + SETTLES_WITHIN_S
    while left := _more(_left(world), baseline):
        may_leave = row.may_leave
        if world.interrupted_in in MAKES_SUBSCRIPTIONS:
            may_leave |= {"subscriptions"}
        if world.is_blocking and may_leave and set(left) <= may_leave | MAY_STAY_WITH:
            baseline |= _left(world)  # it stays, for all the runs that follow
            return
        assert time.monotonic() < deadline, f"left behind after {world.interrupted_in}: {left}"
        await world.sleep(0.02)


def _more(now: Counter[str], before: Counter[str]) -> dict[str, int]:
    return {name: count - before[name] for name, count in now.items() if count > before[name] + HELD.get(name, 0)}


def _left(world: World) -> Counter[str]:
    """Everything that an operation should have taken away with it."""
    client = world.nc._target if world.is_blocking else world.nc
    machine, transport = client._machine, client._transport
    left = Counter[str]()
    left["subscriptions"] = len(machine.subscriptions.all)
    left["requests"] = len(machine.requests)
    left["flushes"] = sum(ping.handle is not None for ping in machine._pings)
    left["attached"] = len(transport.dispatcher.attached)
    left["threads"] = sum(not thread.name.startswith(("test", "asyncio_")) for thread in threading.enumerate())
    if world.is_blocking:
        left["guests"] = bool(transport._lease.holder)
    else:
        left["tasks"] = len(asyncio.all_tasks())
        loop = asyncio.get_running_loop()
        left["timers"] = sum(not timer.cancelled() for timer in getattr(loop, "_scheduled", ()))
    gc.collect()
    for each in gc.get_objects():
        kind = type(each)
        if kind.__module__.startswith("jetspark.") or kind.__name__ == "Future":
            left[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return left


# ---- waits that end by themselves ------------------------------------------------------------------------------------


async def _next_in_vain(nc: jetspark.Client, silent: Any, times: int) -> None:
    for _ in range(times):
        with pytest.raises(jetspark.RequestTimeout):
            await silent.next(0.001)


async def _request_in_vain(nc: jetspark.Client, silent: Any, times: int) -> None:
    for _ in range(times):
        with pytest.raises(jetspark.RequestTimeout):
            await nc.request("silent", timeout=0.001)


async def _complete_in_vain(nc: jetspark.Client, silent: Any, times: int) -> None:
    js = nc.jetstream(ack_timeout=30)
    future = await js.publish_async("silent", b"nobody acknowledges this")
    getattr(future, "_target", future).add_done_callback(lambda future: future.exception())
    for _ in range(times):
        with pytest.raises(jetspark.RequestTimeout):
            await js.publish_async_complete(0.001)


@pytest.mark.parametrize("wait", [_next_in_vain, _request_in_vain, _complete_in_vain])
def test_waiting_in_vain_again_and_again_takes_no_memory(wait: Any, driver: Driver, server: NatsServer) -> None:
    async def work() -> None:
        async with driver.connect(server.url, drain_timeout_s=0.5) as nc, await nc.subscribe("silent") as silent:
            await wait(nc, silent, 2)
            before = _waiting()
            await wait(nc, silent, 30)
            assert _waiting() - before <= 4

    def _waiting() -> int:
        gc.collect()
        return sum(type(each).__name__ in ("Future", "Waiter", "Task") for each in gc.get_objects())

    driver.run(work())
