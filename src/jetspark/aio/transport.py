"""The asyncio driver's transport: the only module of the driver that uses sockets, timers and loop transports."""

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
from jetspark.core.options import TLSConfig
from jetspark.core.step_runner import Sleep, StepRun
from jetspark.core.tls import describe_error, tls_context
from jetspark.core.transport import READ_BYTES, InterruptGuard, time_left_s
from jetspark.errors import ConnectionLost, JetSparkError, RequestTimeout, UsageError

__all__ = ["DriverAuth", "Transport", "expire"]

# One callable with a union result: from two callable types, type checkers infer neither for a lambda.
DriverAuth: TypeAlias = Auth | Callable[[], Auth | Awaitable[Auth]] | None

_logger = logging.getLogger("jetspark.aio")

# Windows has no sched_yield.
_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Transport:
    """Keeps one :class:`Connection` connected, and moves bytes between it and the network.

    It also connects machines and readers to the event loop: it delivers events (:meth:`deliver_events`), calls
    attachments at their deadlines, and waits for room in the send buffer. The blocking driver's ``Transport`` has the
    same methods.
    """

    def __init__(self, connection: Connection, auth: DriverAuth, tls: TLSConfig | None, dispatcher: Dispatcher) -> None:
        self.connection, self._auth, self._tls = connection, auth, tls
        self.dispatcher = dispatcher
        self.loop = asyncio.get_running_loop()
        self.lock = nullcontext()
        """A no-op, because one thread uses the transport. Modules with a generated twin hold it for the twin's sake."""
        self.doubt = InterruptGuard(lambda: None)
        self.room = Changed(self.lock)
        self.now, self.new_waiter = self.loop.time, self.loop.create_future
        self.idle_s: float = getattr(self.loop, "idle_s", 0.0)
        self._session: _Session | None = None
        self.arrived = memoryview(bytearray(READ_BYTES))
        """The buffer that transports read into."""
        self._is_establishing = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self.flush_is_scheduled = False

    async def open(self) -> None:
        await self._establish(is_first=True)

    def close(self, error: Exception | None = None) -> None:
        """Drop the transport and end every wait. Bytes that the network does not accept at once are lost."""
        if self._reconnecting is not None and self._reconnecting is not asyncio.current_task():
            self._reconnecting.cancel()
        self.flush()  # requests of this step of the loop, see flush_promptly
        self.connection.close(error)
        self._hang_up()
        self.deliver_events()
        self.room.notify_all()
        self._disarm_timer()  # last, because callbacks about the end may have set the timer again

    def unsent(self) -> tuple[int, int]:
        """How many messages are in our buffer, and how many may be stuck in the transport of a loop that ended.

        The operating system still sends the bytes it accepted, even after the program's end.
        """
        session = self._session
        transport = None if session is None else session.transport
        is_stuck = transport is not None and transport.get_write_buffer_size() > 0
        return self.connection.buffered_messages, self.connection.unconfirmed_messages if is_stuck else 0

    def deadline(self, timeout_s: float) -> float:
        return self.now() + timeout_s

    def may_wait(self) -> bool:
        """Always True: any task may wait. In the blocking driver, the thread that reads must not."""
        return True

    def check_may_wait(self, what: str) -> None:
        """Refuse waits that would never end.

        Raises:
            UsageError: The running loop is not that of ``connect``.
        """
        self.check_caller()

    def check_caller(self) -> None:
        """Refuse callers on another event loop: their messages would wait for this loop, which may not even run.

        Raises:
            UsageError: The running loop is not that of ``connect``.
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
        """Flush the buffer at the end of the current loop iteration; many messages share one write.

        Called before a message is accepted, it also refuses callers on another loop. That check runs once per write,
        not per message, so its cost is not measurable.
        """
        if not self.flush_is_scheduled:
            self.check_caller()
            self.flush_is_scheduled = True
            self.loop.call_soon(self.flush)

    def flush_promptly(self) -> None:
        """Flush now, for a request whose caller waits; later requests of this loop iteration share a write at its end.

        So a single request is written without delay, and of many concurrent ones all but the first share a write.
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
        """Flush, then yield the CPU if the server is local: on two cores it may be waiting for this one."""
        self.flush()
        if self._session is not None and self._session.is_server_here:
            _give_way()

    async def write_and_wait(self, deadline: float | None = None, is_over: Callable[[], bool] | None = None) -> None:
        """Flush now; wait while the network accepts no more, until ``is_over`` returns True.

        Code that changes the result of ``is_over`` must notify ``room``. The caller's message is not accepted before
        this returns.

        Raises:
            TimeoutError: The network accepted no more until the deadline.
        """
        self.check_caller()
        self.flush()
        if self._session is None or not self._session.is_paused:
            await asyncio.sleep(0)
            return
        while self._session is not None and self._session.is_paused and (is_over is None or not is_over()):
            await self.wait_for_room(deadline)

    async def wait_for_room(self, deadline: float | None = None) -> None:
        """Wait until the send buffer may have room.

        Raises:
            TimeoutError: No change until the deadline.
        """
        await self.room.wait(time_left_s(deadline, self.now()))

    def call_when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Like :meth:`wait_for_room`, but calls ``callback`` instead of waiting."""
        self.room.call(callback)

    async def wait_for(self, waiter: Waiter, timeout_s: float, what: str, deadline: float | None = None) -> Any:
        """Wait for the result of an operation; ``deadline`` overrides ``timeout_s`` for one that began earlier.

        Raises:
            RequestTimeout: No result in time.
        """
        # A plain timer costs a third of asyncio.timeout(), which dominates request latency.
        timer = self.loop.call_at(
            self.now() + timeout_s if deadline is None else deadline, expire, waiter, what, timeout_s
        )
        try:
            return await waiter
        finally:
            timer.cancel()

    # ---- deadlines of attachments ------------------------------------------------------------------------------

    def set_alarm(self, deadline: float) -> None:
        """Make sure that the timer fires at ``deadline`` or earlier, on behalf of an attachment.

        One timer serves the connection and all attachments. It is only ever moved to an earlier time; if it fires too
        early, it is set again. Most deadlines move away with each reply, so postponing the timer would be wasted work.
        """
        if deadline < self._timer_at:
            self._disarm_timer()
            self._timer_at = deadline
            self._timer = self.loop.call_at(deadline, self._on_timer)

    def sleep_s(self, alarm: float | None, deadline: float | None) -> float | None:
        """Seconds a caller may sleep until its deadline. The loop's timer handles the alarm."""
        return None if deadline is None else deadline - self.now()

    # ---- a session's life --------------------------------------------------------------------------------------

    async def _establish(self, *, is_first: bool) -> None:
        auth = cast(AuthSource, self._auth)  # _perform awaits secrets, so the procedure receives plain values
        self._is_establishing = True
        try:
            await self._perform_all(establish(self.connection, auth, self._tls, is_first=is_first))
        finally:
            self._is_establishing = False
        self.flush()
        self.room.notify_all()
        if self.connection.is_connected:
            self.connection.on_time(self.now())  # starts the pings
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
        self.deliver_events()  # report a failed attempt before the next one
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
            # Checked first: the bytes that completed the handshake may have been followed by a failure.
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

    # ---- callbacks of the transport ----------------------------------------------------------------------------

    def on_data(self, session: _Session, data: bytes) -> None:
        if session is not self._session:
            return  # a late chunk of an ended session
        try:
            self.connection.receive_data(data)
        except JetSparkError as error:
            self.on_lost(session, error)
            return
        except Exception as error:
            # A bug in this library. If it were raised, asyncio would drop the transport without notifying any caller.
            _logger.exception("connection to %s: reading failed; the session ends", self.connection.server)
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
            return  # the connect procedure handles failures of its own attempts
        self.connection.end(describe_error(session.failure))
        self._hang_up()
        self.room.notify_all()
        self.deliver_events()
        if self.connection.is_closed or self._is_establishing:
            # An event handler may have closed the connection. Or the server dropped it before the attempt ended, which
            # the attempt notices by itself.
            return
        if self.connection.options.reconnect:
            self._reconnecting = self.loop.create_task(self._reconnect(), name="jetspark-reconnect")
        else:
            self.close(ConnectionLost(describe_error(session.failure)))

    def on_writable(self, session: _Session) -> None:
        if session is self._session:
            self.flush()
            self.room.notify_all()  # flush() notifies only when it has written bytes

    async def _reconnect(self) -> None:
        try:
            await self._establish(is_first=False)
        except Exception as error:
            self.close(error)
        finally:
            self._reconnecting = None

    def _on_timer(self) -> None:
        """A timer fired: call ``on_time`` on every attachment whose deadline has passed, then set the next timer."""
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
        """After every call into the connection: deliver its events and flush its output."""
        connection = self.connection
        events = connection.events()
        if events:
            self.dispatcher.deliver(events)
        if connection.out_bytes:
            self.flush_soon()
        if connection.is_leaving and connection.is_connected:
            # Only while the connection moves to another server can received bytes bring its deadline nearer.
            self._arm_timer()


class _Session(asyncio.BufferedProtocol):
    """The callbacks of one transport; each attempt has its own, so a late callback cannot affect the next session.

    The transport reads into a preallocated buffer. A plain ``Protocol`` would allocate a buffer of maximum size for
    each read: that took a third of a request's time, and a tenth of the time to read a stream.
    """

    def __init__(self, owner: Transport) -> None:
        self._owner = owner
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
        return self._owner.arrived

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._owner.arrived[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Called by transports that do not use the buffer."""
        self._owner.on_data(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._owner.on_lost(self, exc or ConnectionLost("the server closed the connection"))

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._owner.on_writable(self)


async def _within(timeout_s: float, what: str, work: Any) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        if isinstance(error, RequestTimeout):
            raise
        raise RequestTimeout(what, timeout_s) from None


def expire(future: asyncio.Future[Any], what: str, timeout_s: float) -> None:
    """Timer callback: fail a pending wait with ``RequestTimeout``."""
    if not future.done():
        future.set_exception(RequestTimeout(what, timeout_s))
