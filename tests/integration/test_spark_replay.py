"""Replays and rebuilds that Spark folds: the same plans, records and bytes as those of the live engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from support import mixed, projected
from support.projected import Opened, app, folded, publish, stored

import jetspark
from jetspark.aio.jetstream import JetStream as AsyncJetStream
from jetspark.app import encode
from jetspark.app.clock import utc_now
from jetspark.app.extents import Extent
from jetspark.app.replay import (
    RebuildOptions,
    ReplayOptions,
    ReplayRequest,
    VerifyOptions,
    plan_replay,
    projection_rebuild,
    rebuild,
    run_replay,
    verify,
)
from jetspark.app.replay.history import RangeFold
from jetspark.app.replay.live_bucket import stored_position
from jetspark.blocking import JetStream, connect
from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import ConfigError, ConnectionLost, DataLoss, StreamNotFound
from jetspark.server import NatsServer
from jetspark.state.changes import Change
from jetspark.state.store import load, store

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from jetspark.spark import ReplayEngine, backfill, connections, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.timeout(600)]

T = TypeVar("T")


@pytest.fixture
def bank(server: NatsServer, js: JetStream) -> JetStream:
    """With an empty stream and empty buckets."""
    for name in ("KV_accounts_v1", "KV_accounts_v1_r1"):
        with suppress(StreamNotFound):
            js.delete_stream(name)
    return projected.fresh(server.url, js)


@pytest.fixture
def engine(spark: SparkSession, server: NatsServer) -> ReplayEngine:
    return ReplayEngine(app, spark, server.url, projection="accounts")


def ask(server: NatsServer, work: Callable[[AsyncJetStream], Awaitable[T]]) -> T:
    async def run() -> T:
        async with jetspark.connect(server.url) as client:
            return await work(client.jetstream())

    return asyncio.run(run())


def damage(js: JetStream) -> list[str]:
    """Lose one key, and set one back to the middle of its history; returns both."""
    right, early = stored(js, "accounts"), folded(js, "accounts", last=300)
    is_healthy = {key for key, (value, _, mark) in right.items() if value is not None and "parked" not in (mark or "")}
    lost, behind = sorted(is_healthy & {key for key, (value, _, _) in early.items() if value is not None})[:2]
    js.stream("KV_accounts").purge(subject=f"$KV.accounts.{lost}")
    value, sequence, mark = early[behind]
    revision = ProcedureRunner(js).run(load("accounts", [behind]))[behind].revision
    change = Change(behind, value or b"", "put", sequence, revision, mark=mark)
    ProcedureRunner(js).run(store("accounts", [change]))
    return [lost, behind]


def test_a_replay_on_spark_plans_and_stores_what_the_live_engine_does(
    spark: SparkSession, server: NatsServer, bank: JetStream, engine: ReplayEngine
) -> None:
    publish(bank, projected.messages(1_200))
    backfill(app, spark, server.url, projections=["accounts"])
    right = stored(bank, "accounts")
    assert right == folded(bank, "accounts")
    damaged = damage(bank)
    for request in (ReplayRequest(from_seq=900), ReplayRequest(from_seq=900, subject="bank.*.moved")):
        live = ask(server, lambda js, it=request: plan_replay(js, app, "accounts", it))  # type: ignore[misc]
        plan = ask(server, lambda js, it=request: plan_replay(js, app, "accounts", it, engine=engine))  # type: ignore[misc]
        assert (plan.to_dict(), plan.last_of, plan.behind) == (live.to_dict(), live.last_of, live.behind)
        assert (set(plan.behind), plan.unreadable > 0) == (set(damaged), True)
    done = ask(server, lambda js: run_replay(js, app, "accounts", ReplayRequest(from_seq=900), engine=engine))
    assert (done.changed, done.status, done.events) == (2, "done", done.events)
    assert stored(bank, "accounts") == right
    again = ask(server, lambda js: run_replay(js, app, "accounts", engine=engine))
    assert (again.changed, again.last, again.events > done.events) == (0, 1_200, True)
    with pytest.raises(ConfigError, match=r"subject='bank.a1.>': Spark reads it only"):
        ask(server, lambda js: plan_replay(js, app, "accounts", ReplayRequest(subject="bank.a1.>"), engine=engine))
    with pytest.raises(ConfigError, match="rate=5 is not supported with engine="):
        ask(server, lambda js: run_replay(js, app, "accounts", options=ReplayOptions(rate=5), engine=engine))


class Interrupted:
    """An engine that loses its connection after some ranges."""

    def __init__(self, engine: ReplayEngine, ranges: int) -> None:
        self._engine, self._left = engine, ranges
        self.compare, self.survey, self.fold_on = engine.compare, engine.survey, engine.fold_on
        self.archive = engine.archive

    async def fold_into(self, bucket: str, part: Extent) -> RangeFold:
        if not self._left:
            raise ConnectionLost("cut")
        self._left -= 1
        return await self._engine.fold_into(bucket, part)


def test_a_rebuild_on_spark_goes_on_where_it_was_cut_is_checked_and_swapped(
    server: NatsServer, bank: JetStream, engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(bank, projected.messages(1_200))
    by_live = ask(server, lambda js: rebuild(js, app, "accounts"))
    monkeypatch.setattr(projection_rebuild, "ENGINE_RANGE", 500)
    with pytest.raises(ConnectionLost):
        ask(server, lambda js: rebuild(js, app, "accounts", engine=Interrupted(engine, 1)))
    [cut] = [each for each in records(server) if each["status"] == "running"]
    assert (cut["at"], cut["bucket"]) == (500, "accounts_v1_r1")
    publish(bank, projected.messages(100, seed=2, unreadable=0))
    resumed = RebuildOptions(check=True, swap=True, resume=cut["id"])
    outcome = ask(server, lambda js: rebuild(js, app, "accounts", resumed, engine=engine))
    assert (outcome.is_swapped, outcome.new.bucket) == (True, "accounts_v1_r1")
    assert outcome.verification is not None
    assert outcome.verification.is_equal
    assert stored(bank, "accounts_v1_r1") == folded(bank, "accounts")
    by_live = ask(server, lambda js: rebuild(js, app, "accounts", RebuildOptions(resume=by_live.record.id)))
    names = ("events", "unreadable", "parked", "keys", "at")
    counts, found = by_live.record.to_dict(), outcome.record.to_dict()
    assert {name: found[name] for name in names} == {name: counts[name] for name in names}
    assert found["parked"] > 0
    assert stored(bank, by_live.new.bucket) == stored(bank, outcome.new.bucket)
    assert ask(server, lambda js: verify(js, app, "accounts", engine=engine)).is_equal


def records(server: NatsServer) -> list[dict[str, Any]]:
    from jetspark.app.projections.bucket_refs import open_records
    from jetspark.app.replay import read_records

    async def read(js: AsyncJetStream) -> list[dict[str, Any]]:
        return [each.to_dict() for each in await read_records(await open_records(js, app.name))]

    return ask(server, read)


def both_verify(server: NatsServer, engine: ReplayEngine) -> dict[str, Any]:
    """What the live engine and Spark say, which is the same to the last byte."""
    live = ask(server, lambda js: verify(js, app, "accounts"))
    found = ask(server, lambda js: verify(js, app, "accounts", engine=engine))
    assert found.to_dict() == live.to_dict()
    assert str(found) == str(live)
    return found.to_dict()


def test_spark_verifies_key_by_key_what_the_live_engine_does(
    spark: SparkSession, server: NatsServer, bank: JetStream, engine: ReplayEngine
) -> None:
    publish(bank, projected.messages(1_200))
    backfill(app, spark, server.url, projections=["accounts"])
    right = both_verify(server, engine)
    assert (right["equal"], right["digest"], right["unreadable"]) == (True, right["expected_digest"], 3)
    assert right["parked"] == len(right["parked_keys"]) > 0
    states = {key: each for key, each in stored(bank, "accounts").items() if "parked" not in (each[2] or "")}
    deleted = sorted(key for key, (value, _, _) in states.items() if value is None)
    live = sorted(states.keys() - set(deleted))
    assert deleted
    damages: dict[str, tuple[str, str]] = {
        live[0]: ("missing", ""),
        live[1]: ("value", "put"),
        live[2]: ("sequence", "put"),
        live[3]: ("foreign", ""),
        live[4]: ("missing", "delete"),
        deleted[0]: ("sequence", "delete"),  # the tombstone of another event
        "nobody": ("extra", "put"),
    }
    revisions = ProcedureRunner(bank).run(load("accounts", damages))
    bank.stream("KV_accounts").purge(subject=f"$KV.accounts.{live[0]}")
    bank.kv("accounts").put(live[3], b"{}")
    for key, (kind, operation) in damages.items():
        if operation:
            value, sequence, mark = states.get(key, (b"{}", 7, "1"))
            wrong = b"{}" if kind in ("value", "extra") else value or b""
            revision = revisions[key].revision if key in revisions else 0
            change = Change(key, wrong, operation, sequence - (kind == "sequence"), revision, mark=mark)  # type: ignore[arg-type]
            assert not ProcedureRunner(bank).run(store("accounts", [change])).conflicts
    found = both_verify(server, engine)
    assert {each["key"]: each["kind"] for each in found["differences"]} == {
        key: kind for key, (kind, _) in damages.items()
    }
    assert (found["equal"], found["difference_count"]) == (False, len(damages))
    assert (found["digest"] == right["digest"], found["expected_digest"]) == (False, right["digest"])


def test_values_beyond_what_spark_has_read_are_compared_at_their_own_events(
    spark: SparkSession,
    server: NatsServer,
    bank: JetStream,
    engine: ReplayEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when events come, and are folded by a live worker, after Spark has planned what it reads."""
    from jetspark.spark.engine import comparison
    from jetspark.spark.engine.reached_positions import whole_head

    publish(bank, projected.messages(600))
    backfill(app, spark, server.url, projections=["accounts"])
    monkeypatch.setattr(comparison, "whole_head", lambda *given: dataclasses.replace(whole_head(*given), next=401))
    live = ask(server, lambda js: verify(js, app, "accounts", VerifyOptions(to_seq=300)))
    found = ask(server, lambda js: verify(js, app, "accounts", VerifyOptions(to_seq=300), engine=engine))
    assert (found.to_dict(), found.is_equal, found.boundary) == (live.to_dict(), True, 300)
    [key, *_] = damage(bank)
    live = ask(server, lambda js: verify(js, app, "accounts", VerifyOptions(to_seq=300)))
    found = ask(server, lambda js: verify(js, app, "accounts", VerifyOptions(to_seq=300), engine=engine))
    assert found.to_dict() == live.to_dict()
    assert key in {each.key for each in found.differences}


