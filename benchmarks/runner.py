"""Runs workloads: one server, one helper, and a fresh process for each measurement, interleaved.

In every repeat each contender of each workload runs once. The order rotates from repeat to repeat, so that a machine
that slows down, or a neighbour that wakes up, hits everyone and not always the same one.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jetspark
from benchmarks.extras import Extra
from benchmarks.peers import Peer
from benchmarks.processes import REPOSITORY, environment, running
from benchmarks.replicas import one_server, server_for
from benchmarks.report import Report, Sample, WorkloadResult, summarise
from benchmarks.sample import UVLOOP_SUFFIX
from benchmarks.wire import dial
from benchmarks.workload import Contender, Job, Workload
from benchmarks.workloads import choose
from jetspark.core.version import VERSION
from jetspark.errors import ConfigError

__all__ = ["MIN_REPEATS", "Plan", "run", "total_samples"]

MIN_REPEATS = 3

# A measurement takes about a second. After this time it waits for messages that will never come.
SAMPLE_TIMEOUT_S = 120.0

PEER_MODULES = {"nats", "faststream"}
_DISTRIBUTIONS = {
    "nats": "nats-py",
    "faststream": "faststream",
    "msgspec": "msgspec",
    "uvloop": "uvloop",
}

OnProgress = Callable[[str], None]
"""Called before each measurement with its name, and with an empty text at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The selection of workloads and contenders, and their sizes."""

    workloads: tuple[str, ...] = ()
    """Names; none means all."""
    count: int | None = None
    """Operations for each measurement, instead of each workload's own."""
    repeats: int | None = None
    """5 when not given; 1 in a quick run."""
    is_quick: bool = False
    has_peers: bool = True
    has_uvloop: bool = False
    url: str | None = None
    """A server that is already there; without it one is started for the run."""

    def __post_init__(self) -> None:
        choose(self.workloads)
        if self.count is not None and self.count < 1:
            raise ConfigError(f"count={self.count}: expected 1 or more")
        lowest = 1 if self.is_quick else MIN_REPEATS
        if self.repeats is not None and self.repeats < lowest:
            raise ConfigError(f"repeats={self.repeats}: expected {lowest} or more, for the median to mean something")

    def repeats_or_default(self) -> int:
        return self.repeats or (1 if self.is_quick else 5)

    def count_for(self, workload: Workload, contender: Contender | None = None) -> int:
        """Operations of one measurement of the workload; fewer for a contender that does a part."""
        count = self.count or (workload.quick_count if self.is_quick else workload.count)
        return max(1, count // contender.count_divisor) if contender is not None else count


def contenders_of(workload: Workload, plan: Plan) -> tuple[dict[str, Contender], dict[str, str]]:
    """The plan's contenders by name, uvloop twins included, and the reasons why others cannot run here."""
    chosen: dict[str, Contender] = {}
    skipped: dict[str, str] = {}
    for contender in workload.contenders:
        if plan.is_quick and not contender.is_in_quick_runs:
            continue
        names = [contender.name]
        if plan.has_uvloop and contender.has_uvloop_twin:
            names.append(contender.name + UVLOOP_SUFFIX)
        for name in names:
            chosen[name] = contender
            if reason := _reason_to_skip(contender, plan, has_uvloop=name != contender.name):
                skipped[name] = reason
    return chosen, skipped


def _reason_to_skip(contender: Contender, plan: Plan, *, has_uvloop: bool) -> str | None:
    needs = contender.needs
    if (isinstance(needs, Peer) or needs in PEER_MODULES) and not plan.has_peers:
        return "left out by request"
    if isinstance(needs, Peer):
        try:
            needs.version()
        except ConfigError as error:
            return str(error)
        return None
    missing: list[str] = []
    if isinstance(needs, Extra):
        missing += needs.missing()
    elif needs and importlib.util.find_spec(needs) is None:
        missing.append(_DISTRIBUTIONS[needs])
    if has_uvloop and importlib.util.find_spec("uvloop") is None:
        missing.append("uvloop")
    return f"{', '.join(missing)} is not installed" if missing else None


def total_samples(plan: Plan) -> int:
    per_repeat = 0
    for workload in choose(plan.workloads):
        chosen, skipped = contenders_of(workload, plan)
        per_repeat += len(chosen) - len(skipped)
    return per_repeat * plan.repeats_or_default()


def run(plan: Plan, on_progress: OnProgress = lambda what: None) -> Report:
    """Measure. Takes minutes for a full plan; a contender that fails is an error in the report, not an exception."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = _machine()  # before the run, so that the load it reports is not our own
    workloads = choose(plan.workloads)
    samples: dict[tuple[str, str], list[Sample]] = {}
    with one_server(plan.url) as url, contextlib.ExitStack() as stack:
        connection, info = dial(url)  # first of all: a server that cannot be used is an error of the whole run
        connection.close()
        stack.enter_context(running("benchmarks.helper", url))
        for repeat in range(plan.repeats_or_default()):
            for workload in workloads:
                chosen, skipped = contenders_of(workload, plan)
                names = [name for name in chosen if name not in skipped]
                turn = repeat % max(1, len(names))
                with server_for(workload, url, is_given=plan.url is not None) as place:
                    for name in names[turn:] + names[:turn]:
                        on_progress(f"{workload.name}: {name}")
                        sample = _measure(workload, name, plan.count_for(workload, chosen[name]), place, repeat)
                        samples.setdefault((workload.name, name), []).append(sample)
        on_progress("")
    return Report(
        started=started,
        machine=machine,
        versions=_versions(str(info.get("version", "unknown")), workloads),
        commit=_commit(),
        server="an existing server" if plan.url else "embedded",
        repeats=plan.repeats_or_default(),
        is_quick=plan.is_quick,
        workloads=[_result(workload, plan, samples) for workload in workloads],
    )


def _result(workload: Workload, plan: Plan, samples: dict[tuple[str, str], list[Sample]]) -> WorkloadResult:
    chosen, skipped = contenders_of(workload, plan)
    return summarise(
        workload,
        count=plan.count_for(workload),
        samples={name: samples[workload.name, name] for name in chosen if (workload.name, name) in samples},
        whats={name: contender.what for name, contender in chosen.items()},
        counts={name: plan.count_for(workload, contender) for name, contender in chosen.items()},
        skipped=skipped,
        judge=not plan.is_quick,
    )


def _measure(workload: Workload, contender: str, count: int, url: str, repeat: int) -> Sample:
    job = Job(
        url=url,
        subject=f"bench.data.{secrets.token_hex(4)}",
        count=count,
        warmup=max(1, count // 10),
        payload_bytes=workload.payload_bytes,
        replicas=workload.replicas or 1,
    )
    request = json.dumps({"workload": workload.name, "contender": contender, "job": asdict(job)})
    command = [sys.executable, "-m", "benchmarks.sample", request]
    try:
        finished = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=SAMPLE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Sample(repeat=repeat, error=f"not done after {SAMPLE_TIMEOUT_S:.0f} s: messages were lost")
    if finished.returncode:
        last_words = finished.stderr.strip().splitlines()[-1:] or [f"ended with code {finished.returncode}"]
        return Sample(repeat=repeat, error=last_words[0])
    return Sample(repeat=repeat, values=json.loads(finished.stdout))


# ---- where and with what ---------------------------------------------------------------------------------------


def _machine() -> dict[str, Any]:
    return {
        "cpu_count": os.cpu_count(),
        "cpu_model": _cpu_model(),
        "system": platform.platform(terse=True),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "load_average_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _versions(server: str, workloads: Sequence[Workload]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"jetspark": VERSION, "nats-server": server}
    for distribution in _DISTRIBUTIONS.values():
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[distribution] = None
    for contender in (contender for workload in workloads for contender in workload.contenders):
        if isinstance(contender.needs, Extra):
            versions |= contender.needs.versions()
        elif isinstance(contender.needs, Peer):
            try:
                versions[contender.needs.distribution] = contender.needs.version()
            except ConfigError:
                versions[contender.needs.distribution] = None
    return versions


def _commit() -> str | None:
    """The commit of the sources that ran, if they belong to this checkout; marked if they differ from that commit."""
    if Path(jetspark.__file__).resolve().parent != REPOSITORY / "src" / "jetspark":
        return None  # another installation
    try:
        commit = _git("rev-parse", "HEAD")
        sources = ("src/jetspark", "benchmarks", ":(exclude)benchmarks/results")
        return commit + ("-modified" if _git("status", "--porcelain", "--", *sources) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    finished = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True)
    return finished.stdout.strip()
