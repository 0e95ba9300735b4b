"""How fast ingest is spelled: reply subjects of messages, and the numbers in answers. Pure.

Every message carries ``<prefix>.<id>.<flow>.<gap>.<sequence>.<operation>.$FI`` as its reply subject. All but the
sequence and the operation are the same for a whole batch, so a frame is the head of its subject, two numbers and the
data.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Any

from jetspark.core import frames
from jetspark.core.connection import Connection
from jetspark.core.subjects import MAX_SUBJECT_BYTES, check_line, validate_subject
from jetspark.errors import ProtocolError
from jetspark.jetstream.publishing import header_block
from jetspark.publish.outgoing import Item, unsendable

__all__ = ["FLOW_ACK", "FastFrames", "FrameKind", "check_range", "number", "place_of"]

# Publishers use few subjects; see Connection, which has the same bound.
MAX_KNOWN_SUBJECTS = 4096

FLOW_ACK = re.compile(rb'\{"type":"ack","seq":([0-9]{1,19}),"msgs":([0-9]{1,9})\}')
"""An acknowledgement as the server writes it, and nearly every answer is one: read without JSON."""


class FrameKind(enum.IntEnum):
    """The last number of a reply subject."""

    START = 0
    APPEND = 1
    COMMIT = 2
    END = 3
    PING = 4


class FastFrames:
    """Makes the frames of one batch."""

    def __init__(self, machine: Connection) -> None:
        self._machine = machine
        self._reply = b""
        self.heads: dict[str, bytes] = {}
        """Subject to the beginning of its frames, up to the sequence. Always the same dict: the hot path has it too."""
        self.max_payload_bytes = machine.info.max_payload_bytes

    def reply_to(self, prefix: str, flow: int, gap: str) -> None:
        """Where answers are to go from now on; ``prefix`` has the id."""
        self._reply = f"{prefix}.{flow}.{gap}.".encode()
        self.heads.clear()

    def on_session(self) -> None:
        """Another server may take larger messages, or only smaller ones."""
        self.max_payload_bytes = self._machine.info.max_payload_bytes

    def frame(self, item: Item, sequence: int, operation: int) -> bytes:
        """
        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge, ConfigError: It cannot be sent.
        """
        if isinstance(item, str):  # has a first and a second, too
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
                data = self._machine.payload(data)
            return b"%b%d.%d.$FI %d\r\n%b\r\n" % (head, sequence, operation, len(data), data)
        block = headers if isinstance(headers, bytes) else header_block(headers)
        data = self._machine.payload(data, len(block))
        address = b"%b%d.%d.$FI" % (head[4:], sequence, operation)
        return frames.HPUB % (address, len(block), len(block) + len(data), block, data)

    def build(self, items: Iterable[Item], sequence: int, ready: list[bytes], max_bytes: int) -> None:
        """Append frames of messages to ``ready``, after this sequence, until they have ``max_bytes`` or more.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge, ConfigError: One cannot be sent; those before it are ready.
        """
        heads, max_payload = self.heads, self.max_payload_bytes
        reply = self._reply
        known, head = None, None
        for item in items:
            sequence += 1
            try:  # costs nothing as long as nothing is raised
                subject, data = item[0], item[1]
                if subject is not known:  # most go where the one before went
                    known, head = subject, heads.get(subject)
                elif head is None:
                    head = self._learn_head(subject)
            except (TypeError, LookupError):
                raise unsendable(item) from None
            frame = None
            if head is None:
                # Headers that are encoded, and a subject of its own for each message: a state for each key. A head that
                # is used once is not worth learning.
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
                # The common cases, without a call: no headers, or headers that are encoded already.
                if len(item) == 2:
                    if (size := len(data)) <= max_payload:
                        frame = b"%b%d.1.$FI %d\r\n%b\r\n" % (head, sequence, size, data)
                elif type(block := item[2]) is bytes and (size := len(block) + len(data)) <= max_payload:
                    frame = b"H%b%d.1.$FI %d %d\r\n%b%b\r\n" % (head, sequence, len(block), size, block, data)
            if frame is None:
                frame = self.frame(item, sequence, FrameKind.APPEND)
                head = heads.get(subject)  # it knows the subject now
            ready.append(frame)
            max_bytes -= len(frame)
            if max_bytes <= 0:
                return

    def _learn_head(self, subject: str) -> bytes:
        if len(self.heads) >= MAX_KNOWN_SUBJECTS:
            self.heads.clear()
        head = self.heads[subject] = b"PUB %b %b" % (self._machine.address(subject), self._reply)
        return head


# ---- answers ---------------------------------------------------------------------------------------------------------


def place_of(subject: str) -> tuple[int, int]:
    """Sequence and operation of the message whose reply subject this is; zeros if it is none of ours."""
    parts = subject.rsplit(".", 3)
    if len(parts) == 4 and parts[1].isdecimal() and parts[2].isdecimal():
        return int(parts[1]), int(parts[2])
    return 0, 0


def number(reply: dict[str, Any], name: str) -> int:
    """A number in an answer.

    Raises:
        ProtocolError: There is none of that name.
    """
    value = reply.get(name)
    if type(value) is not int:  # a bool is none, either
        raise ProtocolError(f"an answer to a fast batch without {name!r}: {reply}")
    return value


def check_range(answer: str, sequence: int, low: int, high: int) -> None:
    """Whether an answer is about messages that were sent.

    Raises:
        ProtocolError: It is not. Counting with such a number would open the window for ever, or take for stored what
            was never sent.
    """
    if not low <= sequence <= high:
        raise ProtocolError(f"{answer} of a fast batch for sequence {sequence}: expected {low} to {high}")
