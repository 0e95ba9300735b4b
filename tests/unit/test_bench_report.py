"""Medians, ratios and bars, from samples that are written down here."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.report import Report, Sample, WorkloadResult, summarise
from benchmarks.runner import Plan, contenders_of, total_samples
from benchmarks.workload import Bar, Contender, Job, Metric, Rounds, Stopwatch, Values, Workload, payload_of, percentile
from benchmarks.workloads import WORKLOADS, choose
from jetspark.errors import ConfigError


def idle(job: Job) -> Values:
    return {}


def workload(*bars: Bar) -> Workload:
    return Workload(
        name="work",
        what="work",
        count=100,
        quick_count=1,
        contenders=tuple(Contender(name=name, what=name, run=idle) for name in ("bare", "nats-py", "jetspark")),
        metrics=(Metric("rate", "messages/s"),),
        bars=bars,
    )


def series(*values: float) -> list[Sample]:
    return [Sample(repeat=repeat, values={"rate": value}) for repeat, value in enumerate(values)]


def result(samples: Mapping[str, list[Sample]], *bars: Bar, judge: bool = True) -> WorkloadResult:
    names = ("bare", "nats-py", "jetspark")
    return summarise(
        workload(*bars),
        count=100,
        samples=samples,
        whats={name: name for name in names},
        counts=dict.fromkeys(names, 100),
        skipped={name: "absent" for name in names if name not in samples},
        judge=judge,
    )


SAMPLES = {
    "bare": series(1000.0, 800.0, 1200.0),
    "nats-py": series(100.0, 200.0, 150.0),
    "jetspark": series(450.0, 500.0, 600.0),
}


def bar(*, at_least: float | None = None, at_most: float | None = None, baseline: str = "nats-py") -> Bar:
    return Bar(claim="c", metric="rate", contender="jetspark", baseline=baseline, at_least=at_least, at_most=at_most)


def test_a_spread_is_the_median_between_lowest_and_highest() -> None:
    found = result(SAMPLES).contender("jetspark")
    assert found is not None
    spread = found.spreads["rate"]
    assert (spread.median, spread.min, spread.max) == (500.0, 450.0, 600.0)


def test_a_ratio_is_the_median_of_ratios_within_the_same_repeat() -> None:
    ratio = result(SAMPLES).ratio("rate", "jetspark", "nats-py")
    assert ratio is not None
    assert ratio.ratio == 4.0  # of 4.5, 2.5, 4.0; the ratio of the medians is 3.3
    assert (ratio.ratio_min, ratio.ratio_max) == (2.5, 4.5)


def test_nobody_is_compared_with_itself() -> None:
    pairs = {(ratio.contender, ratio.baseline) for ratio in result(SAMPLES).ratios}
    assert pairs == {
        ("bare", "nats-py"),
        ("nats-py", "bare"),
        ("jetspark", "nats-py"),
        ("jetspark", "bare"),
    }


@pytest.mark.parametrize(
    ("promise", "is_met"),
    [
        (bar(at_least=4.0), True),
        (bar(at_least=4.1), False),
        (bar(at_most=4.0), True),
        (bar(at_most=3.9), False),
        (bar(at_least=0.5, baseline="bare"), True),
        (bar(at_least=0.51, baseline="bare"), False),
    ],
)
def test_a_bar_is_judged_by_the_median_ratio(promise: Bar, is_met: bool) -> None:
    [verdict] = result(SAMPLES, promise).verdicts
    assert verdict.is_met is is_met


@pytest.mark.parametrize(("at_most", "is_met"), [(350.0, True), (349.0, False)])
def test_a_bar_may_be_about_the_median_difference(at_most: float, is_met: bool) -> None:
    promise = Bar(claim="c", metric="rate", contender="jetspark", baseline="nats-py", by="difference", at_most=at_most)
    [verdict] = result(SAMPLES, promise).verdicts
    assert (verdict.value, verdict.is_met) == (350.0, is_met)


@pytest.mark.parametrize(("at_least", "is_met"), [(500.0, True), (501.0, False)])
def test_a_bar_without_a_baseline_is_about_the_median_itself(at_least: float, is_met: bool) -> None:
    [verdict] = result(SAMPLES, bar(baseline="", at_least=at_least)).verdicts
    assert (verdict.value, verdict.is_met) == (500.0, is_met)


def test_a_bar_whose_baseline_is_not_there_is_neither_met_nor_missed() -> None:
    without_peer = {name: samples for name, samples in SAMPLES.items() if name != "nats-py"}
    found = result(without_peer, bar(at_least=1.5))
    assert found.verdicts[0].value is None
    assert found.verdicts[0].is_met is None
    peer = found.contender("nats-py")
    assert peer is not None
    assert (peer.skipped, peer.error) == ("absent", None)


def test_a_quick_run_judges_nothing() -> None:
    [verdict] = result(SAMPLES, bar(at_least=1.5), judge=False).verdicts
    assert verdict.is_met is None


def test_one_failed_sample_leaves_no_median_to_choose_from_the_rest() -> None:
    failed = [*series(450.0, 500.0), Sample(repeat=2, error="messages were lost")]
    found = result({**SAMPLES, "jetspark": failed}, bar(at_least=1.5))
    ours = found.contender("jetspark")
    assert ours is not None
    assert ours.spreads == {}
    assert ours.error == "messages were lost"
    assert found.ratio("rate", "jetspark", "bare") is None
    assert found.verdicts[0].is_met is None


def test_the_document_is_json_with_every_sample() -> None:
    report = Report(
        started="2026-01-01T00:00:00+00:00",
        machine={"cpu_count": 2},
        versions={"nats-py": None},
        commit=None,
        server="embedded",
        repeats=3,
        is_quick=False,
        workloads=[result(SAMPLES, bar(at_least=1.5))],
    )
    document = json.loads(json.dumps(report.to_dict()))
    assert document["schema"] == 1
    [entry] = document["workloads"]
    assert entry["count"] == 100
    assert entry["payload_bytes"] == 128
    ours = entry["contenders"]["jetspark"]
    assert [sample["values"]["rate"] for sample in ours["samples"]] == [450.0, 500.0, 600.0]
    assert ours["median"] == {"rate": 500.0}
    assert ours["min"] == {"rate": 450.0}
    [promise] = entry["bars"]
    assert (promise["at_least"], promise["at_most"], promise["is_met"]) == (1.5, None, True)
    assert report.errors == []


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1.0], 50, 1.0),
        ([1.0, 2.0], 50, 1.0),
        ([1.0, 2.0, 3.0], 50, 2.0),
        ([float(number) for number in range(1, 101)], 99, 99.0),
        ([float(number) for number in range(1, 1001)], 99, 990.0),
        ([1.0, 2.0], 100, 2.0),
    ],
)
def test_a_percentile_is_one_of_the_measured_values(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


@pytest.mark.parametrize("size", [0, 1, 16, 128, 1000])
def test_a_payload_has_its_size_and_no_line_break(size: int) -> None:
    assert len(payload_of(size)) == size
    assert b"\n" not in payload_of(size)


def test_every_bar_names_contenders_and_metrics_that_exist() -> None:
    for entry in WORKLOADS.values():
        names = {contender.name for contender in entry.contenders}
        assert {*entry.baselines} <= names
        for promise in entry.bars:
            assert promise.contender in names
            assert promise.baseline in {"", *entry.baselines}
            assert promise.metric in {metric.name for metric in entry.metrics}


def test_every_workload_has_a_row_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named: set[str] = set()
    for row in rows:
        first, *others = re.findall(r"`([^`]+)`", row)
        base = first.rpartition("-")[0]
        named |= {first, *(base + each if each.startswith("-") else each for each in others)}
    assert set(WORKLOADS) - named == set()


def test_an_unknown_workload_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"nonsense.*core-publish"):
        choose(("core-publish", "nonsense"))


@pytest.mark.parametrize("options", [{"repeats": 2}, {"count": 0}, {"repeats": 0, "is_quick": True}])
def test_a_plan_that_cannot_give_a_median_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Plan(**options)  # type: ignore[arg-type]


def test_peers_and_uvloop_twins_come_and_go_with_the_plan() -> None:
    entry = WORKLOADS["core-publish"]
    chosen, skipped = contenders_of(entry, Plan(has_peers=False, has_uvloop=True))
    assert list(chosen) == [
        "bare",
        "nats-py",
        "nats-py-uvloop",
        "nats.c",
        "jetspark",
        "jetspark-uvloop",
        "jetspark-blocking",
    ]
    assert skipped["nats-py"] == skipped["nats-py-uvloop"] == skipped["nats.c"] == "left out by request"
    assert total_samples(Plan(workloads=("core-publish",), has_peers=False, repeats=4)) == 12


def test_a_missing_package_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    _, skipped = contenders_of(WORKLOADS["core-publish"], Plan(has_uvloop=True))
    assert skipped == {
        "nats-py": "nats-py is not installed",
        "nats-py-uvloop": "nats-py, uvloop is not installed",
        "nats.c": "gcc is not on the PATH: apt install gcc libnats-dev",
        "jetspark-uvloop": "uvloop is not installed",
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_claim_says_what_it_is_about_and_its_own_threshold(name: str) -> None:
    for promise in WORKLOADS[name].bars:
        threshold = promise.at_least if promise.at_least is not None else promise.at_most
        stated = re.findall(r"\b([\d.,]+) (?:x|times|thousand|ms|µs|ns|items/s|seconds)(?: |$)", promise.claim)
        words = {"twice as long": 2.0, "as fast as": 1.0, "no longer than": 1.0}
        numbers = [float(number.replace(",", "")) for number in stated]
        numbers += [number * 1000 for number in numbers if "thousand" in promise.claim or "ms" in promise.claim]
        numbers += [value for word, value in words.items() if word in promise.claim]
        assert threshold in numbers, promise.claim
        assert re.search(r" (is|are|takes|adds|costs|folds|applies)\b", promise.claim), promise.claim


def test_a_slow_peer_does_a_part_of_a_long_workload_and_ours_do_all_of_it() -> None:
    pull = WORKLOADS["js-pull"]
    counts = {contender.name: Plan().count_for(pull, contender) for contender in pull.contenders}
    assert counts.pop("nats-py") == 100_000
    assert {*counts.values()} == {1_000_000}
    assert Plan(count=3).count_for(pull, pull.contenders[2]) == 1
    for each in WORKLOADS.values():
        assert all(contender.count_divisor == 1 for contender in each.contenders if not contender.needs)


def test_a_stopwatch_counts_the_processor_time_of_all_threads_and_no_waiting() -> None:
    watch = Stopwatch()
    worker = threading.Thread(target=lambda: sum(range(300_000)))
    worker.start()
    worker.join()
    time.sleep(0.05)
    watch.stop()
    assert 0 < watch.cpu_s <= watch.elapsed_s - 0.04
    values = watch.values(500_000)
    assert values["cpu_s_per_million"] == pytest.approx(watch.cpu_s * 2)
    assert values["messages_per_s"] == pytest.approx(500_000 / watch.elapsed_s)


def test_a_round_is_timed_from_the_loop_body_or_its_preparation_to_its_end_or_its_checks() -> None:
    job = Job(url="", subject="", count=4, warmup=1, payload_bytes=0)
    counts = []
    for count in (rounds := Rounds(job)):
        counts.append(count)
        began = time.perf_counter()
        time.sleep(0.05)  # of the preparation
        rounds.begin()
        time.sleep(0.01)
        rounds.end()
        time.sleep(0.05)  # of the checks
    assert counts == [1, 4]
    assert 0.01 <= rounds.elapsed_s <= time.perf_counter() - began - 0.1
    assert rounds.values()["messages_per_s"] == pytest.approx(4 / rounds.elapsed_s)
    for _ in (rounds := Rounds(job)):
        time.sleep(0.01)
    found = rounds.elapsed_s
    time.sleep(0.01)
    assert rounds.elapsed_s == found >= 0.01
