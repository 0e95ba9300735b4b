"""Sessions come and go, the connection stays: what survives, what does not, and what is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from support.drivers import Driver, Recorder, on_both_drivers, until
from support.patience import PATIENCE_S
from support.peers import INFO, Proxy, behave, greet, scripted_server, stay_silent

import jetspark
from jetspark.server import NatsCluster, NatsServer


@on_both_drivers
async def test_subscriptions_live_again_after_a_restart_on_the_same_port(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        plain = await nc.subscribe("plain")
        wild = await nc.subscribe("wild.*", queue="q")
        gone = await nc.subscribe("gone")
        await gone.unsubscribe()
        await nc.flush()
        await asyncio.to_thread(own.kill)
        await events.wait_for(jetspark.Disconnected)
        assert not nc.is_connected
        while_down = await nc.subscribe("while.down")
        await asyncio.to_thread(own.start)
        await events.wait_for(jetspark.Reconnected)
        for subject in ("plain", "wild.card", "gone", "while.down"):
            await nc.publish(subject, subject.encode())
        await nc.flush()
        assert (await plain.next(30)).data == b"plain"
        assert (await wild.next(30)).data == b"wild.card"
        assert (await while_down.next(30)).data == b"while.down"
        assert gone.received == 0
    # How many attempts the server's absence took is not the subject.
    kinds = [type(event) for event in events.events if not isinstance(event, jetspark.ReconnectFailed)]
    assert kinds == [jetspark.Connected, jetspark.Disconnected, jetspark.Reconnected, jetspark.Closed]


@on_both_drivers
async def test_the_rest_of_a_message_limit_survives_two_restarts(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        limited = await nc.subscribe("limited", max_messages=5)
        for restarts in (1, 2):
            await nc.publish("limited")
            await nc.publish("limited")
            await nc.flush()
            await until(lambda restarts=restarts: limited.received == 2 * restarts)  # type: ignore[misc]
            await asyncio.to_thread(own.kill)
            await events.wait_for(jetspark.Disconnected, restarts)
            await asyncio.to_thread(own.start)
            await events.wait_for(jetspark.Reconnected, restarts)
        for _ in range(5):
            await nc.publish("limited")
        assert len([message async for message in limited]) == 5
        await nc.flush()
        assert limited.received == 5


@on_both_drivers
async def test_what_is_published_while_disconnected_arrives_in_order(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        subscription = await nc.subscribe("buffered")
        await nc.publish("buffered", b"before")
        await nc.flush()
        await asyncio.to_thread(own.kill)
        lost = await events.wait_for(jetspark.Disconnected)
        assert (lost.unconfirmed_messages, lost.buffered_messages) == (0, 0)
        for number in range(1000):
            await nc.publish("buffered", b"%d" % number)
        assert nc.buffered_bytes > 0
        flushed = asyncio.ensure_future(nc.flush(timeout=30))
        await asyncio.to_thread(own.start)
        await flushed
        received = [(await subscription.next(30)).data for _ in range(1001)]
        assert received == [b"before", *(b"%d" % number for number in range(1000))]


@on_both_drivers
async def test_a_full_buffer_makes_the_publisher_wait(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events, send_buffer_bytes=10_000) as nc:
        subscription = await nc.subscribe("waiting")
        await nc.flush()
        await asyncio.to_thread(own.kill)
        await events.wait_for(jetspark.Disconnected)
        accepted = 0

        async def publish_all() -> None:
            nonlocal accepted
            for number in range(100):
                await nc.publish("waiting", b"%d" % number + bytes(990))
                accepted += 1

        publishing = asyncio.ensure_future(publish_all())
        await until(lambda: accepted == 9)
        assert 9_000 < nc.buffered_bytes <= 10_000
        assert not publishing.done()
        await asyncio.to_thread(own.start)
        await publishing
        received = [int((await subscription.next(30)).data.rstrip(b"\0")) for _ in range(100)]
        assert received == list(range(100))


@on_both_drivers
async def test_a_full_buffer_can_raise_instead_and_the_message_is_not_accepted(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events, send_buffer_bytes=10_000, when_full="raise") as nc:
        subscription = await nc.subscribe("raising")
        await nc.flush()
        await asyncio.to_thread(own.kill)
        await events.wait_for(jetspark.Disconnected)
        for _ in range(9):
            await nc.publish("raising", bytes(1000))
        with pytest.raises(jetspark.BufferFull, match="of 10000 bytes wait for the network"):
            await nc.publish("raising", bytes(1000))
        with pytest.raises(jetspark.BufferFull):
            await nc.request("raising", bytes(1000))
        await asyncio.to_thread(own.start)
        await nc.flush(timeout=30)
        await until(lambda: subscription.received == 9)


@on_both_drivers
async def test_a_peer_that_does_not_read_makes_the_publisher_wait(driver: Driver) -> None:
    """Connected all the time: the bound holds against a slow network too, not only against none."""
    may_read = asyncio.Event()
    sink = bytearray()

    async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await may_read.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        while data := await reader.read(1 << 20):
            sink.extend(data)
            if data.endswith(b"PING\r\n"):
                writer.write(b"PONG\r\n")

    count, payload = 1000, bytes(100_000)
    async with scripted_server(read_late) as url, driver.connect(url, send_buffer_bytes=1 << 20) as nc:
        accepted = 0

        async def publish_all() -> None:
            nonlocal accepted
            for _ in range(count):
                await nc.publish("late", payload)
                accepted += 1

        publishing = asyncio.ensure_future(publish_all())
        while True:  # until it stands still
            before = accepted
            await asyncio.sleep(0.3)
            if before == accepted:
                break
        assert 0 < accepted < count
        assert nc.buffered_bytes <= 1 << 20
        may_read.set()
        await publishing
        await nc.flush(timeout=30)
        assert sink.count(b"PUB late 100000\r\n") == count


@on_both_drivers
async def test_a_buffered_message_the_next_server_does_not_accept_takes_no_other_with_it(
    driver: Driver, own: NatsServer
) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        subscription = await nc.subscribe("sizes.*")
        await asyncio.to_thread(own.kill)
        await events.wait_for(jetspark.Disconnected)
        for number in range(10):
            await nc.publish(f"sizes.{number}", bytes(5000 if number == 5 else 50))
        flushing = asyncio.ensure_future(nc.flush(timeout=30))
        with NatsServer(jetstream=False, port=own.port, max_payload_bytes=1000):
            await events.wait_for(jetspark.Reconnected)
            with pytest.raises(jetspark.PayloadTooLarge, match=r"message to 'sizes\.5' of 5000 bytes"):
                await flushing
            arrived = [(await subscription.next(30)).subject for _ in range(9)]
            assert arrived == [f"sizes.{number}" for number in range(10) if number != 5]
            assert [event.error.subject for event in events.of(jetspark.ErrorReported)] == ["sizes.5"]
            assert len(events.of(jetspark.Disconnected)) == 1
            await nc.flush()
            await nc.close()


@on_both_drivers
async def test_closing_releases_a_publisher_that_waits_for_room(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    nc = await driver.connect(own.url, on_event=events, send_buffer_bytes=1000)
    await asyncio.to_thread(own.kill)
    await events.wait_for(jetspark.Disconnected)
    await nc.publish("full", bytes(900))
    waiting = asyncio.ensure_future(nc.publish("full", bytes(900)))
    with pytest.raises(jetspark.ConnectionLost, match=r"\(1 published messages are unconfirmed\)"):
        await nc.close(timeout=0.2)
    with pytest.raises(jetspark.ConnectionClosed):
        await waiting


class Load:
    """Numbered messages, one after the other, until told to stop."""

    def __init__(self, nc: jetspark.Client) -> None:
        self._nc = nc
        self.published = 0
        self.is_stopped = False

    async def run(self) -> None:
        while not self.is_stopped:
            await self.publish()
            if self.published % 50 == 0:  # a load, not a flood: the tests read only at the end
                await asyncio.sleep(0.001)

    async def publish(self) -> None:
        await self._nc.publish("load", b"%d" % self.published)
        self.published += 1

    async def more(self, count: int) -> None:
        """Wait until so many more have been published."""
        mark = self.published + count
        await until(lambda: self.published > mark)

    async def arrived(self, subscription: jetspark.Subscription) -> list[int]:
        """The numbers received, up to the last one published; none twice, none out of order."""
        numbers: list[int] = []
        while not numbers or numbers[-1] < self.published - 1:
            numbers.append(int((await subscription.next(30)).data))
        assert subscription.dropped == 0
        assert numbers == sorted(set(numbers)), "duplicated or out of order"
        return numbers


@on_both_drivers
async def test_under_load_a_lost_message_is_always_one_that_was_reported(driver: Driver, own: NatsServer) -> None:
    """Every message arrives once and in order, or is among those told to be in doubt. No other fate exists."""
    events = Recorder()
    async with (
        Proxy(own.port) as proxy,
        driver.connect(own.url) as witness,
        driver.connect(proxy.url, on_event=events, reconnect_wait_s=0.01) as nc,
    ):
        subscription = await witness.subscribe("load")
        await witness.flush()
        load = Load(nc)

        async def confirm() -> None:
            while not load.is_stopped:
                with contextlib.suppress(jetspark.ConnectionLost):
                    await nc.flush(timeout=30)

        working = asyncio.gather(load.run(), confirm())
        for cuts in range(1, 6):
            await load.more(500)
            proxy.cut()
            await events.wait_for(jetspark.Reconnected, cuts)
        load.is_stopped = True
        await working
        await load.publish()  # what was last before may be among the lost
        await nc.flush()

        arrived = await load.arrived(subscription)
        in_doubt: set[int] = set()
        for lost in events.of(jetspark.Disconnected):
            end = lost.published_messages - lost.buffered_messages
            in_doubt.update(range(end - lost.unconfirmed_messages, end))
        assert set(range(load.published)) - set(arrived) <= in_doubt
        assert len(in_doubt) < load.published


@on_both_drivers
async def test_a_server_killed_under_load_comes_back_and_so_does_the_load(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    async with driver.connect(own.url, on_event=events) as nc:
        subscription = await nc.subscribe("load")
        await nc.flush()
        load = Load(nc)
        loading = asyncio.ensure_future(load.run())
        await load.more(2000)
        await asyncio.to_thread(own.kill)
        lost = await events.wait_for(jetspark.Disconnected)
        await load.more(500)
        await asyncio.to_thread(own.start)
        await events.wait_for(jetspark.Reconnected)
        load.is_stopped = True
        await loading
        await nc.flush()
        first_buffered = lost.published_messages - lost.buffered_messages
        arrived = await load.arrived(subscription)
        assert arrived[-(load.published - first_buffered) :] == list(range(first_buffered, load.published))


@on_both_drivers
async def test_a_flush_that_is_cut_off_says_how_many_messages_are_in_doubt(driver: Driver) -> None:
    async def swallow_then_hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        while await reader.readline() != b"PING\r\n":
            pass
        writer.write(b"PONG\r\n")
        while await reader.readline() != b"PING\r\n":
            pass

    async with scripted_server(swallow_then_hang_up, behave) as url:
        events = Recorder()
        async with driver.connect(url, on_event=events) as nc:
            for _ in range(10):
                await nc.publish("known")
            await nc.flush()
            assert nc.unconfirmed_messages == 0
            for _ in range(7):
                await nc.publish("unknown")
            with pytest.raises(jetspark.ConnectionLost) as lost:
                await nc.flush()
            assert lost.value.unconfirmed_messages == 7
            told = await events.wait_for(jetspark.Disconnected)
            assert (told.unconfirmed_messages, told.buffered_messages) == (7, 0)
            await nc.flush()


@on_both_drivers
async def test_a_session_that_ends_while_readers_finish_ends_the_drain_with_an_error(driver: Driver) -> None:
    """The server never confirms what was published: it hangs up when it should send no more messages."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        while await reader.readline() != b"PING\r\n":
            pass

    async with scripted_server(hang_up, behave) as url:
        nc = await driver.connect(url)
        await nc.subscribe("read", callback=lambda message: None)
        await nc.publish("written", b"x")
        with pytest.raises(jetspark.ConnectionLost, match="1 published messages are unconfirmed") as lost:
            await nc.drain(timeout=10)
        assert lost.value.unconfirmed_messages == 1
        assert nc.is_closed


