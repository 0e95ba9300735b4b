"""The parts of clients, subscriptions and runners that do not wait, shared by both drivers.

``ClientBase`` and ``SubscriptionBase`` have read-only facts. The runners connect a
:class:`~jetspark.core.machine.Machine` to a transport.

One runner runs one machine. It is the reader of the machine's inbox, and it is attached to the transport while the
machine expects events or has a deadline; its owner's callers wait in it. After each call into the machine it does the
same: notify the owner, wake the callers, write the messages of the machine, and set an alarm for its next deadline. The
waiting itself is in each driver's ``runner.py``.

With threads, the transport's lock guards the machine. Callers of a runner hold it; methods that the transport calls
take it themselves. Time is watched by the connection's own thread, and by callers while they wait: a batch must be kept
alive while its producer thinks. The program's callbacks are called without the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from jetspark.core.connection import Connection
from jetspark.core.events import ConnectionEvent
from jetspark.core.handshake import ServerInfo
from jetspark.core.headers import HeadersLike
from jetspark.core.machine import Machine, PacedMachine
from jetspark.core.message import CoreMessage
from jetspark.core.options import ConnectOptions
from jetspark.core.subscription import SubscriptionState
from jetspark.core.transport import WRITE_AT_BYTES, Crowd, DriverTransport, drop_reader
from jetspark.errors import UsageError

__all__ = [
    "ClientBase",
    "ContextBase",
    "PacedRunnerBase",
    "ReplyHandle",
    "RunnerBase",
    "SharedContextBase",
    "SubscriptionBase",
    "SubscriptionReaderBase",
]

SMALL_BYTES = 4096
"""A reply of at most this size is below the limit of any server, and is sent without comparing the two."""

# ---- facts -----------------------------------------------------------------------------------------------------------


class ClientBase:
    """The facts of a connection."""

    _machine: Connection

    @property
    def options(self) -> ConnectOptions:
        return self._machine.options

    @property
    def is_connected(self) -> bool:
        return self._machine.is_connected

    @property
    def is_closed(self) -> bool:
        return self._machine.is_closed

    @property
    def server(self) -> str:
        """The server of the present session, or of the last one."""
        return str(self._machine.server)

    @property
    def servers(self) -> list[str]:
        """Every server known: those named to ``connect`` and those the cluster announced."""
        return [str(server) for server in self._machine.pool.servers]

    @property
    def server_info(self) -> ServerInfo:
        return self._machine.info

    @property
    def max_payload_bytes(self) -> int:
        """The largest message, headers included, that the server accepts."""
        return self._machine.info.max_payload_bytes

    @property
    def buffered_bytes(self) -> int:
        """Published and not yet handed to the network."""
        return self._machine.out_bytes

    @property
    def unconfirmed_messages(self) -> int:
        """Published and handed to the network, but not confirmed by the server; ``flush`` makes it 0."""
        return self._machine.unconfirmed_messages


class SubscriptionBase:
    """The facts of a subscription."""

    _state: SubscriptionState

    @property
    def subject(self) -> str:
        return self._state.subject

    @property
    def queue(self) -> str:
        return self._state.queue

    @property
    def pending_messages(self) -> int:
        """Received and not yet read."""
        return len(self._state.pending)

    @property
    def pending_bytes(self) -> int:
        return self._state.pending_bytes

    @property
    def received(self) -> int:
        """Received in all, dropped ones included."""
        return self._state.received

    @property
    def dropped(self) -> int:
        """Lost because the reader was too slow."""
        return self._state.dropped

    @property
    def is_finished(self) -> bool:
        """True if no more messages will arrive. Unread messages may still be there."""
        return self._state.is_finished

    def _is_readable(self) -> bool:
        """True if a reader need not wait: a message, or the end, is there."""
        return bool(self._state.pending) or self._state.is_finished


class SubscriptionReaderBase:
    """The reader of a subscription, but for the waiting."""

    state: SubscriptionState
    direct: Callable[[Any], None] | None = None
    """Called with each message while the connection reads, so it must not wait. Its errors are reported."""

    def __init__(self, transport: DriverTransport, changed: Crowd) -> None:
        """``changed`` has the callers that wait for messages."""
        self._transport, self.changed = transport, changed

    def wake(self) -> None:
        if self.direct is not None:
            self._call_directly(self.direct)
        with self._transport.lock:
            self.changed.notify_all()

    def _call_directly(self, callback: Callable[[Any], None]) -> None:
        take, dispatcher = self.state.pending.popleft, self._transport.dispatcher
        while True:
            try:
                message = take()  # atomic, because another thread may be in here
            except IndexError:
                break
            dispatcher.guard(callback, message)
        if self.state.is_finished and self.state.error is not None:
            dispatcher.report(self.state.error)

    @property
    def pending_messages(self) -> int:
        return len(self.state.pending)


# ---- past the client -------------------------------------------------------------------------------------------------


M_contra = TypeVar("M_contra", bound=CoreMessage, contravariant=True)
C = TypeVar("C", bound=CoreMessage)


class ReplyHandle(Protocol[M_contra]):
    """The receiver of one request's outcome. The connection calls it while it reads, so no method may wait."""

    def done(self) -> bool:
        """Called first; the outcome of a request whose handle is done is dropped."""

    def set_result(self, message: M_contra, /) -> None:
        """The first reply."""

    def set_exception(self, error: Exception, /) -> None:
        """No reply will come: ``NoResponders``, ``PermissionDenied`` or the end of the connection."""


