"""The state of one subscription: unread messages, their bounds, and its end.

:class:`Subscriptions` is the table of a connection. Subscriptions outlive its sessions, and each session has a parser
of its own, which looks up the subscription of every message there. The parser caches the results, so that most messages
need no lookup; a removed subscription has to be removed from the cache as well.

``Connection.events()`` returns answers for waiting calls (``Done``, ``Failed``), subscriptions to read (``Ready``) and
connection events. ``handle`` is the driver's (a future, a waiter): it was given with the call, comes back here, and the
connection never looks at it.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, Unpack

from jetspark.core import frames
from jetspark.core.events import ConnectionEvent, SlowConsumer
from jetspark.core.machine import Reader
from jetspark.core.message import AnswerRun, CoreMessage
from jetspark.core.numbers import whole
from jetspark.core.options import ConnectOptions
from jetspark.core.parser import Parser

__all__ = [
    "Done",
    "Event",
    "Failed",
    "Ready",
    "SubscriptionKind",
    "SubscriptionState",
    "SubscriptionTraits",
    "Subscriptions",
    "pending_bounds",
]

# ---- one subscription ------------------------------------------------------------------------------------------------


# Bounds of a subscription that drops nothing, in messages and bytes: more than memory holds.
_NO_BOUNDS = (1 << 30, 1 << 40)


class SubscriptionTraits(TypedDict, total=False):
    """The use of a subscription, which decides how it is read and when it ends."""

    message_class: type[CoreMessage] | None
    """The class of its messages; None for the connection's."""
    is_inbox: bool
    """Answers come on subjects used once; nothing about them is remembered, and a drain leaves it open."""
    takes_runs: bool
    """The reader of an inbox takes answers in ``answer_runs``, too. It has no limit of messages."""
    answers_to: str
    """The subject of our requests: if we may not publish to it, the subscription ends with that error."""
    follows_sessions: bool
    """The reader is woken when a session begins, too: the requests of the session before have ended."""
    ends_with_session: bool
    """The subscription is over when the next session begins: the answers it waits for will not come."""


class SubscriptionKind(SubscriptionTraits, total=False):
    """The keyword arguments of :meth:`Connection.subscribe` except the reader, to be passed on."""

    max_pending_messages: int | None
    max_pending_bytes: int | None
    is_unbounded: bool


