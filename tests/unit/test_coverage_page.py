"""The page of figures that ``make coverage`` makes of a report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location(
    "coverage_page", Path(__file__).parents[2] / "tools" / "coverage_page.py"
)
assert _spec is not None
assert _spec.loader is not None
tool = sys.modules["coverage_page"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def file(lines: int, covered: int, missing: list[int]) -> dict[str, Any]:
    return {"summary": {"num_statements": lines, "covered_lines": covered}, "missing_lines": missing}


REPORT = {
    "files": {
        "src/jetspark/errors.py": file(10, 9, [2]),
        "src/jetspark/core/parser.py": file(10, 5, [3, 4, 5, 9, 11]),
        "src/jetspark/core/__init__.py": file(0, 0, []),
    }
}


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([7], "7"), ([1, 2, 3, 7], "1-3, 7"), ([1, 3, 4], "1, 3-4")])
def test_neighbouring_lines_are_one_range(numbers: list[int], text: str) -> None:
    assert tool.ranges(numbers) == text


def test_a_module_has_its_share_of_lines() -> None:
    found = {module.name: module.percent for module in tool.modules(REPORT)}
    assert found == {"core/parser.py": 50.0, "errors.py": 90.0}


def test_the_page_names_what_no_test_runs() -> None:
    page = tool.page(REPORT)
    assert "All modules: **70 %**." in page
    assert "| `core` | 50 |" in page
    assert "| `jetspark` | 90 |" in page
    assert "| `core/parser.py` | 50 | 3-5, 9, 11 |" in page
    assert "| `errors.py` | 90 | 2 |" not in page
    assert "| `errors.py` | 10 | 90 |" in page
