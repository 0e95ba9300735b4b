"""The blocking driver's engine: one thread a connection, which dials, reads, pings and reconnects.

``lock`` guards the connection, its machines and the socket. The socket never blocks, so the lock is never held for
long, and any thread may write what it has just published. Events and time are passed on without the lock, so that the
threads they wake can take it.

Who waits for the network: the connection's own thread (in ``select``), except while another thread waits for an
answer. That thread then reads by itself (``wait_for``) and the connection's thread looks away: being woken by another
thread costs more than all the rest of a request. One thread at a time reads; the others wait for it.

Interrupts. The main thread may meet a KeyboardInterrupt between any two steps, the connection's thread never does. So
the main thread leaves nothing behind that only it could put right:

* A guest has the reading for ``LEASE_S`` and renews it; a guest that does not hand it back loses it.
* What may be interrupted half-way is marked: ``_is_moving`` (bytes between the connection and the socket),
  ``_interest`` (None while the selector is changed), ``_in_hand`` (events taken and not passed on), ``is_suspect`` (a
  call into the connection). A mark that is found with the lock in hand is that of an interrupted thread. Then the
  connection's thread makes the selector anew, or ends the session and begins another: every part of the client is made
  for that, and ``Disconnected`` tells what is in doubt.
* Nobody sleeps for longer than ``LONGEST_SLEEP_S`` without looking.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import ssl
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

from jetspark.blocking.waiter import LONGEST_SLEEP_S, Changed, Waiter
from jetspark.core.connection import Connection, Event
from jetspark.core.course import Course
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.lifecycle import AskSecret, Converse, Delay, Dial, Hangup, Step, UpgradeToTLS, establish
from jetspark.core.lifecycle import AuthSource as DriverAuth
from jetspark.core.options import TLSConfig
from jetspark.core.tls import describe_error, tls_context
from jetspark.errors import ConnectionLost, JetSparkError, RequestTimeout, UsageError

__all__ = ["WRITE_AT_BYTES", "DriverAuth", "Link"]

# As many bytes make a publisher write by itself instead of leaving it to the connection's thread.
WRITE_AT_BYTES = 64 << 10
READ_BYTES = 256 << 10

# A message that comes alone is written by its publisher at once. Those that follow sooner than GATHER_S gather, and
# leave with the next write or when the connection's thread has seen them wait for LINGER_S. Waking that thread for
# each of them instead makes the two fight for the interpreter, and halved the rate.
GATHER_S = 100e-6
LINGER_S = 1e-3
# Where this much has gathered meanwhile, the next write is put off for twice as long, up to LINGER_S.
MUCH_BYTES = 2 << 10

# For how long a thread that reads in place of the connection's own may be silent.
LEASE_S = 1.0

# How long closing waits for the connection's thread, which may be dialling or in a callback.
ENDING_S = 1.0

_logger = logging.getLogger("jetspark.blocking")

# What a non-blocking socket raises when it would have to wait.
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Call(threading.Thread):
    """A function of the user's that may take its time."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="jetspark-credentials", daemon=True)
        self._function = function
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error


# What a call raises before it has begun: it was asked for something that cannot be done.
_REFUSED = (JetSparkError, TypeError, ValueError, AttributeError, LookupError)


