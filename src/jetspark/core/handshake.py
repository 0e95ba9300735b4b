"""The beginning of a session, before the server has accepted us: greeting, TLS, login.

Until then the peer is not authenticated. Bytes are read one frame at a time, because each frame may change which frames
may follow. Where TLS follows the greeting, any byte behind it would be plain text that counts as part of the secure
session; and where TLS is wanted, no login is sent without it.
"""

from __future__ import annotations

from jetspark.core import frames
from jetspark.core.auth import Auth, connect_fields
from jetspark.core.info import ServerInfo
from jetspark.core.options import ConnectOptions
from jetspark.core.parser import Control, HandshakeReader
from jetspark.core.reconnect import Server
from jetspark.core.version import VERSION
from jetspark.errors import ProtocolError

__all__ = ["Handshake"]


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
