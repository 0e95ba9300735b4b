"""Pull consumers: waiting requests, deliveries, and redeliveries. Pure; time is an argument.

A consumer walks its stream once, from ``next_sequence`` on; redeliveries wait in ``redeliveries``, and are sent first.
Every delivery has a number (the consumer sequence), a redelivery too::

    new ──deliver──> pending ──ack, term──> done
                       │  ^
      nak, ack_wait over  │ deliver again: not before the delay of a nak is over
                       v  │
                   redeliveries ── max_deliver reached ──> given up: not pending any more, and never acked

Requests are served in turn, one message each, beginning with the oldest. One without ``no_wait`` stays until it has its
batch or expires; one with it stays as long as there are messages to send.

Some behaviour of nats-server 2.15.1 may be unexpected:

- ``max_ack_pending`` holds back only new messages, not redeliveries; a message with a delayed nak still counts in it. A
  request with ``no_wait`` that meets the limit is not ended before any request expires or has a heartbeat.
- ``max_deliver`` is checked at the next delivery, so a message that has used it up stays pending until the next pull.
Only with a limit of 1 the end of the ``ack_wait`` ends it.
- After an expired ``ack_wait`` redeliveries are sent by sequence; a message with a nak is queued behind the others.
- A request that waits during a pause is served when the pause expires. If a client ends the pause, the request is
served only after another event: a publish, another request, an answer.
- The time of a delivery counts from its last one or ``in_progress``; with ``backoff`` each delivery has its own time.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jetspark.core.headers import Headers, Status
from jetspark.core.subjects import matches
from jetspark.errors import ConfigError
from jetspark.jetstream.config import ConsumerConfig
from jetspark.testing.model import replies
from jetspark.testing.model.replies import Delivery
from jetspark.testing.model.store import ModelMessage, Store

__all__ = ["ModelConsumer", "PullRequest", "check_consumer"]

DEFAULT_ACK_WAIT_S = 30.0
DEFAULT_MAX_ACK_PENDING = 1000
DEFAULT_MAX_WAITING = 512
# Default idle time after which a consumer without a durable name is deleted.
DEFAULT_INACTIVE_S = 5.0
# Deadlines that are closer together than this are handled together.
TIMER_S = 0.01

_NOT_MODELLED = (
    "deliver_subject",
    "deliver_group",
    "flow_control",
    "idle_heartbeat_s",
    "rate_limit_bits_per_s",
    "sample_frequency",
)
_PENDING_MESSAGES, _PENDING_BYTES = "Nats-Pending-Messages", "Nats-Pending-Bytes"


@dataclass(slots=True)
class PullRequest:
    """A pull request that waits at the server."""

    reply: str
    batch: int
    expires_at: float | None
    is_no_wait: bool
    max_bytes: int
    heartbeat_s: float
    group: str = ""
    pin_id: str = ""
    delivered: int = 0
    bytes_left: int = 0
    heartbeat_at: float = 0.0

    @property
    def left(self) -> int:
        return self.batch - self.delivered


@dataclass(slots=True)
class _Pending:
    """A message that was delivered and not acknowledged."""

    consumer_sequence: int
    """The consumer sequence of its first delivery."""
    since: float
    """The time of its last delivery or ``in_progress``; with a delayed nak, ``ack_wait`` before the delay's end."""


def check_consumer(config: ConsumerConfig) -> None:
    """
    Raises:
        ConfigError: The model does not support one of its fields.
    """
    if named := [name for name in _NOT_MODELLED if getattr(config, name)]:
        raise ConfigError(f"{', '.join(named)}: the model does not know these; use a real server")
    if config.replay_policy not in (None, "instant"):
        raise ConfigError(f"replay_policy={config.replay_policy!r}: the model knows only 'instant'; use a real server")
    if config.ack_policy not in (None, "none", "all", "explicit"):
        raise ConfigError(f"ack_policy={config.ack_policy!r}: the model does not know it; use a real server")
    if config.priority_policy not in (None, "none", "pinned_client"):
        raise ConfigError(
            f"priority_policy={config.priority_policy!r}: the model knows only 'pinned_client'; use a real server"
        )


