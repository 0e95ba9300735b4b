"""The public names of this layer; ``jetspark`` and ``jetspark.blocking`` both export them all."""

from jetspark.jetstream.acks import Metadata
from jetspark.jetstream.advisories import BatchAbandoned
from jetspark.jetstream.config import (
    ConsumerConfig,
    ConsumerLimits,
    External,
    Placement,
    Republish,
    StreamConfig,
    StreamSource,
    SubjectTransform,
)
from jetspark.jetstream.info import (
    AccountInfo,
    AccountLimits,
    AccountTier,
    ClusterInfo,
    ConsumerInfo,
    PubAck,
    SequencePair,
    StoredMessage,
    StreamInfo,
    StreamState,
)
from jetspark.jetstream.kv import KVConfig, KVEntry, KVStatus
from jetspark.jetstream.objects import ObjectInfo, ObjectLink, ObjectMeta, ObjectStoreConfig, ObjectStoreStatus
from jetspark.jetstream.publishing import Expect

__all__ = [
    "AccountInfo",
    "AccountLimits",
    "AccountTier",
    "BatchAbandoned",
    "ClusterInfo",
    "ConsumerConfig",
    "ConsumerInfo",
    "ConsumerLimits",
    "Expect",
    "External",
    "KVConfig",
    "KVEntry",
    "KVStatus",
    "Metadata",
    "ObjectInfo",
    "ObjectLink",
    "ObjectMeta",
    "ObjectStoreConfig",
    "ObjectStoreStatus",
    "Placement",
    "PubAck",
    "Republish",
    "SequencePair",
    "StoredMessage",
    "StreamConfig",
    "StreamInfo",
    "StreamSource",
    "StreamState",
    "SubjectTransform",
]
