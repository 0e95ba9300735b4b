"""Entities: the rate of changes, 64 at a time, if concurrent changes share batches.

Every contender does the same for each change: read the account's state from the stream's leader, decide, and store the
new state and its event in an atomic batch, only if the account has not changed since. ``a-batch-each`` commits a
batch for every change, as many at a time as the server allows. ``jetspark`` is ``modify``, which gathers the changes
that arrive while a batch is being stored.
"""

from __future__ import annotations

import asyncio
import json

from benchmarks.operations import measure_operations
from benchmarks.streams import app_stream
from benchmarks.workload import CPU_PER_MILLION, MESSAGES_PER_S, Bar, Contender, Job, Metric, Values, Workload
from jetspark.errors import MessageNotFound, WrongLastSequence
from jetspark.jetstream.publishing import Expect

__all__ = ["ENTITY_64"]

AT_A_TIME = 64
ACCOUNTS = 1000
"""Changes of one account follow each other, and are no conflict here."""
BATCHES_IN_FLIGHT = 50
"""The server's default limit for one stream."""


async def _a_batch_each(job: Job) -> Values:
    from benchmarks.accounts import SUBJECT, accounts, moved

    app, places = accounts(), asyncio.Semaphore(BATCHES_IN_FLIGHT)
    async with app_stream(job, app, subject=f"{SUBJECT}.>") as js:
        stream = await js.stream(app.stream)

        async def change(number: int) -> None:
            key = f"{app.spec.entities['accounts'].state_subjects.prefix}accounts.a{number}"
            while True:
                try:
                    last = await stream.get_message(last_for=key, direct=False)
                    cents, sequence = json.loads(last.data)["cents"] + 1, last.sequence
                except MessageNotFound:
                    cents, sequence = 1, 0
                event = moved(number, cents)
                try:
                    async with places, js.atomic_batch(ack_first=False) as batch:
                        state, rollup = json.dumps({"cents": cents}).encode(), {"Nats-Rollup": "sub"}
                        await batch.add(key, state, headers=rollup, expect=Expect(last_subject_sequence=sequence))
                        await batch.add(event.subject, event.data, headers=event.headers)
                    return
                except WrongLastSequence:
                    continue

        return await measure_operations(job, change, at_a_time=AT_A_TIME, places=ACCOUNTS)


async def _jetspark(job: Job) -> Values:
    from benchmarks.accounts import SUBJECT, accounts, add_one

    app = accounts()
    async with app_stream(job, app, subject=f"{SUBJECT}.>"), app.connect(job.url) as client:
        entities = client.entities("accounts")

        async def change(number: int) -> None:
            await entities.modify(f"a{number}", add_one)

        return await measure_operations(job, change, at_a_time=AT_A_TIME, places=ACCOUNTS)


ENTITY_64 = Workload(
    name="entity-64",
    what="change 1,000 accounts, 64 at a time, state and event in one atomic batch; timed from the first to the last",
    count=1_920,
    quick_count=128,
    storage="file",
    replicas=1,
    baselines=("a-batch-each",),
    contenders=(
        Contender(name="a-batch-each", what="get, decide, atomic_batch() by hand", run=_a_batch_each, needs="msgspec"),
        Contender(name="jetspark", what="await entities.modify(), grouped", run=_jetspark, needs="msgspec"),
    ),
    metrics=(MESSAGES_PER_S, Metric("latency_s_p50", "s", "lower"), CPU_PER_MILLION),
    bars=(
        Bar(
            claim="64 changes of entities at a time are stored at least 5 times as fast as in a batch each",
            metric="messages_per_s",
            contender="jetspark",
            baseline="a-batch-each",
            at_least=5.0,
        ),
    ),
)
