"""The asyncio driver."""

from jetspark.aio import exports as _driver
from jetspark.aio.exports import *

__all__ = [*_driver.__all__]
