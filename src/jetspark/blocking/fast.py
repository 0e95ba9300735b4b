"""Fast ingest from threads. ``fast`` and ``fast_publisher`` of :mod:`jetspark.publish` decide; this adds
waiting.

The link's lock guards the machine. Time is watched by the thread that waits, and while none does by the connection's
own (see ``Link.watch``): a batch must be kept alive while its producer thinks.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Self

from jetspark.blocking.context import Context
from jetspark.blocking.transport import WRITE_AT_BYTES
from jetspark.blocking.waiter import Changed
from jetspark.core.events import ConnectionEvent
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import check_timeout
from jetspark.errors import BufferFull, JetSparkError, RequestTimeout, UsageError
from jetspark.jetstream.features import FAST_INGEST
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.publishing import Expect, publish_headers
from jetspark.publish.block import Block
from jetspark.publish.fast import FastMachine
from jetspark.publish.fast_base import FastBatchBase, FastPublisherBase
from jetspark.publish.fast_options import FastBatchOptions, FastReceipt
from jetspark.publish.fast_publisher import FastPublisherMachine, FastPublisherOptions
from jetspark.publish.outgoing import CHUNK_BYTES, CHUNK_MESSAGES, Item, take

__all__ = ["FastBatch", "FastPublisher"]

# A full connection buffer is looked at again after this long by those who cannot wait for it.
ROOM_POLL_S = 0.01


class _Paced(Block, ABC):
    """What a batch and a publisher have in common: a block, and a machine that is woken by answers, events and time."""

    _paced: FastMachine | FastPublisherMachine
    _logger = logging.getLogger("jetspark.blocking")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._connection, self._link = context.connection, context.link
        self._changed = Changed(context.link.lock)

    def __enter__(self) -> Self:
        # Asks only where it is not known yet: an old server would store the first message, and not know what it is.
        self._context.run(self._context.api.require(FAST_INGEST))
        return self._enter()

    def _wake(self) -> None:
        """The server said something."""
        with self._link.lock:
            self._step(self._paced.on_replies, time.monotonic())
        self._tell_news()

    def _on_event(self, event: ConnectionEvent) -> None:
        with self._link.lock:
            self._step(partial(self._paced.on_event, event), time.monotonic())
        self._tell_news()

    def _next_deadline(self) -> float | None:
        """For the connection's thread."""
        return self._paced.next_deadline()

    def _on_clock(self, now: float) -> None:
        """For the connection's thread."""
        self._step(self._paced.on_time, now)

    def _step(self, step: Callable[[float], None], now: float) -> None:
        """With the lock."""
        try:
            step(now)
        except Exception as error:  # a mistake of ours: nobody must wait for what never comes
            self._paced.fail(error)
            raise
        except BaseException as error:
            self._on_interrupt(error)
            raise
        finally:
            self._settle()

    def _on_interrupt(self, error: BaseException) -> None:
        """A call into the machine did not return. If it was interrupted half-way, the machine is not used any more, and
        the session is given up: what the two know of each other may differ. With the lock."""
        self._link.doubt.after(error)
        if not isinstance(error, Exception):
            self._paced.fail(UsageError(f"it was interrupted by {type(error).__name__}; begin another one"))
            self._drop_inbox()
            self._stop_listening()

    def _settle(self) -> None:
        """After every call into the machine, with the lock."""
        self._changed.notify_all()
        if self._paced.failure is not None:
            self._link.room.notify_all()  # those who wait for the connection, and not for the machine
        if self._connection.out_bytes:
            self._link.flush_soon()

    @abstractmethod
    def _tell_news(self) -> None:
        """Call back, without the lock."""

    def _listen(self) -> None:
        if self._on_event not in self._context.listeners:
            self._context.listeners.append(self._on_event)
        self._link.watch(self)

    def _stop_listening(self) -> None:
        self._link.unwatch(self)
        if self._on_event in self._context.listeners:
            self._context.listeners.remove(self._on_event)

    def _wait(self, deadline: float | None = None) -> None:
        """Until something has changed, or the deadline; with the lock, which is given up meanwhile."""
        self._link.check_may_wait("fast ingest")
        self._link.flush()
        own = self._next_deadline()
        times = [each for each in (own, deadline) if each is not None]
        now = time.monotonic()
        if not self._changed.wait(max(0.0, min(times) - now) if times else None):
            self._step(self._paced.on_time, time.monotonic())

    def _sent(self, send: Callable[[float], None]) -> None:
        """Hand messages to the connection when it takes them, with the lock: this never raises ``BufferFull``.

        ``send`` is told the time at which it does; what ages counts from there.
        """
        deadline: float | None = None
        while True:
            try:
                send(time.monotonic())
                break
            except BufferFull:
                self._link.flush()
                if deadline is None:
                    deadline = time.monotonic() + self._paced.room_timeout_s
                self._wait_for_room(deadline)
                self._paced.check()  # it may be over meanwhile
            except BaseException as error:
                self._on_interrupt(error)
                raise
        if self._connection.out_bytes >= WRITE_AT_BYTES:
            self._push()
        else:
            self._link.flush_soon()

    def _wait_for_room(self, deadline: float) -> None:
        """Until the connection may take more, or it is time to look again; at the deadline the machine gives up."""
        self._link.room.wait(ROOM_POLL_S)
        now = time.monotonic()
        if now >= deadline:
            self._step(self._paced.on_no_room, now)

    def _push(self) -> None:
        """Write now; wait while the network takes no more, unless the machine gives up meanwhile. With the lock."""
        try:
            self._link.make_room(time.monotonic() + self._paced.room_timeout_s, self._has_failed)
        except TimeoutError:
            self._step(self._paced.on_no_room, time.monotonic())

    def _has_failed(self) -> bool:
        return self._paced.failure is not None

    def _drop_inbox(self) -> None:
        """An interrupt within ``subscribe`` leaves a subscription that the machine does not know; with the lock."""
        for state in [each for each in self._connection.subscriptions if each.handle is self]:
            self._connection.unsubscribe(state)

    # ---- what draining a connection asks of every reader -------------------------------------------------------

    @property
    def pending_messages(self) -> int:
        return 0

    def _read_up(self, deadline: float) -> bool:
        """Answers are read as they come."""
        return True


