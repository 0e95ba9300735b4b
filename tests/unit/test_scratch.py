"""What tests leave in the temporary folder ends with the run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import scratch


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*scratch.VARIABLES, "JDK_JAVA_OPTIONS"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_this_process_and_those_it_starts_write_into_a_folder_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Dbefore=1")
    monkeypatch.setattr(scratch, "ROOM_BYTES", 0 if is_in_memory else 1 << 60)
    (parent := tmp_path / "parent").mkdir()
    (memory := tmp_path / "memory").mkdir()
    folder = scratch.begin(parent, memory=memory)
    assert folder.is_relative_to(memory if is_in_memory else parent)
    program = "import tempfile; print(tempfile.mkdtemp())"
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(left).parent == Path(tempfile.mkdtemp()).parent == folder
    assert os.environ["SPARK_LOCAL_DIRS"] == str(folder)
    assert os.environ["JDK_JAVA_OPTIONS"] == f"-Dbefore=1 -Djava.io.tmpdir={folder}"
    scratch.end(folder)
    assert list(parent.iterdir()) == list(memory.iterdir()) == []


def test_a_run_that_was_killed_leaves_nothing_in_memory_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "ROOM_BYTES", 0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    of_killed, of_living = tmp_path / f"jetspark-tests-{ended.pid}-x", tmp_path / "jetspark-tests-1-x"
    of_others = tmp_path / "other"
    for each in (of_killed, of_living, of_others):
        each.mkdir()
    scratch.end(scratch.begin(tmp_path, memory=tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([of_living, of_others])


def test_without_a_folder_in_memory_there_is_another(tmp_path: Path) -> None:
    folder = scratch.begin(tmp_path, memory=tmp_path / "absent")
    assert folder.parent == tmp_path


def test_this_run_has_such_a_folder() -> None:
    assert Path(tempfile.gettempdir()).name == "scratch"
