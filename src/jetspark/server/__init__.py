"""A real nats-server, one or a cluster, that starts and ends with the program."""

from .binary import NatsServerBinary, find_nats_server
from .cluster import NatsCluster
from .config import ClusterRoutes, Permissions, ServerConfig, ServerTLS, User
from .process import NatsServer

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
