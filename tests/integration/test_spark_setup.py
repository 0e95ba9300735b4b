"""How the formats get into a session: by registering, by themselves, through Connect, and onto a cluster of processes.

Each runs in a process of its own: there is one session to a JVM, and it cannot be of another kind afterwards.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.spark_starts import started

from benchmarks.processes import environment
from jetspark.blocking import connect
from jetspark.errors import ConfigError
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.kv import KVConfig
from jetspark.server import NatsServer
from jetspark.spark.session import _major, check_java, check_somebody_listens, session

# As everywhere in the suite: this one does not compile pyspark from its zip file in every worker.
WORKER_PYTHON = str(Path(__file__).parents[1] / "support" / "worker_python.sh")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

READ_AND_WRITE = """
import json

def read_and_write(spark, servers):
    orders = spark.read.format("jetstream").option("servers", servers).option("stream", "SETUP").load()
    assert orders.count() == 100, orders.count()
    rows = orders.selectExpr("concat('setup.copy.', CAST(sequence AS string)) AS subject", "data")
    rows.where("sequence <= 10").write.format("jetstream").option("servers", servers).mode("append").save()
    state = orders.selectExpr("concat('k', CAST(sequence % 5 AS string)) AS key", "data AS value", "sequence")
    options = {"servers": servers, "bucket": "setup", "guard": "sequence"}
    state.write.format("jetstream_kv").options(**options).mode("append").save()
    table = spark.read.format("jetstream_kv").option("servers", servers).option("bucket", "setup").load()
    assert sorted(int(bytes(row.value)) for row in table.collect()) == [96, 97, 98, 99, 100]
    print("done")

def project(spark, servers, ship, *, streams=False):
    # Workers have the module of the application from `ship` alone: the folder it was imported from is gone by then.
    import asyncio, pathlib, shutil, sys, tempfile, jetspark.spark
    folder, copy = pathlib.Path(tempfile.mkdtemp()), pathlib.Path(tempfile.mkdtemp())
    for each in (folder, copy):
        (each / "shipped.py").write_text(APP)
    sys.path.insert(0, str(folder))
    import shipped
    ship(str(copy / "shipped.py"))
    shutil.rmtree(folder)
    asyncio.run(shipped.publish(servers))
    first = jetspark.spark.backfill(shipped.app, spark, servers, to_sequence=60, partitions=2)
    assert (first.applied, first.written) == (60, 3), first
    if streams:
        jetspark.spark.run("shipped:app", spark, servers, until_now=True, partitions=2).awaitTermination()
    else:
        jetspark.spark.backfill("shipped:app", spark, servers, from_sequence=50, partitions=2)
    table = spark.read.format("jetstream_kv").option("servers", servers).option("bucket", "counts").load()
    found = {row.key: json.loads(bytes(row.value)) for row in table.collect() if not row.key.startswith("_")}
    assert found == {"k0": 34, "k1": 33, "k2": 33}, found
    states = jetspark.spark.fold_states(shipped.app, spark, servers).collect()
    assert {row.key: json.loads(bytes(row.value)) for row in states} == found

def replay(spark, servers):
    import asyncio, jetspark, jetspark.spark, shipped
    from jetspark.app.replay import run_replay, verify
    app, engine = shipped.app, jetspark.spark.ReplayEngine(shipped.app, spark, servers, projection="counts")
    async def both():
        async with jetspark.connect(servers) as client:
            js = client.jetstream()
            right = await verify(js, app, "counts")
            assert (right.is_equal, right.keys) == (True, 3), right
            await (await js.stream("KV_counts")).purge(subject="$KV.counts.k1")
            wrong = await verify(js, app, "counts", engine=engine)
            assert [each.kind for each in wrong.differences] == ["missing"], wrong
            assert (await run_replay(js, app, "counts", engine=engine)).changed == 1
            assert (await verify(js, app, "counts", engine=engine)).to_dict() == right.to_dict()
    asyncio.run(both())

