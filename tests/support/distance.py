"""A server that seems far away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jetspark.server import NatsServer

__all__ = ["at_a_distance"]


@contextlib.asynccontextmanager
async def at_a_distance(server: NatsServer, seconds: float) -> AsyncIterator[str]:
    """The address of a server from and to which every word takes so long."""
    if not seconds:
        yield server.url
        return
    loop = asyncio.get_running_loop()
    forwarding: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                arrives_at, data = await underway.get()
                await asyncio.sleep(arrives_at - loop.time())
                writer.write(data)

        delivering = asyncio.ensure_future(deliver())
        try:
            while data := await reader.read(65536):
                underway.put_nowait((loop.time() + seconds, data))
        finally:
            delivering.cancel()
            writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        forwarding.update((asyncio.ensure_future(forward(reader, back)), asyncio.ensure_future(forward(there, writer))))

    listener = await asyncio.start_server(meet, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await asyncio.gather(*forwarding, return_exceptions=True)
