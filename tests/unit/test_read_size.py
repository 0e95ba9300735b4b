"""How much is read at a time: by the messages of the chunks before, in both drivers."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest
from support.connections import connected

from jetspark.aio import transport as aio
from jetspark.blocking import transport as blocking
from jetspark.core.connection import Connection
from jetspark.core.read_size import LEAST_BYTES, MAX_CHUNK_MESSAGES, MOST_BYTES, ReadSize


def after(*chunks: tuple[int, int]) -> int:
    """What is read next when these came, as bytes and messages."""
    read_size = ReadSize()
    for size, messages in chunks:
        read_size.on_chunk(size, messages)
    return read_size.bytes


def test_as_much_as_there_is_until_there_are_many_messages() -> None:
    assert after() == after((MOST_BYTES, MAX_CHUNK_MESSAGES)) == after((100, 0)) == MOST_BYTES


def test_many_small_messages_are_read_in_smaller_chunks() -> None:
    assert after((MOST_BYTES, 2 * MAX_CHUNK_MESSAGES)) == MOST_BYTES // 2
    assert after((160 * 1000, 1000)) == 160 * MAX_CHUNK_MESSAGES
    assert after((1_000_000, 1_000_000)) == LEAST_BYTES


def test_larger_messages_are_read_in_larger_chunks_again() -> None:
    small = (MOST_BYTES, 4 * MAX_CHUNK_MESSAGES)
    assert after(small, (MOST_BYTES // 4, 1)) == MOST_BYTES // 2
    assert after(small, (MOST_BYTES // 4, 1), (MOST_BYTES // 2, 1), (MOST_BYTES, 1)) == MOST_BYTES


@pytest.mark.parametrize("chunk", [(MOST_BYTES // 4 - 1, 1), (MOST_BYTES // 4, MAX_CHUNK_MESSAGES // 2)])
def test_a_read_that_was_not_filled_or_had_many_messages_changes_nothing(chunk: tuple[int, int]) -> None:
    assert after((MOST_BYTES, 4 * MAX_CHUNK_MESSAGES), chunk) == MOST_BYTES // 4


# ---- the drivers -----------------------------------------------------------------------------------------------------

MESSAGES = 20_000
FRAMES = b"".join(b"MSG a 1 5\r\n%05d\r\n" % number for number in range(MESSAGES))


class Peer:
    """A socket that has everything there at once."""

    def __init__(self, data: bytes) -> None:
        self.unread, self.wanted = data, list[int]()

    def recv_into(self, buffer: memoryview) -> int:
        self.wanted.append(len(buffer))
        chunk, self.unread = self.unread[: len(buffer)], self.unread[len(buffer) :]
        buffer[: len(chunk)] = chunk
        return len(chunk)


class BlockingLink(blocking.Link):
    def __init__(self, connection: Connection, peer: Peer) -> None:
        self.connection, self._socket = connection, cast(socket.socket, peer)
        self._arrived, self._is_moving = memoryview(bytearray(MOST_BYTES)), False


class AioLink(aio.Link):
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.arrived = memoryview(bytearray(MOST_BYTES))
        self._session = aio._Session(self)

    def settle(self) -> None:
        pass

    def read(self, peer: Peer) -> None:
        session: Any = self._session
        session.buffer_updated(peer.recv_into(session.get_buffer(-1)))


@pytest.mark.parametrize("driver", ["asyncio", "blocking"])
def test_both_drivers_read_as_much_as_it_says_and_miss_nothing(driver: str) -> None:
    connection, peer = connected(), Peer(FRAMES)
    state = connection.subscribe("a")
    asyncio_link, blocking_link = AioLink(connection), BlockingLink(connection, peer)
    while peer.unread:
        if driver == "asyncio":
            asyncio_link.read(peer)
        else:
            blocking_link._read()
    first, *later = peer.wanted
    assert first == MOST_BYTES
    assert set(later) == {LEAST_BYTES}  # 600 of these messages have a few bytes less
    assert [each.data for each in state.pending] == [b"%05d" % number for number in range(MESSAGES)]
