"""The asyncio client. Decisions are made in :mod:`jetspark.core`; this adds waiting."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from dataclasses import asdict
from types import TracebackType
from typing import Any, cast

from jetspark.aio.jetstream import JetStream
from jetspark.aio.message import Message
from jetspark.aio.publisher import WindowedPublisher
from jetspark.aio.subscription import Callback, Subscription
from jetspark.aio.transport import WRITE_AT_BYTES, AsyncAuthSource, Link
from jetspark.core.connection import Connection
from jetspark.core.events import OnEvent
from jetspark.core.faces import ClientFace
from jetspark.core.headers import HeadersLike
from jetspark.core.inbox import new_inbox
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
    auth: AsyncAuthSource = None,
    tls: TLSConfig | None = None,
    on_event: OnEvent | None = None,
    options: ConnectOptions | None = None,
    **overrides: Any,
) -> _Connecting:
    """Connect to NATS: ``async with jetspark.connect(...) as nc`` or ``nc = await jetspark.connect(...)``.

    Args:
        servers: One URL or several; the first that answers is used, the others when it goes away.
        auth: :class:`UserPassword`, :class:`Token`, :class:`NKey`, :class:`Credentials`, or a function (plain or
            async) that returns one; a function is called for each connection attempt, so secrets can rotate.
        tls: How to speak TLS; the default does so when the server or the URL (``tls://``) wants it.
        on_event: Called with each :class:`ConnectionEvent`, on the event loop; keep it quick.
        options: A :class:`ConnectOptions`; its fields are also accepted as keywords, such as ``name="billing"``.

    Raises:
        NoServersAvailable: No server answered; each is tried once.
        AuthenticationFailed: The servers refused the credentials.
        ConfigError: A URL, an option or the credentials make no sense.
    """
    chosen = ConnectOptions.of(options, overrides)
    parsed = parse_servers(servers)
    return _Connecting(lambda: Client._connect(parsed, auth, tls, on_event, chosen))


class _Connecting:
    """What ``connect`` returns: awaitable, and an asynchronous context manager."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return cast("Generator[Any, None, Client]", self._start().__await__())

    async def __aenter__(self) -> Client:
        self._client = await self._start()
        return await self._client.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.__aexit__(kind, error, trace)


class Client(ClientFace):
    """A connection to NATS that heals itself. Make one with :func:`connect`."""

    _logger = logging.getLogger("jetspark.aio")

    def __init__(self, *, _only_connect_makes_clients: None) -> None:
        self._link: Link
        self._on_event: OnEvent | None = None
        self._listeners = []
        self._publishers: dict[WindowOptions, WindowedPublisher] = {}

    @classmethod
    async def _connect(
        cls,
        servers: Any,
        auth: AsyncAuthSource,
        tls: TLSConfig | None,
        on_event: OnEvent | None,
        options: ConnectOptions,
    ) -> Client:
        client = cls(_only_connect_makes_clients=None)
        client._on_event = on_event
        client._machine = Connection(
            options,
            servers,
            inbox=new_inbox(options.inbox_prefix, random.SystemRandom().getrandbits(128)),
            jitter=random.SystemRandom().random,
            message_class=Message,
            client=client,
        )
        client._link = Link(client._machine, auth, tls, client._pass_on)
        await client._link.open()
        return client

    # ---- publish, subscribe, request ---------------------------------------------------------------------------

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: HeadersLike | None = None
    ) -> None:
        """Send a message, at most once.

        When this returns, the message is accepted: it is sent as soon as the network takes it, after a reconnect if
        need be. When this raises or is cancelled, it is not. ``flush`` tells when the server has processed it.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: Before anything is sent.
            BufferFull: The network takes no more and ``when_full="raise"``; by default this waits.
            ConnectionClosed: After ``close`` or ``drain``.
            UsageError: From another event loop than that of ``connect``.
        """
        machine = self._machine
        if machine.out_bytes >= WRITE_AT_BYTES:
            await self._link.push()
        if not self._link.flush_is_scheduled:
            self._link.schedule_flush()
        try:
            machine.publish(subject, data, reply, headers)
        except BufferFull:
            await self._when_there_is_room(lambda: machine.publish(subject, data, reply, headers))
            self._link.schedule_flush()

    async def subscribe(
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
            callback: Called (and awaited, if it returns an awaitable) with one message after the other; without it,
                iterate over the subscription.
            max_messages: End by itself after so many.
            max_pending_messages: Bound of unread messages, instead of the connection's; see also
                ``max_pending_bytes``.

        Raises:
            BufferFull: The network takes nothing, and subscriptions of 1 MiB or ``send_buffer_bytes``, whichever is
                more, wait for it already.
        """
        if self._machine.out_bytes >= WRITE_AT_BYTES:
            await self._link.push()
        subscription = self._subscribe(
            subject,
            queue,
            callback,
            max_pending_messages=max_pending_messages,
            max_pending_bytes=max_pending_bytes,
        )
        if max_messages:
            await subscription.unsubscribe(max_messages)
        return subscription

    def _subscribe(
        self, subject: str, queue: str = "", callback: Callback | None = None, **bounds: Any
    ) -> Subscription:
        self._link.check_loop()
        subscription = Subscription(self, callback)
        subscription._attach(self._machine.subscribe(subject, queue, handle=subscription, **bounds))
        self._link.schedule_flush()
        return subscription

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        timeout: float | None = None,
        headers: HeadersLike | None = None,
    ) -> Message:
        """Ask, and return the first answer.

        Raises:
            NoResponders: At once, when nobody is subscribed to ``subject``.
            PermissionDenied: We may not publish there, or not subscribe to our inbox.
            RequestTimeout: No answer within ``timeout`` (default ``request_timeout_s``). The request may have arrived.
        """
        timeout = self.options.request_timeout_s if timeout is None else timeout
        self._link.check_loop()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Message] = loop.create_future()
        machine = self._machine
        try:
            token = machine.request(answer, subject, data, headers)
        except BufferFull:
            token = await self._when_there_is_room(lambda: machine.request(answer, subject, data, headers))
        self._link.flush()
        # A timer of our own costs a third of asyncio.timeout(), and this is what request latency is made of.
        timer = loop.call_later(timeout, _expire, answer, f"request to {subject!r}", timeout)
        try:
            return await answer
        finally:
            timer.cancel()
            machine.forget(token)

    async def request_many(
        self,
        subject: str,
        data: bytes = b"",
        *,
        timeout: float | None = None,
        max_messages: int = 0,
        stall: float | None = None,
        stop: Callable[[Message], bool] | None = None,
        headers: HeadersLike | None = None,
    ) -> AsyncIterator[Message]:
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
        loop = asyncio.get_running_loop()
        collector = Collector(
            subject,
            now=loop.time(),
            timeout_s=self.options.request_timeout_s if timeout is None else timeout,
            stall_s=stall,
            max_messages=max_messages,
        )
        inbox = self._new_inbox()
        async with self._subscribe(inbox, answers_to=subject) as answers:
            await self.publish(subject, data, reply=inbox, headers=headers)
            while (wait_s := collector.wait_s(loop.time())) > 0:
                try:
                    message = await answers.next(wait_s)
                except RequestTimeout:
                    return
                if not collector.accept(message, now=loop.time(), stop=stop):
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
        if options not in self._publishers:
            self._publishers[options] = WindowedPublisher(self, **asdict(options))
        return self._publishers[options]

    # ---- flush, drain, close -----------------------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> None:
        """Return when the server has processed everything published before.

        While disconnected, waits for the next session.

        Raises:
            PermissionDenied: The server refused one of the messages published since the last flush.
            ConnectionLost: The session ended first; ``unconfirmed_messages`` says how many messages are in doubt.
            RequestTimeout: No answer within ``timeout`` (default ``request_timeout_s``).
        """
        timeout = self.options.request_timeout_s if timeout is None else timeout
        await self._waited(self._machine.flush, timeout, "flush")

    async def drain(self, timeout: float | None = None) -> None:
        """Stop receiving, let every reader finish what was received, send everything, close.

        Raises:
            RequestTimeout: Readers did not finish in time; the connection is closed all the same.
        """
        timeout = self.options.drain_timeout_s if timeout is None else timeout
        subscriptions = [
            state.handle
            for state in self._machine.subscriptions
            if state.handle is not None and not state.is_inbox  # acknowledgements are waited for by close
        ]
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(self._drain_subscription(entry._state) for entry in subscriptions))
                await asyncio.gather(*(entry._read_up() for entry in subscriptions))
        except TimeoutError:
            unread = sum(entry.pending_messages for entry in subscriptions)
            raise RequestTimeout(f"drain, {unread} messages unread", timeout) from None
        finally:
            await self.close()

    async def close(self, timeout: float | None = None) -> None:
        """Send what is buffered, then end the connection and everything that waits on it.

        Raises:
            ConnectionLost: The server did not confirm everything within ``timeout`` (default ``drain_timeout_s``);
                the connection is closed all the same, and ``unconfirmed_messages`` are in doubt.
        """
        if self._machine.is_closed:
            return
        timeout = self.options.drain_timeout_s if timeout is None else timeout
        try:
            await self._complete_publishing(timeout)
            if self._machine.in_doubt:
                await self._waited(self._machine.flush, timeout, "close")
        except (RequestTimeout, BufferFull) as error:
            raise ConnectionLost("closed before the server confirmed", self._machine.in_doubt) from error
        finally:
            self._link.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except JetSparkError as failure:
            if error is None:
                raise
            # The body's own error is the one to see; this must not hide it.
            self._logger.warning("%s", failure)

    async def _complete_publishing(self, timeout: float) -> None:
        publishing = [each.complete(timeout) for each in self._publishers.values() if each.outstanding]
        # A RequestTimeout is no news: closing resolves what is left, and says why.
        await asyncio.gather(*publishing, return_exceptions=True)

    # ---- for the driver's other modules ------------------------------------------------------------------------

    def _new_inbox(self) -> str:
        return self._machine.new_inbox()

    async def _when_there_is_room(self, attempt: Callable[[], Any]) -> Any:
        while True:
            self._link.flush()
            try:
                return attempt()
            except BufferFull:
                if self.options.when_full == "raise":
                    raise
            await self._link.wait_for_room()

    async def _waited(self, start: Callable[[Any], None], timeout: float, what: str) -> None:
        self._link.check_loop()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        start(done)
        self._link.flush()
        self._pass_on(self._machine.events())
        timer = loop.call_later(timeout, _expire, done, what, timeout)
        try:
            await done
        finally:
            timer.cancel()
            self._machine.forget_flush(done)

    def _unsubscribe(self, state: SubscriptionState, max_messages: int) -> None:
        self._link.check_loop()
        self._machine.unsubscribe(state, max_messages)
        self._pass_on(self._machine.events())
        self._link.schedule_flush()

    async def _drain_subscription(self, state: SubscriptionState) -> None:
        await self._waited(lambda handle: self._machine.drain(state, handle), self.options.drain_timeout_s, "drain")


def _expire(future: asyncio.Future[Any], what: str, timeout: float) -> None:
    if not future.done():
        future.set_exception(RequestTimeout(what, timeout))
