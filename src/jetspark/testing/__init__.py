"""What programs that use JetSpark are tested with. So far: a model of nats-server's publishing, in memory."""

from jetspark.testing.model import BatchLimits, Delivery, ModelServer, OpenFastBatch, StoredMessage

__all__ = ["BatchLimits", "Delivery", "ModelServer", "OpenFastBatch", "StoredMessage"]
