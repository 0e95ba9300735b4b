"""Every workload with every contender, with few messages: shows that they work, not how fast."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from operator import truediv
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.zygote import Zygote

from benchmarks import peers
from benchmarks.extras import SPARK
from benchmarks.peers import Peer
from benchmarks.processes import REPOSITORY, descendants, environment, peak_mib
from benchmarks.runner import Plan, contenders_of, run
from benchmarks.sample import UVLOOP_SUFFIX
from benchmarks.workloads import WORKLOADS
from jetspark.blocking import connect
from jetspark.errors import ConfigError, ConnectionLost, JetSparkError
from jetspark.jetstream.config import ConsumerConfig, StreamConfig
from jetspark.server import NatsServer

COMMAND = [sys.executable, "-m", "benchmarks"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options], env=environment(), capture_output=True, text=True, timeout=250, check=False
    )


def test_the_memory_of_a_server_is_not_taken_for_that_of_python() -> None:
    with NatsServer() as server:
        assert server.pid in descendants(os.getpid())
        assert peak_mib(iter([server.pid])) == 0
    assert peak_mib(iter([os.getpid()])) > 10


@pytest.fixture(scope="module")
def zygotes() -> Iterator[dict[bool, Zygote]]:
    """For measurements without Spark, a process each, and with it, in one process that has one JVM."""
    with (
        mock.patch.dict(os.environ, environment()),
        Zygote("benchmarks.sample", "jetspark.app", "jetspark.blocking.client", "nats", "uvloop") as forking,
        Zygote("benchmarks.sample", forks=False) as staying,
    ):
        yield {False: forking, True: staying}


@pytest.fixture
def _measures_cheaply(zygotes: dict[bool, Zygote], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the start of a Python, and of a Spark, for each measurement, which is what most of the time goes into.

    That measurements have processes of their own is shown by the tests of the command.
    """
    run_any = subprocess.run

    def run_cheaply(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[1:3] != ["-m", "benchmarks.sample"]:
            return run_any(command, **options)
        request = json.loads(command[3])
        contenders = WORKLOADS[request["workload"]].contenders
        [needs] = [each.needs for each in contenders if each.name == request["contender"].removesuffix(UVLOOP_SUFFIX)]
        code = f"from benchmarks.sample import main\nmain({request!r})"
        return zygotes[needs == SPARK].run(code, timeout=options["timeout"])

    monkeypatch.setattr(subprocess, "run", run_cheaply)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if "spark" in name or "-r3" in name else []) for name in WORKLOADS],
)
@pytest.mark.usefixtures("_measures_cheaply")
def test_every_contender_of_a_workload_does_its_work(name: str) -> None:
    if any(each.needs == SPARK for each in WORKLOADS[name].contenders):
        assert SPARK.missing() == []
    for module in {each.needs for each in WORKLOADS[name].contenders if isinstance(each.needs, str) and each.needs}:
        pytest.importorskip(module)
    announced: list[str] = []
    report = run(Plan(workloads=(name,), is_quick=True), announced.append)
    [result] = report.workloads
    assert report.errors == []
    # Peers with a runtime of their own take part where they are installed.
    optional = {contender.name for contender in WORKLOADS[name].contenders if isinstance(contender.needs, Peer)}
    skipped = {contender.name for contender in result.contenders if contender.skipped is not None}
    assert skipped <= optional
    names = [
        contender.name
        for contender in WORKLOADS[name].contenders
        if contender.is_in_quick_runs and contender.name not in skipped
    ]
    assert announced == [f"{name}: {one}" for one in names] + [""]
    for contender in result.contenders:
        if contender.name in skipped:
            continue
        assert {*contender.spreads} == {metric.name for metric in WORKLOADS[name].metrics}
        assert {metric: spread.min for metric, spread in contender.spreads.items() if spread.min <= 0} == {}
    for verdict in result.verdicts:
        assert verdict.is_met is None
        is_measured = {verdict.bar.contender, verdict.bar.baseline} - {""} <= {*names}
        assert (verdict.value is not None) is is_measured


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    finished = bench("core-publish", "--count", "500", "--repeats", "3", "--no-peers", "--json", str(path))
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "nats-py skipped: left out by request" in finished.stdout
    assert "unknown  core publish" in finished.stdout
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert document["repeats"] == 3
    assert document["machine"]["cpu_count"] >= 1
    assert document["versions"]["nats-server"]
    [workload] = document["workloads"]
    assert workload["count"] == 500
    rates: dict[str, list[float]] = {}
    for name in ("bare", "jetspark", "jetspark-blocking"):
        samples = workload["contenders"][name]["samples"]
        assert [sample["repeat"] for sample in samples] == [0, 1, 2]
        rates[name] = [sample["values"]["messages_per_s"] for sample in samples]
        assert workload["contenders"][name]["median"]["messages_per_s"] == statistics.median(rates[name])

    def median_ratio(name: str) -> Any:
        return pytest.approx(statistics.median(map(truediv, rates[name], rates["bare"])))

    ratios = {
        (ratio["contender"], ratio["baseline"]): ratio["ratio"]
        for ratio in workload["ratios"]
        if ratio["metric"] == "messages_per_s"
    }
    assert ratios == {
        ("jetspark", "bare"): median_ratio("jetspark"),
        ("jetspark-blocking", "bare"): median_ratio("jetspark-blocking"),
    }


