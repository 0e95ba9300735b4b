"""Fast ingest: one batch, paced by the server, of any length. No socket, no clock.

States, and who moves them::

    NEW ──add()──> OPENING ──first ack──> OPEN ──commit(), end()──> COMMITTING ──final ack──> ENDED
     ^               │                     │ │                          │
     └─503, 10211────┘                     │ └──gap, err ("fail")──> waiting for the final ack, nothing is sent
       nothing was stored, try again       └──final ack, 10208, no answer, connection over──────────────────> ENDED

Whatever the server has to say about the batch arrives in one inbox, over the reply subjects of its messages
(``fast_wire``), and is told apart by its content alone: on a replicated stream the final acknowledgement may come on
another message's reply subject.

This module has the states and the decisions. ``fast_sending`` numbers and paces what goes out, ``fast_wire`` spells it,
``fast_losses`` keeps what the server reported as not stored, and ``fast_opening`` has the attempts to open the batch.

Silence is answered by a ping with the highest sequence sent. It brings the last ack again, reports a lost tail as a
gap, and keeps the batch of a slow producer alive (the server forgets one after ten idle seconds). What it does not
tell is how much is stored: only an ack, or the final one, does.

The end, in mode ``"fail"``: the stored messages are always the first ones, and the final acknowledgement counts them.
In mode ``"ok"`` its count is that of sequences, stored or not: ``gaps`` and ``errors`` say which are not, and
``doubts`` what nobody can know because a session was lost.

Invariants: ``acknowledged`` never goes back, and in mode ``"fail"`` all up to it are stored. Nothing is sent once the
server said that the batch is over. What cannot be explained leaves the batch in doubt, never committed.
"""

from __future__ import annotations

import enum
import math
from typing import Any

from jetspark.codes import Code
from jetspark.core.connection import Connection
from jetspark.core.events import Closed, ConnectionEvent, Disconnected, ErrorReported, Reconnected
from jetspark.core.machine import Reader
from jetspark.core.message import CoreMessage, is_no_responders
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    BatchUnknown,
    ConnectionClosed,
    FeatureUnavailable,
    JetSparkError,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    ServerError,
    UsageError,
)
from jetspark.jetstream import wire
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.info import PubAck
from jetspark.publish.fast_losses import FastLosses
from jetspark.publish.fast_opening import FastOpening
from jetspark.publish.fast_options import FastBatchOptions, Refusal
from jetspark.publish.fast_sending import FastSender
from jetspark.publish.fast_wire import FLOW_ACK, FrameKind, check_range, number, place_of
from jetspark.publish.outgoing import Item

__all__ = ["FastMachine", "FastState"]

# A message the server has not taken for the moment (no leader, too many requests) is looked into after this long.
HOLE_PING_S = 0.1

# After these the server has no such batch any more.
_FATAL = frozenset(
    {Code.API_LEVEL_REQUIRED, Code.FAST_DISABLED, Code.FAST_PATTERN_INVALID, Code.FAST_ID_INVALID, Code.FAST_UNKNOWN}
)


class FastState(enum.Enum):
    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    COMMITTING = "committing"
    ENDED = "ended"


