"""How a connection is opened, drained and closed: generators of steps, run by a driver that can wait.

Opening. :func:`establish` yields steps: dial, exchange bytes, upgrade to TLS, pause. A driver performs a step, and
sends its value back or throws its error. Initial connect and every reconnect are the same code on both drivers.

Closing. :func:`drain` and :func:`close` raise if published messages may not have arrived, because after closing no
other call can report it. The driver ends the connection when the generator has ended, also when it raised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from jetspark.core.auth import Auth, Credentials, NKey, Token, UserPassword
from jetspark.core.connection import Connection, State
from jetspark.core.options import ConnectOptions, TLSConfig
from jetspark.core.reconnect import Server
from jetspark.core.step_runner import Sleep, Steps
from jetspark.core.subscription import SubscriptionState
from jetspark.core.tls import OUR_CERTIFICATE, describe_error, is_name_mismatch, is_plain_text
from jetspark.errors import (
    BufferFull,
    ConfigError,
    ConnectionLost,
    JetSparkError,
    PermissionDenied,
    RequestTimeout,
)

__all__ = [
    "INTERRUPTED_S",
    "AskSecret",
    "AuthSource",
    "AwaitAcks",
    "ClosingStep",
    "Confirm",
    "Converse",
    "Dial",
    "Ending",
    "Establishing",
    "Hangup",
    "ReadUp",
    "Step",
    "UpgradeToTLS",
    "close",
    "drain",
    "establish",
    "leaving_s",
    "lost",
]

# ---- opening ---------------------------------------------------------------------------------------------------------


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


# ---- closing ---------------------------------------------------------------------------------------------------------


# Longest wait for the server when an interrupt leaves a client's block: the program, or the task, is to end now. A
# server that answers does so in a fraction of it.
INTERRUPTED_S = 5.0


@dataclass(frozen=True, slots=True)
class Confirm:
    """Have the server confirm everything that was published; raises what that raises."""


@dataclass(frozen=True, slots=True)
class AwaitAcks:
    """Wait for the acknowledgements of ``publish_async``. A publish still waiting at the deadline fails when we
    close."""


@dataclass(frozen=True, slots=True)
class ReadUp:
    """Stop deliveries to these subscriptions and let their readers finish; the answer is True if they did in time."""

    subscriptions: list[SubscriptionState]


ClosingStep: TypeAlias = Confirm | AwaitAcks | ReadUp
Ending: TypeAlias = Steps[ClosingStep, None]


def close(connection: Connection) -> Ending:
    """See to it that the server has everything.

    Raises:
        ConnectionLost: It has not confirmed that. Also where the connection has ended by itself, with messages that
            were accepted and never sent.
        PermissionDenied: It refused some of it.
    """
    try:
        yield from _confirm(connection)
    except RequestTimeout as error:
        raise lost(connection) from error


def drain(connection: Connection, timeout_s: float) -> Ending:
    """Let every reader finish the messages received so far, then see to it that the server has everything.

    Raises:
        RequestTimeout: Not all of it in time.
        ConnectionLost, PermissionDenied: As for :func:`close`.
    """
    # Acknowledgements come to inboxes, and are waited for once everything is sent.
    read = [each for each in connection.subscriptions.all if each.reader is not None and not each.is_inbox]
    lost_before = connection.lost_messages
    # Reading before confirming: what readers publish while they finish has to be confirmed, too.
    is_read = yield ReadUp(read)
    unread = sum(each.reader.pending_messages for each in read if each.reader is not None)
    try:
        yield from _confirm(connection)
    except RequestTimeout:
        what = f"drain, {unread} messages unread, {connection.in_doubt} messages in doubt"
        raise RequestTimeout(what, timeout_s) from None
    if (lost_meanwhile := connection.lost_messages - lost_before) > 0:  # while readers finished: no flush was told
        raise ConnectionLost("the session ended during the drain", lost_meanwhile)
    if not is_read:
        raise RequestTimeout(f"drain, {unread} messages unread", timeout_s)


def lost(connection: Connection, error: JetSparkError | None = None) -> ConnectionLost:
    """The error for published messages that may not have arrived, with the cause if it is known."""
    reason, unconfirmed = "closed before the server confirmed", connection.in_doubt
    if isinstance(error, ConnectionLost):
        # The error counts the messages of its own session; `in_doubt` now counts only messages for the next one.
        return ConnectionLost(f"{reason}: {error.reason}", error.unconfirmed_messages + unconfirmed)
    return ConnectionLost(reason if error is None else f"{reason}: {error}", unconfirmed)


def _confirm(connection: Connection) -> Ending:
    # The confirmation first: it is quick, and must not find the time used up by acknowledgements that never come.
    failure: JetSparkError | None = None
    try:
        if connection.in_doubt:
            yield Confirm()
    except (PermissionDenied, RequestTimeout) as error:
        failure = error  # raised at the end: acknowledgements of other messages may still arrive
    except JetSparkError as error:
        if not connection.is_closed and not isinstance(error, BufferFull | ConnectionLost):
            raise  # a call that is wrong
        doubt = lost(connection, error)
        doubt.__cause__ = error
        failure = doubt if doubt.unconfirmed_messages else None
    if not connection.is_closed:  # else they are resolved, or another process has them
        yield AwaitAcks()
    if failure is not None:
        raise failure


def leaving_s(options: ConnectOptions, kind: type[BaseException] | None) -> float:
    """How long closing may take at the end of a block that was left by an exception of this kind, or by none."""
    # GeneratorExit interrupts nothing: it is how a generator with the block in it ends when its reader has enough.
    if kind is None or issubclass(kind, Exception | GeneratorExit):
        return options.drain_timeout_s
    return min(options.drain_timeout_s, INTERRUPTED_S)
