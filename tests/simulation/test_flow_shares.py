"""The published numbers about sharing a stream's flow are what the script behind them measures today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PLOTS = Path(__file__).parents[2] / "docs" / "plots"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flow_shares", PLOTS / "flow_shares.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    # Not the largest row: it takes as long as these together.
    ("publishers", "round_trip_s"),
    [(1, 0.02), (10, 0.001), (10, 0.02), (251, 0.02), (1000, 0.001)],
)
def test_a_published_row_is_measured_again(script: ModuleType, publishers: int, round_trip_s: float) -> None:
    row = script.measure(publishers, round_trip_s)
    line = script.table([row]).splitlines()[-3]
    assert line in (PLOTS / "flow-shares.md").read_text().splitlines()
    point = f"{script._x(row.publishers):.1f},{script._y(row.messages_per_s):.1f}"
    assert point in (PLOTS / "flow-shares.svg").read_text()
    assert row.msgs_per_ack == (max(1, 500 // publishers),) * 2
    assert row.slowest > 0.8


def test_every_measurement_is_in_the_table(script: ModuleType) -> None:
    lines = [line.split("|") for line in (PLOTS / "flow-shares.md").read_text().splitlines() if " ms |" in line]
    assert [(each[1].strip(), each[2].strip()) for each in lines] == [
        (f"{round_trip_s * 1000:.0f} ms", str(publishers))
        for round_trip_s in script.ROUND_TRIPS_S
        for publishers in script.PUBLISHERS
    ]
