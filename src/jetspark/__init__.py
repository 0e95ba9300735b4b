"""JetSpark: event streams in, Spark through, state out.

This is the asyncio face. ``import jetspark.blocking as jetspark`` gives the same names without ``await``.
"""

from jetspark.aio import Client, Message, Subscription, connect
from jetspark.core import public
from jetspark.core.public import *
from jetspark.core.version import VERSION

__all__ = ["Client", "Message", "Subscription", "connect"]
__all__ += public.__all__

__version__ = VERSION
