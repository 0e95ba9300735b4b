"""Test kit for programs that use JetSpark: a real nats-server that tests share, a model of its publishing in memory,
and a network with faults around it, in virtual time. The pytest fixtures are in :mod:`pytest_jetspark`."""

from jetspark.testing.clock import FakeClock
from jetspark.testing.model import BatchLimits, Delivery, ModelMessage, ModelServer, OpenFastBatch
from jetspark.testing.network import Front, Network, VirtualClock, Wire
from jetspark.testing.servers import SharedNatsServer
from jetspark.testing.simulation import Fault, FaultPlan, Faults, SimulatedTransport
from jetspark.testing.virtual_loop import VirtualLoop, VirtualProcess, model_network, run_in_virtual_time

__all__ = [
    "BatchLimits",
    "Delivery",
    "FakeClock",
    "Fault",
    "FaultPlan",
    "Faults",
    "Front",
    "ModelMessage",
    "ModelServer",
    "Network",
    "OpenFastBatch",
    "SharedNatsServer",
    "SimulatedTransport",
    "VirtualClock",
    "VirtualLoop",
    "VirtualProcess",
    "Wire",
    "model_network",
    "run_in_virtual_time",
]
