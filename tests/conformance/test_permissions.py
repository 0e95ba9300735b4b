"""Which subjects every call of the client uses: recorded, then granted exactly, then each of them taken away.

Each call runs in an account of its own, through a proxy that records what it publishes and subscribes to. A user who
has exactly these rights makes the same call in another account. Before that, for each of the rights, a user who has all
but this one gets ``PermissionDenied`` with its subject. The few calls that end otherwise are in ``EXCEPTIONS``, each
with its reason.

``docs/client-permissions.md`` has the same rights by role; ``test_a_role_of_the_documentation_is_enough`` runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Driver, inside, on_both_drivers
from support.permissions import ExactServer, RecordingProxy, Removed, Rights, general, through

import jetspark
from jetspark import (
    BatchInDoubt,
    Conflict,
    ConsumerConfig,
    KeyExists,
    KVConfig,
    ObjectStoreConfig,
    PermissionDenied,
    StreamConfig,
)
from jetspark.core.subjects import matches
from jetspark.jetstream.kv import Bucket
from jetspark.jetstream.operations import Operation

# A denial comes at once. These are what calls wait for without one, and what the test waits for.
LONG_S = 600.0
PATIENCE_S = 60.0

Call = Callable[["Side"], Awaitable[Any]]

# Consumers with a name of their own.
NAMES = {"d", "n", "p"}


class Side:
    """One user's client, and an administrator's, who plays the part of all others."""

    def __init__(self, nc: jetspark.Client, admin: jetspark.Client) -> None:
        self.nc, self.js = nc, nc.jetstream(timeout=LONG_S)
        self.admin = admin

    async def stream(self) -> jetspark.Stream:
        return await self.js.stream("S", verify=False)

    async def consumer(self, name: str = "d") -> jetspark.Consumer:
        return await (await self.stream()).consumer(name, verify=False)

    async def kv(self) -> jetspark.KeyValue:
        return await self.js.kv("B", verify=False)

    async def files(self) -> jetspark.ObjectStore:
        return await self.js.object_store("O", verify=False)


async def _prepare(nc: jetspark.Client, group: str) -> None:
    js = nc.jetstream()
    if group in ("streams", "consumers", "publishing"):
        await js.create_stream(
            StreamConfig(name="S", subjects=["s.>"], allow_direct=True, allow_atomic=True, allow_batched=True)
        )
    if group in ("streams", "consumers"):
        for number in range(4):
            await js.publish("s.a", b"%d" % number)
    if group == "streams":
        await js.create_stream(StreamConfig(name="ND", subjects=["nd.>"]))
        await js.publish("nd.a", b"1")
    if group in ("streams", "consumers"):
        stream = await js.stream("S")
        await stream.create_consumer(ConsumerConfig(durable_name="d"))
        await stream.create_consumer(ConsumerConfig(durable_name="p", deliver_subject="to.p"))
    if group == "kv":
        kv = await js.create_kv(KVConfig(bucket="B", history=5, limit_marker_ttl_s=1.0))
        await kv.put("k", b"1")
        await kv.put("x.y", b"1")
        await kv.put("gone", b"1")
        await kv.delete("gone")
    if group == "objects":
        files = await js.create_object_store("O")
        await files.put("one", b"x" * 300_000)
        await files.put("two", b"y")


async def _all(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def _first(items: AsyncIterator[Any]) -> Any:
    async for item in items:
        return item
    return None


async def _of(handle: Awaitable[Any], method: str, *args: Any, **options: Any) -> Any:
    return await getattr(await handle, method)(*args, **options)


async def _listed(handle: Awaitable[Any], method: str, *args: Any) -> list[Any]:
    return await _all(getattr(await handle, method)(*args))


async def _raises(kind: type[Exception], call: Awaitable[Any]) -> None:
    with pytest.raises(kind):
        await call


# ---- the calls -------------------------------------------------------------------------------------------------------


async def _subscribe(s: Side, queue: str = "") -> None:
    subscription = await s.nc.subscribe("core.in", queue=queue)
    waiting = asyncio.create_task(subscription.next(timeout=LONG_S))
    while not waiting.done():
        await s.admin.publish("core.in", b"1")
        await s.admin.flush()
        await asyncio.wait([waiting], timeout=0.01)
    await waiting


async def _request(s: Side) -> None:
    async with _echo(s):
        await s.nc.request("svc.echo", b"?", timeout=LONG_S)


async def _request_many(s: Side) -> None:
    async with _echo(s):
        assert await _all(s.nc.request_many("svc.echo", b"?", max_messages=1, timeout=PATIENCE_S))


@contextlib.asynccontextmanager
async def _echo(s: Side) -> AsyncIterator[None]:
    echoes = await s.admin.subscribe("svc.echo", callback=lambda message: message.respond(b"!"))
    await s.admin.flush()
    try:
        yield
    finally:
        await echoes.unsubscribe()


async def _question(s: Side, waiting: asyncio.Task[Any]) -> Any:
    """The administrator asks until somebody listens."""
    while not waiting.done():
        await s.admin.publish("svc.mine", b"?", reply="answers.to.admin")
        await s.admin.flush()
        await asyncio.wait([waiting], timeout=0.01)
    return await waiting


async def _respond(s: Side) -> None:
    questions = await s.nc.subscribe("svc.mine")
    question = await _question(s, asyncio.create_task(questions.next(timeout=LONG_S)))
    await question.respond(b"!")
    await s.nc.flush()


async def _publish_async(s: Side) -> None:
    future = await s.js.publish_async("s.a", b"1")
    await s.js.publish_async_complete()
    if error := inside(future).exception():
        raise error


async def _fast(s: Side, *subjects: str) -> None:
    async with s.js.fast_batch(timeout=LONG_S) as batch:
        for subject in subjects:
            await batch.add(subject, b"1")


async def _fast_publisher(s: Side, *subjects: str) -> None:
    async with s.js.fast_publisher(patience_s=LONG_S) as publisher:
        for subject in subjects:
            await publisher.publish(subject, b"1")


async def _atomic(s: Side, **options: Any) -> None:
    async with s.js.atomic_batch(**options) as batch:
        await batch.add("s.a", b"1")
        await batch.add("s.b", b"1")


async def _advisories(s: Side) -> None:
    advisories = s.js.batch_advisories("S")
    waiting = asyncio.create_task(_first(advisories))
    subject = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.S"
    text = b'{"stream":"S","batch":"b","reason":"timeout","id":"i","timestamp":"2026-01-01T00:00:00Z","type":"t"}'
    while not waiting.done():
        await s.admin.publish(subject, text)
        await s.admin.flush()
        await asyncio.wait([waiting], timeout=0.01)
    await waiting


async def _messages(s: Side, answer: str = "ack") -> None:
    async with (await s.consumer()).messages() as messages:
        async for message in messages:
            await getattr(message, answer)()
            break
    await s.nc.flush()


async def _fetch(s: Side, answer: str = "", **options: Any) -> None:
    consumer = await s.consumer()
    for message in await consumer.fetch(2, **options):
        if answer:
            await getattr(message, answer)()
    await s.nc.flush()


async def _batches(s: Side) -> None:
    batches = (await s.consumer()).batches(2)
    async with contextlib.aclosing(batches) as lists:  # type: ignore[type-var]
        async for _ in lists:
            break


async def _pushed(s: Side) -> None:
    consumer = await (await s.stream()).consumer("p")
    async with consumer.pushed_messages() as messages:
        async for message in messages:
            await message.ack()
            break
    await s.nc.flush()


async def _ordered(s: Side, *filters: str) -> None:
    reader = (await s.stream()).ordered_consumer(*filters)
    async with contextlib.aclosing(reader.messages()) as messages:  # type: ignore[type-var]
        async for _ in messages:
            break


async def _watch(s: Side, *filters: str, **options: Any) -> None:
    async with contextlib.aclosing((await s.kv()).watch(*filters, **options)) as entries:  # type: ignore[type-var]
        async for _ in entries:
            break


async def _transaction(s: Side, *keys: str) -> None:
    async with (await s.kv()).transaction() as tx:
        for key in keys:
            await tx.put(key, b"2")


async def _guarded(s: Side) -> None:
    async with (await s.kv()).transaction() as tx:
        await tx.expect("x.y", revision=2)
        await tx.put("k", b"2")


async def _created_in_transaction(s: Side, key: str) -> None:
    async with (await s.kv()).transaction() as tx:
        await tx.create(key, b"2")


async def _linked(s: Side) -> None:
    files = await s.files()
    await files.add_link("link", await files.info("one"))


async def _watch_objects(s: Side) -> None:
    async with contextlib.aclosing((await s.files()).watch()) as infos:  # type: ignore[type-var]
        async for _ in infos:
            break


def _later() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)


CALLS: dict[str, tuple[str, Call]] = {
    # ---- the client
    "nc.publish": ("core", lambda s: s.nc.publish("core.x", b"1")),
    "nc.subscribe": ("core", _subscribe),
    "nc.subscribe(queue)": ("core", lambda s: _subscribe(s, "workers")),
    "nc.request": ("core", _request),
    "nc.request_many": ("core", _request_many),
    "message.respond": ("core", _respond),
    "js.account_info": ("core", lambda s: s.js.account_info()),
    # ---- streams
    "js.stream": ("streams", lambda s: s.js.stream("S")),
    "js.streams": ("streams", lambda s: _all(s.js.streams())),
    "js.stream_names": ("streams", lambda s: _all(s.js.stream_names())),
    "js.create_stream": ("core", lambda s: s.js.create_stream("NEW")),
    "js.update_stream": ("streams", lambda s: s.js.update_stream(StreamConfig(name="S", max_messages=9))),
    "js.create_or_update_stream": ("core", lambda s: s.js.create_or_update_stream("NEW")),
    "js.create_or_update_stream(there)": ("streams", lambda s: s.js.create_or_update_stream(StreamConfig(name="S"))),
    "js.delete_stream": ("streams", lambda s: s.js.delete_stream("S")),
    "stream.info": ("streams", lambda s: _of(s.stream(), "info")),
    "stream.update": ("streams", lambda s: _of(s.stream(), "update", max_messages=9)),
    "js.get_or_create_stream": ("core", lambda s: s.js.get_or_create_stream("NEW")),
    "js.get_or_create_stream(there)": ("streams", lambda s: s.js.get_or_create_stream("S")),
    "stream.seal": ("streams", lambda s: _of(s.stream(), "seal")),
    "stream.delete": ("streams", lambda s: _of(s.stream(), "delete")),
    "stream.purge": ("streams", lambda s: _of(s.stream(), "purge", subject="s.b")),
    "stream.delete_message": ("streams", lambda s: _of(s.stream(), "delete_message", 1)),
    "stream.get_message": ("streams", lambda s: _of(s.stream(), "get_message", 1)),
    "stream.get_message(direct=False)": ("streams", lambda s: _of(s.stream(), "get_message", 1, direct=False)),
    "stream.get_message(last_for)": ("streams", lambda s: _of(s.stream(), "get_message", last_for="s.a")),
    "stream.get_message(last_for pattern)": ("streams", lambda s: _of(s.stream(), "get_message", last_for="s.*")),
    "stream.get_message(next_for)": ("streams", lambda s: _of(s.stream(), "get_message", next_for="s.a")),
    "stream.get_message, no allow_direct": ("streams", lambda s: _of(s.js.stream("ND"), "get_message", 1)),
    "stream.get_messages": ("streams", lambda s: _listed(s.stream(), "get_messages")),
    "stream.get_last_messages": ("streams", lambda s: _of(s.stream(), "get_last_messages", ["s.*"])),
    # ---- publishing
    "js.publish": ("publishing", lambda s: s.js.publish("s.a", b"1")),
    "js.publish(msg_id)": ("publishing", lambda s: s.js.publish("s.a", b"1", msg_id="1")),
    "js.publish_async": ("publishing", _publish_async),
    "js.fast_batch": ("publishing", lambda s: _fast(s, "s.a")),
    "js.fast_batch, 2 subjects": ("publishing", lambda s: _fast(s, "s.a", "s.b")),
    "js.fast_publisher": ("publishing", lambda s: _fast_publisher(s, "s.a")),
    "js.fast_publisher, 2 subjects": ("publishing", lambda s: _fast_publisher(s, "s.a", "s.b")),
    "js.atomic_batch": ("publishing", _atomic),
    "js.atomic_batch(ack_first=False)": ("publishing", lambda s: _atomic(s, ack_first=False)),
    "js.batch_advisories": ("publishing", _advisories),
    # ---- consumers
    "stream.consumer": ("consumers", lambda s: _of(s.stream(), "consumer", "d")),
    "stream.consumers": ("consumers", lambda s: _listed(s.stream(), "consumers")),
    "stream.consumer_names": ("consumers", lambda s: _listed(s.stream(), "consumer_names")),
    "stream.create_consumer": ("consumers", lambda s: _of(s.stream(), "create_consumer", ConsumerConfig(name="n"))),
    "stream.create_consumer(filter)": (
        "consumers",
        lambda s: _of(s.stream(), "create_consumer", ConsumerConfig(name="n", filter_subject="s.a")),
    ),
    "stream.create_consumer(2 filters)": (
        "consumers",
        lambda s: _of(s.stream(), "create_consumer", ConsumerConfig(name="n", filter_subjects=["s.a", "s.b"])),
    ),
    "stream.create_consumer(no name)": ("consumers", lambda s: _of(s.stream(), "create_consumer", ConsumerConfig())),
    "stream.create_or_update_consumer": (
        "consumers",
        lambda s: _of(s.stream(), "create_or_update_consumer", ConsumerConfig(durable_name="n")),
    ),
    "stream.create_or_update_consumer(there)": (
        "consumers",
        lambda s: _of(s.stream(), "create_or_update_consumer", ConsumerConfig(durable_name="d")),
    ),
    "stream.get_or_create_consumer": (
        "consumers",
        lambda s: _of(s.stream(), "get_or_create_consumer", ConsumerConfig(durable_name="n")),
    ),
    "stream.get_or_create_consumer(there)": (
        "consumers",
        lambda s: _of(s.stream(), "get_or_create_consumer", ConsumerConfig(durable_name="d")),
    ),
    "stream.update_consumer": (
        "consumers",
        lambda s: _of(s.stream(), "update_consumer", ConsumerConfig(durable_name="d", description="x")),
    ),
    "stream.delete_consumer": ("consumers", lambda s: _of(s.stream(), "delete_consumer", "d")),
    "consumer.info": ("consumers", lambda s: _of(s.consumer(), "info")),
    "consumer.fetch": ("consumers", _fetch),
    "consumer.fetch(no_wait)": ("consumers", lambda s: _fetch(s, no_wait=True)),
    "consumer.next": ("consumers", lambda s: _of(s.consumer(), "next")),
    "consumer.batches": ("consumers", _batches),
    "consumer.messages": ("consumers", _messages),
    "message.ack": ("consumers", lambda s: _fetch(s, "ack")),
    "message.ack_sync": ("consumers", lambda s: _fetch(s, "ack_sync")),
    "message.nak": ("consumers", lambda s: _fetch(s, "nak")),
    "message.term": ("consumers", lambda s: _fetch(s, "term")),
    "message.in_progress": ("consumers", lambda s: _fetch(s, "in_progress")),
    "consumer.pause": ("consumers", lambda s: _of(s.consumer(), "pause", _later())),
    "consumer.resume": ("consumers", lambda s: _of(s.consumer(), "resume")),
    "consumer.reset": ("consumers", lambda s: _of(s.consumer(), "reset")),
    "consumer.delete": ("consumers", lambda s: _of(s.consumer(), "delete")),
    "consumer.pushed_messages": ("consumers", _pushed),
    "stream.ordered_consumer": ("consumers", _ordered),
    "stream.ordered_consumer(filter)": ("consumers", lambda s: _ordered(s, "s.a")),
    # ---- buckets
    "js.kv": ("kv", lambda s: s.js.kv("B")),
    "js.create_kv": ("core", lambda s: s.js.create_kv("N")),
    "js.create_or_update_kv": ("core", lambda s: s.js.create_or_update_kv("N")),
    "js.create_or_update_kv(there)": ("kv", lambda s: s.js.create_or_update_kv(KVConfig(bucket="B", history=5))),
    "js.delete_kv": ("kv", lambda s: s.js.delete_kv("B")),
    "js.kv_names": ("kv", lambda s: _all(s.js.kv_names())),
    "kv.get": ("kv", lambda s: _of(s.kv(), "get", "k")),
    "kv.get(revision)": ("kv", lambda s: _of(s.kv(), "get", "k", revision=1)),
    "kv.get(direct=False)": ("kv", lambda s: _of(s.kv(), "get", "k", direct=False)),
    "kv.get_at": ("kv", lambda s: _of(s.kv(), "get_at", "k", 2)),
    "kv.put": ("kv", lambda s: _of(s.kv(), "put", "k", b"2")),
    "kv.create": ("kv", lambda s: _of(s.kv(), "create", "new", b"1")),
    "kv.create(deleted)": ("kv", lambda s: _of(s.kv(), "create", "gone", b"1")),
    "kv.create(there)": ("kv", lambda s: _raises(KeyExists, _of(s.kv(), "create", "k", b"1"))),
    "kv.create(ttl)": ("kv", lambda s: _of(s.kv(), "create", "new", b"1", ttl=60)),
    "kv.update": ("kv", lambda s: _of(s.kv(), "update", "k", b"1", revision=1)),
    "kv.update(conflict)": ("kv", lambda s: _raises(Conflict, _of(s.kv(), "update", "k", b"1", revision=9))),
    "kv.delete": ("kv", lambda s: _of(s.kv(), "delete", "k")),
    "kv.purge": ("kv", lambda s: _of(s.kv(), "purge", "k")),
    "kv.keys": ("kv", lambda s: _listed(s.kv(), "keys")),
    "kv.keys(filter)": ("kv", lambda s: _listed(s.kv(), "keys", "x.*")),
    "kv.history": ("kv", lambda s: _of(s.kv(), "history", "k")),
    "kv.snapshot": ("kv", lambda s: _of(s.kv(), "snapshot", ["k", "x.*"])),
    "kv.snapshot(key)": ("kv", lambda s: _of(s.kv(), "snapshot", ["k"])),
    "kv.snapshot(at)": ("kv", lambda s: _of(s.kv(), "snapshot", ["k"], at=1)),
    "kv.status": ("kv", lambda s: _of(s.kv(), "status")),
    "kv.stream_info": ("kv", lambda s: _of(s.kv(), "stream_info")),
    "kv.watch": ("kv", _watch),
    "kv.watch(key)": ("kv", lambda s: _watch(s, "k")),
    "kv.purge_deletes": ("kv", lambda s: _of(s.kv(), "purge_deletes", 0)),
    "kv.transaction": ("kv", lambda s: _transaction(s, "k", "x.y")),
    "kv.transaction(1 key)": ("kv", lambda s: _transaction(s, "k")),
    "kv.transaction(expect)": ("kv", _guarded),
    "kv.transaction(create)": ("kv", lambda s: _created_in_transaction(s, "gone")),
    # ---- objects
    "js.object_store": ("objects", lambda s: s.js.object_store("O")),
    "js.create_object_store": ("core", lambda s: s.js.create_object_store(ObjectStoreConfig(bucket="N"))),
    "js.delete_object_store": ("objects", lambda s: s.js.delete_object_store("O")),
    "js.object_store_names": ("objects", lambda s: _all(s.js.object_store_names())),
    "objects.put": ("objects", lambda s: _of(s.files(), "put", "new", b"x")),
    "objects.put, 5 chunks": ("objects", lambda s: _of(s.files(), "put", "new", b"x" * 600_000)),
    "objects.put, fast": ("objects", lambda s: _of(s.js.object_store("O"), "put", "new", b"x" * 600_000)),
    "objects.put(there)": ("objects", lambda s: _of(s.files(), "put", "one", b"x")),
    "objects.get_bytes": ("objects", lambda s: _of(s.files(), "get_bytes", "one")),
    "objects.get_file": ("objects", lambda s: _of(s.files(), "get_file", "one", io.BytesIO())),
    "objects.chunks": ("objects", lambda s: _listed(s.files(), "chunks", "one")),
    "objects.info": ("objects", lambda s: _of(s.files(), "info", "one")),
    "objects.delete": ("objects", lambda s: _of(s.files(), "delete", "one")),
    "objects.update_meta": ("objects", lambda s: _of(s.files(), "update_meta", "one", jetspark.ObjectMeta(name="one"))),
    "objects.update_meta(name)": (
        "objects",
        lambda s: _of(s.files(), "update_meta", "one", jetspark.ObjectMeta(name="three")),
    ),
    "objects.add_link": ("objects", _linked),
    "objects.list": ("objects", lambda s: _listed(s.files(), "list")),
    "objects.watch": ("objects", _watch_objects),
    "objects.status": ("objects", lambda s: _of(s.files(), "status")),
    "objects.seal": ("objects", lambda s: _of(s.files(), "seal")),
    "objects.purge_orphans": ("objects", lambda s: _of(s.files(), "purge_orphans")),
}


@pytest.fixture(scope="module")
def exact() -> Iterator[ExactServer]:
    with ExactServer() as server:
        yield server


@contextlib.asynccontextmanager
async def prepared(server: ExactServer, group: str) -> AsyncIterator[tuple[str, jetspark.Client]]:
    """A new account with what the calls of a group use, and its administrator."""
    account = server.new_account()
    async with await jetspark.connect(server.url_of(account)) as admin:
        await _prepare(admin, group)
        yield account, admin


async def _make(driver: Driver, url: str, admin: jetspark.Client, call: Call) -> None:
    """Make a call. What it raises is not raised by closing again."""
    nc = await driver.connect(url, reconnect=False, on_event=lambda event: None)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await call(Side(nc, admin))
            await nc.flush()
    except BaseException:
        await nc.close()
        raise
    await nc.close()


async def record(driver: Driver, server: ExactServer, name: str) -> Rights:
    group, call = CALLS[name]
    async with prepared(server, group) as (account, admin), RecordingProxy(server.port) as proxy:
        await _make(driver, through(proxy.url, account), admin, call)
        return proxy.rights(NAMES)


async def _outcome(driver: Driver, url: str, admin: jetspark.Client, call: Call, removed: Removed) -> str:
    """What a call without one of its rights comes to."""
    try:
        await _make(driver, url, admin, call)
    except PermissionDenied as error:
        if (error.operation, general(error.subject, NAMES)) == (removed.operation, removed.subject):
            return "denied"
        return f"{error!r}"
    except BatchInDoubt as error:
        return IN_DOUBT if "may not subscribe to '_INBOX." in str(error) else f"{error!r}"
    except Exception as error:
        return f"{error!r}"
    return "succeeds"


# Calls that do not end with PermissionDenied naming what was removed: what they end with, and why that is right.
IN_DOUBT = "BatchInDoubt"
_ANSWERS = (
    "the messages were sent, and only the answers are denied: nobody knows what is stored; the error names the inbox"
)
_CHUNKS = "the object is stored or deleted; the chunks of the old one stay for purge_orphans, and on_event is told"
_LEFT = "the reader has everything; the server removes the consumer after its inactive_threshold, and on_event is told"
EXCEPTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "js.fast_batch": {"_INBOX.>": (IN_DOUBT, _ANSWERS)},
    "js.fast_batch, 2 subjects": {"_INBOX.>": (IN_DOUBT, _ANSWERS)},
    "js.fast_publisher": {"_INBOX.>": (IN_DOUBT, _ANSWERS)},
    "js.fast_publisher, 2 subjects": {"_INBOX.>": (IN_DOUBT, _ANSWERS)},
    "js.atomic_batch(ack_first=False)": {"_INBOX.>": (IN_DOUBT, _ANSWERS)},
    "objects.put(there)": {"$JS.API.STREAM.PURGE.OBJ_O": ("succeeds", _CHUNKS)},
    "objects.delete": {"$JS.API.STREAM.PURGE.OBJ_O": ("succeeds", _CHUNKS)},
}
# Of a reader's own consumer, which has no name of its own: see _LEFT.
LEAVES_A_CONSUMER = "$JS.API.CONSUMER.DELETE.*.*"


def _expected(name: str, removed: Removed) -> str:
    if removed.subject in EXCEPTIONS.get(name, {}):
        return EXCEPTIONS[name][removed.subject][0]
    if matches(LEAVES_A_CONSUMER, removed.subject) and removed.subject.endswith(".*"):
        return "succeeds"
    return "denied"


def _has_no_effect(name: str, removed: Removed) -> bool:
    """Whether the next user finds everything as it was. Whoever hears no answer may have done something, and messages
    that were not acknowledged are another consumer's for ``ack_wait_s``."""
    if removed.operation == "subscribe" or removed.subject.startswith("$JS.ACK."):
        return False
    return _expected(name, removed) == "denied"


