"""The configuration of an embedded nats-server, and its text for the configuration file.

Values are rendered, never pasted: every string is quoted with the only escapes the server's parser knows
(``\\t \\n \\r \\" \\\\ \\xXX``), so a password may hold any character without changing the meaning of the
file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, TypedDict

from jetspark.core.arguments import explained, flag, instance, path, text, texts, unfit
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.errors import ConfigError

__all__ = [
    "ClusterRoutes",
    "Permissions",
    "ServerConfig",
    "ServerOptions",
    "ServerTLS",
    "User",
    "render_config",
    "with_options",
]

MAX_PORT = 65535


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Which subjects a user may use. ``None`` allows everything, an empty list nothing."""

    publish_allow: Sequence[str] | None = None
    publish_deny: Sequence[str] = ()
    subscribe_allow: Sequence[str] | None = None
    subscribe_deny: Sequence[str] = ()
    allow_responses: bool = False
    """May answer a request on its reply subject even where ``publish_allow`` does not cover it."""

    def __post_init__(self) -> None:
        for name in ("publish_allow", "publish_deny", "subscribe_allow", "subscribe_deny"):
            if (subjects := getattr(self, name)) is not None or name.endswith("_deny"):
                texts(name, subjects, "a list of subjects")
        flag("allow_responses", self.allow_responses)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Credentials of a user: ``user`` and ``password``, or ``nkey`` (the public key, ``U...``).

    A password that starts with ``$2a$`` is taken by the server for the bcrypt hash of the real one.
    """

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    nkey: str | None = None
    permissions: Permissions | None = None

    def __post_init__(self) -> None:
        for name in ("user", "nkey"):
            if (value := getattr(self, name)) is not None:
                text(name, value)
        if self.password is not None and not isinstance(self.password, str):
            raise ConfigError(f"password of type {type(self.password).__name__}: expected a str")
        if self.permissions is not None:
            instance("permissions", self.permissions, Permissions)
        if self.nkey is None:
            if not self.user or self.password is None:
                raise ConfigError(f"User(user={self.user!r}): expected user and password, or nkey with a public key")
        elif self.user is not None or self.password is not None:
            raise ConfigError(f"User(nkey={self.nkey!r}): expected either nkey or user and password, not both")
        elif not re.fullmatch(r"U[A-Z2-7]{55}", self.nkey):
            # A seed (S...) pasted here by mistake must not travel into logs with the message.
            raise ConfigError(
                "User(nkey=...): expected a user's public key, 56 characters beginning with U; "
                "a seed (beginning with S) stays with the client"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTLS:
    """The server's certificate, and whether clients must show one too."""

    cert_file: Path | str
    key_file: Path | str
    ca_file: Path | str | None = None
    """Authority that client certificates are checked against; the machine's own authorities when absent."""
    verify: bool = False
    """Refuse clients without a certificate signed by ``ca_file``."""
    handshake_first: bool = False
    """Start TLS before the server's INFO, so that nothing at all travels in the clear."""

    def __post_init__(self) -> None:
        for name in ("cert_file", "key_file", "ca_file"):
            value = getattr(self, name)
            if (value is not None or name != "ca_file") and not Path(path(name, value)).is_file():
                raise ConfigError(f"{name}={str(value)!r}: no such file")
        for name in ("verify", "handshake_first"):
            flag(name, getattr(self, name))
        if self.verify and self.ca_file is None:
            raise ConfigError("verify=True without ca_file: give the authority that signs client certificates")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRoutes:
    """A server's place in a cluster. ``NatsCluster`` fills this in."""

    name: str
    routes: Sequence[str]
    """``host:port`` of every other node. JetStream takes the size of the cluster from their number."""
    port: int | None = None
    """Where this node listens for the others; ``None`` lets the server choose."""
    advertise: str | None = None
    """``host:port`` told to other nodes in place of the real one."""

    def __post_init__(self) -> None:
        text("name", self.name)
        texts("routes", self.routes, "a list of host:port")
        if self.port is not None:
            whole("port", self.port, high=MAX_PORT, instead="or None")
        if self.advertise is not None:
            text("advertise", self.advertise)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The configuration of an embedded nats-server. ``None`` leaves a setting at the server's default.

    Durability: after a publish is acknowledged, the server's default is to flush to disk only **every two
    minutes**. Acknowledged messages are with the operating system by then, so killing the process loses nothing, but
    a power loss or a crashed kernel can lose up to two minutes of acknowledged messages of an unreplicated (R1)
    stream. ``durable=True`` makes the server flush before it acknowledges.
    """

    host: str = "127.0.0.1"
    server_name: str | None = None
    jetstream: bool = True
    durable: bool = False
    """Flush to disk before each acknowledgement (``sync_interval: always``). Costs one disk flush per write."""
    sync_interval_s: float | Literal["always"] | None = None
    """Seconds between flushes of acknowledged messages; ``"always"`` is the same as
    ``durable=True``.
    """
    max_memory_bytes: int | None = None
    """Room for all memory streams together; the server's default is 75% of the machine's memory."""
    max_file_bytes: int | None = None
    """Room for all file streams together; the server's default is 75% of the free disk."""

    users: Sequence[User] = ()
    nkeys: Sequence[User] = ()
    token: str | None = field(default=None, repr=False)
    operator_jwt: str | None = field(default=None, repr=False)
    """The operator's JWT: users then connect with credentials signed below it, and accounts come from the preload."""
    system_account: str | None = None
    """Public key (``A...``) of the operator's system account."""
    resolver_preload: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Account public key to account JWT, kept in the server's memory."""
    tls: ServerTLS | None = None

    max_payload_bytes: int | None = None
    max_connections: int | None = None
    max_pending_bytes: int | None = None
    """Bytes the server holds for a client that does not read before it drops the client as a slow consumer."""
    ping_interval_s: float | None = None
    write_deadline_s: float | None = None
    cluster: ClusterRoutes | None = None
    extra_config: str = field(default="", repr=False)
    """Appended to the file as it is, in nats-server's own syntax; later settings win over earlier ones."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_storage()
        self._check_access()
        for name in (
            "max_memory_bytes",
            "max_file_bytes",
            "max_payload_bytes",
            "max_connections",
            "max_pending_bytes",
        ):
            if (value := getattr(self, name)) is not None:
                whole(name, value, instead="or None for the server's default")
        for name in ("ping_interval_s", "write_deadline_s"):
            if (value := getattr(self, name)) is not None:
                seconds_above_0(name, value, instead="or None for the server's default")
        if not self.host:
            raise ConfigError("host='': expected an address, such as 127.0.0.1")
        if self.server_name is not None and not re.fullmatch(r"[^\s.*>]+", self.server_name):
            raise ConfigError(f"server_name={self.server_name!r}: expected a name without spaces, '.', '*' or '>'")
        if self.cluster is not None and self.jetstream and self.server_name is None:
            raise ConfigError("cluster without server_name: JetStream knows the nodes of a cluster by their names")

    def _check_types(self) -> None:
        for name in ("host", "extra_config"):
            text(name, getattr(self, name))
        for name in ("server_name", "system_account"):
            if (value := getattr(self, name)) is not None:
                text(name, value)
        for name in ("token", "operator_jwt"):  # secrets, which no message shows
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                raise ConfigError(f"{name} of type {type(value).__name__}: expected a str")
        for name in ("jetstream", "durable"):
            flag(name, getattr(self, name))
        for name in ("users", "nkeys"):
            users = getattr(self, name)
            if not isinstance(users, Sequence) or not all(isinstance(each, User) for each in users):
                raise unfit(name, users, "a list of User")
        jwts = self.resolver_preload
        if not isinstance(jwts, Mapping) or not all(isinstance(each, str) for pair in jwts.items() for each in pair):
            raise ConfigError("resolver_preload: expected a dict of account keys to JWTs, both str")
        if self.tls is not None:
            instance("tls", self.tls, ServerTLS)
        if self.cluster is not None:
            instance("cluster", self.cluster, ClusterRoutes)

    def _check_storage(self) -> None:
        if self.durable and self.sync_interval_s is not None:
            raise ConfigError(
                f"durable=True with sync_interval_s={self.sync_interval_s!r}: "
                "durable already means 'always'; give one of the two"
            )
        if isinstance(self.sync_interval_s, str):
            if self.sync_interval_s != "always":
                raise ConfigError(f"sync_interval_s={self.sync_interval_s!r}: expected seconds or 'always'")
        elif self.sync_interval_s is not None:
            seconds_above_0("sync_interval_s", self.sync_interval_s, instead="or 'always'")
        if self.jetstream and re.search(r"^\s*jetstream\b", self.extra_config, re.MULTILINE):
            # The server takes the last block whole, without our store_dir: it would keep streams in a folder that all
            # servers of the machine share.
            raise ConfigError(
                "extra_config has a jetstream block, which replaces ours and its store_dir; "
                "give jetstream=False beside a whole block of your own"
            )
        if not self.jetstream:
            for name in ("durable", "sync_interval_s", "max_memory_bytes", "max_file_bytes"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} with jetstream=False: there is no storage to set up"
                    )

    def _check_access(self) -> None:
        if any(user.nkey is not None for user in self.users):
            raise ConfigError("users: a User with nkey belongs in nkeys")
        if any(user.nkey is None for user in self.nkeys):
            raise ConfigError("nkeys: a User without nkey belongs in users")
        if self.token is not None and not self.token:
            raise ConfigError("token='': expected a text, or None for no token")
        # The server refuses these mixes itself, but only once started and in words about its own file.
        ways = {
            "token": self.token is not None,
            "users or nkeys": bool(self.users or self.nkeys),
            "operator_jwt": self.operator_jwt is not None,
        }
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1:
            raise ConfigError(f"{' with '.join(chosen)}: the server takes one way of authentication")
        if self.operator_jwt is None:
            for name in ("resolver_preload", "system_account"):
                if getattr(self, name):
                    raise ConfigError(f"{name} without operator_jwt: accounts are signed by an operator")


class ServerOptions(TypedDict, total=False):
    """The fields of ``ServerConfig`` as keywords, for ``NatsServer(durable=True)`` to be checked by type checkers."""

    host: str
    server_name: str | None
    jetstream: bool
    durable: bool
    sync_interval_s: float | Literal["always"] | None
    max_memory_bytes: int | None
    max_file_bytes: int | None
    users: Sequence[User]
    nkeys: Sequence[User]
    token: str | None
    operator_jwt: str | None
    system_account: str | None
    resolver_preload: Mapping[str, str]
    tls: ServerTLS | None
    max_payload_bytes: int | None
    max_connections: int | None
    max_pending_bytes: int | None
    ping_interval_s: float | None
    write_deadline_s: float | None
    cluster: ClusterRoutes | None
    extra_config: str


def with_options(config: ServerConfig | None, options: ServerOptions) -> ServerConfig:
    """Return ``config`` (or the defaults) with ``options`` in place of its fields; unknown names are an error."""
    if config is not None:
        instance("config", config, ServerConfig)
    known = [each.name for each in fields(ServerConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}: expected some of {', '.join(known)}")
    return replace(config or ServerConfig(), **options)


def render_config(config: ServerConfig, *, port: int | None, store_dir: Path) -> str:
    """Return the text of the configuration file. Monitoring always listens, and only on this machine.

    ``None`` for a port lets the server take a free one, which no other program can take in between.
    """
    lines = [
        f"listen: {_quoted(f'{_bracketed(config.host)}:{_port(port)}')}",
        'http: "127.0.0.1:-1"',
    ]
    if config.server_name is not None:
        lines.append(f"server_name: {_quoted(config.server_name)}")
    lines += _limits(config)
    if config.jetstream:
        lines += _jetstream(config, store_dir)
    lines += _access(config)
    if config.tls is not None:
        lines += _tls(config.tls)
    if config.cluster is not None:
        lines += _cluster(config.cluster)
    if config.extra_config:
        lines.append(config.extra_config)
    return "\n".join(lines) + "\n"


def _limits(config: ServerConfig) -> list[str]:
    sizes = {
        "max_payload": config.max_payload_bytes,
        "max_connections": config.max_connections,
        "max_pending": config.max_pending_bytes,
    }
    times = {"ping_interval": config.ping_interval_s, "write_deadline": config.write_deadline_s}
    lines = [f"{name}: {value}" for name, value in sizes.items() if value is not None]
    return lines + [f"{name}: {_duration(value)}" for name, value in times.items() if value is not None]


def _jetstream(config: ServerConfig, store_dir: Path) -> list[str]:
    lines = ["jetstream {", f"  store_dir: {_quoted(str(store_dir))}"]
    if config.max_memory_bytes is not None:
        lines.append(f"  max_memory_store: {config.max_memory_bytes}")
    if config.max_file_bytes is not None:
        lines.append(f"  max_file_store: {config.max_file_bytes}")
    if config.durable or config.sync_interval_s == "always":
        lines.append("  sync_interval: always")
    elif config.sync_interval_s is not None:
        lines.append(f"  sync_interval: {_duration(config.sync_interval_s)}")
    return [*lines, "}"]


def _access(config: ServerConfig) -> list[str]:
    if config.operator_jwt is not None:
        lines = [f"operator: {_quoted(config.operator_jwt)}", "resolver: MEMORY"]
        if config.system_account is not None:
            lines.append(f"system_account: {_quoted(config.system_account)}")
        accounts = [f"  {_quoted(key)}: {_quoted(jwt)}" for key, jwt in config.resolver_preload.items()]
        return [*lines, "resolver_preload {", *accounts, "}"]
    if config.token is not None:
        return ["authorization {", f"  token: {_quoted(config.token)}", "}"]
    users = [*config.users, *config.nkeys]
    if not users:
        return []
    return ["authorization {", "  users: [", *(f"    {_user(user)}" for user in users), "  ]", "}"]


def _user(user: User) -> str:
    if user.nkey is not None:
        parts = [f"nkey: {_quoted(user.nkey)}"]
    else:
        assert user.user is not None
        assert user.password is not None
        parts = [f"user: {_quoted(user.user)}", f"password: {_quoted(user.password)}"]
    if user.permissions is not None:
        parts.append(f"permissions: {_permissions(user.permissions)}")
    return "{" + ", ".join(parts) + "}"


def _permissions(permissions: Permissions) -> str:
    parts = []
    publish_allow = permissions.publish_allow
    if permissions.allow_responses and publish_allow is None:
        # With allow_responses and no allow list the server forbids every other publish; None promises the
        # opposite.
        publish_allow = [">"]
    for verb, allow, deny in (
        ("publish", publish_allow, permissions.publish_deny),
        ("subscribe", permissions.subscribe_allow, permissions.subscribe_deny),
    ):
        rules = []
        if allow:
            rules.append(f"allow: {_list(allow)}")
        elif allow is not None and not (verb == "publish" and permissions.allow_responses):
            # The server reads an empty allow list as "no restriction"; denying everything has the intended effect. Not
            # with allow_responses, which forbids the rest by itself, and which a denial would override.
            rules.append('deny: [">"]')
        if deny and 'deny: [">"]' not in rules:
            rules.append(f"deny: {_list(deny)}")
        if rules:
            parts.append(f"{verb}: {{{', '.join(rules)}}}")
    if permissions.allow_responses:
        parts.append("allow_responses: true")
    return "{" + ", ".join(parts) + "}"


def _tls(tls: ServerTLS) -> list[str]:
    # Absolute, because a program may change its working folder between one start and the next.
    lines = [
        "tls {",
        f"  cert_file: {_quoted(str(Path(tls.cert_file).absolute()))}",
        f"  key_file: {_quoted(str(Path(tls.key_file).absolute()))}",
    ]
    if tls.ca_file is not None:
        lines.append(f"  ca_file: {_quoted(str(Path(tls.ca_file).absolute()))}")
    if tls.verify:
        lines.append("  verify: true")
    if tls.handshake_first:
        lines.append("  handshake_first: true")
    return [*lines, "}"]


def _cluster(cluster: ClusterRoutes) -> list[str]:
    lines = [
        "cluster {",
        f"  name: {_quoted(cluster.name)}",
        f"  listen: {_quoted(f'127.0.0.1:{_port(cluster.port)}')}",
        f"  routes: {_list([f'nats-route://{route}' for route in cluster.routes])}",
    ]
    if cluster.advertise is not None:
        lines.append(f"  cluster_advertise: {_quoted(cluster.advertise)}")
    return [*lines, "}"]


def _quoted(text: str) -> str:
    # Everything below a space and DEL as \xXX; other characters travel as UTF-8, which the parser passes
    # through.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\x{ord(match[0]):02X}", escaped) + '"'


def _list(values: Sequence[str]) -> str:
    return "[" + ", ".join(map(_quoted, values)) + "]"


def _duration(seconds: float) -> str:
    return f'"{max(1, round(seconds * 1_000_000))}us"'


def _port(port: int | None) -> int:
    return -1 if port is None else port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
