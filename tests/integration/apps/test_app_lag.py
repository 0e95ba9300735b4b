"""Lag against a count by brute force, on a real server; and what a report says where something cannot be read."""

from __future__ import annotations

import asyncio
import datetime
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from support import seeds
from support.apps import publish, running, set_up, until
from support.permissions import ExactServer, Rights
from support.rights import Placed, client_rows, filled, shop

import jetspark
from jetspark import ConsumerConfig, StreamConfig
from jetspark.aio.context import DriverContext
from jetspark.aio.jetstream import JetStream
from jetspark.aio.stream import Stream
from jetspark.app import App, AppClient, Context, Event, Reject, Retry, RetryIn, Skip
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.lag import LagMonitor, LagReport, LagRow, PositionReader, lag
from jetspark.app.projections.bucket_refs import BucketRef, open_records, swap
from jetspark.app.topology.names import partition_stream
from jetspark.core.subjects import matches, overlaps
from jetspark.errors import ConnectionLost, MessageNotFound, NetworkError, StreamNotFound
from jetspark.jetstream.operations import Request
from jetspark.server import NatsServer


class Paid(Event, type="paid", key="name", subject="shop.{name}.paid"):
    name: str
    outcome: str = "ok"


class Sent(Event, type="sent", key="name", subject="shop.{name}.sent"):
    name: str
    outcome: str = "ok"


class Noted(Event, type="noted", key="name", subject="shop.{name}.noted"):
    name: str
    outcome: str = "ok"


KINDS: dict[str, list[type[Any]]] = {"one": [Paid], "both": [Paid, Sent], "parts": [Sent]}
OUTCOMES = ["ok"] * 6 + ["again", "later", "reject", "skip"]


class Shop:
    """Handlers that do with an event what it says, and remember what they have done."""

    def __init__(self) -> None:
        self.app = App("shop", stream="SHOP", subjects=["shop.>"])
        self.app.register(Noted)
        self.done = defaultdict[str, set[int]](set)
        self.given_up = defaultdict[str, set[int]](set)
        """Events that somebody terminated since a worker ran; they count even if they were deleted since."""
        self.held: dict[str, list[Any]] = {}
        """Messages that were delivered since a worker ran."""
        self.is_mended = False
        retry = Retry(attempts=3, first_s=0.05, jitter=0, in_lane_s=1.0)
        for durable, kinds in KINDS.items():
            partitions = 2 if durable == "parts" else None
            options: dict[str, Any] = {"partitions": partitions, "takeover_s": 1.0} if partitions else {}
            self.app.handler(*kinds, durable=durable, retry=retry, ack_wait_s=1.0, **options)(self._handler(durable))

        @self.app.projection("names", events=[Paid, Noted], bucket="names")
        class Names:
            def key(self, event: Any) -> str:
                return str(event.name)

            def apply(self, state: Any, event: Any) -> dict[str, int]:
                return {"count": (state or {"count": 0})["count"] + 1}

    def _handler(self, durable: str) -> Any:
        async def handle(event: Any, ctx: Context) -> None:
            if not self.is_mended:
                match event.outcome:
                    case "again" if ctx.attempt == 1:
                        raise ConnectionError("not now")
                    case "later":
                        raise RetryIn(3600)
                    case "reject":
                        raise Reject("never")
            self.done[durable].add(ctx.sequence)
            if event.outcome == "skip":
                raise Skip("not ours")

        kinds: Any = Paid | Sent if durable == "both" else KINDS[durable][0]
        handle.__annotations__ = {"event": kinds, "ctx": Context, "return": None}
        return handle


class Truth:
    """Every event that a handler has not done and will do, one by one."""

    def __init__(self) -> None:
        self.waiting: dict[int, datetime.datetime] = {}
        self.scheduled: dict[int, datetime.datetime] = {}
        self.behind: dict[int, datetime.datetime] = {}
        self.stuck = 0

    @property
    def all(self) -> dict[int, datetime.datetime]:
        return self.waiting | self.scheduled | self.behind


