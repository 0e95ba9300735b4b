"""The permissions that the pages of the Spark formats list are enough; an error names one that is missing."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from support.names import new_stream
from support.permissions import ExactServer, Rights

from jetspark import KVConfig, StreamConfig
from jetspark.blocking import JetStream, connect

pytest.importorskip("pyspark")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def exact() -> Iterator[ExactServer]:
    with ExactServer() as server:
        yield server


def table(page: str, head: str) -> list[str]:
    """The lines of a page's table of permissions."""
    return (DOCS / page).read_text().split(f"{head}\n|---|---|\n")[1].split("\n\n")[0].splitlines()


def subjects(text: str, **names: str) -> tuple[str, ...]:
    """Every subject in some lines of a table, with these names."""
    found = [each for each in re.findall(r"`([^`]+)`", text) if each.startswith("$")]
    return tuple(re.sub(r"<(\w+)>", lambda name: names[name[1]], each) for each in found)


def rights_of(stream: str) -> tuple[str, ...]:
    lines = table("spark-sink.md", "| Permission | Needed for |")
    return subjects("\n".join(lines), stream=stream, ledgerBucket="jetspark_ledger")


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


# ---- reads, and the bucket's writes ----------------------------------------------------------------------------------


def rows_of(page: tuple[str, str]) -> dict[str, str]:
    return dict(line.strip("| ").split(" | ") for line in table(*page))


SOURCE, BUCKETS = ("spark-source.md", "| Read | Permissions |"), ("spark-kv.md", "| Read or write | Permissions |")
STREAM = "each stream, in batches or as a query; `lag`"
QUEUE = "each stream with work-queue or interest retention"
PATTERN = "`streamPattern`, in addition"
MANY = "more than ten names in `stream`, as a query, in addition"
TABLE = "a table"
CHANGES = "a table with `history` or `asOf`; a stream of changes"
UNGUARDED, GUARDED = "write with `guard=none`", "write with another `guard`"


@dataclass(frozen=True)
class Use:
    """A read or a write, the rows of its permissions, and those that it may do without."""

    page: tuple[str, str]
    rows: tuple[str, ...]
    how: str
    options: dict[str, str]
    spared: tuple[str, ...] = ()

    @property
    def streams(self) -> list[str]:
        return self.options.get("stream", "S").split(",")

    def rights(self) -> Rights:
        cells = rows_of(self.page)
        found = [
            each
            for row in self.rows
            for stream in self.streams
            for each in subjects(cells[row], stream=stream, bucket="B")
        ]
        return Rights(tuple(dict.fromkeys(found)), ("_INBOX.>",))

    def prepare(self, js: JetStream) -> None:
        """Store messages, the last one on a subject or key that reads leave out: ranges end with a gap."""
        retention: Literal["workqueue", "limits"] = "workqueue" if QUEUE in self.rows else "limits"
        for name in self.streams:
            config = StreamConfig(name=name, subjects=[f"{name}.*"], retention=retention, allow_direct=True)
            js.create_stream(config)
            for number in range(10):
                js.publish(f"{name}.{number % 2}", b"x")
        bucket = js.create_kv(KVConfig(bucket="B", history=5))
        for number in range(20):
            bucket.put(f"k{number % 4}", b"x")

    def run(self, spark: SparkSession, ways: dict[str, str]) -> None:
        name = "jetstream" if self.page == SOURCE else "jetstream_kv"
        if self.how == "write":
            rows = spark.range(0, 20, 1, 1).selectExpr("concat('n', id) key", "'v' value", "id + 1 sequence")
            rows = rows if "guard" in self.options else rows.drop("sequence")
            rows.write.format(name).mode("append").options(**ways, **self.options).save()
        elif self.how == "batch":
            assert spark.read.format(name).options(**ways, **self.options).load().count() > 0
        else:
            frame = spark.readStream.format(name).options(**ways, **self.options).load()
            with tempfile.TemporaryDirectory() as folder:
                start = frame.writeStream.format("noop").option("checkpointLocation", folder)
                start.trigger(availableNow=True).start().awaitTermination()


