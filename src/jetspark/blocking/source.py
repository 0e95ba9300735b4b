"""Where pulled messages arrive, for threads. What to ask for and when is decided in :mod:`jetspark.jetstream.pull`."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable

from jetspark.blocking.context import Context
from jetspark.blocking.stream_message import JetStreamMessage
from jetspark.blocking.transport import Link
from jetspark.blocking.waiter import Waiter
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import BufferFull, ConnectionClosed, JetSparkError
from jetspark.jetstream.acks import NAK
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.pull import LEAVING_S, QUIET_S, Ask, Fetch, Flow, Puller, Wait

__all__ = ["Source"]

_logger = logging.getLogger("jetspark.blocking")

# The system's calls do not take any number for "for ever".
LONGEST_WAIT_S = 3600.0


class Source:
    """One puller with its subscription. The connection's lock guards both."""

    def __init__(
        self,
        context: Context,
        info: ConsumerInfo,
        make_puller: Callable[[str, str], Puller[JetStreamMessage]] = Puller,
    ) -> None:
        link = self._link = context.link
        self._connection = link.connection
        subject = f"{context.api.prefix}.CONSUMER.MSG.NEXT.{info.stream_name}.{info.name}"
        with link.lock:
            _sweep(link)
            inbox = link.new_inbox()
            self.puller = make_puller(inbox, subject)
            reader = _SourceReader(link, self)
            # Bounded by what is asked for; a bound that drops would lose messages until their ack_wait is over.
            self.state = reader.state = link.connection.subscribe(
                f"{inbox}.*",
                is_unbounded=True,
                reader=reader,
                message_class=JetStreamMessage,
                answers_to=subject,
                follows_sessions=True,
            )
        self._has_acks = info.config.ack_policy != "none"
        self._timeout_s = context.timeout_s
        self._waiters: list[Waiter] = []
        self._is_closed = False

    @property
    def session(self) -> int | None:
        connection = self._connection
        return connection.sessions if connection.is_connected else None

    def perform(self, reader: Fetch[JetStreamMessage] | Flow[JetStreamMessage]) -> Wait | int | None:
        """A step of a reader's, with the asking and waiting it wants; returns what step it was."""
        link = self._link
        with link.lock:
            if self.state.pending or self.state.is_finished:
                # Read by another thread, which has not come to passing it on. Were we to wait for the network now, its
                # waking us would go unnoticed.
                self.on_arrival()
            has_asked = False
            try:
                while isinstance(step := reader.step(time.monotonic(), self.session), Ask):
                    has_asked = True
                    self._publish(step, reader.deadline)
                if not isinstance(step, Wait) or (self._is_closed and isinstance(reader, Flow)):
                    return step
                waiter, is_reading = self._prepare_to_wait()
            finally:
                # Only now: the answer is for this thread, if it is the one that reads from here on.
                if has_asked:
                    link.flush()
        if not self._wait(waiter, step.until, is_reading=is_reading):
            with link.lock:
                self.puller.on_time(time.monotonic())
        return step

    def _publish(self, ask: Ask, deadline: float | None) -> None:
        """Ask, unless there is no room for the question until the deadline."""
        connection = self._connection
        try:
            try:
                connection.publish(self.puller.subject, ask.body, ask.reply)
            except BufferFull:
                self._link.when_there_is_room(
                    lambda: connection.publish(self.puller.subject, ask.body, ask.reply), deadline
                )
        except TimeoutError:
            self.puller.take_back(ask)
        except BaseException:
            self.puller.take_back(ask)
            raise

    def _prepare_to_wait(self) -> tuple[Waiter, bool]:
        """With the lock: someone to wake, and whether this thread is the one that reads meanwhile."""
        waiter = Waiter()
        self._waiters.append(waiter)
        return waiter, self._link.take_over()

    def _wait(self, waiter: Waiter, until: float | None, *, is_reading: bool) -> bool:
        """Whether something ended it before its time."""
        latest = time.monotonic() + LONGEST_WAIT_S
        deadline = latest if until is None else min(until, latest)
        try:
            self._link.read_for(waiter, deadline, is_reading=is_reading)
            waiter.wait(deadline - time.monotonic())
            return True
        except TimeoutError:
            return False
        finally:
            with self._link.lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def on_arrival(self) -> None:
        with self._link.lock, self._link.doubt:
            if self.puller.on_replies(self.state, time.monotonic()):
                self._wake()

    def close(self) -> None:
        """Unsubscribe, and say nak to what nobody took."""
        with self._link.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake()
        puller, state = self.puller, self.state
        try:
            # What the server has sent off to us when it hears UNSUB is lost until ack_wait is over; so let it finish.
            give_up_at = time.monotonic() + LEAVING_S
            while puller.owed and self._connection.is_connected and time.monotonic() < give_up_at:
                before = state.received
                with self._link.lock:
                    puller.wake_at = 1
                    waiter, is_reading = self._prepare_to_wait()
                self._wait(waiter, time.monotonic() + QUIET_S, is_reading=is_reading)
                if state.received == before:
                    break
            self._link.drain(state, self._timeout_s)
            self._give_back()
        except ConnectionClosed:
            pass  # by its owner, who knows, or for good, which was told; what nobody took comes after its ack_wait
        except JetSparkError as error:
            _logger.warning("leaving %s: %s", puller.subject, error)
        except BaseException:
            self._leave_at_once()
            raise

    def _leave_at_once(self) -> None:
        """Interrupted while leaving: wait for nothing. What is still on its way comes again after its ack_wait."""
        if self._connection.is_closed:
            return
        self._link.unsubscribe(self.state)
        with self._link.lock:
            replies = self.puller.release() if self._has_acks else []
            try:
                for reply in replies:
                    self._connection.publish_raw(reply, NAK)
            except BufferFull:
                pass  # then these come again after their ack_wait, too
            self._link.wake()

    def leave(self) -> None:
        """Unsubscribe, with nothing to give back: what is on its way is not wanted."""
        self._is_closed = True
        if not self._connection.is_closed:
            self._link.unsubscribe(self.state)

    def _give_back(self) -> None:
        connection = self._connection
        with self._link.lock:
            if self.state.pending:
                self.on_arrival()
            replies = self.puller.release()
            if not self._has_acks or connection.is_closed:
                return
            for reply in replies:
                try:
                    connection.publish_raw(reply, NAK)
                except BufferFull:
                    self._link.when_there_is_room(lambda reply=reply: connection.publish_raw(reply, NAK))  # type: ignore[misc]
            self._link.flush()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set_result(None)


class _SourceReader:
    """The reader of a source's subscription. The connection keeps it, and it must not keep the source: a source that
    nobody uses any more has to go, and its subscription with it."""

    state: SubscriptionState | None = None

    def __init__(self, link: Link, source: Source) -> None:
        self._link = link
        self._source = weakref.ref(source)

    @property
    def is_abandoned(self) -> bool:
        return self._source() is None

    def wake(self) -> None:
        source = self._source()
        if source is not None:
            source.on_arrival()
        elif self.state is not None and not self.state.is_finished:
            self._link.unsubscribe(self.state)

    @property
    def pending_messages(self) -> int:
        source = self._source()
        return len(source.puller.buffer) if source is not None else 0

    def read_up(self, deadline: float) -> bool:
        """A drain does not wait for readers here: what they leave unread is delivered again."""
        return True


def _sweep(link: Link) -> None:
    """End the subscriptions of sources that are gone; a garbage collector tells nobody at a time that would suit."""
    for state in link.connection.subscriptions:
        if isinstance(state.reader, _SourceReader) and state.reader.is_abandoned:
            link.connection.unsubscribe(state)
