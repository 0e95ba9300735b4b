"""Measure this tree against another one, interleaved: has a change made anything slower?

    git worktree add /tmp/before COMMIT
    python -m benchmarks.against /tmp/before                          # the workloads of WORKLOADS below
    python -m benchmarks.against /tmp/before js-pull --repeats 9
    python -m benchmarks.against /tmp/before js-pull --contenders jetspark jetspark-fetch --count 300000

Both sides run this tree's ``benchmarks``, so that only the library differs. Both need the same installed packages, for
one interpreter runs both. Each measurement is a process of its own; in each round the two trees run one right after the
other, and take turns in being first. The output is the median of the rounds' ratios, above 1 where this tree is better,
next to the lowest and highest; and the same for processor time. Exits with code 1 when a rate is below ``--at-least``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import pkgutil
import secrets
import statistics
import subprocess
import sys
from collections.abc import Awaitable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.processes import REPOSITORY, environment, running
from benchmarks.replicas import one_server
from benchmarks.workload import CPU_PER_MILLION, Job, Metric, Workload
from jetspark.errors import ConfigError

# One for each way in which the client is used; Spark's need a minute each and have to be named.
WORKLOADS = ("request-latency", "core-subscribe", "js-pull", "js-pull-ack", "fast-ingest", "batcher")
OURS = "jetspark"
SAMPLE_TIMEOUT_S = 300.0


def modules() -> dict[str, str]:
    """The module of each workload."""
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
        found = dict.fromkeys(workloads_of(module.name), module.name) | found  # `workloads` has them all once more
    return found


def workloads_of(module: str) -> dict[str, Workload]:
    names = vars(importlib.import_module(module))
    return {each.name: each for each in names.values() if isinstance(each, Workload)}


def sources(tree: Path) -> str:
    """The folder of a checkout that has the package in it."""
    if not (tree / "src" / "jetspark" / "__init__.py").exists():
        raise ConfigError(f"{tree}: expected a checkout, with src/jetspark in it")
    return str(tree / "src")


def measure(
    python_path: str, module: str, workload: Workload, contender: str, url: str, count: int
) -> dict[str, float]:
    job = Job(
        url=url,
        subject=f"bench.data.{secrets.token_hex(4)}",
        count=count,
        warmup=max(1, count // 10),
        payload_bytes=workload.payload_bytes,
    )
    request = json.dumps({"module": module, "workload": workload.name, "contender": contender, "job": asdict(job)})
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.against", "--sample", request],
        env=environment(python_path),
        capture_output=True,
        text=True,
        timeout=SAMPLE_TIMEOUT_S,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{workload.name}, {contender}, {python_path}: {finished.stderr.strip()}")
    values: dict[str, float] = json.loads(finished.stdout)
    return values


def run_sample(request: dict[str, Any]) -> None:
    """As ``benchmarks.sample``, but with one workload's module only.

    An older tree lacks the features of newer workloads. And more imports mean more objects for the garbage collector,
    which takes half of the processor time of some workloads.
    """
    contenders = workloads_of(request["module"])[request["workload"]].contenders
    [chosen] = [each for each in contenders if each.name == request["contender"]]
    result = chosen.run(Job(**request["job"]))
    print(json.dumps(asyncio.run(awaited(result)) if inspect.isawaitable(result) else result))


async def awaited(result: Awaitable[dict[str, float]]) -> dict[str, float]:
    return await result


def gain(metric: Metric, ours: float, theirs: float) -> float:
    """How this tree stands to the other; above 1 is better."""
    return ours / theirs if metric.better == "higher" else theirs / ours


def compare(trees: tuple[str, str], url: str, options: argparse.Namespace) -> bool:
    """Print a line for each figure; False when one is below the limit."""
    known, is_good = modules(), True
    print(f"{'workload':<18}{'contender':<28}{'metric':<22}{'median':>8}   lowest to highest")
    for name in options.workloads:
        workload = workloads_of(known[name])[name]
        count = options.count or (workload.quick_count if options.quick else workload.count)
        chosen = options.contenders or [each.name for each in workload.contenders if each.name.startswith(OURS)]
        for contender in chosen:
            pairs = []
            for number in range(options.repeats):
                order = (0, 1) if number % 2 else (1, 0)
                found = {side: measure(trees[side], known[name], workload, contender, url, count) for side in order}
                pairs.append((found[0], found[1]))
            for metric in workload.metrics:
                gains = sorted(gain(metric, ours[metric.name], theirs[metric.name]) for ours, theirs in pairs)
                median = statistics.median(gains)
                is_slower = median < options.at_least and metric is not CPU_PER_MILLION
                is_good = is_good and not is_slower
                spread = f"{gains[0]:.2f} to {gains[-1]:.2f}"
                mark = "   slower" if is_slower else ""
                print(f"{name:<18}{contender:<28}{metric.name:<22}{median:>8.3f}   {spread}{mark}", flush=True)
    return is_good


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--sample"]:
        run_sample(json.loads(arguments[1]))
        return 0
    parser = argparse.ArgumentParser(description="Measure this tree against another one, interleaved.")
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("workloads", nargs="*", default=WORKLOADS, help="names as in `python -m benchmarks`")
    parser.add_argument("--contenders", nargs="+", help="rows as in `python -m benchmarks`; all of ours when not given")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; each measures both trees once")
    parser.add_argument("--count", type=int, help="operations in each measurement")
    parser.add_argument("--quick", action="store_true", help="few operations: shows that it works")
    parser.add_argument("--at-least", type=float, default=0.97, help="the ratio that is still good")
    options = parser.parse_intermixed_args(arguments)
    if unknown := sorted(set(options.workloads) - set(modules())):
        parser.error(f"unknown workload {', '.join(unknown)}: expected some of {', '.join(modules())}")
    trees = (sources(REPOSITORY), sources(options.other.resolve()))
    with one_server(None) as url, running("benchmarks.helper", url):
        return 0 if compare(trees, url, options) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
