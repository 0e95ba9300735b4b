"""A peer that takes the server's place, and speaks before TLS what the client waits for.

It ends the client's TLS as the server would, so it reads everything, and passes it on twice: to the server, whose
answers it passes back, and to an accomplice, a server of the same kind with the same streams, whose answers it drops.
From :meth:`Impostor.hold` on, the server hears nothing more and the accomplice's answers are kept: acknowledgements,
API answers and deliveries, of the right shape for whatever was asked, and all of them lies. Then the impostor cuts the
connection and has no certificate any more. To whoever connects again it sends them in plain text, in four ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

from support.certificates import Certificates

__all__ = ["Impostor"]

TAKES_OVER_AFTER_S = 0.3
"""At the latest, after the client has said something to which the accomplice has no answer."""
NOTHING_SAID_S = 1.0
"""At the latest, when the client says nothing."""
ANSWERS_TAKE_S = 0.02
"""From the first answer to the last one that belongs to it."""

Speech = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Impostor:
    """``async with Impostor(...) as impostor``: connect to ``impostor.url``, with TLS."""

    def __init__(self, server_port: int, accomplice_port: int, certificates: Certificates) -> None:
        self._ports = (server_port, accomplice_port)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.server_cert, certificates.server_key)
        self._is_holding = self._is_forging = False
        self._wanted: int | None = None
        self._greeting: dict[str, object] = {}
        self._forged = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._visited = asyncio.Event()
        self.url = ""
        self.visits = 0
        """How often the client came back and was lied to."""
        self.heard = bytearray()
        """What the client said to somebody without a certificate."""

    @property
    def answers(self) -> int:
        """How many messages it has to offer."""
        return self._forged.count(b"MSG ")

    def hold(self, answers: int | None = None) -> None:
        """The server hears nothing more; the accomplice answers instead.

        Args:
            answers: Take over when there are this many, however long a busy machine needs for them; None for the first
                one, or when it seems that none will come.
        """
        self._is_holding, self._wanted = True, answers
        if answers is None:
            self._take_over_in(NOTHING_SAID_S)

    async def until_all_was_tried(self) -> None:
        """Wait until the client has heard each of the lies in each of the ways."""
        async with asyncio.timeout(90):
            while self.visits < len(self._ways()):
                self._visited.clear()
                await self._visited.wait()

    def give_back(self) -> None:
        """The server is there again, for whoever connects next."""
        self._is_holding = self._is_forging = False
        self._forged.clear()
        self._cut()

    def _take_over_in(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._take_over)

    def _take_over(self) -> None:
        if self._is_holding and not self._is_forging:
            self._is_forging = True
            self._cut()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> Impostor:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"tls://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, ssl.SSLError, asyncio.CancelledError):
                await (self._forge(reader, writer) if self._is_forging else self._mediate(reader, writer))
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    # ---- with a certificate ------------------------------------------------------------------------------------------

    async def _mediate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _dialled(self._ports[0]) as server, _dialled(self._ports[1]) as accomplice:
            self._greeting = json.loads((await server[0].readline()).removeprefix(b"INFO "))
            await accomplice[0].readline()
            transport = cast(asyncio.Transport, writer.transport)  # uvloop's is not an instance of it
            transport.pause_reading()  # what answers the greeting is for TLS to read
            writer.write(_info(self._greeting, tls_required=True))
            await writer.start_tls(self._context)
            pipes = [
                asyncio.ensure_future(self._pass_on(reader, server[1], accomplice[1])),
                asyncio.ensure_future(self._pass_back(server[0], writer)),
                asyncio.ensure_future(self._keep(accomplice[0])),
            ]
            try:
                await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pipe in pipes:
                    pipe.cancel()
                await asyncio.gather(*pipes, return_exceptions=True)

    async def _pass_on(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter, accomplice: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            accomplice.write(data)
            if not self._is_holding:
                server.write(data)
                await server.drain()
            elif self._wanted is None:
                self._take_over_in(TAKES_OVER_AFTER_S)
            await accomplice.drain()

    async def _pass_back(self, server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await server.read(65536):
            if not self._is_holding:
                writer.write(data)
                await writer.drain()

    async def _keep(self, accomplice: asyncio.StreamReader) -> None:
        while data := await accomplice.read(65536):
            if self._is_holding:
                had, wanted = self.answers, self._wanted or 1
                self._forged += data
                if had < wanted <= self.answers or (self._wanted is None and not had):
                    self._take_over_in(ANSWERS_TAKE_S)

    # ---- without -----------------------------------------------------------------------------------------------------

    async def _forge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ways = self._ways()
        await ways[self.visits % len(ways)](writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.heard += data
        self.visits += 1
        self._visited.set()

    def _ways(self) -> list[Speech]:
        info = _info(self._greeting, tls_required=True, max_payload=1, connect_urls=["127.0.0.1:1"])
        plain_info = _info(self._greeting, tls_required=False)
        forged = bytes(self._forged) or b"PONG\r\n"

        async def with_the_greeting(writer: asyncio.StreamWriter) -> None:
            writer.write(info + forged)

        async def after_the_greeting(writer: asyncio.StreamWriter) -> None:
            writer.write(info)
            await writer.drain()
            await asyncio.sleep(0.005)
            writer.write(forged)

        async def before_the_greeting(writer: asyncio.StreamWriter) -> None:
            writer.write(forged + info)

        async def without_offering_tls(writer: asyncio.StreamWriter) -> None:
            writer.write(plain_info + b"PONG\r\n" + forged)

        return [with_the_greeting, after_the_greeting, before_the_greeting, without_offering_tls]


def _info(fields: dict[str, object], **changes: object) -> bytes:
    return b"INFO " + json.dumps(fields | changes).encode() + b"\r\n"


@contextlib.asynccontextmanager
async def _dialled(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
