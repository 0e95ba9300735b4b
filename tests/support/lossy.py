"""A proxy that loses exactly what a test wants lost: a commit, or its answer."""

from __future__ import annotations

import asyncio
from typing import Literal

from support.peers import Proxy

__all__ = ["LossyProxy"]


class LossyProxy(Proxy):
    """From a published message on that contains certain bytes, one direction is lost, until the connection is cut."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._trigger: bytes | None = None
        self._lost: Literal["to_server", "to_client"] = "to_server"
        self._is_losing = False

    def lose_from(self, trigger: bytes, direction: Literal["to_server", "to_client"]) -> None:
        """``to_server`` loses the message and all after it, ``to_client`` all that the server answers to it."""
        self._trigger, self._lost, self._is_losing = trigger, direction, False

    def cut(self) -> None:
        self._trigger, self._is_losing = None, False
        super().cut()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_to_client: bool) -> None:
        try:
            while data := await reader.read(65536):
                if self._is_losing and is_to_client == (self._lost == "to_client"):
                    continue
                found = -1 if is_to_client or self._trigger is None else data.find(self._trigger)
                if found >= 0:
                    self._trigger, self._is_losing = None, True
                    if self._lost == "to_server":
                        data = data[: data.rindex(b"HPUB ", 0, found)]
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