@on_both_drivers
async def test_a_connection_cut_in_the_middle_of_a_frame_loses_only_that_session(
    driver: Driver, own: NatsServer
) -> None:
    async with Proxy(own.port) as proxy, driver.connect(own.url) as publisher:
        events = Recorder()
        async with driver.connect(proxy.url, on_event=events, ignore_discovered_servers=True) as nc:
            subscription = await nc.subscribe("cut")
            await nc.flush()
            for round_number in range(1, 6):
                proxy.cut_after(to_client_bytes=20 + 131 * round_number)
                for _ in range(20):
                    await publisher.publish("cut", bytes(100))
                await publisher.flush()
                await events.wait_for(jetspark.Reconnected, round_number)
                await nc.flush()
            received = subscription.received
            await publisher.publish("cut", b"whole")
            await publisher.flush()
            await until(lambda: subscription.received == received + 1)
            messages = [await subscription.next(30) for _ in range(received + 1)]
            assert {message.data for message in messages} == {bytes(100), b"whole"}


@on_both_drivers
async def test_a_request_outlives_a_reconnect(driver: Driver, own: NatsServer) -> None:
    async with Proxy(own.port) as proxy, driver.connect(own.url) as service:
        asked = await service.subscribe("patient")
        await service.flush()
        events = Recorder()
        async with driver.connect(proxy.url, on_event=events) as nc:
            asking = asyncio.ensure_future(nc.request("patient", timeout=30))
            question = await asked.next(30)
            proxy.cut()
            await events.wait_for(jetspark.Reconnected)
            await nc.flush()
            await question.respond(b"here you are")
            assert (await asking).data == b"here you are"