class FastBatch(_Paced, FastBatchBase):
    """One batch of any length, paced by the server. Make one with ``js.fast_batch()``.

    The guarantees are those of :class:`jetspark.aio.fast.FastBatch`, ``gaps``, ``errors`` and ``doubts`` included; any
    thread may add.
    """

    _line = "with js.fast_batch() as fast:"

    def __init__(self, context: Context, options: FastBatchOptions) -> None:
        super().__init__(context)
        self._paced = self._batch = FastMachine(self._connection, self, options)
        self._opener: threading.Thread | None = None
        """Whose message opens the batch. Others wait for what becomes of it."""

    def add(
        self,
        subject: str,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
    ) -> FastReceipt:
        """Send a message, as soon as the server wants it; waits while enough others are to be sent before.

        Raises:
            BatchCutShort, BatchInDoubt: The batch is over.
            ServerError: It was refused from the start: nothing is stored.
            JetStreamUnavailable: Nobody listens to the first message: nothing is stored.
            UsageError: Outside of its block; nothing is sent.
            InvalidSubject, InvalidHeader, PayloadTooLarge, ConfigError: The message cannot be sent; the batch goes on.
        """
        batch = self._batch
        item: Item = (subject, data)
        if headers is not None or msg_id is not None or expect is not None or ttl is not None:
            item = (subject, data, publish_headers(headers, msg_id, expect, ttl))
        with self._link.lock:
            if batch.sequence >= batch.limit and self._open_or_wait(item):
                return FastReceipt(1, batch.acknowledged)
            self._sent(partial(batch.add, item))
            return FastReceipt(batch.sequence, batch.acknowledged)

    def add_many(self, items: Iterable[Item], *, commit: bool = False) -> FastReceipt:
        """Send many messages: (subject, data) or (subject, data, headers) each. The fastest way.

        Memory does not grow with their number. With ``commit`` the last one ends the batch, which is the form that
        survives a change of leader best. When this raises, ``sequence`` tells how many were added; the iterable may
        have been read up to 500 messages further.
        """
        iterator = iter(items)
        if commit:
            self._add_and_commit(iterator)
        else:
            self._add_all(iterator)
        return FastReceipt(self.sequence, self.acknowledged)

    def _add_all(self, iterator: Iterator[Item]) -> None:
        # The lock is not held while the caller's iterator works: it may want to use the connection, too. So what it
        # gives is taken first, and placed in the batch when the lock is held again.
        while True:
            chunk: list[Item] = []
            try:
                take(iterator, chunk, min(max(self._batch.room, 1), CHUNK_MESSAGES), CHUNK_BYTES)
            finally:
                self._add_chunk(chunk)  # it has what the iterator gave before it failed
            if not chunk:
                return

    def _add_and_commit(self, iterator: Iterator[Item]) -> None:
        held: list[Item] = []  # the last one so far, which may have to be sent as the commit
        while True:
            count = min(max(self._batch.room, 1), CHUNK_MESSAGES)
            chunk, held = held, []
            before = len(chunk)
            try:
                take(iterator, chunk, count, CHUNK_BYTES)
            except BaseException:
                self._add_chunk(chunk)  # it has what the iterator gave before it failed
                raise
            is_last = len(chunk) == before
            if chunk:
                held = [chunk.pop()]
            self._add_chunk(chunk)
            if is_last:
                break
        if held:
            self._commit(held[0])
        elif self.sequence:
            self.commit()

    def _add_chunk(self, chunk: list[Item]) -> None:
        batch = self._batch
        with self._link.lock:
            while chunk:
                room = batch.room
                if room == 0:
                    if self._open_or_wait(chunk[0]):
                        chunk = chunk[1:]
                    continue
                part, chunk = chunk[:room], chunk[room:]
                self._sent(partial(batch.add_many, part))

    def ping(self) -> None:
        """Ask the server where the batch stands. It is done by itself where needed; this is for the impatient."""
        with self._link.lock:
            self._batch.check()
            self._batch.ping(time.monotonic())
            self._link.flush_soon()

    def commit(
        self,
        subject: str | None = None,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
    ) -> PubAck:
        """End the batch, with a last message or without, and return the final acknowledgement.

        Raises:
            BatchCutShort, BatchInDoubt: Not everything is stored, or nobody knows.
        """
        item: Item | None = None
        if subject is not None:
            item = (subject, data, publish_headers(headers, msg_id, expect, ttl))
        return self._commit(item)

    def _commit(self, item: Item | None) -> PubAck:
        batch = self._batch
        with self._link.lock:
            batch.check()
            if item is not None:
                if not (batch.is_new and self._begin(item, is_only=True)):
                    self._until_open()
                    self._sent(partial(batch.commit, item))
            elif batch.sequence:
                self._until_open()
                self._sent(batch.end)
            else:
                raise UsageError("nothing was added: there is nothing to commit")
            while not batch.is_ended:
                self._wait()
        self._tell_news()
        if batch.failure is not None:
            batch.check()
        assert batch.ack is not None
        return batch.ack

    def _open_or_wait(self, item: Item) -> bool:
        """There is no room. True when the batch had not begun, and began with this message."""
        batch = self._batch
        while batch.room == 0:
            batch.check()
            if not batch.is_new or self._opener is not None:
                self._wait()
            elif self._begin(item):
                return True
        return False

    def _begin(self, item: Item, *, is_only: bool = False) -> bool:
        """Open the batch with this message; False when another one has meanwhile."""
        self._check_inside()
        batch = self._batch
        while self._opener is not None:
            self._wait()
        has_begun = False
        self._opener = threading.current_thread()
        try:
            while batch.is_new:  # again, when there is no leader for the moment: then nothing was stored
                if batch.reopen_at is not None:
                    self._changed.wait(max(0.0, batch.reopen_at - time.monotonic()))
                self._listen()
                self._sent(partial(batch.start, item, is_only=is_only))
                has_begun = True
                while batch.is_opening:
                    self._wait()
        finally:
            self._opener = None
            self._changed.notify_all()
        if has_begun and batch.failure is not None:
            batch.check()
        return has_begun

    def _until_open(self) -> None:
        while self._batch.is_opening:
            self._wait()
        self._batch.check()

    def _settle(self) -> None:
        super()._settle()
        if self._batch.is_ended:
            self._stop_listening()

    def _tell_news(self) -> None:
        with self._link.lock:
            news, self._batch.news = self._batch.news, []
        self._tell(news)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        batch = self._batch
        try:
            if kind is not None:
                self._abandon()
            elif batch.failure is not None:
                batch.check()
            elif batch.sequence and not batch.is_ended:
                self.commit()
        except BaseException:
            if not batch.is_ended:  # interrupted: nobody will end it
                self._abandon()
            raise
        finally:
            self._leave_block()

    def _abandon(self) -> None:
        with self._link.lock:
            self._batch.abandon(time.monotonic())
            self._drop_inbox()
            self._settle()


