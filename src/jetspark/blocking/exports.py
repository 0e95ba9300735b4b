# Generated from aio/exports.py by tools/unasync.py; edit that file.
"""The public names of the driver."""

from jetspark.blocking.atomic import AtomicBatch
from jetspark.blocking.client import Client
from jetspark.blocking.connector import connect
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
