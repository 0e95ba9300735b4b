"""The examples of sinks are run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "sinks").glob("*.py"))


def test_there_are_examples() -> None:
    assert [example.name for example in EXAMPLES] == ["database.py", "http_bulk.py"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_of_a_sink_runs(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(example)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
