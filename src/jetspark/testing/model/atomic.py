"""Atomic batches: messages staged beside the stream, then all stored or none.

::

    sequence 1 ──> STAGING ──next sequence──> STAGING
                      │ ──commit 1, or eob──> checked as a whole: stored, or refused and forgotten
                      │ ──wrong sequence────> abandoned, advisory "incomplete"
                      │ ──one too many──────> abandoned, advisory "large"
                      │ ──API level─────────> abandoned, advisory "unsupported"
                      │ ──silence───────────> abandoned, advisory "timeout"
                      └ ──unknown commit, disabled, restart, another leader──> gone without a word

Nothing of a batch is checked against the stream before its commit, and nothing shows in the stream before it. The
commit sees the stream as it is then, under lock; what the batch itself wrote is visible to its own checks only as a
reason to refuse them (`jetspark.testing.model.checks`). A batch is known by its id and stream alone: not by
connection, not by subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jetspark.codes import Code
from jetspark.core.headers import Headers
from jetspark.testing.model import ageing, checks, replies
from jetspark.testing.model.limits import BatchLimits
from jetspark.testing.model.replies import ApiError, Delivery
from jetspark.testing.model.store import Incoming, Store

__all__ = ["BATCH_ID", "MAX_ID_BYTES", "MIN_API_LEVEL", "AtomicBatches"]

BATCH_ID = "Nats-Batch-Id"
_SEQUENCE = "Nats-Batch-Sequence"
_COMMIT = "Nats-Batch-Commit"
MAX_ID_BYTES = 64

_DISABLED = ApiError(400, Code.ATOMIC_DISABLED, "atomic publish is disabled")
_SEQUENCE_MISSING = ApiError(400, Code.ATOMIC_SEQUENCE_MISSING, "atomic publish sequence is missing")
_INCOMPLETE = ApiError(400, Code.ATOMIC_INCOMPLETE, "atomic publish batch is incomplete")
_UNSUPPORTED_HEADER = ApiError(
    400, Code.ATOMIC_HEADER_UNSUPPORTED, f"atomic publish unsupported header used: {checks.EXPECTED_LAST_MSG_ID}"
)
_ID_INVALID = ApiError(400, Code.ATOMIC_ID_INVALID, "atomic publish batch ID is invalid")
_COMMIT_INVALID = ApiError(400, Code.ATOMIC_COMMIT_INVALID, "atomic publish batch commit is invalid")
_DUPLICATE = ApiError(400, Code.ATOMIC_DUPLICATE, "atomic publish batch contains duplicate message id")
_TOO_MANY = ApiError(429, Code.ATOMIC_TOO_MANY, "atomic publish too many inflight")
MIN_API_LEVEL = ApiError(412, Code.API_LEVEL_REQUIRED, "JetStream minimum api level required")


@dataclass(slots=True)
class _AtomicBatch:
    touched: float
    last: int = 0
    messages: list[Incoming] = field(default_factory=list)


class AtomicBatches:
    """The staged batches of one stream.

    Args:
        store: The log for committed messages.
        limits: Their number, size and time.
        total_open: Number of open batches of all streams together.
        abandon: Makes the advisory of a batch from its id, the reason and the time.
    """

    def __init__(
        self,
        store: Store,
        limits: BatchLimits,
        total_open: Callable[[], int],
        abandon: Callable[[str, str, float], Delivery],
    ) -> None:
        self._store, self._limits, self._total_open, self._abandon = store, limits, total_open, abandon
        self._open: dict[str, _AtomicBatch] = {}
        self._too_large = ApiError(
            400, Code.ATOMIC_TOO_LARGE, f"atomic publish batch is too large: {limits.max_messages}"
        )

    def __len__(self) -> int:
        return len(self._open)

    def clear(self) -> None:
        self._open.clear()

    def next_deadline(self) -> float | None:
        touched = min((batch.touched for batch in self._open.values()), default=None)
        return None if touched is None else touched + self._limits.timeout_s

    def expire(self, now: float) -> list[Delivery]:
        """Give up batches without a message for too long, in the order of their deadlines."""
        late = [(batch.touched, id) for id, batch in self._open.items()]
        late = sorted((touched + self._limits.timeout_s, id) for touched, id in late)
        late = [(deadline, id) for deadline, id in late if deadline <= now]
        for _, id in late:
            del self._open[id]
        return [self._abandon(id, "timeout", deadline) for deadline, id in late]

    def receive(self, message: Incoming, reply: str | None, now: float) -> list[Delivery]:
        """Process a message with a batch id; with a reply subject, answer it."""
        said: list[Delivery] = []
        answer = self._stage(message, now, said)
        config = self._store.config
        if answer is not None and reply and not config.no_ack:
            data = replies.error_ack(config.name, answer) if isinstance(answer, ApiError) else answer
            said.append(Delivery(reply, data))
        return said

    def _stage(self, message: Incoming, now: float, said: list[Delivery]) -> bytes | ApiError | None:
        fields = message.fields
        id = fields[BATCH_ID]
        if not self._store.config.allow_atomic:
            return _DISABLED
        if len(id.encode("utf-8", "surrogateescape")) > MAX_ID_BYTES:
            return _ID_INVALID
        sequence = checks.number(fields.get(_SEQUENCE, ""))
        if sequence is None:
            return _SEQUENCE_MISSING
        commit = fields.get(_COMMIT)
        is_too_large = sequence - (commit == "eob") > self._limits.max_messages
        batch = self._open.get(id)
        if batch is None:
            if sequence != 1:
                return self._too_large if is_too_large else _INCOMPLETE
            if (
                len(self._open) >= self._limits.max_inflight_per_stream
                or self._total_open() >= self._limits.max_inflight_total
            ):
                return _TOO_MANY
            batch = self._open[id] = _AtomicBatch(now)
        refused: ApiError | None = None
        reason = ""
        if commit not in (None, "1", "eob"):
            refused = _COMMIT_INVALID
        elif not checks.is_level_supported(fields):
            refused, reason = MIN_API_LEVEL, "unsupported"
        elif sequence != batch.last + 1 or (commit == "eob" and sequence == 1):
            refused, reason = _INCOMPLETE, "incomplete"
        elif is_too_large:
            refused, reason = self._too_large, "large"
        if refused is not None:
            del self._open[id]
            if reason:
                said.append(self._abandon(id, reason, now))
            return refused
        batch.touched, batch.last = now, sequence
        if commit == "eob":
            # The marker is not stored; the message before it gets the commit header instead, which may make it too
            # large.
            batch.messages[-1] = _with_commit(batch.messages[-1])
        else:
            batch.messages.append(without_level(message))
        if commit is None:
            return b""
        del self._open[id]
        return _commit(self._store, id, batch.messages, now)


def _commit(store: Store, id: str, messages: list[Incoming], now: float) -> bytes | ApiError | None:
    """The answer; None from a leader that is cut off, which can only propose. Its refusals need no majority."""
    staged = checks.Staged()
    store.proposed_sequence = 0
    for position, message in enumerate(messages):
        if message.fields.get(checks.EXPECTED_LAST_MSG_ID):
            refused: ApiError | int = _UNSUPPORTED_HEADER
        else:
            refused = checks.refuse_proposal(store, message, staged, now)
        if refused:
            if not store.is_replicated:
                store.proposed_sequence = store.last_sequence + position
            if isinstance(refused, ApiError):
                return refused
            store.promise(refused)
            return _DUPLICATE
    if store.is_cut_off:
        store.propose(message.fields.get(checks.MSG_ID, "") for message in messages)
        return None
    for message in messages:
        msg_id = message.fields.get(checks.MSG_ID, "")
        if (schedule := ageing.cancels(message)) is not None:
            store.purge(schedule)
        sequence = store.append(message.subject, message.data, message.headers, now, msg_id)
        if rollup := message.fields.get(checks.ROLLUP):
            store.roll_up(rollup.lower(), message.subject, sequence)
    if store.apply_s:
        store.pieces.append(range(store.last_sequence - len(messages) + 1, store.last_sequence + 1))
    else:
        # A lost leader must not take a part of it: the batch counts as acknowledged even without a reply subject.
        store.promise(store.last_sequence)
    return replies.pub_ack(store.config.name, store.last_sequence, batch=id, count=len(messages))


def _with_commit(message: Incoming) -> Incoming:
    headers = Headers(message.headers)
    headers[_COMMIT] = "1"
    return Incoming(message.subject, message.data, headers, message.fields)


def without_level(message: Incoming) -> Incoming:
    """A message as a batch stores it: without the header that only concerns the server."""
    if checks.REQUIRED_API_LEVEL not in message.fields:
        return message
    pairs = [pair for pair in Headers(message.headers).multi_items() if pair[0] != checks.REQUIRED_API_LEVEL]
    fields = {name: value for name, value in message.fields.items() if name != checks.REQUIRED_API_LEVEL}
    return Incoming(message.subject, message.data, Headers(pairs) if pairs else None, fields)
