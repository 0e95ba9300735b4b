"""Another program: it fills the stock, places an order and pays for it. ``python -m fulfilment.place o-1 tea 2``."""

import asyncio
import os
import sys

from fulfilment.events import OrderPaid
from fulfilment.shop import AddStock, PlaceOrder, app


async def main(order_id: str, article: str, count: int) -> None:
    async with app.connect(os.environ.get("JETSPARK_SERVERS", "nats://127.0.0.1:4222")) as shop:
        # With an id of their own, a second run of this program adds nothing, and places nothing.
        await shop.call(AddStock(article=article, count=10), command_id=f"fill for {order_id}", timeout=10.0)
        command = PlaceOrder(order_id=order_id, article=article, count=count)
        await shop.call(command, command_id=f"place {order_id}", timeout=10.0)
        await shop.publish(OrderPaid(order_id=order_id), id=f"paid {order_id}")
        run = await shop.workflow("fulfilment").wait_for_end(order_id, timeout=60)
        print(run.status, run.reason or run.state.step)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
