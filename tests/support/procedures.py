"""A bucket in memory, and a driver that runs procedures on it: no server, no clock, and any fault at will."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from jetspark.core.headers import encode
from jetspark.core.message import CoreMessage
from jetspark.errors import BatchInDoubt, ConnectionLost, RequestTimeout, WrongLastSequence
from jetspark.jetstream.operations import Api, Pause, Request
from jetspark.publish.fast_options import Refusal
from jetspark.publish.steps import AskMany, Connect, Ingest, IngestReport, Now, Procedure, PublishEach, RandomPause

# How long a step takes, so that whoever waits gets older.
STEP_S = 0.001


class MemoryBucket:
    """A stream ``KV_b``, and its faults: each is drawn before a step, as often as ``faults`` says."""

    def __init__(self, *, is_batched: bool = True, faults: float = 0.0, rng: random.Random | None = None) -> None:
        self.now, self._is_batched = 0.0, is_batched
        self._faults, self._rng = faults, rng or random.Random(0)
        self.log: list[tuple[str, bytes, dict[str, str]]] = []
        """Every message that was ever stored: the revision is its place, from 1."""
        self.before_step: Callable[[Any], None] = lambda step: None
        self.requests: list[str] = []

    # ---- the driver --------------------------------------------------------------------------------------------

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
            case Now():
                return self.now
            case Pause(seconds) | RandomPause(seconds):
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
            case Ingest(items):
                return self._ingest(list(items))
            case PublishEach(items):
                return [self._publish_one(*item) for item in items]
        raise AssertionError(step)

    def _is_fault(self) -> bool:
        return self._rng.random() < self._faults

    def _maybe(self, error: Exception) -> None:
        if self._is_fault():
            raise error

    # ---- the bucket --------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, headers: dict[str, str] | None = None) -> int:
        self.log.append((f"$KV.b.{key}", value, headers or {}))
        return len(self.log)

    def last(self, subject: str) -> int:
        return max((number for number, each in enumerate(self.log, start=1) if each[0] == subject), default=0)

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
            return {"config": config, "state": {"messages": len(self.log), "last_seq": len(self.log)}}
        revision = self.last(json.loads(request.data)["last_by_subj"])
        if not revision:
            return {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
        subject, value, headers = self.log[revision - 1]
        found = {"subject": subject, "seq": revision, "data": _base64(value), "time": "2026-01-01T00:00:00Z"}
        return {"message": found | ({"hdrs": _base64(encode(headers))} if headers else {})}

    def _give(self, answers: Any) -> None:
        request = answers.request()
        self.requests.append(request.subject)
        asked = sorted(filter(None, map(self.last, json.loads(request.data)["multi_last"])))
        messages = list(self._messages(asked))
        if self._is_fault():
            del messages[self._rng.randrange(len(messages))]
        for message in messages:
            answers.accept(message)
        if not answers.is_over:
            answers.lost()

    def _messages(self, revisions: list[int]) -> Iterator[CoreMessage]:
        before = 0
        for revision in revisions:
            subject, value, headers = self.log[revision - 1]
            own = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
            block = (
                f"NATS/1.0\r\n{own}Nats-Subject: {subject}\r\nNats-Sequence: {revision}\r\n"
                f"Nats-Last-Sequence: {before}\r\n\r\n"
            )
            yield CoreMessage("_INBOX", value, None, block.encode(), None)
            before = revision
        end = f"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: {before}\r\n\r\n" if before else None
        yield CoreMessage("_INBOX", b"", None, (end or "NATS/1.0 404 No Results\r\n\r\n").encode(), None)

    def _store(self, subject: str, value: bytes, headers: dict[str, str] | None) -> WrongLastSequence | None:
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
        return IngestReport(acknowledged, tuple(missing), tuple(refusals), failure)


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()
