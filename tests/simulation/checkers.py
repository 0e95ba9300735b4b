"""What must be true of publishers, whatever happened. Checkers know the stream and the machine, not the faults.

Each is a class with ``look``, called after every step of a run, and ``finish``, called when all is over. What they find
is a :class:`Violation`: an assertion that names the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from simulation.world import MAX_MESSAGE_BYTES, BatchRun, EndlessRun, Run, World

from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    ConnectionClosed,
    JetStreamUnavailable,
    ServerError,
    TooManyBatches,
    UsageError,
)
from jetspark.publish.fast_batch import FastState
from jetspark.publish.fast_options import Refusal
from jetspark.publish.outgoing import CHUNK_MESSAGES
from jetspark.testing.network import Publication

# Frames of the connection itself (subscriptions, pings) do not wait for room; and what a machine hands over in one
# piece goes through an empty buffer, whatever its size.
CONTROL_BYTES = 4096
PIECE_BYTES = CHUNK_MESSAGES * (MAX_MESSAGE_BYTES + 200)
# Timers fire on time here; what comes between a deadline and its effect is less than this.
STALL_SLACK_S = 1.0


class Violation(AssertionError):
    """A guarantee was broken."""


def require(condition: object, run: Run, claim: str, *facts: Any) -> None:
    if not condition:
        raise Violation(f"{run.name}: {claim}: {', '.join(map(str, facts))}; {run.describe()}")


class Judge:
    """What all checkers are; each has a planted bug in ``test_planted.py`` that it finds."""

    def look(self, world: World, run: Run) -> None:
        """Nothing to see before the end."""

    def finish(self, world: World, run: Run) -> None:
        """Nothing left to say."""


# ---- one batch -------------------------------------------------------------------------------------------------------


class AcknowledgedIsStored(Judge):
    """Mode fail: all up to ``acknowledged`` is in the stream at that moment, and it never goes back."""

    def __init__(self) -> None:
        self._acknowledged = 0

    def look(self, world: World, run: Run) -> None:
        assert isinstance(run, BatchRun)
        acknowledged = run.batch.acknowledged
        if acknowledged == self._acknowledged:
            return
        require(acknowledged > self._acknowledged, run, "acknowledged goes back", self._acknowledged, acknowledged)
        stored = set(world.stored(run.name))
        missing = [number for number in range(self._acknowledged + 1, acknowledged + 1) if number not in stored]
        require(not missing, run, "acknowledged and not stored", missing)
        self._acknowledged = acknowledged


class StoredIsAPrefix(Judge):
    """Mode fail: what is stored are the first messages, once each, in order, and as many as the machine says."""

    def finish(self, world: World, run: Run) -> None:
        assert isinstance(run, BatchRun)
        batch, stored = run.batch, world.stored(run.name)
        require(stored == list(range(1, len(stored) + 1)), run, "stored is no prefix", stored)
        require(run.is_over, run, "the batch never ended")
        match batch.failure:
            case None if not batch.is_ended:
                require(not stored, run, "left before the beginning, and stored", stored)
            case None:
                require(len(stored) == run.total, run, "committed and not complete", len(stored), run.total)
            case BatchCutShort(stored=count):
                require(len(stored) == count, run, "cut short elsewhere", len(stored), count)
            case BatchInDoubt(stored=count):
                require(count <= len(stored) <= run.sent, run, "in doubt about what is known", len(stored), count)
            case ServerError() | JetStreamUnavailable():
                require(not stored, run, "refused from the start, and stored", stored)
            case UsageError() | ConnectionClosed():
                pass  # it was left
            case failure:
                require(False, run, "an unexpected end", repr(failure))


class MissingIsReported(Judge):
    """Mode ok: each message is stored, or reported once as lost or refused, or in doubt.

    Reported is what the server said and the client heard, no more and no less, and callbacks get it once. In doubt is
    what was under way when a session ended. A message may be missing without a report only if it is in doubt, and

    * the server had reported it into a session that was lost; or
    * the batch failed, and a leader was alone: it takes messages that no other replica has, and reports nothing when
      they are lost.
    """

    def finish(self, world: World, run: Run) -> None:
        assert isinstance(run, BatchRun)
        batch, stored = run.batch, world.stored(run.name)
        require(stored == sorted(set(stored)), run, "doubled or out of order", stored)
        require(run.is_over, run, "the batch never ended")
        if isinstance(batch.failure, ServerError | JetStreamUnavailable):
            require(not stored, run, "refused from the start, and stored", stored)
            return
        reports: list[range | Refusal] = [*batch.losses.gaps, *batch.losses.errors]
        numbers = _numbers(reports)
        reported = set(numbers)
        require(len(numbers) == len(reported), run, "reported twice", _doubled(numbers))
        told = _numbers([*run.told, *batch.losses.news])
        require(sorted(told) == sorted(numbers), run, "callbacks were told otherwise", sorted(told), sorted(numbers))
        wrongly = sorted(reported & set(stored))
        require(not wrongly, run, "reported missing, and stored", wrongly)
        heard = set(run.reports.heard) & set(range(1, run.sent + 1))
        require(heard == reported, run, "reported is not what was heard", sorted(heard), sorted(reported))
        doubtful = _numbers(batch.losses.doubts)
        require(len(doubtful) == len(set(doubtful)), run, "in doubt twice", _doubled(doubtful))
        require(not reported & set(doubtful), run, "reported, and in doubt", sorted(reported & set(doubtful)))
        under_way = set(_numbers(run.unheard))
        require(set(doubtful) <= under_way, run, "in doubt without a reason", sorted(set(doubtful) - under_way))
        judged = run.sent if batch.failure is None else min(batch.acknowledged, run.sent)
        silently = set(range(1, judged + 1)) - set(stored) - reported
        require(silently <= set(doubtful), run, "missing without a word", sorted(silently - set(doubtful)))
        if batch.failure is None or not world.had_a_leader_alone:
            unsaid = silently - set(run.reports.said)
            require(not unsaid, run, "missing, and no server ever said so", sorted(unsaid))
        if batch.failure is None:
            known = [number for number in stored if number not in doubtful]
            require(batch.stored == len(known), run, "counted wrongly", batch.stored, len(known))


def _numbers(reports: Iterable[range | Refusal]) -> list[int]:
    return [number for each in reports for number in (each if isinstance(each, range) else (each.sequence,))]


def _doubled(numbers: list[int]) -> list[int]:
    return sorted(number for number, count in Counter(numbers).items() if count > 1)


class KeepsPace(Judge):
    """No message is sent that the server, by what was heard of it, had not made room for; the end needs no room.

    Of those that it has not, as many are kept as one acknowledgement is for.
    """

    def __init__(self) -> None:
        self._allowed = self._kept = 1

    def look(self, world: World, run: Run) -> None:
        assert isinstance(run, BatchRun)
        batch = run.batch
        if batch.is_new:
            self._allowed = self._kept = 1
        for progress, msgs_per_ack in run.heard:
            allowed = progress + msgs_per_ack * run.options.max_outstanding_acks
            self._allowed = max(self._allowed, allowed)
            self._kept = max(self._kept, allowed + msgs_per_ack)
        run.heard.clear()
        if batch.state is FastState.OPEN:
            require(batch.sender.sent <= self._allowed, run, "sent more than there was room for", self._allowed)
            require(batch.sender.sequence <= self._kept, run, "kept more than may come early", self._kept)


class NoStall(Judge):
    """While there is something to wait for, something happens within the timeout; at the latest, the batch ends."""

    def __init__(self) -> None:
        self._facts: tuple[Any, ...] = ()
        self._since = 0.0

    def look(self, world: World, run: Run) -> None:
        assert isinstance(run, BatchRun)
        batch = run.batch
        facts = (
            batch.state,
            batch.sender.sequence,
            batch.acknowledged,
            len(batch.losses.gaps),
            len(batch.losses.errors),
            run.available,
        )
        now = world.clock.now
        if facts != self._facts or not run.is_waiting_for_server:
            self._facts, self._since = facts, now
        require(
            now <= self._since + run.options.timeout + STALL_SLACK_S, run, "nothing happened for", now - self._since
        )

    def finish(self, world: World, run: Run) -> None:
        assert isinstance(run, BatchRun)
        require(run.is_over, run, "not over, long after everything was well")
        if not world.has_faults:
            # A first message that is too large opens nothing, in either mode.
            may_fail = bool(run.bad) if run.options.gap == "fail" else run.bad.get(1) == "too large"
            may_fail = may_fail or isinstance(run.batch.failure, TooManyBatches)
            is_expected = run.batch.failure is None or may_fail
            require(
                is_expected and not isinstance(run.batch.failure, BatchInDoubt), run, "failed, and nothing was wrong"
            )


# ---- endless publishing ----------------------------------------------------------------------------------------------


class PublishedIsStored(Judge):
    """All up to ``published`` is in the stream at that moment, or was handed back; it never goes back."""

    def __init__(self) -> None:
        self._published = 0

    def look(self, world: World, run: Run) -> None:
        assert isinstance(run, EndlessRun)
        published = run.endless.stages.published
        if published == self._published:
            return
        require(published > self._published, run, "published goes back", self._published, published)
        stored = set(world.stored(run.name))
        span = range(self._published + 1, published + 1)
        missing = [number for number in span if number not in stored and number not in run.refused]
        require(not missing, run, "published and not stored", missing)
        self._published = published


class EverythingArrives(Judge):
    """In the end all is stored, in order; the first time, at least, and with message ids that is all there is."""

    def finish(self, world: World, run: Run) -> None:
        assert isinstance(run, EndlessRun)
        endless, stored = run.endless, world.stored(run.name)
        firsts = list(dict.fromkeys(stored))
        require(firsts == sorted(firsts), run, "out of order", firsts)
        doubled = len(stored) - len(firsts)
        allowed = 0 if run.options.message_ids else endless.possibly_doubled
        require(doubled <= allowed, run, "doubled", doubled, allowed, stored)
        require(not set(run.refused) & set(firsts), run, "handed back, and stored", run.refused)
        require(set(run.refused) <= set(run.bad), run, "handed back without a reason", run.refused)
        if endless.failure is not None:
            first_bad = min(run.bad, default=0)
            is_expected = run.options.on_refused is None and endless.stages.published + 1 == first_bad
            require(is_expected, run, "gave up")
            require(len(endless.stages.unpublished()) == endless.stages.pending, run, "lost what it kept")
            return
        require(run.is_over, run, "not over, long after everything was well")
        require(
            endless.stages.published == run.total, run, "closed and not complete", endless.stages.published, run.total
        )
        wanted = [number for number in range(1, run.total + 1) if number not in run.refused]
        require(firsts == wanted, run, "lost", sorted(set(wanted) - set(firsts)))


class LeftIsAccountedFor(Judge):
    """Of a publisher that was left, what is missing is in ``unpublished()``, which does not change any more."""

    def __init__(self) -> None:
        self._left: list[Any] | None = None

    def look(self, world: World, run: Run) -> None:
        assert isinstance(run, EndlessRun)
        if run.has_left and self._left is None:
            self._left = run.endless.stages.unpublished()

    def finish(self, world: World, run: Run) -> None:
        assert isinstance(run, EndlessRun)
        endless, stored = run.endless, world.stored(run.name)
        left = {int(item[1].split(b":")[1]) for item in endless.stages.unpublished()}
        require(self._left == endless.stages.unpublished(), run, "went on after it was left")
        firsts = list(dict.fromkeys(stored))
        require(firsts == sorted(firsts), run, "out of order", firsts)
        doubled = len(stored) - len(firsts)
        require(doubled <= (0 if run.options.message_ids else endless.possibly_doubled), run, "doubled", stored)
        missing = set(range(1, endless.stages.accepted + 1)) - set(stored) - set(run.refused)
        require(missing <= left, run, "left and forgotten", sorted(missing - left))


class MemoryIsBounded(Judge):
    """No more is kept than was agreed, by the publisher and by the connection."""

    def look(self, world: World, run: Run) -> None:
        connection = run.transport.machine
        limit = max(connection.options.send_buffer_bytes, PIECE_BYTES) + CONTROL_BYTES
        require(connection.out_bytes <= limit, run, "the connection keeps too much", connection.out_bytes)
        if not isinstance(run, EndlessRun):
            return
        endless, options = run.endless, run.options
        require(
            endless.stages.pending <= options.max_pending_messages,
            run,
            "too many messages are kept",
            endless.stages.pending,
        )
        if not options.max_pending_bytes < 1 << 20:
            return
        kept = endless.stages.unpublished()
        size = sum(
            len(item[1]) + (len(item[2]) if len(item) == 3 and isinstance(item[2], bytes) else 0) for item in kept
        )
        # The message that fills the last byte may be larger than what was left.
        largest = max((len(item[1]) for item in kept), default=0) + 200
        require(size <= options.max_pending_bytes + largest, run, "too many bytes are kept", size)


# ---- at the server's door --------------------------------------------------------------------------------------------


class SentOnce(Judge):
    """Watches the front: a sequence of a batch arrives once."""

    def __init__(self, world: World) -> None:
        self._seen: dict[str, set[int]] = {}
        self._world = world
        world.front.watchers.append(self.on_published)

    def on_published(self, message: Publication) -> None:
        if not message.reply.endswith(".$FI"):
            return
        batch, sequence, operation, _ = message.reply.rsplit(".", 3)
        if operation == "4":
            return
        seen = self._seen.setdefault(batch, set())
        if int(sequence) in seen:
            raise Violation(f"seed {self._world.seed}: sequence {sequence} of {batch} was sent twice")
        seen.add(int(sequence))


def fast_checkers(gap: str) -> list[Any]:
    return [
        *([AcknowledgedIsStored(), StoredIsAPrefix()] if gap == "fail" else [MissingIsReported()]),
        KeepsPace(),
        NoStall(),
        MemoryIsBounded(),
    ]


def endless_checkers() -> list[Any]:
    return [PublishedIsStored(), EverythingArrives(), MemoryIsBounded()]
