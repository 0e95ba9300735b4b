"""The ``jetspark`` command as a shell sees it, whatever the subcommand: version and help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jetspark

MODULE = [sys.executable, "-m", "jetspark"]
SCRIPT = [str(Path(sys.executable).with_name("jetspark"))]


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_the_version_is_told(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout == f"jetspark {jetspark.__version__}\n"


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["server", "-h"]])
def test_help_is_where_people_look_for_it(arguments: list[str]) -> None:
    done = subprocess.run([*MODULE, *arguments], capture_output=True, text=True, timeout=250, check=True)
    assert "Usage: jetspark" in done.stdout
