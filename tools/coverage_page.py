"""Make ``docs/evidence/coverage.md`` from the JSON report of ``coverage``: lines, by module.

``make coverage`` runs it. Modules below ``LOW_PERCENT`` are listed first, with the lines no test runs.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "evidence" / "coverage.md"
LOW_PERCENT = 80.0

INTRODUCTION = """# Coverage

Which part of the lines of each module the tests run, in percent. `make coverage` made this page, by running
`tests/unit`, `tests/conformance`, `tests/simulation` and what of `tests/integration` needs no Spark, with every process
they start. Not measured: what Spark runs in its own workers (most of `spark`, and what needs a Spark in the command
line), and the watchdog of an embedded server, which starts without site packages.

A line that a test runs is not a line that a test checks: `make mutants` plants mistakes to see whether anybody notices.
"""


@dataclass(frozen=True)
class Module:
    """The figures of one module."""

    name: str
    lines: int
    covered: int
    missing: list[int]

    @property
    def percent(self) -> float:
        return _percent(self.covered, self.lines)


def modules(report: dict[str, Any]) -> list[Module]:
    found = []
    for path, file in report["files"].items():
        parts = Path(path).parts
        name = "/".join(parts[parts.index("jetspark") + 1 :])
        summary = file["summary"]
        made = Module(name, summary["num_statements"], summary["covered_lines"], file["missing_lines"])
        if made.lines:
            found.append(made)
    return sorted(found, key=lambda module: module.name)


def page(report: dict[str, Any]) -> str:
    found = modules(report)
    packages: dict[str, list[Module]] = defaultdict(list)
    for module in found:
        packages[module.name.rpartition("/")[0] or "jetspark"].append(module)
    lines = [
        INTRODUCTION,
        f"All modules: **{_total(found):.0f} %**.",
        "",
        "## By package",
        "",
        "| Package | % |",
        "|---|--:|",
    ]
    lines += [f"| `{name}` | {_total(group):.0f} |" for name, group in sorted(packages.items())]
    if low := [module for module in found if module.percent < LOW_PERCENT]:
        lines += ["", f"## Below {LOW_PERCENT:.0f} %", "", "| Module | % | Lines no test runs |", "|---|--:|---|"]
        lines += [f"| `{module.name}` | {module.percent:.0f} | {ranges(module.missing)} |" for module in low]
    lines += ["", "## By module", "", "| Module | Lines | % |", "|---|--:|--:|"]
    lines += [f"| `{each.name}` | {each.lines} | {each.percent:.0f} |" for each in found]
    return "\n".join(lines) + "\n"


def ranges(numbers: Iterable[int]) -> str:
    """``1-3, 7``: neighbours together."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def _total(group: list[Module]) -> float:
    return _percent(sum(module.covered for module in group), sum(module.lines for module in group))


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


def main() -> None:
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    PAGE.write_text(page(report), encoding="utf-8")
    for module in modules(report):
        print(f"{module.percent:5.1f} %  {module.name}")
    print(f"{_total(modules(report)):5.1f} %  all modules: {PAGE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