LEADER = "$JS.API.STREAM.MSG.GET"
LIST = "$JS.API.STREAM.LIST"
# Of reads of buckets: the server deletes their consumers by itself.
DELETE = ("$JS.API.CONSUMER.DELETE",)
USES = {
    "batch": Use(SOURCE, (STREAM,), "batch", {"stream": "S", "subjects": "S.0"}),
    "batch between times": Use(
        SOURCE, (STREAM,), "batch", {"stream": "S", "startingTimestamp": "0", "endingTimestamp": "2100-01-01"}
    ),
    "query": Use(SOURCE, (STREAM,), "query", {"stream": "S", "subjects": "S.0", "startingOffsets": "earliest"}),
    "query of many streams": Use(
        SOURCE, (STREAM, MANY), "query", {"stream": ",".join(f"S{n}" for n in range(11))}, (LIST,)
    ),
    "work queue": Use(SOURCE, (QUEUE,), "batch", {"stream": "S", "subjects": "S.0"}),
    "batch of a pattern": Use(SOURCE, (STREAM, PATTERN), "batch", {"streamPattern": "S", "subjects": "S.0"}, (LIST,)),
    "query of a pattern": Use(
        SOURCE, (STREAM, PATTERN), "query", {"streamPattern": "S", "subjects": "S.0", "startingOffsets": "earliest"}
    ),
    "table": Use(BUCKETS, (TABLE,), "batch", {"bucket": "B"}, DELETE),
    "table by two tasks": Use(BUCKETS, (TABLE,), "batch", {"bucket": "B", "numPartitions": "2"}, DELETE),
    "history": Use(BUCKETS, (CHANGES,), "batch", {"bucket": "B", "keys": "k0", "history": "true"}, DELETE),
    "table of the past": Use(BUCKETS, (CHANGES,), "batch", {"bucket": "B", "keys": "k0", "asOf": "19"}, DELETE),
    "changes": Use(BUCKETS, (CHANGES,), "query", {"bucket": "B", "maxOffsetsPerTrigger": "5"}, DELETE),
    "write": Use(BUCKETS, (UNGUARDED,), "write", {"bucket": "B"}),
    "write of what is newer": Use(BUCKETS, (GUARDED,), "write", {"bucket": "B", "guard": "sequence"}, (LEADER,)),
}


def test_every_row_of_the_pages_is_used() -> None:
    for page in (SOURCE, BUCKETS):
        assert rows_of(page).keys() == {row for use in USES.values() if use.page == page for row in use.rows}


def ways(exact: ExactServer, user: str) -> dict[str, str]:
    return {"servers": exact.url, "user": user, "password": "test"}


@pytest.mark.parametrize("name", USES)
def test_the_permissions_of_a_page_are_enough(spark: SparkSession, exact: ExactServer, name: str) -> None:
    use, account = USES[name], exact.new_account()
    with connect(exact.url_of(account)) as nc:
        use.prepare(nc.jetstream())
    [user] = exact.new_users(account, [use.rights()])
    use.run(spark, ways(exact, user))


@pytest.mark.parametrize("name", [name for name in USES if name != "query of many streams"])
def test_a_missing_permission_is_named(spark: SparkSession, exact: ExactServer, name: str) -> None:
    use, account = USES[name], exact.new_account()
    with connect(exact.url_of(account)) as nc:
        use.prepare(nc.jetstream())
    removed = [
        each
        for each in use.rights().each_removed()
        if each.operation == "publish" and not each.subject.startswith(use.spared)
    ]
    users = exact.new_users(account, [each.rest for each in removed])
    for each, user in zip(removed, users, strict=True):
        subject = re.escape(each.subject.rstrip(".*>"))
        with pytest.raises(Exception, match=rf"(?s)PermissionDenied.*{subject}"):
            use.run(spark, ways(exact, user))
