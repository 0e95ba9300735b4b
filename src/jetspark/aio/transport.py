"""The asyncio driver's engine: the only place here that touches a socket, a timer or the event loop's streams."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from ipaddress import ip_address
from typing import Any, TypeAlias, cast

from jetspark.aio.step_runner import run_steps
from jetspark.aio.waiter import Changed, Waiter
from jetspark.core.auth import Auth
from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.lifecycle import (
    AskSecret,
    AuthSource,
    Converse,
    Dial,
    Establishing,
    Hangup,
    Step,
    UpgradeToTLS,
    establish,
)
from jetspark.core.link import READ_BYTES, InterruptGuard, time_left_s
from jetspark.core.options import TLSConfig
from jetspark.core.step_runner import Sleep, StepRun
from jetspark.core.tls import describe_error, tls_context
from jetspark.errors import ConnectionLost, JetSparkError, RequestTimeout, UsageError

__all__ = ["DriverAuth", "Link", "expire"]

# One callable of two results: of two callables, type checkers infer neither for a lambda.
DriverAuth: TypeAlias = Auth | Callable[[], Auth | Awaitable[Auth]] | None

_logger = logging.getLogger("jetspark.aio")

# Not on Windows, which has no such call.
_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Link:
    """Keeps one :class:`Connection` connected, and moves bytes between it and the network.

    It is also where machines and readers meet the loop: it passes on what happened (:meth:`settle`), tells what is
    attached of events and of time, and waits for room. The blocking driver's has the same methods.
    """

    def __init__(self, connection: Connection, auth: DriverAuth, tls: TLSConfig | None, dispatcher: Dispatcher) -> None:
        self.connection, self._auth, self._tls = connection, auth, tls
        self.dispatcher = dispatcher
        self.loop = asyncio.get_running_loop()
        self.lock = nullcontext()
        """Guards nothing, for one thread uses the link. Modules with a generated twin hold it where the twin has to."""
        self.doubt = InterruptGuard(lambda: None)
        self.room = Changed(self.lock)
        self.now, self.new_waiter = self.loop.time, self.loop.create_future
        self.idle_s: float = getattr(self.loop, "idle_s", 0.0)
        self._session: _Session | None = None
        self.arrived = memoryview(bytearray(READ_BYTES))
        """What a transport has just read."""
        self._is_establishing = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self.flush_is_scheduled = False

    async def open(self) -> None:
        await self._establish(is_first=True)

    def close(self, error: Exception | None = None) -> None:
        """Drop the transport and end every wait. What the network does not take at once is lost."""
        if self._reconnecting is not None and self._reconnecting is not asyncio.current_task():
            self._reconnecting.cancel()
        self.flush()  # requests of this step of the loop, see flush_promptly
        self.connection.close(error)
        self._hang_up()
        self.deliver_events()
        self.room.notify_all()
        self._disarm_timer()  # last: what was told of the end may have set it once more

    def unsent(self) -> tuple[int, int]:
        """How many messages were never handed to the network, and how many may not have left it: for a loop that ended.

        What the system took is sent, also after the program's end.
        """
        session = self._session
        transport = None if session is None else session.transport
        is_stuck = transport is not None and transport.get_write_buffer_size() > 0
        return self.connection.buffered_messages, self.connection.unconfirmed_messages if is_stuck else 0

    def deadline(self, timeout_s: float) -> float:
        return self.now() + timeout_s

    def may_wait(self) -> bool:
        """Any task may wait; a thread of the blocking driver must not wait for what it has to read itself."""
        return True

    def check_may_wait(self, what: str) -> None:
        """Refuse to wait where that would be for ever.

        Raises:
            UsageError: This is not the loop of ``connect``.
        """
        self.check_caller()

    def check_caller(self) -> None:
        """Refuse to be used from another event loop: what it publishes would wait for ours, which may not run at all.

        Raises:
            UsageError: This is not the loop of ``connect``.
        """
        try:
            is_ours = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            is_ours = False
        if not is_ours:
            raise UsageError(
                "the client belongs to another event loop: connect in the loop that uses it, hand the work over with "
                "asyncio.run_coroutine_threadsafe(), or share a jetspark.blocking client between threads"
            )

    def flush_soon(self) -> None:
        """Write what is buffered when the current step of the loop is over; much is gathered into one write.

        Called before something is accepted, it also sees to it that nothing is from another loop. Looking once for each
        write and not for each message costs nothing that can be measured.
        """
        if not self.flush_is_scheduled:
            self.check_caller()
            self.flush_is_scheduled = True
            self.loop.call_soon(self.flush)

    def flush_promptly(self) -> None:
        """Write what is buffered now, for somebody waits for its answer; what follows in this step, when it is over.

        So one request at a time waits for nobody, and of many at a time all but the first share a write.
        """
        if not self.flush_is_scheduled:
            self.flush()
            self.flush_is_scheduled = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        self.flush_is_scheduled = False
        session = self._session
        if session is not None and session.transport is not None and not session.is_paused:
            data = self.connection.data_to_send()
            if data:
                session.transport.write(data)
                if not session.is_paused:
                    self.room.notify_all()

    def hand_over(self) -> None:
        """Flush, then yield the CPU if the server runs on this machine: on two cores it may be waiting for ours."""
        self.flush()
        if self._session is not None and self._session.is_server_here:
            _give_way()

    async def write_and_wait(self, deadline: float | None = None, is_over: Callable[[], bool] | None = None) -> None:
        """Write now; wait while the network takes no more, unless it ``is_over`` for the caller.

        Whoever makes it so notifies ``room``. Nothing of the caller's is accepted before this returns.

        Raises:
            TimeoutError: It took no more until the deadline.
        """
        self.check_caller()
        self.flush()
        if self._session is None or not self._session.is_paused:
            await asyncio.sleep(0)
            return
        while self._session is not None and self._session.is_paused and (is_over is None or not is_over()):
            await self.wait_for_room(deadline)

    async def wait_for_room(self, deadline: float | None = None) -> None:
        """Until something has changed, and there may be room.

        Raises:
            TimeoutError: Nothing has changed until the deadline.
        """
        await self.room.wait(time_left_s(deadline, self.now()))

    def call_when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Like :meth:`wait_for_room`, with a callback instead of waiting."""
        self.room.call(callback)

    async def wait_for(self, waiter: Waiter, timeout_s: float, what: str, deadline: float | None = None) -> Any:
        """The result of an operation. ``deadline`` is for one that began earlier.

        Raises:
            RequestTimeout: It was not there in time.
        """
        # A timer of our own costs a third of asyncio.timeout(), and this is what request latency is made of.
        timer = self.loop.call_at(
            self.now() + timeout_s if deadline is None else deadline, expire, waiter, what, timeout_s
        )
        try:
            return await waiter
        finally:
            timer.cancel()

    # ---- the time of what is attached --------------------------------------------------------------------------

    def set_alarm(self, deadline: float) -> None:
        """Look at the clock then: something attached has this deadline, which may be nearer than all the others.

        One timer serves the connection and all that is attached. It is never set later: when it rings too early, it is
        set anew. Most deadlines move away with each answer, and would be set and cancelled for nothing.
        """
        if deadline < self._timer_at:
            self._disarm_timer()
            self._timer_at = deadline
            self._timer = self.loop.call_at(deadline, self._on_timer)

    def sleep_s(self, alarm: float | None, deadline: float | None) -> float | None:
        """How long one may sleep who has set an alarm, and has a deadline besides. The alarm is the loop's to ring."""
        return None if deadline is None else deadline - self.now()

    # ---- a session's life --------------------------------------------------------------------------------------

    async def _establish(self, *, is_first: bool) -> None:
        auth = cast(AuthSource, self._auth)  # what it asks for is awaited before it gets it
        self._is_establishing = True
        try:
            await self._perform_all(establish(self.connection, auth, self._tls, is_first=is_first))
        finally:
            self._is_establishing = False
        self.flush()
        self.room.notify_all()
        if self.connection.is_connected:
            self.connection.on_time(self.now())  # it pings from now on
            self._arm_timer()
        self.deliver_events()

    async def _perform_all(self, steps: Establishing) -> None:
        try:
            await run_steps(StepRun(steps), self._perform)
        except asyncio.CancelledError:
            self.connection.end("cancelled")
            self._hang_up()
            raise

    async def _perform(self, step: Step) -> Any:
        self.deliver_events()  # an attempt that failed is reported before the next
        if self.connection.is_closed:
            raise ConnectionLost("closed while connecting")
        timeout_s = self.connection.options.connect_timeout_s
        match step:
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case Hangup():
                self._hang_up()
            case AskSecret(source):
                secret = source()
                if not inspect.isawaitable(secret):
                    return secret
                return await _within(timeout_s, "the function that gives the credentials", secret)
            case Dial(server, tls_name):
                await _within(timeout_s, f"dialling {server}", self._dial(server.host, server.port, tls_name))
            case UpgradeToTLS(tls_name):
                await _within(timeout_s, f"TLS handshake with {tls_name}", self._upgrade(tls_name))
            case Converse(is_done, what):
                await _within(timeout_s, what, self._converse(is_done))

    async def _dial(self, host: str, port: int, tls_name: str | None) -> None:
        context = None if tls_name is None else tls_context(self._tls)
        session = self._session = _Session(self)
        await self.loop.create_connection(lambda: session, host, port, ssl=context, server_hostname=tls_name)

    async def _upgrade(self, tls_name: str) -> None:
        session = self._session
        if session is None or session.transport is None:
            raise (session and session.failure) or ConnectionLost("the server closed the connection before TLS")
        transport = await self.loop.start_tls(
            session.transport, session, tls_context(self._tls), server_hostname=tls_name
        )
        if transport is None:
            raise ConnectionLost("the server closed the connection during the TLS handshake")
        session.transport = transport

    async def _converse(self, is_done: Callable[[], bool]) -> None:
        session = self._session
        self.flush()
        while True:
            # Looked at first: what made the machine ready may have come together with what it must not go on from.
            if session is None or session.failure is not None:
                raise (session and session.failure) or ConnectionLost("the connection was dropped")
            if is_done():
                return
            session.progress = self.loop.create_future()
            await session.progress

    def _hang_up(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.transport is not None:
            session.transport.abort()

    # ---- what the transport tells us ---------------------------------------------------------------------------

    def on_data(self, session: _Session, data: bytes) -> None:
        if session is not self._session:
            return  # a late chunk of a session that is over
        try:
            self.connection.receive_data(data)
        except JetSparkError as error:
            self.on_lost(session, error)
            return
        except Exception as error:
            # A mistake of ours. Raised, asyncio would drop the transport and say so to nobody who uses the connection.
            _logger.exception("reading what the server sent failed; the session ends")
            self.on_lost(session, error)
            return
        if session.progress is not None and not session.progress.done():
            session.progress.set_result(None)
        self.deliver_events()

    def on_lost(self, session: _Session, error: Exception) -> None:
        if session.failure is None:
            session.failure = error
        if session.progress is not None and not session.progress.done():
            session.progress.set_result(None)
        if session is not self._session or not self.connection.is_connected:
            return  # an attempt's failure is its generator's to handle
        self.connection.end(describe_error(session.failure))
        self._hang_up()
        self.room.notify_all()
        self.deliver_events()
        if self.connection.is_closed or self._is_establishing:
            # An event handler may have closed us; or the server let us in and dropped us before the attempt was over,
            # and the attempt sees that by itself.
            return
        if self.connection.options.reconnect:
            self._reconnecting = self.loop.create_task(self._reconnect(), name="jetspark-reconnect")
        else:
            self.close(ConnectionLost(describe_error(session.failure)))

    def on_writable(self, session: _Session) -> None:
        if session is self._session:
            self.flush()
            self.room.notify_all()  # also those that wait with nothing left to flush

    async def _reconnect(self) -> None:
        try:
            await self._establish(is_first=False)
        except Exception as error:
            self.close(error)
        finally:
            self._reconnecting = None

    def _on_timer(self) -> None:
        """Somebody's moment has come, or has moved away meanwhile: each is asked."""
        self._timer, self._timer_at = None, math.inf
        now, session = self.now(), self._session
        if session is not None:
            try:
                self.connection.on_time(now)
            except JetSparkError as error:
                self.on_lost(session, error)
        for attached in self.dispatcher.due(now):
            self.dispatcher.guard(attached.on_time, now)
        self._arm_timer()
        self.deliver_events()

    def _arm_timer(self) -> None:
        of_session = self.connection.next_deadline() if self.connection.is_connected else None
        for deadline in (self.dispatcher.next_deadline(), of_session):
            if deadline is not None:
                self.set_alarm(deadline)

    def _disarm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def deliver_events(self) -> None:
        """After every call into the connection: pass on what happened, send what it has to say."""
        connection = self.connection
        events = connection.events()
        if events:
            self.dispatcher.deliver(events)
        if connection.out_bytes:
            self.flush_soon()
        if connection.is_leaving and connection.is_connected:
            # Its deadline comes nearer by what it receives: only then, and only while it goes to another server.
            self._arm_timer()


class _Session(asyncio.BufferedProtocol):
    """One transport's callbacks; a new one for each attempt, so that a late callback cannot hit the next session.

    The transport reads into memory that is there already. For a plain protocol it takes memory for all it might get,
    at each read anew, and from the system: that took a third of a request's time, and a tenth of reading a stream.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.transport: asyncio.Transport | None = None
        self.failure: Exception | None = None
        self.progress: asyncio.Future[None] | None = None
        self.is_paused = False
        self.is_server_here = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not an instance of it
        address = transport.get_extra_info("peername")
        self.is_server_here = bool(address) and ip_address(address[0]).is_loopback

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._link.arrived

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._link.arrived[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """For transports that have the bytes in hand."""
        self._link.on_data(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._link.on_lost(self, exc or ConnectionLost("the server closed the connection"))

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._link.on_writable(self)


async def _within(timeout_s: float, what: str, work: Any) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        if isinstance(error, RequestTimeout):
            raise
        raise RequestTimeout(what, timeout_s) from None


def expire(future: asyncio.Future[Any], what: str, timeout_s: float) -> None:
    """For a timer: the wait is over without an answer."""
    if not future.done():
        future.set_exception(RequestTimeout(what, timeout_s))