@on_both_drivers
async def test_a_server_that_stops_answering_is_noticed(driver: Driver) -> None:
    async def greet_then_freeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await stay_silent(reader, writer)

    async with scripted_server(greet_then_freeze, behave) as url:
        events = Recorder()
        options = jetspark.ConnectOptions(ping_interval_s=0.05, max_outstanding_pings=2)
        async with driver.connect(url, options=options, on_event=events) as nc:
            lost = await events.wait_for(jetspark.Disconnected)
            assert lost.reason == "2 pings without an answer"
            await events.wait_for(jetspark.Reconnected)
            await nc.flush()


@on_both_drivers
async def test_a_server_that_drops_us_at_the_door_is_one_failed_attempt(driver: Driver) -> None:
    connections = 0

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await greet(reader, writer)  # the answer to the login and the end of the connection arrive together

    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await behave(reader, writer)

    async with scripted_server(stay, drop, drop, drop, stay) as url:
        events = Recorder()
        async with driver.connect(url, on_event=events, reconnect_wait_s=0.01) as nc:
            await nc.flush()
            assert connections == 1
        async with driver.connect(f"{url},{url.replace('127.0.0.1', 'localhost')}", reconnect_wait_s=0.01) as nc:
            await until(lambda: connections == 5 and nc.is_connected)
            await nc.flush()
            assert connections == 5


