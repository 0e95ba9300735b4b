"""The asyncio driver."""

from jetspark.aio.client import Client, connect
from jetspark.aio.message import Message
from jetspark.aio.subscription import Subscription

__all__ = ["Client", "Message", "Subscription", "connect"]
