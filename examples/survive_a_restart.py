"""Kill the server under a running program and watch the program carry on.

Messages published during the outage wait in a bounded buffer and arrive, in order, when the server is back.
"""

import asyncio

import jetspark
from jetspark.server import NatsServer


def on_event(event: jetspark.ConnectionEvent) -> None:
    print("  event:", event)


async def main() -> None:
    async with NatsServer() as server, jetspark.connect(server.url, on_event=on_event) as nc:
        orders = await nc.subscribe("orders")
        await nc.flush()

        print("killing the server")
        await asyncio.to_thread(server.kill)
        for number in range(5):
            await nc.publish("orders", b"order %d" % number)

        print("starting it again, on the same port")
        await asyncio.to_thread(server.start)
        for _ in range(5):
            print("  received:", (await orders.next(timeout=10)).data.decode())


asyncio.run(main())
