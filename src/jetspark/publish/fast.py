"""Fast ingest: one batch, paced by the server, of any length. No socket, no clock.

States, and who moves them::

    NEW ──add()──> OPENING ──first ack──> OPEN ──commit(), end()──> COMMITTING ──final ack──> ENDED
     ^               │                     │ │                          │
     └─503, 10211────┘                     │ └──gap, err ("fail")──> waiting for the final ack, nothing is sent
       nothing was stored, try again       └──final ack, 10208, no answer, connection over──────────────────> ENDED

"Nobody listens" (503) to the first message says that nothing was stored and that no batch is open: no stream stores the
subject, JetStream is off, or a leader is being elected. Only the last one passes, so the message is sent again for
``wait_for_stream_s``. A batch that a stream has answered, if only that it has too many, has ``timeout`` for a 503.

Every message carries ``<prefix>.<id>.<flow>.<gap>.<sequence>.<operation>.$FI`` as its reply subject; whatever the
server has to say about the batch arrives in one inbox over ``<prefix>.<id>.>``, and is told apart by its content
alone: on a replicated stream the final acknowledgement may come on another message's reply subject.

Pace. The server acknowledges every ``msgs`` messages, a number that it changes as it likes, and the client lets at
most ``max_outstanding_acks`` of those be outstanding: all up to ``progress + msgs * max_outstanding_acks`` are wanted.
Progress is the highest sequence the server is known to be done with: acknowledged, refused with an error, or reported
missing. An ack says that all before it are done with, so a lost one does not matter; and refusals and gaps must
count, because no acknowledgement follows when nothing of a window was stored.

As many messages as one acknowledgement is for may come early, before they are wanted. They are kept here as frames, and
leave with the answer that wants them: the server mostly acknowledges whole windows at once, and then has nothing to do
until something reaches it.

Silence is answered by a ping with the highest sequence sent. It brings the last ack again, reports a lost tail as a
gap, and keeps the batch of a slow producer alive (the server forgets one after ten idle seconds). What it does not
tell is how much is stored: only an ack, or the final one, does.

The end, in mode ``"fail"``: the stored messages are always the first ones, and the final acknowledgement counts them.
In mode ``"ok"`` its count is that of sequences, stored or not: ``gaps`` and ``errors`` say which are not. The server
says so once, at the moment it notices, and neither a ping nor an acknowledgement brings it again. So what it said into
a session that was lost is not known: all that was sent and not acknowledged then, and that no later report is about,
is in ``doubts``, and mostly stored.

Invariants: a sequence is sent once. A message is in at most one of ``gaps``, ``errors`` and ``doubts``, and reported
once, however often the server reports it. ``acknowledged`` never goes back, and in mode ``"fail"`` all up to it are
stored. Nothing is sent once the server said that the batch is over. What is kept is the last of what was added; it is
sent before anything that is added later, or never.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from jetspark.codes import Code
from jetspark.core import frames
from jetspark.core.backoff import Backoff
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
    JetStreamUnavailable,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    ServerError,
    UsageError,
)
from jetspark.jetstream import wire
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.publishing import header_block
from jetspark.publish.fast_options import HIGHEST_FLOW, FastBatchOptions, Refusal
from jetspark.publish.outgoing import CHUNK_BYTES, CHUNK_MESSAGES, Item

__all__ = ["FastMachine", "FastState", "Operation"]

# Exact reports need memory. A batch with more separate losses than this has no use for going on.
MAX_REPORTS = 100_000
# Publishers use few subjects; see Connection, which has the same bound.
MAX_KNOWN_SUBJECTS = 4096
# A message the server has not taken for the moment (no leader, too many requests) is looked into after this long.
HOLE_PING_S = 0.1
REOPEN = Backoff(first_s=0.05, max_s=1.0)

_FLOW_ACK = re.compile(rb'\{"type":"ack","seq":([0-9]{1,19}),"msgs":([0-9]{1,9})\}')

# After these the server has no such batch any more.
_FATAL = frozenset(
    {Code.API_LEVEL_REQUIRED, Code.FAST_DISABLED, Code.FAST_PATTERN_INVALID, Code.FAST_ID_INVALID, Code.FAST_UNKNOWN}
)


class Operation(enum.IntEnum):
    """The last number of a reply subject."""

    START = 0
    APPEND = 1
    COMMIT = 2
    END = 3
    PING = 4


class FastState(enum.Enum):
    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    COMMITTING = "committing"
    ENDED = "ended"


class FastMachine:
    """One fast batch."""

    def __init__(self, machine: Connection, owner: Reader, options: FastBatchOptions) -> None:
        """``owner`` is the driver's object that is woken when the server said something."""
        self.options = options
        self.state = FastState.NEW
        self.sequence = 0
        """The highest that a message has."""
        self.sent = 0
        """The highest sent; above it is what came early."""
        self.acknowledged = 0
        self.gaps: list[range] = []
        self.errors: list[Refusal] = []
        self.ack: PubAck | None = None
        """The final one, however the batch ended."""
        self.failure: Exception | None = None
        """Why it ended otherwise than by our commit."""
        self.news: list[range | Refusal] = []
        """Gaps and errors that nobody was told yet."""
        self.reopen_at: float | None = None
        """The server could not open the batch for the moment: when to try again."""
        self.reopen_error: Exception | None = None
        """Why it could not; None as soon as it is tried again, which may succeed."""
        self.is_stream_known = False
        """A stream answered, if only to refuse: "nobody listens" means from now on that it has no leader."""
        self._machine, self._owner = machine, owner
        self._is_failing = options.gap == "fail"
        self._progress = 0
        self._msgs_per_ack = 1
        self._window = options.max_outstanding_acks
        """How far the sequence may be ahead of progress: ``max_outstanding_acks`` times ``msgs_per_ack``."""
        self.wanted = 0
        """The highest sequence that may be sent now; a number by itself, because it is looked at for every message."""
        self.limit = 0
        """The highest sequence that may be given to a message now; likewise."""
        self._early: list[bytes] = []
        """Frames of messages that are not wanted yet."""
        self._early_bytes = 0
        self._is_over_soon = False
        """Mode "fail", and something was lost or refused: only the final acknowledgement is missing."""
        self._hole: Exception | None = None
        self._gaps_end = 0
        self._refused: set[int] = set()
        """Sequences of ``errors``."""
        self._unheard: list[range] = []
        """Mode "ok": what was under way each time a session was lost."""
        self._ends: set[int] = set()
        """Sequences of ours that are no messages."""
        self._inbox: SubscriptionState | None = None
        self._max_payload_bytes = machine.info.max_payload_bytes
        self._reply = b""
        self._heads: dict[str, bytes] = {}
        """Subject to the beginning of its frames, up to the sequence."""
        self._first_subject = ""
        self._opening_since: float | None = None
        self._unavailable_since: float | None = None
        """Since when nobody listens to the first message."""
        self._times_reopened = 0
        self._sent_at = self._pinged_at = self._moved_at = 0.0
        self._ping_at: float | None = None
        self._id = ""

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Empty before the first message, unless the caller gave one."""
        return self._id or self.options.batch_id or ""

    @property
    def room(self) -> int:
        """How many messages may be added now."""
        room = self.limit - self.sequence
        return room if room > 0 else 0

    @property
    def due(self) -> int:
        """How many messages the server wants now."""
        return max(0, self.wanted - self.sequence)

    @property
    def msgs_per_ack(self) -> int:
        """The server's present pace."""
        return self._msgs_per_ack

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
        return self.sequence - len(self._ends)

    @property
    def stored(self) -> int:
        """So many are stored for sure. In mode ``"ok"`` that is known at the end only."""
        if self._is_failing:
            return max(self.acknowledged, (self.ack.batch_size or 0) if self.ack is not None else 0)
        if self.ack is None:
            return 0
        last = self.ack.batch_size or 0
        return last - _covered([*self._accounted_for(), *self._unheard], last)

    @property
    def doubts(self) -> list[range]:
        """Mode ``"ok"``: the session was lost while these were under way, and they were not reported since."""
        known = self._accounted_for() if self._unheard else []
        return [part for unheard in self._unheard for part in _without(unheard, known)]

    def _accounted_for(self) -> list[range]:
        """Sequences that are surely not stored, or no messages."""
        return [*self.gaps, *(range(sequence, sequence + 1) for sequence in (*self._refused, *self._ends))]

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
        if self._opening_since is None:
            self._opening_since = now
        operation = Operation.COMMIT if is_only else Operation.START
        self._send([self._frame(item, 1, operation)], 1, now)
        self._first_subject = item[0]
        self._enter(FastState.COMMITTING if is_only else FastState.OPENING)
        self.reopen_at = self.reopen_error = None

    def add(self, item: Item, now: float) -> None:
        """Send one message, as soon as it is wanted; there must be room.

        What this raises (``InvalidSubject``, ``PayloadTooLarge``, ``BufferFull``...), the batch does not notice.
        """
        sequence = self.sequence + 1
        data, head = item[1], self._heads.get(item[0])
        if head is not None and len(item) == 2 and type(data) is bytes and len(data) <= self._max_payload_bytes:
            frame = b"%b%d.1.$FI %d\r\n%b\r\n" % (head, sequence, len(data), data)  # the common case, not by a call
        else:
            frame = self._frame(item, sequence, Operation.APPEND)
        if sequence <= self.wanted:
            self.sequence = self.sent = sequence  # counted first, as in `_send`
            try:
                self._machine.publish_frame(frame)
            except Exception:
                self.sequence = self.sent = sequence - 1
                raise
            self._sent_at = now
        else:
            self._keep([frame])

    def add_many(self, items: Iterable[Item], now: float) -> None:
        """Send messages, as soon as they are wanted; there must be room for all.

        Raises:
            BufferFull, ConnectionClosed: None is added.
            ConfigError: One cannot be sent; those before it are added.
        """
        ready: list[bytes] = []
        try:
            self._build(items, ready, 1 << 62)
        finally:
            if ready:
                self._place(ready, now)

    def add_up_to(self, count: int, items: Iterable[Item], now: float) -> None:
        """Send the first messages, ``count`` of them, for which there must be room, or less if they are large.

        Raises:
            BufferFull, ConnectionClosed: None is added.
        """
        ready: list[bytes] = []
        self._build(islice(items, count), ready, CHUNK_BYTES)
        self._place(ready, now)

    @property
    def may_add_some(self) -> bool:
        """Whether the connection takes a piece of :meth:`add_some` for sure, whatever is in it."""
        machine = self._machine
        piece_bytes = CHUNK_BYTES + 2 * self._max_payload_bytes  # the last message may pass the bound by all of itself
        return not machine.out_bytes or machine.out_bytes + piece_bytes <= machine.options.send_buffer_bytes

    def add_some(self, items: Iterator[Item], now: float) -> bool:
        """Take some messages, as many as there is room for, and send them; False when there are no more.

        Nothing is taken that is not added, so ``may_add_some`` must be true. What this raises comes after those before
        it were added.
        """
        ready: list[bytes] = []
        try:
            self._build(islice(items, min(self.room, CHUNK_MESSAGES)), ready, CHUNK_BYTES)
        finally:
            if ready:
                self._place(ready, now)
        return bool(ready)

    def _place(self, ready: list[bytes], now: float) -> None:
        """Give the next sequences to frames that were built for them: send what is wanted, keep the others."""
        due = ready[: self.due]
        if due:
            self._send(due, self.sequence + len(due), now)
        if len(due) < len(ready):
            self._keep(ready[len(due) :])

    def _send(self, ready: list[bytes], last: int, now: float, *, is_urgent: bool = False) -> None:
        """Send frames, the last of which has this sequence.

        They are counted first: an interrupt must not leave messages on their way that nobody has counted.
        """
        before = self.sequence, self.sent
        self.sequence, self.sent = max(self.sequence, last), last
        try:
            self._machine.publish_frames(ready, is_urgent=is_urgent)
        except Exception:
            self.sequence, self.sent = before
            raise
        self._sent_at = now

    def _keep(self, ready: list[bytes]) -> None:
        self._early += ready
        self._early_bytes += sum(map(len, ready))
        self.sequence += len(ready)
        if self._early_bytes >= CHUNK_BYTES:
            self._set_limit()

    def _send_early(self, count: int, now: float) -> None:
        """Of what was kept, the first messages."""
        if not self._early or self._machine.is_closed:
            return
        ready, self._early = self._early[:count], self._early[count:]
        # They were accepted long ago, and are few: they do not wait for room in the connection's buffer again.
        self._send(ready, self.sent + len(ready), now, is_urgent=True)
        self._early_bytes = sum(map(len, self._early))
        self._set_limit()

    def _build(self, items: Iterable[Item], ready: list[bytes], max_bytes: int) -> None:
        """Frames of messages, until the last one passes ``max_bytes``."""
        sequence = self.sequence + len(ready)
        heads, max_payload = self._heads, self._max_payload_bytes
        known, head = None, None
        for item in items:
            sequence += 1
            subject, data = item[0], item[1]
            if subject is not known:  # most go where the one before went
                known, head = subject, heads.get(subject)
            frame = None
            if head is not None and type(data) is bytes:
                # The common cases, without a call: no headers, or headers that are encoded already.
                if len(item) == 2:
                    if (size := len(data)) <= max_payload:
                        frame = b"%b%d.1.$FI %d\r\n%b\r\n" % (head, sequence, size, data)
                elif type(block := item[2]) is bytes and (size := len(block) + len(data)) <= max_payload:
                    frame = b"H%b%d.1.$FI %d %d\r\n%b%b\r\n" % (head, sequence, len(block), size, block, data)
            if frame is None:
                frame = self._frame(item, sequence, Operation.APPEND)
                head = heads.get(subject)  # it knows the subject now
            ready.append(frame)
            max_bytes -= len(frame)
            if max_bytes <= 0:
                return

    def commit(self, item: Item, now: float) -> None:
        """Send the last message, which ends the batch. It needs no room: nothing follows it."""
        assert self.state is FastState.OPEN, self.state
        self._place_last(self._frame(item, self.sequence + 1, Operation.COMMIT), now)

    def end(self, now: float) -> None:
        """End the batch without another message.

        The form with a message is better where there is one: this one is not replicated, so a new leader may take the
        batch for open again, for ten seconds. Nothing is lost by that.
        """
        assert self.state is FastState.OPEN, self.state
        self._place_end(now)

    def _place_end(self, now: float) -> None:
        end = self.sequence + 1
        frame = self._control(end, Operation.END)
        self._ends.add(end)
        try:
            self._place_last(frame, now, is_urgent=True)
        finally:
            if self.sequence < end:
                self._ends.discard(end)  # refused or interrupted: it has no place in the batch

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
        self._machine.publish_frames([self._control(self.sent, Operation.PING)], is_urgent=True)

    def _control(self, sequence: int, operation: Operation) -> bytes:
        return self._frame((self._first_subject, b""), sequence, operation)

    def abandon(self, now: float) -> None:
        """The caller has no use for the batch any more: tell the server, wait for nothing."""
        if not self._is_over_soon:
            # What was added was added, and there is nobody to wait until it is wanted.
            self._send_early(len(self._early), now)
        if self.state in (FastState.OPENING, FastState.OPEN) and not self._machine.is_closed:
            self._place_end(now)  # an open batch slows others down for ten seconds
        if self.state is not FastState.ENDED:
            self._over(UsageError(f"the batch was left; {self.acknowledged} messages are acknowledged"))

    def _frame(self, item: Item, sequence: int, operation: int) -> bytes:
        head = self._heads.get(item[0])
        if head is None:
            head = self._learn_head(item[0])
        data = item[1]
        if len(item) == 2 or not item[2]:
            if type(data) is not bytes or len(data) > self._max_payload_bytes:
                data = self._machine.payload(data)
            return b"%b%d.%d.$FI %d\r\n%b\r\n" % (head, sequence, operation, len(data), data)
        headers = item[2]
        block = headers if isinstance(headers, bytes) else header_block(headers)
        data = self._machine.payload(data, len(block))
        address = b"%b%d.%d.$FI" % (head[4:], sequence, operation)
        return frames.HPUB % (address, len(block), len(block) + len(data), block, data)

    def _learn_head(self, subject: str) -> bytes:
        if len(self._heads) >= MAX_KNOWN_SUBJECTS:
            self._heads.clear()
        head = self._heads[subject] = b"PUB %b %b" % (self._machine.address(subject), self._reply)
        return head

    def _open_inbox(self) -> None:
        """One of its own, so that interest can be dropped as soon as the batch is over."""
        self._close_inbox()
        prefix, batch_id = self._machine.new_batch()
        if self.options.batch_id is not None:
            prefix, batch_id = f"{prefix}.{batch_id}", self.options.batch_id
        # No more can arrive than was asked for: an answer a message at the very most.
        inbox = self._machine.subscribe(f"{prefix}.{batch_id}.>", is_unbounded=True, is_inbox=True, reader=self._owner)
        self._inbox, self._id = inbox, batch_id
        self._reply = f"{prefix}.{batch_id}.{self.options.flow}.{self.options.gap}.".encode()
        self._heads.clear()

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
            plain = _FLOW_ACK.fullmatch(message.data)
            if plain is not None:
                self._on_ack(int(plain[1]), int(plain[2]), now)
            elif is_no_responders(message):
                error = unavailable(self._first_subject, self._machine.info)
                self._on_hole(*_place_of(message.subject), error, now)
            else:
                self._on_json(message, wire.read_object(message.data), now)
        except JetSparkError as error:
            self._in_doubt(error)

    def _on_json(self, message: CoreMessage, reply: dict[str, Any], now: float) -> None:
        error = wire.error_of(reply)
        match reply.get("type"):
            case "ack":
                self._on_ack(_number(reply, "seq"), _number(reply, "msgs"), now)
            case "gap":
                self._on_gap(range(_number(reply, "last_seq"), _number(reply, "seq")), now)
            case "err" if error is not None:
                self._on_refused(Refusal(_number(reply, "seq"), error), now)
            case _ if error is not None:
                self._on_error(*_place_of(message.subject), error, now)
            case _ if isinstance(reply.get("batch"), str):
                self._on_final(wire.decode(PubAck, reply))
            case None if self.is_opening and isinstance(reply.get("seq"), int):
                self._on_plain_ack(str(reply.get("stream")))
            case _:
                raise ProtocolError(f"an answer to a fast batch that is none: {message.data[:80]!r}")

    def _on_ack(self, sequence: int, msgs_per_ack: int, now: float) -> None:
        _check_range("ack", sequence, 0, self.sent)  # the first one acknowledges none
        if self.state is FastState.OPENING:
            self._enter(FastState.OPEN)
            self.is_stream_known = True
            self._moved_at = now
        self._msgs_per_ack = min(max(1, msgs_per_ack), HIGHEST_FLOW)
        self._window = self._msgs_per_ack * self.options.max_outstanding_acks
        self._set_limit()
        if sequence > self.acknowledged:
            self.acknowledged = min(sequence, self.messages)  # in mode "ok" a lost end of ours is counted, too
        self._move_to(sequence, now)

    def _enter(self, state: FastState) -> None:
        self.state = state
        self._set_limit()

    def _expect_the_end(self) -> None:
        self._is_over_soon = True
        self._drop_early()

    def _drop_early(self) -> None:
        self._early.clear()
        self._early_bytes = 0
        self._set_limit()

    def _set_limit(self) -> None:
        is_open = self.state is FastState.OPEN and not self._is_over_soon
        is_sending = is_open or bool(self._early)
        self.wanted = self._progress + self._window if is_sending else 0
        if not is_open:
            self.limit = 0
        elif self._early_bytes < CHUNK_BYTES:
            self.limit = self.wanted + self._msgs_per_ack
        else:
            self.limit = self.sequence

    def _move_to(self, sequence: int, now: float) -> None:
        if sequence > self._progress:
            self._progress = sequence
            self._moved_at = now
            self._set_limit()

    def _on_gap(self, missing: range, now: float) -> None:
        # "last_seq" is the first that is missing, and "seq" the one that was received; for a ping, one above it.
        _check_range("gap", missing.start, 1, self.sent + 1)
        _check_range("gap", missing.stop, 1, self.sent + 1)
        is_commit_lost = self.state is FastState.COMMITTING and self.sequence in missing
        # A message too large for the stream is refused and never reaches the batch. And a new leader knows what is
        # stored and nothing else: it reports again what the old one had reported or refused.
        refused = self._refused.intersection(range(missing.start, min(missing.stop, self.sent + 1)))
        known = [range(sequence, sequence + 1) for sequence in (*self._ends, *refused)]
        if missing.start < self._gaps_end:
            known += self.gaps
        self._gaps_end = max(self._gaps_end, missing.stop)
        for part in _without(missing, known):
            self._report(self.gaps, part)
        self._move_to(missing.stop - 1, now)
        if self._is_failing:
            self._expect_the_end()
            self._hole = self._hole or ProtocolError(f"messages {missing.start} to {missing.stop - 1} were lost")
        elif is_commit_lost and not self.is_ended:
            self._place_end(now)

    def _on_refused(self, refusal: Refusal, now: float) -> None:
        _check_range("error", refusal.sequence, 1, self.sent)
        self._report_refusal(refusal)
        self._move_to(refusal.sequence, now)
        if self._is_failing:
            self._expect_the_end()
            self._hole = refusal.error

    def _on_error(self, sequence: int, operation: int, error: ServerError, now: float) -> None:
        """An error that is not about the batch's course: it never opened, is gone, or does not have this message."""
        if self.is_opening:
            if error.err_code in (Code.FAST_TOO_MANY, Code.TOO_MANY_REQUESTS):
                self._on_hole(sequence, operation, error, now)
            elif isinstance(error, BatchUnknown):  # the answer to a ping: the first message is lost, or the batch
                self._in_doubt(error)
            else:
                self._refused_from_the_start(error)
        elif error.err_code in _FATAL:
            self._in_doubt(error)
        elif self._is_failing and sequence == 1:
            self._refused_from_the_start(error)
        else:
            # A message that came too fast was dropped on the way, and will be in a gap; a ping is no message.
            if error.err_code != Code.TOO_MANY_REQUESTS and operation != Operation.PING:
                self._report_refusal(Refusal(sequence, error))
            self._on_hole(sequence, operation, error, now)

    def _on_hole(self, sequence: int, operation: int, error: Exception, now: float) -> None:
        """A message did not reach the batch. The server notices with the next one; if there is none, with a ping."""
        if self.is_opening and operation != Operation.PING:
            self._reopen_later(error, now)
            return
        if self._is_failing and operation != Operation.PING:
            self._expect_the_end()
            self._hole = self._hole or error
        if self._ping_at is None:
            self._ping_at = now + HOLE_PING_S

    def _refused_from_the_start(self, error: ServerError) -> None:
        if not self.errors:
            self._report_refusal(Refusal(1, error))
        self._over(error)

    def _reopen_later(self, error: Exception, now: float) -> None:
        """Nothing was stored, and the server knows of no batch: the first message may be sent again."""
        give_up_at = self._give_up_opening_at(error, now)
        if now >= give_up_at:
            self._over(error)
            return
        self._close_inbox()
        self._enter(FastState.NEW)
        self.sequence = self.sent = 0
        self._unheard.clear()  # of a message that is surely not stored, and whose sequence is given again
        self._ping_at = None
        self.reopen_error = error
        self._times_reopened += 1
        # The last attempt is made when the time is over, so that all of it is used.
        self.reopen_at = min(now + REOPEN.wait_s(self._times_reopened), give_up_at)

    def _give_up_opening_at(self, error: Exception, now: float) -> float:
        assert self._opening_since is not None
        give_up_at = self._opening_since + self.options.timeout
        if not isinstance(error, JetStreamUnavailable):
            self.is_stream_known = True
            self._unavailable_since = None
            return give_up_at
        if self._unavailable_since is None:
            self._unavailable_since = now
        found_none_at = self._unavailable_since + self.options.wait_for_stream_s
        return max(give_up_at, found_none_at) if self.is_stream_known else found_none_at

    def _on_final(self, ack: PubAck) -> None:
        count = ack.batch_size or 0
        # In mode "ok" the count is one of sequences, and ends of ours that were lost are among them.
        _check_range("final ack", count, 0, min(self.sent, self.messages) if self._is_failing else self.sent)
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
        return not _without(range(count + 1, self.messages + 1), self._accounted_for())

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
                self._max_payload_bytes = self._machine.info.max_payload_bytes
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
                    self._on_hole(0, Operation.APPEND, error, now)

    def _on_disconnected(self) -> None:
        """A gap or a refusal is said once, perhaps into the session that is gone; acknowledgements come again."""
        first = max(self.acknowledged + 1, self._unheard[-1].stop if self._unheard else 1)
        if not self._is_failing and self.state not in (FastState.NEW, FastState.ENDED) and first <= self.sent:
            self._unheard.append(range(first, self.sent + 1))

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` wants to be called next, seen from now; None while there is nothing to wait for."""
        if self.state in (FastState.NEW, FastState.ENDED):
            return None
        is_connected, ping_at = self._machine.is_connected, self._ping_at or math.inf
        last_sent_at = max(self._sent_at, self._pinged_at)
        if not self.is_waiting:
            return min(last_sent_at + self.options.keep_alive_s, ping_at) if is_connected else None
        if not is_connected:
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

    def _report_refusal(self, refusal: Refusal) -> None:
        sequence = refusal.sequence
        is_in_gap = sequence < self._gaps_end and any(sequence in each for each in self.gaps)
        if sequence not in self._refused and sequence not in self._ends and not is_in_gap:
            self._refused.add(sequence)
            self._report(self.errors, refusal)

    def _report(self, reports: list[Any], entry: range | Refusal) -> None:
        if len(reports) >= MAX_REPORTS:
            self._in_doubt(UsageError(f"more than {MAX_REPORTS} losses in one batch"))
            return
        reports.append(entry)
        self.news.append(entry)

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


def _place_of(subject: str) -> tuple[int, int]:
    """Sequence and operation of the message whose reply subject this is; zeros if it is none of ours."""
    parts = subject.rsplit(".", 3)
    if len(parts) == 4 and parts[1].isdecimal() and parts[2].isdecimal():
        return int(parts[1]), int(parts[2])
    return 0, 0


def _number(reply: dict[str, Any], name: str) -> int:
    value = reply.get(name)
    if type(value) is not int:  # a bool is none, either
        raise ProtocolError(f"an answer to a fast batch without {name!r}: {reply}")
    return value


def _check_range(answer: str, sequence: int, low: int, high: int) -> None:
    """Whether an answer is about messages that were sent.

    Raises:
        ProtocolError: It is not. Counting with such a number would open the window for ever, or take for stored what
            was never sent.
    """
    if not low <= sequence <= high:
        raise ProtocolError(f"{answer} of a fast batch for sequence {sequence}: expected {low} to {high}")


def _without(numbers: range, others: Iterable[range]) -> list[range]:
    """The parts of a range that are in none of the others."""
    parts, start = [], numbers.start
    for other in sorted(others, key=lambda each: each.start):
        if other.stop > start and other.start < numbers.stop:
            parts.append(range(start, other.start))
            start = max(start, other.stop)
    parts.append(range(start, numbers.stop))
    return [part for part in parts if part]


def _covered(ranges: Iterable[range], last: int) -> int:
    """How many of the numbers from 1 to ``last`` are in one of the ranges."""
    return last - sum(map(len, _without(range(1, last + 1), ranges)))
