"""An asyncio event loop in virtual time, whose connections lead to a model server in memory.

The program under test is the real one, client included: only the socket, the clock and the server are replaced. When
all tasks wait, time jumps to the next moment at which something happens, so a day of retries takes milliseconds, and a
course of events is a function of the network's random generator::

    async def main() -> None:
        async with jetspark.connect("nats://model") as nc:
            ...

    run_in_virtual_time(main())

``time.time()`` and ``datetime.now()`` stay what they are: what wants to be tested in virtual time asks the loop, as
applications (``jetspark.app``) do.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import selectors
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from jetspark.testing.model import ModelServer
from jetspark.testing.network import Front, Network, VirtualClock, Wire

__all__ = ["VirtualLoop", "VirtualProcess", "model_network", "run_in_virtual_time"]

T = TypeVar("T")

# 2026-01-01T00:00:00Z: messages of the model have times of this century.
BEGINNING = 1_767_225_600.0
# How long what is left of a killed process may take to end before it is told again, and how often it is told.
BURIAL_S = 60.0
BURIAL_ROUNDS = 5


def model_network(seed: int = 0, **options: Any) -> Network:
    """A model server and the network around it; ``options`` are those of :class:`Network`."""
    clock = VirtualClock(BEGINNING)
    front = Front(ModelServer(), clock)
    front.model.has_interest = lambda subject: bool(front.interest.find(subject))
    return Network(front, random.Random(seed), **options)


def run_in_virtual_time(main: Coroutine[Any, Any, T], network: Network | None = None) -> T:
    """Run a coroutine to its end, as ``asyncio.run`` does.

    Raises:
        RuntimeError: Every task waits for something that never happens.
    """
    network = model_network() if network is None else network
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(network)) as runner:
        return runner.run(main)


class _Selector(selectors.DefaultSelector):
    """Where a loop waits when it has nothing to do: here time passes. Signals and other threads still wake it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self.rounds += 1
        clock = self._clock
        if not ready and timeout is None:
            if not clock.has_more:
                raise RuntimeError("every task waits for something that never happens")
            clock.step(clock.next_at)
        elif not ready and timeout:
            clock.step(clock.now + timeout)
        return ready


class VirtualProcess:
    """Tasks, timers and connections that end together, and at once, as those of a process do that is killed.

    Everything that its work starts belongs to it. After :meth:`kill` not a line of it runs: no ``finally``, no farewell
    to the server. What it had written is on its way and arrives; the server learns of its end a little later.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.is_killed = self.is_buried = False
        self._loop = loop
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._left: list[asyncio.Task[Any]] = []
        """Tasks that were there when it was killed: nobody else refers to them."""
        self._transports: list[_WireTransport] = []
        self._held: list[tuple[Any, tuple[Any, ...]]] = []
        """What was about to run when it was killed, and what would have run since."""
        self._context = contextvars.copy_context()
        self._context.run(_current_process.set, self)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin to do something as this process."""
        return self._loop.create_task(work, context=self._context)

    def owns(self, client: int) -> bool:
        """Whether a session of the server, by its number, is one of this process."""
        return any(each.client == client for each in self._transports)

    def kill(self) -> None:
        """End it. Its own code may call this, and must then wait for something that never comes."""
        self.is_killed = True
        self._left = [each for each in self._tasks if not each.done()]
        for transport in self._transports:
            transport.hang_up()

    async def bury(self) -> None:
        """Cancel what was left when it was killed, so that nothing is destroyed while it is pending.

        That code runs on without a network. Call it when nobody looks any more at what it may do.
        """
        self.is_killed, self.is_buried = False, True
        pending, self._left = set(self._left), []
        for transport in self._transports:
            transport.break_off()
        held, self._held = self._held, []
        for callback, args in held:
            self._loop.call_soon(callback, *args, context=self._context)
        for _ in range(BURIAL_ROUNDS):
            for task in pending:
                task.cancel()  # again and again: code that meets its own time-out just now takes this one for it
            if not pending:
                return
            done, pending = await asyncio.wait(pending, timeout=BURIAL_S)
            for task in done:
                if not task.cancelled():
                    task.exception()  # nobody else asks for it

    def guard(self, callback: Callable[..., object]) -> Callable[..., None]:
        """The same call, which does not happen while the process is killed."""

        def call(*args: Any) -> None:
            if self.is_killed:
                self._held.append((callback, args))
            else:
                callback(*args)

        return call

    def add_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

    def add_transport(self, transport: _WireTransport) -> None:
        self._transports.append(transport)


