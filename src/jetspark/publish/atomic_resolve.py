"""Resolving the outcome of an atomic batch whose commit was not answered.

The procedure has three steps, and each is the precondition of the next.

1. *Fence.* A message that claims to be the whole batch, under the same id, with an expectation that cannot come true.
   If the server still had the batch (10176), the commit had not arrived; now the batch is gone, and a late commit
   finds no batch and is refused. Otherwise (10071) the answer has the stream's name and its last sequence, including
   proposals that are still being replicated. The fence itself can never be stored; like every message of a batch it is
   received by plain subscribers of the subject.
2. *Wait.* The leader must have applied everything up to that sequence, and must still be the leader: it has heard
   from a majority of the replicas since the fence. Otherwise a commit could be invisible and still be carried out. And
   it must be the server that answered the fence, whose answer does not name it: an old leader that is cut off answers,
   too, without the messages of the new one. So the leader is read before and after the fence.
3. *Look*, through the leader, for a message with the batch's id. Every stored message carries it, so one is enough.
   Its absence counts only if the same server still leads afterwards: otherwise another server may have been read. If
   the last message of a subject is older than the batch, the batch is not there; if it is newer, the messages since the
   batch began are read. Times are the server's: its present time less the batch's age, less a margin for clocks that
   differ.

Limits: absence proves nothing if the stream may have removed the messages. That is so if every subject of the batch was
overwritten in a stream that keeps no more, or if messages were consumed from a work queue, expired or purged. And a
batch whose first message was never acknowledged and whose session is lost may still be on its way, as a whole.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetspark.codes import Code
from jetspark.core.step_runner import Sleep
from jetspark.core.subjects import matches
from jetspark.errors import BatchInDoubt, MessageNotFound, ProtocolError
from jetspark.jetstream import wire
from jetspark.jetstream.info import PubAck, StoredMessage
from jetspark.jetstream.operations import Api, Operation, Request

__all__ = ["IMPOSSIBLE", "Doubt", "find"]

# Larger than the last sequence of any stream, so that no stream meets the expectation.
IMPOSSIBLE = {"Nats-Expected-Last-Sequence": str(2**63 - 1)}

# Replicas whose clocks differ by more, and a leader that changed, could hide a batch behind messages of other writers.
CLOCK_MARGIN_S = 10.0
# The leader of an idle stream hears from its replicas every two seconds or so (measured: 1.9 s).
WAIT_PAUSE_S = 0.1
WAIT_MAX_S = 5.0
# Each read is a round trip, some tenths of a millisecond: this many take a second or more.
MAX_READS = 10_000

_last_number = re.compile(r"(\d+)\s*$").search


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A batch in doubt."""

    batch_id: str
    size: int
    """Number of its messages."""
    subjects: Sequence[str]
    """Its subjects without repetition, the last message's first."""
    may_expire: bool
    """True if a message has a TTL."""
    may_still_arrive: Callable[[], bool]
    """True while all of it, including the first message, may still be on its way over a lost session."""
    age_s: float
    timeout_s: float
    """Bound of the wait for room among the open batches."""


def find(api: Api, doubt: Doubt) -> Operation[PubAck | None]:
    """The acknowledgement of the commit, or None if the batch is not stored and never will be.

    Raises:
        BatchInDoubt: The outcome cannot be determined.
    """
    waited_s, leader = 0.0, ""
    while True:
        fence = yield from _fence(doubt)
        if fence is None:
            return None
        stream, last_sequence = fence
        info, fenced_s = (yield from _info(api, stream)), waited_s
        if not _is_replicated(info):
            leader = _leader(info)
        while _leader(info) == leader and not _has_applied(info, last_sequence, waited_s - fenced_s):
            if waited_s >= WAIT_MAX_S:
                raise BatchInDoubt(doubt.batch_id, f"the leader of {stream!r} does not hear from its replicas")
            yield Sleep(WAIT_PAUSE_S)
            waited_s += WAIT_PAUSE_S
            info = yield from _info(api, stream)
        if _leader(info) == leader:
            found = yield from _Search(api, doubt, stream, info).run()
            if found is not None or not _is_replicated(info):
                return found
            info = yield from _info(api, stream)
            if _leader(info) == leader:
                return None
        # The leader has changed since the last read, or this was the first round: repeat all steps.
        if leader:
            if waited_s >= WAIT_MAX_S:
                raise BatchInDoubt(doubt.batch_id, f"{stream!r} changes its leader again and again")
            yield Sleep(WAIT_PAUSE_S)
            waited_s += WAIT_PAUSE_S
        leader = _leader(info)


# ---- fence and wait --------------------------------------------------------------------------------------------------


def _fence(doubt: Doubt) -> Operation[tuple[str, int] | None]:
    """The stream and its last sequence once all is applied; None if the batch was still waiting for its commit."""
    headers = {
        "Nats-Batch-Id": doubt.batch_id,
        "Nats-Batch-Sequence": "1",
        "Nats-Batch-Commit": "1",
        **IMPOSSIBLE,
    }
    waited_s = 0.0
    while True:
        reply = yield Request(doubt.subjects[0], b"", headers, may_be_leaderless=True)
        answer = wire.read_object(reply.data)
        error = wire.error_of(answer)
        number = None if error is None else error.err_code
        if number == Code.ATOMIC_INCOMPLETE:
            return None
        if number != Code.ATOMIC_TOO_MANY or waited_s >= doubt.timeout_s:
            break
        yield Sleep(WAIT_PAUSE_S)
        waited_s += WAIT_PAUSE_S
    stream = answer.get("stream")
    if error is None or not isinstance(stream, str) or number not in (Code.WRONG_LAST_SEQUENCE, Code.ATOMIC_DISABLED):
        raise BatchInDoubt(doubt.batch_id, f"the stream gives no account of itself: {error or reply.data[:80]!r}")
    # A stream that has stopped accepting batches cannot be fenced; it has had time to apply all earlier messages.
    found = _last_number(error.description) if number == Code.WRONG_LAST_SEQUENCE else None
    return stream, 0 if found is None else int(found[1])


