"""What users of ``jetspark.spark`` see."""

from __future__ import annotations

from typing import assert_type

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from jetspark.app import App, Event
from jetspark.spark import ReplayEngine, backfill, run, what_if, write_events


def options(app: App, spark: SparkSession) -> None:
    assert_type(run(app, spark, credentialsFile="me.creds", maxOffsetsPerTrigger=1000), StreamingQuery)
    run(app, spark, maxOffsetPerTrigger=1000)  # type: ignore[call-arg]
    backfill(app, spark, failOnDataLoss=False)
    backfill(app, spark, failOnDataLoss=3.5)  # type: ignore[arg-type]
    what_if(app, spark, workflow="fulfilment", code="new.py", tokenEnv="TOKEN")
    what_if(app, spark, workflow="fulfilment", code="new.py", tokenenv="TOKEN")  # type: ignore[call-arg]
    ReplayEngine(app, spark, projection="totals", maxKeys=10)
    ReplayEngine(app, spark, projection="totals", max_keys=10)  # type: ignore[call-arg]


def writes(app: App, frame: DataFrame, kind: type[Event]) -> None:
    assert_type(write_events(frame, app, kind, checkpoint="/data", until_now=True), StreamingQuery)
    write_events(frame, app, kind, invalid="dead_letter", maxPendingBytes="1m")
    write_events(frame, app, kind).stop()  # type: ignore[attr-defined]
    write_events(frame, app, kind, until_now=True)  # type: ignore[call-overload]
    write_events(frame, app, kind, id_column="id")  # type: ignore[call-overload]
