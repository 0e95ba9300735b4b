"""JetSpark's pytest plugin: a real nats-server, connections to it and unique names, as fixtures.

pytest loads this module in every run in an environment with JetSpark, even if no test needs it. So the module imports
only pytest, and each fixture imports its own dependencies when a test uses it.

=========================== ======== ===================================================================================
fixture                     scope    what a test gets
=========================== ======== ===================================================================================
``nats_server``             session  a ``SharedNatsServer`` with JetStream; override it in ``conftest.py`` for another
``nats_url``                function  its address, for the test's own account, whose streams no other test sees
``nats_client``             function  an asyncio ``jetspark.Client`` that is connected there
``jetstream``               function  the ``JetStream`` of ``nats_client``
``blocking_nats_client``    function  the same, blocking
``blocking_jetstream``      function  the ``JetStream`` of ``blocking_nats_client``
``new_nats_server``         function  a function that starts a server for this test only, to be killed or configured
``test_app``                function  an async function that starts an application in a ``TestApp`` and ends it
``unique_name``             function  a function that returns a new name for a stream, bucket or consumer
=========================== ======== ===================================================================================
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import jetspark
    import jetspark.blocking
    from jetspark.server import NatsServer

try:
    # In its strict mode pytest-asyncio runs no other fixture. Where it is installed, pytest has loaded it anyway.
    from pytest_asyncio import fixture as asyncio_fixture
except ImportError:
    asyncio_fixture = pytest.fixture  # type: ignore[assignment]  # anyio's plugin, if there is one, runs these

# Tests of several processes may be given one server by an override of `nats_server`.
_numbers, _process = itertools.count(1), secrets.token_hex(3)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """A real nats-server with JetStream, for all tests of this process."""
    from jetspark.testing import SharedNatsServer

    with SharedNatsServer() as server:
        yield server


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """The address of ``nats_server``, for an account of this test's own."""
    from jetspark.testing import SharedNatsServer

    return nats_server.new_account_url() if isinstance(nats_server, SharedNatsServer) else nats_server.url


@pytest.fixture
def new_nats_server() -> Iterator[Callable[..., NatsServer]]:
    """Starts a ``NatsServer`` for this test alone. Takes its options; the end of the test closes it."""
    from jetspark.server import NatsServer

    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> NatsServer:
            return stack.enter_context(NatsServer(**options))

        yield start


@pytest.fixture
def unique_name() -> Callable[[str], str]:
    """Returns a name that no other test has, which begins with a word of yours: ``unique_name("orders")``."""
    return lambda word: f"{word}_{_process}_{next(_numbers)}"


@pytest.fixture
def blocking_nats_client(nats_url: str) -> Iterator[jetspark.blocking.Client]:
    """A blocking client, connected to an account of this test's own."""
    import jetspark.blocking

    with jetspark.blocking.connect(nats_url) as client:
        yield client


@pytest.fixture
def blocking_jetstream(blocking_nats_client: jetspark.blocking.Client) -> jetspark.blocking.JetStream:
    """The blocking JetStream context of an account of this test's own."""
    return blocking_nats_client.jetstream()


@asyncio_fixture
async def nats_client(nats_url: str) -> AsyncIterator[jetspark.Client]:
    """An asyncio client, connected to an account of this test's own. Needs pytest-asyncio or anyio."""
    import jetspark

    async with jetspark.connect(nats_url) as client:
        yield client


@asyncio_fixture
async def test_app() -> AsyncIterator[Callable[..., Any]]:
    """Starts a ``TestApp`` that ends with the test: ``test = await test_app(app)``. It takes the same options."""
    from jetspark.app.testing import TestApp

    async with contextlib.AsyncExitStack() as stack:

        async def start(app: Any, **options: Any) -> TestApp:
            return await stack.enter_async_context(TestApp(app, **options))

        yield start


@asyncio_fixture
async def jetstream(nats_client: jetspark.Client) -> jetspark.JetStream:
    """The asyncio JetStream context of an account of this test's own."""
    return nats_client.jetstream()
