"""The picture of the demo: what a terminal shows after bars have gone over their own lines."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree
from pathlib import Path

from rich.console import Console

from jetspark.demo.screen import Screen

_SPEC = importlib.util.spec_from_file_location("demo_picture", Path(__file__).parents[2] / "tools" / "demo_picture.py")
assert _SPEC is not None
assert _SPEC.loader is not None
demo_picture = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(demo_picture)


def test_only_what_is_there_at_the_end_is_drawn(tmp_path: Path) -> None:
    with (tmp_path / "written").open("w", newline="") as file:
        console = Console(file=file, force_terminal=True, width=100, highlight=False)
        screen = Screen(console)
        with screen.bars():
            with screen.stage("publish", 10) as stage:
                stage.reached(5)
                screen.line("above the bars")
                stage.say("4,000/s")
            with screen.stage("fold"):
                pass
        screen.found("fold", "all of it", is_good=True)
        screen.table()
    written = (tmp_path / "written").read_bytes().decode().replace("\n", "\r\n")
    assert " 0/10" in written
    lines = demo_picture.last_screen(written)
    picture = demo_picture.draw(lines)
    words = xml.etree.ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    text = " ".join(each.text or "" for each in words).replace("\xa0", " ")
    assert text.count("publish") == 1
    assert "4,000/s" in text
    assert "0/10" not in text.replace("10/10", "")
    assert text.index("above the bars") < text.index("publish") < text.index("all of it")
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
