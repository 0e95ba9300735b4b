"""Phrases that readers stumble over, and that have a plain word instead: none in what users read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GENERATED = {"reference.md", "cli.md", "results.md"}
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "examples").rglob("*.py")),
    *sorted((REPOSITORY / "examples").rglob("*.md")),
]

ANYWHERE = {
    r"\bso many\b": "this many",
    r"\bso long\b": "this long, as long as",
    r"\bwhoever\b": "the one who does it: a worker, a caller, a reader",
}
WRITTEN = {r"\bwhat (?:was|were)\b": "the noun: messages, states, writes, replies"}


def _prose(page: Path) -> str:
    """Without blocks of code, where a comment may quote anything."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE) if page.suffix == ".md" else text


def stumbles(text: str, phrases: dict[str, str]) -> list[str]:
    return [
        f"{' '.join(found[0].split())!r}: write {instead}"
        for phrase, instead in phrases.items()
        for found in re.finditer(rf"(?i)(?:\S+\s+)?{phrase}(?:\s+\S+)?".replace(" ", r"\s+"), text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_says_it_plainly(page: Path) -> None:
    phrases = ANYWHERE if page.name in GENERATED else ANYWHERE | WRITTEN
    assert stumbles(_prose(page), phrases) == []


def test_phrases_are_found_across_lines_and_parts_of_words_are_not() -> None:
    assert stumbles("Whoever reads so\nmany pages", ANYWHERE) == [
        "'reads so many pages': write this many",
        "'Whoever reads': write the one who does it: a worker, a caller, a reader",
    ]
    assert stumbles("also many, so longing", ANYWHERE) == []
    assert stumbles("it keeps what was sent", WRITTEN) != []