class FastMachine(FastSender):
    """One fast batch."""

    def __init__(self, machine: Connection, owner: Reader, options: FastBatchOptions) -> None:
        """``owner`` is the driver's object that is woken when the server said something."""
        super().__init__(machine, options)
        self.state = FastState.NEW
        self.acknowledged = 0
        self.ack: PubAck | None = None
        """The final one, however the batch ended."""
        self.failure: Exception | None = None
        """Why it ended otherwise than by our commit."""
        self.opening = FastOpening(options)
        self.losses = FastLosses()
        self._owner = owner
        self._is_failing = options.gap == "fail"
        self._is_over_soon = False
        """Mode "fail", and something was lost or refused: only the final acknowledgement is missing."""
        self._hole: Exception | None = None
        """What it was."""
        self._inbox: SubscriptionState | None = None
        self._first_subject = ""
        self._pinged_at = self._moved_at = 0.0
        self._ping_at: float | None = None
        """When to look into a message that the server has not taken."""
        self._id = ""

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Empty before the first message, unless the caller gave one."""
        return self._id or self.options.batch_id or ""

    @property
    def is_new(self) -> bool:
        return self.state is FastState.NEW

    @property
    def is_opening(self) -> bool:
        """The fate of the first message decides whether there will be a batch."""
        return self.state is FastState.OPENING or (self.state is FastState.COMMITTING and self.sequence == 1)

    @property
    def is_ended(self) -> bool:
        return self.state is FastState.ENDED

    @property
    def messages(self) -> int:
        """Added, stored or not."""
        return self.sequence - len(self.losses.ends)

    @property
    def stored(self) -> int:
        """How many are stored for sure. In mode ``"ok"`` that is known at the end only."""
        count = (self.ack.batch_size or 0) if self.ack is not None else 0
        return max(self.acknowledged, count) if self._is_failing else self.losses.stored(count)

    @property
    def gaps(self) -> list[range]:
        """Lost on the way."""
        return self.losses.gaps

    @property
    def errors(self) -> list[Refusal]:
        """Refused by the server."""
        return self.losses.errors

    @property
    def doubts(self) -> list[range]:
        """Mode ``"ok"``: the session was lost while these were under way, and they were not reported since."""
        return self.losses.doubts

    @property
    def news(self) -> list[range | Refusal]:
        """Gaps and errors that nobody was told yet; the driver that tells them replaces the list."""
        return self.losses.news

    @news.setter
    def news(self, news: list[range | Refusal]) -> None:
        self.losses.news = news

    @property
    def reopen_at(self) -> float | None:
        """The server could not open the batch for the moment: when to try again."""
        return self.opening.reopen_at

    @property
    def inbox(self) -> SubscriptionState | None:
        return self._inbox

    # ---- sending -----------------------------------------------------------------------------------------------

    def start(self, item: Item, now: float, *, is_only: bool = False) -> None:
        """Send the first message; with ``is_only`` it is the last, too.

        The server's answer moves the batch on, or back to ``NEW`` with ``reopen_at``.
        """
        assert self.state is FastState.NEW, self.state
        self._open_inbox()
        self.opening.begin(now)
        operation = FrameKind.COMMIT if is_only else FrameKind.START
        self._send([self._frames.frame(item, 1, operation)], 1, now)
        self._first_subject = item[0]
        self._enter(FastState.COMMITTING if is_only else FastState.OPENING)
        self.opening.on_sent()

    def commit(self, item: Item, now: float) -> None:
        """Send the last message, which ends the batch. It needs no room: nothing follows it."""
        assert self.state is FastState.OPEN, self.state
        self._place_last(self._frames.frame(item, self.sequence + 1, FrameKind.COMMIT), now)

    def end(self, now: float) -> None:
        """End the batch without another message.

        The form with a message is better where there is one: this one is not replicated, so a new leader may take the
        batch for open again, for ten seconds. Nothing is lost by that.
        """
        assert self.state is FastState.OPEN, self.state
        self._place_end(now)

    def _place_end(self, now: float) -> None:
        end = self.sequence + 1
        frame = self._control(end, FrameKind.END)
        self.losses.ends.add(end)
        try:
            self._place_last(frame, now, is_urgent=True)
        finally:
            if self.sequence < end:
                self.losses.ends.discard(end)  # refused or interrupted: it has no place in the batch

    def _place_last(self, frame: bytes, now: float, *, is_urgent: bool = False) -> None:
        if self._early:
            self._keep([frame])
        else:
            self._send([frame], self.sequence + 1, now, is_urgent=is_urgent)
        self._enter(FastState.COMMITTING)

    def ping(self, now: float) -> None:
        """Ask where the batch stands, and keep it alive."""
        if self.state in (FastState.NEW, FastState.ENDED) or self._machine.is_closed:
            return
        self._ping_at = None
        self._pinged_at = now
        self._machine.publish_frames([self._control(self.sent, FrameKind.PING)], is_urgent=True)

    def _control(self, sequence: int, operation: FrameKind) -> bytes:
        return self._frames.frame((self._first_subject, b""), sequence, operation)

    def abandon(self, now: float) -> None:
        """The caller has no use for the batch any more: tell the server, wait for nothing."""
        if not self._is_over_soon:
            # What was added was added, and there is nobody to wait until it is wanted.
            self._send_early(len(self._early), now)
        if self.state in (FastState.OPENING, FastState.OPEN) and not self._machine.is_closed:
            self._place_end(now)  # an open batch slows others down for ten seconds
        if self.state is not FastState.ENDED:
            self._over(UsageError(f"the batch was left; {self.acknowledged} messages are acknowledged"))

    def _open_inbox(self) -> None:
        """One of its own, so that interest can be dropped as soon as the batch is over."""
        self._close_inbox()
        prefix, batch_id = self._machine.new_batch()
        if self.options.batch_id is not None:
            prefix, batch_id = f"{prefix}.{batch_id}", self.options.batch_id
        # No more can arrive than was asked for: an answer a message at the very most.
        inbox = self._machine.subscribe(f"{prefix}.{batch_id}.>", is_unbounded=True, is_inbox=True, reader=self._owner)
        self._inbox, self._id = inbox, batch_id
        self._frames.reply_to(f"{prefix}.{batch_id}", self.options.flow, self.options.gap)

    def _close_inbox(self) -> None:
        inbox, self._inbox = self._inbox, None
        if inbox is not None and not inbox.is_finished and not self._machine.is_closed:
            self._machine.unsubscribe(inbox)

    # ---- what comes back ---------------------------------------------------------------------------------------

    def on_replies(self, now: float) -> None:
        """Take everything that has arrived in the inbox."""
        inbox = self._inbox
        if inbox is None:
            return
        pending = inbox.pending
        while pending and self.state is not FastState.ENDED:
            self._on_reply(pending.popleft(), now)
        if self._early and self.wanted > self.sent:
            self._send_early(self.wanted - self.sent, now)
        if inbox.is_finished and self.state is not FastState.ENDED and inbox is self._inbox:
            self._in_doubt(inbox.error or ConnectionClosed("the connection was closed"))

    def _on_reply(self, message: CoreMessage, now: float) -> None:
        try:
            plain = FLOW_ACK.fullmatch(message.data)
            if plain is not None:
                self._on_ack(int(plain[1]), int(plain[2]), now)
            elif is_no_responders(message):
                error = unavailable(self._first_subject, self._machine.info)
                self._on_hole(*place_of(message.subject), error, now)
            else:
                self._on_json(message, wire.read_object(message.data), now)
        except JetSparkError as error:
            self._in_doubt(error)

    def _on_json(self, message: CoreMessage, reply: dict[str, Any], now: float) -> None:
        error = wire.error_of(reply)
        # Errors come in two shapes: "err" is about one message of a batch that is open, and one without a type is the
        # answer to a message that never became part of it. The final acknowledgement has no type, but the batch's id.
        match reply.get("type"):
            case "ack":
                self._on_ack(number(reply, "seq"), number(reply, "msgs"), now)
            case "gap":
                self._on_gap(range(number(reply, "last_seq"), number(reply, "seq")), now)
            case "err" if error is not None:
                self._on_refused(Refusal(number(reply, "seq"), error), now)
            case _ if error is not None:
                self._on_error(*place_of(message.subject), error, now)
            case _ if isinstance(reply.get("batch"), str):
                self._on_final(wire.decode(PubAck, reply))
            case None if self.is_opening and isinstance(reply.get("seq"), int):  # as of a plain publish
                self._on_plain_ack(str(reply.get("stream")))
            case _:
                raise ProtocolError(f"an answer to a fast batch that is none: {message.data[:80]!r}")

    def _on_ack(self, sequence: int, msgs_per_ack: int, now: float) -> None:
        check_range("ack", sequence, 0, self.sent)  # the first one acknowledges none
        if self.state is FastState.OPENING:
            self._enter(FastState.OPEN)
            self.opening.is_stream_known = True
            self._moved_at = now
        self._pace.change(msgs_per_ack)
        self._set_limit()
        if sequence > self.acknowledged:
            self.acknowledged = min(sequence, self.messages)  # in mode "ok" a lost end of ours is counted, too
        self._move_to(sequence, now)

    def _enter(self, state: FastState) -> None:
        self.state = state
        self._takes_more = state is FastState.OPEN and not self._is_over_soon
        self._set_limit()

    def _expect_the_end(self, hole: Exception) -> None:
        """Mode "fail": the server ends the batch before this, so nothing that follows it would be stored."""
        self._is_over_soon, self._takes_more = True, False
        self._hole = self._hole or hole
        self._drop_early()

    def _move_to(self, sequence: int, now: float) -> None:
        if self._pace.move_to(sequence):
            self._moved_at = now
            self._set_limit()

    def _on_gap(self, missing: range, now: float) -> None:
        # "last_seq" is the first that is missing, and "seq" the one that was received; for a ping, one above it.
        check_range("gap", missing.start, 1, self.sent + 1)
        check_range("gap", missing.stop, 1, self.sent + 1)
        is_commit_lost = self.state is FastState.COMMITTING and self.sequence in missing
        self.losses.add_gap(missing, self.sent)
        self._move_to(missing.stop - 1, now)
        if self._is_failing:
            self._expect_the_end(ProtocolError(f"messages {missing.start} to {missing.stop - 1} were lost"))
        elif is_commit_lost:
            self._place_end(now)  # the server waits for an end, and a sequence is sent once

    def _on_refused(self, refusal: Refusal, now: float) -> None:
        check_range("error", refusal.sequence, 1, self.sent)
        self.losses.add_refusal(refusal)
        self._move_to(refusal.sequence, now)
        if self._is_failing:
            self._hole = refusal.error  # more exact than a gap, which it may have made
            self._expect_the_end(refusal.error)

    def _on_error(self, sequence: int, operation: int, error: ServerError, now: float) -> None:
        """An error that is not about the batch's course: it never opened, is gone, or does not have this message."""
        if self.is_opening:  # there is no batch yet, so this decides about all of it
            if error.err_code in (Code.FAST_TOO_MANY, Code.TOO_MANY_REQUESTS):
                self._on_hole(sequence, operation, error, now)
            elif isinstance(error, BatchUnknown):  # the answer to a ping: the first message is lost, or the batch
                self._in_doubt(error)
            else:
                self._refused_from_the_start(error)
        elif error.err_code in _FATAL:  # what was sent after the last acknowledgement is stored or not
            self._in_doubt(error)
        elif self._is_failing and sequence == 1:
            # The server acknowledges the first message before it looks at it; if it does not like it, it forgets the
            # batch and says so in this shape, not as "err" and a final acknowledgement.
            self._refused_from_the_start(error)
        else:
            # A message that came too fast was dropped on the way, and will be in a gap; a ping is no message.
            if error.err_code != Code.TOO_MANY_REQUESTS and operation != FrameKind.PING:
                self.losses.add_refusal(Refusal(sequence, error))
            self._on_hole(sequence, operation, error, now)

    def _on_hole(self, sequence: int, operation: int, error: Exception, now: float) -> None:
        """A message did not reach the batch. The server notices with the next one; if there is none, with a ping."""
        # A ping that nobody took says nothing about messages: whether the batch is there, the next one will tell.
        if self.is_opening and operation != FrameKind.PING:
            self._reopen_later(error, now)
            return
        if self._is_failing and operation != FrameKind.PING:
            self._expect_the_end(error)
        if self._ping_at is None:
            self._ping_at = now + HOLE_PING_S

    def _refused_from_the_start(self, error: ServerError) -> None:
        if not self.errors:
            self.losses.add_refusal(Refusal(1, error))
        self._over(error)

    def _reopen_later(self, error: Exception, now: float) -> None:
        """Nothing was stored, and the server knows of no batch: the first message may be sent again."""
        if not self.opening.on_refused(error, now):
            self._over(error)
            return
        self._close_inbox()
        self._enter(FastState.NEW)
        self._begin_again()
        self.losses.begin_again()
        self._ping_at = None

    def _on_final(self, ack: PubAck) -> None:
        count = ack.batch_size or 0
        # In mode "ok" the count is one of sequences, and ends of ours that were lost are among them.
        check_range("final ack", count, 0, min(self.sent, self.messages) if self._is_failing else self.sent)
        self.ack = ack
        if self._is_our_commit(count):
            self.acknowledged = self.messages
            self._over(None)
        elif self._is_failing:
            self.acknowledged = max(self.acknowledged, count)
            failure = BatchCutShort(self._id, count, str(self._hole or "the server ended it"))
            # What was refused is refused again, mostly; what was lost, or found no leader, is not.
            failure.__cause__ = self._hole if isinstance(self._hole, ServerError | PermissionDenied) else None
            self._over(failure)
        else:
            # Two writers with one id, or a sequence that came twice: then the server ends a batch of this mode, too.
            self._over(BatchInDoubt(self._id, "the server ended the batch, though gaps are allowed", 0))

    def _is_our_commit(self, count: int) -> bool:
        """Whether the batch ended where we ended it, and not before."""
        if self.state is not FastState.COMMITTING or self.sent != self.sequence:
            return False
        # The count decides, not what was heard before: a lost end-of-batch makes a gap, too, but nothing is missing.
        if self._is_failing:
            return count == self.messages
        # The server counts sequences, so all of them, and a lost end as well; but not a last message that it refused.
        # Anything else above the count was sent for nothing, and nobody told us.
        return self.losses.explain(range(count + 1, self.messages + 1))

    def _on_plain_ack(self, stream: str) -> None:
        """The stream's leader is too old to know batches: it stored the first message like any other."""
        self.acknowledged = 1
        reason = f"older: stream {stream!r} is led by one that stored the first message as a plain one"
        self._over(FeatureUnavailable("fast ingest", "2.14", reason))

    def on_event(self, event: ConnectionEvent, now: float) -> None:
        """Something happened to the connection."""
        match event:
            case Disconnected():
                self.on_replies(now)
                self._on_disconnected()
            case Reconnected():
                self._on_session()
                # The batch is not the session's: if it is still there, this tells what was lost between them.
                self.ping(now)
            case Closed(error, _):
                self.on_replies(now)
                if self.state not in (FastState.NEW, FastState.ENDED):
                    self._in_doubt(error or ConnectionClosed("the connection was closed"))
            case ErrorReported(PermissionDenied(operation="publish") as error) if error.subject in self._heads:
                if self.is_opening and error.subject == self._first_subject:
                    self._over(error)
                elif self.state is not FastState.ENDED:
                    self._on_hole(0, FrameKind.APPEND, error, now)

    def _on_disconnected(self) -> None:
        """A gap or a refusal is said once, perhaps into the session that is gone; acknowledgements come again."""
        # In mode "fail" the final count says it all, whatever was not heard.
        if not self._is_failing and self.state not in (FastState.NEW, FastState.ENDED):
            self.losses.lose_session(self.acknowledged, self.sent)

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` wants to be called next, seen from now; None while there is nothing to wait for."""
        if self.state in (FastState.NEW, FastState.ENDED):
            return None
        is_connected, ping_at = self._machine.is_connected, self._ping_at or math.inf
        last_sent_at = max(self._sent_at, self._pinged_at)
        if not self.is_waiting:  # the caller is to act; the server only must not forget the batch
            return min(last_sent_at + self.options.keep_alive_s, ping_at) if is_connected else None
        if not is_connected:  # nobody could be asked, but time goes by
            return self._stalled_at
        return min(self._stalled_at, max(self._moved_at, last_sent_at) + self.options.ping_after_s, ping_at)

    def on_time(self, now: float) -> None:
        """Time has passed: ask, keep alive, or give up."""
        self.on_replies(now)  # what was read in time counts
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        if self.is_waiting and now >= self._stalled_at:
            self._in_doubt(RequestTimeout(f"batch {self._id!r}", self.options.timeout))
        else:
            self.ping(now)

    @property
    def is_waiting(self) -> bool:
        """Whether the server is to act next, and not the caller."""
        return self.state is not FastState.OPEN or self.sent >= self.wanted

    @property
    def room_timeout_s(self) -> float:
        """How long a message may wait for room in the connection's buffer."""
        return self.options.timeout

    @property
    def _stalled_at(self) -> float:
        return max(self._moved_at, self._sent_at) + self.options.timeout

    # ---- small steps -------------------------------------------------------------------------------------------

    def on_no_room(self, now: float) -> None:
        """The connection took nothing for ``room_timeout_s``, however long ago the server was heard."""
        self._in_doubt(RequestTimeout(f"a message of batch {self._id!r}", self.room_timeout_s, was_sent=False))

    def fail(self, error: Exception) -> None:
        """Give up: nobody knows about what is not acknowledged."""
        self._in_doubt(error)

    def _in_doubt(self, error: Exception) -> None:
        if self.state is not FastState.ENDED:
            failure = BatchInDoubt(self._id, str(error) or type(error).__name__, self.stored)
            failure.__cause__ = error
            self._over(failure)

    def _over(self, failure: Exception | None) -> None:
        self._enter(FastState.ENDED)
        self._drop_early()
        self.failure = failure
        self._close_inbox()

    def check(self) -> None:
        """Whether the batch may be used.

        Raises:
            JetSparkError: It is over.
        """
        if self.state is FastState.ENDED:
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            raise UsageError("the batch is committed; begin another one")
        if self.state is FastState.COMMITTING:
            raise UsageError("the batch is being committed; begin another one")
