"""The log of one stream: messages by sequence, sequences by subject, and the limits that remove old messages.

Most messages are removed at an end: the oldest of the stream or of its subject by a limit, a whole subject or the whole
stream by a rollup or a purge, the newest with a leader that had not replicated them. So the only index is a deque of
sequences per subject and a pointer to the oldest sequence; a deletion from the middle searches its deque.

Message ids are kept by their time, not by their message: a purge keeps all of them, and only the duplicate window ends
them. Sizes are those of the server's own stores, which ``max_bytes`` limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jetspark.codes import Code
from jetspark.core.headers import Headers, encode
from jetspark.core.subjects import matches
from jetspark.jetstream.config import StreamConfig
from jetspark.testing.model.replies import ApiError

__all__ = ["DEFAULT_DUPLICATE_WINDOW_S", "Incoming", "ModelMessage", "Store", "StoreWatcher", "first_values"]

# The server's default for streams without a window.
DEFAULT_DUPLICATE_WINDOW_S = 120.0

_MAX_MESSAGES = ApiError(503, Code.STORE_FAILED, "maximum messages exceeded")
_MAX_BYTES = ApiError(503, Code.STORE_FAILED, "maximum bytes exceeded")
_MAX_PER_SUBJECT = ApiError(503, Code.STORE_FAILED, "maximum messages per subject exceeded")


@dataclass(frozen=True, slots=True)
class ModelMessage:
    """A message as a consumer receives it."""

    sequence: int
    subject: str
    data: bytes
    headers: Headers | None
    time: float
    size_bytes: int
    """The size as counted by ``max_bytes``: subject, headers, data and the store's own bookkeeping."""

    def __deepcopy__(self, memo: object) -> ModelMessage:
        return self


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message on its way into the log."""

    subject: str
    data: bytes
    headers: Headers | None
    fields: dict[str, str]
    """The first value of each header by its exact spelling; the server ignores all others."""


class StoreWatcher(Protocol):
    """Gets every message that is stored or removed, to keep counts."""

    def on_stored(self, message: ModelMessage) -> None: ...
    def on_removed(self, message: ModelMessage) -> None: ...


class Store:
    """Messages of one stream; ``now`` orders the ids."""

    def __init__(self, config: StreamConfig) -> None:
        self.watchers: list[StoreWatcher] = []
        self.last_time = 0.0
        """The time of the newest message so far; 0 before the first."""
        self._messages: dict[int, ModelMessage] = {}
        self._by_subject: dict[str, deque[int]] = {}
        self._ids: dict[str, tuple[int, float]] = {}
        self._id_times: deque[tuple[float, str]] = deque()
        self._oldest = config.first_sequence or 1
        self.last_sequence = self._oldest - 1
        self.last_id = ""
        """The id of the newest message, empty if it had none; compared with ``Nats-Expected-Last-Msg-Id``."""
        self.size_bytes = 0
        self.proposed_sequence = 0
        """The last sequence in the checks of the last refused atomic batch; see `checks.refuse_proposal`."""
        self.is_halted = False
        """Measured on nats-server 2.15.1: the replicas of a stream that have to store a message with a wrong
        ``Nats-Expected-Last-Msg-Id`` treat it as a broken disk, and stop permanently.
        """
        self.is_cut_off = False
        """The leader does not reach a majority of the replicas: it accepts messages and stores none of them."""
        self.proposed_ids: set[str] = set()
        """The ids of messages that a leader accepted while it was cut off. No other replica has them."""
        self.proposed_messages = 0
        """Number of those messages, with ids and without."""
        self.apply_s = 0.0
        """Seconds from a proposal until the leader of a replicated stream has applied it, and answers."""
        self.pieces: list[range] = []
        """Sequences of unacknowledged atomic batches: each is lost as a whole or not at all."""
        self.acknowledged = self.last_sequence
        """The highest sequence of an acknowledged message: up to here no message is lost."""
        self.configure(config)

    def configure(self, config: StreamConfig) -> None:
        self.config = config
        self.is_replicated = (config.replicas or 1) > 1
        self._max_messages = _limit(config.max_messages)
        self._max_bytes = _limit(config.max_bytes)
        self._max_per_subject = _limit(config.max_messages_per_subject)
        self.is_discard_new = config.discard == "new"
        self._is_new_per_subject = bool(config.discard_new_per_subject)
        window = config.duplicate_window_s
        self._duplicate_window_s = DEFAULT_DUPLICATE_WINDOW_S if window is None else window
        # fileStore and memStore: 22 bytes of record, 4 more with headers, 8 of checksum; or 16 for everything.
        self._overhead, self._header_overhead = (16, 0) if config.storage == "memory" else (30, 4)
        if self._max_per_subject:
            for sequences in list(self._by_subject.values()):
                while len(sequences) > self._max_per_subject:
                    self._remove(sequences[0])
        self._evict()

    def copied(self) -> Store:
        """The messages of a replica that stops applying new ones now."""
        copy = Store(self.config)
        copy._messages = dict(self._messages)
        copy._by_subject = {subject: deque(sequences) for subject, sequences in self._by_subject.items()}
        copy._oldest, copy.last_sequence = self._oldest, self.last_sequence
        return copy

    def __len__(self) -> int:
        return len(self._messages)

    def messages(self) -> Sequence[ModelMessage]:
        return list(self._messages.values())

    # Facts

    @property
    def first_sequence(self) -> int:
        """The sequence of the oldest message; without one that of the next message."""
        while self._oldest not in self._messages and self._oldest <= self.last_sequence:
            self._oldest += 1
        return self._oldest

    def get(self, sequence: int) -> ModelMessage | None:
        return self._messages.get(sequence)

    def messages_from(self, sequence: int) -> Iterator[ModelMessage]:
        """Stored messages from this sequence on, oldest first; skips messages removed during the iteration."""
        for each in range(max(sequence, self.first_sequence), self.last_sequence + 1):
            if (message := self._messages.get(each)) is not None:
                yield message

    def subjects(self) -> dict[str, int]:
        """Number of messages of each subject."""
        return {subject: len(sequences) for subject, sequences in sorted(self._by_subject.items())}

    def last_of_each(self, filters: Sequence[str], up_to: int | None = None) -> set[int]:
        """The sequence of the newest message of every subject that a filter matches; of all without filters."""
        found = set()
        for subject, sequences in self._by_subject.items():
            if not filters or any(matches(each, subject) for each in filters):
                found.add(next((each for each in reversed(sequences) if up_to is None or each <= up_to), 0))
        return found - {0}

    def sequence_at(self, time: float) -> int:
        """The sequence of the first message stored at this time or later; without one that of the next message."""
        for message in self.messages_from(self.first_sequence):
            if message.time >= time:
                return message.sequence
        return self.last_sequence + 1

    def overhead_of(self, message: ModelMessage) -> int:
        """The part of its size that is the store's own bookkeeping."""
        return self._overhead + (0 if message.headers is None else self._header_overhead)

    def last_of(self, filter: str) -> int:
        """The sequence of the newest message that a filter matches; 0 without one."""
        sequences = self._by_subject.get(filter)
        if sequences is not None:
            return sequences[-1]
        if "*" not in filter and ">" not in filter:
            return 0
        return max((found[-1] for subject, found in self._by_subject.items() if matches(filter, subject)), default=0)

    def sequence_of(self, msg_id: str, now: float) -> int:
        """The sequence of the message with this id within the duplicate window; 0 without one."""
        oldest_allowed = now - self._duplicate_window_s
        while self._id_times and self._id_times[0][0] <= oldest_allowed:
            time, known = self._id_times.popleft()
            if known in self._ids and self._ids[known][1] == time:
                del self._ids[known]
        found = self._ids.get(msg_id)
        return 0 if found is None else found[0]

    def size_of(self, subject: str, data: bytes, headers: Headers | None) -> int:
        size = self._overhead + len(subject.encode()) + len(data)
        return size if headers is None else size + self._header_overhead + len(encode(headers))

    # Limits

    def refuse_one(self, message: Incoming, *, is_rollup: bool) -> ApiError | None:
        """The reason to refuse a plain publish to an unreplicated stream; None if it fits, perhaps by replacing
        another."""
        if not self.is_discard_new:
            return None
        earlier = self._by_subject.get(message.subject)
        is_subject_full = bool(self._max_per_subject and earlier and len(earlier) >= self._max_per_subject)
        if is_subject_full and self._is_new_per_subject and not is_rollup:
            return _MAX_PER_SUBJECT
        if self._max_messages and len(self._messages) >= self._max_messages and not is_subject_full:
            return _MAX_MESSAGES
        if self._max_bytes:
            size = self.size_of(message.subject, message.data, message.headers)
            # A replacement must not be larger than the replaced message, even if there is room elsewhere.
            replaced = self._messages[earlier[0]].size_bytes if is_subject_full and earlier else -1
            if self.size_bytes + size > self._max_bytes and replaced < size:
                return _MAX_BYTES
        return None

    def refuse_more(self, subject: str, of_subject: int, count: int, size: int, *, is_rollup: bool) -> ApiError | None:
        """The reason to refuse ``count`` messages of ``size`` bytes in all, ``of_subject`` of them on ``subject``.

        Batches, and all messages on a replicated stream, are measured before they are stored, without regard to the
        messages that they would replace; only a rollup may replace the last message its subject has room for.
        """
        if not self.is_discard_new:
            return None
        if self._max_messages and len(self._messages) + count > self._max_messages:
            return _MAX_MESSAGES
        if self._max_bytes and self.size_bytes + size > self._max_bytes:
            return _MAX_BYTES
        if self._is_new_per_subject and self._max_per_subject and not is_rollup:
            already = len(self._by_subject.get(subject, ()))
            return _MAX_PER_SUBJECT if already + of_subject > self._max_per_subject else None
        return None

    # Changes

    def append(self, subject: str, data: bytes, headers: Headers | None, now: float, msg_id: str = "") -> int:
        """Store a message and return its sequence; limits that discard old messages are applied at once."""
        sequence = self.last_sequence = self.last_sequence + 1
        size = self._overhead + len(subject.encode()) + len(data)
        if headers is not None:
            size += self._header_overhead + len(encode(headers))
        message = self._messages[sequence] = ModelMessage(sequence, subject, data, headers, now, size)
        self.size_bytes += size
        self.last_time = now
        for watcher in self.watchers:
            watcher.on_stored(message)
        sequences = self._by_subject.get(subject)
        if sequences is None:
            self._by_subject[subject] = deque((sequence,))
        else:
            sequences.append(sequence)
            if self._max_per_subject and len(sequences) > self._max_per_subject:
                self._remove(sequences[0])
        self.last_id = msg_id
        if msg_id:
            self._ids[msg_id] = (sequence, now)
            self._id_times.append((now, msg_id))
        if self._max_messages or self._max_bytes:
            self._evict()
        return sequence

    def roll_up(self, value: str, subject: str, sequence: int) -> None:
        """Remove the messages that a rollup replaces: ``sub`` those of its subject, ``all`` those of the stream."""
        # The replaced messages cannot be restored, so the rollup must not be lost either.
        self.promise(sequence)
        if value == "all":
            for earlier in [known for known in self._messages if known < sequence]:
                self._remove(earlier)
        else:
            sequences = self._by_subject[subject]
            while sequences[0] < sequence:
                self._remove(sequences[0])

    def promise(self, sequence: int) -> None:
        """Record that everything up to this sequence is acknowledged."""
        if sequence > self.acknowledged:
            self.acknowledged = sequence
            self.pieces = [piece for piece in self.pieces if piece.start > sequence]

    def propose(self, ids: Iterable[str]) -> None:
        """Record messages with these ids that a leader accepts while cut off; an empty id for a message without one."""
        for each in ids:
            self.proposed_messages += 1
            if each:
                self.proposed_ids.add(each)

    def purge(self, subject: str | None = None, below: int | None = None, keep: int = 0) -> int:
        """Remove messages of a filter, or below a sequence, or all but the newest ``keep``; returns their number."""
        if subject is None and below is None and not keep:
            # All at once, without a search; sequences continue.
            gone = list(self._messages)
        else:
            found = [
                each.sequence
                for each in self._messages.values()
                if (subject is None or matches(subject, each.subject)) and (below is None or each.sequence < below)
            ]
            gone = found[: len(found) - keep] if keep else found
        for sequence in gone:
            self._remove(sequence)
        return len(gone)

    def delete(self, sequence: int) -> bool:
        """Remove one message at any sequence."""
        if sequence not in self._messages:
            return False
        self._remove(sequence)
        return True

    def drop_newest(self, count: int) -> int:
        """Undo up to ``count`` of the newest messages, sequences and ids included; returns their number.

        Acknowledged messages stay, and all before them. An atomic batch is lost as a whole.
        """
        count = max(0, min(count, self.last_sequence - self.acknowledged))
        for piece in self.pieces:
            if self.last_sequence - count in piece[:-1]:
                count = self.last_sequence - piece.start + 1
        for sequence in range(self.last_sequence, self.last_sequence - count, -1):
            if sequence in self._messages:
                self._ids.pop(self._id_of(sequence), None)
                self._remove(sequence)
        self.pieces = [piece for piece in self.pieces if piece.stop <= self.last_sequence - count + 1]
        if count:
            self.last_sequence -= count
            self._oldest = min(self._oldest, self.last_sequence + 1)
            self.last_id = self._id_of(self.last_sequence)
        return count

    def _id_of(self, sequence: int) -> str:
        message = self._messages.get(sequence)
        return first_values(message.headers).get("Nats-Msg-Id", "") if message is not None and message.headers else ""

    def _evict(self) -> None:
        while self._messages and (
            (self._max_messages and len(self._messages) > self._max_messages)
            or (self._max_bytes and self.size_bytes > self._max_bytes)
        ):
            while self._oldest not in self._messages:
                self._oldest += 1
            self._remove(self._oldest)

    def _remove(self, sequence: int) -> None:
        message = self._messages.pop(sequence)
        self.size_bytes -= message.size_bytes
        sequences = self._by_subject[message.subject]
        if sequences[0] == sequence:
            sequences.popleft()
        elif sequences[-1] == sequence:
            sequences.pop()
        else:
            sequences.remove(sequence)
        if not sequences:
            del self._by_subject[message.subject]
        for watcher in self.watchers:
            watcher.on_removed(message)


def first_values(headers: Headers) -> dict[str, str]:
    """The first value of each header; the server's names are case-sensitive, and it ignores further values."""
    values: dict[str, str] = {}
    for name, value in headers.multi_items():
        values.setdefault(name, value)
    return values


def _limit(value: int | None) -> int:
    # 0, -1 and None mean the same: no limit.
    return value if value is not None and value > 0 else 0
