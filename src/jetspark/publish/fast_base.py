"""The part of both drivers' fast batches and publishers that does not wait: facts, callbacks, sending, leaving.

With threads, the caller holds the transport's lock, unless a docstring says that the method takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Self

from jetspark.core.connection import Connection
from jetspark.core.driver_base import PacedRunnerBase
from jetspark.core.transport import WRITE_AT_BYTES, DriverTransport
from jetspark.errors import BufferFull, JetSparkError, UsageError
from jetspark.jetstream.info import PubAck
from jetspark.publish.block import Block
from jetspark.publish.fast_batch import FastMachine
from jetspark.publish.fast_options import Refusal
from jetspark.publish.fast_publisher import FastPublisherMachine
from jetspark.publish.outgoing import Item

__all__ = ["FastBatchBase", "FastPublisherBase"]


class FastBatchBase(Block):
    """A fast batch without the waiting."""

    _batch: FastMachine
    _runner: PacedRunnerBase[FastMachine]
    _transport: DriverTransport
    _now: Callable[[], float]
    _logger: logging.Logger

    @property
    def id(self) -> str:
        """Empty before the first message, unless the caller chose an id."""
        return self._batch.inbox.batch_id

    @property
    def sequence(self) -> int:
        """Number of messages added."""
        return self._batch.messages

    @property
    def acknowledged(self) -> int:
        """The server has processed all messages up to this one; in mode ``"fail"`` they are stored."""
        return self._batch.acknowledged

    @property
    def stored(self) -> int:
        """Number of messages stored for sure; in mode ``"ok"`` known only at the end, and without those in ``doubts``.

        In mode ``"ok"`` the server's own count, ``ack.batch_size``, is the number of messages sent.
        """
        return self._batch.stored

    @property
    def flow(self) -> int:
        """The server's present pace: messages for each acknowledgement."""
        return self._batch.sender.msgs_per_ack

    @property
    def gaps(self) -> list[range]:
        """Sequences lost on the way, without repetition; counted from 1, in the order of adding."""
        return list(self._batch.losses.gaps)

    @property
    def errors(self) -> list[Refusal]:
        """Messages refused by the server, without repetition; a message is never in both ``errors`` and ``gaps``."""
        return list(self._batch.losses.errors)

    @property
    def doubts(self) -> list[range]:
        """Mode ``"ok"``: sequences that may or may not be stored; most of them are.

        Empty unless the connection was lost while messages were on their way. The server reports a loss or a refusal
        once, and does not repeat a report that was sent into the lost connection. So ``doubts`` has the messages
        without an acknowledgement at that moment, except those reported in ``gaps`` or ``errors`` since. Publish them
        again with the same message ids, and each is stored once; without ids, choose between missing and doubled
        messages.
        """
        return list(self._batch.losses.doubts)

    @property
    def ack(self) -> PubAck:
        """The final acknowledgement, whether the batch was committed or ended by the server.

        Raises:
            UsageError: The batch is still open or empty, or the server did not answer.
        """
        if self._batch.ack is None:
            raise UsageError("the batch has no final acknowledgement: it is open, empty, or was not answered")
        return self._batch.ack

    @property
    def last_sequence(self) -> int:
        """The stream sequence of the last message stored, by the final acknowledgement; 0 without one."""
        return self._batch.ack.sequence if self._batch.ack is not None else 0

    def _on_step(self) -> None:
        if self._batch.is_ended:
            self._runner.detach()

    def _report_news(self) -> None:
        """Call ``on_gap`` and ``on_error`` for new losses; takes the lock."""
        if self._batch.losses.news:
            with self._transport.lock:
                news, self._batch.losses.news = self._batch.losses.news, []
            for entry in news:
                if isinstance(entry, range):
                    _call(self._batch.options.on_gap, entry, self._logger)
                else:
                    _call(self._batch.options.on_error, entry, self._logger)

    def _abandon(self) -> None:
        """End the batch at the server without waiting; takes the lock."""
        with self._transport.lock:
            self._batch.abandon(self._now())
            self._runner.drop_inbox()
            self._runner.after_step()


class FastPublisherBase(Block):
    """A fast publisher without the waiting."""

    _publisher: FastPublisherMachine
    _runner: PacedRunnerBase[FastPublisherMachine]
    _transport: DriverTransport
    _connection: Connection
    _now: Callable[[], float]
    _logger: logging.Logger
    _waits_for_room = False

    def published(self) -> int:
        """The position up to which all messages are stored (or were passed to ``on_refused``); it never decreases."""
        return self._publisher.stages.published

    @property
    def accepted(self) -> int:
        """Position of the last message accepted, counted from 1."""
        return self._publisher.stages.accepted

    @property
    def failure(self) -> Exception | None:
        """The reason for giving up; None while it works."""
        return self._publisher.failure

    @property
    def pending(self) -> int:
        """Number of messages accepted and not known to be stored."""
        return self._publisher.stages.pending

    @property
    def possibly_doubled(self) -> int:
        """Messages without an id that were sent again although they may have been stored."""
        return self._publisher.possibly_doubled

    @property
    def batches(self) -> int:
        """Number of batches so far."""
        return self._publisher.batches

    def unpublished(self) -> list[Item]:
        """The messages that are not known to be stored, in order; save them after a failure.

        Once the publisher gave up or was left, the list does not change any more. Its first messages may be stored all
        the same, because they were on their way.
        """
        return self._publisher.stages.unpublished()

    def _enter(self) -> Self:
        super()._enter()
        with self._transport.lock:
            self._runner.attach()
        return self

    def _pump(self) -> None:
        """Send the messages that the server wants next, as far as there is room."""
        try:
            while self._publisher.pump(self._now()):
                # In parts: the server mostly acknowledges whole windows, and then waits for the first message of the
                # next.
                if self._connection.out_bytes >= WRITE_AT_BYTES // 2:
                    self._transport.flush()
        except BufferFull:
            if not self._waits_for_room:
                self._waits_for_room = True
                self._transport.call_when_there_is_room(self._on_room)
        except JetSparkError as error:  # such as a connection that was closed in the meantime
            self._publisher.fail(error)
        except BaseException as error:
            self._runner.on_interrupt(error)
            raise
        if self._connection.out_bytes >= WRITE_AT_BYTES:
            self._transport.flush()
        elif self._connection.out_bytes and not self._transport.flush_is_scheduled:
            self._transport.flush_soon()
        if self._runner.due_at is None:
            self._runner.watch_clock()

    def _on_room(self) -> None:
        """Continue after a wait for room; takes the lock."""
        self._waits_for_room = False
        with self._transport.lock:
            self._runner.after_step()

    def _report_news(self) -> None:
        """Call ``on_refused`` for new refusals, and log possible duplicates. Without the lock."""
        machine = self._publisher
        if not machine.news and not machine.doubled_news:
            return
        news, machine.news = machine.news, []
        doubled, machine.doubled_news = machine.doubled_news, 0
        for entry in news:
            _call(machine.options.on_refused, entry, self._logger)
        if doubled:
            self._logger.warning(
                "fast publisher: %d messages sent again may be stored twice; message_ids=True avoids duplicates",
                doubled,
            )

    def _leave(self) -> None:
        """Send nothing more, and wake waiting callers; takes the lock."""
        with self._transport.lock:
            self._publisher.abandon(self._now())
            self._runner.drop_inbox()
            self._runner.after_step()
            self._runner.detach()


def _call(callback: Callable[[Any], None] | None, entry: object, logger: logging.Logger) -> None:
    if callback is None:
        return
    try:
        callback(entry)
    except Exception:
        logger.exception("the callback for %r raised; publishing continues", entry)
