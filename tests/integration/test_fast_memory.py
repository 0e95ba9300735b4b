"""Adding many messages takes memory for those on their way, not for all of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jetspark.server import NatsServer

MESSAGES = 1_000_000

# In a process of its own: its highest memory use is what is measured.
PROGRAM = """
import asyncio, resource, sys
import jetspark
from jetspark import StreamConfig

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

async def main(url, count):
    async with jetspark.connect(url) as nc:
        js = nc.jetstream()
        config = StreamConfig(name="M", subjects=["m"], allow_batched=True, storage="memory", max_messages=1000)
        await js.create_stream(config)
        async with js.fast_batch() as fast:
            await fast.add_many(("m", b"x" * 128) for _ in range(20_000))
            before = peak_kib()
            await fast.add_many(("m", b"x" * 128) for _ in range(count))
        print(fast.ack.batch_size, peak_kib() - before)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_stays_flat_however_many_messages_are_added() -> None:
    with NatsServer() as server:
        command = [sys.executable, "-c", PROGRAM, server.url, str(MESSAGES)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=550, check=True)
    stored, grown_kib = map(int, result.stdout.split())
    assert stored == MESSAGES + 20_000
    assert grown_kib < 4096  # the messages themselves are 128 MB
