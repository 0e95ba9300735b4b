"""The asyncio driver's engine: the only place here that touches a socket, a timer or the event loop's streams."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Generator
from ipaddress import ip_address
from typing import Any, TypeAlias, cast

from jetspark.aio.waits import Waits
from jetspark.core.auth import Auth
from jetspark.core.connection import Connection, Event
from jetspark.core.lifecycle import (
    AskSecret,
    AuthSource,
    Converse,
    Delay,
    Dial,
    Hangup,
    Step,
    UpgradeToTLS,
    establish,
)
from jetspark.core.options import TLSConfig
from jetspark.core.tls import describe_error, tls_context
from jetspark.errors import ConnectionLost, JetSparkError, RequestTimeout, UsageError

__all__ = ["AsyncAuthSource", "Link"]

# One callable of two results: of two callables, type checkers infer neither for a lambda.
AsyncAuthSource: TypeAlias = Auth | Callable[[], Auth | Awaitable[Auth]] | None

# Large enough that a write call costs little per message, small enough that others get their turn soon: at this
# many bytes a publisher hands over what has gathered and yields to the loop once.
WRITE_AT_BYTES = 64 << 10

_logger = logging.getLogger("jetspark.aio")

# Not on Windows, which has no such call.
_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Link:
    """Keeps one :class:`Connection` connected, and moves bytes between it and the network."""

    def __init__(
        self,
        machine: Connection,
        auth: AsyncAuthSource,
        tls: TLSConfig | None,
        on_events: Callable[[list[Event]], None],
    ) -> None:
        self._machine, self._auth, self._tls = machine, auth, tls
        self._on_events = on_events
        self._loop = asyncio.get_running_loop()
        self._session: _Session | None = None
        self._is_establishing = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_for_room = Waits()
        self.flush_is_scheduled = False

    async def open(self) -> None:
        try:
            await self._establish(is_first=True)
        except BaseException:
            self._machine.close()
            raise

    def close(self, error: Exception | None = None) -> None:
        """Drop the transport and end every wait. What is buffered is lost: flush first."""
        if self._reconnecting is not None and self._reconnecting is not asyncio.current_task():
            self._reconnecting.cancel()
        self._machine.close(error)
        self._hang_up()
        self._settle()
        self._wake_publishers()

    def unsent(self) -> tuple[int, int]:
        """How many messages were never handed to the network, and how many may not have left it: for a loop that ended.

        What the system took is sent, also after the program's end.
        """
        session = self._session
        transport = None if session is None else session.transport
        is_stuck = transport is not None and transport.get_write_buffer_size() > 0
        return self._machine.buffered_messages, self._machine.unconfirmed_messages if is_stuck else 0

    def now(self) -> float:
        return self._loop.time()

    def deadline(self, timeout_s: float) -> float:
        return self._loop.time() + timeout_s

    def check_loop(self) -> None:
        """Refuse to be used from another event loop: what it publishes would wait for ours, which may not run at all.

        Raises:
            UsageError: This is not the loop of ``connect``.
        """
        try:
            is_ours = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_ours = False
        if not is_ours:
            raise UsageError(
                "the client belongs to another event loop: connect in the loop that uses it, hand the work over with "
                "asyncio.run_coroutine_threadsafe(), or share a jetspark.blocking client between threads"
            )

    def schedule_flush(self) -> None:
        """Write what is buffered when the current step of the loop is over; much is gathered into one write.

        Called before something is accepted, it also sees to it that nothing is from another loop. Looking once for each
        write and not for each message costs nothing that can be measured.
        """
        if not self.flush_is_scheduled:
            self.check_loop()
            self.flush_is_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self.flush_is_scheduled = False
        session = self._session
        if session is not None and session.transport is not None and not session.is_paused:
            data = self._machine.data_to_send()
            if data:
                session.transport.write(data)
                if not session.is_paused:
                    self._wake_publishers()

    def hand_over(self) -> None:
        """Flush, then yield the CPU if the server runs on this machine: on two cores it may be waiting for ours."""
        self.flush()
        if self._session is not None and self._session.is_server_here:
            _give_way()

    async def push(self, deadline: float | None = None, other: Waits | None = None) -> None:
        """Write now; wait while the network takes no more, or until the other thing happens.

        Nothing of the caller's is accepted before this returns.

        Raises:
            TimeoutError: It took no more until the deadline.
        """
        self.check_loop()
        self.flush()
        session = self._session
        if session is not None and session.is_paused:
            async with asyncio.timeout_at(deadline):
                await self.wait_for_room(other)
        else:
            await asyncio.sleep(0)

    async def wait_for_room(self, other: Waits | None = None) -> None:
        """Until something has changed: there is room, a session, or none ever again; or the other thing happens."""
        await self._waiting_for_room.wait(other)

    def call_when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Like :meth:`wait_for_room`, for one who cannot wait."""
        self._waiting_for_room.add().add_done_callback(lambda _: callback())

    def _wake_publishers(self) -> None:
        self._waiting_for_room.wake()

    # ---- a session's life --------------------------------------------------------------------------------------

    async def _establish(self, *, is_first: bool) -> None:
        auth = cast(AuthSource, self._auth)  # what it asks for is awaited before it gets it
        self._is_establishing = True
        try:
            await self._perform_all(establish(self._machine, auth, self._tls, is_first=is_first))
        finally:
            self._is_establishing = False
        self.flush()
        self._wake_publishers()
        self._watch_clock()
        self._settle()

    async def _perform_all(self, steps: Generator[Step, Any, None]) -> None:
        answer: Any = None
        problem: Exception | None = None
        try:
            while True:
                step = steps.send(answer) if problem is None else steps.throw(problem)
                answer = problem = None
                self._settle()  # an attempt that failed is told before the next
                if self._machine.is_closed:
                    raise ConnectionLost("closed while connecting")
                try:
                    answer = await self._perform(step)
                except Exception as error:  # establish() decides which errors end an attempt and which end it all
                    problem = error
        except StopIteration:
            return
        except asyncio.CancelledError:
            self._machine.end("cancelled")
            self._hang_up()
            raise

    async def _perform(self, step: Step) -> Any:
        timeout_s = self._machine.options.connect_timeout_s
        match step:
            case Delay(seconds):
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
        await self._loop.create_connection(lambda: session, host, port, ssl=context, server_hostname=tls_name)

    async def _upgrade(self, tls_name: str) -> None:
        session = self._session
        if session is None or session.transport is None:
            raise (session and session.failure) or ConnectionLost("the server closed the connection before TLS")
        transport = await self._loop.start_tls(
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
            session.progress = self._loop.create_future()
            await session.progress

    def _hang_up(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.transport is not None:
            session.transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- what the transport tells us ---------------------------------------------------------------------------

    def on_data(self, session: _Session, data: bytes) -> None:
        if session is not self._session:
            return  # a late chunk of a session that is over
        try:
            self._machine.receive_data(data)
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
        self._settle()

    def on_lost(self, session: _Session, error: Exception) -> None:
        if session.failure is None:
            session.failure = error
        if session.progress is not None and not session.progress.done():
            session.progress.set_result(None)
        if session is not self._session or not self._machine.is_connected:
            return  # an attempt's failure is its generator's to handle
        self._machine.end(describe_error(session.failure))
        self._hang_up()
        self._wake_publishers()
        self._settle()
        if self._machine.is_closed or self._is_establishing:
            # An event handler may have closed us; or the server let us in and dropped us before the attempt was over,
            # and the attempt sees that by itself.
            return
        if self._machine.options.reconnect:
            self._reconnecting = self._loop.create_task(self._reconnect(), name="jetspark-reconnect")
        else:
            self.close(ConnectionLost(describe_error(session.failure)))

    def on_writable(self, session: _Session) -> None:
        if session is self._session:
            self.flush()
            self._wake_publishers()  # also those that wait with nothing left to flush

    async def _reconnect(self) -> None:
        try:
            await self._establish(is_first=False)
        except Exception as error:
            self.close(error)
        finally:
            self._reconnecting = None

    def _watch_clock(self) -> None:
        if self._machine.is_connected:
            self._machine.on_time(self._loop.time())
            self._arm_timer()

    def _arm_timer(self) -> None:
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        session = self._session
        if session is None:
            return
        try:
            self._machine.on_time(self._loop.time())
        except JetSparkError as error:
            self.on_lost(session, error)
            return
        self._arm_timer()
        self._settle()

    def _settle(self) -> None:
        """After every call into the machine: pass on what happened, send what it has to say."""
        events = self._machine.events()
        if events:
            self._on_events(events)
        if self._machine.out_bytes:
            self.schedule_flush()
        if self._machine.is_leaving and self._timer is not None:
            deadline = self._machine.next_deadline()
            if deadline is not None and deadline < self._timer.when():
                self._timer.cancel()
                self._arm_timer()


class _Session(asyncio.Protocol):
    """One transport's callbacks; a new one for each attempt, so that a late callback cannot hit the next session."""

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

    def data_received(self, data: bytes) -> None:
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
