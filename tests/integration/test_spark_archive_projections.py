"""Projections on Spark from an archive and a stream: the bytes of a live engine that has seen everything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from support import mixed, projected
from support.archive_ranges import archive_stream
from support.projected import app, folded, publish, stored

import jetspark
from jetspark.aio.jetstream import JetStream as AsyncJetStream
from jetspark.app.replay import RebuildOptions, ReplayRequest, plan_replay, rebuild, verify
from jetspark.blocking import JetStream
from jetspark.errors import ConfigError, DataLoss, StreamNotFound
from jetspark.lake.reading import ArchiveRoot
from jetspark.server import NatsServer

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from jetspark.spark import ReplayEngine, backfill, fold_states, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.timeout(600)]

T = TypeVar("T")
COUNT = 1_200


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


@pytest.fixture
def bank(server: NatsServer, js: JetStream) -> JetStream:
    """A stream with a history, and empty buckets."""
    for name in ("KV_accounts_v1", "KV_accounts_v1_r1"):
        try:
            js.delete_stream(name)
        except StreamNotFound:
            pass
    bank = projected.fresh(server.url, js)
    publish(bank, projected.messages(COUNT))
    return bank


def ask(server: NatsServer, work: Callable[[AsyncJetStream], Awaitable[T]]) -> T:
    async def work_on_it() -> T:
        async with jetspark.connect(server.url) as client:
            return await work(client.jetstream())

    return asyncio.run(work_on_it())


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_rebuild_on_spark_equals_the_live_projection_that_saw_everything(
    spark: SparkSession, server: NatsServer, bank: JetStream, lake: str, is_deleted: bool
) -> None:
    backfill(app, spark, server.url, projections=["accounts"])
    right = stored(bank, "accounts")
    assert right == folded(bank, "accounts")
    archive_stream(bank, lake, "BANK", until=None if is_deleted else 801, files=3)
    if is_deleted:
        bank.delete_stream("BANK")
    else:
        bank.stream("BANK").purge(up_to_sequence=700)
    engine = ReplayEngine(app, spark, server.url, projection="accounts", archive=ArchiveRoot(lake))
    without = ReplayEngine(app, spark, server.url, projection="accounts")
    with pytest.raises(StreamNotFound if is_deleted else DataLoss):
        ask(server, lambda js: rebuild(js, app, "accounts", engine=without))
    with pytest.raises(ConfigError, match="give it the same archive"):
        ask(server, lambda js: rebuild(js, app, "accounts", engine=without, archive=lake))
    done = ask(server, lambda js: rebuild(js, app, "accounts", RebuildOptions(check=True), engine=engine))
    assert stored(bank, done.new.bucket) == right
    live = ask(server, lambda js: rebuild(js, app, "accounts", archive=lake))
    assert stored(bank, live.new.bucket) == right
    assert (done.record.events, done.record.unreadable) == (live.record.events, live.record.unreadable)
    found = ask(server, lambda js: verify(js, app, "accounts", engine=engine))
    by_live = ask(server, lambda js: verify(js, app, "accounts", archive=lake))
    assert found.is_equal
    assert (found.digest, found.events, found.boundary) == (by_live.digest, by_live.events, by_live.boundary)
    request = ReplayRequest(from_seq=300)
    plan = ask(server, lambda js: plan_replay(js, app, "accounts", request, engine=engine))
    assert plan.to_dict() == ask(server, lambda js: plan_replay(js, app, "accounts", request, archive=lake)).to_dict()


def test_states_of_any_time_are_folded_from_both(
    spark: SparkSession, server: NatsServer, bank: JetStream, lake: str
) -> None:
    def at(last: int | None, **options: Any) -> Any:
        rows = fold_states(app, spark, server.url, projections=["totals"], to_sequence=last, **options).collect()
        return {row.key: (bytes(row.value), row.sequence) for row in rows}

    before = {last: at(last) for last in (200, 900, COUNT)}
    moments = {last: bank.stream("BANK").get_message(last + 1).timestamp for last in (200, 900)}
    archive_stream(bank, lake, "BANK", until=801, files=2)
    bank.stream("BANK").purge(up_to_sequence=750)
    for last, states in before.items():
        assert at(last, archive=lake) == states
    for last, moment in moments.items():
        assert at(None, archive=lake, until=moment) == before[last]
    assert at(None, until=moments[900]) == at(900)  # of the stream alone
    with pytest.raises(ConfigError, match="no to_sequence beside it"):
        at(5, until=moments[200])


def test_a_stream_of_projections_begins_in_the_archive(
    spark: SparkSession, server: NatsServer, bank: JetStream, lake: str
) -> None:
    right = folded(bank, "accounts")
    archive_stream(bank, lake, "BANK", until=801, files=2)
    bank.stream("BANK").purge(up_to_sequence=700)
    query = run(
        app,
        spark,
        server.url,
        projections=["accounts"],
        until_now=True,
        archive=lake,
        maxOffsetsPerTrigger=500,
        partitions=2,
    )
    assert query.awaitTermination(200)
    assert query.exception() is None
    assert stored(bank, "accounts") == right


def test_a_range_of_a_backfill_comes_from_both(
    spark: SparkSession, server: NatsServer, bank: JetStream, lake: str
) -> None:
    right = folded(bank, "accounts")
    archive_stream(bank, lake, "BANK", until=801, files=2)
    bank.stream("BANK").purge(up_to_sequence=700)
    first = backfill(app, spark, server.url, projections=["accounts"], to_sequence=400, archive=lake)
    assert (first.from_sequence, first.to_sequence) == (1, 400)
    rest = backfill(app, spark, server.url, projections=["accounts"], from_sequence=401, archive=lake)
    assert (rest.from_sequence, rest.to_sequence) == (401, COUNT)
    assert stored(bank, "accounts") == right


def test_replaced_states_are_no_lost_events_in_an_archive_either(
    spark: SparkSession, server: NatsServer, js: JetStream, lake: str
) -> None:
    """Neither before the archive begins, nor behind its end after a trim."""
    asyncio.run(mixed.app.apply(server.url))
    engine = ReplayEngine(mixed.app, spark, server.url, projection="sums", archive=lake)

    async def change(*cents: int) -> None:
        async with mixed.app.connect(server.url) as client:
            await mixed.touch(client, "a", 3)
            await mixed.pay(client, "a", *cents)
            await mixed.touch(client, "a", 3)

    asyncio.run(change(1, 2))
    backfill(mixed.app, spark, server.url, projections=["sums"])
    end = archive_stream(js, lake, "KV_mixed", files=2)
    js.stream("KV_mixed").purge(up_to_sequence=end - 1)
    asyncio.run(change(3))
    assert js.stream("KV_mixed").info().state.first_sequence > end
    query = run(mixed.app, spark, server.url, projections=["sums"], until_now=True, archive=lake, partitions=1)
    assert query.awaitTermination(200)
    assert ask(server, lambda js: verify(js, mixed.app, "sums", engine=engine)).is_equal
    done = ask(server, lambda js: rebuild(js, mixed.app, "sums", RebuildOptions(check=True), engine=engine))
    assert (done.record.events, done.verification is not None) == (3, True)