def write_typed(spark, servers):
    import jetspark.spark, shipped
    rows = spark.range(0, 10, 1, 2).selectExpr("concat('w', id) AS name")
    jetspark.spark.write_events(rows, shipped.app, shipped.Seen, servers=servers, writeId="typed")
    jetspark.spark.write_events(rows, shipped.app, shipped.Seen, servers=servers, writeId="typed")
    found = jetspark.spark.events(spark, shipped.app, shipped.Seen, servers=servers)
    assert found.where("name LIKE 'w%'").count() == 10
    bad = rows.selectExpr("nullif(name, 'w7') AS name")
    try:
        jetspark.spark.write_events(bad, shipped.app, shipped.Seen, servers=servers)
    except jetspark.InvalidRows as error:
        assert error.args[:3] == ("the frame", 10, 1), error.args
    else:
        raise AssertionError("a null was written")
    jetspark.spark.write_events(bad, shipped.app, shipped.Seen, servers=servers, invalid="dead_letter")
    assert jetspark.spark.dead_letters(spark, shipped.app, servers).count() == 1
    assert found.where("name LIKE 'w%'").count() == 10  # a frame is planned once
    assert jetspark.spark.unreadable_events(spark, shipped.app, servers).count() == 0

def stream_installed(spark, servers):
    # An application that is installed where workers run.
    import asyncio, jetspark.spark, jetspark.blocking
    from benchmarks.order_totals import app, messages
    asyncio.run(app.apply(servers))
    with jetspark.blocking.connect(servers) as client, client.jetstream().fast_batch() as batch:
        batch.add_many(messages(30))
    jetspark.spark.run(app, spark, servers, until_now=True, partitions=2).awaitTermination()
    table = spark.read.format("jetstream_kv").option("servers", servers).option("bucket", "bench_totals").load()
    assert sum(not row.key.startswith("_") for row in table.collect()) == 30

APP = '''
from jetspark.app import App, Event

app = App("shipped", stream="SHIPPED", subjects=["shipped.>"])

class Seen(Event, type="seen", version=1, key="name", subject="shipped.{name}"):
    name: str

@app.projection("counts", events=[Seen], bucket="counts")
class Counts:
    def key(self, event): return event.name
    def apply(self, state, event): return (state or 0) + 1

async def publish(servers):
    await app.apply(servers)
    async with app.connect(servers) as client:
        for number in range(100):
            await client.publish(Seen(name=f"k{number % 3}"))
'''
"""


@pytest.fixture
def servers() -> Iterator[str]:
    with NatsServer() as server, connect(server.url) as nc:
        js = nc.jetstream()
        js.create_stream(StreamConfig(name="SETUP", subjects=["setup.in"], allow_batched=True, allow_direct=True))
        js.create_stream(StreamConfig(name="COPY", subjects=["setup.copy.>"], allow_batched=True, allow_direct=True))
        js.create_kv(KVConfig(bucket="setup"))
        with js.fast_batch() as fast:
            fast.add_many(("setup.in", b"%d" % number) for number in range(1, 101))
        yield server.url
        assert js.stream("COPY").info().state.messages == 10


def run(program: str, servers: str, *, finds_python: bool = False) -> str:
    """What the program wrote to stderr."""
    code = READ_AND_WRITE + program
    variables = {name: value for name, value in environment().items() if not name.startswith("PYSPARK_")}
    if not finds_python:
        variables["PYSPARK_PYTHON"] = WORKER_PYTHON
    finished = subprocess.run(
        [sys.executable, "-c", code, servers],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        env=variables | {"SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
    assert "done" in finished.stdout
    return finished.stderr


def test_a_plain_session_finds_the_formats_by_itself_and_registering_them_is_no_reason_to_warn(servers: str) -> None:
    shown = run(
        """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
read_and_write(spark, sys.argv[1])
from jetspark.spark import register
register(spark)
register(spark)
spark._jvm.org.apache.log4j.Logger.getLogger("own").warn("warnings are shown")
""",
        servers,
    )
    assert "warnings are shown" in shown
    assert "DataSourceManager" not in shown


def test_spark_connect_reads_and_writes(servers: str) -> None:
    run(
        """
