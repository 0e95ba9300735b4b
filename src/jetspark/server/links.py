"""Connections between the nodes of a cluster that can be cut, without privileges and without the nodes' help.

Every ordered pair of nodes has a link: a local listener that one node is told to reach the other by. A link
is *up* (connections are forwarded) or *cut* (existing ones were closed, new ones are closed on arrival). One
thread with an event loop of its own forwards for all links, so cutting is one call and takes effect before it
returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from typing import TypeVar

__all__ = ["Links"]

_T = TypeVar("_T")

CHUNK_BYTES = 256 * 1024
CALL_TIMEOUT_S = 10.0

Pair = tuple[int, int]


class Links:
    """The links among nodes that listen on ``ports``. Addresses stay the same from ``open()`` to ``close()``."""

    def __init__(self, ports: list[int]) -> None:
        nodes = range(len(ports))
        self._pairs = [(here, there) for here in nodes for there in nodes if here != there]
        self._ports = ports
        self._cut: set[Pair] = set()
        self._listeners: dict[Pair, asyncio.Server] = {}
        self._addresses: dict[Pair, str] = {}
        self._open: dict[Pair, set[asyncio.StreamWriter]] = {pair: set() for pair in self._pairs}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jetspark-links", daemon=True)
        # Bound but never listening: connections to it are refused, and no other program can take the port.
        self._nowhere = socket.socket()

    @property
    def nowhere(self) -> str:
        """An address where every connection is refused, from ``open()`` to ``close()``."""
        return f"127.0.0.1:{self._nowhere.getsockname()[1]}"

    def open(self) -> None:
        self._nowhere.bind(("127.0.0.1", 0))
        self._thread.start()
        self._call(self._listen())

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._nowhere.close()

    def address(self, here: int, there: int) -> str:
        """``host:port`` by which node ``here`` reaches node ``there``."""
        return self._addresses[here, there]

    def cut(self, node: int) -> None:
        """Close every connection between ``node`` and the others, in both directions, and let none be made."""
        self._call(self._cut_pairs([pair for pair in self._pairs if node in pair]))

    def heal(self, node: int, among: set[int]) -> None:
        """Let ``node`` and the nodes in ``among`` reach each other again."""
        healed = {pair for pair in self._pairs if node in pair and set(pair) <= among | {node}}
        self._cut -= healed

    def _call(self, work: Coroutine[None, None, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    async def _listen(self) -> None:
        for pair in self._pairs:
            self._listeners[pair] = await asyncio.start_server(
                lambda reader, writer, pair=pair: self._serve(pair, reader, writer),  # type: ignore[misc]
                "127.0.0.1",
                0,
            )
            self._addresses[pair] = f"127.0.0.1:{self._listeners[pair].sockets[0].getsockname()[1]}"

    async def _shut(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        await self._cut_pairs(self._pairs)
        # Handlers end by themselves once their connections are closed.
        handlers = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if handlers:
            await asyncio.wait(handlers, timeout=CALL_TIMEOUT_S / 2)

    async def _cut_pairs(self, pairs: list[Pair]) -> None:
        for pair in pairs:
            self._cut.add(pair)
            for writer in self._open[pair]:
                # Not close(): that would first deliver buffered bytes, through a cable that was just pulled.
                writer.transport.abort()

    async def _serve(self, pair: Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward: asyncio.StreamWriter | None = None
        try:
            if pair in self._cut:
                return
            back, onward = await asyncio.open_connection("127.0.0.1", self._ports[pair[1]])
            if pair in self._cut:  # Cut while connecting.
                return
            self._open[pair] |= {writer, onward}
            await asyncio.gather(_pump(reader, onward), _pump(back, writer))
        except OSError:
            pass  # The node is down, or the link was cut: closing is the complete answer.
        finally:
            for each in (writer, onward):
                if each is not None:
                    self._open[pair].discard(each)
                    each.transport.abort()
                    with contextlib.suppress(OSError):
                        await each.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    finally:
        # One side's end ends both: a half closed route is useless.
        writer.close()