class SubscriptionState:
    """Messages between the network and their reader, within bounds.

    ``arrived`` is the parser's, filled while it reads a chunk; :meth:`accept_arrived` moves it to ``pending``, from
    which the reader takes. Messages beyond the bounds are dropped, counted in ``dropped`` and reported as an event:
    NATS core cannot slow a publisher down, so the alternative is that the server cuts us off.

    The subscription is over when ``is_finished`` (nothing more will arrive) and ``pending`` is empty. ``error`` says
    why, unless its owner ended it.
    """

    __slots__ = (
        "_pending_bytes_at_most",
        "answer_runs",
        "answers_to",
        "arrived",
        "counted_bytes",
        "counted_messages",
        "dropped",
        "ends_with_session",
        "error",
        "follows_sessions",
        "is_finished",
        "is_inbox",
        "is_slow",
        "max_messages",
        "max_pending_bytes",
        "max_pending_messages",
        "message_class",
        "pending",
        "queue",
        "reader",
        "received",
        "received_before",
        "sid",
        "subject",
    )

    def __init__(
        self,
        sid: int,
        subject: str,
        queue: str,
        *,
        max_pending_messages: int,
        max_pending_bytes: int,
        reader: Reader | None = None,
        **traits: Unpack[SubscriptionTraits],
    ) -> None:
        self.sid = sid
        self.subject = subject
        self.queue = queue
        self.max_pending_messages = max_pending_messages
        self.max_pending_bytes = max_pending_bytes
        self.reader = reader
        """Woken when messages have arrived; None if the connection itself reads them."""
        self.message_class = traits.get("message_class")
        self.is_inbox = traits.get("is_inbox", False)
        self.answers_to = traits.get("answers_to", "")
        self.follows_sessions = traits.get("follows_sessions", False)
        self.ends_with_session = traits.get("ends_with_session", False)
        self.arrived: list[CoreMessage] = []
        self.answer_runs: deque[AnswerRun] | None = deque() if traits.get("takes_runs") else None
        """Answers that were read together, for a reader that wants them as columns. They are in no other list, are not
        counted in ``received``, and have no bound: such a reader requests no more than it can hold."""
        self.counted_messages = self.counted_bytes = 0
        """The sizes of ``arrived`` and ``pending`` as the parser knows them; a reader that uses them sets both to 0."""
        self.pending: deque[CoreMessage] = deque()
        self._pending_bytes_at_most = 0
        self.received = 0
        self.received_before = 0
        """``received`` at the beginning of the present session: the server counts only since its SUB."""
        self.dropped = 0
        self.max_messages = 0
        """End after this many received in all; 0 is without end."""
        self.is_finished = False
        self.is_slow = False
        self.error: Exception | None = None

    @property
    def pending_bytes(self) -> int:
        # A copy, made in one step: other threads may take messages while this one counts.
        return sum([message.size_bytes for message in list(self.pending)])

    def accept_arrived(self, chunk_bytes: int) -> int:
        """Move the messages of a chunk of ``chunk_bytes`` bytes to ``pending``; returns how many had to be dropped."""
        arrived, pending = self.arrived, self.pending
        if self.is_finished:
            arrived.clear()
            self.counted_messages = 0
            return 0
        if self.max_messages:
            # The server counts too; but after a reconnect both counted from different beginnings.
            del arrived[self.max_messages - self.received :]
        self.received += len(arrived)
        # Counting bytes message by message, in and out, cost a tenth of the time a message takes. The chunks since
        # `pending` was last seen empty are an upper bound, which is made exact only when it passes the limit.
        self._pending_bytes_at_most = chunk_bytes + (self._pending_bytes_at_most if pending else 0)
        dropped = 0
        if (
            len(pending) + len(arrived) <= self.max_pending_messages
            and self._pending_bytes_at_most <= self.max_pending_bytes
        ):
            pending.extend(arrived)
        else:
            dropped = self._accept_within_bounds()
            self.dropped += dropped
        if self.is_slow and not dropped and self._is_half_empty():
            self.is_slow = False  # the next loss is a new event, not more of the last one
        arrived.clear()
        if self.max_messages and self.received >= self.max_messages:
            self.is_finished = True
        return dropped

    def _accept_within_bounds(self) -> int:
        dropped = 0
        pending_bytes = self.pending_bytes
        for message in self.arrived:
            size = message.size_bytes
            if len(self.pending) >= self.max_pending_messages or pending_bytes + size > self.max_pending_bytes:
                dropped += 1
            else:
                self.pending.append(message)
                pending_bytes += size
        self._pending_bytes_at_most = pending_bytes
        return dropped

    def _is_half_empty(self) -> bool:
        return len(self.pending) * 2 <= self.max_pending_messages and self.pending_bytes * 2 <= self.max_pending_bytes

    def take(self) -> CoreMessage:
        """The oldest message; raises ``IndexError`` when none is waiting."""
        return self.pending.popleft()

    def take_all(self) -> list[CoreMessage]:
        """Remove and return all unread messages, in order; other threads may take some of them at the same time."""
        found: list[CoreMessage] = []
        take = self.pending.popleft
        with suppress(IndexError):
            while True:
                found.append(take())
        return found


def pending_bounds(
    options: ConnectOptions, max_messages: int | None, max_bytes: int | None, *, is_unbounded: bool
) -> tuple[int, int]:
    """The bounds of unread messages, in messages and bytes: the subscription's own, or the connection's.

    Raises:
        ConfigError: A bound is not a whole number above 0.
    """
    if is_unbounded:
        return _NO_BOUNDS
    messages = options.max_pending_messages if max_messages is None else max_messages
    size = options.max_pending_bytes if max_bytes is None else max_bytes
    return whole("max_pending_messages", messages), whole("max_pending_bytes", size)


