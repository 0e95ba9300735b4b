"""A test kit for applications: handlers, retries and dead letters on a model server, in virtual time.

The application under test is the real one, and so are its workers and the client below them; only the server, the
network and the clock are models (:mod:`jetspark.testing`). A test that waits for a day of retries takes milliseconds::

    async with TestApp(app) as test:
        await test.publish(OrderPaid(order_id="o-1", amount_cents=500))
        await test.settled()
        assert test.published(OrderBilled) == [OrderBilled(order_id="o-1", receipt="r-1")]
        assert test.dead_letters == []

The application runs on an event loop of its own, on a thread of its own, which moves only while the test waits for one
of the calls below. What a handler shares with the test (a fake bank, a list of calls) may be plain objects; what
belongs to the test's own event loop (a lock, an HTTP client) must not be used by handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from jetspark.aio.client import Client, connect
from jetspark.app.application import App
from jetspark.app.client import AppClient
from jetspark.app.envelope import decode
from jetspark.app.letters import DeadEvent
from jetspark.app.provisioning import apply_topology
from jetspark.app.redriving import LetterFilter, RedriveProgress, read_letters, run_redrive
from jetspark.app.replay.checking import NotReplayable, check_replay
from jetspark.app.running import run_app
from jetspark.errors import ContractViolation, RequestTimeout
from jetspark.jetstream.info import PubAck
from jetspark.testing.network import Network
from jetspark.testing.virtual_loop import VirtualLoop, model_network

__all__ = ["NotReplayable", "TestApp", "check_replay"]

T = TypeVar("T")
E = TypeVar("E")

MODEL_URL = "nats://model:4222"
# Workers that have to do nothing for this long have nothing to do.
QUIET_S = 0.25
STOP_TIMEOUT_S = 30.0


class TestApp:
    """An application with its handlers running, on a server of its own in memory.

    Args:
        app: The application.
        seed: Of the network's delays and of everything random: the same seed is the same course of events.
    """

    __test__ = False  # pytest takes it for tests otherwise

    def __init__(self, app: App, *, seed: int = 0) -> None:
        self.app = app
        self.network: Network = model_network(seed)
        """To break: ``network.cut()``, ``network.kill_server(5)``, ``network.lose_leader(stream, 3)``."""
        self._loop: VirtualLoop
        self._thread: ThreadPoolExecutor
        self._client: AppClient
        self._connection: Client
        self._workers: asyncio.Task[None] | None = None
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="test-app")
        self._loop = await asyncio.wrap_future(self._thread.submit(VirtualLoop, self.network))
        await self._run(self._start())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self._run(self._stop())
        finally:
            await asyncio.wrap_future(self._thread.submit(self._loop.close))
            self._thread.shutdown()

    # ---- what a test does --------------------------------------------------------------------------------------

    async def publish(self, event: Any, **options: Any) -> PubAck:
        """Publish an event, as ``AppClient.publish`` does."""
        return await self._run(self._client.publish(event, **options))

    async def settled(self, timeout: float = 3600.0) -> None:
        """Return when handlers have nothing to do: every event is handled, given up, or waits for a later time.

        Waits in a handler's lane are waited for; long ones are not, for these there is :meth:`advance`.

        Raises:
            RequestTimeout: After ``timeout`` seconds of virtual time there still was something.
        """
        await self._run(self._settle(timeout))

    async def redrive(self, handler: str | None = None, *where: str) -> RedriveProgress:
        """Have handlers handle their dead letters again, as ``jetspark dlq redrive`` does."""
        return await self._run(run_redrive(self._client.js, self.app, LetterFilter.parse(handler, list(where))))

    def advance(self, seconds: float) -> None:
        """Let time pass; what falls due meanwhile happens."""
        self._thread.submit(self._drive, asyncio.sleep(seconds)).result()

    @property
    def now(self) -> float:
        """Seconds since 1970, in virtual time."""
        return self.network.clock.now

    def published(self, kind: type[E]) -> list[E]:
        """The events of a type in the application's stream, in its order."""
        catalogue = self.app.catalogue
        found = []
        for message in self.network.front.model.messages(self.app.stream):
            with contextlib.suppress(ContractViolation):
                event = decode(message.subject, message.data, message.headers, catalogue).event
                if isinstance(event, kind):
                    found.append(event)
        return found

    @property
    def dead_letters(self) -> list[DeadEvent]:
        """Letters that are not closed, oldest first."""
        letters = self._thread.submit(self._drive, read_letters(self._client.js, self.app, LetterFilter())).result()
        return [each.letter for each in letters]

    # ---- small steps -------------------------------------------------------------------------------------------

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(self._drive, work))

    def _drive(self, work: Coroutine[Any, Any, T]) -> T:
        """On the application's thread: until the work is done, and not a moment longer."""
        return self._loop.run_until_complete(work)

    async def _start(self) -> None:
        self._connection = await self._exits.enter_async_context(connect(MODEL_URL, name="test"))
        await apply_topology(self._connection.jetstream(), self.app)
        self._client = await self._exits.enter_async_context(self.app.connect(MODEL_URL))
        self._start_workers()
        await self._settle(STOP_TIMEOUT_S)  # by then the workers are at work

    def _start_workers(self) -> None:
        if self.app.handlers:
            work = run_app(self.app, MODEL_URL, only=(), stop_timeout=STOP_TIMEOUT_S)
            self._workers = asyncio.create_task(work)

    async def _stop(self) -> None:
        workers = self._workers
        if workers is not None and not workers.done():
            workers.cancel()
            await asyncio.wait([workers])
        await self._exits.aclose()
        self._check_workers()

    def _check_workers(self) -> None:
        workers = self._workers
        if workers is not None and workers.done() and not workers.cancelled():
            error = workers.exception()
            if error is not None:
                raise error

    async def _settle(self, timeout: float) -> None:
        began = quiet_since = self._loop.time()
        while self._loop.time() - quiet_since < QUIET_S:
            await asyncio.sleep(QUIET_S / 5)
            self._check_workers()
            if self._is_busy():
                quiet_since = self._loop.time()
                if quiet_since - began > timeout:
                    raise RequestTimeout(f"settling of app {self.app.name!r}: {self._is_busy()}", timeout)

    def _is_busy(self) -> str:
        """What handlers have to do, in words; empty if nothing."""
        model = self.network.front.model
        for name in self.app.handlers:
            for stream in (self.app.stream, self.app.retry_stream):
                consumer = model.consumer(stream, name)
                if consumer is None or consumer.num_pending or consumer.pending:
                    return f"handler {name!r} has events of stream {stream!r} to handle"
        return ""
