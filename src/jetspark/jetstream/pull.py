"""Pulling as a state machine: open requests, the messages they still owe, and the next request. Time is an argument.

A :class:`Puller` belongs to one subscription, on ``<inbox>.*``. Every request has its own reply subject there. The
server sends *messages* with the subject they were stored under, so a message does not show its request (several waiting
requests are served in turn); it sends *statuses* to the request's own subject. So the ledger keeps the requests, and
one number for all of them together::

    ask(batch) ──────> owed += batch
    a message ───────> owed -= 1                     at 0 every request is fulfilled
    a status that ends a request ──> owed -= its undelivered messages, which the server mostly reports

If the server does not report it, the whole batch counts as undelivered. The error is then to one side only: ``owed``
may be too low, so that a few messages too many are requested. It is never too high for long: a request that the server
has forgotten (two heartbeats missing, or long expired, or from an earlier session) is removed from the ledger.

A reader that keeps up requests more before everything has arrived, and may do so for hours: ``owed`` is never 0, and no
status shows which requests are fulfilled. The server serves requests in turn, so the oldest are. Beyond
``MAX_REQUESTS`` the oldest becomes a part of the next one of its reader.

Requests with ``max_bytes`` have a second number of that kind, ``_owed_bytes``. It is needed because the server sends no
status for a request whose bytes are used up exactly: at 0 bytes, too, every request is fulfilled.

A status has one of four consequences: none now (404, 408), another request (leader change, shutdown, a full queue, no
responder *yet*; after a growing pause), an error for the reader of the request (it breaks a rule of the consumer), or
an error for all readers (the consumer is gone).

Two kinds of readers request messages from a puller, and drivers run both alike: call ``step`` and do the result, which
is to publish an :class:`Ask`, to :class:`Wait`, to hand out messages, or to end. After a wait without an event they
call ``on_time``.

* :class:`Fetch` wants a number of messages within a time. Several may run at once; messages go to the first that
  takes them. Its request ends at the server a little before the fetch ends here, so that no request is left behind;
  messages that are late all the same stay in ``buffer`` for the next fetch. There are three kinds:

  - By default it takes the stored messages, and waits only if there are none. One request does both: ``no_wait`` with
    ``expires`` waits for the first message, sends the stored ones, and ends with a 404. It is called *one-shot* here.
    At most one of them is open at a time, for all fetches together: then every message is its own, and the ledger is
    exact. A fetch is over when it has messages and that request has ended.
  - ``fill`` waits until it has all messages or its time is over: a request with ``expires``.
  - ``no_wait`` never waits: a request without ``expires``.

  Where ``max_ack_pending`` is reached, the server does not end a request of the first or the last kind: it ends them
  when any request of the consumer expires or has a heartbeat (2.9 to 2.15). So after ``SILENT_S`` without a message, a
  fetch sends a *probe*, which requests one message and expires in ``PROBE_S``. The resulting 404 follows all messages
  of the fetch's request.
* :class:`Flow` wants messages without end, and keeps a window of requested or buffered messages.

Invariant: a waiting reader has a request at the server, or a time for its next request, or no session; then the next
session wakes it.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Required, TypedDict, TypeVar, Unpack, cast

from jetspark.codes import Code
from jetspark.core.arguments import flag, text
from jetspark.core.backoff import Backoff
from jetspark.core.headers import Status
from jetspark.core.numbers import INT64, seconds_above_0, whole
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import ConfigError, ConnectionClosed, ConsumerNotFound, ServerError
from jetspark.jetstream.acks import NEXT, AckableMessage
from jetspark.jetstream.config import ConsumerConfig
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.wire import seconds_to_ns

__all__ = [
    "Ask",
    "Fetch",
    "FetchKeywords",
    "Flow",
    "Priority",
    "PullLimits",
    "Puller",
    "Wait",
    "size_bytes",
    "unacknowledged_at_most",
]

M = TypeVar("M", bound=AckableMessage)

_logger = logging.getLogger("jetspark.pull")

# Made once: json.dumps() with separators makes an encoder for every call, which takes longer than encoding.
_to_json = json.JSONEncoder(separators=(",", ":")).encode

# An expired request gets its 408 within a round trip; a second later the 408 is lost.
GRACE_S = 1.0
# Longest silence after a no_wait request before it is given up.
NO_WAIT_S = 1.0
# The end of a request directly follows its last message, at any distance from the server; on a slow network a probe is
# harmless. Each further probe of a fetch waits twice as long.
SILENT_S = 0.05
# A probe that has expired before the server looks at it ends only itself.
PROBE_S = 0.02
# Heartbeats detect a dead consumer leader within the life of a request; a short request ends soon anyway.
HEARTBEAT_S = 5.0
SHORTEST_WITH_HEARTBEAT_S = 2.0
# A fetch's request ends this much before the fetch, or a tenth of it: its last messages are then on their way already.
MARGIN_S = 0.05
# Pause before a request after a refusal; doubled each time.
PAUSE = Backoff(first_s=0.05, max_s=1.0)
# Elections and restarts are over within seconds. A consumer that does not answer for this long is gone.
UNAVAILABLE_S = 20.0
# A flow with a bound of bytes reserves a sixteenth of it for each request, so that several can be open, if every
# message of a server with the default max_payload fits into that. Otherwise it learns the size of the messages first.
SHARES = 16
LARGEST_USUAL_BYTES = 1 << 20
# A flow begins with this many messages ahead. A reader that handles a whole window within KEEPS_UP_S gets twice as
# many, because the server waits between small requests. A reader that needs longer than SLOW_S gets the number that it
# handles in that time: messages waiting here are withheld from other readers, and their ack_wait is running.
FIRST_WINDOW = 500
# A flow asks for half of its window at least, so that there are two or three of its requests at the server at a time.
MAX_REQUESTS = 16
KEEPS_UP_S = 0.25
SLOW_S = 1.0
# A server drops a client with more than its `max_pending` buffered, 64 MiB by default, and the messages sent by then
# are lost until their ack_wait is over. So a reader without a bound of bytes requests at most a quarter of that at a
# time, by the size of the latest messages; a few before the first message; two, however large they are.
AHEAD_BYTES = 16 << 20
MIN_AHEAD = 2
FIRST_AHEAD = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """For consumers with a priority policy: the precedence of this reader."""

    group: str | None = None
    min_pending: int | None = None
    """``overflow``: only if at least this many messages wait."""
    min_ack_pending: int | None = None
    """``overflow``: only if at least this many are unacknowledged."""
    priority: int | None = None
    """``prioritized``: 0 to 9, lower first."""

    def __post_init__(self) -> None:
        if self.group is not None:
            text("group", self.group)
        for name, low, high in (("min_pending", 1, INT64), ("min_ack_pending", 1, INT64), ("priority", 0, 9)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), low=low, high=high)
        if self.group is None and (self.min_pending, self.min_ack_pending, self.priority) != (None, None, None):
            raise ConfigError("min_pending, min_ack_pending and priority belong to a priority group: give group= too")

    @classmethod
    def of(
        cls, group: str | None, min_pending: int | None, min_ack_pending: int | None, priority: int | None
    ) -> Priority | None:
        """The priority given in keywords; None without any.

        Raises:
            ConfigError: A preference is given without a group.
        """
        chosen = cls(group=group, min_pending=min_pending, min_ack_pending=min_ack_pending, priority=priority)
        return None if group is None else chosen

    def fields(self) -> dict[str, Any]:
        values = {
            "group": self.group,
            "min_pending": self.min_pending,
            "min_ack_pending": self.min_ack_pending,
            "priority": self.priority,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    """Bounds on the messages and bytes that a :class:`Flow` keeps ahead of its reader."""

    max_messages: int = 8192
    max_bytes: int | None = None
    """As the server counts: subject, reply subject, headers and data."""
    expires_s: float = 30.0
    """How long a request waits at the server before it is renewed."""
    heartbeat_s: float | None = None
    """Interval of heartbeats from an idle server; after two missing ones its request is given up."""

    def __post_init__(self) -> None:
        whole("max_messages", self.max_messages)
        _check_bytes(self.max_bytes)
        seconds_above_0("expires", self.expires_s)
        if self.heartbeat_s is not None and seconds_above_0("heartbeat", self.heartbeat_s) > self.expires_s / 2:
            raise ConfigError(
                f"heartbeat={self.heartbeat_s}: expected seconds above 0, and at most half of expires={self.expires_s}"
            )


@dataclass(frozen=True, slots=True)
class Ask:
    """Publish ``body`` to the consumer, with ``reply`` for the answers.

    With ``acknowledges`` it is published as the answer to that message: an ack and a request in one.
    """

    reply: str
    body: bytes
    acknowledges: AckableMessage | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for an arrival, or until this moment; None without a limit."""

    until: float | None


