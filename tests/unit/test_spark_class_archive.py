"""The archive of Java classes: who may use it, and what Java is told."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pyspark")

JAVA = "/usr/lib/jvm/some/bin/java"
TOOL = Path(__file__).parents[2] / "tools" / "class_archive.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("class_archive", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = _load()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that is there, and nobody else's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path: Path = tool.archive_path(JAVA)
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    return path


def test_java_uses_an_archive_that_is_there_and_says_nothing_of_it(archive: Path) -> None:
    assert tool.archive_options(JAVA).startswith(f"-XX:SharedArchiveFile={archive} -Xlog:cds=off")


def test_without_one_java_is_told_nothing(archive: Path) -> None:
    archive.unlink()
    assert tool.archive_options(JAVA) == ""


def test_another_java_has_another_one(archive: Path) -> None:
    assert tool.archive_options("/opt/java-25/bin/java") == ""


@pytest.mark.parametrize("which", ["file", "folder"])
def test_one_that_others_may_write_to_is_not_used(archive: Path, which: str) -> None:
    (archive if which == "file" else archive.parent).chmod(0o722)
    assert tool.archive_options(JAVA) == ""


def test_a_path_that_java_would_take_for_two_flags_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two words"))
    path = tool.archive_path(JAVA)
    path.parent.mkdir(mode=0o700, parents=True)
    path.touch(mode=0o600)
    assert tool.archive_options(JAVA) == ""


def test_the_command_leaves_one_that_is_there_and_writes_one_that_is_not(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/usr/lib/jvm/some")
    written: list[list[str]] = []

    def run(command: list[str], **options: object) -> None:
        written.append(command)
        Path(command[-1]).write_bytes(b"classes")

    monkeypatch.setattr(subprocess, "run", run)
    tool.main([])
    assert written == []
    assert capsys.readouterr().out == f"{tool.archive_options(JAVA)}\n"
    archive.unlink()
    tool.main([])
    [command] = written
    assert command[1:3] == [str(TOOL), "--note"]
    assert archive.read_bytes() == b"classes"
    assert archive.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in archive.parent.iterdir()] == [archive.name]
    assert capsys.readouterr().out.startswith(f"-XX:SharedArchiveFile={archive} ")
