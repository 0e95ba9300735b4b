"""What a project that has JetSpark installed is given by pytest: fixtures, and nothing it has to pay for unasked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jetspark
import jetspark.blocking
import pytest_jetspark
from jetspark.server import NatsServer
from jetspark.testing import SharedNatsServer
from jetspark.testing.servers import ACCOUNTS_AT_A_TIME

BLOCKING = """
import pytest

@pytest.mark.parametrize("time", ["first", "second"])
def test_streams_of_one_test_are_not_there_in_the_next(blocking_jetstream, time):
    assert list(blocking_jetstream.stream_names()) == []
    blocking_jetstream.create_stream("ORDERS")
    assert blocking_jetstream.publish("ORDERS", b"1").sequence == 1

def test_a_server_to_be_killed_is_another_one(new_nats_server, nats_server):
    server = new_nats_server(jetstream=False)
    server.kill()
    assert nats_server.is_running and not server.is_running

def test_names(unique_name):
    assert unique_name("orders").startswith("orders_")
    assert unique_name("orders") != unique_name("orders")

def test_one_connection_is_the_contexts(blocking_nats_client, nats_url):
    blocking_nats_client.publish("a", b"")
    blocking_nats_client.flush()
    assert "@127.0.0.1:" in nats_url
"""

ASYNCIO = """
import pytest

@pytest.mark.asyncio
@pytest.mark.parametrize("time", ["first", "second"])
async def test_streams_of_one_test_are_not_there_in_the_next(jetstream, nats_client, time):
    assert [name async for name in jetstream.stream_names()] == []
    await jetstream.create_stream("ORDERS")
    reply = await nats_client.request("ORDERS", b"1")
    assert b'"seq":1' in reply.data.replace(b" ", b"")
"""

# A finder that is asked first, and knows of no such module.
WITHOUT_PYTEST_ASYNCIO = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pytest_asyncio":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""

GUIDE = Path(__file__).parents[2] / "docs" / "testing.md"

OVERRIDDEN = """
import pytest
from jetspark.server import NatsServer

@pytest.fixture(scope="session")
def nats_server():
    with NatsServer(token="secret") as server:
        yield server

@pytest.fixture
def nats_url(nats_server):
    return nats_server.url.replace("//", "//secret@")
"""


def run_pytest(project: Path, wheel: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """In a project of its own, with the wheel in front of what is installed."""
    # pytest-asyncio wants to be told a project's loop scope, whether there is a fixture of ours or not.
    warnings = ["-W", "error", "-W", "ignore:The configuration option:pytest.PytestDeprecationWarning"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command, "-q", *warnings, "-p", "no:cacheprovider", f"--rootdir={project}"],
        cwd=project,
        env=environment | {"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_a_project_has_the_fixtures_without_asking_for_them(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "test_blocking.py").write_text(BLOCKING)
    (tmp_path / "test_asyncio.py").write_text(ASYNCIO)
    finished = run_pytest(tmp_path, wheel, "-m", "pytest")
    assert "7 passed" in finished.stdout, finished.stdout + finished.stderr


def test_a_project_without_pytest_asyncio_has_the_blocking_ones(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "test_blocking.py").write_text(BLOCKING)
    finished = run_pytest(tmp_path, wheel, "-c", WITHOUT_PYTEST_ASYNCIO, "-p", "no:asyncio")
    assert "5 passed" in finished.stdout, finished.stdout + finished.stderr


def test_a_project_may_have_a_server_of_its_own_kind(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(OVERRIDDEN)
    (tmp_path / "test_own.py").write_text(
        "def test_it(blocking_jetstream, nats_server):\n"
        "    blocking_jetstream.create_stream('ORDERS')\n"
        "    assert nats_server.config.token == 'secret'\n"
    )
    finished = run_pytest(tmp_path, wheel, "-m", "pytest")
    assert "1 passed" in finished.stdout, finished.stdout + finished.stderr


def test_the_guide_shows_what_works(wheel: Path, tmp_path: Path) -> None:
    """Its blocks are a project: three files of tests, and a conftest that overrides a fixture."""
    names = ("test_orders.py", "test_crash.py", "conftest.py", "test_virtual.py")
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for name, text in zip(names, blocks, strict=True):
        (tmp_path / name).write_text(text)
    finished = run_pytest(tmp_path, wheel, "-m", "pytest")
    assert "4 passed" in finished.stdout, finished.stdout + finished.stderr


def test_the_guide_to_applications_shows_what_works(wheel: Path, tmp_path: Path) -> None:
    """Its blocks are a project: an application, and files of tests."""
    page = GUIDE.with_name("testing-apps.md")
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    names = ["orders.py", *(f"test_{number}.py" for number in range(1, len(blocks)))]
    for name, text in zip(names, blocks, strict=True):
        (tmp_path / name).write_text(text)
    finished = run_pytest(tmp_path, wheel, "-m", "pytest")
    assert "9 passed" in finished.stdout, finished.stdout + finished.stderr


def test_every_fixture_is_in_the_guide_and_in_the_modules_own_table() -> None:
    names = [name for name, value in vars(pytest_jetspark).items() if "FixtureFunctionDefinition" in repr(type(value))]
    assert len(names) == 9
    for text in (pytest_jetspark.__doc__ or "", GUIDE.read_text("utf-8")):
        assert [name for name in names if f"`{name}`" not in text] == []


def test_who_asks_for_no_fixture_loads_nothing_of_jetspark(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('pytest_jetspark')\n"
        "    assert [name for name in sys.modules if name.partition('.')[0] == 'jetspark'] == []\n"
    )
    finished = run_pytest(tmp_path, wheel, "-m", "pytest")
    assert "1 passed" in finished.stdout, finished.stdout + finished.stderr


# ---- here, as in any project -----------------------------------------------------------------------------------------


async def test_an_asyncio_test_has_an_account_of_its_own(
    jetstream: jetspark.JetStream, blocking_jetstream: jetspark.blocking.JetStream
) -> None:
    """Both contexts of one test are in the same."""
    await jetstream.create_stream("MINE")
    assert list(blocking_jetstream.stream_names()) == ["MINE"]


def test_there_are_as_many_accounts_as_tests_and_who_is_connected_stays_so() -> None:
    events: list[jetspark.ConnectionEvent] = []
    with (
        SharedNatsServer() as server,
        jetspark.blocking.connect(server.new_account_url(), on_event=events.append) as first,
    ):
        ours = first.jetstream().create_stream("S")
        with jetspark.blocking.connect(server.url, on_event=events.append) as shared:
            shared.jetstream().create_stream("S")
            for _ in range(ACCOUNTS_AT_A_TIME):  # the last one needs a reload
                url = server.new_account_url()
            with jetspark.blocking.connect(url) as last:
                assert list(last.jetstream().stream_names()) == []
                last.jetstream().create_stream("S")
                last.jetstream().publish("S", b"theirs")
            assert first.jetstream().publish("S", b"ours").sequence == 1
            assert shared.jetstream().publish("S", b"everybody's").sequence == 1
        assert ours.info().state.messages == 1
        assert [event for event in events if isinstance(event, jetspark.Disconnected)] == []


def test_a_shared_server_has_the_options_of_any_other() -> None:
    with SharedNatsServer(jetstream=False, max_payload_bytes=1000) as server:
        assert isinstance(server, NatsServer)
        with jetspark.blocking.connect(server.new_account_url()) as client, pytest.raises(jetspark.PayloadTooLarge):
            client.publish("a", bytes(1001))
