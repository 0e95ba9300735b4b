"""``python -m benchmarks``: our numbers next to our peers', in one interleaved run."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.report import Ratio, Report, Spread, Verdict, WorkloadResult
from benchmarks.runner import Plan, run, total_samples
from benchmarks.workload import CPU_PER_MILLION, Metric
from benchmarks.workloads import WORKLOADS
from jetspark.errors import ConfigError, JetSparkError

__all__ = ["bench"]

# From this width on, a row also says how the contender does the work.
WIDE_COLUMNS = 110
# Below that width, a table with more baselines has no room for the spread.
MOST_BASELINES_WITH_SPREAD = 2


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(help=f"Some of: {', '.join(WORKLOADS)}. All when none is named.", show_default=False),
    ] = None,
    count: Annotated[int | None, typer.Option(help="Operations in each measurement.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds; medians are over them. 5 if not given.", min=1)] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write every sample and result there; - is standard output.", metavar="FILE"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round of a few messages: shows that it works, not how fast.")
    ] = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether to measure other clients too.")] = True,
    uvloop: Annotated[bool, typer.Option("--uvloop", help="Measure the asyncio clients on uvloop as well.")] = False,
    url: Annotated[
        str | None, typer.Option(help="A server that already runs, without authentication or TLS.", metavar="URL")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with code 1 when a bar is missed.")] = False,
) -> None:
    """Measure JetSpark, its peers and a bare socket, side by side, and compare.

    Each measurement runs in a process of its own against the same server; the order rotates from round to round.
    Exits with code 1 when a measurement failed. Ctrl-C ends it with code 130, and says how far it came.
    """
    notes = Console(stderr=True, highlight=False)
    try:
        plan = Plan(
            workloads=tuple(workloads or ()),
            count=count,
            repeats=repeats,
            is_quick=quick,
            has_peers=peers,
            has_uvloop=uvloop,
            url=url,
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    report = _run_with_progress(plan, notes)
    is_json_printed = json_file is not None and str(json_file) == "-"
    _show(report, notes if is_json_printed else Console(highlight=False))
    if json_file is not None:
        document = json.dumps(report.to_dict(), indent=2) + "\n"
        if is_json_printed:
            typer.echo(document, nl=False)
        else:
            json_file.write_text(document, encoding="utf-8")
    for failure in report.errors:
        notes.print(f"failed: {failure}", style="red", markup=False)
    if report.errors or (check and not all(verdict.is_met for verdict in report.verdicts)):
        raise typer.Exit(1)


def _run_with_progress(plan: Plan, notes: Console) -> Report:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("starting a server", total=total_samples(plan))
        begun = 0

        def on_progress(what: str) -> None:
            nonlocal begun
            progress.update(task, description=what, completed=begun)
            begun += 1

        try:
            return run(plan, on_progress)
        except KeyboardInterrupt:
            progress.stop()
            done = max(0, begun - 1)
            notes.print(f"interrupted after {done} of {total_samples(plan)} measurements: none is shown or written")
            raise typer.Exit(128 + signal.SIGINT) from None


def _show(report: Report, out: Console) -> None:
    machine, versions = report.machine, report.versions
    out.print(f"{machine['cpu_count']} x {machine['cpu_model']}, {machine['python']}, {machine['system']}")
    out.print(", ".join(f"{name} {version or 'absent'}" for name, version in versions.items()))
    rounds = "1 round" if report.repeats == 1 else f"medians of {report.repeats} interleaved rounds (lowest to highest)"
    out.print(f"{rounds}, {report.server if report.server != 'embedded' else 'embedded nats-server'}")
    for result in report.workloads:
        out.print()
        out.print(f"[bold]{result.workload.name}[/]: {result.workload.what}")
        out.print(f"{result.count:,} operations, {result.workload.payload_bytes} bytes each")
        first, *others = (metric for metric in result.workload.metrics if metric != CPU_PER_MILLION)
        is_wide = out.width >= WIDE_COLUMNS
        out.print(_table(result, first, is_wide=is_wide, has_cpu=CPU_PER_MILLION in result.workload.metrics))
        for metric in others:
            out.print(_table(result, metric, is_wide=is_wide, has_cpu=False))
        for contender in result.contenders:
            if contender.skipped is not None:
                out.print(f"{contender.name} skipped: {contender.skipped}", markup=False)
            elif contender.count != result.count:
                out.print(f"{contender.name}: {contender.count:,} operations, since it is slow", markup=False)
    out.print()
    if report.is_quick:
        out.print("A quick run says nothing about speed; bars are not judged.")
        return
    for verdict in report.verdicts:
        word = {True: "[green]met[/]   ", False: "[red]missed[/]", None: "unknown"}[verdict.is_met]
        out.print(f"{word}  {verdict.bar.claim}: {_value(verdict)}")


def _value(verdict: Verdict) -> str:
    if verdict.value is None:
        return "not measured"
    if verdict.bar.baseline and verdict.bar.by == "ratio":
        return f"{verdict.value:.2f} x"
    return f"{verdict.value:,.0f}"


def _table(result: WorkloadResult, metric: Metric, *, is_wide: bool, has_cpu: bool) -> Table:
    has_spread = is_wide or len(result.workload.baselines) <= MOST_BASELINES_WITH_SPREAD
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(metric.name, no_wrap=True)
    table.add_column(metric.unit if metric.unit != "s" else "us", justify="right", no_wrap=True)
    if has_spread:
        table.add_column("spread", justify="right", no_wrap=True)
    for baseline in result.workload.baselines:
        table.add_column(f"x {baseline}", justify="right", no_wrap=True)
    if has_cpu:
        table.add_column("CPU s/M", justify="right", no_wrap=True)
    if is_wide:
        table.add_column("how", style="dim")
    for contender in result.contenders:
        spread = contender.spreads.get(metric.name)
        if spread is None:
            continue
        ratios = (result.ratio(metric.name, contender.name, baseline) for baseline in result.workload.baselines)
        table.add_row(
            contender.name,
            _amount(spread.median, metric),
            *([_range(spread, metric)] if has_spread else []),
            *(_times(ratio) for ratio in ratios),
            *([f"{contender.spreads[CPU_PER_MILLION.name].median:.1f}"] if has_cpu else []),
            *([contender.what] if is_wide else []),
        )
    return table


def _amount(value: float, metric: Metric) -> str:
    return f"{value * 1e6:,.0f}" if metric.unit == "s" else f"{value:,.0f}"


def _range(spread: Spread, metric: Metric) -> str:
    return f"{_amount(spread.min, metric)}..{_amount(spread.max, metric)}"


def _times(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.ratio:.2f}"


if __name__ == "__main__":
    try:
        typer.run(bench)
    except JetSparkError as error:
        sys.exit(f"benchmarks: {error}")
