"""Connection options: every choice of the caller, validated once, passed whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from jetspark.core.arguments import flag, function, instance, path, text, unfit
from jetspark.core.auth import Credentials, NKey, Token, UserPassword
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.errors import ConfigError

__all__ = ["ConnectKeywords", "ConnectOptions", "TLSConfig", "check_connect", "check_keywords"]

# Option names of other clients, and their equivalents here.
_BY_OTHER_NAMES = {
    "user": "auth=UserPassword(user, password)",
    "password": "auth=UserPassword(user, password)",
    "token": "auth=Token(token)",
    "nkey": "auth=NKey(seed)",
    "nkeys_seed": "auth=NKey(seed)",
    "credentials": "auth=Credentials(path)",
    "user_credentials": "auth=Credentials(path)",
    "ssl": "tls=TLSConfig(...)",
    "tls_ca": "tls=TLSConfig(ca_file=...)",
    "url": "servers",
    "urls": "servers",
    "timeout": "connect_timeout_s or request_timeout_s",
}


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r}: expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """How to speak TLS. The defaults verify the server against the system's authorities."""

    ca_file: str | Path | None = None
    """PEM file of the authorities to trust instead of the system's."""
    cert_file: str | Path | None = None
    """PEM file of our own certificate, where the server asks for one."""
    key_file: str | Path | None = None
    key_password: str | Callable[[], str] | None = field(default=None, repr=False)
    hostname: str | None = None
    """Name to find in the server's certificate, when it is not the host we dial."""
    handshake_first: bool = False
    """Speak TLS from the first byte, as a server with ``handshake_first`` wants, instead of after INFO."""
    context: Any = field(default=None, repr=False)
    """An ``ssl.SSLContext`` of your own; excludes the file options."""

    def __post_init__(self) -> None:
        for name in ("ca_file", "cert_file", "key_file"):
            if (value := getattr(self, name)) is not None:
                path(name, value)
        if self.key_password is not None and not isinstance(self.key_password, str) and not callable(self.key_password):
            raise ConfigError(
                f"key_password of type {type(self.key_password).__name__}: expected a str, or a function that gives one"
            )
        if self.hostname is not None:
            text("hostname", self.hostname)
        flag("handshake_first", self.handshake_first)
        if self.context is not None and not hasattr(self.context, "wrap_bio"):  # only an ssl context has it
            raise unfit("context", self.context, "an ssl.SSLContext")
        files = (self.ca_file, self.cert_file, self.key_file)
        _require(
            self.context is None or not any(files),
            "context",
            "<SSLContext>",
            "no ca_file, cert_file or key_file beside it: load them into the context",
        )
        _require(self.key_file is None or self.cert_file is not None, "key_file", self.key_file, "cert_file too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectOptions:
    """Everything about a connection that has a sensible default. Both drivers take the same options."""

    name: str = ""
    """Shown in the server's monitoring."""
    connect_timeout_s: float = 5.0
    """Longest wait for each step of a connection attempt: dialling, INFO, TLS, login."""
    request_timeout_s: float = 5.0
    """For ``request`` and ``flush`` when the call names no timeout."""
    drain_timeout_s: float = 30.0
    """Longest wait for readers to finish in ``drain`` and for the server's confirmation in ``close``."""

    reconnect: bool = True
    max_reconnect_attempts: int | None = None
    """Attempts at each server before it is given up; None is without limit."""
    reconnect_wait_s: float = 0.1
    """The first pause between rounds through all servers; doubles each round and is jittered."""
    reconnect_wait_max_s: float = 5.0

    ping_interval_s: float = 30.0
    max_outstanding_pings: int = 2
    """The connection is given up when this many pings are unanswered."""

    send_buffer_bytes: int = 8 << 20
    """Bound on bytes published and not yet handed to the network, connected or not."""
    when_full: Literal["wait", "raise"] = "wait"
    """``"wait"``: ``publish`` waits for room in a full buffer. ``"raise"``: it raises ``BufferFull``."""

    max_pending_messages: int = 65_536
    max_pending_bytes: int = 64 << 20
    """Bounds of each subscription's unread messages, unless ``subscribe`` sets its own."""

    inbox_prefix: str = "_INBOX"
    """First token(s) of reply subjects, for accounts that may only subscribe below their own."""
    echo: bool = True
    """True if our own publishes reach our own subscriptions."""
    ignore_discovered_servers: bool = False
    """Dial only the servers named to ``connect``, not those the cluster announces."""
    jetstream_domain: str | None = None
    """The domain of ``jetstream()`` where the call names neither a domain nor a prefix; None is the server's own."""

    def __post_init__(self) -> None:
        for name in ("name", "inbox_prefix"):
            text(name, getattr(self, name))
        for name in ("reconnect", "echo", "ignore_discovered_servers"):
            flag(name, getattr(self, name))
        for name in (
            "connect_timeout_s",
            "request_timeout_s",
            "drain_timeout_s",
            "reconnect_wait_s",
            "reconnect_wait_max_s",
            "ping_interval_s",
        ):
            seconds_above_0(name, getattr(self, name))
        for name in (
            "max_outstanding_pings",
            "send_buffer_bytes",
            "max_pending_messages",
            "max_pending_bytes",
        ):
            whole(name, getattr(self, name))
        if self.jetstream_domain is not None:
            text("jetstream_domain", self.jetstream_domain)
        if self.max_reconnect_attempts is not None:
            whole("max_reconnect_attempts", self.max_reconnect_attempts, instead="or None")
        _require(self.when_full in ("wait", "raise"), "when_full", self.when_full, "'wait' or 'raise'")

    @classmethod
    def of(cls, options: ConnectOptions | None, overrides: ConnectKeywords) -> ConnectOptions:
        """``options`` with ``overrides`` on top; an unknown name is an error that lists the known ones."""
        check_keywords(
            cls,
            "connect",
            overrides,
            others=("auth", "on_event", "options", "servers", "tls"),
            known_as=_BY_OTHER_NAMES,
        )
        base: dict[str, Any] = {}
        if options is not None:
            instance("options", options, cls)
            base = {entry.name: getattr(options, entry.name) for entry in fields(cls)}
        return cls(**base | dict(overrides))


def check_connect(auth: object, tls: object, on_event: object) -> None:
    """Check the arguments of ``connect`` other than its servers and its options.

    Raises:
        ConfigError: One of them is of a wrong type. The message does not show ``auth``, which may be a secret.
    """
    if auth is not None and not isinstance(auth, UserPassword | Token | NKey | Credentials) and not callable(auth):
        raise ConfigError(
            f"auth of type {type(auth).__name__}: expected UserPassword, Token, NKey or Credentials, or a function "
            "that returns one"
        )
    if tls is not None:
        instance("tls", tls, TLSConfig, "a TLSConfig; TLSConfig() verifies the server by the system's authorities")
    if on_event is not None:
        function("on_event", on_event, "a function that takes an event")


def check_keywords(
    options: type[Any],
    what: str,
    given: Mapping[str, object],
    *,
    others: Iterable[str] = (),
    known_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse unknown keywords at run time, for programs that no type checker sees.

    Args:
        others: Keywords of the call besides the fields of ``options``.
        known_as: By another client's name of an option: the name here.

    Raises:
        ConfigError: ``options``, a dataclass, has no field of that name; the message lists the known ones.
    """
    known = {*(entry.name for entry in fields(options)), *others}
    if unknown := sorted(given.keys() - known):
        meant = dict.fromkeys(known_as[name] for name in unknown if name in known_as)
        hint = f"{' and '.join(meant)}; all there are: " if meant else "one of "
        raise ConfigError(f"unknown {what} option {', '.join(unknown)}: expected {hint}{', '.join(sorted(known))}")


class ConnectKeywords(TypedDict, total=False):
    """The fields of :class:`ConnectOptions` as keywords of ``connect``, for type checkers."""

    name: str
    connect_timeout_s: float
    request_timeout_s: float
    drain_timeout_s: float
    reconnect: bool
    max_reconnect_attempts: int | None
    reconnect_wait_s: float
    reconnect_wait_max_s: float
    ping_interval_s: float
    max_outstanding_pings: int
    send_buffer_bytes: int
    when_full: Literal["wait", "raise"]
    max_pending_messages: int
    max_pending_bytes: int
    inbox_prefix: str
    echo: bool
    ignore_discovered_servers: bool
    jetstream_domain: str | None