def test_of_many_differences_the_first_are_named_and_all_are_counted(
    spark: SparkSession, server: NatsServer, bank: JetStream, engine: ReplayEngine
) -> None:
    publish(bank, projected.messages(1_500, accounts=1_200))
    backfill(app, spark, server.url, projections=["accounts"])
    held = len([each for each in stored(bank, "accounts").values() if each[0] is not None or "parked" in each[2]])  # type: ignore[operator]
    bank.stream("KV_accounts").purge(subject="$KV.accounts.*")
    found = both_verify(server, engine)
    assert (found["difference_count"], len(found["differences"]), found["keys"]) == (held, 1_000, 0)
    assert str(ask(server, lambda js: verify(js, app, "accounts", engine=engine))).endswith(
        f"{held} keys differ from its history; the first 1000 are listed"
    )


def test_a_history_without_its_beginning_is_data_loss_before_spark_reads(
    server: NatsServer, bank: JetStream, engine: ReplayEngine
) -> None:
    publish(bank, projected.messages(200))
    bank.stream(app.stream).purge(up_to_sequence=49)
    for work in (rebuild, run_replay):
        with pytest.raises(DataLoss):
            ask(server, lambda js, it=work: it(js, app, "accounts", engine=engine))  # type: ignore[misc]


def test_a_state_that_is_larger_than_the_server_takes_parks_its_key_on_every_engine(
    spark: SparkSession, tmp_path: Path
) -> None:
    def events() -> Iterator[tuple[str, bytes, Any]]:
        for number, size in enumerate((10, 6_000, 10)):
            yield encode(
                Opened(account=f"a{number}", owner="x" * size), id=f"e{number}", source="/bank", time=utc_now()
            )

    found = list[dict[str, Any]]()
    with NatsServer(max_payload_bytes=8192) as small, connect(small.url) as client:
        engine = ReplayEngine(app, spark, small.url, projection="accounts")
        for way in ("live", "backfill", "stream"):
            js = projected.fresh(small.url, client.jetstream())
            publish(js, events())
            if way == "live":
                ask(small, lambda live: run_replay(live, app, "accounts"))
            elif way == "backfill":
                backfill(app, spark, small.url, projections=["accounts"])
            else:
                run(app, spark, small.url, checkpoint=str(tmp_path), until_now=True).awaitTermination()
            found.append(stored(js, "accounts"))
            for each in (None, engine):
                verified = ask(small, partial(verify, app=app, projection="accounts", engine=each))
                assert (verified.is_equal, verified.parked) == (True, 1), (way, each)
        # The driver's own connection ends before its server does: what is unconfirmed then would be an error.
        connections._kept.popitem()[1].close()
    parked = [key for key, (_, _, mark) in found[0].items() if "parked 2 StateTooLarge" in (mark or "")]
    assert parked == ["a1"]
    assert found[0] == found[1] == found[2]