@pytest.mark.parametrize("name", CALLS)
@on_both_drivers
async def test_a_call_needs_exactly_the_rights_it_uses(exact: ExactServer, driver: Driver, name: str) -> None:
    rights = await record(driver, exact, name)
    group, call = CALLS[name]
    removals = list(rights.each_removed())
    harmless = [each for each in removals if _has_no_effect(name, each)]
    outcomes = {}
    async with prepared(exact, group) as (account, admin):
        user, *others = exact.new_users(account, [rights, *(each.rest for each in harmless)])
        for other, removed in zip(others, harmless, strict=True):
            outcomes[removed] = await _outcome(driver, exact.url_of(other), admin, call, removed)
        await _make(driver, exact.url_of(user), admin, call)
    for removed in removals:
        if removed not in harmless:
            async with prepared(exact, group) as (account, admin):
                [other] = exact.new_users(account, [removed.rest])
                outcomes[removed] = await _outcome(driver, exact.url_of(other), admin, call, removed)
    wrong = {each.subject: outcome for each, outcome in outcomes.items() if outcome != _expected(name, each)}
    assert wrong == {}


# ---- the roles of the documentation ----------------------------------------------------------------------------------


async def _publisher(s: Side) -> None:
    await s.js.publish("s.a", b"1")
    await _publish_async(s)
    await _fast(s, "s.a", "s.b")
    await _fast_publisher(s, "s.a", "s.b")
    await _atomic(s)


