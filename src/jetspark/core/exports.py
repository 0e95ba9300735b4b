"""The public names that do not depend on the driver: ``jetspark`` and ``jetspark.blocking`` both export them all.

They export every error of ``jetspark.errors``, too.
"""

from jetspark.core.auth import Auth, Credentials, NKey, Token, UserPassword
from jetspark.core.events import (
    Closed,
    Connected,
    ConnectionEvent,
    Disconnected,
    ErrorReported,
    LameDuck,
    Reconnected,
    ReconnectFailed,
    ServersDiscovered,
    SlowConsumer,
)
from jetspark.core.handshake import ServerInfo
from jetspark.core.headers import Headers, Status
from jetspark.core.options import ConnectOptions, TLSConfig

__all__ = [
    "Auth",
    "Closed",
    "ConnectOptions",
    "Connected",
    "ConnectionEvent",
    "Credentials",
    "Disconnected",
    "ErrorReported",
    "Headers",
    "LameDuck",
    "NKey",
    "ReconnectFailed",
    "Reconnected",
    "ServerInfo",
    "ServersDiscovered",
    "SlowConsumer",
    "Status",
    "TLSConfig",
    "Token",
    "UserPassword",
]