class _HasTransport(Protocol):
    @property
    def connection(self) -> Connection: ...

    @property
    def transport(self) -> DriverTransport: ...


class ContextBase(Generic[C]):
    """Calls on the connection for which no task, future or timer is made. ``C`` is the driver's class of messages."""

    __slots__ = ()

    def request_with(
        self: _HasTransport,
        handle: ReplyHandle[C],
        subject: str,
        data: bytes,
        headers: HeadersLike | None = None,
        *,
        at_once: bool = True,
    ) -> str:
        """Send a request whose first reply goes to ``handle``.

        Returns a token for :meth:`forget`, which the caller calls when it stops waiting: there is no time-out.

        Args:
            at_once: Write it now; False writes it together with the messages that follow within this moment.

        Raises:
            BufferFull: There is no room in the send buffer; nothing was sent.
            InvalidSubject, InvalidHeader, PayloadTooLarge, ConnectionClosed: Nothing was sent.
        """
        token = self.connection.request(handle, subject, data, headers)
        if at_once:
            self.transport.flush()
        else:
            self.transport.flush_soon()
        return token

    def forget(self: _HasTransport, token: str) -> None:
        """Drop the reply to a :meth:`request_with`, should it still come."""
        self.connection.requests.forget(token)

    def send_reply(
        self: _HasTransport, subject: str, data: bytes, headers: HeadersLike | None = None, *, at_once: bool = True
    ) -> None:
        """Publish to the reply subject of a message, which the caller has checked.

        Args:
            at_once: As for :meth:`request_with`.

        Raises:
            BufferFull: There is no room in the send buffer; nothing was sent.
            InvalidHeader, PayloadTooLarge, ConnectionClosed: Nothing was sent.
        """
        if headers is None and len(data) <= SMALL_BYTES:
            self.connection.publish_raw(subject.encode(), data)
        else:
            self.connection.publish(subject, data, "", headers)
        if at_once:
            self.transport.flush()
        else:
            self.transport.flush_soon()


class SharedContextBase(ContextBase[C]):
    """The same calls for threads, under the transport's lock, which would cost a command with asyncio one percent."""

    __slots__ = ()

    def request_with(
        self: _HasTransport,
        handle: ReplyHandle[C],
        subject: str,
        data: bytes,
        headers: HeadersLike | None = None,
        *,
        at_once: bool = True,
    ) -> str:
        with self.transport.lock, self.transport.doubt:
            return ContextBase.request_with(self, handle, subject, data, headers, at_once=at_once)

    def forget(self: _HasTransport, token: str) -> None:
        with self.transport.lock:
            ContextBase.forget(self, token)

    def send_reply(
        self: _HasTransport, subject: str, data: bytes, headers: HeadersLike | None = None, *, at_once: bool = True
    ) -> None:
        with self.transport.lock, self.transport.doubt:
            ContextBase.send_reply(self, subject, data, headers, at_once=at_once)


# ---- running machines ------------------------------------------------------------------------------------------------


M = TypeVar("M", bound=Machine)
P = TypeVar("P", bound=PacedMachine)