async def count(js: JetStream, shop: Shop, handler: str) -> Truth:
    """By listing the events, the retries and the dead letters, without a look at any consumer."""
    client, found = AppClient.on(shop.app, js), Truth()
    filters = [contract_of(kind).subject.filter for kind in KINDS[handler]]
    stored: dict[int, datetime.datetime] = {}
    if shop.app.handlers[handler].partitions:
        copies = await js.stream(partition_stream("shop", handler))
        async for message in copies.get_messages(1):
            stored[int(message.headers["Nats-Stream-Source"].split(" ")[1])] = message.timestamp
    else:
        async for message in (await js.stream("SHOP")).get_messages(1):
            if any(matches(each, message.subject) for each in filters):
                stored[message.sequence] = message.timestamp
    retries = [each.sequence async for each in client.retries.list(handler=handler)]
    letters = [each async for each in client.dead_letters.list(handler=handler) if each.sequence not in retries]
    stuck = {each.key for each in letters if each.status == "open"}
    moving = [each.sequence for each in letters if each.key not in stuck]
    owned = {*retries, *(each.sequence for each in letters), *shop.done[handler]}
    # A retry or dead letter has outlived its event, if that was deleted: the time of that one is known no more.
    unknown = datetime.datetime.max.replace(tzinfo=datetime.UTC)
    found.waiting = {each: at for each, at in stored.items() if each not in owned}
    found.waiting |= {each: unknown for each in shop.given_up[handler] - owned if each not in stored}
    found.scheduled = {each: stored.get(each, unknown) for each in retries}
    found.behind = {each: stored.get(each, unknown) for each in moving}
    found.stuck = len(letters) - len(moving)
    return found


def parts(row: LagRow) -> dict[str, int]:
    return {name: part.messages for name, part in row.parts.items() if part.messages}


async def compare(js: JetStream, shop: Shop, *, is_exact: bool = True) -> None:
    """Compare lag with a count. A retry may come due between the two, so a difference has to stay."""
    for _ in range(20):
        try:
            return await _compare(js, shop, is_exact=is_exact)
        except AssertionError:
            await asyncio.sleep(0.25)
    await _compare(js, shop, is_exact=is_exact)


async def _compare(js: JetStream, shop: Shop, *, is_exact: bool) -> None:
    stream = await js.stream("SHOP")
    report = await lag(js, shop.app)
    assert report.is_complete
    letters = {each.name: each.messages for each in report.dead_letters}
    for handler, kinds in KINDS.items():
        row, truth = report.row(handler), await count(js, shop, handler)
        # The server does not say which of the delivered messages are unacknowledged: those of other events may count.
        filters = [contract_of(kind).subject.filter for kind in kinds]
        held = shop.held.get(handler, ())
        others = sum(not any(matches(each, message.subject) for each in filters) for message in held)
        # The server gives up what is deleted in flight, and reports that to the handler.
        others += sum([not await _is_stored(stream, message.metadata.stream_sequence) for message in held])
        # A retry that is due, of an event that was deleted, is in no list.
        others += parts(row).get("due", 0)
        assert row.notes == ()
        assert len(truth.all) <= (row.messages or 0), (handler, row, truth.all)
        if not is_exact:
            continue
        assert (row.messages or 0) <= len(truth.all) + others, (handler, row, truth.all)
        assert parts(row).get("scheduled", 0) == len(truth.scheduled)
        assert parts(row).get("behind_retry", 0) == len(truth.behind)
        assert letters.get(handler, 0) == truth.stuck
        oldest, unknown = min(truth.all.values(), default=None), datetime.datetime.max.replace(tzinfo=datetime.UTC)
        if not others and oldest is not None and unknown not in truth.all.values():
            assert abs(report.at - oldest - datetime.timedelta(seconds=row.seconds or 0)).total_seconds() < 0.1
    info = await stream.info()
    names = report.row("names", "projection")
    position = (await AppClient.on(shop.app, js).view("names").position()).sequence
    behind = [
        message.sequence
        async for message in stream.get_messages(position + 1)
        if message.subject.endswith((".paid", ".noted"))
    ]
    assert (names.messages, info.state.last_sequence >= position) == (len(behind), True)


async def _is_stored(stream: Stream, sequence: int) -> bool:
    with suppress(MessageNotFound):
        return (await stream.get_message(sequence)).sequence == sequence
    return False


async def copied(js: JetStream, shop: Shop) -> None:
    """Wait until the server has copied all events into the partitions."""
    report = await lag(js, shop.app)
    await until(lambda: _is_copied(js, shop), 60.0)
    assert report is not None


