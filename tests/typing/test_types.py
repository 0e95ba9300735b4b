"""mypy, strict, on code a user would write."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

FILES = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_users_see_the_types_they_should(path: Path, tmp_path: Path) -> None:
    # A configuration of its own: the project's checks src, not this.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n")
    output, errors, code = api.run(["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(path)])
    assert code == 0, output + errors
