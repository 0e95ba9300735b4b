"""Fast ingest: one batch, paced by the server, of any length. No socket, no clock.

States, and who moves them::

    NEW ──add()──> OPENING ──first ack──> OPEN ──commit(), end()──> COMMITTING ──final ack──> ENDED
     ^               │                     │ │                          │
     └─503, 10211────┘                     │ └──gap, err ("fail")──> waiting for the final ack, nothing is sent
       nothing was stored, try again       └──final ack, 10208, no answer, connection over──────────────────> ENDED

All answers about the batch arrive in one inbox, over the reply subjects of its messages (``fast_sending``), and are
told apart by their content alone (``fast_replies``): on a replicated stream the final acknowledgement may come on
another message's reply subject.

Opening (``FastOpening``). Two answers confirm that nothing was stored and that no batch is open. "Too many" (10211,
10167) comes from a stream and is temporary; the first message is sent again for ``timeout``. "No responders" (503)
means that no stream stores the subject, that JetStream is off, or that a leader is being elected. Only the last cause
is temporary, and it looks like the others, so the message is sent again for ``wait_for_stream_s``. After any answer of
a stream, a 503 can only be an election, and ``timeout`` holds for it, too.

Silence (``FastSilence``) is answered by a ping with the highest sequence sent. It brings the last ack again, reports a
lost tail as a gap, and keeps the batch of a slow producer alive (the server drops one after ten idle seconds). It does
not report how much is stored: only an ack, or the final one, does. A ping is sent for three reasons: a message was not
accepted (``HOLE_PING_S``), the server owes an answer (``ping_after_s``), or the batch is idle and would be dropped
(``keep_alive_s``). After ``timeout`` without progress or a message of ours, the batch is given up.

A denied message is lost on the way, and the connection gets the denial of its subject first. So the server is asked,
and the loss that it reports ends the batch with ``PermissionDenied``, in both modes. Pings go to the first subject: if
that is denied later, the server cannot be asked, and the batch is in doubt.

The end, in mode ``"fail"``: the stored messages are always the first ones, and the final acknowledgement counts them.
In mode ``"ok"`` it counts sequences, stored or not: ``gaps`` and ``errors`` have those not stored, and ``doubts`` those
that cannot be known because a session was lost.

Invariants: ``acknowledged`` never decreases, and in mode ``"fail"`` all messages up to it are stored. Nothing is sent
once the server reported the end of the batch. An unexplained answer leaves the batch in doubt, never committed.
"""

from __future__ import annotations

import enum
import math

from jetspark.codes import Code
from jetspark.core.backoff import Backoff
from jetspark.core.connection import Connection
from jetspark.core.events import Closed, ConnectionEvent, Disconnected, ErrorReported, Reconnected
from jetspark.core.machine import Reader
from jetspark.core.message import CoreMessage
from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    BatchUnknown,
    ConnectionClosed,
    FeatureUnavailable,
    JetSparkError,
    JetStreamUnavailable,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    ServerError,
    UsageError,
)
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.info import PubAck
from jetspark.publish.fast_options import FastBatchOptions, Refusal
from jetspark.publish.fast_replies import (
    FastDenials,
    FastInbox,
    FastLosses,
    FlowAck,
    GapReport,
    NobodyListens,
    PlainAck,
    StrayError,
    check_range,
    no_answer,
    read_reply,
)
from jetspark.publish.fast_sending import FastSender, FrameKind
from jetspark.publish.outgoing import Item

__all__ = ["HOLE_PING_S", "REOPEN", "FastMachine", "FastOpening", "FastSilence", "FastState"]

# ---- opening ---------------------------------------------------------------------------------------------------------


REOPEN = Backoff(first_s=0.05, max_s=1.0)


