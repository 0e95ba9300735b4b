"""Scheduled retries by hand: listed, tried now, cancelled. None is lost, and none is tried twice."""

from __future__ import annotations

import asyncio
import datetime

import pytest
from support.apps import is_settled, publish, running, set_up, until

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, AppClient, Context, Event, Retry
from jetspark.app.dead_letters import retries
from jetspark.app.dead_letters.retries import RetryChanges
from jetspark.errors import ConfigError
from jetspark.jetstream.config import StreamConfig
from jetspark.server import NatsServer


class Paid(Event, type="paid", key="order_id", subject="pay.{order_id}"):
    order_id: str
    number: int
    padding: str = ""


class Shop:
    """An application whose handler is tried again in an hour, until it works."""

    def __init__(
        self, *, dead_letter: bool = True, partitions: int | None = None, config: StreamConfig | None = None
    ) -> None:
        self.app = App("shop", stream=config or "SHOP", subjects=["pay.>"])
        self.done: list[tuple[str, int]] = []
        self.attempts: list[int] = []
        self.works = False
        waits = Retry(attempts=3, first_s=3600, in_lane_s=0, jitter=0)
        self.app.handler(Paid, durable="bill", retry=waits, dead_letter=dead_letter, partitions=partitions)(self.bill)

    async def bill(self, event: Paid, ctx: Context) -> None:
        self.attempts.append(ctx.attempt)
        if not self.works and event.number == 0:
            raise ConnectionError("the bank is away")
        self.done.append((event.order_id, event.number))


async def _schedules(js: JetStream, shop: Shop, count: int) -> None:
    """Wait until so many retries are scheduled."""
    client = AppClient.on(shop.app, js)

    async def are_there() -> bool:
        return len([each async for each in client.retries.list()]) == count

    await until(are_there)


async def _dead_letters(js: JetStream, shop: Shop, count: int) -> None:
    client = AppClient.on(shop.app, js)

    async def are_there() -> bool:
        return len([each async for each in client.dead_letters.list()]) == count

    await until(are_there)


@pytest.mark.parametrize("partitions", [None, 2])
async def test_retries_are_listed_and_tried_now(server: NatsServer, js: JetStream, partitions: int | None) -> None:
    shop = Shop(partitions=partitions)
    client = AppClient.on(shop.app, js)
    await set_up(js, shop.app)
    assert await client.retries.now() == RetryChanges()
    began = datetime.datetime.now(datetime.UTC)
    async with running(shop.app, server.url):
        await publish(js, shop.app, *(Paid(order_id=name, number=number) for number in range(2) for name in "ab"))
        await _schedules(js, shop, 2)
        await _dead_letters(js, shop, 2)  # of the events behind
        found = [each async for each in client.retries.list()]
        assert sorted((each.handler, each.key, each.sequence, each.attempts) for each in found) == [
            ("bill", "a", 1, 1),
            ("bill", "b", 2, 1),
        ]
        for each in found:
            assert each.cause is not None
            assert (each.cause.error, each.cause.message) == ("ConnectionError", "the bank is away")
            assert each.due is not None
            assert each.due - began > datetime.timedelta(minutes=59)
        assert [each.key async for each in client.retries.list(key="b", handler="bill")] == ["b"]
        assert [each.key async for each in client.retries.list(sequence=1)] == ["a"]
        assert [each.key async for each in client.retries.list(error="ConnectionError", key="c")] == []
        shop.works = True
        assert await client.retries.now(key="a") == RetryChanges(changed=1)
        await until(lambda: len(shop.done) == 2)
        assert shop.done == [("a", 0), ("a", 1)]
        assert await client.retries.now() == RetryChanges(changed=1)
        await until(lambda: len(shop.done) == 4)
        assert shop.done[2:] == [("b", 0), ("b", 1)]
        assert sorted(shop.attempts) == [1, 1, 1, 1, 2, 2]
        assert await client.retries.explain() == "no retries are scheduled"


