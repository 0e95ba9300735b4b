"""The share of prose lines that read like a literal translation: measured per package, and only ever lowered.

A hit is a line to read again, not an error by itself. Rewrite its sentence with a concrete noun as the subject and an
active verb; a synonym for the matched word misses the point.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GENERATED = {"reference.md", "cli.md", "results.md", "coverage.md"}

# The first words of a docstring, and elsewhere words in any place, each with its remedy.
OPENINGS = {
    r"What|Who|Whose|Of|Those|That|One that|Some that": "begin with the noun: the messages, the id of, the caller",
    r"Whether": "write 'True if ...', or 'Check that ...'",
    r"As (?:far|many|much|long)|So": "begin with the subject of the sentence",
}
PHRASES = {
    r"nobody|somebody|anybody|whoever|who (?:has|is|was|asks|reads|writes)": "name the part: a worker, the server",
    r"for ever|anew|meanwhile|thereby|by as much|so much as|as if it": "permanently, again, in the meantime",
    r"goes on|went on|go on|begins? (?:again|there)|is at it|mend(?:s|ed)?": "continue, restart, repair",
    r"makes? of it|to be had": "produces, is available",
    r"(?-i:is none|are none)|is no \w+|than that|so many": "is missing, is not a, as many as",
    r"those that|one that|what (?:is|was|it|they|has|others|comes|came)": "name the thing that the clause describes",
    r"(?<!dead )(?<!dead-)letters?(?!,? (?:or )?digits)": "dead letter; characters",
}

# Percent of the prose lines. Lower a ceiling when the rate has fallen; never raise one.
CEILINGS = {
    "README.md": 0.9,
    "aio": 0.5,
    "app": 1.0,
    "batcher": 0.0,
    "bench": 0.0,
    "blocking": 0.2,
    "cli": 0.0,
    "core": 0.4,
    "demo": 0.0,
    "docs": 3.1,
    "examples": 0.0,
    "jetstream": 0.9,
    "lake": 0.0,
    "publish": 0.3,
    "server": 0.0,
    "spark": 0.4,
    "state": 0.0,
    "testing": 0.6,
    "top-level modules": 0.0,
}
SLACK = 0.3


def remedies(text: str, *, is_opening: bool) -> list[str]:
    """The remedies for a line; ``is_opening`` says that it begins a docstring."""
    found = [remedy for start, remedy in OPENINGS.items() if is_opening and re.match(rf"(?:{start})\b", text)]
    return found + [remedy for phrase, remedy in PHRASES.items() if re.search(rf"(?i)\b(?:{phrase})\b", text)]


def prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line number, text, and True where a docstring begins, for docstrings and comments, or a page without its code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"(?ms)^```.*?^```", lambda code: "\n" * code[0].count("\n"), source)
        yield from ((number, line.strip(), False) for number, line in enumerate(text.splitlines(), 1) if line.strip())
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for offset, line in enumerate(node.value.value.strip().splitlines()):
                if line.strip():
                    yield node.lineno + offset, line.strip(), offset == 0
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip().startswith("#"):
            yield number, line.strip("# "), False


def groups() -> dict[str, list[Path]]:
    found = {
        "docs": [path for path in REPOSITORY.glob("docs/**/*.md") if path.name not in GENERATED],
        "examples": [*REPOSITORY.glob("examples/**/*.py")],
        "README.md": [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"],
    }
    for path in REPOSITORY.glob("src/**/*.py"):
        parts = path.relative_to(REPOSITORY / "src").parts
        found.setdefault(parts[1] if len(parts) > 2 else "top-level modules", []).append(path)
    return found


@pytest.mark.parametrize("group", sorted({*CEILINGS, *groups()}))
def test_the_prose_of_a_package_reads_no_worse_than_before(group: str) -> None:
    count, hits = 0, []
    for path in groups()[group]:
        for number, text, is_opening in prose(path):
            count += 1
            if found := remedies(text, is_opening=is_opening):
                hits.append(f"{path.relative_to(REPOSITORY)}:{number}: {text[:80]!r}: {'; '.join(found)}")
    rate, ceiling = 100 * len(hits) / count, CEILINGS[group]
    assert rate <= ceiling, "\n".join([f"{rate:.2f} % is above {ceiling} %: rewrite some of these", *hits[:40]])
    assert rate >= ceiling - SLACK, f"lower the ceiling of {group!r} from {ceiling} to {math.ceil(rate * 10) / 10}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("What was added.", 2),
        ("Whether nobody waits, and it goes on meanwhile.", 4),
        ("It is none.", 1),
        ("It is None without a session, and recommends what a consumer sends.", 0),
        ("The dead letter is written; another letter is not. Use letters, digits and dots.", 1),
    ],
)
def test_words_to_read_again_are_found(text: str, count: int) -> None:
    assert len(remedies(text, is_opening=True)) == count


def test_code_on_a_page_is_not_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("One line.\n\n```python\nnobody = 1\n```\nAnother line.\n", encoding="utf-8")
    assert [text for _, text, _ in prose(page)] == ["One line.", "Another line."]
