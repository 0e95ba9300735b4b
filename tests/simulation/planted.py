"""Mistakes, each of which a checker has to find: machines that are wrong in one way. The table is in
``test_planted.py``."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from unittest import mock

from jetspark.batcher import Batcher, BatcherTimeout
from jetspark.batcher.config import Flushed, Stats
from jetspark.core.connection import Connection, Done
from jetspark.core.headers import HeadersLike
from jetspark.errors import BatchInDoubt
from jetspark.jetstream.info import PubAck, StoredMessage
from jetspark.jetstream.operations import Api
from jetspark.jetstream.operations import Operation as Asking
from jetspark.publish import atomic_resolve
from jetspark.publish.atomic import AtomicMachine, Outcome
from jetspark.publish.fast_batch import FastMachine
from jetspark.publish.fast_options import FastBatchOptions, Refusal
from jetspark.publish.fast_publisher import FastPublisherMachine
from jetspark.publish.fast_replies import FastLosses
from jetspark.publish.fast_sending import FastSender, FrameKind
from jetspark.publish.outgoing import Item

# ---- fast batches ----------------------------------------------------------------------------------------------------


class Resends(FastMachine):
    """Sends what it is not sure of again, in the same batch."""

    def __init__(self, machine: Connection, owner: Any, options: FastBatchOptions) -> None:
        super().__init__(machine, owner, options)
        self.sender = _SendsTwice(machine, options)


class _SendsTwice(FastSender):
    def add(self, item: Item, now: float) -> None:
        super().add(item, now)
        self._connection.publish_frames([self._frames.frame(item, self.sequence, FrameKind.APPEND)])


class TakesLostForStored(FastMachine):
    def _on_gap(self, missing: range, now: float) -> None:
        self._on_ack(missing.stop - 1, self.sender.msgs_per_ack, now)


class KeepsLossesToItself(FastMachine):
    def _on_gap(self, missing: range, now: float) -> None:
        super()._on_gap(missing, now)
        self.losses.gaps.clear()


class SeesNoProgressInErrors(FastMachine):
    def _on_refused(self, refusal: Refusal, now: float) -> None:
        self.losses.add_refusal(refusal)


class BlamesTheWrongOne(FastMachine):
    def _on_refused(self, refusal: Refusal, now: float) -> None:
        super()._on_refused(Refusal(refusal.sequence - 1, refusal.error), now)


class IgnoresThePace(FastMachine):
    def __init__(self, machine: Connection, owner: Any, options: FastBatchOptions) -> None:
        super().__init__(machine, owner, options)
        self.sender = _WantsAll(machine, options)


class _WantsAll(FastSender):
    def _set_limit(self) -> None:
        super()._set_limit()
        self.wanted = self.limit


class KeepsWithoutEnd(FastMachine):
    def __init__(self, machine: Connection, owner: Any, options: FastBatchOptions) -> None:
        super().__init__(machine, owner, options)
        self.sender = _HasAlwaysRoom(machine, options)


class _HasAlwaysRoom(FastSender):
    @property
    def room(self) -> int:
        return 1000 if super().room else 0


class NeverAsks(FastMachine):
    def next_deadline(self) -> float | None:
        return None


class ClaimsTheWhole(FastMachine):
    """Takes every final acknowledgement for one of everything."""

    def _on_final(self, ack: PubAck) -> None:
        self.ack = ack
        self.acknowledged = self.messages
        self._over(None)


class ForgetsItsAcks(FastMachine):
    """Takes back what it knew when a session is lost."""

    def _on_disconnected(self) -> None:
        self.acknowledged = 0


class ReportsTwice(FastMachine):
    """Takes every gap for a new one, though a new leader repeats what the old one had said."""

    def _on_gap(self, missing: range, now: float) -> None:
        self.losses._gaps_end = 0
        self.losses._refused.clear()
        super()._on_gap(missing, now)


class TellsTwice(FastMachine):
    def __init__(self, machine: Connection, owner: Any, options: FastBatchOptions) -> None:
        super().__init__(machine, owner, options)
        self.losses = _ToldTwice()


class _ToldTwice(FastLosses):
    def _report(self, reports: list[Any], entry: range | Refusal) -> None:
        super()._report(reports, entry)
        self.news.append(entry)


class IsNeverInDoubt(FastMachine):
    def __init__(self, machine: Connection, owner: Any, options: FastBatchOptions) -> None:
        super().__init__(machine, owner, options)
        self.losses = _WithoutDoubts()


class _WithoutDoubts(FastLosses):
    @property
    def doubts(self) -> list[range]:
        return []


class DoubtsEverything(FastMachine):
    def __init__(self, machine: Connection, owner: Any, options: FastBatchOptions) -> None:
        super().__init__(machine, owner, options)
        self.losses = _AllDoubts(self.sender)


class _AllDoubts(FastLosses):
    def __init__(self, sender: FastSender) -> None:
        super().__init__()
        self._sender = sender

    @property
    def doubts(self) -> list[range]:
        return [range(1, self._sender.sent + 1)]


class DoubtsWhatItKnows(FastMachine):
    """Leaves in doubt what was reported since."""

    def __init__(self, machine: Connection, owner: Any, options: FastBatchOptions) -> None:
        super().__init__(machine, owner, options)
        self.losses = _OldDoubts()


class _OldDoubts(FastLosses):
    @property
    def doubts(self) -> list[range]:
        return list(self._unheard)


class CountsWhatItDoubts(FastMachine):
    @property
    def stored(self) -> int:
        unheard, self.losses._unheard = self.losses._unheard, []
        try:
            return super().stored
        finally:
            self.losses._unheard = unheard


class PingsWithoutMeasure(FastMachine):
    """Pings do not wait for room in the connection's buffer, so they have to be small."""

    def ping(self, now: float) -> None:
        super().ping(now)
        sender = self.sender
        if self.inbox.subscription is not None and not self._connection.is_closed:
            frame = sender._frames.frame((sender.first_subject, b"x" * 700_000), sender.sent, FrameKind.PING)
            self._connection.publish_frames([frame] * 2, is_urgent=True)


