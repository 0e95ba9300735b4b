"""Rows of key-value buckets."""

from __future__ import annotations

import contextlib

import jetspark
from jetspark import KVConfig
from support.operations.table import World, drained, row


@row("JetStream.create_kv", "JetStream.kv", "JetStream.create_or_update_kv", "JetStream.delete_kv")
async def _(w: World) -> None:
    config = KVConfig(bucket=f"{w.name}_{w.number}", storage="memory")

    async def act() -> None:
        await w.js.create_kv(config)
        await w.js.create_or_update_kv(config)
        await w.js.kv(config.bucket)
        await w.js.delete_kv(config.bucket)

    await w.interrupt(act)
    with contextlib.suppress(jetspark.StreamNotFound):
        await w.js.delete_kv(config.bucket)


@row("KeyValue.put", "KeyValue.create", "KeyValue.update", "KeyValue.delete", "KeyValue.purge")
async def _(w: World) -> None:
    kv = await w.bucket()
    key, done = f"k{w.number}", 0

    async def act() -> None:
        nonlocal done
        revision = await kv.create(key, b"1")
        done = 1
        await kv.update(key, b"2", revision=revision)
        done = 2
        await kv.put(key, b"3")
        done = 3
        await kv.delete(key)
        done = 4
        await kv.purge(key)
        done = 5

    await w.interrupt(act)
    await w.js.publish(f"{w.name}.fence")
    await kv.put(f"{key}.fence", b"")
    written = w.look(f"$KV.{w.name}.{key}")
    expected = [[], [b"1"], [b"1", b"2"], [b"1", b"2", b"3"], [b"1", b"2", b"3", b""], [b""]]
    assert written in expected[done : done + 2], (written, done)
    w.seen[f"$KV.{w.name}.{key}"] = written


@row("KeyValue.get", "KeyValue.get_at", "KeyValue.history", "KeyValue.status", "KeyValue.stream_info")
async def _(w: World) -> None:
    kv = await w.bucket()
    key = f"k{w.number}"
    revision = await kv.put(key, b"1")

    async def act() -> None:
        assert (await kv.get(key)).value == b"1"
        assert (await kv.get_at(key, revision)).value == b"1"
        assert [entry.value for entry in await kv.history(key)] == [b"1"]
        await kv.status()
        await kv.stream_info()

    await w.interrupt(act)


@row("KeyValue.keys", "KeyValue.snapshot")
async def _(w: World) -> None:
    kv = await w.bucket()
    await kv.put("a", b"1")

    async def act() -> None:
        assert "a" in await drained(kv.keys())
        assert (await kv.snapshot(["a"]))["a"].value == b"1"

    await w.interrupt(act)


@row("KeyValue.watch")
async def _(w: World) -> None:
    kv = await w.bucket()
    for number in range(5):
        await kv.put(f"w.{number}", b"1")
    got: list[str] = []

    async def act() -> None:
        async with contextlib.aclosing(kv.watch("w.*", initial_marker=True)) as changes:
            async for change in changes:
                if change is None:
                    return
                got.append(change.key)

    await w.interrupt(act)
    assert len(got) == len(set(got)) <= 5


@row("KeyValue.purge_deletes")
async def _(w: World) -> None:
    kv = await w.bucket()
    await kv.put("gone", b"1")
    await kv.delete("gone")
    await w.interrupt(lambda: kv.purge_deletes(older_than=0))


@row(
    "KeyValue.transaction",
    "Transaction.put",
    "Transaction.create",
    "Transaction.update",
    "Transaction.delete",
    "Transaction.purge",
    "Transaction.expect",
    "Transaction.resolve",
)
async def _(w: World) -> None:
    kv = await w.bucket()
    key = f"t{w.number}"
    revision = await kv.put(f"{key}.old", b"0")
    other = await kv.put(f"{key}.read", b"0")
    transaction = kv.transaction()

    async def act() -> None:
        async with transaction as tx:
            await tx.put(f"{key}.put", b"1")
            await tx.create(f"{key}.new", b"1")
            await tx.update(f"{key}.old", b"1", revision=revision)
            await tx.delete(f"{key}.deleted")
            await tx.purge(f"{key}.purged")
            await tx.expect(f"{key}.read", revision=other)

    ended = await w.interrupt(act)
    await kv.put(f"{key}.fence", b"")
    outcome = transaction.outcome
    if outcome == "unknown":
        outcome = await transaction.resolve()
    present = await kv.snapshot([f"{key}.put", f"{key}.new", f"{key}.old"])
    expected = {f"{key}.put", f"{key}.new", f"{key}.old"} if outcome == "stored" else {f"{key}.old"}
    assert set(present) == expected, (outcome, present)
    assert present[f"{key}.old"].value == (b"1" if outcome == "stored" else b"0")
    assert outcome == "stored" or ended.was_interrupted
    if outcome == "stored":
        assert transaction.revisions or ended.was_interrupted