def test_json_goes_to_standard_output_alone_and_an_existing_server_is_used() -> None:
    with NatsServer(jetstream=False) as server:
        finished = bench(
            "request-latency", "--quick", "--no-peers", "--url", server.url, "--json", "-", "--count", "20"
        )
    assert finished.returncode == 0
    document = json.loads(finished.stdout)
    assert document["is_quick"] is True
    assert document["server"] == "an existing server"
    assert "A quick run says nothing about speed" in finished.stderr


def test_an_interrupted_run_says_how_far_it_came_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with NatsServer(jetstream=False) as server, connect(server.url) as client:
        watching = client.subscribe("bench.data.>")
        client.flush()
        command = [*COMMAND, "core-publish", "--no-peers", "--url", server.url, "--json", str(path)]
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            watching.next(timeout=250)
            process.send_signal(signal.SIGINT)
            out, notes = process.communicate(timeout=250)
    assert process.returncode == 128 + signal.SIGINT
    assert (out, notes) == ("", "interrupted after 0 of 15 measurements: none is shown or written\n")
    assert not path.exists()


def test_a_contender_that_fails_is_an_error_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.runner.SAMPLE_TIMEOUT_S", 0.001)
    report = run(Plan(workloads=("core-publish",), is_quick=True, has_peers=False))
    assert len(report.errors) == 3
    assert "core-publish, bare: not done after" in report.errors[0]


