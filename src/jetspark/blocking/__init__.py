"""The blocking driver: the names of :mod:`jetspark`, without ``await``.

``import jetspark.blocking as jetspark``. Safe to use from several threads. Each connection has one thread of its own
for reading, pings and reconnects. A connection belongs to the process that made it: make it after a fork.
"""

from jetspark.blocking.client import Client, connect
from jetspark.blocking.message import Message
from jetspark.blocking.subscription import Subscription
from jetspark.core import public
from jetspark.core.public import *

__all__ = ["Client", "Message", "Subscription", "connect"]
__all__ += public.__all__
