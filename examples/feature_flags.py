"""Feature flags in a bucket: every process caches them and follows changes, and no change overwrites another one.

A service reads flags from memory; a watch keeps them up to date through reconnects. An editor changes a flag only if
it has not changed since it was read.
"""

import asyncio
import json
from typing import Any

import jetspark
from jetspark import KVConfig
from jetspark.server import NatsServer

DEFAULTS: dict[str, Any] = {"new_checkout": False, "max_items": 20}


class Flags:
    """The present value of every flag; ``DEFAULTS`` where the bucket has none."""

    def __init__(self) -> None:
        self.values = dict(DEFAULTS)
        self.is_loaded = asyncio.Event()
        self.changed = asyncio.Condition()

    async def follow(self, kv: jetspark.KeyValue) -> None:
        """Runs as long as the service does."""
        async for change in kv.watch(">", initial_marker=True):
            if change is None:  # the present ends, changes begin
                self.is_loaded.set()
                continue
            if change.operation == "put":
                self.values[change.key] = json.loads(change.value)
            else:
                self.values[change.key] = DEFAULTS.get(change.key)
            async with self.changed:
                self.changed.notify_all()


async def edit(kv: jetspark.KeyValue, name: str, value: object) -> None:
    """Compare and set; repeat while other writers are faster."""
    data = json.dumps(value).encode()
    while True:
        try:
            entry = await kv.get(name)
        except jetspark.KeyNotFound:
            try:
                await kv.create(name, data)
                return
            except jetspark.KeyExists:
                continue
        try:
            await kv.update(name, data, revision=entry.revision)
            return
        except jetspark.Conflict:
            continue


async def main() -> None:
    async with NatsServer() as server, jetspark.connect(server.url) as nc:
        js = nc.jetstream()
        await js.create_kv(KVConfig(bucket="flags", history=10))
        kv = await js.kv("flags")  # every other process opens the existing bucket
        flags = Flags()
        following = asyncio.create_task(flags.follow(kv))
        await flags.is_loaded.wait()
        print("at the beginning:", flags.values)

        await asyncio.gather(*(edit(kv, "max_items", 20 + editor) for editor in range(5)))
        await edit(kv, "new_checkout", True)
        async with flags.changed:
            await flags.changed.wait_for(lambda: flags.values["new_checkout"])
        print("after six edits:", flags.values)
        print("who had which idea:", [json.loads(entry.value) for entry in await kv.history("max_items")])
        following.cancel()


asyncio.run(main())
