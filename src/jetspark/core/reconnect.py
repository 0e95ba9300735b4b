"""Which server to dial next, and when: addresses, the pool of them, the pauses between attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

from jetspark.core.arguments import texts
from jetspark.core.auth import Auth, Token, UserPassword
from jetspark.core.backoff import Backoff
from jetspark.core.tls import describe_error
from jetspark.errors import AuthenticationFailed, ConfigError, JetSparkError, NoServersAvailable

__all__ = ["Server", "ServerPool", "parse_servers"]

DEFAULT_PORT = 4222

# A server may refuse a good secret once, while its own configuration is being read. A secret that cannot change is not
# tried a third time.
MAX_REFUSALS = 2

# Number of addresses used from one announcement of a cluster. Clusters have a few nodes with a few addresses each; a
# longer list is a mistake or an attack, and each address would be dialled with our credentials.
MAX_DISCOVERED_SERVERS = 256


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens. ``auth`` is what the URL itself carried."""

    host: str
    port: int
    requires_tls: bool = False
    auth: Auth | None = field(default=None, repr=False, compare=False)
    tls_name: str | None = field(default=None, compare=False)
    """Name to find in its certificate first; None for ``host`` alone."""

    @property
    def has_name(self) -> bool:
        """True if ``host`` is a name, not an address."""
        try:
            ip_address(self.host.partition("%")[0])
        except ValueError:
            return True
        return False

    def __str__(self) -> str:
        """The address without its secrets, fit for logs and errors."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.requires_tls else 'nats'}://{host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Server:
        """Read ``nats://[user:password@]host[:port]``, ``tls://...``, or a bare ``host[:port]``."""
        text = url.strip()
        try:
            parts = urlsplit(text if "://" in text else f"nats://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            # urllib quotes the unreadable part, which may be a password with an unescaped / ? or #.
            why = f": {error}" if "@" not in url else ": expected nats://user:password@host:port, percent-encoded"
            raise ConfigError(f"server {_without_secrets(url)}{why}") from None
        if parts.scheme not in ("nats", "tls"):
            hint = ""
            if parts.scheme in ("http", "https"):
                hint = ", and the port for clients (4222 by default), not the monitoring port"
            raise ConfigError(
                f"server {_without_secrets(url)}: scheme {parts.scheme!r} is not supported; expected nats:// or "
                f"tls://{hint}"
            )
        if (
            not host
            or any(character.isspace() for character in host)
            or parts.path not in ("", "/")
            or parts.query
            or parts.fragment
        ):
            raise ConfigError(f"server {_without_secrets(url)}: expected nats://host:port")
        auth: Auth | None = None
        if parts.username is not None:
            user = unquote(parts.username)
            auth = Token(user) if parts.password is None else UserPassword(user, unquote(parts.password))
        return cls(host, DEFAULT_PORT if port is None else port, parts.scheme == "tls", auth)


def parse_servers(servers: str | Iterable[str]) -> list[Server]:
    """One URL, several separated by commas, or an iterable of URLs."""
    expected = "at least one, such as 'nats://127.0.0.1:4222'"
    if servers is None:  # os.environ.get() returns it for a variable that is not set
        raise ConfigError(f"servers=None: expected {expected}; is the variable set that names it?")
    urls = servers.split(",") if isinstance(servers, str) else texts("servers", servers, "a URL, or several in a list")
    parsed = [Server.parse(url) for url in urls if url.strip()]
    if not parsed:
        raise ConfigError(f"servers={servers!r}: expected {expected}")
    return parsed


def _without_secrets(url: str) -> str:
    return repr(url.rpartition("@")[2] if "@" in url else url)


@dataclass(slots=True)
class _Candidate:
    server: Server
    is_given: bool = False
    """Named to ``connect``, so it is never removed."""
    failures: int = 0
    last_error: Exception | None = None
    refusals: int = 0
    """Refusals of our credentials since a session with it last did some work."""
    told: set[type[Exception]] = field(default_factory=set)
    """Kinds of errors reported since it was last in use."""


class ServerPool:
    """The servers to try, in turn.

    A round visits every server once. The first round starts at once (a restarted server or a surviving cluster
    member is back as soon as possible); between rounds the pause doubles up to its maximum. Each pause is jittered
    over its upper half, so that the clients of a lost server do not return in step.

    The servers named to ``connect`` stay. Those the cluster announces come and go with its announcements, each of
    which is the whole list; the server in use stays until it is left.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        wait_s: float,
        wait_max_s: float,
        max_attempts: int | None,
        jitter: Callable[[], float],
    ) -> None:
        self._candidates = [_Candidate(server, is_given=True) for server in dict.fromkeys(servers)]
        self._given = {str(server) for server in self.servers}
        self._current: _Candidate | None = None
        """Last returned by :meth:`next`; until its attempt is over it is the first of the candidates."""
        self._is_in_use = False
        self._backoff = Backoff(wait_s, wait_max_s)
        self._max_attempts = max_attempts
        self._jitter = jitter
        self._tried = 0
        self._round = 0
        self._given_up: dict[str, Exception] = {}
        self._refusing: list[_Candidate] = []
        """Not tried again before a session with another server has done some work."""
        self.secret_is_fixed = False
        """True if the next attempt can only repeat the last credentials."""

    @property
    def servers(self) -> list[Server]:
        return [candidate.server for candidate in self._candidates]

    def has_other_than(self, server: Server | None) -> bool:
        """True if another server is known that has not failed since it was last in use."""
        return any(not each.failures and each.server != server for each in self._candidates)

    def next(self) -> tuple[Server, float]:
        """The server to dial and the seconds to wait before.

        Raises:
            NoServersAvailable: Every server has been given up.
        """
        if not self._candidates:
            raise self.exhausted()
        delay = 0.0
        if self._tried >= len(self._candidates):
            self._tried = 0
            self._round += 1
            delay = self._backoff.wait_s(self._round) * (0.5 + 0.5 * self._jitter())
        self._current, self._is_in_use = self._candidates[0], False
        return self._current.server, delay

    def failed(self, error: Exception) -> tuple[int, bool]:
        """The server last returned by :meth:`next` could not be used.

        Returns the number of failures in succession, and whether to report this one: the first of each kind of error is
        reported, and the number each time it has doubled.
        """
        candidate = self._candidates.pop(0)
        candidate.failures += 1
        candidate.last_error = error
        candidate.refusals = candidate.refusals + 1 if isinstance(error, AuthenticationFailed) else 0
        is_news = type(error) not in candidate.told or candidate.failures.bit_count() == 1
        candidate.told.add(type(error))
        if self._max_attempts is not None and candidate.failures >= self._max_attempts:
            self._current = None
            self._given_up[str(candidate.server)] = error
        elif self._is_refusing(candidate):
            self._current = None
            self._refusing.append(candidate)
        else:
            self._candidates.append(candidate)
            self._tried += 1
        return candidate.failures, is_news

    def refused_in_use(self, error: AuthenticationFailed) -> None:
        """The server in use ended the session because of our credentials."""
        candidate = self._current
        if candidate is None or not self._is_in_use:
            return
        candidate.refusals += 1
        candidate.last_error = error
        if self._is_refusing(candidate):
            self._candidates = [each for each in self._candidates if each is not candidate]
            self._refusing.append(candidate)
            self._current = None

    def _is_refusing(self, candidate: _Candidate) -> bool:
        return self.secret_is_fixed and candidate.refusals >= MAX_REFUSALS

    def succeeded(self) -> None:
        """The server last returned by :meth:`next` is in use; after it, the others get their turn first."""
        candidate = self._candidates.pop(0)
        candidate.failures = 0
        candidate.told.clear()
        self._candidates.append(candidate)
        self._current, self._is_in_use = candidate, True
        self._tried += 1

    def proven(self) -> None:
        """The session has done some work, so when it ends the next may follow at once.

        Until then the pauses keep growing: a server that lets us in and drops us must not be dialled in a tight loop.
        """
        self._tried = self._round = 0
        if self._is_in_use and self._current is not None:
            self._current.refusals = 0
        if self._refusing:
            for candidate in self._refusing:
                candidate.refusals = 0
            self._candidates[:0] = [each for each in self._refusing if each.is_given]
            self._refusing.clear()

    def discovered(
        self, urls: Sequence[Any], *, requires_tls: bool, auth: Auth | None = None, tls_name: str | None = None
    ) -> tuple[str, ...]:
        """Adopt the cluster's announcement: add new servers, remove missing ones; returns the new ones.

        ``tls_name`` is for servers announced by address: few certificates contain addresses.
        """
        announced: dict[tuple[str, int], Server] = {}
        for url in urls[:MAX_DISCOVERED_SERVERS]:
            try:
                server = Server.parse(url)
            except (ConfigError, TypeError, AttributeError):
                continue  # an address we cannot read is one we cannot use; it must not cost us the session
            name = None if server.has_name else tls_name
            announced[server.host, server.port] = Server(server.host, server.port, requires_tls, auth, name)
        if not announced:
            return ()  # a server without a cluster, or one that does not advertise it
        self._candidates = [
            each
            for each in self._candidates
            if each.is_given or each is self._current or (each.server.host, each.server.port) in announced
        ]
        known = {(each.server.host, each.server.port) for each in (*self._candidates, *self._refusing)}
        new = [server for address, server in announced.items() if address not in known]
        self._tried = min(self._tried, len(self._candidates))
        self._candidates += map(_Candidate, new)
        if self._is_in_use and self._current is not None:
            # After it, the others get their turn first.
            self._candidates = [each for each in self._candidates if each is not self._current] + [self._current]
        self._given_up = {name: error for name, error in self._given_up.items() if name in self._given}
        return tuple(map(str, new))

    def exhausted(self) -> JetSparkError:
        """The error that says why nothing is left to try."""
        errors = dict(self._given_up)
        for candidate in (*self._refusing, *self._candidates):
            if candidate.last_error is not None:
                errors[str(candidate.server)] = candidate.last_error
        refusals = [error for error in errors.values() if isinstance(error, AuthenticationFailed)]
        if refusals and len(refusals) == len(errors):
            return refusals[0]
        return NoServersAvailable({server: describe_error(error) for server, error in errors.items()})
