"""Batches, publishers and objects of users who may not publish to one of the subjects: the error names it, at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from support.drivers import Driver, Recorder, inside, on_both_drivers
from support.permissions import ExactServer, Rights

import jetspark
from jetspark import BatchInDoubt, ConsumerConfig, KVConfig, PermissionDenied, StreamConfig
from jetspark.core.events import ErrorReported

T = TypeVar("T")

# What tests wait for at most, where the call by itself would wait for these.
PATIENCE_S = 30.0
LONG_S = 600.0


@pytest.fixture(scope="module")
def exact() -> Iterator[ExactServer]:
    with ExactServer() as server:
        yield server


class Place:
    """An account with a stream, a bucket and an object store, and a client in it who may not do everything."""

    def __init__(self, server: ExactServer, account: str, user: str, nc: jetspark.Client, events: Recorder) -> None:
        self.server, self.account, self.user, self.nc, self.events = server, account, user, nc, events
        self.js = nc.jetstream(timeout=LONG_S)
        self.kept: list[object] = []
        """Batches and publishers, so that none is over by being collected."""

    def keep(self, batch: T) -> T:
        self.kept.append(batch)
        return batch

    async def stored(self) -> list[tuple[str, bytes]]:
        async with await jetspark.connect(self.server.url_of(self.account)) as nc:
            stream = await nc.jetstream().stream("S")
            return [(each.subject, each.data) async for each in stream.get_messages()]


@asynccontextmanager
async def allowed(
    driver: Driver, server: ExactServer, *publish: str, subscribe: tuple[str, ...] = ("_INBOX.>",)
) -> AsyncIterator[Place]:
    account = server.new_account()
    async with await jetspark.connect(server.url_of(account)) as admin:
        js = admin.jetstream()
        await js.create_stream(
            StreamConfig(name="S", subjects=["s.>"], allow_direct=True, allow_atomic=True, allow_batched=True)
        )
        await js.create_kv(KVConfig(bucket="B"))
        await js.create_object_store("O")
    [user] = server.new_users(account, [Rights(("$JS.API.STREAM.INFO.*", *publish), subscribe)])
    events = Recorder()
    async with asyncio.timeout(PATIENCE_S):
        async with driver.connect(server.url_of(user), on_event=events) as nc:
            yield Place(server, account, user, nc, events)


async def _fast(place: Place, **options: Any) -> jetspark.FastBatch:
    async with place.keep(place.js.fast_batch(timeout=LONG_S, **options)) as batch:
        await batch.add("s.a", b"1")
        await batch.add("s.b", b"2")
        await batch.add("s.a", b"3")
    return batch


async def _publisher(place: Place) -> None:
    async with place.keep(place.js.fast_publisher(patience_s=LONG_S)) as publisher:
        await publisher.publish("s.a", b"1")
        await publisher.flush()
        await publisher.publish("s.b", b"2")
        await publisher.publish("s.a", b"3")


async def _atomic(place: Place, **options: Any) -> None:
    async with place.keep(place.js.atomic_batch(**options)) as batch:
        await batch.add("s.a", b"1")
        await batch.add("s.b", b"2")
        await batch.add("s.a", b"3")


async def _atomic_many(place: Place) -> None:
    async with place.keep(place.js.atomic_batch()) as batch:
        await batch.add_many([("s.a", b"1"), ("s.b", b"2"), ("s.a", b"3")])


async def _atomic_last(place: Place) -> None:
    async with place.keep(place.js.atomic_batch()) as batch:
        await batch.add("s.a", b"1")
        await batch.add("s.b", b"2")
        await batch.commit("s.a", b"3")


async def _atomic_asking(place: Place) -> None:
    async with place.keep(place.js.atomic_batch(ack_every=3)) as batch:
        await batch.add("s.a", b"1")
        await batch.add("s.b", b"2")
        await batch.add("s.a", b"3")


async def _publish_async(place: Place) -> None:
    await place.js.publish_async("s.a", b"1")
    denied = await place.js.publish_async("s.b", b"2")
    await place.js.publish_async("s.a", b"3")
    await place.js.publish_async_complete()
    if error := inside(denied).exception():
        raise error


# How many of the messages that are allowed may be stored all the same. The last one of a fast batch with gaps is,
# unless the batch hears of the denial before it is added.
CALLS: dict[str, tuple[set[int], Callable[[Place], Awaitable[Any]]]] = {
    "fast_batch": ({1}, _fast),
    "fast_batch, gap=ok": ({1, 2}, lambda place: _fast(place, gap="ok")),
    "fast_publisher": ({1}, _publisher),
    "atomic_batch": ({0}, _atomic),
    "atomic_batch, no ack": ({0}, lambda place: _atomic(place, ack_first=False)),
    "atomic_batch, add_many": ({0}, _atomic_many),
    "atomic_batch, last message": ({0}, _atomic_last),
    "atomic_batch, ack_every": ({0}, _atomic_asking),
    "publish_async": ({2}, _publish_async),
}


@pytest.mark.parametrize("name", CALLS)
@on_both_drivers
async def test_a_denied_message_ends_its_batch_with_an_error_that_names_its_subject(
    exact: ExactServer, driver: Driver, name: str
) -> None:
    stored, call = CALLS[name]
    async with allowed(driver, exact, "s.a") as place:
        with pytest.raises(PermissionDenied) as denied:
            await call(place)
        assert (denied.value.operation, denied.value.subject, denied.value.may_pass) == ("publish", "s.b", False)
        await place.nc.flush()  # it was told
        await place.js.publish("s.a", b"after")
        *found, after = await place.stored()
        assert (found, after) == ([("s.a", b"1"), ("s.a", b"3")][: len(found)], ("s.a", b"after"))
        assert len(found) in stored


@pytest.mark.parametrize("name", [name for name in CALLS if name != "publish_async"])
@on_both_drivers
async def test_a_denied_first_message_stores_nothing(exact: ExactServer, driver: Driver, name: str) -> None:
    async with allowed(driver, exact, "s.b") as place:
        with pytest.raises(PermissionDenied) as denied:
            await CALLS[name][1](place)
        assert (denied.value.operation, denied.value.subject) == ("publish", "s.a")
        await place.nc.flush()
        assert await place.stored() == []


@on_both_drivers
async def test_a_batch_with_a_denied_message_knows_how_much_is_stored(exact: ExactServer, driver: Driver) -> None:
    async with allowed(driver, exact, "s.a") as place:
        batch = place.js.fast_batch(timeout=LONG_S)
        with pytest.raises(PermissionDenied) as denied:
            async with batch:
                await batch.add_many([("s.a", b"1"), ("s.a", b"2"), ("s.b", b"3")])
        assert batch.stored == 2
        assert isinstance(denied.value.__cause__, jetspark.BatchCutShort)
        assert denied.value.__cause__.stored == 2


@on_both_drivers
async def test_a_publisher_keeps_what_is_not_stored_when_a_message_is_denied(
    exact: ExactServer, driver: Driver
) -> None:
    async with allowed(driver, exact, "s.a") as place:
        publisher = place.js.fast_publisher(patience_s=LONG_S)
        with pytest.raises(PermissionDenied):
            async with publisher:
                await publisher.publish_many([("s.a", b"1"), ("s.b", b"2"), ("s.a", b"3")])
        assert inside(publisher).published() == 1
        assert [item[:2] for item in inside(publisher).unpublished()] == [("s.b", b"2"), ("s.a", b"3")]
        assert isinstance(publisher.failure, PermissionDenied)


async def _transaction(place: Place, kv: jetspark.KeyValue, *keys: str) -> None:
    async with place.keep(kv.transaction()) as tx:
        for key in keys:
            await tx.put(key, b"1")


@on_both_drivers
async def test_a_transaction_with_a_denied_key_names_it(exact: ExactServer, driver: Driver) -> None:
    async with allowed(driver, exact, "$KV.B.a") as place:
        kv = await place.js.kv("B")
        for first, second in (("a", "b"), ("b", "a")):
            with pytest.raises(PermissionDenied, match=r"\$KV\.B\.b"):
                await _transaction(place, kv, first, second)
        await place.nc.flush()


@pytest.mark.parametrize("chunks", [1, 5])
@on_both_drivers
async def test_an_object_whose_chunks_are_denied_is_not_waited_for(
    exact: ExactServer, driver: Driver, chunks: int
) -> None:
    async with allowed(driver, exact, "$O.O.M.*", "$JS.API.STREAM.MSG.GET.OBJ_O") as place:
        files = await place.js.object_store("O")
        with pytest.raises(PermissionDenied, match=r"\$O\.O\.C\."):
            await files.put("name", b"x" * (chunks * 128 * 1024))
        await place.nc.flush()


@on_both_drivers
async def test_an_object_whose_metadata_are_denied_says_so(exact: ExactServer, driver: Driver) -> None:
    rights = "$O.O.C.*", "$JS.API.STREAM.MSG.GET.OBJ_O", "$JS.API.STREAM.PURGE.OBJ_O"
    async with allowed(driver, exact, *rights) as place:
        files = await place.js.object_store("O")
        with pytest.raises(PermissionDenied, match=r"\$O\.O\.M\."):
            await files.put("name", b"x" * 1_000_000)


@pytest.mark.parametrize("name", ["fast_batch", "fast_publisher", "atomic_batch, no ack"])
@on_both_drivers
async def test_a_denied_inbox_leaves_a_batch_in_doubt_at_once_and_is_named(
    exact: ExactServer, driver: Driver, name: str
) -> None:
    async with allowed(driver, exact, "s.>", subscribe=("nothing",)) as place:
        with pytest.raises((BatchInDoubt, PermissionDenied), match=r"may not subscribe to '_INBOX\."):
            await CALLS[name][1](place)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "publish_async"])
@on_both_drivers
async def test_a_denial_of_before_does_not_end_a_batch_whose_rights_were_given_since(
    exact: ExactServer, driver: Driver, name: str
) -> None:
    async with allowed(driver, exact, "s.a") as place:
        await place.nc.publish("s.b", b"denied")
        with pytest.raises(PermissionDenied, match=r"s\.b"):
            await place.nc.flush()
        with pytest.raises(PermissionDenied, match=r"s\.b"):
            await CALLS[name][1](place)
        before = await place.stored()
        place.server.change_user(place.user, Rights(("s.*",), ("_INBOX.>",)))
        await CALLS[name][1](place)
        assert await place.stored() == [*before, ("s.a", b"1"), ("s.b", b"2"), ("s.a", b"3")]


@on_both_drivers
async def test_a_batch_of_other_subjects_is_not_ended_by_a_denial(exact: ExactServer, driver: Driver) -> None:
    async with allowed(driver, exact, "s.a") as place:
        fast, atomic = place.js.fast_batch(timeout=LONG_S), place.js.atomic_batch()
        async with fast, atomic:
            await fast.add("s.a", b"1")
            await atomic.add("s.a", b"2")
            await place.nc.publish("s.b", b"denied")
            with pytest.raises(PermissionDenied, match=r"s\.b"):
                await place.nc.flush()
            await fast.add("s.a", b"3")
            await atomic.add("s.a", b"4")
        assert sorted(data for _, data in await place.stored()) == [b"1", b"2", b"3", b"4"]


@on_both_drivers
async def test_denials_that_were_raised_are_not_raised_again_by_close(exact: ExactServer, driver: Driver) -> None:
    async with allowed(driver, exact, "s.a") as place:
        for _, call in CALLS.values():
            with pytest.raises(PermissionDenied):
                await call(place)
        raised = await asyncio.gather(*(place.js.publish("s.b") for _ in range(20)), return_exceptions=True)
        assert {type(each) for each in raised} == {PermissionDenied}
        await place.nc.close()


async def _put_object(place: Place) -> None:
    await place.keep(await place.js.object_store("O")).put("name", b"x" * 1_000_000)


async def _write_keys(place: Place) -> None:
    await _transaction(place, await place.js.kv("B"), "a", "b")


async def _request(place: Place) -> None:
    await place.js.publish("s.b", b"2")


@pytest.mark.parametrize("flushes", [False, True], ids=["at once", "after a flush"])
@pytest.mark.parametrize("name", [*CALLS, "transaction", "object", "publish"])
@on_both_drivers
async def test_a_plain_message_that_is_denied_after_a_batch_is_told_by_a_flush(
    exact: ExactServer, driver: Driver, name: str, flushes: bool
) -> None:
    call = {"transaction": _write_keys, "object": _put_object, "publish": _request}.get(name) or CALLS[name][1]
    rights = "s.a", "$KV.B.a", "$O.O.M.*", "$JS.API.STREAM.MSG.GET.OBJ_O"
    async with allowed(driver, exact, *rights) as place:
        with pytest.raises(PermissionDenied) as denied:
            await call(place)
        if flushes:
            await place.nc.flush()
        await place.nc.publish(denied.value.subject, b"plain")
        with pytest.raises(PermissionDenied) as told:
            await place.nc.flush()
        assert told.value.subject == denied.value.subject


async def _fill(batch: Any) -> None:
    # The server takes 1000 messages in an atomic batch.
    many = [("s.a", b"1"), *[("s.b", b"2")] * 900, ("s.a", b"3")]
    async with batch:
        for number in range(0, len(many), 100):
            await batch.add_many(many[number : number + 100])


@on_both_drivers
async def test_many_denied_messages_of_a_batch_are_told_once(exact: ExactServer, driver: Driver) -> None:
    async with allowed(driver, exact, "s.a") as place:
        for batch in (place.js.fast_batch(), place.js.fast_batch(gap="ok"), place.js.atomic_batch()):
            with pytest.raises(PermissionDenied):
                await _fill(place.keep(batch))
        await place.nc.flush()


@on_both_drivers
async def test_a_plain_message_that_is_denied_is_told_by_close(exact: ExactServer, driver: Driver) -> None:
    with pytest.raises(PermissionDenied, match=r"s\.b"):
        async with allowed(driver, exact, "s.a") as place:
            await place.nc.publish("s.b", b"denied")


@on_both_drivers
async def test_a_denied_subscription_is_told_by_next_and_by_iteration(exact: ExactServer, driver: Driver) -> None:
    async with allowed(driver, exact, "s.a") as place:
        for queue in ("", "workers"):
            with pytest.raises(PermissionDenied) as denied:
                await (await place.nc.subscribe("s.b", queue=queue)).next(timeout=LONG_S)
            assert (denied.value.operation, denied.value.subject) == ("subscribe", "s.b")
        with pytest.raises(PermissionDenied):
            async for _ in await place.nc.subscribe("s.b"):
                pass


@on_both_drivers
async def test_a_denied_acknowledgement_is_reported_and_ack_sync_raises(exact: ExactServer, driver: Driver) -> None:
    rights = "s.a", "$JS.API.CONSUMER.CREATE.S.>", "$JS.API.CONSUMER.MSG.NEXT.S.d"
    async with allowed(driver, exact, *rights) as place:
        await place.js.publish("s.a", b"1")
        await place.js.publish("s.a", b"2")
        consumer = await (await place.js.stream("S")).create_consumer(ConsumerConfig(durable_name="d"))
        first, second = await consumer.fetch(2)
        with pytest.raises(PermissionDenied, match=r"\$JS\.ACK\.S\.d\."):
            await first.ack_sync()
        await place.nc.flush()  # what ack_sync has raised is not raised again
        await second.ack()
        reported = await place.events.wait_for(ErrorReported, 2)
        assert isinstance(reported.error, PermissionDenied)
        assert reported.error.subject == second.reply
        with pytest.raises(PermissionDenied, match=r"\$JS\.ACK\.S\.d\."):
            await place.nc.close()  # the last chance to tell
