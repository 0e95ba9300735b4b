"""The outgoing half of a connection: messages and commands that wait for the network.

Messages and commands (SUB, UNSUB, PING, PONG) leave in the order in which they were accepted, many in one write. Both
have a bound: ``send_buffer_bytes`` for messages, and as much again for commands, so that a caller that never publishes
is bounded too. A message larger than the whole buffer is accepted while the buffer is empty.

``published`` counts all messages accepted since the beginning, ``_handed_over`` the ones that a driver has taken. Every
message thus has a number, which later tells which messages a lost session had.

A session that is left in good order has *last words*: from :meth:`Outbox.hold_back` on, accepted messages wait for the
next session, and only :meth:`Outbox.send_last` and answers to PINGs still go to this one.

This is a base class of :class:`~jetspark.core.connection.Connection` and not a part of it: publishing is done for every
single message, and one more attribute on the way to the buffer costs a measurable share of its time.
"""

from __future__ import annotations

from collections.abc import Iterable

from jetspark.core import frames
from jetspark.core.arguments import octets, unfit
from jetspark.core.frames import LINE_ENDS
from jetspark.core.headers import HeadersLike, encode
from jetspark.core.subjects import MAX_SUBJECT_BYTES, ApiSubject, check_line, validate_filter, validate_subject
from jetspark.errors import BufferFull, ConnectionClosed, PayloadTooLarge

__all__ = ["Outbox"]

# SUB, UNSUB, PING and PONG have as much room as messages have, and at least this much: some 30,000 subscriptions.
MIN_CONTROL_ROOM_BYTES = 1 << 20

# Publishers use few subjects; the bound limits the memory of a publisher that never repeats one.
MAX_KNOWN_HEADS = 4096

_MESSAGES = (b"PUB ", b"HPUB ")


class _Heads(dict[str, bytes]):
    """By subject: the beginning of a frame without headers. A missing subject is validated first."""

    def __missing__(self, subject: str) -> bytes:
        head = _head(subject)
        # An API subject is not remembered: the same text as a plain str must be refused for a publish.
        if not isinstance(subject, ApiSubject):
            if len(self) >= MAX_KNOWN_HEADS:
                self.clear()
            self[subject] = head
        return head


