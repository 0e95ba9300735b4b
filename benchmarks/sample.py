"""One measurement of one contender in a process of its own, so that no interpreter, collector or loop is shared.

``python -m benchmarks.sample '{"workload": ..., "contender": ..., "job": {...}}'`` prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from typing import Any

from benchmarks.workload import Job, Values
from benchmarks.workloads import WORKLOADS

__all__ = ["UVLOOP_SUFFIX", "measure"]

UVLOOP_SUFFIX = "-uvloop"


def measure(workload: str, contender: str, job: Job) -> Values:
    name = contender.removesuffix(UVLOOP_SUFFIX)
    chosen = next(entry for entry in WORKLOADS[workload].contenders if entry.name == name)
    loop_factory = None
    if name != contender:
        import uvloop

        loop_factory = uvloop.new_event_loop
    result = chosen.run(job)
    if not inspect.isawaitable(result):
        return result

    async def awaited() -> Values:
        return await result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(awaited())


def main(request: dict[str, Any]) -> None:
    values = measure(request["workload"], request["contender"], Job(**request["job"]))
    # Some contenders take part in several workloads, which do not all ask for everything.
    print(json.dumps({metric.name: values[metric.name] for metric in WORKLOADS[request["workload"]].metrics}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
