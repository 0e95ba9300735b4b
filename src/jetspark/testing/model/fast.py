"""Fast ingest: one open batch per publisher, stored as it comes, acknowledged after a number of messages.

A message's reply subject has all facts about its batch, read from the right::

    <prefix>.<id>.<flow>.<ok|fail>.<sequence>.<operation>.$FI

::

    0 start, 2 commit at 1 ──> OPEN ──1 append──> OPEN: stored, or refused with "err"
                                │ ──4 ping──────> OPEN: the last flow ack again
                                │ ──2 commit, 3 end of batch──────────────────────> pub ack
                                │ ──a gap or an error in mode fail; anywhere a sequence again──> pub ack of the prefix
                                │ ──silence──> gone without a word
                                └ ──the end waits for a message that will never be stored──> ENDING, permanently

ENDING reproduces a fault of the server: a message that is refused at the last moment, while it is stored
(``Nats-Expected-Last-Msg-Id``), counts as received but never as persisted; so does, for a gap that ends a batch, an
error just before it. The batch then answers only pings, stays open, and slows the others down.

Flow. The only open batch starts at its requested flow, at most 500 messages for each ack; a further batch starts at 1.
With every ack the number doubles or halves towards its ceiling: the requested flow, at most 500 divided by the number
of open batches, at least 1. Idle batches and those of dead publishers count. An ack has the sequence that the
previous ack announced, or a multiple, never the sequence just received: 15 after 2, at 10 messages for each ack, is
acknowledged as 10. Errors acknowledge nothing.

A leader that is cut off from the other replicas stores nothing and acknowledges nothing new; but it still counts and
acknowledges duplicates, both of stored messages and of those it could only propose.

On a replicated stream a new leader knows the stored messages of a batch, and reports them unasked. It does not know
that a batch was ended by an end-of-batch marker or a gap: until its timeout, such a batch is open again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jetspark.codes import Code
from jetspark.testing.model import checks, replies
from jetspark.testing.model.atomic import MAX_ID_BYTES, MIN_API_LEVEL, without_level
from jetspark.testing.model.limits import BatchLimits
from jetspark.testing.model.replies import ApiError, Delivery
from jetspark.testing.model.store import Incoming, Store

__all__ = ["MAX_MESSAGES_PER_ACK", "SUFFIX", "FastIngest", "OpenFastBatch"]

SUFFIX = ".$FI"

# For all batches of a stream together; the server's constant.
MAX_MESSAGES_PER_ACK = 500
_DEFAULT_FLOW = 10
_MAX_FLOW = 65535

_START, _APPEND, _COMMIT, _END, _PING = range(5)

_DISABLED = ApiError(400, Code.FAST_DISABLED, "batch publish is disabled")
_PATTERN_INVALID = ApiError(400, Code.FAST_PATTERN_INVALID, "batch publish pattern is invalid")
_ID_INVALID = ApiError(400, Code.FAST_ID_INVALID, "batch publish ID is invalid")
_UNKNOWN = ApiError(400, Code.FAST_UNKNOWN, "batch publish ID unknown")
_TOO_MANY = ApiError(429, Code.FAST_TOO_MANY, "batch publish too many inflight")

# Publishers come and go, and each has its own prefix.
_MAX_HEADS = 4096


@dataclass(frozen=True, slots=True)
class OpenFastBatch:
    """An open batch, for plots and checkers."""

    id: str
    is_gap_ok: bool
    max_flow: int
    """The flow that the publisher requested."""
    last_sequence: int
    """The highest batch sequence received, or reported as a gap."""
    acknowledged_sequence: int
    """The sequence of the last flow ack."""
    messages_per_ack: int
    is_ending: bool
    """True while it waits for a message that will never be stored."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The common beginning of all reply subjects of one batch, parsed once."""

    id: str
    flow: int
    is_gap_ok: bool


