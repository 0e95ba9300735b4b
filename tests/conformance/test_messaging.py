"""Publish, subscribe, request: what both drivers promise, on a real server."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
import uvloop
from support.drivers import Driver, Recorder, on_both_drivers, until

import jetspark
from jetspark.server import NatsServer, Permissions, User


@on_both_drivers
async def test_a_published_message_arrives_whole(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("orders.*")
        await nc.publish("orders.created", b"line one\r\nMSG line two 1 3\r\n\0\xff", reply="answers.here")
        message = await subscription.next(30)
        assert message.subject == "orders.created"
        assert message.data == b"line one\r\nMSG line two 1 3\r\n\0\xff"
        assert message.reply == "answers.here"
        assert len(message.headers) == 0


@pytest.mark.parametrize("driver", ["asyncio", "uvloop"], indirect=True)
def test_a_client_belongs_to_the_event_loop_that_made_it(driver: Driver, url: str) -> None:
    first, second = (uvloop.new_event_loop() if driver.name == "uvloop" else asyncio.new_event_loop() for _ in "12")

    async def connect() -> jetspark.Client:
        nc: jetspark.Client = await driver.connect(url)
        return nc

    nc = first.run_until_complete(connect())
    subscription = first.run_until_complete(nc.subscribe("loops"))
    first.run_until_complete(nc.flush())
    subscriptions = len(nc._machine.subscriptions.all)

    async def use_elsewhere() -> None:
        for use in (
            lambda: nc.publish("loops", b"never"),
            lambda: nc.request("loops", b"never"),
            lambda: nc.subscribe("loops"),
            nc.flush,
            lambda: subscription.unsubscribe(5),
        ):
            with pytest.raises(jetspark.UsageError, match="belongs to another event loop"):
                await use()

    second.run_until_complete(use_elsewhere())
    assert nc.buffered_bytes == 0
    assert len(nc._machine.subscriptions.all) == subscriptions
    first.run_until_complete(nc.publish("loops", b"here"))
    assert first.run_until_complete(subscription.next(30)).data == b"here"
    first.run_until_complete(nc.close())
    first.close()
    second.close()


@on_both_drivers
async def test_headers_arrive_with_every_value_and_their_case(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("headed")
        headers = jetspark.Headers({"X-One": "1", "x-many": ["a", "b"], "Empty": ""})
        await nc.publish("headed", b"data", headers=headers)
        await nc.publish("headed", headers={"Only": "headers"})
        first, second = await subscription.next(30), await subscription.next(30)
        assert first.data == b"data"
        assert first.headers["x-one"] == "1"
        assert first.headers.get_all("X-Many") == ["a", "b"]
        assert list(first.headers) == ["X-One", "x-many", "Empty"]
        assert (second.data, second.headers["only"]) == (b"", "headers")


@on_both_drivers
async def test_messages_keep_their_order_and_none_is_missing(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        subscription = await nc.subscribe("ordered.>")
        await nc.flush()
        for number in range(5000):
            await other.publish(f"ordered.{number % 7}", b"%d" % number)
        await other.flush()
        received = [int((await subscription.next(30)).data) for _ in range(5000)]
        assert received == list(range(5000))
        assert subscription.dropped == 0


@on_both_drivers
async def test_a_message_of_the_largest_size_arrives(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("large")
        payload = bytes(range(256)) * (nc.max_payload_bytes // 256)
        await nc.publish("large", payload)
        assert (await subscription.next(30)).data == payload
        with pytest.raises(jetspark.PayloadTooLarge, match=f"{len(payload) + 1} bytes"):
            await nc.publish("large", payload + b"!")
        with pytest.raises(jetspark.PayloadTooLarge):
            await nc.publish("large", payload, headers={"counts": "too"})


@on_both_drivers
async def test_a_queue_group_shares_the_messages(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        members = [await nc.subscribe("work", queue="workers") for _ in range(3)]
        observer = await nc.subscribe("work")
        for number in range(300):
            await nc.publish("work", b"%d" % number)
        await nc.flush()
        await until(lambda: observer.received == 300)
        shares = [member.received for member in members]
        assert sum(shares) == 300
        assert min(shares) > 0


@on_both_drivers
async def test_a_callback_sees_every_message_one_after_the_other(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        seen: list[int] = []
        active = 0

        async def callback(message: jetspark.Message) -> None:
            nonlocal active
            active += 1
            assert active == 1
            await asyncio.sleep(0)
            seen.append(int(message.data))
            active -= 1

        await nc.subscribe("called", callback=callback)
        for number in range(100):
            await nc.publish("called", b"%d" % number)
        await until(lambda: len(seen) == 100)
        assert seen == list(range(100))


@on_both_drivers
async def test_a_callback_that_raises_is_reported_and_called_again(driver: Driver, url: str) -> None:
    events = Recorder()
    async with driver.connect(url, on_event=events) as nc:
        seen: list[bytes] = []

        async def callback(message: jetspark.Message) -> None:
            seen.append(message.data)
            if message.data == b"bad":
                raise ValueError("bad data")

        await nc.subscribe("raising", callback=callback)
        await nc.publish("raising", b"bad")
        await nc.publish("raising", b"good")
        await until(lambda: len(seen) == 2)
        reported = await events.wait_for(jetspark.ErrorReported)
        assert isinstance(reported.error, ValueError)


@on_both_drivers
async def test_a_subscription_ends_after_its_number_of_messages(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        limited = await nc.subscribe("counted", max_messages=3)
        later = await nc.subscribe("counted")
        for _ in range(5):
            await nc.publish("counted")
        await nc.flush()
        assert len([message async for message in limited]) == 3
        assert limited.is_finished
        await until(lambda: later.received == 5)
        await later.unsubscribe(7)
        for _ in range(5):
            await nc.publish("counted")
        assert len([message async for message in later]) == 7


@on_both_drivers
async def test_after_unsubscribe_what_was_received_can_be_read_and_nothing_more_comes(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("ending")
        await nc.publish("ending", b"1")
        await nc.flush()
        await until(lambda: subscription.received == 1)
        await subscription.unsubscribe()
        await nc.publish("ending", b"2")
        await nc.flush()
        assert [message.data async for message in subscription] == [b"1"]
        with pytest.raises(jetspark.ConnectionClosed, match="'ending' is over"):
            await subscription.next(30)


@on_both_drivers
async def test_next_without_a_message_times_out(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("quiet")
        with pytest.raises(jetspark.RequestTimeout, match=r"'quiet': no answer within 0\.05 s"):
            await subscription.next(0.05)
        await nc.publish("quiet", b"now")
        assert (await subscription.next(30)).data == b"now"


@on_both_drivers
async def test_a_request_gets_its_own_answer(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as service:

        async def double(message: jetspark.Message) -> None:
            await message.respond(message.data * 2, headers={"Took": "no time"})

        await service.subscribe("double", callback=double)
        await service.flush()
        answers = await asyncio.gather(*(nc.request("double", b"%d" % number) for number in range(50)))
        assert [answer.data for answer in answers] == [b"%d" % number * 2 for number in range(50)]
        assert answers[0].headers["took"] == "no time"


@on_both_drivers
async def test_a_request_nobody_listens_to_fails_at_once(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        with pytest.raises(jetspark.NoResponders, match=r"'nobody\.home'"):
            await nc.request("nobody.home", timeout=30)


@on_both_drivers
async def test_a_request_without_an_answer_times_out_and_its_late_answer_harms_nobody(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        asked = await nc.subscribe("slow")
        with pytest.raises(jetspark.RequestTimeout, match="request to 'slow'"):
            await nc.request("slow", b"first", timeout=0.05)
        late = await asked.next(30)
        second = asyncio.ensure_future(nc.request("slow", b"second", timeout=10))
        current = await asked.next(30)
        await late.respond(b"too late")
        await current.respond(b"in time")
        assert (await second).data == b"in time"


@on_both_drivers
async def test_a_message_without_a_reply_subject_cannot_be_answered(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("statement")
        await nc.publish("statement")
        message = await subscription.next(30)
        with pytest.raises(jetspark.UsageError, match="its sender expects no answer"):
            await message.respond(b"?")


@on_both_drivers
async def test_request_many_collects_until_a_limit(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:

        async def answer(message: jetspark.Message) -> None:
            for number in range(5):
                await message.respond(b"%d" % number)

        await nc.subscribe("several", callback=answer)
        everything = [m.data async for m in nc.request_many("several", stall=0.2, timeout=10)]
        assert everything == [b"0", b"1", b"2", b"3", b"4"]
        assert [m.data async for m in nc.request_many("several", max_messages=2)] == [b"0", b"1"]
        up_to_three = nc.request_many("several", stop=lambda message: message.data == b"3", timeout=10)
        assert [m.data async for m in up_to_three] == [b"0", b"1", b"2"]
        assert len([m async for m in nc.request_many("several", timeout=0.2)]) == 5
        with pytest.raises(jetspark.NoResponders):
            [m async for m in nc.request_many("nobody.home")]


@on_both_drivers
async def test_bad_input_is_refused_before_anything_is_sent(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("fine")
        for subject in ("", "a b", "a..b", ".a", "a.", "a.*", "a.>", "a\r\nPUB b 0"):
            with pytest.raises(jetspark.InvalidSubject):
                await nc.publish(subject)
        with pytest.raises(jetspark.InvalidSubject, match=r"billing\.\*\.invoice\.>"):
            await nc.subscribe("billing.>.invoice.>")
        with pytest.raises(jetspark.InvalidSubject):
            await nc.subscribe("fine", queue="two words")
        with pytest.raises(jetspark.InvalidSubject):
            await nc.publish("fine", reply="not fine")
        with pytest.raises(jetspark.InvalidHeader):
            await nc.publish("fine", headers={"Evil": "1\r\nOther: 2"})
        with pytest.raises(jetspark.ConfigError, match=r"str: expected bytes; encode text with \.encode\(\)"):
            await nc.publish("fine", "text")  # type: ignore[arg-type]
        with pytest.raises(jetspark.ConfigError, match="max_pending_messages=0"):
            await nc.subscribe("fine", max_pending_messages=0)
        await nc.publish("fine", b"still connected")
        assert (await subscription.next(30)).data == b"still connected"


@on_both_drivers
async def test_a_slow_reader_loses_messages_loudly(driver: Driver, url: str) -> None:
    events = Recorder()
    async with driver.connect(url, on_event=events) as nc:
        subscription = await nc.subscribe("flood", max_pending_messages=10)
        for number in range(100):
            await nc.publish("flood", b"%d" % number)
        await nc.flush()
        await until(lambda: subscription.received == 100)
        assert (subscription.dropped, subscription.pending_messages) == (90, 10)
        warned = await events.wait_for(jetspark.SlowConsumer)
        assert warned.subject == "flood"
        assert events.of(jetspark.SlowConsumer)[-1].dropped <= 90
        assert [int((await subscription.next(30)).data) for _ in range(10)] == list(range(10))
        await nc.publish("flood", b"room again")
        assert (await subscription.next(30)).data == b"room again"


@on_both_drivers
async def test_the_bound_in_bytes_holds_too(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("heavy", max_pending_bytes=1000)
        for _ in range(30):
            await nc.publish("heavy", bytes(100))
        await nc.flush()
        await until(lambda: subscription.received == 30)
        assert (subscription.pending_bytes, subscription.dropped) == (1000, 20)


@on_both_drivers
async def test_drain_delivers_everything_that_was_sent_and_then_closes(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        seen: list[bytes] = []

        async def callback(message: jetspark.Message) -> None:
            await asyncio.sleep(0.0005)
            seen.append(message.data)
            await message.respond(b"done")

        await nc.subscribe("draining", callback=callback)
        answers = await other.subscribe("draining.answers")
        await nc.flush()
        for _ in range(200):
            await other.publish("draining", b"x", reply="draining.answers")
        await other.flush()
        await nc.drain()
        assert nc.is_closed
        assert len(seen) == 200
        await until(lambda: answers.received == 200)


@on_both_drivers
async def test_one_subscription_can_be_drained_alone(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("single")
        for _ in range(10):
            await nc.publish("single")
        reading = asyncio.ensure_future(_read_all(subscription))
        await subscription.drain()
        assert await reading == 10
        assert nc.is_connected


@on_both_drivers
async def test_a_drain_nobody_reads_for_ends_with_the_number_of_unread_messages(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        await nc.subscribe("unread")
        for _ in range(3):
            await nc.publish("unread")
        await nc.flush()
        with pytest.raises(jetspark.RequestTimeout, match="3 messages unread"):
            await nc.drain(timeout=0.3)
        assert nc.is_closed


async def _read_all(subscription: jetspark.Subscription) -> int:
    return len([message async for message in subscription])


@on_both_drivers
async def test_everything_after_close_is_refused(driver: Driver, url: str) -> None:
    events = Recorder()
    nc = await driver.connect(url, on_event=events)
    subscription = await nc.subscribe("closing")
    reading = asyncio.ensure_future(_read_all(subscription))
    waiting = asyncio.ensure_future(nc.request("closing", timeout=30))
    await until(lambda: subscription.received == 1)
    await nc.close()
    assert await reading == 1
    with pytest.raises(jetspark.ConnectionClosed):
        await waiting
    for attempt in (nc.publish("a"), nc.subscribe("a"), nc.request("a"), nc.flush()):
        with pytest.raises(jetspark.ConnectionClosed):
            await attempt
    await nc.close()
    assert events.of(jetspark.Closed) == [jetspark.Closed(None)]
    assert events.of(jetspark.Disconnected) == []


@on_both_drivers
async def test_leaving_the_block_sends_what_was_published(driver: Driver, url: str) -> None:
    async with driver.connect(url) as reader:
        subscription = await reader.subscribe("last.words")
        await reader.flush()
        async with driver.connect(url) as nc:
            for number in range(1000):
                await nc.publish("last.words", b"%d" % number)
        assert [int((await subscription.next(30)).data) for _ in range(1000)] == list(range(1000))


@on_both_drivers
async def test_without_echo_our_own_messages_do_not_come_back(driver: Driver, url: str) -> None:
    async with driver.connect(url, echo=False) as nc, driver.connect(url) as other:
        subscription = await nc.subscribe("echo.test")
        await nc.flush()
        await nc.publish("echo.test", b"mine")
        await nc.flush()
        await other.publish("echo.test", b"theirs")
        assert (await subscription.next(30)).data == b"theirs"


@on_both_drivers
async def test_a_refused_publish_is_told_to_whoever_waits_for_it(driver: Driver) -> None:
    permissions = Permissions(publish_allow=["allowed", "_INBOX.>"], subscribe_allow=["allowed", "_INBOX.>"])
    user = User(user="ada", password="secret", permissions=permissions)
    with NatsServer(jetstream=False, users=[user]) as server:
        events = Recorder()
        auth = jetspark.UserPassword("ada", "secret")
        async with driver.connect(server.url, auth=auth, on_event=events) as nc:
            with pytest.raises(jetspark.PermissionDenied, match="may not publish to 'forbidden'"):
                await nc.request("forbidden", timeout=30)
            with pytest.raises(jetspark.PermissionDenied, match="may not publish to 'forbidden'"):
                [m async for m in nc.request_many("forbidden", timeout=30)]
            await nc.flush()  # those two were told to their callers, so they are nobody else's

            await nc.publish("forbidden.event")
            with pytest.raises(jetspark.PermissionDenied) as denied:
                await nc.flush()
            assert (denied.value.operation, denied.value.subject) == ("publish", "forbidden.event")
            await nc.flush()

            subscription = await nc.subscribe("secrets.>")
            with pytest.raises(jetspark.PermissionDenied, match=r"may not subscribe to 'secrets\.>'"):
                await subscription.next(30)
            with pytest.raises(jetspark.PermissionDenied):
                [m async for m in await nc.subscribe("secrets.>", queue="q")]
            await until(lambda: len(events.of(jetspark.ErrorReported)) == 5)

            allowed = await nc.subscribe("allowed")
            await nc.publish("allowed", b"fine")
            assert (await allowed.next(30)).data == b"fine"


@on_both_drivers
async def test_a_request_without_the_right_to_an_inbox_says_so(driver: Driver) -> None:
    user = User(user="ada", password="secret", permissions=Permissions(subscribe_allow=["inbox.ada.>"]))
    with NatsServer(jetstream=False, users=[user]) as server:
        auth = jetspark.UserPassword("ada", "secret")
        async with driver.connect(server.url, auth=auth) as nc:
            for _ in range(2):
                with pytest.raises(jetspark.PermissionDenied, match="may not subscribe to '_INBOX"):
                    await nc.request("anything", timeout=30)
        async with driver.connect(server.url, auth=auth, inbox_prefix="inbox.ada") as nc:
            with pytest.raises(jetspark.NoResponders):
                await nc.request("anything", timeout=30)


@on_both_drivers
async def test_another_client_reads_what_we_write_and_the_other_way_round(driver: Driver, url: str) -> None:
    import nats

    theirs = await nats.connect(url)
    try:
        async with driver.connect(url) as nc:
            their_subscription = await theirs.subscribe("interop")
            # Their flush overtakes their SUB; a message of their own does not.
            await theirs.publish("interop", b"ready")
            await their_subscription.next_msg(timeout=30)
            our_subscription = await nc.subscribe("interop")
            await nc.publish("interop", b"ours", headers={"From": "us"})
            message = await their_subscription.next_msg(timeout=30)
            assert (message.data, message.headers) == (b"ours", {"From": "us"})
            assert (await our_subscription.next(30)).data == b"ours"
            await theirs.publish("interop", b"theirs", headers={"From": "them"})
            ours = await our_subscription.next(30)
            assert (ours.data, ours.headers["From"]) == (b"theirs", "them")
    finally:
        await theirs.close()


def test_the_server_knows_who_we_are(driver: Driver, core_server: NatsServer) -> None:
    async def test() -> None:
        async with driver.connect(core_server.url, name="billing") as nc:
            _, page = await asyncio.to_thread(core_server.monitor, "/connz")
            connections = {entry["cid"]: entry for entry in json.loads(page)["connections"]}
            us = connections[nc.server_info.client_id]
            assert (us["name"], us["lang"], us["version"]) == ("billing", "python-jetspark", jetspark.__version__)

    driver.run(test())


@on_both_drivers
async def test_many_tasks_and_threads_share_one_connection(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe("shared.*")

        async def publish_some(who: int) -> None:
            for number in range(200):
                await nc.publish(f"shared.{who}", b"%d" % number)

        await asyncio.gather(*(publish_some(who) for who in range(8)))
        received: dict[str, list[int]] = {}
        for _ in range(1600):
            message = await subscription.next(30)
            received.setdefault(message.subject, []).append(int(message.data))
        assert received == {f"shared.{who}": list(range(200)) for who in range(8)}


def test_the_socket_is_closed_with_the_connection(driver: Driver, url: str) -> None:
    """Warnings are errors here, and an unclosed socket is a warning; this makes it one test's fault."""

    async def test() -> None:
        for _ in range(3):
            async with driver.connect(url):
                pass

    before = socket.socket()
    before.close()
    driver.run(test())


