"""A proxy that loses exactly what a test wants lost: a message, a commit, or its answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from support.peers import Proxy

__all__ = ["LossyProxy", "ThreadedProxy", "lossy_proxy"]


class LossyProxy(Proxy):
    """From a published message on that contains certain bytes, one direction is lost, until the connection is cut."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._trigger: bytes | None = None
        self._lost: Literal["to_server", "to_client", "one"] = "to_server"
        self._is_losing = False
        self._never: bytes | None = None
        self.has_lost = threading.Event()
        """Something was lost since the test has asked for it."""

    def lose_from(self, trigger: bytes, direction: Literal["to_server", "to_client"]) -> None:
        """``to_server`` loses the message and all after it, ``to_client`` all that the server answers to it."""
        self.has_lost.clear()
        self._trigger, self._lost, self._is_losing = trigger, direction, False

    def lose_one(self, trigger: bytes) -> None:
        """The message does not reach the server; all others do."""
        self.has_lost.clear()
        self._trigger, self._lost, self._is_losing = trigger, "one", False

    def lose_each(self, content: bytes) -> None:
        """No message with this in it reaches the server; all others do."""
        self._never = content

    def cut(self) -> None:
        self._trigger, self._is_losing = None, False
        super().cut()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_to_client: bool) -> None:
        unsent = bytearray()
        try:
            while data := await reader.read(65536):
                if not is_to_client:
                    unsent += data
                    data = b"".join(each for each in _whole_messages(unsent) if self._is_passed_on(each))
                elif self._is_losing and self._lost == "to_client":
                    continue
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass

    def _is_passed_on(self, message: bytes) -> bool:
        """Whether the server gets a client's message; its content may start a loss."""
        if self._never is not None and self._never in message:
            return False
        if self._is_losing:
            return self._lost == "to_client"
        if self._trigger is None or self._trigger not in message:
            return True
        self._trigger, self._is_losing = None, self._lost != "one"
        self.has_lost.set()
        return self._lost == "to_client"


def _whole_messages(unsent: bytearray) -> Iterator[bytes]:
    """Take the complete messages of a client from the bytes it has sent."""
    while (end := unsent.find(b"\r\n")) >= 0:
        size = end + 2
        if unsent.startswith((b"PUB ", b"HPUB ")):
            size += int(unsent[:end].rsplit(b" ", 1)[1]) + 2
        if len(unsent) < size:
            return
        yield bytes(unsent[:size])
        del unsent[:size]


class ThreadedProxy:
    """A :class:`LossyProxy` for a test without an event loop: it runs in a thread of its own."""

    def __init__(self, proxy: LossyProxy, loop: asyncio.AbstractEventLoop) -> None:
        self._proxy, self._loop = proxy, loop
        self.url = proxy.url
        self.lose_from, self.lose_one, self.has_lost = proxy.lose_from, proxy.lose_one, proxy.has_lost

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.cut)


@contextmanager
def lossy_proxy(target_port: int) -> Iterator[ThreadedProxy]:
    """A proxy in a thread, which ends with the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="lossy proxy")
    thread.start()
    try:
        proxy = LossyProxy(target_port)
        asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result()
        try:
            yield ThreadedProxy(proxy, loop)
        finally:
            asyncio.run_coroutine_threadsafe(proxy.__aexit__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
