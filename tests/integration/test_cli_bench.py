"""``jetspark bench`` as a shell sees it: a table or JSON, exit codes, and what is left on the server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jetspark.bench.measurements import MEASUREMENTS
from jetspark.blocking import connect
from jetspark.server import NatsServer


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jetspark.cli.main", "bench", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_every_measurement_has_figures_and_leaves_no_stream(url: str) -> None:
    finished = bench("--servers", url, "--count", "50", "--size", "10", "--storage", "memory", "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    document = json.loads(finished.stdout)
    assert (document["payload_bytes"], document["storage"], document["replicas"]) == (10, "memory", 1)
    found = {each["name"]: each for each in document["measurements"]}
    assert list(found) == list(MEASUREMENTS)
    for each in found.values():
        assert (each["count"], each["error"]) == (50, None)
        assert each["messages_per_s"] > 0
    with_latency = {name for name, each in found.items() if each["latency_s_p50"] is not None}
    assert with_latency == {"request", "js-publish"}
    for name in with_latency:
        assert 0 < found[name]["latency_s_p50"] <= found[name]["latency_s_p99"]
    with connect(url) as client:
        assert [name for name in client.jetstream().stream_names() if name.startswith("jetspark-bench-")] == []


def test_a_table_has_a_row_for_each_named_measurement(url: str) -> None:
    finished = bench("publish", "request", "--servers", url, "--count", "20")
    assert (finished.returncode, finished.stderr) == (0, "")
    header, *rows = (line.split() for line in finished.stdout.splitlines())
    assert header[:3] == ["measurement", "count", "messages/s"]
    assert [row[:2] for row in rows] == [["publish", "20"], ["request", "20"]]
    assert [row[3:5] == ["-", "-"] for row in rows] == [True, False]


def test_a_measurement_that_the_server_refuses_is_named_and_the_others_are_done() -> None:
    with NatsServer(jetstream=False) as server:
        finished = bench("js-publish", "publish", "--servers", server.url, "--count", "5", "--json")
    assert finished.returncode == 1
    assert finished.stderr.startswith("failed: js-publish: ")
    publish, refused = json.loads(finished.stdout)["measurements"]
    assert publish["error"] is None
    assert refused["messages_per_s"] is None


@pytest.mark.parametrize("options", [["nonsense"], ["--count", "0"], ["--replicas", "6"]])
def test_a_wrong_option_is_explained(options: list[str]) -> None:
    finished = bench(*options)
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
