"""The file that tells Spark's JVM how to log: nobody else can write it, or have it written elsewhere."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jetspark.spark import startup_files


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that others may write to as well."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(startup_files, "_made", None)
    yield folder
    startup_files.remove_startup_files()


def test_the_file_is_in_a_folder_of_its_owner_alone(shared: Path) -> None:
    path = startup_files.logging_file()
    assert path.read_text(encoding="utf-8") == startup_files.LOGGING
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent.parent == shared
    assert startup_files.logging_file() == path


def test_a_link_that_waits_under_a_name_one_could_foresee_is_not_followed(shared: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (f"jetspark-log4j2-{os.getuid()}.properties", "log4j2.properties", "jetspark-log4j2.properties"):
        (shared / name).symlink_to(precious)
    path = startup_files.logging_file()
    assert not path.is_symlink()
    assert path.resolve().is_relative_to(shared.resolve())
    assert precious.read_text() == "mine"


def test_two_processes_have_files_of_their_own(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = startup_files.logging_file()
    monkeypatch.setattr(startup_files, "_made", None)
    second = startup_files.logging_file()
    assert first.parent != second.parent
    first.unlink()
    first.parent.rmdir()


@pytest.mark.parametrize("tampered", ["content", "link", "mode", "folder", "gone"])
def test_a_file_that_is_not_as_it_was_made_is_not_trusted(shared: Path, tmp_path: Path, tampered: str) -> None:
    path = startup_files.logging_file()
    foreign = tmp_path / "foreign"
    foreign.write_text(startup_files.LOGGING)
    match tampered:
        case "content":
            path.write_text("appender.evil.type = Script")
        case "link":
            path.unlink()
            path.symlink_to(foreign)
        case "mode":
            path.chmod(0o666)
        case "folder":
            path.parent.chmod(0o777)
        case "gone":
            path.unlink()
            path.parent.rmdir()
    again = startup_files.logging_file()
    assert again.parent != path.parent
    assert again.read_text(encoding="utf-8") == startup_files.LOGGING
    assert foreign.read_text() == startup_files.LOGGING


def test_nothing_is_left_when_the_process_ends_not_even_by_a_child_that_ends_earlier(tmp_path: Path) -> None:
    program = """
import os, sys
from jetspark.spark.startup_files import logging_file
path = logging_file()
if (child := os.fork()) == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert path.exists()
print(path)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert Path(done.stdout.strip()).parent.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
