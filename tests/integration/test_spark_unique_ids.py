"""Projections with ``unique_ids`` on Spark: the bytes that a live worker stores, however the stream is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from support.projected import State, stored
from support.repeated import app, oracle, some_messages

import jetspark
from jetspark.aio.jetstream import JetStream as AsyncJetStream
from jetspark.app.projections.router import Recorded
from jetspark.app.projections.state_header import ID_BYTES, Mark, Parked
from jetspark.app.replay import RebuildOptions, ReplayRequest, rebuild, run_replay, verify
from jetspark.blocking import JetStream
from jetspark.errors import StreamNotFound
from jetspark.server import NatsServer

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from jetspark.spark import ReplayEngine, backfill, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.timeout(600)]

T = TypeVar("T")


@pytest.fixture
def ledger(server: NatsServer, js: JetStream) -> JetStream:
    for name in ("LEDGER", "KV_ledger_sums", "KV_ledger_plain", "KV_ledger_sums_v1", "KV_ledger_projections"):
        with suppress(StreamNotFound):
            js.delete_stream(name)
    asyncio.run(app.apply(server.url))
    return js


def ask(server: NatsServer, work: Callable[[AsyncJetStream], Awaitable[T]]) -> T:
    async def run() -> T:
        async with jetspark.connect(server.url) as client:
            return await work(client.jetstream())

    return asyncio.run(run())


def publish(js: JetStream, count: int, seed: int) -> None:
    with js.fast_batch() as batch:
        batch.add_many((each.subject, each.data, None) for each in some_messages(count, seed))


def expected(js: JetStream) -> dict[str, State]:
    messages = js.stream("LEDGER").get_messages(1)
    found = oracle(Recorded(each.sequence, each.subject, each.data, each.headers, 0) for each in messages)
    why = "ValueError: cannot be applied"
    return {
        key: (
            each.value,
            each.sequence,
            str(Mark(1, None if each.parked is None else Parked(each.parked, why), 3, b"".join(each.ids))),
        )
        for key, each in found.items()
    }


def test_spark_stores_the_ids_that_a_live_worker_stores_however_the_stream_is_cut(
    spark: SparkSession, server: NatsServer, ledger: JetStream, tmp_path: Path
) -> None:
    for seed in (1, 2):
        publish(ledger, 700, seed)
        query = run(
            app, spark, server.url, checkpoint=str(tmp_path), until_now=True, maxOffsetsPerTrigger=300, partitions=2
        )
        query.awaitTermination()
        assert stored(ledger, "ledger_sums") == expected(ledger)
    by_spark = ask(server, lambda js: verify(js, app, "sums", engine=engine_of(spark, server)))
    by_live = ask(server, lambda js: verify(js, app, "sums"))
    assert (by_spark.is_equal, by_spark.digest) == (True, by_live.digest)
    assert len(by_live.digest) > 60


def engine_of(spark: SparkSession, server: NatsServer) -> ReplayEngine:
    return ReplayEngine(app, spark, server.url, projection="sums")


def test_a_backfill_a_rebuild_and_a_replay_on_spark_store_them_too(
    spark: SparkSession, server: NatsServer, ledger: JetStream
) -> None:
    publish(ledger, 900, 3)
    engine = engine_of(spark, server)
    backfill(app, spark, server.url, projections=["sums"], partitions=2)
    right = stored(ledger, "ledger_sums")
    assert right == expected(ledger)
    key = next(key for key, (value, _, mark) in right.items() if value is not None and "parked" not in (mark or ""))
    ledger.stream("KV_ledger_sums").purge(subject=f"$KV.ledger_sums.{key}")
    done = ask(server, lambda js: run_replay(js, app, "sums", ReplayRequest(), engine=engine))
    assert done.changed == 1
    assert stored(ledger, "ledger_sums") == right
    built = ask(server, lambda js: rebuild(js, app, "sums", RebuildOptions(check=True), engine=engine))
    assert stored(ledger, built.new.bucket) == right
    mark = Mark.read(right[key][2])
    assert mark is not None
    assert 0 < len(mark.ids) <= 3 * ID_BYTES
