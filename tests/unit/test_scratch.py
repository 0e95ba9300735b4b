"""What tests leave in the temporary folder ends with the run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import scratch


def test_this_process_and_those_it_starts_write_into_a_folder_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (*scratch.VARIABLES, "JDK_JAVA_OPTIONS"):
        monkeypatch.setenv(variable, "-Dbefore=1")
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = scratch.begin(tmp_path)
    program = "import tempfile; print(tempfile.mkdtemp())"
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(left).parent == Path(tempfile.mkdtemp()).parent == folder
    assert os.environ["SPARK_LOCAL_DIRS"] == str(folder)
    assert os.environ["JDK_JAVA_OPTIONS"] == f"-Dbefore=1 -Djava.io.tmpdir={folder}"
    scratch.end(folder)
    assert list(tmp_path.iterdir()) == []


def test_this_run_has_such_a_folder() -> None:
    assert Path(tempfile.gettempdir()).name == "scratch"
