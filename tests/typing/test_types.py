"""mypy, strict, on code a user would write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

REPOSITORY = Path(__file__).parents[2]
FILES = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy knows of the package after the first run need not be found out in the others."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_users_see_the_types_they_should(path: Path, cache: Path) -> None:
    _check([path], cache)


@pytest.mark.timeout(600)
def test_every_example_of_the_documentation_is_well_typed(tmp_path: Path, cache: Path) -> None:
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        found = list(re.finditer(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
        stem = page.stem.replace("-", "_")
        named = [re.match(r"# (\w+\.py)\n", block[1]) for block in found]
        if any(named):  # the page is one program, and the blocks with names are its modules
            for name, block in zip(named, found, strict=True):
                path = blocks / (f"{stem}.py" if name is None else name[1])
                path.write_text(
                    (path.read_text(encoding="utf-8") if path.exists() else "") + block[1], encoding="utf-8"
                )
            continue
        for number, block in enumerate(found):
            # Where blocks are files of a project, the first one is its ``orders.py``.
            code = block[1].replace("from orders import", f"from {stem}_0 import")
            (blocks / f"{stem}_{number}.py").write_text(code, encoding="utf-8")
    examples = sorted((REPOSITORY / "examples").glob("*.py"))
    assert examples
    _check([*sorted(blocks.iterdir()), *examples], cache)


def _check(paths: list[Path], cache: Path) -> None:
    # A configuration of its own, as a user has it: nothing of the project's is on the path or relaxed.
    config = cache / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n[mypy-pyarrow.*]\nignore_missing_imports = True\n")
    files = [str(path) for path in paths]
    output, errors, code = api.run(["--config-file", str(config), "--cache-dir", str(cache), *files])
    assert code == 0, output + errors