class _Reader:
    """The reader of a request, with the state that the request's end sets."""

    error: Exception | None = None
    is_over = False
    """True if the reader wants no more messages, even if some are missing."""
    must_empty = False
    """The rest of its bytes is too small for the next message."""
    has_all_there_is = False
    """The server has reported the end of the stored messages, after a request that brought some."""

    def on_too_large(self, max_bytes: int | None) -> None:
        """Fail, or adapt, because the next message alone is larger than ``max_bytes``."""
        self.error = ConfigError(
            f"max_bytes={max_bytes}: the next message alone is larger (subject, reply subject and headers count too); "
            "raise it"
        )


@dataclass(slots=True)
class _Request:
    reader: _Reader
    batch: int
    sent_at: float
    ends_at: float
    heartbeat_s: float | None
    max_bytes: int | None
    is_whole: bool
    """True if the request has all bytes of its reader's bound."""
    no_wait: bool
    """True if the request does not wait at the server."""
    is_one_shot: bool
    """True if the request waits only for the first message."""
    received_before: int
    """Number of messages received before it was sent."""
    priority: Priority | None
    older_messages: int = 0
    """Messages of requests that became a part of this one; very likely fulfilled."""
    older_bytes: int = 0

    @property
    def ends_itself(self) -> bool:
        """True if the server ends it before its batch is complete when no more messages are stored."""
        return self.no_wait or self.is_one_shot


