"""The asyncio client. Decisions are made in :mod:`jetspark.core`; this adds waiting."""

from __future__ import annotations

import asyncio
import atexit
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast

from jetspark.aio import clock
from jetspark.aio.context import DriverContext
from jetspark.aio.jetstream import JetStream
from jetspark.aio.message import Message
from jetspark.aio.publisher import WindowedPublisher
from jetspark.aio.subscription import Callback, Subscription, subscribe
from jetspark.aio.transport import WRITE_AT_BYTES, AsyncAuthSource, Link, expire
from jetspark.core import ending
from jetspark.core.arguments import function
from jetspark.core.client_base import ClientBase
from jetspark.core.connection import Connection
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.ending import AwaitAcks, Confirm, Ending, ReadUp
from jetspark.core.events import OnEvent
from jetspark.core.headers import HeadersLike
from jetspark.core.inbox import new_inbox
from jetspark.core.numbers import check_timeout, timeout_of, whole
from jetspark.core.options import ConnectKeywords, ConnectOptions, TLSConfig, check_connect
from jetspark.core.reconnect import parse_servers
from jetspark.core.reply_limits import Collector
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import BufferFull, JetSparkError, NotAwaited, RequestTimeout, UsageError
from jetspark.jetstream.operations import Api, api_prefix
from jetspark.publish.window import ACK_TIMEOUT_S, DEFAULT_WINDOW, MAX_OUTSTANDING, WhenFull, WindowOptions

__all__ = ["Client", "connect"]

_logger = logging.getLogger("jetspark.aio")


