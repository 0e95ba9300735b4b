"""Key-value buckets: what both drivers promise, on a real server and beside another client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from support.drivers import Driver, Recorder, on_both_drivers
from support.lossy import LossyProxy
from support.patience import PATIENCE_S
from support.peers import Proxy
from support.replicas import stale_replica

import jetspark
import jetspark.blocking
from jetspark import KVConfig, StreamSource
from jetspark.server import NatsServer


async def _take(changes: AsyncIterator[Any], count: int, present_is_over: asyncio.Event | None = None) -> list[Any]:
    """The first ``count`` changes; the event is set at the marker between the present and the future."""
    taken = []
    async with asyncio.timeout(30):
        async for change in changes:
            taken.append(change)
            if change is None and present_is_over is not None:
                present_is_over.set()
            if len(taken) == count:
                break
    return taken


def _brief(entries: list[Any]) -> list[Any]:
    return [entry and (entry.key, entry.value, entry.operation) for entry in entries]


@on_both_drivers
async def test_a_value_is_written_read_and_deleted(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="orders", history=5))
        first = await kv.put("order.1", b"created")
        second = await kv.put("order.1", b"paid")
        entry = await kv.get("order.1")
        assert (entry.bucket, entry.key, entry.value, entry.revision, entry.operation) == (
            "orders",
            "order.1",
            b"paid",
            second,
            "put",
        )
        assert (await kv.get("order.1", revision=first)).value == b"created"
        await kv.delete("order.1")
        with pytest.raises(jetspark.KeyNotFound, match=r"no value for 'order\.1' in bucket 'orders'"):
            await kv.get("order.1")
        assert [entry.operation for entry in await kv.history("order.1")] == ["put", "put", "delete"]
        await kv.purge("order.1")
        assert [entry.operation for entry in await kv.history("order.1")] == ["purge"]
        with pytest.raises(KeyError):
            await kv.get("never.there")
        other = await kv.put("order.2", b"x")
        with pytest.raises(jetspark.KeyNotFound):
            await kv.get("order.1", revision=other)


@on_both_drivers
async def test_the_leader_can_be_asked_where_a_replica_may_be_behind(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="behind", history=5))
        await kv.put("k", b"old")
        await kv.put("k", b"new")
        with jetspark.blocking.connect(url) as other:
            js = other.jetstream()
            stale_replica(js, js.stream("KV_behind"), 1)
        assert {(await kv.get("k")).value for _ in range(40)} == {b"old", b"new"}
        assert {(await kv.get("k", direct=False)).value for _ in range(40)} == {b"new"}
        with pytest.raises(jetspark.KeyNotFound):
            await kv.get("never", direct=False)


@on_both_drivers
async def test_create_and_update_compare_before_they_set(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="cas"))
        first = await kv.create("k", b"1")
        with pytest.raises(jetspark.KeyExists, match="'k' in bucket 'cas' already has a value"):
            await kv.create("k", b"again")
        second = await kv.update("k", b"2", revision=first)
        with pytest.raises(jetspark.Conflict) as conflict:
            await kv.update("k", b"late", revision=first)
        assert conflict.value.keys == ("k",)
        with pytest.raises(jetspark.Conflict):
            await kv.delete("k", revision=first)
        with pytest.raises(jetspark.Conflict):
            await kv.purge("k", revision=first)
        assert (await kv.get("k")).value == b"2"
        await kv.delete("k", revision=second)
        third = await kv.create("k", b"born again")
        assert (await kv.get("k")).revision == third
        await kv.purge("k", revision=third)
        await kv.create("k", b"and again")


@on_both_drivers
async def test_many_writers_with_compare_and_set_lose_no_update(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="counter"))
        await kv.put("n", b"0")

        async def add_ten() -> None:
            for _ in range(10):
                while True:
                    entry = await kv.get("n")
                    try:
                        await kv.update("n", b"%d" % (int(entry.value) + 1), revision=entry.revision)
                        break
                    except jetspark.Conflict:
                        continue

        await asyncio.gather(*(add_ten() for _ in range(5)))
        assert (await kv.get("n")).value == b"50"


@on_both_drivers
async def test_keys_are_filtered_by_the_server(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="listing"))
        assert [key async for key in kv.keys()] == []  # noqa: SIM118
        for key in ("a.1", "a.2", "b.1", "c/d=e_f-g"):
            await kv.put(key, b"x")
        await kv.delete("a.2")
        assert sorted([key async for key in kv.keys()]) == ["a.1", "b.1", "c/d=e_f-g"]  # noqa: SIM118
        assert [key async for key in kv.keys("a.*")] == ["a.1"]
        assert sorted([key async for key in kv.keys("a.>", "b.1")]) == ["a.1", "b.1"]
        assert [key async for key in kv.keys("z.>")] == []


@on_both_drivers
async def test_bad_keys_are_refused_with_the_spelling_that_works(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="keys"))
        with pytest.raises(jetspark.ConfigError, match=r"key='order:1'.*'order\.1' would do"):
            await kv.put("order:1", b"")
        for key in ("", ".a", "a.", "a..b", "a b", "a.*", "a.>", "ä"):
            with pytest.raises(jetspark.ConfigError):
                await kv.put(key, b"")
            if "*" not in key and ">" not in key:
                with pytest.raises(jetspark.ConfigError):
                    [change async for change in kv.watch(key)]
        for bucket in ("", "a.b", "a b", "ä"):
            with pytest.raises(jetspark.ConfigError):
                KVConfig(bucket=bucket)
        with pytest.raises(jetspark.ConfigError, match="history=65: expected 1 to 64"):
            KVConfig(bucket="a", history=65)


@on_both_drivers
async def test_a_watch_shows_the_present_and_then_every_change(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="watched", history=3))
        await kv.put("a", b"1")
        await kv.put("a", b"2")
        await kv.put("b", b"1")
        await kv.delete("b")
        present_is_over = asyncio.Event()
        watching = asyncio.ensure_future(_take(kv.watch(initial_marker=True), 6, present_is_over))
        async with asyncio.timeout(PATIENCE_S):
            await present_is_over.wait()
        await kv.put("c", b"new")
        await kv.purge("a")
        await kv.put("a", b"3")
        assert _brief(await watching) == [
            ("a", b"2", "put"),
            ("b", b"", "delete"),
            None,
            ("c", b"new", "put"),
            ("a", b"", "purge"),
            ("a", b"3", "put"),
        ]


@on_both_drivers
async def test_a_watch_can_be_narrowed_in_every_way(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="narrow", history=5))
        for key, value in (("a.1", b"1"), ("a.1", b"2"), ("b.1", b"3"), ("c.1", b"4")):
            await kv.put(key, value)
        await kv.delete("c.1")
        assert _brief(await _take(kv.watch("a.*"), 1)) == [("a.1", b"2", "put")]
        assert _brief(await _take(kv.watch("a.*", "b.>", initial_marker=True), 3)) == [
            ("a.1", b"2", "put"),
            ("b.1", b"3", "put"),
            None,
        ]
        assert _brief(await _take(kv.watch("a.1", include_history=True), 2)) == [
            ("a.1", b"1", "put"),
            ("a.1", b"2", "put"),
        ]
        assert _brief(await _take(kv.watch(meta_only=True), 1)) == [("a.1", b"", "put")]
        assert _brief(await _take(kv.watch(ignore_deletes=True, initial_marker=True), 3))[-1] is None
        assert _brief(await _take(kv.watch(from_revision=3), 2)) == [("b.1", b"3", "put"), ("c.1", b"4", "put")]
        assert await _take(kv.watch("z.>", initial_marker=True), 1) == [None]
        present_is_over = asyncio.Event()
        changes = kv.watch(updates_only=True, initial_marker=True)
        updates = asyncio.ensure_future(_take(changes, 2, present_is_over))
        async with asyncio.timeout(PATIENCE_S):
            await present_is_over.wait()
        await kv.put("a.1", b"now")
        assert _brief(await updates) == [None, ("a.1", b"now", "put")]
        with pytest.raises(jetspark.ConfigError, match="include_history with updates_only"):
            [change async for change in kv.watch(include_history=True, updates_only=True)]


@on_both_drivers
async def test_a_watch_misses_nothing_over_cuts_and_a_restart(driver: Driver, own: NatsServer) -> None:
    async with Proxy(own.port) as proxy, driver.connect(own.url) as writer:
        kv = await writer.jetstream(timeout=10).create_kv(KVConfig(bucket="cut", history=64))
        async with driver.connect(proxy.url, ignore_discovered_servers=True, reconnect_wait_s=0.01) as nc:
            watched = await nc.jetstream().kv("cut")
            watching = asyncio.ensure_future(_take(watched.watch(include_history=True), 200))
            for number in range(200):
                await kv.put(f"k.{number % 10}", b"%d" % number)
                if number % 50 == 25:
                    proxy.cut()
                if number == 120:
                    await asyncio.to_thread(own.restart)
                    await writer.flush(timeout=20)
            assert [int(entry.value) for entry in await watching] == list(range(200))


async def _fill(kv: jetspark.KeyValue, js: jetspark.JetStream, alive: int, doomed: int) -> set[str]:
    """Write keys that stay, then keys that are deleted; returns those that stay."""
    # Padded, so that the server stops after a part of them to hear whether we keep up.
    padding = {"Padding": "-" * 6000}
    names = [f"k{number:05}" for number in range(alive + doomed)]
    for headers, chosen in ((padding, names), (padding | {"KV-Operation": "DEL"}, names[alive:])):
        for name in chosen:
            await js.publish_async(f"$KV.{kv.bucket}.{name}", b"", headers=headers)
    await js.publish_async_complete()
    return set(names[:alive])


@on_both_drivers
async def test_a_listing_through_a_restart_shows_no_deleted_key(driver: Driver, own: NatsServer) -> None:
    """The first consumer begins with the last of each key; the one after the restart must do so, too."""
    async with driver.connect(own.url, reconnect_wait_s=0.01, max_pending_messages=100) as nc:
        js = nc.jetstream(timeout=20)
        kv = await js.create_kv(KVConfig(bucket="listed", history=3))
        alive = await _fill(kv, js, alive=2000, doomed=200)
        listed: list[str] = []
        async for key in kv.keys():
            listed.append(key)
            if len(listed) == 1:  # the server has sent no more than a first window, and waits to be asked
                own.kill()
                await asyncio.to_thread(own.start)
        assert (len(listed), set(listed)) == (len(alive), alive)


@on_both_drivers
@pytest.mark.parametrize("is_cut", [True, False])
async def test_a_watch_interrupted_in_its_beginning_shows_each_key_as_it_is(
    driver: Driver, own: NatsServer, is_cut: bool
) -> None:
    """Whether the connection is lost, or there is room for few of them at a time."""
    limits = {"max_pending_messages": 100 if not is_cut else 1000}
    async with Proxy(own.port) as proxy, driver.connect(own.url) as other:
        js = other.jetstream()
        kv = await js.create_kv(KVConfig(bucket="watched", history=3))
        alive = await _fill(kv, js, alive=2000, doomed=200)
        options: dict[str, Any] = {"ignore_discovered_servers": True, "reconnect_wait_s": 0.01} | limits
        async with driver.connect(proxy.url, **options) as nc, asyncio.timeout(PATIENCE_S):
            state: dict[str, str] = {}
            revisions = []
            async for entry in (await nc.jetstream().kv("watched")).watch(initial_marker=True):
                if entry is None:
                    break
                assert entry.key not in state
                state[entry.key] = entry.operation
                revisions.append(entry.revision)
                if is_cut and len(state) in (10, 1000):
                    proxy.cut()
        assert {key for key, operation in state.items() if operation == "put"} == alive
        assert len(state) == 2200
        assert revisions == sorted(revisions)


@on_both_drivers
async def test_the_beginning_of_a_watch_is_whole_whatever_the_sizes_of_the_values(driver: Driver, url: str) -> None:
    """A pull consumer loses one for each request that has too few bytes left for the next, if nobody takes care."""
    sizes = [10] * 150 + [9_000] * 40 + [10] * 20 + [60_000] * 5 + [200_000] + [10] * 20
    async with driver.connect(url, max_pending_bytes=100_000) as nc, asyncio.timeout(PATIENCE_S):
        js = nc.jetstream(timeout=20)
        kv = await js.create_kv(KVConfig(bucket="sizes", history=3))
        for times in (2, 1):  # so that the last ones do not follow one another
            for number in range(0, len(sizes), times):
                await js.publish_async(f"$KV.sizes.k{number:03}", b"x" * sizes[number])
        await js.publish_async_complete()
        found: dict[str, int] = {}
        async for entry in kv.watch(initial_marker=True):
            if entry is None:
                break
            assert entry.key not in found
            found[entry.key] = len(entry.value)
        assert found == {f"k{number:03}": size for number, size in enumerate(sizes)}


@on_both_drivers
async def test_a_key_that_changes_while_keys_are_listed_is_listed_once(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        kv = await js.create_kv(KVConfig(bucket="changing", history=2))
        alive = await _fill(kv, js, alive=2000, doomed=1)
        listed: list[str] = []
        async for key in kv.keys():
            listed.append(key)
            if len(listed) == 1:
                await kv.put(key, b"another value")
        assert (len(listed), set(listed)) == (len(alive), alive)


@on_both_drivers
async def test_a_listing_ends_with_an_error_and_never_short(driver: Driver, own: NatsServer) -> None:
    """Whether the server stops answering in the middle of it, or the connection is closed."""
    async with driver.connect(own.url) as nc:
        js = nc.jetstream(timeout=1.0)
        kv = await js.create_kv(KVConfig(bucket="cut"))
        await _fill(kv, js, alive=2000, doomed=1)
        listing = kv.keys()
        await anext(listing)
        own.pause()
        try:
            with pytest.raises(jetspark.RequestTimeout, match="keys of bucket 'cut': no answer within 1 s"):
                await _take(listing, 2000)
        finally:
            own.resume()
        listing = kv.keys()
        await anext(listing)
        await nc.close()
        with pytest.raises(jetspark.ConnectionClosed):
            await _take(listing, 2000)


@on_both_drivers
async def test_a_listing_whose_rest_was_purged_ends_when_the_server_has_no_more(driver: Driver, url: str) -> None:
    """No message says then that nothing is pending; the heartbeat has to come before the time-out."""
    async with driver.connect(url) as nc, driver.connect(url) as other:
        js = nc.jetstream(timeout=1.0)
        kv = await js.create_kv(KVConfig(bucket="purged"))
        alive = await _fill(kv, js, alive=2000, doomed=1)
        listed: list[str] = []
        async with asyncio.timeout(30):
            async for key in kv.keys():
                listed.append(key)
                if len(listed) == 1:
                    await (await other.jetstream().stream("KV_purged")).purge()
        assert len(listed) < len(alive)


@on_both_drivers
async def test_a_snapshot_is_one_moment_now_or_then(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="moments", history=10))
        await kv.put("a", b"a1")
        then = await kv.put("b", b"b1")
        await kv.put("a", b"a2")
        await kv.delete("b")
        now = await kv.snapshot(["a", "b", "missing"])
        assert {key: entry.value for key, entry in now.items()} == {"a": b"a2"}
        past = await kv.snapshot([">"], at=then)
        assert {key: entry.value for key, entry in past.items()} == {"a": b"a1", "b": b"b1"}
        assert (await kv.get_at("b", then)).value == b"b1"
        assert set(await kv.snapshot([">"], at=10_000)) == {"a"}
        assert await kv.snapshot([">"], at=0) == {}
        with pytest.raises(jetspark.KeyNotFound):
            await kv.get_at("b", then - 1)
        with pytest.raises(jetspark.ConfigError, match="expected a list of keys"):
            await kv.snapshot("a")


@on_both_drivers
async def test_a_key_with_a_ttl_goes_away_and_watchers_see_it(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="mortal", limit_marker_ttl_s=60))
        await kv.create("short", b"life", ttl=1)
        await kv.put("long", b"life")
        entries = await _take(kv.watch(), 3)
        assert _brief(entries) == [("short", b"life", "put"), ("long", b"life", "put"), ("short", b"", "purge")]
        with pytest.raises(jetspark.KeyNotFound):
            await kv.get("short")
        async with kv.transaction() as tx:
            await tx.create("short", b"again", ttl=1)
            await tx.create("other", b"life")
        entries = await _take(kv.watch(), 4)
        assert _brief(entries)[-1] == ("short", b"", "purge")
        assert (await kv.get("other")).value == b"life"


@on_both_drivers
async def test_purging_deletes_leaves_values_and_young_marks(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="tidy", history=5))
        for key in ("a", "b", "c"):
            await kv.put(key, b"1")
            await kv.put(key, b"2")
        await kv.delete("a")
        await kv.delete("b")
        assert await kv.purge_deletes(older_than=3600) == 4
        assert (await kv.status()).values == 4
        assert await kv.purge_deletes(older_than=0) == 2
        assert (await kv.status()).values == 2
        assert (await kv.get("c")).value == b"2"


@on_both_drivers
async def test_buckets_are_listed_described_changed_and_deleted(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        kv = await js.create_kv(KVConfig(bucket="one", history=3, ttl_s=60, max_value_bytes=100, description="first"))
        await js.create_kv(KVConfig(bucket="two", storage="memory", compression="s2"))
        assert sorted([name async for name in js.kv_names()]) == ["one", "two"]
        status = await kv.status()
        assert (status.bucket, status.history, status.ttl_s, status.values) == ("one", 3, 60, 0)
        with pytest.raises(jetspark.ServerError):
            await kv.put("k", bytes(200))
        changed = await js.create_or_update_kv(KVConfig(bucket="one", history=7))
        assert (await changed.status()).history == 7
        for number in range(3):
            await changed.put("kept", b"%d" % number)
        same = await js.create_or_update_kv(KVConfig(bucket="one", description="second"))
        assert (await same.status()).history == 7, "what the configuration does not mention stays"
        assert len(await same.history("kept")) == 3
        await js.delete_kv("two")
        with pytest.raises(jetspark.StreamNotFound):
            await js.kv("two")


@on_both_drivers
@pytest.mark.parametrize("way", ["create_kv", "create_or_update_kv"])
async def test_a_new_bucket_allows_transactions_however_it_was_created(driver: Driver, url: str, way: str) -> None:
    async with driver.connect(url) as nc:
        kv = await getattr(nc.jetstream(), way)(KVConfig(bucket="new"))
        async with kv.transaction() as tx:
            await tx.put("a", b"1")
            await tx.put("b", b"2")
        assert sorted([key async for key in kv.keys()]) == ["a", "b"]  # noqa: SIM118


@on_both_drivers
async def test_a_mirror_reads_its_origin_and_writes_to_it(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        origin = await js.create_kv(KVConfig(bucket="origin"))
        await origin.put("k", b"1")
        mirror = await js.create_kv(KVConfig(bucket="copy", mirror=StreamSource(name="origin")))
        assert _brief(await _take(mirror.watch("k"), 1)) == [("k", b"1", "put")]
        assert (await mirror.get("k")).value == b"1"
        revision = await mirror.put("k", b"2")
        assert (await origin.get("k")).revision == revision


@on_both_drivers
async def test_another_client_reads_what_we_write_and_the_other_way_round(driver: Driver, url: str) -> None:
    import nats
    import nats.js.errors

    theirs = await nats.connect(url)
    try:
        async with driver.connect(url) as nc:
            ours = await nc.jetstream().create_kv(KVConfig(bucket="shared", history=5))
            their_kv = await theirs.jetstream().key_value("shared")
            revision = await ours.put("a.b", b"ours")
            entry = await their_kv.get("a.b")
            assert (entry.value, entry.revision) == (b"ours", revision)
            await their_kv.put("a.b", b"theirs")
            await their_kv.put("c", b"gone soon")
            assert (await ours.get("a.b")).value == b"theirs"
            await their_kv.delete("c")
            await ours.delete("a.b")
            with pytest.raises(jetspark.KeyNotFound):
                await ours.get("c")
            with pytest.raises(nats.js.errors.KeyNotFoundError):
                await their_kv.get("a.b")
            await their_kv.purge("c")
            await ours.purge("a.b")
            assert [entry.operation for entry in await ours.history("c")] == ["purge"]
            their_bucket = await theirs.jetstream().create_key_value(bucket="their_own", history=2)
            await their_bucket.put("x", b"1")
            assert (await (await nc.jetstream().kv("their_own")).get("x")).value == b"1"
    finally:
        await theirs.close()


@on_both_drivers
async def test_a_transaction_writes_all_or_nothing(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="together", history=5))
        first = await kv.put("a", b"1")
        await kv.put("gone", b"1")
        async with kv.transaction() as tx:
            await tx.update("a", b"2", revision=first)
            await tx.create("b", b"new")
            await tx.put("c", b"3")
            await tx.delete("gone")
        assert {key: entry.value for key, entry in (await kv.snapshot([">"])).items()} == {
            "a": b"2",
            "b": b"new",
            "c": b"3",
        }
        assert (await kv.get("c")).revision == tx.revisions["c"]
        assert tx.revisions["a"] + 3 == tx.revisions["gone"]

        before = (await kv.status()).values
        with pytest.raises(jetspark.Conflict) as conflict:  # noqa: PT012 - the block is the transaction
            async with kv.transaction() as tx:
                await tx.put("x", b"never")
                await tx.update("a", b"late", revision=first)
                await tx.update("c", b"4", revision=(await kv.get("c")).revision)
        assert conflict.value.keys == ("a",)
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with kv.transaction() as tx:
                await tx.put("x", b"never")
                raise ZeroDivisionError
        async with kv.transaction():
            pass
        assert (await kv.status()).values == before


@on_both_drivers
async def test_a_transaction_refuses_what_it_cannot_do(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        kv = await js.create_kv(KVConfig(bucket="limits"))
        await kv.put("here", b"1")
        async with kv.transaction() as tx:
            await tx.put("k", b"1")
            with pytest.raises(jetspark.ConfigError, match="written twice"):
                await tx.put("k", b"2")
            with pytest.raises(jetspark.KeyExists):
                await tx.create("here", b"2")
            for number in range(999):
                await tx.put(f"n.{number}", b"")
        assert len(tx.revisions) == 1000
        before = (await kv.status()).values
        with pytest.raises(jetspark.BatchTooLarge) as large:  # noqa: PT012 - the block is the transaction
            async with kv.transaction() as tx:
                for number in range(1001):
                    await tx.put(f"m.{number}", b"")
        assert (large.value.limit, tx.outcome, tx.revisions) == (1000, "not stored", {})
        assert (await kv.status()).values == before
        plain = await js.create_kv(KVConfig(bucket="plain", allow_atomic=False))
        with pytest.raises(jetspark.ConfigError, match="does not allow transactions"):
            async with plain.transaction() as tx:
                await tx.put("k", b"1")


@on_both_drivers
async def test_a_transaction_may_depend_on_keys_it_only_reads(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="guarded", history=5))
        price, limit = await kv.put("price.1", b"10"), await kv.put("limit", b"100")
        account = await kv.put("account", b"50")
        async with kv.transaction() as tx:
            await tx.update("account", b"40", revision=account)
            await tx.put("order.1", b"price 10")
            await tx.expect("price.*", revision=price)
            await tx.expect("limit", revision=limit)
            await tx.expect("blocked", revision=0)
            await tx.expect("order.*", revision=0)
        assert tx.outcome == "stored"
        assert (await kv.get("account")).revision == tx.revisions["account"]
        assert (await kv.get("order.1")).revision == tx.revisions["order.1"]
        assert (await kv.get("order.1")).value == b"price 10"

        await kv.put("price.2", b"7")
        before = (await kv.status()).values
        with pytest.raises(jetspark.Conflict) as conflict:  # noqa: PT012 - the block is the transaction
            async with kv.transaction() as tx:
                await tx.update("account", b"30", revision=tx.revisions.get("account", account + 1))
                await tx.expect("price.*", revision=price)
                await tx.expect("limit", revision=limit)
        assert "price.*" in conflict.value.keys
        assert "limit" not in conflict.value.keys
        assert (tx.outcome, (await kv.status()).values) == ("not stored", before)


@on_both_drivers
async def test_of_two_transactions_that_read_what_the_other_writes_one_happens(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="skew", history=5))
        for _ in range(20):
            left, right = await kv.put("left", b"on call"), await kv.put("right", b"on call")

            async def leave(key: str, own: int, other: str, seen: int) -> bool:
                try:
                    async with kv.transaction() as tx:
                        await tx.update(key, b"off", revision=own)
                        await tx.expect(other, revision=seen)
                except jetspark.Conflict:
                    return False
                return True

            done = await asyncio.gather(leave("left", left, "right", right), leave("right", right, "left", left))
            assert sum(done) <= 1
            values = [entry.value for entry in (await kv.snapshot([">"])).values()]
            assert values.count(b"off") == sum(done)


@on_both_drivers
async def test_a_transaction_in_doubt_is_resolved(driver: Driver, own: NatsServer) -> None:
    async with (
        LossyProxy(own.port) as proxy,
        driver.connect(own.url) as nc,
        driver.connect(proxy.url, reconnect_wait_s=0.01, on_event=(events := Recorder())) as shaky,
    ):
        kv = await nc.jetstream().create_kv(KVConfig(bucket="doubt"))
        theirs = await shaky.jetstream(timeout=1).kv("doubt")

        async def write(value: bytes, lost: Literal["to_server", "to_client"]) -> Any:
            with pytest.raises(jetspark.BatchInDoubt):  # noqa: PT012 - the block is the transaction
                async with theirs.transaction() as tx:
                    await tx.put("a", value)
                    await tx.put("b", value)
                    proxy.lose_from(b"Nats-Batch-Commit", lost)
            assert (tx.outcome, tx.revisions) == ("unknown", {})
            proxy.cut()
            await events.wait_for(jetspark.Reconnected, len(events.of(jetspark.Reconnected)) + 1)
            return tx

        tx = await write(b"1", "to_client")
        assert await tx.resolve() == tx.outcome == "stored"
        assert (await kv.get("b")).revision == tx.revisions["b"] == tx.revisions["a"] + 1
        tx = await write(b"2", "to_server")
        assert await tx.resolve() == tx.outcome == "not stored"
        assert tx.revisions == {}
        assert (await kv.get("a")).value == b"1"


@on_both_drivers
async def test_concurrent_transactions_are_never_seen_half_done(driver: Driver, url: str) -> None:
    """Two accounts, money moving between them: every snapshot adds up."""
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="bank", storage="memory"))
        await kv.put("alice", b"100")
        await kv.put("bob", b"100")
        done = False

        async def move(source: str, target: str) -> None:
            for _ in range(15):
                while True:
                    accounts = await kv.snapshot([source, target])
                    try:
                        async with kv.transaction() as tx:
                            for name, change in ((source, -1), (target, 1)):
                                entry = accounts[name]
                                await tx.update(name, b"%d" % (int(entry.value) + change), revision=entry.revision)
                        break
                    except jetspark.Conflict:
                        continue

        async def audit() -> int:
            audits = 0
            while not done:
                accounts = await kv.snapshot([">"])
                assert sum(int(entry.value) for entry in accounts.values()) == 200
                audits += 1
            return audits

        auditing = asyncio.ensure_future(audit())
        await asyncio.gather(move("alice", "bob"), move("alice", "bob"), move("bob", "alice"))
        done = True
        assert await auditing > 0
        assert {key: entry.value for key, entry in (await kv.snapshot([">"])).items()} == {
            "alice": b"85",
            "bob": b"115",
        }


@on_both_drivers
async def test_a_watch_for_changes_only_misses_none_that_came_before_its_first(driver: Driver, own: NatsServer) -> None:
    async with Proxy(own.port) as proxy, driver.connect(own.url) as writer:
        kv = await writer.jetstream().create_kv(KVConfig(bucket="empty", history=5))
        async with driver.connect(proxy.url, ignore_discovered_servers=True, reconnect_wait_s=0.5) as nc:
            changes = (await nc.jetstream().kv("empty")).watch(updates_only=True, initial_marker=True)
            present_is_over = asyncio.Event()
            watching = asyncio.ensure_future(_take(changes, 3, present_is_over))
            async with asyncio.timeout(PATIENCE_S):
                await present_is_over.wait()
            proxy.cut()
            await kv.put("a", b"1")  # while the watcher is away, and before it has seen anything
            await kv.put("a", b"2")
            assert _brief(await watching) == [None, ("a", b"1", "put"), ("a", b"2", "put")]


@on_both_drivers
async def test_a_ttl_shorter_than_the_marker_is_refused_because_the_server_would_raise_it(
    driver: Driver, url: str
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        kv = await js.create_kv(KVConfig(bucket="locks", storage="memory", history=2, limit_marker_ttl_s=30))
        revision = await kv.put("taken", b"")
        for call in (
            lambda: kv.create("lock", b"me", ttl=1),
            lambda: kv.update("taken", b"me", revision=revision, ttl=29.5),
            lambda: kv.purge("taken", ttl=1),
        ):
            with pytest.raises(jetspark.ConfigError, match=r"ttl=.*expected at least limit_marker_ttl_s=30 of bucket"):
                await call()
        assert (await kv.status()).values == 1
        async with kv.transaction() as tx:
            with pytest.raises(jetspark.ConfigError, match=r"ttl=1.*expected at least limit_marker_ttl_s=30 of bucket"):
                await tx.create("lock", b"me", ttl=1)
        await kv.create("lock", b"me", ttl=30)
        await kv.update("taken", b"me", revision=revision, ttl=31)
        await kv.purge("taken", ttl=60)
        # Looked up when the bucket is opened.
        await js.create_or_update_kv(KVConfig(bucket="locks", history=2, limit_marker_ttl_s=1))
        await (await js.kv("locks")).create("short", b"me", ttl=1)
        single = await js.create_kv(KVConfig(bucket="single", storage="memory", limit_marker_ttl_s=30))
        await single.create("lock", b"me", ttl=1)
        stored = await (await js.stream("KV_single")).get_message(last_for="$KV.single.lock")
        assert stored.headers["Nats-TTL"] == "1s", "a bucket with one revision keeps a shorter TTL"


@on_both_drivers
async def test_filters_may_cover_each_other(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv("covered")
        for key in ("a.1", "a.2", "b"):
            await kv.put(key, b"")
        for filters, keys in (
            (("b", "b"), ["b"]),
            (("a.1", "a.*"), ["a.1", "a.2"]),
            (("a.>", "b", "a.*", "a.2", "b"), ["a.1", "a.2", "b"]),
            (("b", ">", "*"), ["a.1", "a.2", "b"]),
        ):
            assert [key async for key in kv.keys(*filters)] == keys
            seen = []
            async for entry in kv.watch(*filters, initial_marker=True):
                if entry is None:
                    break
                seen.append(entry.key)
            assert seen == keys
        with pytest.raises(jetspark.ConfigError, match=r"filters 'a\.\*' and '\*\.1': some keys match both"):
            [key async for key in kv.keys("b", "a.*", "*.1")]