class RequestTerms(TypedDict, total=False):
    """The terms of a request at which the server ends or delays it."""

    heartbeat_s: float | None
    max_bytes: int | None
    is_whole: bool
    """``max_bytes`` is the whole bound of the reader, and not the rest of it; True by default."""
    no_wait: bool
    is_one_shot: bool
    priority: Priority | None


class Puller(Generic[M]):
    """The requests of one consumer object, and the messages they brought."""

    def __init__(self, inbox: str, subject: str) -> None:
        """``inbox`` is subscribed to as ``<inbox>.*``; ``subject`` is the consumer's MSG.NEXT."""
        self.subject = subject
        self.buffer: deque[M] = deque()
        self.owed = 0
        """Messages that requests at the server may still bring."""
        self.error: Exception | None = None
        self.wake_at = 1
        """Number of buffered messages at which a reader is woken."""
        self.has_news = False
        """An event that readers have to handle: a status, a session, or the end."""
        self.fetches: list[Fetch[M]] = []
        self.idle_s = 0.0
        """Requests without an end of their own wait at least this long, and heartbeats are no more frequent than every
        quarter of it. A driver in virtual time sets it: there waiting is free and every heartbeat costs."""
        self.message_bytes = 0.0
        """Average size of the latest messages; 0 before the first."""
        self._owed_bytes = 0
        """Bytes owed by the requests with a bound of bytes."""
        self._received = 0
        """Number of messages received in all."""
        self._prefix = f"{inbox}."
        self._requests: dict[str, _Request] = {}
        self._last_token = 0
        self._heard_at = float("-inf")
        self._session = 0
        self._refusals = 0
        self._ask_at = float("-inf")
        self._unavailable_since: float | None = None
        self._groups: set[str] = set()
        self._pin_ids: dict[str, str] = {}

    @property
    def outstanding(self) -> int:
        """Number of open requests."""
        return len(self._requests)

    @property
    def owed_bytes(self) -> int:
        """Bytes that requests with a bound of bytes may still bring."""
        return self._owed_bytes

    @property
    def most_at_a_time(self) -> int:
        """The most messages to have requested at a time, for readers without a bound of bytes."""
        return max(int(AHEAD_BYTES / self.message_bytes), MIN_AHEAD) if self.message_bytes else FIRST_AHEAD

    @property
    def heard_at(self) -> float:
        """When a message or status last arrived."""
        return self._heard_at

    @property
    def is_unavailable(self) -> bool:
        """True if the last request had no responder."""
        return self._unavailable_since is not None

    @property
    def _names(self) -> tuple[str, str]:
        """The names of the stream and of the consumer."""
        _, stream, consumer = self.subject.rsplit(".", 2)
        return stream, consumer

    def has_request_of(self, reader: _Reader) -> bool:
        return any(request.reader is reader for request in self._requests.values())

    def has_request_with(self, priority: Priority | None) -> bool:
        return any(request.priority == priority for request in self._requests.values())

    @property
    def has_one_shot(self) -> bool:
        """True if a request is open that ends with the first messages it brings."""
        return any(request.is_one_shot for request in self._requests.values())

    def may_ask_at(self) -> float:
        """The earliest time for a request: the server has just refused one."""
        return self._ask_at

    def wants_wake(self) -> bool:
        """True if a reader has to be woken for the arrivals; clears ``has_news``."""
        news, self.has_news = self.has_news, False
        return news or len(self.buffer) >= self.wake_at

    def pop_messages(self, count: object) -> list[M]:
        """Remove and return ``count`` buffered messages; all of them after a wait, when ``count`` is not a number."""
        take = self.buffer.popleft
        return [take() for _ in range(count if isinstance(count, int) else len(self.buffer))]

    # ---- asking ------------------------------------------------------------------------------------------------

    def ask(
        self,
        reader: _Reader,
        batch: int,
        *,
        now: float,
        expires_s: float,
        **terms: Unpack[RequestTerms],
    ) -> Ask:
        """Enter a request into the ledger; the driver must publish it at once, or call :meth:`withdraw`."""
        no_wait, is_one_shot = terms.get("no_wait", False), terms.get("is_one_shot", False)
        heartbeat_s, max_bytes = terms.get("heartbeat_s"), terms.get("max_bytes")
        priority = terms.get("priority")
        self._last_token += 1
        token = str(self._last_token)
        body: dict[str, Any] = {"batch": batch}
        if no_wait or is_one_shot:
            body["no_wait"] = True  # together with `expires` it waits for the first message
        if not no_wait:
            body["expires"] = seconds_to_ns(expires_s)
            if heartbeat_s is not None:
                body["idle_heartbeat"] = seconds_to_ns(heartbeat_s)
        if max_bytes is not None:
            body["max_bytes"] = max_bytes
        if priority is not None:
            body |= priority.fields()
            group = priority.group
            if group is not None:
                self._groups.add(group)
            if group in self._pin_ids:
                body["id"] = self._pin_ids[group]
        if len(self._requests) >= MAX_REQUESTS:
            self._merge_oldest()
        ends_at = now + (NO_WAIT_S if no_wait else expires_s + GRACE_S)
        self._requests[token] = _Request(
            reader,
            batch,
            now,
            ends_at,
            None if no_wait else heartbeat_s,
            max_bytes,
            terms.get("is_whole", True),
            no_wait,
            is_one_shot,
            self._received,
            priority,
        )
        self.owed += batch
        self._owed_bytes += max_bytes or 0
        return Ask(self._prefix + token, _to_json(body).encode())

    def withdraw(self, ask: Ask) -> None:
        """Remove a request that was not published."""
        self._strike(ask.reply.removeprefix(self._prefix))

    # ---- arrivals ----------------------------------------------------------------------------------------------

    def on_replies(self, inbox: SubscriptionState, now: float) -> bool:
        """Read the arrivals of the inbox; True if a reader has to be woken."""
        arrived = cast("list[M]", list(inbox.pending))
        inbox.pending.clear()
        counted, inbox.counted_messages, inbox.counted_bytes = (inbox.counted_messages, inbox.counted_bytes), 0, 0
        if arrived:
            self.absorb(arrived, now, counted)
        else:
            self.has_news = True  # another session, or the end of the subscription
        if inbox.is_finished and self.error is None:
            self.error = inbox.error or ConnectionClosed("the consumer's subscription is over")
        return self.wants_wake()

    def absorb(self, arrived: list[M], now: float, counted: tuple[int, int] = (0, 0)) -> None:
        """Read received messages and statuses; ``counted`` has the number and total size of those with a known size.

        The list is consumed.
        """
        self._heard_at = now
        counted_messages, counted_bytes = counted
        messages, places = arrived, list[int]()
        if counted_messages != len(arrived):
            # Every message of a stream has a reply subject, no status has.
            places = [place for place, each in enumerate(arrived) if each.raw_reply is None]
        statuses = [arrived[place] for place in places]
        for place in reversed(places):  # few, so that this is faster than picking the messages between them
            del messages[place]
        if messages:
            self.buffer.extend(messages)
            self._received += len(messages)
            is_counted = counted_messages == len(messages)
            self._record_size(messages, counted_bytes if is_counted else None)
            if self._owed_bytes:
                self._owed_bytes -= counted_bytes if is_counted else _size_of_all(messages)
            self._set_owed(self.owed - len(messages))
            self._clear_refusals()
            if self._groups:
                self._remember_pin(messages)
        for each in statuses:
            status = each.status
            token = each.subject.removeprefix(self._prefix)
            if status is None:
                _logger.warning("%s: ignored a message without a reply subject or a status: %r", self.subject, each)
            elif status.code == 100:
                self._on_heartbeat(each)
            else:
                self._on_status(token, status, each, now)
        if self._owed_bytes <= 0 and self._requests and all(each.max_bytes for each in self._requests.values()):
            self.has_news = True
            self._forget_requests()

    def _record_size(self, messages: list[M], counted_bytes: int | None) -> None:
        if counted_bytes is not None:
            size = counted_bytes / len(messages)
        else:
            # Two messages suffice: large messages arrive with few others.
            size = max(size_bytes(messages[0]), size_bytes(messages[-1]))
        self.message_bytes += (size - self.message_bytes) / (8 if self.message_bytes else 1)

    def _on_heartbeat(self, message: M) -> None:
        """The server has nothing to send. Most readers only need the time of the arrival."""

    def _on_status(self, token: str, status: Status, message: M, now: float) -> None:
        if status.code == 409 and status.description.startswith("Consumer Deleted"):
            self.error = ConsumerNotFound(404, Code.CONSUMER_NOT_FOUND.value, "it was deleted", *self._names)
            self.has_news = True
            self._forget_requests()
            return
        undelivered = message.headers.get("Nats-Pending-Messages", "")
        bytes_left = message.headers.get("Nats-Pending-Bytes", "")
        request = self._strike(
            token,
            int(undelivered) if is_count(undelivered) else None,
            int(bytes_left) if is_count(bytes_left) else None,
        )
        if request is None:
            return  # removed before, or fulfilled: the status only confirms it
        reader = request.reader
        text = status.description
        match status.code:
            case 404 | 408 if request.no_wait:
                reader.is_over = True
                self._clear_refusals()
            case 404 if request.is_one_shot and self._received > request.received_before:
                reader.has_all_there_is = True
                self._clear_refusals()
            case 408 if text != "Requests Pending":
                self._clear_refusals()
            case 409 if text.startswith("Batch Completed"):
                self._clear_refusals()
            case 409 if text.startswith("Message Size Exceeds MaxBytes"):
                self._clear_refusals()
                if undelivered != str(request.batch):
                    reader.is_over = True  # it got some messages, and the next one does not fit any more
                elif request.is_whole:
                    reader.on_too_large(request.max_bytes)
                else:
                    reader.must_empty = True
            case 409 if text.startswith("Exceeded MaxRequest"):
                reader.error = ConfigError(f"the consumer allows less in one request: {text}")
            case 409 if text.startswith("Consumer is push based"):
                reader.error = ServerError(409, 0, text, *self._names)
            case 400 | 412:
                reader.error = ServerError(status.code, 0, text, *self._names)
            case 423:
                if request.priority is not None and request.priority.group is not None:
                    self._pin_ids.pop(request.priority.group, None)
                self._pause(now)
            case 503:
                if self._unavailable_since is None:
                    self._unavailable_since = now
                elif now - self._unavailable_since >= UNAVAILABLE_S:
                    self.error = unavailable(self.subject)
                self._pause(now)
            case 404 | 408:  # a request that could have waited: the consumer is paused, or its queue is full
                self._pause(now)
            case _:
                if status.code != 409 or not text.startswith(("Leadership Change", "Server Shutdown", "Exceeded Max")):
                    _logger.warning("%s: unknown status %d %r; asking again", self.subject, status.code, text)
                self._pause(now)

    def on_session(self, session: int) -> None:
        """Requests end with the session they were sent in."""
        if session != self._session:
            self._session = session
            self._forget_requests()
            self._clear_refusals()

    # ---- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When the next request has to be given up."""
        return min(map(self._given_up_at, self._requests.values()), default=None)

    def on_time(self, now: float) -> None:
        """Remove requests that the server must have forgotten, after a while without an arrival."""
        for token in [token for token, request in self._requests.items() if now >= self._given_up_at(request)]:
            request = self._strike(token)
            if request is not None and request.no_wait:
                request.reader.is_over = True

    def _given_up_at(self, request: _Request) -> float:
        if request.no_wait:
            return max(self._heard_at, request.sent_at) + NO_WAIT_S
        if request.heartbeat_s is None:
            return request.ends_at
        return min(request.ends_at, max(self._heard_at, request.sent_at) + 2 * request.heartbeat_s)

    # ---- leaving -----------------------------------------------------------------------------------------------

    def release(self) -> list[bytes]:
        """Give up the buffered messages: returns the reply subjects for their naks."""
        replies = [each.raw_reply for each in self.buffer if each.raw_reply is not None]
        self.buffer.clear()
        self._forget_requests()
        return replies

    # ---- small steps -------------------------------------------------------------------------------------------

    def _strike(self, token: str, undelivered: int | None = None, bytes_left: int | None = None) -> _Request | None:
        request = self._requests.pop(token, None)
        if request is not None:
            self.has_news = True
            if request.max_bytes is not None:
                self._owed_bytes -= request.max_bytes + request.older_bytes if bytes_left is None else bytes_left
            whole_batch = request.batch + request.older_messages
            self._set_owed(self.owed - (whole_batch if undelivered is None else undelivered))
        return request

    def _merge_oldest(self) -> None:
        (token, oldest), (_, following) = islice(self._requests.items(), 2)
        if oldest.reader is following.reader and not (oldest.ends_itself or following.ends_itself):
            following.older_messages += oldest.batch + oldest.older_messages
            following.older_bytes += (oldest.max_bytes or 0) + oldest.older_bytes
            del self._requests[token]

    def _set_owed(self, owed: int) -> None:
        if owed <= 0 or not self._requests:
            self._forget_requests()
        else:
            self.owed = owed

    def _forget_requests(self) -> None:
        self._requests.clear()
        self.owed = self._owed_bytes = 0

    def _clear_refusals(self) -> None:
        self._refusals = 0
        self._ask_at = float("-inf")
        self._unavailable_since = None

    def _pause(self, now: float) -> None:
        self._refusals += 1
        self._ask_at = now + PAUSE.wait_s(self._refusals)

    def _remember_pin(self, messages: list[M]) -> None:
        for each in reversed(messages):
            if each.raw_headers is not None and (pin_id := each.headers.get("Nats-Pin-Id")):
                # Messages do not name their group. A reader of two groups gets a 423 once, and forgets the pin.
                self._pin_ids |= dict.fromkeys(self._groups, pin_id)
                return


