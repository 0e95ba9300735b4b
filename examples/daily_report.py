"""A nightly job on Spark: a day of a stream in, totals by shop into a bucket, the report into the object store.

The day is an argument, so the job can be repeated for any day the stream still has, with the same result.
"""

import contextlib
import datetime
import json

import jetspark.blocking as jetspark
from jetspark import KVConfig, StreamConfig
from jetspark.server import NatsServer
from jetspark.spark import session


def set_up(js: jetspark.JetStream) -> None:
    js.create_stream(StreamConfig(name="SALES", subjects=["sales.*"], allow_batched=True, allow_direct=True))
    js.create_kv(KVConfig(bucket="totals"))
    js.create_object_store("reports")
    with js.fast_batch() as batch:
        batch.add_many((f"sales.shop{n % 3}", json.dumps({"cents": n}).encode()) for n in range(3_000))


def report(servers: str, since: datetime.datetime, until: datetime.datetime) -> list[str]:
    """Totals of each shop, stored under ``<day>.<shop>``; returns the lines of the report."""
    spark = session("daily report")
    try:
        sales = (
            spark.read.format("jetstream")
            .option("servers", servers)
            .option("stream", "SALES")
            .option("startingTimestamp", since.isoformat())
            .option("endingTimestamp", until.isoformat())
            .load()
        )
        totals = (
            sales.selectExpr(
                "split_part(subject, '.', 2) AS shop", "bigint(get_json_object(string(data), '$.cents')) AS cents"
            )
            .groupBy("shop")
            .sum("cents")
            .selectExpr(f"concat('{since:%Y-%m-%d}.', shop) AS key", "string(`sum(cents)`) AS value")
            .cache()
        )
        totals.write.format("jetstream_kv").option("servers", servers).option("bucket", "totals").mode("append").save()
        return [f"{row.key},{row.value}" for row in totals.orderBy("key").collect()]
    finally:
        spark.stop()


def main() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(NatsServer())
        js = stack.enter_context(jetspark.connect(server.url)).jetstream()
        set_up(js)
        now = datetime.datetime.now(datetime.UTC)
        lines = report(server.url, now - datetime.timedelta(days=1), now + datetime.timedelta(days=1))
        reports = js.object_store("reports")
        reports.put("latest.csv", "\n".join(lines).encode())
        print(reports.get_bytes("latest.csv").decode())
        assert [line.rpartition(",")[2] for line in lines] == ["1498500", "1499500", "1500500"]


if __name__ == "__main__":
    main()
