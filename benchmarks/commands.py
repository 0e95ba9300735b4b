"""Commands: how long one decision takes, and how many there are a second, next to the guarded publish below them.

Every contender stores one event for each command in one of 100 ledgers, on disk, only if the ledger has not changed
since it was read. ``guarded-publish`` knows the ledgers' ends and only publishes: the cost of the server and the
network.
``nats-py`` is the loop that one writes by hand: read the last message, decide, publish with the expected sequence, and
again if that was wrong. ``jetspark-here`` is ``call`` of a program that decides its commands itself, on all events, and
``jetspark`` is ``call`` to a worker in a process of its own. ``bare-call`` takes that way to a worker and back by hand,
on plain sockets, and decides nothing: a command that a worker decides cannot be faster.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from benchmarks.operations import NumberedOperation, measure_operations
from benchmarks.processes import running
from benchmarks.streams import app_stream
from benchmarks.workload import (
    CPU_PER_MILLION,
    MESSAGES_PER_S,
    Bar,
    Contender,
    Job,
    Metric,
    Values,
    Workload,
    payload_of,
)
from jetspark.aio.jetstream import JetStream
from jetspark.codes import Code
from jetspark.jetstream.publishing import Expect

__all__ = ["COMMAND", "COMMAND_64", "COMMAND_64_REPLICATED", "COMMAND_REPLICATED"]

LEDGERS = 100
AT_A_TIME = 64


async def _measured(job: Job, operation: NumberedOperation, at_a_time: int) -> Values:
    return await measure_operations(job, operation, at_a_time=at_a_time, places=LEDGERS)


def _stream(job: Job) -> AbstractAsyncContextManager[JetStream]:
    from benchmarks.ledgers import ledgers

    return app_stream(job, ledgers(job.replicas), subject="bench-ledgers.>")


async def _guarded_publish(job: Job, at_a_time: int) -> Values:
    payload, lasts = payload_of(job.payload_bytes), [0] * LEDGERS
    # Two of the 64 may have the same ledger: they take turns, as commands do.
    turns = [asyncio.Lock() for _ in range(LEDGERS)]

    async with _stream(job) as js:

        async def publish(ledger: int) -> None:
            async with turns[ledger]:
                expect = Expect(last_subject_sequence=lasts[ledger])
                lasts[ledger] = (await js.publish(f"bench-ledgers.l{ledger}", payload, expect=expect)).sequence

        return await _measured(job, publish, at_a_time)


async def _nats_py(job: Job, at_a_time: int) -> Values:
    import nats
    from nats.js.errors import BadRequestError, NotFoundError

    note = payload_of(job.payload_bytes).decode()
    async with _stream(job):
        client = await nats.connect(job.url)
        js = client.jetstream(timeout=30.0)

        async def decide(ledger: int) -> None:
            subject = f"bench-ledgers.l{ledger}"
            while True:
                try:
                    last = await js.get_last_msg("BENCH_LEDGERS", subject, direct=True)
                    number, sequence = json.loads(last.data or b"{}")["number"] + 1, last.seq
                except NotFoundError:
                    number, sequence = 1, 0
                headers = {"Nats-Expected-Last-Subject-Sequence": str(sequence)}
                body = json.dumps({"ledger": f"l{ledger}", "number": number, "note": note}).encode()
                try:
                    await js.publish(subject, body, headers=headers)
                    return
                except BadRequestError as error:
                    if error.err_code != Code.WRONG_LAST_SEQUENCE:
                        raise

        try:
            return await _measured(job, decide, at_a_time)
        finally:
            await client.close()


async def _call(job: Job, at_a_time: int) -> Values:
    from benchmarks.ledgers import Enter, ledgers

    note = payload_of(job.payload_bytes).decode()
    async with _stream(job), ledgers(job.replicas).connect(job.url) as client:

        async def call(ledger: int) -> None:
            await client.call(Enter(ledger=f"l{ledger}", note=note), timeout=30.0)

        with running("benchmarks.ledgers", job.url, str(job.replicas)):
            return await _measured(job, call, at_a_time)


async def _call_here(job: Job, at_a_time: int) -> Values:
    from benchmarks.ledgers import Enter, ledgers

    note = payload_of(job.payload_bytes).decode()
    async with _stream(job), ledgers(job.replicas).connect(job.url, decide_here=True) as client:

        async def call(ledger: int) -> None:
            await client.call(Enter(ledger=f"l{ledger}", note=note), timeout=30.0)

        return await _measured(job, call, at_a_time)


async def _bare_call(job: Job) -> Values:
    from benchmarks.bare_ledgers import bare_caller

    async with _stream(job):
        with running("benchmarks.bare_ledgers", job.url):
            connection, call_and_wait = bare_caller(job.url, payload_of(job.payload_bytes))

            async def call(ledger: int) -> None:
                call_and_wait(ledger)

            with connection:
                return await _measured(job, call, 1)


def _contenders(at_a_time: int) -> tuple[Contender, ...]:
    async def guarded_publish(job: Job) -> Values:
        return await _guarded_publish(job, at_a_time)

    async def nats_py(job: Job) -> Values:
        return await _nats_py(job, at_a_time)

    async def jetspark(job: Job) -> Values:
        return await _call(job, at_a_time)

    async def jetspark_here(job: Job) -> Values:
        return await _call_here(job, at_a_time)

    what = "await publish(expect=), the last sequence known"
    by_hand = Contender(name="bare-call", what="sendall, recv; a bare worker", run=_bare_call, needs="msgspec")
    return (
        Contender(name="guarded-publish", what=what, run=guarded_publish, needs="msgspec"),
        *((by_hand,) if at_a_time == 1 else ()),
        Contender(name="nats-py", what="get_last_msg(), decide, publish(), repeat", run=nats_py, needs="nats"),
        Contender(name="jetspark-here", what="await call(), decided by the caller", run=jetspark_here, needs="msgspec"),
        Contender(name="jetspark", what="await call(), a worker in its own process", run=jetspark, needs="msgspec"),
    )


COMMAND = Workload(
    name="command",
    what="decide one command after the other in 100 ledgers; each is timed from the call to the reply",
    count=2_000,
    quick_count=100,
    storage="file",
    replicas=1,
    baselines=("guarded-publish", "nats-py"),
    contenders=_contenders(1),
    metrics=(Metric("latency_s_p50", "s", "lower"), Metric("latency_s_p99", "s", "lower"), MESSAGES_PER_S),
    bars=(
        Bar(
            claim="a command that the caller decides takes at most twice as long as a bare guarded publish at p50",
            metric="latency_s_p50",
            contender="jetspark-here",
            baseline="guarded-publish",
            at_most=2.0,
        ),
        Bar(
            claim="a command that a worker decides takes at most twice as long as a bare guarded publish at p50",
            metric="latency_s_p50",
            contender="jetspark",
            baseline="guarded-publish",
            at_most=2.0,
        ),
    ),
)
COMMAND_64 = Workload(
    name="command-64",
    what="decide 64 commands at a time in 100 ledgers; timed from the first call to the last reply",
    count=10_000,
    quick_count=200,
    storage="file",
    replicas=1,
    baselines=("guarded-publish", "nats-py"),
    contenders=_contenders(AT_A_TIME),
    metrics=(MESSAGES_PER_S, Metric("latency_s_p50", "s", "lower"), CPU_PER_MILLION),
    bars=(
        Bar(
            claim="64 commands at a time are decided by their caller as fast as by a loop on nats-py",
            metric="messages_per_s",
            contender="jetspark-here",
            baseline="nats-py",
            at_least=1.0,
        ),
        Bar(
            claim="64 commands at a time are decided by a worker as fast as by a loop on nats-py",
            metric="messages_per_s",
            contender="jetspark",
            baseline="nats-py",
            at_least=1.0,
        ),
    ),
)
COMMAND_REPLICATED = replace(
    COMMAND,
    name="command-r3",
    what=f"{COMMAND.what}; the stream has three replicas",
    count=1_000,
    replicas=3,
    bars=tuple(replace(bar, claim=f"{bar.claim}, with three replicas") for bar in COMMAND.bars),
)
COMMAND_64_REPLICATED = replace(
    COMMAND_64,
    name="command-64-r3",
    what=f"{COMMAND_64.what}; the stream has three replicas",
    count=5_000,
    replicas=3,
    bars=tuple(replace(bar, claim=f"{bar.claim}, with three replicas") for bar in COMMAND_64.bars),
)