class _FastBatch:
    __slots__ = (
        "acked",
        "every",
        "flow",
        "id",
        "is_ending",
        "is_gap_ok",
        "last",
        "next_ack",
        "pending",
        "persisted",
        "stream_sequence",
        "touched",
        "trail",
    )

    def __init__(self, head: _Head, every: int, now: float) -> None:
        self.id, self.flow, self.is_gap_ok = head.id, head.flow, head.is_gap_ok
        self.every = every
        self.touched = now
        self.is_ending = False
        self.last = 0  # received
        self.persisted = 0  # stored, or known to need no storing
        self.pending = 0  # messages that passed every check before storing, and were not stored
        self.stream_sequence = 0  # of the newest stored message
        self.acked = 0
        self.next_ack = every
        # The messages stored since the last ack, as stream sequence, batch sequence and reply, behind the one before.
        self.trail: list[tuple[int, int, str]] = [(0, 0, "")]

    @property
    def is_all_stored(self) -> bool:
        """True if no message is being stored, as far as the server can tell."""
        return not self.pending or self.persisted == self.last

    def resume(self, every: int) -> str:
        """Continue under a new leader, which knows only the stored messages; returns the reply subject for its
        report."""
        self.stream_sequence, self.last, reply = self.trail[-1]
        self.persisted = self.acked = self.last
        self.pending = 0
        self.every, self.next_ack = every, self.last + every
        self.is_ending = False
        return reply


