"""JetSpark beside the official JavaScript clients: each reads what the other wrote, and both mean the same by it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import string
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers
from support.patience import PATIENCE_S

import jetspark
from jetspark import ConsumerConfig, Expect, KVConfig, ObjectStoreConfig, StreamConfig, StreamSource

# The first test waits until npm has installed the witness.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Everything a frame could trip over: line breaks, a verb of the protocol, NUL, bytes that are not UTF-8.
AWKWARD = b"line one\r\nMSG line two 1 3\r\n\0\xff\xfe"
HEADERS = [
    ("X-One", "1"),
    ("x-many", "a"),
    ("x-many", "b"),
    ("X-Many", "another spelling"),
    ("Empty", ""),
    ("Colons", "a: b: c"),
    ("Unicode", "Grüße, 世界, 🚀"),
    ("!#$%&'*+-./^_|~", "every kind of name"),
]
ALL_LEGAL = f"{string.ascii_letters}{string.digits}-/_="
KEYS = ["a", "a.b.c", "0", "-", "_", "=", "/", "c/d=e_f-g", "_private", "KV_", "a.-.=./", ALL_LEGAL, f"x.{ALL_LEGAL}.y"]
WRONG_LAST_SEQUENCE = 10071
# Sizes around the 128 KiB of one chunk, and names that would be no subjects.
OBJECTS = {
    "empty": b"",
    "one": b"\xff",
    "folder/file name.txt": AWKWARD,
    "a.*.>": b"wildcards",
    "one chunk": bytes(range(256)) * 512,
    "a byte more": bytes(range(256)) * 512 + b"!",
    "several": bytes(range(256)) * 2000,
}

# The server's word for it, in JavaScript, and ours.
OPERATIONS = {"PUT": "put", "DEL": "delete", "PURGE": "purge"}


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _pairs(headers: list[list[str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers]


def _theirs(entries: list[dict[str, Any]]) -> list[tuple[str, bytes, int, str]]:
    return [(e["key"], _bytes(e["value"]), e["revision"], OPERATIONS[e["operation"]]) for e in entries]


def _ours(entries: list[Any]) -> list[tuple[str, bytes, int, str]]:
    return [(e.key, e.value, e.revision, e.operation) for e in entries]


async def _take(values: AsyncIterator[Any], count: int) -> list[Any]:
    taken: list[Any] = []
    async with asyncio.timeout(30), contextlib.aclosing(values) as open_values:  # type: ignore[type-var]
        async for value in open_values:
            taken.append(value)
            if len(taken) == count:
                break
    return taken


# ---- core -----------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_they_receive_our_messages_with_every_header(driver: Driver, url: str, witness: Any, name: str) -> None:
    handle = await witness("subscribe", subject=f"{name}.>")
    async with driver.connect(url) as nc:
        await nc.publish(f"{name}.plain", AWKWARD, reply="answers.here")
        await nc.publish(f"{name}.headed", AWKWARD, headers=HEADERS)
        await nc.publish(f"{name}.empty", headers={"Only": "headers"})
        await nc.flush()
    plain, headed, empty = await witness("take", handle=handle, n=3)
    await witness("stop", handle=handle)
    assert (plain["subject"], plain["reply"], _bytes(plain["data"])) == (f"{name}.plain", "answers.here", AWKWARD)
    assert plain["headers"] == []
    assert (_bytes(headed["data"]), _pairs(headed["headers"])) == (AWKWARD, HEADERS)
    assert (empty["data"], _pairs(empty["headers"])) == ("", [("Only", "headers")])


@on_both_drivers
async def test_we_receive_their_messages_with_every_header(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        subscription = await nc.subscribe(f"{name}.>")
        await nc.flush()
        await witness("publish", subject=f"{name}.plain", data=AWKWARD, reply="answers.here")
        await witness("publish", subject=f"{name}.headed", data=AWKWARD, headers=HEADERS)
        await witness("publish", subject=f"{name}.empty", headers=[("Only", "headers")])
        plain, headed, empty = [await subscription.next(30) for _ in range(3)]
        assert (plain.subject, plain.reply, plain.data) == (f"{name}.plain", "answers.here", AWKWARD)
        assert len(plain.headers) == 0
        assert (headed.data, headed.headers.multi_items()) == (AWKWARD, HEADERS)
        assert (empty.data, empty.headers.multi_items()) == (b"", [("Only", "headers")])


@on_both_drivers
async def test_they_answer_our_requests(driver: Driver, url: str, witness: Any, name: str) -> None:
    handle = await witness("echo", subject=f"{name}.*")
    async with driver.connect(url) as nc:
        answer = await nc.request(f"{name}.ask", AWKWARD, headers=HEADERS, timeout=30)
        assert answer.data == AWKWARD
        assert answer.headers.multi_items() == [*HEADERS, ("Echo-Of", f"{name}.ask")]
        await witness("stop", handle=handle)
        with pytest.raises(jetspark.NoResponders):
            await nc.request(f"{name}.ask", b"is anybody there?", timeout=30)


@on_both_drivers
async def test_we_answer_their_requests(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:

        async def echo(message: Any) -> None:
            await message.respond(message.data, headers=message.headers)

        subscription = await nc.subscribe(f"{name}.*", callback=echo)
        await nc.flush()
        answer = await witness("request", subject=f"{name}.ask", data=AWKWARD, headers=HEADERS)
        assert (_bytes(answer["data"]), _pairs(answer["headers"])) == (AWKWARD, HEADERS)
        await subscription.unsubscribe()
        await nc.flush()
        with pytest.raises(witness.Error, match="no responders"):
            await witness("request", subject=f"{name}.ask", data=b"is anybody there?")


@on_both_drivers
async def test_a_queue_group_is_shared_by_both_clients(driver: Driver, url: str, witness: Any, name: str) -> None:
    handle = await witness("subscribe", subject=name, queue="workers")
    async with driver.connect(url) as nc:
        ours = await nc.subscribe(name, queue="workers")
        for number in range(200):
            await nc.publish(name, b"%d" % number)
        await nc.flush()
        our_share = {int((await ours.next(30)).data) for _ in range(ours.received)}
        theirs = await witness("take", handle=handle, n=200 - len(our_share))
        their_share = {int(_bytes(message["data"])) for message in theirs}
        assert our_share | their_share == set(range(200))
        assert our_share
        assert their_share
    await witness("stop", handle=handle)


# ---- JetStream ------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_they_see_the_stream_we_configured(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        await nc.jetstream().create_stream(
            StreamConfig(
                name=name,
                description="made in Python",
                subjects=[f"{name}.a.*", f"{name}.b.>"],
                retention="workqueue",
                storage="memory",
                max_messages=1000,
                max_messages_per_subject=7,
                max_bytes=1 << 20,
                max_age_s=3600.5,
                max_message_bytes=4096,
                discard="new",
                duplicate_window_s=1.5,
                allow_direct=True,
                metadata={"owner": "interop"},
            )
        )
        config = (await witness("streamInfo", stream=name))["config"]
        expected = {
            "name": name,
            "description": "made in Python",
            "subjects": [f"{name}.a.*", f"{name}.b.>"],
            "retention": "workqueue",
            "storage": "memory",
            "max_msgs": 1000,
            "max_msgs_per_subject": 7,
            "max_bytes": 1 << 20,
            "max_age": 3_600_500_000_000,
            "max_msg_size": 4096,
            "discard": "new",
            "duplicate_window": 1_500_000_000,
            "allow_direct": True,
        }
        assert {field: config[field] for field in expected} == expected
        assert config["metadata"]["owner"] == "interop"


@on_both_drivers
async def test_a_stream_they_configured_is_ours_to_change(driver: Driver, url: str, witness: Any, name: str) -> None:
    await witness(
        "streamCreate",
        config={"name": name, "subjects": [f"{name}.>"], "max_age": 90_500_000_000, "num_replicas": 1, "max_msgs": 50},
    )
    async with driver.connect(url) as nc:
        stream = await nc.jetstream().stream(name)
        config = stream.cached_info.config
        assert (config.subjects, config.max_age_s, config.max_messages) == ([f"{name}.>"], 90.5, 50)
        await stream.update(max_messages=60)
        before_and_after = (await witness("streamInfo", stream=name))["config"]
        assert (before_and_after["max_msgs"], before_and_after["max_age"]) == (60, 90_500_000_000)


@on_both_drivers
async def test_both_get_the_same_acknowledgements(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
        first = await js.publish(f"{name}.x", b"1", msg_id="one")
        assert (first.stream, first.sequence, first.duplicate) == (name, 1, False)
        again = await witness("jsPublish", subject=f"{name}.x", data=b"1", msgId="one")
        assert again == {"stream": name, "sequence": 1, "duplicate": True}
        second = await witness("jsPublish", subject=f"{name}.x", data=b"2", msgId="two", expectLastSequence=1)
        assert second == {"stream": name, "sequence": 2, "duplicate": False}
        again = await js.publish(f"{name}.x", b"2", msg_id="two")
        assert (again.sequence, again.duplicate) == (2, True)
        with pytest.raises(jetspark.WrongLastSequence):
            await js.publish(f"{name}.x", b"late", expect=Expect(last_sequence=1))
        with pytest.raises(witness.Error) as refused:
            await witness("jsPublish", subject=f"{name}.x", data=b"late", expectLastSequence=1)
        assert refused.value.code == WRONG_LAST_SEQUENCE
        assert (await witness("streamInfo", stream=name))["state"]["messages"] == 2


@on_both_drivers
async def test_they_pull_and_ack_what_we_publish(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c", ack_policy="explicit"))
        await js.publish(f"{name}.headed", AWKWARD, headers=HEADERS)
        acks = [await js.publish_async(f"{name}.x", b"%d" % number) for number in range(2, 101)]
        await js.publish_async_complete(10)
        assert len(acks) == 99
        messages = await witness("pull", stream=name, consumer="c", n=100)
        assert [message["sequence"] for message in messages] == list(range(1, 101))
        assert (_bytes(messages[0]["data"]), _pairs(messages[0]["headers"])) == (AWKWARD, HEADERS)
        assert [int(_bytes(message["data"])) for message in messages[1:]] == list(range(2, 101))
        info = await consumer.info()
        assert (info.ack_pending, info.ack_floor.stream_sequence, info.pending) == (0, 100, 0)


@on_both_drivers
async def test_we_pull_and_ack_what_they_publish(driver: Driver, url: str, witness: Any, name: str) -> None:
    await witness("streamCreate", config={"name": name, "subjects": [f"{name}.>"]})
    await witness("consumerCreate", stream=name, config={"durable_name": "c", "ack_policy": "explicit"})
    await witness("jsPublish", subject=f"{name}.headed", data=AWKWARD, headers=HEADERS)
    for number in range(2, 21):
        await witness("jsPublish", subject=f"{name}.x", data=b"%d" % number)
    async with driver.connect(url) as nc:
        stream = await nc.jetstream().stream(name)
        consumer = await stream.consumer("c")
        messages = await consumer.fetch(20)
        assert [message.metadata.stream_sequence for message in messages] == list(range(1, 21))
        assert (messages[0].data, messages[0].headers.multi_items()) == (AWKWARD, HEADERS)
        assert [int(message.data) for message in messages[1:]] == list(range(2, 21))
        for message in messages:
            await message.ack_sync()
        info = await witness("consumerInfo", stream=name, consumer="c")
        assert (info["num_ack_pending"], info["ack_floor"]["stream_seq"], info["num_pending"]) == (0, 20, 0)
        await consumer.close()


@on_both_drivers
async def test_both_share_a_consumer_and_each_others_refusals(
    driver: Driver, url: str, witness: Any, name: str
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
        # One at a time: otherwise the next message may come before the server has noted a refusal.
        config = ConsumerConfig(durable_name="c", ack_policy="explicit", max_ack_pending=1)
        consumer = await stream.create_consumer(config)
        for number in range(4):
            await js.publish(f"{name}.x", b"%d" % number)
        [refused] = await witness("pull", stream=name, consumer="c", n=1, answer="nak")
        [message] = await consumer.fetch(1)
        assert (message.data, message.metadata.delivered) == (_bytes(refused["data"]), 2)
        await message.nak()
        await nc.flush()
        [third_time] = await witness("pull", stream=name, consumer="c", n=1)
        assert (third_time["sequence"], third_time["delivered"]) == (1, 3)
        await witness("pull", stream=name, consumer="c", n=1, answer="term")
        [message] = await consumer.fetch(1)
        assert (message.data, message.metadata.delivered) == (b"2", 1)
        await message.term("not for us either")
        await nc.flush()
        [last] = await witness("pull", stream=name, consumer="c", n=1)
        assert (last["sequence"], last["delivered"], last["pending"]) == (4, 1, 0)
        assert (await consumer.info()).ack_pending == 0
        await consumer.close()


@on_both_drivers
async def test_our_ordered_consumer_reads_what_they_publish(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        stream = await nc.jetstream().create_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
        for number in range(10):
            await witness("jsPublish", subject=f"{name}.x", data=b"%d" % number)
        messages = await _take(stream.ordered_consumer().messages(), 10)
        assert [int(message.data) for message in messages] == list(range(10))


# ---- key-value buckets ----------------------------------------------------------------------------------------------


@on_both_drivers
async def test_they_read_the_bucket_we_write(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket=name, history=5, max_value_bytes=500))
        assert await witness("kvStatus", bucket=name) == {
            "bucket": name,
            "history": 5,
            "ttl": 0,
            "values": 0,
            "maxValueSize": 500,
        }
        first = await kv.put("order.1", AWKWARD)
        second = await kv.put("order.1", b"")
        assert _theirs([await witness("kvGet", bucket=name, key="order.1")]) == [("order.1", b"", second, "put")]
        old = await witness("kvGet", bucket=name, key="order.1", revision=first)
        assert _theirs([old]) == [("order.1", AWKWARD, first, "put")]
        assert await witness("kvGet", bucket=name, key="never.there") is None
        await kv.delete("order.1")
        assert (await witness("kvGet", bucket=name, key="order.1"))["operation"] == "DEL"
        assert await witness("kvKeys", bucket=name) == []
        await kv.put("order.2", b"stays")
        history = await witness("kvHistory", bucket=name, key="order.1")
        assert [entry["operation"] for entry in history] == ["PUT", "PUT", "DEL"]
        assert _theirs(history) == _ours(await kv.history("order.1"))
        await kv.purge("order.1")
        assert (await witness("kvGet", bucket=name, key="order.1"))["operation"] == "PURGE"
        history = await witness("kvHistory", bucket=name, key="order.1")
        assert [entry["operation"] for entry in history] == ["PURGE"]
        assert await witness("kvKeys", bucket=name) == ["order.2"]


@on_both_drivers
async def test_we_read_the_bucket_they_write(driver: Driver, url: str, witness: Any, name: str) -> None:
    await witness("kvCreateBucket", bucket=name, options={"history": 5, "ttl": 3_600_000})
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().kv(name)
        status = await kv.status()
        assert (status.bucket, status.history, status.ttl_s, status.values) == (name, 5, 3600, 0)
        first = await witness("kvPut", bucket=name, key="order.1", data=AWKWARD)
        second = await witness("kvPut", bucket=name, key="order.1", data=b"")
        assert _ours([await kv.get("order.1")]) == [("order.1", b"", second, "put")]
        assert _ours([await kv.get("order.1", revision=first)]) == [("order.1", AWKWARD, first, "put")]
        await witness("kvDelete", bucket=name, key="order.1")
        with pytest.raises(jetspark.KeyNotFound):
            await kv.get("order.1")
        await witness("kvPut", bucket=name, key="order.2", data=b"stays")
        history = await kv.history("order.1")
        assert [entry.operation for entry in history] == ["put", "put", "delete"]
        assert _ours(history) == _theirs(await witness("kvHistory", bucket=name, key="order.1"))
        await witness("kvPurge", bucket=name, key="order.1")
        with pytest.raises(jetspark.KeyNotFound):
            await kv.get("order.1")
        assert [entry.operation for entry in await kv.history("order.1")] == ["purge"]
        assert [key async for key in kv.keys()] == ["order.2"]  # noqa: SIM118
        assert set(await kv.snapshot([">"])) == {"order.2"}


@on_both_drivers
async def test_a_bucket_without_direct_access_is_read_all_the_same(
    driver: Driver, url: str, witness: Any, name: str
) -> None:
    await witness("kvCreateBucket", bucket=name, options={"allow_direct": False})
    await witness("kvPut", bucket=name, key="k", data=b"1")
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().kv(name)
        assert (await kv.get("k")).value == b"1"
        with pytest.raises(jetspark.KeyNotFound):
            await kv.get("missing")


@on_both_drivers
async def test_both_make_the_same_bucket(driver: Driver, url: str, witness: Any, name: str) -> None:
    options = {"history": 3, "ttl": 60_000, "maxValueSize": 100, "compression": True, "description": "the same"}
    theirs = await witness("kvCreateBucket", bucket=f"{name}J", options={**options, "markerTTL": 30_000})
    async with driver.connect(url) as nc:
        await nc.jetstream().create_kv(
            KVConfig(
                bucket=f"{name}P",
                history=3,
                ttl_s=60,
                max_value_bytes=100,
                compression="s2",
                description="the same",
                limit_marker_ttl_s=30,
                allow_atomic=False,  # their buckets have no transactions
                allow_batched=False,  # and no fast ingest
            )
        )
    ours = (await witness("streamInfo", stream=f"KV_{name}P"))["config"]
    different = {field for field in ours.keys() | theirs.keys() if ours.get(field) != theirs.get(field)}
    # Like the Go client and ADR-8, we protect single revisions from deletion; the JavaScript client does not.
    assert different == {"name", "subjects", "deny_delete"}
    assert (theirs["deny_delete"], ours["deny_delete"]) == (False, True)
    assert (ours["name"], ours["subjects"]) == (f"KV_{name}P", [f"$KV.{name}P.>"])
    assert (theirs["name"], theirs["subjects"]) == (f"KV_{name}J", [f"$KV.{name}J.>"])


@on_both_drivers
async def test_create_and_update_respect_what_the_other_wrote(
    driver: Driver, url: str, witness: Any, name: str
) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket=name, history=3))

        async def they_are_refused(command: str, **arguments: Any) -> None:
            with pytest.raises(witness.Error) as refused:
                await witness(command, bucket=name, key="k", **arguments)
            assert refused.value.code == WRONG_LAST_SEQUENCE

        first = await kv.create("k", b"ours")
        await they_are_refused("kvCreate", data=b"theirs")
        second = await witness("kvUpdate", bucket=name, key="k", data=b"theirs", revision=first)
        with pytest.raises(jetspark.KeyExists):
            await kv.create("k", b"ours")
        for late in (kv.update("k", b"late", revision=first), kv.delete("k", revision=first)):
            with pytest.raises(jetspark.Conflict):
                await late
        third = await kv.update("k", b"ours again", revision=second)
        await they_are_refused("kvUpdate", data=b"late", revision=second)
        await they_are_refused("kvDelete", revision=second)
        await they_are_refused("kvPurge", revision=second)
        assert _ours([await kv.get("k")]) == [("k", b"ours again", third, "put")]
        # What one deletes or purges, the other may create anew.
        await kv.delete("k", revision=third)
        fourth = await witness("kvCreate", bucket=name, key="k", data=b"theirs")
        await witness("kvDelete", bucket=name, key="k", revision=fourth)
        fifth = await kv.create("k", b"ours")
        await kv.purge("k", revision=fifth)
        sixth = await witness("kvCreate", bucket=name, key="k", data=b"theirs")
        await witness("kvPurge", bucket=name, key="k", revision=sixth)
        seventh = await kv.create("k", b"ours")
        assert _theirs([await witness("kvGet", bucket=name, key="k")]) == [("k", b"ours", seventh, "put")]


@on_both_drivers
async def test_every_legal_key_means_the_same_to_both(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket=name))
        for key in KEYS:
            await kv.put(key, key.encode())
            theirs = await witness("kvGet", bucket=name, key=key)
            assert (theirs["key"], _bytes(theirs["value"])) == (key, key.encode())
            revision = await witness("kvPut", bucket=name, key=key, data=b"theirs")
            assert _ours([await kv.get(key)]) == [(key, b"theirs", revision, "put")]
        assert sorted([key async for key in kv.keys()]) == sorted(KEYS)  # noqa: SIM118
        assert sorted(await witness("kvKeys", bucket=name)) == sorted(KEYS)
        for pattern in ("a.>", "*.*.*", "x.*.y", "="):
            ours = sorted([key async for key in kv.keys(pattern)])
            assert ours == sorted(await witness("kvKeys", bucket=name, filter=pattern))
            assert ours
        # What they refuse we refuse, before anything is sent.
        for key in ("", ".a", "a.", "a b", "a:b", "a,b", "ä", "a*b", "a\tb"):
            with pytest.raises(jetspark.ConfigError):
                await kv.put(key, b"")
            with pytest.raises(witness.Error, match="invalid key"):
                await witness("kvPut", bucket=name, key=key, data=b"")


@on_both_drivers
async def test_they_watch_what_we_write(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket=name, history=5))
        await kv.put("a", b"1")
        await kv.put("a", b"2")
        every = await witness("kvWatch", bucket=name, options={})
        history = await witness("kvWatch", bucket=name, options={"include": "history", "key": "a"})
        updates = await witness("kvWatch", bucket=name, options={"include": "updates"})
        assert _theirs(await witness("take", handle=every, n=1)) == [("a", b"2", 2, "put")]
        assert _theirs(await witness("take", handle=history, n=2)) == [("a", b"1", 1, "put"), ("a", b"2", 2, "put")]
        await kv.put("b.c", AWKWARD)
        await kv.delete("b.c")
        await kv.create("b.c", b"again")
        expected = [("b.c", AWKWARD, 3, "put"), ("b.c", b"", 4, "delete"), ("b.c", b"again", 5, "put")]
        for handle in (every, updates):
            assert _theirs(await witness("take", handle=handle, n=3)) == expected
        await kv.purge("b.c")  # only now: it removes what a watch has not seen yet
        for handle in (every, updates):
            assert _theirs(await witness("take", handle=handle, n=1)) == [("b.c", b"", 6, "purge")]
        for handle in (every, history, updates):
            await witness("stop", handle=handle)


@on_both_drivers
async def test_we_watch_what_they_write(driver: Driver, url: str, witness: Any, name: str) -> None:
    await witness("kvCreateBucket", bucket=name, options={"history": 5})
    await witness("kvPut", bucket=name, key="a", data=b"1")
    await witness("kvPut", bucket=name, key="a", data=b"2")
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().kv(name)
        watch: Any = kv.watch(initial_marker=True)
        async with asyncio.timeout(30), contextlib.aclosing(watch):
            assert _ours([await anext(watch)]) == [("a", b"2", 2, "put")]
            assert await anext(watch) is None
            await witness("kvPut", bucket=name, key="b.c", data=AWKWARD)
            await witness("kvDelete", bucket=name, key="b.c")
            await witness("kvCreate", bucket=name, key="b.c", data=b"again")
            assert _ours([await anext(watch) for _ in range(3)]) == [
                ("b.c", AWKWARD, 3, "put"),
                ("b.c", b"", 4, "delete"),
                ("b.c", b"again", 5, "put"),
            ]
            await witness("kvPurge", bucket=name, key="b.c")  # only now: it removes what a watch has not seen yet
            assert _ours([await anext(watch)]) == [("b.c", b"", 6, "purge")]
        assert _ours(await _take(kv.watch("a", include_history=True), 2)) == [
            ("a", b"1", 1, "put"),
            ("a", b"2", 2, "put"),
        ]


@on_both_drivers
async def test_they_see_a_transaction_as_ordinary_revisions(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket=name, history=3))
        stock = await witness("kvPut", bucket=name, key="stock.7", data=b"42")
        watch = await witness("kvWatch", bucket=name, options={"include": "updates"})
        async with kv.transaction() as tx:
            await tx.put("order.1", AWKWARD)
            await tx.update("stock.7", b"41", revision=stock)
        expected = [("order.1", AWKWARD, stock + 1, "put"), ("stock.7", b"41", stock + 2, "put")]
        assert _theirs(await witness("take", handle=watch, n=2)) == expected
        await witness("stop", handle=watch)
        assert _theirs([await witness("kvGet", bucket=name, key="stock.7")]) == expected[1:]
        await witness("kvPut", bucket=name, key="stock.7", data=b"40")

        async def come_late() -> None:
            async with kv.transaction() as tx:
                await tx.put("order.1", b"never written")
                await tx.update("stock.7", b"41", revision=stock + 2)

        with pytest.raises(jetspark.Conflict) as conflict:
            await come_late()
        assert conflict.value.keys == ("stock.7",)
        assert _theirs([await witness("kvGet", bucket=name, key="order.1")]) == expected[:1]


@on_both_drivers
async def test_a_key_with_a_ttl_ends_for_both(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket=name, limit_marker_ttl_s=60))
        await kv.create("ours", b"1", ttl=1)
        await witness("kvCreate", bucket=name, key="theirs", data=b"1", ttl="1s")
        entries = await _take(kv.watch(), 4)
        assert sorted((entry.key, entry.operation) for entry in entries) == [
            ("ours", "purge"),
            ("ours", "put"),
            ("theirs", "purge"),
            ("theirs", "put"),
        ]
        for key in ("ours", "theirs"):
            with pytest.raises(jetspark.KeyNotFound):
                await kv.get(key)


async def _gathered(nc: Any, bucket: str, witness: Any) -> None:
    """Both read the key ``a.b``, which came from another bucket, under the name it has here."""
    kv = await nc.jetstream().kv(bucket)
    stream = await nc.jetstream().stream(f"KV_{bucket}")
    async with asyncio.timeout(PATIENCE_S):
        while not (await stream.info()).state.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await kv.get("a.b")).value == b"1"
    assert [key async for key in kv.keys()] == ["a.b"]  # noqa: SIM118
    assert _bytes((await witness("kvGet", bucket=bucket, key="a.b"))["value"]) == b"1"
    assert await witness("kvKeys", bucket=bucket) == ["a.b"]


@on_both_drivers
async def test_a_bucket_they_made_to_gather_another_is_read_by_both(
    driver: Driver, url: str, witness: Any, name: str
) -> None:
    async with driver.connect(url) as nc:
        origin = await nc.jetstream().create_kv(KVConfig(bucket=name))
        await origin.put("a.b", b"1")
        await witness("kvCreateBucket", bucket=f"{name}J", options={"sources": [{"name": name}]})
        await _gathered(nc, f"{name}J", witness)


@on_both_drivers
async def test_a_bucket_we_made_to_gather_another_is_read_by_both(
    driver: Driver, url: str, witness: Any, name: str
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        origin = await js.create_kv(KVConfig(bucket=name))
        await origin.put("a.b", b"1")
        await js.create_kv(KVConfig(bucket=f"{name}P", sources=[StreamSource(name=name)]))
        await _gathered(nc, f"{name}P", witness)


@on_both_drivers
async def test_both_make_the_same_copy_and_we_read_theirs(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        origin = await js.create_kv(KVConfig(bucket=name))
        await js.create_kv(KVConfig(bucket=f"{name}P", mirror=StreamSource(name=name)))
        theirs = await witness("kvCreateBucket", bucket=f"{name}J", options={"mirror": {"name": name}})
        ours = (await witness("streamInfo", stream=f"KV_{name}P"))["config"]
        assert ours["mirror"] == theirs["mirror"] == {"name": f"KV_{name}"}
        assert (ours["mirror_direct"], theirs["mirror_direct"]) == (True, True)
        revision = await origin.put("k", b"1")
        [entry] = await _take((await js.kv(f"{name}J")).watch(), 1)
        assert _ours([entry]) == [("k", b"1", revision, "put")]
        assert (await (await js.kv(f"{name}J")).get("k")).revision == revision


# ---- object stores --------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_they_read_the_objects_we_put(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store(name)
        for object_name, content in OBJECTS.items():
            info = await store.put(object_name, content)
            assert _bytes(await witness("objGet", store=name, name=object_name)) == content
            theirs = await witness("objInfo", store=name, name=object_name)
            assert (theirs["name"], theirs["size"], theirs["deleted"]) == (object_name, len(content), False)
            assert (theirs["chunks"], theirs["digest"]) == (info.chunks, info.digest)
        listed = await witness("objList", store=name)
        assert sorted(info["name"] for info in listed) == sorted(OBJECTS)
        assert await witness("objInfo", store=name, name="never there") is None


@on_both_drivers
async def test_we_read_the_objects_they_put(driver: Driver, url: str, witness: Any, name: str) -> None:
    await witness("objCreateStore", store=name, options={})
    async with driver.connect(url) as nc:
        store = await nc.jetstream().object_store(name)
        for object_name, content in OBJECTS.items():
            theirs = await witness("objPut", store=name, name=object_name, data=content)
            assert await store.get_bytes(object_name) == content
            info = await store.info(object_name)
            assert (info.name, info.size_bytes, info.is_deleted) == (object_name, len(content), False)
            assert (info.chunks, info.digest) == (theirs["chunks"], theirs["digest"])
        assert sorted([info.name async for info in store.list()]) == sorted(OBJECTS)
        with pytest.raises(jetspark.ObjectNotFound):
            await store.get_bytes("never there")


@on_both_drivers
async def test_they_list_a_name_they_could_not_write(driver: Driver, url: str, witness: Any, name: str) -> None:
    """The name is in the subject as the base64 of its UTF-8; their encoder knows Latin-1 only, and throws."""
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store(name)
        await store.put("Grüße, 世界", b"content")
        assert await store.get_bytes("Grüße, 世界") == b"content"
        [listed] = await witness("objList", store=name)
        assert (listed["name"], listed["size"]) == ("Grüße, 世界", 7)
        with pytest.raises(witness.Error, match="Invalid character"):
            await witness("objGet", store=name, name="Grüße, 世界")


@on_both_drivers
async def test_what_is_said_about_an_object_arrives(driver: Driver, url: str, witness: Any, name: str) -> None:
    about: dict[str, Any] = {"description": "Grüße", "metadata": {"owner": "interop", "größe": "世界"}}
    headers = [("X-One", "1"), ("x-many", "a"), ("x-many", "b")]
    content = bytes(range(256)) * 40
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store(name)
        ours = await store.put("ours", content, headers=headers, chunk_bytes=1000, **about)
        seen = await witness("objInfo", store=name, name="ours")
        assert (ours.chunks, seen["chunks"], seen["maxChunkSize"]) == (11, 11, 1000)
        assert {field: seen[field] for field in about} == about
        assert _pairs(seen["headers"]) == headers
        assert _bytes(await witness("objGet", store=name, name="ours")) == content

        theirs = await witness(
            "objPut", store=name, name="theirs", data=content, headers=headers, maxChunkSize=1000, **about
        )
        info = await store.info("theirs")
        assert (theirs["chunks"], info.chunks, info.chunk_bytes) == (11, 11, 1000)
        assert {field: getattr(info, field) for field in about} == about
        assert info.headers.multi_items() == headers
        assert await store.get_bytes("theirs") == content


@on_both_drivers
async def test_each_replaces_and_deletes_what_the_other_put(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store(name)

        async def stored() -> int:
            count: int = (await witness("streamInfo", stream=f"OBJ_{name}"))["state"]["messages"]
            return count

        await store.put("a", bytes(3000), chunk_bytes=1000)
        assert await stored() == 4
        await witness("objPut", store=name, name="a", data=b"theirs")
        assert (await store.get_bytes("a"), await stored()) == (b"theirs", 2)
        await store.put("a", b"ours")
        assert (_bytes(await witness("objGet", store=name, name="a")), await stored()) == (b"ours", 2)

        await store.delete("a")
        assert await witness("objGet", store=name, name="a") is None
        assert (await witness("objInfo", store=name, name="a"))["deleted"]
        assert (await witness("objList", store=name), await stored()) == ([], 1)
        await witness("objPut", store=name, name="a", data=b"theirs again")
        assert (await store.get_bytes("a"), await stored()) == (b"theirs again", 2)

        await witness("objDelete", store=name, name="a")
        with pytest.raises(jetspark.ObjectNotFound):
            await store.get_bytes("a")
        assert (await store.info("a", include_deleted=True)).is_deleted
        assert ([info async for info in store.list()], await stored()) == ([], 1)
        await store.put("a", b"ours again")
        assert _bytes(await witness("objGet", store=name, name="a")) == b"ours again"


@on_both_drivers
async def test_links_lead_both_to_the_same_object(driver: Driver, url: str, witness: Any, name: str) -> None:
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store(name)
        target = await store.put("target", b"content")
        await store.add_link("our link", target)
        assert _bytes(await witness("objGet", store=name, name="our link")) == b"content"
        await witness("objLink", store=name, name="their link", to="target")
        assert await store.get_bytes("their link") == b"content"
        link = (await store.info("their link")).link
        assert link is not None
        assert (link.bucket, link.name) == (name, "target")


@on_both_drivers
async def test_both_make_the_same_store(driver: Driver, url: str, witness: Any, name: str) -> None:
    options = {"description": "the same", "ttl": 60_000_000_000, "max_bytes": 1 << 20, "compression": True}
    theirs = await witness("objCreateStore", store=f"{name}J", options=options)
    async with driver.connect(url) as nc:
        await nc.jetstream().create_object_store(
            ObjectStoreConfig(bucket=f"{name}P", description="the same", ttl_s=60, max_bytes=1 << 20, compression="s2")
        )
    ours = (await witness("streamInfo", stream=f"OBJ_{name}P"))["config"]
    different = {field for field in ours.keys() | theirs.keys() if ours.get(field) != theirs.get(field)}
    # Ours allow fast ingest, which raises the API level that the server notes.
    assert different == {"name", "subjects", "allow_batched", "metadata"}
    assert ours["subjects"] == [f"$O.{name}P.C.>", f"$O.{name}P.M.>"]
    assert theirs["subjects"] == [f"$O.{name}J.C.>", f"$O.{name}J.M.>"]
