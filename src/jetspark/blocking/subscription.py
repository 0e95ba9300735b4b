"""Reading a subscription from a thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Unpack, cast

from jetspark.blocking.finishing import is_interrupt
from jetspark.blocking.message import Message
from jetspark.blocking.transport import Link
from jetspark.blocking.waiter import Changed
from jetspark.core.arguments import function
from jetspark.core.client_base import SubscriptionBase
from jetspark.core.numbers import check_timeout, timeout_of
from jetspark.core.subscription import SubscriptionKind, SubscriptionState
from jetspark.errors import ConnectionClosed, RequestTimeout

__all__ = ["Callback", "Subscription", "SubscriptionReader", "subscribe"]

Callback = Callable[[Message], Any]


def subscribe(
    link: Link, subject: str, queue: str = "", callback: Callback | None = None, **kind: Unpack[SubscriptionKind]
) -> Subscription:
    """Start receiving. ``kind`` is what :meth:`Connection.subscribe` takes beside the subject and the queue."""
    if callback is not None:
        function("callback", callback, "a function that takes a message")
    reader = SubscriptionReader(link)
    try:
        with link.lock, link.doubt:
            reader.state = link.connection.subscribe(subject, queue, reader=reader, **kind)
            link.wake()
            return Subscription(link, reader, callback)
    except BaseException:
        _abandon(link, reader)
        raise


def _abandon(link: Link, reader: SubscriptionReader) -> None:
    """Nobody will read it: the call was interrupted, or refused. It may have been made or not."""
    with link.lock, link.doubt:
        for state in [each for each in link.connection.subscriptions if each.reader is reader]:
            link.connection.unsubscribe(state)
            link.wake()


class SubscriptionReader:
    """What the connection knows of a subscription: who waits for its messages, and who calls back with them."""

    state: SubscriptionState

    def __init__(self, link: Link) -> None:
        self._lock = link.lock
        self.changed = Changed(link.lock)
        self.thread: threading.Thread | None = None

    def wake(self) -> None:
        with self._lock:
            self.changed.notify_all()

    @property
    def pending_messages(self) -> int:
        return len(self.state.pending)

    def read_up(self, deadline: float) -> bool:
        if self.thread is threading.current_thread():
            return True  # a callback that drains: it goes on with what is here when it comes back
        if self.thread is not None:
            self.thread.join(max(0.0, deadline - time.monotonic()))
            return not self.thread.is_alive()
        with self._lock:
            return self.changed.wait_for(lambda: not self.state.pending, deadline - time.monotonic())


class Subscription(SubscriptionBase):
    """Messages on a subject: iterate, or take one with :meth:`next`. Several threads may share the work.

    The guarantees are those of :class:`jetspark.Subscription`.
    """

    def __init__(self, link: Link, reader: SubscriptionReader, callback: Callback | None) -> None:
        self._link, self._lock, self._reader = link, link.lock, reader
        self._state, self._changed = reader.state, reader.changed
        if callback is not None:
            reader.thread = threading.Thread(
                target=self._call_back, args=(callback,), name=f"jetspark-callback-{self.subject}", daemon=True
            )
            reader.thread.start()

    def __iter__(self) -> Iterator[Message]:
        state = self._state
        pending = cast("deque[Message]", state.pending)
        try:
            while True:
                try:
                    message = pending.popleft()  # one step for other threads: no lock
                except IndexError:
                    if not self._wait_for_more():
                        return
                else:
                    yield message
        finally:
            self._reader.wake()  # a drain may wait for us

    def _wait_for_more(self) -> bool:
        state = self._state
        with self._lock:
            self._changed.wait_for(lambda: state.pending or state.is_finished)
            if not state.pending and state.error is not None:
                raise state.error
            return bool(state.pending)

    def next(self, timeout: float | None = None) -> Message:
        """The next message.

        Raises:
            RequestTimeout: None came within ``timeout`` seconds (None waits for ever).
            ConnectionClosed: The subscription is over and everything was read.
        """
        check_timeout(timeout)
        state = self._state
        with self._lock:
            if not self._changed.wait_for(lambda: state.pending or state.is_finished, timeout):
                raise RequestTimeout(f"next message on {state.subject!r}", timeout or 0)
            if state.pending:
                message = cast(Message, state.take())
                if state.is_finished and not state.pending:
                    self._changed.notify_all()  # a drain may wait for this
                return message
            raise state.error or ConnectionClosed(f"the subscription to {state.subject!r} is over")

    def unsubscribe(self, max_messages: int = 0) -> None:
        """End now, or when ``max_messages`` have been received in all. Messages received so far can still be read."""
        self._link.unsubscribe(self._state, max_messages)

    def drain(self, timeout: float | None = None) -> None:
        """End without losing anything: the server stops sending, then the readers finish what is here.

        Should the session end first, no more comes either: messages on their way are lost with it.

        Raises:
            RequestTimeout: The readers did not finish in time.
        """
        timeout = timeout_of(timeout, self._link.connection.options.drain_timeout_s)
        deadline = time.monotonic() + timeout
        self._link.drain(self._state, timeout)
        if not self._reader.read_up(deadline):
            raise RequestTimeout(f"drain of {self.subject!r}, {self.pending_messages} messages unread", timeout)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.unsubscribe()
        except BaseException as error:
            if is_interrupt(error):
                self.unsubscribe()  # nobody else will: many of these are inside of one call
            raise

    def _call_back(self, callback: Callback) -> None:
        try:
            for message in self:
                try:
                    callback(message)
                except Exception as error:
                    self._link.report(error)
        except Exception as error:
            self._link.report(error)