class ModelConsumer:
    """One pull consumer of a stream.

    Args:
        name: Given by the client, or generated.
        config: The client's configuration, with the server's defaults filled in.
        store: The messages of its stream.
        created_at: The time.
        has_interest: True if a subject has a subscriber; a request without one on its inbox is dropped.
        new_pin: Generates a pin id.
    """

    def __init__(
        self,
        name: str,
        stream: str,
        config: ConsumerConfig,
        store: Store,
        created_at: float,
        *,
        has_interest: Callable[[str], bool],
        new_pin: Callable[[], str],
    ) -> None:
        check_consumer(config)
        self.name, self.stream, self.config, self.created_at = name, stream, config, created_at
        self._store, self._has_interest, self._new_pin = store, has_interest, new_pin
        self.waiting: deque[PullRequest] = deque()
        self.has_news = False
        """A message that it wants was stored; other messages do not wake its requests."""
        self.pending: dict[int, _Pending] = {}
        self.deliveries: dict[int, int] = {}
        """Number of redeliveries of each message."""
        self.redeliveries: deque[int] = deque()
        self.consumer_sequence = 1
        """The consumer sequence of the next delivery."""
        self.last_delivered_at: float | None = None
        self.last_acked_at: float | None = None
        self.last_used_at = created_at
        self.pin_id = ""
        self._pin_until = 0.0
        self._last_of_subject: set[int] = set()
        """For last-per-subject: the sequences of its first part."""
        self._skip_to = 0
        self._scanned = 0
        self._advisories = 0
        """No message before this sequence is wanted; the server does not show this in ``delivered``."""
        self._configure()
        self.next_sequence = self._first_sequence()
        """A lower bound of the stream sequence of the next new message."""
        self.num_pending = self._count_pending()
        self.ack_floor = (0, self.next_sequence - 1)
        """Consumer and stream sequence up to which all messages are acknowledged."""

    # ---- configuration -----------------------------------------------------------------------------------------

    def _configure(self) -> None:
        config = self.config
        filters = list(config.filter_subjects or ()) or ([config.filter_subject] if config.filter_subject else [])
        self._filters = [each for each in filters if each]
        self.has_acks = config.ack_policy in ("explicit", "all")
        self._max_deliver = config.max_deliver if config.max_deliver and config.max_deliver > 0 else 0
        limit = config.max_ack_pending
        self._max_ack_pending = 0 if not self.has_acks or (limit is not None and limit < 0) else limit or 0
        self._backoff = list(config.backoff_s or ())
        self._ack_wait_s = self._backoff[0] if self._backoff else config.ack_wait_s or DEFAULT_ACK_WAIT_S
        self._max_waiting = config.max_waiting or DEFAULT_MAX_WAITING
        self.paused_until = config.pause_until.timestamp() if config.pause_until is not None else 0.0

    def update(self, config: ConsumerConfig) -> None:
        """Replace the configuration; deliveries so far stay valid."""
        check_consumer(config)
        self.config = config
        self._configure()
        self._scanned = 0
        self.num_pending = self._count_pending()

    def _first_sequence(self) -> int:
        config, store = self.config, self._store
        match config.deliver_policy:
            case "last":
                last = max((store.last_of(each) for each in self._filters), default=store.last_sequence)
                return max(last, store.first_sequence)
            case "new":
                return store.last_sequence + 1
            case "by_start_sequence":
                return max(config.start_sequence or 1, store.first_sequence)
            case "by_start_time":
                assert config.start_time is not None
                return store.sequence_at(config.start_time.timestamp())
            case "last_per_subject":
                self._last_of_subject = store.last_of_each(self._filters)
                self._skip_to = store.last_sequence
                return max(min(self._last_of_subject, default=store.last_sequence), store.first_sequence)
        return store.first_sequence

    # ---- the stream --------------------------------------------------------------------------------------------

    def matches(self, message: ModelMessage) -> bool:
        return not self._filters or any(matches(each, message.subject) for each in self._filters)

    def _wants(self, message: ModelMessage) -> bool:
        if message.sequence <= self._skip_to:
            return message.sequence in self._last_of_subject
        return self.matches(message)

    def on_stored(self, message: ModelMessage) -> None:
        if self.matches(message):
            self.num_pending += 1
            self.has_news = True

    def on_removed(self, message: ModelMessage) -> None:
        if message.sequence >= self.next_sequence:
            if self._wants(message):
                self.num_pending -= 1
        elif (known := self.pending.get(message.sequence)) is not None:
            # A deleted message counts as acknowledged, and with ``all`` everything before it too.
            self._acknowledge(message.sequence, known.consumer_sequence, self.last_used_at)
        else:
            self.deliveries.pop(message.sequence, None)  # of a message given up after max_deliver

    def on_purged(self) -> None:
        """Continue with the next stored message, after the stream was emptied."""
        first = self._store.last_sequence + 1
        self.next_sequence = max(self.next_sequence, first)
        self.redeliveries.clear()
        self.deliveries.clear()
        self.ack_floor = (self.consumer_sequence - 1, self.next_sequence - 1)

    def _count_pending(self) -> int:
        return sum(1 for each in self._store.messages_from(self.next_sequence) if self._wants(each))

    # ---- requests ----------------------------------------------------------------------------------------------

    def request(self, data: bytes, reply: str, now: float) -> list[Delivery]:
        """Handle a pull request."""
        self.last_used_at = now
        try:
            wanted = _read_request(data, reply, now)
        except ValueError as error:
            return [_status(reply, 400, str(error))]
        refusal = self._refuse(wanted, now)
        if refusal is not None:
            return [_status(reply, *refusal)]
        said = self._expire_requests(now)
        if len(self.waiting) >= self._max_waiting:
            # With heartbeats the client notices it by itself, and gets no answer.
            return said if wanted.heartbeat_s else [*said, _status(reply, 409, "Exceeded MaxWaiting")]
        if wanted.is_no_wait:
            there = 0 if now < self.paused_until else self.num_pending + len(self.redeliveries)
            if not there and wanted.expires_at is None:
                return [*said, _status(reply, 404, "No Messages")]
            if there and there < sum(each.left for each in self.waiting):
                return [*said, _status(reply, 408, "Requests Pending")]
        self.waiting.append(wanted)
        return said + self.serve(now)

    def _refuse(self, wanted: PullRequest, now: float) -> tuple[int, str] | None:
        config = self.config
        expires_s = 0.0 if wanted.expires_at is None else wanted.expires_at - now
        if config.max_expires_s and expires_s > config.max_expires_s:
            return 409, f"Exceeded MaxRequestExpires of {replies.go_duration(config.max_expires_s)}"
        if config.max_batch and config.max_batch > 0 and wanted.batch > config.max_batch:
            return 409, f"Exceeded MaxRequestBatch of {config.max_batch}"
        if config.max_batch_bytes and config.max_batch_bytes > 0 and wanted.max_bytes > config.max_batch_bytes:
            return 409, f"Exceeded MaxRequestMaxBytes of {config.max_batch_bytes}"
        if config.priority_policy == "pinned_client":
            if not wanted.group:
                return 400, "Bad Request - Priority Group missing"
            if wanted.group not in (config.priority_groups or ()):
                return 400, "Bad Request - Invalid Priority Group"
            if self.pin_id and wanted.pin_id and wanted.pin_id != self.pin_id:
                return 423, "Nats-Pin-Id mismatch"
            if not self.pin_id and wanted.pin_id:
                return 423, "Nats-Wrong-Pin-Id"
        return None

    def forget_requests(self) -> None:
        """Drop all requests, because the server that held them has gone."""
        self.waiting.clear()
        self.redeliveries.clear()

    def end_requests(self, description: str) -> list[Delivery]:
        """End all requests with a 409, because they will not be served any more."""
        ended = [_status(each.reply, 409, description) for each in self.waiting]
        self.waiting.clear()
        return ended

    def _expire_requests(self, now: float) -> list[Delivery]:
        said: list[Delivery] = []
        for each in [each for each in self.waiting if each.expires_at is not None and each.expires_at <= now]:
            self.waiting.remove(each)
            said.append(_status(each.reply, 408, "Request Timeout", each))
        return said

    # ---- delivering --------------------------------------------------------------------------------------------

    def serve(self, now: float) -> list[Delivery]:
        """Deliver messages to the waiting requests."""
        said: list[Delivery] = []
        if now < self.paused_until:
            return said
        while self.waiting:
            request = self._next_request()
            if request is None:
                break
            message = self._next_message(said, now)
            if message is None:
                # No message is left, or none may be sent.
                said += [] if self._is_blocked() else self._end_no_wait_requests()
                break
            said += self._deliver(request, message, now)
        return said

    def _next_request(self) -> PullRequest | None:
        """The request to serve next; requests of clients that have gone are dropped."""
        while self.waiting and not self._has_interest(self.waiting[0].reply):
            self.waiting.popleft()
        if self.config.priority_policy != "pinned_client":
            return self.waiting[0] if self.waiting else None
        if self.pin_id:
            return next((each for each in self.waiting if each.pin_id == self.pin_id), None)
        return self.waiting[0] if self.waiting else None

    def _next_message(self, said: list[Delivery], now: float) -> ModelMessage | None:
        while self.redeliveries:
            sequence = self.redeliveries.popleft()
            message = self._store.get(sequence)
            if message is None or sequence not in self.pending:
                continue
            count = self.deliveries.get(sequence, 0) + 2
            if self._max_deliver and count > self._max_deliver:
                said += self._give_up(sequence, count - 1, now)
                continue
            self.deliveries[sequence] = count - 1
            return message
        if self._is_blocked():
            return None
        for message in self._store.messages_from(max(self.next_sequence, self._scanned)):
            if self._wants(message):
                self.next_sequence = message.sequence + 1
                self.num_pending -= 1
                return message
        self._scanned = self._store.last_sequence + 1
        return None

    def _give_up(self, sequence: int, count: int, now: float) -> list[Delivery]:
        """Stop delivering a message; the advisory is sent once, whatever ``max_deliver`` is later."""
        self.pending.pop(sequence)
        self.deliveries[sequence] = count
        if count != self._max_deliver:
            return []
        return [self._advise("MAX_DELIVERIES", "max_deliver", now, stream_seq=sequence, deliveries=count)]

    def _is_blocked(self) -> bool:
        """True at the ``max_ack_pending`` limit; checked before the stream, even if it has no message to hold back."""
        return bool(self._max_ack_pending) and len(self.pending) >= self._max_ack_pending

    def _end_no_wait_requests(self) -> list[Delivery]:
        """End requests that do not wait, except those without a message that may still get one."""
        ended = [each for each in self.waiting if each.is_no_wait and (each.delivered or each.expires_at is None)]
        for each in ended:
            self.waiting.remove(each)
        return [_status(each.reply, 404, "No Messages") for each in ended]

    def _deliver(self, request: PullRequest, message: ModelMessage, now: float) -> list[Delivery]:
        sequence = message.sequence
        count = self.deliveries.get(sequence, 0) + 1
        ack_subject = (
            f"$JS.ACK.{self.stream}.{self.name}.{count}.{sequence}.{self.consumer_sequence}"
            f".{round(message.time * 1e9)}.{self.num_pending}"
        )
        said: list[Delivery] = []
        if request.max_bytes:
            size = len(ack_subject) + message.size_bytes - self._store.overhead_of(message)
            if size > request.bytes_left:
                self._give_back(message, count)
                self.waiting.remove(request)
                return [_status(request.reply, 409, "Message Size Exceeds MaxBytes", request)]
            request.bytes_left -= size
        said.append(self._message(request, message, ack_subject, now))
        self.last_delivered_at = self.last_used_at = now
        if self.has_acks:
            known = self.pending.get(sequence)
            if known is None:
                self.pending[sequence] = _Pending(self.consumer_sequence, now)
            else:
                known.since = now
        else:
            self.ack_floor = (self.consumer_sequence, sequence)
        self.consumer_sequence += 1
        request.delivered += 1
        request.heartbeat_at = now + request.heartbeat_s
        if request.left == 0:
            self.waiting.remove(request)
            if request.max_bytes:
                said.append(_status(request.reply, 409, "Batch Completed", request))
        else:
            # The next message is for the next request; this one queues up again.
            self.waiting.remove(request)
            self.waiting.append(request)
        return said

    def _give_back(self, message: ModelMessage, count: int) -> None:
        if count > 1:
            self.deliveries[message.sequence] = count - 2
            self.redeliveries.appendleft(message.sequence)
        else:
            self.next_sequence = self._scanned = message.sequence
            self.num_pending += 1

    def _message(self, request: PullRequest, message: ModelMessage, ack_subject: str, now: float) -> Delivery:
        headers, data = message.headers, message.data
        if self.config.headers_only:
            headers = Headers(headers)
            headers.add("Nats-Msg-Size", str(len(data)))
            data = b""
        if self.config.priority_policy == "pinned_client":
            if not self.pin_id:
                self.pin_id = self._new_pin()
                request.pin_id = self.pin_id
            self._pin_until = now + (self.config.priority_timeout_s or 0.0)
            headers = Headers(headers)
            headers.add("Nats-Pin-Id", self.pin_id)
        return Delivery(request.reply, data, headers, shown_subject=message.subject, reply=ack_subject)

    # ---- acknowledging -----------------------------------------------------------------------------------------

    def ack(self, tokens: list[str], data: bytes, reply: str | None, now: float) -> list[Delivery]:
        """Handle an answer to a delivery; ``tokens`` are the tokens of its subject after the consumer's name."""
        if not self.has_acks:
            subject = ".".join(["$JS.ACK", self.stream, self.name, *tokens])
            return [replies.no_responders(subject, reply)] if reply else []
        count, sequence, consumer_sequence = int(tokens[0]), int(tokens[1]), int(tokens[2])
        self.last_used_at = now
        word, _, rest = data.partition(b" ")
        answer = [Delivery(reply, b"")] if reply else []
        said: list[Delivery] = []
        # Waiting requests are checked after a change. An answer to an acknowledged message changes nothing, and after a
        # delayed nak no message is ready before the delay's end.
        has_changed = False
        if data in (b"", b"+ACK", b"+OK"):
            has_changed = self._acknowledge(sequence, consumer_sequence, now)
        elif word == b"-NAK":
            said += self._on_nak(sequence, consumer_sequence, count, rest, now)
            has_changed = sequence in self.redeliveries
        elif data == b"+WPI":
            if (known := self.pending.get(sequence)) is not None:
                known.since = now
        elif word == b"+TERM":
            if has_changed := self._acknowledge(sequence, consumer_sequence, now):
                facts: dict[str, Any] = {"reason": rest.decode()} if rest else {}
                facts = {"consumer_seq": consumer_sequence, "stream_seq": sequence, "deliveries": count} | facts
                said.append(self._advise("MSG_TERMINATED", "terminated", now, **facts))
        elif data.startswith(b"+NXT"):
            self._acknowledge(sequence, consumer_sequence, now)
            return said + self.request(data[4:].strip(), reply, now) if reply else said
        return said + (self.serve(now) if has_changed else []) + answer

    def _acknowledge(self, sequence: int, consumer_sequence: int, now: float) -> bool:
        if self.config.ack_policy == "all":
            if consumer_sequence <= self.ack_floor[0] or sequence <= self.ack_floor[1]:
                return False
            for each in [each for each in self.pending if each <= sequence]:
                self._drop(each)
            self.ack_floor = (consumer_sequence, sequence)
        else:
            if sequence not in self.pending:
                self.deliveries.pop(sequence, None)  # of a message given up after max_deliver
                return False
            self._drop_acknowledged(sequence)
        self.last_acked_at = now
        return True

    def _drop(self, sequence: int) -> _Pending:
        self.deliveries.pop(sequence, None)
        return self.pending.pop(sequence)

    def _drop_acknowledged(self, sequence: int) -> None:
        """Drop a message, and move the floor up to the oldest unacknowledged one."""
        known = self._drop(sequence)
        if not self.pending:
            self.ack_floor = (self.consumer_sequence - 1, self.next_sequence - 1)
        elif known.consumer_sequence == self.ack_floor[0] + 1:
            self.ack_floor = (known.consumer_sequence, sequence)
            later = [each for each in self.pending if each > sequence]
            if later:
                first = min(later)
                self.ack_floor = (self.pending[first].consumer_sequence - 1, first - 1)

    def _on_nak(self, sequence: int, consumer_sequence: int, count: int, rest: bytes, now: float) -> list[Delivery]:
        known = self.pending.get(sequence)
        if known is None:
            return []
        delay_s = _delay_in(rest)
        if delay_s:
            # The latest nak counts: a message queued after an earlier nak or an expired ack_wait waits again.
            if sequence in self.redeliveries:
                self.redeliveries.remove(sequence)
            known.since = now + delay_s - self._wait_of(sequence)
        elif sequence not in self.redeliveries:
            self.redeliveries.append(sequence)
        facts = {"consumer_seq": consumer_sequence, "stream_seq": sequence, "deliveries": count}
        return [self._advise("MSG_NAKED", "nak", now, **facts)]

    # ---- time --------------------------------------------------------------------------------------------------

    def _wait_of(self, sequence: int) -> float:
        """Seconds from a delivery to its redelivery."""
        if not self._backoff:
            return self._ack_wait_s
        return self._backoff[min(self.deliveries.get(sequence, 0), len(self._backoff) - 1)]

    def next_deadline(self) -> float | None:
        times = [each.expires_at for each in self.waiting if each.expires_at is not None]
        times += [each.heartbeat_at for each in self.waiting if each.heartbeat_s]
        queued = set(self.redeliveries)
        times += [each.since + self._wait_of(key) for key, each in self.pending.items() if key not in queued]
        if self.paused_until and self.waiting:
            times.append(self.paused_until)
        if self.pin_id and self.config.priority_timeout_s:
            times.append(self._pin_until)
        if (inactive_at := self.inactive_at()) is not None:
            times.append(inactive_at)
        return min(times, default=None)

    def inactive_at(self) -> float | None:
        """When the server deletes it, if it stays unused; None while requests wait."""
        threshold_s = self.config.inactive_threshold_s
        if self.config.durable_name is None and not threshold_s:
            threshold_s = DEFAULT_INACTIVE_S
        return self.last_used_at + threshold_s if threshold_s and not self.waiting else None

    def on_time(self, now: float) -> list[Delivery]:
        late = self._expired(now)
        said: list[Delivery] = []
        is_awake = bool(late)
        for sequence in late:
            # As the server counts here: a second delivery counts as the first.
            count = max(self.deliveries.get(sequence, 0), 1)
            if self._max_deliver and count >= self._max_deliver:
                said += self._give_up(sequence, count, now)
            else:
                self.redeliveries.append(sequence)
        if self.pin_id and self.config.priority_timeout_s and self._pin_until <= now:
            self.unpin()
            is_awake = True
        if 0.0 < self.paused_until <= now:
            self.paused_until = 0.0
            is_awake = True
        # Requests without a message are not checked again before a message may be ready.
        if is_awake:
            said += self.serve(now)
        expired = self._expire_requests(now)
        said += expired
        if expired or any(each.heartbeat_s and each.heartbeat_at <= now for each in self.waiting):
            said += self._end_no_wait_requests()
        for each in self.waiting:
            if each.heartbeat_s and each.heartbeat_at <= now:
                each.heartbeat_at = now + each.heartbeat_s
                said.append(self._heartbeat(each))
        return said

    def _expired(self, now: float) -> list[int]:
        """The messages to redeliver, the longest overdue first; by sequence within the range of one timer of the
        server.
        finds."""
        queued = set(self.redeliveries)
        waits = ((each.since + self._wait_of(key), key) for key, each in self.pending.items() if key not in queued)
        due = sorted(each for each in waits if each[0] <= now)
        late: list[int] = []
        while due:
            found = [key for at, key in due if at <= due[0][0] + TIMER_S]
            due = due[len(found) :]
            late += sorted(found)
        for key in late:
            self.pending[key].since = now
        return late

    def _heartbeat(self, request: PullRequest) -> Delivery:
        headers = Headers()
        headers.add("Nats-Last-Consumer", str(self.consumer_sequence - 1))
        headers.add("Nats-Last-Stream", str(self.next_sequence - 1))
        return Delivery(request.reply, b"", headers, Status(100, "Idle Heartbeat"))

    # ---- control -----------------------------------------------------------------------------------------------

    def pause(self, until: datetime.datetime | None) -> None:
        """Deliver nothing until then; None ends a pause, without serving requests."""
        self.config = dataclasses.replace(self.config, pause_until=until)
        self.paused_until = 0.0 if until is None else until.timestamp()

    def reset(self, sequence: int | None, now: float) -> tuple[int, list[Delivery]]:
        """Restart behind the acknowledged messages, or at a sequence; returns the sequence, and the deliveries."""
        first = self.ack_floor[1] + 1 if sequence is None else sequence
        self.pending.clear()
        self.deliveries.clear()
        self.redeliveries.clear()
        self.next_sequence, self.consumer_sequence, self.ack_floor = first, 1, (0, first - 1)
        self.last_delivered_at = self.last_acked_at = None
        self._scanned = 0
        self.num_pending = self._count_pending()
        return first, self.serve(now)

    def unpin(self) -> None:
        self.pin_id = ""

    # ---- consumer info -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        delivered: dict[str, Any] = {"consumer_seq": self.consumer_sequence - 1, "stream_seq": self.next_sequence - 1}
        floor: dict[str, Any] = {"consumer_seq": self.ack_floor[0], "stream_seq": self.ack_floor[1]}
        if self.last_delivered_at is not None:
            delivered["last_active"] = replies.time_text(self.last_delivered_at)
        if self.last_acked_at is not None:
            floor["last_active"] = replies.time_text(self.last_acked_at)
        return {
            "delivered": delivered,
            "ack_floor": floor,
            "num_ack_pending": len(self.pending),
            # With a limit of one delivery the server does not count messages that it gave up.
            "num_redelivered": 0 if self._max_deliver == 1 else len(self.deliveries),
            "num_waiting": len(self.waiting),
            "num_pending": self.num_pending,
        }

    def _advise(self, kind: str, word: str, now: float, **facts: Any) -> Delivery:
        self._advisories += 1
        fields = {
            "type": f"io.nats.jetstream.advisory.v1.{word}",
            "id": f"{self._advisories:022d}",  # the server's are random
            "timestamp": replies.time_text(now),
            "stream": self.stream,
            "consumer": self.name,
        }
        subject = f"{replies.ADVISORIES}CONSUMER.{kind}.{self.stream}.{self.name}"
        return Delivery(subject, json.dumps(fields | facts, separators=(",", ":")).encode())