import sys
from pyspark.sql import SparkSession
from jetspark.spark import register
spark = SparkSession.builder.remote("local[2]").getOrCreate()
register(spark)
# Not a stream: its tasks cannot import what was shipped, while those of a batch in the same session can.
project(spark, sys.argv[1], lambda path: spark.addArtifact(path, pyfile=True))
replay(spark, sys.argv[1])
write_typed(spark, sys.argv[1])
stream_installed(spark, sys.argv[1])
read_and_write(spark, sys.argv[1])
spark.stop()
""",
        servers,
    )


def test_executors_in_processes_of_their_own_read_and_write(servers: str) -> None:
    run(
        """
import sys
from jetspark.spark import register
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master("local-cluster[2,1,1024]")
    .config("spark.ui.enabled", "false").config("spark.executor.memory", "512m").getOrCreate()
)
register(spark)
project(spark, sys.argv[1], spark.sparkContext.addPyFile, streams=True)
write_typed(spark, sys.argv[1])
read_and_write(spark, sys.argv[1])
spark.stop()
""",
        servers,
    )


def test_temporary_views_work_in_sql_and_so_does_a_second_session(servers: str) -> None:
    run(
        """
import sys
from jetspark.spark import register, session
spark = session(cores=2)
options = f"servers '{sys.argv[1]}', stream 'SETUP'"
spark.sql(f"CREATE TEMPORARY VIEW orders USING jetstream OPTIONS ({options})")
assert spark.sql("SELECT max(sequence) FROM orders").first()[0] == 100
spark.sql(f"CREATE TEMPORARY VIEW copy USING jetstream OPTIONS (servers '{sys.argv[1]}')")
# An INSERT has to name them all.
columns = "'setup.copy.sql', data, headers, stream, sequence, timestamp, stream_created"
spark.sql(f"INSERT INTO copy SELECT {columns} FROM orders WHERE sequence <= 10").collect()
other = spark.newSession()
for _ in range(2):
    register(other)
orders = other.read.format("jetstream").options(servers=sys.argv[1], stream="SETUP").load()
assert orders.count() == 100
print("done")
""",
        servers,
        finds_python=True,  # by `session`; the others are told, as Spark's own sessions have to be
    )


@pytest.mark.parametrize(
    ("shown", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_292"', 8),
        ('openjdk version "25"', 25),
        ("?", None),
    ],
)
def test_the_version_of_java_is_read(shown: str, major: int | None) -> None:
    assert _major(shown) == major


@pytest.mark.parametrize(
    ("start", "end", "who"),
    [("sc://", "/;user_id=a", "Spark Connect server"), ("spark://", "", "Spark master")],
)
def test_where_nobody_listens_the_error_comes_at_once(start: str, end: str, who: str) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"no {who} at 127.0.0.1:\d+: "):
            check_somebody_listens(f"{start}{address}{end}")
        with pytest.raises(ConfigError, match=rf"no Spark master at {address}: .*, {address}: "):
            check_somebody_listens(f"spark://{address},{address}")
        with pytest.raises(ConfigError, match="no Spark Connect server at "):
            session(master=f"sc://{address}")
    with pytest.raises(ConfigError, match=rf"expected an address such as {start}host:\d+: "):
        check_somebody_listens(f"{start}host:many")


@pytest.mark.parametrize("master", ["", "somewhere", "localhost:7077", "http://host:7077", "SPARK://host", "sc:host"])
def test_what_is_no_master_is_refused_before_spark_is_started(master: str) -> None:
    with pytest.raises(ConfigError, match=rf"master='{master}': expected spark://HOST:7077, sc://HOST, yarn"):
        session(master=master)


def test_a_file_for_workers_that_is_not_there_is_refused_before_spark_is_started(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.py", tmp_path):
        with pytest.raises(ConfigError, match=rf"py_files: '{path}': file not found from "):
            session(py_files=[str(path)])


def test_an_interrupt_while_java_starts_leaves_no_java_behind(tmp_path: Path) -> None:
    program = "from jetspark.spark import session; session()"
    with started(tmp_path, "-c", program) as start:
        start.wait_for_java()
        os.killpg(start.process.pid, signal.SIGINT)  # as a terminal does; Java does not hear it
        _, told = start.process.communicate(timeout=60)
        assert "KeyboardInterrupt" in told
        assert start.left_behind() == []


def test_without_java_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install Java 17 or newer"):
        check_java()
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    with pytest.raises(ConfigError, match="is 11"):
        check_java()
