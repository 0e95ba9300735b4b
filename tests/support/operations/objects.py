"""Rows of object stores."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import jetspark
from jetspark import ObjectMeta
from support.operations.table import A_WHILE_S, World, drained, row


@row("JetStream.create_object_store", "JetStream.object_store", "JetStream.delete_object_store", "ObjectStore.seal")
async def _(w: World) -> None:
    bucket = f"{w.name}_{w.number}"

    async def act() -> None:
        store = await w.js.create_object_store(jetspark.ObjectStoreConfig(bucket=bucket, storage="memory"))
        await w.js.object_store(bucket)
        await store.seal()
        await w.js.delete_object_store(bucket)

    await w.interrupt(act)
    with contextlib.suppress(jetspark.StreamNotFound):
        await w.js.delete_object_store(bucket)


async def _check_chunks(w: World, store: Any) -> None:
    """Every object is whole, and no chunk is left that belongs to none."""
    deadline = time.monotonic() + A_WHILE_S
    while True:
        infos = [info async for info in store.list()]
        state = w.stream_of(f"$O.{w.name}.C.x").info(subjects_filter=f"$O.{w.name}.C.>").state
        expected = sum(info.chunks for info in infos if info.link is None)
        if sum(state.subjects.values()) == expected:
            break
        # An interrupted thread cannot tidy up after a second interruption; nobody here interrupts twice.
        assert time.monotonic() < deadline, f"chunks without an object: {state.subjects} {infos}"
        await w.sleep(0.02)
    for info in infos:
        if info.link is None:
            assert len(await store.get_bytes(info.name)) == info.size_bytes


@row("ObjectStore.put")
async def _(w: World) -> None:
    store = await w.objects()
    kind = w.number % 3
    size = 0 if w.number % 7 == 6 else (1000, 300_000, 300_000)[kind]
    new = random.Random(w.number).randbytes(size)
    await store.put("it", b"old")

    async def act() -> None:
        source: Any = new if kind < 2 else (new[at : at + 70_000] for at in range(0, len(new), 70_000))
        await store.put("it", source, chunk_bytes=50_000)

    ended = await w.interrupt(act)
    await _check_chunks(w, store)
    content = await store.get_bytes("it")
    assert content == new or (content == b"old" and not ended.is_complete), (len(content), ended)


@row("ObjectStore.get_bytes", "ObjectStore.get_file", "ObjectStore.chunks", "ObjectStore.info")
async def _(w: World) -> None:
    store = await w.objects()
    await store.put("it", bytes(200_000), chunk_bytes=50_000)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "it"
        target.write_bytes(b"old")

        async def act() -> None:
            await store.info("it")
            assert await store.get_bytes("it") == bytes(200_000)
            await store.get_file("it", target)
            assert sum(map(len, await drained(store.chunks("it")))) == 200_000

        await w.interrupt(act)
        assert os.listdir(folder) == ["it"]
        assert target.read_bytes() in (b"old", bytes(200_000))


@row("ObjectStore.delete", "ObjectStore.update_meta", "ObjectStore.add_link", "ObjectStore.add_bucket_link")
async def _(w: World) -> None:
    store = await w.objects()
    name = f"o{w.number}"
    info = await store.put(name, bytes(100_000), chunk_bytes=50_000)

    async def act() -> None:
        await store.add_link(f"{name}.link", info)
        await store.add_bucket_link(f"{name}.bucket", w.name)
        await store.update_meta(name, ObjectMeta(name=name, description="x"))
        await store.delete(name)

    ended = await w.interrupt(act)
    if ended.is_complete:
        await store.delete(f"{name}.link")
        await store.delete(f"{name}.bucket")
    await _check_chunks(w, store)


@row("ObjectStore.list", "ObjectStore.watch", "ObjectStore.status", "ObjectStore.purge_orphans")
async def _(w: World) -> None:
    store = await w.objects()
    await store.put("it", b"x")

    async def act() -> None:
        assert [info.name for info in await drained(store.list())] == ["it"]
        async with contextlib.aclosing(store.watch(initial_marker=True)) as changes:
            async for change in changes:
                if change is None:
                    break
        await store.status()
        assert await store.purge_orphans(older_than=0) == 0

    await w.interrupt(act)
