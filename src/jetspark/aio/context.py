"""The parts of one client that the modules above it share, and the requests they make to JetStream.

``Client.jetstream()`` makes a :class:`DriverContext` of its own parts, and the :class:`JetStream` hands it on to
streams, consumers, buckets and batches. They use these public names, and leave the private ones of client and
JetStream alone. Users never see it.

:meth:`~DriverContext.request_with`, :meth:`~DriverContext.send_reply` and :meth:`~DriverContext.take` are the only way
past :class:`Client` to the connection. They are for code whose latency is a promise, such as commands: one task or
future per message takes as long there as all the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, Unpack, cast

from jetspark.aio import clock
from jetspark.aio.message import Message
from jetspark.aio.publisher import WindowedPublisher
from jetspark.aio.step_runner import run_steps
from jetspark.aio.subscription import Subscription, SubscriptionReader, subscribe
from jetspark.aio.transport import Link
from jetspark.core.connection import Connection
from jetspark.core.headers import HeadersLike
from jetspark.core.link import new_inbox
from jetspark.core.numbers import timeout_of
from jetspark.core.step_runner import Sleep, StepRun
from jetspark.core.subscription import SubscriptionKind
from jetspark.errors import ConnectionClosed, NoResponders, RequestTimeout
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.operations import Api, Deadline, Operation, Request
from jetspark.jetstream.ordered import Patience

if TYPE_CHECKING:
    from jetspark.aio.client import Client
    from jetspark.aio.jetstream import JetStream

__all__ = ["DriverContext", "ReplyHandle", "context_of"]

T = TypeVar("T")

NOTHING = Message("", b"", None, None, None)
SMALL_BYTES = 4096
"""A reply of at most this size is below the limit of any server, and is sent without comparing the two."""


def context_of(js: JetStream) -> DriverContext:
    """The context of a user's JetStream, for code outside of this driver that needs more than public methods."""
    return js._context


class ReplyHandle(Protocol):
    """The receiver of one request's outcome. The connection calls it while it reads, so no method may wait."""

    def done(self) -> bool:
        """Called first; the outcome of a request whose handle is done is dropped."""

    def set_result(self, message: Message, /) -> None:
        """The first reply."""

    def set_exception(self, error: Exception, /) -> None:
        """No reply will come: ``NoResponders``, ``PermissionDenied`` or the end of the connection."""


