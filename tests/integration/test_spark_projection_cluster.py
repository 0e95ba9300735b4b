"""Projections on Spark with three nodes of nats-server, whose leaders die: replicas answer, and some are behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import pytest
from support import projected
from support.projected import app, folded, stored

import jetspark
from jetspark import StreamConfig
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.state_header import position_key
from jetspark.app.replay import verify
from jetspark.blocking import JetStream, connect
from jetspark.errors import JetSparkError, KeyNotFound
from jetspark.server import NatsCluster

pytest.importorskip("pyspark")

from jetspark.spark import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EVENTS = int(os.environ.get("JETSPARK_MANY_EVENTS", "3000"))
PORTIONS = 6
NAMES = ["accounts", "totals", "recent"]
STREAMS = [app.stream, *(f"KV_{each}" for each in NAMES)]

T = TypeVar("T")


def patiently(ask: Callable[[], T]) -> T:
    """While nodes come and go."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return ask()
        except JetSparkError as error:
            if not error.may_pass or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def replicate(js: JetStream) -> None:
    """The stream and the buckets on all three nodes."""
    for name in STREAMS:
        patiently(partial(js.update_stream, StreamConfig(name=name, replicas=3)))
    for name in STREAMS:
        stream = patiently(partial(js.stream, name))
        while True:
            cluster = patiently(stream.info).cluster
            if cluster is not None and [each.get("current") for each in cluster.replicas] == [True, True]:
                break
            time.sleep(0.1)


def kill_leader(cluster: NatsCluster, js: JetStream, name: str) -> None:
    while True:
        info = patiently(patiently(partial(js.stream, name)).info)
        if info.cluster is not None and info.cluster.leader:
            break
        time.sleep(0.1)
    leader = info.cluster.leader
    [node] = [each for each in cluster.nodes if each.config.server_name == leader]
    node.kill()
    time.sleep(0.5)
    node.start()
    cluster.wait_until_ready()


def position(js: JetStream) -> int:
    try:
        return min(FoldPosition.decode(js.kv(name).get(position_key()).value).sequence for name in NAMES)
    except KeyNotFound:
        return 0


async def verified(urls: list[str]) -> dict[str, bool]:
    async with jetspark.connect(urls) as client:
        js = client.jetstream(timeout=30.0)
        return {name: (await verify(js, app, name)).is_equal for name in NAMES}


def test_a_fold_on_spark_under_changes_of_leaders_is_the_fold_of_its_history(spark: SparkSession) -> None:
    with NatsCluster(3) as cluster, connect(cluster.urls, reconnect_wait_s=0.05) as client:
        js = client.jetstream(timeout=10.0)
        patiently(lambda: projected.fresh(cluster.urls, js))
        replicate(js)
        history = projected.messages(EVENTS)
        query = run(app, spark, cluster.urls, maxOffsetsPerTrigger=EVENTS // 10)
        try:
            for name in (None, "KV_accounts", app.stream, None, "KV_accounts", "KV_totals"):
                before = patiently(lambda: js.stream(app.stream).info()).state.last_sequence
                # By fast ingest with ids, which repeats nothing and loses nothing when a leader dies.
                with js.fast_publisher(message_ids=True) as publisher:
                    for subject, data, headers in islice(history, EVENTS // PORTIONS):
                        publisher.publish(subject, data, headers=headers)
                if name is not None:
                    kill_leader(cluster, js, name)
                while patiently(lambda: position(js)) <= before:
                    assert query.isActive, query.exception()
                    time.sleep(0.1)
            last = patiently(lambda: js.stream(app.stream).info()).state.last_sequence
            while patiently(lambda: position(js)) < last:
                assert query.isActive, query.exception()
                time.sleep(0.1)
        finally:
            query.stop()
        assert last == EVENTS
        for name in NAMES:
            assert patiently(lambda name=name: stored(js, name)) == folded(js, name)  # type: ignore[misc]
        assert asyncio.run(verified(cluster.urls)) == dict.fromkeys(NAMES, True)
        assert js.stream(app.spec.dead_letter_stream).info().state.messages == 3