async def _is_copied(js: JetStream, shop: Shop) -> bool:
    return not (await lag(js, shop.app)).row("parts").parts["uncopied"].messages


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.tried([1], 1))
async def test_lag_is_what_a_count_by_brute_force_finds(server: NatsServer, js: JetStream, seed: int) -> None:
    chance, it = random.Random(seed), Shop()
    await set_up(js, it.app)
    stream, client = await js.stream("SHOP"), AppClient.on(it.app, js)
    await compare(js, it)

    async def publish_some() -> None:
        kinds: list[Any] = [Paid, Sent, Noted]
        events = [
            chance.choice(kinds)(name=chance.choice("abcdef"), outcome=chance.choice(OUTCOMES))
            for _ in range(chance.randrange(10, 30))
        ]
        await publish(js, it.app, *events)

    async def lose_some() -> None:
        await copied(js, it)
        last = (await stream.info()).state.last_sequence
        for sequence in chance.sample(range(1, last + 1), 3):
            with suppress(jetspark.ServerError):
                await stream.delete_message(sequence)
        if chance.random() < 0.2:
            await stream.purge(up_to_sequence=chance.randrange(1, last))

    for number in range(3):
        await publish_some()
        await lose_some()
        await compare(js, it)
        it.given_up.clear()
        it.held.clear()
        async with running(it.app, server.url):
            await asyncio.sleep(chance.uniform(0.0, 1.0))
        await compare(js, it, is_exact=False)  # a worker may have left something in flight, of any type
        async with running(it.app, server.url):
            if number == 1:
                it.is_mended = chance.random() < 0.5
                await client.retries.now(handler=chance.choice(list(KINDS)))
                await client.dead_letters.redrive(handler=chance.choice(["one", "both"]))
            await publish_some()
            await until(lambda: _is_idle(js, it), 60.0)
        it.is_mended = False
        await copied(js, it)
        await compare(js, it)
        # With messages in flight, a purge by subject can make nats-server 2.15.1 forget those of other subjects.
        await stream.purge(subject=f"shop.{chance.choice('abcdef')}.paid")
        # A worker that has died with some events; one of them was given up by hand.
        await publish_some()
        for handler in ("one", "both"):
            found = await (await stream.consumer(handler)).fetch(chance.randrange(1, 6), timeout=0.3)
            if found and handler == "one":
                given_up = found.pop()
                await given_up.term()
                it.given_up[handler].add(given_up.metadata.stream_sequence)
            it.held[handler] = found
        await lose_some()
        await compare(js, it)
        for message in (message for messages in it.held.values() for message in messages):
            await message.nak()
    it.is_mended = True
    async with running(it.app, server.url):
        for _ in range(2):
            await client.retries.now()
            await client.dead_letters.redrive(wait_s=5.0)
        await until(lambda: _is_caught_up(js, it), 60.0)


async def _is_idle(js: JetStream, shop: Shop, *handlers: str) -> bool:
    """Every event is done, waits for its time, or for an operator."""
    report = await lag(js, shop.app)
    rows = [report.row(handler) for handler in handlers or KINDS]
    return all(parts(row).keys() <= {"scheduled", "behind_retry"} for row in rows)


async def _is_caught_up(js: JetStream, shop: Shop) -> bool:
    return all(not row.messages for row in (await lag(js, shop.app)).rows)


@pytest.mark.parametrize("handler", ["one", "parts"])
async def test_a_retry_that_is_due_is_lag_and_a_requested_redrive_stays_a_dead_letter(
    server: NatsServer, js: JetStream, handler: str
) -> None:
    it, kind = Shop(), KINDS[handler][0]
    client = AppClient.on(it.app, js)
    await set_up(js, it.app)
    before = datetime.datetime.now(datetime.UTC)
    await publish(js, it.app, kind(name="a", outcome="later"), kind(name="a"), kind(name="b", outcome="reject"))
    async with running(it.app, server.url, only=[handler]):
        await until(lambda: _is_idle(js, it, handler))
        await until(lambda: _has(client, "dead_letters", 2))
    row = (await lag(js, it.app)).row(handler)
    assert parts(row) == {"scheduled": 1, "behind_retry": 1}
    await asyncio.sleep(1.0)
    await client.retries.now()
    await client.dead_letters.redrive()

    async def is_due() -> bool:
        return parts((await lag(js, it.app)).row(handler)) == {"due": 1, "behind_retry": 1}

    await until(is_due)
    report = await lag(js, it.app)
    row, [letters] = report.row(handler), report.dead_letters
    assert row.parts["due"].seconds is not None
    assert 1.0 < row.parts["due"].seconds < (report.at - before).total_seconds() + 1  # of the event, not of the retry
    assert (letters.name, letters.messages, letters.parked_keys) == (handler, 1, 2)


