"""When a request of the asyncio driver is written: alone at once; of many in one step of the loop, most together."""

from __future__ import annotations

import asyncio

from jetspark.aio.transport import Transport


class Gathering(Transport):
    """A transport without a connection, which writes down how many requests each write has."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.flush_is_scheduled = False
        self.buffered = 0
        self.writes: list[int] = []

    def flush(self) -> None:
        self.flush_is_scheduled = False
        if self.buffered:
            self.writes.append(self.buffered)
            self.buffered = 0

    async def request(self) -> None:
        self.buffered += 1
        self.flush_promptly()


async def test_one_request_after_the_other_is_written_at_once() -> None:
    transport = Gathering()
    for number in range(1, 4):
        await transport.request()
        assert transport.writes == [1] * number
        await asyncio.sleep(0)


async def test_of_many_requests_in_one_step_all_but_the_first_share_a_write() -> None:
    transport = Gathering()
    for _ in range(3):
        await asyncio.gather(*(transport.request() for _ in range(50)))
        await asyncio.sleep(0)
    assert transport.writes == [1, 49] * 3


async def test_a_request_waits_for_nothing_but_the_end_of_the_step() -> None:
    transport = Gathering()
    await transport.request()
    await transport.request()
    assert transport.writes == [1]
    await asyncio.sleep(0)
    assert transport.writes == [1, 1]