class RunnerBase(Generic[M]):
    """Wakes one machine by answers, events and time, and then the callers that wait for it."""

    machine: M
    changed: Crowd
    """The callers that wait for the machine; made by the driver."""

    def __init__(
        self, transport: DriverTransport, on_step: Callable[[], None], notify_owner: Callable[[], None]
    ) -> None:
        """Two calls of the owner's.

        ``on_step`` is called after each call into the machine, before its callers continue. ``notify_owner`` is called
        after a call from the transport, without the driver's lock, so that it may call the program.
        """
        self._transport: DriverTransport = transport
        self._connection = transport.connection
        self._on_step, self._notify_owner = on_step, notify_owner
        self.due_at: float | None = None
        """When the machine is called at the latest; None while no alarm is set for it."""

    def run(self, machine: M) -> M:
        """Set the machine, which is made after the runner because the runner is its reader."""
        self.machine = machine
        return machine

    def attach(self) -> None:
        """Hear of connection events and of time from now on."""
        self._transport.dispatcher.attach(self)

    def detach(self) -> None:
        self._transport.dispatcher.detach(self)
        self.due_at = None  # a deadline that nobody watches

    def step(self, call: Callable[[float], None]) -> None:
        """Call into the machine, with the time."""
        try:
            call(self._transport.now())
        except Exception as error:  # a bug of ours: no caller may wait for an answer that never comes
            self.machine.fail(error)
            raise
        except BaseException as error:
            self.on_interrupt(error)
            raise
        finally:
            self.after_step()

    def on_interrupt(self, error: BaseException) -> None:
        """End the session after an interrupt in the middle of a call into the machine: the states of machine and
        connection may no longer agree."""
        self._transport.doubt.after(error)

    def after_step(self) -> None:
        """After every call into the machine."""
        self._on_step()
        self.changed.notify_all()
        if self.due_at is None:  # else an alarm is set, and early enough: an answer moves the deadline away
            self.watch_clock()

    def watch_clock(self) -> None:
        """Have the transport call us at the machine's deadline. An earlier alarm stays: it sets the next one itself."""
        deadline = self.machine.next_deadline()
        if deadline is not None:
            self.wake_at(deadline)

    def wake_at(self, moment: float) -> None:
        """Have the transport call us then, or earlier."""
        if self.due_at is None or moment < self.due_at:
            self.due_at = moment
            self._transport.set_alarm(moment)

    def run_due(self) -> None:
        """Call ``on_time`` if it is due. With threads the connection's own thread may be busy in ``on_event``."""
        now = self._transport.now()
        if self.due_at is not None and now >= self.due_at:
            self.on_time(now)

    # ---- calls of the transport ----------------------------------------------------------------------------------

    def on_event(self, event: ConnectionEvent) -> None:
        with self._transport.lock:
            self.step(partial(self.machine.on_event, event))
        self._notify_owner()

    def next_deadline(self) -> float | None:
        return self.due_at

    def on_time(self, now: float) -> None:
        with self._transport.lock:
            self.due_at = None
            self.step(self.machine.on_time)
        self._notify_owner()

    # ---- the reader of the machine's inbox ---------------------------------------------------------------------

    def wake(self) -> None:
        """The server said something."""
        with self._transport.lock:
            self.step(self.machine.on_replies)
        self._notify_owner()

    @property
    def pending_messages(self) -> int:
        return 0


class PacedRunnerBase(RunnerBase[P]):
    """A runner whose callers also wait for room in the connection's buffer."""

    def on_interrupt(self, error: BaseException) -> None:
        """Fail the machine too: after an interrupt it may not know which messages it has sent."""
        super().on_interrupt(error)
        if not isinstance(error, Exception):
            self.machine.fail(UsageError(f"it was interrupted by {type(error).__name__}; begin another one"))
            self.drop_inbox()
            self.detach()

    def after_step(self) -> None:
        super().after_step()
        self.watch_clock()  # a hole that is noticed brings the deadline nearer
        if self.machine.failure is not None:
            self._transport.room.notify_all()  # wakes callers that wait for the connection's room, not for the machine
        out_bytes = self._connection.out_bytes
        if out_bytes >= WRITE_AT_BYTES:
            self._transport.hand_over()
        elif out_bytes:
            self._transport.flush_soon()

    def next_deadline(self) -> float | None:
        # Computed at each call: callers send without a step, and their messages have deadlines too.
        deadline, due_at = self.machine.next_deadline(), self.due_at
        if deadline is None or due_at is None:
            return due_at if deadline is None else deadline
        return min(deadline, due_at)

    def _has_failed(self) -> bool:
        return self.machine.failure is not None

    def drop_inbox(self) -> None:
        """An interrupt within ``subscribe`` leaves a subscription that the machine does not know."""
        drop_reader(self._transport, self)
