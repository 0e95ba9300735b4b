"""The sources on Sail, an engine with Spark's interface and without Java. Runs where ``pysail`` is installed.

    pip install pysail pyspark-client

Sail runs Python sources in the process of its server, which the sources notice by the imported module: so that is a
process of its own here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.archive_ranges import archive_stream
from support.names import new_name

from jetspark import KVConfig, StreamConfig
from jetspark.blocking import connect
from jetspark.server import NatsServer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pysail") is None or importlib.util.find_spec("pyspark") is None,
    reason="needs Sail: pip install pysail pyspark-client",
)

PROGRAM = """
import json, os, sys
from pysail.spark import SparkConnectServer
from pyspark.sql import SparkSession
from jetspark.spark import register

server = SparkConnectServer("127.0.0.1", 0)
server.start(background=True)
spark = SparkSession.builder.remote(f"sc://127.0.0.1:{server.listening_address[1]}").getOrCreate()
register(spark)
for query in json.loads(sys.argv[1]):
    reader = spark.read.format(query["format"]).options(**query["options"])
    frame = (reader.schema(query["schema"]) if "schema" in query else reader).load()
    print(json.dumps([row.asDict(recursive=True) for row in frame.selectExpr(*query["columns"]).collect()]))
sys.stdout.flush()
os._exit(0)  # PySpark would ask the server for ten minutes at its exit
"""


def ask(folder: Path, *queries: dict[str, Any]) -> list[list[dict[str, Any]]]:
    program = folder / "queries.py"  # PySpark takes `python -c` for a test of its documentation
    program.write_text(PROGRAM)
    folders = [str(Path(__file__).resolve().parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    # Not what other tests say to a Spark with Java.
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name or "NATS" in name}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, str(program), json.dumps(queries)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if "unsupported PySpark version" in done.stderr:
        pytest.skip(f"this Sail does not work with PySpark {importlib.metadata.version('pyspark')}; 0.7 needs 4.2")
    assert not done.returncode, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_sail_reads_a_stream_its_archive_and_a_bucket(server: NatsServer, tmp_path: Path) -> None:
    name = new_name()
    with connect(server.url) as client:
        js = client.jetstream()
        js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
        for number in range(1, 101):
            js.publish(f"{name}.{number % 3}", b"%d" % number, headers={"N": str(number)})
        bucket = js.create_kv(KVConfig(bucket=new_name("b")))
        bucket.put("a", b"1")
        bucket.put("a", b"2")
        archive_stream(js, tmp_path / "lake", name, until=61, files=2, format="parquet")
        js.stream(name).purge(up_to_sequence=50)
        moment = js.stream(name).get_message(75).timestamp
    options = {"servers": server.url, "stream": name, "archive": str(tmp_path / "lake")}
    columns = ["sequence", "subject", "cast(data AS string) AS data", "unix_micros(timestamp) AS time_us", "stream"]
    headers = "element_at(element_at(headers, 'N'), 1) AS n"
    whole, headed, narrow, table = ask(
        tmp_path,
        {"format": "jetstream", "options": options | {"minPartitions": "3"}, "columns": columns},
        {"format": "jetstream", "options": options | {"includeHeaders": "true"}, "columns": ["sequence", headers]},
        {
            "format": "jetstream",
            "options": options | {"startingTimestamp": moment.isoformat()},
            "schema": "sequence bigint, timestamp timestamp",
            "columns": ["sequence", "unix_micros(timestamp) AS time_us"],
        },
        {
            "format": "jetstream_kv",
            "options": {"servers": server.url, "bucket": bucket.bucket},
            "columns": ["key", "cast(value AS string) AS value", "revision"],
        },
    )
    assert sorted(row["sequence"] for row in whole) == list(range(1, 101))
    assert all(row["data"] == str(row["sequence"]) and row["stream"] == name for row in whole)
    assert {row["sequence"]: row["n"] for row in headed} == {each: str(each) for each in range(1, 101)}
    assert sorted(row["sequence"] for row in narrow) == list(range(75, 101))
    times = {row["sequence"]: row["time_us"] for row in whole}
    assert all(row["time_us"] == times[row["sequence"]] for row in narrow)
    assert table == [{"key": "a", "value": "2", "revision": 2}]