class InterruptGuard:
    """``with link.lock, link.doubt``: when the block is interrupted half-way, the session is given up."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.after(error)

    def after(self, error: BaseException) -> None:
        """The same where a ``with`` for each message costs too much: to be called in ``except BaseException``."""
        if not isinstance(error, _REFUSED):
            self._link.give_up_session()


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
        """Who is told of events, errors and time."""
        self.lock = threading.RLock()
        self.room = Changed(self.lock)
        """Notified when the network may take more, a session has begun, or there is none ever again."""
        self._room_calls: list[Callable[[], None]] = []
        self._socket: socket.socket | None = None
        self._unsent = memoryview(b"")
        # `recv` takes memory for all it might get, which at this size is new memory from the system each time: 150 µs
        # for 200 KB, where copying them out of memory that is there already takes 30.
        self._arrived = memoryview(bytearray(READ_BYTES))
        self._is_closing = False
        self._alarm, self._alarm_button = socket.socketpair()
        self._alarm.setblocking(False)
        self._alarm_button.setblocking(False)
        self._is_alarmed = False
        self._gather_s, self._gather_until = GATHER_S, 0.0
        self._selector: selectors.BaseSelector | None = None
        self._interest: int | None = None
        """What the selector looks for at the socket; None while that is not known."""
        self._guest = 0
        """The thread that reads in place of our own, by its identifier; 0 for none."""
        self._guest_until = 0.0
        self._guests_error: Exception | None = None
        self._in_hand: dict[int, list[list[Event]]] = {}
        """Events a thread has taken and is passing on."""
        self._is_establishing = True
        self._is_moving = False
        self.is_suspect = False
        """A call into the connection was interrupted half-way: the session is given up."""
        self.doubt = InterruptGuard(self)
        self._bell, self._bell_button = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_button.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="jetspark-connection", daemon=True)
        self._opened, self._over = Waiter(), Waiter()
        self._asking: _Call | None = None
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
        self._ring()
        is_ours = self._thread is threading.current_thread()
        # In a forked process it has ended without a word: the thread is not there.
        if not is_ours and not self._is_establishing and not self._has_ended:
            self._over.look(ENDING_S)
        if not self._has_ended:
            # It dials, which cannot be interrupted, or is in a callback: nobody should have to wait for that.
            with self.lock:
                self.connection.close()
                self.room.notify_all()
            self.settle()
            if not is_ours and self._thread.is_alive():
                self._over.look(ENDING_S)
        if self._guest in (0, threading.get_ident()):
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
        return not is_reader and not (me == self._guest and self._is_passing_on(me))

    def _is_passing_on(self, me: int) -> bool:
        """Whether this is called by what we have called; what we have noted may be left from an interrupted call."""
        if me not in self._in_hand:
            return False
        frame = sys._getframe()
        while (caller := frame.f_back) is not None:
            frame = caller
            if frame.f_code is Link._pass_on.__code__ and frame.f_locals["self"] is self:
                return True
        return False

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
            now = time.monotonic()
            if me in self._in_hand:
                self._take_back(me)
            if self._selector is None or (self._guest not in (0, me) and now < self._guest_until):
                return False
            self._guest_until = now + LEASE_S
            self._guest = me
            self._watch_socket(is_ours=False)
            return True

    def _hand_back(self) -> None:
        """Let the connection's thread read again, if this one does. To be called twice: see the module's theory."""
        me = threading.get_ident()
        if self._guest != me:
            return
        with self.lock:
            if me in self._in_hand:
                self._take_back(me)
            self._watch_socket(is_ours=True)
            if self._is_moving or self.is_suspect:
                self._ring()
            if self._bell_button.fileno() < 0:
                self._bell.close()  # the connection ended while we were looking at it
            self._guest = 0  # the last step: what was interrupted before it is done again

    def _take_back(self, me: int) -> None:
        """With the lock: have events that this thread took, and could not pass on, passed on by the connection's."""
        if me not in self._in_hand or self._is_passing_on(me):
            return
        for events in reversed(self._in_hand[me]):
            self.connection.put_back(events)
        self.is_suspect = True
        self._in_hand.pop(me, None)
        self._ring()

    def _read_until(self, waiter: Waiter, deadline: float) -> None:
        watched = self._socket
        if watched is None:
            return
        with selectors.PollSelector() as selector:
            selector.register(watched, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            while not waiter.done() and (left_s := deadline - time.monotonic()) > 0:
                ready = selector.select(min(left_s, LEASE_S / 2))
                with self.lock:
                    if self._socket is not watched:
                        return
                    self._guest_until = time.monotonic() + LEASE_S
                    try:
                        for key, _ in ready:
                            if key.fileobj is self._bell:
                                self._bell.recv(4096)
                            else:
                                self._read()
                        self.flush()
                        if self.connection.is_leaving:
                            self.wake()  # its deadline may have come nearer
                    except Exception as error:
                        if not isinstance(error, OSError | JetSparkError):
                            _logger.exception("reading what the server sent failed; the session ends")
                        self._guests_error = error  # sessions are ended by the connection's thread
                        self._ring()
                        return
                    events = self._take_events()
                self._pass_on(events)

    def _take_events(self) -> list[Event]:
        """With the lock: what happened, for this thread to pass on."""
        events = self.connection.events()
        if events:
            self._in_hand.setdefault(threading.get_ident(), []).append(events)
        return events

    def _pass_on(self, events: list[Event]) -> None:
        """Without the lock. What a guest waits for may be among them, and the guest is looking at the socket."""
        if not events:
            return
        self.dispatcher.deliver(events)
        me = threading.get_ident()
        if me in self._in_hand:
            self._in_hand[me].pop()
            if not self._in_hand[me]:
                del self._in_hand[me]
        if self._guest not in (0, me):
            try:
                self._bell_button.send(b"!")
            except OSError:
                pass  # full means that it will look anyway; closed means that nobody waits

    def _watch_socket(self, *, is_ours: bool) -> None:
        """With the lock: have ``select`` look at the socket for what the connection's thread is to do with it now.

        Another thread may call this while that one is in ``select``, which then looks at what it is told here.
        """
        selector, before = self._selector, self._interest
        if selector is None or self._socket is None:
            return
        interest = (selectors.EVENT_READ if is_ours else 0) | (selectors.EVENT_WRITE if self._unsent else 0)
        if interest == before:
            return
        self._interest = None
        if before is None:  # somebody was interrupted here
            self._ring()
            return
        if not interest:
            selector.unregister(self._socket)
        elif not before:
            selector.register(self._socket, interest)
        else:
            selector.modify(self._socket, interest)
        self._interest = interest

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
        self._ring()

    # ---- writing: any thread, with the lock held ---------------------------------------------------------------

    def wake(self) -> None:
        """Have the connection's thread look: there is something to send, or to end."""
        if not self._is_alarmed:
            self._ring()
            self._is_alarmed = True

    def _ring(self) -> None:
        try:
            self._alarm_button.send(b"!")
        except OSError:
            pass  # full means that it will look anyway; closed means that it is gone

    def flush_soon(self) -> None:
        """Write now, or shortly together with what follows."""
        now = time.monotonic()
        if now >= self._gather_until:
            has_much = self.connection.out_bytes >= MUCH_BYTES
            self._gather_s = min(2 * self._gather_s, LINGER_S) if has_much else GATHER_S
            self._gather_until = now + self._gather_s
            self.flush()
        elif not self._is_alarmed:
            self.wake()

    def flush(self) -> None:
        """Write as much as the network takes now; the connection's thread sees to the rest."""
        if self._socket is None:
            return
        if self._is_moving or self.is_suspect:
            self._ring()  # a thread was interrupted in here or elsewhere: what is here waits for the next session
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
            self.wake()  # the reader will meet the same error, and it is the one who ends sessions
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
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        self.room.wait(left_s)

    def call_when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Like :meth:`wait_for_room`, with a callback on the connection's thread, without the lock."""
        self._room_calls.append(callback)
        self.wake()

    def settle(self) -> None:
        """Pass on what happened. Without the lock."""
        me = threading.get_ident()
        try:
            with self.lock:
                if me in self._in_hand:
                    self._take_back(me)
                events = self._take_events()
            self._pass_on(events)
        finally:
            if me in self._in_hand:
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
                self.settle()
                if not self.connection.options.reconnect:
                    error = ConnectionLost(describe_error(lost))
                    break
        finally:
            self._is_establishing = False
            with self.lock:
                self.connection.close(None if self._is_closing else error)
                self._hang_up()
                self.room.notify_all()
                for end in (self._alarm, self._alarm_button, self._bell_button):
                    end.close()
                if not self._guest:
                    self._bell.close()
            self.settle()
            self._opened.set_exception(error or ConnectionLost("closed while connecting"))
            self._has_ended = True
            self._over.set_result(None)

    def _must_close(self) -> bool:
        # A method, because another thread sets it: mypy takes what the loop above saw for what is still so.
        return self._is_closing

    def _perform_all(self, steps: Generator[Step, Any, None], *, is_first: bool) -> None:
        course = Course(steps)
        while True:
            with self.lock:
                step = course.next_step()
            if step is None:
                break
            self.settle()  # an attempt that failed is told before the next
            if self._is_closing:
                raise ConnectionLost("closed while connecting")
            try:
                course.answer = self._perform(step)
            except Exception as error:  # establish() decides which errors end an attempt and which end it all
                course.problem = error
        with self.lock:
            self.connection.on_time(time.monotonic())
            self.flush()
            self.room.notify_all()
        self.settle()
        if is_first:
            self._opened.set_result(None)

    def _perform(self, step: Step) -> Any:
        timeout_s = self.connection.options.connect_timeout_s
        match step:
            case Delay(seconds):
                self._sleep(seconds)
            case Hangup():
                self._hang_up()
            case AskSecret(source):
                return self._ask(source, timeout_s)
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

    def _ask(self, source: Callable[[], Any], timeout_s: float) -> Any:
        """Call the user's function on a thread of its own: one that hangs must not keep us from trying again.

        While it hangs it is not called again, so that there is never more than one such thread.
        """
        if self._asking is None or not self._asking.is_alive():
            self._asking = _Call(source)
            self._asking.start()
        asking = self._asking
        asking.join(timeout_s)
        if asking.is_alive():
            raise RequestTimeout("the function that gives the credentials", timeout_s)
        self._asking = None
        if asking.error is not None:
            raise asking.error
        return asking.result

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
                    if self._guest and time.monotonic() >= self._guest_until:
                        self._guest = 0
                    if self._interest is None:
                        self._make_selector()
                    self._watch_socket(is_ours=not self._guest)
                    selector, patience_s = self._selector, self._patience_s()
                    assert selector is not None
                ready = selector.select(patience_s)
                with self.lock:
                    self._attend(ready)
                    events = self._take_events()
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
                self._end_selector()

    def _make_selector(self) -> None:
        self._end_selector()
        selector = selectors.DefaultSelector()
        selector.register(self._alarm, selectors.EVENT_READ)
        self._selector, self._interest = selector, 0

    def _end_selector(self) -> None:
        selector, self._selector = self._selector, None
        self._interest = None
        if selector is not None:
            selector.close()

    def _sleep(self, seconds: float) -> None:
        """Unless the connection is closed before."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            while not self._is_closing and (left_s := deadline - time.monotonic()) > 0:
                if selector.select(min(left_s, LONGEST_SLEEP_S)):
                    self._alarm.recv(4096)

    def _attend(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        if self._guests_error is not None:
            raise self._guests_error
        if self._is_moving or self.is_suspect:
            raise ConnectionLost("a thread was interrupted while it used the connection")
        for key, mask in ready:
            if key.fileobj is self._alarm:
                self._alarm.recv(4096)
            elif mask & selectors.EVENT_READ and not self._guest:
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