class FastOpening:
    """The attempts to open one batch."""

    def __init__(self, options: FastBatchOptions) -> None:
        self._options = options
        self.reopen_at: float | None = None
        """When to try again, after the server could not open the batch."""
        self.reopen_error: Exception | None = None
        """The reason why it could not; None again after the next attempt."""
        self.is_stream_known = False
        """True after any answer of a stream, even a refusal: "no responders" then means that it has no leader."""
        self._since: float | None = None
        self._unavailable_since: float | None = None
        self._times = 0

    def begin(self, now: float) -> None:
        """Record that the first message is about to be sent, for the first time or again."""
        if self._since is None:
            self._since = now

    def on_sent(self) -> None:
        """Record that it was sent."""
        self.reopen_at = self.reopen_error = None

    def on_refused(self, error: Exception, now: float) -> bool:
        """True if there is time for another attempt, which is then due at ``reopen_at``."""
        give_up_at = self._give_up_at(error, now)
        if now >= give_up_at:
            return False
        self.reopen_error = error
        self._times += 1
        # The last attempt is made when the time is over, so that all of it is used.
        self.reopen_at = min(now + REOPEN.wait_s(self._times), give_up_at)
        return True

    def _give_up_at(self, error: Exception, now: float) -> float:
        assert self._since is not None
        give_up_at = self._since + self._options.timeout
        if not isinstance(error, JetStreamUnavailable):
            self.is_stream_known = True
            self._unavailable_since = None
            return give_up_at
        if self._unavailable_since is None:
            self._unavailable_since = now
        found_none_at = self._unavailable_since + self._options.wait_for_stream_s
        return max(give_up_at, found_none_at) if self.is_stream_known else found_none_at


# ---- silence ---------------------------------------------------------------------------------------------------------


# Delay before asking about a message that the server has not accepted (no leader, too many requests).
HOLE_PING_S = 0.1


class FastSilence:
    """The clock of one batch. ``sent_at`` arguments are the time of its last message."""

    def __init__(self, options: FastBatchOptions) -> None:
        self._options = options
        self._moved_at = self._pinged_at = 0.0
        self._look_at: float | None = None
        """When to ask about a message that the server has not accepted."""

    def on_progress(self, now: float) -> None:
        """Record progress: the server has processed more messages, or has opened the batch."""
        self._moved_at = now

    def on_hole(self, now: float) -> None:
        """Record that a message did not reach the batch. The server reports it after the next message, or after a
        ping."""
        if self._look_at is None:
            self._look_at = now + HOLE_PING_S

    def on_ping(self, now: float) -> None:
        """Record that the server is asked."""
        self._look_at = None
        self._pinged_at = now

    def begin_again(self) -> None:
        """Forget the question: the batch is not open any more."""
        self._look_at = None

    def gives_up_at(self, sent_at: float) -> float:
        """When to give up, if the server has to act."""
        return max(self._moved_at, sent_at) + self._options.timeout

    def next_deadline(self, sent_at: float, *, is_waiting: bool, is_connected: bool) -> float | None:
        """When to ask, or to give up; ``is_waiting`` if the server has to act next, and not the caller."""
        look_at = self._look_at or math.inf
        last_sent_at = max(sent_at, self._pinged_at)
        if not is_waiting:  # the caller has to act; the batch only has to be kept alive at the server
            return min(last_sent_at + self._options.keep_alive_s, look_at) if is_connected else None
        if not is_connected:  # no server can be asked, but the time runs
            return self.gives_up_at(sent_at)
        ask_at = max(self._moved_at, last_sent_at) + self._options.ping_after_s
        return min(self.gives_up_at(sent_at), ask_at, look_at)


# ---- the batch -------------------------------------------------------------------------------------------------------


# After these errors the server has dropped the batch.
_FATAL = frozenset(
    {Code.API_LEVEL_REQUIRED, Code.FAST_DISABLED, Code.FAST_PATTERN_INVALID, Code.FAST_ID_INVALID, Code.FAST_UNKNOWN}
)


class FastState(enum.Enum):
    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    COMMITTING = "committing"
    ENDED = "ended"


