"""The fast publisher: stores messages in order over many batches, and repeats batches that failed. Pure.

Every accepted message has a position, counted from 1, and is in one of four stages (``fast_backlog``)::

    accept() ──> backlog ──pump()──> sent, in the present batch ──ack, final ack──> claimed ──proof──> published
                    ^                       │                                          │
                    └───────batch over──────┴───────────in doubt, disproved────────────┘   in front, in order

A batch is over when the server ends it (a message was lost on the way, or refused), has dropped it (idle for too long,
restarted), or does not answer. In mode "fail" the stored messages of a batch are its first ones, so the next batch
begins with the first message that is not known to be stored. If a server without a cluster counted them
(``BatchCutShort``), that is exact. A new leader may count too few: it continues the batch behind the messages that it
has applied, while others are still in its log (nats-server 2.15.1, ``fastBatchReset``). The next message then looks
like a gap, and ends the batch. In that case, and if the outcome is unknown (``BatchInDoubt``), the messages after the
last acknowledgement may be stored already: with message ids the stream recognises the repetition; without, they may be
there twice, and ``possibly_doubled`` counts them.

An acknowledgement is a claim, and mostly its own proof: a leader acknowledges a new message when a majority has it, and
with it everything before it in the leader's log. But a leader that is cut off from the other replicas acknowledges a
*duplicate* of a message that it could only propose and will lose (measured on nats-server 2.15.1). So a message with an
id that was sent before, in a batch that ended in doubt, is only claimed until a message behind it in the same batch is
acknowledged that cannot be a duplicate. Without such a message, the batch is ended and the last claimed message is sent
once more, as a batch of its own, with an expectation that cannot come true. The answer is the proof: "a duplicate of
message n" (stored, with all before it), "in process" (only proposed: ask again), or "wrong last sequence" (missing:
send all claimed messages again). The question itself can never be stored. No other batch is open during the question,
because later messages must not be stored before earlier ones. Reading the stream back would need permissions that
publishers do not have, and finds nothing if messages were consumed or overwritten.

A refused message would be refused again: it stops the publisher, or is passed to ``on_refused`` and skipped.

Before the first answer to a batch, "no responders" most likely means a missing stream. It ends the publisher after
``wait_for_stream_s``, and nothing is stored then. After an answer, or a batch in doubt, it means that a leader is being
elected, and ``patience_s`` holds.

``fast_backlog`` also encodes the messages, and keeps the callers' flush requests. Each batch is a
:class:`~jetspark.publish.fast_batch.FastMachine`.

Invariants: ``published`` never decreases, and every message up to it is stored or was passed to ``on_refused``. Claimed
messages directly follow ``published``, and all of them were sent before. At most ``max_pending_messages`` and
``max_pending_bytes`` are kept. The publisher gives up after ``patience_s`` without progress; its messages can still be
read then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from jetspark.codes import Code
from jetspark.core.backoff import Backoff
from jetspark.core.connection import Connection
from jetspark.core.events import Closed, ConnectionEvent
from jetspark.core.machine import Reader
from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    BatchUnknown,
    BufferFull,
    ConnectionClosed,
    FeatureUnavailable,
    JetSparkError,
    JetStreamUnavailable,
    PermissionDenied,
    RequestTimeout,
    ServerError,
    UsageError,
    WrongLastSequence,
)
from jetspark.publish.atomic_resolve import IMPOSSIBLE
from jetspark.publish.fast_backlog import FastEncoder, FastStages, FlushRequests, has_id
from jetspark.publish.fast_batch import FastMachine, FastState
from jetspark.publish.fast_options import FastPublisherOptions, Refused
from jetspark.publish.outgoing import Item

__all__ = ["FastPublisherMachine"]

RETRY = Backoff(first_s=0.05, max_s=2.0)
# Number of messages encoded at a time. A driver may write after each piece, so that the server starts on the first
# while the next is encoded.
PIECE_MESSAGES = 250
_IMPOSSIBLE = "\r\n".join(f"{name}: {value}" for name, value in IMPOSSIBLE.items()).encode()
# The stream will always refuse with these, so repetitions would only hide them.
_HOPELESS = frozenset({Code.STREAM_SEALED, Code.FAST_DISABLED})


class FastPublisherMachine:
    """Messages on their way into a stream, over as many fast batches as needed."""

    def __init__(self, connection: Connection, owner: Reader, options: FastPublisherOptions, *, now: float) -> None:
        """``owner`` is the driver's object that is woken when an answer has arrived."""
        self.options = options
        self.stages = FastStages()
        self.flush_requests = FlushRequests(self.stages)
        self.possibly_doubled = 0
        """Number of messages without an id that were sent again although they may have been stored."""
        self.batches = 0
        self.failure: Exception | None = None
        """The reason for giving up."""
        self.is_left = False
        """The caller has left: nothing is sent any more, and pending messages can still be read."""
        self.news: list[Refused] = []
        """Refusals that were not yet passed to ``on_refused``."""
        self.doubled_news = 0
        """The part of ``possibly_doubled`` that was not yet logged."""
        self._connection, self._owner = connection, owner
        self._batch: FastMachine | None = None
        self._is_proving = False
        """The present batch is a question about the claimed messages."""
        self._max_question_bytes = connection.info.max_payload_bytes
        self._session = 0
        """The connection's session at the start of the present batch."""
        self._sent_before = 0
        """Messages up to this position were sent in a batch that ended in doubt."""
        self._is_stream_known = False
        """True if a stream answered, or may have: a 503 then means that it has no leader."""
        self._confirmed_in_batch = 0
        """Number of messages of the present batch that have left ``sent``: published or claimed."""
        self._is_closing = False
        self._retry_at: float | None = None
        self._failures = 0
        self._last_error: Exception | None = None
        self._moved_at = now
        prefix = options.id_prefix or connection.names.new_batch()[1]
        self._encoder = FastEncoder(connection, prefix if options.message_ids else None)

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Number of messages that are accepted now."""
        if self.room_bytes <= 0:
            return 0
        return max(0, self.options.max_pending_messages - self.stages.pending)

    @property
    def room_bytes(self) -> int:
        """Number of bytes that are accepted now; the message that exceeds it is still accepted."""
        return self.options.max_pending_bytes - self.stages.pending_bytes

    @property
    def batch(self) -> FastMachine | None:
        return self._batch

    @property
    def is_idle(self) -> bool:
        """True if no message is pending and no batch is open."""
        return self._batch is None and not self.stages.pending

    @property
    def _is_owed(self) -> bool:
        """True if the server has to act. It owes a slow producer nothing before the next acknowledgement is due."""
        if not self.stages.pending:
            return False
        return bool(self.stages.backlog) or self._batch is None or self._batch.is_waiting

    @property
    def _is_ack_on_its_way(self) -> bool:
        """True if the server has enough messages for an acknowledgement, or will get them without the caller."""
        batch = self._batch
        if self.stages.backlog or batch is None or batch.state is not FastState.OPEN:
            return True
        return batch.sender.sequence - batch.acknowledged >= batch.sender.msgs_per_ack

    def _begin_patience(self, now: float) -> None:
        """Start the patience when the server gets something to answer."""
        if not self._is_owed:
            self._moved_at = now

    def check(self) -> None:
        """Check that the publisher may be used.

        Raises:
            JetSparkError: It gave up, or was closed.
        """
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._is_closing:
            raise UsageError("the publisher is closed; make another one")

    # ---- accepting ---------------------------------------------------------------------------------------------

    def accept(self, items: Sequence[Item], now: float, *, are_checked: bool = False) -> None:
        """Accept messages, for which there must be room; ``are_checked`` if all are known to be valid.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: A message can never be sent. The messages before it are
                accepted.
            JetSparkError: The publisher gave up, or was closed. No message is accepted.
        """
        if not items:
            return
        self.check()
        kept: list[Item] = []
        try:
            self._encoder.keep(items, self.stages.accepted + 1, kept, are_checked=are_checked)
        finally:
            self._begin_patience(now)
            self.flush_requests.on_accepted(now)
            self.stages.accept(kept)

    def close(self) -> None:
        """Accept no more messages; store the pending ones, and end the batch."""
        self._is_closing = True

    # ---- sending -----------------------------------------------------------------------------------------------

    def pump(self, now: float) -> bool:
        """Send a part of the messages that may be sent now; True if more can be sent at once.

        Raises:
            BufferFull: The network takes no more at present; nothing is lost.
        """
        if self.failure is not None:
            return False
        self._begin_patience(now)
        batch = self._batch
        if batch is None:
            if not (self.stages.claimed or self.stages.backlog) or (
                self._retry_at is not None and now < self._retry_at
            ):
                return False
            batch = self._batch = self._new_batch()
            self._confirmed_in_batch = 0
            self._session = self._connection.sessions
            self._is_proving = bool(self.stages.claimed)
            self.batches += not self._is_proving
            self._retry_at = None
        if batch.state is FastState.NEW:
            reopen_at = batch.opening.reopen_at
            if reopen_at is None or now >= reopen_at:
                self._begin(batch, now)
            return False
        if batch.state is FastState.OPEN:
            # Only wanted messages are encoded: others can wait here just as well, and are not sent after a failure.
            if self.stages.backlog and (due := batch.sender.due):
                self._send(batch, min(due, PIECE_MESSAGES), now)
                return True  # to send more, or the end that a flush waits for
            if self._wants_end(batch):
                batch.end(now)
        return False

    def _new_batch(self) -> FastMachine:
        options = self.options.batch_options(is_stream_known=self._is_stream_known)
        return FastMachine(self._connection, self._owner, options)

    def _begin(self, batch: FastMachine, now: float) -> None:
        try:
            if self._is_proving:
                batch.start(_question(self.stages.claimed[-1], self._max_question_bytes), now, is_only=True)
                return
            batch.start(self.stages.sent[0] if self.stages.sent else self.stages.backlog[0], now)
        except BufferFull:
            batch.opening.reopen_at = now + RETRY.first_s  # a past time would make the driver try at once, endlessly
            raise
        if not self.stages.sent:
            self.stages.send(1)

    def _send(self, batch: FastMachine, count: int, now: float) -> None:
        sender = batch.sender
        before = sender.sequence
        sender.add_up_to(count, self.stages.backlog, now)
        self.stages.send(sender.sequence - before)

    def _wants_end(self, batch: FastMachine) -> bool:
        """True if the batch has to end, because only its end confirms its last messages."""
        if self._is_closing:
            return not self.stages.backlog
        if self.room == 0 and not self.stages.backlog and batch.sender.due > 0:
            return True  # the server waits for more before it acknowledges, and the publisher may not accept more
        return self.flush_requests.need_an_end

    # ---- answers -----------------------------------------------------------------------------------------------

    def on_replies(self, now: float) -> None:
        """Read all answers that have arrived."""
        if self._batch is not None:
            self._batch.on_replies(now)
            self._follow_batch(now)

    def on_event(self, event: ConnectionEvent, now: float) -> None:
        """Handle an event of the connection."""
        if self._batch is not None:
            self._batch.on_event(event, now)
            self._follow_batch(now)
        if isinstance(event, Closed) and self.failure is None and (self.stages.pending or not self._is_closing):
            self.fail(event.error or ConnectionClosed("the connection was closed"))

    def _follow_batch(self, now: float) -> None:
        """Apply the progress, or the end, of the present batch."""
        batch = self._batch
        assert batch is not None
        self._is_stream_known |= batch.opening.is_stream_known
        if not self._is_proving:
            self._on_acknowledged(batch.stored, now)
        if batch.is_ended:
            self._batch = None
            if self._is_proving:
                self._on_proof(batch, now)
            else:
                self._on_batch_over(batch, now)

    def _on_acknowledged(self, stored: int, now: float) -> None:
        """Publish or claim the first ``stored`` messages of the present batch, which are acknowledged."""
        count = stored - self._confirmed_in_batch
        if count <= 0:
            return
        assert count <= len(self.stages.sent), (
            count,
            len(self.stages.sent),
        )  # the batch refuses numbers above the sent ones
        self._confirmed_in_batch = stored
        first = self.stages.published + len(self.stages.claimed) + 1
        if self.stages.claimed or first <= self._sent_before:
            self._publish(self.stages.claimed, self._claim(count, first), now)
        else:
            self._publish(self.stages.sent, count, now)

    def _claim(self, count: int, first: int) -> int:
        """Claim acknowledged messages, the first of which has this position; return how many are proven."""
        part = self.stages.claim(count)
        known = self._sent_before - first + 1
        if known < count:  # a message that was not sent before is new, and proves the ones before it
            return len(self.stages.claimed)
        # A message without an id is stored again with each repetition.
        known = next((place for place in range(count, 0, -1) if not has_id(part[place - 1])), 0)
        return len(self.stages.claimed) - count + known if known else 0

    def _publish(self, source: deque[Item], count: int, now: float) -> None:
        """Count the first messages of ``source``, the earliest stage in use, as stored."""
        if not count:
            return
        self.stages.publish(source, count)
        self.flush_requests.on_published()
        self._moved_at = now
        self._failures = 0

    def _on_proof(self, batch: FastMachine, now: float) -> None:
        """Apply the answer to the question whether the stream has the last claimed message."""
        failure = batch.failure
        if failure is None and batch.ack is not None and batch.ack.sequence:
            self._publish(self.stages.claimed, len(self.stages.claimed), now)
        elif isinstance(failure, WrongLastSequence):
            self.stages.send_again(self.stages.claimed)
        elif failure is not None and _is_hopeless(failure):
            self.fail(failure)
        else:
            # With all of its data, the question may be slightly larger than the stream accepts.
            if isinstance(failure, ServerError) and failure.err_code == Code.MESSAGE_TOO_LARGE:
                self._max_question_bytes = 0
            self._last_error = failure or self._last_error
            self._retry_later(now)

    def _retry_later(self, now: float) -> None:
        self._failures += 1
        self._retry_at = now + RETRY.wait_s(self._failures)

    def _on_batch_over(self, batch: FastMachine, now: float) -> None:
        failure = batch.failure
        self._is_stream_known |= not isinstance(failure, JetStreamUnavailable)
        if failure is None:
            assert not self.stages.sent
            return
        self._last_error = failure
        refusal = self._refusal(batch)
        if refusal is not None:
            self._on_refused(refusal, now)
        if isinstance(failure, BatchCutShort) and self._may_change_leader:
            self._count_doubled()
        if isinstance(failure, BatchInDoubt):
            self._on_doubt()
        elif self._session != self._connection.sessions:
            # Over another server the next batch may reach this batch's leader, and not the one that ended it.
            self._record_sent()
        self.stages.send_again(self.stages.sent)
        if not self._is_stream_known or (_is_hopeless(failure) and refusal is None):
            self.fail(failure)
        elif (
            self.failure is None and refusal is None and (batch.losses.errors or not isinstance(failure, BatchCutShort))
        ):
            self._retry_later(now)

    def _on_doubt(self) -> None:
        """Send all unconfirmed messages again, claimed ones included: they may be stored, or proposed and lost."""
        self._count_doubled()
        self._record_sent()
        self.stages.send_again(self.stages.sent)
        self.stages.send_again(self.stages.claimed)

    def _count_doubled(self) -> None:
        if not self._encoder.has_ids:
            self.possibly_doubled += len(self.stages.sent)
            self.doubled_news += len(self.stages.sent)

    @property
    def _may_change_leader(self) -> bool:
        """False if the server stores the stream alone. One without JetStream is a leaf of servers that have it."""
        info = self._connection.info
        return bool(info.cluster) or not info.has_jetstream

    def _record_sent(self) -> None:
        self._sent_before = max(self._sent_before, self.stages.sent_to)
        # Flush soon, while the stream still remembers their ids.
        self.flush_requests.flush_to(self._sent_before)

    def _refusal(self, batch: FastMachine) -> ServerError | None:
        """The stream's refusal of the first message that is not stored, if that refusal ended the batch."""
        if self.stages.claimed:
            return None  # a proof comes first; then the message is refused again
        first_missing = self._confirmed_in_batch + 1
        for refusal in batch.losses.errors:
            is_final = not _is_hopeless(refusal.error) and refusal.error.err_code != Code.DUPLICATE_IN_PROCESS
            if refusal.sequence == first_missing and self.stages.sent and is_final:
                return refusal.error
        return None

    def _on_refused(self, error: ServerError, now: float) -> None:
        item = self.stages.sent[0]
        if self.options.on_refused is None:
            self.fail(error)
            return
        self._publish(self.stages.sent, 1, now)
        headers = item[2] if len(item) == 3 else None
        self.news.append(Refused(self.stages.published, item[0], item[1], headers, error))

    def fail(self, error: Exception) -> None:
        """Give up: nothing more is sent, and pending messages can still be read."""
        if self.failure is None:
            self.failure = error

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` has to be called next; None without a deadline."""
        if self.failure is not None:
            return None
        deadline = self._moved_at + self.options.patience_s if self._is_owed else math.inf
        if self._batch is not None:
            reopen_at = self._batch.opening.reopen_at
            deadline = min(deadline, self._batch.next_deadline() or math.inf, reopen_at or math.inf)
        elif (self.stages.claimed or self.stages.backlog) and self._retry_at is not None:
            deadline = min(deadline, self._retry_at)
        linger_until = self.flush_requests.next_deadline()
        deadline = deadline if linger_until is None else min(deadline, linger_until)
        return None if deadline == math.inf else deadline

    def on_time(self, now: float) -> None:
        """Handle deadlines; the driver calls :meth:`pump` afterwards."""
        self.flush_requests.on_time(now, is_ack_on_its_way=self._is_ack_on_its_way)
        if self._batch is not None:
            self._batch.on_time(now)
            self._follow_batch(now)
        if self.failure is None and self._is_owed and now >= self._moved_at + self.options.patience_s:
            self._give_up(self._last_error or "no answer", now)

    @property
    def room_timeout_s(self) -> float:
        """Longest wait of a message for room in the connection's buffer."""
        return self.options.patience_s

    def on_no_room(self, now: float) -> None:
        """Give up: the connection took nothing for ``room_timeout_s``, whether the server owes an answer or not."""
        if self.failure is None:
            self._give_up(RequestTimeout("a message of the publisher", self.room_timeout_s, was_sent=False), now)

    def _give_up(self, reason: object, now: float) -> None:
        refusal = self._last_error if self._batch is None else self._batch.opening.reopen_error
        is_in_doubt = self._sent_before > self.stages.published  # otherwise every batch sent was answered
        if isinstance(refusal, JetStreamUnavailable | ServerError) and not is_in_doubt:
            self.fail(refusal)
        reason = refusal or reason
        doubt = BatchInDoubt(self._batch.inbox.batch_id if self._batch else "", str(reason), 0)
        doubt.__cause__ = reason if isinstance(reason, Exception) else None
        self.fail(doubt)
        if self._batch is not None:
            self._batch.abandon(now)
            self._batch = None

    def abandon(self, now: float) -> None:
        """Leave without waiting: end the open batch, and send nothing more."""
        self._is_closing = self.is_left = True
        if self.stages.pending:
            self.fail(UsageError(f"the publisher was left; unpublished() has {self.stages.pending} messages"))
        if self._batch is not None:
            self._batch.abandon(now)
            self._batch = None


def _question(item: Item, max_bytes: int) -> Item:
    """A copy of a message with an expectation that cannot come true: the stream recognises it, or refuses it.

    Plain subscribers of its subject receive it once more, as after any repetition.
    """
    assert len(item) == 3
    block = item[2]
    assert isinstance(block, bytes)
    version, rest = block.split(b"\r\n", 1)
    block = b"%b\r\n%b\r\n%b" % (version, _IMPOSSIBLE, rest)  # the server uses the first value of a header
    return item[0], item[1] if len(block) + len(item[1]) <= max_bytes else b"", block


def _is_hopeless(error: JetSparkError | Exception) -> bool:
    cause = error.__cause__ if isinstance(error, BatchInDoubt) else error
    if isinstance(cause, BatchUnknown | JetStreamUnavailable | BatchCutShort):
        return False
    return isinstance(cause, FeatureUnavailable | PermissionDenied) or (
        isinstance(cause, ServerError) and cause.err_code in _HOPELESS
    )
