"""One stream: the order in which features see a message, and the checks of a plain publish.

The order is: a leader is required, the stream must not be sealed, the message must not be too large; then fast ingest
takes messages with its kind of reply subject, atomic batches those with a batch id, and the rest are plain publishes.
All three are refused for the same reasons by `jetspark.testing.model.checks`.

A replicated stream stores at once here, where the server waits for a majority. ``lose_leader`` restores the hidden
effect: the newest unacknowledged messages may be lost with the old leader. With ``apply_s`` the majority takes its
time: until then a stored message is a proposal, which counts in the leader's checks and is visible nowhere else
(``applied_sequence``), and its acknowledgement waits; gaps and refusals are sent at once. With ``hold_replica`` one
replica falls behind, and still answers direct gets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jetspark.codes import Code
from jetspark.core.headers import Headers, HeadersLike, encode
from jetspark.errors import ConfigError
from jetspark.jetstream.config import StreamConfig
from jetspark.testing.model import ageing, checks, replies
from jetspark.testing.model.ageing import Ageing
from jetspark.testing.model.atomic import BATCH_ID, AtomicBatches
from jetspark.testing.model.consumers import ModelConsumer
from jetspark.testing.model.fast import SUFFIX, FastIngest
from jetspark.testing.model.limits import BatchLimits
from jetspark.testing.model.replies import ApiError, Delivery
from jetspark.testing.model.store import Incoming, Store, first_values

__all__ = ["ModelStream"]

_SEALED = ApiError(400, Code.STREAM_SEALED, "invalid operation on sealed stream")
_TOO_LARGE = ApiError(400, Code.MESSAGE_TOO_LARGE, "message size exceeds maximum allowed")
_NO_FIELDS: dict[str, str] = {}


@dataclass(slots=True)
class _Proposal:
    """Messages in the log that are not applied yet, and the answers to send when they are."""

    first: int
    last: int
    applied_at: float
    answers: list[Delivery]


class ModelStream:
    """A stream with its batches.

    Args:
        config: The client's configuration.
        limits: Limits of its batches.
        total_atomic: Number of open atomic batches of all streams.
        total_fast: Number of open fast batches of all streams.
        abandon: Makes an advisory from the names of stream and batch, the reason and the time.
        created_at: The time.
    """

    def __init__(
        self,
        config: StreamConfig,
        limits: BatchLimits,
        total_atomic: Callable[[], int],
        total_fast: Callable[[], int],
        abandon: Callable[[str, str, str, float], Delivery],
        created_at: float = 0.0,
    ) -> None:
        self.config = config
        self.created_at = created_at
        self.consumers: dict[str, ModelConsumer] = {}
        self.store = Store(config)
        self.ageing = Ageing(self.store)
        self.store.watchers.append(self.ageing)
        name = config.name
        self.atomic = AtomicBatches(
            self.store, limits, total_atomic, lambda batch, reason, now: abandon(name, batch, reason, now)
        )
        self.fast = FastIngest(self.store, limits, total_fast)
        self.has_leader = True
        self.leader = 0
        """The number of the replica that leads, or led last."""
        self.led_since = 0.0
        self._held_replica: Store | None = None
        self._direct_gets = 0
        self._proposals: deque[_Proposal] = deque()
        self.elected_at: float | None = None
        self._is_silent = False
        self._max_message_bytes = 0
        self.configure(config)

    def configure(self, config: StreamConfig) -> None:
        """Replace the configuration; open batches of a disabled kind are dropped."""
        self.config = config
        self.store.configure(config)
        self.ageing.configure(config)
        size = config.max_message_bytes
        self._max_message_bytes = size if size is not None and size > 0 else 0
        if not config.allow_atomic:
            self.atomic.clear()
        if not config.allow_batched:
            self.fast.clear()

    @property
    def applied_sequence(self) -> int:
        """The sequence of the newest message that reads can show."""
        return self._proposals[0].first - 1 if self._proposals else self.store.last_sequence

    # Consumers

    def add_consumer(self, consumer: ModelConsumer) -> None:
        self.consumers[consumer.name] = consumer
        self.store.watchers.append(consumer)

    def remove_consumer(self, name: str) -> list[Delivery]:
        """Delete a consumer, and end its waiting requests."""
        consumer = self.consumers.pop(name)
        self.store.watchers.remove(consumer)
        return consumer.end_requests("Consumer Deleted")

    def purge(self, subject: str | None = None, below: int | None = None, keep: int = 0) -> int:
        purged = self.store.purge(subject, below, keep)
        if not len(self.store):
            for consumer in self.consumers.values():
                consumer.on_purged()
        return purged

    def serve(self, now: float) -> list[Delivery]:
        """Deliver new messages."""
        said: list[Delivery] = []
        for consumer in self.consumers.values():
            if consumer.has_news:
                consumer.has_news = False
                if consumer.waiting:
                    said += consumer.serve(now)
        return said

    def restart(self, back_at: float) -> None:
        self.ageing.resume(back_at)
        for consumer in self.consumers.values():
            consumer.forget_requests()
        self._end_cut()
        self._proposals.clear()
        self.atomic.clear()
        self.fast.clear()
        self.has_leader, self.elected_at = not self.store.is_halted, None
        self.store.promise(self.store.last_sequence)

    # Time

    def next_deadline(self) -> float | None:
        deadlines = [self.atomic.next_deadline(), self.fast.next_deadline(), self.elected_at, self.next_answer_at()]
        return min((each for each in [*deadlines, self.next_delivery_at()] if each is not None), default=None)

    def next_delivery_at(self) -> float | None:
        """When a consumer has to act, or a message expires or is published by a schedule."""
        deadlines = [self.ageing.next_deadline(), *(each.next_deadline() for each in self.consumers.values())]
        return min((each for each in deadlines if each is not None), default=None)

    def next_answer_at(self) -> float | None:
        """When the oldest proposal is applied; never by a leader that is cut off."""
        return self._proposals[0].applied_at if self._proposals and not self.store.is_cut_off else None

    def on_time(self, now: float) -> list[Delivery]:
        said: list[Delivery] = []
        while (applied_at := self.next_answer_at()) is not None and applied_at <= now:
            proposal = self._proposals.popleft()
            self.store.promise(proposal.last)
            said += proposal.answers
        if self.elected_at is not None and self.elected_at <= now:
            self.fast.expire(self.elected_at)
            said += self.elect_leader(self.elected_at)
        said += self.atomic.expire(now)
        self.fast.expire(now)
        if self.has_leader and self.ageing.on_time(now):
            said += self.serve(now)
        for consumer in list(self.consumers.values()):
            said += consumer.on_time(now)
            if (inactive_at := consumer.inactive_at()) is not None and inactive_at <= now:
                said += self.remove_consumer(consumer.name)
        return said

    # Leaders

    def lose_leader(self, drop: int, *, is_silent: bool, elected_at: float | None) -> None:
        if not self.store.is_replicated:
            raise ConfigError(f"stream {self.config.name!r} has one replica: expected 2 or more, or use restart()")
        self.store.drop_newest(drop)
        self._end_cut()
        last = self.store.last_sequence
        # The next leader applies the remaining ones, without knowing their reply subjects.
        self._proposals = deque(
            _Proposal(each.first, min(each.last, last), each.applied_at, [])
            for each in self._proposals
            if each.first <= last
        )
        self.atomic.clear()
        self.has_leader, self._is_silent, self.elected_at = False, is_silent, elected_at

    def hold_replica(self, is_held: bool) -> None:
        if not self.store.is_replicated:
            raise ConfigError(f"stream {self.config.name!r} has one replica: expected 2 or more")
        self._held_replica = self.store.copied() if is_held else None

    def answering(self) -> Store:
        """The store that answers the next direct get: every second time the held replica's, if one is held."""
        self._direct_gets += 1
        return self.store if self._held_replica is None or self._direct_gets % 2 else self._held_replica

    def cut_off_leader(self) -> None:
        if not self.store.is_replicated:
            raise ConfigError(f"stream {self.config.name!r} has one replica: expected 2 or more")
        self.store.is_cut_off = True

    def _end_cut(self) -> None:
        """Drop the proposals of a leader that was cut off; no other replica has them."""
        self.store.is_cut_off = False
        self.store.proposed_ids.clear()
        self.store.proposed_messages = 0

    def elect_leader(self, now: float, leader: int | None = None) -> list[Delivery]:
        self.elected_at = None
        self.led_since = now
        self.ageing.resume(now)
        self.leader = (self.leader + 1) % (self.config.replicas or 1) if leader is None else leader
        for proposal in self._proposals:
            proposal.applied_at = now + self.store.apply_s
        self._end_cut()
        if self.store.is_halted:
            return []
        self.atomic.clear()
        self.has_leader = True
        # A majority has the new leader's messages, so they cannot be lost from here on.
        self.store.promise(self.store.last_sequence)
        return self.fast.elect()

    # Publishing

    def publish(
        self, subject: str, data: bytes, reply: str | None, headers: HeadersLike | None, now: float
    ) -> list[Delivery]:
        if not self.has_leader:
            return [] if self._is_silent or not reply else [replies.no_responders(subject, reply)]
        config, store, before = self.config, self.store, self.store.last_sequence
        if headers:
            own = Headers(headers)
            message = Incoming(subject, data, own, first_values(own))
        else:
            message = Incoming(subject, data, None, _NO_FIELDS)
        if message.fields:
            if (refused := ageing.refuse_schedule(config, store, message, now)) is not None:
                return self._answer(reply, refused)
            message = ageing.prepared(config, message)
        if config.sealed:
            return self._answer(reply, _SEALED)
        if self._max_message_bytes:
            size = len(data) if message.headers is None else len(data) + len(encode(message.headers))
            if size > self._max_message_bytes:
                return self._answer(reply, _TOO_LARGE)
        if reply is not None and reply.endswith(SUFFIX):
            said = self.fast.receive(message, reply, now)
        elif message.fields.get(BATCH_ID):
            said = self.atomic.receive(message, reply, now)
        else:
            said = self._publish_plain(message, reply, now)
        if self.store.is_halted:
            self.has_leader, self._is_silent = False, True
        if store.last_sequence > before and store.apply_s:
            before = max(before, self._proposals[-1].last if self._proposals else 0)
            applied_at = max(now + store.apply_s, self._proposals[-1].applied_at if self._proposals else now)
            late = [each for each in said if replies.is_about_storing(each)]
            self._proposals.append(_Proposal(before + 1, store.last_sequence, applied_at, late))
            return [each for each in said if not replies.is_about_storing(each)]
        if store.last_sequence > before and self.consumers:
            said = said + self.serve(now)
        return said

    def _publish_plain(self, message: Incoming, reply: str | None, now: float) -> list[Delivery]:
        store, fields = self.store, message.fields
        if self.store.is_replicated:
            found = checks.refuse_proposal(store, message, checks.Staged(), now)
            if not found and (late := checks.refuse_last_id(store, fields)) is not None:
                store.is_halted = True
                found = late
        else:
            found = checks.refuse_plain(store, message, now)
        if isinstance(found, ApiError):
            return self._answer(reply, found)
        if found < 0:
            return self._answer(reply, checks.IN_PROCESS)
        if found:
            store.promise(found)
            return self._answer(reply, replies.pub_ack(self.config.name, found, is_duplicate=True))
        if store.is_cut_off:
            store.propose([fields.get(checks.MSG_ID, "")])
            return []
        if fields and (schedule := ageing.cancels(message)) is not None:
            store.purge(schedule)
        sequence = store.append(message.subject, message.data, message.headers, now, fields.get(checks.MSG_ID, ""))
        if fields and (rollup := fields.get(checks.ROLLUP)):
            store.roll_up(rollup.lower(), message.subject, sequence)
        if not reply or self.config.no_ack:
            return []
        store.promise(sequence)
        return self._answer(reply, replies.pub_ack(self.config.name, sequence))

    def _answer(self, reply: str | None, answer: ApiError | bytes) -> list[Delivery]:
        if not reply or self.config.no_ack:
            return []
        return [
            Delivery(reply, replies.error_ack(self.config.name, answer) if isinstance(answer, ApiError) else answer)
        ]