class Outbox:
    """The buffer of a connection, and how messages get into it."""

    def __init__(self, send_buffer_bytes: int, own_prefix: str, max_payload_bytes: int) -> None:
        """``own_prefix`` begins our own reply subjects, which need no validation."""
        self.published = 0
        """Messages accepted for sending since the beginning."""
        self.out_bytes = 0
        """Bytes accepted and not yet handed to the driver."""
        self.is_leaving = False
        """True if a driver has to read ``next_deadline`` again: it may have come nearer."""
        self._out: list[bytes] = []
        self._handed_over = 0
        self._max_out_bytes = send_buffer_bytes
        self._room_bytes = send_buffer_bytes
        """Bound of ``out_bytes``; below 0 once closed, so that ``publish`` needs one comparison for both."""
        self._closed_because = "the connection is closed"
        self._control_bytes = 0
        """Bytes of ``_out`` that are not messages. They have a bound of their own: see :meth:`_check_control_room`."""
        self._control_room_bytes = max(send_buffer_bytes, MIN_CONTROL_ROOM_BYTES)
        self._last_words: list[bytes] | None = None
        """The rest of a session that is being left; ``_out`` is then for the next one. None otherwise."""
        self.published_at_leaving = 0
        """``published`` at the moment when we began to leave."""
        self._max_payload_bytes = max_payload_bytes
        self._own_prefix = own_prefix
        self._heads = _Heads()

    @property
    def buffered_messages(self) -> int:
        """Publishes accepted and not yet handed to the network."""
        return self.published - self._handed_over

    # ---- accepting messages ------------------------------------------------------------------------------------

    def publish(self, subject: str, data: bytes = b"", reply: str = "", headers: HeadersLike | None = None) -> None:
        """Accept a message for sending.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge, ConfigError: Nothing was accepted, nothing will be sent.
            BufferFull: Not accepted; try again when there is room.
            ConnectionClosed: Not accepted.
        """
        if reply or headers:
            self._publish_fully(subject, data, reply, headers)
            return
        try:  # costs nothing where nothing is raised
            head = self._heads[subject]
        except TypeError:  # a list has no hash
            head = _head(subject)
        if type(data) is not bytes:
            data = octets("data", data)
        size = len(data)
        if size > self._max_payload_bytes:
            raise PayloadTooLarge(size, self._max_payload_bytes)
        frame = b"".join((head, LINE_ENDS[size], data, b"\r\n"))
        # The last five lines are those of publish_frame(): a call would cost more than the lines themselves.
        out_bytes = self.out_bytes + len(frame)
        if out_bytes > self._room_bytes:
            self._check_room()
        self.published += 1  # before appending: an interrupt in between counts one too many, never too few
        self.out_bytes = out_bytes
        self._out.append(frame)

    def _publish_fully(self, subject: str, data: bytes, reply: str, headers: HeadersLike | None) -> None:
        address = self.address(subject)
        if reply:
            try:
                is_ours = reply.startswith(self._own_prefix)
            except (AttributeError, TypeError):  # bytes have such a method, too
                raise unfit("reply", reply, "a subject") from None
            # A reply subject of our own needs no validation.
            if not is_ours:
                check_line(f"{subject} {validate_subject(reply)}")
            address = b"%b %b" % (address, reply.encode())
        if headers:
            block = encode(headers)
            data = self.payload(data, len(block))
            self.publish_frame(frames.HPUB % (address, len(block), len(block) + len(data), block, data))
        else:
            data = self.payload(data)
            self.publish_frame(frames.PUB % (address, len(data), data))

    def publish_with_reply(self, subject: str, reply: bytes, data: bytes, headers: HeadersLike | None = None) -> None:
        """Like :meth:`publish`, with a reply subject of our own making, as it stands in a frame."""
        try:
            head = self._heads[subject]
        except TypeError:
            head = _head(subject)
        if type(data) is not bytes:
            data = octets("data", data)
        block = encode(headers) if headers else b""
        size = len(block) + len(data)
        if size > self._max_payload_bytes:
            raise PayloadTooLarge(size, self._max_payload_bytes)
        if block:
            frame = b"".join((b"H", head, reply, b" %d " % len(block), LINE_ENDS[size], block, data, b"\r\n"))
        else:
            frame = b"".join((head, reply, b" ", LINE_ENDS[size], data, b"\r\n"))
        out_bytes = self.out_bytes + len(frame)
        if out_bytes > self._room_bytes:
            self._check_room()
        self.published += 1
        self.out_bytes = out_bytes
        self._out.append(frame)

    def publish_raw(self, address: bytes, data: bytes) -> None:
        """Like :meth:`publish`, for an address that came from the server and is used once, such as an ack's.

        It is neither checked nor remembered. The data are ours, and small.
        """
        frame = frames.PUB % (address, len(data), data)
        out_bytes = self.out_bytes + len(frame)
        if out_bytes > self._room_bytes:
            self._check_room()
        self.published += 1
        self.out_bytes = out_bytes
        self._out.append(frame)

    def publish_frames(self, ready: list[bytes], *, is_urgent: bool = False) -> None:
        """Like :meth:`publish`, for many messages whose frames their sender has built.

        All are accepted or none. The frames are not validated: :meth:`address` and :meth:`payload` do that. An
        ``is_urgent`` frame is small and rare, and is accepted without room.
        """
        data = ready[0] if len(ready) == 1 else b"".join(ready)
        out_bytes = self.out_bytes + len(data)
        if out_bytes > self._room_bytes and (not is_urgent or self._room_bytes < 0):
            self._check_room()
        self.published += len(ready)
        self.out_bytes = out_bytes
        self._out.append(data)

    def publish_frame(self, data: bytes) -> None:
        """Like :meth:`publish_frames`, for one."""
        out_bytes = self.out_bytes + len(data)
        if out_bytes > self._room_bytes:
            self._check_room()
        self.published += 1
        self.out_bytes = out_bytes
        self._out.append(data)

    def address(self, subject: str) -> bytes:
        """A subject as it stands in a frame.

        Raises:
            InvalidSubject: It cannot be published to.
        """
        try:
            head = self._heads[subject]
        except TypeError:
            head = _head(subject)
        return head[len(b"PUB ") : -1]

    def payload(self, data: bytes, header_bytes: int = 0) -> bytes:
        """A payload as it stands in a frame.

        Raises:
            PayloadTooLarge, ConfigError: It cannot be published.
        """
        if type(data) is not bytes:
            data = octets("data", data)
        if header_bytes + len(data) > self._max_payload_bytes:
            raise PayloadTooLarge(header_bytes + len(data), self._max_payload_bytes)
        return data

    def _check_room(self) -> None:
        self._check_open()
        # A message larger than the whole buffer is accepted while the buffer is empty; otherwise it could never be
        # sent.
        if self._out:
            raise BufferFull(self.out_bytes, self._max_out_bytes)

    def _check_open(self) -> None:
        if self._room_bytes < 0:
            raise ConnectionClosed(self._closed_because)

    # ---- commands ----------------------------------------------------------------------------------------------

    def _send_command(self, frame: bytes) -> None:
        """Send a command in the present session."""
        if self._last_words is None:
            self._out.append(frame)
        elif frame is frames.PONG:
            self._last_words.append(frame)
        else:
            return  # commands are not for a session that is being left
        self.out_bytes += len(frame)
        self._control_bytes += len(frame)

    def _send_first(self, commands: list[bytes]) -> None:
        """Send the first commands of a session, ahead of all buffered frames."""
        self._out[:0] = commands
        self.out_bytes += sum(map(len, commands))

    def _check_control_room(self) -> None:
        """Refuse commands when too many wait for the network: subscribing and flushing are bounded too.

        An UNSUB is always accepted, because it is bounded by the number of subscriptions.
        """
        if self._control_bytes > self._control_room_bytes:
            raise BufferFull(self._control_bytes, self._control_room_bytes)

    # ---- handing over ------------------------------------------------------------------------------------------

    def _hand_over(self) -> bytes:
        """Bytes for the transport; they count as handed over from here on."""
        if self._last_words is not None:
            return self._hand_over_last_words()
        if not self._out:
            return b""
        data = b"".join(self._out) if len(self._out) > 1 else self._out[0]
        self._handed_over = self.published
        self._out.clear()
        self.out_bytes = self._control_bytes = 0
        return data

    def _hand_over_last_words(self) -> bytes:
        assert self._last_words is not None
        data = b"".join(self._last_words)
        self._last_words.clear()
        self.out_bytes -= len(data)
        self._control_bytes = 0
        self._handed_over = self.published_at_leaving
        return data

    def hold_back(self) -> None:
        """Leave this session: messages accepted from now on wait for the next one."""
        self._last_words, self._out = self._out, []
        self.is_leaving = True
        self.published_at_leaving = self.published

    def send_last(self, commands: Iterable[bytes]) -> None:
        """Send commands in the session that is being left."""
        assert self._last_words is not None
        for command in commands:
            self._last_words.append(command)
            self.out_bytes += len(command)

    def _keep_messages(self) -> None:
        """End the session: drop its commands, and keep the messages that were not handed over for the next one."""
        unsent, self._last_words = [*(self._last_words or ()), *self._out], None
        self.is_leaving = False
        self._out = [frame for frame in unsent if frame.startswith(_MESSAGES)]
        self._control_bytes = 0
        self.out_bytes = sum(map(len, self._out))

    def _allow_payload(self, max_payload_bytes: int) -> list[tuple[int, frames.Published]]:
        """Adopt a server's payload limit; returns the buffered messages above it, each with its number.

        These are dropped: the server would end the session for one of them, and leave all messages sent with it in
        doubt.
        """
        has_less_room = max_payload_bytes < self._max_payload_bytes
        self._max_payload_bytes = max_payload_bytes
        if not has_less_room or not self._out:
            return []
        kept: list[bytes] = []
        dropped: list[tuple[int, frames.Published]] = []
        number = self._handed_over if self._last_words is None else self.published_at_leaving
        for entry in self._out:
            if not entry.startswith(_MESSAGES):
                kept.append(entry)
                continue
            for message in frames.published(entry):
                number += 1
                if message.size <= max_payload_bytes:
                    kept.append(message.frame)
                else:
                    dropped.append((number, message))
        self.out_bytes += sum(map(len, kept)) - sum(map(len, self._out))
        self._out = kept
        return dropped


def _head(subject: str) -> bytes:
    checked = validate_filter(subject) if isinstance(subject, ApiSubject) else validate_subject(subject)
    check_line(checked, MAX_SUBJECT_BYTES)
    return b"PUB %b " % checked.encode()
