"""The accepted messages of a fast publisher: encoded, in one of four stages, with flush requests up to a position.
Pure.

Encoding. ``FastEncoder`` reduces a message to its data, and its headers as they stand in a frame. A message that can
never be sent is refused here, before it is accepted. With message ids, the id ends with the message's position, so that
every repetition has the same id.

Stages. Every accepted message has a position, counted from 1, and is in one of four stages, in this order: published,
claimed, sent, backlog. A message moves to the stage before its own, or back to the front of the backlog
(``FastStages``).

Flushing. Callers request that messages up to a position are stored, at once or after a while (``FlushRequests``). Only
the end of a batch confirms its last messages, because acknowledgements come after ``flow`` messages. So a request ends
the batch, at once or, with ``linger_s``, when no message was accepted for that many seconds: while more arrive, their
acknowledgements may make it unnecessary.

Invariant: an interrupt may come between any two calls, and finds each message in one stage, or in two if it has just
been published; never in none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter

from jetspark.core.connection import Connection
from jetspark.core.headers import Headers, HeadersLike
from jetspark.core.numbers import seconds, whole
from jetspark.jetstream.publishing import header_block
from jetspark.publish.outgoing import Item, are_plain, data_of, unsendable

__all__ = ["KEPT_OVERHEAD_BYTES", "FastEncoder", "FastStages", "FlushRequests", "has_id"]

# ---- encoding --------------------------------------------------------------------------------------------------------


# The digits of a position and the end of the header block, at most.
ID_END_BYTES = 24
# Compares unequal to every subject, valid or not.
_NO_SUBJECT = object()


class FastEncoder:
    """Encodes the messages of one publisher."""

    def __init__(self, connection: Connection, id_prefix: str | None) -> None:
        """Ids are ``id_prefix``, a dash and the position; None for no ids."""
        self._connection = connection
        self._ids = None if id_prefix is None else f"{id_prefix}-"
        self._id_head = None if id_prefix is None else f"NATS/1.0\r\nNats-Msg-Id: {id_prefix}-".encode()

    @property
    def has_ids(self) -> bool:
        return self._ids is not None

    def keep(self, items: Sequence[Item], position: int, kept: list[Item], *, are_checked: bool = False) -> None:
        """Append encoded messages to ``kept``; the first has this position.

        Args:
            are_checked: True if all messages are known to be valid.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: A message can never be sent. The messages before it are
            kept.
        """
        if are_checked and self._id_head is None and sum(map(len, items)) == 2 * len(items):
            kept.extend(items)
        else:
            self._check(items, position, kept)

    def _check(self, items: Sequence[Item], first: int, kept: list[Item]) -> None:
        connection = self._connection
        payload, max_payload = connection.payload, connection.info.max_payload_bytes
        id_head = self._id_head
        if are_plain(connection, items, beside=0 if id_head is None else len(id_head) + ID_END_BYTES):
            if id_head is None:
                kept.extend(items)
            else:
                numbered = enumerate(items, first)
                kept.extend([(item[0], item[1], b"%b%d\r\n\r\n" % (id_head, position)) for position, item in numbered])
            return
        last_subject: object = _NO_SUBJECT
        for position, item in enumerate(items, first):
            if isinstance(item, str):  # indexing would split it into characters
                raise unsendable(item)
            try:
                subject, data = item[0], item[1]
                headers = item[2] if len(item) > 2 else None
            except (TypeError, LookupError):
                raise unsendable(item) from None
            if subject != last_subject:  # most messages have the subject of the one before
                connection.address(subject)
                last_subject = subject
            if headers is None and id_head is None:
                if type(data) is not bytes or len(data) > max_payload:
                    data = payload(data)
                kept.append((subject, data))
                continue
            if headers is None:
                block = b"%b%d\r\n\r\n" % (id_head or b"", position)
            else:
                block = headers if isinstance(headers, bytes) else self._encode(headers, position)
            if type(data) is not bytes or len(block) + len(data) > max_payload:
                data = payload(data, len(block))
            kept.append((subject, data, block))

    def _encode(self, headers: HeadersLike, position: int) -> bytes:
        if self._ids is None:
            return header_block(headers)
        named = Headers(headers)
        if "Nats-Msg-Id" not in named:  # the caller's own is better: it may outlive this process
            named["Nats-Msg-Id"] = f"{self._ids}{position}"
        return header_block(named)


# ---- stages ----------------------------------------------------------------------------------------------------------


# Memory of a kept message besides its payload: the tuple, the strings, its slot in a deque.
KEPT_OVERHEAD_BYTES = 200


class FastStages:
    """The messages of one publisher, by stage."""

    def __init__(self) -> None:
        self.published = 0
        """All messages up to this position are stored, or were passed to ``on_refused``."""
        self.claimed: deque[Item] = deque()
        """Acknowledged, but perhaps as duplicates of messages that a leader proposed and lost."""
        self.sent: deque[Item] = deque()
        """In the present batch, without an acknowledgement."""
        self.backlog: deque[Item] = deque()
        self.pending_bytes = 0

    @property
    def accepted(self) -> int:
        """Position of the last message accepted. Computed, because an interrupt could leave a counter behind."""
        return self.published + self.pending

    @property
    def pending(self) -> int:
        """Number of messages accepted and not known to be stored."""
        return len(self.claimed) + len(self.sent) + len(self.backlog)

    @property
    def sent_to(self) -> int:
        """Position of the last message that was sent."""
        return self.published + len(self.claimed) + len(self.sent)

    def unpublished(self) -> list[Item]:
        """The messages that are not known to be stored, in order."""
        return [*self.claimed, *self.sent, *self.backlog]

    def accept(self, items: Sequence[Item]) -> None:
        size = _kept_bytes(items)
        self.backlog.extend(items)
        self.pending_bytes += size

    def send(self, count: int) -> None:
        """Move the first messages of the backlog to ``sent``, in one call into C: an interrupt finds each in one
        stage."""
        self.sent.extend(islice(iter(self.backlog.popleft, None), count))

    def claim(self, count: int) -> list[Item]:
        """Move the first sent messages to ``claimed``, since they are acknowledged; returns them."""
        part = list(islice(self.sent, count))
        self.claimed.extend(part)
        _drop(self.sent, count)
        return part

    def publish(self, source: deque[Item], count: int) -> None:
        """Count the first messages of ``source``, the earliest stage in use, as stored, and drop them.

        They are counted before they are dropped: an interrupt may leave some in both stages, never in none.
        """
        self.pending_bytes -= _kept_bytes(list(islice(source, count)))
        self.published += count
        _drop(source, count)

    def send_again(self, source: deque[Item]) -> None:
        """Move all messages of ``source`` back to the front of the backlog."""
        self.backlog.extendleft(reversed(source))
        source.clear()


_block_of: Callable[[Item], bytes] = itemgetter(2)


def _kept_bytes(items: Sequence[Item]) -> int:
    """The size of kept messages as counted by ``max_pending_bytes``."""
    size = KEPT_OVERHEAD_BYTES * len(items) + sum(map(len, map(data_of, items)))
    width = sum(map(len, items))
    if width == 3 * len(items):
        size += sum(map(len, map(_block_of, items)))
    elif width > 2 * len(items):  # some have headers
        size += sum(len(item[2]) for item in items if len(item) == 3 and isinstance(item[2], bytes))
    return size


def has_id(item: Item) -> bool:
    """True if the message has an id, by which the stream recognises a repetition."""
    return len(item) == 3 and isinstance(item[2], bytes) and b"\r\nNats-Msg-Id:" in item[2]


def _drop(items: deque[Item], count: int) -> None:
    """Remove the first items in one call into C, which an interrupt cannot split."""
    deque(islice(iter(items.popleft, None), count), maxlen=0)


# ---- flush requests --------------------------------------------------------------------------------------------------


class FlushRequests:
    """Flush requests of one publisher; only the highest position counts."""

    def __init__(self, stages: FastStages) -> None:
        self._stages = stages
        self._flush_to = 0
        self._linger_to = 0
        """To be flushed when no message was accepted for a while."""
        self._linger_s = 0.0
        self._linger_until: float | None = None

    def flush(self) -> int:
        """Request that all messages accepted so far are stored soon; returns the position to wait for."""
        self._flush_to = self._stages.accepted
        return self._flush_to

    def flush_to(self, position: int) -> None:
        """Request that all messages up to a position are stored soon."""
        self._flush_to = max(self._flush_to, min(position, self._stages.accepted))

    def request(self, position: int, now: float, linger_s: float) -> None:
        """Request that all messages up to a position are stored soon.

        With ``linger_s`` the batch is ended for it only when no message was accepted for that many seconds: as long as
        more arrive, their acknowledgements confirm the position.
        """
        position, linger_s = whole("position", position, low=0), seconds("linger_s", linger_s)
        if linger_s <= 0:
            self.flush_to(position)
            return
        self._linger_to = max(self._linger_to, min(position, self._stages.accepted))
        self._linger_s = linger_s
        self._linger_until = now + linger_s

    @property
    def need_an_end(self) -> bool:
        """True if all requested messages are sent, and not all of them are stored."""
        return self._stages.published < self._flush_to <= self._stages.sent_to

    def on_accepted(self, now: float) -> None:
        """Start the lingering time again, since more messages were accepted."""
        if self._linger_until is not None:
            self._linger_until = now + self._linger_s

    def on_published(self) -> None:
        if self._stages.published >= self._linger_to:
            self._linger_until = None

    def next_deadline(self) -> float | None:
        return self._linger_until

    def on_time(self, now: float, *, is_ack_on_its_way: bool) -> None:
        """End the lingering time, unless an acknowledgement is expected: then start it again."""
        if self._linger_until is None or now < self._linger_until:
            return
        if is_ack_on_its_way:
            self._linger_until = now + self._linger_s
        else:
            self._linger_until = None
            self._flush_to = max(self._flush_to, self._linger_to)
