"""The blocking driver's transport: one thread per connection, which dials, reads, pings and reconnects.

``lock`` guards the connection, its machines and the socket. The socket is non-blocking, so the lock is held only
briefly, and any thread may write the messages it has just published. Events and deadlines are delivered without the
lock, so that the threads they wake can take it.

One thread at a time reads from the socket. Usually that is the connection's own thread (in ``select``). A thread that
waits for a reply takes the reading over (``wait_for``) as a guest, because a wake-up by another thread costs more than
the rest of a request. All other threads wait for the reader.

Interrupts. A KeyboardInterrupt can hit the main thread between any two steps, and never the connection's thread. So
every state that an interrupted main thread leaves behind can be repaired by another thread:

* A guest reads under a :class:`ReadingLease`, which it renews. A guest that does not return the lease loses it.
* Steps that an interrupt may cut in half set a flag: ``_is_moving`` (bytes between the connection and the socket),
  ``is_suspect`` (a call into the connection), and flags in :class:`SocketWatch` and :class:`Passing`. A thread that
  holds the lock and finds a flag set knows that its owner was interrupted. The connection's thread then re-creates the
  selector, or ends the session and starts a new one. All parts of the client survive a new session, and
  ``Disconnected`` reports the messages in doubt.
* No thread sleeps longer than ``LONGEST_SLEEP_S`` without a check.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from jetspark.blocking.credentials import SecretAsking
from jetspark.blocking.socket_watch import SocketWatch, WakeupPipe
from jetspark.blocking.step_runner import run_steps
from jetspark.blocking.waiter import LONGEST_SLEEP_S, Changed, Waiter
from jetspark.core.connection import Connection, Event
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.lifecycle import AskSecret, Converse, Dial, Establishing, Hangup, Step, UpgradeToTLS, establish
from jetspark.core.lifecycle import AuthSource as DriverAuth
from jetspark.core.options import TLSConfig
from jetspark.core.step_runner import Sleep, StepRun
from jetspark.core.tls import describe_error, tls_context
from jetspark.core.transport import (
    LEASE_S,
    LINGER_S,
    READ_BYTES,
    Gathering,
    InterruptGuard,
    Passing,
    ReadingLease,
    time_left_s,
)
from jetspark.errors import ConnectionLost, JetSparkError, RequestTimeout, UsageError

__all__ = ["DriverAuth", "Transport"]

# Longest wait of close() for the connection's thread, which may be dialling or in a callback.
ENDING_S = 1.0

_logger = logging.getLogger("jetspark.blocking")

# Errors of a non-blocking socket that would have to wait.
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Transport:
    """Keeps one :class:`Connection` connected, and moves bytes between it and the network.

    It also connects machines and readers to the threads: it delivers events (:meth:`deliver_events`), calls
    attachments at their deadlines, and waits for room in the send buffer. The asyncio driver's ``Transport`` has the
    same methods.
    """

    now = staticmethod(time.monotonic)
    new_waiter = Waiter
    flush_is_scheduled = False
    """Always False: :meth:`flush_soon` is called every time and decides by itself."""
    idle_s = 0.0
    """Used only on event loops with virtual time."""

    def __init__(self, connection: Connection, auth: DriverAuth, tls: TLSConfig | None, dispatcher: Dispatcher) -> None:
        self.connection, self._auth, self._tls = connection, auth, tls
        self.dispatcher = dispatcher
        self.lock = threading.RLock()
        self.room = Changed(self.lock)
        self._room_calls: list[Callable[[], None]] = []
        self._socket: socket.socket | None = None
        self._unsent = memoryview(b"")
        # `recv` allocates its maximum size, fresh memory from the system each time: 150 µs for 200 KB. Copying them out
        # of a preallocated buffer takes 30 µs.
        self._arrived = memoryview(bytearray(READ_BYTES))
        self._is_closing = False
        self._alarm, self._is_alarmed = WakeupPipe(), False
        self._gathering = Gathering()
        self._watch = SocketWatch(self._alarm.reader)
        self._lease, self._reader_wakeup = ReadingLease(), WakeupPipe()
        """The lease of the guest that reads, and the pipe that wakes it."""
        self._guests_error: Exception | None = None
        self._passing = Passing(connection, dispatcher)
        self._is_establishing = True
        self._is_moving = False
        self.is_suspect = False
        """A call into the connection was interrupted half-way, so the session must end."""
        self.doubt = InterruptGuard(self.give_up_session)
        self._thread = threading.Thread(target=self._run, name="jetspark-connection", daemon=True)
        self._opened, self._over = Waiter(), Waiter()
        self._credentials = SecretAsking()
        self._has_ended = False
        self._due_at = math.inf
        """The nearest deadline of the attachments at the last check of the connection's thread."""
        self._sleeps_until = 0.0
        """The time until which the connection's thread sleeps; an earlier alarm has to wake it."""
        _transports.add(self)

    def open(self) -> None:
        self._thread.start()
        # Every step of connecting has a time-out of its own, so this wait needs none.
        self._opened.wait(threading.TIMEOUT_MAX)

    @property
    def is_over(self) -> bool:
        """The connection is closed, and its thread has finished."""
        return self._has_ended

    def close(self) -> None:
        """Drop the transport and end every wait. Buffered messages are lost: flush first."""
        self._is_closing = True
        self._let_go()
        self._alarm.wake()
        is_ours = self._thread is threading.current_thread()
        # In a forked process the thread does not exist, and _has_ended is set.
        if not is_ours and not self._is_establishing and not self._has_ended:
            self._over.look(ENDING_S)
        if not self._has_ended:
            # The thread is dialling, which cannot be interrupted, or in a callback: do not wait for either.
            with self.lock:
                self.connection.close()
                self.room.notify_all()
            self.deliver_events()
            if not is_ours and self._thread.is_alive():
                self._over.look(ENDING_S)
        if self._lease.holder in (0, threading.get_ident()):
            self._reader_wakeup.close()

    def check_caller(self) -> None:
        """No check: any thread may use the transport, unlike the loops of the asyncio driver."""

    def check_may_wait(self, what: str) -> None:
        """Refuse to wait for a reply on the thread that reads.

        Raises:
            UsageError: The caller is that thread, in ``on_event``.
        """
        if not self.may_wait():
            raise UsageError(
                f"{what} would never end: on_event runs on the thread that reads; use a thread of your own"
            )

    def may_wait(self) -> bool:
        """False on the thread that reads while it runs ``on_event``."""
        me = threading.get_ident()
        # The system reuses the ids of ended threads.
        is_reader = me == self._thread.ident and self._thread.is_alive()
        return not is_reader and not (me == self._lease.holder and self._passing.is_under_way(me))

    def wait_for(self, waiter: Waiter, timeout_s: float, what: str, deadline: float | None = None) -> Any:
        """Wait for the result of an operation; this thread reads the socket itself if no other guest does.

        ``deadline`` overrides ``timeout_s`` for an operation that began earlier.

        Raises:
            RequestTimeout: No result in time.
        """
        if deadline is None:
            deadline = time.monotonic() + timeout_s
        self.read_for(waiter, deadline)
        try:
            return waiter.wait(deadline - time.monotonic())
        except TimeoutError:
            raise RequestTimeout(what, timeout_s) from None

    def read_for(self, waiter: Waiter, deadline: float, *, is_reading: bool | None = None) -> None:
        """Read in place of the connection's thread until the waiter is resolved, unless another guest does.

        ``is_reading`` is the result of :meth:`take_over`, if the caller has called it already.
        """
        self._let_go()
        try:
            if self.take_over() if is_reading is None else is_reading:
                self._read_until(waiter, deadline)
        finally:
            try:
                self._hand_back()
            finally:
                self._hand_back()  # repeated, because an interrupt can prevent the first call

    def _let_go(self) -> None:
        """Before a wait, release locks that an interrupted call of this thread left held."""
        while self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock.release()

    def take_over(self) -> bool:
        """Try to become the reader; if True, the caller must call :meth:`read_for`, which ends that."""
        me = threading.get_ident()
        with self.lock:
            if self._passing.has_any(me):
                self._take_back(me)
            if not self._watch.is_on or not self._lease.take(me, time.monotonic()):
                return False
            self._watch_socket(is_ours=False)
            return True

    def _hand_back(self) -> None:
        """If this thread is the reader, return the reading to the connection's thread. Called twice, for interrupts."""
        me = threading.get_ident()
        if self._lease.holder != me:
            return
        with self.lock:
            if self._passing.has_any(me):
                self._take_back(me)
            self._watch_socket(is_ours=True)
            if self._is_moving or self.is_suspect:
                self._alarm.wake()
            if self._reader_wakeup.is_writer_closed:
                self._reader_wakeup.close()  # the connection ended while this thread was reading
            self._lease.end()  # the last step, so that an interrupted call is repeated completely

    def _take_back(self, me: int) -> None:
        """With the lock: give undelivered events of this thread back, for the connection's thread to deliver."""
        if not self._passing.has_any(me) or self._passing.is_under_way(me):
            return
        self._passing.put_back(me)
        self.is_suspect = True
        self._passing.forget(me)
        self._alarm.wake()

    def _read_until(self, waiter: Waiter, deadline: float) -> None:
        with selectors.PollSelector() as selector:
            with self.lock:  # the session may have ended since take_over(): no socket, or one of a new login
                if (watched := self._socket) is None or not self._watch.is_on:
                    return
                selector.register(watched, selectors.EVENT_READ)
                selector.register(self._reader_wakeup.reader, selectors.EVENT_READ)
            while not waiter.done() and (left_s := deadline - time.monotonic()) > 0:
                ready = selector.select(min(left_s, LEASE_S / 2))
                with self.lock:
                    if self._socket is not watched:
                        return
                    self._lease.renew(time.monotonic())
                    try:
                        for key, _ in ready:
                            if key.fileobj is self._reader_wakeup.reader:
                                self._reader_wakeup.clear()
                            else:
                                self._read()
                        self.flush()
                        if self.connection.is_leaving:
                            self.wake()  # its deadline may be earlier now
                    except Exception as error:
                        if not isinstance(error, OSError | JetSparkError):
                            _logger.exception(
                                "connection to %s: reading failed; the session ends", self.connection.server
                            )
                        self._guests_error = error  # only the connection's thread ends sessions
                        self._alarm.wake()
                        return
                    events = self._passing.take(threading.get_ident())
                self._pass_on(events)

    def _pass_on(self, events: list[Event]) -> None:
        """Deliver events, without the lock. A guest may wait for one of them in ``select``, so wake it."""
        if events:
            me = threading.get_ident()
            self._passing.pass_on(me, events)
            if self._lease.holder not in (0, me):
                self._reader_wakeup.wake()

    def _watch_socket(self, *, is_ours: bool) -> None:
        """With the lock: set the socket events that the connection's thread waits for."""
        if self._socket is not None:
            interest = (selectors.EVENT_READ if is_ours else 0) | (selectors.EVENT_WRITE if self._unsent else 0)
            if not self._watch.set_interest(self._socket, interest):
                self._alarm.wake()

    # ---- deadlines of attachments ------------------------------------------------------------------------------

    def set_alarm(self, deadline: float) -> None:
        """With the lock: wake the connection's thread by ``deadline``, on behalf of an attachment."""
        if deadline < self._sleeps_until:
            self.wake()

    def sleep_s(self, alarm: float | None, deadline: float | None) -> float | None:
        """Seconds a caller may sleep until its alarm or deadline. The alarm counts, because the connection's thread may
        be busy in ``on_event`` at that time."""
        times = [each for each in (alarm, deadline) if each is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def deadline(self, timeout_s: float) -> float:
        return time.monotonic() + timeout_s

    def give_up_session(self) -> None:
        """End the session, because a call into the connection was interrupted half-way."""
        self.is_suspect = True
        self._alarm.wake()

    # ---- writing: any thread, with the lock held ---------------------------------------------------------------

    def wake(self) -> None:
        """Wake the connection's thread to send, or to end."""
        if not self._is_alarmed:
            self._alarm.wake()
            self._is_alarmed = True

    def flush_soon(self) -> None:
        """Flush now, or shortly, together with the messages that follow."""
        now = time.monotonic()
        if now >= self._gathering.until:
            self._gathering.begin(now, self.connection.out_bytes)
            self.flush()
        elif not self._is_alarmed:
            self.wake()

    def flush(self) -> None:
        """Write as much as the network accepts now; the connection's thread writes the rest."""
        if self._socket is None:
            return
        if self._is_moving or self.is_suspect:
            self._alarm.wake()  # a thread was interrupted; the buffered messages wait for the next session
            return
        self._is_moving = True
        try:
            while True:
                if not self._unsent:
                    self._unsent = memoryview(self.connection.data_to_send())
                    if not self._unsent:
                        break
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except _NOT_NOW:
            self.wake()
        except OSError:
            self.wake()  # the connection's thread gets the same error when it reads, and ends the session
        self._is_moving = False

    flush_promptly = hand_over = flush

    def write_and_wait(self, deadline: float | None = None, is_over: Callable[[], bool] | None = None) -> None:
        """Flush now; wait while the network accepts no more, until ``is_over`` returns True.

        Code that changes the result of ``is_over`` must notify ``room``. The caller's message is not accepted before
        this returns.

        Raises:
            TimeoutError: The network accepted no more until the deadline.
        """
        self.flush()
        while self._unsent and self.connection.is_connected and self.may_wait():
            if is_over is not None and is_over():
                return
            self.wait_for_room(deadline)

    def wait_for_room(self, deadline: float | None = None) -> None:
        """With the lock: wait until the send buffer may have room.

        Raises:
            TimeoutError: No change until the deadline.
        """
        self.room.wait(time_left_s(deadline, time.monotonic()))

    def call_when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Like :meth:`wait_for_room`, but calls ``callback`` on the connection's thread, without the lock."""
        self._room_calls.append(callback)
        self.wake()

    def deliver_events(self) -> None:
        """Deliver the connection's events, without the lock."""
        me = threading.get_ident()
        try:
            with self.lock:
                if self._passing.has_any(me):
                    self._take_back(me)
                events = self._passing.take(threading.get_ident())
            self._pass_on(events)
        finally:
            if self._passing.has_any(me):
                with self.lock:
                    self._take_back(me)

    # ---- the connection's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        error: Exception | None = None
        try:
            is_first = True
            while not self._is_closing:
                try:
                    self._perform_all(
                        establish(self.connection, self._auth, self._tls, is_first=is_first), is_first=is_first
                    )
                except Exception as problem:
                    error = problem
                    break
                is_first = self._is_establishing = False
                lost = self._serve()
                if self._must_close():
                    break
                with self.lock:
                    self.connection.end(describe_error(lost))
                    self._hang_up()
                    self.room.notify_all()
                self._is_establishing = True
                self.deliver_events()
                if not self.connection.options.reconnect:
                    error = ConnectionLost(describe_error(lost))
                    break
        finally:
            self._is_establishing = False
            with self.lock:
                self.connection.close(None if self._is_closing else error)
                self._hang_up()
                self.room.notify_all()
                self._alarm.close()
                self._alarm.close_writer()
                self._reader_wakeup.close_writer()
                if not self._lease.holder:
                    self._reader_wakeup.close()
            self.deliver_events()
            self._opened.set_exception(error or ConnectionLost("closed while connecting"))
            self._has_ended = True
            self._over.set_result(None)

    def _must_close(self) -> bool:
        # A method, because another thread sets the attribute: mypy would narrow it to the value the loop tested.
        return self._is_closing

    def _perform_all(self, steps: Establishing, *, is_first: bool) -> None:
        run_steps(StepRun(steps), self._perform, lock=self.lock)
        with self.lock:
            self.connection.on_time(time.monotonic())
            self.flush()
            self.room.notify_all()
        self.deliver_events()
        if is_first:
            self._opened.set_result(None)

    def _perform(self, step: Step) -> Any:
        self.deliver_events()  # report a failed attempt before the next one
        if self._is_closing:
            raise ConnectionLost("closed while connecting")
        timeout_s = self.connection.options.connect_timeout_s
        match step:
            case Sleep(seconds):
                self._sleep(seconds)
            case Hangup():
                self._hang_up()
            case AskSecret(source):
                return self._credentials.ask(source, timeout_s)
            case Dial(server, tls_name):
                self._is_moving = self.is_suspect = False  # any interrupt happened in an earlier session
                self._guests_error = None
                self._socket = socket.create_connection((server.host, server.port), timeout=timeout_s)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls_name is not None:
                    self._socket = tls_context(self._tls).wrap_socket(self._socket, server_hostname=tls_name)
            case UpgradeToTLS(tls_name):
                assert self._socket is not None
                self._socket = tls_context(self._tls).wrap_socket(self._socket, server_hostname=tls_name)
            case Converse(is_done, what):
                self._converse(is_done, what, timeout_s)
        return None

    def _converse(self, is_done: Callable[[], bool], what: str, timeout_s: float) -> None:
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        with self.lock:
            data = self.connection.data_to_send()
        self._socket.sendall(data)
        while not is_done():
            if self._is_closing:  # the machine is closed, so is_done() never returns True
                raise ConnectionLost("closed while connecting")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RequestTimeout(what, timeout_s)
            self._socket.settimeout(min(left_s, LONGEST_SLEEP_S))
            try:
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                continue
            if not data:
                raise ConnectionLost("the server closed the connection")
            with self.lock:
                self.connection.receive_data(data)
        self._socket.settimeout(timeout_s)

    def _serve(self) -> Exception:
        """Read, write and watch the clock until the session ends; returns why it did."""
        assert self._socket is not None
        with self.lock:
            self._socket.setblocking(False)
        try:
            while not self._is_closing:
                with self.lock:
                    self._lease.lapse(time.monotonic())
                    self._watch.restore()
                    self._watch_socket(is_ours=not self._lease.holder)
                    patience_s = self._patience_s()
                ready = self._watch.select(patience_s)
                with self.lock:
                    self._attend(ready)
                    events = self._passing.take(threading.get_ident())
                self._pass_on(events)
                del events  # keep no messages alive while idle
                self._call_due()
                self._call_room_callbacks()
            return ConnectionLost("closed")
        # Callers may keep the error; its traceback would keep local variables alive.
        except (OSError, JetSparkError) as error:
            return error.with_traceback(None)
        except Exception as error:  # a bug in this library: this thread must survive, and starts a new session
            _logger.exception("connection to %s: serving failed; the session ends", self.connection.server)
            return error.with_traceback(None)
        finally:
            with self.lock:
                self._watch.end()

    def _sleep(self, seconds: float) -> None:
        """Sleep, but end early when the connection is closed."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm.reader, selectors.EVENT_READ)
            while not self._is_closing and (left_s := deadline - time.monotonic()) > 0:
                if selector.select(min(left_s, LONGEST_SLEEP_S)):
                    self._alarm.clear()

    def _attend(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        if self._guests_error is not None:
            raise self._guests_error
        if self._is_moving or self.is_suspect:
            raise ConnectionLost("a thread was interrupted while it used the connection")
        for key, mask in ready:
            if key.fileobj is self._alarm.reader:
                self._alarm.clear()
            elif mask & selectors.EVENT_READ and not self._lease.holder:
                self._read()
        self.connection.on_time(time.monotonic())
        if not ready and not self.connection.out_bytes:
            self._is_alarmed = False  # no message was published recently
        self.flush()
        if not self._unsent:
            self.room.notify_all()

    def _call_due(self) -> None:
        """Without the lock: call ``on_time`` on every attachment whose deadline has passed."""
        now = time.monotonic()
        if now >= self._due_at:  # deadlines set earlier since then have woken this thread, for its next round
            with self.lock:
                due = self.dispatcher.due(now)
            for attached in due:
                self.dispatcher.guard(attached.on_time, now)

    def _call_room_callbacks(self) -> None:
        """Without the lock: call the callbacks that wait for room, once the buffer was written."""
        if self._room_calls and not self._unsent:
            with self.lock:
                calls, self._room_calls = self._room_calls, []
            for call in calls:
                self.dispatcher.guard(call)

    def _patience_s(self) -> float:
        """With the lock: the timeout of ``select``, up to the next deadline."""
        now = time.monotonic()
        deadline = self.dispatcher.next_deadline()
        self._due_at = math.inf if deadline is None else deadline
        patience_s = min(LONGEST_SLEEP_S, max(0.0, self._due_at - now))
        if (deadline := self.connection.next_deadline()) is not None:
            patience_s = min(patience_s, max(0.0, deadline - now))
        if self._is_alarmed and not self._unsent:
            patience_s = min(patience_s, LINGER_S)
        self._sleeps_until = now + patience_s
        return patience_s

    def _read(self) -> None:
        assert self._socket is not None
        if self._is_moving:
            return
        self._is_moving = True
        try:
            count = self._socket.recv_into(self._arrived)
            if not count:
                raise ConnectionLost("the server closed the connection")
            self.connection.receive_data(bytes(self._arrived[:count]))
            # TLS returns one record at a time, and select() does not see decrypted records.
            while isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                self.connection.receive_data(self._socket.recv(READ_BYTES))
        except _NOT_NOW:
            pass
        self._is_moving = False

    def _hang_up(self) -> None:
        opened, self._socket = self._socket, None
        self._unsent = memoryview(b"")
        if opened is not None:
            try:
                opened.shutdown(socket.SHUT_RDWR)  # wakes the thread that may be polling it; close() would not
            except OSError:
                pass  # not connected any more
            opened.close()

    def _abandon_after_fork(self) -> None:
        """In a forked child: its thread does not exist there, and threads that do not exist may hold its locks."""
        self.lock = threading.RLock()
        self.room = Changed(self.lock)
        self._is_closing = self._has_ended = True
        self.connection.disown(UsageError("it belongs to the process that forked this one; connect again here"))
        if self._socket is not None:
            self._socket.close()  # closes this process's copy only; the parent's connection is not affected
            self._socket = None


_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for transport in list(_transports):
        transport._abandon_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
