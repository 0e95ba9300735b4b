"""From samples to medians, ratios and verdicts. Pure: the same samples always give the same report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.workload import Bar, Values, Workload

__all__ = ["ContenderResult", "Ratio", "Report", "Sample", "Spread", "Verdict", "WorkloadResult", "summarise"]

SCHEMA = 1
"""Version of the JSON document; incremented when a field changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement: its values, or its error."""

    repeat: int
    values: Values | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    name: str
    what: str
    count: int
    """Operations of each sample; fewer than the workload's for a peer that does a part."""
    samples: list[Sample]
    spreads: dict[str, Spread]
    """By metric. Empty when skipped, and when a sample failed: the rest would be a selection."""
    skipped: str | None = None
    """Why it did not take part."""

    @property
    def error(self) -> str | None:
        return next((sample.error for sample in self.samples if sample.error is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How a contender stands to a baseline."""

    metric: str
    contender: str
    baseline: str
    ratio: float
    """The median over the repeats, each contender against the baseline of the same repeat: what slows the machine down
    for a while slows both."""
    ratio_min: float
    """The lowest of those; see also ``ratio_max``."""
    ratio_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A bar and our result. ``is_met`` is None when it could not be judged."""

    bar: Bar
    value: float | None
    """The measured figure of the bar: a ratio, a difference, or a median."""
    is_met: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    workload: Workload
    count: int
    contenders: list[ContenderResult]
    ratios: list[Ratio]
    verdicts: list[Verdict]

    def contender(self, name: str) -> ContenderResult | None:
        return next((entry for entry in self.contenders if entry.name == name), None)

    def ratio(self, metric: str, contender: str, baseline: str) -> Ratio | None:
        wanted = (metric, contender, baseline)
        return next((entry for entry in self.ratios if (entry.metric, entry.contender, entry.baseline) == wanted), None)

    def to_dict(self) -> dict[str, Any]:
        workload = self.workload
        return {
            "name": workload.name,
            "what": workload.what,
            "count": self.count,
            "payload_bytes": workload.payload_bytes,
            "storage": workload.storage,
            "replicas": workload.replicas,
            "metrics": [asdict(metric) for metric in workload.metrics],
            "contenders": {entry.name: _contender_dict(entry) for entry in self.contenders},
            "ratios": [asdict(ratio) for ratio in self.ratios],
            "bars": [
                asdict(verdict.bar) | {"value": verdict.value, "is_met": verdict.is_met} for verdict in self.verdicts
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a run found, and where."""

    started: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    commit: str | None
    server: str
    repeats: int
    is_quick: bool
    """Too few messages to say anything about speed; bars are not judged."""
    workloads: list[WorkloadResult]

    @property
    def errors(self) -> list[str]:
        return [
            f"{result.workload.name}, {contender.name}: {contender.error}"
            for result in self.workloads
            for contender in result.contenders
            if contender.error is not None
        ]

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for result in self.workloads for verdict in result.verdicts]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "started": self.started,
            "machine": self.machine,
            "versions": self.versions,
            "commit": self.commit,
            "server": self.server,
            "repeats": self.repeats,
            "is_quick": self.is_quick,
            "workloads": [result.to_dict() for result in self.workloads],
        }


def summarise(
    workload: Workload,
    *,
    count: int,
    samples: Mapping[str, Sequence[Sample]],
    whats: Mapping[str, str],
    counts: Mapping[str, int],
    skipped: Mapping[str, str],
    judge: bool = True,
) -> WorkloadResult:
    """``samples`` has every contender that ran, ``skipped`` the reasons for the others."""
    contenders = [
        ContenderResult(
            name=name,
            what=what,
            count=counts[name],
            samples=list(samples.get(name, ())),
            spreads=_spreads(samples.get(name, ())),
            skipped=skipped.get(name),
        )
        for name, what in whats.items()
    ]
    measured = {entry.name: entry for entry in contenders if entry.spreads}
    ratios = [
        _ratio(metric.name, contender, measured[baseline])
        for metric in workload.metrics
        for contender in measured.values()
        for baseline in workload.baselines
        if baseline in measured and baseline != contender.name
    ]
    verdicts = []
    for bar in workload.bars:
        value = _value(bar, measured)
        is_met = bar.is_met_by(value) if judge and value is not None else None
        verdicts.append(Verdict(bar=bar, value=value, is_met=is_met))
    return WorkloadResult(workload=workload, count=count, contenders=contenders, ratios=ratios, verdicts=verdicts)


def _value(bar: Bar, measured: Mapping[str, ContenderResult]) -> float | None:
    if bar.contender not in measured or (bar.baseline and bar.baseline not in measured):
        return None
    ours = measured[bar.contender]
    if not bar.baseline:
        return ours.spreads[bar.metric].median
    theirs = measured[bar.baseline]
    if bar.by == "ratio":
        return _ratio(bar.metric, ours, theirs).ratio
    return statistics.median(mine - other for mine, other in _pairs(bar.metric, ours, theirs))


def _spreads(samples: Sequence[Sample]) -> dict[str, Spread]:
    values = [sample.values for sample in samples if sample.values is not None]
    if not values or len(values) < len(samples):
        return {}
    spreads = {}
    for metric in values[0]:
        series = [entry[metric] for entry in values]
        spreads[metric] = Spread(statistics.median(series), min(series), max(series))
    return spreads


def _ratio(metric: str, contender: ContenderResult, baseline: ContenderResult) -> Ratio:
    ratios = [ours / theirs for ours, theirs in _pairs(metric, contender, baseline)]
    return Ratio(
        metric=metric,
        contender=contender.name,
        baseline=baseline.name,
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )


def _pairs(metric: str, contender: ContenderResult, baseline: ContenderResult) -> list[tuple[float, float]]:
    """The values of both contenders in the same repeats."""
    ours = {sample.repeat: sample.values[metric] for sample in contender.samples if sample.values is not None}
    theirs = {sample.repeat: sample.values[metric] for sample in baseline.samples if sample.values is not None}
    return [(ours[repeat], theirs[repeat]) for repeat in sorted(ours.keys() & theirs.keys())]


def _contender_dict(entry: ContenderResult) -> dict[str, Any]:
    return {
        "what": entry.what,
        "count": entry.count,
        "skipped": entry.skipped,
        "error": entry.error,
        "samples": [asdict(sample) for sample in entry.samples],
        **{
            part: {metric: getattr(spread, part) for metric, spread in entry.spreads.items()}
            for part in ("median", "min", "max")
        },
    }
