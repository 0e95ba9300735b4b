"""How a session comes about: one generator that decides, run by a driver that can wait.

:func:`establish` yields steps: dial, exchange bytes, upgrade to TLS, pause. A driver performs a step, and sends its
value back or throws its error. Initial connect and every reconnect are the same code on both drivers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from jetspark.core.auth import Auth, Credentials, NKey, Token, UserPassword
from jetspark.core.connection import Connection, State
from jetspark.core.options import TLSConfig
from jetspark.core.reconnect import Server
from jetspark.core.step_runner import Sleep, Steps
from jetspark.core.tls import OUR_CERTIFICATE, describe_error, is_name_mismatch, is_plain_text
from jetspark.errors import ConfigError, ConnectionLost, JetSparkError, RequestTimeout

__all__ = [
    "AskSecret",
    "AuthSource",
    "Converse",
    "Dial",
    "Establishing",
    "Hangup",
    "Step",
    "UpgradeToTLS",
    "establish",
]

AuthSource: TypeAlias = Auth | Callable[[], Auth] | None


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a transport; with ``tls_name``, speak TLS from the first byte and expect that name in the certificate."""

    server: Server
    tls_name: str | None


@dataclass(frozen=True, slots=True)
class UpgradeToTLS:
    """Put TLS on the open transport and expect this name in the certificate."""

    tls_name: str


@dataclass(frozen=True, slots=True)
class Converse:
    """Send what the machine has to send and feed it what arrives, until ``is_done()``."""

    is_done: Callable[[], bool]
    what: str


@dataclass(frozen=True, slots=True)
class Hangup:
    """Drop the transport, if one is open."""


@dataclass(frozen=True, slots=True)
class AskSecret:
    """Call the user's function for credentials; its result is the answer. The function may hang: bound the wait."""

    source: Callable[[], Any]


Step: TypeAlias = Sleep | Dial | UpgradeToTLS | Converse | Hangup | AskSecret
Establishing: TypeAlias = Steps[Step, None]

# The errors of an attempt: refused, unreachable, timed out, bad certificate, not NATS, credentials refused.
# (ssl.SSLError and socket.gaierror are OSErrors; a user's secret function may raise anything it likes of these.)
_ATTEMPT_ERRORS = (OSError, UnicodeError, JetSparkError)


def establish(connection: Connection, auth: AuthSource, tls: TLSConfig | None, *, is_first: bool) -> Establishing:
    """Try servers until a session is up.

    The first time each server gets one attempt, and a failure is raised to the caller. Later attempts continue as long
    as the options allow, and failures are events. A server that refused a fixed secret twice is not tried with it a
    third time; a secret that can change (a function, a credentials file) is worth any number of attempts.

    Raises:
        NoServersAvailable: None could be reached.
        AuthenticationFailed: Every server refused us.
        ConfigError: The credentials cannot be used at all.
    """
    pool = connection.pool
    pool.secret_is_fixed = not (callable(auth) or (isinstance(auth, Credentials) and auth.path is not None))
    tried: set[Server] = set()
    while True:
        server, delay = pool.next()
        # The second round of a first connect. Its caller waits, and can decide better than this code on another try.
        if is_first and server in tried:
            raise pool.exhausted()
        tried.add(server)
        if delay:
            yield Sleep(delay)
        try:
            yield from _attempt(connection, server, auth, tls)
        except _ATTEMPT_ERRORS as error:
            # The machine first: a chunk that arrives while the transport is dropped finds no session, and is ignored.
            connection.end(str(error))
            yield Hangup()
            attempts, is_news = pool.failed(error)
            if is_first and isinstance(error, ConfigError):
                raise  # no server can be right about it
            if not is_first and is_news:
                connection.attempt_failed(server, error, attempts)
        else:
            pool.succeeded()
            return


def _attempt(connection: Connection, server: Server, auth: AuthSource, tls: TLSConfig | None) -> Establishing:
    if tls is not None and tls.hostname is not None:
        names = [tls.hostname]
    else:
        names = [server.host] if server.tls_name is None else [server.tls_name, server.host]
    for name in names:
        try:
            yield from _attempt_under_name(connection, server, name, auth, tls)
            return
        except OSError as error:
            # Of a server announced by address: its certificate has the cluster's name, its own address, or both.
            if name == names[-1] or not is_name_mismatch(error):
                raise
        connection.end("its certificate has another name")
        yield Hangup()


def _attempt_under_name(
    connection: Connection, server: Server, tls_name: str, auth: AuthSource, tls: TLSConfig | None
) -> Establishing:
    yield from _greeting(connection, server, tls_name, tls)
    try:
        if connection.handshake.awaits_tls:
            # A client that wants TLS must not be talked out of it by an INFO in plain text, which an attacker may have
            # sent.
            if not (
                connection.handshake.greeting.requires_tls or connection.handshake.greeting.fields.get("tls_available")
            ):
                raise ConnectionLost(f"{server} does not offer TLS; refusing to continue in plain text")
            yield UpgradeToTLS(tls_name)
            connection.handshake.secured()
        # Asked for now, not before dialling: a token may live for seconds, and most attempts of an outage end sooner.
        secret = yield from _secret(auth)
        connection.login(secret)
        yield Converse(lambda: connection.is_connected, "the server's answer to our login")
    except ConnectionError as error:
        # In TLS 1.3 a server that misses our certificate lets the handshake pass and hangs up; that it says why may get
        # lost on the way.
        has_certificate = tls is not None and (tls.cert_file is not None or tls.context is not None)
        if connection.handshake.greeting.fields.get("tls_verify") and not has_certificate:
            raise ConnectionLost(OUR_CERTIFICATE) from error
        raise


def _greeting(connection: Connection, server: Server, tls_name: str, tls: TLSConfig | None) -> Establishing:
    tls_first = tls is not None and tls.handshake_first
    # Before dialling: the greeting may arrive before we are resumed.
    connection.begin(server, wants_tls=tls is not None, is_secure=tls_first)
    try:
        yield Dial(server, tls_name if tls_first else None)
    except OSError as error:
        if tls_first and is_plain_text(error):
            raise ConnectionLost(f"{describe_error(error)}; leave out handshake_first=True for this server") from error
        raise
    try:
        yield Converse(lambda: connection.state is State.READY, "the server's greeting")
    except (ConnectionError, RequestTimeout) as error:
        if tls_first:
            raise
        raise ConnectionLost(
            f"{describe_error(error)}; a NATS server greets first, but for one with handshake_first: if this is one, "
            "pass tls=TLSConfig(handshake_first=True); if not, check the port: a monitoring port (8222 by default) or "
            "web server waits for us to begin, and clients of NATS use 4222 by default"
        ) from error


def _secret(auth: AuthSource) -> Steps[Step, Auth | None]:
    if not callable(auth):
        return auth
    try:
        secret = yield AskSecret(auth)
    except RequestTimeout:
        raise  # only slow
    except Exception as error:
        # The function is the user's and may raise anything; a reconnect must survive it and ask again.
        raise ConfigError(f"the function that gives the credentials failed: {error!r}") from error
    if not isinstance(secret, UserPassword | Token | NKey | Credentials):
        raise ConfigError(
            f"the function that gives the credentials returned {type(secret).__name__}: "
            "expected UserPassword, Token, NKey or Credentials"
        )
    return secret