# ---- foreign consumers -----------------------------------------------------------------------------------------------


def one(report: LagReport, name: str) -> tuple[int | None, dict[str, int], bool]:
    row = report.row(name, "consumer")
    return row.messages, parts(row), row.seconds is not None and (row.seconds > 0) == bool(row.messages)


@pytest.mark.parametrize("is_direct", [True, False])
async def test_consumers_of_every_kind(js: JetStream, is_direct: bool) -> None:
    stream = await js.create_stream(StreamConfig(name="S", subjects=["s.>"], allow_direct=is_direct))
    for number in range(12):
        await js.publish(f"s.{'abc'[number % 3]}", b"")
    await stream.delete_message(12)  # the last "c"
    new = ConsumerConfig(durable_name="new", deliver_policy="new")
    configs = [
        ConsumerConfig(durable_name="all"),
        ConsumerConfig(durable_name="filtered", filter_subjects=["s.a", "s.b"]),
        ConsumerConfig(durable_name="later", start_sequence=9),
        ConsumerConfig(durable_name="lasts", deliver_policy="last_per_subject", filter_subject="s.>"),
        ConsumerConfig(durable_name="pushed", deliver_subject="push.it", ack_policy="none"),
        ConsumerConfig(durable_name="spent", filter_subject="s.b", max_deliver=1, ack_wait_s=0.2),
        new,
    ]
    consumers = {config.durable_name: await stream.create_consumer(config) for config in configs}
    held = await consumers["all"].fetch(4, timeout=5.0)
    await held[1].ack_sync()
    await consumers["filtered"].pause(datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1))
    await consumers["spent"].fetch(3, timeout=5.0)

    async def is_spent() -> bool:
        return (await consumers["spent"].info()).ack_pending == 0

    await until(is_spent)
    report = await lag(js)
    assert one(report, "all") == (10, {"waiting": 7, "in_flight": 3}, True)
    assert one(report, "filtered") == (8, {"waiting": 8}, True)
    assert report.row("filtered").is_paused
    assert one(report, "later") == (3, {"waiting": 3}, True)
    assert one(report, "lasts") == (3, {"waiting": 3}, True)
    assert one(report, "pushed") == (11, {"waiting": 11}, True)
    assert one(report, "new") == (0, {}, True)
    # Its ack floor is 0, and the stream ends at 12.
    assert one(report, "spent") == (1, {"waiting": 1}, True)
    assert report.row("spent").notes == ("max_deliver=1: the server gave up messages from 2 on",)

    await stream.delete_message(1)
    await stream.delete_message(5)
    assert one(await lag(js), "all") == (8, {"waiting": 6, "in_flight": 2}, True)
    await stream.purge()
    assert {row.messages for row in (await lag(js, streams=["S"])).rows} == {0}


async def test_a_work_queue_that_allows_no_direct_get(js: JetStream) -> None:
    stream = await js.create_stream(StreamConfig(name="Q", subjects=["q.>"], retention="workqueue"))
    consumer = await stream.create_consumer(ConsumerConfig(durable_name="worker"))
    for _ in range(5):
        await js.publish("q.a", b"")
    [message, *_] = await consumer.fetch(2, timeout=5.0)
    await message.ack_sync()
    assert one(await lag(js), "worker") == (4, {"waiting": 3, "in_flight": 1}, True)


async def test_a_reader_with_a_position_of_its_own(js: JetStream) -> None:
    await js.create_stream(StreamConfig(name="S", subjects=["s.>"]))  # without direct get
    for number in range(6):
        await js.publish(f"s.{'ab'[number % 2]}", b"")
    readers = [
        PositionReader(kind="archive", name="lake", stream="S", next=4),
        PositionReader(kind="archive", name="part", stream="S", next=1, filters=("s.b",)),
        PositionReader(kind="archive", name="done", stream="S", next=7),
        PositionReader(kind="archive", name="gone", stream="T", next=7),
    ]
    report = await lag(js, readers=readers)
    assert [(row.name, row.messages) for row in report.rows] == [("part", 3), ("lake", 3), ("gone", None), ("done", 0)]
    assert "there is no stream 'T'" in (report.row("gone").unknown or "")
    assert not report.is_complete


