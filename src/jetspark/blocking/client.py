# Generated from aio/client.py by tools/unasync.py; edit that file.
"""The asyncio client. Decisions are made in :mod:`jetspark.core`; this adds waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from jetspark.blocking import clock
from jetspark.blocking.client_shutdown import ClientShutdown
from jetspark.blocking.completion import is_interrupt
from jetspark.blocking.context import DriverContext
from jetspark.blocking.jetstream import JetStream
from jetspark.blocking.message import Message
from jetspark.blocking.publisher import WindowedPublisher
from jetspark.blocking.step_runner import run_steps
from jetspark.blocking.subscription import Callback, Subscription, subscribe
from jetspark.blocking.transport import DriverAuth, Transport
from jetspark.blocking.transport_calls import ask, drain_all, until_done, when_there_is_room
from jetspark.core import lifecycle
from jetspark.core.arguments import function
from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.driver_base import ClientBase
from jetspark.core.events import OnEvent
from jetspark.core.headers import HeadersLike
from jetspark.core.lifecycle import AwaitAcks, Confirm, Ending, ReadUp
from jetspark.core.numbers import check_timeout, timeout_of, whole
from jetspark.core.options import ConnectOptions, TLSConfig
from jetspark.core.reconnect import Server
from jetspark.core.requests import Collector
from jetspark.core.requests import new_inbox as new_inbox_prefix
from jetspark.core.step_runner import StepRun
from jetspark.core.subscription import SubscriptionState
from jetspark.core.transport import WRITE_AT_BYTES, new_inbox
from jetspark.errors import BufferFull, JetSparkError, RequestTimeout
from jetspark.jetstream.operations import Api, api_prefix
from jetspark.publish.window import ACK_TIMEOUT_S, DEFAULT_WINDOW, MAX_OUTSTANDING, WhenFull, WindowOptions

__all__ = ["Client"]

_logger = logging.getLogger("jetspark.blocking")


class Client(ClientBase):
    """A connection to NATS that heals itself, for any number of threads. Make one with :func:`connect`."""

    def __init__(
        self,
        servers: Iterable[Server],
        auth: DriverAuth,
        tls: TLSConfig | None,
        on_event: OnEvent | None,
        options: ConnectOptions,
    ) -> None:
        """Called by :func:`connect`, which also opens the connection."""
        self._publishers: dict[WindowOptions, WindowedPublisher] = {}
        self._machine = Connection(
            options,
            servers,
            inbox=new_inbox_prefix(options.inbox_prefix, clock.rng().getrandbits(128)),
            jitter=clock.rng().random,
            message_class=Message,
            client=self,
        )
        self._transport = Transport(self._machine, auth, tls, Dispatcher(_logger, on_event))
        self._closing = ClientShutdown(self._transport)

    def _open(self) -> Client:
        try:
            self._transport.open()
            self._closing.watch(self)
        except BaseException:
            self._closing.give_up()
            raise
        return self

    # ---- publish, subscribe, request ---------------------------------------------------------------------------

    def publish(
        self,
        subject: str,
        data: bytes = b"",
        *,
        reply: str = "",
        headers: HeadersLike | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send a message, at most once.

        When this returns, the message is in the send buffer. It is sent as soon as the network accepts it, if necessary
        after a reconnect. When this raises, it is not sent. ``flush`` confirms that the server has
        processed it.

        Args:
            timeout: Longest wait for room in the send buffer; None waits as long as the connection lasts.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: Before anything is sent.
            BufferFull: The send buffer is full and ``when_full="raise"``, or in ``on_event``; else this waits.
            RequestTimeout: There was no room within ``timeout``.
            ConnectionClosed: After ``close`` or ``drain``, also during the wait for room.
        """
        transport, machine = self._transport, self._machine
        deadline = None if timeout is None else transport.deadline(check_timeout(timeout))
        try:
            with transport.lock:
                if machine.out_bytes >= WRITE_AT_BYTES:
                    transport.write_and_wait(deadline)
                try:
                    machine.publish(subject, data, reply, headers)
                except BufferFull:  # no lambda: its closure variables would slow every publish down by a tenth
                    attempt = partial(machine.publish, subject, data, reply, headers)
                    when_there_is_room(transport, attempt, deadline)
                transport.flush_soon()
        except TimeoutError:
            raise RequestTimeout(f"publish to {subject!r}", timeout or 0, was_sent=False) from None

    def subscribe(
        self,
        subject: str,
        *,
        queue: str = "",
        callback: Callback | None = None,
        max_messages: int = 0,
        max_pending_messages: int | None = None,
        max_pending_bytes: int | None = None,
    ) -> Subscription:
        """Receive the messages published on ``subject``, which may contain wildcards.

        Args:
            queue: Each message goes to one member of the queue group only.
            callback: Called with one message after the other, on a thread of the subscription's own; without it,
                iterate over the subscription.
            max_messages: Unsubscribe automatically after this many messages.
            max_pending_messages: Bound of unread messages, instead of the connection's; see also
                ``max_pending_bytes``.

        Raises:
            BufferFull: The network accepts nothing, and the buffered subscription requests already take 1 MiB or
                ``send_buffer_bytes``, whichever is larger.
        """
        max_messages = whole("max_messages", max_messages, low=0)
        with self._transport.lock:
            if self._machine.out_bytes >= WRITE_AT_BYTES:
                self._transport.write_and_wait()
        subscription = subscribe(
            self._transport,
            subject,
            queue,
            callback,
            max_pending_messages=max_pending_messages,
            max_pending_bytes=max_pending_bytes,
        )
        if max_messages:
            subscription.unsubscribe(max_messages)
        return subscription

    def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        timeout: float | None = None,
        headers: HeadersLike | None = None,
    ) -> Message:
        """Send a request and return the first reply.

        Raises:
            NoResponders: At once, when ``subject`` has no subscriber.
            PermissionDenied: The user may not publish there, or not subscribe to the connection's inbox.
            RequestTimeout: No reply within ``timeout`` (default ``request_timeout_s``), which includes the wait for
                room in the send buffer. The request may have arrived, unless ``was_sent`` is False.
        """
        timeout = timeout_of(timeout, self.options.request_timeout_s)
        return ask(self._transport, subject, data, headers, timeout)

    def request_many(
        self,
        subject: str,
        data: bytes = b"",
        *,
        timeout: float | None = None,
        max_messages: int = 0,
        stall: float | None = None,
        stop: Callable[[Message], bool] | None = None,
        headers: HeadersLike | None = None,
    ) -> Iterator[Message]:
        """Send a request and yield its replies until a limit is reached; reaching a limit is not an error.

        Args:
            timeout: Total time in seconds (default ``request_timeout_s``).
            max_messages: Stop after this many replies.
            stall: After the first reply, longest wait for each further one.
            stop: Returns True for the message that ends the sequence; that message is not yielded.

        Raises:
            NoResponders: ``subject`` has no subscriber.
            PermissionDenied: The user may not publish there.
            RequestTimeout: There was no room in the send buffer within ``timeout``: nothing was sent.
        """
        now = self._transport.now
        timeout = timeout_of(timeout, self.options.request_timeout_s)
        if stop is not None:
            function("stop", stop, "a function that takes a message")
        collector = Collector(subject, now=now(), timeout_s=timeout, stall_s=stall, max_messages=max_messages)
        inbox = new_inbox(self._transport)
        answers = subscribe(self._transport, inbox, answers_to=subject)
        # Not by ``with``: an interrupt at the first instruction of ``__exit__`` would leave the subscription behind.
        try:
            self.publish(subject, data, reply=inbox, headers=headers, timeout=timeout)
            while (wait_s := collector.wait_s(now())) > 0:
                try:
                    message = answers.next(wait_s)
                except RequestTimeout:
                    return
                if not collector.accept(message, now=now(), stop=stop):
                    return
                yield message
        finally:
            try:
                answers.unsubscribe()
            except BaseException as error:
                if is_interrupt(error):
                    answers.unsubscribe()
                raise

    # ---- JetStream ---------------------------------------------------------------------------------------------

    def jetstream(
        self,
        *,
        domain: str | None = None,
        prefix: str | None = None,
        timeout: float | None = None,
        max_outstanding: int = MAX_OUTSTANDING,
        ack_timeout: float = ACK_TIMEOUT_S,
        when_full: WhenFull = "wait",
    ) -> JetStream:
        """JetStream over this connection.

        Args:
            domain: JetStream domain of a leaf node or hub; by default ``jetstream_domain``, then the server's own.
            prefix: Subject prefix of an imported API, instead of ``$JS.API``; excludes ``domain``.
            timeout: Longest time of a call with all its requests, in seconds; by default ``request_timeout_s``. Calls
                of unknown length (listings, bulk reads, puts) may take longer, but not go without progress for longer.
            max_outstanding: Messages of ``publish_async`` that may their acknowledgement at a time. Contexts
                with equal values of this option and the two below share one window.
            ack_timeout: Seconds after which ``publish_async`` gives up waiting for an acknowledgement.
            when_full: With a full window ``publish_async`` waits for room (``"wait"``) or raises
                :class:`~jetspark.WindowFull` (``"raise"``).
        """
        window = WindowOptions(max_outstanding=max_outstanding, ack_timeout=ack_timeout, when_full=when_full)
        context = DriverContext(
            client=self,
            connection=self._machine,
            transport=self._transport,
            api=Api(api_prefix(domain, prefix, self.options.jetstream_domain), self._machine),
            timeout_s=timeout_of(timeout, self.options.request_timeout_s),
            publisher=self._windowed_publisher(window),
        )
        return JetStream(context)

    def _windowed_publisher(self, options: WindowOptions = DEFAULT_WINDOW) -> WindowedPublisher:
        """The publisher for these options. Contexts share it, so all their messages use one window and one inbox."""
        with self._transport.lock:  # two threads must not create two: close() would wait for one of them only
            if options not in self._publishers:
                self._publishers[options] = WindowedPublisher(self, options)
            return self._publishers[options]

    # ---- flush, drain, close -----------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Return when the server has processed all messages published so far.

        While disconnected, waits for the next session.

        Raises:
            PermissionDenied: The server denied a message published since the last flush, and the call that published
                it has not raised this.
            ConnectionLost: The session ended first; ``unconfirmed_messages`` says how many messages are in doubt.
            RequestTimeout: No answer within ``timeout`` (default ``request_timeout_s``).
        """
        timeout = timeout_of(timeout, self.options.request_timeout_s)
        until_done(self._transport, self._machine.flush, timeout, "flush")

    def drain(self, timeout: float | None = None) -> None:
        """Stop receiving, let every reader finish the messages received so far, send all buffered messages, close.

        The whole drain takes at most ``timeout`` (default ``drain_timeout_s``). A second ``drain`` or ``close`` waits
        for the first one and returns. Called in a callback, it does not wait for that callback's own subscription.

        Raises:
            RequestTimeout: Readers did not finish in time, or the server did not confirm all messages; the connection
                is closed nevertheless.
            ConnectionLost: The session or the connection ended with ``unconfirmed_messages`` in transit.
            PermissionDenied: As for :meth:`flush`; the server has the other messages.
        """
        timeout = timeout_of(timeout, self.options.drain_timeout_s)
        self._end_by(lifecycle.drain(self._machine, timeout), timeout)

    def close(self, timeout: float | None = None) -> None:
        """Send all buffered messages, then end the connection and every call that waits on it.

        A close beside another one, or beside ``drain``, waits for that one, at most ``timeout``, and returns. In
        ``on_event`` it does not wait for the server's confirmation.

        Raises:
            ConnectionLost: The server did not confirm all messages within ``timeout`` (default ``drain_timeout_s``);
                the connection is closed nevertheless, and ``unconfirmed_messages`` are in doubt. Also raised, by the
                first ``close`` only, when the connection had ended by itself with unsent messages.
            PermissionDenied: As for :meth:`flush`; the server has the other messages.
        """
        timeout = timeout_of(timeout, self.options.drain_timeout_s)
        self._end_by(lifecycle.close(self._machine), timeout)

    def _end_by(self, steps: Ending, timeout_s: float) -> None:
        deadline = self._transport.deadline(timeout_s)
        if not self._closing.begin():
            self._closing.wait(deadline)
            return
        try:
            run_steps(StepRun(steps), lambda step: self._perform(step, deadline), lock=self._transport.lock)
        finally:
            self._closing.end()

    def _perform(self, step: lifecycle.ClosingStep, deadline: float) -> Any:
        may_wait, left_s = self._transport.may_wait(), max(0.0, deadline - self._transport.now())
        match step:
            case ReadUp(subscriptions):
                return self._read_up(subscriptions, deadline)
            case Confirm() if not may_wait:
                raise RequestTimeout("close", 0)
            case Confirm():
                until_done(self._transport, self._machine.flush, left_s, "close")
            case AwaitAcks() if may_wait:
                self._await_acks(deadline)
        return None

    def _read_up(self, subscriptions: list[SubscriptionState], deadline: float) -> bool:
        """Stop the server's deliveries and wait for the readers; False when one has not finished by the deadline."""
        if not drain_all(self._transport, subscriptions, max(0.0, deadline - self._transport.now())):
            return False
        # Sequentially, not in new tasks or threads: a callback that drains must be recognised as its own reader.
        readers = [each.reader for each in subscriptions if each.reader is not None]
        outcomes = [reader.read_up(deadline) for reader in readers]  # all of them, even after one is late
        return all(outcomes)

    def _await_acks(self, deadline: float) -> None:
        for publisher in list(self._publishers.values()):
            if publisher.outstanding:
                with suppress(RequestTimeout):  # closing fails the remaining futures with the reason
                    publisher.complete(max(0.0, deadline - self._transport.now()))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(lifecycle.leaving_s(self.options, kind))
        except JetSparkError as failure:
            if error is None:
                raise
            # Do not hide the error raised in the block.
            _logger.warning("%s", failure)
        except BaseException:
            self._closing.end()  # interrupted, perhaps before closing began; no later call will close the client
            raise
