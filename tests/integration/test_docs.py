"""What the documentation shows is run: README and guides block by block, examples whole, the CLI page for drift."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jetspark
from jetspark.server import NatsServer

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))


def _blocks() -> list[object]:
    found = []
    for page in PAGES:
        for block in re.finditer(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            line = page.read_text(encoding="utf-8")[: block.start()].count("\n") + 1
            found.append(pytest.param(block[1], id=f"{page.relative_to(REPOSITORY)}:{line}"))
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with NatsServer() as server:
        yield server.url


@pytest.mark.timeout(120)
@pytest.mark.parametrize("code", _blocks())
def test_a_block_of_the_documentation_runs_as_written(code: str, url: str, tmp_path: Path) -> None:
    # The address is the default one in the text and a free one here; nothing else is changed.
    code = code.replace("nats://127.0.0.1:4222", url)
    _run([sys.executable, "-W", "error", "-c", code], tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    _run([sys.executable, "-W", "error", str(example)], tmp_path)


def _run(command: list[str], folder: Path) -> None:
    # Some start a Spark of their own.
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, content in generate.pages().items():
        assert (REPOSITORY / "docs" / name).read_text(encoding="utf-8") == content, f"docs/{name}: run `make docs`"


def _prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [*PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)#:]+)\)", _prose(page)):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_links_of_the_readme_work_on_an_index_page_and_lead_somewhere() -> None:
    """An index shows the README without the files beside it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tree = f"{project['urls']['Homepage']}/blob/main/"
    links = re.findall(r"\]\(([^)]+)\)", _prose(REPOSITORY / "README.md"))
    assert links
    for link in links:
        assert link.startswith(tree), f"{link}: expected an address below {tree}"
        assert (REPOSITORY / link.removeprefix(tree)).exists(), link


def test_every_file_the_architecture_page_names_exists() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text):
        assert (REPOSITORY / "src" / "jetspark" / name).exists() or (REPOSITORY / name).exists(), name


def test_every_test_a_page_names_exists() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in (REPOSITORY / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_[a-z0-9_]+)`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in tests, f"{page.name}: {name}"


def test_every_public_name_is_described() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in jetspark.__all__ if f"`{name}" not in text and f"## {name}\n" not in text] == []