class FastMachine:
    """One fast batch."""

    def __init__(self, connection: Connection, owner: Reader, options: FastBatchOptions) -> None:
        """``owner`` is the driver's object that is woken when an answer has arrived."""
        self.options = options
        self.state = FastState.NEW
        self.acknowledged = 0
        self.ack: PubAck | None = None
        """The final acknowledgement, whether the batch was committed or ended by the server."""
        self.failure: Exception | None = None
        """The reason of an end other than our commit."""
        self.sender = FastSender(connection, options)
        self.opening = FastOpening(options)
        self.losses = FastLosses()
        self.inbox = FastInbox(connection, owner, options.batch_id)
        self._silence = FastSilence(options)
        self._connection = connection
        self._is_failing = options.gap == "fail"
        self._is_over_soon = False
        """Mode "fail", after a loss or a refusal: only the final acknowledgement is missing."""
        self._hole: Exception | None = None
        """The error of that loss or refusal; in both modes that of a denied message."""
        self._denials = FastDenials(connection, self.sender.uses)

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def is_new(self) -> bool:
        return self.state is FastState.NEW

    @property
    def is_opening(self) -> bool:
        """True while the answer to the first message decides whether a batch is opened."""
        return self.state is FastState.OPENING or (self.state is FastState.COMMITTING and self.sender.sequence == 1)

    @property
    def is_ended(self) -> bool:
        return self.state is FastState.ENDED

    @property
    def messages(self) -> int:
        """Number of messages added, stored or not."""
        return self.sender.sequence - len(self.losses.ends)

    @property
    def stored(self) -> int:
        """Number of messages stored for sure. In mode ``"ok"`` it is known only at the end."""
        count = (self.ack.batch_size or 0) if self.ack is not None else 0
        return max(self.acknowledged, count) if self._is_failing else self.losses.stored(count)

    # ---- sending -----------------------------------------------------------------------------------------------

    def start(self, item: Item, now: float, *, is_only: bool = False) -> None:
        """Send the first message; with ``is_only`` it is the last, too.

        The server's answer opens the batch, or returns it to ``NEW`` with ``reopen_at``.
        """
        assert self.state is FastState.NEW, self.state
        self._denials.begin()
        reply_prefix = self.inbox.open()
        self.opening.begin(now)
        self.sender.start(item, reply_prefix, now, is_only=is_only)
        self._enter(FastState.COMMITTING if is_only else FastState.OPENING)
        self.opening.on_sent()

    def commit(self, item: Item, now: float) -> None:
        """Send the last message, which ends the batch. It needs no room: nothing follows it."""
        assert self.state is FastState.OPEN, self.state
        self.sender.commit(item, now)
        self._enter(FastState.COMMITTING)

    def end(self, now: float) -> None:
        """End the batch without another message.

        An end with a message is better if there is one: this form is not replicated, so a new leader may take the batch
        for open again, for ten seconds. No message is lost by that.
        """
        assert self.state is FastState.OPEN, self.state
        self._submit_end(now)

    def _submit_end(self, now: float) -> None:
        end = self.sender.sequence + 1
        self.losses.ends.add(end)
        try:
            self.sender.end(now)
        finally:
            if self.sender.sequence < end:
                self.losses.ends.discard(end)  # refused or interrupted: the end has no sequence in the batch
        self._enter(FastState.COMMITTING)

    def ping(self, now: float) -> None:
        """Ask for the server's state of the batch, which also keeps the batch alive."""
        if self.state in (FastState.NEW, FastState.ENDED) or self._connection.is_closed:
            return
        self._silence.on_ping(now)
        self.sender.ping()

    def abandon(self, now: float) -> None:
        """End the batch at the server without waiting: the caller has left."""
        if not self._is_over_soon:
            self.sender.send_all(now)  # added messages are still sent
        if self.state in (FastState.OPENING, FastState.OPEN) and not self._connection.is_closed:
            self._submit_end(now)  # an open batch would occupy the server for ten seconds
        if self.state is not FastState.ENDED:
            self._over(UsageError(f"the batch was left; {self.acknowledged} messages are acknowledged"))

    # ---- answers -----------------------------------------------------------------------------------------------

    def on_replies(self, now: float) -> None:
        """Read all answers in the inbox."""
        inbox = self.inbox.subscription
        if inbox is None:
            return
        pending = inbox.pending
        while pending and self.state is not FastState.ENDED:
            self._on_reply(pending.popleft(), now)
        self.sender.send_wanted(now)
        if inbox.is_finished and self.state is not FastState.ENDED and inbox is self.inbox.subscription:
            self.fail(inbox.error or ConnectionClosed("the connection was closed"))

    def _on_reply(self, message: CoreMessage, now: float) -> None:
        try:
            match read_reply(message):
                case FlowAck(sequence, msgs_per_ack):
                    self._on_ack(sequence, msgs_per_ack, now)
                case GapReport(missing):
                    self._on_gap(missing, now)
                case Refusal() as refusal:
                    self._on_refused(refusal, now)
                case NobodyListens(_, operation):
                    error = unavailable(self.sender.first_subject, self._connection.info)
                    self._on_hole(operation, error, now)
                case StrayError(sequence, operation, error):
                    self._on_error(sequence, operation, error, now)
                case PubAck() as ack:
                    self._on_final(ack)
                case PlainAck(stream) if self.is_opening:
                    self._on_plain_ack(stream)
                case _:
                    raise no_answer(message)
        except JetSparkError as error:
            self.fail(error)

    def _on_ack(self, sequence: int, msgs_per_ack: int, now: float) -> None:
        check_range("ack", sequence, 0, self.sender.sent)  # the first one acknowledges none
        if self.state is FastState.OPENING:
            self._enter(FastState.OPEN)
            self.opening.is_stream_known = True
            self._silence.on_progress(now)
        self.sender.change_pace(msgs_per_ack)
        if sequence > self.acknowledged:
            self.acknowledged = min(sequence, self.messages)  # in mode "ok" a lost end of ours is counted, too
        self._move_to(sequence, now)

    def _enter(self, state: FastState) -> None:
        self.state = state
        self.sender.allow_more(state is FastState.OPEN and not self._is_over_soon)

    def _expect_the_end(self, hole: Exception) -> None:
        """Mode "fail": stop sending, because the server ends the batch before the failed message."""
        self._is_over_soon = True
        self._hole = self._hole or hole
        self.sender.drop_kept()

    def _move_to(self, sequence: int, now: float) -> None:
        if self.sender.move_to(sequence):
            self._silence.on_progress(now)

    def _on_gap(self, missing: range, now: float) -> None:
        check_range("gap", missing.start, 1, self.sender.sent + 1)
        check_range("gap", missing.stop, 1, self.sender.sent + 1)
        is_commit_lost = self.state is FastState.COMMITTING and self.sender.sequence in missing
        self.losses.add_gap(missing, self.sender.sent)
        self._move_to(missing.stop - 1, now)
        denied = self._denials.first()
        if self._is_failing:
            lost = ProtocolError(f"messages {missing.start} to {missing.stop - 1} were lost")
            self._expect_the_end(denied or lost)
        elif denied is not None:
            self._hole = denied
            if self.state is FastState.OPEN or is_commit_lost:
                self._submit_end(now)
        elif is_commit_lost:
            self._submit_end(now)  # the server waits for an end, and a sequence is never sent twice

    def _on_refused(self, refusal: Refusal, now: float) -> None:
        check_range("error", refusal.sequence, 1, self.sender.sent)
        self.losses.add_refusal(refusal)
        self._move_to(refusal.sequence, now)
        if self._is_failing:
            self._hole = refusal.error  # more exact than a gap, which it may have caused
            self._expect_the_end(refusal.error)

    def _on_error(self, sequence: int, operation: int, error: ServerError, now: float) -> None:
        """Handle an error outside of a batch's course: it was never opened, is gone, or does not have this message."""
        if self.is_opening:  # the batch is not open yet, so this decides about all of it
            if error.err_code in (Code.FAST_TOO_MANY, Code.TOO_MANY_REQUESTS):
                self._on_hole(operation, error, now)
            elif isinstance(error, BatchUnknown):  # the answer to a ping: the first message is lost, or the batch
                self.fail(error)
            else:
                self._refused_from_the_start(error)
        elif error.err_code in _FATAL:  # messages after the last acknowledgement may be stored or not
            self.fail(error)
        elif self._is_failing and sequence == 1:
            # The server acknowledges the first message before it checks it. If it then refuses it, it drops the batch
            # and answers in this form, not with "err" and a final acknowledgement.
            self._refused_from_the_start(error)
        else:
            # A message that arrived too fast was dropped, and will be in a gap; a ping is not a message.
            if error.err_code != Code.TOO_MANY_REQUESTS and operation != FrameKind.PING:
                self.losses.add_refusal(Refusal(sequence, error))
            self._on_hole(operation, error, now)

    def _on_hole(self, operation: int, error: Exception, now: float) -> None:
        """Handle a message that did not reach the batch."""
        # A ping without an answer shows nothing about messages: the next message will show whether the batch is open.
        if self.is_opening and operation != FrameKind.PING:
            self._reopen_later(error, now)
            return
        if self._is_failing and operation != FrameKind.PING:
            self._expect_the_end(error)
        self._silence.on_hole(now)

    def _refused_from_the_start(self, error: ServerError) -> None:
        if not self.losses.errors:
            self.losses.add_refusal(Refusal(1, error))
        self._over(error)

    def _reopen_later(self, error: Exception, now: float) -> None:
        """Send the first message again later: nothing was stored, and the server has no batch."""
        if not self.opening.on_refused(error, now):
            self._over(error)
            return
        self.inbox.close()
        self._enter(FastState.NEW)
        self.sender.begin_again()
        self.losses.begin_again()
        self._silence.begin_again()

    def _on_final(self, ack: PubAck) -> None:
        count = ack.batch_size or 0
        # In mode "ok" it counts sequences, including lost ends of ours.
        sent = self.sender.sent
        check_range("final ack", count, 0, min(sent, self.messages) if self._is_failing else sent)
        self.ack = ack
        if self._is_our_commit(count):
            self.acknowledged = self.messages
            self._over(self._hole if isinstance(self._hole, PermissionDenied) else None)
        elif self._is_failing:
            self.acknowledged = max(self.acknowledged, count)
            failure = BatchCutShort(self.inbox.batch_id, count, str(self._hole or "the server ended it"))
            # A refusal would be repeated; a loss, or a missing leader, would not.
            failure.__cause__ = self._hole if isinstance(self._hole, ServerError) else None
            self._over(self._denied_after(failure))
        else:
            # Two writers with one id, or a sequence that arrived twice: then the server ends a batch of this mode, too.
            self._over(BatchInDoubt(self.inbox.batch_id, "the server ended the batch, though gaps are allowed", 0))

    def _is_our_commit(self, count: int) -> bool:
        """True if the batch ended at our end, and not before."""
        if self.state is not FastState.COMMITTING or self.sender.sent != self.sender.sequence:
            return False
        # The count decides, not earlier reports: a lost end-of-batch causes a gap, too, but no message is missing.
        if self._is_failing:
            return count == self.messages
        # The server counts sequences, so all of them, including a lost end; but not a last message that it refused. Any
        # other sequence above the count was lost without a report.
        return self.losses.explain(range(count + 1, self.messages + 1))

    def _on_plain_ack(self, stream: str) -> None:
        """Fail, because the stream's leader is too old for batches: it stored the first message as a plain one."""
        self.acknowledged = 1
        reason = f"older: stream {stream!r} is led by one that stored the first message as a plain one"
        self._over(FeatureUnavailable("fast ingest", "2.14", reason))

    def on_event(self, event: ConnectionEvent, now: float) -> None:
        """Handle an event of the connection."""
        match event:
            case Disconnected():
                self.on_replies(now)
                self._on_disconnected()
            case Reconnected():
                self.sender.on_session()
                # The batch outlives the session: if it is still open, the answer shows the losses between the sessions.
                self.ping(now)
            case Closed(error, _):
                self.on_replies(now)
                if self.state not in (FastState.NEW, FastState.ENDED):
                    self.fail(error or ConnectionClosed("the connection was closed"))
            case ErrorReported(PermissionDenied(operation="publish")):
                self.on_replies(now)  # answers read before the denial count
                self._on_denied(now)

    def _denied_after(self, failure: BatchCutShort) -> Exception:
        """The denial that has cut the batch short, if any, with the count of stored messages in its cause."""
        denied = self._hole if isinstance(self._hole, PermissionDenied) else self._denials.first()
        if denied is None:
            return failure
        denied.__cause__ = failure
        return denied

    def _on_denied(self, now: float) -> None:
        """Handle a denied publish of the connection, perhaps one of the batch's."""
        denied = self._denials.news()
        if denied is None or self.state in (FastState.NEW, FastState.ENDED):
            return
        if denied.subject == self.sender.first_subject:
            if self.is_opening:
                self._over(denied)
            else:
                self.fail(denied)  # we may not ask how far the batch came: pings go to the same subject
        elif not isinstance(self._hole, PermissionDenied):
            # Not the end yet: the denied message may be from before the batch. The server knows the missing ones. It is
            # asked at once, but not for each of a thousand messages.
            if self._denials.has_asked:
                self._silence.on_hole(now)
            else:
                self._denials.has_asked = True
                self.ping(now)

    def _on_disconnected(self) -> None:
        """Record a lost session: a gap or a refusal is reported once, perhaps into it; acknowledgements are
        repeated."""
        # In mode "fail" the final count suffices, whatever was missed.
        if not self._is_failing and self.state not in (FastState.NEW, FastState.ENDED):
            self.losses.lose_session(self.acknowledged, self.sender.sent)

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` has to be called next; None without a deadline."""
        if self.state in (FastState.NEW, FastState.ENDED):
            return None
        return self._silence.next_deadline(
            self.sender.sent_at, is_waiting=self.is_waiting, is_connected=self._connection.is_connected
        )

    def on_time(self, now: float) -> None:
        """Ask, keep the batch alive, or give up, when one of these is due."""
        self.on_replies(now)  # answers read in time count
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        if self.is_waiting and now >= self._silence.gives_up_at(self.sender.sent_at):
            self.fail(RequestTimeout(f"batch {self.inbox.batch_id!r}", self.options.timeout))
        else:
            self.ping(now)

    @property
    def is_waiting(self) -> bool:
        """True if the server has to act next, and not the caller."""
        return self.state is not FastState.OPEN or self.sender.sent >= self.sender.wanted

    @property
    def room_timeout_s(self) -> float:
        """Longest wait of a message for room in the connection's buffer."""
        return self.options.timeout

    # ---- small steps -------------------------------------------------------------------------------------------

    def on_no_room(self, now: float) -> None:
        """Give up: the connection took nothing for ``room_timeout_s``, whenever the last answer came."""
        self.fail(RequestTimeout(f"a message of batch {self.inbox.batch_id!r}", self.room_timeout_s, was_sent=False))

    def fail(self, error: Exception) -> None:
        """Give up: messages without an acknowledgement may be stored or not."""
        if self.state is not FastState.ENDED:
            failure = BatchInDoubt(self.inbox.batch_id, str(error) or type(error).__name__, self.stored)
            failure.__cause__ = error
            self._over(failure)

    def _over(self, failure: Exception | None) -> None:
        self._enter(FastState.ENDED)
        self.sender.drop_kept()
        self.failure = failure
        self.inbox.close()
        self._denials.end()

    def check(self) -> None:
        """Check that the batch may be used.

        Raises:
            JetSparkError: It is over.
        """
        if self.state is FastState.ENDED:
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            raise UsageError("the batch is committed; begin another one")
        if self.state is FastState.COMMITTING:
            if isinstance(self._hole, PermissionDenied):
                raise self._hole.with_traceback(None)
            raise UsageError("the batch is being committed; begin another one")
