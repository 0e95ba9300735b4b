"""Workers that are stopped, starved or cut off begin nothing that another one may have; one that holds events without
progress says so, and recovers or ends. On the model server, in virtual time."""

from __future__ import annotations

import asyncio
import gc
from typing import Any
from unittest import mock

import pytest
from simulation.partition_world import CURRENT, Process, ProcessLoop

from jetspark.aio.connector import connect
from jetspark.app import App, Breaker, Context, Event, HandlerObserver, HeldEvents, Reject, Retry
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.handlers.handler_worker import HandlerWorker
from jetspark.app.handlers.inheritance import expect_inherited
from jetspark.app.handlers.record_watch import RecordWatch
from jetspark.app.handlers.stall_watch import StallWatch
from jetspark.app.provisioning import apply_topology
from jetspark.app.workers import run_app
from jetspark.errors import HandlerStalled, RequestTimeout
from jetspark.testing import run_in_virtual_time
from jetspark.testing.model import Delivery
from jetspark.testing.network import Publication
from jetspark.testing.virtual_loop import model_network

URL = "nats://model:4222"


class Happened(Event, type="happened", key="name", subject="stalls.{name}"):
    name: str
    number: int


@pytest.mark.parametrize("partitions", [None, 3])
def test_a_key_that_waits_for_an_event_that_never_comes_is_reported_and_continues(
    partitions: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[tuple[str, int]] = []
    all_done = asyncio.Event()
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])
    options: dict[str, Any] = {} if partitions is None else {"partitions": partitions, "takeover_s": 3.0}

    @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=4.0, **options)
    async def handle(event: Happened) -> None:
        done.append((event.name, event.number))
        if event.number >= 2:
            all_done.set()

    looked_up = 0

    async def leaking(machine: Any, *args: Any) -> dict[int, int]:
        """Have the first look-up leave something behind, as an error in the worker would."""
        nonlocal looked_up
        looked_up += 1
        if looked_up == 1:
            machine.expect("k", 0, asyncio.get_running_loop().time())
        return await expect_inherited(machine, *args)

    async def main() -> float:
        async with connect(URL) as client, app.connect(URL) as publisher:
            await apply_topology(client.jetstream(), app)
            running = asyncio.create_task(run_app(app.spec, URL, only=(), stop_timeout=2.0))
            loop = asyncio.get_running_loop()
            began = loop.time()
            for number in range(3):
                await publisher.publish(Happened(name="k", number=number))
            await all_done.wait()
            took = loop.time() - began
            all_done.clear()
            await publisher.publish(Happened(name="k", number=3))
            await all_done.wait()
            running.cancel()
            await asyncio.wait([running])
            return took

    with mock.patch("jetspark.app.handlers.intake.expect_inherited", leaking):
        took = run_in_virtual_time(main())
    assert done == [("k", number) for number in range(4)]
    assert took < 2 * 3600
    assert "1 keys of 3 held events make no progress: event 1 of key 'k' waits for event 0" in caplog.text
    assert "no progress for 1 keys; pending events are looked up again" in caplog.text


def test_a_partition_that_moves_while_the_server_is_away_is_let_go_of_all_the_same() -> None:
    """Else its events stay in progress here, and no reader gets them."""
    done: list[int] = []
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])
    network = model_network()

    async def main() -> None:
        began, may_end, all_done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        @app.handler(Happened, durable="h", ack_wait_s=60.0, timeout=100.0, partitions=3, takeover_s=3.0)
        async def handle(event: Happened) -> None:
            began.set()
            await may_end.wait()
            done.append(event.number)
            if event.number == 5:
                all_done.set()

        async with connect(URL) as client, app.connect(URL) as publisher:
            await apply_topology(client.jetstream(), app)
            for number in range(6):
                await publisher.publish(Happened(name="k", number=number))
            running = asyncio.create_task(run_app(app.spec, URL, only=(), stop_timeout=2.0))
            await began.wait()
            [worker] = [each for each in gc.get_objects() if isinstance(each, HandlerWorker) and each.app is app.spec]
            await asyncio.sleep(1.0)
            assert [item.sequence for item in worker.machine.items] == [1, 2, 3, 4, 5, 6]
            network.kill_server(20.0)
            readers = worker._readers
            assert readers is not None
            await asyncio.gather(*(readers._hand_on(partition) for partition in range(3)))
            assert [item.sequence for item in worker.machine.items] == [1]  # it runs, and is settled here
            assert worker.machine.lanes.expected == []
            worker.records.changed.set()  # they come back
            may_end.set()
            await all_done.wait()
            running.cancel()
            await asyncio.wait([running])

    run_in_virtual_time(main(), network)
    assert done == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("when", ["first", "idle", "many", "silent"])
