"""How a connection is closed and drained: generators of steps, run by a driver that can wait.

Each step is answered when it is done, or with its error. The driver ends the connection when the generator has ended,
also when it raised. The generators raise if published messages may not have arrived, because after closing no other
call can report it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from jetspark.core.connection import Connection
from jetspark.core.options import ConnectOptions
from jetspark.core.step_runner import Steps
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import (
    BufferFull,
    ConnectionLost,
    JetSparkError,
    PermissionDenied,
    RequestTimeout,
)

__all__ = ["INTERRUPTED_S", "AwaitAcks", "Confirm", "Ending", "ReadUp", "Step", "close", "drain", "leaving_s", "lost"]

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


Step: TypeAlias = Confirm | AwaitAcks | ReadUp
Ending: TypeAlias = Steps[Step, None]


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
