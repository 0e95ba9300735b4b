"""The demo's bars in terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jetspark.demo.screen import Screen


@pytest.mark.parametrize("width", [50, 60, 69, 70, 80, 99, 100, 120, 200])
def test_numbers_are_whole_and_a_stage_is_one_line_however_narrow_the_terminal_is(width: int) -> None:
    output = io.StringIO()
    screen = Screen(Console(file=output, force_terminal=True, width=width, height=24, color_system=None))
    with screen.bars(), screen.stage("rebuild and swap", 500_000) as stage:
        stage.reached(123_456)
        stage.say("10,319/s, while Spark starts and much more is said of what happens beside it, at length")
        assert screen._progress is not None
        screen._progress.refresh()
    lines = [line for line in output.getvalue().replace("\r", "\n").splitlines() if "rebuild and swap" in line]
    shown = [line for line in lines if "123456/500000" in line]
    assert shown
    for line in shown:
        assert " s " in line, "the seconds are on the same line"
        assert line.rstrip().endswith("…") or "at length" in line
    assert all(len(line.rstrip()) <= width for line in output.getvalue().splitlines() if "\x1b" not in line)
