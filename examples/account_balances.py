"""A fold of your own: deposits and withdrawals in, the balance of each account in a bucket out.

Spark's Python workers import the fold by its name, ``module:class``, so its folder must be on their path. In a project
it is an installed package; here ``spark.executorEnv.PYTHONPATH`` names the folder of this file.
"""

import json
from pathlib import Path
from typing import Any, TypedDict

import jetspark.blocking as jetspark
from jetspark import KVConfig, StreamConfig
from jetspark.server import NatsServer
from jetspark.spark import fold, session


class State(TypedDict):
    cents: int
    events: int


class Balance:
    """Pure: no clock, no network, no random numbers. The same events give the same state on every engine."""

    def apply(self, state: State | None, event: dict[str, Any], sequence: int) -> State:
        # None: the account has no value yet. `sequence` is the event's place in the stream.
        cents, events = (state["cents"], state["events"]) if state else (0, 0)
        if event["type"] == "withdrawn":
            return {"cents": cents - event["cents"], "events": events + 1}
        return {"cents": cents + event["cents"], "events": events + 1}


def main() -> None:
    with NatsServer() as server, jetspark.connect(server.url) as nc:
        js = nc.jetstream()
        js.create_stream(StreamConfig(name="MONEY", subjects=["money.*"], allow_batched=True, allow_direct=True))
        balances = js.create_kv(KVConfig(bucket="balances"))
        with js.fast_batch() as batch:
            for number in range(1_000):
                event = {"type": "withdrawn" if number % 4 == 3 else "deposited", "cents": 100}
                batch.add(f"money.account{number % 2}", json.dumps(event).encode())

        spark = session("balances", conf={"spark.executorEnv.PYTHONPATH": str(Path(__file__).parent)})
        try:
            stored = spark.read.format("jetstream").option("servers", server.url).option("stream", "MONEY").load()
            events = stored.selectExpr("split_part(subject, '.', 2) AS key", "sequence", "string(data) AS event")
            for _ in range(2):  # the second time changes nothing: the values carry the sequence they have come to
                fold(events, partitions=2, servers=server.url, bucket="balances", fold="account_balances:Balance")
        finally:
            spark.stop()
        for account in ("account0", "account1"):
            print(account, balances.get(account).value.decode())
        assert json.loads(balances.get("account0").value) == {"cents": 50_000, "events": 500}
        assert json.loads(balances.get("account1").value) == {"cents": 0, "events": 500}


if __name__ == "__main__":
    main()