# ---- endless publishing ----------------------------------------------------------------------------------------------


class DropsWhatWasSent(FastPublisherMachine):
    def _on_batch_over(self, batch: FastMachine, now: float) -> None:
        if batch.failure is not None:
            self.stages.published += len(self.stages.sent)
        self.stages.sent.clear()


class PutsItBehind(FastPublisherMachine):
    def _on_batch_over(self, batch: FastMachine, now: float) -> None:
        sent, self.stages.sent = self.stages.sent, deque()
        super()._on_batch_over(batch, now)
        self.stages.backlog.extend(sent)


class KeepsDoublesToItself(FastPublisherMachine):
    def _on_batch_over(self, batch: FastMachine, now: float) -> None:
        super()._on_batch_over(batch, now)
        self.possibly_doubled = 0


class CountsAhead(FastPublisherMachine):
    """What is sent is as good as stored."""

    def _on_acknowledged(self, stored: int, now: float) -> None:
        super()._on_acknowledged(self._confirmed_in_batch + len(self.stages.sent), now)


class HasRoomForAll(FastPublisherMachine):
    @property
    def room(self) -> int:
        return 100_000


class ForgetsTheIds(FastPublisherMachine):
    """Of messages that have headers already."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._encoder._encode = lambda headers, position: b"NATS/1.0\r\nNats-Nothing: 1\r\n\r\n"  # type: ignore[method-assign]


class GivesNoIds(FastPublisherMachine):
    """To messages without headers."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._encoder._id_head = b"NATS/1.0\r\nNats-Nothing: "


class BelievesEveryAck(FastPublisherMachine):
    """Takes a leader's word for what it was sent before."""

    def _claim(self, count: int, first: int) -> int:
        super()._claim(count, first)
        return len(self.stages.claimed)


class DoesNotAsk(FastPublisherMachine):
    """Takes the final acknowledgement for a proof."""

    def _on_batch_over(self, batch: FastMachine, now: float) -> None:
        self._publish(self.stages.claimed, len(self.stages.claimed), now)
        super()._on_batch_over(batch, now)


class ForgetsWhatItLeaves(FastPublisherMachine):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        unpublished = self.stages.unpublished
        self.stages.unpublished = lambda: unpublished()[1:]  # type: ignore[method-assign]


class GoesOnWhenLeft(FastPublisherMachine):
    def abandon(self, now: float) -> None:
        self._is_closing = True


# ---- atomic batches --------------------------------------------------------------------------------------------------