_current_process: contextvars.ContextVar[VirtualProcess | None] = contextvars.ContextVar(
    "virtual_process", default=None
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.idle_s = 0.0
        """Requests that wait for messages without an end, and readers that look for work from time to time,
        wait at least this long. It makes long times cheap; 0 leaves the program as it is."""
        self._virtual_selector = _Selector(network.clock)
        super().__init__(self._virtual_selector)
        # A timer is due when its time has come, and not a moment before: what is too early and set again for the same
        # time would be due at once, for ever. Asyncio wants a step of the clock, a quarter of a microsecond here.
        self._clock_resolution = math.ulp(BEGINNING)

    def time(self) -> float:
        return self.network.clock.now

    @property
    def rounds(self) -> int:
        """How often it went round: what a course of events cost, in steps that are the same on every machine."""
        return self._virtual_selector.rounds

    def wall_time(self) -> float:
        """Seconds since 1970: what programs that know of virtual time take for the time of day."""
        return self.network.clock.now

    @property
    def rng(self) -> random.Random:
        """Where chance comes from for programs that know of virtual time: a seed is one course of events."""
        return self.network.rng

    def run_in_executor(  # type: ignore[override]  # the exact one needs type variables of Python 3.12
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Called at once, on this thread: another one would take time that does not pass here."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    # ---- processes: what belongs to one runs only while it lives -----------------------------------------------

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        process = _process_of(options.get("context"))
        if process is not None:
            process.add_task(task)
        return task

    def call_soon(  # type: ignore[override]  # as above
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = _process_of(context)
        return super().call_soon(callback if process is None else process.guard(callback), *args, context=context)

    def call_at(  # type: ignore[override]  # as above
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = _process_of(context)
        return super().call_at(when, callback if process is None else process.guard(callback), *args, context=context)

    async def create_connection(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        """A wire to the model, whatever the address. TLS is not modelled."""
        if options.get("ssl"):
            raise ConnectionRefusedError("TLS is not in the model; connect without it")
        process = _current_process.get()
        if process is not None and process.is_buried:
            raise ConnectionRefusedError("this process was killed")
        protocol = protocol_factory()
        transport = _WireTransport(self, protocol)
        if process is not None:
            process.add_transport(transport)
        return transport, protocol


def _process_of(context: contextvars.Context | None) -> VirtualProcess | None:
    return _current_process.get() if context is None else context.get(_current_process)


class _WireTransport(asyncio.Transport):
    """A wire of the network, as asyncio sees it."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 4222)})
        self._loop, self._protocol = loop, protocol
        self._is_closing = self._is_paused = False
        self._context = contextvars.copy_context()  # so that what is told belongs to the process that connected
        self._wire: Wire = loop.network.dial(self._on_data, self._on_lost, self._on_room)
        protocol.connection_made(self)

    @property
    def client(self) -> int:
        """The number of its session."""
        return self._wire.client

    def hang_up(self) -> None:
        """The program is gone, and is not told; what it wrote arrives."""
        self._wire.hang_up()

    def break_off(self) -> None:
        """Tell the program that the connection is lost."""
        self._end(ConnectionResetError("the process was killed"))

    def _on_data(self, data: bytes) -> None:
        self._loop.call_soon(self._deliver, data, context=self._context)

    def _deliver(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def _on_lost(self, reason: str) -> None:
        self._end(ConnectionResetError(reason))

    def _on_room(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._loop.call_soon(self._protocol.resume_writing, context=self._context)

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._wire.write(bytes(data))
            if self._wire.is_full and not self._is_paused:
                self._is_paused = True
                self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        # What the wire has taken is on its way; it refuses nothing.
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._wire.hang_up()
        self._end(None)

    abort = close

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def _end(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)
