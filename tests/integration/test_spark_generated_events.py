"""Events of generated contracts: written from Spark, they are the same events in the stream, on Spark, and for live
handlers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from support.apps import running, until
from support.generated_contracts import generated
from support.seeds import again, tried

from jetspark.app.columns import EventColumns
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.contracts.envelope import read_event
from jetspark.server import NatsServer

pytest.importorskip("pyspark")
import pyarrow as pa

from jetspark.spark import events, write_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", tried(range(3), 2))
def test_events_of_any_contract_are_equal_on_every_way(seed: int, server: NatsServer, spark: SparkSession) -> None:
    app, kind, made, handled = generated(seed)
    columns = EventColumns(contract_of(kind))
    arrays, faults = columns.to_arrow(made)
    assert faults == {}
    where = f"support.generated_contracts:app_{seed}"

    async def live() -> None:
        await app.apply(server.url)
        frame = spark.createDataFrame(pa.Table.from_arrays(arrays, schema=columns.schema)).repartition(2)
        await asyncio.to_thread(lambda: write_events(frame, where, kind, servers=server.url))
        async with app.connect(server.url) as client:
            stream = await client.js.stream(app.stream)
            stored = [
                read_event(each.subject, each.data, None, app.catalogue)[2] async for each in stream.get_messages()
            ]
        assert sorted(stored, key=_number) == made, again(seed)
        async with running(app, server.url):
            await until(lambda: len(handled) >= len(made))

    asyncio.run(live())
    assert sorted(handled, key=_number) == made, again(seed)
    table = events(spark, where, kind, servers=server.url).drop("_event").toArrow().sort_by("number")
    [batch] = table.combine_chunks().to_batches()
    assert columns.from_arrow(batch) == (made, {}), again(seed)


def _number(event: Any) -> int:
    return int(event.number)
