"""A consumer's message with asyncio."""

from __future__ import annotations

from functools import partial

from jetspark.aio.link_calls import when_there_is_room
from jetspark.core.link import WRITE_AT_BYTES
from jetspark.errors import BufferFull
from jetspark.jetstream.acks import ACK, ACK_FRAME, IN_PROGRESS, AckableMessage, nak_payload, term_payload

__all__ = ["JetStreamMessage"]


class JetStreamMessage(AckableMessage):
    """A message from a stream: ``subject``, ``data``, ``headers``, ``metadata``, and the ways to answer it.

    An answer is sent like any publish, together with others: it is accepted when the call returns, and on its way soon
    after. The server does not confirm it; an ack that is lost means that the message is delivered again. Where that
    must be known, use :meth:`ack_sync`. A message is answered once; a second answer raises ``UsageError``.
    """

    async def ack(self) -> None:
        """Done: do not deliver it again."""
        # The body of _answer() once more: a second coroutine would cost a fifth of what an ack costs.
        client = self._client
        if client is None:
            self._client_to_answer()
        machine, link = client._machine, client._link
        frame = ACK_FRAME % self.raw_reply
        # In threads: with link.lock:
        if machine.out_bytes >= WRITE_AT_BYTES:
            await link.write_and_wait()
        try:
            machine.publish_frame(frame)
        except BufferFull:
            await when_there_is_room(link, partial(machine.publish_frame, frame))
        self._client = None
        if not link.flush_is_scheduled:
            link.flush_soon()

    async def ack_sync(self, timeout: float | None = None) -> None:
        """Done, and return when the server has noted it.

        Raises:
            RequestTimeout: No confirmation in time; it may be noted or not, and may be asked again.
            NoResponders: The consumer or its stream is gone, or has no leader just now.
        """
        await self._client_to_answer().request(self.reply, ACK, timeout=timeout)
        self._client = None

    async def nak(self, delay: float | None = None) -> None:
        """Not done: deliver it again, now or after ``delay`` seconds."""
        await self._answer(nak_payload(delay))
        self._client = None

    async def in_progress(self) -> None:
        """Still at it: the consumer's ``ack_wait_s`` begins anew. May be said often."""
        await self._answer(IN_PROGRESS)

    async def term(self, reason: str | None = None) -> None:
        """Never deliver it again, though it was not processed; ``reason`` goes into the server's advisory."""
        await self._answer(term_payload(reason))
        self._client = None

    async def _answer(self, payload: bytes) -> None:
        client = self._client_to_answer()
        machine, link, address = client._machine, client._link, self.raw_reply
        # In threads: with link.lock:
        if machine.out_bytes >= WRITE_AT_BYTES:
            await link.write_and_wait()
        try:
            machine.publish_raw(address, payload)
        except BufferFull:
            await when_there_is_room(link, partial(machine.publish_raw, address, payload))
        link.flush_soon()
