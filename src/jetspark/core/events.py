"""Facts that a connection reports through ``on_event``, in the order they happened, and how each is logged.

The library logs to ``jetspark.*`` and never configures logging.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from jetspark.errors import ConnectionLost, JetSparkError

__all__ = [
    "Closed",
    "Connected",
    "ConnectionEvent",
    "Disconnected",
    "ErrorReported",
    "LameDuck",
    "OnEvent",
    "ReconnectFailed",
    "Reconnected",
    "ServersDiscovered",
    "SlowConsumer",
    "log_closed_at_exit",
    "log_event",
    "log_never_closed",
]


@dataclass(frozen=True, slots=True)
class Connected:
    """The first session is up."""

    server: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session is gone; a new one is being sought unless ``Closed`` follows.

    Of the ``published_messages`` accepted so far, the last ``buffered_messages`` had not left and will be sent after
    the reconnect; the ``unconfirmed_messages`` before those had been handed to the network and no PONG followed them:
    each was processed by the server or lost. All earlier ones were processed, or told by an earlier event.
    """

    server: str
    reason: str
    unconfirmed_messages: int
    buffered_messages: int
    published_messages: int


@dataclass(frozen=True, slots=True)
class Reconnected:
    """A new session is up: subscriptions are restored, buffered publishes are on their way."""

    server: str


@dataclass(frozen=True, slots=True)
class ReconnectFailed:
    """An attempt to reconnect failed, the ``attempts``-th in succession at this server; the next follows by itself.

    Sent for the first attempt at each server, for each new kind of error, and each time ``attempts`` has doubled.
    """

    server: str
    error: Exception
    attempts: int


@dataclass(frozen=True, slots=True)
class SlowConsumer:
    """A reader fell behind its subscription's bounds and messages were dropped; ``dropped`` counts them in all.

    Sent when dropping begins and again each time ``dropped`` has doubled.
    """

    subject: str
    dropped: int


@dataclass(frozen=True, slots=True)
class ErrorReported:
    """The server reported an error, or a callback raised one. The connection continues."""

    error: Exception
    is_raised: bool = False
    """A call that waits, or a reader, raises it too; then it is logged as debug output only."""


@dataclass(frozen=True, slots=True)
class LameDuck:
    """The server is about to shut down.

    If another server is known and was not found out of reach, the connection goes there at once: messages sent are
    confirmed first, so ``Disconnected`` follows with no message in doubt, then ``Reconnected``. Otherwise it stays
    until the server closes it.
    """

    server: str


@dataclass(frozen=True, slots=True)
class ServersDiscovered:
    """The cluster announced servers that were not known before."""

    servers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over permanently. ``error`` is None after a call of ``close`` or ``drain``.

    ``unsent_messages`` had been accepted and never left: they are lost.
    """

    error: Exception | None
    unsent_messages: int = 0


ConnectionEvent: TypeAlias = (
    Connected
    | Disconnected
    | ReconnectFailed
    | Reconnected
    | SlowConsumer
    | ErrorReported
    | LameDuck
    | ServersDiscovered
    | Closed
)

OnEvent: TypeAlias = Callable[[ConnectionEvent], None]


# ---- logging ---------------------------------------------------------------------------------------------------------


def log_event(logger: logging.Logger, event: ConnectionEvent) -> None:
    match event:
        case Connected(server):
            logger.debug("connected to %s", server)
        case Reconnected(server):
            logger.info("reconnected to %s", server)
        case Disconnected(server, reason, unconfirmed, buffered, _):
            what = "connection to %s lost: %s (%d messages unconfirmed, %d buffered)"
            logger.warning(what, server, reason, unconfirmed, buffered)
        case ReconnectFailed(server, error, attempts):
            logger.warning("attempt %d to reconnect to %s failed: %s", attempts, server, error)
        case SlowConsumer(subject, dropped):
            logger.warning("slow consumer on %r: %d messages dropped", subject, dropped)
        case ErrorReported(error, is_raised=True):
            logger.debug("%s", error)
        case ErrorReported(error):
            logger.error("%s", error, exc_info=error if error.__traceback__ else None)
        case LameDuck(server):
            logger.info("%s announced its shutdown (lame duck mode)", server)
        case Closed(error, unsent) if error is not None or unsent:
            logger.error("connection closed: %s (%d messages never sent)", error or "by the program", unsent)
        case _:
            logger.debug("%r", event)


def log_never_closed(logger: logging.Logger, server: object, unsent: int, in_doubt: int) -> None:
    """Warn about a client that was garbage-collected, or whose loop ended, without ``close``; with its lost
    messages."""
    logger.warning(
        "a client of %s was never closed: %d published messages were never sent, %d are in doubt",
        server,
        unsent,
        in_doubt,
    )


def log_closed_at_exit(logger: logging.Logger, server: str, error: JetSparkError) -> None:
    """The program ended, its client was closed for it, and that failed."""
    if isinstance(error, ConnectionLost):
        what = "the program ends without closing its connection to %s: %d published messages are in doubt"
        logger.warning(what, server, error.unconfirmed_messages)
    else:
        logger.warning("the program ends without closing its connection to %s: %s", server, error)
