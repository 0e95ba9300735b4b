"""The parts of one client that the modules above it share, and the requests they make to JetStream.

``Client.jetstream()`` makes a :class:`DriverContext` of its own parts, and the :class:`JetStream` hands it on to
streams, consumers, buckets and batches, which use these public names and never private ones of client and JetStream.
Only ``request_with``, ``send_reply`` and ``take`` bypass :class:`Client`, where a task per message takes too long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, Unpack

from jetspark.aio import clock
from jetspark.aio.message import Message
from jetspark.aio.publisher import WindowedPublisher
from jetspark.aio.step_runner import run_steps
from jetspark.aio.subscription import Subscription, subscribe
from jetspark.aio.transport import Transport
from jetspark.core.connection import Connection
from jetspark.core.driver_base import ContextBase
from jetspark.core.numbers import timeout_of
from jetspark.core.step_runner import Sleep, StepRun
from jetspark.core.subscription import SubscriptionKind
from jetspark.core.transport import new_inbox
from jetspark.errors import ConnectionClosed, NoResponders, RequestTimeout
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.operations import Api, Deadline, Operation, Request
from jetspark.jetstream.ordered import Patience

if TYPE_CHECKING:
    from jetspark.aio.client import Client
    from jetspark.aio.jetstream import JetStream

__all__ = ["DriverContext", "context_of"]

T = TypeVar("T")

NOTHING = Message("", b"", None, None, None)


def context_of(js: JetStream) -> DriverContext:
    """The context behind a user's JetStream, for code outside of this driver that needs more than public methods."""
    return js._context


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DriverContext(ContextBase[Message]):
    """The parts of a client, an API of JetStream, and the requests to it."""

    client: Client
    connection: Connection
    transport: Transport
    api: Api
    timeout_s: float
    """Default time limit of a call with all its requests."""
    publisher: WindowedPublisher

    def take(self, subject: str, callback: Callable[[Message], None], *, queue: str = "") -> Subscription:
        """Subscribe, and call ``callback`` with each message while the connection reads. It must not wait.

        ``on_event`` reports the errors that it raises, and the error that ends the subscription.
        """
        return subscribe(self.transport, subject, queue, direct=callback)

    def subscribe(self, subject: str, queue: str = "", **kind: Unpack[SubscriptionKind]) -> Subscription:
        """Start receiving; ``kind`` is what :meth:`Connection.subscribe` takes beside the subject and the queue."""
        return subscribe(self.transport, subject, queue, **kind)

    async def run(self, operation: Operation[T], timeout: float | None = None, *, for_each: bool = False) -> T:
        """Run an operation. ``timeout`` covers all its requests together, or with ``for_each`` each single one."""
        deadline = Deadline(timeout_of(timeout, self.timeout_s), for_each=for_each)
        return await run_steps(StepRun(operation), lambda step: self.perform(step, deadline))

    async def perform(self, step: Request | Sleep, deadline: Deadline) -> Message:
        """Perform one step of an operation."""
        if isinstance(step, Sleep):
            await clock.sleep(step.draw_s(clock.rng().random))
            return NOTHING
        timeout = deadline.begin(step, clock.now())
        try:
            if not step.is_silent:
                return await self._ask(step, timeout, deadline)
            # The time-out is for room in the send buffer; no answer is expected.
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
                if (within_s := deadline.election_check_s(request, clock.now(), self.client.server_info)) is not None:
                    await self.run(self.api.find_streams_of(request.subject, deadline), within_s)
                pause_s = deadline.retry_after_s(clock.now())
                if pause_s is None:
                    raise unavailable(request.subject, self.client.server_info, deadline.stream) from error
                await clock.sleep(pause_s)
                timeout = deadline.left_s(clock.now())

    @asynccontextmanager
    async def asked(self, request: Request, timeout: float | None = None) -> AsyncIterator[Subscription]:
        """Many answers to one request, until the session ends; ``timeout`` is for room in the send buffer."""
        inbox = new_inbox(self.transport)
        async with self.subscribe(inbox, answers_to=request.subject, ends_with_session=True) as answers:
            await self.client.publish(request.subject, request.data, reply=inbox, timeout=timeout)
            yield answers

    async def next_answer(self, answers: Subscription, patience: Patience) -> Message | None:
        """The next answer of :meth:`asked`; None when the remaining answers are lost and may be requested again.

        Raises:
            RequestTimeout: No answer came for as long as the patience lasts.
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
        """The entries of a paged listing; ``ask`` requests the page at an offset."""
        seen = 0
        while True:
            page, total = await self.run(ask(seen))
            for entry in page:
                yield entry
            seen += len(page)
            if not page or seen >= total:
                return