class CallbackReader(SubscriptionReader):
    """Calls back with each message while the connection reads."""

    def __init__(self, link: Link, callback: Callable[[Message], None]) -> None:
        super().__init__(link)
        self._callback, self._dispatcher = callback, link.dispatcher

    def wake(self) -> None:
        take, guard = cast("deque[Message]", self.state.pending).popleft, self._dispatcher.guard
        while True:
            try:
                message = take()  # atomic, because another thread may be in here
            except IndexError:
                break
            guard(self._callback, message)
        if self.state.is_finished and self.state.error is not None:
            self._dispatcher.report(self.state.error)
        super().wake()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DriverContext:
    """The parts of a client, an API of JetStream, and the requests to it."""

    client: Client
    connection: Connection
    link: Link
    api: Api
    timeout_s: float
    """Longest time for all the requests of a call together, unless the call says otherwise."""
    publisher: WindowedPublisher

    # ---- without waiting ---------------------------------------------------------------------------------------

    def request_with(
        self,
        handle: ReplyHandle,
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
        # In threads: with self.link.lock, self.link.doubt:
        token = self.connection.request(handle, subject, data, headers)
        self._flush(at_once)
        return token

    def forget(self, token: str) -> None:
        """Drop the reply to a :meth:`request_with`, should it still come."""
        # In threads: with self.link.lock:
        self.connection.requests.forget(token)

    def send_reply(
        self, subject: str, data: bytes, headers: HeadersLike | None = None, *, at_once: bool = True
    ) -> None:
        """Publish to the reply subject of a message, which the caller has checked.

        Args:
            at_once: As for :meth:`request_with`.

        Raises:
            BufferFull: There is no room in the send buffer; nothing was sent.
            InvalidHeader, PayloadTooLarge, ConnectionClosed: Nothing was sent.
        """
        # In threads: with self.link.lock, self.link.doubt:
        if headers is None and len(data) <= SMALL_BYTES:
            self.connection.publish_raw(subject.encode(), data)
        else:
            self.connection.publish(subject, data, "", headers)
        self._flush(at_once)

    def _flush(self, at_once: bool) -> None:
        if at_once:
            self.link.flush()
        else:
            self.link.flush_soon()

    def take(self, subject: str, callback: Callable[[Message], None], *, queue: str = "") -> Subscription:
        """Subscribe, and call ``callback`` with each message while the connection reads: it must not wait.

        An error that it raises is reported as :class:`~jetspark.ErrorReported`, and so is the error that ends the
        subscription.
        """
        return subscribe(self.link, subject, queue, reader=CallbackReader(self.link, callback))

    # ---- with waiting ------------------------------------------------------------------------------------------

    def subscribe(self, subject: str, queue: str = "", **kind: Unpack[SubscriptionKind]) -> Subscription:
        """Start receiving; ``kind`` is what :meth:`Connection.subscribe` takes beside the subject and the queue."""
        return subscribe(self.link, subject, queue, **kind)

    async def run(self, operation: Operation[T], timeout: float | None = None, *, for_each: bool = False) -> T:
        """Run an operation; all its requests together have ``timeout`` seconds, or with ``for_each`` every one."""
        deadline = Deadline(timeout_of(timeout, self.timeout_s), for_each=for_each)
        return await run_steps(StepRun(operation), lambda step: self.perform(step, deadline))

    async def perform(self, step: Request | Sleep, deadline: Deadline) -> Message:
        """Do one step of an operation."""
        if isinstance(step, Sleep):
            await clock.sleep(step.draw_s(clock.rng().random))
            return NOTHING
        timeout = deadline.begin(step, clock.now())
        try:
            if not step.is_silent:
                return await self._ask(step, timeout, deadline)
            # The time is for room in the send buffer; nobody waits for an answer.
            await self.client.publish(step.subject, step.data, headers=step.headers, timeout=timeout)
            return NOTHING
        except RequestTimeout as error:
            raise deadline.of_all(error) from None

    async def _ask(self, request: Request, timeout: float, deadline: Deadline) -> Message:
        while True:
            try:
                return await self.client.request(
                    request.subject, request.data, timeout=timeout, headers=request.headers
                )
            except NoResponders as error:
                if (within_s := deadline.look_s(request, clock.now(), self.client.server_info)) is not None:
                    await self.run(self.api.look_for_stream(request.subject, deadline), within_s)
                pause_s = deadline.retry_after_s(clock.now())
                if pause_s is None:
                    raise unavailable(request.subject, self.client.server_info, deadline.stream) from error
                await clock.sleep(pause_s)
                timeout = deadline.left_s(clock.now())

    @asynccontextmanager
    async def asked(self, request: Request, timeout: float | None = None) -> AsyncIterator[Subscription]:
        """The answers to a request that has many. They end when the connection is lost: the rest will not come.

        ``timeout`` is for room in the send buffer.
        """
        inbox = new_inbox(self.link)
        async with self.subscribe(inbox, answers_to=request.subject, ends_with_session=True) as answers:
            await self.client.publish(request.subject, request.data, reply=inbox, timeout=timeout)
            yield answers

    async def next_answer(self, answers: Subscription, patience: Patience) -> Message | None:
        """The next answer of :meth:`asked`; None when the rest will not come, and may be asked for again.

        Raises:
            RequestTimeout: Nothing came for too long.
        """
        try:
            return await answers.next(patience.left_s(clock.now(), self.timeout_s))
        except RequestTimeout:
            patience.check(clock.now())
        except ConnectionClosed:
            if self.client.is_closed:
                raise
            patience.check(clock.now())
        return None

    async def pages(self, ask: Callable[[int], Operation[tuple[list[T], int]]]) -> AsyncIterator[T]:
        """The entries of a listing, which the server gives out page by page; ``ask`` is for those from an offset on."""
        seen = 0
        while True:
            page, total = await self.run(ask(seen))
            for entry in page:
                yield entry
            seen += len(page)
            if not page or seen >= total:
                return
