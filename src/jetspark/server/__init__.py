"""A real nats-server, one or a cluster, that starts and ends with the program."""

from jetspark.server.binary import NatsServerBinary, find_nats_server
from jetspark.server.cluster import NatsCluster
from jetspark.server.config import ClusterRoutes, Permissions, ServerConfig, ServerTLS, User
from jetspark.server.process import NatsServer

__all__ = [
    "ClusterRoutes",
    "NatsCluster",
    "NatsServer",
    "NatsServerBinary",
    "Permissions",
    "ServerConfig",
    "ServerTLS",
    "User",
    "find_nats_server",
]
