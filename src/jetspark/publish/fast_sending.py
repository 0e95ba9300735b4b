"""Outgoing messages of a fast batch: encoded as frames, numbered, and paced by the server. Pure.

Frames. Every message carries ``<prefix>.<id>.<flow>.<gap>.<sequence>.<operation>.$FI`` as its reply subject. All parts
but the sequence and the operation are the same for a whole batch, so a frame is the head of its subject, two numbers
and the data (``FastFrames``).

Pace. The server acknowledges every ``msgs`` messages, a number that it may change at any time, and the client allows at
most ``max_outstanding_acks`` outstanding acknowledgements: messages up to ``progress + msgs * max_outstanding_acks``
are *wanted* (``FastPace``). Progress is the highest sequence known to be processed: acknowledged, refused with an
error, or reported missing. An ack covers all sequences before it, so a lost ack does not matter; and refusals and gaps
must count, because no acknowledgement follows when nothing of a window was stored.

Sending. The messages for one further acknowledgement may be added early, before they are wanted. ``FastSender`` keeps
their frames until an answer makes them wanted: the server mostly acknowledges whole windows at once, and is then idle
until the next messages reach it.

Invariants: a sequence is sent once. ``sent <= sequence``, and the frames between them are kept, in order: they are sent
before later messages, or never. At most ``CHUNK_BYTES`` and one more message are kept, and at most the messages for one
acknowledgement.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from itertools import islice

from jetspark.core import frames
from jetspark.core.connection import Connection
from jetspark.core.subjects import MAX_SUBJECT_BYTES, check_line, validate_subject
from jetspark.jetstream.publishing import header_block
from jetspark.publish.fast_options import HIGHEST_FLOW, FastBatchOptions
from jetspark.publish.outgoing import CHUNK_BYTES, CHUNK_MESSAGES, Item, unsendable

__all__ = ["FastFrames", "FastPace", "FastSender", "FrameKind"]

# ---- frames ----------------------------------------------------------------------------------------------------------


# Publishers use few subjects; see Connection, which has the same bound.
MAX_KNOWN_SUBJECTS = 4096


class FrameKind(enum.IntEnum):
    """The kind of a message: the last number of its reply subject."""

    START = 0
    APPEND = 1
    COMMIT = 2
    END = 3
    PING = 4


class FastFrames:
    """Encodes the frames of one batch."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reply = b""
        self.heads: dict[str, bytes] = {}
        """By subject: the beginning of its frames, up to the sequence. The hot path shares this dict, so it stays the
        same."""
        self.max_payload_bytes = connection.info.max_payload_bytes

    def reply_to(self, prefix: str, flow: int, gap: str) -> None:
        """Set the reply subjects of all further frames; ``prefix`` has the batch's id."""
        self._reply = f"{prefix}.{flow}.{gap}.".encode()
        self.heads.clear()

    def on_session(self) -> None:
        """Adopt the payload limit of another server."""
        self.max_payload_bytes = self._connection.info.max_payload_bytes

    def frame(self, item: Item, sequence: int, operation: int) -> bytes:
        """
        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge, ConfigError: The message cannot be sent.
        """
        if isinstance(item, str):  # indexing would split it into characters
            raise unsendable(item)
        try:
            head = self.heads.get(item[0])
            data, headers = item[1], item[2] if len(item) > 2 else None
        except (TypeError, LookupError):
            raise unsendable(item) from None
        if head is None:
            head = self._learn_head(item[0])
        if not headers:
            if type(data) is not bytes or len(data) > self.max_payload_bytes:
                data = self._connection.payload(data)
            return b"%b%d.%d.$FI %d\r\n%b\r\n" % (head, sequence, operation, len(data), data)
        block = headers if isinstance(headers, bytes) else header_block(headers)
        data = self._connection.payload(data, len(block))
        address = b"%b%d.%d.$FI" % (head[4:], sequence, operation)
        return frames.HPUB % (address, len(block), len(block) + len(data), block, data)

    def build(self, items: Iterable[Item], sequence: int, ready: list[bytes], max_bytes: int) -> None:
        """Append frames of messages to ``ready``, after this sequence, until they have ``max_bytes`` or more.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge, ConfigError: A message cannot be sent; earlier ones are
            ready.
        """
        heads, max_payload = self.heads, self.max_payload_bytes
        reply = self._reply
        known, head = None, None
        for item in items:
            sequence += 1
            try:  # free unless it raises
                subject, data = item[0], item[1]
                if subject is not known:  # most messages have the subject of the one before
                    known, head = subject, heads.get(subject)
                elif head is None:
                    head = self._learn_head(subject)
            except (TypeError, LookupError):
                raise unsendable(item) from None
            frame = None
            if head is None:
                # Encoded headers, and a different subject for each message: a state for each key. Caching a head that
                # is used once is useless.
                if len(item) == 3 and type(data) is bytes and type(block := item[2]) is bytes and block:
                    size = len(block) + len(data)
                    if size <= max_payload:
                        place = validate_subject(subject).encode()
                        if len(place) > MAX_SUBJECT_BYTES:
                            check_line(subject, MAX_SUBJECT_BYTES)
                        frame = b"HPUB %b %b%d.1.$FI %d %d\r\n%b%b\r\n" % (
                            place,
                            reply,
                            sequence,
                            len(block),
                            size,
                            block,
                            data,
                        )
            elif type(data) is bytes:
                # The common cases, without a call: no headers, or encoded headers.
                if len(item) == 2:
                    if (size := len(data)) <= max_payload:
                        frame = b"%b%d.1.$FI %d\r\n%b\r\n" % (head, sequence, size, data)
                elif type(block := item[2]) is bytes and (size := len(block) + len(data)) <= max_payload:
                    frame = b"H%b%d.1.$FI %d %d\r\n%b%b\r\n" % (head, sequence, len(block), size, block, data)
            if frame is None:
                frame = self.frame(item, sequence, FrameKind.APPEND)
                head = heads.get(subject)  # cached by the call
            ready.append(frame)
            max_bytes -= len(frame)
            if max_bytes <= 0:
                return

    def _learn_head(self, subject: str) -> bytes:
        if len(self.heads) >= MAX_KNOWN_SUBJECTS:
            self.heads.clear()
        head = self.heads[subject] = b"PUB %b %b" % (self._connection.address(subject), self._reply)
        return head