async def _pull_worker(s: Side) -> None:
    await _fetch(s, "ack_sync")
    await _messages(s)


async def _stream_reader(s: Side) -> None:
    stream = await s.stream()
    assert (await stream.get_message(1)).sequence == 1
    assert (await stream.get_message(last_for="s.a")).sequence == 4
    assert len(await _all(stream.get_messages())) == 4
    assert len(await stream.get_last_messages(["s.*"])) == 1


async def _key_reader(s: Side) -> None:
    kv = await s.kv()
    assert (await kv.get("k")).value == b"1"
    assert list(await kv.snapshot(["k"])) == ["k"]
    with pytest.raises(PermissionDenied, match=r"KV_B\.\$KV\.B\.x\.y"):
        await kv.get("x.y")
    with pytest.raises(PermissionDenied, match=r"DIRECT\.GET\.KV_B'"):
        await kv.snapshot(["k", "x.y"])


async def _key_writer(s: Side) -> None:
    kv = await s.kv()
    await kv.put("k", b"2")
    await _raises(KeyExists, kv.create("k", b"3"))
    await kv.delete("k")
    revision = await kv.create("k", b"4")
    await kv.update("k", b"5", revision=revision)
    await _raises(Conflict, kv.update("k", b"5", revision=revision))
    await kv.purge("k")
    await _created_in_transaction(s, "k")
    await _raises(KeyExists, _created_in_transaction(s, "k"))
    await _transaction(s, "k")
    with pytest.raises(PermissionDenied, match=r"\$KV\.B\.x\.y"):
        await _transaction(s, "k", "x.y")


