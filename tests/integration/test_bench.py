"""Every workload with every contender, with few messages: shows that they work, not how fast."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetspark.bench.runner import Plan, run
from jetspark.bench.workloads import WORKLOADS
from jetspark.errors import ConfigError, ConnectionLost
from jetspark.server import NatsServer

COMMAND = [sys.executable, "-c", "import typer; from jetspark.cli.bench import bench; typer.run(bench)"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=55, check=False)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_contender_of_a_workload_does_its_work(name: str) -> None:
    pytest.importorskip("nats")
    announced: list[str] = []
    report = run(Plan(workloads=(name,), is_quick=True), announced.append)
    [result] = report.workloads
    assert report.errors == []
    assert announced == [f"{name}: {contender.name}" for contender in WORKLOADS[name].contenders] + [""]
    for contender in result.contenders:
        assert contender.skipped is None
        assert {*contender.spreads} == {metric.name for metric in WORKLOADS[name].metrics}
        assert all(spread.min > 0 for spread in contender.spreads.values())
    assert all(verdict.ratio is not None and verdict.is_met is None for verdict in result.verdicts)


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
    medians = {}
    for name in ("bare", "jetspark", "jetspark-blocking"):
        samples = workload["contenders"][name]["samples"]
        assert [sample["repeat"] for sample in samples] == [0, 1, 2]
        medians[name] = statistics.median(sample["values"]["messages_per_s"] for sample in samples)
        assert workload["contenders"][name]["median"]["messages_per_s"] == medians[name]
    ratios = {(ratio["contender"], ratio["baseline"]): ratio["ratio"] for ratio in workload["ratios"]}
    assert ratios == {
        ("jetspark", "bare"): pytest.approx(medians["jetspark"] / medians["bare"]),
        ("jetspark-blocking", "bare"): pytest.approx(medians["jetspark-blocking"] / medians["bare"]),
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


def test_a_contender_that_fails_is_an_error_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspark.bench.runner.SAMPLE_TIMEOUT_S", 0.001)
    report = run(Plan(workloads=("core-publish",), is_quick=True, has_peers=False))
    assert len(report.errors) == 3
    assert "core-publish, bare: not done after" in report.errors[0]


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