# ---- cost ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects of all requests of the API."""
    found: list[str] = []
    perform = DriverContext.perform

    async def counting(self: DriverContext, step: Any, deadline: Any) -> Any:
        if isinstance(step, Request):
            found.append(step.subject)
        return await perform(self, step, deadline)

    monkeypatch.setattr(DriverContext, "perform", counting)
    return found


async def test_two_hundred_consumers_take_a_page_of_each_stream(js: JetStream, requests: list[str]) -> None:
    for number in range(4):
        stream = await js.create_stream(StreamConfig(name=f"S{number}", subjects=[f"s{number}.>"], allow_direct=True))
        for index in range(50):
            await stream.create_consumer(
                ConsumerConfig(durable_name=f"c{index}", filter_subject=f"s{number}.{index % 2}")
            )
    requests.clear()
    report = await lag(js)
    assert (len(report.rows), len(requests)) == (200, 5)

    for number in range(4):
        for index in range(6):
            await js.publish(f"s{number}.{index % 2}", b"")
    requests.clear()
    report = await lag(js)
    assert {row.messages for row in report.rows} == {3}
    # One direct get for each subject of each stream: consumers at the same place share it.
    assert len(requests) == 5 + 4 * 2


async def test_a_listing_of_many_pages(js: JetStream, requests: list[str]) -> None:
    stream = await js.create_stream(StreamConfig(name="S", subjects=["s"]))
    for index in range(300):
        await stream.create_consumer(ConsumerConfig(durable_name=f"c{index}", ack_policy="none"))
    requests.clear()
    report = await lag(js, streams=["S"])
    assert (len(report.rows), report.is_complete) == (300, True)
    assert len(requests) == 3


# ---- time ------------------------------------------------------------------------------------------------------------


async def test_slopes_of_a_live_stream_and_what_overtakes_a_reader(js: JetStream) -> None:
    config = StreamConfig(name="S", subjects=["s.>"], max_messages=1_000, max_age_s=3600.0, allow_direct=True)
    stream = await js.create_stream(config)
    still = await stream.create_consumer(ConsumerConfig(durable_name="still"))
    await stream.create_consumer(ConsumerConfig(durable_name="reads"))
    monitor = LagMonitor(js)
    for _ in range(4):
        for number in range(10):
            await js.publish(f"s.{number}", b"")
        reads = await stream.consumer("reads")
        for message in await reads.fetch(10, timeout=5.0):
            await message.ack_sync()
        await asyncio.sleep(0.05)
        report = await monitor.sample()
    outlook = report.row("still").outlook
    assert (outlook.messages_per_s or 0) > 0
    assert outlook.caught_up_in_s is None
    assert outlook.overtaken_by == "max_messages"
    assert 0 < (outlook.overtaken_in_s or 0) < 3600
    assert 3000 < (outlook.kept_for_s or 0) < 3600
    outlook = report.row("reads").outlook
    assert (outlook.caught_up_in_s, outlook.overtaken_by, outlook.kept_for_s) == (0.0, None, None)

    for _ in range(4):
        for message in await still.fetch(5, timeout=5.0):
            await message.ack_sync()
        await asyncio.sleep(0.05)
        report = await monitor.sample()
    await stream.purge()
    report = await monitor.sample()  # which starts the series again
    assert report.row("still").outlook.messages_per_s is None


async def test_a_projection_is_measured_in_the_bucket_it_was_swapped_to(server: NatsServer, js: JetStream) -> None:
    it = Shop()
    await set_up(js, it.app)
    await publish(js, it.app, Paid(name="a"), Noted(name="a"), Sent(name="a"))
    row = (await lag(js, it.app)).row("names")
    assert (row.messages, row.notes) == (2, ("it was not started yet",))
    async with running(it.app, server.url, only=["names"]):
        await until(lambda: _is_at(js, it, 0))
    await publish(js, it.app, Paid(name="b"))
    assert (await lag(js, it.app)).row("names").messages == 1
    await js.create_kv("names_v2")
    await swap(await open_records(js, "shop"), it.app.projections["names"], BucketRef("names_v2", 2), revision=0)
    row = (await lag(js, it.app)).row("names")
    assert row.messages == 3
    assert row.notes == ("it was not started yet", "bucket names_v2 is of version 2, and this code is version 1")
    await js.delete_kv("names_v2")
    row = (await lag(js, it.app)).row("names")
    assert row.unknown is not None


