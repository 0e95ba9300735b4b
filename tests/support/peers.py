"""Peers that misbehave on purpose: a scripted server, and a proxy that can cut a connection anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

INFO = b'INFO {"server_id":"scripted","version":"2.15.0","headers":true,"max_payload":1048576}\r\n'


@asynccontextmanager
async def scripted_server(*scripts: Script, port: int = 0) -> AsyncIterator[str]:
    """Plays the first script to the first connection, and so on; the last one to all that follow. Yields its URL."""
    connections = 0
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        script = scripts[min(connections, len(scripts) - 1)]
        connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A proper handshake, without the PINGs that follow it."""
    writer.write(INFO)
    while (line := await reader.readline()) != b"PING\r\n":
        if not line:
            raise ConnectionResetError("the client left before its login was complete")
    writer.write(b"PONG\r\n")


async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that answers pings and does nothing else."""
    await greet(reader, writer)
    while line := await reader.readline():
        if line == b"PING\r\n":
            writer.write(b"PONG\r\n")


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts and never says a word."""
    await reader.read()


class Proxy:
    """Between a client and a server; every connection through it can be cut, after any number of bytes."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._pipes: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut_after: int | None = None
        self.url = ""

    def cut(self) -> None:
        """Cut every connection now."""
        for writer in self._writers:
            writer.transport.abort()

    def cut_after(self, to_client_bytes: int) -> None:
        """Cut a connection as soon as so many more bytes have gone to the client, in the middle of whatever it is."""
        self._cut_after = to_client_bytes

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        self.cut()
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        pair = {writer, server_writer}
        self._writers |= pair
        pipes = {
            asyncio.create_task(self._pipe(reader, server_writer, is_to_client=False)),
            asyncio.create_task(self._pipe(server_reader, writer, is_to_client=True)),
        }
        self._pipes |= pipes
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for each in pair:
            each.transport.abort()
        await asyncio.gather(*pipes, return_exceptions=True)
        self._pipes -= pipes
        self._writers -= pair

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_to_client: bool) -> None:
        try:
            while data := await reader.read(65536):
                if is_to_client and self._cut_after is not None:
                    data, left = data[: self._cut_after], self._cut_after - len(data)
                    self._cut_after = left if left > 0 else None
                    writer.write(data)
                    if left <= 0:
                        await writer.drain()
                        return
                else:
                    writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
