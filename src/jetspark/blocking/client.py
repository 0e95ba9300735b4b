"""The blocking client. Decisions are made in :mod:`jetspark.core`; this adds waiting."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from types import TracebackType
from typing import Any

from jetspark.blocking.jetstream import JetStream
from jetspark.blocking.message import Message
from jetspark.blocking.publisher import WindowedPublisher
from jetspark.blocking.subscription import Callback, Subscription
from jetspark.blocking.transport import WRITE_AT_BYTES, Link
from jetspark.blocking.waiter import Waiter
from jetspark.core.connection import Connection
from jetspark.core.events import OnEvent
from jetspark.core.faces import ClientFace
from jetspark.core.headers import HeadersLike
from jetspark.core.inbox import new_inbox
from jetspark.core.lifecycle import AuthSource
from jetspark.core.options import ConnectOptions, TLSConfig
from jetspark.core.reconnect import parse_servers
from jetspark.core.requests import Collector
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import BufferFull, ConnectionLost, JetSparkError, RequestTimeout
from jetspark.publish.window import ACK_TIMEOUT_S, DEFAULT_WINDOW, MAX_OUTSTANDING, WhenFull, WindowOptions

__all__ = ["Client", "connect"]


def connect(
    servers: str | Iterable[str] = "nats://127.0.0.1:4222",
    *,
    auth: AuthSource = None,
    tls: TLSConfig | None = None,
    on_event: OnEvent | None = None,
    options: ConnectOptions | None = None,
    **overrides: Any,
) -> Client:
    """Connect to NATS: ``with connect(...) as nc`` or ``nc = connect(...)``.

    Arguments and errors are those of :func:`jetspark.connect`. ``on_event`` and functions given as ``auth`` are
    called on the connection's thread.
    """
    return Client(parse_servers(servers), auth, tls, on_event, ConnectOptions.of(options, overrides))


class Client(ClientFace):
    """A connection to NATS that heals itself, for any number of threads. Make one with :func:`connect`."""

    _logger = logging.getLogger("jetspark.blocking")

    def __init__(
        self,
        servers: Any,
        auth: AuthSource,
        tls: TLSConfig | None,
        on_event: OnEvent | None,
        options: ConnectOptions,
    ) -> None:
        self._on_event = on_event
        self._listeners = []
        self._publishers: dict[WindowOptions, WindowedPublisher] = {}
        self._machine = Connection(
            options,
            servers,
            inbox=new_inbox(options.inbox_prefix, random.SystemRandom().getrandbits(128)),
            jitter=random.SystemRandom().random,
            message_class=Message,
            client=self,
        )
        self._link = Link(self._machine, auth, tls, self._pass_on)
        self._link.open()

    # ---- publish, subscribe, request ---------------------------------------------------------------------------

    def publish(self, subject: str, data: bytes = b"", *, reply: str = "", headers: HeadersLike | None = None) -> None:
        """Send a message, at most once.

        When this returns, the message is accepted: it is sent as soon as the network takes it, after a reconnect if
        need be. When this raises, it is not. ``flush`` tells when the server has processed it.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: Before anything is sent.
            BufferFull: The network takes no more and ``when_full="raise"``; by default this waits.
            ConnectionClosed: After ``close`` or ``drain``.
        """
        link, machine = self._link, self._machine
        with link.lock:
            if machine.out_bytes >= WRITE_AT_BYTES:
                link.make_room()
            try:
                machine.publish(subject, data, reply, headers)
            except BufferFull:
                self._when_there_is_room(lambda: machine.publish(subject, data, reply, headers))
            link.flush_soon()

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
        """Receive what is published on ``subject``, which may have wildcards.

        Args:
            queue: Each message goes to one member of the queue group only.
            callback: Called with one message after the other, on a thread of the subscription's own; without it,
                iterate over the subscription.
            max_messages: End by itself after so many.
            max_pending_messages: Bound of unread messages, instead of the connection's; see also
                ``max_pending_bytes``.

        Raises:
            BufferFull: The network takes nothing, and subscriptions of 1 MiB or ``send_buffer_bytes``, whichever is
                more, wait for it already.
        """
        subscription = self._subscribe(
            subject,
            queue,
            callback,
            max_pending_messages=max_pending_messages,
            max_pending_bytes=max_pending_bytes,
        )
        if max_messages:
            subscription.unsubscribe(max_messages)
        return subscription

    def _subscribe(
        self, subject: str, queue: str = "", callback: Callback | None = None, **bounds: Any
    ) -> Subscription:
        subscription = Subscription(self, callback)
        with self._link.lock:
            subscription._attach(self._machine.subscribe(subject, queue, handle=subscription, **bounds))
            self._link.wake()
        return subscription

    def request(
        self, subject: str, data: bytes = b"", *, timeout: float | None = None, headers: HeadersLike | None = None
    ) -> Message:
        """Ask, and return the first answer.

        Raises:
            NoResponders: At once, when nobody is subscribed to ``subject``.
            PermissionDenied: We may not publish there, or not subscribe to our inbox.
            RequestTimeout: No answer within ``timeout`` (default ``request_timeout_s``). The request may have arrived.
        """
        timeout = self.options.request_timeout_s if timeout is None else timeout
        link, machine = self._link, self._machine
        link.check_may_wait("request")
        answer = Waiter()
        with link.lock:
            try:
                token = machine.request(answer, subject, data, headers)
            except BufferFull:
                token = self._when_there_is_room(lambda: machine.request(answer, subject, data, headers))
            link.flush()
        try:
            message: Message = link.wait_for(answer, timeout, f"request to {subject!r}")
            return message
        finally:
            with link.lock:
                machine.forget(token)

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
        """Ask, and yield every answer until one of the limits is reached; running into one is not an error.

        Args:
            timeout: Longest time in all (default ``request_timeout_s``).
            max_messages: So many answers are enough.
            stall: After the first answer, longest wait for each further one.
            stop: True for the message that ends the sequence; that message is not yielded.

        Raises:
            NoResponders: Nobody is subscribed to ``subject``.
            PermissionDenied: We may not publish there.
        """
        collector = Collector(
            subject,
            now=time.monotonic(),
            timeout_s=self.options.request_timeout_s if timeout is None else timeout,
            stall_s=stall,
            max_messages=max_messages,
        )
        inbox = self._new_inbox()
        with self._subscribe(inbox, answers_to=subject) as answers:
            self.publish(subject, data, reply=inbox, headers=headers)
            while (wait_s := collector.wait_s(time.monotonic())) > 0:
                try:
                    message = answers.next(wait_s)
                except RequestTimeout:
                    return
                if not collector.accept(message, now=time.monotonic(), stop=stop):
                    return
                yield message

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
            domain: Of a leaf node's or hub's JetStream, if not the connected server's own.
            prefix: Where the API is imported to, if not ``$JS.API``; excludes ``domain``.
            timeout: For every request, instead of ``request_timeout_s``.
            max_outstanding: How many messages of ``publish_async`` may wait for their acknowledgement at a time.
                Contexts that agree in this and the two below share one window.
            ack_timeout: Seconds after which ``publish_async`` gives up waiting for an acknowledgement.
            when_full: What ``publish_async`` does when so many wait: ``"wait"`` for room, or ``"raise"``
                :class:`~jetspark.WindowFull`.
        """
        window = WindowOptions(max_outstanding=max_outstanding, ack_timeout=ack_timeout, when_full=when_full)
        return JetStream(self, domain=domain, prefix=prefix, timeout=timeout, window=window)

    def _windowed_publisher(self, options: WindowOptions = DEFAULT_WINDOW) -> WindowedPublisher:
        """Of all ``publish_async`` with these options: one window and one inbox, however many contexts there are."""
        with self._link.lock:  # two threads must not make two, of which close() would know one
            if options not in self._publishers:
                self._publishers[options] = WindowedPublisher(self, **asdict(options))
            return self._publishers[options]

    # ---- flush, drain, close -----------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Return when the server has processed everything published before.

        While disconnected, waits for the next session.

        Raises:
            PermissionDenied: The server refused one of the messages published since the last flush.
            ConnectionLost: The session ended first; ``unconfirmed_messages`` says how many messages are in doubt.
            RequestTimeout: No answer within ``timeout`` (default ``request_timeout_s``).
        """
        self._waited(self._machine.flush, self.options.request_timeout_s if timeout is None else timeout, "flush")

    def drain(self, timeout: float | None = None) -> None:
        """Stop receiving, let every reader finish what was received, send everything, close.

        Raises:
            RequestTimeout: Readers did not finish in time; the connection is closed all the same.
        """
        timeout = self.options.drain_timeout_s if timeout is None else timeout
        deadline = time.monotonic() + timeout
        with self._link.lock:
            subscriptions = [
                state.handle
                for state in self._machine.subscriptions
                if state.handle is not None and not state.is_inbox  # acknowledgements are waited for by close
            ]
        try:
            for entry in subscriptions:
                self._drain_subscription(entry._state, max(0.0, deadline - time.monotonic()))
            if not all(entry._read_up(deadline) for entry in subscriptions):
                unread = sum(entry.pending_messages for entry in subscriptions)
                raise RequestTimeout(f"drain, {unread} messages unread", timeout)
        finally:
            self.close()

    def close(self, timeout: float | None = None) -> None:
        """Send what is buffered, then end the connection and everything that waits on it.

        Raises:
            ConnectionLost: The server did not confirm everything within ``timeout`` (default ``drain_timeout_s``);
                the connection is closed all the same, and ``unconfirmed_messages`` are in doubt.
        """
        if self._machine.is_closed:
            return
        timeout = self.options.drain_timeout_s if timeout is None else timeout
        try:
            self._complete_publishing(timeout)
            if self._machine.in_doubt:
                self._waited(self._machine.flush, timeout, "close")
        except (RequestTimeout, BufferFull) as error:
            raise ConnectionLost("closed before the server confirmed", self._machine.in_doubt) from error
        finally:
            self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except JetSparkError as failure:
            if error is None:
                raise
            # The body's own error is the one to see; this must not hide it.
            self._logger.warning("%s", failure)

    def _complete_publishing(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for publisher in list(self._publishers.values()):
            if publisher.outstanding:
                try:
                    publisher.complete(max(0.0, deadline - time.monotonic()))
                except RequestTimeout:
                    pass  # closing resolves what is left, and says why

    # ---- for the driver's other modules ------------------------------------------------------------------------

    def _new_inbox(self) -> str:
        with self._link.lock:
            return self._machine.new_inbox()

    def _when_there_is_room(self, attempt: Callable[[], Any]) -> Any:
        while True:
            self._link.flush()
            try:
                return attempt()
            except BufferFull:
                if self.options.when_full == "raise":
                    raise
            self._link.room.wait()

    def _waited(self, start: Callable[[Any], None], timeout: float, what: str) -> None:
        self._link.check_may_wait(what)
        done = Waiter()
        with self._link.lock:
            start(done)
            self._link.flush()
        self._link.settle()
        try:
            self._link.wait_for(done, timeout, what)
        finally:
            with self._link.lock:
                self._machine.forget_flush(done)

    def _unsubscribe(self, state: SubscriptionState, max_messages: int) -> None:
        with self._link.lock:
            self._machine.unsubscribe(state, max_messages)
            self._link.wake()
        self._link.settle()

    def _drain_subscription(self, state: SubscriptionState, timeout: float) -> None:
        self._waited(lambda handle: self._machine.drain(state, handle), timeout, f"drain of {state.subject!r}")