class TrustsTheTimeout(AtomicMachine):
    """No answer to a commit: then it was not stored, surely."""

    def commit(
        self, subject: str | None = None, data: bytes = b"", headers: HeadersLike | None = None
    ) -> Asking[PubAck]:
        try:
            return (yield from super().commit(subject, data, headers))
        except BatchInDoubt:
            self.outcome = "not stored"
            raise


class NeverResolves(AtomicMachine):
    def resolve(self, age_s: float) -> Asking[Outcome]:
        yield from ()
        raise BatchInDoubt(self.id, "who knows")


@contextlib.contextmanager
def resolving_by(**names: Any) -> Iterator[None]:
    """Another way to resolve, for as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(atomic_resolve, name, value))
        yield


_has_applied = atomic_resolve._has_applied


def settled_without_a_majority() -> contextlib.AbstractContextManager[None]:
    return resolving_by(_has_applied=lambda info, last, since_s: info["state"]["last_seq"] >= last)


def settled_by_the_never_heard() -> contextlib.AbstractContextManager[None]:
    """Takes 0 nanoseconds for a moment ago."""

    def is_settled(info: Mapping[str, Any], last: int, since_s: float) -> bool:
        heard = copy.deepcopy(dict(info))
        for replica in heard["cluster"]["replicas"]:
            replica["active"] = replica["active"] or 1
        return _has_applied(heard, last, since_s)

    return resolving_by(_has_applied=is_settled)


def settled_before_all_is_applied() -> contextlib.AbstractContextManager[None]:
    return resolving_by(_has_applied=lambda info, last, since_s: _has_applied(info, 0, since_s))


def resolved_without_a_fence() -> contextlib.AbstractContextManager[None]:
    def fence(doubt: object) -> Generator[Any, Any, tuple[str, int]]:
        yield from ()
        return "EVENTS", 0

    return resolving_by(_fence=fence)


def resolved_by_any_leader() -> contextlib.AbstractContextManager[None]:
    return resolving_by(_leader=lambda info: "whoever")


@contextlib.contextmanager
def resolved_by_any_replica() -> Iterator[None]:
    get = Api.get_message

    def get_direct(self: Api, stream: str, body: Mapping[str, Any], *, direct: bool) -> Asking[StoredMessage]:
        return get(self, stream, body, direct=True)

    with mock.patch.object(Api, "get_message", get_direct):
        yield


# ---- sessions --------------------------------------------------------------------------------------------------------


class LosesAWrite(Connection):
    _writes = 0

    def data_to_send(self) -> bytes:
        data = super().data_to_send()
        self._writes += bool(data)
        return b"" if data.startswith(b"PUB") and data.count(b"PUB") == 1 and not self._writes % 5 else data


class WritesTwice(Connection):
    def data_to_send(self) -> bytes:
        data = super().data_to_send()
        return data * 2 if data.startswith(b"PUB") else data


class SubscribesTwice(Connection):
    def data_to_send(self) -> bytes:
        data = super().data_to_send()
        return data * 2 if data.startswith(b"SUB") else data + data[data.find(b"SUB") :] if b"SUB" in data else data


class ConfirmsEarly(Connection):
    def flush(self, handle: Any) -> None:
        self._events.append(Done(handle))


class DeliversTwice(Connection):
    def receive_data(self, data: bytes) -> None:
        super().receive_data(data)
        for subscription in self.subscriptions.all:
            if len(subscription.pending) == 3:
                subscription.pending.append(subscription.pending[-1])


# ---- the batcher -----------------------------------------------------------------------------------------------------


class Miscounts(Batcher[Any]):
    def stats(self) -> Stats:
        stats = super().stats()
        return dataclasses.replace(stats, in_flight=stats.in_flight + (stats.flushed_ok > 3))


class WritesAgain(Batcher[Any]):
    def __init__(self, config: Any) -> None:
        super().__init__(dataclasses.replace(config, sink=_Twice(config.sink)))


class _Twice:
    def __init__(self, sink: Any) -> None:
        self._write = sink.write

    async def write(self, batch: list[Any]) -> None:
        again = list(batch)
        await self._write(batch)
        await self._write(again)


class FlushesNothing(Batcher[Any]):
    async def flush(self, *, timeout: float | None = None) -> Flushed:
        await asyncio.sleep(0)
        return Flushed(0, 0)


class ShutsDownInSilence(Batcher[Any]):
    async def shutdown(self, *, timeout: float | None = None) -> None:
        with contextlib.suppress(BatcherTimeout):
            await super().shutdown(timeout=timeout)
