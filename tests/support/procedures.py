"""A bucket and a stream in memory, and drivers that run procedures on them: no server, no clock, any fault at will."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from jetspark.core.headers import decode, encode
from jetspark.core.message import CoreMessage
from jetspark.core.step_runner import ReadClock, Sleep
from jetspark.core.subjects import matches
from jetspark.errors import BatchInDoubt, ConnectionLost, ConsumerNotFound, RequestTimeout, WrongLastSequence
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.operations import Api, Request
from jetspark.jetstream.pull import Ask, Puller, Wait
from jetspark.publish.fast_options import Refusal
from jetspark.publish.steps import (
    AskMany,
    ClosePull,
    Connect,
    IngestAll,
    IngestReport,
    OpenPull,
    Procedure,
    PublishEach,
    Pull,
)
from jetspark.state.deliveries import delivery

# How long a step takes, so that whoever waits gets older.
STEP_S = 0.001


class MemoryServer:
    """Runs procedures on what its subclass holds. Faults are drawn before a step, as often as ``faults`` says."""

    def __init__(self, faults: float, rng: random.Random | None) -> None:
        self.now, self._faults, self._rng = 0.0, faults, rng or random.Random(0)
        self.before_step: Callable[[Any], None] = lambda step: None

    def run(self, procedure: Procedure[Any]) -> Any:
        try:
            step = next(procedure)
            while True:
                self.now += STEP_S
                try:
                    answer = self._perform(step)
                except Exception as error:
                    step = procedure.throw(error)
                else:
                    step = procedure.send(answer)
        except StopIteration as finished:
            return finished.value

    def _perform(self, step: Any) -> Any:
        self.before_step(step)
        match step:
            case ReadClock():
                return self.now
            case Sleep(seconds):
                self.now += seconds
                return None
            case Connect():
                self._maybe(ConnectionLost("nobody is there"))
                return Api()
            case Request():
                self._maybe(RequestTimeout("a request", 1.0))
                return CoreMessage("_INBOX", json.dumps(self._answer(step)).encode(), None, None, None)
            case AskMany(answers):
                self._maybe(RequestTimeout("answers", 1.0))
                self._give(answers)
                return None
        return self._perform_own(step)

    def _perform_own(self, step: Any) -> Any:
        """A step that only some procedures have."""
        raise NotImplementedError

    def _answer(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def _give(self, answers: Any) -> None:
        raise NotImplementedError

    def _is_fault(self) -> bool:
        return self._rng.random() < self._faults

    def _maybe(self, error: Exception) -> None:
        if self._is_fault():
            raise error


class MemoryBucket(MemoryServer):
    """A stream ``KV_b``."""

    def __init__(self, *, is_batched: bool = True, faults: float = 0.0, rng: random.Random | None = None) -> None:
        super().__init__(faults, rng)
        self._is_batched = is_batched
        self.log: list[tuple[str, bytes, dict[str, str]]] = []
        """Every message that was ever stored: the revision is its place, from 1."""
        self.requests: list[str] = []
        self.lag: Callable[[], int] = lambda: 0
        """By how many messages the replica is behind that answers next; the leader never is."""
        self.answers_as = "KV_b"
        """The stream whose replica answers: the bucket's own, or a mirror of it."""

    def _perform_own(self, step: Any) -> Any:
        match step:
            case IngestAll(items):
                return self._ingest(list(items))
            case PublishEach(items):
                return [self._publish_one(*item) for item in items]
        raise AssertionError(step)

    def put(self, key: str, value: bytes, headers: dict[str, str] | None = None) -> int:
        self.log.append((f"$KV.b.{key}", value, headers or {}))
        return len(self.log)

    def remove(self, revision: int) -> None:
        self.log[revision - 1] = ("", b"", {})

    def last(self, subject: str, up_to: int | None = None) -> int:
        log = self.log if up_to is None else self.log[:up_to]
        return max((number for number, each in enumerate(log, start=1) if matches(subject, each[0])), default=0)

    def table(self) -> dict[str, tuple[bytes, int]]:
        """Key to value and sequence."""
        return {
            subject.removeprefix("$KV.b."): (value, int(headers.get("JetSpark-Sequence", 0)))
            for subject, value, headers in self.log
        }

    def _answer(self, request: Request) -> dict[str, Any]:
        self.requests.append(request.subject)
        if request.subject.endswith("STREAM.INFO.KV_b"):
            config = {"name": "KV_b", "subjects": ["$KV.b.>"], "allow_direct": True, "allow_batched": self._is_batched}
            state = {"messages": len(self.log), "last_seq": len(self.log)}
            return {"config": config, "state": state, "created": "2026-01-01T00:00:00Z"}
        asked = json.loads(request.data)
        revision = self.last(asked["last_by_subj"]) if "last_by_subj" in asked else asked["seq"]
        if not 0 < revision <= len(self.log) or not self.log[revision - 1][0]:
            return {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
        subject, value, headers = self.log[revision - 1]
        found = {"subject": subject, "seq": revision, "data": _base64(value), "time": "2026-01-01T00:00:00Z"}
        return {"message": found | ({"hdrs": _base64(encode(headers))} if headers else {})}

    def _give(self, answers: Any) -> None:
        request = answers.request()
        self.requests.append(request.subject)
        up_to = max(0, len(self.log) - self.lag())
        found = (self.last(each, up_to) for each in json.loads(request.data)["multi_last"])
        messages = list(self._messages(sorted(filter(None, found)), up_to))
        if self._is_fault():
            del messages[self._rng.randrange(len(messages))]
        for message in messages:
            answers.accept_all([message])
        if not answers.is_over:
            answers.lost()

    def _messages(self, revisions: list[int], up_to: int) -> Iterator[CoreMessage]:
        before = 0
        for revision in revisions:
            subject, value, headers = self.log[revision - 1]
            own = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
            block = (
                f"NATS/1.0\r\n{own}Nats-Stream: {self.answers_as}\r\nNats-Subject: {subject}\r\n"
                f"Nats-Sequence: {revision}\r\nNats-Last-Sequence: {before}\r\n\r\n"
            )
            yield CoreMessage("_INBOX", value, None, block.encode(), None)
            before = revision
        end = f"204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: {before}\r\nNats-UpTo-Sequence: {up_to}"
        yield CoreMessage("_INBOX", b"", None, f"NATS/1.0 {end if before else '404 No Results'}\r\n\r\n".encode(), None)

    def _store(
        self, subject: str, value: bytes, headers: bytes | dict[str, str] | None = None
    ) -> WrongLastSequence | None:
        if isinstance(headers, bytes):
            headers = dict(decode(headers).items())
        expected = (headers or {}).get("Nats-Expected-Last-Subject-Sequence")
        if expected is not None and int(expected) != self.last(subject):
            return WrongLastSequence(400, 10071, f"wrong last sequence: {self.last(subject)}")
        kept = {name: text for name, text in (headers or {}).items() if not name.startswith("Nats-Expected")}
        self.log.append((subject, value, kept))
        return None

    def _publish_one(self, subject: str, value: bytes, headers: dict[str, str] | None) -> Exception | None:
        if self._is_fault():
            if self._is_fault():
                self._store(subject, value, headers)
            return ConnectionLost("its answer is lost")
        return self._store(subject, value, headers)

    def _ingest(self, items: list[Any]) -> IngestReport:
        """A batch that ends in doubt has stored some of what is not acknowledged; one with a gap goes on after it."""
        arrived = self._rng.randrange(len(items) + 1) if self._is_fault() else len(items)
        missing: list[range] = []
        refusals: list[Refusal] = []
        acknowledged = arrived if arrived == len(items) else self._rng.randrange(arrived + 1)
        for number, item in enumerate(items[:arrived], start=1):
            if self._is_fault():
                missing.append(range(number, number + 1))
                if self._is_fault():
                    self._store(*item)  # in doubt, and stored
            elif (error := self._store(*item)) is not None and number <= acknowledged:
                refusals.append(Refusal(number, error))
        failure = None if arrived == len(items) else BatchInDoubt("", "the connection was lost", acknowledged)
        last = 0 if failure is not None else len(self.log)
        return IngestReport(acknowledged, tuple(missing), tuple(refusals), failure, last)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Source:
    """A consumer as a test's driver has it."""

    def __init__(self, position: int) -> None:
        self.puller: Puller[AckableMessage] = Puller("_INBOX.x", "$JS.API.CONSUMER.MSG.NEXT.S.c")
        self.position, self.sent = position, 0


class MemoryStream(MemoryServer):
    """A stream ``S`` that is read through pull consumers."""

    CREATED = "2026-01-01T00:00:00Z"

    def __init__(self, count: int, *, faults: float = 0.0, rng: random.Random | None = None) -> None:
        super().__init__(faults, rng)
        self.first, self.last, self.deleted = 1, count, set[int]()
        self.open = 0
        """Consumers that nobody has deleted."""
        self.opened = 0
        self.created, self.retention = self.CREATED, "limits"
        self._filters: list[str] = []

    def subject(self, sequence: int) -> str:
        return f"s.{sequence % 3}"

    def there(self, start: int = 1) -> list[int]:
        some = {number for number in range(3) if any(matches(each, self.subject(number)) for each in self._filters)}
        return [
            sequence
            for sequence in range(max(start, self.first), self.last + 1)
            if sequence not in self.deleted and (not self._filters or sequence % 3 in some)
        ]

    def read(self, scan: Any) -> list[int]:
        """The sequences of a scan's messages."""
        found: list[int] = []
        try:
            while (piece := self.run(scan.next())) is not None:
                found += [
                    each.sequence if isinstance(each, StoredMessage) else delivery(each).sequence for each in piece
                ]
        finally:
            self.run(scan.close())
        return found

    def _perform_own(self, step: Any) -> Any:
        match step:
            case OpenPull(info):
                self.open += 1
                self.opened += 1
                return Source(info.config.start_sequence or 1)
            case Pull(Source() as source, reader):
                return self._pull(source, reader)
            case ClosePull():
                self.open -= 1
                return None
        raise AssertionError(step)

    def _answer(self, request: Request) -> dict[str, Any]:
        asked = json.loads(request.data) if request.data else {}
        if ".STREAM.INFO." in request.subject:
            state = {"messages": len(self.there()), "first_seq": self.first, "last_seq": self.last}
            config = {"name": "S", "subjects": ["s.>"], "retention": self.retention, "allow_direct": True}
            return {"config": config, "state": state, "created": self.created}
        if ".CONSUMER.CREATE." in request.subject:
            config = asked["config"]
            self._filters = config.get("filter_subjects") or []
            pending = len(self.there(config["opt_start_seq"]))
            delivered = {"consumer_seq": 0, "stream_seq": 0}
            return {"stream_name": "S", "name": "c", "config": config, "num_pending": pending, "delivered": delivered}
        following = [each for each in self.there(asked["seq"]) if matches(asked["next_by_subj"], self.subject(each))]
        if not following:
            return {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
        found = {"subject": "s.0", "seq": following[0], "data": "", "time": self.CREATED}
        return {"message": found}

    def _give(self, answers: Any) -> None:
        """Messages by direct get, of which one may be lost, or all from one on."""
        asked = json.loads(answers.request().data)
        self._filters = [asked["next_by_subj"]] if "next_by_subj" in asked else []
        following = self.there(asked["seq"])
        sent, before, blocks = following[: asked["batch"]], 0, []
        for sequence in sent:
            place = f"Nats-Stream: S\r\nNats-Subject: {self.subject(sequence)}\r\nNats-Sequence: {sequence}\r\n"
            time = f"Nats-Time-Stamp: {self.CREATED}\r\nNats-Last-Sequence: {before}\r\n"
            blocks.append(f"NATS/1.0\r\n{place}{time}\r\n")
            before = sequence
        left = len(following) - len(sent)
        end = f"204 EOB\r\nNats-Num-Pending: {left}\r\nNats-Last-Sequence: {before}" if sent else "404 No Results"
        blocks.append(f"NATS/1.0 {end}\r\n\r\n")
        if self._is_fault():
            del blocks[self._rng.randrange(len(blocks)) :]
        elif self._is_fault():
            del blocks[self._rng.randrange(len(blocks))]
        for block in blocks:
            if not answers.is_over:
                answers.accept_all([CoreMessage("_INBOX", b"x", None, block.encode(), None)])
        if not answers.is_over:
            answers.lost()

    def _pull(self, source: Source, reader: Any) -> list[Any]:
        puller = source.puller
        while isinstance(step := reader.step(self.now, 1), Ask):
            pass
        fault = self._rng.choice(["gone", "lost", "cut", "silent"]) if self._is_fault() else ""
        if fault == "gone":
            raise ConsumerNotFound(404, 10014, "consumer not found")
        if fault == "cut":
            raise ConnectionLost("cut")
        following = self.there(source.position)
        sent = following[: min(puller.owed, self._rng.randrange(1, 40))]
        if fault == "silent" or not sent:
            assert isinstance(step, Wait)
            self.now = max(self.now, step.until or 0.0)
            puller.on_time(self.now)
            return []
        messages = []
        for number, sequence in enumerate(sent, start=1):
            source.sent += 1
            reply = f"$JS.ACK.S.c.1.{sequence}.{source.sent}.0.{len(following) - number}"
            messages.append(AckableMessage(self.subject(sequence), b"x", reply.encode(), None, None))
        source.position = sent[-1] + 1
        if fault == "lost":
            del messages[self._rng.randrange(len(messages))]
        puller.absorb(messages, self.now)
        found = list(puller.buffer)
        puller.buffer.clear()
        return found