# ---- all of a connection ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Done:
    """An operation succeeded."""

    handle: Any
    result: Any = None


@dataclass(slots=True)
class Failed:
    """An operation failed."""

    handle: Any
    error: Exception


@dataclass(slots=True)
class Ready:
    """A subscription has messages to read, or is over."""

    subscription: SubscriptionState


Event: TypeAlias = Done | Failed | Ready | ConnectionEvent


class Subscriptions:
    """Every subscription that is not over, by the id it has at the server."""

    def __init__(self, message_class: type[CoreMessage] = CoreMessage, client: Any = None) -> None:
        """``message_class`` is the class of messages unless a subscription has its own; ``client`` is passed to
        them."""
        self.routes: dict[bytes, SubscriptionState] = {}
        """By id as it stands in a frame; the parser reads it for every message."""
        self._message_class, self._client = message_class, client
        self.parser = Parser(self.routes, message_class, client)
        """The parser of the present session."""
        self._last_sid = 0

    def begin_session(self) -> None:
        """Prepare for the bytes of another session."""
        self.parser = Parser(self.routes, self._message_class, self._client)

    @property
    def all(self) -> list[SubscriptionState]:
        """A copy, because a subscription may end during the iteration."""
        return list(self.routes.values())

    def new_sid(self) -> int:
        """An id for the next subscription. An id is never reused: messages of its last owner may still arrive."""
        self._last_sid += 1
        return self._last_sid

    def add(self, subscription: SubscriptionState) -> None:
        self.routes[b"%d" % subscription.sid] = subscription

    def answering(self, subject: str) -> list[SubscriptionState]:
        """The subscriptions whose answers come only if we may publish to the subject."""
        return [each for each in self.routes.values() if each.answers_to == subject]

    def named(self, subject: str, queue: str = "") -> list[SubscriptionState]:
        return [each for each in self.routes.values() if each.subject == subject and each.queue == queue]

    def restore(self) -> list[bytes]:
        """The commands that restore them in a new session, each with the rest of its message limit."""
        restored: list[bytes] = []
        for subscription in self.routes.values():
            restored.append(frames.sub(subscription.subject, subscription.queue, subscription.sid))
            subscription.received_before = subscription.received
            if subscription.max_messages:
                left = subscription.max_messages - subscription.received
                restored.append(frames.unsub(subscription.sid, left))
        return restored

    def deliver(self, subscription: SubscriptionState, events: list[Event]) -> None:
        """Hand over the messages that the parser read for it."""
        before = subscription.dropped
        if subscription.accept_arrived(self.parser.chunk_bytes):
            # Once at the beginning, then at each doubling: loud enough to notice, quiet enough to survive.
            if not subscription.is_slow or subscription.dropped.bit_length() > before.bit_length():
                events.append(SlowConsumer(subscription.subject, subscription.dropped))
            subscription.is_slow = True
        if subscription.is_finished:
            self._remove(subscription)
        events.append(Ready(subscription))

    def finish(self, subscription: SubscriptionState, events: list[Event]) -> None:
        """End a subscription: nothing more will arrive for it. A second call, after an interrupt, completes the
        first."""
        subscription.is_finished = True
        # The table decides, so that an event is sent once although an interrupt may repeat this.
        if b"%d" % subscription.sid in self.routes:
            events.append(Ready(subscription))
            self._remove(subscription)  # the last step: an interrupt before it repeats all of this

    def _remove(self, subscription: SubscriptionState) -> None:
        # It may be missing already: ending is repeated after an interrupt.
        if self.routes.pop(b"%d" % subscription.sid, None) is not None:
            self.parser.forget_routes()  # it caches the subscription of recent lines