def _info(api: Api, stream: str) -> Operation[dict[str, Any]]:
    return wire.read_reply((yield Request(f"{api.prefix}.STREAM.INFO.{stream}")).data)


def _leader(info: Mapping[str, Any]) -> str:
    return str((info.get("cluster") or {}).get("leader") or "alone")


def _is_replicated(info: Mapping[str, Any]) -> bool:
    return int(info["config"].get("num_replicas", 1)) > 1


def _has_applied(info: Mapping[str, Any], last_sequence: int, since_s: float) -> bool:
    """True if all is applied, by a leader that a majority has confirmed since the fence, ``since_s`` seconds ago."""
    if info["state"]["last_seq"] < last_sequence:
        return False
    if not _is_replicated(info):
        return True
    replicas = info["config"]["num_replicas"]
    others = (info.get("cluster") or {}).get("replicas") or []
    # For a replica that a leader has not heard from since its election it reports 0 nanoseconds (measured on 2.15.1).
    heard = sum(not each.get("offline") and 0 < wire.ns_to_seconds(each.get("active", 0)) < since_s for each in others)
    return 2 * (heard + 1) > int(replicas)


# ---- look ------------------------------------------------------------------------------------------------------------


class _Search:
    """Searches a stream that has applied everything for a message of the batch."""

    def __init__(self, api: Api, doubt: Doubt, stream: str, info: Mapping[str, Any]) -> None:
        self._api, self._doubt, self._stream = api, doubt, stream
        self._config, self._state = info["config"], info["state"]
        now = wire.parse_time(str(info.get("ts", "")))
        if now is None:
            raise ProtocolError("a stream that does not tell its time")
        self._began = now - datetime.timedelta(seconds=doubt.age_s + CLOCK_MARGIN_S)
        self._since = 0
        """A lower bound of the batch's sequences."""
        self._reads = 0

    def run(self) -> Operation[PubAck | None]:
        first = yield from self._read({"start_time": wire.time_text(self._began), "next_by_subj": ">"})
        self._since = self._state["last_seq"] + 1 if first is None else first.sequence
        busy = []
        for subject in self._subjects():
            last = yield from self._read({"last_by_subj": subject})
            if last is not None and last.sequence >= self._since:
                if self._is_ours(last):
                    return self._ack(last)
                busy.append(subject)
            elif self._absence_proves():
                self._check_arrival()
                return None
        for subject in busy:
            others, is_rolled_up, sequence = 0, False, self._since
            while (message := (yield from self._read({"seq": sequence, "next_by_subj": subject}))) is not None:
                if self._is_ours(message):
                    return self._ack(message)
                others += 1
                is_rolled_up = is_rolled_up or "Nats-Rollup" in message.headers
                sequence = message.sequence + 1
            limit = self._config.get("max_msgs_per_subject", -1)
            if not is_rolled_up and (limit <= 0 or others < limit) and self._absence_proves():
                self._check_arrival()
                return None
        raise BatchInDoubt(
            self._doubt.batch_id, f"{self._stream!r} has no message of it, but no longer has all it was sent since"
        )

    def _subjects(self) -> Sequence[str]:
        """The subjects under which the stream stores the batch."""
        filters = self._config.get("subjects") or ()
        is_mapped = self._config.get("subject_transform") is not None or not all(
            any(matches(each, subject) for each in filters) for subject in self._doubt.subjects
        )
        # The stream maps subjects to others that only the server knows: then every message is read.
        return (">",) if is_mapped else self._doubt.subjects

    def _absence_proves(self) -> bool:
        """True if a message stored since the batch began would still be there, unless deleted by hand."""
        first_sequence = self._state["first_seq"]
        return (
            self._config.get("retention", "limits") == "limits"
            and not self._doubt.may_expire
            and (first_sequence < self._since or first_sequence <= 1)
        )

    def _check_arrival(self) -> None:
        if self._doubt.may_still_arrive():
            raise BatchInDoubt(
                self._doubt.batch_id,
                "it is not stored, but its first message was never acknowledged and the connection was lost: it may "
                "still be on its way",
            )

    def _is_ours(self, message: StoredMessage) -> bool:
        return message.headers.get("Nats-Batch-Id") == self._doubt.batch_id

    def _ack(self, message: StoredMessage) -> PubAck:
        # A batch has consecutive sequences, so any of its messages gives the sequence of the last.
        try:
            number = int(message.headers["Nats-Batch-Sequence"])
        except (KeyError, ValueError):
            raise ProtocolError(f"message {message.sequence} has no place in its batch") from None
        size = self._doubt.size
        return PubAck(
            stream=self._stream,
            sequence=message.sequence + size - number,
            batch=self._doubt.batch_id,
            batch_size=size,
        )

    def _read(self, body: Mapping[str, Any]) -> Operation[StoredMessage | None]:
        self._reads += 1
        if self._reads > MAX_READS:
            raise BatchInDoubt(
                self._doubt.batch_id,
                f"{self._stream!r} was sent more than {MAX_READS} messages since: too many to look at",
            )
        try:
            return (yield from self._api.get_message(self._stream, body, direct=False))
        except MessageNotFound:
            return None