class FastPublisher(_Paced, FastPublisherBase):
    """Stores an endless stream of messages, in order, over as many fast batches as it takes.

    Make one with ``js.fast_publisher()``. The guarantees are those of :class:`jetspark.aio.fast.FastPublisher`; any
    thread may publish.
    """

    _line = "with js.fast_publisher() as publisher:"

    def __init__(self, context: Context, options: FastPublisherOptions) -> None:
        super().__init__(context)
        self._paced = self._endless = FastPublisherMachine(self._connection, self, options, now=time.monotonic())
        self._pump_at: float | None = None

    def _enter(self) -> Self:
        super()._enter()
        with self._link.lock:
            self._listen()
        return self

    def publish(
        self,
        subject: str,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
    ) -> int:
        """Accept a message and return its position; waits while too much is pending.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: It was not accepted.
            UsageError: Outside of its block, or after ``close``; it was not accepted.
            JetStreamUnavailable: Nobody listens to the first message: nothing is stored.
            JetSparkError: The publisher gave up; it was not accepted. ``unpublished()`` has what was.
        """
        checked = publish_headers(headers, msg_id, expect, ttl)
        with self._link.lock:
            self._until_there_is_room()
            self._endless.accept([(subject, data) if checked is None else (subject, data, checked)], time.monotonic())
            position = self._endless.accepted
            self._pump()
            if self._connection.out_bytes >= WRITE_AT_BYTES:
                self._push()
        return position

    def publish_many(self, items: Iterable[Item]) -> int:
        """Accept many messages, (subject, data) or (subject, data, headers) each; returns the last position.

        When this raises because one of them cannot be sent, those before it are accepted, as ``accepted`` tells; the
        iterable may have been read up to 500 messages further.

        Raises:
            BatchInDoubt: The publisher gave up after ``patience_s`` without an answer; ``unpublished()`` has the rest.
            InvalidSubject, InvalidHeader, PayloadTooLarge, UsageError, JetSparkError: As :meth:`publish`.
        """
        iterator = iter(items)
        while True:
            with self._link.lock:
                self._until_there_is_room()
                count = min(self._endless.room, CHUNK_MESSAGES)
            chunk: list[Item] = []
            try:
                take(iterator, chunk, count, min(CHUNK_BYTES, self._endless.room_bytes))
            finally:
                with self._link.lock:
                    self._endless.accept(chunk, time.monotonic())
                    self._pump()
                    if self._connection.out_bytes >= WRITE_AT_BYTES:
                        self._push()
            if not chunk:
                return self.accepted

    def _until_there_is_room(self) -> None:
        endless = self._endless
        endless.check()
        if self._place != "inside":
            self._check_inside()
        while endless.room == 0:
            self._wait()
            endless.check()

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted so far is stored.

        The present batch is ended for that: only its end tells. So flush now and then, not after each message.

        Raises:
            RequestTimeout: It took longer than ``timeout`` seconds; nothing is lost, and it goes on.
            JetSparkError: The publisher gave up.
        """
        check_timeout(timeout)
        endless = self._endless
        with self._link.lock:
            position = endless.flush()
            self._until(lambda: endless.published >= position, timeout)

    def wait_published(self, position: int, timeout: float | None = None, *, linger_s: float = 0.0) -> None:
        """Return when everything up to a position is stored; :meth:`publish` and :meth:`publish_many` return positions.

        Where :meth:`flush` ends the present batch at once, this does so only when nothing was published for
        ``linger_s`` seconds: while others publish, the acknowledgements they bring along tell, and the batch stays
        open.

        Raises:
            RequestTimeout: It took longer than ``timeout`` seconds; nothing is lost, and it goes on.
            JetSparkError: The publisher gave up.
        """
        check_timeout(timeout)
        endless = self._endless
        with self._link.lock:
            endless.want(position, time.monotonic(), linger_s)
            self._until(lambda: endless.published >= position, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Store everything, end the batch, accept nothing more; after an error, send nothing more either.

        Raises:
            RequestTimeout: Some is not known to be stored within ``timeout`` seconds; ``unpublished()`` has it.
            JetSparkError: The publisher gave up; likewise.
        """
        check_timeout(timeout)
        endless = self._endless
        with self._link.lock:
            endless.close()
            try:
                self._until(lambda: endless.is_idle, timeout)
            finally:
                self._leave()
        self._tell_news()

    def _until(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._pump()
        while not is_done():
            if self._endless.failure is not None:
                raise self._endless.failure.with_traceback(None)
            if deadline is not None and time.monotonic() >= deadline:
                raise RequestTimeout(f"{self._endless.pending} messages to be stored", timeout or 0)
            self._wait(deadline)

    def _next_deadline(self) -> float | None:
        deadline = super()._next_deadline()
        if self._pump_at is None:
            return deadline
        return self._pump_at if deadline is None else min(deadline, self._pump_at)

    def _settle(self) -> None:
        self._pump()
        super()._settle()

    def _pump(self) -> None:
        self._pump_at = None
        try:
            while self._endless.pump(time.monotonic()):
                pass
        except BufferFull:
            self._pump_at = time.monotonic() + ROOM_POLL_S
            self._link.watch(self)
        except JetSparkError as error:  # the connection was closed meanwhile
            self._endless.fail(error)
        except BaseException as error:
            self._on_interrupt(error)
            raise
        if self._connection.out_bytes:
            self._link.flush_soon()

    def _tell_news(self) -> None:
        if self._endless.news or self._endless.doubled_news:
            self._tell()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            try:
                if not self._endless.is_left:  # else the caller was told what became of it
                    self.close()
            except BaseException:  # an interrupt may come while it is left, too
                self._leave_surely()
                raise
            return
        try:
            if issubclass(kind, Exception):
                self.close()  # what was accepted was accepted, whatever happened since
        except JetSparkError as failure:
            self._logger.warning("%s; %d messages are not stored", failure, self._endless.pending)
        finally:
            self._leave_surely()

    def _leave_surely(self) -> None:
        with self._link.lock:
            try:
                self._leave()
            finally:  # An interrupt can be in the way of one of them; after the first, the second has nothing to do.
                self._leave()

    def _leave(self) -> None:
        """Send nothing more, and wake those who wait; with the lock."""
        self._endless.abandon(time.monotonic())
        self._drop_inbox()
        self._settle()
        self._stop_listening()
