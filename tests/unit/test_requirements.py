"""Every requirement of the book that applications are measured by has a row on the page of requirements."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "requirements.md"
# A line for each: its number, and what it asks.
CATALOGUE = Path(__file__).with_name("book_requirements.txt")


def numbers_of_the_book() -> list[str]:
    return [line.split(" ", 1)[0] for line in CATALOGUE.read_text(encoding="utf-8").splitlines()]


def test_the_catalogue_has_every_requirement_of_a_section_without_a_gap() -> None:
    counts: dict[str, int] = {}
    for number in numbers_of_the_book():
        section, _, count = number.partition("-")
        assert re.fullmatch(r"\d+\.\d+", section), number
        counts[section] = counts.get(section, 0) + 1
        assert int(count) == counts[section], number
    assert sum(counts.values()) == 421
    assert len({section.split(".")[0] for section in counts}) == 12


def test_every_requirement_has_a_row_and_every_row_is_one() -> None:
    rows = set(re.findall(r"^\| ([\d.]+-\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == set(numbers_of_the_book())
