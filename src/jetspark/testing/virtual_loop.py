"""An asyncio event loop in virtual time, whose connections lead to a model server in memory.

The program under test is the real one, client included: only the socket, the clock and the server are replaced. When
all tasks wait, time jumps to the next event, so a day of retries takes milliseconds, and a run is a function of the
network's random generator::

    async def main() -> None:
        async with jetspark.connect("nats://model") as nc:
            ...

    run_in_virtual_time(main())

``time.time()`` and ``datetime.now()`` are not replaced: code to be tested in virtual time reads the loop's clock, as
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
# Time for the tasks of a killed process to end before they are cancelled again, and the number of attempts.
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
    """The selector of the loop: a wait without events advances the clock. Signals and other threads still wake it."""

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
    """Tasks, timers and connections that end together at once, like those of a killed process.

    All its tasks and connections belong to it. After :meth:`kill` not a line of its code runs: no ``finally``, no
    farewell to the server. Its earlier writes still arrive; the server notices its end a little later.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.is_killed = self.is_cleaned_up = False
        self._loop = loop
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._left: list[asyncio.Task[Any]] = []
        """Its unfinished tasks at the kill; this list keeps them alive."""
        self._transports: list[_WireTransport] = []
        self._held: list[tuple[Any, tuple[Any, ...]]] = []
        """Callbacks that were due at the kill, or would have been due since."""
        self._context = contextvars.copy_context()
        self._context.run(_current_process.set, self)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as this process."""
        return self._loop.create_task(work, context=self._context)

    def owns(self, client: int) -> bool:
        """True if a session of the server, by its number, belongs to this process."""
        return any(each.client == client for each in self._transports)

    def kill(self) -> None:
        """End it. Its own code may call this, and must then wait for an event that never comes."""
        self.is_killed = True
        self._left = [each for each in self._tasks if not each.done()]
        for transport in self._transports:
            transport.hang_up()

    async def clean_up(self) -> None:
        """Cancel the unfinished tasks of a killed process, so that none is destroyed while pending.

        Their code runs then, without a network. Call it when its effects are not observed any more.
        """
        self.is_killed, self.is_cleaned_up = False, True
        pending, self._left = set(self._left), []
        for transport in self._transports:
            transport.break_off()
        held, self._held = self._held, []
        for callback, args in held:
            self._loop.call_soon(callback, *args, context=self._context)
        for _ in range(BURIAL_ROUNDS):
            for task in pending:
                task.cancel()  # repeated: code may take the cancellation for its own timeout
            if not pending:
                return
            done, pending = await asyncio.wait(pending, timeout=BURIAL_S)
            for task in done:
                if not task.cancelled():
                    task.exception()  # retrieves it, so that asyncio does not log it

    def guard(self, callback: Callable[..., object]) -> Callable[..., None]:
        """The same call, postponed while the process is killed."""

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
    """The loop that the module's docstring describes."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.idle_s = 0.0
        """Minimum wait of requests without an end, and of readers that poll for work. It makes long times cheap;
        0 leaves the program as it is."""
        self._virtual_selector = _Selector(network.clock)
        super().__init__(self._virtual_selector)
        # The resolution of the clock: a timer that is due slightly early, and set again for the same time, would be due
        # at once, endlessly. Asyncio requires a resolution above 0; this is a quarter of a microsecond.
        self._clock_resolution = math.ulp(BEGINNING)

    def time(self) -> float:
        return self.network.clock.now

    @property
    def rounds(self) -> int:
        """Number of iterations of the loop: the cost of a run, in steps that are the same on every machine."""
        return self._virtual_selector.rounds

    def wall_time(self) -> float:
        """Seconds since 1970, for programs that support virtual time."""
        return self.network.clock.now

    @property
    def rng(self) -> random.Random:
        """The random generator, for programs that support virtual time: a seed determines the run."""
        return self.network.rng

    def run_in_executor(  # type: ignore[override]  # the exact one needs type variables of Python 3.12
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call ``func`` at once, on this thread: another thread would take time that does not pass here."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    # ---- processes: tasks and connections run only while their process lives --------------------------------------

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
        """A wire to the model, for any address. TLS is not modelled."""
        if options.get("ssl"):
            raise ConnectionRefusedError("TLS is not in the model; connect without it")
        process = _current_process.get()
        if process is not None and process.is_cleaned_up:
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
        self._context = contextvars.copy_context()  # callbacks belong to the process that connected
        self._wire: Wire = loop.network.dial(self._on_data, self._on_lost, self._on_room)
        protocol.connection_made(self)

    @property
    def client(self) -> int:
        """The number of its session."""
        return self._wire.client

    def hang_up(self) -> None:
        """Close the wire without a call of the protocol; earlier writes still arrive."""
        self._wire.hang_up()

    def break_off(self) -> None:
        """Report a lost connection to the protocol."""
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
        # The wire accepts all data at once.
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