async def _key_watcher(s: Side) -> None:
    await _watch(s, "k")
    assert len(await (await s.kv()).history("k")) == 1


async def _bucket_reader(s: Side) -> None:
    kv = await s.kv()
    assert (await kv.get("k", revision=1)).value == b"1"
    assert set(await kv.snapshot(["k", "x.*"])) == {"k", "x.y"}
    assert (await kv.get("x.y")).value == b"1"


async def _time_traveller(s: Side) -> None:
    kv = await s.kv()
    assert (await kv.get_at("k", 2)).value == b"1"
    assert set(await kv.snapshot([">"], at=2)) == {"k", "x.y"}


async def _bucket_watcher(s: Side) -> None:
    await _watch(s)
    assert set(await _listed(s.kv(), "keys")) == {"k", "x.y"}


async def _object_reader(s: Side) -> None:
    files = await s.files()
    assert len(await files.get_bytes("one")) == 300_000
    await files.get_file("two", io.BytesIO())
    assert b"".join(await _all(files.chunks("two"))) == b"y"
    assert (await files.info("one")).size_bytes == 300_000


async def _object_lister(s: Side) -> None:
    assert {each.name for each in await _listed(s.files(), "list")} == {"one", "two"}
    await _watch_objects(s)


async def _object_writer(s: Side) -> None:
    for files in (await s.files(), await s.js.object_store("O")):
        await files.put("new", b"x" * 600_000)
        await files.put("new", b"x")
        await files.update_meta("new", jetspark.ObjectMeta(name="newer"))
        await files.add_link("link", await files.info("newer"))
        await files.delete("newer")
        await files.delete("link")