def test_a_process_that_was_stopped_while_it_pulled_begins_nothing_that_another_may_have(when: str) -> None:
    """It finds in its socket what the server has sent before, and may have given to others since."""
    begun: list[tuple[int, int]] = []
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])
    network = model_network()
    process = Process(1)
    stops: list[float] = []

    def stop(delivery: Delivery) -> None:
        if delivery.reply.startswith("$JS.ACK.STALLS_h_PARTITIONS.") and not stops:
            stops.append(network.clock.now)
            if when == "silent":
                for wire in process.wires:
                    wire.silence(15.0)
            else:
                process.is_stopped = True
                network.clock.after(15.0, process.resume)

    async def main() -> None:
        all_done = asyncio.Event()

        @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=4.0, partitions=1, takeover_s=30.0)
        async def handle(event: Happened, ctx: Context) -> None:
            begun.append((event.number, ctx.delivered))
            if len(begun) == (5 if when == "many" else 1):
                all_done.set()

        async def life() -> None:
            CURRENT.set(process)
            await run_app(app.spec, URL, only=(), stop_timeout=2.0)

        async with connect(URL) as client, app.connect(URL) as publisher:
            await apply_topology(client.jetstream(), app)
            network.front.reply_watchers.append(stop)
            running = asyncio.create_task(life())
            if when == "idle":
                await asyncio.sleep(100.0)
            for number in range(5 if when == "many" else 1):
                await publisher.publish(Happened(name="k", number=number))
            await all_done.wait()
            running.cancel()
            await asyncio.wait([running])

    with asyncio.Runner(loop_factory=lambda: ProcessLoop(network)) as runner:
        runner.run(main())
    assert stops
    assert begun[0][1] > 1
    assert [number for number, _ in begun] == sorted(number for number, _ in begun)


def test_what_was_pulled_before_a_look_up_that_takes_long_does_not_begin_after_its_ack_wait() -> None:
    begun: list[tuple[int, int]] = []
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])
    network = model_network()
    lost: list[float] = []

    def lose(message: Publication) -> bool:
        """For ten seconds nothing that is said about the partition arrives, once events of it were delivered."""
        lost_ones = ("$JS.API.CONSUMER.INFO.STALLS_h_PARTITIONS.", "$JS.ACK.STALLS_h_PARTITIONS.")
        if not message.subject.startswith(lost_ones) or not delivered:
            return True
        if not lost or network.clock.now < lost[0] + 10.0:
            lost.append(network.clock.now)
            return False
        return True

    delivered: list[str] = []

    def note(delivery: Delivery) -> None:
        if delivery.reply.startswith("$JS.ACK.STALLS_h_PARTITIONS."):
            delivered.append(delivery.reply)

    async def main() -> None:
        all_done = asyncio.Event()

        @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=4.0, partitions=1, takeover_s=30.0)
        async def handle(event: Happened, ctx: Context) -> None:
            begun.append((event.number, ctx.delivered))
            if event.number == 2:
                all_done.set()

        async with connect(URL) as client, app.connect(URL) as publisher:
            await apply_topology(client.jetstream(), app)
            network.front.reply_watchers.append(note)
            network.front.gates.append(lose)
            for number in range(3):
                await publisher.publish(Happened(name="k", number=number))
            running = asyncio.create_task(run_app(app.spec, URL, only=(), stop_timeout=2.0))
            await all_done.wait()
            running.cancel()
            await asyncio.wait([running])

    run_in_virtual_time(main(), network)
    assert lost
    assert [number for number, _ in begun] == [0, 1, 2]
    assert all(delivered > 1 for _, delivered in begun)