def test_states_that_replace_each_other_are_no_lost_events_on_spark(spark: SparkSession, server: NatsServer) -> None:
    asyncio.run(mixed.app.apply(server.url))
    engine = ReplayEngine(mixed.app, spark, server.url, projection="sums")

    async def change(*cents: int) -> None:
        async with mixed.app.connect(server.url) as client:
            await mixed.touch(client, "a", 3)
            await mixed.pay(client, "a", *cents)
            await mixed.touch(client, "a", 3)

    async def check_all(js: AsyncJetStream) -> None:
        assert (await verify(js, mixed.app, "sums", engine=engine)).is_equal
        assert (await run_replay(js, mixed.app, "sums", engine=engine)).events == 5
        outcome = await rebuild(js, mixed.app, "sums", RebuildOptions(check=True), engine=engine)
        assert outcome.verification is not None
        assert outcome.verification.is_equal

    asyncio.run(change(1, 2))
    assert backfill(mixed.app, spark, server.url).applied == 2
    for cents in (3, 4):  # each begins behind its position, where nothing is left
        asyncio.run(change(cents))
        assert backfill(mixed.app, spark, server.url, from_sequence=position_of(server)).applied == 1
    asyncio.run(change(5))
    run(mixed.app, spark, server.url, until_now=True).awaitTermination()
    ask(server, check_all)


def position_of(server: NatsServer) -> int:
    async def read(js: AsyncJetStream) -> int:
        return ((await stored_position(js, "mixed_sums")).sequence or 0) + 1

    return ask(server, read)


def test_a_rebuild_on_spark_begins_with_the_states_of_a_bucket_where_the_first_events_are_gone(
    spark: SparkSession, server: NatsServer, bank: JetStream, engine: ReplayEngine
) -> None:
    publish(bank, projected.messages(800))
    backfill(app, spark, server.url, projections=["accounts"])
    publish(bank, projected.messages(200, seed=2, unreadable=0))
    right = folded(bank, "accounts")
    snapshot = ask(server, lambda js: rebuild(js, app, "accounts", RebuildOptions(from_bucket="accounts"))).new.bucket
    is_parked = [each for each in right.values() if "parked" in (each[2] or "")]
    bank.stream("BANK").purge(up_to_sequence=700)
    built = ask(server, lambda js: rebuild(js, app, "accounts", RebuildOptions(from_bucket="accounts"), engine=engine))
    assert built.record.base == "accounts"
    assert len(is_parked) >= built.record.parked
    assert stored(bank, built.new.bucket) == stored(bank, snapshot) == right