ROLES: dict[str, tuple[str, Call]] = {
    "publisher": ("publishing", _publisher),
    "pull worker": ("consumers", _pull_worker),
    "push reader": ("consumers", _pushed),
    "ordered reader": ("consumers", lambda s: _ordered(s, "s.a")),
    "reader of one subject": ("streams", lambda s: _of(s.stream(), "get_message", last_for="s.a")),
    "reader of a stream": ("streams", _stream_reader),
    "key reader": ("kv", _key_reader),
    "key writer": ("kv", _key_writer),
    "key watcher": ("kv", _key_watcher),
    "bucket reader": ("kv", _bucket_reader),
    "time traveller": ("kv", _time_traveller),
    "bucket watcher": ("kv", _bucket_watcher),
    "bucket janitor": ("kv", lambda s: _of(s.kv(), "purge_deletes", 0)),
    "object reader": ("objects", _object_reader),
    "object lister": ("objects", _object_lister),
    "object writer": ("objects", _object_writer),
}


def documented_roles() -> dict[str, Rights]:
    """The table of roles in docs/client-permissions.md."""
    roles: dict[str, Rights] = {}
    text = (Path(__file__).parents[2] / "docs" / "client-permissions.md").read_text()
    for line in text.split("## Roles")[1].split("## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "Role":
            name, _, publish, subscribe = cells
            found = re.search("those of the ([a-z ]+),", publish)
            others = roles[found[1]] if found else Rights()
            roles[name] = Rights(
                (*others.publish, *re.findall("`(.+?)`", publish)), ("_INBOX.>", *re.findall("`(.+?)`", subscribe))
            )
    return roles


@pytest.mark.parametrize("role", ROLES)
@on_both_drivers
async def test_a_role_of_the_documentation_is_enough(exact: ExactServer, driver: Driver, role: str) -> None:
    roles = documented_roles()
    assert roles.keys() == ROLES.keys()
    group, call = ROLES[role]
    async with prepared(exact, group) as (account, admin):
        [user] = exact.new_users(account, [roles[role]])
        await _make(driver, exact.url_of(user), admin, call)


# ---- nothing is left out ---------------------------------------------------------------------------------------------

ELSEWHERE = {
    "stream.step_down": "asks $JS.API.STREAM.LEADER.STEPDOWN.<stream>, which a server alone does not answer",
    "consumer.step_down": "likewise",
    "consumer.unpin": "needs a consumer with pinned clients; it asks $JS.API.CONSUMER.UNPIN.<stream>.<consumer>",
    "consumer.close": "gives messages back: consumer.messages does so",
    "kv.bucket": "asks nothing",
    "objects.add_bucket_link": "does what objects.add_link does",
}


@pytest.mark.parametrize(
    ("name", "handle"),
    [
        ("js", jetspark.JetStream),
        ("stream", jetspark.Stream),
        ("consumer", jetspark.Consumer),
        ("kv", jetspark.KeyValue),
        ("objects", jetspark.ObjectStore),
    ],
)
def test_every_call_is_recorded(name: str, handle: type) -> None:
    public = {f"{name}.{each}" for each in dir(handle) if not each.startswith("_") and callable(getattr(handle, each))}
    recorded = {re.split(r"[(,]", each)[0] for each in CALLS}
    # A batch sends nothing by itself, and publish_async_complete only waits.
    assert public - recorded - ELSEWHERE.keys() <= {"js.publish_async_complete"}


@on_both_drivers
async def test_a_key_whose_deletion_goes_away_while_it_is_looked_for_is_created(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, looks = Bucket.vacant_revision, 0

    def purged_before(bucket: Bucket, key: str, *, at_least: int = 0) -> Operation[int]:
        nonlocal looks
        looks += 1
        yield from bucket._api.purge_stream("KV_B")
        return (yield from looking(bucket, key, at_least=at_least))

    monkeypatch.setattr(Bucket, "vacant_revision", purged_before)
    with ExactServer() as server:
        account = server.new_account()
        async with await jetspark.connect(server.url_of(account)) as admin:
            kept = await admin.jetstream().create_kv("B")
            await kept.put("k", b"1")
            await kept.delete("k")
            rights = "$JS.API.STREAM.INFO.KV_B", "$JS.API.STREAM.PURGE.KV_B", "$JS.API.DIRECT.GET.KV_B.>", "$KV.B.k"
            [user] = server.new_users(account, [Rights(rights, ("_INBOX.>",))])
            async with asyncio.timeout(PATIENCE_S), driver.connect(server.url_of(user)) as nc:
                kv = await nc.jetstream(timeout=LONG_S).kv("B")
                assert await kv.create("k", b"2") == 3
            assert (looks, (await kept.get("k")).value) == (1, b"2")
