# Generated from aio/subscription.py by tools/unasync.py; edit that file.
"""Reading a subscription from threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar, Unpack, cast

from jetspark.blocking.callbacks import Callback, CallbackRunner, call
from jetspark.blocking.completion import is_interrupt
from jetspark.blocking.message import Message
from jetspark.blocking.transport import Transport
from jetspark.blocking.transport_calls import drain
from jetspark.blocking.waiter import Changed
from jetspark.core.arguments import function
from jetspark.core.driver_base import SubscriptionBase, SubscriptionReaderBase
from jetspark.core.numbers import check_timeout, timeout_of
from jetspark.core.subscription import SubscriptionKind
from jetspark.core.transport import drop_reader, unsubscribe
from jetspark.errors import ConnectionClosed, RequestTimeout

__all__ = ["Callback", "Subscription", "SubscriptionReader", "next_some", "subscribe"]

T = TypeVar("T")


def subscribe(
    transport: Transport,
    subject: str,
    queue: str = "",
    callback: Callback | None = None,
    direct: Callable[[Message], None] | None = None,
    **kind: Unpack[SubscriptionKind],
) -> Subscription:
    """Start receiving; ``direct`` is called while the connection reads. ``kind``: see :meth:`Connection.subscribe`."""
    if callback is not None:
        function("callback", callback, "a function that takes a message")
    transport.check_caller()
    reader = SubscriptionReader(transport)
    reader.direct = direct
    try:
        with transport.lock, transport.doubt:
            reader.state = transport.connection.subscribe(subject, queue, reader=reader, **kind)
            transport.flush_soon()
            return Subscription(transport, reader, callback)
    except BaseException:
        drop_reader(transport, reader)
        raise


def next_some(subscription: Subscription, timeout: float | None) -> list[Message]:
    """Return all received messages, at least one. Not public: an interrupt may lose them all, ``next`` loses one."""
    return cast("list[Message]", subscription._taken(subscription._state.take_all, timeout))


class SubscriptionReader(SubscriptionReaderBase):
    """The connection's view of a subscription: the waiting readers, and the runner of its callback."""

    changed: Changed
    callback_runner: CallbackRunner | None = None

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport, Changed(transport.lock))

    def read_up(self, deadline: float) -> bool:
        if self.callback_runner is not None:
            return self.callback_runner.join(deadline)
        with self._transport.lock:
            return self.changed.wait_for(lambda: not self.state.pending, deadline - self._transport.now())


class Subscription(SubscriptionBase):
    """Messages on a subject: iterate with ``for``, or take one with :meth:`next`. Several threads may share them.

    Delivery is at most once: a message arrives if the client is connected and subscribed when it is published. Messages
    beyond the bounds of unread messages are dropped, counted in ``dropped`` and reported as
    :class:`~jetspark.SlowConsumer`. Iteration ends after ``unsubscribe``, ``drain`` or ``close``; it raises
    :class:`~jetspark.PermissionDenied` when the server did not allow the subscription.
    """

    def __init__(self, transport: Transport, reader: SubscriptionReader, callback: Callback | None) -> None:
        self._transport, self._reader = transport, reader
        self._state, self._changed = reader.state, reader.changed
        if callback is not None:
            calling_back = partial(self._call_back, callback)
            reader.callback_runner = CallbackRunner(transport, calling_back, f"jetspark-callback-{self.subject}")

    def __iter__(self) -> Iterator[Message]:
        return self._iterate()

    def _iterate(self) -> Iterator[Message]:
        take = cast("deque[Message]", self._state.pending).popleft
        try:
            while True:
                try:
                    message = take()  # one step for other threads: no lock
                except IndexError:
                    if not self._wait_for_more():
                        return
                else:
                    yield message
                    del message  # keep no reference to a handled message while waiting
        finally:
            self._reader.wake()  # a drain may wait for us

    def _wait_for_more(self) -> bool:
        state = self._state
        with self._transport.lock:
            while not state.pending and not state.is_finished:
                self._changed.wait()
            if not state.pending and state.error is not None:
                raise state.error
            return bool(state.pending)

    def next(self, timeout: float | None = None) -> Message:
        """The next message.

        Raises:
            RequestTimeout: No message came within ``timeout`` seconds (None waits without a limit).
            ConnectionClosed: The subscription has ended and all its messages were read.
        """
        return cast(Message, self._taken(self._state.take, timeout))

    def _taken(self, take: Callable[[], T], timeout: float | None) -> T:
        state, changed = self._state, self._changed
        check_timeout(timeout)
        with self._transport.lock:
            if not state.pending and not changed.wait_for(self._is_readable, timeout):
                raise RequestTimeout(f"next message on {state.subject!r}", timeout or 0)
            if not state.pending:
                raise state.error or ConnectionClosed(f"the subscription to {state.subject!r} is over")
            taken = take()
            if state.is_finished and not state.pending:
                changed.notify_all()  # a drain may wait for this
            return taken

    def unsubscribe(self, max_messages: int = 0) -> None:
        """End the subscription now, or after ``max_messages`` in total. Messages received so far remain readable."""
        unsubscribe(self._transport, self._state, max_messages)

    def drain(self, timeout: float | None = None) -> None:
        """End without losing messages: the server stops sending, then the reader finishes the received ones.

        If the session ends first, messages in transit are lost with it.

        Raises:
            RequestTimeout: The reader did not finish in time.
        """
        timeout = timeout_of(timeout, self._transport.connection.options.drain_timeout_s)
        deadline = self._transport.deadline(timeout)
        try:
            drain(self._transport, self._state, timeout)
            is_read = self._reader.read_up(deadline)
        except RequestTimeout:
            is_read = False
        if not is_read:
            raise RequestTimeout(f"drain of {self.subject!r}, {self.pending_messages} messages unread", timeout)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.unsubscribe()
        except BaseException as error:
            if is_interrupt(error):
                self.unsubscribe()  # no later call would: many subscriptions live within one call
            raise

    def _call_back(self, callback: Callback) -> None:
        try:
            for message in self:
                try:
                    call(callback, message)
                except Exception as error:
                    self._transport.dispatcher.report(error)
        except Exception as error:
            self._transport.dispatcher.report(error)
