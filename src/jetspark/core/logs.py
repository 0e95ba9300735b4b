"""How loudly each connection event is logged. The library logs to ``jetspark.*`` and never configures logging."""

from __future__ import annotations

import logging

from jetspark.core.events import (
    Closed,
    Connected,
    ConnectionEvent,
    Disconnected,
    ErrorReported,
    LameDuck,
    Reconnected,
    ReconnectFailed,
    SlowConsumer,
)
from jetspark.errors import ConnectionLost, JetSparkError

__all__ = ["log_closed_at_exit", "log_event", "log_never_closed"]


def log_event(logger: logging.Logger, event: ConnectionEvent) -> None:
    match event:
        case Connected(server):
            logger.debug("connected to %s", server)
        case Reconnected(server):
            logger.info("reconnected to %s", server)
        case Disconnected(server, reason, unconfirmed, buffered, _):
            logger.warning("lost %s: %s (%d messages unconfirmed, %d buffered)", server, reason, unconfirmed, buffered)
        case ReconnectFailed(server, error, attempts):
            logger.warning("attempt %d to reconnect to %s failed: %s", attempts, server, error)
        case SlowConsumer(subject, dropped):
            logger.warning("slow consumer on %r: %d messages dropped", subject, dropped)
        case ErrorReported(error, is_raised=True):
            logger.debug("%s", error)
        case ErrorReported(error):
            logger.error("%s", error, exc_info=error if error.__traceback__ else None)
        case LameDuck(server):
            logger.info("%s is about to shut down", server)
        case Closed(error, unsent) if error is not None or unsent:
            logger.error("closed: %s (%d messages never sent)", error or "as asked", unsent)
        case _:
            logger.debug("%r", event)


def log_never_closed(logger: logging.Logger, server: object, unsent: int, in_doubt: int) -> None:
    """A client is gone, or its loop, and nobody closed it: say what that has cost."""
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
