"""Every requirement of the book that applications are measured by has a row on the page of requirements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "requirements.md"

# A section of the book, and the numbers of its requirements. Some belong to two of these.
REQUIREMENTS = {
    "Contracts and topology": """
        1.1-2,3,5,6 1.2-6 2.1-2,5,6 2.2-1 2.5-3,4,7 3.2-1..4,6,7 3.5-6 4.1-1..8 4.2-4 4.4-1..8 4.5-4 5.5-4
        7.1-2,7 8.2-1,2 8.3-2 12.4-1..8
    """,
    "Handlers": """
        1.2-1..5,7 1.3-1,4..9 1.4-1..11 2.2-3 2.4-1..4 4.3-2..7 4.4-2,6 5.2-6 5.4-1..5,7 5.5-5 6.1-1..7
        6.2-1..6 6.3-1..8 6.4-1..8 6.5-5 8.2-3,4 11.1-6 11.2-1,3 11.3-1..3,5 11.4-1,3,4
    """,
    "Projections, views, replay": """
        1.2-4 1.3-2,3 2.3-4 3.1-3,4,6 3.3-1..5 3.4-1..7 3.5-1..5,7 4.2-6 4.5-1,3,5,6 5.1-1..6 5.2-1..5,7,8
        5.3-2..7 5.4-5,6,9 5.5-1..3,6 7.1-4..6 7.2-1..3,5,7 7.3-1,2,5..8 7.4-1..8 8.2-5 8.5-5,6,8 9.5-5
        11.1-3 12.5-1,2,4
    """,
    "Commands and workflows": """
        1.1-1,4 2.2-3,4 5.4-8 6.1-2,6 6.2-5 7.1-1,3,9 7.2-4 7.3-3,4 7.5-1..6 8.1-1..7 8.3-1,3..8 8.4-1..6
    """,
    "Testing": """
        1.5-6 2.5-6 3.3-4 4.4-7 4.5-7 5.4-7 6.5-1..9 7.2-6 7.3-8 7.4-7 7.5-5 8.4-4 8.5-9 9.1-5 9.2-7 9.4-7
        9.5-7 10.1-7 10.2-5 10.3-6 11.3-6 12.1-1..6 12.2-1..6 12.3-1..7 12.4-3..5 12.5-1..5
    """,
}


def ids(text: str) -> Iterator[str]:
    """``3.4-1,5..7`` is four of them."""
    for part in text.split():
        section, _, numbers = part.rpartition("-")
        for each in numbers.split(","):
            first, _, last = each.partition("..")
            yield from (f"{section}-{number}" for number in range(int(first), int(last or first) + 1))


def test_ids_are_written_out() -> None:
    assert list(ids("3.4-1,5..7 12.1-2")) == ["3.4-1", "3.4-5", "3.4-6", "3.4-7", "12.1-2"]


@pytest.mark.parametrize("what", REQUIREMENTS)
def test_every_requirement_has_a_row(what: str) -> None:
    rows = set(re.findall(r"^\| ([\d.]+-\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert [each for each in ids(REQUIREMENTS[what]) if each not in rows] == []
