"""The publishing and pulling side of nats-server 2.15: plain publishes, atomic batches, fast ingest. No I/O, no
clock."""

from jetspark.testing.model.fast import OpenFastBatch
from jetspark.testing.model.limits import BatchLimits
from jetspark.testing.model.replies import Delivery
from jetspark.testing.model.server import ModelServer
from jetspark.testing.model.store import ModelMessage

__all__ = ["BatchLimits", "Delivery", "ModelMessage", "ModelServer", "OpenFastBatch"]
