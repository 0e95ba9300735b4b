"""JetSpark: event streams in, Spark through, state out.

This is the asyncio face. ``import jetspark.blocking as jetspark`` gives the same names without ``await``.
"""

from jetspark.aio import (
    AtomicBatch,
    Client,
    Consumer,
    FastBatch,
    FastPublisher,
    JetStream,
    JetStreamMessage,
    KeyValue,
    Message,
    ObjectStore,
    OrderedConsumer,
    Stream,
    Subscription,
    connect,
)
from jetspark.core import public as _core
from jetspark.core.public import *
from jetspark.core.version import VERSION
from jetspark.jetstream import public as _jetstream
from jetspark.jetstream.public import *
from jetspark.publish import public as _publish
from jetspark.publish.public import *

__all__ = [
    "AtomicBatch",
    "Client",
    "Consumer",
    "FastBatch",
    "FastPublisher",
    "JetStream",
    "JetStreamMessage",
    "KeyValue",
    "Message",
    "ObjectStore",
    "OrderedConsumer",
    "Stream",
    "Subscription",
    "connect",
]
__all__ += _core.__all__
__all__ += _jetstream.__all__
__all__ += _publish.__all__

__version__ = VERSION
