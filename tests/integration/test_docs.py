"""What the documentation shows is run: README and guides block by block, examples whole, the CLI page for drift."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tutorial import Reader
from support.zygote import Zygote

import jetspark
from jetspark.server import NatsServer
from jetspark.testing import SharedNatsServer

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    REPOSITORY / "README.md",
    *(page for folder in ("docs", "docs/evidence") for page in sorted((REPOSITORY / folder).glob("*.md"))),
]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))


WHOLE_PAGES = ["docs/spark-recipes.md"]
"""Pages whose blocks are one program. A block that begins with the name of a file is that file."""


def _blocks() -> dict[str, str]:
    """Each block of code, by its page and line; the program of a page by the page."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(REPOSITORY).as_posix()
        if name in WHOLE_PAGES:
            found[name] = "\n".join(block for file, block in _parts(name) if not file)
            continue
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text[: block.start()].count("\n") + 1
            # Those with an import of another block are a project of several files: test_pytest_plugin.py runs it.
            if "from orders import" not in block[1]:
                found[f"{page.relative_to(REPOSITORY)}:{line}"] = block[1]
    return found


def _parts(page: str) -> Iterator[tuple[str, str]]:
    """The blocks of a page that is one program; before each the name of its file, if it is one."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        named = re.match(r"# (\w+\.py)\n", block)
        yield "" if named is None else named[1], block


BLOCKS = _blocks()
SPARK_BLOCKS = {name: code for name, code in BLOCKS.items() if "jetspark.spark" in code}
SPARK_EXAMPLES = {str(path): text for path in EXAMPLES if "jetspark.spark" in (text := path.read_text("utf-8"))}

# One after the other in one process, so that all have one JVM: each makes a session of its own, and stops it. Examples
# find the modules of their folder, as they do when they are run alone.
RUN_WITH_SPARK = """
import json, os, runpy, sys
from pyspark import SparkContext
for name, code in json.load(sys.stdin).items():
    print(f"{name} begins", file=sys.stderr)
    if name.endswith(".py"):
        sys.path[0] = os.path.dirname(name)
        runpy.run_path(name, run_name="__main__")
    else:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    assert SparkContext._active_spark_context is None, f"{name} leaves a session"
    print(f"{name} is done")
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedNatsServer]:
    """One server, on which every block has an account of its own: their streams have the same names."""
    with SharedNatsServer() as server:
        yield server


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(
        "jetspark.aio.client",
        "jetspark.app.testing",
        "jetspark.batcher",
        "jetspark.batcher.blocking",
        "jetspark.blocking.client",
        "jetspark.server",
    ) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in SPARK_BLOCKS])
def test_a_block_of_the_documentation_runs_as_written(
    name: str, shared: SharedNatsServer, tmp_path: Path, zygote: Zygote
) -> None:
    result = zygote.run(_at(shared.new_account_url(), BLOCKS[name]), folder=tmp_path, timeout=550)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_blocks_of_the_documentation_and_examples_with_spark_run_as_written(tmp_path: Path) -> None:
    """Each block has a server of its own: an account's address has a password, which Spark's options refuse."""
    for file, text in (part for page in WHOLE_PAGES for part in _parts(page) if part[0]):
        (tmp_path / file).write_text(text, encoding="utf-8")
    with contextlib.ExitStack() as servers:
        blocks = {name: _at(servers.enter_context(NatsServer()).url, code) for name, code in SPARK_BLOCKS.items()}
        assert (len(blocks) >= 5, len(SPARK_EXAMPLES) >= 2) == (True, True)
        command = [sys.executable, "-W", "error", "-c", RUN_WITH_SPARK]
        shown = _run(command, tmp_path, input=json.dumps(blocks | SPARK_EXAMPLES), timeout=580)
    assert [name for name in blocks | SPARK_EXAMPLES if f"{name} is done" not in shown.splitlines()] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_can_be_followed(shared: SharedNatsServer, tmp_path: Path) -> None:
    reader = Reader(tmp_path, shared.new_account_url())
    try:
        reader.follow((REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    finally:
        reader.end()
    assert reader.commands >= 10


def _at(url: str, code: str) -> str:
    """The address is the default one in the text and a free one here; nothing else is changed."""
    return code.replace("nats://127.0.0.1:4222", url)


@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if str(path) not in SPARK_EXAMPLES], ids=lambda path: path.name
)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    _run([sys.executable, "-W", "error", str(example)], tmp_path, timeout=250)


def _run(command: list[str], folder: Path, *, timeout: float = 110, **options: Any) -> str:
    """What it printed."""
    result: subprocess.CompletedProcess[str] = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, content in generate.pages().items():
        assert (REPOSITORY / "docs" / name).read_text(encoding="utf-8") == content, f"{name}: run `make docs`"


def test_every_ratio_of_the_readme_comes_from_the_results() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    paragraph = text[text.index("## How fast") : text.index("## Install")]
    assert len(re.findall(r"\d<!-- \S+ \S+ \S+", paragraph)) >= 8
    unnamed = re.findall("[\\d.]+(?= \\N{MULTIPLICATION SIGN}| of nats)", paragraph)
    assert unnamed == [], "expected a comment that names the ratio"


def test_the_readme_has_one_program_and_the_index_has_every_page() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert readme.count("```python") == 1
    assert "docs/index.md" in readme
    index = REPOSITORY / "docs" / "index.md"
    linked = [*re.findall(r"\]\((\S+\.md)\)", index.read_text(encoding="utf-8")), index.name]
    assert sorted(linked) == sorted(
        page.relative_to(index.parent).as_posix() for page in PAGES if page.is_relative_to(index.parent)
    )


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
        # An image is asked for as it is, and not as the page about it.
        assert (REPOSITORY / link.removeprefix(tree).removesuffix("?raw=true")).exists(), link
        assert link.endswith(".svg?raw=true") == (".svg" in link), link


def test_every_file_the_architecture_page_names_exists() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text):
        assert (REPOSITORY / "src" / "jetspark" / name).exists() or (REPOSITORY / name).exists(), name


def test_every_test_a_page_names_exists() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in (REPOSITORY / "tests").rglob("test_*.py"))
    fixtures = (REPOSITORY / "src" / "pytest_jetspark.py").read_text(encoding="utf-8")
    for page in PAGES:
        for name in re.findall(r"`(test_[a-z0-9_]+)`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in tests + fixtures, f"{page.name}: {name}"


def test_every_requirement_has_one_row_in_a_table_and_an_answer() -> None:
    _, *tables = (REPOSITORY / "docs" / "evidence" / "requirements.md").read_text(encoding="utf-8").split("\n## ")
    total = 0
    for table in tables:
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
        assert [row for row in rows if len(row) != 3 or not all(map(str.strip, row))] == []
        names = [row[0].strip() for row in rows]
        assert len(names) == len({*names}) > 0
        total += len(names)
    assert total >= 250
    assert names == [f"B{number}" for number in range(1, 47)]


def test_every_public_name_is_described() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in jetspark.__all__ if f"`{name}" not in text and f"## {name}\n" not in text] == []
