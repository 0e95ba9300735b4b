"""Callers and those who look for services choose where their answers go: to an inbox, and never to a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from support.rights import Place, shop

import jetspark
from jetspark import ConfigError, StreamConfig, UserPassword
from jetspark.aio.jetstream import JetStream
from jetspark.app import App
from jetspark.app.causes import Cause
from jetspark.app.clock import utc_now
from jetspark.app.commands import wire
from jetspark.server import NatsServer, Permissions, User

ADMIN = UserPassword("admin", "a")
PLANTED = {
    "the application's stream": "orders.o-1.placed",
    "its timers": "timers.shop.x",
    "its entities": "states.shop.things.k-1",
    "its dead letters": "dlq.shop.billing.o-1.ORDERS.1.1",
    "its retries": "retry.shop.billing.due.o-1",
    "a view": "$KV.status.o-1",
    "its own records": "$KV.shop_handlers.parked.billing.o-1",
    "another application": "other.x",
    "the server": "$JS.API.STREAM.PURGE.ORDERS",
    "another command": "cmd.shop.orders.place",
    "no inbox, but almost": "_INBOXES.x",
}


@pytest.fixture(scope="module")
def users() -> Iterator[NatsServer]:
    """A server with three who may hardly do anything, besides the operator."""
    may = {
        "finder": Permissions(publish_allow=["$SRV.PING"], subscribe_allow=["_INBOX.>"]),
        "caller": Permissions(publish_allow=["cmd.shop.orders.place"], subscribe_allow=["_INBOX.>"]),
        "private": Permissions(publish_allow=["cmd.shop.orders.place"], subscribe_allow=["_INBOX_private.>"]),
    }
    users = [User(user=name, password="a", permissions=rights) for name, rights in may.items()]
    with NatsServer(users=[User(user="admin", password="a"), *users]) as running:
        yield running


async def stored(js: JetStream) -> dict[str, int]:
    """The last sequence of each stream that is published to; copies for partitions come a moment later."""
    return {info.config.name: info.state.last_sequence async for info in js.streams() if not info.config.sources}


def a_request(order_id: str) -> tuple[bytes, dict[str, str]]:
    return wire.write_request(
        Place(order_id=order_id),
        cause=Cause(f"id-{order_id}", "c", ""),
        caused_by=None,
        source="/test",
        time=utc_now(),
        expected_version=None,
    )


@contextlib.asynccontextmanager
async def serving(app: App, server: NatsServer, **options: Any) -> AsyncIterator[JetStream]:
    """One worker of the command; an operator's connection."""
    await app.apply(server.url, auth=ADMIN)
    async with jetspark.connect(server.url, auth=ADMIN) as nc:
        js = nc.jetstream()
        await js.create_or_update_stream(StreamConfig(name="OTHER", subjects=["other.>"]))
        worker = asyncio.create_task(app.run(server.url, only=["orders.place"], auth=ADMIN, **options))
        try:
            while True:
                with contextlib.suppress(jetspark.NoResponders):
                    await nc.request("$SRV.PING.shop", timeout=10)
                    break
                await asyncio.sleep(0.05)
            yield js
        finally:
            worker.cancel()
            await asyncio.wait([worker])


@pytest.mark.parametrize("where", PLANTED)
async def test_who_may_only_look_for_services_has_nothing_published_elsewhere(users: NatsServer, where: str) -> None:
    async with serving(shop(), users) as js:
        before = await stored(js)
        async with jetspark.connect(users.url, auth=UserPassword("finder", "a")) as nc:
            await nc.publish("$SRV.PING", reply=PLANTED[where])
            answer = await nc.request("$SRV.PING", timeout=10)  # behind it, by the same connection to the same worker
        assert b"ping_response" in answer.data
        assert await stored(js) == before


@pytest.mark.parametrize("where", PLANTED)
async def test_who_may_only_call_has_nothing_published_elsewhere_and_nothing_decided(
    users: NatsServer, where: str
) -> None:
    app = shop()
    async with serving(app, users) as js:
        before = await stored(js)
        async with jetspark.connect(users.url, auth=UserPassword("caller", "a")) as nc:
            body, headers = a_request("planted")
            await nc.publish("cmd.shop.orders.place", body, headers=headers, reply=PLANTED[where])
            async with app.connect(users.url, auth=UserPassword("caller", "a")) as client:
                reply = await client.call(Place(order_id=f"o-{before['ORDERS']}"))
        after = await stored(js)
        assert after.pop("ORDERS") == before.pop("ORDERS") + 1 == reply.sequence
        assert after == before


async def test_a_refused_request_is_counted_and_logged_with_the_remedy(
    users: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="jetspark.app")
    async with serving(shop(), users), jetspark.connect(users.url, auth=ADMIN) as nc:
        body, headers = a_request("refused")
        for _ in range(3):
            await nc.publish("cmd.shop.orders.place", body, headers=headers, reply="_INBOX_private.x.1")
        stats = (await nc.request("$SRV.STATS.shop", timeout=10)).data
    [endpoint] = msgspec.json.decode(stats)["endpoints"]
    assert (endpoint["num_requests"], endpoint["num_errors"]) == (3, 3)
    assert "_INBOX_private.x.1" in endpoint["last_error"]
    [line] = [record.getMessage() for record in caplog.records if "reply subject" in record.getMessage()]
    assert "_INBOX_private.x.1" in line
    assert "inbox_prefixes=" in line


@pytest.mark.parametrize("named_by", ["the application", "the worker's own connection"])
async def test_callers_with_a_prefix_of_their_own_get_replies_where_it_is_known(
    users: NatsServer, named_by: str
) -> None:
    by_app = named_by == "the application"
    app = shop(inbox_prefixes=["_INBOX_private"] if by_app else [])
    options = {} if by_app else {"inbox_prefix": "_INBOX_private"}
    private: Any = {"auth": UserPassword("private", "a"), "inbox_prefix": "_INBOX_private"}
    async with serving(app, users, **options) as js, app.connect(users.url, **private) as client:
        order_id = f"p-{(await stored(js))['ORDERS']}"
        assert (await client.call(Place(order_id=order_id))).data == {"order": order_id}


@pytest.mark.parametrize("prefix", ["$JS.x", "_GR_", "orders.replies", "dlq", "retry.shop"])
async def test_a_worker_whose_own_inboxes_are_no_place_for_replies_does_not_start(
    users: NatsServer, prefix: str
) -> None:
    app = shop()
    await app.apply(users.url, auth=ADMIN)
    with pytest.raises(ConfigError, match="inbox_prefix"):
        await asyncio.wait_for(app.run(users.url, only=["orders.place"], auth=ADMIN, inbox_prefix=prefix), 60)


async def test_a_call_from_another_account_is_answered() -> None:
    """The server puts a reply subject of its own in place of the caller's."""
    accounts = """accounts {
        SHOP: { users: [{user: admin, password: a}], exports: [{service: "cmd.shop.>"}], jetstream: enabled }
        WEB: { users: [{user: web, password: a}], imports: [{service: {account: SHOP, subject: "cmd.shop.>"}}] }
    }"""
    app = shop()
    with NatsServer(extra_config=accounts) as server:
        async with serving(app, server), app.connect(server.url, auth=UserPassword("web", "a")) as client:
            assert (await client.call(Place(order_id="o-1"))).data == {"order": "o-1"}
