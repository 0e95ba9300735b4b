"""What users of ``jetspark.spark`` see."""

from __future__ import annotations

from typing import assert_type

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from jetspark.app import App
from jetspark.spark import ReplayEngine, backfill, run, what_if


def options(app: App, spark: SparkSession) -> None:
    assert_type(run(app, spark, credentialsFile="me.creds", maxOffsetsPerTrigger=1000), StreamingQuery)
    run(app, spark, maxOffsetPerTrigger=1000)  # type: ignore[call-arg]
    backfill(app, spark, failOnDataLoss=False)
    backfill(app, spark, failOnDataLoss=3.5)  # type: ignore[arg-type]
    what_if(app, spark, workflow="fulfilment", code="new.py", tokenEnv="TOKEN")
    what_if(app, spark, workflow="fulfilment", code="new.py", tokenenv="TOKEN")  # type: ignore[call-arg]
    ReplayEngine(app, spark, projection="totals", maxKeys=10)
    ReplayEngine(app, spark, projection="totals", max_keys=10)  # type: ignore[call-arg]
