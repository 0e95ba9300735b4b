"""The archive of Java classes: who may use it, and what Java is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from jetspark.spark import class_archive
from jetspark.spark.class_archive import archive_options, archive_path
from jetspark.spark.session import _settings

JAVA = "/usr/lib/jvm/some/bin/java"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that is there, and nobody else's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = archive_path(JAVA)
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    return path


def java_flags() -> str:
    return _settings(JAVA, is_short=False)["spark.driver.extraJavaOptions"]


def test_a_session_uses_an_archive_that_is_there_and_says_nothing_of_it(archive: Path) -> None:
    assert f" -XX:SharedArchiveFile={archive} -Xlog:cds=off" in java_flags()
    assert f"{archive}" in _settings(JAVA, is_short=True)["spark.driver.extraJavaOptions"]


def test_without_one_java_is_told_nothing(archive: Path) -> None:
    archive.unlink()
    assert archive_options(JAVA) == ""
    assert "Shared" not in java_flags()
    assert not java_flags().endswith(" ")


def test_another_java_has_another_one(archive: Path) -> None:
    assert archive_options("/opt/java-25/bin/java") == ""


@pytest.mark.parametrize("which", ["file", "folder"])
def test_one_that_others_may_write_to_is_not_used(archive: Path, which: str) -> None:
    (archive if which == "file" else archive.parent).chmod(0o722)
    assert archive_options(JAVA) == ""


def test_a_path_that_java_would_take_for_two_flags_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two words"))
    path = archive_path(JAVA)
    path.parent.mkdir(mode=0o700, parents=True)
    path.touch(mode=0o600)
    assert archive_options(JAVA) == ""


def test_the_command_leaves_one_that_is_there_and_writes_one_that_is_not(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/usr/lib/jvm/some")
    written: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        written.append(command)
        Path(command[-1]).write_bytes(b"classes")

    monkeypatch.setattr(subprocess, "run", run)
    class_archive._main([])
    assert written == []
    archive.unlink()
    class_archive._main([])
    [command] = written
    assert command[1:4] == ["-m", "jetspark.spark.class_archive", "--into"]
    assert archive.read_bytes() == b"classes"
    assert archive.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in archive.parent.iterdir()] == [archive.name]
    assert capsys.readouterr().out.endswith(f"{archive}\n")
    assert str(archive) in archive_options(JAVA)