def connect(
    servers: str | Iterable[str] = "nats://127.0.0.1:4222",
    *,
    auth: AsyncAuthSource = None,
    tls: TLSConfig | None = None,
    on_event: OnEvent | None = None,
    options: ConnectOptions | None = None,
    **overrides: Unpack[ConnectKeywords],
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
    check_connect(auth, tls, on_event)
    parsed = parse_servers(servers)
    return _Connecting(lambda: Client._connect(parsed, auth, tls, on_event, chosen))


_NOT_AWAITED = (
    "the connection is not made yet; write `async with jetspark.connect(...) as nc:` or "
    "`nc = await jetspark.connect(...)`"
)


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

    if not TYPE_CHECKING:  # a type checker finds the mistake by itself, as long as it does not see these

        def __getattr__(self, name: str) -> NoReturn:
            raise NotAwaited(f"{name}: {_NOT_AWAITED}")

        def __enter__(self) -> NoReturn:
            raise UsageError(f"with: {_NOT_AWAITED}; or use jetspark.blocking, which needs neither")

        def __exit__(self, *exc_info: object) -> None:
            """So that the statement gets as far as the line above."""


class Client(ClientBase):
    """A connection to NATS that heals itself. Make one with :func:`connect`."""

    def __init__(self, *, _only_connect_makes_clients: None) -> None:
        self._link: Link
        self._publishers: dict[WindowOptions, WindowedPublisher] = {}
        self._is_open = False
        """Connected once, and nobody was told what is lost with it."""
        self._ending: asyncio.Future[None] | None = None
        """Done when the ``close`` or ``drain`` that came first is."""

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
        client._machine = Connection(
            options,
            servers,
            inbox=new_inbox(options.inbox_prefix, clock.rng().getrandbits(128)),
            jitter=clock.rng().random,
            message_class=Message,
            client=client,
        )
        client._link = Link(client._machine, auth, tls, Dispatcher(_logger, on_event))
        await client._link.open()
        client._is_open = True
        _clients.add(client)
        return client

    # ---- publish, subscribe, request ---------------------------------------------------------------------------

    async def publish(
        self,
        subject: str,
        data: bytes = b"",
        *,
        reply: str = "",
        headers: HeadersLike | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send a message, at most once.

        When this returns, the message is accepted: it is sent as soon as the network takes it, after a reconnect if
        need be. When this raises or is cancelled, it is not. ``flush`` tells when the server has processed it.

        Args:
            timeout: Longest wait for room in the send buffer; None waits as long as the connection lasts.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: Before anything is sent.
            BufferFull: The network takes no more and ``when_full="raise"``; by default this waits.
            RequestTimeout: There was no room within ``timeout``.
            ConnectionClosed: After ``close`` or ``drain``, also while it waits.
            UsageError: From another event loop than that of ``connect``.
        """
        machine = self._machine
        check_timeout(timeout)
        deadline = None if timeout is None else self._link.deadline(timeout)
        try:
            if machine.out_bytes >= WRITE_AT_BYTES:
                await self._link.write_and_wait(deadline)
            if not self._link.flush_is_scheduled:
                self._link.flush_soon()
            try:
                machine.publish(subject, data, reply, headers)
            except BufferFull:  # not a lambda: the variables it would share cost every message a tenth of its time
                await self._link.when_there_is_room(partial(machine.publish, subject, data, reply, headers), deadline)
                self._link.flush_soon()
        except TimeoutError:
            raise RequestTimeout(f"publish to {subject!r}", timeout or 0, was_sent=False) from None

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
            max_messages: End by itself after this many messages.
            max_pending_messages: Bound of unread messages, instead of the connection's; see also
                ``max_pending_bytes``.

        Raises:
            BufferFull: The network takes nothing, and subscriptions of 1 MiB or ``send_buffer_bytes``, whichever is
                more, wait for it already.
        """
        max_messages = whole("max_messages", max_messages, low=0)
        if self._machine.out_bytes >= WRITE_AT_BYTES:
            await self._link.write_and_wait()
        subscription = subscribe(
            self._link,
            subject,
            queue,
            callback,
            max_pending_messages=max_pending_messages,
            max_pending_bytes=max_pending_bytes,
        )
        if max_messages:
            await subscription.unsubscribe(max_messages)
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
            RequestTimeout: No answer within ``timeout`` (default ``request_timeout_s``), the wait for room in the send
                buffer included. The request may have arrived, unless ``was_sent`` is False.
        """
        timeout = timeout_of(timeout, self.options.request_timeout_s)
        self._link.check_loop()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Message] = loop.create_future()
        machine = self._machine
        deadline = loop.time() + timeout
        try:
            token = machine.request(answer, subject, data, headers)
        except BufferFull:
            try:
                token = await self._link.when_there_is_room(
                    partial(machine.request, answer, subject, data, headers), deadline
                )
            except TimeoutError:
                raise RequestTimeout(f"request to {subject!r}", timeout, was_sent=False) from None
        self._link.flush_promptly()
        # A timer of our own costs a third of asyncio.timeout(), and this is what request latency is made of.
        timer = loop.call_at(deadline, expire, answer, f"request to {subject!r}", timeout)
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
            max_messages: Stop after this many answers.
            stall: After the first answer, longest wait for each further one.
            stop: True for the message that ends the sequence; that message is not yielded.

        Raises:
            NoResponders: Nobody is subscribed to ``subject``.
            PermissionDenied: We may not publish there.
            RequestTimeout: There was no room in the send buffer within ``timeout``: nothing was sent.
        """
        loop = asyncio.get_running_loop()
        timeout = timeout_of(timeout, self.options.request_timeout_s)
        if stop is not None:
            function("stop", stop, "a function that takes a message")
        collector = Collector(
            subject,
            now=loop.time(),
            timeout_s=timeout,
            stall_s=stall,
            max_messages=max_messages,
        )
        inbox = self._link.new_inbox()
        async with subscribe(self._link, inbox, answers_to=subject) as answers:
            await self.publish(subject, data, reply=inbox, headers=headers, timeout=timeout)
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
            timeout: Longest time a call may take, all its requests to the server together, instead of
                ``request_timeout_s``. What has no known length (listings, bulk reads, puts) may take longer, but not
                go without progress for longer.
            max_outstanding: How many messages of ``publish_async`` may wait for their acknowledgement at a time.
                Contexts that agree in this and the two below share one window.
            ack_timeout: Seconds after which ``publish_async`` gives up waiting for an acknowledgement.
            when_full: What ``publish_async`` does when that many wait: ``"wait"`` for room, or ``"raise"``
                :class:`~jetspark.WindowFull`.
        """
        window = WindowOptions(max_outstanding=max_outstanding, ack_timeout=ack_timeout, when_full=when_full)
        return JetStream(self._context(Api(api_prefix(domain, prefix), self._machine), timeout, window))

    def _context(self, api: Api, timeout: float | None, window: WindowOptions) -> DriverContext:
        return DriverContext(
            client=self,
            connection=self._machine,
            link=self._link,
            api=api,
            timeout_s=timeout_of(timeout, self.options.request_timeout_s),
            publisher=self._windowed_publisher(window),
        )

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
        timeout = timeout_of(timeout, self.options.request_timeout_s)
        await self._link.until_done(self._machine.flush, timeout, "flush")

    async def drain(self, timeout: float | None = None) -> None:
        """Stop receiving, let every reader finish the messages received so far, send everything, close.

        All of it within ``timeout`` (default ``drain_timeout_s``). A drain beside another one, or beside ``close``,
        waits for that one and returns. Called in a callback, it does not wait for that callback's own subscription.

        Raises:
            RequestTimeout: Readers did not finish in time, or the server did not confirm everything; the connection is
                closed all the same.
            ConnectionLost: The session, or the connection itself, ended with ``unconfirmed_messages`` on their way.
            PermissionDenied: The server refused one of the messages published since the last flush; it has the others.
        """
        timeout = timeout_of(timeout, self.options.drain_timeout_s)
        await self._end_by(ending.drain(self._machine, timeout), timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Send what is buffered, then end the connection and everything that waits on it.

        A close beside another one, or beside ``drain``, waits for that one, at most ``timeout``, and returns.

        Raises:
            ConnectionLost: The server did not confirm everything within ``timeout`` (default ``drain_timeout_s``);
                the connection is closed all the same, and ``unconfirmed_messages`` are in doubt. Also when the
                connection has ended by itself with messages that were never sent; told once, to the first who closes.
            PermissionDenied: The server refused one of the messages published since the last flush; it has the others.
        """
        timeout = timeout_of(timeout, self.options.drain_timeout_s)
        await self._end_by(ending.close(self._machine), timeout)

    async def _end_by(self, steps: Ending, timeout_s: float) -> None:
        deadline = self._link.deadline(timeout_s)
        answer: Any = None
        problem: JetSparkError | None = None
        if not self._is_first_to_end():
            await self._end_with_the_first(deadline)
            return
        try:
            while True:
                step = steps.send(answer) if problem is None else steps.throw(problem)
                answer = problem = None
                try:
                    answer = await self._perform(step, deadline)
                except JetSparkError as error:
                    problem = error
        except StopIteration:
            pass
        finally:
            self._end()
            problem = None  # its traceback has this frame
            steps.close()

    async def _perform(self, step: ending.Step, deadline: float) -> Any:
        left_s = max(0.0, deadline - self._link.now())
        match step:
            case ReadUp(subscriptions):
                return await self._read_up(subscriptions, deadline)
            case Confirm():
                await self._link.until_done(self._machine.flush, left_s, "close")
            case AwaitAcks():
                publishing = [each.complete(left_s) for each in self._publishers.values() if each.outstanding]
                # A RequestTimeout is no news: closing resolves what is left, and says why.
                await asyncio.gather(*publishing, return_exceptions=True)
        return None

    def _is_first_to_end(self) -> bool:
        if self._ending is not None:
            return False
        self._ending = asyncio.get_running_loop().create_future()
        return True

    async def _end_with_the_first(self, deadline: float) -> None:
        """Another task ends the connection: wait for it, but not for longer than this one may take."""
        assert self._ending is not None
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self._ending)
        except TimeoutError:
            failure = ending.lost(self._machine)
            self._end()
            if failure.unconfirmed_messages:
                raise failure from None

    async def _read_up(self, subscriptions: list[SubscriptionState], deadline: float) -> bool:
        """Have the server send no more, and the readers finish; False when they have not until the deadline."""
        left_s = max(0.0, deadline - self._link.now())
        draining = [self._link.drain(each, left_s) for each in subscriptions]
        outcomes = await asyncio.gather(*draining, return_exceptions=True)
        if any(isinstance(outcome, RequestTimeout) for outcome in outcomes):
            return False
        # One after the other, and in this task: a callback that drains must be recognised as its own reader.
        readers = [each.reader for each in subscriptions if each.reader is not None]
        return all([await reader.read_up(deadline) for reader in readers])

    def _end(self) -> None:
        self._link.close()
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(None)

    def _tell_unsent(self) -> None:
        """The client is gone, or its loop, and nobody closed it: say what that has cost."""
        self._is_open = False
        if not self._machine.is_closed and (unsent := self._link.unsent()) != (0, 0):
            _logger.warning(
                "a client of %s was never closed: %d published messages were never sent, %d are in doubt",
                self.server,
                *unsent,
            )

    def __del__(self) -> None:
        if self._is_open:  # not by the set: a collector forgets weak references first
            self._tell_unsent()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close(ending.leaving_s(self.options, kind))
        except JetSparkError as failure:
            if error is None:
                raise
            # The body's own error is the one to see; this must not hide it.
            _logger.warning("%s", failure)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _tell_at_exit() -> None:
    for client in list(_clients):
        if client._is_open:
            client._tell_unsent()


atexit.register(_tell_at_exit)
