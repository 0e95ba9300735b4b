"""Windowed publishing: many messages on their way to JetStream, each acknowledged on its own. No socket, no clock.

The states of one publish, and the cause of each transition::

    publish() ──> OUTSTANDING ──ack──────────────────────────> PubAck
                       │ ──error reply───────────────────────> ServerError            nothing was stored
                                │ ──503, no responders────────────────> JetStreamUnavailable   nothing was stored
                       │ ──-ERR permissions──────────────────> PermissionDenied       nothing was stored
                       │ ──session over, it had left─────────> ConnectionLost         unknown
                       │ ──no answer within ack_timeout──────> RequestTimeout         unknown
                       └ ──connection over───────────────────> ConnectionClosed, or the error that ended it: unknown

Every message has its own reply subject, used once, under one inbox. The table of outstanding messages is keyed by the
subject's last token and in order of publishing. Invariants: a handle is in the table from the acceptance of its message
until it is resolved, and is resolved at most once; an answer to a message that is not in the table is ignored; the
table never has more than ``max_outstanding`` entries.

A lost session resolves exactly the messages that had been handed to the network: each message's number at its
acceptance is compared with the numbers in ``Disconnected``. The others are still in the connection's buffer, will be
sent after the reconnect, and stay. ``ack_timeout`` does not run without a session, and starts again with the next: no
answer could have arrived.

Acknowledgements are many, and nearly all have the same form. The connection delivers them as runs, and a run with only
the usual form is parsed as a whole by a few calls. Any other answer is parsed separately.

Handles are the driver's, with the three methods of :class:`Handle`. A cancelled one is left alone; it leaves the table
when its message is acknowledged or given up, like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from jetspark.core.connection import Connection
from jetspark.core.driver_base import RunnerBase
from jetspark.core.events import Closed, ConnectionEvent, Disconnected, ErrorReported, Reconnected
from jetspark.core.headers import HeadersLike
from jetspark.core.machine import Reader
from jetspark.core.message import AnswerRun, CoreMessage, is_no_responders
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.core.subscription import SubscriptionState
from jetspark.core.transport import CountedCrowd, Crowd
from jetspark.errors import (
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    PermissionDenied,
    RequestTimeout,
    WindowFull,
)
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.publishing import read_plain_acks, read_pub_ack

__all__ = ["ACK_TIMEOUT_S", "DEFAULT_WINDOW", "MAX_OUTSTANDING", "Handle", "HandleFacts", "PublishWindow"]
__all__ += ["WhenFull", "WindowBase", "WindowOptions"]

# On one machine the rate is flat from 1000 on, and at 250 it is a sixth lower; 4000 leave room for longer distances (10
# ms round trip: 400 thousand a second). A larger window gains nothing:
# the server refuses with 429 beyond its queue.
MAX_OUTSTANDING = 4000

# Callers that wait for room continue when an eighth of the window is free, or this much later with any room. If
# acknowledgements arrive a few at a time, each caller would otherwise publish a few messages with a write of their own:
# with 20 at a time a message took 6.6 us instead of 4.8. The rest of the window keeps the server busy during the wait.
# The time bound is for a window without acknowledgements for long, as after the loss of a leader.
ROOM_SHARE = 8
GATHER_S = 0.005

# Long enough for the election of a leader; messages on their way to the old one may never be answered.
ACK_TIMEOUT_S = 30.0

WhenFull = Literal["wait", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """Options of a window; publishers with equal options may share one."""

    max_outstanding: int = MAX_OUTSTANDING
    ack_timeout: float = ACK_TIMEOUT_S
    when_full: WhenFull = "wait"

    def __post_init__(self) -> None:
        whole("max_outstanding", self.max_outstanding)
        seconds_above_0("ack_timeout", self.ack_timeout)
        if self.when_full not in ("wait", "raise"):
            raise ConfigError(f"when_full={self.when_full!r}: expected 'wait' or 'raise'")


DEFAULT_WINDOW = WindowOptions()


class HandleFacts:
    """The facts about an outstanding message, in slots of its handle, which are named in ``SLOTS``.

    A separate record would be one more object for each message, and one more for the garbage collector to visit.
    Classes with a layout in C, such as asyncio's futures, inherit no slots: so a subclass declares them.
    """

    __slots__ = ()
    SLOTS = ("accepted_at", "number", "subject", "window")

    window: PublishWindow
    subject: str
    number: int
    """The connection's number of the message."""
    accepted_at: float


