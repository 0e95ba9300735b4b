"""The fast publisher, endless over many batches: what was accepted is stored, in order, whatever happens. Pure.

Every accepted message has a position, counted from 1, and is in one of four places (``fast_backlog``)::

    accept() ──> backlog ──pump()──> sent, in the present batch ──ack, final ack──> claimed ──proof──> published
                    ^                       │                                          │
                    └───────batch over──────┴───────────in doubt, disproved────────────┘   in front, in order

A batch is over when the server ends it (a message was lost on the way, or refused), does not know it any more (idle
for too long, restarted), or does not answer. In mode "fail" the stored messages of a batch are its first ones, so the
next batch begins with the first that is not known to be stored. When the server counted them (``BatchCutShort``),
that is exact. When nobody knows (``BatchInDoubt``), those after the last acknowledgement may be stored already: with
message ids the stream recognises them, without they may be there twice, and ``possibly_doubled`` counts them.

An acknowledgement is a claim, and mostly its own proof: a leader acknowledges a new message when a majority has it, and
with it everything before it in the leader's log. But a leader that is cut off from the other replicas acknowledges a
*duplicate* of what it could only propose and will lose (measured on nats-server 2.15.1). So what was sent before, in a
batch that ended in doubt, and has an id, is claimed until a message behind it in the same batch is acknowledged that
cannot be a duplicate. Where there is none, the batch is ended and the last claimed message sent once more, as a batch
of its own, with an expectation that cannot come true. The answer is the proof: "a duplicate of message n" (stored, and
all before it), "in process" (only proposed: ask again), or "wrong last sequence" (not there: send all that is claimed
again). Nothing can be stored by asking. No batch is open meanwhile: what follows must not be stored before what it
follows. Reading the stream back would need rights that publishers do not have, and finds nothing where messages were
consumed or overwritten.

A message the stream refuses would be refused again: it stops the publisher, or is handed to ``on_refused`` and
skipped.

While no batch was answered for, "nobody listens" most likely means that there is no such stream. It ends the publisher
after ``wait_for_stream_s``, and nothing is stored then. Once there was an answer, or a batch ended in doubt, it means
that a leader is being elected, and ``patience_s`` holds.

``fast_backlog`` also makes of a message what is kept of it, and has what callers want to be stored soon. Each batch is
a :class:`~jetspark.publish.fast_batch.FastMachine`.

Invariants: ``published`` never goes back, and every message up to it is stored or was handed to ``on_refused``.
Claimed messages are those directly after ``published``, and only those sent before are ever left claimed. At
most ``max_pending_messages`` and ``max_pending_bytes`` are kept. The publisher gives up after ``patience_s`` without
progress; what it keeps then is still there to be read.
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
from jetspark.publish.fast_backlog import FastKeeping, FastPlaces, FastWishes, has_id
from jetspark.publish.fast_batch import FastMachine, FastState
from jetspark.publish.fast_options import FastPublisherOptions, Refused
from jetspark.publish.outgoing import Item

__all__ = ["FastPublisherMachine"]

RETRY = Backoff(first_s=0.05, max_s=2.0)
# How many messages are made ready at a time. A driver may write after each piece, and the server begins with the first
# while the next is made.
PIECE_MESSAGES = 250
_IMPOSSIBLE = "\r\n".join(f"{name}: {value}" for name, value in IMPOSSIBLE.items()).encode()
# The stream will not change its mind about these, so trying again would only hide them.
_HOPELESS = frozenset({Code.STREAM_SEALED, Code.FAST_DISABLED})


class FastPublisherMachine:
    """Messages on their way into a stream, over as many fast batches as it takes."""

    def __init__(self, machine: Connection, owner: Reader, options: FastPublisherOptions, *, now: float) -> None:
        """``owner`` is the driver's object that is woken when the server said something."""
        self.options = options
        self.places = FastPlaces()
        self.wishes = FastWishes(self.places)
        self.possibly_doubled = 0
        """Sent again without knowing, and without ids to be recognised by."""
        self.batches = 0
        self.failure: Exception | None = None
        """Why the publisher gave up."""
        self.is_left = False
        """The caller is gone: nothing is sent any more, and what is pending stays to be read."""
        self.news: list[Refused] = []
        """Refusals that nobody was told yet."""
        self.doubled_news = 0
        """Of those possibly doubled, those nobody was told of yet."""
        self._machine, self._owner = machine, owner
        self._batch: FastMachine | None = None
        self._is_proving = False
        """The present batch is a question about what is claimed."""
        self._max_question_bytes = machine.info.max_payload_bytes
        self._session = 0
        """The connection's, when the present batch began."""
        self._sent_before = 0
        """Up to this position, messages were sent in a batch that ended in doubt."""
        self._is_stream_known = False
        """Some stream answered, or may have: if nobody does any more, it has no leader for the moment."""
        self._settled_in_batch = 0
        """How many of the present batch's messages have left ``sent``: published or claimed."""
        self._is_closing = False
        self._retry_at: float | None = None
        self._failures = 0
        self._last_error: Exception | None = None
        self._moved_at = now
        prefix = options.id_prefix or machine.names.new_batch()[1]
        self._keeping = FastKeeping(machine, prefix if options.message_ids else None)

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more messages are accepted now."""
        if self.room_bytes <= 0:
            return 0
        return max(0, self.options.max_pending_messages - self.places.pending)

    @property
    def room_bytes(self) -> int:
        """How many more bytes; the message that passes it is still accepted."""
        return self.options.max_pending_bytes - self.places.pending_bytes

    @property
    def batch(self) -> FastMachine | None:
        return self._batch

    @property
    def is_idle(self) -> bool:
        """Nothing is pending and no batch is open."""
        return self._batch is None and not self.places.pending

    @property
    def _is_owed(self) -> bool:
        """It is the server's turn. It owes nothing to a slow producer whose next acknowledgement is not due."""
        if not self.places.pending:
            return False
        return bool(self.places.backlog) or self._batch is None or self._batch.is_waiting

    @property
    def _is_ack_on_its_way(self) -> bool:
        """The server has enough for an acknowledgement, or will have without anybody's doing."""
        batch = self._batch
        if self.places.backlog or batch is None or batch.state is not FastState.OPEN:
            return True
        return batch.sender.sequence - batch.acknowledged >= batch.sender.msgs_per_ack

    def _begin_patience(self, now: float) -> None:
        """It runs from the moment the server has something to answer."""
        if not self._is_owed:
            self._moved_at = now

    def check(self) -> None:
        """Whether the publisher may be used.

        Raises:
            JetSparkError: It gave up, or was closed.
        """
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._is_closing:
            raise UsageError("the publisher is closed; make another one")

    # ---- accepting ---------------------------------------------------------------------------------------------

    def accept(self, items: Sequence[Item], now: float, *, are_checked: bool = False) -> None:
        """Take messages, for which there must be room; ``are_checked`` if each is known to be fit to be sent.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: One of them can never be sent. Those before it are taken.
            JetSparkError: The publisher gave up, or was closed meanwhile. None is taken.
        """
        if not items:
            return
        self.check()
        kept: list[Item] = []
        try:
            self._keeping.keep(items, self.places.accepted + 1, kept, are_checked=are_checked)
        finally:
            self._begin_patience(now)
            self.wishes.on_accepted(now)
            self.places.accept(kept)

    def close(self) -> None:
        """Accept nothing more; store what is there, and end the batch."""
        self._is_closing = True

    # ---- sending -----------------------------------------------------------------------------------------------

    def pump(self, now: float) -> bool:
        """Send what may be sent now, some at a time; True while there is more to send at once.

        Raises:
            BufferFull: The network takes no more for now; nothing is lost.
        """
        if self.failure is not None:
            return False
        self._begin_patience(now)
        batch = self._batch
        if batch is None:
            if not (self.places.claimed or self.places.backlog) or (
                self._retry_at is not None and now < self._retry_at
            ):
                return False
            batch = self._batch = self._new_batch()
            self._settled_in_batch = 0
            self._session = self._machine.sessions
            self._is_proving = bool(self.places.claimed)
            self.batches += not self._is_proving
            self._retry_at = None
        if batch.state is FastState.NEW:
            reopen_at = batch.opening.reopen_at
            if reopen_at is None or now >= reopen_at:
                self._begin(batch, now)
            return False
        if batch.state is FastState.OPEN:
            # Nothing before it is wanted: it waits here just as well, and what gives up sends nothing more.
            if self.places.backlog and (due := batch.sender.due):
                self._send(batch, min(due, PIECE_MESSAGES), now)
                return True  # to more of it, or to the end that a flush is waiting for
            if self._wants_end(batch):
                batch.end(now)
        return False

    def _new_batch(self) -> FastMachine:
        options = self.options.batch_options(is_stream_known=self._is_stream_known)
        return FastMachine(self._machine, self._owner, options)

    def _begin(self, batch: FastMachine, now: float) -> None:
        try:
            if self._is_proving:
                batch.start(_question(self.places.claimed[-1], self._max_question_bytes), now, is_only=True)
                return
            batch.start(self.places.sent[0] if self.places.sent else self.places.backlog[0], now)
        except BufferFull:
            batch.opening.reopen_at = now + RETRY.first_s  # a moment that has passed would be waited for again at once
            raise
        if not self.places.sent:
            self.places.send(1)

    def _send(self, batch: FastMachine, count: int, now: float) -> None:
        sender = batch.sender
        before = sender.sequence
        sender.add_up_to(count, self.places.backlog, now)
        self.places.send(sender.sequence - before)

    def _wants_end(self, batch: FastMachine) -> bool:
        """Only an end tells that the last messages are stored: acknowledgements come after ``flow`` messages."""
        if self._is_closing:
            return not self.places.backlog
        if self.room == 0 and not self.places.backlog and batch.sender.due > 0:
            return True  # the server waits for more before it acknowledges, and we have no room for more
        return self.wishes.need_an_end

    # ---- what comes back ---------------------------------------------------------------------------------------

    def on_replies(self, now: float) -> None:
        """Take everything that has arrived."""
        if self._batch is not None:
            self._batch.on_replies(now)
            self._look(now)

    def on_event(self, event: ConnectionEvent, now: float) -> None:
        """Something happened to the connection."""
        if self._batch is not None:
            self._batch.on_event(event, now)
            self._look(now)
        if isinstance(event, Closed) and self.failure is None and (self.places.pending or not self._is_closing):
            self.fail(event.error or ConnectionClosed("the connection was closed"))

    def _look(self, now: float) -> None:
        """The batch may have moved, or be over."""
        batch = self._batch
        assert batch is not None
        self._is_stream_known |= batch.opening.is_stream_known
        if not self._is_proving:
            self._settle(batch.stored, now)
        if batch.is_ended:
            self._batch = None
            if self._is_proving:
                self._on_proof(batch, now)
            else:
                self._on_batch_over(batch, now)

    def _settle(self, stored: int, now: float) -> None:
        """The first ``stored`` messages of the present batch are acknowledged."""
        count = stored - self._settled_in_batch
        if count <= 0:
            return
        assert count <= len(self.places.sent), (
            count,
            len(self.places.sent),
        )  # the batch believes no number above what was sent
        self._settled_in_batch = stored
        first = self.places.published + len(self.places.claimed) + 1
        if self.places.claimed or first <= self._sent_before:
            self._publish(self.places.claimed, self._claim(count, first), now)
        else:
            self._publish(self.places.sent, count, now)

    def _claim(self, count: int, first: int) -> int:
        """Keep messages that are acknowledged, the first of which has this position; return how many are proven."""
        part = self.places.claim(count)
        known = self._sent_before - first + 1
        if known < count:  # what was not sent before is new, and proves what is before it
            return len(self.places.claimed)
        # What has no id is stored again each time it is sent.
        known = next((place for place in range(count, 0, -1) if not has_id(part[place - 1])), 0)
        return len(self.places.claimed) - count + known if known else 0

    def _publish(self, source: deque[Item], count: int, now: float) -> None:
        """The first of ``source``, which are the first of those not published, are stored."""
        if not count:
            return
        self.places.publish(source, count)
        self.wishes.on_published()
        self._moved_at = now
        self._failures = 0

    def _on_proof(self, batch: FastMachine, now: float) -> None:
        """The stream answered whether it has the last of what is claimed, or did not."""
        failure = batch.failure
        if failure is None and batch.ack is not None and batch.ack.sequence:
            self._publish(self.places.claimed, len(self.places.claimed), now)
        elif isinstance(failure, WrongLastSequence):
            self.places.send_again(self.places.claimed)
        elif failure is not None and _is_hopeless(failure):
            self.fail(failure)
        else:
            # Asked with all of its data, a message may be a little larger than the stream takes.
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
            assert not self.places.sent
            return
        self._last_error = failure
        refusal = self._refusal(batch)
        if refusal is not None:
            self._on_refused(refusal, now)
        if isinstance(failure, BatchInDoubt):
            self._on_doubt()
        elif self._session != self._machine.sessions:
            # The next batch may, over another server, reach the leader that this one was sent to, not who ended it.
            self._note_sent()
        self.places.send_again(self.places.sent)
        if not self._is_stream_known or (_is_hopeless(failure) and refusal is None):
            self.fail(failure)
        elif (
            self.failure is None and refusal is None and (batch.losses.errors or not isinstance(failure, BatchCutShort))
        ):
            self._retry_later(now)

    def _on_doubt(self) -> None:
        """What is not acknowledged may be stored, or be in a log and lost; what is claimed is sent again with it."""
        if not self._keeping.has_ids:
            self.possibly_doubled += len(self.places.sent)
            self.doubled_news += len(self.places.sent)
        self._note_sent()
        self.places.send_again(self.places.sent)
        self.places.send_again(self.places.claimed)

    def _note_sent(self) -> None:
        self._sent_before = max(self._sent_before, self.places.sent_to)
        # Soon, while the stream still remembers their ids.
        self.wishes.flush_to(self._sent_before)

    def _refusal(self, batch: FastMachine) -> ServerError | None:
        """What the stream said about the first message that is not stored, if it was that which ended the batch."""
        if self.places.claimed:
            return None  # a proof comes first; then it is refused again
        first_missing = self._settled_in_batch + 1
        for refusal in batch.losses.errors:
            is_final = not _is_hopeless(refusal.error) and refusal.error.err_code != Code.DUPLICATE_IN_PROCESS
            if refusal.sequence == first_missing and self.places.sent and is_final:
                return refusal.error
        return None

    def _on_refused(self, error: ServerError, now: float) -> None:
        item = self.places.sent[0]
        if self.options.on_refused is None:
            self.fail(error)
            return
        self._publish(self.places.sent, 1, now)
        headers = item[2] if len(item) == 3 else None
        self.news.append(Refused(self.places.published, item[0], item[1], headers, error))

    def fail(self, error: Exception) -> None:
        """Give up: nothing more is sent, and what is pending stays to be read."""
        if self.failure is None:
            self.failure = error

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` wants to be called next, seen from now; None while there is nothing to wait for."""
        if self.failure is not None:
            return None
        deadline = self._moved_at + self.options.patience_s if self._is_owed else math.inf
        if self._batch is not None:
            reopen_at = self._batch.opening.reopen_at
            deadline = min(deadline, self._batch.next_deadline() or math.inf, reopen_at or math.inf)
        elif (self.places.claimed or self.places.backlog) and self._retry_at is not None:
            deadline = min(deadline, self._retry_at)
        linger_until = self.wishes.next_deadline()
        deadline = deadline if linger_until is None else min(deadline, linger_until)
        return None if deadline == math.inf else deadline

    def on_time(self, now: float) -> None:
        """Time has passed: the driver pumps afterwards."""
        self.wishes.on_time(now, is_ack_on_its_way=self._is_ack_on_its_way)
        if self._batch is not None:
            self._batch.on_time(now)
            self._look(now)
        if self.failure is None and self._is_owed and now >= self._moved_at + self.options.patience_s:
            self._give_up(self._last_error or "no answer", now)

    @property
    def room_timeout_s(self) -> float:
        """How long a message may wait for room in the connection's buffer."""
        return self.options.patience_s

    def on_no_room(self, now: float) -> None:
        """The connection took nothing for ``room_timeout_s``, whether the server owes an answer or not."""
        if self.failure is None:
            self._give_up(RequestTimeout("a message of the publisher", self.room_timeout_s, was_sent=False), now)

    def _give_up(self, reason: object, now: float) -> None:
        refusal = self._last_error if self._batch is None else self._batch.opening.reopen_error
        is_in_doubt = self._sent_before > self.places.published  # or else no batch that was sent is without an answer
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
        """The caller leaves: end what is open, wait for nothing, send nothing more."""
        self._is_closing = self.is_left = True
        if self.places.pending:
            self.fail(UsageError(f"the publisher was left; unpublished() has {self.places.pending} messages"))
        if self._batch is not None:
            self._batch.abandon(now)
            self._batch = None


def _question(item: Item, max_bytes: int) -> Item:
    """The same message, with an expectation that cannot come true: the stream recognises it, or refuses it.

    Plain subscribers of its subject see it once more, as they do when it is sent again.
    """
    assert len(item) == 3
    block = item[2]
    assert isinstance(block, bytes)
    version, rest = block.split(b"\r\n", 1)
    block = b"%b\r\n%b\r\n%b" % (version, _IMPOSSIBLE, rest)  # the first value of a header counts
    return item[0], item[1] if len(block) + len(item[1]) <= max_bytes else b"", block


def _is_hopeless(error: JetSparkError | Exception) -> bool:
    cause = error.__cause__ if isinstance(error, BatchInDoubt) else error
    if isinstance(cause, BatchUnknown | JetStreamUnavailable | BatchCutShort):
        return False
    return isinstance(cause, FeatureUnavailable | PermissionDenied) or (
        isinstance(cause, ServerError) and cause.err_code in _HOPELESS
    )
