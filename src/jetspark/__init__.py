"""JetSpark: event streams in, Spark through, state out.

This is the asyncio face. ``import jetspark.blocking as jetspark`` gives the same names without ``await``.
"""

from jetspark.aio import Client, Message, Subscription, connect
from jetspark.core.auth import Auth, Credentials, NKey, Token, UserPassword
from jetspark.core.events import (
    Closed,
    Connected,
    ConnectionEvent,
    Disconnected,
    ErrorReported,
    LameDuck,
    Reconnected,
    ServersDiscovered,
    SlowConsumer,
)
from jetspark.core.headers import Headers, Status
from jetspark.core.info import ServerInfo
from jetspark.core.options import ConnectOptions, TLSConfig
from jetspark.core.version import VERSION
from jetspark.errors import (
    AuthenticationFailed,
    BufferFull,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    EmbeddedServerError,
    InvalidHeader,
    InvalidSubject,
    JetSparkError,
    MissingExtra,
    NoResponders,
    NoServersAvailable,
    PayloadTooLarge,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    ServerRefused,
    UsageError,
)

__all__ = [
    "Auth",
    "AuthenticationFailed",
    "BufferFull",
    "Client",
    "Closed",
    "ConfigError",
    "ConnectOptions",
    "Connected",
    "ConnectionClosed",
    "ConnectionEvent",
    "ConnectionLost",
    "Credentials",
    "Disconnected",
    "EmbeddedServerError",
    "ErrorReported",
    "Headers",
    "InvalidHeader",
    "InvalidSubject",
    "JetSparkError",
    "LameDuck",
    "Message",
    "MissingExtra",
    "NKey",
    "NoResponders",
    "NoServersAvailable",
    "PayloadTooLarge",
    "PermissionDenied",
    "ProtocolError",
    "Reconnected",
    "RequestTimeout",
    "ServerInfo",
    "ServerRefused",
    "ServersDiscovered",
    "SlowConsumer",
    "Status",
    "Subscription",
    "TLSConfig",
    "Token",
    "UsageError",
    "UserPassword",
    "connect",
]

__version__ = VERSION