class FetchKeywords(TypedDict, total=False):
    """Options of :class:`Fetch`."""

    timeout_s: Required[float]
    max_bytes: int | None
    no_wait: bool
    fill: bool
    priority: Priority | None
    acknowledges: AckableMessage | None
    """A message that the first request also acknowledges, if a request is sent."""


class Fetch(_Reader, Generic[M]):
    """Up to ``count`` messages within ``timeout_s``."""

    def __init__(
        self,
        puller: Puller[M],
        count: int,
        *,
        now: float,
        max_ack_pending: int | None = None,
        **options: Unpack[FetchKeywords],
    ) -> None:
        """``max_ack_pending`` is the consumer's: the server sends no more than this without an acknowledgement."""
        count = whole("n", count)
        timeout_s = seconds_above_0("timeout", options["timeout_s"])
        max_bytes = options.get("max_bytes")
        _check_bytes(max_bytes)
        no_wait = self._no_wait = flag("no_wait", options.get("no_wait", False))
        fill = flag("fill", options.get("fill", False))
        if fill and no_wait:
            raise ConfigError("no_wait=True and fill=True contradict each other: give one of them")
        # For one message the two are the same, and a request without `no_wait` keeps its position in the server's
        # queue.
        self._takes_what_is_there = not (no_wait or fill or count == 1)
        if self._takes_what_is_there and max_ack_pending is not None:
            # A larger request would wait for acknowledgements of messages that its reader has not seen yet.
            count = min(count, max_ack_pending)
        self.messages: list[M] = []
        self._puller = puller
        self._count = count
        self._bytes_left = max_bytes
        self._max_bytes = max_bytes
        self._priority = options.get("priority")
        self.deadline = now + (min(timeout_s, NO_WAIT_S) if no_wait else timeout_s)
        self._margin_s = min(MARGIN_S, timeout_s / 10)
        self._quarter_s = (self.deadline - now) / 4
        self._asked_at = now
        self._probes = 0
        self._has_asked = False
        self._asked_for_less = False
        self._acknowledges = options.get("acknowledges")
        puller.fetches.append(self)

    @property
    def need(self) -> int:
        return self._count - len(self.messages)

    def step(self, now: float, session: int | None) -> Ask | Wait | None:
        """The next step; None when the fetch is over. ``session`` is None while there is no connection."""
        puller = self._puller
        self._collect()
        if not self.need or (self.is_over and not puller.error):
            return None
        error = self.error or puller.error
        if error is not None:
            if self.messages:
                return None  # the messages count; the error will be repeated, or is over
            puller.error = None  # raised once: the next fetch may find the consumer again
            raise error
        if now >= self.deadline:
            # An empty list means that no message is stored. A consumer without a responder must be an error instead.
            if puller.is_unavailable and not self.messages:
                raise unavailable(puller.subject)
            return None
        if session is not None:
            puller.on_session(session)
        puller.wake_at = self._wake_at()
        is_asking = session is not None and (puller.has_one_shot or puller.has_request_of(self))
        if self._takes_what_is_there and self.messages and not is_asking:
            if self.has_all_there_is or not self._asked_for_less or session is None:
                return None
            self._no_wait = True  # more may be stored than the bytes allowed to request: fetch only stored messages
        if session is None:
            return Wait(self.deadline)  # the next session wakes us: the subscription follows sessions
        probe_at = self._probe_at() if is_asking else self.deadline
        if probe_at <= now:
            return self._probe(now)
        shortfall, is_nobody_asking = self._shortfall()
        if self._max_bytes is None:
            shortfall = self._within_bytes(shortfall, is_nobody_asking)
        if shortfall > 0:
            # This close to the deadline the answer would be late, and stay in the buffer for the next fetch.
            if self._has_asked and now >= self.deadline - 2 * self._margin_s:
                return Wait(self.deadline) if puller.owed or puller.is_unavailable else None
            if now < puller.may_ask_at():
                return Wait(min(puller.may_ask_at(), self.deadline))
            if self._has_asked and self.must_empty:
                return None  # the next message is too large for the rest of the bytes: the fetch is complete
            return self._ask(min(shortfall, self.need), now)
        deadline = puller.next_deadline()
        return Wait(min(probe_at, self.deadline if deadline is None else deadline))

    def _probe_at(self) -> float:
        """When to probe a silent server that may have left a request open; the deadline if it cannot have."""
        if not (self._no_wait or (self._takes_what_is_there and self.messages)):
            return self.deadline
        # Without any message even the first answer may be on its way: some round trips are longer than ``SILENT_S``.
        silent_s = (SILENT_S if self.messages else self._quarter_s) * 2**self._probes
        at = max(self._puller.heard_at, self._asked_at) + silent_s
        return at if at < self.deadline - 2 * self._margin_s else self.deadline

    def _probe(self, now: float) -> Ask:
        self._asked_at = now
        self._probes += 1
        left, priority = self._bytes_left, self._priority
        return self._puller.ask(self, 1, now=now, expires_s=PROBE_S, max_bytes=left, priority=priority)

    def _wake_at(self) -> int:
        """The number of buffered messages that completes a fetch; the other fetches then wait again."""
        puller = self._puller
        fewest = min(each.need for each in puller.fetches)
        eager = [each for each in puller.fetches if each._takes_what_is_there]
        if not all(each.messages for each in eager):
            return 1  # it returns soon after the first message
        if eager:
            fewest = min(fewest, max(puller.owed, 1))  # a request whose batch is complete ends without a status
        return fewest

    def _shortfall(self) -> tuple[int, bool]:
        """The number of messages without a request, and True if no open request may bring messages for this fetch."""
        puller = self._puller
        if self._no_wait:  # requests of other fetches may wait for messages
            shortfall = 0 if puller.has_request_of(self) else self.need
            return shortfall, shortfall > 0
        is_nobody_asking = not puller.has_request_with(self._priority)
        if is_nobody_asking:
            return self.need, True  # requests of other fetches may wait for messages of another priority
        if self._takes_what_is_there:
            return 0, False  # a request waits at the server, so nothing is stored; this fetch asks when it has ended
        # For all fetches together: the server does not tell the request of a message.
        return sum(each.need for each in puller.fetches if not each._takes_what_is_there) - puller.owed, False

    def _within_bytes(self, shortfall: int, is_nobody_asking: bool) -> int:
        """The number of messages to request now; the rest follows when half of the owed messages have arrived."""
        puller = self._puller
        most = puller.most_at_a_time
        if puller.owed + shortfall > most:
            shortfall = max(most - puller.owed, min(MIN_AHEAD, shortfall) if is_nobody_asking else 0)
            if puller.owed > most // 2 and not is_nobody_asking:
                shortfall = 0
        self._asked_for_less = self.need > puller.owed + shortfall
        if self._asked_for_less:
            puller.wake_at = min(puller.wake_at, max(puller.owed - most // 2, 1))
        return shortfall

    def leave(self, *, is_cancelled: bool) -> None:
        """Call it at the end. Messages of a cancelled fetch are kept for the next one."""
        if self in self._puller.fetches:
            self._puller.fetches.remove(self)
        if is_cancelled:
            self._puller.buffer.extendleft(reversed(self.messages))
            self.messages = []

    def _ask(self, batch: int, now: float) -> Ask:
        self._has_asked, self.has_all_there_is = True, False
        self._asked_at = now
        expires_s = max(self.deadline - now - self._margin_s, 0.001)
        ask = self._puller.ask(
            self,
            batch,
            now=now,
            expires_s=expires_s,
            heartbeat_s=self._heartbeat_s(expires_s),
            max_bytes=self._bytes_left,
            is_whole=self._bytes_left == self._max_bytes,
            no_wait=self._no_wait,
            is_one_shot=self._takes_what_is_there and not self._no_wait,
            priority=self._priority,
        )
        if self._acknowledges is None or self._acknowledges.is_answered:
            return ask
        return Ask(ask.reply, NEXT + ask.body, self._acknowledges)

    def _heartbeat_s(self, expires_s: float) -> float | None:
        if expires_s < SHORTEST_WITH_HEARTBEAT_S:
            return None
        return min(max(HEARTBEAT_S, self._puller.idle_s / 4), expires_s / 4)

    def _collect(self) -> None:
        buffer = self._puller.buffer
        if self._bytes_left is None:
            if self.need >= len(buffer):
                self.messages.extend(buffer)
                buffer.clear()
            else:
                self.messages.extend([buffer.popleft() for _ in range(self.need)])
            return
        while buffer and self.need:
            size = size_bytes(buffer[0])
            if self.messages and size > self._bytes_left:
                self.is_over = True
                return
            self._bytes_left -= size
            self.messages.append(buffer.popleft())
        if self._bytes_left <= 0:
            self.is_over = True


class Flow(_Reader, Generic[M]):
    """Messages without end, within a window.

    The window is in messages, and follows the reader's pace up to ``max_messages``. Large messages make it smaller
    (``AHEAD_BYTES``). With ``max_bytes`` there is a window of bytes instead. Its invariant: owed and buffered bytes
    together never exceed the bound. Counting the buffer's bytes takes time, so it is done only when the bound might be
    reached: ``_claimed_bytes`` is never below the true figure.
    """

    def __init__(self, puller: Puller[M], limits: PullLimits, priority: Priority | None = None) -> None:
        self._puller, self._limits, self._priority = puller, limits, priority
        self._heartbeat_s = limits.heartbeat_s
        if limits.heartbeat_s is None and limits.expires_s >= SHORTEST_WITH_HEARTBEAT_S:
            self._heartbeat_s = min(HEARTBEAT_S, limits.expires_s / 4)
        self._window = min(FIRST_WINDOW, limits.max_messages)
        self._handed_out, self._handed_out_at = 0, 0.0
        self._taken, self._busy_s, self._since = 0, 0.0, 0.0
        """Number of messages handed out since the time ``_since``, and the seconds the reader worked on them."""
        self.deadline: float | None = None
        """The end of a wait for room to send a request; a fetch has one, too."""
        self._claimed_bytes = 0
        all_bytes = limits.max_bytes or 0
        self._largest_bytes = 0 if all_bytes >= SHARES * LARGEST_USUAL_BYTES else all_bytes
        """The size of the largest message in the buffer at the last count."""

    def step(self, now: float, session: int | None) -> Ask | Wait | int | None:
        """The next step; a number is how many buffered messages to hand out before the next call."""
        puller = self._puller
        if session is not None:
            puller.on_session(session)
        self._adapt(now)
        buffered = len(puller.buffer)
        error = self.error or puller.error
        if error is not None:
            if buffered:
                return buffered  # these were delivered before the error
            raise error
        # Requested at half of the window: the server then sends the second half while the reader works on the first.
        window = self._within_bytes()
        half = window // 2
        ahead = puller.owed + buffered
        has_bytes = self._has_bytes()
        is_low = ahead <= half and has_bytes
        may_ask = is_low and session is not None
        if may_ask and now >= puller.may_ask_at():
            return self._ask(max(window - ahead, 1), now)
        # Otherwise the server has just refused, or there is no session: the reader continues with the buffered
        # messages.
        if not buffered:
            deadlines = (puller.next_deadline(), puller.may_ask_at() if may_ask else None)
            return Wait(min((each for each in deadlines if each is not None), default=None))
        if is_low:
            count = 1  # a request is due, and was not possible: try again after each message
        elif not has_bytes:
            count = max(1, buffered // 8)  # the bytes are counted again each time
        else:
            count = min(buffered, ahead - half)  # up to the point where a request is due
        self._handed_out, self._handed_out_at = count, now
        return count

    def _adapt(self, now: float) -> None:
        """Size the window for a reader that comes back for more."""
        if not self._handed_out:
            return
        self._taken += self._handed_out
        self._busy_s += now - self._handed_out_at
        self._handed_out = 0
        if self._busy_s > SLOW_S:
            self._window = max(1, min(int(self._taken * SLOW_S / self._busy_s), self._window))
        elif self._taken < self._window:
            return
        elif now - self._since < KEEPS_UP_S:
            self._window = min(2 * self._window, self._limits.max_messages)
        self._taken, self._busy_s, self._since = 0, 0.0, now

    def _within_bytes(self) -> int:
        """The window, reduced for large messages; a bound of bytes does that itself."""
        return self._window if self._limits.max_bytes is not None else min(self._window, self._puller.most_at_a_time)

    def _has_bytes(self) -> bool:
        """True if half of the bytes are free, or all of them if the next message needs them."""
        max_bytes = self._limits.max_bytes
        if max_bytes is None:
            return True
        puller = self._puller
        most = 0 if self.must_empty else max_bytes // 2
        if self._claimed_bytes > most:
            sizes = [size_bytes(each) for each in puller.buffer]
            self._claimed_bytes = max(puller.owed_bytes, 0) + sum(sizes)
            self._largest_bytes = max(sizes, default=self._largest_bytes)
        return self._claimed_bytes <= most

    def _ask(self, batch: int, now: float) -> Ask:
        limits = self._limits
        max_bytes = None
        if limits.max_bytes is not None:
            if self.must_empty:
                self._largest_bytes = limits.max_bytes
            # Twice the largest for each: the number of messages then ends the request, not their size.
            wanted = max(limits.max_bytes // SHARES, 2 * batch * self._largest_bytes)
            max_bytes = min(wanted, limits.max_bytes - self._claimed_bytes)
            self._claimed_bytes += max_bytes
        self.must_empty = False
        expires_s, heartbeat_s = self._times()
        return self._puller.ask(
            self,
            batch,
            now=now,
            expires_s=expires_s,
            heartbeat_s=heartbeat_s,
            max_bytes=max_bytes,
            is_whole=max_bytes == limits.max_bytes,
            priority=self._priority,
        )

    def _times(self) -> tuple[float, float | None]:
        """How long a request waits at the server, and the interval of its heartbeats."""
        expires_s, idle_s = self._limits.expires_s, self._puller.idle_s
        return (expires_s, self._heartbeat_s) if idle_s <= expires_s else (idle_s, idle_s / 4)


def unacknowledged_at_most(config: ConsumerConfig) -> int | None:
    """The most messages that the server sends without an acknowledgement; None if it has no limit."""
    limit = config.max_ack_pending
    return limit if limit is not None and limit > 0 and config.ack_policy != "none" else None


def size_bytes(message: AckableMessage) -> int:
    """The message's size as counted by a request's ``max_bytes``."""
    subject = message.subject
    subject_bytes = len(subject) if subject.isascii() else len(subject.encode(errors="surrogateescape"))
    return subject_bytes + len(message.raw_reply or b"") + message.size_bytes


def _size_of_all(messages: list[M]) -> int:
    """The sizes of many messages together, in half the time."""
    subjects = "".join([each.subject for each in messages])
    subject_bytes = len(subjects) if subjects.isascii() else len(subjects.encode(errors="surrogateescape"))
    reply_bytes = len(b"".join([each.raw_reply or b"" for each in messages]))
    header_bytes = sum([len(each.raw_headers) for each in messages if each.raw_headers is not None])
    return subject_bytes + reply_bytes + header_bytes + sum([len(each.data) for each in messages])


is_count = re.compile(r"[0-9]{1,19}").fullmatch


def _check_bytes(max_bytes: int | None) -> None:
    if max_bytes is not None:
        whole("max_bytes", max_bytes, instead="or None")