# ---- pace and sending ------------------------------------------------------------------------------------------------


class FastPace:
    """The number of messages that a batch may be ahead of the server."""

    def __init__(self, max_outstanding_acks: int) -> None:
        self._max_outstanding_acks = max_outstanding_acks
        self.msgs_per_ack = 1
        self.progress = 0

    @property
    def wanted(self) -> int:
        """The highest sequence that the server wants now."""
        return self.progress + self.msgs_per_ack * self._max_outstanding_acks

    def change(self, msgs_per_ack: int) -> None:
        """Set the number of messages for each further acknowledgement."""
        self.msgs_per_ack = min(max(1, msgs_per_ack), HIGHEST_FLOW)

    def move_to(self, sequence: int) -> bool:
        """Record that the server has processed all messages up to this one; False if that was known."""
        if sequence <= self.progress:
            return False
        self.progress = sequence
        return True


class FastSender:
    """Numbers messages, sends the wanted ones, and keeps the early ones.

    Drivers call :meth:`add` for every message; the batch reports its opening, the server's progress, and its end.
    """

    def __init__(self, connection: Connection, options: FastBatchOptions) -> None:
        self.sequence = 0
        """The highest sequence of a message."""
        self.sent = 0
        """The highest sequence sent; the frames above it are kept."""
        self.wanted = 0
        """The highest sequence that may be sent now; an attribute, because it is read for every message."""
        self.limit = 0
        """The highest sequence that may be added now; likewise."""
        self.sent_at = 0.0
        """When the last message was sent."""
        self.first_subject = ""
        """The subject of the first message; pings and ends go there, too."""
        self._connection, self._options = connection, options
        self._pace = FastPace(options.max_outstanding_acks)
        self._takes_more = False
        """True if messages may be added: the batch is open, and nothing has ended it."""
        self._early: list[bytes] = []
        """Frames of messages that are not wanted yet."""
        self._early_bytes = 0
        self._frames = FastFrames(connection)
        self._heads, self._max_payload_bytes = self._frames.heads, self._frames.max_payload_bytes
        """The attributes of ``_frames``, for :meth:`add`."""

    @property
    def room(self) -> int:
        """Number of messages that may be added now."""
        room = self.limit - self.sequence
        return room if room > 0 else 0

    @property
    def due(self) -> int:
        """Number of messages that the server wants now."""
        return max(0, self.wanted - self.sequence)

    @property
    def msgs_per_ack(self) -> int:
        """The server's present pace."""
        return self._pace.msgs_per_ack

    def uses(self, subject: str) -> bool:
        """True if the batch has sent messages to the subject."""
        return subject in self._heads

    # ---- the first and the last ------------------------------------------------------------------------------------

    def start(self, item: Item, reply_prefix: str, now: float, *, is_only: bool) -> None:
        """Send the first message; with ``is_only`` it is the last, too. Answers go below ``reply_prefix``."""
        self._frames.reply_to(reply_prefix, self._options.flow, self._options.gap)
        self._send([self._frames.frame(item, 1, FrameKind.COMMIT if is_only else FrameKind.START)], 1, now)
        self.first_subject = item[0]

    def commit(self, item: Item, now: float) -> None:
        """Send the last message, behind the kept ones. It needs no room: nothing follows it."""
        self._submit_last(self._frames.frame(item, self.sequence + 1, FrameKind.COMMIT), now)

    def end(self, now: float) -> None:
        """Send an end without a message, behind the kept messages."""
        self._submit_last(self._control(self.sequence + 1, FrameKind.END), now, is_urgent=True)

    def _submit_last(self, frame: bytes, now: float, *, is_urgent: bool = False) -> None:
        if self._early:
            self._keep([frame])
        else:
            self._send([frame], self.sequence + 1, now, is_urgent=is_urgent)

    def ping(self) -> None:
        """Send a ping with the highest sequence sent."""
        self._connection.publish_frames([self._control(self.sent, FrameKind.PING)], is_urgent=True)

    def _control(self, sequence: int, kind: FrameKind) -> bytes:
        return self._frames.frame((self.first_subject, b""), sequence, kind)

    # ---- adding ------------------------------------------------------------------------------------------------

    def add(self, item: Item, now: float) -> None:
        """Send one message as soon as it is wanted; there must be room.

        After an error (``InvalidSubject``, ``PayloadTooLarge``, ``BufferFull``...) the batch is unchanged.
        """
        sequence = self.sequence + 1
        try:
            data, head = item[1], self._heads.get(item[0])
        except (TypeError, LookupError):
            raise unsendable(item) from None
        if head is not None and len(item) == 2 and type(data) is bytes and len(data) <= self._max_payload_bytes:
            frame = b"%b%d.1.$FI %d\r\n%b\r\n" % (head, sequence, len(data), data)  # the common case, without a call
        else:
            frame = self._frames.frame(item, sequence, FrameKind.APPEND)
        if sequence <= self.wanted:
            self.sequence = self.sent = sequence  # counted first, as in `_send`
            try:
                self._connection.publish_frame(frame)
            except Exception:
                self.sequence = self.sent = sequence - 1
                raise
            self.sent_at = now
        else:
            self._keep([frame])

    def add_many(self, items: Iterable[Item], now: float) -> None:
        """Send messages as soon as they are wanted; there must be room for all.

        Raises:
            BufferFull, ConnectionClosed: No message is added.
            ConfigError: A message cannot be sent; the messages before it are added.
        """
        ready: list[bytes] = []
        try:
            self._frames.build(items, self.sequence, ready, 1 << 62)
        finally:
            if ready:
                self._submit(ready, now)

    def add_up_to(self, count: int, items: Iterable[Item], now: float) -> None:
        """Send the first ``count`` messages, for which there must be room, or fewer if they are large.

        Raises:
            BufferFull, ConnectionClosed: No message is added.
        """
        ready: list[bytes] = []
        self._frames.build(islice(items, count), self.sequence, ready, CHUNK_BYTES)
        self._submit(ready, now)

    @property
    def may_add_some(self) -> bool:
        """True if the connection certainly has room for a piece of :meth:`add_some`, whatever its content."""
        connection = self._connection
        piece_bytes = CHUNK_BYTES + 2 * self._max_payload_bytes  # the last message may exceed it by its whole size
        return not connection.out_bytes or connection.out_bytes + piece_bytes <= connection.options.send_buffer_bytes

    def add_some(self, items: Iterator[Item], now: float) -> bool:
        """Take as many messages as there is room for, and send them; False when the iterator has ended.

        Every taken message is added, so ``may_add_some`` must be true. An error is raised after the messages before it
        were added.
        """
        ready: list[bytes] = []
        try:
            self._frames.build(islice(items, min(self.room, CHUNK_MESSAGES)), self.sequence, ready, CHUNK_BYTES)
        finally:
            if ready:
                self._submit(ready, now)
        return bool(ready)

    # ---- sending -----------------------------------------------------------------------------------------------

    def _submit(self, ready: list[bytes], now: float) -> None:
        """Give the next sequences to frames that were encoded for them: send the wanted ones, keep the others."""
        due = ready[: self.due]
        if due:
            self._send(due, self.sequence + len(due), now)
        if len(due) < len(ready):
            self._keep(ready[len(due) :])

    def _send(self, ready: list[bytes], last: int, now: float, *, is_urgent: bool = False) -> None:
        """Send frames, the last of which has this sequence.

        They are counted first: an interrupt must not leave uncounted messages on their way.
        """
        before = self.sequence, self.sent
        self.sequence, self.sent = max(self.sequence, last), last
        try:
            self._connection.publish_frames(ready, is_urgent=is_urgent)
        except Exception:
            self.sequence, self.sent = before
            raise
        self.sent_at = now

    def _keep(self, ready: list[bytes]) -> None:
        self._early += ready
        self._early_bytes += sum(map(len, ready))
        self.sequence += len(ready)
        if self._early_bytes >= CHUNK_BYTES:
            self._set_limit()

    # ---- what the batch tells --------------------------------------------------------------------------------------

    def allow_more(self, takes_more: bool) -> None:
        """Allow, or refuse, further messages."""
        self._takes_more = takes_more
        self._set_limit()

    def change_pace(self, msgs_per_ack: int) -> None:
        """Set the number of messages for each further acknowledgement."""
        self._pace.change(msgs_per_ack)
        self._set_limit()

    def move_to(self, sequence: int) -> bool:
        """Record that the server has processed all messages up to this one; False if that was known."""
        if not self._pace.move_to(sequence):
            return False
        self._set_limit()
        return True

    def send_wanted(self, now: float) -> None:
        """Send the kept messages that are wanted by now."""
        if self._early and self.wanted > self.sent:
            self._send_early(self.wanted - self.sent, now)

    def send_all(self, now: float) -> None:
        """Send all kept messages, wanted or not, because the batch ends."""
        self._send_early(len(self._early), now)

    def _send_early(self, count: int, now: float) -> None:
        """Send the first kept messages."""
        if not self._early or self._connection.is_closed:
            return
        ready, self._early = self._early[:count], self._early[count:]
        # They were accepted long ago, and are few: they do not wait for room in the connection's buffer again.
        self._send(ready, self.sent + len(ready), now, is_urgent=True)
        self._early_bytes = sum(map(len, self._early))
        self._set_limit()

    def drop_kept(self) -> None:
        """Drop the kept messages and refuse further ones: the batch is over, or will be without them."""
        self._early.clear()
        self._early_bytes = 0
        self.allow_more(False)

    def begin_again(self) -> None:
        """Start numbering again, because nothing was stored."""
        self.sequence = self.sent = 0

    def on_session(self) -> None:
        """Adopt the payload limit of another server."""
        self._frames.on_session()
        self._max_payload_bytes = self._frames.max_payload_bytes

    def _set_limit(self) -> None:
        # Kept messages are still sent at the server's pace when the end of the batch is behind them.
        self.wanted = self._pace.wanted if self._takes_more or self._early else 0
        if not self._takes_more:
            self.limit = 0
        elif self._early_bytes < CHUNK_BYTES:
            self.limit = self.wanted + self._pace.msgs_per_ack
        else:
            self.limit = self.sequence