# ---- small steps -----------------------------------------------------------------------------------------------------


def _read_request(data: bytes, reply: str, now: float) -> PullRequest:
    """
    Raises:
        ValueError: It is not a pull request; the text is the server's.
    """
    text = data.decode("utf-8", "replace").strip()
    fields: dict[str, Any] = {}
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ValueError(f"Bad Request - {error}") from None
    elif text:
        if not text.lstrip("-").isdigit():
            raise ValueError("Bad Request - not a number")
        fields = {"batch": int(text)}
    expires_s, heartbeat_s = fields.get("expires", 0) / 1e9, fields.get("idle_heartbeat", 0) / 1e9
    if heartbeat_s and heartbeat_s > expires_s / 2:
        raise ValueError("Bad Request - heartbeat value too large")
    max_bytes = fields.get("max_bytes", 0)
    return PullRequest(
        reply,
        max(fields.get("batch", 1), 1),
        now + expires_s if expires_s else None,
        bool(fields.get("no_wait")),
        max_bytes,
        heartbeat_s,
        fields.get("group", ""),
        fields.get("id", ""),
        bytes_left=max_bytes,
        heartbeat_at=now + heartbeat_s,
    )


def _delay_in(rest: bytes) -> float:
    """The delay of a nak in seconds: a number of nanoseconds, or an object that contains it."""
    text = rest.strip()
    if not text:
        return 0.0
    try:
        value = json.loads(text)
        return float(value["delay"] if isinstance(value, dict) else value) / 1e9
    except (ValueError, KeyError, TypeError):
        return 0.0


def _status(reply: str, code: int, description: str, request: PullRequest | None = None) -> Delivery:
    headers = None
    if request is not None:
        headers = Headers()
        headers.add(_PENDING_MESSAGES, str(request.left))
        headers.add(_PENDING_BYTES, str(request.bytes_left))
    return Delivery(reply, b"", headers, Status(code, description))
