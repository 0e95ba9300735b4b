"""What docs/spark-sink.md says that a user of the sink needs is enough."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.names import new_stream
from support.permissions import ExactServer, Rights

from jetspark.blocking import connect

pytest.importorskip("pyspark")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "spark-sink.md"


@pytest.fixture(scope="module")
def exact() -> Iterator[ExactServer]:
    with ExactServer() as server:
        yield server


def rights_of(stream: str) -> list[str]:
    """Every subject in the page's table of permissions."""
    table = PAGE.read_text().split("| Permission | Needed for |\n")[1].split("\n\n")[0]
    found = [each for each in re.findall(r"`([^`]+)`", table) if each.startswith("$")]
    return [each.replace("<stream>", stream).replace("<ledgerBucket>", "jetspark_ledger") for each in found]


@pytest.mark.parametrize(("mode", "count"), [("fast", 15_000), ("async", 15_000), ("atomic", 900)])
def test_a_write_that_failed_half_way_is_finished_with_the_rights_of_the_page_alone(
    spark: SparkSession, exact: ExactServer, mode: str, count: int
) -> None:
    """With a ledger that is made, rows that are found in the stream, and a second time with the ledger alone."""
    account = exact.new_account()
    with connect(exact.url_of(account)) as nc:
        stream = new_stream(nc.jetstream(), duplicate_window_s=1.0)
        rights = Rights((f"{stream.name}.x", *rights_of(stream.name)), ("_INBOX.>",))
        [user] = exact.new_users(account, [rights])
        options = {
            "servers": exact.url,
            "user": user,
            "password": "test",
            "subject": f"{stream.name}.x",
            "writeId": f"job-{stream.name}",
            "publishMode": mode,
        }
        rows, written, wrong = spark.range(0, count, 1, 1), "cast(id as string) data", count * 4 // 5

        def write(expression: str) -> None:
            rows.selectExpr(expression).write.format("jetstream").mode("append").options(**options).save()

        with pytest.raises(Exception, match=f"row {wrong} of partition 0: data is null"):
            write(f"if(id = {wrong}, null, cast(id as string)) data")
        time.sleep(1.2)  # the stream has forgotten the ids
        write(written)
        write(written)
        assert stream.info().state.messages == count