@on_both_drivers
async def test_without_reconnect_the_first_loss_is_the_last(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    nc = await driver.connect(own.url, reconnect=False, on_event=events)
    subscription = await nc.subscribe("ends")
    await asyncio.to_thread(own.kill)
    closed = await events.wait_for(jetspark.Closed)
    assert isinstance(closed.error, jetspark.ConnectionLost)
    assert nc.is_closed
    with pytest.raises(jetspark.ConnectionLost):
        await subscription.next(30)


@on_both_drivers
async def test_attempts_are_bounded_when_asked_for(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    nc = await driver.connect(own.url, max_reconnect_attempts=3, reconnect_wait_s=0.01, on_event=events)
    flushing: asyncio.Future[None] | None = None
    await asyncio.to_thread(own.kill)
    await events.wait_for(jetspark.Disconnected)
    flushing = asyncio.ensure_future(nc.flush(timeout=30))
    closed = await events.wait_for(jetspark.Closed)
    assert isinstance(closed.error, jetspark.NoServersAvailable)
    assert "connection refused" in closed.error.failures[own.url]
    with pytest.raises(jetspark.JetSparkError):
        await flushing


@on_both_drivers
async def test_a_lame_duck_is_announced(driver: Driver) -> None:
    with NatsServer(jetstream=False, extra_config='lame_duck_duration: "30s"\nlame_duck_grace_period: "1s"') as server:
        events = Recorder()
        nc = await driver.connect(server.url, on_event=events)
        await asyncio.to_thread(server.lame_duck)
        announced = await events.wait_for(jetspark.LameDuck)
        assert announced.server == server.url
        await nc.close()


@on_both_drivers
async def test_a_lame_duck_is_left_under_load_without_a_message_in_doubt(driver: Driver) -> None:
    wait = 'lame_duck_duration: "30s"\nlame_duck_grace_period: "20s"'
    with NatsCluster(2, jetstream=False, extra_config=wait) as cluster:
        first, second = cluster.nodes
        events = Recorder()
        async with (
            driver.connect(second.url) as witness,
            driver.connect(first.url, on_event=events) as nc,
        ):
            subscription = await witness.subscribe("load")
            own = await nc.subscribe("own")
            await witness.flush()
            await nc.flush()
            await until(lambda: second.url in nc.servers)
            load = Load(nc)
            # Interest travels between the nodes on its own time.
            while not subscription.received:
                await load.publish()
                await asyncio.sleep(0.02)
            early = load.published
            loading = asyncio.ensure_future(load.run())
            await load.more(500)
            await asyncio.to_thread(first.lame_duck)
            await events.wait_for(jetspark.LameDuck)
            lost = await events.wait_for(jetspark.Disconnected)
            assert lost.unconfirmed_messages == 0
            again = await events.wait_for(jetspark.Reconnected)
            assert again.server == second.url
            await load.more(500)
            load.is_stopped = True
            await loading
            await nc.publish("own", b"here")
            assert (await own.next(30)).data == b"here"
            await nc.flush()
            missing = set(range(early, load.published))
            while missing:
                missing.discard(int((await subscription.next(30)).data))
        await asyncio.to_thread(first.kill)  # it would take its time


@on_both_drivers
async def test_an_answer_under_way_is_waited_for_before_a_lame_duck_is_left(driver: Driver) -> None:
    async def quack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        goodbye: list[bytes] = []
        while line := await reader.readline():
            if line.startswith(b"PUB question "):
                reply = line.split()[2]
                writer.write(INFO.replace(b"}", b',"ldm":true}'))
            elif line == b"PING\r\n":
                writer.write(b"PONG\r\n")
                if not goodbye:
                    await asyncio.sleep(0.05)
                    writer.write(b"MSG %b 1 4\r\nlate\r\n" % reply)
            elif line.startswith(b"UNSUB "):
                goodbye.append(line)

    async with scripted_server(quack) as duck, scripted_server(behave) as other:
        events = Recorder()
        async with driver.connect([duck, other], on_event=events) as nc:
            assert (await nc.request("question", timeout=10)).data == b"late"
            assert (await events.wait_for(jetspark.Disconnected)).unconfirmed_messages == 0
            assert (await events.wait_for(jetspark.Reconnected)).server == other
            await nc.flush()


@on_both_drivers
async def test_a_peer_that_sends_pings_and_takes_no_answers_is_dropped(driver: Driver) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        while not writer.is_closing():
            writer.write(b"PING\r\n" * 10_000)
            await writer.drain()

    async with scripted_server(flood, behave) as url:
        events = Recorder()
        async with driver.connect(url, on_event=events, send_buffer_bytes=1000) as nc:
            lost = await events.wait_for(jetspark.Disconnected)
            assert "sends PINGs and takes no answers" in lost.reason
            await events.wait_for(jetspark.Reconnected)
            await nc.flush()


@on_both_drivers
async def test_servers_the_cluster_no_longer_names_are_forgotten(driver: Driver) -> None:
    async def change_addresses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        for number in range(50):
            urls = ",".join(f'"10.{number}.{high}.{low}:4222"' for high in range(4) for low in range(100))
            writer.write(INFO.replace(b"}", b',"connect_urls":[%b]}' % urls.encode()))
        writer.write(INFO.replace(b"}", b',"connect_urls":["10.0.0.1:4222"]}'))
        await reader.read()

    async with scripted_server(change_addresses) as url:
        events = Recorder()
        most = 0

        def on_event(event: jetspark.ConnectionEvent) -> None:
            nonlocal most
            most = max(most, len(nc.servers)) if isinstance(event, jetspark.ServersDiscovered) and nc else most
            events(event)

        nc = None
        nc = await driver.connect(url, on_event=on_event)
        await until(lambda: set(nc.servers) == {url, "nats://10.0.0.1:4222"})
        assert most <= 257
        await nc.close(timeout=0)


@on_both_drivers
async def test_the_servers_reason_for_hanging_up_is_told(driver: Driver) -> None:
    async def complain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await reader.readline()
        writer.write(b"-ERR 'Stale Connection'\r\n")

    async with scripted_server(complain, behave) as url:
        events = Recorder()
        async with driver.connect(url, on_event=events) as nc:
            await nc.subscribe("anything")
            lost = await events.wait_for(jetspark.Disconnected)
            assert lost.reason == "Stale Connection"
            await events.wait_for(jetspark.Reconnected)
            await nc.flush()
        assert [str(event.error) for event in events.of(jetspark.ErrorReported)] == [f"{url}: Stale Connection"]


@on_both_drivers
async def test_closing_while_disconnected_does_not_wait_for_a_server(driver: Driver, own: NatsServer) -> None:
    events = Recorder()
    nc = await driver.connect(own.url, on_event=events)
    await asyncio.to_thread(own.kill)
    await events.wait_for(jetspark.Disconnected)
    async with asyncio.timeout(30):
        await nc.close()
    assert nc.is_closed


@pytest.mark.slow
@on_both_drivers
async def test_in_a_cluster_traffic_goes_on_when_our_node_is_killed(driver: Driver) -> None:
    async with NatsCluster(3, jetstream=False) as cluster:
        events = Recorder()
        async with driver.connect(cluster.nodes[0].url, on_event=events) as nc:
            await until(lambda: len(nc.servers) == 3)
            async with driver.connect(cluster.nodes[1].url) as other:
                subscription = await nc.subscribe("traffic")
                answered = await nc.subscribe("ask", callback=_answer)
                await nc.flush()
                await until(lambda: not events.of(jetspark.Disconnected))
                await asyncio.to_thread(cluster.nodes[0].kill)
                again = await events.wait_for(jetspark.Reconnected)
                assert again.server in (cluster.nodes[1].url, cluster.nodes[2].url)
                await nc.flush()
                # Interest travels between the nodes on its own time: ask until it has arrived.
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        try:
                            assert (await other.request("ask", b"still there?", timeout=5)).data == b"yes"
                            break
                        except jetspark.NoResponders:
                            await asyncio.sleep(0.02)
                for number in range(100):
                    await other.publish("traffic", b"%d" % number)
                assert [int((await subscription.next(30)).data) for _ in range(100)] == list(range(100))
                assert answered.received >= 1


async def _answer(message: jetspark.Message) -> None:
    await message.respond(b"yes")
