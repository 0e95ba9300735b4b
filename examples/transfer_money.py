"""Move money between accounts of a bucket: both change or none, and never based on outdated balances.

Ten tasks transfer at the same time, in all directions. The total is the same afterwards.
"""

import asyncio
import random

import jetspark
from jetspark import KVConfig
from jetspark.server import NatsServer

ACCOUNTS = [f"account.{number}" for number in range(5)]


async def transfer(kv: jetspark.KeyValue, source: str, target: str, cents: int) -> bool:
    """False when there is not enough in ``source``."""
    while True:
        snapshot = await kv.snapshot([source, target])  # both as they were at one moment
        have, gets = snapshot[source], snapshot[target]
        if int(have.value) < cents:
            return False
        try:
            async with kv.transaction() as tx:
                await tx.update(source, b"%d" % (int(have.value) - cents), revision=have.revision)
                await tx.update(target, b"%d" % (int(gets.value) + cents), revision=gets.revision)
            return True
        except jetspark.Conflict:
            continue  # another task was faster: read again
        except jetspark.BatchInDoubt:
            # The answer was lost. A blind repetition might move the money twice; resolve() reads the outcome.
            if await tx.resolve() == "stored":
                return True


async def spend(kv: jetspark.KeyValue, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        source, target = rng.sample(ACCOUNTS, 2)
        await transfer(kv, source, target, rng.randrange(1, 50))


async def main() -> None:
    async with NatsServer() as server, jetspark.connect(server.url) as nc:
        kv = await nc.jetstream().create_kv(KVConfig(bucket="bank"))
        for account in ACCOUNTS:
            await kv.put(account, b"100")
        await asyncio.gather(*(spend(kv, seed) for seed in range(10)))
        balances = {key: int(entry.value) for key, entry in (await kv.snapshot(["account.*"])).items()}
        print(balances, "together", sum(balances.values()))
        assert sum(balances.values()) == 100 * len(ACCOUNTS)


asyncio.run(main())
