# Generated from aio/atomic.py by tools/unasync.py; edit that file.
"""Atomic batches from threads. Decisions are made in :mod:`jetspark.publish.atomic`; this adds waiting."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

from jetspark.blocking import clock
from jetspark.blocking.context import DriverContext
from jetspark.blocking.transport_calls import admit
from jetspark.core.arguments import iterate
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import timeout_of
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.publishing import Expect, publish_headers
from jetspark.publish.atomic import AtomicBatchBase, AtomicMachine, Outcome
from jetspark.publish.block import Block
from jetspark.publish.outgoing import plain

__all__ = ["AtomicBatch"]


class AtomicBatch(AtomicBatchBase, Block):
    """Messages that are stored together or not at all; see :meth:`JetStream.atomic_batch`.

    Leaving the block commits; leaving it by an exception stores nothing. Make one call at a time, because the messages
    of a batch are ordered. Every error states the outcome of the batch, and so does ``outcome``. After a refusal
    (``ServerError``, ``JetStreamUnavailable``) nothing is stored. After :class:`~jetspark.BatchInDoubt`, or when the
    commit was interrupted, the outcome is unknown until :meth:`resolve` reads it from the stream. A message refused
    before it is sent (``ConfigError``) leaves the batch unchanged.
    """

    _line = "with js.atomic_batch() as batch:"

    def __init__(
        self,
        context: DriverContext,
        batch_id: str | None = None,
        *,
        ack_first: bool = True,
        ack_every: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self._context = context
        self._timeout_s = timeout_of(timeout, context.timeout_s)
        self._began = time.monotonic(), time.time()
        self._machine = AtomicMachine(
            context.connection,
            context.api,
            f"{clock.rng().getrandbits(128):032x}" if batch_id is None else batch_id,
            ack_first=ack_first,
            ack_every=ack_every,
            timeout_s=self._timeout_s,
            jitter=clock.rng().random,
        )

    def add(
        self,
        subject: str,
        data: bytes = b"",
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        ttl: float | None = None,
        headers: HeadersLike | None = None,
    ) -> None:
        """Add a message. It takes the options of :meth:`JetStream.publish`; the server checks them at the commit.

        Raises:
            ConfigError: The message cannot be part of this batch, which continues without it.
            ServerError: The server rejected the batch: nothing is stored.
            RequestTimeout: No acknowledgement (where one was requested) or no room in the send buffer within
                ``timeout``: nothing is stored.
            UsageError: The batch has ended, and the message says how; or its block has not been entered.
        """
        self._check_begun()
        machine = self._machine
        fields = publish_headers(headers, msg_id, expect, ttl)
        if machine.wants_ack:
            self._context.run(machine.ask(subject, data, fields), self._timeout_s, for_each=True)
            return
        try:
            admit(self._context.transport, functools.partial(machine.add, subject, data, fields), self._timeout_s)
        except TimeoutError:
            raise machine.give_up(self._timeout_s) from None

    def add_many(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Add many messages, each a ``(subject, data)`` pair; faster than repeated :meth:`add`.

        It raises the errors of :meth:`add`. The messages before the failing one are in the batch.
        """
        self._check_begun()
        machine = self._machine
        waiting = iterate("messages", messages, "messages, each (subject, data)")
        while True:
            if machine.wants_ack:
                for message in waiting:
                    self.add(*plain(message))
                    break
                else:
                    return
            pack = machine.pack(waiting)
            try:
                admit(self._context.transport, functools.partial(machine.send, pack), self._timeout_s, at_once=True)
            except TimeoutError:
                raise machine.give_up(self._timeout_s) from None
            if pack.error is not None:
                raise pack.error
            if pack.is_last:
                return

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
        """Store all added messages; with ``subject``, also this final message.

        Raises:
            WrongLastSequence, DuplicateMessageId, BatchIncomplete, BatchTooLarge, ServerError: Nothing is stored.
            PermissionDenied: The server denied a message with this subject; nothing is stored.
            BatchInDoubt: No answer came. All is stored or nothing; :meth:`resolve` tells which.
            FeatureUnavailable: The server is too old for atomic batches; nothing was sent.
        """
        self._check_begun()
        fields = publish_headers(headers, msg_id, expect, ttl)
        return self._context.run(self._machine.commit(subject, data, fields), self._timeout_s, for_each=True)

    def discard(self) -> None:
        """Store nothing, and free the server's resources for the batch at once."""
        self._context.run(self._machine.discard(), self._timeout_s, for_each=True)

    def resolve(self) -> Outcome:
        """Determine the outcome of a commit that was not answered: returns ``"stored"`` or ``"not stored"``.

        When the batch is stored, ``ack`` is set. ``"not stored"`` is final: a commit still in transit would be refused.
        The call may be repeated, and returns at once when nothing is in doubt. It reads the stream through its leader,
        which may take two seconds on a replicated stream.

        Raises:
            BatchInDoubt: The outcome cannot be determined now, because the stream does not answer; or permanently.
                Permanently means: every message on the batch's subjects was overwritten, consumed, expired or purged
                since; or the first message was never acknowledged (``ack_first=False``, or a batch of one) and the
                connection was lost. A ``batch_id`` of your own must be unique, because it identifies the batch.
        """
        monotonic, wall = self._began
        # The monotonic clock stops while the machine is suspended; the wall clock can jump. Overestimating is harmless.
        age_s = max(time.monotonic() - monotonic, time.time() - wall)
        return self._context.run(self._machine.resolve(age_s), self._timeout_s, for_each=True)

    def __enter__(self) -> AtomicBatch:
        return self._enter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._context.run(self._machine.leave(failed=kind is not None), self._timeout_s, for_each=True)