async def _is_at(js: JetStream, shop: Shop, messages: int) -> bool:
    return (await lag(js, shop.app)).row("names").messages == messages


# ---- what cannot be read ---------------------------------------------------------------------------------------------


async def test_an_application_that_was_not_applied(js: JetStream) -> None:
    with pytest.raises(StreamNotFound, match="'SHOP'"):
        await lag(js, Shop().app)
    with pytest.raises(StreamNotFound, match="'NOPE'"):
        await lag(js, streams=["NOPE"])


async def test_a_handler_that_was_not_applied_is_unknown(js: JetStream) -> None:
    it = Shop()
    await set_up(js, it.app)
    await (await js.stream("SHOP")).delete_consumer("one")
    report = await lag(js, it.app)
    assert report.row("one").unknown == "consumer one of SHOP does not exist; see `jetspark plan`"
    assert report.row("both").messages == 0
    await js.delete_stream("SHOP_RETRY")
    notes = (await lag(js, it.app)).row("both").notes
    assert any("scheduled retries are unknown: there is no stream 'SHOP_RETRY'" in note for note in notes)


async def test_a_server_that_stops() -> None:
    with NatsServer() as server:
        async with jetspark.connect(server.url) as client:
            js = client.jetstream(timeout=0.5)
            await js.create_stream(StreamConfig(name="S", subjects=["s"]))
            monitors = [LagMonitor(js), LagMonitor(js, streams=["S"])]
            for monitor in monitors:
                assert (await monitor.sample()).is_complete
            server.stop()
            for monitor in monitors:
                with pytest.raises(NetworkError):
                    await monitor.sample()
            with suppress(ConnectionLost):
                await client.close(timeout=0.1)


def rights_of(app: App) -> list[str]:
    """What the page grants for `lag()`, with the rights for handlers with partitions."""
    found = [filled(right, bucket="status") for right in client_rows()["`lag()`"]]
    copies = [f"SHOP_{name}_PARTITIONS" for name, spec in app.handlers.items() if spec.partitions]
    return found + [
        f"$JS.API.{what}.{each}" for each in copies for what in ("STREAM.INFO", "CONSUMER.LIST", "DIRECT.GET")
    ]


@pytest.mark.slow
async def test_lag_needs_what_the_page_says_and_names_what_is_denied() -> None:
    app = shop()
    with ExactServer() as server:
        account = server.new_account()
        url = server.url_of(account)
        await app.apply(url)
        async with app.connect(url) as admin:
            async with running(app, url, only=["failing", "later"]):
                await admin.publish(Placed(order_id="o-1"))
                await until(lambda: _has(admin, "dead_letters"))
                await until(lambda: _has(admin, "retries"))
            await admin.publish(Placed(order_id="o-2"))
            await until(lambda: _all_copied(admin))
        rights = [
            *rights_of(app),
            *("$JS.API.CONSUMER.DELETE.SHOP_DLQ.*", "$JS.API.CONSUMER.DELETE.KV_shop_handlers.*"),
        ]
        said: dict[str | None, str] = {}
        for missing in [None, *rights_of(app)]:
            [user] = server.new_users(
                account, [Rights(tuple(each for each in rights if each != missing), ("_INBOX.>",))]
            )
            async with app.connect(server.url_of(user)) as client:
                report = await client.lag()
            said[missing] = " ".join([each for row in report.rows for each in (*row.notes, row.unknown or "")])
            if missing is not None:
                assert any(row.messages is not None for row in report.rows), missing
        assert said.pop(None).replace("it was not started yet", "").strip() == ""
        for missing, text in said.items():
            named = re.findall(r"may not publish to '([^']+)'", text)
            assert any(overlaps(missing or "", subject) for subject in named), (missing, text)


async def _has(client: AppClient, what: str, count: int = 1) -> bool:
    return len([each async for each in getattr(client, what).list()]) == count


async def _all_copied(client: AppClient) -> bool:
    rows: Iterable[LagRow] = (await client.lag()).rows
    return all(not row.parts["uncopied"].messages for row in rows if "uncopied" in row.parts)
