"""The blocking driver's engine: one thread a connection, which dials, reads, pings and reconnects.

``lock`` guards the connection, its machines and the socket. The socket never blocks, so the lock is never held for
long, and any thread may write what it has just published. Events and time are passed on without the lock, so that the
threads they wake can take it.

Who waits for the network: the connection's own thread (in ``select``), except while another thread waits for an
answer. That thread then reads by itself (``wait_for``) and the connection's thread looks away: being woken by another
thread costs more than all the rest of a request. One thread at a time reads; the others wait for it.

Interrupts. The main thread may meet a KeyboardInterrupt between any two steps, the connection's thread never does. So
the main thread leaves nothing behind that only it could put right:

* A guest has a :class:`ReadingLease` of the reading and renews it; a guest that does not hand it back loses it.
* What may be interrupted half-way is marked: ``_is_moving`` (bytes between the connection and the socket),
  ``is_suspect`` (a call into the connection), and in its parts (:class:`SocketWatch`, :class:`Passing`). A mark that is
  found with the lock in hand is that of an interrupted thread. Then the connection's thread makes the selector anew, or
  ends the session and begins another: every part of the client is made for that, and ``Disconnected`` tells what is in
  doubt.
* Nobody sleeps for longer than ``LONGEST_SLEEP_S`` without looking.
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

from jetspark.blocking.bell import Bell
from jetspark.blocking.credentials import SecretAsking
from jetspark.blocking.step_runner import run_steps
from jetspark.blocking.waiter import LONGEST_SLEEP_S, Changed, Waiter
from jetspark.blocking.watching import SocketWatch
from jetspark.core.connection import Connection, Event
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.lifecycle import AskSecret, Converse, Dial, Establishing, Hangup, Step, UpgradeToTLS, establish
from jetspark.core.lifecycle import AuthSource as DriverAuth
from jetspark.core.link import READ_BYTES, InterruptGuard, time_left_s
from jetspark.core.link_sharing import LEASE_S, LINGER_S, Gathering, Passing, ReadingLease
from jetspark.core.options import TLSConfig
from jetspark.core.step_runner import Sleep, StepRun
from jetspark.core.tls import describe_error, tls_context
from jetspark.errors import ConnectionLost, JetSparkError, RequestTimeout, UsageError

__all__ = ["DriverAuth", "Link"]

# How long closing waits for the connection's thread, which may be dialling or in a callback.
ENDING_S = 1.0

_logger = logging.getLogger("jetspark.blocking")

# What a non-blocking socket raises when it would have to wait.
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Link:
    """Keeps one :class:`Connection` connected, and moves bytes between it and the network.

    It is also where machines and readers meet the threads: it passes on what happened (:meth:`settle`), tells what is
    attached of events and of time, and waits for room. The asyncio driver's has the same methods.
    """

    now = staticmethod(time.monotonic)
    new_waiter = Waiter
    flush_is_scheduled = False
    """Never for sure: :meth:`flush_soon` is called each time, and decides."""
    idle_s = 0.0
    """Of loops whose time is not ours."""

    def __init__(self, connection: Connection, auth: DriverAuth, tls: TLSConfig | None, dispatcher: Dispatcher) -> None:
        self.connection, self._auth, self._tls = connection, auth, tls
        self.dispatcher = dispatcher
        self.lock = threading.RLock()
        self.room = Changed(self.lock)
        self._room_calls: list[Callable[[], None]] = []
        self._socket: socket.socket | None = None
        self._unsent = memoryview(b"")
        # `recv` takes memory for all it might get, which at this size is new memory from the system each time: 150 µs
        # for 200 KB, where copying them out of memory that is there already takes 30.
        self._arrived = memoryview(bytearray(READ_BYTES))
        self._is_closing = False
        self._alarm, self._is_alarmed = Bell(), False
        self._gathering = Gathering()
        self._watch = SocketWatch(self._alarm.ear)
        self._lease, self._bell = ReadingLease(), Bell()
        """Of the thread that reads in place of our own, and how it is told to look up."""
        self._guests_error: Exception | None = None
        self._passing = Passing(connection, dispatcher)
        self._is_establishing = True
        self._is_moving = False
        self.is_suspect = False
        """A call into the connection was interrupted half-way: the session is given up."""
        self.doubt = InterruptGuard(self.give_up_session)
        self._thread = threading.Thread(target=self._run, name="jetspark-connection", daemon=True)
        self._opened, self._over = Waiter(), Waiter()
        self._credentials = SecretAsking()
        self._has_ended = False
        self._due_at = math.inf
        """The nearest deadline of what is attached, when the connection's thread last looked."""
        self._sleeps_until = 0.0
        """Until when the connection's thread sleeps, if nothing happens; an earlier alarm has to wake it."""
        _links.add(self)

    def open(self) -> None:
        self._thread.start()
        # Every step of the attempts is bounded; this wait has no bound of its own to disagree with theirs.
        self._opened.wait(threading.TIMEOUT_MAX)

    @property
    def is_over(self) -> bool:
        """The connection is closed, and its thread has nothing left to do."""
        return self._has_ended

    def close(self) -> None:
        """Drop the transport and end every wait. What is buffered is lost: flush first."""
        self._is_closing = True
        self._let_go()
        self._alarm.ring()
        is_ours = self._thread is threading.current_thread()
        # In a forked process it has ended without a word: the thread is not there.
        if not is_ours and not self._is_establishing and not self._has_ended:
            self._over.look(ENDING_S)
        if not self._has_ended:
            # It dials, which cannot be interrupted, or is in a callback: nobody should have to wait for that.
            with self.lock:
                self.connection.close()
                self.room.notify_all()
            self.deliver_events()
            if not is_ours and self._thread.is_alive():
                self._over.look(ENDING_S)
        if self._lease.holder in (0, threading.get_ident()):
            self._bell.close()

    def check_caller(self) -> None:
        """Any thread may use the link, in the process that made it; a loop of the asyncio driver's may not."""

    def check_may_wait(self, what: str) -> None:
        """Refuse to wait on the thread that reads for what only reading can bring.

        Raises:
            UsageError: This is that thread.
        """
        if not self.may_wait():
            raise UsageError(
                f"{what} would wait for ever: on_event runs on the thread that reads; use a thread of your own"
            )

    def may_wait(self) -> bool:
        """Whether this is not the thread that reads, in ``on_event``."""
        me = threading.get_ident()
        # The system gives the number of a thread that has ended to another one.
        is_reader = me == self._thread.ident and self._thread.is_alive()
        return not is_reader and not (me == self._lease.holder and self._passing.is_under_way(me))

    def wait_for(self, waiter: Waiter, timeout_s: float, what: str, deadline: float | None = None) -> Any:
        """The result of an operation; brings it in by itself when no other thread is at it.

        ``deadline`` is for an operation that began earlier.

        Raises:
            RequestTimeout: It was not there in time.
        """
        if deadline is None:
            deadline = time.monotonic() + timeout_s
        self.read_for(waiter, deadline)
        try:
            return waiter.wait(deadline - time.monotonic())
        except TimeoutError:
            raise RequestTimeout(what, timeout_s) from None

    def read_for(self, waiter: Waiter, deadline: float, *, is_reading: bool | None = None) -> None:
        """Read in place of the connection's thread until the waiter is told, unless another thread does.

        ``is_reading`` is what :meth:`take_over` said to a caller that had to know before it began to wait.
        """
        self._let_go()
        try:
            if self.take_over() if is_reading is None else is_reading:
                self._read_until(waiter, deadline)
        finally:
            try:
                self._hand_back()
            finally:
                self._hand_back()  # an interrupt can have been in the way of the first

    def _let_go(self) -> None:
        """Before a thread waits for others: have it hold no lock that an interrupted call of its own has left it."""
        while self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock.release()

    def take_over(self) -> bool:
        """Whether the caller reads from here on; then it has to call :meth:`read_for`, which hands back."""
        me = threading.get_ident()
        with self.lock:
            if self._passing.has_any(me):
                self._take_back(me)
            if not self._watch.is_on or not self._lease.take(me, time.monotonic()):
                return False
            self._watch_socket(is_ours=False)
            return True

    def _hand_back(self) -> None:
        """Let the connection's thread read again, if this one does. To be called twice: see the module's theory."""
        me = threading.get_ident()
        if self._lease.holder != me:
            return
        with self.lock:
            if self._passing.has_any(me):
                self._take_back(me)
            self._watch_socket(is_ours=True)
            if self._is_moving or self.is_suspect:
                self._alarm.ring()
            if self._bell.is_cut_off:
                self._bell.close()  # the connection ended while we were looking at it
            self._lease.end()  # the last step: what was interrupted before it is done again

    def _take_back(self, me: int) -> None:
        """With the lock: have events that this thread took, and could not pass on, passed on by the connection's."""
        if not self._passing.has_any(me) or self._passing.is_under_way(me):
            return
        self._passing.put_back(me)
        self.is_suspect = True
        self._passing.forget(me)
        self._alarm.ring()

    def _read_until(self, waiter: Waiter, deadline: float) -> None:
        with selectors.PollSelector() as selector:
            with self.lock:  # since we took over, the session can have ended: no socket, or one that is logging in
                if (watched := self._socket) is None or not self._watch.is_on:
                    return
                selector.register(watched, selectors.EVENT_READ)
                selector.register(self._bell.ear, selectors.EVENT_READ)
            while not waiter.done() and (left_s := deadline - time.monotonic()) > 0:
                ready = selector.select(min(left_s, LEASE_S / 2))
                with self.lock:
                    if self._socket is not watched:
                        return
                    self._lease.renew(time.monotonic())
                    try:
                        for key, _ in ready:
                            if key.fileobj is self._bell.ear:
                                self._bell.hear()
                            else:
                                self._read()
                        self.flush()
                        if self.connection.is_leaving:
                            self.wake()  # its deadline may have come nearer
                    except Exception as error:
                        if not isinstance(error, OSError | JetSparkError):
                            _logger.exception("reading what the server sent failed; the session ends")
                        self._guests_error = error  # sessions are ended by the connection's thread
                        self._alarm.ring()
                        return
                    events = self._passing.take(threading.get_ident())
                self._pass_on(events)

    def _pass_on(self, events: list[Event]) -> None:
        """Without the lock. What a guest waits for may be among them, and the guest is looking at the socket."""
        if events:
            me = threading.get_ident()
            self._passing.pass_on(me, events)
            if self._lease.holder not in (0, me):
                self._bell.ring()

    def _watch_socket(self, *, is_ours: bool) -> None:
        """With the lock: have ``select`` look at the socket for what the connection's thread is to do with it now."""
        if self._socket is not None:
            interest = (selectors.EVENT_READ if is_ours else 0) | (selectors.EVENT_WRITE if self._unsent else 0)
            if not self._watch.look_for(self._socket, interest):
                self._alarm.ring()

    # ---- the time of what is attached --------------------------------------------------------------------------

    def set_alarm(self, deadline: float) -> None:
        """With the lock: look at the clock then; something attached has this deadline."""
        if deadline < self._sleeps_until:
            self.wake()

    def sleep_s(self, alarm: float | None, deadline: float | None) -> float | None:
        """How long one may sleep who has set an alarm, and has a deadline besides: the connection's thread may be busy
        with the program's ``on_event`` when the alarm rings."""
        times = [each for each in (alarm, deadline) if each is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def deadline(self, timeout_s: float) -> float:
        return time.monotonic() + timeout_s

    def give_up_session(self) -> None:
        """A call into the connection was interrupted half-way: only a new session is sound."""
        self.is_suspect = True
        self._alarm.ring()

    # ---- writing: any thread, with the lock held ---------------------------------------------------------------

    def wake(self) -> None:
        """Have the connection's thread look: there is something to send, or to end."""
        if not self._is_alarmed:
            self._alarm.ring()
            self._is_alarmed = True

    def flush_soon(self) -> None:
        """Write now, or shortly together with what follows."""
        now = time.monotonic()
        if now >= self._gathering.until:
            self._gathering.begin(now, self.connection.out_bytes)
            self.flush()
        elif not self._is_alarmed:
            self.wake()

    def flush(self) -> None:
        """Write as much as the network takes now; the connection's thread sees to the rest."""
        if self._socket is None:
            return
        if self._is_moving or self.is_suspect:
            self._alarm.ring()  # a thread was interrupted in here or elsewhere: what is here waits for the next session
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
            self.wake()  # the reader meets the same error when it reads, and ends the session
        self._is_moving = False

    flush_promptly = hand_over = flush

    def write_and_wait(self, deadline: float | None = None, is_over: Callable[[], bool] | None = None) -> None:
        """Write now; wait while the network takes no more, unless it ``is_over`` for the caller.

        The thread that makes it so notifies ``room``. Nothing of the caller's is accepted before this returns.

        Raises:
            TimeoutError: It took no more until the deadline.
        """
        self.flush()
        while self._unsent and self.connection.is_connected and self.may_wait():
            if is_over is not None and is_over():
                return
            self.wait_for_room(deadline)

    def wait_for_room(self, deadline: float | None = None) -> None:
        """With the lock: until something has changed, and there may be room.

        Raises:
            TimeoutError: Nothing has changed until the deadline.
        """
        self.room.wait(time_left_s(deadline, time.monotonic()))

    def call_when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Like :meth:`wait_for_room`, with a callback on the connection's thread, without the lock."""
        self._room_calls.append(callback)
        self.wake()

    def deliver_events(self) -> None:
        """Pass on what happened. Without the lock."""
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
                self._alarm.cut_off()
                self._bell.cut_off()
                if not self._lease.holder:
                    self._bell.close()
            self.deliver_events()
            self._opened.set_exception(error or ConnectionLost("closed while connecting"))
            self._has_ended = True
            self._over.set_result(None)

    def _must_close(self) -> bool:
        # A method, because another thread sets it: mypy takes what the loop above saw for what is still so.
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
        self.deliver_events()  # an attempt that failed is reported before the next
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
                self._is_moving = self.is_suspect = False  # whatever was interrupted, it was not with this session
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
            if self._is_closing:  # then the machine is closed, and never done
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
                    self._watch.mend()
                    self._watch_socket(is_ours=not self._lease.holder)
                    patience_s = self._patience_s()
                ready = self._watch.select(patience_s)
                with self.lock:
                    self._attend(ready)
                    events = self._passing.take(threading.get_ident())
                self._pass_on(events)
                del events  # while there is nothing to do, nothing that was read is kept alive
                self._tell_time()
                self._tell_room()
            return ConnectionLost("closed")
        # Many may keep the error for long; its traceback would keep what was in hand.
        except (OSError, JetSparkError) as error:
            return error.with_traceback(None)
        except Exception as error:  # a mistake of ours: this thread is everybody's, and goes on with a new session
            _logger.exception("serving the connection failed; the session ends")
            return error.with_traceback(None)
        finally:
            with self.lock:
                self._watch.end()

    def _sleep(self, seconds: float) -> None:
        """Unless the connection is closed before."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm.ear, selectors.EVENT_READ)
            while not self._is_closing and (left_s := deadline - time.monotonic()) > 0:
                if selector.select(min(left_s, LONGEST_SLEEP_S)):
                    self._alarm.hear()

    def _attend(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        if self._guests_error is not None:
            raise self._guests_error
        if self._is_moving or self.is_suspect:
            raise ConnectionLost("a thread was interrupted while it used the connection")
        for key, mask in ready:
            if key.fileobj is self._alarm.ear:
                self._alarm.hear()
            elif mask & selectors.EVENT_READ and not self._lease.holder:
                self._read()
        self.connection.on_time(time.monotonic())
        if not ready and not self.connection.out_bytes:
            self._is_alarmed = False  # nobody has published for a while
        self.flush()
        if not self._unsent:
            self.room.notify_all()

    def _tell_time(self) -> None:
        """Without the lock: call what is attached and due."""
        now = time.monotonic()
        if now >= self._due_at:  # of the last look; what has come nearer since then has rung, and is seen by the next
            with self.lock:
                due = self.dispatcher.due(now)
            for attached in due:
                self.dispatcher.guard(attached.on_time, now)

    def _tell_room(self) -> None:
        """Without the lock: call back when the network has taken all there was."""
        if self._room_calls and not self._unsent:
            with self.lock:
                calls, self._room_calls = self._room_calls, []
            for call in calls:
                self.dispatcher.guard(call)

    def _patience_s(self) -> float:
        """With the lock: how long there may be nothing to do."""
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
            # TLS hands out one record at a time, and select cannot see those already decrypted.
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
        """In the child: the thread is not here, and the locks may be held by threads that are not here either."""
        self.lock = threading.RLock()
        self.room = Changed(self.lock)
        self._is_closing = self._has_ended = True
        self.connection.disown(UsageError("it belongs to the process that forked this one; connect again here"))
        if self._socket is not None:
            self._socket.close()  # this process's copy only; the parent's connection does not notice
            self._socket = None


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link._abandon_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
