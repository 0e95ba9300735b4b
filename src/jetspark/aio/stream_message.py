"""A consumer's message with asyncio."""

from __future__ import annotations

from functools import partial

from jetspark.aio.transport_calls import when_there_is_room
from jetspark.core.transport import WRITE_AT_BYTES
from jetspark.errors import BufferFull
from jetspark.jetstream.acks import ACK, ACK_FRAME, IN_PROGRESS, AckableMessage, nak_payload, term_payload

__all__ = ["JetStreamMessage"]


class JetStreamMessage(AckableMessage):
    """A message from a stream: ``subject``, ``data``, ``headers``, ``metadata``, and its acknowledgement.

    An acknowledgement is sent like any publish: the call returns when it is in the send buffer. The server does not
    confirm it, and redelivers the message if it is lost. :meth:`ack_sync` waits for a confirmation. Each message is
    acknowledged once; a second acknowledgement raises ``UsageError``.
    """

    async def ack(self) -> None:
        """Acknowledge: the message was processed and must not be redelivered."""
        # A copy of _answer(): a second coroutine would add a fifth to the cost of an ack.
        client = self._client
        if client is None:
            self._client_to_answer()
        machine, transport = client._machine, client._transport
        frame = ACK_FRAME % self.raw_reply
        # In threads: with transport.lock:
        if machine.out_bytes >= WRITE_AT_BYTES:
            await transport.write_and_wait()
        try:
            machine.publish_frame(frame)
        except BufferFull:
            await when_there_is_room(transport, partial(machine.publish_frame, frame))
        self._client = None
        if not transport.flush_is_scheduled:
            transport.flush_soon()

    async def ack_sync(self, timeout: float | None = None) -> None:
        """Acknowledge, and return when the server has recorded it.

        Raises:
            RequestTimeout: No confirmation in time; the server may have recorded the ack. The call may be repeated.
            NoResponders: The consumer or its stream was deleted, or has no leader at the moment.
        """
        await self._client_to_answer().request(self.reply, ACK, timeout=timeout)
        self._client = None

    async def nak(self, delay: float | None = None) -> None:
        """Request redelivery, now or after ``delay`` seconds."""
        await self._answer(nak_payload(delay))
        self._client = None

    async def in_progress(self) -> None:
        """Restart the consumer's ``ack_wait_s`` for this message. May be called repeatedly."""
        await self._answer(IN_PROGRESS)

    async def term(self, reason: str | None = None) -> None:
        """Stop redelivery of an unprocessed message; ``reason`` goes into the server's advisory."""
        await self._answer(term_payload(reason))
        self._client = None

    async def _answer(self, payload: bytes) -> None:
        client = self._client_to_answer()
        machine, transport, address = client._machine, client._transport, self.raw_reply
        # In threads: with transport.lock:
        if machine.out_bytes >= WRITE_AT_BYTES:
            await transport.write_and_wait()
        try:
            machine.publish_raw(address, payload)
        except BufferFull:
            await when_there_is_room(transport, partial(machine.publish_raw, address, payload))
        transport.flush_soon()