def test_a_peer_that_is_not_installed_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = WORKLOADS["fast-ingest"]
    monkeypatch.delenv(peers.NODE_MODULES_VARIABLE, raising=False)
    monkeypatch.delenv(peers.PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(peers, "CHECKOUT_NODE_MODULES", tmp_path / "nothing")
    monkeypatch.setattr("shutil.which", lambda name: f"/somewhere/{name}")
    _, skipped = contenders_of(workload, Plan())
    assert skipped["nats.js"] == skipped["nats.js-add"]
    assert skipped["nats.js"].startswith("JETSPARK_BENCH_NODE_MODULES does not name")
    assert skipped["nats-jetstream"].startswith("JETSPARK_BENCH_PYTHON313 does not name")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv(peers.PYTHON_VARIABLE, str(tmp_path / "nothing"))
    _, skipped = contenders_of(workload, Plan())
    assert skipped["nats.js"] == "node is not on the PATH"
    assert "nats-jetstream-extra cannot be run" in skipped["nats-jetstream"]
    _, skipped = contenders_of(workload, Plan(has_peers=False))
    assert skipped["nats.js"] == skipped["nats-jetstream"] == "left out by request"


@pytest.fixture
def c_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the C client is compiled into."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        peers.NATS_C.command_from_env()
    except ConfigError as error:
        pytest.skip(str(error))  # libnats is not installed
    return tmp_path / "jetspark"


def test_the_c_client_is_compiled_once(c_client: Path) -> None:
    [program] = c_client.iterdir()
    compiled = program.stat().st_mtime_ns
    assert peers.NATS_C.command_from_env() == [str(program)]
    assert [(entry, entry.stat().st_mtime_ns) for entry in c_client.iterdir()] == [(program, compiled)]
    assert peers.NATS_C.version()[0].isdigit()


@pytest.mark.usefixtures("c_client")
def test_the_c_client_checks_what_it_receives_and_what_is_stored() -> None:
    with NatsServer() as server, connect(server.url) as client:
        stream = client.jetstream().create_stream(StreamConfig(name="S", subjects=["s"]))
        stream.create_consumer(ConsumerConfig(durable_name="c", ack_policy="none"))
        job = {"url": server.url, "subject": "s", "warmup": 1, "count": 3, "payload_bytes": 10}
        work = peers.NATS_C.measure(job | {"work": "publish-async", "window": 10})
        assert {*work} == {"messages_per_s", "cpu_s_per_million"}
        assert stream.info().state.messages == 4
        pull = job | {"work": "pull", "stream": "S", "consumer": "c", "batch": 2}
        assert {*peers.NATS_C.measure(pull)} == {"messages_per_s", "cpu_s_per_million"}
        with pytest.raises(JetSparkError, match=r"^libnats: a message was refused$"):
            peers.NATS_C.measure(job | {"work": "publish-async", "window": 10, "subject": "nowhere"})
        client.jetstream().publish("s", b"another size")
        with pytest.raises(JetSparkError, match=r"^libnats: a message has another size$"):
            peers.NATS_C.measure(pull)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "gcc is not on the PATH: apt install gcc libnats-dev"),
        ("false", "libnats is not installed: apt install gcc libnats-dev"),
    ],
)
def test_without_the_c_client_its_row_says_how_to_install_it(
    compiler: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.which(compiler) if compiler else None
    monkeypatch.setattr("shutil.which", lambda name: found)
    for name in ("core-publish", "core-subscribe", "js-publish-async", "js-pull", "js-pull-ack"):
        _, skipped = contenders_of(WORKLOADS[name], Plan())
        assert skipped == {"nats.c": reason}


def test_a_peer_answers_through_a_process_and_its_last_words_are_the_reason_of_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import sys, json\n"
        "if sys.argv[1] == '--version': sys.exit(print('1.2 (something)'))\n"
        "job = json.loads(sys.argv[1])\n"
        "if job['count'] == 0: sys.exit('first words\\nnothing to do')\n"
        "print(json.dumps({'messages_per_s': job['count'] * 2.0}))\n",
        encoding="utf-8",
    )
    peer = Peer(distribution="peer", command_from_env=lambda: [sys.executable, str(script)])
    assert peer.version() == "1.2 (something)"
    assert peer.measure({"count": 3}) == {"messages_per_s": 6.0}
    with pytest.raises(JetSparkError, match=r"^peer: nothing to do$"):
        peer.measure({"count": 0})
    script.write_text("import sys; sys.exit('no such module')", encoding="utf-8")
    other = Peer(distribution="other", command_from_env=lambda: [sys.executable, str(script)])
    with pytest.raises(ConfigError, match=r"^other cannot be run: no such module$"):
        other.version()


@pytest.mark.parametrize("options", [["nonsense"], ["--repeats", "2"], ["--count", "0"]])
def test_a_wrong_option_is_explained(options: list[str]) -> None:
    finished = bench(*options)
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr


def test_a_server_that_cannot_be_used_ends_the_run_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="without authentication and TLS"):
        run(Plan(url="tls://127.0.0.1:1", is_quick=True))
    with pytest.raises(ConnectionLost, match="refused"):
        run(Plan(url="nats://127.0.0.1:1", is_quick=True))
    with NatsServer(jetstream=False, token="secret") as server, pytest.raises(ConnectionLost, match="Authorization"):
        run(Plan(url=server.url, is_quick=True))


def test_two_trees_are_compared_with_the_work_of_this_one(tmp_path: Path) -> None:
    other = tmp_path / "src" / "jetspark"
    shutil.copytree(REPOSITORY / "src" / "jetspark", other, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "aio" / "pull.py").open("a") as module:
        module.write("PullConsumer.fetch = 'of the other tree'\n")
    command = [sys.executable, "-m", "benchmarks.against", str(tmp_path), "js-pull", "--quick", "--repeats", "1"]
    command += ["--at-least", "0", "--contenders"]
    same = subprocess.run([*command, "jetspark"], env=environment(), capture_output=True, text=True, check=True)
    assert [line.split()[:3] for line in same.stdout.splitlines()[1:]] == [
        ["js-pull", "jetspark", "messages_per_s"],
        ["js-pull", "jetspark", "cpu_s_per_million"],
    ]
    broken = subprocess.run(
        [*command, "jetspark-fetch"], env=environment(), capture_output=True, text=True, check=False
    )
    assert "'str' object is not callable" in broken.stderr