async def test_a_retry_that_fires_in_the_meantime_is_tried_once(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    client = AppClient.on(shop.app, js)
    await set_up(js, shop.app)
    replace = retries._replace

    async def late(*args: object) -> bool:
        """Another operator was faster, and the retry is handled before this one is done."""
        if shop.works:
            return await replace(*args)  # type: ignore[arg-type]  # passed on as they came
        shop.works = True
        assert await client.retries.now() == RetryChanges(changed=1)
        await until(lambda: len(shop.done) == 1)
        return await replace(*args)  # type: ignore[arg-type]

    async with running(shop.app, server.url):
        await publish(js, shop.app, Paid(order_id="a", number=0))
        await _schedules(js, shop, 1)
        monkeypatch.setattr(retries, "_replace", late)
        assert await client.retries.cancel(key="a") == RetryChanges(missed=1)
        await until(lambda: is_settled(js, shop.app, "bill"))
        await _dead_letters(js, shop, 0)
    assert shop.attempts == [1, 2]
    retry_stream = await js.stream(shop.app.spec.retry_stream)
    assert not (await retry_stream.info(subjects_filter="retry.shop.bill.wait.>")).state.subjects


@pytest.mark.parametrize("then", ["redrive", "discard"])
async def test_a_cancelled_retry_becomes_a_dead_letter_and_its_key_stays_parked(
    server: NatsServer, js: JetStream, then: str
) -> None:
    shop = Shop()
    client = AppClient.on(shop.app, js)
    await set_up(js, shop.app)
    async with running(shop.app, server.url):
        await publish(js, shop.app, *(Paid(order_id="a", number=number) for number in range(2)))
        await _schedules(js, shop, 1)
        await _dead_letters(js, shop, 1)
    # Cancelled while no worker runs, and again: nothing is lost, and it is cancelled once.
    assert await client.retries.cancel(handler="bill") == RetryChanges(changed=1)
    async with running(shop.app, server.url):
        await _dead_letters(js, shop, 2)
        await until(lambda: is_settled(js, shop.app, "bill"))
        dead_letters = sorted([each async for each in client.dead_letters.list()], key=lambda each: each.sequence)
        assert [each.status for each in dead_letters] == ["open", "behind"]
        assert dead_letters[0].cause is not None
        assert dead_letters[0].cause.message == "its retry was cancelled; before: ConnectionError: the bank is away"
        assert shop.attempts == [1]
        assert await client.retries.cancel(handler="bill") == RetryChanges()
        shop.works = True
        if then == "redrive":
            progress = await client.dead_letters.redrive(wait_s=60)
            assert str(progress.results) == "2 handled, 0 failed again, 0 waiting"
            assert shop.done == [("a", 0), ("a", 1)]
        else:
            assert (await client.dead_letters.discard(key="a")).discarded == 1
            await until(lambda: shop.done == [("a", 1)])
        await _dead_letters(js, shop, 0)


async def test_a_cancelled_retry_of_a_redrive_fails_again(server: NatsServer, js: JetStream) -> None:
    shop = Shop()
    client = AppClient.on(shop.app, js)
    await set_up(js, shop.app)
    async with running(shop.app, server.url):
        await publish(js, shop.app, Paid(order_id="a", number=0))
        for redrives in range(2):
            await _schedules(js, shop, 1)
            assert await client.retries.cancel(key="a") == RetryChanges(changed=1)
            await until(lambda: is_settled(js, shop.app, "bill"))
            [dead_letter] = [each async for each in client.dead_letters.list()]
            assert (dead_letter.status, dead_letter.redrives) == ("open", redrives)
            await client.dead_letters.redrive()
        await _schedules(js, shop, 1)
        assert [each.redrives async for each in client.retries.list()] == [2]
        shop.works = True
        assert (await client.retries.now()).changed == 1
        await until(lambda: shop.done == [("a", 0)])
        await _dead_letters(js, shop, 0)


async def test_a_cancelled_retry_of_a_handler_without_dead_letters_is_dropped(
    server: NatsServer, js: JetStream
) -> None:
    shop = Shop(dead_letter=False)
    client = AppClient.on(shop.app, js)
    await set_up(js, shop.app)
    async with running(shop.app, server.url):
        await publish(js, shop.app, *(Paid(order_id="a", number=number) for number in range(2)))
        await _schedules(js, shop, 1)
        await client.retries.cancel(key="a")
        await until(lambda: shop.done == [("a", 1)])
        await until(lambda: is_settled(js, shop.app, "bill"))
    assert shop.attempts == [1, 1]


async def test_an_event_that_is_kept_apart_is_tried_now_with_its_body(server: NatsServer, js: JetStream) -> None:
    shop = Shop(config=StreamConfig(name="SHOP", retention="workqueue"))
    client = AppClient.on(shop.app, js)
    await set_up(js, shop.app)
    async with running(shop.app, server.url):
        await publish(js, shop.app, Paid(order_id="a", number=0, padding="x" * 1_048_000))
        await _schedules(js, shop, 1)
        shop.works = True
        assert await client.retries.now() == RetryChanges(changed=1)
        await until(lambda: shop.done == [("a", 0)])


async def test_conditions_that_no_retry_can_have_are_told(server: NatsServer, js: JetStream) -> None:
    shop = Shop()
    client = AppClient.on(shop.app, js)
    await set_up(js, shop.app)
    wrongs: list[tuple[dict[str, object], str]] = [
        ({"handler": "biling"}, "handler 'biling': app 'shop' has no such handler, and no scheduled retries of one"),
        ({"handler": "a b"}, "handler 'a b': app 'shop' has no such handler"),
        ({"handler": 5}, "handler=5: expected the name of a handler, or None for all"),
        ({"status": "open"}, "status='open': expected one of handler, error, fingerprint, key, sequence, subject"),
        ({"sequence": -1}, "expected a whole number"),
        ({"sequence": True}, "sequence=True: expected"),
        ({"key": 5}, "key=5: expected a text"),
    ]
    for wrong, told in wrongs:
        for change in (client.retries.now, client.retries.cancel):
            with pytest.raises(ConfigError, match=told):
                await change(**wrong)  # type: ignore[arg-type]  # what users do


async def test_a_worker_that_ends_between_leaves_the_retry_to_the_next(server: NatsServer, js: JetStream) -> None:
    shop = Shop()
    client = AppClient.on(shop.app, js)
    await set_up(js, shop.app)
    async with running(shop.app, server.url):
        await publish(js, shop.app, Paid(order_id="a", number=0))
        await _schedules(js, shop, 1)
    shop.works = True
    await asyncio.gather(client.retries.now(), client.retries.now())
    async with running(shop.app, server.url):
        await until(lambda: shop.done == [("a", 0)])
        await until(lambda: is_settled(js, shop.app, "bill"))
    assert shop.attempts == [1, 2]
