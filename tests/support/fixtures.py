"""The fixtures that tests of every folder have, besides those that users have (``pytest_jetspark``).

================= ======== ========================================================================================
fixture           scope    what a test gets
================= ======== ========================================================================================
``url``           function  a short name for ``nats_url``: a server that nobody disturbs, an account of the test's own
``own``           function  a server with JetStream for this test alone: to be killed, stopped or reloaded
``server``        module    one with JetStream for tests that have to know it: they use streams of their own names
``core_server``   module    the same without JetStream
``cluster``       module    three servers with JetStream
``divisible``     function  three for this test alone, whose nodes can be cut off from each other
``certificates``  session   an authority, and certificates for servers and clients
================= ======== ========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from jetspark.server import NatsCluster, NatsServer
from support.certificates import Certificates, make_certificates


@pytest.fixture
def url(nats_url: str) -> str:
    return nats_url


@pytest.fixture
def own(new_nats_server: Callable[..., NatsServer]) -> NatsServer:
    return new_nats_server()


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture(scope="module")
def core_server() -> Iterator[NatsServer]:
    with NatsServer(jetstream=False) as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster(3) as running:
        yield running


@pytest.fixture
def divisible() -> Iterator[NatsCluster]:
    with NatsCluster(3, partitionable=True) as running:
        yield running


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))