def test_a_worker_whose_network_is_silent_lets_go_of_its_events_after_their_ack_wait() -> None:
    """A cut without an error: what is written to the socket never arrives, and the connection seems to be there."""
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])
    network = model_network()

    async def main() -> None:
        began, may_end = asyncio.Event(), asyncio.Event()

        @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=1000.0, partitions=1, takeover_s=3.0)
        async def handle(event: Happened) -> None:
            began.set()
            await may_end.wait()

        async with connect(URL) as client, app.connect(URL) as publisher:
            await apply_topology(client.jetstream(), app)
            for number in range(3):
                await publisher.publish(Happened(name="k", number=number))
            running = asyncio.create_task(run_app(app.spec, URL, only=(), stop_timeout=2.0))
            await began.wait()
            [worker] = [each for each in gc.get_objects() if isinstance(each, HandlerWorker) and each.app is app.spec]
            machine, loop = worker.machine, asyncio.get_running_loop()
            await asyncio.sleep(60.0)  # ten ack_waits
            held = machine.items
            assert [item.sequence for item in held] == [1, 2, 3]
            assert not any(machine.has_lapsed(item, loop.time()) for item in held)
            with mock.patch.object(network, "learning_s", return_value=3600.0):
                network.cut_client(max(wire.client for wire in network.wires))
            await asyncio.sleep(10.0)
            assert worker.is_connected
            assert machine.items == held[:1]  # it runs
            assert machine.has_lapsed(held[0], loop.time())
            assert worker.intakes[0]._held() == set()
            may_end.set()
            running.cancel()
            await asyncio.wait([running])

    run_in_virtual_time(main(), network)


def test_events_that_wait_for_a_watch_that_is_behind_are_named_and_continue(caplog: pytest.LogCaptureFixture) -> None:
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])
    done: list[int] = []
    is_behind = False
    kept: list[Any] = []
    note = RecordWatch._apply

    def late(self: RecordWatch, entry: Any) -> None:
        kept.append(entry)
        while kept and not is_behind:
            note(self, kept.pop(0))

    async def main() -> None:
        nonlocal is_behind
        all_done = asyncio.Event()

        @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=4.0, partitions=1, takeover_s=3.0)
        async def handle(event: Happened) -> None:
            done.append(event.number)
            if event.number == 2:
                all_done.set()

        async with connect(URL) as client, app.connect(URL) as publisher:
            await apply_topology(client.jetstream(), app)
            running = asyncio.create_task(run_app(app.spec, URL, only=(), stop_timeout=2.0))
            await asyncio.sleep(10.0)
            is_behind = True
            for number in range(3):
                await publisher.publish(Happened(name="k", number=number))
            await asyncio.sleep(45.0)
            assert done == []
            is_behind = False
            await all_done.wait()
            running.cancel()
            await asyncio.wait([running])

    with mock.patch.object(RecordWatch, "_apply", late):
        run_in_virtual_time(main())
    assert done == [0, 1, 2]
    assert "cannot look up redelivered events (the watch of the handlers' bucket is at revision" in caplog.text
    assert "messages of <Consumer STALLS_h_PARTITIONS/h-p0> were pulled" in caplog.text


# ---- what does not recover ends the worker ---------------------------------------------------------------------------


class Told(HandlerObserver):
    def __init__(self) -> None:
        self.held: list[HeldEvents] = []

    def on_held(self, held: HeldEvents) -> None:
        self.held.append(held)


async def run_until_it_ends(app: App, count: int) -> BaseException | None:
    """Run an application with some events, until it ends by itself; returns its error, or None after ten minutes."""
    async with connect(URL) as client, app.connect(URL) as publisher:
        await apply_topology(client.jetstream(), app)
        for number in range(count):
            await publisher.publish(Happened(name="k", number=number))
        running = asyncio.create_task(run_app(app.spec, URL, only=(), stop_timeout=2.0))
        await asyncio.wait([running], timeout=600.0)
        if running.done():
            return running.exception()
        running.cancel()
        await asyncio.wait([running])
        return None


