"""The public names of the driver."""

from jetspark.aio.atomic import AtomicBatch
from jetspark.aio.client import Client
from jetspark.aio.connector import connect
from jetspark.aio.consumer import Consumer
from jetspark.aio.fast import FastBatch, FastPublisher
from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.aio.message import Message
from jetspark.aio.objects import ObjectStore
from jetspark.aio.ordered import OrderedConsumer
from jetspark.aio.stream import Stream
from jetspark.aio.stream_message import JetStreamMessage
from jetspark.aio.subscription import Subscription

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
