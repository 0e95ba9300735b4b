"""Environments for an application under test: the model server in virtual time, or a real server.

Both have an event loop of their own, on a thread of their own. Virtual time advances only while a caller waits for it;
the other loop runs in real time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from jetspark.aio.client import Client
from jetspark.aio.jetstream import JetStream
from jetspark.app.topology.declared import DeclaredConsumer
from jetspark.core.headers import Headers
from jetspark.errors import ConsumerNotFound, NetworkError, UsageError
from jetspark.server import NatsServer
from jetspark.testing.network import Network
from jetspark.testing.virtual_loop import VirtualLoop, model_network

__all__ = ["RealStage", "Stage", "StageMessage", "VirtualStage"]

T = TypeVar("T")

MODEL_URL = "nats://model:4222"
# Requests are renewed, pings sent and buckets tidied this often, whether something happens or not. The model forgets no
# request but with its connection, so nothing depends on it, and a day without events costs next to nothing.
IDLE_S = 86400.0


class StageMessage(NamedTuple):
    """A message of a stream."""

    subject: str
    data: bytes
    headers: Headers | None


class Stage(Protocol):
    """A server, and a loop to run an application on."""

    url: str
    connect_options: dict[str, Any]

    async def open(self) -> None: ...

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Do something on the stage's loop, and wait for it on one's own."""

    def drive(self, work: Coroutine[object, object, T]) -> T:
        """The same, for callers that cannot wait otherwise."""

    async def is_busy(self, js: JetStream, place: DeclaredConsumer) -> bool:
        """True if a consumer has messages to deliver, or delivered messages without acknowledgement."""

    async def messages(self, js: JetStream, stream: str) -> Sequence[StageMessage]:
        """The messages of a stream, oldest first."""

    async def close(self) -> None: ...


class VirtualStage:
    """The model server, in virtual time."""

    def __init__(self, seed: int) -> None:
        self.url, self.connect_options = MODEL_URL, {"ping_interval_s": IDLE_S}
        self.network: Network = model_network(seed)
        self.loop: VirtualLoop
        self._thread: ThreadPoolExecutor

    async def open(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="test-app")
        self.loop = await asyncio.wrap_future(self._thread.submit(VirtualLoop, self.network))
        self.loop.idle_s = IDLE_S

    async def run(self, work: Coroutine[object, object, T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(self._drive, work))

    def drive(self, work: Coroutine[object, object, T]) -> T:
        return self._thread.submit(self._drive, work).result()

    def _drive(self, work: Coroutine[object, object, T]) -> T:
        """On the stage's thread: until the work is done, and not a moment longer."""
        return self.loop.run_until_complete(work)

    async def is_busy(self, js: JetStream, place: DeclaredConsumer) -> bool:
        consumer = self.network.front.model.consumer(place.stream, place.name)
        return consumer is None or bool(consumer.num_pending or consumer.pending)

    async def messages(self, js: JetStream, stream: str) -> Sequence[StageMessage]:
        found = self.network.front.model.messages(stream)
        return [StageMessage(each.subject, each.data, each.headers) for each in found]

    async def close(self) -> None:
        await asyncio.wrap_future(self._thread.submit(self.loop.close))
        self._thread.shutdown()


class RealStage:
    """A nats-server, in real time."""

    def __init__(self, server: str | NatsServer) -> None:
        self.url = server if isinstance(server, str) else server.url
        self.connect_options: dict[str, Any] = {}
        self._server = None if isinstance(server, str) else server
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._restarts: list[threading.Timer] = []

    async def open(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-app", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def drive(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def is_busy(self, js: JetStream, place: DeclaredConsumer) -> bool:
        try:
            info = await (await (await js.stream(place.stream)).consumer(place.name)).info()
        except (ConsumerNotFound, NetworkError):
            return True
        return bool(info.pending or info.ack_pending)

    async def messages(self, js: JetStream, stream: str) -> Sequence[StageMessage]:
        found = (await js.stream(stream)).get_messages(1)
        async with contextlib.aclosing(found) as messages:  # type: ignore[type-var]
            return [StageMessage(each.subject, each.data, each.headers) async for each in messages]

    def restart_server(self, seconds: float, client: Client) -> None:
        """Kill the server, and start it again after a while; ``client`` has noticed when this returns.

        Publishes of the earlier client would be lost, and get no answer.

        Raises:
            UsageError: Only its address is known.
        """
        server = self._server
        if server is None:
            raise UsageError(
                f"restart_server: server={self.url!r} is an address, and a process is needed: give TestApp "
                "the NatsServer itself, or no server= for the model"
            )
        server.kill()
        while client.is_connected:  # of the other thread's loop, which is about to see that the socket is closed
            time.sleep(0.001)
        restart = threading.Timer(seconds, server.start)
        self._restarts.append(restart)
        restart.start()

    async def close(self) -> None:
        for restart in self._restarts:
            await asyncio.to_thread(restart.join)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
