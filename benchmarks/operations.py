"""Operations that are awaited one by one: how long each takes, and how many there are a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

from benchmarks.workload import Job, Stopwatch, Values, percentile

__all__ = ["NumberedOperation", "measure_operations"]

NumberedOperation = Callable[[int], Awaitable[None]]
"""Do it once, in the place of this number: a ledger, an account."""


async def measure_operations(job: Job, operation: NumberedOperation, *, at_a_time: int, places: int) -> Values:
    """Do an operation ``job.count`` times, ``at_a_time`` of them at the same time, in each of ``places`` by turns."""
    times: list[float] = []

    async def repeat(first: int, end: int) -> None:
        for number in range(first, end, at_a_time):
            started = perf_counter()
            await operation(number % places)
            times.append(perf_counter() - started)

    await asyncio.gather(*(repeat(first, job.warmup) for first in range(at_a_time)))
    times.clear()
    watch = Stopwatch()
    await asyncio.gather(*(repeat(first, job.count) for first in range(at_a_time)))
    watch.stop()
    found = sorted(times)
    return watch.values(job.count) | {"latency_s_p50": percentile(found, 50), "latency_s_p99": percentile(found, 99)}
