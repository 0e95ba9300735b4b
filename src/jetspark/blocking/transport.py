"""The blocking driver's engine: one thread a connection, which dials, reads, pings and reconnects.

``lock`` guards the machine and the socket. The socket never blocks, so the lock is never held for long, and any
thread may write what it has just published. Events are passed on without the lock, so that whoever they wake can
take it.

Who waits for the network: the connection's own thread (in ``select``), except while another thread waits for an
answer. That thread then reads by itself (``wait_for``) and the connection's thread looks away: being woken by another
thread costs more than all the rest of a request. One thread at a time reads; the others wait for it.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, Protocol

from jetspark.blocking.waiter import Waiter
from jetspark.core.connection import Connection, Event
from jetspark.core.lifecycle import AskSecret, AuthSource, Converse, Dial, Hangup, Pause, Step, UpgradeToTLS, establish
from jetspark.core.options import TLSConfig
from jetspark.core.tls import describe_error, tls_context
from jetspark.errors import ConnectionLost, JetSparkError, RequestTimeout, UsageError

__all__ = ["Clock", "Link"]

# As many bytes make a publisher write by itself instead of leaving it to the connection's thread.
WRITE_AT_BYTES = 64 << 10
READ_BYTES = 256 << 10

# A message that comes alone is written by its publisher at once. Those that follow sooner than GATHER_S gather, and
# leave with the next write or when the connection's thread has seen them wait for LINGER_S. Waking that thread for
# each of them instead makes the two fight for the interpreter, and halved the rate.
GATHER_S = 100e-6
LINGER_S = 1e-3

# What a non-blocking socket raises when it would have to wait.
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Clock(Protocol):
    """Something that ages."""

    def _next_deadline(self) -> float | None: ...
    def _on_clock(self, now: float) -> None: ...


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


class Link:
    """Keeps one :class:`Connection` connected, and moves bytes between it and the network."""

    def __init__(
        self,
        machine: Connection,
        auth: AuthSource,
        tls: TLSConfig | None,
        on_events: Callable[[list[Event]], None],
    ) -> None:
        self._machine, self._auth, self._tls = machine, auth, tls
        self._on_events = on_events
        self.lock = threading.RLock()
        self.room = threading.Condition(self.lock)
        self._socket: socket.socket | None = None
        self._unsent = memoryview(b"")
        # `recv` takes memory for all it might get, which at this size is new memory from the system each time: 150 µs
        # for 200 KB, where copying them out of memory that is there already takes 30.
        self._arrived = memoryview(bytearray(READ_BYTES))
        self._closing = threading.Event()
        self._alarm, self._alarm_button = socket.socketpair()
        self._alarm.setblocking(False)
        self._alarm_button.setblocking(False)
        self._is_alarmed = False
        self._gather_until = 0.0
        self._selector: selectors.BaseSelector | None = None
        self._interest = 0
        self._guest: threading.Thread | None = None
        """The thread that reads in place of our own."""
        self._guests_error: Exception | None = None
        self._bell, self._bell_button = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_button.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="jetspark-connection", daemon=True)
        self._opened = Waiter()
        self._asking: _Call | None = None
        self._clocks: list[Clock] = []
        _links.add(self)

    def open(self) -> None:
        self._thread.start()
        # Every step of the attempts is bounded; this wait has no bound of its own to disagree with theirs.
        try:
            self._opened.wait(threading.TIMEOUT_MAX)
        except BaseException:
            self.close()
            raise

    def close(self, error: Exception | None = None) -> None:
        """Drop the transport and end every wait. What is buffered is lost: flush first."""
        self._closing.set()
        with self.lock:
            self._machine.close(error)
            self.room.notify_all()
            self.wake()
        self.settle()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            # Dialling cannot be interrupted, and is bounded; nobody should have to wait for that.
            self._thread.join(timeout=1.0)

    def check_may_wait(self, what: str) -> None:
        """Refuse to wait on the thread that reads for what only reading can bring."""
        if threading.current_thread() in (self._thread, self._guest):
            raise UsageError(
                f"{what} would wait for ever: on_event runs on the thread that reads; use a thread of your own"
            )

    def wait_for(self, waiter: Waiter, timeout_s: float, what: str) -> Any:
        """The result of an operation; brings it in by itself when no other thread is at it.

        Raises:
            RequestTimeout: It was not there in time.
        """
        deadline = time.monotonic() + timeout_s
        if self._take_over():
            try:
                self._read_until(waiter, deadline)
            finally:
                self._hand_back()
        try:
            return waiter.wait(deadline - time.monotonic())
        except TimeoutError:
            raise RequestTimeout(what, timeout_s) from None

    def _take_over(self) -> bool:
        with self.lock:
            if self._selector is None or self._guest is not None:
                return False
            self._guest = threading.current_thread()
            self._watch_socket()
            return True

    def _hand_back(self) -> None:
        with self.lock:
            self._guest = None
            self._watch_socket()
            if self._bell_button.fileno() < 0:
                self._bell.close()  # the connection ended while we were looking at it

    def _read_until(self, waiter: Waiter, deadline: float) -> None:
        watched = self._socket
        if watched is None:
            return
        with selectors.PollSelector() as selector:
            selector.register(watched, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            while not waiter.done() and (left_s := deadline - time.monotonic()) > 0:
                ready = selector.select(left_s)
                with self.lock:
                    if self._socket is not watched:
                        return
                    try:
                        for key, _ in ready:
                            if key.fileobj is self._bell:
                                self._bell.recv(4096)
                            else:
                                self._read()
                        self.flush()
                        if self._machine.is_leaving:
                            self.wake()  # its deadline may have come nearer
                    except (OSError, JetSparkError) as error:
                        self._guests_error = error  # sessions are ended by the connection's thread
                        self.wake()
                        return
                    events = self._machine.events()
                self._pass_on(events)

    def _pass_on(self, events: list[Event]) -> None:
        """Without the lock. What a guest waits for may be among them, and the guest is looking at the socket."""
        if not events:
            return
        self._on_events(events)
        if self._guest is not None and self._guest is not threading.current_thread():
            try:
                self._bell_button.send(b"!")
            except OSError:
                pass  # full means that it will look anyway; closed means that nobody waits

    def _watch_socket(self) -> None:
        """With the lock: have ``select`` look at the socket for what the connection's thread is to do with it now.

        Another thread may call this while that one is in ``select``, which then looks at what it is told here.
        """
        if self._selector is None or self._socket is None:
            return
        interest = (0 if self._guest else selectors.EVENT_READ) | (selectors.EVENT_WRITE if self._unsent else 0)
        if interest == self._interest:
            return
        if not interest:
            self._selector.unregister(self._socket)
        elif not self._interest:
            self._selector.register(self._socket, interest)
        else:
            self._selector.modify(self._socket, interest)
        self._interest = interest

    # ---- what ages beside the connection; with the lock held ---------------------------------------------------

    def watch(self, clock: Clock) -> None:
        """Have the connection's thread call ``_on_clock``, with the lock, whenever its time has come.

        Call it again when the time has come nearer.
        """
        if clock not in self._clocks:
            self._clocks.append(clock)
        self.wake()

    def unwatch(self, clock: Clock) -> None:
        if clock in self._clocks:
            self._clocks.remove(clock)

    # ---- writing: any thread, with the lock held ---------------------------------------------------------------

    def wake(self) -> None:
        """Have the connection's thread look: there is something to send, or to end."""
        if not self._is_alarmed:
            self._is_alarmed = True
            try:
                self._alarm_button.send(b"!")
            except OSError:
                pass  # full means that it will look anyway; closed means that it is gone

    def flush_soon(self) -> None:
        """Write now, or shortly together with what follows."""
        now = time.monotonic()
        if now >= self._gather_until:
            self._gather_until = now + GATHER_S
            self.flush()
        elif not self._is_alarmed:
            self.wake()

    def flush(self) -> None:
        """Write as much as the network takes now; the connection's thread sees to the rest."""
        if self._socket is None:
            return
        try:
            while True:
                if not self._unsent:
                    self._unsent = memoryview(self._machine.data_to_send())
                    if not self._unsent:
                        return
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except _NOT_NOW:
            self.wake()
        except OSError:
            self.wake()  # the reader will meet the same error, and it is the one who ends sessions

    def make_room(self) -> None:
        """Write now; wait while the network takes no more. Nothing of the caller's is accepted before this returns."""
        self.flush()
        while self._unsent and self._machine.is_connected:
            self.room.wait()

    def settle(self) -> None:
        """Pass on what happened. Without the lock."""
        with self.lock:
            events = self._machine.events()
        self._pass_on(events)

    # ---- the connection's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        error: Exception | None = None
        try:
            is_first = True
            while not self._closing.is_set():
                try:
                    self._perform_all(
                        establish(self._machine, self._auth, self._tls, is_first=is_first), is_first=is_first
                    )
                except Exception as problem:
                    error = problem
                    break
                is_first = False
                lost = self._serve()
                if self._closing.is_set():
                    break
                with self.lock:
                    self._machine.end(describe_error(lost))
                    self._hang_up()
                    self.room.notify_all()
                self.settle()
                if not self._machine.options.reconnect:
                    error = ConnectionLost(describe_error(lost))
                    break
        finally:
            with self.lock:
                self._machine.close(None if self._closing.is_set() else error)
                self._hang_up()
                self.room.notify_all()
                for end in (self._alarm, self._alarm_button, self._bell_button):
                    end.close()
                if self._guest is None:
                    self._bell.close()
            self.settle()
            self._opened.set_exception(error or ConnectionLost("closed while connecting"))

    def _perform_all(self, steps: Generator[Step, Any, None], *, is_first: bool) -> None:
        answer: Any = None
        problem: Exception | None = None
        try:
            while True:
                with self.lock:
                    step = steps.send(answer) if problem is None else steps.throw(problem)
                answer = problem = None
                self.settle()  # an attempt that failed is told before the next
                if self._closing.is_set():
                    raise ConnectionLost("closed while connecting")
                try:
                    answer = self._perform(step)
                except Exception as error:  # establish() decides which errors end an attempt and which end it all
                    problem = error
        except StopIteration:
            pass
        with self.lock:
            self._machine.on_time(time.monotonic())
            self.flush()
            self.room.notify_all()
        self.settle()
        if is_first:
            self._opened.set_result(None)

    def _perform(self, step: Step) -> Any:
        timeout_s = self._machine.options.connect_timeout_s
        match step:
            case Pause(seconds):
                self._closing.wait(seconds)
            case Hangup():
                self._hang_up()
            case AskSecret(source):
                return self._ask(source, timeout_s)
            case Dial(server, tls_name):
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
            data = self._machine.data_to_send()
        self._socket.sendall(data)
        while not is_done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RequestTimeout(what, timeout_s)
            self._socket.settimeout(left_s)
            try:
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                raise RequestTimeout(what, timeout_s) from None
            if not data:
                raise ConnectionLost("the server closed the connection")
            with self.lock:
                self._machine.receive_data(data)
        self._socket.settimeout(timeout_s)

    def _serve(self) -> Exception:
        """Read, write and watch the clock until the session ends; returns why it did."""
        assert self._socket is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            with self.lock:
                self._socket.setblocking(False)
                self._guests_error = None
                self._selector, self._interest = selector, 0
            try:
                while not self._closing.is_set():
                    with self.lock:
                        self._watch_socket()
                    ready = selector.select(self._patience_s())
                    with self.lock:
                        self._attend(ready)
                        events = self._machine.events()
                    self._pass_on(events)
                return ConnectionLost("closed")
            except (OSError, JetSparkError) as error:
                return error
            finally:
                with self.lock:
                    self._selector = None

    def _attend(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        if self._guests_error is not None:
            raise self._guests_error
        for key, mask in ready:
            if key.fileobj is self._alarm:
                self._alarm.recv(4096)
            elif mask & selectors.EVENT_READ and self._guest is None:
                self._read()
        now = time.monotonic()
        self._machine.on_time(now)
        for clock in list(self._clocks):
            if (deadline := clock._next_deadline()) is not None and now >= deadline:
                clock._on_clock(now)
        if not ready and not self._machine.out_bytes:
            self._is_alarmed = False  # nobody has published for a while
        self.flush()
        if not self._unsent:
            self.room.notify_all()

    def _patience_s(self) -> float | None:
        """How long there may be nothing to do; None is for ever."""
        if self._is_alarmed and not self._unsent:
            return LINGER_S
        with self.lock:
            deadlines = [self._machine.next_deadline(), *(clock._next_deadline() for clock in self._clocks)]
        deadline = min((each for each in deadlines if each is not None), default=None)
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _read(self) -> None:
        assert self._socket is not None
        try:
            count = self._socket.recv_into(self._arrived)
            if not count:
                raise ConnectionLost("the server closed the connection")
            self._machine.receive_data(bytes(self._arrived[:count]))
            # TLS hands out one record at a time, and select cannot see those already decrypted.
            while isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                self._machine.receive_data(self._socket.recv(READ_BYTES))
        except _NOT_NOW:
            pass

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
        self.room = threading.Condition(self.lock)
        self._closing.set()
        self._machine.close(UsageError("it belongs to the process that forked this one; connect again here"))
        self._machine.events()
        if self._socket is not None:
            self._socket.close()  # this process's copy only; the parent's connection does not notice
            self._socket = None


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link._abandon_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