@pytest.mark.parametrize("swallowed", [2, 10**9])
def test_a_handler_that_swallows_cancellations_is_cancelled_again_or_its_worker_ends(swallowed: int) -> None:
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])
    told = Told()
    app.observe(told)
    left = swallowed
    attempts: list[int] = []
    is_over = False

    @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=4.0, retry=Retry(attempts=2, first_s=0.1))
    async def handle(event: Happened, ctx: Context) -> None:
        nonlocal left
        attempts.append(ctx.attempt)
        while not is_over and left:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                left -= 1
                if not left:
                    raise

    async def main() -> BaseException | None:
        nonlocal is_over
        error = await run_until_it_ends(app, 1)
        is_over = True  # so that the loop can be closed
        return error

    error = run_in_virtual_time(main())
    if swallowed == 2:
        assert error is None
        assert attempts == [1, 2]
        return
    assert isinstance(error, HandlerStalled)
    assert error.still_runs
    assert "event 1 of key 'k' is in attempt 1, which has not ended" in str(error)
    assert (told.held[-1].events, told.held[-1].running, told.held[-1].pulled) == (1, 1, 0)
    assert told.held[-1].oldest_s > 2 * (6.0 + 4.0)
    assert "has not ended" in told.held[-1].stalled[0]


def test_a_step_that_is_retried_all_the_time_ends_the_worker() -> None:
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])

    @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=4.0)
    async def handle(event: Happened) -> None:
        raise Reject("no")

    async def fail(self: HandlerStore, step: Any) -> Any:
        raise RequestTimeout("storing the dead letter", 5.0)

    with mock.patch.object(HandlerStore, "perform", fail):
        error = run_in_virtual_time(run_until_it_ends(app, 1))
    assert isinstance(error, HandlerStalled)
    assert not error.still_runs


@pytest.mark.parametrize("options", [{}, {"rate": 100.0}, {"breaker": Breaker()}])
@pytest.mark.parametrize("is_woken", [True, False])
def test_events_that_may_begin_and_do_not_are_begun_or_end_the_worker(is_woken: bool, options: dict[str, Any]) -> None:
    """As if a runner had missed that there is something to do."""
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])
    done: list[int] = []
    wake, recover = HandlerWorker.wake_idle, StallWatch._recover
    is_recovering = False

    @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=4.0, **options)
    async def handle(event: Happened) -> None:
        done.append(event.number)

    def missed(self: HandlerWorker, count: int) -> None:
        if is_recovering and is_woken:
            wake(self, count)

    async def recovering(self: StallWatch, stalled: Any) -> None:
        nonlocal is_recovering
        is_recovering = True
        await recover(self, stalled)
        is_recovering = False

    with (
        mock.patch.object(HandlerWorker, "wake_idle", missed),
        mock.patch.object(StallWatch, "_recover", recovering),
        mock.patch.object(HandlerWorker, "_run_items", waiting_first(HandlerWorker._run_items)),
    ):
        error = run_in_virtual_time(run_until_it_ends(app, 3))
    if is_woken:
        assert (done, error) == ([0, 1, 2], None)
    else:
        assert isinstance(error, HandlerStalled)
        assert "may begin, and no runner has taken it" in str(error)


def waiting_first(run_items: Any) -> Any:
    async def run(self: HandlerWorker) -> None:
        await self._wait_for_work()
        await run_items(self)

    return run


def test_messages_that_are_pulled_and_never_received_end_the_worker() -> None:
    app = App("stalls", stream="STALLS", subjects=["stalls.>"])

    @app.handler(Happened, durable="h", ack_wait_s=6.0, timeout=4.0, partitions=1, takeover_s=3.0)
    async def handle(event: Happened) -> None:
        pass

    async def fail(*args: Any) -> Any:
        raise RequestTimeout("looking up what others have", 5.0)

    with mock.patch("jetspark.app.handlers.intake.expect_inherited", fail):
        error = run_in_virtual_time(run_until_it_ends(app, 3))
    assert isinstance(error, HandlerStalled)
    assert "1 messages of" in str(error) or "3 messages of" in str(error)
    assert "are not received" in str(error)
