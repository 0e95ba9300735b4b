"""The blocking driver: the names of :mod:`jetspark`, without ``await``.

``import jetspark.blocking as jetspark``. Safe to use from several threads. Each connection has one thread of its own
for reading, pings and reconnects. A connection belongs to the process that made it: make it after a fork.
"""

from jetspark import errors as _errors
from jetspark.blocking.atomic import AtomicBatch
from jetspark.blocking.client import Client
from jetspark.blocking.connecting import connect
from jetspark.blocking.consumer import Consumer
from jetspark.blocking.fast import FastBatch, FastPublisher
from jetspark.blocking.jetstream import JetStream
from jetspark.blocking.kv import KeyValue
from jetspark.blocking.message import Message
from jetspark.blocking.objects import ObjectStore
from jetspark.blocking.ordered import OrderedConsumer
from jetspark.blocking.stream import Stream
from jetspark.blocking.stream_message import JetStreamMessage
from jetspark.blocking.subscription import Subscription
from jetspark.core import exports as _core
from jetspark.core.exports import *
from jetspark.errors import *
from jetspark.jetstream import exports as _jetstream
from jetspark.jetstream.exports import *
from jetspark.publish import exports as _publish
from jetspark.publish.exports import *

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
__all__ += _errors.__all__
__all__ += _jetstream.__all__
__all__ += _publish.__all__
