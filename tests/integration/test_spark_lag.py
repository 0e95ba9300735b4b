"""The lag of projections that Spark folds, and of a query by its checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import projected
from support.projected import app, publish

import jetspark
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.lag import LagReport, checkpoint_readers, lag
from jetspark.blocking import JetStream
from jetspark.core.subjects import matches
from jetspark.server import NatsServer

pytest.importorskip("pyspark")

from jetspark.spark import lag as query_lag
from jetspark.spark import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.timeout(600)]


def measure(url: str, folder: Path) -> LagReport:
    async def work() -> LagReport:
        async with jetspark.connect(url) as client:
            return await lag(client.jetstream(), app, readers=checkpoint_readers(folder, name="query"))

    return asyncio.run(work())


def test_the_lag_of_a_query_and_of_its_projections_is_what_came_after_it(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    projected.fresh(server.url, js)
    publish(js, projected.messages(200))
    query = run(app, spark, server.url, checkpoint=str(tmp_path), until_now=True, partitions=1)
    query.awaitTermination()
    report = measure(server.url, tmp_path)
    assert {row.messages for row in report.rows} == {0}

    last = js.stream(app.stream).info().state.last_sequence
    publish(js, projected.messages(50, seed=2, unreadable=0))
    js.stream(app.stream).delete_message(last + 1)
    report = measure(server.url, tmp_path)
    after = [message.subject for message in js.stream(app.stream).get_messages(last + 1)]
    assert len(after) == 49
    for name, spec in app.projections.items():
        filters = [contract_of(kind).subject.filter for kind in spec.events]
        wanted = sum(any(matches(each, subject) for each in filters) for subject in after)
        assert report.row(name, "projection").messages == wanted > 0
    # The query reads the subjects of all projections together.
    [reader] = checkpoint_readers(tmp_path)
    row = report.row("query", "spark")
    assert row.messages == sum(any(matches(each, subject) for each in reader.filters or (">",)) for subject in after)
    by_progress = query_lag(query.recentProgress[-1], js)[app.stream]
    assert by_progress.messages == 50  # which counts sequences
    assert 0 < (row.seconds or 0) <= by_progress.seconds  # which was measured later
