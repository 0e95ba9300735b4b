"""A bucket in memory that is read through consumers. A replica may be behind, and messages may be lost on the way."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jetspark.core.subjects import matches
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.operations import Request
from jetspark.jetstream.pull import Ask, Wait
from jetspark.publish.steps import ClosePull, OpenPull, Pull
from support.procedures import MemoryServer, Source

# Large enough for readers who want no data to ask for headers only.
MESSAGE_BYTES = 10_000
CREATED = "2026-01-01T00:00:00Z"
NOT_FOUND = {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}


class _Consumer(Source):
    """The last message of each subject at its beginning, and then what is new; or everything from a sequence on."""

    def __init__(self, config: dict[str, Any], there: list[int], last_of_each: set[int]) -> None:
        super().__init__(config.get("opt_start_seq", 1))
        self.config = config
        is_last_only = config["deliver_policy"] == "last_per_subject"
        self.left_out = {each for each in there if each not in last_of_each} if is_last_only else set[int]()
        self.late: list[Any] = []
        """Sent, and still on the way."""


class MemoryTable(MemoryServer):
    """A stream ``KV_b``, read in pieces of two messages."""

    def __init__(self, *, history: int | None = 1, mirror_of: str | None = None) -> None:
        super().__init__(0.0, None)
        self.history, self.created = history, CREATED
        self._mirror_of = mirror_of
        self.kept: dict[int, tuple[str, bytes | None]] = {}
        """Subject and headers by sequence."""
        self.last = 0
        self.hidden = 0
        """How many of the last messages the replica that is read does not have yet."""
        self.lost = self.delayed = 0
        """How many of the next messages do not arrive, or one pull later."""
        self.consumers: list[_Consumer] = []
        self.closed = 0
        self.requests: list[str] = []

    def put(self, key: str, *headers: str) -> int:
        """Headers as ``Name: value``; the values are of no interest."""
        self.last += 1
        subject = f"$KV.b.{key}"
        block = "".join(f"{each}\r\n" for each in headers)
        self.kept[self.last] = (subject, f"NATS/1.0\r\n{block}\r\n".encode() if headers else None)
        of_key = [sequence for sequence, (each, _) in self.kept.items() if each == subject]
        for sequence in of_key[: -self.history] if self.history else []:
            del self.kept[sequence]
        return self.last

    def _matching(self, filters: Iterable[str], up_to: int) -> list[int]:
        return [
            sequence
            for sequence, (subject, _) in self.kept.items()
            if sequence <= up_to and any(matches(each, subject) for each in filters)
        ]

    def _pending(self, consumer: _Consumer) -> list[int]:
        there = self._matching(consumer.config["filter_subjects"], self.last - self.hidden)
        return [each for each in there if each >= consumer.position and each not in consumer.left_out]

    # ---- what is asked -------------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> dict[str, Any]:
        kind = request.subject.removeprefix("$JS.API.").partition(".KV_b")[0]
        self.requests.append(kind)
        asked = json.loads(request.data) if request.data else {}
        match kind:
            case "STREAM.INFO":
                return self._stream_info(asked.get("subjects_filter"))
            case "CONSUMER.CREATE":
                return self._create(asked["config"])
            case "CONSUMER.INFO":
                return self._consumer_info(self.consumers[-1])
            case "STREAM.MSG.GET":
                return self._message(asked)
        raise AssertionError(request)

    def _stream_info(self, filter_: str | None) -> dict[str, Any]:
        config: dict[str, Any] = {"name": "KV_b", "allow_direct": True}
        if self.history is not None:
            config["max_msgs_per_subject"] = self.history
        if self._mirror_of is not None:
            config["mirror"] = {"name": self._mirror_of}
        state: dict[str, Any] = {"first_seq": min(self.kept, default=self.last + 1), "last_seq": self.last}
        state["bytes"] = MESSAGE_BYTES * len(self.kept)
        if filter_ is not None:
            state["subjects"] = Counter(self.kept[each][0] for each in self._matching([filter_], self.last))
        return {"config": config, "state": state, "created": self.created, "total": len(self.kept)}

    def _create(self, config: dict[str, Any]) -> dict[str, Any]:
        there = self._matching(config["filter_subjects"], self.last - self.hidden)
        last_of_each = {self.kept[each][0]: each for each in there}
        self.consumers.append(_Consumer(config, there, set(last_of_each.values())))
        return self._consumer_info(self.consumers[-1])

    def _consumer_info(self, consumer: _Consumer) -> dict[str, Any]:
        delivered = {"consumer_seq": consumer.sent, "stream_seq": consumer.position - 1}
        answer = {"stream_name": "KV_b", "name": "c", "config": consumer.config, "delivered": delivered}
        return answer | {"num_pending": len(self._pending(consumer))}

    def _message(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "last_by_subj" in asked:
            found = self._matching([asked["last_by_subj"]], self.last)[-1:]
        else:
            found = [each for each in self._matching([asked["next_by_subj"]], self.last) if each >= asked["seq"]]
        if not found:
            return NOT_FOUND
        return {"message": self._stored(found[0])}

    def _stored(self, sequence: int) -> dict[str, Any]:
        subject, headers = self.kept[sequence]
        stored = {"subject": subject, "seq": sequence, "time": CREATED}
        return stored if headers is None else stored | {"hdrs": base64.b64encode(headers).decode()}

    # ---- what is read --------------------------------------------------------------------------------------------

    def _perform_own(self, step: Any) -> Any:
        match step:
            case OpenPull(ConsumerInfo()):
                return self.consumers[-1]
            case Pull(_Consumer() as consumer, reader):
                return self._pull(consumer, reader)
            case ClosePull():
                self.closed += 1
                return None
        raise AssertionError(step)

    def _pull(self, consumer: _Consumer, reader: Any) -> list[Any]:
        puller = consumer.puller
        while isinstance(step := reader.step(self.now, 1), Ask):
            pass
        messages, consumer.late = consumer.late, []
        if not messages:
            messages = self.send(consumer, min(2, puller.owed))
        if self.lost:
            self.lost, messages = self.lost - 1, messages[:-1]
        if self.delayed:
            self.delayed, consumer.late, messages = self.delayed - 1, messages[-1:], messages[:-1]
        if not messages:
            assert isinstance(step, Wait)
            assert step.until is not None
            self.now = max(self.now, step.until)
            puller.on_time(self.now)
            return []
        puller.absorb(messages, self.now)
        found = list(puller.buffer)
        puller.buffer.clear()
        return found

    def send(self, consumer: _Consumer, count: int) -> list[Any]:
        """The consumer's next messages, which then count as delivered."""
        messages, pending = [], self._pending(consumer)
        for number, sequence in enumerate(pending[:count], start=1):
            consumer.sent += 1
            consumer.position = sequence + 1
            reply = f"$JS.ACK.KV_b.c.1.{sequence}.{consumer.sent}.0.{len(pending) - number}"
            subject, headers = self.kept[sequence]
            messages.append(AckableMessage(subject, b"", reply.encode(), headers, None))
        return messages