class Outcome:
    """A handle of ``request_with``."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.errors: list[Exception] = []

    def done(self) -> bool:
        return bool(self.replies or self.errors)

    def set_result(self, message: jetspark.Message, /) -> None:
        self.replies.append(message.data)

    def set_exception(self, error: Exception, /) -> None:
        self.errors.append(error)


@on_both_drivers
async def test_a_handle_gets_the_first_reply_of_a_taken_request(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        asking, serving = (getattr(each.jetstream(), "_target", each.jetstream())._context for each in (nc, other))

        def serve(message: jetspark.Message) -> None:
            for reply in (message.data.upper(), b"second"):
                serving.send_reply(message.reply or "", reply, {"X": "1"} if message.data == b"headed" else None)

        taken = serving.take("orders.ask", serve, queue="workers")
        await other.flush()
        plain, headed, unheard = Outcome(), Outcome(), Outcome()
        asking.request_with(plain, "orders.ask", b"plain")
        asking.request_with(headed, "orders.ask", b"headed", {"Y": "2"}, at_once=False)
        asking.request_with(unheard, "orders.nowhere", b"")
        await until(lambda: plain.done() and headed.done() and unheard.done())
        assert (plain.replies, headed.replies) == ([b"PLAIN"], [b"HEADED"])
        assert [type(each) for each in unheard.errors] == [jetspark.NoResponders]
        assert taken.received == 2
        held: list[jetspark.Message] = []
        serving.take("orders.hold", held.append)
        await other.flush()
        forgotten = Outcome()
        asking.forget(asking.request_with(forgotten, "orders.hold", b""))
        await until(lambda: held)
        serving.send_reply(held[0].reply or "", b"late")
        await other.flush()
        await nc.flush()
        assert not forgotten.done()


@on_both_drivers
async def test_an_error_of_a_taking_callback_is_reported_and_ends_nothing(driver: Driver, url: str) -> None:
    events = Recorder()
    async with driver.connect(url, on_event=events) as nc:
        context = getattr(nc.jetstream(), "_target", nc.jetstream())._context
        taken: list[bytes] = []

        def take(message: jetspark.Message) -> None:
            taken.append(message.data)
            raise ValueError(message.data)

        context.take("orders", take)
        await nc.publish("orders", b"one")
        await nc.publish("orders", b"two")
        await until(lambda: len(taken) == 2)
        await until(lambda: len(events.of(jetspark.ErrorReported)) == 2)
        assert taken == [b"one", b"two"]
