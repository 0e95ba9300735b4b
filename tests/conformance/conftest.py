"""What every conformance test starts from: a driver, and a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.certificates import Certificates, make_certificates
from support.drivers import Driver
from support.loops import drivers_of

from jetspark.server import NatsServer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a ``driver`` runs on each driver that can differ in it, unless it names its drivers itself."""
    marks = metafunc.definition.iter_markers("parametrize")
    # A mark has "driver, size" as well as ("driver", "size").
    names_its_own = any("driver" in mark.args[0] for mark in marks)
    if "driver" in metafunc.fixturenames and not names_its_own:
        drivers = drivers_of(metafunc.definition.path.stem, metafunc.definition.originalname)
        metafunc.parametrize("driver", drivers, indirect=True)


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[NatsServer]:
    """For tests that need to know the server, use subjects of their own, and leave it as it was."""
    with NatsServer(jetstream=False) as server:
        yield server


@pytest.fixture
def url(nats_url: str) -> str:
    """Of a server that no test disturbs, for an account of the test's own, with JetStream."""
    return nats_url


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """For tests that kill it."""
    with NatsServer(jetstream=False) as server:
        yield server


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


# ---- with JetStream ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[NatsServer]:
    """Streams of their own names keep the tests apart."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def own() -> Iterator[NatsServer]:
    """One to kill."""
    with NatsServer() as server:
        yield server
