"""Fast ingest with nats-jetstream-extra, for a Python that has it; see peers.py for how this is called.

nats-jetstream needs Python 3.13, and its ``nats`` is not nats-py's: the two cannot share an environment. So this file
is a program for another interpreter, and imports nothing of JetSpark.
"""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from importlib import metadata
from time import perf_counter, process_time
from typing import Any

__all__: list[str] = []


async def measure(job: dict[str, Any]) -> dict[str, float]:
    from nats.client import connect
    from nats.jetstream import new as jetstream
    from nats.jetstream_extra.fast_publish import fast_publish

    client = await connect(job["url"])
    js = jetstream(client)
    subject, payload = job["subject"], job["payload"].encode()
    for count in job["counts"]:
        started, cpu_started = perf_counter(), process_time()
        async with fast_publish(js, flow=job["flow"], max_outstanding_acks=job["outstanding_acks"]) as fast:
            for _ in range(count - 1):
                await fast.add(subject, payload)
            await fast.commit(subject, payload)
        elapsed, cpu = perf_counter() - started, process_time() - cpu_started
    await client.close()
    return {"messages_per_s": count / elapsed, "cpu_s_per_million": cpu / count * 1e6}


def version() -> str:
    from nats.jetstream_extra.fast_publish import fast_publish  # noqa: F401 - that it can be imported is the question

    core = metadata.version("nats-core")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{metadata.version('nats-jetstream-extra')} (nats-core {core}, {python})"


if __name__ == "__main__":
    if sys.argv[1] == "--version":
        print(version())
    else:
        print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))))
