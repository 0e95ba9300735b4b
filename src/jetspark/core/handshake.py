"""The beginning of a session, before the server has accepted us: INFO, TLS, login; and the meaning of -ERR texts.

Until then the peer is not authenticated. Bytes are read one frame at a time, because each frame may change which frames
may follow. Where TLS follows the greeting, any byte behind it would be plain text that counts as part of the secure
session; and where TLS is wanted, no login is sent without it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jetspark.core import frames
from jetspark.core.auth import Auth, connect_fields
from jetspark.core.options import ConnectOptions
from jetspark.core.parser import Control, HandshakeReader
from jetspark.core.reconnect import Server
from jetspark.core.version import VERSION
from jetspark.errors import PermissionDenied, ProtocolError

__all__ = ["Handshake", "ServerInfo", "is_about_credentials", "parse_permission_denied"]

# ---- INFO and -ERR ---------------------------------------------------------------------------------------------------


# The server's default, in force until INFO says otherwise.
DEFAULT_MAX_PAYLOAD_BYTES = 1 << 20

# The texts of nats-server for missing, wrong or expired credentials.
# "Authentication Timeout" is a busy server, not a wrong secret.
_AUTHENTICATION_TEXT = re.compile(r"(authorization|authentication)(?! timeout)", re.IGNORECASE)
_PERMISSION_TEXT = re.compile(
    r'permissions violation for (publish|subscription) to "((?:[^"\\]|\\.)*)"(?: using queue "((?:[^"\\]|\\.)*)")?',
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's INFO; ``fields`` has all of it."""

    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    name: str = ""
    version: str = ""
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    client_id: int = 0
    cluster: str = ""
    has_jetstream: bool = False
    requires_tls: bool = False
    is_lame_duck: bool = False
    nonce: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ServerInfo:
        return cls(
            fields=fields,
            name=str(fields.get("server_name", "")),
            version=str(fields.get("version", "")),
            max_payload_bytes=int(fields.get("max_payload", DEFAULT_MAX_PAYLOAD_BYTES)),
            client_id=int(fields.get("client_id", 0)),
            cluster=str(fields.get("cluster", "")),
            has_jetstream=bool(fields.get("jetstream")),
            requires_tls=bool(fields.get("tls_required")),
            is_lame_duck=bool(fields.get("ldm")),
            nonce=_text_or_none(fields.get("nonce")),
        )


def is_about_credentials(text: str) -> bool:
    """True if the server refuses our credentials, as opposed to something about the connection."""
    return _AUTHENTICATION_TEXT.search(text) is not None


def parse_permission_denied(text: str) -> tuple[PermissionDenied, str] | None:
    """The denied operation and subject, and the queue group in the text (empty without one)."""
    found = _PERMISSION_TEXT.search(text)
    if found is None:
        return None
    operation = "publish" if found[1].lower() == "publish" else "subscribe"
    return PermissionDenied(operation, _unquoted(found[2])), _unquoted(found[3] or "")


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)  # the server quotes as Go does


def _text_or_none(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"nonce of type {type(value).__name__}")


# ---- greeting, TLS, login --------------------------------------------------------------------------------------------


class Handshake:
    """One attempt to begin a session."""

    def __init__(self, *, wants_tls: bool = False, is_secure: bool = False) -> None:
        """``is_secure`` says that TLS comes first and the greeting over it."""
        self.greeting = ServerInfo()
        """The peer's INFO. The peer may be another server than the intended one."""
        self._wants_tls, self._is_secure = wants_tls, is_secure
        self._reader = HandshakeReader()

    @property
    def awaits_tls(self) -> bool:
        """True if the transport has to be upgraded to TLS before we log in."""
        return not self._is_secure and (self._wants_tls or self.greeting.requires_tls)

    @property
    def may_be_forged(self) -> bool:
        """True while an attacker could have written the received bytes: TLS is wanted and not on yet."""
        return self._wants_tls and not self._is_secure

    def secured(self) -> None:
        """TLS is on, and the server's certificate is good."""
        assert self.awaits_tls
        self._is_secure = True

    def login(self, server: Server, auth: Auth | None, options: ConnectOptions) -> bytes:
        """CONNECT and PING, the answer to the greeting.

        Raises:
            ProtocolError: TLS is not on yet, and secrets are not sent in plain text.
        """
        if self.awaits_tls:  # not an assertion: those can be turned off
            raise ProtocolError(f"{server}: no login before TLS is on")
        fields: dict[str, object] = {
            "verbose": False,  # an +OK for every publish would double what the server sends
            "pedantic": False,
            "lang": "python-jetspark",
            "version": VERSION,
            "protocol": 1,  # else a change of the cluster, or of the server's limits, is not announced
            "headers": True,
            "no_responders": True,  # a 503 at once instead of a time-out; the server wants headers for it
            "echo": options.echo,
            "tls_required": self.greeting.requires_tls,
        }
        if options.name:
            fields["name"] = options.name
        fields |= connect_fields(auth or server.auth, self.greeting.nonce)
        # The server does not answer an accepted CONNECT: only the PONG confirms it, and anything before it is a
        # refusal.
        return frames.connect(fields) + frames.PING

    # ---- bytes -------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        self._reader.receive_data(data)

    def next_frame(self) -> Control | None:
        """
        Raises:
            ProtocolError: The peer does not speak NATS.
        """
        return self._reader.next_frame()

    def early_plain_text(self) -> bytes:
        """Bytes received where TLS must begin; any such byte is an error."""
        return self._reader.take_rest() if self.awaits_tls and self._reader.has_more else b""

    def take_rest(self) -> bytes:
        """Bytes received behind the last frame."""
        return self._reader.take_rest()
