"""The public face of the model: streams by name, messages in, the server's messages out.

Pure: no socket, clock, thread or randomness. Time is an argument, in seconds of any epoch, and never decreases; events
due between two calls happen in the next one, before anything else. So two models with the same calls give the same
answers, and a simulation can try a thousand runs in the time of one real election.

The model answers as nats-server 2.15.1 was measured to answer, byte for byte: where the design documents differ, the
server is right. Unsupported features are refused rather than ignored: mirrors, more than one source, counters,
transforms of a stream's own subjects, retention by interest or as a work queue, push consumers. The server's overload
is not modelled either: its inbound queue never overflows, and a replicated stream stores at once, so that replies come
in the order of their causes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from jetspark.codes import Code
from jetspark.core.headers import HeadersLike
from jetspark.core.subjects import matches, overlaps, validate_subject
from jetspark.errors import ConfigError
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.errors import server_error
from jetspark.testing.model import replies
from jetspark.testing.model.api import ACK_PREFIX, API_PREFIX, ModelApi
from jetspark.testing.model.consumers import ModelConsumer
from jetspark.testing.model.fast import OpenFastBatch
from jetspark.testing.model.limits import BatchLimits
from jetspark.testing.model.replies import Delivery
from jetspark.testing.model.sourcing import Copying
from jetspark.testing.model.store import ModelMessage
from jetspark.testing.model.stream import ModelStream

__all__ = ["ModelServer"]

# Bound on cached routes from subjects to streams.
_MAX_ROUTES = 65536

_NOT_MODELLED = (
    "mirror",
    "subject_transform",
    "republish",
    "allow_message_counter",
)


class ModelServer:
    """A nats-server with JetStream, limited to publishing and pull consumers.

    ``publish`` and all other calls return the server's messages, in order, advisories included; the caller routes them
    to subscribers.

    Args:
        limits: Limits of batches.
        has_interest: True if a subject has a subscriber: a pull request without one on its inbox is dropped. By default
            every subject has one.
    """

    def __init__(self, *, limits: BatchLimits | None = None, has_interest: Callable[[str], bool] | None = None) -> None:
        self._limits = BatchLimits() if limits is None else limits
        self._api = ModelApi(self)
        self.has_interest: Callable[[str], bool] = has_interest or _everybody_listens
        self._streams: dict[str, ModelStream] = {}
        self._routes: dict[str, ModelStream] = {}
        self._copies: dict[str, Copying] = {}
        """By the name of the stream that is filled."""
        self._advisories = 0
        self._stores_advisories = False
        # No batch and no election is due before; a lower bound, because each message moves the deadline of its batch.
        self._quiet_until = math.inf

    # Streams

    def create_stream(self, config: StreamConfig, *, now: float = 0.0) -> None:
        """Create a stream; an existing one with the same configuration stays as it is.

        Raises:
            ServerError: The server's refusal.
            ConfigError: The model does not support one of its fields.
        """
        own = [] if config.sources else [config.name]
        config = dataclasses.replace(config, subjects=list(config.subjects or own))
        known = self._streams.get(config.name)
        if known is not None:
            if known.config == config:
                return
            raise server_error(
                400, Code.STREAM_NAME_IN_USE, "stream name already in use with a different configuration"
            )
        self._check(config)
        copying = Copying.of(config)
        self._streams[config.name] = ModelStream(
            config, self._limits, self._count_atomic, self._count_fast, self._abandon, now
        )
        if copying is not None:
            self._copies[config.name] = copying
            self._copy(now)  # its messages have no reader yet
        self._forget_routes()

    def update_stream(self, config: StreamConfig) -> None:
        """Change a stream; fields not set in ``config`` stay as they are."""
        stream = self.stream(config.name)
        mentioned = {
            each.name: value
            for each in dataclasses.fields(config)
            if (value := getattr(config, each.name)) is not None and value != {}
        }
        merged = dataclasses.replace(stream.config, **mentioned)
        self._check(merged)
        stream.configure(merged)
        self._forget_routes()

    def delete_stream(self, name: str) -> list[Delivery]:
        """Delete a stream; waiting requests of its consumers are ended."""
        stream = self.stream(name)
        said = [each for consumer in list(stream.consumers) for each in stream.remove_consumer(consumer)]
        del self._streams[name]
        self._copies.pop(name, None)
        self._forget_routes()
        return said

    def streams(self) -> Iterable[ModelStream]:
        return self._streams.values()

    def find_stream(self, name: str) -> ModelStream | None:
        return self._streams.get(name)

    def stream(self, name: str) -> ModelStream:
        """
        Raises:
            StreamNotFound: The stream does not exist.
        """
        stream = self._streams.get(name)
        if stream is None:
            raise server_error(404, Code.STREAM_NOT_FOUND, "stream not found")
        return stream

    def consumer(self, stream: str, name: str) -> ModelConsumer | None:
        found = self._streams.get(stream)
        return None if found is None else found.consumers.get(name)

    def purge_stream(self, name: str) -> None:
        """Remove every message. Sequences continue, message ids stay known, open batches stay open."""
        self.stream(name).purge()

    def messages(self, stream: str) -> Sequence[ModelMessage]:
        """All stored messages, oldest first."""
        return self.stream(stream).store.messages()

    def last_sequence(self, stream: str) -> int:
        """The sequence of the newest message so far."""
        return self.stream(stream).store.last_sequence

    def leader(self, stream: str) -> int:
        """The number of the replica that leads, or led last, counted from 0."""
        return self.stream(stream).leader

    def flow(self, stream: str) -> Sequence[OpenFastBatch]:
        """The open fast-ingest batches, oldest first, with their present flow."""
        return self.stream(stream).fast.open_batches()

    # Publishing

    def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: HeadersLike | None = None, now: float
    ) -> list[Delivery]:
        """Process a message; returns the server's messages for it, and for all events due until ``now``."""
        due = self.on_time(now) if now >= self._quiet_until else []
        if subject.startswith("$JS."):
            said = self._with_advisories(self._on_api(subject, data, reply, now), now)
            self._update_quiet_until()
            return due + said
        stream = self._routes.get(subject) or self._route(subject)
        if stream is None:
            return [*due, replies.no_responders(subject, reply)] if reply else due
        said = self._with_advisories(stream.publish(subject, data, reply, headers, now), now)
        if self._copies and (copied := self._copy(now)):
            said = said + copied
            self._update_quiet_until()
        if self._quiet_until > now + self._limits.timeout_s:
            self._quiet_until = now + self._limits.timeout_s
        if stream.consumers or stream.ageing.next_deadline() is not None:
            self._update_quiet_until()
        if stream.store.apply_s and (answer_at := stream.next_answer_at()) is not None:
            self._quiet_until = min(self._quiet_until, answer_at)
        return due + said if due else said

    def _on_api(self, subject: str, data: bytes, reply: str | None, now: float) -> list[Delivery]:
        if subject.startswith(API_PREFIX):
            return self._api.answer(subject, data, reply, now)
        if subject.startswith(ACK_PREFIX):
            return self._api.ack(subject, data, reply, now)
        return []

    # Time

    def next_deadline(self) -> float | None:
        """When ``on_time`` has to be called, None without an open batch or timer."""
        deadlines = (stream.next_deadline() for stream in self._streams.values())
        return min((each for each in deadlines if each is not None), default=None)

    def on_time(self, now: float) -> list[Delivery]:
        """Process all events due until ``now``, in the order of their times."""
        said: list[Delivery] = []
        last = -math.inf
        # A deadline that stays, such as that of a stream without a leader, is not processed a second time.
        while (due := self.next_deadline()) is not None and last < due < now:
            said += self._on_moment(due)
            last = due
        return said + self._on_moment(now)

    def _on_moment(self, now: float) -> list[Delivery]:
        said = [each for stream in self._streams.values() for each in stream.on_time(now)]
        said = self._with_advisories(said + self._copy(now), now)
        self._update_quiet_until()
        return said

    # Misfortune

    def lose_leader(
        self,
        stream: str,
        now: float,
        *,
        drop: int = 0,
        is_silent: bool = False,
        elected_at: float | None = None,
    ) -> list[Delivery]:
        """Remove the leader of a replicated stream, with its unreplicated messages.

        Args:
            stream: Its name.
            now: The time.
            drop: Number of the newest messages to lose. Messages covered by an ack of any kind are kept, as the server
                keeps them; atomic batches count as covered once they are committed.
            is_silent: Until there is another leader, publishes get no answer at all, not even a 503.
            elected_at: When ``on_time`` elects another leader; without it, `elect_leader` has to be called.
        """
        said = self.on_time(now)
        self.stream(stream).lose_leader(drop, is_silent=is_silent, elected_at=elected_at)
        self._update_quiet_until()
        return said

    def cut_off_leader(self, stream: str, now: float) -> list[Delivery]:
        """Cut the leader of a replicated stream off from the majority, without its noticing.

        Until `lose_leader` or `elect_leader` it accepts messages, stores none, and still acknowledges duplicates; the
        accepted messages are lost then. It stages and refuses atomic batches as before; a commit gets no answer.
        """
        said = self.on_time(now)
        self.stream(stream).cut_off_leader()
        return said

    def elect_leader(self, stream: str, now: float, *, leader: int | None = None) -> list[Delivery]:
        """Elect another leader: staged atomic batches are gone, fast ones get a report of their stored messages.

        ``leader`` is the number of a replica, counted from 0; by default replicas take turns.
        """
        said = self.on_time(now) + self.stream(stream).elect_leader(now, leader)
        self._update_quiet_until()
        return said

    def slow_down(self, stream: str, now: float, apply_s: float) -> list[Delivery]:
        """Delay the majority of the replicas: it applies the leader's messages after ``apply_s`` seconds; 0 is at once.

        Until then a message is a proposal: it counts in the leader's checks, is invisible to reads, and is not
        acknowledged. An atomic batch among them may be lost with the leader.
        """
        said = self.on_time(now)
        self.stream(stream).store.apply_s = apply_s if self.stream(stream).store.is_replicated else 0.0
        return said

    def hold_replica(self, stream: str, is_held: bool) -> None:
        """Stop one replica from applying new messages; when released, it catches up at once.

        Any replica answers direct gets: this one answers every second of them, with its own messages.
        """
        self.stream(stream).hold_replica(is_held)

    def next_answer_at(self) -> float | None:
        """When `on_time` has an answer that a client waits for; None without one."""
        times = [
            each
            for stream in self._streams.values()
            for each in (stream.next_answer_at(), stream.next_delivery_at())
            if each is not None
        ]
        return min(times, default=None)

    def fork(self) -> ModelServer:
        """A copy with an independent future: one side of a partition continues with it."""
        return copy.deepcopy(self)

    def restart(self, now: float, *, back_at: float | None = None) -> list[Delivery]:
        """Restart the server, after a stop or a kill: stored messages stay, no batch is open.

        Until ``back_at`` no message expires and no schedule fires.
        """
        said = self.on_time(now)
        for stream in self._streams.values():
            stream.restart(now if back_at is None else back_at)
        return said

    def _copy(self, now: float) -> list[Delivery]:
        """Fill the streams that copy others."""
        said: list[Delivery] = []
        for copying in self._copies.values():
            source = self._streams.get(copying.source)
            if source is not None:
                said += copying.run(source, self._streams[copying.target], now)
        return said

    def _with_advisories(self, said: list[Delivery], now: float) -> list[Delivery]:
        """Store advisories in a stream with their subjects, and add the resulting messages."""
        if not self._stores_advisories:
            return said
        said = list(said)
        for each in said:  # it grows: storing one may cause another
            stream = self._route(each.subject) if each.subject.startswith(replies.ADVISORIES) else None
            if stream is not None:
                said += stream.publish(each.subject, each.data, None, None, now)
        return said

    def _forget_routes(self) -> None:
        self._routes.clear()
        subjects = [subject for each in self._streams.values() for subject in each.config.subjects or ()]
        self._stores_advisories = any(overlaps(f"{replies.ADVISORIES}>", subject) for subject in subjects)

    def _update_quiet_until(self) -> None:
        deadline = self.next_deadline()
        self._quiet_until = math.inf if deadline is None else deadline

    def _check(self, config: StreamConfig) -> None:
        if named := [name for name in _NOT_MODELLED if getattr(config, name)]:
            raise ConfigError(f"{', '.join(named)}: the model does not know these; use a real server")
        if config.retention not in (None, "limits"):
            raise ConfigError(f"retention={config.retention!r}: the model knows only 'limits'; use a real server")
        if config.allow_atomic and config.persist_mode == "async":
            raise server_error(
                500, Code.STREAM_INVALID_CONFIG, "async persist mode is not supported with atomic batch publish"
            )
        others = [
            subject
            for each in self._streams.values()
            if each.config.name != config.name
            for subject in each.config.subjects or ()
        ]
        if any(overlaps(one, other) for one in config.subjects or () for other in others):
            raise server_error(400, Code.SUBJECTS_OVERLAP, "subjects overlap with an existing stream")

    def _route(self, subject: str) -> ModelStream | None:
        validate_subject(subject)
        for stream in self._streams.values():
            if any(matches(each, subject) for each in stream.config.subjects or ()):
                if len(self._routes) >= _MAX_ROUTES:
                    self._routes.clear()
                self._routes[subject] = stream
                return stream
        return None

    def _count_atomic(self) -> int:
        return sum(len(stream.atomic) for stream in self._streams.values())

    def _count_fast(self) -> int:
        return sum(len(stream.fast) for stream in self._streams.values())

    def _abandon(self, stream: str, batch: str, reason: str, now: float) -> Delivery:
        self._advisories += 1
        return replies.abandoned(stream, batch, reason, number=self._advisories, now=now)


def _everybody_listens(subject: str) -> bool:
    return True
