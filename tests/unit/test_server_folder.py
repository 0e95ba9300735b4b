"""The folder of a server: its ports as the server writes them, and the end of its log."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from jetspark.errors import EmbeddedServerError
from jetspark.server.folder import LOG_TAIL_BYTES, LOG_TAIL_LINES, Ports, ServerFolder, tail


@pytest.fixture
def folder(tmp_path: Path) -> ServerFolder:
    made = ServerFolder(tmp_path)
    made.ports.mkdir()
    return made


def say_ports(folder: ServerFolder, pid: int, **urls: str) -> None:
    text = json.dumps({name: [url] for name, url in urls.items()})
    (folder.ports / f"renamed_{pid}.ports").write_text(text)


def write_log(folder: ServerFolder, data: bytes) -> None:
    with folder.open_log() as log:
        log.write(data)


def test_a_new_folder_is_for_its_owner_alone_and_is_removed_whole() -> None:
    folder = ServerFolder.make()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.ports.is_dir()
    write_log(folder, b"hello")
    folder.remove()
    assert not folder.path.exists()


def test_ports_are_those_of_this_process(folder: ServerFolder) -> None:
    say_ports(folder, 6, nats="nats://127.0.0.1:1", monitoring="http://127.0.0.1:2")
    assert folder.read_ports(7) is None
    say_ports(folder, 7, nats="nats://[::1]:4222", monitoring="http://127.0.0.1:8222")
    assert folder.read_ports(7) == Ports(client=4222, monitoring=8222, cluster=None)
    say_ports(folder, 7, nats="nats://a:1", monitoring="http://a:2", cluster="nats://a:3")
    assert folder.read_ports(7) == Ports(client=1, monitoring=2, cluster=3)
    folder.forget_ports()
    assert folder.read_ports(7) is None


def test_ports_that_are_half_written_are_not_there_yet(folder: ServerFolder) -> None:
    (folder.ports / "nats-server_7.ports").write_text('{"nats": ["nats://127.')
    assert folder.read_ports(7) is None


def test_a_server_without_monitoring_cannot_tell_when_it_is_ready(folder: ServerFolder) -> None:
    say_ports(folder, 7, nats="nats://127.0.0.1:1")
    with pytest.raises(EmbeddedServerError, match="turns monitoring off"):
        folder.read_ports(7)


def test_a_log_is_read_from_an_offset_and_at_most_its_end(folder: ServerFolder) -> None:
    assert folder.log_size() == 0
    write_log(folder, b"first run\n")
    offset = folder.log_size()
    write_log(folder, b"second run \xff\n")
    assert (offset, folder.read_log(offset)) == (10, "second run \ufffd\n")
    assert folder.read_log().startswith("first run\nsecond run")
    write_log(folder, b"x" * LOG_TAIL_BYTES)
    assert folder.read_log() == "x" * LOG_TAIL_BYTES
    assert folder.read_log(offset) == "x" * LOG_TAIL_BYTES
    assert folder.read_log(folder.log_size() - 3) == "xxx"


def test_a_message_has_the_last_lines_of_a_log() -> None:
    lines = [str(number) for number in range(LOG_TAIL_LINES + 1)]
    assert tail("\n".join(lines)) == "\n".join(lines[1:])
    assert tail("a\nb\n") == "a\nb"