class Handle(Protocol):
    """The waiter for an acknowledgement; it has the facts of :class:`HandleFacts`."""

    window: PublishWindow
    subject: str
    number: int
    accepted_at: float

    def cancelled(self) -> bool: ...
    def set_result(self, result: PubAck, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...


class PublishWindow:
    """The outstanding messages of one publisher."""

    def __init__(
        self,
        connection: Connection,
        reader: Reader,
        *,
        max_outstanding: int = MAX_OUTSTANDING,
        ack_timeout: float = ACK_TIMEOUT_S,
        when_full: WhenFull = "wait",
    ) -> None:
        """``reader`` is the driver's object that is woken when acknowledgements have arrived."""
        WindowOptions(max_outstanding=max_outstanding, ack_timeout=ack_timeout, when_full=when_full)  # raises, if wrong
        self.max_outstanding, self.ack_timeout_s, self.when_full = max_outstanding, ack_timeout, when_full
        self._connection, self._reader = connection, reader
        self._inbox: SubscriptionState | None = None
        self._reply_prefix = ""
        self._raw_reply_prefix = b""
        self._last_token = 0
        self._waiting: dict[bytes, Handle] = {}
        """By the reply subject's last token."""
        self._session_began = float("-inf")
        self._overlooked = 0
        connection.denials.watch(self)

    @property
    def outstanding(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self.max_outstanding

    @property
    def has_much_room(self) -> bool:
        """True if there is enough room to wake the callers that wait for it."""
        return self.max_outstanding - len(self._waiting) >= max(1, self.max_outstanding // ROOM_SHARE)

    @property
    def inbox(self) -> SubscriptionState | None:
        """The subscription for acknowledgements; None before the first publish."""
        return self._inbox

    def waits_for(self, handle: Handle) -> bool:
        """True if its acknowledgement is outstanding."""
        return any(known is handle for known in self._waiting.values())

    def check_may_wait(self) -> None:
        """Check that the caller may wait for room in a full window.

        Raises:
            WindowFull: The caller chose not to wait.
        """
        if self.when_full == "raise":
            raise WindowFull(self.max_outstanding)

    def publish(self, handle: Handle, subject: str, data: bytes, headers: HeadersLike | None, now: float) -> bool:
        """Accept a message for sending; False when the window is full.

        Raises as ``Connection.publish``; then the message was not accepted.
        """
        waiting, connection = self._waiting, self._connection
        if len(waiting) >= self.max_outstanding:
            return False
        if self._inbox is None:
            self._open_inbox()
        self._last_token += 1
        token = b"%d" % self._last_token
        connection.publish_with_reply(subject, self._raw_reply_prefix + token, data, headers)
        handle.window, handle.subject, handle.number, handle.accepted_at = self, subject, connection.published, now
        waiting[token] = handle
        return True

    def _open_inbox(self) -> None:
        prefix = self._connection.names.new_inbox()
        # Bounded by the window: each message has one answer.
        inbox = self._connection.subscribe(
            f"{prefix}.*", is_unbounded=True, is_inbox=True, takes_runs=True, reader=self._reader
        )
        self._reply_prefix = f"{prefix}."
        self._raw_reply_prefix = self._reply_prefix.encode()
        self._inbox = inbox

    # ---- answers -----------------------------------------------------------------------------------------------

    def on_replies(self, now: float) -> None:
        """Read all answers in the inbox."""
        inbox = self._inbox
        if inbox is None:
            return
        # Removed after they were applied: a thread may be interrupted before, and then applies the rest later.
        runs, pending = inbox.answer_runs, inbox.pending
        while runs:
            self._apply_run(runs[0])
            runs.popleft()
        if pending:
            self._apply_messages(pending)
            pending.clear()
        if inbox.is_finished:  # closed, or we may not subscribe to it; the next publish subscribes again
            self._inbox = None
            self.fail(inbox.error or ConnectionClosed("closed before the acknowledgement came"))

    def _apply_messages(self, messages: Iterable[CoreMessage]) -> None:
        prefix = self._reply_prefix
        ours = [message for message in messages if message.subject.startswith(prefix)]
        tokens = [message.subject[len(prefix) :].encode(errors="surrogateescape") for message in ours]
        if not any(message.raw_headers for message in ours):
            self._apply_run(AnswerRun(prefix, tokens, [message.data for message in ours]))
            return
        for token, message in zip(tokens, ours, strict=True):
            self._apply_answer(token, message)

    def _apply_run(self, run: AnswerRun) -> None:
        if run.prefix != self._reply_prefix:
            return  # answers in an earlier inbox, whose messages are resolved
        acks = read_plain_acks(run.payloads)
        if acks is None:
            for token, payload in zip(run.tokens, run.payloads, strict=True):
                self._apply_answer(token, CoreMessage("", payload, None, None, None))
            return
        waiting = self._waiting
        for token, ack in zip(run.tokens, acks, strict=True):
            handle = waiting.get(token)
            if handle is not None:  # else it timed out before the answer came, or this is a second answer
                if not handle.cancelled():
                    handle.set_result(ack)
                del waiting[token]

    def _apply_answer(self, token: bytes, message: CoreMessage) -> None:
        """Resolve one message by an answer that is parsed separately."""
        handle = self._waiting.get(token)
        if handle is not None:
            if not handle.cancelled():
                _resolve(handle, message, self._connection)
            del self._waiting[token]

    def on_event(self, event: ConnectionEvent, now: float) -> None:
        """Handle an event of the connection."""
        match event:
            case Disconnected():
                self.on_replies(now)  # answers read before the end count
                self._on_disconnected(event)
            case Reconnected():
                self._session_began = now
            case Closed(error, _):
                self.fail(error or ConnectionClosed("closed before the acknowledgement came"))
            case ErrorReported(PermissionDenied(operation="publish") as error):
                denied = [token for token, known in self._waiting.items() if known.subject == error.subject]
                self._fail(denied, error)

    def publishes_to(self, subject: str) -> bool:
        """True if a message to this subject is outstanding, so that its handle gets a denial."""
        return any(known.subject == subject for known in self._waiting.values())

    def _on_disconnected(self, event: Disconnected) -> None:
        last_handed_over = event.published_messages - event.buffered_messages
        lost = [token for token, known in self._waiting.items() if known.number <= last_handed_over]
        if lost:
            self._fail(lost, ConnectionLost(event.reason, len(lost)))

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` has to be called next; None without a deadline."""
        if not self._waiting or not self._connection.is_connected:
            return None
        return self._deadline(next(iter(self._waiting.values())))

    def on_time(self, now: float) -> None:
        """Give up messages without an answer within ``ack_timeout``."""
        self.on_replies(now)  # answers read in time count
        if not self._connection.is_connected:
            return
        late = []
        for token, known in self._waiting.items():  # in order of publishing, so the first with time left ends the loop
            if self._deadline(known) > now:
                break
            late.append(token)
        for token in late:
            what = f"acknowledgement of a message to {self._waiting[token].subject!r}"
            self._fail([token], RequestTimeout(what, self.ack_timeout_s))

    def _deadline(self, known: Handle) -> float:
        return max(known.accepted_at, self._session_began) + self.ack_timeout_s

    def log_overlooked(self, logger: logging.Logger, error: BaseException | None) -> None:
        """Log a failed future that was garbage-collected before its error was retrieved.

        Logged at the first, and then at each doubling: loud enough to notice, quiet enough to survive a lost session.
        Only the error's text is logged: a handler that keeps records would also keep its traceback and the frames'
        variables.
        """
        self._overlooked += 1
        if self._overlooked.bit_count() == 1:
            logger.error("%d failed publishes whose error was not retrieved; last: %s", self._overlooked, str(error))

    def fail(self, error: Exception) -> None:
        """Give up all outstanding messages: each may be stored or not."""
        self._fail(list(self._waiting), error)

    def _fail(self, tokens: list[bytes], error: Exception) -> None:
        for token in tokens:
            _fail_one(self._waiting[token], error)
            del self._waiting[token]


class WindowBase:
    """The part of both drivers' windowed publishers that does not wait: facts, and waking."""

    _window: PublishWindow
    _runner: RunnerBase[PublishWindow]
    _connection: Connection
    _now: Callable[[], float]
    _room: CountedCrowd
    _all_done: Crowd
    _gather_until: float | None = None
    """When callers that wait for room continue with any room."""

    @property
    def outstanding(self) -> int:
        """Number of accepted messages without an acknowledgement."""
        return self._window.outstanding

    def _attempt(self, handle: Handle, subject: str, data: bytes, headers: HeadersLike | None) -> bool:
        return self._window.publish(handle, subject, data, headers, self._now())

    def _on_step(self) -> None:
        # Only the callers for whom it has changed: with a window of thousands, acknowledgements come far more often.
        if self._room and not self._window.is_full:
            self._give_room()
        if not self._window.outstanding:
            self._all_done.notify_all()
        if self._connection.is_closed:
            self._runner.detach()

    def _give_room(self) -> None:
        now, until = self._now(), self._gather_until
        if self._window.has_much_room or (until is not None and now >= until):
            self._gather_until = None
            self._room.notify_all()
        elif until is None:
            self._gather_until = now + GATHER_S
            self._runner.wake_at(self._gather_until)


def _resolve(handle: Handle, message: CoreMessage, connection: Connection) -> None:
    if is_no_responders(message):
        handle.set_exception(unavailable(handle.subject, connection.info))
        return
    try:
        ack = read_pub_ack(message)
    except Exception as error:  # any error, so that the answers behind it are read
        handle.set_exception(error)
    else:
        handle.set_result(ack)


def _fail_one(handle: Handle, error: Exception) -> None:
    if not handle.cancelled():
        handle.set_exception(error)
