"""An application under test: the real one, and so are its workers and the client below them.

Only the server, the network and the clock are models (:mod:`jetspark.testing`), or not even these, with ``server=``::

    async with TestApp(app) as test:
        await test.publish(OrderPaid(order_id="o-1", amount_cents=500))
        await test.settled()
        assert test.published(OrderBilled) == [OrderBilled(order_id="o-1", receipt="r-1")]
        assert test.dead_letters == []

The application runs on an event loop of its own, on a thread of its own. In virtual time that moves only while the test
waits for one of the calls below. What a handler shares with the test (a fake bank, a list of calls) may be plain
objects; what belongs to the test's own event loop (a lock, an HTTP client) must not be used by handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

from jetspark.aio.client import Client
from jetspark.aio.connector import connect
from jetspark.app.application import App
from jetspark.app.client import AppClient
from jetspark.app.commands.command_spec import Command, CommandReply
from jetspark.app.contracts.envelope import decode
from jetspark.app.dead_letters.redriving import (
    DeadLetterFilter,
    RedriveProgress,
    discard_dead_letters,
    read_dead_letters,
    run_redrive,
)
from jetspark.app.provisioning import apply_topology
from jetspark.app.stored_events import StoredEvent
from jetspark.app.testing.app_copies import with_dependencies, without_partitions
from jetspark.app.testing.fault_injection import InjectedFault, Injector, watched_app
from jetspark.app.testing.projection_states import VIRTUAL_LIVE, VirtualReaders, is_behind, read_states
from jetspark.app.testing.stages import RealStage, Stage, VirtualStage
from jetspark.app.topology.declared import DeclaredConsumer
from jetspark.app.workers import run_app
from jetspark.core.subjects import matches
from jetspark.errors import ConfigError, ContractViolation, NetworkError, RequestTimeout, UsageError
from jetspark.jetstream.info import PubAck
from jetspark.server import NatsServer
from jetspark.testing.network import Network
from jetspark.testing.virtual_loop import VirtualProcess

__all__ = ["TestApp"]

E = TypeVar("E")
T = TypeVar("T")

# Workers that have to do nothing for this long have nothing to do.
QUIET_S = 0.25
# Longest polling interval.
MAX_PAUSE_S = 1.0
STOP_TIMEOUT_S = 30.0


class TestApp:
    """An application with its handlers running, on a server of its own in memory.

    Args:
        app: The application.
        server: A real server to run on, as an address or a ``NatsServer``; it is in real time then, and what only a
            model can do is refused with ``UsageError``. What the application declares is made there, and stays.
        seed: The seed of network delays and random numbers: the same seed repeats the same run.
        dependencies: What handlers get instead of what the application's lifespans yield, such as a fake bank; the
            lifespans do not run then.
        partitions: Read each partition of a handler separately, as on a server. By default the model runs a handler
            with partitions as one without: each reader of a partition sends a heartbeat every few seconds, so that an
            hour of virtual time takes ten seconds or more.
    """

    __test__ = False  # pytest takes it for tests otherwise

    def __init__(
        self,
        app: App,
        *,
        server: str | NatsServer | None = None,
        seed: int = 0,
        dependencies: Iterable[object] | None = None,
        partitions: bool = False,
    ) -> None:
        if dependencies is not None:
            app = with_dependencies(app, dependencies)
        self.app = app if server is not None or partitions else without_partitions(app)
        self._virtual = VirtualStage(seed) if server is None else None
        self._real = RealStage(server) if server is not None else None
        self.injector: Injector
        """Sees every step of the workers, in virtual time."""
        self._consumers: Sequence[DeclaredConsumer] = ()
        self._readers: VirtualReaders | None = None
        self._client: AppClient
        self._connection: Client
        self._workers: asyncio.Task[None] | None = None
        self._process: VirtualProcess | None = None
        self._killed: list[VirtualProcess] = []
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stage.open()
        try:
            await self._stage.run(self._start())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self._stage.run(self._stop())
        finally:
            await self._stage.close()

    # ---- what a test does --------------------------------------------------------------------------------------

    async def publish(self, event: Any, **options: Any) -> PubAck:
        """Publish an event, as ``AppClient.publish`` does."""
        return await self._stage.run(self._client.publish(event, **options))

    async def call(self, command: Command, **options: Any) -> CommandReply:
        """Have a worker decide a command, as ``AppClient.call`` does."""
        return await self._stage.run(self._client.call(command, **options))

    async def publish_raw(self, subject: str, data: bytes, **options: Any) -> PubAck:
        """Publish bytes that need not be an event, as ``JetStream.publish`` does."""
        return await self._stage.run(self._client.js.publish(subject, data, **options))

    async def do(self, act: Callable[[AppClient], Awaitable[T]]) -> T:
        """Do something with a client of the app: ``await test.do(lambda orders: orders.timers.cancel("x"))``."""

        async def done() -> T:
            return await act(self._client)

        return await self._stage.run(done())

    async def settled(self, timeout: float | None = None) -> None:
        """Return when handlers have nothing to do: every event is handled, given up, or waits for a later time.

        Waits in a handler's lane are waited for; long ones are not, for these there is :meth:`advance`.

        Args:
            timeout: In seconds of the application's time; by default an hour in virtual time, and half a minute in real
                time.

        Raises:
            RequestTimeout: After that time there still was something.
        """
        await self._stage.run(
            self._wait_until_idle((30.0 if self._virtual is None else 3600.0) if timeout is None else timeout)
        )

    async def redrive(self, handler: str | None = None, *where: str) -> RedriveProgress:
        """Have handlers handle their dead letters again, as ``jetspark dlq redrive`` does."""
        return await self._stage.run(
            run_redrive(self._client.js, self.app, DeadLetterFilter.parse(handler, list(where)))
        )

    async def discard(self, handler: str | None = None, *where: str) -> int:
        """Give up open dead letters, as ``jetspark dlq discard`` does; returns how many."""
        chosen = DeadLetterFilter.parse(handler, list(where))
        return (await self._stage.run(discard_dead_letters(self._client.js, self.app, chosen))).discarded

    def advance(self, seconds: float) -> None:
        """Advance the time; everything due until then happens.

        Raises:
            UsageError: On a real server, whose time cannot be advanced.
        """
        self._in_virtual_time("advance").drive(asyncio.sleep(seconds))

    @property
    def now(self) -> float:
        """Seconds since 1970, in virtual time."""
        return self.network.clock.now

    @property
    def network(self) -> Network:
        """To break in other ways: ``network.cut()``, ``network.refuse(5)``, ``network.slow_down(stream, 3, ...)``."""
        return self._in_virtual_time("network").network

    def published(self, kind: type[E]) -> list[E]:
        """The events of a type in the application's stream, in its order."""
        catalogue, found = self.app.catalogue, []
        subjects = [contract.subject.filter for contract in catalogue if issubclass(contract.kind, kind)]
        for message in self._stage.drive(self._stage.messages(self._client.js, self.app.stream)):
            if not any(matches(each, message.subject) for each in subjects):
                continue  # a timer is in the stream, too, with the event that it will publish
            with contextlib.suppress(ContractViolation):
                event = decode(message.subject, message.data, message.headers, catalogue).event
                if isinstance(event, kind):
                    found.append(event)
        return found

    def state(self, projection: str) -> dict[str, Any]:
        """The states of a projection, by key, as its ``apply`` gets them."""
        if projection not in self.app.projections:
            known = ", ".join(sorted(self.app.projections)) or "none"
            raise ConfigError(f"projection={projection!r}: expected one of the app's projections; it has {known}")
        spec = self.app.projections[projection]
        return self._stage.drive(read_states(self._stage, self._client.js, self.app, spec))

    @property
    def dead_letters(self) -> list[StoredEvent]:
        """Letters that are not closed, oldest first."""
        dead_letters = self._stage.drive(read_dead_letters(self._client.js, self.app, DeadLetterFilter()))
        return [each.dead_letter for each in dead_letters]

    # ---- what goes wrong ---------------------------------------------------------------------------------------

    def drop_ack(self, times: int = 1, *, handler: str | None = None) -> InjectedFault:
        """Lose the next acknowledgements on their way: the server delivers these events again after ``ack_wait``."""
        return self._set("drop_ack", "before Acknowledge", lambda: True, handler, times)

    def crash(
        self, at: str, *, handler: str | None = None, times: int = 1, restart_after: float = 1.0
    ) -> InjectedFault:
        """Kill the workers when they come to a step, and start them again after ``restart_after`` seconds.

        They end as by SIGKILL: no ``finally`` block runs, and no message is returned to the server. A message of the
        step itself has arrived when they die ``after`` it, and never does when they die ``before`` it.

        Args:
            at: ``before`` or ``after`` a step, such as ``before Acknowledge`` or ``after RunHandler``; the steps are in
                ``jetspark.app.testing.STEPS``.
            handler: Only at a step of this one. All handlers die, since they share a process.
            times: The number of times.
        """
        return self._set("crash", at, lambda: self._kill(restart_after), handler, times)

    def crash_after_effect(self, *, handler: str | None = None, times: int = 1) -> InjectedFault:
        """Kill the workers when a handler's code has ended, before its result is published and acknowledged."""
        return self.crash("after RunHandler", handler=handler, times=times)

    def reject(self, times: int = 1, *, handler: str | None = None, after: int = 0) -> InjectedFault:
        """Have the next events that handlers begin with end in the dead letters; :meth:`redrive` takes them out again.

        Other handlers continue, and so does this one with events of other keys: code that relies on an order between
        two handlers fails here.

        Args:
            handler: Only events of this one.
            after: This many events are handled first.
        """
        self._in_virtual_time("reject")
        return self.injector.reject(times, handler, after)

    def restart_server(self, seconds: float = 5.0, *, at: str | None = None) -> InjectedFault:
        """Kill the server, and restart it after some seconds with everything it has stored: now, or when a worker comes
        to a step.

        On a real server: now, and only if ``TestApp`` was given the ``NatsServer`` itself.
        """
        if self._real is not None and at is None:
            self._real.restart_server(seconds, self._connection)
            return InjectedFault(name="restart_server", happened=1)
        return self._set("restart_server", at, lambda: self._done(self.network.kill_server, seconds), None, 1)

    def lose_leader(self, seconds: float = 3.0, *, stream: str | None = None, at: str | None = None) -> InjectedFault:
        """Leave a stream, the application's own unless one is named, without a leader for some seconds.

        Raises:
            ConfigError: The stream has one replica, and so no other leader. Declare it with ``replicas=3``.
        """
        name = stream or self.app.stream
        return self._set("lose_leader", at, lambda: self._done(self.network.lose_leader, name, seconds), None, 1)

    def cut_connection(self, *, at: str | None = None) -> InjectedFault:
        """Break the connection of the workers: the bytes in transit are lost from some point on, and they reconnect."""
        return self._set("cut_connection", at, self._cut, None, 1)

    # ---- small steps -------------------------------------------------------------------------------------------

    @property
    def _stage(self) -> Stage:
        stage = self._virtual or self._real
        assert stage is not None
        return stage

    def _in_virtual_time(self, what: str) -> VirtualStage:
        if self._virtual is None:
            raise UsageError(
                f"{what}: this TestApp runs on a real server, whose time, network and crashes a test cannot control; "
                "leave server= out to test it on the model"
            )
        return self._virtual

    def _set(
        self, name: str, at: str | None, act: Callable[[], bool], handler: str | None, times: int
    ) -> InjectedFault:
        self._in_virtual_time(name)
        if at is None:
            act()
            return InjectedFault(name=name, happened=1)
        return self.injector.set(at, act, name=name, handler=handler, times=times)

    def _done(self, act: Callable[..., None], *arguments: object) -> bool:
        act(*arguments)
        return False

    def _cut(self) -> bool:
        process = self._process
        for wire in self.network.wires:
            if process is not None and process.owns(wire.client):
                wire.cut()
        return False

    def _kill(self, restart_after: float) -> bool:
        process, self._process, self._workers = self._process, None, None
        if process is not None:
            process.kill()
            self._killed.append(process)
            # In no process: this one is dead.
            context = contextvars.Context()
            self._in_virtual_time("crash").loop.call_later(restart_after, self._start_workers, context=context)
        return True

    async def _start(self) -> None:
        stage = self._stage
        self._connection = await self._exits.enter_async_context(
            connect(stage.url, name="test", **stage.connect_options)
        )
        await apply_topology(self._connection.jetstream(), self.app)
        self._consumers = self.app.topology().consumers
        self._readers = VirtualReaders(self._virtual, self.app) if self._virtual is not None else None
        self._client = await self._exits.enter_async_context(self.app.connect(stage.url, **stage.connect_options))
        if self._virtual is not None:
            self.injector = Injector(
                self.app,
                self._virtual.network.front,
                lambda client: self._process is not None and self._process.owns(client),
            )
        self._start_workers()
        await self._wait_until_idle(STOP_TIMEOUT_S)  # by then the workers are at work

    def _start_workers(self) -> None:
        if not self.app.handlers and not self.app.projections and not self.app.commands:
            return
        stage = self._stage
        app = self.app if self._virtual is None else watched_app(self.app, self.injector.at_run)
        work = run_app(
            app.spec,
            stage.url,
            only=(),
            stop_timeout=STOP_TIMEOUT_S,
            live=None if self._virtual is None else VIRTUAL_LIVE,
            **stage.connect_options,
        )
        if self._virtual is None:
            self._workers = asyncio.get_running_loop().create_task(work)
        else:
            self._process = VirtualProcess(self._virtual.loop)
            self._workers = self._process.start(work)

    async def _stop(self) -> None:
        workers = self._workers
        if workers is not None and not workers.done():
            workers.cancel()
            await asyncio.wait([workers])
        for process in self._killed:
            await process.clean_up()
        await self._exits.aclose()
        self._check_workers()

    def _check_workers(self) -> None:
        workers = self._workers
        if workers is not None and workers.done() and not workers.cancelled():
            error = workers.exception()
            if error is not None:
                raise error

    async def _wait_until_idle(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        began = quiet_since = loop.time()
        pause_s = QUIET_S / 5
        while loop.time() - quiet_since < QUIET_S:
            await asyncio.sleep(pause_s)
            self._check_workers()
            pause_s = QUIET_S / 5
            if busy := await self._busy():
                quiet_since = loop.time()
                # Poll less often as time passes; in virtual time only the poll itself takes any.
                pause_s = max(pause_s, min(MAX_PAUSE_S, (quiet_since - began) / 10))
                if quiet_since - began > timeout:
                    raise RequestTimeout(f"settling of app {self.app.name!r}: {busy}", timeout)

    async def _busy(self) -> str:
        """The work that handlers still have, in words; empty if they are idle."""
        if self._killed and self._workers is None:
            return "the workers are dead and start again soon"
        if self.app.commands:
            try:
                await self._connection.request(f"$SRV.PING.{self.app.name}", timeout=MAX_PAUSE_S)
            except NetworkError:
                return "the workers do not serve commands yet"
        if self.app.projections:
            readers = self._readers
            if readers.are_busy() if readers is not None else await is_behind(self._client.js, self.app):
                return "projections have events to fold"
        for place in self._consumers:
            if await self._stage.is_busy(self._client.js, place):
                handler = (place.config.metadata or {}).get("jetspark-handler", place.name)
                return f"handler {handler!r} has events of stream {place.stream!r} to handle"
        return ""
