"""What programs that use JetSpark are tested with: a model of nats-server's publishing, in memory, and a network with
faults around it, in virtual time."""

from jetspark.testing.clock import FakeClock
from jetspark.testing.model import BatchLimits, Delivery, ModelServer, OpenFastBatch, StoredMessage
from jetspark.testing.network import Clock, Front, Network, Wire
from jetspark.testing.simulation import Fault, FaultPlan, Faults, Link

__all__ = [
    "BatchLimits",
    "Clock",
    "Delivery",
    "FakeClock",
    "Fault",
    "FaultPlan",
    "Faults",
    "Front",
    "Link",
    "ModelServer",
    "Network",
    "OpenFastBatch",
    "StoredMessage",
    "Wire",
]