class FastIngest:
    """The open batches of one stream.

    Args:
        store: The log for its messages.
        limits: Their number and time.
        total_open: Number of open batches of all streams together.
    """

    def __init__(self, store: Store, limits: BatchLimits, total_open: Callable[[], int]) -> None:
        self._store, self._limits, self._total_open = store, limits, total_open
        self._open: dict[str, _FastBatch] = {}
        self._ended: dict[str, _FastBatch] = {}
        self._heads: dict[str, _Head] = {}

    def __len__(self) -> int:
        return len(self._open)

    def clear(self) -> None:
        self._open.clear()
        self._ended.clear()

    def open_batches(self) -> Sequence[OpenFastBatch]:
        return [
            OpenFastBatch(each.id, each.is_gap_ok, each.flow, each.last, each.acked, each.every, each.is_ending)
            for each in self._open.values()
        ]

    def next_deadline(self) -> float | None:
        touched = min((batch.touched for batch in self._open.values() if not batch.is_ending), default=None)
        return None if touched is None else touched + self._limits.timeout_s

    def expire(self, now: float) -> None:
        """Give up batches without a message for too long."""
        for batches in (self._open, self._ended):
            late = [id for id, each in batches.items() if each.touched + self._limits.timeout_s <= now]
            for id in late:
                if not batches[id].is_ending:
                    del batches[id]

    def receive(self, message: Incoming, reply: str, now: float) -> list[Delivery]:
        """Process a message whose reply subject ends in ``.$FI``."""
        config = self._store.config
        if not config.allow_batched:
            return self._refuse(reply, _DISABLED)
        parts = reply.rsplit(".", 3)
        head = self._heads.get(parts[0]) or self._read_head(parts[0])
        if head is None or len(parts) != 4:
            return self._refuse(reply, _PATTERN_INVALID)
        sequence, operation = checks.number(parts[1]), checks.number(parts[2])
        if not sequence or operation is None or not _is_possible(operation, sequence):
            return self._refuse(reply, _PATTERN_INVALID)
        said: list[Delivery] = []
        batch = self._open.get(head.id)
        is_new = batch is None
        if batch is None:
            if (refused := self._refuse_start(head, sequence, operation)) is not None:
                return self._refuse(reply, refused)
            batch = self._start(head, now)
        if message.fields:
            if not checks.is_level_supported(message.fields):
                self._forget(batch)
                return self._refuse(reply, MIN_API_LEVEL)
            message = without_level(message)
        if is_new and operation == _START and not config.no_ack:
            said.append(Delivery(reply, replies.flow_ack(0, batch.every)))
        batch.touched = now
        if operation == _PING:
            self._ping(batch, sequence, reply, said)
            return said
        if batch.is_ending:
            return said
        if sequence != batch.last + 1:
            said.append(Delivery(reply, replies.flow_gap(batch.last + 1, sequence)))
            if not batch.is_gap_ok or sequence <= batch.last:
                self._end(batch, reply, said, is_complete=batch.persisted == batch.last)
                return said
        if operation == _END:
            batch.last = sequence - 1
            self._end(batch, reply, said, is_complete=batch.is_all_stored)
            return said
        batch.last = sequence
        self._put(batch, message, operation == _COMMIT, reply, now, said)
        return said

    def elect(self) -> list[Delivery]:
        """Report the state of each batch to its publisher, as a new leader does unasked."""
        for id, ended in self._ended.items():
            self._open.setdefault(id, ended)
        self._ended.clear()
        for batch in list(self._open.values()):
            while batch.trail[-1][0] > self._store.last_sequence:
                batch.trail.pop()
            if not batch.trail[-1][0]:
                # None of its messages was replicated, so the new leader does not know it.
                del self._open[batch.id]
        said = []
        for batch in self._open.values():
            reply = batch.resume(self._first_flow(batch.flow))
            said.append(Delivery(reply, replies.flow_ack(batch.acked, batch.every)))
        return said

    # A message of an open batch

    def _put(
        self, batch: _FastBatch, message: Incoming, is_commit: bool, reply: str, now: float, said: list[Delivery]
    ) -> None:
        store, sequence, fields = self._store, batch.last, message.fields
        if fields or store.is_discard_new:
            found = checks.refuse_proposal(store, message, checks.Staged(), now)
            if isinstance(found, ApiError):
                self._err(batch, found, is_commit, reply, said)
                return
            if found:
                self._skip(batch, found, is_commit, reply, said)
                return
        if fields and (late := checks.refuse_last_id(store, fields)) is not None:
            # Too late to be an "err": the batch continues as if the message were being stored.
            said += self._refuse(reply, late)
            store.is_halted = store.is_replicated
            batch.pending += 1
            batch.is_ending = is_commit
            return
        if store.is_cut_off:
            # Proposed, and waiting for a majority that the leader does not reach.
            store.propose([fields.get(checks.MSG_ID, "")])
            batch.pending += 1
            batch.is_ending = is_commit
            return
        stored = store.append(message.subject, message.data, message.headers, now, fields.get(checks.MSG_ID, ""))
        if fields and (rollup := fields.get(checks.ROLLUP)):
            store.roll_up(rollup.lower(), message.subject, stored)
        batch.persisted = sequence
        batch.stream_sequence = stored
        if store.is_replicated:
            batch.trail.append((stored, sequence, reply))
        if is_commit:
            del self._open[batch.id]
            self._close(batch, reply, said)
        elif sequence >= batch.next_ack:
            self._ack(batch, reply, said)

    def _err(self, batch: _FastBatch, error: ApiError, is_commit: bool, reply: str, said: list[Delivery]) -> None:
        """Refuse a message. In mode ok its sequence is used up, in mode fail it is still free."""
        sequence = batch.last
        if sequence == 1 and not batch.is_gap_ok:
            del self._open[batch.id]
            said.append(Delivery(reply, replies.error_ack(self._store.config.name, error)))
            return
        said.append(Delivery(reply, replies.flow_error(sequence, error)))
        if is_commit:
            batch.last = sequence - 1
            self._end(batch, reply, said, is_complete=batch.is_all_stored)
        elif not batch.is_gap_ok:
            batch.last = sequence - 1
            self._end(batch, reply, said, is_complete=batch.persisted == batch.last)

    def _skip(self, batch: _FastBatch, earlier: int, is_commit: bool, reply: str, said: list[Delivery]) -> None:
        """Skip a duplicate: it is neither stored nor reported, and counts like any other message.

        So does a duplicate of a message that was only proposed. A leader that is cut off acknowledges it, and after the
        next election the message is gone: measured on 2.15.1.
        """
        self._store.promise(earlier)
        if self._pass_over(batch):
            self._ack(batch, reply, said)
        if not is_commit:
            return
        if batch.last == 1 and not batch.is_gap_ok:
            del self._open[batch.id]
            name = self._store.config.name
            if earlier < 0:
                said.append(Delivery(reply, replies.error_ack(name, checks.IN_PROCESS)))
                return
            data = replies.pub_ack(name, earlier, is_duplicate=True, batch=batch.id, count=1)
            said.append(Delivery(reply, data))
        else:
            self._end(batch, reply, said, is_complete=batch.is_all_stored)

    def _ping(self, batch: _FastBatch, sequence: int, reply: str, said: list[Delivery]) -> None:
        if sequence > batch.last:
            # As if the message after the ping had arrived.
            said.append(Delivery(reply, replies.flow_gap(batch.last + 1, sequence + 1)))
            if batch.is_gap_ok:
                # A lost message counts like a stored one, for the acks too.
                batch.last = sequence
                if self._pass_over(batch):
                    self._ack(batch, reply, said)
                    return
            elif not batch.is_ending:
                self._end(batch, reply, said, is_complete=batch.persisted == batch.last)
                if not batch.is_ending:
                    return
        said.append(Delivery(reply, replies.flow_ack(batch.acked, batch.every)))

    def _pass_over(self, batch: _FastBatch) -> bool:
        """Count the last sequence as persisted, if no message is being stored; True if an ack is due."""
        if batch.pending:
            return False
        batch.persisted = batch.last
        return batch.persisted >= batch.next_ack

    # Beginning, flow, end

    def _refuse_start(self, head: _Head, sequence: int, operation: int) -> ApiError | None:
        if len(head.id.encode()) > MAX_ID_BYTES:
            return _ID_INVALID
        if sequence != 1 or operation == _PING:
            return _UNKNOWN
        limits = self._limits
        if (
            len(self._open) >= limits.max_fast_inflight_per_stream
            or self._total_open() >= limits.max_fast_inflight_total
        ):
            return _TOO_MANY
        return None

    def _start(self, head: _Head, now: float) -> _FastBatch:
        batch = _FastBatch(head, 1, now)
        self._open[head.id] = batch
        self._ended.pop(head.id, None)
        batch.every = batch.next_ack = self._first_flow(head.flow)
        return batch

    def _first_flow(self, flow: int) -> int:
        return 1 if len(self._open) > 1 else min(flow, MAX_MESSAGES_PER_ACK)

    def _ack(self, batch: _FastBatch, reply: str, said: list[Delivery]) -> None:
        behind = batch.persisted - batch.acked
        batch.acked += behind - behind % batch.every
        ceiling = max(1, min(batch.flow, MAX_MESSAGES_PER_ACK // len(self._open)))
        if batch.every < ceiling:
            batch.every = min(batch.every * 2, ceiling)
        elif batch.every > ceiling:
            batch.every = max(batch.every // 2, ceiling)
        batch.next_ack = batch.acked + batch.every
        self._acknowledge(batch)
        said.append(Delivery(reply, replies.flow_ack(batch.acked, batch.every)))

    def _acknowledge(self, batch: _FastBatch) -> None:
        # Up to the newest message of the batch, which may be above the ack: keeping one too many is harmless.
        self._store.promise(batch.stream_sequence)
        if self._store.is_replicated:
            del batch.trail[:-1]

    def _end(self, batch: _FastBatch, reply: str, said: list[Delivery], *, is_complete: bool) -> None:
        """End a batch other than by a stored commit."""
        if not is_complete:
            batch.is_ending = True
            return
        self._forget(batch)
        self._close(batch, reply, said)

    def _forget(self, batch: _FastBatch) -> None:
        # On this server only: the other replicas learn of a batch's end only by a commit that they store.
        del self._open[batch.id]
        if self._store.is_replicated:
            self._ended[batch.id] = batch

    def _close(self, batch: _FastBatch, reply: str, said: list[Delivery]) -> None:
        self._acknowledge(batch)
        name = self._store.config.name
        data = replies.pub_ack(name, batch.stream_sequence, batch=batch.id, count=batch.last)
        said.append(Delivery(reply, data))

    # Reading

    def _read_head(self, text: str) -> _Head | None:
        parts = text.rsplit(".", 3)
        if len(parts) != 4 or parts[3] not in ("ok", "fail"):
            return None
        _, id, flow, gap = parts
        asked = int(flow) if flow.isdigit() and flow.isascii() else 0
        head = _Head(id, min(asked, _MAX_FLOW) or _DEFAULT_FLOW, gap == "ok")
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        self._heads[text] = head
        return head

    def _refuse(self, reply: str, error: ApiError) -> list[Delivery]:
        config = self._store.config
        return [] if config.no_ack else [Delivery(reply, replies.error_ack(config.name, error))]


def _is_possible(operation: int, sequence: int) -> bool:
    """True if the operation is allowed at this sequence: a start only at 1, an append or end only later."""
    if operation == _START:
        return sequence == 1
    if operation in (_APPEND, _END):
        return sequence > 1
    return operation in (_COMMIT, _PING)
