"""Making of a message what a fast publisher keeps of it: its data, and its headers as they stand in a frame. Pure.

What can never be sent is refused here, before it is accepted. Where messages get ids, each has its position as the end
of its id, so that it has the same id however often it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetspark.core.connection import Connection
from jetspark.core.headers import Headers, HeadersLike
from jetspark.jetstream.publishing import header_block
from jetspark.publish.outgoing import Item, are_plain, unsendable

__all__ = ["FastKeeping"]

# The digits of a position and the end of the header block, at most.
ID_END_BYTES = 24
# Equal to no subject, not even to one that is none.
_NO_SUBJECT = object()


class FastKeeping:
    """What one publisher keeps of messages."""

    def __init__(self, machine: Connection, id_prefix: str | None) -> None:
        """Ids are ``id_prefix``, a dash and the position; without one there are none."""
        self._machine = machine
        self._ids = None if id_prefix is None else f"{id_prefix}-"
        self._id_head = None if id_prefix is None else f"NATS/1.0\r\nNats-Msg-Id: {id_prefix}-".encode()

    @property
    def has_ids(self) -> bool:
        return self._ids is not None

    def keep(self, items: Sequence[Item], position: int, kept: list[Item], *, are_checked: bool = False) -> None:
        """Append to ``kept`` what is kept of messages, the first of which gets this position.

        Args:
            are_checked: Each is known to be fit to be sent.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: One of them can never be sent. Those before it are kept.
        """
        if are_checked and self._id_head is None and sum(map(len, items)) == 2 * len(items):
            kept.extend(items)
        else:
            self._check(items, position, kept)

    def _check(self, items: Sequence[Item], first: int, kept: list[Item]) -> None:
        machine = self._machine
        payload, max_payload = machine.payload, machine.info.max_payload_bytes
        id_head = self._id_head
        if are_plain(machine, items, beside=0 if id_head is None else len(id_head) + ID_END_BYTES):
            if id_head is None:
                kept.extend(items)
            else:
                numbered = enumerate(items, first)
                kept.extend([(item[0], item[1], b"%b%d\r\n\r\n" % (id_head, position)) for position, item in numbered])
            return
        last_subject: object = _NO_SUBJECT
        for position, item in enumerate(items, first):
            if isinstance(item, str):  # has a first and a second, too
                raise unsendable(item)
            try:
                subject, data = item[0], item[1]
                headers = item[2] if len(item) > 2 else None
            except (TypeError, LookupError):
                raise unsendable(item) from None
            if subject != last_subject:  # most go where the one before went
                machine.address(subject)
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
